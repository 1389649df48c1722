"""How losses choose their settings: by what each setting finds on validation identities."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qmargin.errors import DataError
from qmargin.files import write_atomically
from qmargin.study.studies import Round, Setting, Study
from qmargin.sweep.axes import Point
from qmargin.sweep.trial import RESULT, TrialResult, parse_result
from qmargin.sweep.validation import EER

CHOSEN = "chosen.json"
FORMAT = "qmargin-study-rounds"
SEARCH_MARK = f'"format": "{FORMAT}"'
Settings = dict[str, Setting]
Grid = Mapping[str, Sequence[Setting]]


class Tried(NamedTuple):
    """A setting of a loss and what its trainings measured, one per seed; empty if one failed."""

    key: str
    setting: Setting
    metrics: tuple[Mapping[str, float], ...]

    def values(self, measure: str) -> list[float]:
        """A measure with every seed; a training that failed accepted nobody."""
        worst = 1.0 if measure == EER else 0.0
        return [found[measure] if found else worst for found in self.metrics]

    def mean(self, measure: str) -> float:
        """Over seeds."""
        return float(np.mean(self.values(measure)))

    @property
    def num_failed(self) -> int:
        """Trainings without an end."""
        return sum(not found for found in self.metrics)


def point_of(key: str, setting: Setting) -> Point:
    """What names a setting in results.

    Examples:
        >>> point_of("q_margin", (1.25, 16.0, 0.1))
        {'loss': 'q_margin', 'alpha': '1.25', 'scale': '16', 'margin': '0.1'}
    """
    numbers = zip(("alpha", "scale", "margin"), setting, strict=True)
    return {"loss": key, **{name: f"{value:g}" for name, value in numbers}}


def grid_of(study: Study, losses: Sequence[str]) -> Grid:
    """All settings that a study has of some losses."""
    return {key: study.grid[key] for key in losses if key in study.grid}


def gather(study: Study, grid: Grid, results: Sequence[TrialResult]) -> list[Tried]:
    """Results by setting, in the order of a grid."""

    def metrics(point: Point, seed: int) -> dict[str, float]:
        of = (r for r in results if r.point == point and r.seed == seed and r.state == "finished")
        return next((result.metrics for result in of), {})

    return [
        Tried(
            key,
            setting,
            tuple(metrics(point_of(key, setting), seed) for seed in study.seeds_of_search),
        )
        for key, settings in grid.items()
        for setting in settings
    ]


def find_rounds(
    study: Study,
    losses: Sequence[str],
    results_of: Callable[[Grid, Round], Sequence[TrialResult]],
) -> list[list[Tried]]:
    """All rounds of a search, the first of them first: each tries the best of the one before.

    Args:
        study: Whose search it is.
        losses: Of the study.
        results_of: Trains the settings of a round, or reads what their trainings have left.
    """
    grid = grid_of(study, losses)
    rounds: list[list[Tried]] = []
    for part in study.rounds:
        if rounds:
            grid = finalists_of(rounds[-1], study.measure, study.finalists)
        rounds.append(gather(study, grid, results_of(grid, part)))
    return rounds


def read_rounds(study: Study, folder: Path, losses: Sequence[str]) -> list[list[Tried]]:
    """What the rounds of a search have left in the folder of a study.

    Raises:
        DataError: A training is missing.
    """

    def results_of(grid: Grid, part: Round) -> list[TrialResult]:
        paths = sorted((folder / part.name).glob(f"*/{RESULT}"))
        results = [parse_result(path) for path in paths]
        _check_whole(study, grid, results, folder / part.name)
        return results

    return find_rounds(study, losses, results_of)


def _check_whole(study: Study, grid: Grid, results: Sequence[TrialResult], folder: Path) -> None:
    """A setting that was not trained is not one that failed."""
    there = [(result.point, result.seed) for result in results]
    for key, settings in grid.items():
        for point in (point_of(key, setting) for setting in settings):
            if any((point, seed) not in there for seed in study.seeds_of_search):
                raise DataError(
                    f"{folder} holds no whole search of {study.name}, {', '.join(point.values())} "
                    "is missing; run the study again"
                )


def choose(tried: Sequence[Tried], measure: str) -> Settings:
    """The setting of each loss with the largest mean over seeds; of equal ones the first."""
    return {key: settings[0] for key, settings in ranked(tried, measure).items()}


def finalists_of(tried: Sequence[Tried], measure: str, count: int) -> dict[str, list[Setting]]:
    """At most so many settings of each loss: the best of every alpha and scale, best first.

    Second ones follow only where these are too few. Margins alone often tie after a short training,
    and three settings that differ in nothing else would leave little to choose.
    """
    chosen = {}
    for key, settings in ranked(tried, measure).items():
        kinds = [setting[:2] for setting in settings]
        places = [kinds[:rank].count(kind) for rank, kind in enumerate(kinds)]
        order = sorted(range(len(settings)), key=places.__getitem__)
        chosen[key] = [settings[rank] for rank in order[:count]]
    return chosen


def ranked(tried: Sequence[Tried], measure: str) -> dict[str, list[Setting]]:
    """Settings of each loss, that with the largest mean over seeds first.

    Raises:
        DataError: Every training of a loss failed, or the measure could not be measured.
    """
    best: dict[str, list[Setting]] = {}
    for key in dict.fromkeys(one.key for one in tried):
        of = [one for one in tried if one.key == key]
        ended = [found for one in of for found in one.metrics if found]
        if not ended:
            raise DataError(
                f"no training of {key} ended well; see {key}-*/train.log in search/ or finalists/"
            )
        if measure not in ended[0]:
            raise DataError(
                f"the validation identities have too few pairs for {measure}, by which settings "
                f"are chosen; they measure {', '.join(ended[0])}: give more data"
            )
        of.sort(key=lambda one: one.mean(measure), reverse=True)
        best[key] = [one.setting for one in of]
    return best


def read_chosen(path: Path) -> Settings:
    """Settings that were chosen before; none without the file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
        return {key: (float(a), float(s), float(m)) for key, (a, s, m) in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} holds no settings ({error}); remove it to choose again") from error


def write_search(
    path: Path, study: Study, rounds: Sequence[Sequence[Tried]], *, command: str
) -> None:
    """A record of a search that others can compare with, as JSON."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "study": study.name,
        "measure": study.measure,
        "seeds": list(study.seeds_of_search),
        "command": command,
        "rounds": [
            {"epochs": part.epochs, "tried": [one._asdict() for one in tried]}
            for part, tried in zip(study.rounds, rounds, strict=True)
        ],
    }
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def read_search(path: Path) -> tuple[list[list[Tried]], str]:
    """What ``write_search`` wrote: settings of every round, and the measure to choose by."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError("another format")
        rounds = [
            [
                Tried(one["key"], tuple(one["setting"]), tuple(one["metrics"]))
                for one in part["tried"]
            ]
            for part in content["rounds"]
        ]
        return rounds, content["measure"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the record of a search ({error})") from error
