"""Lists of files: CSV manifests, Kaldi's ``wav.scp`` with ``utt2spk``, JSON lines, and pairs."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
from numpy.typing import NDArray

from qmargin.data.index import Hasher, SampleIndex, hash_lists, parse_label
from qmargin.data.reader import IMAGES, RECORDINGS, Found, Kind, Reader, Sample, Scan
from qmargin.data.readers.folder import identity_folders
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular, open_text
from qmargin.registry import register_reader

PATHS = ("path", "file", "filename", "image", "wav", "audio")
SPEAKERS = ("speaker", "spk", "speaker_id", "spk_id")
NUMBERS = ("label", "class")  # hold an integer; the other identities are names
IDENTITIES = (*SPEAKERS, *NUMBERS, "identity", "subject", "person")
LANDMARKS = tuple(f"{axis}{point}" for point in range(1, 6) for axis in "xy")
MAX_LINE = 1 << 20
_BETWEEN_REPORTS = 64


def read_rows(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells of each line of a CSV or TSV file with a header."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with open_text(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(path, file, progress), delimiter=delimiter, strict=True)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            if len(header) < 2 and ";" in "".join(header):
                remedy = "separate columns by commas, or by tabs in a .tsv file"
                raise DataError(f"{path}, line 1 has semicolons; {remedy}")
            twice = next((name for name in header if header.count(name) > 1), None)
            if twice is not None:
                raise DataError(
                    f"{path}, line 1: two columns are called {twice[:60]!r}; rename one"
                )
            for cells in reader:
                if cells and len(cells) != len(header):
                    found = f"{len(cells)} cells under {len(header)} columns"
                    raise DataError(f"{path}, line {reader.line_num}: {found}; correct the line")
                if cells:
                    yield reader.line_num, dict(zip(header, cells, strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            where = f"{path}, after line {reader.line_num}"
            raise DataError(f"{where}: {error}; save it as CSV in UTF-8") from error


def _lines(path: Path, file: TextIO, progress: Progress | None = None) -> Iterator[str]:
    """Lines of an open text file; lines that are too long for a list are refused."""
    number, seen = 0, 0
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(MAX_LINE):
        if progress is not None and number % _BETWEEN_REPORTS == 0:
            progress(min(seen, size), size)
        number += 1
        seen += len(line)
        if len(line) == MAX_LINE:
            raise DataError(f"{path}, line {number} has over {MAX_LINE:,} characters; is it text")
        yield line


def column_of(path: Path, row: dict[str, str], names: Sequence[str]) -> str:
    """The first of some names that is a column, or ``DataError``."""
    found = next((name for name in names if name in row), None)
    if found is None:
        columns = f"the columns {', '.join(row)[:200]}"
        raise DataError(f"{path} has {columns}; name one of {', '.join(names)} in its first line")
    return found


def _check_path(place: str, where: str) -> str:
    """A path of a list; ``DataError`` for anything else, such as commands, which are never run."""
    head, colon, offset = place.rpartition(":")
    reason = None
    if not place:
        reason = "the path is empty; write one"
    elif place.endswith("|") or place.startswith(("|", "pipe:")):
        reason = f"{place!r} is a command, which is never run; list the files that it makes"
    elif colon and offset.isdigit() and head.endswith(".ark"):
        reason = f"{place!r} points into a Kaldi archive; extract the samples into files first"
    elif "\0" in place:
        reason = "the path has a NUL character; correct it"
    if reason is not None:
        raise DataError(f"{where}: {reason}")
    return place


class _ListReader(Reader):
    """A list that is hashed whole, with paths relative to its folder."""

    options: ClassVar[tuple[str, ...]] = ("root",)

    def hasher(self, scan: Scan, index: SampleIndex | None, started: int | None) -> Hasher:
        return hash_lists(self.files(scan))

    def watched(self, scan: Scan) -> list[Path]:
        return []


@register_reader("manifest")
class ManifestReader(_ListReader):
    """A CSV or TSV file with the columns ``path`` and ``label``, ``identity`` or ``speaker``.

    ``label`` holds an integer, the others a name. A column ``key`` names samples instead of their
    path; ``split`` can select rows. Other columns are ignored.
    """

    precedence = -3
    options = ("root", "split")

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        if path.is_file():
            if path.suffix.lower() not in (".csv", ".tsv"):
                return None
            seen = _kind_of(path)
            return Found(self, path, kind or seen) if kind in (None, seen) or not seen else None
        files = [file for file in sorted(path.glob("*.[ct]sv")) if file.is_file()]
        speakers = [file for file in files if _has_speakers(file)]
        if len(speakers) == 1 and kind is not IMAGES:
            return self.find(speakers[0], kind)
        if len(files) == 1 and not identity_folders(path) and not any(path.glob("*.tar")):
            return self.find(files[0], kind)
        return None

    def samples(self, scan: Scan) -> Iterator[Sample]:
        path, split = scan.path, scan.options.get("split")
        is_empty = True
        for line, row in read_rows(path, scan.progress):
            where = f"{path}, line {line}"
            if split is not None and row[column_of(path, row, ["split"])] != split:
                continue
            place = _check_path(row[column_of(path, row, PATHS)], where)
            column = column_of(path, row, IDENTITIES)
            identity: str | int = row[column].strip()
            if column in NUMBERS:
                identity = parse_label(row[column], where)
            elif not identity:
                raise DataError(f"{where}: the {column} is empty; name it")
            is_empty = False
            is_named = "key" in row
            yield Sample(identity, row.get("key", place), place if is_named else None, key=line)
        if is_empty:
            rows = "rows" if split is None else f"rows whose split is {split!r}"
            raise DataError(f"{path} has no {rows}; its first line names columns: path,label")


def _has_speakers(path: Path) -> bool:
    with open_regular(path) as file:
        text = file.readline(MAX_LINE).decode("utf-8-sig", "replace")
    cells = text.split("\t" if path.suffix.lower() == ".tsv" else ",")
    columns = {name.strip().strip('"').lower() for name in cells}
    return not columns.isdisjoint(SPEAKERS) and not columns.isdisjoint(PATHS)


def _kind_of(path: Path) -> Kind | None:
    """By the columns, or else by the first path."""
    if _has_speakers(path):
        return RECORDINGS
    try:
        _, row = next(read_rows(path))
        name = row[column_of(path, row, PATHS)]
    except (StopIteration, DataError):  # reading it will show the problem
        return None
    return next((kind for kind in (IMAGES, RECORDINGS) if kind.is_name(name)), None)


@register_reader("kaldi")
class KaldiReader(_ListReader):
    """A folder with ``wav.scp`` (key and path) and ``utt2spk`` (key and speaker)."""

    precedence = -2

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        scp = path / "wav.scp" if path.is_dir() else path
        if scp.name != "wav.scp" or not scp.is_file() or kind is IMAGES:
            return None
        return Found(self, scp, RECORDINGS)

    def files(self, scan: Scan) -> list[Path]:
        return [scan.path, scan.path.with_name("utt2spk")]

    def samples(self, scan: Scan) -> Iterator[Sample]:
        scp, utt2spk = self.files(scan)
        for other in (scp.with_name("segments"), scp.with_name("reco2file_and_channel")):
            if other.exists():
                raise DataError(f"{other} cuts recordings up; write the pieces as files first")
        speakers = {}
        for row, line in _filled_lines(utt2spk, scan):
            cells = line.split()
            if len(cells) != 2:
                found = f"{utt2spk}, line {row}: {len(cells)} columns"
                raise DataError(f"{found}; write key and speaker")
            speakers[cells[0]] = cells[1]
        for row, line in _filled_lines(scp, scan):
            where = f"{scp}, line {row}"
            key, _, place = line.partition(" ") if " " in line else line.partition("\t")
            if key not in speakers:
                raise DataError(f"{where}: key {key!r} is not in utt2spk; add its speaker")
            yield Sample(speakers[key], key, _check_path(place.strip(), where), key=row)


@register_reader("json_lines")
class JsonLinesReader(_ListReader):
    """One object per line: ``key``, ``wav`` or ``image``, ``spk`` or ``identity`` or ``label``."""

    precedence = -4

    def find(self, path: Path, kind: Kind | None) -> Found | None:
        if not path.is_file() or path.suffix.lower() in (".csv", ".tsv", ".tar"):
            return None
        with open_regular(path) as file:
            first = file.readline(MAX_LINE).strip()
        names = [f'"{name}"'.encode() for name in (*PATHS, "feat")]
        if not first.startswith(b"{") or not any(name in first for name in names):
            return None
        signs = [b'"image"', *(suffix.encode() for suffix in IMAGES.suffixes)]
        seen = IMAGES if any(sign in first.lower() for sign in signs) else RECORDINGS
        return Found(self, path, seen) if kind in (None, seen) else None

    def samples(self, scan: Scan) -> Iterator[Sample]:
        for row, line in _filled_lines(scan.path, scan):
            where = f"{scan.path}, line {row}"
            try:
                record: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON ({error}); write objects") from error
            if not isinstance(record, dict) or "feat" in record or "vad" in record:
                found = "no object with key, wav and spk alone"
                raise DataError(f"{where} is {found}; features and spans of speech are not read")
            place: Any = next((record[name] for name in PATHS if name in record), None)
            identity: Any = next((record[name] for name in IDENTITIES if name in record), None)
            key = record.get("key", place)
            if isinstance(identity, int | float) and not isinstance(identity, bool):
                identity = parse_label(identity, where)
            is_text = all(isinstance(cell, str) and cell for cell in (key, place))
            is_named = isinstance(identity, str | int) and not isinstance(identity, bool)
            if not is_text or not is_named or identity == "":
                cells = f"key, path and identity are {[key, place, identity]}"
                raise DataError(f"{where}: {cells}; each must be a string")
            if any("\ud800" <= sign <= "\udfff" for sign in f"{key}{place}{identity}"):
                # JSON can escape what no text has
                raise DataError(
                    f"{where}: {line[:80]!r} has names that are not UTF-8; correct them"
                )
            yield Sample(identity, key, _check_path(place, where), key=row)


def _filled_lines(path: Path, scan: Scan) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with open_text(path, encoding="utf-8-sig") as file:
            for row, line in enumerate(_lines(path, file, scan.progress), start=1):
                if line.strip():
                    yield row, line.strip()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; a list of speakers is needed beside it") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


FIRST = ("a", "first", "path1", "image1", "enrol")
SECOND = ("b", "second", "path2", "image2", "test")
LABEL = ("label", "is_genuine", "same", "issame", "target")
_WORDS = {
    **dict.fromkeys(("1", "true", "target", "genuine", "same", "yes"), True),
    **dict.fromkeys(("0", "false", "nontarget", "impostor", "different", "no", "-1"), False),
}
_Pair = tuple[str, str, bool]


@dataclass(frozen=True)
class PairList:
    """Pairs of names in the order of their list."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    is_genuine: NDArray[np.bool_]  # [n]
    folds: NDArray[np.int64] | None = None  # [n], where the list has folds

    def __len__(self) -> int:
        return len(self.first)


def read_pairs(path: str | Path, *, extension: str = "jpg") -> PairList:
    """Pairs of a list; ``.csv`` and ``.tsv`` files have a header, others are as LFW's.

    Images that ``pairs.txt`` numbers get the extension: ``Ada 2`` is ``Ada/Ada_0002.jpg``.
    """
    path = Path(path)
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    pairs, folds = _csv(path) if is_csv else _lfw(path, extension)
    if not pairs:
        raise DataError(f"{path} has no pairs; a CSV names its columns a,b,label in its first line")
    first, second, labels = zip(*pairs, strict=True)
    return PairList(first, second, np.array(labels, dtype=np.bool_), folds)


def _csv(path: Path) -> tuple[list[_Pair], NDArray[np.int64] | None]:
    pairs, folds = [], []
    for line, row in read_rows(path):
        word = row[column_of(path, row, LABEL)].strip().lower()
        if word not in _WORDS:
            raise DataError(f"{path}, line {line}: the label {word[:40]!r} is not 0 or 1")
        names = (row[column_of(path, row, FIRST)], row[column_of(path, row, SECOND)])
        pairs.append((*names, _WORDS[word]))
        if "fold" in row:
            fold = row["fold"].strip()
            if not _is_count(fold):
                raise DataError(f"{path}, line {line}: the fold {fold[:40]!r} is not a number")
            folds.append(int(fold))
    return pairs, np.array(folds, dtype=np.int64) if folds else None


def _lfw(path: Path, extension: str) -> tuple[list[_Pair], NDArray[np.int64] | None]:
    try:
        with open_text(path) as file:
            lines = [line.split() for line in file.read().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}); convert it") from error
    num_folds, per_fold, start = 1, 0, 0
    if lines and len(lines[0]) in (1, 2) and all(map(_is_count, lines[0])):
        counts = [int(word) for word in lines[0]]
        num_folds, per_fold = counts if len(counts) == 2 else (1, counts[0])
        start = 1
    pairs = [
        _lfw_pair(words, extension, f"{path}, line {number}")
        for number, words in enumerate(lines[start:], start + 1)
        if words
    ]
    if start and len(pairs) != 2 * num_folds * per_fold:
        said = f"its first line promises {num_folds} folds of 2 x {per_fold}"
        raise DataError(f"{path} has {len(pairs)} pairs and {said}; download it again")
    folds = np.arange(len(pairs)) // (2 * per_fold) if start and num_folds > 1 else None
    return pairs, folds


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 9


def _lfw_pair(words: list[str], extension: str, where: str) -> _Pair:
    """``name 1 2`` is a genuine pair, ``name 1 other 2`` an impostor pair."""
    is_genuine = len(words) == 3
    if is_genuine:
        words = [words[0], words[1], words[0], words[2]]
    if len(words) != 4 or not all(map(_is_count, words[1::2])):
        raise DataError(f"{where}: {' '.join(words)[:60]!r} is not a pair of LFW's pairs.txt")
    a, b = (
        f"{name}/{name}_{int(number):04d}.{extension}"
        for name, number in zip(words[::2], words[1::2], strict=True)
    )
    return a, b, is_genuine
