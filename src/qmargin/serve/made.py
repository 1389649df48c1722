"""Generated people and voices to try, for models that were trained on generated data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qmargin.errors import QMarginError

NUM_IDENTITIES, SAMPLES = 1_000_000, 20


@dataclass(frozen=True)
class Made:
    """Files of identities outside the training set."""

    noun: str  # "person" or "voice"
    encode: Callable[[int], bytes]  # a file by its number

    def pair(self, number: int, *, same: bool) -> list[bytes]:
        """Two files, of one identity or of two; ``number`` chooses which."""
        drawn = np.random.default_rng(number)
        first, second = drawn.choice(NUM_IDENTITIES, 2, replace=False).tolist()
        places = drawn.choice(SAMPLES, 2, replace=False).tolist()
        identities = (first, first if same else second)
        return [self.encode(i * SAMPLES + p) for i, p in zip(identities, places, strict=True)]


def find_made(model: Path, size: int | None) -> Made | None:
    """Generated files to try a model with; None for models of other data.

    ``size`` is that of the model's images.
    """
    from qmargin.evaluation.export import recipe_of

    try:
        recipe = recipe_of(model)
    except (QMarginError, OSError, UnicodeDecodeError):
        return None  # a model without a recipe
    data = recipe.data
    world: dict[str, Any] = {"seed": data.options.get("seed", recipe.seed), "split": "test"}
    if data.kind == "people" and size is not None:
        return _people(size, world)
    if data.kind == "voices":
        return _voices(world)
    return None


def _people(size: int, world: dict[str, Any]) -> Made:
    from qmargin.data.images import encode_image
    from qmargin.data.people import People

    people = People(NUM_IDENTITIES, SAMPLES, size=size, **world)
    return Made(
        "person", lambda index: encode_image(people.images(np.array([index]))[0], format="PNG")
    )


def _voices(world: dict[str, Any]) -> Made:
    from qmargin.data.voices import Voices

    return Made("voice", Voices(NUM_IDENTITIES, SAMPLES, longest=4.0, **world).encoded)
