#!/usr/bin/env python3
"""Checks the layers of the source tree: `layers.py ROOT` prints every breach as FILE:LINE: TEXT and exits with 1 if any.
`layers.py --includes-only ROOT`, which is part of every build, leaves out the sizes of files.

Layers, lowest first; a file may include its own layer and lower ones:
include/narrows, src/shared, src/core, src/plan, src/cpu, src/kernels, src/cuda, src/dist, src/api.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple, Optional

LAYERS = ["include/narrows", "src/shared", "src/core", "src/plan", "src/cpu", "src/kernels", "src/cuda", "src/dist", "src/api"]
SIBLINGS = {"src/cuda": {"src/cpu"}}
# Device text and the words shared with it see no host code and no system header.
ONLY = {"src/shared": {"src/shared"}, "src/kernels": {"src/shared", "src/kernels"}}
GENERATED = {"src/kernels": {"config.cuh"}}

CODE = {".h", ".hpp", ".cuh", ".c", ".cpp", ".cu"}
SIZED = CODE | {".py", ".pyi", ".cmake"}
SIZED_FOLDERS = ["include", "src", "tools", "python", "bench", "tests", "examples"]
MAX_LINES = 400

# C++ headers have neither suffix nor folder; of the others, these belong to the language, the system or the compiler.
C_HEADERS = {
    "dirent.h", "dlfcn.h", "errno.h", "fcntl.h", "float.h", "limits.h", "pthread.h", "sched.h", "stdbool.h", "stddef.h", "stdint.h",
    "stdlib.h", "string.h", "time.h", "unistd.h", "cpuid.h", "immintrin.h", "arm_neon.h", "sys/auxv.h", "sys/file.h", "sys/mman.h",
    "sys/stat.h", "sys/syscall.h", "sys/types.h", "asm/hwcap.h", "linux/futex.h", "asm/prctl.h",
}

# A directive is kept; comments and literals are blanked so that text in them is not taken for a directive.
TOKEN = re.compile(
    r'(?P<directive>^[ \t]*#[ \t]*(?:include|define)\b[^\n]*)'
    r'|(?P<raw>R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)")'
    r'|/\*.*?\*/|//[^\n]*|\'\\?"\'|"(?:\\.|[^"\\\n])*"',
    re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r'#\s*include\s*(?:"(?P<quoted>[^"]+)"|<(?P<angled>[^>]+)>)?')


class Include(NamedTuple):
    line: int
    spelling: str  # as written, with its quotes or brackets
    name: str
    quoted: bool


class Breach(NamedTuple):
    path: Path
    line: int
    text: str


def directives(text):
    """Yields (line, directive) for each #include and #define outside comments and literals."""
    for match in TOKEN.finditer(text):
        if match["directive"]:
            yield text.count("\n", 0, match.start("directive")) + 1, match["directive"].strip()


class Tree:
    def __init__(self, root: Path):
        self.root = root.resolve()
        self.text_cache = {}

    def files(self, folders, suffixes):
        for folder in folders:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in suffixes and path.is_file():
                    yield path

    def text(self, path):
        if path not in self.text_cache:
            self.text_cache[path] = path.read_text(encoding="utf-8", errors="replace")
        return self.text_cache[path]

    def layer(self, path) -> Optional[str]:
        relative = path.relative_to(self.root).as_posix()
        return next((layer for layer in LAYERS if relative.startswith(layer + "/")), None)

    def resolve(self, includer, include) -> Optional[Path]:
        """The file of this tree that an include means, or None for one from outside."""
        roots = [includer.parent] if include.quoted else []
        for folder in [*roots, self.root / "include", self.root / "src", self.root]:
            path = (folder / include.name).resolve()
            if path.is_file() and self.root in path.parents:
                return path
        return None

    def includes(self, path):
        for line, directive in directives(self.text(path)):
            match = INCLUDE.match(directive)
            if match is None:
                continue
            name = match["quoted"] or match["angled"]
            yield Include(line, directive, name or "", match["quoted"] is not None)


def layer_rule(own, target):
    """Why layer `own` may not include layer `target` (None: outside the layers), or None where it may."""
    if target is None:
        return "the library includes nothing from tools, tests, python or bench"
    if own in ONLY and target not in ONLY[own]:
        return f"{own} includes only {' and '.join(sorted(ONLY[own]))}"
    if target in SIBLINGS.get(own, ()):
        return f"{own} and {target} never see each other"
    if LAYERS.index(target) > LAYERS.index(own):
        return f"{own} is below {target}; includes only point up the list " + ", ".join(LAYERS)
    return None


def check_include(tree, path, include):
    own = tree.layer(path)
    if not include.name:
        return "an include is spelled with quotes or brackets, so that this check can read it"
    if include.name in GENERATED.get(own, ()):
        return None
    target = tree.resolve(path, include)
    if target is not None:
        return layer_rule(own, tree.layer(target))
    if include.quoted:
        return "no such file beside the includer or under include/ or src/"
    if own in ONLY:
        return f"{own} includes no system header"
    if re.search(r"[./]", include.name) and include.name not in C_HEADERS:
        return "the library includes its own files, the standard library and system headers listed in tests/layers.py only"
    return None


def check_layers(tree):
    for path in tree.files(["include", "src"], CODE):
        if tree.layer(path) is None:
            yield Breach(path, 1, "lies in no layer; the layers are " + ", ".join(LAYERS))
            continue
        for include in tree.includes(path):
            rule = check_include(tree, path, include)
            if rule:
                yield Breach(path, include.line, f"{include.spelling}: {rule}")
        if tree.layer(path) == "src/shared":
            for line, directive in directives(tree.text(path)):
                if not INCLUDE.match(directive):
                    yield Breach(path, line, f"{directive}: src/shared defines no macros")


def check_oracle(tree):
    """The oracle states the contract a second time: it must reach the public header and nothing else of this tree."""
    allowed = re.compile(r"include/narrows/narrows\.hpp|src/cpu/reference[^/]*")
    for start in sorted((tree.root / "src/cpu").glob("reference*")):
        seen, pending = {start}, [(start, "")]
        while pending:
            path, route = pending.pop()
            for include in tree.includes(path):
                target = tree.resolve(path, include)
                if target is None or target in seen:
                    continue
                seen.add(target)
                name = target.relative_to(tree.root).as_posix()
                if allowed.fullmatch(name):
                    pending.append((target, f"{route}{name} -> "))
                else:
                    text = f"{include.spelling}: the oracle src/cpu/reference* includes only narrows/narrows.hpp, itself and std"
                    yield Breach(path, include.line, text + (f" (by {route}{name})" if route else ""))


def check_sizes(tree):
    for path in tree.files(SIZED_FOLDERS, SIZED):
        lines = tree.text(path).count("\n")
        if lines > MAX_LINES:
            yield Breach(path, lines, f"{lines} lines; a file has at most {MAX_LINES}")


def breaches(root, sizes=True):
    tree = Tree(Path(root))
    found = [*check_layers(tree), *check_oracle(tree), *(check_sizes(tree) if sizes else [])]
    return sorted({f"{b.path.relative_to(tree.root).as_posix()}:{b.line}: {b.text}" for b in found})


def main():
    *flags, root = sys.argv[1:] or [""]
    if flags not in ([], ["--includes-only"]) or not (Path(root) / "src").is_dir():
        print("usage: layers.py [--includes-only] ROOT   (ROOT holds src/)", file=sys.stderr)
        return 2
    found = breaches(root, sizes=not flags)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
