"""Speaker networks: sizes of the published ones, formulas of blocks and pooling, any input."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qmargin.errors import ConfigError, ShapeError
from qmargin.models import create_backbone
from qmargin.models.features import FilterBank
from qmargin.models.speaker import (
    POOLINGS,
    AttentiveStatisticsPooling,
    CamPlusPlus,
    EcapaBlock,
    EcapaTdnn,
    MaskedConvolution,
    ScaledConvolution,
    SpeakerBlock,
    SpeakerInput,
    SpeakerResNet,
    StatisticsPooling,
)

SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: SpeakerResNet((1, 1, 1, 1), 8, width=4),
    "resnet3": lambda: SpeakerResNet((1, 2, 1, 1), 8, width=4, num_convolutions=3),
    "attentive": lambda: SpeakerResNet((1, 1, 1, 1), 8, width=4, pooling="attentive"),
    "ecapa": lambda: EcapaTdnn(8, width=16),
    "campplus": lambda: CamPlusPlus(8),
}


def norm(layer: nn.Module, inputs: Tensor) -> Tensor:
    """A batch norm in evaluation, by its formula."""
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    scale = (layer.running_var + layer.eps).rsqrt() * layer.weight
    out = (inputs - layer.running_mean.view(shape)) * scale.view(shape)
    return out + layer.bias.view(shape)


def unsettle(module: nn.Module) -> nn.Module:
    """Norms whose numbers are not zeros and ones, in evaluation."""
    generator = torch.Generator().manual_seed(3)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) and part.affine:
            for tensor in (part.weight, part.bias, part.running_mean, part.running_var):
                tensor.data.uniform_(0.5, 1.5, generator=generator)
    return module.eval()


@pytest.mark.parametrize(
    ("name", "options", "count", "names"),
    [
        ("speaker_resnet18", {}, 4_105_440, ""),
        (
            "speaker_resnet34",
            {},
            6_634_336,
            "conv1.weight bn1.running_mean layer1.0.conv1.weight layer2.0.shortcut.0.weight "
            "layer2.0.shortcut.1.bias layer4.2.bn2.weight seg_1.weight seg_1.bias",
        ),
        (
            "speaker_resnet50",
            {},
            11_131_360,
            "layer1.0.conv3.weight layer1.0.shortcut.0.weight",
        ),
        ("speaker_resnet101", {}, 15_892_448, ""),
        ("speaker_resnet34", {"pooling": "attentive"}, 7_292_384, "pool.linear2.bias"),
        (
            "ecapa512",
            {},
            6_190_720,
            "layer1.conv.bias layer2.se_res2block.0.bn.weight layer3.se_res2block.1.convs.6.weight "
            "layer4.se_res2block.3.linear2.bias conv.weight pool.linear1.weight bn.running_var "
            "linear.weight",
        ),
        ("ecapa1024", {}, 14_657_088, ""),
        ("ecapa512", {"has_context": False}, 5_797_504, ""),
        (
            "campplus",
            {},
            6_848_544,
            "head.layer1.0.shortcut.0.weight head.conv2.weight xvector.tdnn.linear.weight "
            "xvector.tdnn.nonlinear.batchnorm.weight xvector.block3.tdnnd16.cam_layer.linear2.bias "
            "xvector.block2.tdnnd24.nonlinear1.batchnorm.bias xvector.transit3.linear.weight "
            "xvector.out_nonlinear.batchnorm.weight xvector.dense.linear.weight "
            "xvector.dense.nonlinear.batchnorm.running_mean",
        ),
    ],
)
def test_sizes_and_names_are_those_of_published_networks(name, options, count, names):
    dim = 256 if "resnet" in name else 192
    with torch.device("meta"):
        network = create_backbone(name, embedding_dim=dim, **options)
    assert sum(weight.numel() for weight in network.parameters()) == count
    assert set(names.split()) <= set(network.state_dict())
    assert not [key for key in network.state_dict() if key.startswith("frontend")]


def test_the_channels_an_ecapa_pools_are_an_option():
    torch.manual_seed(0)
    network = EcapaTdnn(8, width=16, mixed=24).eval()
    pooled = []
    network.pool.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0].shape[1]))
    assert network(torch.randn(2, 30, 80)).shape == (2, 8)
    assert pooled == [24] and network.linear.in_features == 2 * 24
    with pytest.raises(ConfigError, match="mixed is 0"):
        EcapaTdnn(8, width=16, mixed=0)


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_parameter_under_autocast_too(name):
    torch.manual_seed(0)
    network = SMALL[name]()
    for is_half in (False, True):
        network.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
            embeddings = network(torch.randn(3, 61, 80))
        assert embeddings.shape == (3, 8)
        assert embeddings.dtype == torch.float32  # pooling and projection keep their precision
        embeddings.square().sum().backward()
        for key, parameter in network.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), key


@pytest.mark.parametrize("name", SMALL)
def test_embeddings_depend_on_the_recording_alone(name):
    """Waveforms give those of their filter banks, and neighbours in the batch do not matter."""
    torch.manual_seed(0)
    network = unsettle(SMALL[name]())
    waveforms = 0.1 * torch.randn(2, 16000)
    features = FilterBank(num_bins=80)(waveforms)
    features = features - features.mean(1, keepdim=True)
    torch.testing.assert_close(network(waveforms), network(features), rtol=1e-4, atol=1e-5)
    inputs = torch.randn(3, 120, 80, dtype=torch.float64)
    torch.testing.assert_close(network.double()(inputs)[1:2], network(inputs[1:2]))


@pytest.mark.parametrize("name", SMALL)
def test_the_shortest_recording(name):
    network = SMALL[name]().eval()
    assert bool(torch.isfinite(network(torch.randn(1, 9, 80))).all())
    with pytest.raises(ShapeError, match=r"\(1, 8, 80\).*at least 9 frames \(1,680 samples\)"):
        network(torch.randn(1, 8, 80))
    with pytest.raises(ShapeError, match=r"\(1, 9, 40\)"):
        network(torch.randn(1, 9, 40))


def test_other_numbers_of_bins():
    for bins in (40, 60, 64):
        network = SpeakerResNet((1, 1, 1, 1), 8, width=4, num_bins=bins).eval()
        assert network(torch.randn(1, 30, bins)).shape == (1, 8)


def test_dither_is_for_training_only():
    frontend, waveforms = SpeakerInput(dither=1.0), torch.zeros(1, 4000)
    assert bool((frontend(waveforms) != frontend(waveforms)).any())
    frontend.eval()
    assert bool((frontend(waveforms) == frontend(waveforms)).all())


def test_a_resnet_halves_bins_and_frames_three_times():
    network, sizes = SpeakerResNet((1, 1, 1, 1), 8, width=4), []
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        network.get_submodule(stage).register_forward_hook(
            lambda _, __, out: sizes.append(tuple(out.shape[1:]))
        )
    network(torch.randn(2, 200, 80))
    assert sizes == [(4, 80, 200), (8, 40, 100), (16, 20, 50), (32, 10, 25)]


@pytest.mark.parametrize("stride", [2, (2, 1)])
@pytest.mark.parametrize("num_convolutions", [2, 3])
def test_a_residual_block_is_its_formula(num_convolutions, stride):
    block = unsettle(SpeakerBlock(4, 6, stride, num_convolutions=num_convolutions))
    inputs = torch.randn(2, 4, 8, 10)
    if num_convolutions == 2:
        out = norm(block.bn1, F.conv2d(inputs, block.conv1.weight, stride=stride, padding=1))
        out = norm(block.bn2, F.conv2d(out.relu(), block.conv2.weight, padding=1))
    else:
        out = norm(block.bn1, F.conv2d(inputs, block.conv1.weight)).relu()
        out = norm(block.bn2, F.conv2d(out, block.conv2.weight, stride=stride, padding=1)).relu()
        out = norm(block.bn3, F.conv2d(out, block.conv3.weight))
    first, last = block.shortcut
    shortcut = norm(last, F.conv2d(inputs, first.weight, stride=stride))
    torch.testing.assert_close(block(inputs), (out + shortcut).relu(), rtol=1e-4, atol=1e-5)


def test_the_groups_of_a_scaled_convolution_see_further_and_further():
    """y_1 = f(x_1), y_i = f(x_i + y_(i-1)), y_8 = x_8, with f: convolution, ReLU, norm."""
    layer = unsettle(ScaledConvolution(16, dilation=3))
    frames = torch.randn(2, 16, 30)
    groups = [frames[:, 2 * i : 2 * i + 2] for i in range(8)]
    done: list[Tensor] = []
    for index, (conv, bn) in enumerate(zip(layer.convs, layer.bns, strict=True)):
        out = groups[index] + (done[-1] if done else 0.0)
        out = F.conv1d(out, conv.weight, conv.bias, padding=3, dilation=3)
        done.append(norm(bn, out.relu()))
    expected = torch.cat([*done, groups[7]], dim=1)
    torch.testing.assert_close(layer(frames), expected, rtol=1e-4, atol=1e-5)


def test_an_ecapa_block_gates_channels_by_their_means():
    block = unsettle(EcapaBlock(16, dilation=2))
    frames = torch.randn(2, 16, 20)
    first, scaled, second, gate = block.se_res2block
    out = second(scaled(first(frames)))
    hidden = F.linear(out.mean(2), gate.linear1.weight, gate.linear1.bias).relu()
    share = torch.sigmoid(F.linear(hidden, gate.linear2.weight, gate.linear2.bias))
    torch.testing.assert_close(block(frames), frames + out * share[:, :, None])
    mixed = norm(first.bn, F.conv1d(frames, first.conv.weight, first.conv.bias).relu())
    torch.testing.assert_close(first(frames), mixed)


def test_a_context_mask_is_its_formula():
    layer = MaskedConvolution(dilation=2).eval()
    frames = torch.randn(2, 128, 130)
    local = torch.cat([frames[:, :, :100].mean(2, True).expand(-1, -1, 100),
                       frames[:, :, 100:].mean(2, True).expand(-1, -1, 30)], dim=2)  # fmt: skip
    context = frames.mean(2, keepdim=True) + local
    mask = torch.sigmoid(layer.linear2(layer.linear1(context).relu()))
    expected = F.conv1d(frames, layer.linear_local.weight, padding=2, dilation=2) * mask
    torch.testing.assert_close(layer(frames), expected, rtol=1e-4, atol=1e-5)


def test_a_dense_block_appends_what_each_layer_adds():
    network = unsettle(CamPlusPlus(8))
    frames = torch.randn(1, 128, 20)
    out = network.get_submodule("xvector.block1")(frames)
    assert out.shape == (1, 128 + 12 * 32, 20)
    torch.testing.assert_close(out[:, :128], frames)
    last = network.get_submodule("xvector.block1.tdnnd12")
    torch.testing.assert_close(out[:, -32:], last(out[:, :-32]))


def test_statistics_are_means_and_unbiased_deviations():
    frames = torch.randn(3, 4, 7, dtype=torch.float64)
    pooled = StatisticsPooling(4)(frames).numpy()
    np.testing.assert_allclose(pooled[:, :4], frames.numpy().mean(2), atol=1e-12)
    expected = np.sqrt(frames.numpy().var(2, ddof=1) + 1e-7)
    np.testing.assert_allclose(pooled[:, 4:], expected, atol=1e-12)
    wide = torch.randn(2, 3, 5, 6)  # channels and bins become one axis, channels first
    torch.testing.assert_close(StatisticsPooling(15)(wide)[:, 5], wide[:, 1, 0].mean(1))


@pytest.mark.parametrize("has_context", [False, True])
def test_attention_is_its_formula(has_context):
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


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_of_silence_and_of_half_precision(kind):
    silence = torch.zeros(1, 3, 5, requires_grad=True)
    pooling = POOLINGS[kind](3)
    pooled = pooling(silence)
    pooled.sum().backward()
    assert bool(pooled.isfinite().all()) and bool(silence.grad.isfinite().all())
    frames = 300.0 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = pooling(frames.half())  # 300 squared is beyond float16
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, pooling(frames.half().float()))


def test_errors_name_the_value():
    for make, message in (
        (lambda: EcapaTdnn(width=20), "width is 20"),
        (lambda: CamPlusPlus(0), "embedding_dim is 0"),
        (lambda: SpeakerResNet((1, 1, 1, 1), pooling="mean"), "pooling is 'mean'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    for pooling, shape in (
        (StatisticsPooling(4), (1, 4, 1)),
        (AttentiveStatisticsPooling(5), (1, 4, 9)),
    ):
        with pytest.raises(ShapeError, match=str(shape)[1:-1]):
            pooling(torch.zeros(shape))
