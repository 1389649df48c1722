"""Another f-divergence than alpha's, through the generic solver."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import qmargin
from helpers.cases import spread_cosines
from helpers.definition import AlphaGenerator, JensenShannonGenerator, exact


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0])
def test_jensen_shannon_matches_its_definition(scale):
    """M1, M2, M6 for ``f(u) = u ln u - (u + 1) ln((u + 1) / 2)``, through the generic solver."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(scale * rng.standard_normal((4, 15)))
    reference = torch.from_numpy(-2.0 * rng.random((4, 15)))
    reference[0] = 0.0
    labels = torch.tensor([0, 3, 14, 7])
    target = torch.from_numpy(rng.dirichlet(np.ones(15), size=4))
    common = {"divergence": qmargin.JensenShannon(), "log_reference": reference}
    posterior = qmargin.softargmax(logits, **common)
    loss = qmargin.fenchel_young_loss(logits, labels, **common)
    soft_loss = qmargin.fenchel_young_loss(logits, target, **common)
    partition = qmargin.log_partition(logits, **common)
    for row in range(4):
        truth = exact(JensenShannonGenerator(), logits[row], reference[row])
        np.testing.assert_allclose(posterior[row].numpy(), truth.posterior, atol=1e-12)
        label = int(labels[row])
        assert float(loss[row]) == pytest.approx(float(truth.loss(label)), rel=1e-10, abs=1e-12)
        soft = float(truth.distribution_loss(target[row].numpy()))
        assert float(soft_loss[row]) == pytest.approx(soft, rel=1e-9, abs=1e-11)
        # documented: the paper's value plus (sum q - 1) f(0), with f(0) = ln 2
        value = float(truth.softmax_f) + float(truth.total_q - 1) * math.log(2)
        assert float(partition[row]) == pytest.approx(value, rel=1e-10, abs=1e-10)


def test_jensen_shannon_in_a_margin_loss():
    cosines, labels = spread_cosines()
    loss_fn = qmargin.MarginLoss(
        qmargin.JensenShannon(), qmargin.PriorMargin(0.1), scale=5.0, reduction="none"
    )
    output = loss_fn.with_stats(cosines.double(), labels)
    for row, label in enumerate(labels.tolist()):
        reference = torch.zeros(12, dtype=torch.float64)
        reference[label] = -0.5
        truth = exact(JensenShannonGenerator(), cosines[row], reference, scale=5.0)
        assert float(output.loss[row]) == pytest.approx(float(truth.loss(label)), rel=1e-10)
        assert float(output.tau[row]) == pytest.approx(float(truth.tau), rel=1e-10)
        assert float(output.target_posterior[row]) == pytest.approx(
            truth.posterior[label], rel=1e-9, abs=1e-14
        )
    assert loss_fn.effective_margin is None


def test_the_generic_solver_agrees_with_the_closed_form():
    """A divergence the package has never seen, here the alpha-divergence in disguise."""

    class Disguised:
        """Delegates to ``Alpha(1.5)`` without being one."""

        def __getattr__(self, name: str) -> object:
            return getattr(qmargin.Alpha(1.5), name)

    cosines, labels = spread_cosines()
    logits = 5 * cosines.double()
    for function in (
        lambda d: qmargin.softargmax(logits, divergence=d),
        lambda d: qmargin.log_partition(logits, divergence=d),
        lambda d: qmargin.fenchel_young_loss(logits, labels, divergence=d),
    ):
        torch.testing.assert_close(
            function(Disguised()), function(qmargin.Alpha(1.5)), rtol=1e-10, atol=1e-11
        )
    truth = exact(AlphaGenerator(1.5), logits[0])
    posterior = qmargin.softargmax(logits, divergence=Disguised())
    np.testing.assert_allclose(posterior[0].numpy(), truth.posterior, atol=1e-12)


@pytest.mark.parametrize("operator", ["softargmax", "log_partition", "labels", "distributions"])
def test_jensen_shannon_derivatives(operator):
    """First and second derivatives in the logits and in the reference."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((3, 5))).requires_grad_()
    log_reference = torch.from_numpy(0.5 * rng.standard_normal(5)).requires_grad_()
    target = torch.from_numpy(rng.dirichlet(np.ones(5), size=3))
    target[0] = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0])

    def function(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        common = {"divergence": qmargin.JensenShannon(), "log_reference": q}
        if operator == "labels":
            return qmargin.fenchel_young_loss(x, torch.tensor([0, 4, 2]), **common)
        if operator == "distributions":
            return qmargin.fenchel_young_loss(x, target, **common)
        return getattr(qmargin, operator)(x, **common)

    assert gradcheck(function, (logits, log_reference))
    assert gradgradcheck(function, (logits, log_reference))
