"""Settings are chosen by means over seeds on validation identities; Optuna proposes and prunes."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.experiments import run, small_comparison, small_sweep
from helpers.runs import tiny_recipe
from qmargin.errors import ConfigError, DataError
from qmargin.experiments import slots, storage
from qmargin.experiments.experiment import Experiment, Search, make_arm
from qmargin.experiments.run import Outcome, Run, Task
from qmargin.experiments.search import Tried, finalists_of, gather, ranked
from qmargin.losses.hardness import hardness

MEASURE = "tar@0.01"
RECIPE = tiny_recipe()


def tried(arm: str, point: dict[str, str], *tars: float | None) -> Tried:
    outcomes = tuple(
        Outcome("failed") if tar is None else Outcome("finished", {"eer": 0.02, MEASURE: tar})
        for tar in tars
    )
    return Tried(arm, point, RECIPE, outcomes, len(tars))


def test_the_best_mean_over_seeds_is_chosen() -> None:
    points = [{"loss.margin": text} for text in ("0.1", "0.2", "0.3")]
    rows = [
        tried("x", points[0], 0.5, 0.3),
        tried("x", points[1], 0.45, 0.45),
        tried("x", points[2], 0.8, None),  # counts as TAR 0
    ]
    assert [one.mean(MEASURE) for one in rows] == pytest.approx([0.4, 0.45, 0.4])
    assert [one.note for one in rows] == ["", "", "1 failed"]
    assert rows[2].mean("eer") == pytest.approx(0.51)
    assert [one.point for one in ranked(rows, MEASURE)["x"]] == [points[1], points[0], points[2]]


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(DataError, match="all runs of cosface failed"):
        ranked([tried("cosface", {}, None)], MEASURE)
    with pytest.raises(DataError, match=r"too few .*pairs for tar@0\.0001"):
        ranked([tried("cosface", {}, 0.5)], "tar@0.0001")


def test_finalists_differ_in_more_than_the_margin_as_long_as_there_are_such() -> None:
    def point(alpha: float, scale: float, margin: float) -> dict[str, str]:
        return {"loss.alpha": f"{alpha}", "loss.scale": f"{scale}", "loss.margin": f"{margin}"}

    easy, hard, sparse = (1.0, 16.0), (1.0, 32.0), (1.5, 16.0)
    by_tar = [(*easy, 0.2), (*easy, 0.1), (*hard, 0.1), (*easy, 0.3), (*sparse, 0.1), (*hard, 0.2)]
    rows = [tried("x", point(*one), 1.0 - 0.1 * rank) for rank, one in enumerate(by_tar)]
    best = [(*easy, 0.2), (*hard, 0.1), (*sparse, 0.1), (*easy, 0.1), (*hard, 0.2), (*easy, 0.3)]
    for count in range(7):
        expected = [point(*one) for one in best[:count]]
        assert finalists_of(rows[::-1], MEASURE, count) == {"x": expected}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Runs that take no time: a large scale is good in a short run, and bad in a long one."""
    runs: list[Run] = []

    def execute(run: Run, task: Task, *, device: str) -> Outcome:
        runs.append(run)
        loss, is_long = run.recipe.loss, run.recipe.run.epochs > 1
        tar = 0.1 * loss.margin + 0.5 * ((loss.scale == 32.0) != is_long)
        return Outcome("finished", {"eer": 0.1, MEASURE: tar})

    monkeypatch.setattr(slots, "execute", execute)
    return runs


def test_finalists_are_trained_by_the_recipe_as_it_is(executed: list[Run], tmp_path: Path) -> None:
    arms = {
        "cosface": make_arm("cosface", {"scale": [16, 32], "margin": [0.1, 0.2]}),
        "q_margin": make_arm("q_margin", {"scale": [10, 16], "margin": 0.2}),
    }
    search = Search(settings=("run.epochs=1",), finalists=2, seeds=(1000, 1001), measure=MEASURE)
    experiment = replace(small_comparison(), arms=arms, search=search)
    finished, _ = run(experiment, tmp_path, search_only=True)
    short = [one for one in executed if one.recipe.run.epochs == 1]
    assert executed[:12] == short and len(executed) == 12 + 8
    assert {one.recipe.seed for one in executed} == {1000, 1001}
    assert [len(part) for part in finished.rounds] == [6, 4]
    # the second of the short search is best after the long one
    assert finished.chosen["cosface"] == {"loss.scale": "16", "loss.margin": "0.2"}
    assert gather(executed[:1], {}) and not (tmp_path / "runs").exists()


def test_hardness_reach_and_the_prototypes_rate_are_axes(
    executed: list[Run], tmp_path: Path
) -> None:
    """Of 2 x 3 x 2 points those of an easy alpha 1.25 cannot have the small reach."""
    axes = {"alpha": [1.25, 2.0], "hardness": [0.8, 1.6, 2.2], "reach": [1.0, 1.6]}
    arm = make_arm("q_margin", {**axes, "head.lr_ratio": [1, 10]})
    search = Search(measure=MEASURE)
    experiment = replace(small_comparison(), arms={"q_margin": arm}, search=search)
    left_out = experiment.arms["q_margin"].left_out
    finished, said = run(experiment, tmp_path, search_only=True)
    assert 0 < len(left_out) < 24 and len(executed) == 24 - len(left_out)
    for one in executed:
        recipe, loss = one.recipe, one.recipe.loss
        assert loss.reach == pytest.approx(float(one.point["reach"])) and loss.margin >= 0.0
        sizes = {"num_classes": recipe.data.num_classes}
        sizes["embedding_dim"] = recipe.model.embedding_dim
        found = hardness(loss.order, loss.scale, **sizes).mean
        assert found == pytest.approx(float(one.point["hardness"]))
        assert recipe.head.lr_ratio == float(one.point["head.lr_ratio"])
    (told,) = [line for line in said if "are left out" in line]
    assert told.startswith(f"q_margin: {len(left_out)} of 24 settings are left out")
    assert "alpha 1.25, hardness 0.8, reach 1" in told
    table = (tmp_path / "search.md").read_text(encoding="utf-8").splitlines()
    heads = [head.strip() for head in next(line for line in table if "hardness" in line).split("|")]
    assert heads[heads.index("hardness") + 1] == "reach"
    assert finished.chosen["q_margin"] in [one.point for one in executed]
    finalists = finalists_of(finished.rounds[0], MEASURE, 2)["q_margin"]
    keys = ("loss.alpha", "hardness", "head.lr_ratio")
    assert len({tuple(point[key] for key in keys) for point in finalists}) == 2


def test_points_of_an_arm_may_name_what_they_aim_at(executed: list[Run], tmp_path: Path) -> None:
    point = {"loss.alpha": "1.5", "hardness": "2.2", "reach": "1"}
    arm = replace(make_arm("q_margin", {}), points=(point, {**point, "reach": "1.5"}))
    experiment = replace(small_comparison(), arms={"q_margin": arm}, search=Search(measure=MEASURE))
    run(experiment, tmp_path, search_only=True)
    assert [one.recipe.loss.reach for one in executed] == pytest.approx([1.0, 1.5])
    impossible = replace(arm, points=(point, {**point, "reach": "0.01"}))
    with pytest.raises(ConfigError, match=r"arms\.q_margin: reach is 0.01, but with alpha 1.5"):
        replace(experiment, arms={"q_margin": impossible})


def test_one_hardness_and_reach_are_nothing_to_search(executed: list[Run], tmp_path: Path) -> None:
    arm = make_arm("q_margin", {"alpha": 1.5, "hardness": 2.2, "reach": 1.0})
    assert arm.is_fixed and arm.points == ({"hardness": "2.2", "reach": "1"},)
    experiment = replace(small_comparison(), arms={"q_margin": arm})
    assert not experiment.searched
    recipe = experiment.run_recipe("q_margin", arm.points[0], seed=0, is_search=False)
    assert recipe.loss.reach == pytest.approx(1.0) and recipe.loss.alpha == 1.5
    mixed = make_arm("q_margin", {"alpha": [1.5, 2.0], "hardness": 2.2, "reach": 1.0})
    assert [point["hardness"] for point in mixed.candidates] == ["2.2", "2.2"]


# -- Optuna ---------------------------------------------------------------------------------------

needs_optuna = pytest.mark.skipif(
    storage.find_spec("optuna") is None, reason="optuna is not installed"
)


def searched(method: str, points: int, *axes: str, **options: object) -> Experiment:
    return small_sweep(*axes, method=method, num_points=points, **options)  # type: ignore[arg-type]


@needs_optuna
def test_an_arm_without_a_choice_is_measured_beside_a_search(
    executed: list[Run], tmp_path: Path
) -> None:
    search = Search(method="random", num_points=2, measure=MEASURE)
    finished, _ = run(small_comparison(search=search), tmp_path, search_only=True)
    assert [one.arm for one in finished.rounds[0]].count("q_margin") == 1


@needs_optuna
@pytest.mark.parametrize("method", ["random", "optuna"])
def test_points_lie_in_the_ranges(executed: list[Run], tmp_path: Path, method: str) -> None:
    axes = ("loss.scale=8:64:log", "loss.alpha=1.25,1.5", "run.epochs=2:9")
    finished, _ = run(searched(method, 8, *axes), tmp_path)
    assert len(finished.rounds[0]) == len(executed) == 8
    for one in finished.rounds[0]:
        assert 8.0 <= float(one.point["loss.scale"]) <= 64.0
        assert one.point["loss.alpha"] in ("1.25", "1.5") and 2 <= int(one.point["run.epochs"]) <= 9


@needs_optuna
def test_a_reach_that_is_drawn_out_of_reach_is_drawn_again(
    executed: list[Run], tmp_path: Path
) -> None:
    axes = ("loss.alpha=1.25,2", "loss.scale=2:16:log", "reach=0.2:1.2")
    finished, said = run(searched("random", 8, *axes), tmp_path)
    assert 0 < len(finished.rounds[0]) <= 8
    for one in finished.rounds[0]:
        assert one.recipe.loss.reach == pytest.approx(float(one.point["reach"]))
    narrow = [line for line in said if "narrow the ranges" in line]
    assert len(narrow) == (len(finished.rounds[0]) < 8)


@needs_optuna
def test_a_search_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure grows with the scale: later points have larger ones than the first."""
    scales: list[float] = []

    def execute(run: Run, task: Task, *, device: str) -> Outcome:
        scales.append(run.recipe.loss.scale)
        return Outcome("finished", {"eer": 0.1, MEASURE: scales[-1] / 64})

    monkeypatch.setattr(slots, "execute", execute)
    run(searched("optuna", 30, "loss.scale=8:64:log"), tmp_path)
    assert sum(scales[20:]) / 10 > 1.3 * sum(scales[:10]) / 10


@needs_optuna
def test_a_search_continues_with_what_it_knows(tmp_path: Path) -> None:
    axes = ("loss.scale=8:64:log", "m_eff=0.1:1.0")
    run(searched("optuna", 2, *axes), tmp_path)
    finished, said = run(searched("optuna", 3, *axes), tmp_path)
    assert "3 runs, 2 of them complete" in said and len(finished.rounds[0]) == 3
    other, _ = run(searched("optuna", 1, "loss.alpha=1.25,1.5"), tmp_path)  # other axes
    assert [set(one.point) for one in other.rounds[0]] == [{"loss.alpha"}]


@needs_optuna
def test_a_point_that_is_proposed_again_is_one_row(executed: list[Run], tmp_path: Path) -> None:
    finished, _ = run(searched("random", 8, "loss.alpha=1.25,1.5"), tmp_path)
    assert len(finished.rounds[0]) == len(executed) == 2


@needs_optuna
def test_runs_that_are_behind_are_pruned(tmp_path: Path) -> None:
    looks = ("run.max_steps=24", "run.validate_every=12", "schedule.warmup_epochs=0")
    axis = "optimizer.lr=0.1,0.09,0.08,0.11,1e-6"  # the last does not learn
    experiment = small_sweep(axis, settings=looks, prune=True)
    finished, _ = run(experiment, tmp_path)
    rows = finished.rounds[0]
    assert [one.outcomes[0].state for one in rows[:3]] == ["finished"] * 3
    assert rows[4].note == "1 stopped early" and "step 12" in rows[4].outcomes[0].error
    assert "1 stopped early" in (tmp_path / "search.md").read_text(encoding="utf-8")
    again, said = run(experiment, tmp_path)  # and stays so
    assert "5 runs, 5 of them complete" in said and again.rounds[0][4].note == rows[4].note


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    for experiment in (
        searched("optuna", 3, "loss.scale=8:64"),
        small_sweep("loss.scale=8,16", prune=True),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'qmargin\[optuna\]'"):
            run(experiment, tmp_path / "new")
    assert not (tmp_path / "new").exists()
