"""Rows under ``ignore_index`` may hold anything: nothing of them reaches a loss or a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import qmargin
from helpers.cases import spread_cosines
from qmargin.errors import DataError

IGNORED = [1, 3]
KEPT = [0, 2, 4]


def parts(name: str) -> tuple[qmargin.Divergence, qmargin.Margin, list[nn.Parameter]]:
    alpha = nn.Parameter(torch.tensor(1.25))
    margin = nn.Parameter(torch.tensor(0.05))
    per_class = nn.Parameter(torch.full((12,), 0.05))
    return {
        "alpha": (qmargin.Alpha(alpha), qmargin.PriorMargin(0.05), [alpha]),
        "margin": (qmargin.Alpha(1.25), qmargin.PriorMargin(margin), [margin]),
        "angle": (qmargin.Alpha(1.0), qmargin.AngularMargin(margin), [margin]),
        "class": (qmargin.Alpha(1.5), qmargin.CosineMargin(qmargin.PerClass(per_class)), []),
        "jensen-shannon": (qmargin.JensenShannon(), qmargin.CosineMargin(margin), [margin]),
        "magface": (qmargin.Alpha(1.0), qmargin.MagFaceMargin(), []),
    }[name]


NAMES = ["alpha", "margin", "angle", "class", "jensen-shannon", "magface"]


def gradients(name: str, rows: list[int] | None, bad: float, *, twice: bool) -> list[Tensor]:
    """Of the summed loss over some rows, or over all with the others ignored and spoilt."""
    cosines, labels = spread_cosines()
    norms = torch.linspace(20.0, 60.0, 5)
    if rows is None:
        cosines[IGNORED], norms[IGNORED], labels[IGNORED] = bad, bad, -100
    else:
        cosines, labels, norms = cosines[rows], labels[rows], norms[rows]
    divergence, margin, parameters = parts(name)
    leaves = [cosines.requires_grad_(), *parameters]
    if name == "magface":
        leaves.append(norms.requires_grad_())
    loss_fn = qmargin.MarginLoss(divergence, margin, scale=5.0, reduction="sum")
    found = torch.autograd.grad(loss_fn(cosines, labels, norms), leaves, create_graph=twice)
    if twice:
        weighted = sum((g * torch.linspace(1.0, 2.0, g.shape[-1] if g.dim() else 1)).sum()
                       for g in found)  # fmt: skip
        found = torch.autograd.grad(weighted, leaves, allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_ignored_rows_leave_every_gradient_alone(name: str, bad: float) -> None:
    full, kept = (gradients(name, rows, bad, twice=False) for rows in (None, KEPT))
    assert bool((full[0][IGNORED] == 0).all())
    torch.testing.assert_close(full[0][KEPT], kept[0])
    for all_rows, some in zip(full[1:], kept[1:], strict=True):
        chosen = all_rows[KEPT] if all_rows.shape == (5,) else all_rows
        torch.testing.assert_close(chosen, some)
        assert bool(all_rows.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.3])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "magface"])
def test_ignored_rows_leave_second_derivatives_alone(name: str, bad: float) -> None:
    full, kept = (gradients(name, rows, bad, twice=True) for rows in (None, KEPT))
    assert bool((full[0][IGNORED] == 0).all())
    torch.testing.assert_close(full[0][KEPT], kept[0], rtol=1e-4, atol=1e-5)
    for all_rows, some in zip(full[1:], kept[1:], strict=True):
        torch.testing.assert_close(all_rows, some, rtol=1e-4, atol=1e-5)


def test_functions_take_ignore_index_and_debug() -> None:
    cosines, labels = spread_cosines()
    settings = {"divergence": qmargin.Alpha(1.25), "margin": qmargin.PriorMargin(0.1), "scale": 5.0}
    expected = qmargin.margin_loss(cosines, labels, **settings)
    labels[1], cosines[1] = -7, math.nan
    loss = qmargin.margin_loss(cosines, labels, ignore_index=-7, debug=True, **settings)
    assert float(loss[1]) == 0.0
    assert torch.equal(loss[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


def test_debug_refuses_what_cannot_be_a_cosine():
    labels = torch.tensor([0, 1])
    cosines = torch.tensor([[0.9, 0.1], [0.2, 32.0]])
    with pytest.raises(DataError, match="32"):
        qmargin.q_margin(debug=True)(cosines, labels)
    rounded = torch.tensor([[1.0 + 1e-6, 0.1], [0.2, -1.0 - 1e-6]])
    qmargin.q_margin(debug=True)(rounded, labels)
    cosines[1, 1] = -100.0
    qmargin.q_margin(debug=True)(cosines, torch.tensor([0, -100]))  # ignored rows may hold anything
    half = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16) * 1.004
    qmargin.q_margin(debug=True)(half, torch.tensor([0]))


def test_a_loss_of_ignored_rows_leaves_zeros():
    cosines = torch.randn(3, 10).clamp(-1, 1).requires_grad_()
    loss = qmargin.q_margin()(cosines, torch.full((3,), -100))
    loss.backward()
    assert loss.isnan() and (cosines.grad == 0).all()
