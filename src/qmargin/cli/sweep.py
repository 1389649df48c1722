"""``qmargin sweep``: a recipe over a grid of settings, or a search through them."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from qmargin.cli.options import add_overwrite
from qmargin.cli.recipes import load_recipe

EXIT_CODES = """exit status:
  0    all trials are complete
  2    refused, or some trials failed; the last line says why
  130  stopped by Ctrl-C after saving; the same command goes on
  143  stopped by SIGTERM after saving; the same command goes on
"""


def add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "sweep",
        help="train a recipe with many settings and compare them",
        description="Train a recipe with every combination of some settings, or with those that a "
        "search proposes, measure each on validation identities, and write a table and figures. "
        "Interrupted or killed and run again, it goes on.",
        epilog=EXIT_CODES,
    )
    add = parser.add_argument
    add("recipe", metavar="NAME_OR_FILE", help="name of a recipe, or a .yaml file")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the sweep")
    add(
        "--grid",
        dest="axes",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="values of a setting, as in loss.scale=10,16, of m_eff, the effective margin, or of "
        "hardness, which decides the scale; a search also takes LOW:HIGH and LOW:HIGH:log; may be "
        "repeated",
    )
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the recipe for every trial; may be repeated",
    )
    add("--seeds", type=int, default=1, metavar="N", help="trainings of each combination (1)")
    add(
        "--search",
        choices=("grid", "optuna"),
        default="grid",
        help="every combination, or a search by the optuna package (grid)",
    )
    add("--trials", type=int, metavar="N", help="combinations of a search (40)")
    add(
        "--validation",
        action="append",
        default=[],
        metavar="PATH",
        help="data of other identities, to measure on; or settings such as data.options.split=dev; "
        "data that is made needs none",
    )
    add("--measure", help="eer, or a TAR such as tar@1e-3 (the strictest that is measured well)")
    add("--stop-early", action="store_true", help="end trials that are behind the median")
    add("--parallel", type=int, metavar="N", help="trials at once (one on each device)")
    add("--devices", nargs="+", default=("auto",), metavar="NAME", help="cpu, or cuda:0 cuda:1")
    add_overwrite(parser)
    parser.set_defaults(run=run, resumes=True)


def run(arguments: argparse.Namespace) -> None:
    """Run the sweep; a signal ends it with the status of that signal, after saving."""
    from qmargin.sweep.axes import check_settings, parse_axis
    from qmargin.sweep.run import SweepOptions, run_sweep
    from qmargin.sweep.validation import RecipeData

    axes = tuple(parse_axis(text) for text in arguments.axes)
    check_settings(axes, arguments.settings)
    options = SweepOptions(
        recipe=load_recipe(arguments.recipe, arguments.settings),
        axes=axes,
        out=arguments.out,
        seeds=arguments.seeds,
        search=arguments.search,
        num_points=arguments.trials,
        measure=arguments.measure,
        stop_early=arguments.stop_early,
        parallel=arguments.parallel,
        devices=tuple(arguments.devices),
        data=RecipeData(tuple(_validation(text) for text in arguments.validation)),
        command="qmargin " + shlex.join(sys.argv[1:]),
        overwrite=arguments.overwrite,
    )
    run_sweep(options)


def _validation(text: str) -> str:
    """A setting; a path is one of the data's."""
    return text if "=" in text else f"data.path={text}"
