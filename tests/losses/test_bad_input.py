"""Settings, shapes and labels that are wrong: refused in one sentence with the remedy."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import qmargin
from helpers.cases import spread_cosines
from helpers.operators import make_loss, operators
from qmargin import errors


def assert_message(error: pytest.ExceptionInfo, *parts: str) -> None:
    """One sentence without a full stop that names the value, the limit and the remedy."""
    message = str(error.value)
    assert isinstance(error.value, qmargin.QMarginError)
    assert not message.endswith(".")
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize("label", [12, 13, -1, -7, 2**40])
@pytest.mark.parametrize("debug", [True, False])
def test_a_label_out_of_range_is_named(label: int, debug: bool) -> None:
    cosines, labels = spread_cosines()
    labels[3] = label
    with pytest.raises(errors.DataError) as error:
        make_loss(debug=debug)(cosines, labels)
    assert_message(error, str(label), "11")
    with pytest.raises(errors.DataError) as error:
        qmargin.fenchel_young_loss(cosines, labels, alpha=1.25)
    assert_message(error, str(label), "11")


def test_a_label_out_of_range_is_found_by_every_function() -> None:
    cosines, labels = spread_cosines()
    labels[0] = 99
    for function in (qmargin.margin_loss, qmargin.margin_loss_with_stats):
        with pytest.raises(errors.DataError):
            function(
                cosines,
                labels,
                divergence=qmargin.Alpha(1.25),
                margin=qmargin.PriorMargin(0.1),
                scale=5.0,
            )
    for divergence in (qmargin.Alpha(1.0), qmargin.JensenShannon()):
        with pytest.raises(errors.DataError):
            qmargin.fenchel_young_loss(cosines, labels, divergence=divergence)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_labels_of_a_wrong_dtype_are_refused(dtype: torch.dtype) -> None:
    cosines, labels = spread_cosines()
    with pytest.raises(errors.ShapeError) as error:
        make_loss()(cosines, labels.to(dtype))
    assert_message(error, str(dtype))


def test_floating_labels_are_refused_by_a_margin_loss() -> None:
    """A margin needs one target per row, so a float there is a mistake."""
    cosines, labels = spread_cosines()
    with pytest.raises(errors.ShapeError) as error:
        make_loss()(cosines, labels.float())
    assert_message(error, "float32", "int64")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_small_integer_labels_work(dtype: torch.dtype) -> None:
    cosines, labels = spread_cosines()
    assert torch.equal(make_loss()(cosines, labels.to(dtype)), make_loss()(cosines, labels))


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1), (1, 5), ()], ids=str)
def test_labels_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    cosines, _ = spread_cosines()
    labels = torch.zeros(shape, dtype=torch.int64)
    for function in (make_loss(), lambda x, y: qmargin.fenchel_young_loss(x, y, alpha=1.25)):
        with pytest.raises(errors.ShapeError) as error:
            function(cosines, labels)
        assert_message(error, str(tuple(shape)), "(5, 12)")


# ---------------------------------------------------------------- logits, references, targets


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_logits_of_a_wrong_dtype_are_refused(dtype: torch.dtype) -> None:
    cosines, labels = spread_cosines()
    for name, function in operators(1.25).items():
        with pytest.raises(errors.ShapeError) as error:
            function(cosines.to(dtype), labels)
        assert_message(error, str(dtype)), name


def test_logits_that_are_no_tensor_are_refused() -> None:
    _, labels = spread_cosines()
    for function in operators(1.25).values():
        with pytest.raises(errors.ShapeError) as error:
            function([[0.1, 0.2]], labels[:1])
        assert_message(error, "list")


@pytest.mark.parametrize("shape", [(), (5, 0)], ids=str)
def test_logits_without_classes_are_refused(shape: tuple[int, ...]) -> None:
    labels = torch.zeros(shape[:-1], dtype=torch.int64)
    for function in operators(1.25).values():
        with pytest.raises(errors.ShapeError) as error:
            function(torch.zeros(shape), labels)
        assert_message(error, str(shape))


@pytest.mark.parametrize("shape", [(11,), (4, 1), (4, 12), (2, 5, 12), (12, 5)], ids=str)
def test_a_reference_that_does_not_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    cosines, labels = spread_cosines()
    reference = torch.zeros(shape)
    for function in (
        lambda q: qmargin.softargmax(cosines, alpha=1.25, log_reference=q),
        lambda q: qmargin.log_partition(cosines, alpha=1.25, log_reference=q),
        lambda q: qmargin.fenchel_young_loss(cosines, labels, alpha=1.25, log_reference=q),
        lambda q: qmargin.solve_tau(cosines, alpha=1.25, log_reference=q),
    ):
        with pytest.raises(errors.ShapeError) as error:
            function(reference)
        assert_message(error, str(shape), "(5, 12)")


@pytest.mark.parametrize("shape", [(5,), (5, 11), (12,)], ids=str)
def test_a_target_distribution_of_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    cosines, _ = spread_cosines()
    with pytest.raises(errors.ShapeError) as error:
        qmargin.fenchel_young_loss(cosines, torch.zeros(shape), alpha=1.25)
    assert_message(error, str(shape), "(5, 12)")


def test_norms_of_a_wrong_shape_are_refused() -> None:
    cosines, labels = spread_cosines()
    loss_fn = qmargin.MarginLoss(
        qmargin.Alpha(1.0), qmargin.MagFaceMargin(), scale=5.0, reduction="none"
    )
    with pytest.raises(errors.QMarginError):
        loss_fn(cosines, labels, torch.ones(4))
    with pytest.raises(errors.QMarginError):
        loss_fn(cosines, labels)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("alpha", [0.0, -0.5, -1.0, math.nan, math.inf, -math.inf])
def test_alpha_outside_its_domain_is_refused(alpha: float) -> None:
    cosines, labels = spread_cosines()
    for function in operators(1.25):
        calls = {
            "softargmax": lambda: qmargin.softargmax(cosines, alpha=alpha),
            "log_partition": lambda: qmargin.log_partition(cosines, alpha=alpha),
            "loss": lambda: qmargin.fenchel_young_loss(cosines, labels, alpha=alpha),
            "tau": lambda: qmargin.solve_tau(cosines, alpha=alpha),
            "module": lambda: make_loss(alpha),
        }
        with pytest.raises(errors.ConfigError) as error:
            calls[function]()
        assert_message(error, "alpha", f"{alpha:g}")


@pytest.mark.parametrize("alpha", ["1.25", None, [1.25]])
def test_alpha_of_a_wrong_type_is_refused(alpha: object) -> None:
    cosines, _ = spread_cosines()
    with pytest.raises(errors.QMarginError):
        qmargin.softargmax(cosines, alpha=alpha)


@pytest.mark.parametrize(
    "alpha", [torch.ones(2), torch.ones(1, 3), torch.tensor(1), torch.tensor(True)], ids=str
)
def test_an_alpha_tensor_has_one_floating_element(alpha: Tensor) -> None:
    cosines, _ = spread_cosines()
    with pytest.raises(errors.QMarginError):
        qmargin.softargmax(cosines, alpha=alpha)


def test_alpha_and_divergence_exclude_each_other() -> None:
    cosines, labels = spread_cosines()
    for function in (qmargin.softargmax, qmargin.log_partition):
        with pytest.raises(errors.ConfigError):
            function(cosines, alpha=1.25, divergence=qmargin.Alpha(1.25))
    with pytest.raises(errors.ConfigError):
        qmargin.fenchel_young_loss(cosines, labels)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_scale_outside_its_domain_is_refused(scale: float) -> None:
    cosines, labels = spread_cosines()
    with pytest.raises(errors.ConfigError) as error:
        make_loss(scale=scale)
    assert_message(error, "scale", f"{scale:g}")
    with pytest.raises(errors.ConfigError):
        qmargin.margin_loss(
            cosines,
            labels,
            divergence=qmargin.Alpha(1.25),
            margin=qmargin.PriorMargin(0.1),
            scale=scale,
        )
    for preset in (qmargin.q_margin, qmargin.cosface, qmargin.arcface, qmargin.sparsemax_face):
        with pytest.raises(errors.ConfigError):
            preset(scale=scale)


@pytest.mark.parametrize("margin", [math.nan, math.inf, -math.inf])
def test_non_finite_margins_are_refused(margin: float) -> None:
    for kind in (qmargin.PriorMargin, qmargin.CosineMargin, qmargin.AngularMargin):
        with pytest.raises(errors.ConfigError) as error:
            kind(margin)
        assert_message(error, f"{margin:g}")


def test_numbers_of_numpy_are_numbers_and_bools_are_not() -> None:
    cosines, labels = spread_cosines()
    expected = make_loss(1.25, scale=32.0)(cosines, labels)
    for scale in (np.float32(32), np.float64(32), np.int64(32), 32):
        loss_fn = make_loss(np.float32(1.25), scale=scale)
        assert torch.equal(loss_fn(cosines, labels), expected)
        assert type(loss_fn.scale) is float
        assert qmargin.PriorMargin(0.1).effective(np.float32(1.25), scale) == pytest.approx(
            qmargin.PriorMargin(0.1).effective(1.25, 32.0)
        )
    for call in (
        lambda: make_loss(scale=True),
        lambda: qmargin.Alpha(True),
        lambda: qmargin.PriorMargin.from_effective(0.1, alpha=True, scale=5.0),
    ):
        with pytest.raises(errors.ConfigError) as error:
            call()
        assert_message(error, "True")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("divergence", 1.25, "Alpha(1.25)"),
        ("divergence", qmargin.JensenShannon, "Alpha(1.25)"),
        ("divergence", None, "Alpha(1.25)"),
        ("margin", 0.2, "PriorMargin(0.2)"),
        ("margin", qmargin.PriorMargin, "PriorMargin(0.2)"),
        ("margin", None, "PriorMargin(0.2)"),
        ("ignore_index", None, "-100"),
        ("ignore_index", -1.0, "-100"),
        ("ignore_index", 3, "-100"),
        ("scale", "32", "number"),
    ],
)
def test_settings_of_a_wrong_type_are_refused(name: str, value: object, remedy: str) -> None:
    cosines, labels = spread_cosines()
    settings = {
        "divergence": qmargin.Alpha(1.25),
        "margin": qmargin.PriorMargin(0.1),
        "scale": 5.0,
        name: value,
    }
    for function in (qmargin.MarginLoss, partial(qmargin.margin_loss, cosines, labels)):
        with pytest.raises(errors.ConfigError) as error:
            function(**settings)
        assert_message(error, name, repr(value), remedy)


def test_a_number_is_no_divergence_for_an_operator() -> None:
    cosines, labels = spread_cosines()
    for call in (
        lambda: qmargin.softargmax(cosines, divergence=1.25),
        lambda: qmargin.log_partition(cosines, divergence=1.25),
        lambda: qmargin.fenchel_young_loss(cosines, labels, divergence=1.25),
    ):
        with pytest.raises(errors.ConfigError) as error:
            call()
        assert_message(error, "1.25", "Alpha(1.25)")


def test_lists_and_arrays_are_told_to_become_tensors() -> None:
    cosines, labels = spread_cosines()
    loss_fn = qmargin.magface(reduction="none")
    norms = torch.full((5,), 20.0)
    for call in (
        lambda: loss_fn(cosines.numpy(), labels, norms),
        lambda: loss_fn(cosines, labels.tolist(), norms),
        lambda: qmargin.fenchel_young_loss(cosines, labels.tolist(), alpha=1.25),
        lambda: qmargin.fenchel_young_loss(cosines.numpy(), labels, alpha=1.25),
    ):
        with pytest.raises(errors.ShapeError) as error:
            call()
        assert_message(error, "torch.as_tensor")
    for wrong in (norms.tolist(), norms.long(), norms.to("meta")):
        with pytest.raises(errors.ShapeError) as error:
            loss_fn(cosines, labels, wrong)
        assert_message(error, "norms")
        with pytest.raises(errors.ShapeError) as error:
            qmargin.MagFaceMargin()(cosines[:, 0], 5.0, norms=wrong)
        assert_message(error, "norms")


@pytest.mark.parametrize("reference", ["a", [0.0, "b"], {}], ids=repr)
def test_a_reference_of_a_wrong_type_is_refused(reference: object) -> None:
    cosines, _ = spread_cosines()
    with pytest.raises(errors.ShapeError) as error:
        qmargin.softargmax(cosines, alpha=1.25, log_reference=reference)
    assert_message(error, "log_reference", "(5, 12)")


def test_targets_on_another_device_are_refused() -> None:
    cosines, labels = spread_cosines()
    for target in (labels.to("meta"), cosines.softmax(-1).to("meta")):
        with pytest.raises(errors.ShapeError) as error:
            qmargin.fenchel_young_loss(cosines, target, alpha=1.25)
        assert_message(error, "meta", "cpu", "move")


@pytest.mark.parametrize("length", [5, 13])
def test_a_value_per_class_for_another_number_of_classes_is_refused(length: int) -> None:
    cosines, labels = spread_cosines()
    per_class = qmargin.PerClass(torch.zeros(length))
    prior = qmargin.PriorMargin(per_class)
    for margin in (
        prior,
        qmargin.CombinedMargin(cosine=per_class),
        qmargin.PriorMargin(0.1) + qmargin.CosineMargin(per_class),
        prior + qmargin.ElasticMargin(),
    ):
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=5.0, reduction="none")
        with pytest.raises(errors.ShapeError) as error:
            loss_fn(cosines, labels)
        assert_message(error, str(length), "12", "PerClass")


def test_unknown_names_list_the_known_ones() -> None:
    cosines, _ = spread_cosines()
    with pytest.raises(errors.ConfigError) as error:
        qmargin.solve_tau(cosines, alpha=1.25, solver="secant")
    assert_message(error, "secant", "newton", "bisection")
    with pytest.raises(errors.ConfigError) as error:
        qmargin.solve_tau(cosines, alpha=1.25, solver="bisection", bracket="wide")
    assert_message(error, "wide", "tight", "paper")
    with pytest.raises(errors.ConfigError) as error:
        make_loss(reduction="average")
    assert_message(error, "average", "mean", "none")


def test_newton_is_refused_where_it_is_not_proven() -> None:
    cosines, _ = spread_cosines()
    with pytest.raises(errors.ConfigError) as error:
        qmargin.solve_tau(cosines, alpha=3.0, solver="newton")
    assert_message(error, "3", "2", "bisection")
