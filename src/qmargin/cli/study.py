"""``qmargin study``: all losses by one recipe on one kind of data, settings chosen fairly."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import add_overwrite, guard_of, named_path
from qmargin.files import MADE_BY

if TYPE_CHECKING:
    from qmargin.study.run import StudyOptions

NAMES = "demo omniglot strokes-10k strokes-1m audiomnist"
LOSSES = "arcface cosface entmax sparsemax q_margin sampled"


def add_study(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "study",
        help="compare all losses on one kind of data, with settings chosen on other identities",
        description="Let every loss choose its settings on validation identities, train each with "
        "several seeds, test all pairs of test identities, and write a report and a page for the "
        "documentation. Interrupted and run again, it goes on.",
    )
    add = parser.add_argument
    add("study", metavar="NAME", help=f"of {NAMES}")
    add("--out", type=named_path, required=True, metavar="DIR", help="folder of the study")
    add("--data", type=named_path, metavar="PATH", help="pictures or recordings, where read")
    add("--seeds", type=int, default=3, metavar="N", help="final trainings of each loss (3)")
    add("--losses", nargs="+", default=(), metavar="NAME", help=f"of {LOSSES} (all)")
    add("--jobs", type=int, default=1, metavar="N", help="trainings at a time (1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (auto)")
    add("--search-only", action="store_true", help="only let losses choose their settings")
    add("--page", type=Path, metavar="FILE", help="also write what was found as Markdown")
    add("--commit", default="", metavar="HASH", help="of the code, for the page")
    add_overwrite(parser)
    parser.set_defaults(run=run, resumes=True)


def run(arguments: argparse.Namespace) -> None:
    """Run the study; a signal ends it with the status of that signal, after saving."""
    from qmargin.study.run import StudyOptions, run_search, run_study
    from qmargin.study.search import CHOSEN, SEARCH_MARK
    from qmargin.study.studies import find_study
    from qmargin.training.folders import check_writable

    options = StudyOptions(
        study=find_study(arguments.study),
        out=arguments.out,
        data=arguments.data,
        seeds=arguments.seeds,
        losses=tuple(arguments.losses),
        jobs=arguments.jobs,
        device=arguments.device,
        command="qmargin " + shlex.join(sys.argv[1:]),
        overwrite=arguments.overwrite,
    )
    if arguments.page is not None:
        check_writable(arguments.page.parent)  # hours before it is written
        guard = guard_of(arguments, ("page", "out"))
        guard.check(arguments.page, MADE_BY)
        if arguments.search_only:
            guard.check(arguments.page.with_suffix(".json"), SEARCH_MARK)
    if arguments.search_only:
        run_search(options)
        sys.stdout.write(f"settings: {options.out / CHOSEN}\n")
    else:
        sys.stdout.write(f"report: {run_study(options)}\n")
    if arguments.page is not None:
        _write_page(arguments, options)


def _write_page(arguments: argparse.Namespace, options: StudyOptions) -> None:
    """The page; a search also leaves its numbers beside it."""
    from qmargin.study.page import search_page, study_page
    from qmargin.study.search import read_rounds, write_search

    study, page, command = options.study, arguments.page, options.command
    make = search_page if arguments.search_only else study_page
    text = make(study, options.out, command=command, machine=_machine(arguments.commit))
    guard_of(arguments, ("page", "out")).write_all({page: text.encode()})
    sys.stdout.write(f"{page}\n")
    if arguments.search_only:
        record = page.with_suffix(".json")
        rounds = read_rounds(study, options.out, options.keys)
        write_search(record, study, rounds, command=command)
        sys.stdout.write(f"{record}\n")


def _machine(commit: str) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    code = f"commit `{commit}`, " if commit else ""
    return f"{code}{date.today().isoformat()}, {device}, torch {torch.__version__}"
