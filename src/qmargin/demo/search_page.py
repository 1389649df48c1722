"""What a search found, as Markdown: a table per loss, and who was chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from qmargin.demo.losses import LOSSES

CRITERION = "0.0001"  # the FAR, as records name it
Record = dict[str, Any]


class Setting(NamedTuple):
    """A point of the grid and what was found there in every world."""

    key: str
    alpha: float
    scale: float
    margin: float
    records: tuple[Record, ...]

    @property
    def score(self) -> float:
        """What settings are chosen by: TAR at FAR 1e-4, the mean over worlds."""
        return self.mean(CRITERION)

    def mean(self, far: str) -> float:
        """Mean TAR over worlds."""
        return float(np.mean([record["tar"][far] for record in self.records]))


def settings_of(records: Sequence[Record]) -> list[Setting]:
    """Records by setting, in the order in which they came."""
    groups: dict[tuple[str, float, float, float], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[name] for name in ("key", "alpha", "scale", "margin"))].append(record)
    return [Setting(*name, tuple(found)) for name, found in groups.items()]


def best_settings(records: Sequence[Record]) -> dict[str, Setting]:
    """The best setting of every loss, among those that were tried in all worlds."""
    found = settings_of(records)
    worlds = max((len(setting.records) for setting in found), default=0)
    best: dict[str, Setting] = {}
    for setting in found:
        known = best.get(setting.key)
        is_whole = len(setting.records) == worlds
        if is_whole and (known is None or setting.score > known.score):
            best[setting.key] = setting
    return best


def search_page(records: Sequence[Record], command: str) -> str:
    """The page, from all records of a file."""
    best = best_settings(records)
    found = settings_of(records)
    parts = [
        "# The search behind the demo's settings",
        "Every loss was given the same number of settings, trained by the demo's recipe on "
        "synthetic stroke identities, and measured on validation identities, which are neither "
        "trained on nor tested by the demo. The setting with the largest TAR at FAR 1e-4, the "
        "mean over worlds, was chosen, and is in bold. TAR and EER in percent.",
        f"```text\n{command}\n```",
        _summary(best),
    ]
    for key, loss in LOSSES.items():
        own = [setting for setting in found if setting.key == key]
        if own:
            parts.append(f"## {loss.title}\n\n{_table(own, best.get(key))}")
    return "\n\n".join(parts) + "\n"


def _summary(best: dict[str, Setting]) -> str:
    """What was chosen, and whether it is what the package ships."""
    rows = ["| loss | alpha | scale | margin | TAR at 1e-4 | shipped |", "|" + "---|" * 6]
    for key, setting in best.items():
        loss = LOSSES[key]
        values = (setting.alpha, setting.scale, setting.margin)
        is_shipped = values == (loss.alpha, loss.scale, loss.margin)
        cells = [loss.title, *(f"{value:g}" for value in values), f"{100 * setting.score:.2f}"]
        rows.append(f"| {' | '.join(cells)} | {'yes' if is_shipped else 'no'} |")
    return "\n".join(rows)


def _table(found: Sequence[Setting], best: Setting | None) -> str:
    fars = list(found[0].records[0]["tar"])
    heads = ["alpha", "scale", "margin", "worlds", "EER", *(f"TAR at {far}" for far in fars)]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for setting in sorted(found, key=lambda setting: -setting.score):
        eer = float(np.mean([record["eer"] for record in setting.records]))
        cells = [f"{value:g}" for value in (setting.alpha, setting.scale, setting.margin)]
        cells += [str(len(setting.records)), f"{100 * eer:.2f}"]
        cells += [_rates([record["tar"][far] for record in setting.records]) for far in fars]
        if setting == best:
            cells = [f"**{cell}**" for cell in cells]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _rates(tars: Sequence[float]) -> str:
    """Mean, and every world in brackets."""
    mean = f"{100 * float(np.mean(tars)):.1f}"
    return mean if len(tars) == 1 else f"{mean} ({', '.join(f'{100 * tar:.1f}' for tar in tars)})"
