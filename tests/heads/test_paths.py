"""Every path against the float64 definition, and what is special about each."""

import copy

import pytest
import torch

import qmargin
from helpers.heads import (
    Batch,
    LargestTensor,
    assert_same,
    every_class,
    fused_gradient,
    make_head,
    make_loss,
    random_batch,
    step,
    truth_of,
)
from qmargin.heads import chunked
from qmargin.heads.dense import largest_left_out, sample_classes
from qmargin.heads.optimizers import ExactSGD
from qmargin.kernels import head_reference

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
ALL_ALPHAS = ("dense", "chunked", "sampled")
EVERY = (*ALL_ALPHAS, "sparse", "top_k")
MARGINS = {
    "prior": qmargin.PriorMargin(0.1),
    "cosine": qmargin.CosineMargin(0.3),
    "angular": qmargin.AngularMargin(0.4),
    "sum": qmargin.PriorMargin(0.05) + qmargin.AngularMargin(0.2),
    "per class": qmargin.PriorMargin(qmargin.PerClass(torch.linspace(0.0, 0.2, 97))),
    "adaface": qmargin.AdaFaceMargin(),
    "magface": qmargin.MagFaceMargin(lower_norm=1.0, upper_norm=20.0),
}
CASES = [(path, alpha) for path in ALL_ALPHAS for alpha in (0.5, 1.0)]
CASES += [(path, alpha) for path in EVERY for alpha in (1.05, 1.25, 2.0, 3.0)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of classes, the last one incomplete."""
    monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", 1 << 10)


def wide_head(loss, batch, path, **options):
    return make_head(loss, batch, path=every_class(path), dtype=torch.float64, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("path", "alpha"), CASES)
def test_path_matches_the_definition(path, alpha, dtype):
    for index, num_classes in enumerate((1, 2, 32, 33, 97, 1031)):
        batch = random_batch(num_classes, dim=(8, 64, 100)[index % 3], seed=index)
        for scale in (3.0, 24.0):
            loss = make_loss(alpha, scale)
            outcome = step(make_head(loss, batch, path=every_class(path), dtype=dtype), batch)
            note = (num_classes, scale)
            assert_same(outcome, truth_of(loss, batch), tolerance=TOLERANCE[dtype], note=note)
            assert outcome.stats.path == path
            assert outcome.stats.mass_error <= (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("path", EVERY)
def test_every_margin_works_on_every_path(path, margin):
    batch = random_batch(97, seed=5)
    ours, theirs = (make_loss(1.25, margin=copy.deepcopy(MARGINS[margin])) for _ in range(2))
    truth = truth_of(theirs, batch)
    assert_same(step(wide_head(ours, batch, path), batch), truth, tolerance=1e-9)
    if margin == "adaface":  # its running statistics saw the batch once
        torch.testing.assert_close(ours.margin.running_mean, theirs.margin.running_mean)


@pytest.mark.parametrize("path", ["sparse", "chunked", "paper", "dense"])
def test_a_learnable_margin_gets_its_gradient(path):
    batch = random_batch(97, seed=3)
    margins = [torch.nn.Parameter(torch.tensor(0.1, dtype=torch.float64)) for _ in range(2)]
    losses = [make_loss(1.5, margin=qmargin.PriorMargin(margin)) for margin in margins]
    truth_of(losses[0], batch)
    step(wide_head(losses[1], batch, path), batch)
    torch.testing.assert_close(margins[1].grad, margins[0].grad, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("gradient", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("path", EVERY)
def test_every_path_leaves_every_kind_of_gradient(path, gradient):
    batch, loss = random_batch(257, seed=1), make_loss(1.5)
    head = wide_head(loss, batch, path, gradient=gradient)
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-9)
    head(batch.embeddings.double(), batch.labels).backward()
    left = head.prototypes.grad
    assert (left is None) == (gradient == "fused") == (head.fused_gradient is not None)
    assert left is None or left.is_sparse == (gradient == "sparse")


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("path", ALL_ALPHAS)
def test_a_fused_optimizer_steps_what_a_path_left(path, alpha):
    """Blocks are stepped while later ones are still to be computed."""
    batch = random_batch(1031, seed=1)
    options = {"path": path, "dtype": torch.float64}
    fused = make_head(make_loss(alpha), batch, gradient="fused", **options)
    plain = make_head(make_loss(alpha), batch, **options)
    optimizers = ExactSGD(fused, 0.1), torch.optim.SGD([plain.prototypes], 0.1, 0.9, 0, 5e-4)
    for _ in range(3):
        for head, optimizer in zip((fused, plain), optimizers, strict=True):
            optimizer.zero_grad()
            head(batch.embeddings.double(), batch.labels).backward()
            optimizer.step()
    torch.testing.assert_close(fused.prototypes, plain.prototypes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("path", "alpha"), [("chunked", 1.0), ("chunked", 1.5), ("sparse", 1.5)])
def test_no_matrix_of_all_cosines_and_no_gradient_matrix(path, alpha, monkeypatch):
    monkeypatch.setattr(head_reference, "BLOCK_CLASSES", 256)
    monkeypatch.setattr(head_reference, "BLOCK_ENTRIES", 512)
    batch = random_batch(6000, dim=16, rows=20)
    head = make_head(make_loss(alpha, 40.0), batch, path=path, gradient="fused")
    head.refresh()
    with LargestTensor() as watch:
        head(batch.embeddings.clone().requires_grad_(), batch.labels).backward()
        for _ in head.fused_gradient.blocks() if path == "chunked" else ():
            pass
    assert watch.num_elements < 6000 * 16 / 2  # neither [B, k] nor [k, d]


# chunked


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 3.0])
def test_block_size_does_not_matter(alpha, monkeypatch):
    batch, loss, outcomes = random_batch(1031, seed=2), make_loss(alpha), []
    for limit in (1, 1 << 12, 1 << 30):
        monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", limit)
        outcomes.append(step(wide_head(loss, batch, "chunked"), batch))
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0], tolerance=1e-10)
        for name in ("support_mean", "active_share"):
            assert getattr(outcome.stats, name) == getattr(outcomes[0].stats, name)


@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_screened", [False, True])
def test_half_operands_give_the_loss_of_the_rounded_vectors(alpha, dtype, is_screened):
    """The others' cosines are those of the rounded operands; the target's are exact."""
    batch, loss = random_batch(257, dim=64, seed=4), make_loss(alpha)
    path = qmargin.Chunked(dtype=dtype, screen_dtype=dtype if is_screened else None)
    outcome = step(make_head(loss, batch, path=path), batch)
    unit = torch.nn.functional.normalize(batch.embeddings)
    prototypes = torch.nn.functional.normalize(batch.prototypes)
    cosines = unit.to(dtype).double() @ prototypes.to(dtype).double().t()
    own = (unit.double() * prototypes[batch.labels].double()).sum(1)
    cosines = cosines.scatter(1, batch.labels[:, None], own[:, None])
    expected = loss(cosines, batch.labels).mean()
    torch.testing.assert_close(outcome.loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert_same(outcome, truth_of(loss, batch), tolerance=50 * torch.finfo(dtype).eps)


def test_small_posteriors_survive_half_precision():
    """Thousands of classes of equal, tiny posterior: rounded alone, each would vanish."""
    prototypes, embeddings = torch.zeros(5000, 8), torch.zeros(2, 8)
    prototypes[1:, 0] = prototypes[0, 1] = embeddings[:, 1] = 1.0
    batch = Batch(embeddings, torch.zeros(2, dtype=torch.int64), prototypes)
    loss = make_loss(1.0, 15.0, qmargin.CosineMargin(0.0))  # others at e^-15 of the target
    head = make_head(loss, batch, path=qmargin.Chunked(dtype=torch.float16))
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-2)


# sampled


def test_a_sample_holds_every_positive_and_nothing_twice():
    labels = torch.tensor([5, 900, 5, 17])
    for seed in range(5):
        classes = sample_classes(labels, 1000, rate=0.05, seed=seed).tolist()
        assert len(classes) == 50 and classes == sorted(set(classes))
        assert {5, 17, 900} <= set(classes)
    assert sample_classes(labels, 1000, rate=0.002, seed=0).tolist() == [5, 17, 900]
    assert len(sample_classes(labels, 1000, rate=1.0, seed=0)) == 1000


def test_every_other_class_is_as_likely_as_the_next():
    counts = torch.zeros(50)
    for seed in range(200):
        counts[sample_classes(torch.tensor([3]), 50, rate=0.2, seed=seed)] += 1
    expected = 200 * 9 / 49
    others = counts[torch.arange(50) != 3]
    assert counts[3] == 200 and ((others - expected).abs() < 5 * expected**0.5).all()


def test_sampled_is_the_dense_loss_on_the_sample():
    batch = random_batch(257, seed=6)
    margin = qmargin.PriorMargin(qmargin.PerClass(torch.linspace(0.0, 0.3, 257)))
    loss = make_loss(1.5, margin=margin)
    head = make_head(loss, batch, path=qmargin.Sampled(0.3, seed=11), dtype=torch.float64)
    seed = copy.deepcopy(head).next_seed()
    classes = sample_classes(batch.labels, 257, rate=0.3, seed=seed)
    own = qmargin.PriorMargin(qmargin.PerClass(margin.margin.values[classes]))
    outcome = step(head, batch)
    assert_same(outcome, truth_of(make_loss(1.5, margin=own), batch, classes), tolerance=1e-9)
    assert outcome.stats.num_candidates == len(classes) == int(0.3 * 257)
    is_sampled = torch.zeros(257, dtype=torch.bool).index_fill_(0, classes, True)
    assert (outcome.prototypes[~is_sampled] == 0).all()


def test_samples_go_on_after_a_restart():
    batch = random_batch(257)
    head = make_head(make_loss(1.0), batch, path=qmargin.Sampled(0.1, seed=3))
    losses = [head(batch.embeddings, batch.labels).item() for _ in range(2)]
    state = copy.deepcopy(head.state_dict())
    losses += [head(batch.embeddings, batch.labels).item() for _ in range(3)]
    resumed = make_head(make_loss(1.0), batch, path=qmargin.Sampled(0.1))
    resumed.load_state_dict(state)
    assert [resumed(batch.embeddings, batch.labels).item() for _ in range(3)] == losses[2:]
    assert len(set(losses)) == 5


# paper


@pytest.mark.parametrize("percent", [1.0, 5.0, 100.0])
@pytest.mark.parametrize(("alpha", "scale"), [(1.25, 2.0), (1.25, 30.0), (2.0, 4.0)])
def test_the_paper_widens_what_its_check_refuses(percent, alpha, scale):
    """M8: whatever the percentage, the result is that of all classes."""
    batch, loss = random_batch(1031, seed=7), make_loss(alpha, scale)
    outcome = step(wide_head(loss, batch, qmargin.TopK(percent)), batch)
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-9)
    stats = outcome.stats
    if percent == 100.0 or ((alpha, scale) == (2.0, 4.0) and percent == 5.0):
        assert stats.num_overflowed == 0 and "passed" in stats.reason
    if scale == 2.0 and percent < 100.0:
        assert stats.num_overflowed > 0 and "doubled" in stats.reason
        assert stats.num_candidates > percent / 100 * 1031 + 1


def test_classes_that_tie_in_half_precision_are_not_lost():
    """Hundreds of cosines round to one float16; the sort keeps some of them, by chance."""
    prototypes = torch.zeros(400, 4)
    prototypes[:, 0] = 1.0
    prototypes[:, 1] = torch.linspace(0.0, 0.01, 400)  # cosines from 1 - 5e-5 to 1
    batch = Batch(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0]), prototypes)
    assert len(torch.nn.functional.normalize(prototypes)[:, 0].half().unique()) == 1
    for alpha, scale in ((1.25, 30.0), (2.0, 1e3), (2.0, 1e5)):
        loss = make_loss(alpha, scale, qmargin.CosineMargin(1.0))
        outcome = step(wide_head(loss, batch, qmargin.TopK(1.0)), batch)
        assert_same(outcome, truth_of(loss, batch), tolerance=1e-9, note=scale)


def test_the_bound_of_what_a_half_sort_left_out_holds():
    values = torch.cat([torch.linspace(-1, 1, 20001), torch.logspace(-9, 0, 5000)]).double()
    rounded = values.half()
    assert (values <= largest_left_out(rounded, torch.float64)).all()
    assert (largest_left_out(rounded, torch.float16) == rounded.double()).all()


# paths against each other


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 2.0])
def test_paths_agree_with_each_other(alpha):
    """What they say about the step agrees too: support, active classes."""
    batch, loss = random_batch(1031, dim=64, rows=12, seed=9), make_loss(alpha, 20.0)
    dense = step(wide_head(loss, batch, "dense"), batch)
    for path in ("chunked", "sparse", "paper"):
        outcome = step(wide_head(loss, batch, path), batch)
        assert_same(outcome, dense, tolerance=1e-10, note=path)
        for name in ("support_mean", "support_max", "active_share"):
            expected = getattr(dense.stats, name)
            assert getattr(outcome.stats, name) == pytest.approx(expected), (path, name)


def test_a_fused_gradient_can_be_made_twice():
    batch = random_batch(257)
    head = make_head(make_loss(1.0), batch, path="chunked", gradient="fused")
    head(batch.embeddings, batch.labels).backward()
    left = head.fused_gradient
    first = fused_gradient(head)
    head.fused_gradient = left
    assert torch.equal(first, fused_gradient(head))
    torch.testing.assert_close(left.norm().float(), first.norm())
    assert bool(left.is_finite())
