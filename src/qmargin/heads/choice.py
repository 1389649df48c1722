"""Which path a step takes when it is left to the head."""

from __future__ import annotations

from typing import NamedTuple

SMALL_LOGITS = 1 << 22  # below this, all cosines of a batch cost less than going without them
# Share of all classes that a row's list may hold: above the first it loses to `chunked`, below the
# second it is tried again. Two numbers, so that a share in between changes nothing, and because
# `chunked` counts active classes, of which lists hold some more.
LISTS_LOSE = {"cpu": 0.2, "cuda": 0.011}
LISTS_WIN = {"cpu": 0.1, "cuda": 0.0025}
# Classes in the lists of all rows together: with fewer a GPU does little but start kernels, of
# which `chunked` has more. Again two numbers.
FEW_LOSE = {"cpu": 0, "cuda": 1 << 23}
FEW_WIN = {"cpu": 0, "cuda": 1 << 22}


class Choice(NamedTuple):
    """A path and why it was chosen."""

    path: str
    reason: str


def choose_path(
    *,
    order: float | None,
    device: str,
    num_logits: int,
    class_share: float | None,
    was_chunked: bool,
) -> Choice:
    """The path for the next step.

    Args:
        order: ``alpha - 1``; None for another divergence, or an alpha that is learned.
        device: ``"cpu"``, ``"cuda"``.
        num_logits: ``B * k``.
        class_share: Share of the classes that are, or may be, active in a row, measured in the
            last steps; None before the first.
        was_chunked: Whether the step before was chunked.

    Examples:
        >>> choose_path(
        ...     order=0.0, device="cpu", num_logits=10**9, class_share=None, was_chunked=False
        ... )
        Choice(path='chunked', reason='alpha is 1: every class is active')
    """
    if order is None:
        return Choice("dense", "only the dense path has this divergence or a learned alpha")
    if order <= 0.0:
        if num_logits < SMALL_LOGITS:
            return Choice("dense", f"{num_logits:,} logits are few and alpha is {1 + order:g}")
        return Choice("chunked", f"alpha is {1 + order:g}: every class is active")
    if class_share is None:
        return Choice("sparse", f"alpha is {1 + order:g}: few classes are active")
    shares, counts = (LISTS_WIN, FEW_WIN) if was_chunked else (LISTS_LOSE, FEW_LOSE)
    known = device if device in shares else "cuda"
    limit = max(shares[known], min(1.0, counts[known] / num_logits))
    share = f"{100 * class_share:.3g} % of the classes can be active in a row"
    if class_share > limit:
        return Choice("chunked", f"{share}, lists pay below {100 * limit:.3g} %")
    return Choice("sparse", f"{share}, few enough for lists")
