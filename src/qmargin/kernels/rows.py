"""The loss and the posterior of whole batches, block by block, in float64.

A block of rows is lifted to float64, solved, and rounded back: no float64 copy of the batch ever
exists. On a CPU and for ``alpha > 1`` a block is first reduced to its *candidates*, the classes
above ``tau_low + edge``: all others are certainly outside the support (M13), so the solve that
follows touches hundreds of numbers where the row has a hundred thousand, and is exact (M8).

A margin changes only the target, so the target's column may be lifted out: then ``labels`` names
it, and its logit and log reference arrive as vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.maths.objective import distribution_loss, label_loss, log_partition, posterior_rows
from qmargin.maths.threshold import (
    bound_from_below,
    level_cost,
    slacks,
    solve_newton,
    solve_rows,
)

CPU_BLOCK = 1 << 21  # logits per block: float64 copies stay small, parallel regions few
GPU_BLOCK = 1 << 25
GROUP = 32  # classes whose maximum stands for all of them when tau is bounded
WORTH_PACKING = 4  # pack candidates when at most 1 in 4 classes is one


@dataclass(frozen=True)
class Rows:
    """A batch of rows: logits ``scale * values``, and optionally the target lifted out of them."""

    values: Tensor  # [B, k]
    scale: float
    order: float  # alpha - 1
    log_reference: Tensor | None = None  # [B, k], possibly expanded
    labels: Tensor | None = None  # [B]
    target_logits: Tensor | None = None  # [B]
    target_log_reference: Tensor | None = None  # [B]

    def blocks(self) -> Iterator[tuple[slice, Rows]]:
        """Consecutive pieces of the batch, small enough to be solved in float64."""
        limit = CPU_BLOCK if self.values.device.type == "cpu" else GPU_BLOCK
        size = max(1, limit // max(1, self.values.shape[1]))
        for start in range(0, self.values.shape[0], size):
            where = slice(start, start + size)
            yield (
                where,
                Rows(
                    self.values[where],
                    self.scale,
                    self.order,
                    *(
                        None if part is None else part[where]
                        for part in (
                            self.log_reference,
                            self.labels,
                            self.target_logits,
                            self.target_log_reference,
                        )
                    ),
                ),
            )


class Listed(NamedTuple):
    """Logits of a block as the solver wants them; a lifted target is the last column."""

    logits: Tensor  # [B, K] float64, -inf where a list is shorter
    log_reference: Tensor | None  # [B, K]
    columns: Tensor | None  # [B, K'] class of each entry; None when K' is every class in order


class Outcome(NamedTuple):
    """What a solved batch leaves behind, ``[B]`` each."""

    value: Tensor  # loss, or log-partition without a target
    anchor: Tensor  # float64
    level: Tensor  # float64
    tau: Tensor
    support_size: Tensor
    mass_error: Tensor
    target_posterior: Tensor
    target_deficit: Tensor  # 1 - target_posterior, accurate when it is tiny
    num_evaluations: Tensor  # scalar


def solve(
    rows: Rows,
    distribution: Tensor | None = None,
    *,
    solver: str = "auto",
    bracket: str = "tight",
) -> Outcome:
    """Solve every row; its loss for a lifted or a distributed target, else its log-partition."""
    dtype = rows.values.dtype
    tolerance = 1e-14 if dtype == torch.float64 else 1e-9
    parts, num_evaluations = [], 0
    for where, block in rows.blocks():
        if rows.order == 0.0 and rows.labels is not None and rows.log_reference is None:
            parts.append(_cross_entropy(block))
            num_evaluations = 1
            continue
        listed = candidates(block) if distribution is None and solver == "auto" else None
        if listed is None:
            listed = everything(block)
        anchor, level, count = solve_rows(
            listed.logits,
            listed.log_reference,
            rows.order,
            solver=solver,
            bracket=bracket,
            tolerance=tolerance,
        )
        num_evaluations = max(num_evaluations, count)
        target = None if distribution is None else distribution[where]
        parts.append(_describe(block, listed, anchor, level, target))
    columns = zip(*parts, strict=True) if parts else [[rows.values.new_zeros(0)]] * 8
    merged = [torch.cat(list(column)) for column in columns]
    for index in (0, 3, 5, 6, 7):
        merged[index] = merged[index].to(dtype)
    merged[1], merged[2] = merged[1].double(), merged[2].double()
    merged[4] = merged[4].long()
    return Outcome._make([*merged, torch.tensor(num_evaluations)])


def _describe(
    block: Rows, listed: Listed, anchor: Tensor, level: Tensor, distribution: Tensor | None
) -> tuple[Tensor, ...]:
    order = block.order
    posterior, levels = posterior_rows(listed.logits, listed.log_reference, anchor, level, order)
    mass = posterior.sum(1)
    target = deficit = torch.zeros_like(mass)
    if block.labels is not None:
        assert listed.log_reference is not None
        value, target, deficit = label_loss(posterior, levels, listed.log_reference[:, -1], order)
    elif distribution is not None:
        value = distribution_loss(
            posterior, levels, listed.log_reference, distribution.double(), order
        )
    else:
        value = log_partition(posterior, listed.logits, anchor, level, order)
    value = torch.where(mass.isnan(), mass, value)  # a broken row never has a finite value
    support_size = (posterior > 0).sum(1)
    tau = anchor - slacks(level, order)
    return value, anchor, level, tau, support_size, (mass - 1.0).abs(), target, deficit


def _cross_entropy(block: Rows) -> tuple[Tensor, ...]:
    """The closed form at ``alpha = 1`` with a lifted target: one exponential per class."""
    assert block.labels is not None and block.target_logits is not None
    assert block.target_log_reference is not None
    logits = block.values.double() * block.scale
    logits.scatter_(1, block.labels[:, None], -math.inf)
    is_masked = (logits == -math.inf).sum(1) - 1
    target = block.target_logits.double()
    joint = target + block.target_log_reference.double()
    anchor = torch.maximum(logits.amax(1), joint)
    others = logits.sub_(anchor[:, None]).exp_().sum(1)
    own = (joint - anchor).exp()
    mass = others + own
    level = -mass.log()
    deficit = others / mass
    value = torch.where(deficit < 0.5, -torch.log1p(-deficit), mass.log() - (joint - anchor))
    support_size = block.values.shape[1] - is_masked - (target == -math.inf).long()
    error = torch.zeros_like(mass) * mass  # normalised by construction, NaN in a broken row
    return value, anchor, level, anchor - level, support_size, error, own / mass, deficit


def everything(block: Rows) -> Listed:
    """All classes of a block, in order, in float64."""
    logits = block.values.double() * block.scale
    reference = None if block.log_reference is None else block.log_reference.double()
    if block.labels is None:
        return Listed(logits, reference, None)
    logits = logits.scatter(1, block.labels[:, None], -math.inf)
    return _append_target(block, logits, reference, None)


def candidates(block: Rows) -> Listed | None:
    """The classes of a block that may be active, packed; None when packing would not pay."""
    values, order = block.values, block.order
    if values.device.type != "cpu" or order <= 0 or values.shape[1] < 64:
        return None
    if block.labels is not None:
        values = values.scatter(1, block.labels[:, None], -math.inf)
    tau_low = _tau_low(block, values)
    floor = (tau_low - 1.0 / order) / block.scale  # [B] certainly inactive at and below (M3)
    floor = (floor - 1e-6 * floor.abs() - 1e-30).to(values.dtype)  # rounded values stay candidates
    is_candidate = values > floor[:, None]
    counts = is_candidate.sum(1)
    width = int(counts.max())
    if width * WORTH_PACKING > values.shape[1]:
        return None
    row, column = is_candidate.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    position = torch.arange(len(row)) - starts[row]
    columns = torch.full((len(counts), width), -1)
    columns[row, position] = column
    logits = torch.full(columns.shape, -math.inf, dtype=torch.float64)
    logits[row, position] = values[row, column].double() * block.scale
    # A row with NaN or +inf has no finite bound: keep it broken instead of losing the evidence.
    logits[:, :1] += (tau_low * 0.0)[:, None] if width else 0.0
    reference = None
    if block.log_reference is not None:
        reference = torch.zeros_like(logits)
        reference[row, position] = block.log_reference[row, column].double()
    if block.labels is None:
        return Listed(logits, reference, columns) if width else None
    return _append_target(block, logits, reference, columns)


def _tau_low(block: Rows, values: Tensor) -> Tensor:
    """Lower bound of ``tau``: the root over a few classes that matter most (M13).

    The classes are the maxima of groups and the lifted target; every Newton iterate is a lower
    bound itself, so it need not converge. With a reference measure of its own per class, or above
    ``alpha = 2``, the best bound of a single class serves (M4).
    """
    order, scale = block.order, block.scale
    if block.log_reference is not None:
        cost = slacks(level_cost(-block.log_reference.double(), order), order)
        maxima = (values.double() * scale - cost).amax(1, keepdim=True)
    else:
        grouped = values.shape[1] // GROUP * GROUP
        maxima = values[:, :grouped].unflatten(1, (-1, GROUP)).amax(2)
        if grouped < values.shape[1]:
            maxima = torch.cat([maxima, values[:, grouped:].amax(1, keepdim=True)], 1)
        maxima = maxima.double() * scale
    reference = torch.zeros_like(maxima)
    if block.target_logits is not None and block.target_log_reference is not None:
        maxima = torch.cat([maxima, block.target_logits.double()[:, None]], 1)
        reference = torch.cat([reference, block.target_log_reference.double()[:, None]], 1)
    if order > 1.0:
        anchor, level = bound_from_below(maxima, reference, order)
    else:
        anchor, level, _ = solve_newton(maxima, reference, order, tolerance=1e-3)
    return anchor - slacks(level, order)


def _append_target(
    block: Rows, logits: Tensor, reference: Tensor | None, columns: Tensor | None
) -> Listed:
    assert block.target_logits is not None and block.target_log_reference is not None
    if reference is None:
        reference = torch.zeros_like(logits)
    return Listed(
        torch.cat([logits, block.target_logits.double()[:, None]], 1),
        torch.cat([reference, block.target_log_reference.double()[:, None]], 1),
        columns,
    )


def posterior(rows: Rows, anchor: Tensor, level: Tensor, weights: Tensor | None) -> Tensor:
    """Posterior of solved rows, ``[B, k]``, each row times its weight; a lifted target gets zero.

    Only classes above the threshold are touched when few are: the rest of the result is zero.
    """
    out = torch.zeros_like(rows.values, memory_format=torch.contiguous_format)
    for where, block in rows.blocks():
        _fill_posterior(
            out[where],
            block,
            anchor[where],
            level[where],
            None if weights is None else weights[where],
        )
    return out


def _fill_posterior(
    out: Tensor, block: Rows, anchor: Tensor, level: Tensor, weights: Tensor | None
) -> None:
    values, order = block.values, block.order
    if values.device.type == "cpu" and order > 0:
        floor = (anchor - slacks(level, order) - 1.0 / order) / block.scale
        floor = (floor - 1e-6 * floor.abs() - 1e-30).to(values.dtype)
        is_candidate = values > floor[:, None]
        if int(is_candidate.sum()) * WORTH_PACKING <= values.numel() and not bool(
            level.isnan().any()
        ):
            _fill_sparse(out, block, anchor, level, weights, is_candidate)
            return
    listed = everything(Rows(values, block.scale, order, block.log_reference))
    result, _ = posterior_rows(listed.logits, listed.log_reference, anchor, level, order)
    if weights is not None:
        result = torch.where(weights[:, None] == 0, 0.0, result * weights.double()[:, None])
    if block.labels is not None:
        result.scatter_(1, block.labels[:, None], 0.0)
    out.copy_(torch.where(values == -math.inf, 0.0, result))


def _fill_sparse(
    out: Tensor,
    block: Rows,
    anchor: Tensor,
    level: Tensor,
    weights: Tensor | None,
    is_candidate: Tensor,
) -> None:
    row, column = is_candidate.nonzero(as_tuple=True)
    logits = block.values[row, column].double() * block.scale
    reference = None
    if block.log_reference is not None:
        reference = block.log_reference[row, column].double()[:, None]
    result, _ = posterior_rows(logits[:, None], reference, anchor[row], level[row], block.order)
    result = result.squeeze(1)
    if weights is not None:
        result = result * weights.double()[row]
    if block.labels is not None:
        result = torch.where(column == block.labels[row], 0.0, result)
    out[row, column] = result.to(out.dtype)
