#!/usr/bin/env python3
"""Decodes for sequences that begin with the same tokens, reading those tokens' keys once for all of them.

cascade.py [--device cpu|cuda] [--sequences 16] [--prefix 8192] [--own 512] [--heads 32] [--kv-heads 8]

A system prompt, the document that all questions are about, the tree of a beam search: their keys and values are the same for every
sequence of the batch. Attention over all keys is attention over the shared ones merged with attention over each sequence's own:

    plain    one call, whose caches hold the prefix once for each sequence
    cascade  one call for the prefix, with the queries of all sequences as the rows of one; one for the own keys; narrows.merge

Prints the largest difference between the two, the bytes of keys and values that each reads, and the time of each. The exit code is 1
if they differ by more than rounding. On the CPU in fp32 with NumPy, on a GPU in bf16 with PyTorch.
"""

import argparse
import statistics
import sys
import time

import numpy as np

import narrows

HEAD_DIM, REPEATS = 128, 20
SIZES = {"cuda": {"sequences": 16, "prefix": 8192, "own": 512}, "cpu": {"sequences": 8, "prefix": 2048, "own": 128}}
TOLERANCE = {"cuda": 4e-3, "cpu": 2e-6}  # of a mean of many values of size one


class NumPy:
    """fp32 arrays of the CPU."""

    itemsize = 4

    def __init__(self):
        self.random = np.random.default_rng(0)

    def normal(self, *shape):
        return self.random.standard_normal(shape, dtype=np.float32)

    def lengths(self, values):
        return np.array(values, np.int32)

    def join(self, prefix, own):
        """(sequences, prefix + own, hk, d): a cache for each sequence, the prefix copied into each."""
        return np.concatenate([np.broadcast_to(prefix, (len(own), *prefix.shape[1:])), own], axis=1)

    def wait(self):
        pass


class Torch:
    """bf16 tensors of the current GPU."""

    itemsize = 2

    def __init__(self):
        import torch

        self.torch = torch
        torch.manual_seed(0)

    def normal(self, *shape):
        return self.torch.randn(shape, device="cuda", dtype=self.torch.bfloat16)

    def lengths(self, values):
        return self.torch.tensor(values, device="cuda", dtype=self.torch.int32)

    def join(self, prefix, own):
        return self.torch.cat([prefix.expand(len(own), -1, -1, -1), own], dim=1)

    def wait(self):
        self.torch.cuda.synchronize()


def cascade(q, prefix_k, prefix_v, own_k, own_v, own_lengths):
    """q (b, 1, h, d), the prefix (1, prefix, hk, d), the own keys (b, capacity, hk, d): (O (b, 1, h, d), LSE (b, h, 1))"""
    b, _, h, d = q.shape
    # A query row of the prefix's one sequence for each sequence of the batch. All come after the whole prefix: no causal rule.
    shared, shared_lse = narrows.attention(q.reshape(1, b, h, d), prefix_k, prefix_v, return_lse=True)
    own, own_lse = narrows.attention_with_cache(q, own_k, own_v, cache_seqlens=own_lengths, return_lse=True)
    return narrows.merge([(shared.reshape(b, 1, h, d), shared_lse.swapaxes(0, 2)), (own, own_lse)])


def median_time(arrays, call):
    call()
    times = []
    for _ in range(REPEATS):
        arrays.wait()
        start = time.perf_counter()
        call()
        arrays.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    for name, value in SIZES["cuda"].items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value} on a GPU, {SIZES['cpu'][name]} on the CPU")
    options = parser.parse_args(arguments)
    for name, value in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(arguments=None):
    options = parsed(arguments)
    b, prefix, own, hk = options.sequences, options.prefix, options.own, options.kv_heads
    arrays = Torch() if options.device == "cuda" else NumPy()
    q = arrays.normal(b, 1, options.heads, HEAD_DIM)
    prefix_k, prefix_v = (arrays.normal(1, prefix, hk, HEAD_DIM) for _ in "kv")
    own_k, own_v = (arrays.normal(b, own, hk, HEAD_DIM) for _ in "kv")
    own_list = [own - own * i // (2 * b) for i in range(b)]  # from own down to half of it
    own_lengths, all_lengths = arrays.lengths(own_list), arrays.lengths([prefix + n for n in own_list])
    k, v = arrays.join(prefix_k, own_k), arrays.join(prefix_v, own_v)

    def plain():
        return narrows.attention_with_cache(q, k, v, cache_seqlens=all_lengths)

    def shared():
        return cascade(q, prefix_k, prefix_v, own_k, own_v, own_lengths)[0]

    difference = float(abs(plain() - shared()).max())
    token = 2 * hk * HEAD_DIM * arrays.itemsize  # bytes of its K and V
    print(f"{b} sequences, {prefix} shared keys, {min(own_list)} to {own} own ones, {options.heads} heads on {hk}; {options.device}")
    for name, call, keys in (("plain", plain, b * prefix + sum(own_list)), ("cascade", shared, prefix + sum(own_list))):
        print(f"{name:8} reads {keys * token / 2**20:8.1f} MiB, {median_time(arrays, call) * 1e3:8.3f} ms")
    print(f"largest difference {difference:.2g}")
    return 0 if difference <= TOLERANCE[options.device] else 1


if __name__ == "__main__":
    sys.exit(main())
