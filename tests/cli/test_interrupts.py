"""Ctrl-C and SIGTERM at any moment, with any command: status, one line, nothing left over."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.model_directories import make_model, pictures, write_pictures
from helpers.results import synthetic_result, write_results
from helpers.runs import tiny_recipe
from helpers.speakers import make_speakers
from qmargin.training.loop import train

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="asks /proc which signals a process catches"
)
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
TURNS = int(os.environ.get("QMARGIN_INTERRUPTS", "3"))
KEPT = (".partial", ".progress", ".part")  # of work that goes on where it was


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model")
    write_pictures(folder / "faces", pictures(60))
    make_speakers().write_scores(folder / "scores.txt")
    write_results(folder, synthetic_result())
    train(tiny_recipe("run.max_steps=2"), folder / "run", device="cpu")
    return folder


def commands(inputs: Path) -> dict[str, list[str]]:
    """Each takes some seconds, and what it writes is in the current folder."""
    words = {
        "evaluate": "evaluate scores IN/scores.txt --out r.json --replicates 20000",
        "embed": "embed IN/faces --model IN/model --out e.npz --batch-size 1",
        "export": "export IN/run --out exported",
        "report": "report IN/system0.json --out page",
        "index": "data index IN/faces --out faces.qmindex",
        "train": "train debug --out trained --set=run.epochs=3 --device=cpu",
    }
    return {name: text.replace("IN", str(inputs)).split() for name, text in words.items()}


def start(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """A process that catches signals already."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qmargin", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
        preexec_fn=_hear_interrupts,
    )
    deadline = time.monotonic() + 30
    while not _catches(process.pid, signal.SIGTERM) and process.poll() is None:
        assert time.monotonic() < deadline, "SIGTERM is not caught"
        time.sleep(0.001)
    return process


def _hear_interrupts() -> None:
    """Tests that run in the background inherit a Ctrl-C that is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _catches(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def check(words: Sequence[str], folder: Path, number: signal.Signals, delay: float) -> int:
    """Interrupt a command after a delay; returns its status."""
    (folder / "tmp").mkdir(parents=True)
    process = start(words, folder)
    time.sleep(delay)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    told = f"{words} after {delay:.3f} s: {process.returncode}\n{printed}\n{errors}"
    assert process.returncode in (0, STATUS[number]), told
    assert "Traceback" not in errors and "Exception ignored" not in errors, told
    if process.returncode:
        lines = errors.splitlines()
        assert f"interrupted by {number.name}" in lines[-1] or "continue with" in lines[-1], told
    rubbish = [
        path
        for path in folder.rglob("*")
        if ".tmp" in path.name or (path.parent.name == "tmp" and path.suffix not in KEPT)
    ]
    assert not rubbish, f"{rubbish} is left over: {told}"
    return process.returncode


SECONDS = {"evaluate": 0.7, "embed": 1.5, "export": 1.2, "report": 1.2, "index": 0.6}
NAMES = (*SECONDS, "train")  # the last goes on for longer than a test waits


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_ends_a_command_with_its_status_and_nothing_left_over(name, inputs, tmp_path):
    number = (signal.SIGTERM, signal.SIGINT)[NAMES.index(name) % 2]
    words = commands(inputs)[name]
    assert check(words, tmp_path / "early", number, 0.0) == STATUS[number]
    check(words, tmp_path / "later", number, 0.7 * SECONDS.get(name, 4.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_signals_at_random_moments(name, inputs, tmp_path):
    chance = random.Random(name)
    for turn in range(TURNS):
        number = chance.choice((signal.SIGTERM, signal.SIGINT))
        delay = chance.uniform(0.0, SECONDS.get(name, 5.0))
        check(commands(inputs)[name], tmp_path / str(turn), number, delay)


BEGIN = """
import os, signal, sys, tempfile, time
import qmargin.recipes
from qmargin.cli.main import main
"""
END = """
qmargin.recipes.list_recipes = list_recipes
sys.argv = ["qmargin", "recipes"]
sys.exit(main())
"""
STUBBORN = """
def list_recipes():
    try:
        sys.stdout.write("begun\\n")
        sys.stdout.flush()
        time.sleep(60)
    finally:
        time.sleep(60)  # a clean-up that takes too long
"""


def test_a_second_signal_ends_the_process_at_once():
    number = signal.SIGINT
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + STUBBORN + END],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_interrupts,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(number)
        time.sleep(0.2)
        process.send_signal(number)  # the same request, passed on twice
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(10) == STATUS[number]
        assert process.stderr is not None and process.stderr.read() == ""


REMOVING = """
class Slow(tempfile.TemporaryDirectory):
    @classmethod
    def _rmtree(cls, *arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        super()._rmtree(*arguments, **options)

def list_recipes():
    with Slow(dir=".") as folder:
        open(folder + "/file", "w").close()
    time.sleep(60)
"""


def test_a_signal_while_a_temporary_folder_is_removed_waits(tmp_path):
    command = [sys.executable, "-c", BEGIN + REMOVING + END]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert result.returncode == 143 and "Traceback" not in result.stderr, result.stderr
    assert not list(tmp_path.iterdir())
