"""Speaker networks by name, for the registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from qmargin.models.campplus import CamPlusPlus
from qmargin.models.ecapa import WIDTHS, EcapaTdnn
from qmargin.models.speaker_resnet import BLOCKS, speaker_resnet

SPEAKER_BACKBONES: dict[str, Callable[..., nn.Module]] = {
    **{f"speaker_resnet{depth}": partial(speaker_resnet, depth) for depth in BLOCKS},
    **{f"ecapa{width}": partial(EcapaTdnn, width=width) for width in WIDTHS},
    "campplus": CamPlusPlus,
}
"""Functions that take ``embedding_dim`` by name, and options of their own."""
