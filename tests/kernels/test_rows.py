"""Blocks and candidates change nothing but speed."""

import math

import pytest
import torch

from qmargin.kernels import rows as kernels
from qmargin.kernels.rows import Rows, candidates, everything, posterior, solve


def batch(num_classes=500, rows=7, seed=0, dtype=torch.float32, lifted=True):
    generator = torch.Generator().manual_seed(seed)
    cosines = 0.2 * torch.randn(rows, num_classes, generator=generator, dtype=dtype)
    labels = torch.randint(num_classes, (rows,), generator=generator)
    targets = torch.linspace(0.0, 0.9, rows, dtype=torch.float64)
    return cosines, labels, targets


def lifted_rows(b, scale=20.0, **options):
    cosines, labels, targets = batch(**options)
    prior = torch.full_like(targets, -0.1 * scale)
    return Rows(cosines, scale, b, None, labels, scale * targets, prior)


@pytest.mark.parametrize("b", [0.05, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_classes", [64, 65, 97, 500])
def test_candidates_hold_the_support_and_give_the_same_loss(b, num_classes):
    """M8, M13: the classes left out are exactly zero, so nothing changes."""
    rows = lifted_rows(b, scale=40.0, num_classes=num_classes)
    listed = candidates(rows)
    whole = everything(rows)
    solved = solve(rows)
    posterior_of_all, _ = kernels.posterior_rows(
        whole.logits, whole.log_reference, solved.anchor, solved.level, b
    )
    torch.testing.assert_close(posterior_of_all.sum(1), torch.ones(7).double(), atol=1e-8, rtol=0)
    if listed is not None:
        for row in range(7):
            support = whole.logits[row, :-1][posterior_of_all[row, :-1] > 0]
            assert set(support.tolist()) <= set(listed.logits[row].tolist())


def test_the_packed_path_is_really_taken(monkeypatch):
    """A test of the fast path must not silently test the slow one."""
    rows = lifted_rows(0.5, scale=60.0)
    assert candidates(rows) is not None
    packed = solve(rows)
    monkeypatch.setattr(kernels, "WORTH_PACKING", 10**9)
    assert candidates(rows) is None
    dense = solve(rows)
    for name, fast, plain in zip(packed._fields, packed, dense, strict=True):
        if name not in ("anchor", "level", "num_evaluations", "mass_error"):
            torch.testing.assert_close(fast, plain, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("b", [0.0, 0.25, 1.0, 2.0])
def test_block_size_does_not_matter(b, monkeypatch):
    rows = lifted_rows(b, dtype=torch.float64)
    whole = solve(rows)
    weights = torch.linspace(0.0, 1.0, 7).double()
    gradient = posterior(rows, whole.anchor, whole.level, weights)
    monkeypatch.setattr(kernels, "CPU_BLOCK", 1)
    single = solve(rows)
    torch.testing.assert_close(single.value, whole.value, atol=1e-13, rtol=1e-13)
    again = posterior(rows, single.anchor, single.level, weights)
    torch.testing.assert_close(again, gradient, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("b", [0.0, 0.25, 1.0])
def test_posterior_leaves_the_lifted_target_to_its_own_gradient(b):
    rows = lifted_rows(b)
    solved = solve(rows)
    result = posterior(rows, solved.anchor, solved.level, None)
    assert bool((result.gather(1, rows.labels[:, None]) == 0).all())
    torch.testing.assert_close(result.sum(1), solved.target_deficit)
    assert math.isclose(float((solved.target_posterior + solved.target_deficit).sum()), 7.0)


def test_rows_whose_target_alone_is_active_stay_packed():
    """No other candidate at all: the fast path still serves, and the loss is exactly zero."""
    cosines, labels, targets = batch()
    rows = Rows(cosines, 60.0, 1.0, None, labels, 60.0 * (targets + 2.0), torch.zeros_like(targets))
    listed = candidates(rows)
    assert listed is not None
    assert listed.logits.shape[1] == 2
    assert bool((solve(rows).value == 0).all())
    broken = cosines.clone()
    broken[2, 17] = math.nan
    rows = Rows(broken, 60.0, 1.0, None, labels, 60.0 * (targets + 2.0), torch.zeros_like(targets))
    assert solve(rows).value.isnan().tolist() == [row == 2 for row in range(7)]
