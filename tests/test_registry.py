"""The registry of extension points."""

import sys
import threading
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from qmargin import registry
from qmargin.errors import ConfigError
from qmargin.registry import KINDS, Registry


def root(x: float) -> float:
    """Square root."""
    return x**0.5


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def write_package(folder: Path, name: str, **points: str) -> None:
    """A distribution with shapes that ``importlib.metadata`` finds, without pip."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[qmargin.shapes]\n{lines}")


def test_every_kind_has_a_registry_a_function_and_a_group():
    assert len(KINDS) == 10
    for name, found in KINDS.items():
        assert (f"{found.kind}s", found.group) == (name, f"qmargin.{name}")
        assert getattr(registry, f"register_{found.kind}") == found.register


def test_names_are_found_described_and_unique():
    shapes = Registry("shape")
    shapes.register("root", root)
    shapes.register("cube", partial(pow, 3))
    shapes.register("lazy", "decimal:Decimal")
    assert shapes.get("root") is root and shapes.names() == ["root", "cube", "lazy"]
    assert "root" in shapes and "circle" not in shapes
    assert shapes.describe()["root"] == "Square root."
    with pytest.raises(ConfigError, match=f"'root' is registered already, by {__name__}"):
        shapes.register("root", partial(root, 4))
    with pytest.raises(ConfigError, match="'roots'; did you mean 'root'"):
        shapes.get("roots")
    with pytest.raises(ConfigError, match=r"a/b\.yaml"):
        shapes.register("a/b.yaml", root)


def test_built_in_names_are_refused_and_found_by_threads():
    fresh = Registry[object]("recipe", home="qmargin.recipes")
    fresh._entries = registry.recipes._entries or {"debug": registry._Entry(root)}
    with pytest.raises(ConfigError, match="'debug' is registered already"):
        fresh.register("debug", root)
    fresh, found = Registry[object]("recipe", home="qmargin.recipes"), list[object]()
    fresh._entries = registry.recipes._entries
    threads = [threading.Thread(target=lambda: found.append(fresh.get("debug"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4


def test_a_cell_may_run_again():
    shapes = Registry("shape")
    for _ in range(2):

        def mine() -> None: ...

        mine.__module__ = "__main__"
        shapes.register("mine", mine)
    assert shapes.get("mine") is mine


def test_entry_points_are_imported_when_they_are_used(packages):
    (packages / "plain_shapes.py").write_text('def circle():\n    """A circle."""\n')
    write_package(packages, "plain-shapes", circle="plain_shapes:circle")
    shapes = Registry("shape")
    assert "circle" in shapes.names() and "plain_shapes" not in sys.modules
    assert shapes.describe() == {"circle": "A circle."}
    assert shapes.get("circle").__module__ == "plain_shapes"


def test_a_module_may_register_what_its_entry_point_names(packages):
    source = """
        from test_registry_shapes import shapes

        @shapes.register("square")
        def square():
            '''A square.'''
    """
    (packages / "own_shapes.py").write_text(dedent(source))
    write_package(packages, "own-shapes", square="own_shapes:square")
    shapes, module = Registry("shape"), type(sys)("test_registry_shapes")
    module.shapes = shapes  # type: ignore[attr-defined]
    sys.modules["test_registry_shapes"] = module
    assert shapes.get("square").__doc__ == "A square." and shapes.names() == ["square"]


def test_a_broken_package_is_named_and_harms_no_other(packages):
    (packages / "broken_shapes.py").write_text("import no_such_module_at_all\n")
    write_package(packages, "broken-shapes", oval="broken_shapes:oval", pi="math:tau_")
    write_package(packages, "whole-shapes", pair="math:hypot")
    shapes = Registry("shape")
    assert shapes.get("pair")(3, 4) == 5
    with pytest.raises(ConfigError, match=r"broken-shapes.*no_such_module_at_all"):
        shapes.get("oval")
    described = shapes.describe()
    assert "broken-shapes" in described["pi"] and described["pair"]


def test_names_that_two_packages_claim(packages):
    write_package(packages, "first-shapes", twice="math:sin", root="math:sqrt")
    write_package(packages, "second-shapes", twice="cmath:sin")
    shapes = Registry("shape")
    shapes.register("root", root)
    with pytest.warns(UserWarning, match="'root' of the package first-shapes is ignored"):
        shapes.names()
    assert shapes.get("root") is root
    with pytest.raises(ConfigError, match="first-shapes and second-shapes"):
        shapes.get("twice")
