"""Every option of every command: help, defaults, lists of values, suggestions, completion."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from qmargin.cli import doctor
from qmargin.cli.commands import build_parser
from qmargin.cli.completion import candidates
from qmargin.cli.main import main
from qmargin.cli.options import Parser, commands_of, described

ROOT = Path(__file__).parents[2]


def walk(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for name, below in commands_of(parser).items():
        yield from walk(below, (*words, name))


COMMANDS = {**dict(walk(build_parser())), **dict(walk(benchmarks.build_parser(), ("benchmarks",)))}
LISTS = {  # two values of an option with several; of the others texts
    "--fars": "1e-3 1e-4",
    "--p-target": "0.01 0.05",
    "--alphas": "1.5 2",
    "--classes": "100 200",
    "--only": "0 2",
    "--growth-classes": "100 200",
    "--paths": "sparse dense",
    "--parts": "paths errors",
}


def several(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.nargs == "+"]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "qmargin")
def test_every_argument_has_help_and_shows_its_default(words: tuple[str, ...]) -> None:
    parser = COMMANDS[words]
    assert isinstance(parser, Parser)
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        name = "/".join(action.option_strings) or action.dest
        assert action.help and not action.help.startswith("("), f"{words} {name} has no help"
        text = described(action)
        assert " ".join((text % vars(action)).split()).replace("- ", "-") in shown.replace(
            "- ", "-"
        )
        if action.option_strings and action.nargs != 0 and not action.required:
            assert re.search(r"\S \(default: [^()]+\)$", text), f"{words} {name}: {text}"
            assert text.count("(default: ") == 1


def test_commands_have_a_help_of_one_line() -> None:
    for parser in COMMANDS.values():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                told = {choice.dest: choice.help for choice in action._choices_actions}
                assert set(told) == set(action.choices) and all(told.values())


def test_a_stated_default_is_the_real_one() -> None:
    in_words = {".": "here"}
    for words, parser in COMMANDS.items():
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and action.default not in (None, "", []):
                if action.default == () or action.default == argparse.SUPPRESS:
                    continue
                values = (
                    action.default if isinstance(action.default, tuple | list) else [action.default]
                )
                shown = [
                    f"{value:g}" if isinstance(value, float) else str(value) for value in values
                ]
                text = " ".join(in_words.get(value, value) for value in shown)
                assert described(action).endswith(f"(default: {text})"), (words, action)


@pytest.mark.parametrize(
    "words", [words for words, parser in COMMANDS.items() if several(parser)], ids=" ".join
)
def test_lists_take_spaces_and_commas(words: tuple[str, ...]) -> None:
    parser = COMMANDS[words]
    needed = [
        word
        for action in parser._actions
        if action.required and not isinstance(action, argparse._SubParsersAction)
        for word in (*action.option_strings[:1], *(action.choices or ["x"])[:1])
    ]
    for action in several(parser):
        option = action.option_strings[0]
        values = LISTS.get(option, "one two")
        with_spaces = [option, *values.split()]
        with_comma = [option, values.replace(" ", ",")]
        with_both = [option, values.replace(" ", ", ") + ","]
        found = [
            vars(parser.parse_args([*needed, *given]))[action.dest]
            for given in (with_spaces, with_comma, with_both)
        ]
        assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_a_file_whose_name_has_a_comma_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "a,b.txt").touch()
    parser = Parser(prog="qmargin")
    parser.add_argument("--files", nargs="+", type=Path, help="files")
    found = parser.parse_args(["--files", f"{tmp_path}/a,b.txt", "c,d"]).files
    assert [path.name for path in found] == ["a,b.txt", "c", "d"]


def test_a_list_that_took_a_positional_argument_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "scores", "--fars", "1e-3", "scores.txt"])
    assert stop.value.code == 2
    assert "'scores.txt' is not a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("evalute", "evaluate"),
        ("evaluate scors", "scores"),
        ("data gte", "get"),
        ("data get omnigolt", "omniglot"),
        ("--versoin", "--version"),
        ("evaluate --hlep", "--help"),
        ("evaluate scores a.txt --out r.json --farrs 0.1", "--fars"),
        ("train debug --outt=x", "--out"),
        ("train debug --device cudda", "cuda"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    wrong = next(word for word in words.split()[::-1] if word not in ("0.1",))
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"did you mean {meant!r}?" in told and wrong in told


def test_a_word_that_is_like_nothing_gets_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["xyzzy"])
    assert "choose from demo, train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ev"], ["evaluate"]),
        (["evaluate", "s"], ["scores"]),
        (["evaluate", "scores", "f", "--fa"], ["--fars"]),
        (["train", "debug", "--device", ""], ["auto", "cpu", "cuda"]),
        (["train", "debug", "--out", ""], []),
        (["train", "--out", "demo", "--dry"], ["--dry-run"]),
        (["data", "get", ""], ["omniglot"]),
        (["completion", "z"], ["zsh"]),
        (["completion", "zsh", "--w"], []),
    ],
)
def test_words_are_completed(words: list[str], expected: list[str]) -> None:
    assert candidates(build_parser(), words) == expected


def test_no_words_are_completed_to_all_commands() -> None:
    assert candidates(build_parser(), [""]) == list(commands_of(build_parser()))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_accepted_by_their_shells(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "qmargin"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qmargin "$@"\n')
    program.chmod(0o755)
    ask = (
        'eval "$(qmargin completion bash)"; COMP_WORDS=(qmargin train debug --device c); '
        'COMP_CWORD=4; _qmargin; printf "%s " "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        ["bash", "-c", ask],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert result.stdout.split() == ["cpu", "cuda"], result.stderr


def test_every_option_is_in_the_reference() -> None:
    """In the section of its command, whose heading names it."""
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## qmargin ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    missing = []
    for words, parser in COMMANDS.items():
        if not words or words[0] == "benchmarks" or commands_of(parser):
            continue
        is_basic = words in {
            ("evaluate", "scores"),
            ("evaluate", "trials"),
            ("evaluate", "all-pairs"),
        }
        name = "evaluate" if is_basic else words[-1]
        found = [body for head, body in parts if name in re.split(r"[ ,;]+", head)]
        section = found[0] if is_basic else "".join(found)
        assert section, words
        missing += [
            (words, action.option_strings[0])
            for action in parser._actions
            if action.option_strings
            and action.help != argparse.SUPPRESS
            and action.dest != "help"
            and not any(f"`{option}`" in section for option in action.option_strings)
        ]
    assert missing == []


def test_the_doctor_knows_every_extra(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[project.")[0]
    extras = {
        name: [re.split(r"[\[<>=;]", package)[0] for package in re.findall(r'"([^"]+)"', packages)]
        for name, packages in re.findall(r"^(\w+) = \[(.*?)\n?\](?:\n|$)", section, re.M | re.S)
    }
    assert {name: packages.split() for name, (packages, _) in doctor._EXTRAS.items()} == extras
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for extra, packages in extras.items():
        line = next(line for line in shown.splitlines() if line.startswith(f"extra {extra} "))
        assert packages[0] in line
        assert "not installed" not in line or f"pip install 'qmargin[{extra}]'" in line
