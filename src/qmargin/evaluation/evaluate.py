"""From scored trials to a ``Result``: every metric, with its interval and status."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qmargin
from qmargin import registry
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.result import (
    NUM_EASY,
    STATUSES,
    Band,
    CalibrationCurve,
    DcfPoint,
    Det,
    EerPoint,
    GroupAudit,
    GroupRow,
    GroupSpread,
    Hardest,
    HardPair,
    Histogram,
    IntervalMethod,
    Measure,
    Measures,
    ProtocolInfo,
    Reliability,
    ReplicateValues,
    Result,
    RunInfo,
    Source,
    System,
    TarPoint,
    Value,
    far_key,
)
from qmargin.evaluation.scores import ScoreSet, read_scores
from qmargin.evaluation.trials import Subjects, find_subjects
from qmargin.metrics.bootstrap import DrawnPoints, Trials, bootstrap, interval
from qmargin.metrics.calibration import Calibration, calibrate, cllr, min_cllr_of
from qmargin.metrics.checks import pieces
from qmargin.metrics.curve import DetCurve, StaircaseParts, thin_curve
from qmargin.metrics.eer_dcf import Eer, MinDcf, eer, min_dcf
from qmargin.metrics.groups import GroupRate, group_rates
from qmargin.metrics.operating import (
    RULES,
    TarAtFar,
    check_level,
    rule_of_three,
    sufficiency,
    tars_at_fars,
    wilson,
)

Floats = NDArray[np.float64]
Ends = tuple[float, float]
StageProgress = Callable[[str, int, int], None]
DET_POINTS = 400
HISTOGRAM_BINS = 64
RELIABILITY_BINS = 20
NARROW = 1e-4  # of the largest score: a system whose scores differ by less has collapsed
MANY_TRIALS = 1 << 20  # from here on, one thread draws replicates while another measures
_BAND_POINTS = 25
_LARGEST_BAND_FAR = 0.5


@dataclass(frozen=True)
class EvaluationOptions:
    """What to measure and how; the fields are options of ``qmargin evaluate``.

    Attributes:
        name: Name of the system.
        protocol: Name of the trials.
        kind: Kind of the protocol; this and the next three are fields of ``ProtocolInfo``.
        run: The training run of the system; None if unknown.
        fars: False accept rates at which to measure TAR.
        p_targets: Priors of minDCF.
        rule: How the threshold of a FAR is chosen: conservative, nearest or interpolated.
        subjects: ``"auto"``, ``"path"`` or ``"none"``, see ``find_subjects``.
        subject_of: Subject of every name; overrides ``subjects``.
        group_of: Group of every subject; None for no audit of groups.
        group_far: FAR whose threshold the audit uses; None for the smallest that has enough trials.
        num_replicates: Bootstrap replicates; 0 for no intervals.
        seed: Seed of the bootstrap.
        level: Level of the intervals.
        num_hardest: Hardest trials to keep of each kind.
        metrics: Names of registered metrics to measure as well; None for all of them.
        model_card: Facts about the system.
        sources: Files that were read, other than those of the scores.
        notes: Further notes of the result.
    """

    name: str = "system"
    protocol: str = "trials"
    kind: str = "scores"
    scoring: str = "given"
    flip: str | None = None
    pooling: str | None = None
    run: RunInfo | None = None
    fars: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    p_targets: tuple[float, ...] = (0.01, 0.05)
    rule: str = "conservative"
    subjects: str = "auto"
    subject_of: dict[str, str] | None = field(default=None, repr=False)
    group_of: dict[str, str] | None = field(default=None, repr=False)
    group_far: float | None = None
    num_replicates: int = 1000
    seed: int = 0
    level: float = 0.95
    num_hardest: int = 20
    metrics: tuple[str, ...] | None = None
    model_card: dict[str, str] | None = None
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("far", self.fars), ("p_target", self.p_targets)):
            for value in values:
                if not 0.0 < value < 1.0:
                    raise ConfigError(f"{name}={value:g} is outside (0, 1): try 0.001")
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} has the values {values}: give at least one, each once")
        if self.rule not in RULES:
            raise ConfigError(f"rule {self.rule!r} is unknown: choose one of {', '.join(RULES)}")
        if self.subjects not in ("auto", "path", "none"):
            raise ConfigError(f"subjects={self.subjects!r} is not one of auto, path, none")
        if self.group_far is not None and self.group_far not in self.fars:
            raise ConfigError(f"group_far={self.group_far:g} is not among the FARs: add it there")
        for name in ("num_replicates", "num_hardest", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give at least 0")
        check_level(self.level)
        for name in self.metrics or ():
            registry.metrics.get(name)


def evaluate_scores(
    score_set: ScoreSet | str | Path,
    options: EvaluationOptions | None = None,
    *,
    command: str = "",
    progress: StageProgress | None = None,
) -> Result:
    """Compute all metrics that the trials can resolve, with intervals.

    A FAR that they cannot resolve is "not measurable", not an error.

    Args:
        score_set: Scored trials, or a file of them that ``read_scores`` reads.
        options: What to measure.
        command: The command line, for the record.
        progress: Called with a stage, its progress and its total.

    Raises:
        ProtocolError: There are no genuine or no impostor trials.
        DataError: Subjects contradict labels; the message names the line.
    """
    options = options or EvaluationOptions()
    if not isinstance(score_set, ScoreSet):
        score_set = read_scores(score_set)
    genuine, impostor = _sides(score_set)
    subjects = find_subjects(score_set, options.subjects, options.subject_of)
    fars = measurable(options.fars, len(impostor))
    found_tars = tars_at_fars(genuine, impostor, fars, rule=options.rule)
    points = tar_points(options.fars, found_tars, len(impostor))
    measure = partial(_measured, genuine, impostor, options)
    draw = partial(find_intervals, score_set, subjects, points, options, progress)
    if subjects is None or len(score_set) < MANY_TRIALS or options.num_replicates == 0:
        intervals, found = draw(), measure()
    else:  # both take about as long, in NumPy, which lets threads run
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(measure)
            intervals, found = draw(), job.result()
    groups = audit_groups(score_set, subjects, points, options)
    options = replace(
        options,
        sources=(*score_set.sources, *options.sources),
        notes=(*options.notes, *_notes(score_set)),
    )
    return new_result(
        found,
        points,
        intervals,
        options,
        num_genuine=len(genuine),
        num_impostors=len(impostor),
        num_subjects=None if subjects is None or subjects.are_files else len(subjects.names),
        data_sha256=score_set.trials_sha256(),
        groups=groups,
        hardest=hardest_trials(score_set, options.num_hardest),
        command=command,
    )


@dataclass(frozen=True)
class Measured:
    """Measures without a bootstrap."""

    eer: Eer
    min_dcf: tuple[MinDcf, ...]  # one for each prior
    curve: DetCurve
    histogram: Histogram
    cllr: float | None = None  # None where scores are no log-likelihood ratios, or not finite
    min_cllr: float | None = None
    calibration: CalibrationCurve | None = None
    extra: dict[str, Measure] = field(default_factory=dict)  # of registered metrics


def _measured(genuine: Floats, impostor: Floats, options: EvaluationOptions) -> Measured:
    steps = StaircaseParts(genuine, impostor)
    return Measured(
        eer=eer(genuine, impostor),
        min_dcf=tuple(min_dcf(genuine, impostor, p_target) for p_target in options.p_targets),
        curve=thin_curve(steps, DET_POINTS),
        histogram=score_histogram(genuine, impostor),
        cllr=_finite(cllr(genuine, impostor)),
        min_cllr=_finite(min_cllr_of(steps)),
        calibration=calibration_curve(genuine, impostor),
        extra=registered_measures(genuine, impostor, options.metrics),
    )


def registered_measures(
    genuine: NDArray[Any], impostor: NDArray[Any], names: Sequence[str] | None = None
) -> dict[str, Measure]:
    """Values of registered metrics, or of those with these names.

    A metric gets the genuine and the impostor scores: two arrays of one dimension, float32 or
    float64, read-only, in no particular order, not empty and without NaN. It returns a number, or
    several by their names, which follow its own; NaN and None mean that it is not defined. The
    first line of its docstring becomes the note. One that fails is listed with the reason.
    """
    sides = []
    for scores in (genuine, impostor):
        view = scores.view()
        view.flags.writeable = False  # a metric that sorts in place would affect the others
        sides.append(view)
    found: dict[str, Measure] = {}
    for name in registry.metrics.names() if names is None else names:
        try:
            metric = registry.metrics.get(name)
            value = metric(*sides)
            values = value if isinstance(value, Mapping) else {"": value}
            note = (metric.__doc__ or "").strip().partition("\n")[0] or None
            for key, number in values.items():
                known = None if number is None else _finite(float(number))
                found[" ".join(filter(None, (name, str(key))))] = Measure(known, note=note)
        except Exception as error:
            found[name] = Measure(None, note=f"failed: {type(error).__name__}: {error}")
    return found


def new_result(
    found: Measured,
    points: Sequence[TarPoint],
    intervals: Intervals,
    options: EvaluationOptions,
    *,
    num_genuine: int,
    num_impostors: int,
    num_subjects: int | None,
    data_sha256: str | None,
    command: str,
    hardest: Hardest | None = None,
    groups: GroupAudit | None = None,
) -> Result:
    """Combine measures, their intervals and the facts about the trials."""
    curve = found.curve
    return Result(
        system=System(options.name, options.model_card),
        run=options.run,
        protocol=ProtocolInfo(
            name=options.protocol,
            kind=options.kind,
            rule=options.rule,
            scoring=options.scoring,
            data_sha256=data_sha256,
            num_trials=num_genuine + num_impostors,
            num_genuine=num_genuine,
            num_impostors=num_impostors,
            num_subjects=num_subjects,
            interval=intervals.method,
            flip=options.flip,
            pooling=options.pooling,
        ),
        sources=options.sources,
        measures=Measures(
            tar=tuple(replace(at, interval=intervals.tar.get(at.far_target)) for at in points),
            eer=EerPoint(found.eer.eer, intervals.eer, _threshold(found.eer.threshold)),
            min_dcf=tuple(
                DcfPoint(
                    at.p_target,
                    at.min_dcf,
                    intervals.min_dcf.get(at.p_target),
                    _threshold(at.threshold),
                )
                for at in found.min_dcf
            ),
            cllr=Value(found.cllr),
            min_cllr=Value(found.min_cllr),
            extra=found.extra,
        ),
        det=Det(
            tuple(curve.far.tolist()),
            tuple(curve.frr.tolist()),
            tuple(map(_threshold, curve.thresholds.tolist())),
            intervals.band,
        ),
        histogram=found.histogram,
        calibration=found.calibration,
        replicates=intervals.replicates,
        groups=groups,
        hardest=hardest,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command,
        qmargin=qmargin.__version__,
        notes=options.notes,
    )


def _notes(score_set: ScoreSet) -> Iterator[str]:
    """Notes on problems of trials that can still be measured."""
    num_mirrored, num_self = score_set.pair_counts
    low, high = float(score_set.scores.min()), float(score_set.scores.max())
    if high - low <= NARROW * max(abs(low), abs(high)) or low == high:
        span = f"are {low!r}" if low == high else f"lie from {low!r} to {high!r}"
        yield (
            f"all {len(score_set):,} scores {span}: such a system does not tell subjects apart; "
            "check its embeddings"
        )
    if num_mirrored:
        yield f"{num_mirrored:,} pairs occur in both orders and count twice: remove one order"
    if num_self:
        yield (
            f"{num_self:,} trials compare a sample with itself, which does not measure "
            "recognition: remove them"
        )


def _sides(score_set: ScoreSet) -> tuple[Floats, Floats]:
    scores, is_genuine = score_set.scores, score_set.is_genuine
    num_genuine = int(is_genuine.sum())
    for kind, number in (("genuine", num_genuine), ("impostor", len(scores) - num_genuine)):
        if number == 0:
            raise ProtocolError(
                f"{score_set.sources[-1].path}: there are 0 {kind} trials among {len(scores):,}: "
                "check the labels"
            )
    if is_genuine[:num_genuine].all():  # as readers arrange scores without names
        return scores[:num_genuine], scores[num_genuine:]
    return scores[is_genuine], scores[~is_genuine]


def measurable(fars: Sequence[float], num_impostors: int) -> tuple[float, ...]:
    """Those rates that allow a false accept."""
    return tuple(far for far in fars if sufficiency(far, num_impostors).allowed > 0)


def tar_points(
    fars: Sequence[float], found: Sequence[TarAtFar], num_impostors: int
) -> tuple[TarPoint, ...]:
    """An entry for every FAR, measured or not, without intervals."""
    measured = {point.far_target: point for point in found}
    points = []
    for far in fars:
        state, at = sufficiency(far, num_impostors), measured.get(far)
        point = TarPoint(far, None, None, None, 0, None, state.status, state.allowed, state.message)
        if at is not None:
            limit = _threshold(at.threshold)
            accepts = at.false_accepts
            point = replace(point, tar=at.tar, far=at.far, false_accepts=accepts, threshold=limit)
        points.append(point)
    return tuple(points)


def _threshold(threshold: float) -> float | None:
    """None for the threshold that accepts nothing, not even +inf."""
    return None if np.isnan(threshold) else float(threshold)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


@dataclass(frozen=True)
class Intervals:
    """Confidence intervals and their method."""

    method: IntervalMethod
    tar: dict[float, Ends] = field(default_factory=dict)
    eer: Ends | None = None
    min_dcf: dict[float, Ends] = field(default_factory=dict)
    band: Band | None = None
    replicates: ReplicateValues | None = None


def find_intervals(
    score_set: ScoreSet,
    subjects: Subjects | None,
    points: Sequence[TarPoint],
    options: EvaluationOptions,
    progress: StageProgress | None = None,
) -> Intervals:
    """The best intervals that the trials allow.

    Subjects are resampled if they are known, otherwise files; without names the trials are treated
    as independent (Wilson), which makes intervals too narrow.
    """
    if options.num_replicates == 0:
        return no_intervals(options, "not requested")
    num_genuine = int(score_set.is_genuine.sum())
    if subjects is None:
        note = "trials have no names and are treated as independent: intervals are too narrow"
        method = IntervalMethod("wilson", options.level, 0, options.seed, note)
        tar = {
            point.far_target: wilson(round(point.tar * num_genuine), num_genuine, options.level)
            for point in points
            if point.tar is not None and options.rule != "interpolated"  # no threshold has that TAR
        }
        return Intervals(method, tar=tar)
    num_impostors = len(score_set) - num_genuine
    grid = np.geomspace(1.0 / num_impostors, _LARGEST_BAND_FAR, _BAND_POINTS)
    try:
        drawn = bootstrap(
            as_trials(score_set, subjects),
            [point.far_target for point in points if point.tar is not None],
            p_targets=options.p_targets,
            grid_fars=tuple(np.unique(grid).tolist()) if num_impostors > 1 else (),
            num_replicates=options.num_replicates,
            seed=options.seed,
            progress=None if progress is None else partial(progress, "bootstrap"),
        )
        kind = "file bootstrap" if subjects.are_files else "subject bootstrap"
        return intervals_of(drawn, num_genuine, num_impostors, options, kind, subjects.note)
    except ProtocolError as error:
        return no_intervals(options, str(error))


def no_intervals(options: EvaluationOptions, why: str) -> Intervals:
    """The reason why there are none."""
    return Intervals(IntervalMethod("none", options.level, 0, options.seed, why))


def intervals_of(
    drawn: DrawnPoints,
    num_genuine: int,
    num_impostors: int,
    options: EvaluationOptions,
    kind: str,
    note: str,
) -> Intervals:
    """Percentile intervals of replicates; where none has an error, the rule of three bounds it."""
    level, fars = options.level, drawn.fars
    if options.rule != "conservative":
        note += f"; TAR by the rule {options.rule} has no interval"
        fars = ()
    least = 1.0 - rule_of_three(num_genuine)
    tars = [interval(column, level) for column in drawn.tar.T[: len(fars)]]
    low, high = interval(drawn.eer, level)
    bands = [interval(column, level) for column in drawn.frr_at_grid.T]
    costs = [interval(column, level) for column in drawn.min_dcf.T]
    return Intervals(
        IntervalMethod(kind, level, options.num_replicates, options.seed, note),
        tar={
            far: (least, 1.0) if ends == (1.0, 1.0) else ends
            for far, ends in zip(fars, tars, strict=True)
        },
        eer=(low, rule_of_three(min(num_genuine, num_impostors)) if high == 0.0 else high),
        min_dcf=dict(zip(drawn.p_targets, costs, strict=True)),
        band=Band(drawn.grid_fars, *zip(*bands, strict=True)) if bands else None,
        replicates=ReplicateValues(
            drawn.subjects_sha256,
            drawn.seed,
            _columns(drawn.fars, drawn.tar),
            _optional(drawn.eer),
            _columns(drawn.p_targets, drawn.min_dcf) if drawn.p_targets else None,
        ),
    )


def _columns(names: Sequence[float], values: Floats) -> dict[str, tuple[float | None, ...]]:
    return {far_key(name): _optional(values[:, i]) for i, name in enumerate(names)}


def _optional(values: Floats) -> tuple[float | None, ...]:
    return tuple(None if value != value else value for value in values.tolist())


def as_trials(score_set: ScoreSet, subjects: Subjects) -> Trials:
    """The trials in the form of the bootstrap and the audit of groups."""
    return Trials(
        score_set.scores, score_set.is_genuine, subjects.enrol, subjects.test, subjects.names
    )


def common_point(points: Sequence[TarPoint], options: EvaluationOptions) -> TarPoint | None:
    """The point whose threshold groups share; None where no FAR is measurable."""
    far, measured = options.group_far, [point for point in points if point.tar is not None]
    if far is not None:
        measured = [point for point in measured if point.far_target == far]
    return min(
        measured, key=lambda point: (STATUSES.index(point.status), point.far_target), default=None
    )


def group_row(name: str, fmr: GroupRate, fnmr: GroupRate) -> GroupRow:
    """Both rates of a group, for a result."""
    return GroupRow(
        group=name,
        fmr=fmr.rate,
        fnmr=fnmr.rate,
        num_genuine=fnmr.trials,
        num_impostors=fmr.trials,
        status=max(fmr.status, fnmr.status, key=STATUSES.index),
        note=f"FMR: {fmr.message}; FNMR: {fnmr.message}",
    )


def audit_groups(
    score_set: ScoreSet,
    subjects: Subjects | None,
    points: Sequence[TarPoint],
    options: EvaluationOptions,
) -> GroupAudit | None:
    """FMR and FNMR per group at the threshold of one FAR; None when no groups were given."""
    if options.group_of is None:
        return None
    if subjects is None:
        raise DataError(f"{score_set.sources[0].path} has no names, so its trials have no groups")
    far, point = options.group_far, common_point(points, options)
    if point is None:
        what = "no FAR is" if far is None else f"FAR={far:g} is not"
        raise ProtocolError(f"{what} measurable on these trials, so groups have no threshold")
    threshold = float("nan") if point.threshold is None else point.threshold
    rates = group_rates(as_trials(score_set, subjects), options.group_of, threshold)
    rows = [group_row(group.name, group.fmr, group.fnmr) for group in rates.groups]
    fmr, fnmr = (
        GroupSpread(spread.max_over_geometric_mean, spread.max_over_min, spread.gini)
        for spread in (rates.fmr, rates.fnmr)
    )
    numbers = {
        "impostor trials between two groups are left out": rates.num_cross_impostors,
        "trials have a subject without a group": rates.num_ungrouped_trials,
    }
    notes = [f"FMR: {rates.fmr.note}"] if rates.fmr.note else []
    notes += [f"FNMR: {rates.fnmr.note}"] if rates.fnmr.note else []
    notes += [f"{number:,} {what}" for what, number in numbers.items() if number]
    return GroupAudit(
        threshold=point.threshold,
        far_target=point.far_target,
        rows=tuple(rows),
        fmr=fmr,
        note="; ".join(notes) or None,
        fnmr=fnmr,
        ineq=rates.ineq,
        garbe=rates.garbe,
    )


def score_histogram(genuine: Floats, impostor: Floats) -> Histogram:
    """Counts of the finite scores in bins of equal width."""
    low, high = _range([genuine, impostor])
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
    counts = []
    for side in (genuine, impostor):
        found = np.zeros(HISTOGRAM_BINS, np.int64)
        for piece in pieces(side):
            found += np.histogram(piece[np.isfinite(piece)], bins=edges)[0]
        counts.append(found.tolist())
    return Histogram(tuple(edges.tolist()), tuple(counts[0]), tuple(counts[1]))


def counted_histogram(genuine: Floats, impostor: Floats, counts: NDArray[np.int64]) -> Histogram:
    """The same where impostors are known as counts at scores, all of them finite."""
    impostor, counts = impostor[counts > 0], counts[counts > 0]
    plain = score_histogram(genuine, impostor)
    places = np.digitize(impostor, plain.edges[1:-1])
    found = np.zeros(HISTOGRAM_BINS, np.int64)
    np.add.at(found, places, counts)
    return Histogram(plain.edges, plain.genuine, tuple(found.tolist()))


def _range(sides: list[Floats]) -> tuple[float, float]:
    """Smallest and largest finite score, a little apart even where they are the same."""
    finite = (piece[np.isfinite(piece)] for side in sides for piece in pieces(side))
    ends = [(float(piece.min()), float(piece.max())) for piece in finite if len(piece)]
    low = min((end[0] for end in ends), default=0.0)
    high = max((end[1] for end in ends), default=0.0)
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-9):
        return low, high
    margin = 0.5 * max(abs(low), 1.0)
    return low - margin, high + margin


def calibration_curve(genuine: Floats, impostor: Floats) -> CalibrationCurve | None:
    """The affine map to log-likelihood ratios and how it fits.

    None when a threshold separates all trials, or when a score is infinite.
    """
    try:
        calibration = calibrate(genuine, impostor, prior=0.5)
    except (ProtocolError, DataError):
        return None
    reliability = _reliability(calibration, genuine, impostor)
    return CalibrationCurve(calibration.scale, calibration.offset, reliability)


def _reliability(calibration: Calibration, genuine: Floats, impostor: Floats) -> Reliability:
    """Predicted against observed shares, both labels weighing the same."""
    edges = np.linspace(0.0, 1.0, RELIABILITY_BINS + 1)
    shares, sums, counts = [], [], np.zeros(RELIABILITY_BINS, dtype=np.int64)
    for side in (genuine, impostor):
        found, total = np.zeros(RELIABILITY_BINS, np.int64), np.zeros(RELIABILITY_BINS)
        for piece in pieces(side):
            posterior = 0.5 * (1.0 + np.tanh(0.5 * calibration.apply(piece)))
            place = (posterior * RELIABILITY_BINS).astype(np.int64)
            np.minimum(place, RELIABILITY_BINS - 1, out=place)
            found += np.bincount(place, minlength=RELIABILITY_BINS)
            np.add.at(total, place, posterior)
        counts += found
        shares.append(found / len(side))
        sums.append(total / len(side))
    totals = shares[0] + shares[1]
    has_trials = totals > 0

    def ratio(values: Floats) -> tuple[float | None, ...]:
        found = np.divide(values, totals, where=has_trials, out=np.zeros_like(totals))
        pairs = zip(found.tolist(), has_trials.tolist(), strict=True)
        return tuple(value if is_known else None for value, is_known in pairs)

    return Reliability(
        tuple(edges.tolist()), ratio(sums[0] + sums[1]), ratio(shares[0]), tuple(counts.tolist())
    )


def hardest_trials(score_set: ScoreSet, number: int) -> Hardest | None:
    """The highest impostors and the lowest genuine trials; ties go by the order of the names.

    With them come a few of the easiest of both kinds. None when the trials have no names, or none
    are asked for.
    """
    keys, scores, is_genuine = score_set.keys, score_set.scores, score_set.is_genuine
    if keys is None or number == 0:
        return None
    kinds = []
    for is_kind, sign, most in (
        (~is_genuine, -1.0, number),
        (is_genuine, 1.0, number),
        (~is_genuine, 1.0, NUM_EASY),
        (is_genuine, -1.0, NUM_EASY),
    ):
        rows = np.flatnonzero(is_kind)
        signed = sign * scores[rows]
        if most < len(rows):  # all of a tie at the last place, so that names decide
            limit = np.partition(signed, most - 1)[most - 1]
            rows, signed = rows[signed <= limit], signed[signed <= limit]
        order = np.lexsort((keys.test[rows], keys.enrol[rows], signed))[:most]
        chosen = rows[order].tolist()
        kinds.append(tuple(HardPair(*keys.trial(row), float(scores[row])) for row in chosen))
    return Hardest(*kinds)


def default_name(path: str | Path) -> str:
    """Name of a system or protocol after its file."""
    return Path(path).name.split(".")[0] or "system"
