#!/usr/bin/env python3
"""The IO model of attention beside a GPU's counters, memory and time.

    io_model.py measure --library libnarrows.so --output ROWS.json [--quick] [--ncu NCU]
    io_model.py table ROWS.json PAGE... [--check]
    io_model.py plot ROWS.json [--to docs/images]

`measure` needs a GPU, PyTorch and, for the counters, Nsight Compute (ncu). It writes the file after each part, so that what
was measured stays when a later part fails. `table` writes anew the parts of a page between `<!-- io_model KIND -->` and
`<!-- /io_model -->`, KIND being machine, plots, dram, l2 or training; `plot` draws io-dram.svg, io-l2.svg and io-training.svg.
Two runs on the same rows give the same pages and pictures.
"""

import argparse
import json
import math
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from table import text_of

ITEM = 2  # bytes of a bf16
TOLERANCE = 0.10
FORMS = {"fused": "fused", "three_kernel": "three kernels"}
TILE = re.compile(r"(?<!\d)(\d{2,3})x(\d{2,3})(?!\d)")


def three_kernel_l2(n, d, kernels):
    """Bytes of a head between L2 and the multiprocessors, from the tiles that the names of both matrix products state; None
    where they do not. A tile reads its rows of one operand and its columns of the other; softmax, which PyTorch may cut into
    several launches, reads S once. cuBLAS computes the transposed product: a name's first number goes along the columns of
    the result."""
    first, last = (TILE.search(kernels[place]["name"]) for place in (0, -1))
    if len(kernels) < 3 or not first or not last:
        return None
    columns, rows = map(int, first.groups())
    scores = math.ceil(n / rows) * math.ceil(n / columns) * (rows + columns) * d + n * n
    columns, rows = map(int, last.groups())
    outputs = math.ceil(n / rows) * math.ceil(d / columns) * (rows + min(columns, d)) * n + n * d
    return ITEM * (scores + 2 * n * n + outputs)


def summed(form, *counters):
    """Measured bytes of a head."""
    return sum(kernel[counter] for kernel in form["kernels"] for counter in counters) / form["heads"]


def compared(row, kind):
    """{form: (model, measured)} in bytes of a head; the model may be None."""
    counters = {"dram": ("dram_read", "dram_write"), "l2": ("sm_read", "sm_write")}[kind]
    found = {}
    for name in ("fused", "three_kernel"):
        if row[name]:
            model = row[name]["model_dram"] if kind == "dram" else row[name].get("model_l2")
            if name == "three_kernel" and kind == "l2":
                model = three_kernel_l2(row["n"], row["d"], row[name]["kernels"])
            found[name] = (model, summed(row[name], *counters))
    return found


def complaints(data):
    """What is further from the model than the tolerance, a line each."""
    lines = []
    for row in data["traffic"]:
        for kind in ("dram", "l2"):
            for form, (model, measured) in compared(row, kind).items():
                if model and abs(measured / model - 1) > TOLERANCE:
                    lines.append(
                        f"{form} d {row['d']} N {row['n']} causal {row['causal']}: {kind}: {measured / model:.3f} of the model"
                    )
    return lines


# --- pages -------------------------------------------------------------------------------------------------------------

PART = re.compile(r"(<!-- io_model (?P<kind>\w+) -->\n).*?(<!-- /io_model -->)", re.DOTALL)
NOT_MEASURED = "Not yet measured.\n"
PLOTS = {"dram": "device memory", "l2": "L2 to the multiprocessors", "training": "forward and backward"}


def size_text(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def markdown(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def size_cells(row):
    return [str(row["d"]), str(row["n"]), text_of(row["causal"])]


def traffic_table(data, kind):
    """Bytes of a head."""
    heads, rows = ["d", "N", "causal"], []
    for form in FORMS.values():
        heads += [f"{form}: model", "measured", "of model"]
    for row in data["traffic"]:
        found, cells = compared(row, kind), size_cells(row)
        for form in FORMS:
            model, measured = found.get(form, (None, None))
            cells += [size_text(model) if model else "-", size_text(measured) if measured else "-"]
            cells.append(f"{measured / model:.3f}" if model else "-")
        measured = [figures[1] for figures in found.values()]
        rows.append([*cells, f"{measured[1] / measured[0]:.1f}x" if len(measured) == 2 else "-"])
    return markdown([*heads, "three / fused"], rows)


def extra_bytes(row, form):
    """Beside inputs and results."""
    return row[form]["peak_bytes"] - row["inputs_bytes"] - row["results_bytes"]


def training_table(data):
    heads = [
        "d",
        "N",
        "causal",
        "heads",
        "memory",
        "standard",
        "less",
        "beside tensors",
        "standard",
        "ms",
        "standard",
        "faster",
    ]
    rows = []
    for row in data["training"]:
        both = [name for name in ("fused", "standard") if name in row]
        cells = [*size_cells(row), str(row["heads"])]
        for value, text in (
            (lambda row, name: row[name]["peak_bytes"], size_text),
            (extra_bytes, size_text),
            (lambda row, name: row[name]["ms"], "{:.3g}".format),
        ):
            figures = {name: value(row, name) for name in both}
            cells += [text(figures[name]) if name in figures else "refused" for name in ("fused", "standard")]
            if value is not extra_bytes:
                cells.append(f"{figures['standard'] / figures['fused']:.1f}x" if len(figures) == 2 else "-")
        rows.append(cells)
    reasons = sorted({f"{name}: {why}" for row in data["training"] for name, why in row["refused"].items()})
    return markdown(heads, rows) + "".join(f"\nRefused: {reason}\n" for reason in reasons)


def machine_text(data):
    facts = data["device"]
    return (
        f"Measured on {data['date']} on one {facts['name']} (L2 {facts['l2_bytes'] / 1e6:.0f} MB) "
        f"with PyTorch {facts['torch']} and CUDA {facts['cuda']}.\n"
    )


def drawable(data):
    """The pictures that the rows have something for."""
    return [kind for kind in PLOTS if (ratio_lines(data, "ms") if kind == "training" else data["traffic"])]


def part(data, kind):
    if kind == "machine":
        return machine_text(data)
    if kind == "plots":
        return "".join(f"![{PLOTS[name]}](images/io-{name}.svg)\n" for name in drawable(data)) or NOT_MEASURED
    if kind in ("dram", "l2"):
        return traffic_table(data, kind) if data["traffic"] else NOT_MEASURED
    if kind == "training":
        return training_table(data) if data["training"] else NOT_MEASURED
    raise SystemExit(f"io_model {kind}: must be one of machine, plots, dram, l2, training")


def write_pages(options):
    data, changed = json.loads(options.rows.read_text(encoding="utf-8")), False
    for page in options.pages:
        old = page.read_text(encoding="utf-8")
        new, count = PART.subn(lambda match: match[1] + part(data, match["kind"]) + match[3], old)
        if count == 0:
            raise SystemExit(f"{page}: has no part between <!-- io_model KIND --> and <!-- /io_model -->")
        if new != old:
            changed = True
            print(f"{page}: {'would change' if options.check else 'written'}")
            if not options.check:
                page.write_text(new, encoding="utf-8")
    return 1 if options.check and changed else 0


# --- pictures ----------------------------------------------------------------------------------------------------------


def traffic_lines(data, kind, d):
    """{(form, causal): [(N, model, measured)]} of a head."""
    lines = {}
    for row in data["traffic"]:
        if row["d"] == d:
            for form, (model, measured) in compared(row, kind).items():
                lines.setdefault((form, row["causal"]), []).append((row["n"], model, measured))
    return lines


def ratio_lines(data, value):
    """{(d, causal): [(N, standard / fused)]}"""
    lines = {}
    for row in data["training"]:
        if "fused" in row and "standard" in row:
            ratio = row["standard"][value] / row["fused"][value]
            lines.setdefault((row["d"], row["causal"]), []).append((row["n"], ratio))
    return lines


def scale_axes(axes, lengths, title, label, log):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(str, lengths))
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_xlabel("sequence length N")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_traffic(panels, data, kind):
    for axes, d in zip(panels, sorted({row["d"] for row in data["traffic"]})):
        for (form, causal), points in traffic_lines(data, kind, d).items():
            style = {"color": "tab:blue" if form == "fused" else "tab:red"}
            name = FORMS[form] + (", causal" if causal else "")
            known = [(n, model / 1e6) for n, model, _ in points if model]
            axes.plot(*zip(*known) if known else ([], []), "--" if causal else "-", linewidth=1, **style)
            axes.plot(
                [n for n, _, _ in points],
                [measured / 1e6 for *_, measured in points],
                "s" if causal else "o",
                markersize=4,
                label=name,
                **style,
            )
        scale_axes(
            axes,
            sorted({row["n"] for row in data["traffic"]}),
            f"{PLOTS[kind]}, d {d}",
            "MB a head: line model, mark measured",
            True,
        )


def draw_training(panels, data):
    for axes, (value, title) in zip(panels, {"peak_bytes": "memory", "ms": "time"}.items()):
        for (d, causal), points in ratio_lines(data, value).items():
            name = f"d {d}" + (", causal" if causal else "")
            axes.plot(
                *zip(*points),
                "--" if causal else "-",
                marker="o",
                markersize=4,
                color="tab:blue" if d == 64 else "tab:orange",
                label=name,
            )
        axes.axhline(1, color="black", linewidth=0.8)
        scale_axes(
            axes,
            sorted({row["n"] for row in data["training"]}),
            f"{title} of {PLOTS['training']}",
            "standard / fused",
            False,
        )


def draw(options):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "narrows", "svg.fonttype": "none", "font.size": 9})
    data = json.loads(options.rows.read_text(encoding="utf-8"))
    options.to.mkdir(parents=True, exist_ok=True)
    for kind in drawable(data):
        drawn, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
        if kind == "training":
            draw_training(panels, data)
        else:
            draw_traffic(panels, data, kind)
        path = options.to / f"io-{kind}.svg"
        drawn.savefig(path, metadata={"Date": None})
        plt.close(drawn)
        print(path)
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "child"):  # child: what measure has ncu look at
        command = commands.add_parser(name)
        command.add_argument("--library", required=True, help="libnarrows.so")
        command.add_argument("--quick", action="store_true", help="a few sizes, a minute")
        if name == "measure":
            command.add_argument("--output", required=True, type=Path)
            command.add_argument("--ncu", default=shutil.which("ncu") or "/usr/local/cuda/bin/ncu")
        else:
            command.add_argument("--facts", required=True, type=Path)
    pages = commands.add_parser("table")
    pages.add_argument("rows", type=Path)
    pages.add_argument("pages", nargs="+", type=Path)
    pages.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page would change")
    pictures = commands.add_parser("plot")
    pictures.add_argument("rows", type=Path)
    pictures.add_argument("--to", default=Path(__file__).resolve().parent.parent / "docs" / "images", type=Path)
    options = parser.parse_args(arguments)
    if options.command in ("measure", "child"):
        import io_measure

        return (io_measure.measure if options.command == "measure" else io_measure.child)(options)
    return {"table": write_pages, "plot": draw}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
