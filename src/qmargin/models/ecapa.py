"""ECAPA-TDNN: convolutions over time whose channels look at each other at several scales.

The layers and their names are those of the networks that WeSpeaker trains, with attention that
sees the whole recording, so that a ``state_dict`` from there loads here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.models.face_parts import no_autocast
from qmargin.models.speaker_parts import AttentiveStatisticsPooling, SpeakerInput, check_sizes
from qmargin.registry import register_backbone

WIDTHS = (512, 1024)  # published sizes
DILATIONS = (2, 3, 4)  # of the three residual blocks
NUM_SCALES = 8  # groups of channels of a block, each seeing further than the one before
MIXED = 1536  # channels that are pooled, whatever the width
SQUEEZED = 128  # channels that decide how much each channel counts


class TimeConvolution(nn.Module):
    """Convolution over time, ReLU, norm, in this order."""

    def __init__(self, in_channels: int, channels: int, size: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, channels, size, padding=size // 2)
        self.bn = nn.BatchNorm1d(channels)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to ``[B, channels, T]``."""
        out: Tensor = self.bn(self.conv(frames).relu())
        return out


class ScaledConvolution(nn.Module):
    """Groups of channels in a row: each is convolved after the group before is added to it."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.width = channels // NUM_SCALES
        self.convs = nn.ModuleList(
            nn.Conv1d(self.width, self.width, 3, padding=dilation, dilation=dilation)
            for _ in range(NUM_SCALES - 1)
        )
        self.bns = nn.ModuleList(nn.BatchNorm1d(self.width) for _ in range(NUM_SCALES - 1))

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to the same shape; the last group is left as it is."""
        *groups, last = frames.split(self.width, dim=1)
        done: list[Tensor] = []
        for group, conv, bn in zip(groups, self.convs, self.bns, strict=True):
            group = group + done[-1] if done else group
            done.append(bn(conv(group).relu()))
        return torch.cat([*done, last], dim=1)


class ChannelGate(nn.Module):
    """Every channel times a number in (0, 1) that follows from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, SQUEEZED)
        self.linear2 = nn.Linear(SQUEEZED, channels)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to the same shape."""
        gate = self.linear2(self.linear1(frames.mean(2)).relu()).sigmoid()
        gated: Tensor = frames * gate[:, :, None]
        return gated


class EcapaBlock(nn.Module):
    """Residual block: mix channels, look along time at several scales, mix, gate."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.se_res2block = nn.Sequential(
            TimeConvolution(channels, channels),
            ScaledConvolution(channels, dilation),
            TimeConvolution(channels, channels),
            ChannelGate(channels),
        )

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to the same shape."""
        out: Tensor = frames + self.se_res2block(frames)
        return out


class EcapaTdnn(nn.Module):
    """Filter banks ``[B, T, num_bins]``, or waveforms, to embeddings ``[B, d]`` of any length.

    Args:
        embedding_dim: ``d``.
        width: Channels, a multiple of 8; 512 and 1024 are the published sizes.
        num_bins: Of the filter banks.
        has_context: Whether the pooling's attention sees the whole recording.
        dither: Of waveforms in training, see ``SpeakerInput``.

    Examples:
        >>> with torch.device("meta"):
        ...     network = EcapaTdnn(192, width=512)
        >>> sum(parameter.numel() for parameter in network.parameters())
        6190720
    """

    def __init__(
        self,
        embedding_dim: int = 192,
        *,
        width: int = 512,
        num_bins: int = 80,
        has_context: bool = True,
        dither: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, width=width)
        if width % NUM_SCALES:
            raise ConfigError(f"width is {width}; it must be a multiple of {NUM_SCALES}")
        self.embedding_dim = embedding_dim
        self.frontend = SpeakerInput(num_bins, dither=dither)
        self.layer1 = TimeConvolution(num_bins, width, size=5)
        self.layer2, self.layer3, self.layer4 = (
            EcapaBlock(width, dilation) for dilation in DILATIONS
        )
        self.conv = nn.Conv1d(3 * width, MIXED, 1)
        self.pool = AttentiveStatisticsPooling(MIXED, has_context=has_context)
        self.bn = nn.BatchNorm1d(self.pool.output_dim)
        self.linear = nn.Linear(self.pool.output_dim, embedding_dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        out = self.layer1(self.frontend(inputs))
        outs = []
        for block in (self.layer2, self.layer3, self.layer4):
            out = block(out)
            outs.append(out)
        frames = self.conv(torch.cat(outs, dim=1)).relu()  # [B, MIXED, T]
        with no_autocast(frames.device.type):
            embeddings: Tensor = self.linear(self.bn(self.pool(frames)))
        return embeddings


for _width in WIDTHS:
    register_backbone(f"ecapa{_width}", partial(EcapaTdnn, width=_width))
