"""What is wrong with a collection of audio, before days of training are spent on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from qmargin.data.audio_collection import AudioCollection
from qmargin.data.audio_index import AudioRecord, measure_all
from qmargin.errors import DataError
from qmargin.files import Progress

LEAST_SECONDS = 1.0
MOST_CLIPPED = 0.001  # share of the samples
LEAST_RMS = 1e-4  # 80 dB below full scale
_SHOWN = 3


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
        conflicts: Of these, those under two speakers: one of the labels is wrong.
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
    conflicts: tuple[tuple[str, str], ...]
    clipped: tuple[tuple[str, str], ...]
    silent: tuple[tuple[str, str], ...]
    short: tuple[tuple[str, str], ...]
    lonely: tuple[tuple[str, str], ...]

    @property
    def has_errors(self) -> bool:
        """Whether something cannot be trained on, rather than being merely odd."""
        return bool(self.unreadable or self.changed or self.conflicts)

    def rows(self) -> list[tuple[str, int, str]]:
        """What was looked for, how often it was found, and examples; the worst first."""
        titles = {
            "unreadable": "cannot be read",
            "changed": "changed since indexing",
            "conflicts": "duplicates of other speakers",
            "duplicates": "duplicates",
            "clipped": "clipped",
            "silent": "silent",
            "short": f"shorter than {LEAST_SECONDS:g} s",
            "lonely": "speakers with one utterance",
        }
        rows = []
        for name, title in titles.items():
            found: tuple[tuple[str, str], ...] = getattr(self, name)
            examples = "; ".join(f"{key}: {remark}" for key, remark in found[:_SHOWN])
            rows.append((title, len(found), examples + ("; ..." if len(found) > _SHOWN else "")))
        return rows


def check_audio(
    collection: AudioCollection,
    *,
    index: Sequence[AudioRecord] | None = None,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> AudioReport:
    """Read and decode every utterance, and say what is wrong.

    Args:
        collection: What to check.
        index: Records of an earlier reading; what has other bytes now is reported.
        num_threads: That decode at once.
        progress: Called with utterances done and utterances in all.
    """
    if index is not None and len(index) != len(collection):
        raise DataError(
            f"the index has {len(index)} utterances and the collection {len(collection)}; index "
            "it again"
        )
    records = list(measure_all(collection, num_threads=num_threads, progress=progress))
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
    twins = _duplicates(collection, records)
    return AudioReport(
        num_utterances=len(collection),
        num_speakers=collection.num_classes,
        hours=sum(record.seconds for record in good) / 3600.0,
        sample_rates=dict(sorted(Counter(record.sample_rate for record in good).items())),
        unreadable=tuple((record.key, record.error) for record in records if record.error),
        changed=_changed(records, records if before is None else before),
        duplicates=tuple((key, remark) for key, remark, _ in twins),
        conflicts=tuple((key, remark) for key, remark, is_other in twins if is_other),
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
) -> list[tuple[str, str, bool]]:
    """Keys with the same bytes as an earlier one, a remark, and whether the speakers differ.

    Bytes are compared in full where size and checksum agree.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, record in enumerate(records):
        if record.size:
            groups[record.size, record.checksum].append(number)
    found = []
    for first, *others in groups.values():
        for number in others:
            if collection.read(number) != collection.read(first):
                continue
            names = [collection.class_name(collection.labels[item]) for item in (first, number)]
            is_other = names[0] != names[1]
            remark = f"the same bytes as {records[first].key}"
            remark += f", under another speaker ({names[0]!r})" if is_other else ""
            found.append((number, remark, is_other))
    return [(records[number].key, remark, is_other) for number, remark, is_other in sorted(found)]
