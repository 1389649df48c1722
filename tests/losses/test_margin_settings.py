"""Settings of margins: numbers, one value per row, one value per class."""

import math

import pytest
import torch

from qmargin.errors import ConfigError, ShapeError
from qmargin.losses.margins import (
    AngularMargin,
    CombinedMargin,
    CosineMargin,
    PerClass,
    PriorMargin,
)

COSINES = torch.tensor([0.5, -0.25, 0.75], dtype=torch.float64)
MARGINS = (
    PriorMargin,
    CosineMargin,
    AngularMargin,
    lambda value: CombinedMargin(multiplier=1.5, angular=value, cosine=0.1),
)


def term_of(margin, **inputs):
    term = margin(COSINES, 8.0, **inputs)
    return torch.stack([term.logits, term.log_reference])


@pytest.mark.parametrize("build", MARGINS)
def test_one_value_per_row_equals_one_row_at_a_time(build):
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    singles = torch.stack([term_of(build(value))[:, i] for i, value in enumerate(values.tolist())])
    torch.testing.assert_close(term_of(build(values)), singles.T)


@pytest.mark.parametrize("build", MARGINS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_one_value_per_class_is_looked_up_by_label(build, dtype):
    """As many classes as rows, so that only the wrapper tells the two kinds apart."""
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    labels = torch.tensor([2, 0, 2], dtype=dtype)
    by_class = term_of(build(PerClass(values)), labels=labels)
    torch.testing.assert_close(by_class, term_of(build(values[labels.long()])))


@pytest.mark.parametrize("build", MARGINS)
def test_gradients_flow_into_tensor_margins(build):
    labels = torch.tensor([2, 0, 2])

    def per_row(values):
        return term_of(build(values))

    def per_class(values):
        return term_of(build(PerClass(values)), labels=labels)

    for function in (per_row, per_class):
        values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, (values,))
        assert torch.autograd.gradgradcheck(function, (values,))


def test_a_learned_margin_moves_under_straight_through_gradients_too():
    value = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    AngularMargin(value, "straight_through")(COSINES, 8.0).logits.sum().backward()
    straight = value.grad.clone()
    value.grad = None
    AngularMargin(value)(COSINES, 8.0).logits.sum().backward()
    torch.testing.assert_close(straight, value.grad)


def test_a_label_past_the_end_is_nan_and_a_discarded_row_is_finite():
    values = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 2, -1])
    logits = CosineMargin(PerClass(values))(COSINES, 8.0, labels=labels).logits
    assert logits.isnan().tolist() == [False, True, False]
    logits.where(labels == 1, 0.0).sum().backward()
    assert values.grad.tolist() == [0.0, -8.0]


def test_an_angular_tensor_outside_its_range_is_nan_in_its_row():
    margins = torch.tensor([0.2, -0.2, 4.0], dtype=torch.float64)
    assert AngularMargin(margins)(COSINES, 8.0).logits.isnan().tolist() == [False, True, True]


def test_a_margin_on_another_device_is_named():
    margin = CosineMargin(torch.rand(3, device="meta"))
    with pytest.raises(ConfigError, match="on meta and the cosines are on cpu"):
        margin(COSINES, 8.0)
    on_meta = torch.empty(3, device="meta")
    assert CosineMargin(torch.tensor(0.1))(on_meta, 8.0).logits.device.type == "meta"


def test_equality_is_by_value_and_of_tensors_by_identity():
    tensor = torch.tensor([0.1, 0.2])
    assert AngularMargin(0.5) == AngularMargin(0.5)
    assert hash(AngularMargin(0.5)) == hash(AngularMargin(0.5))
    assert AngularMargin(0.5) != AngularMargin(0.5, "straight_through")
    assert CosineMargin(0.5) != PriorMargin(0.5)
    assert CosineMargin(0.5) != 0.5
    assert CosineMargin(tensor) == CosineMargin(tensor)
    assert CosineMargin(tensor) != CosineMargin(tensor.clone())
    assert CosineMargin(PerClass(tensor)) == CosineMargin(PerClass(tensor))
    assert CosineMargin(PerClass(tensor)) != CosineMargin(tensor)
    assert PriorMargin(0.1) + CosineMargin(0.2) == CosineMargin(0.2) + PriorMargin(0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.2", None, True, 1j])
@pytest.mark.parametrize("build", MARGINS)
def test_only_finite_numbers_are_margins(build, value):
    with pytest.raises(ConfigError, match="margin"):
        build(value)


@pytest.mark.parametrize(
    ("build", "error", "named"),
    [
        (lambda: AngularMargin(-0.1), ConfigError, "-0.1"),
        (lambda: AngularMargin(math.pi), ConfigError, "3.14"),
        (lambda: CombinedMargin(angular=30.0), ConfigError, "30"),
        (lambda: PriorMargin(torch.tensor([1, 2, 3])), ShapeError, "int64"),
        (lambda: PriorMargin(torch.rand(3, 1)), ShapeError, r"\[3, 1\]"),
        *(
            (lambda values=values: PerClass(values), ShapeError, "PerClass")
            for values in (0.3, [0.1], torch.tensor([1, 2]), torch.rand(()), torch.rand(0))
        ),
        (lambda: PriorMargin(torch.rand(4))(COSINES, 8.0), ShapeError, r"\[4\].*\[3\]"),
        (lambda: PriorMargin(PerClass(torch.rand(4)))(COSINES, 8.0), ConfigError, "labels"),
        (
            lambda: PriorMargin(PerClass(torch.rand(4)))(COSINES, 8.0, labels=torch.tensor([0, 1])),
            ShapeError,
            r"\[3\].*\[2\]",
        ),
        (
            lambda: PriorMargin(PerClass(torch.rand(4)))(COSINES, 8.0, labels=COSINES > 0),
            ShapeError,
            "bool",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(build, error, named):
    with pytest.raises(error, match=named):
        build()
