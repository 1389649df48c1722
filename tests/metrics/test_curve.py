import math

import numpy as np
import pytest

from helpers.rates import plain_points, score_sets
from qmargin.errors import ConfigError
from qmargin.metrics.curve import det_curve

SETS = score_sets()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtypes", ["dd", "ff", "df"])
def test_every_point_is_the_definition(name: str, dtypes: str) -> None:
    with np.errstate(over="ignore"):
        genuine, impostor = (s.astype(d) for s, d in zip(SETS[name], dtypes, strict=True))
    curve = det_curve(genuine, impostor)
    thresholds, accepts, rejects = zip(*plain_points(genuine, impostor), strict=True)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    np.testing.assert_array_equal(curve.far, np.array(accepts) / len(impostor))
    np.testing.assert_array_equal(curve.frr, np.array(rejects) / len(genuine))
    assert (curve.far[0], curve.frr[0]) == (1.0, 0.0)
    assert (curve.far[-1], curve.frr[-1]) == (0.0, 1.0)
    np.testing.assert_array_equal(curve.tar, 1.0 - curve.frr)


def test_the_end_that_accepts_nothing_has_no_number_if_a_score_is_infinite() -> None:
    assert math.isnan(det_curve([math.inf], [0.0]).thresholds[-1])
    assert det_curve([1.0], [0.0]).thresholds[-1] == math.inf


@pytest.mark.parametrize("num_points", [2, 3, 50, 400])
def test_thinning_keeps_points_and_ends(num_points: int) -> None:
    rng = np.random.default_rng(1)
    curve = det_curve(rng.normal(2, 1, 3_000), rng.normal(0, 1, 30_000))
    thin = curve.thin(num_points)
    assert 2 <= len(thin) <= num_points
    exact = set(zip(curve.thresholds, curve.far, curve.frr, strict=True))
    assert set(zip(thin.thresholds, thin.far, thin.frr, strict=True)) <= exact
    assert (thin.far[0], thin.far[-1], thin.thresholds[-1]) == (1.0, 0.0, math.inf)
    assert (np.diff(thin.thresholds) > 0).all()
    if num_points == 400:  # both tails are drawn as finely as the middle
        assert len(thin) > 300
        assert np.count_nonzero(thin.far < 1e-2) > 50
        assert np.count_nonzero(thin.frr < 1e-2) > 20


def test_short_curves_are_not_thinned() -> None:
    curve = det_curve([2.0, 3.0], [1.0, 2.0])
    assert curve.thin(4) is curve
    with pytest.raises(ConfigError, match="num_points=1 is too few"):
        curve.thin(1)
