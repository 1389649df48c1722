"""Utterances inside tar files, indexed by their headers and never extracted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from qmargin.data.audio import SUFFIXES
from qmargin.data.audio_collection import Utterance
from qmargin.data.tar_members import Member, tar_members
from qmargin.errors import DataError
from qmargin.files import Progress, open_regular

MAX_SPEAKER_BYTES = 1_024
MAX_AUDIO_BYTES = 1 << 31
MAX_LIST_BYTES = 1 << 26
_LOOK_AT = 64  # members that decide whether a tar holds audio


def shard_paths(path: Path, base: Path) -> list[Path]:
    """Tars of a folder, of a text file that lists them, or the one tar itself."""
    if path.is_dir():
        return sorted(path.glob("*.tar"))
    if path.suffix == ".tar":
        return [path]
    with open_regular(path) as file:
        content = file.read(MAX_LIST_BYTES + 1)
    if len(content) > MAX_LIST_BYTES:
        raise DataError(f"{path} is over {MAX_LIST_BYTES:,} bytes; list fewer tars in one file")
    try:
        rows = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert the file") from error
    paths = []
    for row, line in enumerate(rows, start=1):
        name = line.strip()
        if name and not name.endswith(".tar"):
            raise DataError(
                f"{path}, row {row}: {name!r} is no .tar; list tars that are not compressed, so "
                "that any utterance can be read without those before it"
            )
        if name:
            paths.append(base / name)
    return paths


def has_audio(path: Path) -> bool:
    """Whether one of a tar's first members is audio."""
    try:
        with open_regular(path) as file:
            members = tar_members(file, name=str(path), max_size=MAX_AUDIO_BYTES)
            return any(
                member.name.lower().endswith(SUFFIXES) for member in islice(members, _LOOK_AT)
            )
    except (DataError, OSError):
        return False


def read_shards(paths: Sequence[Path], *, progress: Progress | None = None) -> list[Utterance]:
    """Utterances of ``key.wav`` + ``key.spk`` members, in the order of the tars.

    Only headers and speakers are read. Other members are passed over.

    Raises:
        DataError: If a tar is missing, damaged or compressed, a member is larger than any
            recording, or one of a pair is missing.
    """
    utterances: list[Utterance] = []
    for number, path in enumerate(paths):
        if progress is not None:
            progress(number, len(paths))
        try:
            with open_regular(path) as file:
                utterances += _read_shard(path, file)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{path} cannot be read: {reason}; correct the list") from error
    if progress is not None:
        progress(len(paths), len(paths))
    return utterances


def _read_shard(path: Path, file: BinaryIO) -> list[Utterance]:
    audio: dict[str, Member] = {}
    speakers: dict[str, str] = {}
    for member in tar_members(file, name=str(path), max_size=MAX_AUDIO_BYTES):
        key, dot, suffix = member.name.rpartition(".")
        is_audio = f"{dot}{suffix}".lower() in SUFFIXES
        if is_audio and key in audio:
            raise DataError(f"{path} has two recordings of {key!r}; keep one")
        if is_audio:
            audio[key] = member
        elif suffix == "spk":
            speakers[key] = _speaker(path, file, member)
    lonely = sorted(audio.keys() ^ speakers.keys())
    if lonely:
        raise DataError(
            f"{path} has {len(lonely)} keys without a recording or without a speaker, the first is "
            f"{lonely[0]!r}; write key.wav and key.spk for each"
        )
    return [
        Utterance(key, str(path), speakers[key], 0, member.offset, member.size)
        for key, member in audio.items()
    ]


def _speaker(path: Path, file: BinaryIO, member: Member) -> str:
    if not 0 < member.size <= MAX_SPEAKER_BYTES:
        raise DataError(
            f"{path}: {member.name!r} has {member.size} bytes; a speaker's name has 1 to "
            f"{MAX_SPEAKER_BYTES}"
        )
    file.seek(member.offset)
    try:
        return file.read(member.size).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {member.name!r} is not UTF-8: {error}") from error
