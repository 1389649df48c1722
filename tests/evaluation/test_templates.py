"""Templates against the definition, whatever the blocks; pairs, subjects and hardest pairs."""

from dataclasses import replace

import numpy as np
import pytest

from qmargin.errors import DataError, ShapeError
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols import templates as module
from qmargin.evaluation.protocols.templates import (
    Pooling,
    TemplatePairs,
    TemplateRows,
    Templates,
    evaluate_templates,
    pair_scores,
    pool_templates,
)
from qmargin.evaluation.result import Source
from qmargin.metrics.operating import tar_at_far

SOURCE = Source("pairs.txt", "0" * 64, "trials")
ALL = [Pooling(norms, detector) for norms in (True, False) for detector in (True, False)]


def make_rows(number: int = 400, seed: int = 0) -> tuple[np.ndarray, TemplateRows]:
    rng = np.random.default_rng(seed)
    template = rng.choice([3, 5, 8, 13, 10**12], number)
    template[:250] = 8  # one long video
    rows = TemplateRows(template, rng.integers(-4, 4, number), rng.uniform(0.0, 1.0, number))
    return rng.normal(1.0, 3.0, (number, 6)).astype(np.float32), rows


def plain_template(
    embeddings: np.ndarray, rows: TemplateRows, template: int, pooling: Pooling
) -> np.ndarray:
    """Media means, their sum, one division by the length."""
    total = np.zeros(embeddings.shape[1])
    inside = rows.template == template
    for media in set(rows.media[inside].tolist()):
        frames = []
        for row in np.flatnonzero(inside & (rows.media == media)):
            frame = embeddings[row].astype(np.float64)
            if not pooling.keep_norms:
                frame = frame / np.linalg.norm(frame)
            if pooling.use_detector:
                assert rows.detector is not None
                frame = frame * rows.detector[row]
            frames.append(frame)
        total += np.mean(frames, axis=0)
    return total / np.linalg.norm(total)


@pytest.mark.parametrize("pooling", ALL, ids=str)
def test_pooling_follows_the_definition(pooling: Pooling) -> None:
    embeddings, rows = make_rows()
    found = pool_templates(embeddings, rows, pooling)
    assert found.ids.tolist() == [3, 5, 8, 13, 10**12]
    expected = [plain_template(embeddings, rows, each, pooling) for each in found.ids.tolist()]
    np.testing.assert_allclose(found.vectors, expected, rtol=0, atol=1e-14)


def test_the_four_ways_differ() -> None:
    embeddings, rows = make_rows()
    found = [pool_templates(embeddings, rows, pooling).vectors for pooling in ALL]
    for i in range(4):
        for j in range(i):
            assert np.abs(found[i] - found[j]).max() > 1e-3


@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_and_order_do_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, rows = make_rows()
    whole = pool_templates(embeddings, rows)
    monkeypatch.setattr(module, "_ROWS", block)
    calls: list[tuple[int, int]] = []
    parts = pool_templates(embeddings, rows, progress=lambda *done: calls.append(done))
    np.testing.assert_allclose(parts.vectors, whole.vectors, rtol=0, atol=1e-15)
    assert calls[-1] == (400, 400)
    order = np.random.default_rng(1).permutation(400)
    assert rows.detector is not None
    mixed = TemplateRows(rows.template[order], rows.media[order], rows.detector[order])
    again = pool_templates(embeddings[order], mixed)
    np.testing.assert_allclose(again.vectors, whole.vectors, rtol=0, atol=1e-14)


def test_very_large_and_small_embeddings_have_a_direction() -> None:
    rows = TemplateRows(np.array([1, 2]), np.array([0, 0]))
    found = pool_templates(np.array([[3e200, 4e200], [3e-200, 4e-200]]), rows)
    np.testing.assert_allclose(found.vectors, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-15)


def test_what_cannot_be_pooled() -> None:
    embeddings, rows = make_rows()
    with pytest.raises(ShapeError, match="400 images in the lists"):
        pool_templates(embeddings[:-1], rows)
    with pytest.raises(ShapeError, match="media has the shape"):
        TemplateRows(np.zeros(3, np.int64), np.zeros(2, np.int64))
    for bad in (np.nan, -0.1, np.inf):
        with pytest.raises(DataError, match="score of image 1 is"):
            TemplateRows(np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([1.0, bad]))
    two = TemplateRows(np.array([4, 4]), np.array([0, 1]), np.array([1.0, 1.0]))
    with pytest.raises(DataError, match="template 4 has the length zero"):
        pool_templates(np.array([[1.0, 2.0], [-1.0, -2.0]]), two)
    with pytest.raises(DataError, match="image 1 is zero"):
        pool_templates(np.array([[1.0, 2.0], [0.0, 0.0]]), two, Pooling(keep_norms=False))
    with pytest.raises(DataError, match="template 4 is not finite"):
        pool_templates(np.array([[1.0, np.inf], [0.0, 0.0]]), two)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_scores_do_not_depend_on_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20, 33))
    enrol, test = rng.integers(0, 20, (2, 500))
    whole = pair_scores(vectors, enrol, test, num_threads=1)
    expected = [float(vectors[a] @ vectors[b]) for a, b in zip(enrol, test, strict=True)]
    np.testing.assert_allclose(whole, expected, rtol=1e-13)
    monkeypatch.setattr(module, "_PAIRS", block)
    monkeypatch.setattr(module, "_PAIRS_BETWEEN_REPORTS", 2 * block)
    calls: list[tuple[int, int]] = []
    found = pair_scores(vectors, enrol, test, progress=lambda *done: calls.append(done))
    assert found.tobytes() == whole.tobytes()
    assert calls[-1] == (500, 500)


def make_templates(num_subjects: int = 12, each: int = 4) -> tuple[Templates, TemplatePairs]:
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(num_subjects), each)
    vectors = rng.normal(size=(num_subjects, 16))[subject] + rng.normal(size=(len(subject), 16))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = 10 * np.arange(len(subject)) + 7
    enrol, test = np.triu_indices(len(subject), 1)
    subject_of = {int(ids[row]): f"s{subject[row]}" for row in range(len(subject))}
    is_genuine = subject[enrol] == subject[test]
    pairs = TemplatePairs(ids[enrol], ids[test], is_genuine, SOURCE, subject_of)
    return Templates(ids, vectors), pairs


QUICK = EvaluationOptions(fars=(0.1, 0.01), num_replicates=25, num_hardest=3)


def test_verification_of_templates() -> None:
    templates, pairs = make_templates()
    result = evaluate_templates(templates, pairs, QUICK)
    place = {int(each): row for row, each in enumerate(templates.ids)}
    scores = np.array(
        [
            templates.vectors[place[int(a)]] @ templates.vectors[place[int(b)]]
            for a, b in zip(pairs.enrol, pairs.test, strict=True)
        ]
    )
    for point in result.metrics.tar:
        genuine, impostor = scores[pairs.is_genuine], scores[~pairs.is_genuine]
        assert point.tar == tar_at_far(genuine, impostor, point.far_target).tar
    assert result.hardest is not None
    worst = np.flatnonzero(~pairs.is_genuine)[np.argmax(scores[~pairs.is_genuine])]
    first = result.hardest.false_accepts[0]
    assert (first.enrol, first.test) == (str(pairs.enrol[worst]), str(pairs.test[worst]))
    assert result.protocol.num_subjects == 12
    assert result.protocol.interval.note == "subjects are those of the release"


@pytest.mark.parametrize("rule", ["conservative", "nearest"])
def test_two_threads_find_what_one_finds(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(QUICK, rule=rule, fars=(0.1, 0.01, 1e-6))
    found = evaluate_templates(*make_templates(), options)
    monkeypatch.setattr(module, "evaluate_large", evaluate_scores)
    expected = evaluate_templates(*make_templates(), options)
    assert replace(found, created="") == replace(expected, created="")
    assert found.replicates is not None
    assert found.metrics.eer.interval is not None


def test_subjects_are_found_from_genuine_pairs() -> None:
    """The same draws as with known subjects, up to their names: the same number of them."""
    templates, pairs = make_templates()
    result = evaluate_templates(templates, replace(pairs, subject_of=None), QUICK)
    assert result.protocol.num_subjects == 12
    assert result.protocol.interval.method == "subject bootstrap"
    assert result.protocol.interval.note == "subjects are templates that genuine pairs link"
    partial = {key: name for key, name in (pairs.subject_of or {}).items() if key != 7}
    partly = evaluate_templates(templates, replace(pairs, subject_of=partial), QUICK)
    assert partly.protocol.interval.note == "subjects are templates that genuine pairs link"


def test_labels_that_contradict_each_other_leave_templates() -> None:
    templates, pairs = make_templates()
    labels = pairs.is_genuine.copy()
    labels[int(np.argmax(labels))] = False  # a and b, though a, c and b, c are genuine
    result = evaluate_templates(templates, replace(pairs, is_genuine=labels), QUICK)
    assert result.protocol.interval.method == "file bootstrap"
    assert "not known" in str(result.protocol.interval.note)


def test_a_pair_without_images_is_named() -> None:
    templates, pairs = make_templates()
    pairs.test[4] = 8
    with pytest.raises(DataError, match="entry 5: template 8 has no images"):
        evaluate_templates(templates, pairs, QUICK)
    pairs.test[4] = 10**9
    with pytest.raises(DataError, match="entry 5: template 1000000000 has no images"):
        evaluate_templates(templates, pairs, QUICK)
