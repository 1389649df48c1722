"""Target distributions, and masked classes that are targets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import qmargin
from helpers.cases import spread_cosines
from qmargin import errors

DIVERGENCES = [*map(qmargin.Alpha, (0.5, 1.0, 1.25, 2.0, 3.0)), qmargin.JensenShannon()]
for_divergences = pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)


def logits_and_target() -> tuple[Tensor, Tensor]:
    cosines, _ = spread_cosines()
    generator = torch.Generator().manual_seed(0)
    return 5 * cosines, torch.rand(5, 12, generator=generator).softmax(-1)


@for_divergences
@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("kind", ["negative", "heavy", "light", "infinite", "zero"])
def test_an_impossible_distribution_is_refused(
    divergence: qmargin.Divergence, debug: bool, kind: str
) -> None:
    logits, target = logits_and_target()
    if kind == "negative":
        target[3, 0] -= 1.0
        target[3, 1] += 1.0
    else:
        target[3] *= {"heavy": 1.01, "light": 0.99, "infinite": math.inf, "zero": 0.0}[kind]
    with pytest.raises(errors.DataError, match=r"row 3 .*sum"):
        qmargin.fenchel_young_loss(logits, target, divergence=divergence, debug=debug)


@for_divergences
def test_a_nan_in_a_distribution_breaks_its_row_alone(divergence: qmargin.Divergence) -> None:
    logits, target = logits_and_target()
    expected = qmargin.fenchel_young_loss(logits, target, divergence=divergence)
    target[3, 2] = math.nan
    loss = qmargin.fenchel_young_loss(logits, target, divergence=divergence)
    assert bool(loss[3].isnan())
    others = [0, 1, 2, 4]
    assert torch.equal(loss[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_distribution_in_half_precision_may_be_rounded(dtype: torch.dtype) -> None:
    target = torch.full((1, 1000), 1e-3).to(dtype)
    assert bool(qmargin.fenchel_young_loss(torch.zeros(1, 1000), target, alpha=1.5).isfinite())


def test_distributions_are_checked_under_vmap() -> None:
    logits, target = logits_and_target()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return qmargin.fenchel_young_loss(x, y, alpha=1.25)

    expected = loss(logits, target)
    torch.testing.assert_close(vmap(loss)(logits, target), expected)
    torch.testing.assert_close(vmap(loss, in_dims=(0, 1))(logits, target.T), expected)
    with pytest.raises(errors.DataError):
        vmap(loss)(logits, 2 * target)


@for_divergences
@pytest.mark.parametrize("twice", [False, True])
def test_a_masked_target_passes_no_gradient(divergence: qmargin.Divergence, twice: bool) -> None:
    """``-inf`` means no gradient, also for a class that the target gives mass to."""
    logits, target = logits_and_target()
    labels = torch.tensor([2, 2, 0, 1, 2])
    logits[:, 2] = -math.inf
    for goal in (target, labels):
        leaf = logits.clone().requires_grad_()
        loss = qmargin.fenchel_young_loss(leaf, goal, divergence=divergence)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf, create_graph=twice)
        assert bool((gradient[:, 2] == 0).all())
    loss_fn = qmargin.MarginLoss(divergence, qmargin.CosineMargin(0.1), scale=5.0, reduction="none")
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_fn(leaf, labels).sum(), leaf, create_graph=twice)
    assert bool((gradient[:, 2] == 0).all())


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 3.0])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_all_other_classes_masked(alpha: float, scale: float) -> None:
    """One class left and it is the target: no loss and no gradient, not 0 times infinity."""
    cosines = torch.tensor([[-1.0, -math.inf, -math.inf]], requires_grad=True)
    loss_fn = qmargin.MarginLoss(
        qmargin.Alpha(alpha), qmargin.CosineMargin(0.5), scale=scale, reduction="none"
    )
    loss = loss_fn(cosines, torch.tensor([0]))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(cosines.grad, torch.zeros(1, 3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_classes", [12, 64, 500])
@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_an_infinite_reference_breaks_its_row_at_any_size(alpha: float, num_classes: int) -> None:
    logits = 10 * torch.randn(3, num_classes)
    reference = torch.zeros(3, num_classes)
    reference[1, int(logits[1].argmin())] = math.inf
    options = {"alpha": alpha, "log_reference": reference}
    for value in (
        qmargin.softargmax(logits, **options).sum(1),
        qmargin.log_partition(logits, **options),
        qmargin.fenchel_young_loss(logits, torch.tensor([0, 0, 0]), **options),
        qmargin.solve_tau(logits, **options).tau,
    ):
        assert value.isnan().tolist() == [False, True, False]
