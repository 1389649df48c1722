"""Results for an artefact: those that were given, or small ones of the demo's recipe, made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qmargin.demo.losses import LOSSES, DemoLoss
from qmargin.demo.run import DemoOptions, Part, complete_parts
from qmargin.errors import ConfigError
from qmargin.paper.measured import KINDS, Measured, find_results, measured_in
from qmargin.paper.numbers import Row

RUNS = "runs"  # trainings that artefacts share


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
    """

    out: Path
    results: Path | None = None
    seeds: int | None = None
    minutes: float | None = None
    device: str = "auto"
    data: Path | None = None
    command: str = "qmargin paper"

    def demo_options(self, seeds: int) -> DemoOptions:
        """The same as options of the demo."""
        return DemoOptions(
            out=self.out / RUNS,
            seeds=self.seeds or seeds,
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


def results_for(request: Request, losses: Sequence[DemoLoss], *, seeds: int = 1) -> list[Path]:
    """Files of results: given ones, or those of trainings that are made or completed now."""
    if request.results is not None:
        return find_results(request.results)
    return [part.result for part in parts_for(request, losses, seeds=seeds)]


def parts_for(request: Request, losses: Sequence[DemoLoss], *, seeds: int = 1) -> list[Part]:
    """Trainings of the demo's recipe, made or completed now."""
    return complete_parts(request.demo_options(seeds), losses)


def measured_for(request: Request, losses: Sequence[DemoLoss], *, seeds: int = 1) -> list[Measured]:
    """What results say, by setting and protocol."""
    return measured_in(results_for(request, losses, seeds=seeds))


def demo_parts(request: Request) -> tuple[DemoOptions, dict[str, Part]]:
    """The five losses of the demo with seed 0 by key, from a demo's folder or from our own.

    Raises:
        ConfigError: The results are not of a demo, so that there are no models behind them.
    """
    options = request.demo_options(1)
    if request.results is not None:
        if not (request.results / "plan.json").exists():
            raise ConfigError(
                f"{request.results} is not a folder of `qmargin demo`; pictures of pairs need its "
                "models, so give such a folder or leave --results out"
            )
        options = DemoOptions(request.results, seeds=1, device=request.device, data=request.data)
    losses = [LOSSES[key] for key in ("arcface", "q_margin")]
    return options, {part.loss.key: part for part in complete_parts(options, losses)}
