"""The paper's tables and figures, from results that are matched by the settings of their loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, read_result
from qmargin.evaluation.scores import read_scores
from qmargin.files import read_regular, sha256_of
from qmargin.report.figures import (
    LinePoint,
    det_plot,
    figure_files,
    figure_style,
    has_matplotlib,
    images_of,
    lines_plot,
)
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import power
from qmargin.report.paper_layouts import LAYOUTS, THROUGHPUT, PaperRow, Setting
from qmargin.report.systems import load_panels
from qmargin.report.table import Column, Number, Row, Section, Table, latex_text, markdown_text
from qmargin.report.tables import parameter_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = {
    "figure-pairs": "Figure 1, fig:clean_grid: pairs that Q-Margin gets right and ArcFace wrong",
    "figure-det-face": "Figure 2 left, fig:det-curve: DET curves on faces",
    "figure-det-speaker": "Figure 2 right, fig:det-curve-speaker: DET curves on speakers",
    "figure-margin": "Section 4.3: TAR over the effective margin (no figure of the paper)",
}
FARS = (1e-3, 1e-4, 1e-5)
REACHABLE = 2.0  # cosines differ by at most this
PAIRS_FAR = 1e-3
NUM_PAIRS = 8
BENCHMARK = "python -m benchmarks head --parts end-to-end --json FILE"
MOST_BENCHMARK_BYTES = 10_000_000
_BENCHMARKED = {
    "ArcFace": "ArcFace, common head",
    **{name: f"{name}, paper" for name in list(THROUGHPUT)[1:]},
    "Q-Margin, sparse": "Q-Margin, sparse",
}


class Measured(NamedTuple):
    """One loss on one protocol, with a result for each seed."""

    name: str
    setting: Setting | None
    protocol: str
    results: tuple[Result, ...]

    def tar(self, far: float) -> Number | None:
        """TAR in percent, with its standard deviation over seeds; None if a seed has none."""
        points = (point for result in self.results for point in result.measures.tar)
        tars = [100.0 * p.tar for p in points if p.far_target == far and p.tar is not None]
        if not tars or len(tars) < len(self.results):
            return None
        return Number(mean(tars), deviation=stdev(tars) if len(tars) > 1 else None)

    @property
    def fars(self) -> set[float]:
        """Requested FARs."""
        return {point.far_target for result in self.results for point in result.measures.tar}


def find_results(folder: Path) -> list[Path]:
    """Every ``result.json`` below a folder, or the file that was named."""
    found = [folder] if folder.is_file() else sorted(folder.rglob("result.json"))
    if not found:
        commands = "`qmargin compare` or `qmargin evaluate`"
        raise DataError(f"{folder} has no result.json: give a folder of {commands}")
    return found


def setting_of(result: Result) -> Setting | None:
    """The loss of the model behind a result; None if it is unknown or has several margins."""
    run = result.run
    if run is None or run.alpha is None or run.scale is None or len(run.margins) != 1:
        return None
    (margin,) = run.margins
    return (
        None if margin.value is None else Setting(margin.kind, run.alpha, run.scale, margin.value)
    )


def measured_in(paths: Iterable[Path]) -> list[Measured]:
    """Gather results over seeds, by settings of the loss and protocol.

    Runs of one setting that have the same seed are kept apart by their arm, such as ArcFace with
    and without sampled negatives; two results of one arm and seed are an error.
    """

    def name_of(result: Result) -> str:
        return result.system.name if result.run is None else result.run.title

    def protocol_of(result: Result) -> str:
        """Name of the trials, and how they were scored unless by cosines."""
        name, scoring = result.protocol.name, result.protocol.scoring
        return name if scoring in (None, "cosine", "given") else f"{name}, {scoring}"

    def grouped(
        results: Iterable[Result], key: Callable[[Result], object]
    ) -> Iterable[list[Result]]:
        groups: dict[object, list[Result]] = {}
        for result in results:
            groups.setdefault(key(result), []).append(result)
        return groups.values()

    def have_distinct_seeds(results: Sequence[Result]) -> bool:
        seeds = [result.run.seed for result in results if result.run is not None]
        return len(set(seeds)) == len(seeds)

    found = []
    results = map(read_result, paths)
    for same in grouped(results, lambda one: (setting_of(one) or name_of(one), protocol_of(one))):
        arms = grouped(same, lambda one: one.run.arm if one.run else "")
        for own in [same] if have_distinct_seeds(same) else arms:
            name, protocol = name_of(own[0]), protocol_of(own[0])
            if not have_distinct_seeds(own):
                same_seed = f"two results of {name} on {protocol} have the same seed"
                raise DataError(f"{same_seed}: give a folder of one experiment")
            found.append(Measured(name, setting_of(own[0]), protocol, tuple(own)))
    return found


def notes_on(found: Sequence[Measured]) -> list[str]:
    """Sentences about the data behind the numbers measured here."""

    def span(counts: Iterable[int]) -> str:
        low, high = min(known := list(counts)), max(known)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    if not found:
        return ["No result has one of these settings."]
    notes = ["Compare with the paper only if data, network and recipe are the paper's."]
    for protocol in dict.fromkeys(one.protocol for one in found):
        own = [one for one in found if one.protocol == protocol]
        counts = [result.protocol.num_impostors for one in own for result in one.results]
        seeds = [len(one.results) for one in own]
        plural = "" if max(seeds) == 1 else "s"
        notes.append(f"{protocol}: {span(counts)} impostor pairs, {span(seeds)} seed{plural}.")
        missing = [far for far in FARS if all(one.tar(far) is None for one in own)]
        needed = [power(far) for far in missing if min(counts) < round(1.0 / far)]
        if needed:
            notes.append(f"Too few impostor pairs for FAR {' and '.join(needed)}.")
    runs = [result.run for one in found for result in one.results]
    sizes = [run.num_classes for run in runs if run is not None and run.num_classes is not None]
    if sizes:
        notes.append(f"Trained on {span(sizes)} identities.")
    settings = dict.fromkeys(one.setting for one in found if one.setting is not None)
    beyond = [
        f"{setting.loss} ({setting.text}) {gap:.2f}"
        for setting in settings
        if (gap := setting.effective_margin) is not None and gap > REACHABLE
    ]
    if beyond:
        margins = f"Effective margins above {REACHABLE:g}, which no embedding reaches"
        notes.append(f"{margins}: {', '.join(beyond)}.")
    return notes


# -- tables ---------------------------------------------------------------------------------------


def paper_table(name: str, results: Path) -> Table:
    """Fill a table of the paper from a folder of results, or the throughput from a benchmark."""
    if name == "table-throughput":
        return _throughput_table(results)
    return accuracy_table(name, measured_in(find_results(results)))


def accuracy_table(name: str, found: Sequence[Measured]) -> Table:
    """Rows of the paper with TARs measured for the same setting; other settings come last."""
    layout = LAYOUTS[name]
    matched = []
    for row in layout.rows:
        own = [one for one in found if one.setting == row.setting]
        if len({one.name for one in own}) > 1:  # such as ArcFace on a sample of the classes
            own = [one for one in own if one.name == row.loss]
        matched.append(own)
    used = [one for own in matched for one in own]
    others = [] if layout.is_closed else [one for one in found if one not in used]
    used += others
    here = [
        (protocol, far)
        for protocol in dict.fromkeys(one.protocol for one in used)
        for far in FARS
        if any(one.protocol == protocol and far in one.fars for one in used)
    ]
    headings = [(group, title) for group, titles in layout.headings for title in titles]
    columns = (
        *(Column(title, "left") for title in ("Loss", *layout.details)),
        *parameter_columns("", "Parameters"),
        *(Column(power(far), best="max", group=("Here", protocol)) for protocol, far in here),
        *(Column(title, best="max", group=("Paper", group)) for group, title in headings),
    )

    def cells(row: PaperRow, own: Sequence[Measured]) -> Row:
        tars = (
            next((one.tar(far) for one in own if one.protocol == protocol), None)
            for protocol, far in here
        )
        deviations = row.deviations or (None,) * len(row.values)
        values = zip(row.values, deviations, strict=True)
        shown = (None if value is None else Number(value, deviation=d) for value, d in values)
        parameters: Row = (None, None, None)
        if (setting := row.setting) is not None:
            alpha = None if setting.alpha == 1.0 else f"{setting.alpha:g}"
            parameters = (alpha, f"{setting.scale:g}", f"{setting.margin:g}")
        details = row.details or ("",) * len(layout.details)
        return (row.loss, *details, *parameters, *tars, *shown)

    rows: list[Section | Row] = []
    if layout.reported:
        rows += [Section("Reported", competes=False), *(cells(row, ()) for row in layout.reported)]
        rows.append(Section("Re-implemented"))
    rows += map(cells, layout.rows, matched)
    if others:
        rows.append(Section("Other settings"))
    for key in dict.fromkeys((one.name, one.setting) for one in others):
        own = [one for one in others if (one.name, one.setting) == key]
        rows.append(cells(PaperRow(*key, (None,) * len(headings)), own))
    title = f"{layout.title} ({layout.where})"
    return Table(title, columns, tuple(rows), (*layout.notes, *notes_on(used)), label=name)


def _throughput_table(path: Path) -> Table:
    record = _read_benchmark(path)
    settings, device = record["settings"], record["machine"]["device"]
    speeds: dict[str, float | None] = {}
    for name, ours in _BENCHMARKED.items():  # with the optimizer that suits the head best
        rows = [row["facts"] for row in record["parts"]["end-to-end"] if row["name"] == ours]
        speeds[name] = max(filter(None, (row.get("images_per_s") for row in rows)), default=None)

    def ratios(speeds: Mapping[str, float | None]) -> Iterable[Number]:
        whole = speeds["ArcFace"]
        for speed in map(speeds.get, _BENCHMARKED):
            yield Number(speed / whole if speed and whole else None, 3)

    return Table(
        "Samples per second of whole training steps (Table 4, tab:throughput)",
        (Column("", "left"), *(Column(name) for name in _BENCHMARKED)),
        (
            ("here", *(Number(speed) for speed in speeds.values())),
            ("here / ArcFace", *ratios(speeds)),
            Section(),
            ("paper", *(Number(THROUGHPUT.get(name)) for name in _BENCHMARKED)),
            ("paper / ArcFace", *ratios(THROUGHPUT)),
        ),
        (
            "Paper: WebFace42M, ResNet-100, batch 1024 on eight GPUs.",
            f"Here: random images, {settings['backbone']}, batch {settings['batch']}, "
            f"{settings['classes']:,} identities, {device}.",
            "The paper's procedure keeps the top 1, 5 or 100 % of the logits; the sparse head is "
            "this package's own.",
        ),
        label="table-throughput",
    )


def _read_benchmark(path: Path) -> dict[str, Any]:
    remedy = f"in a checkout run `{BENCHMARK}` and give --results FILE"
    if not path.is_file():
        found = "a folder" if path.is_dir() else "not there"
        raise DataError(f"{path} is {found}, and throughput is not part of a result.json; {remedy}")
    try:
        record: dict[str, Any] = json.loads(read_regular(path, MOST_BENCHMARK_BYTES))
        rows, size = record["parts"]["end-to-end"], record["settings"]["classes"]
        if not all({"name", "facts"} <= row.keys() for row in rows) or not isinstance(size, int):
            raise KeyError("name, facts or classes")
        _ = record["settings"]["backbone"], record["settings"]["batch"], record["machine"]["device"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} has no part end-to-end ({error!r}); {remedy}") from error
    return record


# -- figures --------------------------------------------------------------------------------------


def paper_figure(name: str, results: Path, media: Path | None = None) -> dict[str, bytes]:
    """Draw a figure of the paper: SVG and PDF, and the caption as Markdown and LaTeX, by name.

    ``media`` is the folder with the pictures that the keys of trials name, for ``figure-pairs``.
    """
    if not has_matplotlib():
        raise ConfigError(f"{name} needs matplotlib, which is missing: install qmargin[figures]")
    paths = find_results(results)
    with figure_style():
        if name == "figure-pairs":
            figures, caption = pairs_plot(paths, media)
        elif name == "figure-margin":
            figures, caption = margin_plots(measured_in(paths))
        else:
            figures, caption = _det_plots(paths, is_face=name == "figure-det-face")
        files: dict[str, bytes] = {}
        for number, figure in enumerate(figures, 1):
            files |= figure_files(figure, name if len(figures) == 1 else f"{name}-{number}")
    pictures = "".join(f"![]({picture})\n\n" for picture in files if picture.endswith(".svg"))
    lines = [
        "% Needs \\usepackage{graphicx}",
        "\\begin{figure*}[t]",
        "\\centering",
        *(f"\\includegraphics[width=\\textwidth]{{{p}}}" for p in files if p.endswith(".pdf")),
        f"\\caption{{{latex_text(caption)}}}",
        f"\\label{{fig:{name}}}",
        "\\end{figure*}\n",
    ]
    files[f"{name}.md"] = f"{pictures}{markdown_text(caption)}\n".encode()
    files[f"{name}.tex"] = "\n".join(lines).encode()
    return files


def _det_plots(paths: Sequence[Path], *, is_face: bool) -> tuple[list[Figure], str]:
    figures = []
    for panel in load_panels(paths):
        figures.append(det_plot(panel))
        figures[-1].axes[0].set_title(panel.title, fontsize=9, parse_math=False)
    layout = LAYOUTS["table-sota" if is_face else "table-speaker"]
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
    """TAR over the effective margin, a line for each loss, alpha and scale."""
    axis = "Effective margin"
    known = [one for one in found if one.setting and one.setting.effective_margin is not None]
    figures, shown = [], []
    for protocol in dict.fromkeys(one.protocol for one in known):
        own = [one for one in known if one.protocol == protocol]
        far = next((far for far in reversed(FARS) if all(one.tar(far) for one in own)), None)
        if far is None:
            continue
        lines: dict[str, list[LinePoint]] = {}
        for one in own:
            tar, setting = one.tar(far), one.setting
            if tar is not None and tar.value is not None and setting is not None:
                name = f"{setting.loss}, \u03b1 = {setting.alpha:g}, s = {setting.scale:g}"
                point = (setting.effective_margin or 0.0, tar.value, tar.deviation)
                lines.setdefault(name, []).append(point)
        if len({place for line in lines.values() for place, _, _ in line}) > 1:
            label, beyond = f"TAR % at FAR {power(far)}", {axis: REACHABLE}
            figures.append(lines_plot({axis: lines}, label, beyond=beyond))
            shown.append(f"{protocol} at FAR {power(far)}")
    if not figures:
        raise DataError("figure-margin needs two effective margins or more: train more margins")
    return figures, (
        f"TAR over the effective margin, the cosine gap that the margin adds: {'; '.join(shown)}. "
        f"No embedding reaches margins above {REACHABLE:g} (shaded). {' '.join(notes_on(known))}"
    )


class Judged(NamedTuple):
    """Trials as one system decides them at its own threshold."""

    name: str
    protocol: str
    keys: NDArray[np.str_]  # [n, 2], sorted
    is_genuine: NDArray[np.bool_]
    is_right: NDArray[np.bool_]
    lead: NDArray[np.float64]  # how far the score is on the right side of the threshold


def pairs_plot(paths: Sequence[Path], media: Path | None) -> tuple[list[Figure], str]:
    """Pairs that Q-Margin gets right and ArcFace wrong, with the number of opposite pairs.

    Both decide at their own threshold for FAR 1e-3; the clearest pairs are drawn. ``paths`` are
    results of the two on the same trials, or of any two systems, the first against the second.
    """
    if media is None:
        raise ConfigError("figure-pairs shows pictures: give the folder of the trials as --media")
    ours, theirs = (judge(path) for path in _two_systems(paths))
    if not np.array_equal(ours.keys, theirs.keys):
        raise DataError(f"{ours.name} and {theirs.name} were not evaluated on the same trials")
    kinds = (("Genuine", "accepted", "rejected", True), ("Impostor", "rejected", "accepted", False))
    rows, words = {}, []
    for kind, right, wrong, is_genuine in kinds:
        of_kind = ours.is_genuine == is_genuine
        wanted = np.flatnonzero(of_kind & ours.is_right & ~theirs.is_right)
        opposite = int((of_kind & theirs.is_right & ~ours.is_right).sum())
        clearest = wanted[np.argsort(-(ours.lead - theirs.lead)[wanted], kind="stable")]
        rows[f"{kind} pairs"] = ours.keys[clearest].tolist()
        words.append(
            f"{kind} pairs {right} by {ours.name} and {wrong} by {theirs.name}: {len(wanted):,}; "
            f"the opposite: {opposite:,}."
        )
    return [_picture_grid(rows, MediaFolder(media))], (
        f"Pairs that {ours.name} gets right and {theirs.name} wrong on {ours.protocol}, each at "
        f"its threshold for FAR {power(PAIRS_FAR)}; the clearest are shown. {' '.join(words)}"
    )


def _two_systems(paths: Sequence[Path]) -> tuple[Path, Path]:
    settings = [setting_of(read_result(path)) for path in paths]
    losses = [None if setting is None else setting.loss for setting in settings]
    if losses.count("Q-Margin") == losses.count("ArcFace") == 1:
        return paths[losses.index("Q-Margin")], paths[losses.index("ArcFace")]
    if len(paths) == 2:
        return paths[0], paths[1]
    raise ConfigError(
        f"figure-pairs compares two systems, there are {len(paths)} results: give a folder with "
        "one of Q-Margin and one of ArcFace"
    )


def judge(path: Path) -> Judged:
    """Decide the trials of a result at its threshold, from the score file next to it."""
    result = read_result(path)
    points = (point for point in result.measures.tar if point.far_target == PAIRS_FAR)
    threshold = next((point.threshold for point in points), None)
    if threshold is None:
        raise DataError(f"{path} has no threshold at FAR {PAIRS_FAR:g}: evaluate with --fars 1e-3")
    remedy = "evaluate with `qmargin evaluate pairs`, which keeps scores next to the result"
    source = next((source for source in result.sources if source.role == "scores"), None)
    if source is None:
        raise DataError(f"{path} was not measured from a score file: {remedy}")
    place = path.parent / Path(source.path).name
    if not place.is_file():
        raise DataError(f"{place}, the scores of {path}, is missing: {remedy}")
    if sha256_of(place) != source.sha256:
        raise DataError(f"{place} changed after {path} was measured from it: {remedy}")
    scores = read_scores(place)
    keys = scores.keys
    if keys is None:
        raise DataError(f"{place} has no keys: {remedy}")
    order = np.argsort(keys.pairs(), kind="stable")
    names = np.array(keys.names)
    sides = np.stack([names[keys.enrol[order]], names[keys.test[order]]], axis=1)
    above, is_genuine = scores.scores[order] - threshold, scores.is_genuine[order]
    setting = setting_of(result)
    name = result.system.name + ("" if setting is None else f" ({setting.text})")
    is_right, lead = (above >= 0.0) == is_genuine, np.where(is_genuine, above, -above)
    return Judged(name, result.protocol.name, sides, is_genuine, is_right, lead)


def _picture_grid(rows: Mapping[str, Sequence[Sequence[str]]], media: MediaFolder) -> Figure:
    """The first pairs of each row whose pictures can be read."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.1 * NUM_PAIRS, 5.2), layout="constrained")
    cells = figure.subplots(4, NUM_PAIRS, squeeze=False)
    num_drawn = 0
    for place, (title, pairs) in enumerate(rows.items()):
        cells[2 * place][0].set_title(title, fontsize=8, loc="left")
        drawable = filter(None, (images_of(pair, media) for pair in pairs))
        for column, images in zip(range(NUM_PAIRS), drawable, strict=False):
            for side, image in enumerate(images):
                cells[2 * place + side][column].imshow(image)
            num_drawn += 1
    for cell in cells.flat:
        cell.axis("off")
    if not num_drawn and any(rows.values()):
        key = next(pairs[0][0] for pairs in rows.values() if pairs)
        raise DataError(f"{media.root} has no picture of these pairs, such as {key!r}")
    return figure
