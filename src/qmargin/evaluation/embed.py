"""Samples to embeddings: a model over images or recordings, into files that can be resumed."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation.columns import first_row
from qmargin.evaluation.embeddings import EMBEDDINGS_MARK, FORMAT
from qmargin.evaluation.resumable import ResumableFile, names_beside
from qmargin.files import (
    MADE_BY,
    Progress,
    escape_formula,
    is_file,
    read_regular,
    replacing,
    sha256_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from qmargin.evaluation.model import Model

Rows = NDArray[np.float32]  # [B, d]
FLIPS = ("none", "sum", "both")
IMAGE_SIZE = 112
MAX_HEADER_BYTES = 100_000_000  # what safetensors reads
MAX_IMAGE_BYTES = 1 << 26
SAMPLE_RATE = 16_000
LONGEST_UTTERANCE = 1_200.0  # seconds
EXTENSIONS = {
    "images": frozenset({"jpg", "jpeg", "png", "webp", "bmp", "ppm"}),
    "audio": frozenset({"wav", "flac", "ogg", "opus", "mp3", "aiff", "aif"}),
}
SUFFIXES = (".safetensors", ".npz")
MARKS = {".safetensors": EMBEDDINGS_MARK, ".npz": MADE_BY}
_COLUMNS = ("key", "row", "sha256", "problem")
MANIFEST_MARK = ",".join(_COLUMNS)
_ROWS_BETWEEN_RECORDS = 1024
_LOOK_AT = 20  # names that decide whether a folder is the right one


class SampleSet(Protocol):
    """Images or recordings by number, each with a number such as its label.

    A set whose attribute ``column`` names that number has it stored beside the embeddings. Samples
    of a set whose attribute ``max_batch`` is 1 may differ in shape.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[NDArray[Any], Any]: ...


def path_inside(folder: Path, name: str) -> Path:
    """Path of a file below ``folder``; ``CorruptSample`` if it is outside or not a file name."""
    try:
        path = (folder / name).resolve()
        is_inside = path.is_relative_to(folder.resolve())
    except (OSError, ValueError) as error:
        raise CorruptSample(f"{name[:80]!r} cannot be the name of a file: {error}") from error
    if not is_inside:
        raise CorruptSample(f"{name!r} is outside of {folder}")
    return path


def read_inside(folder: Path, name: str) -> bytes:
    """The bytes of an image below ``folder``; ``CorruptSample`` where it cannot be read."""
    path = path_inside(folder, name)
    try:
        return read_regular(path, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: no regular file, or too large
        reason = getattr(error, "strerror", None) or error
        raise CorruptSample(f"{name[:80]!r} cannot be read: {reason}") from error


@dataclass(frozen=True)
class Images:
    """RGB images by number; labels are -1."""

    number: int
    read: Callable[[int], NDArray[np.uint8]]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return self.read(index), -1


def decoded_images(encoded: Callable[[int], bytes], number: int, size: int = IMAGE_SIZE) -> Images:
    """Encoded images as RGB ``size x size``."""
    from qmargin.data.images import decode_image, resize_image

    return Images(number, lambda index: resize_image(decode_image(encoded(index)), size))


def folder_images(folder: Path, names: Sequence[str], size: int = IMAGE_SIZE) -> Images:
    """Images of a folder; a folder without the first ones is refused, with a hint."""
    first = names[:_LOOK_AT]
    if first and not any(is_file(folder / name) for name in first):
        name = Path(first[0])
        others = sorted(folder.glob(f"{glob.escape(str(name.with_suffix('')))}.*"))
        below = sorted(folder.glob(f"*/{glob.escape(str(name))}"))
        hint = "give the folder that the names are relative to with --images"
        if others:
            hint = f"there is {others[0].name!r}: pass --extension {others[0].suffix[1:]}"
        elif below:
            hint = f"they are in --images {folder / below[0].relative_to(folder).parts[0]}"
        raise DataError(f"{folder} has none of the images, such as {first[0]!r}; {hint}")
    return decoded_images(lambda index: read_inside(folder, names[index]), len(names), size)


@dataclass(frozen=True)
class Recordings:
    """Recordings in a folder by their names, with or without ``suffix``."""

    folder: Path
    names: Sequence[str]
    suffix: str = ".wav"
    max_seconds: float = LONGEST_UTTERANCE  # longer recordings are refused by their header
    column: ClassVar[str] = "seconds"
    max_batch: ClassVar[int] = 1

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], float]:
        """Samples and seconds; a very short recording is repeated, its duration is as it was."""
        from qmargin.data.audio import decode_audio, repeated

        samples = decode_audio(self._path(self.names[index]), max_seconds=self.max_seconds)
        return repeated(samples), len(samples) / SAMPLE_RATE

    def check(self) -> None:
        """Refuse the first name without a file, before anything is decoded."""
        for name in self.names:
            try:
                self._path(name)
            except CorruptSample as error:
                raise DataError(f"{name}: {error}; check the names, or complete it") from error

    def _path(self, name: str) -> Path:
        for candidate in (name, name + self.suffix):
            path = path_inside(self.folder, candidate)
            if is_file(path):
                return path
        raise CorruptSample(f"there is no such file in {self.folder}")


def write_embeddings(
    model: Any,
    samples: SampleSet,
    out: str | Path,
    *,
    keys: Sequence[str] | None = None,
    model_id: str,
    flip: str = "none",
    batch_size: int = 64,
    num_workers: int = 2,
    restart: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Embed all samples into a safetensors file that ``read_embeddings`` reads.

    An interrupted run resumes; the finished file is the same, byte for byte, if the model's outputs
    are. Only the owner can read it: embeddings of faces and voices are personal data. For
    recordings, the file also has the tensor ``seconds``.

    Args:
        model: Its method ``embed`` takes RGB images ``[B, H, W, 3]``, or one 16 kHz waveform.
        samples: RGB images of one size, or recordings.
        out: The file to write, ``.safetensors``.
        keys: A distinct name for every sample; ``samples.names`` by default.
        model_id: Identifies the weights; a partial file of other weights is refused.
        flip: ``"sum"`` adds the embedding of an image's mirror image, ``"both"`` appends it.
        batch_size: Samples per call of the model; always one for recordings.
        num_workers: Decoding threads.
        restart: Discard a partial file of other inputs.
        progress: Called with the samples done and their number.
    """
    out = Path(out)
    names = list(samples.names if keys is None else keys)  # type: ignore[attr-defined]
    if flip not in FLIPS:
        raise ConfigError(f"flip {flip!r} is unknown: choose one of {', '.join(FLIPS)}")
    for option, number in (("batch_size", batch_size), ("num_workers", num_workers)):
        if number < 1:
            raise ConfigError(f"{option}={number} is below 1: give at least 1")
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out} does not end in .safetensors: give it that suffix")
    if len(samples) == 0:
        raise DataError("there are 0 samples to embed: give at least 1")
    if len(names) != len(samples):
        raise ShapeError(
            f"there are {len(names):,} keys for {len(samples):,} samples: give one each"
        )
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"the key {name!r} names two samples: give every sample its own")
        seen.add(name)
    column: str | None = getattr(samples, "column", None)
    metadata = {"format": FORMAT, "keys": json.dumps(names), "model": model_id}
    if column is None:
        metadata["flip"] = flip
    settings = json.dumps([model_id, flip, batch_size, names])
    fingerprint = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).hexdigest()
    # created empty and private, so that no other user can read it
    os.close(os.open(names_beside(out)[0], os.O_CREAT | os.O_WRONLY, 0o600))
    with ResumableFile(out, fingerprint, restart=restart) as file:
        content: list[bytes] = []
        num_rows = 0
        batches = _batches(samples, names, file.num_done, batch_size, num_workers)
        for rows, numbers in _embedded(model, batches, flip, names):
            if column is not None:  # kept in front of each row until all of them are known
                rows = np.concatenate([numbers[:, None], rows], axis=1)
            if file.num_done == 0 and not content:
                content.append(_header({"embeddings": (len(names), rows.shape[1])}, metadata))
            content.append(rows.astype("<f4").tobytes())
            num_rows += len(rows)
            done = file.num_done + num_rows
            if num_rows >= _ROWS_BETWEEN_RECORDS or done == len(names):
                file.append(b"".join(content), num_rows)
                content, num_rows = [], 0
            if progress is not None:
                progress(done, len(names))
        if column is None:
            file.finish()
        else:
            _split_column(file.partial, out, column, metadata, len(names))
            file.discard()
    return out


class _Batch(NamedTuple):
    first: int
    samples: NDArray[Any]
    numbers: list[Any]


def _embedded(
    model: Any, batches: Iterable[_Batch], flip: str, names: Sequence[str]
) -> Iterator[tuple[Rows, Rows]]:
    """Embeddings of batches, and the number of each sample, such as its label."""
    width = None
    for batch in batches:
        rows = _answer(model, batch.samples)
        if flip != "none":
            mirrored = _answer(model, np.ascontiguousarray(batch.samples[:, :, ::-1]))
            both = flip == "both"
            rows = np.concatenate([rows, mirrored], axis=1) if both else rows + mirrored
        row = first_row(~np.isfinite(rows).all(axis=1))
        if row is not None:
            raise DataError(
                f"the embedding of {names[batch.first + row]!r} is not finite: check the model"
            )
        if rows.shape[1] != (width or rows.shape[1]):
            raise ShapeError(
                f"the model gave embeddings of width {rows.shape[1]} after {width}: give one width"
            )
        width = rows.shape[1]
        yield rows, np.array(batch.numbers, np.float32)


def _answer(model: Any, batch: NDArray[Any]) -> Rows:
    answer = model.embed(batch)
    if hasattr(answer, "detach"):  # a tensor; NumPy has no bfloat16
        answer = answer.detach().float().cpu().numpy()
    rows = np.asarray(answer, dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(batch) or rows.shape[1] == 0:
        raise ShapeError(
            f"the model gave the shape {rows.shape} for {len(batch)} samples, not [B, d]"
        )
    return rows


def _batches(
    samples: SampleSet, names: Sequence[str], start: int, batch_size: int, num_workers: int
) -> Iterator[_Batch]:
    """Batches in order, decoded by threads while the model works; few are held at once."""
    size = min(batch_size, getattr(samples, "max_batch", batch_size))
    firsts = iter(range(start, len(samples), size))
    jobs: deque[Future[_Batch]] = deque()
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            while True:
                while len(jobs) <= num_workers and (first := next(firsts, -1)) >= 0:
                    indices = range(first, min(first + size, len(samples)))
                    jobs.append(pool.submit(_load, samples, indices, names))
                if not jobs:
                    return
                yield jobs.popleft().result()
        finally:
            for job in jobs:
                job.cancel()


def _load(samples: SampleSet, indices: range, names: Sequence[str]) -> _Batch:
    loaded: list[NDArray[Any]] = []
    numbers: list[Any] = []
    for index in indices:
        try:
            sample, number = samples[index]
        except CorruptSample as error:
            raise DataError(
                f"{names[index]!r} cannot be embedded ({error}): repair or remove it; "
                "what is done so far is kept"
            ) from error
        sample = np.asarray(sample)
        is_image = sample.ndim == 3 and sample.shape[2] == 3 and sample.dtype == np.uint8
        if not is_image and not (sample.ndim == 1 and sample.dtype.kind == "f"):
            raise ShapeError(
                f"{names[index]!r} is a {sample.dtype} array of shape {sample.shape}: give RGB "
                "uint8 [H, W, 3], or a waveform of floats [T]"
            )
        if loaded and sample.shape != loaded[0].shape:
            raise ShapeError(
                f"{names[index]!r} has the shape {sample.shape}, but {names[indices[0]]!r} has "
                f"{loaded[0].shape}: align all images to one size first"
            )
        loaded.append(sample)
        numbers.append(number)
    return _Batch(indices[0], np.stack(loaded), numbers)


def _header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> bytes:
    """The start of a safetensors file of float32 tensors, which follow one after the other.

    The library orders its metadata differently every time; these bytes are always the same.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # so that the rows are aligned
    if len(content) > MAX_HEADER_BYTES:
        raise DataError(
            f"the names take {len(content):,} bytes, over {MAX_HEADER_BYTES:,}: embed in parts"
        )
    return len(content).to_bytes(8, "little") + content


def _split_column(
    rows: Path, out: Path, column: str, metadata: Mapping[str, str], num_rows: int
) -> None:
    """Write a file of rows again, with its first column as a tensor of its own."""
    with rows.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    table: NDArray[np.float32] = np.memmap(rows, "<f4", "r", begin).reshape(num_rows, -1)
    matrix, numbers = np.ascontiguousarray(table[:, 1:]), np.ascontiguousarray(table[:, 0])
    header = _header({"embeddings": matrix.shape, column: numbers.shape}, metadata)
    write_private(out, [header, matrix.reshape(-1).data, numbers.data])


def embed_turned(
    backbone: Callable[[Tensor], Tensor], images: Tensor, num_views: int = 1
) -> Tensor:
    """Embeddings of square images and up to 3 of their quarter turns, ``[B, num_views * d]``.

    The cosine of two of them is the mean of the cosines of the turns.
    """
    import torch
    from torch.nn.functional import normalize

    if not 1 <= num_views <= 4:
        raise ConfigError(f"num_views is {num_views}; there are 1 to 4 quarter turns")
    if num_views == 1:
        return backbone(images).float()
    turned = (torch.rot90(images, turn, (2, 3)).contiguous() for turn in range(num_views))
    return torch.cat([normalize(backbone(one).float()) for one in turned], dim=1)


@dataclass(frozen=True)
class FileRow:
    """Outcome for one file: the row of its embedding, or the reason why it has none."""

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
    """Names of all images or recordings under a folder, relative to it, in order."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with files in it")
    if modality not in EXTENSIONS:
        raise ConfigError(f"the model takes {modality}, which are not files; embed them in Python")
    names = []
    for place, _, files in os.walk(folder):
        paths = [Path(place, file) for file in files]
        wanted = [path for path in paths if path.suffix[1:].lower() in EXTENSIONS[modality]]
        names += [path.relative_to(folder).as_posix() for path in wanted]
    if not names:
        known = ", ".join(sorted(EXTENSIONS[modality]))
        raise DataError(f"{folder} has no {modality}; files have to end in one of {known}")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{folder}: the file name {name!r} is not UTF-8; rename it") from error
    return sorted(names)


def embed_files(
    model: Model,
    folder: str | Path,
    names: Sequence[str],
    *,
    flip: str = "none",
    batch_size: int = 64,
    max_corrupt: int = 100,
    progress: Progress | None = None,
) -> EmbeddedFolder:
    """Embed files of ``find_files``; up to ``max_corrupt`` unreadable ones are left out."""
    if batch_size < 1 or max_corrupt < 0:
        raise ConfigError(
            f"batch_size is {batch_size} and max_corrupt {max_corrupt}: give at least 1 and 0"
        )
    folder, rows, files = Path(folder), list[NDArray[np.float32]](), list[FileRow]()
    for start in range(0, len(names), batch_size):
        for name, row, problem in _embed_batch(
            model, folder, names[start : start + batch_size], flip
        ):
            try:
                digest = sha256_of(folder / name)
            except (OSError, DataError):
                digest = ""
            files.append(FileRow(name, None if row is None else len(rows), digest, problem))
            if row is not None:
                rows.append(row)
            num_bad = len(files) - len(rows)
            if num_bad > max_corrupt:
                raise DataError(
                    f"{num_bad} files cannot be embedded and {max_corrupt} may be left out, the "
                    f"last because {problem}; check them, or allow more"
                )
        if progress is not None:
            progress(len(files), len(names))
    if not rows:
        raise DataError(f"none of {len(names)} files can be embedded: {files[-1].problem}")
    return EmbeddedFolder(np.stack(rows), tuple(files))


def _embed_batch(
    model: Model, folder: Path, names: Sequence[str], flip: str
) -> list[tuple[str, Any, str]]:
    """Name, embedding or None, and problem of each file."""
    try:
        rows = model.embed([folder / name for name in names], batch_size=len(names), flip=flip)
        return [(name, row, "") for name, row in zip(names, rows, strict=True)]
    except (DataError, OSError) as error:
        if len(names) == 1:
            return [(names[0], None, str(error))]
    return [found for name in names for found in _embed_batch(model, folder, [name], flip)]


def write_embedding_file(
    path: str | Path,
    keys: Sequence[str],
    matrix: NDArray[np.float32],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named embeddings as ``.safetensors`` or ``.npz``, readable by the owner only."""
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
    texts = {"format": FORMAT, **(metadata or {}), "keys": json.dumps(list(keys))}
    content = np.ascontiguousarray(matrix, "<f4").reshape(-1)
    write_private(path, [_header({"embeddings": matrix.shape}, texts), content.data])


def write_manifest(path: str | Path, files: Iterable[FileRow]) -> None:
    """Write the outcome for every file as CSV, readable by the owner only, without formulas."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for file in files:
        row = "" if file.row is None else file.row
        key, problem = escape_formula(file.key), escape_formula(file.problem)
        writer.writerow([key, row, file.sha256, problem])
    write_private(path, [text.getvalue().encode()])


def check_suffix(path: str | Path) -> Path:
    """Return the path; raise if embeddings cannot be written to its suffix."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} cannot hold embeddings; let it end in {' or '.join(SUFFIXES)}")
    return path


def write_private(path: str | Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file with mode 0600, completely or not at all."""
    with replacing(Path(path)) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
