"""Every kernel against its plain twin: on a GPU for real, elsewhere in Triton's interpreter."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from qmargin.heads.chunked import add_entries_
from qmargin.heads.sharding import Ranks
from qmargin.heads.sparse import find_support
from qmargin.kernels import dispatch
from qmargin.kernels import head_reference as plain
from qmargin.kernels.solver import slacks, solve_rows
from qmargin.kernels.triton import blocks
from qmargin.kernels.triton import head as fused

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(300, 64, 3), (97, 40, 18), (1, 8, 3), (33, 100, 1)]  # k, d, B
SETTINGS = [(1.25, 40.0, 0.1), (2.0, 4.0, 0.1), (1.05, 100.0, 0.1), (3.0, 6.0, 0.05)]
CASES = [(shape, *setting) for shape in (SHAPES[0], (97, 40, 3)) for setting in SETTINGS]
CASES += [(shape, 1.5, 10.0, 0.1) for shape in SHAPES[1:]]


class Batch:
    """Prototypes, their copy and a batch, with targets near and far."""

    def __init__(self, num_classes, dim, rows, dtype=torch.float16):
        torch.manual_seed(num_classes)
        self.num_classes = num_classes
        self.prototypes = 0.01 * torch.randn(num_classes, dim)
        self.copy = torch.zeros(-(-num_classes // 256) * 256, dim, dtype=dtype)
        self.inverse_norms = torch.empty(num_classes)
        error = plain.refresh_copy(self.prototypes, self.copy, self.inverse_norms)
        self.labels = torch.randint(num_classes, (rows,))
        own = self.prototypes[self.labels] * self.inverse_norms[self.labels][:, None]
        mixed = torch.randn(rows, dim) / dim**0.5 + 2 * torch.rand(rows, 1) * own
        self.embeddings = torch.nn.functional.normalize(mixed)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(DEVICE))
        self.prepared = self.run(plain).prepared
        self.slack = self.prepared.rounding.double() + error.to(DEVICE) + dim * 1.2e-7

    def run(self, kernels):
        self.prepared = kernels.prepare_rows(
            self.embeddings, self.labels, self.prototypes, self.inverse_norms, self.copy.dtype
        )
        return self

    def maxima(self):
        rounded, copy = self.prepared.rounded.float(), self.copy.float()
        return plain.group_maxima(rounded, copy, self.labels, self.num_classes)

    def terms(self, scale, margin):
        logits = self.prepared.target_cosines.double() * scale
        return plain.Target(logits, torch.full_like(logits, -scale * margin))

    def rows(self):
        state = (self.copy, self.prototypes, self.inverse_norms, self.labels)
        return plain.Batch(self.prepared, *state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_prepare_and_screen(shape, dtype):
    batch = Batch(*shape, dtype)
    expected, found = batch.prepared, batch.run(fused).prepared
    # The interpreter cuts bfloat16 off where hardware rounds; the length of what is lost is
    # measured either way, and that is what certifies the screen.
    lost = (found.embeddings - found.rounded.float()).norm(dim=1)
    torch.testing.assert_close(found.rounding, lost, atol=1e-9, rtol=1e-5)
    torch.testing.assert_close(found.rounded, expected.rounded, atol=0.0, rtol=1e-2)
    if dtype == torch.float16 or DEVICE == "cuda":
        assert torch.equal(found.rounded, expected.rounded)
    torch.testing.assert_close(found.target_cosines, expected.target_cosines, atol=1e-6, rtol=0)
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        return  # the interpreter has no products of bfloat16; the GPU run covers them
    maxima = fused.group_maxima(expected.rounded, batch.copy, batch.labels, batch.num_classes)
    batch.prepared = expected
    torch.testing.assert_close(maxima, batch.maxima(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_classes, dim", [(300, 64), (37, 40), (1, 8), (16, 130)])
def test_refresh(num_classes, dim, dtype):
    torch.manual_seed(0)
    prototypes = (0.01 * torch.randn(num_classes, dim)).to(DEVICE)
    found, expected = [], []
    for kernels, kept in ((fused, found), (plain, expected)):
        copy = torch.full((num_classes + 3, dim), 7.0, dtype=dtype, device=DEVICE)
        inverse = torch.empty(num_classes, device=DEVICE)
        kept += [kernels.refresh_copy(prototypes, copy, inverse), inverse, copy]
    assert bool((found[2][num_classes:] == 7.0).all())  # rows past k are left alone
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=1e-6)
    torch.testing.assert_close(found[2], expected[2], atol=0.0, rtol=1e-2)
    # The error of its own copy. A compiler may fuse the product with the difference, which then is
    # that of the unrounded unit vector.
    error, lost = float(found[0]), []
    for wide in (torch.float32, torch.float64):
        rest = prototypes.to(wide) * found[1][:, None].to(wide) - found[2][:num_classes].to(wide)
        lost.append(float(rest.norm(dim=1).amax()))
    assert any(error == pytest.approx(one, rel=1e-5, abs=1e-9) for one in lost)
    prototypes[num_classes // 2] = 0.0
    assert bool(fused.refresh_copy(prototypes, found[2], found[1]).isnan())


def definition_floor(maxima, target, slack, *, scale, b, lower=0.0):
    """Floor of exact cosines from the root over all group maxima and the target, in float64."""
    logits = torch.cat([maxima.double() * scale, target.logits[:, None]], 1)
    reference = torch.zeros_like(logits)
    reference[:, :-1] = lower
    reference[:, -1] = target.log_reference
    anchor, level, _ = solve_rows(logits, reference, b, tolerance=1e-14)
    return (anchor - slacks(level, b) - 1.0 / b) / scale - slack


@pytest.mark.parametrize("shape, alpha, scale, margin", CASES)
def test_pairs_scores_and_solution(shape, alpha, scale, margin):
    """A floor may be lower than the definition's, never higher; the rest agrees to rounding."""
    batch, numbers = Batch(*shape), {"scale": scale, "b": alpha - 1.0}
    target, maxima = batch.terms(scale, margin), batch.maxima()
    floor = definition_floor(maxima, target, batch.slack, **numbers)
    is_needed = maxima.double() > (floor - batch.slack)[:, None]
    needed = {(row, group) for row, group in is_needed.nonzero().tolist()}
    lists = [k.list_pairs(maxima, target, batch.slack, **numbers) for k in (plain, fused)]
    assert bool((lists[1].floor > lists[0].floor - 0.1).all())
    for pairs in lists:  # those of the kernels last
        assert bool((pairs.floor <= floor + 1e-12).all())
        if alpha <= 2.0:  # above, the bound is that of the best single class
            assert bool((pairs.floor > floor - 0.1).all())
        assert set(zip(pairs.rows.tolist(), pairs.groups.tolist(), strict=True)) >= needed
    candidates, certain = (k.score_candidates(batch.rows(), pairs) for k in (fused, plain))
    entries = zip(candidates.rows.tolist(), candidates.columns.tolist(), strict=True)
    scores = dict(zip(entries, candidates.scores.tolist(), strict=True))
    for row, column, score in zip(*(part.tolist() for part in certain[:3]), strict=True):
        assert scores[row, column] == pytest.approx(score, abs=1e-6)  # none is missing
    wanted = plain.solve_lists(candidates, target, **numbers)
    solved = fused.solve_lists(candidates, target, **numbers)
    torch.testing.assert_close(solved.loss, wanted.loss, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(solved.tau, wanted.tau, atol=1e-9, rtol=0)
    torch.testing.assert_close(solved.others_mass, wanted.others_mass, atol=1e-10, rtol=1e-6)
    torch.testing.assert_close(solved.in_reference, wanted.in_reference, atol=1e-7, rtol=1e-6)
    assert float(solved.mass_error.max()) < 1e-9
    torch.testing.assert_close(solved.posterior, wanted.posterior, atol=1e-7, rtol=1e-5)
    _check_gradients(batch, solved, wanted)


def test_where_maxima_lie_decides_nothing():
    """Rows of whole spans are read in place, whatever lies past the last maximum; others copied."""
    batch, numbers = Batch(300, 64, 5), {"scale": 40.0, "b": 0.25}
    maxima, target, slack = batch.maxima(), batch.terms(40.0, 0.1), batch.slack
    num_groups = maxima.shape[1]
    assert num_groups % fused.SPAN
    wide = maxima.new_full((6, -(-num_groups // fused.SPAN) * fused.SPAN), math.inf)
    wide[1:, :num_groups] = maxima
    in_place = wide[1:, :num_groups]
    whole = wide[1:].flatten()[: num_groups - wide.shape[1]].clone()  # ends with the last maximum
    short = whole.as_strided(in_place.shape, in_place.stride())
    places = (maxima, in_place, short, maxima.t().contiguous().t())
    assert [fused._in_spans(place) is place for place in places] == [False, True, False, False]
    found = [fused.list_pairs(place, target, slack, **numbers) for place in places]
    assert len(found[0].groups) > 0
    for pairs in found[1:]:
        for part, wanted in zip(pairs, found[0], strict=True):
            assert torch.equal(part, wanted)


@pytest.mark.parametrize(
    ("alpha", "scale"), [(1.05, 40.0), (1.25, 40.0), (1.5, 112.7), (2.0, 40.0)]
)
@pytest.mark.parametrize("extreme", [-1e4, -300.0, -30.0, 12.0, 30.0, 240.0])
def test_a_bound_of_extreme_measures(alpha, scale, extreme):
    check_extreme_measures(alpha, scale, extreme)


@pytest.mark.parametrize("alpha", [1.3, 1.75, 1.8])
@pytest.mark.parametrize("scale", [22.6, 86.8, 112.7])
@pytest.mark.parametrize("extreme", [16.5, 30.0, 60.0])
def test_a_bound_of_measures_whose_height_rounds_to_zero(alpha, scale, extreme):
    check_extreme_measures(alpha, scale, extreme / (alpha - 1.0))


def check_extreme_measures(alpha, scale, extreme):
    """The floor is a number, and not above that of the definition."""
    batch, numbers = Batch(300, 64, 3), {"scale": scale, "b": alpha - 1.0}
    target, maxima = batch.terms(scale, 0.1), batch.maxima()
    lower = torch.zeros(maxima.shape[1], dtype=torch.float64, device=DEVICE)
    lower[::2] = extreme
    floor = definition_floor(maxima, target, batch.slack, **numbers, lower=lower)
    found = fused.list_pairs(maxima, target, batch.slack, **numbers, lower=lower)
    assert bool((found.floor <= floor + 1e-12).all())  # false for NaN
    if 0.0 < (alpha - 1.0) * extreme < 13.0:  # else by a share of the largest cost, or of one
        assert bool((found.floor > floor - 0.1).all())


@pytest.mark.parametrize("b", [0.25, 0.75, 1.0])
def test_a_bound_of_a_target_that_float32_cannot_hold(b):
    """Lists are longer than they need to be, not empty."""
    batch, numbers = Batch(300, 64, 3), {"scale": 32.0, "b": b}
    maxima, logits = batch.maxima(), torch.full((3,), -9.6, dtype=torch.float64, device=DEVICE)
    target = plain.Target(logits, torch.full_like(logits, 200.0 / b))
    wanted, found = (k.list_pairs(maxima, target, batch.slack, **numbers) for k in (plain, fused))
    assert bool((found.floor <= wanted.floor + 1e-6).all())  # false for NaN


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("shape, alpha, scale, margin", CASES)
def test_pairs_and_solution_with_measures(shape, alpha, scale, margin, spread):
    """M16 and the solution where every class has a measure, some far above one, some below."""
    batch, numbers = Batch(*shape), {"scale": scale, "b": alpha - 1.0}
    generator = torch.Generator().manual_seed(shape[0])
    drawn = spread * torch.randn(batch.num_classes, generator=generator).double()
    classes = drawn.clamp(-6.0, 6.0 / max(1.0, alpha - 1.0)).to(DEVICE)
    targets = batch.prepared.targets

    def pair(cosines):
        return 2.0 * (cosines - 0.1).clamp_min(0.0)

    bounds = (float(classes.amin()), float(classes.amax()) + 1.8)
    reference = plain.RowReference(classes, pair, targets, bounds, 0.0, classes._version)
    lower = reference.group_minima()
    target, maxima = batch.terms(scale, margin), batch.maxima()
    floor = definition_floor(maxima, target, batch.slack, **numbers, lower=lower)
    is_needed = maxima.double() > (floor - batch.slack)[:, None]
    needed = {(row, group) for row, group in is_needed.nonzero().tolist()}
    for kernels in (plain, fused):
        pairs = kernels.list_pairs(maxima, target, batch.slack, **numbers, lower=lower)
        assert bool((pairs.floor <= floor + 1e-12).all())
        if alpha <= 2.0:
            assert bool((pairs.floor > floor - 0.1).all())
        assert set(zip(pairs.rows.tolist(), pairs.groups.tolist(), strict=True)) >= needed
    rows = batch.rows()._replace(reference=reference)
    found, certain = (kernels.score_candidates(rows, pairs) for kernels in (fused, plain))
    places = (kept.rows.long() * batch.num_classes + kept.columns for kept in (found, certain))
    measures = dict(zip(next(places).tolist(), found.log_reference.tolist(), strict=True))
    for place, measure in zip(next(places).tolist(), certain.log_reference.tolist(), strict=True):
        assert measures[place] == pytest.approx(measure, abs=1e-5)
    wanted, solved = (kernels.solve_lists(found, target, **numbers) for kernels in (plain, fused))
    torch.testing.assert_close(solved.loss, wanted.loss, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(solved.tau, wanted.tau, atol=1e-9, rtol=1e-12)
    torch.testing.assert_close(solved.others_mass, wanted.others_mass, atol=1e-9, rtol=1e-6)
    assert float(solved.mass_error.max()) < 1e-8
    torch.testing.assert_close(solved.posterior, wanted.posterior, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    "expected",
    [
        None,
        (1, 1),
        *(pytest.param(most, marks=pytest.mark.slow) for most in ((10**4, 1), (1, 10**4))),
        pytest.param((10**4, 10**4), marks=pytest.mark.slow),  # the interpreter's spare entries
    ],
)
def test_support_whatever_lengths_are_expected(expected, monkeypatch):
    """Lists too short, by either length, are found out; spare room changes nothing."""
    monkeypatch.setattr(fused, "ROOM", 8)
    batch = Batch(400, 64, 5)
    terms = (batch.maxima(), batch.terms(20.0, 0.2), batch.slack)
    options = {"scale": 20.0, "b": 0.25, "limit": 10**6, "has_gradient": True}
    certain = find_support(plain, Ranks(), batch.rows(), *terms, **options)
    options["expected"] = None if expected is None else plain.Lengths(*expected)
    wanted = certain.solved
    support_found = fused.find_support(batch.rows(), *terms, **options)
    weights = torch.rand(5, device=DEVICE)
    made_before = fused.class_gradient(support_found.order, support_found.solved, weights, -weights)
    lengths = support_found.verify()
    if expected is not None and 1 in expected:
        assert lengths is None
        options["expected"] = None
        support_found = fused.find_support(batch.rows(), *terms, **options)
        lengths = support_found.verify()
    solved = support_found.cut(lengths.candidates)
    assert lengths.pairs > 16 and lengths.candidates == len(solved.rows) > 16
    torch.testing.assert_close(solved.loss, wanted.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(solved.tau, wanted.tau, atol=1e-5, rtol=0)
    is_active = solved.posterior > 0
    found = torch.stack([solved.rows, solved.columns])[:, is_active].t().tolist()
    is_active = wanted.posterior > 0
    assert found == torch.stack([wanted.rows, wanted.columns])[:, is_active].t().tolist()
    torch.testing.assert_close(support_found.pulled, certain.pulled, atol=2e-6, rtol=1e-4)
    length = lengths.candidates + 5
    assert bool((support_found.order.columns[length:] == 400).all())  # spare entries come last
    gradient = fused.class_gradient(support_found.order, support_found.solved, weights, -weights)
    gradient = gradient.part(slice(length))
    if expected is None or 1 not in expected:  # room to spare changed nothing but the end
        for part, before in zip(gradient, made_before, strict=True):
            assert torch.equal(part, before[: len(part)])
    expected = plain.class_gradient(certain.order, wanted, weights, -weights)
    found = gradient.columns[gradient.values != 0]
    assert torch.equal(found.long(), expected.columns[expected.values != 0].long())
    with pytest.raises(plain.ListOverflow):
        options["limit"] = lengths.pairs - 1
        fused.find_support(batch.rows(), *terms, **options).verify()


def _check_gradients(batch, solved, wanted):
    weights = torch.rand(len(batch.labels), device=DEVICE)
    state = (batch.prototypes, batch.inverse_norms)
    found, expected = fused.pull_rows(solved, *state), plain.pull_rows(wanted, *state)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)
    order = fused.class_order(solved.columns, batch.labels)
    gradient = fused.class_gradient(order, solved, weights, -weights)
    expected = plain.class_gradient(order, wanted, weights, -weights)
    for part, sure in zip(gradient, expected, strict=True):
        torch.testing.assert_close(part, sure.to(part.dtype), atol=1e-7, rtol=1e-5)
    classes, rows = fused.prototype_gradient(gradient, batch.embeddings, *state)
    plain_classes, plain_rows = plain.prototype_gradient(gradient, batch.embeddings, *state)
    assert torch.equal(classes, plain_classes.long())
    torch.testing.assert_close(rows, plain_rows, atol=2e-4, rtol=1e-4)


def check_update(num_classes, dim, momentum, nesterov, only_active, update):
    """Both kinds of kernels leave the same prototypes, momentum, inverse norms and error."""
    start, buffer = 0.1 * torch.randn(num_classes, dim), 0.01 * torch.randn(num_classes, dim)
    rule = plain.SgdRule(
        0.1, momentum, 5e-4, nesterov, torch.tensor(0.7, device=DEVICE), only_active
    )
    results = []
    for kernels in (plain, fused):
        prototypes, momenta = start.clone().to(DEVICE), buffer.clone().to(DEVICE)
        copy = torch.zeros(256, dim, dtype=torch.float16, device=DEVICE)
        inverse = torch.empty(num_classes, device=DEVICE)
        plain.refresh_copy(prototypes, copy, inverse)
        state = plain.PrototypeState(prototypes, momenta if momentum else None, inverse, copy)
        results.append((prototypes, momenta, inverse, update(kernels, state, rule)))
        lost = copy[:num_classes].float() - prototypes * inverse[:, None]
        assert float(lost.abs().max()) < 3e-4
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("only_active", [False, True])
@pytest.mark.parametrize("momentum, nesterov", [(0.9, False), (0.9, True), (0.0, False)])
@pytest.mark.parametrize("num_classes, dim", [(37, 40), (16, 130)])
def test_update(num_classes, dim, momentum, nesterov, only_active):
    torch.manual_seed(0)
    columns = torch.randint(num_classes, (30,)).sort().values
    entries = (columns, torch.randint(6, (30,)), torch.randn(30))
    gradient = plain.ClassGradient(*(part.to(DEVICE) for part in entries))
    embeddings = torch.nn.functional.normalize(torch.randn(6, dim)).to(DEVICE)

    def update(kernels, state, rule):
        return kernels.sgd_update(gradient, embeddings, state, rule)

    check_update(num_classes, dim, momentum, nesterov, only_active, update)


@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize("only_active", [False, True])
@pytest.mark.parametrize("momentum, nesterov", [(0.9, True), (0.0, False)])
def test_update_of_given_rows(momentum, nesterov, only_active, factor):
    torch.manual_seed(0)
    rows = torch.randn(20, 40).to(DEVICE)
    rows[3:9] = 0.0
    unit_factor = None if factor is None else torch.tensor(factor, device=DEVICE)

    def update(kernels, state, rule):
        return kernels.sgd_update_rows(slice(7, 27), rows.clone(), state, rule, unit_factor)

    check_update(50, 40, momentum, nesterov, only_active, update)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.3, 2.0])
@pytest.mark.parametrize("shape", [(300, 64, 5), (257, 40, 3), (1, 8, 2)])
def test_blocks(shape, alpha):
    """Row sums and posteriors of blocks against plain sums over the same rounded operands."""
    batch, scale, b = Batch(*shape), 20.0, alpha - 1.0
    operands = (batch.prepared.rounded, batch.copy, batch.labels, batch.num_classes)
    cosines = operands[0].double() @ batch.copy[: batch.num_classes].double().t()
    cosines.scatter_(1, batch.labels[:, None], -torch.inf)
    largest, mass = blocks.log_sum_exp(operands, scale)
    torch.testing.assert_close(largest.double(), cosines.amax(1), atol=1e-6, rtol=0)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    gaps = scale * (cosines - shift[:, None].double())
    torch.testing.assert_close(mass, gaps.exp().sum(1), atol=1e-4, rtol=1e-5)
    if b == 0.0:
        level = torch.full_like(shift, -1.0)
        expected = (gaps - 1.0).exp()
    else:
        level = torch.full_like(shift, 0.8)
        height = (0.8 + b * gaps).clamp_min(0.0)
        expected = height ** (1.0 / b)
        sums = blocks.row_sums(operands, shift, level, scale, b)
        slope = torch.where(height > 0, expected / height.clamp_min(1e-300), 0.0).sum(1)
        torch.testing.assert_close(sums[0], expected.sum(1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(sums[1], slope, atol=1e-4, rtol=1e-5)
    first = batch.num_classes // 3
    where = slice(first, max(first + 1, batch.num_classes * 4 // 5))
    options = (where, (shift, level), scale, b)
    tiles = blocks.TileSums.empty(operands, where.stop - where.start, b)
    weights = blocks.posterior_block(operands, *options, into=tiles, first=first)
    width, expected = where.stop - where.start, expected[:, where]
    found = weights[:, :width].double() / blocks.FACTOR
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-3)
    assert not bool(weights[:, width:].any())
    _check_sums(tiles, expected, cosines[:, where], b)
    assert torch.equal(blocks.posterior_block(operands, *options), weights)


def _check_sums(tiles, expected, cosines, b):
    width = expected.shape[1]
    if b == 0.0:
        mass = tiles.sums[0].sum(1, dtype=torch.float64)
        torch.testing.assert_close(mass, expected.sum(1), atol=1e-5, rtol=1e-5)
        return
    mass, excess, count = tiles.sums.sum(2, dtype=torch.float64)
    torch.testing.assert_close(mass, expected.sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(excess, (expected * expected**b).sum(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(count, (expected > 0).sum(1).double())
    is_active = (expected > 0).any(0)
    is_target = (cosines == -torch.inf).any(0)  # may be flagged, or not
    found = tiles.is_active()[:width]
    assert torch.equal(found & ~is_target, is_active & ~is_target)
    assert bool((found | ~is_active).all())


def test_weights_are_cut_off_at_the_largest_number():
    batch = Batch(300, 64, 5)
    operands = (batch.prepared.rounded, batch.copy, batch.labels, batch.num_classes)
    low = torch.full((5,), -2.0, device=DEVICE)
    numbers = (slice(0, 300), (low, torch.zeros_like(low)), 64.0, 0.0)
    tiles = blocks.TileSums.empty(operands, 300, 0.0)
    weights = blocks.posterior_block(operands, *numbers, into=tiles)
    assert float(weights.max()) == torch.finfo(torch.float16).max


def test_entries():
    embeddings = torch.randn(6, 40, device=DEVICE)
    columns = torch.tensor([1, 4, 4, 4, 30, 31], dtype=torch.int32, device=DEVICE)
    entries = torch.tensor([2, 0, 1, 5, 3, 4], device=DEVICE)
    gradient = plain.ClassGradient(columns, entries, torch.randn(6, device=DEVICE))
    for where in (slice(0, 31), slice(4, 6), slice(5, 30)):
        found, expected = torch.ones(2, where.stop - where.start, 40, device=DEVICE).unbind()
        blocks.add_entries_(found, gradient, embeddings, where)
        add_entries_(expected, gradient, embeddings, where)
        torch.testing.assert_close(found, expected)


def test_unit_rows():
    embeddings, gradient = torch.randn(2, 5, 40, device=DEVICE).unbind()
    labels = torch.tensor([3, 0, -100, 7, 1], device=DEVICE)
    embeddings[2] = torch.nan  # ignored
    unit, norms = fused.unit_rows(embeddings, labels, -100)
    expected = plain.unit_rows(embeddings, labels, -100)
    assert bool(unit.isfinite().all())
    torch.testing.assert_close(unit, expected[0])
    torch.testing.assert_close(norms, expected[1])
    torch.testing.assert_close(
        fused.unit_gradient(gradient, unit, norms), plain.unit_gradient(gradient, *expected)
    )
    unit, norms = fused.unit_rows(embeddings * 1e38, labels, -1)  # lengths overflow
    assert bool(norms[[0, 1, 3, 4]].isinf().all()) and bool(unit.isnan().all())


@pytest.fixture
def broken_gpu(monkeypatch):
    """A GPU on which no kernel can be built, for the reason that is put in."""
    reasons = [RuntimeError("Failed to find C compiler")]

    def fail(device):
        raise reasons[0]

    monkeypatch.setattr(dispatch, "_try_kernels", fail)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    dispatch.fault_of_kernels.cache_clear()
    yield reasons
    dispatch.fault_of_kernels.cache_clear()


def test_a_gpu_that_cannot_run_kernels_takes_plain_steps_with_one_warning(broken_gpu):
    given = ("cuda", torch.float32, torch.float16, 10)
    with pytest.warns(RuntimeWarning, match="heads take steps of plain PyTorch"):
        assert dispatch.load_backend(*given) is plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.load_backend(*given) is plain
        assert "Failed to find C compiler" in dispatch.why_not_triton(*given)


def test_memory_that_ran_out_is_no_reason_to_leave_kernels(broken_gpu):
    broken_gpu[0] = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        dispatch.load_backend("cuda", torch.float32, torch.float16, 10)
    dispatch.may_interpret, before = True, dispatch.may_interpret
    try:
        assert dispatch.load_backend("cpu", torch.float32, torch.float16, 10) is fused
    finally:
        dispatch.may_interpret = before


@pytest.mark.parametrize(
    ("major", "shared", "expected"),
    [(9, 232_448, True), (8, 101_376, True), (12, 101_376, False), (7, 65_536, True)],
)
def test_tiles_fit_in_shared_memory(major, shared, expected):
    properties = SimpleNamespace(major=major, shared_memory_per_block_optin=shared)
    assert fused.has_room(properties) == expected
    assert fused.has_room(SimpleNamespace(major=major))  # of a torch that does not tell


@pytest.mark.gpu
def test_the_largest_kernel_runs_here():
    dispatch.fault_of_kernels.cache_clear()
    assert dispatch.fault_of_kernels(torch.cuda.current_device()) is None
