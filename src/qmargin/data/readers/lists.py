"""Lists of files: Kaldi's ``wav.scp`` with ``utt2spk``, and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qmargin.data.fingerprint import Hasher, hash_lists
from qmargin.data.index import SampleIndex, parse_label
from qmargin.data.reader import IMAGES, RECORDINGS, Found, Kind, Reader, Sample, Scan
from qmargin.data.readers.manifest import IDENTITIES, MAX_LINE, PATHS, check_path, lines_of
from qmargin.errors import DataError
from qmargin.files import open_regular, open_text
from qmargin.registry import register_reader


class _ListReader(Reader):
    """A list that is hashed whole, with paths relative to its folder."""

    options = ("root",)

    def hasher(self, scan: Scan, index: SampleIndex | None, started: int | None) -> Hasher:
        return hash_lists(self.files(scan))

    def watched(self, scan: Scan) -> list[Path]:
        return []


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
        scp, utt2spk = scan.path, scan.path.with_name("utt2spk")
        for name in ("segments", "reco2file_and_channel"):
            if scp.with_name(name).exists():
                raise DataError(
                    f"{scp.with_name(name)} cuts recordings up; write the pieces as files first"
                )
        speakers = {}
        for row, line in _lines(utt2spk, scan):
            cells = line.split()
            if len(cells) != 2:
                raise DataError(
                    f"{utt2spk}, line {row}: {len(cells)} columns; write key and speaker"
                )
            speakers[cells[0]] = cells[1]
        for row, line in _lines(scp, scan):
            key, _, place = line.partition(" ") if " " in line else line.partition("\t")
            if key not in speakers:
                raise DataError(
                    f"{scp}, line {row}: key {key!r} is not in utt2spk; add its speaker"
                )
            place = check_path(place.strip(), f"{scp}, line {row}")
            yield Sample(speakers[key], key, path=place, key=row)


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
        is_image = b'"image"' in first or any(
            suffix.encode() in first.lower() for suffix in IMAGES.suffixes
        )
        seen = IMAGES if is_image else RECORDINGS
        return Found(self, path, seen) if kind in (None, seen) else None

    def samples(self, scan: Scan) -> Iterator[Sample]:
        for row, line in _lines(scan.path, scan):
            where = f"{scan.path}, line {row}"
            try:
                record: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where} is not JSON ({error}); write one object per line"
                ) from error
            if not isinstance(record, dict) or "feat" in record or "vad" in record:
                raise DataError(
                    f"{where} is no object with key, wav and spk alone; features made elsewhere "
                    "and spans of speech are not read"
                )
            key, place, identity = _cells(record)
            if isinstance(identity, int | float) and not isinstance(identity, bool):
                identity = parse_label(identity, where)
            is_text = all(isinstance(cell, str) and cell for cell in (key, place))
            is_named = isinstance(identity, str | int) and not isinstance(identity, bool)
            if not is_text or not is_named or identity == "":
                raise DataError(
                    f"{where}: key, path and identity are {[key, place, identity]}; each must be a "
                    "string"
                )
            if any("\ud800" <= sign <= "\udfff" for sign in f"{key}{place}{identity}"):
                raise DataError(  # JSON can escape what no text has
                    f"{where}: {line[:80]!r} has names that are not UTF-8; correct them"
                )
            yield Sample(identity, key, path=check_path(place, where), key=row)


def _cells(record: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Key, path and identity of an object; None for what it has not."""
    place = next((record[name] for name in PATHS if name in record), None)
    identity = next((record[name] for name in IDENTITIES if name in record), None)
    return record.get("key", place), place, identity


def _lines(path: Path, scan: Scan) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with open_text(path, encoding="utf-8-sig") as file:
            for row, line in enumerate(lines_of(path, file, scan.progress), start=1):
                if line.strip():
                    yield row, line.strip()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; a list of speakers is needed beside it") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
