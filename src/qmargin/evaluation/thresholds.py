"""``thresholds.json``: the operating points that a model's own evaluation measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.result import Result, TarPoint, read_json
from qmargin.files import write_atomically
from qmargin.schema import decode, encode

FORMAT = "qmargin-thresholds"
VERSION = 1
FLIPS = ("none", "sum")
MAX_BYTES = 10_000_000
_CLOSE = 1e-9  # relative: 1e-3 may have been written as 0.001


@dataclass(frozen=True)
class AffineMap:
    """``scale * score + offset`` is a natural log-likelihood ratio."""

    scale: float
    offset: float


@dataclass(frozen=True)
class Thresholds:
    """What decides whether two samples are of one identity.

    Attributes:
        weights_sha256: Of the model that they belong to.
        protocol: Trials on which they were measured.
        rule: That chose them.
        num_genuine: Trials of one identity.
        num_impostors: Trials of two identities.
        flip: ``"none"``, or ``"sum"`` where an image's embedding is the sum of its own and its
            mirror image's.
        points: As in the result, those that could be measured.
        calibration: From scores to log-likelihood ratios; None where trials could not tell.
        result_sha256: Fingerprint of the result file.
    """

    weights_sha256: str
    protocol: str
    rule: str
    num_genuine: int
    num_impostors: int
    flip: str
    points: tuple[TarPoint, ...]
    calibration: AffineMap | None
    result_sha256: str

    def __post_init__(self) -> None:
        if self.flip not in FLIPS:
            raise ConfigError(f"flip is {self.flip!r}; it must be one of {', '.join(FLIPS)}")

    def at(self, far: float) -> TarPoint:
        """The point measured at a false acceptance rate.

        Raises:
            ProtocolError: It was not measured; the message lists those that were.
        """
        for point in self.points:
            if math.isclose(point.far_target, far, rel_tol=_CLOSE):
                return point
        known = ", ".join(f"{point.far_target:g}" for point in self.points) or "none"
        raise ProtocolError(
            f"no threshold was measured at FAR {far:g} on {self.protocol} with "
            f"{self.num_impostors:,} impostor trials; measured are {known}"
        )


def thresholds_of(
    result: Result,
    *,
    weights_sha256: str,
    result_sha256: str,
    flip: str = "none",
    is_trusted: bool = False,
) -> Thresholds:
    """The operating points of an evaluation, for the model that was evaluated.

    Args:
        result: From ``qmargin evaluate``.
        weights_sha256: Of the model; a result of other weights is refused.
        result_sha256: Fingerprint of the result file.
        flip: How the embeddings were made, ``"none"`` or ``"sum"``.
        is_trusted: Take a result that names no weights for one of this model.

    Raises:
        DataError: The result is of another model or names none, or its scores are not plain
            cosines of two samples.
        ProtocolError: Nothing could be measured.
    """
    evaluated = result.weights_sha256
    if evaluated is None and not is_trusted:
        raise DataError(
            f"the result {result.system.name!r} on {result.protocol.name!r} does not name the "
            f"weights it is of, and this model has {weights_sha256:.12}...; evaluate with --model, "
            "or with embeddings of `qmargin embed`, or pass --trust-result if it is of this model"
        )
    if evaluated not in (None, weights_sha256):
        raise DataError(
            f"the result is of the weights {evaluated:.12}... and this model has "
            f"{weights_sha256:.12}...; evaluate this model"
        )
    if result.protocol.pooling is not None:
        raise DataError(
            f"{result.protocol.name} compared templates of many images, whose scores are others "
            "than those of two; evaluate pairs, as in `qmargin evaluate lfw` or `pairs`"
        )
    normalised = [source.role for source in result.sources if source.role in ("cohort", "center")]
    if normalised:
        raise DataError(
            f"the scores of {result.protocol.name} were changed by a {normalised[0]}, which a "
            "comparison of two samples has not; evaluate plain cosines"
        )
    points = tuple(point for point in result.measures.tar if point.tar is not None)
    if not points:
        raise ProtocolError(
            f"no FAR could be measured on {result.protocol.name} with "
            f"{result.protocol.num_impostors:,} impostor trials; evaluate on more of them"
        )
    curve = result.calibration
    return Thresholds(
        weights_sha256=weights_sha256,
        protocol=result.protocol.name,
        rule=result.protocol.rule,
        num_genuine=result.protocol.num_genuine,
        num_impostors=result.protocol.num_impostors,
        flip=flip,
        points=points,
        calibration=None if curve is None else AffineMap(curve.scale, curve.offset),
        result_sha256=result_sha256,
    )


def write_thresholds(path: str | Path, thresholds: Thresholds) -> None:
    """Write ``thresholds.json``, whole or not at all."""
    content = {"format": FORMAT, "version": VERSION, **encode(thresholds, "thresholds")}
    _parse(json.loads(json.dumps(content)), str(path))  # a NaN in the wrong place
    write_atomically(path, (json.dumps(content, allow_nan=False, indent=1) + "\n").encode())


def read_thresholds(path: str | Path) -> Thresholds:
    """Read and check ``thresholds.json``."""
    return _parse(read_json(path, MAX_BYTES), str(path))


def _parse(content: Any, source: str) -> Thresholds:
    is_ours = isinstance(content, Mapping) and content.get("format") == FORMAT
    if not is_ours or content.get("version") != VERSION:
        raise DataError(
            f"{source} is not a {FORMAT} file of version {VERSION}; export the model again"
        )
    return cast(Thresholds, decode(Thresholds, content, f"{source}:"))
