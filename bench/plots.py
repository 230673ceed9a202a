#!/usr/bin/env python3
"""Draws measured rows: `plots.py ROWS [--to docs/images]` with the lines that `narrows bench --json` printed.

Writes cpu-forward.svg, cpu-backward.svg, cpu-decode.svg (fraction of the measured peak) and cpu-peers.svg (how many times as long
the fastest peer takes), each where the rows have something for it. Needs matplotlib.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from table import read_rows

# Two runs on the same rows give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "narrows", "svg.fonttype": "none", "font.size": 9})
COLOURS = {"fp32": "tab:blue", "bf16": "tab:orange", "fp16": "tab:green"}


def series(rows, value):
    """{(dtype, d, what): [(length, value)]}, one line of a plot each."""
    lines = {}
    for row in rows:
        length = row["sk"] if row["op"] == "decode" else row["sq"]
        what = row["case"] if row["op"] == "decode" else "causal" if row["causal"] else "full"
        if row[value] is not None:
            lines.setdefault((row["dtype"], row["d"], what), []).append((length, row[value]))
    return {key: sorted(points) for key, points in lines.items()}


def draw(axes, rows, value, title):
    for (dtype, d, what), points in series(rows, value).items():
        style = {"color": COLOURS[dtype], "marker": "o" if d == 64 else "s", "markersize": 4}
        dashed = "--" if what in ("causal", "paged16") else "-"
        axes.plot(*zip(*points), dashed, label=f"{dtype} d {d} {what}".strip(), **style)
    axes.set_xscale("log", base=2)
    lengths = sorted({row["sk"] if row["op"] == "decode" else row["sq"] for row in rows})
    axes.set_xticks(lengths, map(str, lengths), rotation=45 if len(lengths) > 5 else 0)
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("keys" if rows[0]["op"] == "decode" else "sequence length")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def figure(rows, value, label, path):
    """A panel for each operation and number of threads in the rows; nothing where they have no such value."""
    panels = {}
    for row in rows:
        if row[value] is not None:
            panels.setdefault((row["op"], row["threads"]), []).append(row)
    if not panels:
        return None
    drawn, all_axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False, layout="constrained")
    for axes, ((op, threads), own) in zip(all_axes[0], panels.items()):
        draw(axes, own, value, f"{op}, {threads} thread{'s' if threads > 1 else ''}")
        if value == "ratio":
            axes.axhline(1, color="black", linewidth=0.8)
    all_axes[0][0].set_ylabel(label)
    handles = {name: handle for axes in all_axes[0] for handle, name in zip(*axes.get_legend_handles_labels())}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    drawn.savefig(path, metadata={"Date": None})
    plt.close(drawn)
    return path


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows")
    parser.add_argument("--to", default=Path(__file__).parent.parent / "docs" / "images", type=Path)
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    options.to.mkdir(parents=True, exist_ok=True)
    plain = [row for row in rows if row["case"] == "" or row["op"] == "decode"]
    written = []
    for op in ("forward", "backward", "decode"):
        own = [row for row in plain if row["op"] == op]
        written.append(figure(own, "fraction", "fraction of the measured peak", options.to / f"cpu-{op}.svg"))
    written.append(figure(plain, "ratio", "fastest peer's time / narrows' time", options.to / "cpu-peers.svg"))
    for path in filter(None, written):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
