"""``qmargin embed``: a folder of images or recordings to a file of embeddings."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import add_overwrite, guard_of
from qmargin.cli.progress import BarProgress, PlainProgress, stage_progress
from qmargin.cli.verify import add_model_options
from qmargin.errors import ConfigError
from qmargin.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qmargin.evaluation.embed_folder import EmbeddedFolder
    from qmargin.evaluation.model import Model

MANIFEST = ".manifest.csv"
_SHOWN = 5


def add_embed(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "embed",
        help="embed a folder of images or recordings",
        description="Write the embeddings of all files under a folder, named by their paths in it, "
        "for `qmargin evaluate` and others, and a manifest of what became of every file. "
        "Only you can read what is written.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="with files at any depth")
    add_model_options(parser)
    add("--out", type=Path, required=True, metavar="FILE", help=".safetensors or .npz")
    add_folder_options(parser, max_corrupt=100)
    add_overwrite(parser)
    parser.set_defaults(run=run_embed)


def add_folder_options(parser: argparse.ArgumentParser, *, max_corrupt: int) -> None:
    """Add how the files of a folder are embedded."""
    add = parser.add_argument
    add("--flip", choices=("none", "sum"), help="add mirror images (as the model was evaluated)")
    add("--batch-size", type=int, default=64, metavar="N", help="files at a time (64)")
    add(
        "--max-corrupt",
        type=int,
        default=max_corrupt,
        metavar="N",
        help=f"unreadable files that are left out before this stops ({max_corrupt})",
    )


def run_embed(arguments: argparse.Namespace) -> None:
    """Embed, and write embeddings and manifest."""
    from qmargin.evaluation.embed_folder import (
        MANIFEST_MARK,
        MARKS,
        check_suffix,
        find_files,
        write_manifest,
    )
    from qmargin.evaluation.embeddings import collapse_note
    from qmargin.evaluation.model import load_model

    out = check_suffix(arguments.out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out} is not in an existing folder; make the folder first")
    manifest = out.with_name(out.name + MANIFEST)
    guard = guard_of(arguments, ("out",))
    guard.check(out, MARKS[out.suffix])
    guard.check(manifest, MANIFEST_MARK)
    model = load_model(arguments.model, device=arguments.device, fit=arguments.fit)
    names = find_files(arguments.folder, model.card.modality)
    with stage_progress() as progress:
        found, flip = embed_folder(arguments, model, arguments.folder, names, out, progress)
    write_manifest(manifest, found.files)
    note = collapse_note(found.matrix)
    if note is not None:
        sys.stderr.write(f"warning: {note}\n")
    bad = [file for file in found.files if file.row is None]
    for file in bad[:_SHOWN]:
        sys.stderr.write(f"left out {printable(file.key)}: {printable(file.problem)}\n")
    if len(bad) > _SHOWN:
        sys.stderr.write(f"and {len(bad) - _SHOWN} more, see {manifest}\n")
    sys.stdout.write(
        f"{len(found.keys):,} embeddings of {len(found.files):,} files, flip {flip}\n"
        f"{out}\n{manifest}\n"
    )


def embed_folder(
    arguments: argparse.Namespace,
    model: Model,
    folder: Path,
    names: Sequence[str],
    out: Path,
    progress: PlainProgress | BarProgress,
) -> tuple[EmbeddedFolder, str]:
    """Embed files of a folder by the options of ``add_folder_options``, and write the embeddings.

    Returns:
        What became of every file, and how mirror images entered.
    """
    from qmargin.evaluation.embed_folder import embed_files, write_embedding_file

    flip = arguments.flip or ("none" if model.thresholds is None else model.thresholds.flip)
    found = embed_files(
        model,
        folder,
        names,
        flip=flip,
        batch_size=arguments.batch_size,
        max_corrupt=arguments.max_corrupt,
        progress=partial(progress, "embedding"),
    )
    metadata = {"model": model.card.weights_sha256, "name": model.card.name, "flip": flip}
    write_embedding_file(out, found.keys, found.matrix, metadata=metadata)
    return found, flip
