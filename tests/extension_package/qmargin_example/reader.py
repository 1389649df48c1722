"""A reader: a file ``*.people`` whose lines are an identity and a path."""

from collections.abc import Iterator
from pathlib import Path

from qmargin.data.reader import IMAGES, Found, Kind, Reader, Sample, Scan
from qmargin.errors import DataError


class PeopleList(Reader):
    """Lines of an identity and the path of an image."""

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        """Take files that end in ``.people``."""
        is_ours = path.suffix == ".people" and kind in (None, IMAGES)
        return Found(self, path, IMAGES) if is_ours else None

    def samples(self, scan: Scan) -> Iterator[Sample]:
        """One sample per line."""
        for number, line in enumerate(scan.path.read_text(encoding="utf-8").splitlines(), 1):
            identity, _, name = line.partition(" ")
            if not name:
                raise DataError(f"{scan.path}, line {number}: {line!r} has no path; add one")
            yield Sample(identity, name=name, key=number)
