"""Results arranged in panels, compared in pairs and averaged over seeds, by plain arithmetic."""

import json
from dataclasses import replace

import numpy as np
import pytest

from helpers.results import hostile_result, some_run, synthetic_result, write_results
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import result_to_json
from qmargin.metrics.bootstrap import paired_difference
from qmargin.report import ReportOptions, write_report
from qmargin.report.systems import (
    are_paired,
    arrange,
    difference_of_means,
    find_repeats,
    holm,
    interval_of_mean,
    load_panels,
    paired_differences,
    spread,
)
from qmargin.report.tables import latex_tables, markdown_tables

FAR = 1e-3
NAMES = ("Q-Margin", "ArcFace")


def with_protocol(result, **changes):
    return replace(result, protocol=replace(result.protocol, **changes))


def labels(results):
    (panel,) = arrange(results)
    return [entry.label for entry in panel.entries]


def titles(results):
    return [panel.title for panel in arrange(results)]


def test_results_on_the_same_trials_share_a_panel_and_keep_their_order():
    first, other = synthetic_result("B"), synthetic_result("A", protocol="IJB-C")
    panels = arrange([first, other, synthetic_result("A", seed=1)])
    assert [panel.title for panel in panels] == ["VoxCeleb1-H", "IJB-C"]
    assert [entry.label for entry in panels[0].entries] == ["B", "A"]
    assert [panel.index for panel in panels] == [0, 1]
    assert panels[1].entries[0].colour == panels[0].entries[1].colour  # both are A


def test_equal_names_are_told_apart():
    assert labels([synthetic_result("A", seed=seed) for seed in range(3)]) == [
        "A",
        "A (2)",
        "A (3)",
    ]
    seeds = [synthetic_result("A", run=some_run(seed=seed)) for seed in (4, 7)]
    assert labels(seeds) == ["A, seed 4", "A, seed 7"]
    assert [entry.colour for entry in arrange(seeds)[0].entries] == [0, 1]
    assert len(set(labels([synthetic_result(name) for name in ("A", "A (2)", "A")]))) == 3


def test_trials_are_told_apart_by_their_hash_or_else_by_name_and_counts():
    other = [synthetic_result(), synthetic_result(num_genuine=1999)]
    assert titles(other) == ["VoxCeleb1-H, trial set 1", "VoxCeleb1-H, trial set 2"]
    renamed = with_protocol(synthetic_result("B", seed=1), name="b")
    assert titles([synthetic_result("A"), renamed]) == ["202,000 common trials"]
    bare = [with_protocol(synthetic_result(name), data_sha256=None) for name in "AB"]
    assert len(arrange(bare)) == 1
    assert len(arrange([bare[0], with_protocol(bare[1], name="x")])) == 2


@pytest.mark.parametrize(
    ("num_impostors", "asked", "far"),
    [
        (400_000, None, 1e-4),  # 40 false accepts are allowed at 1e-4, 4 at 1e-5
        (2_000, None, 1e-3),  # 20 at 1e-2, 2 at 1e-3, then none
        (50, None, None),
        (400_000, 1e-3, 1e-3),
        (400_000, 0.5, 1e-4),  # nobody measured it
    ],
)
def test_headline_is_asked_for_or_the_strictest_far_with_enough_data(num_impostors, asked, far):
    (panel,) = arrange([synthetic_result(num_impostors=num_impostors)], headline=asked)
    assert panel.headline_far == far


def test_leader_has_the_largest_tar_at_the_headline():
    results = [synthetic_result(f"{size}", separation=size) for size in (4.5, 5.5, 5.0)]
    assert arrange(results)[0].leader().label == "5.5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["det"]["far"].append(0.5), "columns of det"),
        (lambda content: content["det"]["frr"].__setitem__(3, 1.5), "outside \\[0, 1\\]"),
        (lambda content: content["det"]["band"]["low"].__setitem__(3, "-inf"), "low is -inf"),
        (lambda content: content["histogram"]["genuine"].pop(), "columns of histogram"),
        (lambda content: content["measures"]["tar"][0].update(far_target=2.0), "target FAR is 2.0"),
        (lambda content: content["protocol"].update(num_impostors=0), "no trials of a kind"),
        (lambda content: content.update(version=99), "version 99"),
    ],
)
def test_files_that_cannot_be_drawn_are_named(tmp_path, change, message):
    result = replace(synthetic_result(groups=("a", "b"), keys=("x", "y")), command="c")
    (path,) = write_results(tmp_path, result)
    assert result_to_json(load_panels([path])[0].entries[0].result) == result_to_json(result)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        load_panels([path])
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="at least 1 result"):
        load_panels([])


def two_systems(**changes):
    second = replace(synthetic_result("B", separation=4.8, seed=1), **changes)
    return arrange([synthetic_result("A", separation=5.4), second])[0]


def test_differences_are_those_of_the_metrics_package():
    panel = two_systems()
    found = {made.far: made for made in paired_differences(panel, 0.9)}
    a, b = (entry.result for entry in panel.entries)
    for point_a, point_b in zip(a.measures.tar, b.measures.tar, strict=True):
        key = repr(point_a.far_target)
        draws = (np.array(result.replicates.tar[key]) for result in (a, b))
        wanted = paired_difference(point_a.tar, point_b.tar, *draws, level=0.9)
        made = found[point_a.far_target]
        assert (made.difference, *made.interval) == (wanted.difference, wanted.low, wanted.high)
        assert made.p_value == wanted.p_value
    assert None in found  # the EER


def test_readings_follow_the_side_and_know_that_a_small_eer_is_good():
    made = paired_differences(two_systems())[0]
    other = made.seen_from("B")
    assert (other.first, other.difference) == ("B", -made.difference)
    assert other.interval == (-made.interval[1], -made.interval[0])
    assert other.seen_from("A") == made.seen_from("A") == made
    sure = replace(made, difference=0.02, interval=(0.01, 0.03), adjusted=0.01)
    assert sure.reading == "first is better"
    assert replace(sure, far=None).reading == sure.seen_from("B").reading == "second is better"
    assert replace(sure, adjusted=0.2).reading == "no difference shown"


@pytest.mark.parametrize("change", [None, {"seed": 1}, {"subjects_sha256": "other"}])
def test_unpaired_systems_are_not_compared(change):
    replicates = change and replace(synthetic_result().replicates, **change)
    panel = two_systems(replicates=replicates)
    assert not are_paired(*panel.entries)
    assert paired_differences(panel) == []


def test_replicates_without_value_are_left_out_or_end_the_comparison():
    base = synthetic_result().replicates
    for share, is_compared in ((0.01, True), (0.5, False)):
        eer = list(base.eer)
        eer[: int(share * len(eer))] = [None] * int(share * len(eer))
        panel = two_systems(replicates=replace(base, eer=tuple(eer)))
        assert any(made.far is None for made in paired_differences(panel)) is is_compared


def test_holm_against_its_definition():
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 5):
        values = rng.random(size).tolist()
        for value, made in zip(values, holm(values), strict=True):
            # the largest of (n - rank) * p over all p-values not above this one
            below = sorted(other for other in values if other <= value)
            steps = [min(1.0, (size - rank) * p) for rank, p in enumerate(below)]
            assert made == pytest.approx(max(steps))


def seeds_of_two_arms():
    return [
        synthetic_result(
            name, separation=separation, seed=seed + len(name), run=some_run(name.lower(), seed)
        )
        for name, separation in zip(NAMES, (5.2, 4.8), strict=True)
        for seed in (3, 1, 2)
    ]


def repeats_of(results):
    (repeats,) = find_repeats(arrange(results))
    return repeats


def test_runs_of_one_arm_are_repeats_in_the_order_of_their_seeds():
    repeats = repeats_of(seeds_of_two_arms())
    seeds = {name: [e.result.run.seed for e in runs] for name, runs in repeats.systems.items()}
    assert seeds == {"Q-Margin": [1, 2, 3], "ArcFace": [1, 2, 3]}
    assert (repeats.title, repeats.headline_far) == ("VoxCeleb1-H", FAR)
    (asked,) = find_repeats(arrange(seeds_of_two_arms(), headline=repeats.fars[0]))
    assert asked.headline_far == repeats.fars[0] != FAR
    assert repeats.ranked(FAR) == repeats.ranked(None) == list(NAMES)
    pairs = {(d.first, d.second) for d in paired_differences(arrange(seeds_of_two_arms())[0])}
    assert len(pairs) == 9  # never two runs of one arm
    assert all(first[:3] != second[:3] for first, second in pairs)


@pytest.mark.parametrize(
    "results",
    [
        [synthetic_result("A"), synthetic_result("B", seed=1)],  # one run each
        [synthetic_result(protocol=name) for name in ("LFW", "IJB-C")],  # two protocols
        [synthetic_result(seed=i, run=some_run("a", 0)) for i in range(2)],  # one run, twice
        [with_protocol(r, scoring=f"{r.run.seed}") for r in seeds_of_two_arms()[:2]],
    ],
)
def test_other_results_are_no_repeats(results):
    assert find_repeats(arrange(results)) == []


def test_seeds_with_test_sets_of_their_own_and_equal_names_are_repeats():
    own = [
        synthetic_result("A", seed=seed, num_genuine=2000 + seed, run=some_run("a", seed))
        for seed in (0, 1)
    ]
    assert titles(own) == ["VoxCeleb1-H, seed 0", "VoxCeleb1-H, seed 1"]
    for results in (own, [synthetic_result("A", seed=seed) for seed in range(2)]):
        repeats = repeats_of(results)
        assert (repeats.title, len(repeats.systems["A"])) == ("VoxCeleb1-H", 2)


def test_means_and_their_differences_are_those_of_the_replicates_means():
    repeats = repeats_of(seeds_of_two_arms())
    draws = [
        np.mean([entry.result.replicates.tar["0.001"] for entry in repeats.systems[name]], axis=0)
        for name in NAMES
    ]
    made = difference_of_means(repeats, *NAMES, FAR)
    means = [np.mean(repeats.values(name, FAR)) for name in NAMES]
    assert made.difference == pytest.approx(means[0] - means[1], abs=1e-15)
    ends = np.quantile(draws[0] - draws[1], (0.025, 0.975))
    assert (made.low, made.high) == pytest.approx(tuple(ends), abs=5e-4)
    expected = tuple(np.quantile(draws[0], (0.025, 0.975)))
    assert interval_of_mean(repeats, "Q-Margin", FAR) == pytest.approx(expected, abs=1e-12)
    first, *others = repeats.systems["Q-Margin"]
    without = replace(first, result=replace(first.result, replicates=None))
    bare = replace(repeats, systems={"Q-Margin": (without, *others)})
    assert interval_of_mean(bare, "Q-Margin", FAR) is None
    assert [spread([0.5, 0.7], 1), spread([0.5]), spread([])] == ["60.0 ± 14.1", "50.00", "-"]


@pytest.mark.parametrize("missing", [2, 5])
def test_arms_with_other_seeds_are_not_compared(missing):
    results = seeds_of_two_arms()
    del results[missing]
    assert difference_of_means(repeats_of(results), *NAMES, FAR) is None


def test_tables_and_page_show_mean_and_deviation(tmp_path):
    results = seeds_of_two_arms()
    tars = 100 * np.array(repeats_of(results).values("Q-Margin", FAR))
    cell = f"{tars.mean():.2f} ± {tars.std(ddof=1):.2f}"
    assert f"**{cell}**" in markdown_tables(arrange(results))
    assert cell.replace("±", r"$\pm$") in latex_tables(arrange(results))
    options = ReportOptions(has_figures=False)
    page = write_report(write_results(tmp_path / "b", *results), tmp_path / "y", options)[0]
    text = page.read_text(encoding="utf-8")
    assert f"<b>{cell}</b>" in text.partition('id="repeats"')[2]
    verdict = text.partition('id="verdict"')[2].partition("</section>")[0]
    assert f"{tars.mean():.2f} %" in verdict and "6 runs" in verdict  # of means, not of one run
    assert verdict.count('class="verdict"') == 1


def test_hostile_names_of_repeats_stay_text(tmp_path):
    results = [hostile_result(0), hostile_result(0)]
    results[1] = replace(results[1], run=replace(results[1].run, seed=1))
    paths = write_results(tmp_path / "a", *results)
    page = write_report(paths, tmp_path / "x", ReportOptions(has_figures=False))[0].read_text()
    assert 'id="repeats"' in page
    assert "<img src=x" not in page
