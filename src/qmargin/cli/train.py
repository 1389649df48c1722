"""``qmargin train``: train by a recipe, given by name or as a file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from qmargin.cli.options import IndexPlace, RecipeSettings, argument, option
from qmargin.cli.recipes import load_recipe
from qmargin.errors import ConfigError, QMarginError, RankError

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

EXIT_CODES = """exit status:
  0    the run is complete
  1    an unexpected error, with its traceback
  2    refused, or stopped by one of the run's own checks; the last line says why
  75   another rank was lost or failed; start again with --resume
  130  stopped by Ctrl-C after saving; continue with --resume
  143  stopped by SIGTERM after saving; continue with --resume
"""
_NO_FOLDER = "--out is missing; name the folder of this run, as in --out runs/mine"


@dataclass(frozen=True, kw_only=True)
class Train(RecipeSettings, IndexPlace):
    """Train a model by a recipe.

    The recipe is a name of `qmargin recipes`, or a YAML file as printed by --print-recipe. With
    --resume, the recipe stored in DIR is used. For several GPUs: torchrun --nproc-per-node 8 -m
    qmargin train RECIPE --out DIR.
    """

    epilog: ClassVar[str] = EXIT_CODES

    recipe: str | None = argument("name of a recipe, or a .yaml file", metavar="NAME_OR_FILE")
    out: Path | None = option("folder of checkpoints, journal and status", metavar="DIR")
    resume: bool = option("resume from the newest valid checkpoint in DIR")
    resume_from: Path | None = option(
        "resume from this checkpoint of DIR; later ones are set aside", metavar="CHECKPOINT"
    )
    allow_changes: bool = option("resume even if recipe or settings change the outcome")
    device: Literal["auto", "cpu", "cuda"] = option("where to train", default="auto")
    trackers: tuple[str, ...] = option(
        "also log to tensorboard or wandb", name="--track", metavar="NAME", repeated=True
    )
    print_recipe: bool = option("print the recipe with its settings as YAML, then stop")
    dry_run: bool = option("take two steps, report memory and time, then stop; write nothing")

    def run(self) -> None:
        if self.print_recipe and self.dry_run:
            raise ConfigError("--print-recipe and --dry-run are both given; choose one of them")
        recipe = self._find_recipe()
        if self.index_dir is not None:
            recipe = replace(recipe, data=replace(recipe.data, index_dir=str(self.index_dir)))
        if self.print_recipe:
            from qmargin.training.recipe_files import to_yaml

            sys.stdout.write(to_yaml(recipe))
            return
        from qmargin.data.loader import WorkerTraceback
        from qmargin.training.distributed import EXIT_RANK_LOST, RemoteTraceback

        try:
            self._train(recipe)
        except QMarginError as error:
            if isinstance(error.__cause__, WorkerTraceback | RemoteTraceback):
                sys.stderr.write(f"{error.__cause__}\n")  # of a data worker or another rank
            if isinstance(error, RankError):
                sys.stderr.write(f"qmargin: error: {error}\n")
                raise SystemExit(EXIT_RANK_LOST) from error
            raise

    def _find_recipe(self) -> Recipe:
        """The recipe to train by; with ``--resume``, the stored one with the given settings."""
        resume = self.resume_from or self.resume
        named = load_recipe(self.recipe, self.settings) if self.recipe else None
        if self.allow_changes and not resume:
            raise ConfigError("--allow-changes needs a run to resume; add --resume, or drop it")
        if named is not None and (self.allow_changes or not resume):
            return named
        if not resume:
            raise ConfigError("the recipe is missing; name one of `qmargin recipes`, or a file")
        if self.out is None:
            raise ConfigError(_NO_FOLDER)
        from qmargin.training.recipe import diff
        from qmargin.training.recipe_files import apply_settings
        from qmargin.training.start import recipe_to_train, stored_recipe

        stored = stored_recipe(self.out, resume=resume)
        if stored is None:
            return recipe_to_train(named, self.out, resume=resume)
        recipe = apply_settings(stored, self.settings)
        if named is not None and (lines := diff(recipe, named)):
            differs = f"the stored recipe is used; {self.recipe} differs: {'; '.join(lines)}"
            _say_once(f"{differs} (--allow-changes to use it)")
        return recipe

    def _train(self, recipe: Recipe) -> None:
        from qmargin.training.dry_run import dry_run
        from qmargin.training.loop import train
        from qmargin.training.signals import exit_status

        if self.dry_run:
            report = dry_run(recipe, device=self.device)
            if report.rank == 0:
                sys.stdout.write("\n".join(report.lines) + "\n")
            return
        if self.out is None:
            raise ConfigError(_NO_FOLDER)
        outcome = train(
            recipe,
            self.out,
            resume=self.resume_from or self.resume,
            allow_changes=self.allow_changes,
            device=self.device,
            trackers=self.trackers,
        )
        if outcome.signal:
            _say_once("continue with --resume")
            raise SystemExit(exit_status(outcome.signal))


def _say_once(text: str) -> None:
    """Write a line on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{text}\n")
