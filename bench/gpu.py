#!/usr/bin/env python3
"""gpu.py --library libnarrows.so [--output ROWS]: forward on a GPU beside PyTorch's kernels, in one process, a row a line.

Everyone who computes a row is timed in turn, five times, in alternating order. Cold (ms): 40 ms idle, 2 ms of warming up, 6 ms
timed; the median of five. Hot (hot_ms): 0.1 s of the same, then 0.12 s timed. Rows have the format that `narrows bench --json`
prints. Of short rows the relative error against fp64 is recorded too. The exit code is 1 where a rate is impossible, where an
error is more than 1.01 times that of the better of FA2 and cuDNN, or where results disagree; a slow row is no failure.
"""

import argparse
import ctypes
import json
import math
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import narrows_c

TOKENS, WIDTH = 16384, 2048  # of a plain row: batch * sequence, heads * head dim
IDLE, WARM, TIMED, ROUNDS = 0.04, 0.002, 0.006, 5  # seconds
HOT_WARM, HOT_TIMED = 0.1, 0.12
# Dense bf16 FLOP a clock of a multiprocessor with fp32 sums, by compute capability.
FLOP_PER_CLOCK = {80: 2048, 86: 1024, 87: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024, 121: 1024}
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def row(dtype="bf16", d=128, sq=4096, causal=False, case="", h=None, hk=None, b=None):
    h = h or WIDTH // d
    return {
        "op": "forward", "backend": "cuda", "family": "sm80", "dtype": dtype, "b": b or TOKENS // sq, "h": h, "hk": hk or h,
        "sq": sq, "sk": sq, "d": d, "dv": d, "causal": causal, "case": case, "threads": 1,
    }  # fmt: skip


def grid():
    for d in (64, 128, 256):
        for sq in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield row(d=d, sq=sq, causal=causal)
    for causal in (False, True):
        yield row(causal=causal, case="gqa4", h=32, hk=8)


def special():
    """What this family is for beside the plain rows; the judge is their own plain row, or PyTorch's fp32."""
    for case in ("bias", "mask", "softcap", "alibi", "dropout", "unaligned", "transposed"):
        yield row(case=case)
    yield row(case="window1024", causal=True)
    for d in (100, 111):
        yield row(d=d, h=16, case=f"d{d}")
    for d in (64, 128):
        for causal in (False, True):
            yield row(d=d, causal=causal, dtype="fp32", sq=2048)
    yield row(dtype="fp16")
    yield row(case="varlen", causal=True, h=16, b=32, sq=16384)


def zipf_lengths(row):
    return [row["sq"] // place for place in range(1, row["b"] + 1)]


def flops(row):
    """By the fused formula; a causal row counts half of S^2, a window and varlen what is visible."""
    if row["case"] == "varlen":
        pairs = sum(n * n / 2 for n in zipf_lengths(row)) * row["h"]
    else:
        square = row["sq"] * row["sk"]
        seen = window_pairs(row) if row["case"].startswith("window") else square / 2 if row["causal"] else square
        pairs = row["b"] * row["h"] * seen
    return 2 * (row["d"] + row["dv"]) * pairs


def window_pairs(row):
    width = int(row["case"].removeprefix("window"))
    return sum(min(i + 1, width) for i in range(row["sq"]))


class Gpu:
    """PyTorch, the library, and what the device could do at most."""

    def __init__(self, library):
        import torch

        self.torch, self.narrows = torch, narrows_c.Library(library)
        facts = torch.cuda.get_device_properties(0)
        self.capability = 10 * facts.major + facts.minor
        clock = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(clock), 13, 0)  # kHz, the highest
        self.peak = facts.multi_processor_count * FLOP_PER_CLOCK[self.capability] * clock.value * 1e3 / 1e12
        self.stream = torch.cuda.current_stream().cuda_stream

    def peak_of(self, row):
        return self.peak / 6 if row["dtype"] == "fp32" else self.peak  # three tf32 products, each at half the rate

    def dtype(self, name):
        return {"bf16": self.torch.bfloat16, "fp16": self.torch.float16, "fp32": self.torch.float32}[name]

    def view(self, t):
        names = {self.torch.bfloat16: "bf16", self.torch.float16: "fp16", self.torch.float32: "fp32",
                 self.torch.int32: "int32", self.torch.bool: "boolean", self.torch.uint8: "uint8"}  # fmt: skip
        return self.narrows.tensor(t.data_ptr(), names[t.dtype], tuple(t.shape), t.stride(), t.device.index or 0)


class Tensors:
    """Of a row: (b, s, h, d), of varlen (s, h, d), in the layout that its case names."""

    def __init__(self, gpu, row):
        torch, dtype = gpu.torch, gpu.dtype(row["dtype"])
        torch.manual_seed(1)
        varlen = row["case"] == "varlen"
        rows = (sum(zipf_lengths(row)),) if varlen else (row["b"], row["sq"])

        def tensor(heads, width):
            if row["case"] == "unaligned":  # rows of two elements more, from the second element on
                return torch.randn(*rows, heads, width + 2, device="cuda", dtype=dtype)[..., 1 : width + 1]
            if row["case"] == "transposed":
                return torch.randn(rows[0], heads, width, rows[1], device="cuda", dtype=dtype).permute(0, 3, 1, 2)
            return torch.randn(*rows, heads, width, device="cuda", dtype=dtype)

        self.q, self.k, self.v = tensor(row["h"], row["d"]), tensor(row["hk"], row["d"]), tensor(row["hk"], row["dv"])
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty((row["h"], *rows) if varlen else (row["b"], row["h"], row["sq"]), device="cuda")
        square = (1, row["h"], row["sq"], row["sk"])
        self.bias = torch.randn(square, device="cuda", dtype=dtype) if row["case"] == "bias" else None
        self.mask = torch.rand(1, 1, *square[2:], device="cuda") < 0.9 if row["case"] == "mask" else None
        self.slopes = torch.tensor([2 ** (-8 * (i + 1) / row["h"]) for i in range(row["h"])], device="cuda")
        bounds = torch.tensor([0, *zipf_lengths(row)]).cumsum(0) if varlen else torch.zeros(1)
        self.bounds = bounds.to(torch.int32).cuda()


def ours(gpu, row, t):
    options = {"causal": int(row["causal"]), "family": b"sm80", "stream": gpu.stream}
    case = row["case"]
    if case == "bias":
        options["bias"] = gpu.view(t.bias)
    if case == "mask":
        options["mask"] = gpu.view(t.mask)
    if case == "alibi":
        options["alibi_slopes"] = gpu.view(t.slopes)
    if case == "softcap":
        options["softcap"] = 30.0
    if case == "dropout":
        options.update(dropout=0.1, seed=7)
    if case.startswith("window"):
        options.update(has_window=1, window_left=int(case.removeprefix("window")) - 1, window_right=-1)
    if case == "varlen":
        options.update(cu_seqlens_q=gpu.view(t.bounds), cu_seqlens_k=gpu.view(t.bounds))
    inputs = {name: gpu.view(getattr(t, name)) for name in ("q", "k", "v")}
    call = gpu.narrows.forward(inputs, {"o": gpu.view(t.o), "lse": gpu.view(t.lse)}, options)

    def run():
        call()
        return t.o

    return run


def attention(gpu, row, t, backend):
    """scaled_dot_product_attention by one backend; it refuses by RuntimeError what the backend does not take."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = {"is_causal": row["causal"], "enable_gqa": row["h"] != row["hk"]}
    options["attn_mask"] = t.bias if t.bias is not None else t.mask
    options["dropout_p"] = 0.1 if row["case"] == "dropout" else 0.0
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
    chosen = getattr(SDPBackend, backend)

    def run():
        with sdpa_kernel(chosen), gpu.torch.inference_mode():
            return gpu.torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return run


def packed_attention(gpu, row, t):
    longest = max(zipf_lengths(row))

    def run():
        with gpu.torch.inference_mode():
            return gpu.torch.ops.aten._flash_attention_forward(
                t.q, t.k, t.v, t.bounds, t.bounds, longest, longest, 0.0, row["causal"], False)[0]  # fmt: skip

    return run


def peers(gpu, row, t):
    if row["case"] == "varlen":
        return {"fa2": packed_attention(gpu, row, t)}
    if row["case"] in ("", "gqa4"):
        names = {"torch": "EFFICIENT_ATTENTION"} if row["dtype"] == "fp32" else {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
    elif row["case"] in ("bias", "mask"):
        names = {"torch": "EFFICIENT_ATTENTION"}
    elif row["case"] == "dropout" or row["case"].startswith("d1"):
        names = {"fa2": "FLASH_ATTENTION"}
    else:
        names = {}
    return {name: attention(gpu, row, t, backend) for name, backend in names.items()}


# --- timing ----------------------------------------------------------------------------------------------------------


def timed(gpu, run, seconds, once):
    """Milliseconds of a call: so many that they fill the time, by the GPU's clock."""
    count = max(1, round(seconds / once))
    start, end = (gpu.torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def cold(gpu, run, once):
    gpu.torch.cuda.synchronize()
    time.sleep(IDLE)
    for _ in range(max(1, round(WARM / once))):
        run()
    return timed(gpu, run, TIMED, once)


def hot(gpu, run, once):
    timed(gpu, run, HOT_WARM, once)
    return timed(gpu, run, HOT_TIMED, once)


def measure(gpu, candidates):
    """{name: (cold, hot)} in ms, everyone in the same run."""
    once = {}
    for name, run in candidates.items():
        run()
        once[name] = timed(gpu, run, 1e-9, 1) / 1e3
    rounds = {name: [] for name in candidates}
    for number in range(ROUNDS):
        for name in list(candidates)[:: 1 if number % 2 == 0 else -1]:
            rounds[name].append(cold(gpu, candidates[name], once[name]))
    return {name: (sorted(rounds[name])[ROUNDS // 2], hot(gpu, run, once[name])) for name, run in candidates.items()}


# --- errors ----------------------------------------------------------------------------------------------------------


def exact(gpu, row, t):
    """The first batch row of a dense call in fp64."""
    torch = gpu.torch
    group = row["h"] // row["hk"]
    q, k, v = (x[0].double().transpose(0, 1) for x in (t.q, t.k, t.v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = q @ k.transpose(1, 2) / math.sqrt(row["d"])
    if row["causal"]:
        s.masked_fill_(torch.ones_like(s[0], dtype=torch.bool).triu(1), -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(0, 1)


def errors(gpu, row, t, candidates):
    """||o - exact|| / ||exact|| of each."""
    reference = exact(gpu, row, t)
    return {name: float((run()[0].double() - reference).norm() / reference.norm()) for name, run in candidates.items()}


def judge_errors(result, found):
    """Our own bar: 1.01 times the better one's of FA2 and cuDNN."""
    own = found.pop("ours")
    result.update(error=own, peer_errors=found)
    bar = [1.01 * error for name, error in found.items() if name in ("fa2", "cudnn")]
    return "" if not bar or own <= min(bar) else f"error {own:.4g}, peers {found}"


# --- rows ------------------------------------------------------------------------------------------------------------


def usable(candidates):
    """Without those that refuse the row."""
    kept = {}
    for name, run in candidates.items():
        try:
            run()
            kept[name] = run
        except RuntimeError as error:
            if name == "ours":
                raise
            print(f"  {name}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
    return kept


def plain_rate(gpu, causal, known):
    """Of the plain row that a special one is compared with; measured where it was not."""
    if causal not in known:
        known[causal] = measured(gpu, row(causal=causal), known)[0]["tflops"]
    return known[causal]


def measured(gpu, facts, known):
    """The row with its figures, and what is wrong with it, or ""."""
    special_row = facts["case"] not in ("", "gqa4")
    plain = plain_rate(gpu, facts["causal"], known) if special_row else None
    t = Tensors(gpu, facts)
    candidates = usable({"ours": ours(gpu, facts, t), **peers(gpu, facts, t)})
    times = measure(gpu, candidates)
    (own, own_hot), result = times.pop("ours"), dict(facts)
    result.update(ms=own, hot_ms=own_hot, tflops=flops(facts) / own / 1e9, peak=gpu.peak_of(facts))
    result["fraction"] = result["tflops"] / result["peak"]
    result["peers"] = {name: each[0] for name, each in times.items()}
    result["hot_peers"] = {name: each[1] for name, each in times.items()}
    against = next((name for name in ("fa2", "torch") if name in times), None)
    result.update(against=against, ratio=times[against][0] / own if against else None)
    if plain:
        result["of_plain"] = result["tflops"] / plain
    wrong = ""
    if result["fraction"] > 1.02:
        wrong = f"{result['fraction']:.3f} of the peak is impossible"
    elif not special_row and facts["sq"] <= 2048:
        wrong = judge_errors(result, errors(gpu, facts, t, candidates))
    elif times and facts["case"] != "dropout":
        wrong = disagreement(gpu, candidates)
    return result, wrong


def disagreement(gpu, candidates):
    o = candidates["ours"]().double()
    for name, run in candidates.items():
        difference = float((run().double() - o).norm() / o.norm())
        if not difference < 0.02:
            return f"differs from {name} by {difference:.3g}"
    return ""


def describe(result):
    peers_text = " ".join(f"{name} {ms:.3f}" for name, ms in result["peers"].items())
    ratio = f" {result['ratio']:.3f}x {result['against']}" if result["against"] else ""
    return (
        f"{result['dtype']} d{result['d']} s{result['sq']} {'causal' if result['causal'] else 'full':6} {result['case']:10} "
        f"{result['ms']:.3f} ms {result['tflops']:.0f} TFLOP/s (hot {result['hot_ms']:.3f}) {peers_text}{ratio}"
    )


def summary(results):
    ratios = [r["ratio"] for r in results if r["against"] == "fa2" and r["dtype"] == "bf16" and r["case"] in ("", "gqa4")]
    if not ratios:
        return "no row has a ratio to fa2"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{len(ratios)} rows beside fa2: geometric mean {mean:.3f}x, least {min(ratios):.3f}x"


def matmul_rate(gpu):
    a = gpu.torch.randn(8192, 8192, device="cuda", dtype=gpu.torch.bfloat16)
    result = measure(gpu, {"matmul": lambda: a @ a})["matmul"]
    return tuple(2 * 8192**3 / ms / 1e9 for ms in result)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--library", help="libnarrows.so")
    parser.add_argument("--output", type=Path, help="also write the rows there, each when it is measured")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose JSON matches")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    options = parser.parse_args(arguments)
    rows = [each for each in (*grid(), *special()) if re.search(options.only, json.dumps(each))]
    if options.list:
        print(*map(json.dumps, rows), sep="\n")
        return 0
    if not options.library:
        parser.error("--library: must name libnarrows.so")
    gpu = Gpu(options.library)
    print(f"peak {gpu.peak:.0f} TFLOP/s; matmul {matmul_rate(gpu)[0]:.0f} cold", file=sys.stderr)
    results, wrong_rows, known = [], 0, {}
    for each in rows:
        result, wrong = measured(gpu, each, known)
        if each == row(causal=each["causal"]):
            known[each["causal"]] = result["tflops"]
        results.append(result)
        wrong_rows += bool(wrong)
        print(describe(result), wrong and f"WRONG: {wrong}", file=sys.stderr, flush=True)
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        else:
            print(json.dumps(result), flush=True)
    print(summary(results), file=sys.stderr)
    return 1 if wrong_rows else 0


if __name__ == "__main__":
    sys.exit(main())
