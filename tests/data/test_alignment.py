"""The similarity transform and the warp, against independent definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.pictures import picture
from qmargin.data.alignment import TEMPLATE, align_face, similarity_transform, warp_image
from qmargin.errors import DataError, ShapeError


def umeyama(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Umeyama's solution by a singular value decomposition: rotation, scale, shift."""
    a, b = points - points.mean(0), target - target.mean(0)
    u, s, vt = np.linalg.svd(b.T @ a / len(points))
    sign = np.diag([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = u @ sign @ vt
    scale = (s * np.diag(sign)).sum() / a.var(axis=0).sum()
    shift = target.mean(0) - scale * rotation @ points.mean(0)
    return np.column_stack([scale * rotation, shift])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_it_is_the_least_squares_similarity_without_reflection(seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(5, 2)) * 40 + 100
    expected = umeyama(points, np.array(TEMPLATE))
    np.testing.assert_allclose(similarity_transform(points), expected, rtol=0, atol=1e-8)


def test_mirrored_points_do_not_give_a_mirror_image() -> None:
    mirrored = np.array(TEMPLATE) * [-1, 1]
    matrix = similarity_transform(mirrored)
    assert np.linalg.det(matrix[:, :2]) > 0


def slow_warp(image: np.ndarray, matrix: np.ndarray, size: int) -> np.ndarray:
    """Pixel by pixel: bilinear over the picture with zeros around it."""
    padded = np.pad(image.astype(float), ((1, 1), (1, 1), (0, 0)))
    full = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    out = np.zeros((size, size, 3))
    for row in range(size):
        for column in range(size):
            x, y, _ = full @ [column, row, 1]
            if not (-1 < x < image.shape[1] and -1 < y < image.shape[0]):
                continue
            left, top = int(np.floor(x)), int(np.floor(y))
            u, v = x - left, y - top
            block = padded[top + 1 : top + 3, left + 1 : left + 3]
            out[row, column] = (1 - v) * ((1 - u) * block[0, 0] + u * block[0, 1]) + v * (
                (1 - u) * block[1, 0] + u * block[1, 1]
            )
    return np.rint(out).astype(np.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_the_warp_is_bilinear_with_a_black_border(seed: int) -> None:
    random = np.random.default_rng(seed)
    image = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
    angle, scale = random.uniform(-1, 1), random.uniform(0.4, 2.0)
    c, s = scale * np.cos(angle), scale * np.sin(angle)
    matrix = np.array([[c, -s, random.uniform(-5, 9)], [s, c, random.uniform(-5, 9)]])
    found, expected = warp_image(image, matrix, 16), slow_warp(image, matrix, 16)
    assert np.abs(found.astype(int) - expected).max() <= 1  # ties of rounding
    assert (found != expected).mean() < 0.01


def test_a_face_at_the_template_stays_where_it_is() -> None:
    image = picture(0, 112)
    assert np.array_equal(align_face(image, TEMPLATE), image)


def test_a_larger_photo_is_brought_to_the_template() -> None:
    image = np.zeros((300, 300, 3), dtype=np.uint8)
    landmarks = np.array(TEMPLATE) * 2 + 30
    for x, y in np.rint(landmarks).astype(int):
        image[y - 3 : y + 4, x - 3 : x + 4] = 255
    face = align_face(image, landmarks)
    for x, y in np.rint(TEMPLATE).astype(int):
        assert face[y, x].min() > 200
    assert face[0, 0].max() == 0


@pytest.mark.parametrize(
    "points", [np.zeros((5, 2)), np.full((5, 2), 7e3), np.full((5, 2), np.nan)], ids=str
)
def test_points_without_a_face_are_refused(points: np.ndarray) -> None:
    with pytest.raises(DataError):
        similarity_transform(points)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="4 points for 5"):
        similarity_transform(np.eye(4)[:, :2])
    with pytest.raises(ShapeError, match="uint8"):
        align_face(np.zeros((10, 10)), TEMPLATE)  # type: ignore[arg-type]
