"""Both ends of every path: normalise embeddings, and reduce the loss over non-ignored rows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

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


class ReduceRows(torch.autograd.Function):
    """Mean or sum of rows by their shares: one operation each way once the shares are known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: Shares) -> Tensor:
        """A scalar."""
        ctx.save_for_backward(shares.values)
        return shares.reduce(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Its share for every row."""
        (shares,) = ctx.saved_tensors
        return grad * shares, None


class Shares(NamedTuple):
    """What each row counts in a mean or sum."""

    values: Tensor  # [B], zero for ignored rows
    nothing: Tensor | None  # scalar: NaN if the mean is one of no rows, else zero

    @classmethod
    def of(cls, labels: Tensor, ignored: int, reduction: str, dtype: torch.dtype) -> Shares:
        """Shares of rows with these labels for ``"mean"`` or ``"sum"``."""
        counts = (labels != ignored).to(dtype)
        if reduction == "sum":
            return cls(counts, None)
        total = counts.sum()
        return cls(counts / total.clamp_min(1.0), 0.0 / total)

    def reduce(self, rows: Tensor) -> Tensor:
        """Mean or sum of ``rows`` ``[B]``, whatever ignored rows hold.

        The mean of no rows is NaN, as in torch. It is added, so that it reaches no gradient.
        """
        total = torch.dot(torch.where(self.values == 0, 0.0, rows), self.values)
        return total if self.nothing is None else total + self.nothing


def reduce_rows(rows: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
    """Mean or sum of ``rows`` ``[B]`` over those whose label is not ``ignored``; or the rows."""
    if reduction == "none":
        return torch.where(labels == ignored, 0.0, rows)
    apply: Callable[..., Tensor] = ReduceRows.apply
    return apply(rows, Shares.of(labels, ignored, reduction, rows.dtype))


def unit_rows(
    embeddings: Tensor, labels: Tensor, ignored: int, kernels: ModuleType
) -> tuple[Tensor, Tensor]:
    """Unit embeddings ``[B, d]`` and their lengths ``[B]``, differentiable once.

    A row with the label ``ignored`` becomes some unit vector: nothing in it can spoil the rest.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = UnitRows.apply
    return apply(embeddings, labels, ignored, kernels)
