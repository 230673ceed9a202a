"""Scratch that the caller owns, and status."""

import numpy as np
import pytest
from reference import inputs
from test_arrays import Tensor

import narrows

CALLS = {
    "plain": {},
    "split keys": {"num_splits": 3, "causal": True},
    "bias": {"bias": np.random.default_rng(0).standard_normal((1, 4, 1, 45)).astype(np.float32)},
    "dropout": {"dropout": 0.3, "seed": 5, "threads": 2},
}


def scratch(size):
    """Exactly that many bytes, poisoned, between guards that must stay as they are."""
    memory = np.full(size + 128, 0xFF, np.uint8)
    return memory, memory[64 : 64 + size]


@pytest.mark.parametrize("call", CALLS)
def test_the_same_bits_in_memory_of_the_callers(call):
    options = CALLS[call]
    q, k, v = inputs(sq=33, sk=45)
    size = narrows.workspace_size(q, k, v, **options)
    assert type(size) is int and size > 0
    o, lse = narrows.attention(q, k, v, return_lse=True, **options)
    memory, workspace = scratch(size)
    got = narrows.attention(q, k, v, workspace=workspace, **options)
    np.testing.assert_array_equal(got, o)
    assert (memory[:64] == 0xFF).all() and (memory[-64:] == 0xFF).all() and (workspace != 0xFF).any()
    backward = narrows.attention_backward(o, q, k, v, o, lse, **options)
    memory, workspace = scratch(narrows.backward_workspace_size(q, k, v, **options))
    got = narrows.attention_backward(o, q, k, v, o, lse, workspace=workspace, **options)
    assert (memory[:64] == 0xFF).all() and (memory[-64:] == 0xFF).all() and (workspace != 0xFF).any()
    for x, y in zip(got, backward):
        if y is not None:
            np.testing.assert_array_equal(x, y)


def test_sizes_need_no_elements_of_q_k_v():
    q, k, v = inputs(sq=33, sk=45)
    expanded = [np.broadcast_to(np.float32(np.nan), x.shape) for x in (q, k, v)]
    assert narrows.workspace_size(*expanded, causal=True) == narrows.workspace_size(q, k, v, causal=True)
    assert narrows.workspace_size(q, k, v, cache_seqlens=40) > 0  # of a cache call


def refused(kind, text, call, **options):
    with pytest.raises(Exception) as error:
        call(**options)
    assert (error.type, str(error.value)) == (kind, text)


def test_exact_refusals():
    q, k, v = inputs()
    o, lse = narrows.attention(q, k, v, return_lse=True)
    forward = lambda **options: narrows.attention(q, k, v, **options)
    backward = lambda **options: narrows.attention_backward(o, q, k, v, o, lse, **options)
    for call, size in (
        (forward, narrows.workspace_size(q, k, v)),
        (backward, narrows.backward_workspace_size(q, k, v)),
    ):
        refused(ValueError, f"workspace: {size - 1} bytes: this call needs {size}; nearest legal: {size}", call,
                workspace=np.empty(size - 1, np.uint8))  # fmt: skip
        read_only = np.zeros(size, np.uint8)
        read_only.flags.writeable = False
        for given in (read_only, Tensor(read_only, flags=1)):
            refused(ValueError, "workspace: read-only: must be memory that can be written", call, workspace=given)
        refused(
            TypeError,
            "workspace: fp32: must be uint8; nearest legal: uint8",
            call,
            workspace=np.empty(size, np.float32),
        )
    refused(TypeError, "workspace_size() has no argument 'lse'", lambda: narrows.workspace_size(q, k, v, lse=lse))
    refused(ValueError, "status: read-only: must be memory that can be written", forward,
            status=np.broadcast_to(np.int32(0), (4,)))  # fmt: skip


def test_status_of_a_call_that_kept_every_rule():
    q, k, v = inputs()
    status = np.full(4, -1, np.int32)
    o, lse = narrows.attention(q, k, v, return_lse=True, status=status, check=True)
    assert (status == 0).all()
    status[:] = -1
    narrows.attention_backward(o, q, k, v, o, lse, status=status)
    assert (status == 0).all()
