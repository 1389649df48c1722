"""Model directories with small networks, and pictures for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from qmargin.models import create_backbone
from qmargin.models.directory import ModelCard, write_model

SIZE = 16


def make_model(directory: Path, *, seed: int = 0, name: str = "small") -> ModelCard:
    """A model of ``16 x 16`` images in a new directory."""
    torch.manual_seed(seed)
    backbone = create_backbone("small_conv", embedding_dim=8, width=4)
    card = ModelCard(name, "images", (3, SIZE, SIZE), "small_conv", 8, options={"width": 4})
    return write_model(directory, weights=backbone.state_dict(), card=card, recipe="name: made\n")


def pictures(count: int, *, seed: int = 0, size: int = SIZE) -> NDArray[np.uint8]:
    """Random images ``[count, size, size, 3]``."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def write_pictures(folder: Path, images: NDArray[np.uint8]) -> list[Path]:
    """PNG files in one folder per identity, two images of each."""
    paths = []
    for number, image in enumerate(images):
        path = folder / f"id{number // 2:02d}" / f"{number % 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        paths.append(path)
    return paths
