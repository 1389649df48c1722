"""Speaker trials against plain loops: mean, cosine, AS-norm, drawn trials, results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.speakers import Speakers, make_speakers
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.embeddings import Embeddings, read_embeddings
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.cohorts import nearest_moments, speaker_means, speakers_of
from qmargin.evaluation.protocols.trials import (
    Scoring,
    calibrate_speakers,
    draw_trials,
    evaluate_speakers,
    score_speakers,
)
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.scoring import CohortNorm, score_trials
from qmargin.evaluation.trials import TrialList, read_trials


def named(keys: list[str], matrix: np.ndarray, path: str = "made.npz") -> Embeddings:
    return Embeddings(tuple(keys), matrix, Source(path, "0" * 64, "embeddings"))


def training_set(num_speakers: int = 30, each: int = 5, seed: int = 9) -> Embeddings:
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(num_speakers, 1, 8))
    matrix = centers + 0.8 * generator.normal(size=(num_speakers, each, 8)) + 0.7
    keys = [f"t{s:02d}/v/{u}.wav" for s in range(num_speakers) for u in range(each)]
    return named(keys, matrix.reshape(-1, 8).astype(np.float32), "training.npz")


@pytest.fixture
def speakers() -> Speakers:
    return make_speakers()


@pytest.fixture
def trials(speakers: Speakers, tmp_path: Path) -> TrialList:
    return read_trials(speakers.write_trials(tmp_path / "trials.txt"))


def test_plain_scores_are_cosines(speakers: Speakers, trials: TrialList) -> None:
    scored = score_speakers(named(speakers.keys, speakers.matrix), trials)
    expected = [speakers.plain_score(row) for row in range(len(trials))]
    np.testing.assert_allclose(scored.scores, expected, atol=1e-14)


def test_mean_subtraction_and_as_norm_are_their_formulas(
    speakers: Speakers, trials: TrialList
) -> None:
    """s' = ((s - mu_e) / sd_e + (s - mu_t) / sd_t) / 2 over the n nearest speakers' means."""
    training = training_set()
    cohort = speaker_means(training)
    scoring = Scoring(training, CohortNorm(cohort, top_n=7))
    found = score_speakers(named(speakers.keys, speakers.matrix), trials, scoring).scores
    mean = training.matrix.astype(np.float64).mean(0)
    vectors = {
        key: (row - mean) / np.linalg.norm(row - mean)
        for key, row in zip(speakers.keys, speakers.matrix.astype(np.float64), strict=True)
    }
    others = [(row - mean) / np.linalg.norm(row - mean) for row in cohort.matrix]
    for row in range(0, len(trials), 37):
        enrol, test = vectors[speakers.enrol[row]], vectors[speakers.test[row]]
        normalised = []
        for side in (enrol, test):
            near = np.array(sorted(float(side @ other) for other in others)[-7:])
            normalised.append((float(enrol @ test) - near.mean()) / near.std())
        assert found[row] == pytest.approx(sum(normalised) / 2, abs=1e-12)


def test_as_norm_agrees_with_the_scores_of_trial_lists(
    speakers: Speakers, trials: TrialList, tmp_path: Path
) -> None:
    training = training_set()
    norm = CohortNorm(speaker_means(training), top_n=11)
    embeddings = named(speakers.keys, speakers.matrix)
    path = score_trials(embeddings, trials, out=tmp_path / "s.tsv", norm=norm, center=training)
    found = score_speakers(embeddings, trials, Scoring(training, norm)).scores
    np.testing.assert_allclose(found, read_scores(path, trials=trials).scores, atol=1e-12)


def test_the_cohort_has_one_mean_per_speaker() -> None:
    training = named(["b/1", "a/1", "b/2"], np.array([[1.0, 2.0], [5.0, 5.0], [3.0, 6.0]]))
    cohort = speaker_means(training)
    assert cohort.keys == ("a", "b")
    np.testing.assert_array_equal(cohort.matrix, [[5.0, 5.0], [2.0, 4.0]])
    other = speaker_means(training, {"b/1": "x", "a/1": "x", "b/2": "y"})
    np.testing.assert_array_equal(other.matrix, [[3.0, 3.5], [3.0, 6.0]])
    with pytest.raises(DataError, match="'b/2' has no speaker"):
        speaker_means(training, {"b/1": "x", "a/1": "x"})
    with pytest.raises(DataError, match=r"'2.wav' has no speaker"):
        speakers_of(["a/1.wav", "2.wav"])


@pytest.mark.parametrize("top_n", [2, 40, 50])
def test_moments_of_the_nearest_do_not_depend_on_blocks(top_n: int) -> None:
    generator = np.random.default_rng(1)
    unit, cohort = generator.normal(size=(700, 6)), generator.normal(size=(50, 6))
    found = nearest_moments(unit, cohort, top_n=top_n, name="made")
    scores = np.sort(unit @ cohort.T, axis=1)[:, -top_n:]
    np.testing.assert_allclose(found.mean, scores.mean(1), atol=1e-12)
    np.testing.assert_allclose(found.std, scores.std(1), atol=1e-12)
    alone = nearest_moments(unit[300:301], cohort, top_n=top_n, name="made")
    assert alone.mean[0] == pytest.approx(found.mean[300], abs=1e-13)


def test_drawn_trials_are_pairs_of_other_names_each_once() -> None:
    training = training_set()
    drawn = draw_trials(training, 2000, seed=3)
    names = [drawn.keys.trial(row) for row in range(len(drawn))]
    assert drawn.is_genuine is not None
    assert len({frozenset(pair) for pair in names}) == len(names)
    assert all(first != second for first, second in names)
    same = [first.split("/")[0] == second.split("/")[0] for first, second in names]
    assert same == drawn.is_genuine.tolist()
    assert 200 < sum(same) < len(same) / 2
    again, other = draw_trials(training, 2000, seed=3), draw_trials(training, 2000, seed=4)
    assert again.trials_sha256() == drawn.trials_sha256() != other.trials_sha256()
    with pytest.raises(DataError, match="2 speakers with at most 1 utterances"):
        draw_trials(named(["a/1", "b/1"], np.ones((2, 2))))


def test_the_result_has_every_number_and_the_hardest_trials(
    speakers: Speakers, trials: TrialList, tmp_path: Path
) -> None:
    embeddings = read_embeddings(speakers.write_embeddings(tmp_path / "e.npz"))
    options = EvaluationOptions(name="plain", fars=(1e-1, 1e-2), num_replicates=50)
    result = evaluate_speakers(embeddings, trials, options, scores=tmp_path / "scores.tsv")
    assert result.protocol.num_genuine == sum(speakers.labels)
    assert result.protocol.num_subjects == 12
    assert result.protocol.interval.method == "subject bootstrap"
    assert [source.role for source in result.sources] == ["trials", "embeddings", "scores"]
    written = read_scores(tmp_path / "scores.tsv", trials=trials)
    impostors = np.sort(written.scores[~written.is_genuine])[::-1]
    assert result.hardest is not None
    hardest = [pair.score for pair in result.hardest.false_accepts]
    assert hardest == impostors[: len(hardest)].tolist()
    assert 0.0 < result.metrics.eer.value < 0.4
    assert result.trials_sha256 == trials.trials_sha256()


def test_calibration_gives_ratios_that_are_right_for_other_speakers() -> None:
    training, others = training_set(60, seed=1), training_set(60, seed=2)
    scoring = Scoring(training)
    calibration = calibrate_speakers(training, draw_trials(training, 5000), scoring)
    trials, options = draw_trials(others, 5000), EvaluationOptions(fars=(1e-1,), num_replicates=0)
    plain = evaluate_speakers(others, trials, options, scoring=scoring).metrics
    found = evaluate_speakers(
        others, trials, options, scoring=scoring, calibration=calibration
    ).metrics
    assert plain.cllr.value is not None
    assert found.cllr.value is not None
    assert found.min_cllr.value is not None
    assert found.cllr.value < plain.cllr.value - 0.1
    assert found.cllr.value < found.min_cllr.value + 0.05


def test_a_calibration_knows_what_it_used() -> None:
    training = training_set()
    seconds = {name: 1.0 + len(name) for name in training.keys}
    scoring = Scoring(training, CohortNorm(speaker_means(training), 10), seconds)
    calibration = calibrate_speakers(training, draw_trials(training, 500), scoring)
    kinds = [name.split(",")[0] for name in calibration.names]
    assert kinds == ["seconds"] * 3 + ["lengths"] * 3 + ["cohort_means"] * 2
    assert calibration.weights[0] > 0.0
    with pytest.raises(ShapeError, match="is applied to lengths, smaller"):
        evaluate_speakers(
            training,
            draw_trials(training, 500),
            scoring=Scoring(training),
            calibration=calibration,
        )


def test_unknown_names_and_other_widths_are_refused(speakers: Speakers, trials: TrialList) -> None:
    embeddings = named(speakers.keys, speakers.matrix)
    short = named(speakers.keys[1:], speakers.matrix[1:])
    with pytest.raises(DataError, match=r"line 1: 'id00/video/0.wav' has no embedding .*\(1 of 48"):
        score_speakers(short, trials)
    with pytest.raises(DataError, match=r"line 1: 'id00/video/0.wav' has no duration \(48 of 48"):
        score_speakers(embeddings, trials, Scoring(seconds={}))
    narrow = named(["a/1", "b/1"], np.eye(2))
    with pytest.raises(ShapeError, match="width 2"):
        score_speakers(embeddings, trials, Scoring(center=narrow))
    with pytest.raises(ShapeError, match="width 2"):
        score_speakers(embeddings, trials, Scoring(norm=CohortNorm(narrow, 2)))
    cohort = speaker_means(training_set())
    with pytest.raises(ConfigError, match="top_n=31 is not from 2 to 30"):
        score_speakers(embeddings, trials, Scoring(norm=CohortNorm(cohort, 31)))
    flat = named(speakers.keys, np.ones_like(speakers.matrix))
    with pytest.raises(DataError, match=r"'id00/video/0.wav' less the mean is zero"):
        score_speakers(flat, trials, Scoring(center=flat))
    with pytest.raises(DataError, match="has no labels"):
        evaluate_speakers(embeddings, replace(trials, is_genuine=None))
