"""Masked classes, NaN, infinity, ignored rows, empty batches: confined to where they stand."""

from __future__ import annotations

import math

import pytest
import torch

import qmargin
from helpers.cases import spread_cosines
from helpers.operators import make_loss, operators
from qmargin import errors

ALPHAS = (0.5, 1.0, 1.25, 3.0)
for_alphas = pytest.mark.parametrize("alpha", ALPHAS)


# ---------------------------------------------------------------- masked classes


@for_alphas
def test_masked_classes_are_as_good_as_absent(alpha: float) -> None:
    """``-inf`` gives p = 0 and a zero gradient, and changes nothing else."""
    cosines, _ = spread_cosines()
    masked = [2, 7, 11]
    kept = [j for j in range(12) if j not in masked]
    labels = torch.tensor([0, 1, 3, 4, 10])
    logits = (5 * cosines).double()
    logits[:, masked] = -math.inf
    short, short_labels = logits[:, kept], torch.tensor([kept.index(y) for y in labels.tolist()])
    posterior = qmargin.softargmax(logits, alpha=alpha)
    assert bool((posterior[:, masked] == 0).all())
    close = {"rtol": 0, "atol": 1e-13}
    torch.testing.assert_close(posterior[:, kept], qmargin.softargmax(short, alpha=alpha), **close)
    long, brief = (qmargin.solve_tau(x, alpha=alpha) for x in (logits, short))
    torch.testing.assert_close(long.tau, brief.tau, **close)
    assert torch.equal(long.support_size, brief.support_size)
    torch.testing.assert_close(
        qmargin.log_partition(logits, alpha=alpha),
        qmargin.log_partition(short, alpha=alpha),
        **close,
    )
    logits.requires_grad_()
    loss = qmargin.fenchel_young_loss(logits, labels, alpha=alpha)
    torch.testing.assert_close(
        loss.detach(), qmargin.fenchel_young_loss(short, short_labels, alpha=alpha), **close
    )
    for value in (loss, qmargin.log_partition(logits, alpha=alpha)):
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert bool((gradient[:, masked] == 0).all())
        assert bool(gradient.isfinite().all())
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64)
    value = (qmargin.softargmax(logits, alpha=alpha) * weights).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    assert bool((gradient[:, masked] == 0).all())
    assert bool(gradient.isfinite().all())


@for_alphas
def test_a_masked_target_costs_infinity(alpha: float) -> None:
    """An impossible target: +inf for its row, and the other rows are untouched."""
    cosines, labels = spread_cosines()
    expected = make_loss(alpha)(cosines, labels)
    broken = cosines.clone()
    broken[1, labels[1]] = -math.inf
    loss = make_loss(alpha)(broken, labels)
    assert float(loss[1]) == math.inf
    assert torch.equal(loss[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    by_function = qmargin.fenchel_young_loss(5 * broken, labels, alpha=alpha)
    assert float(by_function[1]) == math.inf
    one_hot = torch.nn.functional.one_hot(labels, 12).float()
    by_distribution = qmargin.fenchel_young_loss(5 * broken, one_hot, alpha=alpha)
    assert float(by_distribution[1]) == math.inf
    assert bool(by_distribution[[0, 2, 3, 4]].isfinite().all())


@for_alphas
def test_a_row_without_any_class_is_not_a_number(alpha: float) -> None:
    """All classes masked: no posterior, no finite loss, and no other row is touched."""
    cosines, labels = spread_cosines()
    for name, function in operators(alpha).items():
        expected = function(cosines, labels)
        broken = cosines.clone()
        broken[2] = -math.inf
        value = function(broken, labels)
        others = [0, 1, 3, 4]
        if name == "softargmax":  # masked means p = 0
            assert bool(((value[2] == 0) | value[2].isnan()).all())
        else:
            assert not bool(value[2].isfinite().any()), name
        assert torch.equal(value[others], expected[others]), name


@for_alphas
def test_minus_infinity_in_the_reference_masks_too(alpha: float) -> None:
    """A class with ``q = 0`` cannot have mass."""
    cosines, _ = spread_cosines()
    logits = 5 * cosines.double()
    reference = torch.zeros(12, dtype=torch.float64)
    reference[4] = -math.inf
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=reference)
    kept = [j for j in range(12) if j != 4]
    expected = qmargin.softargmax(logits[:, kept], alpha=alpha)
    assert bool((posterior[:, 4] == 0).all())
    torch.testing.assert_close(posterior[:, kept], expected, rtol=0, atol=1e-13)


# ---------------------------------------------------------------- NaN and infinity


@for_alphas
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["target", "other", "all"])
def test_a_broken_row_is_nan_and_the_others_are_bit_identical(
    alpha: float, bad: float, where: str
) -> None:
    cosines, labels = spread_cosines()
    others = [0, 1, 3, 4]
    for name, function in operators(alpha).items():
        broken = cosines.clone()
        if where == "all":
            broken[2] = bad
        else:
            broken[2, (int(labels[2]) + (where == "other")) % 12] = bad
        value = function(broken, labels)
        assert bool(value[2].isnan().all()), f"{name}: {value[2]}"
        assert torch.equal(value[others], function(cosines[others], labels[others])), name


@for_alphas
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_leaves_the_gradients_of_others_alone(alpha: float, bad: float) -> None:
    cosines, labels = spread_cosines()
    loss_fn = make_loss(alpha)
    others = [0, 1, 3, 4]
    gradients = []
    for broken in (False, True):
        leaf = cosines.clone()
        leaf[2, 5] = bad if broken else leaf[2, 5]
        leaf.requires_grad_()
        loss_fn(leaf, labels).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0][others], gradients[1][others])
    assert bool(gradients[1][2].isnan().all())


def test_huge_logits_do_not_overflow() -> None:
    """Finite float32 logits of any size give a posterior, not NaN."""
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e30, 1e30, -1e30], [-3e38, -3e38, -3e38]])
    for alpha in ALPHAS:
        posterior = qmargin.softargmax(logits, alpha=alpha)
        expected = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
        torch.testing.assert_close(posterior, expected, rtol=0, atol=1e-6, msg=f"alpha {alpha}")


# ---------------------------------------------------------------- empty batches, ignored rows


@for_alphas
def test_an_empty_batch_gives_an_empty_result(alpha: float) -> None:
    cosines, labels = torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64)
    for name, function in operators(alpha).items():
        leaf = cosines.clone().requires_grad_()
        value = function(leaf, labels)
        assert value.shape == ((0, 12) if name == "softargmax" else (0,))
        if name != "tau":
            value.sum().backward()
            assert leaf.grad.shape == (0, 12)
    output = make_loss(alpha).with_stats(cosines, labels)
    assert all(part.shape == (0,) for part in output)


@for_alphas
def test_ignored_rows_cost_nothing_and_pull_nothing(alpha: float) -> None:
    cosines, labels = spread_cosines()
    labels[[1, 4]] = -100
    kept = [0, 2, 3]
    leaf = cosines.clone().requires_grad_()
    loss = make_loss(alpha)(leaf, labels)
    assert torch.equal(loss[[1, 4]], torch.zeros(2))
    assert torch.equal(loss[kept], make_loss(alpha)(cosines[kept], labels[kept]))
    loss.sum().backward()
    assert bool((leaf.grad[[1, 4]] == 0).all())
    mean = make_loss(alpha, reduction="mean")(cosines, labels)
    torch.testing.assert_close(mean, loss[kept].mean().detach())
    total = make_loss(alpha, reduction="sum")(cosines, labels)
    torch.testing.assert_close(total, loss.sum().detach())


@for_alphas
def test_inputs_are_left_as_they_were(alpha: float) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        cosines, labels = spread_cosines()
        cosines = cosines.to(dtype)
        reference = -torch.rand(5, 12).to(dtype)
        copies = cosines.clone(), labels.clone(), reference.clone()
        make_loss(alpha).with_stats(cosines, labels)
        qmargin.softargmax(cosines, alpha=alpha, log_reference=reference)
        qmargin.fenchel_young_loss(cosines, labels, alpha=alpha)
        qmargin.fenchel_young_loss(cosines, labels, alpha=alpha, log_reference=reference)
        qmargin.log_partition(cosines, alpha=alpha, log_reference=reference)
        qmargin.solve_tau(cosines, alpha=alpha, log_reference=reference)
        for now, before in zip((cosines, labels, reference), copies, strict=True):
            assert torch.equal(now, before), dtype


def test_the_mean_of_an_empty_batch_is_refused() -> None:
    with pytest.raises(errors.ShapeError, match="empty"):
        make_loss(reduction="mean")(torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64))
