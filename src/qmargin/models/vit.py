"""Vision transformers in the sizes used for faces: 112 x 112 images, 144 patches of 9 x 9 pixels.

The layers, their names and their first values are those of the transformers that InsightFace
trains, so that a ``state_dict`` from there loads here. Two things differ: attention is one fused
call, and ``mask_ratio`` is the share of patches that is masked, where the reference masks a tenth
whatever was asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from qmargin.errors import ConfigError
from qmargin.models.face_parts import (
    IMAGE_SIZE,
    check_embedding_dim,
    check_faces,
    check_rate,
    no_autocast,
    recomputed,
)
from qmargin.registry import register_backbone

PATCH_SIZE = 9
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2  # the last 4 pixels of a line are left out
MLP_RATIO = 4


class Size(NamedTuple):
    """Width, blocks, and how much is dropped and masked in training."""

    width: int
    depth: int
    drop_path: float
    mask_ratio: float


SIZES = {  # the last two as for WebFace42M
    "vit_tiny": Size(256, 12, 0.1, 0.1),
    "vit_small": Size(512, 12, 0.1, 0.1),
    "vit_base": Size(512, 24, 0.05, 0.05),
    "vit_large": Size(768, 24, 0.05, 0.05),
}


class DropPath(nn.Module):
    """In training, leaves a branch out for some samples, and scales it for the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """What is added to the input of the branch, ``[B, L, D]``."""
        if self.rate == 0.0 or not self.training:
            return branch
        kept = branch.new_empty(len(branch), 1, 1).bernoulli_(1.0 - self.rate)
        return branch * (kept / (1.0 - self.rate))


class Attention(nn.Module):
    """Every patch looks at every other, by several heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` to the same shape."""
        parts = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1))  # [B, L, 3, heads, D/heads]
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(query, key, value)  # [B, heads, L, D/heads]
        outputs: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return outputs


class MLP(nn.Module):
    """Two layers for each patch by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.act = nn.ReLU6()
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` to the same shape."""
        outputs: Tensor = self.fc2(self.act(self.fc1(tokens)))
        return outputs


class Block(nn.Module):
    """Attention and two layers, each after a norm and added to its input."""

    def __init__(self, width: int, num_heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` to the same shape."""
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        outputs: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return outputs


class PatchEmbedding(nn.Module):
    """Pixels of a patch to a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH_SIZE, stride=PATCH_SIZE)

    def forward(self, images: Tensor) -> Tensor:
        """Images ``[B, 3, 112, 112]`` to tokens ``[B, 144, D]``."""
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class VisionTransformer(nn.Module):
    """Images ``[B, 3, 112, 112]`` to embeddings ``[B, d]`` of any length.

    The tokens of all patches, side by side, are projected: there is no class token. Layers follow
    the autocast around the call; the last norm and the projection run in the precision of their
    weights.

    Args:
        width: Of a token, ``D``.
        depth: Number of blocks.
        embedding_dim: ``d``.
        num_heads: Of attention; a divisor of ``width``.
        drop_path: Share of samples for which the last block is left out in training; the share
            grows evenly from nothing at the first.
        mask_ratio: Share of the patches that a training step does not look at.
        gradient_checkpointing: Make activations again in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        embedding_dim: int = 512,
        *,
        num_heads: int = 8,
        drop_path: float = 0.0,
        mask_ratio: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or width % num_heads:
            raise ConfigError(f"num_heads is {num_heads}; it must divide the width {width}")
        self.embedding_dim = check_embedding_dim(embedding_dim)
        self.mask_ratio = check_rate(mask_ratio, "mask_ratio")
        check_rate(drop_path, "drop_path")
        self.gradient_checkpointing = gradient_checkpointing
        self.patch_embed = PatchEmbedding(width)
        self.pos_embed = nn.Parameter(torch.empty(1, NUM_PATCHES, width))
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        rates = [drop_path * place / max(depth - 1, 1) for place in range(depth)]
        self.blocks = nn.ModuleList(Block(width, num_heads, rate) for rate in rates)
        self.norm = nn.LayerNorm(width)
        self.feature = nn.Sequential(
            nn.Linear(width * NUM_PATCHES, width, bias=False),
            nn.BatchNorm1d(width, eps=2e-5),
            nn.Linear(width, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim, eps=2e-5),
        )
        self._draw_weights_()

    def _draw_weights_(self) -> None:
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        check_faces(images)
        tokens = self.patch_embed(images) + self.pos_embed  # [B, 144, D]
        places: Tensor | None = None
        if self.training and self.mask_ratio > 0.0:
            places = self._draw_places(tokens)
            tokens = tokens.gather(1, _wide(places[:, : self.num_kept], tokens))
        if self.gradient_checkpointing and torch.is_grad_enabled():
            tokens = recomputed(self.blocks, tokens)
        else:
            for block in self.blocks:
                tokens = block(tokens)
        with no_autocast(tokens.device.type):
            tokens = self.norm(tokens.to(self.norm.weight.dtype))
            if places is not None:
                tokens = self._put_back(tokens, places)
            embeddings: Tensor = self.feature(tokens.flatten(1))
        return embeddings

    @property
    def num_kept(self) -> int:
        """Patches that a training step looks at, at least one."""
        return max(1, int(NUM_PATCHES * (1.0 - self.mask_ratio)))

    def _draw_places(self, tokens: Tensor) -> Tensor:
        """A random order of the patches for every sample, ``[B, 144]``."""
        return torch.rand(tokens.shape[:2], device=tokens.device).argsort(1)

    def _put_back(self, kept: Tensor, places: Tensor) -> Tensor:
        """Tokens at their places, ``[B, 144, D]``, with the mask token at those left out."""
        tokens = self.mask_token.to(kept.dtype).expand(len(kept), NUM_PATCHES, -1)
        return tokens.scatter(1, _wide(places[:, : self.num_kept], kept), kept)


def _wide(places: Tensor, tokens: Tensor) -> Tensor:
    """Places ``[B, L]`` as an index of whole tokens, ``[B, L, D]``."""
    return places[:, :, None].expand(-1, -1, tokens.shape[2])


def vit(name: str, embedding_dim: int = 512, **options: Any) -> VisionTransformer:
    """Vision transformer of a size, with its dropping and masking unless ``options`` has others.

    Args:
        name: ``"vit_tiny"``, ``"vit_small"``, ``"vit_base"`` or ``"vit_large"``.
        embedding_dim: ``d``.
        options: Of ``VisionTransformer``.

    Examples:
        >>> with torch.device("meta"):
        ...     network = vit("vit_tiny", mask_ratio=0.0)
        >>> len(network.blocks), network.mask_ratio, network.num_kept
        (12, 0.0, 144)
    """
    if name not in SIZES:
        raise ConfigError(f"name is {name!r}; known are {', '.join(SIZES)}")
    size = SIZES[name]
    options = {"drop_path": size.drop_path, "mask_ratio": size.mask_ratio, **options}
    return VisionTransformer(size.width, size.depth, embedding_dim, **options)


for _name in SIZES:
    register_backbone(_name, partial(vit, _name))
