"""The similarity transform and the warp, against independent definitions."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.pictures import jpeg, picture, shared_data
from qmargin.data import open_dataset
from qmargin.data.alignment import (
    EYES_AND_NOSE,
    TEMPLATE,
    FaceDetector,
    align_face,
    align_found,
    align_photos,
    similarity_transform,
    warp_image,
    why_no_detector,
)
from qmargin.data.images import decode_image, encode_image
from qmargin.errors import BackendError, ConfigError, DataError, ShapeError


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


HEADER = "path,identity," + ",".join(f"x{point},y{point}" for point in range(1, 6))


def row(name: str, identity: str, scale: float = 2.0) -> str:
    points = (np.array(TEMPLATE) * scale).ravel()
    return ",".join([name, identity, *(f"{value:.4f}" for value in points)])


def test_landmarks_of_a_manifest_need_no_detector(tmp_path: Path) -> None:
    face = picture(0, 112)
    large = np.array(Image.fromarray(face).resize((224, 224), Image.Resampling.NEAREST))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "p.jpg").write_bytes(encode_image(large, quality=98))
    (tmp_path / "in" / "bad.jpg").write_bytes(b"<html>")
    lines = [HEADER, row("p.jpg", "ada"), row("bad.jpg", "ada"), row("gone.jpg", "bea")]
    (tmp_path / "in" / "list.csv").write_text("\n".join(lines))
    done: list[tuple[int, int]] = []
    report = align_photos(
        tmp_path / "in" / "list.csv", tmp_path / "out", progress=lambda a, b: done.append((a, b))
    )
    assert report.num_aligned == 1
    assert [name for name, _ in report.corrupt] == ["ada/bad.jpg", "bea/gone.jpg"]
    assert done[-1] == (3, 3)
    aligned = decode_image((tmp_path / "out" / "ada" / "p.jpg").read_bytes())
    assert aligned.shape == (112, 112, 3)
    difference = np.abs(aligned.astype(int) - face)
    assert np.median(difference) <= 3  # edges of the blocks are blurred
    assert open_dataset(tmp_path / "out").class_name(0) == "ada"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([row("../p.jpg", "ada")], "line 2: '../p.jpg' leaves the folder"),
        ([row("/etc/p.jpg", "ada")], "leaves the folder"),
        ([row("p.jpg", "../ada")], "cannot be the name of a folder"),
        ([row("p.jpg", "..")], "cannot be the name of a folder"),
        ([row("p.jpg", "ada").replace("76.5892", "left")], "not ten numbers"),
        ([row("p.jpg", "ada").replace("76.5892", "nan")], "not ten numbers"),
        ([row("p.jpg", "ada"), row("p.png", "ada")], "would both become ada/p.jpg"),
        ([], "has no photos"),
    ],
)
def test_manifests_that_would_write_elsewhere_are_refused(lines, message, tmp_path):
    (tmp_path / "list.csv").write_text("\n".join([HEADER, *lines]))
    with pytest.raises(DataError, match=message):
        align_photos(tmp_path / "list.csv", tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["list.csv"]


def test_an_output_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    with pytest.raises(ConfigError, match="is not empty"):
        align_photos(tmp_path, tmp_path)


def test_without_a_detector_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("qmargin.data.alignment.find_spec", lambda name: None)
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "a.jpg").write_bytes(jpeg(0))
    with pytest.raises(BackendError, match=r"qmargin\[detector\], or give landmarks"):
        align_photos(tmp_path / "in", tmp_path / "out")


@pytest.fixture(scope="module")
def detector() -> FaceDetector:
    reason = why_no_detector()
    if reason is not None:
        pytest.skip(reason)
    return FaceDetector()


def portraits(number: int) -> list[np.ndarray]:
    with zipfile.ZipFile(shared_data("congress_faces") / "images.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))[400:]
        return [decode_image(archive.read(name)) for name in names[:number]]


def photo_of(face: np.ndarray, left: int = 80, top: int = 60) -> np.ndarray:
    """A face twice as large, somewhere on a grey photo."""
    photo = np.full((400, 500, 3), 90, dtype=np.uint8)
    large = Image.fromarray(face).resize((224, 224), Image.Resampling.BICUBIC)
    photo[top : top + 224, left : left + 224] = np.asarray(large)
    return photo


def test_real_faces_come_back_to_their_place(detector: FaceDetector) -> None:
    """The detector's three points agree with the five that the portraits were aligned by."""
    shifts, found = [], 0
    faces = portraits(40)
    for face in faces:
        detected = detector.find(photo_of(face))
        if not detected:
            continue
        found += 1
        points = (detected[0].points - [80, 60]) / 2  # in the pixels of the aligned portrait
        shifts.append(np.linalg.norm(points - EYES_AND_NOSE, axis=1).mean())
        aligned = align_found(photo_of(face), detected[0])
        assert aligned.shape == (112, 112, 3)
    assert found >= 38
    assert np.median(shifts) < 3.0  # pixels


def test_a_folder_of_photos_becomes_a_dataset(detector: FaceDetector, tmp_path: Path) -> None:
    (tmp_path / "in" / "ada").mkdir(parents=True)
    for number, face in enumerate(portraits(2)):
        photo = photo_of(face)
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was held on its side
        Image.fromarray(np.rot90(photo)).save(buffer, "JPEG", exif=exif, quality=95)
        (tmp_path / "in" / "ada" / f"{number}.jpg").write_bytes(buffer.getvalue())
    (tmp_path / "in" / "ada" / "wall.png").write_bytes(encode_image(picture(0, 64), format="PNG"))
    report = align_photos(tmp_path / "in", tmp_path / "out")
    assert report.num_aligned == 2
    assert report.without_face == ("ada/wall.jpg",)
    assert len(open_dataset(tmp_path / "out")) == 2
