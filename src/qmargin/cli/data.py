"""``qmargin data`` and ``qmargin check-data``: samples in a form that training and tests read."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.audio_data import (
    add_audio_options,
    add_index_dir,
    check_no_audio_options,
    run_audio_check,
    run_audio_index,
)
from qmargin.cli.options import count
from qmargin.cli.progress import stage_progress
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import DataError

if TYPE_CHECKING:
    from qmargin.data.check import DataReport

_LAYOUTS = (
    "images: a .rec or .tar file, a folder with one, a CSV manifest, one folder per identity; or "
    "recordings: one folder per speaker, wav.scp and utt2spk, JSON lines, tar shards, a CSV"
)


def add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` and ``check-data`` to a parser."""
    parser = commands.add_parser(
        "data", help="get, index and convert images and recordings, align faces"
    )
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    _add_get(actions)
    _add_index(actions)
    _add_convert_bin(actions)
    _add_align(actions)
    _add_check(commands)


def _add_get(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "get",
        help="download a public dataset",
        description="Download the official archives of a dataset, check their fingerprints, and "
        "make an image folder that `qmargin demo --data` and `qmargin train` read. Interrupted and "
        "run again, it goes on.",
    )
    parser.add_argument("name", choices=("omniglot",), help="1,623 drawn characters, 16 MB")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder (the dataset's name)")
    parser.add_argument(
        "--from", dest="base", metavar="URL", help="address of the archives (the official one)"
    )
    parser.set_defaults(run=_run_get, resumes=True)


def _add_index(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "index",
        help="build the index of a dataset",
        description="Read a dataset once and write where every sample is, with its label and a "
        "checksum, and of recordings their duration and loudness. An index of recordings that "
        "was interrupted goes on where it was. Training builds the index it needs by itself; "
        "building it first shows progress.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help=_LAYOUTS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="index (PATH with .qmindex)")
    add_index_dir(parser)
    add_audio_options(parser)
    parser.set_defaults(run=_run_index)


def _add_convert_bin(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "convert-bin",
        help="make a plain NPZ file of a .bin verification set",
        description="Read a .bin verification set, which is a pickle, without running anything in "
        "it, and write its images and labels as plain arrays.",
    )
    parser.add_argument("path", type=Path, metavar="FILE", help=".bin file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="NPZ file (FILE with .npz)")
    parser.set_defaults(run=_run_convert_bin)


def _add_align(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "align",
        help="cut aligned faces out of photos",
        description="Write a 112 x 112 face for each photo: by the landmarks of a manifest "
        "(columns x1,y1 to x5,y5), or by a detector (extra qmargin[detector]).",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of photos or CSV manifest")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder")
    parser.add_argument("--size", type=count, default=112, help="pixels of a side (112)")
    parser.set_defaults(run=_run_align)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check-data",
        help="read, decode and compare every sample of a dataset",
        description="Compare every sample with its checksum, decode it, and look for identities "
        "without samples and for duplicates; of recordings, also for clipping, silence and those "
        "that are too short. The exit status is 2 when something is damaged.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help=f"{_LAYOUTS}, or an index")
    parser.add_argument("--index", type=Path, metavar="FILE", help="index (PATH with .qmindex)")
    add_index_dir(parser)
    add_audio_options(parser)
    parser.set_defaults(run=_run_check)


def _run_get(arguments: argparse.Namespace) -> None:
    from qmargin.data.image_folder import identity_folders
    from qmargin.data.omniglot import BASE, get_omniglot

    out = arguments.out or Path(arguments.name)
    with stage_progress() as progress:
        get_omniglot(out, base=arguments.base or BASE, progress=progress)
    rows = [[name, f"{len(identity_folders(out / name)):,}"] for name in identity_folders(out)]
    print_table(output_console(), str(out), ["folder", "identities"], rows)


def _run_index(arguments: argparse.Namespace) -> None:
    from qmargin.data.open import is_audio, open_index

    if is_audio(arguments.path):
        run_audio_index(arguments)
        return
    check_no_audio_options(arguments)
    with stage_progress() as progress:
        index = open_index(
            arguments.path,
            index=arguments.out,
            index_dir=arguments.index_dir,
            rebuild=True,
            progress=partial(progress, "indexing"),
        )
    rows = [
        ["samples", f"{len(index):,}"],
        ["identities", f"{index.num_classes:,}"],
        *(["note", note] for note in index.notes),
    ]
    print_table(output_console(), f"{index.path}: {index.format}", ["", "value"], rows)


def _run_convert_bin(arguments: argparse.Namespace) -> None:
    from qmargin.data.verification_bin import convert_bin

    out = arguments.out or arguments.path.with_suffix(".npz")
    num_pairs = convert_bin(arguments.path, out)
    print_table(output_console(), str(out), ["", "value"], [["pairs", f"{num_pairs:,}"]])


def _run_align(arguments: argparse.Namespace) -> None:
    from qmargin.data.aligning import align_photos

    with stage_progress() as progress:
        report = align_photos(
            arguments.path,
            arguments.out,
            size=arguments.size,
            progress=partial(progress, "aligning"),
        )
    rows = [
        ["aligned faces", f"{report.num_aligned:,}", ""],
        ["photos without a face", f"{len(report.without_face):,}", _first(report.without_face)],
        ["photos with several", f"{len(report.crowded):,}", _first(report.crowded)],
        ["not images", f"{len(report.corrupt):,}", _first([name for name, _ in report.corrupt])],
    ]
    print_table(output_console(), str(arguments.out), ["", "number", "first"], rows)


def _first(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _run_check(arguments: argparse.Namespace) -> None:
    from qmargin.data.check import check_data
    from qmargin.data.encoded import ImageDataset
    from qmargin.data.open import is_audio, open_index

    if is_audio(arguments.path):
        run_audio_check(arguments)
        return
    check_no_audio_options(arguments)
    with stage_progress() as progress:
        index = open_index(
            arguments.path,
            index=arguments.index,
            index_dir=arguments.index_dir,
            keep_changed=True,
            progress=partial(progress, "indexing"),
        )
        dataset = ImageDataset(index)
        report = check_data(
            dataset, num_threads=arguments.threads, progress=partial(progress, "checking")
        )
    _print_report(arguments.path, report)
    if not report.is_good:
        raise DataError(
            f"{arguments.path} has {report.num_corrupt:,} corrupt, {report.num_changed:,} changed "
            f"and {report.num_conflicts:,} contradictory samples of {report.num_samples:,}; repair "
            f"or remove them, and index what was changed on purpose with qmargin data index "
            f"{arguments.path}"
        )


def _print_report(path: Path, report: DataReport) -> None:
    sizes = [f"{width} x {height}: {count:,}" for (width, height), count in report.sizes.items()]
    twins = [f"{a} = {b}" for a, b in report.duplicates]
    contradictions = [f"{a} = {b}" for a, b in report.conflicts]
    rows = [
        ["samples", f"{report.num_samples:,}", _first(sizes)],
        ["identities", f"{report.num_classes:,}", ""],
        ["identities without a sample", f"{report.num_empty:,}", ""],
        ["identities with one sample", f"{report.num_single:,}", ""],
        ["cannot be read", f"{report.num_corrupt:,}", ""],
        ["changed since indexing", f"{report.num_changed:,}", ""],
        ["duplicates", f"{report.num_duplicates:,}", _first(twins)],
        ["duplicates of other identities", f"{report.num_conflicts:,}", _first(contradictions)],
        *(["note", "", note] for note in report.notes),
        *([f"{finding.sample_id}", "", finding.reason] for finding in report.findings),
    ]
    print_table(output_console(), str(path), ["", "number", "details"], rows)
