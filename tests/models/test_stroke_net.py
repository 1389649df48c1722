"""The demo's network: any size in, embeddings out, and nobody else in the batch matters."""

import pytest
import torch

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.registry import create_backbone
from qmargin.models.stroke_net import StrokeNet


def test_an_embedding_depends_on_its_own_image():
    torch.manual_seed(0)
    network = create_backbone("stroke_net", embedding_dim=24, width=16).double()
    images = torch.rand(5, 1, 32, 32, dtype=torch.float64)
    together = network.train()(images)
    alone = torch.cat([network(image[None]) for image in images])
    assert together.shape == (5, 24)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("size", [16, 28, 32, 48, 64])
def test_images_of_any_size(size):
    assert StrokeNet(8, in_channels=3, width=6)(torch.rand(2, 3, size, size)).shape == (2, 8)


def test_a_batch_norm_turns_embeddings_apart():
    torch.manual_seed(0)
    images = torch.rand(64, 1, 32, 32)
    plain, normed = (StrokeNet(32, width=16, batch_norm=asked) for asked in (False, True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    alike, apart = (mean_cosine(network(images)) for network in (plain, normed))
    assert alike > 0.5 and abs(apart) < 0.05
    normed.eval()
    torch.testing.assert_close(normed(images[:1]), normed(images)[:1])  # nobody else matters then


def mean_cosine(embeddings):
    unit = torch.nn.functional.normalize(embeddings.detach())
    count = len(unit)
    return float((unit @ unit.T).sum() - count) / (count * (count - 1))


def test_all_weights_learn():
    network = StrokeNet(8, width=16, depth=2)
    network(torch.rand(3, 1, 32, 32)).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in network.parameters())


def test_wrong_sizes_and_inputs_are_refused():
    with pytest.raises(ConfigError, match="width is 0"):
        StrokeNet(8, width=0)
    with pytest.raises(ConfigError, match="depth is -1"):
        StrokeNet(8, depth=-1)
    with pytest.raises(ShapeError, match=r"takes images \[B, 1, height, width\]"):
        StrokeNet(8)(torch.rand(2, 3, 32, 32))
