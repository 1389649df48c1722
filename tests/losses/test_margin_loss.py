"""``MarginLoss``, presets and registered parts against the definition."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import qmargin
from helpers.budget import assert_loss
from helpers.cases import cosine_batch, spread_cosines
from helpers.definition import margin_solution
from qmargin import registry
from qmargin.errors import ConfigError
from qmargin.losses.margins import StatelessMargin, main_number

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
    parts = {"divergence": qmargin.Alpha(alpha), "margin": KINDS[kind](margin), "scale": scale}
    output = qmargin.margin_loss_with_stats(cosines.to(dtype), labels, **parts)
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
    parts = {"divergence": qmargin.Alpha(alpha), "scale": 10.0}
    losses = [
        qmargin.margin_loss(cosines, labels, margin=margin, **parts)
        for margin in (prior + geometric, geometric + prior)
    ]
    settings = {"scale": 10.0, "kind": kind, "margin": 0.2, "prior": 0.1}
    truth = [
        float(margin_solution(alpha, row, int(y), **settings).loss(int(y)))
        for row, y in zip(cosines, labels, strict=True)
    ]
    assert torch.equal(losses[0], losses[1])
    assert_loss(losses[0], truth, names=[f"row {row}" for row in range(6)])


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 1.5, 2.0])
def test_loss_equals_the_operator_with_a_reference(alpha):
    """M9: the margin loss is ``fenchel_young_loss`` with a lowered target."""
    cosines, labels = spread_cosines()
    reference = -10.0 * 0.2 * F.one_hot(labels, 12)
    parts = {"divergence": qmargin.Alpha(alpha), "margin": qmargin.PriorMargin(0.2), "scale": 10.0}
    loss = qmargin.MarginLoss(**parts, reduction="none")(cosines, labels)
    expected = qmargin.fenchel_young_loss(
        10.0 * cosines.double(), labels, alpha=alpha, log_reference=reference
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(qmargin.margin_loss(cosines, labels, **parts), loss)


def test_reductions():
    cosines, labels = spread_cosines()
    rows = qmargin.q_margin(reduction="none")(cosines, labels)
    assert rows.shape == (5,)
    torch.testing.assert_close(qmargin.q_margin(reduction="mean")(cosines, labels), rows.mean())
    torch.testing.assert_close(qmargin.q_margin(reduction="sum")(cosines, labels), rows.sum())
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
    for name, expected in (("cosface", cosface), ("arcface", arcface)):
        loss = getattr(qmargin, name)(reduction="none")(cosines, labels)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


MAIN_NUMBERS = {
    **dict.fromkeys(("prior", "cosine", "angular", "adaface", "elastic"), "margin"),
    "multiplied": "multiplier",
    "magface": "lower_margin",
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "extension_package")
    yield
    for name in [name for name in sys.modules if name.startswith("qmargin_example")]:
        del sys.modules[name]


def test_every_kind_is_registered_with_its_main_number():
    cosines, labels = spread_cosines()
    for name, main in MAIN_NUMBERS.items():
        kind = registry.margins.get(name)
        assert main_number(kind) == main
        margin = kind(**{main: 0.3 if name != "multiplied" else 1.2})
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=8.0)
        assert loss_fn(cosines, labels, torch.full((5,), 20.0)).isfinite()
    for name, main in (("alpha", "alpha"), ("jensen_shannon", None)):
        assert main_number(registry.divergences.get(name)) == main


def test_a_margin_from_a_file_of_its_own(example):
    from qmargin_example.margin import HalfCosine

    _, labels = spread_cosines()
    margin = HalfCosine(0.2)
    term = margin(torch.tensor([0.5, -0.5]), 10.0)
    torch.testing.assert_close(term.logits, torch.tensor([3.0, -6.0]))
    assert main_number(HalfCosine) == "margin" and margin == HalfCosine(0.2)
    both = qmargin.PriorMargin(0.1) + HalfCosine(qmargin.PerClass(torch.full((12,), 0.2)))
    for path in ("sparse", "chunked", "dense"):
        loss = qmargin.MarginLoss(qmargin.Alpha(1.5), both, scale=8.0)
        head = qmargin.MarginClassifier(4, 12, loss, path=path)
        head(torch.randn(5, 4), labels).backward()


class Unfinished(StatelessMargin):
    margin = 0.1

    def term(self, cosines, scale, labels, norms):
        return cosines * scale


def test_a_margin_that_is_not_written_to_the_end_is_refused():
    with pytest.raises(ConfigError, match=r"Unfinished.* not a dataclass"):
        qmargin.MarginLoss(qmargin.Alpha(1.25), Unfinished(), scale=8.0)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), dataclass(Unfinished)(), scale=8.0)
    with pytest.raises(ConfigError, match=r"Unfinished\.term returns a Tensor"):
        loss_fn(*spread_cosines())


def test_a_divergence_from_a_file_of_its_own(example):
    """Pearson's with weight one is the alpha-divergence at 2, through the generic solver."""
    from qmargin_example.divergence import Pearson

    cosines, labels = spread_cosines()
    losses = [
        qmargin.MarginLoss(divergence, qmargin.PriorMargin(0.1), scale=5.0, reduction="none")
        for divergence in (Pearson(), qmargin.Alpha(2.0))
    ]
    found, expected = (loss_fn(cosines.double(), labels) for loss_fn in losses)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert main_number(Pearson) == "weight"
