"""Fused optimizers against ``torch.optim.SGD`` on a gradient that exists."""

import copy
import math

import pytest
import torch
from torch import Tensor

import qmargin
from helpers.fused import NUM_CLASSES, Blocks, batch, make_head, plain_loss, train
from qmargin.errors import ConfigError
from qmargin.heads.optimizers import ExactSGD, SparseSGD
from qmargin.kernels import head_reference

OPTIMIZERS = [ExactSGD, SparseSGD]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, the last one incomplete."""
    monkeypatch.setattr(head_reference, "UPDATE_CLASSES", 50)


@pytest.mark.parametrize(
    ("setting", "nesterov"), [(0, False), (1, True), (2, False), (3, True), (4, True)]
)
def test_exact_sgd_equals_torch_sgd_on_all_cosines(setting: int, nesterov: bool) -> None:
    fused, plain = make_head(setting=setting), make_head("dense", setting=setting)
    options = {"lr": 0.5, "momentum": 0.9, "weight_decay": 5e-3, "nesterov": nesterov}
    optimizer, expected = ExactSGD(fused, **options), torch.optim.SGD([plain.prototypes], **options)
    schedules = [
        torch.optim.lr_scheduler.MultiStepLR(one, [4, 8], gamma=0.3)
        for one in (optimizer, expected)
    ]
    for step in range(12):
        embeddings, labels = batch(step)
        expected.zero_grad()
        loss = plain_loss(plain, embeddings, labels)
        loss.backward()
        optimizer.zero_grad()
        fused_loss = fused(embeddings, labels)
        fused_loss.backward()
        torch.testing.assert_close(fused_loss, loss, rtol=1e-9, atol=1e-12)
        for one, schedule in zip((optimizer, expected), schedules, strict=True):
            one.step()
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"] == 0.5 * 0.3 * 0.3
    torch.testing.assert_close(fused.prototypes, plain.prototypes, rtol=1e-9, atol=1e-10)
    assert (plain.prototypes - make_head().prototypes).abs().amax() > 0.05  # training did something


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_blocks_of_a_dense_gradient_give_the_same_step(
    optimizer_class: type[ExactSGD | SparseSGD], nesterov: bool
) -> None:
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
def test_sparse_sgd_leaves_inactive_rows_alone(setting: int, from_blocks: bool) -> None:
    """A row's momentum and weight decay act only in steps in which its class is active."""
    lr, momentum, decay = 0.4, 0.9, 1e-2
    head, twin = make_head(setting=setting), make_head("dense", setting=setting)
    optimizer = SparseSGD(head, lr, momentum, decay)
    weights = twin.prototypes.detach().clone()
    buffer: dict[int, Tensor] = {}
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


def test_a_satisfied_target_is_not_active() -> None:
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
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_a_step_leaves_the_copy_as_a_refresh_would(
    optimizer_class: type[ExactSGD | SparseSGD],
    screen_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = make_head(dtype=torch.float32, screen_dtype=screen_dtype)
    optimizer = optimizer_class(head, 0.3)
    train(head, optimizer, range(3))
    found = head.copy.clone(), head.inverse_norms.clone(), head.copy_error.clone()

    with monkeypatch.context() as patch:  # the next forward pass must not refresh again
        patch.setattr(head_reference, "refresh_copy", None)
        head(*batch(0, torch.float32))

    head._version = -1
    head.refresh()
    assert torch.equal(found[0], head.copy)
    assert torch.equal(found[1], head.inverse_norms)
    if optimizer_class is ExactSGD:
        assert torch.equal(found[2], head.copy_error)
    else:  # the largest error so far, still a bound
        assert head.copy_error <= found[2] <= 2.0 * head.copy_error


def test_prototypes_changed_by_someone_else_are_refreshed_first() -> None:
    head = make_head(dtype=torch.float32)
    optimizer = SparseSGD(head, 0.1)
    head(*batch(0, torch.float32)).backward()
    with torch.no_grad():
        head.prototypes.mul_(3.0)
    optimizer.step()
    norms = head.prototypes.detach().norm(dim=1)
    torch.testing.assert_close(head.inverse_norms, 1.0 / norms)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_state_survives_a_round_trip(optimizer_class: type[ExactSGD | SparseSGD]) -> None:
    whole, part = make_head(), make_head()
    straight, first = optimizer_class(whole, 0.3), optimizer_class(part, 0.3)
    train(whole, straight, range(8))
    train(part, first, range(4))
    first.param_groups[0]["lr"] = 0.3
    saved = copy.deepcopy(first.state_dict())
    resumed = make_head()
    resumed.load_state_dict(part.state_dict())
    second = optimizer_class(resumed, 99.0)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 0.3
    train(resumed, second, range(4, 8))
    assert torch.equal(resumed.prototypes, whole.prototypes)


def test_state_is_that_of_torch_sgd() -> None:
    """A run may change between fused and dense gradients in the middle."""
    options = {"lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4}
    truth = make_head("dense")
    train(truth, torch.optim.SGD([truth.prototypes], **options), range(9))
    dense = make_head("dense")
    sgd = torch.optim.SGD([dense.prototypes], **options)
    train(dense, sgd, range(3))

    fused = make_head()
    fused.load_state_dict(dense.state_dict())
    exact = ExactSGD(fused, 1.0)
    exact.load_state_dict(copy.deepcopy(sgd.state_dict()))
    train(fused, exact, range(3, 6))

    dense.load_state_dict(fused.state_dict())
    sgd.load_state_dict(copy.deepcopy(exact.state_dict()))
    train(dense, sgd, range(6, 9))
    torch.testing.assert_close(dense.prototypes, truth.prototypes, rtol=1e-10, atol=1e-11)

    other = torch.optim.SGD([dense.prototypes], 0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match="dampening"):
        exact.load_state_dict(other.state_dict())


def test_a_second_backward_before_a_step_is_an_error() -> None:
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


def test_without_a_gradient_nothing_happens() -> None:
    head = make_head()
    optimizer = ExactSGD(head, 0.1, weight_decay=0.5)
    before = head.prototypes.detach().clone()
    optimizer.step()
    head(*batch(0)).backward()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.scale_gradient_(0.5)
    assert optimizer.grad_norm() == 0.0
    assert torch.equal(head.prototypes, before)


def test_a_closure_is_called() -> None:
    head, plain = make_head(), make_head()
    optimizer, expected = ExactSGD(head, 0.1), ExactSGD(plain, 0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = head(*batch(0))
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) > 0.0
    train(plain, expected, range(1))
    assert torch.equal(head.prototypes, plain.prototypes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 0.1, "momentum": -0.1}, "momentum is -0.1"),
        ({"lr": 0.1, "weight_decay": math.inf}, "weight_decay is inf"),
        ({"lr": 0.1, "momentum": 0.0, "nesterov": True}, "nesterov needs momentum"),
    ],
)
def test_settings_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExactSGD(make_head(), **options)


@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_other_gradients_are_refused(gradient: str) -> None:
    with pytest.raises(ConfigError, match="gradient='fused'"):
        ExactSGD(make_head(gradient), 0.1)
    head = make_head()
    optimizer = ExactSGD(head, 0.1)
    head.gradient = gradient
    head(*batch(0)).backward()
    with pytest.raises(ConfigError, match=r"prototypes\.grad"):
        optimizer.step()
