"""A package of a user adds one of everything, and nothing here knows of it.

``tests/extension_package`` is such a package. Its entry points are put where Python finds them, as
``pip install`` would do.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.commands import run_command as run
from helpers.registries import REGISTRIES, forget_registered
from helpers.runs import losses
from qmargin import registry
from qmargin.cli.commands import build_parser
from qmargin.cli.completion import candidates
from qmargin.cli.main import main
from qmargin.data import open_dataset
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.recipes import get_recipe
from qmargin.registry import Registry
from qmargin.training.recipe_files import apply_settings, from_yaml

PACKAGE = Path(__file__).parent / "extension_package"


def entry_points() -> dict[str, dict[str, str]]:
    """Group to name to object, from the package's pyproject.toml."""
    text = (PACKAGE / "pyproject.toml").read_text(encoding="utf-8")
    groups = re.findall(r'\[project\.entry-points\."([\w.]+)"\]\n((?:[\w-]+ = ".*"\n?)*)', text)
    return {group: dict(re.findall(r'([\w-]+) = "(.*)"', lines)) for group, lines in groups}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``sys.path`` with the metadata of the package."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "qmargin_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qmargin-example\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in entry_points().items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (folder / "qmargin_example").symlink_to(PACKAGE / "qmargin_example")
    return folder


@pytest.fixture
def extended(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is importable, and forgotten afterwards."""
    forget_registered(monkeypatch)
    monkeypatch.syspath_prepend(installed)
    yield
    for name in [name for name in sys.modules if name.startswith("qmargin_example")]:
        del sys.modules[name]


pytestmark = pytest.mark.usefixtures("extended")


def test_the_package_has_one_of_every_kind_in_a_file_of_its_own() -> None:
    groups = entry_points()
    assert set(groups) == {one.group for one in REGISTRIES}
    modules = [value.partition(":")[0] for points in groups.values() for value in points.values()]
    assert len(modules) == len(set(modules)) == len(groups)


@pytest.mark.parametrize("one", REGISTRIES, ids=lambda one: one.kind)
def test_every_extension_is_listed_with_its_description(
    one: Registry[object], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in entry_points().get(one.group, {}):
        assert one.describe()[name].endswith(".")
        assert one.get(name).__module__.startswith("qmargin_example.")
        run("list", one.group.partition(".")[2])
        assert name in capsys.readouterr().out


def test_a_recipe_and_its_backbone_are_listed_and_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("recipes")
    assert "example-recipe" in capsys.readouterr().out
    run("train", "example-recipe", "--out", tmp_path / "run", "--device", "cpu")
    assert list(losses(tmp_path / "run")) == [2, 4]
    run("export", tmp_path / "run", "--out", tmp_path / "model")
    assert "example-net" in (tmp_path / "model" / "card.json").read_text()


def test_a_loss_and_data_of_the_package_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["loss.margin_kind=half-cosine", "loss.divergence=pearson", "loss.alpha=null"]
    settings += ["loss.scale=4", "data.kind=circle", "data.num_classes=20", "data.options=null"]
    settings += [
        "data.options.noise=0.2",
        "loss.reference=[{rare-first: {strength: 0.5, few: 17}}]",
    ]
    words = [f"--set={setting}" for setting in settings]
    run("train", "example-recipe", *words, "--out", tmp_path / "run", "--device", "cpu")
    assert list(losses(tmp_path / "run")) == [2, 4]
    capsys.readouterr()
    run("train", "--out", tmp_path / "run", "--resume", "--print-recipe")
    recipe = from_yaml(capsys.readouterr().out)
    assert (recipe.loss.margin_kind, recipe.loss.divergence) == ("half-cosine", "pearson")
    assert recipe.loss.reference == {"rare-first": {"strength": 0.5, "few": 17}}


def test_a_format_of_the_package_is_indexed_checked_and_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        pixels = np.full((112, 112, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    listed = tmp_path / "faces.people"
    listed.write_text("ada 0.png\nada 1.png\nbea 2.png\nbea 3.png\n")
    run("data", "index", listed)
    run("check-data", listed)
    assert "people-list" in capsys.readouterr().out
    dataset = open_dataset(listed, verify=True)
    assert (len(dataset), dataset.class_name(1)) == (4, "bea")
    listed.write_text("ada 0.png\nada\n")
    with pytest.raises(DataError, match=r"faces\.people, line 2"):
        run("check-data", listed)


def test_a_protocol_is_a_command_with_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["evaluate", "--help"])
    assert "two-files" in capsys.readouterr().out
    assert candidates(build_parser(), ["evaluate", "two"]) == ["two-files"]
    monkeypatch.chdir(tmp_path)
    Path("genuine.txt").write_text("-0.9\n-0.8\n0.3\n")
    Path("impostor.txt").write_text("0.5\n-0.85\n0.7\n0.2\n")
    words = ["evaluate", "two-files", "genuine.txt", "impostor.txt", "--fars", "0.25,0.5"]
    arguments = build_parser().parse_args([*words, "--negate", "--out", "r.json"])
    arguments.run(arguments)
    result = read_result("r.json")
    assert (result.protocol.kind, result.system.name) == ("two-files", "two-files")
    assert [point.false_accepts for point in result.measures.tar] == [1, 2]
    genuine, impostor = np.array([0.9, 0.8, -0.3]), np.array([-0.5, 0.85, -0.7, -0.2])
    expected = (genuine.mean() - impostor.mean()) / np.sqrt((genuine.var() + impostor.var()) / 2)
    assert result.measures.extra["d-prime"].value == pytest.approx(expected)
    run("report", "r.json", "--out", "page", "--no-figures")
    page = Path("page/index.html").read_text(encoding="utf-8")
    assert "two-files" in page and "d-prime" in page
    assert "joint deviation.." not in Path("page/tables.md").read_text(encoding="utf-8")
    arguments = build_parser().parse_args([*words, "--out", "genuine.txt"])
    with pytest.raises(ConfigError, match=r"genuine\.txt is an input"):
        arguments.run(arguments)


def test_a_protocol_that_fails_does_not_hide_the_others(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.protocols.register("broken", "qmargin_example.no_such_module:Thing")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["evaluate", "--help"])
    printed = capsys.readouterr().out
    assert "broken" in printed and "two-files" in printed
    arguments = build_parser().parse_args(["evaluate", "broken"])
    with pytest.raises(ConfigError, match="no_such_module"):
        arguments.run(arguments)


def test_an_error_of_a_package_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_text("high\n")
    assert main(["evaluate", "two-files", "bad.txt", "bad.txt", "--out", "r.json"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "qmargin doctor" not in told
    assert re.search(r"ValueError in .*qmargin_example.protocol\.py, line \d+", told), told


@pytest.mark.parametrize(
    ("kind", "setting"), [("margins", "margin"), ("divergences", "divergence")]
)
def test_a_loss_that_cannot_be_imported_is_named_with_its_key(kind: str, setting: str) -> None:
    registry.KINDS[kind].register("broken", "qmargin_example.no_such_module:Thing")
    with pytest.raises(ConfigError, match=rf"^loss\.{setting} is 'broken'.*no_such_module"):
        apply_settings(get_recipe("debug"), [f"loss.{setting}={{broken: 0.1}}"])


def test_an_experiment_is_run_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", "--list")
    assert "example-experiment" in capsys.readouterr().out
    run("compare", "example-experiment", "--out", tmp_path / "e", "--devices", "cpu")
    results = [read_result(path) for path in (tmp_path / "e").rglob("result.json")]
    assert {result.run.arm for result in results if result.run} == {"cosface", "q_margin"}
    assert "Q-Margin" in capsys.readouterr().out


def test_a_new_process_finds_them(installed: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); from qmargin.cli.main import main"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(main(['recipes']))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "example-recipe" in result.stdout, result.stderr
