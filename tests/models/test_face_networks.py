"""Face networks: sizes and names of the published ones, formulas of their blocks, recomputation."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qmargin.errors import ConfigError, ShapeError
from qmargin.models import create_backbone, list_backbones, register_backbone
from qmargin.models.face import (
    Attention,
    Bottleneck,
    DropPath,
    IResNet,
    MobileFaceNet,
    ResidualBlock,
    VisionTransformer,
    check_faces,
)
from qmargin.models.layers import run_blocks
from qmargin.registry import backbones

SMALL = (1, 1, 1, 1)
NETWORKS = {
    "iresnet": lambda: IResNet((1, 2, 1, 1), 8, dropout=0.3),
    "mobilefacenet": lambda: MobileFaceNet(SMALL, 1, 8),
    "vit": lambda: VisionTransformer(16, 2, 8, drop_path=0.4, mask_ratio=0.3),
}
PUBLISHED = {  # parameters, and names of checkpoints; the last name must be absent
    "iresnet18": (
        24_025_600,
        "conv1.weight bn1.running_mean prelu.weight layer1.0.downsample.0.weight "
        "layer1.0.downsample.1.weight layer4.1.bn3.bias bn2.weight fc.bias "
        "features.running_var layer1.1.downsample.0.weight",
    ),
    "iresnet34": (34_139_328, ""),
    "iresnet50": (43_590_848, ""),
    "iresnet100": (65_156_160, ""),
    "iresnet200": (118_833_920, ""),
    "mobilefacenet": (
        2_059_520,
        "layers.0.layers.0.weight layers.1.layers.2.weight layers.2.layers.0.layers.0.weight "
        "layers.3.layers.3.layers.2.layers.1.running_var features.layers.0.layers.0.weight "
        "layers.7.layers.1.layers.1.layers.2.weight conv_sep.layers.1.bias "
        "features.layers.2.weight features.layers.3.running_mean features.layers.2.bias",
    ),
    "mobilefacenet_large": (6_314_880, ""),
    "vit_tiny": (
        19_137_792,
        "pos_embed mask_token patch_embed.proj.bias blocks.1.norm1.weight "
        "blocks.1.attn.qkv.weight blocks.0.attn.proj.bias blocks.0.mlp.fc1.weight norm.bias "
        "feature.0.weight feature.3.running_var blocks.0.attn.qkv.bias",
    ),
    "vit_small": (76_023_296, ""),
    "vit_base": (113_833_472, ""),
    "vit_large": (255_684_352, ""),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_names_are_those_of_published_networks(name):
    count, text = PUBLISHED[name]
    with torch.device("meta"):
        network = create_backbone(name)
        assert network.eval()(torch.empty(2, 3, 112, 112)).shape == (2, 512)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    *present, absent = text.split() or ["none"]
    assert set(present) <= set(network.state_dict()) and absent not in network.state_dict()


def test_every_stage_halves_the_image():
    sizes: list[tuple[int, ...]] = []
    network, mobile = IResNet(SMALL, embedding_dim=8), MobileFaceNet(SMALL, 2, 8)
    stages = (network.layer1, network.layer2, network.layer3, network.layer4, *mobile.layers)
    for stage in stages:
        stage.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    for made in (network, mobile):
        made(torch.randn(2, 3, 112, 112))
    assert sizes[:4] == [(64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)]
    halved = [(128, 56, 56), (128, 28, 28), (256, 14, 14), (256, 7, 7)]
    assert sizes[4:] == [size for size in halved for _ in range(2)]


def test_a_block_is_its_formula():
    """Norm - convolution - norm - PReLU - convolution - norm, plus the shortcut, no activation."""
    block = ResidualBlock(4, 6, stride=2).eval()
    inputs = torch.randn(2, 4, 8, 8)
    out = F.conv2d(block.bn1(inputs), block.conv1.weight, padding=1)
    out = F.prelu(block.bn2(out), block.prelu.weight)
    out = block.bn3(F.conv2d(out, block.conv2.weight, stride=2, padding=1))
    first, last = block.downsample
    torch.testing.assert_close(block(inputs), out + last(F.conv2d(inputs, first.weight, stride=2)))


def test_shortcuts_without_weights_take_every_other_pixel():
    block = ResidualBlock(4, 4, 2, "subsample").eval()
    inputs = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        block.bn3.weight.zero_()
    assert torch.equal(block(inputs), inputs[:, :, ::2, ::2])
    network = IResNet((2, 1, 1, 1), 8, shortcut="subsample")
    names = {name.rsplit(".downsample")[0] for name in network.state_dict() if "downsample" in name}
    assert names == {"layer2.0", "layer3.0", "layer4.0"}  # where channels change


def test_first_values():
    torch.manual_seed(0)
    network = IResNet(SMALL, 8)
    assert abs(float(network.layer4[0].conv2.weight.detach().std()) - 0.1) < 1e-3
    assert bool((network.features.weight == 1.0).all()) and network.layer1[0].bn1.eps == 1e-5
    frozen = [name for name, one in network.named_parameters() if not one.requires_grad]
    assert frozen == ["features.weight"]


def test_a_bottleneck_is_its_formula():
    block = Bottleneck(4, 4, 8).eval()
    inputs = torch.randn(2, 4, 6, 6)
    out = inputs
    for unit, groups, padding in zip(block.layers, (1, 8, 1), (0, 1, 0), strict=True):
        filters, norm, *slopes = unit.layers
        out = norm(F.conv2d(out, filters.weight, padding=padding, groups=groups))
        out = F.prelu(out, slopes[0].weight) if slopes else out
    torch.testing.assert_close(block(inputs), inputs + out)
    assert len(block.layers[2].layers) == 2  # no activation where channels are few


def test_attention_is_its_formula():
    attention = Attention(8, 2)
    tokens = torch.randn(3, 5, 8)
    query, key, value = (
        (tokens @ part.T).view(3, 5, 2, 4).transpose(1, 2) for part in attention.qkv.weight.chunk(3)
    )
    shares = (query @ key.transpose(2, 3) / math.sqrt(4)).softmax(-1)
    expected = attention.proj((shares @ value).transpose(1, 2).reshape(3, 5, 8))
    torch.testing.assert_close(attention(tokens), expected)


def test_masked_patches_are_not_looked_at():
    """Their gradient is zero, the others' is not, and their number is the share asked for."""
    torch.manual_seed(0)
    network = VisionTransformer(16, 1, 8, mask_ratio=0.25)
    images = torch.randn(4, 3, 112, 112, requires_grad=True)
    (network(images) * torch.randn(4, 8)).sum().backward()
    seen = images.grad[:, :, :108, :108].abs().sum(1).unfold(1, 9, 9).unfold(2, 9, 9)
    is_seen = seen.sum((3, 4)).flatten(1) > 0  # [4, 144]
    assert is_seen.sum(1).tolist() == [108] * 4
    assert not torch.equal(is_seen[0], is_seen[1])
    assert bool((network.mask_token.grad != 0).any())


def test_unmasked_tokens_stay_at_their_places(monkeypatch):
    """Without blocks, training projects the tokens of evaluation, but for the masked ones."""
    network = VisionTransformer(16, 0, 8, mask_ratio=0.5)
    seen: list[Tensor] = []
    network.feature.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(2, 3, 112, 112)
    network.train()(images)
    network.eval()(images)
    masked, whole = (tokens.view(2, 144, 16) for tokens in seen)
    is_masked = (masked == network.mask_token).all(2)
    assert is_masked.sum(1).tolist() == [72, 72]
    torch.testing.assert_close(masked[~is_masked], whole[~is_masked])


def test_evaluation_is_deterministic_and_sees_no_other_sample():
    network = VisionTransformer(16, 2, 8, drop_path=0.5, mask_ratio=0.5).eval()
    images = torch.randn(3, 3, 112, 112)
    embeddings = network(images)
    assert torch.equal(network(images), embeddings)
    torch.testing.assert_close(network(images[:1]), embeddings[:1])


def test_dropped_branches_keep_their_mean():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    out = drop(torch.ones(4000, 2, 3))
    assert out.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert bool((out == out[:, :1, :1]).all())  # whole samples
    assert float(out.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(torch.ones(2, 2, 3)), torch.ones(2, 2, 3))
    network = VisionTransformer(16, 3, 8, drop_path=0.2)
    assert [block.drop_path.rate for block in network.blocks] == [0.0, 0.1, 0.2]


def one_step(network: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Embeddings, and gradients and statistics after a step in training mode, from fixed draws."""
    torch.manual_seed(5)
    embeddings = network(images)
    embeddings.square().sum().backward()
    grads = {name: weight.grad for name, weight in network.named_parameters()}
    state = {**grads, **dict(network.named_buffers())}
    return embeddings, {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize("name", NETWORKS)
def test_recomputed_steps_have_the_same_gradients_and_statistics_and_keep_less(name):
    """Batch norms must not move twice, and dropped parts must be dropped again."""
    torch.manual_seed(0)
    plain = NETWORKS[name]()
    lean = copy.deepcopy(plain)
    lean.gradient_checkpointing = True
    images = torch.randn(2, 3, 112, 112)
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    kept = []
    for network in map(copy.deepcopy, (plain, lean)):
        sizes.clear()
        weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(images)
        kept.append(sum(size for place, size in sizes.items() if place not in weights))
    assert kept[1] < 0.6 * kept[0]
    (embeddings, state), (lean_embeddings, lean_state) = (
        one_step(network, images) for network in (plain, lean)
    )
    assert torch.equal(embeddings, lean_embeddings)
    assert state.keys() == lean_state.keys()
    assert [key for key in state if not torch.equal(state[key], lean_state[key])] == []
    with torch.no_grad():
        assert lean.eval()(images).shape == (2, 8)


def test_the_buffers_of_a_block_are_its_own_again_after_the_backward_pass():
    """An optimizer, a moving average or a checkpoint may hold on to them."""
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = dict(block.named_buffers())
    inputs = torch.randn(4, 2, requires_grad=True)
    run_blocks(nn.Sequential(block), inputs, recompute=True).square().sum().backward()
    after = dict(block.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    assert int(after["1.num_batches_tracked"]) == 1


@pytest.mark.slow
def test_compiled_networks_move_their_statistics_once_too():
    plain = NETWORKS["iresnet"]()
    plain.dropout.p = 0.0
    lean = copy.deepcopy(plain)
    lean.gradient_checkpointing = True
    lean.compile(backend="aot_eager")
    images = torch.randn(2, 3, 112, 112)
    _, state = one_step(plain, images)
    _, lean_state = one_step(lean, images)
    for key, value in state.items():
        torch.testing.assert_close(lean_state[key], value, rtol=1e-4, atol=1e-5)


def test_norms_in_evaluation_mode_keep_reading_their_statistics():
    block = nn.Sequential(nn.BatchNorm1d(2)).eval()
    block[0].running_mean += 3.0
    inputs = torch.randn(4, 2, requires_grad=True)
    out = run_blocks(block, inputs, recompute=True)
    torch.testing.assert_close(out, block(inputs))
    out.sum().backward()
    torch.testing.assert_close(inputs.grad, torch.full((4, 2), (1.0 + 1e-5) ** -0.5))


@pytest.mark.parametrize("name", NETWORKS)
def test_both_layouts_give_the_same_embeddings(name):
    torch.manual_seed(1)
    network = NETWORKS[name]().eval()
    images = torch.randn(2, 3, 112, 112)
    expected = network(images)
    network = network.to(memory_format=torch.channels_last)
    found = network(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_reaches_every_parameter(name):
    network = NETWORKS[name]()
    network.gradient_checkpointing = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = network(torch.randn(4, 3, 112, 112))
    assert embeddings.dtype == torch.float32  # the last layers keep their precision
    embeddings.square().sum().backward()
    for key, weight in network.named_parameters():
        assert weight.grad is not None or not weight.requires_grad, key


def test_errors_name_the_value():
    for make, message in (
        (lambda: create_backbone("iresnet18", embedding_dim=0), "embedding_dim is 0"),
        (lambda: create_backbone("mobilefacenet", embedding_dim=0), "embedding_dim is 0"),
        (lambda: create_backbone("iresnet10O"), "'iresnet100'"),
        (lambda: register_backbone("iresnet18", IResNet), "'iresnet18'"),
        (lambda: IResNet(SMALL, shortcut="pool"), "shortcut is 'pool'"),
        (lambda: IResNet(SMALL, dropout=1.0), "dropout is 1"),
        (lambda: VisionTransformer(16, 1, num_heads=3), "num_heads is 3"),
        (lambda: VisionTransformer(16, 1, mask_ratio=1.0), "mask_ratio is 1"),
        (lambda: VisionTransformer(16, 1, drop_path=1.0), "drop_path is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    for shape in ((1, 3, 96, 96), (2, 1, 112, 112)):
        with pytest.raises(ShapeError, match=str(shape)[1:-1]):
            check_faces(torch.empty(shape))


def test_own_backbones_have_names_too(monkeypatch):
    monkeypatch.setattr(backbones, "_entries", dict(backbones._entries))
    register_backbone("line", lambda embedding_dim: nn.Linear(3, embedding_dim))
    assert list_backbones()[-1] == "line"
    assert create_backbone("line", embedding_dim=5)(torch.ones(2, 3)).shape == (2, 5)
