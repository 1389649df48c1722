import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.model_directories import make_model
from helpers.runs import tiny_recipe
from qmargin.cli.main import main
from qmargin.training.loop import train
from qmargin.training.signals import Interrupted

HEAVY = "torch numpy scipy rich matplotlib"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from qmargin.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: assert not set({HEAVY.split()}) & set(sys.modules)"
    )
    for words in (["--help"], ["evaluate", "scores", "--help"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True
        )
        assert result.returncode == 0 and "usage: qmargin" in result.stdout, result.stderr


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "qmargin 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate scores nan.txt --out r.json", "nan.txt, line 2"),
        ("evaluate scores none.txt --out r.json", "none.txt: "),
        ("evaluate scores one.txt --out r.json", "one.txt: there are 0 impostor"),
        ("evaluate trials list.txt --embeddings e.bin --out r.json", "e.bin "),
        ("report nan.txt --out page", "nan.txt "),
        ("train debgu --out r", "no recipe 'debgu'"),
        ("train debug --set margin=3 --out r", "loss.margin"),
    ],
)
def test_refusals_are_one_line_with_status_two_and_write_nothing(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nan.txt").write_text("a b 0.5 target\na c nan nontarget\n")
    Path("one.txt").write_text("a b 0.5 target\n")
    Path("list.txt").write_text("1 a b\n0 a c\n")
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("qmargin: error: ") and message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.txt", "nan.txt", "one.txt"]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "qmargin", "recipes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_names_that_a_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    file, out = tmp_path / "scores.csv", tmp_path / "out-\u6f22.json"
    file.write_text("score,label\n0.9,1\n0.1,0\n")
    command = [sys.executable, "-m", "qmargin", "evaluate", "scores", str(file), "--out", str(out)]
    result = subprocess.run(
        command, capture_output=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert result.returncode == 0, result.stderr
    assert rb"out-\u6f22.json" in result.stdout


@pytest.mark.parametrize("command", [["demo"], ["train", "debug"], ["report", "r.json"]])
def test_an_empty_path_is_not_the_current_folder(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--out", ""])
    assert stop.value.code == 2
    assert "the path is empty" in capsys.readouterr().err


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
def test_what_a_machine_lacks_is_one_line_with_the_remedy(
    error: Exception,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing_with(error, monkeypatch) == 2
    told = capsys.readouterr().err
    assert told.startswith("qmargin: error: ") and told.count("\n") == 1
    assert all(word in told for word in words), told


def test_the_unforeseen_keeps_its_traceback_and_says_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing_with(KeyError("surprise"), monkeypatch) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback") and "KeyError: 'surprise'" in told
    assert "report it" in told.splitlines()[-1] and "`qmargin doctor`" in told


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM), 143)]
)
def test_an_interruption_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert failing_with(error, monkeypatch) == status
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err.startswith("qmargin: interrupted by SIG")


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "a.png", "b.png", "--model", "m"],
        ["embed", ".", "--model", "m", "--out", "e.npz"],
        ["evaluate", "pairs", "list.csv", "--model", "m", "--out", "r.json"],
        ["evaluate", "lfw", "set.bin", "--model", "m", "--out", "r.json"],
        ["evaluate", "voxceleb", "O", "--model", "m", "--audio", ".", "--out", "r.json"],
        ["train", "debug", "--out", "run"],
        ["demo", "--out", "run"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_model(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*words, "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("qmargin: error: ") and told.count("\n") == 1
    assert "'cuda'" in told and "choose cpu" in told
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "choose from"),
        ("evaluate", "choose from scores"),
        ("evaluate scores", "--out"),
        ("check-data data --threads -1", "-1 is not at least 1"),
        ("data align data --out faces --size 0", "0 is not at least 1"),
        ("evaluate trials t.txt --embeddings e.npz --out r.json --as-norm 0", "0 is not at least"),
        ("evaluate scores s.txt --out o --rule best", "conservative"),
        ("report a.json", "--out"),
        ("report a.json --out x --level 1", "between 0 and 1"),
    ],
)
def test_usage_errors_exit_with_two(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "usage: qmargin" in told and named in told


@pytest.mark.parametrize("device", ["nowhere", "meta"])
def test_devices_without_numbers_are_refused(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "m")
    words = ["verify", "a.png", "b.png", "--model", str(tmp_path / "m")]
    assert main([*words, "--device", device]) == 2
    assert f"device {device!r} cannot be used" in capsys.readouterr().err


def test_a_model_of_arrays_verifies_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_recipe("run.max_steps=2"), tmp_path / "run", device="cpu")
    (tmp_path / "a.png").write_bytes(b"")
    capsys.readouterr()
    picture = str(tmp_path / "a.png")
    assert main(["verify", picture, picture, "--model", str(tmp_path / "run")]) == 2
    assert f"{picture} is a file; embed arrays" in capsys.readouterr().err
