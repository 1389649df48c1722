import math

import pytest
import torch

from qmargin.errors import ConfigError
from qmargin.models.registry import create_backbone
from qmargin.models.vit import NUM_PATCHES, Attention, DropPath, VisionTransformer, vit


def count(width: int, depth: int, embedding_dim: int) -> int:
    """Weights of a transformer, by hand."""
    block = 3 * width**2 + (width**2 + width) + 8 * width**2 + 5 * width + 4 * width
    patches = 3 * 81 * width + width + 144 * width + width
    end = 144 * width**2 + 2 * width + width * embedding_dim + 2 * embedding_dim
    return depth * block + patches + 2 * width + end


@pytest.mark.parametrize(
    ("name", "width", "depth", "number"),
    [
        ("vit_tiny", 256, 12, 19_137_792),
        ("vit_small", 512, 12, 76_023_296),
        ("vit_base", 512, 24, 113_833_472),
        ("vit_large", 768, 24, 255_684_352),
    ],
)
def test_sizes_are_those_used_for_faces(name: str, width: int, depth: int, number: int) -> None:
    with torch.device("meta"):
        network = create_backbone(name)
        assert network.eval()(torch.empty(2, 3, 112, 112)).shape == (2, 512)
    assert sum(weight.numel() for weight in network.parameters()) == number
    assert number == count(width, depth, 512)


def test_attention_is_its_formula() -> None:
    attention = Attention(8, 2)
    tokens = torch.randn(3, 5, 8)
    query, key, value = (
        (tokens @ part.T).view(3, 5, 2, 4).transpose(1, 2) for part in attention.qkv.weight.chunk(3)
    )
    shares = (query @ key.transpose(2, 3) / math.sqrt(4)).softmax(-1)
    expected = attention.proj((shares @ value).transpose(1, 2).reshape(3, 5, 8))
    torch.testing.assert_close(attention(tokens), expected)


def test_masked_patches_are_not_looked_at() -> None:
    """Their gradient is zero, the others' is not, and their number is the share asked for."""
    torch.manual_seed(0)
    network = VisionTransformer(16, 1, 8, mask_ratio=0.25)
    images = torch.randn(4, 3, 112, 112, requires_grad=True)
    (network(images) * torch.randn(4, 8)).sum().backward()
    assert images.grad is not None
    seen = images.grad[:, :, :108, :108].abs().sum(1).unfold(1, 9, 9).unfold(2, 9, 9)
    is_seen = seen.sum((3, 4)).flatten(1) > 0  # [4, 144]
    assert is_seen.sum(1).tolist() == [108] * 4
    assert not torch.equal(is_seen[0], is_seen[1])
    assert network.mask_token.grad is not None
    assert bool((network.mask_token.grad != 0).any())


def test_unmasked_tokens_stay_at_their_places() -> None:
    """With blocks that do nothing, training sees the tokens of evaluation where it looks."""
    network = VisionTransformer(16, 1, 8, mask_ratio=0.5)
    kept = torch.randn(2, network.num_kept, 16)
    places = torch.stack([torch.randperm(NUM_PATCHES) for _ in range(2)])
    tokens = network._put_back(kept, places)
    for row in range(2):
        torch.testing.assert_close(tokens[row, places[row, : network.num_kept]], kept[row])
        left = places[row, network.num_kept :]
        torch.testing.assert_close(tokens[row, left], network.mask_token[0].expand(len(left), -1))


def test_evaluation_is_deterministic_and_sees_no_other_sample() -> None:
    network = VisionTransformer(16, 2, 8, drop_path=0.5, mask_ratio=0.5).eval()
    images = torch.randn(3, 3, 112, 112)
    embeddings = network(images)
    assert torch.equal(network(images), embeddings)
    torch.testing.assert_close(network(images[:1]), embeddings[:1])


def test_dropped_branches_keep_their_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    out = drop(torch.ones(4000, 2, 3))
    assert out.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert bool((out == out[:, :1, :1]).all())  # whole samples
    assert float(out.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(torch.ones(2, 2, 3)), torch.ones(2, 2, 3))


def test_later_blocks_are_dropped_more_often() -> None:
    network = VisionTransformer(16, 3, 8, drop_path=0.2)
    assert [block.drop_path.rate for block in network.blocks] == [0.0, 0.1, 0.2]


def test_names_are_those_of_published_checkpoints() -> None:
    names = set(VisionTransformer(16, 2, 8).state_dict())
    for name in (
        "pos_embed",
        "mask_token",
        "patch_embed.proj.bias",
        "blocks.1.norm1.weight",
        "blocks.1.attn.qkv.weight",
        "blocks.0.attn.proj.bias",
        "blocks.0.mlp.fc1.weight",
        "norm.bias",
        "feature.0.weight",
        "feature.3.running_var",
    ):
        assert name in names
    assert "blocks.0.attn.qkv.bias" not in names


def test_errors_name_the_value_and_the_limit() -> None:
    with pytest.raises(ConfigError, match="name is 'vit_huge'; known are vit_tiny"):
        vit("vit_huge")
    with pytest.raises(ConfigError, match="num_heads is 3; it must divide the width 16"):
        VisionTransformer(16, 1, num_heads=3)
    with pytest.raises(ConfigError, match="mask_ratio is 1;"):
        VisionTransformer(16, 1, mask_ratio=1.0)
