"""The reach of a loss: against the solver, by bisection, and as a margin (M12)."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qmargin
from qmargin import (
    AdaFaceMargin,
    Alpha,
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    ElasticMargin,
    MagFaceMargin,
    PerClass,
    PriorMargin,
)
from qmargin.errors import ConfigError
from qmargin.losses.margins import StatelessMargin, geometric_term

MARGINS = {
    "none": PriorMargin(0.0),
    "prior": PriorMargin(0.2),
    "negative": PriorMargin(-0.05),
    "cosine": CosineMargin(0.3),
    "angular": AngularMargin(0.5),
    "prior + cosine": PriorMargin(0.1) + CosineMargin(0.2),
    "prior + angular": PriorMargin(0.1) + AngularMargin(0.4),
    "combined": CombinedMargin(multiplier=1.2, angular=0.2, cosine=0.1),
}


def smallest_gap(margin, alpha, scale, target):
    """Gap at which the float64 solver starts to give a loss of zero, for a target cosine."""
    low, high = -1.0, 40.0  # the solver takes any gap, also those of no embedding
    for _ in range(60):
        middle = (low + high) / 2.0
        cosines = torch.tensor([[target, target - middle, -50.0]], dtype=torch.float64)
        output = qmargin.margin_loss_with_stats(
            cosines, torch.tensor([0]), divergence=Alpha(alpha), margin=margin, scale=scale
        )
        low, high = (low, middle) if float(output.loss) == 0.0 else (middle, high)
    return high


@pytest.mark.parametrize("alpha, scale", [(1.1, 30.0), (1.25, 10.0), (1.5, 8.0), (2.0, 3.0)])
@pytest.mark.parametrize("name", MARGINS)
def test_the_loss_is_zero_from_the_reach_on(name, alpha, scale):
    margin, needed = MARGINS[name], []
    for target in (-0.9, -0.2, 0.0, 0.4, 0.9, 1.0):
        found = qmargin.reach(alpha, scale, margin, target_cosine=target)
        assert smallest_gap(margin, alpha, scale, target) == pytest.approx(found, rel=1e-6)
        needed.append(found)
    largest = qmargin.reach(alpha, scale, margin)
    assert largest >= max(needed) - 1e-12
    if "angular" not in name and name != "combined":
        assert largest == pytest.approx(min(needed))  # the same at every angle


def test_it_is_what_the_ledger_says():
    b, s, m = 0.25, 35.0, 0.2
    assert qmargin.reach(1.25, s, m) == pytest.approx(math.exp(b * s * m) / (b * s))
    effective = PriorMargin(m).effective(1.25, s)
    assert qmargin.reach(1.25, s, m) == pytest.approx(effective + 1.0 / (b * s))
    assert qmargin.reach(1.25, s, CosineMargin(m)) == pytest.approx(m + 1.0 / (b * s))
    arc = AngularMargin(m)
    assert qmargin.reach(1.25, s, arc) == pytest.approx(2.0 * math.sin(m / 2) + 1.0 / (b * s))
    at_rest = qmargin.reach(1.25, s, arc, target_cosine=1.0)
    assert at_rest == pytest.approx(1.0 - math.cos(m) + 1.0 / (b * s))


@pytest.mark.parametrize("margin", [AngularMargin(0.7), MARGINS["combined"]])
def test_the_largest_gap_is_found_between_angles(margin):
    angles = torch.linspace(0.0, math.pi, 20_001, dtype=torch.float64)
    gaps = [qmargin.reach(1.5, 9.0, margin, target_cosine=float(c)) for c in angles.cos()]
    assert qmargin.reach(1.5, 9.0, margin) == pytest.approx(max(gaps), abs=1e-7)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_up_to_alpha_one_no_loss_is_ever_zero(alpha):
    assert qmargin.reach(alpha, 64.0, CosineMargin(0.35)) == math.inf


@pytest.mark.parametrize(
    "margin",
    [
        PriorMargin(torch.tensor(0.2)),
        CosineMargin(PerClass(torch.tensor([0.1, 0.2]))),
        PriorMargin(0.1) + AngularMargin(torch.tensor(0.3)),
        AdaFaceMargin(),
        MagFaceMargin(),
        ElasticMargin(),
    ],
    ids=lambda margin: type(margin).__name__,
)
def test_where_rows_differ_there_is_no_number(margin):
    assert qmargin.reach(1.5, 16.0, margin) is None


@dataclass(frozen=True, eq=False)
class Mine(StatelessMargin):
    """A user's margin; with ``by_norm`` it cannot do without norms."""

    shift: float = 0.3
    by_norm: bool = False

    def term(self, cosines, scale, labels, norms):
        shift = self.shift * (norms.mean() if self.by_norm else 1.0)
        return geometric_term(cosines - shift * cosines.square(), scale)


def test_any_margin_without_state_has_a_reach():
    assert qmargin.reach(1.5, 10.0, Mine()) == pytest.approx(0.3 + 0.2)
    assert qmargin.reach(1.5, 10.0, Mine(), target_cosine=0.5) == pytest.approx(0.075 + 0.2)
    assert qmargin.reach(1.5, 10.0, Mine(by_norm=True)) is None


def test_a_loss_knows_its_reach():
    loss = qmargin.q_margin(alpha=1.25, scale=32.0, margin=0.2)
    assert loss.reach == pytest.approx(qmargin.reach(1.25, 32.0, 0.2))
    assert qmargin.cosface().reach == math.inf
    other = qmargin.MarginLoss(qmargin.JensenShannon(), CosineMargin(0.2), scale=16.0)
    assert other.reach is None


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["prior", "cosine", "angular"]),
    alpha=st.floats(1.01, 3.0),
    share=st.floats(0.0, 1.0),
    least=st.floats(0.01, 1.99),
)
def test_a_margin_meets_a_reach(kind, alpha, share, least):
    scale = 1.0 / ((alpha - 1.0) * least)
    gap = least + share * (2.0 - least)
    margin = qmargin.margin_of_reach(gap, alpha, scale, kind=kind)
    made = {"prior": PriorMargin, "cosine": CosineMargin, "angular": AngularMargin}[kind](margin)
    assert margin >= 0.0
    assert qmargin.reach(alpha, scale, made) == pytest.approx(gap, rel=1e-9)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: qmargin.reach(17.0, 1.0), "alpha is 17"),
        (lambda: qmargin.reach(1.5, 0.0), "scale is 0"),
        (lambda: qmargin.reach(1.5, 1.0, "wide"), "margin is 'wide'"),
        (lambda: qmargin.reach(1.5, 1.0, target_cosine=1.5), r"1.5; choose one in \[-1, 1\]"),
        (lambda: qmargin.reach(1.5, 1.0, target_cosine=math.nan), "target_cosine is nan"),
        (lambda: qmargin.margin_of_reach(0.3, 1.25, 10.0), "needs a gap of 0.4 without any"),
        (lambda: qmargin.margin_of_reach(-1.0, 1.25, 10.0), "reach is -1"),
        (lambda: qmargin.margin_of_reach(2.1, 1.25, 10.0), "differ by at most 2"),
        (lambda: qmargin.margin_of_reach(0.5, 1.0, 10.0), "alpha is 1: .* above 1"),
        (lambda: qmargin.margin_of_reach(0.5, 1.5, 10.0, kind="magface"), "kind is 'magface'"),
        (lambda: qmargin.margin_of_reach(math.nan, 1.5, 10.0), "reach is nan"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
