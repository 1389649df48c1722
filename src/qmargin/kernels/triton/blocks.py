"""Sums and posteriors over all classes without a ``[B, k]`` matrix: epilogues of one product."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as power_of_two
from triton.tools.tensor_descriptor import TensorDescriptor

from qmargin.kernels.head_reference import ClassGradient
from qmargin.kernels.triton.head import Launch, cosines_of_row

FACTOR = 2.0**15  # posteriors are at most one: so scaled they use the range of float16


@triton.jit
def _cosines(
    embeddings, copy, LABELS, row_tile, class_tile, num_rows, num_classes, first,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WITHOUT_TARGETS: tl.constexpr, HAS_END: tl.constexpr,
):  # fmt: skip
    """Tile of cosines, ``-inf`` at targets and past the last class if asked for; its rows."""
    products = tl.zeros((BM, BN), dtype=tl.float32)
    for depth in range(0, DEPTH, BK):
        x = embeddings.load([row_tile * BM, depth])
        w = copy.load([first + class_tile * BN, depth])
        products = tl.dot(x, w.T, products)
    rows = row_tile * BM + tl.arange(0, BM)
    classes = first + class_tile * BN + tl.arange(0, BN)
    if WITHOUT_TARGETS:
        labels = tl.load(LABELS + rows, mask=rows < num_rows, other=-1)
        products = tl.where(classes[None, :] == labels[:, None], float("-inf"), products)
    if HAS_END:
        products = tl.where(classes[None, :] >= num_classes, float("-inf"), products)
    return products, rows


@triton.jit
def _powers(height, b, POWER: tl.constexpr):
    """Posterior and slope at a height; zero off the support. ``POWER`` is ``1 / b``, or 0."""
    safe = tl.where(height > 0, height, 1.0)
    if POWER > 0:  # a few products, where logarithms would cost more than the matrix product
        slope = tl.where(height > 0, 1.0, 0.0)
        for _ in tl.static_range(POWER - 1):
            slope *= safe
        posterior = slope * safe
    else:
        logarithm = tl.log2(safe) / b
        posterior = tl.where(height > 0, tl.exp2(logarithm), 0.0)
        slope = posterior / safe
    return posterior, slope


@triton.jit
def _row_sums(
    embeddings, copy, LABELS, SHIFT, LEVEL, FIRST_SUM, SECOND_SUM, num_rows, num_classes,
    num_tiles, row_tiles, class_tiles, scale, b,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    POWER: tl.constexpr, IS_SOFTMAX: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        row_tile = tile % row_tiles
        class_tile = tile // row_tiles
        cosines, rows = _cosines(
            embeddings, copy, LABELS, row_tile, class_tile, num_rows, num_classes, 0,
            DEPTH, BM, BN, BK, True, True,
        )  # fmt: skip
        inside = rows < num_rows
        if IS_SOFTMAX:  # the tile's maximum, and its sum of exponentials relative to it
            first = tl.max(cosines, 1)
            shift = tl.where(first == float("-inf"), 0.0, first)
            rate = scale * 1.4426950408889634
            second = tl.sum(tl.exp2((cosines - shift[:, None]) * rate), 1)
        else:  # mass and slope at the trial level
            shift = tl.load(SHIFT + rows, mask=inside, other=0.0)
            level = tl.load(LEVEL + rows, mask=inside, other=0.0)
            height = level[:, None] + (cosines - shift[:, None]) * (b * scale)
            mass, slope = _powers(height, b, POWER)
            first = tl.sum(mass, 1)
            second = tl.sum(slope, 1)
        place = rows.to(tl.int64) * class_tiles + class_tile
        tl.store(FIRST_SUM + place, first, mask=inside)
        tl.store(SECOND_SUM + place, second, mask=inside)


@triton.jit
def _weigh(cosines, shift, level, scale, b, POWER: tl.constexpr, IS_SOFTMAX: tl.constexpr):
    """Posterior of classes, and their heights; at ``alpha = 1`` their logarithms to base 2."""
    if IS_SOFTMAX:
        rate = scale * 1.4426950408889634
        logits = level * 1.4426950408889634 + (cosines - shift) * rate
        return tl.exp2(logits), logits
    height = level + (cosines - shift) * (b * scale)
    posterior, _slope = _powers(height, b, POWER)
    return posterior, height


@triton.jit
def _store_sums(
    posterior, height, SUMS, place, size, inside, axis: tl.constexpr, IS_SOFTMAX: tl.constexpr
):  # fmt: skip
    """The mass; except at ``alpha = 1``, the excess and the support as well."""
    tl.store(SUMS + place, tl.sum(posterior, axis), mask=inside)
    if not IS_SOFTMAX:
        excess = tl.where(posterior > 0, posterior * height, 0.0)
        tl.store(SUMS + size + place, tl.sum(excess, axis), mask=inside)
        count = tl.sum((posterior > 0).to(tl.float32), axis)
        tl.store(SUMS + 2 * size + place, count, mask=inside)


@triton.jit
def _posterior(
    embeddings, copy, out, SHIFT, LEVEL, SUMS, ACTIVE, num_rows, num_classes, first,
    num_tiles, row_tiles, class_tiles, size, scale, b, factor, largest,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    POWER: tl.constexpr, IS_SOFTMAX: tl.constexpr, WITH_SUMS: tl.constexpr,
    HAS_END: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        row_tile = tile % row_tiles
        class_tile = tile // row_tiles
        cosines, rows = _cosines(
            embeddings, copy, SHIFT, row_tile, class_tile, num_rows, num_classes, first,
            DEPTH, BM, BN, BK, False, HAS_END,
        )  # fmt: skip
        inside = rows < num_rows
        shift = tl.load(SHIFT + rows, mask=inside, other=0.0)
        level = tl.load(LEVEL + rows, mask=inside, other=0.0)
        posterior, height = _weigh(
            cosines, shift[:, None], level[:, None], scale, b, POWER, IS_SOFTMAX
        )
        if WITH_SUMS:
            place = rows.to(tl.int64) * class_tiles + class_tile
            _store_sums(posterior, height, SUMS, place, size, inside, 1, IS_SOFTMAX)
            if not IS_SOFTMAX:  # which classes are active in any row; targets count anyway
                is_active = (posterior > 0) & inside[:, None]
                classes = class_tile * BN + tl.arange(0, BN)
                width = class_tiles * BN
                flags = tl.max(is_active.to(tl.int8), 0)
                tl.store(ACTIVE + row_tile * width + classes, flags)
        scaled = posterior * factor
        if IS_SOFTMAX and WITH_SUMS:  # elsewhere a posterior is at most one
            scaled = tl.minimum(scaled, largest)
        out.store([row_tile * BM, class_tile * BN], scaled.to(out.dtype))


@triton.jit
def _drop_targets(
    EMBEDDINGS, COPY, LABELS, OUT, SHIFT, LEVEL, SUMS, num_classes, first, width, class_tiles, size,
    scale, b, depth,
    BN: tl.constexpr, BK: tl.constexpr, POWER: tl.constexpr, IS_SOFTMAX: tl.constexpr,
    WITH_SUMS: tl.constexpr,
):  # fmt: skip
    """Take each row's target out of its block: a few tiles, where the product has thousands."""
    row = tl.program_id(0)
    label = tl.load(LABELS + row)
    if (label >= first) & (label < first + width):
        local = (label - first).to(tl.int32)
        tl.store(OUT + row.to(tl.int64) * width + local, 0.0)
        if WITH_SUMS:
            class_tile = local // BN
            classes = first + class_tile * BN + tl.arange(0, BN)
            cosines = cosines_of_row(
                EMBEDDINGS, COPY, row, label, classes, num_classes, depth, BN, BK
            )
            posterior, height = _weigh(
                cosines, tl.load(SHIFT + row), tl.load(LEVEL + row), scale, b, POWER, IS_SOFTMAX
            )
            place = row.to(tl.int64) * class_tiles + class_tile
            _store_sums(posterior, height, SUMS, place, size, row >= 0, 0, IS_SOFTMAX)


def _whole(b: float) -> int:
    """``1 / b`` if that is a small whole number, as for alpha 1.25, 1.5 and 2; else 0."""
    power = round(1.0 / b) if b > 0.05 else 0
    return power if power and abs(power * b - 1.0) < 1e-12 else 0


Operands = tuple[Tensor, Tensor, Tensor, int]  # embeddings, copy, labels, number of classes


def log_sum_exp(batch: Operands, scale: float) -> tuple[Tensor, Tensor]:
    """Largest other cosine ``[B]``, and ``sum exp(s (c - largest))`` over the others, float64."""
    first, second = _sums(batch, None, scale, 0.0)
    largest = first.amax(1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    shrink = ((first - shift[:, None]) * scale).exp()
    return largest, (second * shrink).sum(1, dtype=torch.float64)


def row_sums(
    batch: Operands, shift: Tensor, level: Tensor, scale: float, b: float
) -> tuple[Tensor, Tensor]:
    """Mass and slope ``[B]`` float64 of the others; ``level`` is the height at cosine ``shift``."""
    sums = _sums(batch, (shift, level), scale, b)
    return sums[0].sum(1, dtype=torch.float64), sums[1].sum(1, dtype=torch.float64)


def _sums(batch: Operands, root: tuple[Tensor, Tensor] | None, scale: float, b: float) -> Tensor:
    """What ``_row_sums`` writes, ``[2, B, class tiles]``; a softmax has no root."""
    embeddings, copy, labels, num_classes = batch
    launch, num_rows = Launch.of(embeddings, copy, num_classes), len(embeddings)
    shape = (2, num_rows, launch.class_tiles)
    sums = torch.empty(shape, dtype=torch.float32, device=embeddings.device)
    _row_sums[(launch.programs,)](
        *launch.operands, labels, *(root or (sums, sums)), sums[0], sums[1], num_rows, num_classes,
        launch.row_tiles * launch.class_tiles, launch.row_tiles, launch.class_tiles, scale, b,
        embeddings.shape[1], *launch.sizes, _whole(b), root is None, launch.programs,
        **launch.options,
    )  # fmt: skip
    return sums


class Weighed(NamedTuple):
    """A block of posteriors and its sums, by tiles of classes."""

    weights: Tensor  # [B, n] in the dtype of the copy, the factor times the posterior
    sums: Tensor | None  # [1, B, t]: mass; except at alpha = 1, [3, B, t]: excess, support as well
    active: Tensor | None  # [r, m] int8, m >= n, not at alpha = 1: by tiles of rows; any at targets


def posterior_block(
    batch: Operands,
    where: slice,
    root: tuple[Tensor, Tensor],
    scale: float,
    b: float,
    *,
    factor: float = FACTOR,
    with_sums: bool = False,
) -> Weighed:
    """``factor`` times the posterior of some classes.

    The ``root`` is a cosine, and the height there or, at ``alpha = 1``, the log of the posterior.
    There, and with sums, it may be a guess: weights are cut off at the largest number of the dtype.
    A multiple of eight columns is written, zeros past the last class, for the products to come.
    """
    embeddings, copy, labels, num_classes = batch
    width = -(-(where.stop - where.start) // 8) * 8
    launch = Launch.of(embeddings, copy, width)
    num_rows, class_tiles, is_softmax = len(embeddings), launch.class_tiles, b == 0.0
    rows, classes, _ = launch.sizes
    out = torch.empty((num_rows, width), dtype=copy.dtype, device=copy.device)
    sums = active = None
    if with_sums:
        shape = (1 if is_softmax else 3, num_rows, class_tiles)
        sums = torch.empty(shape, dtype=torch.float32, device=copy.device)
        if not is_softmax:
            flags = (launch.row_tiles, class_tiles * classes)
            active = torch.empty(flags, dtype=torch.int8, device=copy.device)
    last, size = min(where.stop, num_classes), num_rows * class_tiles
    kinds = (_whole(b), is_softmax, with_sums)
    given = (*root, root[0] if sums is None else sums)
    _posterior[(launch.programs,)](
        *launch.operands, TensorDescriptor.from_tensor(out, [rows, classes]), *given,
        labels if active is None else active, num_rows, last, where.start,
        launch.row_tiles * class_tiles, launch.row_tiles, class_tiles, size, scale, b, factor,
        torch.finfo(copy.dtype).max, embeddings.shape[1], *launch.sizes, *kinds,
        last < where.start + class_tiles * classes, launch.programs, **launch.options,
    )  # fmt: skip
    _drop_targets[(num_rows,)](
        embeddings, copy, labels, out, *given, last, where.start, width, class_tiles, size, scale,
        b, embeddings.shape[1], classes, 64, *kinds, num_warps=4,
    )  # fmt: skip
    return Weighed(out, sums, active)


@triton.jit
def _add_entries(
    ROWS, COLUMNS, ENTRIES, VALUES, EMBEDDINGS, first, width, num_entries, depth,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """A program per entry, of which the first of a class does the work: sums keep their b."""
    entry = tl.program_id(0)
    column = tl.load(COLUMNS + entry)
    before = tl.load(COLUMNS + tl.maximum(entry - 1, 0))
    is_first = (entry == 0) | (before != column)
    if is_first & (column >= first) & (column < first + width):
        dimension = tl.arange(0, DEPTH)
        inside = dimension < depth
        place = ROWS + (column - first).to(tl.int64) * depth + dimension
        total = tl.load(place, mask=inside, other=0.0)
        is_same = 1
        while is_same > 0:
            row = tl.load(ENTRIES + entry).to(tl.int64)
            x = tl.load(EMBEDDINGS + row * depth + dimension, mask=inside, other=0.0)
            total += tl.load(VALUES + entry) * x
            entry += 1
            after = tl.load(COLUMNS + tl.minimum(entry, num_entries - 1))
            is_same = ((entry < num_entries) & (after == column)).to(tl.int32)
        tl.store(place, total, mask=inside)


def add_entries_(rows: Tensor, gradient: ClassGradient, embeddings: Tensor, where: slice) -> None:
    """Add the entries of some classes, times their embeddings, to the classes' rows ``[n, d]``."""
    depth, num_entries = rows.shape[1], len(gradient.columns)
    wide = power_of_two(depth)
    _add_entries[(num_entries,)](
        rows, gradient.columns, gradient.rows, gradient.values, embeddings, where.start,
        where.stop - where.start, num_entries, depth, wide, num_warps=1 if wide <= 512 else 4,
    )  # fmt: skip
