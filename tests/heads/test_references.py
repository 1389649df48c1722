"""Every path of the head with reference measures, against all cosines in float64."""

import copy
import math
from dataclasses import replace

import pytest
import torch

import qmargin
from helpers.heads import (
    Batch,
    Outcome,
    assert_same,
    every_class,
    fused_gradient,
    make_head,
    random_batch,
    step,
    truth_of,
)
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD
from qmargin.heads.reference import row_reference
from qmargin.kernels import head_reference as kernels
from qmargin.kernels.head_reference import Target

pytestmark = pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")
CLASSES, DIM = 331, 16
COUNTS = torch.randint(1, 400, (CLASSES,), generator=torch.Generator().manual_seed(1))
REFERENCES = {
    "prior": lambda: qmargin.ClassPrior(COUNTS, 0.5),
    "pairs": lambda: qmargin.LookAlike(0.5, 0.2),
    "damped": lambda: qmargin.LookAlike(0.2, 0.1, damping=0.9, split_threshold=0.4),
    "quality": lambda: qmargin.Quality(0.4),
    "all": lambda: (
        qmargin.ClassPrior(COUNTS, 0.7, margin_power=0.25)
        + qmargin.LookAlike(0.3, 0.2, damping=0.9, split_threshold=0.5)
        + qmargin.Quality(0.4)
    ),
}


def make_loss(alpha, name, scale=16.0, margin=0.03):
    return qmargin.MarginLoss(
        qmargin.Alpha(alpha), qmargin.PriorMargin(margin), scale=scale, reference=REFERENCES[name]()
    )


@pytest.fixture
def batch():
    """Some prototypes are near others."""
    batch = random_batch(CLASSES, DIM, 8)
    batch.prototypes[40:60] = batch.prototypes[:20] + 0.3 * batch.prototypes[100:120]
    batch.prototypes[batch.labels[:4] - 1] = batch.prototypes[batch.labels[:4]] * 1.5 + 0.1
    return batch


CASES = [
    *((path, alpha) for path in ("sparse", "chunked", "dense", "auto", "sampled", "top_k")
      for alpha in (1.25, 2.0)),
    *((path, alpha) for path in ("sparse", "chunked") for alpha in (1.05, 1.3, 1.5, 3.0)),
    *((path, alpha) for path in ("chunked", "dense") for alpha in (0.7, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("path", "alpha"), CASES)
def test_loss_and_gradients_are_those_of_all_classes(path, alpha, name, batch):
    """M14 on every path; the gradient is that of a detached reference."""
    if alpha < 1.0 and REFERENCES[name]().scales_margins:
        pytest.skip("an error of its own")
    scale = 3.0 if alpha == 3.0 else 16.0
    loss = make_loss(alpha, name, scale)
    truth = truth_of(copy.deepcopy(loss), batch)
    for dtype, tolerance in ((torch.float64, 2e-11), (torch.float32, 2e-5)):
        options = {"path": every_class(path), "dtype": dtype}
        found = step(make_head(copy.deepcopy(loss), batch, **options), batch)
        assert_same(found, truth, tolerance=tolerance, note=dtype)
        assert found.stats.mass_error < 10 * tolerance


@pytest.mark.parametrize("name", ["prior", "damped", "all"])
@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_the_bound_is_one_and_lists_hold_every_active_class(alpha, name, batch):
    """M16: the floor from group minima is at most the true edge, whatever the classes."""
    loss = make_loss(alpha, name, 3.0 if alpha == 3.0 else 16.0)
    head = make_head(loss, batch, path="sparse", dtype=torch.float64)
    step(head, batch)
    solved = head._step.solved
    unit = torch.nn.functional.normalize(batch.embeddings.double())
    columns = batch.labels
    head.refresh()
    maxima = kernels.group_maxima(unit, head.copy, columns, CLASSES)
    targets = torch.nn.functional.normalize(batch.prototypes.double())[columns]
    reference = row_reference(head, targets)
    term = loss.eval().target_margin(
        (unit * targets).sum(1),
        loss.scale,
        labels=columns,
        norms=batch.embeddings.double().norm(dim=1),
    )
    lower = reference.group_minima()
    pairs = kernels.list_pairs(
        maxima, Target(term.logits, term.log_reference), torch.full((8,), 1e-12).double(),
        scale=loss.scale, b=alpha - 1.0, lower=lower,
    )  # fmt: skip
    edge = (solved.tau - 1.0 / (alpha - 1.0)) / loss.scale
    assert bool((pairs.floor <= edge + 1e-12).all())
    every = reference.part(slice(0, CLASSES), torch.nn.functional.normalize(
        batch.prototypes.double()), torch.float64)  # fmt: skip
    grouped = torch.nn.functional.pad(every.expand(8, -1), (0, -CLASSES % 32), value=math.inf)
    assert bool((grouped.unflatten(1, (-1, 32)).amin(2) >= lower - 1e-12).all())
    low, high = reference.bounds
    assert low <= float(every.amin()) and float(every.amax()) <= high


def test_a_screen_that_left_the_measures_out_would_be_wrong(batch):
    """With q below one the bound of unit measures lies above the edge: the minima are needed."""
    loss = make_loss(1.25, "prior", 16.0)
    loss.reference.strength = 4.0
    head = make_head(loss, batch, path="sparse", dtype=torch.float64)
    rare = COUNTS < 100
    batch.embeddings.copy_(batch.prototypes[rare][:8] * 3.0)
    truth = truth_of(copy.deepcopy(loss), batch)
    assert_same(step(head, batch), truth, tolerance=1e-10)
    wrong = kernels.RowReference.group_minima
    try:
        kernels.RowReference.group_minima = lambda self: None
        with pytest.raises(AssertionError):
            assert_same(step(head, batch), truth, tolerance=1e-10)
    finally:
        kernels.RowReference.group_minima = wrong


@pytest.mark.parametrize("path", ["sparse", "chunked", "dense", "auto"])
def test_references_of_ones_change_nothing_to_the_last_bit(path, batch):
    options = (qmargin.Alpha(1.25), qmargin.PriorMargin(0.05))
    ones = qmargin.ClassPrior([3] * CLASSES, 2.0) + qmargin.LookAlike(0.0) + qmargin.Quality(0.0)
    found = [
        step(make_head(qmargin.MarginLoss(*options, scale=16.0, reference=one), batch, path=path),
             batch)
        for one in (None, ones)
    ]  # fmt: skip
    for name in ("loss", "embeddings", "prototypes"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))


@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_lists_too_long_ignored_rows_and_updates(path, batch):
    """A step that is redone by blocks, rows that do not count, and a fused update."""
    loss = make_loss(1.25, "all")
    batch.labels[2] = -100
    batch.embeddings[2] = torch.nan
    kept = torch.arange(8) != 2
    fewer = Batch(batch.embeddings[kept], batch.labels[kept], batch.prototypes)
    truth = truth_of(copy.deepcopy(loss), fewer)
    chosen = qmargin.Sparse(list_capacity=0) if path == "sparse" else path
    head = make_head(copy.deepcopy(loss), batch, path=chosen, gradient="fused", dtype=torch.float64)
    found = step(head, batch)
    assert head.last_step.path == "chunked"
    assert int(head.loss.reference.parts[2].num_batches) == 1  # also of a step that was redone
    assert found.embeddings[2].tolist() == [0.0] * DIM
    assert_same(replace(found, embeddings=found.embeddings[kept]), truth, tolerance=1e-10)
    head.path = path
    update = ExactSGD(head, 0.1)
    head(batch.embeddings.double(), batch.labels).backward()
    before = head.prototypes.detach().clone()
    update.step()
    assert not torch.equal(head.prototypes, before)


@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_a_reference_may_change_between_steps_and_not_inside_one(path, batch):
    """Nothing of it is kept, so nothing can be out of date."""
    loss = make_loss(1.25, "prior")
    head = make_head(loss, batch, path=path, dtype=torch.float64)
    step(head, batch)
    loss.reference.strength = -0.3
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-10)
    loss.reference.counts[:50] = 1000
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-10)

    class Own(qmargin.Reference):
        kept = torch.linspace(-1.0, 1.0, CLASSES).double()

        def per_class(self):
            return self.kept

    head.loss = qmargin.MarginLoss(*(loss.divergence, loss.margin), scale=16.0, reference=Own())
    embeddings = batch.embeddings.double().requires_grad_()
    value = head(embeddings, batch.labels)
    Own.kept.mul_(2.0)
    if path == "chunked":  # its backward pass computes the blocks once more
        with pytest.raises(ConfigError, match="the reference changed"):
            value.backward()
    else:
        value.backward()
    assert_same(step(head, batch), truth_of(head.loss, batch), tolerance=1e-10)


@pytest.mark.parametrize("gradient", ["dense", "fused"])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_a_backward_pass_has_the_numbers_of_its_forward_pass(path, gradient, batch):
    loss = make_loss(1.25, "all")
    truth = truth_of(copy.deepcopy(loss), batch)
    head = make_head(loss, batch, path=path, gradient=gradient, dtype=torch.float64)
    embeddings = batch.embeddings.double().requires_grad_()
    value = head(embeddings, batch.labels)
    for part in loss.reference.parts:
        part.strength = 5.0
    loss.reference.parts[0].counts[:100] = 7
    value.backward()
    gradient = head.prototypes.grad if gradient == "dense" else fused_gradient(head)
    found = Outcome(value.detach(), embeddings.grad, gradient.to_dense())
    assert_same(found, truth, tolerance=1e-10)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_measures_that_are_no_numbers_are_refused(path, value, batch):
    class Own(qmargin.Reference):
        def per_class(self):
            return torch.zeros(CLASSES).double().index_fill_(0, torch.tensor([3]), value)

    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.25), qmargin.PriorMargin(0.1), scale=4.0, reference=Own()
    )
    with pytest.raises(DataError, match="log references of the classes are between"):
        step(make_head(loss, batch, path=path), batch)


def test_a_sample_of_the_classes_takes_their_own_measures(batch):
    loss = make_loss(1.25, "all")
    head = make_head(copy.deepcopy(loss), batch, path=qmargin.Sampled(0.3), dtype=torch.float64)
    found = step(head, batch)
    assert float(found.loss) > 0 and found.stats.path == "sampled"
    columns = (found.prototypes != 0).any(1)
    assert 0 < int(columns.sum()) <= 0.3 * CLASSES
    classes = torch.arange(CLASSES)
    only = make_head(copy.deepcopy(loss), batch, path=qmargin.Sampled(1.0), dtype=torch.float64)
    assert_same(step(only, batch), truth_of(copy.deepcopy(loss), batch, classes), tolerance=1e-10)


def test_the_state_goes_with_the_head(batch):
    loss = make_loss(1.25, "all")
    head = make_head(loss, batch, path="sparse")
    step(head, batch)
    other = make_head(make_loss(1.25, "all"), batch, path="sparse")
    with torch.no_grad():
        other.prototypes.zero_()
    other.load_state_dict(head.state_dict())
    outcomes = [step(one.eval(), batch) for one in (head, other)]
    assert torch.equal(outcomes[0].loss, outcomes[1].loss)
    again = copy.deepcopy(head)
    assert torch.equal(step(again, batch).loss, outcomes[0].loss)


def test_a_wrong_number_of_classes_is_refused(batch):
    loss = qmargin.MarginLoss(
        qmargin.Alpha(1.25), qmargin.PriorMargin(0.1), scale=16.0,
        reference=qmargin.ClassPrior([1, 2, 3], 0.1),
    )  # fmt: skip
    with pytest.raises(ShapeError, match="3 counts and there are 331 classes"):
        MarginClassifier(DIM, CLASSES, loss)
    head = make_head(make_loss(1.25, "quality"), batch)
    head.loss = loss
    with pytest.raises(ShapeError, match="3 counts"):
        step(head, batch)


def test_measures_far_from_one_keep_rows_finite(batch):
    for path in ("sparse", "chunked"):
        loss = make_loss(1.25, "pairs", 32.0)
        loss.reference.strength, loss.reference.threshold = 0.8, -1.0  # up to e^51
        found = step(make_head(loss, batch, path=path, dtype=torch.float64), batch)
        assert_same(found, truth_of(loss, batch), tolerance=1e-8)
        assert bool(found.loss.isfinite())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.02, 1.25, 1.5, 2.0, 3.0])
def test_measures_far_below_one_leave_their_classes_out(alpha, dtype, batch):
    """As if these classes were not there; a search that began at the smallest would find NaN."""
    scale = 3.0 if alpha == 3.0 else 16.0
    counts = COUNTS.clone()
    counts[::40] = 10**9  # the mean: the others are rare, and some of them the rows' own
    counts[batch.labels] = 10**9
    references = (
        qmargin.LookAlike(0.0, damping=8.0, split_threshold=-0.5),
        qmargin.ClassPrior(counts, 4.0),
        qmargin.ClassPrior(counts, 2.0) + qmargin.LookAlike(0.0, damping=4.0, split_threshold=0.0),
    )
    for reference in references:
        options = (qmargin.Alpha(alpha), qmargin.PriorMargin(0.03))
        loss = qmargin.MarginLoss(*options, scale=scale, reference=reference)
        truth = truth_of(copy.deepcopy(loss), batch)
        assert bool(truth.loss.isfinite())
        for path in ("chunked", "dense", *(("sparse", "top_k") if alpha > 1.0 else ())):
            found = step(make_head(copy.deepcopy(loss), batch, path=path, dtype=dtype), batch)
            tolerance = 1e-9 if dtype == torch.float64 else 1e-4
            assert_same(found, truth, tolerance=tolerance, note=(path, reference))
            assert found.stats.mass_error < tolerance


@pytest.mark.parametrize("path", ["sparse", "chunked", "dense"])
def test_an_inference_has_the_same_loss(path, batch):
    head = make_head(make_loss(1.5, "all"), batch, path=path)
    with torch.inference_mode():  # its tensors have no version
        found = head(batch.embeddings, batch.labels)
    rows = batch.embeddings.clone().requires_grad_()
    loss = head(rows, batch.labels)
    loss.backward()  # what was kept can be used in training
    assert torch.equal(found, loss.detach())
