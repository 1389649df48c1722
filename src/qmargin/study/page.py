"""A study as a page of the documentation: what was done, what each loss chose, what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qmargin.errors import DataError
from qmargin.maths.hardness import hardness
from qmargin.metrics.comparison import Difference
from qmargin.metrics.sufficiency import sufficiency
from qmargin.report.numbers import MISSING, power, probability, signed
from qmargin.report.repeats import (
    Repeats,
    difference_of_means,
    find_repeats,
    interval_of_mean,
    spread,
)
from qmargin.report.systems import load_panels
from qmargin.report.tables import markdown_repeats
from qmargin.study.pictures import MAX_COHORT, NEAREST
from qmargin.study.run import CLASSES, FINAL, NORMALISED, RESULT
from qmargin.study.search import CHOSEN, Settings, Tried, read_chosen, read_rounds
from qmargin.study.studies import SYSTEMS, Setting, Study
from qmargin.sweep.validation import far_of

Q_MARGIN = SYSTEMS["q_margin"].title
VERDICT_FARS = (1e-3, 1e-4, 1e-5)


def study_page(study: Study, folder: Path, *, command: str, machine: str) -> str:
    """The page as Markdown, from the folder of a study that is complete.

    Args:
        study: What was studied.
        folder: Its ``out``.
        command: That made it.
        machine: Where, with commit and date.
    """
    repeats = _repeats(folder, RESULT)
    if repeats is None:
        raise DataError(f"{folder} holds no results of a study; run it first")
    result = next(iter(repeats.systems.values()))[0].result
    first = result.protocol
    # pictures of another path are of other identities
    num_classes = int((result.system.model_card or {}).get(CLASSES, study.size.num_classes))
    study = replace(study, size=study.size._replace(num_classes=num_classes))
    facts = [
        f"`{command}`",
        machine,
        *_training(study, epochs=study.size.epochs, num_seeds=repeats.num_repeats),
        f"test: {first.num_subjects:,} other identities, {first.num_genuine:,} genuine and "
        f"{first.num_impostors:,} impostor pairs{_views(study)}",
    ]
    return _joined(
        _title(study.title),
        _listed(facts),
        "## Found",
        *_found(repeats),
        *_normalised(_repeats(folder, NORMALISED)),
        "## Settings, and how they were chosen",
        *_choice(study, folder),
    )


def _repeats(folder: Path, name: str) -> Repeats | None:
    """Results of the same name of all final trainings; None without any."""
    results = sorted((folder / FINAL).glob(f"*/{name}"), key=_place)
    if not results:
        return None
    found = find_repeats(load_panels(results))
    if len(found) != 1:
        raise DataError(f"{folder} holds results of {len(found)} protocols with repeated trainings")
    return found[0]


def _found(repeats: Repeats) -> list[str]:
    table = markdown_repeats(repeats).partition("\n\n")[2]
    return [verdict(repeats), table, _intervals(repeats), *_differences(repeats)]


def _normalised(repeats: Repeats | None) -> list[str]:
    if repeats is None:
        return []
    words = (
        "The same trainings and pairs. AS-norm measures a cosine in deviations above the mean of "
        f"the {NEAREST} prototypes that are nearest to a sample, and takes the mean over the two "
        "samples: what resembles many identities has to be more alike. The prototypes are those of "
        f"the head, at most {MAX_COHORT:,} at equal steps, so that it needs no other data."
    )
    return ["## With scores normalised by the prototypes", words, *_found(repeats)]


def search_page(study: Study, folder: Path, *, command: str, machine: str) -> str:
    """The same of a study whose losses have only chosen their settings."""
    training = _training(
        study, epochs=study.search_epochs, num_seeds=study.search_seeds, is_search=True
    )
    return _joined(
        f"# Settings for {study.title}",
        _listed([f"`{command}`", machine, *training]),
        *_choice(study, folder),
    )


def _joined(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _title(text: str) -> str:
    return f"# {text[0].upper()}{text[1:]}"


def _listed(facts: Sequence[str]) -> str:
    return "\n".join(f"- {fact}" for fact in facts)


def verdict(repeats: Repeats) -> str:
    """Q-Margin against the best of the others at each FAR, and which others differ from it."""
    lines = []
    num_impostors = next(iter(repeats.systems.values()))[0].result.protocol.num_impostors
    for far in VERDICT_FARS:
        ranked = repeats.ranked(far)
        rivals = [name for name in ranked if name != Q_MARGIN]
        if Q_MARGIN not in ranked or not rivals:
            continue
        made = difference_of_means(repeats, Q_MARGIN, rivals[0], far)
        if made is None:
            continue
        enough = sufficiency(far, num_impostors)
        few = "" if enough.status == "ok" else f" That is a rough number: {enough.message}."
        others = {name: difference_of_means(repeats, Q_MARGIN, name, far) for name in rivals[1:]}
        lines.append(
            f"- At FAR {power(far)} Q-Margin **{_word(made)}** {rivals[0]}, the best of the "
            f"others: {signed(100 * made.difference)} points of TAR ({signed(100 * made.low)} to "
            f"{signed(100 * made.high)}, p = {probability(made.p_value)}); "
            f"{spread(repeats.values(Q_MARGIN, far))} against "
            f"{spread(repeats.values(rivals[0], far))} %.{_also(others)}{few}"
        )
    words = "Intervals draw test identities; how far trainings differ is in the deviations."
    return "\n".join([*lines, "", words])


def _word(made: Difference) -> str:
    if made.low > 0.0:
        return "is ahead of"
    return "is behind" if made.high < 0.0 else "ties with"


def _also(others: Mapping[str, Difference | None]) -> str:
    """Whom of the others Q-Margin is ahead of, or behind."""
    words = {name: _word(made) for name, made in others.items() if made is not None}
    parts = []
    for word in ("is ahead of", "is behind"):
        names = [name for name, found in words.items() if found == word]
        if names:
            parts.append(f"{word} {'; '.join(names)}")  # a name may have a comma
    return f" Of the rest, it {' and '.join(parts)}." if parts else ""


def _views(study: Study) -> str:
    if study.num_views == 1:
        return ""
    return f"; a score is the mean over {study.num_views} quarter turns of both samples"


def _training(study: Study, *, epochs: int, num_seeds: int, is_search: bool = False) -> list[str]:
    size = study.size
    held_back = ", less those held back," if is_search and study.kind != "strokes" else ","
    network = "`speaker_resnet34`"
    if study.kind != "speech":
        network = f"`{size.network}`, width {size.width}, depth {size.depth}"
        network += ", batch norm" if size.batch_norm else ""
    facts = [
        f"training: {size.num_classes:,} classes{held_back} {_counted(epochs, 'epoch')} in batches "
        f"of {size.batch_size}, one recipe for all losses (AdamW, cosine schedule), "
        f"{_counted(num_seeds, 'seed')}",
        f"network: {network}, {size.embedding_dim} dimensions",
    ]
    if study.kind == "strokes":
        facts.append("the data are synthetic, drawn by this package; they say nothing about faces")
    return facts


def _intervals(repeats: Repeats) -> str:
    def cell(name: str, far: float) -> str:
        found = interval_of_mean(repeats, name, far)
        return MISSING if found is None else f"{100 * found[0]:.2f} to {100 * found[1]:.2f}"

    table = _by_far("TAR %", repeats, list(repeats.systems), cell)
    return f"{table}\n\n95 % intervals of these means, by a bootstrap over test identities."


def _differences(repeats: Repeats) -> list[str]:
    """To Q-Margin, where it has somebody to be compared with."""
    others = [name for name in repeats.systems if name != Q_MARGIN]
    if Q_MARGIN not in repeats.systems or not others:
        return []

    def cell(name: str, far: float) -> str:
        made = difference_of_means(repeats, Q_MARGIN, name, far)
        if made is None:
            return MISSING
        low, high = signed(100 * made.low), signed(100 * made.high)
        return f"{signed(100 * made.difference)} ({low} to {high})"

    table = _by_far("Q-Margin minus", repeats, others, cell)
    return [table, "Points of TAR with 95 % intervals of a paired bootstrap."]


def _by_far(
    title: str, repeats: Repeats, names: Sequence[str], cell: Callable[[str, float], str]
) -> str:
    """A table with a row for each system and a column for each FAR."""
    rows = [[title, *(f"at {power(far)}" for far in repeats.fars)]]
    rows.append(["---", *["---:"] * len(repeats.fars)])
    rows += [[name, *(cell(name, far) for far in repeats.fars)] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _choice(study: Study, folder: Path) -> list[str]:
    """How settings were chosen, which, and all that were tried."""
    chosen = read_chosen(folder / CHOSEN)
    keys = [key for key in study.losses if key in chosen]
    if not keys:
        raise DataError(f"{folder} holds no search of {study.name}; run it first")
    rounds = read_rounds(study, folder, keys)
    far = far_of(study.measure)
    assert far is not None  # studies choose by a TAR
    counts = {len(study.grid[key]) for key in keys if key in study.grid}
    seeds = "" if study.search_seeds == 1 else f" with each of {study.search_seeds} seeds"
    mean = "" if study.search_seeds == 1 else ", the mean over seeds,"
    epochs, longer = (_counted(n, "epoch") for n in (study.search_epochs, study.size.epochs))
    held_out = "which neither training nor test has"
    if study.kind != "strokes":  # the final trainings have them
        known = ", whole alphabets where they are known" if study.kind == "pictures" else ""
        held_out = f"a part of those to train on{known}, which the search holds back"
    words = (
        f"Each loss was trained with {' or '.join(map(str, sorted(counts)))} settings for "
        f"{epochs}{seeds}"
        + _finalists(study, longer)
        + f", and chose the one with the largest TAR at FAR {power(far)}{mean} on validation "
        f"identities, {held_out}. A "
        "training that failed accepted nobody. Hardness tells which negatives a loss looks at, "
        "see `qmargin.hardness`."
    )
    if "sampled" in keys:
        words += " Negative sampling has the settings of ArcFace."
    parts = [words]
    for part, tried in zip(reversed(study.rounds), reversed(rounds), strict=True):
        if study.finalists:
            parts.append(f"After {_counted(part.epochs, 'epoch')}:")
        parts.append(_table(study, _ranked(tried, keys, study.measure), chosen))
    edges = {SYSTEMS[key].title: edges_of(chosen[key], study.grid.get(key, ())) for key in keys}
    found = [f"{title} ({', '.join(names)})" for title, names in edges.items() if names]
    if found:
        parts.append(
            f"At an edge of what was tried: {', '.join(found)}. Beyond it there may be better ones."
        )
    single = [SYSTEMS[key].title for key in keys if len(margins_of(study, key)) == 1]
    if single:
        parts.append(f"Of one margin only: {', '.join(single)}.")
    return parts


def _ranked(tried: Sequence[Tried], keys: Sequence[str], measure: str) -> list[Tried]:
    """By loss, and the best of each first."""
    by_loss = sorted(tried, key=lambda one: one.mean(measure), reverse=True)
    return [one for key in keys for one in by_loss if one.key == key]


def edges_of(chosen: Setting, grid: Sequence[Setting]) -> list[str]:
    """In which directions a loss could not have gone further than it did."""
    alpha, scale, margin = chosen
    scales = {s for a, s, _ in grid if a == alpha}
    margins = {m for a, s, m in grid if (a, s) == (alpha, scale)}
    names = []
    for value, values, name in ((scale, scales, "scale"), (margin, margins, "margin")):
        if len(values) > 1 and value in (min(values), max(values)):
            names.append(f"{'smallest' if value == min(values) else 'largest'} {name}")
    return names


def margins_of(study: Study, key: str) -> set[float]:
    """All margins that a loss could choose from."""
    return {margin for _, _, margin in study.grid.get(key, ())}


def _table(study: Study, tried: Sequence[Tried], chosen: Settings) -> str:
    measures = list(next(found for one in tried for found in one.metrics if found))
    sizes = {
        "num_classes": study.size.num_classes,
        "embedding_dim": study.size.embedding_dim,
    }
    heads = ["loss", "alpha", "scale", "margin", "hardness", *map(_heading, measures), ""]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 2) + " --- |"]
    for one in tried:
        notes = ["chosen"] if chosen.get(one.key) == one.setting else []
        if one.num_failed:
            notes.append(f"{one.num_failed} failed")
        alpha, scale, _ = one.setting
        cells = [SYSTEMS[one.key].title, *(f"{value:g}" for value in one.setting)]
        cells.append(f"{hardness(alpha, scale, **sizes).mean:.2f}")
        cells += [spread(one.values(measure)) for measure in measures]
        lines.append(f"| {' | '.join([*cells, ', '.join(notes)])} |")
    return "\n".join(lines)


def _finalists(study: Study, epochs: str) -> str:
    if not study.finalists:
        return ""
    return f", and with the best {study.finalists} of different alpha or scale for {epochs}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number > 1)}"


def _heading(measure: str) -> str:
    far = far_of(measure)
    return "EER %" if far is None else f"TAR % at {power(far)}"


def _place(path: Path) -> tuple[int, int]:
    """Losses in the order of ``SYSTEMS``, then seeds."""
    key, _, seed = path.parent.name.rpartition("-")
    return list(SYSTEMS).index(key), int(seed)
