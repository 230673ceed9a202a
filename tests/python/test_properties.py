"""Random shapes, layouts, dtypes and options against the reference."""

import ml_dtypes
import numpy as np
from gradients import formula
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import check, double

import narrows

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # to shrink a failure takes minutes; add Phase.shrink by hand
    suppress_health_check=[HealthCheck.too_slow],
)
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
LENGTH = st.integers(0, 40)


@st.composite
def rules(draw, batch, heads, sq, sk):
    """Options that mean the same to narrows and to the reference; sq, sk: the longest lengths."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    options = {}
    side = st.one_of(st.none(), st.integers(0, 50))
    choices = {
        "causal": st.sampled_from([True, "top_left"]),
        "window": st.tuples(side, side),
        "chunk": st.integers(1, 20),
        "scale": st.floats(-1, 1),
        "softcap": st.floats(0.5, 20),
        "shift": st.lists(st.integers(-30, 30), min_size=batch, max_size=batch),
        "threads": st.integers(1, 3),
    }
    for name in draw(st.sets(st.sampled_from(sorted([*choices, "alibi_slopes", "bias", "mask", "sinks"])), max_size=4)):
        if name in choices:
            options[name] = draw(choices[name])
        elif name == "sinks":
            options[name] = random.standard_normal(heads)
        elif name == "alibi_slopes":
            options[name] = random.random((batch, heads) if draw(st.booleans()) else (heads,)).astype(np.float32)
        else:
            shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, sq, sk)]
            values = random.standard_normal(shape)
            options[name] = values < 1 if name == "mask" else np.where(values < 1, values, -np.inf).astype(np.float32)
    if options.get("causal") == "top_left":
        options.pop("shift", None)
    return options


def laid_out(draw, shape, dtype, random):
    """A random array of that shape in a random memory order, reversed along some axes."""
    order = draw(st.permutations(range(len(shape))))
    memory = random.standard_normal([shape[axis] for axis in order]).astype(dtype)
    x = memory.transpose(np.argsort(order))
    return x[tuple(slice(None, None, -1 if draw(st.integers(0, 4)) == 0 else 1) for _ in shape)]


@SETTINGS
@given(data=st.data())
def test_dense(data):
    draw = data.draw
    b, sq, sk, hk = draw(st.integers(1, 3)), draw(LENGTH), draw(LENGTH), draw(st.integers(1, 3))
    h, d, dv = hk * draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(DTYPES))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    q, k, v = (laid_out(draw, shape, dtype, random) for shape in [(b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv)])
    options = draw(rules(b, h, sq, sk))
    if draw(st.integers(0, 3)) == 0:
        options["seqused_k"] = [draw(st.integers(0, sk)) for _ in range(b)]
        for name in ("bias", "mask"):
            options.pop(name, None)
    check(q, k, v, **options)


@SETTINGS
@given(data=st.data())
def test_varlen(data):
    draw = data.draw
    lengths = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4))
    cu_q, cu_k = (np.cumsum([0, *part]).tolist() for part in zip(*lengths))
    hk, d, dv = draw(st.integers(1, 2)), draw(st.integers(1, 24)), draw(st.integers(1, 24))
    h = hk * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    total_q, total_k = cu_q[-1] + draw(st.integers(0, 3)), cu_k[-1] + draw(st.integers(0, 3))
    q, k, v = (laid_out(draw, shape, dtype, random) for shape in [(total_q, h, d), (total_k, hk, d), (total_k, hk, dv)])
    longest_q, longest_k = (max(part) for part in zip(*lengths))
    options = draw(rules(len(lengths), h, longest_q, longest_k))
    check(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)


@settings(SETTINGS, max_examples=60)
@given(data=st.data())
def test_gradients(data):
    draw = data.draw
    b, sq, sk, hk = draw(st.integers(1, 3)), draw(LENGTH), draw(LENGTH), draw(st.integers(1, 2))
    h, d, dv = hk * draw(st.integers(1, 3)), draw(st.integers(1, 24)), draw(st.integers(1, 24))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    q, k, v = (laid_out(draw, shape, np.float64, random) for shape in [(b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv)])
    options = draw(rules(b, h, sq, sk))
    options.pop("shift", None)
    if draw(st.booleans()):
        options.update(dropout=draw(st.floats(0.1, 0.9)), seed=draw(st.integers(0, (1 << 64) - 1)))
    o, lse = narrows.attention(q, k, v, return_lse=True, **options)
    dout = laid_out(draw, o.shape, np.float64, random)
    dlse = random.standard_normal(lse.shape) if draw(st.booleans()) else None
    memory = {name: laid_out(draw, x.shape, np.float64, random) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for x in memory.values():
        x[...] = np.nan
    got = narrows.attention_backward(dout, q, k, v, o, lse, dlse, **memory, **options)
    for name, want in formula(dout, q, k, v, dlse, **options).items():
        # bias and slopes of the rules are float32
        limit = (1e-10 if getattr(got, name).dtype == np.float64 else 1e-5) * max(1, np.abs(want).max(initial=0))
        off = np.abs(double(getattr(got, name)) - want)
        assert (off <= limit).all(), f"{name} is off by {off.max()}"
