"""Backbones by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn

from qmargin.errors import ConfigError
from qmargin.models.iresnet import BLOCKS, iresnet
from qmargin.models.mobilefacenet import SIZES as MOBILE_SIZES
from qmargin.models.mobilefacenet import mobilefacenet
from qmargin.models.small import SmallConv, SmallMLP
from qmargin.models.speaker_backbones import SPEAKER_BACKBONES
from qmargin.models.stroke_net import StrokeNet
from qmargin.models.stroke_resnet import StrokeResNet
from qmargin.models.vit import SIZES as VIT_SIZES
from qmargin.models.vit import vit

_BACKBONES: dict[str, Callable[..., nn.Module]] = {
    **{f"iresnet{depth}": partial(iresnet, depth) for depth in BLOCKS},
    **{name: partial(mobilefacenet, name) for name in MOBILE_SIZES},
    **{name: partial(vit, name) for name in VIT_SIZES},
    **SPEAKER_BACKBONES,
    "small_mlp": SmallMLP,
    "small_conv": SmallConv,
    "stroke_net": StrokeNet,
    "stroke_resnet": StrokeResNet,
}


def register_backbone(name: str, factory: Callable[..., nn.Module]) -> None:
    """Make ``create_backbone(name)`` call ``factory``.

    Args:
        name: Not yet taken.
        factory: Takes ``embedding_dim`` by name, and options of its own; returns a module that maps
            a batch of inputs to embeddings ``[B, embedding_dim]``.
    """
    if name in _BACKBONES:
        raise ConfigError(f"a backbone {name!r} is registered already; choose another name")
    _BACKBONES[name] = factory


def create_backbone(name: str, *, embedding_dim: int = 512, **options: Any) -> nn.Module:
    """Build a backbone with fresh weights.

    Examples:
        >>> create_backbone("iresnet18", embedding_dim=128).embedding_dim
        128
    """
    if name not in _BACKBONES:
        close = get_close_matches(name, _BACKBONES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "nothing is like it;"
        known = ", ".join(list_backbones())
        raise ConfigError(f"no backbone {name!r}, {hint} known are {known}")
    return _BACKBONES[name](embedding_dim=embedding_dim, **options)


def list_backbones() -> list[str]:
    """Names that ``create_backbone`` knows, in order of registration.

    Examples:
        >>> list_backbones()[:5]
        ['iresnet18', 'iresnet34', 'iresnet50', 'iresnet100', 'iresnet200']
    """
    return list(_BACKBONES)
