"""Rows on a CPU by short lists: maxima of groups, a bound, the classes above it, their root.

Classes fall into groups of ``GROUP`` consecutive ones. The root over some of the groups' maxima
and the target is a lower bound of ``tau`` (M13), and so is every Newton iterate towards it (M5).
Classes at or below that bound plus the edge are certainly inactive (M3). The others are listed,
packed and solved in float64, from that bound on. The last ``k % GROUP`` classes are always listed.

Two operations touch all logits: the maxima, and the zeros of a gradient. All others take pieces of
at most ``PIECE`` numbers, which PyTorch computes on one thread. If other processes share the cores,
every operation on several threads waits some milliseconds for the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qmargin.kernels.solver import MAX_STEPS, loss_from_sums, row_exp, slacks, uses_slack

GROUP = 32  # consecutive classes, represented by their maximum
PIECE = (1 << 15) - 1  # numbers that an operation may have and stay on one thread
BLOCK = 1 << 20  # numbers of an operation that needs all threads: copies stay small
NUM_BOUNDING = 256  # maxima, at most, from which a row's first bound is made
BOUND_TOLERANCE = 0.1  # of the mass at that bound: it need not converge
SAMPLED = 1 << 18  # number of logits from which on a sample is checked first for too long lists
MOST_SWEEPS = 8  # pieces that cost less than waiting for a second thread
QUERIES = 199  # searches that may be made at once and stay on one thread
WORTH_LISTING = 4  # list classes when at most 1 in 4 can be active


class Lifted(NamedTuple):
    """A batch of rows, logits ``scale * values``, with the target lifted out."""

    values: Tensor  # [B, k]
    scale: float
    b: float  # alpha - 1
    labels: Tensor  # [B]
    target_logits: Tensor  # [B] float64
    target_log_reference: Tensor  # [B] float64


class Entries(NamedTuple):
    """Posterior of some classes, the target not among them."""

    place: Tensor  # [n] in the flattened batch
    rows: Tensor  # [n]
    posterior: Tensor  # [n]


class SolvedLists(NamedTuple):
    """Solved rows, ``[B]`` float64 each if not said otherwise."""

    value: Tensor
    anchor: Tensor
    level: Tensor
    support_size: Tensor  # int64
    mass_error: Tensor
    target_posterior: Tensor
    others_mass: Tensor
    num_evaluations: int
    entries: list[Entries]  # of all classes that can be active
    posterior: Tensor | None = None  # [B, k], instead of entries where these would be too many


def serves(values: Tensor, b: float) -> bool:
    """Whether ``solve`` supports such rows: heights, and powers with proven Newton steps."""
    has_groups = values.device.type == "cpu" and values.shape[1] >= 2 * GROUP and len(values) > 0
    return has_groups and has_powers(b)


def has_powers(b: float) -> bool:
    """Whether ``Heights`` has this ``alpha - 1``."""
    return 0.0 < b <= 1.0 and not uses_slack(b)


def group_maxima(values: Tensor, labels: Tensor | None) -> Tensor:
    """Maxima of the full groups, ``[B, k // GROUP]``, the labelled class of each row left out."""
    num_groups = values.shape[1] // GROUP
    grouped = values[:, : num_groups * GROUP].unflatten(1, (num_groups, GROUP))
    maxima = cat([grouped[part].amax(2) for part in sweeps(values)])
    if labels is not None:
        group = (labels // GROUP).clamp_max_(num_groups - 1)[:, None]
        columns = group * GROUP + torch.arange(GROUP)
        members = values.gather(1, columns).masked_fill_(columns == labels[:, None], -math.inf)
        maxima.scatter_(1, group, members.amax(1, keepdim=True))
    return maxima


def list_above(
    values: Tensor, maxima: Tensor, floor: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Classes of full groups above their row's floor, in pieces and in ascending order.

    Yields places in the flattened batch, rows, and values. ``values`` is contiguous.
    """
    num_classes, num_groups = values.shape[1], maxima.shape[1]
    # Every window of GROUP consecutive numbers: selecting rows of it copies whole groups.
    shape = (values.numel() - GROUP + 1, GROUP)
    windows = values.as_strided(shape, (1, 1))
    # Lists are mostly shorter than twice the maxima; longer ones only cost threads.
    step = PIECE // GROUP
    for part in pieces(len(values), 2 * num_groups):
        is_listed = maxima[part] > floor[part, None]
        pair = is_listed.view(-1).nonzero().view(-1)
        row = pair.div(num_groups, rounding_mode="floor")
        # Group g of row r is pair r num_groups + g, and begins at r k + GROUP g.
        first = torch.add(row * (num_classes - GROUP * num_groups), pair, alpha=GROUP)
        if part.start:
            first += part.start * num_classes
            row += part.start
        lowest = floor.index_select(0, row)[:, None]
        hits, found = [], []
        for begin in range(0, len(pair), step):
            members = windows.index_select(0, first[begin : begin + step])
            is_above = members > lowest[begin : begin + step]
            hit = is_above.view(-1).nonzero().view(-1)
            found.append(members.view(-1).index_select(0, hit))
            hits.append(hit.add_(begin * GROUP) if begin else hit)
        if hits:
            hit = cat(hits)
            which = hit >> GROUP.bit_length() - 1
            places = first.index_select(0, which).add_(hit.bitwise_and_(GROUP - 1))
            yield places, row.index_select(0, which), cat(found)


def certain_floor(tau: Tensor, b: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Value at and below which a class is certainly inactive given ``tau`` or a bound (M3)."""
    floor = (tau - 1.0 / b) / scale
    return (floor - 1e-6 * floor.abs() - 1e-30).to(dtype)  # classes within rounding stay candidates


class Heights:
    """Heights of packed classes at any level, ``[n, w]``; the last column is the target.

    With ``q x^n = (q^b x)^n`` the target's posterior is a power as the others' are.
    """

    def __init__(self, gaps: Tensor, factor: Tensor, b: float) -> None:
        self.gaps, self.factor, self.b = gaps, factor, b  # [n, w]; [n]: q ** b of the target
        self.values = torch.empty_like(gaps)
        self.own, self.others = self.values[:, -1], self.values[:, :-1]

    def powers(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior at levels ``[n]``, and its slope; both ``[n, w]``, the target's over q^b."""
        heights, b = self.values, self.b
        torch.sub(level[:, None], self.gaps, alpha=b, out=heights)
        self.own.mul_(self.factor)
        heights.clamp_min_(0.0)
        if b == 1.0:
            return heights, (heights > 0).double()
        if b == 0.5:
            return heights * heights, heights
        if b == 0.25:
            square = heights * heights
            cube = heights * square
            return square.mul_(square), cube
        posterior = heights.pow(1.0 / b)
        return posterior, posterior / heights.clamp_min(1e-300)

    def climb(self, level: Tensor, tolerance: float) -> tuple[Tensor, int]:
        """Level at the root by Newton's method on ``mass ** b`` (M5), and the evaluations."""
        for count in range(1, MAX_STEPS + 1):
            posterior, slopes = self.powers(level)
            mass = posterior.sum(1)
            slope = torch.addcmul(slopes[:, :-1].sum(1), slopes[:, -1], self.factor)
            update = mass.pow(-self.b).sub_(1.0).mul_(mass).div_(slope)
            level = level + update
            if not bool((mass.sub_(1.0).abs_() > tolerance).any()):  # NaN is done
                break
            if count > 8 and not bool((update.abs() > 4e-16 * level.abs()).any()):
                break
        return level, count


class Start(NamedTuple):
    """Where the search for a row's root begins, ``[B]`` float64 each."""

    anchor: Tensor  # logit that the level belongs to
    level: Tensor  # at a lower bound of tau
    own_gap: Tensor  # from the target's logit up to the anchor
    factor: Tensor  # q ** b of the target


class ListSums(NamedTuple):
    """Sums over lists at their roots, ``[B]`` float64 each if not said otherwise."""

    level: Tensor
    others_mass: Tensor
    excess: Tensor  # sum of p_j x_j over the others
    target_posterior: Tensor
    support_size: Tensor  # int64


def start_rows(top: Tensor, own: Tensor, own_log_reference: Tensor, b: float) -> Start:
    """The best bound of a single class (M4), from each row's largest other logit and its target."""
    cost = row_exp(-b * own_log_reference)
    factor, slack = 1.0 / cost, slacks(cost, b)
    is_target = own - slack > torch.add(top, own.abs().add_(slack.abs()), alpha=1e-15)
    anchor = torch.where(is_target, own, top)
    anchor = torch.add(anchor, factor, alpha=0.0)  # NaN for an infinite measure
    return Start(anchor, torch.where(is_target, cost, 1.0), anchor - own, factor)


def raise_bound(
    few: Tensor, start: Start, scale: float, b: float, tolerance: float
) -> tuple[Start, int]:
    """A bound from few values of each row ``[B, n]`` and the target, and the evaluations (M13)."""
    levels, counts = [], []
    for part in pieces(len(few), few.shape[1] + 1):
        anchor, level, own_gap, factor = (cut(numbers, part) for numbers in start)
        gaps = anchor[:, None] - cut(few, part).double() * scale
        gaps = torch.cat([gaps, own_gap[:, None]], 1)
        found, count = Heights(gaps, factor, b).climb(level, tolerance)
        levels.append(found)
        counts.append(count)
    return start._replace(level=cat(levels)), max(counts)


def solve_entries(
    values: Tensor,
    row: Tensor,
    firsts: Tensor,
    rest: Tensor | None,
    start: Start,
    scale: float,
    b: float,
) -> tuple[ListSums, list[Tensor], list[Tensor], int]:
    """Roots of rows whose entries are listed one row after another.

    Args:
        values: ``[n]`` of the entries.
        row: ``[n]``: their rows.
        firsts: ``[B + 1]``: where each row's entries begin.
        rest: ``[B, r]``: values of more classes of every row.
        start: Lower bounds.
        scale: From values to logits.
        b: ``alpha - 1``.

    Returns:
        The sums, the posterior of the entries and that of the rest, both in pieces of consecutive
        rows, and the largest number of evaluations.
    """
    longest, num_rest = int(firsts.diff().max()), 0 if rest is None else rest.shape[1]
    width = longest + num_rest + 1
    tolerance = 1e-14 if values.dtype == torch.float64 else 1e-9
    sums, of_entries, of_rest, counts = [], [], [], []
    for part in pieces(len(firsts) - 1, width):
        anchor, level, own_gap, factor = (cut(numbers, part) for numbers in start)
        begins = firsts[part.start : part.start + len(anchor) + 1]
        listed = slice(int(begins[0]), int(begins[-1]))
        its_row = cut(row, listed) - part.start
        # Entry i of row r has place i - firsts[r] in it.
        shift = torch.arange(0, len(anchor) * width, width) - begins[:-1]
        slot = torch.arange(listed.start, listed.stop).add_(shift.index_select(0, its_row))
        gaps = torch.full((len(anchor), width), math.inf, dtype=torch.float64)
        gap = anchor.index_select(0, its_row).sub_(cut(values, listed).double() * scale)
        gaps.view(-1).scatter_(0, slot, gap)
        if rest is not None and num_rest:
            logits = cut(rest, part).double() * scale
            torch.sub(anchor[:, None], logits, out=gaps[:, longest:-1])
        gaps[:, -1] = own_gap
        heights = Heights(gaps, factor, b)
        level, count = heights.climb(level, tolerance)
        posterior, _ = heights.powers(level)
        others = posterior[:, :-1]
        excess, support = (others * heights.others).sum(1), (posterior > 0).sum(1)
        sums.append((level, others.sum(1), excess, posterior[:, -1].clone(), support))
        of_entries.append(posterior.view(-1).index_select(0, slot).to(values.dtype))
        of_rest.append(posterior[:, longest:-1].to(values.dtype))
        counts.append(count)
    joined = ListSums(*map(cat, zip(*sums, strict=True)))
    mass = torch.add(joined.others_mass, joined.level, alpha=0.0)  # NaN rows stay NaN
    return joined._replace(others_mass=mass), of_entries, of_rest, max(counts)


def solve_all(
    values: Tensor, labels: Tensor, start: Start, scale: float, b: float
) -> tuple[ListSums, Tensor, int]:
    """Roots of rows over all their classes, the posterior of the others ``[B, k]``, evaluations."""
    num_rows, width = len(values), values.shape[1] + 1
    tolerance = 1e-14 if values.dtype == torch.float64 else 1e-9
    kept, sums, counts = torch.empty_like(values), [], []
    for part in pieces(num_rows, width, PIECE if width <= PIECE else BLOCK):
        anchor, level, own_gap, factor = (cut(numbers, part) for numbers in start)
        gaps = torch.empty((len(anchor), width), dtype=torch.float64)
        torch.sub(anchor[:, None], values[part].double() * scale, out=gaps[:, :-1])
        gaps.scatter_(1, labels[part, None], math.inf)
        gaps[:, -1] = own_gap
        heights = Heights(gaps, factor, b)
        level, count = heights.climb(level, tolerance)
        posterior, _ = heights.powers(level)
        others = posterior[:, :-1]
        kept[part] = others
        excess, support = (others * heights.others).sum(1), (posterior > 0).sum(1)
        sums.append((level, others.sum(1), excess, posterior[:, -1].clone(), support))
        counts.append(count)
    return ListSums(*map(cat, zip(*sums, strict=True))), kept, max(counts)


def solve(rows: Lifted) -> SolvedLists:
    """Solve every row on the classes that can be active, or on all where these are too many."""
    values, scale, b, labels, own, own_log_reference = rows
    values = values.contiguous()
    num_rows, num_classes = values.shape
    maxima = group_maxima(values, labels)
    rest = last_classes(values, labels)
    few = few_maxima(maxima, rest)
    start = start_rows(few.amax(1).double() * scale, own, own_log_reference, b)
    start, num_bounding = raise_bound(few, start, scale, b, BOUND_TOLERANCE)
    floor = certain_floor(start.anchor - slacks(start.level, b), b, scale, values.dtype)
    entries: list[Entries] = []
    posterior = None
    listed = list_rows(values, maxima, floor, labels)
    if listed is None:
        sums, posterior, num_evaluations = solve_all(values, labels, start, scale, b)
    else:
        index, row, found, firsts = listed
        given = (found, row, firsts, rest, start, scale, b)
        sums, of_entries, of_rest, num_evaluations = solve_entries(*given)
        sizes = [len(part) for part in of_entries]
        parts = zip(index.split(sizes), row.split(sizes), of_entries, strict=True)
        entries = [Entries(*part) for part in parts]
        if rest.shape[1]:
            which = torch.arange(num_rows).repeat_interleave(rest.shape[1])
            columns = torch.arange(num_classes - rest.shape[1], num_classes).repeat(num_rows)
            entries.append(Entries(which * num_classes + columns, which, cat(of_rest).reshape(-1)))
    level, others_mass, excess, own_posterior, support = sums
    target_level = torch.sub(level, start.own_gap, alpha=b)
    value, target = loss_from_sums(excess, others_mass, target_level, own_log_reference, b)
    error = (others_mass + own_posterior).sub_(1.0).abs_()
    numbers = (value, start.anchor, level, support, error, target, others_mass)
    return SolvedLists(*numbers, num_bounding + num_evaluations, entries, posterior)


def list_rows(
    values: Tensor, maxima: Tensor, floor: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Classes of full groups above their row's floor; None where these are too many.

    Places in the flattened batch ``[n]``, rows ``[n]``, values ``[n]``, targets masked, and
    where each row begins, ``[B + 1]``.
    """
    num_rows, num_classes = values.shape
    if values.numel() >= SAMPLED:  # avoid making lists that are too long
        sample = values[:, :: values.numel() >> 12] > floor[:, None]
        if int(sample.sum()) * WORTH_LISTING > sample.numel():
            return None
    listed = list(list_above(values, maxima, floor))
    if not listed:
        listed = [(labels[:0], labels[:0], values.view(-1)[:0])]
    index, row, found = (cat(column) for column in zip(*listed, strict=True))
    if len(index) * WORTH_LISTING > values.numel():
        return None
    borders = torch.arange(0, values.numel() + 1, num_classes)
    wanted = torch.cat([borders, borders[:-1] + labels])
    places = cat([torch.searchsorted(index, some) for some in wanted.split(QUERIES)])
    if len(index):
        place = places[num_rows + 1 :].clamp_max_(len(index) - 1)
        is_listed = index.index_select(0, place) == wanted[num_rows + 1 :]
        found.index_fill_(0, place[is_listed], -math.inf)
    return index, row, found, places[: num_rows + 1]


def last_classes(values: Tensor, labels: Tensor) -> Tensor:
    """Values of the classes behind the last full group, ``[B, k % GROUP]``, the target masked."""
    first = values.shape[1] // GROUP * GROUP
    rest = values[:, first:]
    if not rest.shape[1]:
        return rest
    return rest.masked_fill(torch.arange(first, values.shape[1]) == labels[:, None], -math.inf)


def pieces(num_rows: int, width: int, most: int = PIECE) -> Iterator[slice]:
    """Ranges of rows with at most ``most`` numbers together, and at least one row."""
    size = max(1, most // width)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def sweeps(values: Tensor) -> list[slice]:
    """Ranges of rows for operations on all classes: a few for one thread, or one for all."""
    num_rows, num_classes = values.shape
    parts = list(pieces(num_rows, num_classes))
    is_small = num_classes <= PIECE and len(parts) <= MOST_SWEEPS
    return parts if is_small else [slice(0, num_rows)]


def cut(tensor: Tensor, part: slice) -> Tensor:
    """A range of a tensor; all of it as it is."""
    return tensor if part.start == 0 and part.stop >= len(tensor) else tensor[part]


def cat(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """The tensors one after another; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def few_maxima(maxima: Tensor, rest: Tensor) -> Tensor:
    """Values of at most ``NUM_BOUNDING`` classes of each row, the largest among them."""
    num_rows, num_groups = maxima.shape
    fold = -(-num_groups // NUM_BOUNDING)
    count = num_groups // fold
    if fold == 1:
        few = maxima
    else:
        few = maxima.new_empty((num_rows, count))
        for part in pieces(num_rows, num_groups):
            folded = maxima[part, : count * fold].unflatten(1, (fold, count))
            torch.amax(folded, 1, out=few[part])
            if count * fold < num_groups:
                left = maxima[part, count * fold :].amax(1)
                torch.maximum(few[part, 0], left, out=few[part, 0])
    return few if not rest.shape[1] else torch.cat([few, rest.amax(1, keepdim=True)], 1)


def zeros(like: Tensor) -> Tensor:
    """Contiguous zeros of the same shape ``[B, k]``."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    for part in sweeps(out):
        out[part].zero_()
    return out


def write_posterior(out: Tensor, entries: Iterable[Entries], weights: Tensor) -> None:
    """Write listed posteriors, times the weight of their row, into a contiguous ``[B, k]``."""
    flat = out.view(-1)
    for place, rows, posterior in entries:
        flat.scatter_(0, place, posterior * weights.index_select(0, rows))
