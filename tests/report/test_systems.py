"""Results arranged in panels, compared in pairs and averaged over seeds, by plain arithmetic."""

import html
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from helpers.results import hostile_result, some_run, synthetic_result, words_of, write_results
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import result_to_json
from qmargin.metrics.runs import Runs, difference_over_runs, logits, mean_over_runs
from qmargin.report import ReportOptions, write_report
from qmargin.report.numbers import signed
from qmargin.report.systems import (
    Primary,
    are_paired,
    arrange,
    find_repeats,
    holm,
    load_panels,
    paired_differences,
    spread,
)
from qmargin.report.tables import latex_tables, markdown_tables
from qmargin.report.verdicts import ONE_RUN, effect_text, planned_verdicts

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
    primary = asked and Primary("a", ("b",), asked)
    (panel,) = arrange([synthetic_result(num_impostors=num_impostors)], primary=primary)
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
    results = [entry.result for entry in panel.entries]
    p_values = []
    for points in zip(*(result.measures.tar for result in results), strict=True):
        far, count = points[0].far_target, results[0].protocol.num_genuine
        sides = [
            Runs(
                logits([point.tar], count),
                logits([result.replicates.tar[repr(far)]], count),
            )
            for point, result in zip(points, results, strict=True)
        ]
        wanted, made = difference_over_runs(*sides, num_subjects=1190), found[far]
        assert made.difference == pytest.approx(points[0].tar - points[1].tar)
        assert (made.logit, made.logit_interval) == (wanted.value, wanted.interval(0.9))
        assert (made.p_value, made.num_runs) == (wanted.p_value, 1)
        # the ends as rates: two systems whose logits lie so far apart around the same middle
        middle = float(np.mean([side.observed for side in sides]))
        ends = [
            1 / (1 + np.exp(-middle - end / 2)) - 1 / (1 + np.exp(-middle + end / 2))
            for end in made.logit_interval
        ]
        assert made.interval == pytest.approx(tuple(ends))
        p_values.append(made.p_value)
    assert None in found  # the EER
    family = [made.p_value for made in found.values()]
    assert [made.adjusted for made in found.values()] == holm(family)  # over all measures
    assert {made.num_compared for made in found.values()} == {len(family)} == {5}


def test_the_primary_comparison_is_not_corrected_and_lowers_the_number_of_the_others():
    runs = {name: some_run(name) for name in "AB"}
    results = [
        synthetic_result(name, separation=5.0 + (name == "A") / 10, run=run)
        for name, run in runs.items()
    ]
    (panel,) = arrange(results, primary=Primary("B", ("A",), FAR))
    found = {made.far: made for made in paired_differences(panel)}
    assert [far for far, made in found.items() if made.is_primary] == [FAR]
    assert found[FAR].adjusted == found[FAR].p_value and found[FAR].num_compared == 1
    others = [made for made in found.values() if not made.is_primary]
    assert [made.adjusted for made in others] == holm([made.p_value for made in others])
    # a stricter level takes a larger difference to be shown
    plain = {made.far: made for made in paired_differences(arrange(results)[0])}
    assert found[FAR].detectable < plain[FAR].detectable


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
        eer = [1.01 * value for value in base.eer]
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


def seeds_of_two_arms(seeds=(3, 1, 2)):
    return [
        synthetic_result(
            name, separation=separation, seed=seed + len(name), run=some_run(name.lower(), seed)
        )
        for name, separation in zip(NAMES, (5.2, 4.8), strict=True)
        for seed in seeds
    ]


def repeats_of(results):
    (repeats,) = find_repeats(arrange(results))
    return repeats


def test_runs_of_one_arm_are_repeats_in_the_order_of_their_seeds():
    repeats = repeats_of(seeds_of_two_arms())
    seeds = {name: [e.result.run.seed for e in runs] for name, runs in repeats.systems.items()}
    assert seeds == {"Q-Margin": [1, 2, 3], "ArcFace": [1, 2, 3]}
    assert (repeats.title, repeats.headline_far) == ("VoxCeleb1-H", FAR)
    primary = Primary("q-margin", ("arcface",), repeats.fars[0])
    (asked,) = find_repeats(arrange(seeds_of_two_arms(), primary=primary))
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


def sides_of(repeats):
    """Logits of the runs of each system, from their records."""
    sides = []
    for name in NAMES:
        results = [entry.result for entry in repeats.systems[name]]
        tars = [next(p.tar for p in r.measures.tar if p.far_target == FAR) for r in results]
        draws = [result.replicates.tar[repr(FAR)] for result in results]
        sides.append(Runs(logits(tars, 2000), logits(draws, 2000)))
    return sides


@pytest.mark.parametrize("count", [3, 4])
def test_means_and_their_differences_cover_seeds_and_subjects(count):
    repeats = repeats_of(seeds_of_two_arms((3, 1, 2, 0)[:count]))
    sides = sides_of(repeats)
    made, wanted = (
        repeats.difference(*NAMES, FAR),
        difference_over_runs(*sides, num_subjects=1190, are_paired=count == 4),
    )
    assert (made.logit, made.logit_interval) == (wanted.value, wanted.interval())
    assert (made.num_runs, made.run_share) == (count, wanted.run_share)
    means = [np.mean(repeats.values(name, FAR)) for name in NAMES]
    assert made.difference == pytest.approx(means[0] - means[1], abs=2e-4)  # of mean logits
    ends = mean_over_runs(sides[0], num_subjects=1190).interval()
    expected = tuple(1 / (1 + np.exp(-np.array(ends))))
    assert repeats.interval("Q-Margin", FAR) == pytest.approx(expected, abs=1e-12)
    # over all pairs and measures
    found = repeats.differences
    assert [made.adjusted for made in found] == holm([made.p_value for made in found])
    assert repeats.difference(*reversed(NAMES), FAR) == made.seen_from("ArcFace")
    first, *others = repeats.systems["Q-Margin"]
    without = replace(first, result=replace(first.result, replicates=None))
    systems = {**repeats.systems, "Q-Margin": (without, *others)}
    bare = replace(repeats, systems=systems)
    assert bare.interval("Q-Margin", FAR) is None and bare.difference(*NAMES, FAR) is None
    assert [spread([0.5, 0.7], 1), spread([0.5]), spread([])] == ["60.0 ± 14.1", "50.00", "-"]


def test_arms_may_have_other_seeds_where_all_measure_the_same_trials():
    results = seeds_of_two_arms()
    del results[5]
    made = repeats_of(results).difference(*NAMES, FAR)
    assert made.num_runs == 2
    one = [r for r in results if r.system.name == NAMES[0] or r.run.seed == 3]
    made = repeats_of(one).difference(*NAMES, FAR)
    assert (made.num_runs, made.run_share) == (1, None)


def own_trials(seeds=(0, 1, 2)):
    """Two arms whose seeds are tested on identities of their own."""
    return [
        synthetic_result(
            name,
            separation=separation,
            seed=seed + len(name),
            num_genuine=2000 + seed,
            run=some_run(name.lower(), seed),
        )
        for name, separation in zip(NAMES, (5.2, 4.8), strict=True)
        for seed in seeds
    ]


def test_seeds_with_trials_of_their_own_are_compared_seed_by_seed():
    repeats = repeats_of(own_trials())
    made = repeats.difference(*NAMES, FAR)
    tars = [np.array(repeats.values(name, FAR)) for name in NAMES]
    apart = np.subtract(*(np.log(values / (1 - values)) for values in tars))
    assert made.logit == pytest.approx(apart.mean())
    wanted = stats.ttest_1samp(apart, 0.0)
    assert made.p_value == pytest.approx(wanted.pvalue)
    results = own_trials()
    del results[5]
    assert repeats_of(results).difference(*NAMES, FAR) is None  # one seed has no partner


def test_the_same_comparison_is_told_everywhere(tmp_path):
    """Page, tables, JSON and words of an experiment have one number for one comparison."""
    primary = Primary("q-margin", ("arcface",), FAR)
    options = ReportOptions(has_figures=False, primary=primary, experiment="x")
    files = write_report(write_results(tmp_path, *seeds_of_two_arms()), tmp_path / "y", options)
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    (repeats,) = find_repeats(arrange(seeds_of_two_arms(), primary=primary), experiment="x")
    made = repeats.difference(*NAMES, FAR)
    assert made.is_primary
    (line,) = planned_verdicts(repeats, FAR)
    assert effect_text(made) in line
    page = words_of(texts["index.html"])
    assert line in page and "Fixed beforehand" in page
    ends = f"{signed(100 * made.interval[0])} to {signed(100 * made.interval[1])}"
    assert ends in line and ends in texts["tables.md"] and ends in page.partition('id="repeats"')[2]
    assert f"{100 * made.detectable:.2f} points would have been shown" in line
    (told,) = json.loads(texts["metrics.json"])["repeats"]
    (same,) = [one for one in told["differences"] if one["is_primary"]]
    assert same["interval"] == list(made.interval) and same["detectable"] == made.detectable
    assert (
        'id="pairs"' not in page
    )  # single runs of arms with several are not set against each other


def test_one_seed_says_that_training_is_not_covered(tmp_path):
    results = [r for r in seeds_of_two_arms() if r.run.seed == 1]
    primary = Primary("q-margin", ("arcface",), FAR)
    options = ReportOptions(
        has_figures=False, primary=primary, experiment="x", notes=("At an edge",)
    )
    page = write_report(write_results(tmp_path, *results), tmp_path / "y", options)[0]
    text = html.unescape(page.read_text(encoding="utf-8"))
    verdict = text.partition('id="verdict"')[2].partition("</section>")[0]
    assert "Fixed beforehand" in verdict and ONE_RUN in verdict and "At an edge" in verdict
    assert ONE_RUN in text.partition('id="pairs"')[2]


def test_tables_and_page_show_mean_and_deviation(tmp_path):
    results = seeds_of_two_arms()
    tars = 100 * np.array(repeats_of(results).values("Q-Margin", FAR))
    cell = f"{tars.mean():.2f} ± {tars.std(ddof=1):.2f}"
    panels, found = arrange(results), [repeats_of(results)]
    bold = f"**{cell}**" if found[0].has_winner(FAR) else cell
    assert bold in markdown_tables(panels, found)
    assert cell.replace("±", r"$\pm$") in latex_tables(panels, found)
    options = ReportOptions(has_figures=False)
    page = write_report(write_results(tmp_path / "b", *results), tmp_path / "y", options)[0]
    text = page.read_text(encoding="utf-8")
    assert f"<b>{cell}</b>" in text.partition('id="repeats"')[2]
    verdict = text.partition('id="verdict"')[2].partition("</section>")[0]
    assert f"{tars.mean():.2f}\u00a0%" in verdict and "6 runs" in verdict  # of means, not of one
    assert verdict.count('class="verdict"') == 1


def test_hostile_names_of_repeats_stay_text(tmp_path):
    results = [hostile_result(0), hostile_result(0)]
    results[1] = replace(results[1], run=replace(results[1].run, seed=1))
    paths = write_results(tmp_path / "a", *results)
    page = write_report(paths, tmp_path / "x", ReportOptions(has_figures=False))[0].read_text()
    assert 'id="repeats"' in page
    assert "<img src=x" not in page
