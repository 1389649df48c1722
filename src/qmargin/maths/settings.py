"""Settings of margins: numbers, one value per row, or one value per class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Real

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError


class ByValue:
    """Equality by fields; two tensors are equal settings when they are the same tensor."""

    def _key(self) -> tuple[object, ...]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        return tuple(id(value) if isinstance(value, Tensor) else value for value in values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or type(self) is not type(other):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._key()))


@dataclass(frozen=True, eq=False)
class PerClass(ByValue):
    """One value per class, looked up by label.

    The wrapper keeps a tensor of one value per class apart from a tensor of one value per row,
    which may well have the same length.

    Args:
        values: Floating-point tensor ``[num_classes]``.

    Examples:
        >>> PerClass(torch.tensor([0.1, 0.4])).lookup(torch.tensor([1, 0, 1]), torch.zeros(3))
        tensor([0.4000, 0.1000, 0.4000])
    """

    values: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            raise ShapeError(
                f"PerClass needs a floating-point tensor of shape [num_classes], "
                f"got {describe(self.values)}"
            )
        if self.values.ndim != 1 or self.values.shape[0] == 0:
            raise ShapeError(
                f"PerClass needs one value per class in a tensor of shape [num_classes], "
                f"got {describe(self.values)}"
            )

    def lookup(self, labels: Tensor | None, like: Tensor) -> Tensor:
        """Values of the labels' classes, in the shape of ``like``.

        A label past the end gives NaN. A negative one, which marks a row that the caller discards,
        gives zero, so that nothing in that row can spoil a gradient.
        """
        if labels is None:
            raise ConfigError(
                "a PerClass margin looks its values up by label and got no labels: "
                "pass labels=labels along with the target cosines"
            )
        if labels.shape != like.shape or labels.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"labels for a PerClass margin must be integers of shape {list(like.shape)}, "
                f"got {describe(labels)}"
            )
        last = self.values.shape[0] - 1
        found = self.values[labels.clamp(0, last)]
        return found.where(labels >= 0, 0.0).where(labels <= last, math.nan)


Setting = float | Tensor | PerClass
"""A margin: a number, a tensor (one value per row, or one for all), or one value per class."""


def describe(value: object) -> str:
    """Name a value in an error message without reading a tensor's elements."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device.type}"
    return repr(value)


def settings_in(owner: object) -> Iterator[tuple[str, object]]:
    """Every value inside a margin of margins, named by its path: ``prior_margin_values``."""
    for field in fields(owner) if isinstance(owner, ByValue) else ():  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        yield field.name, value
        yield from ((f"{field.name}_{name}", inner) for name, inner in settings_in(value))


def register_learnable(module: nn.Module, owner: object, prefix: str) -> None:
    """Register the parameters inside a margin, so that an optimizer of the module finds them."""
    for name, value in settings_in(owner):
        if isinstance(value, nn.Parameter):
            module.register_parameter(f"{prefix}_{name}", value)


def check_number(
    value: object, name: str, *, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return a finite number in ``[low, high)`` as a float, or raise ``ConfigError``.

    NumPy's numbers are numbers; a bool is not. Inside a compiled graph the number may be symbolic
    and passes unchecked.
    """
    if torch.compiler.is_compiling():
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {describe(value)}: give a finite number")
    number = float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {number}: give a finite number")
    if not low <= number < high:
        limits = f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:.6g})"
        raise ConfigError(f"{name} is {number:g}: choose a value {limits}")
    return number


def check_positive(value: object, name: str, remedy: str) -> float:
    """Return a positive finite number as a float, or raise ``ConfigError`` with the remedy."""
    number = check_number(value, name)
    if not torch.compiler.is_compiling() and number <= 0.0:
        raise ConfigError(f"{name} is {number:g}: {remedy}")
    return number


def check_setting(
    value: Setting, name: str, *, low: float = -math.inf, high: float = math.inf
) -> Setting:
    """Check a margin when it is built; of a tensor only what can be known without reading it."""
    if isinstance(value, PerClass):
        return value
    if not isinstance(value, Tensor):
        return check_number(value, name, low=low, high=high)
    if not value.is_floating_point() or value.ndim > 1:
        raise ShapeError(
            f"{name} is a tensor of {describe(value)}: give floating-point values, one for all "
            f"rows, one per row (shape [B]), or one per class inside PerClass"
        )
    return value


def resolve(value: Setting, cosines: Tensor, labels: Tensor | None) -> float | Tensor:
    """Turn a setting into a number or into one value per row, in the dtype of the cosines."""
    if isinstance(value, float):
        return value
    tensor = value.values if isinstance(value, PerClass) else value
    # A 0-dim tensor on the CPU mixes with any device, as everywhere in PyTorch.
    if tensor.device != cosines.device and not (tensor.ndim == 0 and tensor.device.type == "cpu"):
        raise ConfigError(
            f"the margin is on {tensor.device} and the cosines are on {cosines.device}: "
            f"move the margin's tensor with .to({str(cosines.device)!r}) when you build it"
        )
    if isinstance(value, PerClass):
        return value.lookup(labels, cosines).to(cosines.dtype)
    if value.ndim > 0 and value.shape != cosines.shape:
        raise ShapeError(
            f"a margin of shape {list(value.shape)} does not fit target cosines of shape "
            f"{list(cosines.shape)}: give one value per row, or put one per class in PerClass"
        )
    return value.to(cosines.dtype)
