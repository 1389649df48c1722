"""One-to-many search: rank rates, and error rates of open-set identification."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.checks import Scores, check_rate, checked_scores
from qmargin.metrics.operating import tars_at_fars

ROWS = 256  # searches processed together


@dataclass(frozen=True)
class FnirAtFpir:
    """False negative identification rate where the false positive one is limited.

    ``fnir`` is the share of the searches with a mate whose mate is below the threshold, ``fpir``
    that of the searches without a mate in which another subject reaches it.
    """

    fpir_target: float
    fnir: float
    fpir: float
    false_positives: int
    threshold: float


@dataclass(frozen=True)
class Identification:
    """Result of ``identify``.

    ``rank_rates`` are the shares of the searches with a mate whose mate is at that rank or better;
    ``fnirs`` has a record for every ``fpir``.
    """

    ranks: tuple[int, ...]
    rank_rates: tuple[float, ...]
    fnirs: tuple[FnirAtFpir, ...]
    num_mated: int
    num_nonmated: int

    @property
    def rank1(self) -> float:
        """Share of searches with a mate in which no other subject scores as high as the mate."""
        return self.rank_rates[self.ranks.index(1)]


def identify(
    scores: ArrayLike,
    probe_subjects: ArrayLike,
    gallery_subjects: ArrayLike,
    fpirs: Sequence[float] = (),
    *,
    ranks: Sequence[int] = (1,),
) -> Identification:
    """Compute rank rates, and FNIR at FPIR.

    A subject with several gallery entries has the score of the best of them. The rank of a mate
    counts every other subject that scores as high or higher, so ties are never in its favour. The
    threshold of an FPIR comes from the largest score of every search without a mate, by the rule of
    :func:`qmargin.metrics.tar_at_far`.

    Args:
        scores: Scores ``[probes, gallery]``.
        probe_subjects: Subject of each probe, ``[probes]``.
        gallery_subjects: Subject of each gallery entry, ``[gallery]``.
        fpirs: False positive identification rates, in (0, 1].
        ranks: Ranks to report; rank 1 is always among them.

    Raises:
        ProtocolError: If no probe has a mate, or an FPIR is not measurable with the probes that
            have none.

    Examples:
        >>> scores = [[0.9, 0.1], [0.2, 0.3], [0.4, 0.1]]
        >>> result = identify(scores, ["ann", "ann", "cy"], ["ann", "bob"], [1.0])
        >>> result.rank1, result.fnirs[0].fnir
        (0.5, 0.0)
    """
    probes, gallery = np.asarray(probe_subjects), np.asarray(gallery_subjects)
    matrix = np.asarray(scores)
    if matrix.ndim != 2 or matrix.shape != (probes.size, gallery.size):
        found = f"{probes.size} probes and {gallery.size} gallery entries"
        raise ShapeError(f"scores have shape {matrix.shape} for {found}: pass [probes, gallery]")
    if not matrix.size:
        raise ProtocolError(f"scores have shape {matrix.shape}: at least one search is needed")
    if matrix.dtype not in (np.float32, np.float64):
        matrix = matrix.astype(np.float64)
    row_least = matrix.min(axis=1)
    if np.isnan(row_least).any():
        row = np.flatnonzero(np.isnan(row_least))[0]
        column = np.flatnonzero(np.isnan(matrix[row]))[0]
        raise DataError(f"score of probe {row} and gallery entry {column} is NaN: score it again")
    ranks = tuple(sorted({1, *ranks}))
    if ranks[0] < 1:
        raise ConfigError(f"rank {ranks[0]} does not exist: ranks start at 1")
    names, columns = np.unique(gallery, return_inverse=True)
    places = np.minimum(np.searchsorted(names, probes), len(names) - 1)
    has_mate = names[places] == probes
    if not has_mate.any():
        raise ProtocolError(
            f"none of {len(probes)} probes has its subject in the gallery: add mates"
        )
    mates, others, best = _search(matrix, places, columns)
    mates, ranks_of_mates = mates[has_mate], others[has_mate] + 1
    rank_rates = tuple(float(np.mean(ranks_of_mates <= rank)) for rank in ranks)
    fnirs = []
    if rates := [check_rate(fpir, "fpir") for fpir in fpirs]:
        for point in tars_at_fars(mates, checked_scores(best[~has_mate], "non-mated"), rates):
            fnir = (len(mates) - round(point.tar * len(mates))) / len(mates)
            record = (point.far_target, fnir, point.far, point.false_accepts, point.threshold)
            fnirs.append(FnirAtFpir(*record))
    sizes = int(has_mate.sum()), int((~has_mate).sum())
    return Identification(ranks, rank_rates, tuple(fnirs), *sizes)


def _search(
    matrix: Scores, places: NDArray[np.intp], columns: NDArray[np.intp]
) -> tuple[Scores, NDArray[np.int64], Scores]:
    """Per search: the score of the subject at its place, how many others reach it, the largest."""
    order = np.argsort(columns, kind="stable")
    starts = np.flatnonzero(np.diff(columns[order], prepend=-1))
    is_plain = len(starts) == len(order) and bool(np.all(order == np.arange(len(order))))
    mates, best = np.empty(len(matrix), matrix.dtype), np.empty(len(matrix), matrix.dtype)
    others = np.empty(len(matrix), np.int64)
    for start in range(0, len(matrix), ROWS):
        rows = slice(start, start + ROWS)
        block = matrix[rows] if is_plain else np.maximum.reduceat(matrix[rows][:, order], starts, 1)
        mates[rows] = block[np.arange(len(block)), places[rows]]
        others[rows] = (block >= mates[rows, None]).sum(axis=1) - 1  # without the mate itself
        best[rows] = block.max(axis=1)
    return mates, others, best
