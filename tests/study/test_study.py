"""A small study from the command line to its page; interrupted parts are not done again."""

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qmargin.cli.main import main
from qmargin.data.drawings import Drawings, variants_of
from qmargin.data.strokes import StrokeIdentities
from qmargin.demo.recipe import SHIFT, Size, demo_recipe
from qmargin.demo.stored import Stored, read_stored
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.study import studies
from qmargin.study.page import study_page
from qmargin.study.pictures import PictureMaterial, draw_to, first_samples, held_out, identities
from qmargin.study.run import StudyOptions, run_study
from qmargin.study.studies import SYSTEMS, Study, find_study
from qmargin.training.recipe import PrecisionPart
from qmargin.training.signals import SIGNALS, Interrupted, StopRequest

TINY = Size(
    num_classes=12,
    samples_per_class=8,
    epochs=2,
    batch_size=32,
    width=4,
    depth=0,
    embedding_dim=16,
    num_test=110,
    samples_test=4,
)
GRIDS = {
    key: ((SYSTEMS[key].alpha, SYSTEMS[key].scale, m) for m in (0.1, 0.2))
    for key in ("arcface", "q_margin")
}
TINY_GRID = {key: tuple(grid) for key, grid in GRIDS.items()}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Study:
    study = Study(
        "tiny",
        "tiny strokes",
        "strokes",
        TINY,
        search_epochs=1,
        grid=TINY_GRID,
        measure="tar@0.001",
        finalists=1,
        num_views=2,
        dtype="bf16",
    )
    monkeypatch.setitem(studies.STUDIES, "tiny", study)
    monkeypatch.setattr("qmargin.study.pictures.VALIDATION_IDS", 110)
    monkeypatch.setattr("qmargin.study.pictures.VALIDATION_SAMPLES", 4)
    return study


@pytest.mark.slow
def test_a_study_from_end_to_end(
    tiny: Study,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, page = tmp_path / "study", tmp_path / "page.md"
    losses = ["--losses", "arcface", "q_margin", "sampled"]
    command = ["study", "tiny", "--out", str(out), "--seeds", "2", *losses, "--page", str(page)]
    assert main([*command, "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    assert "4 trainings, 0 of them there already" in first
    assert "2 trainings, 0 of them there already" in first  # the best of each for longer
    assert "6 trainings, 0 of them there already" in first
    chosen = json.loads((out / "chosen.json").read_text())
    assert chosen["sampled"] == chosen["arcface"]
    text = page.read_text()
    assert "pairs; a score is the mean over 2 quarter turns of both samples" in text
    assert re.search(r"Q-Margin \*\*(ties with|is ahead of|is behind)\*\* ", text)
    assert text.count("chosen") >= 2
    assert (out / "report" / "index.html").exists()
    plain, _, normalised = text.partition("## With scores normalised by the prototypes")
    assert normalised.count("Q-Margin **") == plain.count("Q-Margin **") > 0
    for folder in (out / "final").iterdir():
        found = [read_result(folder / name) for name in ("evaluation.json", "normalised.json")]
        assert found[1].protocol.name.endswith("scores normalised by prototypes")
        assert found[1].protocol.num_trials == found[0].protocol.num_trials
        assert found[1].metrics != found[0].metrics
    assert main([*command, "--device", "cpu"]) == 0
    assert "6 trainings, 6 of them there already" in capsys.readouterr().out
    (out / "final" / "q_margin-0" / "normalised.json").unlink()  # as in a folder of before
    assert main([*command, "--device", "cpu"]) == 0
    assert page.read_text() == text
    capsys.readouterr()
    assert text.count("| Q-Margin minus |") == 2
    for folder in [*(out / "final").glob("arcface-*"), *(out / "final").glob("sampled-*")]:
        shutil.rmtree(folder)
    alone = study_page(tiny, out, command="qmargin", machine="here")
    assert "Q-Margin minus" not in alone  # nobody to be compared with
    assert "| Q-Margin | 2 |" in alone
    monkeypatch.setitem(studies.STUDIES, "tiny", replace(tiny, search_epochs=2))
    assert main([*command, "--device", "cpu"]) == 2
    assert "is of another recipe" in capsys.readouterr().err  # by which settings were chosen


def test_pictures_that_were_drawn_are_those_of_the_identities(tmp_path: Path) -> None:
    study = Study("tiny", "tiny strokes", "strokes", TINY, search_epochs=1)
    data = PictureMaterial(study, None, tmp_path, is_search=False)
    data.prepare([5])
    train = data._drawn(5)
    drawn = StrokeIdentities(12, 8, seed=5).images(np.arange(96))
    assert np.array_equal(train._stored(), drawn)
    image, label = train.read(95, seed=3)
    assert label == 11
    assert image.shape == (1, 32, 32)


def test_warps_are_drawn_once_and_shared(tmp_path: Path) -> None:
    file, folder = tmp_path / "pictures.npz", tmp_path / "data"
    labels = np.repeat(np.arange(6), 3)
    images = StrokeIdentities(6, 3).images(np.arange(18))
    np.savez(file, images=images, label=labels, split=labels >= 4)
    study = Study("p", "pictures", "pictures", TINY, search_epochs=1, has_turns=True, warp=1.0)
    final = PictureMaterial(study, file, folder, is_search=False)
    final.prepare([])  # no training waits for them
    assert not list(folder.glob("*.npy"))
    final.prepare([0])
    (drawn,) = folder.glob("*.npy")
    written = drawn.stat().st_mtime_ns
    final.prepare([1])
    assert [path.stat().st_mtime_ns for path in folder.glob("*.npy")] == [written]
    train = _trained_on(final)
    assert isinstance(train.variants, np.memmap)
    assert train.shift == SHIFT
    turned = final._divided()[0].pictures
    assert len(turned) == 4 * 12
    assert np.array_equal(train.variants, variants_of(turned, 1.0, TINY.epochs))
    longer = replace(study, size=TINY._replace(epochs=3))
    more = PictureMaterial(longer, file, folder, is_search=False)
    assert more._warps(train) != drawn
    np.savez(file, images=images[::-1], label=labels, split=labels >= 4)
    assert final._warps(final._divided()[0]) != drawn
    with pytest.raises(DataError, match="has other pictures than the trainings in"):
        final.prepare([0])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_pictures_are_drawn_leaves_none(tmp_path: Path, number: int) -> None:
    with StopRequest() as request:
        os.kill(os.getpid(), number)
        blocks = [partial(np.zeros, (1, 2, 2), np.uint8)] * 2
        with pytest.raises(Interrupted):
            draw_to(tmp_path / "drawn.npy", (2, 2, 2), blocks, request=request)
    assert not list(tmp_path.iterdir())


def test_a_study_without_its_device_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        run_study(StudyOptions(find_study("strokes-10k"), tmp_path / "out", device="cuda"))
    assert not (tmp_path / "out").exists()


def test_folders_of_pictures_are_read_and_too_few_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for part in ("train", "test"):
        for label in range(3):
            (data / part / f"{label}").mkdir(parents=True)
            for sample in range(2):
                Image.new("L", (32, 32)).save(data / part / f"{label}" / f"{sample}.png")
    study = Study("p", "pictures", "pictures", TINY, search_epochs=1)
    material = PictureMaterial(study, data, tmp_path / "out" / "data", is_search=False)
    with pytest.raises(DataError, match="has 6 pictures to train on and a step of p takes 32"):
        material.prepare([0])


def _trained_on(material: PictureMaterial) -> Drawings:
    recipe = material.study.recipe(SYSTEMS["arcface"], seed=0, epochs=TINY.epochs, path="x")
    train = material(recipe).train
    assert isinstance(train, Drawings)
    return train


def test_studies_of_gpu_size_train_in_bf16_and_the_demo_as_the_demo() -> None:
    loss = SYSTEMS["arcface"]
    for name in ("omniglot", "strokes-10k", "strokes-1m"):
        study = studies.find_study(name)
        path = "x" if study.kind == "pictures" else None
        made = study.recipe(loss, seed=0, epochs=2, path=path)
        assert made.precision == PrecisionPart("bf16", channels_last=True)
        normed = (
            made.model.backbone == "stroke_resnet" or made.model.options.get("batch_norm") is True
        )
        assert normed
    demo = studies.find_study("demo")
    made = demo.recipe(loss, seed=0, epochs=2, path=None)
    assert made.precision == demo_recipe(loss, seed=0, size=demo.size).precision
    assert "batch_norm" not in made.model.options


def test_omniglot_has_the_classes_that_its_study_says(tmp_path: Path) -> None:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("QMARGIN_DATA", beside)) / "omniglot32"
    if not folder.exists():
        pytest.skip(f"no Omniglot in {folder}")
    study = studies.find_study("omniglot")
    train, test = PictureMaterial(study, folder, tmp_path, is_search=False)._divided()
    assert train.num_classes == study.size.num_classes == len(set(train.labels.tolist()))
    assert test.num_classes == study.size.num_test
    assert len(test) == study.size.num_test * study.size.samples_test


def test_pictures_without_test_identities_are_refused(tmp_path: Path) -> None:
    images = np.zeros((6, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", images=images, label=np.arange(6))
    study = Study("p", "pictures", "pictures", TINY, search_epochs=1)
    with pytest.raises(DataError, match="6 identities to train and 0 to test"):
        PictureMaterial(study, tmp_path, tmp_path, is_search=True).prepare([0])


def test_identities_of_a_path_are_divided_as_it_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 3)
    split = (labels >= 14).astype(np.int64)
    images = rng.integers(0, 255, (60, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", images=images, label=labels, split=split)
    study = Study("p", "pictures", "pictures", TINY, search_epochs=1, has_turns=True)
    final = PictureMaterial(study, tmp_path, tmp_path, is_search=False)
    train, test = final._divided()
    assert (train.num_classes, test.num_classes) == (4 * 14, 6)
    searched, held_out = PictureMaterial(study, tmp_path, tmp_path, is_search=True)._divided()
    assert (searched.num_classes, held_out.num_classes) == (4 * 11, 3)
    seen = {picture.tobytes() for picture in searched.pictures}
    assert not seen & {picture.tobytes() for picture in held_out.pictures}
    assert not {picture.tobytes() for picture in train.pictures} & {
        picture.tobytes() for picture in test.pictures
    }


def test_whole_alphabets_are_held_out(tmp_path: Path) -> None:
    labels, groups = np.repeat(np.arange(30), 2), np.arange(30) // 3
    images = StrokeIdentities(30, 2).images(np.arange(60))
    pack = {"images": images, "label": labels, "split": labels >= 24}
    np.savez(tmp_path / "pictures.npz", **pack, alphabet=groups.astype(np.uint8))
    study = Study("p", "pictures", "pictures", TINY, search_epochs=1)
    material = PictureMaterial(study, tmp_path, tmp_path, is_search=True)
    train, measured = material._divided()
    assert (train.num_classes, measured.num_classes) == (18, 6)  # at least a fifth of 24
    for folder in (tmp_path / "train", tmp_path / "test"):
        for label in np.unique(labels[pack["split"] == (folder.name == "test")]):
            path = folder / f"Alphabet_{groups[label]}-character{label:02d}"
            path.mkdir(parents=True)
            for row in np.flatnonzero(labels == label):
                Image.fromarray(images[row]).save(path / f"{row}.png")
    (tmp_path / "pictures.npz").unlink()
    stored = read_stored(tmp_path, tmp_path.parent / "index")
    assert stored.groups is not None
    assert stored.groups.tolist() == groups.tolist()
    read, other = (part.pictures for part in material._divided())
    assert {picture.tobytes() for picture in other} == {
        picture.tobytes() for picture in measured.pictures
    }
    assert len(read) == len(train)
    (tmp_path / "test" / "Alphabet_9-character29").rename(tmp_path / "test" / "someone")
    assert read_stored(tmp_path, tmp_path.parent / "other").groups is None


def test_groups_are_not_divided() -> None:
    groups = np.array([0, 0, 1, 1, 2, 2, 2, 3, 4, 4])
    kept, held = held_out(range(10), groups)
    assert sorted(kept + held) == list(range(10))
    assert not {int(groups[label]) for label in kept} & {int(groups[label]) for label in held}
    assert 2 <= len(held) <= 4
    assert held_out(range(10), None) == ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9])
    with pytest.raises(DataError, match="10 identities to train on are of one group"):
        held_out(range(10), np.zeros(10, np.int64))


def test_alphabets_are_given_for_every_label(tmp_path: Path) -> None:
    images = np.zeros((6, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "p.npz", images=images, label=np.arange(6), alphabet=np.zeros(5))
    with pytest.raises(DataError, match=r"shape \[5\], and labels from 0 to 5"):
        read_stored(tmp_path / "p.npz", tmp_path / "index")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Path("x")}, "makes its own data"),
        ({"losses": ("sampled",)}, "add arcface"),
        ({"losses": ("arcfase",)}, "arcface"),
        ({"losses": ("arcface", "arcface")}, "each one once"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_bad_options_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    study = studies.find_study("strokes-10k")
    with pytest.raises(ConfigError, match=message):
        StudyOptions(study, tmp_path, **changes)


def test_every_loss_of_a_grid_has_the_same_number_of_settings() -> None:
    for study in studies.STUDIES.values():
        assert len({len(set(settings)) for settings in study.grid.values()}) == 1
        assert set(study.grid) == set(SYSTEMS) - {"sampled"}
        assert set(study.losses) - {"sampled"} == set(study.grid)


def test_the_help_names_every_study_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    words = capsys.readouterr().out.split()
    assert {*studies.STUDIES, *SYSTEMS} <= set(words)


def test_first_samples_of_each_identity() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    names = tuple("abcdef")
    drawings = Drawings(np.zeros((6, 32, 32), np.uint8), labels, names, "x")
    kept = first_samples(drawings, 2)
    assert kept.names == ("a", "b", "d", "e", "f")
    assert kept.labels.tolist() == [0, 0, 1, 2, 2]


def test_labels_are_ordered_without_regard_to_their_numbers() -> None:
    labels = np.arange(50)
    stored = Stored(np.zeros((50, 32, 32), np.uint8), labels, tuple("x" * 50), None, "x", True)
    train, test = identities(stored)
    assert sorted(train) == list(range(50)) != train
    assert test == []
