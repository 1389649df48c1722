"""What an experiment found: tables and figures of the search, the report, and words about it."""

from __future__ import annotations

import math
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.errors import ConfigError, DataError
from qmargin.experiments.experiment import Experiment
from qmargin.experiments.measure import EER, far_of
from qmargin.experiments.run import MAX_COHORT, NEAREST, NORMALISED, RESULT, Run
from qmargin.experiments.search import Tried, ranked
from qmargin.experiments.space import EFFECTIVE, HARDNESS, REACH, Point
from qmargin.experiments.worlds import Made
from qmargin.files import MADE_BY, Guard, write_atomically
from qmargin.losses.hardness import hardness
from qmargin.metrics.operating import sufficiency
from qmargin.report.figures import LinePoint, has_matplotlib, write_lines
from qmargin.report.journal import read_journal
from qmargin.report.numbers import MISSING, probability, rate_text, signed
from qmargin.report.systems import (
    SIGNIFICANT,
    Repeats,
    difference_of_means,
    find_repeats,
    holm,
    interval_of_mean,
    load_panels,
    spread,
)
from qmargin.report.table import CellValue, Column, Number, Table
from qmargin.report.tables import repeats_table
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
FOCUS = "Q-Margin"  # compared with the best of the others
VERDICT_FARS = (1e-3, 1e-4, 1e-5)
HEADLINE = 1e-4  # FAR of the verdict, on the terminal and on the page
COVER = "Intervals cover test identities; the standard deviation covers training seeds."
AS_NORM = (
    "The same runs and pairs. AS-norm measures a cosine in standard deviations above the mean of "
    f"the {NEAREST} prototypes that are nearest to a sample, averaged over the two samples. The "
    f"prototypes are those of the head, at most {MAX_COHORT:,} of them, so it needs no other data."
)


def check_outputs(out: Path, record: str, *, overwrite: bool = False) -> None:
    """Refuse a folder that holds no experiment and has files under the names of one's."""
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
    *,
    overwrite: bool = False,
) -> None:
    """Write the report of the runs that were tested."""
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
    options = ReportOptions(
        title=experiment.title or experiment.name,
        media=out / PICTURES if (out / PICTURES).is_dir() else None,
        journals=tuple(journals),
        has_figures=has_matplotlib(),
        headline=HEADLINE,
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
    """Write tables and figures of what a search tried; returns the files."""
    rows = [one for tried in reversed(rounds) for one in tried]
    files = search_table(experiment, rows, chosen).files(SEARCH)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [*(out / name for name in files), *write_figures(rounds[0], measure, out / FIGURES)]


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
        "m_eff is what the margin adds to the cosine gap of a zero loss; reach is that gap.",
    )
    title = f"Settings of {experiment.title or experiment.name}"
    return Table(title, tuple(columns), tuple(rows), words, label="qmargin-search")


def _telling(points: Sequence[Point]) -> list[str]:
    """Keys of further columns: one of those that always change together."""
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
    """Mean over seeds; as text, which is never the best, if runs are not complete."""
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


def _measure_text(measure: str, *, percent: str = "", rate: str = "FAR ") -> str:
    far = far_of(measure)
    return f"EER{percent}" if far is None else f"TAR{percent} at {rate}{rate_text(far)}"


def write_figures(tried: Sequence[Tried], measure: str, folder: Path) -> list[Path]:
    """``sensitivity`` and ``effective-margin`` as SVG and PDF, where there is enough to draw."""
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
            return ", ".join([one.arm] * several + texts) or measure

        lines = _lines(tried, measure, lambda one: _float(one.point[key]), label)
        if len(lines) > MOST_LINES:
            key = HARDNESS if HARDNESS in numbers else key
            lines = _lines(
                _best_of_each(tried, measure, key),
                measure,
                lambda one: _float(one.point[key]),
                lambda one: f"{one.arm}, the best of each",
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

    Where the effective margin is what matters, the lines of the second panel lie on each other. It
    takes two lines and two gaps to see that; with fewer, or very many lines, nothing is drawn.
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
    """Of each arm and value of a key, the point with the best mean; in the order of values."""
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


def repeats_of(paths: Sequence[Path], title: str) -> Repeats:
    """Results of one experiment by system, the seeds of each in order."""
    (found,) = find_repeats(load_panels(paths), experiment=title)
    return found


def summary(finished: Finished) -> tuple[list[str], list[list[str]], list[str]]:
    """Heads and rows of a table of EERs and TARs, and who is ahead at the headline's FAR."""
    repeats = repeats_of(finished.paths[RESULT], finished.experiment.title)
    heads = ["", "EER %", *(f"TAR % at {rate_text(far)}" for far in repeats.fars)]
    rows = [
        [
            name,
            spread(repeats.values(name, None), sign="+-"),
            *(spread(repeats.values(name, far), 1, sign="+-") for far in repeats.fars),
        ]
        for name in repeats.systems
    ]
    known = [far for far in repeats.fars if far >= HEADLINE]
    words = verdict(repeats, known[-1:]) or ["There is nothing to compare."]
    return heads, rows, [*words, COVER]


def verdict(repeats: Repeats, fars: Sequence[float], *, bold: str = "{}") -> list[str]:
    """At each FAR, Q-Margin (or else the best arm) against the best of the others.

    P-values are corrected for all pairs, as on the page.
    """
    lines = []
    first = next(iter(repeats.systems.values()))[0].result.protocol
    for far in fars:
        ranked = repeats.ranked(far)
        if len(ranked) < 2:
            continue
        focus = FOCUS if FOCUS in ranked else ranked[0]
        rival = next(name for name in ranked if name != focus)
        pairs = [(focus, rival), *(p for p in combinations(ranked, 2) if {*p} != {focus, rival})]
        differences = [difference_of_means(repeats, *pair, far) for pair in pairs]
        known = [made for made in differences if made is not None]
        made = differences[0]
        if made is None:
            continue
        adjusted = holm([one.p_value for one in known])[0]
        word = "ties with"
        if adjusted < SIGNIFICANT and not made.low <= 0.0 <= made.high:
            word = "is ahead of" if made.low > 0.0 else "is behind"
        enough = sufficiency(far, first.num_impostors)
        few = "" if enough.status == "ok" else f" That is a rough number: {enough.message}."
        values = [spread(repeats.values(name, far), sign="+-") for name in (focus, rival)]
        corrected = f" corrected for {len(known)} comparisons" if len(known) > 1 else ""
        lines.append(
            f"At FAR {rate_text(far)}, {focus} {bold.format(word)} {rival}, the best of the "
            f"others: {signed(100 * made.difference)} points of TAR ({signed(100 * made.low)} to "
            f"{signed(100 * made.high)}, p = {probability(adjusted)}{corrected}); {values[0]} "
            f"against {values[1]} %.{few}"
        )
    return lines


def results_page(
    finished: Finished, *, command: str, commit: str = "", figure: str | None = None
) -> str:
    """Markdown page of an experiment: what was trained, found, and which settings were chosen.

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
        (RESULT, ["## Found"]),
        (NORMALISED, ["## With scores normalised by the prototypes", AS_NORM]),
    ):
        if finished.paths.get(name):
            parts += [*heads, *_found(repeats_of(finished.paths[name], title))]
    if finished.rounds:
        drawn = f"![{_measure_text(finished.measure or EER)} of the settings]({figure})"
        parts += ["## Settings", *([drawn] if figure else []), *_choice(finished)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _question(experiment: Experiment) -> list[str]:
    """What an experiment asks, and what was expected before any run."""
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
            "the data are synthetic, made by this package; they say nothing about real people"
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
    lines = verdict(repeats, [far for far in VERDICT_FARS if far in repeats.fars], bold="**{}**")
    found = ["\n".join(f"- {line}" for line in lines), COVER] if lines else []
    found.append(_markdown(repeats_table(repeats)))

    def by_far(title: str, names: Sequence[str], cell: Callable[[str, float], str]) -> str:
        columns = (Column(title, "left"), *(Column(f"at {rate_text(far)}") for far in repeats.fars))
        rows = tuple((name, *(cell(name, far) for far in repeats.fars)) for name in names)
        return _markdown(Table("", columns, rows))

    def interval(name: str, far: float) -> str:
        ends = interval_of_mean(repeats, name, far)
        return MISSING if ends is None else f"{100 * ends[0]:.2f} to {100 * ends[1]:.2f}"

    def difference(name: str, far: float) -> str:
        made = difference_of_means(repeats, FOCUS, name, far)
        if made is None:
            return MISSING
        low, high = signed(100 * made.low), signed(100 * made.high)
        return f"{signed(100 * made.difference)} ({low} to {high})"

    found.append(by_far("95 % interval, TAR %", list(repeats.systems), interval))
    others = [name for name in repeats.systems if name != FOCUS]
    if FOCUS in repeats.systems and others:
        found.append(by_far(f"{FOCUS} minus", others, difference))
        found.append("Points of TAR with 95 % intervals of a paired bootstrap over identities.")
    return found


def _markdown(table: Table) -> str:
    return replace(table, title="", notes=()).to_markdown(level=None)


def _choice(finished: Finished) -> list[str]:
    """How settings were chosen, which, and all that were tried."""
    experiment, search = finished.experiment, finished.experiment.search
    measure, first = finished.measure or EER, finished.rounds[0]
    aim = f"the {'smallest' if measure == EER else 'largest'} {_measure_text(measure)}"
    is_made = isinstance(experiment.world, Made)
    held_out = "other ones" if is_made else "a part of the training identities that it holds out"
    counts = sorted({sum(other.arm == one.arm for other in first) for one in first})
    length, longer = first[0].recipe.run.epochs, ""
    seeds = "" if len(search.seeds) == 1 else f" with each of {len(search.seeds)} seeds"
    if search.finalists:
        longer = (
            f", and with the best {search.finalists} of different alpha or scale for "
            f"{experiment.recipe.run.epochs} epochs"
        )
    parts = [
        f"Each loss was trained with {' or '.join(map(str, counts))} settings for {length} "
        f"epoch{'s' * (length > 1)}{seeds}{longer}, and has the one with {aim} on validation "
        f"identities, {held_out}. Failed runs count as TAR 0. Hardness tells which negatives a "
        "loss looks at, see `qmargin.hardness`."
    ]
    edges = []
    for name, arm in experiment.arms.items():
        if arm.left_out:
            parts.append(
                f"{arm.title}: {len(arm.left_out)} combinations are left out, because their reach "
                "is below that of no margin."
            )
        if arm.like is not None:
            parts.append(f"{arm.title} has the settings of {experiment.arms[arm.like].title}.")
        elif name in experiment.searched and (arm.points or search.method == "grid"):
            at = edges_of(finished.chosen[name], arm.candidates)
            edges += [f"{arm.title} ({', '.join(at)})"] if at else []
    for tried in reversed(finished.rounds):
        best = ranked(tried, measure)
        rows = [one for name in experiment.arms for one in best.get(name, ())]
        parts.append(_markdown(search_table(experiment, rows, finished.chosen)))
    if edges:
        parts.append(
            f"At an edge of what was tried: {', '.join(edges)}. Beyond it there may be better ones."
        )
    return parts


def edges_of(chosen: Point, grid: Sequence[Point]) -> list[str]:
    """Directions in which an arm could not have chosen a more extreme value."""
    names = []
    for key in ("loss.scale", "loss.margin"):
        # with all settings that come before it in a grid of alpha, scale and margin
        before = ["loss.alpha", *(["loss.scale"] if key == "loss.margin" else [])]
        same = [p for p in grid if all(p.get(k) == chosen.get(k) for k in before)]
        values = {float(point[key]) for point in same if key in point}
        if len(values) > 1 and key in chosen:
            value, name = float(chosen[key]), key.rpartition(".")[2]
            if value in (min(values), max(values)):
                names.append(f"{'smallest' if value == min(values) else 'largest'} {name}")
    return names
