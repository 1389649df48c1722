"""Tables of the head's benchmark, in the terminal and on its page: no number is typed by hand.

Rows are taken as the dictionaries of the JSON file, so that both show the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import new_file
from benchmarks.sizes_page import short_command
from qmargin.cli.options import named_path
from qmargin.cli.tables import markdown_table
from qmargin.files import write_atomically

Cell = Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Table:
    """Title and columns of a part's table."""

    title: str
    columns: dict[str, Cell]  # by heading; the last takes the reason of a row without numbers

    def cells(self, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
        """Text of every row."""
        return [[cell(row) for cell in self.columns.values()] for row in rows]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _field(name: str, form: str = ".2f") -> Cell:
    return lambda row: _number(row.get(name), form)


def _fact(name: str, form: str = "g") -> Cell:
    return lambda row: _number(row["facts"].get(name), form)


def _stat(name: str, form: str, factor: float = 1.0) -> Cell:
    def cell(row: dict[str, Any]) -> str:
        stats = row["facts"].get("stats")
        return "" if not stats else format(factor * stats[name], form)

    return cell


def _text(name: str) -> Cell:
    return lambda row: str(row[name])


def _note(row: dict[str, Any]) -> str:
    """Why a row has no number, or which path was taken instead of the one in its name."""
    if row["failed"]:
        return str(row["failed"])
    stats = row["facts"].get("stats") or {}
    taken = stats.get("path") or row["facts"].get("path_taken")
    if taken and not row["name"].startswith(taken) and taken not in row["name"]:
        return f"took {taken}"
    if stats.get("num_overflowed"):
        return f"{stats['num_overflowed']} rows redone"
    return ""


def _per_million(row: dict[str, Any]) -> str:
    return "" if row["ms"] is None else f"{1e6 * row['ms'] / row['facts']['classes']:.2f}"


def _plain_candidates(row: dict[str, Any]) -> str:
    stats = row["facts"].get("stats_without")
    return "" if not stats else format(stats["num_candidates"], ".0f")


def _head_ms(row: dict[str, Any]) -> str:
    is_head = row["ms"] is not None and row["name"] != "backbone alone"
    return f"{row['ms'] - row['reference_ms']:.1f}" if is_head else ""


def _share_of_backbone(row: dict[str, Any]) -> str:
    return "" if not row["ratio"] else f"{1.0 / row['ratio']:.3f}"


_SUPPORT: dict[str, Cell] = {
    "support, mean": _stat("support_mean", ".0f"),
    "max": _stat("support_max", ".0f"),
    "active classes, %": _stat("active_share", ".2f", 100.0),
}
_TIMES: dict[str, Cell] = {"ms": _field("ms"), "x GEMM": _field("ratio")}
_PEAK: dict[str, Cell] = {"extra GiB": _field("peak_gib")}
_SETTING: dict[str, Cell] = {
    "alpha": _fact("alpha"),
    "scale": _fact("scale"),
    "margin": _fact("margin"),
}

TABLES = {
    "products": Table(
        "Bare products",
        {"product": _text("name"), **_TIMES, "TFLOP/s": _fact("tflops", ".3g"), "note": _note},
    ),
    "paths": Table(
        "Paths",
        {
            "path": _text("name"),
            "step": _text("step"),
            **_TIMES,
            **_PEAK,
            **_SUPPORT,
            "note": _note,
        },
    ),
    "settings": Table(
        "Settings",
        {
            "path": _text("name"),
            **_SETTING,
            "step": _text("step"),
            **_TIMES,
            **_PEAK,
            **_SUPPORT,
            "note": _note,
        },
    ),
    "growth": Table(
        "Growth",
        {
            "path": _text("name"),
            "classes": _fact("classes", ","),
            "step": _text("step"),
            "ms": _field("ms"),
            "GEMM ms": _field("reference_ms"),
            "x GEMM": _field("ratio"),
            "ms per million classes": _per_million,
            **_PEAK,
            "note": _note,
        },
    ),
    "references": Table(
        "Reference measures",
        {
            "reference": _text("name"),
            "step": _text("step"),
            "ms": _field("ms"),
            "ms without": _field("reference_ms"),
            "x without": _field("ratio"),
            "goal": _fact("goal", ".2f"),
            "candidates": _stat("num_candidates", ".0f"),
            "without": _plain_candidates,
            "support, mean": _stat("support_mean", ".0f"),
            "note": _note,
        },
    ),
    "errors": Table(
        "Errors against float64",
        {
            "path": _text("name"),
            "what": _text("step"),
            **_SETTING,
            "classes": _fact("classes", ","),
            "tau": _fact("tau_error", ".1e"),
            "loss": _fact("loss_error", ".1e"),
            "mass": _fact("mass_error", ".1e"),
            "gradient of embeddings": _fact("embedding_gradient_error", ".1e"),
            "gradient of prototypes": _fact("prototype_gradient_error", ".1e"),
            "note": _note,
        },
    ),
    "end-to-end": Table(
        "Whole training steps",
        {
            "head": _text("name"),
            "optimizer": _text("step"),
            "images/s": _fact("images_per_s", ".1f"),
            "of backbone alone": _share_of_backbone,
            "of ArcFace, common head": _fact("versus_arcface", ".3f"),
            "step ms": _field("ms", ".1f"),
            "head ms": _head_ms,
            "peak GiB": _field("peak_gib", ".1f"),
            "support, mean": _stat("support_mean", ".0f"),
            "paper, 8 GPUs, samples/s": _fact("paper_samples_per_s", ".2f"),
            "of its ArcFace": _fact("paper_versus_arcface", ".3f"),
            "note": _note,
        },
    ),
}


def table_cells(part: str, rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and text of a part, without columns that are empty everywhere."""
    table = TABLES[part]
    cells = table.cells(rows)
    headings = list(table.columns)
    used = [
        index for index in range(len(headings)) if index == 0 or any(row[index] for row in cells)
    ]
    return [headings[index] for index in used], [[row[index] for index in used] for row in cells]


SCREENS = ("float16", "bfloat16", "float32", "float64")
TEXTS = {
    "products": """\
One product `[B, d] x [d, k]` in the precision of the screen, output written. A dense softmax
head needs three: logits, gradient of the embeddings, gradient of the prototypes. "Padded" means
that k is rounded up to a multiple of 128, so that each row of the output begins at a multiple
of 16 bytes. The padded product is the unit of every ratio on this page; it is timed again in
turns with every step.""",
    "paths": """\
A step from embeddings to gradients, and with an update. The sparse step leaves its gradient of
the prototypes as lists that the update consumes; "`.grad` of active rows" builds the rows as
well. A chunked step's gradient is made block by block and dropped where no update is timed.
`sampled` is not the loss over all classes. `paper` is the paper's procedure on all cosines in
half precision. The common head is the plain PyTorch of most training code: unit vectors, a
product under autocast, a clamp, the margin by index, cross-entropy, `torch.optim.SGD`; "sampled"
rows of it take a part of the classes at random. "Extra GiB" is the peak beyond prototypes,
momentum and the screened copy.""",
    "settings": """\
Small scales and alphas near 1 make supports large. `auto` is what a head does by default, after
some steps that measure the support; `sparse` falls back to `chunked` where its lists would be
too long, and the note says so.""",
    "growth": """\
The sparse path for more and more classes, on one device.""",
    "references": """\
The sparse step with a reference measure, in turns with the same step without one. Counts of the
class prior are drawn from a lognormal distribution. "Candidates" are the classes of a row that
are scored exactly.""",
    "errors": """\
Largest absolute errors of `tau` and of the loss over 16 rows, against float64 over all classes
from the same stored prototypes; `chunked` and `paper` multiply rounded vectors and say so in
their documentation. Gradients are relative to the largest element of the dense gradient in
float64, over fewer classes; the row `dense` is plain float32 and shows what rounding alone
does.""",
    "end-to-end": """\
Backbone forward and backward (channels last, bfloat16 autocast, random images), head, clipping
and both updates, on one device with all classes. Every head takes turns with the backbone
alone; "head ms" is the difference. The last column repeats the paper's throughput table
(WebFace42M, ResNet-100, eight GPUs, classes split among them): compare its ratios, not its
numbers. The network is untrained, so supports are those of the first steps.""",
}


@dataclass(frozen=True)
class Goal:
    """A number that the head is to reach, and where it is measured."""

    claim: str
    part: str
    names: dict[str, Any]  # fields and facts that select the rows
    field: str
    limit: float
    form: str = ".2f"
    over: dict[str, Any] | None = None  # selects the rows that the value is divided by

    def measured(self, sections: Sequence[Section]) -> float | None:
        """Worst of the selected rows; None if there is none with a number."""
        rows = [row for section in sections if section.part == self.part for row in section.rows]
        value = self._worst(rows, self.names)
        if self.over is None or value is None:
            return value
        unit = self._worst(rows, self.over)
        return None if unit is None else value / unit

    def is_met(self, value: float) -> bool:
        """Whether the value, as it is shown, is within the limit."""
        return float(format(value, self.form)) <= self.limit

    def _worst(self, rows: Sequence[dict[str, Any]], names: dict[str, Any]) -> float | None:
        wanted = [row for row in rows if all(_lookup(row, key) == names[key] for key in names)]
        found = [_lookup(row, self.field) for row in wanted]
        return max((value for value in found if value is not None), default=None)


@dataclass(frozen=True)
class Section:
    """Rows of a part and the file they come from."""

    part: str
    rows: list[dict[str, Any]]
    record: dict[str, Any]

    @property
    def screen(self) -> str:
        """Precision of the screen."""
        return str(self.record["settings"]["screen"])

    def is_on(self, device: str) -> bool:
        """Whether it was measured on such a device."""
        return str(self.record["settings"]["device"]).startswith(device)


def _lookup(row: dict[str, Any], name: str) -> Any:
    return row[name] if name in row else row["facts"].get(name)


_FB = "forward + backward"
_BASE = "sparse, alpha 1.25"


def _setting(alpha: float, scale: float, limit: float) -> Goal:
    names = {"name": "sparse", "step": _FB, "alpha": alpha, "scale": scale}
    claim = f"sparse, alpha {alpha:g}, scale {scale:g}, {_FB}, x GEMM"
    return Goal(claim, "settings", names, "ratio", limit)


def _path(name: str, update: str, limit: float, field: str = "ratio") -> Goal:
    step = _FB + update
    unit = "x GEMM" if field == "ratio" else "extra GiB"
    return Goal(f"{name}, {step}, {unit}", "paths", {"name": name, "step": step}, field, limit)


_LARGE = {"step": _FB, "alpha": 1.25, "scale": 10.0}
GPU_GOALS = (
    _path(_BASE, "", 2.0),
    _path(_BASE, " + SparseSGD", 2.3),
    _path(_BASE, " + ExactSGD", 3.6),
    _path(_BASE, " + SparseSGD", 1.0, "peak_gib"),
    _path(_BASE, " + ExactSGD", 1.0, "peak_gib"),
    _path("chunked, ArcFace", "", 5.5),
    _path("chunked, CosFace", "", 5.5),
    _path("chunked, ArcFace", " + ExactSGD", 1.0, "peak_gib"),
    _path("chunked, CosFace", " + ExactSGD", 1.0, "peak_gib"),
    _setting(1.5, 10.0, 2.0),
    _setting(1.75, 5.0, 2.0),
    _setting(2.0, 1.9, 2.0),
    _setting(1.25, 64.0, 2.0),
    _setting(1.25, 20.0, 3.0),
    *(
        Goal(
            f"{path}, alpha 1.25, scale 10, {_FB}, x chunked",
            "settings",
            {"name": path, **_LARGE},
            "ratio",
            1.0,
            over={"name": "chunked", **_LARGE},
        )
        for path in ("sparse", "auto")
    ),
    Goal(
        "sparse, alpha 1.25, scale 35, error of tau",
        "errors",
        {"name": "sparse", "alpha": 1.25, "scale": 35.0},
        "tau_error",
        2e-6,
        ".1e",
    ),
    Goal(
        "sparse, all settings, error of tau", "errors", {"name": "sparse"}, "tau_error", 2e-6, ".1e"
    ),
)
CPU_GOALS = (
    Goal(
        f"{_BASE}, {_FB}, x dense",
        "paths",
        {"name": _BASE, "step": _FB},
        "ratio",  # to the product in turns with it: a slow spell of the machine cancels
        0.59,  # 1.7 times faster
        over={"name": "dense, alpha 1.25", "step": _FB},
    ),
)


def read_sections(paths: Sequence[Path]) -> list[Section]:
    """Parts of all files, in the order of the tables and, within a part, of the screens."""
    found: dict[tuple[str, str], Section] = {}
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        for part, rows in record["parts"].items():
            section = Section(part, rows, record)
            found[part, section.screen] = section
    ordered = sorted(found.values(), key=lambda section: SCREENS.index(section.screen))
    return [section for part in TABLES for section in ordered if section.part == part]


def render_page(paths: Sequence[Path]) -> str:
    """The page, as Markdown."""
    sections = read_sections(paths)
    lines = ["# The head on one device", "", *_machines(sections), ""]
    goals = _goals(sections)
    if goals:
        table = markdown_table(["what", "screen", "at most", "measured", "met"], goals)
        lines += ["## Goals", "", table, ""]
    explained = set()
    for section in sections:
        part, is_first = section.part, section.part not in explained
        explained.add(part)
        title = TABLES[part].title
        lines += [f"## {title}" if is_first else f"## {title}, {section.screen} screen", ""]
        lines += [TEXTS[part], ""] if is_first else []
        table = markdown_table(*_escaped(*table_cells(part, section.rows)))
        lines += [_sizes(part, section.record["settings"]), "", table, ""]
    return "\n".join(lines)


def _machines(sections: Sequence[Section]) -> list[str]:
    """Each run once: command, commit, date, machine, versions."""
    lines = []
    records = {id(section.record): section.record for section in sections}
    for record in records.values():
        machine = record["machine"]
        known = [name for name in ("torch", "triton", "cuda", "python") if machine.get(name)]
        versions = [f"{name} {machine[name]}" for name in known]
        parts = [section.part for section in sections if section.record is record]
        lines += [
            f"- {', '.join(parts)}: `{short_command(record['command'])}`, commit "
            f"`{machine['commit']}`, {record['date']}, {machine['device']}, {', '.join(versions)}"
        ]
    return lines


def _goals(sections: Sequence[Section]) -> list[list[str]]:
    """Goals of the device, measured ones only, for each precision of the screen."""
    rows = []
    for kind, goals in (("cuda", GPU_GOALS), ("cpu", CPU_GOALS)):
        own = [section for section in sections if section.is_on(kind)]
        for screen in dict.fromkeys(section.screen for section in own):
            screened = [section for section in own if section.screen == screen]
            for goal in goals:
                value = goal.measured(screened)
                if value is not None:
                    limit, shown = (format(number, goal.form) for number in (goal.limit, value))
                    met = "yes" if goal.is_met(value) else "no"
                    rows.append([goal.claim, screen, limit, shown, met])
    return rows


def _sizes(part: str, settings: dict[str, Any]) -> str:
    is_whole = part == "end-to-end"
    sizes = [f"B {settings['batch'] if is_whole else settings['rows']}", f"d {settings['dim']}"]
    if part != "growth":
        sizes.append(f"k {settings['classes']:,}")
    if is_whole:
        sizes.append(str(settings["backbone"]))
    if part not in ("settings", "products", "errors"):
        sizes.append("alpha {alpha:g}, scale {scale:g}, margin {margin:g}".format(**settings))
    text = f"{', '.join(sizes)}, {settings['screen']} screen."
    return text if part == "errors" else f"{text} Medians, in milliseconds."


def _escaped(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Text that cannot end a cell early."""
    return columns, [[cell.replace("|", "\\|") for cell in row] for row in rows]


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``head-page`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "head-page",
        help="the results page from files of `python -m benchmarks head --json`",
        description="Write the results page from the files of the subject head. Parts may come "
        "from several files; of a part that is in more than one with the same screen, the last "
        "counts.",
    )
    parser.add_argument("files", type=named_path, nargs="+", metavar="FILE", help="of --json")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="the page (standard output)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the page."""
    page = render_page(arguments.files)
    if arguments.out is None:
        sys.stdout.write(page)
    else:
        write_atomically(arguments.out, page.encode())
