"""The root of a batch above ``alpha = 1`` over blocks of classes, and what the loss needs at it.

Every Newton step (M5) is a pass over all classes, so it matters where the search begins. Where many
classes are active, a sample of them has almost the same root. Where few are, the root lies near
that of the largest of each group of classes, a bound of ``tau`` from below (M13) at one pass more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qmargin.heads.chunks import Chunks, SolvedBlocks, Sums, Target, log_sum_exp
from qmargin.maths.hardness import hardness
from qmargin.maths.threshold import RowSums, level_change, level_cost, level_step, solve_rows

MAX_PASSES = 100
SAMPLE = 1 << 16  # classes that a sample of many has; of fewer it has one in `MIN_STEP`
MIN_STEP = 16
MIN_SUPPORT = 64  # active classes in a sample for its root to be a better start than the maxima's


def solve(chunks: Chunks, target: Target, *, pulls: bool) -> SolvedBlocks:
    """The root and the sums at it; ``pulled`` only if asked for."""
    if chunks.order == 0.0:
        return log_sum_exp(chunks, target, chunks.softmax_sums(pulls=pulls, is_certain=True))
    rounding = chunks.rounding
    search = RootSearch.start(chunks, target)
    # Newton squares a small error, so the first search leaves its last step to `sum_up` to
    # check. Where many classes lie at the edge that can fail, and a second search goes on.
    search.run(rounding**0.5)
    solved = sum_up(chunks, target, search.anchor, search.level, pulls=pulls)
    if bool((solved.mass_error > 64 * rounding).any()):
        search.run(16 * rounding)
        solved = sum_up(chunks, target, search.anchor, search.level, pulls=pulls)
    return solved


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
            return cls.from_maxima(chunks, target, chunks.maxima())
        few = chunks.sample(step)
        # One maximum: a few steps more on the sample cost less than a root over many of them.
        search = cls.from_maxima(few, target, few.maxima().amax(1, keepdim=True))
        sums = search.run(1e-2)  # about as far as a sample can be trusted
        search.chunks = chunks
        is_enough = _num_effective(sums, chunks.order) >= step * MIN_SUPPORT
        if not bool(is_enough.all()):
            other = cls.from_maxima(chunks, target, chunks.maxima())
            search.anchor = torch.where(is_enough, search.anchor, other.anchor)
            search.level = torch.where(is_enough, search.level, other.level)
        return search

    @classmethod
    def from_maxima(cls, chunks: Chunks, target: Target, maxima: Tensor) -> RootSearch:
        """Begin at the root over group maxima and the target, a lower bound of ``tau`` (M13)."""
        order = chunks.order
        logits = torch.cat([maxima.double() * chunks.scale, target.logits[:, None]], 1)
        reference = torch.full_like(logits, math.log(chunks.weight))
        reference[:, -1] = target.log_reference
        tolerance = 1e-6 if order <= 1.0 else 1e-14  # above alpha = 2 it must not pass the root
        anchor, level, _ = solve_rows(logits, reference, order, tolerance=tolerance)
        best = logits.amax(1)
        if chunks.ranks.world > 1:  # the largest bound of any rank, seen from a common anchor
            common, best = chunks.ranks.max_(anchor.clone()), chunks.ranks.max_(best)
            level = level - level_step(order) * (anchor - common)
            anchor, level = common, -chunks.ranks.max_(-level)
        measure = torch.full_like(level, chunks.head.num_classes - 1.0).log()
        measure = torch.logaddexp(measure, target.log_reference)
        low = level_step(order) * (anchor - best) + level_cost(-measure, order)  # M4
        return cls(chunks, target, anchor, level, low, level + 1e-12 * (1.0 + level.abs()))

    def run(self, tolerance: float) -> RowSums:
        """Step until every mass was within ``tolerance`` of one before the last step.

        Returns the sums over the others there.
        """
        order, rounding = self.chunks.order, torch.finfo(self.chunks.dtype).eps
        error = torch.full_like(self.level, torch.inf)
        for _ in range(MAX_PASSES):
            sums = torch.stack(self.chunks.row_sums(self.anchor, self.level))
            others = RowSums(*self.chunks.ranks.sum_(sums).mul_(self.chunks.weight))
            own = self.target.sums(self.anchor, self.level, order)
            mass = others.mass + own.mass
            log_mass = mass.log()
            update = mass / (others.slope + own.slope) * level_change(-log_mass, order)
            is_done = update.abs() <= rounding * self.level.abs()
            following = self.level + update
            if order > 1.0:
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
    """One in how many classes a sample has; None where too few of it can be expected active."""
    num_classes, dim = chunks.head.num_classes, chunks.head.embedding_dim
    step = max(MIN_STEP, num_classes // SAMPLE)
    if chunks.order > 1.0 or num_classes < step * MIN_SUPPORT or dim < 2:
        return None  # above alpha = 2 the search must begin at a bound
    if chunks.order < 0.0:  # every class is active
        return step
    expected = _expected_support(1.0 + chunks.order, chunks.scale, num_classes, dim)
    return step if expected >= step * MIN_SUPPORT else None


@lru_cache
def _expected_support(alpha: float, scale: float, num_classes: int, dim: int) -> float:
    return hardness(alpha, scale, num_classes=num_classes, embedding_dim=dim).support


def _num_effective(sums: RowSums, order: float) -> Tensor:
    """At most as many as are active: as many as would be, were all of them equally so.

    The mass is a sum of ``x^n`` and the slope of ``x^(n - 1)``, with ``n = 1 / order``.
    """
    return ((sums.slope.log() - (1.0 - order) * sums.mass.log()) / order).exp()


def sum_up(
    chunks: Chunks, target: Target, anchor: Tensor, level: Tensor, *, pulls: bool
) -> SolvedBlocks:
    """The solution at a root, with the target's share."""
    sums = chunks.sums_at(anchor, level, pulls=pulls)
    if chunks.ranks.world > 1:
        parts = chunks.ranks.sum_(torch.stack([sums.mass, sums.excess, sums.support_size.double()]))
        num_active = chunks.ranks.sum_(sums.num_active.clone())
        sums = Sums(parts[0], parts[1], parts[2], num_active, sums.pulled)
    own = target.sums(anchor, level, chunks.order).mass
    # Heights that are not numbers are not above zero, and would count as inactive.
    mass = torch.where(target.logits.isnan(), torch.nan, sums.mass)
    error, support = (mass + own - 1.0).abs(), sums.support_size + (own > 0)
    rest = (sums.num_active, sums.pulled)
    return SolvedBlocks(anchor, level, mass, sums.excess, support, error, *rest)
