"""Large alpha: a class 1e-16 above the edge can hold a tenth of the mass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qmargin
from helpers.budget import assert_loss, assert_posterior
from helpers.definition import AlphaGenerator, exact, mp
from qmargin import errors
from qmargin.kernels.solver import others_gain

for_large_alphas = pytest.mark.parametrize("alpha", [4.0, 9.0, 16.0])


def rows(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits, a crowd just below the top, and classes that are rarer than others."""
    generator = torch.Generator().manual_seed(int(1e3 * scale))
    logits = scale * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    logits[1, :20] = logits[1].max()
    logits[2] = 0.0
    reference = torch.zeros_like(logits)
    reference[3:, :5] = -torch.rand(3, 5, generator=generator, dtype=torch.float64)
    return logits.to(dtype), reference.to(dtype)


@for_large_alphas
@pytest.mark.parametrize("scale", [1e-3, 0.1, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_posterior_and_loss_are_accurate(alpha, scale, dtype):
    """M1, M6 up to the largest alpha that is accepted."""
    logits, reference = rows(scale, dtype)
    truth = [
        exact(AlphaGenerator(alpha), x.double().numpy(), q.double().numpy())
        for x, q in zip(logits, reference, strict=True)
    ]
    names = [f"row {row}" for row in range(len(truth))]
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=reference)
    assert_posterior(posterior, np.stack([s.posterior for s in truth]), names=names)
    for labels in (logits.argmax(1), logits.argsort(1)[:, -2], torch.arange(6)):
        loss = qmargin.fenchel_young_loss(logits, labels, alpha=alpha, log_reference=reference)
        values = [float(s.loss(int(y))) for s, y in zip(truth, labels, strict=True)]
        assert_loss(loss, values, names=names)


@for_large_alphas
def test_a_million_equal_logits_share_evenly(alpha):
    posterior = qmargin.softargmax(torch.full((1, 100_000), 0.5), alpha=alpha)
    torch.testing.assert_close(posterior, torch.full_like(posterior, 1e-5), rtol=1e-5, atol=0)


def test_neighbouring_logits_are_told_apart():
    """Classes one rounding apart at the edge: the lowest active one is found all the same."""
    alpha = 12.0
    logits = torch.zeros(1, 30, dtype=torch.float64)
    logits[0, 1:20] = -1.0 / 11.0 + torch.arange(-9, 10) * 2.0**-56
    logits[0, 20:] = -1.0
    truth = exact(AlphaGenerator(alpha), logits[0].numpy())
    posterior = qmargin.softargmax(logits, alpha=alpha)
    assert_posterior(posterior, truth.posterior[None], names=["neighbours"])


@pytest.mark.parametrize("alpha", [16.01, 100.0, 1e40, np.float64(1e300)])
def test_alpha_above_the_tested_range_is_refused(alpha):
    logits = torch.zeros(2, 3)
    for call in (
        lambda: qmargin.Alpha(alpha),
        lambda: qmargin.softargmax(logits, alpha=alpha),
        lambda: qmargin.solve_tau(logits, alpha=alpha),
        lambda: qmargin.softargmax(logits, alpha=torch.tensor(alpha, dtype=torch.float64)),
    ):
        with pytest.raises(errors.ConfigError, match=r"alpha is .*16"):
            call()


@pytest.mark.parametrize("b", [7.0, 15.0])
def test_the_cost_of_lost_mass_is_accurate(b):
    """M6: ``phi(r) = (1 - (1 - r)^b (1 + b r)) / b``, on both sides of where its series ends."""
    mass = torch.logspace(-8, -0.5, 60, dtype=torch.float64)
    truth = [float((1 - (1 - mp.mpf(r)) ** b * (1 + b * mp.mpf(r))) / b)
             for r in mass.tolist()]  # fmt: skip
    found = others_gain(mass, torch.log1p(-mass), b)
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-11)
