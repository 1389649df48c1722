"""Margins against their formulas restated with ``math`` and mpmath (M9, M10, M12)."""

import itertools
import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qmargin
from qmargin.errors import ConfigError, MarginWarning
from qmargin.losses.margins import (
    SMALLEST_SINE,
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    PriorMargin,
    SumMargin,
    TargetTerm,
    sine,
    warn_if_unreachable,
    widened_cosines,
)

END_COSINES = (1.0, 1 - 2**-24, 1 - 2**-20, 0.999, 0.3, 0.0, -0.7, -1 + 2**-23, -1.0)
ANGULAR = (0.0, 0.5, 3.0)
COMBINED = ((1.0, 0.3, 0.2), (1.35, 0.0, 0.0), (4.0, 0.0, 0.0), (2.5, 1.0, 0.1))
MARGINS = (
    PriorMargin(0.2),
    CosineMargin(0.35),
    *(AngularMargin(margin) for margin in ANGULAR),
    AngularMargin(0.5, "straight_through"),
    *(CombinedMargin(multiplier=a, angular=b, cosine=c) for a, b, c in COMBINED),
    PriorMargin(0.2) + AngularMargin(0.1),
)
SCALE = 16.0
INSIDE = torch.linspace(-0.999, 0.999, 41, dtype=torch.float64)
each_margin = pytest.mark.parametrize("margin", MARGINS, ids=str)


def angular_definition(cosine: float, margin: float) -> float:
    angle = math.acos(cosine)
    if angle > math.pi - margin:
        return cosine - 1 - math.cos(math.pi - margin)
    return math.cos(angle + margin)


def combined_definition(cosine: float, multiplier: float, angular: float, lowered: float) -> float:
    phi = multiplier * math.acos(cosine) + angular
    turns = int(phi // math.pi)
    return (-1) ** turns * math.cos(phi) - 2 * turns - lowered


def test_prior_margin_lowers_the_reference_and_leaves_the_logit():
    """M9."""
    logits, log_reference, penalty = PriorMargin(0.2)(INSIDE, SCALE)
    torch.testing.assert_close(logits, SCALE * INSIDE)
    torch.testing.assert_close(log_reference, torch.full_like(INSIDE, -0.2 * SCALE))
    assert penalty is None


def test_cosine_margin_lowers_the_cosine():
    """M9."""
    term = CosineMargin(0.35)(INSIDE, SCALE)
    torch.testing.assert_close(term.logits, SCALE * (INSIDE - 0.35))
    assert not term.log_reference.any()


@pytest.mark.parametrize("margin", ANGULAR)
@pytest.mark.parametrize("gradient", ["exact", "straight_through"])
def test_angular_margin_widens_the_angle(margin, gradient):
    """M9, and the line that continues it."""
    term = AngularMargin(margin, gradient)(INSIDE, SCALE)
    expected = [SCALE * angular_definition(c, margin) for c in INSIDE.tolist()]
    torch.testing.assert_close(term.logits, torch.tensor(expected, dtype=torch.float64))
    assert not term.log_reference.any()


@pytest.mark.parametrize("multiplier, angular, cosine", COMBINED)
def test_combined_margin_is_its_formula(multiplier, angular, cosine):
    margin = CombinedMargin(multiplier=multiplier, angular=angular, cosine=cosine)
    expected = [combined_definition(c, multiplier, angular, cosine) for c in INSIDE.tolist()]
    logits = margin(INSIDE, SCALE).logits
    torch.testing.assert_close(logits, SCALE * torch.tensor(expected, dtype=torch.float64))


def test_sphereface_by_its_published_cases():
    """psi(angle) = (-1)^n cos(4 angle) - 2n on [n pi / 4, (n + 1) pi / 4]: 1, -1, -3, -5, -7."""
    angles = torch.arange(5, dtype=torch.float64) * math.pi / 4
    logits = CombinedMargin(multiplier=4)(angles.cos(), 1.0).logits
    torch.testing.assert_close(logits, torch.tensor([1.0, -1, -3, -5, -7], dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.5, 1 - 1e-9, 1.0, 1 + 1e-15, 1 + 1e-9, 1.25, 3.0])
@pytest.mark.parametrize("margin", [-0.1, 0.0, 1e-12, 0.5])
def test_effective_margin_is_its_formula_and_inverts(alpha, margin):
    """M12, in 60 digits."""
    scale = 35.0
    with mpmath.workdps(60):
        rate = (mpmath.mpf(alpha) - 1) * scale
        truth = float(margin if rate == 0 else mpmath.expm1(rate * margin) / rate)
    effective = PriorMargin(margin).effective(alpha, scale)
    assert effective == pytest.approx(truth, rel=1e-14)
    back = PriorMargin.from_effective(effective, alpha=alpha, scale=scale).margin
    assert back == pytest.approx(margin, rel=1e-6, abs=1e-15)


def test_effective_margins_of_the_other_margins():
    """M12: the gaps of a sum add; an angle has none that is one number."""
    assert CosineMargin(0.35).effective(1.25, 32.0) == 0.35
    assert CombinedMargin(cosine=0.35).effective(1.25, 32.0) == 0.35
    summed = PriorMargin(0.1) + CosineMargin(0.3)
    assert summed.effective(1.25, 32.0) == 0.3 + PriorMargin(0.1).effective(1.25, 32.0)
    tensor = torch.tensor([0.1, 0.2])
    for margin in (
        AngularMargin(0.5),
        CombinedMargin(angular=0.1),
        CombinedMargin(multiplier=tensor),
        CombinedMargin(cosine=tensor),
        CosineMargin(tensor),
        PriorMargin(tensor),
        PriorMargin(0.2) + AngularMargin(0.1),
    ):
        assert margin.effective(1.25, 32.0) is None
    assert PriorMargin(100.0).effective(2.0, 64.0) == math.inf


@each_margin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_finite_at_the_ends(margin, dtype):
    outside = 1 + 4 * torch.finfo(dtype).eps
    cosines = torch.tensor([1.0, -1.0, outside, -outside], dtype=dtype, requires_grad=True)
    term = margin(cosines, SCALE)
    ends = margin(cosines.detach().clamp(-1, 1), SCALE)
    torch.testing.assert_close(term.logits.detach(), ends.logits, rtol=1e-5, atol=1e-5)
    (term.logits + term.log_reference).sum().backward()
    assert cosines.grad.isfinite().all()
    assert (cosines.grad >= -1e-3).all()
    assert (cosines.grad <= 4 * 2897 * SCALE).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", ANGULAR)
def test_angular_margin_at_the_ends_is_exact_and_its_gradient_capped(margin, dtype):
    cosines = torch.tensor([1.0, -1.0], dtype=dtype, requires_grad=True)
    logits = AngularMargin(margin)(cosines, 1.0).logits
    expected = torch.tensor([math.cos(margin), math.cos(margin) - 2], dtype=dtype)
    torch.testing.assert_close(logits.detach(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    logits[0].backward()
    cap = math.cos(margin) + math.sin(margin) * 2**11.5
    assert cosines.grad[0].item() == pytest.approx(cap, rel=1e-5)


@each_margin
def test_non_finite_cosines_stay_non_finite(margin):
    cosines = torch.tensor([-math.inf, math.nan, math.inf, 0.5], requires_grad=True)
    logits = margin(cosines, SCALE).logits
    assert logits[0] == -math.inf
    assert logits[1].isnan()
    assert not logits[2].isfinite()
    assert logits[3].isfinite()
    logits[[0, 3]].sum().backward()
    assert cosines.grad.isfinite().all()


@each_margin
def test_gradients_agree_with_differences(margin):
    joints = (math.pi - 0.5, math.pi - 1.5, math.pi - 3.0, math.pi / 1.35, math.pi / 4, math.pi / 2)
    cosines = torch.linspace(-0.97, 0.97, 14, dtype=torch.float64)
    distance = (cosines.acos()[:, None] - torch.tensor(joints, dtype=torch.float64)).abs().amin(1)
    cosines = cosines[distance > 1e-3].requires_grad_()
    assert len(cosines) > 10

    def function(values):
        term = margin(values, SCALE)
        return term.logits, term.log_reference

    if "straight" in str(margin):
        (gradient,) = torch.autograd.grad(function(cosines)[0].sum(), cosines)
        assert (gradient == SCALE).all()
        return
    assert torch.autograd.gradcheck(function, (cosines,))
    assert torch.autograd.gradgradcheck(function, (cosines,))


@each_margin
@settings(max_examples=40, deadline=None)
@given(pair=st.tuples(*[st.floats(-1.0, 1.0)] * 2), dtype=st.sampled_from(["float32", "float64"]))
def test_the_target_logit_never_increases_when_the_cosine_falls(margin, pair, dtype):
    kind = getattr(torch, dtype)
    low, high = torch.tensor(sorted(pair), dtype=kind)
    below, above = margin(torch.stack([low, high]), 1.0).logits
    assert below <= above + 16 * torch.finfo(kind).eps


@pytest.mark.parametrize("margin", MARGINS[2:-1], ids=str)
def test_nothing_jumps_between_neighbouring_cosines(margin):
    angles = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    steps = margin(angles.cos(), 1.0).logits.diff()
    assert (steps <= 1e-12).all()
    assert steps.abs().max() < 5 * math.pi / 20_000


@each_margin
def test_vmap_and_grad_equal_the_batch(margin):
    def logit(cosine):
        return margin(cosine, SCALE).logits

    cosines = INSIDE.clone().requires_grad_()
    logits = logit(cosines)
    (gradient,) = torch.autograd.grad(logits.sum(), cosines)
    torch.testing.assert_close(torch.func.vmap(logit)(INSIDE), logits.detach())
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(logit))(INSIDE), gradient)


@pytest.mark.slow
@each_margin
def test_compiled_margins_equal_plain_ones(margin):
    torch.compiler.reset()

    def function(cosines):
        return margin(cosines, SCALE).logits

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        cosines = torch.linspace(-1, 1, 21, dtype=torch.float64).requires_grad_()
        logits = call(cosines)
        logits.square().sum().backward()
        results.append((logits.detach(), cosines.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "geometric", [CosineMargin(0.1), AngularMargin(0.1), CombinedMargin()], ids=str
)
def test_a_sum_takes_the_reference_of_one_and_the_logit_of_the_other(geometric):
    prior = PriorMargin(0.2)
    for summed in (prior + geometric, geometric + prior, SumMargin(geometric, prior)):
        assert summed == SumMargin(prior, geometric)
        term = summed(INSIDE, SCALE)
        assert isinstance(term, TargetTerm)
        torch.testing.assert_close(term.logits, geometric(INSIDE, SCALE).logits)
        torch.testing.assert_close(term.log_reference, prior(INSIDE, SCALE).log_reference)


def test_a_sum_has_one_margin_of_each_kind():
    prior, cosine, angular = PriorMargin(0.2), CosineMargin(0.1), AngularMargin(0.1)
    for left, right in itertools.product((cosine, angular, prior + angular), repeat=2):
        with pytest.raises(ConfigError, match="cannot add"):
            left + right
    for left, right in ((prior, prior), (prior, prior + cosine), (prior + cosine, prior)):
        with pytest.raises(ConfigError, match="cannot add"):
            left + right
    with pytest.raises(TypeError):
        prior + 0.5


def test_the_warning_points_at_the_line_of_the_caller():
    for build in (
        lambda: qmargin.MarginLoss(qmargin.Alpha(1.25), PriorMargin(0.5), scale=32.0),
        lambda: qmargin.q_margin(margin=0.5),
        lambda: (
            qmargin.q_margin_face(reduction="mean", ignore_index=-1)
            and qmargin.cosface_speaker()
            and qmargin.cosface(margin=2.5)
        ),
    ):
        with pytest.warns(MarginWarning) as caught:
            build()
        assert caught[0].filename == __file__


def test_the_remedy_of_a_sum_has_a_number():
    margin = PriorMargin(0.5) + CosineMargin(0.5)
    largest = PriorMargin.from_effective(1.5, alpha=1.25, scale=32.0).margin
    with pytest.warns(MarginWarning, match=f"lower the PriorMargin below {largest:.3g}"):
        warn_if_unreachable(margin, alpha=1.25, scale=32.0)
    with pytest.warns(MarginWarning, match="lower the CosineMargin below 2"):
        warn_if_unreachable(PriorMargin(0.5) + CosineMargin(2.5), alpha=1.25, scale=32.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sine_is_exact_up_to_the_ends(dtype):
    cosines = torch.tensor(END_COSINES, dtype=dtype)
    with mpmath.workdps(40):
        truth = [float(mpmath.sqrt(1 - mpmath.mpf(c) ** 2)) for c in cosines.tolist()]
    expected = torch.tensor(truth, dtype=torch.float64).to(dtype)
    torch.testing.assert_close(sine(cosines), expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivative_of_the_sine_is_capped_and_otherwise_true(dtype):
    cosines = torch.tensor([*END_COSINES, 1 - 1e-9], dtype=dtype, requires_grad=True)
    sine(cosines).sum().backward()
    c = cosines.detach().double()
    truth = -c / (1 - c).mul(1 + c).sqrt().clamp_min(SMALLEST_SINE)
    torch.testing.assert_close(cosines.grad.double(), truth, rtol=1e-5, atol=0.0)


def test_widened_cosines_take_one_margin_per_row():
    cosines = torch.tensor([0.3, 0.3, -0.95], dtype=torch.float64)
    margins = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    expected = [0.3, math.cos(math.acos(0.3) + 0.5), -0.95 - 1 + math.cos(0.5)]
    torch.testing.assert_close(
        widened_cosines(cosines, margins), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: PriorMargin.from_effective(0.1, alpha=0.5, scale=32.0), "below 0.0625"),
        (lambda: PriorMargin.from_effective(-0.1, alpha=1.5, scale=32.0), "above -0.0625"),
        (lambda: PriorMargin.from_effective(0.1, alpha=0.0, scale=1.0), "alpha is 0"),
        (lambda: PriorMargin.from_effective(0.1, alpha=1.5, scale=-1.0), "scale is -1"),
        (lambda: AngularMargin(0.5, "straight"), "'straight'"),
        (lambda: CombinedMargin(multiplier=0.0), "multiplier"),
        (lambda: CombinedMargin(multiplier=-1.0), "multiplier"),
    ],
)
def test_impossible_settings_are_named(build, named):
    with pytest.raises(ConfigError, match=named):
        build()
