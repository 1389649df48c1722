"""Search in a gallery of templates (1:N): who is it, and is it anybody at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ProtocolError
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.keys import TrialKeys
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.measures import Measure, Measured, with_measures
from qmargin.evaluation.protocols.templates import Floats, Ints, Templates
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.trials import SubjectColumns
from qmargin.metrics.identification import Identification, identify

IJB_FPIRS = (1e-2, 1e-1)
RANKS = (1, 5, 10)
_PROBES = 1024  # searches whose scores are computed together


@dataclass(frozen=True)
class TemplateList:
    """Templates of a gallery, or of searches, with their subjects.

    Attributes:
        name: Such as ``G1``.
        template: Distinct, ``[n]``.
        subject: ``[n]``.
        source: The file.
    """

    name: str
    template: Ints
    subject: NDArray[np.str_] = field(repr=False)
    source: Source

    def __len__(self) -> int:
        return len(self.template)


def search_scores(templates: Templates, probes: TemplateList, gallery: TemplateList) -> Floats:
    """Inner products of probes and gallery, ``[probes, gallery]``, float64."""
    sought = templates.rows_of(probes.template, probes.source.path)
    known = templates.vectors[templates.rows_of(gallery.template, gallery.source.path)].T
    scores = np.empty((len(probes), len(gallery)))
    for first in range(0, len(probes), _PROBES):
        rows = sought[first : first + _PROBES]
        np.matmul(templates.vectors[rows], known, out=scores[first : first + _PROBES])
    return scores


def evaluate_identification(
    templates: Templates,
    probes: TemplateList,
    gallery: TemplateList,
    options: EvaluationOptions | None = None,
    *,
    sources: tuple[Source, ...] = (),
    command: str = "",
    progress: StageProgress | None = None,
) -> Measured:
    """Search every probe in a gallery.

    The result has one trial per search: of a probe whose subject is in the gallery, the score of
    its mate; of any other, the largest score of all. So its TAR is the true positive identification
    rate (1 - FNIR), its FAR the false positive identification rate (FPIR), and the hardest pairs
    are the searches that went wrong. Rank rates are measures beside it.

    Args:
        templates: What ``pool_templates`` made.
        probes: What is searched.
        gallery: What is searched in; a subject with several templates has its best score.
        options: What to measure; TPIR at FPIR 0.01 and 0.1 without it.
        sources: Files that made the templates.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.

    Raises:
        DataError: A template has no images.
        ProtocolError: No probe, or every probe, has a mate in the gallery.
    """
    options = options or EvaluationOptions(fars=IJB_FPIRS)
    scores = search_scores(templates, probes, gallery)
    found = identify(scores, probes.subject, gallery.subject, ranks=_ranks(gallery))
    best, is_mated = _candidates(scores, probes, gallery)
    if found.num_nonmated == 0:
        raise ProtocolError(
            f"all {len(probes):,} searches of {probes.source.path} have a mate in gallery "
            f"{gallery.name}, so there is no FPIR: search a gallery that lacks some subjects"
        )
    score_set = _searches(scores, best, is_mated, probes, gallery)
    score_set = replace(score_set, sources=(*score_set.sources, *sources))
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    name = f"{result.protocol.name}, 1:N in {gallery.name} (TAR is TPIR, FAR is FPIR)"
    result = replace(
        result,
        protocol=replace(result.protocol, name=name),
        trials_sha256=_searches_sha256(probes, gallery, is_mated),
    )
    return with_measures(result, rank_measures(found, gallery.name))


def rank_measures(found: Identification, gallery: str) -> tuple[Measure, ...]:
    """Rank rates as measures.

    Examples:
        >>> found = identify([[0.9, 0.1], [0.2, 0.8]], ["al", "bo"], ["al", "bo"])
        >>> [str(measure) for measure in rank_measures(found, "G1")]
        ['1.00000 (2 searches with a mate)']
    """
    note = f"{found.num_mated:,} searches with a mate"
    return tuple(
        Measure(f"rank-{rank} rate in {gallery}", rate, None, note)
        for rank, rate in zip(found.ranks, found.rank_rates, strict=True)
    )


def _ranks(gallery: TemplateList) -> tuple[int, ...]:
    """Ranks that mean something in a gallery of so many subjects."""
    number = len(np.unique(gallery.subject))
    return tuple(rank for rank in RANKS if rank == 1 or rank < number)


def _candidates(
    scores: Floats, probes: TemplateList, gallery: TemplateList
) -> tuple[Ints, NDArray[np.bool_]]:
    """For every search the best gallery entry of its mate, or of anybody if it has none."""
    is_mated = np.isin(probes.subject, gallery.subject)
    best = np.empty(len(probes), dtype=np.int64)
    for first in range(0, len(probes), _PROBES):
        rows = slice(first, first + _PROBES)
        is_mate = probes.subject[rows, None] == gallery.subject[None, :]
        is_open = is_mate | ~is_mated[rows, None]
        best[rows] = np.where(is_open, scores[rows], -np.inf).argmax(axis=1)
    return best, is_mated


def _searches(
    scores: Floats,
    best: Ints,
    is_mated: NDArray[np.bool_],
    probes: TemplateList,
    gallery: TemplateList,
) -> ScoreSet:
    """One trial per search: the gallery entry enrols, the probe tests."""
    enrol = [str(each) for each in gallery.template[best].tolist()]
    test = [str(each) for each in probes.template.tolist()]
    names, places = np.unique(
        np.concatenate([gallery.subject[best], probes.subject]), return_inverse=True
    )
    codes = places.astype(np.int32)
    return ScoreSet(
        scores[np.arange(len(best)), best],
        is_mated,
        TrialKeys.from_names(enrol, test),
        (probes.source, gallery.source),
        SubjectColumns(tuple(names.tolist()), codes[: len(best)], codes[len(best) :]),
        lambda row: f"{probes.source.path}, search {row + 1}",
    )


def _searches_sha256(
    probes: TemplateList, gallery: TemplateList, is_mated: NDArray[np.bool_]
) -> str:
    """Of the searches, not of the candidates they found: those differ between systems."""
    order = np.argsort(probes.template, kind="stable")
    digest = hashlib.sha256(np.sort(gallery.template).astype("<i8").tobytes())
    digest.update(probes.template[order].astype("<i8").tobytes())
    digest.update(is_mated[order].astype(np.uint8).tobytes())
    return digest.hexdigest()
