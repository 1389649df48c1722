"""Lists of utterances as people have them: folders, Kaldi, JSON lines, tar shards, CSV."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from qmargin.data.audio import SUFFIXES
from qmargin.data.audio_collection import AudioCollection, Utterance
from qmargin.data.audio_shards import has_audio, read_shards, shard_paths
from qmargin.data.image_folder import check_no_parts, is_image_name
from qmargin.data.manifest import read_rows
from qmargin.errors import DataError
from qmargin.files import Progress, is_file, open_regular, open_text

Layout = Literal["folder", "kaldi", "json", "shards", "csv"]
MAX_LINE = 1 << 20
MAX_DEPTH = 16
_UNREADABLE = (".m4a", ".aac", ".wma", ".webm", ".mp4")
_LOOK_AT = 10_000  # files that decide whether a folder holds audio: not all of 42 million images
_PATH_COLUMNS = ("path", "wav", "file", "filename", "audio")
_SPEAKER_COLUMNS = ("speaker", "spk", "speaker_id", "spk_id", "label", "identity")


def open_audio(
    path: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    sample_rate: int = 16000,
    progress: Progress | None = None,
) -> AudioCollection:
    """Utterances of a folder, a list or tar shards; the layout is recognised from the path.

    | layout | path | speaker |
    | --- | --- | --- |
    | folder | a folder with a folder per speaker, of any depth | first folder below the path |
    | Kaldi | a folder with ``wav.scp`` and ``utt2spk`` | second column of ``utt2spk`` |
    | JSON lines | a file of ``{"key": ..., "wav": ..., "spk": ...}``, one per line | ``spk`` |
    | tar shards | a tar, a folder of tars, or a file that lists tars | content of ``key.spk`` |
    | CSV | a file or a folder with one: columns ``path``, ``speaker``, maybe ``key`` | its column |

    Args:
        path: See above.
        root: Folder that relative paths in a list start from; the list's own without it.
        split: Rows of a CSV whose column ``split`` has this value.
        sample_rate: Of the samples that indexing gives.
        progress: Called with tars read and tars in all.

    Raises:
        DataError: If nothing is recognised, or a row is wrong; the message names file and row.
    """
    path = Path(path)
    if path.is_dir() and (listed := _csv_of(path)) is not None:
        path = listed
    layout = audio_layout(path)
    if layout is None:
        raise _unknown(path)
    base = Path(root) if root is not None else path if path.is_dir() else path.parent
    if split is not None and layout != "csv":
        raise DataError(f"split is {split!r} and {path} is no CSV; leave it out")
    readers: dict[str, Callable[[], list[Utterance]]] = {
        "folder": lambda: _read_folder(path),
        "kaldi": lambda: _read_kaldi(path, base),
        "json": lambda: _read_json(path, base),
        "shards": lambda: read_shards(shard_paths(path, base), progress=progress),
        "csv": lambda: _read_csv(path, base, split),
    }
    origin = path / "wav.scp" if layout == "kaldi" else path
    return AudioCollection(readers[layout](), origin=str(origin), sample_rate=sample_rate)


def _unknown(path: Path) -> DataError:
    """What is wrong with a path that holds no audio."""
    if path.is_file() and path.suffix.lower() == ".csv":
        for _ in read_rows(path):  # which says what is wrong with its header
            break
    if path.is_dir() and any(map(is_image_name, islice(_files_below(path), _LOOK_AT))):
        return DataError(f"{path} has images, and recordings are expected; set data.kind to images")
    return DataError(
        f"{path} is no list or folder of audio that is known; give a folder per speaker, a folder "
        "with wav.scp and utt2spk, JSON lines, tar shards, or a CSV whose first line names the "
        "columns path and speaker"
    )


def audio_layout(path: str | Path) -> Layout | None:
    """Layout of what is at a path, or None where it is not audio."""
    path = Path(path)
    if path.is_dir():
        if (path / "wav.scp").is_file():
            return "kaldi"
        if _csv_of(path) is not None:
            return "csv"
        tars = sorted(path.glob("*.tar"))
        if tars:
            return "shards" if has_audio(tars[0]) else None
        return "folder" if _first_audio(path) else None
    if not path.is_file():
        return None
    if path.suffix == ".tar":
        return "shards" if has_audio(path) else None
    return _layout_of_text(path)


def _layout_of_text(path: Path) -> Layout | None:
    with open_regular(path) as file:
        first = file.readline(MAX_LINE).strip()
    if first.startswith(b"{"):
        return "json" if b'"wav"' in first or b'"feat"' in first else None
    if path.suffix == ".csv":
        columns = [name.strip().lower() for name in first.decode("utf-8-sig", "replace").split(",")]
        is_audio = any(name in columns for name in _SPEAKER_COLUMNS[:4])
        return "csv" if is_audio and any(name in columns for name in _PATH_COLUMNS) else None
    return "shards" if first.endswith(b".tar") and _names_audio(path, first) else None


def _names_audio(path: Path, first: bytes) -> bool:
    tar = path.parent / os.fsdecode(first)
    return has_audio(tar) if is_file(tar) else True  # a missing tar is reported when it is read


def _csv_of(folder: Path) -> Path | None:
    """The one CSV of a folder that lists recordings with their speakers."""
    files = (path for path in sorted(folder.glob("*.csv")) if path.is_file())
    found = [path for path in files if _layout_of_text(path) == "csv"]
    return found[0] if len(found) == 1 else None


def _first_audio(folder: Path) -> bool:
    names = islice(_files_below(folder), _LOOK_AT)
    return any(name.lower().endswith((*SUFFIXES, *_UNREADABLE)) for name in names)


def _files_below(folder: Path, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Relative paths of files in a folder and those below it, in the order of their names."""
    if depth > MAX_DEPTH:  # a link that leads back to a folder above it never ends
        raise DataError(
            f"{folder / prefix} is more than {MAX_DEPTH} folders deep; look for a link to itself"
        )
    with os.scandir(folder / prefix) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files_below(folder, f"{name}/", depth + 1)
        else:
            yield name


def _read_folder(folder: Path) -> list[Utterance]:
    utterances = []
    unreadable = ""
    for name in _files_below(folder):
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  # a million times
        if suffix in SUFFIXES:
            speaker, separator, _ = name.partition("/")
            if not separator:
                raise DataError(
                    f"{folder / name} is in no speaker's folder; make a folder per speaker"
                )
            utterances.append(Utterance(name, str(folder / name), speaker))
        elif suffix in _UNREADABLE:
            unreadable = unreadable or name
    if not utterances:
        raise DataError(
            f"{folder / unreadable} and files like it cannot be decoded; convert them to FLAC or "
            "WAV once, for example with ffmpeg"
        )
    speakers = {item.speaker for item in utterances}
    nested = {item.speaker for item in utterances if item.key.count("/") > 1}
    check_no_parts(
        folder,
        sorted(speakers),
        is_nested=lambda name: len(speakers) > 1 and name in nested,
        has_samples=speakers.__contains__,
    )
    if len(speakers) == 1:
        raise DataError(
            f"{folder} has one folder, {utterances[0].speaker!r}, so there is one speaker; give "
            "the folder whose folders are the speakers"
        )
    return utterances


def _read_kaldi(folder: Path, base: Path) -> list[Utterance]:
    for name in ("segments", "reco2file_and_channel"):
        if (folder / name).exists():
            raise DataError(f"{folder / name} cuts recordings up; write the pieces as files first")
    speakers = {}
    for row, line in _lines(folder / "utt2spk"):
        cells = line.split()
        if len(cells) != 2:
            raise DataError(
                f"{folder / 'utt2spk'}, row {row}: {len(cells)} columns; write key and speaker"
            )
        speakers[cells[0]] = cells[1]
    utterances = []
    scp = folder / "wav.scp"
    for row, line in _lines(scp):
        key, _, place = line.partition(" ") if " " in line else line.partition("\t")
        if key not in speakers:
            raise DataError(f"{scp}, row {row}: key {key!r} is not in utt2spk; add its speaker")
        where = _checked_place(place.strip(), f"{scp}, row {row}")
        utterances.append(Utterance(key, str(base / where), speakers[key], row))
    return utterances


def _read_json(path: Path, base: Path) -> list[Utterance]:
    utterances = []
    for row, line in _lines(path):
        where = f"{path}, row {row}"
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error}); write one object per line") from error
        if not isinstance(record, dict) or "feat" in record or "vad" in record:
            raise DataError(
                f"{where} is no object with key, wav and spk alone; features made elsewhere and "
                "spans of speech are not read"
            )
        cells: list[Any] = [record.get(name) for name in ("key", "wav", "spk")]
        if not all(isinstance(cell, str) and cell for cell in cells):
            raise DataError(f"{where}: key, wav and spk are {cells}; each must be a string")
        if any(_has_surrogates(cell) for cell in cells):  # JSON can escape what no text has
            raise DataError(f"{where}: {line[:80]!r} has names that are not UTF-8; correct them")
        key, place, speaker = cells
        place = _checked_place(place, where)
        utterances.append(Utterance(key, str(base / place), speaker, row))
    return utterances


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _read_csv(path: Path, base: Path, split: str | None) -> list[Utterance]:
    with open_text(path, newline="", encoding="utf-8-sig") as file:
        table = csv.reader(_text_lines(path, file), strict=True)
        utterances = []
        try:
            names = [name.strip().lower() for name in next(table, [])]
            column = _columns(path, names, split)
            for cells in table:
                where = f"{path}, row {table.line_num}"
                if len(cells) != len(names):
                    raise DataError(f"{where}: {len(cells)} cells under {len(names)} columns")
                if split is not None and cells[column["split"]] != split:
                    continue
                place = _checked_place(cells[column["path"]], where)
                speaker = cells[column["speaker"]].strip()
                if not speaker:
                    raise DataError(f"{where}: the speaker is empty; name it")
                key = cells[column["key"]] if "key" in column else place
                utterances.append(Utterance(key, str(base / place), speaker, table.line_num))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, row {table.line_num + 1} is no CSV in UTF-8: {error}; convert the file"
            ) from error
    if not utterances and split is not None:
        raise DataError(f"{path} has no row whose split is {split!r}; check its spelling")
    return utterances


def _columns(path: Path, names: list[str], split: str | None) -> dict[str, int]:
    found = {}
    for kind, known in (("path", _PATH_COLUMNS), ("speaker", _SPEAKER_COLUMNS)):
        matching = [name for name in known if name in names]
        if not matching:
            raise DataError(f"{path} has columns {names} and none is {kind!r}; name one so")
        found[kind] = names.index(matching[0])
    for kind in ("key", "split"):
        if kind in names:
            found[kind] = names.index(kind)
    if split is not None and "split" not in found:
        raise DataError(f"{path} has no column 'split'; leave split={split!r} out")
    return found


def _checked_place(place: str, where: str) -> str:
    if not place:
        raise DataError(f"{where}: the path is empty; write one")
    if place.endswith("|") or place.startswith(("|", "pipe:")):
        raise DataError(
            f"{where}: {place!r} is a command, and lists of audio never start one; run it once and "
            "write the files it makes into the list"
        )
    head, colon, offset = place.rpartition(":")
    if colon and offset.isdigit() and head.endswith(".ark"):
        raise DataError(
            f"{where}: {place!r} points into a Kaldi archive; extract the audio into files first"
        )
    if "\0" in place:
        raise DataError(f"{where}: the path has a NUL character; correct it")
    return place


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with open_text(path, encoding="utf-8-sig") as file:
            for row, line in enumerate(_text_lines(path, file), start=1):
                if line.strip():
                    yield row, line.strip()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; a list of speakers is needed beside it") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def _text_lines(path: Path, file: Any) -> Iterator[str]:
    row = 0
    while line := file.readline(MAX_LINE):
        row += 1
        if len(line) == MAX_LINE:
            raise DataError(f"{path}, row {row} has more than {MAX_LINE:,} characters; is it text")
        yield line
