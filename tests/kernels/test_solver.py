"""The row solver's own promises; its accuracy is measured in tests/losses/test_accuracy.py."""

import math

import pytest
import torch

from qmargin.kernels.solver import (
    bound_from_below,
    row_sums,
    slacks,
    solve_bisection,
    solve_newton,
    solve_rows,
)

VALUES = [-0.5, -0.05, 0.0, 0.05, 0.25, 0.5, 0.75, 1.0]


def random_rows(num_classes=60, rows=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4.0 * torch.randn(rows, num_classes, generator=generator, dtype=torch.float64)
    reference = torch.randn(rows, num_classes, generator=generator, dtype=torch.float64)
    return logits, reference


@pytest.mark.parametrize("b", [*VALUES, 2.0])
def test_sums_over_shards_are_the_sums(b):
    """M11: mass and slope add over any split of the classes, and tau_low is a max over shards."""
    logits, reference = random_rows()
    anchor, level = bound_from_below(logits, reference, b)
    gaps = anchor[:, None] - logits
    whole = row_sums(gaps, reference, level, b)
    cuts = [slice(0, 1), slice(1, 23), slice(23, 60)]
    parts = [row_sums(gaps[:, cut], reference[:, cut], level, b) for cut in cuts]
    for index in range(2):
        torch.testing.assert_close(sum(part[index] for part in parts), whole[index])
    lows = [bound_from_below(logits[:, cut], reference[:, cut], b) for cut in cuts]
    tau_lows = torch.stack([a - slacks(v, b) for a, v in lows])
    torch.testing.assert_close(tau_lows.amax(0), anchor - slacks(level, b))


@pytest.mark.parametrize("b", VALUES)
def test_newton_climbs_and_never_overshoots(b, monkeypatch):
    """M5: tau after any number of steps is a lower bound of the root, and it never falls."""
    logits, reference = random_rows(seed=1)
    anchor, level, _ = solve_bisection(logits, reference, b, bracket="tight", tolerance=0.0)
    tau = anchor - slacks(level, b)
    previous = torch.full_like(tau, -math.inf)
    for steps in range(1, 12):
        monkeypatch.setattr("qmargin.kernels.solver.MAX_STEPS", steps)
        anchor, level, _ = solve_newton(logits, reference, b, tolerance=0.0)
        now = anchor - slacks(level, b)
        assert bool((now <= tau + 1e-12).all())
        assert bool((now >= previous - 1e-12).all())
        previous = now
    torch.testing.assert_close(previous, tau)


@pytest.mark.parametrize("b", [0.25, 0.5, 1.0])
def test_geometric_logits_take_many_steps_but_converge(b):
    """The slowest rows known: each step of Newton can drop only a few classes."""
    logits = -(2.0 ** -torch.arange(40, dtype=torch.float64))[None]
    solution = solve_newton(logits, None, b, tolerance=1e-14)
    gaps = solution.anchor[:, None] - logits
    mass = row_sums(gaps, None, solution.level, b).mass
    torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-13, rtol=0.0)


def test_a_class_that_leads_by_its_measure_may_end_outside_the_support():
    """A million rare classes far above the anchor push it out; the level may then be negative."""
    logits = torch.cat([torch.zeros(1, 1), torch.full((1, 1000), 5.0)], 1).double()
    reference = torch.cat([torch.zeros(1, 1), torch.full((1, 1000), -math.log(1000.0))], 1).double()
    solution = solve_rows(logits, reference, 1.0)
    tau = solution.anchor - slacks(solution.level, 1.0)
    torch.testing.assert_close(tau, torch.full_like(tau, 5.0))
