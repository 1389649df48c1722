"""A small model and pictures for it."""

from pathlib import Path

import pytest

from helpers.model_directories import make_model, pictures, write_pictures


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    """20 pictures of 10 identities."""
    write_pictures(tmp_path / "faces", pictures(20))
    return tmp_path / "faces"
