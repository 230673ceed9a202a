from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Sequence

from . import _arrays, _calls, _options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options


class Gradients(NamedTuple):
    """What attention_backward returns; None where not asked."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dslopes: Any = None
    dsinks: Any = None


OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dslopes": "alibi_slopes", "dsinks": "sinks"}


@_calls.with_signature("dout q k v o lse dlse=", wanted=None, **dict.fromkeys(OF))
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any = None,
    *,
    wanted: Optional[Sequence[str]] = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    dslopes: Any = None,
    dsinks: Any = None,
    **options: Unpack[Options],
) -> Gradients:
    """The gradients of ``o, lse = attention(q, k, v, return_lse=True, ...)``, given those of its results.

    P is computed again from q, k and lse, never stored, so memory is linear in length. Returns a named tuple
    ``Gradients(dq, dk, dv, dbias, dslopes, dsinks)``, each of the shape, dtype and kind of array of what it is the
    gradient of; dbias is summed over the axes along which bias was broadcast. Rows that saw no key get dq = 0 and add
    nothing to the others; rows in no sequence get zeros.

    dout: gradient of o, (b, sq, h, dv) or (total_q, h, dv), of q's dtype; may be expanded, as a sum's gradient is.
    dlse: gradient of lse, if the loss depends on it too.
    wanted: names of the gradients to compute. Default: dq, dk, dv, and those of bias, alibi_slopes and sinks if given.
    dq, dk, dv, dbias, dslopes, dsinks: arrays to write the results into, which are then returned.

    Every other keyword is attention's, and must be what the forward call had: seed and offset too. The KV cache has no
    gradient.

    CUDA arrays are computed on their device and stream as attention does it; gradients are then of q's kind of array,
    and the scratch of a call of torch's or CuPy's is their memory. narrows.torch makes one function of both passes.

    Raises what attention raises, before anything is written.

    >>> import numpy as np, narrows
    >>> q = np.zeros((1, 2, 1, 4), np.float32)
    >>> o, lse = narrows.attention(q, q, q, causal=True, return_lse=True)
    >>> gradients = narrows.attention_backward(np.ones_like(o), q, q, q, o, lse, causal=True)
    >>> gradients.dv[0, :, 0, 0].tolist()  # P^T of ones: key 0 has the weights 1 and 1/2, key 1 has 1/2
    [1.5, 0.5]
    >>> gradients.dbias is None
    True
    """
    given = dict(zip(OF, (dq, dk, dv, dbias, dslopes, dsinks)))
    call, operands, gpu = _calls.assemble(
        "attention_backward",
        (("q", q), ("k", k), ("v", v)),
        options,
        ("dlse", "wanted", *OF),
        (dout, o, lse, dlse, *given.values()),
    )
    arrays = {"q": q, "k": k, "v": v, **{name: options.get(name) for name in ("bias", "alibi_slopes", "sinks")}}
    described = {operand.name: operand for operand in operands}
    for name, value in (("dout", dout), ("o", o), ("lse", lse), ("dlse", dlse)):
        if value is not None or name != "dlse":
            operands.append(_arrays.operand(name, value, gpu=gpu))
    finish: Dict[str, Callable[[], Any]] = {}
    for name in _wanted(wanted, given, arrays):
        of, array = described[OF[name]], arrays[OF[name]]
        _arrays.require_float(of)
        like = q if isinstance(array, (list, tuple)) else array
        finish[name] = _calls.result(operands, name, given[name], of.shape, of.dtype, like, gpu)
    _calls.hand_over(call, operands)
    _calls.lend_workspace(call, gpu, options.get("workspace"), call.backward_workspace_size)
    call.backward()
    if gpu:
        gpu.finish()
    return Gradients(**{name: array() for name, array in finish.items()})


def _wanted(wanted: Optional[Sequence[str]], given: Dict[str, Any], arrays: Dict[str, Any]) -> Sequence[str]:
    """Names of the gradients to compute, each with the array that it is the gradient of."""
    if wanted is None:
        names = [name for name in OF if arrays[OF[name]] is not None or given[name] is not None]
    elif isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise TypeError(f"wanted: {wanted!r}: must be a sequence of names, such as ('dq', 'dk')")
    else:
        names = list(dict.fromkeys(wanted))
    for name in names:
        if name not in OF:
            raise ValueError(f"wanted: {name!r}: must be of {', '.join(OF)}{_options.did_you_mean(name, tuple(OF))}")
        if arrays[OF[name]] is None:
            raise ValueError(f"{name}: wanted: needs {OF[name]}")
    for name, array in given.items():
        if array is not None and name not in names:
            raise ValueError(f"{name}: given: wanted leaves it out; nearest legal: wanted={(*names, name)}")
    return names
