"""Decoded samples of a small collection, so that an epoch reads no files."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from qmargin.data.audio import AudioInfo, Samples, Span, change_rate, played_rate
from qmargin.data.audio_collection import AudioCollection
from qmargin.errors import ConfigError, CorruptSample

MAX_BYTES = 16 << 30
_MOST_THREADS = 8
_BLOCK = 256  # utterances between two looks at the memory


class AudioMemory:
    """Every utterance of a collection at its sample rate; forked workers share the arrays.

    What cannot be decoded raises when it is asked for, as it does from its file, so that it is
    counted and replaced in the same way.

    Args:
        collection: What to decode.
        max_bytes: More than this is refused.

    Raises:
        ConfigError: The samples take more than ``max_bytes``.
    """

    def __init__(self, collection: AudioCollection, *, max_bytes: int = MAX_BYTES) -> None:
        self.sample_rate = collection.sample_rate
        self._held: list[Samples | str] = []
        self.nbytes = 0

        def decoded(index: int) -> Samples | str:
            try:
                return collection[index][0]
            except CorruptSample as error:
                return str(error)

        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            for start in range(0, len(collection), _BLOCK):
                block = range(start, min(start + _BLOCK, len(collection)))
                self._held += pool.map(decoded, block)
                self.nbytes = sum(item.nbytes for item in self._held if not isinstance(item, str))
                if self.nbytes > max_bytes:
                    raise ConfigError(
                        f"{len(self._held):,} of {len(collection):,} utterances take "
                        f"{self.nbytes / 2**30:.1f} GiB and at most {max_bytes / 2**30:.1f} are "
                        "held; set in_memory to false"
                    )

    def __len__(self) -> int:
        return len(self._held)

    def cut(self, index: int, *, span: Span, speed: float = 1.0) -> Samples:
        """A span of an utterance, as ``decode_audio`` gives it from a file of this rate.

        Raises:
            CorruptSample: It could not be decoded.
        """
        samples = self._held[index]
        if isinstance(samples, str):
            raise CorruptSample(samples)
        info = AudioInfo(self.sample_rate, 1, len(samples), "memory")
        start, stop = span(info)
        return change_rate(samples[start:stop], played_rate(info, speed), self.sample_rate)
