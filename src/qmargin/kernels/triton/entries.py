"""Entries by class: the sparse gradient of the cosines, sorted for the sweep over prototypes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_records import ClassGradient, ClassOrder, SolvedRows

BLOCK = 1024


@triton.jit
def _gather(ORDER, ROWS, POSTERIOR, WEIGHTS, TARGET_WEIGHTS, OUT_ROWS, OUT_VALUES, others, total,
            BLOCK: tl.constexpr):  # fmt: skip
    """Row and value of each entry in the order of classes; entries past the others are targets."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    entry = tl.load(ORDER + place, mask=inside, other=0)
    is_other = inside & (entry < others)
    row = tl.load(ROWS + entry, mask=is_other, other=0)
    value = tl.load(POSTERIOR + entry, mask=is_other, other=0.0)
    value *= tl.load(WEIGHTS + row, mask=is_other, other=0.0)
    is_target = inside & (entry >= others)
    row = tl.where(is_target, (entry - others).to(tl.int32), row)
    value = tl.where(is_target, tl.load(TARGET_WEIGHTS + row, mask=is_target, other=0.0), value)
    tl.store(OUT_ROWS + place, row, mask=inside)
    tl.store(OUT_VALUES + place, value, mask=inside)


def class_gradient(
    order: ClassOrder, solved: SolvedRows, weights: Tensor, target_weights: Tensor
) -> ClassGradient:
    """See ``head_reference.class_gradient``."""
    columns = order.columns
    rows = torch.empty_like(columns)
    values = torch.empty(columns.shape, dtype=torch.float32, device=columns.device)
    if len(columns):
        _gather[(triton.cdiv(len(columns), BLOCK),)](
            order.order, solved.rows, solved.posterior, weights, target_weights, rows, values,
            order.num_candidates, len(columns), BLOCK, num_warps=4,
        )  # fmt: skip
    return ClassGradient(columns, rows, values)
