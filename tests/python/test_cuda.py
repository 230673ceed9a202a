"""Calls of CUDA arrays. Without a GPU: what is refused, and why. With one and torch: values, streams, status."""

import contextlib
import gc
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from reference import inputs
from test_arrays import Tensor

import narrows

try:
    import torch
except ImportError:
    torch = None

GPUS = torch.cuda.device_count() if torch and torch.cuda.is_available() else 0
gpu = pytest.mark.skipif(GPUS == 0, reason="torch.cuda is not available")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and here are {GPUS}")


# ------------------------------------------------------------------------------------------------------- without a GPU


class OnGpu(Tensor):
    """Claims device memory that nothing may read, and notes the stream that it was exported for."""

    streams = []

    def __init__(self, array, index=0):
        super().__init__(array, device=(2, index))

    def __dlpack__(self, *, stream=None, max_version=None):
        OnGpu.streams.append(stream)
        return super().__dlpack__()


def refused(kind, text, *arrays, **options):
    with pytest.raises(Exception) as error:
        narrows.attention(*arrays, **options)
    assert (error.type, str(error.value)) == (kind, text)


def test_lengths_in_host_memory_are_refused_by_name():
    q, k, v, o = (OnGpu(x) for x in (*inputs(dtype=np.float16), inputs(dtype=np.float16)[0]))
    rule = "cpu: must be on cuda:0 with the others"
    refused(TypeError, f"seqused_k: {rule}", q, k, v, o=o, seqused_k=np.array([5, 13], np.int32))
    refused(TypeError, f"seqused_k: {rule}", q, k, v, o=o, seqused_k=[5, 13])
    refused(TypeError, f"shift: {rule}", q, k, v, o=o, shift=[0, 0])
    refused(TypeError, f"key_end: {rule}", q, k, v, o=o, key_end=np.zeros((2, 9), np.int32))
    refused(TypeError, f"mask: {rule}", q, k, v, o=o, mask=np.ones((9, 13), bool))
    refused(TypeError, f"o: {rule}", q, k, v, o=np.empty((2, 9, 4, 16), np.float16))
    refused(TypeError, "k: cuda:1: must be on cuda:0 with the others", q, OnGpu(k.array, 1), v, o=o)
    refused(TypeError, f"k: {rule}", q, k.array, v, o=o)
    q, k, v = inputs()
    refused(TypeError, "k: cuda:1: must be on cpu with the others", q, OnGpu(k, 1), v)
    gc.collect()
    assert Tensor.live == 0


def test_the_rest_of_the_contract_holds_without_reading():
    q, k, v = (OnGpu(x, 1) for x in inputs(dtype=np.float16))
    o = OnGpu(np.empty_like(q.array), 1)
    lengths = OnGpu(np.array([99, -3], np.int32), 1)  # known to the kernel alone
    refused(ValueError, "softcap: -1: must be finite and >= 0 (0 = off); nearest legal: 0", q, k, v, o=o, softcap=-1.0,
            seqused_k=lengths)  # fmt: skip
    refused(ValueError, "threads: 2: are the CPU's, and the tensors are on cuda:1; nearest legal: 0", q, k, v, o=o,
            threads=2)  # fmt: skip
    refused(ValueError, "seed: shape (2,): must be (1) = (1,); nearest legal: (1,)", q, k, v, o=o, dropout=0.5,
            seed=OnGpu(np.zeros(2, np.int64), 1))  # fmt: skip
    refused(TypeError, "q: fp64: fp64 is for the CPU; nearest legal: fp32", *(OnGpu(x) for x in inputs(dtype=float)),
            o=OnGpu(np.empty((2, 9, 4, 16))))  # fmt: skip


def test_memory_is_exported_for_the_stream_of_the_call():
    q, k, v = (OnGpu(x) for x in inputs(dtype=np.float16))
    o = OnGpu(np.empty_like(q.array))

    class Torch:
        cuda_stream = 77

    class Cupy:
        ptr = 78

    class Any:
        def __cuda_stream__(self):
            return 0, 79

    for stream, number in ((None, 1), (0, 1), (5, 5), (np.int64(6), 6), (Torch(), 77), (Cupy(), 78), (Any(), 79)):
        OnGpu.streams.clear()
        with pytest.raises(ValueError, match="^softcap: "):
            narrows.attention(q, k, v, o=o, softcap=-1.0, stream=stream)
        assert OnGpu.streams == [number] * 4


def test_streams_that_are_none():
    q, k, v = inputs()
    refused(ValueError, "stream: given: a call on the CPU has none; nearest legal: null", q, k, v, stream=7)
    text = "must be a stream of torch or CuPy, __cuda_stream__, or a CUstream as an int"
    refused(TypeError, f"stream: True: {text}", q, k, v, stream=True)
    refused(TypeError, f"stream: 'x': {text}", q, k, v, stream="x")
    text = "must be the address of a CUstream, or 0 for the legacy default stream"
    refused(ValueError, f"stream: -1: {text}", q, k, v, stream=-1)


def test_what_is_asked_of_torch(monkeypatch):
    asked = []

    class Stream:
        def __init__(self, handle, device=None):
            self.cuda_stream = handle

    class OfTorch(OnGpu):
        __module__ = "torch"

        def record_stream(self, stream):
            asked.append(("record", stream.cuda_stream))

    @contextlib.contextmanager
    def during(*what):
        asked.append(what)
        yield

    def empty(shape, dtype, device):
        asked.append(("empty", dtype, device))
        return OfTorch(np.empty(shape, dtype), int(device.removeprefix("cuda:")))

    cuda = types.SimpleNamespace(
        current_stream=lambda index: Stream(70 + index), default_stream=lambda index: Stream(0), ExternalStream=Stream,
        stream=lambda stream: during("stream", stream.cuda_stream), device=lambda index: during("device", index),
    )  # fmt: skip
    fake = types.SimpleNamespace(__name__="torch", cuda=cuda, empty=empty, float16=np.float16, float32=np.float32)
    monkeypatch.setitem(sys.modules, "torch", fake)
    q, k, v = (OfTorch(x, 1) for x in inputs(dtype=np.float16))
    half, single = ("empty", np.float16, "cuda:1"), ("empty", np.float32, "cuda:1")
    for stream, number, around in ((None, 71, []), (9, 9, [("stream", 9)])):
        asked.clear()
        OnGpu.streams.clear()
        with pytest.raises(ValueError, match="^softcap: "):
            narrows.attention(q, k, v, softcap=-1.0, return_lse=True, stream=stream)
        device = ("device", 1)  # of whatever is exported
        results = [*around, half, device, *around, single, device]
        assert asked == [("record", 9)] * (3 if stream else 0) + [device] * 3 + results
        assert OnGpu.streams == [number] * 5


def test_without_libcuda_a_call_says_so():
    q, k, v = (OnGpu(x) for x in inputs(dtype=np.float16))
    try:
        narrows.prepare(q, k, v)
    except NotImplementedError as error:
        assert str(error).startswith("cuda: ")
    else:
        pytest.skip("this machine has CUDA")
    o = OnGpu(np.empty_like(q.array))
    for call in (narrows.explain, narrows.workspace_size, lambda *x: narrows.attention(*x, o=o)):
        with pytest.raises(NotImplementedError, match="^cuda: "):
            call(q, k, v)
    text = "o: q's library has no from_dlpack to take it; pass memory of your own as o="
    refused(TypeError, text, q, k, v)
    gc.collect()
    assert Tensor.live == 0


# ----------------------------------------------------------------------------------------------------------- on a GPU


def tensors(dtype, *, b=2, sq=130, sk=200, h=4, hk=2, d=64, device="cuda:0"):
    generator = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)  # noqa: E731
    return make(b, sq, h, d), make(b, sk, hk, d), make(b, sk, hk, d)


def exact(q, k, v, causal=False):
    """(O, LSE) in fp64 on the CPU."""
    q, k, v = (x.double().cpu().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        rows, keys = s.shape[-2:]
        s = s.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2), s.logsumexp(-1)


def near(o, lse, q, k, v, **options):
    want_o, want_lse = exact(q, k, v, **options)
    unit = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[q.dtype]
    assert (o.double().cpu() - want_o).abs().max() < unit * want_o.abs().max()
    assert (lse.double().cpu() - want_lse).abs().max() < 1e-3


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values(dtype, causal):
    q, k, v = tensors(getattr(torch, dtype))
    o, lse = narrows.attention(q, k, v, causal=causal, return_lse=True)
    assert o.device == q.device and o.dtype == q.dtype and o.shape == q.shape
    assert lse.dtype == torch.float32 and lse.device == q.device
    near(o, lse, q, k, v, causal=causal)


@gpu
def test_strides_and_own_memory():
    q, k, v = tensors(torch.float16)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    memory = torch.full((2, 130, 4, 80), float("nan"), dtype=q.dtype, device=q.device)
    o, lse = memory[..., :64], torch.full((2, 4, 130), float("nan"), device=q.device)
    assert narrows.attention(q, k, v, o=o, lse=lse) is o
    near(o, lse, q, k, v)
    assert memory[..., 64:].isnan().all()


@gpu
def test_varlen_with_lengths_on_the_device():
    q, k, v = (x[0] for x in tensors(torch.float16, b=1, sq=300, sk=300))
    bounds = torch.tensor([0, 100, 100, 290], dtype=torch.int32, device=q.device)
    o, lse = narrows.attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True, return_lse=True)
    for begin, end in ((0, 100), (100, 290)):
        rows = slice(begin, end)
        near(o[rows][None], lse[:, rows][None], q[rows][None], k[rows][None], v[rows][None], causal=True)
    assert (o[290:] == 0).all() and lse[:, 290:].isneginf().all()


@gpu
def test_bounds_of_rows_on_the_device():
    q, k, v = tensors(torch.float16, sq=300, sk=300)
    end = torch.arange(1, 301, dtype=torch.int32, device=q.device).expand(2, 300)
    o, lse = narrows.attention(q, k, v, key_end=end, return_lse=True)
    near(o, lse, q, k, v, causal=True)
    o, lse = narrows.attention(q, k, v, key_begin=torch.full_like(end, 40), key_end=torch.full_like(end, 170), return_lse=True)
    near(o, lse, q, k[:, 40:170], v[:, 40:170])


@gpu
def test_seed_and_offset_on_the_device_draw_the_masks_of_the_cpu():
    q, k, v = tensors(torch.float32, sq=60, sk=70)
    seed, offset = (torch.tensor([x], dtype=torch.int64, device=q.device) for x in (11, 5))
    o = narrows.attention(q, k, v, dropout=0.3, seed=seed, offset=offset)
    want = narrows.attention(*(x.cpu() for x in (q, k, v)), dropout=0.3, seed=11, offset=5)
    assert (o.cpu() - want).abs().max() < 1e-4


@gpu
def test_the_current_stream_is_waited_for_and_waits():
    q, k, v = tensors(torch.float16, sq=512, sk=512)
    narrows.prepare(q, k, v)
    want = narrows.attention(q, k, v)
    torch.cuda.synchronize()
    late = torch.full_like(q, float("nan"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)  # behind the sleep on this stream alone
        o = narrows.attention(late, k, v)
        assert not stream.query()  # nothing waited for it
        copy = o.clone()
    stream.synchronize()
    assert torch.equal(copy, want)


@gpu
@pytest.mark.parametrize("as_number", [False, True])
def test_a_stream_given_by_name(as_number):
    q, k, v = tensors(torch.float16)
    want = narrows.attention(q, k, v)
    stream = torch.cuda.Stream()
    o = narrows.attention(q, k, v, stream=stream.cuda_stream if as_number else stream)
    stream.synchronize()
    assert torch.equal(o, want)


@two_gpus
def test_device_1_while_device_0_is_current():
    q, k, v = tensors(torch.float16, device="cuda:1")
    with torch.cuda.device(0):
        o, lse = narrows.attention(q, k, v, return_lse=True)
        assert torch.cuda.current_device() == 0 and o.device == q.device
    near(o, lse, q, k, v)
    with pytest.raises(TypeError, match="^k: cuda:0: must be on cuda:1 with the others$"):
        narrows.attention(q, k.to("cuda:0"), v)


@gpu
def test_a_broken_length_is_told_by_status_and_by_check():
    q, k, v = tensors(torch.float16)
    used = torch.tensor([7, 201], dtype=torch.int32, device=q.device)
    status = torch.full((4,), -1, dtype=torch.int32, device=q.device)
    o, lse = narrows.attention(q, k, v, seqused_k=used, status=status, return_lse=True)
    assert status.tolist() == [8, 1, 201, 200]
    assert o[1].isnan().all() and lse[1].isnan().all()
    near(o[:1], lse[:1], q[:1], k[:1, :7], v[:1, :7])
    text = "seqused_k[1]: 201: must be in [0, 200], the length of sequence 1; nearest legal: 200 (forward fp16 cuda:0 "
    with pytest.raises(ValueError) as error:
        narrows.attention(q, k, v, seqused_k=used, check=True)
    assert str(error.value).startswith(text)
    used[1] = 200
    narrows.attention(q, k, v, seqused_k=used, status=status, check=True)
    assert status.tolist() == [0, 0, 0, 0]


@gpu
def test_check_by_the_environment():
    program = (
        "import torch, narrows\n"
        "q = torch.zeros(1, 4, 1, 16, dtype=torch.float16, device='cuda')\n"
        "narrows.attention(q, q, q, seqused_k=torch.tensor([5], dtype=torch.int32, device='cuda'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "NARROWS_CHECK": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "seqused_k[0]: 5: must be in [0, 4]" in done.stderr


@gpu
def test_a_captured_call_replays_with_other_lengths():
    q, k, v = tensors(torch.float16)
    used = torch.full((2,), 200, dtype=torch.int32, device=q.device)
    narrows.prepare(q, k, v, seqused_k=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = narrows.attention(q, k, v, seqused_k=used, return_lse=True)
        with pytest.raises(ValueError, match="^check: true: waits for the call"):
            narrows.attention(q, k, v, seqused_k=used, check=True)
    for length in (200, 33):
        used.fill_(length)
        graph.replay()
        near(o, lse, q, k[:, :length], v[:, :length])


@gpu
def test_nothing_is_kept_and_nothing_grows():
    q, k, v = tensors(torch.float16, sq=1024, sk=1024)
    narrows.attention(q, k, v, return_lse=True)
    before, counts = torch.cuda.memory_allocated(), [sys.getrefcount(x) for x in (q, k, v)]
    for _ in range(200):
        narrows.attention(q, k, v, return_lse=True)
    assert torch.cuda.memory_allocated() == before
    assert [sys.getrefcount(x) for x in (q, k, v)] == counts


@gpu
def test_inputs_may_go_as_soon_as_the_call_returns():
    k, v = tensors(torch.float16, sq=1024, sk=1024)[1:]
    queries = [torch.full((2, 1024, 4, 64), float(i), dtype=torch.float16, device="cuda") for i in range(4)]
    wants = [narrows.attention(q, k, v) for q in queries]
    torch.cuda.synchronize()
    results = []
    for i in range(4):
        q = torch.full((2, 1024, 4, 64), float(i), dtype=torch.float16, device="cuda")
        results.append(narrows.attention(q, k, v))
        del q
        torch.full((2, 1024, 4, 64), float("nan"), dtype=torch.float16, device="cuda")  # may get q's memory
    assert all(torch.equal(a, b) for a, b in zip(results, wants))


@gpu
def test_cupy():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    q, k, v = tensors(torch.float16)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o = narrows.attention(*arrays, causal=True)
        assert isinstance(o, cupy.ndarray) and o.dtype == np.float16
        stream.synchronize()
    near(torch.from_dlpack(o), narrows.attention(q, k, v, causal=True, return_lse=True)[1], q, k, v, causal=True)


@gpu
def test_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU")
    q, k, v = tensors(torch.bfloat16)
    o = narrows.attention(*(jax.dlpack.from_dlpack(x) for x in (q, k, v)), causal=True)
    assert isinstance(o, jax.Array) and o.dtype == jax.numpy.bfloat16
    assert torch.equal(torch.from_dlpack(o), narrows.attention(q, k, v, causal=True))
