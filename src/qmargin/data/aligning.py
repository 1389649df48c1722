"""Photos to aligned faces: a folder or a manifest in, a folder of 112 x 112 faces out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qmargin.data.alignment import align_face
from qmargin.data.detector import FaceDetector, align_found
from qmargin.data.image_folder import identity_folders, images_below, is_image_name
from qmargin.data.images import Pixels, decode_image, encode_image
from qmargin.data.index import MAX_SAMPLE_BYTES
from qmargin.data.manifest import LANDMARKS, NAMES, NUMBERS, PATHS, column_of, read_rows
from qmargin.errors import ConfigError, CorruptSample, DataError
from qmargin.files import Progress, read_regular

_QUALITY = 95


@dataclass(frozen=True)
class Photo:
    """A photo to align: its file, and the name of what becomes of it."""

    path: Path
    name: str
    landmarks: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True)
class AlignmentReport:
    """What became of the photos.

    Args:
        num_aligned: Faces that were written.
        without_face: Photos in which no face was found.
        crowded: Photos with several faces; the largest was taken.
        corrupt: Files that are not images, each with what is wrong.
    """

    num_aligned: int
    without_face: tuple[str, ...]
    crowded: tuple[str, ...]
    corrupt: tuple[tuple[str, str], ...]


def align_photos(
    source: str | Path, out: str | Path, *, size: int = 112, progress: Progress | None = None
) -> AlignmentReport:
    """Write an aligned face for each photo of a folder or of a manifest.

    A manifest with the columns ``x1,y1`` to ``x5,y5`` (eyes, nose, corners of the mouth) needs no
    detector; for a folder, or a manifest without them, faces are looked for, and the largest of a
    photo is taken. Folders keep their names; a manifest's identities become folders.

    Args:
        source: A folder, or a ``.csv`` or ``.tsv`` manifest.
        out: A folder that is new or empty.
        size: Pixels of a side.
        progress: Called after each photo.
    """
    source, out = Path(source), Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new folder")
    photos = list(_photos(source))
    if not photos:
        raise DataError(f"{source} has no photos; give a folder of images, or a manifest")
    _refuse_twins(photos)
    find = _NotLoaded()
    without, crowded, corrupt = [], [], []
    for done, photo in enumerate(photos, 1):
        try:
            image = decode_image(_read(photo.path), upright=photo.landmarks is None)
            face, num_faces = _aligned(image, photo, find, size)
        except CorruptSample as error:
            corrupt.append((photo.name, str(error)))
        else:
            if face is not None:
                _write(out / photo.name, face)
            else:
                without.append(photo.name)
            if num_faces > 1:
                crowded.append(photo.name)
        if progress is not None:
            progress(done, len(photos))
    num_aligned = len(photos) - len(without) - len(corrupt)
    return AlignmentReport(num_aligned, tuple(without), tuple(crowded), tuple(corrupt))


class _NotLoaded:
    """The detector, loaded when a photo first needs it."""

    def __init__(self) -> None:
        self._detector: FaceDetector | None = None

    def __call__(self) -> FaceDetector:
        if self._detector is None:
            self._detector = FaceDetector()
        return self._detector


def _aligned(
    image: Pixels, photo: Photo, detector: Callable[[], FaceDetector], size: int
) -> tuple[Pixels | None, int]:
    """The aligned face, if any, and how many faces the photo has."""
    if photo.landmarks is not None:
        return align_face(image, photo.landmarks, size=size), 1
    faces = detector().find(image)
    return (align_found(image, faces[0], size=size) if faces else None), len(faces)


def _photos(source: Path) -> Iterator[Photo]:
    if source.is_file():
        yield from _listed(source)
        return
    for identity in identity_folders(source):
        for name in images_below(source, identity):
            yield Photo(source / name, _result(name))
    for path in sorted(source.iterdir()):
        if path.is_file() and is_image_name(path.name):
            yield Photo(path, _result(path.name))


def _listed(manifest: Path) -> Iterator[Photo]:
    for line, row in read_rows(manifest):
        where = f"{manifest}, line {line}"
        name = row[column_of(manifest, row, PATHS)]
        identity = next((row[column] for column in NUMBERS + NAMES if column in row), None)
        parts = PurePosixPath(name).parts
        if ".." in parts or PurePosixPath(name).is_absolute():
            raise DataError(f"{where}: {name!r} leaves the folder of the manifest; move it inside")
        if identity is not None and (identity in ("", ".", "..") or "/" in identity):
            raise DataError(f"{where}: {identity!r} cannot be the name of a folder; rename it")
        place = name if identity is None else f"{identity}/{'_'.join(parts)}"
        yield Photo(manifest.parent / name, _result(place), _landmarks(row, where))


def _result(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(".jpg"))


def _landmarks(row: dict[str, str], where: str) -> tuple[tuple[float, float], ...] | None:
    if not all(column in row for column in LANDMARKS):
        return None
    try:
        values = [float(row[column]) for column in LANDMARKS]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise DataError(f"{where}: its landmarks are not ten numbers; correct the line")
    return tuple(zip(values[::2], values[1::2], strict=True))


def _refuse_twins(photos: list[Photo]) -> None:
    """Two photos must not be written to one file."""
    seen: dict[str, Path] = {}
    for photo in photos:
        other = seen.setdefault(photo.name, photo.path)
        if other != photo.path:
            raise DataError(f"{photo.path} and {other} would both become {photo.name}; rename one")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_SAMPLE_BYTES)
    except (OSError, DataError) as error:
        raise CorruptSample(f"{getattr(error, 'strerror', None) or error}") from error


def _write(path: Path, face: Pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_image(face, quality=_QUALITY))
