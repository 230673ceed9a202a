"""Caches and merges of CUDA arrays. Without a GPU: what is asked of torch and what is refused. With one: as on the CPU."""

import contextlib
import sys
import types

import numpy as np
import pytest
from test_cuda import OnGpu, gpu, torch

import narrows

RULE = "cpu: must be on cuda:0 with the others"


# ------------------------------------------------------------------------------------------------------- without a GPU


def claimed(*shape, dtype=np.float16):
    return OnGpu(np.zeros(shape, dtype))


def call():
    """q, the caches and memory for O; 2 sequences."""
    return claimed(2, 1, 4, 16), claimed(2, 12, 2, 16), claimed(2, 12, 2, 16), claimed(2, 1, 4, 16)


def refused(kind, text, function, *arguments, **options):
    with pytest.raises(Exception) as error:
        function(*arguments, **options)
    assert (error.type, str(error.value)) == (kind, text)


def test_lengths_of_a_cache_in_host_memory_are_refused_by_name():
    q, k, v, o = call()
    attend = narrows.attention_with_cache
    refused(TypeError, f"cache_seqlens: {RULE}", attend, q, k, v, o=o, cache_seqlens=[3, 4])
    lengths = OnGpu(np.array([3, 99], np.int32))  # known to the kernel alone
    refused(TypeError, f"block_table: {RULE}", attend, q, k, v, o=o, cache_seqlens=lengths, block_table=[[0], [1]])
    refused(TypeError, f"k_new: {RULE}", attend, q, k, v, o=o, cache_seqlens=lengths, v_new=claimed(2, 1, 2, 16),
            k_new=np.zeros((2, 1, 2, 16), np.float16))  # fmt: skip
    text = "cache_seqlens: 5: q's library makes no array of it; pass one of int32 on cuda:0"
    refused(TypeError, text, attend, q, k, v, o=o, cache_seqlens=5)


def test_one_length_for_all_is_an_array_of_torch(monkeypatch):
    made = []

    class OfTorch(OnGpu):
        __module__ = "torch"

    def full(shape, value, dtype, device):
        made.append((shape, value, dtype, device))
        return OfTorch(np.full(shape, value, dtype))

    cuda = types.SimpleNamespace(
        current_stream=lambda index: types.SimpleNamespace(cuda_stream=0), device=lambda index: contextlib.nullcontext()
    )
    fake = types.SimpleNamespace(__name__="torch", cuda=cuda, full=full, int32=np.int32)
    monkeypatch.setitem(sys.modules, "torch", fake)
    q, k, v, o = (OfTorch(x.array) for x in call())
    for options in ({}, {"cu_seqlens_q": OfTorch(np.zeros(3, np.int32))}):
        made.clear()
        of = OfTorch(np.zeros((2, 4, 16), np.float16)) if options else q
        out = OfTorch(np.zeros((2, 4, 16), np.float16)) if options else o
        refused(ValueError, "softcap: -1: must be finite and >= 0 (0 = off); nearest legal: 0", narrows.attention_with_cache,
                of, k, v, o=out, cache_seqlens=7, softcap=-1.0, **options)  # fmt: skip
        assert made == [((2,), 7, np.int32, "cuda:0")]


def test_parts_of_a_merge_are_on_one_device():
    o, lse, out = claimed(1, 3, 2, 4), claimed(1, 2, 3, dtype=np.float32), claimed(1, 3, 2, 4)
    host = np.zeros((1, 3, 2, 4), np.float16)
    memory = {"o": out, "lse": claimed(1, 2, 3, dtype=np.float32)}
    refused(TypeError, f"parts[1].o: {RULE}", narrows.merge, [(o, lse), (host, lse)], **memory)
    refused(TypeError, f"sinks: {RULE}", narrows.merge, [(o, lse)], [0.0, 1.0], **memory)
    refused(ValueError, "parts: 33 parts: must be at most 32 on a GPU; nearest legal: 32", narrows.merge, [(o, lse)] * 33, **memory)
    part = host, np.zeros((1, 2, 3), np.float32)
    refused(ValueError, "stream: given: a call on the CPU has none; nearest legal: null", narrows.merge, [part], stream=7)
    OnGpu.streams.clear()
    with pytest.raises(ValueError, match="^parts: 33 parts"):
        narrows.merge([(o, lse)] * 33, stream=9, **memory)
    assert OnGpu.streams == [9] * 68


# ----------------------------------------------------------------------------------------------------------- on a GPU


class Cache:
    """Caches on the CPU and the same on the GPU; slots that are not filled are NaN."""

    def __init__(self, dtype="bfloat16", lengths=(5, 11), slots=40, page=0, hk=2, h=8, d=64, sq=1, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.lengths, b = getattr(torch, dtype), list(lengths), len(lengths)
        self.q = self.random(b, sq, h, d)
        self.k, self.v = (self.random(b, slots, hk, d) for _ in range(2))
        for cache in (self.k, self.v):
            for row, length in enumerate(lengths):
                cache[row, length:] = float("nan")
        self.options = {}
        if page:
            table = torch.randperm(b * slots // page, generator=self.generator).view(b, -1)
            for name in ("k", "v"):
                cache = getattr(self, name).view(-1, page, hk, d)
                pages = torch.empty_like(cache)
                pages[table.flatten()] = cache
                setattr(self, name, pages)
            self.options["block_table"] = table.to(torch.int32)
        self.options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def check(self, **options):
        """Both compute alike, and their caches are alike after."""
        options = {**self.options, **options}
        moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        k, v = self.k.cuda(), self.v.cuda()
        o, lse = narrows.attention_with_cache(self.q.cuda(), k, v, return_lse=True, **moved)
        want, want_lse = narrows.attention_with_cache(self.q, self.k, self.v, return_lse=True, **options)
        assert o.is_cuda and o.dtype == self.dtype
        unit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.dtype]
        torch.testing.assert_close(o.cpu(), want, rtol=unit, atol=unit)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-4, atol=1e-4 if self.dtype == torch.float32 else 2e-2)
        for ours, exact in ((k, self.k), (v, self.v)):
            torch.testing.assert_close(ours.cpu(), exact, rtol=unit, atol=unit, equal_nan=True)
        return o


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page", [0, 4])
def test_values_and_appends(dtype, page):
    cache = Cache(dtype, page=page, sq=2)
    angle = torch.arange(60)[:, None] / 10.0 ** torch.arange(16)
    new = {"k_new": cache.random(2, 2, 2, 64), "v_new": cache.random(2, 2, 2, 64)}
    rotary = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": page == 4}
    for options in ({}, {"causal": True}, {"causal": True, "window": (6, 0)}, {**new, "causal": True}, {**new, **rotary}):
        cache = Cache(dtype, page=page, sq=2)
        cache.check(**options)


@gpu
def test_one_length_for_all_and_scores():
    cache = Cache(lengths=(7, 7), sq=3)
    cache.check(cache_seqlens=7, softcap=20.0)
    cache.check(cache_seqlens=7, sinks=torch.tensor([0.5] * 8), alibi_slopes=torch.linspace(0.1, 0.8, 8))
    mask = torch.rand(1, 1, 3, 40, generator=cache.generator) < 0.5
    cache.check(cache_seqlens=7, mask=mask)
    cache.check(leftpad=torch.tensor([2, 0], dtype=torch.int32), cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32))


@gpu
def test_varlen_queries():
    cache = Cache(lengths=(5, 11, 20))
    cache.q = cache.random(6, 8, 64)
    cache.check(cu_seqlens_q=torch.tensor([0, 1, 1, 6], dtype=torch.int32), causal=True)


@gpu
def test_entries_that_no_row_sees_may_be_anything():
    cache = Cache(lengths=(5, 11), page=4)
    want = cache.check()
    cache.options["block_table"][0, 2:] = 2**31 - 1
    cache.options["block_table"][1, 3:] = -7
    q, k, v = (x.cuda() for x in (cache.q, cache.k, cache.v))
    options = {name: x.cuda() for name, x in cache.options.items()}
    assert torch.equal(narrows.attention_with_cache(q, k, v, check=True, **options), want)


@gpu
def test_what_breaks_a_rule_is_told_as_on_the_cpu():
    cache = Cache()
    new = {"k_new": cache.random(2, 2, 2, 64), "v_new": cache.random(2, 2, 2, 64)}
    pages = Cache(page=4)
    table = pages.options["block_table"].clone()
    table[1, 0] = 20
    for of, options in (
        (cache, {"cache_seqlens": torch.tensor([5, 41], dtype=torch.int32)}),
        (cache, {"cache_seqlens": torch.tensor([5, 39], dtype=torch.int32), **new}),
        (cache, {"leftpad": torch.tensor([0, 12], dtype=torch.int32)}),
        (cache, {"cache_batch_idx": torch.tensor([0, 2], dtype=torch.int32)}),
        (pages, {"block_table": table}),
    ):
        options = {**of.options, **options}
        with pytest.raises(ValueError):
            narrows.attention_with_cache(of.q, of.k, of.v, **options)
        moved = {name: x.cuda() for name, x in options.items()}
        q, k, v = (x.cuda() for x in (of.q, of.k, of.v))
        with pytest.raises(ValueError):
            narrows.attention_with_cache(q, k, v, check=True, **moved)
        o = narrows.attention_with_cache(q, k, v, **moved)
        assert o[1].isnan().all() and o[0].isfinite().all()


@gpu
def test_a_graph_replays_while_its_cache_grows():
    """Captured once: each replay appends a token and attends to all so far, bit for bit as one prefill."""
    steps, before = 100, 20
    cache = Cache(lengths=(before, before), slots=256, page=16)
    keys, values = (cache.random(2, steps, 2, 64).cuda() for _ in range(2))
    queries = cache.random(2, steps, 8, 64).cuda()
    k, v, q = cache.k.cuda(), cache.v.cuda(), queries[:, :1].clone()
    options = {name: x.cuda() for name, x in cache.options.items()}
    options.update(k_new=keys[:, :1].clone(), v_new=values[:, :1].clone(), batch_invariant=True, causal=True)
    other_k, other_v = k.clone(), v.clone()
    narrows.prepare(q, k, v, **options)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o = narrows.attention_with_cache(q, k, v, **options)
    found = []
    for step in range(steps):
        q.copy_(queries[:, step : step + 1])
        options["k_new"].copy_(keys[:, step : step + 1])
        options["v_new"].copy_(values[:, step : step + 1])
        graph.replay()
        found.append(o.clone())
        options["cache_seqlens"] += 1
    whole = {**options, "cache_seqlens": cache.options["cache_seqlens"].cuda(), "k_new": keys, "v_new": values}
    want = narrows.attention_with_cache(queries, other_k, other_v, **whole)
    assert torch.equal(torch.cat(found, 1), want)
    assert torch.equal(k.nan_to_num(7), other_k.nan_to_num(7)) and torch.equal(v.nan_to_num(7), other_v.nan_to_num(7))


@gpu
def test_merge_of_a_shared_prefix():
    """What all sequences share is read once, as rows of one sequence; the rest is each one's own."""
    b, h, d, prefix, own = 4, 8, 64, 96, 17
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)  # noqa: E731
    q, k, v = make(b, 1, h, d), make(1, prefix, 2, d), make(1, prefix, 2, d)
    own_k, own_v = make(b, own, 2, d), make(b, own, 2, d)
    shared, shared_lse = narrows.attention_with_cache(q.view(1, b, h, d), k, v, cache_seqlens=prefix, return_lse=True)
    parts = [
        (shared.view(b, 1, h, d), shared_lse.permute(2, 1, 0)),
        narrows.attention_with_cache(q, own_k, own_v, cache_seqlens=own, return_lse=True),
    ]
    o, lse = narrows.merge(parts)
    all_k, all_v = (torch.cat([x.expand(b, -1, -1, -1), y], 1) for x, y in ((k, own_k), (v, own_v)))
    want, want_lse = narrows.attention(q, all_k, all_v, return_lse=True)
    assert o.is_cuda and torch.allclose(o.float(), want.float(), atol=1e-2) and torch.allclose(lse, want_lse, atol=1e-3)
    on_cpu = narrows.merge([tuple(x.cpu() for x in part) for part in parts])
    torch.testing.assert_close(o.cpu(), on_cpu[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu(), on_cpu[1], rtol=1e-5, atol=1e-5)


@gpu
def test_gradients_of_a_merge():
    generator = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)  # noqa: E731
    parts = [(make(2, 5, 4, 64), 3 * make(2, 4, 5).float()) for _ in range(3)]
    dout, dlse, sinks = make(2, 5, 4, 64), make(2, 4, 5).float(), make(4).float()
    gradients, dsinks = narrows.merge_backward(parts, dout, dlse, sinks)
    want, want_dsinks = narrows.merge_backward([(o.cpu(), lse.cpu()) for o, lse in parts], dout.cpu(), dlse.cpu(), sinks.cpu())
    for (do, dl), (want_do, want_dl) in zip(gradients, want, strict=True):
        assert do.is_cuda and do.dtype == torch.bfloat16
        torch.testing.assert_close(do.cpu(), want_do, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dl.cpu(), want_dl, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dsinks.cpu(), want_dsinks, rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("page", [0, 4])
def test_jax(page):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU")
    cache = Cache(page=page)
    q, k, v = (x.cuda() for x in (cache.q, cache.k, cache.v))
    options = {name: x.cuda() for name, x in cache.options.items()}
    of_jax = {name: jax.dlpack.from_dlpack(x) for name, x in options.items()}
    o = narrows.attention_with_cache(*(jax.dlpack.from_dlpack(x) for x in (q, k, v)), **of_jax)
    assert isinstance(o, jax.Array) and o.dtype == jax.numpy.bfloat16
    assert torch.equal(torch.from_dlpack(o), narrows.attention_with_cache(q, k, v, **options))
