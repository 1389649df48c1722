"""Files that are written in parts, over several runs if needed.

Until ``scores.tsv`` is complete, ``scores.tsv.partial`` has its rows and ``scores.tsv.progress``
says how many rows and bytes are safely written, and from which inputs; later bytes are cut off and
written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from qmargin.errors import DataError
from qmargin.files import CHUNK_BYTES, Guard, sync_folder, write_atomically

try:
    import fcntl
except ImportError:  # Windows has no such locks: two runs there must not share a file
    fcntl = None  # type: ignore[assignment]

FORMAT = "qmargin-progress"
PROGRESS_MARK = f'"format": "{FORMAT}"'


def names_beside(path: Path) -> tuple[Path, Path]:
    """The partial file, and its progress record."""
    return path.with_name(path.name + ".partial"), path.with_name(path.name + ".progress")


class ResumableFile:
    """Rows that survive a kill; continue after the ``num_done`` rows that are safely written.

    A partial file with a different ``fingerprint`` of the inputs is refused, or discarded by
    ``restart``. ``guard`` decides whether an existing file is replaced.
    """

    def __init__(
        self,
        path: str | Path,
        fingerprint: str,
        *,
        restart: bool = False,
        guard: Guard | None = None,
    ) -> None:
        self.path = Path(path)
        self.partial, self.record = names_beside(self.path)
        self._guard, self._fingerprint = guard, fingerprint
        self.num_done = self._num_bytes = 0
        self._digest = hashlib.sha256()
        self._file = self.partial.open("a+b")
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    message = f"{self.partial} is being written by another run: wait for it"
                    raise DataError(message) from error
            if restart:
                self.record.unlink(missing_ok=True)
            if self.record.exists() and self.partial.stat().st_size > 0:
                self._resume()
            self._file.truncate(self._num_bytes)
        except BaseException:
            self._file.close()
            raise

    def _resume(self) -> None:
        remedy = "delete it or pass --restart to start again"
        try:
            record = json.loads(self.record.read_bytes())
            num_done, num_bytes = int(record["num_done"]), int(record["num_bytes"])
            expected, fingerprint = str(record["sha256"]), str(record["fingerprint"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise DataError(f"{self.record} is not a progress record: {remedy}") from error
        if fingerprint != self._fingerprint:
            raise DataError(f"{self.partial} was written with other inputs or options: {remedy}")
        self._file.seek(0)
        left = num_bytes
        while left > 0 and (chunk := self._file.read(min(left, CHUNK_BYTES))):
            self._digest.update(chunk)
            left -= len(chunk)
        if left or self._digest.hexdigest() != expected:
            raise DataError(f"{self.partial} does not match {self.record}: {remedy}")
        self.num_done, self._num_bytes = num_done, num_bytes

    def append(self, content: bytes, num_rows: int) -> None:
        """Add rows; when this returns, they are safely written."""
        self._file.write(content)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._digest.update(content)
        self._num_bytes += len(content)
        self.num_done += num_rows
        record = {
            "format": FORMAT,
            "fingerprint": self._fingerprint,
            "num_done": self.num_done,
            "num_bytes": self._num_bytes,
            "sha256": self._digest.hexdigest(),
        }
        write_atomically(self.record, json.dumps(record).encode())

    def finish(self) -> None:
        """Give the file its final name; if that is refused, keep the partial file."""
        if self._guard is not None:
            self._guard.check_content(self.path, self._digest.hexdigest())
        self.partial.replace(self.path)
        sync_folder(self.path.parent)
        self.record.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the partial file and its record, once their content is stored elsewhere."""
        for path in (self.record, self.partial):
            path.unlink(missing_ok=True)

    def __enter__(self) -> ResumableFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
