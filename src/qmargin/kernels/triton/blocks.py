"""Sums and posteriors over all classes without a ``[B, k]`` matrix: epilogues of one product."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as power_of_two
from triton.tools.tensor_descriptor import TensorDescriptor

from qmargin.kernels.head_reference import ClassGradient, Target
from qmargin.kernels.triton.head import COARSE_STEPS, ROUNDING, Launch
from qmargin.kernels.triton.rows import settings_tensor

LOG2_E = math.log2(math.e)
FACTOR = 2.0**15  # posteriors are at most one; this factor uses the range of float16


@triton.jit
def _gaps(
    embeddings, copy, LABELS, SHIFT, row_tile, class_tile, num_rows, num_classes, first,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tile of cosines less their rows' ``SHIFT``, ``-inf`` at targets and past the last class.

    Its rows, too. The products are used before the branch: the compiler waits for them where they
    are first used, and if that were on one side of a branch, it would wait after every product.
    """
    products = tl.zeros((BM, BN), dtype=tl.float32)
    for depth in range(0, DEPTH, BK):
        x = embeddings.load([row_tile * BM, depth])
        w = copy.load([first + class_tile * BN, depth])
        products = tl.dot(x, w.T, products)
    rows = row_tile * BM + tl.arange(0, BM)
    inside = rows < num_rows
    gaps = products - tl.load(SHIFT + rows, mask=inside, other=0.0)[:, None]
    start = first + class_tile * BN
    labels = tl.load(LABELS + rows, mask=inside, other=-1)
    has_target = tl.max(((labels >= start) & (labels < start + BN)).to(tl.int32), 0) > 0
    if has_target | (start + BN > num_classes):  # few tiles
        classes = start + tl.arange(0, BN)
        is_none = (classes[None, :] == labels[:, None]) | (classes[None, :] >= num_classes)
        gaps = tl.where(is_none, float("-inf"), gaps)
    return gaps, rows


IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _log2(x):
    """Logarithm of a positive number by one instruction; ``tl.log2`` takes twenty."""
    if IS_INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _slope(height, power, POWER: tl.constexpr):
    """``x^(n - 1)`` at a height ``x``, zero off the support. ``POWER`` is ``n = 1 / b``, or 0."""
    if POWER > 0:  # a few products, where logarithms would cost more than the matrix product
        safe = tl.maximum(height, 0.0)
        slope = tl.where(height > 0, 1.0, 0.0)
        if POWER > 1:
            slope = safe
            for _ in tl.static_range(POWER - 2):
                slope *= safe
    else:
        slope = tl.exp2((power - 1.0) * _log2(tl.maximum(height, 0.0)))  # of zero: -inf, and zero
    return slope


@triton.jit
def _measures(MEASURES, start, num_classes, BN: tl.constexpr):
    """Log measures of a tile of classes, as ``measures_of`` makes them."""
    classes = start + tl.arange(0, BN)
    return tl.load(MEASURES + classes, mask=classes < num_classes, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])  # one row, too, is a number with a type
def _row_sums(
    embeddings, copy, LABELS, MEASURES, SHIFT, LEVEL, SUMS, PENDING, num_rows, num_classes,
    num_tiles, row_tiles, class_tiles, scale, b, power,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    POWER: tl.constexpr, IS_SOFTMAX: tl.constexpr, NUM_SUMS: tl.constexpr,
    MAY_END: tl.constexpr, HAS_MEASURES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Sums by tiles of classes; none if it may end where no row is pending."""
    size = num_rows.to(tl.int64) * class_tiles
    if MAY_END:
        num_tiles = tl.where(tl.load(PENDING) > 0, num_tiles, 0)
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        row_tile = tile % row_tiles
        class_tile = tile // row_tiles
        gaps, rows = _gaps(
            embeddings, copy, LABELS, SHIFT, row_tile, class_tile, num_rows, num_classes, 0,
            DEPTH, BM, BN, BK,
        )  # fmt: skip
        inside = rows < num_rows
        place = SUMS + rows.to(tl.int64) * class_tiles + class_tile
        if HAS_MEASURES:
            measures = _measures(MEASURES, class_tile * BN, num_classes, BN)
        if IS_SOFTMAX:  # the tile's maximum, and its sum of exponentials relative to it
            if HAS_MEASURES:
                gaps += measures[None, :]
            largest = tl.max(gaps, 1)
            tl.store(place, largest, mask=inside)
            if NUM_SUMS > 1:
                shift = tl.where(largest == float("-inf"), 0.0, largest)
                rate = scale * 1.4426950408889634
                sums = tl.sum(tl.exp2((gaps - shift[:, None]) * rate), 1)
                tl.store(place + size, sums, mask=inside)
        else:  # mass and slope at the trial level, and the curvature if asked for
            level = tl.load(LEVEL + rows, mask=inside, other=0.0)
            height = level[:, None] + gaps * (b * scale)
            slope = _slope(height, power, POWER)
            if HAS_MEASURES:
                weights = tl.exp2(measures)[None, :]
                slope *= weights
            tl.store(place, tl.sum(slope * tl.maximum(height, 0.0), 1), mask=inside)
            tl.store(place + size, tl.sum(slope, 1), mask=inside)
            if NUM_SUMS > 2:
                if POWER > 0:
                    curvature = _slope(height, power - 1.0, POWER - 1)
                else:
                    curvature = _slope(height, power - 1.0, 0)
                if HAS_MEASURES:
                    curvature *= weights
                tl.store(place + 2 * size, tl.sum(curvature, 1), mask=inside)


@triton.jit
def _begin(
    MAXIMA, TARGET_LOGIT, TARGET_LOG_REFERENCE, SETTINGS, SHIFT, LEVEL, LIMIT, num_maxima, low,
    STEPS: tl.constexpr, ROUNDING: tl.constexpr, HAS_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Root over maxima and the target: its level is above that over all classes (M13).

    ``low`` is the smallest binary logarithm of a class's measure, where there are any (M16).
    """
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * num_maxima
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_maxima, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(base + at, mask=at < num_maxima, other=float("-inf")))
    best = tl.max(largest, 0)
    best = tl.where(best == float("-inf"), -1.0, best)  # only the target is left
    b = tl.load(SETTINGS)
    scale = tl.load(SETTINGS + 1)
    power = 1.0 / b
    log_reference = tl.load(TARGET_LOG_REFERENCE + row)
    gap = b * (tl.load(TARGET_LOGIT + row) - best.to(tl.float64) * scale)
    alone = tl.exp(-b * log_reference) - gap  # one class alone has all mass (M4)
    if HAS_LOW:
        level = tl.minimum(tl.exp2(-b * low), alone)
    else:
        level = tl.minimum(1.0, alone)
    gaps = (largest - best) * (b * scale).to(tl.float32)
    for _ in range(STEPS):
        height = tl.maximum(level.to(tl.float32) + gaps, 0.0)
        slopes = _slope(height, power.to(tl.float32), 0)
        if HAS_LOW:
            slopes *= tl.exp2(low)
        own, own_slope, _curvature = _target_sums(level + gap, power, log_reference)
        mass = own + tl.sum(slopes * height, 0).to(tl.float64)
        slope = own_slope + tl.sum(slopes, 0).to(tl.float64)
        move = mass / slope * (tl.exp(-b * tl.log(mass)) - 1.0)
        level += tl.where(mass > 1.0, move, 0.0)
    level += ROUNDING * (1.0 + tl.abs(level))
    level = tl.where(gap == gap, level, float("nan"))  # a minimum can lose it
    tl.store(SHIFT + row, best)
    tl.store(LEVEL + row, level.to(tl.float32))
    tl.store(LIMIT + row, level.to(tl.float32))


@triton.jit
def _target_sums(height, power, log_reference):
    """Mass, slope and curvature of a target in float64, see ``_slope``."""
    safe = tl.where(height > 0, height, 1.0)
    mass = tl.where(height > 0, tl.exp(log_reference + power * tl.log(safe)), 0.0)
    mass = tl.where(height == height, mass, float("nan"))
    return mass, mass / safe, mass / (safe * safe)


@triton.jit
def _total(base, num_tiles, BLOCK: tl.constexpr):
    """Sum of a row's tiles, in float64 and in a fixed order."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(base + at, mask=at < num_tiles, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _advance(
    SUMS, TARGET_LOGIT, TARGET_LOG_REFERENCE, SETTINGS, SHIFT, LEVEL, LIMIT, PENDING, num_rows,
    num_tiles, weight, tolerance, NUM_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of Newton, or of Halley near the root, on the norm of a row's mass (M5)."""
    row = tl.program_id(0)
    if tl.load(PENDING) == 0:
        return
    size = num_rows.to(tl.int64) * num_tiles
    base = SUMS + row.to(tl.int64) * num_tiles
    b = tl.load(SETTINGS)
    power = 1.0 / b
    shift = tl.load(SHIFT + row).to(tl.float64)
    rounded = tl.load(LEVEL + row)
    limit = tl.load(LIMIT + row)
    level = rounded.to(tl.float64)
    gap = b * (tl.load(TARGET_LOGIT + row) - shift * tl.load(SETTINGS + 1))
    mass, slope, curvature = _target_sums(level + gap, power, tl.load(TARGET_LOG_REFERENCE + row))
    mass += weight * _total(base, num_tiles, BLOCK)
    slope += weight * _total(base + size, num_tiles, BLOCK)
    is_empty = mass == 0
    mass = tl.where(is_empty, 1.0, mass)
    slope = tl.where(is_empty, 1.0, slope)
    error = tl.log(mass)
    gain = 1.0 - tl.exp(-b * error)
    step = mass / slope * gain
    if NUM_SUMS > 2:  # the norm is convex: its curvature is not negative
        curvature += weight * _total(base + 2 * size, num_tiles, BLOCK)
        bend = (power - 1.0) * tl.maximum(mass * curvature / (slope * slope) - 1.0, 0.0)
        bend = tl.minimum(tl.maximum(1.0 - 0.5 * bend * gain, 0.5), 2.0)
        step /= tl.where(tl.abs(error) < 0.7, bend, 1.0)
    # No root is above the limit, where a subset has all the mass; below the support, begin there.
    following = (level - step).to(tl.float32)
    following = tl.where((following > limit) | is_empty, limit, following)
    is_done = (tl.abs(error) <= tolerance) | (following == rounded)
    is_pending = (is_empty | (is_done == 0)) & (error == error)
    tl.store(LEVEL + row, following)
    tl.atomic_add(PENDING + 1, 1, mask=is_pending)


@triton.jit(do_not_specialize=["num_rows"])
def _conclude(
    SUMS, TARGET_LOGIT, TARGET_LOG_REFERENCE, SETTINGS, SHIFT, LEVEL, RESULT, DOUBTFUL, num_rows,
    num_tiles, tolerance, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass, excess and support of the others, the support and the error with the target."""
    row = tl.program_id(0)
    size = num_rows.to(tl.int64) * num_tiles
    base = SUMS + row.to(tl.int64) * num_tiles
    b = tl.load(SETTINGS)
    shift = tl.load(SHIFT + row).to(tl.float64)
    gap = b * (tl.load(TARGET_LOGIT + row) - shift * tl.load(SETTINGS + 1))
    level = tl.load(LEVEL + row).to(tl.float64)
    own, _own_slope, _curvature = _target_sums(
        level + gap, 1.0 / b, tl.load(TARGET_LOG_REFERENCE + row)
    )
    mass = _total(base, num_tiles, BLOCK)
    # Heights that are not numbers are not above zero, and would count as inactive.
    mass = tl.where(own == own, mass, own)
    error = tl.abs(mass + own - 1.0)
    tl.store(RESULT + row, mass)
    tl.store(RESULT + num_rows + row, _total(base + size, num_tiles, BLOCK))
    count = _total(base + 2 * size, num_tiles, BLOCK) + (own > 0).to(tl.float64)
    tl.store(RESULT + 2 * num_rows + row, count)
    tl.store(RESULT + 3 * num_rows + row, error)
    tl.atomic_add(DOUBTFUL, 1, mask=error > tolerance)


@triton.jit
def _either(left, right):
    return left | right


@triton.jit(do_not_specialize=["num_rows"])
def _posterior(
    embeddings, copy, out, LABELS, MEASURES, SHIFT, LEVEL, SUMS, ACTIVE, num_rows, num_classes,
    first, num_tiles, row_tiles, class_tiles, first_tile, all_tiles, scale, b, power, factor,
    log2_factor, largest,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    POWER: tl.constexpr, IS_SOFTMAX: tl.constexpr, WITH_SUMS: tl.constexpr,
    HAS_MEASURES: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    size = num_rows.to(tl.int64) * all_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        row_tile = tile % row_tiles
        class_tile = tile // row_tiles
        gaps, rows = _gaps(
            embeddings, copy, LABELS, SHIFT, row_tile, class_tile, num_rows, num_classes, first,
            DEPTH, BM, BN, BK,
        )  # fmt: skip
        inside = rows < num_rows
        level = tl.load(LEVEL + rows, mask=inside, other=0.0)
        place = SUMS + rows.to(tl.int64) * all_tiles + first_tile + class_tile
        if HAS_MEASURES:
            measures = _measures(MEASURES, first + class_tile * BN, num_classes, BN)
        if IS_SOFTMAX:
            if HAS_MEASURES:
                gaps += measures[None, :]
            rate = scale * 1.4426950408889634
            start = level * 1.4426950408889634 + log2_factor
            scaled = tl.exp2(start[:, None] + gaps * rate)
            if WITH_SUMS:
                tl.store(place, tl.sum(scaled, 1) / factor, mask=inside)
                scaled = tl.minimum(scaled, largest)  # elsewhere a posterior is at most one
        else:
            height = level[:, None] + gaps * (b * scale)
            height = tl.maximum(height, 0.0)
            if POWER == 1:
                posterior = height
            elif POWER == 4:
                square = height * height
                posterior = square * square
            else:
                posterior = _slope(height, power, POWER) * height
            if HAS_MEASURES:
                posterior *= tl.exp2(measures)[None, :]
            if WITH_SUMS:
                tl.store(place, tl.sum(posterior, 1), mask=inside)
                tl.store(place + size, tl.sum(posterior * height, 1), mask=inside)
                tl.store(place + 2 * size, tl.sum((height > 0).to(tl.float32), 1), mask=inside)
                # A bit for each class that is active in any row; targets count anyway.
                is_active = tl.reshape((height > 0) & inside[:, None], (BM, BN // 32, 32))
                bits = tl.where(is_active, (1 << tl.arange(0, 32))[None, None, :], 0)
                words = tl.reduce(tl.reduce(bits, 2, _either), 0, _either)
                at = (first_tile + class_tile) * (BN // 32) + tl.arange(0, BN // 32)
                tl.store(ACTIVE + row_tile.to(tl.int64) * all_tiles * (BN // 32) + at, words)
            scaled = posterior * factor
        # By halves: what waits in shared memory takes half the room.
        halves = tl.permute(tl.reshape(scaled, (BM, 2, BN // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        out.store([row_tile * BM, class_tile * BN], left.to(out.dtype))
        out.store([row_tile * BM, class_tile * BN + BN // 2], right.to(out.dtype))


def _whole(b: float) -> int:
    """``1 / b`` if that is a small whole number, as for alpha 1.25, 1.5 and 2; else 0."""
    power = round(1.0 / b) if b > 0.05 else 0
    return power if power and abs(power * b - 1.0) < 1e-12 else 0


Operands = tuple[Tensor, Tensor, Tensor, int]  # embeddings, copy, labels, number of classes


def measures_of(classes: Tensor, scale: float, b: float) -> Tensor:
    """Log reference measures ``[k]`` as kernels take them: binary logarithms.

    At ``alpha = 1`` they are cosines, by which a measure moves its class.
    """
    values = classes / scale if b == 0.0 else classes * LOG2_E
    return values.to(torch.float32).contiguous()


def tile_sums(batch: Operands, scale: float) -> tuple[Tensor, Tensor]:
    """Largest cosine of every tile of classes, and ``sum exp(s (c - largest))``, ``[B, t]``."""
    first, second = _sums(batch, None, scale, 0.0, 2)
    return first, second


def log_sum_exp(
    batch: Operands, scale: float, measures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest other cosine ``[B]``, and ``sum exp(s (c - largest))`` over the others, float64.

    Cosines are those that ``measures`` have moved, see ``measures_of``.
    """
    first, second = _sums(batch, None, scale, 0.0, 2, measures=measures)
    largest = first.amax(1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    shrink = ((first - shift[:, None]) * scale).exp()
    return largest, (second * shrink).sum(1, dtype=torch.float64)


def row_sums(
    batch: Operands,
    shift: Tensor,
    level: Tensor,
    scale: float,
    b: float,
    measures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mass and slope ``[B]`` float64 of the others; ``level`` is the height at cosine ``shift``."""
    sums = _sums(batch, (shift, level), scale, b, 2, measures=measures)
    return sums[0].sum(1, dtype=torch.float64), sums[1].sum(1, dtype=torch.float64)


def _sums(
    batch: Operands,
    root: tuple[Tensor, Tensor] | None,
    scale: float,
    b: float,
    num_sums: int,
    pending: Tensor | None = None,
    measures: Tensor | None = None,
) -> Tensor:
    """What ``_row_sums`` writes, ``[n, B, class tiles]``; a softmax has no root."""
    embeddings, _, labels, num_classes = batch
    launch, num_rows = Launch.of(*batch[:2], num_classes), len(embeddings)
    shape = (num_sums, num_rows, launch.class_tiles)
    sums = torch.empty(shape, dtype=torch.float32, device=embeddings.device)
    is_softmax = root is None
    if root is None:
        root = (sums.new_zeros(num_rows), sums)
    _row_sums[(launch.programs,)](
        *launch.operands, labels, sums if measures is None else measures,
        *root, sums, labels if pending is None else pending, num_rows,
        num_classes,
        launch.row_tiles * launch.class_tiles, launch.row_tiles, launch.class_tiles, scale, b,
        1.0 / b if b else 0.0, embeddings.shape[1], *launch.sizes, _whole(b), is_softmax,
        num_sums, pending is not None, measures is not None, launch.programs, **launch.options,
    )  # fmt: skip
    return sums


class RootSearch:
    """The roots of a batch, ``0 < alpha - 1 <= 1``, by passes that the host does not wait for.

    Newton's method on the norm of the mass, which is convex, so that from any level where the mass
    is not zero one step leads above the root, and every further one towards it (M5). Near the root
    Halley's method, with the curvature as well, cubes the error where Newton squares it.
    """

    def __init__(
        self,
        batch: Operands,
        target: Target,
        scale: float,
        b: float,
        maxima: Tensor | None,
        low: float = 0.0,
    ) -> None:
        """Begin at the root over ``maxima`` of sets of others ``[B, m]``, or those of tiles.

        ``low`` is the smallest log measure of a class.
        """
        embeddings, device = batch[0], batch[0].device
        self.scale, self.b = scale, b
        self.target = (target.logits.contiguous(), target.log_reference.contiguous())
        self.settings = settings_tensor(b, scale, device)
        self.shift, self.level, self.limit = torch.empty(
            (3, len(embeddings)), dtype=torch.float32, device=device
        )
        if maxima is None:
            maxima = _sums(batch, None, scale, 0.0, 1)[0]
        maxima = maxima.contiguous()
        _begin[(len(embeddings),)](
            maxima, *self.target, self.settings, self.shift, self.level, self.limit,
            maxima.shape[1], low * LOG2_E, COARSE_STEPS, ROUNDING, low != 0.0, 1024, num_warps=4,
        )  # fmt: skip

    def run(
        self,
        batch: Operands,
        weight: float,
        num_passes: int,
        tolerance: float,
        measures: Tensor | None = None,
    ) -> None:
        """Take passes over classes of some weight until logarithms of masses are this small."""
        embeddings, num_sums = batch[0], 3 if self.b <= 0.5 else 2
        self.pending = torch.zeros(num_passes + 1, dtype=torch.int32, device=embeddings.device)
        self.pending[:1] = 1
        root = (self.shift, self.level)
        for number in range(num_passes):
            pending = self.pending[number:]
            sums = _sums(batch, root, self.scale, self.b, num_sums, pending, measures)
            _advance[(len(embeddings),)](
                sums, *self.target, self.settings, *root, self.limit, pending, len(embeddings),
                sums.shape[2], weight, tolerance, num_sums, 1024, num_warps=4,
            )  # fmt: skip

    def conclude(self, sums: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
        """Sums of posteriors ``[3, B, t]`` as mass, excess, support and error of the mass.

        ``[4, B]`` float64; and how many rows have a larger error than this, and how many were
        pending after the last pass, ``[2]``.
        """
        num_rows = len(self.level)
        result = torch.empty((4, num_rows), dtype=torch.float64, device=sums.device)
        doubtful = self.pending[-1:].repeat(2)
        doubtful[:1] = 0
        _conclude[(num_rows,)](
            sums, *self.target, self.settings, self.shift, self.level, result, doubtful, num_rows,
            sums.shape[2], tolerance, 1024, num_warps=4,
        )  # fmt: skip
        return result, doubtful


class TileSums(NamedTuple):
    """Sums of posteriors by tiles of classes."""

    sums: Tensor  # [1, B, t]: mass; except at alpha = 1, [3, B, t]: excess, support as well
    active: Tensor | None  # [r, m] int32, not at alpha = 1: a bit per class, by tiles of rows

    @classmethod
    def empty(cls, batch: Operands, num_classes: int, b: float) -> TileSums:
        """Allocate the tiles of ``num_classes`` classes; blocks begin at whole tiles."""
        launch, device = Launch.of(*batch[:2], num_classes), batch[1].device
        shape = (1 if b == 0.0 else 3, len(batch[0]), launch.class_tiles)
        sums = torch.empty(shape, dtype=torch.float32, device=device)
        active = None
        if b:
            words = (launch.row_tiles, launch.class_tiles * launch.sizes[1] // 32)
            active = torch.empty(words, dtype=torch.int32, device=device)
        return cls(sums, active)

    def is_active(self) -> Tensor:
        """Classes in the support of any row ``[m]``, with padding; at targets anything."""
        assert self.active is not None
        bits = torch.arange(32, dtype=torch.int32, device=self.active.device)
        return ((self.active[:, :, None] >> bits) & 1).any(0).flatten()


def posterior_block(
    batch: Operands,
    where: slice,
    root: tuple[Tensor, Tensor],
    scale: float,
    b: float,
    *,
    factor: float = FACTOR,
    into: TileSums | None = None,
    first: int = 0,
    measures: Tensor | None = None,
) -> Tensor:
    """``factor`` times the posterior of some classes, ``[B, n]`` in the dtype of the copy.

    The ``root`` is a cosine, and the height there or, at ``alpha = 1``, the log of the posterior.
    There, and with sums, it may be a guess: weights are cut off at the largest number of the dtype.
    A multiple of eight columns is written, zeros past the last class, for the products to come.
    Sums go ``into`` tiles that begin at class ``first``.
    """
    embeddings, copy, labels, num_classes = batch
    width = -(-(where.stop - where.start) // 8) * 8
    launch = Launch.of(embeddings, copy, width, writes_tiles=True)
    num_rows, class_tiles, is_softmax = len(embeddings), launch.class_tiles, b == 0.0
    rows, classes, _ = launch.sizes
    out = torch.empty((num_rows, width), dtype=copy.dtype, device=copy.device)
    sums = root[0] if into is None else into.sums
    active = labels if into is None or into.active is None else into.active
    last, all_tiles = min(where.stop, num_classes), sums.shape[-1]
    _posterior[(launch.programs,)](
        *launch.operands, TensorDescriptor.from_tensor(out, [rows, classes // 2]), labels,
        root[0] if measures is None else measures, *root, sums, active, num_rows, last,
        where.start, launch.row_tiles * class_tiles, launch.row_tiles, class_tiles,
        (where.start - first) // classes, all_tiles, scale, b, 0.0 if is_softmax else 1.0 / b,
        factor, math.log2(factor), torch.finfo(copy.dtype).max, embeddings.shape[1],
        *launch.sizes, _whole(b), is_softmax, into is not None, measures is not None,
        launch.programs, **launch.options,
    )  # fmt: skip
    return out


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
