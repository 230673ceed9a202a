#!/usr/bin/env python3
"""Times narrows.attention against attention as three kernels in NumPy: S = QK^T, P = softmax(S), O = PV.

Both run in this process, turn about, on the same number of threads. NumPy's form is the best that we know how to write
with its wheel: heads spread over threads, each with one BLAS thread and one S that it reuses; scale folded into Q; softmax
in place; its division left to O. Prints a JSON object a row on stdout, progress on stderr. Exits 1 if NumPy was faster.
"""

import os
import sys


def restart_with_clean_blas():
    """OpenBLAS reads its environment when NumPy is imported: its own choice of kernel, one thread a call."""
    clean = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    clean["OPENBLAS_NUM_THREADS"] = "1"
    if clean != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], clean)


if __name__ == "__main__":
    restart_with_clean_blas()

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import narrows


class ThreeKernel:
    """Attention of one (b, s, h, d) problem, memory allocated ahead."""

    def __init__(self, q, k, v, causal, threads):
        self.q, self.k, self.v = q, k, v
        batch, rows, heads, head_dim = q.shape
        self.heads = [(b, h) for b in range(batch) for h in range(heads)]
        self.scale = np.float32(head_dim**-0.5)
        self.hidden = np.triu(np.ones((rows, k.shape[1]), bool), 1) if causal else None
        self.scores = [np.empty((rows, k.shape[1]), np.float32) for _ in range(threads)]
        self.o = np.empty((*q.shape[:-1], v.shape[-1]), np.float32)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)

    def run(self):
        list(self.pool.map(self.share, range(self.threads)))
        return self.o

    def share(self, thread):
        s = self.scores[thread]
        for b, h in self.heads[thread :: self.threads]:
            np.matmul(self.q[b, :, h] * self.scale, self.k[b, :, h].T, out=s)
            if self.hidden is not None:
                np.copyto(s, -np.inf, where=self.hidden)
            s -= s.max(axis=1, keepdims=True)
            np.exp(s, out=s)
            o = s @ self.v[b, :, h]
            o /= s.sum(axis=1, keepdims=True)
            self.o[b, :, h] = o


def timed(function):
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def measure(arguments, causal):
    shape = (1, arguments.sequence, arguments.heads, arguments.head_dim)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal(shape, np.float32) for _ in range(3))
    o = np.empty_like(q)
    three_kernel = ThreeKernel(q, k, v, causal, arguments.threads)

    def fused():
        narrows.attention(q, k, v, causal=causal, threads=arguments.threads, o=o)

    fused()
    difference = float(np.abs(three_kernel.run() - o).max())  # both have run once: memory and threads are warm
    if not difference < 1e-5:
        raise SystemExit(f"the two disagree by {difference}")
    times = {"narrows": [], "three_kernel": []}
    for turn in range(arguments.repeats):
        times["three_kernel"].append(timed(three_kernel.run))
        times["narrows"].append(timed(fused))
        print(f"{turn + 1}/{arguments.repeats}", *(f"{name} {ms[-1]:.1f} ms" for name, ms in times.items()),
              sep="  ", file=sys.stderr)  # fmt: skip
    return {name: float(np.median(ms)) for name, ms in times.items()}


def peak_tflops(arguments):
    """The rate that narrows measured for this CPU's multiply-adds: what it predicts a compute-bound problem to run at."""
    x = np.broadcast_to(np.float32(0), (1, 16384, 1, 128))
    cost = narrows.explain(x, x, x, threads=arguments.threads)
    assert cost.limited_by == "compute"
    return cost.flops / cost.predicted_seconds / 1e12


def row(arguments, causal):
    ms = measure(arguments, causal)
    peak = peak_tflops(arguments)
    d, s, h = arguments.head_dim, arguments.sequence, arguments.heads
    pairs = h * s * s / (2 if causal else 1)
    ours, theirs = ms["narrows"], ms["three_kernel"]
    tflops = 4 * d * pairs / ours / 1e9
    return {
        "op": "forward", "backend": "cpu", "family": "cpu", "dtype": "fp32", "b": 1, "h": h, "hk": h, "sq": s, "sk": s,
        "d": d, "dv": d, "causal": causal, "case": "", "threads": arguments.threads, "ms": round(ours, 3),
        "tflops": round(tflops, 4), "peak": round(peak, 4), "fraction": round(tflops / peak, 4), "peers": {"three_kernel": round(theirs, 3)},
        "against": "three_kernel", "ratio": round(theirs / ours, 3),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both; default every core")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each; the median counts")
    arguments = parser.parse_args()
    rows = [row(arguments, causal) for causal in (False, True)]
    for each in rows:
        print(json.dumps(each))
    return 0 if all(each["ratio"] > 1 for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
