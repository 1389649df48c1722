"""``qmargin report`` from results to a page."""

import re

import pytest

from helpers.commands import run_command
from helpers.results import synthetic_result, write_results
from qmargin.errors import ConfigError
from qmargin.report import write


def test_a_report_names_the_files_it_wrote_and_shows_journals(tmp_path, capsys):
    paths = write_results(tmp_path, synthetic_result("A"), synthetic_result("B", seed=1))
    out, journals = tmp_path / "out", list[object]()
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text('{"step": 1, "support_mean": 5, "support_max": 9}\n')
        journals += ["--journal", path]
    options = ("--out", out, "--title", "Ours <1>", "--no-figures")
    run_command("report", *paths, *options, *journals)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out / 'index.html'} (") and printed.count("\n") == 5
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<title>Ours &lt;1&gt;</title>" in page
    table = page.partition('class="support"')[2].partition("</section>")[0]
    names = re.findall(r'<th scope="row"[^>]*>.*?(one|two).*?</th>', table, re.DOTALL)
    assert names == ["one", "two"]


def test_a_report_without_matplotlib_has_page_and_tables(tmp_path, capsys, monkeypatch):
    (path,) = write_results(tmp_path, synthetic_result())
    command = ("report", path, "--out", tmp_path / "out")
    monkeypatch.setattr(write, "has_matplotlib", lambda: False)
    run_command(*command)
    said = capsys.readouterr()
    assert (said.out.count("\n"), said.err.count("\n")) == (5, 1)
    assert "qmargin[figures]" in said.err
    with pytest.raises(ConfigError, match=r"qmargin\[figures\]"):
        run_command(*command, "--figures")
    run_command(*command, "--no-figures")
    assert capsys.readouterr().err == ""
