"""Decode rows: calls over KV caches, ours and PyTorch's, as graphs of many calls.

A decode call takes microseconds, less than its launch from Python, and its caches come from memory, not from L2, where a model of
many layers runs between two calls of one. So a graph holds calls on caches of their own, at least four times L2 together, and is
replayed; ms is the time of a call by the median of its replays, everyone in turn. peak is the rate at which a kernel that only reads
goes through as many bytes in the same way.
"""

import functools
import json
import math
import sys

from gpu_rows import cache_lengths, page_of, plain_of

ROUNDS = 7
CACHES_BYTES, MOST_CACHES, MOST_CALLS = 4 * 60 * 2**20, 24, 24
DIFFERENCE_LIMIT, MOST_FRACTION = 0.02, 1.05
READERS = (1, 2, 4)  # grids of the kernel that reads, of which the fastest counts
READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* from, int count, unsigned* to) {
  unsigned sum = 0;
  const int step = gridDim.x * blockDim.x;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[n].x), "=r"(x[n].y), "=r"(x[n].z), "=r"(x[n].w) : "l"(from + i + n * step));
#pragma unroll
    for (int n = 0; n < 4; ++n) sum ^= x[n].x ^ x[n].y ^ x[n].z ^ x[n].w;
  }
  for (; i < count; i += step) sum ^= from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
  if (sum == 0x12345678u) *to = sum;
}
"""


def bytes_read(row):
    """Of K and V, once for each kv head; of MLA, whose V is a part of K, of K alone."""
    width = row["d"] if row["case"].startswith("mla") else row["d"] + row["dv"]
    return sum(cache_lengths(row)) * row["hk"] * width * 2


class Tensors:
    """q, and caches that are each too many to stay in L2."""

    def __init__(self, gpu, row):
        torch = gpu.torch
        torch.manual_seed(1)
        make = functools.partial(torch.randn, device="cuda", dtype=gpu.dtype(row["dtype"]))
        self.row, self.lengths = row, torch.tensor(cache_lengths(row), dtype=torch.int32, device="cuda")
        own = row["b"] * row["sk"] * row["hk"] * (row["d"] + row["dv"]) * 2
        self.caches = min(MOST_CACHES, max(2, math.ceil(CACHES_BYTES / own)))
        self.q = make(row["b"], row["sq"], row["h"], row["d"])
        self.k = [make(row["b"], row["sk"], row["hk"], row["d"]) for _ in range(self.caches)]
        shares = row["case"].startswith("mla")
        self.v = [k[..., : row["dv"]] if shares else make(row["b"], row["sk"], row["hk"], row["dv"]) for k in self.k]
        self.o = torch.empty(row["b"], row["sq"], row["h"], row["dv"], device="cuda", dtype=self.q.dtype)
        self.table = self.read = None
        if page_of(row):  # the pages of all sequences, in no order
            pages = row["b"] * row["sk"] // page_of(row)
            self.table = torch.randperm(pages, device="cuda").to(torch.int32).view(row["b"], -1)

    def contiguous(self, cache):
        """A cache as it is for whoever reads no pages."""
        if self.table is None:
            return cache
        row = self.row
        return cache.view(-1, page_of(row), *cache.shape[2:])[self.table.long()].view(cache.shape)


def ours(gpu, row, t, stream):
    """A function for each cache."""
    options = {"causal": 1, "family": row["family"].encode(), "stream": stream, "cache_seqlens": gpu.view(t.lengths)}
    if row["case"].endswith("invariant"):
        options["batch_invariant"] = 1
    if t.table is not None:
        options["block_table"] = gpu.view(t.table)
    calls = []
    for k, v in zip(t.k, t.v):
        if t.table is not None:
            k, v = (x.view(-1, page_of(row), *x.shape[2:]) for x in (k, v))
        inputs = {"q": gpu.view(t.q), "k": gpu.view(k), "v": gpu.view(v)}
        if not calls:
            t.workspace = gpu.torch.empty(max(1, gpu.narrows.workspace_size(inputs, options)), dtype=gpu.torch.uint8, device="cuda")
            options["workspace"] = gpu.view(t.workspace)
        call = gpu.narrows.forward(inputs, {"o": gpu.view(t.o)}, options)

        def run(call=call):
            call()
            return t.o

        calls.append(run)
    return calls


def attention(gpu, row, t, _, backend):
    """Whole caches: PyTorch's call has no lengths."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen, q = getattr(SDPBackend, backend), t.q.transpose(1, 2)
    attend = functools.partial(gpu.torch.nn.functional.scaled_dot_product_attention, enable_gqa=row["h"] != row["hk"])

    def run(k, v):
        with sdpa_kernel(chosen), gpu.torch.inference_mode():
            return attend(q, k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return [functools.partial(run, t.contiguous(k), t.contiguous(v)) for k, v in zip(t.k, t.v)]


def packed_attention(gpu, row, t, _):
    """FlashAttention-2 of packed keys."""
    torch = gpu.torch
    bounds = torch.nn.functional.pad(t.lengths.cumsum(0), (1, 0)).to(torch.int32)
    ones, q = torch.arange(row["b"] + 1, dtype=torch.int32, device="cuda"), t.q.view(row["b"], row["h"], row["d"])

    def packed(cache):
        return torch.cat([cache[b, :length] for b, length in enumerate(cache_lengths(row))])

    def run(k, v):
        with torch.inference_mode():
            o = torch.ops.aten._flash_attention_forward(q, k, v, ones, bounds, 1, max(cache_lengths(row)), 0.0, False, False)[0]
            return o.view(t.o.shape)

    return [functools.partial(run, packed(k), packed(v)) for k, v in zip(t.k, t.v)]


def peers(row):
    """{name: what makes its calls}. Rows of more than one query are causal at the end of the cache, which PyTorch's are not."""
    if row["case"] == "zipf":
        return {"fa2": packed_attention}
    if row["sq"] > 1 or row["case"].startswith("mla") or row["case"].endswith("invariant"):
        return {}
    return {name: functools.partial(attention, backend=backend)
            for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("fa2", "FLASH_ATTENTION"))}  # fmt: skip


@functools.cache
def reader(torch):
    return torch.cuda._compile_kernel(READ, "read_all")


def reads(gpu, row, t, _, blocks_each):
    """A kernel that only reads, over as many bytes of each cache, with so many thread blocks for each multiprocessor."""
    torch = gpu.torch
    kernel, sink = reader(torch), torch.empty(1, dtype=torch.int32, device="cuda")
    blocks = blocks_each * torch.cuda.get_device_properties(0).multi_processor_count
    count = bytes_read(row) // 16
    if t.read is None:
        t.read = [torch.ones(count * 4, dtype=torch.int32, device="cuda") for _ in range(t.caches)]
    return [functools.partial(kernel, grid=(blocks, 1, 1), block=(512, 1, 1), args=[buffer, count, sink]) for buffer in t.read]


class Replay:
    """Calls of one candidate as a graph."""

    def __init__(self, gpu, stream, calls, count):
        self.gpu, self.count, self.calls = gpu, count, calls
        with gpu.torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        self.graph = gpu.torch.cuda.CUDAGraph()
        with gpu.torch.cuda.graph(self.graph, stream=stream):
            for index in range(count):
                calls[index % len(calls)]()

    def ms(self):
        start, end = (self.gpu.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.count


def replays(gpu, row, t):
    """{name: its graph}, "ours" and grids that read beside the peers that do not refuse the row."""
    stream, kept = gpu.torch.cuda.Stream(), {}
    count = max(t.caches, MOST_CALLS if bytes_read(row) < 2e8 else 0)
    grids = {f"read {each}": functools.partial(reads, blocks_each=each) for each in READERS}
    for name, make in {"ours": ours, **peers(row), **grids}.items():
        try:
            # A graph on a stream of its own: its calls are given the handle, PyTorch's find it as the current one.
            kept[name] = Replay(gpu, stream, make(gpu, row, t, stream.cuda_stream), count)
        except (RuntimeError, TypeError, ValueError) as error:
            if name == "ours" or name in grids:
                raise
            print(f"  {name}: {(str(error).splitlines() or [''])[0][:150]}", file=sys.stderr)
    return kept


def complaint(gpu, result, kept):
    if result["fraction"] > MOST_FRACTION:
        return f"{result['fraction']:.3f} of the rate of reading is impossible"
    def first(who):
        """Its first call's O, whichever stream that is on."""
        o = kept[who].calls[0]()
        gpu.torch.cuda.synchronize()
        return o.double()

    own = first("ours")
    for who in result["peers"]:
        difference = float((first(who) - own).norm() / own.norm())
        if not difference <= DIFFERENCE_LIMIT:
            return f"o differs from {who} by {difference:.3g}"
    return "" if bool(gpu.torch.isfinite(own).all()) else "o is not finite"


def measured(gpu, row, known):
    """As gpu.py's."""
    t = Tensors(gpu, row)
    kept, rounds = replays(gpu, row, t), {}
    for number in range(ROUNDS):
        for name in list(kept)[:: 1 if number % 2 == 0 else -1]:
            rounds.setdefault(name, []).append(kept[name].ms())
    times = {name: sorted(each)[ROUNDS // 2] for name, each in rounds.items()}
    own, read, result = times.pop("ours"), min(times.pop(f"read {each}") for each in READERS), dict(row)
    rate = bytes_read(row) / 1e6  # GB/s by ms
    result.update(ms=own, gbps=rate / own, peak=rate / read, fraction=read / own, peers=times)
    against = min(times, key=times.get, default=None)
    result.update(against=against, ratio=times[against] / own if against else None)
    plain = json.dumps(plain_of(row))
    if plain in known and row["case"]:
        result["of_plain"] = result["gbps"] / known[plain]
    known[json.dumps(row)] = result["gbps"]
    return result, complaint(gpu, result, kept)
