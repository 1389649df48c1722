"""Trials with subjects, and the draws of a bootstrap."""

import numpy as np
import pytest

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.subjects import SubjectWeights, Trials, make_trials


def trials(**changes):
    fields = {
        "scores": np.array([0.9, 0.2, 0.1]),
        "is_genuine": np.array([True, False, False]),
        "enrol_subject": np.array([0, 0, 1], dtype=np.int32),
        "test_subject": np.array([0, 1, 2], dtype=np.int32),
        "subject_names": ("al", "bo", "cy"),
    }
    return Trials(**{**fields, **changes})


def test_each_replicate_draws_as_many_subjects_as_there_are():
    rows = SubjectWeights(tuple("abcdefgh"), num_replicates=200).rows(0, 200)
    assert rows.shape == (200, 8)
    assert (rows.sum(axis=1) == 8).all()
    assert (rows >= 0).all()
    assert len(np.unique(rows, axis=0)) > 190


def test_draws_are_multinomial():
    rows = SubjectWeights(tuple(f"{i:03d}" for i in range(50)), num_replicates=4000).rows(0, 4000)
    np.testing.assert_allclose(rows.mean(axis=0), 1.0, atol=0.08)
    assert rows.var() == pytest.approx(1 - 1 / 50, abs=0.02)
    assert np.cov(rows[:, 0], rows[:, 1])[0, 1] == pytest.approx(-1 / 50, abs=0.06)


def test_any_part_of_the_draws_can_be_made_alone():
    weights = SubjectWeights(tuple("abcde"), num_replicates=20, seed=3)
    whole = weights.rows(0, 20)
    np.testing.assert_array_equal(weights.rows(7, 13), whole[7:13])
    other = SubjectWeights(tuple("abcde"), num_replicates=20, seed=4).rows(0, 20)
    assert not np.array_equal(other, whole)


def test_hash_of_names_tells_where_one_ends():
    assert SubjectWeights(("ab", "c")).sha256 != SubjectWeights(("a", "bc")).sha256
    assert SubjectWeights(("ab", "c")).sha256 == SubjectWeights(("ab", "c"), seed=5).sha256


def test_hash_of_trials_ignores_order_and_scores():
    order = [2, 0, 1]
    base = trials()
    turned = trials(
        scores=np.array([5.0, 6.0, 7.0]),
        is_genuine=base.is_genuine[order],
        enrol_subject=base.enrol_subject[order],
        test_subject=base.test_subject[order],
    )
    assert turned.sha256 == base.sha256
    other = trials(enrol_subject=np.array([0, 0, 0], dtype=np.int32))
    assert other.sha256 != base.sha256


def test_names_become_sorted_indices():
    made = make_trials(
        [0.9, 0.2, 0.1],
        [1, 0, 0],
        enrol_subjects=["al", "al", "bo"],
        test_subjects=["al", "bo", "cy"],
    )
    assert made.subject_names == ("al", "bo", "cy")
    assert made.is_genuine.dtype == bool
    assert made.sha256 == trials().sha256


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_keep_their_precision(dtype):
    assert trials(scores=np.array([0.9, 0.2, 0.1], dtype=dtype)).scores.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": [0.1, np.nan, 0.2]}, DataError, "1 is NaN"),
        ({"is_genuine": [True, False]}, ShapeError, r"is_genuine has shape \(2,\)"),
        ({"is_genuine": [2, 0, 0]}, DataError, r"is_genuine\[0\]"),
        ({"test_subject": [0, 1, 3]}, DataError, r"test_subject\[2\] is 3"),
        ({"test_subject": [0, 1, -1]}, DataError, r"test_subject\[2\] is -1"),
        ({"test_subject": [0, 0, 2]}, DataError, "trial 1 is labelled impostor .* 'al'"),
        ({"subject_names": ("al", "cy", "bo")}, DataError, "'bo' follows 'cy'"),
        ({"subject_names": ("al", "al", "cy")}, DataError, "'al' follows 'al'"),
        ({"subject_names": ("al",)}, ProtocolError, "1 subjects"),
    ],
)
def test_impossible_trials_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        trials(**changes)


def test_impossible_draws_are_refused():
    with pytest.raises(ConfigError, match="num_replicates=0"):
        SubjectWeights(("a", "b"), num_replicates=0)
    with pytest.raises(ConfigError, match="seed=-1"):
        SubjectWeights(("a", "b"), seed=-1)
