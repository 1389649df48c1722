"""Residual networks over filter banks: recordings to embeddings.

The layers, their names and their first values are those of the ResNets that WeSpeaker trains, so
that a ``state_dict`` from there loads here. An image of bins and frames is halved three times in
both directions; there is no pooling before the end.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.models.face_parts import no_autocast
from qmargin.models.speaker_parts import PoolingKind, SpeakerInput, check_sizes, create_pooling
from qmargin.registry import register_backbone

BLOCKS = {  # blocks of each stage, and convolutions of a block, by depth
    18: ((2, 2, 2, 2), 2),
    34: ((3, 4, 6, 3), 2),
    50: ((3, 4, 6, 3), 3),
    101: ((3, 4, 23, 3), 3),
}
EXPANSION = 4  # channels of a block of three convolutions, over those inside it
STRIDES = (1, 2, 2, 2)  # of the stages, over bins and frames alike


class SpeakerBlock(nn.Module):
    """Two convolutions of 3 x 3, or 1 x 1, 3 x 3 and 1 x 1; ReLU after the sum.

    Args:
        in_channels: Of the input.
        channels: Inside the block.
        stride: Of the first 3 x 3 convolution.
        num_convolutions: Two or three; with three the output has four times ``channels``.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int, *, num_convolutions: int = 2
    ) -> None:
        super().__init__()
        is_narrow = num_convolutions == 3
        self.out_channels = EXPANSION * channels if is_narrow else channels
        widths = [in_channels, channels, channels, self.out_channels][: num_convolutions + 1]
        sizes, strides = ((1, 3, 1), (1, stride, 1)) if is_narrow else ((3, 3), (stride, 1))
        self.num_convolutions = num_convolutions
        for place, (size, step) in enumerate(zip(sizes, strides, strict=True)):
            width = widths[place + 1]
            convolution = nn.Conv2d(
                widths[place], width, size, stride=step, padding=size // 2, bias=False
            )
            self.add_module(f"conv{place + 1}", convolution)
            self.add_module(f"bn{place + 1}", nn.BatchNorm2d(width))
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != self.out_channels:
            self.shortcut.extend(
                [
                    nn.Conv2d(in_channels, self.out_channels, 1, stride=stride, bias=False),
                    nn.BatchNorm2d(self.out_channels),
                ]
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``[B, C, F, T]`` to ``[B, out_channels, F / stride, T / stride]``."""
        out = inputs
        for place in range(1, self.num_convolutions + 1):
            out = self.get_submodule(f"bn{place}")(self.get_submodule(f"conv{place}")(out))
            if place < self.num_convolutions:
                out = out.relu()
        total: Tensor = (out + self.shortcut(inputs)).relu()
        return total


class SpeakerResNet(nn.Module):
    """Filter banks ``[B, T, num_bins]``, or waveforms, to embeddings ``[B, d]`` of any length.

    Convolutions follow the autocast around the call; pooling and projection never do.

    Args:
        blocks: Blocks of the four stages.
        embedding_dim: ``d``.
        num_convolutions: Of a block, two or three.
        width: Channels of the first stage; doubled by each of the others.
        num_bins: Of the filter banks.
        pooling: ``"statistics"`` or ``"attentive"``.
        embedding_norm: A batch norm without weights after the last layer, as CAM++ has one. The
            published networks have none: statistics are positive, so that embeddings begin in one
            direction, which a long warm-up outlives and a short run does not.
        dither: Of waveforms in training, see ``SpeakerInput``.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        embedding_dim: int = 256,
        *,
        num_convolutions: int = 2,
        width: int = 32,
        num_bins: int = 80,
        pooling: PoolingKind = "statistics",
        embedding_norm: bool = False,
        dither: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, width=width)
        self.embedding_dim = embedding_dim
        self.frontend = SpeakerInput(num_bins, dither=dither)
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for place, (num_blocks, stride) in enumerate(zip(blocks, STRIDES, strict=True)):
            stage = []
            for index in range(num_blocks):
                block = SpeakerBlock(
                    channels,
                    width << place,
                    stride if index == 0 else 1,
                    num_convolutions=num_convolutions,
                )
                channels = block.out_channels
                stage.append(block)
            self.add_module(f"layer{place + 1}", nn.Sequential(*stage))
        self.pool = create_pooling(pooling, channels * -(-num_bins // 8))
        self.seg_1 = nn.Linear(self.pool.output_dim, embedding_dim)
        norm = nn.BatchNorm1d(embedding_dim, affine=False) if embedding_norm else nn.Identity()
        self.seg_bn_1 = norm

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        out = self.frontend(inputs)[:, None]  # [B, 1, bins, T]
        out = self.bn1(self.conv1(out)).relu()
        for place in range(1, len(STRIDES) + 1):
            out = self.get_submodule(f"layer{place}")(out)
        with no_autocast(out.device.type):
            statistics = self.pool(out)
            embeddings: Tensor = self.seg_bn_1(self.seg_1(statistics.to(self.seg_1.weight.dtype)))
        return embeddings


def speaker_resnet(
    depth: int,
    embedding_dim: int = 256,
    *,
    width: int = 32,
    num_bins: int = 80,
    pooling: PoolingKind = "statistics",
    embedding_norm: bool = False,
    dither: float = 0.0,
) -> SpeakerResNet:
    """Speaker ResNet of a depth; see ``SpeakerResNet`` for the options.

    Examples:
        >>> import torch
        >>> with torch.device("meta"):
        ...     network = speaker_resnet(34)
        >>> sum(parameter.numel() for parameter in network.parameters())
        6634336
    """
    if depth not in BLOCKS:
        known = ", ".join(map(str, BLOCKS))
        raise ConfigError(f"depth is {depth!r}; known depths are {known}")
    blocks, num_convolutions = BLOCKS[depth]
    return SpeakerResNet(
        blocks,
        embedding_dim,
        num_convolutions=num_convolutions,
        width=width,
        num_bins=num_bins,
        pooling=pooling,
        embedding_norm=embedding_norm,
        dither=dither,
    )


for _depth in BLOCKS:
    register_backbone(f"speaker_resnet{_depth}", partial(speaker_resnet, _depth))
