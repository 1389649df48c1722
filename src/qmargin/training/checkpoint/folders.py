"""The folder of checkpoints: names, what a killed run left behind, and what may be deleted.

``step-000123`` is a whole checkpoint: it gets this name by one rename, after everything in it is
on the disk, and is never changed again. ``step-000123.tmp-...`` is one that is being written or
deleted; no reader looks at it. ``step-000123.aside-...`` is one that a run has turned away from.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from qmargin.errors import CheckpointError
from qmargin.files import sync_folder

_WHOLE = re.compile(r"step-(\d{6,18})")
_LEFTOVER = re.compile(r"step-\d{6,18}\.tmp-[0-9a-f]+")


def step_name(step: int) -> str:
    """Name of the checkpoint of a step.

    Examples:
        >>> step_name(123)
        'step-000123'
    """
    return f"step-{step:06d}"


def other_name(path: Path, kind: str) -> Path:
    """A free name beside a checkpoint, of the kind ``"tmp"`` or ``"aside"``."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def list_steps(folder: Path) -> dict[int, Path]:
    """Checkpoints that claim to be whole, newest first; empty if the folder does not exist."""
    if not folder.is_dir():
        return {}
    found = {
        int(match[1]): path for path in folder.iterdir() if (match := _WHOLE.fullmatch(path.name))
    }
    return dict(sorted(found.items(), reverse=True))


def list_leftovers(folder: Path) -> list[Path]:
    """What killed saves and deletions left."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))


def remove_leftovers(folder: Path) -> None:
    """Delete what killed saves left; only the one run that holds the lock may do this."""
    for path in list_leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint; killed half-way, it leaves a leftover and not a damaged checkpoint."""
    temporary = other_name(path, "tmp")
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)  # the next save tries again


def prune(folder: Path, *, step: int, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints up to ``step``.

    Later ones are not touched: they are not from this run's past, so they do not count.

    Returns:
        The checkpoints that were deleted.
    """
    past = [path for number, path in list_steps(folder).items() if number <= step]
    for path in past[keep:]:
        delete_checkpoint(path)
    return past[keep:]


def set_aside(folder: str | Path, step: int, *, delete: bool = False) -> list[Path]:
    """Take later checkpoints out of the way of a run that goes on from ``step``.

    A run that resumes from an older checkpoint by name, or rolls back after a loss spike, must not
    find the abandoned future when it is resumed the next time. Call it on one rank.

    Args:
        folder: The folder of checkpoints.
        step: The last one that stays.
        delete: Delete them; otherwise they are renamed to ``step-...aside-...`` and kept.

    Returns:
        The checkpoints that were there.
    """
    folder = Path(folder)
    later = [path for number, path in list_steps(folder).items() if number > step]
    for path in later:
        if delete:
            delete_checkpoint(path)
        else:
            path.rename(other_name(path, "aside"))
    if later:
        sync_folder(folder)
    return later


def check_writable(folder: str | Path, *, needed_bytes: int = 0) -> None:
    """Refuse a folder that a run could not write to, before the run starts.

    A file is written, synced, renamed and deleted there.

    Args:
        folder: Made if it does not exist.
        needed_bytes: What the first checkpoint will take; see ``CheckpointState.num_bytes``.

    Raises:
        CheckpointError: It cannot be written to, or has less space left than is needed.
    """
    folder = Path(folder)
    probe = folder / f".probe-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("xb") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
        probe = probe.rename(probe.with_suffix(".done"))
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "change its permissions"
        raise CheckpointError(
            f"{folder} cannot be written to ({error.strerror or error}); "
            f"choose another output folder, or {remedy}"
        ) from error
    if free < needed_bytes:
        raise CheckpointError(
            f"{folder} has {free:,} bytes left and checkpoints take {needed_bytes:,}; "
            "free some space or choose another output folder"
        )
