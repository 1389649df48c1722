"""Tables and figures of a sweep, in its folder."""

from __future__ import annotations

from pathlib import Path

from qmargin.files import MADE_BY, Guard, write_atomically
from qmargin.sweep.figures import STEMS, write_figures
from qmargin.sweep.plan import FOLDERS, PLAN, TRIALS
from qmargin.sweep.summary import Summary
from qmargin.sweep.tables import csv_table, latex_table, markdown_table

FIGURES = "figures"
TABLES = ("table.md", "table.csv", "table.tex")


def check_outputs(out: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that holds no sweep and has files under the names of a sweep's.

    Raises:
        ConfigError: Naming the file.
    """
    if not (out / PLAN).exists() and not (out / FOLDERS).is_dir():
        guard = Guard(overwrite=overwrite)
        figures = [f"{FIGURES}/{stem}.{kind}" for stem in STEMS for kind in ("svg", "pdf")]
        for name in (*TABLES, TRIALS, *figures):
            guard.check(out / name, MADE_BY)


def write_outputs(summary: Summary, out: Path) -> list[Path]:
    """Write everything that can be written; returns the files."""
    texts = (markdown_table(summary), csv_table(summary), latex_table(summary))
    written = [out / name for name in TABLES]
    for path, text in zip(written, texts, strict=True):
        write_atomically(path, text.encode())
    return written + write_figures(summary, out / FIGURES)
