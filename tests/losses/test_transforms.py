"""Compilers, functional transforms, layouts and shapes."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import qmargin
from helpers.cases import cosine_batch
from helpers.operators import make_loss

ALPHAS = (0.5, 1.0, 1.25, 3.0)
for_alphas = pytest.mark.parametrize("alpha", ALPHAS)
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    ),
]


def logits_and_labels(
    rows: int = 4, num_classes: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, num_classes, generator=generator, dtype=dtype)
    return logits, torch.randint(num_classes, (rows,), generator=generator)


OPERATORS = {
    "softargmax": lambda x, y, a: qmargin.softargmax(x, alpha=a, log_reference=-0.5),
    "log_partition": lambda x, y, a: qmargin.log_partition(x, alpha=a, log_reference=-0.5),
    "loss": lambda x, y, a: qmargin.fenchel_young_loss(x, y, alpha=a, log_reference=-0.5),
    "tau": lambda x, y, a: qmargin.solve_tau(x, alpha=a, log_reference=-0.5).tau,
}
for_operators = pytest.mark.parametrize("operator", OPERATORS)


LOSSES = {
    f"loss at alpha {alpha}": lambda x, y, _, alpha=alpha: qmargin.MarginLoss(
        qmargin.Alpha(alpha), qmargin.PriorMargin(0.1), scale=8.0
    )(torch.tanh(x), y)
    for alpha in (1.0, 1.25, 2.0)
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecation warnings are not ours
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", [*OPERATORS, *LOSSES])
def test_operators_and_losses_compile_into_one_graph(backend, operator):
    torch._dynamo.reset()
    logits, labels = logits_and_labels(dtype=torch.float32)
    function = {**OPERATORS, **LOSSES}[operator]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    results = []
    for call in (function, compiled):
        leaf = logits.clone().requires_grad_(operator != "tau")
        value = call(leaf, labels, 1.5)
        if operator != "tau":
            value.square().sum().backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
def test_losses_compile_one_after_the_other(dynamic):
    """From the second loss on, settings are symbolic numbers: no reset in between."""
    torch._dynamo.reset()
    cosines, labels = cosine_batch(5, 30, seed=3)
    for loss_fn in (
        qmargin.q_margin(reduction="none"),
        qmargin.cosface(reduction="none"),
        qmargin.q_margin(alpha=1.5, scale=10.0, reduction="none"),
        qmargin.arcface(reduction="none"),
        qmargin.arcface(scale=10.0, margin=0.1, reduction="none"),
    ):
        compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        torch.testing.assert_close(compiled(cosines, labels), loss_fn(cosines, labels))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", [qmargin.PriorMargin, qmargin.CosineMargin, qmargin.AngularMargin])
def test_settings_may_vary_inside_a_compiled_function(dynamic, kind):
    torch._dynamo.reset()
    cosines, labels = cosine_batch(5, 30, seed=3)

    def loss(alpha, margin, scale):
        return qmargin.margin_loss(
            cosines, labels, divergence=qmargin.Alpha(alpha), margin=kind(margin), scale=scale
        )

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for settings in ((1.25, 0.1, 8.0), (1.5, 0.2, 9.0), (1.75, 0.3, 10.0), (1.0, 0.3, 10.0)):
        torch.testing.assert_close(compiled(*settings), loss(*settings))


@for_operators
@for_alphas
def test_vmap_over_rows_batches_and_another_dim(operator, alpha):
    logits, labels = logits_and_labels(rows=6)
    stacked, stacked_labels = logits.reshape(2, 3, -1), labels.reshape(2, 3)
    expected = OPERATORS[operator](stacked, stacked_labels, alpha)

    def function(x, y):
        return OPERATORS[operator](x, y, alpha)

    for mapped in (
        vmap(function)(stacked, stacked_labels),
        vmap(function, in_dims=(1, 1), out_dims=1)(stacked, stacked_labels),
        vmap(vmap(function))(stacked, stacked_labels),
    ):
        torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-13)


def test_vmap_over_alpha():
    logits, labels = logits_and_labels()
    alphas = torch.tensor([0.7, 1.0, 1.5], dtype=torch.float64)
    for name in ("softargmax", "log_partition", "loss"):
        function = OPERATORS[name]
        mapped = vmap(lambda a, f=function: f(logits, labels, a))(alphas)
        expected = torch.stack([function(logits, labels, float(a)) for a in alphas])
        torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-13)


@for_alphas
def test_jacrev_and_hessian(alpha):
    row = logits_and_labels(num_classes=6)[0][0] * 0.2

    def partition(x):
        return qmargin.log_partition(x, alpha=alpha)

    jacobian = jacrev(lambda x: qmargin.softargmax(x, alpha=alpha))(row)
    close = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(jacobian, jacobian.T, **close)
    torch.testing.assert_close(jacobian.sum(0), torch.zeros(6, dtype=torch.float64), **close)
    torch.testing.assert_close(jacrev(jacrev(partition))(row), jacobian, **close)
    torch.testing.assert_close(torch.autograd.functional.hessian(partition, row), jacobian, **close)


@pytest.mark.parametrize("preset", ["q_margin", "cosface", "sparsemax_face"])
def test_per_sample_gradients_of_a_model(preset):
    """``vmap(grad)`` over samples equals one backward per sample."""
    torch.manual_seed(0)
    model = nn.Linear(8, 12, bias=False, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    features = torch.randn(5, 8, dtype=torch.float64)
    labels = torch.tensor([0, 3, 11, 5, 3])
    loss_fn = getattr(qmargin, preset)(reduction="none")

    def loss(weights: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
        cosines = torch.tanh(functional_call(model, weights, (feature,)))
        return loss_fn(cosines[None], label[None]).sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features, labels)["weight"]
    for sample in range(5):
        expected = grad(loss)(parameters, features[sample], labels[sample])["weight"]
        torch.testing.assert_close(per_sample[sample], expected, rtol=1e-9, atol=1e-9)


@for_operators
@for_alphas
def test_layout_does_not_matter(operator, alpha):
    """Transposed, strided, offset and expanded inputs give what their copies give."""
    logits, labels = logits_and_labels(rows=4, num_classes=9)
    function = OPERATORS[operator]
    expected = function(logits, labels, alpha)
    wide = torch.full((8, 20), 7.0, dtype=torch.float64)
    wide[1::2, 1:19:2] = logits
    for view in (logits.T.contiguous().T, wide[1::2, 1:19:2]):
        assert not view.is_contiguous()
        assert torch.equal(function(view, labels, alpha), expected)
    strided_labels = torch.stack([labels, labels], dim=1)[:, 0]
    assert torch.equal(function(logits, strided_labels, alpha), expected)
    expanded = logits[:1].expand(4, 9)
    copied = function(expanded.contiguous(), labels, alpha)
    assert torch.equal(function(expanded, labels, alpha), copied)


@for_operators
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3), (0,), (3, 0)], ids=str)
def test_any_leading_shape(operator, shape):
    """Classes on the last dim; everything before it is kept, empty batches included."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, shape, generator=generator)
    value = OPERATORS[operator](logits, labels, 1.25)
    expected = OPERATORS[operator](logits.reshape(-1, 7), labels.reshape(-1), 1.25)
    assert value.shape == (logits.shape if operator == "softargmax" else shape)
    torch.testing.assert_close(value.reshape(expected.shape), expected, rtol=0, atol=0)


@for_alphas
def test_rows_do_not_depend_on_their_neighbours(alpha):
    """A row gives the same bits alone, in a batch, and in another order."""
    cosines, labels = cosine_batch(7, 300, seed=2)
    loss_fn = make_loss(alpha)
    together = loss_fn(cosines, labels)
    alone = torch.cat([loss_fn(cosines[i : i + 1], labels[i : i + 1]) for i in range(7)])
    assert torch.equal(together, alone)
    assert torch.equal(together, loss_fn(cosines.flip(0), labels.flip(0)).flip(0))
