"""From a recipe to the objects of a run: the same weights on every rank and device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qmargin.errors import ConfigError, DataError
from qmargin.files import sha256_of
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.paths import Auto, Chunked, Dense, Sampled, Sparse, StepPath, TopK
from qmargin.losses.margin_loss import MarginLoss
from qmargin.models import create_backbone
from qmargin.models.directory import BACKBONE, is_model_directory
from qmargin.models.weights import load_weights_
from qmargin.registry import datasets
from qmargin.schema import check_options, decode_settings, suggest
from qmargin.training.checkpoint.files import MANIFEST, PROTOTYPES, read_tensors
from qmargin.training.checkpoint.reader import (
    Checkpoint,
    newest,
    open_checkpoint,
    read_backbone,
    read_class_rows,
)
from qmargin.training.loss_part import ScheduledLoss
from qmargin.training.optim import AVERAGE
from qmargin.training.recipe import HeadPart, Recipe
from qmargin.training.start import CHECKPOINTS

if TYPE_CHECKING:
    from qmargin.data.faces import FaceImages
    from qmargin.data.samples import Dataset


STORED: dict[str, type] = {
    **dict.fromkeys(("root", "split", "index", "decoder", "channels"), str),
    "verify": bool,
}
"""Options of ``qmargin.data.open.open_images``; all others are of ``FaceImages``."""


def open_images(
    path: str, *, index_dir: str | None = None, size: int = 112, **options: Any
) -> FaceImages:
    """Pictures of a folder, a list, RecordIO or tar files, for a loader.

    An index that is missing is built first, which reads all data once: ``qmargin data index`` does
    it before a run of several ranks.

    Args:
        path: Where they are.
        index_dir: Folder for the index of the samples; None for a place beside them.
        size: Edge of a picture in pixels.
        options: ``root``, ``split``, ``index``, ``verify``, ``decoder`` and ``channels`` of
            ``open_dataset``, and what ``FaceAugmentation`` takes: ``flip``, ``photometric`` and
            others.

    Raises:
        ConfigError: There is nothing at the path, or an option is unknown.
        DataError: What is there cannot be read.
    """
    from qmargin.data.faces import FaceAugmentation, FaceImages
    from qmargin.data.open import open_images as open_stored

    looks = [field.name for field in fields(FaceAugmentation)]
    for name in options:
        if name not in (*STORED, *looks):
            known = suggest(name, ["size", *STORED, *looks])
            raise ConfigError(f"data.options.{name} is unknown, {known}")
    stored = {
        name: decode_settings(kind, options[name], f"data.options.{name}")
        for name, kind in STORED.items()
        if name in options
    }
    size = decode_settings(int, size, "data.options.size")
    augmentation = FaceAugmentation(**{name: options[name] for name in looks if name in options})
    place = Path(path).expanduser()
    if not place.exists():
        raise ConfigError(
            f"data.path is {path!r}, where there is nothing; say where the images are with "
            "--set data.path=DIR"
        )
    return FaceImages(open_stored(place, index_dir=index_dir, **stored), size, augmentation)


def load_pretrained_(backbone: nn.Module, source: str | Path) -> str:
    """Put the weights of a file or model directory into a backbone; all of them must fit.

    Args:
        backbone: Of the run.
        source: A model directory, a safetensors file, or a PyTorch checkpoint, which is read
            without running what is in it (``qmargin.models.weights``).

    Returns:
        The SHA-256 of the file, for the record.

    Raises:
        ConfigError: There is no such file, it cannot be read, or it is of another network.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not is_model_directory(path):
            raise ConfigError(
                f"model.weights is {source}, which is no model directory; give one, or a file of "
                "weights; a run is what run.start_from takes"
            )
        path = path / BACKBONE
    try:
        load_weights_(backbone, path)
    except DataError as error:
        raise ConfigError(f"model.weights cannot be used: {error}") from error
    return sha256_of(path)


_TOO_LARGE = ("can't allocate memory", "not enough memory", "overflow")  # in torch's words


def build_dataset(recipe: Recipe) -> Dataset:
    """The samples of a recipe, by ``qmargin.registry.datasets``.

    Raises:
        ConfigError: If nothing can read this kind of data, or an option is unknown.
    """
    part = recipe.data
    maker = datasets.get(part.kind)
    taken = inspect.signature(maker).parameters
    given = {"path": part.path, "num_classes": part.num_classes, "index_dir": part.index_dir}
    given = {name: value for name, value in given.items() if name in taken}
    options: dict[str, Any] = dict(part.options)
    if "seed" in taken:
        options.setdefault("seed", recipe.seed)
    check_options(options, maker, "data.options", given=tuple(given))
    dataset: Dataset = maker(**given, **options)
    return dataset


def build_backbone(recipe: Recipe, *, device: torch.device | str = "cpu") -> nn.Module:
    """The backbone with fresh weights, which follow from the recipe's seed alone.

    Weights are drawn on the CPU and moved, so that they are the same wherever the run is; on the
    meta device nothing is drawn.
    """
    part, device = recipe.model, torch.device(device)
    drawn_on = device if device.type == "meta" else torch.device("cpu")
    try:
        with _seeded(recipe.seed, drawn_on), drawn_on:
            backbone = create_backbone(
                part.backbone, embedding_dim=part.embedding_dim, **dict(part.options)
            )
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ConfigError(
            f"model.options is {part.options}, which {part.backbone} does not take ({error}); "
            "remove what it does not know"
        ) from error
    except RuntimeError as error:
        if not any(mark in str(error) for mark in _TOO_LARGE):
            raise
        raise ConfigError(
            f"model.options is {part.options} and model.embedding_dim {part.embedding_dim}, a "
            f"{part.backbone} that does not fit into memory ({error}); make it smaller"
        ) from error
    layout = torch.channels_last if recipe.precision.channels_last else torch.preserve_format
    return backbone.to(device=device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def build_head(
    recipe: Recipe,
    *,
    num_classes: int | None = None,
    device: torch.device | str = "cpu",
    loss: MarginLoss | None = None,
    **options: Any,
) -> MarginClassifier:
    """The classifier with fresh prototypes, which follow from the recipe's seed.

    Args:
        recipe: Loss, path, update and precision.
        num_classes: Where the recipe leaves them to the data.
        device: Where the prototypes live.
        loss: Instead of building the recipe's own.
        options: Passed on to ``MarginClassifier``, such as the group of ranks that share it.
    """
    part, device = recipe.head, torch.device(device)
    classes = recipe.data.num_classes if num_classes is None else num_classes
    if classes is None:
        raise ConfigError("data.num_classes is missing; set it, or count the classes of the data")
    if recipe.data.num_classes not in (None, classes):
        raise ConfigError(
            f"data.num_classes is {recipe.data.num_classes} and the data has {classes}; correct it"
        )
    if loss is None:
        loss = build_loss(recipe, num_classes=classes, device=device).loss
    with _seeded(recipe.seed + 1, device):  # other draws than the backbone's
        return MarginClassifier(
            recipe.model.embedding_dim,
            classes,
            loss,
            path=build_path(part, seed=recipe.seed),
            gradient=part.gradient_form,
            device=device,
            **options,
        )


def build_path(part: HeadPart, *, seed: int) -> StepPath:
    """The path of a head part, with the settings that belong to it."""
    screen, chunks = _dtype(part.screen_dtype), _dtype(part.chunk_dtype)
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


def build_loss(
    recipe: Recipe, *, num_classes: int | None = None, device: torch.device | str = "cpu"
) -> ScheduledLoss:
    """The loss of a recipe; draws of its margin follow the recipe's seed."""
    return ScheduledLoss(recipe.loss, seed=recipe.seed, num_classes=num_classes, device=device)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws from a seed inside; outside, the generators are as they were."""
    places = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=places):
        torch.manual_seed(seed)
        yield


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def load_start_weights_(backbone: nn.Module, head: MarginClassifier, source: str | Path) -> None:
    """Put the backbone of a run, averaged where it wrote an average, and its prototypes in.

    Args:
        backbone: Of the new run.
        head: Of the new run; it takes the rows of its own classes.
        source: Output folder of the other run, or one of its checkpoints, whose own weights are
            taken.

    Raises:
        ConfigError: There is no such run, or its network or number of classes is another.
    """
    source = Path(source).expanduser()
    checkpoint = _checkpoint(source)
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
            f"run.start_from {source} is of another network ({error}); give model the options "
            "that it has there"
        ) from error


def _checkpoint(source: Path) -> Checkpoint:
    if (source / MANIFEST).is_file():
        return open_checkpoint(source)
    found = newest(source / CHECKPOINTS).checkpoint
    if found is None:
        raise ConfigError(
            f"run.start_from is {source}, where no run has saved a checkpoint; give the output "
            "folder of `qmargin train`"
        )
    return found
