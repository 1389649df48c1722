"""The result of an evaluation: typed records, and their file ``result.json``."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import qmargin
from qmargin.errors import DataError
from qmargin.files import check_regular, read_regular, without_folders, write_atomically
from qmargin.schema import decode, encode

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

FORMAT = "qmargin-result"
VERSION = 2
MAX_RUN_BYTES = 1_000_000
RESULT_MARK = f'"format": "{FORMAT}"'
_MAY_BE_INFINITE = (  # scores, and texts
    *("threshold", "score", "system", "sources", "command", "notes", "groups", "name", "note"),
    *("enrol", "test", "arm", "title", "divergence", "kind", "device", "code_version"),
    *("rule", "scoring", "pooling"),
)
STATUSES = ("ok", "few", "not measurable")


@dataclass(frozen=True)
class System:
    """The system that made the scores: a name, and facts to display."""

    name: str
    model_card: dict[str, str] | None = None


@dataclass(frozen=True)
class MarginInfo:
    """One margin of a loss; ``value`` is its main number, None where it has none."""

    kind: str
    value: float | None


@dataclass(frozen=True)
class TrainingPoint:
    """Test measures of a run after a part of its training."""

    step: int
    train_seconds: float  # without the time to measure
    eer: float
    tar: dict[str, float]  # by far_key


@dataclass(frozen=True)
class RunInfo:
    """The training run behind a result. Reports group by these fields."""

    recipe_sha256: str  # of all settings that decide the outcome of the run
    arm: str  # short name of the loss settings; runs of one arm differ in their seed
    title: str  # title of the arm in tables
    divergence: str  # "alpha", or the name of a registered divergence
    alpha: float | None  # main number of the divergence
    margins: tuple[MarginInfo, ...]
    scale: float | None  # None where the loss has no single scale
    seed: int
    epochs: float | None = None
    steps: int | None = None  # optimizer steps behind the evaluated weights
    num_classes: int | None = None
    checkpoint_sha256: str | None = None  # of the evaluated weights, as in the model card
    train_seconds: float | None = None
    peak_bytes: int | None = None  # of memory while training: of the GPU, or of the process
    device: str | None = None  # such as "NVIDIA H200"
    code_version: str = qmargin.__version__
    progress: tuple[TrainingPoint, ...] = ()  # of a run that was measured while it trained


def run_info(recipe: Recipe, *, arm: str | None = None, **known: Any) -> RunInfo:
    """Describe a run of a recipe, with further fields of ``RunInfo`` by name."""
    loss, arm = recipe.loss, arm or recipe.name
    values: dict[str, Any] = {
        "recipe_sha256": recipe.sha256,
        "arm": arm,
        "title": arm,
        "divergence": loss.divergence,
        "alpha": loss.alpha,
        "margins": tuple(MarginInfo(kind, number) for kind, number in loss.margins),
        "scale": loss.scale,
        "seed": recipe.seed,
        "epochs": float(recipe.run.epochs),
    }
    return RunInfo(**{**values, **known})


def run_to_json(run: RunInfo) -> str:
    """The content of ``run.json`` in a model directory."""
    return json.dumps(encode(run, "run"), allow_nan=False, indent=1) + "\n"


def read_run(path: str | Path) -> RunInfo:
    """Read and check ``run.json``."""
    return cast(RunInfo, decode(RunInfo, read_json(path, MAX_RUN_BYTES), f"{path}:"))


@dataclass(frozen=True)
class IntervalMethod:
    """Method of the intervals: ``"subject bootstrap"``, ``"file bootstrap"``, ``"wilson"``."""

    method: str
    level: float
    num_replicates: int
    seed: int
    note: str | None = None


@dataclass(frozen=True)
class ProtocolInfo:
    """Which trials were measured, and how; ``kind`` and ``scoring`` are None in version-1 files."""

    name: str
    kind: str | None  # scores, trials, all-pairs, lfw, ijb-1:1, ijb-1:N, ..., or a registered one
    rule: str  # how the threshold of a FAR was chosen
    scoring: str | None  # given (read from a file), cosine, as-norm or calibrated
    data_sha256: str | None  # of pairs and labels in any order; None where trials have no names
    num_trials: int
    num_genuine: int
    num_impostors: int
    num_subjects: int | None
    interval: IntervalMethod
    flip: str | None = None  # "sum" where mirror images are added, else "none"; None: not known
    pooling: str | None = None  # how the samples of a template became one vector


@dataclass(frozen=True)
class Source:
    """A file that was read; ``role`` is scores, trials, embeddings, cohort, subjects or groups."""

    path: str
    sha256: str
    role: str


@dataclass(frozen=True)
class TarPoint:
    """TAR at one FAR; where ``status`` is not measurable, everything measured is None or zero."""

    far_target: float
    tar: float | None
    interval: tuple[float, float] | None
    far: float | None
    false_accepts: int
    threshold: float | None
    status: str
    allowed: int  # false accepts that the target FAR allows
    note: str | None = None  # the status in words


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
class Measure:
    """A number of one protocol or of a registered metric; None where it is not defined."""

    value: float | None
    std: float | None = None  # over folds
    note: str | None = None  # how it was measured
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Measures:
    """Every number of the evaluation; a Cllr is in bits and takes the scores as natural LLRs."""

    tar: tuple[TarPoint, ...]
    eer: EerPoint
    min_dcf: tuple[DcfPoint, ...]
    cllr: Value
    min_cllr: Value
    extra: dict[str, Measure] = field(default_factory=dict)  # of protocols and registered metrics


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
    """Predicted and observed share of genuine trials in bins, at even odds; None in empty bins."""

    edges: tuple[float, ...]
    predicted: tuple[float | None, ...]
    observed: tuple[float | None, ...]
    count: tuple[int, ...]


@dataclass(frozen=True)
class CalibrationCurve:
    """``scale * score + offset`` is a log-likelihood ratio, fitted to these trials."""

    scale: float
    offset: float
    reliability: Reliability


@dataclass(frozen=True)
class ReplicateValues:
    """Values of every bootstrap replicate, for paired comparisons; None where not measurable.

    Two systems are comparable when ``subjects_sha256``, ``seed`` and ``data_sha256`` agree.
    """

    subjects_sha256: str
    seed: int
    tar: dict[str, tuple[float | None, ...]]  # by far_key, as is min_dcf
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
    """How far one rate differs between groups; None where it is not defined."""

    max_over_geomean: float | None
    ineq: float | None  # largest over smallest: INEQ with all its weight on this rate
    garbe: float | None  # Gini coefficient: GARBE with all its weight on this rate


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


NUM_EASY = 4  # of the easiest pairs of each kind that are kept beside the hardest


@dataclass(frozen=True)
class Hardest:
    """The highest impostors and the lowest genuine trials, hardest first; some easy ones, too."""

    false_accepts: tuple[HardPair, ...]
    false_rejects: tuple[HardPair, ...]
    easy_impostors: tuple[HardPair, ...] = ()
    easy_genuine: tuple[HardPair, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[HardPair, ...], ...]:
        """All pairs by their kind."""
        return self.false_accepts, self.false_rejects, self.easy_impostors, self.easy_genuine


@dataclass(frozen=True)
class Result:
    """One system on one protocol."""

    system: System
    run: RunInfo | None  # None for scores of other programs
    protocol: ProtocolInfo
    sources: tuple[Source, ...]
    measures: Measures
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

    @property
    def weights_sha256(self) -> str | None:
        """Hash of the evaluated weights; None if unknown."""
        known = None if self.run is None else self.run.checkpoint_sha256
        return known or (self.system.model_card or {}).get("weights_sha256")

    def with_extra(self, extra: Mapping[str, Measure]) -> Result:
        """The same result with more measures."""
        measures = replace(self.measures, extra={**self.measures.extra, **extra})
        return replace(self, measures=measures)


def far_key(far: float) -> str:
    """Name of a FAR or a prior in ``ReplicateValues``."""
    return repr(float(far))


def result_to_json(result: Result) -> dict[str, Any]:
    """The content of ``result.json``: numbers are finite, None, ``"inf"`` or ``"-inf"``."""
    return {"format": FORMAT, "version": VERSION, **encode(result, "result")}


def result_from_json(content: object, source: str = "result") -> Result:
    """Check and read the content of ``result.json``, of this version or of version 1.

    ``source`` names the file in errors.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{source} is not a {FORMAT} file: write one with `qmargin evaluate`")
    version = content.get("version")
    if version not in (1, VERSION) or isinstance(version, bool):
        raise DataError(
            f"{source} has version {version!r} of {FORMAT}, not 1 or {VERSION}: evaluate again"
        )
    if version == 1:
        content = _from_version_1(content, source)
    result = cast(Result, decode(Result, content, f"{source}:"))
    for point in result.measures.tar:
        if point.status not in STATUSES:
            raise DataError(
                f"{source}: measures.tar has the status {point.status!r}: evaluate again"
            )
    _check_finite(content, source)
    return result


def _from_version_1(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Entries of a version-1 file under their current names; missing ones are None."""

    def part(name: str, kind: type, default: Any = ...) -> Any:
        value = content.get(name, default)
        if value is ...:
            raise DataError(f"{source}: {name} is missing: evaluate the scores again")
        if not isinstance(value, kind):
            raise DataError(f"{source}: {name} is not of the type {kind.__name__}")
        return value

    system = dict(part("system", dict))
    card = system.get("model_card") or {}
    card = dict(card) if isinstance(card, Mapping) else {}
    listed = [dict(entry) for entry in part("measures", list, []) if isinstance(entry, Mapping)]
    extra = {str(entry.pop("name", None)): entry for entry in listed}
    flips = {"used": "sum", "not used": "none"}
    flip, pooling = card.pop("mirror images", None), card.pop("pooling", None)
    if isinstance(system.get("model_card"), Mapping):  # it repeated the measures
        system["model_card"] = {key: text for key, text in card.items() if key not in extra} or None
    return {
        **content,
        "system": system,
        "run": None,
        "protocol": {
            **part("protocol", dict),
            "kind": None,
            "scoring": None,
            "data_sha256": content.get("trials_sha256"),
            "flip": flips.get(flip) if isinstance(flip, str) else None,
            "pooling": pooling,
        },
        "measures": {**part("metrics", dict), "extra": extra},
        "notes": [
            *part("notes", list, []),
            "read from a result of version 1, which does not name the training run or the kind of "
            "protocol: evaluate again to add them",
        ],
    }


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

    Absolute keys of trials lose the folder that all of them share.
    """
    sources = (replace(source, path=without_folders(source.path)) for source in result.sources)
    try:
        words = shlex.split(result.command)
    except ValueError:  # not a command line of this package
        words = result.command.split()
    command = result.command
    if any(without_folders(word) != word for word in words):
        command = shlex.join(map(without_folders, words))
    return replace(
        result,
        sources=tuple(sources),
        command=command,
        hardest=None if result.hardest is None else _with_short_keys(result.hardest),
    )


def _with_short_keys(hardest: Hardest) -> Hardest:
    kinds = hardest.kinds
    keys = {key for pair in chain(*kinds) for key in (pair.enrol, pair.test)}
    folders = [posixpath.dirname(key) for key in keys if PurePosixPath(key).is_absolute()]
    if not folders:
        return hardest
    folder = posixpath.commonpath(folders).rstrip("/") + "/"
    short = [
        [HardPair(e.enrol.removeprefix(folder), e.test.removeprefix(folder), e.score) for e in kind]
        for kind in kinds
    ]
    return Hardest(*map(tuple, short))


def write_result(path: str | Path, result: Result, *, keep_paths: bool = False) -> None:
    """Write ``result.json`` atomically; paths are shortened by ``without_paths`` unless kept."""
    content = result_to_json(result if keep_paths else without_paths(result))
    result_from_json(json.loads(json.dumps(content)), str(path))  # a NaN where none is allowed
    text = json.dumps(content, allow_nan=False, indent=1)
    write_atomically(path, (text + "\n").encode("utf-8"))


def read_result(path: str | Path) -> Result:
    """Read and check ``result.json``."""
    return result_from_json(read_json(path), str(path))


def read_json(path: str | Path, limit: int | None = None) -> Any:
    """Read a JSON file of at most ``limit`` bytes; NaN and infinite numbers are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    check_regular(path)
    content = Path(path).read_bytes() if limit is None else read_regular(path, limit)
    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): was it cut short?") from error
