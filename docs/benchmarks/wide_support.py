"""What a sample of the classes saves where many are active.

Run `python docs/benchmarks/wide_support.py`. It times a chunked step, forward and backward, whose
search for the root starts at the maxima of groups, and at the root of a sample: see
`qmargin.heads.root_search`.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

import qmargin
from qmargin.cli.bench_timing import Step, median, time_turns
from qmargin.demo.run import say
from qmargin.heads import root_search

SETTINGS = ((1.0, 16.0), (1.25, 0.8), (1.25, 3.0), (1.5, 0.2), (2.0, 1.2e-4), (2.0, 4e-3))


def step_of(
    head: qmargin.MarginClassifier, rows: torch.Tensor, labels: torch.Tensor, min_step: int
) -> Step:
    """A step whose samples have at most one in so many classes."""

    def step() -> None:
        head.prototypes.grad = None
        with mock.patch.object(root_search, "MIN_STEP", min_step):
            head(rows.clone().requires_grad_(), labels).backward()

    return step


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = torch.randn(options.batch, options.dim, device=options.device)
    labels = torch.randint(options.classes, (options.batch,), device=options.device)
    say("| alpha | scale | active classes of a row | from maxima, ms | from a sample, ms |")
    say("| ---: | ---: | ---: | ---: | ---: |")
    for alpha, scale in SETTINGS:
        loss = qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.3), scale=scale)
        place = {"device": options.device}
        head = qmargin.MarginClassifier(options.dim, options.classes, loss, path="chunked", **place)
        # of one class in k, no sample has enough
        steps = [step_of(head, rows, labels, n) for n in (options.classes, root_search.MIN_STEP)]
        times = time_turns(steps, rows.device, repeats=8, seconds=20.0)
        plain, sampled = map(median, times)
        assert head.last_step is not None
        active = f"{head.last_step.support_mean:,.0f}"
        say(f"| {alpha:g} | {scale:g} | {active} | {plain:.1f} | {sampled:.1f} |")


if __name__ == "__main__":
    main()
