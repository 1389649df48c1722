"""``qmargin study``: all losses by one recipe on one kind of data, settings chosen fairly."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from datetime import date
from pathlib import Path

LOSSES = ("arcface", "cosface", "entmax", "sparsemax", "q_margin", "sampled")


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
    add("study", metavar="NAME", help="omniglot, strokes-10k or strokes-1m")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the study")
    add("--data", type=Path, metavar="PATH", help="pictures, for studies that read some")
    add("--seeds", type=int, default=3, metavar="N", help="final trainings of each loss (3)")
    add("--losses", nargs="+", default=LOSSES, metavar="NAME", help=f"of {' '.join(LOSSES)}")
    add("--jobs", type=int, default=1, metavar="N", help="trainings at a time (1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (auto)")
    add("--page", type=Path, metavar="FILE", help="also write what was found as Markdown")
    add("--commit", default="", metavar="HASH", help="of the code, for the page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the study; a signal ends it with the status of that signal, after saving."""
    from qmargin.study.run import StudyOptions, run_study
    from qmargin.study.studies import find_study
    from qmargin.sweep.trial import Interrupted
    from qmargin.training.signals import exit_status

    study = find_study(arguments.study)
    command = "qmargin " + shlex.join(sys.argv[1:])
    options = StudyOptions(
        study=study,
        out=arguments.out,
        data=arguments.data,
        seeds=arguments.seeds,
        losses=tuple(arguments.losses),
        jobs=arguments.jobs,
        device=arguments.device,
        command=command,
    )
    try:
        page = run_study(options)
    except Interrupted as stop:
        sys.stderr.write("interrupted and saved; run the same command again to go on\n")
        raise SystemExit(exit_status(stop.signal)) from stop
    sys.stdout.write(f"report: {page}\n")
    if arguments.page is not None:
        from qmargin.files import write_atomically
        from qmargin.study.page import study_page

        text = study_page(study, arguments.out, command=command, machine=_machine(arguments.commit))
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.page, text.encode())
        sys.stdout.write(f"{arguments.page}\n")


def _machine(commit: str) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    code = f"commit `{commit}`, " if commit else ""
    return f"{code}{date.today().isoformat()}, {device}, torch {torch.__version__}"
