"""The residual network for drawings: any size in, embeddings out, norms over the batch."""

import pytest
import torch

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.registry import create_backbone
from qmargin.models.stroke_resnet import StrokeResNet


@pytest.mark.parametrize("size", [16, 28, 32, 48])
def test_images_of_any_size(size: int) -> None:
    network = create_backbone("stroke_resnet", embedding_dim=8, in_channels=3, width=6, depth=1)
    assert network(torch.rand(2, 3, size, size)).shape == (2, 8)


def test_embeddings_are_centred_in_training_and_alone_in_use() -> None:
    torch.manual_seed(0)
    network = StrokeResNet(16, width=8).double()
    images = torch.rand(12, 1, 32, 32, dtype=torch.float64)
    made = network(images)
    torch.testing.assert_close(
        made.mean(0), torch.zeros(16, dtype=torch.float64), atol=1e-9, rtol=0
    )
    network.eval()
    torch.testing.assert_close(network(images[:1]), network(images)[:1])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_all_weights_learn(depth: int) -> None:
    network = StrokeResNet(8, width=8, depth=depth)
    embeddings = network(torch.rand(5, 1, 32, 32))
    (embeddings * torch.rand(5, 8)).sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in network.parameters())


def test_wrong_sizes_and_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="width is 0"):
        StrokeResNet(8, width=0)
    with pytest.raises(ConfigError, match="depth is 0"):
        StrokeResNet(8, depth=0)
    with pytest.raises(ShapeError, match=r"takes images \[B, 1, height, width\]"):
        StrokeResNet(8)(torch.rand(2, 3, 32, 32))
