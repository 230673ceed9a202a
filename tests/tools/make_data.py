"""Writes tests/tools/data/ (files as NumPy itself writes them) and the seeds of tests/fuzz/corpus/.

Needs numpy and safetensors; run from anywhere: python3 tests/tools/make_data.py
files_test.cpp asserts the values, so a change here is a change there.
"""

import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save

ROOT = Path(__file__).resolve().parent
DATA = ROOT / "data"
CORPUS = ROOT.parent / "fuzz" / "corpus"


def npy(array, version=None):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


def counting(dtype, shape):
    return (np.arange(np.prod(shape)).reshape(shape) * 1.5 - 2).astype(dtype)


def safetensors_file(entries, data, metadata=None):
    header = dict(entries)
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy_files():
    return {
        "fp16": npy(counting("<f2", (2, 3))),
        "fp32": npy(counting("<f4", (2, 3))),
        "fp64": npy(counting("<f8", (2, 3))),
        "int32": npy(counting("<i4", (2, 3))),
        "int64": npy(counting("<i8", (2, 3))),
        "uint8": npy(np.arange(6, dtype="u1").reshape(2, 3)),
        "boolean": npy(np.array([[True, False, True], [False, False, True]])),
        "fortran": npy(np.asfortranarray(counting("<f4", (2, 3)))),
        "scalar": npy(np.array(7.25, dtype="<f4")),
        "empty": npy(np.zeros((2, 0, 3), dtype="<f4")),
        "rank5": npy(counting("<f4", (1, 2, 1, 3, 1))),
        "version2": npy(counting("<f4", (4,)), version=(2, 0)),
        "version3": npy(counting("<f4", (4,)), version=(3, 0)),
        "big_endian": npy(counting(">f4", (2,))),
        "nul_after_dict": npy(counting("<f4", (1,))).replace(b"}  ", b"}\0{", 1),
    }


def archive(members, compression):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as out:
        for name, content in members.items():
            out.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


def zip64_with_count(count):
    record = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, 0, 4)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, 4, 1)
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return b"PK\3\4" + record + locator + end


def npz_files():
    arrays = {"q": counting("<f4", (2, 3)), "mask": np.array([True, False]), "cu_seqlens_q": counting("<i4", (3,))}
    stored, deflated = io.BytesIO(), io.BytesIO()
    np.savez(stored, **arrays)
    np.savez_compressed(deflated, zeros=np.zeros((64, 64), dtype="<f4"), **arrays)
    return {
        "stored": stored.getvalue(),
        "deflated": deflated.getvalue(),
        "plain_name": archive({"q": npy(arrays["q"])}, zipfile.ZIP_STORED),
        "bzip2": archive({"q.npy": npy(arrays["q"])}, zipfile.ZIP_BZIP2),
        "no_members": archive({}, zipfile.ZIP_STORED),
        "zip64_count": zip64_with_count(1 << 30),
    }


def safetensors_files():
    f32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {
        "library": save({"q": counting("<f4", (2, 3)), "m": np.array([True, False]), "n": counting("<i8", (2,))},
                        metadata={"source": "make_data.py"}),
        "bf16": safetensors_file({"q": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}, bytes(8)),
        "unaligned": safetensors_file({"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                                       "q": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}, bytes(range(9))),
        "overlap": safetensors_file({"q": f32, "k": {**f32, "data_offsets": [4, 12]}}, bytes(12)),
        "scalar": safetensors_file({"q": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}, bytes(8)),
        "empty": safetensors_file({}, b""),
        "metadata": safetensors_file({"q": f32}, bytes(8), {"a": "b"}),
    }


def main():
    kept = {
        "npy": ["fp16", "fp32", "fp64", "int32", "int64", "uint8", "boolean", "fortran", "scalar", "empty", "rank5",
                "version2", "version3", "big_endian"],
        "npz": ["stored", "deflated", "plain_name", "bzip2", "no_members"],
        "safetensors": ["library"],
    }
    DATA.mkdir(exist_ok=True)
    for extension, files in {"npy": npy_files(), "npz": npz_files(), "safetensors": safetensors_files()}.items():
        seeds = CORPUS / f"{extension}_fuzzer"
        seeds.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (seeds / name).write_bytes(content)
            if name in kept[extension]:
                (DATA / f"{name}.{extension}").write_bytes(content)


if __name__ == "__main__":
    main()
