"""A folder of files to embeddings by name, with a manifest of what became of every file.

Embeddings of people are personal data: everything written here is readable by its owner alone.
"""

from __future__ import annotations

import csv
import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.embed import EMBEDDINGS_MARK, FORMAT
from qmargin.files import MADE_BY, Progress, escape_formula, replacing, sha256_of

EXTENSIONS = {
    "images": frozenset({"jpg", "jpeg", "png", "webp", "bmp", "ppm"}),
    "audio": frozenset({"wav", "flac", "ogg", "opus", "mp3", "aiff", "aif"}),
}
SUFFIXES = (".safetensors", ".npz")
_COLUMNS = ("key", "row", "sha256", "problem")
MANIFEST_MARK = ",".join(_COLUMNS)
MARKS = {".safetensors": EMBEDDINGS_MARK, ".npz": MADE_BY}


class FileModel(Protocol):
    """What turns files into embeddings."""

    def embed(self, inputs: list[Path], *, batch_size: int, flip: str) -> NDArray[np.float32]:
        """Embeddings ``[n, d]``."""
        ...


@dataclass(frozen=True)
class FileRow:
    """What became of a file: the number of its embedding, or why it has none."""

    key: str
    row: int | None
    sha256: str
    problem: str = ""


@dataclass(frozen=True)
class EmbeddedFolder:
    """Embeddings ``[n, d]`` of the files that could be read, and a line for every file."""

    matrix: NDArray[np.float32]
    files: tuple[FileRow, ...]

    @property
    def keys(self) -> list[str]:
        """Names of the embeddings, in their order."""
        return [file.key for file in self.files if file.row is not None]


def find_files(folder: str | Path, modality: str) -> list[str]:
    """Names of all images or recordings under a folder, relative to it, in order.

    Raises:
        DataError: There is none, or a name is not UTF-8.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with files in it")
    if modality not in EXTENSIONS:
        raise ConfigError(f"the model takes {modality}, which are no files; embed them in Python")
    names = []
    for place, _, files in os.walk(folder):
        paths = [Path(place, file) for file in files]
        wanted = [path for path in paths if path.suffix[1:].lower() in EXTENSIONS[modality]]
        names += [path.relative_to(folder).as_posix() for path in wanted]
    if not names:
        known = ", ".join(sorted(EXTENSIONS[modality]))
        raise DataError(f"{folder} has no {modality}; files have to end in one of {known}")
    for name in names:
        if not _is_text(name):
            raise DataError(f"{folder} has a file whose name {name!r} is not UTF-8; rename it")
    return sorted(names)


def embed_files(
    model: FileModel,
    folder: str | Path,
    names: Sequence[str],
    *,
    flip: str = "none",
    batch_size: int = 64,
    max_corrupt: int = 100,
    progress: Progress | None = None,
) -> EmbeddedFolder:
    """Embed files; those that cannot be read are left out and told of.

    Args:
        model: From ``load_model``.
        folder: Where the files are.
        names: From ``find_files``.
        flip: As in ``Model.embed``.
        batch_size: Files at a time.
        max_corrupt: Unreadable files that are left out before this stops.
        progress: Called with the files done and their number.

    Raises:
        DataError: Too many files cannot be read, or all of them.
    """
    if batch_size < 1 or max_corrupt < 0:
        raise ConfigError(
            f"batch_size is {batch_size} and max_corrupt {max_corrupt}; they must be at least 1 "
            "and 0"
        )
    folder, rows, files = Path(folder), list[NDArray[np.float32]](), list[FileRow]()
    num_bad = 0
    for start in range(0, len(names), batch_size):
        for name, row, problem in _batch(model, folder, names[start : start + batch_size], flip):
            digest = _digest(folder / name)
            number = None if row is None else len(rows)
            files.append(FileRow(name, number, digest, problem))
            if row is not None:
                rows.append(row)
            num_bad += row is None
            if num_bad > max_corrupt:
                raise DataError(
                    f"{num_bad} files cannot be embedded and {max_corrupt} may be left out, the "
                    f"last because {problem}; look at them, or allow more"
                )
        if progress is not None:
            progress(len(files), len(names))
    if not rows:
        raise DataError(f"none of {len(names)} files can be embedded: {files[-1].problem}")
    return EmbeddedFolder(np.stack(rows), tuple(files))


def write_embedding_file(
    path: str | Path,
    keys: Sequence[str],
    matrix: NDArray[np.float32],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write embeddings that ``read_embeddings`` reads, for their owner alone.

    Args:
        path: Ends in ``.safetensors`` or ``.npz``.
        keys: Name of every row.
        matrix: ``[n, d]``.
        metadata: Texts that the file carries.
    """
    path = check_suffix(path)
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        arrays = {name: np.array(text) for name, text in (metadata or {}).items()}
        arrays.update(keys=np.array(keys), embeddings=matrix)
        np.savez(buffer, allow_pickle=False, **arrays)
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.comment = MADE_BY.encode()
        write_private(path, [buffer.getbuffer()])
        return
    content = np.ascontiguousarray(matrix, "<f4")
    tensor = {"dtype": "F32", "shape": list(matrix.shape), "data_offsets": [0, content.nbytes]}
    texts = {"format": FORMAT, **(metadata or {}), "keys": json.dumps(list(keys))}
    header = json.dumps({"__metadata__": texts, "embeddings": tensor}).encode()
    header += b" " * (-len(header) % 8)
    write_private(path, [len(header).to_bytes(8, "little"), header, content.reshape(-1).data])


def write_manifest(path: str | Path, files: Iterable[FileRow]) -> None:
    """Write what became of every file as CSV, for its owner alone; no cell is a formula."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for file in files:
        row = "" if file.row is None else file.row
        key, problem = escape_formula(file.key), escape_formula(file.problem)
        writer.writerow([key, row, file.sha256, problem])
    write_private(path, [text.getvalue().encode()])


def check_suffix(path: str | Path) -> Path:
    """The path, if embeddings can be written under its name."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is no file of embeddings; let it end in {' or '.join(SUFFIXES)}")
    return path


def write_private(path: str | Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file with mode 0600 from its first byte on, whole or not at all."""
    with replacing(Path(path)) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())


def _batch(
    model: FileModel, folder: Path, names: Sequence[str], flip: str
) -> list[tuple[str, Any, str]]:
    """Name, embedding or None, and problem of each file."""
    try:
        rows = model.embed([folder / name for name in names], batch_size=len(names), flip=flip)
        return [(name, row, "") for name, row in zip(names, rows, strict=True)]
    except (DataError, OSError) as error:
        if len(names) == 1:
            return [(names[0], None, str(error))]
    return [found for name in names for found in _batch(model, folder, [name], flip)]


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except (OSError, DataError):
        return ""


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
