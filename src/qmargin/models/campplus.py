"""CAM++: densely connected convolutions over time, masked by what is heard around each frame.

The layers, their names and their first values are those of the network of 3D-Speaker and
WeSpeaker, so that a ``state_dict`` from there loads here.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from qmargin.models.face_parts import no_autocast
from qmargin.models.speaker_parts import SpeakerInput, StatisticsPooling, check_sizes
from qmargin.registry import register_backbone

BLOCKS = ((12, 1), (24, 2), (16, 2))  # layers of each dense block, and their dilation
GROWTH = 32  # channels that a layer adds
INNER = 4 * GROWTH  # channels inside a layer
FIRST = 128  # channels before the first dense block
HEAD_WIDTH = 32
SEGMENT = 100  # frames that share a local mean


def norm_relu(channels: int) -> nn.Sequential:
    """Norm and ReLU under the names of published checkpoints."""
    return nn.Sequential(OrderedDict(batchnorm=nn.BatchNorm1d(channels), relu=nn.ReLU()))


class HeadBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut that may halve the bins, never the frames."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride=(stride, 1), padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut.extend(
                [
                    nn.Conv2d(channels, channels, 1, stride=(stride, 1), bias=False),
                    nn.BatchNorm2d(channels),
                ]
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``[B, C, F, T]`` to ``[B, C, F / stride, T]``."""
        out = self.bn2(self.conv2(self.bn1(self.conv1(inputs)).relu()))
        total: Tensor = (out + self.shortcut(inputs)).relu()
        return total


class Head(nn.Module):
    """A small residual network over bins and frames that leaves an eighth of the bins."""

    def __init__(self, num_bins: int) -> None:
        super().__init__()
        self.out_channels = HEAD_WIDTH * -(-num_bins // 8)
        self.conv1 = nn.Conv2d(1, HEAD_WIDTH, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(HEAD_WIDTH)
        self.layer1, self.layer2 = (
            nn.Sequential(HeadBlock(HEAD_WIDTH, 2), HeadBlock(HEAD_WIDTH, 1)) for _ in range(2)
        )
        self.conv2 = nn.Conv2d(HEAD_WIDTH, HEAD_WIDTH, 3, stride=(2, 1), padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD_WIDTH)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, bins, T]`` to ``[B, out_channels, T]``."""
        out = self.bn1(self.conv1(frames[:, None])).relu()
        out = self.bn2(self.conv2(self.layer2(self.layer1(out)))).relu()
        flat: Tensor = out.flatten(1, 2)
        return flat


class TimeLayer(nn.Module):
    """Convolution over every second frame, norm, ReLU."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(in_channels, channels, 5, stride=2, padding=2, bias=False)
        self.nonlinear = norm_relu(channels)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to ``[B, channels, T / 2]``."""
        out: Tensor = self.nonlinear(self.linear(frames))
        return out


class MaskedConvolution(nn.Module):
    """A convolution times a mask in (0, 1) from the mean of the recording and of the segment."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.linear_local = nn.Conv1d(
            INNER, GROWTH, 3, padding=dilation, dilation=dilation, bias=False
        )
        self.linear1 = nn.Conv1d(INNER, INNER // 2, 1)
        self.linear2 = nn.Conv1d(INNER // 2, GROWTH, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, INNER, T]`` to ``[B, GROWTH, T]``."""
        context = frames.mean(2, keepdim=True) + segment_means(frames)
        mask = self.linear2(self.linear1(context).relu()).sigmoid()
        masked: Tensor = self.linear_local(frames) * mask
        return masked


def segment_means(frames: Tensor, length: int = SEGMENT) -> Tensor:
    """Every frame replaced by the mean of its segment; the last segment may be shorter.

    Examples:
        >>> segment_means(torch.tensor([[[1.0, 3.0, 4.0, 6.0, 9.0]]]), length=2)
        tensor([[[2., 2., 5., 5., 9.]]])
    """
    means = functional.avg_pool1d(frames, length, stride=length, ceil_mode=True)
    spread = means[:, :, :, None].expand(-1, -1, -1, length).flatten(2)
    return spread[:, :, : frames.shape[2]]


class DenseLayer(nn.Module):
    """Norm, narrow to ``INNER`` channels, norm, masked convolution."""

    def __init__(self, in_channels: int, dilation: int) -> None:
        super().__init__()
        self.nonlinear1 = norm_relu(in_channels)
        self.linear1 = nn.Conv1d(in_channels, INNER, 1, bias=False)
        self.nonlinear2 = norm_relu(INNER)
        self.cam_layer = MaskedConvolution(dilation)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to the ``[B, GROWTH, T]`` that this layer adds."""
        out: Tensor = self.cam_layer(self.nonlinear2(self.linear1(self.nonlinear1(frames))))
        return out


class DenseBlock(nn.Module):
    """Layers that each see the input and what every layer before added."""

    def __init__(self, in_channels: int, num_layers: int, dilation: int) -> None:
        super().__init__()
        for index in range(num_layers):
            layer = DenseLayer(in_channels + index * GROWTH, dilation)
            self.add_module(f"tdnnd{index + 1}", layer)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to ``[B, C + GROWTH num_layers, T]``."""
        for layer in self.children():
            frames = torch.cat([frames, layer(frames)], dim=1)
        return frames


class Transition(nn.Module):
    """Norm, ReLU, and half the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nonlinear = norm_relu(channels)
        self.linear = nn.Conv1d(channels, channels // 2, 1, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames ``[B, C, T]`` to ``[B, C / 2, T]``."""
        out: Tensor = self.linear(self.nonlinear(frames))
        return out


class EmbeddingLayer(nn.Module):
    """Projection of the statistics and a norm without weights."""

    def __init__(self, in_channels: int, embedding_dim: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(in_channels, embedding_dim, 1, bias=False)
        norm = nn.BatchNorm1d(embedding_dim, affine=False)
        self.nonlinear = nn.Sequential(OrderedDict(batchnorm=norm))

    def forward(self, statistics: Tensor) -> Tensor:
        """Statistics ``[B, C]`` to embeddings ``[B, d]``."""
        statistics = statistics.to(self.linear.weight.dtype)
        out: Tensor = self.nonlinear(self.linear(statistics[:, :, None])[:, :, 0])
        return out


@register_backbone("campplus")
class CamPlusPlus(nn.Module):
    """Filter banks ``[B, T, num_bins]``, or waveforms, to embeddings ``[B, d]`` of any length.

    Args:
        embedding_dim: ``d``.
        num_bins: Of the filter banks.
        dither: Of waveforms in training, see ``SpeakerInput``.

    Examples:
        >>> with torch.device("meta"):
        ...     network = CamPlusPlus(512)
        >>> sum(parameter.numel() for parameter in network.parameters())
        7176224
    """

    def __init__(
        self,
        embedding_dim: int = 512,
        *,
        num_bins: int = 80,
        dither: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim)
        self.embedding_dim = embedding_dim
        self.frontend = SpeakerInput(num_bins, dither=dither)
        self.head = Head(num_bins)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["tdnn"] = TimeLayer(self.head.out_channels, FIRST)
        channels = FIRST
        for place, (num_layers, dilation) in enumerate(BLOCKS, start=1):
            layers[f"block{place}"] = DenseBlock(channels, num_layers, dilation)
            channels += GROWTH * num_layers
            layers[f"transit{place}"] = Transition(channels)
            channels //= 2
        layers["out_nonlinear"] = norm_relu(channels)
        layers["stats"] = StatisticsPooling(channels)
        layers["dense"] = EmbeddingLayer(2 * channels, embedding_dim)
        self.xvector = nn.Sequential(layers)
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        frames = self.xvector[:-2](self.head(self.frontend(inputs)))
        with no_autocast(frames.device.type):
            embeddings: Tensor = self.xvector[-2:](frames)
        return embeddings
