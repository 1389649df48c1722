"""Promises of the solver, of whole rows, and of the head's scoring, in plain PyTorch.

The solver's accuracy is measured in ``tests/losses/test_accuracy.py``.
"""

import math

import pytest
import torch
from torch.nn.functional import normalize, pad

from qmargin.kernels import head_reference as head
from qmargin.kernels import rows as kernels
from qmargin.kernels.rows import Rows, candidates, everything, posterior, solve
from qmargin.kernels.solver import (
    bound_from_below,
    row_sums,
    slacks,
    solve_bisection,
    solve_newton,
    solve_rows,
)

VALUES = [-0.5, -0.05, 0.0, 0.05, 0.25, 0.5, 0.75, 1.0]  # alpha - 1


def random_rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, 5, 60, generator=generator, dtype=torch.float64)
    return 4.0 * logits, reference


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
        assert bool((now <= tau + 1e-12).all()) and bool((now >= previous - 1e-12).all())
        previous = now
    torch.testing.assert_close(previous, tau)


@pytest.mark.parametrize("b", [0.25, 0.5, 1.0])
def test_geometric_logits_take_many_steps_but_converge(b):
    """The slowest rows known: each step of Newton can drop only a few classes."""
    logits = -(2.0 ** -torch.arange(40, dtype=torch.float64))[None]
    anchor, level, _ = solve_newton(logits, None, b, tolerance=1e-14)
    mass = row_sums(anchor[:, None] - logits, None, level, b).mass
    torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-13, rtol=0.0)


def test_a_class_that_leads_by_its_measure_may_end_outside_the_support():
    """A million rare classes far above the anchor push it out; the level may then be negative."""
    logits = pad(torch.full((1, 1000), 5.0), (1, 0)).double()
    reference = pad(torch.full((1, 1000), -math.log(1000.0)), (1, 0)).double()
    anchor, level, _ = solve_rows(logits, reference, 1.0)
    torch.testing.assert_close(anchor - slacks(level, 1.0), torch.tensor([5.0]).double())


# Rows: blocks and candidates change nothing but speed


def lifted_rows(b, scale=20.0, num_classes=500, dtype=torch.float32, ahead=0.0, prior=0.1):
    generator = torch.Generator().manual_seed(0)
    cosines = 0.2 * torch.randn(7, num_classes, generator=generator, dtype=dtype)
    labels = torch.randint(num_classes, (7,), generator=generator)
    targets = scale * (ahead + torch.linspace(0.0, 0.9, 7, dtype=torch.float64))
    return Rows(cosines, scale, b, None, labels, targets, torch.full_like(targets, -prior * scale))


@pytest.mark.parametrize("b", [0.05, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_classes", [64, 65, 97, 500])
def test_candidates_hold_the_support_and_give_the_same_loss(b, num_classes):
    """M8, M13: the classes left out are exactly zero, so nothing changes."""
    rows = lifted_rows(b, scale=40.0, num_classes=num_classes)
    listed, whole, solved = candidates(rows), everything(rows), solve(rows)
    of_all, _ = kernels.posterior_rows(*whole, solved.anchor, solved.level, b)
    torch.testing.assert_close(of_all.sum(1), torch.ones(7).double(), atol=1e-8, rtol=0)
    for row in range(7 if listed is not None else 0):
        support = whole.logits[row, :-1][of_all[row, :-1] > 0]
        assert set(support.tolist()) <= set(listed.logits[row].tolist())


def test_the_packed_path_is_really_taken(monkeypatch):
    """A test of the fast path must not silently test the slow one."""
    rows = lifted_rows(0.5, scale=60.0)
    assert candidates(rows) is not None
    packed = solve(rows)
    monkeypatch.setattr(kernels, "WORTH_PACKING", 10**9)
    assert candidates(rows) is None
    dense = solve(rows)
    for name in ("value", "tau", "support_size", "target_posterior", "target_deficit"):
        found, expected = getattr(packed, name), getattr(dense, name)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("b", [0.0, 0.25, 1.0, 2.0])
def test_block_size_does_not_matter(b, monkeypatch):
    rows = lifted_rows(b, dtype=torch.float64)
    weights, found = torch.linspace(0.0, 1.0, 7).double(), []
    for block in (kernels.CPU_BLOCK, 1):
        monkeypatch.setattr(kernels, "CPU_BLOCK", block)
        solved = solve(rows)
        found.append((solved.value, posterior(rows, solved.anchor, solved.level, weights)))
    torch.testing.assert_close(*found, atol=1e-13, rtol=1e-13)


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
    rows = lifted_rows(1.0, scale=60.0, ahead=2.0, prior=0.0)
    assert candidates(rows).logits.shape[1] == 2
    assert bool((solve(rows).value == 0).all())
    rows.values[2, 17] = math.nan
    assert solve(rows).value.isnan().tolist() == [row == 2 for row in range(7)]


# Exact scores of listed classes, group by group and by blocks of classes


def random_batch(num_classes, num_rows):
    torch.manual_seed(num_classes)
    prototypes = torch.randn(num_classes, 24)
    embeddings = normalize(torch.randn(num_rows, 24))
    labels, zeros = torch.randint(num_classes, (num_rows,)), torch.zeros(num_rows)
    prepared = head.PreparedRows(embeddings, embeddings, zeros, embeddings, zeros)
    inverse_norms = 1.0 / prototypes.norm(dim=1)
    unit = prototypes * inverse_norms[:, None]
    cosines = embeddings @ unit.t()
    batch = head.Batch(prepared, unit, prototypes, inverse_norms, labels)
    return batch, cosines.scatter(1, labels[:, None], -torch.inf)


@pytest.mark.parametrize("num_rows", [1, 37])  # more than a group takes at a time
@pytest.mark.parametrize("num_classes", [1, 31, 64, 601])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_both_list_every_class_above_the_floor(share, num_classes, num_rows, monkeypatch):
    batch, cosines = random_batch(num_classes, num_rows)
    finite = cosines.nan_to_num(neginf=-1.0).double()
    floor = finite.quantile(1.0 - share, dim=1) + (1.0 if share == 0.0 else 1e-4)
    if share == 1.0:
        floor = torch.full_like(floor, -2.0)
    padded = pad(cosines, (0, -num_classes % head.GROUP), value=-torch.inf)
    is_listed = padded.unflatten(1, (-1, head.GROUP)).amax(2).double() > floor[:, None] - 1e-5
    rows, groups = is_listed.nonzero(as_tuple=True)
    starts = pad(is_listed.sum(1).cumsum(0), (1, 0))
    pairs = head.Pairs(groups, rows, starts, floor, torch.full_like(floor, 1e-5))
    monkeypatch.setattr(head, "BLOCK_CLASSES", 256)  # several blocks
    monkeypatch.setattr(head, "BLOCK_ENTRIES", 8 * head.GROUP)
    rows, columns = (cosines.double() > floor[:, None]).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=num_rows)
    for limit in (0.0, 2.0):  # of the share of pairs that are scored one by one
        monkeypatch.setattr(head, "DENSE_SHARE", limit)
        found = head.score_candidates(batch, pairs)
        assert torch.equal(found.rows, rows) and torch.equal(found.columns, columns)
        torch.testing.assert_close(found.scores, cosines[rows, columns], atol=1e-6, rtol=0)
        assert torch.equal(found.starts, pad(counts.cumsum(0), (1, 0)))


def test_a_score_at_the_floor_is_not_listed():
    """The floor is float64: in float32 it must neither rise nor hide the number above it."""
    batch, cosines = random_batch(64, 1)
    middle = cosines[0].sort().values[40]
    above = torch.nextafter(middle, torch.tensor(2.0))
    for floor in (middle.double(), (middle.double() + above.double()) / 2):
        found = head._score_blocks(batch, floor[None])
        assert len(found.rows) == int((cosines.double() > floor).sum())
