"""Score files in every order and format give the same trials."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from qmargin.errors import ConfigError
from qmargin.evaluation import columns as columns_module
from qmargin.evaluation.score_files import ScoreSet, read_scores
from qmargin.evaluation.trials import read_trials

TRIALS = [  # enrol, test, score, label
    ("ann/1", "ann/2", 0.75, True),
    ("ann/1", "bob/1", -0.125, False),
    ("bob/1", "ann/1", 1e-7, False),
    ("bob/1", "bob/2", float("inf"), True),
    ("cät/1", "bob/2", float("-inf"), False),
]


def as_rows(score_set: ScoreSet) -> list[tuple[str, str, float, bool]]:
    assert score_set.keys is not None
    return [
        (*score_set.keys.trial(row), float(score_set.scores[row]), bool(score_set.is_genuine[row]))
        for row in range(len(score_set))
    ]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("0", "1"),
        ("nontarget", "target"),
        ("False", "True"),
        ("DIFFERENT", "same"),
        ("impostor", "genuine"),
    ],
)
@pytest.mark.parametrize("separator", [" ", "\t", "  \t "])
@pytest.mark.parametrize("order", ["ets" + "l", "etls"])
def test_headerless_orders_are_found_out(
    tmp_path: Path, order: str, separator: str, words: tuple[str, str]
) -> None:
    lines = []
    for enrol, test, score, label in TRIALS:
        cells = {"e": enrol, "t": test, "s": repr(score), "l": words[label]}
        lines.append(separator.join(cells[letter] for letter in order))
    path = written(tmp_path / "scores.txt", lines)
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
def test_headers_in_any_order(tmp_path: Path, header: str, order: str, separator: str) -> None:
    lines = [header]
    for enrol, test, score, label in TRIALS:
        cells = {"e": enrol, "t": test, "s": repr(score), "l": str(int(label))}
        lines.append(separator.join(cells[letter] for letter in order))
    assert as_rows(read_scores(written(tmp_path / "scores.csv", lines))) == TRIALS


def test_csv_with_quotes_spaces_marks_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    content = (
        "\ufeffscore, label, enrol, test, comment\r\n"
        '0.5, 1, "Smith, John", "a ""b""", kept\r\n'
        "\r\n"
        "0.25, 0, x, y,\r\n"
    )
    path.write_bytes(content.encode("utf-8"))
    assert as_rows(read_scores(path)) == [
        ("Smith, John", 'a "b"', 0.5, True),
        ("x", "y", 0.25, False),
    ]


def test_a_file_without_a_last_line_end_and_with_small_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"a{i} b{i} {i / 7!r} {i % 2}" for i in range(200)]
    path = tmp_path / "scores.txt"
    path.write_text("\n".join(lines))
    whole = read_scores(path)
    monkeypatch.setattr(columns_module, "_CHUNK_BYTES", 64)
    assert as_rows(read_scores(path)) == as_rows(whole)
    assert whole.scores.tolist() == [i / 7 for i in range(200)]
    assert whole.sources[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "scores.txt", ["a b 0.5 1", "a c 0.1 0"])
    calls: list[tuple[int, int]] = []
    read_scores(path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)


def test_scores_without_names(tmp_path: Path) -> None:
    score_set = read_scores(written(tmp_path / "scores.txt", ["0.5 target", "0.1 nontarget"]))
    assert score_set.keys is None
    assert score_set.trials_sha256() is None
    assert score_set.scores.tolist() == [0.5, 0.1]


def test_two_readings_are_refused_and_a_format_decides(tmp_path: Path) -> None:
    path = written(tmp_path / "scores.txt", ["a b 0 1", "a c 1 1"])
    with pytest.raises(ValueError, match="enrol-test-score-label or as enrol-test-label-score"):
        read_scores(path)
    assert read_scores(path, format="enrol-test-score-label").scores.tolist() == [0.0, 1.0]
    assert read_scores(path, format="enrol-test-label-score").scores.tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match="format 'kaldi' is not known"):
        read_scores(path, format="kaldi")


def test_one_line_decides_between_two_readings(tmp_path: Path) -> None:
    path = written(tmp_path / "scores.txt", ["a b 0 1", "a c 1 1", "a d 0.5 0"])
    assert read_scores(path).is_genuine.tolist() == [True, True, False]


@pytest.mark.parametrize("labels", ["kaldi", "voxceleb"])
def test_scores_join_a_trial_list_in_another_order(tmp_path: Path, labels: str) -> None:
    shuffled = [TRIALS[i] for i in (3, 0, 4, 1, 2)]
    scores = written(tmp_path / "s.txt", [f"{e} {t} {s!r}" for e, t, s, _ in shuffled])
    lines = [
        f"{e} {t} {'target' if label else 'nontarget'}"
        if labels == "kaldi"
        else f"{int(label)} {e} {t}"
        for e, t, _, label in TRIALS
    ]
    trials = read_trials(written(tmp_path / "trials.txt", lines))
    assert trials.is_genuine is not None
    joined = read_scores(scores, trials=trials)
    assert as_rows(joined) == TRIALS
    assert [source.role for source in joined.sources] == ["scores", "trials"]


def test_the_hash_of_trials_ignores_order_and_scores_but_not_labels(tmp_path: Path) -> None:
    def hash_of(trials: list[tuple[str, str, float, bool]]) -> str | None:
        lines = ["enrol,test,score,label", *(f"{e},{t},{s},{int(b)}" for e, t, s, b in trials)]
        return read_scores(written(tmp_path / "scores.csv", lines)).trials_sha256()

    reference = hash_of(TRIALS)
    assert hash_of(TRIALS[::-1]) == reference
    assert hash_of([(e, t, 0.0, b) for e, t, _, b in TRIALS]) == reference
    assert hash_of([(e, t, s, not b) for e, t, s, b in TRIALS]) != reference
    assert hash_of([(t, e, s, b) for e, t, s, b in TRIALS]) != reference
    assert hash_of(TRIALS[:-1]) != reference


def test_npz_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, genuine=np.array([0.5, 0.75], np.float32), impostor=np.array([0, 1]))
    two = read_scores(path)
    assert two.scores.tolist() == [0.5, 0.75, 0.0, 1.0]
    assert two.is_genuine.tolist() == [True, True, False, False]
    columns = list(zip(*TRIALS, strict=True))
    for labels in (
        np.array(columns[3]),
        np.array(columns[3], dtype=np.int8),
        np.array(columns[3], dtype=np.float32),
        np.array(["target" if label else "nontarget" for label in columns[3]]),
    ):
        np.savez(path, scores=columns[2], labels=labels, enrol=columns[0], test=columns[1])
        assert as_rows(read_scores(path)) == TRIALS


def test_subject_columns_are_kept(tmp_path: Path) -> None:
    lines = ["enrol,test,score,label,enrol_subject,test_subject", "1,2,.5,1,ann,ann"]
    subjects = read_scores(written(tmp_path / "s.csv", [*lines, "1,3,.1,0,ann,bob"])).subjects
    assert subjects is not None
    assert [subjects.names[code] for code in subjects.test] == ["ann", "bob"]
