from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, List, Tuple, TypeVar

from . import _arrays, _core, _options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _with_signature(*own: inspect.Parameter) -> Callable[[_Function], _Function]:
    def decorate(function: _Function) -> _Function:
        function.__signature__ = _options.signature(*own)  # type: ignore[attr-defined]
        return function

    return decorate


def _keyword(name: str, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


@_with_signature(_keyword("return_lse", False), _keyword("o", None), _keyword("lse", None))
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, o: Any = None, lse: Any = None, **options: Unpack[Options]
) -> Any:
    """Exact attention, ``softmax(scale * Q K^T + bias) V``; S and P are never stored, so memory is linear in length.

    Returns O, or ``(O, LSE)`` with ``return_lse=True``.

    Arrays are NumPy arrays or CPU tensors of any library with ``__dlpack__``, of float16, bfloat16 (NumPy: ml_dtypes'
    type), float32 or float64, all of one type, with any strides: negative, zero (expanded) and read-only ones too. They
    are read where they are. O comes back as q's kind of array and dtype: NumPy for NumPy; for a DLPack tensor one of the
    same library, by its ``from_dlpack``, or NumPy if it has none. LSE is float32 (float64 for float64).

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

    A query that sees no key gets O = 0 and LSE = -inf (with a sink: the sink).

    Lengths:

    cu_seqlens_q, cu_seqlens_k: (b + 1,) int32. Sequence s is rows cu_seqlens[s] up to cu_seqlens[s + 1].
    seqused_q, seqused_k: (b,) int32. Rows used of each sequence; the rest is never read, and its O is 0.

    The short ones (slopes, sinks, shift, lengths) may be lists. Results and how to compute:

    return_lse: also return the natural log-sum-exp of each row's logits.
    o, lse: arrays to write the results into (any strides but zero or overlapping ones); o is then what is returned.
    threads: int, 0 = NARROWS_THREADS, else every core.
    family: name of the family to use, from narrows.info().families.

    dropout (with seed, offset, origin), the KV cache (cache_seqlens, block_table, cache_batch_idx, leftpad, k_new, v_new,
    cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, rotary_base), num_splits, workspace, status, check,
    deterministic and batch_invariant are part of the contract; what this build does not compute it refuses by name.

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
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: {return_lse!r}: must be True or False")
    call, operands = _assemble("attention", q, k, v, options)
    query, value = operands[0], operands[2]
    o_dtype, lse_dtype = _arrays.result_dtypes(query.dtype)
    o_shape, lse_shape = _arrays.result_shapes(query.shape, value.shape)
    finish_o = _result(operands, "o", o, o_shape, o_dtype, q)
    finish_lse = None
    if return_lse or lse is not None:
        finish_lse = _result(operands, "lse", lse, lse_shape, lse_dtype, q)
    _hand_over(call, operands)
    call.forward()
    return (finish_o(), finish_lse()) if return_lse and finish_lse else finish_o()


@_with_signature()
def explain(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> _core.Explanation:
    """What ``attention(q, k, v, ...)`` would do and cost, beside attention as three kernels; takes its arguments.

    Counts are exact, from shapes, lengths and masks; no element of q, k, v is read, so that an expanded scalar may stand
    for an array of any size. ``print()`` the result for the report; its fields are named in its type.

    >>> import numpy as np, narrows
    >>> q = np.broadcast_to(np.float32(0), (1, 65536, 8, 64))
    >>> cost = narrows.explain(q, q, q, causal=True)
    >>> cost.visible_pairs == 8 * 65536 * 65537 // 2
    True
    >>> cost.three_kernel_bytes > 100 * cost.fused_bytes
    True
    """
    call, operands = _assemble("explain", q, k, v, options)
    _hand_over(call, operands)
    return call.explain()


def info() -> _core.Info:
    """Version, CPU, instruction set chosen, threads, and the families of this build with why one is not available."""
    return _core.info()


def _assemble(function: str, q: Any, k: Any, v: Any, options: Any) -> Tuple[_core.Call, List[_core.Operand]]:
    for name in options:
        if name not in _options.DEFAULTS:
            raise _options.unknown(function, name, ("return_lse", "o", "lse") if function == "attention" else ())
    operands = [_arrays.operand(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
    if len(operands[0].shape) < 4 and options.get("cu_seqlens_q") is None:
        shape = tuple(operands[0].shape)
        hint = "; for one dense sequence pass q[None], k[None], v[None]" if len(shape) == 3 else ""
        raise ValueError(f"q: shape {shape}: must be (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q{hint}")
    for operand in operands:
        if len(operand.shape) < 3:
            raise ValueError(f"{operand.name}: shape {tuple(operand.shape)}: must have 4 axes, or 3 for varlen")
    call = _core.Call()
    operands += _options.apply(call, options)
    return call, operands


def _result(
    operands: List[_core.Operand], name: str, given: Any, shape: Tuple[int, ...], dtype: str, like: object
) -> Callable[[], Any]:
    if given is not None:
        operands.append(_arrays.operand(name, given, writable=True))
        return lambda: given
    result = _arrays.Result(name, shape, dtype, like)
    operands.append(result.operand)
    return result.finish


# How many axes follow the batch, and whether the batch broadcasts, in arrays that may have more leading axes.
_FOLDED = {"q": (3, False), "k": (3, False), "v": (3, False), "o": (3, False), "lse": (2, False)}
_FOLDED.update(bias=(3, True), mask=(3, True))


def _hand_over(call: _core.Call, operands: List[_core.Operand]) -> None:
    leading = operands[0].shape[:-3]  # of q
    for operand in operands:
        if len(leading) > 1 and operand.name in _FOLDED:
            operand.fold_leading(leading, *_FOLDED[operand.name])
        call.set_operand(operand)
