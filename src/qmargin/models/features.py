"""Log-mel filter banks in batches, on any device, equal to Kaldi's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qmargin.errors import ConfigError
from qmargin.models.layers import SHAPE, is_exporting, refuse

WINDOWS = ("hamming", "povey", "hann", "rectangular")


def analysis_window(name: str, length: int) -> Tensor:
    """A symmetric window of ``length`` samples, float64."""
    if name not in WINDOWS:
        raise ConfigError(f"window is {name!r}; it is one of {', '.join(WINDOWS)}")
    if name == "rectangular":
        return torch.ones(length, dtype=torch.float64)
    phase = torch.arange(length, dtype=torch.float64) * (2.0 * math.pi / (length - 1))
    if name == "hamming":
        return 0.54 - 0.46 * phase.cos()
    hann = (0.5 - 0.5 * phase.cos()).clamp_min(0.0)  # the cosine may round to above one
    return hann.pow(0.85) if name == "povey" else hann


def mel_triangles(
    num_bins: int, *, fft_size: int, sample_rate: float, low: float, high: float
) -> Tensor:
    """Weights ``[fft_size // 2 + 1, num_bins]`` of power-spectrum points, float64.

    Triangles from ``low`` to ``high`` Hz are equally spaced in mel; one that holds no point is
    refused. The point at half the sample rate has no weight.
    """
    # No tensor is read here: a network is also built without memory, of tensors without values.
    spacing = sample_rate / fft_size
    first, last = (1127.0 * math.log1p(hertz / 700.0) for hertz in (low, high))
    step = (last - first) / (num_bins + 1)
    hertz = [700.0 * math.expm1((first + step * place) / 1127.0) for place in range(num_bins + 2)]
    if not all(
        (math.floor(left / spacing) + 1) * spacing < right
        for left, right in zip(hertz, hertz[2:], strict=False)
    ):
        raise ConfigError(
            f"num_bins is {num_bins}, of which some hold no point of a {fft_size}-point spectrum "
            f"between {low:g} and {high:g} Hz; use fewer bins or longer frames"
        )
    edges = torch.linspace(first, last, num_bins + 2, dtype=torch.float64)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    frequencies = torch.arange(fft_size // 2, dtype=torch.float64) * spacing
    position = 1127.0 * torch.log1p(frequencies / 700.0)[:, None]  # [points, 1]
    rising = (position - left) / (centre - left)
    falling = (right - position) / (right - centre)
    weights = torch.minimum(rising, falling).clamp_min(0.0)
    return torch.cat([weights, weights.new_zeros(1, num_bins)])


def frame_spectrum_matrix(window: Tensor, *, fft_size: int, preemphasis: float) -> Tensor:
    """Mean removal, pre-emphasis, window and transform of a frame as one matrix.

    It is ``[2, fft_size // 2 + 1, len(window)]``, rows of cosines and of sines, float64: an
    exported graph needs one convolution for all four steps.
    """
    length = len(window)
    identity = torch.eye(length, dtype=torch.float64)
    predecessor = torch.diag(window.new_ones(length - 1), -1)
    predecessor[0, 0] = 1.0  # the first sample of a frame is its own predecessor
    centring = identity - 1.0 / length
    prepared = window[:, None] * ((identity - preemphasis * predecessor) @ centring)  # [n, n]
    points = torch.arange(fft_size // 2 + 1)[:, None] * torch.arange(length)  # exact integers
    angles = (points % fft_size).double() * (2.0 * math.pi / fft_size)
    return torch.stack([angles.cos() @ prepared, -angles.sin() @ prepared])


FULL_SCALE = 32768.0  # Kaldi's features are of 16-bit samples
FLOOR = torch.finfo(torch.float32).eps  # of energies before the logarithm, as in Kaldi
_BLOCK_FRAMES = 512  # a block's frames and spectra stay in a core's cache


class FilterBank(nn.Module):
    """Log energies in mel-spaced triangles: ``[B, T]`` samples to ``[B, frames, bins]``.

    Frames of 25 ms every 10 ms that lie wholly inside the waveform ("snip edges"); each has its
    mean removed, is pre-emphasised, windowed and zero-padded to a power of two. The result agrees
    with kaldi-native-fbank within 1e-3, except for about one value in a million, which depends on
    rounding in both. It has no parameters and no state.

    Arithmetic is in float32 (float64 for such waveforms), whatever autocast says. In exported
    graphs, framing and the Fourier transform are one convolution.

    Args:
        sample_rate: Sample rate of the waveforms, in Hz.
        num_bins: Number of triangles.
        window: ``"hamming"``, ``"povey"``, ``"hann"`` or ``"rectangular"``.
        dither: Standard deviation of noise added to each sample, in steps of 16-bit audio, in
            training mode only. It is drawn from torch's generator; for noise that depends on the
            sample only, let the dataset add it and leave this at zero.
        frame_ms: Length of a frame.
        shift_ms: Distance of frames.
        preemphasis: Share of the previous sample that is subtracted.
        low_hz: Lower edge of the first triangle.
        high_hz: Upper edge of the last; zero or below counts from half the sample rate.
        subtract_mean: Subtract each bin's mean over the frames, as most speaker recipes do.

    Examples:
        >>> bank = FilterBank(num_bins=80)
        >>> bank(torch.zeros(2, 32240)).shape, bank.num_frames(16000)
        (torch.Size([2, 200, 80]), 98)
    """

    window: Tensor
    triangles: Tensor
    kernel: Tensor

    def __init__(
        self,
        sample_rate: int = 16000,
        num_bins: int = 80,
        window: str = "hamming",
        dither: float = 0.0,
        *,
        frame_ms: float = 25.0,
        shift_ms: float = 10.0,
        preemphasis: float = 0.97,
        low_hz: float = 20.0,
        high_hz: float = 0.0,
        subtract_mean: bool = False,
    ) -> None:
        super().__init__()
        self.sample_rate, self.num_bins = sample_rate, num_bins
        self.dither, self.preemphasis = dither, preemphasis
        self.subtract_mean = subtract_mean
        self.frame_length = int(sample_rate * frame_ms / 1000)
        self.frame_shift = int(sample_rate * shift_ms / 1000)
        for name in ("sample_rate", "num_bins", "frame_shift"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.frame_length < 2:
            raise ConfigError(
                f"frames have {self.frame_length} samples; raise frame_ms to have at least 2"
            )
        if not 0.0 <= dither < math.inf or not 0.0 <= preemphasis <= 1.0:
            raise ConfigError(
                f"dither is {dither} and preemphasis {preemphasis}; the first must be finite and "
                "at least 0, the second in [0, 1]"
            )
        self.fft_size = 1 << (self.frame_length - 1).bit_length()
        high_hz = high_hz if high_hz > 0.0 else sample_rate / 2 + high_hz
        if not 0.0 <= low_hz < high_hz <= sample_rate / 2:
            raise ConfigError(
                f"the bins reach from {low_hz:g} to {high_hz:g} Hz; they must rise within "
                f"0 and {sample_rate / 2:g} Hz"
            )
        shape = analysis_window(window, self.frame_length)
        triangles = mel_triangles(
            num_bins, fft_size=self.fft_size, sample_rate=sample_rate, low=low_hz, high=high_hz
        )
        kernel = frame_spectrum_matrix(shape, fft_size=self.fft_size, preemphasis=preemphasis)
        self.register_buffer("window", shape.float(), persistent=False)
        self.register_buffer("triangles", triangles.float(), persistent=False)
        self.register_buffer("kernel", kernel.flatten(0, 1)[:, None].float(), persistent=False)

    def num_frames(self, num_samples: int) -> int:
        """Frames of a waveform; zero when it is shorter than one."""
        return max(0, 1 + (num_samples - self.frame_length) // self.frame_shift)

    def num_samples(self, num_frames: int) -> int:
        """Samples of the shortest waveform that has this many frames."""
        return (num_frames - 1) * self.frame_shift + self.frame_length

    def forward(self, waveforms: Tensor) -> Tensor:
        """Features ``[B, frames, bins]`` of waveforms ``[B, T]`` in [-1, 1]."""
        if (refused := self.check(waveforms)) is not None:
            return refused
        if is_exporting():  # exported graphs have no autocast to switch off
            features = self._convolved(self._scaled(waveforms))
        else:
            with torch.autocast(waveforms.device.type, enabled=False):
                features = self._transformed(self._scaled(waveforms))
        return subtract_mean(features) if self.subtract_mean else features

    def check(self, waveforms: Tensor) -> Tensor | None:
        """Refuse other tensors and waveforms shorter than a frame, see ``layers.refuse``."""
        if waveforms.ndim != 2 or not waveforms.is_floating_point():
            found = f"waveforms have shape {SHAPE} and {waveforms.dtype}"
            return refuse(waveforms, f"{found}; give floating [B, T] in [-1, 1]")
        if waveforms.shape[1] < self.frame_length:
            found = f"waveforms have shape {SHAPE} and a frame has {self.frame_length} samples"
            return refuse(waveforms, f"{found}; leave out or tile shorter waveforms")
        if self.window.dtype not in (torch.float32, torch.float64):
            found = f"the filter bank was cast to {self.window.dtype}"
            remedy = "keep it in float32, or the logarithms lose their digits"
            return refuse(waveforms, f"{found}; {remedy}", "config")
        return None

    def _scaled(self, waveforms: Tensor) -> Tensor:
        wide = torch.float64 if waveforms.dtype == torch.float64 else torch.float32
        samples = waveforms.to(wide) * FULL_SCALE
        if self.dither > 0.0 and self.training:
            samples = samples + self.dither * torch.randn_like(samples)
        return samples

    def _convolved(self, samples: Tensor) -> Tensor:
        spectrum = functional.conv1d(
            samples[:, None], self.kernel.to(samples.dtype), stride=self.frame_shift
        )  # [B, 2 * points, frames]
        real, imaginary = spectrum.square().chunk(2, dim=1)
        return self._logarithms((real + imaginary).transpose(1, 2))

    def _transformed(self, samples: Tensor) -> Tensor:
        frames = samples.unfold(1, self.frame_length, self.frame_shift)  # [B, frames, length]
        rows, count = frames.shape[:2]
        if rows == 0:  # a transform of nothing is an error
            return samples.new_zeros(0, count, self.num_bins)
        if samples.device.type != "cpu" or torch.compiler.is_compiling():
            return self._features(frames)  # a compiled loop would be one graph for each length
        parts = frames.split(max(1, _BLOCK_FRAMES // count))
        blocks = (
            [self._features(block) for block in part.split(_BLOCK_FRAMES, 1)] for part in parts
        )
        return torch.cat([torch.cat(found, dim=1) for found in blocks])

    def _features(self, frames: Tensor) -> Tensor:
        # In Kaldi's order, frame by frame: removing the mean from the whole waveform at once, or
        # after pre-emphasis, is faster on paper and rounds quiet bins differently.
        centred = frames - frames.mean(2, keepdim=True)
        firsts = centred[:, :, :1] - self.preemphasis * centred[:, :, :1]  # their own predecessors
        rest = torch.sub(centred[:, :, 1:], centred[:, :, :-1], alpha=self.preemphasis)
        windowed = torch.cat([firsts, rest], dim=2) * self.window.to(frames.dtype)
        compute = _power_operator if torch.compiler.is_compiling() else power_spectrum
        return self._logarithms(compute(windowed, self.fft_size))

    def _logarithms(self, power: Tensor) -> Tensor:
        return (power @ self.triangles.to(power.dtype)).clamp_min(FLOOR).log()


def subtract_mean(features: Tensor) -> Tensor:
    """Features ``[B, frames, bins]`` less the mean of each bin over time."""
    return features - features.mean(1, keepdim=True)


def power_spectrum(frames: Tensor, fft_size: int) -> Tensor:
    """Squared magnitudes ``[..., fft_size // 2 + 1]`` of the transforms of frames ``[..., n]``."""
    spectrum: Tensor = torch.fft.rfft(frames, n=fft_size)
    return spectrum.real.square() + spectrum.imag.square()


@torch.library.custom_op("qmargin::power_spectrum", mutates_args=())
def _power_operator(frames: Tensor, fft_size: int) -> Tensor:
    """For compiled graphs, where complex numbers are slow and, before torch 2.7, lengths fixed."""
    return power_spectrum(frames, fft_size)


@_power_operator.register_fake
def _(frames: Tensor, fft_size: int) -> Tensor:
    return frames.new_empty(*frames.shape[:-1], fft_size // 2 + 1)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    frames, ctx.fft_size = inputs
    ctx.save_for_backward(frames)


def _power_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (frames,) = ctx.saved_tensors
    weighted = torch.fft.rfft(frames, n=ctx.fft_size) * gradient
    slopes = torch.fft.ifft(weighted, n=ctx.fft_size, norm="forward").real  # of half the sum
    return 2.0 * slopes[..., : frames.shape[-1]], None


_power_operator.register_autograd(_power_gradient, setup_context=_save)
