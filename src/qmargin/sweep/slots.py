"""Where trials run: in this process one after the other, or in several others at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from qmargin.sweep.trial import Trial, TrialResult, run_trial
from qmargin.sweep.validation import DataSource
from qmargin.training.signals import Interrupted, StopRequest

SECONDS_TO_LOOK = 0.2  # between looks at signals
SECONDS_TO_SAVE = 120.0  # that a worker has after a signal


@dataclass(frozen=True)
class TrialOptions:
    """What all trials share."""

    data: DataSource
    measure: str
    stop_early: bool = False


class Slots(Protocol):
    """Takes trials, and gives results as they come."""

    num_slots: int

    @property
    def num_free(self) -> int:
        """Trials that could be started now."""
        ...

    def start(self, trial: Trial) -> None:
        """Begin a trial in a free slot."""
        ...

    def wait(self) -> tuple[Trial, TrialResult]:
        """The next trial that ends.

        Raises:
            Interrupted: By a signal; what runs was saved.
        """
        ...

    def __enter__(self) -> Slots: ...

    def __exit__(self, *details: object) -> None: ...


class OwnProcess(AbstractContextManager["OwnProcess"]):
    """One slot, in the process that asks."""

    num_slots = 1

    def __init__(self, options: TrialOptions, device: str, request: StopRequest) -> None:
        self._options, self._device, self._request = options, device, request
        self._trial: Trial | None = None

    @property
    def num_free(self) -> int:
        """One, until a trial was started."""
        return int(self._trial is None)

    def start(self, trial: Trial) -> None:
        """Remember the trial; ``wait`` runs it."""
        self._trial = trial

    def wait(self) -> tuple[Trial, TrialResult]:
        """Run the trial."""
        assert self._trial is not None
        self._request.obey()
        trial, self._trial = self._trial, None
        return trial, _run(trial, self._options, self._device)

    def __exit__(self, *details: object) -> None:
        """Nothing to end."""


class Worker:
    """A process that runs the trials it is sent."""

    def __init__(self, options: TrialOptions, device: str, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, options, device, num_threads)
        # not a daemon: those may not have the processes that read data
        self.process: SpawnProcess = context.Process(target=_work, args=arguments)
        self.process.start()
        theirs.close()
        self.trial: Trial | None = None

    def start(self, trial: Trial) -> None:
        """Send a trial."""
        self.trial = trial
        self.connection.send(trial)

    def receive(self) -> TrialResult | int:
        """What came of it, or the signal that stopped it; a process that died has failed."""
        assert self.trial is not None
        try:
            result: TrialResult | int = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            trial = self.trial
            error = f"its process ended with status {self.process.exitcode}"
            sha256, seed = trial.recipe.sha256, trial.recipe.seed
            result = TrialResult(trial.point, seed, sha256, "failed", 0, {}, 0.0, error)
        self.trial = None
        return result

    def ask_to_stop(self) -> None:
        """A worker with a trial saves it and ends."""
        if self.trial is not None and self.process.is_alive():
            self.process.terminate()
            with suppress(OSError):  # it is gone by now
                # where the trial was over before the signal could stop it, no other one follows
                self.connection.send(None)

    def end(self) -> None:
        """Wait for a worker that was asked to stop, or let an idle one go."""
        if self.trial is None:
            self.connection.close()
        self.process.join(SECONDS_TO_SAVE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


class Workers(AbstractContextManager["Workers"]):
    """Slots in processes of their own, each on a device."""

    def __init__(self, options: TrialOptions, devices: Sequence[str], request: StopRequest) -> None:
        self.num_slots = len(devices)
        self._options, self._devices, self._request = options, devices, request
        self._workers: list[Worker | None] = [None] * len(devices)

    @property
    def num_free(self) -> int:
        """Slots without a trial."""
        return sum(worker is None or worker.trial is None for worker in self._workers)

    def start(self, trial: Trial) -> None:
        """Send a trial to a free slot; its process is started at the first one."""
        for place, worker in enumerate(self._workers):
            if worker is None:
                threads = max(1, (os.cpu_count() or 1) // self.num_slots)
                worker = Worker(self._options, self._devices[place], threads)
                self._workers[place] = worker
            if worker.trial is None:
                worker.start(trial)
                return

    def wait(self) -> tuple[Trial, TrialResult]:
        """The next trial that ends."""
        busy = {w.connection: (place, w) for place, w in enumerate(self._workers) if w and w.trial}
        while not (ready := wait(list(busy), timeout=SECONDS_TO_LOOK)):
            self._request.obey()
        place, worker = busy[ready[0]]  # type: ignore[index]
        trial = worker.trial
        assert trial is not None
        result = worker.receive()
        if isinstance(result, int):
            raise Interrupted(result)
        if not worker.process.is_alive():
            self._workers[place] = None  # the next trial gets a new process
        return trial, result

    def __exit__(self, *details: object) -> None:
        """End all processes, those that work after they have saved."""
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.ask_to_stop()
        for worker in workers:
            worker.end()


def open_slots(
    options: TrialOptions, *, devices: Sequence[str], parallel: int, request: StopRequest
) -> Slots:
    """Slots for so many trials at once, spread over devices."""
    if parallel == 1:
        return OwnProcess(options, devices[0], request)
    places = [devices[slot % len(devices)] for slot in range(parallel)]
    return Workers(options, places, request)


def _run(trial: Trial, options: TrialOptions, device: str) -> TrialResult:
    return run_trial(
        trial,
        options.data,
        measure=options.measure,
        stop_early=options.stop_early,
        device=device,
    )


def _work(connection: Connection, options: TrialOptions, device: str, num_threads: int) -> None:
    """Body of a worker."""
    import torch

    follow_parent()
    torch.set_num_threads(min(num_threads, torch.get_num_threads()))
    while (trial := _received(connection)) is not None:
        try:
            connection.send(_run(trial, options, device))
        except Interrupted as stop:
            connection.send(stop.signal)
            return


def follow_parent() -> None:
    """Leave Ctrl-C in a terminal to the process that started this one, and end when it does."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _received(connection: Connection) -> Trial | None:
    try:
        trial: Trial | None = connection.recv()
    except EOFError:  # the sweep is over
        return None
    return trial


def _end_with_parent() -> None:
    """A sweep that was killed leaves no trial running, so that it can be started again."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
