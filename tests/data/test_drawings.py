"""Pictures in memory, and what readings do to them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qmargin.data.drawings import Drawings, variants_of, warped
from qmargin.data.loader import build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.strokes import StrokeIdentities, moved
from qmargin.errors import ConfigError, DataError, ShapeError


def some_drawings(**options: int) -> Drawings:
    strokes = StrokeIdentities(3, 2)
    names = tuple(strokes.sample_id(row) for row in range(len(strokes)))
    return Drawings(strokes.images(np.arange(6)), strokes.labels, names, "strokes", **options)


def test_a_warp_follows_from_the_seed_and_keeps_most_of_the_ink() -> None:
    picture = some_drawings().pictures[0]
    first, again, other = (warped(picture, 1.0, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    ink = [warped(picture, 1.0, seed).sum() / picture.sum() for seed in range(50)]
    assert 0.85 < np.mean(ink) < 1.1
    assert np.std(ink) > 0.01


def test_mirror_images_are_identities_of_their_own() -> None:
    drawings = some_drawings().with_turns(has_mirrors=True)
    assert drawings.num_classes == 24
    assert len(set(drawings.names)) == len(drawings) == 48
    assert np.array_equal(drawings.pictures[24], drawings.pictures[0][:, ::-1])
    assert np.array_equal(drawings.pictures[30], np.rot90(drawings.pictures[0][:, ::-1]))


def test_copies_that_look_alike_are_one_identity() -> None:
    ring, bar, hook, blank = np.zeros((4, 32, 32), np.uint8)
    ring[8:24, 8:24] = 255
    ring[11:21, 11:21] = 0
    bar[4:28, 14:18] = 255
    hook[4:28, 6:10] = hook[24:28, 6:20] = 255
    pictures = np.stack([ring, bar, hook, blank])[[2, 0, 1, 0, 2, 1, 3]]
    labels = np.array([2, 0, 1, 0, 2, 1, 3])  # in no order
    drawings = Drawings(pictures, labels, tuple("abcdefg"), "nowhere")
    turned = drawings.with_turns(has_mirrors=True, alike=0.9)
    kept = dict(zip(turned.names, turned.labels, strict=True))
    assert sorted(name for name in kept if name[0] == "b") == ["b-turned-0"]
    assert sorted(name for name in kept if name[0] == "c") == ["c-turned-0", "c-turned-1"]
    assert sum(name[0] == "a" for name in kept) == 8
    assert sum(name[0] == "g" for name in kept) == 8  # nothing to compare
    assert sorted(set(kept.values())) == list(range(turned.num_classes))
    assert kept["a-turned-3"] == kept["e-turned-3"] != kept["a-mirrored-turned-3"]
    every = drawings.with_turns(has_mirrors=True)
    for name, label, picture in zip(turned.names, turned.labels, turned.pictures, strict=True):
        row = every.names.index(name)
        assert np.array_equal(picture, every.pictures[row])
        same = turned.labels == label
        assert {turned.names[index].partition("-")[2] for index in np.flatnonzero(same)} == {
            name.partition("-")[2]
        }


def test_identities_that_pixels_cannot_tell_apart_are_left_out() -> None:
    """Of strokes and two copies of one of them, written by the same hand: one copy is kept."""
    strokes = StrokeIdentities(12, 8, size=32, seed=3)
    pictures = strokes.images(np.arange(96))
    twin = np.stack([warped(picture, 0.3, seed) for seed, picture in enumerate(pictures[:8])])
    labels = np.append(strokes.labels, np.full(8, 12))
    names = tuple(f"row-{row}" for row in range(104))
    drawings = Drawings(np.concatenate([pictures, twin]), labels, names, "here")
    kept = drawings.distinct(0.5)
    assert len({0, 12} & set(kept)) == 1 and len(kept) >= 11
    assert drawings.distinct(0.05) == sorted(drawings.distinct(0.05))
    assert len(drawings.distinct(0.05)) <= len(kept)  # a lower standard leaves more out
    apart = Drawings(pictures, strokes.labels, names[:96], "here").distinct(0.5)
    assert apart == list(range(12))


def test_look_alikes_need_two_pictures_of_each_and_a_share() -> None:
    drawings = some_drawings()
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(ConfigError, match="distinct is"):
            drawings.distinct(share)
    lone = Drawings(drawings.pictures[:1], drawings.labels[:1] * 0, drawings.names[:1], "here")
    with pytest.raises(DataError, match="alone in its identity"):
        lone.distinct(0.5)


def test_variants_of_a_picture_follow_from_its_number() -> None:
    pictures = some_drawings().pictures
    drawn = variants_of(pictures, 1.0, 4)
    assert drawn.shape == (6, 4, 32, 32)
    assert np.array_equal(variants_of(pictures[2:5], 1.0, 4, first=2), drawn[2:5])
    assert len({variant.tobytes() for variant in drawn.reshape(24, 32, 32)}) == 24


def test_a_reading_takes_a_variant_and_moves_it() -> None:
    drawings = some_drawings(shift=2)
    variants = variants_of(drawings.pictures, 1.0, 4)
    varied = replace(drawings, variants=variants)
    for number in range(4):
        seed = (number << 32) + 7
        image, label = varied.read(3, seed)
        expected = torch.from_numpy(moved(variants[3:4, number], 2, [seed])[0]) / 255.0
        torch.testing.assert_close(image[0], expected)
        assert label == drawings.labels[3]
    assert np.array_equal(varied.images(np.arange(6)), drawings.pictures)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_read_other_variants_in_any_process(num_workers: int) -> None:
    drawings = some_drawings().with_turns()
    varied = replace(drawings, variants=variants_of(drawings.pictures, 1.0, 20))
    order = GlobalOrder(len(varied), seed=0, batch_size=24)
    with build_loader(varied, order, stop_step=5, num_workers=num_workers) as stream:
        inputs = [
            batch.inputs[np.argsort(order.batch(batch.step))].numpy().copy() for batch in stream
        ]
    seen = [len({epoch[row].tobytes() for epoch in inputs}) for row in range(24)]
    assert np.mean(seen) > 4.0  # of 5 epochs; two may meet by chance
    pixels = np.rint(np.stack(inputs)[:, :, 0] * 255.0).astype(np.uint8)
    for row, variants in enumerate(varied.variants):  # of its own picture, turned as it is
        own = {variant.tobytes() for variant in variants}
        assert {picture.tobytes() for picture in pixels[:, row]} <= own


def test_a_warp_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="warp is nan"):
        variants_of(some_drawings().pictures, float("nan"), 1)


@pytest.mark.parametrize("shape", [(5, 4, 32, 32), (6, 0, 32, 32), (6, 4, 32, 31), (6, 32, 32)])
def test_variants_of_other_pictures_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"give uint8 \[6, v, 32, 32\]"):
        replace(some_drawings(), variants=np.zeros(shape, np.uint8))


def test_a_reading_of_ones_own_is_what_batches_have() -> None:
    class Inverted(StrokeIdentities):
        def read(self, index: int, seed: int) -> tuple[torch.Tensor, int]:
            image, label = super().read(index, seed)
            return 1.0 - image, label

    dataset, order = Inverted(4, 2), GlobalOrder(8, seed=0, batch_size=8)
    with build_loader(dataset, order) as batches:
        assert float(next(batches).inputs.mean()) > 0.5  # a drawing is mostly blank
