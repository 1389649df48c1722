"""Pooling against its formula, one frame at a time in float64."""

import numpy as np
import pytest
import torch

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.speaker_parts import (
    AttentiveStatisticsPooling,
    StatisticsPooling,
    create_pooling,
)


def test_statistics_are_means_and_unbiased_deviations() -> None:
    frames = torch.randn(3, 4, 7, dtype=torch.float64)
    pooled = StatisticsPooling(4)(frames).numpy()
    np.testing.assert_allclose(pooled[:, :4], frames.numpy().mean(2), atol=1e-12)
    expected = np.sqrt(frames.numpy().var(2, ddof=1) + 1e-7)
    np.testing.assert_allclose(pooled[:, 4:], expected, atol=1e-12)


def test_channels_and_bins_become_one_axis_channels_first() -> None:
    frames = torch.randn(2, 3, 5, 6)
    pooled = StatisticsPooling(15)(frames)
    torch.testing.assert_close(pooled[:, 5], frames[:, 1, 0].mean(1))


@pytest.mark.parametrize("has_context", [False, True])
def test_attention_is_its_formula(has_context: bool) -> None:
    torch.manual_seed(0)
    pooling = AttentiveStatisticsPooling(4, bottleneck_dim=3, has_context=has_context).double()
    frames = torch.randn(2, 4, 6, dtype=torch.float64)
    pooled = pooling(frames).detach().numpy()
    first, second = (
        (layer.weight.detach().numpy()[:, :, 0], layer.bias.detach().numpy())
        for layer in (pooling.linear1, pooling.linear2)
    )
    for row, sample in enumerate(frames.numpy()):  # [C, T]
        context = [sample]
        if has_context:
            spread = np.sqrt(sample.var(1, ddof=1) + 1e-7)
            context += [np.tile(value[:, None], (1, 6)) for value in (sample.mean(1), spread)]
        energy = second[0] @ np.tanh(first[0] @ np.concatenate(context) + first[1][:, None])
        weights = np.exp(energy + second[1][:, None])
        weights /= weights.sum(1, keepdims=True)
        mean = (weights * sample).sum(1)
        variance = (weights * sample**2).sum(1) - mean**2
        np.testing.assert_allclose(pooled[row], [*mean, *np.sqrt(variance)], atol=1e-9)


@pytest.mark.parametrize("kind", ["statistics", "attentive"])
def test_silence_has_finite_gradients(kind: str) -> None:
    frames = torch.zeros(1, 2, 5, requires_grad=True)
    pooled = create_pooling(kind, 2)(frames)  # type: ignore[arg-type]
    pooled.sum().backward()
    assert bool(torch.isfinite(pooled).all())
    assert frames.grad is not None
    assert bool(torch.isfinite(frames.grad).all())


@pytest.mark.parametrize("kind", ["statistics", "attentive"])
def test_half_precision_frames_do_not_overflow(kind: str) -> None:
    """300 squared is beyond float16."""
    frames = 300.0 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    pooling = create_pooling(kind, 3)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = pooling(frames.half())
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, pooling(frames.half().float()))


def test_errors_name_the_shape_and_the_kinds() -> None:
    with pytest.raises(
        ShapeError, match=r"\(1, 4, 1\); this pooling takes 4 channels and at least"
    ):
        StatisticsPooling(4)(torch.zeros(1, 4, 1))
    with pytest.raises(ShapeError, match="takes 5 channels"):
        AttentiveStatisticsPooling(5)(torch.zeros(1, 4, 9))
    with pytest.raises(ConfigError, match="pooling is 'mean'; known are statistics and attentive"):
        create_pooling("mean", 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_channels is 0"):
        StatisticsPooling(0)
