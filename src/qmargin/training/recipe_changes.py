"""Two recipes side by side: what differs, and what may differ when a run is resumed."""

from __future__ import annotations

from qmargin.errors import ConfigError
from qmargin.training.recipe import FREE, Recipe, flatten, is_under

FIXED = (  # with another of these, saved weights and positions would mean something else
    "seed",
    "data.kind",
    "data.num_classes",
    "data.options",
    "data.batch_size",
    "data.drop_last",
    "model",
    "loss.margin_kind",
    "loss.options",
    "optimizer.kind",
)


def diff(old: Recipe, new: Recipe) -> list[str]:
    """What differs between two recipes, one line per key.

    Values that follow from others are compared as well: a longer run whose learning rate follows
    its length has two lines.

    Examples:
        >>> from dataclasses import replace
        >>> from qmargin.recipes.debug import debug
        >>> diff(debug(), replace(debug(), seed=7))
        ['seed: 0 -> 7']
    """
    return [line for _, line in _changes(old, new)]


def refused_changes(saved: Recipe, asked: Recipe) -> list[str]:
    """Lines of ``diff`` with which a run cannot be resumed; see ``FIXED``."""
    return [line for key, line in _changes(saved, asked) if is_under(key, FIXED)]


def compatible(saved: Recipe, asked: Recipe) -> bool:
    """Whether a run saved under one recipe can go on under another.

    Rates, schedules, the loss's numbers, precision, lengths and intervals may change; seed, data,
    batch size, backbone, the form of the loss and the kind of optimizer may not.
    """
    return not refused_changes(saved, asked)


def check_resume(saved: Recipe, asked: Recipe, *, allow_changes: bool = False) -> list[str]:
    """The lines to show before a run is resumed under another recipe; refuse what cannot be.

    Args:
        saved: Recipe of the checkpoint.
        asked: Recipe to go on with.
        allow_changes: Whether the outcome may change.

    Returns:
        Lines of ``diff``; those that change what the run computes end in a note that says so.

    Raises:
        ConfigError: If a change is in ``FIXED``; or alters the outcome, and that is not allowed.
    """
    refused = refused_changes(saved, asked)
    if refused:
        raise ConfigError(
            f"this run cannot be resumed with {'; '.join(refused)}; undo the change, or start a "
            "new run in another folder"
        )
    changes = _changes(saved, asked)
    altering = [line for key, line in changes if not is_under(key, FREE)]
    if altering and not allow_changes:
        raise ConfigError(
            f"this run was saved with another recipe: {'; '.join(altering)}; resume without naming "
            "a recipe or these settings to keep the stored one, or add --allow-changes "
            "(allow_changes=True in Python) to change the outcome"
        )
    return [f"{line} (changes the outcome)" if line in altering else line for _, line in changes]


def _changes(old: Recipe, new: Recipe) -> list[tuple[str, str]]:
    before, after = flatten(old.resolved()), flatten(new.resolved())
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key), after.get(key)) for key in keys]  # absent is None
    return [
        (key, f"{key}: {_text(left)} -> {_text(right)}")
        for key, left, right in pairs
        if left != right or type(left) is not type(right)
    ]


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
