"""Named experiments are fair, and what is shipped and documented is what they found."""

import itertools
import json
import re
from pathlib import Path

import pytest

from qmargin.experiments.named import (
    SIZES,
    get_experiment,
    list_experiments,
    setting_point,
    stroke_recipe,
)
from qmargin.experiments.named.demo import DEMO_GRID, DEMO_SETTINGS, demo_experiment
from qmargin.experiments.tables import edges_of
from qmargin.registry import experiments

ROOT = Path(__file__).parents[2]
MADE = ("demo", "demo-search", "strokes-10k", "strokes-1m")


def test_every_loss_gets_the_same_effort(tmp_path: Path) -> None:
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
    for name in list_experiments():
        if name.startswith("paper-"):  # the settings of a table
            continue
        data = None if name in MADE else tmp_path
        experiment = get_experiment(name, data=data)
        arms = {key: arm for key, arm in experiment.arms.items() if arm.like is None}
        assert set(arms) == set(DEMO_SETTINGS["cpu"])
        assert len({len(arm.points) for arm in arms.values()}) == 1
        recipes = [experiment.arm_recipe(key) for key in arms]
        assert len({recipe.optimizer for recipe in recipes}) == 1
        for key in ("arcface", "cosface", "sparsemax"):  # whose alpha is given
            alphas = {point["loss.alpha"] for point in arms[key].points}
            assert alphas == {"2" if key == "sparsemax" else "1"}
    assert "sampled" not in get_experiment("demo-search").arms


def test_settings_of_the_demo_are_tried_by_its_own_recipe() -> None:
    point = setting_point(DEMO_SETTINGS["cpu"]["q_margin"])
    made = [
        one.run_recipe("q_margin", point, seed=0, is_search=False).sha256
        for one in (demo_experiment("cpu"), get_experiment("demo-search"))
    ]
    assert made[0] == made[1]


def test_experiments_of_gpu_size_train_in_bf16() -> None:
    for name in ("strokes-10k", "strokes-1m"):
        recipe = get_experiment(name).recipe
        assert recipe.precision.dtype == "bf16" and recipe.model.options["batch_norm"] is True
    assert stroke_recipe(SIZES["cpu"]).precision.dtype == "fp32"


def test_shipped_settings_are_those_that_the_search_chose() -> None:
    record = json.loads((ROOT / "docs" / "results" / "demo-search.json").read_text())
    (tried,) = (part["tried"] for part in record["rounds"])
    assert {(one["key"], tuple(one["setting"])) for one in tried} == {
        (key, setting) for key, settings in DEMO_GRID.items() for setting in settings
    }
    for key, setting in DEMO_SETTINGS["cpu"].items():
        means = {
            tuple(one["setting"]): sum(found[record["measure"]] for found in one["metrics"])
            for one in tried
            if one["key"] == key
        }
        assert max(means, key=means.__getitem__) == setting


def test_settings_for_a_gpu_are_those_of_the_results_page() -> None:
    page = (ROOT / "docs" / "results" / "strokes-10k.md").read_text()
    rows = [line.split("|")[1:6] for line in page.splitlines() if line.endswith("| chosen |")]
    chosen = {row[0].strip(): tuple(map(float, row[1:4])) for row in rows}
    titles = {arm.title: name for name, arm in demo_experiment("cuda").arms.items()}
    assert {titles[title]: found for title, found in chosen.items()} == DEMO_SETTINGS["cuda"]


def test_a_choice_at_an_edge_is_named() -> None:
    grid = [setting_point(one) for one in
            ((1.25, 7.0, 0.2), (1.25, 7.0, 0.4), (1.25, 10.0, 0.3), (1.5, 4.0, 0.3))]  # fmt: skip
    assert edges_of(grid[1], grid) == ["smallest scale", "largest margin"]
    assert edges_of(grid[2], grid) == ["largest scale"]
    assert edges_of(grid[3], grid) == []  # nothing beside it was tried
    assert edges_of(grid[2], [*grid, setting_point((1.25, 16.0, 0.3))]) == []


def test_experiments_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "_entries", dict(experiments._entries))
    experiments.register("mine", lambda device, data: demo_experiment("cpu"))
    assert get_experiment("mine").name == "demo" and "mine" in list_experiments()


def test_the_readme_says_what_the_pages_found() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    starts = [row for row, line in enumerate(lines) if line.startswith("| data | FAR |")]
    if not starts:
        pytest.skip("the README has no table of results")
    names = [cell.strip() for cell in lines[starts[0]].split("|")[3:-3]]
    page = ""
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[starts[0] + 2 :]):
        data, far, *cells, ahead, behind = (cell.strip() for cell in line.split("|")[1:-1])
        if data:
            (target,) = re.findall(r"\((.*?)\)", data)
            page = (ROOT / target).read_text()
        assert dict(zip(names, cells, strict=True)) == _column(page, _power(far))
        assert [ahead, behind] == _compared(page, _power(far))


def _power(far: str) -> str:
    return "10⁻" + "⁰¹²³⁴⁵⁶"[int(far.removeprefix("1e-"))]


def _column(page: str, far: str) -> dict[str, str]:
    """TARs at a FAR by system, of the first table of a page."""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in rows[0]]
    place = heads.index(f"TAR % at {far}")
    table = itertools.takewhile(lambda row: len(row) == len(heads), rows[2:])
    return {row[0].strip(): row[place].strip() for row in table}


def _compared(page: str, far: str) -> list[str]:
    """Which losses Q-Margin is ahead of at a FAR, and behind, by the intervals of a page."""
    lines = page.splitlines()
    start = next(row for row, line in enumerate(lines) if line.startswith("| Q-Margin minus |"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    place = heads.index(f"at {far}")
    ahead: list[str] = []
    behind: list[str] = []
    for cells in rows:
        bounds = re.findall(r"[+\u2212][0-9.]+", cells[place])[1:]
        low, high = (float(text.replace("\u2212", "-")) for text in bounds)
        name = "ArcFace 10 %" if cells[0].startswith("ArcFace, 10") else cells[0]
        ahead += [name] * (low > 0.0)
        behind += [name] * (high < 0.0)
    return [", ".join(names) or "nobody" for names in (ahead, behind)]
