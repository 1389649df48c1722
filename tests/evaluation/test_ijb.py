"""Templates against the definition, whatever the blocks; pairs, subjects and hardest pairs."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.faces import embedded, write_release
from qmargin.data.images import decode_image
from qmargin.errors import DataError, ProtocolError, ShapeError
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols import ijb
from qmargin.evaluation.result import Source
from qmargin.metrics.operating import tar_at_far

SOURCE = Source("pairs.txt", "0" * 64, "trials")
ALL = [ijb.Pooling(norms, detector) for norms in (True, False) for detector in (True, False)]


def make_rows(number=400, seed=0):
    rng = np.random.default_rng(seed)
    template = rng.choice([3, 5, 8, 13, 10**12], number)
    template[:250] = 8  # one long video
    rows = ijb.TemplateRows(template, rng.integers(-4, 4, number), rng.uniform(0.0, 1.0, number))
    return rng.normal(1.0, 3.0, (number, 6)).astype(np.float32), rows


def plain_template(embeddings, rows, template, pooling):
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
                frame = frame * rows.detector[row]
            frames.append(frame)
        total += np.mean(frames, axis=0)
    return total / np.linalg.norm(total)


@pytest.mark.parametrize("pooling", ALL, ids=str)
def test_pooling_follows_the_definition(pooling):
    embeddings, rows = make_rows()
    found = ijb.pool_templates(embeddings, rows, pooling)
    assert found.ids.tolist() == [3, 5, 8, 13, 10**12]
    expected = [plain_template(embeddings, rows, each, pooling) for each in found.ids.tolist()]
    np.testing.assert_allclose(found.vectors, expected, rtol=0, atol=1e-14)
    others = [ijb.pool_templates(embeddings, rows, each).vectors for each in ALL if each != pooling]
    assert min(np.abs(found.vectors - other).max() for other in others) > 1e-3


@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_and_order_do_not_matter(block, monkeypatch):
    embeddings, rows = make_rows()
    whole = ijb.pool_templates(embeddings, rows)
    monkeypatch.setattr(ijb, "_ROWS", block)
    calls = []
    parts = ijb.pool_templates(embeddings, rows, progress=lambda *done: calls.append(done))
    np.testing.assert_allclose(parts.vectors, whole.vectors, rtol=0, atol=1e-15)
    assert calls[-1] == (400, 400)
    order = np.random.default_rng(1).permutation(400)
    mixed = ijb.TemplateRows(rows.template[order], rows.media[order], rows.detector[order])
    again = ijb.pool_templates(embeddings[order], mixed)
    np.testing.assert_allclose(again.vectors, whole.vectors, rtol=0, atol=1e-14)


def test_what_cannot_be_pooled():
    embeddings, rows = make_rows()
    with pytest.raises(ShapeError, match="400 images"):
        ijb.pool_templates(embeddings[:-1], rows)
    with pytest.raises(ShapeError, match="media has the shape"):
        ijb.TemplateRows(np.zeros(3, np.int64), np.zeros(2, np.int64))
    for bad in (np.nan, -0.1, np.inf):
        with pytest.raises(DataError, match="score of image 1 is"):
            ijb.TemplateRows(np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([1.0, bad]))
    two = ijb.TemplateRows(np.array([4, 4]), np.array([0, 1]), np.array([1.0, 1.0]))
    with pytest.raises(DataError, match="template 4 has length zero"):
        ijb.pool_templates(np.array([[1.0, 2.0], [-1.0, -2.0]]), two)
    with pytest.raises(DataError, match="image 1 is zero"):
        ijb.pool_templates(np.array([[1.0, 2.0], [0.0, 0.0]]), two, ijb.Pooling(keep_norms=False))
    with pytest.raises(DataError, match="template 4 is not finite"):
        ijb.pool_templates(np.array([[1.0, np.inf], [0.0, 0.0]]), two)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_scores_do_not_depend_on_blocks(block, monkeypatch):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(20, 33))
    enrol, test = rng.integers(0, 20, (2, 500))
    whole = ijb.pair_scores(vectors, enrol, test)
    expected = [float(vectors[a] @ vectors[b]) for a, b in zip(enrol, test, strict=True)]
    np.testing.assert_allclose(whole, expected, rtol=1e-13)
    monkeypatch.setattr(ijb, "_PAIRS", block)
    monkeypatch.setattr(ijb, "_PAIRS_BETWEEN_REPORTS", 2 * block)
    calls = []
    found = ijb.pair_scores(vectors, enrol, test, progress=lambda *done: calls.append(done))
    assert found.tobytes() == whole.tobytes()
    assert calls[-1] == (500, 500)


def make_templates(num_subjects=12, each=4):
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(num_subjects), each)
    vectors = rng.normal(size=(num_subjects, 16))[subject] + rng.normal(size=(len(subject), 16))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = 10 * np.arange(len(subject)) + 7
    enrol, test = np.triu_indices(len(subject), 1)
    subject_of = {int(ids[row]): f"s{subject[row]}" for row in range(len(subject))}
    is_genuine = subject[enrol] == subject[test]
    pairs = ijb.TemplatePairs(ids[enrol], ids[test], is_genuine, SOURCE, subject_of)
    return ijb.Templates(ids, vectors), pairs


QUICK = EvaluationOptions(fars=(0.1, 0.01), num_replicates=25, num_hardest=3)


def test_verification_of_templates():
    templates, pairs = make_templates()
    result = ijb.evaluate_templates(templates, pairs, QUICK)
    place = {int(each): row for row, each in enumerate(templates.ids)}
    scores = np.array(
        [
            templates.vectors[place[int(a)]] @ templates.vectors[place[int(b)]]
            for a, b in zip(pairs.enrol, pairs.test, strict=True)
        ]
    )
    for point in result.measures.tar:
        genuine, impostor = scores[pairs.is_genuine], scores[~pairs.is_genuine]
        assert point.tar == tar_at_far(genuine, impostor, point.far_target).tar
    worst = np.flatnonzero(~pairs.is_genuine)[np.argmax(scores[~pairs.is_genuine])]
    first = result.hardest.false_accepts[0]
    assert (first.enrol, first.test) == (str(pairs.enrol[worst]), str(pairs.test[worst]))
    assert result.protocol.num_subjects == 12
    assert result.protocol.interval.note == "subjects are those of the release"


@pytest.mark.parametrize("rule", ["conservative", "nearest"])
def test_two_threads_find_what_one_finds(rule, monkeypatch):
    options = replace(QUICK, rule=rule, fars=(0.1, 0.01, 1e-6))
    found = ijb.evaluate_templates(*make_templates(), options)
    monkeypatch.setattr("qmargin.evaluation.evaluate.MANY_TRIALS", 1)
    expected = ijb.evaluate_templates(*make_templates(), options)
    assert replace(found, created="") == replace(expected, created="")
    assert found.replicates is not None
    assert found.measures.eer.interval is not None


def test_subjects_are_found_from_genuine_pairs():
    """The same draws as with known subjects, up to their names: the same number of them."""
    templates, pairs = make_templates()
    result = ijb.evaluate_templates(templates, replace(pairs, subject_of=None), QUICK)
    assert result.protocol.num_subjects == 12
    assert result.protocol.interval.method == "subject bootstrap"
    assert result.protocol.interval.note == "subjects are templates linked by genuine pairs"
    partial = {key: name for key, name in (pairs.subject_of or {}).items() if key != 7}
    partly = ijb.evaluate_templates(templates, replace(pairs, subject_of=partial), QUICK)
    assert partly.protocol.interval.note == "subjects are templates linked by genuine pairs"


def test_labels_that_contradict_each_other_leave_templates():
    templates, pairs = make_templates()
    labels = pairs.is_genuine.copy()
    labels[int(np.argmax(labels))] = False  # a and b, though a, c and b, c are genuine
    result = ijb.evaluate_templates(templates, replace(pairs, is_genuine=labels), QUICK)
    assert result.protocol.interval.method == "file bootstrap"
    assert "not known" in str(result.protocol.interval.note)


@pytest.mark.parametrize("template", [8, 10**9])
def test_a_pair_without_images_is_named(template):
    templates, pairs = make_templates()
    pairs.test[4] = template
    with pytest.raises(DataError, match=f"entry 5: template {template} has no images"):
        ijb.evaluate_templates(templates, pairs, QUICK)


@pytest.fixture
def release(tmp_path):
    return write_release(tmp_path / "IJBC")


def test_lists_are_read_row_by_row(release):
    found = ijb.read_ijb(release.folder)
    assert found.name == "IJBC"
    assert len(found) == len(release.faces)
    np.testing.assert_array_equal(found.rows.template, release.template)
    np.testing.assert_array_equal(found.rows.media, release.media)
    np.testing.assert_array_equal(found.rows.detector, release.detector)
    pairs = found.pairs()
    rows = zip(pairs.enrol.tolist(), pairs.test.tolist(), pairs.is_genuine.tolist(), strict=True)
    assert [(a, b, int(label)) for a, b, label in rows] == release.pairs
    assert pairs.subject_of == {key: str(name) for key, name in release.subject_of.items()}
    galleries = found.galleries()
    assert [gallery.name for gallery in galleries] == ["G1", "G2"]
    assert galleries[0].template.tolist() == [100, 102, 104, 106]
    assert galleries[0].subject.tolist() == ["0", "2", "4", "6"]
    assert len(found.probes()) == 24
    assert found.keys == tuple(f"{row}.png" for row in range(len(release.faces)))


def test_images_are_aligned_by_their_landmarks(release):
    images = ijb.read_ijb(release.folder).images()
    for row in (0, 3):
        difference = images[row][0].astype(int) - release.faces[row]
        assert np.abs(difference[1:-1, 1:-1]).max() <= 1  # rounded landmarks


def test_from_images_to_a_result_with_pictures(release, tmp_path):
    found = ijb.read_ijb(release.folder)
    embeddings = embedded(found.images(), flip="sum")
    templates = ijb.pool_templates(embeddings, found.rows)
    result = ijb.evaluate_templates(templates, found.pairs(), QUICK)
    assert result.measures.eer.value < 0.2
    number = ijb.write_template_pictures(tmp_path / "p", found, result.hardest)
    trials = (*result.hardest.false_accepts, *result.hardest.false_rejects)
    wanted = {key for trial in trials for key in (trial.enrol, trial.test)}
    assert {path.stem for path in (tmp_path / "p").iterdir()} == wanted
    assert number == len(wanted)
    key = result.hardest.false_accepts[0].enrol
    picture = decode_image((tmp_path / "p" / f"{key}.jpg").read_bytes())
    assert picture.shape == (112, 112, 3)
    rows = np.flatnonzero(release.template == int(key))
    best = rows[np.argmax(release.detector[rows])]
    assert np.abs(picture.astype(int) - release.faces[best]).mean() < 12  # JPEG
    for path in (release.folder / "loose_crop").iterdir():
        path.write_bytes(b"")
    assert ijb.write_template_pictures(tmp_path / "q", found, result.hardest) == 0


def test_one_file_in_two_templates_has_two_keys(release):
    for name in ("face_tid_mid", "name_5pts_score"):
        path = release.folder / "meta" / f"ijbc_{name}.txt"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, lines[0]]))
    keys = ijb.read_ijb(release.folder).keys
    assert len(set(keys)) == len(release.faces) + 1
    assert keys[0] == "0:0.png"


def edit(release, name, old, new):
    path = release.folder / "meta" / f"ijbc_{name}"
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("face_tid_mid.txt", "1.png", "7.png", r"row 2 of .*not the same image"),
        ("name_5pts_score.txt", "2.png ", "2.png nan ", r"line 3: .* is not a name and 11 numbers"),
        ("name_5pts_score.txt", "2.png 47.2946", "2.png nan", r"line 3: .*'2.png' is not finite"),
        ("name_5pts_score.txt", "2.png ", "2.png x ", r"line 3: .*could not convert"),
        ("face_tid_mid.txt", "0.png 100 ", "0.png 100.5 ", "row 1: .* whole numbers"),
        ("template_pair_label.txt", "100 200 1", "100 200 2", "pair 1: the label is 2"),
    ],
)
def test_damaged_lists_are_named(release, name, old, new, message):
    edit(release, name, old, new)
    with pytest.raises(DataError, match=message):
        ijb.read_ijb(release.folder).pairs()


def test_short_and_missing_lists(release, tmp_path):
    found, meta = ijb.read_ijb(release.folder), release.folder / "meta"
    for path in meta.glob("*_1N_*.csv"):
        path.unlink()
    assert found.pairs().subject_of is None
    with pytest.raises(DataError, match="has no ijbc_1N_gallery"):
        found.galleries()
    with pytest.raises(DataError, match=r"there is no .*probe_mixed"):
        found.probes()
    with pytest.raises(DataError, match="has 0 lists"):
        ijb.read_ijb(tmp_path)
    lines = (meta / "ijbc_name_5pts_score.txt").read_text().splitlines(keepends=True)
    (meta / "ijbc_name_5pts_score.txt").write_text("".join(lines[:-1]))
    with pytest.raises(DataError, match=f"row {len(lines)} of "):
        ijb.read_ijb(release.folder)
    (meta / "ijbc_name_5pts_score.txt").unlink()
    with pytest.raises(DataError, match=r"there is no .*ijbc_name_5pts_score.txt"):
        ijb.read_ijb(release.folder)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b"1,a\n1,b\n", "line 3: template 1 is of subject 'b', but was of 'a'"),
        (b"1\n", "line 2: '1'"),
        (b"1,a\rb\n", "line 2 is not CSV"),
        (b"", "has no templates"),
    ],
)
def test_template_lists_that_cannot_be_read(tmp_path, rows, message):
    path = tmp_path / "ijbc_1N_gallery_G1.csv"
    path.write_bytes(b"TEMPLATE_ID,SUBJECT_ID\n" + rows)
    with pytest.raises(DataError, match=message):
        ijb.read_template_list(path)


OPTIONS = EvaluationOptions(fars=(0.1, 0.2), num_replicates=20, num_hardest=5, protocol="ijbc")


def make_search(seed=0):
    """20 subjects; 12 are in the gallery, three of them twice."""
    rng = np.random.default_rng(seed)
    subject = np.concatenate([np.arange(12), [0, 1, 2], np.repeat(np.arange(20), 3)])
    vectors = rng.normal(size=(20, 8))[subject] + 0.9 * rng.normal(size=(len(subject), 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = 5 + 3 * np.arange(len(subject))
    names = np.array([f"s{each:02d}" for each in subject])
    gallery = ijb.TemplateList("G1", ids[:15], names[:15], Source("g.csv", "1" * 64, "trials"))
    probes = ijb.TemplateList("mixed", ids[15:], names[15:], Source("p.csv", "2" * 64, "trials"))
    return ijb.Templates(ids, vectors), probes, gallery


@pytest.mark.parametrize("block", [4, 1024])
def test_rates_follow_the_loop(block, monkeypatch):
    monkeypatch.setattr(ijb, "_PROBES", block)
    templates, probes, gallery = make_search()
    found = ijb.evaluate_identification(templates, probes, gallery, OPTIONS)
    vector = dict(zip(templates.ids.tolist(), templates.vectors, strict=True))
    mates, others, first_ranks = [], [], []
    for probe, subject in zip(probes.template.tolist(), probes.subject.tolist(), strict=True):
        best: dict[str, float] = {}
        for entry, name in zip(gallery.template.tolist(), gallery.subject.tolist(), strict=True):
            best[name] = max(best.get(name, -2.0), float(vector[probe] @ vector[entry]))
        if subject in best:
            mates.append(best[subject])
            first_ranks.append(sum(score >= best[subject] for score in best.values()))
        else:
            others.append(max(best.values()))
    named = {name: measure.value for name, measure in found.measures.extra.items()}
    assert set(named) == {"rank-1 rate in G1", "rank-5 rate in G1", "rank-10 rate in G1"}
    for rank in (1, 5, 10):
        assert named[f"rank-{rank} rate in G1"] == np.mean(np.array(first_ranks) <= rank)
    assert (found.protocol.num_genuine, found.protocol.num_impostors) == (36, 24)
    for point in found.measures.tar:
        allowed = int(np.floor(point.far_target * 24 + 1e-9))
        limit = sorted(others, reverse=True)[allowed]
        assert point.tar == pytest.approx(np.mean(np.array(mates) > limit))
        assert point.false_accepts == allowed
    assert found.hardest.false_accepts[0].score == pytest.approx(max(others))
    assert found.hardest.false_rejects[0].score == pytest.approx(min(mates))
    assert found.protocol.name == "ijbc, 1:N in G1 (TAR is TPIR, FAR is FPIR)"


def test_searches_are_the_same_for_two_systems():
    _, probes, gallery = make_search(0)
    first = ijb.evaluate_identification(make_search(0)[0], probes, gallery, OPTIONS)
    second = ijb.evaluate_identification(make_search(1)[0], probes, gallery, OPTIONS)
    assert first.protocol.data_sha256 == second.protocol.data_sha256
    assert first.hardest != second.hardest
    fewer = ijb.TemplateList("G1", gallery.template[1:], gallery.subject[1:], gallery.source)
    third = ijb.evaluate_identification(make_search(0)[0], probes, fewer, OPTIONS)
    assert third.protocol.data_sha256 != first.protocol.data_sha256


def test_searches_that_all_have_a_mate():
    templates, probes, gallery = make_search()
    known = np.isin(probes.subject, gallery.subject)
    some = ijb.TemplateList("p", probes.template[known], probes.subject[known], probes.source)
    with pytest.raises(ProtocolError, match=r"all 36 searches of p\.csv have a mate"):
        ijb.evaluate_identification(templates, some, gallery, OPTIONS)
    none = ijb.TemplateList("p", probes.template[~known], probes.subject[~known], probes.source)
    with pytest.raises(ProtocolError, match="none of 24"):
        ijb.evaluate_identification(templates, none, gallery, OPTIONS)


def test_very_large_and_small_embeddings_have_a_direction():
    rows = ijb.TemplateRows(np.array([1, 2]), np.array([0, 0]))
    found = ijb.pool_templates(np.array([[3e200, 4e200], [3e-200, 4e-200]]), rows)
    np.testing.assert_allclose(found.vectors, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-15)
