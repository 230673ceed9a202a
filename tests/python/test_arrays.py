"""What may be passed, what comes back, and that memory is borrowed, not copied and not kept."""

import ctypes
import gc
import math
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from reference import assert_matches, check, inputs

import narrows

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


class Tensor:
    """The least that DLPack asks of a producer, over a NumPy array of any dtype; ctypes builds the capsule."""

    class _DLTensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
        ]  # fmt: skip

    _Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    live = 0  # capsules handed out and not released
    keep = {}

    def __init__(self, array, *, versioned=True, device=(1, 0), code=None, byte_offset=0, version=(1, 0), flags=0):
        self.array, self.versioned, self.device, self.byte_offset = array, versioned, device, byte_offset
        self.version, self.flags = version, flags
        bits = array.dtype.itemsize * 8
        kinds = {"f": 2, "i": 0, "u": 1, "b": 6, "V": 4}
        self.type = (code or kinds[array.dtype.kind], bits, 1)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        rank = self.array.ndim
        numbers = (ctypes.c_int64 * (2 * rank))(
            *self.array.shape, *(stride // self.array.dtype.itemsize for stride in self.array.strides)
        )
        where = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64))
        strides = ctypes.cast(ctypes.addressof(numbers) + 8 * rank, ctypes.POINTER(ctypes.c_int64))
        if self.array.flags.c_contiguous and not self.versioned:
            strides = None
        tensor = self._DLTensor(
            self.array.ctypes.data - self.byte_offset, *self.device, rank, *self.type, where, strides, self.byte_offset
        )
        key = object()
        deleter = self._Deleter(lambda _: self._release(key))
        Tensor.live += 1
        if self.versioned:
            name, fields = b"dltensor_versioned", [
                ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", self._Deleter), ("flags", ctypes.c_uint64), ("tensor", self._DLTensor),
            ]  # fmt: skip
            values = (*self.version, None, deleter, self.flags, tensor)
        else:
            name, fields = b"dltensor", [
                ("tensor", self._DLTensor), ("context", ctypes.c_void_p), ("deleter", self._Deleter)
            ]  # fmt: skip
            values = (tensor, None, deleter)
        managed = type("Managed", (ctypes.Structure,), {"_fields_": fields})(*values)
        Tensor.keep[key] = (managed, numbers, name, self)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(managed), name, None)

    @staticmethod
    def _release(key):
        Tensor.live -= 1
        Tensor.keep.pop(key)


def test_strided_views():
    q, k, v = inputs(b=4, sq=18, sk=26, h=8, hk=4, d=32)
    views = [
        [x[::2, ::2, ::2, ::2] for x in (q, k, v)],
        [x[::-1, ::-1, ::-1, ::-1] for x in (q, k, v)],
        [x[:, ::-2, :, 3:19] for x in (q, k, v)],
        [x.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1) for x in (q, k, v)],  # d outermost but for the batch
        [x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in (q, k, v)],  # (b, h, s, d) in memory
        [q, k[:, ::2], v[:, 1::2]],  # G06: different strides of K and V
        [np.asfortranarray(q), k, np.asfortranarray(v)],
    ]
    for view in views:
        o, lse = check(*view, causal=True)
        same = narrows.attention(*(np.ascontiguousarray(x) for x in view), causal=True)
        np.testing.assert_allclose(o, same, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_strides_in_every_dtype(dtype):
    check(*(x[:, ::-1, :, ::-1] for x in inputs(dtype=dtype)), causal=True)


def test_read_only_and_expanded_inputs():
    q, k, v = inputs(b=1)
    for x in (q, k, v):
        x.flags.writeable = False
    check(q, k, v)
    wide = [np.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, v)]
    o, _ = check(*wide)
    np.testing.assert_array_equal(o[2], o[0])
    one = [q, np.broadcast_to(k[:, :, :1], k.shape), np.broadcast_to(v[:, :1], v.shape)]
    check(*one)
    check(*inputs(), mask=np.broadcast_to(np.True_, (9, 13)), bias=np.broadcast_to(np.float32(0.5), (2, 4, 9, 13)))


def test_outputs_in_strided_memory():
    q, k, v = inputs()
    memory = np.full((2, 4, 18, 16), np.nan, np.float32)
    o = memory[:, :, ::2].transpose(0, 2, 1, 3)
    lse = np.full((9, 2, 4), np.nan, np.float32).transpose(1, 2, 0)
    assert narrows.attention(q, k, v, o=o, lse=lse) is o
    assert_matches(o, lse, q, k, v)
    assert np.isnan(memory[:, :, 1::2]).all()


def test_outputs_that_cannot_be_written_are_refused():
    q, k, v = inputs()
    o = np.zeros_like(q)
    o.flags.writeable = False
    with pytest.raises(ValueError) as error:
        narrows.attention(q, k, v, o=o)
    assert str(error.value) == "o: read-only: must be memory that can be written"
    with pytest.raises(ValueError, match=r"^o: "):
        narrows.attention(q, k, v, o=np.lib.stride_tricks.as_strided(np.zeros(1, "f"), q.shape, (0, 0, 0, 0)))
    with pytest.raises(ValueError) as error:
        narrows.attention(q, k, v, o=Tensor(np.zeros_like(q), flags=1))
    assert str(error.value) == "o: read-only: must be memory that can be written"


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_producers(dtype, versioned):
    arrays = inputs(dtype=dtype)
    o = np.full_like(arrays[0], np.nan)
    tensors = [Tensor(x, versioned=versioned) for x in arrays]
    given = Tensor(o, versioned=versioned)
    assert narrows.attention(*tensors, o=given, causal=True) is given
    np.testing.assert_array_equal(o, narrows.attention(*arrays, causal=True))
    # This producer's library has no from_dlpack: NumPy comes back.
    o, lse = narrows.attention(*tensors, causal=True, return_lse=True)
    assert type(o) is np.ndarray and o.dtype == dtype
    assert_matches(o, lse, *arrays, causal=True)
    backwards = [x[:, ::-1] for x in arrays]
    np.testing.assert_array_equal(
        narrows.attention(*(Tensor(x, versioned=versioned) for x in backwards)), narrows.attention(*backwards)
    )
    gc.collect()
    assert Tensor.live == 0


def test_dlpack_options_read_only_flags_and_offsets():
    q, k, v = inputs()
    mask = np.random.default_rng(0).random((9, 13)) < 0.8
    lengths = np.array([13, 4], np.int32)
    o = narrows.attention(
        Tensor(q, byte_offset=64), Tensor(k, flags=1), v, mask=Tensor(mask), seqused_k=Tensor(lengths), bias=Tensor(mask * q.dtype.type(1))
    )
    np.testing.assert_array_equal(
        o, narrows.attention(q, k, v, mask=mask, seqused_k=lengths, bias=mask.astype(np.float32))
    )
    gc.collect()
    assert Tensor.live == 0


def test_dlpack_refusals():
    q, k, v = inputs()
    cases = [
        (Tensor(q, device=(8, 1)), NotImplementedError,
         "q: device DLPack type 8:1: memory must be the CPU's or a CUDA device's; move it there first"),
        (Tensor(q, version=(2, 5)), TypeError, "q: DLPack 2.5: must be 1.x or older"),
        (Tensor(q, code=5), TypeError,
         "q: DLPack type code 5, bits 32, lanes 1: must be float16, bfloat16, float32, float64, int32, int64, uint8 or bool"),
        (Tensor(q.astype(np.uint8), code=10), NotImplementedError,
         "q: DLPack type code 10, bits 8, lanes 1: fp8 comes later; use float16, bfloat16, float32 or float64"),
        (Tensor(np.array(1, np.float32)), ValueError, "q: shape (): must have an axis; nearest legal: (1,)"),
    ]  # fmt: skip
    for tensor, kind, text in cases:
        with pytest.raises(kind) as error:
            narrows.attention(tensor, k, v)
        assert str(error.value) == text
    gc.collect()
    assert Tensor.live == 0


class Raises:
    def __dlpack__(self, **options):
        raise BufferError("not today")


def test_an_exporters_own_error_comes_through():
    _, k, v = inputs()
    with pytest.raises(BufferError, match="not today"):
        narrows.attention(Raises(), k, v)


def test_array_api_library_gets_its_own_arrays_back():
    xp = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    q, k, v = inputs()
    o, lse = narrows.attention(*(xp.asarray(x) for x in (q, k, v)), causal=True, return_lse=True)
    assert type(o) is type(xp.asarray(q)) and type(lse) is type(o)
    assert_matches(np.asarray(o), np.asarray(lse), q, k, v, causal=True)


def test_torchs_tensors_are_read_as_they_lie():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q, k, v = (torch.from_numpy(x) for x in inputs())
    want = narrows.attention(q, k, v)
    apart = torch.full((*k.shape[:-1], 2 * k.shape[-1]), math.nan)[..., ::2].copy_(k)
    assert torch.equal(narrows.attention(q, apart, v.transpose(0, 1).contiguous().transpose(0, 1)), want)
    one = v[:1, :1].expand(v.shape)
    assert torch.equal(narrows.attention(q, k, one), narrows.attention(q, k, one.clone()))
    minus = torch.complex(torch.zeros_like(k), -k).conj().imag  # its sign is not in memory yet
    assert minus.is_neg() and torch.equal(minus, k)
    with pytest.raises(ValueError, match=r"^k: negated view: must be memory as it reads; pass k.resolve_neg\(\)$"):
        narrows.attention(q, minus, v)
    with pytest.raises(Exception, match="requires? grad"):
        narrows.attention(q, k, v.clone().requires_grad_())
    with pytest.raises(TypeError, match="^k: .*complex|^k: DLPack type code 5"):
        narrows.attention(q, torch.complex(k, k), v)


def test_torch_gets_its_own_tensors_back():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        q, k, v = (torch.from_numpy(x).to(dtype) for x in inputs())
        o, lse = narrows.attention(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, causal=True, return_lse=True)
        assert o.dtype == dtype and lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(1, 2), k.double().transpose(1, 2).repeat_interleave(2, 1),
            v.double().transpose(1, 2).repeat_interleave(2, 1), torch.ones(9, 13, dtype=torch.bool).tril(4),
        ).transpose(1, 2)  # fmt: skip
        assert (o.double() - want).abs().max() < {2: 0.02, 4: 1e-5, 8: 1e-12}[dtype.itemsize]


def test_jax_gets_its_own_arrays_back():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    q, k, v = inputs()
    o = narrows.attention(*(jax.numpy.asarray(x) for x in (q, k, v)))
    assert isinstance(o, jax.Array)
    np.testing.assert_array_equal(np.asarray(o), narrows.attention(q, k, v))


def test_lists_where_numbers_are_few():
    q, k, v = inputs()
    want = narrows.attention(q, k, v, seqused_k=np.array([5, 13], np.int32), sinks=np.array([1.5, 0, 0, -1], np.float32))
    np.testing.assert_array_equal(narrows.attention(q, k, v, seqused_k=(5, 13), sinks=[1.5, 0, 0, -1]), want)


def test_nothing_is_kept():
    arrays = inputs()
    held = [weakref.ref(x) for x in arrays]
    counts = [sys.getrefcount(x) for x in arrays]
    for _ in range(20):
        narrows.attention(*arrays, mask=np.ones((9, 13), bool))
        narrows.explain(*arrays)
        with pytest.raises(ValueError):
            narrows.attention(*arrays, scale=float("nan"))
    assert [sys.getrefcount(x) for x in arrays] == counts
    del arrays
    gc.collect()
    assert [x() for x in held] == [None, None, None]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_thousand_calls_do_not_grow():
    q, k, v = inputs(b=1, sq=64, sk=64, h=2, hk=1, d=32)
    tensors = [Tensor(x) for x in (q, k, v)]

    def calls(count):
        for _ in range(count):
            narrows.attention(q, k, v, causal=True, return_lse=True)
            narrows.attention(*tensors, cu_seqlens_q=None)
        gc.collect()
        return resident_bytes()

    before = calls(100)
    # One copy of q a call would be 16 MB.
    assert calls(1000) - before < 4 << 20
    assert Tensor.live == 0
