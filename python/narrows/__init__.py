"""Exact attention, ``softmax(scale * Q K^T + bias) V``, in one pass over Q, K and V, for NumPy and DLPack arrays.

>>> import numpy as np, narrows
>>> q = np.zeros((1, 4, 8, 64), np.float32)      # (batch, query length, heads, head dim)
>>> k = np.zeros((1, 6, 2, 64), np.float32)      # (batch, key length, kv heads, head dim)
>>> v = np.ones((1, 6, 2, 32), np.float32)       # (batch, key length, kv heads, value head dim)
>>> narrows.attention(q, k, v, causal=True).shape
(1, 4, 8, 32)
"""

from ._api import attention, explain, info
from ._core import Explanation, FamilyInfo, Info, version
from ._options import Options

__version__: str = version()

__all__ = ["Explanation", "FamilyInfo", "Info", "Options", "__version__", "attention", "explain", "info"]
