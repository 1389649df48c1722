"""Grids and searches."""

import importlib.util
from pathlib import Path

import pytest

from helpers.sweeps import small_sweep
from qmargin.errors import ConfigError
from qmargin.recipes import get_recipe
from qmargin.sweep import sources
from qmargin.sweep.axes import parse_axis
from qmargin.sweep.run import run_sweep
from qmargin.sweep.sources import Grid, OptunaSearch

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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'qmargin\[optuna\]'"):
        search(2)
