"""Records of a run on the disk: ``journal.jsonl`` and ``status.json``."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qmargin.files import check_regular, open_regular, replacing

JOURNAL = "journal.jsonl"
ABANDONED = "journal-abandoned.jsonl"
STATUS = "status.json"


class Journal:
    """Appends events; written by one rank.

    A run that resumes from a checkpoint goes on from the journal of that moment. What the run wrote
    after it, and will now do again, is moved to ``journal-abandoned.jsonl``: no step is listed
    twice, and nothing is lost.

    Args:
        folder: The output folder.
        offset: Bytes that stay; 0 for a run that starts.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     journal = Journal(folder)
        ...     journal.write("step", {"step": 1, "loss": float("inf")})
        ...     journal.close()
        ...     record = json.loads((Path(folder) / JOURNAL).read_text())
        >>> record["event"], record["step"], record["loss"]
        ('step', 1, 'inf')
    """

    def __init__(self, folder: str | Path, *, offset: int = 0) -> None:
        path = Path(folder) / JOURNAL
        if path.exists():
            check_regular(path)  # a pipe would be waited for
            _cut(path, offset)
        self._file = path.open("ab")

    def write(self, event: str, values: Mapping[str, Any] | None = None) -> None:
        """Append an event; each line reaches the system at once, so that a kill loses none."""
        record = {"event": event, "time": round(time.time(), 3), **(values or {})}
        self._file.write(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Bring all lines to the disk; their length in bytes, for a checkpoint."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut(path: Path, offset: int) -> None:
    """Keep the first bytes of a journal, up to a whole line; move the rest."""
    content = path.read_bytes()
    kept = content[: content[:offset].rfind(b"\n") + 1]
    rest = content[len(kept) :]
    if rest:
        with path.with_name(ABANDONED).open("ab") as file:
            file.write(rest if rest.endswith(b"\n") else rest + b"\n")
        os.truncate(path, len(kept))


def read_status(folder: str | Path) -> dict[str, Any]:
    """The status of the last run in a folder; empty where there is none that can be read."""
    try:
        with open_regular(Path(folder) / STATUS) as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_status(folder: str | Path, values: Mapping[str, Any]) -> None:
    """Replace the status; a reader finds the old one or the new one, never half of one.

    Args:
        folder: The output folder.
        values: ``state`` (running, finished, stopped or failed), step and the like.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    where = {"updated": now, "pid": os.getpid(), "host": socket.gethostname()}
    text = json.dumps(plain({**values, **where}), indent=1, allow_nan=False)
    with replacing(Path(folder) / STATUS, sync=False) as temporary:  # the journal has the facts
        temporary.write_text(text + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """A value as strict JSON has it: numbers that are not finite become texts.

    Examples:
        >>> plain({"loss": float("nan"), "ids": ("a", "b")})
        {'loss': 'nan', 'ids': ['a', 'b']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
