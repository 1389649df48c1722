"""The demo: five losses on synthetic identities in a few minutes."""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from qmargin.errors import ConfigError
from qmargin.experiments.experiment import SEARCH_SEED, Experiment, Search, TestProtocol
from qmargin.experiments.named import (
    LONGEST,
    PEOPLE_SIZES,
    SIZES,
    VOICE_SIZES,
    Grid,
    Setting,
    Size,
    grid_arms,
    loss_arm,
    made_recipe,
    setting_point,
)
from qmargin.experiments.runner import Finished, RunOptions, complete, read_record
from qmargin.experiments.slots import num_cores
from qmargin.experiments.space import with_point
from qmargin.experiments.worlds import Drawn, Made
from qmargin.registry import register_experiment
from qmargin.training.checkpoint import check_writable
from qmargin.training.distributed import choose_device

TITLES = {"people": "synthetic people", "voices": "synthetic voices"}
MINUTES = 6.0
SECONDS_BESIDES = 25.0  # start, drawing of samples, report
SECONDS_PER_TEST = 8.0  # embeddings and all pairs of one loss
NUM_SPOKEN = 4  # utterances that are timed
MOST_EPOCHS = 200
NUM_TIMED = 8  # steps that are timed before the length is decided
DATA_NOTE = (
    "The settings of the losses were chosen on synthetic people, not on these pictures; with "
    "settings chosen on them, a different loss may be ahead."
)
# Settings chosen by `demo-search` and, for people on a GPU, by `strokes-10k`.
_PEOPLE: dict[str, dict[str, Setting]] = {
    "cpu": {
        "arcface": (1.0, 12.0, 0.3),
        "cosface": (1.0, 12.0, 0.2),
        "entmax": (1.25, 5.0, 0.3),
        "sparsemax": (2.0, 0.7, 0.3),
        "q_margin": (1.25, 4.0, 0.3),
    },
    "cuda": {
        "arcface": (1.0, 16.0, 0.05),
        "cosface": (1.0, 23.0, 0.4),
        "entmax": (1.5, 1.6, 0.1),
        "sparsemax": (2.0, 0.4, 0.1),
        "q_margin": (1.25, 4.4, 0.4),
    },
}
# Settings chosen by `voices-search` on a CPU.
_VOICES: dict[str, Setting] = {
    "arcface": (1.0, 16.0, 0.3),
    "cosface": (1.0, 12.0, 0.2),
    "entmax": (1.25, 5.0, 0.2),
    "sparsemax": (2.0, 0.5, 0.2),
    "q_margin": (1.25, 5.5, 0.3),
}
DEMO_SETTINGS = {"people": _PEOPLE, "voices": {"cpu": _VOICES, "cuda": _VOICES}}
# Eighteen settings of each loss, around good ones and at the paper's settings.
DEMO_GRID: Grid = {
    "arcface": (
        *((1.0, 8.0, m) for m in (0.1, 0.2, 0.3)),
        *((1.0, 12.0, m) for m in (0.05, 0.1, 0.2, 0.3)),
        *((1.0, 16.0, m) for m in (0.05, 0.1, 0.2, 0.3, 0.4)),
        *((1.0, 24.0, m) for m in (0.05, 0.1, 0.2)),
        *((1.0, 32.0, m) for m in (0.1, 0.2)),
        (1.0, 64.0, 0.5),
    ),
    "cosface": (
        *((1.0, 8.0, m) for m in (0.1, 0.2)),
        *((1.0, 12.0, m) for m in (0.05, 0.1, 0.2)),
        *((1.0, 16.0, m) for m in (0.05, 0.1, 0.2, 0.3)),
        *((1.0, 24.0, m) for m in (0.1, 0.2, 0.3, 0.4)),
        *((1.0, 32.0, m) for m in (0.2, 0.3, 0.4)),
        *((1.0, s, 0.4) for s in (48.0, 64.0)),
    ),
    "entmax": (
        *((1.25, s, m) for s in (5.0, 7.0, 10.0, 14.0) for m in (0.05, 0.1)),
        *((1.25, 2.5, 0.1), (1.25, 3.5, 0.1), (1.25, 3.5, 0.2), (1.25, 5.0, 0.2), (1.25, 5.0, 0.3)),
        *((1.5, 2.5, 0.2), (1.5, 4.0, 0.1), (1.5, 6.0, 0.1)),
        *((1.75, 2.5, 0.1), (1.25, 64.0, 0.5)),
    ),
    "sparsemax": (
        *((2.0, s, m) for s in (0.7, 1.0, 1.4, 1.9, 2.6) for m in (0.05, 0.1)),
        *((2.0, 0.5, 0.1), (2.0, 0.5, 0.2), (2.0, 0.7, 0.2), (2.0, 0.7, 0.3)),
        *((2.0, 1.0, 0.2), (2.0, 1.0, 0.3), (2.0, 1.4, 0.2), (2.0, 3.5, 0.1)),
    ),
    "q_margin": (
        *((1.25, s, 0.3) for s in (4.0, 8.0, 10.0, 12.0, 16.0, 22.0)),
        *((1.25, 4.0, 0.2), (1.25, 5.5, 0.1), (1.25, 5.5, 0.2), (1.5, 2.0, 0.2), (1.5, 3.0, 0.2)),
        *((1.25, 10.0, 0.2), (1.25, 16.0, 0.2), (1.25, 12.0, 0.5)),
        *((1.5, s, 0.4) for s in (4.0, 6.0, 8.0)),
        (1.25, 35.0, 0.2),
    ),
}
# Six of each loss.
VOICE_GRID: Grid = {
    "arcface": (
        *((1.0, 8.0, 0.2), (1.0, 12.0, 0.2), (1.0, 12.0, 0.3)),
        *((1.0, 16.0, 0.2), (1.0, 16.0, 0.3), (1.0, 24.0, 0.2)),
    ),
    "cosface": (
        *((1.0, 8.0, 0.1), (1.0, 12.0, 0.1), (1.0, 12.0, 0.2)),
        *((1.0, 16.0, 0.1), (1.0, 16.0, 0.2), (1.0, 24.0, 0.2)),
    ),
    "entmax": (
        *((1.25, 3.5, 0.2), (1.25, 5.0, 0.1), (1.25, 5.0, 0.2)),
        *((1.25, 5.0, 0.3), (1.25, 7.0, 0.2), (1.25, 10.0, 0.1)),
    ),
    "sparsemax": (
        *((2.0, 0.5, 0.2), (2.0, 0.7, 0.2), (2.0, 0.7, 0.3)),
        *((2.0, 1.0, 0.1), (2.0, 1.0, 0.2), (2.0, 1.4, 0.1)),
    ),
    "q_margin": (
        *((1.25, 2.8, 0.3), (1.25, 4.0, 0.2), (1.25, 4.0, 0.3)),
        *((1.25, 5.5, 0.2), (1.25, 5.5, 0.3), (1.25, 8.0, 0.3)),
    ),
}


@register_experiment("demo")
def demo_experiment(
    device: str = "cpu", data: Path | None = None, *, size: Size | None = None
) -> Experiment:
    """Five losses with fixed settings, on synthetic people or on pictures."""
    size = size or (PEOPLE_SIZES if data is None else SIZES)[device]
    settings = settings_of(size.kind, device)
    arms = {name: loss_arm(name, [point]) for name, point in settings.items()}
    world: Made | Drawn = Made(num_test=size.num_test, samples_test=size.samples_test)
    title = TITLES.get(size.kind, size.kind)
    if data is not None:
        budget = size.total_steps * size.batch_size
        most = size.num_test * size.samples_test
        world = Drawn(str(data), budget=budget, most_test=most)
        title = f"{data.name}, with settings chosen on synthetic people"
    return Experiment("demo", made_recipe(size), arms, world, title, seeds=(0,))


@register_experiment("demo-voices")
def demo_voices(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Five losses with fixed settings, on synthetic voices."""
    return demo_experiment(device, size=VOICE_SIZES[device])


@register_experiment("demo-search")
def demo_search(device: str = "cpu", data: Path | None = None) -> Experiment:
    """The search that chose the settings of the demo on a CPU."""
    return _search("demo-search", PEOPLE_SIZES["cpu"], DEMO_GRID, num_seeds=2)


@register_experiment("voices-search")
def voices_search(device: str = "cpu", data: Path | None = None) -> Experiment:
    """The search that chose the settings of the demo on voices."""
    return _search("voices-search", VOICE_SIZES["cpu"], VOICE_GRID, num_seeds=1)


def _search(name: str, size: Size, grid: Grid, *, num_seeds: int) -> Experiment:
    return Experiment(
        name,
        made_recipe(size),
        grid_arms(grid, sampled=False),
        Made(size.num_test, size.samples_test, size.num_test, size.samples_test),
        f"the demo's {TITLES[size.kind]}, {size.num_classes:,} classes",
        TestProtocol(normalise=size.kind != "voices"),
        Search(measure="tar@0.0001", seeds=tuple(range(SEARCH_SEED, SEARCH_SEED + num_seeds))),
    )


def settings_of(kind: str, device: str) -> dict[str, Setting]:
    """Settings of the losses; pictures use those of people."""
    return DEMO_SETTINGS.get(kind, _PEOPLE)[device]


def run_demo(
    out: Path,
    *,
    losses: tuple[str, ...] = (),
    seeds: int = 1,
    minutes: float | None = None,
    device: str = "auto",
    voices: bool = False,
    data: Path | None = None,
    command: str = "qmargin demo",
) -> Finished:
    """Train and test the missing runs of a demo in a folder, and write the report.

    ``minutes`` are for all five losses with one seed; None for the standard length. ``voices`` are
    synthetic speech and ``data`` are pictures instead of synthetic people, see ``read_pictures``.
    """
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; it must be at least 1")
    if minutes is not None and not 0.0 < minutes < math.inf:
        raise ConfigError(f"minutes is {minutes:g}; it must be above 0")
    if voices and data is not None:
        raise ConfigError(f"voices are synthetic and data are pictures of {data}; give one of them")
    kind = choose_device(0, device).type
    standard = (SIZES if data is not None else VOICE_SIZES if voices else PEOPLE_SIZES)[kind]
    if losses:
        demo_experiment(kind, size=standard).with_arms(losses)  # refused before steps are timed
    if out.exists():
        check_writable(out)
    size, planned, pace = find_size(out, standard, kind, minutes, data)
    made = replace(
        demo_experiment(kind, data, size=size),
        seeds=tuple(range(seeds)),
        details={"epochs": size.epochs, "minutes": planned},
    )
    made = made.with_arms(losses) if losses else made
    length, usual = (f"{one.epochs} epoch{'s' * (one.epochs > 1)}" for one in (size, standard))
    if data is not None:  # the number of pictures sets the length of epochs
        length, usual = (f"{one.total_steps:,} steps each" for one in (size, standard))
    text = f"{len(made.arms)} loss{'es' * (len(made.arms) > 1)}, {seeds} seed{'s' * (seeds > 1)}, "
    text += f"{length}, on {kind}"
    if size.epochs < standard.epochs:
        text += f"; the standard length is {usual} (--minutes gives it more time)"
    jobs = jobs_on(kind, num_runs := len(made.arms) * seeds)
    if pace is not None:
        expected = max(1, round(pace.seconds(size, rounds=-(-num_runs // jobs)) / 60.0))
        text += f"; about {expected} min at the present speed of this machine"
    sys.stdout.write(f"{text}\n")
    options = RunOptions(devices=(device,), jobs=jobs, show=True, command=command)
    if pace is not None:
        options = replace(options, share_of_training=pace.share_of_training(size))
    return complete(made, out, options)


class Pace(NamedTuple):
    """Measured speed of a machine."""

    step: float  # seconds of a step
    speech: float  # seconds to synthesise all speech

    def seconds(self, size: Size, *, rounds: int) -> float:
        """Seconds of a demo with this number of runs per slot."""
        each = size.total_steps * self.step + SECONDS_PER_TEST
        return SECONDS_BESIDES + self.speech + rounds * each

    def share_of_training(self, size: Size) -> float:
        """Share of training in the time of a run; the rest is its test."""
        seconds = size.total_steps * self.step
        return seconds / (seconds + SECONDS_PER_TEST)


def jobs_on(device: str, num_runs: int) -> int:
    """Parallel runs: one per core, because threads of one run wait for each other."""
    return min(num_runs, num_cores()) if device == "cpu" else 1


def find_size(
    out: Path, standard: Size, device: str, minutes: float | None, data: Path | None
) -> tuple[Size, float | None, Pace | None]:
    """The size of the demo in its folder, or of a new one, and the minutes it was planned for.

    The pace of the machine is measured for a new demo; None for one that is continued.
    """
    details = (read_record(out) or {}).get("details", {})
    epochs, planned = details.get("epochs"), details.get("minutes")
    if not isinstance(epochs, int):
        demo_experiment(device, data, size=standard).world.opened()  # refused at once
        num_losses = len(settings_of(standard.kind, device))
        jobs = jobs_on(device, num_losses)
        threads, rounds = max(1, num_cores() // jobs), -(-num_losses // jobs)
        times = step_times(standard, device, num_threads=threads)
        pace = Pace(statistics.median(times), seconds_of_speech(standard))
        # By the fastest step, so that a busy machine gets the same length as an idle one.
        size = fitted(standard, min(times), minutes=minutes, rounds=rounds, speech=pace.speech)
        return size, minutes, pace
    if minutes is not None and minutes != planned:
        raise ConfigError(
            f"--minutes is {minutes:g} and {out} holds a demo of {epochs} epochs; leave it out to "
            "continue, or choose another --out"
        )
    return standard._replace(epochs=epochs), planned, None


def fitted(
    size: Size, seconds: float, *, minutes: float | None, rounds: int = 5, speech: float = 0.0
) -> Size:
    """A size with as many epochs as the time allows, and at least one.

    Without ``minutes`` the demo has its standard length on every machine that needs at most
    ``MINUTES`` for it, so that its numbers can be compared. ``seconds`` are those of a step,
    ``rounds`` is how many runs one of the slots has, and ``speech`` is the time to synthesise it.
    """
    in_all = 60.0 * (MINUTES if minutes is None else minutes) - SECONDS_BESIDES - speech
    per_loss = in_all / rounds - SECONDS_PER_TEST
    epochs = int(per_loss / (size.total_steps // size.epochs * seconds))
    most = size.epochs if minutes is None else MOST_EPOCHS
    return size._replace(epochs=max(1, min(epochs, most)))


def seconds_of_speech(size: Size) -> float:
    """Seconds to synthesise all utterances with all cores; zero for pictures."""
    if size.kind != "voices":
        return 0.0
    from qmargin.data.voices import Voices

    voices = Voices(size.num_classes, size.samples_per_class, longest=LONGEST)
    fastest = math.inf
    for index in range(NUM_SPOKEN):
        began = time.monotonic()
        voices.waveform(index)
        fastest = min(fastest, time.monotonic() - began)
    count = len(voices) + size.num_test * size.samples_test
    return fastest * count / num_cores()


def step_times(size: Size, device: str, *, num_threads: int) -> list[float]:
    """Seconds of a few steps of the slowest loss."""
    import torch

    from qmargin.training.dry_run import dry_run

    if size.kind == "voices":  # a batch is synthesised once, before its first step
        few = size._replace(num_classes=size.batch_size // 2, samples_per_class=2)
    else:
        samples = max(2, -(-NUM_TIMED * size.batch_size // size.num_classes))  # for all steps
        few = size._replace(samples_per_class=samples)
    recipe = made_recipe(few)
    recipe = with_point(
        replace(recipe, loss=replace(recipe.loss, margin_kind="prior")),
        setting_point(_PEOPLE["cpu"]["q_margin"]),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, num_threads))
    try:
        return dry_run(recipe, device=device, num_steps=NUM_TIMED).seconds[1:]
    finally:
        torch.set_num_threads(threads)
