"""Speaker networks: sizes of the published ones, formulas of their blocks, any input."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.campplus import CamPlusPlus, DenseLayer, MaskedConvolution
from qmargin.models.ecapa import EcapaBlock, EcapaTdnn, ScaledConvolution
from qmargin.models.features import FilterBank
from qmargin.models.speaker_parts import SpeakerInput
from qmargin.models.speaker_resnet import SpeakerBlock, SpeakerResNet, speaker_resnet

SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: SpeakerResNet((1, 1, 1, 1), 8, width=4),
    "resnet3": lambda: SpeakerResNet((1, 2, 1, 1), 8, width=4, num_convolutions=3),
    "attentive": lambda: SpeakerResNet((1, 1, 1, 1), 8, width=4, pooling="attentive"),
    "ecapa": lambda: EcapaTdnn(8, width=16),
    "campplus": lambda: CamPlusPlus(8),
}


def num_parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def norm(layer: nn.Module, inputs: Tensor) -> Tensor:
    """A batch norm in evaluation, by its formula."""
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    scale = (layer.running_var + layer.eps).rsqrt() * layer.weight  # type: ignore[operator]
    out: Tensor = (inputs - layer.running_mean.view(shape)) * scale.view(shape)  # type: ignore
    return out + layer.bias.view(shape)  # type: ignore[operator]


def unsettle(module: nn.Module) -> nn.Module:
    """Norms whose numbers are not zeros and ones, in evaluation."""
    generator = torch.Generator().manual_seed(3)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) and part.affine:
            for tensor in (part.weight, part.bias, part.running_mean, part.running_var):
                tensor.data.uniform_(0.5, 1.5, generator=generator)
    return module.eval()


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: speaker_resnet(18), 4_105_440),
        (lambda: speaker_resnet(34), 6_634_336),
        (lambda: speaker_resnet(50), 11_131_360),
        (lambda: speaker_resnet(101), 15_892_448),
        (lambda: speaker_resnet(34, pooling="attentive"), 7_292_384),
        (lambda: EcapaTdnn(192, width=512), 6_190_720),
        (lambda: EcapaTdnn(192, width=1024), 14_657_088),
        (lambda: EcapaTdnn(192, width=512, has_context=False), 5_797_504),
        (lambda: CamPlusPlus(512), 7_176_224),
        (lambda: CamPlusPlus(192), 6_848_544),
    ],
)
def test_parameter_counts_are_those_of_the_published_networks(
    build: Callable[[], nn.Module], count: int
) -> None:
    assert num_parameters(build) == count


@pytest.mark.parametrize(
    ("depth", "blocks", "expansion"),
    [
        (18, (2, 2, 2, 2), 1),
        (34, (3, 4, 6, 3), 1),
        (50, (3, 4, 6, 3), 4),
        (101, (3, 4, 23, 3), 4),
    ],
)
def test_the_count_of_a_resnet_follows_from_its_description(
    depth: int, blocks: tuple[int, ...], expansion: int
) -> None:
    """Convolutions without bias, norms with two numbers a channel, statistics of 10 bins."""
    count, channels = 9 * 32 + 2 * 32, 32
    for place, num_blocks in enumerate(blocks):
        width = 32 << place
        out = expansion * width
        for index in range(num_blocks):
            if expansion == 1:
                count += 9 * channels * width + 9 * width * width + 4 * width
            else:
                count += channels * width + 9 * width * width + width * out + 4 * width + 2 * out
            if channels != out or (index == 0 and place > 0):
                count += channels * out + 2 * out
            channels = out
    count += 2 * 10 * channels * 256 + 256
    assert num_parameters(lambda: speaker_resnet(depth)) == count


@pytest.mark.parametrize("width", [512, 1024])
def test_the_count_of_ecapa_follows_from_its_description(width: int) -> None:
    """Convolutions with bias; three blocks of 7 groups and a gate; 1536 pooled channels."""
    group = width // 8
    mix = width * width + 3 * width
    scaled = 7 * (3 * group * group + 3 * group)
    gate = 2 * 128 * width + 128 + width
    count = 5 * 80 * width + 3 * width + 3 * (2 * mix + scaled + gate)
    count += 3 * width * 1536 + 1536
    count += 3 * 1536 * 128 + 128 + 128 * 1536 + 1536
    count += 2 * 3072 + 3072 * 192 + 192
    assert num_parameters(lambda: EcapaTdnn(192, width=width)) == count


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_parameter_and_weights_survive_their_file(name: str) -> None:
    torch.manual_seed(0)
    network = SMALL[name]()
    embeddings = network(torch.randn(3, 61, 80))
    assert embeddings.shape == (3, 8)
    embeddings.square().sum().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None, key
        assert bool(torch.isfinite(parameter.grad).all()), key
    other = SMALL[name]()
    other.load_state_dict(network.state_dict())
    inputs = torch.randn(2, 50, 80)
    torch.testing.assert_close(other.eval()(inputs), network.eval()(inputs))


@pytest.mark.parametrize("name", SMALL)
def test_waveforms_and_their_filter_banks_have_the_same_embedding(name: str) -> None:
    torch.manual_seed(0)
    network = unsettle(SMALL[name]())
    waveforms = 0.1 * torch.randn(2, 16000)
    features = FilterBank(num_bins=80)(waveforms)
    features = features - features.mean(1, keepdim=True)
    torch.testing.assert_close(network(waveforms), network(features), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_an_embedding_does_not_depend_on_its_neighbours(name: str) -> None:
    torch.manual_seed(0)
    network = unsettle(SMALL[name]()).double()
    inputs = torch.randn(3, 120, 80, dtype=torch.float64)
    torch.testing.assert_close(network(inputs)[1:2], network(inputs[1:2]))


@pytest.mark.parametrize("name", SMALL)
def test_pooling_and_projection_keep_their_precision_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    network = SMALL[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = network(torch.randn(2, 48, 80))
    assert embeddings.dtype == torch.float32
    embeddings.sum().backward()


@pytest.mark.parametrize("name", SMALL)
def test_the_shortest_recording(name: str) -> None:
    network = SMALL[name]().eval()
    assert bool(torch.isfinite(network(torch.randn(1, 9, 80))).all())
    with pytest.raises(ShapeError, match="which is 8 frames; at least 9 are needed"):
        network(torch.randn(1, 8, 80))
    with pytest.raises(ShapeError, match=r"\(1, 9, 40\).*filter banks \[B, frames, 80\]"):
        network(torch.randn(1, 9, 40))


def test_other_numbers_of_bins() -> None:
    for bins in (40, 60, 64):
        network = SpeakerResNet((1, 1, 1, 1), 8, width=4, num_bins=bins).eval()
        assert network(torch.randn(1, 30, bins)).shape == (1, 8)


def test_dither_is_for_training_only() -> None:
    frontend, waveforms = SpeakerInput(dither=1.0), torch.zeros(1, 4000)
    assert bool((frontend(waveforms) != frontend(waveforms)).any())
    frontend.eval()
    assert bool((frontend(waveforms) == frontend(waveforms)).all())
    assert frontend.state_dict() == {}


def test_a_resnet_halves_bins_and_frames_three_times() -> None:
    network, sizes = SpeakerResNet((1, 1, 1, 1), 8, width=4), []
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        network.get_submodule(stage).register_forward_hook(
            lambda _, __, out: sizes.append(tuple(out.shape[1:]))
        )
    network(torch.randn(2, 200, 80))
    assert sizes == [(4, 80, 200), (8, 40, 100), (16, 20, 50), (32, 10, 25)]


@pytest.mark.parametrize("num_convolutions", [2, 3])
def test_a_residual_block_is_its_formula(num_convolutions: int) -> None:
    block = unsettle(SpeakerBlock(4, 6, 2, num_convolutions=num_convolutions))
    inputs = torch.randn(2, 4, 8, 10)
    conv, parts = functional.conv2d, dict(block.named_children())
    weights = {name: part.weight for name, part in parts.items() if name.startswith("conv")}
    if num_convolutions == 2:
        out = norm(parts["bn1"], conv(inputs, weights["conv1"], stride=2, padding=1)).relu()
        out = norm(parts["bn2"], conv(out, weights["conv2"], padding=1))
    else:
        out = norm(parts["bn1"], conv(inputs, weights["conv1"])).relu()
        out = norm(parts["bn2"], conv(out, weights["conv2"], stride=2, padding=1)).relu()
        out = norm(parts["bn3"], conv(out, weights["conv3"]))
    first, last = block.shortcut  # type: ignore[misc]
    shortcut = norm(last, conv(inputs, first.weight, stride=2))
    torch.testing.assert_close(block(inputs), (out + shortcut).relu(), rtol=1e-4, atol=1e-5)


def test_the_groups_of_a_scaled_convolution_see_further_and_further() -> None:
    """y_1 = f(x_1), y_i = f(x_i + y_(i-1)), y_8 = x_8, with f: convolution, ReLU, norm."""
    layer = unsettle(ScaledConvolution(16, dilation=3))
    frames = torch.randn(2, 16, 30)
    groups = [frames[:, 2 * i : 2 * i + 2] for i in range(8)]
    done: list[Tensor] = []
    for index, (conv, bn) in enumerate(zip(layer.convs, layer.bns, strict=True)):  # type: ignore
        out = groups[index] + (done[-1] if done else 0.0)
        out = functional.conv1d(out, conv.weight, conv.bias, padding=3, dilation=3)
        done.append(norm(bn, out.relu()))
    expected = torch.cat([*done, groups[7]], dim=1)
    torch.testing.assert_close(layer(frames), expected, rtol=1e-4, atol=1e-5)


def test_an_ecapa_block_gates_channels_by_their_means() -> None:
    block = unsettle(EcapaBlock(16, dilation=2))
    frames = torch.randn(2, 16, 20)
    first, scaled, second, gate = block.se_res2block  # type: ignore[misc]
    out = second(scaled(first(frames)))
    hidden = functional.linear(out.mean(2), gate.linear1.weight, gate.linear1.bias).relu()
    share = torch.sigmoid(functional.linear(hidden, gate.linear2.weight, gate.linear2.bias))
    torch.testing.assert_close(block(frames), frames + out * share[:, :, None])
    mixed = norm(first.bn, functional.conv1d(frames, first.conv.weight, first.conv.bias).relu())
    torch.testing.assert_close(first(frames), mixed)


def test_a_context_mask_is_its_formula() -> None:
    layer = MaskedConvolution(dilation=2).eval()
    frames = torch.randn(2, 128, 130)
    local = torch.cat([frames[:, :, :100].mean(2, True).expand(-1, -1, 100),
                       frames[:, :, 100:].mean(2, True).expand(-1, -1, 30)], dim=2)  # fmt: skip
    context = frames.mean(2, keepdim=True) + local
    mask = torch.sigmoid(layer.linear2(layer.linear1(context).relu()))
    weight = layer.linear_local.weight
    expected = functional.conv1d(frames, weight, padding=2, dilation=2) * mask
    torch.testing.assert_close(layer(frames), expected, rtol=1e-4, atol=1e-5)


def test_a_dense_block_appends_what_each_layer_adds() -> None:
    network = unsettle(CamPlusPlus(8))
    block = network.get_submodule("xvector.block1")
    frames = torch.randn(1, 128, 20)
    out = block(frames)
    assert out.shape == (1, 128 + 12 * 32, 20)
    torch.testing.assert_close(out[:, :128], frames)
    last = network.get_submodule("xvector.block1.tdnnd12")
    assert isinstance(last, DenseLayer)
    torch.testing.assert_close(out[:, -32:], last(out[:, :-32]))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (
            lambda: speaker_resnet(34),
            "conv1.weight bn1.running_mean layer1.0.conv1.weight layer2.0.shortcut.0.weight "
            "layer2.0.shortcut.1.bias layer4.2.bn2.weight seg_1.weight seg_1.bias",
        ),
        (lambda: speaker_resnet(50), "layer1.0.conv3.weight layer1.0.shortcut.0.weight"),
        (
            lambda: EcapaTdnn(),
            "layer1.conv.bias layer2.se_res2block.0.bn.weight layer3.se_res2block.1.convs.6.weight "
            "layer4.se_res2block.3.linear2.bias conv.weight pool.linear1.weight bn.running_var "
            "linear.weight",
        ),
        (
            lambda: CamPlusPlus(),
            "head.layer1.0.shortcut.0.weight head.conv2.weight xvector.tdnn.linear.weight "
            "xvector.tdnn.nonlinear.batchnorm.weight xvector.block3.tdnnd16.cam_layer.linear2.bias "
            "xvector.block2.tdnnd24.nonlinear1.batchnorm.bias xvector.transit3.linear.weight "
            "xvector.out_nonlinear.batchnorm.weight xvector.dense.linear.weight "
            "xvector.dense.nonlinear.batchnorm.running_mean",
        ),
    ],
)
def test_names_are_those_of_published_checkpoints(
    build: Callable[[], nn.Module], names: str
) -> None:
    with torch.device("meta"):
        state = build().state_dict()
    assert set(names.split()) <= set(state)
    assert not [name for name in state if name.startswith("frontend")]


def test_errors_name_the_value_and_what_is_known() -> None:
    with pytest.raises(ConfigError, match="depth is 35; known depths are 18, 34, 50, 101"):
        speaker_resnet(35)
    with pytest.raises(ConfigError, match="width is 20; it must be a multiple of 8"):
        EcapaTdnn(width=20)
    with pytest.raises(ConfigError, match="embedding_dim is 0"):
        CamPlusPlus(0)
