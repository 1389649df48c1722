"""Every command of ``qmargin``; torch is imported by the command that needs it."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

import qmargin
from qmargin.cli.bench_data import add_bench_data
from qmargin.cli.bench_features import add_bench_features
from qmargin.cli.bench_metrics import add_bench_metrics
from qmargin.cli.bench_protocols import add_bench_protocols
from qmargin.cli.bench_train import add_bench_train
from qmargin.cli.bench_trials import add_bench_trials
from qmargin.cli.completion import add_completion
from qmargin.cli.data import add_data
from qmargin.cli.demo import add_demo
from qmargin.cli.doctor import add_doctor
from qmargin.cli.embed import add_embed
from qmargin.cli.evaluate import add_evaluate
from qmargin.cli.export import add_export
from qmargin.cli.options import Parser, count, new_file, positive
from qmargin.cli.paper import add_paper
from qmargin.cli.recipes import add_recipes
from qmargin.cli.report import add_report
from qmargin.cli.study import add_study
from qmargin.cli.sweep import add_sweep
from qmargin.cli.train import add_train
from qmargin.cli.verify import add_verify


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line.

    Examples:
        >>> build_parser().parse_args(["bench", "loss", "--alphas", "1.5", "2"]).alphas
        [1.5, 2.0]
    """
    parser: argparse.ArgumentParser = Parser(
        prog="qmargin",
        description="Alpha-divergence losses with probabilistic margins (Q-Margin).",
    )
    parser.add_argument("--version", action="version", version=f"qmargin {qmargin.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_demo(commands)
    add_train(commands)
    add_sweep(commands)
    add_study(commands)
    add_recipes(commands)
    add_doctor(commands)
    add_evaluate(commands)
    add_report(commands)
    add_paper(commands)
    add_data(commands)
    add_embed(commands)
    add_verify(commands)
    add_export(commands)
    add_completion(commands)
    bench = commands.add_parser("bench", help="measure speed on this machine")
    subjects = bench.add_subparsers(title="what to measure", metavar="SUBJECT", required=True)
    _add_bench_loss(subjects)
    _add_bench_head(subjects)
    add_bench_metrics(subjects)
    add_bench_data(subjects)
    add_bench_features(subjects)
    add_bench_protocols(subjects)
    add_bench_trials(subjects)
    add_bench_train(subjects)
    return parser


def _add_bench_loss(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subjects.add_parser(
        "loss",
        help="the dense loss against cross-entropy and the entmax package",
        description="Time forward + backward of the dense loss on a matrix of cosines, next to "
        "F.cross_entropy and the entmax package, and count the solver's evaluations.",
    )
    parser.add_argument("--rows", type=count, default=256, help="samples in the batch")
    parser.add_argument("--classes", type=count, default=100_000, help="identities")
    parser.add_argument(
        "--alphas", type=positive, nargs="+", default=[1.0, 1.25, 1.5, 2.0], help="orders to time"
    )
    parser.add_argument("--scale", type=positive, default=32.0, help="logits = scale * cosines")
    parser.add_argument(
        "--effective-margin",
        type=positive,
        default=0.5,
        metavar="GAP",
        help="cosine gap that the q_margin rows add",
    )
    parser.add_argument("--dim", type=count, default=512, help="embedding size of the cosines")
    parser.add_argument("--repeats", type=count, default=5, help="timed turns; medians are shown")
    parser.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda")
    parser.add_argument("--threads", type=count, help="CPU threads (default: what torch chooses)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cosines and labels")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_bench_loss)


def _add_bench_head(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subjects.add_parser(
        "head",
        help="every path of MarginClassifier against the bare products, memory and errors",
        description="Time every way to take a step of the head on this machine, in turns with one "
        "product of the same size, with the memory it takes and its errors against float64.",
    )
    add = parser.add_argument
    add("--rows", type=count, help="samples in the batch (1024 on a GPU, 256 on a CPU)")
    add("--dim", type=count, help="embedding size (512; 128 on a CPU)")
    add("--classes", type=count, help="identities (2059906; 200000 on a CPU)")
    add("--alpha", type=positive, default=1.25, help="order of the divergence (1.25)")
    add("--scale", type=positive, default=35.0, help="logits = scale * cosines (35)")
    add("--margin", type=float, default=0.2, help="prior margin (0.2)")
    add("--paths", nargs="+", default=_HEAD_PATHS, metavar="NAME", help="ways to take a step")
    screens = ("float16", "bfloat16", "float32")
    add("--screen", choices=screens, help="precision of products (float16; float32 on a CPU)")
    add("--device", default="auto", help="auto, cpu or cuda (auto)")
    add("--parts", nargs="+", default=_HEAD_PARTS, metavar="NAME", help=_HEAD_PARTS_HELP)
    add("--settings", choices=("one", "several"), default="one", help=_HEAD_SETTINGS_HELP)
    add("--growth", action="store_true", help="add the part growth")
    add("--growth-classes", type=count, nargs="+", default=_GROWTH, metavar="K", help="its sizes")
    add("--end-to-end", action="store_true", help="add the part end-to-end")
    add("--backbone", default="iresnet100", help="of the part end-to-end (iresnet100)")
    add("--batch", type=count, default=512, help="images of the part end-to-end (512)")
    add("--repeats", type=count, default=10, help="timed turns; medians are shown (10)")
    add(
        "--seconds",
        type=positive,
        default=10.0,
        help="limit of seconds: slower rows get fewer turns",
    )
    add("--seed", type=int, default=0, help="seed of prototypes and batch (0)")
    add("--commit", help="recorded in the file (default: ask git)")
    add("--json", type=new_file, metavar="FILE", help="also write everything here, after every row")
    parser.set_defaults(run=_run_bench_head)


_HEAD_PATHS = ("sparse", "chunked", "dense", "sampled", "paper", "common")
_HEAD_PARTS = ("products", "paths", "settings", "errors")
_HEAD_PARTS_HELP = "of products paths settings growth errors end-to-end"
_HEAD_SETTINGS_HELP = "several: seven settings of alpha, scale and margin; one: the given one (one)"
_GROWTH = (100_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)


def _run_bench_loss(arguments: argparse.Namespace) -> None:
    from qmargin.cli.bench import LossBenchmark, run_loss_benchmark

    settings = vars(arguments).copy()
    del settings["run"]
    json_path = settings.pop("json")
    settings["alphas"] = tuple(settings["alphas"])
    run_loss_benchmark(LossBenchmark(**settings), json_path=json_path)


def _run_bench_head(arguments: argparse.Namespace) -> None:
    from qmargin.cli.bench_head import resolve_benchmark, run_head_benchmark

    options: dict[str, Any] = vars(arguments).copy()
    extra = {name: options.pop(name) for name in ("growth", "end_to_end")}
    parts, options["paths"] = tuple(options.pop("parts")), tuple(options["paths"])
    parts += tuple(name.replace("_", "-") for name, is_asked in extra.items() if is_asked)
    del options["run"]
    saved = {"json_path": options.pop("json"), "commit": options.pop("commit")}
    options["growth_classes"] = tuple(options["growth_classes"])
    options["grid"] = options.pop("settings")
    command = "qmargin " + shlex.join(sys.argv[1:])
    run_head_benchmark(resolve_benchmark(options), parts, command=command, **saved)
