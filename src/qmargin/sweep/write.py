"""Tables and figures of a sweep, in its folder."""

from __future__ import annotations

from pathlib import Path

from qmargin.files import write_atomically
from qmargin.sweep.figures import write_figures
from qmargin.sweep.summary import Summary
from qmargin.sweep.tables import csv_table, latex_table, markdown_table

FIGURES = "figures"


def write_outputs(summary: Summary, out: Path) -> list[Path]:
    """Write everything that can be written; returns the files."""
    texts = {
        "table.md": markdown_table(summary),
        "table.csv": csv_table(summary),
        "table.tex": latex_table(summary),
    }
    written = [out / name for name in texts]
    for path in written:
        write_atomically(path, texts[path.name].encode())
    return written + write_figures(summary, out / FIGURES)
