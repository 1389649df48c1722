"""Model directories from training runs, and ``thresholds.json`` from their evaluations."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import qmargin
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.result import (
    Det,
    Histogram,
    Result,
    TarPoint,
    read_json,
    read_result,
    run_info,
    run_to_json,
)
from qmargin.files import read_regular, sha256_of, without_folders, write_atomically
from qmargin.models.directory import INTENDED_USE, LIMITS, ModelCard
from qmargin.schema import NEW, decode, decode_settings, encode

if TYPE_CHECKING:
    from torch import Tensor

    from qmargin.data.samples import Dataset
    from qmargin.training.checkpoint import Checkpoint
    from qmargin.training.recipe import Recipe

WEIGHTS = ("last", "average", "ema")
FORMAT = "qmargin-thresholds"
VERSION = 1
FLIPS = ("none", "sum")
MAX_BYTES = 10_000_000
_CLOSE = 1e-9  # relative: 1e-3 may have been written as 0.001


def export_run(
    run: str | Path,
    directory: str | Path,
    *,
    weights: str = "last",
    name: str | None = None,
    keep_paths: bool = False,
) -> ModelCard:
    """Make a model directory of a run, the output folder of ``qmargin train``, or a checkpoint.

    ``weights`` are ``"last"`` (of the newest whole checkpoint), ``"average"`` or ``"ema"`` (that
    the run wrote at its end). Absolute paths of the recipe become names of files unless kept.
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
        facts=_facts(recipe, checkpoint, weights),
        pixels=_pixels_of(recipe),
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
    """Write the class vectors of a run as embeddings, for AS-norm; returns their number."""
    from qmargin.evaluation.embed import check_suffix, write_embedding_file
    from qmargin.training.checkpoint import read_prototypes

    check_suffix(path)
    rows = read_prototypes(_find_checkpoint(Path(run))).float().numpy()
    digits = len(str(len(rows) - 1))
    names = [f"class-{label:0{digits}d}" for label in range(len(rows))]
    write_embedding_file(path, names, rows)
    return len(rows)


def add_thresholds(
    directory: str | Path, result: str | Path, *, flip: str | None = None, is_trusted: bool = False
) -> Thresholds:
    """Add the operating points of a result file to the directory of the evaluated model.

    ``flip`` says how images were embedded if the result does not. A result without a hash of the
    weights has to be trusted to be of this model.
    """
    from qmargin.models.directory import THRESHOLDS, add_facts, read_card

    card, found = read_card(directory), read_result(result)
    said = found.protocol.flip
    if card.modality != "images":
        said, flip = "none", None
    if said is None and flip is None:
        raise ConfigError(
            f"{result} does not say whether mirror images were used: pass --flip none or --flip sum"
        )
    if said is not None and flip not in (None, said):
        raise ConfigError(f"{result} was made with flip {said}, not {flip}; leave --flip out")
    thresholds = thresholds_of(
        found,
        weights_sha256=card.weights_sha256,
        result_sha256=sha256_of(result),
        flip=flip or said or "none",
        is_trusted=is_trusted,
    )
    write_thresholds(Path(directory) / THRESHOLDS, thresholds)
    facts = {
        f"tar_at_far_{point.far_target:g}": f"{point.tar:.4f} on {thresholds.protocol}"
        for point in thresholds.points
    }
    add_facts(directory, facts)
    return thresholds


def input_of(recipe: Recipe) -> tuple[str, tuple[int, ...]]:
    """Modality and shape of one input of a recipe's model."""
    if recipe.data.kind in ("audio", "voices"):
        return "audio", ()
    if recipe.data.kind == "images":
        size = decode_settings(int, recipe.data.options.get("size", 112), "data.options.size")
        return "images", (3, size, size)
    sample, _ = _computed(recipe).read(0, 0)  # computed data record their shape nowhere else
    shape = tuple(sample.shape)
    is_image = len(shape) == 3 and shape[0] == 3
    return ("images" if is_image else "arrays"), shape


def _pixels_of(recipe: Recipe) -> str:
    """Range of the pixels that the network was trained on, a name in ``PIXELS``."""
    if recipe.data.kind in ("images", "audio", "voices"):
        return ModelCard.pixels
    from qmargin.data.synthetic import DrawnIdentities

    return "0 to 1" if isinstance(_computed(recipe), DrawnIdentities) else ModelCard.pixels


def _computed(recipe: Recipe) -> Dataset:
    """Data that are computed when they are read, not all beforehand."""
    from qmargin.training.build import build_dataset

    options = {name: v for name, v in recipe.data.options.items() if name != "in_memory"}
    return build_dataset(replace(recipe, data=replace(recipe.data, options=options)))


def recipe_of(directory: str | Path) -> Recipe:
    """The recipe of a model directory or of a run.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    from qmargin.models.directory import RECIPE, is_model_directory
    from qmargin.training.checkpoint import read_recipe
    from qmargin.training.recipe_files import from_yaml

    folder = Path(directory)
    if not is_model_directory(folder):
        return from_yaml(read_recipe(_find_checkpoint(folder)))
    if not (folder / RECIPE).is_file():
        raise ConfigError(f"{folder} has no {RECIPE}; export the model again")
    return from_yaml(read_regular(folder / RECIPE, MAX_BYTES).decode())


def _find_checkpoint(run: Path) -> Checkpoint:
    from qmargin.training.checkpoint import CHECKPOINTS, MANIFEST, newest, open_checkpoint

    if (run / MANIFEST).is_file():
        return open_checkpoint(run)
    found = newest(run / CHECKPOINTS).checkpoint
    if found is None:
        raise ConfigError(
            f"{run} has no checkpoint: give a run of `qmargin train`, or a model directory"
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
            f"{path} does not exist: the recipe does not request it; export the weights 'last'"
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


@dataclass(frozen=True)
class AffineMap:
    """``scale * score + offset`` is a natural log-likelihood ratio."""

    scale: float
    offset: float


@dataclass(frozen=True)
class Thresholds:
    """Operating points that decide whether two samples are of one identity."""

    weights_sha256: str  # of the model
    protocol: str  # trials on which they were measured
    rule: str
    num_genuine: int
    num_impostors: int
    flip: str  # "sum" where the embedding of an image's mirror image is added, else "none"
    points: tuple[TarPoint, ...]  # those of the result that could be measured
    calibration: AffineMap | None  # None where the trials did not allow it
    result_sha256: str
    det: Det | None = field(default=None, metadata=NEW)  # without its band; None in older files
    histogram: Histogram | None = field(default=None, metadata=NEW)  # of the scores, likewise

    def __post_init__(self) -> None:
        if self.flip not in FLIPS:
            raise ConfigError(f"flip is {self.flip!r}; it must be one of {', '.join(FLIPS)}")

    def at(self, far: float) -> TarPoint:
        """The point measured at a false accept rate; ``ProtocolError`` lists those measured."""
        for point in self.points:
            if math.isclose(point.far_target, far, rel_tol=_CLOSE):
                return point
        known = ", ".join(f"{point.far_target:g}" for point in self.points) or "none"
        raise ProtocolError(
            f"no threshold was measured at FAR {far:g} on {self.protocol} with "
            f"{self.num_impostors:,} impostor trials; measured are {known}"
        )


def thresholds_of(
    result: Result,
    *,
    weights_sha256: str,
    result_sha256: str,
    flip: str = "none",
    is_trusted: bool = False,
) -> Thresholds:
    """Operating points of a result, for the model of these weights.

    A result of other weights, of templates, or of scores other than plain cosines is refused.
    """
    evaluated, protocol = result.weights_sha256, result.protocol
    if evaluated is None and not is_trusted:
        raise DataError(
            f"the result {result.system.name!r} on {protocol.name!r} does not name the weights it "
            f"is of, and this model has {weights_sha256:.12}...; evaluate with --model, or with "
            "embeddings of `qmargin embed`, or pass --trust-result if it is of this model"
        )
    if evaluated not in (None, weights_sha256):
        raise DataError(
            f"the result is of weights {evaluated:.12}..., not {weights_sha256:.12}...: "
            "evaluate this model"
        )
    if protocol.pooling is not None:
        raise DataError(
            f"{protocol.name} compared templates of many images, whose scores differ from "
            "those of two; evaluate pairs, as in `qmargin evaluate lfw` or `pairs`"
        )
    normalised = [source.role for source in result.sources if source.role in ("cohort", "center")]
    if normalised:
        raise DataError(
            f"the scores of {protocol.name} were changed by a {normalised[0]}, which `verify` "
            "does not apply; evaluate plain cosines"
        )
    points = tuple(point for point in result.measures.tar if point.tar is not None)
    if not points:
        raise ProtocolError(
            f"no FAR could be measured on {protocol.name} with {protocol.num_impostors:,} impostor "
            "trials; evaluate on more of them"
        )
    curve = result.calibration
    return Thresholds(
        weights_sha256=weights_sha256,
        protocol=protocol.name,
        rule=protocol.rule,
        num_genuine=protocol.num_genuine,
        num_impostors=protocol.num_impostors,
        flip=flip,
        points=points,
        calibration=None if curve is None else AffineMap(curve.scale, curve.offset),
        result_sha256=result_sha256,
        det=replace(result.det, band=None),
        histogram=result.histogram,
    )


def write_thresholds(path: str | Path, thresholds: Thresholds) -> None:
    """Write ``thresholds.json``, completely or not at all."""
    content = {"format": FORMAT, "version": VERSION, **encode(thresholds, "thresholds")}
    _parse(json.loads(json.dumps(content)), str(path))  # a NaN in the wrong place
    write_atomically(path, (json.dumps(content, allow_nan=False, indent=1) + "\n").encode())


def read_thresholds(path: str | Path) -> Thresholds:
    """Read and check ``thresholds.json``."""
    return _parse(read_json(path, MAX_BYTES), str(path))


def _parse(content: Any, source: str) -> Thresholds:
    is_ours = isinstance(content, Mapping) and content.get("format") == FORMAT
    if not is_ours or content.get("version") != VERSION:
        raise DataError(f"{source} is not a {FORMAT} file of version {VERSION}; export again")
    return cast(Thresholds, decode(Thresholds, content, f"{source}:"))
