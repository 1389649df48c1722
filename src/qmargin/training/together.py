"""Work that all ranks do, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from qmargin.training.agreement import vote
from qmargin.training.exchange import Exchange, alone, group_exchange
from qmargin.training.process import Process
from qmargin.training.signals import Interrupted

T = TypeVar("T")


def together(process: Process, action: Callable[[], T]) -> T:
    """Run an action on every rank; either all of them go on, or all of them raise.

    The action itself must not wait for other ranks. A signal that interrupts it on one rank
    interrupts all of them.

    Examples:
        >>> together(Process(), lambda: 3)
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


def control_exchange(process: Process) -> Exchange:
    """Short texts between all ranks, with failures that name the rank."""
    if process.control is None:
        return alone
    exchange = group_exchange(process.control)

    def guarded(text: str) -> list[str]:
        with process.meeting():
            return exchange(text)

    return guarded


def gather_texts(process: Process, texts: Sequence[str]) -> list[str]:
    """The texts of all ranks in the order of the ranks; every rank must call it.

    Examples:
        >>> gather_texts(Process(), ["a", "b"])
        ['a', 'b']
    """
    replies = control_exchange(process)(json.dumps(list(texts)))
    return [text for reply in replies for text in json.loads(reply)]
