"""Errors and warnings of this package."""

from __future__ import annotations

from collections.abc import Iterable


class QMarginError(Exception):
    """Base class of all errors that qmargin raises on purpose."""


class ConfigError(QMarginError, ValueError):
    """A setting is outside its domain."""


class ShapeError(QMarginError, ValueError):
    """A tensor has the wrong shape or dtype."""


class DataError(QMarginError, ValueError):
    """A value in the data (a label, a score, a file's content) is invalid."""


class CorruptSample(DataError):
    """A sample's bytes cannot be read; a loader replaces it and counts it."""


class BackendError(QMarginError, RuntimeError):
    """No implementation supports this call on this machine."""


class ProtocolError(QMarginError, ValueError):
    """The trials do not support the requested evaluation."""


class CheckpointError(QMarginError, RuntimeError):
    """A checkpoint cannot be written, or the stored one is incomplete."""


class RankError(QMarginError, RuntimeError):
    """Another rank of a run died, hung or failed."""


class MarginWarning(UserWarning):
    """No embedding can reach the margin of a loss; the loss itself is well defined."""


LONGEST_COMPARED = 100  # characters of a name: the time of the comparison grows with their square


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, for messages; empty if none is near."""
    from difflib import get_close_matches

    close = get_close_matches(name[:LONGEST_COMPARED], list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
