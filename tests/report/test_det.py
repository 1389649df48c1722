import math
from dataclasses import replace

import pytest
from scipy.special import ndtri

from helpers.results import FARS, synthetic_result
from qmargin.evaluation.result import Det, Result
from qmargin.report.det import (
    curve_points,
    det_data,
    det_figure,
    det_scales,
    point_below,
    readout,
    readout_fars,
    start_index,
)
from qmargin.report.scales import Scale, probit, round_ticks
from qmargin.report.systems import Panel, arrange


def panel_of(*results: Result) -> Panel:
    (panel,) = arrange(results)
    return panel


def test_probit_is_the_normal_quantile() -> None:
    for rate in (1e-9, 1e-4, 0.02, 0.5, 0.99):
        assert probit(rate) == pytest.approx(float(ndtri(rate)), rel=1e-9)


def test_axes_are_spaced_by_probits() -> None:
    scale = Scale(1e-4, 0.4, 0.0, 100.0, probit)
    share = (ndtri(0.01) - ndtri(1e-4)) / (ndtri(0.4) - ndtri(1e-4))
    assert scale(0.01) == pytest.approx(100.0 * share)


def test_readout_at_a_target_is_the_measured_operating_point() -> None:
    panel = panel_of(synthetic_result())
    entry = panel.entries[0]
    for far in FARS:
        point = entry.point_at(far)
        tar, interval, accepts, threshold = readout(
            entry, point_below(curve_points(entry), far), far
        )
        assert point is not None and point.tar is not None and point.interval is not None
        assert tar == f"{100 * point.tar:.2f}"
        assert interval == f"{100 * point.interval[0]:.2f}\u2013{100 * point.interval[1]:.2f}"
        assert accepts == f"{point.false_accepts:,} FA"
        assert threshold == f"≥ {point.threshold:.4g}"


def test_point_below_never_exceeds_the_far() -> None:
    points = curve_points(panel_of(synthetic_result()).entries[0])
    for far in (1e-6, 4.9e-6, 5e-6, 3e-4, 0.2, 1.0):
        below = [point for point in points if point.far <= far]
        assert point_below(points, far) == (below[-1] if below else None)
    assert point_below(points, -1.0) is None


def test_readout_stops_at_every_target_and_begins_at_the_verdict() -> None:
    panel = panel_of(synthetic_result())
    fars = readout_fars(panel)
    assert fars == sorted(set(fars))
    assert {far for far in FARS if far >= 1 / 200_000} <= set(fars)
    assert fars[start_index(panel)] == panel.headline_far()


def test_data_has_a_cell_and_a_place_for_every_stop() -> None:
    panel = panel_of(synthetic_result("A"), synthetic_result("B", seed=1))
    data = det_data(panel)
    assert len(data["systems"]) == 2
    for system in data["systems"]:
        assert len(system["cells"]) == len(system["y"]) == len(data["x"]) == len(data["labels"])
    assert data["x"] == sorted(data["x"])


def test_region_with_too_few_false_accepts_is_shaded() -> None:
    panel = panel_of(synthetic_result(num_impostors=200_000))
    across, _ = det_scales(panel)
    width = across(30 / 200_000) - across(across.low)
    assert f'width="{width:.1f}"' in det_figure(panel)


@pytest.mark.parametrize(
    ("far", "frr"),
    [
        ((0.0, 1.0), (1.0, 0.0)),  # nothing but the ends
        ((0.0, 0.0, 1.0), (1.0, 0.0, 0.0)),  # no errors at all
        ((0.0, 1.0), (1.0, 1.0)),
        ((0.0, 1e-5, 1e-5, 1.0), (1.0, 0.5, 0.2, 0.0)),
    ],
)
def test_extreme_curves_can_be_drawn(far: tuple[float, ...], frr: tuple[float, ...]) -> None:
    ends = (math.inf, *([0.5] * (len(far) - 2)), -math.inf)
    result = replace(synthetic_result(), det=Det(far, frr, ends, None))
    drawn = det_figure(panel_of(result))
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("infinite", "").replace("interval", "").lower()


@pytest.mark.parametrize("num_impostors", [1, 20, 50])
def test_tiny_protocols_can_be_drawn(num_impostors: int) -> None:
    panel = panel_of(synthetic_result(num_impostors=num_impostors, num_genuine=5))
    data = det_data(panel)
    assert data["systems"][0]["cells"][0][0] == "not measurable" or num_impostors >= 20
    assert "nan" not in det_figure(panel)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 9.0), (1e-8, 2e-8), (0.0, 1e6)])
def test_round_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)
