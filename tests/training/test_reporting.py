"""What a run shows while it goes on: a bar that moves with every step, and an honest time left."""

import io
from contextlib import closing
from pathlib import Path

import pytest

from helpers.runs import tiny_recipe
from qmargin.training import reporting
from qmargin.training.loop import train
from qmargin.training.reporting import BarDisplay, Meter


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(meter: Meter, clock: Clock, *seconds: float) -> None:
    for duration in seconds:
        clock.now += duration
        meter.add(64)


@pytest.mark.parametrize("start", [0, 500], ids=["new", "resumed"])
def test_the_time_left_follows_recent_speed(start: int) -> None:
    clock = Clock()
    meter = Meter(start, clock=clock)
    timed(meter, clock, 60.0)  # compiled, workers started
    assert meter.eta_s(start + 1, 1000 + start) is None  # nothing is known yet
    timed(meter, clock, *[0.1] * 49)
    rates = meter.read(start + 50, 1000 + start)
    assert rates["eta_s"] == pytest.approx(95.0)  # and not 60 s of start-up in 50 steps
    assert rates["samples_per_s"] == pytest.approx(50 * 64 / 64.9)  # of all of them, as before
    timed(meter, clock, *[0.4] * 400)  # slower from now on, another job came
    assert meter.read(start + 450, 1000 + start)["eta_s"] == pytest.approx(220.0)


def test_a_pause_and_bursts_do_not_mislead() -> None:
    """Workers deliver several batches at once; a save or a sleep of the machine takes long."""
    clock = Clock()
    meter = Meter(0, clock=clock)
    timed(meter, clock, 5.0)
    for _ in range(20):
        timed(meter, clock, *[0.01] * 7, 1.93)  # 0.25 s each
    timed(meter, clock, 3600.0)
    timed(meter, clock, *[0.01] * 7, 1.93)
    assert meter.eta_s(170, 1170) == pytest.approx(250.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_moves_at_every_step() -> None:
    with closing(BarDisplay(Terminal(), 1000, start=500)) as display:
        for step, eta_s, text in ((501, None, "unknown time left"), (502, 60.0, "0:01:00 left")):
            display.moved(step, eta_s)
            assert display.task.completed == step and text in display.task.fields["speed"]


def test_a_run_moves_the_bar_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rare its records are."""
    moved: list[int] = []

    class Recorder(reporting.Display):
        def moved(self, step: int, eta_s: float | None) -> None:
            moved.append(step)

    monkeypatch.setattr(reporting, "open_display", lambda *details, **options: Recorder())
    train(tiny_recipe("run.max_steps=5", "run.log_every=1000"), tmp_path, device="cpu")
    assert moved == [1, 2, 3, 4, 5]
