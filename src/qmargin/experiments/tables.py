"""Tables, figures and the report of an experiment."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qmargin.errors import ConfigError, DataError
from qmargin.experiments.experiment import Experiment
from qmargin.experiments.measure import EER, far_of
from qmargin.experiments.run import Run
from qmargin.experiments.search import Tried
from qmargin.experiments.space import EFFECTIVE, HARDNESS, Point, effective_margin
from qmargin.files import MADE_BY, Guard, write_atomically
from qmargin.losses.hardness import hardness
from qmargin.report.figures import LinePoint, has_matplotlib, write_lines
from qmargin.report.journal import read_journal
from qmargin.report.numbers import power
from qmargin.report.table import CellValue, Column, Number, Table
from qmargin.report.write import ReportOptions, write_report
from qmargin.training.recipe import Recipe
from qmargin.training.reporting import JOURNAL

SEARCH = "search"  # stem of its tables
FIGURES, JOURNALS, REPORT = "figures", "journals", "report"
OLD_RECORDS = ("plan.json", "sweep.json", "chosen.json")
STEMS = ("sensitivity", "effective-margin")
SHOWN = ("loss.alpha", "loss.scale", "loss.margin", EFFECTIVE, HARDNESS, "loss.preset")
SIGNS = {"loss.alpha": "\u03b1", "loss.scale": "s", "loss.margin": "m", EFFECTIVE: "m_eff"}
LABELS = {"loss.scale": "Scale", "loss.margin": "Margin", "loss.alpha": "\u03b1"}
FIRST = ("loss.scale", "loss.margin", EFFECTIVE, "loss.alpha")  # what a figure is drawn over
MARGIN, GAP = "Margin m", "Effective margin"
REACHABLE = 2.0  # cosines differ by at most this


def check_outputs(out: Path, record: str, *, overwrite: bool = False) -> None:
    """Refuse a folder that holds no experiment and has files under the names of one's.

    Raises:
        ConfigError: Naming the file.
    """
    if (out / record).exists():
        return
    for name in OLD_RECORDS:
        if (out / name).exists():
            raise ConfigError(
                f"{out} holds a demo, sweep or study of version 0.1 ({name}), which cannot be "
                "continued; choose another --out"
            )
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
) -> Path:
    """Write the report of the runs that were tested; returns its page."""
    options = ReportOptions(
        title=experiment.title or experiment.name,
        media=out / "pictures" if (out / "pictures").is_dir() else None,
        journals=tuple(_keep_journals(out / JOURNALS, runs)),
        has_figures=has_matplotlib(),
        overwrite=overwrite,
    )
    paths = [run.folder / name for name in names for run in runs]
    return write_report(paths, out / REPORT, options)[0]


def _keep_journals(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Journals of the first seed, under the display names of their arms."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    first = min(run.recipe.seed for run in runs)
    for run in runs:
        path = folder / f"{run.title.replace('/', '-')}.jsonl"
        if run.recipe.seed == first and _is_journal(run.folder / JOURNAL):
            shutil.copyfile(run.folder / JOURNAL, path)
            kept.append(path)
    return kept


def _is_journal(path: Path) -> bool:
    try:
        read_journal(path)
    except (DataError, OSError):
        return False
    return True


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
    table = search_table(experiment, rows, chosen)
    written = []
    for name, content in table.files(SEARCH).items():
        write_atomically(out / name, content)
        written.append(out / name)
    return written + write_figures(rounds[0], measure, out / FIGURES)


def search_table(
    experiment: Experiment, tried: Sequence[Tried], chosen: Mapping[str, Point]
) -> Table:
    """Points and their measures on validation identities."""
    names, others = measure_names(tried), _other_keys(tried)
    has_lengths = len({one.recipe.run.epochs for one in tried}) > 1
    columns = [
        Column("Loss", align="left"),
        Column("alpha", latex=r"$\alpha$"),
        Column("s", latex="$s$"),
        Column("m", latex="$m$"),
        Column("m_eff", latex=r"$m_{\mathrm{eff}}$"),
        Column("hardness"),
        *map(Column, others),
        *([Column("epochs")] if has_lengths else []),
        *(Column(_heading(name), best="min" if name == EER else "max") for name in names),
        Column("seeds"),
        Column("", align="left"),
    ]
    rows: list[tuple[CellValue, ...]] = []
    for one in tried:
        is_chosen = bool(experiment.seeds) and chosen.get(one.arm) == one.point
        notes = (["chosen"] if is_chosen else []) + ([one.note] if one.note else [])
        rows.append(
            (
                experiment.arms[one.arm].title,
                *_settings(one.recipe),
                *(one.point.get(key) for key in others),
                *([one.recipe.run.epochs] if has_lengths else []),
                *(_measured(one, name) for name in names),
                len(one.known(EER)),
                ", ".join(notes),
            )
        )
    words = (
        "Rates in per cent over all pairs of validation samples: mean and standard deviation over "
        "seeds, the best mean of complete rows in bold.",
        "m_eff is what the margin adds to the cosine gap of a zero loss.",
    )
    title = f"Settings of {experiment.title or experiment.name}"
    return Table(title, tuple(columns), tuple(rows), words, label="qmargin-search")


def measure_names(tried: Sequence[Tried]) -> list[str]:
    """TARs with growing strictness, then the EER; those that any run has."""
    found = {name for one in tried for outcome in one.outcomes for name in outcome.measures}
    tars = sorted((name for name in found if far_of(name)), key=lambda name: -(far_of(name) or 0))
    return tars + ([EER] if EER in found else [])


def _measured(one: Tried, name: str) -> CellValue:
    """Mean over seeds in per cent; as text, which is never the best, if runs are not complete."""
    values = [100.0 * value for value in one.known(name)]
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    number = Number(statistics.fmean(values), deviation=deviation)
    return number if one.is_complete else number.text


def _settings(recipe: Recipe) -> tuple[CellValue, ...]:
    """Alpha, scale, margin, effective margin and hardness; softmax has no alpha in the paper."""
    loss, gap = recipe.loss, effective_margin(recipe)
    classes, mean = recipe.data.num_classes, None
    if classes is not None and classes > 1 and loss.alpha is not None:
        dim = recipe.model.embedding_dim
        mean = hardness(loss.alpha, loss.scale, num_classes=classes, embedding_dim=dim).mean
    return (
        None if loss.alpha in (None, 1.0) else f"{loss.alpha:g}",
        f"{loss.scale:g}",
        f"{loss.margin:.3g}",
        None if gap is None else f"{gap:.3g}",
        Number(mean),
    )


def _other_keys(tried: Sequence[Tried]) -> list[str]:
    """Keys of points that the columns of the loss do not show."""
    keys = dict.fromkeys(key for one in tried for key in one.point)
    return [key for key in keys if key not in SHOWN]


def _heading(measure: str) -> str:
    far = far_of(measure)
    return "EER" if far is None else f"TAR at {power(far)}"


# -- figures --------------------------------------------------------------------------------------


def write_figures(tried: Sequence[Tried], measure: str, folder: Path) -> list[Path]:
    """``sensitivity`` and ``effective-margin`` as SVG and PDF, where there is enough to draw."""
    if not has_matplotlib():
        return []
    written: list[Path] = []
    far = far_of(measure)
    height = "EER %" if far is None else f"TAR % at FAR {power(far)}"
    key = main_key(tried)
    if key is not None:
        others = [k for k in _varied(tried) if k != key]

        def label(one: Tried) -> str:
            texts = [f"{SIGNS.get(k, k)} = {one.point[k]}" for k in others if k in one.point]
            return ", ".join([one.arm, *texts] if len({t.arm for t in tried}) > 1 else texts) or (
                measure
            )

        lines = _lines(tried, measure, lambda one: _float(one.point.get(key, "")), label)
        name = GAP if key == EFFECTIVE else LABELS.get(key, key)
        written += write_lines(folder / STEMS[0], {name: lines}, height)
    panels = margin_panels(tried, measure)
    if panels:
        written += write_lines(folder / STEMS[1], panels, height, beyond={GAP: REACHABLE})
    return written


def margin_panels(tried: Sequence[Tried], measure: str) -> dict[str, dict[str, list[LinePoint]]]:
    """The measure over m and over m_eff, a line for each alpha and scale.

    Where the effective margin is what matters, the lines of the second panel lie on each other. It
    takes two lines and two gaps to see that; with fewer there is nothing to draw.
    """
    gaps = {id(one): effective_margin(one.recipe) for one in tried}
    known = [one for one in tried if gaps[id(one)] is not None]
    others = [key for key in _varied(tried) if key not in SHOWN]

    def label(one: Tried) -> str:
        texts = [f"{key} {one.point[key]}" for key in others if key in one.point]
        loss = one.recipe.loss
        return ", ".join([f"\u03b1 = {loss.alpha:g}, s = {loss.scale:g}", *texts])

    by_margin = _lines(known, measure, lambda one: one.recipe.loss.margin, label)
    by_gap = _lines(known, measure, lambda one: gaps[id(one)], label)
    if min(len(by_margin), len({f"{gaps[id(one)]:.6g}" for one in known})) < 2:
        return {}
    return {MARGIN: by_margin, GAP: by_gap}


def main_key(tried: Sequence[Tried]) -> str | None:
    """The key to draw over: one with several numbers, of scale, margin and alpha the first."""
    keys = _varied(tried)
    for key in [k for k in FIRST if k in keys] + [k for k in keys if k not in FIRST]:
        if all(_float(one.point.get(key, "")) is not None for one in tried):
            return key
    return None


def _varied(tried: Sequence[Tried]) -> list[str]:
    """Keys of points with more than one value."""
    keys = dict.fromkeys(key for one in tried for key in one.point)
    return [key for key in keys if len({one.point.get(key) for one in tried}) > 1]


def _lines(
    tried: Sequence[Tried],
    measure: str,
    place: Callable[[Tried], float | None],
    label: Callable[[Tried], str],
) -> dict[str, list[LinePoint]]:
    lines: dict[str, list[LinePoint]] = {}
    for one in tried:
        values, across = one.known(measure), place(one)
        if not values or across is None:
            continue
        deviation = 100.0 * statistics.stdev(values) if len(values) > 1 else None
        mean = 100.0 * statistics.fmean(values)
        lines.setdefault(label(one), []).append((across, mean, deviation))
    return lines


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
