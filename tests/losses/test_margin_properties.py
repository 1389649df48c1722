"""What must hold for every margin loss, on generated inputs."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import qmargin
from helpers.cases import random_cosines

properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)
alphas = st.one_of(
    st.sampled_from([0.5, 1.0, 1 + 1e-6, 1.25, 1.5, 2.0, 3.0]),
    st.floats(0.3, 4.0, allow_nan=False),
)
sparse_alphas = st.sampled_from([1.1, 1.25, 1.5, 1.75, 2.0])
scales = st.sampled_from([0.1, 1.0, 5.0, 20.0, 64.0])
seeds = st.integers(0, 2**16)


@properties
@given(scale=st.sampled_from([1.0, 10.0, 35.0, 64.0]), margin=st.floats(0.0, 0.6), seed=seeds)
def test_prior_and_cosine_margins_are_one_loss_at_alpha_one(
    scale: float, margin: float, seed: int
) -> None:
    """M10: CosFace both ways, and cross-entropy on shifted logits."""
    cosines = random_cosines(4, 50, seed=seed) * 5
    cosines = cosines.clamp(-1, 1)
    labels = torch.tensor([0, 7, 20, 49])
    losses, gradients = [], []
    for kind in (qmargin.PriorMargin(margin), qmargin.CosineMargin(margin)):
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.0), kind, scale=scale, reduction="none")
        leaf = cosines.clone().requires_grad_()
        losses.append(loss_fn(leaf, labels))
        gradients.append(torch.autograd.grad(losses[-1].sum(), leaf)[0])
    shifted = scale * (cosines.double() - margin * F.one_hot(labels, 50))
    expected = F.cross_entropy(shifted, labels, reduction="none").float()
    close = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(losses[0], losses[1], **close)
    torch.testing.assert_close(losses[0].detach(), expected, **close)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=2e-6 * scale)


@properties
@given(
    alpha=sparse_alphas,
    scale=st.sampled_from([5.0, 10.0, 35.0]),
    effective=st.floats(0.05, 1.0),
    seed=seeds,
)
def test_loss_is_zero_exactly_from_the_effective_margin_on(
    alpha: float, scale: float, effective: float, seed: int
) -> None:
    """M12: zero loss if and only if the gap is ``exp(b s m) / (b s) = 1 / (b s) + m_eff``."""
    margin = qmargin.PriorMargin.from_effective(effective, alpha=alpha, scale=scale)
    b = alpha - 1
    assert margin.effective(alpha, scale) == pytest.approx(effective, rel=1e-9)
    assert math.expm1(b * scale * margin.margin) / (b * scale) == pytest.approx(effective)
    gap = math.exp(b * scale * margin.margin) / (b * scale)
    assert gap == pytest.approx(1 / (b * scale) + effective)
    cosines = -0.5 - 0.1 * random_cosines(2, 30, seed=seed).double().abs()
    cosines[:, 1] = -0.5
    cosines[:, 0] = -0.5 + gap * torch.tensor([1 - 1e-3, 1 + 1e-9], dtype=torch.float64)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale, reduction="none")
    loss = loss_fn(cosines, torch.zeros(2, dtype=torch.int64))
    assert float(loss[0]) > 0.0
    assert float(loss[1]) == 0.0


@properties
@given(alpha=sparse_alphas, effective=st.floats(0.05, 1.9))
def test_effective_margin_tends_to_the_margin(alpha: float, effective: float) -> None:
    """M12: at alpha = 1 the effective margin of a prior is the margin itself."""
    assert qmargin.PriorMargin(0.3).effective(1.0, 32.0) == pytest.approx(0.3)
    assert qmargin.CosineMargin(effective).effective(alpha, 32.0) == pytest.approx(effective)
    near = qmargin.PriorMargin(0.3).effective(1 + 1e-9, 32.0)
    assert near == pytest.approx(0.3, rel=1e-6)


@properties
@given(alpha=alphas, scale=scales, num_classes=st.integers(2, 60), seed=seeds)
def test_lowering_the_target_raises_the_loss(
    alpha: float, scale: float, num_classes: int, seed: int
) -> None:
    """M9: a larger prior margin never makes the loss smaller."""
    generator = torch.Generator().manual_seed(seed)
    cosines = torch.rand(3, num_classes, generator=generator, dtype=torch.float64) * 2 - 1
    labels = torch.randint(num_classes, (3,), generator=generator)
    previous = torch.zeros(3, dtype=torch.float64)
    for margin in (0.0, 0.05, 0.1, 0.2):
        with warnings.catch_warnings():  # whether it can be reached is not the question here
            warnings.simplefilter("ignore", qmargin.MarginWarning)
            loss_fn = qmargin.MarginLoss(
                qmargin.Alpha(alpha), qmargin.PriorMargin(margin), scale=scale, reduction="none"
            )
        loss = loss_fn(cosines, labels)
        assert bool((loss >= previous - 1e-10 * (1 + previous)).all())
        previous = loss
