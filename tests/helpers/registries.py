"""What a test registers is forgotten after it."""

import pytest

from qmargin.registry import KINDS

REGISTRIES = list(KINDS.values())


def forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget names that are registered from now on when the test ends; built-in ones stay."""
    for one in REGISTRIES:
        one.names()  # imports the built-in objects
        monkeypatch.setattr(one, "_entries", dict(one._entries))
