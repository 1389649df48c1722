"""The loss by kernels alone, against the same loss in float64: interpreted, or on a GPU."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
pytest.importorskip("triton")

import qmargin
from qmargin.errors import DataError
from qmargin.kernels import dispatch
from qmargin.kernels import rows as plain
from qmargin.kernels.triton import rows as kernels
from qmargin.losses import fused
from qmargin.losses.margins import ClosedForm, closed_form

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's masked lanes
    pytest.mark.filterwarnings("ignore::qmargin.MarginWarning"),
]
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ALPHAS = (0.5, 0.99, 1.0, 1.05, 1.25, 1.3, 1.5, 1.75, 2.0, 3.0, 8.0, 16.0)
MARGINS = (
    qmargin.PriorMargin(0.2),
    qmargin.CosineMargin(0.3),
    qmargin.AngularMargin(0.5),
    qmargin.AngularMargin(0.5, "straight_through"),
    qmargin.PriorMargin(0.1) + qmargin.AngularMargin(0.2),
)
# Of gradients, relative to the largest; the interpreter cuts bfloat16 off instead of rounding.
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
for_alphas = pytest.mark.parametrize("alpha", ALPHAS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "may_interpret", True)


def batch(rows: int = 5, k: int = 33, *, spread: float = 0.3, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    cosines = (torch.randn(rows, k, generator=generator) * spread).clamp(-1, 1)
    labels = torch.randint(k, (rows,), generator=generator)
    return cosines.to(DEVICE), labels.to(DEVICE)


def make(alpha: float, margin: qmargin.Margin = MARGINS[0], scale: float = 16.0, **options):
    return qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale, **options)


def gradient_of(loss: Tensor, leaf: Tensor, weights: Tensor | None = None) -> Tensor:
    (found,) = torch.autograd.grad(loss, leaf, weights)
    return found


def compare(loss_fn, cosines: Tensor, labels: Tensor, *, close: float | None = None) -> Tensor:
    """Loss and gradient of fused kernels against float64; returns the gradient."""
    single = cosines.detach().requires_grad_()
    double = cosines.detach().double().requires_grad_()
    losses = [loss_fn(one, labels) for one in (single, double)]
    assert "FusedLoss" in type(losses[0].grad_fn).__name__
    assert "FusedLoss" not in type(losses[1].grad_fn).__name__
    assert losses[0].dtype == torch.float32 and losses[0].shape == losses[1].shape
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=2e-6, atol=1e-7)
    weights = None
    if losses[0].dim():
        weights = torch.linspace(0.5, 1.5, len(losses[0]), device=DEVICE)
    found = gradient_of(losses[0], single, weights)
    expected = gradient_of(losses[1], double, None if weights is None else weights.double())
    assert found.dtype == cosines.dtype and found.is_contiguous()
    limit = CLOSE[cosines.dtype] if close is None else close
    assert (found.double() - expected).abs().max() <= limit * expected.abs().max() + 1e-12
    return found


@for_alphas
@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_margins_at_every_alpha(alpha, margin):
    """M5, M6, M7, M9."""
    compare(make(alpha, margin, reduction="none"), *batch())


@for_alphas
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_and_written_as_it_is(alpha, dtype):
    cosines, labels = batch(4, 40)
    compare(make(alpha), cosines.to(dtype), labels.int())


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 3.0])
@pytest.mark.parametrize("k", [1, 2, 129, 4097])
def test_any_number_of_classes(alpha, k):
    compare(make(alpha), *batch(3, k))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 1.75, 2.0, 8.0])
def test_reductions_and_ignored_rows(alpha):
    cosines, labels = batch(6)
    labels[1], cosines[1] = -100, math.nan
    labels[4], cosines[4] = -100, math.inf
    for reduction in ("mean", "sum", "none"):
        loss_fn = make(alpha, reduction=reduction)
        found = compare(loss_fn, cosines, labels)
        assert not found[[1, 4]].any()
    leaf = cosines.clone().requires_grad_()
    loss = make(alpha)(leaf, torch.full_like(labels, -100))
    assert loss.isnan() and not gradient_of(loss, leaf).any()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.05, 1.25, 2.0, 3.0, 16.0])
def test_masked_classes(alpha):
    cosines, labels = batch(4, 40)
    is_kept = torch.zeros(4, 40, dtype=torch.bool, device=DEVICE)
    is_kept.scatter_(1, labels[:, None], True)
    cosines[0, ::3] = torch.where(is_kept[0, ::3], cosines[0, ::3], -math.inf)
    cosines[1] = torch.where(is_kept[1], cosines[1], -math.inf)  # the target alone is left
    found = compare(make(alpha, reduction="none"), cosines, labels)
    assert not found[cosines == -math.inf].any() and found.isfinite().all()
    cosines[2, labels[2]] = -math.inf  # a masked target
    leaf = cosines.clone().requires_grad_()
    loss = make(alpha, reduction="none")(leaf, labels)
    assert loss[2] == math.inf and gradient_of(loss.sum(), leaf)[2, labels[2]] == 0


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 3.0])
def test_broken_rows_and_labels_stay_where_they_are(alpha, monkeypatch):
    cosines, labels = batch(6)
    cosines[1, (labels[1] + 1) % 33], cosines[2, labels[2]] = math.nan, math.nan
    cosines[3, (labels[3] + 1) % 33] = math.inf
    settings = fused.Settings(alpha - 1, 16.0, ClosedForm(prior=0.2), -100, "none")
    labels[4] = 33  # a GPU is not asked whether labels are classes
    leaf = cosines.clone().requires_grad_()
    (loss,) = fused.loss_of(leaf, labels, settings)
    assert loss[1:5].isnan().all() and loss[[0, 5]].isfinite().all()
    found = gradient_of(loss, leaf, torch.ones_like(loss))
    assert found[1:5].isnan().any(1).all() and found[[0, 5]].isfinite().all()
    (loss,) = fused.loss_of(leaf, labels, settings)
    weights = torch.tensor([1.0, 0, 0, 0, 0, 2.0], device=DEVICE)
    found = gradient_of(loss, leaf, weights)  # no gradient in, none out, whatever the row holds
    assert not found[1:5].any() and found[[0, 5]].isfinite().all()
    if not HAS_GPU:
        with pytest.raises(DataError, match="label 33"):
            make(alpha)(cosines, labels)
    with pytest.raises(DataError, match="label 33"):
        make(alpha, debug=True)(cosines, labels)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 3.0])
def test_any_strides(alpha):
    cosines, labels = batch(4, 24)
    for view in (
        cosines.t().contiguous().t(),
        torch.cat([cosines, cosines], 1)[:, :24],
        cosines[:1].expand(4, 24),
        cosines.repeat(1, 2)[:, ::2],
    ):
        compare(make(alpha), view, labels)
    cube, names = cosines.reshape(2, 2, 24), labels.reshape(2, 2)
    leaf = cube.clone().requires_grad_()
    loss = make(alpha, reduction="none")(leaf, names)
    assert loss.shape == (2, 2)
    torch.testing.assert_close(loss.flatten(), make(alpha, reduction="none")(cosines, labels))
    assert gradient_of(loss.sum(), leaf).shape == cube.shape
    everywhere = make(alpha, reduction="none")(cosines, labels[:1].expand(4))
    again = make(alpha, reduction="none")(cosines, labels[:1].repeat(4))
    assert torch.equal(everywhere, again)


@for_alphas
def test_statistics(alpha):
    cosines, labels = batch(5, 40)
    found = make(alpha).with_stats(cosines, labels)
    expected = make(alpha).with_stats(cosines.double(), labels)
    for name in ("loss", "tau", "target_posterior"):
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)
    assert torch.equal(found.support_size, expected.support_size)
    assert found.mass_error.max() < 1e-6
    leaf = cosines.clone().requires_grad_()
    output = make(alpha).with_stats(leaf, labels)
    assert [part.requires_grad for part in output] == [True] + 4 * [False]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("margin", [MARGINS[0], MARGINS[4]], ids=str)
def test_second_derivatives(alpha, margin):
    cosines, labels = batch(4, 12)
    labels[1], cosines[1] = -100, math.nan
    for reduction in ("mean", "none"):
        found = []
        for dtype in (torch.float32, torch.float64):
            leaf = cosines.to(dtype).requires_grad_()
            loss = make(alpha, margin, 8.0, reduction=reduction)(leaf, labels)
            (first,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
            kept = first[[0, 2, 3]]
            (second,) = torch.autograd.grad(kept.square().sum(), leaf)
            found += [kept.detach().double(), second.double()]
        for one, other in zip(found[:2], found[2:], strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@for_alphas
def test_plain_logits(alpha):
    cosines, labels = batch(5, 40)
    logits = 10 * cosines
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype).requires_grad_()
        loss = qmargin.fenchel_young_loss(leaf, labels, alpha=alpha)
        results.append((loss.double(), gradient_of(loss.sum(), leaf).double()))
        assert ("FusedLoss" in type(loss.grad_fn).__name__) == (dtype == torch.float32)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=2e-6)


def references(k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    full = -6.0 * torch.rand(4, k, generator=generator)
    masked = full.clone()
    masked[:, ::5] = -math.inf
    return {"class": full[0], "row": full[:, :1], "all": full, "masked": masked}


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.05, 1.25, 2.0, 3.0, 16.0])
@pytest.mark.parametrize("kind", ["class", "row", "all", "masked"])
def test_reference_measures(alpha, kind):
    cosines, _ = batch(4, 24)
    labels = torch.tensor([1, 2, 3, 4], device=DEVICE)
    reference = references(24)[kind].to(DEVICE)
    for name in ("fenchel_young_loss", "log_partition", "softargmax"):
        results = []
        for dtype in (torch.float32, torch.float64):
            leaf = (8 * cosines).to(dtype).requires_grad_()
            options = {"alpha": alpha, "log_reference": reference.to(dtype)}
            target = (labels,) if name == "fenchel_young_loss" else ()
            value = getattr(qmargin, name)(leaf, *target, **options)
            results += [value.double(), gradient_of(value.square().sum(), leaf).double()]
        torch.testing.assert_close(results[0], results[2], rtol=2e-6, atol=2e-6)
        scale = results[3].abs().max()
        if name == "softargmax" and alpha > 3.0:
            continue  # in float32 its gradient is a difference of huge terms, on every device
        assert (results[1] - results[3]).abs().max() <= 2e-5 * scale + 1e-9, name


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.3, 2.0, 3.0, 16.0])
@pytest.mark.parametrize("kind", [None, "all"])
def test_lists_that_overflow_change_nothing(alpha, kind):
    cosines, labels = batch(4, 300)
    reference = None if kind is None else references(300)[kind].to(DEVICE)
    own = cosines.gather(1, labels[:, None]).squeeze(1).double()
    own_reference = torch.full_like(own, -0.3)
    given = (cosines, 2.0, alpha - 1, labels)
    options = {"target": (2.0 * own, own_reference), "log_reference": reference}
    short, long = (kernels.solve(*given, **options, capacity=c) for c in (8, 4096))
    torch.testing.assert_close(short.value, long.value, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(short.tau, long.tau, rtol=2e-6, atol=1e-6)
    lifted = labels, 2.0 * own, own_reference
    wide = None if reference is None else reference.double()
    truth = plain.solve(plain.Rows(cosines.double(), 2.0, alpha - 1, wide, *lifted))
    torch.testing.assert_close(long.value.double(), truth.value, rtol=2e-6, atol=1e-6)
    assert (long.support_size - truth.support_size).abs().max() <= 1


def test_lists_stay_short():
    """The bound over lanes is worth having: a list holds little more than the support."""
    cosines, labels = batch(3, 3000, spread=0.05)
    for alpha, scale in ((1.5, 10.0), (2.0, 1.9), (1.25, 35.0), (3.0, 5.0)):
        outcome = kernels.solve(cosines, scale, alpha - 1, labels, margin=(0.0, 0.0, 0.0))
        limit = int(outcome.support_size.max()) + 64
        again = kernels.solve(
            cosines, scale, alpha - 1, labels, margin=(0.0, 0.0, 0.0), capacity=limit
        )
        assert torch.equal(outcome.value, again.value)  # bit by bit: no list overflowed


def test_huge_logits_and_dominant_targets():
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e30, 1e30, -1e30], [50.0, 0.0, -50.0]])
    labels = torch.tensor([0, 0, 0])
    for alpha in (0.5, 1.0, 1.25, 3.0):
        loss = qmargin.fenchel_young_loss(logits.to(DEVICE), labels.to(DEVICE), alpha=alpha)
        truth = qmargin.fenchel_young_loss(logits.double(), labels, alpha=alpha)
        torch.testing.assert_close(loss.double().cpu(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecation warnings are not ours
@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inside_a_compiled_graph(alpha, reduction):
    cosines, labels = batch(5, 40)
    labels[1] = -100
    for margin in (MARGINS[0], MARGINS[2]):
        loss_fn = make(alpha, margin, reduction=reduction)
        results = []
        for function in (loss_fn, torch.compile(loss_fn, fullgraph=True, backend="aot_eager")):
            leaf = cosines.clone().requires_grad_()
            loss = function(leaf, labels)
            results += [loss, gradient_of(loss.sum(), leaf)]
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_graph_without_kernels(monkeypatch):
    """The operator falls back with a warning, in the middle of a graph."""

    def broken(*args, **options):
        raise RuntimeError("no C compiler")

    cosines, labels = batch(5, 40)
    labels[1], cosines[1] = -100, math.nan
    loss_fn = make(1.25, MARGINS[4])
    leaf = cosines.clone().requires_grad_()
    expected = loss_fn(leaf, labels)
    expected_gradient = gradient_of(expected, leaf)
    monkeypatch.setattr(plain, "kernel_faults", [])
    monkeypatch.setattr(kernels, "launch_solve", broken)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        loss = compiled(leaf, labels)
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    found = gradient_of(loss, leaf)
    assert (found - expected_gradient).abs().max() <= 2e-6 * expected_gradient.abs().max()
    torch.compiler.reset()


def test_transforms_take_the_other_way():
    cosines, labels = batch(3, 12)
    loss_fn = make(1.25, reduction="sum")

    def loss(row: Tensor, label: Tensor) -> Tensor:
        return loss_fn(row[None], label[None])

    found = torch.func.vmap(torch.func.grad(loss))(cosines, labels)
    leaf = cosines.clone().requires_grad_()
    torch.testing.assert_close(found, gradient_of(loss_fn(leaf, labels), leaf))


def test_margins_in_closed_form():
    per_class = qmargin.PerClass(torch.full((12,), 0.1))
    assert closed_form(MARGINS[0]) == ClosedForm(prior=0.2)
    assert closed_form(MARGINS[3]) == ClosedForm(angle=0.5, is_straight=True)
    assert closed_form(MARGINS[4]) == ClosedForm(prior=0.1, angle=0.2)
    for margin in (
        qmargin.PriorMargin(torch.tensor(0.1)),
        qmargin.CosineMargin(per_class),
        qmargin.CombinedMargin(multiplier=1.5),
        qmargin.PriorMargin(0.1) + qmargin.CosineMargin(per_class),
        type("Own", (qmargin.PriorMargin,), {})(0.1),  # it may have a term of its own
    ):
        assert closed_form(margin) is None
    cosines = torch.tensor([1.0, 0.9, 0.0, -0.95, -1.0, 1.001], dtype=torch.float64)
    for margin in MARGINS:
        form = closed_form(margin)
        leaf = cosines.clone().requires_grad_()
        term, expected = form.term(leaf, 16.0), margin(leaf, 16.0)
        torch.testing.assert_close(term.logits, expected.logits)
        torch.testing.assert_close(term.log_reference, expected.log_reference)
        slopes = gradient_of(expected.logits.sum(), leaf)
        torch.testing.assert_close(form.slope(cosines, 16.0), slopes)


def test_the_posterior_of_a_head():
    """``write_posterior`` with a factor, a dtype and a weight for the label's own place."""
    cosines, labels = batch(4, 40)
    labels[2] = -1
    outcome = kernels.solve(cosines, 8.0, 0.25, labels, margin=(0.1, 0.0, 0.2), ignore_index=-1)
    assert outcome.target_gradient is not None and outcome.target_gradient[2] == 0
    own = {"weights": torch.ones(4, device=DEVICE), "target_weights": outcome.target_gradient / 8.0}
    root = {"anchor": outcome.anchor, "level": outcome.level, "ignore_index": -1}
    found = kernels.write_posterior(
        cosines, 8.0, 0.25, labels, **root, **own, out_dtype=torch.float16, factor=4.0
    )
    margin = qmargin.PriorMargin(0.1) + qmargin.AngularMargin(0.2)
    loss_fn = make(1.25, margin, 8.0, reduction="sum", ignore_index=-1)
    leaf = cosines.double().requires_grad_()
    expected = gradient_of(loss_fn(leaf, labels), leaf) * 0.5
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    room = torch.full((4, 50), 7.0, device=DEVICE)
    kernels.write_posterior(cosines, 8.0, 0.25, labels, **root, **own, out=room[:, :40])
    assert bool((room[:, 40:] == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 5994), (64, 93431), (3, 400_001)])
@pytest.mark.parametrize(
    ("alpha", "scale"),
    [(1.25, 35.0), (1.25, 5.0), (1.5, 10.0), (2.0, 1.9), (1.0, 64.0), (3.0, 8.0), (0.5, 8.0)],
)
def test_sizes_that_people_have(alpha, scale, shape, dtype):
    cosines, labels = batch(*shape, spread=1 / 22)
    for margin in MARGINS[:3]:
        compare(make(alpha, margin, scale), cosines.to(dtype), labels)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_and_a_graph_can_hold_it():
    cosines, labels = batch(64, 5994, spread=1 / 22)
    for alpha in (1.0, 1.25, 3.0):
        loss_fn = make(alpha)
        leaf = cosines.clone().requires_grad_()
        expected = gradient_of(loss_fn(leaf, labels), leaf)  # compiles
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            found = gradient_of(loss_fn(leaf, labels), leaf)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradient_of(loss_fn(leaf, labels), leaf)
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_inductor():
    cosines, labels = batch(64, 5994, spread=1 / 22)
    for alpha in (1.0, 1.25):
        loss_fn = make(alpha)
        results = []
        for function in (loss_fn, torch.compile(loss_fn, fullgraph=True)):
            leaf = cosines.clone().requires_grad_()
            results.append(gradient_of(function(leaf, labels), leaf))
        assert torch.equal(*results)
