"""What must hold for every row and margin, on generated inputs; M-numbers are the ledger's."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qmargin
from helpers.cases import random_cosines
from helpers.definition import AlphaGenerator, exact

properties = settings(max_examples=40, deadline=None, derandomize=True, database=None)
alphas = st.one_of(
    st.sampled_from([0.5, 1.0, 1 + 1e-6, 1.25, 1.5, 2.0, 3.0]),
    st.floats(0.3, 4.0, allow_nan=False),
)
sparse_alphas = st.sampled_from([1.1, 1.25, 1.5, 1.75, 2.0])
scales = st.sampled_from([0.1, 1.0, 5.0, 20.0, 64.0])
seeds = st.integers(0, 2**16)
close = torch.testing.assert_close


class Case(NamedTuple):
    """Three rows in float64: ``[3, k]`` and labels ``[3]``."""

    alpha: float
    scale: float
    seed: int
    logits: Tensor
    log_reference: Tensor
    labels: Tensor

    @property
    def options(self) -> dict:
        return {"alpha": self.alpha, "log_reference": self.log_reference}

    @property
    def tau(self) -> Tensor:
        return qmargin.solve_tau(self.logits, **self.options).tau

    @property
    def posterior(self) -> Tensor:
        return qmargin.softargmax(self.logits, **self.options)


def batch(alpha: float, num_classes: int, seed: int, scale: float, reference: float = 3.0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, num_classes, generator=generator, dtype=torch.float64)
    log_q = -reference * torch.rand(3, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (3,), generator=generator)
    return Case(alpha, scale, seed, logits, log_q, labels)


def cases(alphas=alphas, scales=scales, least: int = 1) -> st.SearchStrategy[Case]:
    return st.builds(batch, alphas, st.integers(least, 60), seeds, scales)


def solve(logits: Tensor, alpha: float) -> Tensor:
    return qmargin.solve_tau(logits, alpha=alpha).tau


def derivative(alpha: float, ratio: Tensor) -> Tensor:
    """``f'(u)`` of the alpha-divergence."""
    return ratio.log() if alpha == 1 else torch.expm1((alpha - 1) * ratio.log()) / (alpha - 1)


@properties
@given(
    alpha=st.one_of(st.sampled_from([0.9, 0.95, 1.05, 1.1]), alphas),
    scale=st.sampled_from([1e-3, 0.1, 1.0, 30.0, 1e3]),
    num_classes=st.integers(1, 8),
    seed=seeds,
)
def test_posterior_matches_the_definition_for_any_reference(alpha, scale, num_classes, seed):
    """M1, M2: every class may have a reference down to e^-200, also between alpha 0.9 and 1.1."""
    depth = min(200.0, 64.0 / max(abs(alpha - 1.0), 0.1))
    case = batch(alpha, num_classes, seed, scale, reference=depth)
    case.log_reference[:, seed % num_classes] = 0.0
    truth = exact(AlphaGenerator(alpha), case.logits[0], case.log_reference[0]).posterior
    close(case.posterior[0], torch.from_numpy(truth), rtol=0, atol=1e-12)


@properties
@given(case=cases(scales=st.sampled_from([0.1, 1.0, 5.0])))
def test_posterior_is_the_link_of_the_slack(case):
    """M1: ``p_j = q_j link(theta_j - tau)`` ties the three operators together."""
    link = qmargin.Alpha(case.alpha).link(case.logits - case.tau[:, None])
    close(case.posterior, case.log_reference.exp() * link, rtol=1e-6, atol=1e-6)


@properties
@given(case=cases(scales=st.just(1.0)), shift=st.floats(-100, 100))
def test_shifting_a_row_shifts_tau_and_nothing_else(case, shift):
    """M2: tau and the log-partition move with the logits; posterior and loss do not."""
    moved = case._replace(logits=case.logits + shift)
    near = {"rtol": 1e-9, "atol": 1e-10}
    close(moved.tau, case.tau + shift, **near)
    values = [qmargin.log_partition(one.logits, **case.options) for one in (moved, case)]
    close(values[0], values[1] + shift, **near)
    losses = [
        qmargin.fenchel_young_loss(one.logits, case.labels, **case.options) for one in (moved, case)
    ]
    close(*losses, **near)


@properties
@given(case=cases())
def test_loss_is_never_negative(case):
    """M6: a Fenchel-Young loss, for labels and distributions, in float32; zero at the posterior."""
    options = {"alpha": case.alpha, "log_reference": case.log_reference.float()}
    single = case.logits.float()
    assert bool((qmargin.fenchel_young_loss(single, case.labels, **options) >= 0).all())
    own = qmargin.softargmax(single, **options)
    for distribution in (own, torch.softmax(case.logits, -1).float()):
        # a rounded distribution misses the sum of one by rounding, and so does its loss miss zero
        tolerance = 2e-5 * max(1.0, float(case.logits.abs().max()))
        loss = qmargin.fenchel_young_loss(single, distribution, **options)
        assert bool((loss >= -tolerance).all())
    loss = qmargin.fenchel_young_loss(case.logits, case.posterior, **case.options)
    close(loss, torch.zeros_like(loss), rtol=0, atol=1e-9 * max(1.0, case.scale))


@properties
@given(case=cases())
def test_permuting_classes_permutes_the_gradient(case):
    """M7: classes have no order; a one-hot distribution is a label."""
    num_classes = case.logits.shape[1]
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(case.seed))

    def value_and_gradient(theta, log_q, target):
        theta = theta.clone().requires_grad_()
        loss = qmargin.fenchel_young_loss(theta, target, alpha=case.alpha, log_reference=log_q)
        return loss.detach(), torch.autograd.grad(loss.sum(), theta)[0]

    loss, gradient = value_and_gradient(case.logits, case.log_reference, case.labels)
    rows = case.logits[:, order], case.log_reference[:, order]
    permuted, new_gradient = value_and_gradient(*rows, torch.argsort(order)[case.labels])
    close(permuted, loss, rtol=1e-11, atol=1e-11)
    close(new_gradient, gradient[:, order], rtol=1e-9, atol=1e-10)
    one_hot = F.one_hot(case.labels, num_classes).double()
    by_distribution = qmargin.fenchel_young_loss(case.logits, one_hot, **case.options)
    close(by_distribution, loss, rtol=1e-9, atol=1e-10)


@properties
@given(case=cases())
def test_gradient_is_posterior_minus_target(case):
    """M7: ``d loss / d theta_j = p_j - [j = y]``, and its entries sum to zero."""
    logits = case.logits.clone().requires_grad_()
    loss = qmargin.fenchel_young_loss(logits, case.labels, **case.options)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    target = F.one_hot(case.labels, logits.shape[1])
    close(gradient, case.posterior - target, rtol=0, atol=1e-12)
    value = qmargin.log_partition(logits, **case.options)
    (of_partition,) = torch.autograd.grad(value.sum(), logits)
    close(of_partition, case.posterior, rtol=0, atol=1e-12)


@properties
@given(case=cases(sparse_alphas))
def test_classes_leave_at_the_edge(case):
    """M3: ``p_j > 0`` exactly when ``theta_j > tau + edge``, ``edge = -1 / (alpha - 1)``."""
    edge = qmargin.Alpha(case.alpha).edge
    assert edge == pytest.approx(-1 / (case.alpha - 1))
    slack = case.logits - case.tau[:, None]
    is_clear = (slack - edge).abs() > 1e-9 * max(1.0, case.scale)  # not a tie with the edge
    assert torch.equal((case.posterior > 0)[is_clear], (slack > edge)[is_clear])
    sizes = qmargin.solve_tau(case.logits, **case.options).support_size
    assert torch.equal(sizes, (case.posterior > 0).sum(-1))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_nothing_leaves_without_an_edge(alpha):
    """M3: for ``alpha <= 1`` every class keeps a positive posterior."""
    case = batch(alpha, 40, 0, 3.0)
    assert qmargin.Alpha(alpha).edge == -math.inf
    assert bool((case.posterior > 0).all())
    assert qmargin.solve_tau(case.logits, alpha=alpha).support_size.tolist() == [40, 40, 40]


@properties
@given(case=cases())
def test_tau_is_bracketed(case):
    """M4: ``max_j(theta_j - f'(1/q_j)) <= tau <= theta_max - f'(1 / sum q)``."""
    tau, reference = case.tau, case.log_reference.exp()
    low = (case.logits - derivative(case.alpha, 1 / reference)).amax(-1)
    high = case.logits.amax(-1) - derivative(case.alpha, 1 / reference.sum(-1))
    unit = 1e-12 * (1 + tau.abs() + low.abs() + high.abs())
    assert bool((tau >= low - unit).all()) and bool((tau <= high + unit).all())


@properties
@given(
    alpha=sparse_alphas,
    scale=st.sampled_from([5.0, 20.0, 35.0]),
    num_candidates=st.integers(1, 40),
    seed=seeds,
)
def test_certified_candidates_give_the_exact_tau(alpha, scale, num_candidates, seed):
    """M8: when the smallest kept logit is inactive, dropping the rest changed nothing."""
    logits = scale * 4 * random_cosines(3, 200, seed=seed).double()
    kept = logits.topk(num_candidates, dim=1).values  # [3, K]
    tau, tau_kept = solve(logits, alpha), solve(kept, alpha)
    is_exact = kept[:, -1] <= tau_kept + qmargin.Alpha(alpha).edge
    assert bool((tau_kept <= tau + 1e-9).all())
    close(tau_kept[is_exact], tau[is_exact], rtol=0.0, atol=1e-9)


@properties
@given(case=cases(least=30), num_kept=st.integers(1, 30))
def test_the_root_over_a_subset_never_exceeds_tau(case, num_kept):
    """M13: fewer classes never raise tau, so a subset screens out classes safely."""
    kept = slice(num_kept)
    part = case._replace(logits=case.logits[:, kept], log_reference=case.log_reference[:, kept]).tau
    unit = 1e-11 * (1 + case.tau.abs())
    assert bool((part <= case.tau + unit).all())
    screened_out = case.logits < (part - unit)[:, None] + qmargin.Alpha(case.alpha).edge
    assert bool((case.posterior[screened_out] == 0).all())


@properties
@given(alpha=sparse_alphas, seed=seeds, rounding=st.sampled_from([1e-3, 1e-2, 0.1]))
def test_rounded_logits_screen_with_twice_their_rounding(alpha, seed, rounding):
    """M13: with logits off by at most eps, classes below ``root - 2 eps + edge`` are inactive."""
    logits = batch(alpha, 60, seed, 5.0).logits
    rounded = (logits / (2 * rounding)).round() * (2 * rounding)  # off by at most `rounding`
    root = solve(rounded[:, ::2], alpha)
    screened_out = rounded < root[:, None] - 2 * rounding + qmargin.Alpha(alpha).edge
    assert bool((qmargin.softargmax(logits, alpha=alpha)[screened_out] == 0).all())


@properties
@given(case=cases(st.just(1.0)))
def test_alpha_to_one_is_cross_entropy(case):
    """The operators at alpha = 1 and their limit from both sides."""
    shifted = case.logits + case.log_reference
    near = {"rtol": 1e-11, "atol": 1e-11}
    close(case.posterior, torch.softmax(shifted, -1), **near)
    partition = qmargin.log_partition(case.logits, **case.options)
    close(partition, torch.logsumexp(shifted, -1), **near)
    expected = F.cross_entropy(shifted, case.labels, reduction="none")
    # the loss moves with alpha by at most (log ratios)^2 / 2 per unit
    spread = float(shifted.max() - shifted.min()) + math.log(shifted.shape[1])
    for step in (0.0, 1e-9, 1e-7, 1e-5, -1e-9, -1e-7, -1e-5):
        options = {**case.options, "alpha": 1.0 + step}
        loss = qmargin.fenchel_young_loss(case.logits, case.labels, **options)
        allowed = 1e-11 + 4 * (1 + spread) ** 2 * abs(step)
        close(loss, expected, rtol=0 if step else 1e-11, atol=allowed)


@properties
@given(case=cases())
def test_equal_references_are_a_change_of_units(case):
    """A constant ``log q = c`` gives the posterior of logits times ``e^(c (alpha - 1))``."""
    found = qmargin.softargmax(case.logits, alpha=case.alpha, log_reference=-1.5)
    factor = math.exp(-1.5 * (case.alpha - 1))
    close(found, qmargin.softargmax(case.logits * factor, alpha=case.alpha), rtol=1e-9, atol=1e-11)


@properties
@given(scale=st.sampled_from([1.0, 10.0, 35.0, 64.0]), margin=st.floats(0.0, 0.6), seed=seeds)
def test_prior_and_cosine_margins_are_one_loss_at_alpha_one(scale, margin, seed):
    """M10: CosFace both ways, and cross-entropy on shifted logits."""
    cosines = (random_cosines(4, 50, seed=seed) * 5).clamp(-1, 1)
    labels = torch.tensor([0, 7, 20, 49])
    losses, gradients = [], []
    for kind in (qmargin.PriorMargin(margin), qmargin.CosineMargin(margin)):
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.0), kind, scale=scale, reduction="none")
        leaf = cosines.clone().requires_grad_()
        losses.append(loss_fn(leaf, labels))
        gradients.append(torch.autograd.grad(losses[-1].sum(), leaf)[0])
    shifted = scale * (cosines.double() - margin * F.one_hot(labels, 50))
    expected = F.cross_entropy(shifted, labels, reduction="none").float()
    for loss in losses:
        close(loss.detach(), expected, rtol=1e-5, atol=2e-6)
    close(*gradients, rtol=1e-5, atol=2e-6 * scale)


@properties
@given(
    alpha=sparse_alphas,
    scale=st.sampled_from([5.0, 10.0, 35.0]),
    effective=st.floats(0.05, 1.0),
    seed=seeds,
)
def test_loss_is_zero_exactly_from_the_effective_margin_on(alpha, scale, effective, seed):
    """M12: zero loss if and only if the gap is ``exp(b s m) / (b s) = 1 / (b s) + m_eff``."""
    margin = qmargin.PriorMargin.from_effective(effective, alpha=alpha, scale=scale)
    b = alpha - 1
    gap = math.exp(b * scale * margin.margin) / (b * scale)
    assert gap == pytest.approx(1 / (b * scale) + effective)
    cosines = -0.5 - 0.1 * random_cosines(2, 30, seed=seed).double().abs()
    cosines[:, 1] = -0.5
    cosines[:, 0] = -0.5 + gap * torch.tensor([1 - 1e-3, 1 + 1e-9], dtype=torch.float64)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale, reduction="none")
    loss = loss_fn(cosines, torch.zeros(2, dtype=torch.int64))
    assert float(loss[0]) > 0.0 and float(loss[1]) == 0.0


@properties
@given(case=cases(least=2))
def test_lowering_the_target_raises_the_loss(case):
    """M9: a larger prior margin never makes the loss smaller."""
    cosines, previous = torch.tanh(case.logits), torch.zeros(3, dtype=torch.float64)
    for margin in map(qmargin.PriorMargin, (0.0, 0.05, 0.1, 0.2)):
        with warnings.catch_warnings():  # whether it can be reached is not the question here
            warnings.simplefilter("ignore", qmargin.MarginWarning)
            loss_fn = qmargin.MarginLoss(
                qmargin.Alpha(case.alpha), margin, scale=case.scale, reduction="none"
            )
        loss = loss_fn(cosines, case.labels)
        assert bool((loss >= previous - 1e-10 * (1 + previous)).all())
        previous = loss
