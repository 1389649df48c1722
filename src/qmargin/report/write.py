"""A report on disk: the page, the tables and the figures, from the same results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError
from qmargin.evaluation.result import Result, far_key
from qmargin.files import Guard
from qmargin.report.comparison import (
    PairedDifference,
    Repeats,
    find_repeats,
    paired_differences,
)
from qmargin.report.figures import draw_figures, has_matplotlib
from qmargin.report.journal import read_journal
from qmargin.report.media import MediaFolder
from qmargin.report.page import PageContent, render_page
from qmargin.report.systems import Panel, load_panels
from qmargin.report.tables import csv_table, latex_tables, markdown_tables
from qmargin.schema import encode


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows besides the results.

    Attributes:
        title: Of the page.
        level: Of the intervals of paired differences.
        media: Folder under which the keys of trials name images or recordings.
        journals: Files of trainings whose sparsity is shown.
        has_figures: Whether to draw SVG and PDF figures, which needs matplotlib; None for where
            it is installed.
        headline: FAR of the verdict; None for the strictest that the trials allow.
        overwrite: Replace files in the folder that no report wrote.
        keep_paths: Show absolute paths that results hold, not names of files alone.
    """

    title: str = "Verification report"
    level: float = 0.95
    media: Path | None = None
    journals: tuple[Path, ...] = ()
    has_figures: bool | None = None
    headline: float | None = None
    overwrite: bool = False
    keep_paths: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0:
            raise ConfigError(f"level is {self.level}, outside (0, 1): give for example 0.95")
        if self.has_figures and not has_matplotlib():
            raise ConfigError(
                "figures need the package matplotlib, which is missing: install qmargin[figures], "
                "or leave them out (--no-figures)"
            )

    @property
    def draws_figures(self) -> bool:
        """Whether figures are drawn."""
        return has_matplotlib() if self.has_figures is None else self.has_figures


def write_report(
    results: Sequence[str | Path], out: str | Path, options: ReportOptions | None = None
) -> list[Path]:
    """Write a report of one or more results; returns its files, the page first.

    Args:
        results: Files that ``qmargin evaluate`` wrote, in the order in which they are shown.
        out: Folder of the report; made if it is missing.
        options: What else to show.

    Raises:
        DataError: If a result or a journal cannot be read; nothing is written then.
        ConfigError: If a file in the folder was not written by a report; nor then.
    """
    options = options or ReportOptions()
    panels = load_panels(results, headline=options.headline, keep_paths=options.keep_paths)
    differences = [paired_differences(panel, options.level) for panel in panels]
    media = None if options.media is None else MediaFolder(options.media)
    content = PageContent(
        title=options.title,
        panels=panels,
        differences=differences,
        level=options.level,
        media=media,
        journals=[read_journal(path) for path in options.journals],
    )
    folder = Path(out)
    files = {folder / name: text.encode("utf-8") for name, text in _texts(content).items()}
    if options.draws_figures:
        drawn = draw_figures(panels, media)
        files.update({folder / "figures" / name: figure for name, figure in drawn.items()})
    inputs = map(Path, (*results, *options.journals))
    return Guard(inputs, overwrite=options.overwrite).write_all(files)


def _texts(content: PageContent) -> dict[str, str]:
    panels = content.panels
    metrics = _metrics(content.title, panels, content.differences)
    return {
        "index.html": render_page(content),
        "metrics.json": json.dumps(metrics, indent=1, allow_nan=False) + "\n",
        "tables.md": markdown_tables(panels),
        "tables.tex": latex_tables(panels),
        "tables.csv": csv_table(panels),
    }


def _metrics(
    title: str, panels: Sequence[Panel], differences: Sequence[list[PairedDifference]]
) -> dict[str, Any]:
    """What the page shows, for programs; numbers as in ``result.json``."""
    return {
        "format": "qmargin-report",
        "version": 2,
        "title": title,
        "panels": [
            {
                "title": panel.title,
                "headline_far": panel.headline_far(),
                "leader": panel.leader().label,
                "systems": [_system(entry.label, entry.result) for entry in panel.entries],
                "differences": [encode(asdict(made), "differences") for made in found],
            }
            for panel, found in zip(panels, differences, strict=True)
        ],
        "repeats": [
            {
                "title": repeats.title,
                "systems": [_means(repeats, name) for name in repeats.systems],
            }
            for repeats in find_repeats(panels)
        ],
    }


def _means(repeats: Repeats, name: str) -> dict[str, Any]:
    """Values of every run, so that means and deviations can be computed."""
    tars = {far_key(far): repeats.values(name, far) for far in repeats.fars}
    results = [entry.result for entry in repeats.systems[name]]
    seeds = [None if result.run is None else result.run.seed for result in results]
    return {"name": name, "seeds": seeds, "eer": repeats.values(name, None), "tar": tars}


def _system(label: str, result: Result) -> dict[str, Any]:
    parts = ("run", "protocol", "measures", "groups", "sources", "created")
    found = {part: encode(getattr(result, part), part) for part in parts}
    return {"name": label, **found, "model_card": result.system.model_card}
