"""Margins against their formulas restated with ``math`` and mpmath (M9, M10, M12)."""

import copy
import io
import itertools
import math
import statistics

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qmargin
from qmargin import (
    AdaFaceMargin,
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    ElasticMargin,
    MagFaceMargin,
    PerClass,
    PriorMargin,
    SumMargin,
)
from qmargin.errors import ConfigError, MarginWarning, ShapeError
from qmargin.losses.margins import ModuleSumMargin, TargetTerm, sine, warn_if_unreachable

SCALE = 16.0
SMALLEST_SINE = 2**-11.5
INSIDE = torch.linspace(-0.999, 0.999, 41, dtype=torch.float64)
COSINES = torch.tensor([0.9, 0.4, -0.2, -0.93, 0.65], dtype=torch.float64)
NORMS = torch.tensor([5.0, 18.0, 26.0, 70.0, 300.0], dtype=torch.float64)
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.25], dtype=torch.float64)
END_COSINES = (1.0, 1 - 2**-24, 1 - 2**-20, 0.999, 0.3, 0.0, -0.7, -1 + 2**-23, -1.0)
ANGULAR = (0.0, 0.5, 3.0)
COMBINED = ((1.0, 0.3, 0.2), (1.35, 0.0, 0.0), (4.0, 0.0, 0.0), (2.5, 1.0, 0.1))
FIXED = (
    PriorMargin(0.2),
    CosineMargin(0.35),
    *(AngularMargin(margin) for margin in ANGULAR),
    AngularMargin(0.5, "straight_through"),
    *(CombinedMargin(multiplier=a, angular=b, cosine=c) for a, b, c in COMBINED),
    PriorMargin(0.2) + AngularMargin(0.1),
)
ADAPTIVE = (
    AdaFaceMargin().eval(),
    MagFaceMargin(),
    ElasticMargin().eval(),
    ElasticMargin(variant="cos").eval(),
    (PriorMargin(0.1) + AdaFaceMargin()).eval(),
)
each_margin = pytest.mark.parametrize("margin", FIXED + ADAPTIVE, ids=str)
BUILDERS = (
    PriorMargin,
    CosineMargin,
    AngularMargin,
    lambda value: CombinedMargin(multiplier=1.5, angular=value, cosine=0.1),
)
each_builder = pytest.mark.parametrize("build", BUILDERS)


def wide(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def norms_like(cosines, norm=26.0):
    return torch.full_like(cosines, norm).detach()


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def angular_definition(cosine: float, margin: float) -> float:
    angle = math.acos(cosine)
    if angle > math.pi - margin:
        return cosine - 1 - math.cos(math.pi - margin)
    return math.cos(angle + margin)


def combined_definition(cosine: float, multiplier: float, angular: float, lowered: float) -> float:
    phi = multiplier * math.acos(cosine) + angular
    turns = int(phi // math.pi)
    return (-1) ** turns * math.cos(phi) - 2 * turns - lowered


def ada_definition(cosine, norm, mean, std, m=0.4, h=0.333) -> float:
    scaler = clip((clip(norm, 1e-3, 100.0) - mean) / (std + 1e-3) * h, -1.0, 1.0)
    angle = math.acos(clip(cosine, -1 + 1e-3, 1 - 1e-3))
    return math.cos(clip(angle - m * scaler, 1e-3, math.pi - 1e-3)) - (m + m * scaler)


def mag_margin(norm: float) -> float:
    return (0.8 - 0.45) / (110.0 - 10.0) * (clip(norm, 10.0, 110.0) - 10.0) + 0.45


def test_prior_margin_lowers_the_reference_and_leaves_the_logit():
    """M9."""
    logits, log_reference, penalty = PriorMargin(0.2)(INSIDE, SCALE)
    torch.testing.assert_close(logits, SCALE * INSIDE)
    torch.testing.assert_close(log_reference, torch.full_like(INSIDE, -0.2 * SCALE))
    assert penalty is None


GEOMETRIC = [
    (CosineMargin(0.35), lambda c: c - 0.35),
    *((AngularMargin(m), lambda c, m=m: angular_definition(c, m)) for m in ANGULAR),
    (AngularMargin(0.5, "straight_through"), lambda c: angular_definition(c, 0.5)),
    *(
        (
            CombinedMargin(multiplier=a, angular=b, cosine=c3),
            lambda c, s=(a, b, c3): combined_definition(c, *s),
        )
        for a, b, c3 in COMBINED
    ),
]


@pytest.mark.parametrize(
    ("margin", "definition"), GEOMETRIC, ids=[str(margin) for margin, _ in GEOMETRIC]
)
def test_geometric_margins_are_their_formulas(margin, definition):
    """M9, and what continues an angle past ``pi``."""
    term = margin(INSIDE, SCALE)
    torch.testing.assert_close(term.logits, SCALE * wide(map(definition, INSIDE.tolist())))
    assert not term.log_reference.any()


def test_sphereface_by_its_published_cases():
    """psi(angle) = (-1)^n cos(4 angle) - 2n on [n pi / 4, (n + 1) pi / 4]: 1, -1, -3, -5, -7."""
    angles = torch.arange(5, dtype=torch.float64) * math.pi / 4
    logits = CombinedMargin(multiplier=4)(angles.cos(), 1.0).logits
    torch.testing.assert_close(logits, wide([1, -1, -3, -5, -7]))


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
    for margin in (
        AngularMargin(0.5),
        CombinedMargin(angular=0.1),
        CombinedMargin(multiplier=VALUES),
        CombinedMargin(cosine=VALUES),
        CosineMargin(VALUES),
        PriorMargin(VALUES),
        PriorMargin(0.2) + AngularMargin(0.1),
        *ADAPTIVE,
    ):
        assert margin.effective(1.25, 32.0) is None
    assert PriorMargin(100.0).effective(2.0, 64.0) == math.inf


@each_margin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_finite_at_the_ends(margin, dtype):
    outside = 1 + 4 * torch.finfo(dtype).eps
    values = [1.0, -1.0, outside, -outside, -math.inf, math.nan, math.inf]
    cosines = torch.tensor(values, dtype=dtype, requires_grad=True)
    term = margin(cosines, SCALE, norms=norms_like(cosines))
    ends = margin(cosines.detach().clamp(-1, 1), SCALE, norms=norms_like(cosines))
    torch.testing.assert_close(term.logits[:4].detach(), ends.logits[:4], rtol=1e-5, atol=1e-5)
    assert term.logits[4] == -math.inf and term.logits[5].isnan()
    assert not term.logits[6].isfinite()
    (term.logits + term.log_reference)[:5].sum().backward()
    assert cosines.grad.isfinite().all()
    assert (cosines.grad >= -1e-3).all() and (cosines.grad <= 4 * 2897 * SCALE).all()


@each_margin
def test_gradients_agree_with_differences(margin):
    joints = (math.pi - 0.5, math.pi - 1.5, math.pi - 3.0, math.pi / 1.35, math.pi / 4, math.pi / 2)
    cosines = torch.linspace(-0.97, 0.97, 14, dtype=torch.float64)
    distance = (cosines.acos()[:, None] - wide(joints)).abs().amin(1)
    cosines = cosines[distance > 1e-3].requires_grad_()
    assert len(cosines) > 10

    def function(values):
        return tuple(margin(values, SCALE, norms=norms_like(values)))[:2]

    if "straight" in str(margin):
        (gradient,) = torch.autograd.grad(function(cosines)[0].sum(), cosines)
        assert (gradient == SCALE).all()
        return
    assert torch.autograd.gradcheck(function, (cosines,))
    assert torch.autograd.gradgradcheck(function, (cosines,))


@each_margin
@settings(max_examples=30, deadline=None)
@given(
    pair=st.tuples(*[st.floats(-1.0, 1.0)] * 2),
    norm=st.floats(0.0, 200.0),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_target_logit_never_increases_when_the_cosine_falls(margin, pair, norm, dtype):
    cosines = torch.tensor(sorted(pair), dtype=dtype)
    below, above = margin(cosines, 1.0, norms=norms_like(cosines, norm)).logits
    assert below <= above + 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("margin", FIXED[2:-1], ids=str)
def test_nothing_jumps_between_neighbouring_cosines(margin):
    angles = torch.linspace(0, math.pi, 20_001, dtype=torch.float64)
    steps = margin(angles.cos(), 1.0).logits.diff()
    assert (steps <= 1e-12).all()
    assert steps.abs().max() < 5 * math.pi / 20_000


@each_margin
def test_vmap_and_grad_equal_the_batch(margin):
    def logit(cosine, norm):
        return margin(cosine, SCALE, norms=norm).logits

    cosines = COSINES.clone().requires_grad_()
    logits = logit(cosines, NORMS)
    (gradient,) = torch.autograd.grad(logits.sum(), cosines)
    torch.testing.assert_close(torch.func.vmap(logit)(COSINES, NORMS), logits.detach())
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(logit))(COSINES, NORMS), gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [*(lambda m=m: m for m in FIXED), AdaFaceMargin, MagFaceMargin, ElasticMargin]
)
def test_compiled_margins_equal_plain_ones(build):
    torch.compiler.reset()
    plain, inner = build(), build()

    def function(cosines, norms):
        return inner(cosines, SCALE, norms=norms).logits

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for step in range(2):
        found = []
        for call in (lambda c, n: plain(c, SCALE, norms=n).logits, compiled):
            torch.manual_seed(step)
            cosines = COSINES.clone().requires_grad_()
            logits = call(cosines, NORMS + step)
            logits.square().sum().backward()
            found.append((logits.detach(), cosines.grad))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sine_is_exact_and_its_derivative_capped(dtype):
    cosines = torch.tensor([*END_COSINES, 1 - 1e-9], dtype=dtype, requires_grad=True)
    with mpmath.workdps(40):
        truth = wide(float(mpmath.sqrt(1 - mpmath.mpf(c) ** 2)) for c in cosines.tolist()).to(dtype)
    value = sine(cosines)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(value.detach(), truth, **close)
    value.sum().backward()
    c = cosines.detach().double()
    slope = -c / (1 - c).mul(1 + c).sqrt().clamp_min(SMALLEST_SINE)
    torch.testing.assert_close(cosines.grad.double(), slope, rtol=1e-5, atol=0.0)


@each_builder
def test_one_value_per_row_or_class(build):
    """As many classes as rows, so that only the wrapper tells the two kinds apart."""

    def term_of(margin, **inputs):
        return torch.stack(margin(COSINES, 8.0, **inputs)[:2])

    singles = torch.stack([term_of(build(value))[:, i] for i, value in enumerate(VALUES.tolist())])
    torch.testing.assert_close(term_of(build(VALUES)), singles.T)
    labels = torch.tensor([2, 0, 2, 4, 1])
    for dtype in (torch.int64, torch.int32):
        by_class = term_of(build(PerClass(VALUES)), labels=labels.to(dtype))
        torch.testing.assert_close(by_class, term_of(build(VALUES[labels])))
    for function in (
        lambda values: term_of(build(values)),
        lambda values: term_of(build(PerClass(values)), labels=labels),
    ):
        values = VALUES.clone().requires_grad_()
        assert torch.autograd.gradcheck(function, (values,))
        assert torch.autograd.gradgradcheck(function, (values,))


def test_a_learned_margin_moves_under_straight_through_gradients_too():
    value = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    exact, straight = (
        torch.autograd.grad(AngularMargin(value, kind)(COSINES, 8.0).logits.sum(), value)
        for kind in ("exact", "straight_through")
    )
    torch.testing.assert_close(straight, exact)


def test_a_label_past_the_end_is_nan_and_a_discarded_row_is_finite():
    values = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 2, -1])
    logits = CosineMargin(PerClass(values))(COSINES[:3], 8.0, labels=labels).logits
    assert logits.isnan().tolist() == [False, True, False]
    logits.where(labels == 1, 0.0).sum().backward()
    assert values.grad.tolist() == [0.0, -8.0]
    outside = AngularMargin(wide([0.2, -0.2, 4.0]))(COSINES[:3], 8.0).logits
    assert outside.isnan().tolist() == [False, True, True]


def test_a_margin_on_another_device_is_named():
    with pytest.raises(ConfigError, match=r"meta.*cpu"):
        CosineMargin(torch.rand(5, device="meta"))(COSINES, 8.0)
    on_meta = torch.empty(3, device="meta")
    assert CosineMargin(torch.tensor(0.1))(on_meta, 8.0).logits.device.type == "meta"


def test_equality_is_by_value_and_of_tensors_by_identity():
    assert AngularMargin(0.5) == AngularMargin(0.5)
    assert hash(AngularMargin(0.5)) == hash(AngularMargin(0.5))
    assert CosineMargin(VALUES) == CosineMargin(VALUES)
    assert CosineMargin(PerClass(VALUES)) == CosineMargin(PerClass(VALUES))
    assert PriorMargin(0.1) + CosineMargin(0.2) == CosineMargin(0.2) + PriorMargin(0.1)
    for other in (
        AngularMargin(0.5, "straight_through"),
        PriorMargin(0.5),
        CosineMargin(VALUES.clone()),
        CosineMargin(PerClass(VALUES)),
        0.5,
    ):
        assert other not in (AngularMargin(0.5), CosineMargin(0.5), CosineMargin(VALUES))


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.2", None, True, 1j])
@each_builder
def test_only_finite_numbers_are_margins(build, value):
    with pytest.raises(ConfigError, match="Margin"):
        build(value)


def per_class_term(**inputs):
    return PriorMargin(PerClass(torch.rand(4)))(COSINES, 8.0, **inputs)


@pytest.mark.parametrize(
    ("build", "error", "named"),
    [
        (lambda: AngularMargin(-0.1), ConfigError, "-0.1"),
        (lambda: AngularMargin(math.pi), ConfigError, "3.14"),
        (lambda: AngularMargin(0.5, "straight"), ConfigError, "'straight'"),
        (lambda: CombinedMargin(angular=30.0), ConfigError, "30"),
        (lambda: CombinedMargin(multiplier=0.0), ConfigError, "multiplier"),
        (lambda: CombinedMargin(multiplier=-1.0), ConfigError, "multiplier"),
        (lambda: PriorMargin.from_effective(0.1, alpha=0.5, scale=32.0), ConfigError, "0.0625"),
        (lambda: PriorMargin.from_effective(-0.1, alpha=1.5, scale=32.0), ConfigError, "-0.0625"),
        (lambda: PriorMargin.from_effective(0.1, alpha=0.0, scale=1.0), ConfigError, "alpha is 0"),
        (lambda: PriorMargin.from_effective(0.1, alpha=1.5, scale=-1.0), ConfigError, "scale"),
        (lambda: AdaFaceMargin(-0.1), ConfigError, "margin of AdaFace is -0.1"),
        (lambda: AdaFaceMargin(momentum=1.5), ConfigError, "momentum of AdaFace is 1.5"),
        (lambda: AdaFaceMargin(concentration=math.nan), ConfigError, "concentration of AdaFace"),
        (lambda: MagFaceMargin(lower_norm=0.0), ConfigError, "lower_norm"),
        (lambda: MagFaceMargin(lower_norm=110.0, upper_norm=10.0), ConfigError, "110 and 10"),
        (lambda: MagFaceMargin(lower_margin=0.9), ConfigError, "0.9 and 0.8"),
        (lambda: MagFaceMargin(upper_margin=4.0), ConfigError, "upper_margin of MagFace is 4"),
        (lambda: MagFaceMargin(penalty_weight=-1.0), ConfigError, "penalty_weight"),
        (lambda: ElasticMargin(-0.5), ConfigError, "margin of ElasticFace is -0.5"),
        (lambda: ElasticMargin(std=-0.1), ConfigError, "std of ElasticFace is -0.1"),
        (lambda: ElasticMargin(variant="angular"), ConfigError, "'angular'"),
        (lambda: PriorMargin(torch.tensor([1, 2, 3])), ShapeError, "int64"),
        (lambda: PriorMargin(torch.rand(3, 1)), ShapeError, r"\[3, 1\]"),
        *(
            (lambda values=values: PerClass(values), ShapeError, "PerClass")
            for values in (0.3, [0.1], torch.tensor([1, 2]), torch.rand(()), torch.rand(0))
        ),
        (lambda: PriorMargin(torch.rand(4))(COSINES, 8.0), ShapeError, r"\[4\].*\[5\]"),
        (per_class_term, ConfigError, "labels"),
        (lambda: per_class_term(labels=torch.tensor([0, 1])), ShapeError, r"\[5\].*\[2\]"),
        (lambda: per_class_term(labels=COSINES > 0), ShapeError, "bool"),
        *(
            (lambda margin=margin, norms=norms: margin(COSINES, 8.0, norms=norms), error, "norms")
            for margin in (AdaFaceMargin(), MagFaceMargin())
            for norms, error in (
                (None, ConfigError),
                (NORMS[:, None], ShapeError),
                (NORMS[:2], ShapeError),
                (NORMS.long(), ShapeError),
            )
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(build, error, named):
    with pytest.raises(error, match=named):
        build()


@pytest.mark.parametrize(
    "geometric", [CosineMargin(0.1), AngularMargin(0.1), CombinedMargin(), MagFaceMargin()], ids=str
)
def test_a_sum_takes_the_reference_of_one_and_the_logit_of_the_other(geometric):
    prior = PriorMargin(0.2)
    for summed in (prior + geometric, geometric + prior, SumMargin(geometric, prior)):
        assert summed == SumMargin(prior, geometric)
        term, expected = (margin(COSINES, SCALE, norms=NORMS) for margin in (summed, geometric))
        assert isinstance(term, TargetTerm)
        torch.testing.assert_close(term.logits, expected.logits)
        torch.testing.assert_close(term.penalty, expected.penalty)
        torch.testing.assert_close(term.log_reference, prior(COSINES, SCALE).log_reference)


def test_a_sum_with_state_is_a_module_with_the_parts_of_both():
    for margin in (PriorMargin(0.2) + AdaFaceMargin(), AdaFaceMargin() + PriorMargin(0.2)):
        assert isinstance(margin, ModuleSumMargin)
        assert set(margin.state_dict()) == {"geometric.running_mean", "geometric.running_std"}
        term = margin.eval()(COSINES, SCALE, norms=NORMS)
        expected = AdaFaceMargin().eval()(COSINES, SCALE, norms=NORMS)
        torch.testing.assert_close(term.logits, expected.logits)
        torch.testing.assert_close(term.log_reference, torch.full_like(COSINES, -0.2 * SCALE))


def test_a_sum_has_one_margin_of_each_kind():
    prior, cosine, angular = PriorMargin(0.2), CosineMargin(0.1), AngularMargin(0.1)
    summed = prior + AdaFaceMargin()
    for left, right in (
        *itertools.product((cosine, angular, prior + angular), repeat=2),
        (prior, prior),
        (prior, prior + cosine),
        (prior + cosine, prior),
        (angular, AdaFaceMargin()),
        (AdaFaceMargin(), ElasticMargin()),
        (ElasticMargin(), MagFaceMargin()),
        (ElasticMargin(), prior + cosine),
        (summed, AdaFaceMargin()),
        (prior, summed),
    ):
        with pytest.raises(ConfigError, match="cannot add"):
            left + right
    with pytest.raises(ConfigError, match="AdaFaceMargin"):
        SumMargin(prior, AdaFaceMargin())
    with pytest.raises(TypeError):
        prior + 0.5


def test_the_warning_points_at_the_line_of_the_caller_and_has_a_number():
    for build in (
        lambda: qmargin.MarginLoss(qmargin.Alpha(1.25), PriorMargin(0.5), scale=32.0),
        lambda: qmargin.q_margin(margin=0.5),
        lambda: qmargin.cosface(margin=2.5),
    ):
        with pytest.warns(MarginWarning) as caught:
            build()
        assert caught[0].filename == __file__
    largest = PriorMargin.from_effective(1.5, alpha=1.25, scale=32.0).margin
    for cosine, remedy in (
        (0.5, f"PriorMargin below {largest:.3g}"),
        (2.5, "CosineMargin below 2"),
    ):
        with pytest.warns(MarginWarning, match=remedy):
            warn_if_unreachable(PriorMargin(0.5) + CosineMargin(cosine), alpha=1.25, scale=32.0)


def test_adaface_moves_its_statistics_before_it_uses_them():
    margin = AdaFaceMargin(0.3, concentration=0.5, momentum=0.2)
    mean, std = 20.0, 100.0
    for step in range(3):
        norms = NORMS + step
        logits = margin(COSINES, SCALE, norms=norms).logits
        clipped = [clip(norm, 1e-3, 100.0) for norm in norms.tolist()]
        mean = 0.2 * statistics.mean(clipped) + 0.8 * mean
        std = 0.2 * statistics.stdev(clipped) + 0.8 * std
        rows = zip(COSINES.tolist(), norms.tolist(), strict=True)
        expected = wide(ada_definition(c, n, mean, std, m=0.3, h=0.5) for c, n in rows)
        torch.testing.assert_close(logits, SCALE * expected, rtol=1e-5, atol=1e-5)
        assert margin.running_mean.item() == pytest.approx(mean, rel=1e-6)
        assert margin.running_std.item() == pytest.approx(std, rel=1e-6)


def test_adaface_statistics_leave_out_discarded_and_broken_rows():
    norms = torch.tensor([10.0, 30.0, math.nan, math.inf, 77.0])
    labels = torch.tensor([0, 1, 2, 3, -1])
    margin, clean = AdaFaceMargin(), AdaFaceMargin()
    logits = margin(COSINES, SCALE, norms=norms, labels=labels).logits
    clean(COSINES[:2], SCALE, norms=norms[:2])
    torch.testing.assert_close(margin.state_dict(), clean.state_dict())
    assert logits.isnan().tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("rows, moves", [(0, (False, False)), (1, (True, False))])
def test_adaface_statistics_survive_tiny_batches(rows, moves):
    margin = AdaFaceMargin()
    margin(COSINES[:rows], SCALE, norms=NORMS[:rows])
    now = margin.running_mean.item(), margin.running_std.item()
    assert tuple(a != b for a, b in zip(now, (20.0, 100.0), strict=True)) == moves
    assert all(map(math.isfinite, now))


def test_adaface_statistics_travel_and_norms_are_not_trained():
    norms, cosines = NORMS.clone().requires_grad_(), COSINES.clone().requires_grad_()
    margin, other = AdaFaceMargin(), AdaFaceMargin()
    margin(cosines, SCALE, norms=norms).logits.sum().backward()
    assert norms.grad is None and cosines.grad.isfinite().all()
    other.load_state_dict(margin.state_dict())
    assert other.running_mean == margin.running_mean
    assert margin.bfloat16().running_mean.dtype == torch.float32
    assert margin.double().running_std.dtype == torch.float64


def test_magface_is_its_formula_and_penalty_and_trains_norms_inside_their_range():
    term = MagFaceMargin()(COSINES, SCALE, norms=NORMS)
    rows = zip(COSINES.tolist(), NORMS.tolist(), strict=True)
    expected = wide(angular_definition(c, mag_margin(n)) for c, n in rows)
    torch.testing.assert_close(term.logits, SCALE * expected)
    clipped = NORMS.clamp(10, 110)
    torch.testing.assert_close(term.penalty, 35 * (clipped / 110**2 + 1 / clipped))
    norms = NORMS[1:4].clone().requires_grad_()
    cosines = COSINES[:3].clone().requires_grad_()

    def function(cosines, norms):
        logits, _, penalty = MagFaceMargin()(cosines, SCALE, norms=norms)
        return logits, penalty

    assert torch.autograd.gradcheck(function, (cosines, norms))
    assert torch.autograd.gradgradcheck(function, (cosines, norms))
    outside = wide([5.0, 300.0, 50.0]).requires_grad_()
    function(cosines, outside)[1].sum().backward()
    assert (outside.grad != 0).tolist() == [False, False, True]


@pytest.mark.parametrize(
    "variant, fixed", [("arc", AngularMargin(0.5)), ("cos", CosineMargin(0.35))]
)
def test_elastic_margin_is_its_mean_in_evaluation_mode(variant, fixed):
    margin = ElasticMargin(variant=variant).eval()
    torch.testing.assert_close(margin(COSINES, SCALE).logits, fixed(COSINES, SCALE).logits)


@pytest.mark.parametrize("plus, std", [(False, 0.05), (True, 0.02)])
def test_elastic_draws_are_gaussian(plus, std):
    margin = ElasticMargin(variant="cos", plus=plus, seed=5)
    drawn = -margin(torch.zeros(20_000, dtype=torch.float64), 1.0).logits
    assert drawn.mean().item() == pytest.approx(0.35, abs=std / 30)
    assert drawn.std().item() == pytest.approx(std, rel=0.03)
    assert ((drawn - 0.35).abs() < std).double().mean().item() == pytest.approx(0.683, abs=0.02)


def test_elastic_plus_gives_the_largest_margin_to_the_smallest_cosine():
    plain, plus = (
        COSINES - ElasticMargin(std=0.1, variant="cos", plus=plus, seed=1)(COSINES, 1.0).logits
        for plus in (False, True)
    )
    torch.testing.assert_close(plus.sort().values, plain.sort().values)
    assert plus.argsort().tolist() == COSINES.argsort(descending=True).tolist()


def test_elastic_draws_repeat_with_the_seed_and_resume_from_a_checkpoint():
    first, second = ElasticMargin(seed=7), ElasticMargin(seed=7)
    one = first(COSINES, SCALE).logits
    torch.manual_seed(99)  # the seed of everything else plays no part
    assert torch.equal(one, second(COSINES, SCALE).logits)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed, copied = ElasticMargin(seed=7), copy.deepcopy(first)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    two = first(COSINES, SCALE).logits
    assert not torch.equal(one, two)
    assert torch.equal(resumed(COSINES, SCALE).logits, two)
    assert torch.equal(copied(COSINES, SCALE).logits, two)
    free = []
    for _ in range(2):
        torch.manual_seed(3)
        free.append(ElasticMargin()(COSINES, SCALE).logits)
    assert torch.equal(*free)


def test_a_generator_saved_on_another_device_loads_and_starts_from_its_seed():
    """A CUDA generator's position means nothing to a CPU; loading must not ask for the device."""
    fresh, loaded = ElasticMargin(seed=3), ElasticMargin(seed=3)
    position = {"device": "cuda:1", "generator": torch.zeros(16, dtype=torch.uint8)}
    loaded.load_state_dict({"_extra_state": position})
    assert loaded.get_extra_state()["device"] == "cuda:1"  # until the first draw
    assert torch.equal(loaded(COSINES, 1.0).logits, fresh(COSINES, 1.0).logits)
