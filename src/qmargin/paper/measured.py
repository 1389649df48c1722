"""What was measured here: results of a folder, by setting of the loss and by protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qmargin.errors import DataError
from qmargin.evaluation.result import Result, read_result
from qmargin.paper.numbers import Row
from qmargin.report.model_card import loss_settings

KINDS = {
    "ArcFace": "angular",
    "CosFace": "cosine",
    "EntMax": "angular",
    "SparseMax": "angular",
    "Q-Margin": "prior",
}
SEED = re.compile(r", seed \d+$")
Setting = tuple[str, float, float, float]  # kind of margin, alpha, scale, margin


def setting_of(row: Row) -> Setting:
    """What a row of the paper is found by among results."""
    return KINDS[row.loss], row.alpha, row.scale, row.margin


@dataclass(frozen=True)
class Measured:
    """One setting on one protocol, over the seeds that were run.

    Attributes:
        name: Of the system.
        setting: None where the model card does not say.
        protocol: Without the seed.
        results: One per seed.
    """

    name: str
    setting: Setting | None
    protocol: str
    results: tuple[Result, ...]

    def tar(self, far: float) -> str:
        """TAR in percent at a FAR, with its deviation over seeds; a dash where it has none."""
        tars = [
            100.0 * point.tar
            for result in self.results
            for point in result.metrics.tar
            if point.far_target == far and point.tar is not None
        ]
        if len(tars) < len(self.results):
            return "-"
        if len(tars) == 1:
            return f"{tars[0]:.2f}"
        return f"{np.mean(tars):.2f} +- {np.std(tars, ddof=1):.2f}"

    @property
    def num_impostors(self) -> list[int]:
        """Impostor pairs of every seed."""
        return [result.protocol.num_impostors for result in self.results]

    @property
    def gap(self) -> float | None:
        """The effective margin; None where the model card does not say."""
        card = self.results[0].system.model_card or {}
        try:
            return float(card["effective margin"])
        except (KeyError, TypeError, ValueError):  # that of an angular margin is no number
            return None

    @property
    def fars(self) -> list[float]:
        """FARs that were asked for, the largest first."""
        points = (point for result in self.results for point in result.metrics.tar)
        return sorted({point.far_target for point in points}, reverse=True)


def find_results(folder: Path) -> list[Path]:
    """Every ``result.json`` below a folder, or the file that was named.

    Raises:
        DataError: There is none.
    """
    found = [folder] if folder.is_file() else sorted(folder.rglob("result.json"))
    if not found:
        raise DataError(
            f"{folder} has no result.json; give a folder of `qmargin demo`, or of results of "
            "`qmargin evaluate`"
        )
    return found


def measured_in(paths: Sequence[Path]) -> list[Measured]:
    """Results by setting and protocol, in the order in which they were found."""
    groups: dict[tuple[str, Setting | None, str], list[Result]] = {}
    for path in paths:
        result = read_result(path)
        name = SEED.sub("", result.protocol.name)
        groups.setdefault((result.system.name, _setting(result), name), []).append(result)
    return [Measured(*key, tuple(found)) for key, found in groups.items()]


def _setting(result: Result) -> Setting | None:
    card = result.system.model_card or {}
    found = loss_settings(card)
    kind = card.get("margin_kind")
    if kind is None or found.alpha is None or found.scale is None or found.margin is None:
        return None
    return kind, found.alpha, found.scale, found.margin
