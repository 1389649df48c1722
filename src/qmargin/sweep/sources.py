"""Which point of the axes comes next: the next of a grid, or what a search proposes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from qmargin.errors import ConfigError
from qmargin.sweep.axes import Axis, Point, Range, as_text, grid
from qmargin.sweep.validation import EER
from qmargin.training.recipe import Recipe


class Source(Protocol):
    """Gives points, and hears what came of them.

    Attributes:
        num_points: That it will give.
        listed: Those of them that are known from the start, in order.
    """

    num_points: int
    listed: Sequence[Point]

    def next_point(self) -> Point | None:
        """The next point, or None when there are no more."""
        ...

    def tell(self, point: Point, value: float | None) -> None:
        """The mean of the measure over the seeds; None if a trial failed."""
        ...


class Grid:
    """Every combination of values, in order."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.listed: Sequence[Point] = grid(axes)
        self.num_points = len(self.listed)
        self._left = deque(self.listed)

    def next_point(self) -> Point | None:
        """The next of the grid."""
        return self._left.popleft() if self._left else None

    def tell(self, point: Point, value: float | None) -> None:
        """A grid does not learn."""


def check_package() -> None:
    """Refuse a search without the package that does it."""
    if find_spec("optuna") is None:
        raise ConfigError(
            "--search optuna needs a package; pip install 'qmargin[optuna]', or give a grid"
        )


class OptunaSearch:
    """Bayesian search by Optuna's tree of Parzen estimators.

    Nothing of Optuna is stored: results on the disk are told to a new study when a sweep goes on.

    Args:
        axes: Lists of values and ranges.
        recipe: Of the sweep.
        num_points: To visit, those of earlier calls included.
        known: Points that were begun before; they come first. Those that the axes do not have, or
            no longer, are passed over, as a grid does.
        measure: That is made small if it is the EER, and large if it is a TAR.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        recipe: Recipe,
        *,
        num_points: int,
        known: Sequence[Point] = (),
        measure: str,
    ) -> None:
        check_package()
        if not axes:
            raise ConfigError("there is nothing to search; give axes, as in --grid loss.scale=8:64")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        own = [point for point in known if is_within(point, axes, recipe)]
        self.num_points = max(num_points, len(own))
        self.listed: Sequence[Point] = own
        self._axes, self._recipe, self._left = axes, recipe, deque(own)
        self._num_given = 0
        # another seed after every start: the same one would propose the first points again
        sampler = optuna.samplers.TPESampler(seed=recipe.seed + len(known))
        directions = optuna.study.StudyDirection
        direction = directions.MINIMIZE if measure == EER else directions.MAXIMIZE
        self._study = optuna.create_study(direction=direction, sampler=sampler)
        self._kinds = {axis.key: _distribution(axis) for axis in axes}
        self._asked: dict[tuple[tuple[str, str], ...], Any] = {}

    def next_point(self) -> Point | None:
        """One that was begun, or a new one."""
        if self._num_given == self.num_points:
            return None
        self._num_given += 1
        if self._left:
            return self._left.popleft()
        trial = self._study.ask(self._kinds)
        point = {axis.key: self._text(axis, trial.params[axis.key]) for axis in self._axes}
        self._asked[tuple(point.items())] = trial
        return point

    def tell(self, point: Point, value: float | None) -> None:
        """Tell the study; a point of an earlier call is added to it."""
        import optuna

        trial = self._asked.pop(tuple(point.items()), None)
        state = optuna.trial.TrialState
        if trial is not None:
            self._study.tell(trial, value, state=state.FAIL if value is None else None)
        elif value is not None:
            params = {axis.key: _number(axis, point[axis.key]) for axis in self._axes}
            kinds = self._kinds
            old = optuna.trial.create_trial(params=params, distributions=kinds, value=value)
            self._study.add_trial(old)

    def _text(self, axis: Axis, value: Any) -> str:
        if isinstance(axis, Range):
            return as_text(self._recipe, axis.key, value)
        return str(value)


def is_within(point: Point, axes: Sequence[Axis], recipe: Recipe) -> bool:
    """Whether a search over these axes could have proposed a point.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> from qmargin.sweep.axes import parse_axis
        >>> axes = [parse_axis("loss.scale=8:64")]
        >>> [is_within({"loss.scale": text}, axes, debug()) for text in ("8", "64.1")]
        [True, False]
    """
    return point.keys() == {axis.key for axis in axes} and all(
        _has(axis, point[axis.key], recipe) for axis in axes
    )


def _has(axis: Axis, text: str, recipe: Recipe) -> bool:
    if not isinstance(axis, Range):
        return text in axis.texts
    low, high = (float(as_text(recipe, axis.key, end)) for end in (axis.low, axis.high))
    try:
        return low <= float(text) <= high  # the ends are rounded as proposals are
    except ValueError:  # a word, of a list that this axis was before
        return False


def _distribution(axis: Axis) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(axis, Range):
        return FloatDistribution(axis.low, axis.high, log=axis.is_log)
    return CategoricalDistribution(axis.texts)


def _number(axis: Axis, text: str) -> float | str:
    """What Optuna calls the value; rounding may have left the range by a digit."""
    if isinstance(axis, Range):
        return min(max(float(text), axis.low), axis.high)
    return text
