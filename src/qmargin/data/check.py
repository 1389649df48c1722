"""Check every sample of a dataset before training: checksums, decoding, identities, loudness."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qmargin.data.build import in_order, measure_recording
from qmargin.data.images import decode_image
from qmargin.data.stored import AudioDataset, ImageDataset
from qmargin.errors import CorruptSample
from qmargin.files import Progress

MOST_EXAMPLES: Final = 20
LEAST_SECONDS: Final = 1.0
MOST_CLIPPED: Final = 0.001  # share of the samples
LEAST_RMS: Final = 1e-4  # 80 dB below full scale
_SHOWN: Final = 3
_BLOCK: Final = 64  # samples of one task of a thread
_CHUNK: Final = 1 << 20
_Dataset = ImageDataset | AudioDataset


@dataclass
class Findings:
    """Samples or identities with the same finding."""

    count: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)  # the first: name and remark

    def add(self, name: str, remark: str) -> None:
        """Count one more."""
        self.count += 1
        if self.count <= MOST_EXAMPLES:
            self.examples.append((name, remark))


@dataclass
class DataReport:
    """Report of a check."""

    kind: str  # "images" or "recordings"
    num_samples: int
    num_classes: int
    num_empty: int = 0  # identities without a sample
    corrupt: Findings = field(default_factory=Findings)  # cannot be read or decoded
    changed: Findings = field(default_factory=Findings)  # changed since indexing
    conflicts: Findings = field(default_factory=Findings)  # duplicates under two identities
    duplicates: Findings = field(default_factory=Findings)  # bytes of an earlier sample
    single: Findings = field(default_factory=Findings)  # identities with one sample
    clipped: Findings = field(default_factory=Findings)
    silent: Findings = field(default_factory=Findings)
    short: Findings = field(default_factory=Findings)
    formats: Counter[str] = field(default_factory=Counter)  # sizes of pictures, or sample rates
    hours: float = 0.0  # of recordings
    notes: tuple[str, ...] = ()  # what was left out of the index

    @property
    def is_good(self) -> bool:
        """Whether nothing is damaged and no label contradicts another."""
        return not (self.corrupt.count or self.changed.count or self.conflicts.count)

    def rows(self) -> list[tuple[str, str, str]]:
        """Findings with their counts and examples, the worst first."""
        formats = [f"{name}: {count:,}" for name, count in self.formats.most_common()]
        rows = [
            ("samples", f"{self.num_samples:,}", _first(formats)),
            ("identities", f"{self.num_classes:,}", ""),
            ("identities without a sample", f"{self.num_empty:,}", ""),
        ]
        titles = {
            "cannot be read": self.corrupt,
            "changed since indexing": self.changed,
            "duplicates of other identities": self.conflicts,
            "duplicates": self.duplicates,
            "identities with one sample": self.single,
        }
        if self.kind == "recordings":
            rows.append(("hours", f"{self.hours:,.2f}", ""))
            titles |= {"clipped": self.clipped, "silent": self.silent}
            titles[f"shorter than {LEAST_SECONDS:g} s"] = self.short
        for title, found in titles.items():
            examples = [f"{sample}: {remark}" for sample, remark in found.examples]
            rows.append((title, f"{found.count:,}", _first(examples)))
        return rows + [("note", "", note) for note in self.notes]


def _first(texts: list[str]) -> str:
    return "; ".join(texts[:_SHOWN]) + ("; ..." if len(texts) > _SHOWN else "")


@dataclass
class _Outcome:
    """Findings for one sample."""

    length: int = 0
    checksum: int = 0
    change: str = ""
    error: str = ""
    format: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def check_data(
    dataset: ImageDataset | AudioDataset, *, num_threads: int = 2, progress: Progress | None = None
) -> DataReport:
    """Read and decode every sample of an index and compare it with its checksum.

    Recordings of an index that was built just now are not decoded a second time. Of an index that
    ``open_index`` keeps with ``keep_changed``, changes in place are found.
    """
    report = DataReport(
        dataset.index.kind, len(dataset), dataset.num_classes, notes=dataset.index.notes
    )
    contents = np.zeros(len(dataset), dtype=np.uint64)
    for row, outcome in enumerate(_outcomes(dataset, num_threads)):
        contents[row] = outcome.checksum << 32 | outcome.length
        _add(report, dataset.sample_id(row), outcome)
        if progress is not None and row % _BLOCK == 0:
            progress(row, len(dataset))
    _add_duplicates(report, dataset, contents)
    counts = np.zeros(dataset.num_classes, dtype=np.int64)
    for start in range(0, len(dataset), _CHUNK):
        block = dataset.labels[start : start + _CHUNK]
        counts += np.bincount(block, minlength=dataset.num_classes)
    report.num_empty = int(np.count_nonzero(counts == 0))
    for label in np.flatnonzero(counts == 1).tolist():
        report.single.add(dataset.class_name(label), "one sample")
    return report


def _add(report: DataReport, name: str, outcome: _Outcome) -> None:
    if outcome.change:
        report.changed.add(name, outcome.change)
    if outcome.error:
        report.corrupt.add(name, outcome.error)
        return
    report.formats[outcome.format] += 1
    if not outcome.values:
        return
    values = outcome.values
    seconds = values["num_samples"] / values["sample_rate"]
    report.hours += seconds / 3600.0
    if values["clipped"] > MOST_CLIPPED:
        share = 100 * values["clipped"]
        report.clipped.add(name, f"{share:.2f} % of the samples are at full scale")
    if values["rms"] < LEAST_RMS:
        report.silent.add(name, f"RMS is {values['rms']:.1e} of full scale")
    if seconds < LEAST_SECONDS:
        report.short.add(name, f"{seconds:.2f} s")


def _outcomes(dataset: _Dataset, num_threads: int) -> Iterator[_Outcome]:
    """Outcomes in the order of the samples; a few blocks ahead, so that memory stays small."""
    count = len(dataset)
    if isinstance(dataset, AudioDataset) and dataset.index.is_new:
        yield from (_indexed(dataset, row) for row in range(count))
        return
    blocks = (range(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))
    for outcomes in in_order(
        lambda rows: [_outcome(dataset, row) for row in rows], blocks, num_threads
    ):
        yield from outcomes


def _outcome(dataset: _Dataset, row: int) -> _Outcome:
    try:
        data = dataset.stored(row)
    except CorruptSample as error:
        return _Outcome(error=str(error))
    outcome = _Outcome(len(data), zlib.crc32(data))
    try:
        dataset.check(row, data)
    except CorruptSample as error:
        outcome.change = str(error)
    try:
        if isinstance(dataset, AudioDataset):
            outcome.values = measure_recording(data)
            outcome.format = f"{outcome.values['sample_rate']:,} Hz"
        else:
            height, width = decode_image(data, decoder=dataset.decoder).shape[:2]
            outcome.format = f"{width} x {height}"
    except CorruptSample as error:
        outcome.error = str(error)
    return outcome


def _indexed(dataset: AudioDataset, row: int) -> _Outcome:
    """The outcome that an index was built from."""
    errors = dataset.index.texts("error")
    names = ("length", "checksum", "sample_rate", "num_samples", "rms", "clipped")
    values = {name: dataset.index.columns[name][row].item() for name in names}
    return _Outcome(
        values["length"],
        values["checksum"],
        error="" if errors is None else errors[row],
        format=f"{values['sample_rate']:,} Hz",
        values=values,
    )


def _add_duplicates(report: DataReport, dataset: _Dataset, contents: NDArray[np.uint64]) -> None:
    """Pair each sample with the first that has the same bytes.

    Samples with the same content (checksum and length; zero if unreadable) are read and compared.
    """
    order = np.argsort(contents, kind="stable")
    starts = np.flatnonzero(np.diff(contents[order], prepend=contents[order[:1]] + np.uint64(1)))
    ends = np.append(starts[1:], len(order))
    pairs = []
    for place in np.flatnonzero((ends - starts > 1) & (contents[order[starts]] > 0)).tolist():
        kinds: list[int] = []  # one sample of each content: a checksum may be shared by chance
        for row in order[starts[place] : ends[place]].tolist():
            twin = next((kind for kind in kinds if _same_bytes(dataset, kind, row)), None)
            if twin is None:
                kinds.append(row)
            else:
                pairs.append((row, twin))
    for row, twin in sorted(pairs):
        name, remark = dataset.sample_id(row), f"the same bytes as {dataset.sample_id(twin)}"
        report.duplicates.add(name, remark)
        if dataset.labels[row] != dataset.labels[twin]:
            other = dataset.class_name(int(dataset.labels[twin]))
            report.conflicts.add(name, f"{remark}, under another identity ({other!r})")


def _same_bytes(dataset: _Dataset, a: int, b: int) -> bool:
    try:
        return dataset.stored(a) == dataset.stored(b)
    except CorruptSample:
        return False
