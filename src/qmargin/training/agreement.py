"""Decisions that all ranks take together: skip this step, stop here, fail with this error.

Everything travels as a few integers or bytes over the gloo group of a ``Process``: nothing waits
for a GPU, and nothing is pickled. With one rank no call talks to anyone.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from qmargin.errors import RankError
from qmargin.training.process import Process

_LONGEST_TEXT = 1 << 16


class RemoteTraceback(Exception):
    """The traceback of an exception on another rank; printed before what it caused."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class Verdict(NamedTuple):
    """What the ranks agreed on for one step."""

    stop: int  # the signal that some rank was asked to stop with, or 0
    is_finite: bool  # on every rank
    num_corrupt: int  # over all ranks


def vote(
    process: Process,
    *,
    error: BaseException | None = None,
    stop: int = 0,
    is_finite: bool = True,
    num_corrupt: int = 0,
) -> Verdict:
    """Agree on the state of a step, in one exchange; every rank must call it.

    Where ranks pass errors, all raise. A rank that failed raises its error as it is, so that its
    traceback is complete; of several failures, the others are told that of the lowest rank.

    Args:
        process: This rank.
        error: What went wrong on this rank, if anything: then every rank raises.
        stop: Number of the signal that asked this rank to stop, or 0.
        is_finite: Whether what this rank computed is finite.
        num_corrupt: Corrupt samples that this rank met.

    Raises:
        RankError: Another rank passed an error, which is the cause, with its own traceback. The
            rank that passed it raises it as it is.

    Examples:
        >>> vote(Process(), stop=15, num_corrupt=2)
        Verdict(stop=15, is_finite=True, num_corrupt=2)
    """
    rows = share(process, [error is not None, stop, is_finite, num_corrupt])
    _raise_first(process, [bool(row[0]) for row in rows], error)
    return Verdict(
        stop=max(row[1] for row in rows),
        is_finite=all(row[2] for row in rows),
        num_corrupt=sum(row[3] for row in rows),
    )


def share(process: Process, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of every rank, in the order of the ranks; each passes equally many.

    Examples:
        >>> share(Process(), [3, True])
        [[3, 1]]
    """
    mine = [int(number) for number in numbers]
    if process.control is None:
        return [mine]
    rows = torch.zeros(process.world, len(mine), dtype=torch.int64)
    rows[process.rank] = torch.tensor(mine)
    with process.meeting():
        dist.all_reduce(rows, group=process.control)
    gathered: list[list[int]] = rows.tolist()
    return gathered


def all_agree(process: Process, flag: bool) -> bool:
    """Whether the flag is set on every rank.

    Examples:
        >>> all_agree(Process(), True)
        True
    """
    return all(row[0] for row in share(process, [flag]))


def any_rank(process: Process, flag: bool) -> bool:
    """Whether the flag is set on some rank.

    Examples:
        >>> any_rank(Process(), False)
        False
    """
    return any(row[0] for row in share(process, [flag]))


def _raise_first(process: Process, failed: Sequence[bool], error: BaseException | None) -> None:
    if not any(failed):
        return
    source = list(failed).index(True)
    text = _broadcast(process, _story(error) if process.rank == source else "", source)
    if error is not None:
        raise error
    summary, _, trace = text.partition("\n")
    raise RankError(f"rank {source} stopped with {summary}") from RemoteTraceback(trace)


def _story(error: BaseException | None) -> str:
    """A line that says what happened, and the traceback below it."""
    assert error is not None
    summary = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"{summary}\n{''.join(traceback.format_exception(error))}"


def _broadcast(process: Process, text: str, source: int) -> str:
    if process.control is None:
        return text
    content = text.encode()[:_LONGEST_TEXT]
    length = max(row[0] for row in share(process, [len(content)]))
    buffer = torch.zeros(length, dtype=torch.uint8)
    if process.rank == source:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with process.meeting():
        dist.broadcast(buffer, src=source, group=process.control)
    return bytes(buffer.tolist()).decode(errors="replace")
