"""Settings, shapes and labels that are wrong: refused with an error that names the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import qmargin
from helpers.cases import spread_cosines
from helpers.operators import make_loss, operators
from qmargin.errors import ConfigError, DataError, QMarginError, ShapeError

COSINES, LABELS = spread_cosines()
NORMS = torch.full((5,), 20.0)
PARTS = {"divergence": qmargin.Alpha(1.25), "margin": qmargin.PriorMargin(0.1), "scale": 5.0}
fy_loss = partial(qmargin.fenchel_young_loss, alpha=1.25)
OF_REFERENCE = (
    lambda q: qmargin.softargmax(COSINES, alpha=1.25, log_reference=q),
    lambda q: qmargin.log_partition(COSINES, alpha=1.25, log_reference=q),
    lambda q: fy_loss(COSINES, LABELS, log_reference=q),
    lambda q: qmargin.solve_tau(COSINES, alpha=1.25, log_reference=q),
)
OF_ALPHA = (
    lambda a: qmargin.softargmax(COSINES, alpha=a),
    lambda a: qmargin.log_partition(COSINES, alpha=a),
    lambda a: qmargin.fenchel_young_loss(COSINES, LABELS, alpha=a),
    lambda a: qmargin.solve_tau(COSINES, alpha=a),
    make_loss,
)


def assert_refused(call: Callable[[], object], error: type[QMarginError], *named: str) -> None:
    """One line without a full stop that names the value, and what to do."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert not message.endswith(".") and "\n" not in message
    for part in named:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize("label", [12, -1, 2**40])
def test_a_label_out_of_range_is_named(label):
    labels = LABELS.clone()
    labels[3] = label
    for call in (
        lambda: make_loss(debug=True)(COSINES, labels),
        lambda: make_loss()(COSINES, labels),
        lambda: qmargin.margin_loss(COSINES, labels, **PARTS),
        lambda: qmargin.margin_loss_with_stats(COSINES, labels, **PARTS),
        lambda: fy_loss(COSINES, labels),
        lambda: qmargin.fenchel_young_loss(COSINES, labels, divergence=qmargin.JensenShannon()),
    ):
        assert_refused(call, DataError, str(label), "row 3", "11")


def test_labels_of_a_wrong_kind_are_refused():
    for dtype in (torch.bool, torch.complex64, torch.float32):
        assert_refused(lambda d=dtype: make_loss()(COSINES, LABELS.to(d)), ShapeError, str(dtype))
    for shape in ((4,), (5, 1), ()):
        labels = torch.zeros(shape, dtype=torch.int64)
        for function in (make_loss(), fy_loss):
            call = partial(function, COSINES, labels)
            assert_refused(call, ShapeError, str(tuple(shape)), "(5, 12)")
    for dtype in (torch.int32, torch.int8, torch.uint8):  # small integers will do
        assert torch.equal(make_loss()(COSINES, LABELS.to(dtype)), make_loss()(COSINES, LABELS))


@pytest.mark.parametrize(
    ("logits", "named"),
    [
        (COSINES.long(), "int64"),
        (COSINES.bool(), "bool"),
        (COSINES.to(torch.complex64), "complex64"),
        (COSINES.tolist(), "list"),
        (torch.zeros(()), "()"),
        (torch.zeros(5, 0), "(5, 0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_of_a_wrong_kind_are_refused(logits, named):
    labels = LABELS if named != "()" else LABELS[0]
    for function in operators(1.25).values():
        assert_refused(partial(function, logits, labels), ShapeError, named)


@pytest.mark.parametrize("shape", [(11,), (4, 1), (2, 5, 12), (12, 5)], ids=str)
def test_a_reference_that_does_not_broadcast_is_refused(shape):
    for function in OF_REFERENCE:
        assert_refused(partial(function, torch.zeros(shape)), ShapeError, str(list(shape)))
    for reference in ("a", [0.0, "b"], {}):
        assert_refused(partial(OF_REFERENCE[0], reference), ShapeError, "log_reference", "(5, 12)")


@pytest.mark.parametrize("alpha", [0.0, -0.5, math.nan, math.inf, -math.inf, 16.01, 1e40])
def test_alpha_outside_its_domain_is_refused(alpha):
    for function in OF_ALPHA:
        assert_refused(partial(function, alpha), ConfigError, "alpha", f"{alpha:g}")
    if alpha > 0.0 and math.isfinite(alpha):
        learnable = torch.tensor(alpha, dtype=torch.float64)
        assert_refused(partial(OF_ALPHA[0], learnable), ConfigError, "alpha", f"{alpha:g}")


@pytest.mark.parametrize(
    "alpha", ["1.25", None, [1.25], torch.ones(2), torch.tensor(1), torch.tensor(True)], ids=str
)
def test_alpha_of_a_wrong_type_is_refused(alpha):
    assert_refused(partial(OF_ALPHA[0], alpha), QMarginError, "alpha")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scale_outside_its_domain_is_refused(scale):
    parts = {**PARTS, "scale": scale}
    for call in (
        lambda: make_loss(scale=scale),
        lambda: qmargin.margin_loss(COSINES, LABELS, **parts),
        lambda: qmargin.q_margin(scale=scale),
        lambda: qmargin.cosface(scale=scale),
    ):
        assert_refused(call, ConfigError, "scale", f"{scale:g}")


def test_numbers_of_numpy_are_numbers_and_bools_are_not():
    expected = make_loss(1.25, scale=32.0)(COSINES, LABELS)
    for scale in (np.float32(32), np.float64(32), np.int64(32), 32):
        loss_fn = make_loss(np.float32(1.25), scale=scale)
        assert torch.equal(loss_fn(COSINES, LABELS), expected)
        assert type(loss_fn.scale) is float
    for call in (
        lambda: make_loss(scale=True),
        lambda: qmargin.Alpha(True),
        lambda: qmargin.PriorMargin.from_effective(0.1, alpha=True, scale=5.0),
    ):
        assert_refused(call, ConfigError, "True")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("divergence", 1.25),
        ("divergence", qmargin.JensenShannon),
        ("divergence", None),
        ("margin", 0.2),
        ("margin", qmargin.PriorMargin),
        ("margin", None),
        ("ignore_index", None),
        ("ignore_index", -1.0),
        ("ignore_index", 3),
        ("scale", "32"),
    ],
)
def test_settings_of_a_wrong_type_are_refused(name, value):
    for function in (qmargin.MarginLoss, partial(qmargin.margin_loss, COSINES, LABELS)):
        call = partial(function, **{**PARTS, name: value})
        assert_refused(call, ConfigError, name, repr(value))


@pytest.mark.parametrize("length", [5, 13])
def test_a_value_per_class_for_another_number_of_classes_is_refused(length):
    per_class = qmargin.PerClass(torch.zeros(length))
    prior = qmargin.PriorMargin(per_class)
    for margin in (
        prior,
        qmargin.CombinedMargin(cosine=per_class),
        qmargin.PriorMargin(0.1) + qmargin.CosineMargin(per_class),
        prior + qmargin.ElasticMargin(),
    ):
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=5.0)
        assert_refused(partial(loss_fn, COSINES, LABELS), ShapeError, str(length), "12")


magface = qmargin.magface(reduction="none")


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: fy_loss(COSINES, torch.zeros(5, 11)), ShapeError, ["(5, 11)", "(5, 12)"]),
        (lambda: fy_loss(COSINES, torch.zeros(12)), ShapeError, ["(12,)", "(5, 12)"]),
        (lambda: fy_loss(COSINES, _on_meta(LABELS)), ShapeError, ["meta", "cpu"]),
        (lambda: fy_loss(COSINES, _on_meta(COSINES.softmax(-1))), ShapeError, ["meta", "cpu"]),
        (lambda: fy_loss(COSINES, LABELS.tolist()), ShapeError, ["list"]),
        (lambda: fy_loss(COSINES.numpy(), LABELS), ShapeError, ["ndarray"]),
        (lambda: fy_loss(COSINES, COSINES.softmax(-1).requires_grad_()), ConfigError, ["target"]),
        (lambda: magface(COSINES, LABELS), QMarginError, ["norms"]),
        (lambda: magface(COSINES, LABELS, torch.ones(4)), ShapeError, ["norms", "[4]"]),
        (lambda: magface(COSINES, LABELS, NORMS.tolist()), ShapeError, ["norms"]),
        (lambda: magface(COSINES, LABELS, NORMS.long()), ShapeError, ["norms", "int64"]),
        (lambda: magface(COSINES, LABELS, _on_meta(NORMS)), ShapeError, ["norms", "meta"]),
        (lambda: magface(COSINES, LABELS.tolist(), NORMS), ShapeError, ["labels", "list"]),
        (
            lambda: qmargin.softargmax(COSINES, alpha=1.25, divergence=qmargin.Alpha(1.25)),
            ConfigError,
            ["alpha", "divergence"],
        ),
        (
            lambda: qmargin.fenchel_young_loss(COSINES, LABELS),
            ConfigError,
            ["alpha", "divergence"],
        ),
        (lambda: qmargin.log_partition(COSINES, divergence=1.25), ConfigError, ["1.25"]),
        (lambda: qmargin.solve_tau(COSINES, alpha=1.25, solver="secant"), ConfigError, ["secant"]),
        (
            lambda: qmargin.solve_tau(COSINES, alpha=1.25, solver="bisection", bracket="wide"),
            ConfigError,
            ["wide"],
        ),
        (lambda: qmargin.solve_tau(COSINES, alpha=3.0, solver="newton"), ConfigError, ["newton"]),
        (lambda: make_loss(reduction="average"), ConfigError, ["average"]),
        (lambda: make_loss(label_smoothing=0.1), ConfigError, ["label_smoothing", "0.1"]),
        (lambda: make_loss(weight=torch.ones(12)), ConfigError, ["weight"]),
    ],
)
def test_calls_that_cannot_be(call, error, named):
    assert_refused(call, error, *named)
