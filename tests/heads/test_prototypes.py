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


def head_on(path, batch, alpha=1.5, **options):
    if isinstance(path, str):
        path = qmargin.TopK(20.0) if path == "top_k" else every_class(path)
    return make_head(make_loss(alpha), batch, path=path, **options)


# Prototypes without a direction


@pytest.mark.parametrize(
    ("value", "gradient"),
    [(0.0, "dense"), (torch.nan, "sparse"), (torch.inf, "fused"), (3e38, "dense")],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_prototype_without_a_direction_makes_loss_and_gradients_nan(path, value, gradient):
    batch = random_batch(1000, rows=4)
    batch.labels.clamp_(max=998)
    head = head_on(path, batch, gradient=gradient)
    step(head, batch)
    with torch.no_grad():
        head.prototypes[999] = value
    outcome = step(head, batch)
    assert outcome.loss.isnan()
    assert outcome.embeddings.isnan().all()
    assert outcome.prototypes[batch.labels].isnan().any(1).all()


@pytest.mark.parametrize("path", PATHS)
def test_an_optimizer_skips_the_step_of_a_prototype_without_a_direction(path):
    batch = random_batch(300, rows=4)
    head = head_on(path, batch, gradient="fused")
    optimizer = ExactSGD(head, lr=0.1)
    with torch.no_grad():
        head.prototypes[299] = 0.0
    before = head.prototypes.detach().clone()
    head(batch.embeddings, batch.labels.clamp(max=298)).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1 and torch.equal(head.prototypes, before)
    with torch.no_grad():  # and all is well again once it has one
        head.prototypes[299] = 1.0
    head(batch.embeddings, batch.labels).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1 and not torch.equal(head.prototypes, before)


def test_sampled_steps_depend_on_the_sampled_classes_alone():
    batch = random_batch(1000, rows=4)
    head, other = (head_on(qmargin.Sampled(0.05), batch) for _ in range(2))
    with torch.no_grad():
        head.prototypes[999] = 0.0
    losses = [(head(batch.embeddings, batch.labels), other(batch.embeddings, batch.labels))
              for _ in range(40)]  # fmt: skip
    assert any(ours.isnan() for ours, _ in losses)
    assert all(ours.isnan() or torch.equal(ours, theirs) for ours, theirs in losses)


@pytest.mark.parametrize("path", PATHS)
def test_debug_names_the_prototype_without_a_direction(path):
    batch = random_batch(100, rows=4)
    head = head_on(path, batch)
    head.loss.debug = True
    with torch.no_grad():
        head.prototypes[99] = 0.0
    with pytest.raises(DataError, match="class 99"):
        head(batch.embeddings, batch.labels.clamp(max=98))


@pytest.mark.parametrize("path", PATHS)
def test_prototypes_that_are_tiny_or_huge_still_have_a_direction(path):
    batch = random_batch(300, rows=4)
    truth = truth_of(make_loss(1.5), batch)
    head = head_on(path, batch)
    with torch.no_grad():
        head.prototypes[:100] *= 1e-12
        head.prototypes[100:200] *= 1e12
    outcome = step(head, batch)
    torch.testing.assert_close(outcome.loss.double(), truth.loss, rtol=1e-5, atol=1e-6)


# Prototypes that change behind autograd's back


@pytest.mark.parametrize("gradient", ["dense", "fused"])
@pytest.mark.parametrize("path", ["auto", "sparse", "chunked"])
def test_prototypes_written_through_data_are_seen(path, gradient):
    batch, other = random_batch(500, seed=1), random_batch(500, seed=2)
    truth = truth_of(make_loss(1.5), batch).loss
    head = head_on(path, other, gradient=gradient)
    head(batch.embeddings, batch.labels)
    head.prototypes.data.copy_(batch.prototypes)
    torch.testing.assert_close(head(batch.embeddings, batch.labels).double(), truth)
    for prepare in (torch.no_grad, torch.inference_mode):
        with prepare():
            head.prototypes.data.copy_(other.prototypes)
            assert abs(float(head(batch.embeddings, batch.labels).detach()) - float(truth)) > 1e-2
            head.prototypes.data.copy_(batch.prototypes)
            torch.testing.assert_close(head(batch.embeddings, batch.labels).double(), truth)
    head.eval()
    kept = head.prototypes.data
    kept.copy_(other.prototypes)
    assert abs(float(head(batch.embeddings, batch.labels).detach()) - float(truth)) > 1e-2
    kept.copy_(batch.prototypes)  # the same alias again, after a forward pass
    torch.testing.assert_close(head(batch.embeddings, batch.labels).double(), truth)


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
    for ours, theirs in zip(head.parameters(), average.module.parameters(), strict=True):
        ours.data, theirs.data = theirs.data, ours.data
    swapped = head(batch.embeddings, batch.labels).detach()
    moved = Batch(batch.embeddings, batch.labels, head.prototypes.detach())
    expected = truth_of(make_loss(1.5), moved).loss
    torch.testing.assert_close(swapped.double(), expected)
    assert not torch.equal(trained, swapped)
    for ours, theirs in zip(head.parameters(), average.module.parameters(), strict=True):
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
    with torch.no_grad():
        head.prototypes.mul_(2.0)
    head.refresh()
    assert len(calls) == 2


# Reductions


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_reduction_of_the_loss_is_honoured(path, alpha):
    if alpha == 1.0 and path in ("sparse", "top_k"):
        pytest.skip("these paths are for alpha above 1")
    batch = random_batch(300, rows=6)
    batch.labels[2] = -100
    weights = torch.tensor([1.0, 0.5, 7.0, -2.0, 0.0, 3.0])
    heads = {}
    for reduction in ("mean", "sum", "none"):
        loss = make_loss(alpha)
        loss.reduction = reduction
        heads[reduction] = make_head(loss, batch, path=every_class(path))
    mean, total = step(heads["mean"], batch), step(heads["sum"], batch)
    torch.testing.assert_close(total.loss, 5 * mean.loss)
    torch.testing.assert_close(total.embeddings, 5 * mean.embeddings)
    torch.testing.assert_close(total.prototypes, 5 * mean.prototypes)
    head = heads["none"]
    embeddings = batch.embeddings.clone().requires_grad_()
    rows = head(embeddings, batch.labels)
    assert rows.shape == (6,) and rows[2] == 0.0
    torch.testing.assert_close(rows.detach().sum(), total.loss)
    (rows * weights).sum().backward()
    expected_rows = batch.embeddings.double().requires_grad_()
    prototypes = batch.prototypes.double().requires_grad_()
    unit = nn.functional.normalize
    reference = make_loss(alpha)
    reference.reduction = "none"
    plain = reference(unit(expected_rows) @ unit(prototypes).t(), batch.labels)
    torch.testing.assert_close(rows.detach().double(), plain.detach(), rtol=1e-5, atol=1e-6)
    (plain * weights).sum().backward()
    torch.testing.assert_close(embeddings.grad.double(), expected_rows.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.prototypes.grad.double(), prototypes.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["sparse", "chunked", "dense"])
def test_rows_of_a_learned_margin_and_of_norms(path):
    batch = random_batch(200, rows=5)
    weights = torch.linspace(0.1, 2.0, 5)
    gradients = {}
    for name in (path, "dense"):
        margin = qmargin.PriorMargin(nn.Parameter(torch.tensor(0.05)))
        loss = qmargin.MarginLoss(
            qmargin.Alpha(1.5),
            margin + qmargin.MagFaceMargin(lower_norm=1.0, upper_norm=30.0),
            scale=8.0,
            reduction="none",
        )
        head = make_head(loss, batch, path=name)
        embeddings = batch.embeddings.clone().requires_grad_()
        (head(embeddings, batch.labels) * weights).sum().backward()
        gradients[name] = (embeddings.grad, head.prototypes.grad, margin.margin.grad)
    for ours, theirs in zip(gradients[path], gradients["dense"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# Batches without a row that counts


@pytest.mark.parametrize(("alpha", "gradient"), [(1.0, "fused"), (1.5, "dense"), (1.5, "fused")])
@pytest.mark.parametrize("path", PATHS)
def test_a_batch_of_ignored_rows_leaves_zeros(path, alpha, gradient):
    if alpha == 1.0 and path in ("sparse", "top_k"):
        pytest.skip("these paths are for alpha above 1")
    batch = random_batch(200, rows=4)
    batch.labels.fill_(-100)
    batch.embeddings[1] = torch.nan
    head = make_head(make_loss(alpha), batch, path=path, gradient=gradient)
    outcome = step(head, batch)
    assert outcome.loss.isnan()  # the mean of nothing, as in torch
    assert (outcome.embeddings == 0).all() and (outcome.prototypes == 0).all()


# Friction


def test_prototypes_alone_can_be_loaded():
    batch = random_batch(50)
    for state in (
        {"prototypes": batch.prototypes},
        {"weight": batch.prototypes},  # as other heads name it
    ):
        head = MarginClassifier(16, 50, qmargin.q_margin())
        head.load_state_dict(state)
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
def test_a_fused_gradient_and_an_optimizer_of_torch_are_refused_at_the_first_step(make):
    batch = random_batch(50)
    head = head_on("sparse", batch, gradient="fused")
    backbone = nn.Linear(16, 16)
    optimizer = make([*backbone.parameters(), *head.parameters()], lr=0.1)
    optimizer.zero_grad()
    head(backbone(batch.embeddings), batch.labels).backward()
    with pytest.raises(ConfigError, match="ExactSGD"):
        optimizer.step()


def test_an_optimizer_of_torch_may_hold_prototypes_that_a_fused_one_steps():
    batch = random_batch(50)
    head = head_on("sparse", batch, gradient="fused")
    backbone = nn.Linear(16, 16)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    fused = ExactSGD(head, lr=0.1)
    for _ in range(2):
        head(backbone(batch.embeddings), batch.labels).backward()
        optimizer.step()
        fused.step()


@pytest.mark.parametrize("path", ["sparse", "chunked", "auto"])
def test_the_copy_follows_the_prototypes(path: str) -> None:
    batch = random_batch(257)
    other = Batch(batch.embeddings, batch.labels, random_batch(257, seed=8).prototypes)
    loss = make_loss(1.5)
    head = make_head(loss, batch, path=path)
    step(head, batch)
    head.load_state_dict(make_head(loss, other).state_dict())
    assert_same(step(head, other), truth_of(loss, other), tolerance=2e-5)
    torch.optim.SGD([head.prototypes], 0.3).step()
    stepped = Batch(batch.embeddings, batch.labels, head.prototypes.detach().clone())
    assert_same(step(head, stepped), truth_of(loss, stepped), tolerance=2e-5)
    head.prototypes.data.copy_(batch.prototypes)  # behind PyTorch's back
    head.refresh(force=True)
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=2e-5)
    assert_same(step(head.double(), batch), truth_of(loss, batch), tolerance=1e-9)
    assert_same(step(head.float(), batch), truth_of(loss, batch), tolerance=2e-5)


@pytest.mark.parametrize("path", ["sparse", "chunked"])
@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_an_optimizer_that_leaves_no_trace_is_noticed(path: str, gradient: str) -> None:
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
