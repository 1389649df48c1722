"""Which classes can be active: one pass of group maxima instead of a pass per question (M13).

Classes fall into groups, and a group's maximum answers for all its members: the root over the
maxima bounds ``tau`` from below, and a group whose maximum lies at or below ``tau_low + edge``
holds no active class. Groups are strided (class ``j`` is in group ``j mod m``), so that the maxima
of a row are elementwise maxima of long vectors. What remains is a few whole groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.maths.threshold import bound_from_below, level_cost, slacks, solve_newton

GROUP = 32


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


def certain_floor(tau: Tensor, order: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Value at and below which a class is certainly inactive given ``tau`` or a bound (M3)."""
    floor = (tau - 1.0 / order) / scale
    return (floor - 1e-6 * floor.abs() - 1e-30).to(dtype)  # what rounding blurs stays a candidate


def tau_from_maxima(
    groups: Groups,
    scale: float,
    order: float,
    target_logits: Tensor | None,
    target_log_reference: Tensor | None,
) -> Tensor:
    """Lower bound of ``tau``: the root over group maxima and the lifted target (M13).

    Every Newton iterate is a lower bound itself, so it need not converge; above ``alpha = 2`` the
    best bound of a single class serves (M4).
    """
    logits = groups.maxima.double() * scale
    reference = torch.zeros_like(logits)
    if target_logits is not None and target_log_reference is not None:
        logits = torch.cat([logits, target_logits.double()[:, None]], 1)
        reference = torch.cat([reference, target_log_reference.double()[:, None]], 1)
    if order > 1.0:
        anchor, level = bound_from_below(logits, reference, order)
    else:
        anchor, level, _ = solve_newton(logits, reference, order, tolerance=1e-3)
    return anchor - slacks(level, order)


def tau_from_singles(values: Tensor, log_reference: Tensor, scale: float, order: float) -> Tensor:
    """Lower bound of ``tau`` where every class has a reference measure of its own (M4)."""
    cost = slacks(level_cost(-log_reference.double(), order), order)
    bound = (values.double() * scale - cost).amax(1)
    return torch.where((log_reference == math.inf).any(1), math.nan, bound)  # as in the solver
