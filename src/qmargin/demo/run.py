"""The demo from end to end: train each loss, test all pairs, write the report.

Everything is in one folder: ``plan.json``, a folder per seed and loss with the training and its
``result.json``, pictures, and ``report/index.html``. What is there is not done again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.demo.losses import LOSSES, DemoLoss
from qmargin.demo.plan import find_plan
from qmargin.demo.recipe import Size, demo_recipe
from qmargin.errors import ConfigError, DataError
from qmargin.training.fields import check_known

if TYPE_CHECKING:
    from qmargin.demo.worlds import Stored, World
    from qmargin.evaluation.result import Result
    from qmargin.training.recipe import Recipe

RESULT = "result.json"
PICTURES = "pictures"
NOTE = "All data are synthetic: stroke identities drawn by this package. The verdict is about them."


@dataclass(frozen=True)
class DemoOptions:
    """What to run; the fields are options of ``qmargin demo``.

    Attributes:
        out: Folder of the demo; one that holds a part of it is completed.
        losses: Keys of ``LOSSES``.
        seeds: Each is a world of its own: other identities, other weights.
        minutes: For all five losses with one seed; None for the standard length.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        data: Pictures instead of stroke identities: see ``read_stored``.
        command: For the record.
    """

    out: Path
    losses: tuple[str, ...] = tuple(LOSSES)
    seeds: int = 1
    minutes: float | None = None
    device: str = "auto"
    data: Path | None = None
    command: str = "qmargin demo"

    def __post_init__(self) -> None:
        for key in self.losses:
            check_known(key, LOSSES, "a loss")
        if not self.losses or len(set(self.losses)) < len(self.losses):
            raise ConfigError(f"losses are {', '.join(self.losses) or 'none'}; name each one once")
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
        if self.minutes is not None and not 0.0 < self.minutes < float("inf"):
            raise ConfigError(f"minutes is {self.minutes:g}; it must be above 0")

    @property
    def data_name(self) -> str | None:
        """The whole path of the data, the same from every folder; None for stroke identities."""
        return None if self.data is None else str(self.data.resolve())


@dataclass(frozen=True)
class Part:
    """One training and its test."""

    loss: DemoLoss
    seed: int
    folder: Path

    @property
    def result(self) -> Path:
        """Written last: where it is, nothing is left to do."""
        return self.folder / RESULT


class Interrupted(Exception):
    """A signal stopped a training, which was saved first."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"signal {signal}")
        self.signal = signal


def run_demo(options: DemoOptions) -> Path:
    """Train and test what is missing, write the report, tell who is ahead; returns the page.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM; run again, it goes on.
        ConfigError: The folder cannot be used, or holds a demo of another length.
    """
    from qmargin.demo.report import summary, write_demo_report

    device = _device(options.device)
    data = options.data_name
    size = find_plan(options.out, minutes=options.minutes, device=device, data=data)
    worlds = _Worlds(options, size)
    parts = list(_parts(options))
    _say(NOTE if data is None else f"Data: {data}")
    _say(
        f"{len(options.losses)} losses, {options.seeds} seed{'s' * (options.seeds > 1)}, "
        f"{size.epochs} epochs, on {device}"
    )
    began, num_taken = time.perf_counter(), 0
    for number, part in enumerate(parts, start=1):
        world = worlds.of(part.seed)
        if _is_done(part, world, data):
            _say(f"[{number}/{len(parts)}] {part.loss.title}, seed {part.seed}: done before")
            continue
        spent = time.perf_counter() - began
        left = "" if not num_taken else _left(spent / num_taken * (len(parts) - number + 1))
        _say(f"[{number}/{len(parts)}] {part.loss.title}, seed {part.seed}{left}")
        _complete(part, world, options, device)
        num_taken += 1
    page = write_demo_report(options.out, parts, data)
    _say(summary(parts))
    _say(f"report: {page}")
    return page


def _parts(options: DemoOptions) -> Iterator[Part]:
    for seed in range(options.seeds):
        for key in options.losses:
            yield Part(LOSSES[key], seed, options.out / f"seed-{seed}" / key)


class _Worlds:
    """The data of a seed; a path is read once."""

    def __init__(self, options: DemoOptions, size: Size) -> None:
        self._options, self._size = options, size
        self._stored: Stored | None = None
        self._made: dict[int, World] = {}

    def of(self, seed: int) -> World:
        from qmargin.demo.worlds import INDEX, read_stored, stored_world, stroke_world

        path, out = self._options.data, self._options.out
        if seed not in self._made:
            if path is None:
                world = stroke_world(self._size, seed)
            else:
                self._stored = self._stored or read_stored(path, out / INDEX)
                world = stored_world(self._stored, self._size, seed)
            self._made = {seed: world}
        return self._made[seed]


def _complete(part: Part, world: World, options: DemoOptions, device: str) -> None:
    """Train from the newest checkpoint on, and test."""
    from qmargin.training.loop import train
    from qmargin.training.starting import CHECKPOINTS

    recipe = _recipe(part, world, options.data_name)
    resume = (part.folder / CHECKPOINTS).exists()
    outcome = train(recipe, part.folder, resume=resume, dataset=world.train, device=device)
    if outcome.signal:
        raise Interrupted(outcome.signal)
    assert outcome.checkpoint is not None  # a training that ended was saved
    _test(part, recipe, outcome.checkpoint, world, options, device=device)


def _recipe(part: Part, world: World, data: str | None) -> Recipe:
    return demo_recipe(part.loss, seed=part.seed, size=world.size, path=data)


def _test(
    part: Part,
    recipe: Recipe,
    checkpoint: Path,
    world: World,
    options: DemoOptions,
    *,
    device: str,
) -> None:
    from qmargin.demo.embed import embed_pictures
    from qmargin.demo.evaluate import Facts, evaluate_pictures, write_pictures
    from qmargin.evaluation.result import write_result

    began = time.perf_counter()
    embeddings = embed_pictures(recipe, checkpoint, world.test, device=device)
    facts = Facts(
        name=part.loss.title,
        card=_card(part, recipe, world),
        protocol=world.name,
        command=options.command,
        prefix=f"seed-{part.seed}/",
    )
    result = evaluate_pictures(embeddings, world.test, facts, device=device)
    folder = options.out / PICTURES
    write_pictures(folder, world.test, result, prefix=facts.prefix, is_ink=world.is_ink)
    write_result(part.result, result)
    _say(_line(result, time.perf_counter() - began))


def _card(part: Part, recipe: Recipe, world: World) -> dict[str, str]:
    """Facts for the report; the hash ties the result to the training."""
    loss, data = recipe.loss, recipe.data
    effective = loss.build().effective_margin
    return {
        "data": f"{world.name}; identities of training and test are disjoint",
        "loss": f"{part.loss.title}: alpha {loss.alpha:g}, {loss.margin_kind} margin "
        f"{loss.margin:g}, scale {loss.scale:g}",
        "effective margin": "none" if effective is None else f"{effective:.3f}",
        "training": f"{data.num_classes} identities, {recipe.run.epochs} epochs, seed "
        f"{recipe.seed}",
        "backbone": f"{recipe.model.backbone}, width {recipe.model.options['width']}",
        "recipe_sha256": recipe.sha256,
    }


def _is_done(part: Part, world: World, data: str | None) -> bool:
    """Whether the result of exactly this training is there."""
    from qmargin.evaluation.result import read_result

    if not part.result.exists():
        return False
    try:
        card = read_result(part.result).system.model_card or {}
    except DataError:
        return False  # half of a result: test again
    if card.get("recipe_sha256") != _recipe(part, world, data).sha256:
        raise ConfigError(
            f"{part.result} is of another recipe than {part.loss.title} has now; choose another "
            "--out, or remove the folder"
        )
    return True


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _line(result: Result, seconds: float) -> str:
    tars = [
        f"TAR {100 * point.tar:.1f} % at FAR {point.far_target:g}"
        for point in result.metrics.tar
        if point.tar is not None
    ]
    return (
        f"tested {result.protocol.num_impostors:,} impostor pairs in {seconds:.0f} s: EER "
        f"{100 * result.metrics.eer.value:.2f} %, {', '.join(tars)}"
    )


def _left(seconds: float) -> str:
    return f", about {timedelta(seconds=round(seconds))} left in all"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
