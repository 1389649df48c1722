"""The two ends of every path: unit embeddings in, the mean over the rows that count out."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class UnitRows(torch.autograd.Function):
    """Unit embeddings and their lengths; the gradient is projected on the tangent."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, labels: Tensor, ignored: int, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        """Unit rows ``[B, d]`` and norms ``[B]``."""
        unit, norms = kernels.unit_rows(embeddings, labels, ignored)
        ctx.kernels = kernels
        ctx.save_for_backward(unit, norms)
        ctx.set_materialize_grads(False)
        return unit, norms

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_unit: Tensor | None, grad_norms: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        """Tangent part over the length, plus the length's own gradient where it has one."""
        unit, norms = ctx.saved_tensors
        gradient = None
        if grad_unit is not None:
            gradient = ctx.kernels.unit_gradient(grad_unit, unit, norms)
        if grad_norms is not None:
            radial = grad_norms[:, None] * unit
            gradient = radial if gradient is None else gradient + radial
        return gradient, None, None, None


class MeanRows(torch.autograd.Function):
    """Mean over the rows that are not ignored: one operation each way once the shares are known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor, ignored: int) -> Tensor:
        """A scalar; NaN where no row counts, as the mean of nothing is."""
        counts = labels != ignored
        shares = counts.to(rows.dtype) / counts.sum()
        ctx.save_for_backward(shares)
        return torch.dot(torch.where(counts, rows, 0.0), shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """An equal share for every row that counts."""
        (shares,) = ctx.saved_tensors
        return grad * shares, None, None


def unit_rows(
    embeddings: Tensor, labels: Tensor, ignored: int, kernels: ModuleType
) -> tuple[Tensor, Tensor]:
    """Unit embeddings ``[B, d]`` and their lengths ``[B]``, differentiable once.

    A row with the label ``ignored`` becomes some unit vector: nothing in it can spoil the rest.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = UnitRows.apply
    return apply(embeddings, labels, ignored, kernels)


def mean_rows(rows: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Mean of ``rows`` ``[B]`` over those whose label is not ``ignored``."""
    apply: Callable[..., Tensor] = MeanRows.apply
    return apply(rows, labels, ignored)
