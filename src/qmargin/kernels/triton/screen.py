"""Unit rows, rounded copies, and the screening product that keeps group maxima (F4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qmargin.kernels.head_reference import GROUP, PreparedRows


class ScreenTiles(NamedTuple):
    """Tiles of the fused product."""

    rows: int
    classes: int
    depth: int
    warps: int
    stages: int


def screen_tiles(num_rows: int) -> ScreenTiles:
    """Wide tiles for full batches, narrow ones when a tile would be mostly padding."""
    if num_rows > 64:
        return ScreenTiles(128, 256, 64, 8, 3)
    return ScreenTiles(64 if num_rows > 32 else 32 if num_rows > 16 else 16, 128, 64, 4, 3)


def num_programs(device: torch.device) -> int:
    """One persistent program per multiprocessor; a few in the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(number: int) -> int:
    """Smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


@triton.jit
def _unit(EMBEDDINGS, LABELS, UNIT, NORMS, ignored, depth, DEPTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    x = tl.load(EMBEDDINGS + row * depth + dimension, mask=inside, other=0.0)
    x = tl.where(inside & (tl.load(LABELS + row) == ignored), 1.0, x)
    norm = tl.sqrt(tl.sum(x * x, 0))
    tl.store(NORMS + row, norm)
    divisor = tl.where(norm < float("inf"), norm, float("nan"))
    tl.store(UNIT + row * depth + dimension, x / divisor, mask=inside)


@triton.jit
def _unit_gradient(GRADIENT, UNIT, NORMS, OUT, depth, DEPTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    g = tl.load(GRADIENT + row * depth + dimension, mask=inside, other=0.0)
    u = tl.load(UNIT + row * depth + dimension, mask=inside, other=0.0)
    g = (g - tl.sum(g * u, 0) * u) / tl.load(NORMS + row)
    tl.store(OUT + row * depth + dimension, g, mask=inside)


def unit_rows(embeddings: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """See ``head_reference.unit_rows``."""
    embeddings = embeddings.contiguous()
    num_rows, depth = embeddings.shape
    unit = torch.empty_like(embeddings)
    norms = torch.empty(num_rows, dtype=embeddings.dtype, device=embeddings.device)
    if num_rows:
        _unit[(num_rows,)](
            embeddings, labels, unit, norms, ignored, depth, power_of_two(depth), num_warps=4
        )
    return unit, norms


def unit_gradient(gradient: Tensor, unit: Tensor, norms: Tensor) -> Tensor:
    """See ``head_reference.unit_gradient``."""
    gradient = gradient.contiguous()
    num_rows, depth = gradient.shape
    out = torch.empty_like(gradient)
    if num_rows:
        _unit_gradient[(num_rows,)](
            gradient, unit, norms, out, depth, power_of_two(depth), num_warps=4
        )
    return out


@triton.jit
def _prepare(
    EMBEDDINGS, LABELS, PROTOTYPES, INVERSE_NORMS, ROUNDED, ROUNDING, TARGETS, COSINES, depth,
    DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    x = tl.load(EMBEDDINGS + row * depth + dimension, mask=inside, other=0.0)
    rounded = x.to(ROUNDED.dtype.element_ty)
    tl.store(ROUNDED + row * depth + dimension, rounded, mask=inside)
    error = x - rounded.to(tl.float32)
    tl.store(ROUNDING + row, tl.sqrt(tl.sum(error * error, 0)))
    label = tl.load(LABELS + row).to(tl.int64)
    prototype = tl.load(PROTOTYPES + label * depth + dimension, mask=inside, other=0.0)
    target = prototype * tl.load(INVERSE_NORMS + label)
    tl.store(TARGETS + row * depth + dimension, target, mask=inside)
    tl.store(COSINES + row, tl.sum(x * target, 0))


def prepare_rows(
    embeddings: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    inverse_norms: Tensor,
    screen_dtype: torch.dtype,
) -> PreparedRows:
    """See ``head_reference.prepare_rows``."""
    embeddings = embeddings.contiguous()
    num_rows, depth = embeddings.shape
    rounded = torch.empty(embeddings.shape, dtype=screen_dtype, device=embeddings.device)
    targets = torch.empty_like(embeddings)
    rounding, cosines = torch.empty((2, num_rows), device=embeddings.device).unbind()
    if num_rows:
        _prepare[(num_rows,)](
            embeddings, labels, prototypes, inverse_norms, rounded, rounding, targets,
            cosines, depth, power_of_two(depth), num_warps=4,
        )  # fmt: skip
    return PreparedRows(embeddings, rounded, rounding, targets, cosines)


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
