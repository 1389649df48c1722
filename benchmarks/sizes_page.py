"""Page, figure and README table of the subject ``sizes``: no number is typed by hand.

All of it is made from the JSON file, without torch.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import with_block
from qmargin.cli.tables import markdown_table
from qmargin.errors import ConfigError
from qmargin.files import MADE_BY, write_atomically

VERSION = 1  # of the JSON file
PLAIN_EAGER, PLAIN = "plain ArcFace, eager", "plain ArcFace, compiled"
AUTO, SPARSE = "Q-Margin, auto", "Q-Margin, sparse"
CHUNKED, DENSE = "Q-Margin, chunked", "Q-Margin, dense"
ARCFACE_AUTO, COSFACE_AUTO = "ArcFace, auto", "CosFace, auto"
SAMPLED_10, SAMPLED_30 = "ArcFace, 10 % sampled", "ArcFace, 30 % sampled"
SPARSE_AGAIN = "Q-Margin, sparse, again"
SPARSE_GRADIENTS = "Q-Margin, sparse, forward + backward"
ARCFACE_GRADIENTS = "ArcFace, chunked, forward + backward"
WIDE_GRADIENTS = "Q-Margin, scale 10, auto, forward + backward"
GRADIENTS = (SPARSE_GRADIENTS, ARCFACE_GRADIENTS, WIDE_GRADIENTS)
ASIDE = (*GRADIENTS, SPARSE_AGAIN)  # in tables of their own
PRODUCT = "one product"
Record: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[int, int]  # classes and samples in the batch

NAMES = {
    (5_994, 256): "VoxCeleb2",
    (17_982, 512): "VoxCeleb2, 3 speeds",
    (93_431, 512): "MS1MV3",
    (93_431, 1024): "MS1MV3",
    (360_232, 1024): "Glint360K",
    (2_059_906, 1024): "WebFace42M",
}
LARGEST: Key = (2_059_906, 1024)
README_SIZES: tuple[Key, ...] = (
    (5_994, 256),
    (17_982, 512),
    (93_431, 1024),
    (360_232, 1024),
    (1_000_000, 1024),
    (2_059_906, 1024),
)


def read_record(path: Path) -> Record:
    """Contents of a file of ``python -m benchmarks sizes --json``.

    Raises:
        ConfigError: It is another file, or one of another version.
    """
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name a file of --json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a file of --json") from error
    if not isinstance(record, dict) or record.get("subject") != "sizes":
        raise ConfigError(
            f"{path} was not written by `python -m benchmarks sizes --json`; name a file that was"
        )
    if record.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {record.get('version')!r} and this command reads version "
            f"{VERSION}; measure again"
        )
    if not record["sizes"]:
        raise ConfigError(f"{path} has no sizes; measure again")
    return record


def read_records(paths: Sequence[Path]) -> Record:
    """Contents of several such files, of one machine and commit, each with sizes of its own.

    Raises:
        ConfigError: They do not belong together.
    """
    first, *others = records = [read_record(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        for name in ("device", "commit", "torch"):
            mine, theirs = (record["machine"].get(name) for record in (first, other))
            if mine != theirs:
                raise ConfigError(
                    f"{path} has {name} {theirs!r} and {paths[0]} has {mine!r}; name files of one "
                    "machine and commit"
                )
    sizes = sorted((size for record in records for size in record["sizes"]), key=key_of)
    keys = [key_of(size) for size in sizes]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0][0]:,} classes with batch {twice[0][1]} are in two files")
    return {**first, "sizes": sizes, "num_files": len(records)}


def read_losses(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of ``python -m benchmarks loss --shapes ... --json``.

    Raises:
        ConfigError: It is another file.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["shapes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a file of `loss --shapes ... --json` ({error!r})"
        ) from error
    return [dict(row) for row in rows]


def key_of(size: dict[str, Any]) -> Key:
    """What tells sizes apart."""
    return size["classes"], size["rows"]


def row_of(record: Record, key: Key, name: str) -> dict[str, Any] | None:
    """Row of a contender at a size; None if it was not asked for."""
    for size in record["sizes"]:
        if key_of(size) == key:
            for row in size["contenders"]:
                if row["name"] == name:
                    return dict(row)
    return None


def ms_of(record: Record, key: Key, name: str) -> float | None:
    """Milliseconds of a step; None if there is no number."""
    row = row_of(record, key, name)
    return None if row is None else row["ms"]


@dataclass(frozen=True)
class Table:
    """A table as it is shown."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    text: str = ""


def short(value: float | None) -> str:
    """Three digits, and no exponent.

    Examples:
        >>> [short(value) for value in (None, 0.08123, 12.345, 2345.6)]
        ['', '0.081', '12.3', '2,346']
    """
    if value is None:
        return ""
    if value >= 1000.0:
        return f"{value:,.0f}"
    return f"{value:.{3 if value < 1.0 else 2 if value < 10.0 else 1}f}"


def page_tables(record: Record) -> list[Table]:
    """All tables of the page; goals first, where the device has some."""
    tables = [
        _contender_table(
            record,
            "Step time",
            lambda row: short(row["ms"]),
            "Milliseconds of one step in a burst of at least four and ten milliseconds, the next "
            "launched while the device still works on the one before, as in training. Medians. "
            "Steps below a millisecond take as long as the host needs to launch them, so they "
            "depend on its processor.",
        ),
        _contender_table(
            record,
            "Ratio to the compiled plain head",
            lambda row: "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "The same times over those of the compiled plain head. Below 1 is faster.",
        ),
        _contender_table(
            record,
            "Single steps",
            lambda row: short(row["facts"].get("single_ms")),
            "Milliseconds of a step that starts on an idle device and is waited for: the latency, "
            "with all launches. Medians.",
        ),
        _contender_table(
            record,
            "Memory",
            lambda row: "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}",
            "Peak in GiB beyond prototypes, momentum and the screened copy, over the first steps.",
        ),
        _contender_table(
            record,
            "Forward and backward alone",
            lambda row: short(row["ms"]),
            "Milliseconds in bursts, without an update: the gradient of the prototypes is made, or "
            "listed, and dropped.",
            GRADIENTS,
        ),
        _auto_and_best(record),
        _choices(record),
        _missing(record),
    ]
    goals = _goals(record)
    return [table for table in (goals, *tables) if table.rows]


def _heading(size: dict[str, Any]) -> str:
    return f"{size['classes']:,}, d {size['dim']}, batch {size['rows']}"


def _contender_table(
    record: Record,
    title: str,
    cell: Callable[[dict[str, Any]], str],
    text: str,
    only: tuple[str, ...] = (),
) -> Table:
    """A row for each contender, a column for each size; without contenders that have no number."""
    names = [row["name"] for size in record["sizes"] for row in size["contenders"]]
    rows = []
    for name in dict.fromkeys(names):
        if (name not in only) if only else (name in ASIDE):
            continue
        found = [row_of(record, key_of(size), name) for size in record["sizes"]]
        cells = ["" if row is None else cell(row) for row in found]
        if any(cells):
            rows.append([name, *cells])
    return Table(title, ["step", *map(_heading, record["sizes"])], rows, text)


def _choices(record: Record) -> Table:
    rows = []
    for size in record["sizes"]:
        for name in (AUTO, ARCFACE_AUTO, COSFACE_AUTO):
            row = row_of(record, key_of(size), name)
            stats = None if row is None else row["facts"].get("stats")
            if stats:
                support = f"{stats['support_mean']:,.0f}"
                rows.append([_heading(size), name, stats["path"], support, stats["reason"]])
    columns = ["classes", "step", "took", "active classes of a row", "why"]
    return Table("What auto chose", columns, rows, "Last step of each size.")


def _missing(record: Record) -> Table:
    rows = [
        [_heading(size), row["name"], row["failed"]]
        for size in record["sizes"]
        for row in size["contenders"]
        if row["failed"]
    ]
    rows += [
        [_heading(size), "all", f"memory was short: {size['alloc_retries']} times freed in between"]
        for size in record["sizes"]
        if size.get("alloc_retries")
    ]
    return Table("Not measured, or with a caveat", ["classes", "step", "reason"], rows)


@dataclass(frozen=True)
class Goal:
    """A number to reach, and how it is read from the file."""

    claim: str
    measured: Callable[[Record], float | None]
    limit: float

    def cells(self, record: Record) -> list[str]:
        """Row of the table."""
        value = self.measured(record)
        if value is None:
            return [self.claim, f"{self.limit:.2f}", "not measured", ""]
        shown = f"{value:.2f}"
        return [
            self.claim,
            f"{self.limit:.2f}",
            shown,
            "yes" if float(shown) <= self.limit else "no",
        ]


def _ratio(key: Key, name: str, unit: str) -> Callable[[Record], float | None]:
    def measured(record: Record) -> float | None:
        value, other = ms_of(record, key, name), ms_of(record, key, unit)
        return None if value is None or other is None else value / other

    return measured


def paired(record: Record, key: Key, name: str, other: str) -> float | None:
    """Median of the ratios of two contenders in the same turns."""
    rows = row_of(record, key, name), row_of(record, key, other)
    if any(row is None or row["ms"] is None for row in rows):
        return None
    ours, theirs = (row["ms_all"] for row in rows if row is not None)
    return float(statistics.median(one / two for one, two in zip(ours, theirs, strict=True)))


def fastest_path(record: Record, key: Key) -> str | None:
    """Path of Q-Margin with the least median at a size."""
    times = {name: ms_of(record, key, name) for name in (SPARSE, CHUNKED, DENSE)}
    found = {name: ms for name, ms in times.items() if ms is not None}
    return min(found, key=found.__getitem__) if found else None


def auto_to_best(record: Record) -> float | None:
    """Largest ratio of ``auto`` to the fastest path that was timed, over all sizes."""
    found = []
    for key in map(key_of, record["sizes"]):
        best = fastest_path(record, key)
        ratio = None if best is None else paired(record, key, AUTO, best)
        found += [] if ratio is None else [ratio]
    return max(found, default=None)


def _auto_and_best(record: Record) -> Table:
    rows = []
    for size in record["sizes"]:
        key = key_of(size)
        best = fastest_path(record, key)
        if best is not None:
            ratios = paired(record, key, AUTO, best), paired(record, key, SPARSE_AGAIN, SPARSE)
            cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            rows.append([_heading(size), best.removeprefix("Q-Margin, "), *cells])
    return Table(
        "Auto and the fastest path",
        ["classes", "fastest path", "auto, x fastest", "sparse, x a second sparse head"],
        rows,
        "Medians of ratios in the same turn. The last column compares a head with its like: what "
        "it is away from one is noise.",
    )


SPARSE_LOSSES = tuple(f"qmargin.q_margin, alpha {alpha}" for alpha in ("1.25", "1.5", "2"))
SOFTMAX_LOSSES = ("qmargin.arcface", "qmargin.cosface")
LOSS_GOALS: tuple[tuple[str, tuple[str, ...], int, int, str, float], ...] = (
    ("Q-Margin", SPARSE_LOSSES, 1024, 93_431, "float32", 0.75),
    ("Q-Margin", SPARSE_LOSSES, 1024, 93_431, "bfloat16", 0.6),
    ("ArcFace and CosFace", SOFTMAX_LOSSES, 1024, 93_431, "float32", 0.75),
    ("ArcFace and CosFace", SOFTMAX_LOSSES, 1024, 93_431, "bfloat16", 0.75),
    *(
        ("every", SPARSE_LOSSES + SOFTMAX_LOSSES, rows, classes, dtype, 1.2)
        for rows, classes in ((1024, 17_982), (256, 5_994))
        for dtype in ("float32", "bfloat16")
    ),
)


def _worst_loss(
    rows: int, classes: int, dtype: str, names: tuple[str, ...]
) -> Callable[[Record], float | None]:
    """Largest ratio of some losses on cosines to cross-entropy."""

    def measured(record: Record) -> float | None:
        wanted = {(name, rows, classes, dtype) for name in names}
        found = [
            float(row["versus_cross_entropy"])
            for row in record.get("losses", ())
            if (row["name"], row["rows"], row["classes"], row["dtype"]) in wanted
        ]
        return max(found) if len(found) == len(wanted) else None

    return measured


def _loss_to_entmax(record: Record) -> float | None:
    """Largest ratio of our slowest loss to the fastest of the ``entmax`` package, same cosines."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in record.get("losses", ()):
        key = (row["rows"], row["classes"], row["dtype"])
        times.setdefault(key, {})[row["name"]] = row["milliseconds"]
    found = []
    for own in times.values():
        theirs = [ms for name, ms in own.items() if name.startswith("entmax.")]
        ours = [ms for name, ms in own.items() if name.startswith("qmargin.")]
        found += [max(ours) / min(theirs)] if ours and theirs else []
    return max(found, default=None)


COMPARED = {  # limits of Q-Margin; of ArcFace and CosFace it is 0.9 everywhere
    (5_994, 256): 0.6,
    (17_982, 512): 0.6,
    (93_431, 512): 0.6,
    (93_431, 1024): 0.6,
    (360_232, 1024): 0.7,
}
GOALS = (
    *(
        Goal(
            f"{name}, {key[0]:,} classes, batch {key[1]}, x plain compiled",
            _ratio(key, name, PLAIN),
            limit if name == AUTO else 0.9,
        )
        for name in (AUTO, ARCFACE_AUTO, COSFACE_AUTO)
        for key, limit in COMPARED.items()
    ),
    Goal(
        f"{AUTO}, 5,994 classes, whole step, ms (its fixed cost is less)",
        lambda record: ms_of(record, (5_994, 256), AUTO),
        0.5,
    ),
    Goal(f"{AUTO}, 2,059,906 classes, x one product", _ratio(LARGEST, AUTO, PRODUCT), 3.0),
    *(
        Goal(f"{name}, 2,059,906 classes, x one product", _ratio(LARGEST, name, PRODUCT), limit)
        for name, limit in (
            (SPARSE_GRADIENTS, 1.5),
            (ARCFACE_GRADIENTS, 4.8),
            (WIDE_GRADIENTS, 8.0),
        )
    ),
    Goal(f"{AUTO}, x the fastest of sparse, chunked and dense, worst size", auto_to_best, 1.05),
    *(
        Goal(
            f"{label} loss on [{rows}, {classes:,}] {dtype}, x F.cross_entropy",
            _worst_loss(rows, classes, dtype, names),
            limit,
        )
        for label, names, rows, classes, dtype, limit in LOSS_GOALS
    ),
    Goal("every loss on cosines, x the fastest of the entmax package", _loss_to_entmax, 1.0),
)


def _goals(record: Record) -> Table:
    is_gpu = str(record["settings"]["device"]).startswith("cuda")
    cells = [goal.cells(record) for goal in GOALS] if is_gpu else []
    columns = ["what", "at most", "measured", "met"]
    return Table("Goals", columns, cells)


ABOUT = """\
A training step of the head alone: forward, backward and momentum SGD with weight decay over all
classes, for the numbers of classes that people have. All contenders of a size take turns in one
process on the same prototypes, momentum and batch; target cosines are 0.3 to 0.7, as in
mid-training. Learning rates are zero: an update does all its work, and every turn sees the same
prototypes.

- **Plain ArcFace** is the head of most training code: unit vectors, a bfloat16 product under
  autocast, the margin through `acos`, `F.cross_entropy`, `torch.optim.SGD(fused=True)`. *Compiled*
  puts the loss under `torch.compile`.
- **Q-Margin, ArcFace, CosFace** are `MarginClassifier` with `ExactSGD`, by the named path; `auto`
  is the default. Q-Margin has alpha {alpha:g}, scale {scale:g} and margin {margin:g}.
- **Sampled** is `MarginClassifier` with `Sampled(0.1)` and `Sampled(0.3)` (Partial FC): an
  estimate, not the loss over all classes.
- **One product** is a single `[B, d] x [d, k]` in half precision: a dense softmax needs three."""


CAPTION = """\
Lines join the largest batch of each number of classes; faded marks are smaller batches. Dimensions
and batches are those of the tables, so small sizes are small in every way."""


def render_page(record: Record, figure: str | None = None) -> str:
    """The page, as Markdown; ``figure`` is a link to the drawing."""
    lines = ["# From thousands to millions of classes", "", _origin(record), ""]
    lines += [ABOUT.format(**record["settings"]), ""]
    if figure is not None:
        lines += [f"![Step time over the number of classes]({figure})", "", CAPTION, ""]
    known = [size for size in record["sizes"] if key_of(size) in NAMES]
    if known:
        listed = [f"{size['classes']:,} ({NAMES[key_of(size)]})" for size in known]
        lines += [f"Sizes of known collections: {', '.join(dict.fromkeys(listed))}.", ""]
    for table in page_tables(record):
        lines += [f"## {table.title}", "", *([table.text, ""] if table.text else [])]
        lines += [markdown_table(table.columns, table.rows), ""]
    return "\n".join(lines)


def _origin(record: Record) -> str:
    """Command, commit, date, machine and versions."""
    machine = record["machine"]
    known = [name for name in ("torch", "triton", "cuda", "python") if machine.get(name)]
    versions = ", ".join(f"{name} {machine[name]}" for name in known)
    each = ", a process for each size" if record.get("num_files", 1) > 1 else ""
    return (
        f"`{short_command(record['command'])}`{each}, commit `{machine['commit']}`, "
        f"{record['date']}, {machine['device']}, {versions}"
    )


def short_command(command: str) -> str:
    """The command with names of files instead of paths: folders differ between machines."""
    return shlex.join(word.rpartition("/")[2] or word for word in shlex.split(command))


def _time_or_reason(record: Record, key: Key, name: str) -> str:
    row = row_of(record, key, name) or {"ms": None, "failed": ""}
    is_too_large = str(row["failed"]).startswith(("skipped: needs", "OutOfMemoryError"))
    return short(row["ms"]) or ("does not fit" if is_too_large else "not measured")


def readme_block(record: Record) -> str:
    """A table of at most five columns and six rows.

    Raises:
        ConfigError: A size of the table was not measured.
    """
    measured = {key_of(size): size for size in record["sizes"]}
    missing = [f"{k:,} with batch {rows}" for k, rows in README_SIZES if (k, rows) not in measured]
    if missing:
        raise ConfigError(f"the README's table needs sizes not measured: {', '.join(missing)}")
    rows = []
    for key in README_SIZES:
        size = measured[key]
        plain, ours = (ms_of(record, key, name) for name in (PLAIN, AUTO))
        times = [_time_or_reason(record, key, name) for name in (PLAIN, ARCFACE_AUTO, AUTO)]
        ratio = f"{ours / plain:.2f}" if ours is not None and plain is not None else ""
        rows.append([f"{size['classes']:,} (d {size['dim']}, batch {size['rows']})", *times, ratio])
    columns = [
        "classes",
        "plain ArcFace, compiled, ms",
        "our ArcFace, ms",
        "our Q-Margin, ms",
        "Q-Margin / plain",
    ]
    device = record["machine"]["device"]
    return f"""\
Median time of forward, backward and momentum SGD over all classes on one {device}, measured in
turns by `python -m benchmarks sizes` ([details](docs/benchmarks/sizes.md)). Plain is twenty lines
of PyTorch under `torch.compile`; ours is `path="auto"` with `ExactSGD`:

{markdown_table(columns, rows)}"""


LOOKS: dict[str, tuple[str, Any, str]] = {  # colour, dashes, marker
    PLAIN_EAGER: ("#6b7280", ":", "s"),
    PLAIN: ("#111827", "--", "s"),
    AUTO: ("#cf4f08", "-", "o"),
    SPARSE: ("#8f6900", (0, (1, 1)), "v"),
    CHUNKED: ("#8a3b2a", (0, (5, 1, 1, 1)), "^"),
    DENSE: ("#ad3f86", (0, (3, 1, 1, 1, 1, 1)), "D"),
    ARCFACE_AUTO: ("#0a6ab5", "-", "h"),
    COSFACE_AUTO: ("#2b86c0", "-.", "P"),
    SAMPLED_10: ("#007d5c", (0, (6, 2)), "x"),
    SAMPLED_30: ("#007d5c", (0, (2, 2)), "+"),
}


def figure_points(record: Record, name: str) -> tuple[list[Key], list[Key]]:
    """Sizes on the line of a contender, and others beside it: smaller batches of equal classes."""
    keys = [key_of(size) for size in record["sizes"]]
    keys = sorted(key for key in keys if ms_of(record, key, name) is not None)
    largest = dict(keys)  # the last batch of each number of classes
    return list(largest.items()), [key for key in keys if largest[key[0]] != key[1]]


def draw_figure(record: Record) -> bytes:
    """Step time over the number of classes as SVG, both axes logarithmic, on white."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from qmargin.report.figures import SETTINGS

    with rc_context({**SETTINGS, "svg.fonttype": "path"}):
        figure = Figure(figsize=(7.6, 4.6), layout="constrained", facecolor="white")
        axes: Any = figure.subplots()
        for name, (colour, dashes, marker) in LOOKS.items():
            line, beside = figure_points(record, name)
            look: Any = {"color": colour, "marker": marker, "markersize": 5}
            if line:
                times = [ms_of(record, key, name) for key in line]
                axes.plot([key[0] for key in line], times, linestyle=dashes, label=name, **look)
            if beside:
                times = [ms_of(record, key, name) for key in beside]
                look |= {"linestyle": "none", "alpha": 0.5}
                axes.plot([key[0] for key in beside], times, **look)
        axes.set(xscale="log", yscale="log", xlabel="Classes", ylabel="Step time, ms")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(color="0.9", linewidth=0.6)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, handlelength=3.5)
        axes.set_title(f"Forward, backward and SGD, {record['machine']['device']}", fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": MADE_BY})
    return buffer.getvalue()


@dataclass(frozen=True)
class Outputs:
    """Where page, figure and README table go; None for nowhere."""

    page: Path | None = None
    figure: Path | None = None
    readme: Path | None = None

    def check(self) -> None:
        """Refuse what could not be written after minutes of measuring."""
        if self.figure is not None:
            from qmargin.report.figures import has_matplotlib

            if self.figure.suffix != ".svg":
                raise ConfigError(f"--figure is {self.figure}; figures are SVG: name a .svg file")
            if not has_matplotlib():
                raise ConfigError("--figure needs matplotlib: install qmargin[figures] or omit it")
        if self.readme is not None:
            with_block(self.readme, self.readme.read_text(encoding="utf-8"), "sizes", "")

    def write(self, record: Record) -> None:
        """Write all of them."""
        texts: dict[Path, bytes] = {}
        if self.readme is not None:  # first: it may be refused
            text = self.readme.read_text(encoding="utf-8")
            block = with_block(self.readme, text, "sizes", readme_block(record))
            texts[self.readme] = block.encode()
        if self.figure is not None:
            texts[self.figure] = draw_figure(record)
        if self.page is not None:
            texts[self.page] = render_page(record, self._link()).encode()
        for path, content in texts.items():
            write_atomically(path, content)

    def _link(self) -> str | None:
        """The figure as seen from the page."""
        if self.figure is None or self.page is None:
            return None
        return Path(os.path.relpath(self.figure, self.page.parent)).as_posix()
