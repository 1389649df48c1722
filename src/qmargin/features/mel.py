"""Constants of filter banks as Kaldi defines them: windows, mel triangles, a Fourier matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qmargin.errors import ConfigError

WINDOWS = ("hamming", "povey", "hann", "rectangular")


def analysis_window(name: str, length: int) -> Tensor:
    """A symmetric window of ``length`` samples, float64.

    Examples:
        >>> analysis_window("hamming", 3)
        tensor([0.0800, 1.0000, 0.0800], dtype=torch.float64)
    """
    if name not in WINDOWS:
        raise ConfigError(f"window is {name!r}; it is one of {', '.join(WINDOWS)}")
    if name == "rectangular":
        return torch.ones(length, dtype=torch.float64)
    phase = torch.arange(length, dtype=torch.float64) * (2.0 * math.pi / (length - 1))
    if name == "hamming":
        return 0.54 - 0.46 * phase.cos()
    hann = (0.5 - 0.5 * phase.cos()).clamp_min(0.0)  # the cosine may round to above one
    return hann.pow(0.85) if name == "povey" else hann


def mel(frequency: Tensor) -> Tensor:
    """Mel scale of frequencies in Hz."""
    return 1127.0 * torch.log1p(frequency / 700.0)


def mel_triangles(
    num_bins: int, *, fft_size: int, sample_rate: float, low: float, high: float
) -> Tensor:
    """Weights of power-spectrum bins in triangles that are equally spaced in mel.

    Args:
        num_bins: Triangles.
        fft_size: Points of the Fourier transform.
        sample_rate: In Hz.
        low: Lower edge of the first triangle, in Hz.
        high: Upper edge of the last triangle, in Hz.

    Returns:
        ``[fft_size // 2 + 1, num_bins]``, float64; the bin at half the sample rate has no weight.

    Raises:
        ConfigError: If a triangle falls between two bins, so that it would always be empty.
    """
    # No tensor is read here: a network is also built without memory, of tensors without values.
    first, last = (1127.0 * math.log1p(hertz / 700.0) for hertz in (low, high))
    if _num_empty(num_bins, first, last, spacing=sample_rate / fft_size):
        raise ConfigError(
            f"num_bins is {num_bins}, of which some hold no point of a {fft_size}-point spectrum "
            f"between {low:g} and {high:g} Hz; use fewer bins or longer frames"
        )
    edges = torch.linspace(first, last, num_bins + 2, dtype=torch.float64)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    num_points = fft_size // 2
    frequencies = torch.arange(num_points, dtype=torch.float64) * (sample_rate / fft_size)
    position = mel(frequencies)[:, None]  # [points, 1]
    rising = (position - left) / (centre - left)
    falling = (right - position) / (right - centre)
    weights = torch.minimum(rising, falling).clamp_min(0.0)
    return torch.cat([weights, weights.new_zeros(1, num_bins)])


def _num_empty(num_bins: int, first: float, last: float, *, spacing: float) -> int:
    """Triangles between two edges in mel without a multiple of ``spacing`` Hz inside."""
    step = (last - first) / (num_bins + 1)
    hertz = [700.0 * math.expm1((first + step * place) / 1127.0) for place in range(num_bins + 2)]
    inside = [
        (math.floor(left / spacing) + 1) * spacing < right
        for left, right in zip(hertz, hertz[2:], strict=False)
    ]
    return inside.count(False)


def frame_spectrum_matrix(window: Tensor, *, fft_size: int, preemphasis: float) -> Tensor:
    """What turns a raw frame into its spectrum: mean removal, pre-emphasis, window and transform.

    All of them are linear, so that an exported graph needs one convolution for the four.

    Args:
        window: ``[n]``, float64.
        fft_size: Points of the transform, at least ``n``.
        preemphasis: Share of the previous sample that is taken off; the first sample of a frame
            counts as its own predecessor.

    Returns:
        ``[2, fft_size // 2 + 1, n]``: rows of cosines and of sines, float64.
    """
    length = len(window)
    identity = torch.eye(length, dtype=torch.float64)
    predecessor = torch.diag(window.new_ones(length - 1), -1)
    predecessor[0, 0] = 1.0
    centring = identity - 1.0 / length
    prepared = window[:, None] * ((identity - preemphasis * predecessor) @ centring)  # [n, n]
    points = torch.arange(fft_size // 2 + 1)[:, None] * torch.arange(length)  # exact integers
    angles = (points % fft_size).double() * (2.0 * math.pi / fft_size)
    return torch.stack([angles.cos() @ prepared, -angles.sin() @ prepared])
