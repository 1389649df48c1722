"""The row operations and the checks of data as torch operators.

Operators (``torch.library``) keep the data-dependent part opaque, so that ``torch.compile`` traces
through without a break, and ``vmap`` folds its dimension into the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qmargin.errors import DataError
from qmargin.kernels import rows as row_kernels
from qmargin.kernels.rows import Rows
from qmargin.maths.divergences import check_alpha_range

SUM_TOLERANCE = 1e-3  # of a target distribution; bfloat16 rounds its entries coarser than that


def _rows(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    labels: Tensor | None,
    target_logits: Tensor | None,
    target_log_reference: Tensor | None,
    scale: float,
) -> Rows:
    value = float(alpha.detach().double())
    check_alpha_range(value)
    return Rows(
        values, scale, value - 1.0, log_reference, labels, target_logits, target_log_reference
    )


@torch.library.custom_op("qmargin::solve_rows", mutates_args=())
def solve_rows(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    labels: Tensor | None,
    target_logits: Tensor | None,
    target_log_reference: Tensor | None,
    distribution: Tensor | None,
    scale: float,
    solver: str,
    bracket: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator form of ``kernels.rows.solve``: ``values`` is ``[B, k]``."""
    rows = _rows(values, log_reference, alpha, labels, target_logits, target_log_reference, scale)
    return row_kernels.solve(rows, distribution, solver=solver, bracket=bracket)


@solve_rows.register_fake
def _(values: Tensor, *_: Any) -> tuple[Tensor, ...]:
    row = values.new_empty(values.shape[0])
    wide = row.to(torch.float64)
    count = row.to(torch.int64)
    scalar = torch.empty((), dtype=torch.int64)
    return (
        row, wide, wide.clone(), row.clone(), count, row.clone(), row.clone(), row.clone(), scalar,
    )  # fmt: skip


@torch.library.custom_op("qmargin::weighted_posterior", mutates_args=())
def weighted_posterior(
    values: Tensor,
    log_reference: Tensor | None,
    alpha: Tensor,
    labels: Tensor | None,
    anchor: Tensor,
    level: Tensor,
    weights: Tensor | None,
    scale: float,
) -> Tensor:
    """Operator form of ``kernels.rows.posterior``."""
    rows = _rows(values, log_reference, alpha, labels, None, None, scale)
    return row_kernels.posterior(rows, anchor, level, weights)


@weighted_posterior.register_fake
def _(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _fold_batch(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule: the mapped dimension joins the rows; a mapped alpha is looped over."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size

        def pieces(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.movedim(dim, 0) if dim is not None else value.expand(size, *value.shape)

        moved = [pieces(value, dim) for value, dim in zip(args, in_dims, strict=True)]
        if in_dims[2] is None:
            moved[2] = None  # one alpha for all rows
            flat = [v.flatten(0, 1) if isinstance(v, Tensor) else v for v in moved]
            flat[2] = args[2]
            outputs = operator(*flat)
            single = isinstance(outputs, Tensor)
            outputs = (outputs,) if single else outputs
            split = tuple(
                value.unflatten(0, (size, -1)) if value.dim() else value.expand(size)
                for value in outputs
            )
        else:
            each = [
                operator(*(v[i] if isinstance(v, Tensor) else v for v in moved))
                for i in range(size)
            ]
            single = isinstance(each[0], Tensor)
            each = [(value,) for value in each] if single else each
            split = tuple(torch.stack(values) for values in zip(*each, strict=True))
        return (split[0], 0) if single else (split, (0,) * len(split))

    return rule


torch.library.register_vmap(solve_rows, _fold_batch(solve_rows))
torch.library.register_vmap(weighted_posterior, _fold_batch(weighted_posterior))


@torch.library.custom_op("qmargin::checked_labels", mutates_args=())
def checked_labels(labels: Tensor, num_classes: int, debug: bool) -> Tensor:
    """Operator that lets a range check live inside a compiled graph; returns int64 labels."""
    if labels.numel() and (labels.device.type == "cpu" or debug):
        is_bad = (labels < 0) | (labels >= num_classes)
        if bool(is_bad.any()):
            row = int(is_bad.flatten().nonzero()[0])
            raise DataError(
                f"label {int(labels.flatten()[row])} at row {row} is outside 0..{num_classes - 1}; "
                "check the class count, or mark rows to skip with ignore_index"
            )
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

    An entry below zero and a sum that is not one are errors, found on a CPU always and elsewhere
    when ``debug`` asks for it. What comes back is to be added to the loss.
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
