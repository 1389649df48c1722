"""Verification sets in ``.bin`` files, which are pickles: read without running code.

A pickle is a program that may call any function. Before it runs, every opcode has to be one of
those for bytes, numbers, lists and tuples, and every length is compared with the bytes that are
there. Names are not imported: a short table maps names to ways of making bytes and arrays.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.npz import read_npz
from qmargin.errors import DataError
from qmargin.files import open_regular, replacing

_MOST_TIMES = 16  # repeated images may add up to this many times the file
_ALWAYS = 1 << 20  # bytes that any file may add up to
_DTYPES = {"b1": "?", "?": "?", "u1": "u1", "i1": "i1", "i4": "i4", "i8": "i8"}
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_STORES = ("PUT", "BINPUT", "LONG_BINPUT")
_ALLOWED = frozenset(
    (
        *("PROTO", "FRAME", "MARK", "POP", "POP_MARK", "REDUCE", "BUILD", "GLOBAL", "STACK_GLOBAL"),
        *("NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2"),
        *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"),
        *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("BYTEARRAY8", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE"),
        *("TUPLE1", "TUPLE2", "TUPLE3", "GET", "BINGET", "LONG_BINGET", "MEMOIZE", *_STORES),
    )
)


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that a set has no use for, and lengths beyond the end."""
    stream = BytesIO(data)
    while (code := stream.read(1)) != b".":
        opcode = _OPCODES.get(code)
        if opcode is None or opcode.name not in _ALLOWED:
            name = repr(code) if opcode is None else opcode.name
            raise DataError(f"it has the opcode {name} at byte {stream.tell() - 1}")
        if opcode.name == "STRING":  # bytes of Python 2, which pickletools takes for ASCII
            pickletools.read_stringnl(stream, decode=False)
        elif opcode.arg is not None:
            value = opcode.arg.reader(stream)
            if opcode.name in _STORES and not 0 <= value <= len(data) + _ALWAYS:
                raise DataError(f"it keeps a value as number {value}")  # memory for all below


class _Array:
    """Stand-in for a ``numpy.ndarray``: images and labels are flat."""

    __slots__ = ("kind", "raw")

    def __init__(self, kind: Any = None, raw: Any = b"") -> None:
        self.kind, self.raw = kind, raw

    def __setstate__(self, state: Any) -> None:
        _, _, self.kind, _, self.raw = state

    def values(self) -> NDArray[Any]:
        """Return the values; ``DataError`` if its parts have unexpected types."""
        if not isinstance(self.kind, _Kind) or not isinstance(self.raw, str | bytes | bytearray):
            raise DataError(f"it has an array of a {type(self.raw).__name__}; bytes are expected")
        return np.frombuffer(_as_bytes(self.raw), dtype=self.kind.name)


class _Kind:
    """Stand-in for a ``numpy.dtype``, whose state is ignored."""

    __slots__ = ("name",)

    def __init__(self, name: Any, *_: Any) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
        found = _DTYPES.get(text.lstrip("<|=")) if isinstance(text, str) else None
        if found is None:
            raise DataError(f"it has an array of type {_shown(text)!r}; bytes are expected")
        self.name = found

    def __setstate__(self, state: Any) -> None:
        pass


def _as_bytes(content: str | bytes | bytearray) -> bytes:
    return content.encode("latin-1") if isinstance(content, str) else bytes(content)


def _shown(value: Any) -> str:
    """A value for messages; only texts and numbers show their content."""
    return str(value)[:40] if isinstance(value, str | bytes | int | float) else type(value).__name__


class _Unpickler(pickle.Unpickler):
    """Makes bytes, lists and stand-ins of arrays, by functions that live as long as the file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(BytesIO(data), encoding="bytes")
        self._left = _MOST_TIMES * len(data) + _ALWAYS  # bytes that may still be made

    def find_class(self, module: str, name: str) -> Any:
        """Stand-in for a name, which is never imported."""
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        makers: dict[str, Callable[..., Any]] = {
            "_codecs.encode": lambda *given: self._encoded(*given),  # as for bytes of Python 2
            "builtins.bytearray": lambda *given: self._encoded(*given),
            "__builtin__.bytearray": lambda *given: self._encoded(*given),
            "numpy.dtype": lambda *given: _Kind(*given),
            "numpy.ndarray": lambda *given: None,  # only ever an argument of _reconstruct
            "numpy.core.multiarray._reconstruct": lambda *given: _Array(),
            "numpy.core.multiarray.scalar": lambda kind, raw: bool(_Array(kind, raw).values()[0]),
            "numpy.core.numeric._frombuffer": lambda raw, kind, *given: _Array(kind, raw),
        }
        if full not in makers:
            found = f"it names {module}.{name}"[:120]
            raise DataError(f"{found}, which a set does not need; do not open it with other tools")
        return makers[full]

    def _encoded(self, given: Any = b"", encoding: Any = "latin1") -> bytes:
        """Bytes of a text or of bytes; ``bytearray`` of a number would be that many."""
        if encoding not in ("latin1", "latin-1", b"latin1"):
            raise DataError(f"it encodes as {_shown(encoding)!r}; bytes are expected")
        if not isinstance(given, str | bytes | bytearray):
            raise DataError(f"it makes bytes of a {type(given).__name__}; bytes are expected")
        self._left -= len(given)
        if self._left < 0:
            raise DataError(f"it makes over {_MOST_TIMES} times its own size of bytes")
        return _as_bytes(given)


def read_bin(path: str | Path) -> tuple[list[bytes], NDArray[np.bool_]]:
    """Read the encoded images of a verification set, and whether each pair shows one person.

    Reads ``.bin`` files, written by Python 2 or 3, and the ``.npz`` files of ``convert_bin``.

    Args:
        path: Path of the file.

    Returns:
        ``2 n`` encoded images, pair ``i`` being images ``2 i`` and ``2 i + 1``, and ``[n]``.

    Raises:
        DataError: The file names anything but bytes, lists and arrays, or is not such a set.
    """
    path = Path(path)
    if path.suffix == ".npz":
        images, is_genuine = _read_npz(path)
    else:
        with open_regular(path) as file:
            data = file.read()
        try:
            _check_opcodes(data)
            images, is_genuine = _parts(_Unpickler(data).load(), size=len(data))
        except Exception as error:  # of an opcode, a number, a text, an argument
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise DataError(f"{path} is not a verification set: {reason}") from error
    if len(images) != 2 * len(is_genuine) or not images:
        found = f"{len(images)} images for {len(is_genuine)} pairs"
        raise DataError(f"{path} has {found}; two per pair are needed")
    return images, is_genuine


def _parts(content: Any, *, size: int) -> tuple[list[bytes], NDArray[np.bool_]]:
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise DataError(f"it holds a {type(content).__name__}, not images and labels")
    blobs, labels = content
    if isinstance(labels, _Array):
        labels = labels.values().tolist()
    for name, items in (("images", blobs), ("labels", labels)):
        if not isinstance(items, tuple | list):
            raise DataError(f"its {name} are a {type(items).__name__}, not a list")
    images = []
    for row, item in enumerate(blobs):
        is_array = isinstance(item, _Array) and item.values().itemsize == 1
        if not is_array and not isinstance(item, bytes | bytearray):
            raise DataError(f"image {row} is a {type(item).__name__}, not bytes")
        images.append(item.raw if is_array else item)
    for row, value in enumerate(labels):
        if not isinstance(value, bool | int | float) or value not in (False, True):
            raise DataError(f"label {row} is {_shown(value)!r}, not true or false")
    total, limit = sum(map(len, images)), _MOST_TIMES * size + _ALWAYS
    if total > limit:
        raise DataError(f"its images are {total:,} bytes; at most {limit:,} are read from {size:,}")
    return list(map(_as_bytes, images)), np.array(labels, dtype=np.bool_)


def convert_bin(path: str | Path, out: str | Path) -> int:
    """Write a verification set as an NPZ file of plain arrays; return the number of pairs."""
    out = Path(out)
    if out.suffix != ".npz":
        raise DataError(f"{out} does not end in .npz; give such a name")
    images, is_genuine = read_bin(path)
    with replacing(out) as temporary, temporary.open("xb") as file:
        np.savez(
            file,
            images=np.frombuffer(b"".join(images), dtype=np.uint8),
            ends=np.cumsum([len(image) for image in images]),
            is_genuine=is_genuine,
        )
    return len(is_genuine)


def _read_npz(path: Path) -> tuple[list[bytes], NDArray[np.bool_]]:
    arrays = read_npz(path)
    if not {"images", "ends", "is_genuine"} <= arrays.keys():
        raise DataError(
            f"{path} has the arrays {', '.join(arrays)[:200] or 'none'}; make a converted "
            "verification set with qmargin data convert-bin"
        )
    joined, ends, is_genuine = arrays["images"], arrays["ends"], arrays["is_genuine"]
    kinds = (joined.dtype.kind, ends.dtype.kind, is_genuine.dtype.kind)
    is_flat = joined.ndim == ends.ndim == is_genuine.ndim == 1 and joined.itemsize == 1
    bounds = np.concatenate([[0], ends]) if is_flat else np.array([1])
    if kinds != ("u", "i", "b") or np.any(np.diff(bounds) < 0) or bounds[-1] != joined.size:
        raise DataError(f"{path} has arrays that do not fit together; convert the set again")
    return [joined[a:b].tobytes() for a, b in pairwise(bounds.tolist())], is_genuine
