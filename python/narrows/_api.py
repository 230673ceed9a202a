from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _arrays, _calls, _core

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options


@_calls.with_signature("q k v", return_lse=False, o=None, lse=None)
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, o: Any = None, lse: Any = None, **options: Unpack[Options]
) -> Any:
    """Exact attention, ``softmax(scale * Q K^T + bias) V``; S and P are never stored, so memory is linear in length.

    Returns O, or ``(O, LSE)`` with ``return_lse=True``.

    Arrays are NumPy arrays or tensors of any library with ``__dlpack__``, of float16, bfloat16 (NumPy: ml_dtypes'
    type), float32 or float64, all of one type, with any strides: negative, zero (expanded) and read-only ones too. They
    are read where they are. O comes back as q's kind of array and dtype: NumPy for NumPy; for a DLPack tensor one of
    the same library, by its ``from_dlpack``, or NumPy if it has none. LSE is float32 (float64 for float64).

    CUDA arrays are computed on their device; all of a call are on q's, int32 and int64 ones too, whose values are read
    there alone. With torch and CuPy the work goes on their current stream of that device and the call returns at once;
    for any other library it waits, since nothing else would keep the memory until the work is done.

    Shapes: b batch, sq / sk query / key length, h query heads, hk kv heads (h a multiple of hk: grouped queries), d and
    dv head dims.

    =============  ======================  ===================================
    array          dense                   varlen (with cu_seqlens_q)
    =============  ======================  ===================================
    q              (b, sq, h, d)           (total_q, h, d)
    k              (b, sk, hk, d)          (total_k, hk, d), or dense
    v              (b, sk, hk, dv)         (total_k, hk, dv), or dense
    O              (b, sq, h, dv)          (total_q, h, dv)
    LSE            (b, h, sq)              (h, total_q)
    =============  ======================  ===================================

    Dense q, k, v may have more leading axes, the same in each, if they fold into one by strides alone.

    Scores, in this order:

    scale: float, default 1 / sqrt(d). Any finite value.
    softcap: float, 0 = off. s becomes softcap * tanh(s / softcap).
    alibi_slopes: (h,) or (b, h). Adds -slope * abs(p - j), p being the query's position and j the key's.
    bias: array that broadcasts to (b, h, sq, sk), added in float32; -inf masks.
    sinks: (h,). One more logit per head that has no value row; -inf = none.

    Which keys a query sees; all rules intersect. Query i stands at position p = i + shift on the keys' axis:

    causal: False, True or "bottom_right" (shift = sk - sq), or "top_left" (shift = 0). Keys j <= p.
    shift: (b,) int32, overrides the shift of each sequence.
    window: (left, right). Keys p - left <= j <= p + right, both included; None or -1 = unlimited.
    chunk: int, 0 = off. Only keys of the query's own chunk: j // chunk == p // chunk.
    mask: boolean array that broadcasts to (b, h, sq, sk); True = may attend.
    key_begin, key_end: (b, sq), varlen (total_q,) int32, either alone. Query i of its sequence sees only keys
        key_begin[i] <= j < key_end[i], j counted from the sequence's first key. Any values: documents that share a row
        (begin and end of each query's own), a prefix that all see (key_end = max(prefix, i + 1) instead of causal).

    A query that sees no key gets O = 0 and LSE = -inf (with a sink: the sink).

    Lengths:

    cu_seqlens_q, cu_seqlens_k: (b + 1,) int32. Sequence s is rows cu_seqlens[s] up to cu_seqlens[s + 1].
    seqused_q, seqused_k: (b,) int32. Rows used of each sequence; the rest is never read, and its O is 0.

    The short ones (slopes, sinks, shift, key_begin, key_end, lengths) may be lists.

    Dropout on P, the same mask on every machine and tiling:

    dropout: probability of dropping a weight, in [0, 1). The rest is scaled up.
    seed, offset: int of 64 bits and int below 2^32 that draw the mask, or int64 arrays of one element.
    origin: (b, h, i, j, H), where this call's first row, head, query and key stand in a larger call, and the heads of
        that one (0 = this call's), so that parts drop what the whole would.

    Results and how to compute; none of these changes a result beyond rounding:

    return_lse: also return the natural log-sum-exp of each row's logits.
    o, lse: arrays to write the results into (any strides but zero or overlapping ones); o is then what is returned.
    threads: int, 0 = NARROWS_THREADS, else every core of the CPU.
    stream: CUDA stream to work on instead of the current one: of torch or CuPy, with __cuda_stream__, or a number.
        Memory of libraries but torch must live until the work is done.
    family: name of the family to use, from narrows.info().families.
    num_splits: int, parts that the keys are split into; 0 = as planned.
    batch_invariant: a row's bits depend on its query, the keys it sees and the options, not on its batch or splits.
    deterministic: the same bits each time, gradients too (on the CPU always).
    workspace: uint8 array of workspace_size(...) bytes for scratch; the call then allocates none.
    status: int32 array of 4: code, sequence, value and limit of a broken rule, zeros if none.
    check: wait, and raise what status would say (on the CPU always so).

    The KV cache (cache_seqlens, block_table, cache_batch_idx, leftpad, k_new, v_new, cu_seqlens_k_new, rotary_cos,
    rotary_sin, rotary_interleaved, rotary_base): see attention_with_cache, of which k and v are then the caches.

    Raises ValueError, TypeError (also for an unknown keyword), NotImplementedError or MemoryError, before anything is
    written. The GIL is released while it computes, and calls from several threads are safe.

    >>> import numpy as np, narrows
    >>> q = np.zeros((1, 3, 1, 2), np.float32)
    >>> v = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    >>> narrows.attention(q, q, v, causal=True).ravel().tolist()  # zero scores: row i is the mean of v[0..i]
    [0.0, 0.5, 1.0]
    >>> o, lse = narrows.attention(q, q, v, window=(0, 0), return_lse=True)  # each query sees its own key only
    >>> lse.tolist()
    [[[0.0, 0.0, 0.0]]]
    """
    return _forward("attention", (("q", q), ("k", k), ("v", v)), return_lse, o, lse, options)


@_calls.with_signature("q k_cache v_cache", return_lse=False, o=None, lse=None)
def attention_with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    return_lse: bool = False,
    o: Any = None,
    lse: Any = None,
    **options: Unpack[Options],
) -> Any:
    """Attention over a KV cache, to which k_new and v_new are appended in place first. Forward only.

    Returns O, or ``(O, LSE)`` with ``return_lse=True``, as attention does; q may be dense or varlen. What a slot holds
    that no query sees changes nothing. Errors of the library call the caches k and v.

    =================  =========================  ===============================================
    array              contiguous                 in pages (with block_table)
    =================  =========================  ===============================================
    k_cache            (b, capacity, hk, d)       (pages, page size, hk, d), any page size
    v_cache            (b, capacity, hk, dv)      (pages, page size, hk, dv)
    block_table                                   (b, pages per sequence) int32
    k_new              (b, s_new, hk, d), or with cu_seqlens_k_new (total_new, hk, d)
    v_new              (b, s_new, hk, dv), or with cu_seqlens_k_new (total_new, hk, dv)
    =================  =========================  ===============================================

    cache_seqlens: (b,) int32, or one int for all. Slots filled in each row before the append, leftpad included.
    block_table: page of each run of slots. Entries without a visible or new key are not read.
    cache_batch_idx: (b,) int32. The row of the cache (or of block_table) that each sequence uses, instead of its own.
    leftpad: (b,) int32. Slots skipped at the front: keys count from there.
    k_new, v_new: keys and values to append behind the filled slots. The caches must then be memory that can be written.
        What does not fit is refused before anything is written.
    cu_seqlens_k_new: (b + 1,) int32. Sequence s appends rows cu_seqlens_k_new[s] up to cu_seqlens_k_new[s + 1].
    rotary_cos, rotary_sin: (positions, r / 2). Turns the first r of d of q and k_new; new key t by the angles of
        position cache_seqlens + t, query i by those of cache_seqlens + i.
    rotary_interleaved: turn pairs (2i, 2i + 1); False: (i, i + r / 2).
    rotary_base: (b,) int32. Position of query 0, instead of cache_seqlens.

    return_lse, o, lse and every other keyword: as attention's.

    >>> import numpy as np, narrows
    >>> k_cache, v_cache = np.zeros((2, 1, 8, 1, 2), np.float32)
    >>> for step in range(3):
    ...     new = np.full((1, 1, 1, 2), step, np.float32)
    ...     o = narrows.attention_with_cache(0 * new, k_cache, v_cache, cache_seqlens=step, k_new=new, v_new=new)
    >>> v_cache[0, :, 0, 0].tolist(), o.ravel().tolist()  # zero scores: the mean of what the cache holds
    ([0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0])
    """
    arrays = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    return _forward("attention_with_cache", arrays, return_lse, o, lse, options)


def _forward(function: str, arrays: Any, return_lse: bool, o: Any, lse: Any, options: Any) -> Any:
    wants_lse = _calls.flag("return_lse", return_lse)
    call, operands, gpu = _calls.assemble(function, arrays, options, ("return_lse", "o", "lse"), (o, lse))
    query, value = operands[0], operands[2]
    o_dtype, lse_dtype = _arrays.result_dtypes(query)
    o_shape, lse_shape = _arrays.result_shapes(query.shape, value.shape)
    like = arrays[0][1]
    finish_o = _calls.result(operands, "o", o, o_shape, o_dtype, like, gpu)
    finish_lse = None
    if wants_lse or lse is not None:
        finish_lse = _calls.result(operands, "lse", lse, lse_shape, lse_dtype, like, gpu)
    _calls.hand_over(call, operands)
    if _may_need_scratch(options):
        _calls.lend_workspace(call, gpu, options.get("workspace"), call.workspace_size)
    call.forward()
    if gpu:
        gpu.finish()
    return (finish_o(), finish_lse()) if wants_lse and finish_lse else finish_o()


def _may_need_scratch(options: Any) -> bool:
    """Of calls on a GPU those whose keys may be shared out; others save the question."""
    return any(options.get(name) is not None for name in ("cache_seqlens", "block_table")) or bool(options.get("num_splits"))


@_calls.with_signature("q k v")
def prepare(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> None:
    """Does now what the first ``attention(q, k, v, ...)`` of this kind would do: on a GPU, compile and load the kernel.

    After it such a call may be captured in a CUDA graph. On the CPU the arguments are checked and that is all.

    >>> import numpy as np, narrows
    >>> q = np.ones((1, 100, 4, 64), np.float32)
    >>> narrows.prepare(q, q, q, causal=True)
    """
    _described("prepare", q, k, v, options).prepare()


@_calls.with_signature("q k v")
def prepare_backward(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> None:
    """Does now what the first ``attention_backward(dout, q, k, v, ...)`` of this kind would do; as prepare."""
    _described("prepare_backward", q, k, v, options).prepare_backward()


@_calls.with_signature("q k v")
def workspace_size(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> int:
    """Bytes of scratch that ``attention(q, k, v, ...)`` needs; takes its arguments, and of a cache call the caches.

    Only shapes, lengths and options matter; no element of q, k, v is read.

    >>> import numpy as np, narrows
    >>> q = np.ones((1, 100, 4, 64), np.float32)
    >>> scratch = np.empty(narrows.workspace_size(q, q, q), np.uint8)
    >>> narrows.attention(q, q, q, workspace=scratch).shape
    (1, 100, 4, 64)
    """
    return _described("workspace_size", q, k, v, options).workspace_size()


@_calls.with_signature("q k v")
def backward_workspace_size(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> int:
    """Bytes of scratch that ``attention_backward(dout, q, k, v, ...)`` needs for every gradient; as workspace_size."""
    return _described("backward_workspace_size", q, k, v, options).backward_workspace_size()


@_calls.with_signature("q k v")
def explain(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> _core.Explanation:
    """What ``attention(q, k, v, ...)`` would do and cost, beside attention as three kernels; takes its arguments.

    Counts are exact, from shapes, lengths and masks; no element of q, k, v is read, so that an expanded scalar may
    stand for an array of any size. ``print()`` the result for the report; its fields are named in its type.

    >>> import numpy as np, narrows
    >>> q = np.broadcast_to(np.float32(0), (1, 65536, 8, 64))
    >>> cost = narrows.explain(q, q, q, causal=True)
    >>> cost.visible_pairs == 8 * 65536 * 65537 // 2
    True
    >>> cost.three_kernel_bytes > 100 * cost.fused_bytes
    True
    """
    return _described("explain", q, k, v, options).explain()


def info() -> _core.Info:
    """Version, CPU, instruction set chosen, threads, and the families of this build with why one is not available."""
    return _core.info()


def _described(function: str, q: Any, k: Any, v: Any, options: Any) -> _core.Call:
    call, operands, _ = _calls.assemble(function, (("q", q), ("k", k), ("v", v)), options)
    _calls.hand_over(call, operands)
    return call
