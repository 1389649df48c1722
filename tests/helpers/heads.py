"""Batches for heads, and the truth about them: all cosines in float64 and autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.paths import Chunked, Sampled, StepPath, as_path
from qmargin.heads.step import StepStats
from qmargin.losses.divergences import Alpha
from qmargin.losses.margin_loss import MarginLoss
from qmargin.losses.margins import Margin, PriorMargin


@dataclass(frozen=True)
class Batch:
    """Embeddings of any length ``[B, d]``, labels ``[B]``, prototypes ``[k, d]``, in float32."""

    embeddings: Tensor
    labels: Tensor
    prototypes: Tensor


@dataclass(frozen=True)
class Outcome:
    """Loss and both gradients."""

    loss: Tensor
    embeddings: Tensor
    prototypes: Tensor
    stats: StepStats | None = None


def random_batch(num_classes: int, dim: int = 16, rows: int = 6, seed: int = 0) -> Batch:
    """Some rows near their class, some not; labels repeat; lengths are not one."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(num_classes, dim, generator=generator)
    labels = torch.randint(num_classes, (rows,), generator=generator)
    labels[-1] = labels[0]
    nearness = torch.linspace(0.0, 1.5, rows)[:, None]
    noise = torch.randn(rows, dim, generator=generator)
    return Batch(3.0 * (nearness * prototypes[labels] + noise), labels, 0.5 * prototypes)


def make_loss(alpha: float, scale: float = 16.0, margin: Margin | None = None) -> MarginLoss:
    return MarginLoss(Alpha(alpha), margin or PriorMargin(0.05), scale=scale)


def every_class(path: str | StepPath) -> StepPath:
    """The path, with a sample of all classes."""
    return Sampled(1.0) if path == "sampled" else as_path(path)


def screened(path: str, dtype: torch.dtype | None) -> StepPath:
    """A sparse or chunked path whose copy and products have a precision."""
    if path == "chunked":
        return Chunked(dtype=dtype, screen_dtype=dtype)
    return replace(as_path(path), screen_dtype=dtype, chunk_dtype=dtype)


def make_head(loss: MarginLoss, batch: Batch, **options: object) -> MarginClassifier:
    """A head with the batch's prototypes."""
    num_classes, dim = batch.prototypes.shape
    head = MarginClassifier(dim, num_classes, loss, **options)
    with torch.no_grad():
        head.prototypes.copy_(batch.prototypes)
    return head


def step(head: MarginClassifier, batch: Batch) -> Outcome:
    """A forward and a backward pass."""
    embeddings = batch.embeddings.to(head.prototypes.dtype, copy=True).requires_grad_()
    head.prototypes.grad = None
    loss = head(embeddings, batch.labels)
    loss.backward()
    gradient = head.prototypes.grad
    if gradient is None:  # fused
        gradient = fused_gradient(head)
    elif gradient.is_sparse:
        gradient = gradient.to_dense()
    return Outcome(loss.detach(), embeddings.grad, gradient, head.last_step)


def fused_gradient(head: MarginClassifier) -> Tensor:
    """The gradient of a fused backward pass, made and taken away."""
    gradient = torch.full_like(head.prototypes, torch.nan)
    for where, rows in head.fused_gradient.blocks():
        gradient[where] = rows
    head.fused_gradient = None
    return gradient.detach()


def truth_of(loss: MarginLoss, batch: Batch, columns: Tensor | None = None) -> Outcome:
    """The definition: normalise, multiply, ``MarginLoss``, mean; over some classes or all."""
    embeddings = batch.embeddings.double().requires_grad_()
    prototypes = batch.prototypes.double().requires_grad_()
    norms = embeddings.norm(dim=1)
    unit = nn.functional.normalize(prototypes)
    labels = batch.labels
    pairs = {} if loss.reference is None else {"prototypes": unit}
    if columns is not None:
        unit, labels = unit[columns], torch.searchsorted(columns, labels)
    cosines = (embeddings / norms[:, None]) @ unit.t()
    value = loss(cosines, labels, norms, **pairs).mean()
    value.backward()
    return Outcome(value.detach(), embeddings.grad, prototypes.grad)


def assert_same(outcome: Outcome, truth: Outcome, *, tolerance: float, note: object = "") -> None:
    """Loss and gradients agree, relative to the largest number of each."""
    for name in ("loss", "embeddings", "prototypes"):
        value, expected = getattr(outcome, name).double(), getattr(truth, name).double()
        error = float((value - expected).abs().max())
        size = float(expected.abs().max())
        assert error <= tolerance * size + 1e-3 * tolerance, f"{name} {note}: {error:.1e} of {size}"


class LargestTensor(TorchDispatchMode):
    """Watches the number of elements that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fresh, given = (
            [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
            for values in (result, args)
        )
        known = {leaf.untyped_storage().data_ptr() for leaf in given}
        sizes = [leaf.numel() for leaf in fresh if leaf.untyped_storage().data_ptr() not in known]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result
