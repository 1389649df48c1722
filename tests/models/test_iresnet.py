import pytest
import torch
from torch import nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.models import registry
from qmargin.models.iresnet import BLOCKS, IResNet, ResidualBlock, iresnet
from qmargin.models.registry import create_backbone, list_backbones, register_backbone

SMALL = (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("depth", "count"),
    [
        (18, 24_025_600),
        (34, 34_139_328),
        (50, 43_590_848),
        (100, 65_156_160),
        (200, 118_833_920),
    ],
)
def test_parameter_counts_are_those_of_the_reference_networks(depth: int, count: int) -> None:
    with torch.device("meta"):
        network = iresnet(depth)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    frozen = [name for name, value in network.named_parameters() if not value.requires_grad]
    assert frozen == ["features.weight"]
    assert network.features.weight.numel() == 512


@pytest.mark.parametrize("depth", BLOCKS)
def test_a_112_image_becomes_an_embedding(depth: int) -> None:
    with torch.device("meta"):
        network = iresnet(depth, embedding_dim=64).eval()
        assert network(torch.empty(2, 3, 112, 112)).shape == (2, 64)


def test_every_stage_halves_the_image() -> None:
    network = IResNet(SMALL, embedding_dim=8)
    sizes = []
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        stage.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    network(torch.randn(2, 3, 112, 112))
    assert sizes == [(64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)]


def test_a_block_is_its_formula() -> None:
    """Norm - convolution - norm - PReLU - convolution - norm, plus the shortcut, no activation."""
    block = ResidualBlock(4, 6, stride=2).eval()
    inputs = torch.randn(2, 4, 8, 8)
    conv = nn.functional.conv2d
    out = conv(block.bn1(inputs), block.conv1.weight, padding=1)
    out = nn.functional.prelu(block.bn2(out), block.prelu.weight)
    out = block.bn3(conv(out, block.conv2.weight, stride=2, padding=1))
    assert block.downsample is not None
    shortcut = block.downsample[1](conv(inputs, block.downsample[0].weight, stride=2))
    torch.testing.assert_close(block(inputs), out + shortcut)
    assert ResidualBlock(4, 4, stride=1).downsample is None


def test_shortcuts_without_weights_take_every_other_pixel() -> None:
    block = ResidualBlock(4, 4, 2, "subsample").eval()
    inputs = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        block.bn3.weight.zero_()
    assert torch.equal(block(inputs), inputs[:, :, ::2, ::2])
    network = IResNet((2, 1, 1, 1), 8, shortcut="subsample")
    names = {name.rsplit(".downsample")[0] for name in network.state_dict() if "downsample" in name}
    assert names == {"layer2.0", "layer3.0", "layer4.0"}  # where channels change
    with pytest.raises(ConfigError, match="shortcut is 'pool'; known are projection, subsample"):
        IResNet(SMALL, shortcut="pool")  # type: ignore[arg-type]


def test_first_values() -> None:
    torch.manual_seed(0)
    network = IResNet(SMALL)
    weight = network.layer4[0].conv2.weight
    assert abs(float(weight.detach().std()) - 0.1) < 1e-3
    assert bool((network.features.weight == 1.0).all())
    assert network.layer1[0].bn1.eps == 1e-5


def test_names_are_those_of_published_checkpoints() -> None:
    names = set(iresnet(18).state_dict())
    for name in (
        "conv1.weight",
        "bn1.running_mean",
        "prelu.weight",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.weight",
        "layer4.1.bn3.bias",
        "bn2.weight",
        "fc.bias",
        "features.running_var",
    ):
        assert name in names


def test_the_projection_keeps_its_precision_under_autocast() -> None:
    network = IResNet(SMALL, embedding_dim=8).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 112, 112).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = network(images)
    assert embeddings.dtype == torch.float32
    embeddings.square().sum().backward()
    assert network.conv1.weight.grad is not None
    assert network.features.weight.grad is None


def test_errors_name_the_value_and_what_is_known() -> None:
    with pytest.raises(ConfigError, match="depth is 101; known depths are 18, 34"):
        iresnet(101)
    with pytest.raises(ConfigError, match="embedding_dim is 0"):
        iresnet(18, 0)
    with pytest.raises(ShapeError, match=r"\(1, 3, 96, 96\)"):
        IResNet(SMALL, 8)(torch.empty(1, 3, 96, 96))
    with pytest.raises(ConfigError, match="did you mean 'iresnet100'"):
        create_backbone("iresnet10O")
    with pytest.raises(ConfigError, match="'iresnet18' is registered already"):
        register_backbone("iresnet18", iresnet)


def test_own_backbones_have_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKBONES", dict(registry._BACKBONES))
    register_backbone("line", lambda embedding_dim: nn.Linear(3, embedding_dim))
    assert list_backbones()[-1] == "line"
    assert create_backbone("line", embedding_dim=5)(torch.ones(2, 3)).shape == (2, 5)
