"""Arguments of the operators and losses: brought into one form, or refused with the remedy.

Nothing here reads a tensor's elements, except through the operators that do it on a CPU only.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.losses.operators import checked_labels
from qmargin.maths.adaptive import ModuleSumMargin
from qmargin.maths.divergences import Alpha, Divergence
from qmargin.maths.margins import Margin
from qmargin.maths.settings import PerClass, check_positive, describe, settings_in

LARGEST_COSINE = 1.01  # products of unit vectors in half precision exceed one by less


def check_floating(logits: Tensor, name: str = "logits") -> Tensor:
    """The tensor, half precision lifted to float32, or an error that names it."""
    if not isinstance(logits, Tensor):
        raise ShapeError(
            f"{name} are a {type(logits).__name__}; convert them with torch.as_tensor first"
        )
    if not logits.is_floating_point():
        raise ShapeError(
            f"{name} are {logits.dtype}; they must be a floating tensor, call .float() first"
        )
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ShapeError(
            f"{name} have shape {tuple(logits.shape)}; the last dimension holds at least one class"
        )
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def check_labels(labels: Tensor, logits: Tensor, *, debug: bool = False) -> Tensor:
    """Integer labels ``[...]`` in range for logits ``[..., k]``, as int64.

    The range is checked where that needs no wait for a device: on a CPU always, elsewhere only when
    ``debug`` asks for it.
    """
    check_label_tensor(labels, logits)
    checked: Tensor = checked_labels(labels, logits.shape[-1], debug)
    return checked


def check_label_tensor(labels: Tensor, logits: Tensor, name: str = "logits") -> None:
    """Raise unless labels are integers, one per row, on the device of the logits."""
    if not isinstance(labels, Tensor):
        raise ShapeError(
            f"labels are a {type(labels).__name__}; convert them with torch.as_tensor first"
        )
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ShapeError(
            f"labels have dtype {labels.dtype}; class indices are integers (torch.int64), "
            "and a target distribution is floating"
        )
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)} for {name} {tuple(logits.shape)}; "
            f"one label per row is {tuple(logits.shape[:-1])}"
        )
    _check_device(labels, logits, "labels", name)


def check_cosines(cosines: Tensor, is_ignored: Tensor) -> None:
    """Refuse what cannot be a cosine in rows ``[B, k]`` that count; waits for the device."""
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
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(
            f"log_reference is {log_reference!r}; give a number, or a tensor that broadcasts to "
            f"logits {tuple(logits.shape)}"
        ) from None
    try:
        return reference.broadcast_to(logits.shape)
    except RuntimeError:
        raise ShapeError(
            f"log_reference has shape {tuple(reference.shape)}, which does not broadcast to logits "
            f"{tuple(logits.shape)}; give a scalar, one per class [k], one per row [..., 1] or all"
        ) from None


def refuse_unsupported(label_smoothing: float, weight: Tensor | None) -> None:
    """Refuse options of ``torch.nn.CrossEntropyLoss`` that a margin loss does not have."""
    if label_smoothing != 0.0:
        raise ConfigError(
            f"label_smoothing is {label_smoothing!r} and a margin needs a single target class; for "
            "smoothed targets pass a distribution to qmargin.fenchel_young_loss, without a margin"
        )
    if weight is not None:
        raise ConfigError(
            f"weight is {describe(weight)} and margin losses have no class weights; use "
            "reduction='none' and multiply each row by the weight of its class"
        )


def check_norms(norms: Tensor | None, labels: Tensor) -> None:
    """Raise unless norms are absent, or floating, one per row, on the device of the labels."""
    if norms is None:
        return
    if not isinstance(norms, Tensor) or not norms.is_floating_point():
        raise ShapeError(
            f"norms are {describe(norms)}; they must be a floating tensor, "
            "pass embeddings.norm(dim=1)"
        )
    if norms.shape != labels.shape:
        raise ShapeError(
            f"norms have shape {tuple(norms.shape)} for labels {tuple(labels.shape)}; "
            "pass embeddings.norm(dim=1)"
        )
    _check_device(norms, labels, "norms")


def _check_device(tensor: Tensor, other: Tensor, name: str, other_name: str = "logits") -> None:
    if tensor.device != other.device:
        raise ShapeError(
            f"{name} are on {tensor.device} and {other_name} on {other.device}; move one of them"
        )


def check_divergence(divergence: Divergence) -> Divergence:
    """The divergence, or an error for a number or a class in its place."""
    is_divergence = isinstance(divergence, Alpha) or hasattr(divergence, "link_slope")
    if isinstance(divergence, type) or not is_divergence:
        raise ConfigError(
            f"divergence is {divergence!r}; give an object with the methods of Divergence, "
            "e.g. Alpha(1.25)"
        )
    return divergence


def check_margin(margin: Margin, num_classes: int | None = None) -> None:
    """Raise unless it is a margin, whose ``PerClass`` settings are as long as there are classes."""
    if isinstance(margin, type) or not (callable(margin) and hasattr(margin, "effective")):
        raise ConfigError(
            f"margin is {margin!r}; give an object with the methods of Margin, e.g. "
            "PriorMargin(0.2)"
        )
    if num_classes is None or torch.compiler.is_compiling():  # there a missing class gives NaN
        return
    settings = settings_in(margin.prior if isinstance(margin, ModuleSumMargin) else margin)
    for name, value in settings:
        if isinstance(value, PerClass) and len(value.values) != num_classes:
            raise ShapeError(
                f"{name} of the margin has {len(value.values)} values and there are {num_classes} "
                "classes; give PerClass one value per class"
            )


def check_scale(scale: float) -> float:
    """A positive number as a float."""
    return check_positive(scale, "scale", "choose a positive number (32 to 64 are common)")


def check_ignore_index(ignore_index: int) -> int:
    """A negative integer: it is no class."""
    if torch.compiler.is_compiling():
        return ignore_index
    is_integer = isinstance(ignore_index, Integral) and not isinstance(ignore_index, bool)
    if not is_integer or ignore_index >= 0:
        raise ConfigError(
            f"ignore_index is {ignore_index!r}; it must be a negative integer, so that it is no "
            "class, e.g. -100"
        )
    return int(ignore_index)
