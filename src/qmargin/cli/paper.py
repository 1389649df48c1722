"""``qmargin paper``: tables and figures of the paper, filled from results."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from qmargin.cli.options import Overwriting, argument, option
from qmargin.errors import ConfigError
from qmargin.files import Guard

EXPERIMENTS = {  # experiments for a table or figure at a small scale
    "table-sota": "demo",
    "table-face": "paper-face",
    "table-seeds": "paper-seeds",
    "table-speaker": "paper-speaker",
    "figure-det-face": "demo",
    "figure-det-speaker": "paper-speaker",
    "figure-margin": "paper-face",
}


@dataclass(frozen=True, kw_only=True)
class Paper(Overwriting):
    """Render tables and figures of the paper from results.

    Your results are shown next to the paper's numbers: tables as Markdown, LaTeX and CSV, figures
    as SVG and PDF with a caption.
    """

    name: str | None = argument("table or figure; --list shows all", metavar="NAME")
    list: bool = option("list the tables and figures")
    results: Path | None = option(
        "folder with result.json files; JSON of `python -m benchmarks head` for table-throughput",
        metavar="PATH",
    )
    media: Path | None = option("pictures of the trials, for figure-pairs", metavar="DIR")
    out: Path = option("output folder", default=Path("qmargin-paper"), metavar="DIR")

    def run(self) -> None:
        from qmargin.report.paper import FIGURES, paper_figure, paper_table
        from qmargin.report.paper_layouts import TABLES
        from qmargin.schema import check_known

        known = TABLES | FIGURES
        if self.list:
            sys.stdout.write("".join(f"{name:20} {about}\n" for name, about in known.items()))
            return
        name = self.name
        if name is None:
            raise ConfigError("name a table or figure of the paper; --list shows all of them")
        check_known(name, known, "NAME")
        if self.results is None:
            raise ConfigError(f"{name} needs --results; {_source_of(name)}")
        if self.media is not None and name != "figure-pairs":
            raise ConfigError(f"--media is {self.media}, but {name} shows no pictures")
        if name in TABLES:
            table = paper_table(name, self.results)
            files = table.files(name)
            sys.stdout.write(table.to_markdown(level=None) + "\n")
        else:
            files = paper_figure(name, self.results, self.media)
        guard = Guard([self.results], overwrite=self.overwrite)
        written = guard.write_all({self.out / stem: text for stem, text in files.items()})
        sys.stdout.write("".join(f"{path}\n" for path in written))


def _source_of(name: str) -> str:
    """The command that makes the input of a table or figure."""
    if name in EXPERIMENTS:
        return (
            f"train at a small scale with `qmargin compare {EXPERIMENTS[name]} --out DIR`, or "
            "train the paper's recipes (`qmargin recipes`) and evaluate them, and give that folder"
        )
    if name == "figure-pairs":
        return (
            "run `qmargin evaluate pairs PAIRS --model MODEL --out DIR/NAME/result.json` for "
            "Q-Margin and for ArcFace, and give that folder"
        )
    from qmargin.report.paper import BENCHMARK

    return f"in a checkout run `{BENCHMARK}` and give that file"
