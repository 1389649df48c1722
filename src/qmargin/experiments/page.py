"""What an experiment found, in words: for a terminal, and as a Markdown page."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from qmargin.experiments.experiment import Experiment
from qmargin.experiments.measure import MAX_COHORT, NEAREST, far_of
from qmargin.experiments.run import NORMALISED, RESULT
from qmargin.experiments.runner import Finished
from qmargin.experiments.search import Tried, ranked
from qmargin.experiments.space import Point
from qmargin.experiments.tables import search_table
from qmargin.experiments.worlds import Drawn, Made
from qmargin.metrics.bootstrap import Difference
from qmargin.metrics.operating import sufficiency
from qmargin.report.numbers import MISSING, power, probability, signed
from qmargin.report.systems import (
    Entry,
    Repeats,
    difference_of_means,
    interval_of_mean,
    load_panels,
    spread,
)
from qmargin.report.table import CellValue, Column, Number, Table

FOCUS = "Q-Margin"  # compared with the best of the others
VERDICT_FARS = (1e-3, 1e-4, 1e-5)
HEADLINE = 1e-4
COVER = "Intervals cover test identities; the standard deviation covers training seeds."


def repeats_of(paths: Sequence[Path], title: str) -> Repeats:
    """Results of one experiment by system, the seeds of each in order."""
    panels = load_panels(paths)
    systems: dict[str, list[Entry]] = {}
    for panel in panels:
        for entry in panel.entries:
            systems.setdefault(entry.result.system.name, []).append(entry)
    fars = sorted({far for panel in panels for far in panel.fars}, reverse=True)
    return Repeats(title, tuple(fars), {name: tuple(group) for name, group in systems.items()})


# -- terminal -------------------------------------------------------------------------------------


def summary(finished: Finished) -> str:
    """A table of EERs and TARs, and who is ahead at the headline's FAR."""
    experiment = finished.experiment
    repeats = repeats_of(finished.paths[RESULT], experiment.title)
    head = ["", "EER %", *(f"TAR % at {far:g}" for far in repeats.fars)]
    rows = [
        [
            name,
            *(
                spread(repeats.values(name, far), 2 if far is None else 1, sign="+-")
                for far in (None, *repeats.fars)
            ),
        ]
        for name in repeats.systems
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
    lines.insert(1, "-" * len(lines[0]))
    known = [far for far in repeats.fars if far >= HEADLINE]
    words = verdict(repeats, known[-1:]) or ["There is nothing to compare."]
    return "\n".join(["", experiment.title, "", *lines, "", *words, COVER, ""])


def tell(finished: Finished, note: str = "") -> None:
    """Print the summary of an experiment and where its report is."""
    sys.stdout.write(summary(finished) + (f"{note}\n" if note else ""))
    sys.stdout.write(f"report: {finished.page}\n{finished.page.resolve().as_uri()}\n")
    sys.stdout.flush()


def verdict(repeats: Repeats, fars: Sequence[float], *, bold: str = "{}") -> list[str]:
    """At each FAR, Q-Margin (or else the best arm) against the best of the others.

    Args:
        repeats: Systems with their runs.
        fars: Of the sentences.
        bold: Format of the word that decides.
    """
    lines = []
    first = next(iter(repeats.systems.values()))[0].result.protocol
    for far in fars:
        ranked = repeats.ranked(far)
        if len(ranked) < 2:
            continue
        focus = FOCUS if FOCUS in ranked else ranked[0]
        rivals = [name for name in ranked if name != focus]
        made = difference_of_means(repeats, focus, rivals[0], far)
        if made is None:
            continue
        enough = sufficiency(far, first.num_impostors)
        few = "" if enough.status == "ok" else f" That is a rough number: {enough.message}."
        others = {name: difference_of_means(repeats, focus, name, far) for name in rivals[1:]}
        values = [spread(repeats.values(name, far), sign="+-") for name in (focus, rivals[0])]
        lines.append(
            f"At FAR {far:g}, {focus} {bold.format(_word(made))} {rivals[0]}, the best of the "
            f"others: {signed(100 * made.difference)} points of TAR ({signed(100 * made.low)} to "
            f"{signed(100 * made.high)}, p = {probability(made.p_value)}); {values[0]} against "
            f"{values[1]} %.{_also(others)}{few}"
        )
    return lines


def _word(made: Difference) -> str:
    if made.low > 0.0:
        return "is ahead of"
    return "is behind" if made.high < 0.0 else "ties with"


def _also(others: Mapping[str, Difference | None]) -> str:
    """The rest of the others that differ."""
    words = {name: _word(made) for name, made in others.items() if made is not None}
    parts = []
    for word in ("is ahead of", "is behind"):
        names = [name for name, found in words.items() if found == word]
        if names:
            parts.append(f"{word} {'; '.join(names)}")  # a name may have a comma
    return f" Of the rest, it {' and '.join(parts)}." if parts else ""


# -- Markdown -------------------------------------------------------------------------------------


def results_page(finished: Finished, *, command: str, commit: str = "") -> str:
    """The page of an experiment: what was trained, what was found, which settings were chosen.

    Args:
        finished: What was found.
        command: That made it.
        commit: Of the code.
    """
    experiment = finished.experiment
    title = experiment.title or experiment.name
    facts = [f"`{command}`", _machine(commit), *_training(finished)]
    parts = [f"# {title[0].upper()}{title[1:]}", "\n".join(f"- {fact}" for fact in facts)]
    if finished.paths.get(RESULT):
        parts += ["## Found", *_found(repeats_of(finished.paths[RESULT], title))]
    if finished.paths.get(NORMALISED):
        words = (
            "The same runs and pairs. AS-norm measures a cosine in standard deviations above the "
            f"mean of the {NEAREST} prototypes that are nearest to a sample, averaged over the two "
            f"samples. The prototypes are those of the head, at most {MAX_COHORT:,} of them, so it "
            "needs no other data."
        )
        found = _found(repeats_of(finished.paths[NORMALISED], title))
        parts += ["## With scores normalised by the prototypes", words, *found]
    if finished.rounds:
        parts += ["## Settings", *_choice(finished)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _machine(commit: str) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    code = f"commit `{commit}`, " if commit else ""
    return f"{code}{date.today().isoformat()}, {device}, torch {torch.__version__}"


def _training(finished: Finished) -> list[str]:
    experiment = finished.experiment
    recipe, seeds = experiment.recipe, experiment.seeds or experiment.search.seeds
    classes = recipe.data.num_classes
    results = finished.results
    if results and results[0].run is not None:
        classes = results[0].run.num_classes
    counted = "" if classes is None else f"{classes:,} classes, "
    options = "".join(f", {name} {value}" for name, value in recipe.model.options.items())
    facts = [
        f"training: {counted}{recipe.run.epochs} epochs in batches of {recipe.data.batch_size}, "
        f"one recipe for all losses ({recipe.optimizer.kind}, {recipe.schedule.kind} schedule), "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}",
        f"network: `{recipe.model.backbone}`{options}, {recipe.model.embedding_dim} dimensions",
    ]
    if isinstance(experiment.world, Made):
        facts.append("the data are synthetic, made by this package; they say nothing about faces")
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
    columns = (
        Column("System", align="left"),
        Column("Runs"),
        *(Column(f"TAR % at {power(far)}", best="max") for far in repeats.fars),
        Column("EER %", best="min"),
    )
    rows: list[tuple[CellValue, ...]] = [
        (name, len(entries), *(_mean(repeats.values(name, far)) for far in repeats.measures))
        for name, entries in repeats.systems.items()
    ]
    found = ["\n".join(f"- {line}" for line in lines), COVER] if lines else []
    found.append(Table("", columns, tuple(rows)).to_markdown(level=None))

    def interval(name: str, far: float) -> str:
        ends = interval_of_mean(repeats, name, far)
        return MISSING if ends is None else f"{100 * ends[0]:.2f} to {100 * ends[1]:.2f}"

    found.append(_by_far("95 % interval, TAR %", repeats, list(repeats.systems), interval))
    others = [name for name in repeats.systems if name != FOCUS]
    if FOCUS in repeats.systems and others:

        def difference(name: str, far: float) -> str:
            made = difference_of_means(repeats, FOCUS, name, far)
            if made is None:
                return MISSING
            low, high = signed(100 * made.low), signed(100 * made.high)
            return f"{signed(100 * made.difference)} ({low} to {high})"

        found.append(_by_far(f"{FOCUS} minus", repeats, others, difference))
        found.append("Points of TAR with 95 % intervals of a paired bootstrap over identities.")
    return found


def _by_far(
    title: str, repeats: Repeats, names: Sequence[str], cell: Callable[[str, float], str]
) -> str:
    """A table with a row for each system and a column for each FAR."""
    columns = (
        Column(title, align="left"),
        *(Column(f"at {power(far)}") for far in repeats.fars),
    )
    rows = tuple((name, *(cell(name, far) for far in repeats.fars)) for name in names)
    return Table("", columns, rows).to_markdown(level=None)


def _mean(values: Sequence[float]) -> Number:
    """Mean and standard deviation over seeds, in per cent."""
    if not values:
        return Number(None)
    deviation = 100.0 * statistics.stdev(values) if len(values) > 1 else None
    return Number(100.0 * statistics.fmean(values), deviation=deviation)


def _choice(finished: Finished) -> list[str]:
    """How settings were chosen, which, and all that were tried."""
    experiment, search = finished.experiment, finished.experiment.search
    assert finished.measure is not None
    far = far_of(finished.measure)
    aim = "the smallest EER" if far is None else f"the largest TAR at FAR {power(far)}"
    held_out = "a part of the training identities, which the search holds out"
    if isinstance(experiment.world, Made):
        held_out = "which neither training nor test has"
    elif isinstance(experiment.world, Drawn):
        held_out += " (whole alphabets where they are known)"
    counts = sorted(
        {sum(o.arm == one.arm for o in finished.rounds[0]) for one in finished.rounds[0]}
    )
    length = finished.rounds[0][0].recipe.run.epochs
    seeds = "" if len(search.seeds) == 1 else f" with each of {len(search.seeds)} seeds"
    longer = ""
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
    for name, arm in experiment.arms.items():
        if arm.like is not None:
            parts.append(f"{arm.title} has the settings of {experiment.arms[arm.like].title}.")
        elif name in finished.chosen and len({p.get("loss.margin") for p in arm.points}) == 1:
            parts.append(f"Of one margin only: {arm.title}.")
    for tried in reversed(finished.rounds):
        table = search_table(
            experiment, _ranked(experiment, tried, finished.measure), finished.chosen
        )
        parts.append(replace(table, title="", notes=()).to_markdown(level=None))
    edges = {
        arm.title: edges_of(finished.chosen[name], arm.candidates)
        for name, arm in experiment.searched.items()
        if arm.points or experiment.search.method == "grid"
    }
    found = [f"{title} ({', '.join(names)})" for title, names in edges.items() if names]
    if found:
        parts.append(
            f"At an edge of what was tried: {', '.join(found)}. Beyond it there may be better ones."
        )
    return parts


def _ranked(experiment: Experiment, tried: Sequence[Tried], measure: str) -> list[Tried]:
    best = ranked(tried, measure)
    return [one for name in experiment.arms if name in best for one in best[name]]


def edges_of(chosen: Point, grid: Sequence[Point]) -> list[str]:
    """Directions in which an arm could not have chosen a more extreme value.

    Examples:
        >>> grid = [{"loss.scale": "8"}, {"loss.scale": "16"}]
        >>> edges_of(grid[1], grid)
        ['largest scale']
    """
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
