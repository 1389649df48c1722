"""Agreement with the ``entmax`` package, wherever that package is accurate.

With a reference measure of one, ``p = [(alpha-1) z - t]_+^(1/(alpha-1))`` there is our posterior
with ``t = (alpha-1) tau - 1``, and the losses are equal, with no factor between them: the
regularisers differ by ``(k - 1) / alpha``, which is also what the target's divergence contributes.
"""

from __future__ import annotations

import entmax
import pytest
import torch
from torch import Tensor

import qmargin

CLOSE = {"rtol": 0, "atol": 1e-10}
LOOSE = {"rtol": 0, "atol": 1e-9}  # fifty halvings of a bracket, then a power
for_scales = pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 30.0])


def rows(scale: float, num_classes: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = scale * torch.randn(16, num_classes, generator=generator, dtype=torch.float64)
    logits[0] = 0.0  # all equal
    logits[1, :5] = logits[1].max()  # ties
    return logits, torch.randint(num_classes, (16,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@for_scales
def test_closed_forms(scale, dtype):
    """M1 at alpha = 2 and alpha = 1.5."""
    logits, labels = rows(scale)
    logits = logits.to(dtype)
    close = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 4e-6 * max(1.0, scale)}
    for alpha, mapping, loss in (
        (2.0, entmax.sparsemax, entmax.sparsemax_loss),
        (1.5, entmax.entmax15, entmax.entmax15_loss),
    ):
        posterior = qmargin.softargmax(logits, alpha=alpha)
        torch.testing.assert_close(posterior, mapping(logits, dim=-1), **close)
        value = qmargin.fenchel_young_loss(logits, labels, alpha=alpha)
        torch.testing.assert_close(value, loss(logits, labels), **close)


@for_scales
@pytest.mark.parametrize("alpha", [1.25, 1.5, 1.75, 2.0])
def test_entmax_by_bisection(alpha, scale):
    """M1, M6 at any alpha above one: posterior, loss, and the gradient of the loss."""
    logits, labels = rows(scale)
    theirs = entmax.entmax_bisect(logits, alpha=alpha, dim=-1, n_iter=60)
    torch.testing.assert_close(qmargin.softargmax(logits, alpha=alpha), theirs, **LOOSE)
    gradients = []
    for loss_of in (
        lambda x: qmargin.fenchel_young_loss(x, labels, alpha=alpha),
        lambda x: entmax.entmax_bisect_loss(x, labels, alpha=alpha, n_iter=60),
    ):
        leaf = logits.clone().requires_grad_()
        loss = loss_of(leaf)
        gradients.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-8)
