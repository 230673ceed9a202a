#!/usr/bin/env python3
"""Installs a build into a temporary prefix and uses it from a program outside the tree.

check.py BUILD PREFIX_NAME VERSION CXX: by find_package, by pkg-config in CMake and by pkg-config on a compiler's command line.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*command, env=None):
    print("+", shlex.join(map(str, command)), flush=True)
    result = subprocess.run(list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(result.stdout, end="", flush=True)
    if result.returncode != 0:
        sys.exit(f"failed with status {result.returncode}: {shlex.join(map(str, command))}")
    return result.stdout


def single(prefix, pattern):
    found = list(prefix.rglob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} under {prefix}, found {found}")
    return found[0]


def build_with_cmake(work, env, version, compiler, *options):
    binary = work / ("build" + str(len(list(work.iterdir()))))
    run("cmake", "-S", work / "consumer", "-B", binary, f"-DCMAKE_CXX_COMPILER={compiler}", f"-DEXPECTED_VERSION={version}", *options, env=env)
    run("cmake", "--build", binary, env=env)
    run(binary / "consumer", env=env)


def build_by_hand(work, env, version, compiler, libraries):
    flags = shlex.split(run("pkg-config", "--cflags", "--libs", "narrows", env=env))
    program = work / "by hand"
    run(compiler, "-std=c++20", f'-DEXPECTED_VERSION="{version}"', work / "consumer/main.cpp", "-o", program, *flags)
    run(program, env={**env, "LD_LIBRARY_PATH": str(libraries)})
    if run("pkg-config", "--modversion", "narrows", env=env).strip() != version:
        sys.exit(f"narrows.pc does not say version {version}")


def main():
    if len(sys.argv) != 5:
        sys.exit("usage: check.py BUILD PREFIX_NAME VERSION CXX")
    build, prefix_name, version, compiler = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="narrows-consumer-") as folder:
        work = Path(folder)
        prefix = work / prefix_name
        run("cmake", "--install", build, "--prefix", prefix)
        shutil.copytree(Path(__file__).parent, work / "consumer")
        pc = single(prefix, "narrows.pc")
        env = {**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}
        build_with_cmake(work, env, version, compiler, f"-DCMAKE_PREFIX_PATH={prefix}")
        build_with_cmake(work, env, version, compiler, "-DUSE_PKG_CONFIG=ON")
        build_by_hand(work, env, version, compiler, pc.parent.parent)
        command = prefix / "bin/narrows"
        if command.exists():
            run(command, "--version")
    return 0


if __name__ == "__main__":
    sys.exit(main())
