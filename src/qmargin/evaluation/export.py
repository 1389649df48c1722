"""From a training run to a model directory, and from a result to the model's thresholds."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import qmargin
from qmargin.errors import ConfigError
from qmargin.evaluation.result import read_result, run_info, run_to_json
from qmargin.evaluation.thresholds import Thresholds, thresholds_of, write_thresholds
from qmargin.files import sha256_of, without_folders
from qmargin.models.directory import INTENDED_USE, LIMITS, ModelCard

if TYPE_CHECKING:
    from torch import Tensor

    from qmargin.training.checkpoint import Checkpoint
    from qmargin.training.recipe import Recipe


WEIGHTS = ("last", "average", "ema")


def export_run(
    run: str | Path,
    directory: str | Path,
    *,
    weights: str = "last",
    name: str | None = None,
    facts: Mapping[str, str] | None = None,
    keep_paths: bool = False,
) -> ModelCard:
    """Make a model directory of a run.

    Args:
        run: Output folder of ``qmargin train``, or one of its checkpoints.
        directory: The model directory; does not exist yet, or is empty.
        weights: ``"last"`` (of the newest whole checkpoint), ``"average"`` or ``"ema"`` (that the
            run wrote at its end).
        name: Of the model; that of the recipe by default.
        facts: More entries of the card.
        keep_paths: Keep absolute paths of the recipe, which are names of files otherwise.

    Raises:
        ConfigError: There is no such run, or it has no such weights.
        CheckpointError: The checkpoint is damaged.
    """
    from qmargin.models.directory import write_model
    from qmargin.training.checkpoint import read_recipe
    from qmargin.training.recipe_files import from_yaml

    checkpoint = _find_checkpoint(Path(run))
    text = read_recipe(checkpoint)
    recipe = from_yaml(text)
    tensors = _read_weights(checkpoint, weights)
    modality, input_shape = input_of(recipe)
    card = ModelCard(
        name=name or recipe.name,
        modality=modality,
        input_shape=input_shape,
        backbone=recipe.model.backbone,
        embedding_dim=recipe.model.embedding_dim,
        options=dict(recipe.model.options),
        facts={**_facts(recipe, checkpoint, weights), **(facts or {})},
    )
    known = run_info(
        recipe, title=card.name, steps=checkpoint.step, num_classes=checkpoint.manifest.num_classes
    )
    return write_model(
        directory,
        weights=tensors,
        card=card,
        recipe=text if keep_paths else _public(recipe, text),
        run=run_to_json(known),
    )


def _public(recipe: Recipe, text: str) -> str:
    """A recipe's text with names in place of absolute paths; the hash stays that of the run's."""
    from qmargin.training.recipe_files import from_dict, to_dict, to_yaml

    values = to_dict(recipe)
    public = _short(values)
    if public == values:
        return text
    _, _, lines = to_yaml(from_dict(public)).partition("\n")
    return (
        f"# sha256 of what decides the outcome, with whole paths: {recipe.sha256}\n"
        f"# absolute paths are cut to their names\n{lines}"
    )


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_short, value))
    return without_folders(value) if isinstance(value, str) else value


def is_export_of(directory: str | Path, run: str | Path, *, weights: str = "last") -> bool:
    """Whether a directory is the model directory that ``export_run`` makes of a run."""
    from qmargin.models.directory import is_model_directory, read_card

    if not is_model_directory(directory):
        return False
    facts = read_card(directory).facts
    found = facts.get("checkpoint_sha256"), facts.get("weights")
    return found == (_find_checkpoint(Path(run)).sha256, weights)


def write_prototypes(run: str | Path, path: str | Path) -> int:
    """Write the class vectors of a run as embeddings, a cohort for score normalisation.

    Args:
        run: Output folder of ``qmargin train``, or one of its checkpoints.
        path: File to write, ``.safetensors`` or ``.npz``.

    Returns:
        The number of classes.
    """
    from qmargin.evaluation.embed import check_suffix, write_embedding_file
    from qmargin.training.checkpoint import read_prototypes

    check_suffix(path)
    rows = read_prototypes(_find_checkpoint(Path(run))).float().numpy()
    digits = len(str(len(rows) - 1))
    names = [f"class-{label:0{digits}d}" for label in range(len(rows))]
    write_embedding_file(path, names, rows)
    return len(rows)


def add_thresholds(
    directory: str | Path,
    result: str | Path,
    *,
    flip: str | None = None,
    is_trusted: bool = False,
) -> Thresholds:
    """Put the operating points of a result file into a model directory.

    Args:
        directory: The model directory.
        result: ``result.json`` of an evaluation of this model on pairs of samples.
        flip: How it embedded images, ``"none"`` or ``"sum"``; None for what the result says.
        is_trusted: Take a result that names no weights for one of this model.

    Raises:
        ConfigError: The result does not say how images were embedded, or says otherwise.
        DataError: It is of another model or names none, or is of other comparisons than those of
            two samples.
    """
    from qmargin.models.directory import THRESHOLDS, add_facts, read_card

    card, found = read_card(directory), read_result(result)
    thresholds = thresholds_of(
        found,
        weights_sha256=card.weights_sha256,
        result_sha256=sha256_of(result),
        flip=_chosen_flip(found.protocol.flip, flip, card, result),
        is_trusted=is_trusted,
    )
    write_thresholds(Path(directory) / THRESHOLDS, thresholds)
    facts = {
        f"tar_at_far_{point.far_target:g}": f"{point.tar:.4f} on {thresholds.protocol}"
        for point in thresholds.points
    }
    add_facts(directory, facts)
    return thresholds


def _chosen_flip(said: str | None, asked: str | None, card: ModelCard, result: str | Path) -> str:
    from qmargin.evaluation.model import INPUTS

    if not INPUTS[card.modality].has_mirror:
        return "none"
    if said is None and asked is None:
        raise ConfigError(
            f"{result} does not say whether mirror images were used; say so with --flip none or "
            "--flip sum"
        )
    if said is not None and asked not in (None, said):
        raise ConfigError(f"{result} was made with flip {said}, not {asked}; leave --flip out")
    return asked or said or "none"


def input_of(recipe: Recipe) -> tuple[str, tuple[int, ...]]:
    """Modality and shape of one input of a recipe's model.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> input_of(debug())
        ('arrays', (32,))
    """
    known = _STORED_INPUTS.get(recipe.data.kind)
    if known is not None:
        return known(recipe)
    from qmargin.training.build import build_dataset

    sample, _ = build_dataset(recipe).read(0, 0)  # computed data has no other record of its shape
    shape = tuple(sample.shape)
    is_image = len(shape) == 3 and shape[0] == 3
    return ("images" if is_image else "arrays"), shape


def _image_input(recipe: Recipe) -> tuple[str, tuple[int, ...]]:
    from qmargin.schema import decode_settings

    size = decode_settings(int, recipe.data.options.get("size", 112), "data.options.size")
    return "images", (3, size, size)


_STORED_INPUTS: dict[str, Callable[[Recipe], tuple[str, tuple[int, ...]]]] = {
    "images": _image_input,
    "audio": lambda _: ("audio", ()),
}


def _find_checkpoint(run: Path) -> Checkpoint:
    from qmargin.training.checkpoint import CHECKPOINTS, MANIFEST, newest, open_checkpoint

    if (run / MANIFEST).is_file():
        return open_checkpoint(run)
    found = newest(run / CHECKPOINTS).checkpoint
    if found is None:
        raise ConfigError(
            f"{run} has no checkpoint; give the output folder of `qmargin train`, one of its "
            "checkpoints, or a model directory"
        )
    return found


def _read_weights(checkpoint: Checkpoint, weights: str) -> dict[str, Tensor]:
    from qmargin.training.checkpoint import read_backbone, read_tensors
    from qmargin.training.optim import AVERAGE, MOVING_AVERAGE

    if weights not in WEIGHTS:
        raise ConfigError(f"weights is {weights!r}; it must be one of {', '.join(WEIGHTS)}")
    if weights == "last":
        return read_backbone(checkpoint)
    path = checkpoint.path.parent.parent / (AVERAGE if weights == "average" else MOVING_AVERAGE)
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; only runs whose recipe asks for it write it at their end, "
            "export the weights 'last'"
        )
    return read_tensors(path)


def _facts(recipe: Recipe, checkpoint: Checkpoint, weights: str) -> dict[str, str]:
    loss = recipe.loss
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "recipe": recipe.name,
        "recipe_sha256": recipe.sha256,
        "checkpoint_sha256": checkpoint.sha256,
        "step": str(checkpoint.step),
        "weights": weights,
        "margin_kind": loss.margin_kind,
        "alpha": f"{loss.alpha:g}",
        "scale": f"{loss.scale:g}",
        "margin": f"{loss.margin:g}",
        "num_identities": str(checkpoint.manifest.num_classes),
        "intended_use": INTENDED_USE,
        "limits": LIMITS,
        "exported": now.isoformat(timespec="seconds"),
        "qmargin": qmargin.__version__,
    }
