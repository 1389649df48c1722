"""``python -m benchmarks sizes`` at a small size, and what is made of its file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import qmargin
from benchmarks import sizes, sizes_grid, sizes_page, timing
from benchmarks.sizes import (
    SIZES,
    Contender,
    Entrant,
    Size,
    SizesBenchmark,
    Stage,
    all_contenders,
    build_head,
    build_plain,
    find_sizes,
    measure_size,
    plain_arcface,
)
from benchmarks.sizes_page import (
    AUTO,
    CHUNKED,
    GOALS,
    LOOKS,
    PLAIN,
    README_SIZES,
    SPARSE,
    VERSION,
    auto_to_best,
    readme_block,
    render_page,
)
from helpers.commands import run_benchmark
from qmargin.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Size(300, 8, 4)
NAMES = [one.name for one in all_contenders() if not one.fewest_classes]
MILLIONS = [*NAMES[:-1], *sizes_page.GRADIENTS, NAMES[-1]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_TURNS", 1)
    monkeypatch.setattr(sizes, "WARM_CALLS", 2)
    monkeypatch.setattr(sizes_grid, "WARM_CALLS", 2)
    monkeypatch.setattr("gc.collect", lambda: 0)  # between sizes, for the memory of GPUs
    monkeypatch.setattr("torch.compile", lambda function, **options: function)
    monkeypatch.setattr("torch.compiler.reset", lambda: None)


def made_up(**changes: Any) -> dict[str, Any]:
    """A file as an H200 would write it; every number is made up."""
    record: dict[str, Any] = {
        "subject": "sizes",
        "version": VERSION,
        "command": "python -m benchmarks sizes --device cuda --json /tmp/out/sizes.json",
        "date": "2000-01-01",
        "settings": {"device": "cuda", "alpha": 1.25, "scale": 35.0, "margin": 0.2},
        "machine": {"device": "Made Up", "commit": "abc", "torch": "0.0", "python": "3"},
        "sizes": [],
    }
    for size in SIZES["cuda"]:
        rows = []
        is_large = size.classes >= sizes_page.LARGEST[0]
        for place, name in enumerate(MILLIONS if is_large else NAMES, 1):
            ms = (0.2 + 1e-9 * size.num_logits * size.dim / 64) * (1.0 + 0.3 * (place % 5))
            if size.classes > 2_100_000 and name.startswith("plain"):
                rows.append(timing.Row(name, failed="skipped: needs about | 200 GiB"))
                continue
            stats = {"path": "sparse", "reason": "few", "support_mean": 12.0}
            facts = {"single_ms": ms + 1.0, **({"stats": stats} if "auto" in name else {})}
            rows.append(timing.Row(name, "", ms, [ms], 2.0, ms / 2.0, 0.5, None, facts))
        found = {"classes": size.classes, "dim": size.dim, "rows": size.rows, "seconds": 1.0}
        record["sizes"].append({**found, "contenders": [row.as_dict() for row in rows]})
    return {**record, **changes}


def write(folder: Path, record: dict[str, Any]) -> Path:
    path = folder / "sizes.json"
    path.write_text(json.dumps(record))
    return path


def set_ms(record: dict[str, Any], classes: int, name: str, ms: float) -> None:
    for size in record["sizes"]:
        for row in size["contenders"]:
            if size["classes"] == classes and row["name"] == name:
                row |= {"ms": ms, "ms_all": [ms]}


def test_every_contender_is_measured_printed_and_saved(tmp_path, capsys):
    path, page = tmp_path / "sizes.json", tmp_path / "sizes.md"
    words = "sizes --device cpu --sizes 300x8x4,200x8x2 --repeats 2 --seconds 0.2 --commit abc"
    assert run_benchmark([*words.split(), "--json", str(path), "--page", str(page)]) == 0
    record, printed = json.loads(path.read_text()), capsys.readouterr()
    assert (record["version"], record["machine"]["commit"]) == (VERSION, "abc")
    assert [size["classes"] for size in record["sizes"]] == [300, 200]
    for size in record["sizes"]:
        assert [row["name"] for row in size["contenders"]] == NAMES
        for row in size["contenders"]:
            assert row["failed"] is None
            assert row["name"] in printed.out or row["name"] == sizes_page.SPARSE_AGAIN
            assert row["ms"] > 0 and row["facts"]["single_ms"] > 0 and row["ratio"] > 0
            assert row["peak_gib"] is None  # of a GPU only
    assert "| Q-Margin, sparse " in page.read_text() and "## Goals" not in page.read_text()
    assert printed.err.count("\n") == 2 * (len(NAMES) + 1)


def test_paths_are_those_in_the_names():
    found = measure_size(SMALL, SizesBenchmark((SMALL,), CPU, repeats=1, seconds=0.1))
    rows = {row["name"]: row["facts"].get("stats", {}).get("path") for row in found["contenders"]}
    assert {name: rows[name] for name in (SPARSE, CHUNKED)} == {
        SPARSE: "sparse",
        CHUNKED: "chunked",
    }
    assert rows[sizes_page.DENSE] == "dense" and rows[sizes_page.SAMPLED_10] == "sampled"
    assert rows[PLAIN] is None and rows[sizes_page.PRODUCT] is None


def test_contenders_share_their_tensors_and_refresh_no_copy():
    """An update of one must not look like a change to another, which would copy all prototypes."""
    stage = Stage(SMALL, CPU, 0)
    before = stage.weights().clone()
    loss = qmargin.q_margin()
    entrants = [build_head(stage, loss=loss, path=path) for path in ("sparse", "chunked")]
    entrants.append(build_plain(stage, is_compiled=False))
    addresses = {one.head.prototypes.data_ptr() for one in entrants[:2]}
    assert addresses == {stage.weights().data_ptr()}
    assert entrants[0].head.copy is entrants[1].head.copy
    for _ in range(3):
        for entrant in entrants:
            assert entrant.head is None or entrant.head._is_current()
            entrant.step()
    assert torch.equal(stage.weights(), before)
    assert stage.momentum.abs().sum() > 0


def test_shared_heads_have_the_loss_of_their_own():
    stage = Stage(SMALL, CPU, 0)
    loss = qmargin.q_margin()
    own = qmargin.MarginClassifier(8, 300, loss, path="dense")
    with torch.no_grad():
        own.prototypes.copy_(stage.weights())
    expected = own(stage.embeddings, stage.labels)
    for path in ("auto", "sparse", "chunked", "dense"):
        found = stage.head(loss, path)(stage.embeddings, stage.labels)
        assert torch.allclose(found, expected, rtol=1e-5), path


def test_the_plain_head_is_arcface():
    stage = Stage(SMALL, CPU, 0)
    cosines = stage.embeddings @ torch.nn.functional.normalize(stage.weights()).t()
    expected = qmargin.arcface()(cosines, stage.labels)
    found = plain_arcface(stage.embeddings, stage.labels, stage.weights())
    assert abs(float(found) - float(expected)) < 0.01 * float(expected)  # bfloat16


def test_what_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr("benchmarks.head.available_memory", lambda device: 1000)
    monkeypatch.setattr(sizes, "MOST_DENSE_BYTES", 10)
    found = measure_size(SMALL, SizesBenchmark((SMALL,), CPU, repeats=1, seconds=0.1))
    failed = {row["name"]: row["failed"] or "" for row in found["contenders"]}
    for name in (PLAIN, sizes_page.SAMPLED_10, sizes_page.DENSE):
        assert failed[name].startswith("skipped: needs about"), name
    assert not failed[AUTO] and not failed[SPARSE]


@pytest.mark.parametrize("call", [1, 3])
def test_a_contender_that_fails_is_out_and_the_others_go_on(call, monkeypatch):
    """In the first call it fails to start, in the third within its turns."""

    def build(stage: Stage) -> Entrant:
        calls = []

        def step() -> None:
            calls.append(1)
            if len(calls) == call:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")

        return Entrant(step)

    others = all_contenders()[:3]
    monkeypatch.setattr(sizes, "all_contenders", lambda: [Contender("broken", build), *others])
    found = measure_size(SMALL, SizesBenchmark((SMALL,), CPU, repeats=1, seconds=0.1))
    broken, *rows = found["contenders"]
    assert broken["failed"] == "OutOfMemoryError: CUDA out of memory. Tried"
    assert all(row["failed"] is None and row["ms"] > 0 for row in rows)


def test_a_size_that_cannot_begin_says_so(monkeypatch):
    def fail(*given: object) -> None:
        raise ConfigError("needs 1 TiB")

    monkeypatch.setattr(sizes, "Stage", fail)
    found = measure_size(SMALL, SizesBenchmark((SMALL,), CPU))
    assert {row["failed"] for row in found["contenders"]} == {"ConfigError: needs 1 TiB"}


def test_the_grid_has_a_row_for_each_path(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sizes_grid.AXES, "cpu", ((4,), (200,), (8,)))
    path = tmp_path / "grid.json"
    assert run_benchmark(["sizes", "--device", "cpu", "--grid", str(path)]) == 0
    record = json.loads(path.read_text())
    assert (record["num_cells"], record["left_out"]) == (len(sizes_grid.SETTINGS), 0)
    rows = record["rows"]
    wanted = {"rows", "classes", "dim", "alpha", "scale", "path", "ms", "candidates", "support"}
    assert all(wanted <= set(row) and row["ms"] > 0 for row in rows)
    paths = {alpha: {row["path"] for row in rows if row["alpha"] == alpha} for alpha in (1.0, 1.25)}
    assert paths == {1.0: {"chunked", "dense"}, 1.25: {"lists", "chunked", "dense"}}
    assert "17 rows, 0 cells left out" in capsys.readouterr().out


def test_a_grid_out_of_time_keeps_what_it_has(tmp_path):
    path = tmp_path / "grid.json"
    words = ["sizes", "--device", "cpu", "--grid", str(path), "--grid-seconds", "1e-6"]
    assert run_benchmark(words) == 0
    record = json.loads(path.read_text())
    assert record["left_out"] == record["num_cells"] - 1 and record["rows"]


def test_the_page_figure_and_readme_come_from_a_stored_run(tmp_path, capsys):
    readme, page, figure = (tmp_path / name for name in ("README.md", "a.md", "b.svg"))
    readme.write_text("before\n<!-- sizes:begin -->\n<!-- sizes:end -->\nafter\n")
    words = ["sizes", "--from", str(write(tmp_path, made_up()))]
    outputs = {"--page": page, "--figure": figure, "--readme": readme}
    words += [str(word) for pair in outputs.items() for word in pair]
    assert run_benchmark(words) == 0
    text = page.read_text()
    assert text.startswith("# From thousands to millions of classes\n")
    for heading in (
        *("Goals", "Step time", "Single steps", "Memory", "Forward and backward alone"),
        *("Auto and the fastest path", "What auto chose"),
    ):
        assert f"\n## {heading}\n" in text
    assert (
        "](b.svg)" in text
        and "`python -m benchmarks sizes --device cuda --json sizes.json`" in text
    )
    assert "needs about \\| 200 GiB" in text and "commit `abc`" in text
    drawn = figure.read_text()
    assert drawn.startswith("<?xml") and "</svg>" in drawn and "<dc:date>" not in drawn
    block = readme.read_text()
    assert block.startswith("before\n<!-- sizes:begin -->\nMedian") and block.endswith("after\n")
    run_benchmark(words)
    assert readme.read_text() == block and figure.read_text() == drawn  # the same, the same bytes
    assert "Step time" in capsys.readouterr().out


def test_the_readme_has_six_rows_and_five_columns():
    lines = readme_block(made_up()).split("\n\n")[1].splitlines()
    assert len(lines) == 2 + len(README_SIZES) == 8
    assert {line.count("|") for line in lines} == {6}
    for reason, told in (
        ("skipped: needs about 200 GiB", "does not fit"),
        ("no compiler", "not measured"),
    ):
        record = made_up()
        row = next(size for size in record["sizes"] if size["classes"] == README_SIZES[-1][0])
        row["contenders"][1] |= {"failed": reason, "ms": None}
        last = readme_block(record).split("\n\n")[1].splitlines()[-1]
        assert told in last and re.search(r"\| +\|$", last)


def test_the_readme_refuses_a_cut_run(tmp_path, capsys):
    record = made_up()
    record["sizes"] = record["sizes"][:5]
    readme = tmp_path / "README.md"
    readme.write_text("<!-- sizes:begin --><!-- sizes:end -->")
    words = ["sizes", "--from", str(write(tmp_path, record)), "--readme", str(readme)]
    assert run_benchmark(words) == 2
    assert "not measured: 1,000,000 with batch 1024, 2,059,906" in capsys.readouterr().err
    assert render_page(record)  # the page takes what there is


def test_goals_say_whether_they_are_met():
    record = made_up()
    set_ms(record, 360_232, PLAIN, 10.0)
    set_ms(record, 360_232, AUTO, 7.0)
    rows = [line for line in render_page(record).splitlines() if "360,232 classes" in line]
    assert [cell.strip() for cell in rows[0].split("|")[2:5]] == ["0.70", "0.70", "yes"]
    set_ms(record, 360_232, AUTO, 7.1)
    rows = [line for line in render_page(record).splitlines() if "360,232 classes" in line]
    assert rows[0].split("|")[4].strip() == "no"
    assert len(GOALS) == 30
    untimed = [goal.cells(record)[2] == "not measured" for goal in GOALS]
    assert untimed == [False] * 21 + [True] * 9


def test_a_page_of_several_files_has_the_sizes_of_all(tmp_path, capsys):
    """Each size has a process of its own: an error of a GPU ends that process alone."""
    whole, paths = made_up(), []
    for size in reversed(whole["sizes"]):
        paths.append(tmp_path / f"{size['classes']}-{size['rows']}.json")
        paths[-1].write_text(json.dumps({**whole, "sizes": [size]}))
    page = tmp_path / "page.md"
    assert run_benchmark(["sizes", "--from", *map(str, paths), "--page", str(page)]) == 0
    own = render_page({**whole, "sizes": sorted(whole["sizes"], key=sizes_page.key_of)})
    assert page.read_text() == own.replace("`, commit", "`, a process for each size, commit", 1)
    capsys.readouterr()
    assert run_benchmark(["sizes", "--from", str(paths[0]), *map(str, paths)]) == 2
    assert "are in two files" in capsys.readouterr().err
    machine = {**whole["machine"], "commit": "other"}
    paths[0].write_text(json.dumps({**whole, "sizes": whole["sizes"][-1:], "machine": machine}))
    assert run_benchmark(["sizes", "--from", *map(str, paths)]) == 2
    assert "name files of one machine and commit" in capsys.readouterr().err


def test_auto_is_compared_with_the_fastest_path():
    record = made_up()
    for size in SIZES["cuda"]:
        for name in (AUTO, SPARSE, CHUNKED, sizes_page.DENSE):
            set_ms(record, size.classes, name, 2.0)
    assert auto_to_best(record) == 1.0
    set_ms(record, 17_982, CHUNKED, 1.0)
    assert auto_to_best(record) == 2.0
    assert "| 17,982, d 256, batch 512     |      chunked |            2.00 |" in render_page(
        record
    )


def test_goals_of_losses_come_from_their_own_file(tmp_path, capsys):
    """On cosines, the largest ratio of some losses counts; without all of them there is none."""
    shapes = [(256, 5_994), (1024, 17_982), (1024, 93_431)]
    names = ("F.cross_entropy", *sizes_page.SPARSE_LOSSES, *sizes_page.SOFTMAX_LOSSES)
    rows = [
        {
            "name": name,
            "rows": b,
            "classes": k,
            "dtype": dtype,
            "milliseconds": 0.5 * ratio,
            "versus_cross_entropy": ratio,
        }
        for b, k in shapes
        for dtype in ("float32", "bfloat16")
        for name, ratio in zip(names, (1.0, 0.7, 0.5, 0.4, 0.3, 0.2), strict=True)
    ]
    rows += [{**row, "name": "entmax.entmax15_loss"} for row in rows if row["name"] == names[0]]
    path, losses = write(tmp_path, made_up()), tmp_path / "loss.json"
    losses.write_text(json.dumps({"shapes": rows}))
    words = ["sizes", "--from", str(path), "--loss", str(losses)]
    assert run_benchmark(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " loss on [" in line]
    found = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines]
    assert found == [
        *(["0.75", "0.70", "yes"], ["0.60", "0.70", "no"]),
        *([["0.75", "0.30", "yes"]] * 2 + [["1.20", "0.70", "yes"]] * 4),
    ]
    assert sizes_page.GOALS[-1].cells({"losses": rows})[1:] == ["1.00", "0.70", "yes"]
    assert sizes_page.GOALS[-2].cells({"losses": rows[:10]})[2:] == ["not measured", ""]
    losses.write_text("{}")
    assert run_benchmark(words) == 2
    assert "cannot be read as a file of `loss" in capsys.readouterr().err


def test_only_what_goals_need_takes_part():
    bench = SizesBenchmark((), CPU, only_goals=True)
    names = {one.name for one in bench.contenders(SMALL)}
    assert names == set(NAMES) - {
        sizes_page.PLAIN_EAGER,
        sizes_page.SAMPLED_10,
        sizes_page.SAMPLED_30,
    }
    large = {one.name for one in bench.contenders(Size(2_059_906, 8, 4))}
    assert large - names == set(sizes_page.GRADIENTS)


def test_steps_without_an_update_drop_their_gradient():
    stage = Stage(SMALL, CPU, 0)
    wide = next(one for one in all_contenders() if one.name == sizes_page.WIDE_GRADIENTS)
    entrant = wide.build(stage)
    for _ in range(2):
        entrant.step()
    assert entrant.head.fused_gradient is not None  # the next step drops it


def test_kernels_of_a_step(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    words = ["kernels", "--device", "cpu", "--sizes", "300x8x4", "--json", str(path)]
    assert run_benchmark(words) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["contender"] for row in rows} == {AUTO, sizes_page.ARCFACE_AUTO}
    own = [row for row in rows if row["contender"] == AUTO]
    assert [row["kernel"] for row in own[:2]] == ["whole step", "all kernels"]
    assert own[1]["ms"] == pytest.approx(sum(row["ms"] for row in own[2:]))
    assert "Kernels of a step, 300x8x4" in capsys.readouterr().out


def test_lines_of_the_figure_take_the_larger_batch():
    line, beside = sizes_page.figure_points(made_up(), AUTO)
    assert [key[0] for key in line] == sorted({size.classes for size in SIZES["cuda"]})
    assert (93_431, 1024) in line and beside == [(93_431, 512)]
    assert set(LOOKS) == set(NAMES) - {sizes_page.PRODUCT, sizes_page.SPARSE_AGAIN}
    assert len({(str(dash), marker) for _, dash, marker in LOOKS.values()}) == len(LOOKS)


def test_sizes_are_found_by_their_classes():
    assert find_sizes(None, CUDA) == SIZES["cuda"] and find_sizes(None, CPU) == SIZES["cpu"]
    assert [size.rows for size in find_sizes(["93431"], CUDA)] == [512, 1024]
    assert find_sizes(["93431", "93431x512x512"], CUDA) == find_sizes(["93431"], CUDA)


@pytest.mark.parametrize("name", ["12", "5994x256", "0x1x1", "axbxc", "5994x-1x3"])
def test_an_unknown_size_is_refused(name, capsys):
    assert run_benchmark(["sizes", "--device", "cpu", f"--sizes={name}"]) == 2
    told = capsys.readouterr().err
    assert f"no size {name!r}; known are 1000, 5994" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not JSON"),
        ("[]", "was not written by"),
        ('{"subject": "head"}', "was not written by"),
        ('{"subject": "sizes", "version": 0}', "has version 0 and this command reads version 1"),
        (json.dumps(made_up(sizes=[])), "has no sizes"),
    ],
)
def test_another_file_is_refused(text, named, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert run_benchmark(["sizes", "--from", str(path)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "name", "named"),
    [
        ("--figure", "a.png", "name a .svg file"),
        ("--figure", "a.svg", "install qmargin[figures]"),
        ("--readme", "README.md", "has no place for sizes"),
    ],
)
def test_outputs_are_checked_before_anything_is_measured(
    option, name, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("qmargin.report.figures.find_spec", lambda name: None)
    (tmp_path / "README.md").write_text("nothing\n")
    words = ["sizes", "--device", "cpu", option, str(tmp_path / name)]
    assert run_benchmark(words) == 2
    assert named in capsys.readouterr().err


def test_the_readme_of_the_project_has_the_place():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- sizes:begin -->") == text.count("<!-- sizes:end -->") == 1
