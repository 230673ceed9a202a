"""Forward calls of a row, ours and PyTorch's.

What gpu_backward.py has for backward is here for forward: Tensors of a row; candidates(), {name: ways to make a call without
arguments, the first that works is taken}, whose call gives a tensor for each of NAMES; exact(), the same in fp64 for the first
batch row of a dense call.
"""

import ctypes
import functools
import math
import sys

import narrows_c
from gpu_rows import window_of, zipf_lengths

NAMES = ("o",)
# Dense bf16 FLOP a clock of a multiprocessor with fp32 sums, by compute capability.
FLOP_PER_CLOCK = {80: 2048, 86: 1024, 87: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024, 121: 1024}


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

    def views(self, t, names):
        return {name: self.view(getattr(t, name)) for name in names}


class Tensors:
    """Of a row: (b, s, h, d), of varlen (s, h, d), in the layout that its case names."""

    def __init__(self, gpu, row):
        torch, dtype = gpu.torch, gpu.dtype(row["dtype"])
        torch.manual_seed(1)
        varlen = row["case"] == "varlen"
        rows = (sum(zipf_lengths(row)),) if varlen else (row["b"], row["sq"])
        self.gpu, self.row, self.rows = gpu, row, rows
        self.q, self.k = self.random(row["h"], row["d"]), self.random(row["hk"], row["d"])
        self.v = self.random(row["hk"], row["dv"])
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty((row["h"], *rows) if varlen else (row["b"], row["h"], row["sq"]), device="cuda")
        square = (1, row["h"], row["sq"], row["sk"])
        self.bias = torch.randn(square, device="cuda", dtype=dtype) if row["case"] == "bias" else None
        self.mask = torch.rand(1, 1, *square[2:], device="cuda") < 0.9 if row["case"] == "mask" else None
        self.slopes = torch.tensor([2 ** (-8 * (i + 1) / row["h"]) for i in range(row["h"])], device="cuda")
        bounds = torch.tensor([0, *zipf_lengths(row)]).cumsum(0) if varlen else torch.zeros(1)
        self.bounds = bounds.to(torch.int32).cuda()

    def random(self, heads, width):
        make = functools.partial(self.gpu.torch.randn, device="cuda", dtype=self.gpu.dtype(self.row["dtype"]))
        if self.row["case"] == "unaligned":  # rows of two elements more, from the second element on
            return make(*self.rows, heads, width + 2)[..., 1 : width + 1]
        if self.row["case"] == "transposed":
            return make(self.rows[0], heads, width, self.rows[1]).permute(0, 3, 1, 2)
        return make(*self.rows, heads, width)


def options_of(gpu, row, t):
    options = {"causal": int(row["causal"]), "family": row["family"].encode(), "stream": gpu.stream}
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
    if case == "deterministic":
        options["deterministic"] = 1
    if window_of(row):
        options.update(has_window=1, window_left=window_of(row) - 1, window_right=-1)
    if case == "varlen":
        options.update(cu_seqlens_q=gpu.view(t.bounds), cu_seqlens_k=gpu.view(t.bounds))
    return options


def ours(gpu, row, t):
    call = gpu.narrows.forward(gpu.views(t, ("q", "k", "v")), gpu.views(t, ("o", "lse")), options_of(gpu, row, t))

    def run():
        call()
        return (t.o,)

    return run


def sdpa_options(row, t):
    return {
        "is_causal": row["causal"], "enable_gqa": row["h"] != row["hk"], "attn_mask": t.bias if t.bias is not None else t.mask,
        "dropout_p": dropout_of(row),
    }  # fmt: skip


def dropout_of(row):
    return 0.1 if row["case"] == "dropout" else 0.0


def attention(gpu, row, t, backend):
    """scaled_dot_product_attention by one backend; it refuses by RuntimeError what the backend does not take."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options, chosen = sdpa_options(row, t), getattr(SDPBackend, backend)
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))

    def run():
        with sdpa_kernel(chosen), gpu.torch.inference_mode():
            return (gpu.torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2),)

    return run


def packed_attention(gpu, row, t):
    longest = max(zipf_lengths(row))

    def run():
        with gpu.torch.inference_mode():
            return gpu.torch.ops.aten._flash_attention_forward(
                t.q, t.k, t.v, t.bounds, t.bounds, longest, longest, 0.0, row["causal"], False)[:1]  # fmt: skip

    return run


def flash_attention_3(row):
    """FlashAttention-3 by its own package, where that is installed, for the rows of the family for Hopper; or None."""
    if row["family"] != "sm90" or row["dtype"] == "fp32" or row["case"] not in ("", "gqa4", "deterministic"):
        return None
    try:
        from flash_attn_interface import flash_attn_func
    except (ImportError, OSError) as error:  # not installed, or not for this machine
        if not isinstance(error, ModuleNotFoundError):
            print(f"  fa3: {error}", file=sys.stderr)
        return None

    options = {"causal": row["causal"], **({"deterministic": True} if row["case"] == "deterministic" else {})}

    def attend(q, k, v):
        o = flash_attn_func(q, k, v, **options)
        return o[0] if isinstance(o, tuple) else o  # some versions give the LSE too

    return attend


def flash3(gpu, t, attend):
    def run():
        with gpu.torch.inference_mode():
            return (attend(t.q, t.k, t.v),)

    return run


def backends(row):
    """PyTorch's that compute such a row, by the names of the peers."""
    if row["case"] in ("", "gqa4"):
        plain = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
        return {"torch": "EFFICIENT_ATTENTION"} if row["dtype"] == "fp32" else plain
    if row["case"] in ("bias", "mask"):
        return {"torch": "EFFICIENT_ATTENTION"}
    if row["case"] == "dropout" or row["case"].startswith("d1"):
        return {"fa2": "FLASH_ATTENTION"}
    return {}


def candidates(gpu, row, t):
    ways = {"ours": [functools.partial(ours, gpu, row, t)]}
    if row["case"] == "varlen":
        ways["fa2"] = [functools.partial(packed_attention, gpu, row, t)]
    for name, backend in backends(row).items():
        ways[name] = [functools.partial(attention, gpu, row, t, backend)]
    if attend := flash_attention_3(row):
        ways["fa3"] = [functools.partial(flash3, gpu, t, attend)]
    return ways


def exact_inputs(row, t, names):
    """(h, s, width) in fp64 of the first batch row; kv heads repeated for each of their query heads."""
    for name in names:
        x = getattr(t, name)[0].double().transpose(0, 1)
        yield x.repeat_interleave(row["h"] // row["hk"], 0) if name in ("k", "v") else x


def exact_probabilities(torch, row, q, k):
    s = q @ k.transpose(1, 2) / math.sqrt(row["d"])
    if row["causal"]:
        s.masked_fill_(torch.ones_like(s[0], dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(s, -1)


def exact(gpu, row, t):
    q, k, v = exact_inputs(row, t, ("q", "k", "v"))
    return ((exact_probabilities(gpu.torch, row, q, k) @ v).transpose(0, 1),)
