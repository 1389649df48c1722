"""The training of one part of the demo, with advice for the demo's own command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.errors import CheckpointError
from qmargin.training.checkpoint import is_damaged
from qmargin.training.loop import train
from qmargin.training.signals import Interrupted
from qmargin.training.starting import CHECKPOINTS

if TYPE_CHECKING:
    from qmargin.data.samples import Dataset
    from qmargin.training.recipe import Recipe


def train_part(
    recipe: Recipe, folder: Path, *, dataset: Dataset | None, device: str, title: str
) -> Path:
    """Train from the newest checkpoint on; returns the last one.

    Args:
        recipe: What to train.
        folder: Of this part alone.
        dataset: Instead of the recipe's own data.
        device: ``"cpu"`` or ``"cuda"``.
        title: Of the part, for messages.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM, after saving.
        CheckpointError: No checkpoint is whole, or none can be saved.
    """
    try:
        resume = (folder / CHECKPOINTS).exists()
        outcome = train(recipe, folder, resume=resume, dataset=dataset, device=device)
    except CheckpointError as error:
        if not is_damaged(folder / CHECKPOINTS):
            raise
        raise CheckpointError(
            f"{folder / CHECKPOINTS} has no whole checkpoint; remove the folder {folder} and run "
            f"the same command again: only {title} is trained anew ({error})"
        ) from error
    if outcome.signal:
        raise Interrupted(outcome.signal)
    assert outcome.checkpoint is not None  # a training that ended was saved
    return outcome.checkpoint
