#!/usr/bin/env python3
"""scripts/compile-kernels with a stand-in for the command, which describes kernels made up here."""

import json
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile-kernels"
CONSTANTS = {"kElement": "Element::bf16", "kHeadDim": "128", "kValueDim": "128", "kCopyBytes": "16", "kNatural": "false",
             "kSoftcap": "false", "kAlibi": "false", "kBias": "false", "kMask": "false", "kDropout": "false"}  # fmt: skip


def kernel(constants=None, **changes):
    plain = {"function": "forward_sm80", "architecture": "sm_80", "nvrtc": "13.0", "registers": 255, "stack_bytes": 0,
             "spill_store_bytes": 0, "spill_load_bytes": 0, "shared_bytes": 1280, "image_bytes": 9, "seconds": 0.5}  # fmt: skip
    return {**plain, **changes, "constants": {**CONSTANTS, **(constants or {})}}


def hopper(constants=None, **changes):
    own = {"kBlockKeys": "176", "kLimitsKeys": "false", **(constants or {})}
    return kernel(own, **{"function": "forward_sm90", "architecture": "sm_90a", "shared_bytes": 0, **changes})


class CompileKernels(unittest.TestCase):
    def run_script(self, kernels, *options, code=0, error=""):
        """(exit code, what it printed, its report); the command says the same of every set."""
        with tempfile.TemporaryDirectory() as folder:
            command, report = Path(folder) / "narrows", Path(folder) / "report.xml"
            lines = "\n".join(json.dumps(one) for one in kernels)
            command.write_text(f"#!{sys.executable}\nimport sys\nprint({lines!r})\nprint({error!r}, file=sys.stderr)\nsys.exit({code})\n")
            command.chmod(0o755)
            done = subprocess.run([sys.executable, "-B", SCRIPT, command, "--report", report, *options],
                                  capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr, ElementTree.parse(report).getroot() if report.exists() else None

    def test_good_kernels_pass_and_are_counted(self):
        code, text, report = self.run_script([kernel(seconds=0.5), kernel(seconds=1.5), kernel(seconds=4)])
        self.assertEqual(code, 0, text)
        self.assertIn("21 kernels, 1.50 s median, 4.00 s largest, 255 registers at most", text)  # seven sets
        self.assertIn("16-bit plain: 0 bytes spilled at most", text)
        self.assertEqual(len(report.findall("testcase")), 22)
        self.assertEqual(len(report.findall("testcase/skipped")), 1)  # NVRTC 12.9
        self.assertEqual(report.findall("testcase/failure"), [])

    def test_each_fault_fails(self):
        for bad, words in (
            (kernel(spill_store_bytes=4), "sm_80 nvrtc 13.0 bf16 128x128 plain: 4 bytes spilled, at most 0 allowed"),
            (kernel({"kCopyBytes": "2"}, spill_store_bytes=72), "128x128 plain copies 2: 72 bytes spilled, at most 64 allowed"),
            (kernel({"kMask": "true", "kBias": "true"}, spill_store_bytes=500), "128x128 bias+mask: 500 bytes spilled"),
            (kernel({"kElement": "Element::fp32"}, spill_store_bytes=500), "fp32 128x128 plain: 500 bytes spilled"),
            (kernel(shared_bytes=1544), "1544 bytes of static shared memory, at most 1536 allowed"),
            (hopper(spill_store_bytes=36), "forward sm90 sm_90a nvrtc 13.0 bf16 128x128 plain keys 176: 36 bytes spilled, at most 32"),
            (hopper({"kLimitsKeys": "true"}, serialised=True), "plain keys 176 masks: ptxas waits for each wgmma"),
            (hopper(function="backward_wide_sm90", shared_bytes=128),
             "backward wide sm90 sm_90a nvrtc 13.0 bf16 128x128 plain keys 176: 128 bytes of static shared memory, tiles begin at"),
            (kernel(registers=0), "the compiler's log does not speak of it"),
        ):
            code, text, report = self.run_script([kernel(), bad])
            self.assertEqual(code, 1, text)
            self.assertIn(words, text)
            self.assertEqual(len(report.findall("testcase/failure")), 7)

    def test_tiles_of_wgmma_may_lie_behind_aligned_memory(self):
        for shared_bytes in (0, 1024):
            code, text, _ = self.run_script([hopper(shared_bytes=shared_bytes)])
            self.assertEqual(code, 0, text)

    def test_rules_and_shifted_rows_may_spill_a_little(self):
        for constants, kind in (({"kDropout": "true"}, "rules"), ({"kCopyBytes": "2"}, "other")):
            code, text, _ = self.run_script([kernel(constants, spill_store_bytes=8)])
            self.assertEqual(code, 0, text)
            self.assertIn(f"16-bit {kind}: 8 bytes spilled at most", text)

    def test_without_a_compiler_it_passes_only_if_told_to(self):
        code, text, _ = self.run_script([], code=4, error="narrows: no NVRTC")
        self.assertEqual(code, 1)
        self.assertIn("no NVRTC", text)
        code, text, _ = self.run_script([], "--may-skip", code=4, error="narrows: no NVRTC")
        self.assertEqual(code, 0)
        self.assertIn("no NVRTC", text)
        self.assertEqual(self.run_script([], "--may-skip", code=1, error="narrows: does not compile")[0], 1)

    def test_no_kernels_are_no_pass(self):
        self.assertEqual(self.run_script([])[0], 1)


if __name__ == "__main__":
    unittest.main()
