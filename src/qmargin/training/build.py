"""From a recipe to the objects of a run: the same weights on every rank and device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qmargin.errors import ConfigError, MarginWarning
from qmargin.heads.classifier import MarginClassifier
from qmargin.losses.module import MarginLoss
from qmargin.maths.divergences import Alpha
from qmargin.models.registry import create_backbone
from qmargin.training.fields import check_options
from qmargin.training.loss_part import LossSettings
from qmargin.training.recipe import Recipe

if TYPE_CHECKING:
    from qmargin.data.samples import Dataset


_TOO_LARGE = ("can't allocate memory", "not enough memory", "overflow")  # in torch's words


def build_dataset(recipe: Recipe) -> Dataset:
    """The samples of a recipe.

    Raises:
        ConfigError: If nothing can read this kind of data, or an option is unknown.
    """
    from qmargin.data.strokes import StrokeIdentities
    from qmargin.data.synthetic import SyntheticIdentities

    part = recipe.data
    if part.kind == "images":
        from qmargin.training.image_data import open_images

        return open_images(part)
    if part.kind == "audio":
        from qmargin.data.speech import open_speech

        assert part.path is not None
        elsewhere = ("path", "index_dir")
        check_options(part.options, open_speech, "an option of audio data", given=elsewhere)
        speech_options: dict[str, Any] = {"index_dir": part.index_dir, **part.options}
        return open_speech(part.path, **speech_options)
    made: dict[str, Callable[..., Dataset]] = {
        "synthetic": SyntheticIdentities,
        "strokes": StrokeIdentities,
    }
    given = ("num_classes",)
    check_options(part.options, made[part.kind], f"an option of {part.kind} data", given=given)
    options: dict[str, Any] = {"seed": recipe.seed, **part.options}
    return made[part.kind](num_classes=part.num_classes, **options)


def build_backbone(recipe: Recipe, *, device: torch.device | str = "cpu") -> nn.Module:
    """The backbone with fresh weights, which follow from the recipe's seed alone.

    Weights are drawn on the CPU and moved, so that they are the same wherever the run is; on the
    meta device nothing is drawn.
    """
    part, device = recipe.model, torch.device(device)
    birthplace = device if device.type == "meta" else torch.device("cpu")
    try:
        with _seeded(recipe.seed, birthplace), birthplace:
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
    **options: Any,
) -> MarginClassifier:
    """The classifier with fresh prototypes, which follow from the recipe's seed.

    Args:
        recipe: Loss, path, update and precision.
        num_classes: Where the recipe leaves them to the data.
        device: Where the prototypes live.
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
    with _seeded(recipe.seed + 1, device):  # other draws than the backbone's
        head = MarginClassifier(
            recipe.model.embedding_dim,
            classes,
            build_loss(recipe),
            path=part.path,
            gradient=part.left_gradient,
            screen_dtype=_dtype(part.screen_dtype),
            sample_rate=part.sample_rate,
            top_percent=part.top_percent,
            seed=recipe.seed,
            device=device,
            **options,
        )
    head.chunk_dtype = _dtype(part.chunk_dtype)
    return head


def build_loss(recipe: Recipe) -> MarginLoss:
    """The loss with the recipe's own numbers; draws of its margin follow the recipe's seed."""
    return recipe.loss.build(seed=recipe.seed)


def set_loss_(head: MarginClassifier, recipe: Recipe, settings: LossSettings) -> None:
    """Give a head the alpha, margin and scale of the step about to be taken.

    A margin that keeps statistics or draws stays as it is; recipes do not schedule it.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> head = build_head(debug())
        >>> set_loss_(head, debug(), LossSettings(alpha=1.5, margin=0.1, scale=16.0))
        >>> head.loss
        MarginLoss(Alpha(alpha=1.5), PriorMargin(margin=0.1), scale=16, effective_margin=0.153)
    """
    loss, margin = head.loss, head.loss.margin
    if not recipe.loss.has_state:
        margin = recipe.loss.build_margin(settings.margin)
    divergence = Alpha(settings.alpha)
    if (loss.divergence, loss.margin, loss.scale) == (divergence, margin, settings.scale):
        return
    with warnings.catch_warnings():  # the numbers at the end were judged when the head was built
        warnings.simplefilter("ignore", MarginWarning)
        changed = MarginLoss(
            divergence,
            margin,
            scale=settings.scale,
            reduction=loss.reduction,
            ignore_index=loss.ignore_index,
            debug=loss.debug,
        )
    head.loss = changed.train(loss.training)


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
