"""What an evaluation found, as records and as ``result.json``."""

from __future__ import annotations

import json
import posixpath
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from qmargin.errors import DataError
from qmargin.evaluation.records import decode, encode
from qmargin.files import check_regular, without_folders, write_atomically

FORMAT = "qmargin-result"
VERSION = 1
RESULT_MARK = f'"format": "{FORMAT}"'
_MAY_BE_INFINITE = (  # scores, and texts
    *("threshold", "score", "system", "sources", "command", "notes", "groups", "name", "note"),
    *("enrol", "test"),
)
STATUSES = ("ok", "few", "not measurable")


@dataclass(frozen=True)
class System:
    """Who made the scores."""

    name: str
    model_card: dict[str, str] | None = None


@dataclass(frozen=True)
class IntervalMethod:
    """How the intervals were made: one of the methods of ``INTERVAL_METHODS``."""

    method: str
    level: float
    num_replicates: int
    seed: int
    note: str | None = None


INTERVAL_METHODS = ("subject bootstrap", "file bootstrap", "wilson", "none")


@dataclass(frozen=True)
class Protocol:
    """Which trials, how many, and the rule that chose the thresholds."""

    name: str
    rule: str
    num_trials: int
    num_genuine: int
    num_impostors: int
    num_subjects: int | None
    interval: IntervalMethod


@dataclass(frozen=True)
class Source:
    """A file that was read; ``role`` is scores, trials, embeddings, cohort, subjects or groups."""

    path: str
    sha256: str
    role: str


@dataclass(frozen=True)
class TarPoint:
    """TAR at one FAR; where ``status`` is not measurable, everything measured is None or zero.

    ``allowed`` is the number of false accepts that the target FAR allows; ``note`` says the status
    in words.
    """

    far_target: float
    tar: float | None
    interval: tuple[float, float] | None
    far: float | None
    false_accepts: int
    threshold: float | None
    status: str
    allowed: int
    note: str | None = None


@dataclass(frozen=True)
class EerPoint:
    """The equal error rate; a threshold of None accepts nothing, here and below."""

    value: float
    interval: tuple[float, float] | None
    threshold: float | None


@dataclass(frozen=True)
class DcfPoint:
    """The smallest normalised detection cost at one prior."""

    p_target: float
    value: float
    interval: tuple[float, float] | None
    threshold: float | None


@dataclass(frozen=True)
class Value:
    """A number without an interval; None where it is not finite."""

    value: float | None


@dataclass(frozen=True)
class Metrics:
    """Every number of the evaluation; a Cllr is in bits and takes the scores as natural LLRs."""

    tar: tuple[TarPoint, ...]
    eer: EerPoint
    min_dcf: tuple[DcfPoint, ...]
    cllr: Value
    min_cllr: Value


@dataclass(frozen=True)
class Band:
    """Interval of the FRR at each FAR of a grid."""

    far: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Det:
    """The DET curve, at most 400 of its own points."""

    far: tuple[float, ...]
    frr: tuple[float, ...]
    threshold: tuple[float | None, ...]
    band: Band | None


@dataclass(frozen=True)
class Histogram:
    """Counts of finite scores between consecutive ``edges``, one more than there are bins."""

    edges: tuple[float, ...]
    genuine: tuple[int, ...]
    impostor: tuple[int, ...]


@dataclass(frozen=True)
class Reliability:
    """Predicted and observed share of genuine trials in bins of the prediction, at even odds.

    A bin without trials has None for both.
    """

    edges: tuple[float, ...]
    predicted: tuple[float | None, ...]
    observed: tuple[float | None, ...]
    count: tuple[int, ...]


@dataclass(frozen=True)
class CalibrationCurve:
    """``scale * score + offset`` is a log-likelihood ratio, as far as these trials can tell."""

    scale: float
    offset: float
    reliability: Reliability


@dataclass(frozen=True)
class ReplicateValues:
    """What every bootstrap replicate found, so that systems can be compared in pairs.

    ``tar`` and ``min_dcf`` are keyed by ``far_key``. Two systems are comparable when
    ``subjects_sha256``, ``seed`` and the result's ``trials_sha256`` agree. A replicate that could
    not measure has None.
    """

    subjects_sha256: str
    seed: int
    tar: dict[str, tuple[float | None, ...]]
    eer: tuple[float | None, ...]
    min_dcf: dict[str, tuple[float | None, ...]] | None = None


@dataclass(frozen=True)
class GroupRow:
    """Rates of one group at the common threshold; a rate without trials is None."""

    group: str
    fmr: float | None
    fnmr: float | None
    num_genuine: int
    num_impostors: int
    status: str
    note: str | None = None


@dataclass(frozen=True)
class GroupSpread:
    """How far one rate differs between groups; None where it is not defined.

    ``ineq`` is the largest over the smallest and ``garbe`` the Gini coefficient of this rate alone:
    INEQ and GARBE with all their weight on it.
    """

    max_over_geomean: float | None
    ineq: float | None
    garbe: float | None


@dataclass(frozen=True)
class GroupAudit:
    """FMR and FNMR per group at one common threshold; INEQ and GARBE weigh both rates evenly."""

    threshold: float | None
    far_target: float
    rows: tuple[GroupRow, ...]
    fmr: GroupSpread
    note: str | None = None
    fnmr: GroupSpread | None = None
    ineq: float | None = None
    garbe: float | None = None


@dataclass(frozen=True)
class HardPair:
    """A trial among the hardest."""

    enrol: str
    test: str
    score: float


@dataclass(frozen=True)
class Hardest:
    """The highest impostors and the lowest genuine trials, hardest first."""

    false_accepts: tuple[HardPair, ...]
    false_rejects: tuple[HardPair, ...]


@dataclass(frozen=True)
class Result:
    """One system on one protocol; ``notes`` say what a reader of its numbers has to know."""

    system: System
    protocol: Protocol
    sources: tuple[Source, ...]
    trials_sha256: str | None
    metrics: Metrics
    det: Det
    histogram: Histogram
    calibration: CalibrationCurve | None
    replicates: ReplicateValues | None
    groups: GroupAudit | None
    hardest: Hardest | None
    created: str
    command: str
    qmargin: str
    notes: tuple[str, ...] = ()


def far_key(far: float) -> str:
    """Name of a FAR or a prior in ``ReplicateValues``.

    Examples:
        >>> far_key(1e-4), far_key(1e-5)
        ('0.0001', '1e-05')
    """
    return repr(float(far))


def result_to_json(result: Result) -> dict[str, Any]:
    """The content of ``result.json``: numbers are finite, None, ``"inf"`` or ``"-inf"``."""
    return {"format": FORMAT, "version": VERSION, **encode(result, "result")}


def result_from_json(content: object, source: str = "result") -> Result:
    """Check and read what ``result_to_json`` made; ``source`` is named in errors."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{source} is not a {FORMAT} file: write one with `qmargin evaluate`")
    if content.get("version") != VERSION:
        raise DataError(
            f"{source} has version {content.get('version')!r} of {FORMAT}, but this qmargin reads "
            f"version {VERSION}: evaluate the scores again"
        )
    result = cast(Result, decode(Result, content, f"{source}:"))
    for point in result.metrics.tar:
        if point.status not in STATUSES:
            raise DataError(
                f"{source}: metrics.tar has the status {point.status!r}: not one of ours"
            )
    _check_finite(content, source)
    return result


def _check_finite(value: Any, where: str) -> None:
    """Refuse infinite numbers where only scores and thresholds can be infinite."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _MAY_BE_INFINITE:
                _check_finite(item, f"{where}: {key}" if ": " not in where else f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            _check_finite(item, where)
    elif value in ("inf", "-inf"):
        raise DataError(f"{where} is {value}, not a finite number: evaluate the scores again")


def without_paths(result: Result) -> Result:
    """The same result with names of files in place of absolute paths.

    Sources and the command keep their last part. Keys of trials that are absolute lose the folder
    that all of them share.
    """
    sources = (replace(source, path=without_folders(source.path)) for source in result.sources)
    try:
        words = shlex.split(result.command)
    except ValueError:  # not a command line of ours
        words = result.command.split()
    command = result.command
    if any(without_folders(word) != word for word in words):
        command = shlex.join(map(without_folders, words))
    hardest = result.hardest
    return replace(
        result,
        sources=tuple(sources),
        command=command,
        hardest=None if hardest is None else _with_short_keys(hardest),
    )


def _with_short_keys(hardest: Hardest) -> Hardest:
    pairs = (*hardest.false_accepts, *hardest.false_rejects)
    keys = {key for pair in pairs for key in (pair.enrol, pair.test)}
    absolute = [key for key in keys if PurePosixPath(key).is_absolute()]
    if not absolute:
        return hardest
    folder = posixpath.commonpath([posixpath.dirname(key) for key in absolute]).rstrip("/") + "/"

    def short(pair: HardPair) -> HardPair:
        return replace(
            pair, enrol=pair.enrol.removeprefix(folder), test=pair.test.removeprefix(folder)
        )

    return Hardest(
        tuple(map(short, hardest.false_accepts)), tuple(map(short, hardest.false_rejects))
    )


def write_result(path: str | Path, result: Result, *, keep_paths: bool = False) -> None:
    """Write ``result.json``; a reader sees the old file or the new one, never a part.

    Args:
        path: The file.
        result: What to write.
        keep_paths: Write absolute paths as they are, not as ``without_paths`` makes them.
    """
    content = result_to_json(result if keep_paths else without_paths(result))
    result_from_json(json.loads(json.dumps(content)), str(path))  # a NaN in the wrong place
    text = json.dumps(content, allow_nan=False, indent=1)
    write_atomically(path, (text + "\n").encode("utf-8"))


def read_result(path: str | Path) -> Result:
    """Read and check ``result.json``."""
    check_regular(path)
    try:
        content = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): was it cut short?") from error
    return result_from_json(content, str(path))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
