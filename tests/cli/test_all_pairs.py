"""``qmargin evaluate all-pairs`` from folders and embeddings to a result."""

import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.commands import run_command as run
from helpers.model_directories import pictures, write_pictures
from helpers.recordings import speaker_folders
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.embed import write_embedding_file
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.result import Result, read_result
from qmargin.models import create_backbone
from qmargin.models.directory import ModelCard, write_model

QUICK = ("--replicates", 20, "--fars", 0.1, 0.01)


def evaluated(*arguments: object) -> Result:
    """The result goes to the folder of the first argument."""
    out = Path(str(arguments[0])).parent / "result.json"
    run("evaluate", "all-pairs", *arguments, *QUICK, "--out", out)
    return read_result(out)


def test_a_folder_and_its_embeddings_give_the_same_result(model, faces, capsys):
    made = evaluated(faces, "--model", model)
    printed = capsys.readouterr().out
    protocol = made.protocol
    assert (made.system.name, protocol.name) == ("small", "all pairs of faces")
    assert (protocol.num_genuine, protocol.num_impostors) == (10, 180)
    assert (protocol.kind, protocol.scoring, protocol.flip) == ("all-pairs", "cosine", "none")
    assert "subject bootstrap, 95%, 20 replicates" in printed and "Cllr" not in printed
    kept = faces.parent / "result.embeddings.safetensors"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert [source.path for source in made.sources] == [kept.name]  # not where it is

    for name in ("e.npz", "e.safetensors"):
        path = faces.parent / name
        run("embed", faces, "--model", model, "--out", path)
        read = evaluated(path, "--overwrite")
        assert (read.measures, read.replicates) == (made.measures, made.replicates)
        assert read.protocol.data_sha256 == protocol.data_sha256
        assert (read.system.name, read.protocol.name) == ("e", "all pairs")
        for card in (read.system.model_card, made.system.model_card):
            assert card["weights_sha256"] == read_embeddings(path).weights_sha256


def test_recordings_are_compared_by_a_model_of_recordings(tmp_path):
    torch.manual_seed(0)
    backbone = create_backbone("speaker_resnet18", embedding_dim=8, width=2)
    card = ModelCard("voice", "audio", (), "speaker_resnet18", 8, options={"width": 2})
    write_model(tmp_path / "m", weights=backbone.state_dict(), card=card, recipe="name: made\n")
    folder = speaker_folders(tmp_path / "voices", speakers=4, each=3)
    (folder / "id0" / "photo.jpg").write_bytes(b"not of interest")
    protocol = evaluated(folder, "--model", tmp_path / "m").protocol
    assert (protocol.num_genuine, protocol.num_impostors, protocol.flip) == (12, 54, None)


def test_identities_may_come_from_a_file(tmp_path):
    rows = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    keys = [f"{number}.wav" for number in range(12)]
    write_embedding_file(tmp_path / "e.safetensors", keys, rows)
    with pytest.raises(DataError, match=r"'0\.wav'.*--identities"):
        evaluated(tmp_path / "e.safetensors")
    (tmp_path / "utt2spk").write_text("".join(f"{key} s{n // 3}\n" for n, key in enumerate(keys)))
    result = evaluated(tmp_path / "e.safetensors", "--identities", tmp_path / "utt2spk")
    assert (result.protocol.num_genuine, result.protocol.num_subjects) == (12, 4)
    assert result.protocol.name == "all pairs of utt2spk"
    assert [source.role for source in result.sources] == ["embeddings", "subjects"]
    (tmp_path / "utt2spk").write_text("0.wav a\n1.wav a\n")
    with pytest.raises(DataError, match=r"10 of 12.*'2\.wav'"):
        evaluated(tmp_path / "e.safetensors", "--identities", tmp_path / "utt2spk")


def test_folders_without_pairs_are_refused_before_embedding(model, faces, tmp_path, monkeypatch):
    monkeypatch.setattr("qmargin.cli.embed.FolderUse.embed_folder", None)
    divided, lone = tmp_path / "divided", tmp_path / "lone"
    divided.mkdir()
    faces.rename(divided / "test")
    with pytest.raises(ProtocolError, match="'test'"):
        evaluated(divided, "--model", model)
    write_pictures(divided / "train", pictures(4))
    with pytest.raises(DataError, match="train and test"):
        evaluated(divided, "--model", model)
    with pytest.raises(DataError, match=r"'0\.png'"):
        evaluated(divided / "test" / "id00", "--model", model)
    for path in write_pictures(lone, pictures(4)):
        if path.name == "1.png":
            path.unlink()
    with pytest.raises(ProtocolError, match="no genuine pair"):
        evaluated(lone, "--model", model)
    assert not (tmp_path / "result.json").exists()


def test_options_that_contradict_are_refused(model, faces):
    of_model = (faces, "--model", model)
    for words, named in (
        ((faces,), "--model"),
        ((faces / "none", "--model", model), "not a folder"),
        ((faces.parent / "e.npz", "--embeddings", faces.parent / "f.npz"), "--embeddings"),
        ((*of_model, "--as-norm", 5), "--cohort"),
        ((*of_model, "--embeddings", faces.parent / "e.pt"), r"\.safetensors or \.npz"),
    ):
        with pytest.raises(ConfigError, match=named):
            evaluated(*words)
    with pytest.raises(SystemExit):  # thresholds over all pairs are found by one rule
        evaluated(*of_model, "--rule", "nearest")


def test_files_that_cannot_be_read_stop_it_or_are_noted(model, faces):
    (faces / "id03" / "1.png").write_bytes(b"<html>")
    with pytest.raises(DataError, match="1 files cannot be embedded and 0 may be left out"):
        evaluated(faces, "--model", model)
    result = evaluated(faces, "--model", model, "--max-corrupt", 1)
    assert result.protocol.num_genuine == 9 and "id03/1.png" in result.notes[0]


def test_nothing_else_is_written_over(model, faces, tmp_path):
    run("embed", faces, "--model", model, "--out", tmp_path / "e.npz")
    with pytest.raises(ConfigError, match=r"e\.npz"):
        run("evaluate", "all-pairs", tmp_path / "e.npz", "--out", tmp_path / "e.npz")
    (tmp_path / "result.json").write_text("my own notes")
    with pytest.raises(ConfigError, match=r"result\.json"):
        evaluated(faces, "--model", model)
    evaluated(faces, "--model", model, "--overwrite")
    kept = evaluated(faces, "--model", model, "--keep-paths")  # its own
    assert kept.sources[0].path == str(tmp_path / "result.embeddings.safetensors")


def test_scores_are_normalised_by_a_cohort(model, faces, tmp_path):
    plain = evaluated(faces, "--model", model)
    rows = np.random.default_rng(1).normal(size=(12, 8)).astype(np.float32)
    write_embedding_file(tmp_path / "cohort.npz", [str(row) for row in range(12)], rows)
    made = tmp_path / "result.embeddings.safetensors"
    normalised = evaluated(made, "--cohort", tmp_path / "cohort.npz", "--as-norm", 8)
    assert [source.role for source in normalised.sources] == ["embeddings", "cohort"]
    assert normalised.protocol.scoring == "as-norm" and normalised.measures != plain.measures
    assert normalised.protocol.data_sha256 == plain.protocol.data_sha256
