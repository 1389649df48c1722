"""A row of the paper's tables, for faces and for speakers."""

from __future__ import annotations

from typing import NamedTuple


class Loss(NamedTuple):
    """A row of a table: a preset of ``qmargin.losses.presets`` with the row's numbers."""

    title: str
    preset: str
    scale: float
    margin: float
    alpha: float | None = None

    def describe(self) -> str:
        """The numbers in words."""
        order = "" if self.alpha is None else f"alpha {self.alpha:g}, "
        return f"{self.title}, {order}scale {self.scale:g}, margin {self.margin:g}"

    @property
    def numbers(self) -> dict[str, float]:
        """For ``LossPart.from_preset``; presets without an alpha take none."""
        order = {} if self.alpha is None else {"alpha": self.alpha}
        return {"scale": self.scale, "margin": self.margin, **order}
