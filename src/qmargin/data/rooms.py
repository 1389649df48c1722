"""Room impulse responses by the image-source method, for reverberation without any corpus.

A sound between flat walls reaches the microphone as if it came from mirror images of its source,
each weaker by the walls it met and by its distance (Allen and Berkley, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError

SPEED_OF_SOUND = 343.0  # m/s
_OVERSAMPLING = 8  # images fall on a grid this much finer, then the response is low-passed
_HIGH_PASS_HZ = 50.0  # mirrors of equal sign add up to an offset that no room has
MOST_ROOMS = 4096  # that are kept, at about 20 kB each
_WALL_GAP = 0.3  # metres that sources and microphones keep from walls


@dataclass(frozen=True)
class Room:
    """A box with one source and one microphone.

    Attributes:
        size: Length, width and height in metres.
        source: Position in it.
        microphone: Position in it.
        reverberation_s: Time in which sound fades by 60 dB (RT60), after Eyring's formula.
    """

    size: tuple[float, float, float]
    source: tuple[float, float, float]
    microphone: tuple[float, float, float]
    reverberation_s: float

    def __post_init__(self) -> None:
        for name in ("source", "microphone"):
            place = getattr(self, name)
            if not all(0.0 < at < edge for at, edge in zip(place, self.size, strict=True)):
                raise ConfigError(
                    f"{name} is at {place}; it must be inside a room of {self.size} metres"
                )
        if not 0.0 < self.reverberation_s < math.inf:
            raise ConfigError(f"reverberation_s is {self.reverberation_s}; it must be above 0")

    @property
    def reflection(self) -> float:
        """Share of the pressure that every wall sends back, at most 0.99.

        Eyring: ``RT60 = 0.161 V / (-S ln(1 - a))`` with volume, surface and absorbed share of the
        energy; the pressure's share is ``sqrt(1 - a)``.
        """
        x, y, z = self.size
        surface = 2.0 * (x * y + y * z + x * z)
        return min(0.99, math.exp(-0.0805 * x * y * z / (surface * self.reverberation_s)))


def room_response(
    room: Room, *, sample_rate: int = 16000, seconds: float | None = None
) -> NDArray[np.float32]:
    """Impulse response ``[n]`` of a room, starting when the source sounds.

    Args:
        room: Size, places and reverberation.
        sample_rate: Of the response.
        seconds: Length; the room's reverberation time without it.

    Returns:
        Pressure, with the direct sound at ``distance / 343 m/s`` and of height about
        ``1 / (4 pi distance)``.

    Examples:
        >>> room = Room((5, 4, 3), source=(1, 1, 1), microphone=(3, 2, 1.5), reverberation_s=0.3)
        >>> response = room_response(room)
        >>> len(response), abs(int(np.abs(response).argmax()) - round(2.291 / 343 * 16000)) <= 1
        (4800, True)
    """
    seconds = room.reverberation_s if seconds is None else seconds
    num_samples = max(1, round(seconds * sample_rate))
    distance, gain = _images(room, reach=seconds * SPEED_OF_SOUND)
    fine_rate = sample_rate * _OVERSAMPLING
    places = np.rint(distance * (fine_rate / SPEED_OF_SOUND)).astype(np.int64)
    fine = np.bincount(places, weights=gain, minlength=num_samples * _OVERSAMPLING)
    return _low_passed(fine[: num_samples * _OVERSAMPLING].astype(np.float64), sample_rate)


def _images(room: Room, *, reach: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances and gains of all images within ``reach`` metres of the microphone.

    Along one axis the images of a source at ``s`` in a box of length ``L`` are at ``2 n L + s``
    after ``2 |n|`` reflections and at ``2 n L - s`` after ``|2 n - 1|``.
    """
    squares, bounces = [], []
    for size, source, microphone in zip(room.size, room.source, room.microphone, strict=True):
        turns = np.arange(-math.ceil(reach / (2 * size)) - 1, math.ceil(reach / (2 * size)) + 2)
        offsets = np.concatenate([2 * turns * size + source, 2 * turns * size - source])
        counts = np.concatenate([2 * np.abs(turns), np.abs(2 * turns - 1)])
        square = (offsets - microphone) ** 2
        near = square <= reach**2
        squares.append(square[near])
        bounces.append(counts[near])
    flat = squares[0][:, None] + squares[1][None, :]  # images in the plane of the floor
    count = bounces[0][:, None] + bounces[1][None, :]
    inside = flat <= reach**2
    flat, count = flat[inside], count[inside]
    total = (flat[:, None] + squares[2][None, :]).ravel()
    walls = (count[:, None] + bounces[2][None, :]).ravel()
    inside = total <= reach**2
    distance = np.sqrt(total[inside])
    table = room.reflection ** np.arange(int(walls.max(initial=0)) + 1)
    return distance, table[walls[inside]] / (4.0 * math.pi * np.maximum(distance, 0.01))


def _low_passed(fine: NDArray[np.float64], sample_rate: int) -> NDArray[np.float32]:
    from scipy.signal import butter, resample_poly, sosfilt

    coarse = resample_poly(fine, 1, _OVERSAMPLING) * _OVERSAMPLING  # heights survive the filter
    sections = butter(2, _HIGH_PASS_HZ, "highpass", fs=sample_rate, output="sos")
    filtered: NDArray[np.float64] = sosfilt(sections, coarse)
    return filtered.astype(np.float32)


@dataclass(frozen=True)
class RoomSimulator:
    """Draws rooms and simulates them: an endless set of impulse responses, or a numbered one.

    Args:
        length: Range of length and width in metres.
        height: Range of the height.
        reverberation_s: Range of RT60.
        sample_rate: Of the responses.
        num_rooms: Draw from this many rooms, each of which is simulated once in a process and then
            kept; zero for a new room every time, which costs tens of milliseconds.

    Examples:
        >>> simulator = RoomSimulator(reverberation_s=(0.2, 0.3))
        >>> response = simulator.draw(np.random.default_rng(0))
        >>> 0.2 <= len(response) / 16000 <= 0.3
        True
    """

    length: tuple[float, float] = (3.0, 10.0)
    height: tuple[float, float] = (2.5, 4.0)
    reverberation_s: tuple[float, float] = (0.15, 0.45)
    sample_rate: int = 16000
    num_rooms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_rooms <= MOST_ROOMS:
            raise ConfigError(f"num_rooms is {self.num_rooms}; it must be in [0, {MOST_ROOMS:,}]")
        for name, low in (("length", 1.0), ("height", 1.0), ("reverberation_s", 0.01)):
            given: Sequence[float] = getattr(self, name)
            if len(given) != 2 or not low <= given[0] <= given[1] < math.inf:
                raise ConfigError(f"{name} is {given}; give two rising numbers from {low} on")

    def draw(self, generator: np.random.Generator) -> NDArray[np.float32]:
        """The response of a room that depends on the generator alone."""
        if self.num_rooms:
            return _numbered_response(self, int(generator.integers(self.num_rooms)))
        return room_response(self.draw_room(generator), sample_rate=self.sample_rate)

    def draw_room(self, generator: np.random.Generator) -> Room:
        """A room with a source and a microphone somewhere in it."""
        width, depth = generator.uniform(*self.length, size=2)
        size = (float(width), float(depth), float(generator.uniform(*self.height)))
        places = [
            tuple(float(generator.uniform(_WALL_GAP, edge - _WALL_GAP)) for edge in size)
            for _ in range(2)
        ]
        (sx, sy, sz), (mx, my, mz) = places
        time = float(generator.uniform(*self.reverberation_s))
        return Room(size, (sx, sy, sz), (mx, my, mz), reverberation_s=time)


@lru_cache(maxsize=MOST_ROOMS)
def _numbered_response(simulator: RoomSimulator, number: int) -> NDArray[np.float32]:
    """The response of a room that follows from its number; read it only, it is shared."""
    room = simulator.draw_room(np.random.default_rng(number))
    return room_response(room, sample_rate=simulator.sample_rate)
