"""Work for several processes, which a signal can end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from qmargin.sweep.slots import follow_parent
from qmargin.training.signals import Interrupted, StopRequest

Item = TypeVar("Item")
Found = TypeVar("Found")


def in_processes(
    function: Callable[[Item], Found],
    items: Sequence[Item],
    *,
    jobs: int,
    request: StopRequest | None = None,
) -> Iterator[Found]:
    """Results of all items, in their order.

    Args:
        function: At the top of a module, or a ``partial`` of such a one.
        items: Sent to the processes.
        jobs: Processes.
        request: After a signal what runs is waited for, and nothing else begins.

    Raises:
        Interrupted: By a signal.
    """
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=follow_parent) as pool:
        try:
            for found in pool.map(function, items):
                if request is not None and request.number:
                    raise Interrupted(request.number)
                yield found
        finally:
            pool.shutdown(cancel_futures=True)
