"""The dense loss and the head on a CPU against plain PyTorch, also where the cores are shared."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qmargin
from benchmarks.common import positive
from benchmarks.loss import LossBenchmark, cosine_batch
from benchmarks.timing import Step, median, time_turns
from qmargin.cli.options import count

CPU = torch.device("cpu")
NOISE = 0.12  # of each coordinate of an embedding of 64 dimensions, beside its prototype
Loss = Callable[[Tensor, Tensor], Tensor]


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``cpu`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "cpu",
        help="losses and the head on a CPU against plain PyTorch, on shared cores too",
        description="Time forward + backward of losses on cosines, or a step of the head with "
        "its update, in turns with plain PyTorch, for several numbers of classes.",
    )
    add = parser.add_argument
    sizes = [1000, 5994, 20_000, 100_000, 200_000]
    add("--classes", type=count, nargs="+", default=sizes, help="sizes")
    add("--rows", type=count, default=128, help="samples in the batch")
    add("--dim", type=count, default=128, help="embedding size of the head")
    add("--alphas", type=positive, nargs="+", default=[1.0, 1.25, 1.5, 2.0], help="orders")
    add("--scale", type=positive, default=32.0, help="logits = scale * cosines")
    add("--head", action="store_true", help="time steps of the head, not the losses")
    add("--busy", type=int, default=0, metavar="N", help="run N processes that never wait, too")
    add("--repeats", type=count, default=9, help="timed turns; medians are shown")
    add("--threads", type=count, help="CPU threads (default: what torch chooses)")
    parser.set_defaults(run=run)


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Processes that keep cores busy."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(options: argparse.Namespace) -> None:
    """Print a table, a row as soon as it is measured."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    names = [f"alpha {alpha:g}" for alpha in options.alphas]
    unit = "a step" if options.head else "forward + backward"
    say(f"Milliseconds for {unit}, {options.rows} rows, {torch.get_num_threads()} threads,")
    say(f"{options.busy} busy processes; in brackets, over plain PyTorch.\n")
    say(f"| classes | plain | {' | '.join(names)} |")
    say("| ---: |" + " ---: |" * (1 + len(names)))
    make = head_steps if options.head else loss_steps
    with busy_processes(options.busy):
        for num_classes in options.classes:
            steps = make(options, num_classes)
            times = time_turns(steps, CPU, repeats=options.repeats, seconds=30.0)
            plain, *ours = map(median, times)
            cells = [f"{ms:.2f} ({ms / plain:.2f})" for ms in ours]
            say(f"| {' | '.join([f'{num_classes:,}', f'{plain:.2f}', *cells])} |")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def plain_loss(cosines: Tensor, labels: Tensor, scale: float, margin: float = 0.35) -> Tensor:
    """CosFace as most training code has it."""
    index = labels[:, None]
    lowered = cosines.scatter(1, index, cosines.gather(1, index) - margin)
    return functional.cross_entropy(scale * lowered, labels)


def our_loss(alpha: float, scale: float) -> qmargin.MarginLoss:
    """CosFace at ``alpha = 1``, else a prior margin that asks for a cosine gap of 0.5."""
    if alpha == 1.0:
        return qmargin.MarginLoss(qmargin.Alpha(1.0), qmargin.CosineMargin(0.35), scale=scale)
    margin = qmargin.PriorMargin.from_effective(0.5, alpha=alpha, scale=scale)
    return qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale)


def loss_steps(options: argparse.Namespace, num_classes: int) -> list[Step]:
    """Forward + backward of the plain loss, and of ours for every alpha."""
    settings = LossBenchmark(rows=options.rows, classes=num_classes, scale=options.scale)
    cosines, labels = cosine_batch(settings)

    def step(loss: Loss) -> None:
        loss(cosines.detach().requires_grad_(), labels).backward()

    losses: list[Loss] = [partial(plain_loss, scale=options.scale)]
    losses += [our_loss(alpha, options.scale) for alpha in options.alphas]
    return [partial(step, loss) for loss in losses]


class PlainHead(nn.Module):
    """CosFace over all classes."""

    def __init__(self, embedding_dim: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, embedding_dim))
        self.scale = scale

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of embeddings ``[B, d]`` with labels ``[B]``."""
        unit = functional.normalize(embeddings)
        return plain_loss(unit @ functional.normalize(self.weight).t(), labels, self.scale)


def head_steps(options: argparse.Namespace, num_classes: int) -> list[Step]:
    """Forward, backward and update of a plain head, and of ours for every alpha, by ``auto``."""
    torch.manual_seed(0)
    labels = torch.randint(num_classes, (options.rows,))
    noise = NOISE * math.sqrt(64 / options.dim) * torch.randn(options.rows, options.dim)
    settings: dict[str, Any] = {"lr": 1e-9, "momentum": 0.9, "weight_decay": 5e-4}

    def step(head: nn.Module, optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
        rows = (functional.normalize(weight.detach()[labels]) + noise).requires_grad_()
        optimizer.zero_grad()
        head(rows, labels).backward()
        optimizer.step()

    plain = PlainHead(options.dim, num_classes, options.scale)
    steps: list[Step] = [
        partial(step, plain, torch.optim.SGD(plain.parameters(), **settings), plain.weight)
    ]
    for alpha in options.alphas:
        loss = our_loss(alpha, options.scale)
        head = qmargin.MarginClassifier(options.dim, num_classes, loss, gradient="fused")
        steps.append(partial(step, head, qmargin.ExactSGD(head, **settings), head.weight))
    return steps
