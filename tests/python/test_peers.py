"""bench/peers.py: what `narrows bench` times computes attention."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "peers.py"
spec = importlib.util.spec_from_file_location("peers", SCRIPT)
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)

PACKAGES = {"three_kernel": ["numpy"], "onnxruntime": ["onnx", "onnxruntime"], "torch": ["torch"]}
LIMITS = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 4e-2}


def row(**changes):
    plain = {"op": "forward", "dtype": "fp32", "b": 2, "h": 4, "hk": 4, "sq": 24, "sk": 24, "d": 16, "dv": 16}
    return {**plain, "causal": False, "case": "", "threads": 2, **changes}


def made(name, wanted):
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    return peers.PEERS[name](wanted)


def probabilities(wanted, q, k):
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(wanted["d"])
    if wanted["case"] == "softcap":
        scores = 30 * np.tanh(scores / 30)
    bias = peers.bias_of(wanted)
    if bias is not None:
        scores = scores + bias
    keys, positions = np.arange(wanted["sk"]), np.arange(wanted["sq"])[:, None] + wanted["sk"] - wanted["sq"]
    if wanted["causal"]:
        scores = np.where(keys <= positions, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def tensors(name, wanted):
    """q, k, v and dout as the peer made them, heads second, in fp64."""
    b, h, hk, sq, sk, d = (wanted[each] for each in ("b", "h", "hk", "sq", "sk", "d"))
    if name == "three_kernel":
        shapes = [(b, h, sq, d), (b, hk, sk, d), (b, hk, sk, d)]
        q, k, v = (peers.normal(shape, seed) for seed, shape in enumerate(shapes, 1))
    else:
        shapes = [(b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d)]
        q, k, v = (peers.normal(shape, seed).transpose(0, 2, 1, 3) for seed, shape in enumerate(shapes, 1))
    dout = peers.normal((b, h, sq, d), 6)
    k, v = (np.repeat(each, h // hk, 1) for each in (k, v))
    return [each.astype(np.float64) for each in (q, k, v, dout)]


def heads_second(name, result, wanted):
    result = np.asarray(result.float() if name == "torch" else result, np.float64)
    if name != "onnxruntime":
        return result
    return result.reshape(wanted["b"], wanted["sq"], wanted["h"], -1).transpose(0, 2, 1, 3)


CASES = [
    ("three_kernel", row()),
    ("three_kernel", row(causal=True, sq=8)),
    ("three_kernel", row(case="bias", hk=2)),
    ("three_kernel", row(case="mask")),
    ("three_kernel", row(case="alibi")),
    ("three_kernel", row(op="decode", sq=1, hk=1)),
    ("onnxruntime", row()),
    ("onnxruntime", row(causal=True)),
    ("onnxruntime", row(causal=True, hk=2, case="gqa4")),
    ("onnxruntime", row(causal=True, case="softcap")),
    ("onnxruntime", row(case="bias")),
    ("onnxruntime", row(case="mask")),
    ("onnxruntime", row(dtype="fp16")),
    ("onnxruntime", row(dtype="fp16", causal=True)),
    ("torch", row()),
    ("torch", row(causal=True)),
    ("torch", row(case="bias")),
    ("torch", row(case="mask")),
    ("torch", row(case="gqa4", hk=2)),
    ("torch", row(dtype="bf16")),
    ("torch", row(op="decode", sq=1, hk=1, dtype="fp16")),
]


@pytest.mark.parametrize(("name", "wanted"), CASES, ids=str)
def test_a_peer_computes_attention(name, wanted):
    peer = made(name, wanted)
    peer.run()
    q, k, v, _ = tensors(name, wanted)
    expected = probabilities(wanted, q, k) @ v
    np.testing.assert_allclose(heads_second(name, peer.result(), wanted), expected, atol=LIMITS[wanted["dtype"]])


def test_a_peer_decodes_with_the_newest_key_in_its_cache():
    wanted = row(op="decode", sq=1, hk=2)
    peer = made("onnxruntime", wanted)
    peer.run()
    b, h, hk, sk, d = (wanted[each] for each in ("b", "h", "hk", "sk", "d"))
    q = peers.normal((b, 1, h * d), 1).reshape(b, 1, h, d).transpose(0, 2, 1, 3)
    cache = [peers.normal((b, hk, sk, d), seed) for seed in (2, 3)]
    for each, seed in zip(cache, (2, 3)):
        each[:, :, -1] = peers.normal((b, sk, hk * d), seed)[:, 0].reshape(b, hk, d)
    k, v = (np.repeat(each, h // hk, 1) for each in cache)
    expected = probabilities(wanted, q, k) @ v
    np.testing.assert_allclose(heads_second("onnxruntime", peer.result(), wanted), expected, atol=2e-5)


@pytest.mark.parametrize("name", ["three_kernel", "torch"])
@pytest.mark.parametrize("wanted", [row(op="backward"), row(op="backward", causal=True, hk=2)], ids=str)
def test_a_peer_computes_gradients(name, wanted):
    peer = made(name, wanted)
    for _ in range(2):  # results are written, not added to
        peer.run()
    q, k, v, dout = tensors(name, wanted)
    p = probabilities(wanted, q, k)
    dp = dout @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(wanted["d"])
    b, hk, group = wanted["b"], wanted["hk"], wanted["h"] // wanted["hk"]

    def of_group(gradient):
        return gradient.reshape(b, hk, group, *gradient.shape[2:]).sum(2)

    expected = ds @ k, of_group(ds.transpose(0, 1, 3, 2) @ q), of_group(p.transpose(0, 1, 3, 2) @ dout)
    for got, wanted_gradient in zip(peer.result(), expected):
        np.testing.assert_allclose(heads_second(name, got, wanted), wanted_gradient, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("three_kernel", row(dtype="bf16")),
        ("three_kernel", row(sq=1 << 16, sk=1 << 16)),
        ("onnxruntime", row(op="backward")),
        ("onnxruntime", row(case="varlen")),
        ("torch", row(case="softcap")),
    ],
    ids=str,
)
def test_a_peer_does_not_claim_what_it_cannot_do(name, wanted):
    with pytest.raises(peers.NotClaimed):
        made(name, wanted)


def test_the_server_says_what_failed_and_goes_on(monkeypatch):
    class Broken:
        version = staticmethod(lambda: "1")

        def __init__(self, wanted):
            if wanted["causal"]:
                raise ValueError("no\nway")

        def run(self):
            raise MemoryError("full")

    monkeypatch.setattr(peers, "PEERS", {"broken": Broken, "three_kernel": peers.ThreeKernel})
    server = peers.Server()
    assert set(server.hello()["peers"]) == {"broken", "three_kernel"}
    answer = server.answer({"id": 7, "do": "prepare", "row": row(causal=True)})
    assert answer == {"id": 7, "ready": ["three_kernel"], "failed": {"broken": "ValueError: no"}}
    answer = server.answer({"id": 7, "do": "prepare", "row": row()})
    assert answer == {"id": 7, "ready": ["broken", "three_kernel"], "failed": {}}
    assert server.answer({"id": 7, "do": "time", "peer": "broken", "seconds": 0}) == {"id": 7, "error": "MemoryError: full"}
    times = server.answer({"id": 7, "do": "time", "peer": "three_kernel", "seconds": 0})["ms"]
    assert len(times) == 1 and times[0] > 0
