"""What a head refuses, and how it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.heads.memory import check_memory
from qmargin.losses.checks import check_floating, check_label_tensor
from qmargin.maths.adaptive import ElasticMargin

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

GRADIENTS = ("dense", "sparse", "fused")


def check_settings(head: MarginClassifier, dtype: torch.dtype, paths: tuple[str, ...]) -> None:
    """Refuse settings that no step could be taken with."""
    if head.path not in ("auto", *paths):
        known = ", ".join(("auto", *paths))
        raise ConfigError(f"path is {head.path!r}; known paths are {known}")
    if head.gradient not in GRADIENTS:
        known = ", ".join(GRADIENTS)
        raise ConfigError(f"gradient is {head.gradient!r}; known ones are {known}")
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"prototypes are {dtype}; keep them in torch.float32 (or float64) and choose the "
            "precision of the screen with screen_dtype"
        )
    margin = head.loss.margin
    if head.ranks.world > 1 and isinstance(margin, nn.Module):
        for part in margin.modules():
            if isinstance(part, ElasticMargin) and part.seed is None:
                raise ConfigError(
                    "the margin is drawn from each rank's own generator and the ranks must draw "
                    "the same; give ElasticMargin a seed"
                )
    if head.path in ("sparse", "chunked", "paper"):
        order = head.order
        if order <= 0.0 and head.path != "chunked":
            raise ConfigError(
                f"path {head.path!r} lives on posteriors that are zero for most classes and "
                f"alpha is {1.0 + order:g}; use path='chunked', or an alpha above 1"
            )


def check_head_memory(head: MarginClassifier, like: Tensor, screen: torch.dtype | None) -> None:
    """Refuse a head that the device cannot hold; ``like`` has its dtype and device."""
    native, numbers = like.element_size(), len(head.shard) * head.embedding_dim
    parts = {"prototypes": numbers * native}
    if head.path in ("auto", "sparse", "chunked") or head.gradient == "fused":
        default = torch.float16 if like.is_cuda and native == 4 else like.dtype
        parts["screened copy"] = numbers * (screen or default).itemsize
    if head.gradient == "dense":
        parts["gradient"] = numbers * native
    subject = f"a head of {len(head.shard):,} classes x {head.embedding_dim:,}"
    check_memory(parts, like.device, subject=subject)


def check_batch(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Refuse a batch of the wrong shape, dtype or device; the embeddings, if they will do."""
    embeddings = check_floating(embeddings, "embeddings")
    if embeddings.dim() != 2 or embeddings.shape[1] != head.embedding_dim:
        raise ShapeError(
            f"embeddings have shape {tuple(embeddings.shape)}; "
            f"this head takes [B, {head.embedding_dim}]"
        )
    if embeddings.device != head.prototypes.device:
        raise ShapeError(
            f"embeddings are on {embeddings.device} and prototypes on "
            f"{head.prototypes.device}; move one of them"
        )
    check_label_tensor(labels, embeddings)
    return embeddings


def check_norms(norms: Tensor, *, debug: bool) -> None:
    """Refuse rows without a direction; on a GPU, where that would wait, their loss is NaN."""
    if norms.is_cuda and not debug:
        return
    norms = norms.detach()
    is_bad = ~((norms > 0) & norms.isfinite())
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise DataError(
            f"the embedding of row {row} has length {float(norms[row]):g}, so it has no "
            "direction; look for NaN, inf or a dead layer, or mark the row with ignore_index"
        )
