"""Results for an artefact: those that were given, or small ones of the demo's recipe, made here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

from qmargin.demo.losses import LOSSES, DemoLoss
from qmargin.demo.plan import PLAN, read_plan
from qmargin.demo.run import DemoOptions, Part, complete_parts
from qmargin.errors import ConfigError, MarginWarning
from qmargin.files import Guard
from qmargin.paper.enough import check_pairs
from qmargin.paper.measured import KINDS, Measured, find_results, measured_in
from qmargin.paper.numbers import Row

RUNS = "runs"  # trainings that artefacts share
PAIR = ("arcface", "q_margin")  # losses whose pairs are drawn


@dataclass(frozen=True)
class Request:
    """How to make an artefact; the fields are options of ``qmargin paper``.

    Attributes:
        out: Folder of artefacts, and of the trainings behind them.
        results: Results to show instead of training anything.
        seeds: None for what the artefact needs.
        minutes: For five losses and one seed, as in the demo.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        data: Pictures instead of stroke identities, as in the demo.
        command: For the record.
        overwrite: Replace files in ``out`` that this command did not write.
    """

    out: Path
    results: Path | None = None
    seeds: int | None = None
    minutes: float | None = None
    device: str = "auto"
    data: Path | None = None
    command: str = "qmargin paper"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"--seeds is {self.seeds}; it must be at least 1")
        if self.minutes is not None and not 0.0 < self.minutes < float("inf"):
            raise ConfigError(f"--minutes is {self.minutes:g}; it must be above 0")
        if self.results is not None:
            self.refuse("seeds", "minutes", "data", why="--results shows what was measured before")

    def refuse(self, *names: str, why: str) -> None:
        """Refuse options that an artefact would not look at.

        Raises:
            ConfigError: One of them was given.
        """
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(f"--{name} is {value} and {why}; leave --{name} out")

    def guard(self) -> Guard:
        """Decides what may be written over."""
        inputs = () if self.results is None else (self.results,)
        return Guard(inputs, overwrite=self.overwrite)

    def demo_options(self, seeds: int) -> DemoOptions:
        """The same as options of the demo."""
        return DemoOptions(
            out=self.out / RUNS,
            seeds=seeds if self.seeds is None else self.seeds,
            minutes=self.minutes,
            device=self.device,
            data=self.data,
            command=self.command,
        )


def loss_of(row: Row) -> DemoLoss:
    """A setting of the paper as a loss that the demo trains.

    Examples:
        >>> from qmargin.paper.numbers import SPEAKER
        >>> loss_of(SPEAKER[-1]).key
        'q-margin-a1.5-s10-m0.1'
    """
    key = f"{row.loss.lower()}-a{row.alpha:g}-s{row.scale:g}-m{row.margin:g}"
    loss = DemoLoss(key, row.loss, row.alpha, "prior", row.scale, row.margin)
    return loss._replace(margin_kind=KINDS[row.loss])  # type: ignore[arg-type]


def results_for(
    request: Request, losses: Sequence[DemoLoss], *, far: float, seeds: int = 1
) -> list[Path]:
    """Files of results: given ones, or those of trainings that are made or completed now.

    Args:
        request: What was asked for.
        losses: To train, where no results are given.
        far: The largest that is shown; pictures with too few pairs for it are refused at once.
        seeds: Where the request does not say how many.
    """
    if request.results is not None:
        return find_results(request.results)
    return [part.result for part in _trained(request.demo_options(seeds), losses, far)]


def measured_for(
    request: Request, losses: Sequence[DemoLoss], *, far: float, seeds: int = 1
) -> list[Measured]:
    """What results say, by setting and protocol."""
    return measured_in(results_for(request, losses, far=far, seeds=seeds))


def _trained(options: DemoOptions, losses: Sequence[DemoLoss], far: float) -> list[Part]:
    """Trainings of the demo's recipe, made or completed now."""
    check_pairs(options, far)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarginWarning)  # captions name margins beyond reach
        return complete_parts(options, losses)


@contextmanager
def demo_parts(request: Request, *, far: float) -> Iterator[tuple[DemoOptions, dict[str, Part]]]:
    """ArcFace and Q-Margin of the demo with seed 0 by key, from a demo's folder or from our own.

    Where a folder is given, nothing is trained and nothing is written into it.

    Args:
        request: What was asked for.
        far: That both need a threshold for.

    Raises:
        ConfigError: The results are not of a demo, so that there are no models behind them, or
            some of its models are missing.
    """
    if request.results is None:
        options = request.demo_options(1)
        made = _trained(options, [LOSSES[key] for key in PAIR], far)
        yield options, {part.loss.key: part for part in made}
        return
    given = request.results
    if not (given / PLAN).is_file():
        raise ConfigError(
            f"{given} is not a folder of `qmargin demo`: it has no {PLAN}. Pictures of pairs need "
            "the demo's models, so give such a folder or leave --results out"
        )
    parts = {key: Part(LOSSES[key], 0, given / "seed-0" / key) for key in PAIR}
    missing = [key for key, part in parts.items() if not _is_complete(part)]
    if missing:
        raise ConfigError(
            f"{given} lacks {' and '.join(missing)} of seed 0: result.json and a checkpoint of "
            f"both are needed. Run `qmargin demo --out {given} --losses {' '.join(PAIR)}` to "
            "complete it, or leave --results out to train both elsewhere"
        )
    plan = read_plan(given / PLAN, remedy="give another folder")
    assert plan is not None  # the file is there
    with TemporaryDirectory() as scratch:  # what reading the data may write goes there
        copy(given / PLAN, scratch)
        data = None if plan.data is None else Path(plan.data)
        yield DemoOptions(Path(scratch), device=request.device, data=data), parts


def _is_complete(part: Part) -> bool:
    return part.result.is_file() and any((part.folder / "checkpoints").glob("step-*"))
