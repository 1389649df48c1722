"""Decisions that all ranks take together: either every rank goes on, or every rank raises.

All of it is built on ``Process.sum_``: ``share`` passes a few integers in one collective, at every
step; ``gather`` passes JSON values in two. ``vote`` adds the rule for errors, and ``run_on_all``
applies it to an action.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from qmargin.errors import RankError
from qmargin.training.distributed.process import Process
from qmargin.training.signals import Interrupted

T = TypeVar("T")
_LONGEST_STORY = 1 << 16


class RemoteTraceback(Exception):
    """The traceback of an exception on another rank; printed before what it caused."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class Verdict(NamedTuple):
    """What the ranks agreed on for one step."""

    stop: int  # the signal that some rank was asked to stop with, or 0
    is_finite: bool  # on every rank
    num_corrupt: int  # over all ranks


def share(process: Process, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank, in the order of the ranks; each passes equally many.

    Examples:
        >>> share(Process(), [3, True])
        [[3, 1]]
    """
    rows = torch.zeros(process.world, len(numbers), dtype=torch.int64)
    rows[process.rank] = torch.tensor([int(number) for number in numbers])
    gathered: list[list[int]] = process.sum_(rows).tolist()
    return gathered


def gather(process: Process, value: T) -> list[T]:
    """The value of every rank, in the order of the ranks; values are JSON.

    Examples:
        >>> gather(Process(), {"step": 3})
        [{'step': 3}]
    """
    mine = bytearray(json.dumps(value).encode())
    sizes = [row[0] for row in share(process, [len(mine)])]
    rows = torch.zeros(process.world, max(sizes), dtype=torch.uint8)
    rows[process.rank, : len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
    pairs = zip(process.sum_(rows), sizes, strict=True)
    return [json.loads(bytes(row[:size].numpy())) for row, size in pairs]


def all_agree(process: Process, flag: bool) -> bool:
    """Whether the flag is set on every rank.

    Examples:
        >>> all_agree(Process(), True)
        True
    """
    return all(row[0] for row in share(process, [flag]))


def vote(
    process: Process,
    *,
    error: BaseException | None = None,
    stop: int = 0,
    is_finite: bool = True,
    num_corrupt: int = 0,
) -> Verdict:
    """Agree on the state of a step, in one exchange; every rank must call it.

    Args:
        process: This rank.
        error: What went wrong on this rank, if anything: then every rank raises.
        stop: Number of the signal that asked this rank to stop, or 0.
        is_finite: Whether what this rank computed is finite.
        num_corrupt: Corrupt samples that this rank met.

    Raises:
        RankError: Another rank passed an error, which is the cause, with its own traceback; of
            several, that of the lowest rank. A rank that passed an error raises it as it is.

    Examples:
        >>> vote(Process(), stop=15, num_corrupt=2)
        Verdict(stop=15, is_finite=True, num_corrupt=2)
    """
    rows = share(process, [error is not None, stop, is_finite, num_corrupt])
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        stories = gather(process, "" if error is None else _story(error))
        if error is not None:
            raise error
        summary, _, trace = stories[failed[0]].partition("\n")
        raise RankError(f"rank {failed[0]} stopped with {summary}") from RemoteTraceback(trace)
    return Verdict(
        stop=max(row[1] for row in rows),
        is_finite=all(row[2] for row in rows),
        num_corrupt=sum(row[3] for row in rows),
    )


def run_on_all(process: Process, action: Callable[[], T]) -> T:
    """Run an action on every rank; either all of them go on, or all of them raise.

    The action itself must not wait for other ranks. A signal that interrupts it on one rank
    interrupts all of them.

    Returns:
        What the action returned on this rank.

    Examples:
        >>> run_on_all(Process(), lambda: 3)
        3
    """
    value, failure, stop = None, None, 0
    try:
        value = action()
    except Interrupted as interruption:
        stop = interruption.signal
    except Exception as error:
        failure = error
    if number := vote(process, error=failure, stop=stop).stop:
        raise Interrupted(number)
    return value  # type: ignore[return-value]


def _story(error: BaseException) -> str:
    """A line that says what happened, and the traceback below it."""
    summary = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"{summary}\n{''.join(traceback.format_exception(error))}"[:_LONGEST_STORY]
