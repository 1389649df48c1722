"""Experiments as YAML files: own pictures and recordings, and what is refused before training."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from helpers.pictures import jpeg, write_folder
from helpers.recordings import speaker_folders
from qmargin.cli.main import main
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import read_result
from qmargin.experiments.experiment import from_mapping, read_experiment
from qmargin.experiments.measure import identities_for, num_pairs
from qmargin.experiments.runner import run_experiment
from qmargin.experiments.worlds import Drawn, Made, Stored
from qmargin.metrics.operating import sufficiency
from qmargin.report.systems import Primary

FACES = {
    "name": "my-faces",
    "recipe": "faces_r18",
    "set": {
        "model.backbone": "small_conv",
        "model.embedding_dim": 16,
        "data": {"batch_size": 8, "num_workers": 0},
        "data.options.size": 16,
        "run.epochs": 1,
        "schedule": {"warmup_epochs": 0, "kind": "cosine", "milestones": []},
    },
    "data": {"train": "train", "test": "test", "validation": 0.3},
    "arms": {
        "cosface": {"scale": [8, 16], "margin": 0.2},
        "q_margin": {"alpha": 1.25, "scale": 16, "margin": 0.2},
    },
    "seeds": 1,
    "protocol": {"kind": "all-pairs", "far": [0.1], "replicates": 20},
}
VOICES = {
    "name": "voices",
    "recipe": "audiomnist_r34_arcface",
    "set": {
        "run": {"epochs": 1, "max_steps": 2},
        "data": {"batch_size": 8, "num_workers": 0},
        "data.options.num_frames": 40,
        "model.embedding_dim": 16,
        "schedule.warmup_epochs": 0,
        "margin_schedule": None,
    },
    "data": {"train": "train", "test": "test", "validation": 0.4},
    "arms": {"arcface": {"scale": [8, 16]}},
    "seeds": 1,
    "protocol": {"far": 0.1, "replicates": 20},
}


def faces(folder: Path, **people: int) -> None:
    """Four pictures of each of some people, who are others in each folder."""
    for place, (part, count) in enumerate(people.items()):
        labels = [100 * place + person for person in range(count) for _ in range(4)]
        write_folder(folder / part, [jpeg(number) for number in range(4 * count)], labels)


def voices(folder: Path, *, trials: bool) -> dict[str, Any]:
    """Speakers in folders, and an experiment with them."""
    for part, count in (("train", 6), ("test", 4)):
        speaker_folders(folder / part, speakers=count, each=3)
        for path in (folder / part).iterdir():
            path.rename(path.with_name(f"{part}-{path.name}"))
    if not trials:
        return VOICES
    names = sorted(str(path.relative_to(folder)) for path in (folder / "test").rglob("*.wav"))
    pairs = itertools.combinations(names, 2)
    lines = [f"{int(a.split('/')[1] == b.split('/')[1])} {a} {b}\n" for a, b in pairs]
    (folder / "trials.txt").write_text("".join(lines))
    return {**VOICES, "data": {**VOICES["data"], "trials": "trials.txt"}}


def write(folder: Path, content: Any) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def test_losses_are_compared_on_own_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faces(tmp_path, train=8, test=4)
    next((tmp_path / "test").rglob("*.jpg")).write_bytes(b"junk")
    path, out, page = write(tmp_path, FACES), tmp_path / "out", tmp_path / "page.md"
    words = ["compare", str(path), f"--out={out}", "--devices", "cpu", f"--page={page}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "CosFace" in said and "Q-Margin" in said and "index.html" in said
    results = [read_result(path) for path in sorted(out.glob("runs/*/result.json"))]
    assert [result.run.arm for result in results if result.run] == ["cosface", "q_margin"]
    assert results[0].protocol.num_genuine == 3 * 6 + 3  # one picture cannot be read
    assert any("1 samples" in note for note in results[0].notes)
    assert results[0].run is not None and results[0].run.num_classes == 8
    assert len(list(out.glob("search/*/result.json"))) == 2
    text = page.read_text(encoding="utf-8")
    assert "| chosen |" in text and "holds out" in text
    assert str(tmp_path) not in (out / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("trials", [False, True])
def test_losses_are_compared_on_own_recordings(tmp_path: Path, trials: bool) -> None:
    experiment = read_experiment(write(tmp_path, voices(tmp_path, trials=trials)))
    (result,) = run_experiment(experiment, tmp_path / "out", devices=["cpu"])
    assert result.protocol.num_genuine == 4 * 3 and result.protocol.num_trials == 12 * 11 // 2
    assert result.protocol.kind == ("trials" if trials else "all-pairs")
    assert len(list(tmp_path.glob("out/search/*/result.json"))) == 2


def test_sections_of_a_file() -> None:
    content = {
        "recipe": "debug",
        "set": {"loss": {"scale": 8}, "run.epochs": 2},
        "arms": {
            "entmax": {"seeds": 4},
            "wide": {"title": "Wide", "loss": {"preset": "q_margin", "scale": "8:64:log"}},
            "same": {"like": "wide", "head.path": "dense"},
        },
        "seeds": [3, 5],
        "question": "Which?",
        "expected": "The first.",
        "search": {
            "method": "random",
            "points": 4,
            "seeds": 2,
            "finalist_seeds": [7],
            "set": {"run.epochs": 1},
        },
        "protocol": {"far": ["1e-2", 1.0e-3]},
        "data": {"num_test": 20},
    }
    experiment = from_mapping(content)
    assert experiment.recipe.loss.scale == 8.0 and experiment.seeds == (3, 5)
    assert experiment.arms["entmax"].settings == ("loss.preset=entmax_face",)
    assert experiment.seeds_of("entmax") == (0, 1, 2, 3) and experiment.seeds_of("same") == (3, 5)
    assert (experiment.question, experiment.expected) == ("Which?", "The first.")
    assert experiment.arms["wide"].title == "Wide" and experiment.arms["same"].like == "wide"
    assert set(experiment.searched) == {"wide"}
    search = experiment.search
    assert (search.seeds, search.finalist_seeds, search.num_points) == ((1000, 1001), (7,), 4)
    assert search.settings == ("run.epochs=1",)
    assert experiment.protocol.fars == (0.01, 0.001) and experiment.world == Made(num_test=20)
    assert from_mapping({**content, "data": None}).world == Made()
    drawn = from_mapping({**content, "data": {"pictures": "x.npz"}}, Path("/folder")).world
    assert isinstance(drawn, Drawn) and drawn.path == "/folder/x.npz"
    data = {"train": "a", "test": "b", "validation": "c"}
    stored = from_mapping({**FACES, "data": data}, Path("/f")).world
    assert stored == Stored("/f/a", "/f/b", ("data.path=/f/c",))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"margin": {"cosine": 0.2}}, [("cosine", 0.2)]),
        ({"loss.margin": {"angular": {"margin": 0.3, "gradient": "exact"}}}, [("angular", 0.3)]),
        (
            {"loss": {"margin": [{"prior": 0.1}, {"cosine": 0.2}]}},
            [("prior", 0.1), ("cosine", 0.2)],
        ),
        ({"loss.divergence": {"alpha": 1.5}, "margin": {"prior": 0.1}}, [("prior", 0.1)]),
    ],
)
def test_an_arm_takes_a_loss_as_recipes_write_it(
    values: dict[str, Any], expected: list[tuple[str, float]]
) -> None:
    experiment = from_mapping({"recipe": "debug", "arms": {"mine": {**values, "scale": [8, 16]}}})
    assert list(experiment.arm_recipe("mine").loss.margins) == expected
    assert [axis.key for axis in experiment.arms["mine"].axes] == ["loss.scale"]


def test_the_primary_comparison_is_known_before_any_result() -> None:
    arms: dict[str, Any] = dict.fromkeys(("arcface", "cosface", "entmax", "q_margin"))
    made = from_mapping({"recipe": "debug", "arms": arms})
    assert made.comparison == Primary("q_margin", ("cosface", "arcface"), 1e-4)
    assert made.with_arms(["entmax", "q_margin"]).comparison == Primary(
        "q_margin", ("entmax",), 1e-4
    )
    assert made.with_arms(["entmax", "cosface"]).comparison == Primary("entmax", ("cosface",), 1e-4)
    assert made.with_arms(["entmax"]).comparison is None
    said = {"focus": "entmax", "rivals": ["arcface", "cosface"], "far": 1e-3}
    made = from_mapping({"recipe": "debug", "arms": arms, "primary": said})
    assert made.comparison == Primary("entmax", ("arcface", "cosface"), 1e-3)
    fewer = made.with_arms(["cosface", "entmax"])
    assert fewer.comparison == Primary("entmax", ("cosface",), 1e-3)
    assert made.with_arms(["cosface", "arcface"]).primary is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {}}, "did you mean 'arms'"),
        ({"recipe": "faces_r19_arcface"}, "did you mean 'faces_r18_arcface"),
        ({"arms": {}}, "arms is empty"),
        ({"arms": {"cosfase": None}}, "did you mean 'cosface'"),
        ({"arms": {"cosfase": {"scale": [8, 16]}}}, "arms.cosfase: .*did you mean 'cosface'"),
        ({"arms": {"cosface": {3: 3}}}, "arms.cosface: 3 is unknown"),
        ({"arms": {"cosface": {"scal": 3}}}, "arms.cosface: scal .*'scale'"),
        ({"arms": {"cosface": {"scale": [8, 8]}}}, "scale has the value 8 twice"),
        ({"arms": {"cosface": {"scale": [8, "x"]}}}, "scale is 'x'"),
        ({"arms": {"a/b": {"loss.scale": 3}}}, "an arm is named 'a/b'"),
        ({"arms": {"cosface": 3}}, "arms.cosface is 3"),
        ({"arms": {"mine": {"like": "cosface"}}}, "add cosface"),
        (
            {"arms": {"multiplied": {"loss.scale": [8, 16]}}},
            "arms.multiplied: it has no margin of this name",
        ),
        (
            {"arms": {"jensen_shannon": {"loss.scale": 8}}},
            "arms.jensen_shannon: it has no divergence of this name",
        ),
        ({"arms": {"mine": {"margin": {"angle": 0.1}}}}, "loss.margin is 'angle'.*'angular'"),
        ({"set": {"run.epoch": 3}}, "did you mean 'epochs'"),
        ({"set": 3}, "set is 3"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": [1, 1]}, r"seeds are \[1, 1\]"),
        ({"protocol": {"kind": "pairs"}}, "did you mean 'all-pairs'"),
        ({"protocol": {"far": [2.0]}}, "protocol.far has 2"),
        ({"protocol": {"far": "x"}}, r"protocol.fars\[0\] is 'x'"),
        ({"protocol": {"kind": "trials"}}, "data.trials is None"),
        ({"protocol": {"fars": 0.1}}, "did you mean 'far'"),
        ({"primary": 3}, "primary is 3"),
        ({"primary": {"focus": "q_margin"}}, "primary.rivals is missing"),
        ({"primary": {"focus": "q_margin", "rival": "cosface"}}, "did you mean 'rivals'"),
        ({"primary": {"focus": "q_margn", "rivals": "cosface"}}, "did you mean 'q_margin'"),
        ({"primary": {"focus": "cosface", "rivals": "cosface"}}, "primary compares cosface with"),
        (
            {"primary": {"focus": "q_margin", "rivals": []}},
            "q_margin with nothing",
        ),
        (
            {"primary": {"focus": "q_margin", "rivals": "cosface", "far": 2}},
            "primary.far is 2; give a rate",
        ),
        (
            {"primary": {"focus": "q_margin", "rivals": "cosface"}},
            "primary.far is 0.0001 and protocol.far has 0.1; add it",
        ),
        ({"search": "optun"}, "did you mean 'optuna'"),
        ({"search": {"points": 0}}, "search.num_points is 0"),
        ({"search": {"points": "many"}}, "search.num_points is 'many'"),
        ({"data": {"train": "train", "tets": "x"}}, "did you mean 'test'"),
        ({"data": {"train": "train", "validation": 2}}, "data.validation is 2"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_experiment(write(tmp_path, {**FACES, **changes}))


def test_data_that_cannot_be_used_is_refused_before_training(tmp_path: Path) -> None:
    faces(tmp_path, train=8, test=4, one=1)
    both, plain = {"focus": "q_margin", "rivals": ["cosface"]}, {"replicates": 20}
    for changes, message in (
        ({"data": {"train": "train", "test": "train"}}, "identities are in .*such as 'person0'"),
        ({"data": {"train": "train", "test": "gone"}}, "data.test is .*gone"),
        (
            {"protocol": {"far": [1e-6]}},
            "FAR 1e-06 .* 96 impostor pairs of 4 identities.* about 355 identities of 4 samples, "
            "and the 30 of a reliable number 1,937 identities",
        ),
        ({"protocol": plain, "primary": both}, "FAR 0.0001 .* 96 impostor pairs of 4 identities"),
        (
            {"protocol": plain, "primary": {**both, "far": 1e-5}},
            "primary.far is 1e-05; name it in protocol.far",
        ),
        ({"data": {"train": "train", "test": "one"}}, "one has 1 identity; give at least 2"),
        ({"search": {"measure": "tar@1e-6"}}, "the measure is 'tar@1e-6'"),
    ):
        path, out = write(tmp_path, {**FACES, **changes}), tmp_path / "out"
        with pytest.raises((ConfigError, DataError), match=message):
            run_experiment(read_experiment(path), out, devices=["cpu"], say=lambda text: None)
        assert not out.exists()


def test_trials_that_cannot_be_used_are_refused_before_training(tmp_path: Path) -> None:
    content, out = voices(tmp_path, trials=True), tmp_path / "out"
    few = write(tmp_path, {**content, "protocol": {"far": 1e-3}})
    with pytest.raises(DataError, match=r"FAR 0.001 .* 54 impostor pairs.* 1,000 impostor pairs"):
        run_experiment(read_experiment(few), out)
    with (tmp_path / "trials.txt").open("a") as file:
        file.write("1 test/gone.wav test/gone.wav\n")
    with pytest.raises(DataError, match=r"test/gone\.wav: there is no such file"):
        run_experiment(read_experiment(write(tmp_path, content)), out)
    assert not out.exists()


@pytest.mark.parametrize("each", [1, 2, 4, 10])
@pytest.mark.parametrize("accepts", [1, 30])
def test_so_many_identities_resolve_a_far_and_fewer_do_not(each: int, accepts: int) -> None:
    for far in (0.3, 1e-2, 1e-3):
        count = identities_for(far, each, accepts)
        enough, fewer = (
            sufficiency(far, num_pairs(np.repeat(np.arange(n), each))[1]).allowed
            for n in (count, max(2, count - 1))
        )
        assert enough >= accepts and (fewer < accepts or count == 2)


@pytest.mark.parametrize("text", ["- a", "name: [", "a: 1\na: 2", "x" * 200_000])
def test_files_that_are_no_experiment_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        read_experiment(path)
