"""Slots for runs: this process, one run after the other, or several worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from qmargin.experiments.run import Outcome, Run, Task, execute
from qmargin.training.signals import Interrupted, StopRequest

SECONDS_TO_LOOK = 0.2  # seconds between checks for signals
SECONDS_TO_SAVE = 120.0  # seconds that a worker has after a signal


class Slots:
    """Executes runs and returns their outcomes; this class has one slot, in its own process."""

    def __init__(self, task: Task, devices: Sequence[str], request: StopRequest) -> None:
        self.num_slots = len(devices)
        self._task, self._devices, self._request = task, devices, request
        self._run: Run | None = None
        self.look: Callable[[], object] = lambda: None  # called while runs are waited for

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *details: object) -> None:
        """Do nothing: there is no process to end."""

    @property
    def num_free(self) -> int:
        """Runs that could be started now."""
        return int(self._run is None)

    def start(self, run: Run) -> None:
        """Start a run in a free slot; here, ``wait`` executes it."""
        self._run = run

    def wait(self) -> tuple[Run, Outcome]:
        """The next run that ends.

        Raises:
            Interrupted: By a signal, after saving.
        """
        assert self._run is not None
        self._request.obey()
        run, self._run = self._run, None
        return run, execute(run, self._task, device=self._devices[0])


class Worker:
    """A process that executes the runs it is sent."""

    def __init__(self, task: Task, device: str, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, task, device, num_threads)
        # not a daemon: those may not have the processes that read data
        self.process: SpawnProcess = context.Process(target=_work, args=arguments)
        self.process.start()
        theirs.close()
        self.run: Run | None = None

    def receive(self) -> tuple[Run, Outcome]:
        """The run and its outcome; a process that died has failed."""
        assert self.run is not None
        run, self.run = self.run, None
        try:
            result: Outcome | int = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            error = f"its process ended with status {self.process.exitcode}"
            result = Outcome("failed", error=error)
        if isinstance(result, int):
            raise Interrupted(result)
        return run, result

    def ask_to_stop(self) -> None:
        """Ask a worker to save its run and end."""
        if self.run is not None and self.process.is_alive():
            self.process.terminate()
            with suppress(OSError):  # it has ended
                # if the run had ended before the signal, no other run follows
                self.connection.send(None)

    def end(self) -> None:
        """Wait for a worker that was asked to stop, or end an idle one."""
        if self.run is None:
            self.connection.close()
        self.process.join(SECONDS_TO_SAVE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


class Workers(Slots):
    """Slots in separate processes, each on a device; its first run starts a process."""

    def __init__(self, task: Task, devices: Sequence[str], request: StopRequest) -> None:
        super().__init__(task, devices, request)
        self._workers: list[Worker | None] = [None] * len(devices)

    def __exit__(self, *details: object) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.ask_to_stop()
        for worker in workers:
            worker.end()

    @property
    def num_free(self) -> int:
        return sum(worker is None or worker.run is None for worker in self._workers)

    def start(self, run: Run) -> None:
        for place, worker in enumerate(self._workers):
            if worker is None:
                threads = max(1, num_cores() // self.num_slots)
                worker = Worker(self._task, self._devices[place], threads)
                self._workers[place] = worker
            if worker.run is None:
                worker.run = run
                worker.connection.send(run)
                return

    def wait(self) -> tuple[Run, Outcome]:
        busy = {w.connection: (place, w) for place, w in enumerate(self._workers) if w and w.run}
        while not (ready := wait(list(busy), timeout=SECONDS_TO_LOOK)):
            self._request.obey()
            self.look()
        place, worker = busy[ready[0]]  # type: ignore[index]
        found = worker.receive()
        if not worker.process.is_alive():
            self._workers[place] = None  # the next run gets a new process
        return found


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_slots(task: Task, *, devices: Sequence[str], jobs: int, request: StopRequest) -> Slots:
    """Slots for parallel runs, spread over devices."""
    places = [devices[slot % len(devices)] for slot in range(jobs)]
    return (Slots if jobs == 1 else Workers)(task, places, request)


def _work(connection: Connection, task: Task, device: str, num_threads: int) -> None:
    """Body of a worker."""
    import torch

    follow_parent()
    torch.set_num_threads(min(num_threads, torch.get_num_threads()))
    with suppress(EOFError):  # the experiment is over
        while (run := connection.recv()) is not None:
            try:
                connection.send(execute(run, task, device=device))
            except Interrupted as stop:
                connection.send(stop.signal)
                return


def follow_parent() -> None:
    """Leave Ctrl-C in a terminal to the parent process, and end when it ends."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End if the parent was killed, so that the experiment can be started again."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
