"""What packing candidates saves on a CPU, and what the shape of the groups costs.

The batch is that of the subject `loss`: 256 rows, 100,000 classes, scale 32, effective margin 0.5.
Times are CPU time of one thread, which other work on the machine disturbs less than it does a clock
on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import qmargin
from benchmarks.loss import LossBenchmark, cosine_batch
from qmargin.cli.options import count
from qmargin.kernels import lists

ALPHAS = (1.25, 1.5, 2.0)
GROUPS = (8, 16, 32, 64, 128)
PACKED, DENSE = lists.WORTH_LISTING, 10**12  # a list may have one class in so many


def medians(calls: dict[Hashable, Callable[[], object]], repeats: int) -> dict[Hashable, float]:
    """Median CPU milliseconds of each call, taken in turns after one that warms up."""
    seconds: dict[Hashable, list[float]] = {key: [] for key in calls}
    for turn in range(repeats + 1):
        for key, call in calls.items():
            start = time.process_time()
            call()
            if turn:
                seconds[key].append(time.process_time() - start)
    return {key: 1e3 * statistics.median(values) for key, values in seconds.items()}


def step(loss_fn: qmargin.MarginLoss, cosines: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row and its gradient."""
    cosines = cosines.detach().requires_grad_()
    loss = loss_fn(cosines, labels)
    (gradient,) = torch.autograd.grad(loss.mean(), cosines)
    return loss.detach(), gradient


def compare_packing(settings: LossBenchmark, cosines: Tensor, labels: Tensor) -> list[str]:
    """Forward + backward with and without packing, and whether the results are the same."""
    lines = [
        "| alpha | packed, ms | dense, ms | same loss | same gradient | active | candidates |",
        "|---|---|---|---|---|---|---|",
    ]
    for alpha in ALPHAS:
        loss_fn = settings.margin_loss(alpha)
        packed, dense = (timed_step(mode, loss_fn, cosines, labels) for mode in (PACKED, DENSE))
        is_same = [torch.equal(*pair) for pair in zip(packed[1:], dense[1:], strict=True)]
        active = loss_fn.with_stats(cosines, labels).support_size.float().mean()
        lines.append(
            f"| {alpha:g} | {packed[0]:.1f} | {dense[0]:.1f} | {is_same[0]} | "
            f"{is_same[1]} | {active:.1f} | {widest_list(loss_fn, cosines, labels)} |"
        )
    return lines


def timed_step(
    mode: int, loss_fn: qmargin.MarginLoss, cosines: Tensor, labels: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Milliseconds, loss and gradient of a step with or without packing."""
    lists.WORTH_LISTING = mode
    call = partial(step, loss_fn, cosines, labels)
    result = medians({"step": call}, 3)["step"], *call()
    lists.WORTH_LISTING = PACKED
    return result


def widest_list(loss_fn: qmargin.MarginLoss, cosines: Tensor, labels: Tensor) -> int:
    """Length of the longest list of candidates, the target included."""
    widths = []

    def spy(values: Tensor, row: Tensor, firsts: Tensor, *given: Any) -> Any:
        widths.append(int(firsts.diff().max()) + 1)
        return solve_entries(values, row, firsts, *given)

    solve_entries = lists.solve_entries
    with mock.patch.object(lists, "solve_entries", spy):
        loss_fn(cosines, labels)
    return max(widths)


def compare_groups(settings: LossBenchmark, cosines: Tensor, labels: Tensor) -> list[str]:
    """Maxima of strided and of contiguous groups, and a whole step, by group size."""
    blocks = cosines.split(lists.BLOCK // settings.classes)

    def maxima(size: int, dim: int) -> None:
        count = settings.classes // size
        shape = (size, count) if dim == 1 else (count, size)
        for block in blocks:
            block[:, : size * count].reshape(len(block), *shape).amax(dim)

    def whole_step(size: int, alpha: float) -> None:
        lists.GROUP = size
        loss_fn = settings.margin_loss(alpha)
        step(loss_fn, cosines, labels)

    calls: dict[Hashable, Callable[[], object]] = {}
    for size in GROUPS:
        calls[size, "strided"] = partial(maxima, size, 1)
        calls[size, "contiguous"] = partial(maxima, size, 2)
    for size in GROUPS:
        for alpha in ALPHAS:
            calls[size, alpha] = partial(whole_step, size, alpha)
    times = medians(calls, 7)
    columns = ("strided", "contiguous", *ALPHAS)
    lines = [
        "| group | strided maxima, ms | contiguous maxima, ms | "
        + " | ".join(f"step at {alpha:g}, ms" for alpha in ALPHAS)
        + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for size in GROUPS:
        cells = " | ".join(f"{times[size, column]:.1f}" for column in columns)
        lines.append(f"| {size} | {cells} |")
    return lines


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``packing`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "packing",
        help="what packing candidates saves on a CPU, and what the shape of the groups costs",
        description="Time forward and backward of the dense loss with and without packing, and "
        "with groups of several sizes; it takes a few minutes.",
    )
    parser.add_argument("--rows", type=count, default=256, help="samples in the batch")
    parser.add_argument("--classes", type=count, default=100_000, help="identities")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    settings = LossBenchmark(rows=arguments.rows, classes=arguments.classes)
    cosines, labels = cosine_batch(settings)
    lines = compare_packing(settings, cosines, labels)
    lines += ["", *compare_groups(settings, cosines, labels)]
    sys.stdout.write("\n".join(lines) + "\n")
