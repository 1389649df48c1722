import math

import numpy as np
import pytest

from helpers.rates import plain_tar_at_far
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.identification import identify


def plain_identify(scores, probes, gallery, rank, fpir):
    """Rank rate and FNIR, one search at a time."""
    mates, best, hits = [], [], []
    for row, probe in zip(scores.tolist(), probes, strict=True):
        by_subject = {}
        for score, subject in zip(row, gallery, strict=True):
            by_subject[subject] = max(score, by_subject.get(subject, -math.inf))
        if probe in by_subject:
            mate = by_subject.pop(probe)
            mates.append(mate)
            hits.append(1 + sum(score >= mate for score in by_subject.values()) <= rank)
        else:
            best.append(max(by_subject.values()))
    tar, far = plain_tar_at_far(mates, best, fpir)
    return np.mean(hits), 1 - tar, far


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_searches_are_counted_as_defined(seed: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    gallery = np.array([f"s{i}" for i in rng.integers(0, 12, 15)])
    probes = np.array([f"s{i}" for i in rng.integers(0, 24, 600)])
    scores = np.round(rng.normal(size=(600, 15)), 1)
    scores += (probes[:, None] == gallery) * 1.5
    scores = scores.astype(dtype)
    result = identify(scores, probes, gallery, [0.01, 0.1, 1.0], ranks=[3])
    assert result.ranks == (1, 3)
    assert result.num_mated + result.num_nonmated == 600
    for record in result.fnirs:
        first, fnir, fpir = plain_identify(scores, probes, gallery, 1, record.fpir_target)
        third, _, _ = plain_identify(scores, probes, gallery, 3, record.fpir_target)
        assert (result.rank1, result.rank_rates[1]) == (first, third)
        assert record.fnir == pytest.approx(fnir, abs=1e-15)
        assert record.fpir == fpir == record.false_positives / result.num_nonmated


def test_ties_are_never_in_favour_of_the_mate() -> None:
    scores = np.ones((3, 4))
    result = identify(scores, [0, 1, 2], [0, 1, 2, 3], ranks=[1, 3, 4])
    assert result.rank_rates == (0.0, 0.0, 1.0)


def test_two_entries_of_the_mate_do_not_push_it_back() -> None:
    assert identify([[0.9, 0.8, 0.1]], ["a"], ["a", "a", "b"]).rank1 == 1.0


def test_infinite_scores_are_legal() -> None:
    scores = [[math.inf, -math.inf], [-math.inf, -math.inf], [math.inf, 0.0]]
    result = identify(scores, ["a", "a", "z"], ["a", "b"], [1.0])
    assert result.rank1 == 0.5
    assert result.fnirs[0].fnir == 0.0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"scores have shape \(1, 2\) but there are 1 probes"):
        identify([[1.0, 2.0]], ["a"], ["a"])
    with pytest.raises(DataError, match="probe 1 and gallery entry 0 is NaN"):
        identify([[1.0], [math.nan]], ["a", "a"], ["a"])
    with pytest.raises(ProtocolError, match="none of 1 probes has its subject"):
        identify([[1.0]], ["b"], ["a"])
    with pytest.raises(ProtocolError, match="0 non-mated scores"):
        identify([[1.0]], ["a"], ["a"], [0.5])
    with pytest.raises(ProtocolError, match="not measurable"):
        identify([[1.0], [0.0]], ["a", "b"], ["a"], [0.5])
    with pytest.raises(ConfigError, match="fpir=0"):
        identify([[1.0], [0.0]], ["a", "b"], ["a"], [0.0])
    with pytest.raises(ConfigError, match="rank 0 does not exist"):
        identify([[1.0]], ["a"], ["a"], ranks=[0])
    with pytest.raises(ProtocolError, match="at least one search"):
        identify(np.empty((0, 1)), [], ["a"])
