"""What must hold for every row and margin, on generated inputs; M-numbers are the ledger's."""

from __future__ import annotations

import math
import warnings

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
sizes = st.integers(1, 60)


def batch(
    num_classes: int, seed: int, scale: float = 1.0, rows: int = 3, reference: float = 3.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[B, k]``, log reference ``[B, k]`` in ``[-reference, 0]`` and labels, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, num_classes, generator=generator, dtype=torch.float64)
    log_reference = -reference * torch.rand(
        rows, num_classes, generator=generator, dtype=torch.float64
    )
    return logits, log_reference, torch.randint(num_classes, (rows,), generator=generator)


def derivative(alpha: float, ratio: Tensor) -> Tensor:
    """``f'(u)`` of the alpha-divergence."""
    return ratio.log() if alpha == 1 else torch.expm1((alpha - 1) * ratio.log()) / (alpha - 1)


def solve(logits: Tensor, alpha: float, log_reference: Tensor | None = None) -> Tensor:
    return qmargin.solve_tau(logits, alpha=alpha, log_reference=log_reference).tau


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
    logits, log_reference, _ = batch(num_classes, seed, scale, rows=1, reference=depth)
    log_reference[:, seed % num_classes] = 0.0
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=log_reference)
    truth = exact(AlphaGenerator(alpha), logits[0], log_reference[0]).posterior
    torch.testing.assert_close(posterior[0], torch.from_numpy(truth), rtol=0, atol=1e-12)


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_posterior_is_the_link_of_the_slack(alpha, scale, num_classes, seed):
    """M1: ``p_j = q_j link(theta_j - tau)`` ties the three operators together."""
    logits, log_reference, _ = batch(num_classes, seed, min(scale, 5.0))
    solution = qmargin.solve_tau(logits, alpha=alpha, log_reference=log_reference)
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=log_reference)
    linked = log_reference.exp() * qmargin.Alpha(alpha).link(logits - solution.tau[:, None])
    torch.testing.assert_close(posterior, linked, rtol=1e-6, atol=1e-6)


@properties
@given(alpha=alphas, num_classes=sizes, seed=seeds, shift=st.floats(-100, 100))
def test_shifting_a_row_shifts_tau_and_nothing_else(alpha, num_classes, seed, shift):
    """M2: tau and the log-partition move with the logits; posterior and loss do not."""
    logits, log_reference, labels = batch(num_classes, seed)
    moved = logits + shift
    common = {"alpha": alpha, "log_reference": log_reference}
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(solve(moved, **common), solve(logits, **common) + shift, **close)
    torch.testing.assert_close(
        qmargin.log_partition(moved, **common),
        qmargin.log_partition(logits, **common) + shift,
        **close,
    )
    torch.testing.assert_close(
        qmargin.fenchel_young_loss(moved, labels, **common),
        qmargin.fenchel_young_loss(logits, labels, **common),
        **close,
    )


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_loss_is_never_negative(alpha, scale, num_classes, seed):
    """M6: a Fenchel-Young loss, for labels and for distributions, in float32."""
    logits, log_reference, labels = batch(num_classes, seed, scale)
    common = {"alpha": alpha, "log_reference": log_reference.float()}
    single = logits.float()
    assert bool((qmargin.fenchel_young_loss(single, labels, **common) >= 0).all())
    own = qmargin.softargmax(single, **common)
    for distribution in (own, torch.softmax(logits, -1).float()):
        # a rounded distribution misses the sum of one by rounding, and so does its loss miss zero
        tolerance = 2e-5 * max(1.0, float(logits.abs().max()))
        loss = qmargin.fenchel_young_loss(single, distribution, **common)
        assert bool((loss >= -tolerance).all())


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_loss_of_the_posterior_itself_is_zero(alpha, scale, num_classes, seed):
    """M6: the loss vanishes exactly at the row's own posterior."""
    logits, log_reference, _ = batch(num_classes, seed, scale)
    common = {"alpha": alpha, "log_reference": log_reference}
    posterior = qmargin.softargmax(logits, **common)
    loss = qmargin.fenchel_young_loss(logits, posterior, **common)
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-9 * max(1.0, scale))


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_permuting_classes_permutes_the_gradient(alpha, scale, num_classes, seed):
    """M7: classes have no order."""
    logits, log_reference, labels = batch(num_classes, seed, scale)
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(seed))
    new_labels = torch.argsort(order)[labels]

    def value_and_gradient(theta: Tensor, log_q: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        theta = theta.clone().requires_grad_()
        loss = qmargin.fenchel_young_loss(theta, target, alpha=alpha, log_reference=log_q)
        return loss.detach(), torch.autograd.grad(loss.sum(), theta)[0]

    loss, gradient = value_and_gradient(logits, log_reference, labels)
    permuted, new_gradient = value_and_gradient(
        logits[:, order], log_reference[:, order], new_labels
    )
    torch.testing.assert_close(permuted, loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(new_gradient, gradient[:, order], rtol=1e-9, atol=1e-10)


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_gradient_is_posterior_minus_target(alpha, scale, num_classes, seed):
    """M7: ``d loss / d theta_j = p_j - [j = y]``, and its entries sum to zero."""
    logits, log_reference, labels = batch(num_classes, seed, scale)
    common = {"alpha": alpha, "log_reference": log_reference}
    posterior = qmargin.softargmax(logits, **common)
    logits.requires_grad_()
    loss = qmargin.fenchel_young_loss(logits, labels, **common)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(
        gradient, posterior - F.one_hot(labels, num_classes), rtol=0, atol=1e-12
    )
    (of_partition,) = torch.autograd.grad(qmargin.log_partition(logits, **common).sum(), logits)
    torch.testing.assert_close(of_partition, posterior, rtol=0, atol=1e-12)


@properties
@given(alpha=sparse_alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_classes_leave_at_the_edge(alpha, scale, num_classes, seed):
    """M3: ``p_j > 0`` exactly when ``theta_j > tau + edge``, ``edge = -1 / (alpha - 1)``."""
    divergence = qmargin.Alpha(alpha)
    assert divergence.edge == pytest.approx(-1 / (alpha - 1))
    logits, log_reference, _ = batch(num_classes, seed, scale)
    solution = qmargin.solve_tau(logits, alpha=alpha, log_reference=log_reference)
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=log_reference)
    slack = logits - solution.tau[:, None]
    is_clear = (slack - divergence.edge).abs() > 1e-9 * max(1.0, scale)  # not a tie with the edge
    assert torch.equal((posterior > 0)[is_clear], (slack > divergence.edge)[is_clear])
    assert torch.equal(solution.support_size, (posterior > 0).sum(-1))


def test_nothing_leaves_without_an_edge():
    """M3: for ``alpha <= 1`` every class keeps a positive posterior."""
    logits, log_reference, _ = batch(40, 0, 3.0)
    for alpha in (0.5, 1.0):
        assert qmargin.Alpha(alpha).edge == -math.inf
        posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=log_reference)
        assert bool((posterior > 0).all())
        sizes_found = qmargin.solve_tau(logits, alpha=alpha).support_size
        assert sizes_found.tolist() == [40, 40, 40]


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_tau_is_bracketed(alpha, scale, num_classes, seed):
    """M4: ``max_j(theta_j - f'(1/q_j)) <= tau <= theta_max - f'(1 / sum q)``."""
    logits, log_reference, _ = batch(num_classes, seed, scale)
    tau = solve(logits, alpha, log_reference)
    reference = log_reference.exp()
    low = (logits - derivative(alpha, 1 / reference)).amax(-1)
    high = logits.amax(-1) - derivative(alpha, 1 / reference.sum(-1))
    unit = 1e-12 * (1 + tau.abs() + low.abs() + high.abs())
    assert bool((tau >= low - unit).all())
    assert bool((tau <= high + unit).all())


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
    torch.testing.assert_close(tau_kept[is_exact], tau[is_exact], rtol=0.0, atol=1e-9)


@properties
@given(alpha=alphas, scale=scales, num_kept=st.integers(1, 30), seed=seeds)
def test_the_root_over_a_subset_never_exceeds_tau(alpha, scale, num_kept, seed):
    """M13: fewer classes never raise tau, so a subset screens out classes safely."""
    logits, log_reference, _ = batch(30, seed, scale)
    tau = solve(logits, alpha, log_reference)
    part = solve(logits[:, :num_kept], alpha, log_reference[:, :num_kept])
    unit = 1e-11 * (1 + tau.abs())
    assert bool((part <= tau + unit).all())
    edge = qmargin.Alpha(alpha).edge
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=log_reference)
    screened_out = logits < (part - unit)[:, None] + edge
    assert bool((posterior[screened_out] == 0).all())


@properties
@given(alpha=sparse_alphas, seed=seeds, rounding=st.sampled_from([1e-3, 1e-2, 0.1]))
def test_rounded_logits_screen_with_twice_their_rounding(alpha, seed, rounding):
    """M13: with logits off by at most eps, classes below ``root - 2 eps + edge`` are inactive."""
    logits, _, _ = batch(60, seed, 5.0)
    rounded = (logits / (2 * rounding)).round() * (2 * rounding)  # off by at most `rounding`
    root = solve(rounded[:, ::2], alpha)
    screened_out = rounded < root[:, None] - 2 * rounding + qmargin.Alpha(alpha).edge
    posterior = qmargin.softargmax(logits, alpha=alpha)
    assert bool((posterior[screened_out] == 0).all())


@properties
@given(scale=scales, num_classes=sizes, seed=seeds)
def test_alpha_to_one_is_cross_entropy(scale, num_classes, seed):
    """The operators at alpha = 1 and their limit from both sides."""
    logits, log_reference, labels = batch(num_classes, seed, scale)
    shifted = logits + log_reference
    common = {"alpha": 1.0, "log_reference": log_reference}
    close = {"rtol": 1e-11, "atol": 1e-11}
    softmax = torch.softmax(shifted, -1)
    torch.testing.assert_close(qmargin.softargmax(logits, **common), softmax, **close)
    torch.testing.assert_close(
        qmargin.log_partition(logits, **common), torch.logsumexp(shifted, -1), **close
    )
    expected = F.cross_entropy(shifted, labels, reduction="none")
    torch.testing.assert_close(
        qmargin.fenchel_young_loss(logits, labels, **common), expected, **close
    )
    for step in (1e-9, 1e-7, 1e-5):
        # the loss moves with alpha by at most (log ratios)^2 / 2 per unit
        size = 4 * (1 + float(shifted.max() - shifted.min()) + math.log(num_classes)) ** 2
        for alpha in (1 - step, 1 + step):
            near = qmargin.fenchel_young_loss(
                logits, labels, alpha=alpha, log_reference=log_reference
            )
            torch.testing.assert_close(near, expected, rtol=0, atol=1e-11 + size * step)


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_equal_references_are_a_change_of_units(alpha, scale, num_classes, seed):
    """A constant ``log q = c`` gives the posterior of logits times ``e^(c (alpha - 1))``."""
    logits, _, _ = batch(num_classes, seed, scale)
    constant = -1.5
    factor = math.exp(constant * (alpha - 1))
    torch.testing.assert_close(
        qmargin.softargmax(logits, alpha=alpha, log_reference=constant),
        qmargin.softargmax(logits * factor, alpha=alpha),
        rtol=1e-9,
        atol=1e-11,
    )


@properties
@given(scale=st.sampled_from([1.0, 10.0, 35.0, 64.0]), margin=st.floats(0.0, 0.6), seed=seeds)
def test_prior_and_cosine_margins_are_one_loss_at_alpha_one(scale, margin, seed):
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
def test_loss_is_zero_exactly_from_the_effective_margin_on(alpha, scale, effective, seed):
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
@given(alpha=alphas, scale=scales, num_classes=st.integers(2, 60), seed=seeds)
def test_lowering_the_target_raises_the_loss(alpha, scale, num_classes, seed):
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


@properties
@given(alpha=alphas, scale=scales, num_classes=sizes, seed=seeds)
def test_one_hot_distributions_give_the_loss_of_labels(alpha, scale, num_classes, seed):
    logits, log_reference, labels = batch(num_classes, seed, scale)
    common = {"alpha": alpha, "log_reference": log_reference}
    one_hot = F.one_hot(labels, num_classes).double()
    torch.testing.assert_close(
        qmargin.fenchel_young_loss(logits, one_hot, **common),
        qmargin.fenchel_young_loss(logits, labels, **common),
        rtol=1e-9,
        atol=1e-10,
    )
