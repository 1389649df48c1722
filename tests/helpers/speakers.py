"""A small verification problem with files: embeddings, trials and scores of made-up speakers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Speakers:
    """Names, embeddings and every pair of them once."""

    keys: list[str]
    matrix: NDArray[np.float32]
    enrol: list[str]
    test: list[str]
    labels: list[int]

    def plain_score(self, row: int) -> float:
        """Cosine of one trial, by the definition."""
        first, second = (
            self.matrix[self.keys.index(name)].astype(np.float64)
            for name in (self.enrol[row], self.test[row])
        )
        return float(first @ second / np.sqrt((first @ first) * (second @ second)))

    def write_embeddings(self, path: Path) -> Path:
        np.savez(path, keys=np.array(self.keys), embeddings=self.matrix)
        return path

    def write_trials(self, path: Path) -> Path:
        """In the official VoxCeleb order."""
        rows = zip(self.labels, self.enrol, self.test, strict=True)
        path.write_text("".join(f"{label} {a} {b}\n" for label, a, b in rows))
        return path

    def write_scores(self, path: Path) -> Path:
        """In the order of WeSpeaker, in full precision."""
        rows = enumerate(zip(self.enrol, self.test, self.labels, strict=True))
        words = ("nontarget", "target")
        lines = [f"{a} {b} {self.plain_score(row)!r} {words[y]}\n" for row, (a, b, y) in rows]
        path.write_text("".join(lines))
        return path


def make_speakers(num_speakers: int = 12, per_speaker: int = 4, dim: int = 8) -> Speakers:
    """Speakers whose scores overlap; names are ``id07/video/2.wav``."""
    generator = np.random.default_rng(5)
    centers = generator.normal(size=(num_speakers, 1, dim))
    noise = generator.normal(size=(num_speakers, per_speaker, dim))
    matrix = (centers + 0.9 * noise).reshape(-1, dim).astype(np.float32)
    keys = [f"id{s:02d}/video/{u}.wav" for s in range(num_speakers) for u in range(per_speaker)]
    pairs = [(i, j) for i in range(len(keys)) for j in range(i + 1, len(keys))]
    return Speakers(
        keys,
        matrix,
        [keys[i] for i, _ in pairs],
        [keys[j] for _, j in pairs],
        [int(keys[i][:4] == keys[j][:4]) for i, j in pairs],
    )
