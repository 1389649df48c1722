"""Results of an experiment: tables and figures of the search, the report, and its page."""

from __future__ import annotations

import math
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.errors import ConfigError, DataError
from qmargin.experiments.experiment import Arm, Experiment
from qmargin.experiments.measure import EER, far_of
from qmargin.experiments.run import MAX_COHORT, NEAREST, NORMALISED, RESULT, Run
from qmargin.experiments.search import Tried, ranked
from qmargin.experiments.space import EFFECTIVE, HARDNESS, REACH, Axis, Point, Range
from qmargin.experiments.worlds import Made
from qmargin.files import MADE_BY, Guard, write_atomically
from qmargin.losses.hardness import hardness
from qmargin.report.figures import LinePoint, has_matplotlib, write_lines
from qmargin.report.journal import read_journal
from qmargin.report.numbers import MISSING, rate_text, signed
from qmargin.report.systems import Primary, Repeats, find_repeats, load_panels, spread
from qmargin.report.table import CellValue, Column, Number, Table
from qmargin.report.tables import repeats_table
from qmargin.report.verdicts import ONE_RUN, plain_text, planned_verdicts
from qmargin.report.write import ReportOptions, write_report
from qmargin.training.recipe import Recipe
from qmargin.training.reporting import JOURNAL

if TYPE_CHECKING:
    from qmargin.experiments.runner import Finished

SEARCH = "search"  # stem of its tables
FIGURES, JOURNALS, PICTURES, REPORT = "figures", "journals", "pictures", "report"
OLD_RECORDS = ("plan.json", "sweep.json", "chosen.json")
STEMS = ("sensitivity", "effective-margin")
SHOWN = ("loss.alpha", "loss.scale", "loss.margin", EFFECTIVE, HARDNESS, REACH, "loss.preset")
SIGNS = {"loss.alpha": "\u03b1", "loss.scale": "s", "loss.margin": "m", EFFECTIVE: "m_eff"}
MARGIN, GAP = "Margin m", "Effective margin"
LABELS = {
    "loss.scale": "Scale",
    "loss.margin": "Margin",
    EFFECTIVE: GAP,
    "loss.alpha": "\u03b1",
    REACH: "Reach",
    HARDNESS: "Hardness",
}
REACHABLE = 2.0  # cosines differ by at most this
MOST_LINES = 20  # of a figure; of more settings each arm has one line, of the best
VERDICT_FARS = (1e-3, 1e-4, 1e-5)
COORDINATES = ("loss.alpha", "loss.scale", "loss.margin")  # each has its range given those before
NEAR = 0.05  # of a range that is searched: this near to an end is at its edge
COVER = "Intervals cover training seeds and test identities."
AS_NORM = (
    "The same runs and pairs. AS-norm measures a cosine in standard deviations above the mean of "
    f"the {NEAREST} prototypes that are nearest to a sample, averaged over the two samples. The "
    f"prototypes are those of the head, at most {MAX_COHORT:,} of them, so it needs no other data."
)


def check_outputs(out: Path, record: str, *, overwrite: bool = False) -> None:
    """Refuse a folder without an experiment that has files under the names of its outputs."""
    if (out / record).exists():
        return
    for name in OLD_RECORDS:
        if (out / name).exists():
            raise ConfigError(f"{out} is of version 0.1 ({name}); choose another --out")
    guard = Guard(overwrite=overwrite)
    tables = [f"{SEARCH}.{kind}" for kind in ("md", "tex", "csv")]
    figures = [f"{FIGURES}/{stem}.{kind}" for stem in STEMS for kind in ("svg", "pdf")]
    report = [f"{REPORT}/{name}" for name in ("index.html", "tables.md", "tables.tex")]
    for name in (*tables, *figures, *report):
        guard.check(out / name, MADE_BY)


def write_final(
    out: Path,
    experiment: Experiment,
    runs: Sequence[Run],
    names: Sequence[str],
    notes: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> None:
    """Write the report of the runs that were tested; ``notes`` are shown below its verdict."""
    first: dict[str, int] = {}  # seed of each arm
    for run in runs:
        first[run.arm] = min(run.recipe.seed, first.get(run.arm, run.recipe.seed))
    journals = []
    (out / JOURNALS).mkdir(parents=True, exist_ok=True)
    for run in runs:
        path = out / JOURNALS / f"{run.title.replace('/', '-')}.jsonl"
        with suppress(DataError, OSError):  # a report needs none
            if run.recipe.seed == first[run.arm]:
                read_journal(run.folder / JOURNAL)
                shutil.copyfile(run.folder / JOURNAL, path)
                journals.append(path)
    title = experiment.title or experiment.name
    options = ReportOptions(
        title=title[0].upper() + title[1:],
        data_note=experiment.world.note,
        media=out / PICTURES if (out / PICTURES).is_dir() else None,
        journals=tuple(journals),
        has_figures=has_matplotlib(),
        primary=experiment.comparison,
        experiment=experiment.title or experiment.name,
        notes=tuple(notes),
        overwrite=overwrite,
    )
    write_report([run.folder / name for name in names for run in runs], out / REPORT, options)


# -- the search -----------------------------------------------------------------------------------


def write_search(
    out: Path,
    experiment: Experiment,
    rounds: Sequence[Sequence[Tried]],
    chosen: Mapping[str, Point],
    measure: str,
) -> list[Path]:
    """Write tables and figures of a search; returns the files."""
    rows = [one for tried in reversed(rounds) for one in tried]
    files = search_table(experiment, rows, chosen).files(SEARCH)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [
        *(out / name for name in files),
        *write_figures(rounds[0], measure, out / FIGURES, _titles(experiment)),
    ]


def search_table(
    experiment: Experiment, tried: Sequence[Tried], chosen: Mapping[str, Point]
) -> Table:
    """Points and their measures on validation identities."""
    found = {name for one in tried for outcome in one.outcomes for name in outcome.measures}
    names = sorted(found, key=lambda name: -(far_of(name) or 0.0))  # the EER last
    others = _telling([one.point for one in tried])
    has_lengths = len({one.recipe.run.epochs for one in tried}) > 1
    columns = [
        Column("Loss", align="left"),
        Column("alpha", latex=r"$\alpha$"),
        Column("s", latex="$s$"),
        Column("m", latex="$m$"),
        Column("m_eff", latex=r"$m_{\mathrm{eff}}$"),
        Column("hardness"),
        Column("reach"),
        *map(Column, others),
        *([Column("epochs")] if has_lengths else []),
        *(Column(_measure_text(n, rate=""), best="min" if n == EER else "max") for n in names),
        Column("seeds"),
        Column("", align="left"),
    ]
    rows: list[tuple[CellValue, ...]] = []
    for one in tried:
        is_chosen = bool(experiment.seeds) and chosen.get(one.arm) == one.point
        rows.append(
            (
                experiment.arms[one.arm].title,
                *_settings(one.recipe),
                *(one.point.get(key) for key in others),
                *([one.recipe.run.epochs] if has_lengths else []),
                *(_measured(one, name) for name in names),
                len(one.known(EER)),
                ", ".join(filter(None, ["chosen" * is_chosen, one.note])),
            )
        )
    words = (
        "Rates in per cent over all pairs of validation samples: mean and standard deviation over "
        "seeds, the best mean of complete rows in bold.",
        "Reach is the cosine gap of zero loss; m_eff is the part of it that the margin adds.",
    )
    title = f"Settings of {experiment.title or experiment.name}"
    return Table(title, tuple(columns), tuple(rows), words, label="qmargin-search")


def _telling(points: Sequence[Point]) -> list[str]:
    """Keys of further columns, one for each group of keys that always change together."""
    found: dict[tuple[int, ...] | str, str] = {}
    for key in dict.fromkeys(key for point in points for key in point if key not in SHOWN):
        texts = [point.get(key) for point in points]
        alike = tuple(map(texts.index, texts))
        found.setdefault(alike if any(alike) else key, key)
    return list(found.values())


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation in per cent."""
    deviation = 100.0 * statistics.stdev(values) if len(values) > 1 else None
    return 100.0 * statistics.fmean(values), deviation


def _measured(one: Tried, name: str) -> CellValue:
    """Mean over seeds; for incomplete runs as text, which cannot be the best."""
    if not (values := one.known(name)):
        return None
    mean, deviation = _mean(values)
    number = Number(mean, deviation=deviation)
    return number if one.is_complete else number.text


def _settings(recipe: Recipe) -> tuple[CellValue, ...]:
    """Alpha, scale, margin, effective margin, hardness and reach; of softmax alpha is not shown."""
    loss, gap, reach = recipe.loss, recipe.loss.effective_margin, recipe.loss.reach
    classes, mean = recipe.data.num_classes, None
    if classes is not None and classes > 1 and loss.alpha is not None:
        dim = recipe.model.embedding_dim
        mean = hardness(loss.alpha, loss.scale, num_classes=classes, embedding_dim=dim).mean
    return (
        None if loss.alpha in (None, 1.0) else f"{loss.alpha:g}",
        f"{loss.scale:.4g}",
        f"{loss.margin:.3g}",
        None if gap is None else f"{gap:.3g}",
        Number(mean),
        None if reach is None or math.isinf(reach) else f"{reach:.3g}",
    )


def measure_text(measure: str, value: float) -> str:
    """A measure by its name, and its value.

    Examples:
        >>> measure_text("tar@0.001", 0.5), measure_text("eer", 0.0123)
        ('TAR 50.00 % at FAR 0.1 %', 'EER 1.23 %')
    """
    return _measure_text(measure, percent=f" {100.0 * value:.2f} %")


def _measure_text(measure: str, *, percent: str = "", rate: str = "FAR ") -> str:
    far = far_of(measure)
    return f"EER{percent}" if far is None else f"TAR{percent} at {rate}{rate_text(far)}"


def _titles(experiment: Experiment) -> dict[str, str]:
    return {name: arm.title for name, arm in experiment.arms.items()}


def write_figures(
    tried: Sequence[Tried], measure: str, folder: Path, titles: Mapping[str, str]
) -> list[Path]:
    """``sensitivity`` and ``effective-margin`` as SVG and PDF, if there are enough points.

    ``titles`` are those of the arms.
    """
    if not has_matplotlib():
        return []
    height, written = _measure_text(measure, percent=" %"), []
    keys = dict.fromkeys(key for one in tried for key in one.point)
    varied = [key for key in keys if len({one.point.get(key) for one in tried}) > 1]
    in_order = sorted(varied, key=[*LABELS, *varied].index)
    numbers = [k for k in in_order if None not in {_float(one.point.get(k, "")) for one in tried}]
    if numbers:
        key, several = numbers[0], len({one.arm for one in tried}) > 1

        def label(one: Tried) -> str:
            others = [k for k in varied if k != key and k in one.point]
            texts = [f"{SIGNS.get(k, k)} = {one.point[k]}" for k in others]
            return ", ".join([titles[one.arm]] * several + texts) or measure

        lines = _lines(tried, measure, lambda one: _float(one.point[key]), label)
        if len(lines) > MOST_LINES:
            key = HARDNESS if HARDNESS in numbers else key
            name = LABELS.get(key, key).lower()
            lines = _lines(
                _best_of_each(tried, measure, key),
                measure,
                lambda one: _float(one.point[key]),
                lambda one: f"{titles[one.arm]}, best at each {name}",
            )
        written += write_lines(folder / STEMS[0], {LABELS.get(key, key): lines}, height)
    panels = margin_panels(tried, measure, [key for key in varied if key not in SHOWN])
    if panels:
        written += write_lines(folder / STEMS[1], panels, height, beyond={GAP: REACHABLE})
    return written


def margin_panels(
    tried: Sequence[Tried], measure: str, others: Sequence[str]
) -> dict[str, dict[str, list[LinePoint]]]:
    """The measure over m and over m_eff, a line for each alpha, scale and value of other keys.

    If only the effective margin matters, the lines of the second panel coincide. This needs two
    lines with two gaps; with fewer, or very many lines, nothing is drawn.
    """
    known = [one for one in tried if one.recipe.loss.effective_margin is not None]

    def label(one: Tried) -> str:
        texts = [f"{key} {one.point[key]}" for key in others if key in one.point]
        loss = one.recipe.loss
        return ", ".join([f"\u03b1 = {loss.alpha:g}, s = {loss.scale:g}", *texts])

    by_margin = _lines(known, measure, lambda one: one.recipe.loss.margin, label)
    by_gap = _lines(known, measure, lambda one: one.recipe.loss.effective_margin, label)
    gaps = {f"{one.recipe.loss.effective_margin:.6g}" for one in known}
    is_drawn = 2 <= len(by_margin) <= MOST_LINES and len(gaps) >= 2
    return {MARGIN: by_margin, GAP: by_gap} if is_drawn else {}


def _best_of_each(tried: Sequence[Tried], measure: str, key: str) -> list[Tried]:
    """The best point of each arm and value of a key, in the order of values."""
    best: dict[tuple[str, float | None], Tried] = {}
    sign = -1.0 if measure == EER else 1.0
    for one in tried:
        place = (one.arm, _float(one.point[key]))
        if one.known(measure) and (
            place not in best or sign * one.mean(measure) > sign * best[place].mean(measure)
        ):
            best[place] = one
    return sorted(best.values(), key=lambda one: float(one.point[key]))


def _lines(
    tried: Sequence[Tried],
    measure: str,
    place: Callable[[Tried], float | None],
    label: Callable[[Tried], str],
) -> dict[str, list[LinePoint]]:
    lines: dict[str, list[LinePoint]] = {}
    for one in tried:
        values, across = one.known(measure), place(one)
        if values and across is not None:
            lines.setdefault(label(one), []).append((across, *_mean(values)))
    return lines


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# -- words ----------------------------------------------------------------------------------------


def repeats_of(paths: Sequence[Path], title: str, primary: Primary | None = None) -> Repeats:
    """Results of one experiment by system, the seeds of each in order."""
    (found,) = find_repeats(load_panels(paths, primary=primary), experiment=title)
    return found


def summary(finished: Finished) -> tuple[list[str], list[list[str]], list[str]]:
    """Heads and rows of a table of EERs and TARs, and what they say in words."""
    experiment = finished.experiment
    repeats = repeats_of(finished.paths[RESULT], experiment.title, experiment.comparison)
    heads = ["", "EER %", *(f"TAR % at {rate_text(far)}" for far in repeats.fars)]
    rows = [
        [
            name,
            spread(repeats.values(name, None), sign="+-"),
            *(spread(repeats.values(name, far), 1, sign="+-") for far in repeats.fars),
        ]
        for name in repeats.systems
    ]
    planned = planned_verdicts(repeats, repeats.headline_far)
    words = [*planned, _cover(repeats)] if planned else ["There is nothing to compare."]
    return heads, rows, [*_plain(repeats), *words]


def _plain(repeats: Repeats) -> list[str]:
    """What the largest TAR of the table means, in plain words."""
    far = repeats.headline_far
    if far is None:
        return []
    name = repeats.ranked(far)[0]
    tar = statistics.fmean(repeats.values(name, far))
    num_impostors = repeats.systems[name][0].result.protocol.num_impostors
    said = plain_text(far, tar, num_impostors)
    return [f"{name} at FAR {rate_text(far)} in plain words: {said}"]


def _cover(repeats: Repeats) -> str:
    return COVER if repeats.has_seeds else f"{ONE_RUN.capitalize()}."


def results_page(
    finished: Finished, *, command: str, commit: str = "", figure: str | None = None
) -> str:
    """Markdown page of an experiment: setup, results and chosen settings.

    ``figure`` is where the page finds that of the search.
    """
    import torch

    experiment = finished.experiment
    title = experiment.title or experiment.name
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    code = f"commit `{commit}`, " if commit else ""
    machine = f"{code}{date.today().isoformat()}, {device}, torch {torch.__version__}"
    facts = [f"`{command}`", machine, *_training(finished)]
    parts = [f"# {title[0].upper()}{title[1:]}", *_question(experiment)]
    parts.append("\n".join(f"- {fact}" for fact in facts))
    for name, heads in (
        (RESULT, ["## Verdict"]),
        (NORMALISED, ["## With scores normalised by the prototypes", AS_NORM]),
    ):
        if finished.paths.get(name):
            repeats = repeats_of(finished.paths[name], title, experiment.comparison)
            repeats = replace(repeats, stands_alone=name == RESULT)
            parts += [*heads, *_found(repeats)]
    if finished.rounds:
        drawn = f"![{_measure_text(finished.measure or EER)} of the settings]({figure})"
        parts += ["## Settings", *([drawn] if figure else []), *_choice(finished)]
        notes = edge_notes(experiment, finished.rounds, finished.measure or EER)
        parts += ["## Notes", *notes] if notes else []
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _question(experiment: Experiment) -> list[str]:
    """Question and expected result of an experiment."""
    parts = [f"## Question\n\n{experiment.question}"] if experiment.question else []
    if experiment.expected:
        parts.append(f"[Expected before any run](expectations.md): {experiment.expected}")
    return [*parts, "## Set-up"] if parts else []


def _training(finished: Finished) -> list[str]:
    experiment, results = finished.experiment, finished.results
    recipe = experiment.recipe
    seeds = sorted({len(experiment.seeds_of(name)) for name in experiment.arms} - {0})
    counts = " or ".join(map(str, seeds or [len(experiment.search.seeds)]))
    classes = recipe.data.num_classes
    if results and results[0].run is not None:
        classes = results[0].run.num_classes
    counted = "" if classes is None else f"{classes:,} classes, "
    options = "".join(f", {name} {value}" for name, value in recipe.model.options.items())
    facts = [
        f"training: {counted}{recipe.run.epochs} epochs in batches of {recipe.data.batch_size}, "
        f"one recipe for all losses ({recipe.optimizer.kind}, {recipe.schedule.kind} schedule), "
        f"{counts} seed{'s' * (counts != '1')}",
        f"network: `{recipe.model.backbone}`{options}, {recipe.model.embedding_dim} dimensions",
    ]
    if isinstance(experiment.world, Made):
        facts.append(
            "the data are synthetic, generated by this package; they say nothing about real people"
        )
    if results:
        first, views = results[0].protocol, experiment.protocol.views
        turned = f"; a score is the mean over {views} quarter turns of both samples"
        facts.append(
            f"test: {first.num_subjects:,} other identities, {first.num_genuine:,} genuine and "
            f"{first.num_impostors:,} impostor pairs{turned if views > 1 else ''}"
        )
    return facts


def _found(repeats: Repeats) -> list[str]:
    fars = [far for far in VERDICT_FARS if far in repeats.fars]
    lines = [line for far in fars for line in planned_verdicts(repeats, far, bold="**{}**")]
    found = ["\n".join(f"- {line}" for line in lines), _cover(repeats)] if lines else []
    found.append(_markdown(repeats_table(repeats)))

    def by_far(title: str, names: Sequence[str], cell: Callable[[str, float], str]) -> str:
        columns = (Column(title, "left"), *(Column(f"at {rate_text(far)}") for far in repeats.fars))
        rows = tuple((name, *(cell(name, far) for far in repeats.fars)) for name in names)
        return _markdown(Table("", columns, rows))

    def interval(name: str, far: float) -> str:
        ends = repeats.interval(name, far)
        return MISSING if ends is None else f"{100 * ends[0]:.2f} to {100 * ends[1]:.2f}"

    found.append(by_far("95 % interval, TAR %", list(repeats.systems), interval))
    planned = repeats.planned(repeats.headline_far)
    if not planned or not repeats.differences:
        return found
    focus = planned[0][0]

    def difference(name: str, far: float) -> str:
        made = repeats.difference(focus, name, far)
        if made is None:
            return MISSING
        low, high = (signed(100 * end) for end in made.interval)
        reading = "" if made.is_shown else ", not shown"
        return f"{signed(100 * made.difference)} ({low} to {high}){reading}"

    others = [name for name in repeats.systems if name != focus]
    found.append(by_far(f"{focus} minus", others, difference))
    count = max(made.num_compared for made in repeats.differences)
    found.append(
        f"Points of TAR with 95 % intervals. Of {count} comparisons, every pair of losses at every "
        "FAR and by EER, those are not shown whose interval holds zero or whose p-value, corrected "
        "for all of them (Holm), is 0.05 or more. The comparison fixed beforehand is not corrected."
    )
    return found


def _markdown(table: Table) -> str:
    return replace(table, title="", notes=()).to_markdown(level=None)


def _choice(finished: Finished) -> list[str]:
    """Design of the search, the chosen settings, and all that were tried."""
    experiment, search = finished.experiment, finished.experiment.search
    measure, first = finished.measure or EER, finished.rounds[0]
    aim = f"the {'smallest' if measure == EER else 'largest'} {_measure_text(measure)}"
    is_made = isinstance(experiment.world, Made)
    held_out = "other ones" if is_made else "a part of the training identities that it holds out"
    counts = sorted({sum(other.arm == one.arm for other in first) for one in first})
    length, longer, part = first[0].recipe.run.epochs, "", ""
    seeds = "" if len(search.seeds) == 1 else f" with each of {len(search.seeds)} seeds"
    if is_made and first[0].recipe.data.num_classes != experiment.recipe.data.num_classes:
        part = f" on {first[0].recipe.data.num_classes:,} classes"
    if search.finalists:
        longer = (
            f", and with the best {search.finalists} of different alpha or scale for "
            f"{experiment.recipe.run.epochs} epochs{' on all classes' if part else ''}"
        )
    parts = [
        f"Each loss was trained with {' or '.join(map(str, counts))} settings for {length} "
        f"epoch{'s' * (length > 1)}{part}{seeds}{longer}, and has the one with {aim} on validation "
        f"identities, {held_out}. Failed runs count as TAR 0. Hardness tells which negatives a "
        "loss weighs, see `qmargin.hardness`."
    ]
    for arm in experiment.arms.values():
        if arm.left_out:
            parts.append(
                f"{arm.title}: {len(arm.left_out)} combinations are left out, because their reach "
                "is below that of no margin."
            )
        if arm.like is not None:
            parts.append(f"{arm.title} has the settings of {experiment.arms[arm.like].title}.")
    for tried in reversed(finished.rounds):
        best = ranked(tried, measure)
        rows = [one for name in experiment.arms for one in best.get(name, ())]
        parts.append(_markdown(search_table(experiment, rows, finished.chosen)))
    return parts


def edge_notes(
    experiment: Experiment, rounds: Sequence[Sequence[Tried]], measure: str
) -> list[str]:
    """Arms whose best value is at an edge of their search, with axis and side."""
    edges = []
    tried = [one for one in rounds[-1] if one.known(measure)] if rounds else []
    for name, points in ranked(tried, measure).items():
        arm = experiment.arms[name]
        if at := edges_of(points[0].point, arm):
            edges.append(f"{arm.title} ({', '.join(at)})")
    if not edges:
        return []
    words = f"At an edge of what was tried: {', '.join(edges)}."
    return [f"{words} Beyond it there may be better settings."]


def edges_of(chosen: Point, arm: Arm) -> list[str]:
    """Axes of which an arm chose the smallest or largest value that it tried.

    Examples:
        >>> from qmargin.experiments.experiment import make_arm
        >>> arm = make_arm("q_margin", {"alpha": [1.25, 1.5, 2], "scale": [8, 16]})
        >>> edges_of({"loss.alpha": "1.5", "loss.scale": "16"}, arm)
        ['largest scale']
    """
    axes: dict[str, Axis] = {} if arm.points else {axis.key: axis for axis in arm.axes}
    names = []
    for key, text in chosen.items():
        value, axis, tolerance = _float(text), axes.get(key), 0.0
        if isinstance(axis, Range):
            ends = [axis.low, axis.high]
            if axis.is_log and value is not None:
                value, *ends = (math.log(number) for number in (value, *ends))
            tolerance = NEAR * (ends[1] - ends[0])
        else:
            texts = _beside(chosen, key, arm.points) if axis is None else axis.texts
            known = [_float(one) for one in texts]
            if None in known:  # names have no order
                continue
            ends = sorted({one for one in known if one is not None})
        if value is None or len(ends) < 2:
            continue
        for side, end in (("smallest", ends[0]), ("largest", ends[-1])):
            if abs(value - end) <= tolerance:
                names.append(f"{side} {key.rpartition('.')[2]}")
    return names


def _beside(chosen: Point, key: str, points: Sequence[Point]) -> list[str]:
    """Values of a key in the points with equal coordinates before it."""
    place = COORDINATES.index(key) if key in COORDINATES else 0
    before = COORDINATES[:place]
    same = [p for p in points if all(p.get(k) == chosen.get(k) for k in before)]
    return [point[key] for point in same if key in point]
