"""``MarginClassifier``: prototypes of every identity and a loss, for one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.heads.sparse import LIST_CAPACITY, sparse_rows
from qmargin.kernels.dispatch import Call, load_backend
from qmargin.kernels.head_reference import ClassGradient
from qmargin.losses.functional import checked_labels
from qmargin.losses.module import MarginLoss
from qmargin.maths.divergences import Alpha

PATHS = ("auto", "sparse", "chunked", "dense", "sampled", "paper")
GRADIENTS = ("dense", "sparse", "fused")
PADDING = 256  # the screen's tiles: a copy of the prototypes has a multiple of this many rows


@dataclass(frozen=True)
class StepStats:
    """What the last step did."""

    path: str
    reason: str
    support_mean: float
    support_max: int
    num_candidates: float  # classes scored exactly, per row
    num_overflowed: int
    mass_error: float
    active_share: float  # of all classes, how many got a gradient


class MarginClassifier(nn.Module):
    """Prototypes of ``num_classes`` identities and the loss over them.

    Args:
        embedding_dim: ``d``.
        num_classes: ``k``, any number.
        loss: A ``MarginLoss``; its reduction is replaced by the mean over the batch.
        path: How a step is taken: ``"sparse"``, ``"chunked"``, ``"dense"``, ``"sampled"``,
            ``"paper"``, or ``"auto"``.
        gradient: What backward leaves: ``"dense"`` or ``"sparse"`` (COO) in ``prototypes.grad``, or
            ``"fused"`` for the optimizers of ``qmargin.heads.updates``, which never build it.
        screen_dtype: Precision of the copy that is screened; the prototypes' own by default on a
            CPU, float16 on a GPU.
    """

    inverse_norms: Tensor
    copy: Tensor
    copy_error: Tensor

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        loss: MarginLoss,
        *,
        path: str = "auto",
        gradient: str = "dense",
        screen_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if path not in PATHS:
            raise ConfigError(f"path is {path!r}; known paths are {', '.join(PATHS)}")
        if gradient not in GRADIENTS:
            raise ConfigError(f"gradient is {gradient!r}; known ones are {', '.join(GRADIENTS)}")
        if embedding_dim < 1 or num_classes < 1:
            raise ConfigError(
                f"embedding_dim is {embedding_dim} and num_classes {num_classes}; "
                "both must be at least 1"
            )
        self.embedding_dim, self.num_classes = embedding_dim, num_classes
        self.loss, self.path, self.gradient = loss, path, gradient
        self.list_capacity = LIST_CAPACITY
        weights = torch.empty(num_classes, embedding_dim, device=device, dtype=dtype)
        self.prototypes = nn.Parameter(weights.normal_(0.0, 0.01))
        self.screen_dtype = screen_dtype or (
            torch.float16 if self.prototypes.is_cuda else self.prototypes.dtype
        )
        self.pending: tuple[ClassGradient, Tensor] | None = None
        self._version = -1
        self._step: Any = None

    @property
    def order(self) -> float:
        """``alpha - 1``."""
        if not isinstance(self.loss.divergence, Alpha):
            raise ConfigError(
                f"the divergence is {self.loss.divergence}; only Alpha has sparse and chunked "
                "steps, use path='dense'"
            )
        return self.loss.divergence.order

    @property
    def kernels(self) -> Any:
        """The operations of the sparse step for this device."""
        prototypes = self.prototypes
        return load_backend(Call(prototypes.device.type, prototypes.dtype, self.screen_dtype))

    def refresh(self) -> None:
        """Bring the screened copy up to date if the prototypes changed since it was made."""
        if self._version == self.prototypes._version:
            return
        k, d = self.prototypes.shape
        padded = -(-k // PADDING) * PADDING
        prototypes = self.prototypes.detach()
        if self._version < 0:
            self.copy = prototypes.new_zeros((padded, d), dtype=self.screen_dtype)
            self.inverse_norms = prototypes.new_empty(k)
        self.copy_error = self.kernels.refresh_copy(prototypes, self.copy, self.inverse_norms)
        self._version = self.prototypes._version

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch of embeddings ``[B, d]`` (any length) with labels ``[B]``."""
        self._check(embeddings, labels)
        self.refresh()
        wide = embeddings.to(self.prototypes.dtype)
        norms = wide.norm(dim=1)
        unit = wide / norms[:, None]
        rows, self._step = sparse_rows(self, unit, labels, norms)
        return rows.mean()

    def receive_gradient(self, gradient: ClassGradient, embeddings: Tensor) -> Tensor | None:
        """Turn the sparse gradient into what was asked for."""
        if self.gradient == "fused":
            self.pending = (gradient, embeddings)
            return None
        prototypes = self.prototypes.detach()
        classes, rows = self.kernels.prototype_gradient(
            gradient, embeddings, prototypes, self.inverse_norms
        )
        if self.gradient == "sparse":
            return torch.sparse_coo_tensor(
                classes[None], rows, prototypes.shape, is_coalesced=True, check_invariants=False
            )
        return torch.zeros_like(prototypes).index_copy_(0, classes, rows)

    def _check(self, embeddings: Tensor, labels: Tensor) -> None:
        if embeddings.dim() != 2 or embeddings.shape[1] != self.embedding_dim:
            raise ShapeError(
                f"embeddings have shape {tuple(embeddings.shape)}; "
                f"this head takes [B, {self.embedding_dim}]"
            )
        if labels.shape != embeddings.shape[:1] or labels.is_floating_point():
            raise ShapeError(
                f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}; "
                f"this batch needs {len(embeddings)} integers"
            )
        if embeddings.device != self.prototypes.device:
            raise DataError(
                f"embeddings are on {embeddings.device} and prototypes on "
                f"{self.prototypes.device}; move one of them"
            )
        checked_labels(labels, self.num_classes, self.loss.debug)
