"""``qmargin report``: a page, tables and figures from results."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from qmargin.cli.options import KeepingPaths, Overwriting, Share, argument, option


@dataclass(frozen=True, kw_only=True)
class Report(Overwriting, KeepingPaths):
    """Write a page, tables and figures that compare results.

    The page is one self-contained HTML file; tables (Markdown, LaTeX, CSV) and figures (SVG, PDF)
    are written beside it. Results of `qmargin evaluate` on the same trials are compared in pairs.
    """

    results: tuple[Path, ...] = argument("result.json of a system", metavar="RESULT")
    out: Path = option("folder to write into", metavar="DIR")
    title: str = option("title of the page", default="Verification report", metavar="TEXT")
    media: Path | None = option("folder of the hardest pairs' images or recordings", metavar="ROOT")
    journals: tuple[Path, ...] = option(
        "show the sparsity of the run of this journal.jsonl", name="--journal", repeated=True
    )
    level: Share = option("confidence level of intervals of differences", default=0.95)
    figures: bool | None = option("draw SVG and PDF figures (default: if matplotlib is installed)")

    def run(self) -> None:
        from qmargin.report import ReportOptions, write_report

        options = ReportOptions(
            title=self.title,
            level=self.level,
            media=self.media,
            journals=self.journals,
            has_figures=self.figures,
            overwrite=self.overwrite,
            keep_paths=self.keep_paths,
        )
        if self.figures is None and not options.draws_figures:
            sys.stderr.write(
                "no figures: matplotlib is missing; install qmargin[figures] for them\n"
            )
        for path in write_report(self.results, self.out, options):
            sys.stdout.write(f"{path} ({path.stat().st_size / 1000:,.0f} KB)\n")
