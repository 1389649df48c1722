"""All pairs of the demo's test, against the general tools on the same pairs."""

import numpy as np
import pytest

from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.evaluate import FARS, Facts, evaluate_pictures
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.scoring import nearest_moments
from qmargin.metrics import eer, tar_at_far
from qmargin.metrics.normalise import as_norm

FACTS = Facts(name="a", card={}, protocol="pairs", command="", prefix="p/")


@pytest.fixture(scope="module")
def dataset():
    return StrokeIdentities(60, 5, split="test")


@pytest.fixture(scope="module")
def embeddings(dataset):
    draws = np.random.default_rng(0)
    centres = draws.normal(size=(60, 16))[dataset.labels]
    return (centres + 1.5 * draws.normal(size=centres.shape)).astype(np.float32)


def test_a_result_has_the_numbers_of_the_scores(dataset, embeddings):
    result = evaluate_pictures(embeddings, dataset, FACTS, num_replicates=20)
    unit = embeddings.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    first, second = np.triu_indices(len(unit), k=1)
    scores = (unit[first] * unit[second]).sum(axis=1)
    is_genuine = dataset.labels[first] == dataset.labels[second]
    genuine, impostor = scores[is_genuine], scores[~is_genuine]
    assert [point.far_target for point in result.metrics.tar] == list(FARS[:3])  # 44,250 pairs
    for point in result.metrics.tar:
        assert point.tar == tar_at_far(genuine, impostor, point.far_target).tar
        assert point.interval[0] <= point.tar <= point.interval[1]
    assert result.metrics.eer.value == pytest.approx(eer(genuine, impostor).eer, rel=1e-9)
    assert sum(result.histogram.impostor) == len(impostor)
    worst = result.hardest.false_accepts[0]
    place = np.flatnonzero(~is_genuine)[impostor.argmax()]
    names = {f"p/{dataset.sample_id(int(side[place]))}" for side in (first, second)}
    assert {worst.enrol, worst.test} == names


def test_a_result_by_normalised_scores_has_their_numbers(dataset, embeddings):
    cohort = np.random.default_rng(3).normal(size=(40, embeddings.shape[1]))
    unit, others = unit_rows(embeddings), unit_rows(cohort)
    moments = nearest_moments(unit, others, 10, "cohort")
    result = evaluate_pictures(embeddings, dataset, FACTS, moments=moments, num_replicates=20)
    scores = as_norm(unit @ unit.T, unit @ others.T, unit @ others.T, top_n=10)
    first, second = np.triu_indices(len(unit), k=1)
    is_genuine = dataset.labels[first] == dataset.labels[second]
    scores = scores[first, second]
    genuine, impostor = scores[is_genuine], scores[~is_genuine]
    for point in result.metrics.tar:
        expected = tar_at_far(genuine, impostor, point.far_target)
        assert point.tar == pytest.approx(expected.tar, abs=2 / len(genuine))  # ties by rounding
        assert point.threshold == pytest.approx(expected.threshold, abs=1e-9)
        assert point.interval[0] <= point.tar <= point.interval[1]
    plain = evaluate_pictures(embeddings, dataset, FACTS, num_replicates=20)
    assert [point.tar for point in plain.metrics.tar] != [p.tar for p in result.metrics.tar]


def test_results_of_two_systems_can_be_paired(dataset, embeddings):
    first, second = (
        evaluate_pictures(rows, dataset, FACTS, num_replicates=5)
        for rows in (embeddings, -embeddings[:, ::-1].copy())
    )
    assert first.trials_sha256 == second.trials_sha256
    assert first.replicates.subjects_sha256 == second.replicates.subjects_sha256
    other = evaluate_pictures(
        embeddings, StrokeIdentities(60, 5, split="test", seed=1), FACTS, num_replicates=5
    )
    assert other.trials_sha256 != first.trials_sha256
