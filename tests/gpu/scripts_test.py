#!/usr/bin/env python3
"""tests/gpu/run and source_hash.py without a GPU: on trees made up here, and with a program that stands for the tests."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import source_hash  # noqa: E402

loader = importlib.machinery.SourceFileLoader("gpu_run", str(HERE / "run"))
gpu_run = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
loader.exec_module(gpu_run)

TREE = {
    "src/shared/mask.h": "// Which keys.\nint a = 1;  // one\n\n/* two\n lines */ int b = 2;\n",
    "src/kernels/forward.cu": 'const char* s = "// no comment";\n',
    "tests/gpu/run": "#!/usr/bin/env python3\n# why\nx = '# no comment'  # why\n",
    "tests/gpu/record.json": "{}\n",
    "src/core/other.hpp": "int c;\n",
}


class Tree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in TREE.items():
            self.write(name, text)
        self.hash = source_hash.source_hash(self.root)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def changes(self, name, text):
        self.write(name, text)
        changed = source_hash.source_hash(self.root) != self.hash
        self.write(name, TREE[name])
        self.assertEqual(source_hash.source_hash(self.root), self.hash)
        return changed


class SourceHash(Tree):
    def test_comments_and_blank_lines_do_not_count(self):
        self.assertFalse(self.changes("src/shared/mask.h", "int a = 1;\n\n\n  /* more */\n int b = 2; // two\n"))
        self.assertFalse(self.changes("tests/gpu/run", "#!/usr/bin/env python3\nx = '# no comment'\n\n# other\n"))

    def test_code_and_strings_count(self):
        self.assertTrue(self.changes("src/shared/mask.h", TREE["src/shared/mask.h"].replace("= 2", "= 3")))
        self.assertTrue(self.changes("src/kernels/forward.cu", 'const char* s = "// other comment";\n'))
        self.assertTrue(self.changes("tests/gpu/run", "#!/usr/bin/env python3\nx = '# another'\n"))

    def test_what_looks_like_a_comment(self):
        for text in ('R"x(// no)x" y', "'\"' // yes", "1'000'000 // yes", '"\\"// no" z', "a / b // yes"):
            stripped = source_hash.stripped(text, False)
            self.assertEqual(stripped, text.removesuffix("// yes").rstrip())
        self.assertEqual(source_hash.stripped("a /* x */ b", False), "a   b")
        self.assertEqual(source_hash.stripped("// a \\\nstill\nint b;", False), "int b;")

    def test_files_count_by_folder_and_name(self):
        self.assertFalse(self.changes("src/core/other.hpp", "int d;\n"))
        self.assertFalse(self.changes("tests/gpu/record.json", '{"date": 1}\n'))
        self.write("src/plan/new.cpp", "")
        self.assertNotEqual(source_hash.source_hash(self.root), self.hash)

    def test_the_cpp_file_is_written_when_it_changes(self):
        target = self.root / "hash.cpp"
        for _ in range(2):
            self.assertEqual(source_hash.main([str(self.root), "--write", str(target)]), 0)
        self.assertIn(self.hash, target.read_text())
        before = target.stat().st_mtime_ns
        source_hash.main([str(self.root), "--write", str(target)])
        self.assertEqual(target.stat().st_mtime_ns, before)


class Check(Tree):
    def complaints(self, **record):
        self.write("tests/gpu/record.json", json.dumps(record))
        return source_hash.complaints(self.root)

    def good(self, **changes):
        suites = {"GpuCases/sm80": {"passed": 3, "failed": 0, "skipped": 0}}
        seconds = dict.fromkeys(("cases", "sanitize", "stress", "bench"), 1)
        return {"source_hash": self.hash, "suites": suites, "seconds": seconds, **changes}

    def test_a_record_of_this_tree_stands(self):
        self.assertEqual(self.complaints(**self.good()), [])

    def test_a_record_of_another_tree_does_not(self):
        self.assertRegex(self.complaints(**self.good(source_hash="0"))[0], "is of source hash 0.*run tests/gpu/run on a GPU")

    def test_reasons_in_words_stand(self):
        self.assertEqual(self.complaints(**self.good(source_hash="0", unrun="no GPU could be had this week")), [])
        for reason in ("", "later", 7):
            self.assertIn("must say in words", self.complaints(**self.good(source_hash="0", unrun=reason))[0])

    def test_failures_never_stand(self):
        failed = self.good(suites={"GpuCases/sm80": {"passed": 3, "failed": 1, "skipped": 0}}, unrun="no GPU could be had")
        self.assertIn("1 failed", self.complaints(**failed)[0])

    def test_every_stage_must_have_run(self):
        self.assertIn("sanitize was not run", self.complaints(**self.good(seconds={"cases": 1, "stress": 1, "bench": 1}))[0])
        self.assertIn("no suite was run", self.complaints(**self.good(suites={}))[0])

    def test_a_damaged_record_is_named(self):
        self.write("tests/gpu/record.json", "{")
        self.assertIn("tests/gpu/record.json", source_hash.complaints(self.root)[0])


# Reports as GoogleTest does: one suite with a test that passes, one that fails where told to, and one that is skipped.
FAKE = """#!/usr/bin/env python3
import json, os, pathlib, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
report = pathlib.Path(options["gtest_output"].removeprefix("json:"))
tests = options["gtest_filter"]
with open(os.environ["FAKE_LOG"], "a") as log:
    print(tests, os.environ.get("GTEST_SHARD_INDEX"), os.environ.get("NARROWS_TEST_MEMORY", ""), file=log)
if tests.startswith("Gpu"):
    found = {"name": "x", "first_call_ns": "4000000", "host_call_ns": "3500"} if "Bench" in tests else {
        "name": "describes_itself", "source_hash": os.environ["FAKE_HASH"], "device": "Fake", "multiprocessors": "9", "driver": "13.0"}
    if os.environ.get("FAKE_ABSENT"):
        del found["device"]
    report.write_text(json.dumps({"testsuites": [{"name": "GpuBuild", "testsuite": [found]}]}))
    sys.exit(0)
if os.environ.get("FAKE_CRASH"):
    sys.exit(-11)
suite = "All/GpuStress" if tests == "*Stress*" else "table/GpuCases"
cases = [{"name": "a", "family": "sm80", "status": "RUN", "result": "COMPLETED"},
         {"name": "b", "family": "sm80", "status": "RUN", "result": "SKIPPED", "skipped": []},
         {"name": "c", "family": "sm80", "status": "NOTRUN", "result": "SUPPRESSED"}]
if os.environ.get("FAKE_FAILURE"):
    cases.append({"name": "d", "family": "sm80", "status": "RUN", "result": "COMPLETED", "failures": [{}]})
report.write_text(json.dumps({"testsuites": [{"name": suite, "testsuite": cases}]}))
sys.exit(1 if os.environ.get("FAKE_FAILURE") else 0)
"""


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.record = self.folder / "record.json"
        program = self.folder / "narrows_gpu_tests"
        program.write_text(FAKE, encoding="utf-8")
        program.chmod(0o755)
        self.here = source_hash.source_hash(ROOT)

    def run_stages(self, *stages, **environment):
        """Exit code and what it said."""
        environment = {"FAKE_LOG": str(self.folder / "log"), "FAKE_HASH": self.here, **environment}
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), unittest.mock.patch.dict("os.environ", environment):
            code = gpu_run.main([*stages, "--binaries", str(self.folder), "--record", str(self.record), "--jobs", "3"])
        return code, said.getvalue()

    def read(self):
        return json.loads(self.record.read_text(encoding="utf-8"))

    def test_shards_are_counted_by_suite_and_family(self):
        code, _ = self.run_stages("build", "cases")
        record = self.read()
        self.assertEqual(code, 0)
        self.assertEqual(record["suites"], {"GpuCases/sm80": {"passed": 3, "failed": 0, "skipped": 3}})
        self.assertEqual((record["source_hash"], record["device"]), (self.here, "Fake, 9 multiprocessors, CUDA 13.0"))
        self.assertEqual(list(record["seconds"]), ["cases"])

    def test_stages_add_up_and_replace_their_own(self):
        self.run_stages("cases", FAKE_FAILURE="1")
        self.assertEqual(self.read()["suites"]["GpuCases/sm80"]["failed"], 3)
        self.run_stages("stress")
        self.assertEqual(set(self.read()["suites"]), {"GpuCases/sm80", "GpuStress/sm80"})
        self.run_stages("cases")
        self.assertEqual(self.read()["suites"]["GpuCases/sm80"], {"passed": 3, "failed": 0, "skipped": 3})
        self.assertEqual(set(self.read()["seconds"]), {"cases", "stress"})

    def test_parts_of_another_tree_are_dropped(self):
        self.record.write_text(json.dumps({"source_hash": "0", "suites": {"GpuStress/sm80": {"passed": 1, "failed": 0, "skipped": 0}},
                                           "bench": [{"ms": 1}], "seconds": {"stress": 1}, "unrun": "because of this"}))
        self.run_stages("cases")
        record = self.read()
        self.assertEqual((list(record["suites"]), record["bench"], "unrun" in record), (["GpuCases/sm80"], [], False))

    def test_failures_and_crashes_end_in_exit_code_1(self):
        code, said = self.run_stages("cases", FAKE_FAILURE="1")
        self.assertEqual((code, "FAILED GpuCases.d" in said), (1, True))
        code, said = self.run_stages("cases", FAKE_CRASH="1")
        self.assertEqual(code, 1)
        self.assertEqual(self.read()["suites"]["process/any"]["failed"], 3)

    def test_a_program_of_another_tree_is_refused(self):
        code, said = self.run_stages("cases", FAKE_HASH="0")
        self.assertEqual((code, self.record.exists()), (1, False))
        self.assertIn("is of source hash 0, and the tree's is", said)

    def test_without_a_gpu_nothing_is_recorded(self):
        code, said = self.run_stages("cases", FAKE_ABSENT="1")
        self.assertEqual((code, self.record.exists()), (1, False))
        self.assertIn("no GPU here", said)

    def test_the_sanitizer_knows_plain_memory_or_is_skipped(self):
        with unittest.mock.patch("shutil.which", lambda name: None):
            self.run_stages("sanitize")
        self.assertEqual(self.read()["suites"]["memcheck.process/any"]["skipped"], 1)
        sanitizer = self.folder / "compute-sanitizer"
        sanitizer.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
        sanitizer.chmod(0o755)
        with unittest.mock.patch("shutil.which", lambda name: str(sanitizer)):
            code, _ = self.run_stages("sanitize")
        self.assertEqual((code, self.read()["suites"]["racecheck.GpuCases/sm80"]["passed"]), (0, 3))
        self.assertIn(" plain", (self.folder / "log").read_text())

    def test_host_costs_become_rows(self):
        suite = gpu_run.Suite(unittest.mock.Mock(binaries=self.folder, cache=None), ROOT)
        suite.environment.update(FAKE_LOG=str(self.folder / "log"), FAKE_HASH=self.here)
        with contextlib.redirect_stderr(io.StringIO()):
            rows = {row["case"]: row["ms"] for row in suite.host_rows()}
        self.assertEqual(rows, {"first_call": 4.0, "host_call": 0.0035})

    def test_rows_of_all_operations_are_kept(self):
        (self.folder / "libnarrows.so").write_text("")
        suite = gpu_run.Suite(unittest.mock.Mock(binaries=self.folder, cache=None), ROOT)

        def call(command, _):
            op = command[command.index("--op") + 1]
            Path(command[-1]).write_text(json.dumps({"op": op}) + "\n", encoding="utf-8")
            return (1 if op == "backward" else 0), ""

        with contextlib.redirect_stderr(io.StringIO()):
            with unittest.mock.patch.multiple(suite, call=call, host_rows=lambda: [{"op": "host"}]):
                suite.bench_stage()
        self.assertEqual([row["op"] for row in suite.bench], ["forward", "backward", "decode", "host"])
        self.assertEqual([(suite.results.suites[f"bench.{op}/any"]["failed"]) for op in ("forward", "backward", "decode")], [0, 1, 0])
        self.assertEqual(suite.results.failures, ["bench.backward: exit code 1"])
        self.assertEqual({gpu_run.stage_of(name) for name in suite.results.suites}, {"bench"})

    def test_an_unknown_stage_is_refused(self):
        with self.assertRaises(SystemExit):
            self.run_stages("everything")


if __name__ == "__main__":
    unittest.main()
