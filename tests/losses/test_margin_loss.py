"""``MarginLoss`` and the named presets against the definition."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import qmargin
from helpers.budget import assert_loss, assert_within_budget
from helpers.cases import cosine_batch, spread_cosines
from helpers.definition import margin_solution

KINDS = {
    "prior": qmargin.PriorMargin,
    "cosine": qmargin.CosineMargin,
    "angular": qmargin.AngularMargin,
}
SETTINGS = [  # alpha, scale, margin: the paper's tables and a few beyond them
    (1.25, 35.0, 0.2),
    (1.25, 10.0, 0.5),
    (1.5, 10.0, 0.1),
    (1.75, 5.0, 0.1),
    (2.0, 1.9, 0.2),
    (1.0, 64.0, 0.5),
    (1.0, 32.0, 0.2),
    (0.5, 10.0, 0.1),
    (3.0, 5.0, 0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("alpha", "scale", "margin"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_margin_matches_its_definition(
    kind: str, alpha: float, scale: float, margin: float, dtype: torch.dtype
) -> None:
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
def test_a_prior_and_a_geometric_margin_combine(kind: str, alpha: float) -> None:
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


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
def test_margins_per_row_and_per_class(alpha: float) -> None:
    """M9: a tensor of margins is as good as one loss per margin."""
    cosines, labels = cosine_batch(5, 12, seed=6)
    margins = torch.tensor([0.0, 0.05, 0.1, 0.15, 0.2])
    per_class = torch.linspace(0.0, 0.2, 12)
    for margin, values in ((margins, margins), (qmargin.PerClass(per_class), per_class[labels])):
        loss_fn = qmargin.MarginLoss(
            qmargin.Alpha(alpha), qmargin.PriorMargin(margin), scale=8.0, reduction="none"
        )
        loss = loss_fn(cosines, labels)
        for row, value in enumerate(values.tolist()):
            alone = qmargin.MarginLoss(
                qmargin.Alpha(alpha), qmargin.PriorMargin(value), scale=8.0, reduction="none"
            )
            expected = alone(cosines[row : row + 1], labels[row : row + 1])
            torch.testing.assert_close(loss[row : row + 1], expected, rtol=1e-6, atol=1e-6)


def test_loss_equals_the_operator_with_a_reference() -> None:
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


def test_float32_is_as_good_as_rounding_allows() -> None:
    """Half precision is float32 on the upcast input; float32 is within budget of float64."""
    cosines, labels = cosine_batch(8, 500, seed=3)
    for alpha in (1.0, 1.25, 2.0):
        loss_fn = qmargin.MarginLoss(
            qmargin.Alpha(alpha), qmargin.PriorMargin(0.1), scale=10.0, reduction="none"
        )
        truth = loss_fn(cosines.double(), labels)
        plain = loss_fn(cosines, labels)
        assert plain.dtype == torch.float32
        # float32 cosines are exact in float64: what is left is the rounding of the result
        assert_within_budget(plain, truth.float(), truth)
        for dtype in (torch.float16, torch.bfloat16):
            half = cosines.to(dtype)
            loss = loss_fn(half, labels)
            assert loss.dtype == torch.float32
            assert torch.equal(loss, loss_fn(half.float(), labels))


def test_statistics_carry_no_gradient() -> None:
    cosines, labels = spread_cosines()
    output = qmargin.q_margin(reduction="none").with_stats(cosines.requires_grad_(), labels)
    assert output.loss.requires_grad
    assert not any(part.requires_grad for part in output[1:])
    assert output.loss.shape == output.tau.shape == output.support_size.shape == (5,)
    assert not output.support_size.is_floating_point()
    assert torch.equal(output.loss, qmargin.q_margin(reduction="none")(cosines, labels))


def test_reductions() -> None:
    cosines, labels = spread_cosines()
    rows = qmargin.q_margin(reduction="none")(cosines, labels)
    assert rows.shape == (5,)
    torch.testing.assert_close(qmargin.q_margin(reduction="mean")(cosines, labels), rows.mean())
    torch.testing.assert_close(qmargin.q_margin(reduction="sum")(cosines, labels), rows.sum())
    assert torch.equal(qmargin.q_margin(reduction="none")(cosines, labels), rows)
    output = qmargin.q_margin(reduction="mean").with_stats(cosines, labels)
    assert torch.equal(output.loss, rows)  # statistics are never reduced


def test_mean_gradient_is_spread_over_rows() -> None:
    cosines, labels = spread_cosines()
    gradients = []
    for reduction in ("mean", "sum"):
        leaf = cosines.clone().requires_grad_()
        qmargin.q_margin(reduction=reduction)(leaf, labels).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0] * 5, gradients[1], rtol=1e-6, atol=1e-6)


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
def test_effective_margins_of_the_paper(
    alpha: float, scale: float, margin: float, effective: float
) -> None:
    """M12: the cosine gap that the published settings ask for."""
    loss_fn = qmargin.q_margin(alpha=alpha, scale=scale, margin=margin, reduction="none")
    b = alpha - 1
    assert loss_fn.effective_margin == pytest.approx(effective, abs=0.06 * effective)
    assert loss_fn.effective_margin == pytest.approx(math.expm1(scale * margin * b) / (b * scale))


@pytest.mark.parametrize(
    ("alpha", "scale", "margin", "effective"),
    [(1.25, 32.0, 0.5, "6.7"), (1.5, 32.0, 0.5, "186"), (2.0, 64.0, 0.5, "1.23e+12")],
)
def test_an_unreachable_margin_warns_with_the_remedy(
    alpha: float, scale: float, margin: float, effective: str
) -> None:
    """M12: cosines differ by at most 2; the loss still works, with a constant pull of -1."""
    with pytest.warns(qmargin.MarginWarning) as caught:
        loss_fn = qmargin.MarginLoss(
            qmargin.Alpha(alpha), qmargin.PriorMargin(margin), scale=scale, reduction="none"
        )
    message = str(caught[0].message)
    assert effective in message
    assert "2" in message
    assert "lower the margin" in message or "from_effective" in message
    assert caught[0].filename == __file__  # the line that built the loss, not ours
    cosines = torch.full((1, 10), -1.0, requires_grad=True)
    label = torch.tensor([0])
    (gradient,) = torch.autograd.grad(loss_fn(cosines, label).sum(), cosines)
    assert float(gradient[0, 0]) == pytest.approx(-scale, rel=1e-3)


def test_reachable_margins_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qmargin.MarginLoss(
            qmargin.Alpha(1.0), qmargin.PriorMargin(0.5), scale=64.0, reduction="none"
        )
        qmargin.MarginLoss(
            qmargin.Alpha(1.25), qmargin.CosineMargin(0.5), scale=64.0, reduction="none"
        )
        margin = qmargin.PriorMargin.from_effective(1.99, alpha=1.5, scale=32.0)
        qmargin.MarginLoss(qmargin.Alpha(1.5), margin, scale=32.0, reduction="none")


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
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_numbers_of_the_paper(name: str) -> None:
    alpha, margin, scale = PRESETS[name]
    loss_fn = getattr(qmargin, name)(reduction="none")
    assert isinstance(loss_fn, qmargin.MarginLoss)
    assert loss_fn.divergence == qmargin.Alpha(alpha)
    assert loss_fn.margin == margin
    assert loss_fn.scale == scale
    assert getattr(qmargin, name)().reduction == "mean"
    assert getattr(qmargin, name).__doc__


@pytest.mark.parametrize("name", PRESETS)
def test_presets_match_the_definition(name: str) -> None:
    alpha, margin, scale = PRESETS[name]
    kind = {type_: key for key, type_ in KINDS.items()}[type(margin)]
    cosines, labels = cosine_batch(5, 80, seed=13)
    loss = getattr(qmargin, name)(reduction="none")(cosines, labels)
    truth = [
        float(
            margin_solution(alpha, row, int(y), scale=scale, kind=kind, margin=margin.margin).loss(
                int(y)
            )
        )
        for row, y in zip(cosines, labels, strict=True)
    ]
    assert_loss(loss, truth, names=[f"row {row}" for row in range(5)])


def test_arcface_and_cosface_are_cross_entropy_on_shifted_logits() -> None:
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


def test_a_loss_trains_and_has_no_state() -> None:
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


def test_equal_settings_are_equal_and_printed() -> None:
    text = repr(qmargin.q_margin_face(reduction="none"))
    for part in ("1.25", "0.2", "35", "0.54"):
        assert part in text


def test_sphereface_has_the_defaults_of_its_authors() -> None:
    """OpenSphere: s 30, m 1.5."""
    loss_fn = qmargin.sphereface(reduction="none")
    assert loss_fn.scale == 30.0
    assert loss_fn.margin == qmargin.CombinedMargin(multiplier=1.5)
