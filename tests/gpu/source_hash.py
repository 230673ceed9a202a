#!/usr/bin/env python3
"""source_hash.py ROOT: the hash of what decides a GPU's results, without comments and blank lines.

    source_hash.py ROOT                prints it
    source_hash.py ROOT --write FILE   writes it as a C++ file, for the test program to carry; an equal file is left alone
    source_hash.py ROOT --check        compares it with tests/gpu/record.json and looks for failures there; exit code 1
"""

import argparse
import hashlib
import io
import json
import re
import sys
import tokenize
from pathlib import Path

FOLDERS = ("src/shared", "src/plan", "src/kernels", "src/cuda", "tests/gpu")
RECORD = "tests/gpu/record.json"
STAGES = ("cases", "sanitize", "stress", "bench")  # that leave something in the record

# What may hold comment signs that are none, and comments.
CPP = re.compile(
    r"""R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"     # a raw string
      | "(?:\\.|[^"\\\n])*"                             # a string
      | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'             # a character; after a digit it separates digits
      | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)""",
    re.DOTALL | re.VERBOSE,
)


def without_cpp_comments(text):
    return CPP.sub(lambda found: " " if found["comment"] else found[0], text)


def without_python_comments(text):
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:column] + line[column + len(token.string) :]
    return "".join(lines)


def stripped(text, python):
    """Only what a compiler or interpreter sees, a line each; how far a line is indented counts in Python alone."""
    text = without_python_comments(text) if python else without_cpp_comments(text)
    lines = (line.rstrip() if python else line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def files(root):
    """(path below root, is Python) of every file that counts, in one order on every machine."""
    found = []
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or name == RECORD or "__pycache__" in path.parts or path.name.startswith("."):
                continue
            python = path.suffix == ".py" or path.read_bytes().startswith(b"#!/usr/bin/env python3")
            found.append((name, python))
    return sorted(found)


def source_hash(root):
    root, total = Path(root), hashlib.sha256()
    for name, python in files(root):
        text = stripped((root / name).read_text(encoding="utf-8"), python)
        total.update(f"{name}\0{len(text)}\0{text}\0".encode())
    return total.hexdigest()


def complaints(root):
    """Why the record does not stand for this tree; nothing where it does."""
    path = Path(root) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{RECORD}: {error}"]
    for suite, counts in record.get("suites", {}).items():
        if counts["failed"]:
            return [f"{RECORD}: {suite}: {counts['failed']} failed"]
    reason, here = record.get("unrun"), source_hash(root)
    if reason is not None:
        words = isinstance(reason, str) and len(reason.split()) >= 3
        return [] if words else [f"{RECORD}: unrun: {reason!r}: must say in words why the GPU suite was not run"]
    if not record.get("suites"):
        return [f"{RECORD}: no suite was run, and unrun does not say why"]
    for stage in STAGES:
        if stage not in record.get("seconds", {}):
            return [f"{RECORD}: the stage {stage} was not run, and unrun does not say why"]
    if record.get("source_hash") != here:
        return [
            f"{RECORD}: is of source hash {record.get('source_hash')}, and the tree's is {here}: run tests/gpu/run on a GPU, "
            'or say in the record why not: "unrun": "the reason in words"'
        ]
    return []


def write_cpp(path, value):
    text = f'#include "tests/gpu/source_hash.hpp"\n\nconst char* const narrows::test::kSourceHash = "{value}";\n'
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.check:
        found = complaints(options.root)
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    if options.write:
        write_cpp(options.write, source_hash(options.root))
    else:
        print(source_hash(options.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
