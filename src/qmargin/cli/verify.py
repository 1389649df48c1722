"""``qmargin verify``: compare two samples."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import ModelUse, argument, option
from qmargin.terminal import printable

if TYPE_CHECKING:
    from qmargin.evaluation.model import Model, Verification

DEFAULT_FAR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Verify(ModelUse):
    """Compare two samples with a model.

    Prints the score of two images or recordings, the decision at a false accept rate, by the
    threshold of the model's evaluation, and, if the model is calibrated, the log-likelihood ratio.
    """

    first: Path = argument("an image or a recording", metavar="A")
    second: Path = argument("a second image or recording", metavar="B")
    model: Path = option()
    far: float | None = option(
        f"false accept rate of the decision ({DEFAULT_FAR:g})", metavar="FAR"
    )
    json: bool = option("print one JSON object")

    def run(self) -> None:
        from qmargin.evaluation.model import load_model
        from qmargin.report.numbers import digits_to_differ

        model = load_model(self.model, device=self.device, fit=self.fit)
        far = self.far
        if far is None and model.thresholds is not None:
            far = DEFAULT_FAR
        found = model.verify(self.first, self.second, far=far)
        if self.json:
            sys.stdout.write(json.dumps(asdict(found)) + "\n")
            return
        digits = digits_to_differ((found.score, found.threshold), form="f")
        sys.stdout.write(f"score     {found.score:.{digits}f} (cosine)\n")
        sys.stdout.write(f"decision  {_decision(model, found, digits)}\n")
        if found.llr is not None:
            llr = f"{found.llr:+.2f} (natural logarithm, above 0 for one identity)"
            sys.stdout.write(f"LLR       {llr}\n")


def _decision(model: Model, found: Verification, digits: int) -> str:
    from qmargin.report.numbers import rate_text

    thresholds = model.thresholds
    if found.far is None or thresholds is None:
        return "none: the model has no thresholds, add them with `qmargin export DIR --result FILE`"
    limit = "no score is enough"
    if found.threshold is not None:
        limit = f"threshold {found.threshold:.{digits}f}"
    point, protocol = thresholds.at(found.far), printable(thresholds.protocol)
    note = f"; {printable(point.note)}" if point.status != "ok" and point.note else ""
    words = "one identity" if found.is_same else "two identities"
    return f"{words} ({limit} at FAR {rate_text(found.far)}, measured on {protocol}{note})"
