"""Sets in folds: the flip test, accuracy and TAR that are told apart, pictures for a report."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.faces import PatchModel, embedded, face, folded_pairs, write_bin
from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols import face_sets
from qmargin.metrics.folds import kfold_accuracy
from qmargin.metrics.operating import tar_at_far

QUICK = EvaluationOptions(fars=(0.1, 0.5), num_replicates=20, protocol="small")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("set") / "lfw.bin"
    return face_sets.read_verification_set(write_bin(path, *folded_pairs(noise=110.0)))


@pytest.fixture(scope="module")
def embeddings(pairs):
    return embedded(pairs.images(), flip="both")


def plain_scores():
    """Scores of the set from the images themselves: sum of both views, then the cosine."""
    scores = []
    for pair in folded_pairs(noise=110.0)[0]:
        features = []
        for image in pair:
            views = [PatchModel().embed(view[None])[0] for view in (image, image[:, ::-1])]
            feature = views[0].astype(np.float64) + views[1]
            features.append(feature / np.sqrt(feature @ feature))
        scores.append(features[0] @ features[1])
    return np.array(scores)


def test_images_that_occur_again_are_kept_once(pairs):
    assert pairs.rows.shape == (80, 2)
    # 160 images; the first of an impostor pair is that of a genuine one, and most second ones too
    assert len(pairs.pictures) == 81
    assert pairs.keys[0] == "000000"
    np.testing.assert_array_equal(pairs.images()[1][0], face(0, 1, noise=110.0))
    assert pairs.rows[4].tolist() == [0, 3]  # the first impostor pair: photos of 0 and of 1


def test_accuracy_and_tar_follow_their_definitions(pairs, embeddings):
    found = face_sets.evaluate_verification_set(
        pairs, face_sets.flip_features(embeddings), QUICK, compatible=True
    )
    scores, labels = plain_scores(), pairs.is_genuine
    expected = kfold_accuracy(scores, labels)
    assert 0.5 < expected.mean < 1.0  # hard enough to tell measures apart
    named = found.measures.extra
    assert named["10-fold accuracy"].value == pytest.approx(expected.mean, abs=1e-12)
    assert named["10-fold accuracy"].std == pytest.approx(expected.std, abs=1e-12)
    assert (found.protocol.kind, found.protocol.flip) == ("lfw", "sum")
    point = tar_at_far(scores[labels], scores[~labels], 0.1)
    assert found.measures.tar[0].tar == point.tar
    assert found.measures.tar[0].false_accepts == point.false_accepts
    distances = 2.0 - 2.0 * scores
    grid = np.arange(0, 4, 0.01)
    folds = np.arange(80) // 8
    accuracies = []
    for fold in range(10):
        train, test = folds != fold, folds == fold
        right = [np.mean((distances[train] < each) == labels[train]) for each in grid]
        best = grid[int(np.argmax(right))]
        accuracies.append(np.mean((distances[test] < best) == labels[test]))
    assert named["10-fold accuracy, InsightFace"].value == pytest.approx(np.mean(accuracies))
    assert "realised FAR" in str(named["TAR at FAR 0.001, InsightFace"].note)
    views = [v for pair in folded_pairs(noise=110.0)[0] for i in pair for v in (i, i[:, ::-1])]
    norms = [np.linalg.norm(PatchModel().embed(view[None]).astype(np.float64)) for view in views]
    assert named["mean norm"].value == pytest.approx(np.mean(norms), rel=1e-6)


def test_without_the_flip_test(pairs):
    plain = embedded(pairs.images())
    found = face_sets.evaluate_verification_set(
        pairs, face_sets.flip_features(plain, has_flip=False), QUICK
    )
    unit = plain.astype(np.float64) / np.linalg.norm(plain.astype(np.float64), axis=1)[:, None]
    scores = np.sum(unit[pairs.rows[:, 0]] * unit[pairs.rows[:, 1]], axis=1)
    accuracy = found.measures.extra["10-fold accuracy"]
    assert accuracy.value == kfold_accuracy(scores, pairs.is_genuine).mean
    assert found.protocol.flip == "none"


def test_pictures_of_the_hardest_pairs(tmp_path, pairs, embeddings):
    options = replace(QUICK, num_hardest=2, num_replicates=0)
    result = face_sets.evaluate_verification_set(
        pairs, face_sets.flip_features(embeddings), options
    )
    trials = (*result.hardest.false_accepts, *result.hardest.false_rejects)
    wanted = {key for trial in trials for key in (trial.enrol, trial.test)}
    assert face_sets.write_pictures(tmp_path / "p", pairs, result.hardest) == len(wanted)
    assert {path.stem for path in (tmp_path / "p").iterdir()} == wanted
    scores, labels = plain_scores(), pairs.is_genuine
    worst = int(np.flatnonzero(~labels)[np.argmax(scores[~labels])])
    first = result.hardest.false_accepts[0]
    place = pairs.keys.index(first.enrol), pairs.keys.index(first.test)
    assert list(place) == pairs.rows[worst].tolist()
    from qmargin.report.media import MediaFolder

    assert MediaFolder(tmp_path / "p").medium(first.enrol).kind == "image"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        face_sets.write_pictures(tmp_path / "file", pairs, result.hardest)


def test_features_without_a_direction_and_of_the_wrong_set(pairs, embeddings):
    with pytest.raises(ShapeError, match="has 81 pictures, not 80"):
        face_sets.evaluate_verification_set(pairs, face_sets.flip_features(embeddings[:-1]), QUICK)
    with pytest.raises(ShapeError, match="2 d"):
        face_sets.flip_features(np.ones((2, 3)))
    opposite = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 2.0, -1.0, -2.0]])
    with pytest.raises(DataError, match="picture 1 has the length zero"):
        face_sets.flip_features(opposite)
    with pytest.raises(DataError, match="or is not finite"):
        face_sets.flip_features(np.array([[np.nan, 1.0]]), has_flip=False)


def test_an_impostor_pair_of_one_image_is_refused(tmp_path):
    images, labels = folded_pairs()
    images[5] = (images[5][0], images[5][0])
    pairs = face_sets.read_verification_set(write_bin(tmp_path / "bad.bin", images, labels))
    features = face_sets.flip_features(embedded(pairs.images(), flip="both"))
    with pytest.raises(DataError, match=r"bad.bin, pair 5: the trial is impostor"):
        face_sets.evaluate_verification_set(pairs, features, QUICK)


def folds_of(number, num_folds):
    """Contiguous folds, the first ones longer."""
    sizes = [number // num_folds + (fold < number % num_folds) for fold in range(num_folds)]
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def plain_accuracy(distances, labels, num_folds):
    found = []
    for test in folds_of(len(distances), num_folds):
        train = np.setdiff1d(np.arange(len(distances)), test)
        best, best_accuracy = 0.0, -1.0
        for threshold in np.arange(0, 4, 0.01):
            accuracy = np.mean((distances[train] < threshold) == labels[train])
            if accuracy > best_accuracy:
                best, best_accuracy = threshold, accuracy
        found.append(np.mean((distances[test] < best) == labels[test]))
    return found


def plain_tar(distances, labels, far, num_folds):
    tars, fars = [], []
    grid = np.arange(0, 4, 0.001)
    for test in folds_of(len(distances), num_folds):
        train = np.setdiff1d(np.arange(len(distances)), test)
        impostors = distances[train][~labels[train]]
        rates = [np.mean(impostors < threshold) for threshold in grid]
        if max(rates) < far:
            threshold = 0.0
        else:
            above = next(i for i, rate in enumerate(rates) if rate >= far)
            lower = max((rate for rate in rates if rate < far), default=None)
            if lower is None:
                threshold = grid[above]
            else:
                below = rates.index(lower)
                share = (far - lower) / (rates[above] - lower)
                threshold = grid[below] + share * (grid[above] - grid[below])
        chosen = distances[test]
        tars.append(np.mean(chosen[labels[test]] < threshold))
        fars.append(np.mean(chosen[~labels[test]] < threshold))
    return tars, fars


@pytest.mark.parametrize(("number", "digits"), [(207, 1), (200, 8)])
def test_both_measures_follow_the_loop(number, digits):
    rng = np.random.default_rng(number)
    labels = np.arange(number) % 20 < 10
    distances = np.where(labels, rng.normal(1.0, 0.4, number), rng.normal(1.8, 0.4, number))
    distances = distances.clip(0, 4).round(digits)
    accuracies = plain_accuracy(distances, labels, 10)
    for far in (0.001, 0.2):
        found = face_sets.fold_rates(distances, labels, far)
        tars, fars = plain_tar(distances, labels, far, 10)
        for rates, expected in zip(found, (accuracies, tars, fars), strict=True):
            np.testing.assert_allclose(rates, expected, rtol=0, atol=1e-15)


def test_a_far_that_no_threshold_reaches_accepts_nothing():
    distances = np.tile([0.5, 4.0], 20)  # impostors beyond the grid
    found = face_sets.fold_rates(distances, np.tile([True, False], 20), 0.1)
    assert (found.tar.max(), found.far.max()) == (0.0, 0.0)


def test_what_has_no_folds():
    with pytest.raises(ProtocolError, match="3 pairs do not make 10 folds"):
        face_sets.fold_rates(np.zeros(3), np.array([True, False, True]))
    with pytest.raises(ProtocolError, match="0 impostor pairs"):
        face_sets.fold_rates(np.zeros(40), np.arange(40) < 30)
    with pytest.raises(ShapeError, match="labels"):
        face_sets.fold_rates(np.zeros(3), np.zeros(2, bool))
