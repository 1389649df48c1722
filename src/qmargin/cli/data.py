"""``qmargin data`` and ``qmargin check-data``: download, index, convert and check data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from qmargin.cli.options import Command, Count, IndexPlace, argument, option
from qmargin.cli.tables import StageProgress, output_console, print_table, stage_progress
from qmargin.errors import DataError

if TYPE_CHECKING:
    from qmargin.data.index import SampleIndex

_FORMATS = (
    "images or recordings: one folder per identity, a CSV, tar files, JSON lines, a .rec file, "
    "wav.scp and utt2spk, or a format of a registered reader"
)


@dataclass(frozen=True, kw_only=True)
class Get(Command):
    """Download a public dataset.

    Downloads the official archives, checks their fingerprints, and makes an image folder that
    `qmargin demo --data` and `qmargin train` read. If it is interrupted, run it again to continue.
    """

    resumes: ClassVar[bool] = True

    name: Literal["omniglot"] = argument("1,623 drawn characters, 16 MB")
    out: Path | None = option("new folder (the dataset's name)", metavar="DIR")
    base: str | None = option("address (the official one)", name="--from", metavar="URL")

    def run(self) -> None:
        from qmargin.data.download import BASE, get_omniglot
        from qmargin.data.readers.folder import identity_folders

        out = self.out or Path(self.name)
        with stage_progress() as progress:
            get_omniglot(out, base=self.base or BASE, progress=progress)
        rows = [[name, f"{len(identity_folders(out / name)):,}"] for name in identity_folders(out)]
        print_table(output_console(), str(out), ["folder", "identities"], rows)


@dataclass(frozen=True, kw_only=True)
class _Indexed(IndexPlace):
    """A dataset with an index; lists take further options."""

    path: Path = argument(_FORMATS, metavar="PATH")
    root: Path | None = option("folder that relative paths of a list start from", metavar="DIR")
    split: str | None = option(
        "use the rows of a CSV with this value in the column split", metavar="NAME"
    )
    threads: Count = option("number of decoding threads", default=2)

    def open_index(
        self, index: Path | None, progress: StageProgress, *, rebuild: bool = False
    ) -> SampleIndex:
        """The index; with ``rebuild`` it is built in any case, without it changes are kept."""
        from qmargin.data.open import open_index, reader_options

        return open_index(
            self.path,
            options=reader_options(root=self.root, split=self.split),
            index=index,
            index_dir=self.index_dir,
            rebuild=rebuild,
            keep_changed=not rebuild,
            num_threads=self.threads,
            progress=partial(progress, "indexing"),
        )


@dataclass(frozen=True, kw_only=True)
class Index(_Indexed):
    """Build the index of a dataset.

    Writes the place, label and checksum of every sample, and the duration and loudness of
    recordings. An interrupted build continues. Training builds a missing index by itself.
    """

    out: Path | None = option("index (PATH with .qmindex)")

    def run(self) -> None:
        from qmargin.data.check import check_data
        from qmargin.data.stored import open_stored

        with stage_progress() as progress:
            index = self.open_index(self.out, progress, rebuild=True)
        title = f"{index.path}: {index.kind}, {index.format}"
        if index.kind == "recordings":  # durations in the index
            report = check_data(open_stored(index))
            print_table(output_console(), title, ["", "number", "details"], report.rows())
            return
        rows = [["samples", f"{len(index):,}"], ["identities", f"{index.num_classes:,}"]]
        rows += [["note", note] for note in index.notes]
        print_table(output_console(), title, ["", "value"], rows)


@dataclass(frozen=True, kw_only=True)
class ConvertBin(Command):
    """Convert a .bin verification set to a plain NPZ file, without running its pickle."""

    path: Path = argument(".bin file", metavar="FILE")
    out: Path | None = option("NPZ file (FILE with .npz)")

    def run(self) -> None:
        from qmargin.data.readers.verification_bin import convert_bin

        out = self.out or self.path.with_suffix(".npz")
        num_pairs = convert_bin(self.path, out)
        print_table(output_console(), str(out), ["", "value"], [["pairs", f"{num_pairs:,}"]])


@dataclass(frozen=True, kw_only=True)
class Align(Command):
    """Cut aligned faces out of photos.

    Writes a 112 x 112 face for each photo: by the landmarks of a manifest (columns x1,y1 to
    x5,y5), or by a detector (extra qmargin[detector]).
    """

    path: Path = argument("folder of photos or CSV manifest", metavar="PATH")
    out: Path = option("new folder", metavar="FOLDER")
    size: Count = option("side length in pixels", default=112)

    def run(self) -> None:
        from qmargin.data.alignment import align_photos

        with stage_progress() as progress:
            shown = partial(progress, "aligning")
            report = align_photos(self.path, self.out, size=self.size, progress=shown)
        left_out = {
            "photos without a face": report.without_face,
            "photos with several": report.crowded,
            "not images": [name for name, _ in report.corrupt],
        }
        rows = [["aligned faces", f"{report.num_aligned:,}", ""]]
        for what, names in left_out.items():
            first = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
            rows.append([what, f"{len(names):,}", first])
        print_table(output_console(), str(self.out), ["", "number", "first"], rows)


@dataclass(frozen=True, kw_only=True)
class CheckData(_Indexed):
    """Read, decode and compare every sample of a dataset.

    Finds damage, identities without samples and duplicates, and recordings that are clipped, silent
    or too short. The exit status is 2 if a sample is damaged.
    """

    path: Path = argument(f"{_FORMATS}, or an index", metavar="PATH")
    index: Path | None = option("index (PATH with .qmindex)")

    def run(self) -> None:
        from qmargin.data.check import check_data
        from qmargin.data.stored import open_stored

        with stage_progress() as progress:
            data = open_stored(self.open_index(self.index, progress))
            checking = partial(progress, "checking")
            report = check_data(data, num_threads=self.threads, progress=checking)
        print_table(output_console(), str(self.path), ["", "number", "details"], report.rows())
        if not report.is_good:
            raise DataError(
                f"{self.path} has {report.corrupt.count:,} corrupt, {report.changed.count:,} "
                f"changed and {report.conflicts.count:,} contradictory samples of "
                f"{report.num_samples:,}; remove them, or run qmargin data index {self.path}"
            )


ACTIONS: dict[str, type[Command]] = {
    "get": Get,
    "index": Index,
    "convert-bin": ConvertBin,
    "align": Align,
}
