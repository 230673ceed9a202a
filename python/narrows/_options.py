"""Every keyword that the calls of q, k and v share: its type, its default, and how it reaches the library."""

from __future__ import annotations

import difflib
import inspect
import operator
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, TypedDict, Union

import numpy as np

from . import _arrays
from ._core import Call, Causal, Operand
from ._gpu import Gpu, device_of

Ints = Union[Sequence[int], Any]  # a list, or an int32 array
Floats = Union[Sequence[float], Any]  # a list, or an array of any float type


class Options(TypedDict, total=False):
    """The keywords that every call of q, k and v has; see attention() and attention_with_cache()."""

    scale: Optional[float]
    softcap: float
    alibi_slopes: Optional[Floats]
    bias: Any
    sinks: Optional[Floats]
    causal: Union[bool, str]
    shift: Optional[Ints]
    window: Optional[Tuple[Optional[int], Optional[int]]]
    chunk: int
    mask: Any
    key_begin: Optional[Ints]
    key_end: Optional[Ints]
    dropout: float
    seed: Any
    offset: Any
    origin: Optional[Tuple[int, int, int, int, int]]
    cu_seqlens_q: Optional[Ints]
    cu_seqlens_k: Optional[Ints]
    seqused_q: Optional[Ints]
    seqused_k: Optional[Ints]
    cache_seqlens: Union[int, Ints, None]
    block_table: Optional[Ints]
    cache_batch_idx: Optional[Ints]
    leftpad: Optional[Ints]
    k_new: Any
    v_new: Any
    cu_seqlens_k_new: Optional[Ints]
    rotary_cos: Any
    rotary_sin: Any
    rotary_interleaved: bool
    rotary_base: Optional[Ints]
    deterministic: bool
    batch_invariant: bool
    num_splits: int
    workspace: Any
    status: Any
    check: bool
    threads: int
    stream: Any
    family: Optional[str]


DEFAULTS: Dict[str, Any] = {
    **{name: None for name in Options.__annotations__},
    **dict.fromkeys(("softcap", "dropout"), 0.0),
    **dict.fromkeys(("chunk", "seed", "offset", "num_splits", "threads"), 0),
    **dict.fromkeys(("causal", "rotary_interleaved", "deterministic", "batch_invariant", "check"), False),
}

_CAUSAL = {"bottom_right": Causal.bottom_right, "top_left": Causal.top_left}


def integer(name: str, value: object, low: int, high: int) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: {value!r}: must be an integer") from None
    if not low <= number <= high:
        raise ValueError(f"{name}: {number}: must be in [{low}, {high}]; nearest legal: {min(max(number, low), high)}")
    return number


def _set_float(call: Call, name: str, value: Any) -> None:
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)) or getattr(value, "ndim", 0) != 0:
            raise TypeError
        setattr(call, name, float(value))
    except TypeError:
        raise TypeError(f"{name}: {value!r}: must be a number") from None


def _integer_setter(bits: int) -> Callable[[Call, str, Any], None]:
    def set_integer(call: Call, name: str, value: Any) -> None:
        setattr(call, name, integer(name, value, -(1 << (bits - 1)), (1 << (bits - 1)) - 1))

    return set_integer


def _set_flag(call: Call, name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: {value!r}: must be True or False")
    setattr(call, name, bool(value))


def _set_causal(call: Call, name: str, value: Any) -> None:
    if isinstance(value, (bool, np.bool_)):
        call.set_causal(Causal.bottom_right if value else Causal.none)
    elif isinstance(value, str) and value in _CAUSAL:
        call.set_causal(_CAUSAL[value])
    else:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}: {value!r}: must be False, True (= 'bottom_right'), 'bottom_right' or 'top_left'")


def _set_window(call: Call, name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name}: {value!r}: must be a pair (left, right); w keys that end with the query's own are (w - 1, 0)"
        )
    left, right = (-1 if side is None else integer(name, side, -(1 << 63), (1 << 63) - 1) for side in value)
    call.set_window((left, right))


def _set_number(call: Call, name: str, value: Any, gpu: Optional[Gpu]) -> None:
    array = isinstance(value, np.ndarray) and value.ndim > 0 or device_of(value) is not None
    if array or not hasattr(value, "__index__") and hasattr(value, "__dlpack__"):
        call.set_operand(_arrays.operand(name, value, gpu=gpu))
    else:
        call.set_number(name, integer(name, value, 0, (1 << 64) - 1))


def _set_origin(call: Call, name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 5:
        raise TypeError(f"{name}: {value!r}: must be a tuple (b, h, i, j, H)")
    b, h, i, j, heads = (integer(name, part, -(1 << 63), (1 << 63) - 1) for part in value)
    call.set_origin((b, h, i, j, heads))


def _set_family(call: Call, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {value!r}: must be a name of narrows.info().families")
    call.set_family(value)


_SETTERS: Dict[str, Callable[[Call, str, Any], None]] = {
    **dict.fromkeys(("scale", "softcap", "dropout"), _set_float),
    **dict.fromkeys(("num_splits", "threads"), _integer_setter(32)),
    **dict.fromkeys(("rotary_interleaved", "deterministic", "batch_invariant", "check"), _set_flag),
    "chunk": _integer_setter(64),
    "causal": _set_causal,
    "window": _set_window,
    "origin": _set_origin,
    "family": _set_family,
}

_NUMBERS = ("seed", "offset")  # or arrays of one

# Lists are as good as arrays where the numbers are few.
_LISTS: Mapping[str, type] = {
    **dict.fromkeys(("alibi_slopes", "sinks"), np.float64),
    **dict.fromkeys(
        (
            *("shift", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "cache_seqlens", "block_table"),
            *("cache_batch_idx", "leftpad", "cu_seqlens_k_new", "rotary_base", "key_begin", "key_end"),
        ),
        np.int32,
    ),
}


# What other libraries call the same thing, where that looks like another of our names or like none.
_ELSEWHERE = {
    "attn_bias": "bias",
    "attn_mask": "mask",
    "dropout_p": "dropout",
    "out": "o",
    "page_table": "block_table",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window",
}


def unknown(function: str, name: str, extra: Sequence[str] = ()) -> TypeError:
    """The error for a keyword that there is not."""
    known = [*DEFAULTS, *extra]
    same = _ELSEWHERE.get(name)
    hint = f"; did you mean {same!r}?" if same in known else did_you_mean(name, known)
    return TypeError(f"{function}() has no argument {name!r}{hint}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def tensor(name: str, value: Any, gpu: Optional[Gpu] = None) -> Operand:
    """The operand for an option that is an array, or a list where those will do."""
    if name in _LISTS:
        value = _arrays.numbers(name, value, _LISTS[name])
    return _arrays.operand(name, value, writable=name in ("workspace", "status"), gpu=gpu)


def apply(call: Call, options: Mapping[str, Any], gpu: Optional[Gpu]) -> List[Operand]:
    """Hands the scalars among `options` but the stream to `call` and returns the tensors among them."""
    operands: List[Operand] = []
    for name, value in options.items():
        if name in _SETTERS:
            if value is not DEFAULTS[name]:
                _SETTERS[name](call, name, value)
        elif name in _NUMBERS and value is not DEFAULTS[name]:
            _set_number(call, name, value, gpu)
        elif name not in _NUMBERS and name != "stream" and value is not None:
            operands.append(tensor(name, value, gpu))
    return operands


def signature(positional: Sequence[str], own: Mapping[str, object], without: Collection[str] = ()) -> inspect.Signature:
    """`positional`, where "name=" defaults to None, then every option but those `without`, then the keywords `own`."""
    first = [
        inspect.Parameter(
            name.rstrip("="),
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if "=" in name else inspect.Parameter.empty,
        )
        for name in positional
    ]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in {**DEFAULTS, **own}.items()
        if name not in without
    ]
    return inspect.Signature([*first, *keywords])
