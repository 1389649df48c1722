"""Embeddings on the unit sphere, with one operation each way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class UnitRows(torch.autograd.Function):
    """Unit embeddings and their lengths; the gradient is projected on the tangent."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, kernels: ModuleType) -> tuple[Tensor, Tensor]:
        """Unit rows ``[B, d]`` and norms ``[B]``."""
        unit, norms = kernels.unit_rows(embeddings)
        ctx.kernels = kernels
        ctx.save_for_backward(unit, norms)
        ctx.set_materialize_grads(False)
        return unit, norms

    @staticmethod
    def backward(
        ctx: Any, grad_unit: Tensor | None, grad_norms: Tensor | None
    ) -> tuple[Tensor | None, None]:
        """Tangent part over the length, plus the length's own gradient where it has one."""
        unit, norms = ctx.saved_tensors
        gradient = None
        if grad_unit is not None:
            gradient = ctx.kernels.unit_gradient(grad_unit, unit, norms)
        if grad_norms is not None:
            radial = grad_norms[:, None] * unit
            gradient = radial if gradient is None else gradient + radial
        return gradient, None


def unit_rows(embeddings: Tensor, kernels: ModuleType) -> tuple[Tensor, Tensor]:
    """Unit embeddings ``[B, d]`` and their lengths ``[B]``, differentiable once."""
    apply: Callable[..., tuple[Tensor, Tensor]] = UnitRows.apply
    return apply(embeddings, kernels)
