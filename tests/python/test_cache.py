"""attention_with_cache against the reference; ids are of the table of cases that other libraries got wrong."""

import gc

import ml_dtypes
import numpy as np
import pytest
from reference import UNIT, double, run
from test_arrays import Tensor

import narrows

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BF16, np.float32, np.float64]


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def cache(slots=(2, 12), hk=2, d=8, dv=6, dtype=np.float32):
    """k and v caches; slots: (rows, capacity) or (pages, page size)."""
    return normal(*slots, hk, d, dtype=dtype, seed=1), normal(*slots, hk, dv, dtype=dtype, seed=2)


def new_keys(*rows, hk=2, d=8, dv=6, dtype=np.float32):
    return {"k_new": normal(*rows, hk, d, dtype=dtype, seed=3), "v_new": normal(*rows, hk, dv, dtype=dtype, seed=4)}


def tables(positions=20, pairs=4, dtype=np.float64):
    angle = np.arange(positions)[:, None] / 10.0 ** np.arange(pairs)
    return {"rotary_cos": np.cos(angle).astype(dtype), "rotary_sin": np.sin(angle).astype(dtype)}


def used(caches, options):
    """Boolean, of the caches' first two axes: the slots of `options` that are seen or appended to."""
    slots = np.zeros(caches[0].shape[:2], bool)
    for b, filled in enumerate(options["cache_seqlens"]):
        row = options.get("cache_batch_idx", range(99))[b]
        if "cu_seqlens_k_new" in options:
            filled = filled + np.diff(options["cu_seqlens_k_new"])[b]
        elif "k_new" in options:
            filled = filled + options["k_new"].shape[1]
        slot = np.arange(options["leftpad"][b] if "leftpad" in options else 0, filled)
        if "block_table" in options:
            page = np.asarray(options["block_table"])[row][slot // slots.shape[1]]
            slots[page, slot % slots.shape[1]] = True
        else:
            slots[row, slot] = True
    return slots


def check(q, caches, **options):
    """Compares O, LSE and the caches with the reference's; unused slots are full of NaN. Returns O."""
    want = run(q, *caches, **options)
    mine = [x.copy() for x in caches]
    for x in mine:
        x[~used(caches, options)] = np.nan
    before = [x.copy() for x in mine]
    o, lse = narrows.attention_with_cache(q, *mine, return_lse=True, **options)
    unit = UNIT[np.asarray(q).dtype.name]
    np.testing.assert_array_equal(np.isneginf(double(lse)), np.isneginf(want["lse"]))
    rows = ~np.isneginf(want["lse"])
    assert np.abs(double(lse)[rows] - want["lse"][rows]).max(initial=0) < 2e-2 * (unit > 2.0**-12) + 1e-5
    assert np.isfinite(double(o)).all() and np.abs(double(o) - want["o"]).max(initial=0) <= 16 * unit
    for x, old, given, name in zip(mine, before, caches, ("k_after", "v_after")):
        if name not in want:
            np.testing.assert_array_equal(double(x), double(old))
            continue
        written = (want[name] != double(given)).any(axis=(-1, -2))
        assert np.abs(double(x[written]) - want[name][written]).max(initial=0) <= 4 * unit
        np.testing.assert_array_equal(double(x)[~written], double(old)[~written])  # nothing else was touched
    return o


QUERIES = {
    "dense q": (lambda dtype: normal(2, 3, 4, 8, dtype=dtype), {}),
    "varlen q": (lambda dtype: normal(5, 4, 8, dtype=dtype), {"cu_seqlens_q": [0, 1, 5]}),
}
CACHES = {
    "rows": ((2, 12), {}),
    "chosen rows": ((4, 12), {"cache_batch_idx": [3, 0]}),
    "pages of 1": ((20, 1), {"block_table": np.random.default_rng(0).permutation(20).astype(np.int32).reshape(2, 10)}),
    "pages of 3": ((9, 3), {"block_table": [[4, 1, 0, 8], [2, 5, 3, 7]]}),
    "chosen pages": ((9, 3), {"block_table": [[6] * 4, [4, 1, 0, 8], [2, 5, 3, 7]], "cache_batch_idx": [2, 1]}),
}
APPENDS = {
    "no new keys": {},
    "new keys": new_keys(2, 3),
    "varlen new keys": {**new_keys(4), "cu_seqlens_k_new": [0, 0, 4]},
    "rotary": {**new_keys(2, 3), **tables(), "rotary_interleaved": True},
}


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("form", CACHES)
@pytest.mark.parametrize("query", QUERIES)
def test_every_form(query, form, append):
    q, lengths = QUERIES[query]
    slots, where = CACHES[form]
    options = {"cache_seqlens": [3, 6], **lengths, **where, **APPENDS[append]}
    check(q(np.float32), cache(slots), **options)
    check(
        q(np.float32), cache(slots), causal=True, window=(4, 0), leftpad=[2, 5], sinks=[0.5, -1.0, 0.0, 2.0], **options
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    options = {"cache_seqlens": [3, 6], "causal": True, **new_keys(2, 3, dtype=dtype), **tables()}
    check(normal(2, 3, 4, 8, dtype=dtype), cache(dtype=dtype), **options)


def test_decoding_step_by_step_is_one_causal_call():
    k, v = cache((1, 12))
    q = normal(1, 12, 4, 8)
    whole = narrows.attention(q, k, v, causal=True, batch_invariant=True)
    mine = [np.full_like(x, np.nan) for x in (k, v)]
    for step in range(12):
        now = slice(step, step + 1)
        o = narrows.attention_with_cache(
            q[:, now], *mine, cache_seqlens=step, k_new=k[:, now], v_new=v[:, now], causal=True, batch_invariant=True
        )
        np.testing.assert_array_equal(o, whole[:, now])
    for got, want in zip(mine, (k, v)):
        np.testing.assert_array_equal(got, want)


def test_one_length_for_all():
    q, caches = normal(2, 3, 4, 8), cache()
    want = narrows.attention_with_cache(q, *caches, cache_seqlens=np.array([5, 5], np.int32))
    for length in (5, np.int64(5), [5, 5]):
        np.testing.assert_array_equal(narrows.attention_with_cache(q, *caches, cache_seqlens=length), want)
    packed = narrows.attention_with_cache(q.reshape(6, 4, 8), *caches, cu_seqlens_q=[0, 3, 6], cache_seqlens=5)
    np.testing.assert_array_equal(packed.reshape(want.shape), want)
    np.testing.assert_array_equal(narrows.attention(q, *caches, cache_seqlens=5), want)


def test_H04_unused_slots_of_nan_change_nothing():
    q, caches = normal(4, 1, 8, 64, dtype=BF16), cache((4, 128), hk=8, d=64, dv=64, dtype=BF16)
    check(q, caches, cache_seqlens=[32, 64, 96, 48])


def test_H07_any_page_size():
    q, (k, v) = normal(1, 2, 4, 8), cache((1, 600))
    want = narrows.attention_with_cache(q, k, v, cache_seqlens=577, causal=True, batch_invariant=True)
    for size in (1, 7, 16, 100, 256, 600):
        pages = -(-600 // size)
        order = np.random.default_rng(size).permutation(pages)
        paged = []
        for x in (k, v):
            padded = np.full((pages * size, *x.shape[2:]), np.nan, np.float32)
            padded[:577] = x[0, :577]
            memory = np.empty((pages, size, *x.shape[2:]), np.float32)
            memory[order] = padded.reshape(memory.shape)
            paged.append(memory)
        got = narrows.attention_with_cache(
            q, *paged, cache_seqlens=577, block_table=[order.tolist()], causal=True, batch_invariant=True
        )
        np.testing.assert_array_equal(got, want)


def test_E13_a_window_that_ends_inside_a_page():
    for left in range(6):
        check(
            normal(2, 3, 4, 8),
            cache((9, 4)),
            cache_seqlens=[11, 9],
            window=(left, 0),
            block_table=[[4, 1, 0], [2, 5, 3]],
        )


def test_H10_splits_of_the_keys_change_nothing_but_rounding():
    q, caches = normal(1, 1, 16, 32), cache((1, 1024), hk=8, d=32, dv=32)
    whole = narrows.attention_with_cache(q, *caches, cache_seqlens=1000)
    for splits in (1, 2, 16, 32):
        got = narrows.attention_with_cache(q, *caches, cache_seqlens=1000, num_splits=splits)
        np.testing.assert_allclose(got, whole, rtol=0, atol=1e-6)
        same = [
            narrows.attention_with_cache(q, *caches, cache_seqlens=1000, num_splits=n, batch_invariant=True)
            for n in (1, splits)
        ]
        np.testing.assert_array_equal(*same)


def test_H14_other_sequences_do_not_matter():
    q, caches = normal(4, 1, 8, 32), cache((4, 1024), hk=2, d=32, dv=32)
    options = {"batch_invariant": True, "causal": True}
    want = narrows.attention_with_cache(q, *caches, cache_seqlens=[900, 1000, 120, 500], **options)
    got = narrows.attention_with_cache(q, *caches, cache_seqlens=[800, 1000, 120, 500], **options)
    np.testing.assert_array_equal(got[1:], want[1:])
    assert (got[0] != want[0]).any()
    for b, length in enumerate([900, 1000, 120, 500]):
        row = slice(b, b + 1)
        alone = narrows.attention_with_cache(q[row], *(x[row] for x in caches), cache_seqlens=length, **options)
        np.testing.assert_array_equal(alone, want[row])


def test_H15_pages_more_in_the_table_are_not_read():
    q, caches = normal(1, 1, 4, 8), cache((4, 16))
    want = check(q, caches, cache_seqlens=[16], block_table=[[2]])
    for more in (1, -1, 99):
        got = narrows.attention_with_cache(q, *caches, cache_seqlens=[16], block_table=[[2, more]])
        np.testing.assert_array_equal(got, want)


def test_bounds_of_rows():
    q, caches = normal(2, 3, 4, 8), cache()
    o = check(q, caches, cache_seqlens=[8, 9], leftpad=[2, 4], key_begin=[[0, 1, 2], [4, 5, 0]], key_end=[[9, 2, 5], [5, 5, 9]])
    assert (o[1, 1] == 0).all()


def test_H17_leftpad_is_honoured():
    q, caches = normal(2, 3, 4, 8), cache()
    o = check(q, caches, cache_seqlens=[8, 9], leftpad=[2, 4], alibi_slopes=[0.5, 0.25, 1, 2], causal=True)
    for b, (first, end) in enumerate([(2, 8), (4, 9)]):
        alone = [x[b : b + 1, first:end] for x in caches]
        want = narrows.attention(q[b : b + 1], *alone, alibi_slopes=[0.5, 0.25, 1, 2], causal=True)
        np.testing.assert_allclose(o[b : b + 1], want, rtol=0, atol=1e-6)


def test_H19_alibi_is_the_same_in_cache_and_varlen_calls():
    q, (k, v) = normal(1, 3, 4, 8), cache((1, 12))
    options = {"alibi_slopes": [0.5, 0.25, 1, 2]}
    cached = narrows.attention_with_cache(q, k, v, cache_seqlens=10, **options)
    packed = narrows.attention(q[0], k[0], v[0], cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 10], **options)
    np.testing.assert_allclose(cached[0], packed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_H20_rotary_is_that_by_hand(interleaved, causal):
    q, caches = normal(1, 2, 4, 8), cache((1, 12))
    angles, new = tables(dtype=np.float32), new_keys(1, 2)

    def turned(x):
        turn = (angles["rotary_cos"] + 1j * angles["rotary_sin"])[5:7, None]
        pairs = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
        z, out = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * turn, x.copy()
        out[..., pairs[0]], out[..., pairs[1]] = z.real, z.imag
        return out

    by_hand = [x.copy() for x in caches]
    by_hand[0][:, 5:7], by_hand[1][:, 5:7] = turned(new["k_new"]), new["v_new"]
    want = narrows.attention(turned(q), *(x[:, :7] for x in by_hand), causal=causal)
    got = narrows.attention_with_cache(
        q, *caches, cache_seqlens=5, causal=causal, rotary_interleaved=interleaved, **angles, **new
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    for x, y in zip(caches, by_hand):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    check(
        q, cache((1, 12)), cache_seqlens=[5], rotary_base=[1], rotary_interleaved=interleaved, **tables(pairs=2), **new
    )


def test_a_cache_in_strided_memory():
    memory = [np.full((2, 2, 30, 8), np.nan, np.float32), np.full((2, 30, 6, 2), np.nan, np.float32)]
    views = [memory[0][:, :, ::-2].transpose(0, 2, 1, 3), memory[1][:, 1::2].transpose(0, 1, 3, 2)]
    plain = cache((2, 15))
    for view, x in zip(views, plain):
        view[...] = x
    options = {"cache_seqlens": [3, 6], **new_keys(2, 3)}
    q = normal(2, 3, 4, 8)
    want = narrows.attention_with_cache(q, *plain, **options)
    np.testing.assert_allclose(narrows.attention_with_cache(q, *views, **options), want, rtol=0, atol=1e-6)
    for view, x in zip(views, plain):
        np.testing.assert_array_equal(view, x)
    assert np.isnan(memory[0][:, :, ::2]).all() and np.isnan(memory[1][:, ::2]).all()


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_caches_are_written_in_place(versioned):
    caches, plain = cache(dtype=BF16), cache(dtype=BF16)
    q, new = normal(2, 3, 4, 8, dtype=BF16), new_keys(2, 3, dtype=BF16)
    want = narrows.attention_with_cache(q, *plain, cache_seqlens=4, **new)
    tensors = [Tensor(x, versioned=versioned) for x in caches]
    got = narrows.attention_with_cache(
        Tensor(q, versioned=versioned), *tensors, cache_seqlens=4, **{name: Tensor(x) for name, x in new.items()}
    )
    np.testing.assert_array_equal(got, want)
    for x, y in zip(caches, plain):
        np.testing.assert_array_equal(x, y)
    gc.collect()
    assert Tensor.live == 0


def test_read_only_caches():
    q, caches = normal(2, 3, 4, 8), cache()
    want = narrows.attention_with_cache(q, *caches, cache_seqlens=5)
    for x in caches:
        x.flags.writeable = False
    np.testing.assert_array_equal(narrows.attention_with_cache(q, *caches, cache_seqlens=5), want)
    refused(ValueError, "k_cache: read-only: must be memory that can be written", caches, **new_keys(2, 1))
    with pytest.raises(ValueError) as error:
        narrows.attention(q, *caches, cache_seqlens=5, **new_keys(2, 1))
    assert str(error.value) == "k: read-only: must be memory that can be written"
    caches = cache()
    refused(ValueError, "v_cache: read-only: must be memory that can be written",
            (caches[0], Tensor(caches[1], flags=1)), **new_keys(2, 1))  # fmt: skip
    wide = np.broadcast_to(caches[1][:1], caches[1].shape)
    refused(ValueError, "v_cache: read-only: must be memory that can be written", (caches[0], wide), **new_keys(2, 1))


def refused(kind, text, caches=None, q=None, **options):
    caches = cache() if caches is None else caches
    before = [np.asarray(x.array if isinstance(x, Tensor) else x).copy() for x in caches]
    o = np.full((2, 3, 4, 6), np.nan, np.float32)
    options = {"cache_seqlens": 5, "o": o, **options}
    with pytest.raises(Exception) as error:
        narrows.attention_with_cache(normal(2, 3, 4, 8) if q is None else q, *caches, **options)
    assert (error.type, str(error.value)) == (kind, text)
    assert np.isnan(o).all()
    for x, old in zip(caches, before):
        np.testing.assert_array_equal(np.asarray(x.array if isinstance(x, Tensor) else x), old)


def test_H02_what_does_not_fit_is_refused_before_anything_is_written():
    refused(ValueError, "cache_seqlens[1]: 10: 3 new keys do not fit in the cache's capacity, 12; nearest legal: 9",
            cache_seqlens=[4, 10], **new_keys(2, 3))  # fmt: skip
    refused(ValueError, "cache_seqlens[0]: 12: 1 new keys do not fit in the cache's capacity, 12; nearest legal: 11",
            cache_seqlens=12, **new_keys(2, 1))  # fmt: skip
    refused(
        ValueError,
        "cache_seqlens[0]: 13: must be in [0, 12], the cache's capacity; nearest legal: 12",
        cache_seqlens=13,
    )
    refused(ValueError, "cache_seqlens[1]: 8: 2 new keys do not fit in the cache's capacity, 9; nearest legal: 7",
            cache((9, 3)), cache_seqlens=[4, 8], block_table=[[0, 1, 2], [3, 4, 5]], **new_keys(2, 2))  # fmt: skip


def test_exact_refusals():
    refused(
        TypeError, "attention_with_cache() has no argument 'page_table'; did you mean 'block_table'?", page_table=None
    )
    refused(
        TypeError,
        "attention_with_cache() has no argument 'cache_seqlen'; did you mean 'cache_seqlens'?",
        cache_seqlen=3,
    )
    refused(ValueError, "q: shape (3, 4, 8): must be (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q; for one dense "
            "sequence pass q[None], k_cache[None], v_cache[None]", q=normal(3, 4, 8))  # fmt: skip
    refused(ValueError, "cache_seqlens: 4294967296: must be in [-2147483648, 2147483647]; nearest legal: 2147483647",
            cache_seqlens=1 << 32)  # fmt: skip
    refused(
        ValueError, "cache_seqlens[0]: -1: must be in [0, 12], the cache's capacity; nearest legal: 0", cache_seqlens=-1
    )
    rule = "must be a NumPy array or a tensor with __dlpack__"
    refused(TypeError, f"cache_seqlens: bool: {rule}", cache_seqlens=True)
    refused(TypeError, f"cache_seqlens: float: {rule}", cache_seqlens=5.0)
    refused(TypeError, "k: fp16: must be q's dtype; nearest legal: fp32", cache(dtype=np.float16), **new_keys(2, 1))
    refused(ValueError, "v_new: not given: k_new needs it", k_new=new_keys(2, 1)["k_new"])
    refused(TypeError, "k_new: fp16: must be q's dtype; nearest legal: fp32", **new_keys(2, 1, dtype=np.float16))
    refused(ValueError, "block_table[1, 1]: 9: must be in [0, 8]: a key that is seen or appended lies in this page; "
            "nearest legal: 8", cache((9, 3)), block_table=[[0, 1], [2, 9]])  # fmt: skip
    refused(ValueError, "leftpad[1]: 6: must be <= cache_seqlens[1] = 5; nearest legal: 5", leftpad=[0, 6])


def test_H20_tables_of_the_wrong_size_are_refused():
    refused(ValueError, "rotary_cos: shape (20, 8): has one column for each rotated pair: from 1 to d / 2 = 4; nearest "
            "legal: 4", **tables(pairs=8))  # fmt: skip
    refused(ValueError, "rotary_cos: shape (7, 4): sequence 0 rotates position 7: needs that many rows and one more; "
            "nearest legal: 8", **tables(positions=7), **new_keys(2, 2))  # fmt: skip
    refused(ValueError, "rotary_interleaved: true: needs rotary_cos and rotary_sin", rotary_interleaved=True)
