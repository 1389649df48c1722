"""The beginning of a run: its folder, its lock, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qmargin.errors import CheckpointError, ConfigError
from qmargin.training.checkpoint.folders import check_writable, list_steps, set_aside
from qmargin.training.checkpoint.reader import (
    Checkpoint,
    Search,
    agree_on_newest,
    newest,
    open_checkpoint,
    read_recipe,
)
from qmargin.training.distributed.consensus import run_on_all
from qmargin.training.distributed.process import Process
from qmargin.training.journal import read_status
from qmargin.training.lock import RunLock
from qmargin.training.recipe import Recipe, check_resume
from qmargin.training.recipe_files import from_yaml

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        checkpoint: The one to go on from; None to start at step 0.
        notes: What the user should know: checkpoints that were passed over, changes of the recipe.
        changes: Lines of ``recipe_changes.diff``.
    """

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@contextmanager
def locked(folder: Path, process: Process) -> Iterator[None]:
    """Hold the folder for this run; every rank must be able to write to it."""
    lock = RunLock(folder)

    def take() -> None:
        if process.is_first:
            lock.acquire()
            check_writable(folder)

    def probe() -> None:
        check_writable(folder / CHECKPOINTS)

    try:
        run_on_all(process, take)
        run_on_all(process, probe)
        yield
    finally:
        lock.release()


def stored_recipe(folder: Path, *, resume: bool | str | Path = True) -> Recipe | None:
    """The recipe of the checkpoint that a run goes on from; None without any checkpoint.

    Hashes are not compared here: ``find_start`` does that, and holds what it finds against the
    recipe.

    Args:
        folder: The output folder.
        resume: True for the newest checkpoint, or the path of one.

    Raises:
        CheckpointError: There are checkpoints, and no recipe can be read from any of them.
    """
    if not isinstance(resume, bool):
        _check_named(Path(resume), folder)
        return from_yaml(read_recipe(open_checkpoint(resume, check=False)))
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
    """The recipe that was asked for, or the stored one of a run that goes on.

    Raises:
        ConfigError: There is none.
    """
    if recipe is not None:
        return recipe
    if resume is False:
        raise ConfigError("the recipe is missing; name one, or resume a run, which has its own")
    stored = stored_recipe(folder, resume=resume)
    if stored is None:
        raise ConfigError(
            f"there is no checkpoint in {folder} to take the recipe from; name the recipe"
        )
    return stored


def find_start(
    recipe: Recipe,
    folder: Path,
    process: Process,
    *,
    resume: bool | str | Path = False,
    allow_changes: bool = False,
) -> Start:
    """Decide where to begin, the same on every rank.

    Args:
        recipe: That was asked for.
        folder: The output folder.
        process: This rank.
        resume: True for the newest whole checkpoint, or the path of one; False for a new run.
        allow_changes: Whether the recipe may differ from the stored one in what decides the
            outcome.

    Raises:
        ConfigError: There are checkpoints and nobody asked to resume, or the recipe has changed in
            a way that does not fit them or is not allowed.
        CheckpointError: No checkpoint is whole, or not the named one.
    """
    if not isinstance(resume, bool):
        search = _named(Path(resume), folder, process)
    else:
        search = agree_on_newest(folder / CHECKPOINTS, process)
    if search.checkpoint is None:
        if resume and not allow_changes:
            run_on_all(process, lambda: _check_begun(recipe, folder))
        note = f"there is no checkpoint in {folder} yet; starting at step 0"
        return Start(None, (*_passed_over(search), note) if resume else ())
    if resume is False:
        raise ConfigError(
            f"{folder} holds a run that is at step {search.checkpoint.step}; add --resume to go on "
            "with it, or choose another output folder"
        )
    saved = from_yaml(read_recipe(search.checkpoint))
    changes = check_resume(saved, recipe, allow_changes=allow_changes)
    notes = [*_passed_over(search), f"going on from {search.checkpoint.path}"]
    notes += [f"the recipe has changed: {line}" for line in changes]
    return Start(search.checkpoint, tuple(notes), tuple(changes))


def _named(path: Path, folder: Path, process: Process) -> Search:
    """A checkpoint by its path; later ones are renamed, so that they do not come back."""

    def read() -> Checkpoint:
        _check_named(path, folder)
        return open_checkpoint(path, check=process.is_first)

    checkpoint = run_on_all(process, read)

    def clear() -> list[str]:
        is_own = path.resolve().parent == (folder / CHECKPOINTS).resolve()
        if not is_own:
            raise ConfigError(
                f"{path} is not in {folder / CHECKPOINTS}; name a checkpoint of the run itself"
            )
        if not process.is_first:
            return []
        later = set_aside(folder / CHECKPOINTS, checkpoint.step)
        return [f"{item.name}: set aside" for item in later]

    return Search(checkpoint, tuple(run_on_all(process, clear)))


def _check_named(path: Path, folder: Path) -> None:
    if not path.is_dir():
        known = ", ".join(item.name for item in list_steps(folder / CHECKPOINTS).values())
        raise CheckpointError(f"there is no checkpoint {path}; the run has {known or 'none'}")


def _check_begun(recipe: Recipe, folder: Path) -> None:
    """Refuse to resume a run that left no checkpoint with a recipe other than its own."""
    begun = read_status(folder).get("recipe_sha256", recipe.sha256)
    if begun != recipe.sha256:
        raise ConfigError(
            f"the run in {folder} left no checkpoint and had another recipe (sha256 {begun:.12}, "
            f"now {recipe.sha256:.12}); give the settings it was started with, or start anew "
            "without --resume"
        )


def _passed_over(search: Search) -> list[str]:
    return [f"passed over {reason}" for reason in search.skipped]
