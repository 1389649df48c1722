"""``MarginLoss`` and the named presets against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import qmargin
from helpers.budget import assert_loss
from helpers.cases import cosine_batch, spread_cosines
from helpers.definition import margin_solution

KINDS = {
    "prior": qmargin.PriorMargin,
    "cosine": qmargin.CosineMargin,
    "angular": qmargin.AngularMargin,
}
SETTINGS = [  # alpha, scale, margin: the paper's tables and a few beyond them
    (1.25, 35.0, 0.2),
    (1.5, 10.0, 0.1),
    (1.75, 5.0, 0.1),
    (2.0, 1.9, 0.2),
    (1.0, 64.0, 0.5),
    (0.5, 10.0, 0.1),
    (3.0, 5.0, 0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("alpha", "scale", "margin"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_margin_matches_its_definition(kind, alpha, scale, margin, dtype):
    """M6, M9: loss, tau, support, target posterior and residual of each row."""
    cosines, labels = cosine_batch(8, 60, seed=21)
    loss_fn = qmargin.MarginLoss(
        qmargin.Alpha(alpha), KINDS[kind](margin), scale=scale, reduction="none"
    )
    output = loss_fn.with_stats(cosines.to(dtype), labels)
    truth = [
        margin_solution(alpha, row, int(y), scale=scale, kind=kind, margin=margin)
        for row, y in zip(cosines, labels, strict=True)
    ]
    names = [f"row {row}" for row in range(8)]
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    losses = [float(s.loss(int(y))) for s, y in zip(truth, labels, strict=True)]
    assert_loss(output.loss, losses, names=names)
    for row, (solution, label) in enumerate(zip(truth, labels.tolist(), strict=True)):
        tau = float(solution.tau)
        assert float(output.tau[row]) == pytest.approx(tau, rel=tolerance, abs=tolerance)
        assert abs(float(output.target_posterior[row]) - solution.posterior[label]) <= tolerance
        assert int(output.support_size[row]) == solution.support_size
        assert float(output.mass_error[row]) <= (1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("kind", ["cosine", "angular"])
def test_a_prior_and_a_geometric_margin_combine(kind, alpha):
    """M9: the paper notes that the two are orthogonal; either order of the sum is the same."""
    cosines, labels = cosine_batch(6, 40, seed=4)
    prior, geometric = qmargin.PriorMargin(0.1), KINDS[kind](0.2)
    losses = [
        qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=10.0, reduction="none")(
            cosines, labels
        )
        for margin in (prior + geometric, geometric + prior)
    ]
    truth = [
        float(
            margin_solution(alpha, row, int(y), scale=10.0, kind=kind, margin=0.2, prior=0.1).loss(
                int(y)
            )
        )
        for row, y in zip(cosines, labels, strict=True)
    ]
    assert torch.equal(losses[0], losses[1])
    assert_loss(losses[0], truth, names=[f"row {row}" for row in range(6)])


def test_loss_equals_the_operator_with_a_reference():
    """M9: the margin loss is ``fenchel_young_loss`` with a lowered target."""
    cosines, labels = spread_cosines()
    reference = -10.0 * 0.2 * F.one_hot(labels, 12)
    for alpha in (0.5, 1.0, 1.25, 1.5, 2.0):
        loss_fn = qmargin.MarginLoss(
            qmargin.Alpha(alpha), qmargin.PriorMargin(0.2), scale=10.0, reduction="none"
        )
        expected = qmargin.fenchel_young_loss(
            10.0 * cosines.double(), labels, alpha=alpha, log_reference=reference
        )
        torch.testing.assert_close(
            loss_fn(cosines, labels).double(), expected, rtol=1e-5, atol=1e-6
        )
        function = qmargin.margin_loss(
            cosines,
            labels,
            divergence=qmargin.Alpha(alpha),
            margin=qmargin.PriorMargin(0.2),
            scale=10.0,
        )
        assert torch.equal(function, loss_fn(cosines, labels))


def test_reductions():
    cosines, labels = spread_cosines()
    rows = qmargin.q_margin(reduction="none")(cosines, labels)
    assert rows.shape == (5,)
    torch.testing.assert_close(qmargin.q_margin(reduction="mean")(cosines, labels), rows.mean())
    torch.testing.assert_close(qmargin.q_margin(reduction="sum")(cosines, labels), rows.sum())
    assert torch.equal(qmargin.q_margin(reduction="none")(cosines, labels), rows)
    output = qmargin.q_margin(reduction="mean").with_stats(cosines, labels)
    assert torch.equal(output.loss, rows)  # statistics are never reduced


@pytest.mark.parametrize(
    ("alpha", "scale", "margin", "effective"),
    [
        (1.25, 35.0, 0.2, 0.54),
        (1.25, 32.0, 0.2, 0.49),
        (1.5, 10.0, 0.1, 0.13),
        (1.75, 5.0, 0.1, 0.12),
        (1.5, 32.0, 0.2, 1.5),
    ],
)
def test_effective_margins_of_the_paper(alpha, scale, margin, effective):
    """M12: the cosine gap that the published settings ask for."""
    loss_fn = qmargin.q_margin(alpha=alpha, scale=scale, margin=margin, reduction="none")
    b = alpha - 1
    assert loss_fn.effective_margin == pytest.approx(effective, abs=0.06 * effective)
    assert loss_fn.effective_margin == pytest.approx(math.expm1(scale * margin * b) / (b * scale))


@pytest.mark.parametrize(
    ("alpha", "scale", "margin", "effective"),
    [(1.25, 32.0, 0.5, "6.7"), (1.5, 32.0, 0.5, "186"), (2.0, 64.0, 0.5, "1.23e+12")],
)
def test_an_unreachable_margin_warns_with_the_remedy(alpha, scale, margin, effective):
    """M12: cosines differ by at most 2; the loss still works, with a constant pull of -1."""
    with pytest.warns(qmargin.MarginWarning) as caught:
        loss_fn = qmargin.MarginLoss(
            qmargin.Alpha(alpha), qmargin.PriorMargin(margin), scale=scale, reduction="none"
        )
    assert effective in str(caught[0].message)
    assert caught[0].filename == __file__  # the line that built the loss, not ours
    cosines = torch.full((1, 10), -1.0, requires_grad=True)
    label = torch.tensor([0])
    (gradient,) = torch.autograd.grad(loss_fn(cosines, label).sum(), cosines)
    assert float(gradient[0, 0]) == pytest.approx(-scale, rel=1e-3)


PRESETS = {  # name: divergence, margin, scale; the paper's tables
    "q_margin": (1.25, qmargin.PriorMargin(0.2), 32.0),
    "q_margin_face": (1.25, qmargin.PriorMargin(0.2), 35.0),
    "q_margin_speaker": (1.5, qmargin.PriorMargin(0.1), 10.0),
    "q_margin_speaker_strict": (1.75, qmargin.PriorMargin(0.1), 5.0),
    "cosface": (1.0, qmargin.CosineMargin(0.5), 64.0),
    "cosface_speaker": (1.0, qmargin.CosineMargin(0.2), 32.0),
    "arcface": (1.0, qmargin.AngularMargin(0.5), 64.0),
    "arcface_speaker": (1.0, qmargin.AngularMargin(0.2), 32.0),
    "entmax_face": (1.25, qmargin.AngularMargin(0.5), 64.0),
    "entmax_speaker": (1.75, qmargin.AngularMargin(0.1), 5.0),
    "sparsemax_face": (2.0, qmargin.AngularMargin(0.2), 1.9),
    "sphereface": (1.0, qmargin.CombinedMargin(multiplier=1.5), 30.0),  # OpenSphere
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_numbers_of_the_paper(name):
    alpha, margin, scale = PRESETS[name]
    loss_fn = getattr(qmargin, name)(reduction="none")
    assert isinstance(loss_fn, qmargin.MarginLoss)
    assert loss_fn.divergence == qmargin.Alpha(alpha)
    assert loss_fn.margin == margin
    assert loss_fn.scale == scale
    assert getattr(qmargin, name)().reduction == "mean"


def test_arcface_and_cosface_are_cross_entropy_on_shifted_logits():
    """M9, M10: the two baselines without any of our arithmetic."""
    cosines, labels = cosine_batch(7, 50, seed=17)
    target = F.one_hot(labels, 50).double()
    wide = cosines.double()
    cosface = F.cross_entropy(64 * (wide - 0.5 * target), labels, reduction="none")
    angles = wide.gather(1, labels[:, None]).arccos() + 0.5
    arcface = F.cross_entropy(
        64 * wide.scatter(1, labels[:, None], angles.cos()), labels, reduction="none"
    )
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(
        qmargin.cosface(reduction="none")(cosines, labels).double(), cosface, **close
    )
    torch.testing.assert_close(
        qmargin.arcface(reduction="none")(cosines, labels).double(), arcface, **close
    )


def test_a_loss_trains_and_has_no_state():
    """Fifty steps on separable data bring the loss to exactly zero and the posterior to one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 16, generator=generator).requires_grad_()
    features = F.normalize(torch.eye(6, 16) + 0.05 * torch.randn(6, 16, generator=generator))
    labels = torch.arange(6)
    loss_fn = qmargin.q_margin_speaker(reduction="mean")
    assert not list(loss_fn.parameters())
    assert not loss_fn.state_dict()
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    values = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = loss_fn(features @ F.normalize(weight).T, labels)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    output = loss_fn.with_stats(features @ F.normalize(weight).T, labels)
    assert values[0] > 1.0
    np.testing.assert_array_equal(output.loss.detach().numpy(), 0.0)
    np.testing.assert_allclose(output.target_posterior.numpy(), 1.0, atol=1e-6)
    assert output.support_size.tolist() == [1] * 6
