"""What every speaker network takes: waveforms, or filter banks that somebody else computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qmargin.errors import ShapeError
from qmargin.features.filter_bank import FilterBank

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
