"""Networks for 112 x 112 face images: IResNet, MobileFaceNet and vision transformers.

Layers, names and initial values are those of InsightFace, so that its ``state_dict`` loads here. In
the transformers, attention is one fused call, and ``mask_ratio`` is the share of masked patches;
InsightFace always masks a tenth.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from qmargin.errors import ConfigError
from qmargin.models.layers import SHAPE, check_rates, check_sizes, no_autocast, refuse, run_blocks
from qmargin.registry import register_backbone

IMAGE_SIZE = 112
FEATURE_SIZE = IMAGE_SIZE // 16  # after four halvings
Shortcut = Literal["projection", "subsample"]


def check_faces(images: Tensor) -> Tensor | None:
    """Refuse anything but images ``[B, 3, 112, 112]``, see ``refuse``."""
    if images.dim() == 4 and images.shape[1:] == (3, IMAGE_SIZE, IMAGE_SIZE):
        return None
    wanted = f"this network takes [B, 3, {IMAGE_SIZE}, {IMAGE_SIZE}]"
    return refuse(images, f"images have shape {SHAPE}; {wanted}")


class ResidualBlock(nn.Module):
    """Norm, convolution, norm, PReLU, convolution, norm; nothing after the sum."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, shortcut: Shortcut = "projection"
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.prelu = nn.PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if in_channels == channels and stride != 1 and shortcut == "subsample":
            self.downsample = nn.MaxPool2d(1, stride)
        elif stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.prelu(self.bn2(self.conv1(self.bn1(inputs))))
        total: Tensor = self.bn3(self.conv2(out)) + self.downsample(inputs)
        return total


class IResNet(nn.Module):
    """IResNet: faces ``[B, 3, 112, 112]`` to embeddings ``[B, d]``.

    Convolutions follow autocast; the projection and its norm, whose weight is frozen at one, run in
    the precision of their weights. A block that halves the image and keeps its channels has a
    ``shortcut`` by ``"projection"`` as in InsightFace, or by ``"subsample"``, every other pixel, as
    in the IR networks of AdaFace.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],  # of the four stages
        embedding_dim: int = 512,
        *,
        dropout: float = 0.0,  # before the projection
        shortcut: Shortcut = "projection",
        gradient_checkpointing: bool = False,  # recompute activations in the backward pass
    ) -> None:
        super().__init__()
        if shortcut not in ("projection", "subsample"):
            raise ConfigError(f"shortcut is {shortcut!r}; known are projection, subsample")
        check_sizes(embedding_dim=embedding_dim)
        check_rates(dropout=dropout)
        self.embedding_dim = embedding_dim
        self.gradient_checkpointing = gradient_checkpointing
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.prelu = nn.PReLU(64)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                ResidualBlock(in_channels, channels, 2, shortcut),
                *(ResidualBlock(channels, channels, 1) for _ in range(num_blocks - 1)),
            )
            for in_channels, channels, num_blocks in zip(
                (64, 64, 128, 256), (64, 128, 256, 512), blocks, strict=True
            )
        )
        self.bn2 = nn.BatchNorm2d(512)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(512 * FEATURE_SIZE**2, embedding_dim)
        self.features = nn.BatchNorm1d(embedding_dim)
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, images: Tensor) -> Tensor:
        if (refused := check_faces(images)) is not None:
            return refused
        out = self.prelu(self.bn1(self.conv1(images)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            out = run_blocks(stage, out, recompute=self.gradient_checkpointing)
        out = self.dropout(self.bn2(out).flatten(1))  # [B, 25088]
        with no_autocast(out.device.type):
            embeddings: Tensor = self.features(self.fc(out.to(self.fc.weight.dtype)))
        return embeddings


for _depth, _blocks in {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    200: (6, 26, 60, 6),
}.items():
    register_backbone(f"iresnet{_depth}", partial(IResNet, _blocks))


def in_a_row(*layers: nn.Module) -> nn.Sequential:
    """Layers in a row, below the name ``layers`` of published checkpoints."""
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers)))


def conv_unit(
    in_channels: int,
    channels: int,
    size: int = 1,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    is_linear: bool = False,
) -> nn.Sequential:
    """Convolution, norm and, unless it is linear, PReLU."""
    conv = nn.Conv2d(in_channels, channels, size, stride, padding, groups=groups, bias=False)
    activation = () if is_linear else (nn.PReLU(channels),)
    return in_a_row(conv, nn.BatchNorm2d(channels), *activation)


class Bottleneck(nn.Module):
    """Widen, depthwise convolution, narrow; the input is added if the size is kept."""

    def __init__(self, in_channels: int, channels: int, inner: int, *, stride: int = 1) -> None:
        super().__init__()
        self.has_sum = stride == 1
        self.layers = nn.Sequential(
            conv_unit(in_channels, inner),
            conv_unit(inner, inner, 3, stride=stride, padding=1, groups=inner),
            conv_unit(inner, channels, is_linear=True),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return inputs + outputs if self.has_sum else outputs


class MobileFaceNet(nn.Module):
    """MobileFaceNet, for small devices: faces ``[B, 3, 112, 112]`` to embeddings ``[B, d]``.

    The names are those of InsightFace's ``mbf`` and ``mbf_large``. Convolutions follow autocast;
    from the widening to 512 channels on, layers run in the precision of their weights.
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],  # a first stage of 1 is a grouped convolution
        width: int,  # channels are 64 and 128 times this
        embedding_dim: int = 512,
        *,
        gradient_checkpointing: bool = False,  # recompute activations in the backward pass
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim)
        self.embedding_dim = embedding_dim
        self.gradient_checkpointing = gradient_checkpointing
        narrow, wide = 64 * width, 128 * width

        def stage(channels: int, inner: int, num_blocks: int) -> nn.Sequential:
            return in_a_row(*(Bottleneck(channels, channels, inner) for _ in range(num_blocks)))

        first = stage(narrow, 128, blocks[0])
        if blocks[0] == 1:
            first = conv_unit(narrow, narrow, 3, padding=1, groups=64)
        self.layers = nn.Sequential(
            conv_unit(3, narrow, 3, stride=2, padding=1),
            first,
            Bottleneck(narrow, narrow, 128, stride=2),
            stage(narrow, 128, blocks[1]),
            Bottleneck(narrow, wide, 256, stride=2),
            stage(wide, 256, blocks[2]),
            Bottleneck(wide, wide, 512, stride=2),
            stage(wide, 256, blocks[3]),
        )
        self.conv_sep = conv_unit(wide, 512)
        self.features = in_a_row(
            conv_unit(512, 512, FEATURE_SIZE, groups=512, is_linear=True),
            nn.Flatten(),
            nn.Linear(512, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        if (refused := check_faces(images)) is not None:
            return refused
        out = run_blocks(self.layers, images, recompute=self.gradient_checkpointing)
        with no_autocast(out.device.type):
            weight = next(self.conv_sep.parameters())
            embeddings: Tensor = self.features(self.conv_sep(out.to(weight.dtype)))
        return embeddings


register_backbone("mobilefacenet", partial(MobileFaceNet, (1, 4, 6, 2), 2))
register_backbone("mobilefacenet_large", partial(MobileFaceNet, (2, 8, 12, 4), 4))


PATCH_SIZE = 9
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2  # the last 4 pixels of a line are left out


class DropPath(nn.Module):
    """Drop path: in training, zero a branch for some samples and scale it for the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        kept = branch.new_empty(len(branch), 1, 1).bernoulli_(1.0 - self.rate)
        return branch * (kept / (1.0 - self.rate))


class Attention(nn.Module):
    """Multi-head attention of tokens ``[B, L, D]``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1))  # [B, L, 3, heads, D/heads]
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(query, key, value)  # [B, heads, L, D/heads]
        outputs: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return outputs


class Block(nn.Module):
    """Attention and two layers, each after a norm and added to its input."""

    def __init__(self, width: int, num_heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.ReLU6(), fc2=fc2))
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        outputs: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return outputs


class VisionTransformer(nn.Module):
    """Vision transformer: faces ``[B, 3, 112, 112]`` to embeddings ``[B, d]``.

    The tokens of all patches, side by side, are projected: there is no class token. Layers follow
    autocast; the last norm and the projection run in the precision of their weights. In training, a
    block is left out for a share of the samples that grows evenly from zero to ``drop_path``.
    """

    def __init__(
        self,
        width: int,  # of a token
        depth: int,
        embedding_dim: int = 512,
        *,
        num_heads: int = 8,
        drop_path: float = 0.0,
        mask_ratio: float = 0.0,  # share of the patches that a training step masks
        gradient_checkpointing: bool = False,  # recompute activations in the backward pass
    ) -> None:
        super().__init__()
        if num_heads < 1 or width % num_heads:
            raise ConfigError(f"num_heads is {num_heads}; it must divide the width {width}")
        check_sizes(embedding_dim=embedding_dim)
        check_rates(mask_ratio=mask_ratio, drop_path=drop_path)
        self.embedding_dim, self.mask_ratio = embedding_dim, mask_ratio
        self.num_kept = max(1, int(NUM_PATCHES * (1.0 - mask_ratio)))  # patches of a training step
        self.gradient_checkpointing = gradient_checkpointing
        patches = nn.Conv2d(3, width, PATCH_SIZE, stride=PATCH_SIZE)
        self.patch_embed = nn.Sequential(OrderedDict(proj=patches))
        self.pos_embed = nn.Parameter(torch.empty(1, NUM_PATCHES, width))
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        rates = [drop_path * place / max(depth - 1, 1) for place in range(depth)]
        self.blocks = nn.Sequential(*(Block(width, num_heads, rate) for rate in rates))
        self.norm = nn.LayerNorm(width)
        self.feature = nn.Sequential(
            nn.Linear(width * NUM_PATCHES, width, bias=False),
            nn.BatchNorm1d(width, eps=2e-5),
            nn.Linear(width, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim, eps=2e-5),
        )
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        if (refused := check_faces(images)) is not None:
            return refused
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed  # [B, 144, D]
        places: Tensor | None = None  # of the kept patches, [B, num_kept, D]
        if self.training and self.mask_ratio > 0.0:
            order = torch.rand(tokens.shape[:2], device=tokens.device).argsort(1)
            places = order[:, : self.num_kept, None].expand(-1, -1, tokens.shape[2])
            tokens = tokens.gather(1, places)
        tokens = run_blocks(self.blocks, tokens, recompute=self.gradient_checkpointing)
        with no_autocast(tokens.device.type):
            tokens = self.norm(tokens.to(self.norm.weight.dtype))
            if places is not None:
                masked = self.mask_token.to(tokens.dtype).expand(len(tokens), NUM_PATCHES, -1)
                tokens = masked.scatter(1, places, tokens)
            embeddings: Tensor = self.feature(tokens.flatten(1))
        return embeddings


for _name, _width, _depth, _rate in (  # dropping and masking as for WebFace42M
    ("vit_tiny", 256, 12, 0.1),
    ("vit_small", 512, 12, 0.1),
    ("vit_base", 512, 24, 0.05),
    ("vit_large", 768, 24, 0.05),
):
    maker = partial(VisionTransformer, _width, _depth, drop_path=_rate, mask_ratio=_rate)
    register_backbone(_name, maker)
