import html
import json
import re

import pytest

from helpers.results import HOSTILE
from qmargin.report.markup import LONGEST_NAME, cleaned, escaped, joined, json_block, name_of, tag


@pytest.mark.parametrize("attack", HOSTILE)
def test_text_and_attributes_come_back_as_they_were(attack: str) -> None:
    written = tag("p", attack, title=attack)
    found = re.fullmatch(r'<p title="([^"<>]*)">([^<>]*)</p>', written)
    assert found is not None
    assert [html.unescape(part) for part in found.groups()] == [attack, attack]


@pytest.mark.parametrize("attack", HOSTILE)
def test_data_blocks_hold_no_markup_and_come_back(attack: str) -> None:
    written = json_block("data", {"name": attack})
    assert written.count("<") == 2  # its own two tags
    content = written.partition(">")[2].rpartition("</script>")[0]
    assert json.loads(content) == {"name": attack}


def test_markup_is_not_escaped_twice() -> None:
    inner = tag("b", "<")
    assert tag("p", inner) == "<p><b>&lt;</b></p>"
    assert joined([inner, "<"]) == "<b>&lt;</b>&lt;"
    assert escaped(escaped("<")) == "&lt;"


def test_names_keep_their_letters_and_lose_what_moves_text() -> None:
    assert cleaned("Ωμέγα 中文 é") == "Ωμέγα 中文 é"
    for sign in ("\x00", "\n", "\x1b", "\u202e", "\u2066", "\u200b", "\u2028", "\ud800"):
        assert cleaned(f"a{sign}b") == "a\ufffdb"


def test_long_names_are_cut() -> None:
    assert len(cleaned("x" * 10_000)) == LONGEST_NAME
    assert cleaned("x" * LONGEST_NAME) == "x" * LONGEST_NAME


def test_a_name_can_be_written_to_a_file() -> None:
    assert all(name_of(attack).encode("utf-8") for attack in HOSTILE)


def test_attributes_that_are_none_or_false_are_left_out() -> None:
    assert tag("input", value=None, hidden=False, disabled=True) == "<input disabled>"
