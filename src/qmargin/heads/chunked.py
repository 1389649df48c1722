"""The chunked step: any alpha, over blocks of classes that are computed and discarded.

Forward solves every row by passes over the blocks (``heads.chunks``), and pulls the embeddings'
gradient out of the posterior while it is at hand. Backward computes the blocks once more, for the
prototypes' gradient alone: at ``alpha = 1`` a step has four products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qmargin.heads.chunks import HALF_FACTOR, Chunks, SoftmaxSums, Sums, make_chunks
from qmargin.heads.gradients import PrototypeGradient, deliver, element_bound, is_bounded
from qmargin.heads.step import RowSolution, StepStats, own_labels, sum_target_cosines
from qmargin.kernels.head_reference import project_rows
from qmargin.kernels.head_types import ClassGradient, Target
from qmargin.kernels.solver import (
    RowSums,
    level_change,
    level_cost,
    level_step,
    loss_from_sums,
    reference_gradient,
    row_sums,
    solve_rows,
)
from qmargin.losses.hardness import hardness

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


class SolvedBlocks(NamedTuple):
    """The root of a batch and sums at it, over all classes but the target where not said otherwise.

    ``[B]`` float64 each.
    """

    anchor: Tensor  # logit
    level: Tensor
    others_mass: Tensor
    excess: Tensor  # sum of p * x
    support_size: Tensor  # target included
    mass_error: Tensor  # target included
    num_active: Tensor  # scalar: classes in the support of any row, or the target of one
    pulled: Tensor | None  # [B, d]: sum of p times unit prototype


def target_sums(target: Target, anchor: Tensor, level: Tensor, b: float) -> RowSums:
    """The target's share of the mass and the slope."""
    gap = (anchor - target.logits)[:, None]
    return row_sums(gap, target.log_reference[:, None], level, b)


def log_sum_exp(chunks: Chunks, target: Target, sums: SoftmaxSums) -> SolvedBlocks:
    """``alpha = 1``: the solution from sums relative to a cosine."""
    top, mass, pulled = sums.over(chunks.ranks, chunks.scale)
    anchor = torch.where(top == -torch.inf, 0.0, top.double() * chunks.scale)
    joint = target.logits - anchor + target.log_reference
    total = torch.logaddexp(mass.log(), joint)  # tau, relative to the anchor
    others = (mass.log() - total).exp()
    if pulled is not None:
        pulled = pulled * (-total).exp().to(pulled.dtype)[:, None]
    count = torch.full_like(others, chunks.head.num_classes)
    error = (others + (joint - total).exp() - 1.0).abs()
    return SolvedBlocks(anchor, -total, others, others, count, error, count.mean(), pulled)


MAX_PASSES = 100
SAMPLE = 1 << 16  # classes that a sample of many has; of fewer it has one in `MIN_STEP`
MIN_STEP = 16
MIN_SUPPORT = 64  # active classes in a sample for its root to be a better start than the maxima's


def solve(chunks: Chunks, target: Target, *, pulls: bool) -> SolvedBlocks:
    """The root and the sums at it; ``pulled`` only if asked for."""
    if chunks.b == 0.0:
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
        is_enough = _num_effective(sums, chunks.b) >= step * MIN_SUPPORT
        if not bool(is_enough.all()):
            other = cls.from_maxima(chunks, target, chunks.maxima())
            search.anchor = torch.where(is_enough, search.anchor, other.anchor)
            search.level = torch.where(is_enough, search.level, other.level)
        return search

    @classmethod
    def from_maxima(cls, chunks: Chunks, target: Target, maxima: Tensor) -> RootSearch:
        """Begin at the root over group maxima and the target, a lower bound of ``tau`` (M13)."""
        b = chunks.b
        logits = torch.cat([maxima.double() * chunks.scale, target.logits[:, None]], 1)
        reference = torch.full_like(logits, math.log(chunks.weight))
        reference[:, -1] = target.log_reference
        tolerance = 1e-6 if b <= 1.0 else 1e-14  # above alpha = 2 it must not pass the root
        anchor, level, _ = solve_rows(logits, reference, b, tolerance=tolerance)
        best = logits.amax(1)
        if chunks.ranks.world > 1:  # the largest bound of any rank, seen from a common anchor
            common, best = chunks.ranks.max_(anchor.clone()), chunks.ranks.max_(best)
            level = level - level_step(b) * (anchor - common)
            anchor, level = common, -chunks.ranks.max_(-level)
        measure = torch.full_like(level, chunks.head.num_classes - 1.0).log()
        measure = torch.logaddexp(measure, target.log_reference)
        low = level_step(b) * (anchor - best) + level_cost(-measure, b)  # M4
        return cls(chunks, target, anchor, level, low, level + 1e-12 * (1.0 + level.abs()))

    def run(self, tolerance: float) -> RowSums:
        """Step until every mass was within ``tolerance`` of one before the last step.

        Returns the sums over the others there.
        """
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
    """One in how many classes a sample has; None where too few of it can be expected active."""
    num_classes, dim = chunks.head.num_classes, chunks.head.embedding_dim
    step = max(MIN_STEP, num_classes // SAMPLE)
    if chunks.b > 1.0 or num_classes < step * MIN_SUPPORT or dim < 2:
        return None  # above alpha = 2 the search must begin at a bound
    if chunks.b < 0.0:  # every class is active
        return step
    expected = _expected_support(1.0 + chunks.b, chunks.scale, num_classes, dim)
    return step if expected >= step * MIN_SUPPORT else None


@lru_cache
def _expected_support(alpha: float, scale: float, num_classes: int, dim: int) -> float:
    return hardness(alpha, scale, num_classes=num_classes, embedding_dim=dim).support


def _num_effective(sums: RowSums, b: float) -> Tensor:
    """At most as many as are active: as many as would be, were all of them equally so.

    The mass is a sum of ``x^n`` and the slope of ``x^(n - 1)``, with ``n = 1 / b``.
    """
    return ((sums.slope.log() - (1.0 - b) * sums.mass.log()) / b).exp()


def sum_up(
    chunks: Chunks, target: Target, anchor: Tensor, level: Tensor, *, pulls: bool
) -> SolvedBlocks:
    """The solution at a root, with the target's share."""
    sums = chunks.sums_at(anchor, level, pulls=pulls)
    if chunks.ranks.world > 1:
        parts = chunks.ranks.sum_(torch.stack([sums.mass, sums.excess, sums.support_size.double()]))
        num_active = chunks.ranks.sum_(sums.num_active.clone())
        sums = Sums(parts[0], parts[1], parts[2], num_active, sums.pulled)
    own = target_sums(target, anchor, level, chunks.b).mass
    # Heights that are not numbers are not above zero, and would count as inactive.
    mass = torch.where(target.logits.isnan(), torch.nan, sums.mass)
    error, support = (mass + own - 1.0).abs(), sums.support_size + (own > 0)
    rest = (sums.num_active, sums.pulled)
    return SolvedBlocks(anchor, level, mass, sums.excess, support, error, *rest)


@dataclass
class ChunkedStep:
    """One forward and backward pass."""

    head: MarginClassifier
    chunks: Chunks
    targets: Tensor  # [B, d], unit prototypes of the rows' own classes
    softmax: SoftmaxSums | None = None
    solved: SolvedBlocks | None = None
    push: Push | None = None
    num_overflowed: int = 0  # rows of a sparse step that this one replaced

    def target_cosines(self) -> Tensor:
        """See ``SolvableStep``; from the prototypes themselves."""
        cosines = (self.chunks.embeddings * self.targets).sum(1)
        return sum_target_cosines(self.head, cosines)

    def solve(self, target: Target, *, has_gradient: bool) -> RowSolution:
        """See ``SolvableStep``."""
        b = self.chunks.b
        if self.softmax is not None:
            solved = log_sum_exp(self.chunks, target, self.softmax)
        else:
            solved = solve(self.chunks, target, pulls=has_gradient)
        self.solved = solved
        level = solved.level - level_step(b) * (solved.anchor - target.logits)
        loss, posterior = loss_from_sums(
            solved.excess, solved.others_mass, level, target.log_reference, b
        )
        in_reference = reference_gradient(posterior, level, target.log_reference, b)
        return RowSolution(loss, -solved.others_mass, in_reference)

    def make_gradient(self, weights: Tensor, target_weights: Tensor) -> Tensor:
        """See ``SolvableStep``."""
        assert self.solved is not None
        self.push = Push.of(self.chunks, self.solved, weights, target_weights)
        own = self.targets * target_weights[:, None]
        pulled = self.solved.pulled
        return own if pulled is None else own.addcmul_(pulled, weights[:, None])

    def deliver_gradient(self, factor: Tensor) -> Tensor | None:
        """See ``SolvableStep``."""
        assert self.solved is not None and self.push is not None
        return deliver(self.head, ChunkedGradient(self.chunks, self.solved, self.push, factor))

    def verify(self) -> bool:
        """See ``SolvableStep``; if not, the step must be redone with ``is_certain``."""
        return self.softmax is None or self.softmax.verify()

    def owns(self, gradient: object) -> bool:
        """See ``SolvableStep``."""
        return isinstance(gradient, ChunkedGradient) and gradient.solved is self.solved

    def stats(self) -> StepStats:
        """Summarise the step."""
        assert self.solved is not None
        num_classes = self.chunks.head.num_classes
        return StepStats(
            path="chunked",
            reason="its lists would have been too long" if self.num_overflowed else "",
            support_mean=float(self.solved.support_size.mean()),
            support_max=int(self.solved.support_size.max()),
            num_candidates=float(num_classes),
            num_overflowed=self.num_overflowed,
            mass_error=float(self.solved.mass_error.max()),
            active_share=float(self.solved.num_active) / num_classes,
        )

    def class_share(self) -> float:
        """Share of the classes that are active in a row, targets left out."""
        assert self.solved is not None
        if self.chunks.b <= 0.0:
            return 1.0
        num_others = (self.solved.support_size - 1.0).clamp_min(0.0)  # lists leave the target out
        return float(num_others.mean()) / self.chunks.head.num_classes


class Push(NamedTuple):
    """What the prototypes' gradient is made of, besides the posteriors; known before backward."""

    weighted: Tensor  # [B, d], embeddings times their share, as operands
    targets: ClassGradient  # the rows' own classes
    factor: Tensor  # scalar, that products with ``weighted`` and ``targets`` still need
    bound: Tensor  # float64 scalar, see ``element_bound``; NaN if a row has no root

    @classmethod
    def of(
        cls, chunks: Chunks, solved: SolvedBlocks, weights: Tensor, target_weights: Tensor
    ) -> Push:
        """From gradients of the others' cosines per posterior, and of the targets', ``[B]``."""
        embeddings, dtype = chunks.embeddings, chunks.operand_dtype
        factor = torch.ones_like(weights[0])
        largest = factor
        if dtype != embeddings.dtype:  # bring posteriors and weights into the range of half
            largest = weights.abs().amax().clamp_min(torch.finfo(weights.dtype).tiny)
            factor = largest / HALF_FACTOR
        weighted = (embeddings * (weights / largest)[:, None]).to(dtype)
        columns, rows = chunks.labels.to(torch.int32).sort(stable=True)
        targets = ClassGradient(columns, rows, target_weights[rows] / factor)
        both = torch.cat([weights, target_weights.to(weights.dtype)])
        bound = element_bound(both, chunks.head.inverse_norms, embeddings.shape[1])
        return cls(weighted, targets, factor, bound + 0.0 * solved.level.sum())


@dataclass(frozen=True)
class ChunkedGradient(PrototypeGradient):
    """The prototypes' gradient of a chunked step, computed block by block when asked for.

    It reads the prototypes: use it before they change, or step each block before the next.
    """

    chunks: Chunks
    solved: SolvedBlocks
    push: Push
    factor: Tensor  # scalar: gradient that came into the loss

    def raw_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """See ``PrototypeGradient``: gradients of unit prototypes, up to a factor."""
        solved, (weighted, targets, factor, _) = self.solved, self.push
        factor = factor * self.factor
        for where, block in self.chunks.pushes(solved.anchor, solved.level, weighted, targets):
            yield where, block, factor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive classes and the gradient of their prototypes, ``[n, d]``."""
        chunks = self.chunks
        for where, rows, factor in self.raw_blocks():
            assert factor is not None
            lengths = chunks.head.inverse_norms[where]
            yield where, project_rows(rows, chunks.prototypes[where], lengths, factor)

    def is_finite(self) -> Tensor:
        """From a bound of the gradient's elements, without making it."""
        bound = self.push.bound * self.factor.abs()
        return is_bounded(bound, self.chunks.embeddings.dtype)


def chunked_step(
    head: MarginClassifier,
    embeddings: Tensor,
    labels: Tensor,
    *,
    maxima: Tensor | None = None,
    is_certain: bool = False,
) -> ChunkedStep:
    """A step for unit embeddings; at ``alpha = 1`` its sums are launched.

    Args:
        head: Prototypes and loss.
        embeddings: ``[B, d]``.
        labels: ``[B]``; a negative one marks a row that does not count.
        maxima: Of a sparse step's groups, if there was one.
        is_certain: Take no short cut that would have to be verified.
    """
    local, columns = own_labels(head, labels)
    chunks = make_chunks(head, embeddings.detach(), local, maxima)
    if len(head.shard):
        targets = chunks.unit(columns)
    else:
        targets = torch.zeros_like(chunks.embeddings)
    if head.ranks.world > 1:
        targets = torch.where((local >= 0)[:, None], targets, 0.0)
    step = ChunkedStep(head, chunks, targets)
    if chunks.b == 0.0:
        pulls = torch.is_grad_enabled() and embeddings.requires_grad
        step.softmax = chunks.softmax_sums(pulls=pulls, is_certain=is_certain)
    return step
