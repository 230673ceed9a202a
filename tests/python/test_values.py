"""Values, option by option and case by case (ids of the table of cases that other libraries got wrong)."""

import ml_dtypes
import numpy as np
import pytest
from reference import attention, check, double, inputs

import narrows

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BF16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_dtype(dtype, causal):
    q, k, v = inputs(sq=33, sk=45, d=24, dv=40, dtype=dtype)
    o, lse = check(q, k, v, causal=causal)
    assert o.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    alone = narrows.attention(q, k, v, causal=causal)
    assert alone.dtype == dtype and isinstance(alone, np.ndarray)
    np.testing.assert_array_equal(alone, o)


@pytest.mark.parametrize("h, hk", [(1, 1), (6, 6), (6, 3), (6, 1), (5, 1), (24, 4), (28, 4)])
def test_grouped_heads(h, hk):
    check(*inputs(h=h, hk=hk))


@pytest.mark.parametrize("d, dv", [(1, 1), (3, 7), (64, 16), (129, 257), (512, 512)])
def test_head_dims(d, dv):
    check(*inputs(b=1, sq=5, sk=17, h=2, hk=1, d=d, dv=dv))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"scale": np.float32(0.5)},
        {"causal": "bottom_right"},
        {"causal": "top_left"},
        {"shift": [3, -2], "causal": True},
        {"shift": np.array([0, 5], np.int32), "window": (2, 1)},
        {"window": (2, 3)},
        {"window": (None, 1)},
        {"window": (4, None)},
        {"window": (-1, -1)},
        {"window": (0, 0), "causal": True},
        {"chunk": 4},
        {"chunk": 5, "causal": True},
        {"seqused_k": [13, 4]},
        {"seqused_q": [9, 2], "seqused_k": np.array([0, 7], np.int32), "causal": True},
        {"threads": 1, "family": "cpu"},
        {"deterministic": True},
    ],
    ids=str,
)
def test_every_rule(options):
    check(*inputs(), **options)


def test_score_tensors():
    random = np.random.default_rng(7)
    q, k, v = inputs()
    bias = random.standard_normal((2, 4, 9, 13)).astype(np.float32)
    check(q, k, v, bias=bias)
    check(q, k, v, bias=bias[:, :1], softcap=1.5, alibi_slopes=[0.5, 0.25, 0.0, 1.0])
    check(q, k, v, mask=bias > 0, sinks=[0.5, -np.inf, 3.0, -1.0], causal=True)
    check(q, k, v, bias=np.where(bias > 0.5, -np.inf, bias), window=(3, 3))


def test_documents_packed_in_one_row():
    lengths = np.array([3, 1, 5, 0, 4])
    q, k, v = inputs(b=1, sq=13, sk=13)
    ends = np.cumsum(lengths)
    begin, end = (np.repeat(x, lengths)[None].astype(np.int32) for x in (ends - lengths, ends))
    o, lse = check(q, k, v, key_begin=begin, key_end=end, causal=True)
    bounds = [0, *ends.tolist()]
    apart = narrows.attention(q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True)
    np.testing.assert_allclose(o[0], apart, rtol=1e-5, atol=1e-6)


def test_a_prefix_that_every_query_sees():
    q, k, v = inputs(sq=13, sk=13)
    prefix = np.array([5, 0])
    key_end = np.maximum(prefix[:, None], np.arange(1, 14)).astype(np.int32)
    o, _ = check(q, k, v, key_end=key_end)
    causal = narrows.attention(q, k, v, causal=True)
    np.testing.assert_allclose(o[1], causal[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(o[0, 4:], causal[0, 4:], rtol=1e-5, atol=1e-6)
    assert np.abs(o[0, :4] - causal[0, :4]).max() > 0.01


def test_bounds_of_rows():
    random = np.random.default_rng(4)
    q, k, v = inputs()
    begin, end = (random.integers(-3, 17, (2, 9), dtype=np.int32) for _ in range(2))
    begin[0, 0], end[0, 0] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    begin[0, 1], end[0, 1] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    o, lse = check(q, k, v, key_begin=begin, key_end=end, window=(6, None), sinks=[0.5, -np.inf, 3.0, -1.0])
    assert (o[0, 1] == 0).all() and (lse[0, :, 1] == [0.5, -np.inf, 3.0, -1.0]).all()
    check(q, k, v, key_begin=begin.tolist())
    check(q, k, v, key_end=np.broadcast_to(end[1], (2, 9)), chunk=5)
    check(q, k, v, key_end=end[:, ::-1], num_splits=3)
    random_rows = random.integers(-3, 17, 18, dtype=np.int32)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    check(q, k, v, cu_seqlens_q=[0, 4, 17], cu_seqlens_k=[0, 20, 26], key_begin=random_rows, key_end=random_rows + 4)


def test_varlen():
    q, k, v = (x[0] for x in inputs(b=1, sq=20, sk=30))
    o, lse = check(q, k, v, cu_seqlens_q=[0, 3, 3, 12, 18], cu_seqlens_k=[0, 7, 11, 11, 30], causal=True)
    assert lse.shape == (4, 20)
    assert (o[18:] == 0).all() and np.isneginf(lse[:, 18:]).all()  # rows in no sequence
    assert (o[3:12] == 0).all()  # a sequence without keys


def test_A11_rows_filled_with_the_lowest_finite_number():
    q, k, v = inputs(sq=3, sk=5)
    bias = np.zeros((3, 5), np.float32)
    bias[1] = np.finfo(np.float32).min
    o = narrows.attention(q, k, v, bias=bias)
    assert np.isfinite(o).all()
    # fp32 cannot hold score + fill: the sum is the fill, the same for every key.
    mean = np.repeat(v.mean(axis=1), 2, axis=1)
    np.testing.assert_allclose(o[:, 1], mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(o[:, [0, 2]], attention(q, k, v)[0][:, [0, 2]], rtol=0, atol=1e-5)


def test_A17_left_padding_and_causal_in_bfloat16():
    q, k, v = inputs(sq=33, sk=33, h=32, hk=32, d=128, dtype=BF16)
    mask = np.ones((2, 1, 1, 33), bool)
    mask[1, ..., :27] = False
    o, lse = check(q, k, v, causal=True, mask=mask)
    assert (double(o[1, :27]) == 0).all() and np.isneginf(lse[1, :, :27]).all()


def test_B04_large_equal_values_give_v():
    x = np.full((1, 1, 1, 64), 133120, BF16)
    o, lse = narrows.attention(x, x, x, return_lse=True)
    assert (double(o) == 133120).all() and np.isfinite(lse).all()


def test_B09_scale_zero_and_negative():
    q, k, v = inputs()
    mask = np.random.default_rng(1).random((9, 13)) < 0.7
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    for masked in ({"mask": mask}, {"bias": bias}):
        check(q, k, v, scale=0, **masked)
        check(q, k, v, scale=-0.5, **masked)
    ones = np.ones_like(v)
    o, lse = narrows.attention(q, k, ones, scale=0, mask=mask, return_lse=True)
    np.testing.assert_allclose(o, 1, atol=1e-6)
    np.testing.assert_allclose(np.exp(lse), np.broadcast_to(mask.sum(axis=1), lse.shape), rtol=1e-5)


def test_C14_zero_sizes():
    for shape_q, shape_k in [
        ((7, 9, 0, 7), (7, 7, 0, 7)),  # heads
        ((0, 9, 4, 7), (0, 7, 2, 7)),  # batch
        ((2, 0, 4, 7), (2, 7, 2, 7)),  # queries
        ((2, 9, 4, 7), (2, 0, 2, 7)),  # keys
        ((0, 0, 0, 7), (0, 0, 0, 7)),
    ]:
        q, k = np.ones(shape_q, np.float16), np.ones(shape_k, np.float16)
        o, lse = narrows.attention(q, k, k, causal=True, return_lse=True)
        assert o.shape == shape_q and lse.shape == (shape_q[0], shape_q[2], shape_q[1])
        assert (o == 0).all() and (np.isneginf(lse)).all()
    with pytest.raises(ValueError, match=r"^q: head dim 0: must be in \[1, 512\], or 576; nearest legal: 1$"):
        narrows.attention(np.ones((1, 2, 1, 0)), np.ones((1, 2, 1, 0)), np.ones((1, 2, 1, 3)))


def visible_keys(sq, sk, **options):
    """Which keys each query saw: equal scores, and V = the identity."""
    q, k = np.zeros((1, sq, 1, 8), np.float32), np.zeros((1, sk, 1, 8), np.float32)
    o = narrows.attention(q, k, np.eye(sk, dtype=np.float32).reshape(1, sk, 1, sk), **options)
    return [np.flatnonzero(row).tolist() for row in o[0, :, 0]]


def test_E01_causal_is_bottom_right():
    assert visible_keys(2, 5, causal=True) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert visible_keys(5, 2, causal=True) == [[], [], [], [0], [0, 1]]
    assert visible_keys(2, 5, causal="top_left") == [[0], [0, 1]]
    assert visible_keys(5, 2, causal="top_left") == [[0], [0, 1], [0, 1], [0, 1], [0, 1]]


def test_E04_window_bounds_are_inclusive():
    assert visible_keys(4, 4, window=(1, 0)) == [[0], [0, 1], [1, 2], [2, 3]]
    assert visible_keys(4, 4, window=(0, 1), causal=True) == [[0], [1], [2], [3]]
    assert visible_keys(2, 4, window=(1, 1)) == [[1, 2, 3], [2, 3]]


def test_E08_negative_windows_are_refused():
    q, k, v = inputs()
    for window, text in {
        (-1, -3): "window.right: -3: must be >= 0, or -1 for unlimited; nearest legal: -1",
        (-4, 4): "window.left: -4: must be >= 0, or -1 for unlimited; nearest legal: -1",
        (-4, 0): "window.left: -4: must be >= 0, or -1 for unlimited; nearest legal: -1",
    }.items():
        with pytest.raises(ValueError) as error:
            narrows.attention(q, k, v, window=window)
        assert str(error.value) == text


def test_I02_softcap_bounds_the_logits():
    q, k, v = inputs(sq=1, sk=1, h=1, hk=1)
    _, lse = narrows.attention(100 * q, k, v, scale=1, softcap=2, return_lse=True)  # of one key: its logit
    s = 100 * np.einsum("bihd,bjhd->bhij", double(q), double(k))[..., 0]
    np.testing.assert_allclose(lse, 2 * np.tanh(s / 2), rtol=1e-5)
    assert np.abs(lse).max() <= 2
    check(*inputs(), softcap=0.7)


def test_I05_slopes_are_the_callers():
    q, k, v = inputs()
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    whole = narrows.attention(q, k, v, alibi_slopes=slopes)
    upper = narrows.attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], alibi_slopes=slopes[2:])
    np.testing.assert_array_equal(whole[:, :, 2:], upper)
    check(q, k, v, alibi_slopes=np.stack([slopes, 2 * slopes]), shift=[4, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_I07_slopes_bias_and_sinks_in_any_float_type(dtype):
    q, k, v = inputs()
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], dtype)
    bias = np.arange(13).astype(dtype)
    check(q, k, v, alibi_slopes=slopes, bias=bias.reshape(1, 13), sinks=np.array([1, 2, 0.5, 0], dtype))


def test_I12_masks_broadcast():
    random = np.random.default_rng(3)
    q, k, v = inputs(b=4, sq=32, sk=32, h=4, hk=4, dtype=BF16)
    for shape in [(4, 1, 1, 32), (1, 4, 32, 32), (1, 1, 32, 1), (32, 32), (32,), (4, 32, 32), (1,)]:
        mask = random.random(shape) < 0.8
        check(q, k, v, mask=mask)
        check(q, k, v, bias=np.where(mask, 0.25, -np.inf).astype(BF16))


def test_I15_a_mask_of_the_wrong_size_is_refused():
    q, k, v = inputs(b=1, sq=10, sk=20, h=8, hk=4, d=128)
    with pytest.raises(ValueError, match=r"^mask: shape \(10, 15\)"):
        narrows.attention(q, k, v, mask=np.ones((10, 15), bool))


def test_O03_more_leading_axes():
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in inputs(b=6))
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, k, v)]
    mask = np.random.default_rng(0).random((2, 3, 1, 9, 13)) < 0.8
    o, lse = narrows.attention(q, k, v, mask=mask, return_lse=True)
    assert o.shape == (2, 3, 9, 4, 16) and lse.shape == (2, 3, 4, 9)
    want_o, want_lse = narrows.attention(*flat, mask=mask.reshape(6, 1, 9, 13), return_lse=True)
    np.testing.assert_array_equal(o.reshape(want_o.shape), want_o)
    np.testing.assert_array_equal(lse.reshape(want_lse.shape), want_lse)
    seven = [x.reshape(1, 2, 1, 3, *x.shape[2:]) for x in (q, k, v)]
    np.testing.assert_array_equal(narrows.attention(*seven), narrows.attention(q, k, v).reshape(1, 2, 1, 3, 9, 4, 16))


def test_O03_bias_broadcasts_over_leading_axes():
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in inputs(b=6))
    bias = np.random.default_rng(0).standard_normal((2, 3, 4, 9, 13)).astype(np.float32)
    for given in (bias, bias[:1, :1], bias[0, 0], bias[0, 0, 0], bias[:1, :1, :, :1, :]):
        wide = np.ascontiguousarray(np.broadcast_to(given, bias.shape)).reshape(6, 4, 9, 13)
        want = narrows.attention(*(x.reshape(6, *x.shape[2:]) for x in (q, k, v)), bias=wide)
        np.testing.assert_array_equal(narrows.attention(q, k, v, bias=given).reshape(want.shape), want)
    with pytest.raises(ValueError, match="must be one batch axis without a copy"):
        narrows.attention(q, k, v, bias=bias[:1])  # repeats along the first axis only
