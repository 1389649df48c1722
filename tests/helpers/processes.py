"""Processes that a test starts quickly, signals, kills and asks how they ended.

They are forked from a server that has imported torch and the training code once.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "safetensors.torch",
    "qmargin.cli.main",
    "qmargin.cli.train",
    "qmargin.data.loader",
    "qmargin.recipes.debug",
    "qmargin.training.loop",
]


def start(function: Callable[..., Any], *arguments: Any, daemon: bool = True) -> BaseProcess:
    """Run an importable function in a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=function, args=arguments, daemon=daemon)
    process.start()
    return process


def finish(process: BaseProcess, timeout: float = 60.0) -> int:
    """Wait for a process; its exit code, the negative signal if it was killed."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"process {process.pid} did not end within {timeout} s")
    return process.exitcode


class Script:
    """A script in a process of its own, with the interface of ``subprocess.Popen``."""

    def __init__(
        self, text: str, output: Path, errors: Path, environment: dict[str, str] | None = None
    ) -> None:
        for path in (output, errors):
            path.touch()
        arguments = (text, str(output), str(errors), environment or {})
        self._process = start(_run_script, *arguments, daemon=False)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 60.0) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("script", timeout)
        return self._process.exitcode


def _run_script(text: str, output: str, errors: str, environment: dict[str, str]) -> None:
    for path, descriptor in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create")  # on one or two cores
    exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})
