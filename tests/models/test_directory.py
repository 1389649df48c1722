"""Model directories: whole or absent, loaded bit for bit, refused when they do not add up."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from helpers.model_directories import make_model
from qmargin.errors import ConfigError, DataError
from qmargin.models import create_backbone
from qmargin.models.directory import (
    BACKBONE,
    CARD,
    RECIPE,
    ModelCard,
    add_facts,
    is_model_directory,
    load_backbone,
    read_card,
    write_model,
)

FULL_CARD = ModelCard(
    "a model",
    "images",
    (3, 112, 96),
    "iresnet50",
    512,
    options={"dropout": 0.4, "names": ["a"]},
    weights_sha256="ab" * 32,
    facts={"alpha": "1.25", "licence": "CC0, né à Paris"},
)


def test_a_card_survives_its_file_and_holds_texts_only():
    assert ModelCard.from_json(FULL_CARD.to_json(), "card.json") == FULL_CARD
    texts = json.loads(FULL_CARD.to_json())
    assert all(isinstance(text, str) for text in texts.values())


def test_facts_replace_facts_and_nothing_else():
    assert FULL_CARD.with_facts({"alpha": "2"}).facts == {**FULL_CARD.facts, "alpha": "2"}
    with pytest.raises(ConfigError, match="'backbone'"):
        FULL_CARD.with_facts({"backbone": "other"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modality", "smells"),
        ("input_shape", (3, 112)),
        ("input_shape", (1, 112, 112)),
        ("input_shape", (3, 0, 1)),
        ("embedding_dim", 0),
    ],
)
def test_impossible_cards_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        replace(FULL_CARD, **{name: value})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("format", "qmargin-model 9", "reads 'qmargin-model 1'"),
        ("embedding_dim", "many", "damaged"),
        ("embedding_dim", "-3", "damaged"),
        ("input_shape", "3 x x", "damaged"),
        ("backbone_options", "[]", "damaged"),
        ("backbone_options", "{", "damaged"),
        ("backbone", None, "has no backbone"),
    ],
)
def test_damaged_cards_name_their_file(name, text, message):
    texts = {**FULL_CARD.to_texts(), name: text}
    content = {key: value for key, value in texts.items() if value is not None}
    with pytest.raises(DataError, match=f"some.json.*{message}"):
        ModelCard.from_json(json.dumps(content).encode(), "some.json")


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000, b" " * 2_000_000]
)
def test_what_is_no_card_is_refused(content):
    with pytest.raises(DataError, match=r"some\.json"):
        ModelCard.from_json(content, "some.json")


def test_weights_come_back_bit_for_bit(tmp_path):
    torch.manual_seed(3)
    original = create_backbone("iresnet18", embedding_dim=16)
    original.train()(torch.randn(4, 3, 112, 112))  # running statistics of their own
    card = ModelCard("face", "images", (3, 112, 112), "iresnet18", 16)
    written = write_model(tmp_path / "m", weights=original.state_dict(), card=card, recipe="r\n")
    before = torch.get_rng_state()
    loaded, read = load_backbone(tmp_path / "m")
    assert torch.equal(torch.get_rng_state(), before)
    assert read == written
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    images = torch.randn(2, 3, 112, 112)
    assert torch.equal(loaded(images), original.eval()(images))
    assert (tmp_path / "m" / RECIPE).read_text() == "r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    modes = {path.stat().st_mode for path in (tmp_path / "m").iterdir()}
    assert len(modes) == 1  # whoever may read the card may read the weights


def test_weights_that_share_memory_can_be_written(tmp_path):
    backbone = create_backbone("small_mlp", embedding_dim=64, hidden_dim=64, input_dim=64)
    weights = backbone.state_dict()
    weights["layers.3.weight"] = weights["layers.0.weight"]
    options = {"hidden_dim": 64, "input_dim": 64}
    card = ModelCard("tied", "arrays", (64,), "small_mlp", 64, options)
    write_model(tmp_path / "m", weights=weights, card=card, recipe="")
    loaded, _ = load_backbone(tmp_path / "m")
    assert torch.equal(loaded.layers[0].weight, loaded.layers[3].weight)


def test_only_an_empty_place_is_written_to(tmp_path):
    (tmp_path / "empty").mkdir()
    make_model(tmp_path / "empty")
    assert is_model_directory(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    for name in ("full", "empty"):
        with pytest.raises(ConfigError, match="is not empty"):
            make_model(tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qmargin.models.directory.write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        make_model(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_network_are_refused(tmp_path):
    weights = create_backbone("small_conv", embedding_dim=8, width=4).state_dict()
    card = ModelCard("m", "images", (3, 16, 16), "small_conv", 9, options={"width": 4})
    with pytest.raises(DataError, match=r"'project\.bias' has the shape \[8\] and .* needs \[9\]"):
        write_model(tmp_path / "m", weights=weights, card=card, recipe="")
    del weights["project.bias"]
    card = replace(card, embedding_dim=8)
    with pytest.raises(DataError, match=r"'project\.bias'"):
        write_model(tmp_path / "m", weights=weights, card=card, recipe="")
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_is_noticed(tmp_path):
    make_model(tmp_path / "m")
    path = tmp_path / "m" / BACKBONE
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"backbone\.safetensors has the hash .* damaged"):
        load_backbone(tmp_path / "m")


def test_a_card_cannot_ask_for_more_than_its_weights(tmp_path):
    """A huge network is refused by its shapes, before memory is taken for it."""
    card = make_model(tmp_path / "m")
    for changes, message in (
        ({"embedding_dim": 10**12}, "these are not the weights"),
        ({"backbone": "os.system"}, "no backbone 'os.system'"),
        ({"options": {"width": 4, "run": "x"}}, "cannot be built"),
    ):
        (tmp_path / "m" / CARD).write_bytes(replace(card, **changes).to_json())
        with pytest.raises(DataError, match=message):
            load_backbone(tmp_path / "m")


def test_another_file_in_the_place_of_weights(tmp_path):
    card = make_model(tmp_path / "m")
    (tmp_path / "m" / BACKBONE).write_bytes(b"not tensors at all")
    digest = hashlib.sha256(b"not tensors at all").hexdigest()
    (tmp_path / "m" / CARD).write_bytes(replace(card, weights_sha256=digest).to_json())
    with pytest.raises(DataError, match="is not a safetensors file"):
        load_backbone(tmp_path / "m")


def test_facts_are_added_to_the_card_on_the_disk(tmp_path):
    make_model(tmp_path / "m")
    add_facts(tmp_path / "m", {"licence": "CC0"})
    assert json.loads((tmp_path / "m" / CARD).read_text())["licence"] == "CC0"
    assert load_backbone(tmp_path / "m")[1].facts == {"licence": "CC0"}


def test_what_is_no_model_directory_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match="qmargin export RUN --out DIR"):
        read_card(tmp_path)
