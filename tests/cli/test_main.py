"""The process around every command: statuses, one-line errors, streams, devices."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qmargin.cli.main import main
from qmargin.training.signals import Interrupted


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from qmargin.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not set('torch numpy scipy rich matplotlib'.split()) & set(sys.modules)"
    )
    for words in (["--help"], ["evaluate", "scores", "--help"]):
        command = [sys.executable, "-c", code, *words]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0 and "usage: qmargin" in result.stdout, result.stderr


def test_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == "qmargin 0.1.0\n"


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command with status 2 writes."""
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("qmargin: error: ") and told.count("\n") == 1
    return told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate scores nan.txt --out r.json", "nan.txt, line 2"),
        ("evaluate scores none.txt --out r.json", "none.txt: "),
        ("evaluate trials list.txt --embeddings e.bin --out r.json", "e.bin "),
        ("report nan.txt --out page", "nan.txt "),
        ("train debgu --out r", "no recipe 'debgu'"),
        ("train debug --set margin=3 --out r", "loss.margin"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("nan.txt").write_text("a b 0.5 target\na c nan nontarget\n")
    Path("list.txt").write_text("1 a b\n0 a c\n")
    assert message in refused(words.split(), capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.txt", "nan.txt"]


@pytest.mark.parametrize(
    "words",
    [
        "verify a.png b.png --model m",
        "embed . --model m --out e.npz",
        "evaluate pairs list.csv --model m --out r.json",
        "evaluate voxceleb O --model m --audio . --out r.json",
        "train debug --out run",
        "demo --out run",
    ],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(words, model, monkeypatch, capsys):
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    told = refused([*words.split(), "--device", "cuda"], capsys)
    assert "'cuda'" in told and "choose cpu" in told and not Path("run").exists()


@pytest.mark.parametrize("device", ["nowhere", "meta"])
def test_devices_without_numbers_are_refused(device, model, capsys):
    words = ["verify", "a.png", "b.png", "--model", str(model), "--device", device]
    assert f"device {device!r} cannot be used" in refused(words, capsys)


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "qmargin", "recipes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_names_that_a_terminal_cannot_show_are_escaped(tmp_path):
    file, out = tmp_path / "scores.csv", tmp_path / "out-\u6f22.json"
    file.write_text("score,label\n0.9,1\n0.1,0\n")
    command = [sys.executable, "-m", "qmargin", "evaluate", "scores", str(file), "--out", str(out)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert result.returncode == 0 and rb"out-\u6f22.json" in result.stdout, result.stderr


def failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Status of a command in which this happens."""

    def fail() -> None:
        raise error

    monkeypatch.setattr("qmargin.recipes.list_recipes", fail)
    return main(["recipes"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("Unable to allocate 9.3 GiB"), ("out of memory", "9.3 GiB", "smaller")),
        (RuntimeError("CUDA out of memory. Tried to\nallocate"), ("out of memory", "CUDA")),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), ("allocate",)),
        (OSError(errno.ENOSPC, "No space left on device", "/full/f"), ("/full/f", "free some")),
        (OSError(errno.EACCES, "Permission denied", "f"), ("f: Permission", "permissions")),
        (FileNotFoundError(errno.ENOENT, "No such file", "f"), ("f: No such", "check the path")),
        (OSError("it is odd"), ("it is odd",)),
    ],
)
def test_what_a_machine_lacks_is_one_line_with_the_remedy(error, words, monkeypatch, capsys):
    assert failing_with(error, monkeypatch) == 2
    told = capsys.readouterr().err
    assert told.startswith("qmargin: error: ") and told.count("\n") == 1
    assert all(word in told for word in words), told


def test_the_unforeseen_keeps_its_traceback_and_says_how_to_report_it(monkeypatch, capsys):
    assert failing_with(KeyError("surprise"), monkeypatch) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and "KeyError: 'surprise'" in told
    assert "report it" in told.splitlines()[-1] and "`qmargin doctor`" in told


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM), 143)]
)
def test_an_interruption_is_one_line_and_a_status(error, status, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert failing_with(error, monkeypatch) == status
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err.startswith("qmargin: interrupted by SIG")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "choose from"),
        ("xyzzy", "choose from demo, train"),
        ("evaluate", "choose from scores"),
        ("evaluate scores", "--out"),
        ("check-data data --threads -1", "-1 is not at least 1"),
        ("evaluate trials t.txt --embeddings e.npz --out r.json --as-norm 0", "0 is not at least"),
        ("evaluate scores s.txt --out o --rule best", "conservative"),
        ("evaluate scores --fars 1e-3 scores.txt", "'scores.txt' is not a number"),
        ("report a.json --out x --level 1", "between 0 and 1"),
        ("demo --out=", "the path is empty"),
    ],
)
def test_usage_errors_exit_with_two(words, named, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "usage: qmargin" in told and named in told
