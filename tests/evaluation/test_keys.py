import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qmargin.evaluation.keys import TrialKeys, first_duplicate, match_rows

NAMES = st.sampled_from(["a", "b", "c", "aa", "ä"])
PAIRS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=20)


def keys_of(pairs: list[tuple[str, str]]) -> TrialKeys:
    return TrialKeys.from_names([e for e, _ in pairs], [t for _, t in pairs])


@given(PAIRS)
def test_names_come_back_sorted_and_in_use(pairs: list[tuple[str, str]]) -> None:
    keys = keys_of(pairs)
    assert [keys.trial(row) for row in range(len(keys))] == pairs
    assert list(keys.names) == sorted({name for pair in pairs for name in pair})
    order = np.argsort(keys.pairs(), kind="stable")
    assert [pairs[row] for row in order] == sorted(pairs)


@given(PAIRS)
def test_the_earliest_repetition_is_found(pairs: list[tuple[str, str]]) -> None:
    expected = next(
        ((pairs.index(pair), row) for row, pair in enumerate(pairs) if pair in pairs[:row]), None
    )
    assert first_duplicate(keys_of(pairs).pairs()) == expected


@given(PAIRS, PAIRS)
def test_rows_match_as_a_search_would_find_them(
    wanted: list[tuple[str, str]], given_pairs: list[tuple[str, str]]
) -> None:
    given_pairs = list(dict.fromkeys(given_pairs))
    expected = [given_pairs.index(pair) if pair in given_pairs else -1 for pair in wanted]
    assert match_rows(keys_of(wanted), keys_of(given_pairs)).tolist() == expected


@given(PAIRS, st.data())
def test_taking_rows_takes_trials(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=5))
    taken = keys_of(pairs).take(np.array(rows, dtype=np.int64))
    assert [taken.trial(row) for row in range(len(rows))] == [pairs[row] for row in rows]
