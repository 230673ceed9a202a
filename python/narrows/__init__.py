"""Exact attention, ``softmax(scale * Q K^T + bias) V``, in one pass over Q, K and V, for NumPy and DLPack arrays.

>>> import numpy as np, narrows
>>> q = np.zeros((1, 4, 8, 64), np.float32)      # (batch, query length, heads, head dim)
>>> k = np.zeros((1, 6, 2, 64), np.float32)      # (batch, key length, kv heads, head dim)
>>> v = np.ones((1, 6, 2, 32), np.float32)       # (batch, key length, kv heads, value head dim)
>>> narrows.attention(q, k, v, causal=True).shape
(1, 4, 8, 32)

attention_backward gives its gradients, attention_with_cache attends to a KV cache and appends to it, merge joins the
results over several sets of keys, explain counts what a call costs. narrows.torch, imported by that name, is attention
that PyTorch differentiates.
"""

from ._api import (
    attention,
    attention_with_cache,
    backward_workspace_size,
    explain,
    info,
    prepare,
    prepare_backward,
    workspace_size,
)
from ._backward import Gradients, attention_backward
from ._core import Explanation, FamilyInfo, Info, version
from ._merge import merge, merge_backward
from ._options import Options

__version__: str = version()

__all__ = [
    "Explanation",
    "FamilyInfo",
    "Gradients",
    "Info",
    "Options",
    "__version__",
    "attention",
    "attention_backward",
    "attention_with_cache",
    "backward_workspace_size",
    "explain",
    "info",
    "merge",
    "merge_backward",
    "prepare",
    "prepare_backward",
    "workspace_size",
]
