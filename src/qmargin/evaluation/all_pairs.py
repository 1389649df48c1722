"""Exact operating points over all pairs of an embedding matrix, without storing their scores."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError, ShapeError
from qmargin.files import Progress
from qmargin.metrics.checks import just_above
from qmargin.metrics.curve import DetCurve
from qmargin.metrics.eer_dcf import Costs, Eer, MinDcf, crossing_point
from qmargin.metrics.normalise import Moments
from qmargin.metrics.operating import TarAtFar, check_measurable, num_allowed

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.intp]
Found = Callable[[Rows, Rows, Floats, Ints], None]
FLOAT64 = np.dtype(np.float64)
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
NUM_BINS = 1 << 20
CHUNK_VALUES = 1 << 15  # numbers of one side that are multiplied at a time: they stay in the cache
MAX_HELD = 1 << 23  # exact scores held before equal ones are counted together
MAX_NORM = 1e30  # of a normalised score: products in float32 do not overflow


@dataclass(frozen=True, eq=False)
class AllPairs:
    """Measures over all pairs of an embedding matrix."""

    tar: tuple[TarAtFar, ...]
    eer: Eer
    min_dcf: tuple[MinDcf, ...]
    det: DetCurve  # about a hundred points of the exact curve, with both ends
    hardest_impostors: tuple[ScoredPair, ...]  # largest score first
    hardest_genuine: tuple[ScoredPair, ...]  # smallest score first
    num_genuine: int
    num_impostors: int
    num_rescored: int  # impostor pairs scored in float64; may depend on the blocks
    products: ProductCounts  # may depend on the device


@dataclass(frozen=True, eq=False)
class ProductCounts:
    """Impostor pairs counted by bins of their rounded products, ``[NUM_BINS]``."""

    counts: Ints
    bins: Bins

    @property
    def scores(self) -> Floats:
        """Centre of every bin."""
        places = np.arange(len(self.counts), dtype=np.float64)
        return np.asarray(self.bins.low + (places + 0.5) * self.bins.width, np.float64)


class PairScores(NamedTuple):
    """Rows of some pairs and their exact scores, ``[m]`` each."""

    first: Rows
    second: Rows
    scores: Floats


def evaluate_all_pairs(
    embeddings: Any,
    subjects: Sequence[Any] | NDArray[Any],
    fars: Iterable[float],
    *,
    p_targets: Iterable[float] = (0.01, 0.05),
    num_hardest: int = 20,
    block: int = 4096,
    device: str = "cpu",
    dtype: Literal["float32", "float64"] = "float32",
    moments: Moments | None = None,
    progress: Progress | None = None,
) -> AllPairs:
    """Exact operating points over all ``n (n - 1) / 2`` pairs of rows.

    The score of a pair is the cosine of its rows in float64, or its AS-norm. Products of blocks in
    ``dtype`` only select the pairs that can affect a result; those are scored in float64. So
    ``block``, ``device`` and ``dtype`` do not change a result. Memory holds the embeddings, one
    block and the scores of the genuine pairs; more where the cohort scores of one row deviate a
    thousand times less than those of others.

    Args:
        embeddings: ``[n, d]`` array or tensor of any floating dtype.
        subjects: ``[n]`` subject of each row, names or numbers.
        fars: False accept rates at which to measure TAR.
        p_targets: Priors at which to measure minDCF.
        num_hardest: How many of the hardest pairs of each kind to return.
        block: Rows on each side of a block.
        device: Where products are computed, such as ``"cuda"``.
        dtype: Precision of the products, ``"float32"`` or ``"float64"``.
        moments: Moments of each row's cohort scores, from ``nearest_moments``, for AS-norm.
        progress: Called with the number of blocks done and their total, over two passes.

    Examples:
        >>> rows = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> found = evaluate_all_pairs(rows, ["a", "a", "b", "b"], fars=[0.25])
        >>> found.num_genuine, found.num_impostors, found.tar[0].tar, found.eer.eer
        (2, 4, 1.0, 0.0)
    """
    if num_hardest < 0:
        raise ConfigError(f"num_hardest={num_hardest} is negative: give a number of pairs")
    blocks, order = _blocks(embeddings, subjects, moments, block=block, device=device, dtype=dtype)
    lowest, parts = Hardest(num_hardest, sign=-1), [np.empty(0)]
    for first, second in genuine_pairs(blocks.groups):
        parts.append(exact_scores(blocks.unit, first, second, blocks.norm))
        lowest.update(order[first], order[second], parts[-1])
    genuine = np.sort(np.concatenate(parts))
    num_impostors = len(order) * (len(order) - 1) // 2 - len(genuine)
    for number, what in ((len(genuine), "share one"), (num_impostors, "are of different ones")):
        if number == 0:
            raise ProtocolError(
                f"0 pairs of embeddings {what}, at least 1 is needed: check the subjects"
            )
    fars = tuple(float(far) for far in fars)
    for far in fars:
        check_measurable(far, num_impostors)

    counts = ImpostorCounts(blocks.count(progress), blocks.bins)
    if len(counts) != num_impostors:
        raise BackendError(
            f"{len(counts)} of {num_impostors} products on {device} are in range: "
            "use another device, or dtype='float64'"
        )
    tar = [plan_tar(counts, genuine, far) for far in fars]
    eer = plan_eer(counts, genuine)
    min_dcf = [plan_min_dcf(counts, genuine, float(p_target)) for p_target in p_targets]
    det = plan_det(counts, genuine)
    highest, floor = Hardest(min(num_hardest, num_impostors), sign=1), NUM_BINS
    if highest.num_kept:
        floor = counts.open_rank(highest.num_kept)
        counts.open_bins(floor, NUM_BINS)

    def found(first: Rows, second: Rows, scores: Floats, places: Ints) -> None:
        counts.update(scores)
        high = np.flatnonzero(places >= floor)
        if len(high):
            highest.update(order[first[high]], order[second[high]], scores[high])

    blocks.find(counts.counts, counts.is_open, found, progress)
    counts.settle()
    return AllPairs(
        tar=tuple(answer() for answer in tar),
        eer=eer(),
        min_dcf=tuple(answer() for answer in min_dcf),
        det=det(),
        hardest_impostors=highest.pairs(),
        hardest_genuine=lowest.pairs(),
        num_genuine=len(genuine),
        num_impostors=num_impostors,
        num_rescored=int(counts.counts[counts.is_open].sum()),
        products=ProductCounts(counts.counts, blocks.bins),
    )


def largest_impostors(
    embeddings: Any,
    subjects: Sequence[Any] | NDArray[Any],
    products: ProductCounts,
    number: int,
    *,
    device: str = "cpu",
    moments: Moments | None = None,
) -> PairScores:
    """Exact scores of all impostor pairs above some score, at most ``number`` of them.

    There are fewer where scores are equal or nearly so. ``products`` come from
    ``evaluate_all_pairs`` on the same device.
    """
    blocks, order = _blocks(embeddings, subjects, moments, device=device)
    counts, bins = products.counts, products.bins
    above = np.cumsum(counts[::-1])
    start = len(above) - int(np.searchsorted(above, number, side="right"))
    is_whole = not counts[:start].any()
    floor = -np.inf if is_whole else bins.low + (start + bins.slack + 1) * bins.width
    parts: list[tuple[Rows, Rows, Floats]] = [(order[:0], order[:0], np.empty(0))]

    def found(first: Rows, second: Rows, scores: Floats, places: Ints) -> None:
        kept = np.flatnonzero(scores >= floor)  # below, some pairs are in other bins
        parts.append((order[first[kept]], order[second[kept]], scores[kept]))

    blocks.find(counts, np.arange(len(counts)) >= start, found)
    return PairScores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def all_genuine(
    embeddings: Any, subjects: Sequence[Any] | NDArray[Any], moments: Moments | None = None
) -> PairScores:
    """Exact scores of all genuine pairs."""
    unit = unit_rows(embeddings)
    order, groups = _sorted_subjects(subjects, len(unit))
    parts = list(genuine_pairs(groups))
    first, second = (order[np.concatenate(side)] for side in zip(*parts, strict=True))
    norm = _norm(moments, np.arange(len(unit)))
    return PairScores(first, second, exact_scores(unit, first, second, norm))


def random_impostors(
    embeddings: Any,
    subjects: Sequence[Any] | NDArray[Any],
    number: int,
    *,
    moments: Moments | None = None,
    seed: int = 0,
) -> PairScores:
    """Exact scores of impostor pairs drawn with replacement, about ``number`` of them."""
    unit = unit_rows(embeddings)
    groups = np.unique(np.asarray(subjects), return_inverse=True)[1]
    first, second = np.random.default_rng([seed, number]).integers(len(unit), size=(2, number))
    kept = groups[first] != groups[second]
    first, second = first[kept], second[kept]
    norm = _norm(moments, np.arange(len(unit)))
    return PairScores(first, second, exact_scores(unit, first, second, norm))


def num_impostor_pairs(counts: NDArray[np.integer[Any]]) -> int:
    """Pairs of samples of two subjects, by the number of samples of each."""
    return (int(counts.sum()) ** 2 - int((counts * counts).sum())) // 2


def _blocks(
    embeddings: Any,
    subjects: Sequence[Any] | NDArray[Any],
    moments: Moments | None,
    **settings: Any,
) -> tuple[PairBlocks, Rows]:
    """Blocks of rows sorted by subject, and that order."""
    unit = unit_rows(embeddings)
    order, groups = _sorted_subjects(subjects, len(unit))
    return PairBlocks(unit[order], groups, norm=_norm(moments, order), **settings), order


def _sorted_subjects(subjects: Any, length: int) -> tuple[Rows, NDArray[np.intp]]:
    """An order of the rows in which subjects are together, and the subject's number of each."""
    names = np.asarray(subjects)
    if names.shape != (length,):
        raise ShapeError(
            f"subjects have shape {names.shape}, there are {length} embeddings: give as many"
        )
    numbers = np.unique(names, return_inverse=True)[1].astype(np.intp)
    order = np.argsort(numbers, kind="stable")
    return order, numbers[order]


def _norm(moments: Moments | None, order: Rows) -> PairNorm | None:
    if moments is None:
        return None
    mean, std = (np.asarray(column, np.float64) for column in moments)
    if mean.shape != order.shape or std.shape != order.shape:
        raise ShapeError(
            f"moments have shapes {mean.shape} and {std.shape}, there are {len(order)} embeddings: "
            "give one mean and one deviation for each"
        )
    with np.errstate(all="ignore"):
        norm = PairNorm.of(Moments(mean, std))
        sizes = np.abs(norm.gain) + np.abs(norm.shift)
    is_wrong = ~((std > 0.0) & (norm.gain > 0.0) & (sizes < MAX_NORM))
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise DataError(
            f"cohort scores of embedding {row} have mean {mean[row]} and deviation {std[row]}, by "
            "which scores cannot be normalised: leave the sample out, or use a wider cohort"
        )
    return PairNorm(norm.gain[order], norm.shift[order])


def plan_tar(counts: ImpostorCounts, genuine: Floats, far: float) -> Callable[[], TarAtFar]:
    """Open the rank of the first impostor above the allowed number."""
    allowed = num_allowed(far, len(counts))
    if allowed < len(counts):
        counts.open_rank(allowed + 1)

    def answer() -> TarAtFar:
        false_accepts, num_below, threshold = len(counts), 0, -np.inf
        if allowed < len(counts):
            boundary = counts.score_at(allowed + 1)
            false_accepts = int(counts.num_above(np.array([boundary]))[0])
            num_below = int(np.searchsorted(genuine, boundary, side="right"))
            threshold = just_above(boundary, FLOAT64)
        return TarAtFar(
            far_target=far,
            tar=(len(genuine) - num_below) / len(genuine),
            far=false_accepts / len(counts),
            false_accepts=false_accepts,
            threshold=threshold,
            rule="conservative",
            num_genuine=len(genuine),
            num_impostors=len(counts),
        )

    return answer


def plan_eer(counts: ImpostorCounts, genuine: Floats) -> Callable[[], Eer]:
    """Open the bins in which FRR - FAR may change its sign."""
    places, slack = counts.bins.of_scores(genuine), counts.bins.slack

    def excess(false_rejects: int, false_accepts: int) -> int:
        return false_rejects * len(counts) - false_accepts * len(genuine)

    def at_edge(place: int, shift: int) -> int:
        """Excess at the lower edge of a bin, with impostors moved down by some bins."""
        accepts = counts.in_or_above[min(max(place + shift, 0), NUM_BINS)]
        return excess(int(np.searchsorted(places, place)), int(accepts))

    edges = range(NUM_BINS + 1)
    high = min(bisect_left(edges, 0, key=lambda place: at_edge(place, -slack)), NUM_BINS)
    low = max(bisect_left(edges, 0, key=lambda place: at_edge(place, slack)) - 1, 0)
    counts.open_bins(low, high)

    def answer() -> Eer:
        inside = genuine[bisect_left(places, low) : bisect_left(places, high)]
        values = np.unique(np.concatenate([inside, counts.scores_between(low, high)]))
        accepts = counts.num_above(values, or_equal=True).tolist()
        rejects = np.searchsorted(genuine, values).tolist()
        index = range(len(values))
        last = bisect_left(index, 0, key=lambda i: excess(rejects[i], accepts[i])) - 1
        before = accepts[last], rejects[last]
        after = (
            int(counts.num_above(values[last : last + 1])[0]),
            int(np.searchsorted(genuine, values[last], side="right")),
        )
        return crossing_point(before, after, len(genuine), len(counts), values[last])

    return answer


def plan_min_dcf(counts: ImpostorCounts, genuine: Floats, p_target: float) -> Callable[[], MinDcf]:
    """Open the bins of genuine scores at which the cost may be least.

    A threshold between two genuine scores can be raised to the next without rejecting more genuine
    pairs, so no other threshold can cost less than these and rejecting everything.
    """
    costs, slack = Costs.of(p_target), counts.bins.slack
    values, below = np.unique(genuine, return_index=True)
    frr = below / len(genuine)
    places = counts.bins.of_scores(values)
    most = counts.in_or_above[np.clip(places - slack, 0, NUM_BINS)]
    least = counts.in_or_above[np.clip(places + 1 + slack, 0, NUM_BINS)]
    limit = min(float(costs.total(frr, most / len(counts)).min()), float(costs.total(1.0, 0.0)))
    kept = np.flatnonzero(costs.total(frr, least / len(counts)) <= limit)
    counts.open_bins(places[kept], places[kept] + 1)

    def answer() -> MinDcf:
        far = counts.num_above(values[kept], or_equal=True) / len(counts)
        total = costs.total(frr[kept], far)
        nothing = float(costs.total(1.0, 0.0))
        if nothing < total.min(initial=np.inf):
            return MinDcf(nothing, np.inf, 0.0, 1.0, p_target)
        best = int(np.argmin(total))
        threshold = float(values[kept[best]])
        return MinDcf(
            float(total[best]), threshold, float(far[best]), float(frr[kept[best]]), p_target
        )

    return answer


def plan_det(counts: ImpostorCounts, genuine: Floats) -> Callable[[], DetCurve]:
    """Open the ranks of points evenly spaced on a probit axis, densely where FAR is below 50 %."""
    probits = np.concatenate([np.arange(-6.0, 0.0, 0.05), np.arange(0.0, 3.01, 0.2)])
    fars = [NormalDist().cdf(probit) for probit in probits.tolist()]
    allowed = {0, *(num_allowed(far, len(counts)) for far in fars)}
    ranks = sorted(k + 1 for k in allowed if k < len(counts))
    for rank in (*ranks, len(counts)):
        counts.open_rank(rank)

    def answer() -> DetCurve:
        boundaries = np.unique([counts.score_at(rank) for rank in ranks])
        lowest = min(float(genuine[0]), counts.score_at(len(counts)))
        accepts = counts.num_above(boundaries)
        rejects = np.searchsorted(genuine, boundaries, side="right")
        return DetCurve(
            np.array([lowest, *np.nextafter(boundaries, np.inf), np.inf]),
            np.array([1.0, *(accepts / len(counts)), 0.0]),
            np.array([0.0, *(rejects / len(genuine)), 1.0]),
            len(genuine),
            len(counts),
        )

    return answer


class ImpostorCounts:
    """Impostor pairs by bin, and by exact score in the bins that were opened."""

    def __init__(self, counts: Ints, bins: Bins) -> None:
        self.counts, self.bins = counts, bins
        self.in_or_above = _from_the_end(counts)  # [NUM_BINS + 1]
        self.is_open = np.zeros(NUM_BINS, dtype=np.bool_)
        self._new: list[Floats] = []
        self._num_new = 0
        self._max_held = MAX_HELD
        self._values: Floats = np.empty(0)
        self._times: Ints = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.in_or_above[0])

    def open_bins(self, low: NDArray[np.int64] | int, high: NDArray[np.int64] | int) -> None:
        """Open bins from ``low`` up to, but not including, ``high``, and the slack around them."""
        steps = np.zeros(NUM_BINS + 1, dtype=np.int64)
        np.add.at(steps, np.clip(np.subtract(low, self.bins.slack), 0, NUM_BINS), 1)
        np.add.at(steps, np.clip(np.add(high, self.bins.slack), 0, NUM_BINS), -1)
        self.is_open |= np.cumsum(steps)[:-1] > 0

    def open_rank(self, rank: int) -> int:
        """Open the bins around the score of this rank, 1 for the largest.

        Returns a bin below which no product of this rank or a smaller one lies.
        """
        place, slack = self._place(rank), self.bins.slack
        self.open_bins(place - slack, place + 1 + slack)  # where the exact score of the rank is
        return place - 2 * slack

    def _place(self, rank: int) -> int:
        """Bin of the product of this rank."""
        return NUM_BINS - int(np.searchsorted(self.in_or_above[::-1], rank))

    def update(self, scores: Floats) -> None:
        """Add exact scores of pairs in open bins."""
        self._new.append(scores)
        self._num_new += len(scores)
        if self._num_new >= self._max_held:
            self.settle()
            self._max_held = max(MAX_HELD, len(self._values))  # not too often if all differ

    def settle(self) -> None:
        """Count equal scores together; call it before the first query."""
        values = np.concatenate([self._values, *self._new])
        times = np.concatenate([self._times, np.ones(self._num_new, dtype=np.int64)])
        order = np.argsort(values)
        values, times = values[order], times[order]
        starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        self._values = values[starts]
        self._times = np.add.reduceat(times, starts) if len(starts) else times
        self._new, self._num_new = [], 0
        self._at_or_above = _from_the_end(self._times)
        self._closed_above = _from_the_end(np.where(self.is_open, 0, self.counts))

    def score_at(self, rank: int) -> float:
        """The exact score of a rank that was opened."""
        rank -= int(self._closed_above[self._place(rank)])
        position = len(self._values) - int(np.searchsorted(self._at_or_above[::-1], rank))
        return float(self._values[position])

    def scores_between(self, low: int, high: int) -> Floats:
        """Distinct exact scores in open bins from ``low`` up to, but not including, ``high``."""
        places = self.bins.of_scores(self._values)
        return self._values[bisect_left(places, low) : bisect_left(places, high)]

    def num_above(self, thresholds: Floats, *, or_equal: bool = False) -> Ints:
        """Pairs that score more than each threshold, or as much; the bins around it are open."""
        positions = np.searchsorted(self._values, thresholds, side="left" if or_equal else "right")
        places, slack = self.bins.of_scores(thresholds), self.bins.slack
        first = self._closed_above[np.clip(places - slack, 0, NUM_BINS)]
        last = self._closed_above[np.clip(places + 1 + slack, 0, NUM_BINS)]
        assert np.array_equal(first, last), "a threshold has pairs in closed bins around it"
        return self._at_or_above[positions] + last


def _from_the_end(counts: Ints) -> Ints:
    """Sum from each place to the end, and zero."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts[::-1], out=sums[1:])
    return sums[::-1].copy()


@dataclass(frozen=True)
class Bins:
    """Equal bins over all possible scores."""

    low: float  # lower edge of the first
    width: float
    slack: int  # largest distance, in bins, of a product from its exact score

    @classmethod
    def of(cls, dim: int, dtype: str, norm: PairNorm | None = None) -> Bins:
        """Bins for products of unit rows of ``dim`` numbers.

        With unit roundoff ``u``, rounding the rows and summing ``d`` products in any order errs by
        at most about ``(d + 2) u`` times the product of the rows' lengths. AS-norm multiplies that
        by the gains, and its own six roundings err by ``u`` times the largest number in it each.
        """
        roundoff = UNIT_ROUNDOFF[dtype]
        error, reach = 1.01 * (dim + 3) * roundoff + 1e-12, 1.0
        if norm is not None:
            gain = 2.0 * float(norm.gain.max())
            reach = gain + 2.0 * float(np.abs(norm.shift).max())
            error = gain * error + reach * (6 * roundoff + 1e-12)
        reach += 2 * error + 4.0 * reach / NUM_BINS
        width = 2 * reach / NUM_BINS
        return cls(-reach, width, math.ceil(error / width) + 1)  # one for rounding the bin itself

    def of_scores(self, scores: Floats) -> Ints:
        """Bin of each score."""
        return np.clip((scores - self.low) / self.width, 0, NUM_BINS - 1).astype(np.int64)


class PairBlocks:
    """All pairs of rows of different groups, in blocks; ``unit`` and ``groups`` are sorted."""

    def __init__(
        self,
        unit: Floats,
        groups: NDArray[np.intp],
        *,
        device: str,
        block: int = 4096,
        dtype: Literal["float32", "float64"] = "float32",
        norm: PairNorm | None = None,
    ) -> None:
        import torch

        if dtype not in UNIT_ROUNDOFF:
            raise ConfigError(f"dtype={dtype!r} is unknown: choose float32 or float64")
        if block < 1:
            raise ConfigError(f"block={block} is below 1: give the rows of a block, such as 4096")
        self.unit, self.groups, self.norm = unit, groups, norm
        self.block = min(block, len(unit))
        self.bins = Bins.of(unit.shape[1], dtype, norm)
        place = {"device": device, "dtype": getattr(torch, dtype)}
        self._rows = torch.from_numpy(unit).to(**place)
        self._norm = norm and tuple(torch.from_numpy(column).to(**place) for column in norm)
        self._groups = torch.from_numpy(groups).to(device)
        self._starts = range(0, len(unit), self.block)
        self._num_blocks = len(self._starts) * (len(self._starts) + 1) // 2

    def count(self, progress: Progress | None = None) -> Ints:
        """Pairs in every bin, ``[NUM_BINS]``."""
        import torch

        counts = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=self._rows.device)
        for done, (_, _, places) in enumerate(self._places(), start=1):
            counts += torch.bincount(places.flatten(), minlength=NUM_BINS + 1)
            if progress is not None:
                progress(done, 2 * self._num_blocks)
        return counts[:-1].cpu().numpy()

    def find(
        self,
        counts: Ints,
        is_open: NDArray[np.bool_],
        found: Found,
        progress: Progress | None = None,
    ) -> None:
        """Score the pairs in open bins exactly, and check them against the pairs counted before.

        ``found`` gets two rows, exact scores and bins of some pairs at a time.
        """
        seen, step = np.zeros(NUM_BINS, dtype=np.int64), 1 << 20
        for done, (top, left, places) in enumerate(self._places(), start=1):
            where, bins = _members(places, is_open)
            np.add.at(seen, bins, 1)
            first, second = top + where // places.shape[1], left + where % places.shape[1]
            for start in range(0, len(first), step):
                part = slice(start, start + step)
                scores = exact_scores(self.unit, first[part], second[part], self.norm)
                error = int(np.abs(self.bins.of_scores(scores) - bins[part]).max(initial=0))
                if error > self.bins.slack:
                    raise BackendError(
                        f"a product on {self._rows.device} is {error} bins from its exact value, "
                        f"rounding explains {self.bins.slack}: use another device, or "
                        "dtype='float64'"
                    )
                found(first[part], second[part], scores, bins[part])
            if progress is not None:
                progress(self._num_blocks + done, 2 * self._num_blocks)
        if not np.array_equal(seen, np.where(is_open, counts, 0)):
            raise BackendError(
                f"two passes of products on {self._rows.device} differ: use another device, or "
                "dtype='float64'"
            )

    def _places(self) -> Iterator[tuple[int, int, Tensor]]:
        """First row, first column and the bins of each block; NUM_BINS where there is no pair."""
        import torch

        scale, offset = 1.0 / self.bins.width, -self.bins.low / self.bins.width
        size = self.block * self.block  # allocated once: a fresh page costs more than a product
        products = torch.empty(size, dtype=self._rows.dtype, device=self._rows.device)
        both = torch.empty_like(products) if self._norm else products
        bins = torch.empty(size, dtype=torch.int32, device=self._rows.device)
        for top in self._starts:
            upper = slice(top, top + self.block)
            for left in range(top, len(self.unit), self.block):
                lower = slice(left, left + self.block)
                shape = len(self._rows[upper]), len(self._rows[lower])
                cosines = products[: shape[0] * shape[1]].view(shape)
                with _full_precision(), torch.no_grad():
                    torch.mm(self._rows[upper], self._rows[lower].T, out=cosines)
                if self._norm:
                    gain, shift = self._norm
                    sums = both[: shape[0] * shape[1]].view(shape)
                    cosines.mul_(torch.add(gain[upper, None], gain[lower], out=sums))
                    cosines.sub_(torch.add(shift[upper, None], shift[lower], out=sums))
                places = bins[: shape[0] * shape[1]].view(shape)
                places.copy_(cosines.mul_(scale).add_(offset))
                if self.groups[min(top + self.block, len(self.unit)) - 1] >= self.groups[left]:
                    is_same = self._groups[upper, None] == self._groups[None, lower]
                    if top == left:
                        is_same |= torch.ones_like(is_same).tril_()
                    places.masked_fill_(is_same, NUM_BINS)
                yield top, left, places


def _members(places: Tensor, is_open: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Flat positions of the entries in open bins, and their bins."""
    import torch

    table = np.append(is_open, False)
    flat = places.flatten()
    if flat.device.type == "cpu":  # an order of magnitude faster than indexing a tensor
        bins = flat.numpy()
        where = np.flatnonzero(table.take(bins, mode="clip"))
        return where, bins[where].astype(np.int64)
    chosen = torch.from_numpy(table).to(flat.device)[flat.long()].nonzero().squeeze(1)
    return chosen.cpu().numpy(), flat[chosen].cpu().numpy().astype(np.int64)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in the precision of their inputs, whatever the process allows elsewhere."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ScoredPair(NamedTuple):
    """Two rows of the embeddings, the smaller first, and their score."""

    first: int
    second: int
    score: float


class PairNorm(NamedTuple):
    """AS-norm of a pair's cosine: ``c (gain_i + gain_j) - (shift_i + shift_j)``."""

    gain: NDArray[np.floating[Any]]  # [n], half of one over the deviation of the cohort scores
    shift: NDArray[np.floating[Any]]  # [n], their mean times that

    @classmethod
    def of(cls, moments: Moments) -> PairNorm:
        """From mean and deviation of each row's cohort scores."""
        gain = 0.5 / moments.std
        return cls(gain, gain * moments.mean)

    def apply(self, cosines: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> None:
        """Make cosines of rows their AS-norm, in place; rows are any two arrays that broadcast."""
        cosines *= self.gain[first] + self.gain[second]
        cosines -= self.shift[first] + self.shift[second]


def unit_rows(embeddings: Any) -> Floats:
    """Rows of length one in float64, ``[n, d]``, from an array or a tensor on any device."""
    if hasattr(embeddings, "detach"):
        embeddings = embeddings.detach().double().cpu().numpy()
    rows = np.array(embeddings, dtype=np.float64, order="C")
    if rows.ndim != 2 or rows.shape[0] < 2 or rows.shape[1] < 1:
        raise ShapeError(f"embeddings have shape {rows.shape}: give [n, d], at least two rows")
    peaks = np.abs(rows).max(axis=1, keepdims=True)
    for is_wrong, what in (
        (~np.isfinite(peaks[:, 0]), "is not finite"),
        (peaks[:, 0] == 0.0, "is zero and has no direction"),
    ):
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            raise DataError(f"embedding {row} {what}: leave the sample out or embed it again")
    rows /= peaks  # squares of the result neither overflow nor vanish
    rows /= np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return rows


def exact_scores(unit: Floats, first: Rows, second: Rows, norm: PairNorm | None = None) -> Floats:
    """Cosines of pairs of rows, or their AS-norm, in float64 and in a fixed order of summation."""
    scores = np.empty(len(first))
    step = max(1, CHUNK_VALUES // unit.shape[1])
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        # a sum along rows is pairwise in each row; a matrix product may sum in any order
        scores[part] = (unit[first[part]] * unit[second[part]]).sum(axis=1)
    if norm is not None:
        norm.apply(scores, first, second)
    return scores


def genuine_pairs(
    groups: NDArray[np.intp], max_pairs: int = 1 << 20
) -> Iterator[tuple[Rows, Rows]]:
    """Pairs of rows of the same group, in portions; ``groups`` is sorted."""
    firsts, seconds, num_held = [], [], 0
    first = np.arange(len(groups))
    for distance in range(1, len(groups)):
        first = first[: np.searchsorted(first, len(groups) - distance)]
        first = first[groups[first] == groups[first + distance]]
        if not len(first):
            break
        firsts.append(first)
        seconds.append(first + distance)
        num_held += len(first)
        if num_held >= max_pairs:
            yield np.concatenate(firsts), np.concatenate(seconds)
            firsts, seconds, num_held = [], [], 0
    if firsts:
        yield np.concatenate(firsts), np.concatenate(seconds)


class Hardest:
    """Keeps pairs with the largest scores, or the smallest (``sign`` -1); ties: smaller rows."""

    def __init__(self, num_kept: int, *, sign: int) -> None:
        self.num_kept, self.sign = num_kept, sign
        self._scores: Floats = np.empty(0)
        self._rows: NDArray[np.intp] = np.empty((2, 0), dtype=np.intp)

    def update(self, first: Rows, second: Rows, scores: Floats) -> None:
        """Add pairs of rows, numbered as by the caller."""
        if len(self._scores) == self.num_kept:  # most pairs of a portion are not hard
            worst = self._scores[-1] if self.num_kept else np.inf * self.sign
            near = np.flatnonzero(self.sign * scores >= self.sign * worst)
            first, second, scores = first[near], second[near], scores[near]
        pairs = np.stack([np.minimum(first, second), np.maximum(first, second)])
        scores = np.concatenate([self._scores, scores])
        rows = np.concatenate([self._rows, pairs], axis=1)
        order = np.lexsort([rows[1], rows[0], -self.sign * scores])[: self.num_kept]
        self._scores, self._rows = scores[order], rows[:, order]

    def pairs(self) -> tuple[ScoredPair, ...]:
        """Hardest first."""
        columns = (*self._rows.tolist(), self._scores.tolist())
        return tuple(ScoredPair(*pair) for pair in zip(*columns, strict=True))
