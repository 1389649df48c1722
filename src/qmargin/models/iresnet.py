"""Face residual networks: 112 x 112 images to embeddings.

The layers, their names and their first values are those of the IResNets that InsightFace trains, so
that a ``state_dict`` from there loads here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.models.face_parts import (
    IMAGE_SIZE,
    check_embedding_dim,
    check_faces,
    check_rate,
    no_autocast,
    recomputed,
)
from qmargin.registry import register_backbone

BLOCKS = {  # residual blocks of each stage, by depth
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    200: (6, 26, 60, 6),
}
CHANNELS = (64, 128, 256, 512)
FEATURE_SIZE = IMAGE_SIZE // 16  # every stage halves it
Shortcut = Literal["projection", "subsample"]
SHORTCUTS = ("projection", "subsample")


class ResidualBlock(nn.Module):
    """Norm, convolution, norm, PReLU, convolution, norm; nothing after the sum."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, shortcut: Shortcut = "projection"
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.prelu = nn.PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if in_channels == channels and stride != 1 and shortcut == "subsample":
            self.downsample = nn.MaxPool2d(1, stride)
        elif stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``[B, C, H, W]`` to ``[B, channels, H / stride, W / stride]``."""
        out = self.prelu(self.bn2(self.conv1(self.bn1(inputs))))
        out = self.bn3(self.conv2(out))
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        total: Tensor = out + shortcut
        return total


class IResNet(nn.Module):
    """Images ``[B, 3, 112, 112]`` to embeddings ``[B, d]`` of any length.

    Convolutions follow the autocast around the call. The last two layers, the projection and its
    norm, always run in the precision of their weights. The last norm's weight is frozen at one.

    Args:
        blocks: Residual blocks of the four stages.
        embedding_dim: ``d``.
        dropout: Before the projection.
        shortcut: Of a block that halves the image and keeps its channels: ``"projection"`` as in
            InsightFace, or ``"subsample"``, every other pixel, as in the IR networks of AdaFace.
        gradient_checkpointing: Keep what enters a block, and make the rest again in the backward
            pass: one more forward pass, less memory, and the same numbers.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        embedding_dim: int = 512,
        *,
        dropout: float = 0.0,
        shortcut: Shortcut = "projection",
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if shortcut not in SHORTCUTS:
            raise ConfigError(f"shortcut is {shortcut!r}; known are {', '.join(SHORTCUTS)}")
        self.embedding_dim = check_embedding_dim(embedding_dim)
        self.gradient_checkpointing = gradient_checkpointing
        self.conv1 = nn.Conv2d(3, CHANNELS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS[0])
        self.prelu = nn.PReLU(CHANNELS[0])
        self.layer1 = _stage(CHANNELS[0], CHANNELS[0], blocks[0], shortcut)
        self.layer2 = _stage(CHANNELS[0], CHANNELS[1], blocks[1], shortcut)
        self.layer3 = _stage(CHANNELS[1], CHANNELS[2], blocks[2], shortcut)
        self.layer4 = _stage(CHANNELS[2], CHANNELS[3], blocks[3], shortcut)
        self.bn2 = nn.BatchNorm2d(CHANNELS[3])
        self.dropout = nn.Dropout(check_rate(dropout, "dropout"))
        self.fc = nn.Linear(CHANNELS[3] * FEATURE_SIZE**2, embedding_dim)
        self.features = nn.BatchNorm1d(embedding_dim)
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        check_faces(images)
        out = self.prelu(self.bn1(self.conv1(images)))
        is_recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            out = recomputed(stage, out) if is_recomputed else stage(out)
        out = self.dropout(self.bn2(out).flatten(1))  # [B, 25088]
        with no_autocast(out.device.type):
            embeddings: Tensor = self.features(self.fc(out.to(self.fc.weight.dtype)))
        return embeddings


def _stage(in_channels: int, channels: int, num_blocks: int, shortcut: Shortcut) -> nn.Sequential:
    """Blocks of one width, the first of which halves the image."""
    first = ResidualBlock(in_channels, channels, 2, shortcut)
    rest = (ResidualBlock(channels, channels, 1) for _ in range(num_blocks - 1))
    return nn.Sequential(first, *rest)


def iresnet(depth: int, embedding_dim: int = 512, **options: Any) -> IResNet:
    """IResNet of a depth, for 112 x 112 faces; for the options see ``IResNet``.

    Examples:
        >>> with torch.device("meta"):
        ...     network = iresnet(100)
        >>> sum(parameter.numel() for parameter in network.parameters())
        65156160
    """
    if depth not in BLOCKS:
        known = ", ".join(map(str, BLOCKS))
        raise ConfigError(f"depth is {depth!r}; known depths are {known}")
    return IResNet(BLOCKS[depth], embedding_dim, **options)


for _depth in BLOCKS:
    register_backbone(f"iresnet{_depth}", partial(iresnet, _depth))
