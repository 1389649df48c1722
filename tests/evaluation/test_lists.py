"""Score files in every order and format give the same trials."""

import hashlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmargin.errors import ConfigError, DataError
from qmargin.evaluation import columns as columns_module
from qmargin.evaluation.columns import read_mapping
from qmargin.evaluation.protocols import ijb as integers
from qmargin.evaluation.protocols.ijb import read_integers
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.trials import (
    TrialKeys,
    find_subjects,
    match_rows,
    read_trials,
    repeated_rows,
)

TRIALS = [  # enrol, test, score, label
    ("ann/1", "ann/2", 0.75, True),
    ("ann/1", "bob/1", -0.125, False),
    ("bob/1", "ann/1", 1e-7, False),
    ("bob/1", "bob/2", float("inf"), True),
    ("cät/1", "bob/2", float("-inf"), False),
]


def as_rows(score_set):
    return [
        (*score_set.keys.trial(row), float(score_set.scores[row]), bool(score_set.is_genuine[row]))
        for row in range(len(score_set))
    ]


def written(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def in_order(order, separator, words=("0", "1")):
    """Lines of the trials with their columns in an order of letters."""
    for enrol, test, score, label in TRIALS:
        cells = {"e": enrol, "t": test, "s": repr(score), "l": words[label]}
        yield separator.join(cells[letter] for letter in order)


@pytest.mark.parametrize(
    "words", ["0 1", "nontarget target", "False True", "DIFFERENT same", "impostor genuine"]
)
@pytest.mark.parametrize("separator", [" ", "\t", "  \t "])
@pytest.mark.parametrize("order", ["etsl", "etls"])
def test_headerless_orders_are_found_out(tmp_path, order, separator, words):
    path = written(tmp_path / "scores.txt", in_order(order, separator, words.split()))
    assert as_rows(read_scores(path)) == TRIALS


@pytest.mark.parametrize(
    ("header", "order", "separator"),
    [
        ("enrol,test,score,label", "etsl", ","),
        ("label,score,test,enrol", "lste", ","),
        ("Score\tis_target\tenroll\tprobe", "slet", "\t"),
        ("similarity same model query", "slet", " "),
    ],
)
def test_headers_in_any_order(tmp_path, header, order, separator):
    path = written(tmp_path / "scores.csv", [header, *in_order(order, separator)])
    assert as_rows(read_scores(path)) == TRIALS


def test_csv_with_quotes_spaces_marks_and_blank_lines(tmp_path):
    path = tmp_path / "scores.csv"
    content = (
        "\ufeffscore, label, enrol, test, comment\r\n"
        '0.5, 1, "Smith, John", "a ""b""", kept\r\n'
        "\r\n"
        "0.25, 0, x, y,\r\n"
    )
    path.write_bytes(content.encode("utf-8"))
    expected = [("Smith, John", 'a "b"', 0.5, True), ("x", "y", 0.25, False)]
    assert as_rows(read_scores(path)) == expected


def test_a_file_without_a_last_line_end_and_with_small_chunks(tmp_path, monkeypatch):
    path = tmp_path / "scores.txt"
    path.write_text("\n".join(f"a{i} b{i} {i / 7!r} {i % 2}" for i in range(200)))
    whole = read_scores(path)
    monkeypatch.setattr(columns_module, "_CHUNK_BYTES", 64)
    assert as_rows(read_scores(path)) == as_rows(whole)
    assert whole.scores.tolist() == [i / 7 for i in range(200)]
    assert whole.sources[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_scores_without_names(tmp_path):
    score_set = read_scores(written(tmp_path / "scores.txt", ["0.5 target", "0.1 nontarget"]))
    assert (score_set.keys, score_set.trials_sha256(), find_subjects(score_set)) == (None,) * 3
    assert score_set.scores.tolist() == [0.5, 0.1]


def test_two_readings_are_refused_and_a_format_or_a_line_decides(tmp_path):
    path = written(tmp_path / "scores.txt", ["a b 0 1", "a c 1 1"])
    with pytest.raises(DataError, match="enrol-test-score-label or as enrol-test-label-score"):
        read_scores(path)
    assert read_scores(path, format="enrol-test-score-label").scores.tolist() == [0.0, 1.0]
    assert read_scores(path, format="enrol-test-label-score").scores.tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match="'kaldi'"):
        read_scores(path, format="kaldi")
    written(path, ["a b 0 1", "a c 1 1", "a d 0.5 0"])
    assert read_scores(path).is_genuine.tolist() == [True, True, False]


@pytest.mark.parametrize("labels", ["kaldi", "voxceleb"])
def test_scores_join_a_trial_list_in_another_order(tmp_path, labels):
    shuffled = [TRIALS[i] for i in (3, 0, 4, 1, 2)]
    scores = written(tmp_path / "s.txt", [f"{e} {t} {s!r}" for e, t, s, _ in shuffled])
    lines = in_order("let", " ")
    if labels == "kaldi":
        lines = in_order("etl", " ", ("nontarget", "target"))
    joined = read_scores(scores, trials=read_trials(written(tmp_path / "trials.txt", lines)))
    assert as_rows(joined) == TRIALS
    assert [source.role for source in joined.sources] == ["scores", "trials"]


def test_the_hash_of_trials_ignores_order_and_scores_but_not_labels(tmp_path):
    def hash_of(trials):
        lines = ["enrol,test,score,label", *(f"{e},{t},{s},{int(b)}" for e, t, s, b in trials)]
        return read_scores(written(tmp_path / "scores.csv", lines)).trials_sha256()

    reference = hash_of(TRIALS)
    assert hash_of(TRIALS[::-1]) == reference
    assert hash_of([(e, t, 0.0, b) for e, t, _, b in TRIALS]) == reference
    assert hash_of([(e, t, s, not b) for e, t, s, b in TRIALS]) != reference
    assert hash_of([(t, e, s, b) for e, t, s, b in TRIALS]) != reference
    assert hash_of(TRIALS[:-1]) != reference


def test_npz_in_both_forms(tmp_path):
    path = tmp_path / "scores.npz"
    np.savez(path, genuine=np.array([0.5, 0.75], np.float32), impostor=np.array([0, 1]))
    two = read_scores(path)
    assert two.scores.tolist() == [0.5, 0.75, 0.0, 1.0]
    assert two.is_genuine.tolist() == [True, True, False, False]
    enrol, test, scores, labels = zip(*TRIALS, strict=True)
    words = np.array(["target" if label else "nontarget" for label in labels])
    for each in (*(np.array(labels, dtype) for dtype in (bool, np.int8, np.float32)), words):
        np.savez(path, scores=scores, labels=each, enrol=enrol, test=test)
        assert as_rows(read_scores(path)) == TRIALS


def refused(path, message, **options):
    with pytest.raises(DataError, match=message) as error:
        read_scores(path, **options)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a2 b1 nan target", "NaN"),
        ("a2 b1 -NaN target", "NaN"),
        ("a2 b1 0,5 target", "score '0,5'"),
        ("a2 b1 1_0 target", "score '1_0'"),
        ("a2 b1 high target", "score 'high'"),
        ("a2 b1 0.5 maybe", "label 'maybe'"),
        ("a2 b1 0.5 2", "label '2'"),
        ("a2 b1 0.5", "3 columns where 4"),
        ("a2 b1 0.5 target more", "5 columns where 4"),
        ("a1 b2 0.3 nontarget", "'a1' 'b2' is also in .*, line 2"),
        ("b2 a1 0.3 target", "'b2' 'a1' is genuine, but .*, line 2 .* impostor"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    lines = ["a1 b1 0.5 target", "a1 b2 0.1 nontarget", "", line, "a3 b3 0.2 target"]
    refused(written(tmp_path / "scores.txt", lines), rf"scores\.txt, line 4: .*{message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a2,b1,nan,1", "NaN"),
        ("a2,b1,,1", "the score is empty"),
        ("a2,b1,0.5", "3 columns where 4"),
        ('a2,"b1,0.5,1', "1 columns where 4"),
        ("a1,b1,0.5,1", "'a1' 'b1' is also in .*, line 2"),
    ],
)
def test_a_bad_line_after_a_header_is_named(tmp_path, line, message):
    path = written(tmp_path / "s.csv", ["enrol,test,score,label", "a1,b1,0.5,1", line])
    refused(path, rf"s\.csv, line 3: .*{message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        (["enrol,test,score,label"], "has no trials"),
        (["enrol,test,label,other"], "no column|none of"),
        (["enrol,score,label", "a,1,1"], "one of enrol and test"),
        (["score,similarity,label", "1,1,1"], "two columns for 'score'"),
        (["enrol,test,score", "a,b,1"], "has no labels"),
        (["a b c d e f g"], "line 1: 7 columns"),
        (["a b target"], "line 1: the score 'target'"),
        (["a b 0.5"], "has no labels"),
        (["a b 0 1", "a c 0.5 0.7"], "line 2: 4 columns"),
    ],
)
def test_a_bad_file_is_named(tmp_path, lines, message):
    refused(written(tmp_path / "scores.csv", lines), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a b 0.5 1\na c\xff 0.25 0\n", r"line 2: the name b'c\\xff' is not UTF-8"),
        (b"a" * 3_000_000, "longer than 1,048,576 bytes"),
        (b"a b 0.5 1\n" + os.urandom(16).hex().encode() * 100_000, "longer than 1,048,576 bytes"),
    ],
)
def test_names_that_are_not_utf8_and_lines_without_end_are_refused(tmp_path, content, message):
    path = tmp_path / "scores.txt"
    path.write_bytes(content)
    refused(path, message)


@pytest.mark.parametrize(
    ("lines", "trials", "message"),
    [
        (["a1 b1 0.5"], None, r"trials\.txt, line 2: the trial 'a1' 'b2' has no score"),
        (
            ["a1 b1 0.5", "z b 0.3", "a1 b2 0.1"],
            None,
            r"scores\.txt, line 2: the pair 'z' 'b' is not in",
        ),
        (["a1 b2 0.5 1", "a1 b1 0.25 1"], None, r"trials\.txt, line 2 and .*scores\.txt, line 1"),
        (["a1 b1 0.5"], ["a1 b1"], "has labels"),
        (["0.5 target"], None, "has no names"),
    ],
)
def test_scores_that_do_not_join_a_trial_list(tmp_path, lines, trials, message):
    path = written(tmp_path / "scores.txt", lines)
    listed = read_trials(written(tmp_path / "trials.txt", trials or ["1 a1 b1", "0 a1 b2"]))
    with pytest.raises(DataError, match=message):
        read_scores(path, trials=listed)
    if len(lines) == 3:
        assert read_scores(path, trials=listed, ignore_extra=True).scores.tolist() == [0.5, 0.1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"genuine": [0.5], "impostor": [0.1, np.nan]}, r"impostor\[1\]: the score is NaN"),
        ({"scores": [0.5, np.nan], "labels": [1, 0]}, r"scores\[1\]: the score is NaN"),
        ({"scores": [0.5, 0.1], "labels": [1, 2]}, "row 1: the label 2"),
        ({"scores": [0.5, 0.1], "labels": [1]}, r"label has the shape \(1,\)"),
        ({"scores": [[0.5, 0.1]], "labels": [[1, 0]]}, "2 dimensions"),
        ({"scores": ["a"], "labels": [1]}, "one dimension of numbers"),
        ({"numbers": [0.5]}, "arrays numbers"),
        ({"scores": [0.5], "score": [0.5]}, "two arrays for 'score'"),
        ({"scores": [0.5], "labels": [1], "enrol": ["a"]}, "has enrol only"),
        (
            {"scores": [0.5, 0.6], "labels": [1, 0], "enrol": ["a", "a"], "test": ["b", "b"]},
            "row 1: the trial 'a' 'b' is also in .*row 0",
        ),
        ({"scores": np.array([None]), "labels": [1]}, "not an NPZ file of plain arrays"),
    ],
)
def test_bad_npz(tmp_path, arrays, message):
    path = tmp_path / "scores.npz"
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    refused(path, message)


@pytest.mark.parametrize(
    "lines",
    [
        ("a b target", "a c nontarget"),
        ("1 a b", "0 a c"),
        ("a b 1", "a c 0"),
        ("test,enrol,label", "b,a,same", "c,a,different"),
    ],
)
def test_orders_are_found_out(tmp_path, lines):
    trials = read_trials(written(tmp_path / "t.txt", lines))
    assert [trials.keys.trial(row) for row in range(len(trials))] == [("a", "b"), ("a", "c")]
    assert trials.is_genuine.tolist() == [True, False]
    unlabelled = read_trials(written(tmp_path / "t.txt", ["a b"]))
    assert (unlabelled.is_genuine, unlabelled.trials_sha256()) == (None, None)


def test_numbered_templates_are_told_from_labels(tmp_path):
    """IJB lists ``template template label``; the first template may be number 1 for long."""
    path = written(tmp_path / "t.txt", ["1 5 0", "1 7 1", "2 5 1"])
    assert read_trials(path).keys.trial(2) == ("2", "5")
    with pytest.raises(DataError, match="enrol-test-label or as label-enrol-test"):
        read_trials(written(path, ["1 5 0", "0 7 1"]))
    assert read_trials(path, format="label-enrol-test").keys.trial(0) == ("5", "0")


def test_one_subject_column_is_not_enough(tmp_path):
    path = written(tmp_path / "t.csv", ["enrol,test,label,enrol_subject", "a,b,1,ann"])
    with pytest.raises(DataError, match=r"line 2: .* enrol_subject only"):
        read_trials(path)


@pytest.mark.parametrize("labels", ["10", "01"])
def test_a_pair_with_both_labels_is_refused(tmp_path, labels):
    path = written(tmp_path / "t.txt", ["x y 0", f"a b {labels[0]}", f"b a {labels[1]}"])
    with pytest.raises(DataError, match=r"line 3: the trial 'b' 'a' is .*line 2"):
        read_trials(path)


def test_pairs_in_both_orders_and_self_pairs_are_counted(tmp_path):
    path = written(tmp_path / "t.txt", ["x y 0", "a b 1", "b a 1", "a a 1", "y x 0"])
    assert read_trials(path).pair_counts == (2, 1)


NAMES = st.sampled_from(["a", "b", "c", "aa", "ä"])
PAIRS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=20)


def keys_of(pairs):
    return TrialKeys.from_names([e for e, _ in pairs], [t for _, t in pairs])


@given(PAIRS, st.data())
def test_names_come_back_sorted_and_in_use(pairs, data):
    keys = keys_of(pairs)
    assert [keys.trial(row) for row in range(len(keys))] == pairs
    assert list(keys.names) == sorted({name for pair in pairs for name in pair})
    order = np.argsort(keys.pairs(), kind="stable")
    assert [pairs[row] for row in order] == sorted(pairs)
    rows = data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=5))
    taken = keys.take(np.array(rows, dtype=np.int64))
    assert [taken.trial(row) for row in range(len(rows))] == [pairs[row] for row in rows]


@given(PAIRS)
def test_the_earliest_repetition_is_found(pairs):
    expected = next(
        ((row, pairs.index(pair)) for row, pair in enumerate(pairs) if pair in pairs[:row]), None
    )
    earlier, later = repeated_rows(keys_of(pairs).pairs())
    assert min(zip(later, earlier, strict=True), default=None) == expected


@given(PAIRS, PAIRS)
def test_rows_match_as_a_search_would_find_them(wanted, given_pairs):
    given_pairs = list(dict.fromkeys(given_pairs))
    expected = [given_pairs.index(pair) if pair in given_pairs else -1 for pair in wanted]
    assert match_rows(keys_of(wanted), keys_of(given_pairs)).tolist() == expected


def scored(tmp_path, *lines):
    return read_scores(written(tmp_path / "s.txt", lines))


def sides(subjects):
    return [subjects.trial(row) for row in range(len(subjects))]


PATHS = ("ann/1 ann/2 .5 1", "ann/1 bob/1 .1 0")


@pytest.mark.parametrize("how", ["auto", "path"])
@pytest.mark.parametrize("root", ["", "/", "test/", "/data/wav/"])
def test_folders_that_agree_with_the_labels_are_subjects(tmp_path, how, root):
    lines = [line.replace("ann", f"{root}ann").replace("bob", f"{root}bob") for line in PATHS]
    subjects = find_subjects(scored(tmp_path, *lines), how)
    assert sides(subjects) == [("ann", "ann"), ("ann", "bob")]
    assert not subjects.are_files
    files = find_subjects(scored(tmp_path, *PATHS), "none")
    assert sides(files) == [("ann/1", "ann/2"), ("ann/1", "bob/1")]


@pytest.mark.parametrize(
    "lines",
    [
        ("wav/1 wav/2 .5 1", "wav/1 wav/3 .1 0"),  # one folder for all
        ("x/1 y/2 .5 1", "x/1 z/3 .1 0"),  # a folder per video
        ("ann/1 ann2 .5 1", "ann/1 bob/3 .1 0"),  # a name without a folder
        ("wav/ann/1 wav/ann/2 .5 1", "wav/ann/1 wav/3 .1 0"),  # a name without one of its own
    ],
)
def test_folders_that_contradict_a_label_are_not(tmp_path, lines):
    score_set = scored(tmp_path, *lines)
    assert find_subjects(score_set).are_files
    with pytest.raises(DataError, match=r"s\.txt, line|has no folder"):
        find_subjects(score_set, "path")


def test_columns_go_before_folders_and_a_file_before_columns(tmp_path):
    header, lines = "enrol,test,score,label,subject1,subject2", ["x/1,y/2,.5,1,zoe,zoe"]
    path = written(tmp_path / "s.csv", [header, *lines, "x/1,x/3,.1,0,zoe,ann"])
    score_set = read_scores(path)
    subjects = find_subjects(score_set)
    assert sides(subjects) == [("zoe", "zoe"), ("zoe", "ann")]
    assert subjects.names == ("ann", "zoe")
    mapping = {"x/1": "q", "y/2": "q", "x/3": "p"}
    assert sides(find_subjects(score_set, mapping=mapping)) == [("q", "q"), ("q", "p")]
    for bad, message in (
        ({"x/1": "q", "y/2": "q"}, "line 3: 'x/3' has no subject"),
        (dict.fromkeys(mapping, "q"), "line 3: the trial is impostor.*'q' and 'q'"),
        ({key: key for key in mapping}, "line 2: the trial is genuine.*'x/1' and 'y/2'"),
    ):
        with pytest.raises(DataError, match=message):
            find_subjects(score_set, mapping=bad)
    with pytest.raises(DataError, match=r"s\.txt, line 2: the trial is impostor"):
        find_subjects(scored(tmp_path, "a b .5 1", "c c .1 0"))


@pytest.mark.parametrize(
    "content", ["subject,group\na,x\nb,y\n", "a,x\nb,y\n", "a x\n\nb y\na x\n", "a\tx\nb\ty\n"]
)
def test_mappings(tmp_path, content):
    path = tmp_path / "groups.csv"
    path.write_text(content)
    mapping, source = read_mapping(path, role="groups")
    assert (mapping, source.role) == ({"a": "x", "b": "y"}, "groups")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("subject,group\n", "is empty"),
        ("a,x\nb\n", "line 2: 'b'"),
        ("a,x\nb,\n", "line 2: 'b,'"),
        ("a,x\na,y\n", "line 2: 'a' is 'y', but was 'x'"),
    ],
)
def test_bad_mappings(tmp_path, content, message):
    path = tmp_path / "groups.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_mapping(path, role="groups")


@pytest.mark.parametrize("chunk", [64, 1 << 22])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("has_last_end", [True, False])
def test_numbers_are_those_of_the_lines(tmp_path, chunk, end, has_last_end, monkeypatch):
    monkeypatch.setattr(integers, "_CHUNK_BYTES", chunk)
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 10 ** rng.integers(1, 18, (300, 3)))
    lines = [
        f"{'  ' if i % 7 == 0 else ''}{a} \t{b:05d} {c}{' ' if i % 5 == 0 else ''}"
        for i, (a, b, c) in enumerate(numbers.tolist())
    ]
    lines[20:20] = ["", "   "]
    path, calls = tmp_path / "n.txt", []
    content = (end.join(lines) + (end if has_last_end else "")).encode()
    path.write_bytes(content)
    found, sha256 = read_integers(path, 3, progress=lambda *done: calls.append(done))
    np.testing.assert_array_equal(found, numbers)
    assert found.dtype == np.int64
    assert sha256 == hashlib.sha256(content).hexdigest()
    assert calls[-1] == (len(content), len(content))


@pytest.mark.parametrize(
    "line", ["1 2", "1 2 3 4", "1 2 -3", "1 2 x", "1 2.0 3", "1 2 1234567890123456789", "<html>"]
)
@pytest.mark.parametrize("chunk", [32, 1 << 22])
def test_another_line_is_named(tmp_path, line, chunk, monkeypatch):
    monkeypatch.setattr(integers, "_CHUNK_BYTES", chunk)
    path = tmp_path / "n.txt"
    path.write_text("10 20 0\n" * 11 + line + "\n" + "10 20 1\n" * 5)
    with pytest.raises(DataError, match=f"line 12: '{line}'"):
        read_integers(path, 3)


@pytest.mark.parametrize(("text", "message"), [("\n \n", "is empty"), ("1 " * 1000, "too long")])
def test_empty_and_endless_files(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(integers, "_CHUNK_BYTES", 32)
    (tmp_path / "n.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        read_integers(tmp_path / "n.txt", 3)
