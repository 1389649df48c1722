"""Features of audio, computed where the model runs."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmargin.features.filter_bank import FilterBank, subtract_mean

__all__ = ["FilterBank", "subtract_mean"]


def __getattr__(name: str) -> object:  # torch is imported on first use
    if name in __all__:
        return getattr(import_module("qmargin.features.filter_bank"), name)
    raise AttributeError(f"module 'qmargin.features' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
