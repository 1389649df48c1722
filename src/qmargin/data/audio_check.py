"""What is wrong with a collection of audio, before days of training are spent on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from qmargin.data.audio_collection import AudioCollection
from qmargin.data.audio_index import AudioRecord, measure
from qmargin.errors import DataError
from qmargin.files import Progress

LEAST_SECONDS = 1.0
MOST_CLIPPED = 0.001  # share of the samples
LEAST_RMS = 1e-4  # 80 dB below full scale
_SHOWN = 5


@dataclass(frozen=True)
class AudioReport:
    """Utterances by what is wrong with them, as pairs of a key and a remark.

    Attributes:
        num_utterances: In all.
        num_speakers: In all.
        hours: Of what can be decoded.
        sample_rates: Utterances by their rate.
        unreadable: Cannot be decoded.
        changed: Have other bytes than when they were indexed.
        duplicates: Have the same bytes as another one.
        clipped: Have many samples at full scale.
        silent: Have next to nothing in them.
        short: Are shorter than a second.
        lonely: Speakers with one utterance.
    """

    num_utterances: int
    num_speakers: int
    hours: float
    sample_rates: dict[int, int]
    unreadable: tuple[tuple[str, str], ...]
    changed: tuple[tuple[str, str], ...]
    duplicates: tuple[tuple[str, str], ...]
    clipped: tuple[tuple[str, str], ...]
    silent: tuple[tuple[str, str], ...]
    short: tuple[tuple[str, str], ...]
    lonely: tuple[tuple[str, str], ...]

    @property
    def has_errors(self) -> bool:
        """Whether something cannot be trained on, rather than being merely odd."""
        return bool(self.unreadable or self.changed)

    def lines(self) -> list[str]:
        """The report as text, the worst first."""
        rates = ", ".join(f"{rate} Hz: {count:,}" for rate, count in self.sample_rates.items())
        lines = [
            f"{self.num_utterances:,} utterances of {self.num_speakers:,} speakers, "
            f"{self.hours:,.2f} hours ({rates or 'none readable'})"
        ]
        for name in ("unreadable", "changed", "duplicates", "clipped", "silent", "short", "lonely"):
            found: tuple[tuple[str, str], ...] = getattr(self, name)
            lines.append(f"{name}: {len(found):,}")
            lines += [f"  {key}: {remark}" for key, remark in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  and {len(found) - _SHOWN:,} more")
        return lines


def check_audio(
    collection: AudioCollection,
    *,
    index: Sequence[AudioRecord] | None = None,
    progress: Progress | None = None,
) -> AudioReport:
    """Read and decode every utterance, and say what is wrong.

    Args:
        collection: What to check.
        index: Records of an earlier reading; what has other bytes now is reported.
        progress: Called with utterances done and utterances in all.
    """
    if index is not None and len(index) != len(collection):
        raise DataError(
            f"the index has {len(index)} utterances and the collection {len(collection)}; index "
            "it again"
        )
    records = []
    for number in range(len(collection)):
        if progress is not None:
            progress(number, len(collection))
        records.append(measure(collection, number))
    if progress is not None:
        progress(len(collection), len(collection))
    return report_of(collection, records, before=index)


def report_of(
    collection: AudioCollection,
    records: Sequence[AudioRecord],
    *,
    before: Sequence[AudioRecord] | None = None,
) -> AudioReport:
    """The report on records that were measured, in the order of the collection."""
    good = [record for record in records if not record.error]
    counts = Counter(collection.labels.tolist())
    return AudioReport(
        num_utterances=len(collection),
        num_speakers=collection.num_classes,
        hours=sum(record.seconds for record in good) / 3600.0,
        sample_rates=dict(sorted(Counter(record.sample_rate for record in good).items())),
        unreadable=tuple((record.key, record.error) for record in records if record.error),
        changed=_changed(records, records if before is None else before),
        duplicates=_duplicates(collection, records),
        clipped=tuple(
            (record.key, f"{100 * record.clipped:.2f} % of the samples are at full scale")
            for record in good
            if record.clipped > MOST_CLIPPED
        ),
        silent=tuple(
            (record.key, f"RMS is {record.rms:.1e} of full scale")
            for record in good
            if record.rms < LEAST_RMS
        ),
        short=tuple(
            (record.key, f"{record.seconds:.2f} s")
            for record in good
            if record.seconds < LEAST_SECONDS
        ),
        lonely=tuple(
            (collection.speakers[label], "one utterance")
            for label, count in sorted(counts.items())
            if count == 1
        ),
    )


def _changed(
    records: Sequence[AudioRecord], before: Sequence[AudioRecord]
) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            now.key,
            f"checksum {then.checksum:08x} of {then.size:,} bytes when it was indexed, "
            f"{now.checksum:08x} of {now.size:,} now",
        )
        for now, then in zip(records, before, strict=True)
        if (now.size, now.checksum) != (then.size, then.checksum)
    )


def _duplicates(
    collection: AudioCollection, records: Sequence[AudioRecord]
) -> tuple[tuple[str, str], ...]:
    """Same bytes, compared in full where size and checksum agree; speakers may differ."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, record in enumerate(records):
        if record.size:
            groups[record.size, record.checksum].append(number)
    found = []
    for numbers in groups.values():
        for number in numbers[1:]:
            first = numbers[0]
            if collection.read(number) != collection.read(first):
                continue
            names = [collection.speakers[collection.labels[item]] for item in (first, number)]
            other = "" if names[0] == names[1] else f", under another speaker ({names[0]!r})"
            found.append((number, f"the same bytes as {records[first].key}{other}"))
    return tuple((records[number].key, remark) for number, remark in sorted(found))
