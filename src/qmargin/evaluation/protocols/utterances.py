"""Whole recordings to embeddings, with their durations, in a file that survives a kill."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qmargin.data.audio import decode_audio
from qmargin.data.audio_index import indexed_seconds
from qmargin.data.index import SUFFIX as INDEX_SUFFIX
from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation.embed import FORMAT
from qmargin.evaluation.resuming import ResumableFile
from qmargin.evaluation.subjects import read_mapping
from qmargin.files import Progress, check_regular, is_file, replacing

Samples = NDArray[np.float32]  # [T]
SAMPLE_RATE = 16_000
SHORTEST = 2_000  # samples: shorter recordings are repeated, or no network could take them
LONGEST = 1_200.0  # seconds
_ROWS_BETWEEN_RECORDS = 256


class SpeechModel(Protocol):
    """Anything that turns waveforms into embeddings."""

    def embed(self, waveforms: list[Samples], /) -> Any:
        """Embeddings ``[B, d]``, an array or a tensor, of waveforms at 16 kHz in [-1, 1]."""
        ...


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
    max_seconds: float = LONGEST

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Samples, float]:
        """Samples and seconds; a very short recording is repeated, its duration is as it was."""
        samples = decode_audio(self._path(self.names[index]), max_seconds=self.max_seconds)
        seconds = len(samples) / SAMPLE_RATE
        if len(samples) < SHORTEST:
            samples = np.tile(samples, -(-SHORTEST // len(samples)))
        return samples, seconds

    def _path(self, name: str) -> Path:
        root = self.folder.resolve()
        for candidate in (name, name + self.suffix):
            try:
                path = (root / candidate).resolve()
            except (OSError, ValueError) as error:
                raise CorruptSample(f"{name[:80]!r} is no name of a file ({error})") from error
            if not path.is_relative_to(root):
                raise CorruptSample(f"it lies outside {self.folder}")
            if is_file(path):
                return path
        raise CorruptSample(f"there is no such file in {self.folder}")


def embed_utterances(
    model: SpeechModel,
    recordings: Recordings,
    out: str | Path,
    *,
    model_id: str,
    num_workers: int = 2,
    restart: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Embed every recording as a whole into a safetensors file that ``read_embeddings`` reads.

    The file also has the tensor ``seconds``. A run that was killed goes on where it was. Only the
    owner can read the file: embeddings of voices are personal data.

    Args:
        model: What embeds them, one at a time.
        recordings: What to embed.
        out: The file to write, ``.safetensors``.
        model_id: Names the model and its weights; a part that was begun with another is refused.
        num_workers: Threads that decode.
        restart: Throw away a part that other inputs made.
        progress: Called with the recordings done and their number.

    Raises:
        DataError: A recording cannot be read, or its embedding is not finite; the message names it,
            and what is done so far is kept.
    """
    out = Path(out)
    if out.suffix != ".safetensors" or num_workers < 1:
        raise ConfigError(
            f"out is {out} and num_workers {num_workers}: the first must end in .safetensors, the "
            "second be at least 1"
        )
    if not len(recordings):
        raise DataError("there are 0 recordings to embed: give at least 1")
    rows = out.with_name(out.name + ".rows")
    # created before anything is in it, so that nobody else ever reads it
    os.close(os.open(rows.with_name(rows.name + ".partial"), os.O_CREAT | os.O_WRONLY, 0o600))
    settings = json.dumps([model_id, recordings.max_seconds, list(recordings.names)])
    fingerprint = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).hexdigest()
    with ResumableFile(rows, fingerprint, restart=restart) as file:
        pending: list[bytes] = []
        for row in _embedded(model, recordings, file.num_done, num_workers):
            pending.append(row.astype("<f4").tobytes())
            done = file.num_done + len(pending)
            if len(pending) == _ROWS_BETWEEN_RECORDS or done == len(recordings):
                file.append(b"".join(pending), len(pending))
                pending = []
            if progress is not None:
                progress(done, len(recordings))
        _write(out, file.partial, recordings.names, model_id)
        for part in (file.record, file.partial):
            part.unlink()
    return out


def _embedded(
    model: SpeechModel, recordings: Recordings, start: int, num_workers: int
) -> Iterator[NDArray[np.float32]]:
    """Rows of seconds and embedding, ``[1 + d]``, from recording ``start`` on."""
    width = None
    for index, samples, seconds in _decoded(recordings, start, num_workers):
        answer = model.embed([samples])
        if hasattr(answer, "detach"):  # a tensor; NumPy has no bfloat16
            answer = answer.detach().float().cpu().numpy()
        embedding = np.asarray(answer, dtype=np.float32)
        width = width or embedding.shape[-1]
        if embedding.shape != (1, width):
            raise ShapeError(
                f"the model gave the shape {embedding.shape} for one recording: (1, d) is needed, "
                "with one d for all"
            )
        if not np.isfinite(embedding).all():
            raise DataError(
                f"the embedding of {recordings.names[index]!r} is not finite: look at the "
                "recording, or at the weights of the model"
            )
        yield np.concatenate([np.array([seconds], np.float32), embedding[0]])


def _decoded(
    recordings: Recordings, start: int, num_workers: int
) -> Iterator[tuple[int, Samples, float]]:
    """Recordings in order, decoded by threads while the model works; few are held at once."""
    indices = iter(range(start, len(recordings)))
    waiting: deque[tuple[int, Future[tuple[Samples, float]]]] = deque()
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            while True:
                while len(waiting) <= num_workers and (index := next(indices, -1)) >= 0:
                    waiting.append((index, pool.submit(recordings.__getitem__, index)))
                if not waiting:
                    return
                index, job = waiting.popleft()
                try:
                    samples, seconds = job.result()
                except CorruptSample as error:
                    raise DataError(
                        f"{recordings.names[index]!r} cannot be embedded ({error}): repair it or "
                        "take its trials out; what is done so far is kept"
                    ) from error
                yield index, samples, seconds
        finally:
            for _, job in waiting:
                job.cancel()


def _write(out: Path, rows: Path, names: Sequence[str], model_id: str) -> None:
    """A safetensors file by hand: the library orders its metadata differently every time."""
    table = np.fromfile(rows, dtype="<f4").reshape(len(names), -1)
    tensors = {"embeddings": table[:, 1:], "seconds": table[:, 0]}
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "keys": json.dumps(list(names)), "model": model_id},
    }
    end = 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with replacing(out) as temporary:
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(content).to_bytes(8, "little") + content)
            for values in tensors.values():
                file.write(values.tobytes())
            file.flush()
            os.fsync(file.fileno())


def read_seconds(path: str | Path) -> dict[str, float]:
    """Durations by name: of ``embed_utterances``, of an index, or of lines ``utterance seconds``.

    Raises:
        DataError: The file has no durations, or one that is not a positive number.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return _stored_seconds(path)
    if path.suffix == INDEX_SUFFIX:
        return _checked_seconds(path, indexed_seconds(path))
    mapping, _ = read_mapping(path, role="durations")
    seconds = {}
    for name, text in mapping.items():
        try:
            seconds[name] = float(text)
        except ValueError as error:
            raise DataError(f"{path}: the duration of {name!r} is {text!r}, no number") from error
    return _checked_seconds(path, seconds)


def _stored_seconds(path: Path) -> dict[str, float]:
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            stored = set(file.keys())
            values = file.get_tensor("seconds").tolist() if "seconds" in stored else []
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file ({error}): was it cut short?") from error
    try:
        keys = json.loads(metadata.get("keys", "[]"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the metadata entry keys is not JSON ({error})") from error
    is_good = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not values or not is_good or not isinstance(values, list) or len(values) != len(keys):
        raise DataError(f"{path} has no durations: give a file of lines `utterance seconds`")
    return _checked_seconds(path, dict(zip(keys, values, strict=True)))


def _checked_seconds(path: Path, seconds: dict[str, float]) -> dict[str, float]:
    for name, value in seconds.items():
        if not isinstance(value, int | float) or not 0.0 < value < np.inf:
            raise DataError(f"{path}: the duration of {name!r} is {value}: give positive seconds")
    return seconds
