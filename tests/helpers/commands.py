"""Commands as they are typed: ``qmargin ...``, and ``python -m benchmarks ...`` in a checkout."""

import argparse
from collections.abc import Sequence
from functools import cache

import benchmarks
from qmargin.cli.commands import build_parser
from qmargin.cli.main import main

PROGRAMS = {
    ("qmargin",): cache(build_parser),
    ("python", "-m", "benchmarks"): cache(benchmarks.build_parser),
}


def run_benchmark(words: Sequence[str]) -> int:
    """Exit status of ``python -m benchmarks WORDS``."""
    return main(words, parser=benchmarks.build_parser)


def run_command(*words: object) -> argparse.Namespace:
    """Run ``qmargin WORDS`` in this process, without its handlers; errors are raised."""
    arguments = parse_command(["qmargin", *map(str, words)])
    arguments.run(arguments)
    return arguments


def parse_command(words: Sequence[str]) -> argparse.Namespace:
    """Arguments of a whole command line, its program included."""
    for program, make_parser in PROGRAMS.items():
        if tuple(words[: len(program)]) == program:
            return make_parser().parse_args(words[len(program) :])
    raise AssertionError(f"{words} starts no program of this checkout")
