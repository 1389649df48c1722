"""Fused gradients: their forms, norm, scale, clipping, non-finite ones, and their memory."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from helpers.fused import DIM, Blocks, batch, make_head, tensors_of, train
from helpers.heads import LargestTensor
from qmargin.errors import DataError
from qmargin.heads.gradients import RowsGradient, deliver
from qmargin.heads.optimizers import ExactSGD, SparseSGD, clip_grad_norm_
from qmargin.kernels import head_reference

OPTIMIZERS = [ExactSGD, SparseSGD]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, the last one incomplete."""
    monkeypatch.setattr(head_reference, "UPDATE_CLASSES", 50)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        return result


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_equals_torch_on_the_dense_gradient(max_norm: float) -> None:
    head, plain, bones, plain_bones = make_head(), make_head("dense"), Backbone(), Backbone()
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


def test_clipping_takes_gradients_of_several_types() -> None:
    torch.manual_seed(0)
    types = (torch.float32, torch.float64, torch.float16, torch.float32)
    weights = [torch.nn.Parameter(torch.randn(40).to(dtype)) for dtype in types]
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e4  # squares overflow in float16
    before = [weight.grad.double().clone() for weight in weights]
    truth = torch.linalg.vector_norm(torch.cat(before))
    torch.testing.assert_close(clip_grad_norm_(weights, [], 2.0).double(), truth, rtol=1e-6, atol=0)
    for weight, grad in zip(weights, before, strict=True):
        tolerance = 1e-3 if weight.dtype == torch.float16 else 1e-6
        torch.testing.assert_close(
            weight.grad.double(), grad * (2.0 / truth), rtol=tolerance, atol=1e-6
        )


def test_clipping_takes_sparse_gradients() -> None:
    dense, sparse = make_head("dense"), make_head("sparse")
    for head in (dense, sparse):
        head(*batch(0)).backward()
    truth = torch.nn.utils.clip_grad_norm_([dense.prototypes], 0.01)
    torch.testing.assert_close(clip_grad_norm_([sparse.prototypes], [], 0.01), truth)
    torch.testing.assert_close(sparse.prototypes.grad.to_dense(), dense.prototypes.grad)
    assert clip_grad_norm_([], [], 1.0) == 0.0


def test_a_norm_that_is_not_finite_can_be_an_error() -> None:
    head = make_head()
    optimizer = ExactSGD(head, 0.1)
    head(*batch(0)).backward()
    head.fused_gradient.entries.values[0] = math.nan
    with pytest.raises(DataError, match="nothing was clipped"):
        clip_grad_norm_([], [optimizer], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("is_unscaled_first", [False, True])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_a_grad_scaler_treats_it_like_any_optimizer(
    optimizer_class: type[ExactSGD | SparseSGD], is_unscaled_first: bool
) -> None:
    head, plain = make_head(), make_head()
    optimizer, expected = optimizer_class(head, 0.3), optimizer_class(plain, 0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(head(*batch(step))).backward()
        if is_unscaled_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    train(plain, expected, range(5))
    assert scaler.get_scale() == 4096.0
    torch.testing.assert_close(head.prototypes, plain.prototypes, rtol=1e-11, atol=1e-12)


def test_a_grad_scaler_sees_an_overflow() -> None:
    head = make_head().float()
    optimizer = ExactSGD(head, 0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    embeddings, labels = batch(0)
    scaler.scale(16.0 * head(embeddings.float(), labels)).backward()
    assert not head.fused_gradient.entries.values.isfinite().all()
    before = tensors_of(head, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    for old, new in zip(before, tensors_of(head, optimizer), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("where", "poison"), [("loss", math.nan), ("blocks", math.inf), ("scale", math.inf)]
)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(
    optimizer_class: type[ExactSGD | SparseSGD], poison: float, where: str
) -> None:
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
    assert optimizer.num_skipped == 1
    assert head.fused_gradient is None
    for old, new in zip(before, tensors_of(head, optimizer), strict=True):
        assert torch.equal(old, new)
    train(head, optimizer, range(2, 4))  # and the run goes on
    assert head.prototypes.isfinite().all() and optimizer.num_skipped == 1


def test_fused_gradients_agree_with_the_dense_one() -> None:
    head, dense = make_head(), make_head("dense")
    for one in (head, dense):
        one(*batch(0)).backward()
    truth = dense.prototypes.grad
    for pending in (head.fused_gradient, Blocks(truth)):
        blocks = list(pending.blocks())
        assert [part.start for part, _ in blocks[1:]] == [part.stop for part, _ in blocks[:-1]]
        torch.testing.assert_close(torch.cat([rows for _, rows in blocks]), truth)
        torch.testing.assert_close(pending.norm(), truth.norm())
        assert pending.is_finite()


@pytest.mark.parametrize("num_classes", [0, 1, 5])  # ranks may have no class at all
@pytest.mark.parametrize("is_listed", [False, True])
def test_sparse_and_dense_gradients_say_the_same(num_classes: int, is_listed: bool) -> None:
    classes = torch.arange(0, num_classes, 2) if is_listed else None
    rows = torch.randn(num_classes if classes is None else len(classes), 3)
    rows[1:2] = 0.0
    left = {}
    for gradient in ("dense", "sparse"):
        head = SimpleNamespace(
            gradient=gradient, prototypes=torch.zeros(num_classes, 3), may_have_moved=False
        )
        left[gradient] = deliver(head, RowsGradient(rows.clone(), num_classes, classes))
        assert head.may_have_moved
    assert left["sparse"].is_sparse and left["sparse"].shape == (num_classes, 3)
    assert left["sparse"]._nnz() == int((rows != 0).any(1).sum())
    torch.testing.assert_close(left["sparse"].to_dense(), left["dense"], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_no_step_allocates_a_matrix_of_all_prototypes(
    optimizer_class: type[ExactSGD | SparseSGD],
) -> None:
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
    with LargestTensor() as largest:
        torch.zeros_like(head.prototypes)
    assert largest.num_elements == num_classes * DIM  # the measurement works
