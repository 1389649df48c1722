"""Search for settings: the points to try, and the best point of each arm."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qmargin.errors import ConfigError, DataError
from qmargin.experiments.experiment import Arm, Search
from qmargin.experiments.measure import EER
from qmargin.experiments.run import Outcome, Run
from qmargin.experiments.space import EFFECTIVE, REACH, Axis, Point, Range, axis_text
from qmargin.experiments.storage import RunBook, load_study
from qmargin.training.recipe import Recipe

if TYPE_CHECKING:
    import optuna

MARGINS = ("loss.margin", EFFECTIVE, REACH)  # settings in which finalists of one arm should differ


@dataclass(frozen=True)
class Tried:
    """A point of an arm and the outcomes of its runs, in the order of seeds."""

    arm: str
    point: Point = field(hash=False)
    recipe: Recipe  # of the first seed
    outcomes: tuple[Outcome, ...]  # of the seeds that have ended
    num_wanted: int  # requested seeds

    def known(self, measure: str) -> list[float]:
        """A measure of the runs that have it."""
        return [one.measures[measure] for one in self.outcomes if measure in one.measures]

    def mean(self, measure: str) -> float:
        """Over seeds; a failed run counts as TAR 0 or EER 1."""
        worst = 1.0 if measure == EER else 0.0
        return statistics.fmean(one.measures.get(measure, worst) for one in self.outcomes)

    def count(self, state: str) -> int:
        """Runs with a state."""
        return sum(one.state == state for one in self.outcomes)

    @property
    def is_complete(self) -> bool:
        """Whether every seed was trained to its end."""
        return self.count("finished") == self.num_wanted

    @property
    def note(self) -> str:
        """Counts of runs that are not complete; empty for none."""
        missing = self.num_wanted - len(self.outcomes)
        counts = {"stopped early": self.count("pruned"), "failed": self.count("failed")}
        return ", ".join(f"{n} {state}" for state, n in {**counts, "missing": missing}.items() if n)


def gather(runs: Sequence[Run], outcomes: Mapping[Run, Outcome]) -> list[Tried]:
    """Outcomes by arm and point, in the order of the runs."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.arm, tuple(run.point.items())), []).append(run)
    made = []
    for (arm, point), members in groups.items():
        members.sort(key=lambda run: run.recipe.seed)
        found = tuple(outcomes[run] for run in members if run in outcomes)
        made.append(Tried(arm, dict(point), members[0].recipe, found, len(members)))
    return made


def ranked(tried: Sequence[Tried], measure: str) -> dict[str, list[Tried]]:
    """Points of each arm, the best mean over seeds first; of equal ones the first that was tried.

    Raises:
        DataError: All runs of an arm failed, or the measure could not be measured.
    """
    best: dict[str, list[Tried]] = {}
    for arm in dict.fromkeys(one.arm for one in tried):
        own = [one for one in tried if one.arm == arm]
        ended = [one for point in own for one in point.outcomes if one.measures]
        if not ended:
            raise DataError(f"all runs of {arm} failed; see search/{arm}-*/train.log")
        if measure not in ended[0].measures:
            raise DataError(
                f"too few validation pairs for {measure}; give more data, or choose one of "
                f"{', '.join(ended[0].measures)}"
            )
        # runs that were stopped early rank behind the others
        own.sort(key=lambda one: one.mean(measure), reverse=measure != EER)
        best[arm] = sorted(own, key=lambda one: one.count("pruned") > 0)
    return best


def finalists_of(tried: Sequence[Tried], measure: str, count: int) -> dict[str, list[Point]]:
    """At most ``count`` points of each arm: the best of every setting but the margin, best first.

    Second ones follow only where these are too few. Margins alone often tie after a short training,
    and points that differ only in them would leave little to choose.
    """
    chosen = {}
    for arm, points in ranked(tried, measure).items():
        kinds = [
            {key: text for key, text in one.point.items() if key not in MARGINS} for one in points
        ]
        places = [kinds[:rank].count(kind) for rank, kind in enumerate(kinds)]
        order = sorted(range(len(points)), key=places.__getitem__)
        chosen[arm] = [points[rank].point for rank in order[:count]]
    return chosen


class Source:
    """Source of runs that is told their outcomes; this one has a list, such as a grid."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self.runs = list(runs)  # those known by now
        self._waiting = deque(runs)

    @property
    def num_runs(self) -> int:
        """Total number of runs, as far as known."""
        return len(self.runs)

    def next_run(self) -> Run | None:
        """The next run; None if there is none now."""
        return self._waiting.popleft() if self._waiting else None

    def tell(self, run: Run, outcome: Outcome) -> None:
        """Note that a run of this source has ended."""

    def waits(self) -> bool:
        """Whether outcomes of other processes may lead to more runs."""
        return False


class Sampled(Source):
    """Points that Optuna proposes, at random or by its tree of Parzen estimators.

    The study of each arm is in the storage, so that a search that is resumed, or shared with other
    processes, uses all of it. ``make_runs`` gives the runs of a point, one per seed.
    """

    def __init__(
        self,
        arms: Mapping[str, Arm],
        search: Search,
        recipes: Mapping[str, Recipe],
        make_runs: Callable[[str, Point], list[Run]],
        book: RunBook,
    ) -> None:
        super().__init__()
        self._search, self._make_runs, self._book = search, make_runs, book
        self._studies = {
            name: _ArmStudy(name, arm, search, recipes[name], book) for name, arm in arms.items()
        }
        self._order = deque(self._studies)
        self._open: dict[tuple[str, tuple[tuple[str, str], ...]], optuna.Trial] = {}
        self._outcomes: dict[Run, Outcome] = {}
        self._add_known()

    @property
    def num_runs(self) -> int:
        wanted = len(self._studies) * self._search.num_points * len(self._search.seeds)
        return max(wanted, len(self.runs))

    def next_run(self) -> Run | None:
        while not self._waiting and self._order:
            arm = self._order[0]
            self._order.rotate(-1)
            proposal = self._studies[arm].ask()
            if proposal is None:
                self._order.remove(arm)
            else:
                self._begin(arm, *proposal)
        if not self._waiting:
            self._add_known()
        return super().next_run()

    def tell(self, run: Run, outcome: Outcome) -> None:
        self._outcomes[run] = outcome
        self._settle(run.arm, run.point)

    def waits(self) -> bool:
        others = [name for name, study in self._studies.items() if study.has_others()]
        self._order.extend(name for name in others if name not in self._order)
        return bool(others)

    def _add(self, runs: Sequence[Run]) -> None:
        new = [run for run in runs if run not in self.runs]
        self.runs += new
        self._waiting += new

    def _add_known(self) -> None:
        """Add points that were measured before, or by other processes."""
        for arm, study in self._studies.items():
            for point in study.measured():
                self._add(self._make_runs(arm, point))

    def _begin(self, arm: str, trial: optuna.Trial, point: Point) -> None:
        key = (arm, tuple(point.items()))
        try:
            runs = self._make_runs(arm, point)
        except ConfigError:  # impossible combinations of values
            runs = []
        if not runs or key in self._open:  # of a point that is trained now, one run is enough
            self._studies[arm].tell(trial, None)
            return
        self._open[key] = trial
        self._add(runs)
        self._settle(arm, point)

    def _settle(self, arm: str, point: Point) -> None:
        runs = [run for run in self.runs if run.arm == arm and run.point == point]
        key = (arm, tuple(point.items()))
        if key not in self._open or any(run not in self._outcomes for run in runs):
            return
        values = [self._outcomes[run].measures.get(self._book.measure) for run in runs]
        known = [value for value in values if value is not None]
        mean = statistics.fmean(known) if len(known) == len(values) else None
        self._studies[arm].tell(self._open.pop(key), mean)


class _ArmStudy:
    """The Optuna study of an arm's points."""

    def __init__(self, name: str, arm: Arm, search: Search, recipe: Recipe, book: RunBook) -> None:
        import optuna

        if not arm.axes:
            raise ConfigError("there is nothing to search; give lists or ranges of values")
        self._axes, self._recipe, self._book = arm.axes, recipe, book
        self._most, self._num_asked = search.num_points, 0
        self._kinds = {axis.key: _distribution(axis) for axis in arm.axes}
        space = hashlib.sha256(repr(arm.axes).encode()).hexdigest()[:8]  # others do not mix
        self._study = load_study(book.url, f"{book.name} {name} points {space}", book.measure)
        # a new seed for every start and process: the same seed would propose the same points
        seed = None if book.is_shared else (recipe.seed + len(self._trials())) % 2**32
        kinds = {"random": optuna.samplers.RandomSampler, "optuna": optuna.samplers.TPESampler}
        self._study.sampler = kinds[search.method](seed=seed)

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def ask(self) -> tuple[optuna.Trial, Point] | None:
        """The next point, first those of lost processes; None when there are enough."""
        import optuna

        trials = self._trials()
        for trial in trials:
            if trial.state.name == "RUNNING" and not self._book.is_alive(trial):
                self._study.enqueue_trial(trial.params)
                with contextlib.suppress(Exception):  # another process was faster
                    self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        counted = [trial for trial in trials if trial.state.name in ("COMPLETE", "RUNNING")]
        is_gone = len(counted) < len(trials) and self._num_asked >= 2 * self._most
        if len(counted) >= self._most or is_gone:
            return None
        self._num_asked += 1
        made = self._study.ask(self._kinds)
        self._book.hold(made)
        return made, self._point(made.params)

    def tell(self, trial: optuna.Trial, value: float | None) -> None:
        """The mean over seeds; None if a run failed or the point is impossible."""
        import optuna

        self._book.drop(trial)
        state = optuna.trial.TrialState.FAIL if value is None else None
        self._study.tell(trial, value, state=state)

    def measured(self) -> list[Point]:
        """Points that this process or another has measured."""
        return [self._point(one.params) for one in self._trials() if one.state.name == "COMPLETE"]

    def has_others(self) -> bool:
        """Whether a trial of another process runs."""
        return any(one.state.name == "RUNNING" for one in self._trials())

    def _point(self, params: Mapping[str, Any]) -> Point:
        return {axis.key: axis_text(self._recipe, axis, params[axis.key]) for axis in self._axes}


def _distribution(axis: Axis) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(axis, Range):
        return FloatDistribution(axis.low, axis.high, log=axis.is_log)
    return CategoricalDistribution(axis.texts)
