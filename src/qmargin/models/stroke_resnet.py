"""A residual network for small drawings, for a GPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.models.stroke_net import CELLS, DrawingNet


class StrokeResNet(DrawingNet):
    """Images of any size to embeddings ``[B, d]``: three halvings, each with residual blocks.

    It sees the drawing once in full resolution, and its norms are over the batch. On Omniglot's
    other alphabets it is better than ``StrokeNet`` of the same width, which costs less.

    Args:
        embedding_dim: ``d``.
        in_channels: Of the images.
        width: Channels at full and at half the resolution; doubled by each of the other halvings.
        depth: Residual blocks of each resolution below the full.

    Examples:
        >>> import torch
        >>> StrokeResNet(64)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self, embedding_dim: int, *, in_channels: int = 1, width: int = 64, depth: int = 2
    ) -> None:
        super().__init__()
        sizes = {
            "embedding_dim": embedding_dim,
            "in_channels": in_channels,
            "width": width,
            "depth": depth,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} is {size}; it must be at least 1")
        self.embedding_dim, self.in_channels = embedding_dim, in_channels
        layers: list[nn.Module] = [_convolution(in_channels, width), nn.ReLU()]
        previous = width
        for channels in (width, 2 * width, 4 * width):
            layers.append(_Block(previous, channels, stride=2))
            layers += [_Block(channels, channels) for _ in range(depth - 1)]
            previous = channels
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(previous * CELLS * CELLS, embedding_dim)
        self.norm = nn.BatchNorm1d(embedding_dim, affine=False)


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, in_channels: int, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.first = _convolution(in_channels, channels, stride=stride)
        self.second = _convolution(channels, channels)
        is_same = stride == 1 and in_channels == channels
        self.shortcut = (
            nn.Identity() if is_same else _convolution(in_channels, channels, 1, stride=stride)
        )

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(maps))) + self.shortcut(maps))


def _convolution(in_channels: int, channels: int, kernel: int = 3, *, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
    )
