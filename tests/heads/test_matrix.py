"""Steps by one half-precision matrix: in the interpreter, or captured on a GPU."""

import ctypes
import gc
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import qmargin
from helpers.heads import (
    Batch,
    assert_same,
    make_head,
    make_loss,
    random_batch,
    screened,
    step,
    truth_of,
)
from qmargin.devices import Reading
from qmargin.errors import ConfigError, ShapeError
from qmargin.heads import matrix as steps
from qmargin.heads import paths
from qmargin.heads.chunked import FusedChunkedStep
from qmargin.heads.matrix import MatrixGradient, MatrixStep
from qmargin.heads.optimizers import ExactSGD, SparseSGD, clip_grad_norm_
from qmargin.heads.paths import Auto
from qmargin.heads.sparse import FusedSparseStep, SparseStep
from qmargin.kernels import dispatch
from qmargin.kernels.triton import matrix, replay
from qmargin.kernels.triton.replay import Recording

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes
interpreted = pytest.mark.skipif(HAS_GPU, reason="runs for real in the tests marked gpu")
HALF_PRODUCTS = 5e-3  # gradients of products whose operands are float16


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(dispatch, "may_interpret", True)


def matrix_head(loss, batch, path="sparse", **options):
    taken = screened(path, torch.float16)
    return make_head(loss, batch, path=replace(taken, **options.pop("settings", {})), **options)


def record(head) -> MatrixStep:
    assert isinstance(head._step, MatrixStep)
    return head._step


def rows_of(batch: Batch, count: int) -> Batch:
    return Batch(batch.embeddings[:count], batch.labels[:count], batch.prototypes)


@interpreted
@pytest.mark.parametrize("num_classes", [1, 2, 33, 200])
@pytest.mark.parametrize(
    ("alpha", "margin"),
    [
        (1.25, qmargin.PriorMargin(0.05)),
        (1.3, qmargin.AngularMargin(0.3)),
        (1.5, qmargin.CosineMargin(0.2)),
        (2.0, qmargin.PriorMargin(0.02) + qmargin.AngularMargin(0.1)),
    ],
)
def test_sparse_steps_match_the_definition(alpha, margin, num_classes):
    batch = random_batch(num_classes, dim=16, rows=5)
    loss = make_loss(alpha, margin=margin)
    head = matrix_head(loss, batch)
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=2e-5)
    record(head)
    assert head.last_step.path == "sparse" and head.last_step.mass_error < 1e-12


@interpreted
@pytest.mark.parametrize("num_classes", [1, 2, 33, 200])
@pytest.mark.parametrize("margin", [qmargin.AngularMargin(0.3), qmargin.CosineMargin(0.2)])
def test_softmax_steps_match_the_definition(margin, num_classes):
    batch = random_batch(num_classes, dim=16, rows=5)
    loss = make_loss(1.0, margin=margin)
    head = matrix_head(loss, batch, "chunked")
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=HALF_PRODUCTS)
    record(head)
    assert head.last_step.path == "chunked" and head.last_step.reason.endswith("; by one matrix")


@interpreted
@pytest.mark.parametrize(("capacity", "entries"), [(2, 8), (8192, 1)])
def test_rows_whose_lists_are_too_short_are_solved_without_them(monkeypatch, capacity, entries):
    monkeypatch.setattr(matrix, "LANE_ENTRIES", entries)
    monkeypatch.setattr(matrix, "LIST_BLOCK", 128)
    monkeypatch.setattr(steps, "CAPACITY", capacity)
    monkeypatch.setattr(matrix, "SMALLEST_LIST", capacity)
    batch = random_batch(300, dim=16, rows=4)
    loss = make_loss(1.25, scale=4.0)  # most classes are active
    head = matrix_head(loss, batch)
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=2e-5)
    record(head)


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("limit", [1 << 29, 0])  # by one matrix, by lists or blocks
@pytest.mark.parametrize(("path", "alpha"), [("sparse", 1.5), ("chunked", 1.0), ("chunked", 1.5)])
def test_ignored_rows_and_reductions(reduction, limit, path, alpha):
    batch = random_batch(50, dim=16, rows=6)
    margin = qmargin.PriorMargin(0.05)
    loss = qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=16.0, reduction=reduction)
    head = matrix_head(loss, batch, path, settings={"matrix_logits": limit})
    rows, labels = batch.embeddings.clone(), batch.labels.clone()
    labels[[1, 4]] = -100
    rows[1] = torch.nan
    rows.requires_grad_()
    value = head(rows, labels)
    weights = torch.linspace(1.0, 9.0, 6) if reduction == "none" else torch.tensor(3.0)
    (value * weights).sum().backward()
    if limit == 1 << 29 and (path, alpha) != ("chunked", 1.5):
        kind = MatrixStep
    else:
        kind = FusedSparseStep if path == "sparse" else FusedChunkedStep
    assert type(head._step) is kind
    exact = batch.embeddings.double().requires_grad_()
    prototypes = batch.prototypes.double().requires_grad_()
    unit = torch.nn.functional.normalize
    kept = [0, 2, 3, 5]
    each = qmargin.margin_loss(
        unit(exact[kept]) @ unit(prototypes).t(), batch.labels[kept],
        divergence=loss.divergence, margin=loss.margin, scale=16.0,
    )  # fmt: skip
    rtol, atol = (1e-5, 1e-6) if path == "sparse" else (5e-3, 1e-4)
    if reduction == "none":
        assert value[[1, 4]].eq(0).all()
        torch.testing.assert_close(value[kept].double(), each, rtol=rtol, atol=atol)
        (each * weights[kept]).sum().backward()
    else:
        total = each.mean() if reduction == "mean" else each.sum()
        torch.testing.assert_close(value.double(), total, rtol=rtol, atol=atol)
        (3.0 * total).backward()
    assert rows.grad[[1, 4]].eq(0).all()
    tolerance = 1e-5 if path == "sparse" else HALF_PRODUCTS
    for found, truth in (
        (rows.grad[kept], exact.grad[kept]),
        (head.prototypes.grad, prototypes.grad),
    ):
        assert float((found.double() - truth).abs().max() / truth.abs().max()) < tolerance


@interpreted
def test_a_mean_of_no_rows_is_nan_with_zero_gradients():
    batch = random_batch(50, dim=16, rows=3)
    head = matrix_head(make_loss(1.5), batch)
    rows = batch.embeddings.clone().requires_grad_()
    value = head(rows, torch.full_like(batch.labels, -100))
    value.backward()
    assert value.isnan() and rows.grad.eq(0).all() and head.prototypes.grad.eq(0).all()


@interpreted
@pytest.mark.parametrize(("path", "alpha"), [("sparse", 1.5), ("chunked", 1.0)])
def test_a_prototype_without_a_direction_makes_loss_and_gradients_nan(path, alpha):
    batch = random_batch(70, dim=16, rows=3)
    batch.labels.clamp_(max=68)
    head = matrix_head(make_loss(alpha), batch, path, gradient="fused")
    optimizer = ExactSGD(head, lr=0.1)
    with torch.no_grad():
        head.prototypes[69] = 0.0
    before = head.prototypes.detach().clone()
    rows = batch.embeddings.clone().requires_grad_()
    value = head(rows, batch.labels)
    value.backward()
    optimizer.step()
    record(head)
    assert value.isnan() and rows.grad.isnan().all()
    assert optimizer.num_skipped == 1
    assert torch.equal(head.prototypes, before)


@interpreted
@pytest.mark.parametrize("label", [-3, 50, 1 << 40])
def test_a_label_out_of_range_spoils_its_own_row_only(label, monkeypatch):
    monkeypatch.setattr("qmargin.heads.classifier.checked_labels", lambda labels, *_: labels)
    batch = random_batch(50, dim=16, rows=4)
    loss = qmargin.q_margin(alpha=1.5, scale=16.0, margin=0.05, reduction="none")
    head = matrix_head(loss, batch)
    labels = batch.labels.clone()
    labels[2] = label
    value = head(batch.embeddings, labels)
    record(head)
    assert value.isnan().tolist() == [False, False, True, False]


@interpreted
@pytest.mark.parametrize("optimizer", [ExactSGD, SparseSGD])
@pytest.mark.parametrize(
    ("path", "alpha", "tolerance"), [("sparse", 1.5, 1e-5), ("chunked", 1.0, 2e-3)]
)
def test_updates(optimizer, path, alpha, tolerance):
    batch = random_batch(70, dim=16, rows=3)
    loss = make_loss(alpha)
    plain = make_head(loss, batch, path=path, gradient="fused")
    heads = (matrix_head(loss, batch, path, gradient="fused"), plain)
    for head in heads:
        update = optimizer(head, 0.1, nesterov=True)
        for turn in range(3):
            head(batch.embeddings, batch.labels).backward()
            if turn == 1:  # a scaled gradient takes the same way
                clip_grad_norm_([], [update], 0.01)
            update.step()
    record(heads[0])
    torch.testing.assert_close(heads[0].prototypes, plain.prototypes, atol=tolerance, rtol=0)
    copy, norms = heads[0].copy.clone(), heads[0].inverse_norms.clone()
    error = heads[0].copy_error.clone()
    heads[0].refresh(force=True)
    assert torch.equal(copy, heads[0].copy) and torch.equal(norms, heads[0].inverse_norms)
    assert error >= heads[0].copy_error


@interpreted
@pytest.mark.parametrize(("path", "alpha"), [("sparse", 1.5), ("chunked", 1.0)])
def test_norm_and_forms_of_the_gradient(path, alpha):
    batch = random_batch(70, dim=16, rows=3)
    head = matrix_head(make_loss(alpha), batch, path, gradient="fused")
    head(batch.embeddings, batch.labels).backward()
    gradient = head.fused_gradient
    assert isinstance(gradient, MatrixGradient)
    dense = gradient.to_dense(head.prototypes.detach())
    torch.testing.assert_close(gradient.norm(), dense.double().norm(), rtol=1e-6, atol=0)
    assert gradient.is_finite()
    torch.testing.assert_close(torch.cat([rows for _, rows in gradient.blocks()]), dense)
    torch.testing.assert_close(gradient.to_sparse(head.prototypes.detach()).to_dense(), dense)


@interpreted
@pytest.mark.parametrize("margin", [qmargin.MagFaceMargin(), qmargin.PerClass])
@pytest.mark.parametrize("limit", [1 << 29, 0])
def test_margins_without_a_closed_form(margin, limit):
    batch = random_batch(70, dim=16, rows=4)
    if margin is qmargin.PerClass:
        margin = qmargin.PriorMargin(qmargin.PerClass(torch.linspace(0.0, 0.1, 70)))
    loss = make_loss(1.5, margin=margin)
    head = matrix_head(loss, batch, settings={"matrix_logits": limit})
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=2e-5)
    assert type(head._step) is (MatrixStep if limit else SparseStep)


@interpreted
@pytest.mark.parametrize(
    ("alpha", "margin"),
    [(1.25, qmargin.AngularMargin(0.3)), (1.3, qmargin.CosineMargin(0.2)), (3.0, None)],
)
def test_lists_with_margins_in_closed_form(alpha, margin):
    batch = random_batch(200, dim=16, rows=5)
    loss = make_loss(alpha, margin=margin)
    head = matrix_head(loss, batch, settings={"matrix_logits": 0})
    for _ in range(2):  # the second knows the lengths of its lists
        assert_same(step(head, batch), truth_of(loss, batch), tolerance=2e-5)
    assert isinstance(head._step, FusedSparseStep)
    assert head.last_step.path == "sparse" and head.last_step.support_mean > 0


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_embeddings_and_strides(dtype):
    batch = random_batch(70, dim=16, rows=4)
    rounded = batch.embeddings.to(dtype)
    loss = make_loss(1.5)
    truth = truth_of(loss, Batch(rounded.float(), batch.labels, batch.prototypes))
    head = matrix_head(loss, batch)
    wide = torch.stack([rounded, rounded], 2).requires_grad_()  # every second element
    value = head(wide[:, :, 0], batch.labels.to(torch.int32))
    value.backward()
    torch.testing.assert_close(value.double(), truth.loss, rtol=1e-5, atol=0)
    assert wide.grad.dtype == dtype
    torch.testing.assert_close(wide.grad[:, :, 0].double(), truth.embeddings, rtol=1e-2, atol=1e-3)


@interpreted
@pytest.mark.parametrize(
    ("path", "alpha", "limit", "tolerance"),
    [("sparse", 1.5, 1 << 29, 2e-5), ("sparse", 1.5, 0, 2e-5), ("chunked", 1.0, 1 << 29, 5e-3)],
)
def test_autocast_changes_nothing(path, alpha, limit, tolerance, monkeypatch):
    seen, prepare = [], matrix.prepare  # the first kernel of every such step

    def watched(*given, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        prepare(*given, **options)

    monkeypatch.setattr(matrix, "prepare", watched)
    batch = random_batch(70, dim=16, rows=4)
    loss = make_loss(alpha)
    heads = [matrix_head(loss, batch, path, settings={"matrix_logits": limit}) for _ in range(2)]
    plain = step(heads[0], batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome = step(heads[1], batch)
    assert seen == [False, False]  # products of other operands would void the certificate
    assert_same(outcome, truth_of(loss, batch), tolerance=tolerance)
    assert torch.equal(outcome.embeddings, plain.embeddings)
    assert torch.equal(outcome.prototypes, plain.prototypes)


@interpreted
def test_a_forward_pass_without_gradients_keeps_none():
    batch = random_batch(70, dim=16, rows=4)
    head = matrix_head(make_loss(1.5), batch)
    with torch.no_grad():
        value = head(batch.embeddings, batch.labels)
    assert record(head).rows.bits is None
    torch.testing.assert_close(value.double(), truth_of(make_loss(1.5), batch).loss)


@interpreted
def test_where_a_matrix_is_too_large_steps_go_by_lists_and_blocks():
    batch = random_batch(70, dim=16, rows=4)
    for path, alpha in (("sparse", 1.5), ("chunked", 1.0)):
        settings = {"matrix_logits": 4 * 70 - 1}
        head = matrix_head(make_loss(alpha), batch, path, settings=settings)
        head(batch.embeddings, batch.labels)
        assert not isinstance(head._step, MatrixStep)


@interpreted
def test_auto_leaves_the_matrix_where_supports_are_wide(monkeypatch):
    monkeypatch.setattr(paths, "LISTS_LOSE", 0.01)
    batch = random_batch(70, dim=16, rows=3)
    head = make_head(make_loss(1.25, scale=4.0), batch, path=Auto(screen_dtype=torch.float16))
    taken = []
    for _ in range(3):
        head(batch.embeddings, batch.labels)
        taken.append(head.last_step.path)
    assert taken[0] == "sparse" and taken[2] != "sparse"
    assert "can be active in a row" in head.last_step.reason


@interpreted
def test_auto_takes_lists_for_a_while_after_a_row_had_too_many_candidates(monkeypatch):
    monkeypatch.setattr(paths, "LISTS_LOSE", float("inf"))
    batch = random_batch(70, dim=16, rows=3)
    head = make_head(make_loss(1.5), batch, path=Auto(screen_dtype=torch.float16))
    taken = []
    for turn in range(4):
        head(batch.embeddings, batch.labels)
        taken.append(type(head._step))
        if turn == 0:
            assert head.last_step.reason.endswith("; by one matrix")
            monkeypatch.setattr("qmargin.heads.classifier.REST", 2)
            for most, num_resting in ((steps.CAPACITY, 0), (steps.CAPACITY + 1, 2)):
                head._reading = Reading(torch.tensor([most, 5, 0]).double()), True
                state = head.state_dict()["_extra_state"]  # waits for what is on its way
                assert head._num_resting == num_resting
            other = make_head(make_loss(1.5), batch, path=head.path)
            other.set_extra_state(state)
            assert (other._num_resting, other._shares) == (2, head._shares)
    assert taken == [MatrixStep, FusedSparseStep, FusedSparseStep, MatrixStep]


@interpreted
@pytest.mark.parametrize("alpha", [1.25, 2.0])
def test_ignored_rows_stay_finite_where_lists_overflow(alpha, monkeypatch):
    """An ignored row stands for ones: class 0, its clamped label, may be the nearest to them."""
    monkeypatch.setattr("qmargin.heads.chunked.FusedChunks.tile", 128)
    batch = random_batch(300, dim=16, rows=5)
    prototypes, labels = batch.prototypes.clone(), batch.labels.clone()
    prototypes[0], labels[2] = 1.0, -100
    batch = Batch(batch.embeddings, labels, prototypes)
    loss = make_loss(alpha, scale=32.0, margin=qmargin.PriorMargin(0.05))
    settings = {"list_capacity": 0, "matrix_logits": 0}
    for gradient in ("dense", "fused"):
        head = matrix_head(loss, batch, gradient=gradient, settings=settings)
        found = step(head, batch)
        assert head.last_step.path == "chunked"
        assert bool(found.embeddings.isfinite().all()) and bool(found.prototypes.isfinite().all())
        assert bool((found.embeddings[2] == 0.0).all())
    optimizer = ExactSGD(head, lr=0.1)
    head(batch.embeddings.clone().requires_grad_(), labels).backward()
    optimizer.step()
    assert optimizer.num_skipped == 0


def test_a_negative_size_is_refused():
    for kind in (qmargin.Sparse, qmargin.Chunked):
        with pytest.raises(ConfigError, match="matrix_logits is -1"):
            kind(matrix_logits=-1)


def gpu_head(alpha, batch, **options):
    path = "chunked" if alpha == 1.0 else "sparse"
    return make_head(make_loss(alpha), batch, path=path, device="cuda", **options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, once in a process
@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.3, 2.0])
@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_captured_steps_follow_batches_and_prototypes(alpha, gradient):
    batch = random_batch(5003, dim=64, rows=70)
    head = gpu_head(alpha, batch, gradient=gradient)
    tolerance = HALF_PRODUCTS if alpha == 1.0 else 2e-5
    for turn in range(8):
        generator = torch.Generator().manual_seed(turn)
        order = torch.randperm(70, generator=generator)
        other = Batch(
            batch.embeddings[order] * (1 + turn),
            batch.labels[order],
            batch.prototypes.roll(turn, 0),
        )
        with torch.no_grad():
            head.prototypes.copy_(other.prototypes)
        rows = other.embeddings.cuda().requires_grad_()
        head.prototypes.grad = None
        value = head(rows, other.labels.cuda())
        value.backward()
        found = head.prototypes.grad
        found = found.to_dense() if found.is_sparse else found
        truth = truth_of(make_loss(alpha), other)
        measured = type(truth)(value.detach().cpu(), rows.grad.cpu(), found.cpu())
        assert_same(measured, truth, tolerance=tolerance, note=turn)
    assert head.captured_steps.graph is not None


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("optimizer", [ExactSGD, SparseSGD])
def test_captured_training_is_the_same_as_launched_training(alpha, optimizer):
    batch = random_batch(3001, dim=64, rows=96)
    kind = qmargin.Chunked if alpha == 1.0 else qmargin.Sparse
    results = []
    for capture in (False, True):
        head = make_head(
            make_loss(alpha), batch, path=kind(capture=capture), device="cuda", gradient="fused"
        )
        update = optimizer(head, 0.1)
        for turn in range(12):
            for group in update.param_groups:
                group["lr"] = 0.1 / (1 + turn // 3)
            order = torch.randperm(96, generator=torch.Generator().manual_seed(turn))
            rows = batch.embeddings[order].cuda().requires_grad_()
            head(rows, batch.labels[order].cuda()).backward()
            if turn % 4 == 3:
                clip_grad_norm_([rows], [update], 0.5)
            update.step()
        assert (head.captured_steps.graph is not None) == capture
        results.append((head.prototypes.detach().clone(), rows.grad.clone(), update.num_skipped))
    assert all(torch.equal(a, b) for a, b in zip(results[0][:2], results[1][:2], strict=True))
    assert results[0][2] == results[1][2] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 1.25])
def test_half_embeddings_are_captured_under_autocast(alpha, dtype):
    batch = random_batch(5003, dim=64, rows=70)
    rounded = batch.embeddings.to(dtype)
    truth = truth_of(make_loss(alpha), Batch(rounded.float(), batch.labels, batch.prototypes))
    head = gpu_head(alpha, batch)
    for _ in range(6):
        head.prototypes.grad = None
        rows = rounded.cuda().requires_grad_()
        with torch.autocast("cuda", dtype=dtype):
            value = head(rows, batch.labels.cuda())
        value.backward()
        found = type(truth)(value.detach().cpu(), rows.grad.cpu(), head.prototypes.grad.cpu())
        assert_same(found, truth, tolerance=2e-2)
    assert head.captured_steps.graph is not None and head.captured_steps.step.generation > 0
    assert rows.grad.dtype == dtype


@pytest.mark.gpu
def test_several_losses_of_a_captured_head_do_not_overwrite_each_other():
    batch = random_batch(5003, dim=64, rows=70)
    head = gpu_head(1.25, batch)
    truth = truth_of(make_loss(1.25), batch)
    halves = [(batch.embeddings[i::2].cuda(), batch.labels[i::2].cuda()) for i in range(2)]
    kept = []
    for _ in range(6):
        head.prototypes.grad = None
        leaves = [rows.clone().requires_grad_() for rows, _ in halves]
        losses = [head(leaf, labels) for leaf, (_, labels) in zip(leaves, halves, strict=True)]
        kept.append(losses[0])
        (0.5 * (losses[0] + losses[1])).backward()
        found = torch.empty_like(batch.embeddings)
        found[0::2], found[1::2] = leaves[0].grad.cpu(), leaves[1].grad.cpu()
        torch.testing.assert_close(found.double(), truth.embeddings, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(
            head.prototypes.grad.cpu().double(), truth.prototypes, rtol=1e-3, atol=1e-6
        )
    assert head.captured_steps.graph is not None
    assert len({round(float(value.detach()), 5) for value in kept}) == 1
    del kept, losses
    gc.collect()


@pytest.mark.gpu
def test_backward_after_the_next_replay_is_an_error():
    batch = random_batch(500, dim=64, rows=32)
    head = gpu_head(1.5, batch)
    rows, labels = batch.embeddings.cuda().requires_grad_(), batch.labels.cuda()
    for _ in range(6):
        loss = head(rows, labels)
        loss.backward(retain_graph=True)
    head(rows, labels)
    with pytest.raises(RuntimeError, match="backward was called twice"):
        loss.backward()


@pytest.mark.gpu
def test_changed_settings_and_shapes_take_effect_at_once():
    batch = random_batch(500, dim=64, rows=32)
    head = gpu_head(1.5, batch)
    rows, labels = batch.embeddings.cuda(), batch.labels.cuda()
    for _ in range(6):
        head(rows, labels)
    for scale, count in ((8.0, 32), (16.0, 20), (16.0, 32)):
        head.loss.scale = scale
        for _ in range(5):
            value = head(rows[:count], labels[:count])
            part = rows_of(batch, count)
            truth = truth_of(make_loss(1.5, scale=scale), part)
            torch.testing.assert_close(value.cpu().double(), truth.loss, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("is_auto", [False, True])
def test_a_step_never_waits_for_the_device(alpha, capture, is_auto):
    batch = random_batch(5003, dim=64, rows=64)
    kind = qmargin.Chunked if alpha == 1.0 else qmargin.Sparse
    kind = Auto if is_auto else kind
    head = make_head(
        make_loss(alpha), batch, path=kind(capture=capture), device="cuda", gradient="fused"
    )
    optimizer = ExactSGD(head, 0.1)
    embeddings, labels = batch.embeddings.cuda().requires_grad_(), batch.labels.cuda()
    for turn in range(40):
        torch.cuda.set_sync_debug_mode("error" if turn > 5 else "default")
        try:
            head(embeddings, labels).backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if capture:  # the fourth step is captured, and every later one replays it
        assert head.captured_steps.step.generation == 36
        assert head.last_step.reason.endswith("; by one matrix, as a CUDA graph")


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [True, False])
def test_auto_leaves_a_captured_step_whose_lists_got_too_short(listed):
    batch = random_batch(40_000, dim=64, rows=64)
    head = make_head(make_loss(1.25, scale=40.0), batch, path="auto", device="cuda")
    rows, labels = batch.embeddings.cuda(), batch.labels.cuda()
    for _ in range(24):
        head(rows, labels)
    assert head.captured_steps.graph is not None
    head.loss.scale = 40.0 if listed else 1.0  # most classes are active
    for _ in range(48):  # a loss that waits for its backward pass would keep the graph busy
        value = head(rows, labels).detach()
        torch.cuda.synchronize()  # so that what was asked for has arrived
    assert head.last_step.path == "sparse"
    assert head.last_step.reason.endswith("; by one matrix, as a CUDA graph") == listed
    truth = truth_of(head.loss, batch)
    torch.testing.assert_close(value.cpu().double(), truth.loss, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the warm-up's stream
@pytest.mark.parametrize("path", ["sparse", "auto"])
def test_a_whole_step_can_be_captured_by_the_user(path):
    batch = random_batch(500, dim=64, rows=32)
    head = make_head(make_loss(1.5), batch, path=path, device="cuda")
    rows, labels = batch.embeddings.cuda().requires_grad_(), batch.labels.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            head(rows, labels).backward()
            rows.grad = head.prototypes.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = head(rows, labels)
        value.backward()
    graph.replay()
    torch.testing.assert_close(
        value.detach().cpu().double(), truth_of(make_loss(1.5), batch).loss, rtol=1e-5, atol=1e-7
    )


class PretendedGraph:
    """A graph for the interpreter: what it captured is launched by every replay."""

    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def capturing(monkeypatch):
    """Steps are captured, and replayed, as on a GPU."""
    open_graphs = []

    @contextmanager
    def captured(device):
        graph = PretendedGraph()
        open_graphs.append(graph)
        yield graph
        open_graphs.remove(graph)

    def noted(module, name):
        launched = getattr(module, name)

        def launch(*args, **options):
            if not open_graphs:
                return launched(*args, **options)
            return open_graphs[-1].calls.append(partial(launched, *args, **options))

        monkeypatch.setattr(module, name, launch)

    monkeypatch.setattr(steps, "_captured", captured)
    monkeypatch.setattr(steps, "_can_capture", lambda tensor: not open_graphs)
    noted(steps, "_prepare")
    noted(steps, "_solve")
    noted(matrix, "sgd_update")


def captured_head(alpha, batch):
    head = matrix_head(make_loss(alpha), batch)
    for _ in range(4):
        head(batch.embeddings, batch.labels)
    assert head.captured_steps.graph is not None
    return head


def one_value(head, batch, truth):
    torch.testing.assert_close(
        head(batch.embeddings, batch.labels).double(), truth.loss, rtol=1e-5, atol=1e-7
    )


@interpreted
@pytest.mark.parametrize("alpha", [1.0, 1.25])
def test_pretended_captures_train_as_launched_steps(alpha, capturing):
    batch = random_batch(40, dim=16, rows=8)
    results = []
    for capture in (False, True):
        path = "chunked" if alpha == 1.0 else "sparse"
        settings = {"capture": capture}
        head = matrix_head(make_loss(alpha), batch, path, gradient="fused", settings=settings)
        update = ExactSGD(head, 0.1)
        for turn in range(8):
            order = torch.randperm(8, generator=torch.Generator().manual_seed(turn))
            rows = batch.embeddings[order].requires_grad_()
            head(rows, batch.labels[order]).backward()
            if turn == 6:  # other places of the momentum
                update.load_state_dict(deepcopy(update.state_dict()))
            update.step()
        assert (head.captured_steps.graph is not None) == capture
        results.append((head.prototypes.detach().clone(), rows.grad.clone()))
    for launched, replayed in zip(*results, strict=True):
        assert torch.equal(launched, replayed)


@interpreted
def test_a_captured_step_notices_what_is_kept_of_the_prototypes_elsewhere(capturing):
    batch = random_batch(40, dim=16, rows=12)
    head = captured_head(1.5, batch)
    graph, truth = head.captured_steps.graph, truth_of(make_loss(1.5), batch)
    head(batch.embeddings, batch.labels)
    assert head.captured_steps.graph is graph
    head._home = None  # as after some steps on another device: the next makes a copy anew
    head.copy.fill_(torch.nan)
    one_value(head, batch, truth)
    assert head.captured_steps.graph is not None and head.captured_steps.graph is not graph
    one_value(head, batch, truth)


@interpreted
def test_a_captured_step_of_an_inference_is_not_one_of_other_passes(capturing):
    batch = random_batch(40, dim=16, rows=12)
    truth = truth_of(make_loss(1.5), batch)
    head = matrix_head(make_loss(1.5), batch)
    with torch.inference_mode():
        for _ in range(5):
            head(batch.embeddings, batch.labels)
    assert head.captured_steps.graph is not None
    with torch.no_grad():
        for _ in range(5):
            one_value(head, batch, truth)


@interpreted
def test_a_captured_step_notices_an_alpha_that_was_written_to(capturing):
    batch = random_batch(40, dim=16, rows=12)
    alpha = torch.tensor(1.5)
    loss = qmargin.MarginLoss(qmargin.Alpha(alpha), qmargin.PriorMargin(0.05), scale=16.0)
    head = matrix_head(loss, batch)
    for _ in range(5):
        head(batch.embeddings, batch.labels)
    assert head.captured_steps.graph is not None
    alpha.fill_(1.25)
    other = qmargin.MarginLoss(qmargin.Alpha(1.25), qmargin.PriorMargin(0.05), scale=16.0)
    one_value(head, batch, truth_of(other, batch))


@interpreted
def test_a_repeated_launch_reads_a_factor_of_every_row(capturing, monkeypatch):
    """What comes into a mean of rows is one number with strides of zero."""
    batch = random_batch(40, dim=16, rows=12)
    found = []

    def repeated(device, gradient, grad, out, factor):
        found.append((ctypes.c_float * 12).from_address(grad)[:])

    def between(recording, *places):  # others are launched again
        return repeated if len(places) == 4 else None

    monkeypatch.setattr(Recording, "between", between)
    monkeypatch.setattr(replay, "_can_record", lambda tensor: True)
    head = matrix_head(make_loss(1.5), batch)
    head.loss.reduction = "none"
    rows = batch.embeddings.clone().requires_grad_()
    for _ in range(6):
        (3.0 * head(rows, batch.labels).mean()).backward()
    assert len(found) == 5 and found[-1] == pytest.approx([0.25] * 12)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=interpreted)],
)
def test_prototypes_by_columns_are_refused(device):
    batch = random_batch(60, dim=16, rows=8)
    head = matrix_head(make_loss(1.5), batch, device=device)
    head.prototypes.data = head.prototypes.detach().t().contiguous().t()
    with pytest.raises(ShapeError, match=r"strides \(1, 60\)"):
        head(batch.embeddings.to(device), batch.labels.to(device))
    head.prototypes.data = head.prototypes.detach().contiguous()
    one = head(batch.embeddings.to(device), batch.labels.to(device))
    truth = truth_of(make_loss(1.5), batch)
    torch.testing.assert_close(one.cpu().double(), truth.loss, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_captured_rows_take_a_gradient_of_their_mean(alpha):
    batch = random_batch(500, dim=64, rows=32)
    loss = make_loss(alpha)
    loss.reduction = "none"
    head = make_head(loss, batch, path="chunked" if alpha == 1.0 else "sparse", device="cuda")
    truth = truth_of(make_loss(alpha), batch)
    for _ in range(8):
        rows = batch.embeddings.cuda().requires_grad_()
        head.prototypes.grad = None
        head(rows, batch.labels.cuda()).mean().backward()
        tolerance = HALF_PRODUCTS if alpha == 1.0 else 2e-5
        for found, exact in (
            (rows.grad, truth.embeddings),
            (head.prototypes.grad, truth.prototypes),
        ):
            lost = (found.cpu().double() - exact).abs().max() / exact.abs().max()
            assert float(lost) < tolerance
    assert head.captured_steps.step.generation > 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("path", ["sparse", "auto", "chunked"])
def test_heads_on_two_devices_of_one_process(path):
    batch = random_batch(500, dim=64, rows=32)
    truth = truth_of(make_loss(1.5), batch)
    for index in (1, 0, 1):
        head = make_head(make_loss(1.5), batch, path=path, device=f"cuda:{index}", gradient="fused")
        optimizer = ExactSGD(head, 0.0)
        for _ in range(6):
            rows = batch.embeddings.to(f"cuda:{index}").requires_grad_()
            value = head(rows, batch.labels.to(rows.device))
            value.backward()
            optimizer.step()
            torch.testing.assert_close(value.detach().cpu().double(), truth.loss, rtol=2e-3, atol=0)


@pytest.mark.parametrize("path", ["matrix", "lists"])
def test_a_refused_gradient_leaves_the_one_that_waits_as_it_is(path):
    batch = random_batch(60, dim=16, rows=8)
    settings = {"matrix_logits": 0} if path == "lists" else {}
    device = "cuda" if HAS_GPU else "cpu"
    head = matrix_head(make_loss(1.5), batch, settings=settings, gradient="fused", device=device)
    ExactSGD(head, lr=0.1)
    rows = batch.embeddings.to(device).requires_grad_()
    loss = head(rows, batch.labels.to(device))
    loss.backward(retain_graph=True)
    expected = head.fused_gradient.to_dense(head.prototypes.detach())
    with pytest.raises(ConfigError, match="is waiting to be applied"):
        (3.0 * loss).backward()
    assert isinstance(head._step, MatrixStep if path == "matrix" else FusedSparseStep)
    assert torch.equal(head.fused_gradient.to_dense(head.prototypes.detach()), expected)
