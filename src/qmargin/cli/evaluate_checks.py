"""What ``qmargin evaluate`` refuses before any work is done."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import guard_of
from qmargin.errors import ConfigError, DataError
from qmargin.files import Guard

if TYPE_CHECKING:
    from qmargin.evaluation.embeddings import Embeddings


def check_outputs(arguments: argparse.Namespace) -> Guard:
    """Refuse places that cannot be written, inputs, and files that another program wrote.

    Where scores or embeddings go is filled in.
    """
    from qmargin.evaluation.embed import EMBEDDINGS_MARK
    from qmargin.evaluation.result import RESULT_MARK
    from qmargin.evaluation.resuming import PROGRESS_MARK, names_beside
    from qmargin.evaluation.scoring import SCORES_MARK

    out: Path = arguments.out
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out} is not a file in an existing folder: make the folder first")
    outputs = {"out": RESULT_MARK}
    if hasattr(arguments, "scores"):
        arguments.scores = arguments.scores or out.with_suffix(".scores.tsv")
        outputs["scores"] = SCORES_MARK
    if getattr(arguments, "model", None) is not None:
        suffix = ".embeddings.safetensors"
        arguments.embeddings = arguments.embeddings or out.with_suffix(suffix)
        outputs["embeddings"] = EMBEDDINGS_MARK
    guard = guard_of(arguments, (*outputs, "pictures"), own=_own_scores(out))
    for name, mark in outputs.items():
        path = getattr(arguments, name)
        guard.check(path, mark)
        if name != "out":  # a run that was stopped leaves these beside it
            partial, record = names_beside(path)
            guard.check(partial, mark)
            guard.check(record, PROGRESS_MARK)
    return guard


def _own_scores(out: Path) -> tuple[str, ...]:
    """Hashes of the score tables that the evaluation behind an earlier result wrote."""
    from qmargin.evaluation.result import read_result

    try:
        sources = read_result(out).sources
    except (OSError, DataError):
        return ()
    if all(source.role != "embeddings" for source in sources):
        return ()  # it read the scores of another program
    return tuple(source.sha256 for source in sources if source.role == "scores")


def check_protocol(arguments: argparse.Namespace) -> Guard:
    """The same of a protocol, which also needs a model or its embeddings."""
    if arguments.model is None and arguments.embeddings is None:
        raise ConfigError("there is neither --model nor --embeddings: give one of them")
    if arguments.model is not None:
        from qmargin.training.process import find_device

        find_device(arguments.device)
    return check_outputs(arguments)


def with_weights(card: dict[str, str] | None, weights: str | None) -> dict[str, str] | None:
    """A model card with the hash of the weights that made the embeddings, where it is known.

    Raises:
        DataError: The card names other weights.
    """
    if weights is None:
        return card
    said = (card or {}).get("weights_sha256", weights)
    if said != weights:
        raise DataError(
            f"the model card names the weights {said:.12}..., but the embeddings are of "
            f"{weights:.12}...; give the card of the model that made them"
        )
    return {**(card or {}), "weights_sha256": weights}


def collapse_notes(embeddings: Embeddings) -> tuple[str, ...]:
    """What the result says of embeddings that all but coincide."""
    from qmargin.evaluation.embeddings import collapse_note

    note = collapse_note(embeddings.matrix)
    return () if note is None else (note,)
