"""``python -m benchmarks scaling``: formulas, fits, the list of collectives, and the page."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import qmargin
from benchmarks import scaling, timing
from benchmarks.common import Tables
from benchmarks.scaling_measure import Check, Shard, run_check
from benchmarks.scaling_model import (
    BOUND_STEPS,
    WORK,
    Calibrated,
    Collective,
    Curve,
    Network,
    Point,
    Setting,
    Shape,
    ShardTimes,
    fit_curve,
    list_collectives,
    overlap,
    predict,
    read_points,
    simulate_candidates,
)
from helpers.commands import run_benchmark
from helpers.ranks import run_ranks
from qmargin.errors import BackendError, ConfigError
from qmargin.heads import sparse
from qmargin.kernels import dispatch
from qmargin.losses.hardness import hardness

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "scaling.md"
NETWORK, SETTING = Network(), Setting()
GATHER, REDUCE = Collective("all_gather", 1 << 20), Collective("all_reduce", 1 << 20)
SCATTER = Collective("reduce_scatter", 1 << 20)
RATES = dict(zip(WORK, (4e-12, 6e-9, 1e-7, 1e-9, 2e-7), strict=True))


def made_times() -> list[dict[str, object]]:
    """Rows as of ``--measure``, from known curves."""
    found = []
    for path, stage, host in (
        ("sparse", "step", 4.0),
        ("sparse", "screen", 0.1),
        ("chunked", "step", 3.0),
    ):
        for rows in (1024, 4096, 16384):
            for classes in (16384, 131072, 1_000_000):
                for world in (2, 8):
                    own = 500.0 * rows / world if path == "sparse" else 0.0
                    shape = Shape(rows, classes, 512, own, own * world)
                    names = list(WORK)[: 2 if stage == "screen" else 3 if path == "chunked" else 5]
                    ms = Curve(host, 2.0, {name: RATES[name] for name in names})(shape)
                    row = {"path": path, "stage": stage, "world": world, **shape._asdict()}
                    found.append({**row, "ms": ms})
    return found


def made_record() -> dict[str, object]:
    device = {"device": "made up", "torch": "0", "commit": "abc"}
    setting = {"alpha": 1.25, "scale": 35.0, "margin": 0.2, "cosines": [0.3, 0.7]}
    return {"points": made_times(), "device": device, "command": "none", "setting": setting}


@pytest.mark.parametrize("call", [GATHER, REDUCE, SCATTER])
def test_collectives_cost_nothing_alone_and_more_with_bytes_and_ranks(call):
    assert NETWORK.ms(call, 1) == 0.0
    times = [NETWORK.ms(call, ranks) for ranks in (2, 4, 8, 16, 64, 512)]
    assert times == sorted(times) and times[0] > 0.0
    for ranks in (2, 8, 64):
        sizes = [NETWORK.ms(call._replace(num_bytes=size), ranks) for size in (0, 8, 1 << 16, 1e9)]
        assert sizes == sorted(sizes) and sizes[0] > 0.0


def test_large_messages_take_what_a_ring_takes():
    """Every rank receives what the others have; a sum is scattered and gathered."""
    size, bandwidth = 1 << 34, 0.8 * 450e9
    for ranks in (2, 8):
        gathered = NETWORK.ms(Collective("all_gather", size // ranks), ranks)
        share = (ranks - 1) / ranks
        assert gathered == pytest.approx(1e3 * share * size / bandwidth, rel=1e-2)
        assert NETWORK.ms(Collective("reduce_scatter", size), ranks) == gathered
        assert NETWORK.ms(Collective("all_reduce", size), ranks) == pytest.approx(
            2 * gathered, rel=1e-2
        )
    across = NETWORK.ms(Collective("all_gather", size // 16), 16)
    assert across == pytest.approx(1e3 * 15 / 16 * size / (0.8 * 8 * 50e9), rel=1e-2)
    # A tree between many nodes is shallow: twice log2(64) levels, and hops within a node.
    tree = 4.4 + 2 * (7 * 0.52 * 1.8 + 6 * 5.0) + 20.0
    assert NETWORK.ms(Collective("all_reduce", 4), 512) == pytest.approx(tree / 1e3, rel=1e-3)


def test_one_rank_exchanges_nothing_and_bytes_follow_the_sizes():
    sizes = {"rows": 16, "dim": 32, "candidates": 10}
    for path, alpha in (("sparse", 1.25), ("chunked", 1.0)):
        assert list_collectives(path, alpha, ranks=1, **sizes) == []
    calls = {call.what: call for call in list_collectives("sparse", 1.25, ranks=4, **sizes)}
    assert calls["embeddings"] == ("all_gather", 16 * 32 * 4, "embeddings")
    assert calls["gradient of the embeddings"][:2] == ("reduce_scatter", 64 * 32 * 4)
    assert calls["rows of the candidates"].num_bytes == 80
    assert not any(call.num_bytes > 64 * 32 * 4 for call in calls.values())


SCRIPT = """
import json
import torch.distributed as dist
import qmargin
from benchmarks.scaling_measure import counted_collectives
from qmargin.heads.optimizers import ExactSGD

cases = json.loads(CASES)
found = []
with start_process_group(30.0, device="cpu"):
    for path, alpha in cases:
        torch.manual_seed(0)
        scale = 3.0 if alpha > 2 else 16.0
        loss = qmargin.q_margin(alpha=alpha, scale=scale, margin=0.05)
        loss = loss if alpha > 1 else qmargin.arcface()
        options = {"gradient": "fused", "group": dist.group.WORLD, "path": path}
        head = qmargin.MarginClassifier(24, 999, loss, **options)
        optimizer = ExactSGD(head, 0.1)
        embeddings = torch.randn(6, 24, requires_grad=True)
        with counted_collectives() as calls:
            head(embeddings, torch.randint(999, (6,)), [6, 6]).backward()
            optimizer.step()
        found.append([[call[:2] for call in calls], round(12 * head.last_step.num_candidates)])
    say(json.dumps(found))
"""
CASES = [("sparse", 1.25), ("sparse", 2.0), ("sparse", 3.0), ("chunked", 1.0), ("chunked", 1.5)]


@pytest.mark.dist
def test_the_model_lists_what_two_ranks_exchange():
    script = f"CASES = {json.dumps(CASES)!r}" + SCRIPT
    first, second = (json.loads(text) for text in run_ranks(script, 2))
    for (path, alpha), (calls, own), (others, other) in zip(CASES, first, second, strict=True):
        assert calls == others
        sums = [kind for kind, size in calls if (kind, size) == ("all_reduce", 2 * 12 * 8)]
        options = {"passes": len(sums), "candidates": max(own, other) if path == "sparse" else 0}
        expected = list_collectives(
            path, alpha, ranks=2, rows=6, dim=24, backend="gloo", has_kernels=False, **options
        )
        assert [tuple(call) for call in calls] == [call[:2] for call in expected], (path, alpha)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_a_rank_alone_exchanges_what_it_would_with_others(path, backend):
    setting = Setting(1.25, 20.0, 0.1)
    options = {"world": 4, "rows": 32, "classes": 500, "dim": 32, "setting": setting}
    shard = Shard(path, **options, device=torch.device("cpu"), backend=backend)
    shard.check_collectives()
    shape = shard.shape()
    assert shape[:3] == (32, 500, 32) and shape.merged == 4 * shape.own
    assert (shape.own > 0) == (path == "sparse")
    assert shard.head.num_classes == 2000 and len(shard.head.shard) == 500


def test_a_model_that_is_out_of_date_is_refused(monkeypatch):
    monkeypatch.setattr("benchmarks.scaling_model.BOUND_STEPS", 3)
    options = {"world": 2, "rows": 8, "classes": 100, "dim": 16, "setting": SETTING}
    shard = Shard("sparse", **options, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="bring benchmarks/scaling_model"):
        shard.check_collectives()


def test_steps_of_the_bound_are_those_of_the_head():
    assert BOUND_STEPS == sparse.BOUND_STEPS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes
@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_a_rank_alone_takes_the_step_of_one_among_equals(path, has_kernels, monkeypatch):
    """Loss of four ranks with the same classes, against one rank that has all of them."""
    setting = Setting(1.5, 12.0, 0.1)
    options = {"rows": 16, "classes": 100, "dim": 16, "setting": setting}
    cpu = torch.device("cpu")
    shard = Shard(path, world=4, **options, device=cpu)
    if has_kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(dispatch, "may_interpret", True)
        half = torch.float16
        kinds = {"sparse": qmargin.Sparse, "chunked": partial(qmargin.Chunked, dtype=half)}
        shard.head.path = kinds[path](screen_dtype=half)
    shard.check_collectives()
    assert shard.head.kernels.__name__.endswith("triton.head") == has_kernels
    others = shard.others
    unit = torch.nn.functional.normalize(shard.head.prototypes.detach())
    cosines = torch.nn.functional.normalize(others.embeddings) @ unit.t()
    rows, is_own = torch.arange(16), others.labels < 100
    columns = others.labels.clamp_max(99)
    targets = torch.where(is_own, cosines[rows, columns], others.cosines)
    # A rank leaves out its own targets, and the others have what it has.
    cosines[rows[is_own], columns[is_own]] = -1.0
    whole = torch.cat([cosines.repeat(1, 4), targets[:, None]], 1)
    expected = shard.head.loss(whole.double(), torch.full_like(others.labels, 400))
    with others.answering():
        others.begin()
        found = shard.head(shard.leaf, others.labels[:4], shard.sizes)
    assert found.item() == pytest.approx(expected.item(), rel=1e-3 if path == "chunked" else 1e-6)


def test_a_fit_recovers_known_coefficients():
    points = read_points(made_times())
    for path, stage, host in (("sparse", "step", 4.0), ("chunked", "step", 3.0)):
        own = [point for point in points if (point.path, point.stage) == (path, stage)]
        curve = fit_curve(own)
        assert curve.overlap == 2.0 and curve.host == pytest.approx(host, rel=0.02)
        assert max(map(abs, curve.errors)) < 0.01
        for rows, classes in ((2048, 60_000), (8192, 500_000)):
            merged = 500.0 * rows if path == "sparse" else 0.0
            shape = Shape(rows, classes, 512, merged / 8, merged)
            names = list(WORK)[: 3 if path == "chunked" else 5]
            truth = Curve(host, 2.0, {name: RATES[name] for name in names})(shape)
            assert curve(shape) == pytest.approx(truth, rel=0.02)


def test_a_fit_of_noise_has_no_negative_rate():
    torch.manual_seed(0)
    points = [point._replace(ms=float(torch.rand(()) + 0.1)) for point in read_points(made_times())]
    times = ShardTimes.fit(points)
    for curve in times.curves.values():
        assert curve.host >= 0.0 and min(curve.rates.values()) >= 0.0
    assert times.covers(Shape(1024, 20_000, 512)) and not times.covers(Shape(512, 20_000, 512))


def test_calibrated_collectives_are_a_line():
    pairs = [(size, 0.2 + 1e-6 * size) for size in (64, 4096, 1 << 20)]
    network = Calibrated.fit(2, {"all_reduce": pairs})
    assert network.lines["all_reduce"] == pytest.approx((0.2, 1e-6))
    assert network.ms(REDUCE, 1) == 0.0
    with pytest.raises(ConfigError, match="all_gather was not measured on 2 ranks"):
        network.ms(GATHER, 2)
    with pytest.raises(ConfigError, match="on 4 ranks"):
        network.ms(REDUCE, 4)


def test_candidates_are_little_more_than_the_support():
    support = hardness(1.25, 35.0, num_classes=2_000_000, embedding_dim=512).support
    found = [simulate_candidates(2_000_000, ranks, 512, SETTING, rows=8) for ranks in (1, 8, 512)]
    loose = [
        simulate_candidates(2_000_000, ranks, 512, SETTING, rows=8, steps=0)
        for ranks in (1, 8, 512)
    ]
    assert 0.5 * support < found[0] == loose[0] < 1.5 * support
    assert all(0.9 * found[0] < one < 1.4 * found[0] for one in found)
    assert loose[0] < loose[1] / 2 < loose[2] / 4


def test_predictions_and_what_an_overlap_saves():
    times = ShardTimes.fit(read_points(made_times()))
    given = {"num_classes": 2_000_000, "rows": 128, "dim": 512, "setting": SETTING}
    alone = predict(times, NETWORK, "sparse", ranks=1, **given)
    assert alone.collectives_ms == 0.0 and alone.ms == alone.compute_ms
    some = predict(times, NETWORK, "sparse", ranks=8, **given)
    assert some.shape[:3] == (1024, 250_000, 512) and some.is_covered
    assert some.ms == pytest.approx(some.compute_ms + sum(ms for _, ms in some.calls))
    assert some.memory_bytes > 250_000 * 512 * 10 and alone.memory_bytes > some.memory_bytes
    assert not predict(times, NETWORK, "sparse", ranks=512, **given).is_covered
    saved = overlap(times, some)
    assert 0.0 <= saved.own_first <= saved.most
    assert saved.most == pytest.approx(min(some.gather_ms(), some.screen_ms) / some.ms)
    slow = predict(times, replace(NETWORK, nvlink=1.0), "sparse", ranks=8, **given)
    assert overlap(times, slow).most > saved.most


def test_the_verdict_follows_the_numbers():
    assert scaling.verdict(0.012, 0.0).startswith(
        "Hiding the gather behind the screen saves at most 1.2% of a step, less than the 5%"
    )
    assert scaling.verdict(0.012, 0.0).endswith("not built")
    assert "worth building" in scaling.verdict(0.2, 0.1)
    assert scaling.verdict(0.2, 0.01).endswith("only a gather in parts would pay")


def test_the_page_is_made_from_a_file(tmp_path, capsys):
    page, times, out = tmp_path / "page.md", tmp_path / "times.json", tmp_path / "found.json"
    page.write_bytes(PAGE.read_bytes())
    times.write_text(json.dumps(made_record()))
    words = ["--times", str(times), "--page", str(page), "--json", str(out)]
    assert run_benchmark(["scaling", "--ranks", "8", "64", "--classes", "2000000", *words]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Not measured yet" not in text and "made up" in text
    assert re.search(r"\| sparse +\| +2 million \| +\d+\.\d ms, \d+%, \d+\.\d GiB", text)
    assert "Hiding the gather behind the screen saves at most" in text
    assert "| embeddings " in text and "InfiniBand" in text
    predicted = json.loads(out.read_bytes())["predictions"]
    assert {(row["path"], row["ranks"]) for row in predicted} == {
        (path, ranks) for path in ("sparse", "chunked") for ranks in (8, 64)
    }
    assert "Predicted step of the head" in capsys.readouterr().out


def test_without_times_the_page_says_so(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_bytes(PAGE.read_bytes())
    words = ["scaling", "--ranks", "8", "--classes", "20000", "--page", str(page)]
    assert run_benchmark(words) == 0
    assert page.read_text(encoding="utf-8").count("Not measured yet") == 5
    assert "Candidates of a row" in capsys.readouterr().out


def test_shards_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "WARM_TURNS", 1)
    out = tmp_path / "times.json"
    sizes = "--rows 16 32 --classes 200 400 --dim 16 --repeats 1 --seconds 0.1 --device cpu"
    assert run_benchmark(["scaling", "--measure", *sizes.split(), "--json", str(out)]) == 0
    record = json.loads(out.read_bytes())
    points = read_points(record["points"])
    # sparse on 2 and on 8 ranks with a screen; chunked on 8
    assert len(points) == 4 * (2 * 3 + 2) and all(point.ms > 0 for point in points)
    assert all((point.shape.own > 0) == (point.path == "sparse") for point in points)
    assert scaling.read_times(out) == record
    assert "Fitted curves" in capsys.readouterr().out


@pytest.mark.dist
def test_the_check_predicts_and_measures_real_ranks(monkeypatch):
    setting = Setting(1.25, 12.0, 0.1)
    check = Check(rows=8, classes=(400,), fitted_rows=(4, 16), dim=16, rounds=2, setting=setting)
    found = scaling.compare_with_ranks(replace(check, processes=(1, 2)))
    assert [(row["processes"], row["path"]) for row in found] == [
        (1, "sparse"), (1, "chunked"), (2, "sparse"), (2, "chunked")
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in found)
    assert [row["collectives_ms"] > 0 for row in found] == [False, False, True, True]
    _, columns, cells = scaling.check_table(check, found)
    assert all(len(row) == len(columns) for row in cells)
    with pytest.raises(BackendError, match="a rank of 1 failed"):
        run_check(replace(check, rows=0), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nvlink": -1.0}, "nvlink is -1.0; it must be finite and above 0"),
        ({"nic": 0.0}, "nic is 0.0"),
        ({"efficiency": float("nan")}, "efficiency is nan"),
        ({"node": 0}, "node is 0"),
        ({"ring_base": -1.0}, "ring_base is -1.0; it must be finite and at least 0"),
    ],
)
def test_networks_that_make_no_sense(options, message):
    with pytest.raises(ConfigError, match=message):
        Network(**options)


def test_sizes_that_make_no_sense():
    times = ShardTimes.fit(read_points(made_times()))
    given = {"num_classes": 1000, "rows": 8, "dim": 512, "setting": SETTING}
    for options, message in (
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"ranks": 12}, "12 ranks do not fill nodes of 8; take a multiple of 8, or at most 8"),
        ({"ranks": 8, "num_classes": 7}, "7 classes are fewer than 8 ranks"),
        ({"ranks": 8, "rows": 0}, "rows is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            predict(times, NETWORK, "sparse", **{**given, **options})
    with pytest.raises(ConfigError, match="no path 'dense' is modelled"):
        predict(times, NETWORK, "dense", ranks=8, **given)
    with pytest.raises(ConfigError, match="alpha is 1; candidates"):
        simulate_candidates(1000, 2, 64, replace(SETTING, alpha=1.0))
    with pytest.raises(ConfigError, match="10 rows are no multiple of 4 ranks"):
        options = {"classes": 10, "dim": 4, "setting": SETTING, "device": torch.device("cpu")}
        Shard("sparse", world=4, rows=10, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms": 0.0}, "must be positive"),
        ({"rows": 0}, "must be positive"),
        ({"own": -1.0}, "must be positive"),
        ({"stage": "nap"}, "no stage 'nap' of the path 'sparse'"),
        ({"path": "dense"}, "of the path 'dense'"),
    ],
)
def test_measured_times_that_make_no_sense(change, message):
    row = made_times()[0]
    with pytest.raises(ConfigError, match=message):
        read_points([{**row, **change}])
    with pytest.raises(ConfigError, match="no field 'ms'"):
        read_points([{name: value for name, value in row.items() if name != "ms"}])
    points = read_points([row, {**row, "stage": "screen"}])
    with pytest.raises(ConfigError, match="one stage of one path"):
        fit_curve(points)
    with pytest.raises(ConfigError, match="have no stage 'step' of the path 'chunked'"):
        ShardTimes.fit([Point(*points[0])]).ms("chunked", "step", points[0].shape)
    with pytest.raises(ConfigError, match="there are no measured times"):
        ShardTimes.fit([])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "no measured times"),
        ("{}", "no meas"),
    ],
)
def test_files_without_times(tmp_path, capsys, content, message):
    path = tmp_path / "times.json"
    if content is not None:
        path.write_text(content)
    assert run_benchmark(["scaling", "--times", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told and "--measure --json" in told and told.count("\n") == 1


def test_the_page_has_its_places():
    for subject in ("scaling", "scaling-check"):
        Tables(subject, PAGE)
