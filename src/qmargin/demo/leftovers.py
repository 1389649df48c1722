"""Trainings of an earlier demo without its plan: how long they are, found by their recipes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qmargin.demo.losses import DemoLoss
from qmargin.demo.plan import MOST_EPOCHS, PLAN
from qmargin.demo.recipe import SIZES, Size, demo_recipe
from qmargin.demo.run import RESULT
from qmargin.demo.worlds import World
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.training.checkpoint import open_checkpoint
from qmargin.training.folders import list_steps
from qmargin.training.starting import CHECKPOINTS

_SEED = re.compile(r"seed-(\d+)")


def lost_size(
    folder: Path,
    losses: Sequence[DemoLoss],
    world_of: Callable[[int, Size], World],
    *,
    device: str,
    data: str | None,
) -> Size | None:
    """The size by which the trainings in a folder were made; None where there are none.

    Lengths are tried until one gives the recipe of a training that is there.

    Args:
        folder: Of the demo.
        losses: Whose trainings are looked for.
        world_of: The data of a seed and a size.
        device: Whose size is tried first.
        data: Path of the data; None for stroke identities.

    Raises:
        ConfigError: There are trainings, and no length gives the recipe of one.
    """
    seed, hashes = _first_trainings(folder, losses)
    if not hashes:
        return None
    for size in _sizes(device):
        world = world_of(seed, size)
        for loss, sha256 in hashes.items():
            if demo_recipe(loss, seed=seed, size=world.size, path=data).sha256 == sha256:
                return size
    raise ConfigError(
        f"{folder} has trainings and no {PLAN}, and no length of 1 to {MOST_EPOCHS} epochs on "
        f"{data or 'stroke identities'} gives their recipes; choose another --out, or remove the "
        "folders seed-* to train again"
    )


def _first_trainings(folder: Path, losses: Sequence[DemoLoss]) -> tuple[int, dict[DemoLoss, str]]:
    """The first seed with trainings, and the hashes of their recipes."""
    for seed, path in sorted(_seeds(folder)):
        found = {loss: _recipe_hash(path / loss.key) for loss in losses}
        hashes = {loss: sha256 for loss, sha256 in found.items() if sha256}
        if hashes:
            return seed, hashes
    return 0, {}


def _seeds(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("seed-*"):
        if match := _SEED.fullmatch(path.name):
            yield int(match[1]), path


def _recipe_hash(folder: Path) -> str | None:
    """Of the recipe of a part, by its result or else by its newest checkpoint."""
    try:
        card = read_result(folder / RESULT).system.model_card or {}
        if "recipe_sha256" in card:
            return str(card["recipe_sha256"])
    except (DataError, OSError):
        pass  # half of a result, or none
    for path in list_steps(folder / CHECKPOINTS).values():
        try:
            return open_checkpoint(path, check=False).manifest.recipe_sha256
        except CheckpointError:
            continue
    return None


def _sizes(device: str) -> Iterator[Size]:
    """The standard sizes, that of this device first, and then every other length."""
    bases = [SIZES[device], *(size for name, size in SIZES.items() if name != device)]
    yield from bases
    for base in bases:
        for epochs in range(1, MOST_EPOCHS + 1):
            if epochs != base.epochs:
                yield base._replace(epochs=epochs)
