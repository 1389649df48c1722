"""Damaged and hostile files are read or refused by one of our errors, whatever their bytes."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from qmargin.errors import DataError, QMarginError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.protocols.utterances import read_seconds
from qmargin.evaluation.score_files import read_scores
from qmargin.evaluation.subjects import read_mapping
from qmargin.evaluation.thresholds import read_thresholds
from qmargin.evaluation.trials import read_trials


def npz(path: Path, **arrays: object) -> bytes:
    np.savez_compressed(path, **{name: np.asarray(array) for name, array in arrays.items()})
    return path.read_bytes()


def originals(folder: Path) -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    names = [f"id{i}/ü.wav" for i in range(8)]
    rows = [f"{name} {name}x {i / 8} {i % 2}" for i, name in enumerate(names)]
    csv = ["enrol,test,score,label", *(row.replace(" ", ",") for row in rows)]
    matrix = np.arange(1.0, 17.0, dtype=np.float32).reshape(8, 2)
    ark = b"".join(
        name.encode() + b" \0BFV \x04\x02\0\0\0" + row.tobytes()
        for name, row in zip(names, matrix, strict=True)
    )
    tensors = save({"embeddings": torch.ones(8, 2)}, {"keys": json.dumps(names)})
    scores = npz(folder / "o.npz", scores=np.arange(8) / 8, labels=np.arange(8) % 2)
    embeddings = npz(folder / "o.npz", keys=names, embeddings=matrix)
    trials = "\n".join(f"{i % 2} {name} x" for i, name in enumerate(names)).encode()
    return {
        "scores.txt": ("\n".join(rows).encode(), read_scores),
        "scores.csv": ("\n".join(csv).encode(), read_scores),
        "scores.npz": (scores, read_scores),
        "trials.txt": (trials, read_trials),
        "groups.csv": (b"subject,group\na,x\nb,y\n", lambda p: read_mapping(p, role="groups")),
        "e.ark": (ark, read_embeddings),
        "text.ark": (b"a  [ 1 2 ]\nb  [\n 3 4 ]\n", read_embeddings),
        "e.npz": (embeddings, read_embeddings),
        "e.safetensors": (tensors, read_embeddings),
        "e.scp": (b"a e.ark:11\nb e.ark:11\n", read_embeddings),
    }


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """A few bytes changed, removed or repeated."""
    result = bytearray(content)
    for _ in range(int(generator.integers(1, 4))):
        place = int(generator.integers(len(result)))
        kind = generator.integers(4)
        if kind == 0:
            result[place] = int(generator.integers(256))
        elif kind == 1:
            del result[place : place + int(generator.integers(1, 20))]
        elif kind == 2:
            result[place:place] = result[: int(generator.integers(1, 20))]
        else:
            result[place:place] = generator.choice([b"nan", b"\n", b'"', b",", b" ", b"\0", b"|"])
        if not result:
            return b""
    return bytes(result)


NAMES = "scores.txt scores.csv scores.npz trials.txt groups.csv"
NAMES += " e.ark text.ark e.npz e.safetensors e.scp"


@pytest.mark.parametrize("name", NAMES.split())
def test_damage_is_read_or_refused(tmp_path: Path, name: str) -> None:
    files = originals(tmp_path)
    content, read = files[name]
    (tmp_path / "e.ark").write_bytes(files["e.ark"][0])
    path = tmp_path / name
    path.write_bytes(content)
    read(path)  # whole, it is fine
    generator = np.random.default_rng(len(name))
    num_refused = 0
    for _ in range(150):
        path.write_bytes(damaged(content, generator))
        try:
            read(path)
        except QMarginError as error:
            num_refused += 1
            assert name in str(error)
            assert "\n" not in str(error)
    assert num_refused > 10


@pytest.mark.parametrize(
    "read",
    [
        read_scores,
        read_trials,
        read_thresholds,
        lambda path: read_mapping(path, role="groups"),
        lambda path: read_embeddings(path.rename(path.with_suffix(".npz"))),
        lambda path: read_scores(path, format="npz"),
    ],
)
def test_pipes_are_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a named pipe"):
        read(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"/dev/zero is a device"):
        read_scores("/dev/zero")


def test_a_zip_archive_of_other_files_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")
    for read in (read_scores, read_embeddings):
        with pytest.raises(DataError, match=r"scores\.npz .*'notes\.txt'"):
            read(path)


def test_a_header_that_promises_more_than_there_is_is_refused(tmp_path: Path) -> None:
    """Before memory is taken for it."""
    buffer = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    path = tmp_path / "scores.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("genuine.npy", buffer.getvalue() + bytes(80))
        archive.writestr("impostor.npy", buffer.getvalue() + bytes(80))
    for read in (read_scores, read_embeddings):
        with pytest.raises(DataError, match=r"scores\.npz .*'genuine' says .* has 80 "):
            read(path)


def test_deep_names_of_embeddings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    path.write_bytes(save({"embeddings": torch.ones(1, 2)}, {"keys": "[" * 100_000}))
    with pytest.raises(DataError, match=r"e\.safetensors: the metadata entry keys"):
        read_embeddings(path)
    with pytest.raises(DataError, match=r"e\.safetensors"):
        read_seconds(path)
