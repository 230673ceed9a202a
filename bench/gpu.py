#!/usr/bin/env python3
"""gpu.py --library libnarrows.so [--output ROWS]: calls on a GPU beside PyTorch's, in one process, a row a line.

Everyone who computes a row is timed in turn, five times (backward three), in alternating order: PyTorch's kernels and, where its
package is installed, FlashAttention-3. Cold (ms): 40 ms idle, 2 ms of warming up, 6 ms timed; the median. Hot (hot_ms): after 0.1 s
of all of them, 0.03 s of the same, then 0.05 s timed. Rows have the format that `narrows bench --json` prints, and besides: hot_ms,
hot_peers; of_plain, the rate by that of the plain row; of short dense rows the relative Frobenius errors against fp64, error and
peer_errors, backward errors and peer_errors of each gradient; error_ratio, the largest of ours by the better of FA2 and cuDNN.
Decode rows are graphs, and have gbps (gpu_decode.py). The exit code is 1 where a rate is impossible, where error_ratio is above 1.01,
where results disagree, or where we refuse a row; a slow row is no failure.
"""

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_backward
import gpu_decode
import gpu_forward
from gpu_rows import OPERATIONS, all_rows, flops, is_plain, plain_of

CALLS = {"forward": gpu_forward, "backward": gpu_backward}
IDLE, WARM, TIMED = 0.04, 0.002, 0.006  # seconds
ROUNDS = {"forward": 5, "backward": 3}  # so that a run of both stays under four minutes
HEATING, HOT_WARM, HOT_TIMED = 0.1, 0.03, 0.05
ERROR_BAR, ERROR_LIMIT, DIFFERENCE_LIMIT = 1.01, 0.02, 0.02  # by the better peer's; where there is none; between results


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


def measure(gpu, candidates, count):
    """{name: (cold, hot)} in ms, everyone in the same run; cold: of so many rounds."""
    once = {}
    for name, run in candidates.items():
        run()
        once[name] = timed(gpu, run, 1e-9, 1) / 1e3
    rounds = {name: [] for name in candidates}
    for number in range(count):
        for name in list(candidates)[:: 1 if number % 2 == 0 else -1]:
            rounds[name].append(cold(gpu, candidates[name], once[name]))
    for name, run in candidates.items():  # or the first one would be timed on a cooler card: up to 10% faster
        timed(gpu, run, HEATING / len(candidates), once[name])
    return {name: (sorted(rounds[name])[count // 2], hot(gpu, run, once[name])) for name, run in candidates.items()}


# --- errors ----------------------------------------------------------------------------------------------------------


def errors(gpu, row, t, runs):
    """||x - exact|| / ||exact|| of each result, by names: {"ours": {"o": 0.002}}."""
    calls, found = CALLS[row["op"]], {}
    references = calls.exact(gpu, row, t)
    for who, run in runs.items():
        pairs = zip(calls.NAMES, run(), references)
        found[who] = {name: float((x[0].double() - exact).norm() / exact.norm()) for name, x, exact in pairs}
    return found


def judge_errors(result, found):
    """Our own bar: 1.01 times the better one's of FA2 and cuDNN, for each result."""
    own = found.pop("ours")
    single = result["op"] == "forward"
    result["error" if single else "errors"] = own["o"] if single else own
    result["peer_errors"] = {who: each["o"] if single else each for who, each in found.items()}
    judges = [each for who, each in found.items() if who in ("fa2", "cudnn")]
    if not judges:
        return "" if all(error <= ERROR_LIMIT for error in own.values()) else f"error {own}"
    ratios = [error / min(judge[name] for judge in judges) for name, error in own.items()]
    result["error_ratio"] = max(ratios)
    return "" if all(ratio <= ERROR_BAR for ratio in ratios) else f"error {own}, peers {found}"


def disagreement(names, runs):
    own = [x.double() for x in runs["ours"]()]
    for who, run in runs.items():
        for name, x, y in zip(names, run(), own):
            difference = float((x.double() - y).norm() / y.norm())
            if not difference <= DIFFERENCE_LIMIT:
                return f"{name} differs from {who} by {difference:.3g}"
    return ""


def repeats(gpu, runs):
    before = [x.clone() for x in runs["ours"]()]
    return all(gpu.torch.equal(x, y) for x, y in zip(before, runs["ours"]()))


def complaint(gpu, row, t, runs, result):
    """What is wrong with a row, or ""."""
    if result["fraction"] > 1.02:
        return f"{result['fraction']:.3f} of the peak is impossible"
    if row["case"] == "deterministic" and not repeats(gpu, runs):
        return "two calls differ"
    if row["case"] in ("", "gqa4", "deterministic") and row["sq"] <= 2048:
        return judge_errors(result, errors(gpu, row, t, runs))
    return "" if row["case"] == "dropout" else disagreement(CALLS[row["op"]].NAMES, runs)


# --- rows ------------------------------------------------------------------------------------------------------------


def usable(candidates):
    """{name: call} of those that do not refuse the row, each in the first way that works."""
    kept = {}
    for name, ways in candidates.items():
        for way in ways:
            try:
                run = way()
                run()
                kept[name] = run
                break
            except (RuntimeError, TypeError, ValueError) as error:
                if name == "ours":
                    raise
                print(f"  {name}: {(str(error).splitlines() or [''])[0][:150]}", file=sys.stderr)
    return kept


def judge(family, peers):
    """The peer that a row is compared with: FlashAttention-2, which has Ampere's instructions; on Hopper's own the fastest."""
    if family == "sm90":
        return min((name for name in ("cudnn", "fa2", "fa3") if name in peers), key=peers.get, default=None)
    return next((name for name in ("fa2", "torch") if name in peers), None)


def measured(gpu, row, known):
    """The row with its figures, and what is wrong with it, or "". known: the rates of the rows so far."""
    plain = None
    if not is_plain(row):
        key = json.dumps(plain_of(row))
        if key not in known:
            measured(gpu, plain_of(row), known)
        plain = known[key]
    calls = CALLS[row["op"]]
    t = calls.Tensors(gpu, row)
    runs = usable(calls.candidates(gpu, row, t))
    times = measure(gpu, runs, ROUNDS[row["op"]])
    (own, own_hot), result = times.pop("ours"), dict(row)
    result.update(ms=own, hot_ms=own_hot, tflops=flops(row) / own / 1e9, peak=gpu.peak_of(row))
    result["fraction"] = result["tflops"] / result["peak"]
    result["peers"] = {name: each[0] for name, each in times.items()}
    result["hot_peers"] = {name: each[1] for name, each in times.items()}
    against = judge(row["family"], result["peers"])
    result.update(against=against, ratio=times[against][0] / own if against else None)
    if plain:
        result["of_plain"] = result["tflops"] / plain
    known[json.dumps(row)] = result["tflops"]
    return result, complaint(gpu, row, t, runs, result)


def describe(result):
    rate = f"{result['gbps']:.0f} GB/s" if "gbps" in result else f"{result['tflops']:.0f} TFLOP/s (hot {result['hot_ms']:.3f})"
    sizes = f"{result['b']}x{result['sk']}" if "gbps" in result else f"s{result['sq']}"
    peers_text = " ".join(f"{name} {ms:.4g}" for name, ms in result["peers"].items())
    ratio = f" {result['ratio']:.3f}x {result['against']}" if result["against"] else ""
    plain = f" {result['of_plain']:.2f} of plain" if "of_plain" in result else ""
    error = f" error {result['error_ratio']:.4f}x" if "error_ratio" in result else ""
    return (
        f"{result['op']} {result['dtype']} d{result['d']} {sizes} {'causal' if result['causal'] else 'full':6} "
        f"{result['case']:10} {result['ms']:.4g} ms {rate} "
        f"{peers_text}{ratio}{plain}{error}"
    )


def judged_by(op):
    return ("cudnn", "fa2") if op == "decode" else ("fa2",)


def summary(results, op):
    """A line on the plain rows of an operation, one on its deterministic rows, one on errors; of what there is."""
    own, lines = [each for each in results if each["op"] == op], []
    judge = "the fastest peer" if op == "decode" else "fa2"
    for what, ratios in (
        (f"plain bf16 beside {judge}", [r["ratio"] for r in own if r["against"] in judged_by(op) and r["dtype"] == "bf16" and is_plain(r)
                                        and r["family"] == "sm80"]),
        ("plain bf16 of sm90 beside the fastest peer", [r["ratio"] for r in own if r["family"] == "sm90"
                                   and r["ratio"] and r["dtype"] == "bf16" and is_plain(r)]),
        ("deterministic beside plain", [r["of_plain"] for r in own if r["case"] == "deterministic"]),
    ):
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"{op}, {len(ratios)} rows {what}: geometric mean {mean:.3f}x, least {min(ratios):.3f}x")
    ratios = [r["error_ratio"] for r in own if "error_ratio" in r]
    if ratios:
        lines.append(f"{op}, {len(ratios)} rows' errors by the better of fa2 and cudnn: at most {max(ratios):.4f}x")
    return lines


def matmul_rate(gpu):
    a = gpu.torch.randn(8192, 8192, device="cuda", dtype=gpu.torch.bfloat16)
    result = measure(gpu, {"matmul": lambda: a @ a}, 5)["matmul"]
    return tuple(2 * 8192**3 / ms / 1e9 for ms in result)


def measure_rows(gpu, rows, output):
    """Rows with their figures, and how many are wrong. A row that we refuse has no figures."""
    results, wrong_rows, known = [], 0, {}
    for row in rows:
        try:
            result, wrong = (gpu_decode.measured if row["op"] == "decode" else measured)(gpu, row, known)
        except RuntimeError as error:
            wrong_rows += 1
            print(f"WRONG: {json.dumps(row)}: {error}", file=sys.stderr, flush=True)
            continue
        results.append(result)
        wrong_rows += bool(wrong)
        print(describe(result), wrong and f"WRONG: {wrong}", file=sys.stderr, flush=True)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        else:
            print(json.dumps(result), flush=True)
    return results, wrong_rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libnarrows.so")
    parser.add_argument("--output", type=Path, help="also write the rows there, each when it is measured")
    parser.add_argument("--op", choices=OPERATIONS, help="rows of one operation alone")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose JSON matches")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    options = parser.parse_args(arguments)
    rows = [row for row in all_rows() if options.op in (None, row["op"]) and re.search(options.only, json.dumps(row))]
    if options.list:
        print(*map(json.dumps, rows), sep="\n")
        return 0
    if not options.library:
        parser.error("--library: must name libnarrows.so")
    gpu = gpu_forward.Gpu(options.library)
    if gpu.torch.cuda.get_device_capability() != (9, 0):
        rows = [row for row in rows if row["family"] != "sm90"]
    print(f"peak {gpu.peak:.0f} TFLOP/s; matmul {matmul_rate(gpu)[0]:.0f} cold", file=sys.stderr)
    results, wrong_rows = measure_rows(gpu, rows, options.output)
    for line in (line for op in OPERATIONS for line in summary(results, op)):
        print(line, file=sys.stderr)
    return 1 if wrong_rows else 0


if __name__ == "__main__":
    sys.exit(main())
