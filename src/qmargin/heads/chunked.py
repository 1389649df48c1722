"""The chunked step: any alpha, over blocks of classes that are computed and discarded.

Forward solves every row by passes over the blocks, and computes the embeddings' gradient from the
posterior in the same pass. Backward computes the blocks again, for the prototypes' gradient.

**Which logits.** The others' cosines are products of operands in ``Chunked.dtype``. With half
operands the loss is that of the *rounded* unit vectors, summed in float32, and its gradient is
taken as if rounding were the identity; posteriors are rounded before they are multiplied, never
before they are summed. The target's cosine always comes from the prototypes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qmargin.devices import Reading, gpu_properties
from qmargin.heads.gradients import PrototypeGradient, deliver, element_bound
from qmargin.heads.matrix import (
    loss_of_rows,
    matrix_kernels,
    needs_gradient,
    prepared_rows,
    prototype_state,
)
from qmargin.heads.paths import MATRIX_LOGITS
from qmargin.heads.reference import row_reference
from qmargin.heads.step import (
    RowOutcome,
    RowSolution,
    StepStats,
    own_labels,
    step_stats,
    sum_target_cosines,
)
from qmargin.kernels.head_reference import (
    GROUP,
    ClassGradient,
    RowReference,
    Target,
    drop_targets_,
    product,
    project_rows,
)
from qmargin.kernels.solver import (
    MOST_ERROR,
    RowSums,
    heights,
    level_change,
    level_cost,
    level_step,
    loss_from_sums,
    posterior_rows,
    reference_gradient,
    row_sums,
    slacks,
    solve_rows,
    uses_slack,
)
from qmargin.losses.hardness import hardness
from qmargin.losses.margins import ClosedForm
from qmargin.losses.references import MOST_STEEP, version_of

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}  # in a block; about six such tensors live at once
HALF_FACTOR = 2.0**15  # posteriors are at most one; this factor uses the range of float16
FUSED_LOGITS = {"cuda": 1 << 27}  # of a block only its half posterior and gradient rows live
NUM_COARSE = 8192  # sets of classes whose maxima bound the root
PULL_BLOCKS = 2  # at a time in passes without gradient rows: fewer launches, same memory
TILE = 256  # classes: a block of whole tiles wastes none
# Weights of the softmax pass are relative to a guess of the largest cosine, times this: room for
# cosines above the guess, and for the many far below it.
GUESS_FACTOR = 2.0**4
MIN_FUSED = 0.02  # alpha - 1, above one
GUESS_CLASSES = 1 << 16  # whose largest cosine is the guess
KEPT_SHARE = 32  # kept posteriors may take one part in 32 of the memory of a GPU


class Kept(NamedTuple):
    """Posteriors in half precision that a forward pass keeps for its backward pass."""

    blocks: tuple[tuple[int, Tensor], ...] = ()  # first class and ``[B, n]``, without a gap from 0
    top: Tensor | None = None  # [B]: cosine to which those of a softmax are relative, else None


NOTHING_KEPT = Kept()


class SoftmaxSums(NamedTuple):
    """Sums over the others at ``alpha = 1``, relative to a cosine near their largest."""

    top: Tensor  # [B], that cosine; -inf if there are no others
    mass: Tensor  # [B] float64
    pulled: Tensor | None  # [B, d]
    is_doubtful: Reading | None = None  # whether the guess of the largest cosine was too low

    def verify(self) -> bool:
        """Wait for the device; True if the sums are valid."""
        return self.is_doubtful is None or not bool(self.is_doubtful.wait())


class Bounds(NamedTuple):
    """Classes that bound each row's root from below."""

    cosines: Tensor  # [B, n]
    measures: Tensor | None  # [B, n] or [1, n]: log reference measures; None for zero
    largest: Tensor | None = None  # [B]: cosine of any class, where it is none of these

    def best(self, group: int, scale: float, b: float) -> Bounds:
        """Of each group of consecutive ones the best bound on its own (M4), ``[B, n / group]``."""
        spare = (0, -self.cosines.shape[1] % group)
        cosines = pad(self.cosines, spare, value=-torch.inf).unflatten(1, (-1, group))
        if self.measures is None:
            return Bounds(cosines.amax(2), None)
        measures = pad(self.measures.expand_as(self.cosines), spare).unflatten(1, (-1, group))
        bounds = cosines - slacks(level_cost(-measures, b), b) / scale
        bounds = bounds.masked_fill_(cosines == -torch.inf, -torch.inf)  # not infinity less itself
        index = bounds.argmax(2, keepdim=True)
        found, measured = (part.gather(2, index).squeeze(2) for part in (cosines, measures))
        return Bounds(found, measured, self.largest)


class SolvedBlocks(NamedTuple):
    """The root of a batch and sums at it over all classes but the target, ``[B]`` float64 each."""

    anchor: Tensor  # logit
    level: Tensor
    others_mass: Tensor
    excess: Tensor  # sum of p * x
    support_size: Tensor  # target included
    mass_error: Tensor  # target included
    num_active: Tensor  # scalar: classes in the support of any row, or the target of one
    pulled: Tensor | None  # [B, d]: sum of p times unit prototype
    is_doubtful: Reading | None = None  # whether the mass of a row is not close enough to one

    def verify(self) -> bool:
        """Wait for the device; True if the root was found."""
        return self.is_doubtful is None or not bool(self.is_doubtful.wait()[0])


class Chunks:
    """A batch against all prototypes, block by block."""

    limits, tile = CHUNK_LOGITS, 1  # logits in a block, by device; classes that are not split
    weight = 1.0  # classes that each of these represents: one, except in a sample
    group_maxima: Tensor | None = None  # of a sparse step before this one, if there was one
    kept = NOTHING_KEPT  # by the last pass

    def __init__(
        self,
        head: MarginClassifier,
        embeddings: Tensor,
        labels: Tensor,
        reference: RowReference | None = None,
        operand: Tensor | None = None,
    ) -> None:
        self.head, self.embeddings, self.labels = head, embeddings, labels
        self.reference = reference
        self.prototypes, self.ranks = head.prototypes.detach(), head.ranks
        self.copy, self.inverse_norms = head.copy, head.inverse_norms
        self.scale, self.b = head.loss.scale, head.alpha_minus_one
        native = self.prototypes.dtype
        self.operand_dtype = head.chunk_dtype
        self.operand = embeddings.to(self.operand_dtype) if operand is None else operand
        # Above alpha = 2 a posterior is a root of its height: float32 would show at the edge.
        self.dtype = torch.float64 if self.b > 1.0 else native
        self.rounding = torch.finfo(native).eps
        limit = self.limits.get(embeddings.device.type, self.limits["cuda"])
        num_rows, num_groups = len(embeddings), max(1, -(-len(head.shard) // GROUP))
        self.group = GROUP * -(-4 * num_rows * num_groups // limit)  # maxima: a quarter of a block
        size = self.group * max(1, limit // (num_rows * self.group))
        self.size = max(self.tile, size // self.tile * self.tile)

    def sample(self, step: int) -> Chunks:
        """The same batch against every ``step``-th class, as a sample of all classes."""
        few = copy(self)
        few.weight, few.group_maxima = float(step), None
        few.prototypes, few.inverse_norms = self.prototypes[::step], self.inverse_norms[::step]
        few.copy = self.copy[: len(self.prototypes) : step].contiguous()
        few.labels = self.sampled_labels(step)
        if self.reference is not None and self.reference.classes is not None:
            classes = self.reference.classes[::step]
            few.reference = self.reference._replace(classes=classes, stamp=version_of(classes))
        return few

    def sampled_labels(self, step: int) -> Tensor:
        """Labels among every ``step``-th class, -1 elsewhere."""
        is_there = (self.labels >= 0) & (self.labels % step == 0)  # below zero: of another rank
        return torch.where(is_there, self.labels // step, -1)

    def ranges(self, num_blocks: int = 1, begin: int = 0) -> Iterator[slice]:
        """Consecutive classes, some blocks at a time."""
        size, num_classes = num_blocks * self.size, len(self.prototypes)
        for start in range(begin, num_classes, size):
            yield slice(start, min(start + size, num_classes))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive classes and their unit prototypes in the precision of the operands."""
        for where in self.ranges():
            if self.copy.dtype == self.operand_dtype:
                yield where, self.copy[where]
            else:
                yield where, self.unit(where).to(self.operand_dtype)

    def unit(self, where: slice | Tensor) -> Tensor:
        """Unit prototypes of some classes, ``[n, d]``, in their own precision."""
        return self.prototypes[where] * self.inverse_norms[where][:, None]

    def cosines(self, where: slice, unit: Tensor) -> Tensor:
        """Cosines ``[B, n]``, ``-inf`` at targets."""
        cosines = product(self.operand, unit.t()).to(self.dtype)
        drop_targets_(cosines, self.labels - where.start)
        return cosines

    def log_reference(self, where: slice, unit: Tensor) -> Tensor | None:
        """Log reference measures of some classes, ``[1, n]`` or ``[B, n]``; None for zero."""
        return None if self.reference is None else self.reference.part(where, unit, self.dtype)

    def pull(self, posterior: Tensor, unit: Tensor) -> Tensor:
        """``posterior @ unit``, ``[B, d]``, for posteriors between zero and one."""
        if unit.dtype == self.prototypes.dtype:
            return posterior.to(unit.dtype) @ unit
        return product((posterior * HALF_FACTOR).to(unit.dtype), unit) / HALF_FACTOR

    def shifted(self, anchor: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """The anchor as a rounded cosine, and the level there: differences of cosines are exact."""
        shift = (anchor / self.scale).to(self.dtype)
        missing = anchor - shift.double() * self.scale
        return shift, (level - level_step(self.b) * missing).to(self.dtype)

    def posteriors(
        self, anchor: Tensor, level: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """By blocks: classes, unit prototypes, posterior and levels ``[B, n]`` (M1)."""
        shift, level = self.shifted(anchor, level)
        zero = torch.zeros_like(level)
        for where, unit in self.blocks():
            logits = self.cosines(where, unit).sub_(shift[:, None]).mul_(self.scale)
            measure = self.log_reference(where, unit)
            yield where, unit, *posterior_rows(logits, measure, zero, level, self.b)

    def softmax_sums(self, *, pulls: bool, is_certain: bool = False) -> SoftmaxSums:
        """Sums over the others that ``alpha = 1`` needs, in one pass."""
        scale, embeddings = self.scale, self.embeddings
        top = embeddings.new_full((len(embeddings),), -torch.inf)
        mass = torch.zeros_like(top, dtype=torch.float64)
        pulled = torch.zeros_like(embeddings) if pulls else None
        for where, unit in self.blocks():
            cosines = self.cosines(where, unit)
            measure = self.log_reference(where, unit)
            if measure is not None:  # at alpha = 1 it moves the logit
                cosines += measure / scale
            higher = torch.maximum(top, cosines.amax(1))
            shift = torch.where(higher == -torch.inf, 0.0, higher)  # only the target so far
            shrink = ((top - shift) * scale).exp()
            part = cosines.sub_(shift[:, None]).mul_(scale).exp_()
            mass = mass * shrink.double() + part.sum(1).double()
            if pulled is not None:
                pulled = pulled.mul_(shrink[:, None]).add_(self.pull(part, unit))
            top = higher
        return SoftmaxSums(top, mass, pulled)

    def row_sums(self, anchor: Tensor, level: Tensor) -> RowSums:
        """Mass and slope of the others at a trial level (M11)."""
        mass = slope = torch.zeros_like(level)
        shift, level = self.shifted(anchor, level)
        for where, unit in self.blocks():
            gaps = self.cosines(where, unit).sub_(shift[:, None]).mul_(-self.scale)
            sums = row_sums(gaps, self.log_reference(where, unit), level, self.b)
            mass, slope = mass + sums.mass.double(), slope + sums.slope.double()
        return RowSums(mass, slope)

    def bounds(self) -> Bounds:
        """Of each group of consecutive classes the best bound of the root, targets left out."""
        nothing = self.embeddings.new_empty((len(self.embeddings), 0), dtype=self.dtype)
        found, measured = [nothing], [nothing]
        largest = torch.full_like(self.embeddings[:, 0], -torch.inf, dtype=self.dtype)
        for where, unit in self.blocks():
            cosines = self.cosines(where, unit)
            block = Bounds(cosines, self.log_reference(where, unit))
            best = block.best(self.group, self.scale, self.b)
            found.append(best.cosines)
            if best.measures is not None:
                measured.append(best.measures)
                largest = torch.maximum(largest, cosines.amax(1))
        if self.reference is None:
            return Bounds(torch.cat(found, 1), None)
        return Bounds(torch.cat(found, 1), torch.cat(measured, 1), largest)

    def sums_at(
        self, anchor: Tensor, level: Tensor, *, pulls: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mass, excess and support of the others ``[3, B]``; ``num_active``; ``pulled``."""
        totals = level.new_zeros((3, len(level)))
        num_active = totals.new_zeros(())
        pulled = torch.zeros_like(self.embeddings) if pulls else None
        for where, unit, posterior, levels in self.posteriors(anchor, level):
            if pulled is not None:
                pulled += self.pull(posterior, unit)
            is_active = posterior > 0
            excess = torch.where(is_active, heights(levels, self.b).mul_(posterior), 0.0)
            for total, part in zip(totals, (posterior, excess, is_active), strict=True):
                total += part.sum(1)
            num_active = num_active + self.num_active(is_active.any(0), where)
        return totals, num_active, pulled

    def num_active(self, is_active: Tensor, where: slice) -> Tensor:
        """Classes of a block that are active in some row or a target, a scalar."""
        local, width = self.labels - where.start, where.stop - where.start
        has_gradient = pad(is_active, (0, 1))
        is_elsewhere = (local < 0) | (local >= width)
        has_gradient.index_fill_(0, local.masked_fill(is_elsewhere, width), True)
        return has_gradient[:width].sum()

    def pushes(
        self,
        anchor: Tensor,
        level: Tensor,
        weighted: Tensor,
        targets: ClassGradient,
        kept: Kept = NOTHING_KEPT,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Classes and ``sum_b f p_bj weighted_b``, ``[n, d]``, plus the targets' own entries.

        ``f`` is ``HALF_FACTOR`` for operands in half precision, else one.
        """
        is_native = self.operand_dtype == self.embeddings.dtype
        operand = weighted.to(self.operand_dtype)
        for where, _, posterior, _ in self.posteriors(anchor, level):
            scaled = posterior if is_native else posterior * HALF_FACTOR
            rows = product(scaled.to(operand.dtype).t(), operand).to(self.embeddings.dtype)
            add_entries_(rows, targets, self.embeddings, where)
            yield where, rows


def add_entries_(rows: Tensor, gradient: ClassGradient, embeddings: Tensor, where: slice) -> None:
    """Add the entries of some classes, times their embeddings, to the classes' rows ``[n, d]``."""
    columns, entries, values = gradient
    is_here = (columns >= where.start) & (columns < where.stop)
    own = torch.where(is_here[:, None], embeddings[entries.long()] * values[:, None], 0.0)
    local = (columns.long() - where.start).clamp(0, len(rows) - 1)
    rows.index_add_(0, local, own)


def whole_waves(size: int, num_rows: int, num_programs: int) -> int:
    """Classes of a block, at most ``size``, whose tiles keep all programs busy to the end.

    Examples:
        >>> whole_waves(131_072, 1024, 132)  # 15 times 33 tiles of classes, 8 of rows
        126720
    """
    wave = TILE * num_programs // math.gcd(num_programs, -(-num_rows // 128))
    return size - size % wave if 8 * wave <= size else size  # fewer classes cost launches


class FusedChunks(Chunks):
    """The same by kernels; known ``group_maxima`` save a pass over the classes."""

    limits, tile = FUSED_LOGITS, TILE

    def __init__(
        self,
        head: MarginClassifier,
        embeddings: Tensor,
        labels: Tensor,
        reference: RowReference | None = None,
        operand: Tensor | None = None,
    ) -> None:
        super().__init__(head, embeddings, labels, reference, operand)
        self.measures: Tensor | None = None
        self.num_kept = 0  # posteriors
        if head.prototypes.requires_grad:
            self.num_kept = getattr(head.path, "matrix_logits", 0)
        if reference is not None and reference.classes is not None:
            self.measures = self.kernels.measures_of(reference.classes, self.scale, self.b)
        if embeddings.is_cuda:
            properties = gpu_properties(embeddings.device)
            self.size = whole_waves(self.size, len(embeddings), properties.multi_processor_count)
            if self.num_kept >= MATRIX_LOGITS:  # not lowered
                room = properties.total_memory // KEPT_SHARE
                self.num_kept = max(self.num_kept, room // self.operand_dtype.itemsize)

    def sample(self, step: int) -> Chunks:
        """See ``Chunks``."""
        few: Any = super().sample(step)
        if few.measures is not None:
            few.measures = few.measures[::step].contiguous()
        return few  # type: ignore[no-any-return]

    @property
    def kernels(self) -> Any:
        """Import the kernels, which is only possible where they can run."""
        return import_module("qmargin.kernels.triton.blocks")

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """What every kernel takes: operands, labels and the number of classes."""
        return self.operand, self.copy, self.labels, len(self.prototypes)

    def shifted(self, anchor: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Chunks``; kernels know heights only, near ``alpha = 1`` too."""
        if self.b == 0.0:
            return super().shifted(anchor, level)
        shift = (anchor / self.scale).to(self.dtype)
        missing = anchor - shift.double() * self.scale
        return shift, (heights(level, self.b) - self.b * missing).to(self.dtype)

    def weighed(
        self, shift: Tensor, level: Tensor, num_blocks: int = 1, *, begin: int = 0, **options: Any
    ) -> Iterator[tuple[slice, Tensor]]:
        """By some blocks at a time: classes from ``begin`` on, a factor times their posterior."""
        given = ((shift, level), self.scale, self.b)
        options["measures"] = self.measures
        for where in self.ranges(num_blocks, begin):
            # Keep no reference to the block: it must be freed before the next is made.
            yield where, self.kernels.posterior_block(self.batch, where, *given, **options)

    def add_pull_(self, pulled: Tensor, weights: Tensor, where: slice, factor: float) -> None:
        """Add ``weights`` of a block, which has padding, times unit prototypes over ``factor``."""
        unit = self.copy[where.start : where.start + weights.shape[1]]
        pulled.add_(product(weights, unit), alpha=1.0 / factor)

    def sum_and_pull(
        self, root: tuple[Tensor, Tensor], tiles: Any, pulled: Tensor | None, factor: float
    ) -> Callable[[], None]:
        """Fill ``tiles`` with sums and ``pulled`` with the pull of some blocks; return the rest.

        It is returned for later use: while it runs, the host can check the sums. It is that of the
        last blocks, and of those that are kept for the backward pass: as many as there is room for.
        """
        self.kept, kept = NOTHING_KEPT, []
        rest: list[Callable[[], None]] = []
        for where, block in self.weighed(*root, PULL_BLOCKS, factor=factor, into=tiles):
            if pulled is None:
                continue
            is_kept = where.stop * len(self.operand) <= self.num_kept
            if is_kept:
                kept.append((where.start, block))
            if is_kept or where.stop == len(self.prototypes):
                rest.append(partial(self.add_pull_, pulled, block, where, factor))
            else:
                self.add_pull_(pulled, block, where, factor)
            del block
        self.kept = Kept(tuple(kept))

        def pull_rest() -> None:
            while rest:  # a block that is not kept is free after its pull
                rest.pop(0)()

        return pull_rest

    def softmax_sums(self, *, pulls: bool, is_certain: bool = False) -> SoftmaxSums:
        """See ``Chunks``; the pull goes along with the sums if it is not to be certain."""
        pulled = torch.zeros_like(self.embeddings) if pulls else None
        if is_certain or pulled is None:
            top, mass = self.kernels.log_sum_exp(self.batch, self.scale, self.measures)
            if pulled is not None:  # in a pass of its own, now that the sums are known
                shift = torch.where(top == -torch.inf, 0.0, top)
                for where, block in self.weighed(shift, torch.zeros_like(shift), PULL_BLOCKS):
                    self.add_pull_(pulled, block, where, HALF_FACTOR)
                    del block
            return SoftmaxSums(top, mass, pulled)
        first = min(GUESS_CLASSES, len(self.prototypes))
        guess, _ = self.kernels.log_sum_exp((*self.batch[:3], first), self.scale, self.measures)
        guess = torch.where(guess == -torch.inf, 0.0, guess)
        tiles = self.kernels.TileSums.empty(self.batch, len(self.prototypes), 0.0)
        pull_rest = self.sum_and_pull((guess, 0.0 * guess), tiles, pulled, GUESS_FACTOR)
        masses = tiles.sums[0]
        # Where the guess was far too low, weights were cut off and masses may have overflowed.
        room = min(torch.finfo(self.operand_dtype).max / GUESS_FACTOR, 2.0**100)
        is_doubtful = (~(masses < room)).any().to(torch.int32)
        is_doubtful = self.ranks.max_(is_doubtful)  # all ranks start again, or none
        reading = Reading(is_doubtful)
        pull_rest()
        self.kept = self.kept._replace(top=guess)
        return SoftmaxSums(guess, masses.sum(1, dtype=torch.float64), pulled, reading)

    def row_sums(self, anchor: Tensor, level: Tensor) -> RowSums:
        shift, level = self.shifted(anchor, level)
        given = (shift, level, self.scale, self.b, self.measures)
        return RowSums(*self.kernels.row_sums(self.batch, *given))

    def bounds(self) -> Bounds:
        """Maxima of sets of groups: fewer than of groups, and almost as good a bound."""
        maxima, self.group_maxima = self.group_maxima, None
        if maxima is None:
            maxima = self.head.kernels.group_maxima(*self.batch)
        whole = maxima.shape[1] // NUM_COARSE * NUM_COARSE
        if whole:
            coarse = maxima[:, :whole].reshape(len(maxima), -1, NUM_COARSE).amax(1)
            rest = maxima[:, whole:]
            coarse[:, : rest.shape[1]] = torch.maximum(coarse[:, : rest.shape[1]], rest)
            maxima = coarse
        if self.reference is None:
            return Bounds(maxima, None)
        return Bounds(maxima, torch.full_like(maxima[:1], self.reference.bounds[0]))

    def sums_at(
        self, anchor: Tensor, level: Tensor, *, pulls: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        pulled = torch.zeros_like(self.embeddings) if pulls else None
        tiles = self.kernels.TileSums.empty(self.batch, len(self.prototypes), self.b)
        self.sum_and_pull(self.shifted(anchor, level), tiles, pulled, HALF_FACTOR)()
        return tiles.sums.sum(2, dtype=torch.float64), self.num_active_of(tiles), pulled

    def num_active_of(self, tiles: Any) -> Tensor:
        """See ``num_active``, of all blocks at once."""
        everything = slice(0, len(self.prototypes))
        return self.num_active(tiles.is_active()[everything], everything)

    def pushes(
        self,
        anchor: Tensor,
        level: Tensor,
        weighted: Tensor,
        targets: ClassGradient,
        kept: Kept = NOTHING_KEPT,
    ) -> Iterator[tuple[slice, Tensor]]:
        """See ``Chunks``; blocks that were kept are not computed again."""
        root, operand = self.shifted(anchor, level), weighted.to(self.operand_dtype)
        kept_operand, rest = operand, 0
        if kept.top is not None:
            share = (self.scale * kept.top.double() - anchor + level).exp().to(weighted.dtype)
            share *= HALF_FACTOR / GUESS_FACTOR
            kept_operand = (weighted * share[:, None]).to(self.operand_dtype)

        def finish(where: slice, block: Tensor, operand: Tensor) -> tuple[slice, Tensor]:
            rows = product(block.t(), operand)[: where.stop - where.start]
            self.kernels.add_entries_(rows, targets, self.embeddings, where)
            return where, rows

        for start, block in kept.blocks:
            for first in range(0, block.shape[1], self.size):
                part = block[:, first : first + self.size]
                begin = start + first
                stop = min(begin + part.shape[1], len(self.prototypes))
                yield finish(slice(begin, stop), part, kept_operand)
                rest = stop
        for where, block in self.weighed(*root, begin=rest):
            yield finish(where, block, operand)
            del block

    def solve(self, target: Target, *, pulls: bool, is_certain: bool) -> SolvedBlocks:
        """The root on one rank, ``b > 0``, and the sums at it; the host waits if it is certain."""
        maxima, self.group_maxima = self.group_maxima, None
        few, num_classes, measures = self.batch, len(self.prototypes), self.measures
        step = max(1, num_classes // SAMPLE)
        if step > 1:  # a view of every ``step``-th row of the copy
            copy = self.copy[:num_classes:step]
            few = (self.operand, copy, self.sampled_labels(step), len(copy))
            measures = None if measures is None else measures[::step].contiguous()
        low = 0.0 if self.reference is None else self.reference.bounds[0]
        search = self.kernels.RootSearch(few, target, self.scale, self.b, maxima, low)
        if step > 1:  # further than a sample can be trusted: its passes cost little
            search.run(few, float(step), NUM_PASSES, 0.02, measures)
        # The last step of the search is left to the sums to check: Halley cubes a small error, and
        # Newton squares it. Where many classes lie at the edge that can fail.
        tolerance = (0.04 if self.b <= 0.3 else 0.02) if self.b <= 0.5 else self.rounding**0.5
        for _ in range(MAX_PASSES // NUM_PASSES):
            search.run(self.batch, 1.0, NUM_PASSES, tolerance, self.measures)
            root = (search.shift, search.level)
            pulled = torch.zeros_like(self.embeddings) if pulls else None
            tiles = self.kernels.TileSums.empty(self.batch, num_classes, self.b)
            pull_rest = self.sum_and_pull(root, tiles, pulled, HALF_FACTOR)
            found, doubtful = search.conclude(tiles.sums, 64 * self.rounding)
            is_doubtful = Reading(doubtful)
            pull_rest()
            num_active = self.num_active_of(tiles)
            del pull_rest, tiles  # a block of posteriors
            if not is_certain:
                break
            num_doubtful, num_pending = is_doubtful.wait().tolist()
            is_final = tolerance == 16 * self.rounding and num_pending == 0
            if num_doubtful == 0 or is_final:  # or as good as rounding allows
                break
            tolerance = 16 * self.rounding
        level = search.level.double()
        level = (level - 1.0) / self.b if uses_slack(self.b) else level
        mass, excess, support, error = found
        anchor = search.shift.double() * self.scale
        known = SolvedBlocks(anchor, level, mass, excess, support, error, num_active, pulled)
        return known if is_certain else known._replace(is_doubtful=is_doubtful)


def target_sums(target: Target, anchor: Tensor, level: Tensor, b: float) -> RowSums:
    """The target's share of the mass and the slope."""
    gap = (anchor - target.logits)[:, None]
    return row_sums(gap, target.log_reference[:, None], level, b)


def log_sum_exp(chunks: Chunks, target: Target, sums: SoftmaxSums) -> SolvedBlocks:
    """``alpha = 1``: the solution from sums relative to a cosine."""
    ranks, (top, mass, pulled, _) = chunks.ranks, sums
    if ranks.world > 1:  # relative to the largest cosine of all; each pulls its own share
        top = ranks.max_(top.clone())
        factor = ((sums.top - top).double() * chunks.scale).exp()
        factor = torch.where(sums.top == -torch.inf, 0.0, factor)
        mass = ranks.sum_(mass * factor)
        pulled = None if pulled is None else pulled * factor.to(pulled.dtype)[:, None]
    anchor = torch.where(top == -torch.inf, 0.0, top.double() * chunks.scale)
    joint = target.logits - anchor + target.log_reference
    total = torch.logaddexp(mass.log(), joint)  # tau, relative to the anchor
    others = (mass.log() - total).exp()
    if pulled is not None:
        pulled = pulled * (-total).exp().to(pulled.dtype)[:, None]
    count = torch.full_like(others, chunks.head.num_classes)
    error = (others + (joint - total).exp() - 1.0).abs()
    return SolvedBlocks(anchor, -total, others, others, count, error, count.mean(), pulled)


cached_hardness = lru_cache(hardness)
MAX_PASSES = 96
NUM_PASSES = 8  # launched before their results are known; unneeded ones do nothing
SAMPLE = 1 << 16  # classes that a sample of many has; of fewer it has one in `MIN_STEP`
MIN_STEP = 16
MIN_SUPPORT = 64  # active classes in a sample for its root to be a better start than the maxima's


def solve(chunks: Chunks, target: Target, *, pulls: bool, is_certain: bool = True) -> SolvedBlocks:
    """The root and the sums at it; ``pulled`` only if asked for. To be verified if not certain."""
    if chunks.b == 0.0:
        return log_sum_exp(chunks, target, chunks.softmax_sums(pulls=pulls, is_certain=True))
    if isinstance(chunks, FusedChunks) and chunks.ranks.world == 1:
        return chunks.solve(target, pulls=pulls, is_certain=is_certain)
    rounding = chunks.rounding
    search = RootSearch.start(chunks, target)
    # Newton squares a small error, so the first search leaves its last step to `sum_up` to
    # check. Where many classes lie at the edge that can fail, and a second search follows.
    search.run(rounding**0.5)
    solved = sum_up(chunks, target, search.anchor, search.level, pulls=pulls)
    if bool((solved.mass_error > 64 * rounding).any()):
        search.run(16 * rounding)
        solved = sum_up(chunks, target, search.anchor, search.level, pulls=pulls)
    return solved


def without_wrong_roots(solved: SolvedBlocks) -> SolvedBlocks:
    """Rows whose search found no root become NaN, with their gradients."""
    broken = torch.where(solved.mass_error > MOST_ERROR, math.nan, 0.0)
    pulled = solved.pulled
    if pulled is not None:
        pulled = pulled + broken[:, None].to(pulled.dtype)
    return solved._replace(level=solved.level + broken, pulled=pulled)


@dataclass
class RootSearch:
    """A root between two levels of its anchor, narrowed by passes over the blocks."""

    chunks: Chunks
    target: Target
    anchor: Tensor  # [B]
    level: Tensor  # [B], where the next pass looks
    low: Tensor  # [B], mass below one: kept up to date above alpha = 2 only
    high: Tensor  # [B], mass above one

    @classmethod
    def start(cls, chunks: Chunks, target: Target) -> RootSearch:
        """Begin rows at the root of a sample if enough of it is active, else at the maxima's."""
        step = _step_of_sample(chunks)
        if step is None:
            return cls.from_bounds(chunks, target, chunks.bounds())
        few = chunks.sample(step)
        # One bound: a few steps more on the sample cost less than a root over many of them.
        bounds = few.bounds()
        bounds = bounds.best(bounds.cosines.shape[1], chunks.scale, chunks.b)
        search = cls.from_bounds(few, target, bounds)
        sums = search.run(1e-2)  # about as far as a sample can be trusted
        search.chunks = chunks
        # How many classes would be active, were all equally so: the mass is a sum of x^n and the
        # slope of x^(n - 1), with n = 1 / b.
        b = chunks.b
        num_effective = ((sums.slope.log() - (1.0 - b) * sums.mass.log()) / b).exp()
        is_enough = num_effective >= step * MIN_SUPPORT
        if not bool(is_enough.all()):
            other = cls.from_bounds(chunks, target, chunks.bounds())
            search.anchor = torch.where(is_enough, search.anchor, other.anchor)
            search.level = torch.where(is_enough, search.level, other.level)
        return search

    @classmethod
    def from_bounds(cls, chunks: Chunks, target: Target, bounds: Bounds) -> RootSearch:
        """Begin at the root over some classes and the target, a lower bound of ``tau`` (M13)."""
        b = chunks.b
        logits = torch.cat([bounds.cosines.double() * chunks.scale, target.logits[:, None]], 1)
        reference = torch.full_like(logits, math.log(chunks.weight))
        if bounds.measures is not None:
            reference[:, :-1] += bounds.measures
        reference[:, -1] = target.log_reference
        tolerance = 1e-6 if b <= 1.0 else 1e-14  # above alpha = 2 it must not pass the root
        anchor, level, _ = solve_rows(logits, reference, b, tolerance=tolerance)
        best = logits.amax(1)
        if bounds.largest is not None:
            best = torch.maximum(best, bounds.largest.double() * chunks.scale)
        if chunks.ranks.world > 1:  # the largest bound of any rank, seen from a common anchor
            common, best = chunks.ranks.max_(anchor.clone()), chunks.ranks.max_(best)
            level = level - level_step(b) * (anchor - common)
            anchor, level = common, -chunks.ranks.max_(-level)
        most = 0.0 if chunks.reference is None else chunks.reference.bounds[1]
        measure = torch.full_like(level, chunks.head.num_classes - 1.0).log() + most
        measure = torch.logaddexp(measure, target.log_reference)
        low = level_step(b) * (anchor - best) + level_cost(-measure, b)  # M4
        return cls(chunks, target, anchor, level, low, level + 1e-12 * (1.0 + level.abs()))

    def run(self, tolerance: float) -> RowSums:
        """Step until masses were within ``tolerance`` of one; the others' sums before the last."""
        b, rounding = self.chunks.b, torch.finfo(self.chunks.dtype).eps
        error = torch.full_like(self.level, torch.inf)
        for _ in range(MAX_PASSES):
            sums = torch.stack(self.chunks.row_sums(self.anchor, self.level))
            others = RowSums(*self.chunks.ranks.sum_(sums).mul_(self.chunks.weight))
            own = target_sums(self.target, self.anchor, self.level, b)
            mass = others.mass + own.mass
            log_mass = mass.log()
            update = mass / (others.slope + own.slope) * level_change(-log_mass, b)
            is_done = update.abs() <= rounding * self.level.abs()
            following = self.level + update
            if b > 1.0:
                following = self._inside(following, log_mass, error)
                is_done |= self.high - self.low <= rounding * self.level.abs()
            self.level = torch.where(is_done, self.level, following)
            error = log_mass.abs()
            if bool((is_done | (error <= tolerance) | error.isnan()).all()):
                break
        return others

    def _inside(self, following: Tensor, log_mass: Tensor, error: Tensor) -> Tensor:
        """The proposed level if it lies in the bracket and the error has halved, else the middle.

        Above ``alpha = 2`` Newton is not proven: so each pass halves the error or the bracket.
        """
        self.high = torch.where(log_mass > 0, self.level, self.high)
        self.low = torch.where(log_mass > 0, self.low, self.level)
        middle = 0.5 * (self.low + self.high)
        is_good = (following > self.low) & (following < self.high) & (log_mass.abs() < 0.5 * error)
        return torch.where(is_good, following, middle)


def _step_of_sample(chunks: Chunks) -> int | None:
    """Stride of a sample of classes; None if too few of them can be expected to be active."""
    num_classes, dim = chunks.head.num_classes, chunks.head.embedding_dim
    step = max(MIN_STEP, num_classes // SAMPLE)
    if chunks.b > 1.0 or num_classes < step * MIN_SUPPORT or dim < 2:
        return None  # above alpha = 2 the search must begin at a bound
    if chunks.b < 0.0:  # every class is active
        return step
    sizes = {"num_classes": num_classes, "embedding_dim": dim}
    expected = cached_hardness(1.0 + chunks.b, chunks.scale, **sizes).support
    return step if expected >= step * MIN_SUPPORT else None


def sum_up(
    chunks: Chunks, target: Target, anchor: Tensor, level: Tensor, *, pulls: bool
) -> SolvedBlocks:
    """The solution at a root, with the target's share."""
    totals, num_active, pulled = chunks.sums_at(anchor, level, pulls=pulls)
    mass, excess, support = chunks.ranks.sum_(totals)
    num_active = chunks.ranks.sum_(num_active)
    own = target_sums(target, anchor, level, chunks.b).mass
    # Heights that are not numbers are not above zero, and would count as inactive.
    mass = torch.where(target.logits.isnan(), torch.nan, mass)
    error, support = (mass + own - 1.0).abs(), support + (own > 0)
    return SolvedBlocks(anchor, level, mass, excess, support, error, num_active, pulled)


@dataclass
class ChunkedStep:
    """One forward and backward pass, see ``SolvableStep``."""

    head: MarginClassifier
    chunks: Chunks
    targets: Tensor  # [B, d], unit prototypes of the rows' own classes
    is_certain: bool
    softmax: SoftmaxSums | None = None
    solved: SolvedBlocks = field(init=False)
    gradient: ChunkedGradient = field(init=False)
    num_overflowed: int = 0  # rows of a sparse step that this one replaced

    def target_cosines(self) -> Tensor:
        cosines = (self.chunks.embeddings * self.targets).sum(1)
        return sum_target_cosines(self.head, cosines)

    def solve(self, target: Target, *, has_gradient: bool) -> RowSolution:
        b = self.chunks.b
        if self.softmax is not None:
            solved = log_sum_exp(self.chunks, target, self.softmax)
        else:
            options = {"pulls": has_gradient, "is_certain": self.is_certain}
            solved = without_wrong_roots(solve(self.chunks, target, **options))
        self.solved = solved
        level = solved.level - level_step(b) * (solved.anchor - target.logits)
        sums = (solved.excess, solved.others_mass)
        loss, posterior = loss_from_sums(*sums, level, target.log_reference, b)
        in_reference = reference_gradient(posterior, level, target.log_reference, b)
        return RowSolution(loss, -solved.others_mass, in_reference)

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        both = torch.cat([weights, target_weights.to(weights.dtype)])
        bound = element_bound(both, self.head.inverse_norms, self.head.embedding_dim)
        self.keep_gradient(weights, target_weights, bound + 0.0 * self.solved.level.sum())
        own, pulled = self.targets * target_weights[:, None], self.solved.pulled
        return own if pulled is None else own.addcmul_(pulled, weights[:, None])

    def keep_gradient(self, weights: Tensor, target_weights: Tensor, bound: Tensor) -> None:
        """Keep the gradient of the prototypes, from those of the cosines."""
        chunks = self.chunks
        factor = largest = torch.ones_like(weights[0])
        if chunks.operand_dtype != weights.dtype:  # bring posteriors and weights into half's range
            largest = weights.abs().amax().clamp_min(torch.finfo(weights.dtype).tiny)
            factor = largest / HALF_FACTOR
        weighted = chunks.embeddings * (weights / largest)[:, None]
        columns, rows = chunks.labels.to(torch.int32).sort(stable=True)
        targets = ClassGradient(columns, rows, target_weights[rows] / factor)
        given = (weighted, targets, factor, bound, chunks.kept)
        self.gradient, chunks.kept = ChunkedGradient(chunks, self.solved, *given), NOTHING_KEPT

    def deliver_gradient(self, factor: Tensor) -> Tensor | None:
        """See ``SolvableStep``; what was kept goes along, so that it is free after the update."""
        known = self.gradient
        self.gradient = replace(known, kept=NOTHING_KEPT)
        bound = known.bound * factor.abs()
        return deliver(self.head, replace(known, factor=known.factor * factor, bound=bound))

    def verify(self) -> bool:
        """See ``SolvableStep``; if not, the step must be redone with ``is_certain``."""
        return self.solved.verify() if self.softmax is None else self.softmax.verify()

    def owns(self, gradient: object) -> bool:
        return isinstance(gradient, ChunkedGradient) and gradient.solved is self.solved

    def stats(self, counts: Tensor) -> StepStats:
        solved, num_classes = self.solved, self.head.num_classes
        return step_stats(
            "chunked",
            RowOutcome.of_others(solved.support_size, solved.mass_error, solved.others_mass),
            counts,
            num_candidates=float(num_classes),
            active_share=float(solved.num_active) / num_classes,
            num_overflowed=self.num_overflowed,
            reason="its lists would have been too long" if self.num_overflowed else "",
        )

    def candidates(self) -> Tensor:
        """Active classes of each row, ``[B]``, targets left out as in lists."""
        return (self.solved.support_size - 1.0).clamp_min(0.0)

    def class_share(self) -> float:
        """Share of the classes that are active in a row, targets left out."""
        if self.chunks.b <= 0.0:
            return 1.0
        return float(self.candidates().mean()) / self.head.num_classes


@dataclass
class FusedChunkedStep(ChunkedStep):
    """The same where the margin is numbers: few launches, its loss attached by ``attach_loss``."""

    rows: Any = None  # kernels.triton.matrix.Rows
    generation = 0
    is_static = False

    @property
    def loss(self) -> Tensor:
        """Reduced, or of each row."""
        return loss_of_rows(self.head, self.rows)

    def keep_gradient_of_rows(self, factor: Tensor | None = None) -> None:
        """Keep the gradient of the prototypes for a sum of rows, or of rows times a factor."""
        kernels, dtype = matrix_kernels(), self.chunks.embeddings.dtype
        weights = self.rows.field(kernels.WEIGHT).to(dtype)
        in_cosines = self.rows.field(kernels.IN_COSINE).to(dtype)
        bound = self.rows.sums[3]
        if factor is not None:
            weights, in_cosines = weights * factor, in_cosines * factor
            bound = bound * factor.abs().amax()
        self.keep_gradient(weights, in_cosines, bound)

    def deliver_scaled(self) -> Tensor | None:
        """Deliver the gradient times the factor that the rows keep."""
        factor = self.rows.factor
        if factor.ndim == 0:
            return self.deliver_gradient(factor)
        self.chunks.kept = self.gradient.kept
        self.keep_gradient_of_rows(factor)
        return self.deliver_gradient(torch.ones_like(factor[0]))


def fused_chunked_step(
    head: MarginClassifier,
    embeddings: Tensor,
    labels: Tensor,
    margin: ClosedForm,
    *,
    is_certain: bool = False,
) -> FusedChunkedStep:
    """A step for embeddings of any length on one GPU, see ``can_fuse``; to be verified."""
    kernels, state, b = matrix_kernels(), prototype_state(head), head.alpha_minus_one
    rows = prepared_rows(head, embeddings, labels, margin)
    has_gradient = needs_gradient(head, embeddings)
    labels = rows.labels.clamp(0, head.num_classes - 1)
    chunks = FusedChunks(head, rows.unit, labels, operand=rows.rounded)
    step = FusedChunkedStep(head, chunks, rows.unit, is_certain, rows=rows)
    if b == 0.0:
        step.softmax = sums = chunks.softmax_sums(pulls=has_gradient, is_certain=is_certain)
        found = kernels.settle_softmax(rows, state, *sums[:3], scale=head.loss.scale)
        shift, level = (part.double() for part in found)
        others, count = rows.field(kernels.OTHERS), rows.field(kernels.SUPPORT)
        root = (shift * head.loss.scale, level)
        outcome = (others, others, count, rows.field(kernels.ERROR), count.amax())
        step.solved = SolvedBlocks(*root, *outcome, None)
    else:
        target = Target(rows.field(kernels.LOGIT), rows.field(kernels.REFERENCE))
        solved = step.solve(target, has_gradient=has_gradient)
        others = 0.0 * step.solved.level - solved.in_logits  # NaN where there is no root
        given = (solved.loss, others, step.solved.pulled)
        kernels.settle_lists(rows, state, *given, scale=head.loss.scale)
    if has_gradient:
        step.keep_gradient_of_rows()
    return step


@dataclass(frozen=True)
class ChunkedGradient(PrototypeGradient):
    """The gradient of a chunked step; it reads the prototypes, so step a block before the next."""

    chunks: Chunks
    solved: SolvedBlocks
    weighted: Tensor  # [B, d], embeddings times their share
    targets: ClassGradient  # the rows' own classes
    factor: Tensor  # scalar, that products with ``weighted`` and ``targets`` still need
    bound: Tensor  # float64 scalar, see ``element_bound``; NaN if a row has no root
    kept: Kept

    def raw_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        root = (self.solved.anchor, self.solved.level)
        for where, block in self.chunks.pushes(*root, self.weighted, self.targets, self.kept):
            yield where, block, self.factor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        chunks = self.chunks
        for where, rows, _ in self.raw_blocks():
            lengths = chunks.head.inverse_norms[where]
            yield where, project_rows(rows, chunks.prototypes[where], lengths, self.factor)

    def is_finite(self) -> Tensor:
        return self.bound < torch.finfo(self.chunks.embeddings.dtype).max  # false for NaN


def has_kernels(head: MarginClassifier) -> bool:
    """Whether blocks go by kernels: half operands, and not near ``alpha = 1`` but at it.

    They take powers of heights, whose rounding grows with ``1 / b``.
    """
    b, dtype = head.alpha_minus_one, head.chunk_dtype
    return (
        dtype in (torch.float16, torch.bfloat16)
        and dtype == head.screen_dtype
        and head.kernels.__name__.endswith("triton.head")
        and head.embedding_dim % 8 == 0
        and (b == 0.0 or MIN_FUSED <= b <= 1.0)
    )


def _is_mild(reference: RowReference, b: float) -> bool:
    """Whether kernels take it: they compare no prototypes, and their levels are float32."""
    steepness = abs(b) * max(-reference.bounds[0], reference.bounds[1])
    return reference.pair is None and steepness <= math.log(MOST_STEEP)


def chunked_step(
    head: MarginClassifier,
    embeddings: Tensor,
    labels: Tensor,
    *,
    maxima: Tensor | None = None,
    is_certain: bool = False,
) -> ChunkedStep:
    """A step for unit embeddings, with ``maxima`` of a sparse step's groups if there was one.

    A certain step takes no shortcut that has to be verified.
    """
    local, columns = own_labels(head, labels)
    targets = torch.zeros_like(embeddings, requires_grad=False)
    if len(head.shard):
        targets = head.prototypes.detach()[columns] * head.inverse_norms[columns][:, None]
    if head.ranks.world > 1:
        targets = torch.where((local >= 0)[:, None], targets, 0.0)
    reference = row_reference(head, targets)
    if has_kernels(head) and (reference is None or _is_mild(reference, head.alpha_minus_one)):
        chunks: Chunks = FusedChunks(head, embeddings.detach(), local, reference)
        chunks.group_maxima = maxima
    else:
        chunks = Chunks(head, embeddings.detach(), local, reference)
    step = ChunkedStep(head, chunks, targets, is_certain)
    if chunks.b == 0.0:
        pulls = torch.is_grad_enabled() and embeddings.requires_grad
        step.softmax = chunks.softmax_sums(pulls=pulls, is_certain=is_certain)
    return step
