"""Argument parsing and nothing else: torch is imported by the command that needs it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from qmargin.errors import QMarginError


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line.

    Example:
        >>> build_parser().parse_args(["bench", "loss", "--alphas", "1.5", "2"]).alphas
        [1.5, 2.0]
    """
    parser = argparse.ArgumentParser(
        prog="qmargin",
        description="Alpha-divergence losses with probabilistic margins (Q-Margin).",
    )
    parser.add_argument("--version", action="version", version=f"qmargin {version('qmargin')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bench = commands.add_parser("bench", help="measure speed on this machine")
    subjects = bench.add_subparsers(title="what to measure", metavar="SUBJECT", required=True)
    _add_bench_loss(subjects)
    return parser


def _add_bench_loss(subjects: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subjects.add_parser(
        "loss",
        help="the dense loss against cross-entropy and the entmax package",
        description="Time forward + backward of the dense loss on a matrix of cosines, next to "
        "F.cross_entropy and the entmax package, and count the solver's evaluations.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=_count, default=256, help="samples in the batch")
    parser.add_argument("--classes", type=_count, default=100_000, help="identities")
    parser.add_argument(
        "--alphas", type=_positive, nargs="+", default=[1.0, 1.25, 1.5, 2.0], help="orders to time"
    )
    parser.add_argument("--scale", type=_positive, default=32.0, help="logits = scale * cosines")
    parser.add_argument(
        "--effective-margin",
        type=_positive,
        default=0.5,
        metavar="GAP",
        help="cosine gap that the q_margin rows add",
    )
    parser.add_argument("--dim", type=_count, default=512, help="embedding size of the cosines")
    parser.add_argument("--repeats", type=_count, default=5, help="timed turns; medians are shown")
    parser.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda")
    parser.add_argument("--threads", type=_count, help="CPU threads (default: what torch chooses)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cosines and labels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.set_defaults(run=_run_bench_loss)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive finite number")
    return value


def _run_bench_loss(arguments: argparse.Namespace) -> None:
    from qmargin.cli.bench import LossBenchmark, run_loss_benchmark

    settings = vars(arguments).copy()
    del settings["run"]
    json_path = settings.pop("json")
    settings["alphas"] = tuple(settings["alphas"])
    run_loss_benchmark(LossBenchmark(**settings), json_path=json_path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 for a usage error.

    Args:
        argv: Arguments without the program's name; those of the process when None.
    """
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], None] = arguments.run
    try:
        run(arguments)
    except (QMarginError, OSError) as error:
        sys.stderr.write(f"qmargin: error: {error}\n")
        return 2
    return 0
