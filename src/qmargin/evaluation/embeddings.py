"""Embeddings by name, from NPZ, safetensors and Kaldi archives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.npz import read_npz
from qmargin.errors import DataError
from qmargin.evaluation.kaldi import read_ark, read_scp
from qmargin.evaluation.layouts import text_of
from qmargin.evaluation.result import Source
from qmargin.files import check_regular, sha256_of

Named = list[tuple[str, NDArray[Any], str]]  # name, vector [d], place in the file for messages
COLLAPSED = 1e-4  # embeddings whose cosines are this near to 1 in the mean say nothing
_ROWS_LOOKED_AT = 4096
_READERS = (".npz", ".safetensors", ".ark", ".scp")


@dataclass(frozen=True)
class Embeddings:
    """A matrix with a name for every row.

    Attributes:
        keys: Distinct names, ``[n]``.
        matrix: float32 or float64 ``[n, d]``, finite.
        source: The file.
        weights_sha256: Of the model that made them; None where the file does not say.
    """

    keys: tuple[str, ...]
    matrix: NDArray[Any]
    source: Source
    weights_sha256: str | None = None

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

    Args:
        path: The file; its suffix decides how it is read.
        role: What the file is to the evaluation, for the record.

    Raises:
        DataError: A name occurs twice, a vector has another width than the first or holds a value
            that is not finite; the message names the file and the place in it.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DataError(
            f"{path} is not a file of embeddings by its name: it has to end in "
            f"{', '.join(_READERS)}"
        )
    check_regular(path)
    weights = None
    if suffix == ".npz":
        arrays = read_npz(path)
        keys, matrix = _from_arrays(path, arrays)
        weights = weights_of({"model": str(arrays["model"])} if "model" in arrays else {})
    elif suffix == ".safetensors":
        keys, matrix, weights = _read_safetensors(path)
    else:
        keys, matrix = _stacked(path, read_ark(path) if suffix == ".ark" else read_scp(path))
    _check(path, keys, matrix)
    return Embeddings(tuple(keys), matrix, Source(str(path), sha256_of(path), role), weights)


def collapse_note(matrix: NDArray[Any]) -> str | None:
    """A note where embeddings all but coincide, so that no threshold tells them apart.

    At most some thousand rows are looked at.

    Examples:
        >>> collapse_note(np.eye(3)), collapse_note(np.ones((3, 2)))[:33]
        (None, 'embeddings have collapsed: the me')
    """
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
        "nothing tells subjects apart; look at the training, or at the inputs"
    )


def weights_of(metadata: Mapping[str, str]) -> str | None:
    """Hash of the weights of the model that made a file of embeddings, where it says so.

    Examples:
        >>> weights_of({"model": "mine"}), weights_of({"model": "ab" * 32})[:4]
        (None, 'abab')
    """
    found = metadata.get("model", "")
    return found if re.fullmatch("[0-9a-f]{64}", found) else None


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
                f"{path}: embeddings have the shape {matrix.shape}, but {len(keys)} keys need "
                f"({len(keys)}, d)"
            )
        return [_text(path, key) for key in keys], _as_float(path, matrix)
    if "keys" in arrays or (arrays.keys() == {"embeddings"} and arrays["embeddings"].ndim == 2):
        raise DataError(f"{path}: embeddings and keys go together, and one of them is missing")
    return _stacked(path, [(name, array, repr(name)) for name, array in arrays.items()])


def _text(path: Path, key: Any) -> str:
    if isinstance(key, bytes):
        key = text_of(key, str(path))
    if not isinstance(key, str):
        raise DataError(f"{path}: the key {key!r} is a {type(key).__name__}, not a text")
    return key


def _read_safetensors(path: Path) -> tuple[list[str], NDArray[Any], str | None]:
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file ({error}): was it cut short?") from error
    arrays = {  # NumPy has no bfloat16
        name: (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
        for name, tensor in tensors.items()
    }
    try:
        keys = json.loads(metadata["keys"]) if "keys" in metadata else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the metadata entry keys is not JSON ({error})") from error
    if keys is not None and not isinstance(keys, list):
        raise DataError(f"{path}: the metadata entry keys is not a list of names")
    return *_from_arrays(path, arrays, keys), weights_of(metadata)


def _stacked(path: Path, named: Named) -> tuple[list[str], NDArray[Any]]:
    """Vectors of one width as a matrix."""
    if not named:
        raise DataError(f"{path} has no embeddings: it needs at least one")
    width = named[0][1].size
    for key, vector, place in named:
        if vector.ndim != 1:
            raise DataError(
                f"{path}, {place}: {key!r} has the shape {vector.shape}, "
                "but an embedding is one vector"
            )
        if vector.size != width:
            raise DataError(
                f"{path}, {place}: {key!r} has {vector.size} values, but {named[0][0]!r} has "
                f"{width}: all embeddings need the same width"
            )
    matrix = np.stack([vector for _, vector, _ in named])
    return [key for key, _, _ in named], _as_float(path, matrix)


def _as_float(path: Path, matrix: NDArray[Any]) -> NDArray[Any]:
    if matrix.dtype.kind not in "fiu":
        raise DataError(f"{path}: embeddings are {matrix.dtype}, not numbers")
    is_small = matrix.dtype in (np.float16, np.float32)
    return matrix.astype(np.float32 if is_small else np.float64, copy=False)


def _check(path: Path, keys: list[str], matrix: NDArray[Any]) -> None:
    if matrix.shape[1] == 0 or not keys:
        raise DataError(f"{path} has embeddings of the shape {matrix.shape}: nothing to compare")
    seen: dict[str, int] = {}
    for row, key in enumerate(keys):
        if seen.setdefault(key, row) != row:
            raise DataError(
                f"{path}: the name {key!r} has two embeddings, number {seen[key]} and {row}"
            )
    is_bad = ~np.isfinite(matrix).all(axis=1)
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise DataError(f"{path}: the embedding of {keys[row]!r} (number {row}) is not finite")
