"""The demo from end to end: train each loss, test all pairs, write the report.

Everything is in one folder: ``plan.json``, a folder per seed and loss with the training and its
``result.json``, pictures, and ``report/index.html``. What is there is not done again.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.demo.losses import BY_DEVICE, LOSSES, DemoLoss
from qmargin.demo.plan import PLAN, find_plan
from qmargin.demo.recipe import SIZES, Size, demo_recipe
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.training.fields import check_known
from qmargin.training.signals import StopRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qmargin.demo.stored import Stored
    from qmargin.demo.worlds import World
    from qmargin.evaluation.result import Result
    from qmargin.training.recipe import Recipe

RESULT = "result.json"
PICTURES = "pictures"
JOURNALS = "journals"
BYTES_PER_PART = {"cpu": 20 << 20, "cuda": 400 << 20}  # two checkpoints and a result, about
SETTINGS = "chosen on synthetic stroke identities, not on these pictures"
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
    def title(self) -> str:
        """For people."""
        return f"{self.loss.title}, seed {self.seed}"

    @property
    def result(self) -> Path:
        """Written last: where it is, nothing is left to do."""
        return self.folder / RESULT


def run_demo(options: DemoOptions) -> Path:
    """Train and test what is missing, write the report, tell who is ahead; returns the page.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM; run again, it goes on.
        CheckpointError: The folder cannot be written to, or the disk is too full.
        ConfigError: The folder holds a demo of another length.
    """
    from qmargin.demo.report import keep_journals, summary, write_demo_report

    losses, data = BY_DEVICE[find_device(options.device)], options.data_name
    parts = complete_parts(options, [losses[key] for key in options.losses])
    journals, lost = keep_journals(options.out / JOURNALS, parts)
    for part in lost:
        say(
            f"the journal of {part.title} is gone or damaged: the report does not show its support "
            f"size (remove {part.folder} and run again to have it)"
        )
    page = write_demo_report(options.out, parts, data, journals=journals)
    say(summary(parts, data))
    say(f"report: {page}\n{page.resolve().as_uri()}")
    return page


def complete_parts(options: DemoOptions, losses: Sequence[DemoLoss]) -> list[Part]:
    """Train and test every loss with every seed, as far as that has not been done before.

    Args:
        options: Where, how long, on what; its own ``losses`` are not looked at.
        losses: Each with a key of its own.
    """
    from qmargin.training.folders import check_writable
    from qmargin.training.process import choose_device

    device, data = find_device(options.device), options.data_name
    choose_device(0, device)  # one that is not there is refused before a folder is made
    parts = [
        Part(loss, seed, options.out / f"seed-{seed}" / loss.key)
        for seed in range(options.seeds)
        for loss in losses
    ]
    missing = sum(not part.result.exists() for part in parts)
    check_writable(options.out, needed_bytes=missing * BYTES_PER_PART[device])
    worlds = _Worlds(options)  # before the plan is written: data that cannot be read is refused
    size = find_plan(
        options.out,
        minutes=options.minutes,
        device=device,
        data=data,
        digest=worlds.digest,
        lost=partial(_lost_size, options, losses, worlds, device),
    )
    say(NOTE if data is None else f"Data: {data}")
    say(_what_is_run(options, len(losses), size, device))
    began, num_taken = time.perf_counter(), 0
    with StopRequest() as request:
        for number, part in enumerate(parts, start=1):
            world = worlds.of(part.seed, size)
            done = _done(part, world, data)
            if done is not None:
                say(f"[{number}/{len(parts)}] {part.title}: done before")
                _draw(part, world, options, done)
                continue
            spent = time.perf_counter() - began
            left = "" if not num_taken else _left(spent / num_taken * (len(parts) - number + 1))
            say(f"[{number}/{len(parts)}] {part.title}{left}")
            with _space_needed(options.out):
                _complete(part, world, options, device)
            num_taken += 1
            request.obey()  # a signal that came when the training had ended
    return parts


@contextmanager
def _space_needed(folder: Path) -> Iterator[None]:
    """A disk that filled up meanwhile, in words; what was saved is good."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CheckpointError(
            f"{folder} has no space left; free some and run the same command again to go on"
        ) from error


def _what_is_run(options: DemoOptions, num_losses: int, size: Size, device: str) -> str:
    seeds = f"{options.seeds} seed{'s' * (options.seeds > 1)}"
    losses = f"{num_losses} loss{'es' * (num_losses > 1)}"
    standard = SIZES[device]
    if options.data is None:
        length, usual = _epochs(size.epochs), _epochs(standard.epochs)
    else:  # whose epochs are as long as there are pictures
        length, usual = (f"{one.total_steps:,} steps each" for one in (size, standard))
    text = f"{losses}, {seeds}, {length}, on {device}"
    if size.epochs < standard.epochs:
        text += f"; the standard length is {usual}"
        text += ", so numbers are not those of the documentation" * (options.data is None)
        text += " (--minutes gives it more time)"
    if options.minutes is not None and size.epochs == 1:
        text += f"; no training is shorter than that, even if {options.minutes:g} minutes are"
    return text


def _epochs(number: int) -> str:
    return f"{number} epoch{'s' * (number > 1)}"


class _Worlds:
    """The data of a seed; a path is read once."""

    def __init__(self, options: DemoOptions) -> None:
        from qmargin.demo.stored import INDEX, read_stored

        path = options.data
        self._stored: Stored | None = None
        if path is not None:
            self._stored = read_stored(path, options.out / INDEX)
            if self._stored.note:
                say(self._stored.note)
        self._made: dict[int, World] = {}

    @property
    def digest(self) -> str | None:
        """Of the pictures of a path; None for stroke identities."""
        return None if self._stored is None else self._stored.digest

    def of(self, seed: int, size: Size) -> World:
        if seed not in self._made:
            self._made = {seed: self.made(seed, size)}
        return self._made[seed]

    def made(self, seed: int, size: Size) -> World:
        from qmargin.demo.worlds import stored_world, stroke_world

        if self._stored is None:
            return stroke_world(size, seed)
        return stored_world(self._stored, size, seed)


def _lost_size(
    options: DemoOptions, losses: Sequence[DemoLoss], worlds: _Worlds, device: str
) -> Size | None:
    """The size of trainings whose plan is gone; None where there are none."""
    from qmargin.demo.leftovers import lost_size

    known = list(dict.fromkeys((*losses, *BY_DEVICE[device].values())))
    size = lost_size(options.out, known, worlds.made, device=device, data=options.data_name)
    if size is not None:
        say(f"{options.out / PLAN} is gone: going on with the length of the trainings there")
    return size


def _complete(part: Part, world: World, options: DemoOptions, device: str) -> None:
    """Train from the newest checkpoint on, and test."""
    from qmargin.demo.training import train_part

    recipe = _recipe(part, world, options.data_name)
    checkpoint = train_part(
        recipe, part.folder, dataset=world.train, device=device, title=part.title
    )
    _test(part, recipe, checkpoint, world, options, device=device)


def part_embeddings(options: DemoOptions, part: Part) -> tuple[World, NDArray[np.float32]]:
    """The test pictures of a part that is complete, and their embeddings ``[n, d]``."""
    from qmargin.demo.embed import embed_pictures
    from qmargin.training.folders import list_steps
    from qmargin.training.starting import CHECKPOINTS

    device, data = find_device(options.device), options.data_name
    size = find_plan(options.out, minutes=options.minutes, device=device, data=data)
    world = _Worlds(options).of(part.seed, size)
    newest = next(iter(list_steps(part.folder / CHECKPOINTS).values()))
    recipe = _recipe(part, world, data)
    return world, embed_pictures(recipe, newest, world.test, device=device)


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
    from qmargin.demo.evaluate import Facts, evaluate_pictures
    from qmargin.evaluation.result import write_result

    began = time.perf_counter()
    embeddings = embed_pictures(recipe, checkpoint, world.test, device=device)
    facts = Facts(
        name=part.loss.title,
        card=_card(part, recipe, world),
        protocol=world.name,
        command=options.command,
        prefix=_prefix(part, options),
    )
    result = evaluate_pictures(embeddings, world.test, facts, device=device)
    _draw(part, world, options, result)
    write_result(part.result, result)
    say(_line(result, time.perf_counter() - began))


def _prefix(part: Part, options: DemoOptions) -> str:
    """The folder of the pictures of a seed."""
    return f"{'synthetic' if options.data is None else 'seed'}-{part.seed}/"


def _draw(part: Part, world: World, options: DemoOptions, result: Result) -> None:
    """Draw the hardest pairs, unless all of them are there."""
    from qmargin.demo.evaluate import has_pictures, write_pictures

    folder = options.out / PICTURES
    if not has_pictures(folder, result):
        prefix = _prefix(part, options)
        write_pictures(folder, world.test, result, prefix=prefix, is_ink=world.is_ink)


def _card(part: Part, recipe: Recipe, world: World) -> dict[str, str]:
    """Facts for the report; the hash ties the result to the training."""
    loss, data = recipe.loss, recipe.data
    effective = loss.build().effective_margin
    shipped = [loss for losses in BY_DEVICE.values() for loss in losses.values()]
    is_foreign = world.train is not None and part.loss in shipped
    return {
        "data": f"{world.name}; identities of training and test are disjoint",
        "loss": part.loss.title,
        "margin_kind": loss.margin_kind,
        "alpha": f"{loss.alpha:g}",
        "scale": f"{loss.scale:g}",
        "margin": f"{loss.margin:g}",
        "effective margin": "none" if effective is None else f"{effective:.3f}",
        "training": f"{data.num_classes} identities, {_epochs(recipe.run.epochs)}, seed "
        f"{recipe.seed}",
        "backbone": f"{recipe.model.backbone}, width {recipe.model.options['width']}",
        **({"settings": SETTINGS} if is_foreign else {}),
        "recipe_sha256": recipe.sha256,
    }


def _done(part: Part, world: World, data: str | None) -> Result | None:
    """The result of exactly this training, where it is there."""
    from qmargin.evaluation.result import read_result

    if not part.result.exists():
        return None
    try:
        result = read_result(part.result)
    except DataError:
        return None  # half of a result: test again
    card = result.system.model_card or {}
    if card.get("recipe_sha256") != _recipe(part, world, data).sha256:
        raise ConfigError(
            f"{part.result} is of another recipe than {part.loss.title} has now; choose another "
            f"--out, or remove the folder {part.folder} to train {part.title} again"
        )
    return result


def find_device(name: str) -> str:
    """``"cpu"`` or ``"cuda"``, which ``"auto"`` is where there is one."""
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


def say(text: str) -> None:
    """Tell the user."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
