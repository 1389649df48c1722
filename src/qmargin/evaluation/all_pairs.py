"""Exact operating points over all pairs of an embedding matrix, without storing their scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import BackendError, ConfigError, DataError, ProtocolError, ShapeError
from qmargin.evaluation.pair_blocks import NUM_BINS, Bins, Ints, PairBlocks
from qmargin.evaluation.pair_counts import ImpostorCounts
from qmargin.evaluation.pair_plans import plan_det, plan_eer, plan_min_dcf, plan_tar
from qmargin.evaluation.pair_scores import (
    Floats,
    Hardest,
    PairNorm,
    Rows,
    ScoredPair,
    exact_scores,
    genuine_pairs,
    unit_rows,
)
from qmargin.files import Progress
from qmargin.metrics.crossing import Eer, MinDcf
from qmargin.metrics.curve import DetCurve
from qmargin.metrics.normalise import Moments
from qmargin.metrics.operating import TarAtFar, check_measurable

MAX_NORM = 1e30  # of a normalised score: products in float32 do not overflow


@dataclass(frozen=True, eq=False)
class AllPairs:
    """What all pairs of an embedding matrix give.

    Attributes:
        tar: TAR at each of the false acceptance rates asked for.
        eer: The equal error rate.
        min_dcf: The least cost at each prior.
        det: About a hundred points of the exact curve, both ends among them.
        hardest_impostors: Pairs of different subjects with the largest scores, largest first.
        hardest_genuine: Pairs of one subject with the smallest scores, smallest first.
        num_genuine: Pairs of one subject.
        num_impostors: Pairs of different subjects.
        num_rescored: Impostor pairs that were scored exactly; it may depend on the blocks.
        products: All impostor pairs by their product's bin; it may depend on the device.
    """

    tar: tuple[TarAtFar, ...]
    eer: Eer
    min_dcf: tuple[MinDcf, ...]
    det: DetCurve
    hardest_impostors: tuple[ScoredPair, ...]
    hardest_genuine: tuple[ScoredPair, ...]
    num_genuine: int
    num_impostors: int
    num_rescored: int
    products: ProductCounts


@dataclass(frozen=True, eq=False)
class ProductCounts:
    """Impostor pairs counted by bins of their rounded products.

    Attributes:
        counts: ``[NUM_BINS]``.
        bins: Edges, and how far a product can be from the exact score.
    """

    counts: Ints
    bins: Bins

    @property
    def scores(self) -> Floats:
        """Centre of every bin."""
        places = np.arange(len(self.counts), dtype=np.float64)
        return np.asarray(self.bins.low + (places + 0.5) * self.bins.width, np.float64)

    def first_of_largest(self, number: int) -> int:
        """The bin from which on there are at most ``number`` pairs."""
        above = np.cumsum(self.counts[::-1])
        return len(above) - int(np.searchsorted(above, number, side="right"))


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
    ``dtype`` only tell which pairs can decide a result; those are scored in float64. Hence neither
    the blocks nor the device nor ``dtype`` changes a result. Memory holds the embeddings, one
    block, and the scores of the genuine pairs; and scores of many more pairs where the deviation
    of one row's cohort scores is a thousandth of the others' or less.

    Args:
        embeddings: ``[n, d]`` array or tensor of any floating dtype.
        subjects: ``[n]`` subject of each row, names or numbers.
        fars: False acceptance rates at which to measure TAR.
        p_targets: Priors at which to measure minDCF.
        num_hardest: How many of the hardest pairs of each kind to return.
        block: Rows on each side of a block.
        device: Where products are computed, such as ``"cuda"``.
        dtype: Precision of the products, ``"float32"`` or ``"float64"``.
        moments: Mean and deviation of each row's scores against a cohort, from ``cohort_moments``:
            scores are AS-norms then.
        progress: Called with the number of blocks done and their total, over two passes.

    Raises:
        DataError: If an embedding is zero or not finite, or has cohort scores without a spread.
        ProtocolError: If no two rows share a subject, or all do, or a rate is too small for the
            number of impostor pairs.

    Examples:
        >>> rows = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> found = evaluate_all_pairs(rows, ["a", "a", "b", "b"], fars=[0.25])
        >>> found.num_genuine, found.num_impostors, found.tar[0].tar, found.eer.eer
        (2, 4, 1.0, 0.0)
    """
    blocks, order = _blocks(embeddings, subjects, moments, block=block, device=device, dtype=dtype)
    genuine, hardest_genuine = _genuine(blocks, order, num_hardest)
    fars = tuple(float(far) for far in fars)
    num_impostors = len(order) * (len(order) - 1) // 2 - len(genuine)
    _check_measurable(len(genuine), num_impostors, fars)

    counts = ImpostorCounts(blocks.count(progress), blocks.bins)
    if len(counts) != num_impostors:
        raise BackendError(
            f"{len(counts)} of {num_impostors} scores by products on {device} are in range: "
            f"use another device, or dtype='float64'"
        )
    tar = [plan_tar(counts, genuine, far) for far in fars]
    eer = plan_eer(counts, genuine)
    min_dcf = [plan_min_dcf(counts, genuine, float(p_target)) for p_target in p_targets]
    det = plan_det(counts, genuine)
    hardest = _find(blocks, counts, order, num_hardest=num_hardest, progress=progress)
    return AllPairs(
        tar=tuple(answer() for answer in tar),
        eer=eer(),
        min_dcf=tuple(answer() for answer in min_dcf),
        det=det(),
        hardest_impostors=hardest.pairs(),
        hardest_genuine=hardest_genuine,
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
    progress: Progress | None = None,
) -> PairScores:
    """Exact scores of all impostor pairs above some score, at most ``number`` of them.

    There are fewer where scores are equal or nearly so.

    Args:
        embeddings: As in ``evaluate_all_pairs``, as are the others.
        subjects: Of each row.
        products: What ``evaluate_all_pairs`` counted, on the same device.
        number: The most pairs to return.
        device: Where products are computed.
        moments: For AS-norm.
        progress: Called with the number of blocks done and their total.
    """
    blocks, order = _blocks(embeddings, subjects, moments, device=device)
    start = products.first_of_largest(number)
    bins = products.bins
    is_whole = not products.counts[:start].any()
    floor = -np.inf if is_whole else bins.low + (start + bins.slack + 1) * bins.width
    parts: list[tuple[Rows, Rows, Floats]] = [(order[:0], order[:0], np.empty(0))]

    def found(first: Rows, second: Rows, scores: Floats, places: Ints) -> None:
        kept = np.flatnonzero(scores >= floor)  # below, some pairs are in other bins
        parts.append((order[first[kept]], order[second[kept]], scores[kept]))

    is_open = np.arange(len(products.counts)) >= start
    blocks.find(products.counts, is_open, found, _second_half(progress))
    return PairScores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _second_half(progress: Progress | None) -> Progress | None:
    """``find`` counts the blocks of two passes, of which this is one."""
    if progress is None:
        return None
    return lambda done, total: progress(done - total // 2, total // 2)


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


def _blocks(
    embeddings: Any,
    subjects: Sequence[Any] | NDArray[Any],
    moments: Moments | None,
    *,
    device: str,
    block: int = 4096,
    dtype: Literal["float32", "float64"] = "float32",
) -> tuple[PairBlocks, Rows]:
    """Blocks of rows sorted by subject, and that order."""
    unit = unit_rows(embeddings)
    order, groups = _sorted_subjects(subjects, len(unit))
    norm = _norm(moments, order)
    return PairBlocks(
        unit[order], groups, block=block, device=device, dtype=dtype, norm=norm
    ), order


def num_impostor_pairs(counts: NDArray[np.integer[Any]]) -> int:
    """Pairs of samples of two subjects, by the number of samples of each.

    Examples:
        >>> num_impostor_pairs(np.array([2, 1, 1]))
        5
    """
    return (int(counts.sum()) ** 2 - int((counts * counts).sum())) // 2


def _find(
    blocks: PairBlocks,
    counts: ImpostorCounts,
    order: Rows,
    *,
    num_hardest: int,
    progress: Progress | None,
) -> Hardest:
    """Score the pairs in open bins, and keep the hardest of all."""
    hardest = Hardest(min(num_hardest, len(counts)), sign=1)
    floor = NUM_BINS
    if hardest.num_kept:
        floor = counts.open_rank(hardest.num_kept)
        counts.open_bins(floor, NUM_BINS)

    def found(first: Rows, second: Rows, scores: Floats, places: Ints) -> None:
        counts.update(scores)
        high = np.flatnonzero(places >= floor)
        if len(high):
            hardest.update(order[first[high]], order[second[high]], scores[high])

    blocks.find(counts.counts, counts.is_open, found, progress)
    counts.settle()
    return hardest


def _sorted_subjects(subjects: Any, length: int) -> tuple[Rows, NDArray[np.intp]]:
    """An order of the rows in which subjects are together, and the subject's number of each."""
    names = np.asarray(subjects)
    if names.shape != (length,):
        raise ShapeError(
            f"subjects have shape {names.shape}, there are {length} embeddings: give one for each"
        )
    numbers = np.unique(names, return_inverse=True)[1].astype(np.intp)
    order = np.argsort(numbers, kind="stable")
    return order, numbers[order]


def _norm(moments: Moments | None, order: Rows) -> PairNorm | None:
    if moments is None:
        return None
    columns = [np.asarray(column, np.float64) for column in moments]
    if any(column.shape != order.shape for column in columns):
        raise ShapeError(
            f"moments have shapes {[column.shape for column in columns]}, there are {len(order)} "
            "embeddings: give one mean and one deviation for each"
        )
    mean, std = columns
    with np.errstate(all="ignore"):
        norm = PairNorm.of(Moments(mean, std))
        sizes = np.abs(norm.gain) + np.abs(norm.shift)
    is_wrong = ~((std > 0.0) & (norm.gain > 0.0) & (sizes < MAX_NORM))
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        raise DataError(
            f"cohort scores of embedding {row} have mean {mean[row]} and deviation {std[row]}, by "
            "which no score can be normalised: leave the sample out, or use a wider cohort"
        )
    return PairNorm(norm.gain[order], norm.shift[order])


def _genuine(
    blocks: PairBlocks, order: Rows, num_hardest: int
) -> tuple[Floats, tuple[ScoredPair, ...]]:
    """Sorted scores of all genuine pairs, and the lowest of them."""
    if num_hardest < 0:
        raise ConfigError(f"num_hardest={num_hardest} is negative: give a number of pairs")
    hardest = Hardest(num_hardest, sign=-1)
    parts = [np.empty(0)]
    for first, second in genuine_pairs(blocks.groups):
        parts.append(exact_scores(blocks.unit, first, second, blocks.norm))
        hardest.update(order[first], order[second], parts[-1])
    return np.sort(np.concatenate(parts)), hardest.pairs()


def _check_measurable(num_genuine: int, num_impostors: int, fars: tuple[float, ...]) -> None:
    for number, what in ((num_genuine, "share one"), (num_impostors, "are of different ones")):
        if number == 0:
            raise ProtocolError(
                f"0 pairs of embeddings {what}, at least 1 is needed: check the subjects"
            )
    for far in fars:
        check_measurable(far, num_impostors)
