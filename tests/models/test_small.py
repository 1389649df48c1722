"""Small networks: any size in, embeddings out, and no sample sees another unless a norm says so."""

import pytest
import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.models import create_backbone
from qmargin.models.small import SmallConv, SmallMLP, StrokeNet, StrokeResNet

ALONE = {
    "small_mlp": ((5, 32), {}),
    "small_conv": ((5, 3, 32, 32), {}),
    "stroke_net": ((5, 1, 32, 32), {"width": 16}),
}


@pytest.mark.parametrize("name", ALONE)
def test_embeddings_do_not_depend_on_the_rest_of_the_batch(name):
    shape, options = ALONE[name]
    network = create_backbone(name, embedding_dim=8, **options).double()
    inputs = torch.randn(shape, dtype=torch.float64)
    embeddings = network(inputs)
    assert embeddings.shape == (5, 8) and not torch.allclose(embeddings[0], embeddings[1])
    alone = torch.cat([network(one[None]) for one in inputs])
    torch.testing.assert_close(alone, embeddings, rtol=1e-10, atol=1e-12)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


@pytest.mark.parametrize("size", [16, 28, 48])
@pytest.mark.parametrize("kind", [StrokeNet, StrokeResNet])
def test_drawings_of_any_size(kind, size):
    network = kind(8, in_channels=3, width=6, depth=1)
    assert network(torch.rand(2, 3, size, size)).shape == (2, 8)


def mean_cosine(embeddings: Tensor) -> float:
    unit = nn.functional.normalize(embeddings.detach())
    return float((unit @ unit.T).sum() - len(unit)) / (len(unit) * (len(unit) - 1))


def test_a_batch_norm_turns_embeddings_apart():
    images = torch.rand(64, 1, 32, 32)
    plain, normed = (StrokeNet(32, width=16, batch_norm=asked) for asked in (False, True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    alike, apart = (mean_cosine(network(images)) for network in (plain, normed))
    assert alike > 0.5 and abs(apart) < 0.05


@pytest.mark.parametrize(
    "network", [StrokeNet(16, width=16, batch_norm=True), StrokeResNet(16, width=8)]
)
def test_normed_embeddings_are_centred_in_training_and_alone_in_use(network):
    network = network.double()
    images = torch.rand(12, 1, 32, 32, dtype=torch.float64)
    zeros = torch.zeros(16, dtype=torch.float64)
    torch.testing.assert_close(network.train()(images).mean(0), zeros, atol=1e-9, rtol=0)
    network.eval()
    torch.testing.assert_close(network(images[:1]), network(images)[:1])


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (SmallMLP(8), (5, 32)),
        (SmallConv(8), (5, 3, 32, 32)),
        (StrokeNet(8, width=16, depth=2), (5, 1, 32, 32)),
        *((StrokeResNet(8, width=8, depth=depth), (5, 1, 32, 32)) for depth in (1, 2, 3)),
    ],
)
def test_all_weights_learn(network, shape):
    (network(torch.rand(shape)) * torch.rand(5, 8)).sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in network.parameters())


def test_wrong_sizes_and_inputs_are_refused():
    for kind, option, value in (
        (SmallMLP, "hidden_dim", 0),
        (SmallConv, "width", 0),
        (StrokeNet, "width", 0),
        (StrokeNet, "depth", -1),
        (StrokeResNet, "width", 0),
        (StrokeResNet, "depth", 0),
    ):
        with pytest.raises(ConfigError, match=f"{option} is {value}"):
            kind(8, **{option: value})
    with pytest.raises(ShapeError, match=r"\(2, 5\); .* input_dim"):
        SmallMLP(8)(torch.zeros(2, 5))
    for network in (SmallConv(8), StrokeNet(8, in_channels=3), StrokeResNet(8, in_channels=3)):
        with pytest.raises(ShapeError, match=r"\(2, 1, 8, 8\)"):
            network(torch.zeros(2, 1, 8, 8))
