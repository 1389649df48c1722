"""``qmargin verify``: are two samples of one identity?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.terminal import printable

if TYPE_CHECKING:
    from qmargin.evaluation.model import Model, Verification

DEFAULT_FAR = 1e-3
_FIT_HELP = (
    "images of another size than the model's: exact refuses them, resize scales them, align finds "
    "the face in every image and auto in those of another size (auto)"
)


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "verify",
        help="compare two samples with a model",
        description="Print the score of two images or recordings, the decision at the threshold "
        "that the model's own evaluation found for a false acceptance rate, and, where the model "
        "is calibrated, the log-likelihood ratio.",
    )
    add = parser.add_argument
    add("first", type=Path, metavar="A", help="an image or a recording")
    add("second", type=Path, metavar="B", help="another")
    add_model_options(parser)
    add("--far", type=float, metavar="FAR", help=f"decide at this rate ({DEFAULT_FAR:g})")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_verify)


def add_model_options(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add what every command that uses a model takes."""
    add = parser.add_argument
    add("--model", type=Path, required=is_required, metavar="DIR", help="model directory, or a run")
    add("--fit", choices=("auto", "exact", "resize", "align"), default="auto", help=_FIT_HELP)
    add("--device", default="cpu", help="where to run, such as cpu or cuda (cpu)")


def run_verify(arguments: argparse.Namespace) -> None:
    """Compare, and print what was found."""
    from qmargin.evaluation.model import load_model

    model = load_model(arguments.model, device=arguments.device, fit=arguments.fit)
    far = arguments.far
    if far is None and model.thresholds is not None:
        far = DEFAULT_FAR
    found = model.verify(arguments.first, arguments.second, far=far)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
    else:
        sys.stdout.write("".join(f"{name:<9} {text}\n" for name, text in _lines(model, found)))


def _lines(model: Model, found: Verification) -> list[tuple[str, str]]:
    from qmargin.report.numbers import digits_to_differ

    digits = digits_to_differ((found.score, found.threshold), form="f")
    lines = [
        ("score", f"{found.score:.{digits}f} (cosine)"),
        ("decision", _decision(model, found, digits)),
    ]
    if found.llr is not None:
        lines.append(("LLR", f"{found.llr:+.2f} (natural logarithm, above 0 for one identity)"))
    return lines


def _decision(model: Model, found: Verification, digits: int) -> str:
    thresholds = model.thresholds
    if found.far is None or thresholds is None:
        return "none: the model has no thresholds, add them with `qmargin export DIR --result FILE`"
    words = "one identity" if found.is_same else "two identities"
    limit = "no score is enough"
    if found.threshold is not None:
        limit = f"threshold {found.threshold:.{digits}f}"
    point = thresholds.at(found.far)
    text = f"{words} ({limit} at FAR {found.far:g}, measured on {printable(thresholds.protocol)}"
    if point.status != "ok" and point.note:
        text += f"; {printable(point.note)}"
    return text + ")"
