"""Verification sets in ``.bin`` files, which are pickles: read without running anything in them.

A pickle is a program for a small machine that may call any function of any module. Here that
machine is written anew with what such files need: bytes, numbers, lists, tuples, and the names of
a short table, which stand for a type of array or a way to make one. A name is never looked up,
nothing of NumPy or ``builtins`` can be reached, and no object that a file builds outlives it. Every
length is compared with the bytes that are there before memory is taken.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.npz import read_npz
from qmargin.errors import DataError
from qmargin.files import open_regular, replacing

_PLAIN = {"b1": "?", "?": "?", "u1": "u1", "i1": "i1", "i4": "i4", "i8": "i8"}
_ARRAYS = ("images", "ends", "is_genuine")
_MOST_TIMES = 16  # images that occur again may add up to so many times the file
_ALWAYS = 1 << 20  # bytes that any file may add up to
_MOST_DIGITS = 20


class _Name(NamedTuple):
    """A name of the table: what it stands for here."""

    meaning: str


class _Kind(NamedTuple):
    """Stands for a ``numpy.dtype``."""

    name: str


class _Array:
    """Stands for a ``numpy.ndarray``: raw bytes and their type; images and labels are flat."""

    __slots__ = ("kind", "raw")

    def __init__(self) -> None:
        self.raw, self.kind = b"", "u1"


_NAMES = {
    "_codecs.encode": "encode",
    "builtins.bytearray": "bytearray",
    "__builtin__.bytearray": "bytearray",  # in protocols that Python 2 reads
    "numpy.dtype": "dtype",
    "numpy.ndarray": "ndarray",  # only ever an argument of _reconstruct
    **{
        f"numpy.{core}.{name}": meaning
        for core in ("core", "_core")
        for name, meaning in (
            ("multiarray._reconstruct", "reconstruct"),
            ("multiarray.scalar", "scalar"),
            ("numeric._frombuffer", "frombuffer"),
        )
    },
}
_MARK = object()
_FIXED: dict[int, tuple[str, int]] = {  # of numbers that follow an opcode
    ord("J"): ("<i", 4),
    ord("K"): ("<B", 1),
    ord("M"): ("<H", 2),
    ord("G"): (">d", 8),
}
_COUNTED: dict[int, tuple[str, bool]] = {  # format of the length, and whether text follows
    ord("T"): ("<i", False),
    ord("U"): ("<B", False),
    ord("B"): ("<I", False),
    ord("C"): ("<B", False),
    0x8E: ("<Q", False),
    0x96: ("<Q", False),
    ord("X"): ("<I", True),
    0x8C: ("<B", True),
    0x8D: ("<Q", True),
}
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_IGNORED = {0x80: 1, 0x95: 8}  # the protocol and the length of a frame
_STORES = {ord("q"): "<B", ord("r"): "<I"}
_LOADS = {ord("h"): "<B", ord("j"): "<I"}


class _Machine:
    """Runs a pickle; see the module.

    Args:
        data: All of the file.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = _MOST_TIMES * len(data) + _ALWAYS  # bytes that may still be made
        self._steps: dict[int, Callable[[], Any]] = {
            ord("("): lambda: self._stack.append(_MARK),
            ord("0"): self._pop,
            ord("1"): self._since_mark,
            ord("]"): lambda: self._stack.append([]),
            ord("}"): lambda: self._stack.append({}),
            ord("l"): lambda: self._stack.append(self._since_mark()),
            ord("t"): lambda: self._stack.append(tuple(self._since_mark())),
            0x85: lambda: self._tuple(1),
            0x86: lambda: self._tuple(2),
            0x87: lambda: self._tuple(3),
            ord("a"): lambda: self._append([self._pop()]),
            ord("e"): lambda: self._append(self._since_mark()),
            ord("s"): lambda: (self._pop(), self._pop()),  # entries of a dict are left out
            ord("u"): self._since_mark,
            ord("I"): self._integer_line,
            ord("L"): self._integer_line,
            ord("F"): lambda: self._stack.append(float(self._line())),
            ord("S"): self._string_line,
            ord("V"): lambda: self._stack.append(self._line().decode("raw-unicode-escape")),
            0x8A: lambda: self._stack.append(self._long()),
            ord("p"): lambda: self._store(self._index(self._line())),
            ord("g"): lambda: self._load(self._index(self._line())),
            0x94: lambda: self._store(len(self._memo)),
            ord("c"): lambda: self._name(self._line(), self._line()),
            0x93: self._stacked_name,
            ord("R"): self._reduce,
            ord("b"): self._build,
        }

    def run(self) -> Any:
        """What the pickle holds, or ``DataError``."""
        while (opcode := self._take(1)[0]) != ord("."):
            if opcode in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode])
            elif opcode in _FIXED:
                self._stack.append(self._number(_FIXED[opcode][0]))
            elif opcode in _COUNTED:
                form, is_text = _COUNTED[opcode]
                content = self._take(self._number(form))
                self._stack.append(content.decode("utf-8") if is_text else content)
            elif opcode in _STORES:
                self._store(self._number(_STORES[opcode]))
            elif opcode in _LOADS:
                self._load(self._number(_LOADS[opcode]))
            elif opcode in _IGNORED:
                self._take(_IGNORED[opcode])
            elif opcode in self._steps:
                self._steps[opcode]()
            else:
                raise DataError(f"it has the opcode {opcode:#04x}, which such a set has no use for")
        return self._pop()

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self._at:
            raise DataError(
                f"byte {self._at} promises {count:,} more and {len(self._data) - self._at:,} follow"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise DataError(f"the line at byte {self._at} has no end")
        return self._take(end + 1 - self._at)[:-1]

    def _integer_line(self) -> None:
        text = self._line().removesuffix(b"L")
        is_bool = text in (b"00", b"01")
        self._stack.append(text == b"01" if is_bool else self._index(text))

    def _index(self, text: bytes) -> int:
        if len(text) > _MOST_DIGITS:
            raise DataError(f"it has a number of {len(text)} digits")
        return int(text)

    def _long(self) -> int:
        return int.from_bytes(self._take(self._number("<B")), "little", signed=True)

    def _string_line(self) -> None:
        text = self._line()
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
            raise DataError(f"the text {text[:40]!r} has no quotes around it")
        self._stack.append(codecs.escape_decode(text[1:-1])[0])

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise DataError(f"byte {self._at} takes what is not there")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise DataError(f"byte {self._at} goes back to a mark that is not there")

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _append(self, items: list[Any]) -> None:
        if not self._stack or not isinstance(self._stack[-1], list):
            raise DataError(f"byte {self._at} appends to what is not a list")
        self._stack[-1].extend(items)

    def _store(self, index: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise DataError(f"byte {self._at} keeps what is not there")
        self._memo[index] = self._stack[-1]

    def _load(self, index: int) -> None:
        if index not in self._memo:
            raise DataError(f"byte {self._at} asks for value {index}, which was not kept")
        self._stack.append(self._memo[index])

    def _stacked_name(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise DataError("it has a name that is no text")
        self._name(module.encode(), name.encode())

    def _name(self, module: bytes, name: bytes) -> None:
        full = f"{module.decode('utf-8', 'replace')}.{name.decode('utf-8', 'replace')}"
        if full not in _NAMES:
            raise DataError(
                f"it names {full[:120]}, which a verification set has no use for; do not open this "
                "file with any other tool"
            )
        self._stack.append(_Name(_NAMES[full]))

    def _reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        if not isinstance(called, _Name) or not isinstance(arguments, tuple):
            raise DataError(f"it calls a {type(called).__name__}; bytes and arrays are expected")
        makers: dict[str, Callable[..., Any]] = {
            "encode": self._encoded,
            "bytearray": self._bytes,
            "dtype": self._kind,
            "reconstruct": lambda *_: _Array(),
            "scalar": lambda kind, raw=b"\0": bool(self._values(raw, kind)[0]),
            "frombuffer": lambda raw, kind, *_: self._filled(_Array(), raw, kind),
        }
        if called.meaning not in makers:
            raise DataError(f"it calls {called.meaning}; bytes and arrays are expected")
        self._stack.append(makers[called.meaning](*arguments))

    def _build(self) -> None:
        """State of an array; that of a type says nothing new, and nothing else takes any."""
        state, target = self._pop(), self._stack[-1] if self._stack else None
        if isinstance(target, _Array) and isinstance(state, tuple) and len(state) == 5:
            self._filled(target, state[4], state[2])
        elif not isinstance(target, _Kind):
            raise DataError(f"it changes a {type(target).__name__}; bytes and arrays are expected")

    def _filled(self, array: _Array, raw: Any, kind: Any) -> _Array:
        if not isinstance(kind, _Kind) or not isinstance(raw, bytes | str):
            raise DataError(f"it has an array of a {type(raw).__name__}; bytes are expected")
        array.raw, array.kind = self._latin(raw) if isinstance(raw, str) else raw, kind.name
        return array

    def _values(self, raw: Any, kind: Any) -> NDArray[Any]:
        array = self._filled(_Array(), raw, kind)
        return np.frombuffer(array.raw, dtype=array.kind, count=1)

    def _kind(self, name: Any, *_: Any) -> _Kind:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
        found = _PLAIN.get(text.lstrip("<|=")) if isinstance(text, str) else None
        if found is None:
            raise DataError(
                f"it has an array of type {str(text)[:40] if isinstance(text, str) else '?'!r}; "
                "bytes and booleans are expected"
            )
        return _Kind(found)

    def _encoded(self, text: Any, encoding: Any = "latin1") -> bytes:
        """How Python 2 protocols write bytes."""
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
            shown = encoding if isinstance(encoding, str | bytes) else type(encoding).__name__
            raise DataError(
                f"it encodes a {type(text).__name__} as {shown[:40]!r}; bytes are expected"
            )
        return self._latin(text)

    def _bytes(self, data: Any = b"", *_: Any) -> bytes:
        """A ``bytearray`` of a number would be that many bytes."""
        if isinstance(data, str):
            return self._latin(data)
        if not isinstance(data, bytes):
            raise DataError(f"it makes bytes of a {type(data).__name__}; bytes are expected")
        return data

    def _latin(self, text: str) -> bytes:
        self._left -= len(text)
        if self._left < 0:
            raise DataError(f"it makes over {_MOST_TIMES} times its own size of bytes")
        return text.encode("latin-1")


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
    with open_regular(path) as file:
        data = file.read()
    try:
        images, is_genuine = _parts(_Machine(data).run(), size=len(data))
    except (ValueError, TypeError, IndexError) as error:  # of a number, a text, an argument
        raise DataError(f"{path} is not a verification set: {_reason(error)}") from error
    _check(path, images, is_genuine)
    return images, is_genuine


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _parts(content: Any, *, size: int) -> tuple[list[bytes], NDArray[np.bool_]]:
    if not isinstance(content, tuple | list) or len(content) != 2:
        raise DataError(f"it holds a {type(content).__name__}, not images and labels")
    blobs, labels = content
    if not isinstance(blobs, tuple | list):
        raise DataError(f"its images are a {type(blobs).__name__}, not a list")
    images = [_blob(row, item) for row, item in enumerate(blobs)]
    total, limit = sum(map(len, images)), _MOST_TIMES * size + _ALWAYS
    if total > limit:
        raise DataError(
            f"its {len(images):,} images would be {total:,} bytes; at most {limit:,} are read from "
            f"{size:,}"
        )
    return images, _labels(labels)


def _labels(labels: Any) -> NDArray[np.bool_]:
    if isinstance(labels, _Array):
        values = np.frombuffer(labels.raw, dtype=labels.kind)
        row = int(np.argmax((values != 0) & (values != 1))) if len(values) else 0
        if len(values) and values[row] not in (0, 1):
            raise DataError(f"label {row} is {str(values[row])!r}, not true or false")
        return values.astype(np.bool_)
    if not isinstance(labels, tuple | list):
        raise DataError(f"its labels are a {type(labels).__name__}, not a list")
    for row, value in enumerate(labels):
        is_plain = isinstance(value, bool | int | float)
        if not is_plain or value not in (False, True):
            shown = str(value)[:40] if is_plain else type(value).__name__
            raise DataError(f"label {row} is {shown!r}, not true or false")
    return np.array(labels, dtype=np.bool_)


def _blob(row: int, item: Any) -> bytes:
    if isinstance(item, _Array) and item.kind in ("?", "u1", "i1"):
        return item.raw
    if not isinstance(item, bytes):
        raise DataError(f"image {row} is a {type(item).__name__}, not bytes")
    return item


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
    if not set(_ARRAYS) <= arrays.keys():
        raise DataError(
            f"{path} is not a converted verification set: it has the arrays "
            f"{', '.join(arrays)[:200] or 'none'}; make one with qmargin data convert-bin"
        )
    joined, ends, is_genuine = (arrays[name] for name in _ARRAYS)
    kinds = (joined.dtype.kind, ends.dtype.kind, is_genuine.dtype.kind)
    is_flat = joined.ndim == ends.ndim == is_genuine.ndim == 1 and joined.itemsize == 1
    bounds = np.concatenate([[0], ends]) if is_flat else np.array([1])
    if kinds != ("u", "i", "b") or np.any(np.diff(bounds) < 0) or bounds[-1] != joined.size:
        raise DataError(f"{path} has arrays that do not fit together; convert the set again")
    images = [joined[a:b].tobytes() for a, b in pairwise(bounds.tolist())]
    _check(path, images, is_genuine)
    return images, is_genuine
