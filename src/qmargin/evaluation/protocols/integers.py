"""Tables of whole numbers as text, millions of lines of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError
from qmargin.files import Progress, open_regular

_CHUNK_BYTES = 1 << 22  # temporaries stay small
_MAX_DIGITS = 18  # more may not fit in 64 bits
_END, _RETURN, _SPACE, _TAB, _ZERO = b"\n\r \t0"


def read_integers(
    path: str | Path, num_columns: int, *, progress: Progress | None = None
) -> tuple[NDArray[np.int64], str]:
    r"""Lines of ``num_columns`` whole numbers, ``[lines, num_columns]``, and the file's SHA-256.

    Numbers are separated by spaces or tabs and have no sign; blank lines are skipped.

    Args:
        path: The file.
        num_columns: Numbers in every line.
        progress: Called with the bytes read and the bytes of the file.

    Raises:
        DataError: A line is something else; the message names it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "pairs.txt"
        >>> _ = path.write_text("1 20 1\n3 4 0\n")
        >>> read_integers(path, 3)[0].tolist()
        [[1, 20, 1], [3, 4, 0]]
    """
    path = Path(path)
    digest, parts, rest, done, line = hashlib.sha256(), [], b"", 0, 1
    size = path.stat().st_size
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            rest += chunk
            cut = rest.rfind(b"\n") + 1
            if cut:
                parts.append(_parse(path, rest[:cut], num_columns, line))
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
            elif len(rest) > _CHUNK_BYTES:
                raise DataError(f"{path}, line {line} is too long: is this a text file?")
            if progress is not None:
                progress(done, size)
    if rest.strip():
        parts.append(_parse(path, rest + b"\n", num_columns, line))
    numbers = np.concatenate(parts) if parts else np.empty((0, num_columns), np.int64)
    if not len(numbers):
        raise DataError(f"{path} is empty: it needs lines of {num_columns} whole numbers")
    return numbers, digest.hexdigest()


def _parse(path: Path, text: bytes, num_columns: int, line: int) -> NDArray[np.int64]:
    """Numbers of whole lines, the first of which has the number ``line``."""
    content = np.frombuffer(text, np.uint8)
    digits = content - np.uint8(_ZERO)  # what is below "0" wraps to above 9
    is_digit = digits <= 9
    is_end = content == _END
    is_space = (content == _SPACE) | (content == _TAB) | (content == _RETURN) | is_end
    if not (is_digit | is_space).all():
        _refuse(path, text, num_columns, line, int(np.argmin(is_digit | is_space)))
    edges = np.diff(is_digit.astype(np.int8), prepend=np.int8(0))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    lengths = stops - starts
    if len(lengths) and lengths.max() > _MAX_DIGITS:
        _refuse(path, text, num_columns, line, int(starts[int(np.argmax(lengths))]))
    per_line = np.diff(np.searchsorted(starts, np.flatnonzero(is_end)), prepend=0)
    is_wrong = (per_line != num_columns) & (per_line != 0)
    if is_wrong.any():
        ends = np.flatnonzero(is_end)
        _refuse(path, text, num_columns, line, int(ends[int(np.argmax(is_wrong))]))
    values = np.zeros(len(starts), np.int64)
    for place in range(int(lengths.max(initial=0))):
        has_digit = lengths > place
        values[has_digit] += digits[stops[has_digit] - 1 - place].astype(np.int64) * 10**place
    return values.reshape(-1, num_columns)


def _refuse(path: Path, text: bytes, num_columns: int, line: int, offset: int) -> None:
    """Raise for the line around a place of the text."""
    begin = text.rfind(b"\n", 0, offset) + 1
    shown = text[begin : text.find(b"\n", offset)][:80].decode("utf-8", "replace")
    number = line + text.count(b"\n", 0, offset)
    raise DataError(f"{path}, line {number}: {shown!r} is not {num_columns} whole numbers")
