#!/usr/bin/env python3
"""Puts measured rows into a Markdown page: `table.py ROWS PAGE...` with the lines that `narrows bench --json` printed, or
with tests/gpu/record.json.

Each part of a page between `<!-- bench KIND ... -->` and `<!-- /bench -->` is written anew. KIND is forward, backward, decode or
cases, all of the CPU's, or gpu, gpu_cases, gpu_backward, gpu_backward_cases or gpu_decode; `name=value,value` behind it leaves
out other rows (`<!-- bench forward dtype=fp32 d=64,128 threads=2 -->`). A page may have parts of both files; those of the other are left alone.
A record without any row of a GPU's kind says so in its part. With `--check` nothing is written, and the exit code is 1 where a
page would change.
"""

import argparse
import json
import re
import sys
from pathlib import Path

PART = re.compile(r"(<!-- bench (?P<kind>\w+)(?P<filters>[^>]*?) -->\n)(?P<old>.*?)(<!-- /bench -->)", re.DOTALL)
RATE = {"forward": "tflops", "backward": "tflops", "decode": "gbps", "cases": "tflops"}
GPU = ("gpu", "gpu_cases", "gpu_backward", "gpu_backward_cases", "gpu_decode")
KINDS = (*RATE, *GPU)
NOT_MEASURED = "Not in the record as yet.\n"
FIELDS = ("family", "dtype", "d", "sq", "sk", "causal", "case", "threads")


def read_rows(path):
    if Path(path).suffix == ".json":
        return json.loads(Path(path).read_text(encoding="utf-8")).get("bench", [])
    rows = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise SystemExit(f"{path}:{number}: no JSON: {error}") from None
    return rows


def text_of(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def kind_of(row):
    if row["backend"] == "cuda":
        if row["op"] == "decode":
            return "gpu_decode"
        if "tflops" not in row:
            return ""
        return "gpu" + ("_backward" if row["op"] == "backward" else "") + ("" if row["case"] in ("", "gqa4") else "_cases")
    return "cases" if row["op"] == "forward" and row["case"] != "" else row["op"]


def chosen(rows, kind, filters):
    """The rows of a part, in the order of the file."""
    wanted = {}
    for word in filters.split():
        name, found, values = word.partition("=")
        if not found or name not in FIELDS:
            raise SystemExit(f"bench {kind}: '{word}': must be NAME=VALUE,... with one of {', '.join(FIELDS)}")
        wanted[name] = set(values.split(","))
    if kind not in KINDS:
        raise SystemExit(f"bench {kind}: must be one of {', '.join(KINDS)}")
    for row in rows:
        if kind_of(row) != kind:
            continue
        if all(text_of(row[name]) in values for name, values in wanted.items()):
            yield row


def ratio_text(value):
    return "-" if value is None else f"{value:.2f}x"


def deterministic_rates(rows):
    """{shape: its deterministic rate by the plain one}"""
    return {shape(row): row["of_plain"] for row in rows if row.get("case") == "deterministic"}


def shape(row):
    return tuple(row[name] for name in ("op", "family", "dtype", "d", "sq", "causal"))


def gpu_table(rows, kind, deterministic):
    """Of backward's plain rows also the deterministic rate and the error, each beside what it is judged by."""
    peers = sorted({peer for row in rows for peer in row["peers"]})
    heads = ["dtype", "d", "sq", "causal", "case", "ms", "hot ms", "TFLOP/s", "of peak", *(f"{peer} ms" for peer in peers), "ratio"]
    heads += ["of plain"] if kind.endswith("_cases") else ["deterministic", "error"] if kind == "gpu_backward" else []
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [text_of(row[name]) or "-" for name in ("dtype", "d", "sq", "causal", "case")]
        cells += [f"{row['ms']:.3g}", f"{row['hot_ms']:.3g}", f"{row['tflops']:.0f}", f"{row['fraction']:.0%}"]
        cells += [f"{row['peers'][peer]:.3g}" if peer in row["peers"] else "-" for peer in peers]
        cells.append("-" if row["ratio"] is None else f"{row['ratio']:.2f}x {row['against']}")
        if kind.endswith("_cases"):
            cells.append(ratio_text(row.get("of_plain")))
        elif kind == "gpu_backward":
            error = f"{row['error_ratio']:.3f}x" if "error_ratio" in row else "-"
            cells += [ratio_text(deterministic.get(shape(row)) if row["case"] == "" else None), error]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def gpu_decode_table(rows):
    """Microseconds; the rate also by that of a kernel that only reads as many bytes."""
    peers = sorted({peer for row in rows for peer in row["peers"]})
    heads = ["b x sk", "sq", "d", "case", "us", "GB/s", "of reading", *(f"{peer} us" for peer in peers), "ratio", "of plain"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        case = f"{row['case']}, {row['h']} heads" if row["case"].startswith("mla") else row["case"] or "-"
        cells = [f"{row['b']}x{row['sk']}", text_of(row["sq"]), text_of(row["d"]), case]
        cells += [f"{row['ms'] * 1e3:.1f}", f"{row['gbps']:.0f}", f"{row['fraction']:.0%}"]
        cells += [f"{row['peers'][peer] * 1e3:.1f}" if peer in row["peers"] else "-" for peer in peers]
        cells.append("-" if row["ratio"] is None else f"{row['ratio']:.2f}x {row['against']}")
        cells.append(ratio_text(row.get("of_plain")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def table(rows, kind):
    peers = sorted({peer for row in rows for peer in row["peers"]})
    sizes = ["sk", "case"] if kind == "decode" else ["case", "sq", "causal"] if kind == "cases" else ["sq", "causal"]
    unit = "GB/s" if kind == "decode" else "TFLOP/s"
    heads = ["dtype", "d", *sizes, "threads", "ms", unit, "of peak", "extra", *(f"{peer} ms" for peer in peers), "ratio"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [text_of(row[name]) or "-" for name in ("dtype", "d", *sizes, "threads")]
        cells += [f"{row['ms']:.3g}", f"{row[RATE[kind]]:.3g}", f"{row['fraction']:.0%}", bytes_text(row["extra_bytes"])]
        cells += [f"{row['peers'][peer]:.3g}" if peer in row["peers"] else "-" for peer in peers]
        cells.append(ratio_text(row["ratio"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def bytes_text(count):
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def rewritten(page, rows):
    on_gpu = any(row["backend"] == "cuda" for row in rows)

    def part(match):
        kind = match["kind"]
        if kind in KINDS and (kind in GPU) != on_gpu:
            return match[0]  # of the other file
        found = list(chosen(rows, kind, match["filters"]))
        if found:
            if kind == "gpu_decode":
                return match[1] + gpu_decode_table(found) + match[5]
            written = gpu_table(found, kind, deterministic_rates(rows)) if kind in GPU else table(found, kind)
            return match[1] + written + match[5]
        if kind in GPU and all(kind_of(row) != kind for row in rows):
            return match[1] + NOT_MEASURED + match[5]
        raise SystemExit(f"no row for the part: bench {kind}{match['filters']}")

    text, count = PART.subn(part, page)
    if count == 0:
        raise SystemExit("the page has no part between <!-- bench KIND --> and <!-- /bench -->")
    return text


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows")
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page would change")
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    changed = []
    for page in map(Path, options.pages):
        old = page.read_text()
        new = rewritten(old, rows)
        if new != old:
            changed.append(page)
            if not options.check:
                page.write_text(new)
    for page in changed:
        print(f"{page}: {'would change' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
