"""Means over trainings, against plain arithmetic."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.results import hostile_result, synthetic_result, write_results
from qmargin.report.repeats import (
    difference_of_means,
    find_repeats,
    interval_of_mean,
    repeats_block,
)
from qmargin.report.systems import Panel, arrange
from qmargin.report.tables import latex_tables, markdown_tables
from qmargin.report.write import ReportOptions, write_report

FAR = 1e-3


def panels_of_seeds(**options: str) -> list[Panel]:
    results = [
        synthetic_result(name, separation=separation, seed=seed + len(name), **options)
        for name, separation in (("Q-Margin", 5.2), ("ArcFace", 4.8))
        for seed in (1, 2, 3)
    ]
    return arrange(results)


def test_one_training_each_is_no_repetition() -> None:
    results = [synthetic_result("A"), synthetic_result("B", seed=1)]
    assert find_repeats(arrange(results)) == []


def test_the_same_system_on_two_protocols_is_no_repetition() -> None:
    results = [synthetic_result(protocol=name) for name in ("LFW", "IJB-C")]
    assert find_repeats(arrange(results)) == []


def test_repetitions_on_the_same_trials() -> None:
    (repeats,) = find_repeats(panels_of_seeds())
    assert {name: len(entries) for name, entries in repeats.systems.items()} == {
        "Q-Margin": 3,
        "ArcFace": 3,
    }
    assert repeats.title == "VoxCeleb1-H"
    assert repeats.ranked(FAR) == repeats.ranked(None) == ["Q-Margin", "ArcFace"]


def test_worlds_that_differ_in_their_seed_are_one_protocol() -> None:
    results = [
        synthetic_result("A", protocol=f"strokes, seed {seed}", seed=seed) for seed in (0, 1)
    ]
    (repeats,) = find_repeats(arrange(results))
    assert (repeats.title, repeats.num_repeats) == ("strokes", 2)


def test_a_difference_of_means_is_that_of_the_replicates_means() -> None:
    (repeats,) = find_repeats(panels_of_seeds())
    made = difference_of_means(repeats, "Q-Margin", "ArcFace", FAR)
    assert made is not None
    means = [np.mean(repeats.values(name, FAR)) for name in ("Q-Margin", "ArcFace")]
    assert made.difference == pytest.approx(means[0] - means[1], abs=1e-15)
    draws = [
        np.mean([entry.result.replicates.tar["0.001"] for entry in repeats.systems[name]], axis=0)
        for name in ("Q-Margin", "ArcFace")
    ]
    low, high = np.quantile(draws[0] - draws[1], (0.025, 0.975))
    assert (made.low, made.high) == pytest.approx((low, high), abs=5e-4)
    assert made.low < made.difference < made.high


def test_the_interval_of_a_mean_is_that_of_the_replicates_means() -> None:
    (repeats,) = find_repeats(panels_of_seeds())
    entries = repeats.systems["Q-Margin"]
    for far, mean in ((FAR, np.mean(repeats.values("Q-Margin", FAR))), (None, None)):
        found = interval_of_mean(repeats, "Q-Margin", far)
        drawn = [
            entry.result.replicates.eer if far is None else entry.result.replicates.tar["0.001"]
            for entry in entries
        ]
        expected = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
        assert found == pytest.approx(tuple(expected), abs=1e-12)
        assert mean is None or found[0] < mean < found[1]
    without = replace(entries[0], result=replace(entries[0].result, replicates=None))
    systems = {"Q-Margin": (without, *entries[1:])}
    assert interval_of_mean(replace(repeats, systems=systems), "Q-Margin", FAR) is None


def test_unequal_numbers_of_trainings_are_not_compared() -> None:
    panels = arrange([*[entry.result for entry in panels_of_seeds()[0].entries[:5]]])
    (repeats,) = find_repeats(panels)
    assert difference_of_means(repeats, "Q-Margin", "ArcFace", FAR) is None


def test_tables_show_mean_and_deviation() -> None:
    panels = panels_of_seeds()
    (repeats,) = find_repeats(panels)
    tars = 100 * np.array(repeats.values("Q-Margin", FAR))
    cell = f"{tars.mean():.2f} ± {tars.std(ddof=1):.2f}"
    assert f"**{cell}**" in markdown_tables(panels)
    assert f"\\boldmath{{${cell.replace('±', chr(92) + 'pm')}$}}" in latex_tables(panels)
    assert cell in str(repeats_block(repeats))


def test_the_page_has_the_section_only_where_there_are_repetitions(tmp_path: Path) -> None:
    options = ReportOptions(has_figures=False)
    alone = write_report(write_results(tmp_path / "a", synthetic_result()), tmp_path / "x", options)
    assert 'id="repeats"' not in alone[0].read_text()
    results = [entry.result for entry in panels_of_seeds()[0].entries]
    several = write_report(write_results(tmp_path / "b", *results), tmp_path / "y", options)
    assert 'id="repeats"' in several[0].read_text()


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    paths = write_results(tmp_path / "a", hostile_result(0), hostile_result(0))
    page = write_report(paths, tmp_path / "x", ReportOptions(has_figures=False))[0].read_text()
    assert 'id="repeats"' in page
    assert "<img src=x" not in page
