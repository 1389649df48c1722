"""A study as a page of the documentation: what was done, what each loss chose, what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from qmargin.errors import DataError
from qmargin.report.numbers import power, probability, signed
from qmargin.report.repeats import Repeats, difference_of_means, find_repeats, spread
from qmargin.report.systems import load_panels
from qmargin.report.tables import markdown_repeats
from qmargin.study.run import CHOSEN, RESULT
from qmargin.study.studies import SYSTEMS, Study
from qmargin.sweep.trial import TrialResult, parse_result
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
    results = sorted((folder / "final").glob(f"*/{RESULT}"), key=_place)
    if not results:
        raise DataError(f"{folder} holds no results of a study; run it first")
    found = find_repeats(load_panels(results))
    if len(found) != 1:
        raise DataError(f"{folder} holds results of {len(found)} protocols with repeated trainings")
    repeats = found[0]
    searched = [parse_result(path) for path in sorted((folder / "search").glob("*/result.json"))]
    chosen = json.loads((folder / CHOSEN).read_bytes())
    parts = [
        f"# {study.title[0].upper()}{study.title[1:]}",
        _about(study, repeats, command, machine),
        "## Found",
        verdict(repeats),
        markdown_repeats(repeats).partition("\n\n")[2],
        _differences(repeats),
        "## Settings, and how they were chosen",
        _choice(study, searched, chosen),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def verdict(repeats: Repeats) -> str:
    """Q-Margin against the best of the others at each FAR, as it was found."""
    lines = []
    for far in VERDICT_FARS:
        ranked = repeats.ranked(far)
        rivals = [name for name in ranked if name != Q_MARGIN]
        if Q_MARGIN not in ranked or not rivals:
            continue
        made = difference_of_means(repeats, Q_MARGIN, rivals[0], far)
        if made is None:
            continue
        word = "ties with"
        if made.low > 0.0:
            word = "is ahead of"
        elif made.high < 0.0:
            word = "is behind"
        lines.append(
            f"- At FAR {power(far)} Q-Margin **{word}** {rivals[0]}, the best of the others: "
            f"{signed(100 * made.difference)} points of TAR ({signed(100 * made.low)} to "
            f"{signed(100 * made.high)}, p = {probability(made.p_value)}); "
            f"{spread(repeats.values(Q_MARGIN, far))} against "
            f"{spread(repeats.values(rivals[0], far))} %."
        )
    words = "Intervals draw test identities; how far trainings differ is in the deviations."
    return "\n".join([*lines, "", words])


def _about(study: Study, repeats: Repeats, command: str, machine: str) -> str:
    size = study.size
    first = next(iter(repeats.systems.values()))[0].result
    recipe, network = "AdamW, cosine schedule", "`stroke_net`"
    if study.kind == "speech":
        recipe, network = "SGD, the speaker recipe", "`speaker_resnet34`"
    else:
        network += f", width {size.width}, depth {size.depth}"
    facts = [
        f"`{command}`",
        machine,
        f"training: {size.num_classes:,} classes, {size.epochs} epochs in batches of "
        f"{size.batch_size}, one recipe for all losses ({recipe}), {repeats.num_repeats} seeds",
        f"network: {network}, {size.embedding_dim} dimensions",
        f"test: {first.protocol.num_subjects:,} other identities, "
        f"{first.protocol.num_genuine:,} genuine and {first.protocol.num_impostors:,} impostor "
        "pairs",
    ]
    if study.kind == "strokes":
        facts.append("the data are synthetic, drawn by this package; they say nothing about faces")
    return "\n".join(f"- {fact}" for fact in facts)


def _differences(repeats: Repeats) -> str:
    lines = ["| Q-Margin minus | " + " | ".join(f"at {power(far)}" for far in repeats.fars) + " |"]
    lines.append("| --- |" + " ---: |" * len(repeats.fars))
    for name in repeats.systems:
        if name == Q_MARGIN or Q_MARGIN not in repeats.systems:
            continue
        cells = []
        for far in repeats.fars:
            made = difference_of_means(repeats, Q_MARGIN, name, far)
            cells.append(
                "-"
                if made is None
                else f"{signed(100 * made.difference)} ({signed(100 * made.low)} to "
                f"{signed(100 * made.high)})"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\nPoints of TAR with 95 % intervals of a paired bootstrap."


def _choice(study: Study, searched: Sequence[TrialResult], chosen: dict[str, list[float]]) -> str:
    measure = study.measure

    def tar(result: TrialResult) -> float:
        return result.metrics.get(measure, 0.0)

    far = far_of(measure)
    assert far is not None  # studies choose by a TAR
    counts = {len(settings) for settings in study.grid.values()}
    words = (
        f"Each loss was trained with {' or '.join(map(str, sorted(counts)))} settings for "
        f"{study.search_epochs} epochs, and chose the one with the largest TAR at FAR "
        f"{power(far)} on validation identities, which neither training nor test has. Negative "
        "sampling has the settings of ArcFace. TAR % there:"
    )
    lines = [
        "| loss | alpha | scale | margin | TAR % | |",
        "| --- |" + " ---: |" * 4 + " --- |",
    ]
    for key in study.grid:
        of = [result for result in searched if result.point["loss"] == key]
        for result in sorted(of, key=tar, reverse=True):
            point = result.point
            setting = [float(point[name]) for name in ("alpha", "scale", "margin")]
            mark = "chosen" if setting == list(chosen.get(key, ())) else ""
            if result.state != "finished":
                mark = result.state
            numbers = " | ".join(f"{value:g}" for value in setting)
            shown = f"{100 * tar(result):.2f}"
            lines.append(f"| {SYSTEMS[key].title} | {numbers} | {shown} | {mark} |")
    return words + "\n\n" + "\n".join(lines)


def _place(path: Path) -> tuple[int, int]:
    """Losses in the order of ``SYSTEMS``, then seeds."""
    key, _, seed = path.parent.name.rpartition("-")
    return list(SYSTEMS).index(key), int(seed)
