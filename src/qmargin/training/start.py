"""Start of a run: its folder, its lock, and the checkpoint it resumes from."""

from __future__ import annotations

import errno
import json
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from qmargin.errors import CheckpointError, ConfigError
from qmargin.training.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    Search,
    agree_on_newest,
    check_writable,
    list_steps,
    newest,
    open_checkpoint,
    read_recipe,
    set_aside,
)
from qmargin.training.distributed import Process, run_on_all
from qmargin.training.recipe import Recipe, check_resume
from qmargin.training.recipe_files import from_yaml
from qmargin.training.reporting import read_status

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class RunLock:
    """Hold ``folder/lock``, so that no second run writes to the folder; one rank holds it.

    The system releases the lock when the process ends. On a file system without locks, the owner
    named in the file decides.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "lock"
        self._file: int | None = None
        self._is_new_folder = False

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *details: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or raise; the folder is created if it is missing."""
        self._is_new_folder = not self.path.parent.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be opened ({error.strerror}); choose another output folder"
            ) from error
        try:
            is_locked = _flock(file)
            if is_locked and not os.fstat(file).st_nlink:  # its owner has just removed it
                is_locked = False
            owner = _read_owner(file)
            if is_locked is False or (is_locked is None and _may_be_alive(owner)):
                name = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
                raise ConfigError(
                    f"{self.path.parent} is in use by {name}; choose another output folder, or "
                    f"stop that run{'' if is_locked is False else ' and delete lock'}"
                )
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        if hasattr(os, "register_at_fork"):
            # Data workers that outlive a killed run would hold the lock. Closing a copy of the
            # descriptor does not unlock the original.
            reference = weakref.ref(self)

            def close() -> None:
                if (lock := reference()) is not None:
                    lock._close()

            os.register_at_fork(after_in_child=close)

    def release(self) -> None:
        """Release the lock, if held."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            self._close()

    def remove_unused(self) -> None:
        """Remove the lock's files from a folder without other files."""
        folder = self.path.parent
        if self._file is None:
            return
        with suppress(OSError):  # as for a folder with checkpoints, which is not removed
            if {path.name for path in folder.iterdir()} <= {self.path.name, CHECKPOINTS}:
                if (folder / CHECKPOINTS).exists():
                    (folder / CHECKPOINTS).rmdir()
                self.path.unlink()
                if self._is_new_folder:
                    folder.rmdir()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _flock(file: int) -> bool | None:
    """Whether this process has the lock; None if the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _read_owner(file: int) -> dict[str, Any]:
    """Owner of the lock by the file; empty if the file cannot be read."""
    try:
        owner = json.loads(os.read(file, 4096))
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _may_be_alive(owner: dict[str, Any]) -> bool:
    """Whether the owner may still run; one on another machine may."""
    try:
        if owner and owner["host"] == socket.gethostname():
            os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return bool(owner)


@contextmanager
def locked(folder: Path, process: Process) -> Iterator[None]:
    """Hold the folder for this run, which every rank must be able to write to.

    A run that is refused leaves nothing in it.
    """
    lock = RunLock(folder)

    def take() -> None:
        if process.is_first:
            lock.acquire()
            check_writable(folder)

    try:
        run_on_all(process, take)
        run_on_all(process, lambda: check_writable(folder / CHECKPOINTS))
        yield
    except BaseException:
        lock.remove_unused()
        raise
    finally:
        lock.release()


def stored_recipe(folder: Path, *, resume: bool | str | Path = True) -> Recipe | None:
    """Recipe of the newest or a named checkpoint, or None; ``find_start`` compares hashes later."""
    if not isinstance(resume, bool):
        return from_yaml(read_recipe(_open_named(Path(resume), folder, check=False)))
    failure: ConfigError | None = None
    for path in list_steps(folder / CHECKPOINTS).values():
        try:
            return from_yaml(read_recipe(open_checkpoint(path, check=False)))
        except CheckpointError:
            continue
        except ConfigError as error:
            failure = failure or ConfigError(f"{path}: {error}")
    newest(folder / CHECKPOINTS)  # raises if there are checkpoints and none is whole
    if failure is not None:
        raise failure
    return None


def recipe_to_train(
    recipe: Recipe | None, folder: Path, *, resume: bool | str | Path = False
) -> Recipe:
    """The requested recipe, or the stored one of a resumed run."""
    if recipe is not None:
        return recipe
    if resume is False:
        raise ConfigError("the recipe is missing; name one, or resume a run, which has its own")
    stored = stored_recipe(folder, resume=resume)
    if stored is None:
        raise ConfigError(f"there is no checkpoint in {folder} with a recipe; name the recipe")
    return stored


class Start(NamedTuple):
    """Starting point of a run."""

    checkpoint: Checkpoint | None  # to resume from; None to start at step 0
    notes: tuple[str, ...] = ()  # for the user: skipped checkpoints, changes of the recipe
    changes: tuple[str, ...] = ()  # lines of ``recipe.diff``


def find_start(
    recipe: Recipe,
    folder: Path,
    process: Process,
    *,
    resume: bool | str | Path = False,
    allow_changes: bool = False,
) -> Start:
    """Decide where to start, the same on every rank; arguments are those of ``loop.train``."""
    checkpoints = folder / CHECKPOINTS
    if isinstance(resume, bool):
        search = agree_on_newest(checkpoints, process)
    else:
        path = Path(resume)
        named = run_on_all(process, lambda: _open_named(path, folder, check=process.is_first))
        later = run_on_all(
            process, lambda: set_aside(checkpoints, named.step) if process.is_first else []
        )
        search = Search(named, tuple(f"{item.name}: set aside" for item in later))
    notes = [f"skipped {reason}" for reason in search.skipped]
    if search.checkpoint is None:
        if resume and not allow_changes:
            run_on_all(process, lambda: _check_begun(recipe, folder))
        notes.append(f"there is no checkpoint in {folder} yet; starting at step 0")
        return Start(None, tuple(notes) if resume else ())
    if resume is False:
        raise ConfigError(
            f"{folder} holds a run that is at step {search.checkpoint.step}; add --resume, or "
            "choose another output folder"
        )
    saved = from_yaml(read_recipe(search.checkpoint))
    changes = check_resume(saved, recipe, allow_changes=allow_changes)
    notes.append(f"resuming from {search.checkpoint.path}")
    notes += [f"the recipe has changed: {line}" for line in changes]
    return Start(search.checkpoint, tuple(notes), tuple(changes))


def _open_named(path: Path, folder: Path, *, check: bool) -> Checkpoint:
    """A checkpoint of the run by its path."""
    checkpoints = folder / CHECKPOINTS
    if not path.is_dir():
        known = ", ".join(item.name for item in list_steps(checkpoints).values())
        raise CheckpointError(f"there is no checkpoint {path}; the run has {known or 'none'}")
    if path.resolve().parent != checkpoints.resolve():
        raise ConfigError(f"{path} is not in {checkpoints}; name a checkpoint of the run itself")
    return open_checkpoint(path, check=check)


def _check_begun(recipe: Recipe, folder: Path) -> None:
    """Refuse to resume a run without a checkpoint by a different recipe."""
    begun = read_status(folder).get("recipe_sha256", recipe.sha256)
    if begun != recipe.sha256:
        raise ConfigError(
            f"the run in {folder} has no checkpoint and had another recipe (sha256 {begun:.12}, "
            f"now {recipe.sha256:.12}); give its settings, or start again without --resume"
        )
