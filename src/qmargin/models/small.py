"""Small networks for trial runs, drawings and the demo."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.registry import register_backbone


@register_backbone("small_mlp")
class SmallMLP(nn.Module):
    """Vectors to embeddings ``[B, d]`` by two layers.

    Args:
        embedding_dim: ``d``.
        input_dim: Length of the vectors.
        hidden_dim: Width of the layer between.
    """

    def __init__(self, embedding_dim: int, *, input_dim: int = 32, hidden_dim: int = 64) -> None:
        super().__init__()
        _check_sizes(embedding_dim=embedding_dim, input_dim=input_dim, hidden_dim=hidden_dim)
        self.embedding_dim, self.input_dim = embedding_dim, input_dim
        self.layers = nn.Sequential(
            nn.Linear(input_dim, hidden_dim),
            nn.LayerNorm(hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, embedding_dim),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        if vectors.dim() != 2 or vectors.shape[1] != self.input_dim:
            raise ShapeError(
                f"inputs have shape {tuple(vectors.shape)}; this network takes "
                f"[B, {self.input_dim}], set its option input_dim"
            )
        embeddings: Tensor = self.layers(vectors)
        return embeddings


@register_backbone("small_conv")
class SmallConv(nn.Module):
    """Images of any size to embeddings ``[B, d]`` by three convolutions.

    Args:
        embedding_dim: ``d``.
        in_channels: Of the images.
        width: Channels of the first convolution; doubled by each of the others.
    """

    def __init__(self, embedding_dim: int, *, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        _check_sizes(embedding_dim=embedding_dim, in_channels=in_channels, width=width)
        self.embedding_dim, self.in_channels = embedding_dim, in_channels
        layers: list[nn.Module] = []
        for channels in (width, 2 * width, 4 * width):
            layers += [
                nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(1, channels),
                nn.SiLU(),
            ]
            in_channels = channels
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(in_channels, embedding_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ShapeError(
                f"inputs have shape {tuple(images.shape)}; this network takes images "
                f"[B, {self.in_channels}, height, width]"
            )
        embeddings: Tensor = self.project(self.layers(images).mean((2, 3)))
        return embeddings


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")


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


@register_backbone("stroke_net")
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


@register_backbone("stroke_resnet")
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
