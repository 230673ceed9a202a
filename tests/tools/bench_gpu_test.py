#!/usr/bin/env python3
"""bench/gpu.py without a GPU: its rows, its judgement, and the calls of narrows.h that it makes.

    bench_gpu_test.py [LIBNARROWS]    with the library, what it is called by is tried on the CPU
"""

import contextlib
import ctypes
import io
import json
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
LIBRARY = None
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu  # noqa: E402
import gpu_decode  # noqa: E402
import gpu_forward  # noqa: E402
import gpu_rows  # noqa: E402
import narrows_c  # noqa: E402


class Rows(unittest.TestCase):
    def test_the_grid_is_the_peers(self):
        for op, family, count in (("forward", "sm80", 26), ("backward", "sm80", 26), ("forward", "sm90", 38)):
            rows = list(gpu_rows.grid(op, family))
            self.assertEqual(len(rows), count)
            for row in rows:
                self.assertEqual((row["op"], row["b"] * row["sq"], row["dtype"]), (op, 16384, "bf16"))
                self.assertEqual(row["h"] * row["d"], 4096 if row["case"] else 2048)

    def test_work_is_counted_by_what_is_visible(self):
        full, causal = gpu_rows.row(sq=64, d=8, b=1, h=1), gpu_rows.row(sq=64, d=8, b=1, h=1, causal=True)
        self.assertEqual((gpu.flops(full), gpu.flops(causal)), (4 * 8 * 64 * 64, 2 * 8 * 64 * 64))
        self.assertEqual(gpu.flops({**causal, "case": "window16"}), 32 * sum(min(i + 1, 16) for i in range(64)))
        self.assertEqual(gpu.flops({**causal, "case": "varlen", "b": 3}), 32 * (64**2 + 32**2 + 21**2) / 2)
        self.assertEqual(gpu.flops({**causal, "op": "backward"}), 2.5 * gpu.flops(causal))
        self.assertEqual(gpu.flops({**full, "op": "backward", "dv": 4}), 2 * (3 * 8 + 2 * 4) * 64 * 64)

    def test_decode_rows_are_the_peers_and_count_the_bytes_of_their_caches(self):
        rows = {(row["b"], row["sk"], row["case"]): row for row in gpu_rows.decode_rows() if row["case"] != "mla" or row["h"] == 16}
        heads = [row["h"] for row in gpu_rows.decode_rows() if row["case"] == "mla"]
        self.assertEqual(heads, [16, 16, 16, 64, 64, 128])
        self.assertEqual(len(rows) + 3, len(list(gpu_rows.decode_rows())))
        self.assertEqual(sum(gpu_rows.is_plain(row) for row in rows.values()), 12)
        self.assertEqual(gpu_decode.bytes_read(rows[1, 8192, ""]), 8192 * 8 * 256 * 2)
        self.assertEqual(gpu_decode.bytes_read(rows[1, 8192, "paged16"]), 8192 * 8 * 256 * 2)
        self.assertEqual(gpu_decode.bytes_read(rows[16, 8192, "mla"]), 16 * 8192 * 576 * 2)  # V is a part of K
        zipf = rows[32, 16384, "zipf"]
        self.assertEqual(gpu_rows.cache_lengths(zipf)[:4], [16384, 8192, 5461, 4096])
        self.assertEqual(gpu_decode.bytes_read(zipf), sum(gpu_rows.cache_lengths(zipf)) * 8 * 256 * 2)
        self.assertEqual(gpu_rows.plain_of(rows[1, 8192, "paged16"]), rows[1, 8192, ""])
        self.assertEqual((gpu_rows.page_of(rows[1, 8192, "paged16"]), gpu_rows.page_of(zipf)), (16, 0))
        self.assertEqual([*gpu_decode.peers(rows[1, 8192, "paged16"])], ["cudnn", "fa2"])
        self.assertEqual([*gpu_decode.peers(zipf)], ["fa2"])
        for case in ("rows4", "invariant", "mla"):
            self.assertEqual(gpu_decode.peers(rows[16, 8192, case]), {})

    def test_rows_are_listed_without_pytorch(self):
        def listed(*arguments):
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                self.assertEqual(gpu.main(["--list", *arguments]), 0)
            return [json.loads(line) for line in said.getvalue().splitlines()]

        forward, backward, *hopper = listed("--only", '"case": "varlen"')
        self.assertEqual([(row["op"], row["family"]) for row in hopper], [("forward", "sm90"), ("backward", "sm90")])
        self.assertEqual((forward["op"], backward["op"], forward["h"]), ("forward", "backward", 16))
        self.assertEqual({row["op"] for row in listed("--op", "backward")}, {"backward"})
        self.assertEqual(len({json.dumps(row) for row in listed()}), len(listed()))

    def test_special_rows_have_a_plain_one_in_the_grid(self):
        for op in ("forward", "backward"):
            plain = list(gpu_rows.grid(op))
            for row in gpu_rows.special(op):
                self.assertIn(gpu_rows.plain_of(row), plain)
        for row in gpu_rows.hopper():
            self.assertEqual((row["op"], row["family"]), ("forward", "sm90"))
            self.assertIn(gpu_rows.plain_of(row), list(gpu_rows.grid("forward", "sm90")))
        turns = [row for row in gpu_rows.special("backward") if row["case"] == "deterministic"]
        self.assertEqual(len(turns), 12)
        for row in turns:
            self.assertEqual(gpu_rows.plain_of(row), {**row, "case": ""})
        for row in gpu_rows.hopper_backward():
            self.assertEqual((row["op"], row["family"]), ("backward", "sm90"))
            self.assertIn(gpu_rows.plain_of(row), list(gpu_rows.grid("backward", "sm90", (64, 128, row["d"]))))

    def test_each_family_has_its_judge(self):
        peers = {"cudnn": 2.0, "fa2": 3.0, "torch": 1.0}
        self.assertEqual((gpu.judge("sm80", peers), gpu.judge("sm90", peers)), ("fa2", "cudnn"))
        self.assertEqual((gpu.judge("sm80", {"torch": 1.0}), gpu.judge("sm90", {"torch": 1.0})), ("torch", None))
        self.assertEqual((gpu.judge("sm80", {**peers, "fa3": 1.0}), gpu.judge("sm90", {**peers, "fa3": 1.0})), ("fa2", "fa3"))

    def test_flash_attention_3_is_a_peer_where_its_package_is_installed(self):
        rows = [gpu_rows.row(family="sm90"), gpu_rows.row("backward", family="sm90", case="deterministic", causal=True)]
        others = [gpu_rows.row(), gpu_rows.row(family="sm90", case="softcap"), gpu_rows.row(family="sm90", dtype="fp32")]
        with unittest.mock.patch.dict(sys.modules, flash_attn_interface=None):
            self.assertEqual([gpu_forward.flash_attention_3(row) for row in rows], [None, None])
        package = unittest.mock.Mock()
        package.flash_attn_func.side_effect = lambda q, k, v, **options: ((q, k, v), options)
        with unittest.mock.patch.dict(sys.modules, flash_attn_interface=package):
            self.assertEqual([gpu_forward.flash_attention_3(row) for row in others], [None] * 3)
            for row, options in zip(rows, ({"causal": False}, {"causal": True, "deterministic": True})):
                self.assertEqual(gpu_forward.flash_attention_3(row)(1, 2, 3), (1, 2, 3))  # without the LSE behind O
                self.assertEqual(package.flash_attn_func.call_args, unittest.mock.call(1, 2, 3, **options))


class Errors(unittest.TestCase):
    def test_the_bar_on_errors(self):
        result = {"op": "forward"}
        found = {"ours": {"o": 1.009}, "fa2": {"o": 1.0}, "cudnn": {"o": 2.0}}
        self.assertEqual(gpu.judge_errors(result, found), "")
        self.assertEqual(result, {"op": "forward", "error": 1.009, "peer_errors": {"fa2": 1.0, "cudnn": 2.0}, "error_ratio": 1.009})
        self.assertIn("1.02", gpu.judge_errors({"op": "forward"}, {"ours": {"o": 1.02}, "fa2": {"o": 1.0}}))

    def test_each_gradient_meets_the_better_peer(self):
        fa2, cudnn = {"dq": 1.0, "dk": 2.0, "dv": 1.0}, {"dq": 2.0, "dk": 1.0, "dv": 1.0}
        for dk, wrong in ((1.005, ""), (1.5, "error")):
            own, result = {"dq": 1.0, "dk": dk, "dv": 0.9}, {"op": "backward"}
            said = gpu.judge_errors(result, {"ours": own, "fa2": fa2, "cudnn": cudnn})
            self.assertEqual((result["errors"], result["error_ratio"], said[:5]), (own, dk, wrong))
            self.assertEqual(result["peer_errors"], {"fa2": fa2, "cudnn": cudnn})

    def test_without_a_peer_an_error_has_a_limit(self):
        for error, wrong in ((0.002, ""), (0.5, "error {'o': 0.5}"), (float("nan"), "error {'o': nan}")):
            result = {"op": "forward"}
            self.assertEqual(gpu.judge_errors(result, {"ours": {"o": error}, "torch": {"o": 0.1}}), wrong)
            self.assertNotIn("error_ratio", result)

    def test_an_error_that_is_no_number_is_wrong(self):
        for order in (("dq", "dk"), ("dk", "dq")):
            own = {name: float("nan") if name == "dk" else 1.0 for name in order}
            self.assertIn("nan", gpu.judge_errors({"op": "backward"}, {"ours": own, "fa2": {"dq": 1.0, "dk": 1.0}}))


class Measuring(unittest.TestCase):
    def test_a_call_is_made_in_the_first_way_that_works(self):
        def refuses():
            raise RuntimeError("not such a row\nand more")

        def call(name):
            return lambda: name

        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            kept = gpu.usable({"ours": [lambda: call("a")], "fa2": [refuses, lambda: call("b")], "cudnn": [lambda: refuses]})
        self.assertEqual({name: run() for name, run in kept.items()}, {"ours": "a", "fa2": "b"})
        self.assertEqual(said.getvalue(), "  fa2: not such a row\n  cudnn: not such a row\n")
        with self.assertRaises(RuntimeError):
            gpu.usable({"ours": [refuses]})

    def test_a_row_that_we_refuse_does_not_end_the_run(self):
        def measured(_, row, known):
            if row["case"] == "bias":
                raise RuntimeError("bias: refused")
            return {**row, "ms": 1.0, "hot_ms": 1.0, "tflops": 1.0, "peers": {}, "against": None}, ""

        rows = [gpu_rows.row("backward", case=case) for case in ("bias", "mask")]
        folder, said = tempfile.TemporaryDirectory(), io.StringIO()
        self.addCleanup(folder.cleanup)
        output = Path(folder.name) / "rows"
        with unittest.mock.patch.object(gpu, "measured", measured), contextlib.redirect_stderr(said):
            results, wrong_rows = gpu.measure_rows(None, rows, output)
        self.assertEqual(([row["case"] for row in results], wrong_rows), (["mask"], 1))
        self.assertEqual([json.loads(line)["case"] for line in output.read_text(encoding="utf-8").splitlines()], ["mask"])
        self.assertIn("bias: refused", said.getvalue())

    def test_an_operation_is_summed_up(self):
        def row(ratio, **changes):
            return {**gpu_rows.row("backward", **changes), "against": "fa2", "ratio": ratio}

        rows = [row(1.0), {**row(4.0), "error_ratio": 1.002}, row(9.0, case="dropout"), row(9.0, dtype="fp16")]
        rows.append({**row(None, case="deterministic"), "against": None, "of_plain": 0.9})
        self.assertEqual(
            gpu.summary(rows, "backward"),
            [
                "backward, 2 rows plain bf16 beside fa2: geometric mean 2.000x, least 1.000x",
                "backward, 1 rows deterministic beside plain: geometric mean 0.900x, least 0.900x",
                "backward, 1 rows' errors by the better of fa2 and cudnn: at most 1.0020x",
            ],
        )
        self.assertEqual(gpu.summary(rows, "forward"), [])

    def test_decode_rows_are_summed_up_beside_the_fastest_peer(self):
        rows = [{**gpu_rows.decode_row(1, 8192), "against": who, "ratio": ratio} for who, ratio in (("cudnn", 4.0), ("fa2", 1.0))]
        rows.append({**gpu_rows.decode_row(1, 8192, "paged16"), "against": "cudnn", "ratio": 9.0})
        line = "decode, 2 rows plain bf16 beside the fastest peer: geometric mean 2.000x, least 1.000x"
        self.assertEqual(gpu.summary(rows, "decode"), [line])
        result = {**rows[0], "ms": 0.0131, "gbps": 2570.0, "peers": {"cudnn": 0.0524}}
        self.assertEqual(
            gpu.describe(result), "decode bf16 d128 1x8192 causal            0.0131 ms 2570 GB/s cudnn 0.0524 4.000x cudnn")


class Calls(unittest.TestCase):
    def test_the_header_becomes_structs(self):
        types = narrows_c.structs(narrows_c.HEADER.read_text(encoding="utf-8"))
        self.assertEqual(ctypes.sizeof(types["narrows_tensor"]), 112)
        self.assertIn("stream", dict(types["narrows_options"]._fields_))
        with self.assertRaises(ValueError):
            narrows_c.structs("typedef struct narrows_x { int64_t a, b; } narrows_x;")

    def test_the_library_is_called(self):
        if not LIBRARY:
            self.skipTest("no library was named")
        library = narrows_c.Library(LIBRARY)
        q, v, o = ((ctypes.c_float * 8)(*values) for values in ([0] * 8, range(8), [9] * 8))

        def tensor(array):
            return library.tensor(ctypes.addressof(array), "fp32", (1, 2, 1, 4), (8, 4, 4, 1))

        library.forward({"q": tensor(q), "k": tensor(q), "v": tensor(v)}, {"o": tensor(o)}, {"causal": 1})()
        self.assertEqual(list(o), [0, 1, 2, 3, 2, 3, 4, 5])
        with self.assertRaisesRegex(RuntimeError, "softcap: -1"):
            library.forward({"q": tensor(q), "k": tensor(q), "v": tensor(v)}, {"o": tensor(o)}, {"softcap": -1.0})()
        with self.assertRaises(AttributeError):
            library.forward({}, {}, {"softcapp": 1.0})

    def test_gradients_are_called_for(self):
        if not LIBRARY:
            self.skipTest("no library was named")
        library = narrows_c.Library(LIBRARY)

        def tensor(*values):
            return (ctypes.c_float * len(values))(*values)

        def view(array, shape=(1, 2, 1, 1)):
            return library.tensor(ctypes.addressof(array), "fp32", shape)

        # The first query sees one key, the second two alike.
        q, v, o, lse, dout, dv = tensor(0, 0), tensor(2, 4), tensor(9, 9), tensor(9, 9), tensor(3, 8), tensor(9, 9)
        options, inputs = {"causal": 1}, {"q": view(q), "k": view(q), "v": view(v)}
        results = {"o": view(o), "lse": view(lse, (1, 1, 2))}
        library.forward(inputs, results, options)()
        size = library.workspace_size(inputs, options, backward=True)
        scratch = (ctypes.c_uint8 * max(1, size))()
        options["workspace"] = library.tensor(ctypes.addressof(scratch), "uint8", (max(1, size),))
        library.backward({**inputs, **results, "dout": view(dout)}, {"dv": view(dv)}, options)()
        self.assertEqual((list(o), list(dv)), ([2, 3], [7, 4]))


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        LIBRARY = sys.argv.pop(1)
    unittest.main()
