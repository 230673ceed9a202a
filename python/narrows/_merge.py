from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

from . import _arrays, _calls, _core, _gpu, _options


def merge(
    parts: Sequence[Tuple[Any, Any]],
    sinks: Any = None,
    *,
    return_lse: bool = True,
    o: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> Any:
    """One row's attention over several sets of keys, from the ``(o, lse)`` that attention gave for each set.

    Of splits of the keys, shared prefixes, or machines that hold a share of the keys each. Returns ``(O, LSE)``, or O
    alone with ``return_lse=False``, as the first part's kind of array.

    parts: list of (o, lse), all of one shape and dtype. A part whose lse is -inf saw no key and is left out, whatever
        its o; a row that is empty in every part gives (0, -inf).
    sinks: (h,). Counted once, here: the parts must have been computed without.
    o, lse: arrays to write the results into, which are then returned.
    stream: as attention's. On a GPU there are at most 32 parts.

    Raises ValueError, TypeError or NotImplementedError, before anything is written.

    >>> import numpy as np, narrows
    >>> q, k = np.ones((1, 1, 1, 4), np.float32), np.ones((1, 6, 1, 4), np.float32)
    >>> v = np.arange(6, dtype=np.float32).reshape(1, 6, 1, 1)
    >>> parts = [narrows.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 2), slice(2, 6))]
    >>> round(narrows.merge(parts)[0].item(), 5)  # the mean of 0 .. 5
    2.5
    """
    wants_lse = _calls.flag("return_lse", return_lse)
    given = [array for part in parts for array in part] if _are_pairs(parts) else []
    gpu = _gpu.of(stream, given[0], [*given[1:], o, lse, sinks]) if given else None
    operands = _pairs(parts, gpu)
    first_o, first_lse = operands[0], operands[1]
    results: List[_core.Operand] = []
    o_dtype, lse_dtype = _arrays.result_dtypes(first_o)
    finish_o = _calls.result(results, "o", o, first_o.shape, o_dtype, parts[0][0], gpu)
    finish_lse = _calls.result(results, "lse", lse, first_lse.shape, lse_dtype, parts[0][0], gpu)
    sink = None if sinks is None else _options.tensor("sinks", sinks, gpu)
    _fold([*operands, *results], first_o.shape[:-3])
    _core.merge(operands, results, sink, gpu.stream if gpu else _gpu.handle(stream))
    if gpu:
        gpu.finish()
    return (finish_o(), finish_lse()) if wants_lse else finish_o()


def merge_backward(
    parts: Sequence[Tuple[Any, Any]], dout: Any, dlse: Any = None, sinks: Any = None, *, stream: Any = None
) -> Tuple[List[Tuple[Any, Any]], Any]:
    """The gradients of ``o, lse = merge(parts, sinks)``, given those of its results.

    Returns ``([(do, dlse), ...], dsinks)``: a pair for each part, of its shapes, dtypes and kinds of array, and dsinks
    or None. do and dlse are what attention_backward takes as dout and dlse of that part.

    dout: gradient of O; may be expanded. dlse: gradient of LSE, if the loss depends on it too.
    stream: as merge's.

    >>> import numpy as np, narrows
    >>> part = np.ones((1, 1, 1, 2), np.float32), np.zeros((1, 1, 1), np.float32)
    >>> gradients, _ = narrows.merge_backward([part, part], np.ones((1, 1, 1, 2), np.float32))
    >>> gradients[0][0].ravel().tolist()  # each part weighs a half
    [0.5, 0.5]
    """
    given = [array for part in parts for array in part] if _are_pairs(parts) else []
    gpu = _gpu.of(stream, given[0], [*given[1:], dout, dlse, sinks]) if given else None
    operands = _pairs(parts, gpu)
    saved = [_arrays.operand("dout", dout, gpu=gpu)]
    if dlse is not None:
        saved.append(_arrays.operand("dlse", dlse, gpu=gpu))
    results: List[_core.Operand] = []
    finish = []
    for index, part in enumerate(parts):
        for name, operand, like in zip(("do", "dlse"), operands[2 * index :], part):
            _arrays.require_float(operand)
            finish.append(_calls.result(results, f"{name}[{index}]", None, operand.shape, operand.dtype, like, gpu))
    sink: Optional[_core.Operand] = None
    dsinks: List[_core.Operand] = []
    finish_dsinks: Callable[[], Any] = lambda: None
    if sinks is not None:
        sink = _options.tensor("sinks", sinks, gpu)
        _arrays.require_float(sink)
        like = parts[0][0] if isinstance(sinks, (list, tuple)) else sinks
        finish_dsinks = _calls.result(dsinks, "dsinks", None, sink.shape, sink.dtype, like, gpu)
    _fold([*operands, *saved, *results], operands[0].shape[:-3])
    handle = gpu.stream if gpu else _gpu.handle(stream)
    _core.merge_backward(operands, saved[0], (*saved, None)[1], results, sink, (*dsinks, None)[0], handle)
    if gpu:
        gpu.finish()
    arrays = [array() for array in finish]
    return list(zip(arrays[::2], arrays[1::2])), finish_dsinks()


def _are_pairs(parts: Any) -> bool:
    return isinstance(parts, (list, tuple)) and all(isinstance(part, (list, tuple)) and len(part) == 2 for part in parts)


def _pairs(parts: Sequence[Tuple[Any, Any]], gpu: Optional[_gpu.Gpu] = None) -> List[_core.Operand]:
    """o and lse of each part, end to end."""
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"parts: {type(parts).__name__}: must be a list of pairs (o, lse)")
    operands = []
    for index, part in enumerate(parts):
        if not isinstance(part, (list, tuple)) or len(part) != 2:
            raise TypeError(f"parts[{index}]: {type(part).__name__}: must be a pair (o, lse)")
        named = zip(("o", "lse"), part)
        operands += [_arrays.operand(f"parts[{index}].{name}", array, gpu=gpu) for name, array in named]
        for operand, least in zip(operands[-2:], (3, 2)):
            if len(operand.shape) < least:
                raise ValueError(
                    f"{operand.name}: shape {tuple(operand.shape)}: must have {least + 1} axes, or {least} for varlen"
                )
    if not operands:
        raise ValueError("parts: empty: must hold at least one (o, lse)")
    return operands


def _fold(operands: Sequence[_core.Operand], leading: Sequence[int]) -> None:
    """Makes one axis of those before (s, h, dv) of o and (h, s) of lse."""
    if len(leading) < 2:
        return
    for operand in operands:
        operand.fold_leading(leading, 2 if "lse" in operand.name else 3, False)
