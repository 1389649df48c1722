"""First and second derivatives: numerically, against formulas, and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import qmargin
from helpers.cases import cosine_batch
from helpers.definition import AlphaGenerator, exact

ALPHAS = (0.7, 1.0, 1.25, 2.0, 3.0)
NUM_ROWS, NUM_CLASSES = 3, 5
CASES = [(alpha, (NUM_ROWS, NUM_CLASSES)) for alpha in ALPHAS] + [
    (1.25, ()), (1.0, (NUM_CLASSES,)), (2.0, (NUM_ROWS, 1)),
]  # fmt: skip

for_alphas = pytest.mark.parametrize("alpha", ALPHAS)


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
    "softargmax": lambda x, y, **options: qmargin.softargmax(x, **options),
    "log_partition": lambda x, y, **options: qmargin.log_partition(x, **options),
    "labels": qmargin.fenchel_young_loss,
    "distributions": lambda x, y, **o: qmargin.fenchel_young_loss(x, distribution(), **o),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("alpha", "shape"), CASES, ids=str)
def test_derivatives(operator, alpha, shape):
    """M7 and its companions, twice: logits, every shape of reference, and alpha, 1 included."""
    logits, log_reference, labels = smooth_rows(alpha, shape)

    def function(x: Tensor, q: Tensor, a: Tensor) -> Tensor:
        return OPERATORS[operator](x, labels, alpha=a, log_reference=q)

    inputs = (logits, log_reference, learnable(alpha))
    assert gradcheck(function, inputs)
    if shape:
        assert gradgradcheck(function, inputs)
    weights = torch.linspace(0.5, 2.0, NUM_ROWS, dtype=torch.float64)
    gradients = []
    for given in (alpha, learnable(alpha)):  # a fixed alpha takes a shorter way
        value = function(logits, log_reference, given).reshape(NUM_ROWS, -1)[:, 0]
        gradients.append(torch.autograd.grad((weights * value).sum(), (logits, log_reference)))
    for fixed, learned in zip(*gradients, strict=True):
        torch.testing.assert_close(fixed, learned, rtol=0, atol=1e-14)


@pytest.mark.parametrize("operator", OPERATORS)
def test_derivatives_through_the_generic_solver(operator):
    logits, log_reference, labels = smooth_rows(1.0, (NUM_CLASSES,))

    def function(x, q):
        options = {"divergence": qmargin.JensenShannon(), "log_reference": q}
        return OPERATORS[operator](x, labels, **options)

    assert gradcheck(function, (logits, log_reference))
    assert gradgradcheck(function, (logits, log_reference))


@for_alphas
def test_hessian_is_a_weighted_covariance(alpha):
    """``diag(w) - w w^T / sum w`` with ``w = q (p / q)^(2 - alpha)`` on the support."""
    logits, log_reference, _ = smooth_rows(alpha, (NUM_CLASSES,))
    row, reference = logits[0].detach(), log_reference.detach()
    options = {"alpha": alpha, "log_reference": reference}
    p, q = exact(AlphaGenerator(alpha), row, reference).posterior, np.exp(reference.numpy())
    weights = np.zeros(NUM_CLASSES)
    weights[p > 0] = q[p > 0] * (p[p > 0] / q[p > 0]) ** (2 - alpha)
    expected = np.diag(weights) - np.outer(weights, weights) / weights.sum()
    derivatives = torch.autograd.functional
    hessian = derivatives.hessian(lambda x: qmargin.log_partition(x, **options), row)
    jacobian = derivatives.jacobian(lambda x: qmargin.softargmax(x, **options), row)
    for found in (hessian, jacobian):
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1 + 2.0**-30, 1.25, 1.5, 2.0, 3.0])
def test_derivative_in_alpha_against_the_definition(alpha):
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
def test_gradient_of_a_nearly_satisfied_row_keeps_its_digits(alpha):
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
def test_float32_gradients_are_the_posterior_of_the_definition(alpha):
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
    "angular": lambda: qmargin.AngularMargin(0.3),
    "prior + angular": lambda: qmargin.PriorMargin(0.1) + qmargin.AngularMargin(0.2),
    "combined": lambda: qmargin.CombinedMargin(multiplier=1.1, angular=0.1, cosine=0.05),
    "adaface": lambda: qmargin.AdaFaceMargin().eval(),
    "magface": lambda: qmargin.MagFaceMargin(),
    "elastic": lambda: qmargin.ElasticMargin().eval(),
}
DIVERGENCES = [qmargin.Alpha(a) for a in (0.7, 1.0, 2.0)] + [qmargin.JensenShannon()]


@pytest.mark.parametrize(
    ("divergence", "margin"),
    [(qmargin.Alpha(1.25), margin) for margin in MARGINS]
    + [(each, margin) for each in DIVERGENCES for margin in ("prior + angular", "none")],
    ids=str,
)
def test_divergences_times_margins(divergence, margin):
    """M9: first and second derivatives of the loss with respect to the cosines."""
    generator = torch.Generator().manual_seed(2)
    cosines = 1.6 * torch.rand(3, 6, generator=generator, dtype=torch.float64) - 0.8
    norms = 10 + 20 * torch.rand(3, generator=generator, dtype=torch.float64)
    loss_fn = qmargin.MarginLoss(divergence, MARGINS[margin](), scale=4.0, reduction="none")

    def function(c):
        return loss_fn(c, torch.tensor([0, 3, 5]), norms)

    assert gradcheck(function, (cosines.requires_grad_(),))
    assert gradgradcheck(function, (cosines,))


@pytest.mark.parametrize("kind", ["per class", "sum", "shared", "module", "module per class"])
def test_learnable_settings_inside_margins_reach_the_optimizer(kind):
    first, second, per_class = (nn.Parameter(torch.full(shape, 0.1)) for shape in ((), (), (12,)))
    prior, by_class = qmargin.PriorMargin(first), qmargin.PriorMargin(qmargin.PerClass(per_class))
    margin, expected = {
        "per class": (by_class, [per_class]),
        "sum": (prior + qmargin.CosineMargin(second), [first, second]),
        "shared": (prior + qmargin.CosineMargin(first), [first]),
        "module": (prior + qmargin.AdaFaceMargin(), [first]),
        "module per class": (by_class + qmargin.ElasticMargin(), [per_class]),
    }[kind]
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=5.0, reduction="mean")
    assert sorted(map(id, loss_fn.parameters())) == sorted(map(id, expected))
    assert len(loss_fn.state_dict()) >= len(expected)
    cosines, labels = cosine_batch(5, 12, seed=0)
    optimizer = torch.optim.SGD(loss_fn.parameters(), lr=0.01)
    loss_fn(cosines, labels, torch.full((5,), 20.0)).backward()
    optimizer.step()
    assert all(bool((p != 0.1).any()) for p in expected)


def gradients(dtype: torch.dtype, alpha: float, *learnable: str) -> dict[str, Tensor]:
    """Of rows whose target holds all but 1e-3 to 1e-8 of the mass."""
    cosines = torch.full((4, 30), -0.5, dtype=dtype)
    cosines[:, 0] = torch.tensor([0.4, 0.45, 0.5, 0.55])
    cosines[:, 1:4] = torch.tensor([0.05, 0.03, 0.0])
    order = torch.tensor(alpha, dtype=torch.float64, requires_grad="alpha" in learnable)
    margin = torch.tensor(0.03125, dtype=torch.float64, requires_grad="margin" in learnable)
    parts = {"divergence": qmargin.Alpha(order), "margin": qmargin.PriorMargin(margin)}
    cosines.requires_grad_()
    labels = torch.zeros(4, dtype=torch.int64)
    loss = qmargin.margin_loss(cosines, labels, **parts, scale=32.0)
    leaves = {"cosines": cosines, "alpha": order, "margin": margin}
    wanted = ["cosines", *learnable]
    found = torch.autograd.grad(loss.sum(), [leaves[name] for name in wanted])
    return dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.05])
def test_gradients_of_nearly_satisfied_rows_keep_their_digits(alpha):
    """The gradient of the target is tiny, not the rounding of ``p_y - 1``."""
    truth = gradients(torch.float64, alpha, "alpha", "margin")
    truth["cosines"] = gradients(torch.float64, alpha)["cosines"].float()
    assert 0.0 < float(truth["cosines"][-1, 0].abs()) < 1e-2
    for learnable in ((), ("alpha",), ("margin",), ("alpha", "margin")):
        for name, found in gradients(torch.float32, alpha, *learnable).items():
            torch.testing.assert_close(found, truth[name], rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("value", [0.02, 0.3, 1.7])
def test_a_float32_alpha_on_float64_logits_has_the_gradient_of_its_value(value):
    logits = torch.randn(4, 9, dtype=torch.float64)
    labels = torch.tensor([0, 3, 5, 8])
    found = []
    for dtype in (torch.float32, torch.float64):
        alpha = torch.tensor(value).to(dtype).requires_grad_()  # the same number in both
        loss = qmargin.fenchel_young_loss(logits, labels, alpha=alpha).sum()
        posterior = qmargin.softargmax(logits, alpha=alpha).square().sum()
        found.append(torch.stack(torch.autograd.grad(loss, alpha)
                                 + torch.autograd.grad(posterior, alpha)).double())  # fmt: skip
    torch.testing.assert_close(found[0], found[1], rtol=2e-7, atol=0)


def test_alpha_does_not_follow_the_default_device():
    with torch.device("meta"):
        assert qmargin.Alpha(1.25).as_tensor().device.type == "cpu"
