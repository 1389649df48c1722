"""Quality-aware calibration: the smallest Cllr, whatever the sides and their order."""

import numpy as np
import pytest
from scipy.optimize import minimize

from qmargin.errors import DataError, ProtocolError, ShapeError
from qmargin.evaluation.protocols.quality import Qualities, fit_quality
from qmargin.metrics import calibrate, cllr

NAMES = ("seconds, smaller", "seconds, larger", "seconds, ratio")


def noisy_trials(number: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores that say more about long recordings than about short ones."""
    generator = np.random.default_rng(4)
    seconds = generator.uniform(1.0, 25.0, size=(2, number))
    labels = generator.random(number) < 0.2
    noise = 3.0 / np.sqrt(seconds.min(0)) * generator.normal(size=number)
    scores = 2.0 * labels - 1.0 + noise - 0.05 * seconds.min(0)
    known = Qualities(seconds=seconds.reshape(-1))
    places = np.arange(number)
    names, columns = known.columns(places, places + number)
    assert names == NAMES
    return scores, labels, columns


def cost_of(weights: np.ndarray, table: np.ndarray, labels: np.ndarray) -> float:
    ratios = table @ weights[:-1] + weights[-1]
    return cllr(ratios[labels], ratios[~labels])


def test_the_fit_has_the_smallest_cllr() -> None:
    scores, labels, columns = noisy_trials()
    found = fit_quality(scores, labels, NAMES, columns)
    ratios = found.apply(scores, NAMES, columns)
    cost = cllr(ratios[labels], ratios[~labels])
    table = np.column_stack([scores, columns])
    start = np.array([*found.weights, found.offset])
    polished = minimize(cost_of, start, (table, labels), method="Nelder-Mead")
    assert cost <= polished.fun + 1e-9
    plain = calibrate(scores[labels], scores[~labels]).apply(scores)
    assert cost < cllr(plain[labels], plain[~labels]) - 1e-3


def test_without_qualities_it_is_the_calibration_of_scores() -> None:
    scores, labels, _ = noisy_trials()
    found = fit_quality(scores, labels, (), np.empty((len(scores), 0)))
    plain = calibrate(scores[labels], scores[~labels])
    assert found.weights[0] == pytest.approx(plain.scale, rel=1e-5)
    assert found.offset == pytest.approx(plain.offset, rel=1e-5)


def test_sides_may_be_swapped() -> None:
    known = Qualities(*np.random.default_rng(0).uniform(1.0, 30.0, size=(3, 20)))
    enrol, test = np.arange(10), np.arange(10, 20)
    names, columns = known.columns(enrol, test)
    np.testing.assert_array_equal(columns, known.columns(test, enrol)[1])
    assert len(names) == columns.shape[1] == 8
    assert columns[:, 1].max() <= 20.0  # seconds beyond count no more


def test_trials_that_can_be_separated_have_finite_ratios() -> None:
    scores = np.array([-2.0, -1.0, 1.0, 2.0])
    labels = scores > 0.0
    found = fit_quality(scores, labels, (), np.empty((4, 0)))
    ratios = found.apply(scores, (), np.empty((4, 0)))
    assert np.isfinite(ratios).all()
    assert (np.sign(ratios) == np.sign(scores)).all()


def test_a_quality_that_never_changes_does_no_harm() -> None:
    scores, labels, _ = noisy_trials(500)
    same = np.full((500, 1), 3.0)
    found = fit_quality(scores, labels, ("same",), same)
    assert np.isfinite(found.weights).all()


def test_errors_name_the_trial_and_what_differs() -> None:
    scores, labels, columns = noisy_trials(100)
    with pytest.raises(ProtocolError, match="0 genuine trials of 100"):
        fit_quality(scores, np.zeros(100, bool), NAMES, columns)
    columns[7, 1] = np.nan
    with pytest.raises(DataError, match="seconds, larger of calibration trial 7 is not finite"):
        fit_quality(scores, labels, NAMES, columns)
    found = fit_quality(scores, labels, (), np.empty((100, 0)))
    with pytest.raises(ShapeError, match="fitted with no qualities and is applied to seconds"):
        found.apply(scores, NAMES, columns)
