"""Sets in folds: the flip test, accuracy and TAR that are told apart, pictures for a report."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.faces import PatchModel, face, folded_pairs, write_bin
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.embed import embed_images
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.measures import (
    Measure,
    read_measured,
    with_measures,
    write_measured,
)
from qmargin.evaluation.protocols.verification_sets import (
    VerificationSet,
    evaluate_verification_set,
    flip_features,
    read_verification_set,
    write_pictures,
)
from qmargin.evaluation.result import read_result
from qmargin.metrics.folds import kfold_accuracy
from qmargin.metrics.operating import tar_at_far

QUICK = EvaluationOptions(fars=(0.1, 0.5), num_replicates=20, protocol="small")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> VerificationSet:
    path = tmp_path_factory.mktemp("set") / "lfw.bin"
    return read_verification_set(write_bin(path, *folded_pairs(noise=110.0)))


@pytest.fixture(scope="module")
def embeddings(pairs: VerificationSet) -> np.ndarray:
    return embed_images(PatchModel(), pairs.images(), flip="both")


def plain_scores() -> np.ndarray:
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


def test_images_that_occur_again_are_kept_once(pairs: VerificationSet) -> None:
    assert len(pairs) == 80
    # 160 images; the first of an impostor pair is that of a genuine one, and most second ones too
    assert len(pairs.pictures) == 81
    assert pairs.keys[0] == "000000"
    np.testing.assert_array_equal(pairs.images()[1][0], face(0, 1, noise=110.0))
    assert pairs.rows[4].tolist() == [0, 3]  # the first impostor pair: photos of 0 and of 1


def test_accuracy_and_tar_follow_their_definitions(
    pairs: VerificationSet, embeddings: np.ndarray
) -> None:
    found = evaluate_verification_set(pairs, flip_features(embeddings), QUICK, compatible=True)
    scores, labels = plain_scores(), pairs.is_genuine
    expected = kfold_accuracy(scores, labels)
    assert 0.5 < expected.mean < 1.0  # hard enough to tell measures apart
    named = {measure.name: measure for measure in found.measures}
    assert named["10-fold accuracy"].value == pytest.approx(expected.mean, abs=1e-12)
    assert named["10-fold accuracy"].std == pytest.approx(expected.std, abs=1e-12)
    assert "with flip test" in str(named["10-fold accuracy"].note)
    point = tar_at_far(scores[labels], scores[~labels], 0.1)
    assert found.result.metrics.tar[0].tar == point.tar
    assert found.result.metrics.tar[0].false_accepts == point.false_accepts
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


def test_mean_norm_is_over_every_image_and_both_views(
    pairs: VerificationSet, embeddings: np.ndarray
) -> None:
    found = evaluate_verification_set(pairs, flip_features(embeddings), QUICK)
    norms = []
    for pair in folded_pairs(noise=110.0)[0]:
        for image in pair:
            for view in (image, image[:, ::-1]):
                norms.append(np.linalg.norm(PatchModel().embed(view[None])[0].astype(np.float64)))
    assert found.measures[-1].name == "mean norm"
    assert found.measures[-1].value == pytest.approx(np.mean(norms), rel=1e-6)
    assert [measure.name for measure in found.measures] == ["10-fold accuracy", "mean norm"]


def test_without_the_flip_test(pairs: VerificationSet) -> None:
    plain = embed_images(PatchModel(), pairs.images())
    found = evaluate_verification_set(pairs, flip_features(plain, has_flip=False), QUICK)
    unit = plain.astype(np.float64) / np.linalg.norm(plain.astype(np.float64), axis=1)[:, None]
    scores = np.sum(unit[pairs.rows[:, 0]] * unit[pairs.rows[:, 1]], axis=1)
    assert found.measures[0].value == kfold_accuracy(scores, pairs.is_genuine).mean
    assert "without flip test" in str(found.measures[0].note)


def test_the_result_goes_to_a_file_that_other_readers_understand(
    tmp_path: Path, pairs: VerificationSet, embeddings: np.ndarray
) -> None:
    found = evaluate_verification_set(pairs, flip_features(embeddings), QUICK)
    assert found.result.protocol.interval.method == "file bootstrap"
    write_measured(tmp_path / "r.json", found, keep_paths=True)
    assert read_measured(tmp_path / "r.json") == found
    card = read_result(tmp_path / "r.json").system.model_card
    assert card is not None
    assert card["10-fold accuracy"].startswith(f"{found.measures[0].value:.5f} ± ")
    twice = replace(found, measures=(found.measures[0], found.measures[0]))
    write_measured(tmp_path / "twice.json", twice)
    with pytest.raises(DataError, match="a name twice"):
        read_measured(tmp_path / "twice.json")


def test_measures_join_a_card_that_is_there(pairs: VerificationSet, embeddings: np.ndarray) -> None:
    options = replace(QUICK, model_card={"backbone": "iresnet18"}, num_replicates=0)
    result = evaluate_verification_set(pairs, flip_features(embeddings), options).result
    assert result.system.model_card is not None
    assert next(iter(result.system.model_card)) == "backbone"
    bare = replace(result, system=replace(result.system, model_card=None))
    assert with_measures(bare, ()).result.system.model_card is None
    assert str(Measure("x", 0.5)) == "0.50000"


def test_pictures_of_the_hardest_pairs(
    tmp_path: Path, pairs: VerificationSet, embeddings: np.ndarray
) -> None:
    options = replace(QUICK, num_hardest=2, num_replicates=0)
    result = evaluate_verification_set(pairs, flip_features(embeddings), options).result
    assert result.hardest is not None
    trials = (*result.hardest.false_accepts, *result.hardest.false_rejects)
    wanted = {key for trial in trials for key in (trial.enrol, trial.test)}
    assert write_pictures(tmp_path / "p", pairs, result.hardest) == len(wanted)
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
        write_pictures(tmp_path / "file", pairs, result.hardest)


def test_features_without_a_direction_and_of_the_wrong_set(
    pairs: VerificationSet, embeddings: np.ndarray
) -> None:
    with pytest.raises(ShapeError, match="pictures, but"):
        evaluate_verification_set(pairs, flip_features(embeddings[:-1]), QUICK)
    with pytest.raises(ShapeError, match="2 d"):
        flip_features(np.ones((2, 3)))
    opposite = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 2.0, -1.0, -2.0]])
    with pytest.raises(DataError, match="picture 1 has the length zero"):
        flip_features(opposite)
    with pytest.raises(DataError, match="or is not finite"):
        flip_features(np.array([[np.nan, 1.0]]), has_flip=False)


def test_an_impostor_pair_of_one_image_is_refused(tmp_path: Path) -> None:
    images, labels = folded_pairs()
    images[5] = (images[5][0], images[5][0])
    pairs = read_verification_set(write_bin(tmp_path / "bad.bin", images, labels))
    features = flip_features(embed_images(PatchModel(), pairs.images(), flip="both"))
    with pytest.raises(DataError, match=r"bad.bin, pair 5: the trial is impostor"):
        evaluate_verification_set(pairs, features, QUICK)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


def test_code_in_a_set_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(([_Evil(), b""], [True])))
    with pytest.raises(DataError, match="not a verification set"):
        read_verification_set(tmp_path / "evil.bin")
    assert not (tmp_path / "evil").exists()
