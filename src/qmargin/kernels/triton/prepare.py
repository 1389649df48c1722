"""Prepare: rounded rows, the length of their rounding errors, the target's cosine, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_records import PreparedRows
from qmargin.kernels.triton.tuning import power_of_two


@triton.jit
def _prepare(
    EMBEDDINGS, LABELS, PROTOTYPES, INVERSE_NORMS, ROUNDED, ROUNDING, TARGETS, COSINES, depth,
    DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    x = tl.load(EMBEDDINGS + row * depth + dimension, mask=inside, other=0.0)
    rounded = x.to(ROUNDED.dtype.element_ty)
    tl.store(ROUNDED + row * depth + dimension, rounded, mask=inside)
    error = x - rounded.to(tl.float32)
    tl.store(ROUNDING + row, tl.sqrt(tl.sum(error * error, 0)))
    label = tl.load(LABELS + row).to(tl.int64)
    prototype = tl.load(PROTOTYPES + label * depth + dimension, mask=inside, other=0.0)
    target = prototype * tl.load(INVERSE_NORMS + label)
    tl.store(TARGETS + row * depth + dimension, target, mask=inside)
    tl.store(COSINES + row, tl.sum(x * target, 0))


def prepare_rows(
    embeddings: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    inverse_norms: Tensor,
    screen_dtype: torch.dtype,
) -> PreparedRows:
    """See ``head_reference.prepare_rows``."""
    embeddings = embeddings.contiguous()
    num_rows, depth = embeddings.shape
    rounded = torch.empty(embeddings.shape, dtype=screen_dtype, device=embeddings.device)
    targets = torch.empty_like(embeddings)
    rounding, cosines = torch.empty((2, num_rows), device=embeddings.device).unbind()
    if num_rows:
        _prepare[(num_rows,)](
            embeddings, labels, prototypes, inverse_norms, rounded, rounding, targets,
            cosines, depth, power_of_two(depth), num_warps=4,
        )  # fmt: skip
    return PreparedRows(embeddings, rounded, rounding, targets, cosines)
