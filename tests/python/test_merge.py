"""merge and merge_backward; ids are of the table of cases that other libraries got wrong."""

import gc

import ml_dtypes
import numpy as np
import pytest
from reference import UNIT, attention, double, inputs
from test_arrays import Tensor

import narrows

BF16 = ml_dtypes.bfloat16


def merged(parts, sinks=None):
    """(O, LSE) by the definition, in double precision; axes of lse are (..., h, s)."""
    lses = np.stack([double(lse) for _, lse in parts])
    columns = lses
    if sinks is not None:
        columns = np.concatenate([lses, np.broadcast_to(double(sinks)[:, None], lses[:1].shape)])
    top = columns.max(axis=0)
    top = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(columns - top).sum(axis=0))
    weights = np.exp(lses - np.where(np.isneginf(lse), 0, lse))
    o = 0
    for weight, (x, _) in zip(np.swapaxes(weights, -1, -2)[..., None], parts):
        o = o + weight * np.where(weight == 0, 0, double(x))
    return o, lse


def gaussian_parts(count=3, shape=(2, 5, 4, 6), dtype=np.float32):
    random = np.random.default_rng(count)
    lse_type = np.float64 if dtype == np.float64 else np.float32
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    return [
        (random.standard_normal(shape).astype(dtype), random.standard_normal(lse_shape).astype(lse_type))
        for _ in range(count)
    ]


def check(parts, sinks=None):
    o, lse = narrows.merge(parts, sinks)
    want_o, want_lse = merged(parts, sinks)
    limit = UNIT[o.dtype.name] * 4 * max(1, np.abs(want_o).max(initial=0))
    assert o.dtype == parts[0][0].dtype and lse.dtype == parts[0][1].dtype
    assert np.isfinite(double(o)).all() and np.abs(double(o) - want_o).max(initial=0) <= limit
    np.testing.assert_array_equal(np.isneginf(double(lse)), np.isneginf(want_lse))
    np.testing.assert_allclose(double(lse), want_lse, rtol=1e-6, atol=1e-6)
    return o, lse


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_values(count, dtype):
    check(gaussian_parts(count, dtype=dtype))
    check(gaussian_parts(count, (5, 4, 6), dtype), sinks=[0.5, -np.inf, 3, -1])
    check(gaussian_parts(count, (2, 3, 5, 4, 6), dtype))


def test_splits_of_the_keys_are_the_whole():
    q, k, v = inputs(sk=40)
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    parts = [narrows.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in [(0, 7), (7, 8), (8, 8), (8, 40)]]
    o, lse = narrows.merge(parts, sinks=sinks)
    want_o, want_lse = attention(q, k, v, sinks=sinks)
    np.testing.assert_allclose(o, want_o, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-6)


def test_A02_merge_of_empties_is_empty():
    for dtype in (np.float16, np.float32):
        for garbage in (0, np.nan):
            empty = np.full((2, 3, 1, 64), garbage, dtype), np.full((2, 1, 3), -np.inf, np.float32)
            for count in (1, 2, 3, 5):
                o, lse = narrows.merge([empty] * count)
                assert (o == 0).all() and np.isneginf(lse).all()
            some = gaussian_parts(1, (2, 3, 1, 64), dtype)[0]
            o, lse = narrows.merge([empty, some, empty])
            np.testing.assert_array_equal(o, some[0])
            np.testing.assert_array_equal(lse, some[1])
            o, lse = narrows.merge([empty, empty], sinks=[0.5])
            assert (o == 0).all() and (lse == 0.5).all()


def test_A04_an_empty_row_beside_others():
    parts = gaussian_parts()
    for index, row in ((0, 1), (1, 1), (2, 1), (0, 3)):  # row 1 is empty everywhere
        parts[index][0][:, row], parts[index][1][..., row] = np.nan, -np.inf
    o, lse = check(parts)
    assert (o[:, 1] == 0).all() and np.isneginf(lse[..., 1]).all()


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_J04_logits_far_apart(far):
    parts = gaussian_parts(2)
    parts[1][1][...] += np.float32(far)
    o, lse = check(parts)
    np.testing.assert_array_equal(o, parts[far > 0][0])
    np.testing.assert_array_equal(lse, parts[far > 0][1])


def test_results_in_memory_given():
    parts = gaussian_parts()
    o, lse = np.full((2, 5, 4, 6), np.nan, np.float32), np.full((5, 2, 4), np.nan, np.float32).transpose(1, 2, 0)
    got = narrows.merge(parts, o=o, lse=lse)
    assert got[0] is o and got[1] is lse
    want = narrows.merge(parts)
    np.testing.assert_array_equal(o, want[0])
    np.testing.assert_array_equal(lse, want[1])
    np.testing.assert_array_equal(narrows.merge(parts, return_lse=False), o)


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -np.inf]), [0.25, 1.0]])
@pytest.mark.parametrize("shape", [(1, 2, 2, 3), (3, 2, 2)])
def test_gradients_against_central_differences(shape, sinks):
    parts = gaussian_parts(3, shape, np.float64)
    parts[1][1][..., 0, 0] = -np.inf  # one row of one head did not see a key there
    random = np.random.default_rng(0)
    dout, dlse = (random.standard_normal(x.shape) for x in parts[0])
    gradients, dsinks = narrows.merge_backward(parts, dout, dlse, sinks)
    sink = None if sinks is None else np.array(sinks)

    def loss():
        o, lse = merged(parts, sink)
        return (dout * o).sum() + (dlse * lse).sum()

    pairs = [(x, got) for part, gradient in zip(parts, gradients) for x, got in zip(part, gradient)]
    if sinks is None:
        assert dsinks is None
    else:
        pairs.append((sink, dsinks))
    for x, got in pairs:
        assert got.shape == x.shape and got.dtype == x.dtype
        for index in np.ndindex(x.shape):
            here, ends = x[index], []
            if np.isneginf(here):
                assert got[index] == 0
                continue
            for step in (1e-5, -1e-5):
                x[index] = here + step
                ends.append(loss())
            x[index] = here
            assert abs(got[index] - (ends[0] - ends[1]) / 2e-5) < 1e-8


def test_gradients_through_parts_are_those_of_the_whole():
    q, k, v = inputs(sk=40, dtype=np.float64)
    sinks = np.array([0.5, -1, 2, 0])
    o, lse = narrows.attention(q, k, v, sinks=sinks, return_lse=True)
    dout, dlse = (np.random.default_rng(1).standard_normal(x.shape) for x in (o, lse))
    want = narrows.attention_backward(dout, q, k, v, o, lse, dlse, sinks=sinks)
    halves = [slice(0, 17), slice(17, 40)]
    parts = [narrows.attention(q, k[:, half], v[:, half], return_lse=True) for half in halves]
    gradients, dsinks = narrows.merge_backward(parts, dout, dlse, sinks)
    np.testing.assert_allclose(dsinks, want.dsinks, rtol=0, atol=1e-12)
    dq = 0
    for half, part, (do, dl) in zip(halves, parts, gradients):
        got = narrows.attention_backward(do, q, k[:, half], v[:, half], *part, dl)
        dq = dq + got.dq
        np.testing.assert_allclose(got.dk, want.dk[:, half], rtol=0, atol=1e-12)
        np.testing.assert_allclose(got.dv, want.dv[:, half], rtol=0, atol=1e-12)
    np.testing.assert_allclose(dq, want.dq, rtol=0, atol=1e-12)


def test_G05_expanded_dout():
    parts = gaussian_parts()
    got, none = narrows.merge_backward(parts, np.broadcast_to(np.float32(1), parts[0][0].shape))
    want, _ = narrows.merge_backward(parts, np.ones_like(parts[0][0]))
    assert none is None
    for pair, other in zip(got, want):
        for x, y in zip(pair, other):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_producers(versioned):
    parts = gaussian_parts(dtype=BF16)
    wrap = lambda x: Tensor(x, versioned=versioned)
    tensors = [(wrap(o), wrap(lse)) for o, lse in parts]
    for got, want in zip(narrows.merge(tensors), narrows.merge(parts)):
        np.testing.assert_array_equal(got, want)
    got, _ = narrows.merge_backward(tensors, wrap(parts[0][0]))
    want, _ = narrows.merge_backward(parts, parts[0][0])
    for pair, other in zip(got, want):
        for x, y in zip(pair, other):
            assert type(x) is np.ndarray and x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
    gc.collect()
    assert Tensor.live == 0


def refused(kind, text, parts, **options):
    with pytest.raises(Exception) as error:
        narrows.merge(parts, **options)
    assert (error.type, str(error.value)) == (kind, text)


def test_exact_refusals():
    parts = gaussian_parts(2)
    (o, lse), other = parts
    refused(ValueError, "parts: empty: must hold at least one (o, lse)", [])
    refused(TypeError, "parts: ndarray: must be a list of pairs (o, lse)", o)
    refused(TypeError, "parts[1]: ndarray: must be a pair (o, lse)", [other, o])
    refused(TypeError, "parts[1]: tuple: must be a pair (o, lse)", [other, (o,)])
    refused(TypeError, "parts[0].lse: NoneType: must be a NumPy array or a tensor with __dlpack__", [(o, None)])
    refused(ValueError, "parts[0].o: shape (4, 6): must have 4 axes, or 3 for varlen", [(o[0, 0], lse)])
    refused(
        TypeError, "parts[0].o: int32: must be fp16, bf16, fp32 or fp64 (fp8 comes later)", [(o.astype(np.int32), lse)]
    )
    refused(ValueError, "parts[1].o: shape (2, 4, 4, 6): must be o's shape = (2, 5, 4, 6); nearest legal: (2, 5, 4, 6)",
            [other, (o[:, :4], lse)])  # fmt: skip
    refused(ValueError, "parts[1].lse: shape (2, 5, 4): must be (b, h, sq) = (2, 4, 5); nearest legal: (2, 4, 5)",
            [other, (o, lse.swapaxes(1, 2))])  # fmt: skip
    refused(TypeError, "parts[1].lse: fp64: must be fp32 (fp64 for fp64 inputs); nearest legal: fp32",
            [other, (o, double(lse))])  # fmt: skip
    refused(ValueError, "sinks: shape (3,): must be (h) = (4,); nearest legal: (4,)", parts, sinks=[1, 2, 3])
    refused(TypeError, "return_lse: 1: must be True or False", parts, return_lse=1)
    wide = [tuple(np.stack([x] * 3) for x in part) for part in parts]
    refused(ValueError, "parts[1].lse: shape (2, 3, 4, 5): must have leading sizes (3, 2) before its last 2 axes",
            [wide[0], (wide[1][0], wide[1][1].swapaxes(0, 1))])  # fmt: skip
    with pytest.raises(ValueError) as error:
        narrows.merge_backward(parts, o[:, :4])
    assert str(error.value).startswith("parts[0].o: shape (2, 5, 4, 6): must be dout's shape = (2, 4, 4, 6)")


def test_nothing_is_written_by_a_refused_call():
    o, lse = np.full((2, 5, 4, 6), np.nan, np.float32), np.full((2, 4, 5), np.nan, np.float32)
    refused(
        ValueError,
        "sinks: shape (1,): must be (h) = (4,); nearest legal: (4,)",
        gaussian_parts(),
        sinks=[1],
        o=o,
        lse=lse,
    )
    assert np.isnan(o).all() and np.isnan(lse).all()
