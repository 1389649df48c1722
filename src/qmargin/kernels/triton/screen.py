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
def _screen(
    embeddings, copy, MAXIMA, num_rows, num_groups, num_tiles, row_tiles,
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
        maxima = tl.max(tl.reshape(products, (BM, BN // GROUP, GROUP)), 2)
        rows = row_tile * BM + tl.arange(0, BM)
        groups = class_tile * (BN // GROUP) + tl.arange(0, BN // GROUP)
        is_inside = (rows[:, None] < num_rows) & (groups[None, :] < num_groups)
        offsets = rows[:, None].to(tl.int64) * num_groups + groups[None, :]
        tl.store(MAXIMA + offsets, maxima, mask=is_inside)


@triton.jit
def cosines_of_row(
    EMBEDDINGS, COPY, row, label, classes, num_classes, depth,
    WIDTH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Cosines of one row, ``-inf`` at its target and past the last class."""
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    is_class = classes < num_classes
    for offset in range(0, depth, BK):
        dimension = offset + tl.arange(0, BK)
        inside = dimension < depth
        x = tl.load(EMBEDDINGS + row.to(tl.int64) * depth + dimension, mask=inside, other=0.0)
        place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
        w = tl.load(COPY + place, mask=is_class[:, None] & inside[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    return tl.where(is_class & (classes != label), total, float("-inf"))


@triton.jit
def _repair(
    EMBEDDINGS, COPY, LABELS, MAXIMA, num_classes, num_groups, depth,
    GROUP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Maxima without what does not belong: of a row's own group, and of a last one cut short.

    A product that compares every class with every label would take a tenth longer.
    """
    row = tl.program_id(0)
    label = tl.load(LABELS + row)
    is_own = tl.program_id(1) == 0
    if (is_own == 0) | (label >= 0):  # below zero: another rank has the target
        group = tl.where(is_own, label.to(tl.int32) // GROUP, num_groups - 1)
        classes = group * GROUP + tl.arange(0, GROUP)
        cosines = cosines_of_row(
            EMBEDDINGS, COPY, row, label, classes, num_classes, depth, GROUP, BK
        )
        tl.store(MAXIMA + row.to(tl.int64) * num_groups + group, tl.max(cosines, 0))


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
        maxima,
        num_rows,
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
    # The target leaves before any maximum is used: its logit is large, its measure tiny.
    _repair[(num_rows, 2 if num_classes % GROUP else 1)](
        embeddings, copy, labels, maxima, num_classes, num_groups, depth, GROUP, 128, num_warps=1
    )
    return maxima
