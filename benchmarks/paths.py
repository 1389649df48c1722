"""Where the limits of the path `auto` come from: few classes, and wide supports."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

import qmargin
from benchmarks.timing import Step, median, time_turns
from qmargin.cli.options import count
from qmargin.heads import chunked as root_search
from qmargin.training.distributed import find_device

PATHS = ("sparse", "chunked", "dense")
FEW_SETTINGS = ((1.25, 4.4), (1.5, 0.43), (1.5, 3.3))
WIDE_SETTINGS = ((1.0, 16.0), (1.25, 0.8), (1.25, 3.0), (1.5, 0.2), (2.0, 1.2e-4), (2.0, 4e-3))
NOISE = 0.12  # of each coordinate of an embedding, beside the unit vector of its class


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``few-classes`` and ``wide-support`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "few-classes",
        help="which path is fastest where classes are few, or many of them are active",
        description="Time a step of each path, forward and backward, in turns; "
        "qmargin.heads.paths has its limits from this table.",
    )
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--classes", type=count, nargs="+", default=[1000, 10_000, 30_000, 100_000], help="sizes")
    add("--batch", type=count, default=512, help="samples")
    add("--dim", type=count, default=128, help="embedding size")
    parser.set_defaults(run=run_few_classes)
    parser = subjects.add_parser(
        "wide-support",
        help="what a sample of the classes saves where many are active",
        description="Time a chunked step, forward and backward, whose search for the root starts "
        "at the maxima of groups, and at the root of a sample: see qmargin.heads.chunked.",
    )
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--classes", type=count, default=1_000_000, help="identities")
    add("--batch", type=count, default=4096, help="samples")
    add("--dim", type=count, default=64, help="embedding size")
    parser.set_defaults(run=run_wide_support)


def prototype_step(
    head: qmargin.MarginClassifier, rows: torch.Tensor, labels: torch.Tensor
) -> None:
    """As in a training with an optimizer of PyTorch, but the prototypes stay."""
    head.prototypes.grad = None
    with torch.no_grad():
        head.prototypes.mul_(1.0)  # a change: the sparse path has to copy them again
    head(rows.clone().requires_grad_(), labels).backward()


def run_few_classes(options: argparse.Namespace) -> None:
    """Print a table."""
    device = find_device(options.device)
    say(f"| classes | alpha | scale | active in a row | {' | '.join(PATHS)} |")
    say("| ---: | ---: | ---: | ---: |" + " ---: |" * len(PATHS))
    for num_classes in options.classes:
        torch.manual_seed(0)
        labels = torch.randint(num_classes, (options.batch,), device=device)
        noise = torch.randn(options.batch, options.dim, device=device)
        for alpha, scale in FEW_SETTINGS:
            loss = qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.4), scale=scale)
            heads = [
                qmargin.MarginClassifier(options.dim, num_classes, loss, path=path, device=device)
                for path in PATHS
            ]
            for head in heads[1:]:
                head.load_state_dict(heads[0].state_dict())
            rows = F.normalize(heads[0].prototypes.detach()[labels]) + NOISE * noise
            steps = [partial(prototype_step, head, rows, labels) for head in heads]
            times = time_turns(steps, rows.device, repeats=10, seconds=8.0)
            stats = heads[0].last_step
            assert stats is not None
            active = f"{stats.support_mean:,.0f}"
            if stats.path != "sparse":
                active += " (lists too long)"
            cells = [f"{num_classes:,}", f"{alpha:g}", f"{scale:g}", active]
            say(f"| {' | '.join([*cells, *(f'{median(one):.2f}' for one in times)])} |")


def sampled_step(
    head: qmargin.MarginClassifier, rows: torch.Tensor, labels: torch.Tensor, min_step: int
) -> Step:
    """A step whose samples have at most one in so many classes."""

    def step() -> None:
        head.prototypes.grad = None
        with mock.patch.object(root_search, "MIN_STEP", min_step):
            head(rows.clone().requires_grad_(), labels).backward()

    return step


def run_wide_support(options: argparse.Namespace) -> None:
    """Print a table."""
    device = find_device(options.device)
    torch.manual_seed(0)
    rows = torch.randn(options.batch, options.dim, device=device)
    labels = torch.randint(options.classes, (options.batch,), device=device)
    say("| alpha | scale | active classes of a row | from maxima, ms | from a sample, ms |")
    say("| ---: | ---: | ---: | ---: | ---: |")
    for alpha, scale in WIDE_SETTINGS:
        loss = qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.3), scale=scale)
        head = qmargin.MarginClassifier(
            options.dim, options.classes, loss, path="chunked", device=device
        )
        # of one class in k, no sample has enough
        steps = [
            sampled_step(head, rows, labels, n) for n in (options.classes, root_search.MIN_STEP)
        ]
        times = time_turns(steps, rows.device, repeats=8, seconds=20.0)
        plain, sampled = map(median, times)
        assert head.last_step is not None
        active = f"{head.last_step.support_mean:,.0f}"
        say(f"| {alpha:g} | {scale:g} | {active} | {plain:.1f} | {sampled:.1f} |")
