"""The model card: what a model is, as one JSON object of texts that a report can show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qmargin.errors import ConfigError, DataError

FORMAT = "qmargin-model 1"
MODALITIES = ("images", "audio", "arrays")
MAX_BYTES = 1_000_000
_OWN = (  # entries that are not facts
    "format",
    "name",
    "modality",
    "input_shape",
    "backbone",
    "backbone_options",
    "embedding_dim",
    "weights_sha256",
)

INTENDED_USE = (
    "Comparing two samples of people who know of it and agreed to it, with a threshold measured on "
    "data like theirs; not for identifying people in public or without their consent"
)
LIMITS = (
    "Error rates differ between groups of people and between conditions; those of the data that "
    "this model was evaluated on say nothing about other data"
)


@dataclass(frozen=True)
class ModelCard:
    """What is needed to build a model again, and facts for people.

    Args:
        name: Of the model.
        modality: ``"images"`` (RGB), ``"audio"`` or ``"arrays"`` (floats, taken as they are).
        input_shape: Of one sample, ``(3, height, width)`` for images; empty where lengths vary.
        backbone: Its name in ``qmargin.models.registry``.
        embedding_dim: ``d``.
        options: Of the backbone.
        weights_sha256: Fingerprint of ``backbone.safetensors``.
        facts: Everything else, by name: where the weights come from, intended use, limits.

    Examples:
        >>> card = ModelCard("demo", "images", (3, 112, 112), "iresnet18", 128)
        >>> card.to_texts()["input_shape"], ModelCard.from_texts(card.to_texts()) == card
        ('3 x 112 x 112', True)
    """

    name: str
    modality: str
    input_shape: tuple[int, ...]
    backbone: str
    embedding_dim: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    weights_sha256: str = ""
    facts: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
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
        """The card as texts by name, the form that results and reports carry."""
        return {
            "format": FORMAT,
            "name": self.name,
            "modality": self.modality,
            "input_shape": " x ".join(map(str, self.input_shape)),
            "backbone": self.backbone,
            "backbone_options": json.dumps(self.options, sort_keys=True),
            "embedding_dim": str(self.embedding_dim),
            "weights_sha256": self.weights_sha256,
            **self.facts,
        }

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], source: str = "the card") -> ModelCard:
        """Read ``to_texts`` back.

        Raises:
            DataError: Naming ``source`` and the entry that is missing or wrong.
        """
        if texts.get("format") != FORMAT:
            raise DataError(
                f"{source} has the format {texts.get('format')!r} and this program reads "
                f"{FORMAT!r}; export the model again"
            )
        missing = [name for name in _OWN if name not in texts]
        if missing:
            raise DataError(f"{source} has no {', '.join(missing)}; export the model again")
        try:
            return cls(
                name=texts["name"],
                modality=texts["modality"],
                input_shape=_sizes(texts["input_shape"]),
                backbone=texts["backbone"],
                embedding_dim=int(texts["embedding_dim"]),
                options=_options(texts["backbone_options"]),
                weights_sha256=texts["weights_sha256"],
                facts={name: text for name, text in texts.items() if name not in _OWN},
            )
        except (ValueError, RecursionError) as error:
            raise DataError(f"{source} is damaged ({error}); export the model again") from error


def card_to_json(card: ModelCard) -> bytes:
    """The content of ``card.json``."""
    return (json.dumps(card.to_texts(), indent=1, ensure_ascii=False) + "\n").encode()


def card_from_json(content: bytes, source: str) -> ModelCard:
    """Check and read ``card.json``; ``source`` is named in errors."""
    if len(content) > MAX_BYTES:
        raise DataError(f"{source} is over {MAX_BYTES:,} bytes; this is another kind of file")
    try:
        texts = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is not JSON ({error}); export the model again") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise DataError(f"{source} is not a JSON object of texts; export the model again")
    return ModelCard.from_texts(texts, source)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x")) if text else ()


def _options(text: str) -> dict[str, Any]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(f"backbone_options is {text[:60]!r}, not an object")
    return options
