"""Fused gradients and optimizers against ``torch.optim.SGD`` on a gradient that exists."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qmargin
from helpers.fused import DIM, NUM_CLASSES, Blocks, batch, make_head, plain_loss, tensors_of, train
from helpers.heads import LargestTensor
from qmargin.errors import ConfigError, DataError
from qmargin.heads.gradients import RowsGradient, deliver
from qmargin.heads.optimizers import ExactSGD, SparseSGD, clip_grad_norm_
from qmargin.kernels import head_reference

both = pytest.mark.parametrize("optimizer_class", [ExactSGD, SparseSGD])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Many blocks, the last one incomplete."""
    monkeypatch.setattr(head_reference, "UPDATE_CLASSES", 50)
    monkeypatch.setattr(head_reference, "UPDATE_NUMBERS", 50)


@pytest.mark.parametrize(
    ("setting", "nesterov"), [(0, False), (1, True), (2, False), (3, True), (4, True)]
)
def test_exact_sgd_equals_torch_sgd_on_all_cosines(setting, nesterov):
    fused, plain = make_head(setting=setting), make_head("dense", setting=setting)
    options = {"lr": 0.5, "momentum": 0.9, "weight_decay": 5e-3, "nesterov": nesterov}
    pair = ExactSGD(fused, **options), torch.optim.SGD([plain.prototypes], **options)
    schedules = [torch.optim.lr_scheduler.MultiStepLR(one, [4, 8], gamma=0.3) for one in pair]
    for step in range(12):
        losses = fused(*batch(step)), plain_loss(plain, *batch(step))
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
        for loss, one, schedule in zip(losses, pair, schedules, strict=True):
            one.zero_grad()
            loss.backward()
            one.step()
            schedule.step()
    assert pair[0].param_groups[0]["lr"] == pair[1].param_groups[0]["lr"] == 0.5 * 0.3 * 0.3
    torch.testing.assert_close(fused.prototypes, plain.prototypes, rtol=1e-9, atol=1e-10)
    assert (plain.prototypes - make_head().prototypes).abs().amax() > 0.05  # training did something


@pytest.mark.parametrize("nesterov", [False, True])
@both
def test_blocks_of_a_dense_gradient_give_the_same_step(optimizer_class, nesterov):
    """At alpha 1 every class is active: both optimizers are torch's."""
    fused, plain = make_head(), make_head("dense")
    plain.loss = qmargin.arcface(scale=16.0)
    options = {"lr": 0.3, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": nesterov}
    optimizer = optimizer_class(fused, **options)
    expected = torch.optim.SGD([plain.prototypes], **options)
    fused.refresh()
    for step in range(5):
        plain_loss(plain, *batch(step)).backward()
        fused.fused_gradient = Blocks(plain.prototypes.grad)
        torch.testing.assert_close(optimizer.grad_norm(), plain.prototypes.grad.norm())
        optimizer.step()
        expected.step()
        expected.zero_grad()
    torch.testing.assert_close(fused.prototypes, plain.prototypes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("from_blocks", [False, True])
@pytest.mark.parametrize("setting", [3, 4])
def test_sparse_sgd_leaves_inactive_rows_alone(setting, from_blocks):
    """A row's momentum and weight decay act only in steps in which its class is active."""
    lr, momentum, decay = 0.4, 0.9, 1e-2
    head, twin = make_head(setting=setting), make_head("dense", setting=setting)
    optimizer = SparseSGD(head, lr, momentum, decay)
    weights = twin.prototypes.detach().clone()
    buffer = {}
    num_active = torch.zeros(NUM_CLASSES, dtype=torch.int64)
    for step in (0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 1, 0):
        twin.prototypes.grad = None
        plain_loss(twin, *batch(step)).backward()
        head(*batch(step)).backward()
        if from_blocks:
            head.fused_gradient = Blocks(twin.prototypes.grad)
        optimizer.step()
        is_active = twin.prototypes.grad.any(1)
        num_active += is_active
        for row in is_active.nonzero().flatten().tolist():
            gradient = twin.prototypes.grad[row] + decay * weights[row]
            buffer[row] = momentum * buffer[row] + gradient if row in buffer else gradient
            weights[row] -= lr * buffer[row]
        with torch.no_grad():
            twin.prototypes.copy_(weights)
    torch.testing.assert_close(head.prototypes.detach(), weights, rtol=1e-9, atol=1e-10)
    idle = num_active == 0
    assert idle.any() and ((num_active > 0) & (num_active < 12)).sum() > 10
    assert torch.equal(head.prototypes[idle], make_head().prototypes[idle])


def test_a_satisfied_target_is_not_active():
    """Its entry is listed, with a value of zero; neither decay nor momentum may touch the row."""
    head = make_head(setting=1)
    optimizer = SparseSGD(head, 0.1, weight_decay=0.5)
    with torch.no_grad():
        head.prototypes.abs_()
        head.prototypes[1:].neg_()  # far from the first one
    before = head.prototypes.detach().clone()
    loss = head(head.prototypes.detach()[:1], torch.tensor([0]))
    loss.backward()
    assert loss == 0.0 and len(head.fused_gradient.entries.columns) == 1
    optimizer.step()
    assert torch.equal(head.prototypes, before)


@pytest.mark.parametrize("screen_dtype", [torch.float32, torch.bfloat16, torch.float16])
@both
def test_a_step_leaves_the_copy_as_a_refresh_would(optimizer_class, screen_dtype, monkeypatch):
    head = make_head(dtype=torch.float32, screen_dtype=screen_dtype)
    optimizer = optimizer_class(head, 0.3)
    train(head, optimizer, range(3))
    found = head.copy.clone(), head.inverse_norms.clone(), head.copy_error.clone()
    with monkeypatch.context() as patch:  # the next forward pass must not refresh again
        patch.setattr(head_reference, "refresh_copy", None)
        head(*batch(0, torch.float32))
    head.refresh(force=True)
    assert torch.equal(found[0], head.copy) and torch.equal(found[1], head.inverse_norms)
    if optimizer_class is ExactSGD:
        assert torch.equal(found[2], head.copy_error)
    else:  # the largest error so far, still a bound
        assert head.copy_error <= found[2] <= 2.0 * head.copy_error
    head(*batch(0, torch.float32)).backward()
    with torch.no_grad():
        head.prototypes.mul_(3.0)  # by someone else: refreshed before the step
    optimizer.step()
    torch.testing.assert_close(head.inverse_norms, 1.0 / head.prototypes.detach().norm(dim=1))


@both
def test_state_survives_a_round_trip(optimizer_class):
    whole, part = make_head(), make_head()
    straight, first = optimizer_class(whole, 0.3), optimizer_class(part, 0.3)
    train(whole, straight, range(8))
    train(part, first, range(4))
    saved = copy.deepcopy(first.state_dict())
    resumed = make_head()
    resumed.load_state_dict(part.state_dict())
    second = optimizer_class(resumed, 99.0)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 0.3
    train(resumed, second, range(4, 8))
    assert torch.equal(resumed.prototypes, whole.prototypes)


def test_state_is_that_of_torch_sgd():
    """A run may change between fused and dense gradients in the middle."""
    options = {"lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4}
    truth, dense, fused = make_head("dense"), make_head("dense"), make_head()
    train(truth, torch.optim.SGD([truth.prototypes], **options), range(9))
    sgd, exact = torch.optim.SGD([dense.prototypes], **options), ExactSGD(fused, 1.0)
    train(dense, sgd, range(3))
    fused.load_state_dict(dense.state_dict())
    exact.load_state_dict(copy.deepcopy(sgd.state_dict()))
    train(fused, exact, range(3, 6))
    dense.load_state_dict(fused.state_dict())
    sgd.load_state_dict(copy.deepcopy(exact.state_dict()))
    train(dense, sgd, range(6, 9))
    torch.testing.assert_close(dense.prototypes, truth.prototypes, rtol=1e-10, atol=1e-11)
    other = torch.optim.SGD([dense.prototypes], 0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match="dampening"):
        exact.load_state_dict(other.state_dict())


def test_a_second_backward_before_a_step_is_an_error():
    head = make_head()
    optimizer = ExactSGD(head, 0.1)
    head(*batch(0)).backward()
    loss = head(*batch(1))
    with pytest.raises(ConfigError, match="zero_grad"):
        loss.backward()
    optimizer.zero_grad()
    head(*batch(1)).backward()
    optimizer.step()
    head(*batch(2)).backward()  # a step consumes what was pending
    first, second = head(*batch(3)), head(*batch(4))
    optimizer.step()
    with pytest.raises(ConfigError, match="zero_grad"):
        (first + second).backward()


def test_without_a_gradient_nothing_happens_and_a_closure_is_called():
    head, plain = make_head(), make_head()
    optimizer = ExactSGD(head, 0.1)
    optimizer.step()
    head(*batch(0)).backward()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.scale_gradient_(0.5)
    assert optimizer.grad_norm() == 0.0 and torch.equal(head.prototypes, plain.prototypes)

    def closure():
        loss = head(*batch(0))
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0.0
    train(plain, ExactSGD(plain, 0.1), range(1))
    assert torch.equal(head.prototypes, plain.prototypes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 0.1, "momentum": -0.1}, "momentum is -0.1"),
        ({"lr": 0.1, "weight_decay": math.inf}, "weight_decay is inf"),
        ({"lr": 0.1, "momentum": 0.0, "nesterov": True}, "nesterov"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        ExactSGD(make_head(), **options)


@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_other_gradients_are_refused(gradient):
    with pytest.raises(ConfigError, match="gradient='fused'"):
        ExactSGD(make_head(gradient), 0.1)
    head = make_head()
    optimizer = ExactSGD(head, 0.1)
    head.gradient = gradient
    head(*batch(0)).backward()
    with pytest.raises(ConfigError, match=r"prototypes\.grad"):
        optimizer.step()


# clipping, scaling, gradients that are not finite


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_equals_torch_on_the_dense_gradient(max_norm):
    head, plain = make_head(), make_head("dense")
    torch.manual_seed(3)
    bones = nn.Linear(DIM, DIM, dtype=torch.float64)
    plain_bones = copy.deepcopy(bones)
    optimizer = ExactSGD(head, 0.5)
    expected = torch.optim.SGD([plain.prototypes], 0.5, momentum=0.9, weight_decay=5e-4)
    for step in range(4):
        inputs, labels = batch(step)
        for one in (bones, plain_bones, optimizer, expected):
            one.zero_grad()
        head(bones(inputs), labels).backward()
        plain(plain_bones(inputs), labels).backward()
        every = [*plain_bones.parameters(), plain.prototypes]
        truth = torch.nn.utils.clip_grad_norm_(every, max_norm)
        # Passing the optimizer's own parameters as well must not count anything twice.
        given = [*bones.parameters(), *optimizer.param_groups[0]["params"]]
        norm = clip_grad_norm_(given, [optimizer], max_norm)
        torch.testing.assert_close(norm, truth, rtol=1e-10, atol=0.0)
        assert max_norm > 1.0 or truth > max_norm
        for one, other in zip(bones.parameters(), plain_bones.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(optimizer.grad_norm(), plain.prototypes.grad.norm())
        optimizer.step()
        expected.step()
    torch.testing.assert_close(head.prototypes, plain.prototypes, rtol=1e-10, atol=1e-11)


def test_clipping_takes_gradients_of_several_types():
    torch.manual_seed(0)
    types = (torch.float32, torch.float64, torch.float16, torch.float32)
    weights = [nn.Parameter(torch.randn(40).to(dtype)) for dtype in types]
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e4  # squares overflow in float16
    before = [weight.grad.double().clone() for weight in weights]
    truth = torch.linalg.vector_norm(torch.cat(before))
    torch.testing.assert_close(clip_grad_norm_(weights, [], 2.0).double(), truth, rtol=1e-6, atol=0)
    for weight, grad in zip(weights, before, strict=True):
        found, close = weight.grad.double(), 1e-3 if weight.dtype == torch.float16 else 1e-6
        torch.testing.assert_close(found, grad * (2.0 / truth), rtol=close, atol=1e-6)


def test_clipping_takes_sparse_gradients():
    dense, sparse = make_head("dense"), make_head("sparse")
    for head in (dense, sparse):
        head(*batch(0)).backward()
    truth = torch.nn.utils.clip_grad_norm_([dense.prototypes], 0.01)
    torch.testing.assert_close(clip_grad_norm_([sparse.prototypes], [], 0.01), truth)
    torch.testing.assert_close(sparse.prototypes.grad.to_dense(), dense.prototypes.grad)
    assert clip_grad_norm_([], [], 1.0) == 0.0
    sparse.prototypes.grad._values()[0] = math.nan
    with pytest.raises(DataError, match="nan"):
        clip_grad_norm_([sparse.prototypes], [], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("is_unscaled_first", [False, True])
@both
def test_a_grad_scaler_treats_it_like_any_optimizer(optimizer_class, is_unscaled_first):
    head, plain = make_head(), make_head()
    optimizer = optimizer_class(head, 0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(head(*batch(step))).backward()
        if is_unscaled_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    train(plain, optimizer_class(plain, 0.3), range(5))
    assert scaler.get_scale() == 4096.0
    torch.testing.assert_close(head.prototypes, plain.prototypes, rtol=1e-11, atol=1e-12)


def assert_unchanged(before, head, optimizer):
    for old, new in zip(before, tensors_of(head, optimizer), strict=True):
        assert torch.equal(old, new)


def test_a_grad_scaler_sees_an_overflow():
    head = make_head().float()
    optimizer = ExactSGD(head, 0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(16.0 * head(*batch(0, torch.float32))).backward()
    assert not head.fused_gradient.entries.values.isfinite().all()
    before = tensors_of(head, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert_unchanged(before, head, optimizer)


@pytest.mark.parametrize(
    ("where", "poison"), [("loss", math.nan), ("blocks", math.inf), ("scale", math.inf)]
)
@both
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer_class, poison, where):
    head = make_head()
    optimizer = optimizer_class(head, 0.3)
    train(head, optimizer, range(2))
    ((poison if where == "loss" else 1.0) * head(*batch(2))).backward()
    before = tensors_of(head, optimizer)
    if where == "scale":
        optimizer.scale_gradient_(poison)
    elif where == "blocks":
        rows = torch.zeros_like(head.prototypes)
        rows[-1, 0] = poison  # the last block: all others would have been stepped
        head.fused_gradient = Blocks(rows)
    optimizer.error_if_nonfinite = True
    with pytest.raises(DataError, match="not finite"):
        optimizer.step()
    optimizer.error_if_nonfinite = False
    optimizer.step()
    assert optimizer.num_skipped == 1 and head.fused_gradient is None
    assert_unchanged(before, head, optimizer)
    train(head, optimizer, range(2, 4))  # and the run goes on
    assert head.prototypes.isfinite().all() and optimizer.num_skipped == 1


# forms of the gradient


@pytest.mark.parametrize("num_classes", [0, 1, 5])  # ranks may have no class at all
@pytest.mark.parametrize("is_listed", [False, True])
def test_sparse_and_dense_gradients_say_the_same(num_classes, is_listed):
    classes = torch.arange(0, num_classes, 2) if is_listed else None
    rows = torch.randn(num_classes if classes is None else len(classes), 3)
    rows[1:2] = 0.0
    left = {}
    for gradient in ("dense", "sparse"):
        prototypes = torch.zeros(num_classes, 3)
        head = SimpleNamespace(gradient=gradient, prototypes=prototypes, may_have_moved=False)
        left[gradient] = deliver(head, RowsGradient(rows.clone(), num_classes, classes))
        assert head.may_have_moved
    assert left["sparse"].is_sparse and left["sparse"].shape == (num_classes, 3)
    assert left["sparse"]._nnz() == int((rows != 0).any(1).sum())
    torch.testing.assert_close(left["sparse"].to_dense(), left["dense"], rtol=0, atol=0)


@both
def test_no_step_allocates_a_matrix_of_all_prototypes(optimizer_class):
    num_classes = 4001
    head = make_head(setting=1, num_classes=num_classes)
    optimizer = optimizer_class(head, 0.1)
    train(head, optimizer, range(1))  # the momentum is made here
    loss = head(*map(torch.cat, zip(*map(batch, range(1, 9)), strict=True)))  # many active classes
    with LargestTensor() as largest:
        loss.backward()
        clip_grad_norm_([], [optimizer], 0.1)
        optimizer.step()
    assert 50 * DIM <= largest.num_elements < num_classes * DIM // 10
