"""What `io_model.py measure` does on a GPU: bytes by ncu's counters, memory by PyTorch's allocator, time by events."""

import csv
import ctypes
import datetime
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu
import gpu_forward
import io_model

METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "sm_read": "l1tex__m_xbar2l1tex_read_bytes.sum",  # what reaches the multiprocessors, TMA's copies included
    "sm_write": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",  # the same reads at L2's side; multicast counts once
}
FUSED_KERNEL = "forward_sm80"  # each call of it begins a row's kernels
LENGTHS, HEAD_DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128)
# O is written last, and what of it is still in L2 at the end is not counted: at most L2's size.
TENSORS_OF_L2 = 16
SCORES_AT_MOST = 36 * 10**9  # bytes of S and P of the three-kernel form, which then takes fewer heads
STEP_ROWS = 2**19  # heads * N of forward and backward
ROUNDS = 5  # of timing
DIFFERENCE = 0.03  # of the forms' results at most, relative; S, P and their gradients are rounded to bf16 in one alone


def sizes(quick):
    lengths, head_dims = ((1024, 4096), (64,)) if quick else (LENGTHS, HEAD_DIMS)
    return [{"n": n, "d": d, "causal": causal} for d in head_dims for n in lengths for causal in (False, True)]


def heads_of(n, d, l2_bytes):
    """(fused, three kernels)"""
    fused = math.ceil(TENSORS_OF_L2 * l2_bytes / (4 * n * d * io_model.ITEM))
    return fused, max(1, min(fused, SCORES_AT_MOST // (2 * n * n * io_model.ITEM)))


# --- counters ----------------------------------------------------------------------------------------------------------


def parse_counters(log):
    """[{"name": kernel, counter: value}] in the order of launches, from what `ncu --csv` wrote: a kernel a line, with
    a line of units, or a metric a line."""
    rows = list(csv.reader(line for line in log.splitlines() if line.startswith('"')))
    if not rows:
        raise SystemExit("ncu wrote no table: " + " ".join(log.split())[-600:])
    heads, found = rows[0], {}
    if "Metric Name" in heads:
        cells = [dict(zip(heads, row)) for row in rows[1:]]
        read = [
            (each["ID"], each["Kernel Name"], each["Metric Name"], each["Metric Unit"], each["Metric Value"])
            for each in cells
        ]
    else:
        units = dict(zip(heads, rows[1]))
        cells = [dict(zip(heads, row)) for row in rows[2:]]
        read = [(each["ID"], each["Kernel Name"], metric, units[metric], each[metric])
                for each in cells for metric in METRICS.values() if metric in each]  # fmt: skip
    names = {metric: name for name, metric in METRICS.items()}
    for number, kernel, metric, unit, value in read:
        if metric in names:
            if unit not in ("byte", "sector"):
                raise SystemExit(f"ncu: {metric}: unit '{unit}': must be byte or sector")
            found.setdefault(int(number), {"name": kernel})[names[metric]] = int(float(value.replace(",", "")))
    for kernel in found.values():
        for name, metric in METRICS.items():
            if name not in kernel:
                raise SystemExit(f"ncu: {kernel['name']}: has no {metric}")
    return [found[number] for number in sorted(found)]


def calls_of(kernels):
    """[(the fused kernel, what ran until the next one)]"""
    calls = []
    for kernel in kernels:
        if FUSED_KERNEL in kernel["name"]:
            calls.append((kernel, []))
        elif not calls:
            raise SystemExit(f"{kernel['name']}: ran before any {FUSED_KERNEL}")
        else:
            calls[-1][1].append(kernel)
    return calls


class Tensors:
    """Of `heads` heads, each (N, d) in one piece."""

    def __init__(self, device, heads, n, d):
        torch = device.torch
        torch.manual_seed(1)
        self.q, self.k, self.v, self.dout = (torch.randn(heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))


def inputs_of(device, **tensors):
    """Heads as the batch: (heads, N, d) is (b, N, 1, d)."""
    return {name: device.view(tensor.unsqueeze(2)) for name, tensor in tensors.items()}


def options_of(device, causal, **more):
    return {"causal": int(causal), "family": b"sm80", "stream": device.stream, **more}


def three_kernels(torch, q, k, v, s, p, o):
    """q is scaled already, so that it is three launches."""
    torch.bmm(q, k.transpose(1, 2), out=s)
    torch.softmax(s, -1, out=p)
    torch.bmm(p, v, out=o)


def profiled(torch, call):
    call()  # compiles, loads, chooses
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def relative(ours, other):
    return float((ours.float() - other.float()).norm() / other.float().norm())


def profile_row(device, size, l2_bytes):
    """Runs both forms once under the profiler; what the model says of them. The three kernels attend to all pairs: a mask
    would be a fourth."""
    torch, (heads, fewer) = device.torch, heads_of(size["n"], size["d"], l2_bytes)
    t = Tensors(device, heads, size["n"], size["d"])
    o = torch.empty_like(t.q)
    inputs, options = inputs_of(device, q=t.q, k=t.k, v=t.v), options_of(device, size["causal"])
    cost = device.narrows.explain(inputs, options)
    profiled(torch, device.narrows.forward(inputs, inputs_of(device, o=o), options))
    models = {"model_dram": cost["fused_bytes"] / heads, "model_l2": cost["fused_l2_bytes"] / heads}
    row = {**size, "fused": {"heads": heads, **models}, "three_kernel": None}
    if not size["causal"]:
        s = torch.empty(fewer, size["n"], size["n"], device="cuda", dtype=torch.bfloat16)
        p, o3 = torch.empty_like(s), torch.empty_like(o[:fewer])
        q = t.q[:fewer] * size["d"] ** -0.5
        profiled(torch, lambda: three_kernels(torch, q, t.k[:fewer], t.v[:fewer], s, p, o3))
        row["three_kernel"] = {"heads": fewer, "model_dram": cost["three_kernel_bytes"] / heads}
        row["difference"] = relative(o[:fewer], o3)
    return row


def child(options):
    """What ncu looks at."""
    device = gpu_forward.Gpu(options.library)
    with options.facts.open("w", encoding="utf-8") as facts:
        for size in sizes(options.quick):
            print(f"  profiling {size}", file=sys.stderr, flush=True)
            facts.write(json.dumps(profile_row(device, size, device_facts(device)["l2_bytes"])) + "\n")
            device.torch.cuda.empty_cache()
    return 0


def measure_traffic(options):
    with tempfile.TemporaryDirectory() as folder:
        log, facts = Path(folder) / "log.csv", Path(folder) / "facts.jsonl"
        command = [options.ncu, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"]
        command += [
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
            "--log-file",
            str(log),
            "--metrics",
            ",".join(METRICS.values()),
        ]
        command += [sys.executable, io_model.__file__, "child", "--library", options.library, "--facts", str(facts)]
        code = subprocess.run(command + ["--quick"] * options.quick, check=False).returncode
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        rows = [json.loads(line) for line in facts.read_text().splitlines()] if facts.exists() else []
        if code != 0 or not rows:
            raise SystemExit(f"ncu: exit code {code}: " + " ".join(text.split())[-600:])
    calls = calls_of(parse_counters(text))
    if len(calls) != len(rows):
        raise SystemExit(f"ncu saw {len(calls)} calls of {FUSED_KERNEL}, not {len(rows)}")
    for row, (fused, others) in zip(rows, calls):
        row["fused"]["kernels"] = [fused]
        if row["three_kernel"]:
            row["three_kernel"]["kernels"] = others
    return rows


# --- forward and backward: memory and time --------------------------------------------------------------------------------


def fused_step(device, t, causal):
    """Everything that the call needs is PyTorch's memory, which counts it."""
    torch, narrows = device.torch, device.narrows
    inputs = inputs_of(device, q=t.q.detach(), k=t.k.detach(), v=t.v.detach())
    sizes_ = [narrows.workspace_size(inputs, options_of(device, causal), backward) for backward in (False, True)]

    def scratch(bytes_):
        return torch.empty(bytes_, device="cuda", dtype=torch.uint8) if bytes_ else None

    def lent(workspace):
        return options_of(device, causal, **({} if workspace is None else {"workspace": device.view(workspace)}))

    def run():
        o, lse = torch.empty_like(t.q), torch.empty(t.q.shape[0], 1, t.q.shape[1], device="cuda")
        workspace = scratch(sizes_[0])
        narrows.forward(inputs, {**inputs_of(device, o=o), "lse": device.view(lse)}, lent(workspace))()
        del workspace
        workspace, gradients = scratch(sizes_[1]), [torch.empty_like(each) for each in (t.q, t.k, t.v)]
        saved = {**inputs, **inputs_of(device, o=o, dout=t.dout), "lse": device.view(lse)}
        narrows.backward(saved, inputs_of(device, **dict(zip(("dq", "dk", "dv"), gradients))), lent(workspace))()
        return (o, *gradients)

    return run


def standard_step(torch, t, mask):
    """Matrix product, softmax, matrix product, and their gradients; the mask is added in place."""

    def run():
        s = torch.bmm(t.q * t.q.shape[-1] ** -0.5, t.k.transpose(1, 2))
        if mask is not None:
            s.add_(mask)
        p = torch.softmax(s, -1)
        del s
        o = torch.bmm(p, t.v)
        del p
        return (o.detach(), *torch.autograd.grad(o, (t.q, t.k, t.v), t.dout))

    return run


def peak_of(torch, run):
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), results


def step_row(device, size):
    torch, (n, d) = device.torch, (size["n"], size["d"])
    heads = STEP_ROWS // n
    base = torch.cuda.memory_allocated()
    t = Tensors(device, heads, n, d)
    inputs_bytes = torch.cuda.memory_allocated() - base
    for each in (t.q, t.k, t.v):
        each.requires_grad_()
    # The mask is an input of the standard form alone, and not counted.
    mask = torch.full((n, n), -math.inf, device="cuda", dtype=torch.bfloat16).triu(1) if size["causal"] else None
    row = {**size, "heads": heads, "inputs_bytes": inputs_bytes, "results_bytes": inputs_bytes, "refused": {}}
    runs, results = {}, {}
    for name, make in {
        "fused": lambda: fused_step(device, t, size["causal"]),
        "standard": lambda: standard_step(torch, t, mask),
    }.items():
        beside = torch.cuda.memory_allocated() - inputs_bytes
        try:
            run = make()
            peak, results[name] = peak_of(torch, run)
        except RuntimeError as error:
            row["refused"][name] = str(error).splitlines()[0]
            continue
        runs[name], row[name] = run, {"peak_bytes": peak - beside}
    if len(results) == 2:
        row["difference"] = max(relative(a, b) for a, b in zip(results["fused"], results["standard"]))
    results.clear()
    for name, (cold, hot) in gpu.measure(device, runs, ROUNDS).items():
        row[name].update(ms=cold, hot_ms=hot)
    return row


def measure_training(device, quick):
    chosen = [size for size in sizes(False) if not quick or (size["n"], size["d"]) == (2048, 64)]
    small = Tensors(device, 1, 128, 64)
    for each in (small.q, small.k, small.v):
        each.requires_grad_()
    standard_step(device.torch, small, None)()  # cuBLAS takes its workspaces, which stay
    rows = []
    for size in chosen:
        rows.append(step_row(device, size))
        device.torch.cuda.empty_cache()
        print(f"  {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def device_facts(device):
    size = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(size), 38, 0)  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    torch = device.torch
    name = torch.cuda.get_device_properties(0).name
    return {"name": name, "l2_bytes": size.value, "torch": torch.__version__, "cuda": torch.version.cuda}


def measure(options):
    device = gpu_forward.Gpu(options.library)
    data = {"date": datetime.date.today().isoformat(), "device": device_facts(device), "traffic": [], "training": []}

    def keep():
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    data["training"] = measure_training(device, options.quick)
    keep()
    device.torch.cuda.empty_cache()
    data["traffic"] = measure_traffic(options)
    keep()
    print(*io_model.complaints(data), sep="\n", file=sys.stderr)
    wrong = [row for row in data["traffic"] + data["training"] if not row.get("difference", 0) <= DIFFERENCE]
    for row in wrong:
        print(
            f"results differ by {row['difference']:.3g}: d {row['d']} N {row['n']} causal {row['causal']}", file=sys.stderr
        )
    return 1 if wrong else 0
