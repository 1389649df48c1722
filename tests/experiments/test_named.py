"""Named experiments are fair, and what is shipped and documented is what they found."""

import csv
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from qmargin.cli.paper import EXPERIMENTS
from qmargin.experiments.experiment import Arm, make_arm
from qmargin.experiments.named import get_experiment, list_experiments, setting_point
from qmargin.experiments.named.demo import DEMO_GRID, DEMO_SETTINGS, VOICE_GRID, demo_experiment
from qmargin.experiments.space import Point
from qmargin.experiments.tables import edges_of
from qmargin.report.paper_layouts import FACE_ROWS, SEEDS_ROW, SPEAKER_ROWS, Setting

ROOT = Path(__file__).parents[2]
MADE = ("demo", "demo-search", "demo-voices", "voices-search", "strokes-10k", "strokes-1m")
PEOPLE = DEMO_SETTINGS["people"]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in list_experiments()
        if "paper-" not in name and "-growth" not in name  # one loss, more and more identities
    ],
)
def test_every_loss_gets_the_same_effort(tmp_path: Path, name: str) -> None:
    experiment = get_experiment(name, data=None if name in MADE else tmp_path)
    arms = {key: arm for key, arm in experiment.arms.items() if arm.like is None}
    assert set(arms) == set(PEOPLE["cpu"])
    assert len({len(arm.points) for arm in arms.values()}) == 1
    assert len({experiment.arm_recipe(key).optimizer for key in arms}) == 1
    for key in ("arcface", "cosface", "sparsemax"):  # whose alpha is given
        alphas = {point["loss.alpha"] for point in arms[key].points}
        assert alphas == {"2" if key == "sparsemax" else "1"}
    recipe = experiment.recipe
    if name.startswith("strokes"):  # of the size of a GPU
        assert recipe.precision.dtype == "bf16" and recipe.model.options["batch_norm"] is True


@pytest.mark.parametrize("kind", ["people", "voices"])
def test_more_identities_are_seen_by_one_loss_for_the_same_number_of_samples(kind: str) -> None:
    experiment = get_experiment(f"{kind}-growth")
    recipes = [experiment.arm_recipe(key) for key in experiment.arms]
    assert len({recipe.loss for recipe in recipes}) == 1 and recipes[0].loss.margin == 0
    numbers = [recipe.data.num_classes for recipe in recipes]
    assert numbers == sorted(set(numbers))
    seen = [recipe.run.epochs * number for recipe, number in zip(recipes, numbers, strict=True)]
    assert len(set(seen[:-1])) == 1 and seen[-1] >= seen[0]  # two epochs of speakers are too few


@pytest.mark.parametrize(
    ("name", "rows", "num_seeds"),
    [
        ("paper-face", FACE_ROWS, 1),
        ("paper-speaker", SPEAKER_ROWS, 1),
        ("paper-seeds", (SEEDS_ROW,), 3),
    ],
)
def test_arms_are_the_settings_of_a_table(name, rows, num_seeds):
    experiment = get_experiment(name)
    assert len(experiment.seeds) == num_seeds and not experiment.searched
    found = []
    for key, arm in experiment.arms.items():
        loss = experiment.run_recipe(key, arm.candidates[0], seed=0, is_search=False).loss
        found.append(Setting(loss.margin_kind, loss.alpha, loss.scale, loss.margin))
    assert found == [row.setting for row in rows]
    assert set(EXPERIMENTS.values()) <= list_experiments().keys()


def test_settings_of_the_demo_are_tried_by_its_own_recipe() -> None:
    point = setting_point(PEOPLE["cpu"]["q_margin"])
    made = [
        one.run_recipe("q_margin", point, seed=0, is_search=False).sha256
        for one in (demo_experiment("cpu"), get_experiment("demo-search"))
    ]
    assert made[0] == made[1] and demo_experiment("cpu").recipe.precision.dtype == "fp32"


def test_shipped_settings_are_those_that_the_search_chose() -> None:
    record = json.loads((ROOT / "docs" / "results" / "demo-search.json").read_text())
    (tried,) = (part["tried"] for part in record["rounds"])
    assert {(one["key"], tuple(one["setting"])) for one in tried} == {
        (key, setting) for key, settings in DEMO_GRID.items() for setting in settings
    }
    for key, setting in PEOPLE["cpu"].items():
        means = {
            tuple(one["setting"]): sum(found[record["measure"]] for found in one["metrics"])
            for one in tried
            if one["key"] == key
        }
        assert max(means, key=means.__getitem__) == setting


def test_settings_for_voices_are_those_that_the_search_chose() -> None:
    with (ROOT / "docs" / "results" / "voices-search.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    titles = {arm.title: name for name, arm in get_experiment("demo-voices").arms.items()}
    found: dict[str, dict[tuple[float, ...], float]] = {name: {} for name in titles.values()}
    for row in rows:
        setting = (float(row["alpha"] or 1.0), float(row["s"]), float(row["m"]))
        found[titles[row["Loss"]]][setting] = float(row["TAR at 0.01 %"])
    assert {name: set(points) for name, points in found.items()} == {
        name: set(points) for name, points in VOICE_GRID.items()
    }
    best = {name: max(points, key=points.__getitem__) for name, points in found.items()}
    assert best == DEMO_SETTINGS["voices"]["cpu"]


def test_settings_for_a_gpu_are_those_of_the_results_page() -> None:
    page = (ROOT / "docs" / "results" / "strokes-10k.md").read_text()
    rows = [line.split("|")[1:6] for line in page.splitlines() if line.endswith("| chosen |")]
    chosen = {row[0].strip(): tuple(map(float, row[1:4])) for row in rows}
    titles = {arm.title: name for name, arm in demo_experiment("cuda").arms.items()}
    assert {titles[title]: found for title, found in chosen.items()} == PEOPLE["cuda"]


def test_a_choice_at_an_edge_is_named() -> None:
    grid = [setting_point(one) for one in
            ((1.25, 7.0, 0.2), (1.25, 7.0, 0.4), (1.25, 10.0, 0.3), (1.5, 4.0, 0.3))]  # fmt: skip

    def edges(chosen: Point, *more: tuple[float, float, float]) -> list[str]:
        return edges_of(chosen, Arm("x", points=(*grid, *map(setting_point, more))))

    assert edges(grid[1]) == ["smallest alpha", "smallest scale", "largest margin"]
    assert edges(grid[2]) == ["smallest alpha", "largest scale"]
    assert edges(grid[3]) == ["largest alpha"]  # no other scale or margin was tried there
    assert edges(grid[2], (1.25, 16.0, 0.3), (1.1, 10.0, 0.3)) == []


@pytest.mark.parametrize(
    ("values", "chosen", "edges"),
    [
        ({"hardness": [2.0, 3.0, 4.0], "m_eff": [0.3, 0.6]}, ("4", "0.3"),
         ["largest hardness", "smallest m_eff"]),
        ({"hardness": [2.0, 3.0], "reach": [0.3, 0.6, 1.2], "alpha": 1.25}, ("3", "1.2"),
         ["largest hardness", "largest reach"]),
        ({"head.lr_ratio": [1, 5, 10], "scale": "8:64:log"}, ("5", "62.1"), ["largest scale"]),
        ({"head.lr_ratio": [1, 5, 10], "scale": "8:64:log"}, ("1", "50"), ["smallest lr_ratio"]),
        ({"head.lr_ratio": [1, 10], "scale": "8:64"}, ("10", "11"), ["largest lr_ratio"]),
        ({"head.path": ["dense", "auto"], "scale": [8, 16, 32]}, ("auto", "16"), []),
        ({"scale": [16], "alpha": [1.1, 1.25, 1.5]}, ("16", "1.25"), []),
        ({"scale": 16, "alpha": [1.1, 1.25, 1.5]}, ("1.1",), ["smallest alpha"]),
    ],
)  # fmt: skip
def test_edges_of_every_axis(
    values: dict[str, object], chosen: tuple[str, ...], edges: list[str]
) -> None:
    arm = make_arm("q_margin", values)
    point = dict(zip((axis.key for axis in arm.axes), chosen, strict=True))
    assert edges_of(point, arm) == edges


def tables_in(text: str) -> list[list[list[str]]]:
    """Cells of the tables of a page, without the rules under the heads."""
    groups = itertools.groupby(text.splitlines(), key=lambda line: line.startswith("|"))
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        for is_table, lines in groups
        if is_table
    ]
    return [[rows[0], *rows[2:]] for rows in tables]


def test_the_readme_says_what_the_pages_found() -> None:
    readme = (ROOT / "README.md").read_text()
    heads, *rows = next(rows for rows in tables_in(readme) if rows[0][0] == "data, FAR")
    names = heads[1:4]
    for data, *cells, difference in rows:
        far = data.rpartition(", ")[2]
        target, _, anchor = re.findall(r"\((.*?)\)", data)[0].partition("#")
        text = (ROOT / target).read_text()
        power = "10⁻" + "⁰¹²³⁴⁵⁶"[-round(math.log10(float(far.removesuffix(" %")) / 100.0))]
        ends = (power, far)
        tables = tables_in(text)
        if anchor:  # the demo: people, then voices
            is_voices = "voices" in data
            found = [table for table in tables if table[0][0] == "loss"][is_voices]
            expected = re.findall(r"Q-Margin minus CosFace is (.*?\)) points", text)[is_voices]
        else:
            found = tables[0]
            minus = next(table for table in tables if table[0][0] == "Q-Margin minus")
            column = next(n for n, head in enumerate(minus[0]) if head.endswith(ends))
            expected = next(row[column] for row in minus[1:] if row[0] == "CosFace")
        assert difference == expected
        place = next(n for n, head in enumerate(found[0]) if head.endswith(ends))
        tars = {row[0]: row[place].replace("*", "") for row in found[1:]}
        assert cells == [tars[name] for name in names]
