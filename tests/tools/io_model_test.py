#!/usr/bin/env python3
"""bench/io_model.py on rows made up here, and what it measures with on a program that stands for ncu.

io_model_test.py [LIBNARROWS]    with the library, what bench/io_measure.py calls is tried on the CPU
"""

import contextlib
import ctypes
import importlib.util
import io
import json
import sys
import tempfile
import types
import unittest
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
LIBRARY = None

import io_measure  # noqa: E402
import io_model  # noqa: E402
import narrows_c  # noqa: E402

SCORES, OUTPUTS = (
    "nvjet_tst_128x256_64x4_2x1_v_bz_TNN",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tilesize64x128x64_warpgroupsize1x1x1",
)
SOFTMAX = "void at::native::cunn_SoftMaxForward<4, c10::BFloat16>(int)"


def kernel(name, dram_read, dram_write, sm_read, sm_write):
    return {
        "name": name,
        "dram_read": dram_read,
        "dram_write": dram_write,
        "sm_read": sm_read,
        "sm_write": sm_write,
        "l2_read_sectors": 1,
    }


def traffic_row(**changes):
    """Two heads of 1024 x 64: Q, K, V, O are 131072 bytes of a head each."""
    fused = {
        "heads": 2,
        "model_dram": 524288.0,
        "model_l2": 2359296.0,
        "kernels": [kernel("forward_sm80", 786432, 209716, 4456448, 262144)],
    }
    three = {"heads": 1, "model_dram": 8912896.0}
    three["kernels"] = [
        kernel(SCORES, 262144, 2e6, 1572864, 2097152),
        kernel(SOFTMAX, 2e6, 2e6, 4e6, 2e6),
        kernel(OUTPUTS, 2.3e6, 131072, 1e6, 131072),
    ]
    return {"n": 1024, "d": 64, "causal": False, "fused": fused, "three_kernel": three, "difference": 0.004, **changes}


def training_row(**changes):
    plain = {
        "n": 2048,
        "d": 64,
        "causal": True,
        "heads": 4,
        "inputs_bytes": 4_000_000,
        "results_bytes": 4_000_000,
        "refused": {},
    }
    return {
        **plain,
        "fused": {"peak_bytes": 10_000_000, "ms": 1.25},
        "standard": {"peak_bytes": 104_000_000, "ms": 5.0},
        **changes,
    }


DATA = {
    "date": "2026-11-30",
    "device": {"name": "a GPU", "l2_bytes": 60_000_000, "torch": "2.9", "cuda": "13.0"},
    "traffic": [traffic_row(), traffic_row(causal=True, three_kernel=None)],
    "training": [training_row()],
}


class Model(unittest.TestCase):
    def test_three_kernels_read_by_the_tiles_in_their_names(self):
        # S: 4 x 8 tiles of 256 x 128 read 384 rows of 64, and are written. Softmax reads and writes. O: 8 tiles of 128 rows
        # read P and 64 columns of V.
        elements = 4 * 8 * 384 * 64 + 1024**2 + 2 * 1024**2 + 8 * (128 + 64) * 1024 + 1024 * 64
        kernels = traffic_row()["three_kernel"]["kernels"]
        self.assertEqual(io_model.three_kernel_l2(1024, 64, kernels), 2 * elements)
        self.assertEqual(io_model.three_kernel_l2(1024, 64, kernels), 11141120)
        cut = [kernels[0], kernels[1], kernels[1], kernels[2]]  # the softmax in two launches
        self.assertEqual(io_model.three_kernel_l2(1024, 64, cut), 11141120)
        self.assertIsNone(io_model.three_kernel_l2(1024, 64, [kernels[1]] * 3))
        self.assertIsNone(io_model.three_kernel_l2(1024, 64, kernels[:2]))

    def test_bytes_are_of_a_head(self):
        found = io_model.compared(traffic_row(), "dram")
        self.assertEqual(found["fused"], (524288.0, (786432 + 209716) / 2))
        self.assertEqual(found["three_kernel"], (8912896.0, 262144 + 6e6 + 2.3e6 + 131072))
        found = io_model.compared(traffic_row(), "l2")
        self.assertEqual(found["fused"], (2359296.0, (4456448 + 262144) / 2))
        self.assertEqual(found["three_kernel"], (11141120, 1572864 + 2097152 + 6e6 + 1e6 + 131072))

    def test_what_is_beyond_ten_percent_is_named(self):
        # 0.95, 0.9756, 1.0 and 0.9695 of the model.
        self.assertEqual(io_model.complaints(DATA), [])
        row = traffic_row(three_kernel=None)
        row["fused"]["model_l2"] *= 2
        self.assertEqual(io_model.complaints({"traffic": [row]}), ["fused d 64 N 1024 causal False: l2: 0.500 of the model"])


class Pages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.rows, self.page = self.folder / "rows.json", self.folder / "page.md"

    def run_table(self, kind, data=DATA, *options):
        self.rows.write_text(json.dumps(data))
        self.page.write_text(f"before\n<!-- io_model {kind} -->\nNot yet measured.\n<!-- /io_model -->\nafter\n")
        with contextlib.redirect_stdout(io.StringIO()):
            code = io_model.main(["table", str(self.rows), str(self.page), *options])
        text = self.page.read_text()
        head, tail = f"before\n<!-- io_model {kind} -->\n", "<!-- /io_model -->\nafter\n"
        self.assertTrue(text.startswith(head) and text.endswith(tail), text)
        return code, text[len(head) : -len(tail)]

    def test_traffic(self):
        heads = "| d | N | causal | fused: model | measured | of model | three kernels: model | measured | of model | three / fused |\n"
        rule = "|---|---|---|---|---|---|---|---|---|---|\n"
        first = "| 64 | 1024 | false | 524 kB | 498 kB | 0.950 | 8.91 MB | 8.69 MB | 0.975 | 17.5x |\n"
        second = "| 64 | 1024 | true | 524 kB | 498 kB | 0.950 | - | - | - | - |\n"
        self.assertEqual(self.run_table("dram"), (0, heads + rule + first + second))
        self.assertIn(
            "| 64 | 1024 | false | 2.36 MB | 2.36 MB | 1.000 | 11.1 MB | 10.8 MB | 0.969 | 4.6x |\n", self.run_table("l2")[1]
        )

    def test_training(self):
        _, text = self.run_table("training")
        self.assertIn("| 64 | 2048 | true | 4 | 10 MB | 104 MB | 10.4x | 2 MB | 96 MB | 1.25 | 5 | 4.0x |\n", text)
        refused = training_row(refused={"fused": "sm80: has no backward kernel"})
        del refused["fused"]
        _, text = self.run_table("training", {**DATA, "training": [refused]})
        self.assertIn("| 64 | 2048 | true | 4 | refused | 104 MB | - | refused | 96 MB | refused | 5 | - |\n", text)
        self.assertTrue(text.endswith("\nRefused: fused: sm80: has no backward kernel\n"))

    def test_nothing_is_claimed_that_was_not_measured(self):
        for kind in ("plots", "dram", "l2", "training"):
            self.assertEqual(self.run_table(kind, {**DATA, "traffic": [], "training": []}), (0, "Not yet measured.\n"))

    def test_machine_and_pictures(self):
        self.assertEqual(
            self.run_table("machine")[1], "Measured on 2026-11-30 on one a GPU (L2 60 MB) with PyTorch 2.9 and CUDA 13.0.\n"
        )
        images = "![device memory](images/io-dram.svg)\n![L2 to the multiprocessors](images/io-l2.svg)\n"
        training = "![forward and backward](images/io-training.svg)\n"
        self.assertEqual(self.run_table("plots")[1], images + training)
        refused = training_row(refused={"fused": "no"})
        del refused["fused"]
        self.assertEqual(self.run_table("plots", {**DATA, "training": [refused]})[1], images)

    def test_check_writes_nothing(self):
        self.assertEqual(self.run_table("dram", DATA, "--check"), (1, "Not yet measured.\n"))

    def test_unknown_parts_are_refused(self):
        with self.assertRaisesRegex(SystemExit, "io_model sideways: must be one of machine"):
            self.run_table("sideways")
        self.page.write_text("nothing")
        with self.assertRaisesRegex(SystemExit, "has no part"):
            io_model.main(["table", str(self.rows), str(self.page)])

    def test_the_committed_page_has_every_part(self):
        text = (BENCH.parent / "docs" / "4-io-model.md").read_text(encoding="utf-8")
        self.assertEqual(
            [match["kind"] for match in io_model.PART.finditer(text)], ["machine", "plots", "dram", "l2", "training"]
        )

    def test_lines_of_the_pictures(self):
        self.assertEqual(io_model.traffic_lines(DATA, "l2", 64)["fused", True], [(1024, 2359296.0, 2359296.0)])
        self.assertEqual(io_model.ratio_lines(DATA, "peak_bytes"), {(64, True): [(2048, 10.4)]})
        self.assertEqual(io_model.ratio_lines(DATA, "ms"), {(64, True): [(2048, 4.0)]})

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_plots_are_drawn_alike_twice(self):
        self.rows.write_text(json.dumps(DATA))
        texts = []
        for name in ("a", "b"):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                self.assertEqual(io_model.main(["plot", str(self.rows), "--to", str(self.folder / name)]), 0)
            self.assertEqual(
                [Path(line).name for line in printed.getvalue().split()], ["io-dram.svg", "io-l2.svg", "io-training.svg"]
            )
            texts.append({path.name: path.read_text() for path in (self.folder / name).iterdir()})
        self.assertEqual(texts[0], texts[1])
        for part in ("device memory, d 64", "three kernels", "fused, causal", "sequence length N"):
            self.assertIn(part, texts[0]["io-dram.svg"])
        self.assertIn("standard / fused", texts[0]["io-training.svg"])


# Writes what ncu and its child would for three rows, of which the last has no three-kernel form; then checks how it was called.
FAKE_NCU = """#!{python}
import json, sys
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
assert value("--cache-control") == "all" and value("--clock-control") == "none" and value("--profile-from-start") == "off"
assert arguments[-1] == "--quick" and "child" in arguments and value("--library") == "lib.so"
metrics = value("--metrics").split(",")
heads = ",".join(f'"{{head}}"' for head in ("ID", "Kernel Name", *metrics))
lines = ["==PROF== Connected", heads, '"","","byte","byte","byte","byte","sector"']
for number, name in enumerate(("forward_sm80", "a_128x128_", "softmax", "b_64x128_", "forward_sm80")):
    lines.append(f'"{{number}}","{{name}}",' + ",".join(f'"1,00{{number}}"' for _ in metrics))
open(value("--log-file"), "w").write("\\n".join(lines) + "\\n")
with open(value("--facts"), "w") as facts:
    for three in ({{"heads": 1, "model_dram": 5}}, None):
        print(json.dumps({{"n": 64, "d": 64, "causal": not three, "fused": {{"heads": 2}}, "three_kernel": three}}), file=facts)
sys.exit({code})
"""


class Counters(unittest.TestCase):
    WIDE = (
        '==PROF== 2 kernels\n"ID","Kernel Name","CC",' + ",".join(f'"{metric}"' for metric in io_measure.METRICS.values()) + "\n"
        '"","","","byte","byte","byte","byte","sector"\n"0","forward_sm80","9.0","1,234","5","6","7","8"\n"1","x","9.0","10","11","12","13.0","14"\n'
    )  # fmt: skip
    EXPECTED = [
        kernel("forward_sm80", 1234, 5, 6, 7) | {"l2_read_sectors": 8},
        kernel("x", 10, 11, 12, 13) | {"l2_read_sectors": 14},
    ]

    def test_a_kernel_a_line(self):
        self.assertEqual(io_measure.parse_counters(self.WIDE), self.EXPECTED)

    def test_a_metric_a_line(self):
        lines = [
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
            '"0","forward_sm80","gpu__time_duration.sum","ns","1"',
        ]
        for number, each in enumerate(self.EXPECTED):
            for name, metric in io_measure.METRICS.items():
                lines.append(
                    f'"{number}","{each["name"]}","{metric}","{"sector" if "sectors" in name else "byte"}","{each[name]}"'
                )
        self.assertEqual(io_measure.parse_counters("\n".join(lines)), self.EXPECTED)

    def test_what_cannot_be_used_is_named(self):
        for text, reason in {
            "==ERROR== no permission": "wrote no table: ==ERROR== no permission",
            self.WIDE.replace('"","","","byte"', '"","","","Kbyte"'): "dram__bytes_read.sum: unit 'Kbyte'",
            self.WIDE.replace("dram__bytes_write.sum", "other"): "forward_sm80: has no dram__bytes_write.sum",
        }.items():
            with self.assertRaisesRegex(SystemExit, reason):
                io_measure.parse_counters(text)

    def test_calls_begin_with_the_fused_kernel(self):
        kernels = [{"name": name} for name in ("forward_sm80", "a", "b", "forward_sm80")]
        self.assertEqual(io_measure.calls_of(kernels), [(kernels[0], kernels[1:3]), (kernels[3], [])])
        with self.assertRaisesRegex(SystemExit, "a: ran before any forward_sm80"):
            io_measure.calls_of(kernels[1:])

    def test_counters_go_to_their_rows(self):
        with tempfile.TemporaryDirectory() as folder:
            ncu = Path(folder) / "ncu"
            for code in (0, 3):
                ncu.write_text(FAKE_NCU.format(python=sys.executable, code=code))
                ncu.chmod(0o755)
                options = types.SimpleNamespace(ncu=str(ncu), library="lib.so", quick=True)
                if code != 0:
                    with self.assertRaisesRegex(SystemExit, "ncu: exit code 3: ==PROF== Connected"):
                        io_measure.measure_traffic(options)
                    continue
                first, second = io_measure.measure_traffic(options)
        self.assertEqual([each["name"] for each in first["three_kernel"]["kernels"]], ["a_128x128_", "softmax", "b_64x128_"])
        self.assertEqual(
            (first["fused"]["kernels"][0]["dram_read"], second["fused"]["kernels"][0]["sm_write"]), (1000, 1004)
        )
        self.assertIsNone(second["three_kernel"])


class Sizes(unittest.TestCase):
    def test_tensors_are_many_times_l2_and_scores_fit(self):
        for size in io_measure.sizes(quick=False):
            fused, three = io_measure.heads_of(size["n"], size["d"], 60_000_000)
            head = 4 * size["n"] * size["d"] * 2
            self.assertGreaterEqual(fused * head, 16 * 60_000_000)
            self.assertGreaterEqual(three * head, 4 * 60_000_000)  # what the claim asks for
            self.assertLessEqual(three * 4 * size["n"] ** 2, io_measure.SCORES_AT_MOST)
        self.assertEqual(len(io_measure.sizes(quick=False)), 20)
        self.assertEqual(io_measure.heads_of(16384, 64, 60_000_000), (115, 33))


class Library(unittest.TestCase):
    def setUp(self):
        if not LIBRARY:
            self.skipTest("no library was named")
        self.library = narrows_c.Library(LIBRARY)

    def tensor(self, values, shape=(1, 2, 1, 1)):
        memory = (ctypes.c_float * len(values))(*values)
        return memory, self.library.tensor(ctypes.addressof(memory), "fp32", shape)

    def test_backward_explain_and_workspace(self):
        """Two queries and keys of one element: with q = 0 both weigh 1/2, dv is the mean of dout, dq = scale * sum dS k."""
        nan = float("nan")
        values = {
            "q": [0, 0],
            "k": [1, 3],
            "v": [2, 6],
            "o": [nan] * 2,
            "lse": [nan] * 2,
            "dout": [1, 4],
            "dq": [nan] * 2,
            "dk": [nan] * 2,
            "dv": [nan] * 2,
        }
        memory, t = {}, {}
        for name, each in values.items():
            memory[name], t[name] = self.tensor(each, (1, 1, 2) if name == "lse" else (1, 2, 1, 1))
        inputs = {name: t[name] for name in "qkv"}
        self.library.forward(inputs, {"o": t["o"], "lse": t["lse"]}, {})()
        gradients = {name: t[name] for name in ("dq", "dk", "dv")}
        saved = {**inputs, "o": t["o"], "lse": t["lse"], "dout": t["dout"]}
        self.library.backward(saved, gradients, {})()
        self.assertEqual(list(memory["o"]), [4, 4])
        # dP - D of row i = dout_i * (v_j - 4) = dout_i * (-2, 2); dS is half of it.
        for name, expected in {"dv": [2.5, 2.5], "dq": [2, 8], "dk": [0, 0]}.items():
            for ours, exact in zip(memory[name], expected):
                self.assertAlmostEqual(ours, exact, places=5)
        cost = self.library.explain(inputs, {"causal": 1})
        self.assertEqual(
            (cost["visible_pairs"], cost["family"], cost["fused_bytes"], cost["fused_l2_bytes"]), (3, "cpu", 4 * 8, 0)
        )
        self.assertGreater(self.library.workspace_size(inputs, {}, backward=True), 0)
        with self.assertRaisesRegex(RuntimeError, "head"):
            self.library.explain({**inputs, "k": self.tensor([1] * 6, (1, 2, 3, 1))[1]}, {})


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        LIBRARY = sys.argv.pop(1)
    unittest.main()
