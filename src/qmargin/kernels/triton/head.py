"""The operations of the sparse step as kernels: the names and meanings of ``head_reference``.

In the order of a step: unit rows, the screening product that keeps group maxima (F4), the bound and
the pairs that can matter (F1, F5, F6), a filter that repeats the screen's products for the listed
pairs and keeps one bit per class, exact scores of the classes whose bit is set, the solution on
each row's list in float64, gradients, and the update of the prototypes in one sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton import next_power_of_2 as power_of_two
from triton.tools.tensor_descriptor import TensorDescriptor

from qmargin.devices import Reading, gpu_properties
from qmargin.kernels.head_reference import (
    GROUP,
    Batch,
    Candidates,
    ClassGradient,
    ClassOrder,
    Lengths,
    ListOverflow,
    Pairs,
    PreparedRows,
    PrototypeState,
    SgdRule,
    SolvedRows,
    Support,
    Target,
    add_reference,
    class_order,
)
from qmargin.kernels.triton.replay import launch, repeat
from qmargin.kernels.triton.rows import gain, log1p, settings_tensor, whole_power

ROOM = 1 << 14  # lists have a multiple of this many entries: allocations repeat
NO_LIMIT = (1 << 31) - 1  # entries of a list are counted in 32 bits
BLOCK = 1024  # entries that a program reads at a time
SPAN = 8  # groups whose largest maximum is kept: where that is too low, they are not read again
BOUND_SPANS = 512  # that the program of a bound reads at a time
SPANS = 128  # that a program reads at a time; it is one warp, which has nothing to wait for
PARTS = 16  # of a row, listed side by side
# Newton runs on the maxima of as many strided sets of groups as a bound reads at a time, which stay
# in registers: a subset too, so still a lower bound (F1), and one that lists hardly more groups
# than all the maxima would.
COARSE_STEPS = 6
ROUNDING = 1e-5  # of float32 sums over the maxima, in units of the height
LEAST_DENOMINATOR = tl.constexpr(1e-6)  # of what measures multiply heights with
MOST_LOG2 = tl.constexpr(126.0)  # of a number that is multiplied in float32
ENTRIES = 8  # that a program scores at a time
PAIRS = 128  # that a program expands
MAX_STEPS = 64
NUM_HALVINGS = 90  # above alpha = 2
SPLIT = 8  # programs per row; their parts are added in a fixed order, so results repeat
CLASSES = 2  # prototypes per program of the sweep over all of them
CLASSES_KEPT = 8  # and of the one that only rewrites what is kept of them


WIDE_TILES = 200_736  # bytes of shared memory that wide tiles take, four stages


def has_room(properties: Any) -> bool:
    """Whether a GPU's shared memory holds wide tiles: not a desktop's with a copy engine.

    Without one, before compute capability 9, tiles are not staged.
    """
    room = getattr(properties, "shared_memory_per_block_optin", WIDE_TILES)
    return bool(properties.major < 9 or room >= WIDE_TILES)


class Launch(NamedTuple):
    """Operands and tiles of a product of all rows with some classes."""

    operands: tuple[TensorDescriptor, TensorDescriptor]
    row_tiles: int
    class_tiles: int
    programs: int
    sizes: tuple[int, int, int]  # rows, classes and depth of a tile
    options: dict[str, int]

    @classmethod
    def of(
        cls, embeddings: Tensor, copy: Tensor, num_classes: int, *, writes_tiles: bool = False
    ) -> Launch:
        """Wide tiles for full batches, narrow ones when a tile would be mostly padding.

        A kernel that ``writes_tiles`` needs the shared memory of a stage for them.
        """
        num_rows, device = len(embeddings), embeddings.device
        rows = next((size for size in (16, 32, 64) if num_rows <= size), 128)
        (classes, warps), stages, most = (256, 8) if rows == 128 else (128, 4), 4, 2
        if device.type == "cuda":  # persistent programs, one per multiprocessor; else a few
            properties = gpu_properties(device)
            most = properties.multi_processor_count
            if rows == 128 and not has_room(properties):
                classes, stages = 128, 2
        row_tiles, class_tiles = -(-num_rows // rows), -(-num_classes // classes)
        operands = (
            TensorDescriptor.from_tensor(embeddings, [rows, 64]),
            TensorDescriptor.from_tensor(copy, [classes, 64]),
        )
        stages -= writes_tiles and stages > 2
        options, sizes = {"num_warps": warps, "num_stages": stages}, (rows, classes, 64)
        programs = min(most, row_tiles * class_tiles)
        return cls(operands, row_tiles, class_tiles, programs, sizes, options)


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
    norms = embeddings.new_empty(num_rows)
    _unit[(num_rows,)](
        embeddings, labels, unit, norms, ignored, depth, power_of_two(depth), num_warps=4
    )
    return unit, norms


def unit_gradient(gradient: Tensor, unit: Tensor, norms: Tensor) -> Tensor:
    """See ``head_reference.unit_gradient``."""
    gradient = gradient.contiguous()
    num_rows, depth = gradient.shape
    out = torch.empty_like(gradient)
    _unit_gradient[(num_rows,)](gradient, unit, norms, out, depth, power_of_two(depth), num_warps=4)
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
    dtype: torch.dtype,
) -> PreparedRows:
    """See ``head_reference.prepare_rows``."""
    embeddings = embeddings.contiguous()
    num_rows, depth = embeddings.shape
    rounded = torch.empty_like(embeddings, dtype=dtype)
    targets = torch.empty_like(embeddings)
    rounding, cosines = torch.empty((2, num_rows), device=embeddings.device).unbind()
    _prepare[(num_rows,)](
        embeddings, labels, prototypes, inverse_norms, rounded, rounding, targets,
        cosines, depth, power_of_two(depth), num_warps=4,
    )  # fmt: skip
    return PreparedRows(embeddings, rounded, rounding, targets, cosines)


@triton.jit
def _screen(
    embeddings, copy, MAXIMA, num_rows, num_spans, num_tiles, row_tiles,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, PROGRAMS: tl.constexpr,
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
        width = num_spans * SPAN
        is_inside = (rows[:, None] < num_rows) & (groups[None, :] < width)
        offsets = rows[:, None].to(tl.int64) * width + groups[None, :]
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
    EMBEDDINGS, COPY, LABELS, MAXIMA, num_classes, num_groups, width, depth,
    GROUP: tl.constexpr, BK: tl.constexpr, CLAMPS: tl.constexpr,
):  # fmt: skip
    """Maxima of a row's own group and of an incomplete last group, without target and padding.

    A product that compares every class with every label would take a tenth longer.
    """
    row = tl.program_id(0)
    label = tl.load(LABELS + row)
    if CLAMPS:
        label = tl.minimum(tl.maximum(label, 0), num_classes - 1)
    is_own = tl.program_id(1) == 0
    if (is_own == 0) | (label >= 0):  # below zero: another rank has the target
        group = tl.where(is_own, label.to(tl.int32) // GROUP, num_groups - 1)
        classes = group * GROUP + tl.arange(0, GROUP)
        cosines = cosines_of_row(
            EMBEDDINGS, COPY, row, label, classes, num_classes, depth, GROUP, BK
        )
        tl.store(MAXIMA + row.to(tl.int64) * width + group, tl.max(cosines, 0))


def _spans_of(num_rows: int, num_groups: int, device: torch.device) -> Tensor:
    """Room for maxima ``[B, g]``, in rows of whole spans, which are read at once."""
    width = -(-num_groups // SPAN) * SPAN
    return torch.empty((num_rows, width), dtype=torch.float32, device=device)[:, :num_groups]


def _in_spans(maxima: Tensor) -> Tensor:
    """Maxima ``[B, g]`` in such room."""
    (num_rows, num_groups), bytes_held = maxima.shape, maxima.untyped_storage().nbytes()
    spans = (triton.cdiv(num_groups, SPAN) * SPAN, 1)
    needed = maxima.storage_offset() + num_rows * spans[0]
    if maxima.stride() == spans and bytes_held >= needed * maxima.element_size():
        return maxima
    return _spans_of(num_rows, num_groups, maxima.device).copy_(maxima)


def group_maxima(
    embeddings: Tensor, copy: Tensor, labels: Tensor, num_classes: int, *, clamps: bool = False
) -> Tensor:
    """See ``head_reference.group_maxima``; operands in half precision, sums in float32.

    With ``clamps``, a label outside of the classes stands for the nearest class.
    """
    num_rows, depth = embeddings.shape
    if missing := -depth % 8:  # the copy engine needs rows of whole 16 bytes
        embeddings, copy = pad(embeddings, (0, missing)), pad(copy, (0, missing))
        depth += missing
    form = Launch.of(embeddings, copy, num_classes)
    num_groups = -(-num_classes // GROUP)
    maxima = _spans_of(num_rows, num_groups, embeddings.device)
    repairs = (num_rows, 2 if num_classes % GROUP else 1)

    def launches() -> None:
        launch(
            _screen, (form.programs,), *form.operands, maxima, num_rows, maxima.stride(0) // SPAN,
            form.row_tiles * form.class_tiles, form.row_tiles, depth, *form.sizes, GROUP, SPAN,
            form.programs, **form.options,
        )  # fmt: skip
        # The target leaves before any maximum is used: its logit is large, its measure tiny.
        launch(
            _repair, repairs, embeddings, copy, labels, maxima, num_classes, num_groups,
            maxima.stride(0), depth, GROUP, 256, clamps, num_warps=4,
        )  # fmt: skip

    key = ("screen", num_classes, clamps, *form.sizes, *form.options.values())
    repeat(launches, key, embeddings, copy, labels, made=(maxima, *form.operands))
    return maxima


@triton.jit
def _starts(
    COUNTS, STARTS, ROW_STARTS, TOTAL, num_rows, room, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where the pairs of each part begin, and those of each row, of ``PARTS`` parts."""
    position = tl.zeros((1,), tl.int64)
    tl.store(STARTS + tl.arange(0, 1), position)
    tl.store(ROW_STARTS + tl.arange(0, 1), position)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = tl.load(COUNTS + row, mask=row < num_rows, other=0).to(tl.int64)
        ends = position + tl.cumsum(counts, 0)
        ends = tl.minimum(ends, room)
        tl.store(STARTS + 1 + row, ends, mask=row < num_rows)
        is_last = (row < num_rows) & (row % PARTS == PARTS - 1)
        tl.store(ROW_STARTS + row // PARTS + 1, ends, mask=is_last)
        position += tl.sum(counts, 0)
    tl.store(TOTAL + tl.arange(0, 1), position)


@triton.jit
def _lowered(floor):
    """A float64 floor in float32, not above it."""
    floor = floor.to(tl.float32)
    return floor - 2.4e-7 * tl.abs(floor)


@triton.jit
def _above(
    MAXIMA, HIGHEST, lowered, row, span, end, num_groups, num_spans, SPAN: tl.constexpr
):  # fmt: skip
    """A bit for each group of some spans whose maximum lies above a floor; their number.

    A span is read by one lane, so no lane waits for others.
    """
    highest = HIGHEST + row.to(tl.int64) * num_spans
    is_high = tl.load(highest + span, mask=span < end, other=float("-inf")) > lowered
    maxima = MAXIMA + row.to(tl.int64) * (num_spans * SPAN)
    bits = tl.zeros(span.shape, tl.int32)
    count = tl.zeros(span.shape, tl.int32)
    for member in tl.static_range(SPAN):
        group = span * SPAN + member
        value = tl.load(maxima + group, mask=is_high & (group < num_groups), other=float("-inf"))
        is_above = (value > lowered).to(tl.int32)
        bits |= is_above << member
        count += is_above
    return bits, count


@triton.jit
def _lowest(bits):
    """Number of the lowest bit that is set; below 32."""
    lowest = (bits & -bits).to(tl.uint32).to(tl.float32)  # a power of two is its exponent
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _count(
    MAXIMA, HIGHEST, FLOOR, SLACK, COUNTS, num_groups, num_spans,
    PARTS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """How many of a row's maxima lie above its floor, in a part of the row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    share = tl.cdiv(num_spans, PARTS)
    end = tl.minimum((part + 1) * share, num_spans)
    lowered = _lowered(tl.load(FLOOR + row) - tl.load(SLACK + row))
    counts = tl.zeros((SPANS,), tl.int32)
    for start in range(part * share, end, SPANS):
        span = start + tl.arange(0, SPANS)
        _bits, count = _above(MAXIMA, HIGHEST, lowered, row, span, end, num_groups, num_spans, SPAN)
        counts += count
    tl.store(COUNTS + row * PARTS + part, tl.sum(counts, 0))


@triton.jit
def _moved(level, mass, slope, b):
    """Newton on the norm of the mass, monotone towards the root; never where numbers overflow."""
    moved = level + mass / slope * (tl.exp2(-b * tl.log2(mass)) - 1.0)
    return tl.where((mass > 1.0) & (tl.abs(moved) < float("inf")), moved, level)


@triton.jit
def _powers32(height, power, root, POWER: tl.constexpr):
    """As ``_powers``, in float32, of classes of measure ``root^power``; ``POWER`` is that or 0."""
    x = tl.maximum(height, 0.0) * root
    if POWER == 0:
        safe = tl.where(x > 0, x, 1.0)
        posterior = tl.where(x > 0, tl.exp2(power * tl.log2(safe)), 0.0)
        slope = posterior / safe
    else:
        slope = tl.where(x > 0, 1.0, 0.0)
        for _ in tl.static_range(POWER - 1):
            slope *= x
        posterior = slope * x
    return posterior, slope * root


@triton.jit
def _bound(
    MAXIMA, TARGET_LOGIT, TARGET_LOG_REFERENCE, SLACK, COST, FLOOR, HIGHEST, num_groups, num_spans,
    scale, b, STEPS: tl.constexpr, ROUNDING: tl.constexpr, SPAN: tl.constexpr,
    BOUND_SPANS: tl.constexpr, HAS_COST: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Lower bound of tau from maxima; with costs those less the cosine that a measure costs (M4).

    A class of cosine c and cost k has at least the measure ``(1 + b s k)^(-1/b)`` and bounds tau on
    its own as one of cosine c - k and measure one does. The largest maximum of each span is kept.
    """
    row = tl.program_id(0)
    base = MAXIMA + row.to(tl.int64) * (num_spans * SPAN)
    spans = HIGHEST + row.to(tl.int64) * num_spans
    coarse = tl.full((BOUND_SPANS, SPAN), float("-inf"), tl.float32)
    costs = tl.zeros((BOUND_SPANS, SPAN), tl.float32)
    for start in range(0, num_spans, BOUND_SPANS):
        span = start + tl.arange(0, BOUND_SPANS)
        group = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        value = tl.load(base + group, mask=span[:, None] < num_spans, other=float("-inf"))
        value = tl.where(group < num_groups, value, float("-inf"))  # padding has any value
        tl.store(spans + span, tl.max(value, 1), mask=span < num_spans)
        if HAS_COST:
            cost = tl.load(COST + group, mask=group < num_groups, other=0.0)
            value -= cost
            costs = tl.where(value > coarse, cost, costs)
        coarse = tl.maximum(coarse, value)
    best = tl.max(coarse)
    best = tl.where(best == float("-inf"), -1.0, best)  # only the target is left
    # Heights relative to the best other class: x_j = level + b * scale * (c_j - best).
    anchor = best.to(tl.float64) * scale
    log2_reference = tl.load(TARGET_LOG_REFERENCE + row).to(tl.float32) * 1.4426950408889634
    gap = (tl.load(TARGET_LOGIT + row) - anchor).to(tl.float32) * b
    level = tl.minimum(1.0, tl.exp2(-b * log2_reference) - gap)
    root = tl.exp2(tl.minimum(b * log2_reference, MOST_LOG2))
    power = 1.0 / b
    if HAS_COST:  # rounding may leave zero of a small denominator; a larger one lowers the bound
        roots = 1.0 / tl.maximum(1.0 + costs * (b * scale), LEAST_DENOMINATOR)
        level_room = tl.max(tl.abs(costs)) * (b * scale)
    for _ in range(STEPS):
        mass, slope = _powers32(level + gap, power, root, 0)
        if HAS_COST:
            heights = level + ((coarse - best) + costs) * (b * scale)
            masses, slopes = _powers32(heights, power, roots, POWER)
        else:
            heights = level + (coarse - best) * (b * scale)
            masses, slopes = _powers32(heights, power, 1.0, POWER)
        level = _moved(level, mass + tl.sum(masses), slope + tl.sum(slopes), b)
    if HAS_COST:
        level += ROUNDING * (1.0 + tl.abs(level) + level_room)
    else:
        level += ROUNDING * (1.0 + tl.abs(level))  # a higher level is a lower tau
    slack = tl.load(SLACK + row)
    edge = best.to(tl.float64) - level.to(tl.float64) / (b * scale)
    tl.store(FLOOR + row, edge - slack)


@triton.jit
def _list(
    MAXIMA, HIGHEST, FLOOR, SLACK, STARTS, GROUPS, ROWS, num_groups, num_spans,
    PARTS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Pairs of a part of a row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    share = tl.cdiv(num_spans, PARTS)
    position = tl.load(STARTS + row * PARTS + part)
    end = tl.load(STARTS + row * PARTS + part + 1)
    last = tl.minimum((part + 1) * share, num_spans)
    lowered = _lowered(tl.load(FLOOR + row) - tl.load(SLACK + row))
    for start in range(part * share, last, SPANS):
        span = start + tl.arange(0, SPANS)
        bits, count = _above(MAXIMA, HIGHEST, lowered, row, span, last, num_groups, num_spans, SPAN)
        place = position + tl.cumsum(count, 0) - count
        while tl.max(bits, 0) > 0:  # few spans have several
            group = span * SPAN + _lowest(bits)
            fits = (bits > 0) & (place < end)
            tl.store(GROUPS + place, group, mask=fits)
            tl.store(ROWS + place, row, mask=fits)
            bits &= bits - 1
            place += 1
        position += tl.sum(count, 0)


def list_pairs(
    maxima: Tensor,
    target: Target,
    slack: Tensor,
    *,
    scale: float,
    b: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
    lower: Tensor | None = None,
    room: int | None = None,
    limit: int = NO_LIMIT,
    total: Tensor | None = None,
) -> Pairs:
    """See ``head_reference.list_pairs``; float32 sums, their rounding taken off the bound.

    Lists have ``room`` entries, the spare ones with a group past the last, or as many as there are,
    which waits for the device. The ``total`` shows whether the room cut a list short.
    """
    maxima = _in_spans(maxima)
    (num_rows, num_groups), device = maxima.shape, maxima.device
    floor = torch.empty(num_rows, dtype=torch.float64, device=device)
    num_spans = triton.cdiv(num_groups, SPAN)
    highest = torch.empty((num_rows, num_spans), dtype=torch.float32, device=device)
    cost = slack if lower is None else _costs(lower, num_groups, scale, b)
    _bound[(num_rows,)](
        maxima, target.logits, target.log_reference, slack, cost, floor, highest, num_groups,
        num_spans, scale, b, COARSE_STEPS if b <= 1.0 else 0, ROUNDING, SPAN, BOUND_SPANS,
        lower is not None, whole_power(b), num_warps=8,
    )  # fmt: skip
    if reduce is not None:
        floor = reduce(floor)
    known, sizes = (maxima, highest, floor, slack), (num_groups, num_spans)
    counts = torch.empty(num_rows * PARTS, dtype=torch.int32, device=device)
    _count[(num_rows, PARTS)](*known, counts, *sizes, PARTS, SPAN, SPANS, num_warps=1)
    starts = torch.empty(num_rows * PARTS + 1, dtype=torch.int64, device=device)
    row_starts = starts.new_empty(num_rows + 1)
    total = starts.new_empty(1) if total is None else total
    most = NO_LIMIT if room is None else room  # kernels never write past it
    _starts[(1,)](
        counts, starts, row_starts, total, num_rows * PARTS, most, PARTS, 4 * BLOCK, num_warps=8
    )
    room = int(total) if room is None else room
    if room > limit:
        raise ListOverflow(maxima)
    groups = torch.full((room,), num_groups, dtype=torch.int32, device=device)
    rows = torch.empty_like(groups)
    if room:
        lists = (starts, groups, rows)
        _list[(num_rows, PARTS)](*known, *lists, *sizes, PARTS, SPAN, SPANS, num_warps=1)
    return Pairs(groups, rows, row_starts, floor, slack)


def _costs(lower: Tensor, num_groups: int, scale: float, b: float) -> Tensor:
    """``f'(1 / q) / s`` of the groups' smallest measures, rounded up: a bound stays one."""
    cost = (torch.expm1(-b * lower) / (b * scale)).to(torch.float32)
    above = torch.nextafter(cost, torch.full_like(cost, torch.inf))
    return above.expand(num_groups).contiguous()


@triton.jit
def _filter(
    ROUNDED, COPY, LABELS, FLOOR, SLACK, PAIR_ROWS, ORDER, ENDS, MASKS, COUNTS,
    num_classes, depth, GROUP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    begin = tl.load(ENDS + group - 1, mask=group > 0, other=0)
    end = tl.load(ENDS + group)
    if begin == end:
        return
    member = tl.arange(0, GROUP)
    classes = group * GROUP + member
    prototypes = COPY + classes[:, None].to(tl.int64) * depth
    for start in range(begin, end, BR):
        entry = start + tl.arange(0, BR)
        is_entry = entry < end
        pair = tl.load(ORDER + entry, mask=is_entry, other=0)
        row = tl.load(PAIR_ROWS + pair, mask=is_entry, other=0)
        label = tl.load(LABELS + row, mask=is_entry, other=-1)
        floor = tl.load(FLOOR + row, mask=is_entry, other=0.0)
        lowered = _lowered(floor - tl.load(SLACK + row, mask=is_entry, other=0.0))
        embeddings = ROUNDED + row[:, None].to(tl.int64) * depth
        products = tl.zeros((BR, GROUP), dtype=tl.float32)
        for offset in range(0, depth, BK):
            column = offset + tl.arange(0, BK)
            inside = column[None, :] < depth
            x = tl.load(embeddings + column[None, :], mask=is_entry[:, None] & inside, other=0.0)
            w = tl.load(prototypes + column[None, :], mask=inside, other=0.0)
            products = tl.dot(x, w.T, products)
        is_candidate = (products > lowered[:, None]) & (classes[None, :] < num_classes)
        is_candidate = is_candidate & (classes[None, :] != label[:, None])
        bits = tl.sum(is_candidate.to(tl.int32) << member[None, :], 1)
        tl.store(MASKS + pair, bits, mask=is_entry)
        tl.store(COUNTS + pair, tl.sum(is_candidate.to(tl.int32), 1), mask=is_entry)


@triton.jit
def _slots(GROUPS, SIZES, SLOTS, num_pairs, num_groups, BLOCK: tl.constexpr):
    """Count the pairs of each group, and number them in any order."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(GROUPS + pair, mask=pair < num_pairs, other=num_groups)
    inside = group < num_groups  # not a spare entry
    slot = tl.atomic_add(SIZES + group, 1, mask=inside, sem="relaxed")
    tl.store(SLOTS + pair, slot, mask=inside)


@triton.jit
def _order(GROUPS, SLOTS, ENDS, ORDER, num_pairs, num_groups, BLOCK: tl.constexpr):
    """Pairs by their groups."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(GROUPS + pair, mask=pair < num_pairs, other=num_groups)
    inside = group < num_groups
    begin = tl.load(ENDS + group - 1, mask=inside & (group > 0), other=0)
    slot = tl.load(SLOTS + pair, mask=inside, other=0)
    tl.store(ORDER + begin + slot, pair, mask=inside)


@triton.jit
def _candidate_starts(
    ENDS, PAIR_STARTS, STARTS, TOTAL, num_rows, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Where each row's candidates begin: where the candidates of the pairs before it end."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row <= num_rows
    pair = tl.load(PAIR_STARTS + row, mask=inside, other=0)
    start = tl.load(ENDS + pair - 1, mask=inside & (pair > 0), other=0).to(tl.int64)
    tl.store(STARTS + row, tl.minimum(start, room), mask=inside)
    tl.store(TOTAL + row - num_rows, start, mask=row == num_rows)


@triton.jit
def _expand(
    MASKS, ENDS, GROUPS, PAIR_ROWS, ROWS, COLUMNS, num_pairs, room, num_classes,
    GROUP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Candidates of some pairs, and as many spare entries: row 0 and a class past the last."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    total = tl.load(ENDS + num_pairs - 1)
    is_spare = (pair >= total) & (pair < room)
    tl.store(COLUMNS + pair, num_classes, mask=is_spare)
    tl.store(ROWS + pair, 0, mask=is_spare)
    bits = tl.load(MASKS + pair, mask=inside, other=0)
    place = tl.load(ENDS + pair - 1, mask=inside & (pair > 0), other=0)
    group = tl.load(GROUPS + pair, mask=inside, other=0)
    row = tl.load(PAIR_ROWS + pair, mask=inside, other=0)
    while tl.max((bits != 0).to(tl.int32), 0) > 0:  # few pairs have several
        fits = (bits != 0) & (place < room)
        tl.store(COLUMNS + place, group * GROUP + _lowest(bits), mask=fits)
        tl.store(ROWS + place, row, mask=fits)
        bits &= bits - 1
        place += 1


@triton.jit
def _score(
    COLUMNS, STARTS, EMBEDDINGS, PROTOTYPES, INVERSE_NORMS, SCORES, depth,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    first = tl.load(STARTS + row)
    # Parts of a list are ranges of classes. Rows vary fastest, so programs that run together share
    # a range, and find each other's prototypes in cache.
    share = tl.cdiv(tl.load(STARTS + row + 1) - first, SPLIT)
    begin = first + part * share
    end = tl.minimum(begin + share, tl.load(STARTS + row + 1))
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    x = tl.load(EMBEDDINGS + row.to(tl.int64) * depth + dimension, mask=is_value, other=0.0)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        column = tl.load(COLUMNS + entry, mask=inside, other=0)
        place = column[:, None].to(tl.int64) * depth + dimension[None, :]
        w = tl.load(PROTOTYPES + place, mask=inside[:, None] & is_value[None, :], other=0.0)
        cosine = tl.sum(w * x[None, :], 1) * tl.load(INVERSE_NORMS + column, mask=inside, other=0.0)
        tl.store(SCORES + entry, cosine, mask=inside)


def score_candidates(batch: Batch, pairs: Pairs) -> Candidates:
    """See ``head_reference.score_candidates``."""
    return _score_listed(batch, pairs, pairs.starts.new_empty(2), None)[0]


def _similarities(batch: Batch, vectors: Tensor, columns: Tensor, starts: Tensor) -> Tensor:
    """Cosines of each row's vector with the prototypes of its list, ``[n]``."""
    num_rows, depth, room = len(batch.labels), vectors.shape[1], len(columns)
    cosines = torch.empty(room, dtype=torch.float32, device=columns.device)
    if room:
        split = power_of_two(-(-room // (num_rows * 2 * ENTRIES)))
        split = min(max(split, 32), 1024)
        _score[(num_rows, split)](
            columns, starts, vectors, batch.prototypes, batch.inverse_norms, cosines, depth, split,
            power_of_two(depth), ENTRIES, num_warps=1 if depth <= 512 else 4,
        )  # fmt: skip
    return cosines


def _target_similarities(batch: Batch, candidates: Candidates) -> Tensor:
    """See ``head_reference.target_similarities``."""
    assert batch.reference is not None
    targets = batch.reference.targets.contiguous()
    return _similarities(batch, targets, candidates.columns, candidates.starts)


def _score_listed(
    batch: Batch, pairs: Pairs, totals: Tensor, room: int | None
) -> tuple[Candidates, Reading]:
    """Candidates in ``room`` entries, as in ``list_pairs``, and totals; theirs is the second."""
    (num_classes, depth), device = batch.prototypes.shape, totals.device
    num_rows, num_pairs, groups = len(batch.labels), len(pairs.groups), pairs.groups
    # Per pair, bit j of a mask is set if class j of the group may be active.
    num_groups = -(-num_classes // GROUP)
    zeros = torch.zeros(2 * num_pairs + num_groups, dtype=torch.int32, device=device)
    masks, counts, sizes = zeros.split([num_pairs, num_pairs, num_groups])
    if num_pairs:
        # Each group's prototypes are read once. In which order its pairs come decides nothing.
        slots, order = torch.empty((2, num_pairs), dtype=torch.int32, device=device)
        grid = (triton.cdiv(num_pairs, BLOCK),)
        _slots[grid](groups, sizes, slots, num_pairs, num_groups, BLOCK, num_warps=4)
        edges = sizes.cumsum(0, dtype=torch.int32)
        _order[grid](groups, slots, edges, order, num_pairs, num_groups, BLOCK, num_warps=4)
        per_group = num_pairs / num_groups
        size = 16 if per_group < 24 else 32 if per_group < 40 else 64
        _filter[(num_groups,)](
            batch.prepared.rounded, batch.copy, batch.labels, pairs.floor, pairs.slack, pairs.rows,
            order, edges, masks, counts, num_classes, depth, GROUP, size, 128, num_warps=1,
            num_stages=3 if size == 16 else 2,
        )  # fmt: skip
    ends = counts.cumsum(0, dtype=torch.int32)  # bits that are set up to and including each pair
    starts = torch.empty_like(pairs.starts)
    _candidate_starts[(triton.cdiv(num_rows + 1, 1024),)](
        ends, pairs.starts, starts, totals[1:], num_rows, NO_LIMIT if room is None else room, 1024,
        num_warps=4,
    )  # fmt: skip
    lengths = Reading(totals)
    room = int(lengths.wait()[1]) if room is None else room
    # Results of spare entries are dropped, but must be safe.
    rows, columns = torch.empty((2, room), dtype=torch.int32, device=device)
    if room and num_pairs:
        _expand[(triton.cdiv(max(num_pairs, room), PAIRS),)](
            masks, ends, groups, pairs.rows, rows, columns, num_pairs, room, num_classes, GROUP,
            PAIRS, num_warps=1,
        )  # fmt: skip
    else:
        columns.fill_(num_classes)
        rows.zero_()
    scores = _similarities(batch, batch.prepared.embeddings, columns, starts)
    candidates = Candidates(rows, columns, scores, starts)
    return add_reference(candidates, batch, _target_similarities), lengths


@triton.jit
def _powers(height, power, log_reference):
    """Posterior and slope of classes at a height; zero off the support."""
    safe = tl.where(height > 0, height, 1.0)
    posterior = tl.where(height > 0, tl.exp(log_reference + power * tl.log(safe)), 0.0)
    return posterior, posterior / safe


@triton.jit
def _ratios(height, power, POWER: tl.constexpr):
    """Posterior and slope of classes at a height, float64; ``POWER`` is ``power`` or 0."""
    if POWER == 0:
        posterior, slope = _powers(height, power, 0.0)
    else:
        x = tl.maximum(height, 0.0)
        slope = tl.where(height > 0, x * 0.0 + 1.0, x * 0.0)
        for _ in tl.static_range(POWER - 1):
            slope *= x
        posterior = slope * x
    return posterior, slope


@triton.jit
def _measured(
    MEASURES, entry, end, height, power, POWER: tl.constexpr, HAS_MEASURES: tl.constexpr
):  # fmt: skip
    """As ``_ratios``, of entries that may have measures; with no ``POWER`` these are logarithms."""
    if HAS_MEASURES and POWER == 0:
        measure = tl.load(MEASURES + entry, mask=entry < end, other=0.0)
        posterior, slope = _powers(height, power, measure)
    else:
        posterior, slope = _ratios(height, power, POWER)
        if HAS_MEASURES:
            measure = tl.load(MEASURES + entry, mask=entry < end, other=0.0)
            posterior *= measure
            slope *= measure
    return posterior, slope


@triton.jit
def _sums(
    SCORES, MEASURES, begin, end, level, best, rate, power, log_reference, gap,
    POWER: tl.constexpr, HAS_MEASURES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass and slope of a row at a trial level, the target included."""
    mass, slope = _powers(level + gap, power, log_reference)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf")).to(tl.float64)
        masses, slopes = _measured(
            MEASURES, entry, end, level + (score - best) * rate, power, POWER, HAS_MEASURES
        )
        mass += tl.sum(masses, 0)
        slope += tl.sum(slopes, 0)
    return mass, slope


@triton.jit
def _cost(log_measure, b):
    """``b f'(1 / q)``: what the height of a class that holds all the mass has above one."""
    return tl.exp(-b * log_measure) - 1.0


@triton.jit
def _solve(
    SCORES, LOG_MEASURES, MEASURES, STARTS, TARGET_LOGIT, TARGET_LOG_REFERENCE, SETTINGS,
    LOSS, TAU, MASS, IN_REFERENCE, ERROR, POSTERIOR,
    POWER: tl.constexpr, STEPS: tl.constexpr, HALVINGS: tl.constexpr, HAS_MEASURES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Root, posterior and loss; with measures the best class is that of M4, see ``_bound``."""
    row = tl.program_id(0)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    b = tl.load(SETTINGS)
    scale = tl.load(SETTINGS + 1)
    power = 1.0 / b
    rate = b * scale
    running = tl.full((BLOCK,), float("-inf"), tl.float64 if HAS_MEASURES else tl.float32)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf"))
        if HAS_MEASURES:
            measure = tl.load(LOG_MEASURES + entry, mask=entry < end, other=0.0)
            running = tl.maximum(running, score.to(tl.float64) - _cost(measure, b) / rate)
        else:
            running = tl.maximum(running, score)
    best = tl.where(end > begin, tl.max(running, 0).to(tl.float64), -1.0)
    log_reference = tl.load(TARGET_LOG_REFERENCE + row)
    gap = (tl.load(TARGET_LOGIT + row) - best * scale) * b
    alone = tl.exp(-b * log_reference)  # the target's height when it holds all the mass
    level = tl.minimum(1.0, alone - gap)
    if STEPS > 0:
        step = 0
        is_moving = 1
        while (step < STEPS) & (is_moving > 0):
            mass, slope = _sums(
                SCORES, MEASURES, begin, end, level, best, rate, power, log_reference, gap, POWER,
                HAS_MEASURES, BLOCK,
            )  # fmt: skip
            level += mass / slope * (tl.exp(-b * tl.log(mass)) - 1.0)
            is_moving = (tl.abs(mass - 1.0) > 1e-12).to(tl.int32)
            step += 1
    if HALVINGS > 0:
        # Bounds: all mass on one class, or spread evenly over the list and the target.
        share = tl.exp(-b * tl.log((end - begin + 1).to(tl.float64)))
        low = tl.minimum(share, alone * share - gap)
        if HAS_MEASURES:
            for start in range(begin, end, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf"))
                measure = tl.load(LOG_MEASURES + entry, mask=entry < end, other=0.0)
                each = tl.exp(-b * measure) * share - (score.to(tl.float64) - best) * rate
                low = tl.minimum(low, tl.min(each, 0))
        high = level
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            mass, slope = _sums(
                SCORES, MEASURES, begin, end, middle, best, rate, power, log_reference, gap, POWER,
                HAS_MEASURES, BLOCK,
            )  # fmt: skip
            low = tl.where(mass > 1.0, low, middle)
            high = tl.where(mass > 1.0, middle, high)
        level = 0.5 * (low + high)
    level = tl.where(gap == gap, level, gap)  # minima and comparisons pass NaN over
    others = level * 0.0
    excess = level * 0.0
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        score = tl.load(SCORES + entry, mask=entry < end, other=float("-inf")).to(tl.float64)
        height = level + (score - best) * rate
        posterior, _slopes = _measured(  # a name of its own: types are fixed
            MEASURES, entry, end, height, power, POWER, HAS_MEASURES
        )
        others += tl.sum(posterior, 0)
        excess += tl.sum(tl.where(height > 0, posterior * height, 0.0), 0)
        tl.store(POSTERIOR + entry, posterior.to(tl.float32), mask=entry < end)
    own = level + gap
    own_mass, _own_slope = _powers(own, power, log_reference)
    target = tl.where(others < 0.5, 1.0 - others, own_mass)
    log_own = tl.log(tl.where(own_mass > 0, own_mass, 1.0))
    log_target = tl.where(others < 0.5, log1p(-tl.minimum(others, 0.5)), log_own)
    missing = (alone - own) / b - own  # outside the support: linear in the missing height
    loss = excess + tl.where(own > 0, alone * gain(others, log_target, b), missing)
    tl.store(LOSS + row, loss / (1.0 + b))
    tl.store(TAU + row, best * scale - (level - 1.0) / b)
    tl.store(MASS + row, others)
    tl.store(IN_REFERENCE + row, (target * tl.where(own > 0, own, 0.0) - alone) / (1.0 + b))
    tl.store(ERROR + row, tl.abs(others + own_mass - 1.0))


def solve_lists(candidates: Candidates, target: Target, *, scale: float, b: float) -> SolvedRows:
    """See ``head_reference.solve_lists``."""
    num_rows, device = len(target.logits), target.logits.device
    wide = torch.empty((5, num_rows), dtype=torch.float64, device=device)
    loss, tau, others, in_reference, error = wide.unbind()
    posterior = torch.empty_like(candidates.scores)
    is_newton = b <= 1.0
    logs, power = candidates.log_reference, whole_power(b)
    has_measures, logs = logs is not None, candidates.scores if logs is None else logs
    measures = logs.exp() if has_measures and power else logs
    _solve[(num_rows,)](
        candidates.scores, logs, measures, candidates.starts, target.logits, target.log_reference,
        settings_tensor(b, scale, device), loss, tau, others, in_reference, error, posterior,
        power, MAX_STEPS if is_newton else 0, 0 if is_newton else NUM_HALVINGS, has_measures,
        BLOCK, num_warps=4,
    )  # fmt: skip
    return SolvedRows(
        loss, tau, others, in_reference, error,
        candidates.rows, candidates.columns, posterior, candidates.starts,
    )  # fmt: skip


@triton.jit
def _gather(ORDER, ROWS, POSTERIOR, WEIGHTS, TARGET_WEIGHTS, OUT_ROWS, OUT_VALUES, others, total,
            BLOCK: tl.constexpr):  # fmt: skip
    """Row and value of each entry in the order of classes; entries past the others are targets."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    entry = tl.load(ORDER + place, mask=inside, other=0)
    is_other = inside & (entry < others)
    row = tl.load(ROWS + entry, mask=is_other, other=0)
    value = tl.load(POSTERIOR + entry, mask=is_other, other=0.0)
    value *= tl.load(WEIGHTS + row, mask=is_other, other=0.0)
    is_target = inside & (entry >= others)
    row = tl.where(is_target, (entry - others).to(tl.int32), row)
    value = tl.where(is_target, tl.load(TARGET_WEIGHTS + row, mask=is_target, other=0.0), value)
    tl.store(OUT_ROWS + place, row, mask=inside)
    tl.store(OUT_VALUES + place, value, mask=inside)


def class_gradient(
    order: ClassOrder, solved: SolvedRows, weights: Tensor, target_weights: Tensor
) -> ClassGradient:
    """See ``head_reference.class_gradient``."""
    columns = order.columns
    rows = torch.empty_like(columns)
    values = torch.empty(columns.shape, dtype=torch.float32, device=columns.device)
    if len(columns):
        _gather[(triton.cdiv(len(columns), BLOCK),)](
            order.order, solved.rows, solved.posterior, weights, target_weights, rows, values,
            order.num_candidates, len(columns), BLOCK, num_warps=4,
        )  # fmt: skip
    return ClassGradient(columns, rows, values)


@triton.jit
def _pull(
    COLUMNS, POSTERIOR, STARTS, PROTOTYPES, INVERSE_NORMS, PARTS, num_rows, depth,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    begin = tl.load(STARTS + row)
    end = tl.load(STARTS + row + 1)
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    total = tl.zeros((DEPTH,), dtype=tl.float32)
    for start in range(begin + part * BLOCK, end, BLOCK * SPLIT):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        column = tl.load(COLUMNS + entry, mask=inside, other=0)
        value = tl.load(POSTERIOR + entry, mask=inside, other=0.0)
        is_active = value != 0.0  # the others' prototypes are not even read
        value *= tl.load(INVERSE_NORMS + column, mask=is_active, other=0.0)
        place = column[:, None].to(tl.int64) * depth + dimension[None, :]
        mask = is_active[:, None] & is_value[None, :]
        prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
        total += tl.sum(value[:, None] * prototype, 0)
    out = PARTS + (part * num_rows + row).to(tl.int64) * depth
    tl.store(out + dimension, total, mask=is_value)


def pull_rows(solved: SolvedRows, prototypes: Tensor, inverse_norms: Tensor) -> Tensor:
    """See ``head_reference.pull_rows``."""
    num_rows, depth = len(solved.loss), prototypes.shape[1]
    parts = torch.empty((SPLIT, num_rows, depth), dtype=torch.float32, device=prototypes.device)
    _pull[(num_rows, SPLIT)](
        solved.columns, solved.posterior, solved.starts, prototypes, inverse_norms, parts,
        num_rows, depth, SPLIT, power_of_two(depth), 16, num_warps=4,
    )  # fmt: skip
    return parts.sum(0)


@triton.jit
def _prototype_gradient(
    CLASSES, SEGMENTS, ROWS, VALUES, EMBEDDINGS, PROTOTYPES, INVERSE_NORMS, OUT, depth,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    begin = tl.load(SEGMENTS + which)
    end = tl.load(SEGMENTS + which + 1)
    column = tl.load(CLASSES + which).to(tl.int64)
    dimension = tl.arange(0, DEPTH)
    is_value = dimension < depth
    total = tl.zeros((DEPTH,), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        row = tl.load(ROWS + entry, mask=inside, other=0)
        value = tl.load(VALUES + entry, mask=inside, other=0.0)
        place = row[:, None].to(tl.int64) * depth + dimension[None, :]
        mask = inside[:, None] & is_value[None, :]
        total += tl.sum(value[:, None] * tl.load(EMBEDDINGS + place, mask=mask, other=0.0), 0)
    inverse = tl.load(INVERSE_NORMS + column)
    unit = tl.load(PROTOTYPES + column * depth + dimension, mask=is_value, other=0.0) * inverse
    total = (total - tl.sum(total * unit, 0) * unit) * inverse
    tl.store(OUT + which * depth + dimension, total, mask=is_value)


def prototype_gradient(
    gradient: ClassGradient, embeddings: Tensor, prototypes: Tensor, inverse_norms: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``head_reference.prototype_gradient``."""
    classes, counts = torch.unique_consecutive(gradient.columns, return_counts=True)
    segments = pad(counts.cumsum(0), (1, 0))
    depth = prototypes.shape[1]
    out = torch.empty((len(classes), depth), dtype=torch.float32, device=prototypes.device)
    if len(classes):
        _prototype_gradient[(len(classes),)](
            classes, segments, gradient.rows, gradient.values, embeddings, prototypes,
            inverse_norms, out, depth, power_of_two(depth), 4, num_warps=2,
        )  # fmt: skip
    return classes.long(), out


@triton.jit
def _add_entry(gradient, num_entries, entry, COLUMNS, ROWS, VALUES, EMBEDDINGS, classes, dimension,
               depth):  # fmt: skip
    """Add one entry's embedding to the gradient of its class."""
    value = tl.load(VALUES + entry)
    row = tl.load(ROWS + entry).to(tl.int64)
    width = tl.where(value != 0.0, depth, 0)  # many entries are candidates that were not active
    x = tl.load(EMBEDDINGS + row * depth + dimension, mask=dimension < width, other=0.0)
    share = tl.where(tl.load(COLUMNS + entry) == classes, value, 0.0)
    num_entries += (share != 0.0).to(tl.int32)
    gradient += share[:, None] * x[None, :]
    return gradient, num_entries


@triton.jit
def _tangent(gradient, prototype, inverse):
    """Gradient of prototypes from that of their unit vectors."""
    unit = prototype * inverse[:, None]
    radial = tl.sum(gradient * unit, 1)
    return (gradient - radial[:, None] * unit) * inverse[:, None]


@triton.jit
def _state(
    classes, is_read, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth,
    HAS_BUFFER: tl.constexpr,
):  # fmt: skip
    """Prototypes, momentum and inverse norms of a few classes, and where they are.

    They are loaded before the gradient is summed up, so that both memory accesses overlap.
    """
    place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
    mask = is_read[:, None] & (dimension[None, :] < depth)
    prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
    inverse = tl.load(INVERSE_NORMS + classes, mask=is_read, other=0.0)
    buffer = prototype
    if HAS_BUFFER:
        buffer = tl.load(BUFFER + place, mask=mask, other=0.0)
    return place, prototype, buffer, inverse


@triton.jit
def _keep(prototype, place, is_kept, classes, dimension, INVERSE_NORMS, COPY, LARGEST, depth):
    """Rewrite what is kept of a few prototypes: inverse norms, rounded unit vectors, the error."""
    # In float64 the order of the sum does not show: an update leaves what a refresh would, and a
    # resumed run has the same copy as before. Memory is what these kernels wait for.
    known = tl.load(LARGEST)  # mostly enough: a million programs need not queue at one address
    wide = prototype.to(tl.float64)
    length = tl.sqrt(tl.sum(wide * wide, 1).to(tl.float32))
    inverse = 1.0 / tl.where(is_kept, length, 1.0)
    inverse = tl.where((inverse > 0.0) & (inverse < float("inf")), inverse, float("nan"))
    tl.store(INVERSE_NORMS + classes, inverse, mask=is_kept)
    unit = prototype * inverse[:, None]
    rounded = unit.to(COPY.dtype.element_ty)
    tl.store(COPY + place, rounded, mask=is_kept[:, None] & (dimension[None, :] < depth))
    lost = unit - rounded.to(tl.float32)
    error = tl.sum(lost * lost, 1)
    error = tl.where(error == error, error, float("inf"))  # a maximum would pass NaN over
    error = tl.max(tl.where(is_kept, error, 0.0), 0)
    tl.atomic_max(LARGEST, error, mask=error > known)  # a maximum does not depend on the order


@triton.jit
def _refresh(
    PROTOTYPES, INVERSE_NORMS, COPY, LARGEST, num_classes, depth, CLASSES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """What is kept of all classes, a few to a program."""
    classes = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    dimension = tl.arange(0, DEPTH)
    is_kept = classes < num_classes
    place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
    mask = is_kept[:, None] & (dimension[None, :] < depth)
    prototype = tl.load(PROTOTYPES + place, mask=mask, other=0.0)
    _keep(prototype, place, is_kept, classes, dimension, INVERSE_NORMS, COPY, LARGEST, depth)


@triton.jit
def _apply(
    gradient, prototype, buffer, place, is_stepped, classes, dimension, PROTOTYPES, BUFFER,
    INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Step a few prototypes and rewrite what is kept of them."""
    mask = is_stepped[:, None] & (dimension[None, :] < depth)
    gradient += weight_decay * prototype
    move = gradient
    if HAS_BUFFER:
        move = momentum * buffer + gradient
        tl.store(BUFFER + place, move, mask=mask)
        if NESTEROV:
            move = gradient + momentum * move
    prototype -= lr * move
    tl.store(PROTOTYPES + place, prototype, mask=mask)
    _keep(prototype, place, is_stepped, classes, dimension, INVERSE_NORMS, COPY, LARGEST, depth)


@triton.jit
def _given(
    GRADIENT, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY, GRAD_SCALE, UNIT_FACTOR, LARGEST,
    lr, momentum, weight_decay, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, ONLY_ACTIVE: tl.constexpr,
    OF_UNIT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A range of classes whose gradient is given, one to a program."""
    grad_scale = tl.load(GRAD_SCALE)
    if tl.abs(grad_scale) < float("inf"):
        classes = tl.program_id(0) + tl.arange(0, 1)
        dimension = tl.arange(0, DEPTH)
        place = classes[:, None].to(tl.int64) * depth + dimension[None, :]
        inside = (classes[:, None] >= 0) & (dimension[None, :] < depth)
        gradient = tl.load(GRADIENT + place, mask=inside, other=0.0)
        is_stepped = classes >= 0
        if ONLY_ACTIVE:
            is_stepped = tl.sum((gradient != 0.0).to(tl.int32), 1) > 0
        place, prototype, buffer, inverse = _state(
            classes, is_stepped, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth, HAS_BUFFER
        )
        if OF_UNIT:
            gradient = _tangent(gradient, prototype, inverse) * tl.load(UNIT_FACTOR)
        _apply(
            gradient * grad_scale, prototype, buffer, place, is_stepped, classes, dimension,
            PROTOTYPES, BUFFER, INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth,
            HAS_BUFFER, NESTEROV,
        )  # fmt: skip


@triton.jit
def _sweep(
    COLUMNS, ROWS, VALUES, SEGMENTS, EMBEDDINGS, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY,
    GRAD_SCALE, LARGEST, lr, momentum, weight_decay, num_classes, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """All classes, a few to a program."""
    program = tl.program_id(0)
    grad_scale = tl.load(GRAD_SCALE)
    if tl.abs(grad_scale) < float("inf"):
        classes = program * CLASSES + tl.arange(0, CLASSES)
        dimension = tl.arange(0, DEPTH)
        is_stepped = classes < num_classes
        place, prototype, buffer, inverse = _state(
            classes, is_stepped, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth, HAS_BUFFER
        )
        gradient = tl.zeros((CLASSES, DEPTH), dtype=tl.float32)
        num_entries = tl.zeros((CLASSES,), dtype=tl.int32)
        for entry in range(tl.load(SEGMENTS + program), tl.load(SEGMENTS + program + 1)):
            gradient, num_entries = _add_entry(
                gradient, num_entries, entry, COLUMNS, ROWS, VALUES, EMBEDDINGS, classes,
                dimension, depth,
            )  # fmt: skip
        gradient = _tangent(gradient, prototype, inverse) * grad_scale
        _apply(
            gradient, prototype, buffer, place, is_stepped, classes, dimension, PROTOTYPES, BUFFER,
            INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth, HAS_BUFFER, NESTEROV,
        )  # fmt: skip


@triton.jit
def _active(
    COLUMNS, ROWS, VALUES, EMBEDDINGS, PROTOTYPES, BUFFER, INVERSE_NORMS, COPY,
    GRAD_SCALE, LARGEST, lr, momentum, weight_decay, num_entries, depth,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Active classes only: a program per entry, of which the first of a class does the work."""
    entry = tl.program_id(0)
    column = tl.load(COLUMNS + entry)
    before = tl.load(COLUMNS + tl.maximum(entry - 1, 0))
    following = tl.load(COLUMNS + tl.minimum(entry + 1, num_entries - 1))
    is_first = (entry == 0) | (before != column)
    is_last = (entry == num_entries - 1) | (following != column)
    # The prototype of a single inactive candidate is not read.
    has_work = is_first & ((tl.load(VALUES + entry) != 0.0) | (is_last == 0))
    grad_scale = tl.load(GRAD_SCALE)
    if has_work & (tl.abs(grad_scale) < float("inf")):
        classes = column + tl.arange(0, 1)
        dimension = tl.arange(0, DEPTH)
        place, prototype, buffer, inverse = _state(
            classes, classes >= 0, dimension, PROTOTYPES, BUFFER, INVERSE_NORMS, depth, HAS_BUFFER
        )
        gradient = tl.zeros((1, DEPTH), dtype=tl.float32)
        count = tl.zeros((1,), dtype=tl.int32)
        is_same = 1
        while is_same > 0:
            gradient, count = _add_entry(
                gradient, count, entry, COLUMNS, ROWS, VALUES, EMBEDDINGS, classes, dimension, depth
            )
            entry += 1
            after = tl.load(COLUMNS + tl.minimum(entry, num_entries - 1))
            is_same = ((entry < num_entries) & (after == column)).to(tl.int32)
        gradient = _tangent(gradient, prototype, inverse) * grad_scale
        _apply(
            gradient, prototype, buffer, place, count > 0, classes, dimension, PROTOTYPES, BUFFER,
            INVERSE_NORMS, COPY, LARGEST, lr, momentum, weight_decay, depth, HAS_BUFFER, NESTEROV,
        )  # fmt: skip


def refresh_copy(prototypes: Tensor, copy: Tensor, inverse_norms: Tensor) -> Tensor:
    """See ``head_reference.refresh_copy``."""
    num_classes, depth = prototypes.shape
    largest = torch.zeros((), dtype=torch.float32, device=prototypes.device)
    wide = power_of_two(depth)
    _refresh[(triton.cdiv(num_classes, CLASSES_KEPT),)](
        prototypes.contiguous(), inverse_norms, copy, largest, num_classes, depth, CLASSES_KEPT,
        wide, num_warps=4 if wide <= 512 else 8,
    )  # fmt: skip
    return _error(largest)


def _error(largest: Tensor) -> Tensor:
    """The length of the largest error from its square; NaN of prototypes that have no direction."""
    return torch.where(largest.isinf(), torch.nan, largest.sqrt())


def _arguments(state: PrototypeState, rule: SgdRule) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of every update kernel, and the tensor for the largest squared error."""
    prototypes, momentum, inverse_norms, copy = state
    largest = torch.zeros((), dtype=torch.float32, device=prototypes.device)
    buffer = prototypes if momentum is None else momentum
    return (prototypes, buffer, inverse_norms, copy, rule.grad_scale.float()), largest


def sgd_update(
    gradient: ClassGradient, embeddings: Tensor, state: PrototypeState, rule: SgdRule
) -> Tensor:
    """See ``head_reference.sgd_update``."""
    num_classes, depth = state.prototypes.shape
    columns = gradient.columns.to(torch.int32)
    entries = (columns, gradient.rows, gradient.values)
    given, largest = _arguments(state, rule)
    wide = power_of_two(depth)
    flags = (state.momentum is not None, rule.nesterov)
    warps = 1 if wide <= 512 else 4
    if rule.only_active and len(columns):
        _active[(len(columns),)](
            *entries, embeddings, *given, largest, rule.lr, rule.momentum, rule.weight_decay,
            len(columns), depth, *flags, wide, num_warps=warps,
        )  # fmt: skip
    elif not rule.only_active:
        programs = triton.cdiv(num_classes, CLASSES)
        edges = torch.arange(programs + 1, dtype=torch.int32, device=columns.device) * CLASSES
        segments = torch.searchsorted(columns, edges, out_int32=True)
        _sweep[(programs,)](
            *entries, segments, embeddings, *given, largest, rule.lr, rule.momentum,
            rule.weight_decay, num_classes, depth, *flags, CLASSES, wide, num_warps=warps,
        )  # fmt: skip
    return _error(largest)


def sgd_update_rows(
    classes: slice, rows: Tensor, state: PrototypeState, rule: SgdRule, unit_factor: Tensor | None
) -> Tensor:
    """See ``head_reference.sgd_update_rows``."""
    depth = state.prototypes.shape[1]
    given, largest = _arguments(state.part(classes), rule)
    wide = power_of_two(depth)
    _given[(len(rows),)](
        rows.contiguous(), *given, largest if unit_factor is None else unit_factor.float(), largest,
        rule.lr, rule.momentum, rule.weight_decay, depth,
        state.momentum is not None, rule.nesterov, rule.only_active, unit_factor is not None, wide,
        num_warps=1 if wide <= 512 else 4,
    )  # fmt: skip
    return _error(largest)


def find_support(
    batch: Batch,
    maxima: Tensor,
    target: Target,
    slack: Tensor,
    *,
    scale: float,
    b: float,
    limit: int,
    expected: Lengths | None,
    has_gradient: bool,
) -> Support:
    """Like ``heads.sparse.find_support``, but without waiting for the device where possible.

    ``expected`` are lengths of an earlier batch's lists. Wrong lengths cost time, not correctness:
    ``Support.verify`` finds out, and raises ``ListOverflow`` beyond the limit.
    """
    totals = torch.empty(2, dtype=torch.int64, device=maxima.device)
    pair_room = candidate_room = None
    if expected is not None:
        pair_room = min(_with_spare(expected.pairs), limit)
        candidate_room = _with_spare(expected.candidates)
    rooms: dict[str, Any] = {"room": pair_room, "limit": limit, "total": totals[:1]}
    rooms["lower"] = None if batch.reference is None else batch.reference.group_minima()
    pairs = list_pairs(maxima, target, slack, scale=scale, b=b, **rooms)
    candidates, lengths = _score_listed(batch, pairs, totals, candidate_room)
    solved = solve_lists(candidates, target, scale=scale, b=b)
    pulled = sorted_classes = None
    if has_gradient:
        pulled = pull_rows(solved, batch.prototypes, batch.inverse_norms)
        sorted_classes = class_order(candidates.columns, batch.labels)
    room = Lengths(len(pairs.groups), len(candidates.rows))
    return Support(solved, pulled, sorted_classes, lengths, room, limit)


def _with_spare(length: int) -> int:
    return -(-(length + length // 4) // ROOM) * ROOM
