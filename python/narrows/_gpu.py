"""Where a call of CUDA arrays runs: device, stream, and memory that stays until the work is done."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, ContextManager, Iterable, Optional, Sequence

from . import _core

# torch's and CuPy's names.
DTYPES = {
    **{"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"},
    **{"int32": "int32", "int64": "int64", "uint8": "uint8", "boolean": "bool"},
}
_CUDA = 2  # of DLPack


def device_of(array: object) -> Optional[int]:
    """Index of the CUDA device that `array` is on; None if it is on none."""
    if not hasattr(array, "__dlpack_device__"):
        return None
    kind, index = array.__dlpack_device__()
    return int(index) if int(kind) == _CUDA else None


def _library(array: object) -> Any:
    """torch or cupy, if `array` is theirs: these have a current stream and free memory in its order."""
    return sys.modules.get(_library_name(type(array)))


@functools.lru_cache(maxsize=256)
def _library_name(kind: type) -> str:
    names = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return next((name for name in ("torch", "cupy") if name in names), "")


def exporting(array: object) -> ContextManager[Any]:
    """In which `array` may be exported: torch and CuPy want its device to be the current one, and its stream to be that
    device's current one."""
    index, library = device_of(array), _library(array)
    if index is None or library is None:
        return contextlib.nullcontext()
    context: ContextManager[Any] = library.cuda.device(index) if _is_torch(library) else library.cuda.Device(index)
    return context


def _is_torch(library: Any) -> bool:
    return bool(library.__name__ == "torch")


def _handle(stream: Any) -> int:
    """A CUstream as a number, of an int or any library's stream."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(
            f"stream: {stream!r}: must be a stream of torch or CuPy, __cuda_stream__, or a CUstream as an int"
        )
    number = int(stream.__index__())
    if not 0 <= number < 1 << 64:
        raise ValueError(f"stream: {number}: must be the address of a CUstream, or 0 for the legacy default stream")
    return number


class Gpu:
    """The device and stream of one call."""

    def __init__(self, index: int, stream: Any, like: object, others: Iterable[object]) -> None:
        self.index = index
        self._library = _library(like)
        self._given = stream is not None
        self.stream = _handle(stream) if self._given else self._current()
        # DLPack's number for a consumer's stream: 0 is not one.
        self.exchange = self.stream or 1
        # What a library without streams of its own gives up, another array of it may get at once.
        self._waits = any(_library(array) is None and device_of(array) is not None for array in (like, *others))
        if self._given:
            self._record(array for array in (like, *others) if device_of(array) is not None)

    def _current(self) -> int:
        if self._library is None:
            return 0
        if _is_torch(self._library):
            return int(self._library.cuda.current_stream(self.index).cuda_stream)
        with self._library.cuda.Device(self.index):
            return int(self._library.cuda.get_current_stream().ptr)

    def _record(self, arrays: Iterable[Any]) -> None:
        """torch gives memory on to another tensor in the order of the stream that it was made on."""
        for array in arrays:
            library = _library(array)
            if library is not None and _is_torch(library):
                array.record_stream(self._torch_stream(library))

    def _torch_stream(self, torch: Any) -> Any:
        if self.stream in (0, 1):
            return torch.cuda.default_stream(self.index)
        return torch.cuda.ExternalStream(self.stream, device=self.index)

    @property
    def follows_torch(self) -> bool:
        """Whether the call is on torch's current stream, on which its tensors are ready."""
        return not self._given and self._library is not None and _is_torch(self._library)

    @property
    def allocates(self) -> bool:
        """Whether empty() has memory to give."""
        return self._library is not None

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Memory of q's library on the call's stream, or None where that is not one that Narrows knows."""
        return self._make("empty", shape, dtype)

    def full(self, shape: Sequence[int], dtype: str, value: int) -> Any:
        """As empty, each element `value`."""
        return self._make("full", shape, dtype, value)

    def _make(self, function: str, shape: Sequence[int], dtype: str, *value: int) -> Any:
        library = self._library
        if library is None:
            return None
        make = getattr(library, function)
        own: ContextManager[Any] = contextlib.nullcontext()
        if _is_torch(library):
            if self._given:
                own = library.cuda.stream(self._torch_stream(library))
            with own:
                return make(tuple(shape), *value, dtype=getattr(library, DTYPES[dtype]), device=f"cuda:{self.index}")
        if self._given:
            own = library.cuda.ExternalStream(self.stream)
        with library.cuda.Device(self.index), own:
            return make(tuple(shape), *value, dtype=DTYPES[dtype])

    def finish(self) -> None:
        """Waits for the call where nothing else keeps its memory until then."""
        if self._waits:
            _core.synchronise(self.index, self.stream)


def of(stream: Any, like: object, others: Iterable[object] = ()) -> Optional[Gpu]:
    """The GPU of a call of which `like` is q and `others` are the other arrays; None for the CPU."""
    index = device_of(like)
    return None if index is None else Gpu(index, stream, like, others)


def handle(stream: Any) -> int:
    return 0 if stream is None else _handle(stream)
