"""A report on disk: the page, the tables and the figures, from the same results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError
from qmargin.evaluation.result import far_key
from qmargin.files import Guard
from qmargin.report.figures import draw_figures, has_matplotlib
from qmargin.report.journal import read_journal
from qmargin.report.media import MediaFolder
from qmargin.report.page import render_page
from qmargin.report.systems import (
    Entry,
    PairedDifference,
    Panel,
    Primary,
    Repeats,
    find_repeats,
    load_panels,
    paired_differences,
    seed_of,
)
from qmargin.report.tables import csv_table, latex_tables, markdown_tables
from qmargin.schema import encode


@dataclass(frozen=True)
class ReportOptions:
    """Settings of a report."""

    title: str = "Verification report"
    level: float = 0.95  # of the intervals of paired differences
    media: Path | None = None  # folder under which keys of trials name images or recordings
    journals: tuple[Path, ...] = ()  # of training runs whose sparsity is shown
    has_figures: bool | None = None  # None: draw figures where matplotlib is installed
    primary: Primary | None = None  # comparison that was fixed beforehand, at the verdict's FAR
    experiment: str | None = None  # title, where all results are of one experiment
    data_note: str = ""  # a note on the data, without a full stop
    notes: tuple[str, ...] = ()  # cautions that are shown below the verdict
    overwrite: bool = False  # replace files in the folder that no report wrote
    keep_paths: bool = False  # show absolute paths of results, not only names of files

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0:
            raise ConfigError(f"level is {self.level}, outside (0, 1): try 0.95")
        if self.has_figures and not has_matplotlib():
            raise ConfigError("figures need matplotlib: install qmargin[figures] or omit --figures")

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
        options: Further content and settings.

    Raises:
        DataError: If a result or a journal cannot be read; nothing is written then.
        ConfigError: If a file in the folder was not written by a report; nor then.
    """
    options = options or ReportOptions()
    panels = load_panels(results, primary=options.primary, keep_paths=options.keep_paths)
    repeats = find_repeats(panels, experiment=options.experiment, level=options.level)
    differences = [paired_differences(panel, options.level) for panel in panels]
    media = None if options.media is None else MediaFolder(options.media)
    journals = list(map(read_journal, options.journals))
    shown: Any = {"level": options.level, "media": media, "journals": journals}
    shown |= {"repeats": repeats, "notes": options.notes, "data_note": options.data_note}
    metrics = _metrics(options.title, panels, differences, repeats)
    texts = {
        "index.html": render_page(options.title, panels, differences, **shown),
        "metrics.json": json.dumps(metrics, indent=1, allow_nan=False) + "\n",
        "tables.md": markdown_tables(panels, repeats),
        "tables.tex": latex_tables(panels, repeats),
        "tables.csv": csv_table(panels),
    }
    files = {Path(out) / name: text.encode("utf-8") for name, text in texts.items()}
    if options.draws_figures:
        drawn = draw_figures(panels, media)
        files |= {Path(out) / "figures" / name: figure for name, figure in drawn.items()}
    inputs = map(Path, (*results, *options.journals))
    return Guard(inputs, overwrite=options.overwrite).write_all(files)


def _metrics(
    title: str,
    panels: Sequence[Panel],
    differences: Sequence[list[PairedDifference]],
    repeats: Sequence[Repeats],
) -> dict[str, Any]:
    """What the page shows, for programs; numbers as in ``result.json``."""
    parts = ("run", "protocol", "measures", "groups", "sources", "created")

    def system(entry: Entry) -> dict[str, Any]:
        found = {part: encode(getattr(entry.result, part), part) for part in parts}
        return {"name": entry.label, **found, "model_card": entry.result.system.model_card}

    def runs(repeats: Repeats, name: str) -> dict[str, Any]:
        """Values of every run, so that means and deviations can be computed."""
        tars = {far_key(far): repeats.values(name, far) for far in repeats.fars}
        seeds = [seed_of(entry.result) for entry in repeats.systems[name]]
        return {"name": name, "seeds": seeds, "eer": repeats.values(name, None), "tar": tars}

    return {
        "format": "qmargin-report",
        "version": 2,
        "title": title,
        "panels": [
            {
                "title": panel.title,
                "headline_far": panel.headline_far,
                "leader": panel.leader().label,
                "systems": list(map(system, panel.entries)),
                "differences": [encode(asdict(made), "differences") for made in found],
            }
            for panel, found in zip(panels, differences, strict=True)
        ],
        "repeats": [
            {
                "title": found.title,
                "headline_far": found.headline_far,
                "systems": [runs(found, name) for name in found.systems],
                "differences": [encode(asdict(made), "differences") for made in found.differences],
            }
            for found in repeats
        ],
    }
