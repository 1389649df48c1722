"""MobileFaceNet: faces on small devices, by depthwise convolutions.

The layers, their names and their first values are those of the networks that InsightFace calls
``mbf`` and ``mbf_large``, so that a ``state_dict`` from there loads here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.models.face_parts import (
    IMAGE_SIZE,
    check_embedding_dim,
    check_faces,
    no_autocast,
    recomputed,
)
from qmargin.registry import register_backbone

FEATURE_SIZE = IMAGE_SIZE // 16
FEATURE_CHANNELS = 512


class Size(NamedTuple):
    """Blocks of the four stages, and what their channels (64 and 128) are multiplied by."""

    blocks: tuple[int, int, int, int]
    width: int


SIZES = {
    "mobilefacenet": Size((1, 4, 6, 2), 2),
    "mobilefacenet_large": Size((2, 8, 12, 4), 4),
}


class ConvUnit(nn.Module):
    """Convolution, norm and, unless it is linear, PReLU."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        size: int = 1,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        is_linear: bool = False,
    ) -> None:
        super().__init__()
        conv = nn.Conv2d(
            in_channels, channels, size, stride, padding=padding, groups=groups, bias=False
        )
        layers: list[nn.Module] = [conv, nn.BatchNorm2d(channels)]
        if not is_linear:
            layers.append(nn.PReLU(channels))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``[B, C, H, W]`` to others of ``channels``."""
        outputs: Tensor = self.layers(inputs)
        return outputs


class Bottleneck(nn.Module):
    """Widen, filter every channel by itself, narrow without activation; maybe add the input."""

    def __init__(
        self, in_channels: int, channels: int, inner: int, *, stride: int = 1, has_sum: bool = False
    ) -> None:
        super().__init__()
        self.has_sum = has_sum
        self.layers = nn.Sequential(
            ConvUnit(in_channels, inner),
            ConvUnit(inner, inner, 3, stride=stride, padding=1, groups=inner),
            ConvUnit(inner, channels, is_linear=True),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``[B, C, H, W]`` to ``[B, channels, H / stride, W / stride]``."""
        outputs: Tensor = self.layers(inputs)
        return inputs + outputs if self.has_sum else outputs


class Stage(nn.Module):
    """Bottlenecks in a row that keep the shape of their input."""

    def __init__(self, channels: int, inner: int, num_blocks: int) -> None:
        super().__init__()
        blocks = (Bottleneck(channels, channels, inner, has_sum=True) for _ in range(num_blocks))
        self.layers = nn.Sequential(*blocks)

    def forward(self, inputs: Tensor) -> Tensor:
        """Features of the same shape."""
        outputs: Tensor = self.layers(inputs)
        return outputs


class Projection(nn.Module):
    """A weight per place and channel instead of a mean, then a linear map and its norm."""

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        channels = FEATURE_CHANNELS
        self.layers = nn.Sequential(
            ConvUnit(channels, channels, FEATURE_SIZE, groups=channels, is_linear=True),
            nn.Flatten(),
            nn.Linear(channels, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``[B, 512, 7, 7]`` to embeddings ``[B, d]``."""
        embeddings: Tensor = self.layers(inputs)
        return embeddings


class MobileFaceNet(nn.Module):
    """Images ``[B, 3, 112, 112]`` to embeddings ``[B, d]`` of any length.

    Convolutions follow the autocast around the call; from the widening to 512 channels on, layers
    run in the precision of their weights.

    Args:
        blocks: Blocks of the four stages; a first stage of one block is a grouped convolution.
        width: Channels are 64 and 128 times this.
        embedding_dim: ``d``.
        gradient_checkpointing: Make activations again in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        width: int,
        embedding_dim: int = 512,
        *,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.embedding_dim = check_embedding_dim(embedding_dim)
        self.gradient_checkpointing = gradient_checkpointing
        narrow, wide = 64 * width, 128 * width
        first: nn.Module = Stage(narrow, 128, blocks[0])
        if blocks[0] == 1:
            first = ConvUnit(narrow, narrow, 3, padding=1, groups=64)
        self.layers = nn.ModuleList(
            [
                ConvUnit(3, narrow, 3, stride=2, padding=1),
                first,
                Bottleneck(narrow, narrow, 128, stride=2),
                Stage(narrow, 128, blocks[1]),
                Bottleneck(narrow, wide, 256, stride=2),
                Stage(wide, 256, blocks[2]),
                Bottleneck(wide, wide, 512, stride=2),
                Stage(wide, 256, blocks[3]),
            ]
        )
        self.conv_sep = ConvUnit(wide, FEATURE_CHANNELS)
        self.features = Projection(embedding_dim)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        check_faces(images)
        out = images
        if self.gradient_checkpointing and torch.is_grad_enabled():
            out = recomputed(self.layers, out)
        else:
            for layer in self.layers:
                out = layer(out)
        with no_autocast(out.device.type):
            weight = next(self.conv_sep.parameters())
            embeddings: Tensor = self.features(self.conv_sep(out.to(weight.dtype)))
        return embeddings


def mobilefacenet(name: str, embedding_dim: int = 512, **options: Any) -> MobileFaceNet:
    """MobileFaceNet of a size, for 112 x 112 faces.

    Examples:
        >>> network = mobilefacenet("mobilefacenet")
        >>> sum(parameter.numel() for parameter in network.parameters())
        2059520
    """
    if name not in SIZES:
        raise ConfigError(f"name is {name!r}; known are {', '.join(SIZES)}")
    size = SIZES[name]
    return MobileFaceNet(size.blocks, size.width, embedding_dim, **options)


for _name in SIZES:
    register_backbone(_name, partial(mobilefacenet, _name))
