"""The loss of whole rows ``[B, k]`` on a GPU: one kernel solves rows, one writes their posterior.

Forward reads a row twice. The first pass keeps the maximum of every lane; the root over these
maxima is a lower bound of ``tau`` (M13). The second pass lists the classes above
``tau_low + edge``: all others are certainly inactive. Newton's method then runs on the list in
float64. A row whose list overflows is solved by passes over the row itself, so no result depends
on the size of a list. At ``alpha = 1`` one pass of a running log-sum-exp is enough; below it every
class is active and passes over the row are all there is. ``kernels.rows`` is the plain form.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.rows import Outcome
from qmargin.kernels.solver import uses_slack

CAPACITY = 4096  # entries of a row's list
DEPTH = 8  # entries of a lane, before they are joined to the list
COARSE_STEPS = 8  # of Newton on the maxima of lanes
MAX_STEPS = 64
HEIGHT, SLACK, EXPONENTIAL = 0, 1, 2  # the form of a level


@triton.jit
def log1p(x):
    """``log(1 + x)``, accurate for a small ``x``."""
    series = x * (1.0 - x * (0.5 - x * (1.0 / 3.0 - x * (0.25 - x * (0.2 - x / 6.0)))))
    w = 1.0 + x
    return tl.where(tl.abs(x) < 1e-3, series, tl.log(tl.where(w > 0, w, 1.0)))


@triton.jit
def _expm1(x):
    """``exp(x) - 1``, accurate for a small ``x``."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x / 120.0))))
    return tl.where(tl.abs(x) < 1e-3, series, tl.exp(x) - 1.0)


@triton.jit
def _ratio(level, b, FORM: tl.constexpr, POWER: tl.constexpr):
    """Ratio ``p / q`` of classes at a level, and its slope; zero off the support."""
    if FORM == 1:
        height = 1.0 + b * level
        safe = tl.where(height > 0, height, 1.0)
        p = tl.where(height > 0, tl.exp(log1p(b * level) / b), 0.0)
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
        p = tl.where(level > 0, tl.exp(tl.log(safe) / b), 0.0)
        slope = p / safe
    return p, slope


@triton.jit
def _change(mass, b, FORM: tl.constexpr):
    """How far Newton on ``mass ** b`` moves a level, in units of ``mass / slope`` (M5)."""
    change = _expm1(-b * tl.log(mass))
    return change if FORM == 0 else change / b


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
def _part(LIST, ROW, count, k, label, start, is_listed, BLOCK: tl.constexpr):
    """A part of a row's list, or of the row where the list overflowed; and what of it counts."""
    at = start + tl.arange(0, BLOCK)
    if is_listed:
        x = tl.load(LIST + at, mask=at < count, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(ROW + at, mask=(at < k) & (at != label), other=float("-inf")).to(tl.float32)
    is_other = x > float("-inf")
    return tl.where(is_other, x, 0.0), is_other


@triton.jit
def _sums(
    LIST, ROW, count, k, label, is_listed, level, best, scale, step, b,
    FORM: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass and slope of all classes but the target at a trial level.

    A list is summed in float64. Over a whole row single terms are float32, their rounding errors
    average out, and the sums of lanes are float64.
    """
    mass = tl.zeros((BLOCK,), tl.float64)
    slope = tl.zeros((BLOCK,), tl.float64)
    if is_listed:
        for start in range(0, count, BLOCK):
            x, is_other = _part(LIST, ROW, count, k, label, start, True, BLOCK)
            p, d = _ratio(level + (x.to(tl.float64) * scale - best) * step, b, FORM, POWER)
            mass += tl.where(is_other, p, 0.0)
            slope += tl.where(is_other, d, 0.0)
    else:
        top = (best / scale).to(tl.float32)
        rest = level + (top.to(tl.float64) * scale - best) * step
        high = rest.to(tl.float32)
        low = (rest - high.to(tl.float64)).to(tl.float32)
        rate = (scale * step).to(tl.float32)
        short = b.to(tl.float32)
        for start in range(0, k, BLOCK):
            x, is_other = _part(LIST, ROW, count, k, label, start, False, BLOCK)
            p, d = _ratio(((x - top) * rate + high) + low, short, FORM, POWER)
            mass += tl.where(is_other, p, 0.0).to(tl.float64)
            slope += tl.where(is_other, d, 0.0).to(tl.float64)
    return tl.sum(mass, 0), tl.sum(slope, 0)


@triton.jit
def _solve_rows(
    VALUES, LABELS, TARGET, TARGET_REF, SETTINGS, LANES, LISTS,
    VALUE, ANCHOR, LEVEL, TAU, SUPPORT, ERROR, OWN, DEFICIT,
    row_stride, num_rows, k, num_programs,
    FORM: tl.constexpr, POWER: tl.constexpr, HAS_TARGET: tl.constexpr, IS_SPARSE: tl.constexpr,
    CAPACITY: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, COARSE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    b = tl.load(SETTINGS)
    scale = tl.load(SETTINGS + 1)
    step = b if FORM == 0 else b * 0.0 + 1.0
    nan = float("nan")
    lane = tl.arange(0, BLOCK)
    kept = LANES + program * (DEPTH * BLOCK) + lane
    mine = LISTS + program * CAPACITY
    for number in range(program, num_rows, num_programs):
        row = program * 0 + number
        base = VALUES + row * row_stride
        label = -1
        target = b * 0.0
        own_ref = b * 0.0
        is_broken = program < 0
        if HAS_TARGET:
            given = tl.load(LABELS + row)
            is_broken = (given < 0) | (given >= k)
            label = tl.where(is_broken, 0, given).to(tl.int32)
            target = tl.load(TARGET + row)
            own_ref = tl.load(TARGET_REF + row)
            is_broken = is_broken | (target != target) | (target == float("inf"))
        lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
        poison = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, k, BLOCK):
            at = start + lane
            x = tl.load(base + at, mask=(at < k) & (at != label), other=float("-inf"))
            x = x.to(tl.float32)
            poison |= ((x != x) | (x == float("inf"))).to(tl.int32)
            lanes = tl.maximum(lanes, x)
        is_broken = is_broken | (tl.max(poison, 0) > 0)
        best = tl.max(lanes, 0).to(tl.float64) * scale
        has_others = best > float("-inf")
        best = tl.where(has_others, best, target)
        gap = (target - best) * step
        # The level at which the best class, or the target, alone holds all the mass: tau_low.
        if FORM == 0:
            alone = tl.exp(-b * own_ref)
            level = alone * 0.0 + 1.0
        else:
            alone = _expm1(-b * own_ref) / b
            level = alone * 0.0
        if HAS_TARGET:
            asked = alone - gap
            if IS_SPARSE or FORM == 1:
                level = tl.where(has_others, tl.minimum(level, asked), asked)
            else:
                level = tl.where(has_others, tl.maximum(level, asked), asked)
        count = 0
        is_listed = program < 0
        if IS_SPARSE:
            is_lane = lanes > float("-inf")
            wide = tl.where(is_lane, lanes, 0.0) * scale.to(tl.float32) - best.to(tl.float32)
            wide = wide * step.to(tl.float32)
            coarse = level.to(tl.float32)
            short = b.to(tl.float32)
            short_gap = gap.to(tl.float32)
            short_ref = own_ref.to(tl.float32)
            for _ in range(COARSE):
                p, d = _ratio(coarse + wide, short, FORM, POWER)
                mass = tl.sum(tl.where(is_lane, p, 0.0), 0)
                slope = tl.sum(tl.where(is_lane, d, 0.0), 0)
                if HAS_TARGET:
                    own, own_slope = _ratio(coarse + short_gap, short, FORM, 0)
                    mass += own * tl.exp(short_ref)
                    slope += own_slope * tl.exp(short_ref)
                moved = mass / slope * _change(mass, short, FORM)
                coarse += tl.where((mass > 1.0) & (slope > 0), moved, 0.0)
            # A bound from below in float32, lowered by more than its rounding.
            rough = coarse.to(tl.float64)
            if FORM == 0:
                level = tl.minimum(level, rough + 1e-5 * tl.abs(rough))
                floor = best - (level * (1.0 + 1e-9)) / b
            else:
                level = tl.minimum(level, rough + 1e-5 * (tl.abs(rough) + 1.0 / b))
                floor = best - (level + 1.0 / b) * (1.0 + 1e-9)
            edge = (floor / scale).to(tl.float32)
            edge = edge - tl.abs(edge) * 2e-7
            filled = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, k, BLOCK):
                at = start + lane
                x = tl.load(base + at, mask=(at < k) & (at != label), other=float("-inf"))
                x = x.to(tl.float32)
                is_hit = (x > edge) & (x > float("-inf"))
                tl.store(kept + filled * BLOCK, x, mask=is_hit & (filled < DEPTH))
                filled += is_hit.to(tl.int32)
            count = tl.sum(filled, 0)
            deepest = tl.max(filled, 0)
            is_listed = (deepest <= DEPTH) & (count <= CAPACITY)
            if is_listed:
                place = tl.cumsum(filled, 0) - filled
                for depth in range(deepest):
                    is_kept = filled > depth
                    x = tl.load(kept + depth * BLOCK, mask=is_kept, other=0.0)
                    tl.store(mine + place + depth, x, mask=is_kept)
                tl.debug_barrier()
        is_moving = tl.where(is_broken, 0, 1)
        done = 0
        while (done < STEPS) & (is_moving > 0):
            mass, slope = _sums(
                mine, base, count, k, label, is_listed, level, best, scale, step, b,
                FORM, POWER, PART,
            )  # fmt: skip
            if HAS_TARGET:
                own, own_slope = _ratio(level + gap, b, FORM, 0)
                mass += own * tl.exp(own_ref)
                slope += own_slope * tl.exp(own_ref)
            level += mass / slope * _change(mass, b, FORM)
            accuracy = tl.where(is_listed, 1e-13, 2e-6)  # and one more step is taken
            is_moving = (tl.abs(mass - 1.0) > accuracy).to(tl.int32)
            done += 1
        others = tl.zeros((PART,), tl.float64)
        excess = tl.zeros((PART,), tl.float64)
        active = tl.zeros((PART,), tl.int32)
        total = tl.where(is_listed, count, k)
        for start in range(0, total, PART):
            x, is_other = _part(mine, base, count, k, label, start, is_listed, PART)
            each = level + (x.to(tl.float64) * scale - best) * step
            if is_listed:
                p, _d = _ratio(each, b, FORM, POWER)
            else:
                quick, _q = _ratio(each.to(tl.float32), b.to(tl.float32), FORM, POWER)
                p = quick.to(tl.float64)
            p = tl.where(is_other, p, 0.0)
            height = each if FORM == 0 else 1.0 + b * each
            others += p
            if HAS_TARGET:
                excess += p * height
            else:
                excess += p * (best - x.to(tl.float64) * scale)
            active += (is_other & (height > 0)).to(tl.int32)  # float32 would lose the smallest
        r = tl.sum(others, 0)
        surplus = tl.sum(excess, 0)
        slack = level if FORM == 1 else (level - 1.0) / b
        own = r * 0.0
        if HAS_TARGET:
            own_level = level + gap
            own_ratio, _s = _ratio(own_level, b, FORM, 0)
            own = own_ratio * tl.exp(own_ref)
            log_own = tl.log(tl.where(own > 0, own, 1.0))
            log_target = tl.where(r < 0.5, log1p(-tl.minimum(r, 0.5)), log_own)
            value = surplus + tl.exp(-b * own_ref) * gain(r, log_target, b)
            own_height = own_level if FORM == 0 else 1.0 + b * own_level
            own_slack = own_level if FORM == 1 else (own_level - 1.0) / b
            missing = _expm1(-b * own_ref) / b - own_slack
            value = tl.where((own_height <= 0) & (b > 0), surplus + missing - own_height, value)
            value = value / (1.0 + b)
        else:
            value = best - (slack + b * surplus) / (1.0 + b)
        is_broken = is_broken | (level != level)
        value = tl.where(is_broken, nan, value)
        tl.store(VALUE + row, value.to(tl.float32))
        tl.store(ANCHOR + row, best)
        tl.store(LEVEL + row, tl.where(is_broken, nan, level))
        tl.store(DEFICIT + row, tl.where(is_broken, nan, r).to(tl.float32))
        support = tl.sum(active, 0) + (own > 0).to(tl.int32)
        tl.store(TAU + row, tl.where(is_broken, nan, best - slack).to(tl.float32))
        tl.store(SUPPORT + row, support.to(tl.int64))
        tl.store(ERROR + row, tl.where(is_broken, nan, tl.abs(r + own - 1.0)).to(tl.float32))
        own = tl.where(r < 0.5, 1.0 - r, own) if HAS_TARGET else own
        tl.store(OWN + row, tl.where(is_broken, nan, own).to(tl.float32))


@triton.jit
def _solve_softmax(
    VALUES, LABELS, TARGET, TARGET_REF, SETTINGS,
    VALUE, ANCHOR, LEVEL, TAU, SUPPORT, ERROR, OWN, DEFICIT,
    row_stride, k, HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``alpha = 1``: a running maximum and sum in every lane, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(SETTINGS + 1)
    rate = scale.to(tl.float32) * 1.4426950408889634
    base = VALUES + row * row_stride
    label = -1
    target = scale * 0.0 - float("inf")
    own_ref = scale * 0.0
    is_broken = row < 0
    if HAS_TARGET:
        given = tl.load(LABELS + row)
        is_broken = (given < 0) | (given >= k)
        label = tl.where(is_broken, 0, given).to(tl.int32)
        target = tl.load(TARGET + row)
        own_ref = tl.load(TARGET_REF + row)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    masked = tl.zeros((BLOCK,), tl.int32)
    poison = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_other = (at < k) & (at != label)
        x = tl.load(base + at, mask=is_other, other=float("-inf")).to(tl.float32)
        poison |= ((x != x) | (x == float("inf"))).to(tl.int32)
        masked += ((x == float("-inf")) & is_other).to(tl.int32)
        higher = tl.maximum(highest, x)
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        total = total * tl.exp2((highest - safe) * rate) + tl.exp2((x - safe) * rate)
        highest = higher
    top = tl.max(highest, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    mass = tl.sum(total.to(tl.float64) * tl.exp2((highest - shift) * rate).to(tl.float64), 0)
    anchor = shift.to(tl.float64) * scale
    joint = target - anchor + own_ref
    is_broken = is_broken | (tl.max(poison, 0) > 0) | (joint != joint) | (joint == float("inf"))
    log_mass = tl.log(mass)
    peak = tl.maximum(log_mass, joint)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    all_mass = peak + tl.log(tl.exp(log_mass - peak) + tl.exp(joint - peak))
    all_mass = tl.where(is_broken, float("nan"), all_mass)
    deficit = tl.exp(log_mass - all_mass)
    if HAS_TARGET:
        value = tl.where(deficit < 0.5, -log1p(-tl.minimum(deficit, 0.5)), all_mass - joint)
        value = tl.where(is_broken, float("nan"), value)
    else:
        value = anchor + all_mass
    tl.store(VALUE + row, value.to(tl.float32))
    tl.store(ANCHOR + row, anchor)
    tl.store(LEVEL + row, -all_mass)
    tl.store(DEFICIT + row, deficit.to(tl.float32))
    own = tl.exp(joint - all_mass)
    support = k - tl.sum(masked, 0)
    if HAS_TARGET:
        support = support - (target == float("-inf")).to(tl.int32)
    tl.store(TAU + row, (anchor + all_mass).to(tl.float32))
    tl.store(SUPPORT + row, support.to(tl.int64))
    tl.store(ERROR + row, tl.abs(own + deficit - 1.0).to(tl.float32))
    tl.store(OWN + row, own.to(tl.float32))


@triton.jit
def _write_posterior(
    VALUES, LABELS, ANCHOR, LEVEL, WEIGHTS, SETTINGS, OUT, row_stride, k,
    FORM: tl.constexpr, POWER: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row's posterior, times the row's weight; zero in the target's place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(SETTINGS)
    scale = tl.load(SETTINGS + 1)
    anchor = tl.load(ANCHOR + row)
    level = tl.load(LEVEL + row)
    x = tl.load(VALUES + row * row_stride + at, mask=at < k, other=float("-inf"))
    if FORM == 2:
        shift = (anchor / scale).to(tl.float32)
        offset = (level + (shift.to(tl.float64) * scale - anchor)).to(tl.float32)
        p = tl.exp2(((x - shift) * scale.to(tl.float32) + offset) * 1.4426950408889634)
    else:
        step = b if FORM == 0 else b * 0.0 + 1.0
        safe = tl.where(x > float("-inf"), x, 0.0)
        each = (level + (safe.to(tl.float64) * scale - anchor) * step).to(tl.float32)
        p, _slope = _ratio(each, b.to(tl.float32), FORM, POWER)
    p = tl.where(x > float("-inf"), p, 0.0)
    p = tl.where(level == level, p, float("nan"))
    if HAS_WEIGHTS:
        weight = tl.load(WEIGHTS + row).to(tl.float32)
        p = tl.where(weight == 0, 0.0, p * weight)
    if HAS_TARGET:
        p = tl.where(at == tl.load(LABELS + row), 0.0, p)
    tl.store(OUT + row * k + at, p, mask=at < k)


@lru_cache(maxsize=64)
def settings_tensor(b: float, scale: float, device: torch.device) -> Tensor:
    """Float64 numbers for kernels, whose plain float arguments are float32."""
    return torch.tensor([b, scale], dtype=torch.float64, device=device)


def _form(b: float) -> tuple[int, int]:
    """The form of levels, and the whole power ``1 / b`` where products do."""
    if b == 0.0:
        return EXPONENTIAL, 0
    if uses_slack(b):
        return SLACK, 0
    return HEIGHT, {1.0: 1, 0.5: 2, 0.25: 4}.get(b, 0)


@lru_cache(maxsize=8)
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _block(k: int) -> int:
    block: int = min(2048, max(128, triton.next_power_of_2(k)))
    return block


def solve(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor | None,
    *,
    target: tuple[Tensor, Tensor] | None,
    capacity: int = CAPACITY,
    depth: int = DEPTH,
) -> Outcome:
    """Solve every row of ``values`` ``[B, k]``, float32 with a last stride of one.

    Logits are ``scale * values``; ``-inf`` masks a class out. ``target`` has the logit and the log
    reference of each row's label, float64. A list beyond ``capacity``, or a lane beyond ``depth``,
    is replaced by passes over the row.
    """
    num_rows, k = values.shape
    device = values.device
    kinds = [torch.float32] * 8
    kinds[1] = kinds[2] = torch.float64  # anchor and level
    kinds[4] = torch.int64  # support
    results = [torch.empty(num_rows, dtype=kind, device=device) for kind in kinds]
    # Evaluations are not counted here; `solve_tau` names its solver, which counts.
    solved = Outcome._make([*results, torch.tensor(0)])
    settings = settings_tensor(b, scale, device)
    has_target = labels is not None
    given = (labels, *target) if labels is not None and target is not None else (settings,) * 3
    (form, power), block = _form(b), _block(k)
    if form == EXPONENTIAL:
        _solve_softmax[(num_rows,)](
            values, *given, settings, *results, values.stride(0), k, has_target, block, num_warps=4
        )
        return solved
    programs, is_sparse = min(num_rows, _num_programs(device)), b > 0
    lanes = lists = solved.value  # below alpha = 1 there are no lists
    if is_sparse:
        lanes = torch.empty(programs * (depth * block + capacity), device=device)
        lists = lanes[programs * depth * block :]
    _solve_rows[(programs,)](
        values, *given, settings, lanes, lists, *results, values.stride(0), num_rows, k, programs,
        form, power, has_target, is_sparse, capacity, depth, block, min(512, block),
        COARSE_STEPS, MAX_STEPS, num_warps=4,
    )  # fmt: skip
    return solved


def write_posterior(
    values: Tensor,
    scale: float,
    b: float,
    labels: Tensor | None,
    *,
    anchor: Tensor,
    level: Tensor,
    weights: Tensor | None,
) -> Tensor:
    """Posterior ``[B, k]`` of solved rows, each row times its weight; a lifted target gets zero."""
    num_rows, k = values.shape
    out = torch.empty((num_rows, k), dtype=torch.float32, device=values.device)
    settings = settings_tensor(b, scale, values.device)
    (form, power), block = _form(b), _block(k)
    _write_posterior[(num_rows, triton.cdiv(k, block))](
        values, settings if labels is None else labels, anchor, level,
        settings if weights is None else weights.contiguous(), settings, out, values.stride(0), k,
        form, power, labels is not None, weights is not None, block, num_warps=4,
    )  # fmt: skip
    return out
