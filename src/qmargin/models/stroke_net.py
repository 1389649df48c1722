"""A network for small drawings that two CPU cores can train in a minute."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError

CELLS = 4  # of the last map, each way: where a stroke is matters as much as what it is
CHANNELS_PER_GROUP = 16


class DrawingNet(nn.Module):
    """What networks for drawings share: layers to maps, maps of 4 x 4 cells to embeddings."""

    embedding_dim: int
    in_channels: int
    layers: nn.Module
    project: nn.Module
    norm: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ShapeError(
                f"inputs have shape {tuple(images.shape)}; this network takes images "
                f"[B, {self.in_channels}, height, width]"
            )
        maps = self.layers(images)
        if maps.shape[2:] != (CELLS, CELLS):
            maps = F.adaptive_avg_pool2d(maps, CELLS)
        embeddings: Tensor = self.norm(self.project(maps.flatten(1)))
        return embeddings


class StrokeNet(DrawingNet):
    """Images of any size to embeddings ``[B, d]``: three halvings, each with residual blocks.

    Norms are over one sample, so that nothing depends on who else is in the batch; activations are
    smooth. Embeddings of a new network resemble one another then. Softmax soon tells them apart,
    but a loss that looks at few classes looks at nearly the same few for everybody, and learns
    little: where there are thousands of classes, let a batch norm end the network, as it does
    networks for faces.

    Args:
        embedding_dim: ``d``.
        in_channels: Of the images.
        width: Channels at half the resolution; doubled by each of the other halvings.
        depth: Residual blocks after each of the other halvings.
        batch_norm: Centre and scale the embeddings by those of the batch.

    Examples:
        >>> import torch
        >>> StrokeNet(64)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        in_channels: int = 1,
        width: int = 32,
        depth: int = 1,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"embedding_dim": embedding_dim, "in_channels": in_channels, "width": width}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} is {size}; it must be at least 1")
        if depth < 0:
            raise ConfigError(f"depth is {depth}; it must be at least 0")
        self.embedding_dim, self.in_channels = embedding_dim, in_channels
        layers: list[nn.Module] = [_halving(in_channels, width, kernel=5)]
        for channels in (2 * width, 4 * width):
            layers.append(_halving(channels // 2, channels, kernel=3))
            layers += [_Residual(channels) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(4 * width * CELLS * CELLS, embedding_dim)
        self.norm = nn.BatchNorm1d(embedding_dim, affine=False) if batch_norm else nn.Identity()


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = _norm(channels)

    def forward(self, maps: Tensor) -> Tensor:
        return maps + F.silu(self.norm(self.convolution(maps)))


def _halving(in_channels: int, channels: int, *, kernel: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride=2, padding=kernel // 2, bias=False),
        _norm(channels),
        nn.SiLU(),
    )


def _norm(channels: int) -> nn.Module:
    groups = channels // CHANNELS_PER_GROUP if channels % CHANNELS_PER_GROUP == 0 else 1
    return nn.GroupNorm(groups, channels)
