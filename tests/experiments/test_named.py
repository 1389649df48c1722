"""Named experiments are fair, and what is shipped and documented is what they found."""

import csv
import itertools
import json
import math
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.experiments import run
from qmargin.cli.paper import EXPERIMENTS
from qmargin.data.people import People
from qmargin.errors import ConfigError, DataError
from qmargin.experiments.experiment import Arm, Search, TestProtocol, make_arm
from qmargin.experiments.named import (
    MARGIN_KINDS,
    get_experiment,
    list_experiments,
    setting_point,
)
from qmargin.experiments.named.demo import DEMO_GRID, DEMO_SETTINGS, VOICE_GRID, demo_experiment
from qmargin.experiments.named.design import COMPARED, LOSSES
from qmargin.experiments.named.people import SIZE, study
from qmargin.experiments.run import Outcome
from qmargin.experiments.runner import _record
from qmargin.experiments.search import Tried
from qmargin.experiments.space import Point
from qmargin.experiments.tables import _best_of_each, edges_of, write_figures
from qmargin.report.paper_layouts import FACE_ROWS, SEEDS_ROW, SPEAKER_ROWS, Setting
from qmargin.training.recipe_files import apply_settings

ROOT = Path(__file__).parents[2]
MADE = ("demo", "demo-search", "demo-voices", "voices-search", "strokes-1m")
STUDIES = {  # and where their data are
    **dict.fromkeys(("people-10k", "people-10k-flips", "people-10k-splits", "people-100k"), None),
    **dict.fromkeys(("strokes-10k", "voices"), None),
    "omniglot": "omniglot32",
    "audiomnist": "audiomnist60",
}
REFERENCES = tuple(
    f"references-{world}" for world in ("clean", "long-tail", "flips", "splits", "quality")
)
PEOPLE = DEMO_SETTINGS["people"]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in list_experiments()
        if "paper-" not in name
        and "-growth" not in name  # one loss, more and more identities
        and name not in STUDIES
        and name not in REFERENCES
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


@pytest.mark.parametrize("name", STUDIES)
def test_every_loss_of_a_study_searches_the_same_region(tmp_path: Path, name: str) -> None:
    """As many points, the same hardness and updates; each meets each margin equally often."""
    experiment = get_experiment(name, data=None if STUDIES[name] is None else tmp_path)
    others = ("entmax", "sparsemax", "adaface", "magface", "sampled") * (name == "people-10k")
    assert tuple(experiment.arms) == ("arcface", "cosface", "q_margin", *others)
    levels: set[tuple[str, ...]] = set()
    for key, arm in experiment.arms.items():
        assert len(arm.points) == 20 and arm.like is None
        levels.add(tuple(sorted({point["hardness"] for point in arm.points})))
        margin = "reach" if key == "q_margin" else "loss.margin"
        update = ("optimizer.kind", "head.lr_ratio")
        for axes in (("hardness", margin), ("hardness", *update)):
            assert len({tuple(point[axis] for axis in axes) for point in arm.points}) == 20
        if key == "q_margin":  # whose alphas and reaches are those that a hardness has
            reaches = [float(point["reach"]) for point in arm.points]
            assert 0.2 < min(reaches) < 0.4 and 1.2 <= max(reaches) < 1.7
            assert len({point["loss.alpha"] for point in arm.points}) >= 2
        else:
            assert len({tuple(point[a] for a in (margin, *update)) for point in arm.points}) == 16
        for axis in ("loss.alpha", "head.sample_rate") if key != "q_margin" else ():
            shares = Counter(point[axis] for point in arm.points if axis in point)
            assert len(set(shares.values())) <= 1  # as many of each
        wanted = 6 if key in ("arcface", "cosface", "q_margin") else 3
        assert experiment.seeds_of(key) == tuple(range(wanted))
    assert len(levels) == 1 and len(levels.pop()) == 5
    margins = {key: [float(p["loss.margin"]) for p in experiment.arms[key].points]
               for key in ("arcface", "cosface")}  # fmt: skip
    assert (min(margins["arcface"]), max(margins["arcface"])) == (0.05, 0.5)
    assert (min(margins["cosface"]), max(margins["cosface"])) == (0.1, 0.6)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "data.num_test=3",
            r"FAR 0\.0001.* 3 identities.* about 15 identities of 10",
        ),
        ("data.num_validation=50", r"tar@0\.0001.* about 78 identities of 10 samples \(now 50\)"),
    ],
)
def test_a_study_that_cannot_resolve_its_rate_is_refused(
    tmp_path: Path, setting: str, text: str
) -> None:
    """Before anything is drawn or trained, with the number of identities that it needs."""
    small = get_experiment("people-10k", device="cpu").with_settings([setting])
    with pytest.raises((ConfigError, DataError), match=text):
        run(small, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_comparison_of_a_study_is_fixed_and_more_losses_may_follow() -> None:
    experiment = get_experiment("people-10k")
    fixed = {"focus": "q_margin", "rivals": ["cosface"], "far": 1e-4}
    for arms in (["cosface", "q_margin"], list(COMPARED), list(experiment.arms)):
        assert _record(experiment.with_arms(arms), None)["primary"] == fixed
    assert _record(experiment.with_arms(["arcface", "q_margin"]), None)["primary"] != fixed


def test_points_of_a_study_are_the_updates_and_losses_that_they_say() -> None:
    experiment = get_experiment("people-10k")
    recipes = {
        key: [experiment.run_recipe(key, point, seed=0, is_search=True) for point in arm.points]
        for key, arm in experiment.arms.items()
    }
    for key, made in recipes.items():
        assert {recipe.head.lr_ratio for recipe in made} == {1.0, 10.0}
        sgd = {recipe.optimizer for recipe in made if recipe.optimizer.kind == "sgd"}
        (one,) = sgd
        found = (one.lr, one.momentum, one.weight_decay, one.clip_norm, one.clip_head)
        assert found == (0.1, 0.9, 5e-4, 5.0, False)
        (adamw,) = {recipe.optimizer for recipe in made} - sgd
        assert (adamw.kind, adamw.clip_norm) == ("adamw", None)
        kind = {"adaface": "adaface", "magface": "magface"}.get(key, MARGIN_KINDS.get(key))
        assert {recipe.loss.margin_kind for recipe in made} == {kind or "angular"}
    assert {recipe.head.sample_rate for recipe in recipes["sampled"]} == {0.1, 0.3}
    assert {recipe.head.path for recipe in recipes["sampled"]} == {"sampled"}
    upper = {recipe.loss.margin: recipe.loss.options["upper_margin"]
             for recipe in recipes["magface"]}  # fmt: skip
    assert upper[0.45] == 0.8  # as published
    for recipe, point in zip(recipes["q_margin"], experiment.arms["q_margin"].points, strict=True):
        rate = (recipe.loss.order - 1.0) * recipe.loss.scale
        reach = math.exp(rate * recipe.loss.margin) / rate
        assert reach == pytest.approx(float(point["reach"])) and recipe.loss.margin >= 0.0


def test_settings_of_many_people_are_tried_on_a_tenth_of_them() -> None:
    """With the scales of all of them, and as long as those of a tenth."""
    made = {}
    for name in ("people-10k", "people-100k"):
        experiment = get_experiment(name)
        point = experiment.arms["q_margin"].points[7]
        recipe = experiment.run_recipe("q_margin", point, seed=0, is_search=True)
        made[name] = apply_settings(recipe, experiment.search.settings)
        assert made[name].loss == recipe.loss
        assert made[name].data.num_classes == 10_000 and made[name].run.epochs == 2
    few, many = made.values()
    assert few.data == many.data and few.model == many.model and few.loss != many.loss


def test_the_page_has_the_sizes_of_the_studies() -> None:
    page = (ROOT / "docs" / "results" / "named-experiments.md").read_text()
    _, *rows = next(table for table in tables_in(page) if "steps, full" in table[0])
    found = {}
    for cell, *numbers in rows:
        for name in re.findall("`(.*?)`", cell):
            found[name, "five" in cell] = numbers
    assert {name for name, _ in found} == set(STUDIES)
    for (name, is_other), (epochs, steps, *millions) in found.items():
        if STUDIES[name] is not None:
            continue  # needs the data
        experiment = get_experiment(name)
        recipe, search = experiment.recipe, experiment.search
        tried = apply_settings(recipe, search.settings)
        arms = {key: arm for key, arm in experiment.arms.items() if (key in COMPARED) != is_other}
        samples, few = (
            one.data.num_classes * one.data.options["samples_per_class"] * one.run.epochs / 1e6
            for one in (recipe, tried)
        )
        parts = [
            sum(len(arm.points) for arm in arms.values()) * few,
            len(arms) * search.finalists * samples,
            sum(len(experiment.seeds_of(key)) for key in arms) * samples,
        ]
        assert [float(one) for one in millions] == pytest.approx([*parts, sum(parts)], abs=0.05)
        assert epochs == f"{tried.run.epochs}, {recipe.run.epochs}"
        per_epoch = round(1e6 * samples / recipe.run.epochs) // recipe.data.batch_size
        assert steps == f"{recipe.run.epochs * per_epoch:,}"


def test_noise_of_a_study_is_in_its_training_alone() -> None:
    clean, flips, splits = (get_experiment(f"people-10k{end}") for end in ("", "-flips", "-splits"))
    options = [one.recipe.data.options for one in (clean, flips, splits)]
    assert [one.get("flips") for one in options] == [None, 0.1, None]
    assert [one.get("splits") for one in options] == [None, None, 0.02]
    tested = {
        repr(replace(one.world, num_test=4).measured(one.recipe, is_search=False))
        for one in (clean, flips, splits)
    }
    assert len(tested) == 1


def test_expectations_stand_on_their_page() -> None:
    page = (ROOT / "docs" / "results" / "expectations.md").read_text()
    for name, folder in STUDIES.items():
        experiment = get_experiment(name, data=None if folder is None else Path(folder))
        assert experiment.question.endswith("?") and experiment.expected
        assert f"| `{name}` | {experiment.expected} |" in page
    for name in REFERENCES:
        experiment = get_experiment(name)
        focus, rival = experiment.comparison.focus, experiment.comparison.rivals[0]
        compared = f"{experiment.arms[focus].title} minus {experiment.arms[rival].title}"
        assert f"| `{name}` | {compared} | {experiment.expected} |" in page


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", REFERENCES)
def test_arms_with_and_without_a_reference_try_as_many_settings(name: str, device: str) -> None:
    """Everything but the reference is as it is without one."""
    experiment = get_experiment(name, device=device)
    assert experiment.question.endswith("?") and len(experiment.seeds) >= 3
    assert {"q_margin", "adaface", "cosface", "q_margin_look_alike", "q_margin_quality"} <= set(
        experiment.arms
    )
    cosface = PEOPLE[device]["cosface"]
    fixed = {"q_margin": (1.25, 10.0, 0.2), "cosface": cosface, "adaface": cosface}
    counts = torch.from_numpy(np.bincount(People(1000, 20, count_spread=0.9).labels))
    for key, arm in experiment.arms.items():
        assert len(arm.points) == 3 and arm.like is None and arm.seeds is None
        recipes = [experiment.run_recipe(key, p, seed=0, is_search=True) for p in arm.points]
        (loss,) = {replace(recipe.loss, reference={}) for recipe in recipes[1:2]}
        base = next(one for one in ("q_margin", "adaface", "cosface") if key.startswith(one))
        found = (loss.alpha, loss.scale, loss.margin)
        assert loss.margin_kind == MARGIN_KINDS[base] and found == fixed[base]
        assert len({replace(recipe, loss=loss) for recipe in recipes}) == 1
        if key == base:
            assert not any(recipe.loss.reference for recipe in recipes)
            assert len({recipe.loss.margin for recipe in recipes}) == 3
        else:
            assert all(len(recipe.loss.reference) == 1 for recipe in recipes)
            assert {replace(recipe.loss, reference={}) for recipe in recipes} == {loss}
        for recipe in recipes:
            with warnings.catch_warnings():  # a strength within reach of the rarest person
                warnings.simplefilter("error")
                recipe.loss.build(counts=counts)
    has_counts = "count_spread" in experiment.recipe.data.options
    assert ("q_margin_class_prior" in experiment.arms) == has_counts
    assert ("cosface_class_prior" in experiment.arms) == has_counts
    if has_counts:  # logit adjustment, at its own strength
        loss = experiment.arm_recipe("cosface_class_prior").loss
        strengths = [next(iter(p.values())) for p in experiment.arms["cosface_class_prior"].points]
        assert loss.order == 1.0 and "1" in strengths


@pytest.mark.parametrize(
    ("name", "arms"),
    [
        ("references-long-tail", ("q_margin", "q_margin_class_prior", "cosface_class_prior")),
        ("references-splits", ("q_margin_look_alike", "q_margin_damped")),
        ("references-quality", ("q_margin_quality", "adaface")),
    ],
)
def test_references_learn(tmp_path: Path, name: str, arms: tuple[str, ...]) -> None:
    made = get_experiment(name).with_arms(arms).with_settings(
        ["data.num_test=20", "data.num_validation=60", "data.samples_validation=6",
         "data.num_classes=60", "data.options.samples_per_class=4", "data.batch_size=32",
         "model.options.width=8", "model.options.depth=0", "run.epochs=1", "run.max_steps=2"]
    )  # fmt: skip
    toy = replace(
        made,
        arms={key: replace(arm, points=arm.points[1:]) for key, arm in made.arms.items()},
        seeds=(0, 1),
        protocol=TestProtocol(num_replicates=20),
        search=replace(made.search, measure="eer"),
    )
    finished, _ = run(toy, tmp_path)
    assert [one.count("finished") for one in finished.rounds[0]] == [1] * (2 * len(arms))
    assert sorted(result.run.seed for result in finished.results) == [0] * len(arms) + [1] * len(
        arms
    )


def test_a_figure_of_many_settings_has_a_line_for_each_loss(tmp_path: Path) -> None:
    """At each hardness the best of the settings that have it."""
    experiment, places = get_experiment("people-10k").with_arms(["cosface", "q_margin"]), {}
    tried = []
    for key, arm in experiment.arms.items():
        for number, point in enumerate(arm.points):
            recipe = experiment.run_recipe(key, point, seed=0, is_search=True)
            outcome = Outcome("finished", {"eer": 0.1, "tar@0.0001": (7 * number % 20) / 20})
            tried.append(Tried(key, point, recipe, (outcome,), 1))
            place = (key, point["hardness"])
            places[place] = max(places.get(place, 0.0), outcome.measures["tar@0.0001"])
    best = _best_of_each(tried, "tar@0.0001", "hardness")
    found = {(one.arm, one.point["hardness"]): one.mean("tar@0.0001") for one in best}
    assert found == places and len(found) == 10
    assert len(_best_of_each(tried, "eer", "hardness")) == 10
    titles = {key: arm.title for key, arm in experiment.arms.items()}
    files = write_figures(tried, "tar@0.0001", tmp_path, titles)
    assert "Q-Margin, best at each hardness" in files[0].read_text()
    assert [path.name for path in files] == ["sensitivity.svg", "sensitivity.pdf"]


@pytest.mark.parametrize("name", ["arcface", "adaface", "magface", "sampled", "q_margin"])
def test_losses_of_a_study_learn(tmp_path: Path, name: str) -> None:
    size = SIZE._replace(
        num_classes=60, samples_per_class=4, epochs=1, batch_size=32, width=8, depth=0,
        embedding_dim=128,
    )  # fmt: skip
    made = study("toy", "toy", "?", "", size=size, losses=LOSSES).with_arms([name])
    arm = made.arms[name]
    toy = replace(
        made.with_settings(["precision.dtype=fp32", "data.num_test=20", "data.num_validation=20"]),
        arms={name: replace(arm, points=arm.points[5:7], seeds=(0, 1))},
        search=Search(
            measure="eer", settings=("run.max_steps=2",), finalists=1, finalist_seeds=(1001,)
        ),
        protocol=TestProtocol(num_replicates=0),
    )
    finished, _ = run(toy, tmp_path)
    assert [one.count("finished") for tried in finished.rounds for one in tried] == [1, 1, 1]
    assert finished.rounds[1][0].recipe.seed == 1001
    assert [result.run.seed for result in finished.results] == [0, 1]
    assert len(list((tmp_path / "data").iterdir())) == 3  # of all seeds: train, validate, test


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
