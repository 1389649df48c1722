"""Processes that a test starts quickly and may kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOADED = ["torch", "torch._dynamo", "safetensors.torch", "qmargin.training.checkpoint"]


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Run an importable function in a new process; torch, and what its optimizers import when the
    first one is made, are imported once for all of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=function, args=arguments, daemon=True)
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
