"""Small networks for trial runs, drawings and the demo."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.models.layers import SHAPE, check_sizes, refuse
from qmargin.registry import register_backbone

CELLS = 4  # side of the last map: the place of a stroke matters as much as its form
CHANNELS_PER_GROUP = 16


def _check_images(images: Tensor, in_channels: int) -> Tensor | None:
    if images.dim() == 4 and images.shape[1] == in_channels:
        return None
    wanted = f"this network takes images [B, {in_channels}, height, width]"
    return refuse(images, f"inputs have shape {SHAPE}; {wanted}")


@register_backbone("small_mlp")
class SmallMLP(nn.Module):
    """Vectors ``[B, input_dim]`` to embeddings ``[B, d]`` by two layers."""

    def __init__(self, embedding_dim: int, *, input_dim: int = 32, hidden_dim: int = 64) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, input_dim=input_dim, hidden_dim=hidden_dim)
        self.embedding_dim, self.input_dim = embedding_dim, input_dim
        self.layers = nn.Sequential(
            nn.Linear(input_dim, hidden_dim),
            nn.LayerNorm(hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, embedding_dim),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        if vectors.dim() != 2 or vectors.shape[1] != self.input_dim:
            wanted = f"this network takes [B, {self.input_dim}], set its option input_dim"
            return refuse(vectors, f"inputs have shape {SHAPE}; {wanted}")
        embeddings: Tensor = self.layers(vectors)
        return embeddings


@register_backbone("small_conv")
class SmallConv(nn.Module):
    """Images of any size to embeddings ``[B, d]`` by three convolutions.

    ``width`` is the channels of the first convolution; each of the others doubles them.
    """

    def __init__(self, embedding_dim: int, *, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, in_channels=in_channels, width=width)
        self.embedding_dim, self.in_channels = embedding_dim, in_channels
        self.layers = nn.Sequential()
        for channels in (width, 2 * width, 4 * width):
            conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
            self.layers.extend([conv, nn.GroupNorm(1, channels), nn.SiLU()])
            in_channels = channels
        self.project = nn.Linear(in_channels, embedding_dim)

    def forward(self, images: Tensor) -> Tensor:
        if (refused := _check_images(images, self.in_channels)) is not None:
            return refused
        embeddings: Tensor = self.project(self.layers(images).mean((2, 3)))
        return embeddings


class DrawingNet(nn.Module):
    """Base of networks for drawings: layers to maps, maps of 4 x 4 cells to embeddings."""

    def __init__(
        self, embedding_dim: int, in_channels: int, layers: nn.Sequential, channels: int, norm: bool
    ) -> None:
        super().__init__()
        self.embedding_dim, self.in_channels = embedding_dim, in_channels
        self.layers = layers
        self.project = nn.Linear(channels * CELLS * CELLS, embedding_dim)
        self.norm = nn.BatchNorm1d(embedding_dim, affine=False) if norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if (refused := _check_images(images, self.in_channels)) is not None:
            return refused
        maps = self.layers(images)
        if maps.shape[2:] != (CELLS, CELLS):
            maps = F.adaptive_avg_pool2d(maps, CELLS)
        embeddings: Tensor = self.norm(self.project(maps.flatten(1)))
        return embeddings


@register_backbone("stroke_net")
class StrokeNet(DrawingNet):
    """Images of any size to embeddings ``[B, d]``: three halvings, each with residual blocks.

    Norms are over one sample and activations are smooth, so that embeddings of a new network
    resemble one another. Softmax soon separates them, but a sparse loss weighs nearly the same few
    classes for every sample and learns little: with thousands of classes, set ``batch_norm``.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        in_channels: int = 1,
        width: int = 32,  # channels at half the resolution; doubled by the other halvings
        depth: int = 1,  # residual blocks after each of the other halvings
        batch_norm: bool = False,  # of the embeddings
    ) -> None:
        check_sizes(embedding_dim=embedding_dim, in_channels=in_channels, width=width)
        if depth < 0:
            raise ConfigError(f"depth is {depth}; it must be at least 0")
        layers = nn.Sequential(_halving(in_channels, width, kernel=5))
        for channels in (2 * width, 4 * width):
            layers.append(_halving(channels // 2, channels, kernel=3))
            layers.extend(_Residual(channels) for _ in range(depth))
        super().__init__(embedding_dim, in_channels, layers, 4 * width, batch_norm)


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
    """Images of any size to embeddings ``[B, d]``: batch norms, and full resolution once.

    On Omniglot's other alphabets it is better than ``StrokeNet`` of the same width, which costs
    less. ``width`` is the channels at full and half the resolution, ``depth`` the residual blocks
    of each resolution below the full.
    """

    def __init__(
        self, embedding_dim: int, *, in_channels: int = 1, width: int = 64, depth: int = 2
    ) -> None:
        check_sizes(embedding_dim=embedding_dim, in_channels=in_channels, width=width, depth=depth)
        layers = nn.Sequential(_convolution(in_channels, width), nn.ReLU())
        previous = width
        for channels in (width, 2 * width, 4 * width):
            layers.append(_Block(previous, channels, stride=2))
            layers.extend(_Block(channels, channels) for _ in range(depth - 1))
            previous = channels
        super().__init__(embedding_dim, in_channels, layers, previous, True)


class _Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.first = _convolution(in_channels, channels, stride=stride)
        self.second = _convolution(channels, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = _convolution(in_channels, channels, 1, stride=stride)

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(maps))) + self.shortcut(maps))


def _convolution(in_channels: int, channels: int, kernel: int = 3, *, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
    )
