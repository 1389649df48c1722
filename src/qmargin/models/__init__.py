"""Backbones: networks that map inputs to embeddings, and know nothing of losses."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmargin.models.registry import create_backbone, list_backbones, register_backbone

__all__ = ["create_backbone", "list_backbones", "register_backbone"]


def __getattr__(name: str) -> object:  # torch is imported on first use
    if name in __all__:
        return getattr(import_module("qmargin.models.registry"), name)
    raise AttributeError(f"module 'qmargin.models' has no attribute {name!r}")
