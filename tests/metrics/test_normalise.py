import math

import numpy as np
import pytest

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.metrics.normalise import as_norm, s_norm, t_norm, z_norm

RNG = np.random.default_rng(0)
ENROL, TEST = RNG.normal(size=(4, 30)), RNG.normal(1.0, 2.0, size=(5, 30))
MATRIX = RNG.normal(size=(4, 5))
ENROL_INDEX, TEST_INDEX = RNG.integers(0, 4, 50), RNG.integers(0, 5, 50)


def plain(score: float, row: np.ndarray, top_n: int) -> float:
    kept = sorted(row.tolist())[-top_n:]
    mean = sum(kept) / top_n
    return (score - mean) / math.sqrt(sum((value - mean) ** 2 for value in kept) / top_n)


@pytest.mark.parametrize("top_n", [2, 7, 30])
def test_every_score_is_the_definition(top_n: int) -> None:
    found = as_norm(MATRIX, ENROL, TEST, top_n=top_n)
    for e in range(4):
        for t in range(5):
            z = plain(MATRIX[e, t], ENROL[e], top_n)
            expected = (z + plain(MATRIX[e, t], TEST[t], top_n)) / 2
            assert found[e, t] == pytest.approx(expected, rel=1e-12)
            if top_n == 30:
                assert z_norm(MATRIX, ENROL)[e, t] == pytest.approx(z, rel=1e-12)
                assert s_norm(MATRIX, ENROL, TEST)[e, t] == pytest.approx(expected, rel=1e-12)
                by_test = plain(MATRIX[e, t], TEST[t], 30)
                assert t_norm(MATRIX, TEST)[e, t] == pytest.approx(by_test, rel=1e-12)


def test_trials_are_entries_of_the_matrix() -> None:
    scores = MATRIX[ENROL_INDEX, TEST_INDEX]
    index = {"enrol_index": ENROL_INDEX, "test_index": TEST_INDEX}
    for whole, trials in [
        (z_norm(MATRIX, ENROL), z_norm(scores, ENROL, enrol_index=ENROL_INDEX)),
        (t_norm(MATRIX, TEST), t_norm(scores, TEST, test_index=TEST_INDEX)),
        (s_norm(MATRIX, ENROL, TEST), s_norm(scores, ENROL, TEST, **index)),
        (as_norm(MATRIX, ENROL, TEST, top_n=9), as_norm(scores, ENROL, TEST, top_n=9, **index)),
    ]:
        np.testing.assert_array_equal(whole[ENROL_INDEX, TEST_INDEX], trials)


def test_float32_scores_are_normalised_in_float64() -> None:
    narrow = as_norm(MATRIX.astype("f"), ENROL.astype("f"), TEST.astype("f"), top_n=9)
    wide = as_norm(
        *(m.astype("f").astype("d") for m in (MATRIX, ENROL, TEST)),
        top_n=9,
    )
    np.testing.assert_array_equal(narrow, wide)


def test_infinite_scores_stay_infinite() -> None:
    assert z_norm([math.inf, -math.inf], ENROL, enrol_index=[0, 1]).tolist() == [
        math.inf,
        -math.inf,
    ]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="top 300 of 30 cohort scores in enrol_cohort"):
        as_norm(MATRIX, ENROL, TEST)
    with pytest.raises(ConfigError, match="top 1 of 30"):
        as_norm(MATRIX, ENROL, TEST, top_n=1)
    with pytest.raises(DataError, match="row 1 of enrol_cohort are all equal"):
        z_norm(np.ones((2, 1)), [[0.0, 1.0], [2.0, 2.0]])
    with pytest.raises(DataError, match=r"test_cohort\[0, 1\] is nan"):
        t_norm(np.ones((1, 1)), [[0.0, math.nan]])
    with pytest.raises(DataError, match=r"score \(1,\) is NaN"):
        z_norm([0.0, math.nan], ENROL, enrol_index=[0, 0])
    with pytest.raises(DataError, match="trial 1 points to row 4 but the cohort has 4 rows"):
        z_norm([0.0, 1.0], ENROL, enrol_index=[0, 4])
    with pytest.raises(ShapeError, match="only one of enrol_index and test_index"):
        s_norm([0.0], ENROL, TEST, enrol_index=[0])
    with pytest.raises(ShapeError, match="the cohort matrix has 4 rows"):
        z_norm(np.ones((3, 5)), ENROL)
    with pytest.raises(ShapeError, match=r"scores have shape \(2,\)"):
        z_norm([0.0, 1.0], ENROL)
    with pytest.raises(ShapeError, match="the index has shape"):
        z_norm([0.0, 1.0], ENROL, enrol_index=[0])
    with pytest.raises(ShapeError, match="enrol_cohort has shape"):
        z_norm([0.0], ENROL[0], enrol_index=[0])
