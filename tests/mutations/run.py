#!/usr/bin/env python3
"""run.py ROOT [BUILD [NAME...]]: puts each defect of defects.json into the library and expects its tests to fail.

ROOT is the source tree, BUILD a build of it, by make or ninja, that holds narrows_tests. The tree is never written: a defect
is a copy of one file in a folder that the include path names first; its units are compiled into a scratch folder and linked
before everything else. Defects that only a GPU shows ("gpu": true) are for gpu.py. Without names: all the others. Without BUILD: only looks for their texts in the tree. One line a defect,
then `N passed, N failed`; a defect that no test catches, that does not compile, or whose text is no longer there has failed.

An inline function of a header also lives in the test objects, without the defect. The linker keeps the first copy that it
meets, so the units with the defect come first on its line; but a call that the compiler put in place inside a test stays as
it was. The tests of a header by itself, tests/shared, are therefore no witnesses here.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# Units of the tests that hold texts of the library: over plain C++, for instruction sets that the machine lacks, and a GPU's, lane
# by lane. A defect names them in `units`.
KERNELS_OF_TESTS = re.compile(r"tests/(cpu/tile_kernels_\w*wide|kernels/\w+_test)\.cpp$")
# Folders of objects that narrows_tests is linked from; other programs compile some of the same units.
LINKED = tuple(f"CMakeFiles/{target}.dir/" for target in (
    "narrows_tests", "narrows_wide_kernels", "narrows_whole_kernel_tests", "narrows_register_tests"))


def included(name):
    return name if name.startswith("tests/") else f"src/{name}"


class Library:
    """What the build knows about the library's units and the test binary."""

    def __init__(self, root, build):
        self.root, self.build = root, build
        commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
        source = root / "src"
        self.commands = {}
        for entry in commands:
            file = Path(entry["file"])
            in_library = file.is_relative_to(source) and "narrows_objects.dir" in entry["command"]
            in_tests = KERNELS_OF_TESTS.search(entry["file"]) and any(folder in entry["command"] for folder in LINKED)
            if in_library or in_tests:
                self.commands[file.relative_to(root).as_posix()] = (shlex.split(entry["command"]), entry["directory"])
        self.link = link_command(build)
        self.includes = {
            file.relative_to(root).as_posix(): {included(name) for name in INCLUDE.findall(file.read_text("utf-8"))}
            for folder in (source, root / "tests" / "cpu", root / "tests" / "kernels")
            for file in folder.rglob("*.[hc]*")
        }

    def units_of(self, file):
        """The CPU backend's units that include the file, also through another one, and those of the tests' own kernels."""
        reached, news = {file}, {file}
        while news:
            news = {name for name, included in self.includes.items() if included & news} - reached
            reached |= news
        return sorted(unit for unit in reached
                      if unit in self.commands and (unit.startswith("src/cpu/") or KERNELS_OF_TESTS.search(unit)))

    def compile(self, unit, overlay, target):
        command, directory = self.commands[unit]
        command = list(command)
        command[command.index("-o") + 1] = str(target)
        copy = overlay / unit
        if copy.exists():
            command[command.index("-c") + 1] = str(copy)
        first_option = next(place for place, word in enumerate(command) if word.startswith("-"))
        command[first_option:first_option] = [f"-I{overlay / 'src'}"]
        return run([*command, "-w"], directory)

    def link_tests(self, units, objects, target):
        # A test's unit stands in the place of its object, which the linker would take beside it.
        command = [word for word in self.link if not word.endswith(tuple(f"/{unit}.o" for unit in units))]
        command[command.index("-o") + 1] = str(target)
        first = next(place for place, word in enumerate(command) if word.endswith(".o"))
        command[first:first] = map(str, objects)
        return run(command, self.build)


def link_command(build, program="narrows_tests"):
    text = build / f"CMakeFiles/{program}.dir/link.txt"
    if text.exists():
        return shlex.split(text.read_text(encoding="utf-8"))
    commands = subprocess.run(["ninja", "-t", "commands", program], cwd=build, stdout=subprocess.PIPE, text=True,
                              check=True).stdout
    # `: && c++ ... && :`, so that CMake can add steps before and after.
    return shlex.split(commands.splitlines()[-1].split("&&")[1])


def run(command, directory, timeout=None):
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", stdin=subprocess.DEVNULL, timeout=timeout, check=False)
    return done.returncode, done.stdout


def run_tests(binary, directory, tests, limit):
    """Stops at the first failure. What happened, and the text."""
    command = [str(binary), f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"]
    try:
        code, text = run(command, directory, limit)
    except subprocess.TimeoutExpired:
        return "timeout", f"more than {limit:.0f} s"
    if code != 0:
        return "failed", text if code > 0 else f"{text}\nkilled by signal {-code}"
    ran = re.search(r"^\[==========\] (\d+) tests? from", text, re.MULTILINE)
    return ("passed" if ran and int(ran[1]) > 0 else "no tests"), text


def first_failure(text):
    failure = re.search(r"^\[  FAILED  \] ([\w/.]+)", text, re.MULTILINE)
    return failure[1] if failure else text.strip().splitlines()[-1]


def try_intact(library, tests):
    """(outcome, text, seconds)"""
    started = time.monotonic()
    outcome, text = run_tests(library.build / "narrows_tests", library.build, tests, 600)
    return outcome, text, time.monotonic() - started


def times_found(root, defect):
    return (root / defect["file"]).read_text(encoding="utf-8").count(defect["find"])


def try_defect(library, defect, limit, scratch):
    """(caught, text)"""
    file = library.root / defect["file"]
    source = file.read_text(encoding="utf-8")
    units = library.units_of(defect["file"])
    if "units" in defect:
        strange = set(defect["units"]) - set(units)
        if strange:
            return False, f"{', '.join(strange)}: no units of this file"
        units = defect["units"]
    else:
        units = [unit for unit in units if unit.startswith("src/")]
    overlay = scratch / "overlay"
    copy = overlay / defect["file"]
    copy.parent.mkdir(parents=True)
    copy.write_text(source.replace(defect["find"], defect["replace"]), encoding="utf-8")
    objects = []
    for number, unit in enumerate(units):
        objects.append(scratch / f"{number}.o")
        code, text = library.compile(unit, overlay, objects[-1])
        if code != 0:
            return False, f"{unit} does not compile\n{text}"
    binary = scratch / "tests"
    code, text = library.link_tests(units, objects, binary)
    if code != 0:
        return False, f"does not link\n{text}"
    outcome, text = run_tests(binary, scratch, defect["tests"], limit)
    if outcome == "failed":
        return True, f"caught by {first_failure(text)}"
    if outcome == "timeout":
        return True, f"caught: {text}"
    return False, f"SURVIVED {defect['tests']}"


def try_and_time(library, defect, limit):
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="narrows-mutation-"))
    try:
        caught, text = try_defect(library, defect, limit, scratch)
    finally:
        shutil.rmtree(scratch)
    return defect["name"], caught, text, time.monotonic() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("build", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    table = json.loads(Path(__file__).with_name("defects.json").read_text(encoding="utf-8"))
    defects = [defect for defect in table if not arguments.names or defect["name"] in arguments.names]
    lost = [defect for defect in defects if times_found(root, defect) != 1]
    for defect in lost:
        print(f"{defect['name']}: its text occurs {times_found(root, defect)} times in {defect['file']}, not once")
    if lost or not arguments.build:
        return 1 if lost or not defects else 0
    defects = [defect for defect in defects if not defect.get("gpu")]

    library = Library(root, arguments.build.resolve())
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        # Tests that fail anyway, or that are no longer there, would prove nothing.
        filters = sorted({defect["tests"] for defect in defects})
        intact = dict(zip(filters, pool.map(lambda tests: try_intact(library, tests), filters)))
        wrong = [tests for tests in filters if intact[tests][0] != "passed"]
        for tests in wrong:
            print(f"{tests}: {intact[tests][0]} without any defect\n{intact[tests][1]}")
        if wrong:
            return 1
        failed = 0
        # Tests that hang have noticed something; tests on a busy machine have not.
        jobs = [pool.submit(try_and_time, library, defect, 60 + 10 * intact[defect["tests"]][2]) for defect in defects]
        for job in concurrent.futures.as_completed(jobs):
            name, caught, text, seconds = job.result()
            failed += not caught
            print(f"{'ok  ' if caught else 'FAIL'} {name} ({seconds:.1f} s): {text}", flush=True)
    print(f"{len(defects) - failed} passed, {failed} failed")
    return 1 if failed or not defects else 0


if __name__ == "__main__":
    sys.exit(main())
