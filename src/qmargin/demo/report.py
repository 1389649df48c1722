"""The table, the verdict and the page of a demo."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qmargin.errors import DataError
from qmargin.report.comparison import PairedDifference, paired_differences, reading
from qmargin.report.figures import has_matplotlib
from qmargin.report.journal import read_journal
from qmargin.report.repeats import spread
from qmargin.report.systems import Panel, load_panels
from qmargin.report.write import ReportOptions, write_report
from qmargin.training.journal import JOURNAL

if TYPE_CHECKING:
    from qmargin.demo.run import Part

TITLE = "Losses on synthetic stroke identities"
DATA_TITLE = "Losses on {}, with settings chosen on synthetic strokes"
SETTINGS_NOTE = (
    "The settings of the losses were chosen on synthetic strokes, not on these pictures; with "
    "settings of their own another loss may be ahead."
)
Q_MARGIN = "Q-Margin"
VERDICT_FAR = 1e-4
_plain_spread = partial(spread, sign="+-")  # for any terminal


def write_demo_report(
    folder: Path, parts: Sequence[Part], data: str | None = None, *, journals: Sequence[Path] = ()
) -> Path:
    """Write the page and its tables; every seed is a set of trials of its own."""
    options = ReportOptions(
        title=TITLE if data is None else DATA_TITLE.format(Path(data).name),
        media=folder / "pictures",
        journals=tuple(journals),
        has_figures=has_matplotlib(),
        headline=VERDICT_FAR,
    )
    return write_report([part.result for part in parts], folder / "report", options)[0]


def summary(parts: Sequence[Part], data: str | None = None) -> str:
    """The table, and a sentence on who is ahead at a FAR of 1e-4 and by how much."""
    panels = load_panels([part.result for part in parts])
    titles = "; ".join(panel.title for panel in panels)
    note = "" if data is None else f"{SETTINGS_NOTE}\n"
    return f"\n{titles}\n\n{table(panels)}\n\n{verdict(panels)}\n{note}"


def table(panels: Sequence[Panel]) -> str:
    """EER and TARs in percent; over several seeds, means with their deviation."""
    fars = panels[0].fars
    names = list(dict.fromkeys(entry.label for panel in panels for entry in panel.entries))
    head = ["", "EER %", *(f"TAR % at {far:g}" for far in fars)]
    rows = [head]
    for name in names:
        results = [
            entry.result for panel in panels for entry in panel.entries if entry.label == name
        ]
        columns = [[result.metrics.eer.value for result in results]]
        for index in range(len(fars)):
            columns.append([result.metrics.tar[index].tar or 0.0 for result in results])
        digits = [2, *[1] * len(fars)]
        rows.append([name, *map(_plain_spread, columns, digits)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def verdict(panels: Sequence[Panel]) -> str:
    """Q-Margin against the best of the others at the verdict's FAR, as it was found."""
    tars = _tars(panels)
    if not tars:
        return f"no loss was measured at FAR {VERDICT_FAR:g}: nothing can be said"
    best = max(tars, key=lambda name: float(np.mean(tars[name])))
    if len({entry.label for panel in panels for entry in panel.entries}) == 1:
        return (
            f"At FAR {VERDICT_FAR:g}, {best} accepts {_plain_spread(tars[best], 1)} % of genuine "
            "pairs. It is the only loss here: there is nothing to compare it with."
        )
    lead = (
        f"At FAR {VERDICT_FAR:g}, {best} accepts the most genuine pairs: "
        f"{_plain_spread(tars[best], 1)} %."
    )
    rivals = [name for name in tars if name != Q_MARGIN]
    if Q_MARGIN not in tars or not rivals:
        return lead
    rival = max(rivals, key=lambda name: float(np.mean(tars[name])))
    words = [_compared(panel, rival) for panel in panels]
    if len(panels) == 1:
        return f"{lead} {words[0]}"
    gaps = [a - b for a, b in zip(tars[Q_MARGIN], tars[rival], strict=True)]
    mean = f"Q-Margin minus {rival} over {len(panels)} seeds: {_plain_spread(gaps, 1)} points."
    named = [f"{panel.title}: {text}" for panel, text in zip(panels, words, strict=True)]
    return "\n".join([f"{lead} {mean}", *named])


def _compared(panel: Panel, rival: str) -> str:
    """Q-Margin and the best of the others on the same trials."""
    found = [
        made.seen_from(Q_MARGIN)
        for made in paired_differences(panel)
        if made.far == VERDICT_FAR and {made.first, made.second} == {Q_MARGIN, rival}
    ]
    if not found:
        return f"{panel.title}: Q-Margin and {rival} have no common replicates."
    made = found[0]
    low, high = made.interval
    return (
        f"Q-Margin against {rival}, the best of the others: {100 * made.difference:+.1f} points "
        f"(95 % interval {100 * low:+.1f} to {100 * high:+.1f}; p = {made.adjusted:.3f}, "
        f"corrected for all pairs), {_read(made)}."
    )


def _read(made: PairedDifference) -> str:
    names = {"first is better": made.first, "second is better": made.second}
    words = reading(made)
    return f"{names[words]} is better" if words in names else words


def _tars(panels: Sequence[Panel]) -> dict[str, list[float]]:
    """TARs at the verdict's FAR by the name of the loss, one per seed."""
    found: dict[str, list[float]] = {}
    for panel in panels:
        for entry in panel.entries:
            point = entry.point_at(VERDICT_FAR)
            if point is not None and point.tar is not None:
                found.setdefault(entry.label, []).append(point.tar)
    return {name: tars for name, tars in found.items() if len(tars) == len(panels)}


def keep_journals(folder: Path, parts: Sequence[Part]) -> tuple[list[Path], list[Part]]:
    """Journals of the first seed under the names of their losses, which is what a report shows.

    Args:
        folder: Where copies are, and those of an earlier call may be.
        parts: All parts of the demo.

    Returns:
        The copies, and the parts whose journal cannot be read any more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept, lost = [], []
    for part in parts:
        if part.seed != 0:
            continue
        path = folder / f"{part.loss.title}.jsonl"
        if _is_journal(part.folder / JOURNAL):
            shutil.copyfile(part.folder / JOURNAL, path)
        if _is_journal(path):
            kept.append(path)
        else:
            lost.append(part)
    return kept, lost


def _is_journal(path: Path) -> bool:
    try:
        read_journal(path)
    except (DataError, OSError):
        return False
    return True
