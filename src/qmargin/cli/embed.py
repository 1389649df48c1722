"""``qmargin embed``: a folder of images or recordings to a file of embeddings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qmargin.cli.options import ModelUse, Overwriting, argument, guard_of, option
from qmargin.cli.tables import StageProgress, stage_progress
from qmargin.errors import ConfigError
from qmargin.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qmargin.evaluation.embed import EmbeddedFolder
    from qmargin.evaluation.model import Model

MANIFEST = ".manifest.csv"
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class FolderUse(ModelUse):
    """Options of embedding the files of a folder."""

    flip: Literal["none", "sum"] | None = option("add mirror images (as the model was evaluated)")
    batch_size: int = option("batch size, in files", default=64)
    max_corrupt: int = option("largest number of unreadable files to skip", default=100)

    def embed_folder(
        self, model: Model, folder: Path, names: Sequence[str], out: Path, progress: StageProgress
    ) -> tuple[EmbeddedFolder, str]:
        """Write embeddings; return the outcome of every file and the use of mirror images."""
        from qmargin.evaluation.embed import embed_files, write_embedding_file

        flip = self.flip or ("none" if model.thresholds is None else model.thresholds.flip)
        found = embed_files(
            model,
            folder,
            names,
            flip=flip,
            batch_size=self.batch_size,
            max_corrupt=self.max_corrupt,
            progress=partial(progress, "embedding"),
        )
        metadata = {"model": model.card.weights_sha256, "name": model.card.name, "flip": flip}
        write_embedding_file(out, found.keys, found.matrix, metadata=metadata)
        return found, flip


@dataclass(frozen=True, kw_only=True)
class Embed(FolderUse, Overwriting):
    """Embed a folder of images or recordings.

    Writes the embeddings of all files under a folder, named by their relative paths, and a manifest
    with the outcome for every file. Only you can read the two files.
    """

    folder: Path = argument("folder with files at any depth", metavar="FOLDER")
    model: Path = option()
    out: Path = option(".safetensors or .npz")

    def run(self) -> None:
        from qmargin.evaluation import embed
        from qmargin.evaluation.embeddings import collapse_note
        from qmargin.evaluation.model import load_model

        out = embed.check_suffix(self.out)
        if not out.parent.is_dir():
            raise ConfigError(f"--out {out} is not in an existing folder; make the folder first")
        manifest = out.with_name(out.name + MANIFEST)
        guard = guard_of(self, ("out",))
        guard.check(out, embed.MARKS[out.suffix])
        guard.check(manifest, embed.MANIFEST_MARK)
        model = load_model(self.model, device=self.device, fit=self.fit)
        names = embed.find_files(self.folder, model.card.modality)
        with stage_progress() as progress:
            found, flip = self.embed_folder(model, self.folder, names, out, progress)
        embed.write_manifest(manifest, found.files)
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
