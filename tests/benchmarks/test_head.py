"""``python -m benchmarks head`` at a small size."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import qmargin
from benchmarks import head, timing
from benchmarks.head import (
    PARTS,
    HeadBenchmark,
    Workbench,
    finish_gradient,
    run_head_benchmark,
)
from benchmarks.head_page import render_page
from benchmarks.timing import CommonHead, Row, time_turns
from helpers.commands import run_benchmark
from helpers.registries import forget_registered
from qmargin.errors import ConfigError
from qmargin.registry import backbones

CPU = torch.device("cpu")
SMALL = HeadBenchmark(
    rows=4,
    dim=8,
    classes=301,
    device=CPU,
    screen=torch.float32,
    growth_classes=(50, 130),
    backbone="tiny",
    batch=3,
    repeats=2,
    seconds=0.5,
)


class TinyBackbone(nn.Module):
    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 16, stride=16)
        self.line = nn.Linear(4 * 49, embedding_dim)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.line(self.conv(images).flatten(1))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_TURNS", 1)
    monkeypatch.setattr("gc.collect", lambda: 0)  # between rows, for the memory of GPUs
    forget_registered(monkeypatch)
    backbones.register("tiny", TinyBackbone)


def test_every_part_is_measured_printed_and_saved(tmp_path, capsys):
    path = tmp_path / "head.json"
    words = (
        "head --rows 4 --dim 8 --classes 301 --repeats 2 --seconds 0.5 --device cpu --batch 3 "
        "--settings several --growth --growth-classes 50 130 --end-to-end --backbone tiny "
        "--parts products paths settings references errors "
        "--commit abc --json"
    )
    assert run_benchmark([*words.split(), str(path)]) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    printed = capsys.readouterr()
    assert set(record["parts"]) == set(PARTS) and record["settings"]["classes"] == 301
    assert record["machine"]["commit"] == "abc"
    assert record["machine"]["torch"] == torch.__version__
    for part, rows in record["parts"].items():
        assert rows, part
        for row in rows:
            assert row["failed"] is None and row["name"] in printed.out, row
            assert row["step"] in ("gradients", "tau and loss") or row["ms"] > 0
    assert printed.err.count("\n") == sum(len(rows) for rows in record["parts"].values())
    check_parts(record["parts"])
    assert "sparse, alpha 1.25, forward + backward, x dense" in render_page([path])
    record["settings"]["device"] = "cuda:0"
    path.write_text(json.dumps(record))
    check_page(render_page([path]))


def check_parts(parts: dict[str, list[dict]]) -> None:
    names = ["one GEMM, k padded", "one GEMM", "three GEMMs, k padded", "three GEMMs"]
    assert [row["name"] for row in parts["products"]] == names
    taken = {row["facts"]["stats"]["path"] for row in parts["paths"] if "stats" in row["facts"]}
    assert taken == {"sparse", "chunked", "dense", "sampled", "top_k"}
    fused = ("sparse, alpha 1.25", "forward + backward + ExactSGD")
    assert [(row["name"], row["step"]) for row in parts["paths"]].count(fused) == 1
    assert len({row["facts"]["scale"] for row in parts["settings"]}) == 6
    assert [row["facts"]["classes"] for row in parts["growth"]] == [50] * 3 + [130] * 3
    for row in parts["errors"]:
        is_gradient = row["step"] == "gradients"
        kinds = ("embedding_gradient", "prototype_gradient") if is_gradient else ("tau", "loss")
        for kind in kinds:
            assert row["facts"][f"{kind}_error"] < (1e-5 if is_gradient else 1e-4)
    numbers = {row["name"]: row["facts"] for row in parts["end-to-end"]}
    assert numbers["ArcFace, common head"]["paper_samples_per_s"] == 2005.13
    assert numbers["Q-Margin 1 %, paper"]["paper_samples_per_s"] == 1978.07
    assert numbers["Q-Margin 1 %, paper"]["paper_versus_arcface"] == pytest.approx(0.9865, abs=1e-4)
    assert numbers["ArcFace, common head"]["versus_arcface"] == 1.0
    assert all(facts["images_per_s"] > 0 for facts in numbers.values())


def check_page(page: str) -> None:
    assert page.startswith("# The head on one device\n") and "x dense" not in page
    for heading in ("Goals", "Bare products", "Paths", "Growth", "Whole training steps"):
        assert f"\n## {heading}\n" in page
    assert "| sparse, alpha 1.25, forward + backward, x GEMM" in page
    assert "| auto, alpha 1.25, scale 10, forward + backward, x chunked" in page
    assert "commit `abc`" in page and "paper, 8 GPUs, samples/s" in page


def test_parts_from_several_files_make_one_page(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    run_head_benchmark(SMALL, ["products"], json_path=files[0], commit="one", command="first")
    run_head_benchmark(SMALL, ["growth"], json_path=files[1], commit="two", command="second")
    page = render_page(files)
    assert "- products: `first`, commit `one`" in page and "## Paths" not in page
    assert "- growth: `second`, commit `two`" in page


def test_screens_stand_side_by_side(tmp_path):
    paths = [tmp_path / "half.json", tmp_path / "brain.json"]
    for path, screen in zip(paths, (torch.float16, torch.bfloat16), strict=True):
        run_head_benchmark(replace(SMALL, screen=screen), ["paths"], json_path=path)
        record = json.loads(path.read_text())
        record["settings"]["device"] = "cuda:0"
        path.write_text(json.dumps(record))
    page = render_page(paths[::-1])  # in whatever order files are given
    assert page.index("\n## Paths\n") < page.index("\n## Paths, bfloat16 screen\n")
    assert page.count("A step from embeddings to gradients") == 1
    claim = "sparse, alpha 1.25, forward + backward, x GEMM"
    rows = [row.split("|") for row in page.splitlines() if row.startswith(f"| {claim}")]
    assert [cells[2].strip() for cells in rows] == ["float16", "bfloat16"]


def test_a_row_that_fails_says_so_and_the_others_go_on(monkeypatch, capsys):
    measure = Workbench._measure

    def fail_with_an_optimizer(self: Workbench, variant: object) -> Row:
        if variant.optimizer == "SparseSGD":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        return measure(self, variant)

    monkeypatch.setattr(Workbench, "_measure", fail_with_an_optimizer)
    report = run_head_benchmark(SMALL, ["growth"])
    failed = [row["failed"] for row in report.rows["growth"]]
    assert failed == [None, "OutOfMemoryError: CUDA out of memory. Tried", None] * 2
    assert "OutOfMemoryError: CUDA out of memory. Tried" in capsys.readouterr().out


def test_what_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr("benchmarks.head.available_memory", lambda device: 1000)
    bench = replace(SMALL, paths=("sparse", "dense", "common"), repeats=1, seconds=0.1)
    for row in head.paths(bench):
        is_skipped = (row.failed or "").startswith("skipped: needs about")
        assert is_skipped == (not row.name.startswith("sparse")), row


def test_slow_steps_get_fewer_turns(monkeypatch):
    monkeypatch.setattr(timing, "once_ms", lambda step, device, calls: step() or 400.0)
    for seconds, turns in {2.0: 5, 0.1: 3}.items():
        (times,) = time_turns([lambda: None], CPU, repeats=50, seconds=seconds)
        assert len(times) == turns


def test_a_promised_gradient_is_made():
    """What is timed as forward + backward of a chunked step includes the prototypes' product."""
    workbench = Workbench(SMALL)
    head = workbench.head
    head.path = "chunked"
    head(workbench.leaf, workbench.labels).backward()
    blocks = []
    original = type(head.fused_gradient).raw_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(head.fused_gradient),
            "raw_blocks",
            lambda self: (blocks.append(block) or block for block in original(self)),
        )
        finish_gradient(head)
    assert sum(len(rows) for _, rows, _ in blocks) == head.num_classes


def test_the_batch_is_near_its_targets_and_no_other():
    """Noise from the prototypes' own seed would be one of the prototypes."""
    dim = 64
    workbench = Workbench(replace(SMALL, rows=64, dim=dim, classes=5000))
    embeddings = workbench.leaf.detach()
    cosines = embeddings @ nn.functional.normalize(workbench.head.prototypes.detach()).t()
    targets = cosines.gather(1, workbench.labels[:, None])
    assert 0.29 < float(targets.min()) < float(targets.max()) < 0.71
    assert float(cosines.scatter(1, workbench.labels[:, None], -1.0).max()) < 5.5 * dim**-0.5


def test_updates_leave_every_turn_the_same_prototypes():
    workbench = Workbench(SMALL)
    before = workbench.head.prototypes.detach().clone()
    for variant in head.path_variants(SMALL):
        workbench.measure(variant)
    assert torch.equal(workbench.head.prototypes.detach(), before)


def test_references_are_timed_in_turns_with_the_step_without_one():
    rows = list(head.references(SMALL))
    names = ["class_prior", "class_prior, classes in any order", "quality", "look_alike"]
    assert [row.name for row in rows[::2]] == [f"sparse, {name}" for name in names]
    for row in rows:
        assert row.failed is None and row.ratio == row.ms / row.reference_ms
        assert row.facts["stats"]["path"] == row.facts["stats_without"]["path"] == "sparse"
    assert [row.facts.get("goal") for row in rows[::2]] == [1.05, None, 1.05, 1.3]


def test_the_common_head_is_arcface():
    torch.manual_seed(0)
    embeddings, labels = torch.randn(6, 16), torch.randint(40, (6,))
    head = CommonHead(16, 40, scale=8.0)
    cosines = nn.functional.normalize(embeddings) @ nn.functional.normalize(head.weight).t()
    expected = qmargin.arcface(scale=8.0)(cosines.detach(), labels).mean()
    assert abs(float(head(embeddings, labels).detach()) - float(expected)) < 0.05  # bfloat16
    sampled = CommonHead(16, 40, rate=0.2)
    loss = sampled(embeddings, labels)
    loss.backward()
    touched = sampled.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert set(labels.tolist()) <= set(touched) and len(touched) <= 8


def test_bad_names_are_errors_that_list_the_known(capsys):
    for kind, name, known in (("part", "product", "products, paths"), ("path", "fast", "sparse")):
        assert run_benchmark(["head", f"--{kind}s", name, "--device", "cpu"]) == 2
        assert f"no {kind} {name!r}; known are {known}" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        run_head_benchmark(SMALL, ["nothing"])
