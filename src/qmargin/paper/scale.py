"""What the numbers of an artefact are about, in sentences for its caption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qmargin.evaluation.result import Result
from qmargin.paper.captions import described
from qmargin.paper.enough import pairs_needed
from qmargin.paper.layout import MISSING
from qmargin.paper.measured import SEED, Measured

REACHABLE = 2.0  # cosines differ by at most this


def scale_of(measured: Sequence[Measured]) -> str:
    """Pairs, seeds and identities of the training, for a sentence."""
    tested = [
        f"{name}: {_span(count for one in found for count in one.num_impostors)} impostor pairs, "
        f"{_seeds(found)}"
        for name, found in _by_protocol(measured).items()
    ]
    trained = sorted(
        {
            text
            for one in measured
            for result in one.results
            if (text := _training(result)) is not None
        }
    )
    return "; ".join([*tested, *(f"trained on {text}" for text in trained)])


def unmeasured(measured: Sequence[Measured], fars: Sequence[float]) -> str:
    """Which rates have no number at all, and how many pairs they need; empty where all have one."""
    texts = []
    for name, found in _by_protocol(measured).items():
        missing = [far for far in fars if all(one.tar(far) == MISSING for one in found)]
        fewest = min(count for one in found for count in one.num_impostors)
        reasons = [f"{shown_far(far)}{_reason(far, fewest)}" for far in missing]
        if reasons:
            texts.append(f"{name} has no TAR at FAR {', '.join(reasons)}.")
    return " ".join(texts)


def unreachable(measured: Sequence[Measured]) -> str:
    """Settings whose effective margin no embedding can have; empty where there are none."""
    names = {
        f"{one.name} ({described(*one.setting[1:])}) {one.gap:.2f}": None
        for one in measured
        if one.setting is not None and one.gap is not None and one.gap > REACHABLE
    }
    if not names:
        return ""
    return f"Effective margins over {REACHABLE:g}, which no embedding reaches: {', '.join(names)}."


def shown_far(far: float) -> str:
    """A rate as the paper's columns have it.

    Examples:
        >>> shown_far(0.001), shown_far(1e-5)
        ('1e-3', '1e-5')
    """
    return f"{far:.0e}".replace("e-0", "e-")


def _reason(far: float, num_impostors: int) -> str:
    needed = pairs_needed(far)
    return f" (needs {needed:,} impostor pairs)" if num_impostors < needed else ""


def _by_protocol(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    protocols: dict[str, list[Measured]] = {}
    for one in measured:
        protocols.setdefault(one.protocol, []).append(one)
    return protocols


def _span(counts: Iterable[int]) -> str:
    """The smallest and the largest number.

    Examples:
        >>> _span([1420, 393]), _span([3, 3])
        ('393 to 1,420', '3')
    """
    known = sorted(set(counts))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def _seeds(found: Sequence[Measured]) -> str:
    counts = [len(one.results) for one in found]
    return f"{_span(counts)} seed{'s' * (max(counts) > 1)}"


def _training(result: Result) -> str | None:
    text = (result.system.model_card or {}).get("training")
    return None if text is None else SEED.sub("", text)
