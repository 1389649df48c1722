"""Work for several processes, which a signal can end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from qmargin.sweep.slots import follow_parent
from qmargin.training.signals import StopRequest

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
        jobs: Processes; with one, the work is done in this one.
        request: After a signal what runs is waited for, and nothing else begins.

    Raises:
        Interrupted: By a signal.
    """
    request = request or StopRequest()  # one that was not entered hears no signal
    if jobs == 1:
        for item in items:
            request.obey()
            yield function(item)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=follow_parent) as pool:
        try:
            for found in pool.map(function, items):
                request.obey()
                yield found
        finally:
            pool.shutdown(cancel_futures=True)
