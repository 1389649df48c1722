"""The paper's figures from results: DET curves, TAR over the effective margin, disagreements.

``pairs_plot`` shows pairs that one system gets right and another wrong. It needs the score files
that ``qmargin evaluate pairs`` and ``qmargin evaluate trials`` write next to ``result.json``.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, read_result
from qmargin.evaluation.scores import ScoreSet, read_scores
from qmargin.files import sha256_of
from qmargin.report.figures import (
    SETTINGS,
    LinePoint,
    det_plot,
    figure_files,
    has_matplotlib,
    lines_plot,
)
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import power
from qmargin.report.paper_layouts import LAYOUTS
from qmargin.report.paper_tables import (
    FARS,
    REACHABLE,
    Measured,
    find_results,
    measured_in,
    notes_on,
    setting_of,
)
from qmargin.report.systems import load_panels
from qmargin.report.table import latex_text, markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = {
    "figure-pairs": "Figure 1, fig:clean_grid: pairs that Q-Margin gets right and ArcFace wrong",
    "figure-det-face": "Figure 2 left, fig:det-curve: DET curves on faces",
    "figure-det-speaker": "Figure 2 right, fig:det-curve-speaker: DET curves on speakers",
    "figure-margin": "Section 4.3: TAR over the effective margin (no figure of the paper)",
}
_POINTS = {"figure-det-face": "table-sota", "figure-det-speaker": "table-speaker"}
PAIRS_FAR = 1e-3
NUM_PAIRS = 8


def paper_figure(name: str, results: Path, media: Path | None = None) -> dict[str, bytes]:
    """Draw a figure of the paper from results.

    Args:
        name: A key of ``FIGURES``.
        results: Folder with ``result.json`` files.
        media: Folder with the pictures that the keys of trials name, for ``figure-pairs``.

    Returns:
        Contents by file name: SVG and PDF, and the caption as Markdown and LaTeX.
    """
    if not has_matplotlib():
        raise ConfigError(
            f"{name} needs the package matplotlib, which is missing: install qmargin[figures]"
        )
    import matplotlib

    paths = find_results(results)
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in any script
        if name == "figure-pairs":
            figures, caption = pairs_plot(paths, media)
        elif name == "figure-margin":
            figures, caption = margin_plots(measured_in(paths))
        else:
            figures, caption = _det_plots(name, paths)
        files: dict[str, bytes] = {}
        for number, figure in enumerate(figures, 1):
            files |= figure_files(figure, name if len(figures) == 1 else f"{name}-{number}")
    return files | _captions(name, list(files), caption)


def _det_plots(name: str, paths: Sequence[Path]) -> tuple[list[Figure], str]:
    figures = []
    for panel in load_panels(paths):
        figure = det_plot(panel)
        figure.axes[0].set_title(panel.title, fontsize=9, parse_math=False)
        figures.append(figure)
    layout = LAYOUTS[_POINTS[name]]
    columns = [f"{group} {title}" for group, titles in layout.headings for title in titles]
    points = [
        f"{row.loss} ({'' if row.setting is None else row.setting.text}) "
        + ", ".join("-" if value is None else f"{value:.2f}" for value in row.values)
        for row in layout.rows
    ]
    notes = " ".join(notes_on(measured_in(paths)))
    return figures, (
        f"False accept and false reject rates. {notes} The paper's TAR (%) at "
        f"{', '.join(columns)}: {'; '.join(points)}."
    )


def margin_plots(found: Sequence[Measured]) -> tuple[list[Figure], str]:
    """TAR over the effective margin, a line for each loss, alpha and scale.

    Raises:
        DataError: Fewer than two effective margins were measured.
    """
    known = [one for one in found if one.setting and one.setting.effective_margin is not None]
    figures, shown = [], []
    for protocol in dict.fromkeys(one.protocol for one in known):
        own = [one for one in known if one.protocol == protocol]
        far = next((far for far in reversed(FARS) if all(one.tar(far) for one in own)), None)
        lines: dict[str, list[LinePoint]] = {}
        for one in own:
            tar = None if far is None else one.tar(far)
            setting = one.setting
            if tar is None or tar.value is None or setting is None:
                continue
            name = f"{setting.loss}, \u03b1 = {setting.alpha:g}, s = {setting.scale:g}"
            point = (setting.effective_margin or 0.0, tar.value, tar.deviation)
            lines.setdefault(name, []).append(point)
        if far is not None and len({place for line in lines.values() for place, _, _ in line}) > 1:
            axis = "Effective margin"
            figures.append(
                lines_plot({axis: lines}, f"TAR % at FAR {power(far)}", beyond={axis: REACHABLE})
            )
            shown.append(f"{protocol} at FAR {power(far)}")
    if not figures:
        raise DataError(
            "figure-margin needs results with two effective margins or more: train a grid of "
            "margins, as in table-face"
        )
    caption = (
        f"TAR over the effective margin, the cosine gap that the margin adds: {'; '.join(shown)}. "
        f"No embedding reaches margins above {REACHABLE:g} (shaded). {' '.join(notes_on(known))}"
    )
    return figures, caption


@dataclass(frozen=True)
class _Judged:
    """Trials as one system decides them at its own threshold."""

    name: str
    protocol: str
    keys: NDArray[np.str_]  # [n, 2], sorted
    is_genuine: NDArray[np.bool_]
    is_right: NDArray[np.bool_]
    lead: NDArray[np.float64]  # how far the score is on the right side of the threshold


def pairs_plot(paths: Sequence[Path], media: Path | None) -> tuple[list[Figure], str]:
    """Pairs that Q-Margin gets right and ArcFace wrong, with the number of opposite pairs.

    Both decide at their own threshold for FAR 1e-3. The clearest pairs are drawn.

    Args:
        paths: Results of Q-Margin and ArcFace on the same trials; of any two systems if there are
            two results, the first against the second.
        media: Folder with the pictures.

    Raises:
        ConfigError: No folder was given, or the results are not of two systems.
        DataError: Score files are missing or were changed, or the trials differ.
    """
    if media is None:
        raise ConfigError("figure-pairs shows pictures: give the folder of the trials as --media")
    ours, theirs = (_judge(path) for path in _two_systems(paths))
    if not np.array_equal(ours.keys, theirs.keys):
        raise DataError(f"{ours.name} and {theirs.name} were not evaluated on the same trials")
    kinds = (("Genuine", "accepted", "rejected", True), ("Impostor", "rejected", "accepted", False))
    rows, words = [], []
    for kind, right, wrong, is_genuine in kinds:
        of_kind = ours.is_genuine == is_genuine
        wanted = np.flatnonzero(of_kind & ours.is_right & ~theirs.is_right)
        opposite = int((of_kind & theirs.is_right & ~ours.is_right).sum())
        clearest = wanted[np.argsort(-(ours.lead - theirs.lead)[wanted], kind="stable")]
        rows.append((f"{kind} pairs", [tuple(map(str, ours.keys[i])) for i in clearest]))
        words.append(
            f"{kind} pairs {right} by {ours.name} and {wrong} by {theirs.name}: {len(wanted):,}; "
            f"the opposite: {opposite:,}."
        )
    figure = _picture_grid(rows, MediaFolder(media))
    caption = (
        f"Pairs that {ours.name} gets right and {theirs.name} wrong on {ours.protocol}, each at "
        f"its threshold for FAR {power(PAIRS_FAR)}; the clearest are shown. {' '.join(words)}"
    )
    return [figure], caption


def _two_systems(paths: Sequence[Path]) -> tuple[Path, Path]:
    losses: dict[str, list[Path]] = {}
    for path in paths:
        setting = setting_of(read_result(path))
        losses.setdefault("" if setting is None else setting.loss, []).append(path)
    ours, theirs = losses.get("Q-Margin", []), losses.get("ArcFace", [])
    if len(ours) == 1 and len(theirs) == 1:
        return ours[0], theirs[0]
    if len(paths) == 2:
        return paths[0], paths[1]
    raise ConfigError(
        f"figure-pairs compares two systems, and there are {len(paths)} results, {len(ours)} of "
        f"Q-Margin and {len(theirs)} of ArcFace: give a folder with one result of each"
    )


def _judge(path: Path) -> _Judged:
    result = read_result(path)
    points = (point for point in result.measures.tar if point.far_target == PAIRS_FAR)
    threshold = next((point.threshold for point in points), None)
    if threshold is None:
        raise DataError(f"{path} has no threshold at FAR {PAIRS_FAR:g}: evaluate with --fars 1e-3")
    scores = _scores_of(path, result)
    keys = scores.keys
    if keys is None:
        raise DataError(
            f"the scores of {path} have no keys: evaluate with `qmargin evaluate pairs`"
        )
    order = np.argsort(keys.pairs(), kind="stable")
    names = np.array(keys.names)
    sides = np.stack([names[keys.enrol[order]], names[keys.test[order]]], axis=1)
    above, is_genuine = scores.scores[order] - threshold, scores.is_genuine[order]
    lead = np.where(is_genuine, above, -above)
    setting = setting_of(result)
    name = result.system.name + ("" if setting is None else f" ({setting.text})")
    is_right = (above >= 0.0) == is_genuine
    return _Judged(name, result.protocol.name, sides, is_genuine, is_right, lead)


def _scores_of(path: Path, result: Result) -> ScoreSet:
    """Scores in the file that the result was measured from."""
    source = next((source for source in result.sources if source.role == "scores"), None)
    remedy = "evaluate with `qmargin evaluate pairs`, which keeps scores next to the result"
    if source is None:
        raise DataError(f"{path} was not measured from a score file: {remedy}")
    place = path.parent / Path(source.path).name
    if not place.is_file():
        raise DataError(f"{place}, the scores of {path}, is missing: {remedy}")
    if sha256_of(place) != source.sha256:
        raise DataError(f"{place} changed after {path} was measured from it: {remedy}")
    return read_scores(place)


def _picture_grid(rows: Sequence[tuple[str, list[Any]]], media: MediaFolder) -> Figure:
    """The first pairs of each row whose pictures can be read."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(1.1 * NUM_PAIRS, 5.2), layout="constrained")
    cells = figure.subplots(4, NUM_PAIRS, squeeze=False)
    num_drawn = 0
    for place, (title, pairs) in enumerate(rows):
        cells[2 * place][0].set_title(title, fontsize=8, loc="left")
        column = 0
        for pair in pairs:
            both = [media.medium(key) for key in pair]
            if column == NUM_PAIRS:
                break
            if any(medium.kind != "image" for medium in both):
                continue
            for side, medium in enumerate(both):
                content = base64.b64decode(medium.uri.partition(",")[2])
                cells[2 * place + side][column].imshow(Image.open(io.BytesIO(content)))
            column += 1
        num_drawn += column
    for cell in cells.flat:
        cell.axis("off")
    if not num_drawn and any(pairs for _, pairs in rows):
        key = next(pairs[0][0] for _, pairs in rows if pairs)
        raise DataError(f"{media.root} has no picture of these pairs, such as {key!r}")
    return figure


def _captions(name: str, pictures: Sequence[str], caption: str) -> dict[str, bytes]:
    shown = "".join(f"![]({picture})\n\n" for picture in pictures if picture.endswith(".svg"))
    lines = [
        "% Needs \\usepackage{graphicx}",
        "\\begin{figure*}[t]",
        "\\centering",
        *(
            f"\\includegraphics[width=\\textwidth]{{{picture}}}"
            for picture in pictures
            if picture.endswith(".pdf")
        ),
        f"\\caption{{{latex_text(caption)}}}",
        f"\\label{{fig:{name}}}",
        "\\end{figure*}",
    ]
    texts = {"md": f"{shown}{markdown_text(caption)}\n", "tex": "\n".join(lines) + "\n"}
    return {f"{name}.{kind}": text.encode() for kind, text in texts.items()}
