import math

import numpy as np
import pytest

from qmargin.data.rooms import SPEED_OF_SOUND, Room, RoomSimulator, room_response
from qmargin.errors import ConfigError

ROOM = Room((5.0, 4.0, 3.0), (1.0, 1.0, 1.0), (3.0, 2.0, 1.5), reverberation_s=0.3)


def images_by_mirroring(room: Room, *, order: int) -> list[tuple[float, int]]:
    """Distances and reflections of images, made by mirroring at one wall after another."""
    found = {tuple(round(at, 6) for at in room.source): 0}
    frontier = dict(found)
    for turn in range(1, order + 1):
        fresh = {}
        for place in frontier:
            for axis in range(3):
                for wall in (0.0, room.size[axis]):
                    image = list(place)
                    image[axis] = round(2 * wall - image[axis], 6)
                    if tuple(image) not in found and tuple(image) not in fresh:
                        fresh[tuple(image)] = turn
        found.update(fresh)
        frontier = fresh
    return [(math.dist(place, room.microphone), count) for place, count in found.items()]


def test_early_reflections_are_where_mirrors_put_them() -> None:
    seconds = 0.03
    response = room_response(ROOM, seconds=seconds)
    expected = np.zeros(round(seconds * 16000))
    times = np.arange(len(expected))
    for distance, count in images_by_mirroring(ROOM, order=6):
        delay = distance / SPEED_OF_SOUND * 16000
        if distance < seconds * SPEED_OF_SOUND:
            gain = ROOM.reflection**count / (4 * math.pi * distance)
            expected += gain * np.sinc(times - delay)
    assert np.corrcoef(response, expected)[0, 1] > 0.95
    assert np.abs(response).max() == pytest.approx(np.abs(expected).max(), rel=0.1)


def test_nothing_is_heard_before_the_direct_sound() -> None:
    response = room_response(ROOM)
    arrival = math.dist(ROOM.source, ROOM.microphone) / SPEED_OF_SOUND * 16000
    assert abs(np.abs(response).argmax() - arrival) <= 1
    before = response[: int(arrival) - 12]
    assert np.abs(before).max() < 1e-3 * np.abs(response).max()


@pytest.mark.parametrize("time", [0.2, 0.35, 0.5])
def test_sound_fades_in_the_reverberation_time(time: float) -> None:
    """Schroeder's backward integral falls from -5 to -25 dB in about a third of RT60."""
    room = Room((6.0, 5.0, 3.5), (1.5, 2.0, 1.2), (4.0, 3.1, 1.7), reverberation_s=time)
    energy = np.cumsum(room_response(room, seconds=1.5 * time)[::-1].astype(float) ** 2)[::-1]
    level = 10 * np.log10(energy / energy[0])
    fall = (np.argmax(level < -25) - np.argmax(level < -5)) / 16000
    assert 3 * fall == pytest.approx(time, rel=0.3)


def test_there_is_no_offset() -> None:
    response = room_response(ROOM)
    assert abs(response.sum()) < 1e-2 * np.abs(response).sum()


def test_rooms_follow_the_generator() -> None:
    simulator = RoomSimulator()
    first, again = (simulator.draw(np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.dtype == np.float32
    generator = np.random.default_rng(0)
    rooms = [simulator.draw_room(generator) for _ in range(100)]
    assert len({room.size for room in rooms}) == 100
    for room in rooms:
        assert all(3.0 <= side <= 10.0 for side in room.size[:2])
        assert 2.5 <= room.size[2] <= 4.0
        assert 0.15 <= room.reverberation_s <= 0.45
        assert 0.0 <= room.reflection <= 0.99


def test_impossible_rooms_are_refused() -> None:
    with pytest.raises(ConfigError, match="microphone is at"):
        Room((5.0, 4.0, 3.0), (1.0, 1.0, 1.0), (3.0, 4.0, 1.5), reverberation_s=0.3)
    with pytest.raises(ConfigError, match="reverberation_s is 0"):
        Room((5.0, 4.0, 3.0), (1.0, 1.0, 1.0), (3.0, 2.0, 1.5), reverberation_s=0.0)
    with pytest.raises(ConfigError, match=r"length is \(5, 3\)"):
        RoomSimulator(length=(5, 3))


def test_numbered_rooms_are_simulated_once() -> None:
    simulator = RoomSimulator(reverberation_s=(0.15, 0.16), num_rooms=3)
    drawn = [simulator.draw(np.random.default_rng(seed)) for seed in range(20)]
    assert len({id(response) for response in drawn}) == 3
    again = RoomSimulator(reverberation_s=(0.15, 0.16), num_rooms=3)
    np.testing.assert_array_equal(again.draw(np.random.default_rng(7)), drawn[7])
    with pytest.raises(ConfigError, match="num_rooms is -1"):
        RoomSimulator(num_rooms=-1)
