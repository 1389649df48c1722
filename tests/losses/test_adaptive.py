"""AdaFace, MagFace and ElasticFace against their published formulas, restated with ``math``."""

import copy
import io
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.errors import ConfigError, ShapeError
from qmargin.losses.margins import AdaFaceMargin, ElasticMargin, MagFaceMargin
from qmargin.losses.margins import (
    AngularMargin,
    CosineMargin,
    ModuleSumMargin,
    PriorMargin,
    SumMargin,
)

SCALE = 64.0
COSINES = torch.tensor([0.9, 0.4, -0.2, -0.93, 0.65], dtype=torch.float64)
NORMS = torch.tensor([5.0, 18.0, 26.0, 70.0, 300.0], dtype=torch.float64)
FROZEN = (
    AdaFaceMargin().eval(),
    MagFaceMargin(),
    ElasticMargin().eval(),
    ElasticMargin(variant="cos").eval(),
    (PriorMargin(0.1) + AdaFaceMargin()).eval(),
)
each_frozen = pytest.mark.parametrize("margin", FROZEN, ids=lambda m: type(m).__name__)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ada_definition(cosine, norm, mean, std, m=0.4, h=0.333) -> float:
    scaler = clip((clip(norm, 1e-3, 100.0) - mean) / (std + 1e-3) * h, -1.0, 1.0)
    g_angle = -m * scaler
    g_add = m + m * scaler
    angle = math.acos(clip(cosine, -1 + 1e-3, 1 - 1e-3))
    return math.cos(clip(angle + g_angle, 1e-3, math.pi - 1e-3)) - g_add


def mag_definition(cosine, norm, l_a=10.0, u_a=110.0, l_m=0.45, u_m=0.8) -> float:
    a = clip(norm, l_a, u_a)
    margin = (u_m - l_m) / (u_a - l_a) * (a - l_a) + l_m
    angle = math.acos(cosine)
    if angle > math.pi - margin:
        return cosine - 1 - math.cos(math.pi - margin)
    return math.cos(angle + margin)


def tensor_of(function, *columns):
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return torch.tensor([function(*row) for row in rows], dtype=torch.float64)


def test_adaface_moves_its_statistics_before_it_uses_them():
    margin = AdaFaceMargin(0.3, concentration=0.5, momentum=0.2)
    mean, std = 20.0, 100.0
    for step in range(3):
        norms = NORMS + step
        logits = margin(COSINES, SCALE, norms=norms).logits
        clipped = [clip(norm, 1e-3, 100.0) for norm in norms.tolist()]
        mean = 0.2 * statistics.mean(clipped) + 0.8 * mean
        std = 0.2 * statistics.stdev(clipped) + 0.8 * std
        expected = [
            ada_definition(c, n, mean, std, m=0.3, h=0.5)
            for c, n in zip(COSINES.tolist(), norms.tolist(), strict=True)
        ]
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(logits, SCALE * expected, rtol=1e-5, atol=1e-5)
        assert margin.running_mean.item() == pytest.approx(mean, rel=1e-6)
        assert margin.running_std.item() == pytest.approx(std, rel=1e-6)


def test_adaface_is_arcface_for_poor_and_cosface_for_average_samples():
    margin = AdaFaceMargin(0.4).eval()
    margin.running_mean.fill_(50.0)
    margin.running_std.fill_(1.0)
    cosines = COSINES[[0, 1, 2, 4]]
    poor = margin(cosines, SCALE, norms=torch.full_like(cosines, 1.0)).logits
    torch.testing.assert_close(poor, AngularMargin(0.4)(cosines, SCALE).logits)
    average = margin(cosines, SCALE, norms=torch.full_like(cosines, 50.0)).logits
    torch.testing.assert_close(average, CosineMargin(0.4)(cosines, SCALE).logits)


def test_adaface_statistics_leave_out_discarded_and_broken_rows():
    norms = torch.tensor([10.0, 30.0, math.nan, math.inf, 77.0])
    labels = torch.tensor([0, 1, 2, 3, -1])
    margin, clean = AdaFaceMargin(), AdaFaceMargin()
    logits = margin(COSINES, SCALE, norms=norms, labels=labels).logits
    clean(COSINES[:2], SCALE, norms=norms[:2])
    torch.testing.assert_close(margin.running_mean, clean.running_mean)
    torch.testing.assert_close(margin.running_std, clean.running_std)
    assert logits.isnan().tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("rows, moves", [(0, (False, False)), (1, (True, False))])
def test_adaface_statistics_survive_tiny_batches(rows, moves):
    margin = AdaFaceMargin()
    margin(COSINES[:rows], SCALE, norms=NORMS[:rows])
    now = margin.running_mean.item(), margin.running_std.item()
    assert tuple(a != b for a, b in zip(now, (20.0, 100.0), strict=True)) == moves
    assert all(map(math.isfinite, now))


def test_adaface_does_not_train_norms():
    norms = NORMS.clone().requires_grad_()
    cosines = COSINES.clone().requires_grad_()
    AdaFaceMargin()(cosines, SCALE, norms=norms).logits.sum().backward()
    assert norms.grad is None
    assert cosines.grad.isfinite().all()


def test_adaface_statistics_travel_with_the_module():
    margin = AdaFaceMargin()
    margin(COSINES, SCALE, norms=NORMS)
    other = AdaFaceMargin()
    other.load_state_dict(margin.state_dict())
    assert other.running_mean == margin.running_mean
    assert margin.bfloat16().running_mean.dtype == torch.float32
    assert margin.double().running_std.dtype == torch.float64


def test_magface_is_its_formula_and_penalty():
    term = MagFaceMargin()(COSINES, SCALE, norms=NORMS)
    torch.testing.assert_close(term.logits, SCALE * tensor_of(mag_definition, COSINES, NORMS))
    expected = tensor_of(lambda n: 35 * (clip(n, 10, 110) / 110**2 + 1 / clip(n, 10, 110)), NORMS)
    torch.testing.assert_close(term.penalty, expected)
    assert not term.log_reference.any()


def test_magface_trains_norms_inside_their_range():
    norms = NORMS[1:4].clone().requires_grad_()
    cosines = COSINES[:3].clone().requires_grad_()

    def function(cosines, norms):
        logits, _, penalty = MagFaceMargin()(cosines, SCALE, norms=norms)
        return logits, penalty

    assert torch.autograd.gradcheck(function, (cosines, norms))
    assert torch.autograd.gradgradcheck(function, (cosines, norms))
    outside = torch.tensor([5.0, 300.0, 50.0], dtype=torch.float64, requires_grad=True)
    function(cosines, outside)[1].sum().backward()
    assert (outside.grad != 0).tolist() == [False, False, True]


@pytest.mark.parametrize("variant, mean", [("arc", 0.5), ("cos", 0.35)])
def test_elastic_margin_is_its_mean_in_evaluation_mode(variant, mean):
    fixed = AngularMargin(mean) if variant == "arc" else CosineMargin(mean)
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
    drawn = {}
    for plus in (False, True):
        margin = ElasticMargin(std=0.1, variant="cos", plus=plus, seed=1)
        drawn[plus] = COSINES - margin(COSINES, 1.0).logits
    torch.testing.assert_close(drawn[True].sort().values, drawn[False].sort().values)
    assert drawn[True].argsort().tolist() == COSINES.argsort(descending=True).tolist()


def test_elastic_draws_repeat_with_the_seed_and_differ_between_steps():
    first, second = ElasticMargin(seed=7), ElasticMargin(seed=7)
    one = first(COSINES, SCALE).logits
    torch.manual_seed(99)  # the seed of everything else plays no part
    assert torch.equal(one, second(COSINES, SCALE).logits)
    assert not torch.equal(one, first(COSINES, SCALE).logits)
    torch.manual_seed(3)
    free = ElasticMargin()(COSINES, SCALE).logits
    torch.manual_seed(3)
    assert torch.equal(free, ElasticMargin()(COSINES, SCALE).logits)


def test_elastic_draws_resume_from_a_checkpoint():
    margin = ElasticMargin(seed=7)
    margin(COSINES, SCALE)
    file = io.BytesIO()
    torch.save(margin.state_dict(), file)
    file.seek(0)
    resumed, copied = ElasticMargin(seed=7), copy.deepcopy(margin)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    expected = margin(COSINES, SCALE).logits
    assert torch.equal(resumed(COSINES, SCALE).logits, expected)
    assert torch.equal(copied(COSINES, SCALE).logits, expected)
    ElasticMargin().load_state_dict(ElasticMargin().state_dict())


@each_frozen
@settings(max_examples=40, deadline=None)
@given(pair=st.tuples(*[st.floats(-1.0, 1.0)] * 2), norm=st.floats(0.0, 200.0))
def test_the_target_logit_never_increases_when_the_cosine_falls(margin, pair, norm):
    cosines = torch.tensor(sorted(pair), dtype=torch.float64)
    below, above = margin(cosines, 1.0, norms=torch.full_like(cosines, norm)).logits
    assert below <= above + 1e-14


@each_frozen
def test_gradients_agree_with_differences(margin):
    cosines = COSINES.clone().requires_grad_()

    def function(values):
        return margin(values, SCALE, norms=NORMS).logits

    assert torch.autograd.gradcheck(function, (cosines,))
    assert torch.autograd.gradgradcheck(function, (cosines,))


@each_frozen
def test_ends_are_finite_and_non_finite_cosines_stay(margin):
    values = [1.0, -1.0, 1 + 1e-6, -1 - 1e-6, -math.inf, math.nan, math.inf]
    cosines = torch.tensor(values, requires_grad=True)
    logits = margin(cosines, SCALE, norms=torch.full_like(cosines, 20.0).detach()).logits
    assert logits[:4].isfinite().all()
    assert logits[4] == -math.inf
    assert logits[5].isnan()
    assert not logits[6].isfinite()
    logits[:5].sum().backward()
    assert cosines.grad.isfinite().all()


@each_frozen
def test_vmap_and_grad_equal_the_batch(margin):
    def logit(cosine, norm):
        return margin(cosine, SCALE, norms=norm).logits

    cosines = COSINES.clone().requires_grad_()
    logits = logit(cosines, NORMS)
    (gradient,) = torch.autograd.grad(logits.sum(), cosines)
    torch.testing.assert_close(torch.func.vmap(logit)(COSINES, NORMS), logits.detach())
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(logit))(COSINES, NORMS), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("build", [AdaFaceMargin, MagFaceMargin, ElasticMargin])
def test_compiled_margins_equal_plain_ones(build):
    torch.compiler.reset()
    plain, inner = build(), build()

    def function(cosines, norms):
        return inner(cosines, SCALE, norms=norms).logits

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for step in range(2):
        torch.manual_seed(step)
        expected = plain(COSINES, SCALE, norms=NORMS + step).logits
        torch.manual_seed(step)
        torch.testing.assert_close(compiled(COSINES, NORMS + step), expected)


def test_a_sum_with_state_is_a_module_with_the_parts_of_both():
    for build in (lambda a, b: a + b, lambda a, b: b + a):
        margin = build(PriorMargin(0.2), AdaFaceMargin())
        assert isinstance(margin, ModuleSumMargin)
        assert set(margin.state_dict()) == {"geometric.running_mean", "geometric.running_std"}
        term = margin.eval()(COSINES, SCALE, norms=NORMS)
        expected = AdaFaceMargin().eval()(COSINES, SCALE, norms=NORMS)
        torch.testing.assert_close(term.logits, expected.logits)
        torch.testing.assert_close(term.log_reference, torch.full_like(COSINES, -0.2 * SCALE))
        assert margin.effective(1.25, SCALE) is None
    term = (PriorMargin(0.2) + MagFaceMargin())(COSINES, SCALE, norms=NORMS)
    assert term.penalty is not None


def test_sums_that_mean_nothing_are_refused():
    summed = PriorMargin(0.2) + AdaFaceMargin()
    for build in (
        lambda: AngularMargin(0.1) + AdaFaceMargin(),
        lambda: AdaFaceMargin() + ElasticMargin(),
        lambda: ElasticMargin() + MagFaceMargin(),
        lambda: ElasticMargin() + (PriorMargin(0.2) + CosineMargin(0.1)),
        lambda: summed + AdaFaceMargin(),
        lambda: PriorMargin(0.1) + summed,
    ):
        with pytest.raises(ConfigError, match="cannot add"):
            build()
    with pytest.raises(ConfigError, match="AdaFaceMargin"):
        SumMargin(PriorMargin(0.1), AdaFaceMargin())


@pytest.mark.parametrize("margin", [AdaFaceMargin(), MagFaceMargin()])
def test_missing_or_misshapen_norms_are_explained(margin):
    with pytest.raises(ConfigError, match="norms="):
        margin(COSINES, SCALE)
    for norms in (NORMS[:, None], NORMS[:2], NORMS.long()):
        with pytest.raises(ShapeError, match="norms"):
            margin(COSINES, SCALE, norms=norms)


@pytest.mark.parametrize(
    "build",
    [
        lambda: AdaFaceMargin(-0.1),
        lambda: AdaFaceMargin(momentum=1.5),
        lambda: AdaFaceMargin(concentration=math.nan),
        lambda: MagFaceMargin(lower_norm=0.0),
        lambda: MagFaceMargin(lower_norm=110.0, upper_norm=10.0),
        lambda: MagFaceMargin(lower_margin=0.9),
        lambda: MagFaceMargin(upper_margin=4.0),
        lambda: MagFaceMargin(penalty_weight=-1.0),
        lambda: ElasticMargin(-0.5),
        lambda: ElasticMargin(std=-0.1),
        lambda: ElasticMargin(variant="angular"),
    ],
)
def test_settings_outside_their_domain_are_refused(build):
    with pytest.raises(ConfigError, match=r"AdaFace|MagFace|ElasticFace"):
        build()


def test_a_generator_saved_on_another_device_loads_and_starts_from_its_seed():
    """A CUDA generator's position means nothing to a CPU; loading must not ask for the device."""
    cosines = torch.linspace(-0.5, 0.5, 6)
    fresh, loaded = ElasticMargin(seed=3), ElasticMargin(seed=3)
    position = {"device": "cuda:1", "generator": torch.zeros(16, dtype=torch.uint8)}
    loaded.load_state_dict({"_extra_state": position})
    assert loaded.get_extra_state()["device"] == "cuda:1"  # until the first draw
    assert torch.equal(loaded(cosines, 1.0).logits, fresh(cosines, 1.0).logits)
