"""What every call of q, k and v shares: arguments gathered, memory for results, axes before (s, h, d) folded."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, TypeVar

import numpy as np

from . import _arrays, _core, _gpu, _options

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_signature(positional: str, **own: object) -> Callable[[_Function], _Function]:
    """Shows the names in `positional` (those with "=" default to None), every option, then the keywords `own`."""

    def decorate(function: _Function) -> _Function:
        function.__signature__ = _options.signature(positional.split(), own)  # type: ignore[attr-defined]
        return function

    return decorate


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {value!r}: must be True or False")
    return value


def assemble(
    function: str,
    arrays: Sequence[Tuple[str, Any]],
    options: Any,
    own: Sequence[str] = (),
    others: Sequence[Any] = (),
) -> Tuple[_core.Call, List[_core.Operand], Optional[_gpu.Gpu]]:
    """`arrays`: q, k and v with their names. `own`: the function's keywords beside the options, for its errors.
    `others`: what else the call reads and writes."""
    for name in options:
        if name not in _options.DEFAULTS:
            raise _options.unknown(function, name, own)
    stream = options.get("stream")
    gpu = _gpu.of(stream, arrays[0][1], [*(array for _, array in arrays[1:]), *others, *options.values()])
    appends = options.get("k_new") is not None  # to k and v
    operands = [
        _arrays.operand(name, array, writable=appends and index > 0, gpu=gpu)
        for index, (name, array) in enumerate(arrays)
    ]
    if len(operands[0].shape) < 4 and options.get("cu_seqlens_q") is None:
        shape = tuple(operands[0].shape)
        names = [name for name, _ in arrays]
        hint = (
            f"; for one dense sequence pass {', '.join(f'{name}[None]' for name in names)}" if len(shape) == 3 else ""
        )
        raise ValueError(f"q: shape {shape}: must be (b, sq, h, d), or (total_q, h, d) with cu_seqlens_q{hint}")
    for operand in operands:
        if len(operand.shape) < 3:
            raise ValueError(f"{operand.name}: shape {tuple(operand.shape)}: must have 4 axes, or 3 for varlen")
    call = _core.Call()
    call.stream = gpu.stream if gpu else _gpu.handle(stream)
    operands += _options.apply(call, _one_length_each(operands[0].shape[:-3], options, gpu), gpu)
    return call, operands, gpu


def _one_length_each(
    leading: Tuple[int, ...], options: Mapping[str, Any], gpu: Optional[_gpu.Gpu]
) -> Mapping[str, Any]:
    """`options` with a number as cache_seqlens turned into an array where q is: as many for each sequence."""
    length, bounds = options.get("cache_seqlens"), options.get("cu_seqlens_q")
    if isinstance(length, (bool, np.bool_)) or not isinstance(length, (int, np.integer)):
        return options
    length = _options.integer("cache_seqlens", length, -(1 << 31), (1 << 31) - 1)
    batch = int(np.prod(leading)) if bounds is None else max(_options.tensor("cu_seqlens_q", bounds, gpu).shape[0] - 1, 0)
    if gpu is None:
        return {**options, "cache_seqlens": np.full(batch, length, np.int32)}
    lengths = gpu.full((batch,), "int32", length)
    if lengths is None:
        raise TypeError(f"cache_seqlens: {length}: q's library makes no array of it; pass one of int32 on cuda:{gpu.index}")
    return {**options, "cache_seqlens": lengths}


def result(
    operands: List[_core.Operand],
    name: str,
    given: Any,
    shape: Sequence[int],
    dtype: str,
    like: object,
    gpu: Optional[_gpu.Gpu] = None,
) -> Callable[[], Any]:
    """Adds to `operands` the memory `given` for a result, or new memory. Returns what gives the array to the caller."""
    if given is not None:
        operands.append(_arrays.operand(name, given, writable=True, gpu=gpu))
        return lambda: given
    new = _arrays.Result(name, shape, dtype, like, gpu)
    operands.append(new.operand)
    return new.finish


def lend_workspace(call: _core.Call, gpu: Optional[_gpu.Gpu], given: Any, size: Callable[[], int]) -> None:
    """Scratch of q's library for a call on a GPU that was `given` none: it is ordered by the library's stream, seen in
    its count of memory, and its allocator has it ready the next time."""
    if gpu is None or not gpu.allocates or given is not None:
        return
    count = size()
    if count > 0:
        call.set_operand(_arrays.operand("workspace", gpu.empty((count,), "uint8"), writable=True, gpu=gpu))


# How many axes follow the batch, and whether the batch broadcasts, in arrays that may have more leading axes.
_FOLDED = {
    **dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), (3, False)),
    **dict.fromkeys(("lse", "dlse"), (2, False)),
    **dict.fromkeys(("bias", "mask", "dbias"), (3, True)),
}


def hand_over(call: _core.Call, operands: List[_core.Operand]) -> None:
    leading = operands[0].shape[:-3]  # of q
    for operand in operands:
        if len(leading) > 1 and operand.name in _FOLDED:
            operand.fold_leading(leading, *_FOLDED[operand.name])
        call.set_operand(operand)
