"""The row kernels against the plain form in float64, in Triton's interpreter and on a GPU."""

import math
import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
pytest.importorskip("triton")

import qmargin
from qmargin.kernels import dispatch
from qmargin.kernels import rows as plain
from qmargin.kernels.triton import rows as fused

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORDERS = (0.25, 0.5, 1.0, 0.3, 0.05, 1e-4, 0.0, -1e-4, -0.3, -0.9)  # alpha - 1
SHAPE = (300, 9000) if torch.cuda.is_available() else (5, 300)


def batch(*, scale, margin=0.2, shape=SHAPE, spread=0.125, masked=0):
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) * spread).clamp(-1, 1)
    labels = torch.randint(masked, shape[1], shape[:1], generator=generator)
    values[:, :masked] = -math.inf
    values, labels = values.to(DEVICE), labels.to(DEVICE)
    own = values.gather(1, labels[:, None]).squeeze(1).double() * scale
    return values, labels, own, torch.full_like(own, -scale * margin)


def check(values, scale, b, target, *, capacity=fused.CAPACITY):
    """Everything a caller sees, against float64."""
    labels = None if target is None else target[0]
    rows = plain.Rows(values.double(), scale, b, None, *(target or (None, None, None)))
    want = plain.solve(rows)
    own = None if target is None else target[1:]
    got = fused.solve(values, scale, b, labels, target=own, capacity=capacity)
    torch.testing.assert_close(got.value.double(), want.value, rtol=6e-7, atol=1e-9)
    torch.testing.assert_close(got.tau.double(), want.tau, rtol=1e-6, atol=1e-6)
    # in a wide row a class at the very edge may be counted either way: tau is rounded
    num_classes = values.shape[1]
    edge = math.ceil(1e-5 * num_classes) if num_classes > 10_000 else 0
    assert (got.support_size - want.support_size).abs().max() <= edge
    assert got.mass_error.max() < 1e-6
    weights = torch.rand(len(values), device=DEVICE) + 0.5
    expected = plain.posterior(rows, want.anchor, want.level, weights.double())
    root = {"anchor": got.anchor, "level": got.level}
    found = fused.write_posterior(values, scale, b, labels, **root, weights=weights)
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert error < 2e-6
    for name, close in (("target_deficit", 1e-12), ("target_posterior", 1e-7)):
        if target is not None:
            found, expected = getattr(got, name).double(), getattr(want, name)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=close)


@pytest.mark.parametrize("b", ORDERS)
def test_rows_are_those_of_the_plain_form(b):
    values, *target = batch(scale=16.0)
    check(values, 16.0, b, target)
    check(values, 16.0, b, None)


@pytest.mark.parametrize("b", [0.25, 0.3, 0.05, 0.0, -0.3])
def test_masked_classes_and_lists_that_overflow(b):
    values, *target = batch(scale=16.0, masked=SHAPE[1] // 4)
    check(values, 16.0, b, target)
    values, *target = batch(scale=2.0)  # nearly all classes are active
    check(values, 2.0, b, target, capacity=16)


@pytest.mark.parametrize("b", [0.25, 0.0, -0.3])
def test_broken_rows_harm_no_others_and_a_target_may_be_alone(b):
    values, labels, own, reference = batch(scale=16.0)
    values[1, 7], values[2, 8] = math.nan, math.inf
    own[3] = math.nan
    got = fused.solve(values, 16.0, b, labels, target=(own, reference))
    assert got.value[1:4].isnan().all() and got.value[[0, 4]].isfinite().all()
    root = {"anchor": got.anchor, "level": got.level}
    out = fused.write_posterior(values, 16.0, b, labels, **root, weights=None)
    assert out[1:4].isnan().any(1).all() and out[[0, 4]].isfinite().all()
    values[0] = -math.inf  # only the target is left
    got = fused.solve(values, 16.0, b, labels, target=(own, reference))
    assert got.value[0].item() == pytest.approx(0.0, abs=1e-12)
    assert got.target_posterior[0].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "loss_fn", [qmargin.q_margin(), qmargin.arcface(), qmargin.sparsemax_face()]
)
def test_losses_have_the_gradients_of_float64(loss_fn, monkeypatch):
    monkeypatch.setattr(dispatch, "may_interpret", True)
    values, labels, *_ = batch(scale=1.0)
    labels[1] = -100
    single, double = values.clone().requires_grad_(), values.double().requires_grad_()
    assert plain.is_fused(plain.Rows(single, 1.0, 0.25))
    assert not plain.is_fused(plain.Rows(double, 1.0, 0.25))
    losses = [loss_fn(one, labels) for one in (single, double)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    error = (single.grad.double() - double.grad).abs().max() / double.grad.abs().max()
    assert error < 2e-6 and not single.grad[1].any()


def test_kernels_that_cannot_be_built_are_reported_once(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(dispatch, "may_interpret", True)
    monkeypatch.setattr(plain, "kernel_faults", [])
    monkeypatch.setattr(fused, "launch_solve", broken)
    values, labels, *_ = batch(scale=1.0)
    loss_fn = qmargin.q_margin()
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        found = loss_fn(values, labels)
    assert found.item() == pytest.approx(loss_fn(values.double(), labels).item(), rel=1e-6)
    assert loss_fn(values, labels) == found  # without another word


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 5994), (64, 93431), (3, 400_000)])
@pytest.mark.parametrize(("b", "scale"), [(0.25, 35.0), (0.25, 5.0), (0.05, 64.0), (0.0, 64.0)])
def test_sizes_that_people_have(shape, b, scale):
    values, *target = batch(scale=scale, shape=shape, spread=1 / 22)
    check(values, scale, b, target)


def test_rows_longer_than_kernels_count_are_left_to_plain_code(monkeypatch):
    """A block beyond the last class would overflow 32 bits; nothing of this size is allocated."""
    monkeypatch.setattr(dispatch, "may_interpret", True)
    for k, expected in ((1 << 20, True), ((1 << 31) - (1 << 12), False), (1 << 31, False)):
        assert plain.may_fuse(torch.zeros(1, 1).expand(1, k), 1.0) == expected
