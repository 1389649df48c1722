"""Small networks: shapes, and no sample sees another."""

import pytest
import torch
from torch import nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.registry import create_backbone
from qmargin.models.small import SmallConv, SmallMLP

CASES = {"small_mlp": (5, 32), "small_conv": (5, 3, 32, 32)}


@pytest.mark.parametrize(("name", "shape"), CASES.items())
def test_embeddings_do_not_depend_on_the_rest_of_the_batch(
    name: str, shape: tuple[int, ...]
) -> None:
    network = create_backbone(name, embedding_dim=8)
    inputs = torch.randn(shape)
    embeddings = network(inputs)
    assert embeddings.shape == (5, 8)
    torch.testing.assert_close(network(inputs[:2]), embeddings[:2])
    embeddings.square().sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_errors_name_the_value_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match="hidden_dim is 0"):
        SmallMLP(8, hidden_dim=0)
    with pytest.raises(ConfigError, match="width is 0"):
        SmallConv(8, width=0)
    with pytest.raises(ShapeError, match=r"\(2, 5\); .* set its option input_dim"):
        SmallMLP(8)(torch.zeros(2, 5))
    with pytest.raises(ShapeError, match=r"\(2, 1, 8, 8\)"):
        SmallConv(8)(torch.zeros(2, 1, 8, 8))
