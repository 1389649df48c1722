"""Screen: one product whose epilogue keeps only the maximum of each group (F4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qmargin.kernels.head_records import GROUP
from qmargin.kernels.triton.tuning import num_programs, screen_tiles


@triton.jit
def without_void(products, labels, first, num_classes, BN: tl.constexpr):
    """Products of rows with classes from ``first`` on, ``-inf`` at targets and past the last class.

    Almost no tile has any: the rest is spared a comparison for every element.
    """
    is_here = (labels >= first) & (labels < first + BN)
    has_void = (tl.max(is_here.to(tl.int32), 0) > 0) | (first + BN > num_classes)
    if has_void:
        classes = first + tl.arange(0, BN)
        is_void = (classes[None, :] == labels[:, None]) | (classes[None, :] >= num_classes)
        products = tl.where(is_void, float("-inf"), products)
    return products


@triton.jit
def _screen(
    embeddings, copy, LABELS, MAXIMA, num_rows, num_classes, num_groups, num_tiles, row_tiles,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    # Row tiles vary fastest: programs that run together share a tile of prototypes in cache.
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        row_tile = tile % row_tiles
        class_tile = tile // row_tiles
        products = tl.zeros((BM, BN), dtype=tl.float32)
        for depth in range(0, DEPTH, BK):
            x = embeddings.load([row_tile * BM, depth])
            w = copy.load([class_tile * BN, depth])
            products = tl.dot(x, w.T, products)
        rows = row_tile * BM + tl.arange(0, BM)
        labels = tl.load(LABELS + rows, mask=rows < num_rows, other=-1)
        # The target leaves before any maximum is taken: its logit is large, its measure tiny.
        products = without_void(products, labels, class_tile * BN, num_classes, BN)
        maxima = tl.max(tl.reshape(products, (BM, BN // GROUP, GROUP)), 2)
        groups = class_tile * (BN // GROUP) + tl.arange(0, BN // GROUP)
        is_inside = (rows[:, None] < num_rows) & (groups[None, :] < num_groups)
        offsets = rows[:, None].to(tl.int64) * num_groups + groups[None, :]
        tl.store(MAXIMA + offsets, maxima, mask=is_inside)


def group_maxima(embeddings: Tensor, copy: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """See ``head_reference.group_maxima``; operands in half precision, sums in float32."""
    num_rows, depth = embeddings.shape
    if depth % 8:  # the copy engine needs rows of whole 16 bytes
        missing = 8 - depth % 8
        embeddings = torch.nn.functional.pad(embeddings, (0, missing))
        copy = torch.nn.functional.pad(copy, (0, missing))
        depth += missing
    tiles = screen_tiles(num_rows)
    num_groups = -(-num_classes // GROUP)
    maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=embeddings.device)
    row_tiles = triton.cdiv(num_rows, tiles.rows)
    num_tiles = row_tiles * triton.cdiv(num_classes, tiles.classes)
    programs = min(num_programs(embeddings.device), num_tiles)
    _screen[(programs,)](
        TensorDescriptor.from_tensor(embeddings, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(copy, [tiles.classes, tiles.depth]),
        labels,
        maxima,
        num_rows,
        num_classes,
        num_groups,
        num_tiles,
        row_tiles,
        depth,
        tiles.rows,
        tiles.classes,
        tiles.depth,
        GROUP,
        programs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return maxima
