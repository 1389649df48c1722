"""Verification sets in ``.bin`` files, which are pickles: read without running anything in them.

A pickle may name any function of any module and call it. Here a name is looked up in a short table
of stand-ins written for this file; nothing of NumPy, of ``builtins`` or of any other module can be
reached, and whatever is not in the table is refused.
"""

from __future__ import annotations

import io
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError

_PLAIN = {"b1": "?", "?": "?", "u1": "u1", "i1": "i1", "i4": "i4", "i8": "i8"}
_ARRAYS = ("images", "ends", "is_genuine")


class _Kind:
    """Stands in for ``numpy.dtype``: its name, and nothing that can be built from it."""

    def __init__(self, name: Any, *_: Any) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)
        self.name = _PLAIN.get(text.lstrip("<|="))
        if self.name is None:
            raise DataError(f"it has an array of type {text!r}; bytes and booleans are expected")

    def __setstate__(self, state: Any) -> None:
        """Byte order and flags, which say nothing new of these types."""


class _Array:
    """Stands in for ``numpy.ndarray``: raw bytes and their type."""

    def __init__(self) -> None:
        self.values: NDArray[Any] = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, _, kind, _, raw = state
        self.values = _flat(raw, kind)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _flat(raw: Any, kind: Any) -> NDArray[Any]:
    """Values of raw bytes; their shape is left out, as images and labels are flat."""
    if not isinstance(kind, _Kind) or not isinstance(raw, bytes | bytearray | str):
        raise DataError(f"it has an array of a {type(raw).__name__}; bytes are expected")
    data = raw.encode("latin-1") if isinstance(raw, str) else raw
    return np.frombuffer(data, dtype=kind.name)


def _frombuffer(raw: Any, kind: Any, *_: Any) -> _Array:
    array = _Array()
    array.values = _flat(raw, kind)
    return array


def _scalar(kind: Any, raw: Any = b"\0") -> bool:
    return bool(_flat(raw, kind)[0])


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 2 protocols write bytes; ``_codecs.encode`` itself knows many more codecs."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
        raise DataError(f"it encodes a {type(text).__name__} as {encoding!r}; bytes are expected")
    return text.encode("latin-1")


def _bytearray(data: Any = b"", *_: Any) -> bytes:
    """A ``bytearray`` of a number would be that many bytes."""
    if isinstance(data, str):
        return data.encode("latin-1")
    if not isinstance(data, bytes | bytearray):
        raise DataError(f"it makes bytes of a {type(data).__name__}; bytes are expected")
    return bytes(data)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("builtins", "bytearray"): _bytearray,
    ("__builtin__", "bytearray"): _bytearray,  # in protocols that Python 2 reads
    ("numpy", "dtype"): _Kind,
    ("numpy", "ndarray"): "numpy.ndarray",  # only ever an argument of _reconstruct
    **{
        (f"numpy.{core}.{module}", name): stand_in
        for core in ("core", "_core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _frombuffer),
        )
    },
}


class _AllowListed(pickle.Unpickler):
    """Looks names up in the table above."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name, or ``DataError``."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(
                f"it names {module}.{name}, which a verification set has no use for; do not open "
                "this file with any other tool"
            ) from None


def read_bin(path: str | Path) -> tuple[list[bytes], NDArray[np.bool_]]:
    """Encoded images of a verification set, and which pairs show one person.

    Reads ``.bin`` files, written by Python 2 or 3, and the ``.npz`` files of ``convert_bin``.

    Args:
        path: Of the file.

    Returns:
        ``2 n`` encoded images, pair ``i`` being images ``2 i`` and ``2 i + 1``, and ``[n]``.

    Raises:
        DataError: The file names anything but bytes, lists and arrays, or is not such a set.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    try:
        content = _AllowListed(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        images, is_genuine = _parts(content)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise DataError(f"{path} is not a verification set: {_reason(error)}") from error
    _check(path, images, is_genuine)
    return images, is_genuine


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _parts(content: Any) -> tuple[list[bytes], NDArray[np.bool_]]:
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise DataError(f"it holds a {type(content).__name__}, not images and labels")
    blobs, labels = content
    if not isinstance(blobs, tuple | list):
        raise DataError(f"its images are a {type(blobs).__name__}, not a list")
    values = labels.values.tolist() if isinstance(labels, _Array) else labels
    if not isinstance(values, tuple | list):
        raise DataError(f"its labels are a {type(values).__name__}, not a list")
    for row, value in enumerate(values):
        if value not in (False, True):
            raise DataError(f"label {row} is {str(value)[:40]!r}, not true or false")
    return [_blob(row, item) for row, item in enumerate(blobs)], np.array(values, dtype=np.bool_)


def _blob(row: int, item: Any) -> bytes:
    if isinstance(item, _Array) and item.values.dtype.itemsize == 1:
        return item.values.tobytes()
    if not isinstance(item, bytes | bytearray):
        raise DataError(f"image {row} is a {type(item).__name__}, not bytes")
    return bytes(item)


def _check(path: Path, images: list[bytes], is_genuine: NDArray[np.bool_]) -> None:
    if len(images) != 2 * len(is_genuine) or not images:
        raise DataError(
            f"{path} has {len(images)} images for {len(is_genuine)} pairs; two per pair are needed"
        )


def convert_bin(path: str | Path, out: str | Path) -> int:
    """Write a verification set as an NPZ file of plain arrays, which nothing can hide code in.

    Args:
        path: A ``.bin`` file.
        out: A name that ends in ``.npz``.

    Returns:
        Number of pairs.
    """
    out = Path(out)
    if out.suffix != ".npz":
        raise DataError(f"{out} does not end in .npz; give such a name")
    images, is_genuine = read_bin(path)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                images=np.frombuffer(b"".join(images), dtype=np.uint8),
                ends=np.cumsum([len(image) for image in images]),
                is_genuine=is_genuine,
            )
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(is_genuine)


def _read_npz(path: Path) -> tuple[list[bytes], NDArray[np.bool_]]:
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                joined, ends, is_genuine = (archive[name] for name in _ARRAYS)
        except Exception as error:  # damage shows as errors of zlib, struct, zipfile and others
            raise DataError(
                f"{path} is not a converted verification set: {_reason(error)}"
            ) from error
    kinds = (joined.dtype.kind, ends.dtype.kind, is_genuine.dtype.kind)
    bounds = np.concatenate([[0], ends]) if ends.ndim == 1 else np.array([1])
    if kinds not in (("u", "i", "b"),) or np.any(np.diff(bounds) < 0) or bounds[-1] != joined.size:
        raise DataError(f"{path} has arrays that do not fit together; convert the set again")
    images = [joined[a:b].tobytes() for a, b in pairwise(bounds.tolist())]
    _check(path, images, is_genuine)
    return images, is_genuine
