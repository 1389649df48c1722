"""Images to embeddings: a model over a set of images, into memory or a file that can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, CorruptSample, DataError, ShapeError
from qmargin.evaluation.embeddings import Embeddings, read_embeddings, weights_of
from qmargin.evaluation.result import Source
from qmargin.evaluation.resuming import ResumableFile
from qmargin.files import Progress, open_regular, sha256_of

Images = NDArray[np.uint8]  # [B, H, W, 3]
Rows = NDArray[np.float32]  # [B, d]
FLIPS = ("none", "sum", "both")
FORMAT = "qmargin-embeddings"
EMBEDDINGS_MARK = f'"format": "{FORMAT}"'
MAX_HEADER_BYTES = 100_000_000  # what safetensors reads
_ROWS_BETWEEN_RECORDS = 1024
_ROWS_CHECKED = 8192  # at once


class ImageModel(Protocol):
    """Anything that turns RGB images into embeddings."""

    def embed(self, images: Images, /) -> Any:
        """Embeddings ``[B, d]``, an array or a tensor, of images ``[B, H, W, 3]``."""
        ...


class ImageSet(Protocol):
    """Anything that has images by number, each with a label that is not used here."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Images, Any]: ...


def embed_images(
    model: ImageModel,
    images: ImageSet,
    *,
    flip: str = "none",
    batch_size: int = 64,
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Rows:
    """Embeddings of all images in memory, float32 ``[n, d]``.

    Args:
        model: What embeds them.
        images: RGB images of one size.
        flip: ``"none"``: the embedding of the image; ``"sum"``: plus that of its mirror image,
            neither normalised; ``"both"``: one after the other, ``[n, 2 d]``.
        batch_size: Images that go through the model together.
        num_workers: Threads that decode.
        progress: Called with the images done and their number.

    Raises:
        DataError: An image cannot be read, or its embedding is not finite; the message names it.
    """
    blocks = _embedded(model, images, 0, _Plan(flip, batch_size, num_workers), str)
    parts: list[Rows] = []
    done = 0
    for block in blocks:
        parts.append(block)
        done += len(block)
        if progress is not None:
            progress(done, len(images))
    if not parts:
        raise DataError("there are 0 images to embed: give at least 1")
    return np.concatenate(parts)


def write_embeddings(
    model: ImageModel,
    images: ImageSet,
    out: str | Path,
    *,
    keys: Sequence[str],
    model_id: str,
    flip: str = "none",
    batch_size: int = 64,
    num_workers: int = 2,
    restart: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Embed all images into a safetensors file that ``read_embeddings`` reads.

    A run that was killed goes on where it was; the finished file is the same, byte for byte, if the
    model's answers are. Only the owner can read it: embeddings of faces are personal data.

    Args:
        model: What embeds them.
        images: RGB images of one size.
        out: The file to write, ``.safetensors``.
        keys: A distinct name for every image.
        model_id: Names the model and its weights, such as a hash of them; a part that was begun
            with another is refused.
        flip: As in ``embed_images``; kept in the file's metadata.
        batch_size: Images that go through the model together.
        num_workers: Threads that decode.
        restart: Throw away a part that other inputs made.
        progress: Called with the images done and their number.

    Raises:
        DataError: An image cannot be read, an embedding is not finite, or a name occurs twice.
    """
    out, plan = Path(out), _Plan(flip, batch_size, num_workers)
    _check_keys(out, keys, len(images))
    partial = out.with_name(out.name + ".partial")
    os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    settings = json.dumps([model_id, flip, batch_size, list(keys)])
    fingerprint = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).hexdigest()
    with ResumableFile(out, fingerprint, restart=restart) as file:
        content: list[bytes] = []
        num_rows = 0
        blocks = _embedded(model, images, file.num_done, plan, keys.__getitem__)
        for block in blocks:
            if file.num_done == 0 and not content:
                content.append(_header(keys, block.shape[1], model_id, flip))
            content.append(block.astype("<f4").tobytes())
            num_rows += len(block)
            done = file.num_done + num_rows
            if num_rows >= _ROWS_BETWEEN_RECORDS or done == len(images):
                file.append(b"".join(content), num_rows)
                content, num_rows = [], 0
            if progress is not None:
                progress(done, len(images))
        file.finish()
    return out


def map_embeddings(path: str | Path) -> Embeddings:
    """Embeddings of a file, without copying those that ``write_embeddings`` wrote.

    Their rows stay on the disk until they are used, so a million of them take no memory. Other
    files are read by ``read_embeddings``.

    Raises:
        DataError: The file is damaged, or a value is not finite.
    """
    path = Path(path)
    if path.suffix.lower() != ".safetensors" or "keys" not in _metadata(path):
        return read_embeddings(path)
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    tensor, keys = header.get("embeddings"), _names(header["__metadata__"]["keys"])
    is_ours = tensor is not None and tensor["dtype"] == "F32" and len(tensor["shape"]) == 2
    if not is_ours or not keys or len(set(keys)) != tensor["shape"][0]:
        return read_embeddings(path)  # which says what is wrong with it
    begin = 8 + length + tensor["data_offsets"][0]
    rows: NDArray[Any] = np.memmap(path, "<f4", "r", begin, tuple(tensor["shape"]))
    for first in range(0, len(rows), _ROWS_CHECKED):
        is_bad = ~np.isfinite(rows[first : first + _ROWS_CHECKED]).all(axis=1)
        if is_bad.any():
            row = first + int(np.argmax(is_bad))
            raise DataError(f"{path}: the embedding of {keys[row]!r} (number {row}) is not finite")
    weights = weights_of(header["__metadata__"])
    return Embeddings(tuple(keys), rows, Source(str(path), sha256_of(path), "embeddings"), weights)


def _names(text: str) -> list[str]:
    """A JSON list of texts, empty where it is something else."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_list else []


def stored_flip(path: str | Path) -> str | None:
    """How mirror images entered a file of embeddings; None where it does not say."""
    is_known = Path(path).suffix.lower() == ".safetensors"
    return _metadata(Path(path)).get("flip") if is_known else None


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file ({error}): was it cut short?") from error


class _Plan:
    """How images go through the model, checked."""

    def __init__(self, flip: str, batch_size: int, num_workers: int) -> None:
        if flip not in FLIPS:
            raise ConfigError(f"flip {flip!r} is unknown: choose one of {', '.join(FLIPS)}")
        for name, value in (("batch_size", batch_size), ("num_workers", num_workers)):
            if value < 1:
                raise ConfigError(f"{name}={value} is below 1: give at least 1")
        self.flip, self.batch_size, self.num_workers = flip, batch_size, num_workers


def _embedded(
    model: ImageModel, images: ImageSet, start: int, plan: _Plan, name_of: Callable[[int], str]
) -> Iterator[Rows]:
    """Blocks of rows from image ``start`` on, in order."""
    width = None
    for first, batch in _batches(images, start, plan, name_of):
        rows = _answer(model, batch)
        if plan.flip != "none":
            mirrored = _answer(model, np.ascontiguousarray(batch[:, :, ::-1]))
            both = plan.flip == "both"
            rows = np.concatenate([rows, mirrored], axis=1) if both else rows + mirrored
        is_bad = ~np.isfinite(rows).all(axis=1)
        if is_bad.any():
            name = name_of(first + int(np.argmax(is_bad)))
            raise DataError(
                f"the embedding of {name!r} is not finite: is the model trained, and in float32?"
            )
        if width is not None and rows.shape[1] != width:
            raise ShapeError(
                f"the model gave embeddings of width {rows.shape[1]} after {width}: one is needed"
            )
        width = rows.shape[1]
        yield rows


def _batches(
    images: ImageSet, start: int, plan: _Plan, name_of: Callable[[int], str]
) -> Iterator[tuple[int, Images]]:
    """Batches in order, decoded by threads while the model works; few are held at once."""
    firsts = iter(range(start, len(images), plan.batch_size))
    pending: deque[tuple[int, Future[Images]]] = deque()
    with ThreadPoolExecutor(plan.num_workers) as pool:
        try:
            while True:
                while len(pending) <= plan.num_workers and (first := next(firsts, -1)) >= 0:
                    stop = min(first + plan.batch_size, len(images))
                    job = pool.submit(_load, images, range(first, stop), name_of)
                    pending.append((first, job))
                if not pending:
                    return
                first, job = pending.popleft()
                yield first, job.result()
        finally:
            for _, job in pending:
                job.cancel()


def _load(images: ImageSet, indices: range, name_of: Callable[[int], str]) -> Images:
    loaded: list[Images] = []
    for index in indices:
        try:
            image = np.asarray(images[index][0])
        except CorruptSample as error:
            raise DataError(
                f"{name_of(index)!r} cannot be embedded ({error}): repair or remove it; "
                "what is done so far is kept"
            ) from error
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ShapeError(
                f"{name_of(index)!r} is a {image.dtype} array of shape {image.shape}: "
                "a model takes RGB uint8 [H, W, 3]"
            )
        if loaded and image.shape != loaded[0].shape:
            raise ShapeError(
                f"{name_of(index)!r} has the shape {image.shape}, but {name_of(indices[0])!r} has "
                f"{loaded[0].shape}: align all images to one size first"
            )
        loaded.append(image)
    return np.stack(loaded)


def _answer(model: ImageModel, batch: Images) -> Rows:
    answer = model.embed(batch)
    if hasattr(answer, "detach"):  # a tensor; NumPy has no bfloat16
        answer = answer.detach().float().cpu().numpy()
    rows = np.asarray(answer, dtype=np.float32)
    if rows.ndim != 2 or len(rows) != len(batch) or rows.shape[1] == 0:
        raise ShapeError(
            f"the model gave the shape {rows.shape} for {len(batch)} images: "
            f"({len(batch)}, d) is needed"
        )
    return rows


def _check_keys(out: Path, keys: Sequence[str], num_images: int) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out} does not end in .safetensors: give it that suffix")
    if num_images == 0:
        raise DataError("there are 0 images to embed: give at least 1")
    if len(keys) != num_images:
        raise ShapeError(f"there are {len(keys):,} keys for {num_images:,} images: give one each")
    if len(set(keys)) < len(keys):
        seen: set[str] = set()
        again = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DataError(f"the key {again!r} names two images: give every image its own")


def _header(keys: Sequence[str], width: int, model_id: str, flip: str) -> bytes:
    """The start of a safetensors file whose one tensor follows row by row."""
    shape = [len(keys), width]
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * len(keys) * width]}
    metadata = {"format": FORMAT, "keys": json.dumps(list(keys)), "model": model_id, "flip": flip}
    content = json.dumps({"__metadata__": metadata, "embeddings": tensor}).encode()
    content += b" " * (-len(content) % 8)  # so that the rows are aligned
    if len(content) > MAX_HEADER_BYTES:
        raise DataError(
            f"the names of {len(keys):,} images take {len(content):,} bytes, a safetensors header "
            f"holds {MAX_HEADER_BYTES:,}: embed in several parts"
        )
    return len(content).to_bytes(8, "little") + content
