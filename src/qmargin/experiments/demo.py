"""The demo: five losses on synthetic identities, as long as a few minutes allow."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from qmargin.errors import ConfigError
from qmargin.experiments.experiment import Experiment
from qmargin.experiments.named import DEMO_SETTINGS, SIZES, Size, demo_experiment, loss_arm
from qmargin.experiments.named import stroke_recipe as _stroke_recipe
from qmargin.experiments.page import tell
from qmargin.experiments.runner import RunOptions, complete, read_record
from qmargin.experiments.space import with_point
from qmargin.training.distributed import choose_device

MINUTES = 6.0
SECONDS_BESIDES = 25.0  # start, drawing of samples, report
SECONDS_PER_TEST = 8.0  # embeddings and all pairs of one loss
MOST_EPOCHS = 200
NUM_TIMED = 8  # steps that are tried before the length is decided
DATA_NOTE = (
    "The settings of the losses were chosen on synthetic strokes, not on these pictures; with "
    "settings of their own another loss may be ahead."
)


@dataclass(frozen=True)
class DemoOptions:
    """What to run; the fields are options of ``qmargin demo``.

    Attributes:
        out: Folder of the demo; one that holds a part of it is completed.
        losses: Of the five; none for all.
        seeds: Each has other identities and other weights.
        minutes: For all five losses with one seed; None for the standard length.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        data: Pictures instead of stroke identities, see ``read_pictures``.
        command: For the record.
    """

    out: Path
    losses: tuple[str, ...] = ()
    seeds: int = 1
    minutes: float | None = None
    device: str = "auto"
    data: Path | None = None
    command: str = "qmargin demo"

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
        if self.minutes is not None and not 0.0 < self.minutes < float("inf"):
            raise ConfigError(f"minutes is {self.minutes:g}; it must be above 0")


def run_demo(options: DemoOptions) -> Path:
    """Train and test what is missing, write the report, print the verdict; returns the page.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM; run again to continue.
        ConfigError: The folder holds a demo of another length or other data.
    """
    experiment, size = find_demo(options)
    device = choose_device(0, options.device).type
    sys.stdout.write(_announced(options, experiment, size, device) + "\n")
    running = RunOptions(devices=(options.device,), show=True, command=options.command)
    finished = complete(experiment, options.out, running)
    tell(finished, DATA_NOTE if options.data is not None else "")
    return finished.page


def find_demo(options: DemoOptions) -> tuple[Experiment, Size]:
    """The experiment of the options: of the length that its folder has, or of a new one."""
    device = choose_device(0, options.device).type
    standard = SIZES[device]
    details = (read_record(options.out) or {}).get("details", {})
    epochs, minutes = details.get("epochs"), details.get("minutes")
    if isinstance(epochs, int):
        if options.minutes is not None and options.minutes != minutes:
            raise ConfigError(
                f"--minutes is {options.minutes:g} and {options.out} holds a demo of {epochs} "
                "epochs; leave it out to continue, or choose another --out"
            )
        size = standard._replace(epochs=epochs)
    else:
        demo_experiment(device, options.data, size=standard).world.opened()  # refused at once
        minutes = options.minutes
        size = fitted(standard, seconds_per_step(standard, device), minutes=minutes)
    made = demo_experiment(device, options.data, size=size)
    made = replace(
        made,
        seeds=tuple(range(options.seeds)),
        details={"epochs": size.epochs, "minutes": minutes},
    )
    return (made.with_arms(options.losses) if options.losses else made), size


def fitted(size: Size, seconds: float, *, minutes: float | None) -> Size:
    """A size with as many epochs as the time allows, and at least one.

    Without ``minutes`` the demo has its standard length on every machine that needs at most
    ``MINUTES`` for it, so that its numbers can be compared.

    Args:
        size: Of the standard demo.
        seconds: Of a step.
        minutes: For five losses and one seed.

    Examples:
        >>> fitted(Size(epochs=10), 0.01, minutes=None).epochs
        10
        >>> fitted(Size(epochs=10), 0.2, minutes=None).epochs
        3
    """
    in_all = 60.0 * (MINUTES if minutes is None else minutes) - SECONDS_BESIDES
    per_loss = in_all / len(DEMO_SETTINGS["cpu"]) - SECONDS_PER_TEST
    epochs = int(per_loss / (size.total_steps // size.epochs * seconds))
    most = size.epochs if minutes is None else MOST_EPOCHS
    return size._replace(epochs=max(1, min(epochs, most)))


def seconds_per_step(size: Size, device: str) -> float:
    """Of the slowest loss; the fastest of a few steps, for a machine that is busy just now."""
    from qmargin.training.dry_run import dry_run

    few = max(2, -(-NUM_TIMED * size.batch_size // size.num_classes))  # samples for all steps
    arm = loss_arm("q_margin", [DEMO_SETTINGS["cpu"]["q_margin"]])
    recipe = with_point(_stroke_recipe(size._replace(samples_per_class=few)), arm.points[0])
    return min(dry_run(recipe, device=device, num_steps=NUM_TIMED).seconds[1:])


def _announced(options: DemoOptions, experiment: Experiment, size: Size, device: str) -> str:
    seeds, losses = len(experiment.seeds), len(experiment.arms)
    standard = SIZES[device]
    length, usual = (f"{one.epochs} epoch{'s' * (one.epochs > 1)}" for one in (size, standard))
    if options.data is not None:  # whose epochs are as long as there are pictures
        length, usual = (f"{one.total_steps:,} steps each" for one in (size, standard))
    text = f"{losses} loss{'es' * (losses > 1)}, {seeds} seed{'s' * (seeds > 1)}, {length}, "
    text += f"on {device}"
    if size.epochs < standard.epochs:
        text += f"; the standard length is {usual} (--minutes gives it more time)"
    if options.minutes is not None and size.epochs == 1:
        text += f"; the shortest demo, even if it takes more than {options.minutes:g} minutes"
    return text
