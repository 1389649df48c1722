"""Networks for speech: residual networks, ECAPA-TDNN and CAM++, and their shared layers.

Layers, names and initial values are those of WeSpeaker (for CAM++ also 3D-Speaker), so that its
``state_dict`` loads here. Convolutions follow autocast; pooling and projection never do.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.features import FilterBank
from qmargin.models.layers import SHAPE, check_sizes, no_autocast, refuse
from qmargin.registry import register_backbone

LEAST_FRAMES = 9  # three halvings leave two frames, the fewest that have a deviation
LEAST_VARIANCE = 1e-7  # keeps the slope of the square root finite for constant channels


class SpeakerInput(nn.Module):
    """Waveforms or filter banks to frames ``[B, num_bins, T]``; it has no state.

    From waveforms ``[B, samples]`` in [-1, 1] at 16 kHz it computes filter banks and subtracts
    their mean over time. Filter banks ``[B, T, num_bins]`` are used unchanged: subtract the mean
    before. ``dither`` is noise on waveforms in training, in steps of 16-bit audio.
    """

    def __init__(self, num_bins: int = 80, *, dither: float = 0.0) -> None:
        super().__init__()
        self.num_bins = num_bins
        with torch.device("cpu"):  # its constants are computed, which the meta device cannot
            self.filter_bank = FilterBank(num_bins=num_bins, dither=dither, subtract_mean=True)

    def forward(self, inputs: Tensor) -> Tensor:
        if (refused := self.check(inputs)) is not None:
            return refused
        features = self.filter_bank(inputs) if inputs.dim() == 2 else inputs
        return features.transpose(1, 2)

    def check(self, inputs: Tensor) -> Tensor | None:
        """Refuse other shapes and short recordings, see ``layers.refuse``."""
        least = LEAST_FRAMES
        if inputs.dim() == 2:
            if (refused := self.filter_bank.check(inputs)) is not None:
                return refused
            least = self.filter_bank.num_samples(LEAST_FRAMES)
        elif inputs.dim() != 3 or inputs.shape[2] != self.num_bins:
            wanted = f"waveforms [B, samples] or filter banks [B, frames, {self.num_bins}]"
            return refuse(inputs, f"inputs have shape {SHAPE}; this network takes {wanted}")
        if inputs.shape[1] >= least:
            return None
        samples = self.filter_bank.num_samples(LEAST_FRAMES)
        wanted = f"at least {LEAST_FRAMES} frames ({samples:,} samples), repeat the recording"
        return refuse(inputs, f"inputs have shape {SHAPE}; this network takes {wanted}")


class StatisticsPooling(nn.Module):
    r"""Mean and deviation of every channel over time, ``[B, 2 C]`` (TSTP).

    .. math:: \left[\bar x, \sqrt{\operatorname{var} x + 10^{-7}}\right]

    with the unbiased variance, so that two frames are the fewest.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_channels, self.output_dim = num_channels, 2 * num_channels

    def forward(self, frames: Tensor) -> Tensor:
        frames = _flat(frames, self.num_channels)
        frames = frames.to(torch.promote_types(frames.dtype, torch.float32))  # [B, C, T]
        return torch.cat([frames.mean(2), _deviation(frames)], dim=1)


class AttentiveStatisticsPooling(nn.Module):
    r"""Mean and deviation under weights that every channel gives to the frames, ``[B, 2 C]``.

    .. math::

        w = \operatorname{softmax}_t\!\left(V \tanh(W h_t + b) + k\right), \qquad
        \mu = \sum_t w_t x_t, \quad \sigma^2 = \sum_t w_t (x_t - \mu)^2

    where :math:`h_t` is the frame, with the mean and the deviation of the whole recording below it
    if ``has_context`` is set, as in ECAPA-TDNN.
    """

    def __init__(
        self, num_channels: int, *, bottleneck_dim: int = 128, has_context: bool = False
    ) -> None:
        super().__init__()
        self.num_channels, self.output_dim = num_channels, 2 * num_channels
        self.has_context = has_context
        num_inputs = 3 * num_channels if has_context else num_channels
        self.linear1 = nn.Conv1d(num_inputs, bottleneck_dim, 1)
        self.linear2 = nn.Conv1d(bottleneck_dim, num_channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        frames = _flat(frames, self.num_channels)
        with no_autocast(frames.device.type):
            frames = frames.to(self.linear1.weight.dtype)  # [B, C, T]
            context = [frames]
            if self.has_context:
                statistics = frames.mean(2), _deviation(frames)
                context += [each[:, :, None].expand_as(frames) for each in statistics]
            hidden = torch.tanh(self.linear1(torch.cat(context, dim=1)))
            weights = self.linear2(hidden).softmax(2)  # [B, C, T]
            mean = (weights * frames).sum(2)
            variance = (weights * (frames - mean[:, :, None]).square()).sum(2)
            return torch.cat([mean, variance.clamp(min=LEAST_VARIANCE).sqrt()], dim=1)


def _deviation(frames: Tensor) -> Tensor:
    return (frames.var(2) + LEAST_VARIANCE).sqrt()


def _flat(frames: Tensor, num_channels: int) -> Tensor:
    """Frames ``[B, C, T]`` or ``[B, C, F, T]`` as ``[B, num_channels, T]``."""
    flat = frames.flatten(1, 2) if frames.dim() == 4 else frames
    if flat.dim() != 3 or flat.shape[1] != num_channels or flat.shape[2] < 2:
        raise ShapeError(
            f"frames have shape {tuple(frames.shape)}; this pooling takes {num_channels} channels "
            "and at least 2 frames, time last"
        )
    return flat


PoolingKind = Literal["statistics", "attentive"]
POOLINGS: dict[str, type[StatisticsPooling | AttentiveStatisticsPooling]] = {
    "statistics": StatisticsPooling,
    "attentive": AttentiveStatisticsPooling,
}


class SpeakerBlock(nn.Module):
    """Two 3 x 3 convolutions, or 1 x 1, 3 x 3 and a four times wider 1 x 1; ReLU after the sum."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int | tuple[int, int],  # over bins and frames
        *,
        num_convolutions: int = 2,
    ) -> None:
        super().__init__()
        units = [(channels, 3, stride), (channels, 3, 1)]
        if num_convolutions == 3:
            units = [(channels, 1, 1), (channels, 3, stride), (4 * channels, 1, 1)]
        width = in_channels
        for place, (out, size, step) in enumerate(units, start=1):
            if place > 1:
                self.add_module(f"relu{place - 1}", nn.ReLU())
            convolution = nn.Conv2d(width, out, size, step, padding=size // 2, bias=False)
            self.add_module(f"conv{place}", convolution)
            self.add_module(f"bn{place}", nn.BatchNorm2d(out))
            width = out
        self.out_channels = width
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != width:
            self.shortcut.append(nn.Conv2d(in_channels, width, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(width))

    def forward(self, inputs: Tensor) -> Tensor:
        *layers, shortcut = self.children()
        out = inputs
        for layer in layers:
            out = layer(out)
        return torch.relu(out + shortcut(inputs))


class SpeakerResNet(nn.Module):
    """ResNet: filter banks ``[B, T, num_bins]``, or waveforms, to embeddings ``[B, d]``.

    ``embedding_norm`` is a batch norm without weights after the last layer, as in CAM++. The
    published networks have none: statistics are positive, so embeddings of a new network share a
    direction, which a short run does not remove.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],  # of the stages; all but the first halve the input
        embedding_dim: int = 256,
        *,
        num_convolutions: int = 2,  # of a block, two or three
        width: int = 32,  # channels of the first stage; doubled by each of the others
        num_bins: int = 80,
        pooling: PoolingKind = "statistics",
        embedding_norm: bool = False,
        dither: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, width=width)
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling is {pooling!r}; known are {', '.join(POOLINGS)}")
        self.embedding_dim = embedding_dim
        self.frontend = SpeakerInput(num_bins, dither=dither)
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for place, num_blocks in enumerate(blocks):
            stage = nn.Sequential()
            for index in range(num_blocks):
                stride = 2 if place > 0 and index == 0 else 1
                block = SpeakerBlock(
                    channels, width << place, stride, num_convolutions=num_convolutions
                )
                channels = block.out_channels
                stage.append(block)
            self.add_module(f"layer{place + 1}", stage)
        self.pool = POOLINGS[pooling](channels * -(-num_bins // 8))
        self.seg_1 = nn.Linear(self.pool.output_dim, embedding_dim)
        norm = nn.BatchNorm1d(embedding_dim, affine=False) if embedding_norm else nn.Identity()
        self.seg_bn_1 = norm

    def forward(self, inputs: Tensor) -> Tensor:
        if (refused := self.frontend.check(inputs)) is not None:
            return refused
        out = self.bn1(
            self.conv1(self.frontend(inputs)[:, None].contiguous())
        ).relu()  # [B, width, bins, T]
        for place in range(1, 5):
            out = self.get_submodule(f"layer{place}")(out)
        with no_autocast(out.device.type):
            statistics = self.pool(out)
            embeddings: Tensor = self.seg_bn_1(self.seg_1(statistics.to(self.seg_1.weight.dtype)))
        return embeddings


for _depth, _blocks, _number in (
    (18, (2, 2, 2, 2), 2),
    (34, (3, 4, 6, 3), 2),
    (50, (3, 4, 6, 3), 3),
    (101, (3, 4, 23, 3), 3),
):
    _maker = partial(SpeakerResNet, _blocks, num_convolutions=_number)
    register_backbone(f"speaker_resnet{_depth}", _maker)


NUM_SCALES = 8  # groups of channels of a block, with growing receptive fields
MIXED = 1536  # channels that are pooled in the published networks
SQUEEZED = 128  # channels that decide how much each channel counts


def time_convolution(in_channels: int, channels: int, size: int = 1) -> nn.Sequential:
    """Convolution over time, ReLU, norm, in this order: ``[B, C, T]`` to ``[B, channels, T]``."""
    conv = nn.Conv1d(in_channels, channels, size, padding=size // 2)
    return nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU(), bn=nn.BatchNorm1d(channels)))


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
        *groups, last = frames.split(self.width, dim=1)
        done: list[Tensor] = []
        for group, conv, bn in zip(groups, self.convs, self.bns, strict=True):
            group = group + done[-1] if done else group
            done.append(bn(conv(group).relu()))
        return torch.cat([*done, last], dim=1)


class ChannelGate(nn.Module):
    """Squeeze-and-excitation: scale each channel by a number in (0, 1) from all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, SQUEEZED)
        self.linear2 = nn.Linear(SQUEEZED, channels)

    def forward(self, frames: Tensor) -> Tensor:
        gate = self.linear2(self.linear1(frames.mean(2)).relu()).sigmoid()
        return torch.mul(frames, gate[:, :, None])


class EcapaBlock(nn.Module):
    """Residual block: mix channels, convolve in time at several scales, mix, gate."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.se_res2block = nn.Sequential(
            time_convolution(channels, channels),
            ScaledConvolution(channels, dilation),
            time_convolution(channels, channels),
            ChannelGate(channels),
        )

    def forward(self, frames: Tensor) -> Tensor:
        return torch.add(frames, self.se_res2block(frames))


class EcapaTdnn(nn.Module):
    """ECAPA-TDNN: filter banks ``[B, T, num_bins]``, or waveforms, to embeddings ``[B, d]``."""

    def __init__(
        self,
        embedding_dim: int = 192,
        *,
        width: int = 512,  # a multiple of 8; 512 and 1024 are the published sizes
        mixed: int = MIXED,  # channels that are pooled
        num_bins: int = 80,
        has_context: bool = True,  # whether the pooling's attention sees the whole recording
        dither: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, width=width, mixed=mixed)
        if width % NUM_SCALES:
            raise ConfigError(f"width is {width}; it must be a multiple of {NUM_SCALES}")
        self.embedding_dim = embedding_dim
        self.frontend = SpeakerInput(num_bins, dither=dither)
        self.layer1 = time_convolution(num_bins, width, size=5)
        self.layer2, self.layer3, self.layer4 = (
            EcapaBlock(width, dilation) for dilation in (2, 3, 4)
        )
        self.conv = nn.Conv1d(3 * width, mixed, 1)
        self.pool = AttentiveStatisticsPooling(mixed, has_context=has_context)
        self.bn = nn.BatchNorm1d(self.pool.output_dim)
        self.linear = nn.Linear(self.pool.output_dim, embedding_dim)

    def forward(self, inputs: Tensor) -> Tensor:
        if (refused := self.frontend.check(inputs)) is not None:
            return refused
        second = self.layer2(self.layer1(self.frontend(inputs)))
        third = self.layer3(second)
        outs = [second, third, self.layer4(third)]
        frames = self.conv(torch.cat(outs, dim=1)).relu()  # [B, mixed, T]
        with no_autocast(frames.device.type):
            embeddings: Tensor = self.linear(self.bn(self.pool(frames)))
        return embeddings


for _width in (512, 1024):
    register_backbone(f"ecapa{_width}", partial(EcapaTdnn, width=_width))


GROWTH = 32  # channels that a layer adds
INNER = 4 * GROWTH  # channels inside a layer
SEGMENT = 100  # frames that share a local mean


def norm_relu(channels: int) -> nn.Sequential:
    """Norm and ReLU under the names of published checkpoints."""
    return nn.Sequential(OrderedDict(batchnorm=nn.BatchNorm1d(channels), relu=nn.ReLU()))


def head(width: int) -> nn.Sequential:
    """A small residual network over ``[B, 1, bins, T]`` that leaves an eighth of the bins."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(1, width, 3, padding=1, bias=False)
    layers["bn1"], layers["relu1"] = nn.BatchNorm2d(width), nn.ReLU()
    for name in ("layer1", "layer2"):
        first, second = (SpeakerBlock(width, width, stride) for stride in ((2, 1), 1))
        layers[name] = nn.Sequential(first, second)
    layers["conv2"] = nn.Conv2d(width, width, 3, stride=(2, 1), padding=1, bias=False)
    layers["bn2"], layers["relu2"] = nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(layers)


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


def dense_layer(in_channels: int, dilation: int) -> nn.Sequential:
    """Norm, narrow to ``INNER`` channels, norm, masked convolution to ``GROWTH`` channels."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["nonlinear1"] = norm_relu(in_channels)
    layers["linear1"] = nn.Conv1d(in_channels, INNER, 1, bias=False)
    layers["nonlinear2"] = norm_relu(INNER)
    layers["cam_layer"] = MaskedConvolution(dilation)
    return nn.Sequential(layers)


class DenseBlock(nn.Module):
    """Densely connected layers: each sees the input and the outputs of all earlier layers."""

    def __init__(self, in_channels: int, num_layers: int, dilation: int) -> None:
        super().__init__()
        for index in range(num_layers):
            layer = dense_layer(in_channels + index * GROWTH, dilation)
            self.add_module(f"tdnnd{index + 1}", layer)

    def forward(self, frames: Tensor) -> Tensor:
        for layer in self.children():
            frames = torch.cat([frames, layer(frames)], dim=1)
        return frames


@register_backbone("campplus")
class CamPlusPlus(nn.Module):
    """CAM++: filter banks ``[B, T, num_bins]``, or waveforms, to embeddings ``[B, d]``."""

    def __init__(
        self, embedding_dim: int = 512, *, num_bins: int = 80, dither: float = 0.0
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim)
        self.embedding_dim = embedding_dim
        self.frontend = SpeakerInput(num_bins, dither=dither)
        self.head = head(32)
        in_channels, channels = 32 * -(-num_bins // 8), 128
        conv = nn.Conv1d(in_channels, channels, 5, stride=2, padding=2, bias=False)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["tdnn"] = nn.Sequential(OrderedDict(linear=conv, nonlinear=norm_relu(channels)))
        for place, (num_layers, dilation) in enumerate(((12, 1), (24, 2), (16, 2)), start=1):
            layers[f"block{place}"] = DenseBlock(channels, num_layers, dilation)
            channels += GROWTH * num_layers
            norm = norm_relu(channels)
            conv = nn.Conv1d(channels, channels // 2, 1, bias=False)
            layers[f"transit{place}"] = nn.Sequential(OrderedDict(nonlinear=norm, linear=conv))
            channels //= 2
        layers["out_nonlinear"] = norm_relu(channels)
        layers["stats"] = StatisticsPooling(channels)
        conv = nn.Conv1d(2 * channels, embedding_dim, 1, bias=False)
        norm = nn.Sequential(OrderedDict(batchnorm=nn.BatchNorm1d(embedding_dim, affine=False)))
        layers["dense"] = nn.Sequential(
            OrderedDict(linear=conv, flatten=nn.Flatten(), nonlinear=norm)
        )
        self.xvector = nn.Sequential(layers)
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        if (refused := self.frontend.check(inputs)) is not None:
            return refused
        *layers, pool, dense = self.xvector
        frames = self.head(self.frontend(inputs)[:, None].contiguous()).flatten(1, 2)
        for layer in layers:
            frames = layer(frames)
        with no_autocast(frames.device.type):
            statistics = pool(frames).to(next(dense.parameters()).dtype)
            embeddings: Tensor = dense(statistics[:, :, None])
        return embeddings
