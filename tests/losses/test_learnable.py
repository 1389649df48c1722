"""Learnable alpha and margins: found by optimizers, and as accurate as fixed ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qmargin
from helpers.cases import cosine_batch


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 0.1))


@pytest.mark.parametrize("kind", ["per class", "sum", "module sum", "module sum per class"])
def test_learnable_settings_inside_margins_reach_the_optimizer(kind: str) -> None:
    first, second, per_class = parameter(), parameter(), parameter(12)
    prior, by_class = qmargin.PriorMargin(first), qmargin.PriorMargin(qmargin.PerClass(per_class))
    margin, expected = {
        "per class": (by_class, [per_class]),
        "sum": (prior + qmargin.CosineMargin(second), [first, second]),
        "module sum": (prior + qmargin.AdaFaceMargin(), [first]),
        "module sum per class": (by_class + qmargin.ElasticMargin(), [per_class]),
    }[kind]
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=5.0, reduction="mean")
    assert {id(p) for p in loss_fn.parameters()} == {id(p) for p in expected}
    assert len(loss_fn.state_dict()) >= len(expected)
    cosines, labels = cosine_batch(5, 12, seed=0)
    optimizer = torch.optim.SGD(loss_fn.parameters(), lr=0.01)
    loss_fn(cosines, labels, torch.full((5,), 20.0)).backward()
    optimizer.step()
    assert all(bool((p != 0.1).any()) for p in expected)


def test_a_parameter_in_two_places_is_one_parameter() -> None:
    shared = parameter()
    margin = qmargin.PriorMargin(shared) + qmargin.CosineMargin(shared)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=5.0, reduction="none")
    assert [id(p) for p in loss_fn.parameters()] == [id(shared)]


# ---------------------------------------------------------------- accuracy


def nearly_satisfied(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows whose target holds all but 1e-3 to 1e-8 of the mass."""
    cosines = torch.full((4, 30), -0.5, dtype=dtype)
    cosines[:, 0] = torch.tensor([0.4, 0.45, 0.5, 0.55])
    cosines[:, 1:4] = torch.tensor([0.05, 0.03, 0.0])
    return cosines, torch.zeros(4, dtype=torch.int64)


def gradients(dtype: torch.dtype, alpha: float, *learnable: str) -> dict[str, Tensor]:
    cosines, labels = nearly_satisfied(dtype)
    order = torch.tensor(alpha, dtype=torch.float64, requires_grad="alpha" in learnable)
    margin = torch.tensor(0.03125, dtype=torch.float64, requires_grad="margin" in learnable)
    loss_fn = qmargin.MarginLoss(
        qmargin.Alpha(order), qmargin.PriorMargin(margin), scale=32.0, reduction="none"
    )
    cosines.requires_grad_()
    loss = loss_fn(cosines, labels)
    leaves = {"cosines": cosines, "alpha": order, "margin": margin}
    wanted = ["cosines", *learnable]
    found = torch.autograd.grad(loss.sum(), [leaves[name] for name in wanted])
    return dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.05])
def test_gradients_beside_a_learnable_setting_keep_their_digits(alpha: float) -> None:
    """The gradient of a nearly satisfied target is tiny, not the rounding of ``p_y - 1``."""
    truth = gradients(torch.float64, alpha)["cosines"].float()
    assert 0.0 < float(truth[-1, 0].abs()) < 1e-2
    for learnable in ((), ("alpha",), ("margin",), ("alpha", "margin")):
        found = gradients(torch.float32, alpha, *learnable)["cosines"]
        torch.testing.assert_close(found, truth, rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.05])
def test_gradients_of_learnable_settings_keep_their_digits(alpha: float) -> None:
    wide = gradients(torch.float64, alpha, "alpha", "margin")
    narrow = gradients(torch.float32, alpha, "alpha", "margin")
    for name in ("alpha", "margin"):
        torch.testing.assert_close(narrow[name], wide[name], rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("value", [0.02, 0.3, 1.7])
def test_a_float32_alpha_on_float64_logits_has_the_gradient_of_its_value(value: float) -> None:
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


def test_alpha_does_not_follow_the_default_device() -> None:
    with torch.device("meta"):
        assert qmargin.Alpha(1.25).as_tensor().device.type == "cpu"
