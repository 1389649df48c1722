"""Embeddings by name, from NPZ, safetensors and Kaldi archives."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.npz import read_npz
from qmargin.errors import DataError
from qmargin.evaluation.columns import (
    MAX_LINE_BYTES,
    first_row,
    numbered_lines,
    read_mapping,
    text_of,
)
from qmargin.evaluation.result import Source
from qmargin.files import check_regular, is_file, open_regular, sha256_of

Entry = tuple[str, NDArray[Any], str]  # name, vector [d], place in the file for messages
FORMAT = "qmargin-embeddings"
EMBEDDINGS_MARK = f'"format": "{FORMAT}"'
COLLAPSED = 1e-4  # embeddings with a mean cosine this near to 1 have collapsed
_ROWS_LOOKED_AT = 4096
_ROWS_CHECKED = 8192  # at once
_READERS = (".npz", ".safetensors", ".ark", ".scp")
_TYPES = {b"FV": "<f4", b"DV": "<f8", b"FM": "<f4", b"DM": "<f8"}
_MAX_KEY_BYTES = 4096
_OFFSET = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Embeddings:
    """A matrix with a distinct name for every row."""

    keys: tuple[str, ...]  # [n]
    matrix: NDArray[Any]  # float32 or float64 [n, d], finite
    source: Source
    weights_sha256: str | None = None  # of the model, where the file names it

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def embedding_dim(self) -> int:
        """``d``."""
        return int(self.matrix.shape[1])


def read_embeddings(path: str | Path, *, role: str = "embeddings") -> Embeddings:
    """Read embeddings and their names.

    - ``.npz``: the arrays ``keys`` ``[n]`` and ``embeddings`` ``[n, d]``, or one array ``[d]`` per
      name;
    - ``.safetensors``: a tensor ``embeddings`` ``[n, d]`` with the names as a JSON list in the
      metadata entry ``keys``, or one tensor ``[d]`` per name;
    - ``.ark``: a Kaldi archive, binary or text, of vectors or of matrices with one row;
    - ``.scp``: a Kaldi script file that points into archives. Commands in it are refused.

    ``role`` is the purpose of the file in the evaluation.
    """
    path = Path(path)
    suffix, metadata = path.suffix.lower(), dict[str, str]()
    if suffix not in _READERS:
        raise DataError(f"{path} cannot hold embeddings: it has to end in {', '.join(_READERS)}")
    check_regular(path)
    if suffix == ".npz":
        arrays = read_npz(path)
        keys, matrix = _from_arrays(path, arrays)
        metadata = {"model": str(arrays["model"])} if "model" in arrays else {}
    elif suffix == ".safetensors":
        arrays, metadata = _open_safetensors(path)
        stored = _stored_keys(path, metadata) if "keys" in metadata else None
        keys, matrix = _from_arrays(path, arrays, stored)
    else:
        keys, matrix = _stacked(path, read_ark(path) if suffix == ".ark" else read_scp(path))
    if matrix.shape[1] == 0 or not keys:
        raise DataError(f"{path} has embeddings of the shape {matrix.shape}: nothing to compare")
    seen: dict[str, int] = {}
    for row, key in enumerate(keys):
        if seen.setdefault(key, row) != row:
            raise DataError(
                f"{path}: the name {key!r} has two embeddings, number {seen[key]} and {row}"
            )
    return _embeddings(path, keys, matrix, metadata, role)


def _embeddings(
    path: Path, keys: Sequence[str], matrix: NDArray[Any], metadata: Mapping[str, str], role: str
) -> Embeddings:
    """Embeddings that are all finite, and the weights that made them where they are named."""
    for first in range(0, len(matrix), _ROWS_CHECKED):
        bad = first_row(~np.isfinite(matrix[first : first + _ROWS_CHECKED]).all(axis=1))
        if bad is not None:
            row = first + bad
            raise DataError(f"{path}: the embedding of {keys[row]!r} (number {row}) is not finite")
    model, source = metadata.get("model", ""), Source(str(path), sha256_of(path), role)
    weights = model if re.fullmatch("[0-9a-f]{64}", model) else None
    return Embeddings(tuple(keys), matrix, source, weights)


def map_embeddings(path: str | Path) -> Embeddings:
    """Embeddings of a file; those of ``write_embeddings`` are memory-mapped."""
    path = Path(path)
    if path.suffix.lower() != ".safetensors":
        return read_embeddings(path)
    _, metadata = _open_safetensors(path, ())  # which checks that the file is whole
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        tensor = json.loads(file.read(length)).get("embeddings")
    is_ours = tensor is not None and tensor["dtype"] == "F32" and len(tensor["shape"]) == 2
    keys = _stored_keys(path, metadata)
    if not is_ours or not keys or len(set(keys)) != tensor["shape"][0]:
        return read_embeddings(path)  # which reports the problem
    begin = 8 + length + tensor["data_offsets"][0]
    rows: NDArray[Any] = np.memmap(path, "<f4", "r", begin, tuple(tensor["shape"]))
    return _embeddings(path, keys, rows, metadata, "embeddings")


def stored_flip(path: str | Path) -> str | None:
    """How a file of embeddings uses mirror images; None if it does not say."""
    is_known = Path(path).suffix.lower() == ".safetensors"
    return _open_safetensors(Path(path), ())[1].get("flip") if is_known else None


def read_seconds(path: str | Path) -> dict[str, float]:
    """Durations by name, of ``write_embeddings``, an index, or lines ``utterance seconds``."""
    from qmargin.data.index import SUFFIX as INDEX_SUFFIX
    from qmargin.data.index import indexed_seconds

    path = Path(path)
    seconds: Mapping[str, Any]
    if path.suffix == ".safetensors":
        tensors, metadata = _open_safetensors(path, ("seconds",))
        keys, values = _stored_keys(path, metadata), tensors.get("seconds", np.empty(0))
        if not keys or values.shape != (len(keys),):
            raise DataError(f"{path} has no durations: give a file of lines `utterance seconds`")
        seconds = dict(zip(keys, values.tolist(), strict=True))
    elif path.suffix == INDEX_SUFFIX:
        seconds = indexed_seconds(path)
    else:
        seconds, _ = read_mapping(path, role="durations")
    found = {}
    for name, value in seconds.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            found[name] = np.nan
        if not 0.0 < found[name] < np.inf:
            raise DataError(f"{path}: the duration of {name!r} is {value!r}: give positive seconds")
    return found


def collapse_note(matrix: NDArray[Any]) -> str | None:
    """Note on embeddings that nearly coincide, from at most some thousand rows; or None."""
    rows = np.asarray(matrix[:: max(1, len(matrix) // _ROWS_LOOKED_AT)], np.float64)
    lengths = np.sqrt(np.sum(rows * rows, axis=1, keepdims=True))
    rows = rows[lengths[:, 0] > 0] / lengths[lengths[:, 0] > 0]
    if len(rows) < 2:
        return None
    total = rows.sum(axis=0)
    cosine = float((total @ total - len(rows)) / (len(rows) * (len(rows) - 1)))
    if cosine < 1.0 - COLLAPSED:
        return None
    return (
        f"embeddings have collapsed: the mean cosine of {len(rows):,} of them is {cosine:.7g}, so "
        "subjects cannot be told apart; check the training run, or the inputs"
    )


def _from_arrays(
    path: Path, arrays: dict[str, NDArray[Any]], keys: Sequence[Any] | None = None
) -> tuple[list[str], NDArray[Any]]:
    """One matrix and the names of its rows, or one vector per name."""
    if "keys" in arrays:
        keys = np.atleast_1d(arrays["keys"]).tolist()
    if "embeddings" in arrays and keys is not None:
        matrix = arrays["embeddings"]
        if matrix.ndim != 2 or len(matrix) != len(keys):
            raise DataError(
                f"{path}: embeddings have the shape {matrix.shape}: {len(keys)} keys need "
                f"({len(keys)}, d)"
            )
        return [_text(path, key) for key in keys], _as_float(path, matrix)
    if "keys" in arrays or (arrays.keys() == {"embeddings"} and arrays["embeddings"].ndim == 2):
        raise DataError(f"{path}: one of embeddings and keys is missing: give both")
    return _stacked(path, [(name, array, repr(name)) for name, array in arrays.items()])


def _text(path: Path, key: Any) -> str:
    if isinstance(key, bytes):
        key = text_of(key, str(path))
    if not isinstance(key, str):
        raise DataError(f"{path}: the key {key!r} is a {type(key).__name__}, not a text")
    return key


def _open_safetensors(
    path: Path, names: Sequence[str] | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Tensors of these names, all of them without names, and the metadata."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(path, framework="np" if names == () else "pt") as file:
            metadata = dict(file.metadata() or {})
            stored = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in stored}
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file ({error}): was it cut short?") from error
    arrays = {  # NumPy has no bfloat16
        name: (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
        for name, tensor in tensors.items()
    }
    return arrays, metadata


def _stored_keys(path: Path, metadata: Mapping[str, str]) -> list[str]:
    """Names of the rows of a safetensors file."""
    try:
        keys = json.loads(metadata.get("keys", "[]"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the metadata entry keys is not JSON ({error})") from error
    if not isinstance(keys, list):
        raise DataError(f"{path}: the metadata entry keys is not a list of names")
    return [_text(path, key) for key in keys]


def _stacked(path: Path, named: list[Entry]) -> tuple[list[str], NDArray[Any]]:
    """Vectors of one width as a matrix."""
    if not named:
        raise DataError(f"{path} has no embeddings: it needs at least one")
    first, width = named[0][0], named[0][1].size
    for key, vector, place in named:
        if vector.ndim != 1:
            raise DataError(
                f"{path}, {place}: {key!r} has the shape {vector.shape}: give one vector"
            )
        if vector.size != width:
            raise DataError(
                f"{path}, {place}: {key!r} has {vector.size} values, but {first!r} has {width}: "
                "use one model"
            )
    matrix = np.stack([vector for _, vector, _ in named])
    return [key for key, _, _ in named], _as_float(path, matrix)


def _as_float(path: Path, matrix: NDArray[Any]) -> NDArray[Any]:
    if matrix.dtype.kind not in "fiu":
        raise DataError(f"{path}: embeddings are {matrix.dtype}, not numbers")
    is_small = matrix.dtype in (np.float16, np.float32)
    return matrix.astype(np.float32 if is_small else np.float64, copy=False)


def read_ark(path: str | Path) -> list[Entry]:
    """Every vector of a Kaldi archive: name, values, place in the file."""
    entries: list[Entry] = []
    with open_regular(path) as file:
        while True:
            place = f"byte {file.tell()}"
            key = _read_key(file, path, place)
            if key is None:
                return entries
            entries.append((key, _read_value(file, f"{path}, {place}: {key!r}"), place))


def read_scp(path: str | Path) -> list[Entry]:
    """Every vector that a script file points to: lines of ``key archive:offset``."""
    return [_pointed(path, f"line {number}", line) for number, line in numbered_lines(path)]


def _pointed(path: str | Path, place: str, line: bytes) -> Entry:
    where = f"{path}, {place}"
    text = text_of(line, where)
    if "|" in text:
        raise DataError(f"{where}: an entry that runs a command is refused: give archives")
    key, _, target = text.partition(" ")
    archive, _, offset = target.strip().rpartition(":")
    if not archive or not _OFFSET.fullmatch(offset):
        raise DataError(f"{where}: {text[:80]!r} is not `key archive:offset`")
    # Kaldi means the working folder; files that moved keep together
    found = next(filter(is_file, (Path(archive), Path(path).parent / archive)), None)
    if found is None:
        raise DataError(f"{where}: the archive {archive[:80]!r} does not exist, or is not a file")
    with open_regular(found) as file:
        size = file.seek(0, 2)
        if int(offset) >= size:
            raise DataError(f"{where}: the offset is {offset}, and {archive!r} has {size:,} bytes")
        file.seek(int(offset))
        return key, _read_value(file, f"{where}: {key!r} in {archive}:{offset}"), place


def _read_key(file: BinaryIO, path: str | Path, place: str) -> str | None:
    """The name before the next value; None at the end of the file."""
    key = bytearray()
    while (byte := file.read(1)) not in (b"", b" ", b"\t"):
        if byte == b"\n" and not key:
            continue
        if byte == b"\n" or len(key) > _MAX_KEY_BYTES:
            raise DataError(f"{path}, {place}: no value follows {bytes(key[:60])!r}: is it an ark?")
        key += byte
    if not key and not byte:
        return None
    if not key or not byte:
        raise DataError(f"{path}, {place}: the archive is cut short in a name")
    return text_of(bytes(key), f"{path}, {place}")


def _read_value(file: BinaryIO, where: str) -> NDArray[Any]:
    """A vector, or the only row of a matrix, binary or text."""
    begin = file.read(2)
    if begin == b"\0B":
        value = _read_binary(file, where)
    else:
        file.seek(-len(begin), 1)
        value = _read_text(file, where)
    if value.ndim == 2 and len(value) != 1:
        raise DataError(f"{where} is a matrix of {len(value)} rows, but an embedding is one vector")
    return value.reshape(-1)


def _read_binary(file: BinaryIO, where: str) -> NDArray[Any]:
    kind = file.read(3).rstrip(b" ")
    if kind not in _TYPES:
        raise DataError(
            f"{where} has the type {kind!r}, not FV, DV, FM or DM: copy it without compression"
        )
    shape = []
    for _ in range(2 if kind.endswith(b"M") else 1):
        content = file.read(5)
        size = struct.unpack("<i", content[1:])[0] if len(content) == 5 else -1
        if content[:1] != b"\4" or size < 0:
            raise DataError(f"{where} has no size where one is expected: the archive is damaged")
        shape.append(size)
    dtype = np.dtype(_TYPES[kind])
    num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    here = file.tell()
    available = file.seek(0, 2) - here
    file.seek(here)
    if num_bytes > available:  # before memory is allocated
        raise DataError(
            f"{where} should hold {num_bytes:,} bytes, but {available:,} follow: it is cut short"
        )
    return np.frombuffer(file.read(num_bytes), dtype=dtype).reshape(shape)


def _read_text(file: BinaryIO, where: str) -> NDArray[Any]:
    rows: list[list[float]] = []
    is_open = False
    while line := file.readline(MAX_LINE_BYTES):
        cells = line.split()
        if not is_open:
            if cells[:1] != [b"["]:
                raise DataError(f"{where} does not begin with `[`: is this a Kaldi archive?")
            cells, is_open = cells[1:], True
        is_last = cells[-1:] == [b"]"]
        try:
            values = [float(cell) for cell in (cells[:-1] if is_last else cells)]
        except ValueError as error:
            raise DataError(f"{where} has a value that is not a number ({error})") from None
        if values:
            rows.append(values)
        if is_last:
            if len({len(row) for row in rows}) > 1:
                raise DataError(f"{where} has rows of different widths: the archive is damaged")
            return np.array(rows, dtype=np.float32) if rows else np.zeros(0, dtype=np.float32)
    raise DataError(f"{where} has no closing `]`: the archive is cut short")
