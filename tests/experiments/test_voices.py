"""Synthetic speakers in recipes and experiments, by the pipeline of real recordings."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.experiments import run
from qmargin.data.voices import RATE, VoiceChunks, Voices
from qmargin.errors import QMarginError, ShapeError
from qmargin.evaluation.embed import Recordings, write_embeddings
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.model import load_model
from qmargin.evaluation.protocols.speakers import Scoring, evaluate_speakers, speaker_means
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import CohortNorm
from qmargin.evaluation.trials import read_trials
from qmargin.experiments.experiment import Experiment, TestProtocol, make_arm
from qmargin.experiments.worlds import Made
from qmargin.recipes import get_recipe
from qmargin.training.build import build_dataset
from qmargin.training.loop import train
from qmargin.training.recipe import DataPart, ModelPart, Recipe
from qmargin.training.signals import StopRequest

OPTIONS = {
    "samples_per_class": 4,
    "shortest": 0.5,
    "longest": 0.9,
    "num_frames": 40,
    "simulate_rooms": True,
    "num_rooms": 2,
    "augment": 1.0,
}


def speaker_recipe(num_classes: int = 6, **options: object) -> Recipe:
    recipe = get_recipe("debug")
    return replace(
        recipe,
        data=DataPart("voices", 8, num_classes=num_classes, options={**OPTIONS, **options}),
        model=ModelPart("speaker_resnet18", 16, {"width": 4}),
        run=replace(recipe.run, epochs=2, max_steps=6, save_every_steps=6),
    )


def test_a_network_is_trained_on_augmented_voices_without_decoding(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)  # nothing is a file
    recipe = speaker_recipe(18, speed_perturbation=True)  # six speakers at three speeds
    dataset = build_dataset(recipe)
    assert isinstance(dataset, VoiceChunks)
    assert (len(dataset), dataset.num_classes, dataset.recordings.num_classes) == (24, 18, 6)
    plain = build_dataset(speaker_recipe(augment=0.0, dither=0.0))
    changed = build_dataset(speaker_recipe(dither=0.0))
    assert plain.read(5, 1)[0].shape == changed.read(5, 1)[0].shape == (6640,)
    assert not torch.equal(plain.read(5, 1)[0], changed.read(5, 1)[0])
    outcome = train(recipe, tmp_path / "run", device="cpu")
    assert outcome.checkpoint is not None and outcome.checkpoint.name.endswith("6")


def test_a_chunk_is_part_of_what_a_file_would_have() -> None:
    dataset = build_dataset(speaker_recipe(augment=0.0, dither=0.0, samples_per_class=1))
    assert isinstance(dataset, VoiceChunks)
    spoken = dataset.recordings.waveform(3).astype(np.float32) / 32768
    chunk = dataset.read(3, seed=9)[0].numpy()
    windows = np.lib.stride_tricks.sliding_window_view(spoken, len(chunk))
    assert (np.abs(windows - chunk).max(axis=1) == 0.0).sum() == 1


def test_every_utterance_is_spoken_once(monkeypatch) -> None:
    dataset = build_dataset(speaker_recipe())
    first = dataset.read(7, 3)[0]
    monkeypatch.setattr("qmargin.data.voices.spoken", None)
    assert torch.equal(dataset.read(7, 3)[0], first)
    dataset.read(7, 4)
    with pytest.raises(TypeError):
        dataset.read(8, 3)


def test_speakers_of_the_splits_are_spoken_once_for_all_runs(tmp_path: Path, monkeypatch) -> None:
    world, recipe = Made(3, 2, 4, 3), replace(speaker_recipe(), seed=5)
    assert world.train(recipe, is_search=False) is None
    made = world.prepare(tmp_path, [recipe], is_search=False, request=StopRequest())
    assert len(list(tmp_path.glob("voices-*.npy"))) == 2  # to train, and to test
    expected = build_dataset(recipe).read(9, 2)[0]
    voices = Voices(4, 3, seed=5, split="test", shortest=0.5, longest=0.9)
    whole = voices.waveform(11)
    monkeypatch.setattr("qmargin.data.voices.spoken", None)
    trained = made.train(recipe, is_search=False)
    assert trained is not None and torch.equal(trained.read(9, 2)[0], expected)
    tested = made.measured(recipe, is_search=False)
    assert isinstance(tested, VoiceChunks) and len(tested) == 12
    found = tested.read(11, 0)[0].numpy()
    assert len(whole) < len(found) <= 0.9 * RATE  # all of it, then again from its beginning
    np.testing.assert_array_equal(found[: len(whole)], whole.astype(np.float32) / 32768)
    validated = made.measured(recipe, is_search=True)
    assert isinstance(validated, VoiceChunks) and validated.recordings.split == "validation"
    assert (len(validated), validated.num_samples) == (6, 6640)
    with pytest.raises(ShapeError, match="remove the file"):
        voices.kept_in(next(tmp_path.glob(f"{_file_of(trained)}")))


def _file_of(dataset: VoiceChunks) -> str:
    return Path(dataset.recordings.waveform(0).base.filename).name


def test_losses_are_compared_on_unseen_speakers(tmp_path: Path) -> None:
    arms = {"cosface": make_arm("cosface", {"scale": [8, 16], "margin": 0.2})}
    protocol = TestProtocol(fars=(0.1,), num_replicates=20)
    experiment = Experiment(
        "voices", speaker_recipe(), arms, Made(4, 4, 5, 4), "voices", protocol, seeds=(0,)
    )
    finished, said = run(experiment, tmp_path)
    (result,) = finished.results
    assert (result.protocol.num_genuine, result.protocol.num_impostors) == (5 * 6, 10 * 16)
    assert result.protocol.kind == "all-pairs" and result.measures.tar[0].tar is not None
    assert any("synthetic" in line for line in said)
    assert [row.group for row in result.groups.rows] == ["within a family", "within a population"]
    key = result.hardest.false_accepts[0].enrol
    assert len(list(tmp_path.rglob(f"{key}.wav"))) == 1  # to listen to


def test_trials_and_as_norm_of_a_trained_network(tmp_path: Path) -> None:
    train(speaker_recipe(), tmp_path / "run", device="cpu")
    model = load_model(tmp_path / "run", device="cpu")
    assert model.card.modality == "audio"
    found = {}
    for split, count in (("train", 6), ("test", 4)):
        voices = Voices(count, 3, split=split, shortest=0.5, longest=0.9)
        voices.write(tmp_path)
        names = [f"{voices.sample_id(index)}.wav" for index in range(len(voices))]
        path = tmp_path / f"{split}.safetensors"
        write_embeddings(model, Recordings(tmp_path, names), path, model_id="toy")
        found[split] = read_embeddings(path)
    pairs = itertools.combinations(names, 2)
    lines = [f"{int(a.split('/')[0] == b.split('/')[0])} {a} {b}\n" for a, b in pairs]
    (tmp_path / "trials.txt").write_text("".join(lines))
    trials = read_trials(tmp_path / "trials.txt")
    scoring = Scoring(found["train"], CohortNorm(speaker_means(found["train"]), 4))
    out = tmp_path / "scores.tsv"
    result = evaluate_speakers(found["test"], trials, scoring=scoring, scores=out)
    assert (result.protocol.num_genuine, result.protocol.num_impostors) == (4 * 3, 6 * 9)
    assert result.protocol.scoring == "as-norm"
    written = read_scores(out, trials=trials)
    plain = evaluate_speakers(found["test"], trials, scores=tmp_path / "plain.tsv")
    assert plain.protocol.scoring == "cosine"
    cosines = read_scores(tmp_path / "plain.tsv", trials=trials).scores
    assert np.isfinite(written.scores).all() and np.abs(written.scores).max() > 1.0
    assert np.abs(cosines).max() <= 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed_perturbation": True, "num_classes": 7}, "give a multiple of 3"),
        ({"shortest": 2.0, "longest": 1.0}, "2.0 to 1.0"),
        ({"samples_per_class": 10_000_000}, "set in_memory to false"),
        ({"noise_path": "nowhere"}, "nowhere has no audio"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(options, words) -> None:
    with pytest.raises(QMarginError, match=words):
        build_dataset(speaker_recipe(**options))
