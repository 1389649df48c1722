"""Options that every kind of ``qmargin evaluate`` has."""

from __future__ import annotations

import argparse
from pathlib import Path

from qmargin.cli.options import add_keep_paths, add_overwrite

EMBEDDINGS_HELP = (
    "embeddings: written by --model, or read where there is no --model (OUT with "
    ".embeddings.safetensors)"
)
RULES = ("conservative", "nearest", "interpolated")


def add_measures(
    parser: argparse.ArgumentParser,
    *,
    fars: tuple[float, ...] | None,
    replicates: int = 1000,
    named_by: str = "model",
    listed_in: str = "their file",
    seeded: str = "the bootstrap",
    hardest: str = "trials",
    has_rules: bool = True,
) -> None:
    """Add where the result goes, what it is called, and what is measured.

    Args:
        parser: Of a kind.
        fars: At which TAR is measured; None where that depends on the task.
        replicates: Of the bootstrap.
        named_by: What a system has its name from.
        listed_in: What the trials have their name from.
        seeded: What the seed is of.
        hardest: What the hardest ones are called.
        has_rules: Whether thresholds can be chosen by other rules than the conservative one.
    """
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="result.json to write")
    add("--name", metavar="SYSTEM", help=f"name of the system (that of the {named_by})")
    add("--protocol", metavar="NAME", help=f"name of the trials (that of {listed_in})")
    add("--fars", type=float, nargs="+", default=fars, metavar="FAR", help=_fars_help(fars))
    if has_rules:
        add("--rule", choices=RULES, default=RULES[0], help="choice of thresholds (conservative)")
    note = f"of the bootstrap; 0 for no intervals ({replicates})"
    add("--replicates", type=int, default=replicates, help=note)
    add("--level", type=float, default=0.95, help="of the intervals (0.95)")
    add("--seed", type=int, default=0, help=f"of {seeded} (0)")
    add("--hardest", type=int, default=20, metavar="N", help=f"hardest {hardest} to keep (20)")
    add_overwrite(parser)
    add_keep_paths(parser)


def _fars_help(fars: tuple[float, ...] | None) -> str:
    text = "false accept rates at which to measure TAR"
    return text if fars else f"{text}, or false positive rates of a search (by the task)"


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the priors of minDCF."""
    parser.add_argument(
        "--p-target",
        type=float,
        nargs="+",
        default=(0.01, 0.05),
        metavar="P",
        help="priors of minDCF",
    )
