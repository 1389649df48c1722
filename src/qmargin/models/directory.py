"""Model directories: weights, card, recipe, run and thresholds.

``backbone.safetensors`` and ``card.json`` suffice to rebuild the network.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError
from qmargin.files import describe_file, open_regular, sync_folder, write_atomically, write_file
from qmargin.models import create_backbone
from qmargin.models.weights import read_safetensors

FORMAT = "qmargin-model 1"
MODALITIES = ("images", "audio", "arrays")
PIXELS = {"-1 to 1": (-1.0, 1.0), "0 to 1": (0.0, 1.0)}  # what bytes of an image become
MAX_BYTES = 1_000_000
_OWN = (  # entries that are not facts
    "format", "name", "modality", "input_shape", "backbone", "backbone_options", "embedding_dim",
    "weights_sha256", "pixels",
)  # fmt: skip

INTENDED_USE = (
    "Comparing two samples of people who know about it and have agreed to it, with a threshold "
    "measured on similar data; not for identifying people in public or without their consent"
)
LIMITS = (
    "Error rates differ between groups of people and between conditions; those on the data that "
    "this model was evaluated on may not hold for other data"
)


@dataclass(frozen=True)
class ModelCard:
    """Everything needed to rebuild a model, and facts to display."""

    name: str
    modality: str  # "images" (RGB), "audio" or "arrays" (floats, taken as they are)
    input_shape: tuple[int, ...]  # (3, height, width) for images; empty where lengths vary
    backbone: str  # its name in ``qmargin.models``
    embedding_dim: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of the backbone
    weights_sha256: str = ""
    facts: dict[str, str] = field(default_factory=dict, hash=False)  # origin, intended use, limits
    pixels: str = "-1 to 1"  # a name in PIXELS; written only if not the default

    def __post_init__(self) -> None:
        if self.pixels not in PIXELS:
            raise ConfigError(f"pixels is {self.pixels!r}; it must be one of {', '.join(PIXELS)}")
        if self.modality not in MODALITIES:
            raise ConfigError(
                f"modality is {self.modality!r}; it must be one of {', '.join(MODALITIES)}"
            )
        if any(size < 1 for size in (*self.input_shape, self.embedding_dim)):
            raise ConfigError(
                f"input_shape is {self.input_shape} and embedding_dim {self.embedding_dim}; "
                "every size must be at least 1"
            )
        if self.modality == "images" and (len(self.input_shape), *self.input_shape[:1]) != (3, 3):
            raise ConfigError(
                f"input_shape is {self.input_shape}; that of images is (3, height, width)"
            )
        taken = sorted(self.facts.keys() & set(_OWN))
        if taken:
            raise ConfigError(f"{taken[0]!r} is a field of the card; choose another name")

    def with_facts(self, facts: Mapping[str, str]) -> ModelCard:
        """The same card with more facts; those of the same name are replaced."""
        return replace(self, facts={**self.facts, **facts})

    def to_texts(self) -> dict[str, str]:
        """The card as texts by name, as in results and reports."""
        return {
            "format": FORMAT,
            "name": self.name,
            "modality": self.modality,
            "input_shape": " x ".join(map(str, self.input_shape)),
            "backbone": self.backbone,
            "backbone_options": json.dumps(self.options, sort_keys=True),
            "embedding_dim": str(self.embedding_dim),
            "weights_sha256": self.weights_sha256,
            **({"pixels": self.pixels} if self.pixels != ModelCard.pixels else {}),
            **self.facts,
        }

    def to_json(self) -> bytes:
        """The content of ``card.json``."""
        return (json.dumps(self.to_texts(), indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, content: bytes, source: str) -> ModelCard:
        """Read the content of ``card.json``; ``source`` is named in errors."""
        if len(content) > MAX_BYTES:
            raise DataError(f"{source} is over {MAX_BYTES:,} bytes; this is another kind of file")
        try:
            texts = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{source} is not JSON ({error}); export the model again") from error
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise DataError(f"{source} is not a JSON object of texts; export the model again")
        if texts.get("format") != FORMAT:
            raise DataError(
                f"{source} has the format {texts.get('format')!r} and this program reads "
                f"{FORMAT!r}; export the model again"
            )
        missing = [name for name in _OWN if name not in texts and name != "pixels"]
        if missing:
            raise DataError(f"{source} has no {', '.join(missing)}; export the model again")
        shape, options = texts["input_shape"], texts["backbone_options"]
        try:
            card = cls(
                name=texts["name"],
                modality=texts["modality"],
                input_shape=tuple(int(size) for size in shape.split("x")) if shape else (),
                backbone=texts["backbone"],
                embedding_dim=int(texts["embedding_dim"]),
                options=json.loads(options),
                weights_sha256=texts["weights_sha256"],
                facts={name: text for name, text in texts.items() if name not in _OWN},
                pixels=texts.get("pixels", cls.pixels),
            )
        except (ValueError, RecursionError) as error:
            raise DataError(f"{source} is damaged ({error}); export the model again") from error
        if not isinstance(card.options, dict):
            raise DataError(
                f"{source} is damaged: backbone_options {options[:60]!r} is not an object; "
                "export the model again"
            )
        return card


BACKBONE = "backbone.safetensors"
RECIPE = "recipe.yaml"
CARD = "card.json"
RUN = "run.json"
THRESHOLDS = "thresholds.json"


def is_model_directory(path: str | Path) -> bool:
    """Whether a directory looks like a model's: it has weights and a card."""
    return all((Path(path) / name).is_file() for name in (BACKBONE, CARD))


def write_model(
    directory: str | Path,
    *,
    weights: Mapping[str, Tensor],
    card: ModelCard,
    recipe: str,
    run: str = "",
) -> ModelCard:
    """Write a model directory, completely or not at all, and return its card.

    The directory must not exist, or be empty. The weights are checked against the backbone of
    the card, whose ``weights_sha256`` is filled in. An empty ``recipe`` or ``run`` is not written.
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
        entry = write_file(temporary / BACKBONE, [save(tensors, metadata={"format": "pt"})])
        card = replace(card, weights_sha256=entry.sha256)
        write_atomically(temporary / CARD, card.to_json())
        for name, text in ((RECIPE, recipe), (RUN, run)):
            if text:
                write_atomically(temporary / name, text.encode())
        if directory.exists():
            directory.rmdir()
        temporary.replace(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(directory.parent)
    return card


def read_card(directory: str | Path) -> ModelCard:
    """The card of a model directory."""
    directory = Path(directory)
    if not is_model_directory(directory):
        raise DataError(
            f"{directory} is not a model directory: it needs {BACKBONE} and {CARD}; make one with "
            "`qmargin export RUN --out DIR`"
        )
    path = directory / CARD
    with open_regular(path) as file:
        return ModelCard.from_json(file.read(MAX_BYTES + 1), str(path))


def add_facts(directory: str | Path, facts: Mapping[str, str]) -> ModelCard:
    """Add facts to a model's card, and return it."""
    card = read_card(directory).with_facts(facts)
    write_atomically(Path(directory) / CARD, card.to_json())
    return card


def load_backbone(
    directory: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[nn.Module, ModelCard]:
    """The network of a model directory, ready for use, and its card."""
    card = read_card(directory)
    path = Path(directory) / BACKBONE
    digest = describe_file(path).sha256
    if digest != card.weights_sha256:
        raise DataError(
            f"{path} has the hash {digest[:12]}... and the card says {card.weights_sha256:.12}; "
            "the file is damaged or belongs to another model, export it again"
        )
    weights = read_safetensors(path)
    _check_weights(card, weights, str(path))
    with torch.random.fork_rng(devices=[]):  # initial values are drawn and discarded
        backbone = _build(card)
    backbone.load_state_dict(weights)
    return backbone.to(device).eval().requires_grad_(False), card


def _build(card: ModelCard) -> nn.Module:
    try:
        return create_backbone(card.backbone, embedding_dim=card.embedding_dim, **card.options)
    except (TypeError, ConfigError) as error:
        raise DataError(
            f"the card asks for the backbone {card.backbone!r} with the options {card.options}, "
            f"which cannot be built ({error}); install the qmargin that wrote it"
        ) from error


def _check_weights(card: ModelCard, weights: Mapping[str, Tensor], source: str) -> None:
    """Compare names and shapes with the card's network before allocating memory."""
    with torch.device("meta"):
        expected = {name: value.shape for name, value in _build(card).state_dict().items()}
    found = {name: value.shape for name, value in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            has, needs = (
                list(shapes[name]) if name in shapes else "nothing" for shapes in (found, expected)
            )
            raise DataError(
                f"{source}: {name!r} has the shape {has} and {card.backbone} needs {needs}; "
                "these are not the weights of this network"
            )
