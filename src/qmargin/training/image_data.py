"""Image data of a recipe: what is stored, and what is done to a face when it is read."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmargin.errors import ConfigError
from qmargin.training.fields import as_type, check_known

if TYPE_CHECKING:
    from qmargin.data.faces import FaceImages
    from qmargin.training.parts import DataPart

STORED: dict[str, type] = {"index": str, "verify": bool, "decoder": str, "channels": str}
"""Options of ``qmargin.data.open.open_images``; all others are of ``FaceImages``."""


def open_images(part: DataPart) -> FaceImages:
    """The images of a data part, for a loader.

    ``options`` may have ``index``, ``verify``, ``decoder`` and ``channels`` of ``open_dataset``,
    ``size`` of ``FaceImages``, and what ``FaceAugmentation`` takes: ``flip``, ``photometric`` and
    others. An index that is missing is built first, which reads all data once: ``qmargin data
    index`` does it before a run of several ranks.

    Raises:
        ConfigError: There is nothing at the path, or an option is unknown.
        DataError: What is there cannot be read.
    """
    from qmargin.data.faces import FaceAugmentation, FaceImages
    from qmargin.data.open import open_images as open_stored

    looks = [field.name for field in fields(FaceAugmentation)]
    for name in part.options:
        check_known(name, [*STORED, "size", *looks], "an option of images data")
    assert part.path is not None  # the part has checked it
    path = Path(part.path).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data.path is {part.path!r}, where there is nothing; say where the images are with "
            "--set data.path=DIR"
        )
    given: dict[str, Any] = dict(part.options)
    stored = {
        name: as_type(given[name], kind, f"data.options.{name}")
        for name, kind in STORED.items()
        if name in given
    }
    size = as_type(given.get("size", 112), int, "data.options.size")
    augmentation = FaceAugmentation(**{name: given[name] for name in looks if name in given})
    images = open_stored(path, index_dir=part.index_dir, **stored)
    return FaceImages(images, size, augmentation)
