"""The loss of whole rows ``[B, k]`` on a GPU: one kernel solves rows, one writes their posterior.

Forward reads a row twice. The first pass keeps the best class of every lane; the root over these
is a lower bound of ``tau`` (M13). The second pass lists the classes above ``tau_low + edge``: all
others are certainly inactive. Newton's method then runs on the list in float64, and above
``alpha = 2`` bisection. A row whose list overflows is solved by passes over the row itself, so no
result depends on the size of a list. At ``alpha = 1`` one pass of a running log-sum-exp is enough;
below it every class is active and passes over the row are all there is. ``kernels.rows`` is the
plain form.

Values are read in their own dtype, float32, float16 or bfloat16. Numbers of a row are float64.
Settings reach a kernel as pairs of float32, whose sum is the number: nothing is copied to the
device, and no setting is part of what is compiled.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.rows import Outcome
from qmargin.kernels.solver import uses_slack
from qmargin.kernels.triton.replay import launch

CAPACITY = 4096  # entries of a row's list
PART = 1024  # entries of a list that are summed at once
COARSE_STEPS = 24  # towards the root over lanes
MAX_STEPS = 256  # of Newton; cosine logits take 4 to 15
MAX_HALVINGS = 256
SMALLEST_SINE = tl.constexpr(2.0**-11.5)  # as in losses.margins, for its gradient
HEIGHT, SLACK, EXPONENTIAL = 0, 1, 2  # the form of a level
NO_TARGET, GIVEN, MARGIN = 0, 1, 2  # where a target comes from
NO_ANGLE, WIDENED, STRAIGHT = 0, 1, 2  # what a margin does to the target's angle
LEFT_OUT, WEIGHED, OWN = 0, 1, 2  # what is written in a target's place


@triton.jit
def log1p(x):
    """``log(1 + x)``, accurate for a small ``x``: a quotient undoes the rounding of the sum."""
    w = 1.0 + x
    rounded = w - 1.0
    is_tiny = rounded == 0
    safe = tl.where(w > 0, w, 1.0)
    quotient = x / tl.where(is_tiny, 1.0, rounded)
    return tl.where(is_tiny, x, tl.log(safe) * quotient)


@triton.jit
def _expm1(x):
    """``exp(x) - 1``, accurate for a small ``x``."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x / 120.0))))
    return tl.where(tl.abs(x) < 1e-3, series, tl.exp(x) - 1.0)


@triton.jit
def _ratio(level, b, inverse, FORM: tl.constexpr, POWER: tl.constexpr):
    """Ratio ``p / q`` of classes at a level, and its slope; zero off the support."""
    if FORM == 1:
        height = 1.0 + b * level
        safe = tl.where(height > 0, height, 1.0)
        p = tl.where(height > 0, tl.exp(log1p(b * level) * inverse), 0.0)
        slope = p / safe
    elif POWER == 1:
        p = tl.maximum(level, 0.0)
        slope = tl.where(level > 0, level * 0.0 + 1.0, 0.0)
    elif POWER == 2:
        slope = tl.maximum(level, 0.0)
        p = slope * slope
    elif POWER == 4:
        x = tl.maximum(level, 0.0)
        slope = x * x * x
        p = slope * x
    else:
        safe = tl.where(level > 0, level, 1.0)
        p = tl.where(level > 0, tl.exp(tl.log(safe) * inverse), 0.0)
        slope = p / safe
    return p, slope


@triton.jit
def _change(mass, b, FORM: tl.constexpr):
    """How far Newton on ``mass ** b`` moves a level, in units of ``mass / slope`` (M5)."""
    change = _expm1(-b * tl.log(mass))
    return change if FORM == 0 else change / b


@triton.jit
def _cost(log_reference, b, FORM: tl.constexpr):
    """Level at which a class alone holds all the mass."""
    if FORM == 0:
        cost = tl.exp(-b * log_reference)
    else:
        cost = _expm1(-b * log_reference) / b
    return cost


@triton.jit
def gain(r, log_target, b):
    """Cost of a target that lost the mass ``r``: ``kernels.solver.others_gain`` of one row."""
    exact = -_expm1(b * log_target + log1p(b * r)) / b
    series = r * 0.0
    power = b * b * b * b * b * b * b * b * b * b * b  # b ** 11
    number = 12.0
    sign = 1.0
    for _ in range(11):
        series = (series + (1.0 + sign * power) / number) * r
        power = power / b
        number -= 1.0
        sign = -sign
    series = series * r
    small = -_expm1(-b * series) / b
    return tl.where(r * tl.maximum(1.0, tl.abs(b)) < 0.02, small, exact)


@triton.jit
def whole(high, low):
    """A setting in float64."""
    return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)


@triton.jit
def _target(
    BASE, LABELS, TARGET, TARGET_REF, row, k, ignore_index, scale,
    own_high, own_low, shift_high, shift_low, cos_high, cos_low, sin_high, sin_low,
    KIND: tl.constexpr, ANGLE: tl.constexpr, HAS_IGNORED: tl.constexpr,
):  # fmt: skip
    """Label, logit, log reference and slope of a row's target; is it broken, is it ignored."""
    label = (row * 0 - 1).to(tl.int32)
    logit = scale * 0.0 - float("inf")
    reference = scale * 0.0
    slope = scale * 0.0
    is_broken = row < 0
    is_ignored = row < 0
    if KIND != 0:
        given = tl.load(LABELS + row).to(tl.int64)
        is_broken = (given < 0) | (given >= k)
        if HAS_IGNORED:
            is_ignored = given == ignore_index
        label = tl.where(is_broken | is_ignored, 0, given).to(tl.int32)
        if KIND == 1:
            logit = tl.load(TARGET + row).to(tl.float64)
            reference = tl.load(TARGET_REF + row).to(tl.float64)
            slope = scale * 0.0 + 1.0
        else:
            cosine = tl.load(BASE + label).to(tl.float32).to(tl.float64)
            is_finite = tl.abs(cosine) < float("inf")
            moved = cosine
            slope = cosine * 0.0 + 1.0
            if ANGLE != 0:  # cos(arccos c + m), see losses.margins.widened_cosines
                cos_margin = whole(cos_high, cos_low)
                sin_margin = whole(sin_high, sin_low)
                inside = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
                sine = tl.sqrt((1.0 - inside) * (1.0 + inside))
                is_rotated = inside > -cos_margin
                rotated = inside * cos_margin - sine * sin_margin
                moved = tl.where(is_rotated, rotated, inside - 1.0 + cos_margin)
                moved = tl.where(is_finite, moved, cosine)
                if ANGLE == 1:
                    turned = cos_margin + sin_margin * inside / tl.maximum(sine, SMALLEST_SINE)
                    slope = tl.where(is_rotated, turned, 1.0)
                    slope = tl.where(tl.abs(cosine) > 1.0, 0.0, slope)
            logit = (moved - whole(shift_high, shift_low)) * scale
            slope = tl.where(is_finite, slope * scale, 0.0)
            reference = whole(own_high, own_low) + cosine * 0.0
            reference = tl.where(is_finite, reference, whole(own_high, own_low))
        # A target without measure is a masked target: both cost infinity.
        is_masked = (reference == float("-inf")) & (logit < float("inf"))
        logit = tl.where(is_masked, float("-inf"), logit)
        reference = tl.where(is_masked, 0.0, reference)
        is_broken = is_broken | (logit != logit) | (logit == float("inf"))
        is_broken = is_broken | (reference != reference) | (reference == float("inf"))
    return label, logit, reference, slope, is_broken, is_ignored


@triton.jit
def _part(
    LIST, LIST_REF, BASE, REF_BASE, reference_column, count, k, label, start, is_listed,
    HAS_REFERENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row's list, or of the row if the list overflowed; and its valid entries."""
    at = start + tl.arange(0, BLOCK)
    if is_listed:
        x = tl.load(LIST + at, mask=at < count, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(BASE + at, mask=(at < k) & (at != label), other=float("-inf")).to(tl.float32)
    reference = x * 0.0
    if HAS_REFERENCE:
        if is_listed:
            reference = tl.load(LIST_REF + at, mask=at < count, other=float("-inf"))
        else:
            reference = tl.load(
                REF_BASE + at * reference_column, mask=(at < k) & (at != label), other=float("-inf")
            )
        x = tl.where(reference > float("-inf"), x, float("-inf"))
    is_other = x > float("-inf")
    return tl.where(is_other, x, 0.0), reference, is_other


@triton.jit
def _terms(
    x, level, anchor, scale, step, b, inverse, FORM: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    """Ratios and slopes of classes in float64."""
    return _ratio(level + (x.to(tl.float64) * scale - anchor) * step, b, inverse, FORM, POWER)


@triton.jit
def _short_terms(
    x, top, rate, high, low, b, inverse, FORM: tl.constexpr, POWER: tl.constexpr
):  # fmt: skip
    """The same in float32."""
    each = ((x - top) * rate + high) + low
    p, d = _ratio(each, b.to(tl.float32), inverse.to(tl.float32), FORM, POWER)
    return p.to(tl.float64), d.to(tl.float64)


@triton.jit
def _sums(
    LIST, LIST_REF, BASE, REF_BASE, reference_column, count, k, label, is_listed,
    level, anchor, scale, step, b, inverse,
    FORM: tl.constexpr, POWER: tl.constexpr, IS_PRECISE: tl.constexpr,
    HAS_REFERENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass and slope of all classes but the target at a trial level.

    A list is summed in float64. Over a whole row single terms are float32, their rounding errors
    average out, and the sums of lanes are float64; what float32 cannot resolve is ``IS_PRECISE``.
    """
    mass = tl.zeros((BLOCK,), tl.float64)
    slope = tl.zeros((BLOCK,), tl.float64)
    top = (anchor / scale).to(tl.float32)
    rest = level + (top.to(tl.float64) * scale - anchor) * step
    high = rest.to(tl.float32)
    low = (rest - high.to(tl.float64)).to(tl.float32)
    rate = (scale * step).to(tl.float32)
    total = tl.where(is_listed, count, k)
    for start in range(0, total, BLOCK):
        x, reference, is_other = _part(
            LIST, LIST_REF, BASE, REF_BASE, reference_column, count, k, label, start, is_listed,
            HAS_REFERENCE, BLOCK,
        )  # fmt: skip
        if IS_PRECISE:
            p, d = _terms(x, level, anchor, scale, step, b, inverse, FORM, POWER)
            if HAS_REFERENCE:
                measure = tl.exp(reference.to(tl.float64))
                p = p * measure
                d = d * measure
        else:
            if is_listed:
                p, d = _terms(x, level, anchor, scale, step, b, inverse, FORM, POWER)
            else:
                p, d = _short_terms(x, top, rate, high, low, b, inverse, FORM, POWER)
        mass += tl.where(is_other, p, 0.0)
        slope += tl.where(is_other, d, 0.0)
    return tl.sum(mass, 0), tl.sum(slope, 0)


@triton.jit
def _lane_sums(
    lanes, lane_refs, is_lane, top, level, gap, own_measure, b, inverse, rate,
    FORM: tl.constexpr, POWER: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_REFERENCE: tl.constexpr,
):  # fmt: skip
    """Mass and slope of the lanes' best classes and the target: terms in float32."""
    each = (lanes - top) * rate + level.to(tl.float32)
    p, d = _ratio(each, b.to(tl.float32), inverse.to(tl.float32), FORM, POWER)
    if HAS_REFERENCE:
        measure = tl.exp(lane_refs)
        p = p * measure
        d = d * measure
    mass = tl.sum(tl.where(is_lane, p, 0.0), 0).to(tl.float64)
    slope = tl.sum(tl.where(is_lane, d, 0.0), 0).to(tl.float64)
    if HAS_TARGET:
        own, own_slope = _ratio(level + gap, b, inverse, FORM, 0)
        mass += own * own_measure
        slope += own_slope * own_measure
    return mass, slope


@triton.jit
def _store(
    VALUE, ANCHOR, LEVEL, GRADIENT, TAU, SUPPORT, ERROR, OWN, DEFICIT, row, is_broken, is_ignored,
    value, anchor, level, gradient, tau, support, error, own, deficit, HAS_STATS: tl.constexpr,
):  # fmt: skip
    nan = float("nan")
    value = tl.where(is_broken, nan, value)
    tl.store(VALUE + row, tl.where(is_ignored, 0.0, value).to(tl.float32))
    tl.store(ANCHOR + row, anchor)
    tl.store(LEVEL + row, tl.where(is_broken, nan, level))
    gradient = tl.where(is_broken, nan, gradient)
    tl.store(GRADIENT + row, tl.where(is_ignored, 0.0, gradient).to(tl.float32))
    if HAS_STATS:
        tl.store(TAU + row, tl.where(is_broken, nan, tau).to(tl.float32))
        tl.store(SUPPORT + row, support.to(tl.int64))
        tl.store(ERROR + row, tl.where(is_broken, nan, error).to(tl.float32))
        tl.store(OWN + row, tl.where(is_broken, nan, own).to(tl.float32))
        tl.store(DEFICIT + row, tl.where(is_broken, nan, deficit).to(tl.float32))


@triton.jit(do_not_specialize=["ignore_index"])
def _solve_rows(
    VALUES, LABELS, TARGET, TARGET_REF, REFERENCE, LISTS, LIST_REFS,
    VALUE, ANCHOR, LEVEL, GRADIENT, TAU, SUPPORT, ERROR, OWN, DEFICIT,
    row_stride, reference_row, reference_column, k, ignore_index,
    b_high, b_low, scale_high, scale_low,
    own_high, own_low, shift_high, shift_low, cos_high, cos_low, sin_high, sin_low,
    FORM: tl.constexpr, POWER: tl.constexpr, IS_SPARSE: tl.constexpr, IS_STEEP: tl.constexpr,
    IS_PRECISE: tl.constexpr, KIND: tl.constexpr, ANGLE: tl.constexpr,
    HAS_REFERENCE: tl.constexpr, HAS_IGNORED: tl.constexpr, HAS_STATS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    COARSE: tl.constexpr, STEPS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = whole(b_high, b_low)
    scale = whole(scale_high, scale_low)
    inverse = 1.0 / b
    step = b if FORM == 0 else b * 0.0 + 1.0
    none = float("-inf")
    lane = tl.arange(0, BLOCK)
    base = VALUES + row * row_stride
    ref_base = REFERENCE + row * reference_row
    mine = LISTS + row * CAPACITY
    mine_refs = LIST_REFS + row * CAPACITY
    label, target, own_ref, own_slope_in, is_broken, is_ignored = _target(
        base, LABELS, TARGET, TARGET_REF, row, k, ignore_index, scale,
        own_high, own_low, shift_high, shift_low, cos_high, cos_low, sin_high, sin_low,
        KIND, ANGLE, HAS_IGNORED,
    )  # fmt: skip
    width = tl.where(is_ignored, 0, k)  # an ignored row is not even read

    # The best class of each lane: the largest, or with a reference measure the one that gives the
    # best bound as the only class of its row (M4).
    lanes = tl.full((BLOCK,), none, tl.float32)
    lane_refs = tl.zeros((BLOCK,), tl.float32)
    best_ref = b * 0.0
    if HAS_REFERENCE:
        bounds = tl.full((BLOCK,), none, tl.float64)
        poison = tl.zeros((BLOCK,), tl.int32)
        lost = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, width, BLOCK):
            at = start + lane
            is_there = (at < k) & (at != label)
            x = tl.load(base + at, mask=is_there, other=none).to(tl.float32)
            place = ref_base + at * reference_column
            reference = tl.load(place, mask=is_there, other=none).to(tl.float32)
            is_bad = (x != x) | (x == float("inf"))
            is_bad = is_bad | (reference != reference) | (reference == float("inf"))
            poison |= is_bad.to(tl.int32)
            is_class = (x > none) & (reference > none)
            safe_ref = tl.where(is_class, reference, 0.0)
            bound = tl.where(is_class, x, 0.0).to(tl.float64) * scale
            bound = bound - _expm1(-b * safe_ref.to(tl.float64)) * inverse
            bound = tl.where(is_class, bound, none)
            lost |= (is_class & (bound == none)).to(tl.int32)
            is_better = bound > bounds
            bounds = tl.where(is_better, bound, bounds)
            lanes = tl.where(is_better, x, lanes)
            lane_refs = tl.where(is_better, safe_ref, lane_refs)
        is_broken = is_broken | (tl.max(poison, 0) > 0)
        highest = tl.max(bounds, 0)
        is_best = (bounds == highest) & (bounds > none)
        top = tl.max(tl.where(is_best, lanes, none), 0)
        is_best = is_best & (lanes == top)
        best_ref = tl.max(tl.where(is_best, lane_refs, none), 0).to(tl.float64)
        best_ref = tl.where(top > none, best_ref, 0.0)
        is_broken = is_broken | ((tl.max(lost, 0) > 0) & (top == none))
    else:
        for start in range(0, width, BLOCK):
            at = start + lane
            is_there = (at < k) & (at != label)
            x = tl.load(base + at, mask=is_there, other=none).to(tl.float32)
            lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
        is_bad = (lanes != lanes) | (lanes == float("inf"))
        is_broken = is_broken | (tl.max(is_bad.to(tl.int32), 0) > 0)
        lanes = tl.where(is_bad, none, lanes)
        top = tl.max(lanes, 0)
    has_others = top > none
    best = tl.where(has_others, top, 0.0).to(tl.float64) * scale

    # The anchor is the class, or the target, that bounds tau best: it alone holds all the mass.
    first = _cost(best_ref, b, FORM)
    level = first
    anchor = best
    gap = b * 0.0
    own_gap = b * 0.0
    asked = first
    is_own = row < 0
    if KIND != 0:
        is_broken = is_broken | ((~has_others) & (target == none))
        gap = (target - best) * step
        alone = _cost(own_ref, b, FORM)
        asked = alone - gap  # of the best class, where the target alone holds all the mass
        if IS_SPARSE or FORM == 1:
            is_own = (~has_others) | (asked < first)
        else:
            is_own = (~has_others) | (asked > first)
        level = tl.where(is_own, alone, first)
        anchor = tl.where(is_own, target, best)
        own_gap = tl.where(is_own, 0.0, gap)
    else:
        is_broken = is_broken | (~has_others)
    is_solved = is_broken | is_ignored
    own_measure = tl.exp(own_ref)

    count = (row * 0).to(tl.int32)
    is_listed = row < 0
    if IS_SPARSE:
        # Towards the root over lanes from below (M13), lowered by more than its rounding.
        is_lane = lanes > none
        safe_lanes = tl.where(is_lane, lanes, 0.0)
        safe_top = tl.where(has_others, top, 0.0)
        rate = (scale * step).to(tl.float32)
        begin = tl.where(is_own, asked, first)  # of the best class
        coarse = begin
        spread = tl.abs(gap) + 20.0
        is_moving = tl.where(is_solved | (~has_others), 0, 1)
        is_moving = tl.where(tl.abs(begin) + tl.abs(gap) < 1e30, is_moving, 0)
        done = 0
        safety = b * 0.0
        if IS_STEEP:
            stride = tl.maximum(tl.abs(begin), 1.0)
            while (done < 2 * COARSE) & (is_moving > 0):
                trial = coarse - stride
                mass, slope = _lane_sums(
                    safe_lanes, lane_refs, is_lane, safe_top, trial, gap, own_measure, b, inverse,
                    rate,
                    FORM, POWER, KIND != 0, HAS_REFERENCE,
                )  # fmt: skip
                is_below = (mass >= 1.0) & (mass < float("inf"))
                coarse = tl.where(is_below, trial, coarse)
                stride = tl.where(is_below, stride, 0.5 * stride)
                is_moving = (stride > 1e-4 * tl.abs(coarse)).to(tl.int32)
                done += 1
            tallest = tl.maximum(tl.maximum(coarse, coarse + gap), 0.0)
            safety = 2e-5 * b * tallest
        else:
            while (done < COARSE) & (is_moving > 0):
                mass, slope = _lane_sums(
                    safe_lanes, lane_refs, is_lane, safe_top, coarse, gap, own_measure, b, inverse,
                    rate,
                    FORM, POWER, KIND != 0, HAS_REFERENCE,
                )  # fmt: skip
                is_below = (mass > 1.0) & (mass < float("inf")) & (slope > 0)
                safe_mass = tl.where(is_below, mass, 1.0)
                unit = safe_mass / tl.where(is_below, slope, 1.0)
                coarse += unit * _change(safe_mass, b, FORM)
                safety = tl.maximum(safety, tl.where(is_below, 2e-5 * unit, 0.0))
                is_moving = (is_below & (mass > 1.002)).to(tl.int32)
                done += 1
        coarse += safety + 1e-6 * (tl.abs(coarse) + spread)
        fall = begin - coarse
        fall = tl.where((fall > 0) & (fall < 1e30), fall, 0.0)
        level = level - fall
        if FORM == 0:
            reach = (begin - fall) * inverse
        else:
            reach = begin - fall + inverse
        floor = best - reach - 1e-9 * tl.abs(reach)
        edge = (floor / scale).to(tl.float32)
        edge = edge - tl.abs(edge) * 2e-7
        edge = tl.where(is_solved, float("inf"), edge)
        blocks = tl.cdiv(width, BLOCK)
        for number in range(blocks):  # backwards: what was read last is still in the cache
            at = (blocks - 1 - number) * BLOCK + lane
            is_there = (at < k) & (at != label)
            x = tl.load(base + at, mask=is_there, other=none).to(tl.float32)
            is_hit = x > edge
            hits = tl.sum(is_hit.to(tl.int32), 0)
            if hits > 0:
                place = count + tl.cumsum(is_hit.to(tl.int32), 0) - 1
                is_kept = is_hit & (place < CAPACITY)
                tl.store(mine + place, x, mask=is_kept)
                if HAS_REFERENCE:
                    source = ref_base + at * reference_column
                    reference = tl.load(source, mask=is_kept, other=none).to(tl.float32)
                    tl.store(mine_refs + place, reference, mask=is_kept)
            count += hits
        is_listed = count <= CAPACITY
        tl.debug_barrier()

    done = 0
    if IS_STEEP:
        is_moving = tl.where(is_solved, 0, 1)
        stride = tl.maximum(tl.abs(level), 1.0)
        while (done < HALVINGS) & (is_moving > 0):
            trial = level - stride
            mass, slope = _sums(
                mine, mine_refs, base, ref_base, reference_column, count, k, label, is_listed,
                trial, anchor, scale, step, b, inverse,
                FORM, POWER, IS_PRECISE, HAS_REFERENCE, PART,
            )  # fmt: skip
            if KIND != 0:
                own, own_slope = _ratio(trial + own_gap, b, inverse, FORM, 0)
                mass += own * own_measure
            is_below = mass >= 1.0
            level = tl.where(is_below | (mass != mass), trial, level)
            stride = tl.where(is_below, stride, 0.5 * stride)
            is_far = tl.abs(mass - 1.0) > 1e-9
            is_moving = (is_far & (stride > 4e-16 * tl.abs(level))).to(tl.int32)
            level = tl.where(is_far, level, trial)
            level = tl.where(mass != mass, mass, level)
            done += 1
        # Anchor the row at its lowest active class, whose level has no cancellation: above
        # alpha = 2 a ratio is a high root of its level.
        limit = -1e-14 * tl.abs(level)
        passed = b * 0.0 + none
        is_idle = tl.where(is_solved, 0, 1)
        lowest = anchor
        lowest_ref = b * 0.0
        done = 0
        while (done < HALVINGS) & (is_idle > 0):
            least = tl.full((PART,), float("inf"), tl.float64)
            least_ref = tl.full((PART,), none, tl.float64)
            total = tl.where(is_listed, count, k)
            for start in range(0, total, PART):
                x, reference, is_other = _part(
                    mine, mine_refs, base, ref_base, reference_column, count, k, label, start,
                    is_listed, HAS_REFERENCE, PART,
                )  # fmt: skip
                logit = x.to(tl.float64) * scale
                each = level + (logit - anchor) * step
                is_open = is_other & (each > limit) & (logit > passed)
                is_less = is_open & (logit < least)
                least = tl.where(is_less, logit, least)
                least_ref = tl.where(is_less, reference.to(tl.float64), least_ref)
            lowest = tl.min(least, 0)
            lowest_ref = tl.max(tl.where(least == lowest, least_ref, none), 0)
            if KIND != 0:
                is_open_own = (level + own_gap > limit) & (target > passed) & (target > none)
                is_less_own = is_open_own & (target < lowest)
                lowest = tl.where(is_less_own, target, lowest)
                lowest_ref = tl.where(is_less_own, own_ref, lowest_ref)
            mass, slope = _sums(
                mine, mine_refs, base, ref_base, reference_column, count, k, label, is_listed,
                b * 0.0, lowest, scale, step, b, inverse, FORM, POWER, IS_PRECISE, HAS_REFERENCE,
                PART,
            )  # fmt: skip
            if KIND != 0:
                own, own_slope = _ratio((target - lowest) * step, b, inverse, FORM, 0)
                mass += own * own_measure
            is_idle = ((mass >= 1.0) & (lowest < float("inf"))).to(tl.int32)
            passed = lowest
            done += 1
        left = b * 0.0 + 1.0
        right = b * 0.0
        middle = left
        is_broken = is_broken | (lowest == float("inf"))
        is_moving = tl.where(is_broken | is_ignored, 0, 1)
        done = 0
        while (done < HALVINGS) & (is_moving > 0):
            middle = 0.5 * (left + right)
            trial = tl.exp(b * (tl.log(middle) - lowest_ref))
            mass, slope = _sums(
                mine, mine_refs, base, ref_base, reference_column, count, k, label, is_listed,
                trial, lowest, scale, step, b, inverse,
                FORM, POWER, IS_PRECISE, HAS_REFERENCE, PART,
            )  # fmt: skip
            if KIND != 0:
                own, own_slope = _ratio(trial + (target - lowest) * step, b, inverse, FORM, 0)
                mass += own * own_measure
            is_left = mass > 1.0
            left = tl.where(is_left, middle, left)
            right = tl.where(is_left, right, middle)
            is_far = (tl.abs(mass - 1.0) > 1e-9) & (left - right > 4e-16 * middle)
            is_moving = is_far.to(tl.int32)
            done += 1
        level = tl.where(level == level, tl.exp(b * (tl.log(middle) - lowest_ref)), level)
        anchor = lowest
        own_gap = (target - lowest) * step
    else:
        is_moving = tl.where(is_solved, 0, 1)
        accuracy = tl.where(
            is_listed, 1e-10, 1e-10 if IS_PRECISE else 2e-6
        )  # and one more step follows
        while (done < STEPS) & (is_moving > 0):
            mass, slope = _sums(
                mine, mine_refs, base, ref_base, reference_column, count, k, label, is_listed,
                level, anchor, scale, step, b, inverse,
                FORM, POWER, IS_PRECISE, HAS_REFERENCE, PART,
            )  # fmt: skip
            if KIND != 0:
                own, own_slope = _ratio(level + own_gap, b, inverse, FORM, 0)
                mass += own * own_measure
                slope += own_slope * own_measure
            moved = mass / slope * _change(mass, b, FORM)
            level += moved
            is_far = (tl.abs(mass - 1.0) > accuracy) & (tl.abs(moved) > 4e-16 * tl.abs(level))
            is_moving = is_far.to(tl.int32)
            done += 1

    others = tl.zeros((PART,), tl.float64)
    excess = tl.zeros((PART,), tl.float64)
    active = tl.zeros((PART,), tl.int32)
    total = tl.where(is_listed, count, width)
    for start in range(0, total, PART):
        x, reference, is_other = _part(
            mine, mine_refs, base, ref_base, reference_column, count, k, label, start, is_listed,
            HAS_REFERENCE, PART,
        )  # fmt: skip
        logit = x.to(tl.float64) * scale
        each = level + (logit - anchor) * step
        p, _d = _ratio(each, b, inverse, FORM, POWER)
        if HAS_REFERENCE:
            p = p * tl.exp(reference.to(tl.float64))
        p = tl.where(is_other, p, 0.0)
        height = each if FORM == 0 else 1.0 + b * each
        others += p
        if KIND != 0:
            excess += tl.where(p > 0, p * height, 0.0)
        else:
            excess += tl.where(p > 0, p * (anchor - logit), 0.0)
        active += (is_other & (height > 0)).to(tl.int32)
    r = tl.sum(others, 0)
    surplus = tl.sum(excess, 0)
    slack = level if FORM == 1 else (level - 1.0) * inverse
    own = r * 0.0
    tau = anchor - slack
    support = tl.sum(active, 0)
    if KIND != 0:
        own_level = level + own_gap
        own_height = own_level if FORM == 0 else 1.0 + b * own_level
        own_ratio, _s = _ratio(own_level, b, inverse, FORM, 0)
        own = own_ratio * own_measure
        safe_height = tl.where(own_height > 0, own_height, 1.0)
        if FORM == 0:
            direct = own_ref + tl.log(safe_height) * inverse
        else:
            direct = own_ref + log1p(b * tl.where(own_height > 0, own_level, 0.0)) * inverse
        direct = tl.where(own_height > 0, direct, none)
        log_target = tl.where(r < 0.5, log1p(-tl.minimum(r, 0.5)), direct)
        value = surplus + tl.exp(-b * own_ref) * gain(r, log_target, b)
        own_slack = own_level if FORM == 1 else (own_level - 1.0) * inverse
        missing = _expm1(-b * own_ref) * inverse - own_slack
        value = tl.where((own_height <= 0) & (b > 0), surplus + missing - own_height, value)
        value = value / (1.0 + b)
        support = support + (own > 0).to(tl.int32)
    else:
        value = anchor - (slack + b * surplus) / (1.0 + b)
    error = tl.abs(r + own - 1.0)
    if KIND != 0:
        own = tl.where(r < 0.5, 1.0 - r, own)
    is_broken = is_broken | (level != level)
    gradient = tl.where(target > none, -r * own_slope_in, 0.0)
    if not IS_STEEP:  # the posterior is written relative to a class of the row
        level = tl.where(is_own & has_others, level + (best - anchor) * step, level)
        anchor = tl.where(is_own & has_others, best, anchor)
    _store(
        VALUE, ANCHOR, LEVEL, GRADIENT, TAU, SUPPORT, ERROR, OWN, DEFICIT, row,
        is_broken, is_ignored,
        value, anchor, level, gradient, tau, support, error, own, r, HAS_STATS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ignore_index"])
def _solve_softmax(
    VALUES, LABELS, TARGET, TARGET_REF, REFERENCE,
    VALUE, ANCHOR, LEVEL, GRADIENT, TAU, SUPPORT, ERROR, OWN, DEFICIT,
    row_stride, reference_row, reference_column, k, ignore_index,
    scale_high, scale_low,
    own_high, own_low, shift_high, shift_low, cos_high, cos_low, sin_high, sin_low,
    KIND: tl.constexpr, ANGLE: tl.constexpr, HAS_REFERENCE: tl.constexpr,
    HAS_IGNORED: tl.constexpr, HAS_STATS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``alpha = 1``: a running maximum and sum in every lane, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    scale = whole(scale_high, scale_low)
    none = float("-inf")
    base = VALUES + row * row_stride
    ref_base = REFERENCE + row * reference_row
    label, target, own_ref, slope, is_broken, is_ignored = _target(
        base, LABELS, TARGET, TARGET_REF, row, k, ignore_index, scale,
        own_high, own_low, shift_high, shift_low, cos_high, cos_low, sin_high, sin_low,
        KIND, ANGLE, HAS_IGNORED,
    )  # fmt: skip
    width = tl.where(is_ignored, 0, k)
    classes = tl.zeros((BLOCK,), tl.int32)
    if HAS_REFERENCE:
        highest = tl.full((BLOCK,), none, tl.float64)
        total = tl.zeros((BLOCK,), tl.float64)
        poison = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            is_there = (at < k) & (at != label)
            x = tl.load(base + at, mask=is_there, other=none).to(tl.float32)
            place = ref_base + at * reference_column
            reference = tl.load(place, mask=is_there, other=none).to(tl.float32)
            is_bad = (x != x) | (x == float("inf"))
            is_bad = is_bad | (reference != reference) | (reference == float("inf"))
            poison |= is_bad.to(tl.int32)
            is_class = (x > none) & (reference > none)
            joint = tl.where(is_class, x, 0.0).to(tl.float64) * scale + reference.to(tl.float64)
            joint = tl.where(is_class, joint, none)
            higher = tl.maximum(highest, joint)
            safe = tl.where(higher > none, higher, 0.0)
            total = total * tl.exp(highest - safe) + tl.exp(joint - safe)
            highest = higher
            if HAS_STATS:
                classes += is_class.to(tl.int32)
        is_broken = is_broken | (tl.max(poison, 0) > 0)
        top = tl.max(highest, 0)
        anchor = tl.where(top > none, top, 0.0)
        mass = tl.sum(total * tl.exp(highest - anchor), 0)
    else:
        rate = (scale * 1.4426950408889634).to(tl.float32)
        high = tl.full((BLOCK,), none, tl.float32)
        part = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            is_there = (at < k) & (at != label)
            x = tl.load(base + at, mask=is_there, other=none).to(tl.float32)
            higher = tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)
            safe = tl.where(higher > none, higher, 0.0)
            part = part * tl.exp2((high - safe) * rate) + tl.exp2((x - safe) * rate)
            high = higher
            if HAS_STATS:
                classes += (x > none).to(tl.int32)
        is_bad = (high != high) | (high == float("inf"))
        is_broken = is_broken | (tl.max(is_bad.to(tl.int32), 0) > 0)
        top = tl.max(tl.where(is_bad, none, high), 0)
        shift = tl.where(top > none, top, 0.0)
        grown = part.to(tl.float64) * tl.exp2((high - shift) * rate).to(tl.float64)
        mass = tl.sum(tl.where(is_bad, 0.0, grown), 0)
        anchor = shift.to(tl.float64) * scale
    has_others = top > none
    joint_own = target - anchor + own_ref
    if KIND == 0:
        joint_own = scale * 0.0 + none
        is_broken = is_broken | (~has_others)
    else:
        is_broken = is_broken | ((~has_others) & (target == none))
    log_mass = tl.where(has_others, tl.log(tl.where(has_others, mass, 1.0)), none)
    peak = tl.maximum(log_mass, joint_own)
    peak = tl.where(peak > none, peak, 0.0)
    all_mass = peak + tl.log(tl.exp(log_mass - peak) + tl.exp(joint_own - peak))
    deficit = tl.exp(log_mass - all_mass)
    own = tl.exp(joint_own - all_mass)
    tau = anchor + all_mass
    value = tau
    support = tl.sum(classes, 0)
    if KIND != 0:
        value = tl.where(deficit < 0.5, -log1p(-tl.minimum(deficit, 0.5)), all_mass - joint_own)
        support = support + (target > none).to(tl.int32)
    error = tl.abs(own + deficit - 1.0)
    is_broken = is_broken | (all_mass != all_mass)
    gradient = tl.where(target > none, -deficit * slope, 0.0)
    _store(
        VALUE, ANCHOR, LEVEL, GRADIENT, TAU, SUPPORT, ERROR, OWN, DEFICIT, row,
        is_broken, is_ignored,
        value, anchor, -all_mass, gradient, tau, support, error, own, deficit, HAS_STATS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "ignore_index"])
def _reduce_rows(
    VALUE, LABELS, OUT, SHARE, num_rows, ignore_index,
    IS_MEAN: tl.constexpr, HAS_IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum or mean of the rows that are not ignored, and the share of each row in it."""
    total = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_row = at < num_rows
        total += tl.load(VALUE + at, mask=is_row, other=0.0).to(tl.float64)
        if HAS_IGNORED:
            given = tl.load(LABELS + at, mask=is_row, other=0).to(tl.int64)
            is_row = is_row & (given != ignore_index)
        count += is_row.to(tl.int32)
    result = tl.sum(total, 0)
    number = tl.sum(count, 0).to(tl.float64)
    share = number * 0.0 + 1.0
    if IS_MEAN:
        share = tl.where(number > 0, 1.0 / tl.maximum(number, 1.0), 0.0)
        result = tl.where(number > 0, result * share, float("nan"))  # of no rows
    tl.store(OUT, result.to(tl.float32))
    tl.store(SHARE, share.to(tl.float32))


@triton.jit(do_not_specialize=["ignore_index", "weight_stride"])
def _write_posterior(
    VALUES, LABELS, REFERENCE, ANCHOR, LEVEL, WEIGHTS, SHARE, TARGET_WEIGHTS, OUT,
    row_stride, reference_row, reference_column, out_stride, weight_stride, k, num_parts,
    ignore_index, b_high, b_low, scale_high, scale_low, factor_high, factor_low,
    FORM: tl.constexpr, POWER: tl.constexpr, IS_PRECISE: tl.constexpr, HAS_TARGET: tl.constexpr,
    HAS_REFERENCE: tl.constexpr, HAS_IGNORED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_SHARE: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row's posterior, times the row's weight; the target's place has its own."""
    program = tl.program_id(0)
    row = (program // num_parts).to(tl.int64)
    at = (program % num_parts) * BLOCK + tl.arange(0, BLOCK)
    none = float("-inf")
    b = whole(b_high, b_low)
    scale = whole(scale_high, scale_low)
    factor = whole(factor_high, factor_low)
    anchor = tl.load(ANCHOR + row)
    level = tl.load(LEVEL + row)
    incoming = factor * 0.0 + 1.0
    if HAS_WEIGHTS:
        incoming = tl.load(WEIGHTS + row * weight_stride).to(tl.float64)
    if HAS_SHARE:
        incoming = incoming * tl.load(SHARE).to(tl.float64)
    label = (row * 0 - 1).to(tl.int32)
    width = tl.where(incoming == 0, 0, k)  # a row of weight zero is not even read
    if HAS_TARGET:
        given = tl.load(LABELS + row).to(tl.int64)
        if HAS_IGNORED:
            width = tl.where(given == ignore_index, 0, width)
        label = tl.where((given >= 0) & (given < k), given, -1).to(tl.int32)
    weight = incoming * factor
    x = tl.load(VALUES + row * row_stride + at, mask=at < width, other=none).to(tl.float32)
    is_class = x > none
    if HAS_REFERENCE:
        place = REFERENCE + row * reference_row + at * reference_column
        reference = tl.load(place, mask=at < width, other=none).to(tl.float64)
        is_class = is_class & (reference > none)
    safe = tl.where(is_class, x, 0.0)
    if IS_PRECISE:
        each = safe.to(tl.float64) * scale - anchor
        if FORM == 2:
            each = each + level
            if HAS_REFERENCE:
                each = each + tl.where(is_class, reference, 0.0)
            wide = tl.exp(each)
        else:
            each = level + (each * b if FORM == 0 else each)
            wide, _slope = _ratio(each, b, 1.0 / b, FORM, POWER)
            if HAS_REFERENCE:
                wide = wide * tl.exp(tl.where(is_class, reference, 0.0))
        p = (wide * weight).to(tl.float32)
    else:
        top = (anchor / scale).to(tl.float32)
        if FORM == 2:
            rest = level + (top.to(tl.float64) * scale - anchor)
            # Where every other class is masked out the factor may overflow: 0 * inf is no gradient.
            grown = tl.minimum(tl.exp(rest), 3e38)
            rate = (scale * 1.4426950408889634).to(tl.float32)
            p = tl.exp2((safe - top) * rate) * grown.to(tl.float32)
        else:
            step = b if FORM == 0 else b * 0.0 + 1.0
            rest = level + (top.to(tl.float64) * scale - anchor) * step
            high = rest.to(tl.float32)
            low = (rest - high.to(tl.float64)).to(tl.float32)
            each = ((safe - top) * (scale * step).to(tl.float32) + high) + low
            p, _slope = _ratio(each, b.to(tl.float32), (1.0 / b).to(tl.float32), FORM, POWER)
        p = p * weight.to(tl.float32)
    p = tl.where(is_class, p, 0.0)
    p = tl.where(level == level, p, float("nan"))
    if HAS_TARGET:
        own = weight * 0.0
        if PLACE == 1:
            own = tl.load(TARGET_WEIGHTS + row).to(tl.float64) * factor
        elif PLACE == 2:
            own = tl.load(TARGET_WEIGHTS + row).to(tl.float64) * incoming
        p = tl.where(at == label, own.to(tl.float32), p)
    p = tl.where(at < width, p, 0.0)
    tl.store(OUT + row * out_stride + at, p.to(OUT.dtype.element_ty), mask=at < k)


@lru_cache(maxsize=64)
def settings_tensor(b: float, scale: float, device: torch.device) -> Tensor:
    """Float64 numbers for kernels, whose plain float arguments are float32."""
    return torch.tensor([b, scale], dtype=torch.float64, device=device)


@lru_cache(maxsize=1024)
def split(*numbers: float) -> tuple[float, ...]:
    """Each number as two float32 that sum to it: kernels get no float64 argument."""
    parts = []
    for number in numbers:
        high = ctypes.c_float(number).value
        parts += [high, number - high if math.isfinite(high) else 0.0]
    return tuple(parts)


def whole_power(b: float) -> int:
    """``1 / b`` where products do: for alpha 2, 1.5 and 1.25; else 0."""
    return {1.0: 1, 0.5: 2, 0.25: 4}.get(b, 0)


@lru_cache(maxsize=256)
def _margin_numbers(margin: tuple[Any, ...], scale: float) -> tuple[int, tuple[float, ...]]:
    """What a margin does to the angle, and its numbers as a kernel takes them."""
    prior, cosine, angle, *rest = margin
    turn = NO_ANGLE if angle == 0.0 else STRAIGHT if any(rest) else WIDENED
    return turn, split(0.0 - scale * prior, cosine, math.cos(angle), math.sin(angle))


NO_TURN: tuple[int, tuple[float, ...]] = (NO_ANGLE, (0.0,) * 8)


@lru_cache(maxsize=256)
def _form(b: float) -> tuple[int, int, bool]:
    """Form of levels, power ``1 / b`` if products suffice, and whether float64 is needed."""
    is_precise = b > 1.0 or -0.1 < b < 0.0
    if b == 0.0:
        return EXPONENTIAL, 0, False
    if uses_slack(b):
        return SLACK, 0, is_precise
    return HEIGHT, whole_power(b), is_precise


@lru_cache(maxsize=1024)
def _block(k: int, largest: int) -> tuple[int, int]:
    """Classes that a program reads at once, and its warps."""
    block: int = min(largest, max(128, triton.next_power_of_2(k)))
    return block, 8 if block >= 2048 else 4


class _Device:
    """Make the device of a tensor the current one, for launches."""

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
        self.guard = torch.cuda.device(device) if is_other else None

    def __enter__(self) -> None:
        if self.guard is not None:
            self.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.guard is not None:
            self.guard.__exit__(*error)


def _readable(values: Tensor) -> Tensor:
    """The values, with classes next to each other."""
    return values if values.stride(1) == 1 or values.shape[1] == 1 else values.contiguous()


class Results(NamedTuple):
    """Where the solving kernel writes, ``[B]`` each: float64, support sizes int64, or float32."""

    value: Tensor
    anchor: Tensor
    level: Tensor
    target_gradient: Tensor
    tau: Tensor
    support_size: Tensor
    mass_error: Tensor
    target_posterior: Tensor
    target_deficit: Tensor


def empty_results(num_rows: int, device: torch.device, *, statistics: bool) -> Results:
    """Memory for results; on request without those that a loss and its gradient do not need."""
    empty, single, double = torch.empty, torch.float32, torch.float64
    value = empty(num_rows, dtype=single, device=device)
    anchor = empty(num_rows, dtype=double, device=device)
    level = empty(num_rows, dtype=double, device=device)
    gradient = empty(num_rows, dtype=single, device=device)
    if not statistics:
        return Results(value, anchor, level, gradient, value, value, value, value, value)
    kinds = single, torch.int64, single, single, single
    rest = (empty(num_rows, dtype=kind, device=device) for kind in kinds)
    return Results(value, anchor, level, gradient, *rest)


def launch_solve(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor | None,
    results: Results,
    *,
    target: tuple[Tensor, Tensor] | None = None,
    margin: tuple[Any, ...] | None = None,
    log_reference: Tensor | None = None,
    ignore_index: int | None = None,
    capacity: int = CAPACITY,
    lists: Tensor | None = None,
) -> None:
    """Solve rows into given tensors; ``solve`` explains the arguments, ``lists`` are scratch."""
    num_rows, k = values.shape
    values = _readable(values)
    filler = results.value  # for arguments that a kernel does not read
    kind = NO_TARGET if labels is None else MARGIN if margin is not None else GIVEN
    turn, numbers = NO_TURN
    if kind == MARGIN:
        assert margin is not None
        turn, numbers = _margin_numbers(margin, scale)
    own = own_ref = filler
    if kind == GIVEN:
        assert target is not None
        own, own_ref = (part.contiguous() for part in target)
    reference, reference_row, reference_column = _reference(log_reference, filler)
    has_statistics = results.tau is not results.value
    inputs = (values, filler if labels is None else labels.contiguous(), own, own_ref, reference)
    sizes = (
        _row_stride(values), reference_row, reference_column, k,
        -1 if ignore_index is None else ignore_index,
    )  # fmt: skip
    flags = (log_reference is not None, ignore_index is not None, has_statistics)
    form, power, is_precise = _form(b)
    block, warps = _block(k, 4096 if log_reference is None else 2048)
    with _Device(values):
        if form == EXPONENTIAL:
            launch(
                _solve_softmax, (num_rows,), *inputs, *results, *sizes, *split(scale), *numbers,
                kind, turn, *flags, block, num_warps=warps,
            )  # fmt: skip
            return
        capacity = min(capacity, k)
        if b <= 0:
            lists = list_refs = filler  # below alpha = 1 there are no lists
        else:
            if lists is None:
                lists = torch.empty((num_rows, capacity), dtype=torch.float32, device=values.device)
            list_refs = lists if log_reference is None else torch.empty_like(lists)
        launch(
            _solve_rows, (num_rows,), *inputs, lists, list_refs, *results, *sizes,
            *split(b, scale), *numbers,
            form, power, b > 0, b > 1.0, is_precise or flags[0], kind, turn, *flags,
            capacity, block, min(PART, block), COARSE_STEPS, MAX_STEPS, MAX_HALVINGS,
            num_warps=warps, **_fusion(b),
        )  # fmt: skip


def _fusion(b: float) -> dict[str, bool]:
    """Above ``alpha = 2`` the product of an anchor's value must be the anchor, bit by bit."""
    return {"enable_fp_fusion": False} if b > 1.0 else {}


def _reference(log_reference: Tensor | None, filler: Tensor) -> tuple[Tensor, int, int]:
    """A reference measure and its strides, the second 0 or 1."""
    if log_reference is None:
        return filler, 0, 0
    if log_reference.stride(1) not in (0, 1):
        log_reference = log_reference.contiguous()
    return log_reference, log_reference.stride(0), log_reference.stride(1)


def _row_stride(values: Tensor) -> int:
    """Elements from a row to the next; the width where the stride is meaningless."""
    return values.stride(0) if values.shape[0] > 1 else values.shape[1]


def solve(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor | None,
    *,
    target: tuple[Tensor, Tensor] | None = None,
    margin: tuple[Any, ...] | None = None,
    log_reference: Tensor | None = None,
    ignore_index: int | None = None,
    capacity: int = CAPACITY,
) -> Outcome:
    """Solve every row of ``values`` ``[B, k]``, float32, float16 or bfloat16, for any ``alpha``.

    Logits are ``scale * values``; ``-inf`` masks a class out. The host waits for nothing.

    Args:
        values: Cosines or logits; any strides, though classes that are not adjacent are copied.
        scale: Positive.
        b: ``alpha - 1``, in ``(-1, 15]``.
        labels: Class of each row, int32 or int64 ``[B]``; None for log-partitions. A label that is
            no class gives NaN in its row.
        target: Logit and log reference of each row's label, ``[B]`` each, float32 or float64.
        margin: Instead of them the numbers of a margin in closed form, with which the kernel makes
            them from the row's own cosine: ``(prior, cosine, angle)``, and optionally whether the
            gradient is straight through (``losses.margins.ClosedForm``).
        log_reference: Log reference measure of every class, ``[B, k]``, possibly expanded.
        ignore_index: Rows with this label are not read; their loss and their target's gradient are
            zero, their other results are meaningless.
        capacity: A list beyond it is replaced by passes over the row.

    Returns:
        The outcome; with a margin, ``target_gradient`` is the gradient of the row's loss in the
        target's cosine.
    """
    results = empty_results(values.shape[0], values.device, statistics=True)
    launch_solve(
        values, scale, b, labels, results, target=target, margin=margin,
        log_reference=log_reference, ignore_index=ignore_index, capacity=capacity,
    )  # fmt: skip
    value, anchor, level, gradient, *rest = results
    # Evaluations are not counted here; `solve_tau` names its solver, which counts.
    return Outcome._make([value, anchor, level, *rest, torch.tensor(0), gradient])


def reduce_rows(
    value: Tensor,
    labels: Tensor,
    *,
    mean: bool,
    ignore_index: int | None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum or mean of rows that are not ignored, and the share of each row, float32 scalars."""
    num_rows, device = value.shape[0], value.device
    total, share = out or (torch.empty((), device=device), torch.empty((), device=device))
    with _Device(value):
        launch(
            _reduce_rows, (1,), value, labels, total, share, num_rows,
            -1 if ignore_index is None else ignore_index, mean, ignore_index is not None,
            _block(num_rows, 1024)[0], num_warps=4,
        )  # fmt: skip
    return total, share


def write_posterior(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor | None,
    *,
    anchor: Tensor,
    level: Tensor,
    weights: Tensor | None,
    target_weights: Tensor | None = None,
    log_reference: Tensor | None = None,
    ignore_index: int | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Posterior ``[B, k]`` of solved rows, times the row's weight and ``factor``.

    Args:
        values: As for ``solve``, like the next three.
        scale: See there.
        b: See there.
        labels: See there; the label's own place is not the posterior's.
        anchor: Of the outcome of ``solve``, float64 ``[B]``.
        level: The same.
        weights: One per row ``[B]``; a row of weight zero is zero whatever it holds.
        target_weights: ``[B]``, times ``factor`` what a label's place gets; zero without them.
        log_reference: As for ``solve``.
        ignore_index: Rows with this label are zero.
        out: Where to write, ``[B, k]`` with a last stride of one; else it is made.
        out_dtype: Of what is made, float32 by default.
        factor: Multiplies all that is written.
    """
    place = LEFT_OUT if target_weights is None else WEIGHED
    return _launch_posterior(
        values, scale, b, labels, anchor, level, weights, None, target_weights, place,
        log_reference, ignore_index, out, out_dtype or torch.float32, factor,
    )  # fmt: skip


def write_gradient(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor,
    solution: tuple[Tensor, Tensor, Tensor, Tensor | None],
    grad: Tensor,
    *,
    ignore_index: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient in the values, in their dtype, of a loss whose margin the kernel applied.

    ``solution`` has anchor, level and target gradient of each row, and the share of a row in a
    reduced loss. ``grad`` is the incoming gradient: one number, or one per row.
    """
    anchor, level, target_gradient, share = solution
    return _launch_posterior(
        values, scale, b, labels, anchor, level, grad, share, target_gradient, OWN,
        None, ignore_index, out, values.dtype, scale,
    )  # fmt: skip


def _launch_posterior(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor | None,
    anchor: Tensor,
    level: Tensor,
    weights: Tensor | None,
    share: Tensor | None,
    target_weights: Tensor | None,
    place: int,
    log_reference: Tensor | None,
    ignore_index: int | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    factor: float,
) -> Tensor:
    num_rows, k = values.shape
    values = _readable(values)
    if out is None:
        out = torch.empty((num_rows, k), dtype=out_dtype, device=values.device)
    reference, reference_row, reference_column = _reference(log_reference, level)
    form, power, is_precise = _form(b)
    is_precise = is_precise or log_reference is not None
    block, warps = _block(k, 2048 if is_precise else 4096)
    parts = -(-k // block)
    with _Device(values):
        launch(
            _write_posterior, (num_rows * parts,), values,
            level if labels is None else labels.contiguous(), reference,
            anchor.contiguous(), level.contiguous(), level if weights is None else weights,
            level if share is None else share,
            level if target_weights is None else target_weights.contiguous(), out,
            _row_stride(values), reference_row, reference_column, _row_stride(out),
            0 if weights is None or weights.dim() == 0 else weights.stride(0), k, parts,
            -1 if ignore_index is None else ignore_index,
            *split(b, scale, factor),
            form, power, is_precise, labels is not None, log_reference is not None,
            ignore_index is not None and labels is not None, weights is not None,
            share is not None, place, block, num_warps=warps, **_fusion(b),
        )  # fmt: skip
    return out
