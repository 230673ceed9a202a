"""narrows.h through ctypes: its structs are read from the header, so that they are the library's."""

import ctypes
import re
from pathlib import Path

HEADER = Path(__file__).resolve().parents[1] / "include" / "narrows" / "narrows.h"
STRUCT = re.compile(r"typedef struct (narrows_\w+) \{(.*?)\} \1;", re.DOTALL)
FIELD = re.compile(r"(?P<type>[\w ]+?)(?P<pointer>\s*\*)?\s*\b(?P<name>\w+)(?:\[(?P<count>\w+)\])?$")
PLAIN = {
    "size_t": ctypes.c_size_t, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
}  # fmt: skip
ENUMS = ("narrows_dtype", "narrows_device_kind", "narrows_causal")
DTYPES = {"fp16": 1, "bf16": 2, "fp32": 3, "fp64": 4, "int32": 5, "int64": 6, "uint8": 7, "boolean": 8}
CAUSAL = {"none": 0, "bottom_right": 1, "top_left": 2}
MAX_RANK = 5


def structs(text):
    """ctypes classes by the names of the header."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    types = {**PLAIN, **dict.fromkeys(ENUMS, ctypes.c_int32)}
    for name, body in STRUCT.findall(text):
        fields = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            field = FIELD.match(line)
            if not field:
                raise ValueError(f"{name}: {line}: not understood")
            of = field["type"].replace("const", "").strip()
            type_ = ctypes.c_void_p if field["pointer"] else types[of]
            if of == "char":
                type_ = ctypes.c_char_p
            fields.append((field["name"], type_ * MAX_RANK if field["count"] else type_))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return types


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.types = structs(HEADER.read_text(encoding="utf-8"))
        self.library.narrows_last_error.restype = ctypes.c_char_p

    def tensor(self, address, dtype, shape, strides=None, device=None):
        """device: the number of a GPU; None: the CPU."""
        t = self.types["narrows_tensor"]()
        t.data, t.dtype, t.rank = address, DTYPES[dtype], len(shape)
        t.shape[: len(shape)] = shape
        if strides is not None:
            t.has_strides = 1
            t.strides[: len(strides)] = strides
        if device is not None:
            t.device_kind, t.device_index = 1, device
        return t

    def struct(self, name, **fields):
        struct = self.types[name]()
        struct.struct_size = ctypes.sizeof(struct)
        for field, value in fields.items():
            if not hasattr(struct, field):
                raise AttributeError(f"{name} has no {field}")
            setattr(struct, field, value)
        return struct

    def forward(self, inputs, outputs, options):
        """A function without arguments that makes the call; whatever owns the memory must outlive it. Tensors are made by
        tensor(); options are fields of narrows_options."""
        structs_ = (
            self.struct("narrows_inputs", **inputs),
            self.struct("narrows_outputs", **outputs),
            self.struct("narrows_options", **options),
        )
        return self._call("narrows_forward", *structs_)

    def backward(self, inputs, gradients, options):
        """As forward; fields of narrows_backward_inputs and narrows_gradients."""
        structs_ = (
            self.struct("narrows_backward_inputs", **inputs),
            self.struct("narrows_gradients", **gradients),
            self.struct("narrows_options", **options),
        )
        return self._call("narrows_backward", *structs_)

    def workspace_size(self, inputs, options, backward=False):
        """Bytes of scratch that the call needs."""
        size = ctypes.c_int64()
        name = "narrows_backward_workspace_size" if backward else "narrows_workspace_size"
        self._call(name, self.struct("narrows_inputs", **inputs), self.struct("narrows_options", **options), size)()
        return size.value

    def explain(self, inputs, options):
        """The numbers of narrows_explanation, and `family`, by their names."""
        found = self.struct("narrows_explanation")
        self._call("narrows_explain", self.struct("narrows_inputs", **inputs), self.struct("narrows_options", **options), found)()
        numbers = {name: getattr(found, name) for name, _ in found._fields_ if isinstance(getattr(found, name), (int, float))}
        numbers["family"] = found.family.decode()
        self.library.narrows_free(ctypes.c_void_p(numbers.pop("memory")))
        del numbers["struct_size"]
        return numbers

    def _call(self, name, *structs_):
        arguments = [ctypes.byref(each) for each in structs_]
        function, last_error = getattr(self.library, name), self.library.narrows_last_error

        def call(_keep=structs_):
            if function(*arguments) != 0:
                raise RuntimeError(last_error().decode())

        return call
