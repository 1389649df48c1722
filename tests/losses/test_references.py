"""Reference measures on all cosines: the definition in 80 digits, properties, state, bad input."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch

import qmargin
from helpers.definition import AlphaGenerator, exact, float_array, mp
from qmargin.errors import ConfigError, DataError, MarginWarning, ShapeError
from qmargin.losses.margins import ElasticMargin
from qmargin.losses.references import ReferencedMargin, scaled_margin

CLASSES, DIM, ROWS, SCALE, MARGIN = 41, 6, 5, 12.0, 0.05
COUNTS = torch.arange(1, CLASSES + 1) ** 2
PRIOR, PAIRS = {"strength": 0.4}, (0.5, 0.1, 0.9, 0.6)


def prior(**changes):
    return qmargin.ClassPrior(COUNTS, **{**PRIOR, **changes})


def pairs():
    return qmargin.LookAlike(*PAIRS[:2], damping=PAIRS[2], split_threshold=PAIRS[3])


REFERENCES = {
    "prior": prior,
    "margins": lambda: prior(strength=0.0, margin_power=0.25),
    "pairs": pairs,
    "quality": lambda: qmargin.Quality(0.4),
    "all": lambda: prior(margin_power=0.25) + pairs() + qmargin.Quality(0.4),
}


@pytest.fixture
def batch():
    """Cosines, labels, norms and prototypes, float64; two prototypes are all but the same."""
    generator = torch.Generator().manual_seed(3)
    prototypes = torch.randn(CLASSES, DIM, generator=generator).double()
    prototypes[7] = prototypes[3] + 0.1 * prototypes[5]
    labels = torch.tensor([3, 0, 40, 7, 3])
    noise = torch.randn(ROWS, DIM, generator=generator).double()
    rows = prototypes[labels] + torch.linspace(0.2, 2.0, ROWS)[:, None] * noise
    unit = torch.nn.functional.normalize
    norms = torch.tensor([3.0, 5.0, 8.0, 4.0, 30.0]).double()
    return unit(rows) @ unit(prototypes).t(), labels, norms, prototypes


def log_references(name, batch, alpha, margin):
    """Of every class in every row, and the target's own, by the formulas (M14, M17)."""
    cosines, labels, norms, prototypes = (float_array(part) for part in batch)
    labels = labels.astype(int)
    every, own = np.zeros(cosines.shape), np.full(len(labels), -SCALE * margin)
    counts = float_array(COUNTS)
    factor = np.ones(len(labels))
    if name in ("margins", "all"):
        factor *= (counts.mean() / counts[labels]) ** 0.25
    if name in ("quality", "all"):
        score = 0.4 * (norms - norms.mean()) / (norms.std(ddof=1) + 1e-6 * norms.mean())
        factor *= 1.0 + np.clip(score, -1.0, 1.0)
    rate = (alpha - 1.0) * SCALE
    if name in ("margins", "quality", "all") and rate > 0:
        first = np.expm1(rate * margin) / rate
        gap = np.minimum(first * factor, max(first, 2.0 - 1.0 / rate))
        own = -np.log1p(rate * gap) / (alpha - 1.0)
    elif name in ("margins", "quality", "all"):
        own = -SCALE * np.minimum(margin * factor, 2.0)
    if name in ("prior", "all"):
        values = 0.4 * np.log(counts / counts.mean())
        every, own = every + values, own + values[labels]
    if name in ("pairs", "all"):
        unit = prototypes / np.linalg.norm(prototypes, axis=1, keepdims=True)
        near = unit[labels] @ unit.T
        kappa, low, delta, high = PAIRS
        every = every + SCALE * kappa * np.maximum(near - low, 0.0)
        every -= SCALE * delta * np.maximum(near - high, 0.0)
    return every, own


@pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")
@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_are_those_of_the_definition(name, alpha, batch):
    """M14 and M17 in the definition of the loss, whose gradient is p - y (M7)."""
    if alpha < 1.0 and REFERENCES[name]().scales_margins:
        pytest.skip("an error of its own")
    cosines, labels, norms, prototypes = batch
    margin = qmargin.PriorMargin(MARGIN)
    loss = qmargin.MarginLoss(
        qmargin.Alpha(alpha), margin, scale=SCALE, reduction="none", reference=REFERENCES[name]()
    )
    cosines = cosines.clone().requires_grad_()
    found = loss(cosines, labels, norms, prototypes)
    found.sum().backward()
    every, own = log_references(name, batch, alpha, MARGIN)
    for row, label in enumerate(labels.tolist()):
        target = label, mp.mpf(SCALE) * mp.mpf(cosines[row, label].item()), float(own[row])
        values = cosines[row].detach()
        truth = exact(AlphaGenerator(alpha), values, every[row], scale=SCALE, target=target)
        expected = float(truth.loss(label))
        assert found[row].item() == pytest.approx(expected, rel=1e-11, abs=1e-12)
        posterior = truth.posterior - (np.arange(CLASSES) == label)
        np.testing.assert_allclose(float_array(cosines.grad[row]) / SCALE, posterior, atol=1e-11)


def test_measures_of_classes_follow_the_strength():
    prior = qmargin.ClassPrior([1, 2, 6], strength=0.5)
    half = prior.per_class().clone()
    assert prior.per_class() is prior.per_class()  # not computed in every step
    prior.strength = 1.0
    torch.testing.assert_close(prior.per_class(), 2.0 * half)
    prior.counts.copy_(torch.tensor([1, 1, 4]))
    torch.testing.assert_close(
        prior.per_class(), torch.tensor([0.5, 0.5, 2.0], dtype=torch.float64).log()
    )
    assert torch.equal(copy.deepcopy(prior).per_class(), prior.per_class())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_in_lower_precision(dtype, batch):
    cosines, labels, norms, prototypes = batch
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.25), qmargin.PriorMargin(MARGIN), scale=SCALE, reference=REFERENCES["all"]()
    )
    given = cosines.to(dtype)
    found = loss.with_stats(given, labels, norms.float(), prototypes.float())
    wide = copy.deepcopy(loss)
    wide.load_state_dict(loss.state_dict())
    truth = wide.eval().with_stats(given.double(), labels, norms, prototypes)
    for one, other in zip(found, truth, strict=True):
        assert one.dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(one.double(), other.double(), atol=2e-5, rtol=2e-5)
    assert bool((found.support_size > 0).all()) and float(found.mass_error.max()) < 1e-6


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
@pytest.mark.parametrize(
    "reference",
    [
        qmargin.ClassPrior(COUNTS, 0.0),
        qmargin.ClassPrior([7] * CLASSES, 3.0),
        qmargin.LookAlike(0.0),
        qmargin.Quality(0.0),
        qmargin.LookAlike(0.0) + qmargin.ClassPrior(COUNTS, 0.0),
    ],
    ids=["prior", "equal counts", "pairs", "quality", "sum"],
)
def test_a_reference_of_ones_changes_nothing_to_the_last_bit(alpha, reference, batch):
    cosines, labels, _, _ = batch
    options = (qmargin.Alpha(alpha), qmargin.PriorMargin(MARGIN))
    found = []
    for given in (None, reference):
        loss = qmargin.MarginLoss(*options, scale=SCALE, reference=given)
        rows = cosines.float().requires_grad_()
        value = loss(rows, labels)
        value.backward()
        found.append((*loss.with_stats(rows, labels), value, rows.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 2.0, 2.5])
def test_a_constant_in_all_log_references_is_a_scale(alpha, batch):
    """M15: it multiplies logits by exp(b c); at alpha = 1 it shifts tau by c and nothing else."""
    cosines, labels, _, _ = batch
    reference = torch.randn(
        CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    constant, b = 0.7, alpha - 1.0
    factor = math.exp(b * constant)
    one = qmargin.softargmax(8.0 * cosines, alpha=alpha, log_reference=reference + constant)
    other = qmargin.softargmax(8.0 * factor * cosines, alpha=alpha, log_reference=reference)
    torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-11)
    losses = [
        qmargin.fenchel_young_loss(rate * cosines, labels, alpha=alpha, log_reference=measure)
        for rate, measure in ((8.0, reference + constant), (8.0 * factor, reference))
    ]
    torch.testing.assert_close(losses[0] * factor, losses[1], atol=1e-12, rtol=1e-11)
    if alpha == 1.0:
        taus = [
            qmargin.solve_tau(8.0 * cosines, alpha=alpha, log_reference=measure).tau
            for measure in (reference + constant, reference)
        ]
        torch.testing.assert_close(taus[0] - taus[1], torch.full((ROWS,), constant).double())


def test_class_prior_is_logit_adjustment_at_alpha_1(batch):
    cosines, labels, _, _ = batch
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.0), qmargin.PriorMargin(0.0), scale=SCALE, reference=prior(strength=1.0)
    )
    adjusted = SCALE * cosines + COUNTS.double().log()
    truth = torch.nn.functional.cross_entropy(adjusted, labels)
    torch.testing.assert_close(loss(cosines, labels), truth)


def test_nothing_flows_through_a_reference(batch):
    cosines, labels, norms, prototypes = batch
    leaves = [part.clone().requires_grad_() for part in (cosines, norms, prototypes)]
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.25), qmargin.PriorMargin(MARGIN), scale=SCALE, reference=REFERENCES["all"]()
    )
    loss(leaves[0], labels, leaves[1], leaves[2]).backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None
    assert not list(loss.reference.parameters())


def test_a_learned_margin_still_gets_its_gradient(batch):
    cosines, labels, norms, prototypes = batch
    margin = torch.nn.Parameter(torch.tensor(0.05, dtype=torch.float64))
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.25),
        qmargin.PriorMargin(margin),
        scale=SCALE,
        reference=REFERENCES["all"]().eval(),
    )
    loss.reference.parts[2].num_batches += 1
    loss.reference.parts[2].running_mean += 5.0
    loss.reference.parts[2].running_std += 5.0

    def at(value):
        with torch.no_grad():
            margin.copy_(value)
            return float(loss(cosines, labels, norms, prototypes))

    loss(cosines, labels, norms, prototypes).backward()
    numeric = (at(0.05 + 1e-6) - at(0.05 - 1e-6)) / 2e-6
    assert float(margin.grad) == pytest.approx(numeric, rel=1e-5) and numeric > 0


def test_other_divergences_take_classes_and_pairs(batch):
    """Finite differences of the loss are its gradient, and the posterior sums to one."""
    cosines, labels, _, prototypes = batch
    loss = qmargin.MarginLoss(
        qmargin.JensenShannon(),
        qmargin.PriorMargin(MARGIN),
        scale=4.0,
        reference=prior() + pairs(),
        reduction="sum",
    )
    rows = cosines.clone().requires_grad_()
    loss(rows, labels, None, prototypes).backward()
    assert float(rows.grad.sum().abs()) < 1e-9
    moved = cosines.clone()
    moved[0, 5] += 1e-6
    change = loss(moved, labels, None, prototypes) - loss(cosines, labels, None, prototypes)
    assert float(change) / 1e-6 == pytest.approx(float(rows.grad[0, 5]), rel=1e-3)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
def test_margins_are_scaled_within_reach(alpha):
    """M17: the effective margin is a multiple, and no row is asked for more than there is."""
    b, margins = alpha - 1.0, torch.tensor([0.02, 0.05, 0.1, 0.9], dtype=torch.float64)
    factor = torch.tensor([1.9, 0.0, 30.0, 1.5], dtype=torch.float64)
    found = scaled_margin(-SCALE * margins, factor, SCALE, b)
    gaps = [
        qmargin.PriorMargin(float(-value) / SCALE).effective(alpha, SCALE)
        for value in (*-SCALE * margins, *found)
    ]
    before, after = gaps[:4], gaps[4:]
    room = 2.0 if b == 0.0 else 2.0 - 1.0 / (b * SCALE)
    assert after[0] == pytest.approx(1.9 * before[0])
    assert after[1] == 0.0
    assert after[2] == pytest.approx(min(30.0 * before[2], room))
    assert after[3] == pytest.approx(min(1.5 * before[3], max(before[3], room)))
    same = scaled_margin(-SCALE * margins, torch.ones(4).double(), SCALE, b)
    assert torch.equal(same, -SCALE * margins)
    assert torch.equal(scaled_margin(margins, factor, SCALE, b), margins)  # no margin to speak of


def test_quality_follows_batches_and_keeps_its_state():
    """Statistics are those of all rows at first; then they forget."""
    quality = qmargin.Quality(0.5, momentum=0.25)
    draws = [torch.rand(8, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
    labels = torch.arange(8)
    for norms in draws:
        quality.margin_factor(labels, norms)
    means = torch.stack([norms.mean() for norms in draws])
    assert float(quality.running_mean) == pytest.approx(float(means.mean()))
    odd = torch.tensor([math.nan, math.inf, 1e6, *[1.0] * 5]).double()
    marked = torch.tensor([0, 1, -1, 3, 4, 5, 6, 7])
    before = float(quality.running_mean)
    factor = quality.margin_factor(marked, odd)
    assert float(quality.running_mean) == pytest.approx(0.75 * before + 0.25)
    assert factor.isnan().tolist() == [True, True, *[False] * 6]
    other = qmargin.Quality(0.5)
    other.load_state_dict(quality.state_dict())
    norms = torch.linspace(0.1, 3.0, 8).double()
    expected = quality.eval().margin_factor(labels, norms)
    assert torch.equal(other.eval().margin_factor(labels, norms), expected)
    assert float(expected.amin()) >= 0.0 and float(expected.amax()) <= 2.0
    assert quality.half().running_mean.dtype == torch.float64
    fresh = qmargin.Quality(0.5)
    assert fresh.margin_factor(labels[:1], norms[:1]).tolist() == [1.0]  # one row has no deviation
    assert int(fresh.num_batches) == 0


def test_counts_survive_casts_and_are_read_again_when_they_change():
    reference = prior().half()
    assert reference.counts.dtype == torch.int64
    low, high = reference.class_bounds()
    values = reference.per_class()
    assert low <= float(values.amin()) and float(values.amax()) <= high
    counts = torch.ones(3, dtype=torch.int64)
    other = qmargin.ClassPrior(counts, 1.0)
    counts.fill_(-1)  # a copy was taken
    assert other.per_class() is None
    other.counts[2] = 10
    torch.testing.assert_close(other.per_class(), (torch.tensor([1, 1, 10]).double() / 4).log())
    other.load_state_dict({"counts": torch.tensor([2, 2, 2])})
    assert other.per_class() is None
    other.counts[0] = 0
    with pytest.raises(DataError, match="class 0 has the count 0"):
        other.per_class()


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "int32", "int64", "float16", "float64"]
)
def test_counts_of_any_type(dtype):
    expected = (torch.tensor([1, 2, 100]).double() / (103 / 3)).log()
    given = (torch.tensor([1, 2, 100], dtype=getattr(torch, dtype)), np.array([1, 2, 100], dtype))
    for counts in given:
        torch.testing.assert_close(qmargin.ClassPrior(counts).per_class(), expected)
    with pytest.raises(DataError, match="class 1 has the count 0"):
        qmargin.ClassPrior(torch.tensor([1, 0], dtype=getattr(torch, dtype)))


def test_counts_of_unsigned_types():
    for dtype in (np.uint16, np.uint32, np.uint64):
        assert qmargin.ClassPrior(np.array([1, 2, 3], dtype)).counts.tolist() == [1, 2, 3]
        with pytest.raises(DataError, match="class 0 has the count 0"):
            qmargin.ClassPrior(np.array([0, 2, 3], dtype))


def test_pair_bounds_hold():
    at = torch.linspace(-1.0, 1.0, 2001, dtype=torch.float64)
    for given in ((0.3, 0.1), (0.0, 0.1), (0.3, 0.1, 2.0, 0.5), (0.0, 0.9, 0.2, -0.3)):
        reference = qmargin.LookAlike(*given[:2], **dict(zip(
            ("damping", "split_threshold"), given[2:], strict=False)))  # fmt: skip
        bounds, values = reference.pair_bounds(20.0), reference.per_pair(at, 20.0)
        if bounds is None:
            assert not bool(values.any())
        else:
            assert bounds[0] <= float(values.amin()) <= bounds[0] + 1e-3
            assert bounds[1] >= float(values.amax()) >= bounds[1] - 1e-3


class Halved(qmargin.Reference):
    """Odd classes count half, rows of class 0 have half a margin."""

    def per_class(self):
        return torch.where(torch.arange(CLASSES) % 2 == 1, math.log(0.5), 0.0).double()

    def margin_factor(self, labels, norms):
        return torch.where(labels == 0, 0.5, 1.0).double()


def test_a_reference_of_ones_own_needs_only_what_it_changes(batch):
    cosines, labels, norms, _ = batch
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.5), qmargin.PriorMargin(MARGIN), scale=SCALE, reduction="none",
        reference=Halved() + qmargin.Quality(0.0),
    )  # fmt: skip
    every = Halved().per_class()
    gaps = torch.where(labels == 0, 0.5, 1.0) * math.expm1(0.5 * SCALE * MARGIN)
    own = -torch.log1p(gaps.double()) / 0.5 + every[labels]
    measure = every.expand(ROWS, -1).scatter(1, labels[:, None], own[:, None])
    expected = qmargin.fenchel_young_loss(SCALE * cosines, labels, alpha=1.5, log_reference=measure)
    torch.testing.assert_close(loss(cosines, labels, norms), expected)


def test_ties_and_large_measures(batch):
    """Equal logits share by their measures; a measure of e^200 leaves nothing to the others."""
    counts = torch.tensor([1, 2, 5])
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.0), qmargin.PriorMargin(0.0), scale=SCALE,
        reference=qmargin.ClassPrior(counts),
    )  # fmt: skip
    found = loss.with_stats(torch.full((3, 3), 0.3).double(), torch.arange(3))
    torch.testing.assert_close(found.target_posterior, counts.double() / 8.0)
    cosines, labels, _, prototypes = batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarginWarning)
        for alpha in (1.0, 1.25, 2.0):
            loss = qmargin.MarginLoss(
                qmargin.Alpha(alpha), qmargin.PriorMargin(0.0), scale=100.0, reduction="none",
                reference=qmargin.LookAlike(2.0, -1.0),
            )  # fmt: skip
            rows = cosines.clone().requires_grad_()
            found = loss(rows, labels, None, prototypes)
            found.sum().backward()
            assert bool(found.isfinite().all()) and bool(rows.grad.isfinite().all())


def make(reference, *, alpha=1.25, margin=None, scale=32.0):
    given = qmargin.PriorMargin(0.2) if margin is None else margin
    return qmargin.MarginLoss(qmargin.Alpha(alpha), given, scale=scale, reference=reference)


def test_settings_that_cannot_be_are_refused(batch):
    cosines, labels, norms, prototypes = batch
    for counts, error, match in (
        ([3, 0, 1], DataError, "class 1 has the count 0"),
        ([3, -2], DataError, "class 1 has the count -2"),
        ([3.5, 1], DataError, r"class 0 has the count 3\.5"),
        ([1.0, math.nan], DataError, "class 1 has the count nan"),
        ([], ShapeError, "one number per class"),
        ([[1, 2]], ShapeError, "one number per class"),
        ("many", ShapeError, "one number per class"),
        (torch.tensor([1, 2]).to_sparse(), ShapeError, "one number per class"),
        ([1, 2**60], DataError, "class 1 has the count 1"),
    ):
        with pytest.raises(error, match=match):
            qmargin.ClassPrior(counts)
    for call, match in (
        (lambda: qmargin.ClassPrior([1, 2], math.inf), "strength of ClassPrior"),
        (lambda: qmargin.LookAlike(-0.1), "strength of LookAlike"),
        (lambda: qmargin.LookAlike(0.1, 1.0), "threshold of LookAlike"),
        (lambda: qmargin.LookAlike(0.1, damping=-1.0), "damping of LookAlike"),
        (lambda: qmargin.Quality(math.nan), "strength of Quality"),
        (lambda: qmargin.Quality(momentum=0.0), "momentum of Quality"),
        (lambda: make(qmargin.PriorMargin(0.1)), "give a Reference"),
        (lambda: make(qmargin.Quality(), alpha=0.5), "at least 1"),
        (lambda: make(qmargin.Quality(), margin=qmargin.CosineMargin(0.1)), "PriorMargin"),
        (lambda: make(qmargin.Quality(), margin=ElasticMargin()), "PriorMargin"),
        (
            lambda: qmargin.MarginLoss(
                qmargin.JensenShannon(), qmargin.PriorMargin(0.1), scale=8.0,
                reference=qmargin.Quality(),
            ),
            "another divergence",
        ),
        (lambda: make(qmargin.Quality())(cosines, labels), "norms=embeddings.norm"),
        (lambda: make(qmargin.LookAlike())(cosines, labels), "prototypes=weights"),
        (lambda: make(prior()).target_margin(cosines[:, 0], 32.0), "labels"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            call()
    with pytest.raises(ShapeError, match="2 counts and there are 41 classes"):
        make(qmargin.ClassPrior([1, 2], 0.1))(cosines, labels)
    with pytest.raises(ShapeError, match="one row per class"):
        make(qmargin.LookAlike())(cosines, labels, None, prototypes[:3])
    with pytest.raises(ShapeError, match="norms"):
        make(qmargin.Quality())(cosines, labels, norms[:2])
    with pytest.raises(TypeError):
        prior() + 3


def test_strengths_out_of_reach_are_told_with_the_remedy():
    """M12 with a class prior: the rarest class asks for the largest gap."""
    counts = [1, 100, 1000]
    with pytest.warns(MarginWarning, match=r"lower the strength of ClassPrior from 2 to") as caught:
        make(qmargin.ClassPrior(counts, 2.0))
    text = str(caught[0].message)
    found = float(text.rpartition(" ")[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(qmargin.ClassPrior(counts, 0.99 * found))
        make(qmargin.ClassPrior(counts, found) + qmargin.LookAlike(3.0), alpha=1.0)
        make(qmargin.Quality(3.0))
    with pytest.warns(MarginWarning):
        make(qmargin.ClassPrior(counts, 1.02 * found))
    with pytest.warns(MarginWarning, match="PriorMargin"):  # the margin's own, and no other
        make(qmargin.ClassPrior(counts, 2.0), margin=qmargin.PriorMargin(0.5))


def test_measures_that_drown_in_rounding_are_told():
    with pytest.warns(MarginWarning, match=r"log reference measures reach 57\.6 at alpha=2"):
        make(qmargin.LookAlike(1.0, 0.1), alpha=2.0, margin=qmargin.PriorMargin(0.0), scale=64.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(qmargin.LookAlike(1.0, 0.1), alpha=1.0, scale=64.0)
        make(qmargin.LookAlike(0.3, 0.1), scale=64.0, margin=qmargin.PriorMargin(0.1))


def test_a_sum_is_flat_and_is_shown():
    total = (prior() + pairs()) + qmargin.Quality(0.1)
    assert [type(part).__name__ for part in total.parts] == ["ClassPrior", "LookAlike", "Quality"]
    text = repr(make(total))
    for part in ("strength=0.4", "damping=0.9", "momentum=0.01"):
        assert part in text
    assert set(make(total).state_dict()) == {
        "reference.parts.0.counts",
        *(f"reference.parts.2.{name}" for name in ("running_mean", "running_std", "num_batches")),
    }
    margin = make(total).target_margin
    assert isinstance(margin, ReferencedMargin)
    assert margin.effective(1.25, 32.0) == qmargin.PriorMargin(0.2).effective(1.25, 32.0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_and_under_autocast_and_pickled(batch):
    """Graphs may break; numbers may not, and cosines of prototypes are not rounded."""
    cosines, labels, norms, prototypes = (part.clone() for part in batch)
    cosines, norms, prototypes = cosines.float(), norms.float(), prototypes.float()
    loss = make(REFERENCES["all"](), scale=SCALE, margin=qmargin.PriorMargin(MARGIN))
    loss(cosines, labels, norms, prototypes)
    expected = loss.eval()(cosines, labels, norms, prototypes)
    compiled = torch.compile(loss, backend="eager")
    torch.testing.assert_close(compiled(cosines, labels, norms, prototypes), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(cosines, labels, norms, prototypes), expected)
    again = pickle.loads(pickle.dumps(loss))
    assert torch.equal(again(cosines, labels, norms, prototypes), expected)
    folded = [part.expand(2, *part.shape) for part in (cosines, labels, norms)]
    torch.testing.assert_close(loss(*folded, prototypes), expected)
