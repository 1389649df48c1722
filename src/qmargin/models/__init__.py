"""Backbones: networks that map inputs to embeddings, independent of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmargin.registry import backbones, register_backbone

if TYPE_CHECKING:
    from torch import nn

__all__ = ["create_backbone", "list_backbones", "register_backbone"]


def create_backbone(name: str, *, embedding_dim: int = 512, **options: Any) -> nn.Module:
    """Build a backbone with random weights.

    Examples:
        >>> create_backbone("iresnet18", embedding_dim=128).embedding_dim
        128
    """
    backbone: nn.Module = backbones.get(name)(embedding_dim=embedding_dim, **options)
    return backbone


def list_backbones() -> list[str]:
    """List the names for ``create_backbone``.

    Examples:
        >>> [name for name in list_backbones() if name.startswith("iresnet")]
        ['iresnet18', 'iresnet34', 'iresnet50', 'iresnet100', 'iresnet200']
    """
    return backbones.names()
