"""Paths on a GPU: the same numbers, half-precision products, no waiting where none is needed."""

import copy

import pytest
import torch

import qmargin
from helpers.heads import (
    Batch,
    Outcome,
    assert_same,
    every_class,
    make_head,
    make_loss,
    random_batch,
    truth_of,
)
from qmargin.heads.optimizers import ExactSGD, SparseSGD

pytestmark = pytest.mark.gpu
EVERY_PATH = ("auto", "sparse", "chunked", "dense", "sampled", "paper")


def cases(*alphas, paths=EVERY_PATH):
    """Paths and alphas that go together."""
    every = [(path, alpha) for path in paths for alpha in alphas]
    return [case for case in every if case[1] > 1.0 or case[0] not in ("sparse", "paper")]


def gpu_step(head: qmargin.MarginClassifier, batch: Batch) -> Outcome:
    """A forward and a backward pass; the results come back to the CPU."""
    embeddings = batch.embeddings.to("cuda", head.prototypes.dtype).requires_grad_()
    head.prototypes.grad = None
    loss = head(embeddings, batch.labels.cuda())
    loss.backward()
    tensors = (loss.detach(), embeddings.grad, head.prototypes.grad)
    return Outcome(*(tensor.cpu() for tensor in tensors), head.last_step)


@pytest.mark.parametrize(("path", "alpha"), cases(1.0, 1.25, 2.0, paths=EVERY_PATH[1:]))
def test_path_matches_the_definition(path, alpha):
    for num_classes in (1, 33, 1031):
        batch = random_batch(num_classes, dim=64, rows=16)
        loss = make_loss(alpha)
        truth = truth_of(loss, batch)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
            taken = qmargin.Chunked(dtype=dtype) if path == "chunked" else every_class(path)
            head = make_head(loss, batch, path=taken, dtype=dtype, device="cuda")
            is_half = path == "paper" and dtype == torch.float32  # cosines are stored in half
            limit = 2e-2 if is_half else tolerance
            assert_same(gpu_step(head, batch), truth, tolerance=limit, note=(num_classes, dtype))


@pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning")
@pytest.mark.parametrize(("path", "alpha"), cases(1.0, 1.25, 2.0, paths=EVERY_PATH[1:]))
def test_references_match_the_definition(path, alpha):
    """M14 and M17: all three at once, and class priors alone, which blocks take by kernels."""
    counts = torch.randint(1, 300, (1031,), generator=torch.Generator().manual_seed(0))
    batch = random_batch(1031, dim=64, rows=16)
    batch.prototypes[200:300] = batch.prototypes[:100] + 0.3 * batch.prototypes[500:600]
    for is_alone in (True, False):
        reference = qmargin.ClassPrior(counts, 0.5)
        if not is_alone:
            pairs = qmargin.LookAlike(0.3, 0.2, damping=0.8, split_threshold=0.5)
            reference = reference + pairs + qmargin.Quality(0.3)
        parts = qmargin.Alpha(alpha), qmargin.PriorMargin(0.05)
        loss = qmargin.MarginLoss(*parts, scale=16.0, reference=reference)
        truth = truth_of(copy.deepcopy(loss), batch)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 3e-5)):
            taken = qmargin.Chunked(dtype=dtype) if path == "chunked" else every_class(path)
            own = copy.deepcopy(loss)
            head = make_head(own, batch, path=taken, dtype=dtype, device="cuda")
            is_half = path == "paper" and dtype == torch.float32
            limit = 3e-2 if is_half else tolerance
            assert_same(gpu_step(head, batch), truth, tolerance=limit, note=(is_alone, dtype))
        if path == "chunked":
            head = make_head(copy.deepcopy(loss), batch, path="chunked", device="cuda")
            assert_same(gpu_step(head, batch), truth, tolerance=3e-2)


@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("screen", [torch.float16, torch.bfloat16])
def test_half_operands_are_as_good_as_their_rounding(alpha, screen):
    batch = random_batch(5003, dim=128, rows=64)
    loss = make_loss(alpha)
    head = make_head(loss, batch, path=qmargin.Chunked(screen_dtype=screen), device="cuda")
    tolerance = 50 * torch.finfo(screen).eps
    assert_same(gpu_step(head, batch), truth_of(loss, batch), tolerance=tolerance)


@pytest.mark.parametrize("dim", [32, 64, 512])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
@pytest.mark.parametrize("optimizer_class", [ExactSGD, SparseSGD])
def test_a_step_leaves_the_copy_as_a_refresh_would(optimizer_class, path, dim):
    """So a training that goes on from a checkpoint has the copy that it had."""
    batch = random_batch(1031, dim=dim, rows=64)
    head = make_head(make_loss(1.25), batch, path=path, device="cuda", gradient="fused")
    optimizer = optimizer_class(head, 0.3)
    for _ in range(3):
        head(batch.embeddings.cuda(), batch.labels.cuda()).backward()
        optimizer.step()
    found = head.copy.clone(), head.inverse_norms.clone()
    head.refresh(force=True)
    assert torch.equal(found[0], head.copy)
    assert torch.equal(found[1], head.inverse_norms)


def test_moving_a_head_moves_everything():
    batch = random_batch(257, dim=64)
    loss = make_loss(1.5)
    head = make_head(loss, batch, path="sparse")
    head(batch.embeddings, batch.labels)
    truth = truth_of(loss, batch)
    assert_same(gpu_step(head.cuda(), batch), truth, tolerance=2e-5)
    assert head.copy.dtype == torch.float16
    head.cpu()(batch.embeddings, batch.labels)
    assert head.copy.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_backward_never_waits_for_the_device():
    batch = random_batch(5003, dim=64, rows=64)
    embeddings, labels = batch.embeddings.cuda().requires_grad_(), batch.labels.cuda()
    for path, loss in (("chunked", qmargin.arcface()), ("sparse", make_loss(1.5))):
        head = make_head(loss, batch, path=path, device="cuda", gradient="fused")
        optimizer = ExactSGD(head, 0.1)
        for is_warm in (False, True):
            loss = head(embeddings, labels)
            torch.cuda.set_sync_debug_mode("error" if is_warm else "default")
            try:
                loss.backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_bad_embeddings_give_a_loss_that_is_not_finite():
    batch = random_batch(257, dim=64)
    embeddings = batch.embeddings.cuda()
    embeddings[2] = torch.nan
    embeddings.requires_grad_()
    for path in ("sparse", "chunked", "dense", "paper"):
        head = make_head(make_loss(1.5), batch, path=path, device="cuda", gradient="fused")
        optimizer = ExactSGD(head, 0.1)
        loss = head(embeddings, batch.labels.cuda())
        assert not bool(loss.detach().isfinite()), path
        loss.backward()
        before = head.prototypes.detach().clone()
        optimizer.step()
        assert optimizer.num_skipped == 1 and torch.equal(before, head.prototypes), path
    head.loss.debug = True
    with pytest.raises(qmargin.QMarginError, match="row 2"):
        head(embeddings, batch.labels.cuda())


def test_a_head_larger_than_the_gpu_is_refused():
    with pytest.raises(qmargin.QMarginError, match="GiB"):
        qmargin.MarginClassifier(512, 10**9, qmargin.q_margin(), device="cuda")


def make_gpu_head(path: str, alpha: float, batch: Batch, **options: object):
    return make_head(make_loss(alpha), batch, path=every_class(path), device="cuda", **options)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize(("path", "alpha"), cases(1.0, 1.25, 3.0))
def test_a_prototype_without_a_direction_makes_loss_and_gradients_nan(path, alpha, value):
    batch = random_batch(5003, dim=64, rows=16)
    batch.labels.clamp_(max=5001)
    head = make_gpu_head(path, alpha, batch)
    gpu_step(head, batch)
    with torch.no_grad():
        head.prototypes[5002] = value
    outcome = gpu_step(head, batch)
    assert outcome.loss.isnan() and outcome.embeddings.isnan().all()
    assert outcome.prototypes[batch.labels].isnan().any(1).all()
    head.gradient, head.prototypes.grad = "fused", None
    optimizer = ExactSGD(head, lr=0.1)
    before = head.prototypes.detach().clone()
    head(batch.embeddings.cuda(), batch.labels.cuda()).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1
    torch.testing.assert_close(head.prototypes.detach(), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("path", ["auto", "sparse", "chunked", "dense", "paper"])
def test_an_embedding_without_a_direction_makes_the_loss_nan(path, value):
    batch = random_batch(1031, dim=64, rows=16)
    batch.embeddings[3] = value
    head = make_gpu_head(path, 1.25, batch)
    assert head(batch.embeddings.cuda(), batch.labels.cuda()).isnan()


@pytest.mark.parametrize(("path", "alpha"), cases(1.0, 1.25))
def test_a_batch_of_ignored_rows_leaves_zeros(path, alpha):
    batch = random_batch(1031, dim=64, rows=8)
    batch.labels.fill_(-100)
    outcome = gpu_step(make_gpu_head(path, alpha, batch), batch)
    assert outcome.loss.isnan()
    assert (outcome.embeddings == 0).all() and (outcome.prototypes == 0).all()


@pytest.mark.parametrize("gradient", ["dense", "fused"])
@pytest.mark.parametrize("path", ["auto", "sparse", "chunked"])
def test_prototypes_written_through_data_are_seen(path, gradient):
    batch, other = random_batch(1031, dim=64, seed=1), random_batch(1031, dim=64, seed=2)
    head, fresh = (make_gpu_head(path, 1.25, part, gradient=gradient) for part in (other, batch))
    rows, labels = batch.embeddings.cuda(), batch.labels.cuda()
    truth = fresh(rows, labels)
    head(rows, labels)
    head.prototypes.data.copy_(batch.prototypes)
    assert torch.equal(head(rows, labels), truth)


@pytest.mark.parametrize("path", ["sparse", "chunked", "dense"])
def test_rows_of_the_loss(path):
    batch = random_batch(1031, dim=64, rows=8)
    weights = torch.linspace(-1.0, 2.0, 8, device="cuda")
    gradients = {}
    for name in (path, "dense"):
        head = make_gpu_head(name, 1.25, batch)
        head.loss.reduction = "none"
        if name == "chunked":
            head.path = qmargin.Chunked(dtype=torch.float32)
        rows = batch.embeddings.cuda().requires_grad_()
        (head(rows, batch.labels.cuda()) * weights).sum().backward()
        gradients[name] = (rows.grad, head.prototypes.grad)
    for ours, theirs in zip(gradients[path], gradients["dense"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
