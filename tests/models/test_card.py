"""The model card: texts only, read back as they were, and checked."""

import json

import pytest

from qmargin.errors import ConfigError, DataError
from qmargin.models.directory import ModelCard, card_from_json, card_to_json

CARD = ModelCard(
    "a model",
    "images",
    (3, 112, 96),
    "iresnet50",
    512,
    options={"dropout": 0.4, "names": ["a"]},
    weights_sha256="ab" * 32,
    facts={"alpha": "1.25", "licence": "CC0, né à Paris"},
)


def test_a_card_survives_its_file() -> None:
    assert card_from_json(card_to_json(CARD), "card.json") == CARD


def test_a_card_is_what_results_and_reports_carry() -> None:
    texts = json.loads(card_to_json(CARD))
    assert all(isinstance(text, str) for text in texts.values())


def test_facts_replace_facts_and_nothing_else() -> None:
    assert CARD.with_facts({"alpha": "2"}).facts == {**CARD.facts, "alpha": "2"}
    with pytest.raises(ConfigError, match="'backbone' is a field of the card"):
        CARD.with_facts({"backbone": "other"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modality": "smells"}, "one of images, audio, arrays"),
        ({"input_shape": (3, 112)}, r"\(3, height, width\)"),
        ({"input_shape": (1, 112, 112)}, r"\(3, height, width\)"),
        ({"input_shape": (3, 0, 1)}, "at least 1"),
        ({"embedding_dim": 0}, "at least 1"),
    ],
)
def test_impossible_cards_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelCard(**{**vars(CARD), **changes})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("format", "qmargin-model 9", "reads 'qmargin-model 1'"),
        ("embedding_dim", "many", "damaged"),
        ("embedding_dim", "-3", "damaged"),
        ("input_shape", "3 x x", "damaged"),
        ("backbone_options", "[]", "not an object"),
        ("backbone_options", "{", "damaged"),
        ("backbone", None, "has no backbone"),
    ],
)
def test_damaged_cards_name_their_file(name: str, text: str | None, message: str) -> None:
    texts = {**CARD.to_texts(), name: text}
    content = {key: value for key, value in texts.items() if value is not None}
    with pytest.raises(DataError, match=f"some.json.*{message}"):
        card_from_json(json.dumps(content).encode(), "some.json")


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000, b" " * 2_000_000]
)
def test_what_is_no_card_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"some\.json"):
        card_from_json(content, "some.json")
