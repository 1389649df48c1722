"""Masked classes, NaN, infinity, ignored rows, odd targets: confined to where they stand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

import qmargin
from helpers.cases import spread_cosines
from helpers.operators import make_loss, operators
from qmargin.errors import DataError, ShapeError
from qmargin.kernels import solver

ALPHAS = (0.5, 1.0, 1.25, 3.0)
DIVERGENCES = [*map(qmargin.Alpha, (*ALPHAS, 2.0)), qmargin.JensenShannon()]
OTHERS = [0, 1, 3, 4]  # than row 2
IGNORED, KEPT = [1, 3], [0, 2, 4]
EXACT = {"rtol": 0, "atol": 1e-13}
for_alphas = pytest.mark.parametrize("alpha", ALPHAS)
for_divergences = pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)


@for_alphas
def test_masked_classes_are_as_good_as_absent(alpha):
    """``-inf`` gives p = 0 and a zero gradient, and changes nothing else."""
    cosines, _ = spread_cosines()
    masked = [2, 7, 11]
    kept = [j for j in range(12) if j not in masked]
    labels = torch.tensor([0, 1, 3, 4, 10])
    logits = (5 * cosines).double()
    logits[:, masked] = -math.inf
    short, short_labels = logits[:, kept], torch.tensor([kept.index(y) for y in labels.tolist()])
    functions = operators(alpha)
    for name in ("log_partition", "loss", "tau"):
        value, expected = functions[name](logits, labels), functions[name](short, short_labels)
        torch.testing.assert_close(value, expected, **EXACT)
    posterior = qmargin.softargmax(logits, alpha=alpha)
    assert bool((posterior[:, masked] == 0).all())
    torch.testing.assert_close(posterior[:, kept], qmargin.softargmax(short, alpha=alpha), **EXACT)
    sizes = [qmargin.solve_tau(x, alpha=alpha).support_size for x in (logits, short)]
    assert torch.equal(*sizes)
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64)
    for name in ("log_partition", "loss", "softargmax"):
        leaf = logits.clone().requires_grad_()
        value = functions[name](leaf, labels)
        value = value @ weights if name == "softargmax" else value
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        assert bool((gradient[:, masked] == 0).all()) and bool(gradient.isfinite().all())
    # A class with q = 0 has no mass either, not even the one with the largest logit.
    logits = 5 * cosines.double()
    reference = torch.zeros_like(logits)
    reference[:, 4] = -math.inf
    reference.scatter_(1, logits.argmax(1, keepdim=True), -math.inf)
    for name in ("softargmax", "log_partition"):
        function = getattr(qmargin, name)
        leaf = logits.clone().requires_grad_()
        found = function(leaf, alpha=alpha, log_reference=reference)
        expected = function(logits.where(reference == 0, -math.inf), alpha=alpha)
        torch.testing.assert_close(found, expected, **EXACT)
        (gradient,) = torch.autograd.grad(found.pow(2).sum(), leaf)
        assert bool((gradient[reference < 0] == 0).all()) and bool(gradient.isfinite().all())


@for_alphas
def test_a_masked_target_costs_infinity(alpha):
    """An impossible target: +inf for its row, and the other rows are untouched."""
    cosines, labels = spread_cosines()
    one_hot = nn.functional.one_hot(labels, 12).float()
    broken = cosines.clone()
    broken[2, labels[2]] = -math.inf
    for function in (
        make_loss(alpha),
        lambda x, y: qmargin.fenchel_young_loss(5 * x, y, alpha=alpha),
        lambda x, y: qmargin.fenchel_young_loss(5 * x, one_hot, alpha=alpha),
    ):
        loss = function(broken, labels)
        assert float(loss[2]) == math.inf
        assert torch.equal(loss[OTHERS], function(cosines, labels)[OTHERS])
    reference = torch.zeros_like(cosines)
    reference[2, labels[2]] = -math.inf  # q = 0 is as impossible
    loss = qmargin.fenchel_young_loss(5 * cosines, labels, alpha=alpha, log_reference=reference)
    assert float(loss[2]) == math.inf and bool(loss[OTHERS].isfinite().all())


@for_divergences
@pytest.mark.parametrize("twice", [False, True])
def test_a_masked_target_passes_no_gradient(divergence, twice):
    """``-inf`` means no gradient, also for a class that the target gives mass to."""
    logits, target = logits_and_target()
    labels = torch.tensor([2, 2, 0, 1, 2])
    logits[:, 2] = -math.inf
    loss_fn = qmargin.MarginLoss(divergence, qmargin.CosineMargin(0.1), scale=5.0, reduction="none")
    for function in (
        lambda x: qmargin.fenchel_young_loss(x, target, divergence=divergence),
        lambda x: qmargin.fenchel_young_loss(x, labels, divergence=divergence),
        lambda x: loss_fn(x, labels),
    ):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=twice)
        assert bool((gradient[:, 2] == 0).all())


@for_alphas
def test_a_row_without_any_class_is_not_a_number(alpha):
    """All classes masked: no posterior, no finite loss, and no other row is touched."""
    cosines, labels = spread_cosines()
    broken = cosines.clone()
    broken[2] = -math.inf
    for name, function in operators(alpha).items():
        value = function(broken, labels)
        if name == "softargmax":  # masked means p = 0
            assert bool(((value[2] == 0) | value[2].isnan()).all())
        else:
            assert not bool(value[2].isfinite().any()), name
        assert torch.equal(value[OTHERS], function(cosines, labels)[OTHERS]), name


@for_alphas
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_all_other_classes_masked(alpha, scale):
    """One class left and it is the target: no loss and no gradient, not 0 times infinity."""
    cosines = torch.tensor([[-1.0, -math.inf, -math.inf]], requires_grad=True)
    margin = qmargin.CosineMargin(0.5)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale, reduction="none")
    loss = loss_fn(cosines, torch.tensor([0]))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(cosines.grad, torch.zeros(1, 3), rtol=0, atol=1e-5)


@for_alphas
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["target", "other", "all"])
def test_a_broken_row_is_nan_and_the_others_are_bit_identical(alpha, bad, where):
    cosines, labels = spread_cosines()
    broken = cosines.clone()
    if where == "all":
        broken[2] = bad
    else:
        broken[2, (int(labels[2]) + (where == "other")) % 12] = bad
    for name, function in operators(alpha).items():
        value = function(broken, labels)
        assert bool(value[2].isnan().all()), f"{name}: {value[2]}"
        assert torch.equal(value[OTHERS], function(cosines[OTHERS], labels[OTHERS])), name
    gradients = []
    for rows in (cosines, broken):
        leaf = rows.clone().requires_grad_()
        make_loss(alpha)(leaf, labels).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0][OTHERS], gradients[1][OTHERS])
    assert bool(gradients[1][2].isnan().any())


@pytest.mark.parametrize("num_classes", [12, 64, 500])
@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_an_infinite_reference_breaks_its_row_at_any_size(alpha, num_classes):
    logits = 10 * torch.randn(3, num_classes)
    reference = torch.zeros(3, num_classes)
    reference[1, int(logits[1].argmin())] = math.inf
    options = {"alpha": alpha, "log_reference": reference}
    for value in (
        qmargin.softargmax(logits, **options).sum(1),
        qmargin.log_partition(logits, **options),
        qmargin.fenchel_young_loss(logits, torch.tensor([0, 0, 0]), **options),
        qmargin.solve_tau(logits, **options).tau,
    ):
        assert value.isnan().tolist() == [False, True, False]


@for_alphas
def test_huge_logits_do_not_overflow(alpha):
    """Finite float32 logits of any size give a posterior, not NaN."""
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e30, 1e30, -1e30], [-3e38, -3e38, -3e38]])
    expected = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    posterior = qmargin.softargmax(logits, alpha=alpha)
    torch.testing.assert_close(posterior, expected, rtol=0, atol=1e-6)


@for_alphas
def test_an_empty_batch_gives_an_empty_result(alpha):
    cosines, labels = torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64)
    for name, function in operators(alpha).items():
        leaf = cosines.clone().requires_grad_()
        value = function(leaf, labels)
        assert value.shape == ((0, 12) if name == "softargmax" else (0,))
        if name != "tau":
            value.sum().backward()
            assert leaf.grad.shape == (0, 12)
    assert all(part.shape == (0,) for part in make_loss(alpha).with_stats(cosines, labels))
    with pytest.raises(ShapeError, match="empty"):
        make_loss(alpha, reduction="mean")(cosines, labels)


@for_alphas
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_inputs_are_left_as_they_were(alpha, dtype):
    cosines, labels = spread_cosines()
    cosines, reference = cosines.to(dtype), -torch.rand(5, 12).to(dtype)
    copies = cosines.clone(), labels.clone(), reference.clone()
    options = {"alpha": alpha, "log_reference": reference}
    make_loss(alpha).with_stats(cosines, labels)
    qmargin.softargmax(cosines, **options)
    qmargin.fenchel_young_loss(cosines, labels, alpha=alpha)
    qmargin.fenchel_young_loss(cosines, labels, **options)
    qmargin.log_partition(cosines, **options)
    qmargin.solve_tau(cosines, **options)
    for now, before in zip((cosines, labels, reference), copies, strict=True):
        assert torch.equal(now, before)


@for_alphas
def test_ignored_rows_cost_nothing_and_pull_nothing(alpha):
    cosines, labels = spread_cosines()
    labels[IGNORED] = -100
    leaf = cosines.clone().requires_grad_()
    loss = make_loss(alpha)(leaf, labels)
    assert torch.equal(loss[IGNORED], torch.zeros(2))
    assert torch.equal(loss[KEPT], make_loss(alpha)(cosines[KEPT], labels[KEPT]))
    loss.sum().backward()
    assert bool((leaf.grad[IGNORED] == 0).all())
    mean, total = (make_loss(alpha, reduction=kind)(cosines, labels) for kind in ("mean", "sum"))
    torch.testing.assert_close(mean, loss[KEPT].mean().detach())
    torch.testing.assert_close(total, loss.sum().detach())


def parts(name: str) -> tuple[qmargin.Divergence, qmargin.Margin, list[nn.Parameter]]:
    alpha = nn.Parameter(torch.tensor(1.25))
    margin = nn.Parameter(torch.tensor(0.05))
    per_class = nn.Parameter(torch.full((12,), 0.05))
    return {
        "alpha": (qmargin.Alpha(alpha), qmargin.PriorMargin(0.05), [alpha]),
        "margin": (qmargin.Alpha(1.25), qmargin.PriorMargin(margin), [margin]),
        "angle": (qmargin.Alpha(1.0), qmargin.AngularMargin(margin), [margin]),
        "class": (qmargin.Alpha(1.5), qmargin.CosineMargin(qmargin.PerClass(per_class)), []),
        "jensen-shannon": (qmargin.JensenShannon(), qmargin.CosineMargin(margin), [margin]),
        "magface": (qmargin.Alpha(1.0), qmargin.MagFaceMargin(), []),
    }[name]


def gradients(name: str, rows: list[int] | None, bad: float, *, twice: bool) -> list[Tensor]:
    """Of the summed loss over some rows, or over all with the others ignored and spoilt."""
    cosines, labels = spread_cosines()
    norms = torch.linspace(20.0, 60.0, 5)
    if rows is None:
        cosines[IGNORED], norms[IGNORED], labels[IGNORED] = bad, bad, -100
    else:
        cosines, labels, norms = cosines[rows], labels[rows], norms[rows]
    divergence, margin, parameters = parts(name)
    leaves = [cosines.requires_grad_(), *parameters]
    if name == "magface":
        leaves.append(norms.requires_grad_())
    loss_fn = qmargin.MarginLoss(divergence, margin, scale=5.0, reduction="sum")
    found = torch.autograd.grad(loss_fn(cosines, labels, norms), leaves, create_graph=twice)
    if twice:
        weighted = sum((g * torch.linspace(1.0, 2.0, g.shape[-1] if g.dim() else 1)).sum()
                       for g in found)  # fmt: skip
        found = torch.autograd.grad(weighted, leaves, allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.3])
@pytest.mark.parametrize("name", ["alpha", "margin", "angle", "class", "jensen-shannon", "magface"])
def test_ignored_rows_leave_every_gradient_alone(name, bad):
    """First derivatives and, where the norms are not part of them, second ones."""
    for twice in (False, True)[: 1 + (name != "magface" and bad != -math.inf)]:
        full, kept = (gradients(name, rows, bad, twice=twice) for rows in (None, KEPT))
        close = {"rtol": 1e-4, "atol": 1e-5} if twice else {}
        assert bool((full[0][IGNORED] == 0).all())
        torch.testing.assert_close(full[0][KEPT], kept[0], **close)
        for all_rows, some in zip(full[1:], kept[1:], strict=True):
            chosen = all_rows[KEPT] if all_rows.shape == (5,) else all_rows
            torch.testing.assert_close(chosen, some, **close)
            assert bool(all_rows.isfinite().all())


def test_functions_take_ignore_index_and_debug():
    cosines, labels = spread_cosines()
    settings = {"divergence": qmargin.Alpha(1.25), "margin": qmargin.PriorMargin(0.1), "scale": 5.0}
    expected = qmargin.margin_loss(cosines, labels, **settings)
    labels[2], cosines[2] = -7, math.nan
    loss = qmargin.margin_loss(cosines, labels, ignore_index=-7, debug=True, **settings)
    assert float(loss[2]) == 0.0
    assert torch.equal(loss[OTHERS], expected[OTHERS])


def test_debug_refuses_what_cannot_be_a_cosine():
    labels = torch.tensor([0, 1])
    cosines = torch.tensor([[0.9, 0.1], [0.2, 32.0]])
    loss_fn = qmargin.q_margin(debug=True)
    with pytest.raises(DataError, match="32"):
        loss_fn(cosines, labels)
    loss_fn(torch.tensor([[1.0 + 1e-6, 0.1], [0.2, -1.0 - 1e-6]]), labels)
    loss_fn(cosines, torch.tensor([0, -100]))  # ignored rows may hold anything
    loss_fn(torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16) * 1.004, torch.tensor([0]))


def test_a_loss_of_ignored_rows_leaves_zeros():
    cosines = torch.randn(3, 10).clamp(-1, 1).requires_grad_()
    loss = qmargin.q_margin()(cosines, torch.full((3,), -100))
    loss.backward()
    assert loss.isnan() and (cosines.grad == 0).all()


def logits_and_target() -> tuple[Tensor, Tensor]:
    cosines, _ = spread_cosines()
    generator = torch.Generator().manual_seed(0)
    return 5 * cosines, torch.rand(5, 12, generator=generator).softmax(-1)


@for_divergences
@pytest.mark.parametrize("kind", ["negative", "heavy", "light", "infinite", "zero"])
def test_an_impossible_distribution_is_refused(divergence, kind):
    logits, target = logits_and_target()
    if kind == "negative":
        target[3, :2] += torch.tensor([-1.0, 1.0])
    else:
        target[3] *= {"heavy": 1.01, "light": 0.99, "infinite": math.inf, "zero": 0.0}[kind]
    for debug in (True, False):
        with pytest.raises(DataError, match="row 3"):
            qmargin.fenchel_young_loss(logits, target, divergence=divergence, debug=debug)


@for_divergences
def test_a_nan_in_a_distribution_breaks_its_row_alone(divergence):
    logits, target = logits_and_target()
    expected = qmargin.fenchel_young_loss(logits, target, divergence=divergence)
    target[2, 2] = math.nan
    loss = qmargin.fenchel_young_loss(logits, target, divergence=divergence)
    assert bool(loss[2].isnan())
    assert torch.equal(loss[OTHERS], expected[OTHERS])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_distribution_in_half_precision_may_be_rounded(dtype):
    target = torch.full((1, 1000), 1e-3).to(dtype)
    assert bool(qmargin.fenchel_young_loss(torch.zeros(1, 1000), target, alpha=1.5).isfinite())


def test_distributions_are_checked_under_vmap():
    logits, target = logits_and_target()

    def loss(x, y):
        return qmargin.fenchel_young_loss(x, y, alpha=1.25)

    expected = loss(logits, target)
    torch.testing.assert_close(vmap(loss)(logits, target), expected)
    torch.testing.assert_close(vmap(loss, in_dims=(0, 1))(logits, target.T), expected)
    with pytest.raises(DataError):
        vmap(loss)(logits, 2 * target)


@pytest.mark.parametrize("alpha", [0.7, 3.0])
def test_a_row_whose_search_finds_no_root_is_nan(alpha, monkeypatch):
    """A solver that is cut short leaves masses far from one; a loss of them would be wrong."""
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0)).double()
    logits *= torch.logspace(-2, 3, 8)[:, None]  # the last rows are solved from the start
    labels, options = torch.arange(8), {"alpha": alpha}
    exact = qmargin.fenchel_young_loss(logits, labels, **options)
    monkeypatch.setattr(solver, "MAX_STEPS", 1)
    monkeypatch.setattr(solver, "MAX_HALVINGS", 1)
    given = logits.clone().requires_grad_()
    found = qmargin.fenchel_young_loss(given, labels, **options)
    found.sum().backward()
    kept = ~found.isnan()
    assert bool(exact.isfinite().all()) and bool((~kept).any())
    torch.testing.assert_close(found[kept], exact[kept], rtol=2e-2, atol=1e-2)
    assert torch.equal(given.grad.isfinite().all(1), kept)
