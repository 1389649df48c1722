"""The layout of a release, its images aligned, and lists that are damaged."""

from pathlib import Path

import numpy as np
import pytest

from helpers.faces import PatchModel, Release, write_release
from qmargin.data.images import decode_image
from qmargin.errors import CorruptSample, DataError
from qmargin.evaluation.embed import embed_images
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.ijb_release import (
    read_ijb,
    read_inside,
    read_template_list,
    write_template_pictures,
)
from qmargin.evaluation.protocols.templates import evaluate_templates, pool_templates

QUICK = EvaluationOptions(fars=(0.1,), num_replicates=0, num_hardest=2)


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return write_release(tmp_path / "IJBC")


def test_lists_are_read_row_by_row(release: Release) -> None:
    found = read_ijb(release.folder)
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


def test_images_are_aligned_by_their_landmarks(release: Release) -> None:
    images = read_ijb(release.folder).images()
    for row in (0, 3):
        difference = images[row][0].astype(int) - release.faces[row]
        assert np.abs(difference[1:-1, 1:-1]).max() <= 1  # rounded landmarks


def test_from_images_to_a_result_with_pictures(release: Release, tmp_path: Path) -> None:
    found = read_ijb(release.folder)
    embeddings = embed_images(PatchModel(), found.images(), flip="sum")
    templates = pool_templates(embeddings, found.rows)
    result = evaluate_templates(templates, found.pairs(), QUICK)
    assert result.metrics.eer.value < 0.2
    assert result.hardest is not None
    number = write_template_pictures(tmp_path / "p", found, result.hardest)
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
    assert write_template_pictures(tmp_path / "q", found, result.hardest) == 0


def test_one_file_in_two_templates_has_two_keys(release: Release) -> None:
    for name in ("face_tid_mid", "name_5pts_score"):
        path = release.folder / "meta" / f"ijbc_{name}.txt"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, lines[0]]))
    keys = read_ijb(release.folder).keys
    assert len(set(keys)) == len(release.faces) + 1
    assert keys[0] == "0:0.png"


def edit(release: Release, name: str, old: str, new: str) -> Path:
    path = release.folder / "meta" / f"ijbc_{name}"
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    return path


def test_damaged_lists_are_named(release: Release) -> None:
    edit(release, "face_tid_mid.txt", "1.png", "7.png")
    with pytest.raises(DataError, match=r"row 2 of .*not the same image"):
        read_ijb(release.folder)
    edit(release, "face_tid_mid.txt", "7.png", "1.png")
    edit(release, "name_5pts_score.txt", "2.png ", "2.png nan ")
    with pytest.raises(DataError, match=r"line 3: .* is not a name and 11 numbers"):
        read_ijb(release.folder)
    edit(release, "name_5pts_score.txt", "2.png nan 47.2946", "2.png nan")
    with pytest.raises(DataError, match=r"line 3: a number of '2.png' is not finite"):
        read_ijb(release.folder)
    edit(release, "name_5pts_score.txt", "2.png nan ", "2.png x ")
    with pytest.raises(DataError, match=r"line 3: .*could not convert"):
        read_ijb(release.folder)
    (release.folder / "meta" / "ijbc_name_5pts_score.txt").unlink()
    with pytest.raises(DataError, match=r"there is no .*ijbc_name_5pts_score.txt"):
        read_ijb(release.folder)


def test_a_short_list_is_not_taken_for_a_whole_one(release: Release) -> None:
    path = release.folder / "meta" / "ijbc_name_5pts_score.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(DataError, match=f"row {len(lines)} of "):
        read_ijb(release.folder)
    edit(release, "face_tid_mid.txt", "0.png 100 ", "0.png 100.5 ")
    path.write_text("".join(lines))
    with pytest.raises(DataError, match="row 1: template and medium have to be whole"):
        read_ijb(release.folder)


def test_labels_and_missing_lists(release: Release, tmp_path: Path) -> None:
    found = read_ijb(release.folder)
    edit(release, "template_pair_label.txt", "100 200 1", "100 200 2")
    with pytest.raises(DataError, match="pair 1: the label is 2, not 0 or 1"):
        found.pairs()
    for path in (release.folder / "meta").glob("*_1N_*.csv"):
        path.unlink()
    edit(release, "template_pair_label.txt", "100 200 2", "100 200 1")
    assert found.pairs().subject_of is None
    with pytest.raises(DataError, match="has no ijbc_1N_gallery"):
        found.galleries()
    with pytest.raises(DataError, match=r"there is no .*probe_mixed"):
        found.probes()
    with pytest.raises(DataError, match="has 0 lists"):
        read_ijb(tmp_path)


def test_template_lists_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "ijbc_1N_gallery_G1.csv"
    path.write_text("TEMPLATE_ID,SUBJECT_ID\n1,a\n1,b\n")
    with pytest.raises(DataError, match="line 3: template 1 is of subject 'b', but was of 'a'"):
        read_template_list(path)
    path.write_text("TEMPLATE_ID,SUBJECT_ID\n1\n")
    with pytest.raises(DataError, match="line 2: '1' does not begin"):
        read_template_list(path)
    path.write_bytes(b"TEMPLATE_ID,SUBJECT_ID\n1,a\rb\n")
    with pytest.raises(DataError, match="line 2 is no CSV"):
        read_template_list(path)
    path.write_text("TEMPLATE_ID,SUBJECT_ID\n")
    with pytest.raises(DataError, match="has no templates"):
        read_template_list(path)


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")
    with pytest.raises(CorruptSample, match="is outside of"):
        read_inside(tmp_path / "in", "../secret")
    with pytest.raises(CorruptSample, match="cannot be read: No such file"):
        read_inside(tmp_path / "in", "absent.jpg")
