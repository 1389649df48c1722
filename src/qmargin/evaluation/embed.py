"""Samples to embeddings: a model over images or recordings, into memory or a resumable file."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation.embeddings import EMBEDDINGS_MARK, FORMAT
from qmargin.evaluation.resumable import ResumableFile
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

Rows = NDArray[np.float32]  # [B, d]
FLIPS = ("none", "sum", "both")
IMAGE_SIZE = 112
MAX_HEADER_BYTES = 100_000_000  # what safetensors reads
MAX_IMAGE_BYTES = 1 << 26
SAMPLE_RATE = 16_000
SHORTEST = 2_000  # samples: shorter recordings are repeated, or no network could take them
LONGEST_UTTERANCE = 1_200.0  # seconds
_ROWS_BETWEEN_RECORDS = 1024
_LOOK_AT = 20  # names that decide whether a folder is the right one


class SampleModel(Protocol):
    """Anything that turns samples into embeddings."""

    def embed(self, samples: NDArray[Any], /) -> Any:
        """Embeddings ``[B, d]``, an array or a tensor.

        Samples are RGB images ``[B, H, W, 3]``, or one waveform ``[1, T]`` at 16 kHz in [-1, 1].
        """
        ...


class SampleSet(Protocol):
    """Anything that has images or recordings by number.

    A sample comes with a number, such as its label. A set whose attribute ``column`` names that
    number has it stored beside the embeddings. Samples of a set whose attribute ``max_batch`` is 1
    may differ in shape.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[NDArray[Any], Any]: ...


def path_inside(folder: Path, name: str) -> Path:
    """Path of a file below ``folder``; a list cannot name anything outside.

    Raises:
        CorruptSample: It is elsewhere, or the name is none of a file.
    """
    try:
        path = (folder / name).resolve()
        is_inside = path.is_relative_to(folder.resolve())
    except (OSError, ValueError) as error:
        raise CorruptSample(f"{name[:80]!r} cannot be the name of a file: {error}") from error
    if not is_inside:
        raise CorruptSample(f"{name!r} is outside of {folder}")
    return path


def read_inside(folder: Path, name: str) -> bytes:
    """The bytes of an image below ``folder``.

    Raises:
        CorruptSample: There is no such file, or it is elsewhere.
    """
    path = path_inside(folder, name)
    try:
        return read_regular(path, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: no regular file, or too large
        reason = getattr(error, "strerror", None) or error
        raise CorruptSample(f"{name[:80]!r} cannot be read: {reason}") from error


@dataclass(frozen=True)
class FolderImages:
    """Images of a folder by number, RGB ``size x size``; labels are -1."""

    folder: Path
    names: tuple[str, ...] = field(repr=False)
    size: int = IMAGE_SIZE

    def __post_init__(self) -> None:
        """Refuse a folder that has none of the first images, before a model is asked for any."""
        looked_at = self.names[:_LOOK_AT]
        if not looked_at or any(is_file(self.folder / name) for name in looked_at):
            return
        raise DataError(
            f"{self.folder} has none of the images of the list, such as {looked_at[0]!r}; "
            f"{_where_else(self.folder, Path(looked_at[0]))}"
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        from qmargin.data.images import decode_image, resize_image

        image = decode_image(read_inside(self.folder, self.names[index]))
        return resize_image(image, self.size), -1


def _where_else(folder: Path, name: Path) -> str:
    """What to do about an image that is not in a folder."""
    import glob

    found = sorted(folder.glob(f"{glob.escape(str(name.with_suffix('')))}.*"))
    if found:
        return f"there is {found[0].name!r}: pass --extension {found[0].suffix[1:]}"
    below = sorted(folder.glob(f"*/{glob.escape(str(name))}"))
    if below:
        return f"they are in --images {folder / below[0].relative_to(folder).parts[0]}"
    return "give the folder that the names start in with --images"


@dataclass(frozen=True)
class Recordings:
    """Recordings in a folder by their names in a trial list, with their suffix or without.

    Attributes:
        folder: Nothing outside it is read.
        names: What to read, each once.
        suffix: Added to names that are no file, such as ``".wav"``.
        max_seconds: Longer recordings are refused by their header.
    """

    folder: Path
    names: Sequence[str]
    suffix: str = ".wav"
    max_seconds: float = LONGEST_UTTERANCE
    column: ClassVar[str] = "seconds"
    max_batch: ClassVar[int] = 1

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], float]:
        """Samples and seconds; a very short recording is repeated, its duration is as it was."""
        from qmargin.data.audio import decode_audio

        samples = decode_audio(self._path(self.names[index]), max_seconds=self.max_seconds)
        seconds = len(samples) / SAMPLE_RATE
        if len(samples) < SHORTEST:
            samples = np.tile(samples, -(-SHORTEST // len(samples)))
        return samples, seconds

    def check(self) -> None:
        """Refuse names without a file, before the first one is decoded.

        Raises:
            DataError: With the first of them.
        """
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


def embed_samples(
    model: SampleModel,
    samples: SampleSet,
    *,
    flip: str = "none",
    batch_size: int = 64,
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Rows:
    """Embeddings of all samples in memory, float32 ``[n, d]``.

    Args:
        model: What embeds them.
        samples: RGB images of one size, or recordings.
        flip: ``"none"``: the embedding of the sample; ``"sum"``: plus that of an image's mirror
            image, neither normalised; ``"both"``: one after the other, ``[n, 2 d]``.
        batch_size: Samples that go through the model together; recordings go alone.
        num_workers: Threads that decode.
        progress: Called with the samples done and their number.

    Raises:
        DataError: A sample cannot be read, or its embedding is not finite; the message names it.
    """
    parts: list[Rows] = []
    done = 0
    for block in _embedded(model, samples, 0, _Plan(flip, batch_size, num_workers), str):
        parts.append(block.embeddings)
        done += len(block.embeddings)
        if progress is not None:
            progress(done, len(samples))
    if not parts:
        raise DataError("there are 0 samples to embed: give at least 1")
    return np.concatenate(parts)


def write_embeddings(
    model: SampleModel,
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

    A run that was killed resumes where it was; the finished file is the same, byte for byte, if the
    model's answers are. Only the owner can read it: embeddings of faces and voices are personal
    data. That of recordings also has the tensor ``seconds``.

    Args:
        model: What embeds them.
        samples: RGB images of one size, or recordings.
        out: The file to write, ``.safetensors``.
        keys: A distinct name for every sample; ``samples.names`` without them.
        model_id: Names the model and its weights, such as a hash of them; a part that was begun
            with another is refused.
        flip: As in ``embed_samples``; kept in the file's metadata.
        batch_size: Samples that go through the model together; recordings go alone.
        num_workers: Threads that decode.
        restart: Discard a part that other inputs made.
        progress: Called with the samples done and their number.

    Raises:
        DataError: A sample cannot be read, an embedding is not finite, or a name occurs twice; what
            is done so far is kept.
    """
    out, plan = Path(out), _Plan(flip, batch_size, num_workers)
    names = list(samples.names if keys is None else keys)  # type: ignore[attr-defined]
    _check_keys(out, names, len(samples))
    column: str | None = getattr(samples, "column", None)
    metadata = {"format": FORMAT, "keys": json.dumps(names), "model": model_id}
    if column is None:
        metadata["flip"] = flip
    settings = json.dumps([model_id, flip, batch_size, names])
    fingerprint = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).hexdigest()
    # created before anything is in it, so that nobody else ever reads it
    partial = out.with_name(out.name + ".partial")
    os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    with ResumableFile(out, fingerprint, restart=restart) as file:
        content: list[bytes] = []
        num_rows = 0
        for block in _embedded(model, samples, file.num_done, plan, names.__getitem__):
            rows = block.embeddings
            if column is not None:  # kept in front of each row until all of them are known
                rows = np.concatenate([block.numbers[:, None], rows], axis=1)
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


@dataclass(frozen=True)
class _Plan:
    """How samples go through the model."""

    flip: str
    batch_size: int
    num_workers: int

    def __post_init__(self) -> None:
        if self.flip not in FLIPS:
            raise ConfigError(f"flip {self.flip!r} is unknown: choose one of {', '.join(FLIPS)}")
        for name in ("batch_size", "num_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1: give at least 1")


class _Block(NamedTuple):
    """Embeddings of consecutive samples, and the number that comes with each."""

    embeddings: Rows
    numbers: Rows


class _Batch(NamedTuple):
    first: int
    samples: NDArray[Any]
    numbers: list[Any]


def _embedded(
    model: SampleModel, samples: SampleSet, start: int, plan: _Plan, name_of: Callable[[int], str]
) -> Iterator[_Block]:
    """Embeddings from sample ``start`` on, in order."""
    width = None
    for batch in _batches(samples, start, plan, name_of):
        rows = _answer(model, batch.samples)
        if plan.flip != "none":
            mirrored = _answer(model, np.ascontiguousarray(batch.samples[:, :, ::-1]))
            both = plan.flip == "both"
            rows = np.concatenate([rows, mirrored], axis=1) if both else rows + mirrored
        is_bad = ~np.isfinite(rows).all(axis=1)
        if is_bad.any():
            name = name_of(batch.first + int(np.argmax(is_bad)))
            raise DataError(
                f"the embedding of {name!r} is not finite: look at the sample, and at the weights "
                "and the precision of the model"
            )
        if width is not None and rows.shape[1] != width:
            raise ShapeError(
                f"the model gave embeddings of width {rows.shape[1]} after {width}: one is needed"
            )
        width = rows.shape[1]
        yield _Block(rows, np.array(batch.numbers, np.float32))


def _batches(
    samples: SampleSet, start: int, plan: _Plan, name_of: Callable[[int], str]
) -> Iterator[_Batch]:
    """Batches in order, decoded by threads while the model works; few are held at once."""
    size = min(plan.batch_size, getattr(samples, "max_batch", plan.batch_size))
    firsts = iter(range(start, len(samples), size))
    jobs: deque[Future[_Batch]] = deque()
    with ThreadPoolExecutor(plan.num_workers) as pool:
        try:
            while True:
                while len(jobs) <= plan.num_workers and (first := next(firsts, -1)) >= 0:
                    indices = range(first, min(first + size, len(samples)))
                    jobs.append(pool.submit(_load, samples, indices, name_of))
                if not jobs:
                    return
                yield jobs.popleft().result()
        finally:
            for job in jobs:
                job.cancel()


def _load(samples: SampleSet, indices: range, name_of: Callable[[int], str]) -> _Batch:
    loaded: list[NDArray[Any]] = []
    numbers: list[Any] = []
    for index in indices:
        try:
            sample, number = samples[index]
        except CorruptSample as error:
            raise DataError(
                f"{name_of(index)!r} cannot be embedded ({error}): repair or remove it; "
                "what is done so far is kept"
            ) from error
        sample = np.asarray(sample)
        is_image = sample.ndim == 3 and sample.shape[2] == 3 and sample.dtype == np.uint8
        if not is_image and not (sample.ndim == 1 and sample.dtype.kind == "f"):
            raise ShapeError(
                f"{name_of(index)!r} is a {sample.dtype} array of shape {sample.shape}: give RGB "
                "uint8 [H, W, 3], or a waveform of floats [T]"
            )
        if loaded and sample.shape != loaded[0].shape:
            raise ShapeError(
                f"{name_of(index)!r} has the shape {sample.shape}, but {name_of(indices[0])!r} has "
                f"{loaded[0].shape}: align all images to one size first"
            )
        loaded.append(sample)
        numbers.append(number)
    return _Batch(indices[0], np.stack(loaded), numbers)


def _answer(model: SampleModel, batch: NDArray[Any]) -> Rows:
    answer = model.embed(batch)
    if hasattr(answer, "detach"):  # a tensor; NumPy has no bfloat16
        answer = answer.detach().float().cpu().numpy()
    rows = np.asarray(answer, dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(batch) or rows.shape[1] == 0:
        raise ShapeError(
            f"the model gave the shape {rows.shape} for {len(batch)} samples: "
            f"({len(batch)}, d) is needed"
        )
    return rows


def _check_keys(out: Path, keys: Sequence[str], num_samples: int) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out} does not end in .safetensors: give it that suffix")
    if num_samples == 0:
        raise DataError("there are 0 samples to embed: give at least 1")
    if len(keys) != num_samples:
        raise ShapeError(f"there are {len(keys):,} keys for {num_samples:,} samples: give one each")
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise DataError(f"the key {key!r} names two samples: give every sample its own")
        seen.add(key)


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
            f"the names of the samples take {len(content):,} bytes, a safetensors header holds "
            f"{MAX_HEADER_BYTES:,}: embed in several parts"
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
    """Embeddings of images and their quarter turns, ``[B, num_views * d]``.

    The cosine of two of them is the mean of the cosines of the turns. Where turns are identities
    of their own in training, a network judges each anew, and errs less in the mean.

    Args:
        backbone: Images ``[B, c, h, w]`` to embeddings ``[B, d]``.
        images: Square ones: others have another shape after a turn.
        num_views: Of each image, at most 4; with 1, its embedding as it is.

    Examples:
        >>> import torch
        >>> images = torch.eye(2)[None, None]
        >>> embed_turned(lambda one: one.flatten(1), images, 2)
        tensor([[0.7071, 0.0000, 0.0000, 0.7071, 0.0000, 0.7071, 0.7071, 0.0000]])
    """
    import torch
    from torch.nn.functional import normalize

    if not 1 <= num_views <= 4:
        raise ConfigError(f"num_views is {num_views}; there are 1 to 4 quarter turns")
    if num_views == 1:
        return backbone(images).float()
    turned = (torch.rot90(images, turn, (2, 3)).contiguous() for turn in range(num_views))
    return torch.cat([normalize(backbone(one).float()) for one in turned], dim=1)


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
    texts = {"format": FORMAT, **(metadata or {}), "keys": json.dumps(list(keys))}
    content = np.ascontiguousarray(matrix, "<f4").reshape(-1)
    write_private(path, [_header({"embeddings": matrix.shape}, texts), content.data])


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
