"""Faces brought to one place: five points, a similarity transform, 112 x 112 pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.data.images import Pixels
from qmargin.errors import DataError, ShapeError

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


def similarity_transform(points: ArrayLike, template: ArrayLike = TEMPLATE) -> Floats:
    """The rotation, scale and shift that bring points nearest to a template, ``[2, 3]``.

    Least squares without reflection. As complex numbers it is ``w = a z + b``, whose normal
    equations have one solution; the angle and the scale of ``a`` are those of the transform.

    Args:
        points: ``[n, 2]``, at least two of them different.
        template: ``[n, 2]``.

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


def align_face(image: Pixels, landmarks: ArrayLike, *, size: int = TEMPLATE_SIZE) -> Pixels:
    """The face of a picture at its place in ``size x size``: bilinear, black outside the picture.

    Args:
        image: ``[H, W, 3]``.
        landmarks: Eyes, nose and corners of the mouth in pixels ``(x, y)``, ``[5, 2]``, with the
            picture's left first.
        size: 112 is the usual one; another scales the template.
    """
    matrix = similarity_transform(landmarks, np.array(TEMPLATE) * (size / TEMPLATE_SIZE))
    return warp_image(image, matrix, size)


def warp_image(image: Pixels, matrix: Floats, size: int) -> Pixels:
    """The picture moved by ``matrix`` ``[2, 3]``, which maps its pixels to those of the result."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ShapeError(
            f"the image is {image.dtype} of shape {list(image.shape)}; give uint8 [H, W, 3]"
        )
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


def _complex(points: ArrayLike, name: str) -> NDArray[np.complex128]:
    pairs = np.asarray(points, dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) < 2:
        raise ShapeError(f"{name} have shape {list(pairs.shape)}; give [n, 2] with n at least 2")
    if not np.isfinite(pairs).all():
        raise DataError(f"{name} hold a number that is not finite; give pixels")
    numbers: NDArray[np.complex128] = pairs[:, 0] + 1j * pairs[:, 1]
    return numbers
