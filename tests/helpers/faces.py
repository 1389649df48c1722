"""Made-up faces: a coarse pattern per identity, a model that reads it, and the usual files."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qmargin.data.alignment import TEMPLATE
from qmargin.data.images import encode_image
from qmargin.evaluation.embed import write_embeddings
from qmargin.evaluation.embeddings import read_embeddings

GRID = 8
SIZE = 112


class PatchModel:
    """Mean colours of patches: an embedding that mirror images change."""

    def __init__(self) -> None:
        self.num_calls = 0

    def embed(self, images: np.ndarray) -> np.ndarray:
        self.num_calls += 1
        side = SIZE // GRID
        patches = images.reshape(len(images), GRID, side, GRID, side, 3).mean(axis=(2, 4))
        return (patches.reshape(len(images), -1) - 127.5).astype(np.float32)


class ArrayImages:
    """Images that are in memory."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], 0


def embedded(samples, *, flip="none", model=None, **options):
    """Embeddings of all samples, by way of a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "e.safetensors"
        keys = [str(number) for number in range(len(samples))]
        model = model or PatchModel()
        write_embeddings(model, samples, path, keys=keys, model_id="m", flip=flip, **options)
        return read_embeddings(path).matrix


def face(identity: int, photo: int, *, noise: float = 60.0) -> np.ndarray:
    """A photo of an identity, ``[112, 112, 3]``."""
    pattern = np.random.default_rng([1, identity]).uniform(40, 215, (GRID, GRID, 3))
    pattern = pattern + np.random.default_rng([2, identity, photo]).normal(0, noise, pattern.shape)
    return np.kron(pattern, np.ones((SIZE // GRID, SIZE // GRID, 1))).clip(0, 255).astype(np.uint8)


def write_bin(path: Path, pairs: list[tuple[np.ndarray, np.ndarray]], labels: list[bool]) -> Path:
    """A verification set as InsightFace stores it."""
    images = [encode_image(image, format="PNG") for pair in pairs for image in pair]
    path.write_bytes(pickle.dumps((images, labels)))
    return path


def folded_pairs(
    num_folds: int = 10, each: int = 4, *, noise: float = 60.0
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[bool]]:
    """In every fold ``each`` genuine pairs, then as many impostors."""
    pairs, labels = [], []
    for fold in range(num_folds):
        for other in (0, 1):
            for identity in range(fold * each, (fold + 1) * each):
                second = face(identity + other, 1, noise=noise)
                pairs.append((face(identity, 0, noise=noise), second))
                labels.append(other == 0)
    return pairs, labels


@dataclass
class Release:
    """What ``write_release`` wrote, row by row."""

    folder: Path
    faces: list[np.ndarray]
    template: np.ndarray
    media: np.ndarray
    detector: np.ndarray
    subject_of: dict[int, int]
    pairs: list[tuple[int, int, int]]


def write_release(folder: Path, *, num_subjects: int = 8, num_probes: int = 3) -> Release:
    """A small IJB-C: one gallery template and some probe templates for every subject."""
    rng = np.random.default_rng(0)
    (folder / "meta").mkdir(parents=True)
    (folder / "loose_crop").mkdir()
    rows, subject_of = [], {}
    for subject in range(num_subjects):
        for number in range(1 + num_probes):
            template = 100 * (number + 1) + subject
            subject_of[template] = subject
            for photo in range(int(rng.integers(1, 5))):
                rows.append((template, int(rng.integers(0, 3)), subject, 10 * number + photo))
    faces = [face(subject, photo) for _, _, subject, photo in rows]
    detector = rng.uniform(0.3, 1.0, len(rows)).round(3)
    points = (np.array(TEMPLATE) + np.array([9, 5])).ravel()  # the crop is wider than the face
    media_lines, point_lines = [], []
    for row, (template, media, _, _) in enumerate(rows):
        canvas = np.zeros((130, 140, 3), np.uint8)
        canvas[5 : 5 + SIZE, 9 : 9 + SIZE] = faces[row]
        (folder / "loose_crop" / f"{row}.png").write_bytes(encode_image(canvas, format="PNG"))
        media_lines.append(f"{row}.png {template} {media}\n")
        numbers = " ".join(f"{value:.4f}" for value in points)
        point_lines.append(f"{row}.png {numbers} {detector[row]}\n")
    galleries = [each for each in subject_of if each < 200]
    probes = [each for each in subject_of if each >= 200]
    pairs = [
        (enrol, test, int(subject_of[enrol] == subject_of[test]))
        for enrol in galleries
        for test in probes
    ]
    lists = {
        "face_tid_mid.txt": media_lines,
        "name_5pts_score.txt": point_lines,
        "template_pair_label.txt": [f"{a} {b} {label}\n" for a, b, label in pairs],
        "1N_gallery_G1.csv": _listed(galleries[::2], subject_of),
        "1N_gallery_G2.csv": _listed(galleries[1::2], subject_of),
        "1N_probe_mixed.csv": _listed(probes, subject_of),
    }
    for name, lines in lists.items():
        (folder / "meta" / f"ijbc_{name}").write_text("".join(lines))
    columns = np.array([row[:2] for row in rows])
    return Release(folder, faces, columns[:, 0], columns[:, 1], detector, subject_of, pairs)


def _listed(templates: list[int], subject_of: dict[int, int]) -> list[str]:
    lines = [f"{each},{subject_of[each]},img/{each}.jpg\n" for each in templates for _ in range(2)]
    return ["TEMPLATE_ID,SUBJECT_ID,FILENAME\n", *lines]
