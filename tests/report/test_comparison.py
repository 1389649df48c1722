"""Differences between systems and means over seeds, against plain arithmetic."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.results import hostile_result, some_run, synthetic_result, write_results
from qmargin.evaluation.result import Result
from qmargin.metrics.bootstrap import paired_difference
from qmargin.report.systems import (
    Repeats,
    are_paired,
    arrange,
    difference_of_means,
    find_repeats,
    holm,
    interval_of_mean,
    paired_differences,
)
from qmargin.report.tables import latex_tables, markdown_tables
from qmargin.report.write import ReportOptions, write_report

FAR = 1e-3


def two_systems(**changes):
    first = synthetic_result("A", separation=5.4)
    second = replace(synthetic_result("B", separation=4.8, seed=1), **changes)
    return arrange([first, second])[0]


def test_differences_are_those_of_the_metrics_package() -> None:
    panel = two_systems()
    found = {made.far: made for made in paired_differences(panel, 0.9)}
    a, b = (entry.result for entry in panel.entries)
    for point_a, point_b in zip(a.measures.tar, b.measures.tar, strict=True):
        key = repr(point_a.far_target)
        wanted = paired_difference(
            point_a.tar,
            point_b.tar,
            np.array(a.replicates.tar[key]),
            np.array(b.replicates.tar[key]),
            level=0.9,
        )
        made = found[point_a.far_target]
        assert made.difference == wanted.difference
        assert made.interval == (wanted.low, wanted.high)
        assert made.p_value == wanted.p_value
    assert None in found  # the EER


def test_readings_know_that_a_small_eer_is_good() -> None:
    made = paired_differences(two_systems())[0]
    sure = replace(made, difference=0.02, interval=(0.01, 0.03), adjusted=0.01)
    assert sure.reading == "first is better"
    assert replace(sure, far=None).reading == "second is better"
    assert sure.seen_from("B").reading == "second is better"
    assert replace(sure, adjusted=0.2).reading == "no difference shown"


def test_seen_from_the_other_side_signs_change() -> None:
    made = paired_differences(two_systems())[0]
    other = made.seen_from("B")
    assert (other.first, other.difference) == ("B", -made.difference)
    assert other.interval == (-made.interval[1], -made.interval[0])
    assert other.seen_from("A") == made
    assert made.seen_from("A") is made


@pytest.mark.parametrize(
    "change",
    [
        {"replicates": None},
        {"replicates": replace(synthetic_result().replicates, seed=1)},
        {"replicates": replace(synthetic_result().replicates, subjects_sha256="other")},
    ],
)
def test_unpaired_systems_are_not_compared(change: dict) -> None:
    panel = two_systems(**change)
    assert not are_paired(*panel.entries)
    assert paired_differences(panel) == []


def test_replicates_without_value_are_left_out_or_end_the_comparison() -> None:
    base = synthetic_result().replicates
    for share, is_compared in ((0.01, True), (0.5, False)):
        eer = list(base.eer)
        eer[: int(share * len(eer))] = [None] * int(share * len(eer))
        panel = two_systems(replicates=replace(base, eer=tuple(eer)))
        assert any(made.far is None for made in paired_differences(panel)) is is_compared


def test_holm_against_its_definition() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 5):
        values = rng.random(size).tolist()
        adjusted = holm(values)
        for value, made in zip(values, adjusted, strict=True):
            # the largest of (n - rank) * p over all p-values not above this one
            below = sorted(other for other in values if other <= value)
            steps = [min(1.0, (size - rank) * p) for rank, p in enumerate(below)]
            assert made == pytest.approx(max(steps))
    assert holm([]) == []


def seeds_of_two_arms(**options: str) -> list[Result]:
    return [
        synthetic_result(
            name,
            separation=separation,
            seed=seed + len(name),
            run=some_run(name.lower(), seed),
            **options,
        )
        for name, separation in (("Q-Margin", 5.2), ("ArcFace", 4.8))
        for seed in (3, 1, 2)
    ]


def repeats_of(results: list[Result]) -> Repeats:
    (repeats,) = find_repeats(arrange(results))
    return repeats


def test_runs_of_one_arm_are_repeats_in_the_order_of_their_seeds() -> None:
    repeats = repeats_of(seeds_of_two_arms())
    assert {name: len(entries) for name, entries in repeats.systems.items()} == {
        "Q-Margin": 3,
        "ArcFace": 3,
    }
    assert [entry.result.run.seed for entry in repeats.systems["ArcFace"]] == [1, 2, 3]
    assert repeats.title == "VoxCeleb1-H"
    assert repeats.ranked(FAR) == repeats.ranked(None) == ["Q-Margin", "ArcFace"]
    assert repeats.headline_far == FAR


def test_runs_of_one_arm_are_not_compared_with_each_other() -> None:
    (panel,) = arrange(seeds_of_two_arms())
    pairs = {(made.first, made.second) for made in paired_differences(panel)}
    assert len(pairs) == 9
    assert all(first[:3] != second[:3] for first, second in pairs)


@pytest.mark.parametrize(
    "results",
    [
        [synthetic_result("A"), synthetic_result("B", seed=1)],  # one run each
        [synthetic_result(protocol=name) for name in ("LFW", "IJB-C")],  # two protocols
        [synthetic_result(seed=i, run=some_run("a", 0)) for i in range(2)],  # one run, twice
        [
            replace(result, protocol=replace(result.protocol, scoring=scoring))
            for result, scoring in zip(seeds_of_two_arms()[:2], ("cosine", "as-norm"), strict=True)
        ],
    ],
)
def test_other_results_are_no_repeats(results: list[Result]) -> None:
    assert find_repeats(arrange(results)) == []


def test_seeds_with_test_sets_of_their_own_are_one_protocol() -> None:
    results = [
        synthetic_result("A", seed=seed, num_genuine=2000 + seed, run=some_run("a", seed))
        for seed in (0, 1)
    ]
    panels = arrange(results)
    assert [panel.title for panel in panels] == ["VoxCeleb1-H, seed 0", "VoxCeleb1-H, seed 1"]
    (repeats,) = find_repeats(panels)
    assert (repeats.title, max(map(len, repeats.systems.values()))) == ("VoxCeleb1-H", 2)


def test_results_without_a_run_are_repeats_by_their_name() -> None:
    repeats = repeats_of([synthetic_result("A", seed=seed) for seed in range(3)])
    assert max(map(len, repeats.systems.values())) == 3


def test_a_difference_of_means_is_that_of_the_replicates_means() -> None:
    repeats = repeats_of(seeds_of_two_arms())
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
    repeats = repeats_of(seeds_of_two_arms())
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


def test_arms_with_other_seeds_are_not_compared() -> None:
    for missing in (2, 5):
        results = seeds_of_two_arms()
        del results[missing]
        assert difference_of_means(repeats_of(results), "Q-Margin", "ArcFace", FAR) is None


def test_tables_and_page_show_mean_and_deviation(tmp_path: Path) -> None:
    results = seeds_of_two_arms()
    tars = 100 * np.array(repeats_of(results).values("Q-Margin", FAR))
    cell = f"{tars.mean():.2f} ± {tars.std(ddof=1):.2f}"
    panels = arrange(results)
    assert f"**{cell}**" in markdown_tables(panels)
    assert cell.replace("±", r"$\pm$") in latex_tables(panels)
    options = ReportOptions(has_figures=False)
    page = write_report(write_results(tmp_path / "b", *results), tmp_path / "y", options)[0]
    text = page.read_text(encoding="utf-8")
    assert f"<b>{cell}</b>" in text.partition('id="repeats"')[2]
    verdict = text.partition('id="verdict"')[2].partition("</section>")[0]
    assert f"{tars.mean():.2f} %" in verdict and "6 runs" in verdict  # of means, not of one run
    assert verdict.count('class="verdict"') == 1


def test_hostile_names_of_repeats_stay_text(tmp_path: Path) -> None:
    results = [hostile_result(0), hostile_result(0)]
    results[1] = replace(results[1], run=replace(results[1].run, seed=1))
    paths = write_results(tmp_path / "a", *results)
    page = write_report(paths, tmp_path / "x", ReportOptions(has_figures=False))[0].read_text()
    assert 'id="repeats"' in page
    assert "<img src=x" not in page
