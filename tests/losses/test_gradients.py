"""First and second derivatives: numerically, against formulas, and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import qmargin
from helpers.definition import AlphaGenerator, exact

ALPHAS = (0.7, 1.0, 1.25, 1.5, 2.0, 3.0)
NUM_ROWS, NUM_CLASSES = 3, 5
REFERENCE_SHAPES = ((), (NUM_CLASSES,), (NUM_ROWS, 1), (NUM_ROWS, NUM_CLASSES))

for_alphas = pytest.mark.parametrize("alpha", ALPHAS)
for_shapes = pytest.mark.parametrize("shape", REFERENCE_SHAPES, ids=lambda shape: f"q{list(shape)}")


def smooth_rows(alpha: float, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, log reference and labels with no class near the edge, where nothing is smooth."""
    edge = qmargin.Alpha(alpha).edge
    distance = 0.1 if alpha <= 2 else 0.02  # above 2 even active classes sit close to the edge
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(NUM_ROWS, NUM_CLASSES, generator=generator, dtype=torch.float64)
        log_reference = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        labels = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
        tau = qmargin.solve_tau(logits, alpha=alpha, log_reference=log_reference).tau
        if bool(((logits - tau[:, None] - edge).abs() > distance).all()):
            return logits.requires_grad_(), log_reference.requires_grad_(), labels
    raise AssertionError("no smooth rows found")


def learnable(alpha: float) -> Tensor:
    return torch.tensor(alpha, dtype=torch.float64, requires_grad=True)


def distribution() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    weights = torch.rand(NUM_ROWS, NUM_CLASSES, generator=generator, dtype=torch.float64)
    weights[0, 2] = 0.0
    return weights / weights.sum(-1, keepdim=True)


OPERATORS = {
    "softargmax": lambda x, q, a, y: qmargin.softargmax(x, alpha=a, log_reference=q),
    "log_partition": lambda x, q, a, y: qmargin.log_partition(x, alpha=a, log_reference=q),
    "labels": lambda x, q, a, y: qmargin.fenchel_young_loss(x, y, alpha=a, log_reference=q),
    "distributions": lambda x, q, a, y: qmargin.fenchel_young_loss(
        x, distribution(), alpha=a, log_reference=q
    ),
}
for_operators = pytest.mark.parametrize("operator", OPERATORS)


@for_operators
@for_shapes
@for_alphas
def test_first_derivatives(operator: str, shape: tuple[int, ...], alpha: float) -> None:
    """M7 and its companions: logits, every shape of reference, and alpha, 1 included."""
    logits, log_reference, labels = smooth_rows(alpha, shape)

    def function(x: Tensor, q: Tensor, a: Tensor) -> Tensor:
        return OPERATORS[operator](x, q, a, labels)

    assert gradcheck(function, (logits, log_reference, learnable(alpha)))


@for_operators
@pytest.mark.parametrize("shape", [(NUM_CLASSES,), (NUM_ROWS, NUM_CLASSES)], ids=["q[k]", "q[Bk]"])
@for_alphas
def test_second_derivatives(operator: str, shape: tuple[int, ...], alpha: float) -> None:
    """Double backward with respect to everything at once."""
    logits, log_reference, labels = smooth_rows(alpha, shape)

    def function(x: Tensor, q: Tensor, a: Tensor) -> Tensor:
        return OPERATORS[operator](x, q, a, labels)

    assert gradgradcheck(function, (logits, log_reference, learnable(alpha)))


@for_operators
@for_alphas
def test_a_fixed_alpha_has_the_same_gradients(operator: str, alpha: float) -> None:
    logits, log_reference, labels = smooth_rows(alpha, (NUM_CLASSES,))
    weights = torch.linspace(0.5, 2.0, NUM_ROWS, dtype=torch.float64)
    gradients = []
    for order in (alpha, learnable(alpha)):
        value = OPERATORS[operator](logits, log_reference, order, labels)
        value = value.reshape(NUM_ROWS, -1)[:, 0]
        gradients.append(torch.autograd.grad((weights * value).sum(), (logits, log_reference)))
    for fixed, learned in zip(*gradients, strict=True):
        torch.testing.assert_close(fixed, learned, rtol=0, atol=1e-14)


@for_alphas
def test_hessian_is_a_weighted_covariance(alpha: float) -> None:
    """``diag(w) - w w^T / sum w`` with ``w = q (p / q)^(2 - alpha)`` on the support."""
    logits, log_reference, _ = smooth_rows(alpha, (NUM_CLASSES,))
    row, reference = logits[0].detach(), log_reference.detach()
    hessian = torch.autograd.functional.hessian(
        lambda x: qmargin.log_partition(x, alpha=alpha, log_reference=reference), row
    )
    solution = exact(AlphaGenerator(alpha), row, reference)
    posterior, q = solution.posterior, np.exp(reference.numpy())
    active = posterior > 0
    weights = np.zeros(NUM_CLASSES)
    weights[active] = q[active] * (posterior[active] / q[active]) ** (2 - alpha)
    expected = np.diag(weights) - np.outer(weights, weights) / weights.sum()
    np.testing.assert_allclose(hessian.numpy(), expected, atol=1e-10)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: qmargin.softargmax(x, alpha=alpha, log_reference=reference), row
    )
    np.testing.assert_allclose(jacobian.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1 + 2.0**-30, 1.25, 1.5, 2.0, 3.0])
def test_derivative_in_alpha_against_the_definition(alpha: float) -> None:
    """The slope of the 80-digit loss in alpha, also through one, is what backward returns."""
    logits, log_reference, labels = smooth_rows(alpha, (NUM_CLASSES,))
    order = learnable(alpha)
    loss = qmargin.fenchel_young_loss(logits, labels, alpha=order, log_reference=log_reference)
    step = 2.0**-24
    for row in range(NUM_ROWS):
        label = int(labels[row])
        ends = [
            exact(AlphaGenerator(alpha + sign * step), logits[row], log_reference).loss(label)
            for sign in (1, -1)
        ]
        expected = float((ends[0] - ends[1]) / (2 * step))
        (gradient,) = torch.autograd.grad(loss[row], order, retain_graph=True)
        assert float(gradient) == pytest.approx(expected, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("alpha", [1.01, 1.25, 1.5, 2.0])
def test_gradient_of_a_nearly_satisfied_row_keeps_its_digits(alpha: float) -> None:
    """M7: ``1 - p_y`` is a sum over the others, so float32 does not round it away."""
    b = alpha - 1
    log_q = -2.0
    logits = torch.full((1, 20), -3.0)
    logits[0, 1] = 0.0
    logits[0, 0] = np.exp(-b * log_q) / b - (0.3 if alpha < 1.1 else 0.02)
    log_reference = torch.zeros(20)
    log_reference[0] = log_q
    truth = exact(AlphaGenerator(alpha), logits[0], log_reference)
    others = float(sum(p for p, t in zip(truth.posteriors, truth.thetas, strict=True) if t <= 0))
    logits.requires_grad_()
    label = torch.tensor([0])
    loss = qmargin.fenchel_young_loss(logits, label, alpha=alpha, log_reference=log_reference)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert float(gradient[0, 0]) == pytest.approx(-others, rel=1e-4, abs=1e-30)
    assert float(gradient[0, 1:].sum()) == pytest.approx(others, rel=1e-4, abs=1e-30)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 2.0, 3.0])
def test_float32_gradients_are_the_posterior_of_the_definition(alpha: float) -> None:
    """M7 in float32, far from one class and with large logits."""
    generator = torch.Generator().manual_seed(4)
    logits = (30 * torch.randn(6, 300, generator=generator)).requires_grad_()
    labels = torch.arange(6)
    loss = qmargin.fenchel_young_loss(logits, labels, alpha=alpha)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    for row in range(6):
        expected = exact(AlphaGenerator(alpha), logits[row]).posterior.copy()
        expected[row] -= 1.0
        np.testing.assert_allclose(gradient[row].numpy(), expected, rtol=0, atol=1e-6)


MARGINS = {
    "none": lambda: qmargin.PriorMargin(0.0),
    "prior": lambda: qmargin.PriorMargin(0.2),
    "cosine": lambda: qmargin.CosineMargin(0.2),
    "angular": lambda: qmargin.AngularMargin(0.3),
    "prior + angular": lambda: qmargin.PriorMargin(0.1) + qmargin.AngularMargin(0.2),
    "prior + cosine": lambda: qmargin.PriorMargin(0.1) + qmargin.CosineMargin(0.2),
    "combined": lambda: qmargin.CombinedMargin(multiplier=1.1, angular=0.1, cosine=0.05),
    "adaface": lambda: qmargin.AdaFaceMargin().eval(),
    "magface": lambda: qmargin.MagFaceMargin(),
    "elastic": lambda: qmargin.ElasticMargin().eval(),
}
DIVERGENCES = [qmargin.Alpha(a) for a in (0.7, 1.0, 1.25, 2.0)] + [qmargin.JensenShannon()]


def cosine_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    cosines = 1.6 * torch.rand(3, 6, generator=generator, dtype=torch.float64) - 0.8
    norms = 10 + 20 * torch.rand(3, generator=generator, dtype=torch.float64)
    return cosines.requires_grad_(), torch.tensor([0, 3, 5]), norms.requires_grad_()


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("margin", MARGINS)
def test_every_divergence_times_every_margin(divergence: qmargin.Divergence, margin: str) -> None:
    """M9: first and second derivatives of the loss with respect to the cosines."""
    cosines, labels, norms = cosine_rows()
    loss_fn = qmargin.MarginLoss(divergence, MARGINS[margin](), scale=4.0, reduction="none")
    assert gradcheck(lambda c: loss_fn(c, labels, norms.detach()), (cosines,))
    assert gradgradcheck(lambda c: loss_fn(c, labels, norms.detach()), (cosines,))


def test_magface_norms_get_gradients() -> None:
    cosines, labels, norms = cosine_rows()
    loss_fn = qmargin.MarginLoss(
        qmargin.Alpha(1.25), qmargin.MagFaceMargin(), scale=4.0, reduction="none"
    )
    assert gradcheck(lambda c, n: loss_fn(c, labels, n), (cosines, norms))


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.25, 2.0])
def test_learnable_margins_get_gradients(alpha: float) -> None:
    """M9: one margin for all, one per row and one per class; ``d/dm`` of a prior margin."""
    cosines, labels, _ = cosine_rows()

    def loss_of(margin: object) -> Tensor:
        kind = qmargin.PriorMargin(margin)
        return qmargin.MarginLoss(qmargin.Alpha(alpha), kind, scale=4.0, reduction="none")(
            cosines, labels
        )

    for shape in ((), (3,)):
        margin = torch.full(shape, 0.15, dtype=torch.float64, requires_grad=True)
        assert gradcheck(loss_of, (margin,))
    per_class = torch.linspace(0.05, 0.3, 6, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda m: loss_of(qmargin.PerClass(m)), (per_class,))


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
def test_learnable_alpha_of_a_module(alpha: float) -> None:
    """A parameter inside the divergence is a parameter of the loss, and is differentiated."""
    cosines, labels, _ = cosine_rows()
    order = nn.Parameter(torch.tensor(alpha, dtype=torch.float64))
    loss_fn = qmargin.MarginLoss(
        qmargin.Alpha(order), qmargin.PriorMargin(0.2), scale=4.0, reduction="none"
    )
    assert [id(p) for p in loss_fn.parameters()] == [id(order)]

    def function(c: Tensor, a: Tensor) -> Tensor:
        module = qmargin.MarginLoss(
            qmargin.Alpha(a), qmargin.PriorMargin(0.2), scale=4.0, reduction="none"
        )
        return module(c, labels)

    assert gradcheck(function, (cosines, learnable(alpha)))
    assert gradgradcheck(function, (cosines, learnable(alpha)))


@pytest.mark.parametrize(("start", "goal"), [(1.1, 1.6), (1.8, 1.0), (0.8, 1.3)])
def test_learnable_alpha_finds_the_order_that_made_the_data(start: float, goal: float) -> None:
    """Descent on alpha recovers it, through ``alpha = 1`` where the way leads through it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, 20, generator=generator, dtype=torch.float64)
    target = qmargin.softargmax(logits, alpha=goal)
    order = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = torch.optim.Adam([order], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        (qmargin.softargmax(logits, alpha=order) - target).square().sum().backward()
        optimizer.step()
    assert float(order.detach()) == pytest.approx(goal, abs=1e-2)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 2.0])
def test_jensen_shannon_and_alpha_share_the_generic_contract(alpha: float) -> None:
    """Gradients through ``divergence=`` equal those through ``alpha=``."""
    logits, log_reference, labels = smooth_rows(alpha, (NUM_CLASSES,))
    by_object = qmargin.fenchel_young_loss(
        logits, labels, divergence=qmargin.Alpha(alpha), log_reference=log_reference
    )
    by_number = qmargin.fenchel_young_loss(logits, labels, alpha=alpha, log_reference=log_reference)
    torch.testing.assert_close(by_object, by_number, rtol=0, atol=0)
