"""Attention that PyTorch differentiates: narrows.attention and its gradients as one function of torch.autograd.

Imported by name alone (``import narrows.torch``): the package itself needs no PyTorch.

>>> import torch, narrows.torch
>>> q = torch.zeros(1, 2, 1, 4, requires_grad=True)  # (batch, length, heads, head dim), as narrows.attention has it
>>> narrows.torch.attention(q, q, q, causal=True).sum().backward()
>>> q.grad[0, :, 0, 0].tolist()  # as v: key 0 has the weights 1 and 1/2, key 1 has 1/2
[1.5, 0.5]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from . import _api, _backward, _calls, _options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options

__all__ = ["attention"]

_CACHE = "a KV cache has no gradient; narrows.attention and narrows.attention_with_cache take it"
_NOT_HERE = {
    **dict.fromkeys(("cache_seqlens", "block_table", "cache_batch_idx", "leftpad"), _CACHE),
    **dict.fromkeys(("k_new", "v_new", "cu_seqlens_k_new"), _CACHE),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_base"), _CACHE),
    "stream": "the work goes on torch's current stream; choose it by torch.cuda.stream",
    "workspace": "forward and backward each bring theirs",
}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> Any:
    """narrows.attention of torch tensors, on the CPU or CUDA, with gradients. Returns O, or ``(O, LSE)`` with
    ``return_lse=True``.

    Shapes, dtypes, strides and keywords are narrows.attention's, with the differences below. q is (b, sq, h, d):
    torch's (b, h, sq, d) is passed as ``q.transpose(1, 2)``, without a copy. The gradient of O may be strided or
    expanded, too.

    Gradients: those of q, k, v, bias, alibi_slopes and sinks that are required are computed, and no others. The loss
    may depend on O, on LSE or on both. Between forward and backward q, k, v, O, LSE and the options are kept: linear in
    length. The gradient of a gradient is refused, and so is an argument that requires a gradient and has none, such as
    a scale that is a tensor (scale q instead).

    seed: None draws a seed from torch's default generator of q's device where there is dropout: torch.manual_seed
        repeats it, and a captured CUDA graph draws anew at each replay. Backward drops what forward dropped.
    deterministic: also on after torch.use_deterministic_algorithms(True).
    status, check: of forward, and again of backward.

    Under torch.autocast q, k and v are taken in its dtype (float64 stays); bias, slopes and sinks are added in float32
    as ever. torch.compile leaves the call as it is, between its graphs.

    The KV cache, stream and workspace are no arguments here. Raises what narrows.attention raises.
    """
    if torch.compiler.is_compiling():  # torch's tracer has no memory to pass on
        return torch.compiler.disable(_attention)(q, k, v, return_lse, options)  # type: ignore[no-untyped-call]
    return _attention(q, k, v, return_lse, options)


attention.__signature__ = _options.signature(  # type: ignore[attr-defined]
    ("q", "k", "v"), {"seed": None, "return_lse": False}, without=_NOT_HERE
)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool, options: Any) -> Any:
    for name in options:
        if name in _NOT_HERE:
            raise TypeError(f"narrows.torch.attention() has no argument {name!r}: {_NOT_HERE[name]}")
        if name not in _options.DEFAULTS:
            raise _options.unknown("narrows.torch.attention", name, ("return_lse",))
    arrays: Dict[str, Any] = {"q": q, "k": k, "v": v}
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            raise TypeError(f"{name}: {type(array).__name__}: must be a torch.Tensor")
    rules: Dict[str, Any] = {}
    for name, value in _settled(options, q.device).items():
        saved = isinstance(value, torch.Tensor) and name != "status"  # which both passes write
        (arrays if saved else rules)[name] = value
    saves = torch.is_grad_enabled() and any(array.requires_grad for array in arrays.values())
    for name, array in arrays.items():
        if saves and array.requires_grad and name not in _backward.OF.values():
            raise ValueError(f"{name}: requires grad: has no gradient; nearest legal: {name}.detach()")
    call = _Call(tuple(arrays), rules, _calls.flag("return_lse", return_lse), saves)
    return _Attention.apply(call, *_autocast(q, k, v), *list(arrays.values())[3:])


class _Call(NamedTuple):
    """What a call has beside tensors."""

    names: Tuple[str, ...]  # of its tensors: q, k, v, then those among the options
    rules: Dict[str, Any]  # the other options
    return_lse: bool
    saves: bool  # for a backward pass


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        wants_lse = call.return_lse or call.saves
        results = _api.attention(**_plain(call.names, tensors), **call.rules, return_lse=wants_lse)
        if call.saves:
            ctx.call = call
            ctx.save_for_backward(*tensors, *results)
            ctx.set_materialize_grads(False)
        return results[0] if wants_lse and not call.return_lse else results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        call: _Call = ctx.call
        needed = [name for name, needs in zip(call.names, ctx.needs_input_grad[1:]) if needs]
        found: Dict[str, Any] = {}
        if dout is not None or dlse is not None:
            arrays = _plain((*call.names, "o", "lse"), ctx.saved_tensors)
            if dout is None:
                dout = arrays["o"].new_zeros(()).expand(arrays["o"].shape)
            if dlse is not None:
                arrays["dlse"] = dlse.detach()
            wanted = [name for name, of in _backward.OF.items() if of in needed]
            gradients = _backward.attention_backward(dout.detach(), **arrays, wanted=wanted, **call.rules)
            found = {of: getattr(gradients, name) for name, of in _backward.OF.items()}
        return (None, *(found.get(name) for name in call.names))


def _plain(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Dict[str, Any]:
    """The same memory without autograd: torch exports no tensor that requires a gradient."""
    return {name: tensor.detach() for name, tensor in zip(names, tensors)}


def _settled(options: Any, device: torch.device) -> Dict[str, Any]:
    """`options` with what torch decides."""
    settled = dict(options)
    if settled.get("seed") is None:
        settled.pop("seed", None)
        dropout = settled.get("dropout", 0.0)
        if isinstance(dropout, (int, float)) and 0 < dropout < 1:
            settled["seed"] = torch.randint(1 << 62, (1,), dtype=torch.int64, device=device)
    if torch.are_deterministic_algorithms_enabled():
        settled["deterministic"] = settled.get("deterministic", False) or True
    return settled


def _autocast(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """In the dtype that torch.autocast would have scaled_dot_product_attention take."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
