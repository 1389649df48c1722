"""Prototypes without a direction, prototypes written from outside, reductions, and loading."""

import copy

import pytest
import torch
from torch import nn

import qmargin
from helpers.heads import (
    Batch,
    assert_same,
    every_class,
    make_head,
    make_loss,
    random_batch,
    step,
    truth_of,
)
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD
from qmargin.kernels import head_reference

PATHS = ("auto", "sparse", "chunked", "dense", "sampled", "top_k")
on_every_path = pytest.mark.parametrize("path", PATHS)
CASES = [(path, alpha) for path in PATHS for alpha in (1.0, 1.5)]
CASES = [case for case in CASES if case[1] > 1.0 or case[0] not in ("sparse", "top_k")]


def head_on(path, batch, alpha=1.5, **options):
    if isinstance(path, str):
        path = qmargin.TopK(20.0) if path == "top_k" else every_class(path)
    return make_head(make_loss(alpha), batch, path=path, **options)


def write(head, row, value):
    with torch.no_grad():
        head.prototypes[row] = value


@pytest.mark.parametrize(
    ("value", "gradient"),
    [(0.0, "dense"), (torch.nan, "sparse"), (torch.inf, "fused"), (3e38, "dense")],
)
@on_every_path
def test_a_prototype_without_a_direction_makes_loss_and_gradients_nan(path, value, gradient):
    batch = random_batch(1000, rows=4)
    batch.labels.clamp_(max=998)
    head = head_on(path, batch, gradient=gradient)
    step(head, batch)
    write(head, 999, value)
    outcome = step(head, batch)
    assert outcome.loss.isnan() and outcome.embeddings.isnan().all()
    assert outcome.prototypes[batch.labels].isnan().any(1).all()
    head.loss.debug = True
    with pytest.raises(DataError, match="class 999"):
        head(batch.embeddings, batch.labels)


@on_every_path
def test_an_optimizer_skips_the_step_of_a_prototype_without_a_direction(path):
    batch = random_batch(300, rows=4)
    head = head_on(path, batch, gradient="fused")
    optimizer = ExactSGD(head, lr=0.1)
    write(head, 299, 0.0)
    before = head.prototypes.detach().clone()
    head(batch.embeddings, batch.labels.clamp(max=298)).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1 and torch.equal(head.prototypes, before)
    write(head, 299, 1.0)  # and all is well again once it has one
    head(batch.embeddings, batch.labels).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1 and not torch.equal(head.prototypes, before)


def test_sampled_steps_depend_on_the_sampled_classes_alone():
    batch = random_batch(1000, rows=4)
    head, other = (head_on(qmargin.Sampled(0.05), batch) for _ in range(2))
    write(head, 999, 0.0)
    pairs = [[one(batch.embeddings, batch.labels) for one in (head, other)] for _ in range(40)]
    assert any(ours.isnan() for ours, _ in pairs)
    assert all(ours.isnan() or torch.equal(ours, theirs) for ours, theirs in pairs)


@on_every_path
def test_prototypes_that_are_tiny_or_huge_still_have_a_direction(path):
    batch = random_batch(300, rows=4)
    truth = truth_of(make_loss(1.5), batch)
    head = head_on(path, batch)
    with torch.no_grad():
        head.prototypes[:100] *= 1e-12
        head.prototypes[100:200] *= 1e12
    torch.testing.assert_close(step(head, batch).loss.double(), truth.loss, rtol=1e-5, atol=1e-6)


# Prototypes that change behind autograd's back


@pytest.mark.parametrize("gradient", ["dense", "fused"])
@pytest.mark.parametrize("path", ["auto", "sparse", "chunked"])
def test_prototypes_written_through_data_are_seen(path, gradient):
    batch, other = random_batch(500, seed=1), random_batch(500, seed=2)
    truth = truth_of(make_loss(1.5), batch).loss
    head = head_on(path, other, gradient=gradient)

    def is_true():
        loss = head(batch.embeddings, batch.labels).detach().double()
        return bool(torch.isclose(loss, truth, rtol=1e-5, atol=1e-6))

    assert not is_true()
    head.prototypes.data.copy_(batch.prototypes)
    assert is_true()
    for prepare in (torch.no_grad, torch.inference_mode):
        with prepare():
            head.prototypes.data.copy_(other.prototypes)
            assert not is_true()
            head.prototypes.data.copy_(batch.prototypes)
            assert is_true()
    kept = head.eval().prototypes.data
    kept.copy_(other.prototypes)
    assert not is_true()
    kept.copy_(batch.prototypes)  # the same alias again, after a forward pass
    assert is_true()


def test_averaged_weights_can_be_swapped_in_and_out():
    batch = random_batch(500)
    head = head_on("sparse", batch, gradient="fused")
    optimizer = ExactSGD(head, lr=0.5)
    average = torch.optim.swa_utils.AveragedModel(head)
    for _ in range(3):
        head(batch.embeddings, batch.labels).backward()
        optimizer.step()
        average.update_parameters(head)
    kept = head.prototypes.detach().clone()
    trained = head(batch.embeddings, batch.labels).detach()
    pairs = list(zip(head.parameters(), average.module.parameters(), strict=True))
    for ours, theirs in pairs:
        ours.data, theirs.data = theirs.data, ours.data
    swapped = head(batch.embeddings, batch.labels).detach()
    moved = Batch(batch.embeddings, batch.labels, head.prototypes.detach())
    torch.testing.assert_close(swapped.double(), truth_of(make_loss(1.5), moved).loss)
    assert not torch.equal(trained, swapped)
    for ours, theirs in pairs:
        ours.data.copy_(theirs.data)
    assert torch.equal(head.prototypes, kept)
    assert torch.equal(head(batch.embeddings, batch.labels).detach(), trained)


@pytest.mark.parametrize("replace", ["parameter", "pickle", "deepcopy", "assign"])
def test_replaced_prototypes_are_seen(replace, tmp_path):
    batch, other = random_batch(500, seed=1), random_batch(500, seed=2)
    truth = truth_of(make_loss(1.5), batch).loss
    head = head_on("sparse", other)
    head(batch.embeddings, batch.labels)
    if replace == "parameter":
        head.prototypes = nn.Parameter(other.prototypes.clone())
    elif replace == "pickle":
        torch.save(head, tmp_path / "head.pt")
        head = torch.load(tmp_path / "head.pt", weights_only=False)
    elif replace == "deepcopy":
        head = copy.deepcopy(head)
    else:
        head.load_state_dict({"prototypes": other.prototypes.clone()}, assign=True)
    head(batch.embeddings, batch.labels)
    head.prototypes.data.copy_(batch.prototypes)
    torch.testing.assert_close(head(batch.embeddings, batch.labels).double(), truth)


def test_nothing_is_refreshed_while_nothing_changes(monkeypatch):
    batch = random_batch(500)
    head = head_on("sparse", batch, gradient="fused")
    optimizer, calls = ExactSGD(head, lr=0.1), []
    refresh = head_reference.refresh_copy

    def counted(prototypes, *kept):
        if len(prototypes) == 500 and kept[0] is head.copy:  # not a block of an update
            calls.append(1)
        return refresh(prototypes, *kept)

    monkeypatch.setattr(head_reference, "refresh_copy", counted)
    for _ in range(4):
        head(batch.embeddings, batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        head(batch.embeddings, batch.labels)
        assert len(calls) == 1
        head.prototypes.mul_(2.0)
    head.refresh()
    assert len(calls) == 2


@pytest.mark.parametrize("path", ["sparse", "chunked", "auto"])
def test_the_copy_follows_the_prototypes(path):
    batch, loss = random_batch(257), make_loss(1.5)
    other = Batch(batch.embeddings, batch.labels, random_batch(257, seed=8).prototypes)
    head = make_head(loss, batch, path=path)
    step(head, batch)
    head.load_state_dict(make_head(loss, other).state_dict())
    assert_same(step(head, other), truth_of(loss, other), tolerance=2e-5)
    torch.optim.SGD([head.prototypes], 0.3).step()
    stepped = Batch(batch.embeddings, batch.labels, head.prototypes.detach().clone())
    assert_same(step(head, stepped), truth_of(loss, stepped), tolerance=2e-5)
    head.prototypes.data.copy_(batch.prototypes)  # behind PyTorch's back
    head.refresh(force=True)
    truth = truth_of(loss, batch)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-9), (torch.float32, 2e-5)):
        assert_same(step(head.to(dtype), batch), truth, tolerance=tolerance)


@pytest.mark.parametrize("path", ["sparse", "chunked"])
@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_an_optimizer_that_leaves_no_trace_is_noticed(path, gradient):
    """Fused optimizers of PyTorch change weights and not their version."""
    batch = random_batch(300, dim=16, rows=8)
    head = make_head(make_loss(1.25), batch, path=path, gradient=gradient)
    for turn in range(3):
        head.zero_grad(set_to_none=turn != 1)
        head(batch.embeddings, batch.labels).backward()
        with torch.no_grad():
            head(batch.embeddings, batch.labels)  # a look in between
        head.prototypes.data.add_(torch.randn_like(head.prototypes))
        moved = make_head(make_loss(1.25), batch, path="dense")
        moved.prototypes.data.copy_(head.prototypes)
        with torch.no_grad():
            found, truth = (one(batch.embeddings, batch.labels) for one in (head, moved))
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


# Reductions


@pytest.mark.parametrize(("path", "alpha"), CASES)
def test_the_reduction_of_the_loss_is_honoured(path, alpha):
    batch = random_batch(300, rows=6)
    batch.labels[2] = -100
    weights = torch.tensor([1.0, 0.5, 7.0, -2.0, 0.0, 3.0])
    heads = {}
    for reduction in ("mean", "sum", "none"):
        heads[reduction] = make_head(make_loss(alpha), batch, path=every_class(path))
        heads[reduction].loss.reduction = reduction
    mean, total = step(heads["mean"], batch), step(heads["sum"], batch)
    for name in ("loss", "embeddings", "prototypes"):
        torch.testing.assert_close(getattr(total, name), 5 * getattr(mean, name))
    head, embeddings = heads["none"], batch.embeddings.clone().requires_grad_()
    rows = head(embeddings, batch.labels)
    assert rows.shape == (6,) and rows[2] == 0.0
    torch.testing.assert_close(rows.detach().sum(), total.loss)
    (rows * weights).sum().backward()
    expected_rows = batch.embeddings.double().requires_grad_()
    prototypes = batch.prototypes.double().requires_grad_()
    unit = nn.functional.normalize
    plain = head.loss(unit(expected_rows) @ unit(prototypes).t(), batch.labels)
    torch.testing.assert_close(rows.detach().double(), plain.detach(), rtol=1e-5, atol=1e-6)
    (plain * weights).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(embeddings.grad.double(), expected_rows.grad, **close)
    torch.testing.assert_close(head.prototypes.grad.double(), prototypes.grad, **close)


@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_rows_of_a_learned_margin_and_of_norms(path):
    batch = random_batch(200, rows=5)
    weights = torch.linspace(0.1, 2.0, 5)
    gradients = []
    for name in (path, "dense"):
        margin = qmargin.PriorMargin(nn.Parameter(torch.tensor(0.05)))
        combined = margin + qmargin.MagFaceMargin(lower_norm=1.0, upper_norm=30.0)
        head = make_head(make_loss(1.5, 8.0, combined), batch, path=name)
        head.loss.reduction = "none"
        embeddings = batch.embeddings.clone().requires_grad_()
        (head(embeddings, batch.labels) * weights).sum().backward()
        gradients.append((embeddings.grad, head.prototypes.grad, margin.margin.grad))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradient", ["dense", "fused"])
@pytest.mark.parametrize(("path", "alpha"), CASES)
def test_a_batch_of_ignored_rows_leaves_zeros(path, alpha, gradient):
    batch = random_batch(200, rows=4)
    batch.labels.fill_(-100)
    batch.embeddings[1] = torch.nan
    outcome = step(make_head(make_loss(alpha), batch, path=path, gradient=gradient), batch)
    assert outcome.loss.isnan()  # the mean of nothing, as in torch
    assert (outcome.embeddings == 0).all() and (outcome.prototypes == 0).all()


# Loading, predictions, and optimizers of torch


def test_prototypes_alone_can_be_loaded():
    batch = random_batch(50)
    for name in ("prototypes", "weight"):  # as other heads name it
        head = MarginClassifier(16, 50, qmargin.q_margin())
        head.load_state_dict({name: batch.prototypes})
        assert torch.equal(head.prototypes, batch.prototypes)
        assert head.weight is head.prototypes
    model = nn.ModuleDict({"head": MarginClassifier(16, 50, qmargin.q_margin())})
    model.load_state_dict({"head.weight": batch.prototypes})
    assert torch.equal(model["head"].prototypes, batch.prototypes)
    with pytest.raises(RuntimeError, match="prototypes"):
        head.load_state_dict({"other": batch.prototypes})
    assert list(head.state_dict()) == ["prototypes", "_extra_state"]


def test_cosines_and_predictions():
    batch = random_batch(300, rows=7)
    head = head_on("sparse", batch)
    unit = nn.functional.normalize
    expected = unit(batch.embeddings) @ unit(batch.prototypes).t()
    torch.testing.assert_close(head.cosines(batch.embeddings), expected)
    assert torch.equal(head.predict(batch.embeddings), expected.argmax(1))
    assert head.predict(batch.embeddings[:0]).shape == (0,)
    with pytest.raises(ShapeError, match=r"\[B, 16\]"):
        head.predict(torch.zeros(2, 5))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_gradient_is_no_silent_loss_in_an_optimizer_of_torch(make):
    batch = random_batch(50)
    head = head_on("sparse", batch, gradient="fused")
    backbone = nn.Linear(16, 16)
    optimizer = make([*backbone.parameters(), *head.parameters()], lr=0.1)
    head(backbone(batch.embeddings), batch.labels).backward()
    with pytest.raises(ConfigError, match="ExactSGD"):
        optimizer.step()
    fused = ExactSGD(head, lr=0.1)  # with one that steps them, it may hold the prototypes
    optimizer.step()
    fused.step()
    head(backbone(batch.embeddings), batch.labels).backward()
    optimizer.step()
