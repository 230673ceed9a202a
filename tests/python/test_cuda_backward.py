"""attention_backward of CUDA arrays. Without a GPU: what is refused and asked of torch. With one and torch: values."""

import contextlib
import gc
import sys
import types

import numpy as np
import pytest
from gradients import OF, formula
from reference import UNIT, double, inputs
from test_arrays import Tensor
from test_cuda import OnGpu, gpu, tensors, torch, two_gpus

import narrows
from narrows import _calls, _gpu

# ------------------------------------------------------------------------------------------------------- without a GPU


def arguments(kind=OnGpu, index=0):
    """dout, q, k, v, o, lse of the right shapes; nobody may read them."""
    q, k, v = inputs(dtype=np.float16)
    arrays = (q, q, k, v, q, np.zeros((2, 4, 9), np.float32))
    return dict(zip(("dout", "q", "k", "v", "o", "lse"), (kind(x, index) for x in arrays)))


def refused(kind, text, **changes):
    memory = {name: OnGpu(arguments()[of].array) for name, of in list(OF.items())[:3]}
    with pytest.raises(Exception) as error:
        narrows.attention_backward(**{**arguments(), **memory, **changes})
    assert (error.type, str(error.value)) == (kind, text)


def test_everything_is_on_qs_device():
    rule = "cpu: must be on cuda:0 with the others"
    for name in ("dout", "o", "lse"):
        refused(TypeError, f"{name}: {rule}", **{name: arguments()[name].array})
    refused(TypeError, f"dlse: {rule}", dlse=np.zeros((2, 4, 9), np.float32))
    refused(TypeError, f"dq: {rule}", dq=arguments()["q"].array)
    refused(TypeError, f"sinks: {rule}", sinks=[0.0] * 4, wanted=["dq", "dk", "dv"])
    refused(TypeError, "lse: cuda:1: must be on cuda:0 with the others", lse=arguments(index=1)["lse"])
    gc.collect()
    assert Tensor.live == 0


def test_the_rest_of_the_contract_holds_without_reading():
    refused(ValueError, "softcap: -1: must be finite and >= 0 (0 = off); nearest legal: 0", softcap=-1.0)
    refused(
        TypeError, "dout: fp32: must be q's dtype; nearest legal: fp16", dout=OnGpu(np.zeros((2, 9, 4, 16), np.float32))
    )
    refused(ValueError, "lse: shape (2, 9, 4): must be (b, h, sq) = (2, 4, 9); nearest legal: (2, 4, 9)",
            lse=OnGpu(np.zeros((2, 9, 4), np.float32)))  # fmt: skip
    text = "dq: q's library has no from_dlpack to take it; pass memory of your own as dq="
    refused(TypeError, text, dq=None)


def test_memory_is_exported_for_the_stream_of_the_call():
    OnGpu.streams.clear()
    memory = {name: OnGpu(arguments()[of].array) for name, of in list(OF.items())[:3]}
    with pytest.raises(ValueError, match="^softcap: "):
        narrows.attention_backward(**arguments(), **memory, softcap=-1.0, stream=5)
    assert OnGpu.streams == [5] * 9


class OfTorch(OnGpu):
    __module__ = "torch"


@pytest.fixture
def asked(monkeypatch):
    """A torch whose current stream of device 1 is 71, and what was asked of its empty()."""
    asked = []

    def empty(shape, dtype, device):
        asked.append((shape, dtype, device))
        return OfTorch(np.empty(shape, dtype), int(device.removeprefix("cuda:")))

    cuda = types.SimpleNamespace(
        current_stream=lambda index: types.SimpleNamespace(cuda_stream=70 + index),
        device=lambda index: contextlib.nullcontext(),
    )
    dtypes = {name: getattr(np, name) for name in ("float16", "float32", "float64", "uint8")}
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__name__="torch", cuda=cuda, empty=empty, **dtypes))
    OnGpu.streams.clear()
    return asked


def test_results_are_torchs(asked):
    slopes, sinks = OfTorch(np.zeros(4), 1), OfTorch(np.zeros(4, np.float32), 1)
    with pytest.raises(ValueError, match="^softcap: "):
        narrows.attention_backward(**arguments(OfTorch, 1), alibi_slopes=slopes, sinks=sinks, softcap=-1.0)
    shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
    assert asked[:3] == [(shape, np.float16, "cuda:1") for shape in shapes]
    assert asked[3:] == [((4,), np.float64, "cuda:1"), ((4,), np.float32, "cuda:1")]
    assert set(OnGpu.streams) == {71}


def test_scratch_is_torchs_where_none_is_given(asked):
    lent = []
    call = types.SimpleNamespace(set_operand=lent.append)
    torchs, others = (_gpu.of(None, kind(np.zeros(1), 1)) for kind in (OfTorch, OnGpu))
    for gpu_of_call, given, size in ((others, None, 96), (None, None, 96), (torchs, object(), 96), (torchs, None, 0)):
        _calls.lend_workspace(call, gpu_of_call, given, lambda size=size: size)
    assert asked == [] and lent == []
    _calls.lend_workspace(call, torchs, None, lambda: 96)
    assert asked == [((96,), np.uint8, "cuda:1")]
    assert [(x.name, x.dtype, tuple(x.shape)) for x in lent] == [("workspace", "uint8", (96,))]
    assert OnGpu.streams == [71]


def test_without_libcuda_a_call_says_so():
    memory = {name: OnGpu(arguments()[of].array) for name, of in list(OF.items())[:3]}
    try:
        narrows.backward_workspace_size(*(arguments()[name] for name in "qkv"))
    except NotImplementedError as error:
        if not str(error).startswith("cuda: "):
            raise
    else:
        pytest.skip("this machine has CUDA")
    with pytest.raises(NotImplementedError, match="^cuda: "):
        narrows.attention_backward(**arguments(), **memory)
    gc.collect()
    assert Tensor.live == 0


# ------------------------------------------------------------------------------------------------------------ on a GPU


RANDOM = np.random.default_rng(5)
SLOPES = np.abs(RANDOM.standard_normal(4))
RULES = {
    "none": {},
    "causal": {"causal": True},
    "top_left, softcap": {"causal": "top_left", "softcap": 1.5, "scale": 0.4},
    "window": {"window": (30, 20)},
    "chunk": {"chunk": 33, "scale": -0.1},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi of each sequence": {"alibi_slopes": np.stack([SLOPES, 2 * SLOPES])},
    "bias": {"bias": RANDOM.standard_normal((2, 4, 130, 200))},
    "bias of each key": {"bias": RANDOM.standard_normal(200)},
    "bias of each query": {"bias": RANDOM.standard_normal((1, 4, 130, 1)), "causal": True},
    "sinks": {"sinks": RANDOM.standard_normal(4), "causal": True},
    "mask with an empty row": {"mask": (RANDOM.random((2, 1, 130, 200)) > 0.3) & (np.arange(130) != 77)[:, None]},
    "dropout": {"dropout": 0.3, "seed": 5, "offset": 6},
    "everything": {
        "causal": True, "window": (90, 0), "softcap": 2.0, "alibi_slopes": SLOPES, "sinks": RANDOM.standard_normal(4),
        "bias": RANDOM.standard_normal((1, 4, 1, 200)), "mask": RANDOM.random((130, 200)) > 0.2, "dropout": 0.25,
        "seed": 1 << 63, "offset": 9,
    },
}  # fmt: skip


def on_gpu(options):
    return {name: torch.from_numpy(x).to("cuda:0", torch.bool if x.dtype == bool else torch.float32)
            if isinstance(x, np.ndarray) else x for name, x in options.items()}  # fmt: skip


def results_of(q, k, v, **options):
    """dout, o, lse, dlse of a call; the gradients of the results are Gaussian."""
    o, lse = narrows.attention(q, k, v, return_lse=True, **options)
    generator = torch.Generator().manual_seed(4)
    make = lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)  # noqa: E731
    return make(o), o, lse, make(lse)


def numbers(x):
    return x.double().cpu().numpy() if isinstance(x, torch.Tensor) and x.dtype != torch.bool else x


def near(got, dout, q, k, v, dlse, **options):
    """Compares with the closed formula in fp64; the criterion proper is the C++ tests'."""
    options = {name: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    want = formula(*(numbers(x) for x in (dout, q, k, v, dlse)), **options)
    limit = 16 * UNIT[str(q.dtype).removeprefix("torch.")]
    assert {name for name in OF if getattr(got, name) is not None} == set(want)
    arrays = {"q": q, "k": k, "v": v, **options}
    for name, x in want.items():
        gradient = getattr(got, name)
        assert gradient.shape == arrays[OF[name]].shape and gradient.device == q.device
        off = np.abs(double(numbers(gradient)) - x).max()
        assert off <= limit * max(1, np.abs(x).max()), f"{name} is off by {off}"


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rule", RULES)
def test_values(rule, dtype):
    q, k, v = tensors(getattr(torch, dtype))
    options = on_gpu(RULES[rule])
    dout, o, lse, dlse = results_of(q, k, v, **options)
    got = narrows.attention_backward(dout, q, k, v, o, lse, dlse, **options)
    near(got, dout, q, k, v, dlse, **options)
    for name, of in OF.items():
        array = {"q": q, "k": k, "v": v, **options}.get(of)
        assert getattr(got, name) is None if array is None else getattr(got, name).dtype == array.dtype


@gpu
@pytest.mark.parametrize("d", [8, 100, 128, 256])
def test_head_dims(d):
    q, k, v = tensors(torch.bfloat16, d=d)
    dout, o, lse, dlse = results_of(q, k, v, causal=True)
    near(narrows.attention_backward(dout, q, k, v, o, lse, dlse, causal=True), dout, q, k, v, dlse, causal=True)


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_slopes_and_sinks_have_their_own_dtype(dtype):
    q, k, v = tensors(torch.float16)
    slopes, sinks = (torch.linspace(0.1, 1, 4, device=q.device).to(getattr(torch, dtype)) for _ in range(2))
    dout, o, lse, dlse = results_of(q, k, v, alibi_slopes=slopes, sinks=sinks)
    got = narrows.attention_backward(dout, q, k, v, o, lse, dlse, alibi_slopes=slopes, sinks=sinks)
    assert got.dslopes.dtype == slopes.dtype and got.dsinks.dtype == sinks.dtype
    near(got, dout, q, k, v, dlse, alibi_slopes=slopes.double(), sinks=sinks.double())


@gpu
def test_strides_and_own_memory():
    q, k, v = tensors(torch.float16)
    dout, o, lse, dlse = results_of(q, k, v)
    want = narrows.attention_backward(dout, q, k, v, o, lse, dlse, deterministic=True)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    dout = dout.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    memory = torch.full((2, 130, 4, 80), float("nan"), dtype=q.dtype, device=q.device)
    got = narrows.attention_backward(
        dout, q, k, v, o, lse, dlse, dq=memory[..., :64], wanted=["dq", "dv"], deterministic=True
    )
    assert got.dq.data_ptr() == memory.data_ptr() and got.dk is None
    assert (got.dq - want.dq).abs().max() <= 2e-3 and (got.dv - want.dv).abs().max() <= 2e-3
    assert memory[..., 64:].isnan().all()


@gpu
def test_an_expanded_gradient_of_o():
    q, k, v = tensors(torch.bfloat16)
    o, lse = narrows.attention(q, k, v, return_lse=True)
    one = torch.ones((), dtype=q.dtype, device=q.device).expand(o.shape)
    near(narrows.attention_backward(one, q, k, v, o, lse), one, q, k, v, torch.zeros_like(lse))


@gpu
def test_varlen_with_lengths_on_the_device():
    q, k, v = (x[0] for x in tensors(torch.float16, b=1, sq=300, sk=300))
    bounds = torch.tensor([0, 100, 100, 290], dtype=torch.int32, device=q.device)
    options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "causal": True}
    dout, o, lse, dlse = results_of(q, k, v, **options)
    for x in (dout, q, k, v):
        x[290:] = float("nan")  # in no sequence
    dlse[:, 290:] = float("nan")
    got = narrows.attention_backward(dout, q, k, v, o, lse, dlse, **options)
    for begin, end in ((0, 100), (100, 290)):
        rows = slice(begin, end)
        part = narrows.Gradients(*(x[rows][None] for x in got[:3]))
        near(part, *(x[rows][None] for x in (dout, q, k, v)), dlse[:, rows][None], causal=True)
    assert all((x[290:] == 0).all() for x in got[:3])


@gpu
def test_deterministic_gradients_have_the_same_bits_each_time():
    q, k, v = tensors(torch.bfloat16, sq=700, sk=900)
    dout, o, lse, dlse = results_of(q, k, v)
    first, *others = (narrows.attention_backward(dout, q, k, v, o, lse, dlse, deterministic=True) for _ in range(5))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first[:3], other[:3]))


@gpu
def test_the_current_stream_is_waited_for_and_waits():
    q, k, v = tensors(torch.float16, sq=512, sk=512)
    dout, o, lse, _ = results_of(q, k, v)
    want = narrows.attention_backward(dout, q, k, v, o, lse, deterministic=True)
    torch.cuda.synchronize()
    late = torch.full_like(dout, float("nan"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(dout)  # behind the sleep on this stream alone
        got = narrows.attention_backward(late, q, k, v, o, lse, deterministic=True)
        assert not stream.query()  # nothing waited for it
        copies = [x.clone() for x in got[:3]]
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(copies, want))


@two_gpus
def test_device_1_while_device_0_is_current():
    q, k, v = tensors(torch.float16, device="cuda:1")
    dout, o, lse, dlse = results_of(q, k, v)
    with torch.cuda.device(0):
        got = narrows.attention_backward(dout, q, k, v, o, lse, dlse)
        assert torch.cuda.current_device() == 0
    near(got, dout, q, k, v, dlse)


@gpu
def test_a_broken_length_is_told_by_status_and_by_check():
    q, k, v = tensors(torch.float16)
    dout, o, lse, _ = results_of(q, k, v)
    used = torch.tensor([7, 201], dtype=torch.int32, device=q.device)
    status = torch.full((4,), -1, dtype=torch.int32, device=q.device)
    narrows.attention_backward(dout, q, k, v, o, lse, seqused_k=used, status=status)
    assert status.tolist() == [8, 1, 201, 200]
    with pytest.raises(ValueError, match=r"^seqused_k\[1\]: 201: must be in \[0, 200\], the length of sequence 1; "):
        narrows.attention_backward(dout, q, k, v, o, lse, seqused_k=used, check=True)
    used[1] = 200
    narrows.attention_backward(dout, q, k, v, o, lse, seqused_k=used, status=status, check=True)
    assert status.tolist() == [0, 0, 0, 0]


@gpu
def test_a_captured_call_replays_with_other_lengths():
    q, k, v = tensors(torch.float16)
    used = torch.full((2,), 200, dtype=torch.int32, device=q.device)
    dout, o, lse, dlse = results_of(q, k, v, seqused_k=used)
    narrows.attention_backward(dout, q, k, v, o, lse, dlse, seqused_k=used)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = narrows.attention_backward(dout, q, k, v, o, lse, dlse, seqused_k=used)
    for length in (200, 33):
        used.fill_(length)
        narrows.attention(q, k, v, seqused_k=used, o=o, lse=lse)
        graph.replay()
        part = narrows.Gradients(got.dq, got.dk[:, :length], got.dv[:, :length])
        near(part, dout, q, k[:, :length], v[:, :length], dlse)
        assert (got.dk[:, length:] == 0).all() and (got.dv[:, length:] == 0).all()


@gpu
def test_scratch_is_torchs_or_the_callers_and_nothing_grows():
    q, k, v = tensors(torch.float16, sq=1024, sk=1024)
    dout, o, lse, _ = results_of(q, k, v)
    want = narrows.attention_backward(dout, q, k, v, o, lse, deterministic=True)
    size = narrows.backward_workspace_size(q, k, v, deterministic=True)
    before, counts = torch.cuda.memory_allocated(), [sys.getrefcount(x) for x in (dout, q, k, v, o, lse)]
    torch.cuda.reset_peak_memory_stats()
    narrows.attention_backward(dout, q, k, v, o, lse, deterministic=True)
    gradients = sum(x.numel() * x.element_size() for x in (q, k, v))
    assert torch.cuda.max_memory_allocated() - before >= size + gradients
    for _ in range(100):
        narrows.attention_backward(dout, q, k, v, o, lse, deterministic=True)
    assert torch.cuda.memory_allocated() <= before  # it ended 32 KB lower on an H200; from what is not known
    assert [sys.getrefcount(x) for x in (dout, q, k, v, o, lse)] == counts
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=q.device)
    got = narrows.attention_backward(dout, q, k, v, o, lse, workspace=workspace, deterministic=True)
    assert all(torch.equal(x, y) for x, y in zip(got[:3], want))


@gpu
def test_cupy():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    q, k, v = tensors(torch.float16)
    dout, o, lse, dlse = results_of(q, k, v)
    arrays = [cupy.from_dlpack(x) for x in (dout, q, k, v, o, lse, dlse)]
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = narrows.attention_backward(*arrays)
        assert all(isinstance(x, cupy.ndarray) and x.dtype == np.float16 for x in got[:3])
        stream.synchronize()
    near(narrows.Gradients(*(torch.from_dlpack(x) for x in got[:3])), dout, q, k, v, dlse)


@gpu
def test_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU")
    q, k, v = tensors(torch.bfloat16)
    saved = results_of(q, k, v)
    dout, *arrays = (jax.dlpack.from_dlpack(x) for x in (saved[0], q, k, v, *saved[1:]))
    got = narrows.attention_backward(dout, *arrays)
    assert all(isinstance(x, jax.Array) and x.dtype == jax.numpy.bfloat16 for x in got[:3])
    near(narrows.Gradients(*(torch.from_dlpack(x) for x in got[:3])), saved[0], q, k, v, saved[3])
