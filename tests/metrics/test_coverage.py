"""What the intervals promise, on populations whose true rates are known."""

import numpy as np
import pytest

from qmargin.metrics.bootstrap import Trials, bootstrap, compare, interval
from qmargin.metrics.operating import tar_at_far, wilson

FAR = 1e-3
NUM_SUBJECTS, NUM_SAMPLES, DIM = 100, 6, 12
NUM_STUDIES, NUM_REPLICATES = 120, 200


def embeddings(rng, num_subjects):
    """Subjects differ in how well their samples agree, as people do."""
    centres = rng.normal(size=(num_subjects, 1, DIM))
    spread = np.exp(0.35 * rng.normal(size=(num_subjects, 1, 1)) - 0.45)
    samples = centres + spread * rng.normal(size=(num_subjects, NUM_SAMPLES, DIM))
    return samples.reshape(-1, DIM)


def cosines(samples):
    unit = samples / np.linalg.norm(samples, axis=1, keepdims=True)
    return unit @ unit.T


def all_pairs(samples, num_subjects=NUM_SUBJECTS):
    owner = np.repeat(np.arange(num_subjects, dtype=np.int32), NUM_SAMPLES)
    first, second = np.triu_indices(len(owner), k=1)
    names = tuple(f"{index:05d}" for index in range(num_subjects))
    scores = cosines(samples)[first, second]
    return Trials(scores, owner[first] == owner[second], owner[first], owner[second], names)


def split(trials):
    return trials.scores[trials.is_genuine], trials.scores[~trials.is_genuine]


def true_tar(num_populations=20):
    """TAR of the population, from many times the trials of a study."""
    rng = np.random.default_rng(10_000)
    parts = [split(all_pairs(embeddings(rng, 400), 400)) for _ in range(num_populations)]
    genuine = np.concatenate([part[0] for part in parts])
    impostor = np.concatenate([part[1] for part in parts])
    return tar_at_far(genuine, impostor, FAR).tar


@pytest.mark.slow
def test_subject_bootstrap_covers_where_wilson_does_not():
    truth = true_tar()
    hits = {"bootstrap": 0, "wilson": 0}
    for seed in range(NUM_STUDIES):
        trials = all_pairs(embeddings(np.random.default_rng(seed), NUM_SUBJECTS))
        replicates = bootstrap(
            trials, [FAR], p_targets=(), has_eer=False, num_replicates=NUM_REPLICATES, seed=seed
        )
        low, high = interval(replicates.tar[:, 0])
        hits["bootstrap"] += low <= truth <= high
        genuine, impostor = split(trials)
        point = tar_at_far(genuine, impostor, FAR)
        low, high = wilson(round(point.tar * len(genuine)), len(genuine))
        hits["wilson"] += low <= truth <= high
    coverage = {name: count / NUM_STUDIES for name, count in hits.items()}
    assert 0.90 <= coverage["bootstrap"] <= 0.99, coverage
    assert coverage["wilson"] < 0.75, coverage


@pytest.mark.slow
def test_paired_comparison_keeps_its_level_where_mcnemar_does_not():
    """Two systems that are equally good: noise of the same law, drawn apart."""
    rejected = {"bootstrap": 0, "mcnemar": 0}
    for seed in range(NUM_STUDIES):
        rng = np.random.default_rng([1, seed])
        samples = embeddings(rng, NUM_SUBJECTS)
        both = [
            all_pairs(
                samples
                + np.repeat(0.35 * rng.normal(size=(NUM_SUBJECTS, DIM)), NUM_SAMPLES, axis=0)
                + 0.2 * rng.normal(size=samples.shape)
            )
            for _ in range(2)
        ]
        first, second = (
            bootstrap(trials, [FAR], p_targets=(), has_eer=False, num_replicates=NUM_REPLICATES)
            for trials in both
        )
        rejected["bootstrap"] += compare(first, second).tar[0].p_value < 0.05
        accepted = [
            genuine >= tar_at_far(genuine, impostor, FAR).threshold
            for genuine, impostor in map(split, both)
        ]
        only = [int((accepted[0] & ~accepted[1]).sum()), int((accepted[1] & ~accepted[0]).sum())]
        rejected["mcnemar"] += (only[0] - only[1]) ** 2 > 3.841 * sum(only)
    rates = {name: count / NUM_STUDIES for name, count in rejected.items()}
    assert rates["bootstrap"] <= 0.10, rates
    assert rates["mcnemar"] > 0.15, rates
