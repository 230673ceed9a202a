"""attention_backward against central differences and a closed formula in NumPy; ids are of the table of cases."""

import gc

import ml_dtypes
import numpy as np
import pytest
from gradients import OF, differences, formula
from reference import UNIT, double, inputs
from test_arrays import Tensor

import narrows

BF16 = ml_dtypes.bfloat16
RANDOM = np.random.default_rng(11)
BIAS = RANDOM.standard_normal((2, 2, 4, 6))
SLOPES = np.array([0.5, 0.125])
RULES = {
    "none": {},
    "causal, more keys": {"causal": True},
    "top_left, softcap": {"causal": "top_left", "softcap": 1.5, "scale": 1.2},
    "window": {"window": (1, 1)},
    "chunk": {"chunk": 2, "scale": -0.4},
    "scale 0": {"scale": 0.0},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi of each sequence": {"alibi_slopes": np.stack([SLOPES, 2 * SLOPES]), "softcap": 2.0},
    "bias": {"bias": BIAS},
    "bias of each key": {"bias": BIAS[0, 0, 0], "softcap": 1.0},
    "bias of each query and sequence": {"bias": BIAS[:, :1, :, :1], "causal": True},
    "bias that masks": {"bias": np.where(BIAS[0] > 0.5, -np.inf, BIAS[0])},
    "sinks": {"sinks": np.array([0.5, -np.inf]), "causal": True},
    "mask with an empty row": {"mask": (BIAS[:, :1] > -0.3) & (np.arange(4) != 2)[:, None]},
    "interval": {"key_begin": [[0, 2, -1, 4], [1, 6, 0, 5]], "key_end": [[2, 5, 9, 3], [2, 9, 6, 6]], "bias": BIAS},
    "interval, prefix": {"key_end": [[3, 3, 3, 4], [1, 2, 3, 4]], "sinks": np.array([0.5, 1.0])},
    "dropout": {"dropout": 0.4, "seed": 5, "offset": 6},
    "everything": {
        "causal": True, "window": (3, 0), "softcap": 2.0, "alibi_slopes": SLOPES, "bias": BIAS[:1, :, :1],
        "sinks": np.array([0.1, 1.0]), "mask": BIAS[0, 0] > -1, "dropout": 0.25, "seed": 1 << 63, "offset": 9,
    },
}  # fmt: skip


def results_of(q, k, v, **options):
    """dout, o, lse, dlse of a call; the gradients of the results are Gaussian."""
    o, lse = narrows.attention(q, k, v, return_lse=True, **options)
    random = np.random.default_rng(q.size)
    return random.standard_normal(o.shape).astype(o.dtype), o, lse, random.standard_normal(lse.shape).astype(lse.dtype)


def backward(q, k, v, *, dlse=True, **options):
    """(gradients in poisoned memory, dout, dlse)."""
    dout, o, lse, gradient = results_of(q, k, v, **options)
    gradient = gradient if dlse else None
    arrays = {"q": q, "k": k, "v": v, **options}
    memory = {name: np.full_like(arrays[of], np.nan) for name, of in OF.items() if arrays.get(of) is not None}
    got = narrows.attention_backward(dout, q, k, v, o, lse, gradient, **memory, **options)
    for name in OF:
        assert getattr(got, name) is memory.get(name)
    return {name: double(x) for name, x in memory.items()}, dout, gradient


def compare(got, want, limit):
    assert set(got) == set(want)
    for name, x in want.items():
        off = np.abs(got[name] - x).max(initial=0)
        assert np.isfinite(got[name]).all() and off <= limit * max(1, np.abs(x).max(initial=0)), (
            f"{name} is off by {off}"
        )


def small(dtype=np.float64):
    return inputs(b=2, sq=4, sk=6, h=2, hk=1, d=3, dv=2, dtype=dtype)


@pytest.mark.parametrize("rule", RULES)
def test_against_central_differences(rule):
    options = RULES[rule]
    got, dout, dlse = backward(*small(), **options)
    want = differences(dout, *small(), dlse, **options)
    compare(got, want, 1e-8)
    compare(formula(dout, *small(), dlse, **options), want, 1e-8)


@pytest.mark.parametrize("options", [
    {"causal": True}, {"seqused_q": [2, 3, 0, 1], "seqused_k": [4, 0, 1, 2], "sinks": np.array([0.3, -1.0])},
    {"bias": BIAS[0, :1, :3, :5], "shift": [1, 0, -1, 2], "causal": True},
    {"alibi_slopes": SLOPES, "dropout": 0.5, "seed": 3},
    {"key_begin": [0, 1, 2, -4, 1, 0, 1, 0, 0], "key_end": [2, 9, 1, 3, 4, 1, 2, 9, 9]},
], ids=lambda options: ", ".join(options))  # fmt: skip
def test_varlen_against_central_differences(options):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal(shape) for shape in [(9, 2, 3), (13, 1, 3), (13, 1, 2)])
    options = {"cu_seqlens_q": [0, 2, 5, 5, 7], "cu_seqlens_k": [0, 4, 4, 9, 11], **options}
    got, dout, dlse = backward(q, k, v, **options)
    compare(got, differences(dout, q, k, v, dlse, **options), 1e-8)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_every_dtype(dtype, heads):
    q, k, v = inputs(sq=33, sk=45, h=heads[0], hk=heads[1], d=24, dv=40, dtype=dtype)
    bias = np.random.default_rng(1).standard_normal((heads[0], 33, 45)).astype(dtype)
    got, dout, dlse = backward(q, k, v, causal=True, bias=bias, sinks=bias[:, 0, 0].copy())
    want = formula(dout, q, k, v, dlse, causal=True, bias=bias, sinks=bias[:, 0, 0])
    compare(got, want, 16 * UNIT[np.dtype(dtype).name])


def test_A07_varlen_causal_with_fewer_keys_than_queries():
    q = inputs(b=1, sq=256, h=1, hk=1, d=32, dtype=np.float16)[0][0] * np.float16(3)
    k = inputs(b=1, sk=3, h=1, hk=1, d=32, dtype=np.float16)[1][0] * np.float16(3)
    options = {"cu_seqlens_q": [0, 76, 110, 256], "cu_seqlens_k": [0, 1, 2, 3], "causal": True}
    o, lse = narrows.attention(q, k, k, return_lse=True, **options)
    got = narrows.attention_backward(np.ones_like(o), q, k, k, o, lse, **options)
    for gradient in got[:3]:
        assert np.isfinite(gradient).all()
    empty = np.isneginf(lse[0])
    assert empty.sum() == 256 - 3 and (got.dq[empty] == 0).all()
    np.testing.assert_array_equal(got.dv, np.ones((3, 1, 32)))  # one query sees each key, alone


def test_A14_an_empty_row_adds_nothing():
    q, k, v = inputs(sq=4, sk=4)
    mask = np.tril(np.ones((2, 1, 4, 4), bool))
    mask[1, 0, 2] = False
    got, dout, _ = backward(q, k, v, mask=mask, dlse=False)
    assert (got["dq"][1, 2] == 0).all()
    dout[1, 2] = 1e30
    o, lse = narrows.attention(q, k, v, mask=mask, return_lse=True)
    again = narrows.attention_backward(dout, q, k, v, o, lse, mask=mask)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(again, name), got[name].astype(np.float32))


def test_A16_gradients_of_sinks():
    q, k, v = inputs(sq=1, sk=1, h=4, hk=4)
    for options in ({"seqused_k": [0, 0]}, {"bias": np.full((1, 1), -80, np.float32)}):  # the sink takes all weight
        got, _, dlse = backward(q, k, v, sinks=np.array([0.5, 100, 40, 60], np.float32), **options)
        np.testing.assert_allclose(got["dsinks"], dlse.sum(axis=(0, 2)), rtol=1e-5)
        assert np.abs(got["dk"]).max() < 1e-12


def test_C01_keys_without_queries_get_zero():
    q, k, v = (x[0] for x in inputs(b=1, sq=9, sk=30, dtype=BF16))
    got, _, _ = backward(q, k, v, cu_seqlens_q=[0, 0, 5, 9, 9], cu_seqlens_k=[0, 8, 15, 20, 30])
    for name in ("dk", "dv"):
        assert (got[name][:8] == 0).all() and (got[name][20:] == 0).all() and (got[name][8:20] != 0).any()


def test_C08_slack_gets_zeros_whatever_lies_there():
    q, k, v = (x[0] for x in inputs(b=1, sq=12, sk=15))
    options = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 6, 11], "causal": True}
    clean, _, _ = backward(q, k, v, **options)
    for x, end in ((q, 9), (k, 11), (v, 11)):
        x[end:] = np.nan
    dout, o, lse, dlse = results_of(q, k, v, **options)
    dout[9:], dlse[:, 9:] = np.nan, np.nan
    memory = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    narrows.attention_backward(dout, q, k, v, o, lse, dlse, **memory, **options)
    for name, end in (("dq", 9), ("dk", 11), ("dv", 11)):
        assert (memory[name][end:] == 0).all()
        np.testing.assert_array_equal(memory[name], clean[name].astype(np.float32))


def test_G01_G05_any_strides_of_dout():
    q, k, v = inputs(sq=32, sk=32, h=4, hk=1, d=8)
    dout, o, lse, dlse = results_of(q, k, v)
    want = narrows.attention_backward(dout, q, k, v, o, lse, dlse)
    elsewhere = [
        (dout.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), np.asfortranarray(dlse)),
        (np.asfortranarray(dout), dlse[:, ::-1].copy()[:, ::-1]),
        (dout[:, ::-1].copy()[:, ::-1], np.repeat(dlse, 2, axis=2)[..., ::2]),
    ]
    for strided, per_row in elsewhere:
        for got, x in zip(narrows.attention_backward(strided, q, k, v, o, lse, per_row), want):
            np.testing.assert_array_equal(got, x)
    one = np.broadcast_to(np.float32(1), o.shape)  # the gradient of sum(o)
    assert one.strides == (0, 0, 0, 0)
    for got, x in zip(
        narrows.attention_backward(one, q, k, v, o, lse), narrows.attention_backward(one.copy(), q, k, v, o, lse)
    ):
        np.testing.assert_array_equal(got, x)


def test_G10_varlen_with_different_strides_of_dout_and_o():
    q, k, v = (x[0] for x in inputs(b=1, sq=9, sk=13))
    options = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 6, 13], "causal": True}
    dout, o, lse, _ = results_of(q, k, v, **options)
    want = narrows.attention_backward(dout, q, k, v, o, lse, **options)
    spread = np.repeat(dout, 3, axis=0)[::3]
    got = narrows.attention_backward(spread, q, k, v, o.transpose(1, 2, 0).copy().transpose(2, 0, 1), lse, **options)
    for x, y in zip(got[:3], want):
        np.testing.assert_array_equal(x, y)


def test_I03_softcap_in_bfloat16():
    q, k, v = inputs(b=1, sq=70, sk=70, h=2, hk=2, d=32, dtype=BF16)
    got, dout, dlse = backward(q * BF16(4), k * BF16(4), v, softcap=10.0, causal=True)
    compare(got, formula(dout, q * BF16(4), k * BF16(4), v, dlse, softcap=10.0, causal=True), 16 * UNIT["bfloat16"])


def test_I13_bias_of_another_type_has_finite_gradients():
    x = inputs(b=2, sq=32, sk=32, h=4, hk=4, d=16, dtype=BF16)
    bias = np.random.default_rng(2).standard_normal((1, 4, 32, 32)).astype(np.float32)
    got, dout, dlse = backward(*x, bias=bias)
    compare(got, formula(dout, *x, dlse, bias=bias), 16 * UNIT["bfloat16"])


def test_J01_a_loss_of_lse_alone():
    q, k, v = inputs()
    o, lse = narrows.attention(q, k, v, causal=True, return_lse=True)
    dlse = np.random.default_rng(0).standard_normal(lse.shape).astype(np.float32)
    zero = np.zeros_like(o)
    got = narrows.attention_backward(zero, q, k, v, o, lse, dlse, causal=True)
    want = formula(zero, q, k, v, dlse, causal=True)
    compare({name: double(getattr(got, name)) for name in want}, want, 1e-6)
    assert np.abs(got.dq).max() > 0.1 and (got.dv == 0).all()


def test_K01_the_same_bits_each_time_and_with_any_number_of_threads():
    q, k, v = inputs(sq=90, sk=110, h=6, hk=2)
    bias = np.random.default_rng(0).standard_normal((110,)).astype(np.float32)
    dout, o, lse, dlse = results_of(q, k, v, causal=True, bias=bias)
    want = narrows.attention_backward(dout, q, k, v, o, lse, dlse, causal=True, bias=bias, threads=1)
    for threads in (0, 1, 2, 3, 7):
        got = narrows.attention_backward(
            dout, q, k, v, o, lse, dlse, causal=True, bias=bias, threads=threads, deterministic=True
        )
        for name in ("dq", "dk", "dv", "dbias"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_O03_more_leading_axes():
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in inputs(b=6))
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, k, v)]
    for shape, one in [((2, 3, 4, 9, 13), (6, 4, 9, 13)), ((1, 1, 4, 1, 13), (1, 4, 1, 13)), ((13,), (13,))]:
        bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        got, _, _ = backward(q, k, v, bias=bias)
        want, _, _ = backward(*flat, bias=bias.reshape(one))
        for name, x in want.items():
            np.testing.assert_array_equal(got[name].reshape(x.shape), x)


def test_only_what_is_wanted():
    q, k, v = inputs()
    sinks = [0.5, 0, 1, -1.0]
    dout, o, lse, _ = results_of(q, k, v, sinks=sinks)
    whole = narrows.attention_backward(dout, q, k, v, o, lse, sinks=sinks)
    assert isinstance(whole, narrows.Gradients) and whole._fields == tuple(OF)
    assert whole.dbias is None and whole.dslopes is None and whole.dsinks.dtype == np.float64
    some = narrows.attention_backward(dout, q, k, v, o, lse, sinks=sinks, wanted=("dv", "dsinks"))
    assert (some.dq, some.dk, some.dbias, some.dslopes) == (None,) * 4
    np.testing.assert_array_equal(some.dv, whole.dv)
    np.testing.assert_array_equal(some.dsinks, whole.dsinks)


def test_results_in_strided_memory_and_of_expanded_inputs():
    q, k, v = inputs(b=1)
    wide = [np.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, v)]
    dout, o, lse, dlse = results_of(*wide)
    memory = np.full((3, 18, 4, 16), np.nan, np.float32)
    got = narrows.attention_backward(dout, *wide, o, lse, dlse, dq=memory[:, ::2])
    assert got.dk.shape == (3, 13, 2, 16) and got.dk.flags.writeable
    compare({n: double(getattr(got, n)) for n in ("dq", "dk", "dv")}, formula(dout, *wide, dlse), 1e-5)
    assert np.isnan(memory[:, 1::2]).all()


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_producers(versioned):
    arrays = inputs(dtype=BF16)
    saved = results_of(*arrays, sinks=np.ones(4, np.float32))
    want = narrows.attention_backward(saved[0], *arrays, *saved[1:], sinks=np.ones(4, np.float32))
    wrap = lambda x: Tensor(x, versioned=versioned)
    dq = np.full_like(arrays[0], np.nan)
    given = wrap(dq)
    got = narrows.attention_backward(
        wrap(saved[0]), *map(wrap, arrays), *map(wrap, saved[1:]), sinks=wrap(np.ones(4, np.float32)), dq=given
    )
    assert got.dq is given and type(got.dk) is np.ndarray and got.dk.dtype == BF16 and got.dsinks.dtype == np.float32
    np.testing.assert_array_equal(dq, want.dq)
    for name in ("dk", "dv", "dsinks"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    del given, got
    gc.collect()
    assert Tensor.live == 0


def test_array_api_library_gets_its_own_arrays_back():
    xp = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    arrays = inputs()
    saved = results_of(*arrays)
    got = narrows.attention_backward(xp.asarray(saved[0]), *map(xp.asarray, arrays), *map(xp.asarray, saved[1:]))
    want = narrows.attention_backward(saved[0], *arrays, *saved[1:])
    for name in ("dq", "dk", "dv"):
        assert type(getattr(got, name)) is type(xp.asarray(arrays[0]))
        np.testing.assert_array_equal(np.asarray(getattr(got, name)), getattr(want, name))


def test_each_gradient_is_of_the_kind_of_its_own_array():
    xp = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    (q, k, v), sinks = inputs(), [0.5, 0, 1, -1.0]
    dout, o, lse, _ = results_of(q, k, v, sinks=sinks)
    mixed = narrows.attention_backward(dout, q, xp.asarray(k), v, o, lse, sinks=xp.asarray(sinks))
    kinds = [type(x) for x in (mixed.dq, mixed.dk, mixed.dv, mixed.dsinks)]
    assert kinds == [np.ndarray, type(xp.asarray(k)), np.ndarray, type(xp.asarray(k))]
    assert type(narrows.attention_backward(dout, q, k, v, o, lse, sinks=sinks).dsinks) is np.ndarray


def test_torch_autograd_agrees():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q, k, v = (torch.from_numpy(x).double().requires_grad_() for x in inputs(h=4, hk=4))
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    want.transpose(1, 2).sum().backward()
    arrays = [x.detach() for x in (q, k, v)]
    o, lse = narrows.attention(*arrays, return_lse=True)
    got = narrows.attention_backward(torch.ones(1, dtype=torch.float64).expand(o.shape), *arrays, o, lse)
    for x, gradient in zip((q, k, v), got):
        assert isinstance(gradient, torch.Tensor) and (gradient - x.grad).abs().max() < 1e-12


def refused(kind, text, *, without=(), **options):
    q, k, v = inputs()
    arrays = {"dout": np.ones_like(q), "q": q, "k": k, "v": v, "o": q.copy(), "lse": np.ones((2, 4, 9), np.float32)}
    memory = {name: np.full_like(arrays[OF[name]], np.nan) for name in ("dq", "dk", "dv") if name not in without}
    with pytest.raises(Exception) as error:
        narrows.attention_backward(**{**arrays, **memory, **options})
    assert (error.type, str(error.value)) == (kind, text)
    assert all(np.isnan(x).all() for x in memory.values())


def test_exact_refusals():
    rule = "must be a NumPy array or a tensor with __dlpack__"
    refused(TypeError, f"lse: NoneType: {rule}", lse=None)
    refused(TypeError, f"dout: float: {rule}", dout=1.0)
    refused(TypeError, "attention_backward() has no argument 'softmax_scale'; did you mean 'scale'?", softmax_scale=1.0)
    refused(TypeError, "attention_backward() has no argument 'd_bias'; did you mean 'dbias'?", d_bias=None)
    refused(TypeError, "attention_backward() has no argument 'return_lse'", return_lse=True)
    refused(ValueError, "dout: shape (2, 9, 4, 8): must be (b, sq, h, dv) = (2, 9, 4, 16); nearest legal: (2, 9, 4, 16)",
            dout=np.ones((2, 9, 4, 8), np.float32))  # fmt: skip
    refused(TypeError, "dout: fp64: must be q's dtype; nearest legal: fp32", dout=np.ones((2, 9, 4, 16)))
    refused(ValueError, "lse: shape (2, 9, 4): must be (b, h, sq) = (2, 4, 9); nearest legal: (2, 4, 9)",
            lse=np.ones((2, 9, 4), np.float32))  # fmt: skip
    refused(TypeError, "dlse: fp64: must be fp32 (fp64 for fp64 inputs); nearest legal: fp32", dlse=np.ones((2, 4, 9)))
    refused(ValueError, "backward: a cache call: cache calls are forward only", cache_seqlens=3)
    refused(ValueError, "dq: read-only: must be memory that can be written", without=["dq"],
            dq=np.broadcast_to(np.float32(0), (2, 9, 4, 16)))  # fmt: skip
    refused(ValueError, "dk: shape (2, 13, 4, 16): must be k's shape = (2, 13, 2, 16); nearest legal: (2, 13, 2, 16)",
            without=["dk"], dk=np.ones((2, 13, 4, 16), np.float32))  # fmt: skip


def test_exact_refusals_of_wanted():
    every = ["dq", "dk", "dv"]
    refused(TypeError, "wanted: 'dq': must be a sequence of names, such as ('dq', 'dk')", wanted="dq")
    refused(TypeError, "wanted: (1,): must be a sequence of names, such as ('dq', 'dk')", wanted=(1,))
    refused(ValueError, "wanted: 'dsink': must be of dq, dk, dv, dbias, dslopes, dsinks; did you mean 'dsinks'?",
            wanted=["dsink"])  # fmt: skip
    refused(ValueError, "dbias: wanted: needs bias", wanted=["dq", "dbias"])
    refused(ValueError, "dsinks: wanted: needs sinks", dsinks=np.ones(4, np.float32))
    refused(
        ValueError, "dv: given: wanted leaves it out; nearest legal: wanted=('dq', 'dk', 'dv')", wanted=["dq", "dk"]
    )
    refused(TypeError, "bias: int32: must be fp16, bf16, fp32 or fp64 (fp8 comes later)", without=every,
            bias=np.ones((9, 13), np.int32))  # fmt: skip
