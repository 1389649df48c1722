"""The loss and the posterior of whole batches, block by block, in float64.

No float64 copy of the batch ever exists. On a CPU, ``kernels.lists`` solves rows with a lifted
target where it can. Of all others, for ``alpha > 1``, a block of rows is first reduced to its
*candidates*, the classes above ``tau_low + edge``: all others are certainly outside the support
(M13), so the solve that follows touches hundreds of numbers where the row has a hundred thousand,
and is exact (M8). They are found by one pass of group maxima. Groups are strided (class ``j`` is in
group ``j mod m``), so that the maxima are elementwise maxima of long vectors.

A margin changes only the target, so the target's column may be lifted out: then ``labels`` names
it, and its logit and log reference arrive as vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qmargin.kernels import dispatch, lists
from qmargin.kernels.solver import (
    MOST_ERROR,
    distribution_loss,
    label_loss,
    level_cost,
    log_partition,
    posterior_rows,
    row_exp,
    row_log,
    slacks,
    solve_rows,
    tau_from_below,
)

CPU_BLOCK = 1 << 21  # logits per block: copies stay small, parallel regions few
GPU_BLOCK = 1 << 25
LOG2_E = math.log2(math.e)  # powers of two are faster, and on a CPU need no threads
VECTOR = 32  # numbers that a CPU takes at a time, or a multiple
GROUP = 32  # strided classes, represented by their maximum
FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_SCALE = 1e30  # of kernels, whose settings are sums of two float32
SMALLEST_PART = 2048  # classes of a long row that one program writes
MOST_CLASSES = (1 << 31) - (1 << 13)  # of kernels, which count in 32 bits, a block beyond the last
WORTH_PACKING = 4  # pack candidates when at most 1 in 4 classes is one


@dataclass(frozen=True)
class Rows:
    """A batch of rows: logits ``scale * values``, and optionally the target lifted out of them."""

    values: Tensor  # [B, k]
    scale: float
    b: float  # alpha - 1
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
            parts: dict[str, Any] = {
                name: part[where] for name, part in vars(self).items() if isinstance(part, Tensor)
            }
            yield where, replace(self, **parts)


class Listed(NamedTuple):
    """Logits of a block for the solver; a lifted target is the last column."""

    logits: Tensor  # [B, K] float64, -inf where a list is shorter
    log_reference: Tensor | None  # [B, K]


class Outcome(NamedTuple):
    """A solved batch, ``[B]`` each."""

    value: Tensor  # loss, or log-partition without a target
    anchor: Tensor  # float64
    level: Tensor  # float64
    tau: Tensor
    support_size: Tensor
    mass_error: Tensor
    target_posterior: Tensor
    target_deficit: Tensor  # 1 - target_posterior, accurate when it is tiny
    num_evaluations: Tensor  # scalar
    target_gradient: Tensor | None = None  # in the target's cosine, where a kernel knows the margin

    def rounded(self, dtype: torch.dtype) -> Outcome:
        """The same with everything but anchor and level in the dtype of the values."""
        names = ("value", "tau", "mass_error", "target_posterior", "target_deficit")
        return self._replace(**{name: getattr(self, name).to(dtype) for name in names})


def solve(
    rows: Rows, distribution: Tensor | None = None, *, solver: str = "auto", bracket: str = "tight"
) -> Outcome:
    """Solve every row; its loss for a lifted or a distributed target, else its log-partition."""
    if distribution is None and solver == "auto" and is_fused(rows):
        outcome = _solve_fused(rows)
        if outcome is not None:
            return outcome
    if distribution is None and solver == "auto":
        listed = _solve_listed(rows)
        if listed is not None:
            return listed[0]
    return _solve_blocks(rows, distribution, solver, bracket)


def _solve_blocks(
    rows: Rows, distribution: Tensor | None = None, solver: str = "auto", bracket: str = "tight"
) -> Outcome:
    parts = [
        _solve_block(block, None if distribution is None else distribution[where], solver, bracket)
        for where, block in rows.blocks()
    ]
    if not parts:
        none = torch.zeros(0, dtype=torch.float64, device=rows.values.device)
        empty = Outcome._make([*[none] * 8, torch.tensor(0), None])
        parts = [empty._replace(support_size=none.long())]
    *columns, counts, _ = zip(*parts, strict=True)
    merged = Outcome._make([*map(torch.cat, columns), torch.stack(counts).amax(), None])
    return merged.rounded(rows.values.dtype)


def solve_and_keep(rows: Rows) -> tuple[Outcome, tuple[Tensor, ...]]:
    """``solve`` for a lifted target on a CPU, and what ``kept_posterior`` needs."""
    if rows.b == 0.0:
        outcome, exponentials = cross_entropy(rows)
        return outcome.rounded(rows.values.dtype), (exponentials,)
    return _solve_listed(rows) or (_solve_blocks(rows), ())


def kept_posterior(
    rows: Rows, kept: tuple[Tensor, ...], anchor: Tensor, level: Tensor, weights: Tensor
) -> Tensor:
    """``posterior`` from what ``solve_and_keep`` kept."""
    if not kept:
        return posterior(rows, anchor, level, weights)
    if len(kept) == 1:  # of all classes; at alpha = 1 it is without the factor of the row
        factor = weights
        if rows.b == 0.0:
            factor = row_exp(level).mul_(weights).clamp_max_(torch.finfo(weights.dtype).max)
        factor = factor.to(kept[0].dtype)[:, None]
        out = torch.empty_like(kept[0], memory_format=torch.contiguous_format)
        for part in lists.sweeps(out):
            torch.mul(kept[0][part], factor[part], out=out[part])
        is_idle = weights == 0
        return out.masked_fill_(is_idle[:, None], 0.0) if bool(is_idle.any()) else out
    out = lists.zeros(rows.values)
    entries = (lists.Entries(*kept[start : start + 3]) for start in range(0, len(kept), 3))
    lists.write_posterior(out, entries, weights)
    return out


def _solve_listed(rows: Rows) -> tuple[Outcome, tuple[Tensor, ...]] | None:
    """Outcome and posterior by lists, or of all classes; None where lists are not supported."""
    if rows.labels is None or rows.log_reference is not None:
        return None
    values, b = rows.values, rows.b
    if not lists.serves(values, b):
        return None
    assert rows.target_logits is not None and rows.target_log_reference is not None
    target = rows.target_logits.double(), rows.target_log_reference.double()
    solved = lists.solve(lists.Lifted(values, rows.scale, b, rows.labels, *target))
    value, anchor, level, support_size, error, own, others_mass, count, entries, dense = solved
    tau, number = anchor - slacks(level, b), torch.tensor(count)
    outcome = Outcome(value, anchor, level, tau, support_size, error, own, others_mass, number)
    kept = tuple(chain.from_iterable(entries)) if dense is None else (dense,)
    return outcome.rounded(values.dtype), kept


def is_fused(rows: Rows) -> bool:
    """Whether kernels support these rows: float32 on a GPU."""
    return rows.values.dtype == torch.float32 and may_fuse(rows.values, rows.scale)


def may_fuse(values: Tensor, scale: float) -> bool:
    """Whether kernels support values ``[B, k]`` without conversion: up to float32 on a GPU."""
    if values.device.type != "cuda" and not dispatch.may_interpret:
        return False
    num_rows, k = values.shape
    return (
        values.dtype in FUSED_DTYPES
        and num_rows > 0
        and 0 < k <= MOST_CLASSES
        and num_rows * -(-k // SMALLEST_PART) < 1 << 31  # programs of a launch
        and scale < LARGEST_SCALE
        and not kernel_faults
        and dispatch.has_triton()
    )


kernel_faults: list[str] = []  # reasons why the kernels cannot be built on this machine


def report_fault(error: Exception) -> None:
    """Record why kernels cannot run, and warn; running out of memory does not count."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    instead = "rows are computed in float64, which is slower"
    kernel_faults.append(dispatch.warn_of_fault(error, "for rows", instead))


def _solve_fused(rows: Rows) -> Outcome | None:
    """The outcome by kernels; None, with one warning, where they cannot be built here."""
    target = None
    if rows.labels is not None:
        assert rows.target_logits is not None and rows.target_log_reference is not None
        target = (rows.target_logits, rows.target_log_reference)
    try:
        from qmargin.kernels.triton import rows as kernels

        given = rows.values, rows.scale, rows.b, rows.labels
        return kernels.solve(*given, target=target, log_reference=rows.log_reference)
    except Exception as error:  # errors of Triton, its compiler or the driver
        report_fault(error)
        return None


def _solve_block(block: Rows, distribution: Tensor | None, solver: str, bracket: str) -> Outcome:
    b = block.b
    if b == 0.0 and block.labels is not None and block.log_reference is None:
        return cross_entropy(block)[0]
    listed = candidates(block) if distribution is None and solver == "auto" else None
    if listed is None:
        listed = everything(block)
    tolerance = 1e-14 if block.values.dtype == torch.float64 else 1e-9
    anchor, level, count = solve_rows(
        *listed, b, solver=solver, bracket=bracket, tolerance=tolerance
    )
    posterior, levels = posterior_rows(listed.logits, listed.log_reference, anchor, level, b)
    mass = posterior.sum(1)
    error = (mass - 1.0).abs()
    level = torch.where((error > MOST_ERROR) | mass.isnan(), math.nan, level)
    target = deficit = torch.zeros_like(mass)
    if block.labels is not None:
        assert listed.log_reference is not None
        value, target, deficit = label_loss(posterior, levels, listed.log_reference[:, -1], b)
    elif distribution is not None:
        value = distribution_loss(posterior, levels, listed.log_reference, distribution.double(), b)
    else:
        value = log_partition(posterior, listed.logits, anchor, level, b)
    value = torch.where(level.isnan(), level, value)  # a broken row never has a finite value
    tau, support = anchor - slacks(level, b), (posterior > 0).sum(1)
    number = torch.tensor(count)
    return Outcome(value, anchor, level, tau, support, error, target, deficit, number)


def cross_entropy(rows: Rows) -> tuple[Outcome, Tensor]:
    """The closed form at ``alpha = 1`` with a lifted target: one exponential per class.

    Differences are taken before the scale is applied: the dtype of the values is precise enough.
    The exponentials ``[B, k]`` come too; the posterior is a factor for each row away.
    """
    assert rows.labels is not None and rows.target_logits is not None
    assert rows.target_log_reference is not None
    values, index = rows.values, rows.labels[:, None]
    highest = _highest_other(values, rows.labels)
    shift = torch.where(highest == -math.inf, 0.0, highest)  # every other class masked out
    # Whole vectors for every thread: what is left over goes to a function that rounds differently.
    num_classes, unit = values.shape[1], VECTOR * torch.get_num_threads()
    buffer = values.new_empty((len(values), -(-num_classes // unit) * unit))
    exponentials, mass = buffer[:, :num_classes], torch.empty_like(shift)
    buffer[:, num_classes:] = 0.0
    for part in lists.sweeps(values):
        torch.sub(values[part], shift[part, None], out=exponentials[part])
        buffer[part].mul_(rows.scale * LOG2_E).exp2_()
        torch.sum(exponentials[part].scatter_(1, index[part], 0.0), 1, out=mass[part])
    mass = mass.double()
    anchor = shift.double() * rows.scale
    target = rows.target_logits.double()
    joint = (target - anchor) + rows.target_log_reference.double()
    log_mass = row_log(mass)
    total = torch.logaddexp(log_mass, joint)  # tau, relative to the anchor
    total = torch.where(mass.isnan() | (joint == math.inf), math.nan, total)
    deficit = row_exp(log_mass - total)
    value = torch.where(deficit < 0.5, -torch.log1p(-deficit), total - joint)
    own = row_exp(joint - total)
    support_size = values.shape[1] - (target == -math.inf).long()
    if not all(bool(values[part].amin() > -math.inf) for part in lists.sweeps(values)):
        is_masked = values == -math.inf
        support_size += is_masked.gather(1, index).squeeze(1).long() - is_masked.sum(1)
    error = (own + deficit - 1.0).abs()
    results = (value, anchor, -total, anchor + total, support_size, error, own, deficit)
    return Outcome(*results, torch.tensor(1)), exponentials


def _highest_other(values: Tensor, labels: Tensor) -> Tensor:
    """Largest value of each row but the labelled one, ``[B]``."""
    if values.device.type != "cpu" or values.shape[1] < 2 * lists.GROUP:
        return values.scatter(1, labels[:, None], -math.inf).amax(1)
    rest = lists.last_classes(values, labels)
    return lists.few_maxima(lists.group_maxima(values, labels), rest).amax(1)


def everything(block: Rows) -> Listed:
    """All classes of a block, in order, in float64."""
    logits = block.values.double() * block.scale
    reference = None if block.log_reference is None else block.log_reference.double()
    if reference is not None and block.b < 0.0:
        # Below alpha 1 the height of a class without measure would still bound the threshold.
        logits = torch.where((reference == -math.inf) & (logits < math.inf), -math.inf, logits)
    if block.labels is None:
        return Listed(logits, reference)
    logits = logits.scatter(1, block.labels[:, None], -math.inf)
    return _append_target(block, logits, reference)


def candidates(block: Rows) -> Listed | None:
    """The classes of a block that may be active, packed; None when packing would not pay."""
    values, b = block.values, block.b
    if values.device.type != "cpu" or b <= 0 or values.shape[1] < 2 * GROUP:
        return None
    groups = group_maxima(values, block.labels)
    if block.log_reference is None:  # the root over group maxima and the lifted target (M13)
        logits = groups.maxima.double() * block.scale
        listed = Listed(logits, torch.zeros_like(logits))
        if block.labels is not None:
            listed = _append_target(block, *listed)
        tau_low = tau_from_below(*listed, b, tolerance=1e-3)  # it need not converge
    else:  # the best bound of a single class (M4)
        cost = slacks(level_cost(-block.log_reference.double(), b), b)
        bounds = values.double() * block.scale - cost
        if block.labels is not None:  # a lifted target has another logit and another measure
            assert block.target_logits is not None and block.target_log_reference is not None
            own_cost = slacks(level_cost(-block.target_log_reference.double(), b), b)
            own = block.target_logits.double() - own_cost
            bounds.scatter_(1, block.labels[:, None], own[:, None])
        tau_low = bounds.amax(1)
        is_infinite = (block.log_reference == math.inf).any(1)
        tau_low = torch.where(is_infinite, math.nan, tau_low)  # as in the solver
    floor = certain_floor(tau_low, b, block.scale, values.dtype)
    row, column = classes_above(values, groups, floor, block.labels)
    counts = torch.bincount(row, minlength=len(values))
    width = max(1, int(counts.max()))  # one even for rows whose target alone can be active
    if width * WORTH_PACKING > values.shape[1]:
        return None
    position = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    logits = torch.full((len(counts), width), -math.inf, dtype=torch.float64)
    logits[row, position] = values[row, column].double() * block.scale
    # A row with NaN or +inf has no finite bound: keep it invalid, so that the result is NaN.
    logits[:, :1] += (tau_low * 0.0)[:, None]
    reference = None
    if block.log_reference is not None:
        reference = torch.zeros_like(logits)
        reference[row, position] = block.log_reference[row, column].double()
    if block.labels is None:
        return Listed(logits, reference)
    return _append_target(block, logits, reference)


def _append_target(block: Rows, logits: Tensor, reference: Tensor | None) -> Listed:
    assert block.target_logits is not None and block.target_log_reference is not None
    if reference is None:
        reference = torch.zeros_like(logits)
    # A target without measure is a masked target: both cost infinity.
    own, own_reference = block.target_logits.double(), block.target_log_reference.double()
    is_masked = (own_reference == -math.inf) & (own < math.inf)
    own, own_reference = (
        own.masked_fill(is_masked, -math.inf),
        own_reference.masked_fill(is_masked, 0),
    )
    return Listed(
        torch.cat([logits, own[:, None]], 1), torch.cat([reference, own_reference[:, None]], 1)
    )


def posterior(rows: Rows, anchor: Tensor, level: Tensor, weights: Tensor | None) -> Tensor:
    """Posterior of solved rows ``[B, k]``, each times its weight; a lifted target gets zero."""
    if is_fused(rows):
        from qmargin.kernels.triton.rows import write_posterior

        given = (rows.values, rows.scale, rows.b, rows.labels)
        options: dict[str, Any] = {"weights": weights, "log_reference": rows.log_reference}
        return write_posterior(*given, anchor=anchor, level=level, **options)
    out = torch.zeros_like(rows.values, memory_format=torch.contiguous_format)
    for where, block in rows.blocks():
        own = None if weights is None else weights[where]
        _fill_posterior(out[where], block, anchor[where], level[where], own)
    return out


def _fill_posterior(
    out: Tensor, block: Rows, anchor: Tensor, level: Tensor, weights: Tensor | None
) -> None:
    values, b = block.values, block.b
    if b == 0.0 and block.log_reference is None:
        _fill_exponential(out, block, anchor, level, weights)
        return
    if values.device.type == "cpu" and b > 0 and not bool(level.isnan().any()):
        tau = anchor - slacks(level, b)
        floor = certain_floor(tau, b, block.scale, values.dtype)
        row, column = classes_above(values, group_maxima(values, None), floor, block.labels)
        if len(row) * WORTH_PACKING <= values.numel():
            logits, reference = values[row, column].double() * block.scale, block.log_reference
            reference = None if reference is None else reference[row, column].double()[:, None]
            few, _ = posterior_rows(logits[:, None], reference, anchor[row], level[row], b)
            few = few.squeeze(1) if weights is None else few.squeeze(1) * weights.double()[row]
            out[row, column] = few.to(out.dtype)
            return
    listed = everything(Rows(values, block.scale, b, block.log_reference))
    result, _ = posterior_rows(listed.logits, listed.log_reference, anchor, level, b)
    if weights is not None:
        result = torch.where(weights[:, None] == 0, 0.0, result * weights.double()[:, None])
    if block.labels is not None:
        result.scatter_(1, block.labels[:, None], 0.0)
    out.copy_(torch.where(values == -math.inf, 0.0, result))


def _fill_exponential(
    out: Tensor, block: Rows, anchor: Tensor, level: Tensor, weights: Tensor | None
) -> None:
    """``alpha = 1``: exponentials relative to the anchor, then one exact factor per row."""
    shift = (anchor / block.scale).to(out.dtype)
    factor = (level + (shift.double() * block.scale - anchor)).exp()
    if weights is not None:
        factor = factor * weights.double()
    torch.sub(block.values, shift[:, None], out=out)
    # Where every other class is masked out the factor may overflow, and 0 * inf is no gradient.
    largest = torch.finfo(out.dtype).max
    out.mul_(block.scale).exp_().mul_(factor.clamp_max(largest).to(out.dtype)[:, None])
    if weights is not None:
        out.masked_fill_(weights[:, None] == 0, 0.0)
    if block.labels is not None:
        out.scatter_(1, block.labels[:, None], 0.0)


class Groups(NamedTuple):
    """Maxima of each row's groups; the last, incomplete stride of classes are groups of one."""

    maxima: Tensor  # [B, m + rest]
    stride: int  # m, the number of full groups

    def columns(self, group: Tensor, num_classes: int) -> Tensor:
        """Classes of the given groups, ``[n, GROUP]``; a group of one repeats its class."""
        member = torch.arange(GROUP, device=group.device)
        full = group[:, None] + self.stride * member
        single = (GROUP - 1) * self.stride + group[:, None]
        return torch.where(group[:, None] < self.stride, full, single).clamp_max(num_classes - 1)

    def of(self, column: Tensor) -> Tensor:
        """Group of each class."""
        full = column % max(self.stride, 1)
        return torch.where(column < GROUP * self.stride, full, column - (GROUP - 1) * self.stride)


def group_maxima(values: Tensor, labels: Tensor | None) -> Groups:
    """Maximum of each group, the labelled class of each row left out."""
    rows, num_classes = values.shape
    stride = num_classes // GROUP
    maxima = values[:, : GROUP * stride].reshape(rows, GROUP, stride).amax(1)
    groups = Groups(torch.cat([maxima, values[:, GROUP * stride :]], 1), stride)
    if labels is None:
        return groups
    own = groups.of(labels)
    columns = groups.columns(own, num_classes)  # [B, GROUP]
    members = values.gather(1, columns).masked_fill(columns == labels[:, None], -math.inf)
    groups.maxima.scatter_(1, own[:, None], members.amax(1, keepdim=True))
    return groups


def classes_above(
    values: Tensor, groups: Groups, floor: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row and column of every class above its row's floor, row by row; no labelled class."""
    row, group = (groups.maxima > floor[:, None]).nonzero(as_tuple=True)
    columns = groups.columns(group, values.shape[1])  # [n, GROUP]
    is_above = values[row[:, None], columns] > floor[row][:, None]
    is_above[:, 1:] &= (group < groups.stride)[:, None]  # a group of one counts once
    if labels is not None:
        is_above &= columns != labels[row][:, None]
    which, member = is_above.nonzero(as_tuple=True)
    return row[which], columns[which, member]


def certain_floor(tau: Tensor, b: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Value at and below which a class is certainly inactive given ``tau`` or a bound (M3)."""
    floor = (tau - 1.0 / b) / scale
    return (floor - 1e-6 * floor.abs() - 1e-30).to(dtype)  # classes within rounding stay candidates
