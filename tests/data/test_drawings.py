"""Pictures in memory, and what readings do to them."""

import numpy as np
import pytest

from qmargin.data.drawings import Drawings, warped
from qmargin.data.strokes import StrokeIdentities
from qmargin.errors import ConfigError


def some_drawings(**options: float) -> Drawings:
    strokes = StrokeIdentities(3, 2)
    names = tuple(strokes.sample_id(row) for row in range(len(strokes)))
    return Drawings(strokes.images(np.arange(6)), strokes.labels, names, "strokes", **options)


def test_a_warp_of_nothing_changes_nothing() -> None:
    picture = some_drawings().pictures[0]
    assert np.array_equal(warped(picture, 0.0, seed=7), picture)


def test_a_warp_follows_from_the_seed_and_keeps_most_of_the_ink() -> None:
    drawings = some_drawings(warp=1.0)
    first, again, other = (drawings.read(0, seed)[0] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    plain = some_drawings().read(0, 1)[0]
    ink = [float(drawings.read(0, seed)[0].sum() / plain.sum()) for seed in range(50)]
    assert 0.85 < np.mean(ink) < 1.1
    assert np.std(ink) > 0.01


def test_a_small_warp_moves_the_middle_of_the_ink_little() -> None:
    picture = np.zeros((33, 33), np.uint8)
    picture[14:19, 14:19] = 255
    places = np.array([_middle(warped(picture, 1.0, seed)) for seed in range(300)])
    assert np.abs(places.mean(0) - 16.0).max() < 0.3
    assert 0.5 < places.std(0).max() < 2.0  # three percent of a side, and stretches


def _middle(picture: np.ndarray) -> tuple[float, float]:
    weights = picture / picture.sum()
    return tuple(float((weights.sum(axis) * np.arange(33)).sum()) for axis in (1, 0))


def test_quarter_turns_are_identities_of_their_own() -> None:
    drawings = some_drawings().with_turns()
    assert drawings.num_classes == 12
    assert len(set(drawings.names)) == len(drawings) == 24
    assert np.array_equal(drawings.pictures[6], np.rot90(drawings.pictures[0]))
    assert drawings.labels[6:8].tolist() == [3, 3]


def test_a_warp_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="warp is nan"):
        some_drawings(warp=float("nan"))
