import re
from functools import partial
from pathlib import Path

import pytest

from helpers.commands import parse_command, run_command
from helpers.results import synthetic_result, write_results
from qmargin.errors import ConfigError
from qmargin.report import write

run = partial(run_command, "report")


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


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "report.md").read_text(encoding="utf-8")
    options = vars(parse_command(["qmargin", "report", "a.json", "--out", "x"]))
    for name in options:
        assert name in ("run", "results", "journals") or f"`--{name.replace('_', '-')}" in text, (
            name
        )


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
