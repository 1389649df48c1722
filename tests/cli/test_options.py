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
Words = tuple[str, ...]


def walk(
    parser: argparse.ArgumentParser, words: Words = ()
) -> Iterator[tuple[Words, argparse.ArgumentParser]]:
    yield words, parser
    for name, below in commands_of(parser).items():
        yield from walk(below, (*words, name))


COMMANDS = {**dict(walk(build_parser())), **dict(walk(benchmarks.build_parser(), ("benchmarks",)))}
LISTS = {  # two values of an option with several; of the others texts
    **dict.fromkeys(("--fars", "--p-target", "--alphas"), "1.5 2"),
    **dict.fromkeys(("--classes", "--growth-classes", "--only", "--batches"), "1 2"),
    **dict.fromkeys(("--rows", "--ranks", "--processes"), "8 16"),
    "--shapes": "2x3 4x5",
    "--dtypes": "float32 bfloat16",
    "--sizes": "100x8x4 200x8x4",
    "--paths": "sparse dense",
    "--parts": "paths errors",
}


def arguments_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Arguments that are shown, without commands."""
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
    ]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "qmargin")
def test_every_argument_has_help_and_shows_its_default(words):
    parser = COMMANDS[words]
    shown = " ".join(parser.format_help().split()).replace("- ", "-")
    for action in arguments_of(parser):
        name = "/".join(action.option_strings) or action.dest
        assert action.help and not action.help.startswith("("), f"{words} {name} has no help"
        text = described(action)
        assert " ".join((text % vars(action)).split()).replace("- ", "-") in shown
        if not action.option_strings or action.nargs == 0 or action.required:
            continue
        assert re.search(r"\S \(default: [^()]+\)$", text), f"{words} {name}: {text}"
        if action.default not in (None, "", [], (), Path()):
            is_list = isinstance(action.default, tuple | list)
            values = action.default if is_list else [action.default]
            told = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
            assert text.endswith(f"(default: {' '.join(told)})"), (words, name)
    for group in parser._actions:
        if isinstance(group, argparse._SubParsersAction):
            told = {choice.dest: choice.help for choice in group._choices_actions}
            assert set(told) == set(group.choices) and all(told.values())


def test_lists_take_spaces_and_commas():
    for parser in COMMANDS.values():
        needed = [
            word
            for action in arguments_of(parser)
            if action.required
            for word in (*action.option_strings[:1], *(action.choices or ["x"])[:1])
        ]
        for action in arguments_of(parser):
            if not action.option_strings or action.nargs != "+":
                continue
            option = action.option_strings[0]
            values = LISTS.get(option, "one two")
            forms = (values.split(), [values.replace(" ", ",")], [values.replace(" ", ", ") + ","])
            parsed = [parser.parse_args([*needed, option, *form]) for form in forms]
            found = [vars(one)[action.dest] for one in parsed]
            assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_a_file_whose_name_has_a_comma_is_one_file(tmp_path):
    (tmp_path / "a,b.txt").touch()
    parser = Parser(prog="qmargin")
    parser.add_argument("--files", nargs="+", type=Path, help="files")
    found = parser.parse_args(["--files", f"{tmp_path}/a,b.txt", "c,d"]).files
    assert [path.name for path in found] == ["a,b.txt", "c", "d"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("evalute", "evaluate"),
        ("evaluate scors", "scores"),
        ("data get omnigolt", "omniglot"),
        ("--versoin", "--version"),
        ("evaluate --hlep", "--help"),
        ("evaluate scores a.txt --out r.json --farrs=0.1", "--fars"),
        ("train debug --device cudda", "cuda"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(words, meant, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    told = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and f"did you mean {meant!r}?" in told
    assert words.split()[-1] in told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "demo train compare sweep"),
        ("ev", "evaluate"),
        ("evaluate s", "scores"),
        ("evaluate scores f --fa", "--fars"),
        ("train debug --device ", "auto cpu cuda"),
        ("train debug --out ", ""),
        ("train --out demo --dry", "--dry-run"),
        ("data get ", "omniglot"),
        ("completion z", "zsh"),
        ("completion zsh --w", ""),
    ],
)
def test_words_are_completed(words, expected):
    found = candidates(build_parser(), words.split(" "))
    assert found[:4] == expected.split() and (
        words or set(found) == set(commands_of(build_parser()))
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_accepted_by_their_shells(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path):
    program = tmp_path / "qmargin"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qmargin "$@"\n')
    program.chmod(0o755)
    ask = (
        'eval "$(qmargin completion bash)"; COMP_WORDS=(qmargin train debug --device c); '
        'COMP_CWORD=4; _qmargin; printf "%s " "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", ask]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.split() == ["cpu", "cuda"], result.stderr


def test_the_reference_has_every_command_and_its_options(monkeypatch):
    """The table names every command; the site appends the help of each."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    from command_help import parsers, sections

    table = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    help_texts = dict(
        re.findall(r"^## (qmargin [^\n]+)\n+```text\n(.*?)^```", sections(), re.M | re.S)
    )
    known = dict(parsers(build_parser()))
    assert help_texts.keys() == known.keys()
    for words, parser in known.items():
        group, _, name = words.rpartition(" ")
        is_named = f"`{words}" in table or (f"`{group} " in table and f"`{name}`" in table)
        assert is_named, words
        for action in arguments_of(parser):
            assert all(option in help_texts[words] for option in action.option_strings), words


def test_the_doctor_knows_every_extra(capsys):
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
