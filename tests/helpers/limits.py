"""Calls in a child process with little time and memory, for files that want a lot of both."""

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 5.0
MORE_BYTES = 400 << 20


def limit_memory(more: int) -> None:
    """From now on this process can take so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    limit_memory(MORE_BYTES)
    try:
        function(*arguments)
    except BaseException as error:  # whatever it is, the test compares it
        is_memory = isinstance(error.__context__, MemoryError)  # refused, but asked for first
        results.send((MemoryError if is_memory else type(error), str(error)[:500]))
    else:
        results.send((None, "nothing was raised"))


def within(function: Callable[..., Any], *arguments: Any, error: type[Exception]) -> str:
    """Assert that a call raises an error soon and in little memory; returns its message."""
    context = multiprocessing.get_context("fork")
    results, sent = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, arguments, sent))
    process.start()
    sent.close()
    try:
        assert results.poll(SECONDS), f"no answer within {SECONDS:g} s"
        kind, message = results.recv()
    finally:
        process.kill()
        process.join()
    assert kind is not None, message
    assert issubclass(kind, error), f"{kind.__name__}: {message}"
    return str(message)
