"""A run goes on bit for bit where it stopped, and its parts do what the recipe says."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import Tensor, nn

import qmargin
from helpers.registries import forget_registered
from helpers.runs import (
    FaultyIdentities,
    events,
    fragile_recipe,
    losses,
    saved_files,
    status,
    tiny_recipe,
)
from qmargin.data.order import GlobalOrder
from qmargin.errors import CheckpointError, ConfigError
from qmargin.heads.classifier import MarginClassifier
from qmargin.registry import register_backbone
from qmargin.training import checkpoint as async_saver
from qmargin.training.checkpoint import (
    load_checkpoint,
    open_checkpoint,
    read_backbone,
    read_tensors,
)
from qmargin.training.loop import HookState, Outcome, train
from qmargin.training.optim import average_checkpoints
from qmargin.training.recipe import ModelPart, Recipe, ValueSchedule
from qmargin.training.recipe_files import apply_settings
from qmargin.training.session import Session

TORCH = ("head.update=torch", "optimizer.accumulation=4")
RECIPES = {
    "debug": tiny_recipe(),
    "sparse head and update": tiny_recipe("head.path=sparse", "head.update=sparse"),
    "sampled classes": tiny_recipe("head.path=sampled", "head.sample_rate=0.5"),
    "statistics, dropout, average": fragile_recipe("run.ema_decay=0.9"),
    "adamw in parts": fragile_recipe(*TORCH, "optimizer.kind=adamw", "optimizer.lr=0.01"),
    "half precision": fragile_recipe("precision.dtype=fp16"),
    "adaface": tiny_recipe("loss.preset=adaface"),
    "elastic": tiny_recipe("loss.preset=elasticface"),
    "schedules": replace(
        tiny_recipe(), margin_schedule=ValueSchedule("linear", start_epoch=0.1, end_epoch=0.3)
    ),
}


def in_steps(recipe: Recipe, number: int) -> Recipe:
    return apply_settings(recipe, [f"run.max_steps={number}"])


def resumed(recipe: Recipe | None, out: Path) -> Outcome:
    return train(recipe, out, resume=True, allow_changes=True, device="cpu")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_ten_steps_and_ten_more_are_twenty(recipe: Recipe, tmp_path: Path) -> None:
    """Mid-epoch, by the hash of every tensor: weights, momentum, averages, statistics."""
    recipe = replace(recipe, run=replace(recipe.run, save_every_steps=20))
    whole = train(recipe, tmp_path / "whole", device="cpu")
    train(in_steps(recipe, 10), tmp_path / "parts", device="cpu")
    again = resumed(recipe, tmp_path / "parts")
    assert (again.step, again.loss) == (20, whole.loss)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert saved_files(tmp_path / "parts", 20) == saved_files(tmp_path / "whole", 20)
    assert saved_files(tmp_path / "parts", 10) != saved_files(tmp_path / "parts", 20)


def test_workers_may_change_on_resume(tmp_path: Path) -> None:
    recipe = fragile_recipe()
    train(recipe, tmp_path / "whole", device="cpu")
    train(in_steps(recipe, 13), tmp_path / "parts", device="cpu")
    resumed(apply_settings(recipe, ["data.num_workers=2"]), tmp_path / "parts")
    assert saved_files(tmp_path / "parts", 20) == saved_files(tmp_path / "whole", 20)


def test_journal_and_status_say_what_was_promised(tmp_path: Path) -> None:
    recipe = tiny_recipe("run.max_steps=5", "run.log_every=2", "run.save_every_steps=2")
    train(recipe, tmp_path, device="cpu")
    steps = events(tmp_path, "step")
    assert [record["step"] for record in steps] == [2, 4, 5]
    names = "step epoch loss lr margin effective_margin support_mean support_max path mass_error"
    assert {*names.split(), "samples_per_s", "seconds"} <= set(steps[0])
    for record in steps:
        assert 0.0 <= record["satisfied_share"] <= 1.0 and 0.0 <= record["target_posterior"] <= 1.0
        assert -2.0 <= record["cosine_gap"] <= 2.0
        assert record["reach"] == pytest.approx(qmargin.reach(1.25, 32.0, 0.2))
    assert steps[0]["margin"] == 0.2 and steps[0]["path"] in ("sparse", "chunked")
    start, *_, end = events(tmp_path)
    assert (start["event"], start["num_classes"], start["steps_per_epoch"]) == ("start", 200, 50)
    assert (end["event"], end["step"]) == ("finished", 5)
    saved = [record["checkpoint"] for record in events(tmp_path, "checkpoint")]
    assert saved == ["step-000002", "step-000004", "step-000005"]
    found = status(tmp_path)
    assert (found["state"], found["step"], found["checkpoint"]) == ("finished", 5, "step-000005")
    assert found["recipe_sha256"] == recipe.sha256
    files = {"checkpoints", "journal.jsonl", "lock", "status.json"}
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gap_of_a_record_is_that_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Of all rows of the batch, and measured in recorded steps only."""
    seen: list[Tensor] = []
    original = MarginClassifier.gaps

    def gaps(self: MarginClassifier, embeddings: Tensor, labels: Tensor, sizes: Any) -> Tensor:
        cosines = self.cosines(embeddings).detach()
        own = cosines.gather(1, labels[:, None])
        seen.append(own - cosines.scatter(1, labels[:, None], -2.0).amax(1, keepdim=True))
        return original(self, embeddings, labels, sizes)

    monkeypatch.setattr(MarginClassifier, "gaps", gaps)
    recipe = tiny_recipe(
        "run.max_steps=5", "run.log_every=3", f"optimizer.accumulation={parts}", "head.update=torch"
    )
    train(recipe, tmp_path, device="cpu")
    records = events(tmp_path, "step")
    assert [record["step"] for record in records] == [3, 5] and len(seen) == 2 * parts
    batch = recipe.data.batch_size
    for record, group in zip(records, (seen[:parts], seen[parts:]), strict=True):
        rows = torch.cat(group)
        assert len(rows) == batch
        assert record["cosine_gap"] == pytest.approx(float(rows.mean()), abs=1e-6)


def test_softmax_has_no_reach(tmp_path: Path) -> None:
    train(tiny_recipe("run.max_steps=1", "loss.preset=cosface"), tmp_path / "cos", device="cpu")
    (record,) = events(tmp_path / "cos", "step")
    assert record["reach"] is None and record["satisfied_share"] == 0.0
    assert -2.0 <= record["cosine_gap"] <= 2.0


def test_a_complete_run_is_left_alone_and_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe("run.max_steps=3")
    assert train(recipe, tmp_path, resume=True, device="cpu").step == 3
    assert "no checkpoint" in capsys.readouterr().err  # it says that it starts
    before = saved_files(tmp_path, 3)
    outcome = train(recipe, tmp_path, resume=True, device="cpu")
    assert outcome.step == 3 and saved_files(tmp_path, 3) == before
    with pytest.raises(ConfigError, match="step 3; add --resume"):
        train(recipe, tmp_path, device="cpu")


def test_a_named_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    recipe = tiny_recipe("run.save_every_steps=5")
    train(recipe, tmp_path, device="cpu")
    folder, before = tmp_path / "checkpoints", saved_files(tmp_path, 20)
    train(recipe, tmp_path, resume=folder / "step-000005", device="cpu")
    assert saved_files(tmp_path, 20) == before
    assert len(list(folder.glob("step-000020.aside-*"))) == 1
    (folder / "step-000010" / "backbone.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="backbone"):
        train(recipe, tmp_path, resume=folder / "step-000010", device="cpu")


def test_a_changed_recipe_is_shown_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe("run.max_steps=4")
    train(recipe, tmp_path, device="cpu")
    for setting in ("data.batch_size=32", "seed=1"):  # what does not fit
        with pytest.raises(ConfigError, match="cannot be resumed with " + setting.split("=")[0]):
            resumed(apply_settings(recipe, [setting]), tmp_path)
    changes = ["run.max_steps=6", "optimizer.momentum=0.5", "loss.margin=0.1"]
    resumed(apply_settings(recipe, changes), tmp_path)
    assert "loss.margin: 0.2 -> 0.1 (changes the outcome)" in capsys.readouterr().err
    assert events(tmp_path, "start")[-1]["changes"]
    assert events(tmp_path, "step")[-1]["margin"] == 0.1
    saved = load_checkpoint(open_checkpoint(tmp_path / "checkpoints" / "step-000006"))
    assert saved.parts["optimizer"]["param_groups"][0]["momentum"] == 0.5


def test_a_change_that_alters_the_outcome_needs_permission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_recipe("loss.margin=0.3", "run.max_steps=4"), tmp_path, device="cpu")
    before = saved_files(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"loss\.margin: 0\.3 -> 0\.2.*--allow-changes"):
        train(tiny_recipe("run.max_steps=6"), tmp_path, resume=True, device="cpu")
    assert saved_files(tmp_path, 4) == before and len(events(tmp_path, "start")) == 1
    free = ["data.num_workers=1", "run.log_every=3", "name=other"]
    same = tiny_recipe("loss.margin=0.3", "run.max_steps=4", *free)
    train(same, tmp_path, resume=True, device="cpu")
    assert events(tmp_path, "start")[-1]["changes"] and "run.log_every" in capsys.readouterr().err


def test_without_a_recipe_the_stored_one_is_taken(tmp_path: Path) -> None:
    train(tiny_recipe("loss.margin=0.3", "run.save_every_steps=5"), tmp_path, device="cpu")
    before = saved_files(tmp_path, 20)
    for resume in (tmp_path / "checkpoints" / "step-000005", True):
        assert train(None, tmp_path, resume=resume, device="cpu").step == 20
        assert saved_files(tmp_path, 20) == before
    # the newest one that is whole
    (tmp_path / "checkpoints" / "step-000020" / "manifest.json").write_text("{")
    assert train(None, tmp_path, resume=True, device="cpu").step == 20
    assert saved_files(tmp_path, 20) == before


def test_without_a_recipe_or_a_checkpoint_there_is_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path}.*name the recipe"):
        train(None, tmp_path, resume=True, device="cpu")
    with pytest.raises(ConfigError, match="recipe is missing"):
        train(None, tmp_path, device="cpu")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-7"):
        train(None, tmp_path, resume=tmp_path / "checkpoints" / "step-7", device="cpu")
    broken = tmp_path / "checkpoints" / "step-000005"
    broken.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        train(None, tmp_path, resume=True, device="cpu")


def test_a_run_that_left_no_checkpoint_is_not_resumed_with_another_recipe(tmp_path: Path) -> None:
    def fail(state: HookState) -> dict[str, float]:
        raise ZeroDivisionError

    recipe = tiny_recipe("loss.margin=0.3", "run.validate_every=1", "run.max_steps=2")
    with pytest.raises(ZeroDivisionError):
        train(recipe, tmp_path, hooks=[fail], device="cpu")
    forgotten = tiny_recipe("run.validate_every=1", "run.max_steps=2")
    with pytest.raises(ConfigError, match=rf"{recipe.sha256[:12]}.*{forgotten.sha256[:12]}"):
        train(forgotten, tmp_path, resume=True, device="cpu")
    assert train(recipe, tmp_path, resume=True, device="cpu").step == 2


def test_a_schedule_that_the_run_never_reaches_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = ValueSchedule("linear", start_epoch=5, end_epoch=10)
    recipe = replace(tiny_recipe("run.max_steps=2"), margin_schedule=schedule)
    train(recipe, tmp_path, device="cpu")
    text = capsys.readouterr().err
    assert "warning: the margin stays at 0 and never reaches 0.2" in text
    assert text.index("warning: the margin") < text.index("step 1/2")
    (start,) = events(tmp_path, "start")
    assert any("margin_schedule.start_epoch is 5" in line for line in start["unreached"])


def test_accumulated_parts_equal_the_big_batch(tmp_path: Path) -> None:
    """Of uneven sizes, with the weight decay and the clipping of one step."""
    settings = ("head.update=torch", "data.drop_last=false", "data.batch_size=60")
    length = ("run.max_steps=6", "schedule.warmup_epochs=0")
    samples = ("data.options.samples_per_class=1", "data.num_classes=203")
    recipe = tiny_recipe(*settings, *length, *samples)
    for parts in (1, 4):  # the fourth of each epoch's batches has 23 samples
        changed = apply_settings(recipe, [f"optimizer.accumulation={parts}"])
        train(changed, tmp_path / str(parts), device="cpu")
    one, four = (losses(tmp_path / name) for name in ("1", "4"))
    assert list(one.values()) == pytest.approx(list(four.values()), rel=1e-5)
    paths = (tmp_path / name / "checkpoints" / "step-000006" for name in ("1", "4"))
    whole, parts = (read_backbone(open_checkpoint(path)) for path in paths)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_lower_precision_stays_close(dtype: str, tmp_path: Path) -> None:
    train(tiny_recipe(), tmp_path / "full", device="cpu")
    train(tiny_recipe(f"precision.dtype={dtype}"), tmp_path / "half", device="cpu")
    full, half = losses(tmp_path / "full"), losses(tmp_path / "half")
    assert full != half
    last = range(16, 21)  # fp16 is a step behind: its first scale is too large
    expected = sum(full[step] for step in last)
    assert sum(half[step] for step in last) == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_backbone_learns_the_same(tmp_path: Path) -> None:
    for name in ("false", "true"):
        recipe = tiny_recipe("run.max_steps=5", f"precision.compile={name}")
        train(recipe, tmp_path / name, device="cpu")
    plain, compiled = (list(losses(tmp_path / name).values()) for name in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without a C++ compiler; random draws are those of eager networks."""
    compile_in_place = nn.Module.compile

    def compile_(module: nn.Module, **options: Any) -> None:
        assert options == {"fullgraph": True}
        compile_in_place(module, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", compile_)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # as by default
        yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # in the compiler
@pytest.mark.usefixtures("quick_compiler")
def test_runs_go_on_with_and_without_the_compiler(tmp_path: Path) -> None:
    """Checkpoints have the same names and numbers; epochs end with a smaller batch."""
    settings = ("data.drop_last=false", "data.batch_size=90", "run.save_every_steps=50")
    settings += ("run.max_steps=40", "run.ema_decay=0.9")  # 3,200 samples are 35 batches and a half
    for name, first, second in (
        ("plain", "false", "false"),
        ("compiled", "true", "true"),
        ("first", "true", "false"),
        ("second", "false", "true"),
    ):
        half = ("run.max_steps=20", f"precision.compile={first}")
        train(fragile_recipe(*settings, *half), tmp_path / name, device="cpu")
        whole = fragile_recipe(*settings, f"precision.compile={second}")
        train(whole, tmp_path / name, resume=True, allow_changes=True, device="cpu")
    expected = read_backbone(open_checkpoint(tmp_path / "plain" / "checkpoints" / "step-000040"))
    for name in ("compiled", "first", "second"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
        found = read_backbone(open_checkpoint(tmp_path / name / "checkpoints" / "step-000040"))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick_compiler")
def test_a_process_compiles_more_sizes_than_the_compiler_keeps_by_default(tmp_path: Path) -> None:
    for width in range(1, 10):
        short = ("run.max_steps=1", "precision.compile=true", f"model.options.hidden_dim={width}")
        train(tiny_recipe(*short), tmp_path / str(width), device="cpu")


@pytest.mark.usefixtures("quick_compiler")
def test_a_backbone_that_breaks_the_graph_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(nn.Linear):
        def __init__(self, embedding_dim: int) -> None:
            super().__init__(32, embedding_dim)

        def forward(self, vectors: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(vectors)

    forget_registered(monkeypatch)
    register_backbone("breaking", Breaking)
    recipe = replace(tiny_recipe("run.max_steps=2"), model=ModelPart("breaking", 16))
    train(recipe, tmp_path / "eager", device="cpu")
    compiled = apply_settings(recipe, ["precision.compile=true"])
    with pytest.raises(ConfigError, match=r"breaking cannot be compiled .*compile=false"):
        train(compiled, tmp_path / "compiled", device="cpu")


def test_hooks_see_the_network_in_evaluation_mode(tmp_path: Path) -> None:
    seen = []

    def hook(state: HookState) -> dict[str, float]:
        seen.append((state.step, state.backbone.training, torch.is_grad_enabled()))
        return {"score": state.step / 10}

    recipe = fragile_recipe("run.validate_every=4", "run.max_steps=10")
    train(recipe, tmp_path / "with", hooks=[hook], device="cpu")
    assert seen == [(4, False, False), (8, False, False), (10, False, False)]
    results = [record["metrics"]["score"] for record in events(tmp_path / "with", "validation")]
    assert results == [0.4, 0.8, 1.0]
    train(recipe, tmp_path / "without", device="cpu")
    assert saved_files(tmp_path / "with", 10) == saved_files(tmp_path / "without", 10)


def test_averages_are_written_at_the_end(tmp_path: Path) -> None:
    recipe = fragile_recipe("run.average_last=2", "run.ema_decay=0.5")
    train(recipe, tmp_path, device="cpu")
    folder = tmp_path / "checkpoints"
    last = [open_checkpoint(folder / name) for name in ("step-000010", "step-000020")]
    expected = average_checkpoints(last)
    for name, value in read_tensors(tmp_path / "average.safetensors").items():
        assert torch.equal(value, expected[name]), name
    moving = read_tensors(tmp_path / "ema.safetensors")
    saved = load_checkpoint(last[1]).parts["ema"]["tensors"]
    assert torch.equal(moving["last.weight"], saved["last.weight"])
    assert not torch.equal(moving["last.weight"], read_backbone(last[1])["last.weight"])


def test_a_failed_save_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*details: object, **options: object) -> Path:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(async_saver, "save_checkpoint", refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        train(tiny_recipe("run.save_every_steps=3"), tmp_path, device="cpu")
    assert status(tmp_path)["state"] == "failed"
    assert len(events(tmp_path, "step")) < 20


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="file/out"):
        train(tiny_recipe(), tmp_path / "file" / "out", device="cpu")


AHEAD = ("run.max_steps=6", "head.path=sparse")


def test_a_host_that_launches_a_whole_step_before_it_looks_computes_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(fragile_recipe(*AHEAD), tmp_path / "plain", device="cpu")
    monkeypatch.setattr(Session, "runs_ahead", True)  # as on one GPU
    train(fragile_recipe(*AHEAD), tmp_path / "ahead", device="cpu")
    verify, calls = MarginClassifier.verify, []

    def sometimes(head: MarginClassifier) -> bool:
        calls.append(head.is_verified)
        if not head.is_verified and len(calls) % 2:  # as if the lists had been too short
            head.discard()
            return False
        return verify(head)

    monkeypatch.setattr(MarginClassifier, "verify", sometimes)
    train(fragile_recipe(*AHEAD), tmp_path / "again", device="cpu")
    assert True in calls and False in calls
    plain = saved_files(tmp_path / "plain", 6)
    assert plain == saved_files(tmp_path / "ahead", 6) == saved_files(tmp_path / "again", 6)


@pytest.mark.gpu
def test_an_input_that_is_not_finite_is_skipped_on_a_gpu(tmp_path: Path) -> None:
    bad = int(GlobalOrder(3200, seed=0, batch_size=64).batch(5)[7])
    for name, steps in (("before", 5), ("after", 6)):
        recipe = fragile_recipe(f"run.max_steps={steps}", "head.path=sparse")
        dataset = FaultyIdentities([bad], float("nan"))
        outcome = train(recipe, tmp_path / name, dataset=dataset, device="cuda")
    assert (outcome.step, outcome.num_skipped) == (6, 1)
    (skip,) = events(tmp_path / "after", "skip")
    assert skip["step"] == 5 and f"sample-{bad}" in skip["samples"]  # the norm spoils them all
    assert saved_files(tmp_path / "before", 5) == saved_files(tmp_path / "after", 6)


@pytest.mark.gpu
def test_a_gpu_ends_where_it_ends_without_running_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.cuda.is_available()
    train(fragile_recipe(*AHEAD), tmp_path / "ahead", device="cuda")
    monkeypatch.setattr(Session, "runs_ahead", False)
    train(fragile_recipe(*AHEAD), tmp_path / "plain", device="cuda")
    assert saved_files(tmp_path / "ahead", 6) == saved_files(tmp_path / "plain", 6)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pictures_go_on_where_they_stopped(
    device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused optimizers take weights, gradients and momenta of one layout only."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    settings = ["precision.channels_last=true", "run.save_every_steps=3", "run.max_steps=6"]
    if kind == "adamw":
        settings += ["optimizer.kind=adamw", "optimizer.lr=1e-3", "head.update=torch"]
    recipe = tiny_recipe(*settings, "data.options.shape=[3, 16, 16]")
    whole = replace(recipe, model=ModelPart("small_conv", recipe.model.embedding_dim))
    train(whole, tmp_path / "whole", device=device)
    train(whole, tmp_path / "halves", device=device)
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-000006")
    train(whole, tmp_path / "halves", device=device, resume=True)
    if device == "cpu":
        assert saved_files(tmp_path / "halves", 6) == saved_files(tmp_path / "whole", 6)
    halves, once = (saved_tensors(tmp_path / name, 6) for name in ("halves", "whole"))
    assert halves.keys() == once.keys()
    for name, values in once.items():  # kernels of a GPU may add in any order
        size = float(values.abs().max())
        torch.testing.assert_close(halves[name], values, rtol=0, atol=1e-4 * size, msg=name)


def saved_tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / f"step-{step:06d}"
    return {
        f"{path.name}: {name}": values
        for path in sorted(folder.glob("*.safetensors"))
        for name, values in load_file(path).items()
    }
