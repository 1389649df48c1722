"""``status.json``: where a run stands, for those who look at it from outside."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qmargin.files import open_regular, replacing
from qmargin.training.journal import plain

STATUS = "status.json"


def read_status(folder: str | Path) -> dict[str, Any]:
    """The status of the last run in a folder; empty where there is none that can be read."""
    path = Path(folder) / STATUS
    try:
        with open_regular(path) as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_status(folder: str | Path, values: Mapping[str, Any]) -> None:
    """Replace the status; a reader finds the old one or the new one, never half of one.

    Args:
        folder: The output folder.
        values: ``state`` (running, finished, stopped or failed), step and the like.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_status(folder, {"state": "running", "step": 3})
        ...     json.loads((Path(folder) / STATUS).read_text())["step"]
        3
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    where = {"updated": now, "pid": os.getpid(), "host": socket.gethostname()}
    text = json.dumps(plain({**values, **where}), indent=1, allow_nan=False)
    with replacing(Path(folder) / STATUS, sync=False) as temporary:  # the journal has the facts
        temporary.write_text(text + "\n", encoding="utf-8")
