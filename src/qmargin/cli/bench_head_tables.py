"""How the rows of ``qmargin bench head`` become tables, in the terminal and on the page.

Rows are taken as the dictionaries of the JSON file, so that both show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
