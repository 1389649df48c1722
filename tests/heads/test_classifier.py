"""The head as a module: choice of path, batches, state, and what it refuses."""

import copy
import io
import math
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import qmargin
from helpers.heads import (
    Batch,
    assert_same,
    every_class,
    make_head,
    make_loss,
    random_batch,
    step,
    truth_of,
)
from qmargin import devices
from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.heads import checks, paths
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD
from qmargin.heads.paths import choose_path

EXACT = ("sparse", "chunked", "dense", "top_k")
q_margin = qmargin.q_margin()
q_head = MarginClassifier(8, 10, q_margin)
NINE = qmargin.PriorMargin(qmargin.PerClass(torch.zeros(9)))
on_exact_paths = pytest.mark.parametrize("path", EXACT)

# auto


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("sparse", {}),
        ("chunked", {"alpha": 1.0}),
        ("chunked", {"alpha": 0.5}),
        ("dense", {"alpha": 1.0, "num_classes": 1}),
        ("dense", {"alpha": None}),
        ("dense", {"alpha": 1.0, "num_classes": 1 << 16}),  # a CPU takes as many as fit
        ("dense", {"class_share": 0.9, "num_classes": 1 << 16}),
        ("chunked", {"class_share": 0.9, "num_classes": 1 << 16, "num_ranks": 2}),
        ("chunked", {"alpha": 1.0, "num_classes": 1 << 16, "device": "cuda"}),
        ("sparse", {"class_share": 0.01}),
        ("chunked", {"class_share": 0.9}),
        ("chunked", {"class_share": 0.1, "device": "cuda"}),
        ("sparse", {"class_share": 0.15}),  # between the limits nothing changes
        ("chunked", {"class_share": 0.15, "was_chunked": True}),
        ("sparse", {"class_share": 0.01, "was_chunked": True}),
        ("sparse", {"class_share": 0.005, "device": "cuda"}),
        ("chunked", {"class_share": 0.005, "device": "cuda", "was_chunked": True}),
        ("sparse", {"class_share": 0.001, "device": "other"}),
        ("sparse", {"class_share": 0.9, "device": "cuda", "num_classes": 1000, "has_matrix": True}),
        ("dense", {"class_share": 0.9, "device": "cuda", "num_classes": 1 << 15}),
        ("chunked", {"class_share": 0.9, "device": "cuda", "num_classes": 1 << 18}),
        ("chunked", {"class_share": 0.9, "device": "cuda", "num_classes": 1 << 18, "num_ranks": 8}),
        ("sparse", {"class_share": 0.02, "device": "cuda", "alpha": 3.0}),  # blocks take longer
    ],
)
def test_choice_follows_alpha_size_and_support(path, changes):
    settings = {"alpha": 1.25, "device": "cpu", "num_rows": 1000, "num_classes": 10**6}
    settings |= {"class_share": None, "was_chunked": False}
    chosen = choose_path(**{**settings, **changes})
    assert chosen.path == path and chosen.reason


# Milliseconds of steps on an H200 (docs/benchmarks/sizes.md): rows, classes, dimension, listed,
# and the times of a sparse step, by blocks, and with all cosines.
MEASURED = [
    (256, 5_994, 256, 68, 0.413, 6.23, 3.01),
    (512, 17_982, 256, 90, 0.422, 6.13, 3.49),
    (512, 93_431, 512, 329, 0.770, 6.84, 5.85),
    (1024, 93_431, 512, 328, 1.16, 6.97, 9.36),
    (1024, 360_232, 512, 454, 3.13, 8.29, 31.8),
    (1024, 1_000_000, 512, 557, 5.84, 16.9, None),
    (1024, 2_059_906, 512, 647, 10.4, 35.0, None),
]


@pytest.mark.parametrize(("rows", "classes", "dim", "listed", "sparse", *"cd"), MEASURED)
def test_expected_times_on_a_gpu_are_near_measured_ones(rows, classes, dim, listed, sparse, c, d):
    """Within a factor of two where the update is a small part, and in the right order."""
    expected = paths.gpu_costs(rows, classes, dim, listed=listed, alpha=1.25)
    update = 18e-9 * classes * dim / 3.7  # reads and writes of prototypes, momentum and copy
    name = "matrix" if rows * classes <= paths.MATRIX_LOGITS else "lists"
    for found, measured in ((name, sparse), ("chunked", c), ("dense", d)):
        if measured is not None:
            assert 0.5 < (expected[found] + update) / measured < 2.0, found
    settings = {"num_rows": rows, "num_classes": classes, "dim": dim, "device": "cuda"}
    settings |= {"class_share": listed / classes, "has_matrix": name == "matrix", "alpha": 1.25}
    for was_chunked in (False, True):
        chosen = choose_path(**settings, was_chunked=was_chunked)
        assert (chosen.path, chosen.by_matrix) == ("sparse", name == "matrix")
        assert f"{expected[name]:.2g}"[0] in chosen.reason


def test_supports_that_outgrow_the_lists_of_a_matrix_leave_it():
    settings = {"num_rows": 256, "num_classes": 93_431, "alpha": 1.25, "device": "cuda"}
    settings |= {"has_matrix": True}

    def choose(listed, was_chunked=False):
        return choose_path(class_share=listed / 93_431, was_chunked=was_chunked, **settings)

    assert choose(4000)[::2] == ("sparse", True)
    assert choose(4200)[::2] == ("sparse", False)  # lists without a matrix have no such limit
    settings["num_rows"] = 1024
    assert choose(2900)[::2] == ("sparse", True)
    assert choose(3900).path == "chunked"
    settings["has_matrix"] = False
    assert choose(2900)[::2] == ("sparse", False)
    settings["has_matrix"] = True
    assert choose(1000, True).path == "chunked"  # between the limits nothing changes
    assert choose(800, True)[::2] == ("sparse", True)


@pytest.mark.parametrize("other", ["dense", "chunked"])
def test_auto_follows_the_support_and_does_not_flutter(other, monkeypatch):
    if other == "chunked":
        monkeypatch.setattr(paths, "CPU_LOGITS", 100)  # as if all cosines did not fit
    batch = random_batch(1031, dim=64, rows=8)
    head = make_head(make_loss(1.25, 64.0), batch, path="auto")
    taken = []
    for scale in [64.0] * 3 + [4.0] * 6 + [64.0] * 6:  # few active classes, then most, then few
        head.loss.scale = scale
        outcome = step(head, batch)
        assert_same(outcome, truth_of(head.loss, batch), tolerance=2e-5)
        taken.append(outcome.stats.path)
    assert taken[:4] == ["sparse"] * 4  # the first large support is met by the sparse path
    assert taken[8] == taken[9] == other and taken[-1] == "sparse"
    assert sum(one != other for one, other in pairwise(taken)) == 2
    assert "of the classes" in outcome.stats.reason


def test_auto_takes_what_only_dense_can_do(monkeypatch):
    batch = random_batch(33)
    alpha = torch.nn.Parameter(torch.tensor(1.5))
    for divergence in (qmargin.Alpha(alpha), qmargin.JensenShannon()):
        loss = qmargin.MarginLoss(divergence, qmargin.CosineMargin(0.1), scale=4.0)
        assert step(make_head(loss, batch), batch).stats.path == "dense"
    assert alpha.grad is not None
    assert step(make_head(make_loss(1.0), batch), batch).stats.path == "dense"
    for name in ("SMALL_LOGITS", "CPU_LOGITS"):  # and avoids a matrix of many cosines
        monkeypatch.setattr(paths, name, 100)
    stats = step(make_head(qmargin.arcface(), batch), batch).stats
    assert (stats.path, stats.active_share, stats.support_max) == ("chunked", 1.0, 33)


# batches


@pytest.mark.parametrize("path", [*EXACT, "sampled"])
def test_ignored_rows_do_not_count(path):
    batch = random_batch(97, seed=1)
    labels, embeddings = batch.labels.clone(), batch.embeddings.clone()
    labels[[1, 4]] = -100
    embeddings[1] = math.nan  # whatever is in there
    embeddings[4] = 0.0
    ours, theirs = (make_loss(1.5, margin=qmargin.AdaFaceMargin()) for _ in range(2))
    head = make_head(ours, batch, path=every_class(path), dtype=torch.float64)
    outcome = step(head, Batch(embeddings, labels, batch.prototypes))
    kept = [0, 2, 3, 5]
    truth = truth_of(theirs, Batch(batch.embeddings[kept], batch.labels[kept], batch.prototypes))
    assert (outcome.embeddings[[1, 4]] == 0).all()
    packed = type(outcome)(outcome.loss, outcome.embeddings[kept], outcome.prototypes)
    assert_same(packed, truth, tolerance=1e-9)
    torch.testing.assert_close(ours.margin.running_mean, theirs.margin.running_mean)


@on_exact_paths
def test_embeddings_in_half_precision_and_under_autocast(path):
    batch, loss = random_batch(97), make_loss(1.5)
    truth = truth_of(loss, Batch(batch.embeddings.bfloat16(), batch.labels, batch.prototypes))
    head = make_head(loss, batch, path=path)
    embeddings = batch.embeddings.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = head(embeddings, batch.labels.int())
    value.backward()
    torch.testing.assert_close(value.double(), truth.loss, rtol=1e-5, atol=1e-6)
    assert embeddings.grad.dtype == torch.bfloat16
    assert head.prototypes.grad.dtype == torch.float32


@on_exact_paths
def test_evaluation_and_frozen_prototypes_leave_no_gradients(path):
    batch, loss = random_batch(97), make_loss(1.5)
    rows, labels = batch.embeddings.double(), batch.labels
    head = make_head(loss, batch, path=path, dtype=torch.float64)
    truth = truth_of(loss, batch)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            value = head(rows, labels)
        torch.testing.assert_close(value, truth.loss)
    head(rows, labels).backward()  # embeddings without gradients
    torch.testing.assert_close(head.prototypes.grad, truth.prototypes)
    assert_same(step(head, batch), truth, tolerance=1e-9)
    head.prototypes.requires_grad_(False).grad = None
    head(rows.requires_grad_(), labels).backward()
    torch.testing.assert_close(rows.grad, truth.embeddings)
    assert head.prototypes.grad is None


# state


@pytest.mark.parametrize("path", [*EXACT, "sampled"])
def test_copies_and_pickles_are_heads_of_their_own(path):
    batch = random_batch(97)
    head = make_head(make_loss(1.5), batch, path=path, gradient="fused")
    head(batch.embeddings.clone().requires_grad_(), batch.labels).backward()  # a step is in flight
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    for twin in (copy.deepcopy(head), torch.load(file, weights_only=False)):
        assert twin.last_step is None and twin.fused_gradient is None
        twin.gradient = "dense"
        step(twin, batch)
        with torch.no_grad():
            twin.prototypes.add_(1.0)
        torch.testing.assert_close(head.prototypes.detach(), batch.prototypes)
    assert head.last_step is not None


def test_a_copy_chooses_the_same_path():
    """What ``auto`` has measured is part of the state: a resumed run goes on as it would have."""
    batch = random_batch(1031)
    head, other = (make_head(make_loss(1.5), batch) for _ in range(2))
    for _ in range(2):
        head(batch.embeddings, batch.labels)
    other.load_state_dict(head.state_dict())
    for each in (head, other):
        each(batch.embeddings, batch.labels)
    assert "of the classes can be active" in other.last_step.reason
    assert other.last_step == head.last_step
    head._num_watched, head._num_resting, head._was_chunked = 63, 4000, True
    other.load_state_dict(head.state_dict())
    assert (other._num_watched, other._num_resting, other._was_chunked) == (63, 4000, True)
    other.set_extra_state(torch.tensor([0, 0, 1]))  # of earlier versions
    assert (other._num_watched, other._num_resting, other._was_chunked) == (0, 0, True)


def test_paths_have_names_settings_and_state():
    head = MarginClassifier(8, 10, qmargin.adaface(), path=qmargin.Sampled(0.5, seed=7))
    assert head.path == qmargin.Sampled(0.5, seed=7) and "Sampled(rate=0.5, seed=7)" in repr(head)
    state = head.state_dict()
    margin = {f"loss.margin.running_{name}" for name in ("mean", "std")}
    assert set(state) == {"prototypes", "_extra_state"} | margin
    assert state["_extra_state"].tolist() == [7, 0, 0]
    head.path = "paper"
    assert head.path == qmargin.TopK() and "path='top_k'" in repr(head)
    for name in ("auto", "sparse", "chunked", "dense", "sampled", "top_k"):
        assert paths.as_path(name).name == name
    head = MarginClassifier(8, 10, q_margin, path=qmargin.Chunked(dtype=torch.float16))
    assert head.chunk_dtype == torch.float16 and head.screen_dtype == torch.float32
    head.path = qmargin.Auto(screen_dtype=torch.bfloat16, list_capacity=3)
    assert head.screen_dtype == torch.bfloat16 and head.list_capacity == 3


def test_a_seed_decides_the_prototypes():
    heads = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        heads.append(MarginClassifier(4, 9, q_margin).prototypes)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


# refusals


@pytest.mark.parametrize("path", ["sparse", "chunked", "top_k"])
def test_paths_without_a_gradient_for_alpha_refuse_a_learnable_one(path):
    alpha = torch.nn.Parameter(torch.tensor(1.5))
    for divergence in (qmargin.Alpha(alpha), qmargin.JensenShannon()):
        loss = qmargin.MarginLoss(divergence, qmargin.PriorMargin(0.1), scale=8.0)
        with pytest.raises(ConfigError, match=r"alpha|JensenShannon"):
            MarginClassifier(8, 10, loss, path=path)
        MarginClassifier(8, 10, loss, path="dense")


def test_a_head_that_cannot_fit_is_refused_with_what_it_needs():
    for gradient, listed in (("dense", "gradient"), ("fused", "screened copy")):
        with pytest.raises(ConfigError, match=f"{listed} .*GiB"):
            MarginClassifier(512, 10**11, q_margin, gradient=gradient)


def test_available_memory_is_known_without_the_linux_file(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(checks.Path, "exists", lambda path: False)
    total = checks.available_memory(cpu)
    assert total is None or total > 2**28
    monkeypatch.setattr(checks.os, "sysconf", mock.Mock(side_effect=ValueError))
    assert checks.available_memory(cpu) is None
    assert checks.available_memory(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"embeddings": torch.ones(6, 5)}, ShapeError, r"\[B, 16\]"),
        ({"embeddings": torch.ones(16)}, ShapeError, r"\[B, 16\]"),
        ({"embeddings": torch.ones(6, 16).int()}, ShapeError, "floating"),
        ({"embeddings": torch.ones(6, 16, device="meta")}, ShapeError, "meta"),
        ({"labels": torch.zeros(5).long()}, ShapeError, "labels"),
        ({"labels": torch.zeros(6)}, ShapeError, "integers"),
        ({"labels": torch.full((6,), 33)}, DataError, "label 33 at row 0"),
        ({"labels": torch.tensor([0, 0, -1, 0, 0, 0])}, DataError, "label -1 at row 2"),
    ],
)
def test_batches_that_cannot_be(change, error, message):
    batch = random_batch(33)
    head = make_head(make_loss(1.5), batch)
    with pytest.raises(error, match=message):
        head(**{"embeddings": batch.embeddings, "labels": batch.labels, **change})


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("path", [*EXACT, "sampled"])
def test_an_embedding_without_direction_is_named(path, value):
    batch = random_batch(33)
    batch.embeddings[3] = value
    head = make_head(make_loss(1.5), batch, path=path)
    with pytest.raises(DataError, match="row 3"):
        head(batch.embeddings, batch.labels)
    assert torch.equal(head.prototypes, batch.prototypes) and head.prototypes.grad is None


@pytest.mark.parametrize(
    ("build", "error", "named"),
    [
        (lambda: MarginClassifier(8, 10, q_margin, path="fast"), ConfigError, "'fast'"),
        (lambda: MarginClassifier(8, 10, q_margin, path=5), ConfigError, "path is 5"),
        (lambda: setattr(q_head, "path", "fast"), ConfigError, "'fast'"),
        (lambda: MarginClassifier(8, 10, q_margin, gradient="none"), ConfigError, "'none'"),
        (lambda: MarginClassifier(8, 10, q_margin, dtype=torch.float16), ConfigError, "float16"),
        (lambda: copy.deepcopy(q_head).half()(torch.ones(1, 8).half(), torch.zeros(1).long()),
         ConfigError, "float16"),
        (lambda: MarginClassifier(8, 0, q_margin), ConfigError, "num_classes is 0"),
        (lambda: MarginClassifier(0, 10, q_margin), ConfigError, "embedding_dim is 0"),
        (lambda: MarginClassifier("8", 10, q_margin), ConfigError, "embedding_dim"),
        (lambda: MarginClassifier(8, 10.0, q_margin), ConfigError, "num_classes"),
        (lambda: MarginClassifier(8, True, q_margin), ConfigError, "num_classes"),
        (lambda: MarginClassifier(8, 10, "q_margin"), ConfigError, "'q_margin'"),
        (lambda: MarginClassifier(8, 10, torch.nn.CrossEntropyLoss()), ConfigError, "CrossEntropy"),
        (lambda: MarginClassifier(8, 10, qmargin.arcface(), path="sparse"), ConfigError, "alpha"),
        (lambda: MarginClassifier(8, 10, qmargin.arcface(), path="top_k"), ConfigError, "alpha"),
        (lambda: MarginClassifier(8, 10, make_loss(1.5, margin=NINE)), ShapeError, "9 values"),
        (lambda: q_head(torch.ones(0, 8), torch.zeros(0).long()), ShapeError, "empty"),
        (lambda: qmargin.Sampled(0.0), ConfigError, "rate is 0"),
        (lambda: qmargin.Sampled(1.5), ConfigError, "rate is 1.5"),
        (lambda: qmargin.TopK(0.0), ConfigError, "percent is 0"),
        (lambda: qmargin.TopK(101.0), ConfigError, "percent is 101"),
        (lambda: qmargin.Sparse(screen_dtype=torch.int8), ConfigError, "screen_dtype"),
        (lambda: qmargin.Chunked(dtype="float16"), ConfigError, "dtype"),
        (lambda: qmargin.Sparse(list_capacity=-1), ConfigError, "list_capacity is -1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(build, error, named):
    with pytest.raises(error, match=named):
        build()


def test_a_margin_that_draws_needs_a_seed_on_several_ranks():
    head = MarginClassifier(4, 6, qmargin.elasticface(), path="dense")
    head.ranks.world = 2
    with pytest.raises(ConfigError, match="seed"):
        checks.check_settings(head, torch.float32)
    head.loss = qmargin.MarginLoss(qmargin.Alpha(1.0), qmargin.ElasticMargin(seed=1), scale=64.0)
    checks.check_settings(head, torch.float32)


def test_kernels_start_on_the_device_of_the_prototypes(monkeypatch):
    """Triton launches on the current device, whichever that is."""
    batch, inside = random_batch(40), []
    head = make_head(make_loss(1.25), batch, path="sparse", gradient="fused")

    @contextmanager
    def on_device(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    def only_inside(name):
        module, launched = head.kernels, getattr(head.kernels, name)

        def launch(*args, **options):
            assert inside, f"{name} is launched on any device"
            return launched(*args, **options)

        monkeypatch.setattr(module, name, launch)

    for part in ("classifier", "optimizers"):
        monkeypatch.setattr(f"qmargin.heads.{part}.on_device", on_device)
    for name in ("refresh_copy", "group_maxima", "solve_lists", "sgd_update", "prototype_gradient"):
        only_inside(name)
    optimizer = ExactSGD(head, lr=0.1)
    head.refresh(force=True)
    head(batch.embeddings.clone().requires_grad_(), batch.labels).backward()
    assert not inside and optimizer.grad_norm() > 0
    optimizer.step()
    assert not inside


def test_the_device_of_a_tensor_becomes_the_current_one(monkeypatch):
    """Only where it is another: asking PyTorch to switch takes longer than looking."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: tensor.get_device())

    def tensor(index):
        return SimpleNamespace(is_cuda=index >= 0, get_device=lambda: index)

    assert devices.on_device(tensor(1)) == 1
    for index in (0, -1):  # the last is a CPU
        assert isinstance(devices.on_device(tensor(index)), nullcontext)
