#!/usr/bin/env python3
"""Each breach that tests/layers.py promises to find, planted in a small tree that is otherwise clean."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import layers

CLEAN = {
    "include/narrows/narrows.hpp": "#include <vector>\n",
    "include/narrows/narrows.h": "#include <stdint.h>\n",
    "src/shared/mask.h": "#pragma once\n",
    "src/shared/merge.h": '#include "mask.h"\n',
    "src/core/problem.hpp": '#include <narrows/narrows.hpp>\n#include "shared/mask.h"\n',
    "src/plan/plan.hpp": '#include "core/problem.hpp"\n',
    "src/cpu/forward.cpp": '#include <immintrin.h>\n#include "plan/plan.hpp"\n',
    "src/cpu/reference.hpp": "#include <narrows/narrows.hpp>\n",
    "src/cpu/reference.cpp": '#include "cpu/reference.hpp"\n#include <cmath>\n',
    "src/kernels/forward.cu": '#include "config.cuh"\n#include "shared/mask.h"\n',
    "src/cuda/run.cpp": '#include "plan/plan.hpp"\n',
    "src/api/attention.cpp": '#include "cpu/reference.hpp"\n#include "cuda/run.hpp"\n',
    "src/cuda/run.hpp": "#pragma once\n",
    "tools/narrows.cpp": "#include <fmt/core.h>\n",
}


class Layers(unittest.TestCase):
    def found(self, changes):
        with tempfile.TemporaryDirectory(prefix="narrows layers ") as folder:
            for name, text in {**CLEAN, **changes}.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return layers.breaches(folder)

    def expect(self, name, text, line, *words):
        found = self.found({name: text})
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(f"{name}:{line}: "), found[0])
        for word in words:
            self.assertIn(word, found[0])

    def test_clean_tree_passes(self):
        self.assertEqual(self.found({}), [])

    def test_every_backward_pair_is_found_and_every_upward_pair_passes(self):
        closed = {("src/cuda", "src/cpu")}
        closed |= {("src/shared", "include/narrows")}
        closed |= {("src/kernels", low) for low in ["include/narrows", "src/core", "src/plan", "src/cpu"]}
        for own in layers.LAYERS:
            for target in layers.LAYERS:
                backward = layers.LAYERS.index(target) > layers.LAYERS.index(own) or (own, target) in closed
                header = f"{target}/probe_target.hpp"
                found = self.found({header: "", f"{own}/probe.hpp": f'// one\n#include "{header.removeprefix("src/")}"\n'})
                self.assertEqual(len(found), 1 if backward else 0, (own, target, found))
                if backward:
                    self.assertTrue(found[0].startswith(f"{own}/probe.hpp:2: #include"), found[0])

    def test_backward_include_names_file_line_include_and_rule(self):
        self.expect("src/core/error.hpp", '#pragma once\n#include "plan/plan.hpp"\n', 2, '#include "plan/plan.hpp"',
                    "src/core is below src/plan")

    def test_backward_include_by_relative_path(self):
        self.expect("src/core/error.hpp", '#include "../plan/plan.hpp"\n', 1, "below src/plan")

    def test_backward_include_in_brackets(self):
        self.expect("src/plan/cpu.cpp", "#include <cpu/reference.hpp>\n", 1, "below src/cpu")

    def test_cpu_and_cuda_never_see_each_other(self):
        self.expect("src/cuda/run.cpp", '#include "cpu/reference.hpp"\n', 1, "never see each other")
        self.expect("src/cpu/pool.cpp", '#include "cuda/run.hpp"\n', 1, "below src/cuda")

    def test_shared_includes_no_system_header(self):
        self.expect("src/shared/philox.h", "#include <cstdint>\n", 1, "src/shared includes no system header")

    def test_shared_includes_nothing_outside_shared(self):
        self.expect("src/shared/philox.h", "#include <narrows/narrows.hpp>\n", 1, "only src/shared")

    def test_shared_defines_no_macro(self):
        self.expect("src/shared/philox.h", "\n#define ROUNDS 10\n", 2, "#define ROUNDS 10", "no macros")

    def test_kernels_include_no_host_code(self):
        self.expect("src/kernels/forward.cu", '#include "plan/plan.hpp"\n', 1, "only src/kernels and src/shared")

    def test_oracle_includes_nothing_from_shared(self):
        self.expect("src/cpu/reference.cpp", '#include "shared/mask.h"\n', 1, "the oracle")

    def test_oracle_reaches_nothing_from_shared_through_its_own_header(self):
        found = self.found({"src/cpu/reference_detail.hpp": '#include "shared/mask.h"\n',
                            "src/cpu/reference.hpp": '#include "cpu/reference_detail.hpp"\n'})
        self.assertTrue(any("src/cpu/reference_detail.hpp:1" in text and "by src/cpu/reference" in text for text in found), found)

    def test_oracle_includes_no_core(self):
        self.expect("src/cpu/reference.cpp", '#include "core/problem.hpp"\n', 1, "the oracle")

    def test_oracle_in_several_files_is_covered(self):
        self.expect("src/cpu/reference_backward.cpp", '#include "core/problem.hpp"\n', 1, "the oracle")

    def test_library_includes_no_tool_dependency(self):
        for header in ["fmt/core.h", "nlohmann/json.hpp", "CLI/CLI.hpp", "zip.h", "gtest/gtest.h"]:
            self.expect("src/core/error.cpp", f"#include <{header}>\n", 1, header, "standard library")

    def test_library_includes_nothing_from_tools(self):
        self.expect("src/api/c_api.cpp", '#include "tools/files/npy.hpp"\n', 1, "no such file")
        found = self.found({"tools/files/npy.hpp": "", "src/api/c_api.cpp": '#include "tools/files/npy.hpp"\n'})
        self.assertEqual(len(found), 1)
        self.assertIn("nothing from tools", found[0])

    def test_include_of_a_macro_is_refused(self):
        self.expect("src/core/error.cpp", "#include HEADER\n", 1, "quotes or brackets")

    def test_source_outside_the_layers_is_refused(self):
        self.expect("src/misc/a.cpp", "", 1, "in no layer")
        self.expect("src/a.cpp", "", 1, "in no layer")

    def test_text_of_comments_and_literals_is_not_an_include(self):
        text = ('/* a\n#include "plan/plan.hpp"\n*/\n// "\nconst char* a = "\\"/*";\nconst char b = \'"\';\n'
                'const char* c = R"x(\n#include <fmt/core.h>\n)x";\nint d = 1\'000;\n')
        self.assertEqual(self.found({"src/core/text.cpp": text}), [])
        found = self.found({"src/core/text.cpp": text + '  #  include "plan/plan.hpp"\n'})
        self.assertEqual(len(found), 1)
        self.assertIn("src/core/text.cpp:11:", found[0])

    def test_file_over_400_lines(self):
        self.assertEqual(self.found({"tools/run.cpp": "\n" * 400}), [])
        for name in ["tools/run.cpp", "src/core/error.cpp", "python/narrows/__init__.py", "tests/core/error.cpp"]:
            self.expect(name, "\n" * 401, 401, "401 lines", "at most 400")

    def test_command_prints_breaches_and_can_leave_out_sizes(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {"src/core/a.hpp": '#include "plan/b.hpp"\n', "src/plan/b.hpp": "\n" * 500}.items():
                (Path(folder) / name).parent.mkdir(parents=True)
                (Path(folder) / name).write_text(text, encoding="utf-8")
            for options, words in {(): ["src/core/a.hpp:1:", "500 lines"], ("--includes-only",): ["src/core/a.hpp:1:"]}.items():
                result = subprocess.run([sys.executable, layers.__file__, *options, folder], capture_output=True, text=True)
                self.assertEqual(result.returncode, 1)
                self.assertEqual(len(result.stdout.splitlines()), len(words), result.stdout)
                for word in words:
                    self.assertIn(word, result.stdout)


if __name__ == "__main__":
    unittest.main()
