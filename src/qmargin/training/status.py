"""``status.json``: where a run stands, for those who look at it from outside."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qmargin.training.folders import other_name
from qmargin.training.journal import plain

STATUS = "status.json"


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
    path = Path(folder) / STATUS
    temporary = other_name(path, "tmp")
    try:
        text = json.dumps(plain({**values, **where}), indent=1, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
