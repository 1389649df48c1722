"""Passes with kernels against plain ones on the same rounded operands; interpreted on a CPU."""

import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import qmargin
from helpers.heads import (
    Batch,
    Outcome,
    assert_same,
    make_head,
    make_loss,
    random_batch,
    screened,
    step,
    truth_of,
)
from qmargin.heads import chunked as fused_chunks
from qmargin.heads.chunked import Chunks, FusedChunkedStep, FusedChunks, solve
from qmargin.heads.optimizers import ExactSGD
from qmargin.kernels import dispatch
from qmargin.kernels.head_reference import ClassGradient, Target
from qmargin.kernels.solver import posterior_rows, solve_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pair(alpha, num_classes, scale=16.0):
    batch = random_batch(num_classes, rows=5)
    head = make_head(make_loss(alpha, scale), batch, path=screened("chunked", torch.float16))
    head = head.to(DEVICE)
    head.refresh()
    unit = torch.nn.functional.normalize(batch.embeddings).to(DEVICE)
    return [make(head, unit, batch.labels.to(DEVICE)) for make in (Chunks, FusedChunks)]


def assert_solutions_agree(plain, fused):
    for name in ("others_mass", "excess", "support_size", "num_active", "pulled"):
        found, expected = getattr(fused, name).double(), getattr(plain, name).double()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-3)
    assert float(fused.mass_error.max()) < 1e-4


@pytest.mark.parametrize(
    ("num_classes", "alpha"), [(1, 1.25), (33, 1.0), (33, 2.0), (330, 1.0), (330, 1.25), (330, 2.0)]
)
def test_solution_and_gradient(alpha, num_classes, monkeypatch):
    monkeypatch.setitem(fused_chunks.FUSED_LOGITS, "cuda", 5 * 288)  # several blocks
    monkeypatch.setattr(fused_chunks, "NUM_COARSE", 4)
    plain, fused = make_pair(alpha, num_classes)
    target = Target(
        *torch.tensor([[3.0, -1.0, 9.0, 0.0, 15.0], [-0.8] * 5], device=DEVICE).double()
    )
    expected, found = (solve(chunks, target, pulls=True) for chunks in (plain, fused))
    assert_solutions_agree(expected, found)
    if alpha > 1.0:  # a sparse step may leave its maxima
        fused.group_maxima = fused.head.kernels.group_maxima(*fused.batch)
        assert_solutions_agree(expected, solve(fused, target, pulls=True))
        assert fused.group_maxima is None
    weighted = torch.randn_like(plain.embeddings)
    columns, rows = plain.labels.int().sort(stable=True)
    targets = ClassGradient(columns, rows, torch.randn(5, device=DEVICE))
    pushed = []
    for chunks in (plain, fused):
        level = (expected.anchor, expected.level)
        parts = list(chunks.pushes(*level, weighted, targets))
        assert [part[0].start for part in parts] == [where.start for where in chunks.ranges()]
        pushed.append(torch.cat([part[1] for part in parts]))
    scale = float(pushed[0].abs().max())
    torch.testing.assert_close(pushed[1] / scale, pushed[0] / scale, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("alpha", "scale"), [(1.25, 1.0), (2.0, 0.02)])
def test_a_sample_starts_the_search(alpha, scale):
    plain, fused = make_pair(alpha, 1100, scale)
    plain.labels[0] = fused.labels[0] = 16 * 17  # in the sample
    target = Target(*torch.tensor([[0.5 * scale] * 5, [-0.8] * 5], device=DEVICE).double())
    few = [chunks.sample(16) for chunks in (plain, fused)]
    level = (target.logits, torch.full_like(target.logits, 0.15 if alpha < 2.0 else 0.01))
    expected, found = (chunks.row_sums(*level) for chunks in few)
    torch.testing.assert_close(found.mass, expected.mass, atol=0.0, rtol=1e-4)
    torch.testing.assert_close(found.slope, expected.slope, atol=0.0, rtol=1e-4)
    expected, found = (chunks.bounds().cosines.amax(1) for chunks in few)
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=0.0)
    expected, found = (solve(chunks, target, pulls=True) for chunks in (plain, fused))
    assert_solutions_agree(expected, found)


@pytest.mark.parametrize("scale", [16.0, 200.0])
def test_a_softmax_whose_largest_cosine_comes_late(scale, monkeypatch):
    """The guess from the first block can be so low that weights are cut off; that is found out."""
    monkeypatch.setitem(fused_chunks.FUSED_LOGITS, "cuda", 5 * 64)
    monkeypatch.setattr(fused_chunks, "GUESS_CLASSES", 64)
    plain, fused = make_pair(1.0, 700, scale)
    for chunks in (plain, fused):
        chunks.head.prototypes.data[650] = 2.0 * chunks.embeddings[1]
        chunks.labels[1] = 0
    plain.head.refresh(force=True)
    expected, found = plain.softmax_sums(pulls=True), fused.softmax_sums(pulls=True)
    assert found.verify() == (scale == 16.0)
    if not found.verify():
        found = fused.softmax_sums(pulls=True, is_certain=True)
        assert found.verify()
    # each relative to a cosine of its own
    factor = ((found.top - expected.top).double() * scale).exp()
    torch.testing.assert_close(factor * found.mass, expected.mass, atol=0, rtol=1e-4)
    pulled = factor[:, None].float() * found.pulled
    torch.testing.assert_close(pulled, expected.pulled, atol=1e-3, rtol=2e-3)


def exact_posterior(chunks, target, b):
    """Posterior of the others and the target ``[B, k + 1]``, of the rounded operands in float64."""
    cosines = chunks.operand.double() @ chunks.copy[: len(chunks.prototypes)].double().t()
    cosines.scatter_(1, chunks.labels[:, None], -torch.inf)
    logits = torch.cat([cosines * chunks.scale, target.logits[:, None]], 1)
    reference = torch.zeros_like(logits)
    reference[:, -1] = target.log_reference
    anchor, level, _ = solve_rows(logits, reference, b)
    return posterior_rows(logits, reference, anchor, level, b)[0]


def assert_root(chunks, solved, target, b):
    posterior = exact_posterior(chunks, target, b)
    others = posterior[:, :-1]
    torch.testing.assert_close(solved.others_mass, others.sum(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(solved.excess, (others * others**b).sum(1), atol=1e-5, rtol=0)
    unit = chunks.copy[: others.shape[1]].double()
    torch.testing.assert_close(solved.pulled.double(), others @ unit, atol=1e-3, rtol=0)
    support = (posterior > 0).sum(1)
    assert bool(((solved.support_size - support).abs() <= 1 + 1e-3 * support).all())  # at the edge
    assert float(solved.mass_error.max()) <= 64 * torch.finfo(torch.float32).eps


ALPHAS = [1.03, 1.1, 1.25, 1.3, 1.5, 1.7, 2.0]


@pytest.mark.parametrize("sample", [8, 200, 1 << 16])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_rows_of_every_width(alpha, sample, monkeypatch):
    """Targets with all mass, a part of it and none; samples of too few classes, and of all."""
    monkeypatch.setattr(fused_chunks, "SAMPLE", sample)
    monkeypatch.setitem(fused_chunks.FUSED_LOGITS, "cuda", 5 * 256)
    _, fused = make_pair(alpha, 900, scale=6.0)
    fused.labels[1] = 0  # in every sample
    logits, reference = [60.0, 6.0, 2.0, -1.0, -90.0], [0.0, -3.0, -0.8, -9.0, -0.8]
    target = Target(*torch.tensor([logits, reference], device=DEVICE).double())
    guessed = solve(fused, target, pulls=True, is_certain=False)
    assert guessed.verify()
    assert_root(fused, guessed, target, alpha - 1.0)
    assert float(guessed.others_mass[0]) == 0.0 and float(guessed.others_mass[4]) > 0.99


def test_maxima_of_a_sparse_step_begin_the_search(monkeypatch):
    monkeypatch.setattr(fused_chunks, "SAMPLE", 64)
    _, fused = make_pair(1.25, 700)
    target = Target(*torch.tensor([[3.0] * 5, [-0.8] * 5], device=DEVICE).double())
    fused.group_maxima = fused.head.kernels.group_maxima(*fused.batch)
    assert_root(fused, solve(fused, target, pulls=True), target, 0.25)


@pytest.mark.parametrize("alpha", [1.25, 1.3, 2.0])
def test_a_search_that_ends_too_early_is_found_out_and_goes_on(alpha, monkeypatch):
    monkeypatch.setattr(fused_chunks, "NUM_PASSES", 1)
    _, fused = make_pair(alpha, 700, scale=3.0)
    target = Target(*torch.tensor([[0.5] * 5, [-0.8] * 5], device=DEVICE).double())
    assert not solve(fused, target, pulls=True, is_certain=False).verify()
    assert_root(fused, solve(fused, target, pulls=True), target, alpha - 1.0)


@pytest.mark.parametrize("num_classes", [1, 2, 700])
def test_rows_without_a_root_and_without_others(num_classes, monkeypatch):
    monkeypatch.setattr(fused_chunks, "SAMPLE", 64)
    _, fused = make_pair(1.25, num_classes)
    target = torch.tensor([[3.0, -1.0, torch.nan, 0.0, 15.0], [-0.8] * 5], device=DEVICE)
    solved = solve(fused, Target(*target.double()), pulls=True, is_certain=False)
    assert solved.verify()  # a row without a root is nothing that more passes could mend
    for numbers in (solved.level, solved.others_mass, solved.mass_error):
        assert numbers.isnan().tolist() == [False, False, True, False, False]
    if num_classes == 1:
        assert solved.others_mass[[0, 1, 3, 4]].tolist() == [0.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", ALPHAS)
def test_wide_supports_of_many_classes(alpha):
    """Against float64 over all classes, where a sample begins the search and tiles are full."""
    torch.manual_seed(0)
    scale = 4.0 / (alpha - 1.0) ** 0.5
    batch = random_batch(300_001, dim=64, rows=200)
    head = make_head(make_loss(alpha, scale), batch, path=screened("chunked", torch.float16))
    head = head.to("cuda")
    head.refresh()
    unit = torch.nn.functional.normalize(batch.embeddings).cuda()
    fused = FusedChunks(head, unit, batch.labels.cuda())
    logits = scale * torch.linspace(-1.0, 1.0, 200, device="cuda").double()
    target = Target(logits, torch.full_like(logits, -0.8))
    solved = solve(fused, target, pulls=True, is_certain=False)
    assert solved.verify()
    assert_root(fused, solved, target, alpha - 1.0)


@pytest.fixture
def interpreted_steps(monkeypatch):
    """Steps by blocks of 128 classes, by kernels."""
    if DEVICE == "cpu":
        monkeypatch.setattr(dispatch, "may_interpret", True)
    monkeypatch.setattr(FusedChunks, "tile", 128)
    monkeypatch.setitem(fused_chunks.FUSED_LOGITS, "cuda", 5 * 128)


def block_head(loss, batch, num_kept=0, **options):
    path = replace(screened("chunked", torch.float16), matrix_logits=num_kept)
    return make_head(loss, batch, path=path, **options).to(DEVICE)


def step_of(head, batch):
    parts = (batch.embeddings, batch.labels, batch.prototypes)
    found = step(head, Batch(*(part.to(DEVICE) for part in parts)))
    return Outcome(*(part.cpu() for part in (found.loss, found.embeddings, found.prototypes)), None)


@pytest.mark.usefixtures("interpreted_steps")
@pytest.mark.parametrize(("num_classes", "num_kept"), [(1, 0), (2, 0), (700, 0), (700, 5 * 300)])
@pytest.mark.parametrize(
    ("alpha", "margin"),
    [
        (1.0, qmargin.CosineMargin(0.2)),
        (1.25, qmargin.AngularMargin(0.3)),
        (1.3, qmargin.PriorMargin(0.05)),
        (2.0, qmargin.PriorMargin(0.02) + qmargin.AngularMargin(0.1)),
        (1.0, qmargin.MagFaceMargin()),  # not in closed form
    ],
)
def test_steps_match_the_definition(alpha, margin, num_kept, num_classes):
    batch = random_batch(num_classes, dim=16, rows=5)
    loss = make_loss(alpha, margin=margin)
    head = block_head(loss, batch, num_kept)
    found = step_of(head, batch)
    truth = truth_of(loss, batch)
    tolerance = 5e-3  # of products whose operands are float16
    assert_same(found, truth, tolerance=tolerance)
    is_fused = not isinstance(margin, qmargin.MagFaceMargin)
    assert isinstance(head._step, FusedChunkedStep) == is_fused
    assert head.last_step.path == "chunked" and head.last_step.mass_error < 1e-5
    assert head.last_step.support_mean <= num_classes


@pytest.mark.usefixtures("interpreted_steps")
@pytest.mark.parametrize("alpha", [1.0, 1.25])
def test_posteriors_that_are_kept_change_nothing_and_are_freed(alpha):
    batch = random_batch(700, dim=16, rows=5)
    loss = make_loss(alpha, margin=qmargin.CosineMargin(0.2))
    found = []
    for num_kept in (0, 5 * 256, 5 * 699):
        head = block_head(loss, batch, num_kept, gradient="fused")
        optimizer = ExactSGD(head, lr=0.1)
        rows, labels = batch.embeddings.to(DEVICE), batch.labels.to(DEVICE)
        head(rows.requires_grad_(), labels).backward(retain_graph=True)
        kept = head.fused_gradient.kept.blocks
        assert len(kept) == num_kept // (5 * 256)  # two blocks at a time
        gradient = head.fused_gradient.to_dense(head.prototypes.detach())
        assert torch.equal(gradient, head.fused_gradient.to_dense(head.prototypes.detach()))
        found.append(gradient)
        block = weakref.ref(kept[0][1]) if kept else None
        del kept
        optimizer.step()
        assert block is None or block() is None
    largest = float(found[0].abs().max())
    for gradient in found[1:]:
        error = float((gradient - found[0]).abs().max()) / largest
        assert error <= (2e-3 if alpha == 1.0 else 0.0)  # a softmax keeps weights, not posteriors


@pytest.mark.usefixtures("interpreted_steps")
@pytest.mark.parametrize("alpha", [1.0, 1.25])
def test_a_prototype_without_a_direction_spoils_a_step(alpha):
    batch = random_batch(300, dim=16, rows=5)
    batch.labels.clamp_(max=298)
    head = block_head(make_loss(alpha), batch, gradient="fused")
    optimizer = ExactSGD(head, lr=0.1)
    with torch.no_grad():
        head.prototypes[299] = 0.0
    before = head.prototypes.detach().clone()
    rows = batch.embeddings.to(DEVICE).requires_grad_()
    value = head(rows, batch.labels.to(DEVICE))
    value.backward()
    optimizer.step()
    assert value.isnan() and rows.grad.isnan().all()
    assert optimizer.num_skipped == 1 and torch.equal(head.prototypes, before)


@pytest.mark.usefixtures("interpreted_steps")
@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("label", [-3, 50, 1 << 40])
def test_a_label_out_of_range_spoils_its_own_row_only(label, alpha, monkeypatch):
    monkeypatch.setattr("qmargin.heads.classifier.checked_labels", lambda labels, *_: labels)
    batch = random_batch(50, dim=16, rows=5)
    loss = make_loss(alpha)
    loss.reduction = "none"
    labels = batch.labels.clone()
    labels[2] = label
    value = block_head(loss, batch)(batch.embeddings.to(DEVICE), labels.to(DEVICE))
    assert value.isnan().tolist() == [False, False, True, False, False]
