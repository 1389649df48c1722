"""Inputs of training: datasets, their order, and batches on every rank."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmargin.data.open import open_dataset
    from qmargin.data.readers.verification_bin import read_bin

__all__ = ["open_dataset", "read_bin"]

_HOMES = {"open_dataset": "qmargin.data.open", "read_bin": "qmargin.data.readers.verification_bin"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'qmargin.data' has no attribute {name!r}")
