"""From a recipe to backbone, head, data and weights: seeded, checked, the same everywhere."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from helpers.runs import events, tiny_recipe
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.export import export_run
from qmargin.files import sha256_of
from qmargin.heads.paths import Auto, Chunked, Dense, Sampled, Sparse, StepPath, TopK
from qmargin.models.directory import BACKBONE
from qmargin.recipes import get_recipe
from qmargin.registry import datasets
from qmargin.training.build import build_backbone, build_dataset, build_head, load_start_weights_
from qmargin.training.checkpoint import newest, read_backbone, read_tensors
from qmargin.training.distributed import Process
from qmargin.training.loop import train
from qmargin.training.optim import AVERAGE
from qmargin.training.recipe import DataPart, ModelPart, Recipe
from qmargin.training.recipe_files import apply_settings
from qmargin.training.session import build_session
from qmargin.training.step import take_step

NUM_CLASSES, PER_CLASS = 5, 4


def debug_with(*settings: str) -> Recipe:
    return apply_settings(get_recipe("debug"), settings)


def test_weights_follow_from_the_seed_and_leave_other_draws_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    recipe = get_recipe("debug")
    first, head = build_backbone(recipe), build_head(recipe)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    second, other = build_backbone(recipe), build_head(recipe)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(head.prototypes, other.prototypes)
    changed = build_head(debug_with("seed=1"))
    assert not torch.equal(head.prototypes, changed.prototypes)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ("head.path=sampled head.sample_rate=0.25 seed=5", Sampled(0.25, seed=5)),
        ("head.path=paper head.top_percent=2", TopK(2.0)),
        ("head.path=chunked head.chunk_dtype=bfloat16", Chunked(dtype=torch.bfloat16)),
        ("head.path=sparse head.screen_dtype=bfloat16", Sparse(screen_dtype=torch.bfloat16)),
        ("head.path=dense head.update=torch", Dense()),
        ("head.chunk_dtype=float32", Auto(chunk_dtype=torch.float32)),
    ],
)
def test_settings_reach_the_head(settings: str, path: StepPath) -> None:
    head = build_head(debug_with(*settings.split()))
    assert head.path == path
    assert head.gradient == ("dense" if "torch" in settings else "fused")
    assert (head.num_classes, head.embedding_dim) == (200, 32)


def test_the_number_of_classes_may_come_from_the_data() -> None:
    counted = replace(get_recipe("debug"), data=DataPart("images", 8, path="somewhere"))
    assert build_head(counted, num_classes=7).num_classes == 7
    with pytest.raises(ConfigError, match=r"data.num_classes is missing"):
        build_head(counted)
    with pytest.raises(ConfigError, match=r"num_classes is 200 and the data has 7"):
        build_head(get_recipe("debug"), num_classes=7)
    data = build_dataset(debug_with("data.options.samples_per_class=3", "seed=4"))
    assert (len(data), data.num_classes) == (600, 200)
    other = build_dataset(debug_with("seed=5"))
    assert not torch.equal(other.read(0, seed=0)[0], data.read(0, seed=0)[0])


def test_bad_options_are_refused(folder: Path) -> None:
    recipe = get_recipe("debug")
    backbone = replace(recipe, model=ModelPart("small_mlp", 8, {"depth": 3}))
    with pytest.raises(ConfigError, match=r"model.options .*depth"):
        build_backbone(backbone)
    with pytest.raises(ConfigError, match="did you mean 'small_mlp'"):
        build_backbone(debug_with("model.backbone=small_mpl"))
    for options, message in (
        ({"samples_per_class": 3, "noize": 1.0}, "data.options.noize .*did you mean 'noise'"),
        ({"noise": 1.0}, "data.options.samples_per_class is missing"),
        ({"samples_per_class": 3, "num_classes": 4}, "data.options.num_classes is unknown"),
        ({"samples_per_class": "few"}, "data.options.samples_per_class is 'few', not an integer"),
        ({"samples_per_class": 3, "noise": "low"}, "data.options.noise is 'low', not a finite"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_dataset(replace(recipe, data=replace(recipe.data, options=options)))
    for options, message in (
        ({"flipp": 0.5}, "data.options.flipp .*did you mean 'flip'"),
        ({"flip": 2.0}, "flip is 2.0"),
        ({"verify": 1}, "data.options.verify is 1"),
        ({"decoder": "cv2"}, "decoder is 'cv2'"),
        ({"size": 0.5}, "data.options.size is 0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_dataset(recipe_of(folder, **options))
    with pytest.raises(DataError, match="nowhere"):
        build_dataset(replace(recipe, data=DataPart("audio", 8, path="nowhere")))
    with pytest.raises(ConfigError, match=r"data.path is '.*nowhere'"):
        build_dataset(recipe_of(folder / "nowhere"))
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        build_dataset(recipe_of(folder / "empty"))


def test_options_become_the_types_that_a_kind_of_data_says() -> None:
    options = {"samples_per_class": 3, "size": 32, "flips": "1e-1", "difficulty": 1}
    recipe = replace(get_recipe("debug"), data=DataPart("people", 2, None, 4, options))
    people = build_dataset(recipe)
    assert (people.flips, people.difficulty) == (0.1, 1.0)  # YAML 1.1 takes 1e-1 for a text
    for name, value in (("mirror", 2), ("flips", "abc"), ("size", 64.5)):
        wrong = replace(recipe, data=replace(recipe.data, options=options | {name: value}))
        with pytest.raises(ConfigError, match=rf"data\.options\.{name} is {value!r}, not"):
            build_dataset(wrong)


def test_kinds_of_data_of_users_work_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets, "_entries", dict(datasets._entries))

    @datasets.register("lines")
    def lines(path: str, *, seed: int, size: int = 32) -> SyntheticIdentities:
        """Identities as many as the lines of a file."""
        count = len(Path(path).read_text(encoding="utf-8").splitlines())
        return SyntheticIdentities(count, 4, shape=(size,), seed=seed)

    (tmp_path / "names.txt").write_text("a\nb\nc\n", encoding="utf-8")
    part = DataPart("lines", 4, path=str(tmp_path / "names.txt"), options={"size": 16})
    recipe = replace(get_recipe("debug"), data=part, seed=3)
    data = build_dataset(recipe)
    assert (data.num_classes, data.seed, tuple(data.read(0, 0)[0].shape)) == (3, 3, (16,))
    assert part.is_stored and not get_recipe("debug").data.is_stored
    with pytest.raises(ConfigError, match="path is missing"):
        DataPart("lines", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Identities that are colours, one folder each."""
    draw = np.random.default_rng(0)
    for label in range(NUM_CLASSES):
        person = tmp_path / "faces" / f"person-{label}"
        person.mkdir(parents=True)
        for number in range(PER_CLASS):
            pixels = draw.integers(40 * label, 40 * label + 40, size=(112, 112, 3))
            pixels[:, :40] //= 2  # so that a mirror image is another image
            Image.fromarray(pixels.astype(np.uint8)).save(person / f"{number}.png")
    return tmp_path / "faces"


def recipe_of(folder: Path, *settings: str, **options: Any) -> Recipe:
    recipe = get_recipe("faces_r18_q_margin")
    data = DataPart("images", 4, path=str(folder), options=options)
    return apply_settings(replace(recipe, data=data), settings)


@pytest.mark.parametrize("channels_last", [True, False])
def test_networks_take_floats_of_the_bytes(folder: Path, channels_last: bool) -> None:
    """Workers send bytes; the step scales them on its device, in the layout of the network."""
    seen: list[torch.Tensor] = []
    setting = f"precision.channels_last={str(channels_last).lower()}"
    recipe = recipe_of(folder, setting, flip=0.0, size=32)
    recipe = replace(recipe, model=ModelPart("small_conv", 8))
    session = build_session(recipe, Process())
    session.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with session.stream() as batches:
        take_step(session, batches)
    (inputs,) = seen
    pixels = np.stack([session.dataset.read(int(i), 0)[0] for i in session.order.batch(0)])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert inputs.is_contiguous(memory_format=layout)
    torch.testing.assert_close(inputs, torch.from_numpy(pixels) / 127.5 - 1.0)


def test_options_reach_the_augmentation_and_the_reader(folder: Path) -> None:
    plain = build_dataset(recipe_of(folder, flip=0.0))
    assert (len(plain), plain.num_classes) == (NUM_CLASSES * PER_CLASS, NUM_CLASSES)
    inputs, label = plain.read(5, seed=0)
    assert (inputs.shape, inputs.dtype, label) == ((3, 112, 112), np.uint8, 1)
    with Image.open(folder / plain.sample_id(5)) as image:
        assert np.array_equal(inputs.transpose(1, 2, 0), np.asarray(image))
    mirrored = build_dataset(recipe_of(folder, flip=1.0))
    assert np.array_equal(mirrored.read(0, 1)[0], plain.read(0, 1)[0][:, :, ::-1])
    swapped = build_dataset(recipe_of(folder, flip=0.0, channels="bgr"))
    assert np.array_equal(swapped.read(0, 1)[0], plain.read(0, 1)[0][::-1])
    small = build_dataset(recipe_of(folder, size=32))
    assert tuple(small.read(0, 1)[0].shape) == (3, 32, 32)
    coarse = build_dataset(recipe_of(folder, flip=0.0, low_resolution=1.0, photometric=1.0))
    assert not np.array_equal(coarse.read(0, 1)[0], plain.read(0, 1)[0])
    assert np.array_equal(coarse.read(0, 1)[0], coarse.read(0, 1)[0])  # of the seed alone


@pytest.mark.parametrize("backbone", ["small_conv", "mobilefacenet"])
def test_a_folder_of_photos_is_trained_on(folder: Path, tmp_path: Path, backbone: str) -> None:
    settings = ("run.max_steps=3", "run.log_every=1", "precision.channels_last=true")
    recipe = recipe_of(folder, *settings, photometric=0.5, low_resolution=0.5)
    recipe = replace(recipe, model=ModelPart(backbone, embedding_dim=16))
    outcome = train(recipe, tmp_path / "run", device="cpu")
    assert (outcome.step, outcome.num_skipped) == (3, 0) and math.isfinite(outcome.loss)


def other_backbone() -> nn.Module:
    """With weights that the recipe's seed does not give."""
    return build_backbone(tiny_recipe("seed=77"))


def in_file(folder: Path, kind: str) -> Path:
    weights = {name: value.clone() for name, value in other_backbone().state_dict().items()}
    if kind == "safetensors":
        save_file(weights, folder / "w.safetensors")
        return folder / "w.safetensors"
    if kind == "checkpoint":
        torch.save({"state_dict": {f"module.{key}": weights[key] for key in weights}}, folder / "w")
        return folder / "w"
    train(tiny_recipe("seed=77", "run.max_steps=1", "optimizer.lr=1e-30"), folder / "run")
    export_run(folder / "run", folder / "model")
    return folder / "model"


@pytest.mark.parametrize("kind", ["safetensors", "checkpoint", "directory"])
def test_a_backbone_starts_with_the_weights_of_a_file(kind: str, tmp_path: Path) -> None:
    path = in_file(tmp_path, kind)
    session = build_session(tiny_recipe(f"model.weights={path}"), Process())
    for name, value in other_backbone().named_parameters():
        torch.testing.assert_close(session.backbone.get_parameter(name), value, rtol=0, atol=1e-12)
    read = path / BACKBONE if kind == "directory" else path
    assert session.weights_sha256 == sha256_of(read)


def test_the_hash_is_in_the_journal_and_a_resumed_run_needs_no_file(tmp_path: Path) -> None:
    path = in_file(tmp_path, "safetensors")
    digest = sha256_of(path)
    settings = ("run.max_steps=4", "run.save_every_steps=2", f"model.weights={path}")
    train(tiny_recipe(*settings), tmp_path / "out", device="cpu")
    (start,) = events(tmp_path / "out", "start")
    assert start["weights_sha256"] == digest
    path.unlink()
    outcome = train(tiny_recipe(*settings), tmp_path / "out", device="cpu", resume=True)
    assert outcome.step == 4
    with pytest.raises(ConfigError, match="there is no file"):
        train(tiny_recipe(*settings), tmp_path / "fresh", device="cpu")


class Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must never be printed",)


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = other_backbone().state_dict()
    name = next(name for name, value in weights.items() if value.dim() == 2)
    save_file({**weights, name: torch.zeros(3, 5)}, tmp_path / "shape.safetensors")
    torch.save({"state_dict": Dangerous()}, tmp_path / "code.pt")
    for file, message in (
        ("shape.safetensors", r"\[3, 5\]"),
        ("code.pt", "code.pt"),
        (".", "model directory"),
        ("none", "none"),
    ):
        with pytest.raises(ConfigError, match=f"model.weights .*{message}"):
            build_session(tiny_recipe(f"model.weights={tmp_path / file}"), Process())
    assert "never" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    recipe = tiny_recipe("run.max_steps=4", "run.save_every_steps=2", "run.average_last=2")
    train(recipe, folder, device="cpu")
    return folder


def test_a_run_starts_with_the_average_and_the_prototypes(first: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(f"run.start_from={first}", "optimizer.lr=1e-30", "run.max_steps=1")
    train(recipe, tmp_path, device="cpu")
    average = read_tensors(first / AVERAGE)
    for name, value in read_backbone(newest(tmp_path / "checkpoints").checkpoint).items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(value, average[name], rtol=0, atol=1e-12)


def test_a_checkpoint_gives_its_own_weights(first: Path) -> None:
    checkpoint = newest(first / "checkpoints").checkpoint
    recipe = tiny_recipe()
    backbone, head = build_backbone(recipe), build_head(recipe)
    load_start_weights_(backbone, head, checkpoint.path)
    expected = read_backbone(checkpoint)
    assert all(torch.equal(value, expected[name]) for name, value in backbone.state_dict().items())
    assert head.prototypes.shape == (head.num_classes, recipe.model.embedding_dim)


def test_other_networks_and_classes_and_no_run_are_refused(first: Path, tmp_path: Path) -> None:
    for settings, message in (
        ((f"run.start_from={first}", "data.num_classes=150"), "run.start_from .* 200 classes"),
        ((f"run.start_from={first}", "model.embedding_dim=8"), "run.start_from"),
        ((f"run.start_from={tmp_path / 'none'}",), "run.start_from .*none"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(tiny_recipe(*settings), tmp_path, device="cpu")
