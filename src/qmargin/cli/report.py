"""``qmargin report``: results in, a page with tables and figures out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qmargin.cli.options import add_keep_paths, add_overwrite


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="a page, tables and figures from results",
        description="Write one self-contained HTML page that compares results of `qmargin "
        "evaluate`, with tables (Markdown, LaTeX, CSV) and figures (SVG, PDF) beside it. Results "
        "on the same trials are compared in pairs.",
    )
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULT", help="result.json of a system")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    add("--title", default="Verification report", help="of the page (%(default)s)")
    add(
        "--media",
        type=Path,
        metavar="ROOT",
        help="show the hardest pairs: their keys are images or recordings under this folder, "
        "which are copied into the page",
    )
    add(
        "--journal",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="show the sparsity of the training that wrote this journal.jsonl; may be repeated",
    )
    add("--level", type=_level, default=0.95, help="of intervals of differences (%(default)s)")
    figures = parser.add_mutually_exclusive_group()
    figures.add_argument(
        "--figures",
        action="store_true",
        default=None,
        help="draw SVG and PDF figures, or fail without matplotlib, qmargin[figures] (drawn where "
        "it is installed)",
    )
    figures.add_argument(
        "--no-figures", action="store_false", dest="figures", help="draw no figures"
    )
    add_overwrite(parser)
    add_keep_paths(parser)
    parser.set_defaults(run=run_report)


def run_report(arguments: argparse.Namespace) -> None:
    """Write the report and say where it is."""
    from qmargin.report import ReportOptions, write_report

    options = ReportOptions(
        title=arguments.title,
        level=arguments.level,
        media=arguments.media,
        journals=tuple(arguments.journal),
        has_figures=arguments.figures,
        overwrite=arguments.overwrite,
        keep_paths=arguments.keep_paths,
    )
    if arguments.figures is None and not options.draws_figures:
        sys.stderr.write("no figures: matplotlib is missing; install qmargin[figures] for them\n")
    for path in write_report(arguments.results, arguments.out, options):
        sys.stdout.write(f"{path} ({path.stat().st_size / 1000:,.0f} KB)\n")


def _level(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
