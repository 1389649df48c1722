"""What a sample of the classes saves where many are active.

Run `python docs/benchmarks/wide_support.py`. It times a chunked step, forward and backward, whose
search for the root starts at the maxima of groups, and at the root of a sample: see
`qmargin.heads.root_search`.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter
from unittest import mock

import torch

import qmargin
from qmargin.demo.run import say
from qmargin.heads import root_search

SETTINGS = ((1.0, 16.0), (1.25, 0.8), (1.25, 3.0), (1.5, 0.2), (2.0, 1.2e-4), (2.0, 4e-3))


def milliseconds(head: qmargin.MarginClassifier, rows: torch.Tensor, labels: torch.Tensor) -> float:
    """Of a step, the median of some."""
    taken = []
    for _ in range(8):
        embeddings = rows.clone().requires_grad_()
        head.prototypes.grad = None
        _wait(rows)
        began = perf_counter()
        head(embeddings, labels).backward()
        _wait(rows)
        taken.append(1e3 * (perf_counter() - began))
    return median(taken[2:])


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


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
        with mock.patch.object(root_search, "MIN_STEP", options.classes):  # too few for a sample
            plain = milliseconds(head, rows, labels)
        sampled = milliseconds(head, rows, labels)
        assert head.last_step is not None
        active = f"{head.last_step.support_mean:,.0f}"
        say(f"| {alpha:g} | {scale:g} | {active} | {plain:.1f} | {sampled:.1f} |")


if __name__ == "__main__":
    main()
