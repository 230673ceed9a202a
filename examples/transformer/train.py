#!/usr/bin/env python3
"""Trains the same small transformer once with each attention, from the same seed on the same batches, and compares.

train.py [--steps 200] [--device cpu|cuda] [--runs torch narrows ...] [--json FILE] [--plot FILE.png]

A character model of this repository's own pages: a few causal layers with heads of 64, in bf16 (autocast) on a GPU, in
fp32 on the CPU. Runs:

    torch          torch.nn.functional.scaled_dot_product_attention as it chooses
    narrows        narrows.torch.attention
    three_kernels  softmax(Q K^T) V as three calls: the scores are stored
    flash, efficient, cudnn    scaled_dot_product_attention made to take that backend

Two of PyTorch's own never agree in every bit, and training spreads a difference; how far their loss curves come apart
is the noise by which narrows' distance from `torch` is judged. The exit code is 1 if its mean over the steps is more
than twice the largest mean distance between two of PyTorch's own.
"""

import argparse
import hashlib
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import narrows.torch

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM = 64
PRINTED = 20  # every so many steps
WARM_UP = 20  # steps that are not timed: kernels are compiled, memory is taken
SIZES = {  # layers, heads, tokens of a sequence, sequences of a batch
    "cuda": {"layers": 4, "heads": 8, "context": 2048, "batch": 8},
    "cpu": {"layers": 2, "heads": 2, "context": 128, "batch": 4},
}
RUNS = {
    "cuda": ["torch", "narrows", "three_kernels", "flash", "efficient", "cudnn"],
    "cpu": ["torch", "narrows", "three_kernels"],  # where `torch` is `flash`
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


# ------------------------------------------------------------------------------ attention of (batch, length, heads, 64)


def by_torch(q, k, v):
    o = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2)


def by_narrows(q, k, v):
    return narrows.torch.attention(q, k, v, causal=True)


def by_three_kernels(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
    later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return (s.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def by_backend(backend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return by_torch(q, k, v)

    return attend


ATTENTION = {
    "torch": by_torch,
    "narrows": by_narrows,
    "three_kernels": by_three_kernels,
    **{name: by_backend(backend) for name, backend in BACKENDS.items()},
}


# ---------------------------------------------------------------------------------------------------------------- model


class Layer(nn.Module):
    def __init__(self, heads, attend):
        super().__init__()
        width = heads * HEAD_DIM
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, HEAD_DIM)).unbind(2)  # strided views
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.narrow(gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, letters, layers, heads, context, attend):
        super().__init__()
        width = heads * HEAD_DIM
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(heads, attend) for _ in range(layers)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, text):
        x = self.letter(text) + self.place.weight
        return self.logits(self.norm(self.layers(x)))


def own_text():
    """The repository's pages, as one text."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.txt")])
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


# ------------------------------------------------------------------------------------------------------------- training


def train(name, codes, letters, device, arguments):
    """Losses of each step, tokens a second and, on a GPU, the most bytes in use at once beside what was before."""
    torch.manual_seed(arguments.seed)
    batches = torch.Generator().manual_seed(arguments.seed)
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = Transformer(letters, arguments.layers, arguments.heads, arguments.context, ATTENTION[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses, started, warm = [], 0.0, min(WARM_UP, arguments.steps // 2)
    for step in range(arguments.steps):
        if step == warm:
            wait(device)
            started = time.perf_counter()
        starts = torch.randint(len(codes) - arguments.context, (arguments.batch,), generator=batches)
        rows = torch.stack([codes[start : start + arguments.context + 1] for start in starts.tolist()]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    wait(device)
    seconds = time.perf_counter() - started
    tokens = (arguments.steps - warm) * arguments.batch * arguments.context
    return {
        "losses": torch.stack(losses).tolist(),
        "tokens_per_second": tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
    }


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def distance(a, b):
    """Of two loss curves."""
    apart = [abs(x - y) for x, y in zip(a["losses"], b["losses"])]
    return {"mean": sum(apart) / len(apart), "max": max(apart)}


def compared(runs):
    """Distances of each two runs, and whether narrows is as near to torch as PyTorch's own are to each other."""
    apart = {f"{a} {b}": distance(runs[a], runs[b]) for a, b in itertools.combinations(runs, 2)}
    own = {pair: each["mean"] for pair, each in apart.items() if "narrows" not in pair.split()}
    result = {"distances": apart}
    judged = apart.get("torch narrows") or apart.get("narrows torch")
    if judged and own:
        widest = max(own, key=own.get)
        result.update(noise=own[widest], noise_of=widest, narrows=judged["mean"])
        result["within_noise"] = judged["mean"] <= 2 * own[widest]
    return result


# --------------------------------------------------------------------------------------------------------------- report


def report(result):
    runs = result["runs"]
    columns = "".join(f"{name:>15}" for name in runs)
    print(f"\n loss of step{columns}")
    steps = range(result["settings"]["steps"])
    for step in [step for step in steps if step % PRINTED == 0 or step == steps[-1]]:
        print(f"{step:13}" + "".join(f"{run['losses'][step]:15.5f}" for run in runs.values()))
    print(f"\n             {columns}")
    print("   tokens / s" + "".join(f"{run['tokens_per_second']:15,.0f}" for run in runs.values()))
    peaks = [run["peak_bytes"] for run in runs.values()]
    print(" peak memory " + "".join(f"{'-' if peak is None else f'{peak / 1e6:,.1f} MB':>15}" for peak in peaks))
    print("\nloss curves apart       mean over the steps            largest")
    for pair, apart in sorted(result["distances"].items(), key=lambda item: "narrows" in item[0].split()):
        print(f"{pair:28}{apart['mean']:15.3e}{apart['max']:19.3e}")
    if "noise" in result:
        verdict = "within" if result["within_noise"] else "BEYOND"
        print(
            f"\nnarrows is {result['narrows']:.3e} from torch in the mean; PyTorch's own runs are at most "
            f"{result['noise']:.3e} from each other ({result['noise_of']}): {verdict} twice the noise"
        )
    for name, reason in result["left_out"].items():
        print(f"left out: {name}: {reason}")


def plot(result, path):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (curves, apart) = plt.subplots(1, 2, figsize=(11, 4))
    for colour, (name, run) in enumerate(result["runs"].items()):
        curves.plot(run["losses"], f"C{colour}", label=name, linewidth=1)
        if name != "torch" and "torch" in result["runs"]:
            difference = [abs(x - y) for x, y in zip(run["losses"], result["runs"]["torch"]["losses"])]
            width = 2 if name == "narrows" else 1
            apart.semilogy(difference, f"C{colour}", label=f"{name} - torch", linewidth=width)
    curves.set(title="loss", xlabel="step")
    apart.set(title="distance of the loss from torch's", xlabel="step")
    for axes in (curves, apart):
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parsed(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", nargs="+", choices=list(ATTENTION))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    for size in SIZES["cpu"]:
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(words)
    for size, value in SIZES[arguments.device].items():
        if getattr(arguments, size) is None:
            setattr(arguments, size, value)
    if arguments.steps < 1:
        parser.error("--steps: must be at least 1")
    return arguments


def main(words=None):
    arguments = parsed(words)
    device = torch.device(arguments.device)
    text = own_text()
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(letter) for letter in text])
    settings = {name: getattr(arguments, name) for name in ("device", "steps", "seed", *SIZES["cpu"])}
    settings.update(
        dtype="bf16" if device.type == "cuda" else "fp32",
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        letters=len(text),
        torch=torch.__version__,
        narrows=narrows.__version__,
        device_name=torch.cuda.get_device_name() if device.type == "cuda" else narrows.info().cpu,
    )
    print(", ".join(f"{name} {value}" for name, value in settings.items() if name != "text_sha256"))
    first = argparse.Namespace(**{**vars(arguments), "steps": 2})
    train("torch", codes, len(alphabet), device, first)  # libraries take their memory
    result = {"settings": settings, "runs": {}, "left_out": {}}
    for name in dict.fromkeys(arguments.runs or RUNS[arguments.device]):
        print(f"training: {name}", file=sys.stderr)
        try:
            result["runs"][name] = train(name, codes, len(alphabet), device, arguments)
        except RuntimeError as error:
            if name in ("torch", "narrows"):
                raise
            result["left_out"][name] = str(error).splitlines()[0]
    result.update(compared(result["runs"]))
    report(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)
    return 0 if result.get("within_noise", True) else 1


if __name__ == "__main__":
    sys.exit(main())
