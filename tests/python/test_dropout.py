"""Dropout: the mask of the contract, forward and backward."""

import numpy as np
import pytest
from gradients import formula
from reference import _vectors, check, inputs
from test_backward import backward, compare

import narrows


def mask_of(shape, **options):
    """Which weights (b, h, sq, sk) a call keeps: equal scores, and V = the identity."""
    b, h, sq, sk = shape
    q, k = np.zeros((b, sq, h, 8), np.float32), np.zeros((b, sk, h, 8), np.float32)
    v = np.broadcast_to(np.eye(sk, dtype=np.float32)[:, None], (b, sk, h, sk))
    o = narrows.attention(q, k, v, **options).transpose(0, 2, 1, 3)
    kept = o[o != 0]
    n = np.floor(65536 * (1 - options["dropout"]) + 0.5)
    np.testing.assert_allclose(kept, 65536 / n / sk, rtol=1e-6)
    return o != 0


def test_known_answers_of_philox():
    """Those that the authors of Random123 publish for philox4x32-10 judge the reference's generator."""
    for counter, key, want in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:  # fmt: skip
        assert [int(word) for word in _vectors.philox4x32_10(counter, key)] == want


def test_the_mask_is_that_of_the_contract():
    shape = (2, 3, 5, 19)
    for seed, offset, origin in [(0, 0, (0,) * 5), (1 << 63 | 5, 7, (0,) * 5), (42, (1 << 32) - 1, (3, 4, 5, 6, 11))]:
        got = mask_of(shape, dropout=0.3, seed=seed, offset=offset, origin=origin)
        for b in range(2):
            np.testing.assert_array_equal(got[b], _vectors.kept(0.3, seed, offset, origin, b, shape[1:]) != 0)


def test_the_kept_share():
    for p in (0.1, 0.5, 0.9):
        share = mask_of((2, 4, 128, 128), dropout=p, seed=3).mean()
        assert abs(share - (1 - p)) < 5 * np.sqrt(p * (1 - p) / (2 * 4 * 128 * 128))


@pytest.mark.parametrize(
    "rules", [{}, {"causal": True}, {"sinks": [0.5, 1, 2, -1.0]}, {"window": (3, 2), "num_splits": 3}]
)
def test_values(rules):
    check(*inputs(sq=33, sk=45), dropout=0.4, seed=9, offset=2, **rules)


def test_varlen_counts_from_the_sequence():
    q, k, v = (x[0] for x in inputs(b=1, sq=20, sk=30))
    check(q, k, v, cu_seqlens_q=[0, 3, 12, 18], cu_seqlens_k=[0, 7, 11, 30], dropout=0.5, seed=1, offset=1)


def test_lse_is_that_without_dropout():
    q, k, v = inputs()
    _, lse = narrows.attention(q, k, v, dropout=0.5, seed=1, return_lse=True)
    np.testing.assert_array_equal(lse, narrows.attention(q, k, v, return_lse=True)[1])


def test_p_0_draws_nothing():
    q, k, v = inputs()
    want = narrows.attention(q, k, v, causal=True)
    for seed in (0, 7):
        np.testing.assert_array_equal(narrows.attention(q, k, v, causal=True, dropout=0.0, seed=seed, offset=3), want)


def test_I10_the_same_seed_is_the_same_mask():
    q, k, v = inputs()
    want = narrows.attention(q, k, v, dropout=0.5, seed=1, offset=2)
    for threads in (1, 2, 3):
        elsewhere = [x.copy() for x in (q, k, v)]
        np.testing.assert_array_equal(
            narrows.attention(*elsewhere, dropout=0.5, seed=1, offset=2, threads=threads), want
        )
    for seed, offset in ((2, 2), (1, 3), (1 | 1 << 32, 2)):
        assert (narrows.attention(q, k, v, dropout=0.5, seed=seed, offset=offset) != want).any()


def test_seed_and_offset_may_be_arrays():
    q, k, v = inputs()
    want = narrows.attention(q, k, v, dropout=0.5, seed=(1 << 40) + 1, offset=2)
    seed, offset = np.array([(1 << 40) + 1]), np.array([2])
    np.testing.assert_array_equal(narrows.attention(q, k, v, dropout=0.5, seed=seed, offset=offset), want)
    seed[0] = 3  # read when the call runs
    assert (narrows.attention(q, k, v, dropout=0.5, seed=seed, offset=offset) != want).any()


def test_parts_of_a_model_drop_what_the_whole_drops():
    q, k, v = inputs(b=3, sq=10, h=6, hk=3)
    rules = {"dropout": 0.5, "seed": 4, "offset": 5}
    whole = narrows.attention(q, k, v, **rules)
    part = narrows.attention(q[1:, 4:, 2:4], k[1:, :, 1:2], v[1:, :, 1:2], origin=(1, 2, 4, 0, 6), **rules)
    np.testing.assert_allclose(part, whole[1:, 4:, 2:4], rtol=0, atol=1e-6)


def test_I08_backward_has_the_same_mask():
    q, k, v = inputs(sq=33, sk=45)
    rules = {"dropout": 0.48, "seed": 1 << 50, "offset": 3, "origin": (1, 2, 3, 4, 9), "causal": True}
    got, dout, dlse = backward(q, k, v, **rules)
    compare(got, formula(dout, q, k, v, dlse, **rules), 1e-5)
    # With one key a row's weight is 1: dV is 1 / (1 - p) where kept, else 0.
    one = np.ones((1, 64, 1, 4), np.float32)
    o, lse = narrows.attention(one, one, one, window=(0, 0), dropout=0.5, seed=3, return_lse=True)
    gradients = narrows.attention_backward(one, one, one, one, o, lse, window=(0, 0), dropout=0.5, seed=3)
    np.testing.assert_array_equal(gradients.dv, o)
    assert set(np.unique(o)) == {0, 2}


def refused(kind, text, **options):
    with pytest.raises(Exception) as error:
        narrows.attention(*inputs(), **{"dropout": 0.5, **options})
    assert (error.type, str(error.value)) == (kind, text)


def test_exact_refusals():
    refused(ValueError, "dropout: -0.1: must be in [0, 1); nearest legal: 0", dropout=-0.1)
    refused(ValueError, "offset: 4294967296: must be <= 4294967295; nearest legal: 4294967295", offset=1 << 32)
    refused(ValueError, "seed: 18446744073709551616: must be in [0, 18446744073709551615]; nearest legal: "
            "18446744073709551615", seed=1 << 64)  # fmt: skip
    refused(TypeError, "seed: 1.5: must be an integer", seed=1.5)
    refused(TypeError, "seed: fp64: must be one int64; nearest legal: int64", seed=np.array([1.0]))
    refused(TypeError, "origin: 3: must be a tuple (b, h, i, j, H)", origin=3)
