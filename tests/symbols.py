#!/usr/bin/env python3
"""What the built library shows and needs. symbols.py exported LIBRARY | needed LIBRARY | isa ARCHIVE

exported  every dynamic symbol belongs to namespace narrows or is a C function narrows_*
needed    only the C and C++ run-time libraries are needed, and the soname carries the major version
isa       no object compiled for a newer instruction set defines a function that another object defines too: the linker
          keeps one of them, perhaps for a machine that cannot execute it
"""

import re
import subprocess
import sys

PUBLIC = re.compile(r"(?:(?:vtable|typeinfo|typeinfo name|VTT|guard variable|construction vtable) for )?narrows::|narrows_\w+$")
NEEDED = re.compile(r"(?:libc|libm|libpthread|libstdc\+\+|libgcc_s|libc\+\+|libc\+\+abi|ld-linux[\w-]*)\.so\.\d+")
ISA_OBJECT = re.compile(r"_(?:avx\w*|amx)\.cpp\.o$")


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def exported(library):
    names = [line.split(maxsplit=2)[2] for line in output("nm", "-DC", "--defined-only", library).splitlines()]
    if not any(name.startswith("narrows::forward(") for name in names):
        yield "narrows::forward is not exported"
    for name in names:
        if not PUBLIC.match(name):
            yield f"exported, but not narrows:: or narrows_*: {name}"


def needed(library):
    dynamic = output("readelf", "-dW", library)
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if not NEEDED.fullmatch(name):
            yield f"needs {name}; the library links the standard library and threads only"
    if re.findall(r"\(SONAME\).*\[(.+)\]", dynamic) != ["libnarrows.so.0"]:
        yield "the soname is not libnarrows.so.0"


def isa(archive):
    owners, current = {}, ""
    for line in output("nm", "--defined-only", archive).splitlines():
        if line.endswith(".o:"):
            current = line[:-1]
        fields = line.split()
        if len(fields) == 3 and fields[1] == "W":
            owners.setdefault(fields[2], set()).add(current)
    for name, objects in sorted(owners.items()):
        newer = sorted(filter(ISA_OBJECT.search, objects))
        if newer and len(objects) > 1:
            yield f"{output('c++filt', name).strip()} is defined in {', '.join(newer)} and in {', '.join(sorted(objects - set(newer))) or 'no other'}"


def main():
    checks = {"exported": exported, "needed": needed, "isa": isa}
    if len(sys.argv) != 3 or sys.argv[1] not in checks:
        print(__doc__, file=sys.stderr)
        return 2
    found = list(checks[sys.argv[1]](sys.argv[2]))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
