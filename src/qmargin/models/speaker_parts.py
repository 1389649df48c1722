"""What speaker networks share: their input, and pooling over time."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.face_parts import no_autocast
from qmargin.models.features import FilterBank

LEAST_FRAMES = 9  # three halvings leave two frames, the fewest that have a deviation


class SpeakerInput(nn.Module):
    """Waveforms or filter banks to frames ``[B, num_bins, T]``.

    Of waveforms ``[B, samples]`` in [-1, 1] at 16 kHz it computes the filter banks, wherever the
    network is, and subtracts their mean over time. Filter banks ``[B, T, num_bins]`` are taken as
    they are: subtract the mean over time before. It has no parameters and nothing in its state.

    Args:
        num_bins: Of the filter banks.
        dither: Noise on waveforms in training, in steps of 16-bit audio.

    Examples:
        >>> frontend = SpeakerInput()
        >>> frontend(torch.zeros(2, 32240)).shape, frontend(torch.zeros(2, 200, 80)).shape
        (torch.Size([2, 80, 200]), torch.Size([2, 80, 200]))
    """

    def __init__(self, num_bins: int = 80, *, dither: float = 0.0) -> None:
        super().__init__()
        self.num_bins = num_bins
        with torch.device("cpu"):  # its constants are computed, which the meta device cannot
            self.filter_bank = FilterBank(num_bins=num_bins, dither=dither, subtract_mean=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Frames ``[B, num_bins, T]``."""
        features = self.filter_bank(inputs) if inputs.dim() == 2 else inputs
        if features.dim() != 3 or features.shape[2] != self.num_bins:
            raise ShapeError(
                f"inputs have shape {tuple(inputs.shape)}; this network takes waveforms "
                f"[B, samples] or filter banks [B, frames, {self.num_bins}]"
            )
        if features.shape[1] < LEAST_FRAMES:
            raise ShapeError(
                f"inputs have shape {tuple(inputs.shape)}, which is {features.shape[1]} frames; "
                f"at least {LEAST_FRAMES} are needed, repeat the recording"
            )
        return features.transpose(1, 2)


LEAST_VARIANCE = 1e-7  # keeps the slope of the square root finite where nothing moves
PoolingKind = Literal["statistics", "attentive"]


class StatisticsPooling(nn.Module):
    r"""Mean and deviation of every channel over time, ``[B, 2 C]`` (TSTP).

    .. math:: \left[\bar x, \sqrt{\operatorname{var} x + 10^{-7}}\right]

    with the unbiased variance, so that two frames are the fewest.

    Args:
        num_channels: ``C``, or ``C F``.

    Examples:
        >>> frames = torch.tensor([[[1.0, 3.0], [5.0, 5.0]]])
        >>> StatisticsPooling(2)(frames)
        tensor([[2.0000e+00, 5.0000e+00, 1.4142e+00, 3.1623e-04]])
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        check_sizes(num_channels=num_channels)
        self.num_channels, self.output_dim = num_channels, 2 * num_channels

    def forward(self, frames: Tensor) -> Tensor:
        """Statistics ``[B, 2 C]``."""
        frames = _flat(frames, self.num_channels)
        frames = frames.to(torch.promote_types(frames.dtype, torch.float32))  # [B, C, T]
        return torch.cat([frames.mean(2), _deviation(frames)], dim=1)


class AttentiveStatisticsPooling(nn.Module):
    r"""Mean and deviation under weights that every channel gives to the frames, ``[B, 2 C]``.

    .. math::

        w = \operatorname{softmax}_t\!\left(V \tanh(W h_t + b) + k\right), \qquad
        \mu = \sum_t w_t x_t, \quad \sigma^2 = \sum_t w_t (x_t - \mu)^2

    where :math:`h_t` is the frame, with the mean and the deviation of the whole recording below it
    if ``has_context`` is set, as in ECAPA-TDNN. The names of the layers are those of WeSpeaker.

    Args:
        num_channels: ``C``, or ``C F``.
        bottleneck_dim: Rows of ``W``.
        has_context: Whether the weights of a frame depend on the recording as well.
    """

    def __init__(
        self, num_channels: int, *, bottleneck_dim: int = 128, has_context: bool = False
    ) -> None:
        super().__init__()
        check_sizes(num_channels=num_channels, bottleneck_dim=bottleneck_dim)
        self.num_channels, self.output_dim = num_channels, 2 * num_channels
        self.has_context = has_context
        num_inputs = 3 * num_channels if has_context else num_channels
        self.linear1 = nn.Conv1d(num_inputs, bottleneck_dim, 1)
        self.linear2 = nn.Conv1d(bottleneck_dim, num_channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Statistics ``[B, 2 C]``."""
        frames = _flat(frames, self.num_channels)
        with no_autocast(frames.device.type):
            frames = frames.to(self.linear1.weight.dtype)  # [B, C, T]
            context = [frames]
            if self.has_context:
                context += [
                    statistic[:, :, None].expand_as(frames)
                    for statistic in (frames.mean(2), _deviation(frames))
                ]
            hidden = torch.tanh(self.linear1(torch.cat(context, dim=1)))
            weights = self.linear2(hidden).softmax(2)  # [B, C, T]
            mean = (weights * frames).sum(2)
            variance = (weights * (frames - mean[:, :, None]).square()).sum(2)
            return torch.cat([mean, variance.clamp(min=LEAST_VARIANCE).sqrt()], dim=1)


def create_pooling(
    kind: PoolingKind, num_channels: int
) -> StatisticsPooling | AttentiveStatisticsPooling:
    """A pooling layer by its name.

    Examples:
        >>> create_pooling("statistics", 5).output_dim
        10
    """
    if kind == "statistics":
        return StatisticsPooling(num_channels)
    if kind == "attentive":
        return AttentiveStatisticsPooling(num_channels)
    raise ConfigError(f"pooling is {kind!r}; known are statistics and attentive")


def check_sizes(**sizes: int) -> None:
    """Refuse a size below 1 by its name.

    Examples:
        >>> check_sizes(width=0)
        Traceback (most recent call last):
        qmargin.errors.ConfigError: width is 0; it must be at least 1
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")


def _deviation(frames: Tensor) -> Tensor:
    return (frames.var(2) + LEAST_VARIANCE).sqrt()


def _flat(frames: Tensor, num_channels: int) -> Tensor:
    """Frames as ``[B, C, T]``."""
    flat = frames.flatten(1, 2) if frames.dim() == 4 else frames
    if flat.dim() != 3 or flat.shape[1] != num_channels or flat.shape[2] < 2:
        raise ShapeError(
            f"frames have shape {tuple(frames.shape)}; this pooling takes {num_channels} channels "
            "and at least 2 frames, time last"
        )
    return flat
