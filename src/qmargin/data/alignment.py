"""Photos to aligned faces: detection, five points, a similarity transform, 112 x 112 pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.data.images import Pixels, decode_image, encode_image
from qmargin.data.reader import IMAGES
from qmargin.data.readers.folder import files_below
from qmargin.data.readers.lists import IDENTITIES, LANDMARKS, PATHS, column_of, read_rows
from qmargin.errors import BackendError, ConfigError, CorruptSample, DataError, ShapeError
from qmargin.files import Progress, read_regular

Floats = NDArray[np.float64]

# Eyes, tip of the nose, corners of the mouth, the picture's left first, in 112 x 112 pixels.
TEMPLATE = (
    (38.2946, 51.6963),
    (73.5318, 51.5014),
    (56.0252, 71.7366),
    (41.5493, 92.3655),
    (70.7299, 92.2041),
)
TEMPLATE_SIZE = 112
_QUALITY = 95
_MODEL = "shape_predictor_5_face_landmarks.dat"
# Where dlib's points lie on average in pictures that were aligned by the usual five: the mean over
# 199 public-domain portraits. dlib has the base of the nose, not its tip, and no mouth.
EYES_AND_NOSE = ((38.65, 55.07), (73.57, 54.65), (56.02, 81.03))
_MAX_SIDE = 1600  # larger photos are searched in a smaller copy


def similarity_transform(points: ArrayLike, template: ArrayLike = TEMPLATE) -> Floats:
    """The rotation, scale and shift that bring points ``[n, 2]`` nearest to a template, ``[2, 3]``.

    Least squares without reflection. As complex numbers it is ``w = a z + b``, whose normal
    equations have one solution; the angle and the scale of ``a`` are those of the transform.

    Examples:
        >>> matrix = similarity_transform(2.0 * np.array(TEMPLATE) + 10.0)
        >>> np.round(matrix, 6).tolist()
        [[0.5, -0.0, -5.0], [0.0, 0.5, -5.0]]
    """
    source, target = _complex(points, "points"), _complex(template, "template")
    if source.shape != target.shape:
        raise ShapeError(f"there are {len(source)} points for {len(target)} of the template")
    centred = source - source.mean()
    spread = float(np.vdot(centred, centred).real)
    if not spread > 1e-12 * max(1.0, float(np.abs(source).max()) ** 2):
        raise DataError("the points are all at one place; give landmarks of a face")
    factor = np.vdot(centred, target - target.mean()) / spread
    shift = target.mean() - factor * source.mean()
    return np.array(
        [[factor.real, -factor.imag, shift.real], [factor.imag, factor.real, shift.imag]]
    )


def _complex(points: ArrayLike, name: str) -> NDArray[np.complex128]:
    pairs = np.asarray(points, dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) < 2:
        raise ShapeError(f"{name} have shape {list(pairs.shape)}; give [n, 2] with n at least 2")
    if not np.isfinite(pairs).all():
        raise DataError(f"{name} hold a number that is not finite; give pixels")
    numbers: NDArray[np.complex128] = pairs[:, 0] + 1j * pairs[:, 1]
    return numbers


def align_face(image: Pixels, landmarks: ArrayLike, *, size: int = TEMPLATE_SIZE) -> Pixels:
    """The face of a picture at its place in ``size x size``: bilinear, black outside the picture.

    Landmarks are eyes, nose and corners of the mouth in pixels ``(x, y)``, the left ones first.
    """
    matrix = similarity_transform(landmarks, np.array(TEMPLATE) * (size / TEMPLATE_SIZE))
    return warp_image(image, matrix, size)


def warp_image(image: Pixels, matrix: Floats, size: int) -> Pixels:
    """The picture moved by ``matrix`` ``[2, 3]``, which maps its pixels to those of the result."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        found = f"{image.dtype} of shape {list(image.shape)}"
        raise ShapeError(f"the image is {found}; give uint8 [H, W, 3]")
    inverse = np.linalg.inv(matrix[:, :2])
    rows, columns = np.mgrid[0:size, 0:size]
    places = np.stack([columns, rows], axis=-1) - matrix[:, 2]  # [size, size, 2]
    x, y = np.moveaxis(places @ inverse.T, -1, 0)
    left, top = np.floor(x), np.floor(y)
    right_share, low_share = (x - left)[..., None], (y - top)[..., None]
    upper = _pixels(image, left, top) * (1 - right_share)
    upper += _pixels(image, left + 1, top) * right_share
    lower = _pixels(image, left, top + 1) * (1 - right_share)
    lower += _pixels(image, left + 1, top + 1) * right_share
    blended = upper * (1 - low_share) + lower * low_share
    result: Pixels = np.rint(blended).astype(np.uint8)
    return result


def _pixels(image: Pixels, x: Floats, y: Floats) -> Floats:
    """Pixels at whole coordinates, zero outside the picture."""
    height, width = image.shape[:2]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    columns = np.where(inside, x, 0).astype(np.intp)
    rows = np.where(inside, y, 0).astype(np.intp)
    return np.where(inside[..., None], image[rows, columns].astype(np.float64), 0.0)


@dataclass(frozen=True)
class Face:
    """A face in a photo."""

    box: tuple[float, float, float, float]  # left, top, right and bottom in pixels
    score: float  # confidence of the detector; about 0 to 3
    points: NDArray[np.float64]  # [3, 2]: eyes, the picture's left first, and base of the nose

    @property
    def area(self) -> float:
        """Pixels of the box."""
        left, top, right, bottom = self.box
        return (right - left) * (bottom - top)


class FaceDetector:
    """Finds upright, roughly frontal faces of about 80 pixels or more, if dlib is installed."""

    def __init__(self) -> None:
        reason = why_no_detector()
        if reason is not None:
            remedy = "install the extra qmargin[detector], or give landmarks in a CSV file"
            raise BackendError(f"no faces can be found in photos: {reason}; {remedy}")
        dlib: Any = import_module("dlib")
        self._detector = dlib.get_frontal_face_detector()
        self._landmarks = dlib.shape_predictor(str(_model()))

    def find(self, image: Pixels) -> list[Face]:
        """All faces of a photo ``[H, W, 3]``, the largest first."""
        step = -(-max(image.shape[:2]) // _MAX_SIDE)
        small = np.ascontiguousarray(image[::step, ::step])
        boxes, scores, _ = self._detector.run(small, 0, 0.0)
        faces = []
        for box, score in zip(boxes, scores, strict=True):
            parts = self._landmarks(small, box).parts()
            corners = step * np.array([(point.x, point.y) for point in parts], dtype=np.float64)
            # dlib begins with the eye on the picture's right.
            points = np.stack([corners[2:4].mean(axis=0), corners[0:2].mean(axis=0), corners[4]])
            edges = (box.left(), box.top(), box.right() + 1, box.bottom() + 1)
            left, top, right, bottom = (float(step * edge) for edge in edges)
            faces.append(Face((left, top, right, bottom), float(score), points))
        return sorted(faces, key=lambda face: -face.area)


def align_found(image: Pixels, face: Face, *, size: int = TEMPLATE_SIZE) -> Pixels:
    """The face at its usual place in ``size x size``."""
    template = np.array(EYES_AND_NOSE) * (size / TEMPLATE_SIZE)
    return warp_image(image, similarity_transform(face.points, template), size)


def why_no_detector() -> str | None:
    """Packages that are missing to find faces, or None."""
    if find_spec("dlib") is None:
        return "the package dlib-bin is not installed"
    if _model() is None:
        return "the package face_recognition_models is not installed"
    return None


def _model() -> Path | None:
    """Path of the weights; the package is not imported, because it needs a deprecated one."""
    spec = find_spec("face_recognition_models")
    folders = () if spec is None else spec.submodule_search_locations or ()
    paths = (Path(folder, "models", _MODEL) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


class Photo(NamedTuple):
    """A photo to align: its file, and the name of its output."""

    path: Path
    name: str
    landmarks: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True)
class AlignmentReport:
    """Counts of aligned, skipped and ambiguous photos."""

    num_aligned: int  # faces that were written
    without_face: tuple[str, ...]  # photos in which no face was found
    crowded: tuple[str, ...]  # photos with several faces; the largest was taken
    corrupt: tuple[tuple[str, str], ...]  # files that are not images, with reasons


def align_photos(
    source: str | Path, out: str | Path, *, size: int = 112, progress: Progress | None = None
) -> AlignmentReport:
    """Write an aligned face for each photo of a folder or of a manifest.

    A manifest with the columns ``x1,y1`` to ``x5,y5`` (eyes, nose, corners of the mouth) needs no
    detector; otherwise a detector finds the faces, and the largest one of each photo is used.
    Folders keep their names; a manifest's identities become folders. ``out`` is a new or empty
    folder.
    """
    source, out = Path(source), Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new folder")
    photos = list(_photos(source))
    if not photos:
        raise DataError(f"{source} has no photos; give a folder of images, or a manifest")
    seen: dict[str, Path] = {}
    for photo in photos:
        other = seen.setdefault(photo.name, photo.path)
        if other != photo.path:
            raise DataError(f"{photo.path} and {other} would both become {photo.name}; rename one")
    detector = cache(FaceDetector)  # loaded for the first photo that needs it
    without, crowded, corrupt = [], [], []
    for done, photo in enumerate(photos, 1):
        try:
            image = decode_image(_read(photo.path), upright=photo.landmarks is None)
            if photo.landmarks is not None:
                found = [align_face(image, photo.landmarks, size=size)]
            else:
                faces = detector().find(image)
                found = [align_found(image, face, size=size) for face in faces[:1]]
                if len(faces) > 1:
                    crowded.append(photo.name)
        except CorruptSample as error:
            corrupt.append((photo.name, str(error)))
        else:
            if found:
                path = out / photo.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode_image(found[0], quality=_QUALITY))
            else:
                without.append(photo.name)
        if progress is not None:
            progress(done, len(photos))
    num_aligned = len(photos) - len(without) - len(corrupt)
    return AlignmentReport(num_aligned, tuple(without), tuple(crowded), tuple(corrupt))


def _photos(source: Path) -> Iterator[Photo]:
    if not source.is_file():
        for name in files_below(source, "", IMAGES.suffixes):
            yield Photo(source / name, _result(name))
        return
    for line, row in read_rows(source):
        where = f"{source}, line {line}"
        name = row[column_of(source, row, PATHS)]
        identity = next((row[column] for column in IDENTITIES if column in row), None)
        parts = PurePosixPath(name).parts
        if ".." in parts or PurePosixPath(name).is_absolute():
            raise DataError(f"{where}: {name!r} leaves the folder of the manifest; move it inside")
        if identity is not None and (identity in ("", ".", "..") or "/" in identity):
            raise DataError(f"{where}: {identity!r} cannot be the name of a folder; rename it")
        place = name if identity is None else f"{identity}/{'_'.join(parts)}"
        yield Photo(source.parent / name, _result(place), _landmarks(row, where))


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


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, IMAGES.max_bytes)
    except (OSError, DataError) as error:
        raise CorruptSample(f"{getattr(error, 'strerror', None) or error}") from error
