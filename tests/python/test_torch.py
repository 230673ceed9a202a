"""narrows.torch.attention: what torch.autograd makes of it, on the CPU and, with one, on a GPU."""

import doctest
import inspect
import subprocess
import sys

import numpy as np
import pytest
from gradients import formula
from reference import UNIT, double
from reference import attention as reference

import narrows

torch = pytest.importorskip("torch", reason="torch is not installed")

import narrows.torch  # noqa: E402

GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available")
)
DEVICES = ["cpu", GPU]


def tensors(dtype=torch.float64, device="cpu", b=2, sq=5, sk=7, h=4, hk=2, d=3, dv=2, grad=True):
    generator = torch.Generator().manual_seed(1)
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).requires_grad_(grad) for x in made]


def normal(*shape, dtype=torch.float64, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device, dtype)


LEARNT = ("bias", "alibi_slopes", "sinks")
RULES = {
    "none": {},
    "causal, softcap": {"causal": True, "softcap": 1.5, "scale": 1.2},
    "top_left, chunk": {"causal": "top_left", "chunk": 2},
    "window, list of shifts": {"window": (2, 1), "shift": [1, -1]},
    "bias": {"bias": normal(2, 4, 5, 7)},
    "bias of each key": {"bias": normal(7), "softcap": 2.0},
    "bias of each head and query": {"bias": normal(1, 4, 5, 1), "causal": True},
    "alibi": {"alibi_slopes": normal(4), "causal": True},
    "alibi of each sequence": {"alibi_slopes": normal(2, 4)},
    "sinks": {"sinks": normal(4), "window": (1, 0)},
    "mask": {"mask": normal(2, 1, 5, 7) > -1},
    "dropout": {"dropout": 0.4, "seed": 5, "offset": 6},
    "used lengths": {"seqused_q": torch.tensor([5, 3], dtype=torch.int32), "seqused_k": [6, 7], "sinks": normal(4)},
    "everything": {
        "causal": True, "window": (4, 0), "softcap": 2.0, "alibi_slopes": normal(4), "bias": normal(4, 1, 7),
        "sinks": normal(4), "mask": normal(5, 7) > -1.5, "dropout": 0.25, "seed": 1 << 63, "offset": 9,
    },
}  # fmt: skip


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule, return_lse):
    options = RULES[rule]
    learnt = [name for name in LEARNT if name in options]
    inputs = [*tensors(), *(options[name].clone().requires_grad_() for name in learnt)]
    seqused = options.get("seqused_q")

    def call(q, k, v, *values):
        result = narrows.torch.attention(q, k, v, return_lse=return_lse, **{**options, **dict(zip(learnt, values))})
        if not return_lse or seqused is None:
            return result
        return result[0], result[1].masked_fill(result[1].isneginf(), 0)  # no difference of infinities

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("options", [{"causal": True}, {"sinks": normal(4), "dropout": 0.3, "seed": 3}], ids=", ".join)
def test_gradcheck_of_packed_sequences(options):
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in tensors())
    bounds = {"cu_seqlens_q": torch.tensor([0, 4, 4, 10], dtype=torch.int32), "cu_seqlens_k": [0, 5, 6, 13]}
    assert torch.autograd.gradcheck(lambda *x: narrows.torch.attention(*x, **bounds, **options), (q, k, v))


def test_rows_that_see_nothing():
    q, k, v = tensors()
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    o, lse = narrows.torch.attention(q, k, v, mask=mask, return_lse=True)
    assert (o[:, 2] == 0).all() and lse[:, :, 2].isneginf().all()
    (o.sum() + lse.exp().sum()).backward()
    assert (q.grad[:, 2] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_every_dtype_against_the_formula(name, device):
    dtype = getattr(torch, name)
    q, k, v = tensors(dtype, device, sq=33, sk=45, d=24, dv=40)
    learnt = {
        "bias": normal(4, 33, 45, device=device, dtype=dtype),
        "sinks": normal(4, device=device, dtype=torch.float32),
        "alibi_slopes": normal(4, device=device).abs().to(torch.float32),
    }
    for x in learnt.values():
        x.requires_grad_()
    o, lse = narrows.torch.attention(q, k, v, causal=True, return_lse=True, **learnt)
    assert o.dtype == dtype and lse.dtype == torch.float32 and o.device == lse.device == q.device
    dout, dlse = normal(*o.shape, dtype=dtype, device=device), normal(*lse.shape, dtype=torch.float32, device=device)
    torch.autograd.backward([o, lse], [dout, dlse])
    numbers = [x.detach().double().cpu().numpy() for x in (q, k, v, *learnt.values(), dout, dlse)]
    options = {"causal": True, **dict(zip(learnt, numbers[3:]))}
    want = formula(numbers[-2], *numbers[:3], numbers[-1], **options)
    want_o, want_lse = reference(*numbers[:3], **options)
    limit = 16 * UNIT[name]
    for got, x in ((o, want_o), (lse, want_lse)):
        assert np.abs(double(got.detach().double().cpu()) - x).max() <= limit * np.abs(x).max()
    for x, gradient in zip((q, k, v, *learnt.values()), ("dq", "dk", "dv", "dbias", "dsinks", "dslopes")):
        assert x.grad.dtype == x.dtype and x.grad.device == x.device and x.grad.shape == x.shape
        off = np.abs(x.grad.double().cpu().numpy() - want[gradient]).max()
        assert off <= limit * max(1, np.abs(want[gradient]).max()), f"{gradient} is off by {off}"


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_inputs_and_of_the_gradient_of_o(device):
    q, k, v = tensors(torch.float32, device, h=2)
    want = torch.autograd.grad(narrows.torch.attention(q, k, v).sum(), (q, k, v))
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    o = narrows.torch.attention(*(x.transpose(1, 2) for x in heads_first))
    ones = torch.ones(5, 2, 2, 2, device=device).permute(2, 0, 3, 1)  # b, sq, h, dv
    for x, y in zip(torch.autograd.grad(o, heads_first, ones), want):
        assert torch.equal(x.transpose(1, 2), y)
    wide = [x.detach()[:1].requires_grad_() for x in (q, k, v)]
    together = narrows.torch.attention(*(x.expand(3, *x.shape[1:]) for x in wide))
    alone = narrows.torch.attention(*wide)
    for x, y in zip(torch.autograd.grad(together.sum(), wide), torch.autograd.grad(alone.sum(), wide)):
        assert (x - 3 * y).abs().max() < 1e-5


def test_a_loss_of_lse_alone_and_a_loss_of_neither():
    q, k, v = tensors()
    o, lse = narrows.torch.attention(q, k, v, return_lse=True)
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 3**0.5
    got = torch.autograd.grad((lse**2).sum(), (q, k), retain_graph=True)
    for x, y in zip(got, torch.autograd.grad((s.logsumexp(-1) ** 2).sum(), (q, k))):
        assert (x - y).abs().max() < 1e-12
    assert torch.autograd.grad(lse.sum(), v)[0].eq(0).all()
    nothing = torch.autograd.grad([torch.zeros(1, requires_grad=True).sum()], [q], allow_unused=True)
    assert nothing == (None,)


def test_only_the_gradients_that_are_needed(monkeypatch):
    asked = []
    whole = narrows.attention_backward

    def note(*arrays, wanted, **options):
        asked.append(list(wanted))
        return whole(*arrays, wanted=wanted, **options)

    monkeypatch.setattr(narrows._backward, "attention_backward", note)
    q, k, v = tensors(grad=False)
    bias, sinks = normal(4, 5, 7).requires_grad_(), normal(4)
    for needing, names in (((k,), ["dk"]), ((q, v), ["dq", "dv"]), ((bias,), ["dbias"])):
        for x in needing:
            x.requires_grad_()
        o = narrows.torch.attention(q, k, v, bias=bias if needing[0] is bias else bias.detach(), sinks=sinks)
        o.sum().backward()
        assert asked.pop() == names and not asked and all(x.grad is not None for x in needing)
        for x in needing:
            x.requires_grad_(False)
    assert q.grad is not None and sinks.grad is None


def test_without_a_gradient_to_come_nothing_is_kept(monkeypatch):
    asked = []
    whole = narrows.attention
    monkeypatch.setattr(narrows._api, "attention", lambda **all: asked.append(all["return_lse"]) or whole(**all))
    q, k, v = tensors()
    want = narrows.torch.attention(q, k, v)
    with torch.no_grad():
        o = narrows.torch.attention(q, k, v)
    assert asked == [True, False] and o.grad_fn is None and torch.equal(o, want)
    o, lse = narrows.torch.attention(*(x.detach() for x in (q, k, v)), return_lse=True)
    assert o.grad_fn is None and lse.grad_fn is None and torch.equal(o, want)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_from_torchs_generator(device):
    q, k, v = tensors(torch.float32, device, sq=40, sk=50)
    torch.manual_seed(7)
    first, second = (narrows.torch.attention(q, k, v, dropout=0.5) for _ in range(2))
    torch.manual_seed(7)
    again = [narrows.torch.attention(q, k, v, dropout=0.5) for _ in range(2)]
    assert torch.equal(first, again[0]) and torch.equal(second, again[1]) and not torch.equal(first, second)
    before = torch.random.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    named = narrows.torch.attention(q, k, v, dropout=0.5, seed=3)
    assert torch.equal(named, narrows.attention(*(x.detach() for x in (q, k, v)), dropout=0.5, seed=3))
    narrows.torch.attention(q, k, v)
    assert torch.equal(before, torch.random.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())
    # O is linear in v: the products agree only if both passes drop the same weights.
    dout = normal(*second.shape, dtype=torch.float32, device=device)
    (dv,) = torch.autograd.grad(second, v, dout)
    assert abs((dv * v).sum() - (dout * second).sum()) < 1e-3 * (dout * second).abs().sum()


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v = tensors()
    o, lse = narrows.torch.attention(q, k, v, return_lse=True)
    (dq,) = torch.autograd.grad((o**2).sum() + (lse**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_what_was_saved_must_not_change():
    q, k, v = tensors()
    bias = normal(5, 7)
    o = narrows.torch.attention(q, k, v, bias=bias)
    bias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_status_is_written_by_both_passes():
    q, k, v = tensors()
    status = torch.full((4,), 7, dtype=torch.int32)
    o = narrows.torch.attention(q, k, v, status=status)
    assert status.tolist() == [0] * 4
    status.fill_(7)
    o.sum().backward()
    assert status.tolist() == [0] * 4


def test_deterministic_algorithms_reach_both_passes(monkeypatch):
    asked = []

    def noting(function):
        return lambda *arrays, **options: asked.append(options.get("deterministic")) or function(*arrays, **options)

    monkeypatch.setattr(narrows._api, "attention", noting(narrows.attention))
    monkeypatch.setattr(narrows._backward, "attention_backward", noting(narrows.attention_backward))
    torch.use_deterministic_algorithms(True)
    try:
        narrows.torch.attention(*tensors()).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    narrows.torch.attention(*tensors()).sum().backward()
    narrows.torch.attention(*tensors(), deterministic=True).sum().backward()
    assert asked == [True, True, None, None, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    q, k, v = tensors(torch.float32, device)
    bias = normal(5, 7, dtype=torch.float32, device=device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        o = narrows.torch.attention(q, k.bfloat16(), v, bias=bias)
        other = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, q, q)))
    assert o.dtype == other.dtype == torch.bfloat16
    o.sum().backward()
    assert [x.grad.dtype for x in (q, k, v, bias)] == [torch.float32] * 4
    want = narrows.torch.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias)
    assert torch.equal(o, want)
    if device == "cpu":
        with torch.autocast(device, dtype=torch.bfloat16):
            assert narrows.torch.attention(*tensors()).dtype == torch.float64


def test_under_torch_compile():
    q, k, v = tensors()
    loss = lambda call: (call(q * 1, k, v, causal=True) ** 2).sum()  # noqa: E731
    want = torch.autograd.grad(loss(narrows.torch.attention), (q, k, v))
    compiled = torch.compile(lambda: loss(narrows.torch.attention), backend="eager")
    for x, y in zip(torch.autograd.grad(compiled(), (q, k, v)), want):
        assert torch.equal(x, y)


def test_checkpointing_drops_the_same_weights():
    q, k, v = tensors(torch.float32, sq=40, sk=50)
    call = lambda q, k, v: narrows.torch.attention(q, k, v, dropout=0.5)  # noqa: E731
    torch.manual_seed(1)
    want = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    torch.manual_seed(1)
    o = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(o.sum(), (q, k, v)), want):
        assert torch.equal(x, y)


def test_the_package_does_not_import_torch():
    subprocess.run([sys.executable, "-c", "import sys, narrows; sys.exit('torch' in sys.modules)"], check=True)


def test_doctest():
    result = doctest.testmod(narrows.torch)
    assert result.failed == 0 and result.attempted > 0


def test_arguments():
    names = set(inspect.signature(narrows.torch.attention).parameters)
    assert names == set(inspect.signature(narrows.attention).parameters) - {"o", "lse"} - set(narrows.torch._NOT_HERE)
    assert inspect.signature(narrows.torch.attention).parameters["seed"].default is None


def refused(kind, text, *, arrays=None, **options):
    with pytest.raises(Exception) as error:
        narrows.torch.attention(*(arrays or tensors()), **options)
    assert (error.type, str(error.value)) == (kind, text)


def test_exact_refusals():
    q, k, v = tensors()
    named = "narrows.torch.attention() has no argument"
    refused(TypeError, f"{named} 'attn_mask'; did you mean 'mask'?", attn_mask=None)
    refused(
        TypeError,
        f"{named} 'stream': the work goes on torch's current stream; choose it by torch.cuda.stream",
        stream=0,
    )
    cache = "a KV cache has no gradient; narrows.attention and narrows.attention_with_cache take it"
    refused(TypeError, f"{named} 'leftpad': {cache}", leftpad=[0, 0])
    refused(TypeError, "k: ndarray: must be a torch.Tensor", arrays=(q, k.detach().numpy(), v))
    refused(TypeError, "return_lse: 1: must be True or False", return_lse=1)
    refused(TypeError, "causal: 1: must be False, True (= 'bottom_right'), 'bottom_right' or 'top_left'", causal=1)
    refused(ValueError, "dropout: 1: must be in [0, 1); nearest legal: 0.9999", dropout=1.0)
    refused(ValueError, "scale: requires grad: has no gradient; nearest legal: scale.detach()",
            scale=torch.tensor(0.5, requires_grad=True))  # fmt: skip
    refused(TypeError, "k: fp32: must be q's dtype; nearest legal: fp64", arrays=(q, k.float(), v))


# ------------------------------------------------------------------------------------------------------------ on a GPU

gpu = GPU.marks[0]


@gpu
def test_memory_is_linear_and_nothing_stays():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 8192, 8, 64, dtype=torch.bfloat16, device="cuda"))
    narrows.torch.attention(q, k, v, causal=True).sum().backward()
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        narrows.torch.attention(q, k, v, causal=True).sum().backward()
        q.grad = k.grad = v.grad = None
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 8 * 8192 * 8192 * 2 / 4  # a quarter of the scores in bf16


@gpu
def test_both_passes_are_on_the_stream_of_forward():
    q, k, v = tensors(torch.float16, "cuda", sq=512, sk=512, d=64, dv=64)
    want = torch.autograd.grad(narrows.torch.attention(q, k, v).sum(), (q, k, v))
    torch.cuda.synchronize()
    late = q.detach().clone().fill_(float("nan"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q.detach())  # behind the sleep on this stream alone
        o = narrows.torch.attention(late.requires_grad_(), k, v)
        got = torch.autograd.grad(o.sum(), (late, k, v))
        assert not stream.query()  # nothing waited for it
    stream.synchronize()
    for x, y in zip(got, want):
        assert (x - y).abs().max() <= 1e-2 * y.abs().max()


@gpu
def test_a_captured_step_draws_another_mask_at_each_replay():
    q, k, v = tensors(torch.float16, "cuda", sq=64, sk=64, d=64, dv=64)
    step = lambda: torch.autograd.grad(narrows.torch.attention(q, k, v, dropout=0.5).sum(), v)[0]  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dv = step()
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(dv.clone())
    assert all(x.isfinite().all() and (x != 0).any() for x in drawn) and not torch.equal(*drawn)
