import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.results import synthetic_result, write_results
from qmargin.cli.report import add_report
from qmargin.errors import ConfigError
from qmargin.report import write


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="qmargin")
    add_report(parser.add_subparsers())
    return parser.parse_args(["report", *arguments])


def run(*arguments: str) -> None:
    parsed = parse(*arguments)
    parsed.run(parsed)


def test_report_names_the_files_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_results(tmp_path, synthetic_result("A"), synthetic_result("B", seed=1))
    out = tmp_path / "out"
    run(*map(str, paths), "--out", str(out), "--title", "Ours <1>", "--no-figures")
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out / 'index.html'} (")
    assert printed.count("\n") == 5
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<title>Ours &lt;1&gt;</title>" in page


def test_journals_may_be_repeated(tmp_path: Path) -> None:
    paths = write_results(tmp_path, synthetic_result())
    journals = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text('{"step": 1, "support_mean": 5, "support_max": 9}\n')
        journals += ["--journal", str(path)]
    run(str(paths[0]), "--out", str(tmp_path / "out"), "--no-figures", *journals)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    table = page.partition('class="support"')[2].partition("</section>")[0]
    names = re.findall(r'<th scope="row">.*?(one|two).*?</th>', table, re.DOTALL)
    assert names == ["one", "two"]


@pytest.mark.parametrize(
    "arguments", [[], ["a.json"], ["a.json", "--out", "x", "--level", "1"], ["--out", "x"]]
)
def test_usage_errors_exit_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*arguments)
    assert stop.value.code == 2
    assert "usage: qmargin report" in capsys.readouterr().err


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        "import sys, argparse; from qmargin.cli.report import add_report; "
        "add_report(argparse.ArgumentParser().add_subparsers()); "
        "sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "report.md").read_text(encoding="utf-8")
    options = vars(parse("a.json", "--out", "x"))
    for name in options:
        assert name in ("run", "results") or f"`--{name.replace('_', '-')}" in text, name


def test_a_report_without_matplotlib_has_page_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_results(tmp_path, synthetic_result())
    monkeypatch.setattr(write, "has_matplotlib", lambda: False)
    run(str(path), "--out", str(tmp_path / "out"))
    said = capsys.readouterr()
    assert said.out.count("\n") == 5
    assert said.err.count("\n") == 1
    assert "qmargin[figures]" in said.err
    with pytest.raises(ConfigError, match=r"qmargin\[figures\]"):
        run(str(path), "--out", str(tmp_path / "out"), "--figures")
    run(str(path), "--out", str(tmp_path / "out"), "--no-figures")
    assert capsys.readouterr().err == ""
