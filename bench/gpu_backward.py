"""Backward calls of a row, as gpu_forward.py's. Each has o and lse of its own forward, made once, and writes dq, dk and dv."""

import functools
import math

import gpu_forward
from gpu_rows import window_of, zipf_lengths

NAMES = ("dq", "dk", "dv")


class Tensors(gpu_forward.Tensors):
    def __init__(self, gpu, row):
        super().__init__(gpu, row)
        self.dout = self.random(row["h"], row["dv"])
        self.dq, self.dk, self.dv = (gpu.torch.empty_like(x) for x in (self.q, self.k, self.v))


def ours(gpu, row, t):
    """With its workspace lent, so that nothing is allocated in the timing."""
    gpu_forward.ours(gpu, row, t)()
    options, inputs = gpu_forward.options_of(gpu, row, t), gpu.views(t, ("q", "k", "v"))
    size = gpu.narrows.workspace_size(inputs, options, backward=True)
    t.workspace = gpu.torch.empty(max(1, size), dtype=gpu.torch.uint8, device=t.q.device)
    options["workspace"] = gpu.view(t.workspace)
    call = gpu.narrows.backward({**inputs, **gpu.views(t, ("o", "lse", "dout"))}, gpu.views(t, NAMES), options)

    def run():
        call()
        return t.dq, t.dk, t.dv

    return run


def heads_second(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


def flash(gpu, row, t):
    aten, dropout, causal = gpu.torch.ops.aten, gpu_forward.dropout_of(row), row["causal"]
    dout, *qkv = heads_second(t.dout, t.q, t.k, t.v)
    # Of the rest: bounds and longest sequence of q and k, what dropout drew from, and a debug mask.
    o, lse, *rest = aten._scaled_dot_product_flash_attention(*qkv, dropout, causal, False)
    bounds, drawn = rest[:4], rest[4:6]

    def run():
        return heads_second(*aten._scaled_dot_product_flash_attention_backward(
            dout, *qkv, o, lse, *bounds, dropout, causal, *drawn))  # fmt: skip

    return run


def cudnn(gpu, row, t):
    aten, dropout, causal = gpu.torch.ops.aten, gpu_forward.dropout_of(row), row["causal"]
    dout, *qkv = heads_second(t.dout, t.q, t.k, t.v)
    o, lse, *rest = aten._scaled_dot_product_cudnn_attention(*qkv, None, True, dropout, causal, False)
    bounds, drawn = rest[:4], rest[4:6]

    def run():
        return heads_second(*aten._scaled_dot_product_cudnn_attention_backward(
            dout, *qkv, o, lse, *drawn, None, *bounds, dropout, causal))  # fmt: skip

    return run


def plain_flash(gpu, row, t):
    """FlashAttention-2 as it is, for what scaled_dot_product_attention has no words for: packed sequences and windows."""
    aten, causal, window = gpu.torch.ops.aten, row["causal"], window_of(row)
    packed = row["case"] == "varlen"
    bounds = t.bounds if packed else None
    longest = max(zipf_lengths(row)) if packed else row["sq"]
    layout = (bounds, bounds, longest, longest, 0.0, causal)
    limits = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    o, lse, *rest = aten._flash_attention_forward(t.q, t.k, t.v, *layout, False, **limits)

    def run():
        return aten._flash_attention_backward(t.dout, t.q, t.k, t.v, o, lse, *layout, *rest[:2], **limits)

    return run


def autograd(gpu, row, t, backend):
    """Of scaled_dot_product_attention, which also pads where the backend cannot do without."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        attend = gpu.torch.nn.functional.scaled_dot_product_attention
        o = attend(*heads_second(*leaves), **gpu_forward.sdpa_options(row, t)).transpose(1, 2)
    return lambda: gpu.torch.autograd.grad(o, leaves, t.dout, retain_graph=True)


def flash3(gpu, t, attend):
    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    o = attend(*leaves)
    return lambda: gpu.torch.autograd.grad(o, leaves, t.dout, retain_graph=True)


def candidates(gpu, row, t):
    direct = {} if row["case"].startswith("d1") else {"fa2": flash, "cudnn": cudnn}
    ways = {"ours": [functools.partial(ours, gpu, row, t)]}
    if row["case"] == "varlen" or window_of(row):
        ways["fa2"] = [functools.partial(plain_flash, gpu, row, t)]
    for name, backend in gpu_forward.backends(row).items():
        own = [functools.partial(direct[name], gpu, row, t)] if name in direct else []
        ways[name] = [*own, functools.partial(autograd, gpu, row, t, backend)]
    if attend := gpu_forward.flash_attention_3(row):
        ways["fa3"] = [functools.partial(flash3, gpu, t, attend)]
    return ways


def exact(gpu, row, t):
    q, k, v, dout = gpu_forward.exact_inputs(row, t, ("q", "k", "v", "dout"))
    p = gpu_forward.exact_probabilities(gpu.torch, row, q, k)
    ds = dout @ v.transpose(1, 2) - (dout * (p @ v)).sum(-1, keepdim=True)
    ds *= p / math.sqrt(row["d"])

    def of_kv_heads(x):
        return x.unflatten(0, (row["hk"], row["h"] // row["hk"])).sum(1)

    gradients = ds @ k, of_kv_heads(ds.transpose(1, 2) @ q), of_kv_heads(p.transpose(1, 2) @ dout)
    return tuple(x.transpose(0, 1) for x in gradients)
