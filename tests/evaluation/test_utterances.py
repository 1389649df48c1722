"""Whole recordings to embeddings: real files, kills, damage, durations."""

import json
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import nn

from helpers.recordings import encoded, real_speech, speaker_folders, tone
from qmargin.data.audio_index import index_audio
from qmargin.data.audio_lists import open_audio
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols import utterances
from qmargin.evaluation.protocols.trials import evaluate_speakers
from qmargin.evaluation.protocols.utterances import Recordings, embed_utterances, read_seconds
from qmargin.evaluation.trials import TrialList, read_trials
from qmargin.models.speaker_input import SpeakerInput
from qmargin.models.speaker_resnet import SpeakerResNet


class Counting:
    """A network that counts what it is given, and may stop."""

    def __init__(self, network: nn.Module, stop_at: int | None = None) -> None:
        self.network, self.stop_at, self.lengths = network.eval(), stop_at, list[int]()

    @torch.no_grad()
    def embed(self, waveforms: list[np.ndarray]) -> torch.Tensor:
        if len(self.lengths) == self.stop_at:
            raise KeyboardInterrupt
        self.lengths.append(len(waveforms[0]))
        found: torch.Tensor = self.network(torch.from_numpy(np.stack(waveforms)))
        return found


class MeanSpectrum(nn.Module):
    """How much each bin moves: enough to tell some speakers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend = SpeakerInput()

    def forward(self, waveforms: torch.Tensor) -> torch.Tensor:
        deviations: torch.Tensor = self.frontend(waveforms).std(2)
        return deviations


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.wav"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return speaker_folders(tmp_path / "audio")


def small_network() -> nn.Module:
    torch.manual_seed(3)
    return SpeakerResNet((1, 1, 1, 1), 4, width=4)


def test_every_recording_is_embedded_whole(folder: Path, tmp_path: Path) -> None:
    model, names = Counting(small_network()), names_in(folder)
    out = tmp_path / "e.safetensors"
    assert embed_utterances(model, Recordings(folder, names), out, model_id="m") == out
    found = read_embeddings(out)
    assert list(found.keys) == names
    assert model.lengths == [8000, 9600] * 3
    samples, _ = soundfile.read(folder / names[3], dtype="float32")
    expected = model.network(torch.from_numpy(samples)[None]).detach().numpy()[0]
    np.testing.assert_array_equal(found.matrix[3], expected)
    assert read_seconds(out)[names[3]] == pytest.approx(0.6)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audio", "e.safetensors"]


def test_a_killed_run_goes_on_and_ends_with_the_same_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utterances, "_ROWS_BETWEEN_RECORDS", 2)
    recordings = Recordings(folder, names_in(folder))
    whole, out = tmp_path / "whole.safetensors", tmp_path / "e.safetensors"
    embed_utterances(Counting(small_network()), recordings, whole, model_id="m")
    with pytest.raises(KeyboardInterrupt):
        embed_utterances(Counting(small_network(), stop_at=5), recordings, out, model_id="m")
    assert not out.exists()
    with pytest.raises(DataError, match="begun with other inputs"):
        embed_utterances(Counting(small_network()), recordings, out, model_id="other")
    rest = Counting(small_network())
    embed_utterances(rest, recordings, out, model_id="m")
    assert len(rest.lengths) == 2
    assert out.read_bytes() == whole.read_bytes()


def test_names_without_suffix_find_their_files(folder: Path, tmp_path: Path) -> None:
    recordings = Recordings(folder, ["id0/video/00001"])
    out = tmp_path / "e.safetensors"
    embed_utterances(Counting(small_network()), recordings, out, model_id="m")
    assert read_embeddings(out).keys == ("id0/video/00001",)


def test_a_very_short_recording_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "short.wav").write_bytes(encoded(tone(0.05)))
    samples, seconds = Recordings(tmp_path, ["short.wav"])[0]
    assert len(samples) == 2400
    assert seconds == 0.05
    np.testing.assert_array_equal(samples[:800], samples[800:1600])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "zero bytes"),
        (b"<html>not found</html>", "not audio"),
        (encoded(tone(1.0))[:20000], "truncated"),
        (None, "there is no such file"),
    ],
)
def test_damaged_recordings_are_named(folder: Path, content: bytes | None, message: str) -> None:
    bad = folder / "id1" / "video" / "00000.wav"
    bad.unlink()
    if content is not None:
        bad.write_bytes(content)
    names = ["id0/video/00000.wav", "id1/video/00000.wav"]
    with pytest.raises(DataError, match=rf"'id1/video/00000.wav' cannot be embedded \(.*{message}"):
        embed_utterances(
            Counting(small_network()),
            Recordings(folder, names),
            folder / "e.safetensors",
            model_id="m",
        )


def test_nothing_outside_the_folder_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(encoded(tone()))
    with pytest.raises(DataError, match=r"'../secret.wav' cannot be embedded \(it lies outside"):
        embed_utterances(
            Counting(small_network()),
            Recordings(folder, ["../secret.wav"]),
            tmp_path / "e.safetensors",
            model_id="m",
        )


def test_long_recordings_are_refused_by_their_header(folder: Path, tmp_path: Path) -> None:
    recordings = Recordings(folder, ["id0/video/00001.wav"], max_seconds=0.55)
    with pytest.raises(DataError, match="at most 1 s are read"):
        embed_utterances(
            Counting(small_network()), recordings, tmp_path / "e.safetensors", model_id="m"
        )


def test_wrong_answers_of_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    class Wrong:
        def __init__(self, answer: np.ndarray) -> None:
            self.answer = answer

        def embed(self, _: object) -> np.ndarray:
            return self.answer

    recordings = Recordings(folder, names_in(folder))
    out = tmp_path / "e.safetensors"
    with pytest.raises(ShapeError, match=r"\(2, 3\) for one recording"):
        embed_utterances(Wrong(np.ones((2, 3))), recordings, out, model_id="m")
    with pytest.raises(DataError, match=r"'id0/video/00000.wav' is not finite"):
        embed_utterances(Wrong(np.full((1, 3), np.nan)), recordings, out, model_id="m")
    with pytest.raises(DataError, match="0 recordings"):
        embed_utterances(Wrong(np.ones((1, 3))), Recordings(folder, []), out, model_id="m")
    with pytest.raises(ConfigError, match=r"must end in .safetensors"):
        embed_utterances(Wrong(np.ones((1, 3))), recordings, tmp_path / "e.npz", model_id="m")


def test_durations_from_text(tmp_path: Path) -> None:
    path = tmp_path / "utt2dur"
    path.write_text("a/1 3.5\nb/1 2\n")
    assert read_seconds(path) == {"a/1": 3.5, "b/1": 2.0}
    for text, message in (("a/1 long\n", "'long', no number"), ("a/1 -1\n", "is -1.0: give")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_seconds(path)


def test_durations_from_an_index(tmp_path: Path) -> None:
    collection = open_audio(speaker_folders(tmp_path / "wavs", speakers=2, each=1))
    collection.path(1).write_bytes(b"<html>")
    index_audio(collection, tmp_path / "wavs.qmindex")
    assert read_seconds(tmp_path / "wavs.qmindex") == {"id0/video/00000.wav": 0.5}
    (tmp_path / "other.qmindex").write_bytes(b"{}")
    with pytest.raises(DataError, match="is no index of recordings"):
        read_seconds(tmp_path / "other.qmindex")


def test_embeddings_without_durations_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "e.safetensors"
    save_file({"embeddings": np.ones((1, 2), np.float32)}, path, {"keys": json.dumps(["a"])})
    with pytest.raises(DataError, match="has no durations"):
        read_seconds(path)
    path.write_bytes(b"\x00")
    with pytest.raises(DataError, match="is not a safetensors file"):
        read_seconds(path)


def test_real_speech_from_files_to_a_result(tmp_path: Path) -> None:
    """The deviations of 80 bins alone tell these speakers apart far better than chance."""
    folder = real_speech()
    lines = (folder / "trials.txt").read_text().splitlines()
    kept = [line for line in lines if re.search(r"A0[01]\.ogg .*B0[23]\.ogg", line)]
    (tmp_path / "trials.txt").write_text("\n".join(kept) + "\n")
    trials: TrialList = read_trials(tmp_path / "trials.txt")
    out = tmp_path / "e.safetensors"
    recordings = Recordings(folder, trials.keys.names)
    embed_utterances(Counting(MeanSpectrum()), recordings, out, model_id="m")
    options = EvaluationOptions(fars=(1e-1,), num_replicates=0)
    result = evaluate_speakers(read_embeddings(out), trials, options)
    assert 0.0 < result.metrics.eer.value < 0.4
    assert result.protocol.num_subjects == 20
    assert 1.0 < min(read_seconds(out).values()) < 10.0
