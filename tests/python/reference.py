"""Checks narrows against the independent NumPy statement of the contract, tests/cpu/numpy_vectors.py."""

import importlib.util
from pathlib import Path

import numpy as np

import narrows

_path = Path(__file__).parent.parent / "cpu" / "numpy_vectors.py"
_spec = importlib.util.spec_from_file_location("numpy_vectors", _path)
_vectors = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_vectors)

# u of the contract's criterion, twice for 16 bits, where P is rounded as well as O.
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-21, "float64": 2.0**-49}

RULES = ("scale", "softcap", "causal", "chunk", "dropout", "seed", "offset", "origin", "rotary_interleaved")
# What changes how a result is computed, but no value.
WAYS = ("threads", "family", "window", "num_splits", "deterministic", "batch_invariant", "workspace", "status", "check", "stream")


def double(x):
    return np.asarray(x).astype(np.float64)


def attention(q, k, v, **options):
    """(O, LSE) in double precision."""
    results = run(q, k, v, **options)
    return results["o"], results["lse"]


def run(q, k, v, **options):
    """o and lse, and k_after and v_after of a call that appends."""
    tensors = {"q": double(q), "k": double(k), "v": double(v)}
    rules = {}
    for name, value in options.items():
        if name == "window" and value is not None:
            rules[name] = tuple(-1 if side is None else side for side in value)
        elif name in RULES:
            rules[name] = value
        elif value is not None and name not in WAYS:
            value = np.asarray(value)
            tensors[name] = double(value) if value.dtype.kind not in "iub" else value
    rules = {name: value for name, value in rules.items() if value is not None}
    if "dropout" in rules:
        rules = {"seed": 0, "offset": 0, **rules}
    return _vectors.run(tensors, rules)


def largest_logit(q, k, options):
    """No |logit| is larger."""
    norms = [np.linalg.norm(double(x), axis=-1).max(initial=0) for x in (q, k)]
    scale = options.get("scale")
    logit = norms[0] * norms[1] * (q.shape[-1] ** -0.5 if scale is None else abs(float(scale)))
    if options.get("softcap"):
        logit = min(logit, options["softcap"])
    if options.get("alibi_slopes") is not None:
        away = q.shape[-3] + k.shape[-3] + np.abs(options.get("shift", 0)).max()
        logit += np.abs(double(options["alibi_slopes"])).max(initial=0) * away
    if options.get("bias") is not None:
        bias = double(options["bias"])
        logit += np.abs(bias[np.isfinite(bias)]).max(initial=0)
    return logit


def assert_matches(o, lse, q, k, v, **options):
    want_o, want_lse = attention(q, k, v, **options)
    assert o.shape == want_o.shape and lse.shape == want_lse.shape
    spread, _ = attention(q, k, np.abs(double(v)), **options)  # P |V|
    kind, largest = np.asarray(q).dtype.name, largest_logit(q, k, options)
    limit = UNIT[kind] * spread * (1 + largest if kind in ("float32", "float64") else 1)
    limit = limit + (2.0**-24 if kind == "float16" else 0)  # its smallest number
    off = np.abs(double(o) - want_o)
    assert np.isfinite(double(o)).all() and (off <= limit).all(), f"O is off by {off.max()}"
    np.testing.assert_array_equal(np.isneginf(double(lse)), np.isneginf(want_lse))
    rows = ~np.isneginf(want_lse)
    off = np.abs(double(lse)[rows] - want_lse[rows])
    assert (off <= (1e-12 if kind == "float64" else 2e-5) * (1 + largest / 8)).all(), f"LSE is off by {off.max()}"


def check(q, k, v, **options):
    """narrows.attention into poisoned memory, compared with the reference. Returns (O, LSE)."""
    o = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse_type = np.float64 if q.dtype == np.float64 else np.float32
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.nan, lse_type)
    returned, returned_lse = narrows.attention(q, k, v, o=o, lse=lse, return_lse=True, **options)
    assert returned is o and returned_lse is lse
    assert_matches(o, lse, q, k, v, **options)
    return o, lse


def inputs(b=2, sq=9, sk=13, h=4, hk=2, d=16, dv=None, dtype=np.float32, seed=0):
    """Gaussian q, k, v, of odd sizes unless told otherwise."""
    random = np.random.default_rng(seed)
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d if dv is None else dv)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]
