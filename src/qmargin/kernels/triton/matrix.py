"""The sparse step on one ``[B, k]`` matrix of screened cosines: few launches, no host wait.

In the order of a step: rows and their targets, one half-precision product, and one program per row
that lists the classes that can be active, scores them against the master prototypes, solves, and
pulls the row's gradient. A row whose list is too short is solved by passes over the row, in a
kernel of its own. Which rows are active in a class is one bit each; an update makes a class's
gradient from them. Nothing depends on the data but the contents of tensors, so that a step can be
captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as power_of_two

from qmargin.kernels.head_reference import PrototypeState, product
from qmargin.kernels.triton import blocks
from qmargin.kernels.triton.head import (
    COARSE_STEPS,
    MAX_STEPS,
    MOST_LOG2,
    ROUNDING,
    _apply,
    _lowered,
    _moved,
    _powers,
    _powers32,
    _ratios,
    _tangent,
)
from qmargin.kernels.triton.replay import launch, repeat
from qmargin.kernels.triton.rows import gain, log1p, split, whole, whole_power

SMALLEST_LIST = 128
TILE = 16  # prototypes that a program reads at a time
LIST_BLOCK = 2048  # lanes, each of which keeps a list of its own first
LANE_ENTRIES = 16  # lanes of half-full lists have twice the average in no row of many batches
PART = 512  # scores that a program reads at a time
SPLIT = 8  # programs that score a row's list
SMALLEST_SINE = tl.constexpr(2.0**-11.5)  # as in ``losses.margins``
# Numbers of each row, float64.
NORM, COSINE, SLACK, LOGIT, REFERENCE, SLOPE = (tl.constexpr(i) for i in range(6))
LEVEL, BEST, FLOOR, LOSS, OTHERS, TAU = (tl.constexpr(i) for i in range(6, 12))
ERROR, IN_COSINE, IN_REFERENCE, INVERSE, SUPPORT = (tl.constexpr(i) for i in range(12, 17))
COUNT, WEIGHT, RADIAL = (tl.constexpr(i) for i in range(17, 20))
FIELDS = tl.constexpr(20)


@triton.jit
def _pick_label(LABELS, row, num_classes, ignored):
    """A row's class, or class 0; whether the row is ignored; whether its label is out of range."""
    label = tl.load(LABELS + row).to(tl.int64)
    is_ignored = label == ignored
    is_wrong = ((label < 0) | (label >= num_classes)) & (is_ignored == 0)
    return tl.where(is_ignored | is_wrong, 0, label), is_ignored, is_wrong


@triton.jit
def _prepare_rows(
    EMBEDDINGS, GIVEN_LABELS, PROTOTYPES, INVERSE_NORMS, COPY_ERROR, LABELS, UNIT, ROUNDED, STATE,
    SUMS, row_stride, num_rows, num_classes, ignored, depth, accumulated,
    scale_high, scale_low, prior_high, prior_low, shift_high, shift_low,
    cosine_high, cosine_low, sine_high, sine_low,
    IS_ANGULAR: tl.constexpr, IS_STRAIGHT: tl.constexpr, IS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Unit rows, their rounded copies, and what the margin makes of the target's cosine (M9)."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(LABELS + row, tl.load(GIVEN_LABELS + row).to(tl.int64))
    column, is_ignored, is_wrong = _pick_label(GIVEN_LABELS, row, num_classes, ignored)
    if row == 0:  # the share of a row in the loss; that of no rows is NaN, its gradient zero
        counts = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            label = tl.load(GIVEN_LABELS + at, mask=at < num_rows, other=0).to(tl.int64)
            counts += ((at < num_rows) & (label != ignored)).to(tl.int32)
        count = tl.sum(counts, 0).to(tl.float64)
        share = count * 0.0 + 1.0
        if IS_MEAN:
            share = 1.0 / tl.maximum(count, 1.0)
        tl.store(SUMS, share)
        tl.store(SUMS + 1, tl.where(count > 0, share, float("nan")))
        tl.store(SUMS + 2, share * whole(scale_high, scale_low))
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    x = tl.load(EMBEDDINGS + row * row_stride + dimension, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside & is_ignored, 1.0, x)
    norm = tl.sqrt(tl.sum(x * x, 0))
    unit = x / tl.where(norm < float("inf"), norm, float("nan"))
    rounded = unit.to(ROUNDED.dtype.element_ty)
    tl.store(UNIT + row * depth + dimension, unit, mask=inside)
    tl.store(ROUNDED + row * depth + dimension, rounded, mask=inside)
    lost = unit - rounded.to(tl.float32)
    rounding = tl.sqrt(tl.sum(lost * lost, 0)).to(tl.float64)
    own = tl.load(PROTOTYPES + column * depth + dimension, mask=inside, other=0.0)
    own = own * tl.load(INVERSE_NORMS + column)
    cosine = tl.sum(unit * own, 0).to(tl.float64)
    copy_error = tl.load(COPY_ERROR).to(tl.float64)
    # A prototype without a direction makes every row NaN, a label out of range its own row.
    is_wrong = is_wrong | (copy_error != copy_error)
    cosine = tl.where(is_wrong, float("nan"), cosine)
    slack = rounding * (1.0 + copy_error) + (copy_error + accumulated)
    scale = whole(scale_high, scale_low)
    shifted = cosine
    slope = cosine * 0.0 + 1.0
    if IS_ANGULAR:
        cos_margin = whole(cosine_high, cosine_low)
        sin_margin = whole(sine_high, sine_low)
        bounded = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
        bounded = tl.where(cosine == cosine, bounded, cosine)
        sine = tl.sqrt((1.0 - bounded) * (1.0 + bounded))
        is_rotated = bounded > -cos_margin
        rotated = bounded * cos_margin - sine * sin_margin
        shifted = tl.where(is_rotated, rotated, bounded - 1.0 + cos_margin)
        if IS_STRAIGHT == 0:
            steep = cos_margin + sin_margin * bounded / tl.maximum(sine, SMALLEST_SINE)
            slope = tl.where(is_rotated, steep, slope)
            slope = tl.where(bounded == cosine, slope, slope * 0.0)  # beyond one by rounding
    place = STATE + row
    tl.store(place + NORM * num_rows, norm.to(tl.float64))
    tl.store(place + COSINE * num_rows, cosine)
    tl.store(place + SLACK * num_rows, slack)
    tl.store(place + LOGIT * num_rows, scale * (shifted - whole(shift_high, shift_low)))
    tl.store(place + REFERENCE * num_rows, cosine * 0.0 - scale * whole(prior_high, prior_low))
    tl.store(place + SLOPE * num_rows, scale * slope)


@triton.jit
def _listed_sums(
    SCORES, begin, count, level, best, rate, power, log_reference, gap,
    POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass and slope of a row's list at a trial level, the target included."""
    mass, slope = _powers(level + gap, power, log_reference)
    masses = tl.zeros((BLOCK,), tl.float64)
    slopes = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + begin + entry, mask=entry < count, other=float("-inf"))
        p, d = _ratios(level + (score.to(tl.float64) - best) * rate, power, POWER)
        masses += p
        slopes += d
    return mass + tl.sum(masses, 0), slope + tl.sum(slopes, 0)


@triton.jit
def _tile_scores(
    COSINES, PROTOTYPES, INVERSE_NORMS, x, begin, start, floor, num_classes, label, depth,
    TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Exact cosines of the candidates among a few consecutive classes, ``-inf`` for others."""
    column = start + tl.arange(0, TILE)
    is_other = (column < num_classes) & (column != label)
    screened = tl.load(COSINES + begin + column, mask=is_other, other=float("-inf"))
    screened = screened.to(tl.float32)
    is_hit = (screened >= floor) & (screened > float("-inf"))
    dimension = tl.arange(0, DEPTH)
    mask = is_hit[:, None] & (dimension[None, :] < depth)
    place = column[:, None].to(tl.int64) * depth + dimension[None, :]
    w = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
    inverse = tl.load(INVERSE_NORMS + column, mask=is_hit, other=0.0)
    score = tl.sum(w * x[None, :], 1) * inverse
    return tl.where(is_hit, score, float("-inf")), w, inverse, column


@triton.jit
def _row_sums(
    COSINES, PROTOTYPES, INVERSE_NORMS, x, begin, floor, num_classes, label, depth,
    level, best, rate, power, log_reference, gap,
    POWER: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As ``_listed_sums``, over all classes that can be active; cosines are computed again."""
    mass, slope = _powers(level + gap, power, log_reference)
    masses = tl.zeros((TILE,), tl.float64)
    slopes = tl.zeros((TILE,), tl.float64)
    for start in range(0, num_classes, TILE):
        score, _w, _inverse, _column = _tile_scores(
            COSINES, PROTOTYPES, INVERSE_NORMS, x, begin, start, floor, num_classes, label, depth,
            TILE, DEPTH,
        )  # fmt: skip
        p, d = _ratios(level + (score.to(tl.float64) - best) * rate, power, POWER)
        masses += p
        slopes += d
    return mass + tl.sum(masses, 0), slope + tl.sum(slopes, 0)


@triton.jit
def _settle(
    STATE, SUMS, row, num_rows, level, best, power, b, scale, gap, log_reference, alone,
    others, excess, along, support,
):  # fmt: skip
    """Store the results of a solved row; ``along`` is the sum of posterior times cosine."""
    own = level + gap
    own_mass, _slope = _powers(own, power, log_reference)
    target = tl.where(others < 0.5, 1.0 - others, own_mass)
    log_own = tl.log(tl.where(own_mass > 0, own_mass, 1.0))
    log_target = tl.where(others < 0.5, log1p(-tl.minimum(others, 0.5)), log_own)
    missing = (alone - own) / b - own  # outside the support: linear in the missing height
    loss = excess + tl.where(own > 0, alone * gain(others, log_target, b), missing)
    loss = tl.where(level == level, loss, level)
    place = STATE + row
    share = tl.load(SUMS)
    in_cosine = -others * tl.load(place + SLOPE * num_rows) * share
    in_reference = (target * tl.where(own > 0, own, 0.0) - alone) / (1.0 + b)
    radial = scale * share * along + in_cosine * tl.load(place + COSINE * num_rows)
    tl.store(place + LEVEL * num_rows, level)
    tl.store(place + BEST * num_rows, best)
    tl.store(place + LOSS * num_rows, loss / (1.0 + b))
    tl.store(place + OTHERS * num_rows, others)
    tl.store(place + TAU * num_rows, best * scale - (level - 1.0) / b)
    tl.store(place + ERROR * num_rows, tl.abs(others + own_mass - 1.0))
    tl.store(place + IN_COSINE * num_rows, in_cosine)
    tl.store(place + IN_REFERENCE * num_rows, in_reference)
    tl.store(place + RADIAL * num_rows, radial)
    tl.store(place + WEIGHT * num_rows, scale * share)
    tl.store(place + SUPPORT * num_rows, (support + (own > 0).to(tl.int32)).to(tl.float64))


@triton.jit
def _finish_row(
    GRADIENT, STATE, UNIT, PROTOTYPES, INVERSE_NORMS, pulled, row, num_rows, column, dimension,
    inside, depth, IS_FINISHED: tl.constexpr,
):  # fmt: skip
    """Store some dimensions of a row's gradient, or only what the other classes pull."""
    out = row.to(tl.int64) * depth + dimension
    gradient = pulled
    if IS_FINISHED:  # the tangent's share of the target and of all others, over the length
        state = STATE + row
        own = tl.load(PROTOTYPES + column * depth + dimension, mask=inside, other=0.0)
        own *= tl.load(INVERSE_NORMS + column)
        weight = tl.load(state + WEIGHT * num_rows).to(tl.float32)
        in_cosine = tl.load(state + IN_COSINE * num_rows).to(tl.float32)
        radial = tl.load(state + RADIAL * num_rows).to(tl.float32)
        norm = tl.load(state + NORM * num_rows).to(tl.float32)
        x = tl.load(UNIT + out, mask=inside, other=0.0)
        gradient = (weight * pulled + in_cosine * own - radial * x) / norm
    tl.store(GRADIENT + out, gradient, mask=inside)


@triton.jit
def _mark(BITS, column, row, is_active, words):
    """Set a row's bit in the classes that are active in it."""
    place = BITS + column.to(tl.int64) * words + row // 32
    bit = tl.full(column.shape, 1, tl.int32) << (row % 32)
    tl.atomic_or(place, bit, mask=is_active, sem="relaxed")


@triton.jit
def _others(base, at, width, num_classes, label):
    """Screened cosines of a row, ``-inf`` at its target and past the last class.

    Rows are whole vectors wide, so that a mask by their width leaves loads whole.
    """
    value = tl.load(base + at, mask=at < width, other=float("-inf")).to(tl.float32)
    return tl.where((at < num_classes) & (at != label), value, float("-inf"))


@triton.jit
def _list_rows(
    COSINES, LABELS, STATE, LANES, LISTS, width, num_rows, num_classes, ignored, storage,
    scale_high, scale_low, b_high, b_low,
    CAPACITY: tl.constexpr, LANE_ENTRIES: tl.constexpr, COARSE: tl.constexpr,
    ROUNDING: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """List the classes of a row that can be active, above a certain floor.

    Every lane keeps its own hits, and the lanes are joined at the end.
    """
    row = tl.program_id(0)
    column, is_ignored, _is_wrong = _pick_label(LABELS, row, num_classes, ignored)
    state = STATE + row
    if is_ignored:
        tl.store(state + COUNT * num_rows, 0.0)
        return
    label = column.to(tl.int32)
    scale = whole(scale_high, scale_low)
    b = whole(b_high, b_low)
    rate = b * scale
    short_b = b.to(tl.float32)
    short_rate = rate.to(tl.float32)
    # The root over the maxima of strided sets of classes bounds the support from outside (F4).
    base = COSINES + row.to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    coarse = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, width, BLOCK * UNROLL):
        for number in tl.static_range(UNROLL):
            at = start + number * BLOCK + lane
            coarse = tl.maximum(coarse, _others(base, at, width, num_classes, label))
    best = tl.max(coarse, 0)
    best = tl.where(best == float("-inf"), -1.0, best)  # only the target is left
    log2_reference = tl.load(state + REFERENCE * num_rows).to(tl.float32) * 1.4426950408889634
    target = tl.load(state + LOGIT * num_rows)
    gap = ((target - best.to(tl.float64) * scale) * b).to(tl.float32)
    level = tl.minimum(1.0, tl.exp2(-short_b * log2_reference) - gap)
    root = tl.exp2(tl.minimum(short_b * log2_reference, MOST_LOG2))
    power = 1.0 / short_b
    for _ in range(COARSE):
        mass, slope = _powers32(level + gap, power, root, 0)
        masses, slopes = _powers32(level + (coarse - best) * short_rate, power, 1.0, POWER)
        level = _moved(level, mass + tl.sum(masses, 0), slope + tl.sum(slopes, 0), short_b)
    level += ROUNDING * (1.0 + tl.abs(level))
    edge = best.to(tl.float64) - level.to(tl.float64) / rate
    # Stored maxima are rounded; what is compared with the floor below is rounded like the floor.
    stored = storage * tl.maximum(tl.abs(best.to(tl.float64)), tl.abs(edge)) + 1e-7
    exact = edge - stored - 2.0 * tl.load(state + SLACK * num_rows)
    floor = _lowered(exact).to(COSINES.dtype.element_ty).to(tl.float32)
    tl.store(state + FLOOR * num_rows, floor.to(tl.float64))
    kept = LANES + row.to(tl.int64) * (BLOCK * LANE_ENTRIES) + lane
    filled = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK * UNROLL):
        for number in tl.static_range(UNROLL):
            at = start + number * BLOCK + lane
            value = _others(base, at, width, num_classes, label)
            is_hit = (value >= floor) & (value > float("-inf"))
            tl.store(kept + filled * BLOCK, at, mask=is_hit & (filled < LANE_ENTRIES))
            filled += is_hit.to(tl.int32)
    count = tl.sum(filled, 0)
    deepest = tl.max(filled, 0)
    count = tl.where(deepest > LANE_ENTRIES, tl.maximum(count, CAPACITY + 1), count)
    tl.store(state + COUNT * num_rows, count.to(tl.float64))
    if count <= CAPACITY:
        first = LISTS + row.to(tl.int64) * CAPACITY
        place = tl.cumsum(filled, 0) - filled
        for depth in range(deepest):
            is_kept = filled > depth  # a lane reads back what it wrote itself
            at = tl.load(kept + depth * BLOCK, mask=is_kept, other=0)
            tl.store(first + place + depth, at, mask=is_kept)


@triton.jit
def _score_rows(
    STATE, LISTS, SCORES, UNIT, PROTOTYPES, INVERSE_NORMS, num_rows, depth,
    CAPACITY: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Exact cosines of some of a row's listed classes."""
    row = tl.program_id(0)
    count = tl.load(STATE + COUNT * num_rows + row).to(tl.int32)
    if count > CAPACITY:
        return
    first = row.to(tl.int64) * CAPACITY
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    x = tl.load(UNIT + row.to(tl.int64) * depth + dimension, mask=inside, other=0.0)
    for start in range(tl.program_id(1) * TILE, count, TILE * SPLIT):
        entry = start + tl.arange(0, TILE)
        is_entry = entry < count
        listed = tl.load(LISTS + first + entry, mask=is_entry, other=0)
        place = listed[:, None].to(tl.int64) * depth + dimension[None, :]
        w = tl.load(PROTOTYPES + place, mask=is_entry[:, None] & inside[None, :], other=0.0)
        inverse = tl.load(INVERSE_NORMS + listed, mask=is_entry, other=0.0)
        tl.store(SCORES + first + entry, tl.sum(w * x[None, :], 1) * inverse, mask=is_entry)


@triton.jit
def _solve_lists(
    STATE, SUMS, LABELS, LISTS, SCORES, INVERSE_NORMS, BITS, num_rows, num_classes, ignored, words,
    scale_high, scale_low, b_high, b_low,
    POWER: tl.constexpr, CAPACITY: tl.constexpr, STEPS: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Solve a row on its list; posteriors times inverse norms take the place of the scores."""
    row = tl.program_id(0)
    column, is_ignored, _is_wrong = _pick_label(LABELS, row, num_classes, ignored)
    state = STATE + row
    if is_ignored:
        for number in tl.static_range(6, 20):
            tl.store(state + number * num_rows, 0.0)
        return
    count = tl.load(state + COUNT * num_rows).to(tl.int32)
    if count > CAPACITY:
        return
    scale = whole(scale_high, scale_low)
    b = whole(b_high, b_low)
    rate = b * scale
    power = 1.0 / b
    first = row.to(tl.int64) * CAPACITY
    running = tl.full((PART,), float("-inf"), tl.float32)
    for start in range(0, count, PART):
        entry = start + tl.arange(0, PART)
        score = tl.load(SCORES + first + entry, mask=entry < count, other=float("-inf"))
        running = tl.maximum(running, score)
    best = tl.where(count > 0, tl.max(running, 0).to(tl.float64), -1.0)
    log_reference = tl.load(state + REFERENCE * num_rows)
    gap = (tl.load(state + LOGIT * num_rows) - best * scale) * b
    alone = tl.exp(-b * log_reference)  # the target's height when it holds all the mass
    # No root is above that of one class alone, or of the maxima that bounded the support.
    floor = tl.load(state + FLOOR * num_rows)
    height = tl.minimum(tl.minimum(1.0, alone - gap), (best - floor) * rate)
    step = 0
    is_moving = 1
    while (step < STEPS) & (is_moving > 0):
        total, steep = _listed_sums(
            SCORES, first, count, height, best, rate, power, log_reference, gap, POWER, PART
        )
        height += total / steep * (tl.exp(-b * tl.log(total)) - 1.0)
        is_moving = (tl.abs(total - 1.0) > 1e-12).to(tl.int32)
        step += 1
    height = tl.where(gap == gap, height, gap)  # minima and comparisons pass NaN over
    others = tl.zeros((PART,), tl.float64)
    excess = tl.zeros((PART,), tl.float64)
    along = tl.zeros((PART,), tl.float64)
    active = tl.zeros((PART,), tl.int32)
    inverses = tl.zeros((PART,), tl.float32) + tl.load(INVERSE_NORMS + column)
    for start in range(0, count, PART):
        entry = start + tl.arange(0, PART)
        is_entry = entry < count
        score = tl.load(SCORES + first + entry, mask=is_entry, other=float("-inf"))
        score = score.to(tl.float64)
        each = height + (score - best) * rate
        posterior, _slopes = _ratios(each, power, POWER)
        is_active = posterior > 0
        others += posterior
        excess += tl.where(is_active, posterior * each, 0.0)
        along += tl.where(is_active, posterior * score, 0.0)
        active += is_active.to(tl.int32)
        if HAS_GRADIENT:
            listed = tl.load(LISTS + first + entry, mask=is_entry, other=0)
            inverse = tl.load(INVERSE_NORMS + listed, mask=is_active, other=0.0)
            inverses = tl.maximum(inverses, inverse)
            weight = posterior.to(tl.float32) * inverse
            tl.store(SCORES + first + entry, weight, mask=is_entry)
            _mark(BITS, listed, row, is_active, words)
    _settle(
        STATE, SUMS, row, num_rows, height, best, power, b, scale, gap, log_reference, alone,
        tl.sum(others, 0), tl.sum(excess, 0), tl.sum(along, 0), tl.sum(active, 0),
    )  # fmt: skip
    tl.store(state + INVERSE * num_rows, tl.max(inverses, 0).to(tl.float64))
    if HAS_GRADIENT:
        own = column + tl.arange(0, 1)
        _mark(BITS, own, row, own >= 0, words)


@triton.jit
def _pull_rows(
    STATE, LABELS, LISTS, WEIGHTS, UNIT, PROTOTYPES, INVERSE_NORMS, GRADIENT, num_rows,
    num_classes, ignored, depth,
    CAPACITY: tl.constexpr, IS_FINISHED: tl.constexpr, TILE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Some dimensions of the gradient of a row's embedding."""
    row = tl.program_id(0)
    dimension = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = dimension < depth
    column, is_ignored, _is_wrong = _pick_label(LABELS, row, num_classes, ignored)
    if is_ignored:
        out = row.to(tl.int64) * depth + dimension
        tl.store(GRADIENT + out, tl.zeros((SLICE,), tl.float32), mask=inside)
        return
    count = tl.load(STATE + COUNT * num_rows + row).to(tl.int32)
    if count > CAPACITY:
        return
    first = row.to(tl.int64) * CAPACITY
    pulled = tl.zeros((SLICE,), tl.float32)
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        weight = tl.load(WEIGHTS + first + entry, mask=entry < count, other=0.0)
        is_active = weight != 0.0  # the others' prototypes are not even read
        listed = tl.load(LISTS + first + entry, mask=entry < count, other=0)
        place = listed[:, None].to(tl.int64) * depth + dimension[None, :]
        w = tl.load(PROTOTYPES + place, mask=is_active[:, None] & inside[None, :], other=0.0)
        pulled += tl.sum(weight[:, None] * w, 0)
    _finish_row(
        GRADIENT, STATE, UNIT, PROTOTYPES, INVERSE_NORMS, pulled, row, num_rows, column, dimension,
        inside, depth, IS_FINISHED,
    )  # fmt: skip


@triton.jit
def _solve_row(
    COSINES, LABELS, UNIT, PROTOTYPES, INVERSE_NORMS, STATE, SUMS, BITS, GRADIENT,
    width, num_rows, num_classes, ignored, depth, words,
    scale_high, scale_low, b_high, b_low,
    POWER: tl.constexpr, CAPACITY: tl.constexpr, STEPS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr, IS_FINISHED: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """A row with more candidates than a list holds: passes over the row, cosines computed again."""
    row = tl.program_id(0)
    state = STATE + row
    count = tl.load(state + COUNT * num_rows)
    if count <= CAPACITY:
        return
    column, _is_ignored, _is_wrong = _pick_label(LABELS, row, num_classes, ignored)
    label = column.to(tl.int32)
    dimension = tl.arange(0, DEPTH)
    scale = whole(scale_high, scale_low)
    b = whole(b_high, b_low)
    rate = b * scale
    power = 1.0 / b
    begin = row.to(tl.int64) * width
    floor = tl.load(state + FLOOR * num_rows).to(tl.float32)
    x = tl.load(UNIT + row.to(tl.int64) * depth + dimension, mask=dimension < depth, other=0.0)
    running = tl.full((TILE,), float("-inf"), tl.float32)
    inverses = tl.zeros((TILE,), tl.float32) + tl.load(INVERSE_NORMS + column)
    for start in range(0, num_classes, TILE):
        score, _w, inverse, _column = _tile_scores(
            COSINES, PROTOTYPES, INVERSE_NORMS, x, begin, start, floor, num_classes, label, depth,
            TILE, DEPTH,
        )  # fmt: skip
        running = tl.maximum(running, score)
        inverses = tl.maximum(inverses, inverse)
    tl.store(state + INVERSE * num_rows, tl.max(inverses, 0).to(tl.float64))
    exact = tl.max(running, 0).to(tl.float64)
    log_reference = tl.load(state + REFERENCE * num_rows)
    gap = (tl.load(state + LOGIT * num_rows) - exact * scale) * b
    alone = tl.exp(-b * log_reference)
    height = tl.minimum(tl.minimum(1.0, alone - gap), (exact - floor.to(tl.float64)) * rate)
    step = 0
    is_moving = 1
    while (step < STEPS) & (is_moving > 0):
        total, steep = _row_sums(
            COSINES, PROTOTYPES, INVERSE_NORMS, x, begin, floor, num_classes, label, depth,
            height, exact, rate, power, log_reference, gap, POWER, TILE, DEPTH,
        )  # fmt: skip
        height += total / steep * (tl.exp(-b * tl.log(total)) - 1.0)
        is_moving = (tl.abs(total - 1.0) > 1e-12).to(tl.int32)
        step += 1
    height = tl.where(gap == gap, height, gap)
    others = tl.zeros((TILE,), tl.float64)
    excess = tl.zeros((TILE,), tl.float64)
    along = tl.zeros((TILE,), tl.float64)
    active = tl.zeros((TILE,), tl.int32)
    pulled = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, num_classes, TILE):
        score, w, inverse, listed = _tile_scores(
            COSINES, PROTOTYPES, INVERSE_NORMS, x, begin, start, floor, num_classes, label, depth,
            TILE, DEPTH,
        )  # fmt: skip
        wide = score.to(tl.float64)
        each = height + (wide - exact) * rate
        posterior, _slopes = _ratios(each, power, POWER)
        is_active = posterior > 0
        others += posterior
        excess += tl.where(is_active, posterior * each, 0.0)
        along += tl.where(is_active, posterior * wide, 0.0)
        active += is_active.to(tl.int32)
        if HAS_GRADIENT:
            weight = posterior.to(tl.float32) * inverse
            pulled += tl.sum(weight[:, None] * w, 0)
            _mark(BITS, listed, row, is_active, words)
    _settle(
        STATE, SUMS, row, num_rows, height, exact, power, b, scale, gap, log_reference, alone,
        tl.sum(others, 0), tl.sum(excess, 0), tl.sum(along, 0), tl.sum(active, 0),
    )  # fmt: skip
    if HAS_GRADIENT:
        own = column + tl.arange(0, 1)
        _mark(BITS, own, row, own >= 0, words)
        tl.debug_barrier()
        _finish_row(
            GRADIENT, STATE, UNIT, PROTOTYPES, INVERSE_NORMS, pulled, row, num_rows, column,
            dimension, dimension < depth, depth, IS_FINISHED,
        )  # fmt: skip


@triton.jit
def _solve_softmax(
    STATE, SUMS, LABELS, TOPS, MASSES, SHIFT, LOG_LEVEL, BITS, INVERSE_NORM, num_rows, tiles,
    num_classes, ignored, words, scale_high, scale_low,
    HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``alpha = 1``: the log-sum-exp of a row from its tiles' maxima and sums, and the loss."""
    row = tl.program_id(0)
    column, is_ignored, _is_wrong = _pick_label(LABELS, row, num_classes, ignored)
    state = STATE + row
    if is_ignored:
        for number in tl.static_range(6, 20):
            tl.store(state + number * num_rows, 0.0)
        tl.store(SHIFT + row, 0.0)
        tl.store(LOG_LEVEL + row, float("-inf"))  # a posterior of zero
        return
    scale = whole(scale_high, scale_low)
    rate = scale.to(tl.float32) * 1.4426950408889634
    base = row.to(tl.int64) * tiles
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(TOPS + base + at, mask=at < tiles, other=float("-inf")))
    best = tl.max(tops, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)  # there is only the target
    masses = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.load(TOPS + base + at, mask=at < tiles, other=float("-inf"))
        mass = tl.load(MASSES + base + at, mask=at < tiles, other=0.0)
        masses += (mass * tl.exp2((top - shift) * rate)).to(tl.float64)
    mass = tl.sum(masses, 0)
    anchor = shift.to(tl.float64) * scale
    joint = tl.load(state + LOGIT * num_rows) - anchor + tl.load(state + REFERENCE * num_rows)
    log_mass = tl.log(mass)
    peak = tl.maximum(log_mass, joint)
    total = peak + tl.log(tl.exp(log_mass - peak) + tl.exp(joint - peak))
    total = tl.where(joint == joint, total, joint)
    others = tl.exp(log_mass - total)
    loss = tl.where(others < 0.5, -log1p(-tl.minimum(others, 0.5)), total - joint)
    loss = tl.where(total == total, loss, total)
    share = tl.load(SUMS)
    in_cosine = -others * tl.load(state + SLOPE * num_rows) * share
    own = tl.exp(joint - total)
    tl.store(SHIFT + row, shift)
    tl.store(LOG_LEVEL + row, (-total).to(tl.float32))
    tl.store(state + LEVEL * num_rows, -total)
    tl.store(state + BEST * num_rows, shift.to(tl.float64))
    tl.store(state + LOSS * num_rows, loss)
    tl.store(state + OTHERS * num_rows, others)
    tl.store(state + TAU * num_rows, anchor + total)
    tl.store(state + ERROR * num_rows, tl.abs(own + others - 1.0))
    tl.store(state + IN_COSINE * num_rows, in_cosine)
    tl.store(state + IN_REFERENCE * num_rows, -others)
    tl.store(state + WEIGHT * num_rows, scale * share)
    tl.store(state + INVERSE * num_rows, tl.load(INVERSE_NORM).to(tl.float64))
    tl.store(state + SUPPORT * num_rows, tl.cast(num_classes, tl.float64))
    tl.store(state + COUNT * num_rows, tl.cast(num_classes, tl.float64))
    if HAS_GRADIENT:
        marked = column + tl.arange(0, 1)
        _mark(BITS, marked, row, marked >= 0, words)


@triton.jit
def _settle_lists(
    STATE, SUMS, LABELS, LOSSES, OTHERS_MASS, INVERSE_NORM, WEIGHTS, num_rows, ignored,
    scale_high, scale_low, BLOCK: tl.constexpr,
):  # fmt: skip
    """What rows weigh that were solved by lists elsewhere, in float32 for the lists as well."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    is_counted = inside & (tl.load(LABELS + row, mask=inside, other=0) != ignored)
    state = STATE + row
    others = tl.load(OTHERS_MASS + row, mask=is_counted, other=0.0)
    share = tl.load(SUMS)
    in_cosine = -others * tl.load(state + SLOPE * num_rows, mask=is_counted, other=0.0) * share
    weight = tl.where(is_counted, whole(scale_high, scale_low) * share, 0.0)
    loss = tl.load(LOSSES + row, mask=is_counted, other=0.0)
    inverse = tl.where(is_counted, tl.load(INVERSE_NORM).to(tl.float64), 0.0)
    tl.store(state + LOSS * num_rows, loss, mask=inside)
    tl.store(state + OTHERS * num_rows, others, mask=inside)
    tl.store(state + IN_COSINE * num_rows, in_cosine, mask=inside)
    tl.store(state + WEIGHT * num_rows, weight, mask=inside)
    tl.store(state + INVERSE * num_rows, inverse, mask=inside)
    tl.store(WEIGHTS + row, weight.to(tl.float32), mask=inside)
    tl.store(WEIGHTS + num_rows + row, in_cosine.to(tl.float32), mask=inside)


@triton.jit
def _finish_softmax(
    GRADIENT, STATE, LABELS, UNIT, PROTOTYPES, INVERSE_NORMS, num_rows, num_classes, ignored,
    depth, half_factor, DEPTH: tl.constexpr,
):  # fmt: skip
    """In place: from what all classes pull to the gradient of a row's embedding."""
    row = tl.program_id(0)
    column, is_ignored, _is_wrong = _pick_label(LABELS, row, num_classes, ignored)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    place = row.to(tl.int64) * depth + dimension
    state = STATE + row
    own = tl.load(PROTOTYPES + column * depth + dimension, mask=inside, other=0.0)
    own *= tl.load(INVERSE_NORMS + column)
    weight = (tl.load(state + WEIGHT * num_rows) * half_factor).to(tl.float32)
    in_cosine = tl.load(state + IN_COSINE * num_rows).to(tl.float32)
    norm = tl.load(state + NORM * num_rows).to(tl.float32)
    x = tl.load(UNIT + place, mask=inside, other=0.0)
    pulled = tl.load(GRADIENT + place, mask=inside, other=0.0)
    gradient = weight * pulled + in_cosine * own
    gradient = (gradient - tl.sum(gradient * x, 0) * x) / norm
    tl.store(GRADIENT + place, tl.where(is_ignored, 0.0, gradient), mask=inside)


@triton.jit
def _reduce(STATE, LABELS, SUMS, LOSS_OUT, num_rows, ignored, depth, BLOCK: tl.constexpr):
    """Loss of the batch, and a bound of the elements of the class gradient."""
    losses = tl.zeros((BLOCK,), tl.float64)
    weights = tl.zeros((BLOCK,), tl.float64)
    inverses = tl.zeros((BLOCK,), tl.float64)
    poison = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < num_rows
        label = tl.load(LABELS + row, mask=inside, other=0)
        is_counted = inside & (label != ignored)
        state = STATE + row
        losses += tl.load(state + LOSS * num_rows, mask=is_counted, other=0.0)
        others = tl.load(state + OTHERS * num_rows, mask=is_counted, other=0.0)
        weight = tl.load(state + WEIGHT * num_rows, mask=is_counted, other=0.0)
        in_cosine = tl.load(state + IN_COSINE * num_rows, mask=is_counted, other=0.0)
        weights += tl.abs(others * weight) + tl.abs(in_cosine)
        inverse = tl.load(state + INVERSE * num_rows, mask=is_counted, other=0.0)
        poison |= (inverse != inverse).to(tl.int32)
        inverses = tl.maximum(inverses, inverse)
    bound = tl.sum(weights, 0) * tl.maximum((2.0 + depth) * tl.max(inverses, 0), 1.0)
    bound = tl.where(tl.max(poison, 0) > 0, float("nan"), bound)
    tl.store(LOSS_OUT, (tl.sum(losses, 0) * tl.load(SUMS + 1)).to(tl.float32))
    tl.store(SUMS + 3, bound)


@triton.jit
def _scale_rows(GRADIENT, GRAD, OUT, FACTOR, depth, HAS_FACTORS: tl.constexpr, DEPTH: tl.constexpr):
    """Gradient of a row's embedding times the incoming one of the loss, which is kept as well."""
    row = tl.program_id(0).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    place = row * 0
    if HAS_FACTORS:
        place = row
    factor = tl.load(GRAD + place).to(tl.float32)
    tl.store(FACTOR + place, factor)
    gradient = tl.load(GRADIENT + row * depth + dimension, mask=inside, other=0.0)
    scaled = tl.where(factor == 0.0, 0.0, gradient * factor)
    tl.store(OUT + row * depth + dimension, scaled.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _class_gradient(
    BITS, STATE, LABELS, UNIT, FACTORS, gradient, column, prototype, inverse, num_rows, words,
    depth, rate, power,
    POWER: tl.constexpr, IS_LISTED: tl.constexpr, HAS_FACTORS: tl.constexpr, WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Gradient of one unit prototype ``[1, d]``, its rows in ascending order; any not zero."""
    dimension = tl.arange(0, DEPTH)
    inside = dimension < depth
    word = tl.arange(0, WORDS)
    place = BITS + column.to(tl.int64) * words + word
    bits = tl.load(place, mask=word < words, other=0).to(tl.int64) & 0xFFFFFFFF
    is_touched = column * 0
    unit = prototype * inverse
    first = tl.min(tl.where(bits != 0, word, WORDS), 0)
    while first < WORDS:
        value = tl.sum(tl.where(word == first, bits, 0), 0)
        lowest = (value & (0 - value)).to(tl.float32)  # a power of two: its exponent is the bit
        row = first * 32 + ((lowest.to(tl.int32, bitcast=True) >> 23) - 127)
        bits = tl.where(word == first, bits & (bits - 1), bits)
        state = STATE + row
        x = tl.load(UNIT + row.to(tl.int64) * depth + dimension, mask=inside, other=0.0)
        weight = tl.load(state + IN_COSINE * num_rows).to(tl.float32)
        if IS_LISTED:  # else only targets are marked
            cosine = tl.sum(tl.sum(unit * x[None, :], 1), 0)
            best = tl.load(state + BEST * num_rows)
            height = tl.load(state + LEVEL * num_rows) + (cosine.to(tl.float64) - best) * rate
            posterior, _slope = _ratios(height, power, POWER)
            other = (posterior * tl.load(state + WEIGHT * num_rows)).to(tl.float32)
            weight = tl.where(tl.load(LABELS + row) == column, weight, other)
        if HAS_FACTORS:
            weight *= tl.load(FACTORS + row).to(tl.float32)
        is_touched = is_touched | (weight != 0.0).to(tl.int32)
        gradient += weight * x[None, :]
        first = tl.min(tl.where(bits != 0, word, WORDS), 0)
    return gradient, is_touched


@triton.jit
def _is_finite(grad_scale, SUMS, FACTORS, HAS_FACTORS: tl.constexpr):
    """Whether a step is taken: its scale is finite, and so is every element of the gradient."""
    bound = tl.load(SUMS + 3)
    if HAS_FACTORS == 0:  # with factors of rows the scale says so
        bound *= tl.abs(tl.load(FACTORS).to(tl.float64))
    return (tl.abs(grad_scale) < float("inf")) & (bound < 3.4e38)


@triton.jit
def _update(
    BITS, STATE, LABELS, UNIT, PUSHED, SUMS, FACTORS, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY,
    GRAD_SCALE, RATES, LARGEST, OUT, num_rows, words, depth, scale_high, scale_low, b_high, b_low,
    half_factor,
    MODE: tl.constexpr, HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
    ONLY_ACTIVE: tl.constexpr, POWER: tl.constexpr, IS_LISTED: tl.constexpr,
    HAS_FACTORS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A class: step its prototype (mode 0), write its gradient (1) or its squared norm (2)."""
    column = tl.program_id(0)
    scale = whole(scale_high, scale_low)
    b = whole(b_high, b_low)
    dimension = tl.arange(0, DEPTH)
    classes = column + tl.arange(0, 1)
    place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
    inside = (classes[:, None] >= 0) & (dimension[None, :] < depth)
    is_taken = column >= 0
    grad_scale = 1.0
    if MODE == 0:
        grad_scale = tl.load(GRAD_SCALE)
        is_taken = _is_finite(grad_scale, SUMS, FACTORS, HAS_FACTORS)
    if is_taken:
        prototype = tl.load(PROTOTYPES + place, mask=inside, other=0.0)
        inverse = tl.load(INVERSE_NORMS + classes)
        buffer = prototype
        if HAS_BUFFER:
            buffer = tl.load(BUFFER + place, mask=inside, other=0.0)
        gradient = tl.zeros((1, DEPTH), tl.float32)
        power = b
        if IS_LISTED:
            power = 1.0 / b
        else:
            push = (tl.load(SUMS + 2) * half_factor).to(tl.float32)
            gradient = tl.load(PUSHED + place, mask=inside, other=0.0) * push
        gradient, is_touched = _class_gradient(
            BITS, STATE, LABELS, UNIT, FACTORS, gradient, column, prototype, inverse[:, None],
            num_rows, words, depth, b * scale, power, POWER, IS_LISTED, HAS_FACTORS, WORDS, DEPTH,
        )  # fmt: skip
        factor = 1.0
        if HAS_FACTORS == 0:
            factor = tl.load(FACTORS).to(tl.float32)
        gradient = _tangent(gradient, prototype, inverse) * factor
        if MODE == 0:
            is_stepped = classes >= 0
            if ONLY_ACTIVE and IS_LISTED:
                is_stepped = classes * 0 + is_touched > 0
            lr = tl.load(RATES)
            momentum = tl.load(RATES + 1)
            weight_decay = tl.load(RATES + 2)
            _apply(
                gradient * grad_scale, prototype, buffer, place, is_stepped, classes, dimension,
                PROTOTYPES, BUFFER, INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay,
                depth, HAS_BUFFER, NESTEROV,
            )  # fmt: skip
        elif MODE == 1:
            tl.store(OUT + place, gradient, mask=inside)
        else:
            wide = gradient.to(tl.float64)
            tl.store(OUT + classes, tl.sum(wide * wide, 1))


@triton.jit
def _note_update(
    LARGEST, GRAD_SCALE, SUMS, FACTORS, COPY_ERROR, SKIPPED, ONLY_ACTIVE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """After an update: the copy's largest error, and whether the step was skipped."""
    largest = tl.load(LARGEST)
    error = tl.where(largest < float("inf"), tl.sqrt(largest), float("nan"))
    before = tl.load(COPY_ERROR)
    if ONLY_ACTIVE:  # the others' errors still stand
        error = tl.where((error > before) | (error != error), error, before)
    is_taken = _is_finite(tl.load(GRAD_SCALE), SUMS, FACTORS, HAS_FACTORS)
    tl.store(COPY_ERROR, tl.where(is_taken, error, before))
    tl.store(SKIPPED, tl.load(SKIPPED) + tl.where(is_taken, 0, 1))
    tl.store(LARGEST, 0.0)  # for the next update


@dataclass
class Rows:
    """A batch, and the results of a step for its rows."""

    labels: Tensor  # [B] int64
    ignored: int
    unit: Tensor  # [B, d]
    rounded: Tensor  # [B, d]
    state: Tensor  # [FIELDS, B] float64
    sums: Tensor  # [4] float64: share, the same or NaN, share times scale, the gradient's bound
    factor: Tensor  # scalar or [B]: incoming gradient of the loss
    loss: Tensor  # scalar
    bits: Tensor | None = None  # [k, words] int32
    gradient: Tensor | None = None  # [B, d]: of the embeddings, or what the other classes pull
    posterior: Tensor | None = None  # [B, K] times ``FACTOR``, at ``alpha = 1``

    @classmethod
    def empty(
        cls, num_rows: int, depth: int, dtype: torch.dtype, device: torch.device, **options: Any
    ) -> Rows:
        """Allocate rows; options are ``ignored`` and ``has_factors``."""
        return cls(
            torch.empty(num_rows, dtype=torch.int64, device=device),
            options["ignored"],
            torch.empty((num_rows, depth), dtype=torch.float32, device=device),
            torch.empty((num_rows, depth), dtype=dtype, device=device),
            torch.empty((FIELDS.value, num_rows), dtype=torch.float64, device=device),
            torch.empty(4, dtype=torch.float64, device=device),
            torch.empty((num_rows,) * options["has_factors"], dtype=torch.float32, device=device),
            torch.empty((), dtype=torch.float32, device=device),
        )

    def field(self, number: Any) -> Tensor:
        """One number of every row, ``[B]`` float64."""
        return self.state[number.value]


def prepare(
    rows: Rows,
    embeddings: Tensor,
    labels: Tensor,
    state: PrototypeState,
    copy_error: Tensor,
    *,
    scale: float,
    margin: tuple[float, float, float, bool],
    is_mean: bool,
) -> None:
    """Normalise the rows and apply the margin, a ``ClosedForm``, to their targets."""
    prior, cosine, angle, is_straight = margin
    num_rows, depth = embeddings.shape
    if embeddings.stride(1) != 1:
        embeddings = embeddings.contiguous()
    accumulated, labels = 2.0 * depth * torch.finfo(torch.float32).eps, labels.contiguous()
    given = (embeddings, labels, state.prototypes, state.inverse_norms, copy_error)
    made = (rows.labels, rows.unit, rows.rounded, rows.state, rows.sums)

    def launches() -> None:
        launch(
            _prepare_rows, (num_rows,), *given, *made, embeddings.stride(0), num_rows,
            len(state.prototypes), rows.ignored, depth, accumulated, *split(scale),
            *split(prior), *split(cosine), *split(math.cos(angle)), *split(math.sin(angle)),
            angle != 0.0, is_straight, is_mean, 1024, power_of_two(depth), num_warps=4,
        )  # fmt: skip

    key = ("prepare", rows.ignored, scale, margin, is_mean, rows.rounded.dtype)
    repeat(launches, key, *given, made=made)


def _begin_gradient(rows: Rows, state: PrototypeState) -> tuple[Tensor, Tensor, int]:
    (num_rows, depth), device = rows.unit.shape, rows.unit.device
    words = -(-num_rows // 32)
    rows.bits = torch.zeros((len(state.prototypes), words), dtype=torch.int32, device=device)
    rows.gradient = torch.empty((num_rows, depth), dtype=torch.float32, device=device)
    return rows.bits, rows.gradient, words


def solve(
    rows: Rows,
    state: PrototypeState,
    *,
    scale: float,
    b: float,
    has_gradient: bool,
    is_finished: bool,
    capacity: int,
) -> None:
    """Screen all classes and solve every row, for ``alpha`` above 1 and up to 2.

    Lists hold at most ``capacity`` classes. With a gradient, active classes are marked, and rows
    get the gradient of their embeddings (finished) or the sum of posterior times unit prototype.
    """
    cosines = torch.mm(rows.rounded, state.copy.t())
    (num_rows, width), depth, device = cosines.shape, rows.unit.shape[1], cosines.device
    num_classes, words = len(state.prototypes), 0
    capacity = min(capacity, max(SMALLEST_LIST, power_of_two(num_classes)))
    block = min(LIST_BLOCK, max(128, power_of_two(num_classes)))
    entries = min(LANE_ENTRIES, triton.cdiv(width, block))  # of a lane
    lanes = torch.empty((num_rows, block * entries), dtype=torch.int32, device=device)
    lists = torch.empty((num_rows, capacity), dtype=torch.int32, device=device)
    scores = torch.empty((num_rows, capacity), dtype=torch.float32, device=device)
    bits = gradient = lists  # not written without a gradient
    if has_gradient:
        bits, gradient, words = _begin_gradient(rows, state)
    storage = torch.finfo(cosines.dtype).eps  # twice what rounding to nearest does
    numbers, power = (*split(scale), *split(b)), whole_power(b)
    given = (num_rows, num_classes, rows.ignored)
    _list_rows[(num_rows,)](
        cosines, rows.labels, rows.state, lanes, lists, width, *given, storage, *numbers,
        capacity, entries, COARSE_STEPS, ROUNDING, block, 1 if width <= block else 4, power,
        num_warps=8 if block > 1024 else 4,
    )  # fmt: skip
    wide, tile = power_of_two(depth), max(2, min(TILE, 8192 // power_of_two(depth)))
    scored = max(2, 4096 // wide)
    _score_rows[(num_rows, SPLIT)](
        rows.state, lists, scores, rows.unit, state.prototypes, state.inverse_norms, num_rows,
        depth, capacity, SPLIT, scored, wide, num_warps=1 if wide <= 512 else 4,
    )  # fmt: skip
    _solve_lists[(num_rows,)](
        rows.state, rows.sums, rows.labels, lists, scores, state.inverse_norms, bits, *given, words,
        *numbers, power, capacity, MAX_STEPS, has_gradient, min(PART, capacity), num_warps=4,
    )  # fmt: skip
    if has_gradient:
        slices = min(wide, 128)
        _pull_rows[(num_rows, triton.cdiv(depth, slices))](
            rows.state, rows.labels, lists, scores, rows.unit, state.prototypes,
            state.inverse_norms, gradient, *given, depth, capacity, is_finished, TILE, slices,
            num_warps=2,
        )  # fmt: skip
    if capacity < num_classes or block * entries < num_classes:
        _solve_row[(num_rows,)](
            cosines, rows.labels, rows.unit, state.prototypes, state.inverse_norms, rows.state,
            rows.sums, bits, gradient, width, *given, depth, words, *numbers, power, capacity,
            MAX_STEPS, has_gradient, is_finished, tile, wide, num_warps=8,
        )  # fmt: skip


def solve_softmax(rows: Rows, state: PrototypeState, *, scale: float, has_gradient: bool) -> None:
    """The same at ``alpha = 1``, for cosines of the rounded vectors; gradients are finished."""
    num_rows, device, words = len(rows.labels), rows.unit.device, 0
    num_classes = len(state.prototypes)
    batch = (rows.rounded, state.copy, rows.labels, num_classes)
    tops, masses = blocks.tile_sums(batch, scale)
    shift, level = torch.empty((2, num_rows), device=device).unbind()
    bits, gradient = rows.labels, tops  # not written without a gradient
    if has_gradient:
        bits, gradient, words = _begin_gradient(rows, state)
    tiles = tops.shape[1]
    _solve_softmax[(num_rows,)](
        rows.state, rows.sums, rows.labels, tops, masses, shift, level, bits,
        state.inverse_norms.amax(), num_rows, tiles, num_classes, rows.ignored, words,
        *split(scale), has_gradient, min(1024, power_of_two(tiles)), num_warps=4,
    )  # fmt: skip
    if has_gradient:
        weights = blocks.posterior_block(batch, slice(0, num_classes), (shift, level), scale, 0.0)
        rows.posterior = weights
        product(weights, state.copy[: weights.shape[1]], out=gradient)
        _finish(rows, state, 1.0 / blocks.FACTOR)


def _finish(rows: Rows, state: PrototypeState, factor: float) -> None:
    """Turn what all classes pull, times a factor, into the gradient of the embeddings."""
    num_rows, depth = rows.unit.shape
    _finish_softmax[(num_rows,)](
        rows.gradient, rows.state, rows.labels, rows.unit, state.prototypes, state.inverse_norms,
        num_rows, len(state.prototypes), rows.ignored, depth, factor, power_of_two(depth),
        num_warps=4,
    )  # fmt: skip


def settle_lists(
    rows: Rows, state: PrototypeState, losses: Tensor, others: Tensor, pulled: Tensor | None,
    *, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Finish rows that were solved by lists: losses and the others' mass, float64 ``[B]``.

    Returns what the other classes and the target of each row weigh, float32 ``[B]``.
    """
    num_rows = len(rows.labels)
    weights = torch.empty((2, num_rows), dtype=torch.float32, device=losses.device)
    _settle_lists[(triton.cdiv(num_rows, 256),)](
        rows.state, rows.sums, rows.labels, losses, others, state.inverse_norms.amax(), weights,
        num_rows, rows.ignored, *split(scale), 256, num_warps=4,
    )  # fmt: skip
    if pulled is not None:
        rows.gradient = pulled
        _finish(rows, state, 1.0)
    reduce(rows)
    others_weight, target_weight = weights.unbind()
    return others_weight, target_weight


def settle_softmax(
    rows: Rows, state: PrototypeState, top: Tensor, mass: Tensor, pulled: Tensor | None,
    *, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same at ``alpha = 1``, from sums over the others relative to a cosine ``top`` ``[B]``.

    Returns a cosine and the logarithm of the posterior there, float32 ``[B]``.
    """
    num_rows, device = len(rows.labels), rows.unit.device
    shift, level = torch.empty((2, num_rows), device=device).unbind()
    _solve_softmax[(num_rows,)](
        rows.state, rows.sums, rows.labels, top, mass, shift, level, rows.labels,
        state.inverse_norms.amax(), num_rows, 1, len(state.prototypes), rows.ignored, 0,
        *split(scale), False, 1, num_warps=1,
    )  # fmt: skip
    if pulled is not None:
        rows.gradient = pulled * level.exp()[:, None]
        _finish(rows, state, 1.0)
    reduce(rows)
    return shift, level


def reduce(rows: Rows) -> None:
    """Loss of the batch, and the bound of its gradient."""
    num_rows = len(rows.labels)
    _reduce[(1,)](
        rows.state, rows.labels, rows.sums, rows.loss, num_rows, rows.ignored, rows.unit.shape[1],
        min(1024, power_of_two(num_rows)), num_warps=4,
    )  # fmt: skip


def scale_rows(rows: Rows, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the embeddings for the gradient ``grad`` of the loss, which rows keep."""
    assert rows.gradient is not None
    (num_rows, depth), factor = rows.gradient.shape, rows.factor
    out = torch.empty((num_rows, depth), dtype=dtype, device=grad.device)
    grad = grad.contiguous()  # a mean of rows has the same gradient for all: one number, expanded
    given, made = (rows.gradient, grad), (out, factor)

    def launches() -> None:
        launch(
            _scale_rows, (num_rows,), *given, *made, depth, factor.ndim > 0, power_of_two(depth),
            num_warps=4,
        )  # fmt: skip

    repeat(launches, ("scale", dtype, factor.ndim), *given, made=made)
    return out


class Pushed(NamedTuple):
    """Inputs of a gradient of the prototypes."""

    rows: Rows
    state: PrototypeState
    scale: float
    b: float


def _launch_update(
    pushed: Pushed, mode: int, out: Tensor, *, grad_scale: Tensor | None = None,
    rates: Tensor | None = None, nesterov: bool = False, only_active: bool = False,
) -> None:  # fmt: skip
    rows, state, scale, b = pushed
    (num_classes, depth), num_rows, factor = state.prototypes.shape, len(rows.labels), rows.factor
    assert rows.bits is not None
    words, momentum = rows.bits.shape[1], state.momentum
    buffer = state.prototypes if momentum is None else momentum
    is_listed, pushed_rows = rows.posterior is None, rows.unit
    if rows.posterior is not None:
        operand = rows.rounded
        if factor.ndim > 0:  # of each row: relative to the largest, in the range of half
            largest = factor.abs().amax().clamp_min(torch.finfo(factor.dtype).tiny)
            operand = (rows.unit * (factor / largest)[:, None]).to(operand.dtype)
        pushed_rows = rows.unit.new_empty((rows.posterior.shape[1], depth))
        product(rows.posterior.t(), operand, out=pushed_rows)  # autocast leaves it alone
        if factor.ndim > 0:
            pushed_rows *= largest
    wide = power_of_two(depth)
    _update[(num_classes,)](
        rows.bits, rows.state, rows.labels, rows.unit, pushed_rows, rows.sums, factor,
        state.prototypes, buffer, state.inverse_norms, state.copy,
        factor if grad_scale is None else grad_scale, factor if rates is None else rates, out, out,
        num_rows, words, depth, *split(scale), *split(b), 1.0 / blocks.FACTOR, mode,
        mode == 0 and momentum is not None, nesterov, only_active, whole_power(b), is_listed,
        factor.ndim > 0, power_of_two(words), wide, num_warps=1 if wide <= 512 else 4,
    )  # fmt: skip


def sgd_update(
    pushed: Pushed, grad_scale: Tensor, rates: Tensor, copy_error: Tensor, num_skipped: Tensor,
    largest: Tensor, *, nesterov: bool, only_active: bool,
) -> None:  # fmt: skip
    """Step the prototypes, unless the scale or the gradient is not finite.

    ``rates`` are learning rate, momentum and weight decay, float32. The copy's error and the count
    of skipped steps are updated in place; ``largest`` is a float32 scalar that is zero before and
    after.
    """
    flags = {"nesterov": nesterov, "only_active": only_active}
    _launch_update(pushed, 0, largest, grad_scale=grad_scale, rates=rates, **flags)
    factor = pushed.rows.factor
    _note_update[(1,)](
        largest, grad_scale, pushed.rows.sums, factor, copy_error, num_skipped, only_active,
        factor.ndim > 0, num_warps=1,
    )  # fmt: skip


def class_gradient(pushed: Pushed) -> Tensor:
    """Gradient of all prototypes ``[k, d]``."""
    out = torch.empty_like(pushed.state.prototypes, memory_format=torch.contiguous_format)
    _launch_update(pushed, 1, out)
    return out


def squared_norms(pushed: Pushed) -> Tensor:
    """Squared norm of every prototype's gradient, ``[k]`` float64."""
    prototypes = pushed.state.prototypes
    out = torch.empty(len(prototypes), dtype=torch.float64, device=prototypes.device)
    _launch_update(pushed, 2, out)
    return out
