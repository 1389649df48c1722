"""How long the demo trains: decided once, written down, and kept when it is run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from qmargin.demo.losses import LOSSES
from qmargin.demo.recipe import SIZES, Size, demo_recipe
from qmargin.errors import ConfigError, DataError
from qmargin.files import write_atomically

PLAN = "plan.json"
FORMAT = "qmargin-demo"
MINUTES = 6.0
SECONDS_BESIDE = 25.0  # start, drawing of samples, report
SECONDS_PER_TEST = 8.0  # embeddings and all pairs of one loss
MOST_EPOCHS = 200
NUM_TIMED = 8  # steps that are tried before the length is decided


class Plan(NamedTuple):
    """What was decided: the size, by which minutes, on which data."""

    size: Size
    minutes: float | None
    data: str | None
    digest: str | None


def find_plan(
    folder: Path,
    *,
    minutes: float | None,
    device: str,
    data: str | None = None,
    digest: str | None = None,
    lost: Callable[[], Size | None] = lambda: None,
) -> Size:
    """The plan in a folder, or a new one that is written there.

    Without ``minutes`` the demo has its standard length on every machine that needs at most
    ``MINUTES`` for it, so that its numbers can be compared.

    Args:
        folder: Of the demo.
        minutes: To train and test all losses once, on this machine.
        device: ``"cpu"`` or ``"cuda"``.
        data: Path of the data; None for stroke identities.
        digest: Of what is there now; not looked at where it is None.
        lost: The size of trainings that are there without a plan; None where there are none.
    """
    known = read_plan(folder / PLAN)
    if known is not None:
        if minutes is not None and minutes != known.minutes:
            raise ConfigError(
                f"--minutes is {minutes:g} and {folder} holds a demo of {known.size.epochs} "
                "epochs; leave it out to go on, or choose another --out"
            )
        if data != known.data:
            raise ConfigError(
                f"{folder} holds a demo on {known.data or 'stroke identities'}, not on "
                f"{data or 'stroke identities'}; choose another --out"
            )
        if digest is not None and digest != known.digest:
            raise ConfigError(
                f"{data} has other pictures than the demo in {folder} was trained with; choose "
                "another --out"
            )
        return known.size
    size = lost()
    if size is None:
        size = fitted(SIZES[device], _seconds_per_step(SIZES[device], device), minutes=minutes)
    content: dict[str, Any] = {"format": FORMAT, "version": 1, "minutes": minutes, "data": data}
    content["digest"] = digest
    content["size"] = size._asdict()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN, (json.dumps(content, indent=1) + "\n").encode())
    return size


def fitted(size: Size, seconds_per_step: float, *, minutes: float | None) -> Size:
    """A size with as many epochs as the time allows, and at least one.

    Examples:
        >>> fitted(Size(epochs=10), 0.01, minutes=None).epochs
        10
        >>> fitted(Size(epochs=10), 0.2, minutes=None).epochs
        3
    """
    seconds = 60.0 * (MINUTES if minutes is None else minutes) - SECONDS_BESIDE
    per_loss = seconds / len(LOSSES) - SECONDS_PER_TEST
    epochs = int(per_loss / (size.steps_per_epoch * seconds_per_step))
    most = size.epochs if minutes is None else MOST_EPOCHS
    return size._replace(epochs=max(1, min(epochs, most)))


def _seconds_per_step(size: Size, device: str) -> float:
    """Of the loss that takes longest; the fastest step, for a machine that is busy just now."""
    from qmargin.training.rehearsal import rehearse

    few = max(2, -(-NUM_TIMED * size.batch_size // size.num_classes))  # samples for all steps
    recipe = demo_recipe(LOSSES["q_margin"], seed=0, size=size._replace(samples_per_class=few))
    return min(rehearse(recipe, device=device, num_steps=NUM_TIMED).seconds[1:])


def read_plan(path: Path, *, remedy: str = "choose another --out, or remove it") -> Plan | None:
    """A plan as it was written; None without the file.

    Raises:
        DataError: It is no plan, with the remedy.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT or content["version"] != 1:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        size, digest = Size(**content["size"]), content["digest"]
        return Plan(size, content["minutes"], content["data"], digest)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the plan of a demo ({error}); {remedy}") from error
