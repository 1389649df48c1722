"""Unit rows: lengths of embeddings taken off, and the gradient's way back, a kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.triton.tuning import power_of_two


@triton.jit
def _unit(EMBEDDINGS, LABELS, UNIT, NORMS, ignored, depth, DEPTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    x = tl.load(EMBEDDINGS + row * depth + dimension, mask=inside, other=0.0)
    x = tl.where(inside & (tl.load(LABELS + row) == ignored), 1.0, x)
    norm = tl.sqrt(tl.sum(x * x, 0))
    tl.store(NORMS + row, norm)
    divisor = tl.where(norm < float("inf"), norm, float("nan"))
    tl.store(UNIT + row * depth + dimension, x / divisor, mask=inside)


@triton.jit
def _unit_gradient(GRADIENT, UNIT, NORMS, OUT, depth, DEPTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    g = tl.load(GRADIENT + row * depth + dimension, mask=inside, other=0.0)
    u = tl.load(UNIT + row * depth + dimension, mask=inside, other=0.0)
    g = (g - tl.sum(g * u, 0) * u) / tl.load(NORMS + row)
    tl.store(OUT + row * depth + dimension, g, mask=inside)


def unit_rows(embeddings: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """See ``head_reference.unit_rows``."""
    embeddings = embeddings.contiguous()
    num_rows, depth = embeddings.shape
    unit = torch.empty_like(embeddings)
    norms = torch.empty(num_rows, dtype=embeddings.dtype, device=embeddings.device)
    if num_rows:
        _unit[(num_rows,)](
            embeddings, labels, unit, norms, ignored, depth, power_of_two(depth), num_warps=4
        )
    return unit, norms


def unit_gradient(gradient: Tensor, unit: Tensor, norms: Tensor) -> Tensor:
    """See ``head_reference.unit_gradient``."""
    gradient = gradient.contiguous()
    num_rows, depth = gradient.shape
    out = torch.empty_like(gradient)
    if num_rows:
        _unit_gradient[(num_rows,)](
            gradient, unit, norms, out, depth, power_of_two(depth), num_warps=4
        )
    return out
