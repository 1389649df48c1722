from dataclasses import replace

import numpy as np
import pytest

from helpers.results import synthetic_result
from qmargin.metrics.comparison import paired_difference
from qmargin.report.comparison import (
    are_paired,
    comparison_block,
    holm,
    paired_differences,
    reading,
)
from qmargin.report.systems import arrange


def two_systems(**changes):
    first = synthetic_result("A", separation=5.4)
    second = replace(synthetic_result("B", separation=4.8, seed=1), **changes)
    return arrange([first, second])[0]


def test_differences_are_those_of_the_metrics_package() -> None:
    panel = two_systems()
    found = {made.far: made for made in paired_differences(panel, 0.9)}
    a, b = (entry.result for entry in panel.entries)
    for point_a, point_b in zip(a.metrics.tar, b.metrics.tar, strict=True):
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
    assert reading(sure) == "first is better"
    assert reading(replace(sure, far=None)) == "second is better"
    assert reading(sure.seen_from("B")) == "second is better"
    assert reading(replace(sure, adjusted=0.2)) == "no difference shown"


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
    assert "cannot be compared in pairs" in comparison_block(panel, [], 0.95)


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
