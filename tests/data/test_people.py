"""Portraits are functions of hashed numbers: the same everywhere, alone or among thousands."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from qmargin.data.images import decode_image
from qmargin.data.people import POPULATIONS, People
from qmargin.errors import ConfigError
from qmargin.evaluation.evaluate import EvaluationOptions
from qmargin.evaluation.protocols.all_pairs import measure_pairs
from qmargin.evaluation.result import read_result, write_result
from qmargin.experiments.measure import Embedded, pair_samples
from qmargin.experiments.worlds import Made
from qmargin.training.build import build_dataset
from qmargin.training.loop import train
from qmargin.training.recipe import DataPart, LossPart, ModelPart, OptimizerPart, Recipe, RunPart
from qmargin.training.signals import StopRequest

DIGESTS = {
    64: "93e4be0cd1abdd8e",
    112: "4f56a89e24ebc95d",
}


@pytest.mark.parametrize("size", DIGESTS)
def test_bytes_are_the_same_on_every_machine(size):
    people = People(10_000, 20, size=size, seed=1, count_spread=0.9)
    chosen = np.random.default_rng(0).integers(0, len(people), 100)
    drawn = people.images(chosen)
    assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == DIGESTS[size]
    alone = [people.images(chosen[row : row + 1])[0] for row in (0, 37, 99)]
    np.testing.assert_array_equal(alone, drawn[[0, 37, 99]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["people", "voices"])
def test_bytes_are_the_same_without_the_extensions_of_a_cpu(kind):
    """NumPy has code for each; products, sums and roots of all of them round alike."""
    umath = pytest.importorskip("numpy._core._multiarray_umath")
    found = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
    if not found:
        pytest.skip("this NumPy has no code for extensions of this CPU")
    drawn = {
        "people": "from qmargin.data.people import People as P; x = P(9, 9).images(np.arange(81))",
        "voices": "from qmargin.data.voices import Voices as V; x = V(2, 2).waveform(3)",
    }[kind]
    shown = "import hashlib; print(hashlib.sha256(x.tobytes()).hexdigest(), used)"
    used = "from numpy._core import _multiarray_umath as m; used = [*map(m.__cpu_features__.get, "
    code = f"import numpy as np; {used}{found})]; {drawn}; {shown}"
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"NPY_DISABLE_CPU_FEATURES": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split(maxsplit=1)
        for disabled in ("", " ".join(found))
    ]
    assert said[0][0] == said[1][0]
    assert "True" in said[0][1] and "True" not in said[1][1]


def test_samples_of_an_identity_are_more_alike_than_others():
    people = People(300, 6, difficulty=0.3)
    pictures = people.images(np.arange(len(people))).reshape(len(people), -1).astype(np.float32)
    pictures -= pictures.mean(1, keepdims=True)
    pictures /= np.linalg.norm(pictures, axis=1, keepdims=True)
    cosines, labels = pictures @ pictures.T, people.labels
    is_same = (labels[:, None] == labels) & ~np.eye(len(labels), dtype=bool)
    assert cosines[is_same].mean() > cosines[labels[:, None] != labels].mean() + 0.1


def test_families_twins_and_populations_have_their_shares():
    people = People(200_000, 20)
    labels = np.arange(people.num_classes)
    families, populations = people.families(labels), people.populations(labels)
    assert np.mean(families >= 0) == pytest.approx(0.1, abs=0.005)
    sizes = np.unique(families[families >= 0], return_counts=True)[1]
    assert set(sizes.tolist()) <= {1, 2, 3, 4}  # one where the data end inside a family
    shares = np.bincount(populations) / len(labels)
    np.testing.assert_allclose(shares, POPULATIONS, atol=0.005)
    relatives = np.flatnonzero(families[:-1] == families[1:])
    relatives = relatives[families[relatives] >= 0]
    assert bool((populations[relatives] == populations[relatives + 1]).all())


def test_relatives_look_alike():
    people = People(60_000, 1, difficulty=0.0)
    families = people.families(np.arange(people.num_classes))
    first = np.flatnonzero((families[:-1] == families[1:]) & (families[:-1] >= 0))[:300]
    pictures = [people.images(rows).astype(np.float64) for rows in (first, first + 1, first + 7)]
    near, far = (np.abs(pictures[0] - other).mean() for other in pictures[1:])
    assert near < 0.9 * far


def test_qualities_and_counts_follow_their_distributions():
    people = People(20_000, 20, count_spread=0.9)
    counts = np.bincount(people.labels)
    assert (counts.min(), counts.max() <= 200) == (3, True)
    assert counts.mean() == pytest.approx(20.0, rel=0.05)
    assert np.log(counts).std() == pytest.approx(0.85, abs=0.06)  # bounds narrow it a little
    assert len(people) == counts.sum()
    qualities = people.qualities(np.arange(20_000))
    assert stats.kstest(qualities, stats.beta(5, 2).cdf).pvalue > 1e-3
    places = people.places(np.array([0, counts[0] - 1, counts[0], len(people) - 1]))
    assert places[0].tolist() == [0, 0, 1, 19_999]
    assert places[1].tolist() == [0, counts[0] - 1, 0, counts[-1] - 1]


def test_poor_samples_have_half_the_quality_in_every_split():
    people, usual = People(400, 50, poor=0.3), People(400, 50)
    rows = np.arange(len(people))
    ratios = people.qualities(rows) / usual.qualities(rows)
    assert set(np.unique(ratios).tolist()) == {0.5, 1.0}
    assert np.mean(ratios == 0.5) == pytest.approx(0.3, abs=0.02)
    np.testing.assert_array_equal(people.identities(rows), usual.identities(rows))
    first = rows[:40]
    is_same = (people.images(first) == usual.images(first)).all(axis=(1, 2, 3))
    np.testing.assert_array_equal(is_same, ratios[first] == 1.0)
    tested = people.held_out("test", 50, 20)
    plain = usual.held_out("test", 50, 20)
    assert (tested.qualities(rows[:1000]) < plain.qualities(rows[:1000])).mean() > 0.2


@pytest.mark.parametrize("kind", ["flips", "outliers", "splits", "merges"])
def test_label_noise_has_its_share(kind):
    people, clean = People(4_000, 10, **{kind: 0.2}), People(4_000, 10)
    rows = np.arange(len(people))
    shown, meant = people.identities(rows), clean.identities(rows)
    is_wrong = (shown != meant).reshape(4_000, 10)
    if kind in ("flips", "outliers"):
        assert is_wrong.mean() == pytest.approx(0.2, abs=0.01)
    else:
        assert is_wrong.any(1).mean() == pytest.approx(0.1 if kind == "splits" else 0.2, abs=0.02)
    assert bool(np.isin(shown, meant).all()) == (kind in ("flips", "splits"))
    wrong = np.flatnonzero(is_wrong.ravel())[:1]
    assert not np.array_equal(people.images(wrong), clean.images(wrong))
    held_out = people.held_out("test", 100, 5)
    assert held_out == People(100, 5, split="test")
    assert not np.isin(held_out.identities(np.arange(500)), np.concatenate([shown, meant])).any()


def test_readings_are_moved_and_mirrored_by_their_seeds():
    people = People(5, 4, shift=2, mirror=True, in_memory=True)
    plain = people.images(np.arange(3)).transpose(0, 3, 1, 2) / np.float32(255.0)
    middle = 2 * 5 + 2  # of 5 x 5 places
    still, labels = people.read_many(np.arange(3), [middle] * 3)
    np.testing.assert_allclose(still, plain, rtol=1e-6)
    assert labels.tolist() == [0, 0, 0]
    turned, _ = people.read_many(np.arange(1), [(1 << 32) + (middle - (1 << 32)) % 25])
    np.testing.assert_allclose(turned[0, :, 8:56, 8:56], plain[0, :, 8:56, ::-1][:, :, 8:56])
    corner, _ = people.read_many(np.arange(1), [0])
    np.testing.assert_allclose(corner[0, :, 2:, 2:], plain[0, :, :-2, :-2], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"num_classes": 0}, "num_classes"),
        ({"num_classes": -3}, "num_classes"),
        ({"samples_per_class": 0}, "samples_per_class"),
        ({"size": 8}, "size"),
        ({"size": 66}, r"size is 66; it must be a multiple of 4.* 64 or 68"),
        ({"difficulty": -0.5}, "difficulty"),
        ({"outliers": 2.0}, "outliers"),
        ({"splits": -1.0}, "splits"),
        ({"flips": 0.1, "num_classes": 1}, "give 2 or more"),
        ({"split": "dev"}, "split"),
        ({"flips": 1.2}, "flips"),
        ({"merges": -0.1}, "merges"),
        ({"poor": 1.1}, "poor"),
        ({"flips": 0.6, "outliers": 0.6}, "flips"),
        ({"count_spread": -1.0}, "count_spread"),
        ({"shift": 64}, "shift"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, key):
    with pytest.raises(ConfigError, match=key):
        People(**{"num_classes": 10, "samples_per_class": 2, **given})


def test_labels_and_samples_that_there_are_not_are_refused():
    people = People(10, 2)
    for find in (people.families, people.populations):
        for label in (-1, 10):
            with pytest.raises(IndexError, match=r"a label is outside \[0, 10\)"):
                find(np.array([0, label]))
    for counts in ({}, {"count_spread": 0.9}):
        with pytest.raises(IndexError, match="outside"):
            People(10, 2, **counts).sample_id(1000)


def test_more_portraits_than_memory_are_refused_before_one_is_drawn():
    with pytest.raises(ConfigError, match=r"2,000,000 pictures take 22.9 GiB.* in_memory to false"):
        People(100_000, 20, in_memory=True).read(0, 0)


def test_a_written_folder_has_every_portrait(tmp_path):
    people = People(30, 2, size=32, count_spread=0.9, split="test")
    people.write(tmp_path / "faces")
    files = sorted(path.relative_to(tmp_path / "faces") for path in tmp_path.rglob("*.png"))
    names = [f"test-{people.sample_id(index)}" for index in range(len(people))]
    assert [str(file.with_suffix("")) for file in files] == sorted(names)
    for index in (0, len(people) - 1):
        written = decode_image((tmp_path / "faces" / f"{names[index]}.png").read_bytes())
        np.testing.assert_array_equal(written, people.images(np.array([index]))[0])


def test_a_recipe_trains_on_people(tmp_path):
    recipe = Recipe(
        "tiny",
        data=DataPart("people", 16, num_classes=8, options={"samples_per_class": 8, "size": 32}),
        model=ModelPart("small_conv", 16, {"width": 4}),
        loss=LossPart.from_preset("q_margin"),
        optimizer=OptimizerPart(lr=0.1),
        run=RunPart(epochs=2),
    )
    assert isinstance(build_dataset(recipe), People)
    world = Made(num_test=4, samples_test=3)
    assert world.measured(recipe, is_search=False) == People(4, 3, 32, split="test")
    with StopRequest() as request:
        world = world.prepare(tmp_path, [recipe], is_search=False, request=request)
    kept = world.train(recipe, is_search=False)
    np.testing.assert_array_equal(kept.read(63, 0)[0], People(8, 8, 32).read(63, 0)[0])
    outcome = train(recipe, tmp_path / "run", device="cpu")
    assert outcome.step == outcome.total_steps == 8 and np.isfinite(outcome.loss)


def test_lists_of_pairs_are_within_families_populations_and_qualities():
    people = People(3000, 2, split="test")
    rows = np.arange(0, 6000, 3)
    lists = people.pair_lists(rows)
    np.testing.assert_array_equal(lists["within a family"], people.families(rows // 2))
    np.testing.assert_array_equal(lists["within a population"], people.populations(rows // 2))
    quality = people.qualities(rows)
    for name, side in (("low", quality.argmin()), ("high", quality.argmax())):
        chosen = lists[f"both of {name} quality"]
        assert set(chosen.tolist()) == {0, -1} and chosen[side] == 0
        assert 0.2 < (chosen == 0).mean() < 0.3  # a quarter of Beta(5, 2)


def test_a_result_has_the_lists_of_people(tmp_path):
    dataset = People(120, 3, 32, split="test")
    embedded = Embedded(
        np.random.default_rng(0).normal(size=(360, 8)).astype(np.float32),
        dataset.labels,
        np.arange(360),
        0,
    )
    options = EvaluationOptions(fars=(0.1,), num_replicates=0)
    result = measure_pairs(pair_samples(embedded, dataset, "people"), options)
    write_result(tmp_path / "result.json", result)
    audit = read_result(tmp_path / "result.json").groups
    assert audit is not None and audit.far_target == 0.1
    rows = {row.group: row for row in audit.rows}
    families = dataset.families(np.arange(120))
    related = np.unique(families[families >= 0], return_counts=True)[1]
    assert rows["within a family"].num_impostors == 9 * (related * (related - 1) // 2).sum()
    assert rows["within a family"].num_genuine == 3 * related.sum()
    assert rows["within a population"].num_genuine == 360
    worlds = (People(2, 3, 32, seed=seed) for seed in range(100))
    few = next(one for one in worlds if one.families(np.arange(2)).max() < 0)  # no relatives
    part = Embedded(embedded.matrix[:6], few.labels, np.arange(6), 0)
    alone = measure_pairs(pair_samples(part, few, "people"), EvaluationOptions(fars=(0.5,)))
    assert alone.groups is not None
    row = alone.groups.rows[0]
    assert (row.fmr, row.status) == (None, "not measurable") and "no trials" in (row.note or "")
