"""Templates: many images of one subject as one vector, compared pair by pair (IJB-B and IJB-C)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import DataError, ShapeError
from qmargin.evaluation.intervals import StageProgress
from qmargin.evaluation.keys import Codes, TrialKeys
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.large import evaluate_large
from qmargin.evaluation.result import Result, Source
from qmargin.evaluation.score_files import ScoreSet
from qmargin.evaluation.trials import SubjectColumns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Signed = NDArray[np.signedinteger]
Progress = Callable[[int, int], None]
IJB_FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_ROWS = 8192  # images pooled at once
_PAIRS = 256  # pairs scored at once: both sides stay in the cache
_PAIRS_BETWEEN_REPORTS = 1 << 18


@dataclass(frozen=True)
class TemplateRows:
    """Which template and which medium, a photo or a video, each image belongs to.

    Attributes:
        template: ``[n]``.
        media: ``[n]``; the same number in two templates means nothing.
        detector: Score of the face detector, ``[n]``; None where there is none.
    """

    template: Ints
    media: Ints
    detector: Floats | None = None

    def __post_init__(self) -> None:
        for name in ("media", "detector"):
            column = getattr(self, name)
            if column is not None and column.shape != self.template.shape:
                raise ShapeError(
                    f"{name} has the shape {column.shape}, but there are {len(self.template):,} "
                    "images: give one value for each"
                )
        if self.detector is not None:
            is_bad = ~(np.isfinite(self.detector) & (self.detector >= 0.0))
            if is_bad.any():
                row = int(np.argmax(is_bad))
                raise DataError(
                    f"the detector's score of image {row} is {self.detector[row]}: "
                    "it has to be finite and not negative"
                )


@dataclass(frozen=True)
class Pooling:
    """How the images of a template become one vector.

    Attributes:
        keep_norms: Images weigh as much as their embeddings are long; otherwise all the same.
        use_detector: Images are weighed by the detector's scores.
    """

    keep_norms: bool = True
    use_detector: bool = True


@dataclass(frozen=True)
class Templates:
    """Unit vectors of templates.

    Attributes:
        ids: Ascending, ``[t]``.
        vectors: float64 ``[t, d]``, each of length 1.
    """

    ids: Ints
    vectors: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(self, ids: Signed, what: str) -> Codes:
        """Row of each template, int32: there are millions of pairs of few templates.

        Raises:
            DataError: A template has no images; ``what`` says where it was named.
        """
        rows = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1).astype(np.int32)
        is_missing = self.ids[rows] != ids
        if is_missing.any():
            place = int(np.argmax(is_missing))
            raise DataError(
                f"{what}, entry {place + 1}: template {ids[place]} has no images "
                f"({int(is_missing.sum()):,} such entries): are the lists of one release?"
            )
        return rows


@dataclass(frozen=True)
class TemplatePairs:
    """Templates to compare.

    Attributes:
        enrol: Template, ``[p]``.
        test: Template, ``[p]``.
        is_genuine: ``[p]``.
        source: The file.
        subject_of: Subject of every template, None where it is not known.
    """

    enrol: Signed
    test: Signed
    is_genuine: NDArray[np.bool_]
    source: Source
    subject_of: dict[int, str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.enrol)


def pool_templates(
    embeddings: NDArray[np.floating],
    rows: TemplateRows,
    pooling: Pooling | None = None,
    *,
    progress: Progress | None = None,
) -> Templates:
    """One vector per template: the sum over its media of the mean over a medium's images.

    Sums are in float64. Embeddings are weighed as ``pooling`` says first, and the sum is divided by
    its length at the end.

    Args:
        embeddings: One row per image, ``[n, d]``; they may be mapped from a file.
        rows: Template and medium of every row.
        pooling: Which weights images have.
        progress: Called with the images done and their number.

    Raises:
        DataError: The vectors of a template cancel, or an embedding to be normalised is zero.

    Examples:
        >>> rows = TemplateRows(np.array([7, 7, 7, 2]), np.array([1, 1, 4, 9]))
        >>> embeddings = np.array([[2.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 5.0]])
        >>> templates = pool_templates(embeddings, rows)
        >>> templates.ids, templates.vectors
        (array([2, 7]), array([[0. , 1. ],
               [0.6, 0.8]]))
    """
    pooling = pooling or Pooling()
    if embeddings.ndim != 2 or len(embeddings) != len(rows.template) or not len(embeddings):
        raise ShapeError(
            f"embeddings have the shape {embeddings.shape}, but there are {len(rows.template):,} "
            "images in the lists: give one row for each, at least one"
        )
    weights = _media_weights(rows)
    if pooling.use_detector and rows.detector is not None:
        weights *= rows.detector
    order = np.argsort(rows.template, kind="stable")
    ids, starts = np.unique(rows.template[order], return_index=True)
    ends = np.append(starts[1:], len(order))
    sums = np.zeros((len(ids), embeddings.shape[1]))
    first = 0
    while first < len(ids):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + _ROWS, side="right")))
        images = order[starts[first] : ends[last - 1]]
        _add_images_(sums[first:last], embeddings, images, weights, starts[first:last], pooling)
        first = last
        if progress is not None:
            progress(int(ends[last - 1]), len(order))
    return Templates(ids.astype(np.int64), _unit_(sums, ids))


def _media_weights(rows: TemplateRows) -> Floats:
    """One over the number of images of the same medium in the same template."""
    keys = np.stack([rows.template, rows.media], axis=1)
    order = np.lexsort((rows.media, rows.template))
    is_new = np.any(np.diff(keys[order], axis=0, prepend=keys[order[:1]] - 1) != 0, axis=1)
    group = np.cumsum(is_new) - 1
    weights = np.empty(len(order))
    weights[order] = 1.0 / np.bincount(group)[group]
    return weights


def _add_images_(
    sums: Floats,
    embeddings: NDArray[np.floating],
    images: Ints,
    weights: Floats,
    starts: Ints,
    pooling: Pooling,
) -> None:
    """Fill the sums of whole templates, whose ``images`` are together and in order.

    Either all of them fit in one piece, or there is one template, whose pieces add up.
    """
    for begin in range(0, len(images), _ROWS):
        piece = images[begin : begin + _ROWS]
        block = embeddings[piece].astype(np.float64)
        if not pooling.keep_norms:
            lengths = np.sqrt(np.einsum("ij,ij->i", block, block))
            if (lengths == 0.0).any():
                raise DataError(
                    f"the embedding of image {piece[int(np.argmin(lengths))]} is zero, so it has "
                    "no direction: embed it again, or keep the norms"
                )
            block /= lengths[:, None]
        block *= weights[piece, None]
        sums += np.add.reduceat(block, starts - starts[0], axis=0)


def _unit_(sums: Floats, ids: NDArray[np.int64]) -> Floats:
    """Divide every row by its length, in place."""
    largest = np.abs(sums).max(axis=1)
    if not np.isfinite(largest).all():
        raise DataError(
            f"template {ids[int(np.argmin(np.isfinite(largest)))]} is not finite: embed it again"
        )
    if (largest == 0.0).any():
        raise DataError(
            f"template {ids[int(np.argmin(largest))]} has the length zero, so it has no direction: "
            "are all its detector scores zero?"
        )
    sums /= largest[:, None]  # squares of very small or large values leave the range of float64
    sums /= np.sqrt(np.einsum("ij,ij->i", sums, sums))[:, None]
    return sums


def pair_scores(
    vectors: Floats,
    enrol: Signed,
    test: Signed,
    *,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> Floats:
    """Inner products of rows, in float64; each depends on its two rows only.

    Examples:
        >>> pair_scores(np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([0, 1]), np.array([1, 1]))
        array([0.6, 1. ])
    """
    scores = np.empty(len(enrol))

    def score(begin: int) -> int:
        order = begin + np.argsort(enrol[begin : begin + _PAIRS_BETWEEN_REPORTS], kind="stable")
        for first in range(0, len(order), _PAIRS):
            rows = order[first : first + _PAIRS]  # few rows of one side, which the cache keeps
            left, right = vectors[enrol[rows]], vectors[test[rows]]
            scores[rows] = np.einsum("ij,ij->i", left, right)
        return len(order)

    done = 0
    with ThreadPoolExecutor(num_threads) as pool:
        for number in pool.map(score, range(0, len(enrol), _PAIRS_BETWEEN_REPORTS)):
            done += number
            if progress is not None:
                progress(done, len(enrol))
    return scores


def evaluate_templates(
    templates: Templates,
    pairs: TemplatePairs,
    options: EvaluationOptions | None = None,
    *,
    sources: tuple[Source, ...] = (),
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """One-to-one verification of templates.

    Args:
        templates: What ``pool_templates`` made.
        pairs: What to compare. Intervals draw subjects; where they are not given, templates that
            genuine pairs link are taken for one subject.
        options: What to measure; TAR at FAR 1e-6 to 1e-1 without it.
        sources: Files that made the templates.
        command: What was run, for the record.
        progress: Called with a stage, how much of it is done, and its total.

    Raises:
        DataError: A template has no images, or subjects contradict labels.
    """
    options = options or EvaluationOptions(fars=IJB_FARS)
    what = pairs.source.path
    enrol, test = (templates.rows_of(side, what) for side in (pairs.enrol, pairs.test))
    scored = None if progress is None else lambda done, all: progress("scoring", done, all)
    scores = pair_scores(templates.vectors, enrol, test, progress=scored)
    names = [str(each) for each in templates.ids.tolist()]
    subjects, note = _subjects(templates, pairs, enrol, test)
    score_set = ScoreSet(
        scores,
        pairs.is_genuine,
        TrialKeys.from_codes(names, enrol, test),
        (pairs.source, *sources),
        subjects,
        lambda row: f"{what}, pair {row + 1}",
    )
    del enrol, test  # the keys have their own
    if subjects is None:
        options = replace(options, subjects="none")
    result = evaluate_large(score_set, options, command=command, progress=progress)
    method = result.protocol.interval
    if method.method.endswith("bootstrap"):
        method = replace(method, note=note)
    return replace(result, protocol=replace(result.protocol, interval=method))


def _subjects(
    templates: Templates, pairs: TemplatePairs, enrol: Codes, test: Codes
) -> tuple[SubjectColumns | None, str]:
    """Subjects of both sides that no label contradicts, and where they come from."""
    ids, given = templates.ids.tolist(), pairs.subject_of
    choices: list[tuple[list[str], str]] = []
    if given is not None and all(each in given for each in ids):
        choices.append(([given[each] for each in ids], "subjects are those of the release"))
    links = _linked(len(ids), enrol[pairs.is_genuine], test[pairs.is_genuine]).tolist()
    note = "subjects are templates that genuine pairs link"
    choices.append(([f"linked to {ids[first]}" for first in links], note))
    for names, note in choices:
        distinct, places = np.unique(names, return_inverse=True)
        codes = places.astype(np.int32)
        sides = SubjectColumns(tuple(distinct.tolist()), codes[enrol], codes[test])
        if ((sides.enrol == sides.test) == pairs.is_genuine).all():
            return sides, note
    return None, "subjects are not known: templates are drawn, so intervals are too narrow"


def _linked(number: int, enrol: Codes, test: Codes) -> Ints:
    """For each template the first of those that hang together with it through genuine pairs."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(enrol), np.int8), (enrol, test)), shape=(number, number))
    codes = connected_components(links.tocsr(), directed=False)[1]
    _, first = np.unique(codes, return_index=True)
    return np.asarray(first[codes], np.int64)
