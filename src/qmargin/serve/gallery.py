"""The gallery of a one-to-many search: embeddings by name, kept in memory or in a private file."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.embed import check_suffix, write_embedding_file
from qmargin.evaluation.embeddings import EMBEDDINGS_MARK, read_embeddings
from qmargin.files import Guard, is_file
from qmargin.report.numbers import cleaned

Row = NDArray[np.float32]  # [d]
MOST_ENTRIES = 100_000
LONGEST_NAME = 80  # characters


class Entry(NamedTuple):
    """An enrolled sample of a person."""

    name: str
    digest: str  # SHA-256 of its file

    @property
    def key(self) -> str:
        """Name of its row in a file; names have no slash."""
        return f"{self.name}/{self.digest}"


class Candidate(NamedTuple):
    """An enrolled person, with the score of the best of their samples."""

    name: str
    score: float


@dataclass(frozen=True, eq=False)
class _Content:
    """Entries and embeddings of length 1; replaced as a whole, so that searches need no lock."""

    entries: tuple[Entry, ...]
    matrix: NDArray[np.float32]  # [n, d]

    @cached_property
    def known(self) -> frozenset[Entry]:
        """The entries, to look one up."""
        return frozenset(self.entries)


class Gallery:
    """Enrolled samples; ``store`` keeps them in a file that only its owner can read.

    ``about`` has the settings of the embeddings: weights, fit and mirror images.
    """

    def __init__(self, dim: int, *, about: Mapping[str, str], store: Path | None = None) -> None:
        self._about, self._store = dict(about), store
        self._lock = threading.Lock()
        self._content = _Content((), np.zeros((0, dim), np.float32))
        if store is not None:
            self._open(store)

    def __len__(self) -> int:
        return len(self._content.entries)

    @property
    def names(self) -> dict[str, int]:
        """Number of samples by name, sorted."""
        return dict(sorted(Counter(entry.name for entry in self._content.entries).items()))

    def has(self, entry: Entry) -> bool:
        """Whether a sample is enrolled."""
        return entry in self._content.known

    def check_room(self, number: int) -> None:
        """``ConfigError`` if the gallery cannot hold that number of further samples."""
        size = len(self) + number
        if size > MOST_ENTRIES:
            raise ConfigError(
                f"the gallery would have {size:,} samples and at most {MOST_ENTRIES:,} are held; "
                "remove some, or search in a program of your own"
            )

    def add(self, entries: Sequence[Entry], rows: Sequence[Row]) -> None:
        """Enrol samples; samples that are already enrolled are kept."""
        with self._lock:
            old = self._content
            fresh = {e: row for e, row in zip(entries, rows, strict=True) if e not in old.known}
            self.check_room(len(fresh))
            if fresh:
                added = np.stack([unit(row, entry.name) for entry, row in fresh.items()])
                self._replace(_Content((*old.entries, *fresh), np.concatenate([old.matrix, added])))

    def remove(self, name: str) -> int:
        """Delete a person; returns the number of deleted samples."""
        with self._lock:
            old = self._content
            kept = [place for place, entry in enumerate(old.entries) if entry.name != name]
            if len(kept) < len(old.entries):
                entries = tuple(old.entries[place] for place in kept)
                self._replace(_Content(entries, old.matrix[kept]))
            return len(old.entries) - len(kept)

    def search(self, row: Row, most: int) -> list[Candidate]:
        """The nearest people, the best first."""
        content = self._content
        scores = np.clip(content.matrix @ unit(row, "the probe"), -1.0, 1.0)
        best: dict[str, float] = {}
        for place in np.argsort(-scores, kind="stable").tolist():
            if len(best) == most:
                break
            best.setdefault(content.entries[place].name, float(scores[place]))
        return [Candidate(name, score) for name, score in best.items()]

    def _replace(self, content: _Content) -> None:
        if self._store is not None:
            if content.entries:
                keys = [entry.key for entry in content.entries]
                write_embedding_file(self._store, keys, content.matrix, metadata=self._about)
            else:
                self._store.unlink(missing_ok=True)
        self._content = content

    def _open(self, store: Path) -> None:
        if check_suffix(store).suffix != ".safetensors":
            raise ConfigError(f"--store {store} does not end in .safetensors; give it that suffix")
        if not store.parent.is_dir():
            raise ConfigError(
                f"--store {store} is not in an existing folder; make the folder first"
            )
        if not is_file(store):
            return
        Guard().check(store, EMBEDDINGS_MARK)
        try:
            with safe_open(store, "np") as file:
                metadata = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise DataError(f"--store {store} is damaged ({error}); name another file") from error
        for key, wanted in self._about.items():
            if metadata.get(key) != wanted:
                raise ConfigError(
                    f"--store {store} was written with the {key} "
                    f"{metadata.get(key, 'unknown'):.40} and this model has {wanted:.40}; name "
                    "another file, and enrol again"
                )
        found = read_embeddings(store)
        if found.embedding_dim != self._content.matrix.shape[1]:
            raise DataError(
                f"--store {store} has embeddings of {found.embedding_dim} numbers and the model "
                f"gives {self._content.matrix.shape[1]}; name another file"
            )
        entries = tuple(Entry(*key.rpartition("/")[::2]) for key in found.keys)
        self._content = _Content(entries, found.matrix.astype(np.float32))


def unit(row: Row, name: str) -> Row:
    """A vector of length 1."""
    length = float(np.linalg.norm(row.astype(np.float64)))
    if not length:
        raise DataError(f"the embedding of {name} is zero and has no direction; check the file")
    scaled: Row = (row / length).astype(np.float32)
    return scaled


def digest_of(content: bytes) -> str:
    """Hash of a file's content."""
    return hashlib.sha256(content).hexdigest()


def checked_name(name: str) -> str:
    """A name that can be shown and stored; ``ConfigError`` for others."""
    shown = " ".join(cleaned(name, LONGEST_NAME + 1).split())
    is_plain = shown == " ".join(name.split()) and "/" not in shown and shown not in (".", "..")
    if not shown or len(shown) > LONGEST_NAME or not is_plain:
        raise ConfigError(
            f"the name is {name[:LONGEST_NAME]!r}; give 1 to {LONGEST_NAME} printable characters "
            "without a slash, and not . or .."
        )
    return shown


def name_in(path: str) -> str:
    """Name of the person of a gallery file: its first folder, or the file's name without suffix."""
    parts = PurePosixPath(path).parts
    return checked_name(parts[0] if len(parts) > 1 else PurePosixPath(path).stem)
