"""Exact texts and exception types: argument, value, rule, nearest legal value."""

import ml_dtypes
import numpy as np
import pytest
from reference import inputs

import narrows

Q, K, V = inputs()


def refused(kind, text, *arrays, **options):
    with pytest.raises(Exception) as error:
        narrows.attention(*(arrays or (Q, K, V)), **options)
    assert (error.type, str(error.value)) == (kind, text)


def test_unknown_keywords():
    refused(TypeError, "attention() has no argument 'softmax_scale'; did you mean 'scale'?", softmax_scale=1.0)
    refused(TypeError, "attention() has no argument 'attn_mask'; did you mean 'mask'?", attn_mask=None)
    refused(TypeError, "attention() has no argument 'is_causal'; did you mean 'causal'?", is_causal=True)
    refused(TypeError, "attention() has no argument 'cu_seqlen_q'; did you mean 'cu_seqlens_q'?", cu_seqlen_q=[0])
    refused(TypeError, "attention() has no argument 'return_ls'; did you mean 'return_lse'?", return_ls=True)
    refused(TypeError, "attention() has no argument 'zzz'", zzz=1)
    with pytest.raises(TypeError) as error:
        narrows.explain(Q, K, V, windows=(1, 1))
    assert str(error.value) == "explain() has no argument 'windows'; did you mean 'window'?"


def test_arrays():
    refused(TypeError, "q: list: must be a NumPy array or a tensor with __dlpack__", [[1.0]], K, V)
    refused(TypeError, "bias: float: must be a NumPy array or a tensor with __dlpack__", bias=1.0)
    refused(TypeError, "mask: list: must be a NumPy array or a tensor with __dlpack__", mask=[True])
    rule = "must be float16, bfloat16, float32, float64, int32, int64, uint8 or bool"
    refused(TypeError, f"k: dtype complex64: {rule}", Q, K.astype(np.complex64), V)
    refused(TypeError, f"k: dtype int16: {rule}", Q, K.astype(np.int16), V)
    refused(TypeError, f"v: dtype object: {rule}", Q, K, V.astype(object))
    refused(TypeError, "q: dtype >f4: must be in this machine's byte order; nearest legal: "
            "q.astype(q.dtype.newbyteorder('='))", Q.astype(">f4"), K, V)  # fmt: skip
    refused(TypeError, "q: masked array: its mask would be ignored; pass q.data, and keys to leave out as mask=",
            np.ma.array(Q), K, V)  # fmt: skip
    refused(NotImplementedError, "q: dtype float8_e4m3fn: fp8 comes later; use float16, bfloat16, float32 or float64",
            Q.astype(ml_dtypes.float8_e4m3fn), K, V)  # fmt: skip
    refused(TypeError, "q: int32: must be fp16, bf16, fp32 or fp64 (fp8 comes later)", *[Q.astype(np.int32)] * 3)
    refused(ValueError, "bias: shape (): must have an axis; nearest legal: (1,)", bias=np.array(1.0))


def test_memory_that_no_view_describes():
    packed = np.zeros(Q.size * 4 + 1, np.uint8)[1:].view(np.float32).reshape(Q.shape)
    refused(ValueError, "q: unaligned: must lie at a multiple of its 4-byte elements; pass q.copy()", packed, K, V)
    records = np.zeros(Q.shape, np.dtype([("x", np.float32), ("y", np.uint8)]))["x"]
    refused(ValueError, "q: stride of 5 bytes: must be a multiple of its 4-byte elements; pass q.copy()", records, K, V)


def test_shapes():
    refused(ValueError, "q: shape (9, 4, 16): must be (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q; "
            "for one dense sequence pass q[None], k[None], v[None]", Q[0], K[0], V[0])  # fmt: skip
    refused(ValueError, "q: shape (16,): must be (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q", Q[0, 0, 0], K, V)
    refused(ValueError, "v: shape (13, 16): must have 4 axes, or 3 for varlen", Q, K, V[0, :, 0])
    refused(ValueError, "k: 3 kv heads: q's 4 heads must be a multiple of them; nearest legal: 2",
            Q, np.ones((2, 13, 3, 16), "f"), np.ones((2, 13, 3, 16), "f"))  # fmt: skip
    refused(TypeError, "k: fp64: must be q's dtype; nearest legal: fp32", Q, K.astype(np.float64), V)


def test_more_leading_axes():
    q, k, v = (x.reshape(1, 2, *x.shape[1:]) for x in (Q, K, V))
    refused(ValueError, "k: shape (2, 1, 13, 2, 16): must have leading sizes (1, 2) before its last 3 axes",
            q, k.reshape(2, 1, *k.shape[2:]), v)  # fmt: skip
    refused(ValueError, "k: shape (2, 13, 2, 16): must have leading sizes (1, 2) before its last 3 axes", q, K, v)
    wide = np.zeros((3, 2, 2, 9, 4, 16), np.float32)[:, 0]
    swapped = np.zeros((2, 3, 9, 4, 16), np.float32).swapaxes(0, 1)
    assert wide.shape == swapped.shape
    refused(ValueError, f"q: shape (3, 2, 9, 4, 16) with strides {tuple(s // 4 for s in wide.strides)}: axes before the "
            "last 3 must be one batch axis without a copy; pass a contiguous copy of q", wide, wide, wide)  # fmt: skip
    refused(ValueError, "q: shape (3, 2, 9, 4, 16) with strides (576, 1728, 64, 16, 1): axes before the last 3 must be "
            "one batch axis without a copy; pass a contiguous copy of q", swapped, swapped, swapped)  # fmt: skip


def test_numbers():
    refused(TypeError, "scale: 'big': must be a number", scale="big")
    refused(TypeError, "scale: True: must be a number", scale=True)
    refused(ValueError, "scale: inf: must be finite", scale=float("inf"))
    refused(TypeError, "chunk: 2.0: must be an integer", chunk=2.0)
    refused(TypeError, "chunk: True: must be an integer", chunk=True)
    refused(ValueError, "chunk: -3: must be >= 0 (0 = off); nearest legal: 0", chunk=-3)
    refused(ValueError, "threads: 4294967296: must be in [-2147483648, 2147483647]; nearest legal: 2147483647",
            threads=1 << 32)  # fmt: skip
    refused(ValueError, "threads: -1: must be in [0, 1024] (0 = every core); nearest legal: 0", threads=-1)
    refused(ValueError, "seed: -1: must be in [0, 18446744073709551615]; nearest legal: 0", seed=-1)
    refused(ValueError, "dropout: 1: must be in [0, 1); nearest legal: 0.9999", dropout=1)
    refused(TypeError, "return_lse: 1: must be True or False", return_lse=1)
    refused(TypeError, "deterministic: 1: must be True or False", deterministic=1)


def test_rules():
    rule = "must be False, True (= 'bottom_right'), 'bottom_right' or 'top_left'"
    refused(ValueError, f"causal: 'upper': {rule}", causal="upper")
    refused(TypeError, f"causal: 1: {rule}", causal=1)
    pair = "must be a pair (left, right); w keys that end with the query's own are (w - 1, 0)"
    refused(TypeError, f"window: 128: {pair}", window=128)
    refused(TypeError, f"window: (1, 2, 3): {pair}", window=(1, 2, 3))
    refused(TypeError, "window: 1.5: must be an integer", window=(1.5, 0))
    refused(TypeError, "window: True: must be an integer", window=(True, 0))
    refused(TypeError, "origin: (0, 0): must be a tuple (b, h, i, j, H)", origin=(0, 0))
    refused(TypeError, "family: 3: must be a name of narrows.info().families", family=3)


def test_lists():
    refused(ValueError, "seqused_k: [1.5, 2]: must be exact in int32", seqused_k=[1.5, 2])
    refused(ValueError, "shift: [4294967296, 0]: must be exact in int32", shift=[1 << 32, 0])
    refused(TypeError, "shift: [True, False]: must be an array or a list of numbers", shift=[True, False])
    refused(TypeError, "shift: ['a', 'b']: must be an array or a list of numbers", shift=["a", "b"])
    refused(TypeError, "sinks: [[1], [2, 3]]: must be an array or a list of numbers", sinks=[[1], [2, 3]])
    refused(TypeError, "seqused_k: int64: must be int32; nearest legal: int32", seqused_k=np.array([1, 2]))


def test_bounds_of_rows():
    rows = np.zeros((2, 9), np.int32)
    refused(TypeError, "key_begin: int64: must be int32; nearest legal: int32", key_begin=rows.astype(np.int64))
    refused(ValueError, "key_end: shape (1, 9): must be (b, sq) = (2, 9); nearest legal: (2, 9)", key_end=rows[:1])
    refused(ValueError, "key_end: shape (9,): must be (b, sq) = (2, 9); nearest legal: (2, 9)", key_end=rows[0])
    refused(ValueError, "key_begin: [[1.5]]: must be exact in int32", key_begin=[[1.5]])
    refused(TypeError, "attention() has no argument 'key_ends'; did you mean 'key_end'?", key_ends=rows)


def test_nothing_is_written_by_a_refused_call():
    o, lse = np.full(Q.shape, np.nan, "f"), np.full((2, 4, 9), np.nan, "f")
    with pytest.raises(ValueError):
        narrows.attention(Q, K, V, o=o, lse=lse, seqused_k=[1, 99])
    assert np.isnan(o).all() and np.isnan(lse).all()
