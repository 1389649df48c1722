"""Grids and searches."""

import importlib.util
from pathlib import Path

import pytest

from helpers.sweeps import small_sweep
from qmargin.errors import ConfigError
from qmargin.recipes import get_recipe
from qmargin.sweep import sources
from qmargin.sweep.axes import parse_axis
from qmargin.sweep.run import Schedule, run_sweep
from qmargin.sweep.sources import Grid, OptunaSearch, is_within
from qmargin.sweep.trial import TrialResult

AXES = [
    parse_axis("loss.scale=8:64:log"),
    parse_axis("loss.alpha=1.25,1.5"),
    parse_axis("run.epochs=2:9"),
]
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="optuna is not installed"
)


def test_a_grid_ends() -> None:
    source = Grid([parse_axis("loss.alpha=1.25,1.5")])
    assert source.num_points == 2
    points = [source.next_point() for _ in range(3)]
    assert points == [{"loss.alpha": "1.25"}, {"loss.alpha": "1.5"}, None]


def search(num_points: int, known: list | None = None) -> OptunaSearch:
    recipe = get_recipe("debug")
    return OptunaSearch(AXES, recipe, num_points=num_points, known=known or [], measure="tar@0.01")


@needs_optuna
def test_points_of_a_search_lie_in_the_ranges() -> None:
    source = search(12)
    for _ in range(12):
        point = source.next_point()
        assert point is not None
        assert 8.0 <= float(point["loss.scale"]) <= 64.0
        assert point["loss.alpha"] in ("1.25", "1.5") and 2 <= int(point["run.epochs"]) <= 9
        source.tell(point, None if point["loss.alpha"] == "1.5" else 0.5)
    assert source.next_point() is None


@needs_optuna
def test_a_search_learns() -> None:
    """The measure grows with the scale: later points have larger ones than the first."""
    source, scales = search(40), []
    for _ in range(40):
        point = source.next_point()
        assert point is not None
        scales.append(float(point["loss.scale"]))
        source.tell(point, scales[-1] / 64.0)
    assert sum(scales[30:]) / 10 > 1.3 * sum(scales[:10]) / 10


@needs_optuna
def test_known_points_come_first_and_count() -> None:
    old = [{"loss.scale": "63", "loss.alpha": "1.25", "run.epochs": "5"}]
    source = search(2, old)
    assert source.next_point() == old[0]
    source.tell(old[0], 0.9)
    assert len(source._study.trials) == 1
    assert source.next_point() is not None and source.next_point() is None


@needs_optuna
def test_a_search_goes_on(tmp_path: Path) -> None:
    axes, said = ("loss.scale=8:64:log", "m_eff=0.1:1.0"), []
    run_sweep(small_sweep(tmp_path, *axes, search="optuna", num_points=2))
    options = small_sweep(tmp_path, *axes, search="optuna", num_points=3, say=said.append)
    summary = run_sweep(options)
    assert said[0] == "trials: 3, there already: 2" and len(summary.rows) == 3


@needs_optuna
@pytest.mark.parametrize(
    "other",
    [
        {"loss.scale": "20", "loss.alpha": "1.75", "run.epochs": "5"},
        {"loss.scale": "65", "loss.alpha": "1.25", "run.epochs": "5"},
        {"loss.scale": "small", "loss.alpha": "1.25", "run.epochs": "5"},
        {"loss.scale": "20", "loss.alpha": "1.25"},
        {"loss.scale": "20", "loss.alpha": "1.25", "run.epochs": "5", "m_eff": "0.5"},
    ],
)
def test_points_outside_the_axes_are_passed_over(other: dict) -> None:
    inside = {"loss.scale": "20", "loss.alpha": "1.5", "run.epochs": "5"}
    source = search(1, [other, inside])
    assert source.next_point() == inside and source.next_point() is None
    source.tell(inside, 0.5)


def test_ends_of_a_range_are_rounded_as_points_are() -> None:
    axes = [parse_axis("loss.scale=8.12345:64"), parse_axis("run.epochs=2.4:9.6")]
    recipe = get_recipe("debug")
    assert is_within({"loss.scale": "8.123", "run.epochs": "2"}, axes, recipe)
    assert is_within({"loss.scale": "64", "run.epochs": "10"}, axes, recipe)
    assert not is_within({"loss.scale": "8.122", "run.epochs": "2"}, axes, recipe)


@needs_optuna
def test_a_search_with_other_values_goes_on_and_back(tmp_path: Path) -> None:
    def alphas(axis: str, num_points: int) -> set[str]:
        options = small_sweep(tmp_path, axis, search="optuna", num_points=num_points)
        return {row.point["loss.alpha"] for row in run_sweep(options).rows}

    first, other = "loss.alpha=1.25,1.5", "loss.alpha=1.25,1.75"
    assert alphas(first, 8) == {"1.25", "1.5"}
    assert alphas(other, 8) == {"1.25", "1.75"}
    assert alphas(first, 8) == {"1.25", "1.5"}
    assert len(list((tmp_path / "trials").iterdir())) == 3


@needs_optuna
def test_a_point_that_is_proposed_again_is_one_row(tmp_path: Path) -> None:
    options = small_sweep(tmp_path, "loss.alpha=1.25,1.5", search="optuna", num_points=8)
    assert len(run_sweep(options).rows) == 2
    assert len((tmp_path / "trials.jsonl").read_text(encoding="utf-8").splitlines()) == 2


class Repeating:
    """A search that proposes one point again and again."""

    num_points = 3
    listed = ()

    def __init__(self) -> None:
        self.told: list[float | None] = []
        self._left = [{"loss.alpha": "1.5"}] * self.num_points

    def next_point(self) -> dict[str, str] | None:
        return self._left.pop() if self._left else None

    def tell(self, point: dict[str, str], value: float | None) -> None:
        self.told.append(value)


def test_a_point_that_runs_is_not_started_twice(tmp_path: Path) -> None:
    source = Repeating()
    options = small_sweep(tmp_path, "loss.alpha=1.25,1.5")
    schedule = Schedule(options, source, "eer")
    trial = schedule.next_trial()
    assert trial is not None and schedule.num_trials == 3
    assert schedule.next_trial() is None and schedule.num_trials == 1
    assert source.told == [None, None]
    schedule.tell(trial, TrialResult(trial.point, 0, "", "finished", 6, {"eer": 0.25}, 1.0))
    assert source.told == [None, None, 0.25] and len(schedule.summary().rows) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'qmargin\[optuna\]'"):
        search(2)


def test_a_missing_package_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'qmargin\[optuna\]'"):
        run_sweep(small_sweep(tmp_path / "new", "loss.scale=8:64", search="optuna"))
    assert not (tmp_path / "new").exists()
