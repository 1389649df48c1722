"""Which path is fastest where classes are few, or many of them are active.

Run `python docs/benchmarks/few_classes.py`. It times a step of each path, forward and backward, in
turns; `qmargin.heads.choice` has its limits from this table.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F

import qmargin
from qmargin.cli.bench_timing import median, time_turns
from qmargin.demo.run import say

PATHS = ("sparse", "chunked", "dense")
SETTINGS = ((1.25, 4.4), (1.5, 0.43), (1.5, 3.3))
NOISE = 0.12  # of each coordinate of an embedding, beside the unit vector of its class


def step(head: qmargin.MarginClassifier, rows: torch.Tensor, labels: torch.Tensor) -> None:
    """As in a training with an optimizer of PyTorch, but the prototypes stay."""
    head.prototypes.grad = None
    with torch.no_grad():
        head.prototypes.mul_(1.0)  # a change: the sparse path has to copy them again
    head(rows.clone().requires_grad_(), labels).backward()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", type=int, nargs="+", default=[1000, 10_000, 30_000, 100_000])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    say(f"| classes | alpha | scale | active in a row | {' | '.join(PATHS)} |")
    say("| ---: | ---: | ---: | ---: |" + " ---: |" * len(PATHS))
    for num_classes in options.classes:
        torch.manual_seed(0)
        place = {"device": options.device}
        labels = torch.randint(num_classes, (options.batch,), **place)
        noise = torch.randn(options.batch, options.dim, **place)
        for alpha, scale in SETTINGS:
            loss = qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.4), scale=scale)
            heads = [
                qmargin.MarginClassifier(options.dim, num_classes, loss, path=path, **place)
                for path in PATHS
            ]
            for head in heads[1:]:
                head.load_state_dict(heads[0].state_dict())
            rows = F.normalize(heads[0].prototypes.detach()[labels]) + NOISE * noise
            steps = [partial(step, head, rows, labels) for head in heads]
            times = time_turns(steps, rows.device, repeats=10, seconds=8.0)
            stats = heads[0].last_step
            assert stats is not None
            active = f"{stats.support_mean:,.0f}"
            if stats.path != "sparse":
                active += " (lists too long)"
            cells = [f"{num_classes:,}", f"{alpha:g}", f"{scale:g}", active]
            say(f"| {' | '.join([*cells, *(f'{median(one):.2f}' for one in times)])} |")


if __name__ == "__main__":
    main()
