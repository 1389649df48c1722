"""From a recipe to the objects of a run: the same weights on every rank and device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import numpy as np
import torch
from torch import nn

from qmargin.errors import ConfigError, CorruptSample, DataError
from qmargin.files import sha256_of
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.paths import Auto, Chunked, Dense, Sampled, Sparse, StepPath, TopK
from qmargin.losses.margin_loss import MarginLoss
from qmargin.models import create_backbone
from qmargin.models.directory import BACKBONE, is_model_directory
from qmargin.models.weights import load_weights_
from qmargin.registry import datasets
from qmargin.schema import check_options, decode_settings, suggest
from qmargin.training.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    PROTOTYPES,
    newest,
    open_checkpoint,
    read_backbone,
    read_class_rows,
    read_tensors,
)
from qmargin.training.loss_part import ScheduledLoss
from qmargin.training.optim import AVERAGE
from qmargin.training.recipe import HeadPart, Recipe

if TYPE_CHECKING:
    from qmargin.data.faces import FaceImages
    from qmargin.data.samples import Dataset

STORED: dict[str, type] = {
    **dict.fromkeys(("root", "split", "index", "decoder", "channels"), str),
    "verify": bool,
}
"""Options of ``qmargin.data.open.open_images``; all others are of ``FaceImages``."""
_PLAIN = {bool, int, float, str, type(None)}
_LOOKED_AT = 16  # pictures whose size is checked
_LEAST_SHARE = 4  # a picture may be scaled up by this
_TOO_LARGE = ("can't allocate memory", "not enough memory", "overflow")  # in torch's words


def open_images(
    path: str, *, index_dir: str | None = None, size: int = 112, **options: Any
) -> FaceImages:
    """Pictures of a folder, a list, RecordIO or tar files; ``size`` is their edge in pixels.

    ``options`` are those of ``STORED`` and what ``FaceAugmentation`` takes.
    """
    from qmargin.data.faces import FaceAugmentation, FaceImages
    from qmargin.data.open import open_images as open_stored
    from qmargin.data.stored import check_several

    looks = [field.name for field in fields(FaceAugmentation)]
    known = ["size", *STORED, *looks]
    for name in options:
        if name not in known:
            raise ConfigError(f"data.options.{name} is unknown, {suggest(name, known)}")
    stored = {
        name: decode_settings(kind, options[name], f"data.options.{name}")
        for name, kind in STORED.items()
        if name in options
    }
    size = decode_settings(int, size, "data.options.size")
    augmentation = FaceAugmentation(**{name: options[name] for name in looks if name in options})
    place = Path(path).expanduser()
    if not place.exists():
        raise ConfigError(f"data.path is {path!r}, which does not exist; set data.path=DIR")
    images = open_stored(place, index_dir=index_dir, **stored)
    check_several(images.num_classes, path)
    faces = FaceImages(images, size, augmentation)
    _check_sizes(faces)
    return faces


def _check_sizes(faces: FaceImages) -> None:
    """Refuse pictures far smaller than the input of the network; a few of them are checked."""
    images, largest = faces.images, 0
    for index in range(0, len(images), max(1, len(images) // _LOOKED_AT)):
        try:
            largest = max(largest, min(images.decode(index).shape[:2]))
        except CorruptSample:  # replaced and counted when it is read
            continue
        if largest * _LEAST_SHARE >= faces.size:
            return
    if not largest:  # unreadable pictures are reported by training
        return
    raise ConfigError(
        f"pictures are at most {largest} pixels wide or high and data.options.size is "
        f"{faces.size}; give larger ones, or set data.options.size={largest} with a backbone that "
        "takes it"
    )


def build_dataset(recipe: Recipe) -> Dataset:
    """The samples of a recipe, by ``qmargin.registry.datasets``."""
    part = recipe.data
    maker = datasets.get(part.kind)
    taken = inspect.signature(maker).parameters
    given = {
        name: getattr(part, name) for name in ("path", "num_classes", "index_dir") if name in taken
    }
    options: dict[str, Any] = dict(part.options)
    if "seed" in taken:
        options.setdefault("seed", recipe.seed)
    check_options(options, maker, "data.options", given=tuple(given))
    dataset: Dataset = maker(**given, **_typed(options, maker))
    return dataset


def _typed(options: dict[str, Any], maker: Any) -> dict[str, Any]:
    """Convert options to the types of a function's annotations; refuse values of other types."""
    try:
        parameters = inspect.signature(maker, eval_str=True).parameters
    except (NameError, TypeError):  # a user's function, whose annotations cannot be read
        return options
    plain = {name: one.annotation for name, one in parameters.items() if _is_plain(one.annotation)}
    return {
        name: decode_settings(plain[name], value, f"data.options.{name}")
        if name in plain
        else value
        for name, value in options.items()
    }


def _is_plain(hint: Any) -> bool:
    is_union = get_origin(hint) in (UnionType, Union)
    return {*(get_args(hint) if is_union else [hint])} <= _PLAIN


def build_backbone(recipe: Recipe, *, device: torch.device | str = "cpu") -> nn.Module:
    """Build the backbone with new weights, drawn on the CPU from the recipe's seed, then moved."""
    part, device = recipe.model, torch.device(device)
    drawn_on = device if device.type == "meta" else torch.device("cpu")
    try:
        with _seeded(recipe.seed, drawn_on), drawn_on:
            backbone = create_backbone(
                part.backbone, embedding_dim=part.embedding_dim, **dict(part.options)
            )
    except (TypeError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, TypeError) and "argument" in text:
            raise ConfigError(
                f"model.options {part.options} do not fit {part.backbone} ({error}); remove the "
                "unknown ones"
            ) from error
        if isinstance(error, TypeError) or not any(mark in text for mark in _TOO_LARGE):
            raise
        raise ConfigError(
            f"model.options {part.options} or model.embedding_dim {part.embedding_dim} do not fit "
            f"into memory ({error}); make {part.backbone} smaller"
        ) from error
    layout = torch.channels_last if recipe.precision.channels_last else torch.preserve_format
    return backbone.to(device=device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def build_loss(
    recipe: Recipe,
    *,
    num_classes: int | None = None,
    device: torch.device | str = "cpu",
    dataset: Dataset | None = None,
) -> ScheduledLoss:
    """Build the loss of a recipe; random draws of its margin use the recipe's seed.

    The training samples of each class, where a reference needs them, are those of the dataset.
    """
    counts = None
    if recipe.loss.needs_counts and dataset is not None:
        labels = dataset.labels
        if labels is None:
            raise ConfigError(
                "loss.reference needs the training samples of each class and the data has no list "
                "of labels; use data with an index (qmargin data index)"
            )
        found = np.bincount(np.asarray(labels).astype(np.int64), minlength=dataset.num_classes)
        counts = torch.from_numpy(found)
    options: dict[str, Any] = {"num_classes": num_classes, "device": device, "counts": counts}
    return ScheduledLoss(recipe.loss, seed=recipe.seed, **options)


def build_head(
    recipe: Recipe,
    *,
    num_classes: int | None = None,
    device: torch.device | str = "cpu",
    loss: MarginLoss | None = None,
    **options: Any,
) -> MarginClassifier:
    """Build the classifier with new prototypes from the recipe's seed and further ``options``."""
    device = torch.device(device)
    classes = recipe.data.num_classes if num_classes is None else num_classes
    if classes is None:
        raise ConfigError("data.num_classes is missing; set it, or count the classes of the data")
    if recipe.data.num_classes not in (None, classes):
        given = recipe.data.num_classes
        raise ConfigError(f"data.num_classes is {given} and the data has {classes}; correct it")
    if loss is None:
        loss = build_loss(recipe, num_classes=classes, device=device).loss
    with _seeded(recipe.seed + 1, device):  # draws independent of the backbone's
        return MarginClassifier(
            recipe.model.embedding_dim,
            classes,
            loss,
            path=_build_path(recipe.head, seed=recipe.seed),
            gradient=recipe.head.gradient_form,
            device=device,
            **options,
        )


def _build_path(part: HeadPart, *, seed: int) -> StepPath:
    """The path of a head part, with the settings that belong to it."""
    screen, chunks = (
        None if name is None else getattr(torch, name)
        for name in (part.screen_dtype, part.chunk_dtype)
    )
    if part.path == "sampled":
        return Sampled(part.sample_rate, seed=seed)
    if part.path == "paper":
        return TopK(part.top_percent)
    if part.path == "chunked":
        return Chunked(dtype=chunks, screen_dtype=screen)
    if part.path == "dense":
        return Dense()
    kind = Sparse if part.path == "sparse" else Auto
    return kind(screen_dtype=screen, chunk_dtype=chunks)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators inside a block and restore their state afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def load_pretrained_(backbone: nn.Module, source: str | Path) -> str:
    """Load the weights of a file or model directory into a backbone; return the file's SHA-256."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not is_model_directory(path):
            raise ConfigError(
                f"model.weights is {source}, not a model directory; is it a run for run.start_from?"
            )
        path = path / BACKBONE
    try:
        load_weights_(backbone, path)
    except DataError as error:
        raise ConfigError(f"model.weights cannot be used: {error}") from error
    return sha256_of(path)


def load_start_weights_(backbone: nn.Module, head: MarginClassifier, source: str | Path) -> None:
    """Start with the prototypes and the backbone of a run, averaged if it wrote an average."""
    source = Path(source).expanduser()
    if (source / MANIFEST).is_file():
        checkpoint = open_checkpoint(source)
    else:
        found = newest(source / CHECKPOINTS).checkpoint
        if found is None:
            raise ConfigError(
                f"run.start_from is {source}, which has no checkpoint; give the output "
                "folder of `qmargin train`"
            )
        checkpoint = found
    num_classes = checkpoint.manifest.num_classes
    if num_classes != head.num_classes:
        raise ConfigError(
            f"run.start_from {source} has {num_classes:,} classes and this run has "
            f"{head.num_classes:,}; train on the same identities, of speech with "
            "data.options.keep_speed_classes if that run changed speeds"
        )
    average = source / AVERAGE
    weights = read_tensors(average) if average.is_file() else read_backbone(checkpoint)
    rows = read_class_rows(checkpoint, head.shard.start, head.shard.stop)
    try:
        backbone.load_state_dict(weights)
        with torch.no_grad():
            head.prototypes.copy_(rows[PROTOTYPES])
    except RuntimeError as error:
        raise ConfigError(
            f"run.start_from {source} is of a different network ({error}); set model as it is there"
        ) from error
