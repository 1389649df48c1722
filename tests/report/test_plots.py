"""Geometry of the drawings: probit axes, read-outs of stored points, extreme curves."""

import math
from dataclasses import replace

import pytest
from scipy.special import ndtri

from helpers.results import FARS, synthetic_result
from qmargin.evaluation.result import Det, Histogram, Result
from qmargin.report.page import render_page
from qmargin.report.plots import (
    CurvePoint,
    DetGeometry,
    Scale,
    curve_points,
    det_geometry,
    histogram_chart,
    point_below,
    probit,
    round_ticks,
)
from qmargin.report.systems import arrange


def geometry_of(*results: Result) -> DetGeometry:
    (panel,) = arrange(results)
    return det_geometry(panel)


def drawing_of(*results: Result) -> str:
    page = render_page("t", arrange(results), [[]])
    return page.partition('<figure class="det')[2].partition("</svg>\n</div>")[0]


def test_axes_are_spaced_by_normal_quantiles() -> None:
    for rate in (1e-9, 1e-4, 0.02, 0.5, 0.99):
        assert probit(rate) == pytest.approx(float(ndtri(rate)), rel=1e-9)
    scale = Scale(1e-4, 0.4, 0.0, 100.0, probit)
    share = (ndtri(0.01) - ndtri(1e-4)) / (ndtri(0.4) - ndtri(1e-4))
    assert scale(0.01) == pytest.approx(100.0 * share)


def test_readout_at_a_target_is_the_measured_operating_point() -> None:
    det = geometry_of(synthetic_result())
    (curve,) = det.curves
    stops = [round(stop.place, 6) for stop in det.stops]
    for far in FARS:
        point = curve.entry.point_at(far)
        assert point is not None and point.tar is not None and point.interval is not None
        assert curve.cells[stops.index(round(det.across(far), 6))] == [
            f"{100 * point.tar:.2f}",
            f"{100 * point.interval[0]:.2f}\u2013{100 * point.interval[1]:.2f}",
            f"{point.false_accepts:,} FA",
            f"≥ {point.threshold:.4g}",
        ]


def test_point_below_never_exceeds_the_far() -> None:
    points = curve_points(arrange([synthetic_result()])[0].entries[0])
    for far in (1e-6, 4.9e-6, 5e-6, 3e-4, 0.2, 1.0):
        below = [point for point in points if point.far <= far]
        assert point_below(points, far) == (below[-1] if below else None)
    assert point_below([CurvePoint(0.1, 0.2, None)], 0.01) is None


def test_readout_begins_at_the_verdict_and_has_a_cell_for_every_stop() -> None:
    det = geometry_of(synthetic_result("A"), synthetic_result("B", seed=1))
    assert det.stops[det.start].label == "10⁻³"
    data = det.data
    assert data["x"] == sorted(data["x"])
    assert len(data["systems"]) == 2
    for system in data["systems"]:
        assert len(system["cells"]) == len(system["y"]) == len(data["x"]) == len(data["labels"])


def test_region_with_too_few_false_accepts_is_shaded() -> None:
    det = geometry_of(synthetic_result(num_impostors=200_000))
    assert det.few == [det.across(30 / 200_000)]
    width = det.few[0] - det.box.left
    assert f'width="{width:.1f}"' in drawing_of(synthetic_result(num_impostors=200_000))


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
    drawn = drawing_of(replace(synthetic_result(), det=Det(far, frr, ends, None)))
    assert drawn and "nan" not in drawn
    assert "inf" not in drawn.lower()


@pytest.mark.parametrize("num_impostors", [1, 20, 50])
def test_tiny_protocols_can_be_drawn(num_impostors: int) -> None:
    result = synthetic_result(num_impostors=num_impostors, num_genuine=5)
    cells = geometry_of(result).data["systems"][0]["cells"]
    assert cells[0][0] == "not measurable" or num_impostors >= 20
    assert "nan" not in drawing_of(result)


def test_histograms_are_shares_of_their_own_count() -> None:
    chart = histogram_chart(Histogram((0.0, 1.0, 2.0), (1, 3), (40, 10)), 1.0)
    for counts, kind in (((1, 3), "genuine"), ((40, 10), "impostor")):
        steps = chart.shapes["areas"]["linear"][kind]
        heights = [chart.box.bottom - y for _, y in steps[1:-1:2]]
        assert heights == pytest.approx([chart.box.height * n / max(counts) for n in counts])
    assert chart.shapes["threshold"] == (chart.box.left + chart.box.right) / 2
    assert histogram_chart(Histogram((0.0, 0.0), (1,), (1,)), 9.0).shapes["threshold"] is None


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 9.0), (1e-8, 2e-8), (0.0, 1e6)])
def test_round_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)
