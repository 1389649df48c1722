"""Verification sets in ``.bin`` files, which are pickles: read without running anything in them.

A pickle is a program that may call any function. The machine here knows bytes, numbers, lists and
tuples, and a short table of names that stand for types of arrays and ways to make one. It looks up
no name, and compares every length with the bytes that are there before it takes memory.
"""

from __future__ import annotations

import codecs
import pickletools
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.data.readers.npz import read_npz
from qmargin.errors import DataError
from qmargin.files import open_regular, replacing

_MOST_TIMES = 16  # repeated images may add up to this many times the file
_ALWAYS = 1 << 20  # bytes that any file may add up to
_PLAIN = {"b1": "?", "?": "?", "u1": "u1", "i1": "i1", "i4": "i4", "i8": "i8"}
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
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MARK = object()


class _Name(NamedTuple):
    """A name of the table: what it stands for here."""

    meaning: str


class _Kind(NamedTuple):
    """Stands for a ``numpy.dtype``."""

    name: str


@dataclass(slots=True)
class _Array:
    """Stands for a ``numpy.ndarray``: images and labels are flat."""

    raw: bytes = b""
    kind: str = "u1"


class _Machine:
    """Runs one pickle."""

    def __init__(self, data: bytes) -> None:
        self._stream = BytesIO(data)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = _MOST_TIMES * len(data) + _ALWAYS  # bytes that may still be made

    def run(self) -> Any:
        """The content, or an error: ``DataError``, or a ``ValueError`` of a value."""
        while (code := self._stream.read(1)) != b".":
            opcode = _OPCODES.get(code.decode("latin-1"))
            if opcode is None:
                raise DataError(f"it has the opcode {code!r} at byte {self._stream.tell() - 1}")
            if opcode.name == "STRING":  # bytes of Python 2, which pickletools takes for ASCII
                text = pickletools.read_stringnl(self._stream, decode=False)
                self._stack.append(codecs.escape_decode(text)[0])
            else:
                given = None if opcode.arg is None else opcode.arg.reader(self._stream)
                self._step(opcode.name, given)
        return self._pop()

    def _step(self, name: str, given: Any) -> None:
        push = self._stack.append
        match name:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                push(_CONSTANTS[name])
            case "BINSTRING" | "SHORT_BINSTRING":
                push(given.encode("latin-1"))
            case "MARK":
                push(_MARK)
            case "EMPTY_LIST":
                push([])
            case "EMPTY_DICT":
                push({})
            case "LIST":
                push(self._since_mark())
            case "TUPLE":
                push(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple(reversed([self._pop() for _ in range(int(name[-1]))])))
            case "APPEND":
                self._extend([self._pop()])
            case "APPENDS":
                self._extend(self._since_mark())
            case "POP":
                self._pop()
            case "SETITEM":  # entries of a dict are left out
                self._pop()
                self._pop()
            case "SETITEMS" | "POP_MARK":
                self._since_mark()
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                kept = self._pop()
                self._memo[len(self._memo) if given is None else given] = kept
                push(kept)
            case "GET" | "BINGET" | "LONG_BINGET":
                if given not in self._memo:
                    raise DataError(f"it asks for value {given}, which was not kept")
                push(self._memo[given])
            case "GLOBAL":
                push(_named(given.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                attribute, module = self._pop(), self._pop()
                push(_named(f"{_shown(module)}.{_shown(attribute)}"))
            case "REDUCE":
                arguments, called = self._pop(), self._pop()
                push(self._call(called, arguments))
            case "BUILD":
                self._build(self._pop())
            case "INT" | "LONG" | "LONG1" | "BININT" | "BININT1" | "BININT2" | "FLOAT" | "BINFLOAT":
                push(given)
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                push(given)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                push(given)
            case _:
                raise DataError(f"it has the opcode {name}, which such a set has no use for")

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise DataError(f"byte {self._stream.tell()} takes what is not there")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise DataError(f"byte {self._stream.tell()} goes back to a mark that is not there")

    def _extend(self, items: list[Any]) -> None:
        if not self._stack or not isinstance(self._stack[-1], list):
            raise DataError(f"byte {self._stream.tell()} appends to what is not a list")
        self._stack[-1].extend(items)

    def _call(self, called: Any, given: Any) -> Any:
        """What a name of the table makes of its arguments."""
        if not isinstance(called, _Name) or not isinstance(given, tuple):
            raise DataError(f"it calls a {type(called).__name__}; bytes and arrays are expected")
        match called.meaning:
            case "encode":  # how protocols of Python 2 write bytes
                encoding = given[1] if len(given) > 1 else "latin1"
                if encoding not in ("latin1", "latin-1", b"latin1"):
                    raise DataError(f"it encodes as {_shown(encoding)!r}; bytes are expected")
                return self._bytes(given[0])
            case "bytearray":  # of a number, it would be that many bytes
                return self._bytes(given[0] if given else b"")
            case "dtype":
                text = given[0].decode("ascii", "replace") if type(given[0]) is bytes else given[0]
                kind = _PLAIN.get(text.lstrip("<|=")) if isinstance(text, str) else None
                if kind is None:
                    raise DataError(f"it has an array of type {_shown(text)!r}; bytes are expected")
                return _Kind(kind)
            case "reconstruct":
                return _Array()
            case "scalar":
                array = self._filled(_Array(), given[1] if len(given) > 1 else b"\0", given[0])
                return bool(np.frombuffer(array.raw, dtype=array.kind, count=1)[0])
            case "frombuffer":
                return self._filled(_Array(), given[0], given[1])
        raise DataError(f"it calls {called.meaning}; bytes and arrays are expected")

    def _build(self, state: Any) -> None:
        """State of an array; that of a type says nothing new, and nothing else takes any."""
        target = self._stack[-1] if self._stack else None
        if isinstance(target, _Array) and isinstance(state, tuple) and len(state) == 5:
            self._filled(target, state[4], state[2])
        elif not isinstance(target, _Kind):
            raise DataError(f"it changes a {type(target).__name__}; bytes and arrays are expected")

    def _filled(self, array: _Array, raw: Any, kind: Any) -> _Array:
        if not isinstance(kind, _Kind):
            raise DataError(f"it has an array of a {type(kind).__name__}; bytes are expected")
        array.raw, array.kind = self._bytes(raw), kind.name
        return array

    def _bytes(self, given: Any) -> bytes:
        if isinstance(given, bytes | bytearray):
            return bytes(given)
        if not isinstance(given, str):
            raise DataError(f"it makes bytes of a {type(given).__name__}; bytes are expected")
        self._left -= len(given)
        if self._left < 0:
            raise DataError(f"it makes over {_MOST_TIMES} times its own size of bytes")
        return given.encode("latin-1")


def _shown(value: Any) -> str:
    """A value for messages; not what it holds unless it is a text or a number."""
    return str(value)[:40] if isinstance(value, str | bytes | int | float) else type(value).__name__


def _named(name: str) -> _Name:
    if name not in _NAMES:
        raise DataError(
            f"it names {name[:120]}, which a verification set has no use for; do not open this "
            "file with any other tool"
        )
    return _Name(_NAMES[name])


def read_bin(path: str | Path) -> tuple[list[bytes], NDArray[np.bool_]]:
    """Read the encoded images of a verification set, and which pairs show one person.

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
        images, is_genuine = _read_npz(path)
    else:
        with open_regular(path) as file:
            data = file.read()
        try:
            images, is_genuine = _parts(_Machine(data).run(), size=len(data))
        except (ValueError, TypeError, IndexError) as error:  # of a number, a text, an argument
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
        labels = np.frombuffer(labels.raw, dtype=labels.kind).tolist()
    for name, items in (("images", blobs), ("labels", labels)):
        if not isinstance(items, tuple | list):
            raise DataError(f"its {name} are a {type(items).__name__}, not a list")
    images = []
    for row, item in enumerate(blobs):
        if isinstance(item, _Array) and item.kind in ("?", "u1", "i1"):
            item = item.raw
        if not isinstance(item, bytes | bytearray):
            raise DataError(f"image {row} is a {type(item).__name__}, not bytes")
        images.append(item)
    for row, value in enumerate(labels):
        if not isinstance(value, bool | int | float) or value not in (False, True):
            raise DataError(f"label {row} is {_shown(value)!r}, not true or false")
    total, limit = sum(map(len, images)), _MOST_TIMES * size + _ALWAYS
    if total > limit:
        raise DataError(f"its images are {total:,} bytes; at most {limit:,} are read from {size:,}")
    return list(map(bytes, images)), np.array(labels, dtype=np.bool_)


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
