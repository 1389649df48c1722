"""``qmargin data index`` and ``qmargin check-data`` for recordings."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import count
from qmargin.cli.progress import BarProgress, PlainProgress, stage_progress
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError, DataError

if TYPE_CHECKING:
    from qmargin.data.audio_check import AudioReport
    from qmargin.data.audio_collection import AudioCollection


def add_audio_options(parser: argparse.ArgumentParser) -> None:
    """Add what lists of recordings take, and the number of threads."""
    add = parser.add_argument
    add("--root", type=Path, metavar="DIR", help="where relative paths of a list of recordings are")
    add("--split", metavar="NAME", help="rows of a CSV of recordings whose column split has this")
    add("--threads", type=count, default=2, metavar="N", help="that decode at once (2)")


def add_index_dir(parser: argparse.ArgumentParser) -> None:
    """Add the folder that indices go to."""
    parser.add_argument(
        "--index-dir",
        type=Path,
        metavar="DIR",
        help="folder for the index, instead of beside the data (none)",
    )


def check_no_audio_options(arguments: argparse.Namespace) -> None:
    """Refuse options of recordings where there are images."""
    for name in ("root", "split"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"{arguments.path} has no list of recordings; leave --{name} out")


def run_audio_index(arguments: argparse.Namespace) -> None:
    """Measure every recording, write the index and say what is in it."""
    from qmargin.data.audio_check import report_of
    from qmargin.data.audio_index import index_audio

    with stage_progress() as progress:
        collection = _opened(arguments, progress)
        place = _place(arguments, arguments.out)
        records = index_audio(
            collection,
            place,
            num_threads=arguments.threads,
            progress=partial(progress, "indexing"),
        )
    _print(f"{place}: recordings", report_of(collection, records))


def run_audio_check(arguments: argparse.Namespace) -> None:
    """Look at every recording, and compare it with an index where there is one.

    Without an index one is written: the look has measured all that it holds.
    """
    from qmargin.data.audio_check import check_audio, report_of
    from qmargin.data.audio_index import index_audio, read_audio_index
    from qmargin.data.index import announce

    with stage_progress() as progress:
        collection = _opened(arguments, progress)
        place, told = _place(arguments, arguments.index), partial(progress, "checking")
        if place.exists():
            before = read_audio_index(place, collection)
            report = check_audio(
                collection, index=before, num_threads=arguments.threads, progress=told
            )
        else:
            if arguments.index is None and arguments.index_dir is None:
                announce(arguments.path, place)
            records = index_audio(collection, place, num_threads=arguments.threads, progress=told)
            report = report_of(collection, records)
    _print(str(arguments.path), report)
    if report.has_errors:
        raise DataError(
            f"{arguments.path} has {len(report.unreadable):,} unreadable, {len(report.changed):,} "
            f"changed and {len(report.conflicts):,} contradictory recordings of "
            f"{report.num_utterances:,}; repair or remove them"
        )


def _opened(
    arguments: argparse.Namespace, progress: PlainProgress | BarProgress
) -> AudioCollection:
    from qmargin.data.audio_lists import open_audio

    return open_audio(
        arguments.path,
        root=arguments.root,
        split=arguments.split,
        progress=partial(progress, "reading tars"),
    )


def _place(arguments: argparse.Namespace, given: Path | None) -> Path:
    from qmargin.data.index import index_place

    place = given or index_place(arguments.path.resolve(), arguments.index_dir)
    if not place.parent.is_dir():
        raise DataError(f"{place.parent} is not a folder; make it, or give another index")
    return place


def _print(title: str, report: AudioReport) -> None:
    rates = ", ".join(f"{rate:,} Hz: {count:,}" for rate, count in report.sample_rates.items())
    rows = [
        ["utterances", f"{report.num_utterances:,}", rates],
        ["speakers", f"{report.num_speakers:,}", ""],
        ["hours", f"{report.hours:,.2f}", ""],
        *([name, f"{count:,}", examples] for name, count, examples in report.rows()),
    ]
    print_table(output_console(), title, ["", "number", "details"], rows)
