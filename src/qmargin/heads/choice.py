"""Which path a step takes when it is left to the head."""

from __future__ import annotations

from typing import NamedTuple

SMALL_LOGITS = 1 << 22  # below this, all cosines of a batch cost less than going without them
# Share of a row's groups of classes that lists may hold: above the first they lose to `chunked`,
# below the second they are tried again. Two numbers, so that a share in between changes nothing.
LISTS_LOSE = {"cpu": 0.2, "cuda": 0.3}
LISTS_WIN = 0.25  # times the above: `chunked` counts active groups, lists hold some more


class Choice(NamedTuple):
    """A path and why it was chosen."""

    path: str
    reason: str


def choose_path(
    *,
    order: float | None,
    device: str,
    num_logits: int,
    group_share: float | None,
    was_chunked: bool,
) -> Choice:
    """The path for the next step.

    Args:
        order: ``alpha - 1``; None for another divergence, or an alpha that is learned.
        device: ``"cpu"``, ``"cuda"``.
        num_logits: ``B * k``.
        group_share: Share of a row's groups that hold, or may hold, active classes, measured in
            the last steps; None before the first.
        was_chunked: Whether the step before was chunked.

    Examples:
        >>> choose_path(
        ...     order=0.0, device="cpu", num_logits=10**9, group_share=None, was_chunked=False
        ... )
        Choice(path='chunked', reason='alpha is 1: every class is active')
    """
    if order is None:
        return Choice("dense", "only the dense path has this divergence or a learned alpha")
    if order <= 0.0:
        if num_logits < SMALL_LOGITS:
            return Choice("dense", f"{num_logits:,} logits are few and alpha is {1 + order:g}")
        return Choice("chunked", f"alpha is {1 + order:g}: every class is active")
    if group_share is None:
        return Choice("sparse", f"alpha is {1 + order:g}: few classes are active")
    lose = LISTS_LOSE.get(device, LISTS_LOSE["cuda"])
    limit = lose * LISTS_WIN if was_chunked else lose
    share = f"{100 * group_share:.3g} % of the groups hold active classes"
    if group_share > limit:
        return Choice("chunked", f"{share}, lists pay below {100 * limit:.3g} %")
    return Choice("sparse", f"{share}, few enough for lists")
