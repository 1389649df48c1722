"""TensorBoard and Weights & Biases: optional, and imported only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from qmargin.errors import ConfigError
from qmargin.training.fields import check_known
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import to_dict


class Tracker(Protocol):
    """Takes numbers by name; texts and None are left out before."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record the numbers of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoardTracker:
    """Scalars in ``DIR/tensorboard``."""

    def __init__(self, recipe: Recipe, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # numbers from a step on replace what an abandoned attempt wrote
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add one scalar per number."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, with which a resumed training goes on.

    Its settings come from its own environment variables, such as ``WANDB_PROJECT``.
    """

    def __init__(self, recipe: Recipe, folder: Path, step: int) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        marker = folder / "wandb-run.txt"
        name = marker.read_text(encoding="ascii").strip() if marker.exists() else None
        options = {"id": name, "resume": "allow", "dir": str(folder)}
        self._run: Any = wandb.init(name=recipe.name, config=to_dict(recipe), **options)
        marker.write_text(f"{self._run.id}\n", encoding="ascii")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Send the numbers."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Recipe, Path, int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed, before anything else is done.

    Examples:
        >>> check_trackers(["tensorbord"])
        Traceback (most recent call last):
        qmargin.errors.ConfigError: a tracker is 'tensorbord', did you mean 'tensorboard'? known \
are tensorboard, wandb
    """
    for name in names:
        check_known(name, TRACKERS, "a tracker")
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; pip install 'qmargin[{name}]', or drop it")


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker can draw of a record.

    Examples:
        >>> numbers_of({"loss": 1.5, "path": "sparse", "effective_margin": None, "step": 3})
        {'loss': 1.5}
    """
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }
