"""Gradients of attention, from NumPy alone: a closed formula for dense calls, and central differences that prove it."""

import numpy as np
from reference import attention, double

OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dslopes": "alibi_slopes", "dsinks": "sinks"}


def loss(arrays, dout, dlse, options):
    """sum(dout * O + dlse * LSE) over the rows that see a key or a sink."""
    o, lse = attention(**arrays, **options)
    seen = ~np.isneginf(lse)
    return np.sum(double(dout) * o) + (0 if dlse is None else np.sum(double(dlse)[seen] * lse[seen]))


def differences(dout, q, k, v, dlse=None, **options):
    """Each gradient by central differences in double precision."""
    tensors = {name: double(options.pop(name)) for name in ("bias", "alibi_slopes", "sinks") if name in options}
    arrays = {"q": double(q).copy(), "k": double(k).copy(), "v": double(v).copy(), **tensors}
    step = 1e-5
    results = {}
    for gradient, of in OF.items():
        if of not in arrays:
            continue
        results[gradient] = result = np.zeros(arrays[of].shape)
        for index in np.ndindex(result.shape):
            here = arrays[of][index]
            if not np.isfinite(here):
                continue
            ends = []
            for sign in (1, -1):
                arrays[of][index] = here + sign * step
                ends.append(loss(arrays, dout, dlse, options))
            arrays[of][index] = here
            result[index] = (ends[0] - ends[1]) / (2 * step)
    return results


def formula(dout, q, k, v, dlse=None, **options):
    """Each gradient of a dense call without shift and lengths."""
    q, k, v, dout = double(q), double(k), double(v), double(dout)
    (b, sq, h, d), (sk, hk) = q.shape, k.shape[1:3]
    o, lse = attention(q, k, v, **options)
    identity = np.broadcast_to(np.eye(sk)[:, None], (b, sk, hk, sk))
    weights = lambda rules: attention(q, k, identity, **rules)[0].transpose(0, 2, 1, 3)  # (b, h, sq, sk)
    p = weights({name: value for name, value in options.items() if name != "dropout"})
    kept = weights(options) / np.where(p == 0, 1, p)
    wide_k, wide_v = (np.repeat(x, h // hk, axis=2) for x in (k, v))
    dlse = np.zeros(lse.shape) if dlse is None else double(dlse)
    delta = dlse - np.einsum("bihd,bihd->bhi", dout, o)
    ds = p * (kept * np.einsum("bihd,bjhd->bhij", dout, wide_v) + delta[..., None])
    scale = d**-0.5 if options.get("scale") is None else options["scale"]
    draw = ds * scale
    if options.get("softcap"):
        draw = draw * (1 - np.tanh(np.einsum("bihd,bjhd->bhij", q, wide_k) * scale / options["softcap"]) ** 2)
    by_group = lambda x: x.reshape(b, sk, hk, h // hk, x.shape[-1]).sum(axis=3)
    results = {
        "dq": np.einsum("bhij,bjhd->bihd", draw, wide_k),
        "dk": by_group(np.einsum("bhij,bihd->bjhd", draw, q)),
        "dv": by_group(np.einsum("bhij,bihd->bjhd", p * kept, dout)),
    }
    if "bias" in options:
        shape = (1,) * (4 - np.ndim(options["bias"])) + np.shape(options["bias"])
        axes = tuple(axis for axis in range(4) if shape[axis] == 1)
        results["dbias"] = ds.sum(axis=axes, keepdims=True).reshape(np.shape(options["bias"]))
    if "alibi_slopes" in options:
        shift = 0 if options.get("causal") == "top_left" else sk - sq
        away = np.abs(np.arange(sq)[:, None] + shift - np.arange(sk))
        results["dslopes"] = -(ds * away).sum(axis=(2, 3) if np.ndim(options["alibi_slopes"]) == 2 else (0, 2, 3))
    if "sinks" in options:
        sinks = double(options["sinks"])[:, None]
        finite = np.where(np.isneginf(lse), 0, lse)
        results["dsinks"] = (np.where(np.isneginf(sinks), 0, np.exp(sinks - finite)) * delta).sum(axis=(0, 2))
    return results
