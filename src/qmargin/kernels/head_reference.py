"""The head's operations in plain PyTorch, and the records that they exchange.

Reference for the kernels, and the implementation on a CPU. No operation makes a ``[B, k]`` or a
``[k, d]`` tensor, apart from its result. Classes come in groups of ``GROUP`` consecutive ones. A
*pair* is a row and a group that may hold active classes of that row. Pairs and candidates are
listed row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from qmargin.devices import Reading
from qmargin.errors import ConfigError
from qmargin.kernels import lists
from qmargin.kernels.solver import (
    label_loss,
    level_cost,
    loss_from_sums,
    posterior_rows,
    reference_gradient,
    slacks,
    solve_rows,
    tau_from_below,
)

GROUP = 32  # consecutive classes that are listed together
BLOCK_CLASSES = 1 << 14  # classes scored at a time: [B, 16384] stays in cache for usual batches
UPDATE_CLASSES = 1 << 13  # prototypes updated at a time, at least
UPDATE_NUMBERS = 1 << 22  # their elements: 16 MiB each for gradient and temporaries
BLOCK_ENTRIES = 1 << 16  # gathered prototypes at a time
NUM_MEASURED = 512  # sets of groups from which a row's bound is made where they have measures
GROUP_ROWS = 8  # that are scored with a group's prototypes at a time
DENSE_SHARE = 1 / 64  # of all pairs: with more, a product with all classes is faster


class Target(NamedTuple):
    """The target's term of each row, from the margin, ``[B]`` float64 each."""

    logits: Tensor
    log_reference: Tensor


class PreparedRows(NamedTuple):
    """A batch ready for the screen."""

    embeddings: Tensor  # [B, d] unit length
    rounded: Tensor  # [B, d] in the dtype of the copy
    rounding: Tensor  # [B] length of the rounding error
    targets: Tensor  # [B, d] unit prototypes of the rows' own classes, from the master prototypes
    target_cosines: Tensor  # [B] with them


def minima_of(classes: Tensor) -> Tensor:
    """The smallest of each group, ``[ceil(k / GROUP)]``."""
    missing = -len(classes) % GROUP
    return pad(classes, (0, missing), value=math.inf).view(-1, GROUP).amin(1)


class RowReference(NamedTuple):
    """Log reference measure of the classes but the target (M14)."""

    classes: Tensor | None  # [k] float64, the same in every row; None for zero
    pair: Callable[[Tensor], Tensor] | None  # given the target, from cosines of prototypes
    targets: Tensor  # [B, d]: unit prototypes of the rows' own classes, from any rank
    bounds: tuple[float, float]  # of the sum of both, over the classes of all ranks
    pair_low: float  # of what ``pair`` gives
    stamp: int | None  # version of ``classes``, if it has one
    groups: Tensor | None = None  # ``minima_of`` the classes, if that is known

    def group_minima(self) -> Tensor | None:
        """Lower bound of each group, ``[ceil(k / GROUP)]`` float64, for the screen (M16).

        None where every class has at least measure one: then a bound without any holds.
        """
        if self.bounds[0] >= 0.0 and self.classes is None:
            return None
        if self.classes is None:
            return torch.full((1,), self.pair_low, dtype=torch.float64, device=self.targets.device)
        groups = minima_of(self.classes) if self.groups is None else self.groups
        return groups + self.pair_low

    def part(self, classes: slice, unit: Tensor, dtype: torch.dtype) -> Tensor:
        """Log measures of consecutive classes with these unit prototypes, ``[1, n]`` or ``[B, n]``.

        The targets' own count as any other class's.
        """
        total = torch.zeros((1, len(unit)), dtype=dtype, device=unit.device)
        if self.classes is not None:
            self.check()
            total = self.classes[classes].to(dtype)[None]
        if self.pair is not None:
            cosines = product(self.targets.to(unit.dtype), unit.t()).to(dtype)
            total = total + self.pair(cosines).detach()
        return total

    def check(self) -> None:
        """Raise if the numbers of the classes changed since the step began."""
        if self.classes is None or self.stamp is None:
            return
        if self.classes._version != self.stamp:
            raise ConfigError(
                "the reference changed between a forward pass and its backward pass; change it "
                "after the step, or let per_class return a new tensor"
            )


class Batch(NamedTuple):
    """A batch and the prototypes it is scored with."""

    prepared: PreparedRows
    copy: Tensor  # [K, d] rounded unit prototypes
    prototypes: Tensor  # [k, d]
    inverse_norms: Tensor  # [k]
    labels: Tensor  # [B]
    reference: RowReference | None = None  # None if all classes but the targets have measure one


class Lengths(NamedTuple):
    """Lengths of a batch's lists: those of one step are a good guess for the next."""

    pairs: int
    candidates: int


class ListOverflow(Exception):
    """The lists of a batch exceed their limit: redo it by blocks of classes (F7)."""

    def __init__(self, maxima: Tensor | None = None) -> None:
        super().__init__()
        self.maxima = maxima  # of groups, if they still exist


class Pairs(NamedTuple):
    """Rows and the groups that may hold active classes of theirs, row by row."""

    groups: Tensor  # [n]
    rows: Tensor  # [n]
    starts: Tensor  # [B + 1]: where each row's pairs begin
    floor: Tensor  # [B]: exact cosines at or below it are certainly inactive
    slack: Tensor  # [B]: how far a screened cosine may be from the exact one


class Candidates(NamedTuple):
    """Classes that can be active, row by row, with their exact cosines."""

    rows: Tensor  # [n]
    columns: Tensor  # [n]
    scores: Tensor  # [n]
    starts: Tensor  # [B + 1]
    log_reference: Tensor | None = None  # [n] float64; None for zero


class SolvedRows(NamedTuple):
    """Loss and posterior of a batch, the posterior as lists, row by row."""

    loss: Tensor  # [B] float64
    tau: Tensor  # [B] float64
    others_mass: Tensor  # [B] float64, posterior mass of all classes but the target
    in_reference: Tensor  # [B] float64, gradient of the loss in the target's log reference
    mass_error: Tensor  # [B] float64
    rows: Tensor  # [n]: the batch's candidates, row by row
    columns: Tensor  # [n]: their classes
    posterior: Tensor  # [n], zero for inactive candidates
    starts: Tensor  # [B + 1]: where each row's list begins


class ClassOrder(NamedTuple):
    """A batch's candidates and targets in ascending order of class."""

    columns: Tensor  # [n + B]
    order: Tensor  # [n + B]: which candidate, or from num_candidates on, which row's target
    num_candidates: int  # room included


@dataclass
class Support:
    """A solution with the inputs of a backward pass, valid if the list sizes sufficed."""

    solved: SolvedRows
    pulled: Tensor | None  # [B, d]: sum of posterior times unit prototype over the others
    order: ClassOrder | None
    lengths: Reading
    room: Lengths  # that the lists had
    limit: int  # of the pairs
    others_support: Tensor | None = None  # [B] over all ranks, where there are several

    def verify(self) -> Lengths | None:
        """Wait for the true lengths; None if the lists were too short."""
        found = Lengths(*self.lengths.wait().tolist())
        if found.pairs > self.limit:
            raise ListOverflow
        if found.pairs > self.room.pairs or found.candidates > self.room.candidates:
            return None
        return found

    def cut(self, num_candidates: int) -> SolvedRows:
        """The solution without the spare entries of the lists."""
        names = ("rows", "columns", "posterior")
        cut = {name: getattr(self.solved, name)[:num_candidates] for name in names}
        return self.solved._replace(**cut)


class ClassGradient(NamedTuple):
    """Gradient of the cosines' classes as a sparse matrix, sorted by class."""

    columns: Tensor  # [n], ascending
    rows: Tensor  # [n]
    values: Tensor  # [n]

    def part(self, entries: slice | Tensor) -> ClassGradient:
        """Some of the entries."""
        return ClassGradient(*(part[entries] for part in self))


class PrototypeState(NamedTuple):
    """Tensors that an update of the prototypes reads and rewrites in place."""

    prototypes: Tensor  # [k, d]
    momentum: Tensor | None  # [k, d]; None for an update without momentum
    inverse_norms: Tensor  # [k]: read for the gradient, then rewritten
    copy: Tensor  # [K, d], K >= k: unit prototypes in the precision of the screen

    def part(self, classes: slice) -> PrototypeState:
        """Views of consecutive classes."""
        momentum = None if self.momentum is None else self.momentum[classes]
        kept = (self.inverse_norms[classes], self.copy[classes])
        return PrototypeState(self.prototypes[classes], momentum, *kept)


class SgdRule(NamedTuple):
    """Settings of a step of ``torch.optim.SGD`` without dampening; buffers start at zero."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    grad_scale: Tensor  # scalar on the device; if it is not finite, nothing is written
    only_active: bool  # step only classes whose gradient is not exactly zero


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left @ right``; half operands are summed, and returned, in float32."""
    if left.dtype not in (torch.float16, torch.bfloat16):
        return torch.matmul(left, right, out=out)
    if left.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):  # torch 2.8 and later
        if out is None:
            shape = (left.shape[0], right.shape[1])
            out = torch.empty(shape, dtype=torch.float32, device=left.device)
        result: Tensor = torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        return result
    return torch.matmul(left.float(), right.float(), out=out)


def refresh_copy(prototypes: Tensor, copy: Tensor, inverse_norms: Tensor) -> Tensor:
    """Write unit prototypes into ``copy`` ``[K, d]``, ``K >= k``, and their inverse norms ``[k]``.

    Returns ``max_j |w_j - copy_j|``, half of the certificate of the screen (F3); NaN if a prototype
    has no direction.
    """
    largest = prototypes.new_zeros(())
    for start in range(0, len(prototypes), BLOCK_ENTRIES):
        block = prototypes[start : start + BLOCK_ENTRIES]
        inverse = inverse_lengths(block)
        if copy.dtype == block.dtype:  # nothing is rounded
            inverse_norms[start : start + len(block)] = inverse
            torch.mul(block, inverse[:, None], out=copy[start : start + len(block)])
            largest = largest + 0.0 * inverse.sum()
            continue
        unit = block * inverse[:, None]
        inverse_norms[start : start + len(block)] = inverse
        rounded = unit.to(copy.dtype)
        copy[start : start + len(block)] = rounded
        largest = torch.maximum(largest, (unit - rounded.to(unit.dtype)).norm(dim=1).amax())
    return largest


def inverse_lengths(rows: Tensor) -> Tensor:
    """Inverse norms ``[n]`` of rows ``[n, d]``; NaN where one is zero or not finite."""
    norms = rows.norm(dim=1)
    return torch.where((norms > 0) & (norms < math.inf), 1.0 / norms, math.nan)


def unit_rows(embeddings: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Embeddings divided by their lengths, ``[B, d]``, and the lengths ``[B]``.

    Rows whose label is ``ignored`` are taken as all ones. Rows whose length overflows become NaN.
    """
    embeddings = torch.where((labels == ignored)[:, None], 1.0, embeddings)
    norms = embeddings.norm(dim=1)
    return embeddings / torch.where(norms < math.inf, norms, math.nan)[:, None], norms


def unit_gradient(gradient: Tensor, unit: Tensor, norms: Tensor) -> Tensor:
    """Gradient of the embeddings from that of the unit embeddings: its tangent, over the length."""
    radial = (gradient * unit).sum(1, keepdim=True)
    return (gradient - radial * unit) / norms[:, None]


def prepare_rows(
    embeddings: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    inverse_norms: Tensor,
    dtype: torch.dtype,
) -> PreparedRows:
    """Rounded embeddings, the length of their rounding errors (F3), and the target's cosines."""
    rounded = embeddings.to(dtype)
    rounding = (embeddings - rounded.to(embeddings.dtype)).norm(dim=1)
    own = prototypes[labels] * inverse_norms[labels][:, None]
    return PreparedRows(embeddings, rounded, rounding, own, (embeddings * own).sum(1))


def group_maxima(embeddings: Tensor, copy: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Largest cosine of each group, ``[B, ceil(k / GROUP)]``, the target and padding left out."""
    num_groups = -(-num_classes // GROUP)
    if embeddings.dtype in (torch.float16, torch.bfloat16):
        embeddings = embeddings.float()  # products and maxima are float32, as F3 assumes
    maxima = embeddings.new_full((len(embeddings), num_groups), -math.inf)
    for start in range(0, num_classes, BLOCK_CLASSES):
        stop = min(start + BLOCK_CLASSES, num_classes)
        cosines = embeddings @ copy[start:stop].to(embeddings.dtype).t()  # [B, block]
        drop_targets_(cosines, labels - start)
        full, first = (stop - start) // GROUP, start // GROUP
        if full:
            grouped = cosines[:, : full * GROUP].unflatten(1, (full, GROUP))
            torch.amax(grouped, 2, out=maxima[:, first : first + full])
        if full * GROUP < stop - start:
            maxima[:, first + full] = cosines[:, full * GROUP :].amax(1)
    return maxima


def drop_targets_(cosines: Tensor, local_labels: Tensor) -> None:
    """Mask each row's target where it lies among these columns, without waiting for the device."""
    num_columns = cosines.shape[1]
    is_here = (local_labels >= 0) & (local_labels < num_columns)
    index = local_labels.clamp(0, num_columns - 1)[:, None]
    kept = cosines.gather(1, index)
    cosines.scatter_(1, index, kept.masked_fill(is_here[:, None], -torch.inf))


def list_pairs(
    maxima: Tensor,
    target: Target,
    slack: Tensor,
    *,
    scale: float,
    b: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
    lower: Tensor | None = None,
) -> Pairs:
    """Pairs that may hold active classes (F1, F4), for maxima ``[B, g]`` within ``slack`` (F3).

    ``reduce`` is the maximum of the floors over the ranks, each of which has one from its own
    classes and its own slack. ``lower`` bounds the log references of each group, ``[g]`` or
    ``[1]``, from below (M16); without it they are not negative.
    """
    if lower is None:
        bound = _bound_from_maxima(maxima, target, scale, b)
    else:
        bound = _bound_with_reference(maxima, lower, target, scale, b)
    edge = (bound - 1.0 / b) / scale
    floor = edge - slack if reduce is None else reduce(edge - slack)
    lowest, counts, found = floor - slack, [], []
    for part in lists.pieces(len(maxima), max(1, maxima.shape[1])):
        is_listed = maxima[part].double() > lowest[part, None]
        counts.append(is_listed.sum(1))
        found.append(is_listed.nonzero() + torch.tensor([part.start, 0], device=maxima.device))
    starts = pad(lists.cat(counts).cumsum(0), (1, 0))
    rows, groups = lists.cat(found).unbind(1)
    return Pairs(groups.contiguous(), rows.contiguous(), starts, floor, slack)


def _bound_from_maxima(maxima: Tensor, target: Target, scale: float, b: float) -> Tensor:
    """Lower bound of ``tau`` from maxima ``[B, g]`` of groups and the target, ``[B]`` (F1)."""
    if maxima.device.type == "cpu" and maxima.numel() and lists.has_powers(b):
        few = lists.few_maxima(maxima, maxima[:, :0])
        top = few.amax(1).double() * scale
        start = lists.start_rows(top, target.logits, target.log_reference, b)
        start, _ = lists.raise_bound(few, start, scale, b, 1e-6)
        return start.anchor - slacks(start.level, b)
    logits = torch.cat([maxima.double() * scale, target.logits[:, None]], 1)
    reference = torch.zeros_like(logits)
    reference[:, -1] = target.log_reference
    return tau_from_below(logits, reference, b, tolerance=1e-6)


def _bound_with_reference(
    maxima: Tensor, lower: Tensor, target: Target, scale: float, b: float
) -> Tensor:
    """The same where the classes of a group have at least the measure ``exp(lower)`` (M16).

    Each set of groups is represented by the group that gives the best bound of ``tau`` (M4).
    """
    num_groups, found = maxima.shape[1], []
    count = max(1, min(NUM_MEASURED, num_groups))
    cost = (slacks(level_cost(-lower, b), b) / scale).to(maxima.dtype)
    lower = lower.expand(num_groups)
    for part in lists.pieces(len(maxima), max(1, num_groups), lists.BLOCK):
        keys = pad(maxima[part] - cost, (0, -num_groups % count), value=-math.inf)
        which = keys.unflatten(1, (-1, count)).argmax(1) if num_groups else keys.long()
        best = which * count + torch.arange(count, device=keys.device)
        is_none = best >= num_groups  # no group may count twice
        best = best.masked_fill(is_none, 0)
        logits = maxima[part].gather(1, best).double().mul_(scale)
        logits = logits.masked_fill_(is_none, -math.inf)
        logits = torch.cat([logits, target.logits[part, None]], 1)
        reference = torch.cat([lower[best], target.log_reference[part, None]], 1)
        found.append(tau_from_below(logits, reference, b, tolerance=1e-6))
    return lists.cat(found)


def score_candidates(batch: Batch, pairs: Pairs) -> Candidates:
    """Exact cosines of the classes in listed pairs that can be active, row by row.

    Where many pairs are listed, scoring every class once more is faster than gathering them.
    """
    num_groups = -(-len(batch.prototypes) // GROUP)
    if len(pairs.groups) > DENSE_SHARE * len(batch.labels) * num_groups:
        candidates = _score_blocks(batch, pairs.floor)
    else:
        candidates = _score_pairs(batch, pairs)
    return add_reference(candidates, batch, target_similarities)


def add_reference(
    candidates: Candidates, batch: Batch, similarities: Callable[[Batch, Candidates], Tensor]
) -> Candidates:
    """The candidates with their log references, by the cosines of prototypes where needed."""
    reference = batch.reference
    if reference is None:
        return candidates
    columns = candidates.columns.clamp_max(len(batch.prototypes) - 1)  # some lists have room
    total = None if reference.classes is None else reference.classes[columns]
    if reference.pair is not None:
        pairs = reference.pair(similarities(batch, candidates)).detach().double()
        total = pairs if total is None else total + pairs
    return candidates._replace(log_reference=total)


def target_similarities(batch: Batch, candidates: Candidates) -> Tensor:
    """Cosines of each candidate's prototype with that of its row's own class, ``[n]``."""
    assert batch.reference is not None
    targets, (rows, columns, *_) = batch.reference.targets, candidates
    parts = [targets.new_empty(0)]
    for start in range(0, len(rows), BLOCK_ENTRIES):
        some = slice(start, start + BLOCK_ENTRIES)
        cosines = (targets[rows[some]] * batch.prototypes[columns[some]]).sum(1)
        parts.append(cosines * batch.inverse_norms[columns[some]])
    return torch.cat(parts)


def _score_pairs(batch: Batch, pairs: Pairs) -> Candidates:
    """By group: a few of its rows at a time, against its prototypes."""
    prepared, _, prototypes, inverse_norms, labels, _ = batch
    num_classes, groups, rows = len(prototypes), pairs.groups, pairs.rows
    member = torch.arange(GROUP, device=groups.device)
    scores = prototypes.new_empty((len(groups), GROUP))
    order = groups.argsort(stable=True)  # each group's prototypes are read once
    step = max(1, BLOCK_ENTRIES // GROUP)
    for first in range(0, len(groups), step):
        some = order[first : first + step]
        needed, counts = torch.unique_consecutive(groups[some], return_counts=True)
        # A group with many rows comes several times: places in `vectors` are few and mostly used.
        begins = counts.cumsum(0) - counts
        place = torch.arange(len(some), device=some.device) - begins.repeat_interleave(counts)
        repeats = -(-counts // GROUP_ROWS)
        bags = (repeats.cumsum(0) - repeats).repeat_interleave(counts) + place // GROUP_ROWS
        place = place % GROUP_ROWS
        shape = (int(repeats.sum()), int(place.max()) + 1, prototypes.shape[1])
        vectors = prototypes.new_zeros(shape)
        vectors[bags, place] = prepared.embeddings[rows[some]]
        block = needed.repeat_interleave(repeats)[:, None] * GROUP + member
        block = block.clamp_max(num_classes - 1)
        products = torch.bmm(vectors, prototypes[block].transpose(1, 2))
        scores[some] = (products * inverse_norms[block][:, None])[bags, place]
    columns = groups[:, None] * GROUP + member
    is_candidate = scores.double() > pairs.floor[rows, None]
    is_candidate &= (columns < num_classes) & (columns != labels[rows][:, None])
    pair, which = is_candidate.nonzero(as_tuple=True)
    counts = torch.bincount(rows[pair], minlength=len(labels))
    starts = pad(counts.cumsum(0), (1, 0))
    return Candidates(rows[pair], columns[pair, which], scores[pair, which], starts)


def _score_blocks(batch: Batch, floor: Tensor) -> Candidates:
    """Every class above its row's floor; by F3 all of them lie in listed groups."""
    prepared, _, prototypes, inverse_norms, labels, _ = batch
    lowered = floor.to(prototypes.dtype)  # the largest number at or below the floor
    below = torch.nextafter(lowered, torch.full_like(lowered, -math.inf))
    lowered = torch.where(lowered.double() > floor, below, lowered)
    found, counts = [], []
    for start in range(0, len(prototypes), BLOCK_CLASSES):
        block = slice(start, start + BLOCK_CLASSES)
        if batch.copy.dtype == prototypes.dtype:
            unit = batch.copy[start : min(start + BLOCK_CLASSES, len(prototypes))]
        else:
            unit = prototypes[block] * inverse_norms[block][:, None]
        cosines = prepared.embeddings @ unit.t()
        drop_targets_(cosines, labels - start)
        rows, columns = (cosines > lowered[:, None]).nonzero(as_tuple=True)
        found.append((rows, columns + start, cosines[rows, columns]))
        counts.append(torch.bincount(rows, minlength=len(labels)))
    # From block by block to row by row: each block's part of a row has its place.
    sizes = torch.stack(counts)  # [blocks, B]
    starts = pad(sizes.sum(0).cumsum(0), (1, 0))
    firsts = starts[:-1] + sizes.cumsum(0) - sizes - (sizes.cumsum(1) - sizes)
    order = zip(firsts, found, strict=True)
    places = torch.cat(
        [first[r] + torch.arange(len(r), device=r.device) for first, (r, *_) in order]
    )
    parts = map(torch.cat, zip(*found, strict=True))
    listed = [torch.empty_like(part).index_copy_(0, places, part) for part in parts]
    return Candidates(listed[0], listed[1], listed[2], starts)


def solve_lists(candidates: Candidates, target: Target, *, scale: float, b: float) -> SolvedRows:
    """Root, posterior and loss of every row from the exact scores of all that can be active."""
    rows, columns, scores, starts, log_reference = candidates
    is_one = log_reference is None
    if is_one and scores.device.type == "cpu" and len(starts) > 1 and lists.has_powers(b):
        return _solve_pieces(candidates, target, scale, b)
    counts = starts.diff()
    width = int(counts.max()) if len(counts) else 0
    position = torch.arange(len(rows), device=rows.device) - starts[rows]
    logits = scores.new_full((len(counts), width + 1), -math.inf, dtype=torch.float64)
    logits[rows, position] = scores.double() * scale
    logits[:, -1] = target.logits
    reference = torch.zeros_like(logits)
    if log_reference is not None:
        reference[rows, position] = log_reference
    reference[:, -1] = target.log_reference
    anchor, level, _ = solve_rows(logits, reference, b)
    posterior, levels = posterior_rows(logits, reference, anchor, level, b)
    loss, own, others_mass = label_loss(posterior, levels, target.log_reference, b)
    return SolvedRows(
        loss,
        anchor - slacks(level, b),
        others_mass,
        reference_gradient(own, levels[:, -1], target.log_reference, b),
        (posterior.sum(1) - 1.0).abs(),
        rows,
        columns,
        posterior[rows, position].to(scores.dtype),
        starts,
    )


def _solve_pieces(candidates: Candidates, target: Target, scale: float, b: float) -> SolvedRows:
    """``solve_lists`` on a CPU, in pieces that run on one core."""
    rows, columns, scores, starts, _ = candidates
    highest = scores.new_full((len(starts) - 1,), -math.inf)
    highest.scatter_reduce_(0, rows, scores, "amax")
    start = lists.start_rows(highest.double() * scale, *target, b)
    sums, posterior, _, _ = lists.solve_entries(scores, rows, starts, None, start, scale, b)
    level = torch.sub(sums.level, start.own_gap, alpha=b)
    given = (sums.excess, sums.others_mass, level, target.log_reference, b)
    loss, own = loss_from_sums(*given)
    return SolvedRows(
        loss,
        start.anchor - slacks(sums.level, b),
        sums.others_mass,
        reference_gradient(own, level, target.log_reference, b),
        (sums.others_mass + sums.target_posterior - 1.0).abs(),
        rows,
        columns,
        lists.cat(posterior),
        starts,
    )


def pull_rows(solved: SolvedRows, prototypes: Tensor, inverse_norms: Tensor) -> Tensor:
    """``sum_j p_rj w_j`` over the others, ``[B, d]``: their part of the embeddings' gradient."""
    weights = solved.posterior * inverse_norms[solved.columns]
    return weighted_sums(prototypes, solved.columns, weights, solved.starts[:-1])


def weighted_sums(values: Tensor, index: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
    """Sums of ``weights * values[index]`` over consecutive entries, which begin at ``starts``."""
    if not len(index):
        return values.new_zeros((len(starts), values.shape[1]))
    return embedding_bag(
        index, values, starts, mode="sum", per_sample_weights=weights.to(values.dtype)
    )


def class_order(columns: Tensor, labels: Tensor) -> ClassOrder:
    """Candidates' classes and the rows' own, sorted."""
    both = torch.cat([columns, labels.to(columns.dtype)])
    return ClassOrder(*both.sort(stable=True), len(columns))


def class_gradient(
    order: ClassOrder, solved: SolvedRows, weights: Tensor, target_weights: Tensor
) -> ClassGradient:
    """Every (class, row) with a gradient, the targets included, in ascending order of class."""
    targets = torch.arange(len(weights), dtype=solved.rows.dtype, device=solved.rows.device)
    is_target = order.order >= order.num_candidates
    candidate = torch.where(is_target, 0, order.order)
    target = torch.where(is_target, order.order - order.num_candidates, 0)
    if not len(solved.rows):
        return ClassGradient(order.columns, targets[target], target_weights[target])
    rows = torch.where(is_target, targets[target], solved.rows[candidate])
    values = solved.posterior[candidate] * weights[rows]
    values = torch.where(is_target, target_weights[target], values)
    return ClassGradient(order.columns, rows, values)


def prototype_gradient(
    gradient: ClassGradient, embeddings: Tensor, prototypes: Tensor, inverse_norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Active classes ``[A]`` and the gradient of their (unnormalised) prototypes ``[A, d]``."""
    classes, counts = torch.unique_consecutive(gradient.columns, return_counts=True)
    starts = counts.cumsum(0) - counts
    result = weighted_sums(embeddings, gradient.rows, gradient.values, starts).to(prototypes.dtype)
    inverse = inverse_norms[classes][:, None]
    unit = prototypes[classes] * inverse
    radial = (result * unit).sum(1, keepdim=True)
    return classes, (result - radial * unit) * inverse


def sgd_update(
    gradient: ClassGradient, embeddings: Tensor, state: PrototypeState, rule: SgdRule
) -> Tensor:
    """Step ``state`` in place; the largest ``|w_j - copy_j|`` of the stepped classes, a scalar."""
    largest = state.prototypes.new_zeros(())
    if not bool(rule.grad_scale.isfinite()):
        return largest
    tensors = (embeddings, state.prototypes, state.inverse_norms)
    if rule.only_active:
        has_gradient = (gradient.values != 0).nonzero().flatten()
        for part in class_parts(gradient.part(has_gradient)):
            active, rows = prototype_gradient(part, *tensors)
            largest = torch.maximum(largest, _step_listed(active.long(), rows, state, rule))
        return largest
    for classes, rows in gradient_blocks(gradient, *tensors):
        largest = torch.maximum(largest, _step_block(rows, state.part(classes), rule))
    return largest


def sgd_update_rows(
    classes: slice, rows: Tensor, state: PrototypeState, rule: SgdRule, unit_factor: Tensor | None
) -> Tensor:
    """As ``sgd_update``, for consecutive classes with the gradient ``rows``, which is overwritten.

    ``unit_factor`` times ``rows``, where given, is the gradient of the unit prototypes.
    """
    if not bool(rule.grad_scale.isfinite()):
        return state.prototypes.new_zeros(())
    state = state.part(classes)
    rows = rows.to(state.prototypes.dtype)
    if unit_factor is not None:
        rows = project_rows(rows, state.prototypes, state.inverse_norms, unit_factor)
    if not rule.only_active:
        return _step_block(rows, state, rule)
    active = (rows != 0).any(1).nonzero().flatten()
    return _step_listed(active, rows[active], state, rule)


def project_rows(
    gradient: Tensor, prototypes: Tensor, inverse_norms: Tensor, factor: Tensor
) -> Tensor:
    """``factor`` times the gradient of prototypes from that of their unit vectors, in place."""
    unit = prototypes * inverse_norms[:, None]
    gradient.sub_((gradient * unit).sum(1, keepdim=True) * unit)  # the part along it
    return gradient.mul_((inverse_norms * factor)[:, None])


def gradient_blocks(
    gradient: ClassGradient, embeddings: Tensor, prototypes: Tensor, inverse_norms: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of all classes with their gradient ``[n, d]``; each may be stepped before the next."""
    k, d = prototypes.shape
    size = update_classes(d)
    starts = range(0, k, size)
    edges = torch.tensor([*starts, k], device=gradient.columns.device)
    cuts = torch.searchsorted(gradient.columns.long(), edges).tolist()
    for start, (first, last) in zip(starts, pairwise(cuts), strict=True):
        stop = min(start + size, k)
        block = prototypes.new_zeros((stop - start, d))
        if first < last:
            part = gradient.part(slice(first, last))
            classes, rows = prototype_gradient(part, embeddings, prototypes, inverse_norms)
            block.index_copy_(0, classes.long() - start, rows)
        yield slice(start, stop), block


def update_classes(embedding_dim: int) -> int:
    """Prototypes that are updated at a time: large operations synchronise threads less often."""
    return max(UPDATE_CLASSES, UPDATE_NUMBERS // embedding_dim)


def class_parts(gradient: ClassGradient) -> Iterator[ClassGradient]:
    """The gradient in parts of about ``UPDATE_CLASSES`` entries; no class is cut in two."""
    columns = gradient.columns
    firsts = columns[UPDATE_CLASSES::UPDATE_CLASSES].contiguous()
    edges = sorted({0, *torch.searchsorted(columns, firsts).tolist(), len(columns)})
    for first, last in pairwise(edges):
        yield gradient.part(slice(first, last))


def _step_block(rows: Tensor, state: PrototypeState, rule: SgdRule) -> Tensor:
    """Update whole tensors in place, as ``torch.optim.SGD`` does, and refresh their copy."""
    parts = lists.sweeps(rows) if rows.device.type == "cpu" else [slice(0, len(rows))]
    if len(parts) <= 1:
        return _step_part(rows, state, rule)
    errors = [_step_part(rows[part], state.part(part), rule) for part in parts]
    return torch.stack(errors).amax()


def _step_part(rows: Tensor, state: PrototypeState, rule: SgdRule) -> Tensor:
    prototypes, momentum = state.prototypes, state.momentum
    direction = rows.mul_(rule.grad_scale).add_(prototypes, alpha=rule.weight_decay)
    if momentum is not None:
        momentum.mul_(rule.momentum).add_(direction)
        direction = direction.add_(momentum, alpha=rule.momentum) if rule.nesterov else momentum
    prototypes.add_(direction, alpha=-rule.lr)
    return refresh_copy(prototypes, state.copy, state.inverse_norms)


def _step_listed(classes: Tensor, rows: Tensor, state: PrototypeState, rule: SgdRule) -> Tensor:
    """Update the listed rows of the tensors; other rows are neither read nor written."""
    if not len(classes):
        return state.prototypes.new_zeros(())
    prototypes, momentum, inverse_norms, copy = state
    weights = prototypes[classes]
    velocity = None if momentum is None else momentum[classes]
    rounded = torch.empty_like(weights, dtype=copy.dtype)
    listed = PrototypeState(weights, velocity, inverse_norms[classes], rounded)
    error = _step_block(rows, listed, rule)
    for whole, part in zip(state, listed, strict=True):
        if whole is not None and part is not None:
            whole.index_copy_(0, classes, part)
    return error
