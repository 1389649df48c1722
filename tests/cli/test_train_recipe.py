"""Recipes on the command line: by name or file, changed and printed."""

from pathlib import Path

import pytest

from qmargin.cli.main import build_parser
from qmargin.cli.recipes import load_recipe
from qmargin.errors import ConfigError
from qmargin.recipes import get_recipe, list_recipes
from qmargin.training.recipe_files import from_yaml, to_yaml


def run(*arguments: str) -> None:
    parsed = build_parser().parse_args(arguments)
    parsed.run(parsed)


def test_recipes_are_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    run("recipes")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_recipes())
    assert lines[0].endswith("on a CPU in a minute.")


def test_a_printed_recipe_is_the_one_that_would_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run("train", "debug", "--set", "loss.margin=0.3", "--set", "seed=3", "--print-recipe")
    printed = capsys.readouterr().out
    recipe = from_yaml(printed)
    assert (recipe.loss.margin, recipe.seed) == (0.3, 3)
    path = tmp_path / "mine.yaml"
    path.write_text(printed, encoding="utf-8")
    run("train", str(path), "--print-recipe")
    assert capsys.readouterr().out == printed


def test_names_and_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug").mkdir()  # a folder of that name is no recipe
    assert load_recipe("debug") == get_recipe("debug")
    (tmp_path / "own.yml").write_text(to_yaml(load_recipe("debug", ["seed=9"])), encoding="utf-8")
    assert load_recipe("own.yml").seed == 9
    with pytest.raises(ConfigError, match=r"no file missing.yaml; name one, or a recipe"):
        load_recipe("missing.yaml")
    with pytest.raises(ConfigError, match=r"no file some/where;"):
        load_recipe("some/where")
    with pytest.raises(ConfigError, match="did you mean 'debug'"):
        load_recipe("debgu")
