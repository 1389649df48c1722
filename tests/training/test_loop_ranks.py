"""Runs of several ranks: the same curve, the same decisions, and no rank left waiting."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.ranks import ranks_running, run_ranks
from helpers.runs import (
    MARK,
    FaultyIdentities,
    events,
    losses,
    saved_files,
    status,
    tiny_recipe,
    wait_for_step,
)
from qmargin.data.order import GlobalOrder
from qmargin.training.checkpoint import list_steps, open_checkpoint, read_backbone
from qmargin.training.loop import train

pytestmark = pytest.mark.dist

SCRIPT = """
from helpers.runs import FaultyIdentities, fragile_recipe, identities, tiny_recipe
from qmargin.training.loop import train
recipe = {recipe}("run.timeout_s=12", *{settings!r})
outcome = train(recipe, {out!r}, resume=True, allow_changes=True, device="cpu"{options})
say(outcome.step, outcome.loss, outcome.num_skipped, outcome.signal)
"""
SAMPLES = GlobalOrder(3200, seed=0, batch_size=64)  # of the debug recipe


def script(
    out: Path, settings: Sequence[str] = (), *, recipe: str = "tiny_recipe", options: str = ""
) -> str:
    return SCRIPT.format(recipe=recipe, settings=list(settings), out=str(out), options=options)


@pytest.mark.slow
def test_any_number_of_ranks_has_the_same_loss_curve(tmp_path: Path) -> None:
    """To rounding, at each of the recipe's 300 steps."""
    settings = ["run.max_steps=300", "run.save_every_steps=100"]
    train(tiny_recipe(*settings), tmp_path / "1", device="cpu")
    one = losses(tmp_path / "1")
    assert len(one) == 300 and one[300] < 0.05 * one[1]
    for world in (2, 4):
        said = run_ranks(script(tmp_path / str(world), settings), world, timeout=120)
        assert len(set(said)) == 1  # the loss is the same number on every rank
        many = losses(tmp_path / str(world))
        assert max(abs(many[step] / one[step] - 1.0) for step in one) < 5e-5


@pytest.mark.slow
def test_two_ranks_go_on_bit_for_bit_and_one_or_three_go_on(tmp_path: Path) -> None:
    settings = ["run.ema_decay=0.9"]
    run_ranks(script(tmp_path / "whole", settings, recipe="fragile_recipe"), 2)
    parts = ["run.max_steps=13", *settings]
    run_ranks(script(tmp_path / "parts", parts, recipe="fragile_recipe"), 2)
    run_ranks(script(tmp_path / "parts", settings, recipe="fragile_recipe"), 2)
    assert saved_files(tmp_path / "parts", 20) == saved_files(tmp_path / "whole", 20)
    # tiny, whose outputs do not depend on who else is in a rank's batch
    run_ranks(script(tmp_path / "tiny"), 2)
    for world in (1, 3):
        run_ranks(script(tmp_path / str(world), ["run.max_steps=13"]), 2)
        run_ranks(script(tmp_path / str(world)), world)
        curves = [list(losses(tmp_path / name).values()) for name in (str(world), "tiny")]
        assert curves[0] == pytest.approx(curves[1], rel=1e-4)


COMPILED = """
import functools, warnings
import torch._dynamo
from torch import nn
warnings.filterwarnings("ignore", module="torch")  # the compiler's own
nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
"""


@pytest.mark.slow
def test_compiled_ranks_learn_the_same(tmp_path: Path) -> None:
    """In parts of a batch, of which only the last is summed over ranks; names of weights stay."""
    settings = ["run.max_steps=10", "precision.dtype=bf16", "head.update=torch"]
    settings.append("optimizer.accumulation=2")
    for name in ("false", "true"):
        own = [*settings, f"precision.compile={name}"]
        text = script(tmp_path / name, own, recipe="fragile_recipe")
        run_ranks(COMPILED + text, 2, timeout=120)
    plain, compiled = (list(losses(tmp_path / name).values()) for name in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-3)
    paths = (tmp_path / name / "checkpoints" / "step-000010" for name in ("false", "true"))
    names, compiled_names = (read_backbone(open_checkpoint(path)).keys() for path in paths)
    assert names == compiled_names


def test_a_signal_to_one_rank_saves_the_same_step_on_all(tmp_path: Path) -> None:
    settings = ["run.max_steps=5000", "run.epochs=200", "run.save_every_steps=4000"]
    with ranks_running(script(tmp_path, settings), 2) as ranks:
        wait_for_step(ranks[0].process, tmp_path, 5, ranks[0].errors)
        ranks[1].process.send_signal(signal.SIGTERM)
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].errors()
        said = [rank.output().split() for rank in ranks]
    assert said[0] == said[1] and int(said[0][3]) == signal.SIGTERM
    step = int(said[0][0])
    assert list(list_steps(tmp_path / "checkpoints")) == [step]
    assert sum(name.startswith("head-") for name in saved_files(tmp_path, step)) == 2
    assert status(tmp_path)["state"] == "stopped"


def test_a_nan_of_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    """Row 40 of 64 is read by the second rank; the first one writes its name."""
    bad = int(SAMPLES.batch(5)[40])
    options = f", dataset=FaultyIdentities([{bad}], float('nan'))"
    said = run_ranks(script(tmp_path / "bad", ["run.max_steps=8"], options=options), 2)
    assert said[0] == said[1] and said[0].split()[2] == "1"
    (skip,) = events(tmp_path / "bad", "skip")
    assert (skip["step"], skip["samples"]) == (5, [f"sample-{bad}"])
    dataset = FaultyIdentities([bad], float("nan"))
    train(tiny_recipe("run.max_steps=8"), tmp_path / "one", dataset=dataset, device="cpu")
    curves = [losses(tmp_path / name) for name in ("bad", "one")]
    assert curves[0].pop(6) == curves[1].pop(6) == "nan"
    assert list(curves[0].values()) == pytest.approx(list(curves[1].values()), rel=1e-4)


@pytest.mark.slow
def test_a_gradient_of_one_rank_that_is_not_finite_is_skipped_by_all(tmp_path: Path) -> None:
    bad = int(SAMPLES.batch(2)[40])
    options = f", dataset=FaultyIdentities([{bad}], {MARK})"
    settings = ["run.max_steps=4", "model.options.dropout=0"]
    text = script(tmp_path, settings, recipe="fragile_recipe", options=options)
    said = run_ranks(text, 2)
    assert said[0] == said[1] and said[0].split()[2] == "1"
    (skip,) = events(tmp_path, "skip")
    assert (skip["step"], skip["reason"]) == (2, "the gradient is not finite")
    assert len(skip["samples"]) == 64 and f"sample-{bad}" in skip["samples"]


@pytest.mark.slow
def test_a_spike_rolls_all_ranks_back(tmp_path: Path) -> None:
    patch = """
from qmargin.training import loop
from qmargin.training.step import StepResult
take = loop.take_step
def spiking(session, *details, **options):
    result = take(session, *details, **options)
    return result if session.progress.step != 13 else StepResult(loss=1e9)
loop.take_step = spiking
"""
    settings = ["run.spike_factor=3", "run.spike_window=5"]
    said = run_ranks(patch + script(tmp_path, settings), 2)
    assert said[0] == said[1] and said[0].split()[0] == "20"
    (back,) = events(tmp_path, "rollback")
    assert (back["step"], back["checkpoint"], back["next_step"]) == (13, 10, 15)
    assert list(losses(tmp_path)) == [*range(1, 14), *range(16, 21)]


def test_an_error_of_one_loader_stops_all_ranks_at_once(tmp_path: Path) -> None:
    bad = int(SAMPLES.batch(3)[40])
    options = f", dataset=FaultyIdentities([{bad}], error=ZeroDivisionError)"
    with ranks_running(script(tmp_path, options=options), 2) as ranks:
        assert ranks[1].wait() == 1
        began = time.monotonic()
        assert ranks[0].wait() == 1
        assert time.monotonic() - began < 10  # and not after the timeout
        errors = [rank.errors() for rank in ranks]
    last = errors[1].strip().splitlines()[-1]
    assert f"DataError: cannot read step 3, sample 'sample-{bad}': ZeroDivisionError" in last
    first = errors[0]
    assert "RankError: rank 1 stopped with DataError" in first.strip().splitlines()[-1]
    assert first.index("ZeroDivisionError: sample") < first.index("RankError")
    assert status(tmp_path)["state"] == "failed"


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = ["run.max_steps=5000", "run.epochs=200", "run.save_every_steps=5"]
    with ranks_running(script(tmp_path, settings), 2) as ranks:
        wait_for_step(ranks[0].process, tmp_path, 20, ranks[0].errors)
        ranks[1].process.kill()
        code = ranks[0].wait()
        errors = ranks[0].errors()
    assert code in (1, 75) and "rank 1 sent no heartbeat" in errors, errors
    step = max(list_steps(tmp_path / "checkpoints"))
    settings = [f"run.max_steps={step + 3}", "run.save_every_steps=5"]
    assert len(run_ranks(script(tmp_path, settings), 2)) == 2
    assert list(losses(tmp_path)) == list(range(1, step + 4))


CONSTRUCTION = """
from importlib import import_module
from qmargin.cli.main import main
module, _, name = {place!r}.rpartition(".")
module = import_module(f"qmargin.training.{{module}}")
def vanish(*details, **options):
    os.kill(os.getpid(), signal.SIGKILL)
if RANK == {victim}:
    setattr(module, name, vanish)
settings = [f"--set={{setting}}" for setting in ("run.max_steps=2", "run.timeout_s=6")]
sys.exit(main(["train", "debug", "--device=cpu", "--resume", "--out", {out!r}, *settings]))
"""
QUICK = ("start.agree_on_newest", "session.DistributedDataParallel")
OTHERS = """
start.check_writable build.build_dataset build.build_backbone session.build_optimizers
session.restore_ loop.check_writable loop._saver loop._announce
"""
SLOW = [pytest.param(place, marks=pytest.mark.slow) for place in OTHERS.split()]


@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize("place", [*QUICK, *SLOW])
def test_a_rank_lost_before_the_first_step_is_named(
    place: str, victim: int, tmp_path: Path
) -> None:
    """Killed between the lock and the first step: as later, its name and exit status 75."""
    if place == "session.restore_":
        train(tiny_recipe("run.max_steps=2", "run.timeout_s=6"), tmp_path, device="cpu")
    if place == "loop.check_writable" and victim == 1:
        pytest.skip("only rank 0 looks at the free space")
    text = CONSTRUCTION.format(place=place, victim=victim, out=str(tmp_path))
    with ranks_running(text, 2) as ranks:
        assert ranks[victim].wait() == -signal.SIGKILL, ranks[victim].errors()
        began = time.monotonic()
        code, errors = ranks[1 - victim].wait(), ranks[1 - victim].errors()
        assert time.monotonic() - began < 6 + 3
    assert code == 75 and f"rank {victim} " in errors and "Traceback" not in errors, errors


STOPPED = """
from qmargin.cli.main import main
from qmargin.training import build
def dawdle(*details, **options):
    say("building")
    time.sleep(30)
if RANK in {slow!r}:
    build.build_backbone = dawdle
settings = [f"--set={{setting}}" for setting in ("run.max_steps=2", "run.timeout_s=20")]
sys.exit(main(["train", "debug", "--device=cpu", "--out", {out!r}, *settings]))
"""


@pytest.mark.parametrize("slow", [(0, 1), (1,)], ids=["both", "one"])
def test_a_signal_before_the_first_step_stops_all_ranks(
    slow: tuple[int, ...], tmp_path: Path
) -> None:
    """At once, whether it comes to every rank or to one; the other waits in a collective."""
    with ranks_running(STOPPED.format(slow=slow, out=str(tmp_path)), 2) as ranks:
        for rank in slow:
            ranks[rank].wait_for("building")
        began = time.monotonic()
        for rank in slow:
            ranks[rank].process.send_signal(signal.SIGTERM)
        codes = [rank.wait() for rank in ranks]
        assert codes == [143, 143], ranks[0].errors() + ranks[1].errors()
        assert time.monotonic() - began < 12
        errors = [rank.errors() for rank in ranks]
    assert "Traceback" not in "".join(errors), errors
    assert not (tmp_path / "lock").exists()


def test_fewer_classes_than_ranks_and_ranks_without_rows(tmp_path: Path) -> None:
    """Six samples in batches of five: the second batch leaves two ranks empty-handed."""
    settings = ["data.num_classes=2", "data.batch_size=5", "data.drop_last=false"]
    settings += ["run.max_steps=6", "run.epochs=9", "schedule.warmup_epochs=0"]
    options = ", dataset=identities(num_classes=2, samples_per_class=3)"
    train(tiny_recipe(*settings, "data.options.samples_per_class=3"), tmp_path / "1", device="cpu")
    said = run_ranks(script(tmp_path / "3", settings, options=options), 3)
    assert len(set(said)) == 1
    one, three = (list(losses(tmp_path / name).values()) for name in ("1", "3"))
    assert three == pytest.approx(one, rel=1e-4)
