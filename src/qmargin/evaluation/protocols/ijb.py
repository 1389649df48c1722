"""IJB-B and IJB-C: templates, 1:1 verification and 1:N identification, from the released files."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import CorruptSample, DataError, ProtocolError, ShapeError
from qmargin.evaluation.columns import Codes, first_row, numbered_lines, text_of
from qmargin.evaluation.embed import IMAGE_SIZE, Images, read_inside
from qmargin.evaluation.evaluate import EvaluationOptions, StageProgress, evaluate_scores
from qmargin.evaluation.protocols.face_sets import write_hardest
from qmargin.evaluation.result import Hardest, Measure, Result, Source
from qmargin.evaluation.scores import ScoreSet
from qmargin.evaluation.trials import TrialKeys
from qmargin.files import Guard, Progress, open_regular, sha256_of
from qmargin.metrics.identification import identify

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Signed = NDArray[np.signedinteger]
IJB_FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
IJB_FPIRS = (1e-2, 1e-1)
RANKS = (1, 5, 10)
_MEDIA = "_face_tid_mid.txt"
_POINTS = "_name_5pts_score.txt"
_TEMPLATE = re.compile("[0-9]{1,18}")
_ROWS = 8192  # images pooled at once
_PAIRS = 256  # pairs scored at once: both sides stay in the cache
_PAIRS_BETWEEN_REPORTS = 1 << 18
_THREADS = 2
_PROBES = 1024  # searches whose scores are computed together
_CHUNK_BYTES = 1 << 22  # of a list of numbers: temporaries stay small
_MAX_DIGITS = 18  # more may not fit in 64 bits


@dataclass(frozen=True)
class IjbRelease:
    """The lists of a release; row ``r`` of each is the same image."""

    folder: Path  # with loose_crop/ and meta/
    name: str  # IJBB or IJBC, after the lists
    names: tuple[str, ...] = field(repr=False)  # files below loose_crop/
    rows: TemplateRows = field(repr=False)
    landmarks: NDArray[np.float32] = field(repr=False)  # five points (x, y), [n, 5, 2]
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def keys(self) -> tuple[str, ...]:
        """A distinct name for every row: one file may serve several templates."""
        if len(set(self.names)) == len(self.names):
            return self.names
        return tuple(f"{row}:{name}" for row, name in enumerate(self.names))

    def images(self, size: int = IMAGE_SIZE) -> Images:
        """The images, aligned by their landmarks to ``size x size``."""
        from qmargin.data.alignment import align_face
        from qmargin.data.images import decode_image

        def read(index: int) -> NDArray[np.uint8]:
            image = decode_image(read_inside(self.folder / "loose_crop", self.names[index]))
            return align_face(image, self.landmarks[index], size=size)

        return Images(len(self), read)

    def pairs(self, *, progress: Progress | None = None) -> TemplatePairs:
        """The one-to-one pairs, with subjects where the lists of the galleries name them."""
        path = self._list("_template_pair_label.txt")
        numbers, sha256 = read_integers(path, 3, progress=progress)
        row = first_row(numbers[:, 2] > 1)
        if row is not None:
            label = numbers[row, 2]
            raise DataError(f"{path}, pair {row + 1}: the label is {label}, not 0 or 1")
        subject_of: dict[int, str] = {}
        for each in sorted(self._meta.glob(f"{self.name.lower()}_1N_*.csv")):
            found = read_template_list(each)
            subject_of |= zip(found.template.tolist(), found.subject.tolist(), strict=True)
        narrow: Any = np.int32 if numbers.max() <= np.iinfo(np.int32).max else np.int64
        enrol, test = (numbers[:, side].astype(narrow) for side in (0, 1))
        source = Source(str(path), sha256, "trials")
        return TemplatePairs(
            enrol, test, numbers[:, 2].astype(np.bool_), source, subject_of or None
        )

    def galleries(self) -> list[TemplateList]:
        """Galleries of the search, in the order of their names."""
        pattern = f"{self.name.lower()}_1N_gallery_*.csv"
        paths = sorted(self._meta.glob(pattern))
        if not paths:
            raise DataError(f"{self._meta} has no {pattern}: copy the lists of the search there")
        return [read_template_list(path) for path in paths]

    def probes(self) -> TemplateList:
        """Templates that are searched."""
        return read_template_list(self._list("_1N_probe_mixed.csv"))

    @property
    def _meta(self) -> Path:
        return self.folder / "meta"

    def _list(self, suffix: str) -> Path:
        path = self._meta / f"{self.name.lower()}{suffix}"
        if not path.is_file():
            raise DataError(f"there is no {path}: copy it from the release")
        return path


def read_ijb(folder: str | Path) -> IjbRelease:
    """Read the lists of images of a release: its folder IJBB or IJBC."""
    folder = Path(folder)
    found = sorted((folder / "meta").glob(f"*{_MEDIA}"))
    if len(found) != 1:
        raise DataError(
            f"{folder / 'meta'} has {len(found)} lists *{_MEDIA}: give IJBB or IJBC of a release"
        )
    media, name = found[0], found[0].name.removesuffix(_MEDIA)
    points = media.with_name(name + _POINTS)
    names, numbers = _read_rows(media, 2)
    others, values = _read_rows(points, 11)
    if names != others:
        places = zip(names, others, strict=False)
        row = next((i for i, (a, b) in enumerate(places) if a != b), min(len(names), len(others)))
        raise DataError(
            f"row {row + 1} of {media} and of {points} are not the same image: order them alike"
        )
    whole = numbers.astype(np.int64)
    wrong = first_row((whole != numbers).any(axis=1))
    if wrong is not None:
        raise DataError(f"{media}, row {wrong + 1}: template and medium have to be whole numbers")
    return IjbRelease(
        folder,
        name.upper(),
        tuple(names),
        TemplateRows(whole[:, 0].copy(), whole[:, 1].copy(), values[:, 10].copy()),
        values[:, :10].reshape(-1, 5, 2).astype(np.float32),
        tuple(Source(str(path), sha256_of(path), "trials") for path in (media, points)),
    )


def _read_rows(path: Path, num_values: int) -> tuple[list[str], Floats]:
    """Names and the finite numbers after them."""
    if not path.is_file():
        raise DataError(f"there is no {path}: copy it from the release")
    names, values = [], []
    for number, line in numbered_lines(path):
        cells, shown = line.split(), repr(line[:80].decode("utf-8", "replace"))
        try:
            values.append(list(map(float, cells[1:])))
            names.append(cells[0].decode("utf-8"))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {shown} ({error})") from error
        if len(values[-1]) != num_values:
            raise DataError(
                f"{path}, line {number}: {shown} is not a name and {num_values} numbers"
            )
        if not all(map(math.isfinite, values[-1])):
            raise DataError(f"{path}, line {number}: a number of {names[-1]!r} is not finite")
    if not names:
        raise DataError(f"{path} is empty: it needs a line for every image")
    return names, np.array(values)


def read_template_list(path: str | Path) -> TemplateList:
    """Templates and subjects of a gallery or of searches: the first two columns of a CSV file.

    The file has a header and may have a line for every image; a template is listed once.
    """
    path = Path(path)
    subject_of: dict[int, str] = {}
    for number, line in islice(numbered_lines(path), 1, None):
        where = f"{path}, line {number}"
        try:
            cells = next(csv.reader([text_of(line, where)]), [])
        except csv.Error as error:
            raise DataError(f"{where} is not CSV ({error}); correct the line") from error
        template, subject = (*(cell.strip() for cell in cells[:2]), "", "")[:2]
        if not _TEMPLATE.fullmatch(template) or not subject:
            shown = repr(",".join(cells)[:80])
            raise DataError(f"{where}: {shown} does not begin with a template and a subject")
        before = subject_of.setdefault(int(template), subject)
        if before != subject:
            raise DataError(
                f"{where}: template {template} is of subject {subject!r}, but was of {before!r}: "
                "correct one"
            )
    if not subject_of:
        raise DataError(f"{path} has no templates: it needs a header and a line for each")
    return TemplateList(
        path.stem.rsplit("_", 1)[-1],
        np.array(list(subject_of), np.int64),
        np.array(list(subject_of.values())),
        Source(str(path), sha256_of(path), "trials"),
    )


@dataclass(frozen=True)
class TemplateRows:
    """Which template and which medium, a photo or a video, each image belongs to."""

    template: Ints  # [n]
    media: Ints  # [n]; the same number in two templates means nothing
    detector: Floats | None = None  # score of the face detector, [n]

    def __post_init__(self) -> None:
        for name in ("media", "detector"):
            column = getattr(self, name)
            if column is not None and column.shape != self.template.shape:
                raise ShapeError(
                    f"{name} has the shape {column.shape} for {len(self.template):,} images: "
                    "give one each"
                )
        if self.detector is not None:
            row = first_row(~(np.isfinite(self.detector) & (self.detector >= 0.0)))
            if row is not None:
                raise DataError(
                    f"the detector's score of image {row} is {self.detector[row]}: give one >= 0"
                )


@dataclass(frozen=True)
class TemplatePairs:
    """Templates to compare."""

    enrol: Signed  # [p]
    test: Signed  # [p]
    is_genuine: NDArray[np.bool_]  # [p]
    source: Source
    subject_of: dict[int, str] | None = field(default=None, repr=False)  # of every template


@dataclass(frozen=True)
class TemplateList:
    """Distinct templates of a gallery, or of searches, with their subjects."""

    name: str  # such as G1
    template: Ints  # [n]
    subject: NDArray[np.str_] = field(repr=False)  # [n]
    source: Source

    def __len__(self) -> int:
        return len(self.template)


def read_integers(
    path: str | Path, num_columns: int, *, progress: Progress | None = None
) -> tuple[Ints, str]:
    r"""Lines of ``num_columns`` whole numbers, ``[lines, num_columns]``, and the file's SHA-256.

    Numbers are separated by spaces or tabs and have no sign; blank lines are skipped.
    """
    path = Path(path)
    digest, parts, rest, line = hashlib.sha256(), [np.empty((0, num_columns), np.int64)], b"", 1
    size = path.stat().st_size
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            rest += chunk
            cut = rest.rfind(b"\n") + 1
            if cut:
                parts.append(_parse(path, rest[:cut], num_columns, line))
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
            elif len(rest) > _CHUNK_BYTES:
                raise DataError(f"{path}, line {line} is too long: is this a text file?")
            if progress is not None:
                progress(file.tell(), size)
    if rest.strip():
        parts.append(_parse(path, rest + b"\n", num_columns, line))
    numbers = np.concatenate(parts)
    if not len(numbers):
        raise DataError(f"{path} is empty: it needs lines of {num_columns} whole numbers")
    return numbers, digest.hexdigest()


def _parse(path: Path, text: bytes, num_columns: int, line: int) -> Ints:
    """Numbers of whole lines, the first of which has the number ``line``."""
    content = np.frombuffer(text, np.uint8)
    digits = content - np.uint8(ord("0"))  # what is below "0" wraps to above 9
    is_digit = digits <= 9
    is_known = is_digit.copy()
    for space in b"\n\r \t":
        is_known |= content == space
    edges = np.diff(is_digit.astype(np.int8), prepend=np.int8(0))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    lengths, ends = stops - starts, np.flatnonzero(content == ord("\n"))
    per_line = np.diff(np.searchsorted(starts, ends), prepend=0)
    wrong = [
        np.flatnonzero(~is_known),
        starts[lengths > _MAX_DIGITS],
        ends[(per_line != num_columns) & (per_line != 0)],
    ]
    offset = min((int(places[0]) for places in wrong if len(places)), default=None)
    if offset is not None:
        begin = text.rfind(b"\n", 0, offset) + 1
        shown = text[begin : text.find(b"\n", offset)][:80].decode("utf-8", "replace")
        number = line + text.count(b"\n", 0, offset)
        raise DataError(f"{path}, line {number}: {shown!r} is not {num_columns} whole numbers")
    values = np.zeros(len(starts), np.int64)
    for place in range(int(lengths.max(initial=0))):
        has_digit = lengths > place
        values[has_digit] += digits[stops[has_digit] - 1 - place].astype(np.int64) * 10**place
    return values.reshape(-1, num_columns)


@dataclass(frozen=True)
class Pooling:
    """How the images of a template become one vector."""

    keep_norms: bool = True  # images weigh as much as their embeddings are long, or all the same
    use_detector: bool = True  # images are weighed by the detector's scores


@dataclass(frozen=True)
class Templates:
    """Unit vectors of templates."""

    ids: Ints  # ascending, [t]
    vectors: Floats  # each of length 1, [t, d]

    def rows_of(self, ids: Signed, what: str) -> Codes:
        """Row of each template, int32; ``what`` says in an error where they are named."""
        rows = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1).astype(np.int32)
        is_missing = self.ids[rows] != ids
        if is_missing.any():
            place = int(np.argmax(is_missing))
            raise DataError(
                f"{what}, entry {place + 1}: template {ids[place]} has no images "
                f"({int(is_missing.sum()):,} such entries): are the lists of one release?"
            )
        return rows


def pool_templates(
    embeddings: NDArray[np.floating],
    rows: TemplateRows,
    pooling: Pooling | None = None,
    *,
    progress: Progress | None = None,
) -> Templates:
    """One unit vector per template: the sum over its media of the mean over a medium's images.

    Embeddings ``[n, d]``, one row per image, are weighed as ``pooling`` says first.
    """
    pooling = pooling or Pooling()
    if embeddings.ndim != 2 or len(embeddings) != len(rows.template) or not len(embeddings):
        raise ShapeError(
            f"embeddings have shape {embeddings.shape} for {len(rows.template):,} images in lists: "
            "give one row for each"
        )
    media = np.stack([rows.template, rows.media], axis=1)
    _, group, sizes = np.unique(media, axis=0, return_inverse=True, return_counts=True)
    weights = 1.0 / sizes[group.reshape(-1)]
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
        begins = starts[first:last] - starts[first]
        for begin in range(0, len(images), _ROWS):  # one piece, or the pieces of one template
            piece = images[begin : begin + _ROWS]
            block = embeddings[piece].astype(np.float64)
            if not pooling.keep_norms:
                lengths = np.sqrt(np.einsum("ij,ij->i", block, block))
                if (lengths == 0.0).any():
                    raise DataError(
                        f"the embedding of image {piece[int(np.argmin(lengths))]} is zero, so it "
                        "has no direction: embed it again, or keep the norms"
                    )
                block /= lengths[:, None]
            block *= weights[piece, None]
            sums[first:last] += np.add.reduceat(block, begins, axis=0)
        first = last
        if progress is not None:
            progress(int(ends[last - 1]), len(order))
    largest = np.abs(sums).max(axis=1)
    for is_wrong, what in (
        (~np.isfinite(largest), "is not finite: embed it again"),
        (largest == 0.0, "has length zero and no direction: are all its detector scores zero?"),
    ):
        row = first_row(is_wrong)
        if row is not None:
            raise DataError(f"template {ids[row]} {what}")
    sums /= largest[:, None]  # squares of very small or large values leave the range of float64
    sums /= np.sqrt(np.einsum("ij,ij->i", sums, sums))[:, None]
    return Templates(ids.astype(np.int64), sums)


def pair_scores(
    vectors: Floats,
    enrol: Signed,
    test: Signed,
    *,
    progress: Progress | None = None,
) -> Floats:
    """Inner products of rows, in float64; each depends on its two rows only."""
    scores = np.empty(len(enrol))

    def score(begin: int) -> int:
        order = begin + np.argsort(enrol[begin : begin + _PAIRS_BETWEEN_REPORTS], kind="stable")
        for first in range(0, len(order), _PAIRS):
            rows = order[first : first + _PAIRS]  # few rows of one side, which the cache keeps
            left, right = vectors[enrol[rows]], vectors[test[rows]]
            scores[rows] = np.einsum("ij,ij->i", left, right)
        return len(order)

    done = 0
    with ThreadPoolExecutor(_THREADS) as pool:
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
    """One-to-one verification of templates; TAR at FAR 1e-6 to 1e-1 without options.

    Intervals draw subjects; if they are not given, templates linked by genuine pairs count as one
    subject. ``sources`` are the files that made the templates.
    """
    options = options or EvaluationOptions(fars=IJB_FARS)
    options = replace(options, kind="ijb-1:1", scoring="cosine")
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
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    method = result.protocol.interval
    if method.method.endswith("bootstrap"):
        method = replace(method, note=note)
    return replace(result, protocol=replace(result.protocol, interval=method))


def _subjects(
    templates: Templates, pairs: TemplatePairs, enrol: Codes, test: Codes
) -> tuple[TrialKeys | None, str]:
    """Subjects of both sides that no label contradicts, and where they come from."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ids, given = templates.ids.tolist(), pairs.subject_of
    choices: list[tuple[list[str], str]] = []
    if given is not None and all(each in given for each in ids):
        choices.append(([given[each] for each in ids], "subjects are those of the release"))
    linked = enrol[pairs.is_genuine], test[pairs.is_genuine]
    links = coo_array((np.ones(len(linked[0]), np.int8), linked), shape=(len(ids), len(ids)))
    parts = connected_components(links.tocsr(), directed=False)[1]
    _, firsts = np.unique(parts, return_index=True)
    names = [f"linked to {ids[first]}" for first in firsts[parts].tolist()]
    choices.append((names, "subjects are templates linked by genuine pairs"))
    for names, note in choices:
        distinct, places = np.unique(names, return_inverse=True)
        codes = places.astype(np.int32)
        sides = TrialKeys.from_codes(tuple(distinct.tolist()), codes[enrol], codes[test])
        if ((sides.enrol == sides.test) == pairs.is_genuine).all():
            return sides, note
    return None, "subjects are not known: templates are drawn, so intervals are too narrow"


def evaluate_identification(
    templates: Templates,
    probes: TemplateList,
    gallery: TemplateList,
    options: EvaluationOptions | None = None,
    *,
    sources: tuple[Source, ...] = (),
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Search every probe in a gallery; TPIR at FPIR 0.01 and 0.1 without options.

    The result has one trial per search: of a probe whose subject is in the gallery, the best score
    of its mate; of any other, the largest score of all. So its TAR is the true positive
    identification rate (1 - FNIR), its FAR the false positive identification rate (FPIR), and the
    hardest pairs are the searches with errors. Rank rates are further measures.
    """
    options = options or EvaluationOptions(fars=IJB_FPIRS)
    options = replace(options, kind="ijb-1:N", scoring="cosine")
    sought = templates.rows_of(probes.template, probes.source.path)
    known = templates.vectors[templates.rows_of(gallery.template, gallery.source.path)].T
    scores = np.empty((len(probes), len(gallery)))
    best = np.empty(len(probes), dtype=np.int64)  # entry of the mate, or of any subject
    is_mated = np.isin(probes.subject, gallery.subject)
    for first in range(0, len(probes), _PROBES):
        rows = slice(first, first + _PROBES)
        np.matmul(templates.vectors[sought[rows]], known, out=scores[rows])
        is_mate = probes.subject[rows, None] == gallery.subject[None, :]
        is_open = is_mate | ~is_mated[rows, None]
        best[rows] = np.where(is_open, scores[rows], -np.inf).argmax(axis=1)
    num_subjects = len(np.unique(gallery.subject))
    ranks = tuple(rank for rank in RANKS if rank == 1 or rank < num_subjects)
    found = identify(scores, probes.subject, gallery.subject, ranks=ranks)
    if found.num_nonmated == 0:
        raise ProtocolError(
            f"all {len(probes):,} searches of {probes.source.path} have a mate in gallery "
            f"{gallery.name}, so there is no FPIR: search a gallery that lacks some subjects"
        )
    score_set = ScoreSet(
        scores[np.arange(len(best)), best],
        is_mated,
        TrialKeys.from_names(
            *(list(map(str, ids)) for ids in (gallery.template[best], probes.template))
        ),
        (probes.source, gallery.source, *sources),
        TrialKeys.from_names(gallery.subject[best].tolist(), probes.subject.tolist()),
        lambda row: f"{probes.source.path}, search {row + 1}",
    )
    result = evaluate_scores(score_set, options, command=command, progress=progress)
    name = f"{result.protocol.name}, 1:N in {gallery.name} (TAR is TPIR, FAR is FPIR)"
    order = np.argsort(probes.template, kind="stable")  # candidates differ between systems
    digest = hashlib.sha256(np.sort(gallery.template).astype("<i8").tobytes())
    digest.update(probes.template[order].astype("<i8").tobytes())
    digest.update(is_mated[order].astype(np.uint8).tobytes())
    protocol = replace(result.protocol, name=name, data_sha256=digest.hexdigest())
    note = f"{found.num_mated:,} searches with a mate"
    rates = {
        f"rank-{rank} rate in {gallery.name}": Measure(rate, note=note)
        for rank, rate in zip(found.ranks, found.rank_rates, strict=True)
    }
    return replace(result, protocol=protocol).with_extra(rates)


def write_template_pictures(
    folder: str | Path, release: IjbRelease, hardest: Hardest | None, *, guard: Guard | None = None
) -> int:
    """Write the best-detected image of every template of the hardest pairs, aligned.

    They are named after the templates, for ``qmargin report --media FOLDER``; images that cannot
    be read are left out. Returns the number of files.
    """
    from qmargin.data.images import encode_image

    images, rows = release.images(), release.rows
    scores = np.zeros(len(rows.template)) if rows.detector is None else rows.detector

    def picture_of(template: str) -> bytes | None:
        of_template = np.flatnonzero(rows.template == int(template))
        best = int(of_template[int(np.argmax(scores[of_template]))])
        try:
            return encode_image(images[best][0])
        except CorruptSample:
            return None

    return write_hardest(folder, hardest, picture_of, guard=guard)
