import pytest
import torch
from torch import nn

from qmargin.errors import ConfigError
from qmargin.models.mobilefacenet import Bottleneck, MobileFaceNet, mobilefacenet
from qmargin.models.registry import create_backbone


@pytest.mark.parametrize(
    ("name", "count"), [("mobilefacenet", 2_059_520), ("mobilefacenet_large", 6_314_880)]
)
def test_parameter_counts_are_those_of_the_reference_networks(name: str, count: int) -> None:
    with torch.device("meta"):
        network = create_backbone(name)
        assert network(torch.empty(2, 3, 112, 112)).shape == (2, 512)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_counts_follow_from_the_published_table() -> None:
    """Filters of each row: in x out x size / groups, and three numbers per channel with PReLU."""

    def unit(inputs: int, channels: int, size: int = 1, groups: int = 1, extra: int = 3) -> int:
        return inputs * channels * size**2 // groups + extra * channels

    def bottleneck(inputs: int, channels: int, inner: int) -> int:
        return unit(inputs, inner) + unit(inner, inner, 3, inner) + unit(inner, channels, extra=2)

    body = unit(3, 128, 3) + unit(128, 128, 3, 64)
    body += bottleneck(128, 128, 128) + 4 * bottleneck(128, 128, 128)
    body += bottleneck(128, 256, 256) + 6 * bottleneck(256, 256, 256)
    body += bottleneck(256, 256, 512) + 2 * bottleneck(256, 256, 256)
    end = unit(256, 512) + unit(512, 512, 7, 512, extra=2) + 512 * 512 + 2 * 512
    network = mobilefacenet("mobilefacenet")
    assert sum(parameter.numel() for parameter in network.parameters()) == body + end


def test_every_stage_halves_the_image() -> None:
    network = MobileFaceNet((1, 1, 1, 1), 2, 8)
    sizes = []
    for layer in network.layers:
        layer.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    network(torch.randn(2, 3, 112, 112))
    assert sizes[0] == sizes[1] == (128, 56, 56)
    assert sizes[2] == sizes[3] == (128, 28, 28)
    assert sizes[4] == sizes[5] == (256, 14, 14)
    assert sizes[6] == sizes[7] == (256, 7, 7)


def test_a_bottleneck_is_its_formula() -> None:
    block = Bottleneck(4, 4, 8, has_sum=True).eval()
    inputs = torch.randn(2, 4, 6, 6)
    conv = nn.functional.conv2d
    out = inputs
    for unit, groups, padding in zip(block.layers, (1, 8, 1), (0, 1, 0), strict=True):
        filters, norm, *slopes = unit.layers
        out = norm(conv(out, filters.weight, padding=padding, groups=groups))
        out = nn.functional.prelu(out, slopes[0].weight) if slopes else out
    torch.testing.assert_close(block(inputs), inputs + out)
    assert len(list(block.layers[2].layers)) == 2  # no activation where channels are few


def test_names_are_those_of_published_checkpoints() -> None:
    names = set(mobilefacenet("mobilefacenet").state_dict())
    for name in (
        "layers.0.layers.0.weight",
        "layers.1.layers.2.weight",
        "layers.2.layers.0.layers.0.weight",
        "layers.3.layers.3.layers.2.layers.1.running_var",
        "layers.7.layers.1.layers.1.layers.2.weight",
        "conv_sep.layers.1.bias",
        "features.layers.0.layers.0.weight",
        "features.layers.2.weight",
        "features.layers.3.running_mean",
    ):
        assert name in names
    assert "features.layers.2.bias" not in names


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="name is 'mobilefacenet_xl'; known are mobilefacenet, "):
        mobilefacenet("mobilefacenet_xl")
    with pytest.raises(ConfigError, match="embedding_dim is 0"):
        mobilefacenet("mobilefacenet", 0)
