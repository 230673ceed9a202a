#!/usr/bin/env python3
"""bench/table.py and bench/plots.py on rows made up here."""

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import table  # noqa: E402


def row(**changes):
    plain = {
        "op": "forward", "backend": "cpu", "family": "cpu", "dtype": "fp32", "b": 1, "h": 16, "hk": 16, "sq": 1024, "sk": 1024,
        "d": 64, "dv": 64, "causal": False, "case": "", "threads": 2, "ms": 12.345, "best_ms": 12, "tflops": 0.2214, "peak": 0.25,
        "fraction": 0.8856, "extra_bytes": 8550000, "peers": {}, "against": None, "ratio": None,
    }  # fmt: skip
    return {**plain, **changes}


def decode_row(**changes):
    changed = row(op="decode", sq=1, sk=4096, gbps=61.25, **changes)
    del changed["tflops"]
    return changed


ROWS = [
    row(),
    row(causal=True, fraction=0.74, peers={"torch": 30.0, "onnxruntime": 18.5}, against="onnxruntime", ratio=1.4986),
    row(d=128, threads=1),
    row(op="backward", peers={"torch": 90.0}, against="torch", ratio=7.29),
    row(case="softcap"),
    decode_row(case="paged16", extra_bytes=512),
]


class Scripts(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.folder = Path(self.directory.name)
        self.rows = self.folder / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(each) + "\n" for each in ROWS))
        self.page = self.folder / "page.md"

    def run_table(self, text, *options):
        self.page.write_text(text)
        with contextlib.redirect_stdout(io.StringIO()):
            code = table.main([str(self.rows), str(self.page), *options])
        return code, self.page.read_text()

    def test_rows_of_a_record_become_tables_of_a_gpu(self):
        gpu = {"backend": "cuda", "family": "sm80", "hot_ms": 13.0, "tflops": 350.4}
        plain = row(**gpu, dtype="bf16", peers={"fa2": 13.0, "cudnn": 7.0}, against="fa2", ratio=1.053)
        bias = row(**gpu, dtype="bf16", case="bias", of_plain=0.8123)
        host = {"op": "forward", "backend": "cuda", "case": "host_call", "ms": 0.0035}
        self.rows = self.folder / "record.json"
        self.rows.write_text(json.dumps({"source_hash": "0", "bench": [plain, bias, host]}))
        _, text = self.run_table("<!-- bench gpu family=sm80 -->\n<!-- /bench -->\n<!-- bench gpu_cases -->\n<!-- /bench -->\n")
        self.assertIn("| bf16 | 64 | 1024 | false | - | 12.3 | 13 | 350 | 89% | 7 | 13 | 1.05x fa2 |\n", text)
        self.assertIn("| bf16 | 64 | 1024 | false | bias | 12.3 | 13 | 350 | 89% | - | 0.81x |\n", text)
        self.assertNotIn("host_call", text)

    def test_backward_rows_of_a_gpu_have_their_own_tables(self):
        gpu = {"op": "backward", "backend": "cuda", "family": "sm80", "dtype": "bf16", "hot_ms": 13.0, "tflops": 350.4}
        plain = row(**gpu, peers={"fa2": 13.0}, against="fa2", ratio=1.053, error_ratio=0.99951)
        other = row(**gpu, causal=True)
        deterministic, bias = (row(**gpu, case=case, of_plain=0.9123) for case in ("deterministic", "bias"))
        forward = row(backend="cuda", hot_ms=1.0)
        self.rows = self.folder / "record.json"
        self.rows.write_text(json.dumps({"bench": [plain, other, bias, deterministic, forward]}))
        page = "<!-- bench gpu_backward -->\n<!-- /bench -->\n<!-- bench gpu_backward_cases -->\n<!-- /bench -->\n"
        _, text = self.run_table(page)
        heads = "| dtype | d | sq | causal | case | ms | hot ms | TFLOP/s | of peak |"
        self.assertEqual(
            text.splitlines()[1:5],
            [
                f"{heads} fa2 ms | ratio | deterministic | error |",
                "|" + "---|" * 13,
                "| bf16 | 64 | 1024 | false | - | 12.3 | 13 | 350 | 89% | 13 | 1.05x fa2 | 0.91x | 1.000x |",
                "| bf16 | 64 | 1024 | true | - | 12.3 | 13 | 350 | 89% | - | - | - | - |",
            ],
        )
        self.assertIn("| bf16 | 64 | 1024 | false | bias | 12.3 | 13 | 350 | 89% | - | 0.91x |\n", text)
        self.assertEqual(text.count("| deterministic |"), 2)
        self.assertNotIn("fp32", text)

    def test_decode_rows_of_a_gpu_are_in_microseconds(self):
        gpu = {"backend": "cuda", "family": "sm80", "dtype": "bf16", "b": 4, "d": 128}
        plain = decode_row(**gpu, peers={"fa2": 0.0523, "cudnn": 0.03}, against="cudnn", ratio=1.053)
        paged = decode_row(**gpu, case="paged16", of_plain=0.9812)
        for each in (plain, paged):
            each.update(ms=0.02849, gbps=2356.4)
        self.rows = self.folder / "record.json"
        self.rows.write_text(json.dumps({"bench": [plain, paged]}))
        _, text = self.run_table("<!-- bench gpu_decode -->\n<!-- /bench -->\n")
        self.assertEqual(
            text.splitlines()[1:5],
            [
                "| b x sk | sq | d | case | us | GB/s | of reading | cudnn us | fa2 us | ratio | of plain |",
                "|" + "---|" * 11,
                "| 4x4096 | 1 | 128 | - | 28.5 | 2356 | 89% | 30.0 | 52.3 | 1.05x cudnn | - |",
                "| 4x4096 | 1 | 128 | paged16 | 28.5 | 2356 | 89% | - | - | - | 0.98x |",
            ],
        )

    def test_a_record_without_backward_rows_says_so(self):
        self.rows = self.folder / "record.json"
        self.rows.write_text(json.dumps({"bench": [row(backend="cuda", hot_ms=1.0)]}))
        page = "<!-- bench gpu_backward d=64 -->\nold\n<!-- /bench -->\n"
        self.assertEqual(self.run_table(page)[1], page.replace("old", "Not in the record as yet."))
        with self.assertRaisesRegex(SystemExit, "no row for the part: bench gpu d=7"):
            self.run_table("<!-- bench gpu d=7 -->\n<!-- /bench -->\n")

    def test_a_part_becomes_a_table_and_the_rest_stays(self):
        code, text = self.run_table("before\n<!-- bench forward d=64 threads=2 -->\nold\n<!-- /bench -->\nafter\n")
        self.assertEqual(code, 0)
        self.assertEqual(
            text,
            "before\n<!-- bench forward d=64 threads=2 -->\n"
            "| dtype | d | sq | causal | threads | ms | TFLOP/s | of peak | extra | onnxruntime ms | torch ms | ratio |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
            "| fp32 | 64 | 1024 | false | 2 | 12.3 | 0.221 | 89% | 8.55 MB | - | - | - |\n"
            "| fp32 | 64 | 1024 | true | 2 | 12.3 | 0.221 | 74% | 8.55 MB | 18.5 | 30 | 1.50x |\n"
            "<!-- /bench -->\nafter\n",
        )

    def test_every_kind_has_its_rows(self):
        parts = "".join(f"<!-- bench {kind} -->\n<!-- /bench -->\n" for kind in ("backward", "decode", "cases"))
        _, text = self.run_table(parts)
        self.assertIn("| fp32 | 64 | 1024 | false | 2 | 12.3 | 0.221 | 89% | 8.55 MB | 90 | 7.29x |", text)
        self.assertIn("| fp32 | 64 | 4096 | paged16 | 2 | 12.3 | 61.2 | 89% | 512 B | - |", text)
        self.assertIn("| fp32 | 64 | softcap | 1024 | false | 2 | 12.3 | 0.221 | 89% | 8.55 MB | - |", text)

    def test_check_writes_nothing_and_is_content_with_what_was_written(self):
        page = "<!-- bench decode -->\n<!-- /bench -->\n"
        self.assertEqual(self.run_table(page, "--check"), (1, page))
        _, written = self.run_table(page)
        self.assertEqual(self.run_table(written, "--check"), (0, written))

    def test_what_cannot_be_is_refused_by_name(self):
        for text, reason in {
            "nothing": "no part",
            "<!-- bench sideways -->\n<!-- /bench -->": "must be one of forward",
            "<!-- bench forward size=3 -->\n<!-- /bench -->": "'size=3': must be NAME=VALUE",
            "<!-- bench forward d=7 -->\n<!-- /bench -->": "no row for the part: bench forward d=7",
        }.items():
            with self.assertRaisesRegex(SystemExit, reason):
                self.run_table(text)
        self.rows.write_text("{}\nnot JSON\n")
        with self.assertRaisesRegex(SystemExit, "rows.jsonl:2: no JSON"):
            self.run_table("")

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_plots_draw_every_line_of_the_rows(self):
        import plots

        self.assertEqual(plots.series([ROWS[0], row(sq=512, fraction=0.5)], "fraction"), {("fp32", 64, "full"): [(512, 0.5), (1024, 0.8856)]})
        images = self.folder / "images"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.assertEqual(plots.main([str(self.rows), "--to", str(images)]), 0)
        names = ["cpu-forward.svg", "cpu-backward.svg", "cpu-decode.svg", "cpu-peers.svg"]
        self.assertEqual([Path(line).name for line in printed.getvalue().split()], names)
        texts = {name: (images / name).read_text() for name in names}
        for part in ("forward, 2 threads", "forward, 1 thread", "fp32 d 64 causal", "fp32 d 128 full", "fraction of the measured peak"):
            self.assertIn(part, texts["cpu-forward.svg"])
        self.assertIn("fp32 d 64 paged16", texts["cpu-decode.svg"])
        self.assertIn("backward, 2 threads", texts["cpu-peers.svg"])
        self.assertNotIn("decode", texts["cpu-peers.svg"])
        before = texts["cpu-forward.svg"]
        with contextlib.redirect_stdout(io.StringIO()):
            plots.main([str(self.rows), "--to", str(images)])
        self.assertEqual((images / "cpu-forward.svg").read_text(), before)


if __name__ == "__main__":
    unittest.main()
