"""The operators and a small loss, as tests of odd and bad input call them."""

from __future__ import annotations

import qmargin


def make_loss(alpha: float = 1.25, **options: object) -> qmargin.MarginLoss:
    settings = {"scale": 5.0, "reduction": "none", **options}
    return qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.05), **settings)


def operators(alpha: float) -> dict[str, object]:
    """Every operator as a function of logits and labels."""
    return {
        "softargmax": lambda x, y: qmargin.softargmax(x, alpha=alpha),
        "log_partition": lambda x, y: qmargin.log_partition(x, alpha=alpha),
        "loss": lambda x, y: qmargin.fenchel_young_loss(x, y, alpha=alpha),
        "tau": lambda x, y: qmargin.solve_tau(x, alpha=alpha).tau,
        "module": make_loss(alpha),
    }
