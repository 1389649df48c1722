"""A model on the disk: weights, recipe, card and thresholds in one directory.

``backbone.safetensors`` and ``card.json`` are all that is needed to build the network again;
``recipe.yaml`` is the record of how it was trained, and ``thresholds.json``, where there is one,
what its evaluation found (``qmargin.evaluation.thresholds``).
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError
from qmargin.files import describe_file, open_regular, sync_folder, write_atomically, write_file
from qmargin.models.card import MAX_BYTES, ModelCard, card_from_json, card_to_json
from qmargin.models.registry import create_backbone

BACKBONE = "backbone.safetensors"
RECIPE = "recipe.yaml"
CARD = "card.json"
THRESHOLDS = "thresholds.json"


def is_model_directory(path: str | Path) -> bool:
    """Whether a directory looks like a model's: it has weights and a card."""
    return all((Path(path) / name).is_file() for name in (BACKBONE, CARD))


def write_model(
    directory: str | Path, *, weights: Mapping[str, Tensor], card: ModelCard, recipe: str
) -> ModelCard:
    """Make a model directory, which appears whole or not at all.

    Args:
        directory: Does not exist yet, or is empty.
        weights: State dict of the backbone; checked against the one that the card describes.
        card: Its ``weights_sha256`` is filled in.
        recipe: Text of ``recipe.yaml``; empty for weights that no recipe made.

    Returns:
        The card as written.

    Raises:
        ConfigError: The directory has something in it.
        DataError: The weights are not those of the card's backbone.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not empty; choose another place")
    _check_weights(card, weights, "the weights")
    from safetensors.torch import save

    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.mkdir(parents=True)
        # clones, because tensors that share memory cannot be saved
        tensors = {
            name: value.detach().cpu().contiguous().clone() for name, value in weights.items()
        }
        content = save(tensors, metadata={"format": "pt"})
        entry = write_file(temporary / BACKBONE, [content])
        card = replace(card, weights_sha256=entry.sha256)
        write_atomically(temporary / CARD, card_to_json(card))
        if recipe:
            write_atomically(temporary / RECIPE, recipe.encode())
        if directory.exists():
            directory.rmdir()
        temporary.replace(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(directory.parent)
    return card


def read_card(directory: str | Path) -> ModelCard:
    """The card of a model directory.

    Raises:
        DataError: It is not one, or the card is damaged.
    """
    directory = Path(directory)
    if not is_model_directory(directory):
        raise DataError(
            f"{directory} is not a model directory: it needs {BACKBONE} and {CARD}; make one with "
            "`qmargin export RUN --out DIR`"
        )
    path = directory / CARD
    with open_regular(path) as file:
        return card_from_json(file.read(MAX_BYTES + 1), str(path))


def add_facts(directory: str | Path, facts: Mapping[str, str]) -> ModelCard:
    """Write more facts into a model's card, and return it."""
    card = read_card(directory).with_facts(facts)
    write_atomically(Path(directory) / CARD, card_to_json(card))
    return card


def load_backbone(
    directory: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[nn.Module, ModelCard]:
    """The network of a model directory, ready for use, and its card.

    Args:
        directory: As ``write_model`` makes it.
        device: Where the network goes.

    Raises:
        DataError: A file is damaged, or the weights are not those of the card.
    """
    card = read_card(directory)
    path = Path(directory) / BACKBONE
    digest = describe_file(path).sha256
    if digest != card.weights_sha256:
        raise DataError(
            f"{path} has the hash {digest[:12]}... and the card says {card.weights_sha256:.12}; "
            "the file is damaged or belongs to another model, export it again"
        )
    weights = _read_weights(path)
    _check_weights(card, weights, str(path))
    with torch.random.fork_rng(devices=[]):  # first values are drawn, and thrown away
        backbone = _build(card)
    backbone.load_state_dict(weights)
    return backbone.to(device).eval().requires_grad_(False), card


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file ({error})") from error


def _build(card: ModelCard) -> nn.Module:
    try:
        return create_backbone(card.backbone, embedding_dim=card.embedding_dim, **card.options)
    except (TypeError, ConfigError) as error:
        raise DataError(
            f"the card asks for the backbone {card.backbone!r} with the options {card.options}, "
            f"which cannot be built ({error}); install the qmargin that wrote it"
        ) from error


def _check_weights(card: ModelCard, weights: Mapping[str, Tensor], source: str) -> None:
    """Compare names and shapes with the card's network before any memory is taken for it."""
    with torch.device("meta"):
        expected = {name: value.shape for name, value in _build(card).state_dict().items()}
    found = {name: value.shape for name, value in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            has, needs = (
                "nothing" if shapes.get(name) is None else str(list(shapes[name]))
                for shapes in (found, expected)
            )
            raise DataError(
                f"{source}: {name!r} has the shape {has} and {card.backbone} needs {needs}; "
                "these are not the weights of this network"
            )
