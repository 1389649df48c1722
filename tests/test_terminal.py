"""Control characters of names, files and servers reach no terminal; our own colours do."""

import io
import os
import pty
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from qmargin.cli.main import main
from qmargin.cli.tables import output_console, print_table, stage_progress
from qmargin.terminal import SafeStream, printable, safe_streams
from qmargin.training.reporting import BarDisplay

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egpj.exe\x7f\u2028[/red]|"
RAW = "\x07\x9b\u202e\x7f\u2028"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output and standard error of a terminal with colours."""
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def check_shown(text: str) -> None:
    assert "\\x1b]0;owned\\x07" in text and "\x1b]0" not in text and "\x1b[2J" not in text
    assert "[2J\r" not in text and not set(RAW) & set(text)  # bars have returns of their own


def test_every_character_that_is_not_printable_is_escaped():
    for number in range(0x11000):
        shown = printable(chr(number))
        assert shown.isprintable() and (shown == chr(number)) == chr(number).isprintable()
    assert printable("na\u00efve \u6f22 \\ |") == "na\u00efve \u6f22 \\ |"
    assert printable(os.fsdecode(b"M\xfcller")) == "M\\udcfcller"


def test_a_stream_escapes_and_is_otherwise_the_same(monkeypatch):
    terminal = terminal_for(monkeypatch)
    stream = SafeStream(terminal)
    assert stream.write(HOSTILE) == len(HOSTILE) and stream.isatty()
    stream.writelines(["one\n", "two\t\x1b\n"])
    assert terminal.getvalue().endswith("one\ntwo\t\\x1b\n")
    check_shown(terminal.getvalue())


def test_tables_on_a_terminal_have_colours_and_escapes(monkeypatch):
    terminal = terminal_for(monkeypatch)
    with safe_streams():
        print_table(output_console(), HOSTILE, ["name", "number"], [[HOSTILE, HOSTILE]])
    assert "\x1b[1m" in terminal.getvalue() and "[/red]" in terminal.getvalue()
    check_shown(terminal.getvalue())


def test_tables_elsewhere_have_escapes(capsys):
    print_table(None, HOSTILE, ["name", "number"], [[HOSTILE + "\nforged | 1 |", "2"]])
    shown = capsys.readouterr().out
    check_shown(shown)
    assert shown.count("\n") == 6 and "\\nforged \\| 1 \\|" in shown


def test_what_is_written_beside_a_progress_bar_is_escaped(monkeypatch):
    terminal = terminal_for(monkeypatch)
    with safe_streams():
        with stage_progress() as progress:
            progress(HOSTILE, 1, 2)
            sys.stderr.write(f"{HOSTILE} is left out\n")
            sys.stdout.write(f"{HOSTILE} is left out\n")
        assert isinstance(sys.stderr, SafeStream)
    assert "\x1b[?25l" in terminal.getvalue()  # the bar hides the cursor
    check_shown(terminal.getvalue())


def test_the_display_of_a_training_run_escapes_notes(monkeypatch):
    terminal = terminal_for(monkeypatch)
    with safe_streams():
        display = BarDisplay(sys.stderr, 10, 0)
        display.note(HOSTILE)
        sys.stderr.write(f"{HOSTILE}\n")
        display.close()
    check_shown(terminal.getvalue())
    display = BarDisplay(sys.stderr, 10, 0)  # a library user keeps streams and colours
    assert not isinstance(sys.stderr, SafeStream)
    display.close()


@pytest.mark.parametrize(
    "words",
    [
        "data index DATA",
        "check-data DATA",
        "evaluate scores DATA --out r.json",
        "train DATA --out run",
        "report DATA --out page",
    ],
)
def test_no_command_shows_names_that_steer_a_terminal(words, tmp_path):
    name = HOSTILE.replace("/", "") + "\nqmargin:_error:_forged"
    picture = np.zeros((112, 112, 3), np.uint8)
    for number in range(2):
        folder = tmp_path / name / f"{number}{name}"
        folder.mkdir(parents=True)
        Image.fromarray(picture).save(folder / f"{name}.png")
        (folder / f"{name}.jpg").write_bytes(b"<html>\x1b[2J")
    main_end, command_end = pty.openpty()
    command = [sys.executable, "-m", "qmargin", *words.replace("DATA", name).split(" ")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "400"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": command_end, "stderr": command_end}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **streams):
        os.close(command_end)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(main_end, 1 << 16):
                shown += part
    os.close(main_end)
    text = shown.decode(errors="backslashreplace")
    assert "owned" in text, text
    check_shown(text)
    assert "\nqmargin:_error:_forged" not in text.replace("\r", "")


def test_tracebacks_and_errors_are_escaped(monkeypatch, capsys):
    def fail() -> None:
        raise KeyError(1, LookupError(HOSTILE)) from LookupError(HOSTILE)

    monkeypatch.setattr("qmargin.recipes.list_recipes", fail)
    assert main(["recipes"]) == 1
    check_shown(capsys.readouterr().err)
