"""IJB-B and IJB-C: templates, 1:1 verification and 1:N identification, from the released files."""

from __future__ import annotations

import csv
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import CorruptSample, DataError, ProtocolError, ShapeError
from qmargin.evaluation.columns import Codes, numbered_lines, text_of
from qmargin.evaluation.embed import IMAGE_SIZE, read_inside
from qmargin.evaluation.evaluate import EvaluationOptions, StageProgress, evaluate_scores
from qmargin.evaluation.protocols.face_sets import write_hardest
from qmargin.evaluation.result import Hardest, Measure, Result, Source
from qmargin.evaluation.scores import ScoreSet
from qmargin.evaluation.trials import TrialKeys
from qmargin.files import Guard, Progress, open_regular, sha256_of
from qmargin.metrics.identification import Identification, identify

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Signed = NDArray[np.signedinteger]
IJB_FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
IJB_FPIRS = (1e-2, 1e-1)
RANKS = (1, 5, 10)
_MEDIA = "_face_tid_mid.txt"
_POINTS = "_name_5pts_score.txt"
_PAIRS_FILE = "_template_pair_label.txt"
_TEMPLATE = re.compile("[0-9]{1,18}")
_ROWS = 8192  # images pooled at once
_PAIRS = 256  # pairs scored at once: both sides stay in the cache
_PAIRS_BETWEEN_REPORTS = 1 << 18
_PROBES = 1024  # searches whose scores are computed together
_CHUNK_BYTES = 1 << 22  # of a list of numbers: temporaries stay small
_MAX_DIGITS = 18  # more may not fit in 64 bits
_END, _RETURN, _SPACE, _TAB, _ZERO = b"\n\r \t0"


@dataclass(frozen=True)
class IjbRelease:
    """The lists of a release; row ``r`` of each is the same image.

    Attributes:
        folder: Has ``loose_crop/`` and ``meta/``.
        name: ``IJBB`` or ``IJBC``, after the lists.
        names: File of every image, below ``loose_crop/``.
        rows: Template, medium and detector's score of every image.
        landmarks: Five points ``(x, y)`` of every image, ``[n, 5, 2]``.
        sources: The lists.
    """

    folder: Path
    name: str
    names: tuple[str, ...] = field(repr=False)
    rows: TemplateRows = field(repr=False)
    landmarks: NDArray[np.float32] = field(repr=False)
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def keys(self) -> tuple[str, ...]:
        """A distinct name for every row: one file may serve several templates."""
        if len(set(self.names)) == len(self.names):
            return self.names
        return tuple(f"{row}:{name}" for row, name in enumerate(self.names))

    def images(self, size: int = IMAGE_SIZE) -> LooseCrops:
        """The images, aligned to ``size x size``."""
        return LooseCrops(self.folder / "loose_crop", self.names, self.landmarks, size)

    def pairs(self, *, progress: Progress | None = None) -> TemplatePairs:
        """The one-to-one pairs, with subjects where the lists of the galleries name them."""
        path = self._list(_PAIRS_FILE)
        numbers, sha256 = read_integers(path, 3, progress=progress)
        labels = numbers[:, 2]
        if labels.max() > 1:
            row = int(np.argmax(labels > 1))
            raise DataError(f"{path}, pair {row + 1}: the label is {labels[row]}, not 0 or 1")
        return TemplatePairs(
            _narrow(numbers[:, 0]),
            _narrow(numbers[:, 1]),
            labels.astype(np.bool_),
            Source(str(path), sha256, "trials"),
            self._subjects(),
        )

    def galleries(self) -> list[TemplateList]:
        """Galleries of the search, in the order of their names."""
        paths = sorted(self._meta.glob(f"{self._prefix}_1N_gallery_*.csv"))
        if not paths:
            raise DataError(
                f"{self._meta} has no {self._prefix}_1N_gallery_*.csv: copy the lists of the "
                "search there"
            )
        return [read_template_list(path) for path in paths]

    def probes(self) -> TemplateList:
        """What is searched."""
        return read_template_list(self._list("_1N_probe_mixed.csv"))

    @property
    def _meta(self) -> Path:
        return self.folder / "meta"

    @property
    def _prefix(self) -> str:
        return self.name.lower()

    def _list(self, suffix: str) -> Path:
        path = self._meta / f"{self._prefix}{suffix}"
        if not path.is_file():
            raise DataError(f"there is no {path}: copy it from the release")
        return path

    def _subjects(self) -> dict[int, str] | None:
        subject_of: dict[int, str] = {}
        for path in sorted(self._meta.glob(f"{self._prefix}_1N_*.csv")):
            found = read_template_list(path)
            subject_of |= zip(found.template.tolist(), found.subject.tolist(), strict=True)
        return subject_of or None


def read_ijb(folder: str | Path) -> IjbRelease:
    """Read the lists of images of a release.

    Args:
        folder: ``IJBB`` or ``IJBC`` of the release, with ``loose_crop/`` and ``meta/``.

    Raises:
        DataError: A list is missing, a line cannot be read, or two lists name different images in
            a row.
    """
    folder = Path(folder)
    found = sorted((folder / "meta").glob(f"*{_MEDIA}"))
    if len(found) != 1:
        raise DataError(
            f"{folder / 'meta'} has {len(found)} lists *{_MEDIA}, and 1 is needed: give the folder "
            "IJBB or IJBC of the release"
        )
    media = found[0]
    points = media.with_name(media.name.removesuffix(_MEDIA) + _POINTS)
    names, numbers = _read_rows(media, 2)
    others, values = _read_rows(points, 11)
    if names != others:
        places = zip(names, others, strict=False)
        row = next((i for i, (a, b) in enumerate(places) if a != b), min(len(names), len(others)))
        raise DataError(
            f"row {row + 1} of {media} and of {points} are not the same image: both lists have to "
            "name the same images in the same order"
        )
    whole = numbers.astype(np.int64)
    if (whole != numbers).any():
        row = int(np.argmax((whole != numbers).any(axis=1)))
        raise DataError(f"{media}, row {row + 1}: template and medium have to be whole numbers")
    return IjbRelease(
        folder,
        media.name.removesuffix(_MEDIA).upper(),
        tuple(names),
        TemplateRows(whole[:, 0].copy(), whole[:, 1].copy(), values[:, 10].copy()),
        values[:, :10].reshape(-1, 5, 2).astype(np.float32),
        tuple(Source(str(path), sha256_of(path), "trials") for path in (media, points)),
    )


def _read_rows(path: Path, num_values: int) -> tuple[list[str], NDArray[np.float64]]:
    """Names and the finite numbers after them."""
    if not path.is_file():
        raise DataError(f"there is no {path}: copy it from the release")
    names, values, numbers = [], [], []
    for number, line in numbered_lines(path):
        cells = line.split()
        try:
            row = list(map(float, cells[1:]))
            names.append(cells[0].decode("utf-8"))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {_shown(line)} ({error})") from error
        if len(row) != num_values:
            raise DataError(
                f"{path}, line {number}: {_shown(line)} is not a name and {num_values} numbers"
            )
        values.append(row)
        numbers.append(number)
    if not names:
        raise DataError(f"{path} is empty: it needs a line for every image")
    table = np.array(values)
    is_bad = ~np.isfinite(table).all(axis=1)
    if is_bad.any():
        row_number = int(np.argmax(is_bad))
        raise DataError(
            f"{path}, line {numbers[row_number]}: a number of {names[row_number]!r} is not finite"
        )
    return names, table


def _narrow(ids: NDArray[np.int64]) -> NDArray[np.signedinteger]:
    """A copy in half the memory where it can hold them."""
    return ids.astype(np.int32 if ids.max() <= np.iinfo(np.int32).max else np.int64)


def _shown(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace"))


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
            raise DataError(f"{where} is no CSV ({error}); correct the line") from error
        is_good = len(cells) >= 2 and _TEMPLATE.fullmatch(cells[0].strip()) and cells[1].strip()
        if not is_good:
            raise DataError(
                f"{where}: {','.join(cells)[:80]!r} does not begin with a template's number and a "
                "subject"
            )
        template, subject = int(cells[0]), cells[1].strip()
        if subject_of.setdefault(template, subject) != subject:
            raise DataError(
                f"{where}: template {template} is of subject {subject!r}, but was of "
                f"{subject_of[template]!r} before"
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
class LooseCrops:
    """Images of a folder by number, each aligned by its landmarks; labels are -1."""

    folder: Path
    names: tuple[str, ...] = field(repr=False)
    landmarks: NDArray[np.float32] = field(repr=False)
    size: int = IMAGE_SIZE

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        from qmargin.data.alignment import align_face
        from qmargin.data.images import decode_image

        image = decode_image(read_inside(self.folder, self.names[index]))
        return align_face(image, self.landmarks[index], size=self.size), -1


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


def read_integers(
    path: str | Path, num_columns: int, *, progress: Progress | None = None
) -> tuple[NDArray[np.int64], str]:
    r"""Lines of ``num_columns`` whole numbers, ``[lines, num_columns]``, and the file's SHA-256.

    Numbers are separated by spaces or tabs and have no sign; blank lines are skipped.

    Args:
        path: The file.
        num_columns: Numbers in every line.
        progress: Called with the bytes read and the bytes of the file.

    Raises:
        DataError: A line is something else; the message names it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "pairs.txt"
        >>> _ = path.write_text("1 20 1\n3 4 0\n")
        >>> read_integers(path, 3)[0].tolist()
        [[1, 20, 1], [3, 4, 0]]
    """
    path = Path(path)
    digest, parts, rest, done, line = hashlib.sha256(), [], b"", 0, 1
    size = path.stat().st_size
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            rest += chunk
            cut = rest.rfind(b"\n") + 1
            if cut:
                parts.append(_parse(path, rest[:cut], num_columns, line))
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
            elif len(rest) > _CHUNK_BYTES:
                raise DataError(f"{path}, line {line} is too long: is this a text file?")
            if progress is not None:
                progress(done, size)
    if rest.strip():
        parts.append(_parse(path, rest + b"\n", num_columns, line))
    numbers = np.concatenate(parts) if parts else np.empty((0, num_columns), np.int64)
    if not len(numbers):
        raise DataError(f"{path} is empty: it needs lines of {num_columns} whole numbers")
    return numbers, digest.hexdigest()


def _parse(path: Path, text: bytes, num_columns: int, line: int) -> NDArray[np.int64]:
    """Numbers of whole lines, the first of which has the number ``line``."""
    content = np.frombuffer(text, np.uint8)
    digits = content - np.uint8(_ZERO)  # what is below "0" wraps to above 9
    is_digit = digits <= 9
    is_end = content == _END
    is_space = (content == _SPACE) | (content == _TAB) | (content == _RETURN) | is_end
    if not (is_digit | is_space).all():
        _refuse(path, text, num_columns, line, int(np.argmin(is_digit | is_space)))
    edges = np.diff(is_digit.astype(np.int8), prepend=np.int8(0))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    lengths = stops - starts
    if len(lengths) and lengths.max() > _MAX_DIGITS:
        _refuse(path, text, num_columns, line, int(starts[int(np.argmax(lengths))]))
    per_line = np.diff(np.searchsorted(starts, np.flatnonzero(is_end)), prepend=0)
    is_wrong = (per_line != num_columns) & (per_line != 0)
    if is_wrong.any():
        ends = np.flatnonzero(is_end)
        _refuse(path, text, num_columns, line, int(ends[int(np.argmax(is_wrong))]))
    values = np.zeros(len(starts), np.int64)
    for place in range(int(lengths.max(initial=0))):
        has_digit = lengths > place
        values[has_digit] += digits[stops[has_digit] - 1 - place].astype(np.int64) * 10**place
    return values.reshape(-1, num_columns)


def _refuse(path: Path, text: bytes, num_columns: int, line: int, offset: int) -> None:
    """Raise for the line around a place of the text."""
    begin = text.rfind(b"\n", 0, offset) + 1
    shown = text[begin : text.find(b"\n", offset)][:80].decode("utf-8", "replace")
    number = line + text.count(b"\n", 0, offset)
    raise DataError(f"{path}, line {number}: {shown!r} is not {num_columns} whole numbers")


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
        sides = TrialKeys.from_codes(tuple(distinct.tolist()), codes[enrol], codes[test])
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
) -> Result:
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
    options = replace(options, kind="ijb-1:N", scoring="cosine")
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
    sha256 = _searches_sha256(probes, gallery, is_mated)
    protocol = replace(result.protocol, name=name, data_sha256=sha256)
    return replace(result, protocol=protocol).with_extra(rank_measures(found, gallery.name))


def rank_measures(found: Identification, gallery: str) -> dict[str, Measure]:
    """Rank rates as measures.

    Examples:
        >>> found = identify([[0.9, 0.1], [0.2, 0.8]], ["al", "bo"], ["al", "bo"])
        >>> rank_measures(found, "G1")["rank-1 rate in G1"].value
        1.0
    """
    note = f"{found.num_mated:,} searches with a mate"
    return {
        f"rank-{rank} rate in {gallery}": Measure(rate, note=note)
        for rank, rate in zip(found.ranks, found.rank_rates, strict=True)
    }


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
        TrialKeys.from_codes(tuple(names.tolist()), codes[: len(best)], codes[len(best) :]),
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


def write_template_pictures(
    folder: str | Path,
    release: IjbRelease,
    hardest: Hardest | None,
    *,
    guard: Guard | None = None,
) -> int:
    """Write one aligned image of every template of the hardest pairs, named after the template.

    It is the image with the highest detector score. ``qmargin report --media FOLDER`` shows them.

    Returns:
        Number of files; images that cannot be read are left out.
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
