"""Checks of numbers and tensors: each returns a usable value or raises an error that names it.

Values of tensors are checked on a CPU always, elsewhere only with ``debug``, because a check makes
a GPU wait.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from qmargin.errors import ConfigError, DataError, ShapeError

LARGEST_COSINE = 1.01  # products of unit vectors in half precision exceed one by less
LARGEST_ALPHA = 16.0  # above it heights underflow float64: a mass of 1e-20 has a height of 1e-300
SUM_TOLERANCE = 1e-3  # of a target distribution; bfloat16 rounds its entries coarser than that
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def describe(value: object) -> str:
    """Name a value in an error message without reading a tensor's elements."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device.type}"
    return repr(value)


def check_number(
    value: object, name: str, *, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return a finite number in ``[low, high)`` as a float, or raise ``ConfigError``.

    NumPy numbers are accepted, bools are not. Inside a compiled graph the number may be symbolic
    and is not checked.
    """
    if torch.compiler.is_compiling():
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{name} is {describe(value)}: give a finite number")
    number = float(value)
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


def check_alpha_range(alpha: float) -> None:
    """Raise unless the value of ``alpha``, given or learned, is in ``(0, LARGEST_ALPHA]``."""
    if not 0.0 < alpha <= LARGEST_ALPHA:
        raise ConfigError(
            f"alpha is {alpha:g}; choose one in (0, {LARGEST_ALPHA:g}], and clamp a learnable one "
            "after each update, e.g. alpha.data.clamp_(1.0, 2.0)"
        )


def check_scale(scale: float) -> float:
    """A positive number as a float."""
    return check_positive(scale, "scale", "choose a positive number (32 to 64 are common)")


def check_ignore_index(ignore_index: int) -> int:
    """Return a negative integer, so that it cannot be a class."""
    if torch.compiler.is_compiling():
        return ignore_index
    is_integer = isinstance(ignore_index, Integral) and not isinstance(ignore_index, bool)
    if not is_integer or ignore_index >= 0:
        raise ConfigError(f"ignore_index is {ignore_index!r}; give a negative integer, e.g. -100")
    return int(ignore_index)


def check_floating(logits: Tensor, name: str = "logits") -> Tensor:
    """Return the tensor, half precision converted to float32, or raise an error that names it."""
    check_classes(logits, name)
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def check_classes(logits: Tensor, name: str = "logits") -> None:
    """Raise unless logits are a floating tensor whose last dimension holds classes."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        what = logits.dtype if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ShapeError(f"{name} are {what}; give a floating tensor, e.g. by .float()")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ShapeError(
            f"{name} have shape {tuple(logits.shape)}; the last dimension holds at least one class"
        )


def check_label_tensor(labels: Tensor, logits: Tensor, name: str = "logits") -> None:
    """Raise unless labels are integers, one per row, on the device of the logits."""
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS:
        what = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise ShapeError(f"labels are {what}; class indices are a tensor of integers (torch.int64)")
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)} for {name} {tuple(logits.shape)}; "
            f"one label per row is {tuple(logits.shape[:-1])}"
        )
    _check_device(labels, logits, "labels", name)


def check_cosines(cosines: Tensor, is_ignored: Tensor) -> None:
    """Refuse values that cannot be cosines in rows that are not ignored; waits for the device."""
    largest = torch.where(is_ignored[:, None], 0.0, cosines.detach()).abs().amax(1)
    if not bool((largest > LARGEST_COSINE).any()):
        return
    row = int((largest > LARGEST_COSINE).nonzero()[0])
    raise DataError(
        f"row {row} holds a cosine of absolute value {float(largest[row]):g}, above 1; normalise "
        "embeddings and prototypes, and pass cosines, not logits: the loss multiplies by its scale"
    )


def check_distribution(target: Tensor, logits: Tensor) -> Tensor:
    """A target distribution in the shape and dtype of the logits, a constant."""
    if target.shape != logits.shape:
        raise ShapeError(
            f"target has shape {tuple(target.shape)} for logits {tuple(logits.shape)}; a target "
            "distribution has the shape of the logits, labels are integers without the class dim"
        )
    _check_device(target, logits, "the target distribution")
    if target.requires_grad:
        raise ConfigError("target requires grad; a target is a constant, pass target.detach()")
    return target.to(logits.dtype)


def check_reference(log_reference: Tensor | float | None, logits: Tensor) -> Tensor | None:
    """A log reference in the shape, dtype and device of the logits."""
    if log_reference is None:
        return None
    try:
        reference = torch.as_tensor(log_reference, dtype=logits.dtype, device=logits.device)
        return reference.broadcast_to(logits.shape)
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(
            f"log_reference is {describe(log_reference)} for logits {tuple(logits.shape)}; give a "
            "number, or a tensor that broadcasts: one per class [k], one per row [..., 1] or all"
        ) from None


def check_norms(norms: Tensor, rows: Tensor) -> None:
    """Raise unless norms are floating, one per row, on the device of the rows."""
    is_floating = isinstance(norms, Tensor) and norms.is_floating_point()
    if not is_floating or norms.shape != rows.shape or norms.device != rows.device:
        raise ShapeError(
            f"norms must be floating-point of shape {list(rows.shape)} on {rows.device}, got "
            f"{describe(norms)}: pass norms=embeddings.norm(dim=1)"
        )


def _check_device(tensor: Tensor, other: Tensor, name: str, other_name: str = "logits") -> None:
    if tensor.device != other.device:
        raise ShapeError(
            f"{name} are on {tensor.device} and {other_name} on {other.device}; move one of them"
        )


def check_labels(labels: Tensor, num_classes: int, debug: bool) -> None:
    """Raise for a label outside the classes; on a GPU only with ``debug``."""
    if labels.numel() and (labels.device.type == "cpu" or debug):
        is_bad = (labels < 0) | (labels >= num_classes)
        if bool(is_bad.any()):
            row = int(is_bad.flatten().nonzero()[0])
            raise DataError(
                f"label {int(labels.flatten()[row])} at row {row} is outside 0..{num_classes - 1}; "
                "check the class count, or mark rows to skip with ignore_index"
            )


@torch.library.custom_op("qmargin::checked_labels", mutates_args=())
def checked_labels(labels: Tensor, num_classes: int, debug: bool) -> Tensor:
    """Range check as an operator, so that compiled graphs can contain it; returns int64 labels."""
    check_labels(labels, num_classes, debug)
    return labels.to(torch.int64, copy=True)


@checked_labels.register_fake
def _(labels: Tensor, num_classes: int, debug: bool) -> Tensor:
    return torch.empty_like(labels, dtype=torch.int64)


@checked_labels.register_vmap
def _(
    info: object, in_dims: tuple[int, None, None], labels: Tensor, num_classes: int, debug: bool
) -> tuple[Tensor, int]:
    return checked_labels(labels, num_classes, debug), in_dims[0]


@torch.library.custom_op("qmargin::target_fault", mutates_args=())
def target_fault(target: Tensor, debug: bool) -> Tensor:
    """Zero for each row of target distributions ``[..., k]``, NaN for a row with a NaN in it.

    Add it to the loss. A negative entry, or a sum that is not one, is an error.
    """
    total = target.sum(-1, dtype=torch.float64)
    if target.device.type == "cpu" or debug:
        tolerance = max(SUM_TOLERANCE, torch.finfo(target.dtype).eps)
        lowest = target.amin(-1)
        is_bad = (lowest < 0) | ((total - 1.0).abs() > tolerance)  # both false for NaN
        if bool(is_bad.any()):
            row = int(is_bad.flatten().nonzero()[0])
            raise DataError(
                f"target distribution at row {row} has the sum {float(total.flatten()[row]):.6g} "
                f"and the smallest entry {float(lowest.flatten()[row]):.6g}; entries are at least "
                f"0 and sum to 1 within {tolerance:g}: divide each row by its sum"
            )
    return torch.where(total.isnan(), total, 0.0)


@target_fault.register_fake
def _(target: Tensor, debug: bool) -> Tensor:
    return target.new_empty(target.shape[:-1], dtype=torch.float64)


@target_fault.register_vmap
def _(info: object, in_dims: tuple[int, None], target: Tensor, debug: bool) -> tuple[Tensor, int]:
    return target_fault(target.movedim(in_dims[0], 0), debug), 0
