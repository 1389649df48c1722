"""Scores follow the definition, do not depend on blocks, and survive a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from helpers.speakers import make_speakers
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.evaluation.embeddings import Embeddings, read_embeddings
from qmargin.evaluation.result import Source
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.scoring import CohortNorm, score_trials
from qmargin.evaluation.trials import read_trials
from qmargin.metrics.normalise import as_norm


@pytest.fixture
def speakers():
    return make_speakers()


@pytest.fixture
def inputs(tmp_path, speakers):
    embeddings = read_embeddings(speakers.write_embeddings(tmp_path / "e.npz"))
    return embeddings, read_trials(speakers.write_trials(tmp_path / "t.txt"))


def cohort_of(matrix):
    keys = tuple(f"c{row}" for row in range(len(matrix)))
    return Embeddings(keys, matrix, Source("cohort.npz", "0" * 64, "cohort"))


def test_scores_are_the_cosines(tmp_path, speakers, inputs):
    path = score_trials(*inputs, out=tmp_path / "s.tsv")
    score_set = read_scores(path)
    expected = [speakers.plain_score(row) for row in range(len(score_set))]
    np.testing.assert_allclose(score_set.scores, expected, rtol=0, atol=4e-16)
    assert score_set.is_genuine.tolist() == [bool(label) for label in speakers.labels]
    assert score_set.trials_sha256() == inputs[1].trials_sha256()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["e.npz", "s.tsv", "t.txt"]


@pytest.mark.parametrize("block", [17, 100_000])
@pytest.mark.parametrize("has_norm", [False, True])
def test_blocks_do_not_change_a_byte(tmp_path, inputs, block, has_norm):
    norm = None
    if has_norm:
        norm = CohortNorm(cohort_of(np.random.default_rng(0).normal(size=(40, 8))), top_n=10)
    first = score_trials(*inputs, out=tmp_path / "a.tsv", norm=norm)
    second = score_trials(*inputs, out=tmp_path / "b.tsv", norm=norm, block=block)
    assert first.read_bytes() == second.read_bytes()


def test_as_norm_agrees_with_the_metric(tmp_path, inputs):
    embeddings, trials = inputs
    cohort = np.random.default_rng(0).normal(size=(40, 8))
    norm = CohortNorm(cohort_of(cohort), top_n=10)
    found = read_scores(score_trials(*inputs, out=tmp_path / "s.tsv", norm=norm)).scores

    def unit(matrix):
        matrix = matrix.astype(np.float64)
        return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)

    rows = [embeddings.keys.index(name) for name in trials.keys.names]
    names = unit(embeddings.matrix[rows])
    cosines = np.array(
        [names[a] @ names[b] for a, b in zip(trials.keys.enrol, trials.keys.test, strict=True)]
    )
    to_cohort = names @ unit(cohort).T
    expected = as_norm(
        cosines,
        to_cohort,
        to_cohort,
        top_n=10,
        enrol_index=trials.keys.enrol,
        test_index=trials.keys.test,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_centering_is_a_subtraction_of_the_mean(tmp_path, inputs):
    embeddings, trials = inputs
    others = cohort_of(np.random.default_rng(1).normal(size=(30, 8)) + 0.5)
    centred = replace(embeddings, matrix=embeddings.matrix.astype(float) - others.matrix.mean(0))
    plain = read_scores(score_trials(centred, trials, out=tmp_path / "a.tsv")).scores
    found = read_scores(score_trials(*inputs, out=tmp_path / "b.tsv", center=others)).scores
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-15)


def test_very_small_and_large_embeddings_have_directions(tmp_path, inputs):
    embeddings, trials = inputs
    scale = np.logspace(-200, 200, len(embeddings))[:, None]
    stretched = replace(embeddings, matrix=embeddings.matrix.astype(np.float64) * scale)
    plain = read_scores(score_trials(*inputs, out=tmp_path / "a.tsv")).scores
    found = read_scores(score_trials(stretched, trials, out=tmp_path / "b.tsv")).scores
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-14)


def test_bad_inputs_are_named(tmp_path, inputs):
    embeddings, trials = inputs
    out = tmp_path / "s.tsv"
    fewer = replace(embeddings, keys=("other", *embeddings.keys[1:]))
    zero = replace(embeddings, matrix=embeddings.matrix * (np.arange(48) != 5)[:, None])
    wide, same = cohort_of(np.ones((10, 9))), cohort_of(np.ones((10, 8)))
    for given, options, error, message in (
        (fewer, {}, DataError, r"t\.txt, line 1: 'id00/video/0\.wav' has no embedding"),
        (zero, {}, DataError, r"'id01/video/1\.wav' is zero"),
        (embeddings, {"norm": CohortNorm(wide, 5)}, ShapeError, r"cohort\.npz .*width 9"),
        (embeddings, {"center": wide}, ShapeError, "width 9"),
        (embeddings, {"norm": CohortNorm(same, 11)}, ConfigError, "top_n=11 is not from 2 to 10"),
        (embeddings, {"norm": CohortNorm(same, 10)}, DataError, "wider cohort"),
        (embeddings, {"block": 0}, ConfigError, "block=0"),
    ):
        with pytest.raises(error, match=message):
            score_trials(given, trials, out=out, **options)
    assert not out.exists()


class Stop(Exception):
    """What interrupts a run in these tests."""


def stop_after(num_trials):
    def progress(done, total):
        if done >= num_trials:
            raise Stop

    return progress


def test_an_interrupted_run_goes_on(tmp_path, inputs):
    whole = score_trials(*inputs, out=tmp_path / "a.tsv").read_bytes()
    out = tmp_path / "b.tsv"
    with pytest.raises(Stop):
        score_trials(*inputs, out=out, block=50, progress=stop_after(200))
    assert not out.exists()
    partial = tmp_path / "b.tsv.partial"
    with partial.open("ab") as file:
        file.write(b"half a li")  # written after the last record
    starts: list[int] = []
    score_trials(*inputs, out=out, block=70, progress=lambda done, total: starts.append(done))
    assert starts[0] == 270
    assert out.read_bytes() == whole
    assert not partial.exists()


def test_a_part_of_other_inputs_is_refused(tmp_path, inputs):
    embeddings, trials = inputs
    changed = embeddings.matrix.copy()
    changed[-1, -1] += 1.0
    other = replace(embeddings, matrix=changed)  # the same file name and hash, as with a .scp
    out = tmp_path / "s.tsv"
    with pytest.raises(Stop):
        score_trials(other, trials, out=out, block=50, progress=stop_after(50))
    with pytest.raises(DataError, match="written with other inputs or options: delete it or pass"):
        score_trials(*inputs, out=out)
    whole = score_trials(*inputs, out=tmp_path / "w.tsv").read_bytes()
    assert score_trials(*inputs, out=out, restart=True).read_bytes() == whole


@pytest.mark.parametrize("damage", ["flip", "cut", "record"])
def test_a_damaged_part_is_refused(tmp_path, inputs, damage):
    out = tmp_path / "s.tsv"
    with pytest.raises(Stop):
        score_trials(*inputs, out=out, block=50, progress=stop_after(100))
    partial, record = tmp_path / "s.tsv.partial", tmp_path / "s.tsv.progress"
    content = partial.read_bytes()
    if damage == "flip":
        partial.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    elif damage == "cut":
        partial.write_bytes(content[:-1])
    else:
        record.write_text(json.dumps({"num_done": "many"}))
    with pytest.raises(DataError, match=r"s\.tsv\.progress"):
        score_trials(*inputs, out=out)


def test_two_runs_cannot_share_a_file(tmp_path, inputs):
    out = tmp_path / "s.tsv"

    def second_run(done, total):
        with pytest.raises(DataError, match="being written by another run"):
            score_trials(*inputs, out=out)

    score_trials(*inputs, out=out, progress=second_run)


SLOW_RUN = """
import sys, time
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.scoring import score_trials
from qmargin.evaluation.trials import read_trials

def progress(done, total):
    print(done, flush=True)
    time.sleep(0.002)

embeddings, trials = read_embeddings(sys.argv[1]), read_trials(sys.argv[2])
score_trials(embeddings, trials, out=sys.argv[3], block=20, progress=progress)
"""


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, inputs):
    """kill -9 after a growing number of blocks, until a run gets to the end."""
    whole = score_trials(*inputs, out=tmp_path / "whole.tsv").read_bytes()
    out = tmp_path / "s.tsv"
    command = [sys.executable, "-c", SLOW_RUN, str(tmp_path / "e.npz"), str(tmp_path / "t.txt")]
    firsts = []
    for turn in range(20):
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.PIPE, text=True)
        if line := process.stdout.readline():  # nothing when only the renaming was left
            firsts.append(int(line))
        for _ in range(16):
            process.stdout.readline()
        time.sleep(0.0007 * turn)  # another moment inside a block each time
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
        if out.exists():
            break
    assert out.read_bytes() == whole
    assert len(firsts) > 2
    assert firsts == sorted(set(firsts))  # every run began after what the last one had done
