"""Settings, shapes and labels that are wrong: refused with an error that names the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

import qmargin
from helpers.cases import spread_cosines
from helpers.operators import make_loss, operators
from qmargin.errors import ConfigError, DataError, QMarginError, ShapeError

COSINES, LABELS = spread_cosines()
NORMS = torch.full((5,), 20.0)
SOFT = COSINES.softmax(-1)
PARTS = {"divergence": qmargin.Alpha(1.25), "margin": qmargin.PriorMargin(0.1), "scale": 5.0}
softargmax, log_partition, fy_loss, solve_tau, magface = (
    partial(qmargin.softargmax, COSINES),
    partial(qmargin.log_partition, COSINES),
    partial(qmargin.fenchel_young_loss, COSINES),
    partial(qmargin.solve_tau, COSINES),
    partial(qmargin.magface(reduction="none"), COSINES),
)
OPERATORS = (softargmax, log_partition, partial(fy_loss, LABELS), solve_tau)


def assert_refused(call: Callable[[], object], error: type[QMarginError], *named: object) -> None:
    """One line without a full stop that names the value, and what to do."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert not message.endswith(".") and "\n" not in message
    for part in named:
        assert str(part) in message, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize("label", [12, -1, 2**40])
def test_a_label_out_of_range_is_named(label):
    labels = LABELS.clone()
    labels[3] = label
    for call in (
        lambda: make_loss(debug=True)(COSINES, labels),
        lambda: make_loss()(COSINES, labels),
        lambda: qmargin.margin_loss(COSINES, labels, **PARTS),
        lambda: fy_loss(labels, alpha=1.25),
        lambda: fy_loss(labels, divergence=qmargin.JensenShannon()),
    ):
        assert_refused(call, DataError, label, "row 3", 11)


def test_labels_of_a_wrong_kind_are_refused():
    for dtype in (torch.bool, torch.complex64, torch.float32):
        assert_refused(partial(make_loss(), COSINES, LABELS.to(dtype)), ShapeError, dtype)
    for shape in ((4,), (5, 1), ()):
        labels = torch.zeros(shape, dtype=torch.int64)
        for call in (partial(make_loss(), COSINES, labels), partial(fy_loss, labels, alpha=1.25)):
            assert_refused(call, ShapeError, shape, (5, 12))
    for dtype in (torch.int32, torch.int8, torch.uint8):  # small integers will do
        assert torch.equal(make_loss()(COSINES, LABELS.to(dtype)), make_loss()(COSINES, LABELS))


def test_logits_of_a_wrong_kind_are_refused():
    for logits, named in (
        (COSINES.long(), "int64"),
        (COSINES.bool(), "bool"),
        (COSINES.to(torch.complex64), "complex64"),
        (COSINES.tolist(), "list"),
        (COSINES.numpy(), "ndarray"),
        (torch.zeros(()), "()"),
        (torch.zeros(5, 0), "(5, 0)"),
    ):
        for function in operators(1.25).values():
            assert_refused(partial(function, logits, LABELS), ShapeError, named)


def test_a_reference_that_does_not_fit_is_refused():
    for function in OPERATORS:
        for shape in ((11,), (4, 1), (2, 5, 12), (12, 5)):
            call = partial(function, alpha=1.25, log_reference=torch.zeros(shape))
            assert_refused(call, ShapeError, list(shape), (5, 12))
    for reference in ("a", [0.0, "b"], {}):
        call = partial(softargmax, alpha=1.25, log_reference=reference)
        assert_refused(call, ShapeError, "log_reference", (5, 12))


@pytest.mark.parametrize("alpha", [0.0, -0.5, math.nan, math.inf, -math.inf, 16.01, 1e40])
def test_alpha_outside_its_domain_is_refused(alpha):
    for function in (*OPERATORS, make_loss):
        assert_refused(partial(function, alpha=alpha), ConfigError, "alpha", f"{alpha:g}")
    learnable = torch.tensor(alpha, dtype=torch.float64)
    assert_refused(partial(softargmax, alpha=learnable), ConfigError, "alpha", f"{alpha:g}")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scale_outside_its_domain_is_refused(scale):
    loss = partial(qmargin.margin_loss, COSINES, LABELS, **{**PARTS, "scale": scale})
    for call in (loss, *(partial(f, scale=scale) for f in (make_loss, qmargin.cosface))):
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
    ("name", "values"),
    [
        ("divergence", (1.25, qmargin.JensenShannon, None)),
        ("margin", (0.2, qmargin.PriorMargin, None)),
        ("ignore_index", (None, -1.0, 3)),
        ("scale", ("32",)),
    ],
)
def test_settings_of_a_wrong_type_are_refused(name, values):
    for function in (qmargin.MarginLoss, partial(qmargin.margin_loss, COSINES, LABELS)):
        for value in values:
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
        assert_refused(partial(loss_fn, COSINES, LABELS), ShapeError, length, 12)


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        *(
            (partial(softargmax, alpha=alpha), QMarginError, ["alpha"])
            for alpha in ("1.25", None, [1.25], torch.ones(2), torch.tensor(1), torch.tensor(True))
        ),
        (partial(fy_loss, SOFT[:, :11], alpha=1.25), ShapeError, [(5, 11), (5, 12)]),
        (partial(fy_loss, SOFT[0], alpha=1.25), ShapeError, [(12,), (5, 12)]),
        (partial(fy_loss, LABELS.to("meta"), alpha=1.25), ShapeError, ["meta", "cpu"]),
        (partial(fy_loss, SOFT.to("meta"), alpha=1.25), ShapeError, ["meta", "cpu"]),
        (partial(fy_loss, LABELS.tolist(), alpha=1.25), ShapeError, ["list"]),
        (partial(fy_loss, SOFT.clone().requires_grad_(), alpha=1.25), ConfigError, ["target"]),
        (partial(magface, LABELS), ConfigError, ["norms"]),
        (partial(magface, LABELS, torch.ones(4)), ShapeError, ["norms", [4]]),
        (partial(magface, LABELS, NORMS.tolist()), ShapeError, ["norms"]),
        (partial(magface, LABELS, NORMS.long()), ShapeError, ["norms", "int64"]),
        (partial(magface, LABELS, NORMS.to("meta")), ShapeError, ["norms", "meta"]),
        (partial(magface, LABELS.tolist(), NORMS), ShapeError, ["labels", "list"]),
        (partial(softargmax, alpha=1.25, divergence=qmargin.Alpha(2.0)), ConfigError, ["alpha"]),
        (partial(fy_loss, LABELS), ConfigError, ["alpha", "divergence"]),
        (partial(log_partition, divergence=1.25), ConfigError, ["1.25"]),
        (partial(solve_tau, alpha=1.25, solver="secant"), ConfigError, ["secant"]),
        (partial(solve_tau, alpha=1.25, bracket="wide"), ConfigError, ["wide"]),
        (partial(solve_tau, alpha=3.0, solver="newton"), ConfigError, ["newton"]),
        (partial(make_loss, reduction="average"), ConfigError, ["average"]),
        (partial(make_loss, label_smoothing=0.1), ConfigError, ["label_smoothing", "0.1"]),
        (partial(make_loss, weight=torch.ones(12)), ConfigError, ["weight"]),
    ],
)
def test_calls_that_cannot_be(call, error, named):
    assert_refused(call, error, *named)
