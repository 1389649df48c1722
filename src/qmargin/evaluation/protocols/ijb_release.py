"""IJB-B and IJB-C as they are released: loose crops, landmarks, templates, pairs and galleries."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import CorruptSample, DataError
from qmargin.evaluation.layouts import numbered_lines, text_of
from qmargin.evaluation.protocols.identification import TemplateList
from qmargin.evaluation.protocols.integers import read_integers
from qmargin.evaluation.protocols.templates import TemplatePairs, TemplateRows
from qmargin.evaluation.result import Hardest, Source
from qmargin.files import Guard, Progress, read_regular, sha256_of

IMAGE_SIZE = 112
MAX_IMAGE_BYTES = 1 << 26
_MEDIA = "_face_tid_mid.txt"
_POINTS = "_name_5pts_score.txt"
_PAIRS = "_template_pair_label.txt"
_TEMPLATE = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class IjbRelease:
    """The lists of a release; row ``r`` of each is the same image.

    Attributes:
        folder: Has ``loose_crop/`` and ``meta/``.
        name: ``IJBB`` or ``IJBC``, after the lists.
        names: File of every image, below ``loose_crop/``.
        rows: Template, medium and detector's score of every image.
        landmarks: Five points ``(x, y)`` of every image, ``[n, 5, 2]``.
        sources: The lists.
    """

    folder: Path
    name: str
    names: tuple[str, ...] = field(repr=False)
    rows: TemplateRows = field(repr=False)
    landmarks: NDArray[np.float32] = field(repr=False)
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def keys(self) -> tuple[str, ...]:
        """A distinct name for every row: one file may serve several templates."""
        if len(set(self.names)) == len(self.names):
            return self.names
        return tuple(f"{row}:{name}" for row, name in enumerate(self.names))

    def images(self, size: int = IMAGE_SIZE) -> LooseCrops:
        """The images, aligned to ``size x size``."""
        return LooseCrops(self.folder / "loose_crop", self.names, self.landmarks, size)

    def pairs(self, *, progress: Progress | None = None) -> TemplatePairs:
        """The one-to-one pairs, with subjects where the lists of the galleries name them."""
        path = self._list(_PAIRS)
        numbers, sha256 = read_integers(path, 3, progress=progress)
        labels = numbers[:, 2]
        if labels.max() > 1:
            row = int(np.argmax(labels > 1))
            raise DataError(f"{path}, pair {row + 1}: the label is {labels[row]}, not 0 or 1")
        return TemplatePairs(
            _narrow(numbers[:, 0]),
            _narrow(numbers[:, 1]),
            labels.astype(np.bool_),
            Source(str(path), sha256, "trials"),
            self._subjects(),
        )

    def galleries(self) -> list[TemplateList]:
        """Galleries of the search, in the order of their names."""
        paths = sorted(self._meta.glob(f"{self._prefix}_1N_gallery_*.csv"))
        if not paths:
            raise DataError(
                f"{self._meta} has no {self._prefix}_1N_gallery_*.csv: copy the lists of the "
                "search there"
            )
        return [read_template_list(path) for path in paths]

    def probes(self) -> TemplateList:
        """What is searched."""
        return read_template_list(self._list("_1N_probe_mixed.csv"))

    @property
    def _meta(self) -> Path:
        return self.folder / "meta"

    @property
    def _prefix(self) -> str:
        return self.name.lower()

    def _list(self, suffix: str) -> Path:
        path = self._meta / f"{self._prefix}{suffix}"
        if not path.is_file():
            raise DataError(f"there is no {path}: copy it from the release")
        return path

    def _subjects(self) -> dict[int, str] | None:
        subject_of: dict[int, str] = {}
        for path in sorted(self._meta.glob(f"{self._prefix}_1N_*.csv")):
            found = read_template_list(path)
            subject_of |= zip(found.template.tolist(), found.subject.tolist(), strict=True)
        return subject_of or None


def read_ijb(folder: str | Path) -> IjbRelease:
    """Read the lists of images of a release.

    Args:
        folder: ``IJBB`` or ``IJBC`` of the release, with ``loose_crop/`` and ``meta/``.

    Raises:
        DataError: A list is missing, a line cannot be read, or two lists name different images in
            a row.
    """
    folder = Path(folder)
    found = sorted((folder / "meta").glob(f"*{_MEDIA}"))
    if len(found) != 1:
        raise DataError(
            f"{folder / 'meta'} has {len(found)} lists *{_MEDIA}, and 1 is needed: give the folder "
            "IJBB or IJBC of the release"
        )
    media = found[0]
    points = media.with_name(media.name.removesuffix(_MEDIA) + _POINTS)
    names, numbers = _read_rows(media, 2)
    others, values = _read_rows(points, 11)
    if names != others:
        places = zip(names, others, strict=False)
        row = next((i for i, (a, b) in enumerate(places) if a != b), min(len(names), len(others)))
        raise DataError(
            f"row {row + 1} of {media} and of {points} are not the same image: both lists have to "
            "name the same images in the same order"
        )
    whole = numbers.astype(np.int64)
    if (whole != numbers).any():
        row = int(np.argmax((whole != numbers).any(axis=1)))
        raise DataError(f"{media}, row {row + 1}: template and medium have to be whole numbers")
    return IjbRelease(
        folder,
        media.name.removesuffix(_MEDIA).upper(),
        tuple(names),
        TemplateRows(whole[:, 0].copy(), whole[:, 1].copy(), values[:, 10].copy()),
        values[:, :10].reshape(-1, 5, 2).astype(np.float32),
        tuple(Source(str(path), sha256_of(path), "trials") for path in (media, points)),
    )


def _read_rows(path: Path, num_values: int) -> tuple[list[str], NDArray[np.float64]]:
    """Names and the finite numbers after them."""
    if not path.is_file():
        raise DataError(f"there is no {path}: copy it from the release")
    names, values, numbers = [], [], []
    for number, line in numbered_lines(path):
        cells = line.split()
        try:
            row = list(map(float, cells[1:]))
            names.append(cells[0].decode("utf-8"))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {_shown(line)} ({error})") from error
        if len(row) != num_values:
            raise DataError(
                f"{path}, line {number}: {_shown(line)} is not a name and {num_values} numbers"
            )
        values.append(row)
        numbers.append(number)
    if not names:
        raise DataError(f"{path} is empty: it needs a line for every image")
    table = np.array(values)
    is_bad = ~np.isfinite(table).all(axis=1)
    if is_bad.any():
        row_number = int(np.argmax(is_bad))
        raise DataError(
            f"{path}, line {numbers[row_number]}: a number of {names[row_number]!r} is not finite"
        )
    return names, table


def _narrow(ids: NDArray[np.int64]) -> NDArray[np.signedinteger]:
    """A copy in half the memory where it can hold them."""
    return ids.astype(np.int32 if ids.max() <= np.iinfo(np.int32).max else np.int64)


def _shown(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace"))


def read_template_list(path: str | Path) -> TemplateList:
    """Templates and subjects of a gallery or of searches: the first two columns of a CSV file.

    The file has a header and may have a line for every image; a template is listed once.
    """
    path = Path(path)
    subject_of: dict[int, str] = {}
    for number, line in islice(numbered_lines(path), 1, None):
        where = f"{path}, line {number}"
        try:
            cells = next(csv.reader([text_of(line, where)]), [])
        except csv.Error as error:
            raise DataError(f"{where} is no CSV ({error}); correct the line") from error
        is_good = len(cells) >= 2 and _TEMPLATE.fullmatch(cells[0].strip()) and cells[1].strip()
        if not is_good:
            raise DataError(
                f"{where}: {','.join(cells)[:80]!r} does not begin with a template's number and a "
                "subject"
            )
        template, subject = int(cells[0]), cells[1].strip()
        if subject_of.setdefault(template, subject) != subject:
            raise DataError(
                f"{where}: template {template} is of subject {subject!r}, but was of "
                f"{subject_of[template]!r} before"
            )
    if not subject_of:
        raise DataError(f"{path} has no templates: it needs a header and a line for each")
    return TemplateList(
        path.stem.rsplit("_", 1)[-1],
        np.array(list(subject_of), np.int64),
        np.array(list(subject_of.values())),
        Source(str(path), sha256_of(path), "trials"),
    )


@dataclass(frozen=True)
class LooseCrops:
    """Images of a folder by number, each aligned by its landmarks; labels are -1."""

    folder: Path
    names: tuple[str, ...] = field(repr=False)
    landmarks: NDArray[np.float32] = field(repr=False)
    size: int = IMAGE_SIZE

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        from qmargin.data.alignment import align_face
        from qmargin.data.images import decode_image

        image = decode_image(read_inside(self.folder, self.names[index]))
        return align_face(image, self.landmarks[index], size=self.size), -1


def write_template_pictures(
    folder: str | Path,
    release: IjbRelease,
    hardest: Hardest | None,
    *,
    guard: Guard | None = None,
) -> int:
    """Write one aligned image of every template of the hardest pairs, named after the template.

    It is the image with the highest detector score. ``qmargin report --media FOLDER`` shows them.

    Returns:
        Number of files; images that cannot be read are left out.
    """
    from qmargin.data.images import encode_image

    folder, images, rows = Path(folder), release.images(), release.rows
    guard = guard or Guard(overwrite=True)
    folder.mkdir(parents=True, exist_ok=True)
    trials = () if hardest is None else (*hardest.false_accepts, *hardest.false_rejects)
    number = 0
    for template in sorted({key for trial in trials for key in (trial.enrol, trial.test)}):
        of_template = np.flatnonzero(rows.template == int(template))
        scores = np.zeros(len(rows.template)) if rows.detector is None else rows.detector
        best = int(of_template[int(np.argmax(scores[of_template]))])
        try:
            picture = encode_image(images[best][0])
        except CorruptSample:  # the page goes on without it
            continue
        guard.write(folder / f"{template}.jpg", picture)
        number += 1
    return number


def read_inside(folder: Path, name: str) -> bytes:
    """The bytes of a file below ``folder``; a list cannot name anything outside.

    Raises:
        CorruptSample: There is no such file, or it is elsewhere.
    """
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise CorruptSample(f"{name!r} is outside of {folder}")
        return read_regular(path, MAX_IMAGE_BYTES)
    except CorruptSample:
        raise
    except (OSError, ValueError) as error:  # ValueError: no regular file, or no such name
        reason = getattr(error, "strerror", None) or error
        raise CorruptSample(f"{name[:80]!r} cannot be read: {reason}") from error
