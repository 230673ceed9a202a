#!/usr/bin/env python3
"""gpu.py: the defects of defects.json that are in a kernel ("gpu": true), which only a GPU can show.

    gpu.py build ROOT BUILD DIR    where there is a compiler: DIR/NAME, narrows_gpu_tests with that defect, and one without any
    gpu.py run DIR                 where there is a GPU, from the root of the source tree: each must fail its tests

BUILD is a build of ROOT that holds narrows_gpu_tests. The texts of the kernels lie in one unit; it is made anew from a copy of
them with the defect and linked before the library. A defect that faults or hangs has been noticed.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import run as mutations

TESTS, TEXTS = "narrows_gpu_tests", "embedded_sources.cpp"


def gpu_defects():
    table = json.loads(Path(__file__).with_name("defects.json").read_text(encoding="utf-8"))
    return [defect for defect in table if defect.get("gpu")]


def compile_command(build):
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if Path(entry["file"]).name == TEXTS and "narrows_objects.dir" in entry["command"]:
            return shlex.split(entry["command"]), entry["directory"]
    raise SystemExit(f"{build}: has no {TEXTS}")


def checked(command, directory):
    code, text = mutations.run(command, directory)
    if code != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{text}")


def with_defect(root, build, defect, target):
    with tempfile.TemporaryDirectory(prefix="narrows-mutation-") as folder:
        scratch = Path(folder)
        for name in ("kernels", "shared"):
            shutil.copytree(root / "src" / name, scratch / "src" / name)
        copy = scratch / defect["file"]
        copy.write_text(copy.read_text(encoding="utf-8").replace(defect["find"], defect["replace"]), encoding="utf-8")
        texts = sorted(
            file.relative_to(scratch / "src").as_posix()
            for pattern in ("kernels/*.cu", "kernels/*.cuh", "shared/*.h")
            for file in (scratch / "src").glob(pattern)
        )
        embedded = scratch / TEXTS
        checked(["cmake", f"-DSOURCE_DIR={scratch / 'src'}", f"-DFILES={','.join(texts)}", f"-DOUTPUT={embedded}", "-P",
                 str(root / "cmake" / "embed.cmake")], scratch)  # fmt: skip
        command, directory = compile_command(build)
        command[command.index("-o") + 1] = str(scratch / "texts.o")
        command[command.index("-c") + 1] = str(embedded)
        checked(command, directory)
        link = mutations.link_command(build, TESTS)
        link[link.index("-o") + 1] = str(target)
        first = next(place for place, word in enumerate(link) if word.endswith(".o"))
        link.insert(first, str(scratch / "texts.o"))
        checked(link, build)
        subprocess.run(["strip", str(target)], check=True)


def build_all(root, build, folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(build / TESTS, folder / TESTS)
    for defect in gpu_defects():
        if mutations.times_found(root, defect) != 1:
            raise SystemExit(f"{defect['name']}: its text is not once in {defect['file']}")
        with_defect(root, build, defect, folder / defect["name"])
        print(f"{defect['name']}: built", flush=True)
    return 0


def run_all(folder):
    defects, failed = gpu_defects(), 0
    for tests in sorted({defect["tests"] for defect in defects}):
        outcome, text = mutations.run_tests((folder / TESTS).absolute(), Path.cwd(), tests, 120)
        if outcome != "passed" or "SKIPPED" in text:
            print(f"{tests}: {'skipped' if outcome == 'passed' else outcome} without any defect\n{text[-2000:]}")
            return 1
    for defect in defects:
        outcome, text = mutations.run_tests((folder / defect["name"]).absolute(), Path.cwd(), defect["tests"], 60)
        caught = outcome in ("failed", "timeout")
        failed += not caught
        said = mutations.first_failure(text) if outcome == "failed" else outcome
        print(f"{'ok  ' if caught else 'FAIL'} {defect['name']}: {f'caught by {said}' if caught else 'SURVIVED'}", flush=True)
    print(f"{len(defects) - failed} passed, {failed} failed")
    return 1 if failed or not defects else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    for name in ("root", "build", "folder"):
        building.add_argument(name, type=Path)
    commands.add_parser("run").add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "build":
        return build_all(options.root.resolve(), options.build.resolve(), options.folder)
    return run_all(options.folder)


if __name__ == "__main__":
    sys.exit(main())
