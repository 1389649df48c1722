"""Rows by lists on a CPU: the same numbers as a solve over all classes, whatever the rows hold."""

import math

import pytest
import torch

import qmargin
from qmargin.kernels import lists, rows
from qmargin.kernels.rows import Rows, kept_posterior, solve_and_keep
from qmargin.kernels.solver import label_loss, posterior_rows, solve_rows
from qmargin.losses import functional

POWERS = [0.1001, 0.25, 0.4, 0.5, 1.0]


def make_rows(b, num_classes, *, scale=30.0, dtype=torch.float32, num_rows=9):
    generator = torch.Generator().manual_seed(num_classes)
    values = 0.2 * torch.randn(num_rows, num_classes, generator=generator, dtype=dtype)
    labels = torch.randint(num_classes, (num_rows,), generator=generator)
    labels[0], labels[1] = 0, num_classes - 1  # in the first group, and behind the last one
    values[3, labels[3]] = 3.0  # the target is never one of the others
    targets = scale * torch.linspace(-0.5, 1.5, num_rows, dtype=torch.float64)
    return Rows(values, scale, b, None, labels, targets, torch.full_like(targets, -0.1 * scale))


def solve_densely(given):
    """Loss, posterior of the others ``[B, k]`` and support size over all classes, in float64."""
    listed = rows.everything(given)
    anchor, level, _ = solve_rows(*listed, given.b)
    posterior, levels = posterior_rows(*listed, anchor, level, given.b)
    loss, _, _ = label_loss(posterior, levels, listed.log_reference[:, -1], given.b)
    return loss, posterior[:, :-1], (posterior > 0).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_classes", [64, 65, 97, 500, 2500])
@pytest.mark.parametrize("b", POWERS)
def test_lists_are_a_solve_over_all_classes(b, num_classes, dtype, monkeypatch):
    given = make_rows(b, num_classes, dtype=dtype)
    before = given.values.clone()
    loss, posterior, support = solve_densely(given)
    weights = torch.linspace(-1.0, 2.0, len(loss), dtype=dtype)
    tight = {"atol": 1e-12, "rtol": 1e-11} if dtype == torch.float64 else {}
    for piece, worth in ((lists.PIECE, 4), (300, 0), (300, 10**9)):  # by size; lists; all classes
        monkeypatch.setattr(lists, "PIECE", piece)
        monkeypatch.setattr(lists, "WORTH_LISTING", worth)
        solved, kept = solve_and_keep(given)
        is_dense = len(kept) == 1
        assert worth == 4 or is_dense == (worth > 4)
        torch.testing.assert_close(solved.value, loss.to(dtype), **tight)
        assert torch.equal(solved.support_size, support)
        found = kept_posterior(given, kept, solved.anchor, solved.level, weights)
        torch.testing.assert_close(found, (posterior * weights[:, None]).to(dtype), **tight)
        assert torch.equal(given.values, before)  # nothing is written into the caller's tensor


@pytest.mark.parametrize("worth", [0, 10**9])
@pytest.mark.parametrize("b", [0.25, 1.0])
def test_broken_and_masked_rows(b, worth, monkeypatch):
    monkeypatch.setattr(lists, "WORTH_LISTING", worth)
    given = make_rows(b, 101)
    values, labels = given.values.clone(), given.labels
    clean, _ = solve_and_keep(given)
    values[0, 7] = math.nan
    values[1, 3] = math.inf
    values[2, 100] = math.nan  # behind the last group
    values[4] = -math.inf  # every other class masked out
    values[3, labels[3]] = math.nan  # the target's own place
    targets = given.target_logits.clone()
    targets[5] = -math.inf
    solved, _ = solve_and_keep(
        Rows(values, 30.0, b, None, labels, targets, given.target_log_reference)
    )
    assert bool(solved.value[:3].isnan().all())
    assert solved.value[3] == clean.value[3]
    assert solved.value[4] == 0.0 and solved.target_posterior[4] == 1.0
    assert solved.value[5] == math.inf and solved.target_posterior[5] == 0.0
    assert torch.equal(solved.value[6:], clean.value[6:])


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("num_classes", [40, 97, 1000])
def test_eager_losses_are_those_of_the_operators(alpha, num_classes, monkeypatch):
    """Eager mode has a way of its own; compiled graphs and transforms take the operators."""
    given = make_rows(alpha - 1.0, num_classes, num_rows=40)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.05), scale=20.0)
    outcomes = []
    for is_eager in (True, False):
        if not is_eager:
            monkeypatch.setattr(functional, "is_on_cpu", lambda tensor: False)
        cosines = given.values.clamp(-1.0, 1.0).requires_grad_()
        loss = loss_fn(cosines, given.labels)
        (first,) = torch.autograd.grad(loss, cosines, retain_graph=True)
        (again,) = torch.autograd.grad(loss, cosines, retain_graph=True)
        assert torch.equal(first, again)
        (smooth,) = torch.autograd.grad(loss, cosines, create_graph=True)
        (second,) = torch.autograd.grad(smooth.square().sum(), cosines)
        outcomes.append((loss.detach(), first, second))
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)
