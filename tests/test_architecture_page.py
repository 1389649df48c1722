"""``docs/architecture.md``: what it names exists, and its diagram agrees with the layers."""

import re

from helpers.pages import ROOT, code_in, missing, paths_in
from qmargin.registry import KINDS
from test_layers import MAY_IMPORT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_everything_on_the_page_exists():
    assert len(code_in(PAGE)) > 40 and len(paths_in(PAGE)) > 10
    assert missing(PAGE) == []


def test_what_does_not_exist_is_found():
    text = (
        "`qmargin.no` `qmargin.heads:No` `qmargin.heads.step:step_loss` `src/no.py` `src/qmargin/`"
    )
    assert missing(text) == ["src/no.py", "qmargin.heads:No", "qmargin.no"]


def test_the_diagram_has_every_package_above_what_it_imports():
    (diagram,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    rows: dict[str, int] = {}
    for number, line in enumerate(diagram.splitlines()):
        words = map(str.strip, re.split(r"\s{2,}|[│▼◄─┘]", line))
        names = [word for word in words if word in {*MAY_IMPORT, "cli"}]
        rows |= dict.fromkeys(names, number)
    assert rows.keys() == {*MAY_IMPORT, "cli"}
    for package, below in MAY_IMPORT.items():
        assert all(rows[name] > rows[package] for name in below.split()), package


def test_everything_that_can_be_registered_is_in_the_table():
    table = PAGE.partition("## To add X")[2]
    assert [kind.kind for kind in KINDS.values() if kind.kind not in table] == []
