"""Every path against the float64 definition, and what is special about each."""

import copy

import pytest
import torch

import qmargin
from helpers.heads import (
    Batch,
    LargestTensor,
    Outcome,
    assert_same,
    every_class,
    fused_gradient,
    make_head,
    make_loss,
    random_batch,
    step,
    truth_of,
)
from qmargin.heads import chunked as chunks
from qmargin.heads.dense import largest_left_out, sample_classes
from qmargin.heads.optimizers import ExactSGD
from qmargin.kernels import head_reference

NUM_CLASSES = (1, 2, 32, 33, 97, 1031)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
ALL_ALPHAS = ("dense", "chunked", "sampled")
SPARSE_ALPHAS = ("sparse", "top_k")
MARGINS = {
    "prior": qmargin.PriorMargin(0.1),
    "cosine": qmargin.CosineMargin(0.3),
    "angular": qmargin.AngularMargin(0.4),
    "sum": qmargin.PriorMargin(0.05) + qmargin.AngularMargin(0.2),
    "per class": qmargin.PriorMargin(qmargin.PerClass(torch.linspace(0.0, 0.2, 97))),
    "adaface": qmargin.AdaFaceMargin(),
    "magface": qmargin.MagFaceMargin(lower_norm=1.0, upper_norm=20.0),
}
CASES = [(path, alpha) for path in ALL_ALPHAS for alpha in (0.5, 1.0)] + [
    (path, alpha) for path in ALL_ALPHAS + SPARSE_ALPHAS for alpha in (1.05, 1.25, 2.0, 3.0)
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of classes, the last one incomplete."""
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", 1 << 10)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("path", "alpha"), CASES)
def test_path_matches_the_definition(path: str, alpha: float, dtype: torch.dtype) -> None:
    for index, num_classes in enumerate(NUM_CLASSES):
        for scale in (3.0, 24.0):
            batch = random_batch(num_classes, dim=(8, 64, 100)[index % 3], seed=index)
            loss = make_loss(alpha, scale)
            head = make_head(loss, batch, path=every_class(path), dtype=dtype)
            outcome = step(head, batch)
            truth = truth_of(loss, batch)
            note = (num_classes, scale)
            assert_same(outcome, truth, tolerance=TOLERANCE[dtype], note=note)
            assert outcome.stats.path == path
            assert outcome.stats.mass_error <= (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("path", ALL_ALPHAS + SPARSE_ALPHAS)
def test_every_margin_works_on_every_path(path: str, margin: str) -> None:
    batch = random_batch(97, seed=5)
    loss = make_loss(1.25, margin=copy.deepcopy(MARGINS[margin]))
    truth = truth_of(copy.deepcopy(loss), batch)
    head = make_head(loss, batch, path=every_class(path), dtype=torch.float64)
    assert_same(step(head, batch), truth, tolerance=1e-9)
    if margin == "adaface":  # its running statistics saw the batch once
        once = copy.deepcopy(MARGINS[margin])
        norms = batch.embeddings.double().norm(dim=1)
        once(torch.zeros(6).double(), 1.0, labels=batch.labels, norms=norms)
        torch.testing.assert_close(loss.margin.running_mean, once.running_mean)


@pytest.mark.parametrize("path", ["sparse", "chunked", "paper", "dense"])
def test_a_learnable_margin_gets_its_gradient(path: str) -> None:
    batch = random_batch(97, seed=3)
    gradients = []
    for chosen in ("truth", path):
        margin = torch.nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        loss = make_loss(1.5, margin=qmargin.PriorMargin(margin))
        if chosen == "truth":
            truth_of(loss, batch)
        else:
            step(make_head(loss, batch, path=chosen, dtype=torch.float64), batch)
        gradients.append(margin.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("gradient", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("path", ALL_ALPHAS + SPARSE_ALPHAS)
def test_every_path_leaves_every_kind_of_gradient(path: str, gradient: str) -> None:
    batch = random_batch(257, seed=1)
    loss = make_loss(1.5)
    options = {"path": every_class(path), "gradient": gradient, "dtype": torch.float64}
    head = make_head(loss, batch, **options)
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-9)
    head(batch.embeddings.double(), batch.labels).backward()
    left = head.prototypes.grad
    assert (left is None) == (gradient == "fused") == (head.fused_gradient is not None)
    if gradient == "sparse":
        assert left.is_sparse


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("path", ["chunked", "dense", "sampled"])
def test_a_fused_optimizer_steps_what_a_path_left(path: str, alpha: float) -> None:
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
def test_no_matrix_of_all_cosines_and_no_gradient_matrix(
    path: str, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_reference, "BLOCK_CLASSES", 256)
    monkeypatch.setattr(head_reference, "BLOCK_ENTRIES", 512)
    batch = random_batch(3000, dim=16, rows=20)
    head = make_head(make_loss(alpha, 40.0), batch, path=path, gradient="fused")
    head.refresh()
    with LargestTensor() as watch:
        head(batch.embeddings.clone().requires_grad_(), batch.labels).backward()
    assert watch.num_elements < 3000 * 16 / 2  # neither [B, k] nor [k, d]
    with LargestTensor() as watch:
        for _ in head.fused_gradient.blocks() if path == "chunked" else ():
            pass
    assert watch.num_elements < 3000 * 16 / 2


# chunked


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 3.0])
def test_block_size_does_not_matter(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(1031, seed=2)
    loss = make_loss(alpha)
    outcomes = []
    for limit in (1, 1 << 12, 1 << 30):
        monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", limit)
        outcomes.append(step(make_head(loss, batch, path="chunked", dtype=torch.float64), batch))
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0], tolerance=1e-10)
        assert outcome.stats.support_mean == outcomes[0].stats.support_mean
        assert outcome.stats.active_share == outcomes[0].stats.active_share


@pytest.mark.parametrize("alpha", [1.0, 1.25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_screened", [False, True])
def test_half_operands_give_the_loss_of_the_rounded_vectors(
    alpha: float, dtype: torch.dtype, is_screened: bool
) -> None:
    """The others' cosines are those of the rounded operands; the target's are exact."""
    batch = random_batch(257, dim=64, seed=4)
    loss = make_loss(alpha)
    path = qmargin.Chunked(dtype=dtype, screen_dtype=dtype if is_screened else None)
    head = make_head(loss, batch, path=path)
    outcome = step(head, batch)
    unit = torch.nn.functional.normalize(batch.embeddings)
    prototypes = torch.nn.functional.normalize(batch.prototypes)
    cosines = unit.to(dtype).double() @ prototypes.to(dtype).double().t()
    own = (unit.double() * prototypes[batch.labels].double()).sum(1)
    cosines = cosines.scatter(1, batch.labels[:, None], own[:, None])
    expected = loss(cosines, batch.labels).mean()
    torch.testing.assert_close(outcome.loss.double(), expected, rtol=1e-5, atol=1e-6)
    rounding = torch.finfo(dtype).eps
    assert_same(outcome, truth_of(loss, batch), tolerance=50 * rounding)


def test_small_posteriors_survive_half_precision() -> None:
    """Thousands of classes of equal, tiny posterior: rounded alone, each would vanish."""
    batch = random_batch(5000, dim=8, rows=2)
    prototypes = torch.zeros(5000, 8)
    prototypes[:, 0], prototypes[0, 1], prototypes[0, 0] = 1.0, 1.0, 0.0
    embeddings = torch.zeros(2, 8)
    embeddings[:, 1] = 1.0
    batch = Batch(embeddings, torch.zeros(2, dtype=torch.int64), prototypes)
    loss = make_loss(1.0, 15.0, qmargin.CosineMargin(0.0))  # others at e^-15 of the target
    head = make_head(loss, batch, path=qmargin.Chunked(dtype=torch.float16))
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-2)


# sampled


def test_a_sample_holds_every_positive_and_nothing_twice() -> None:
    labels = torch.tensor([5, 900, 5, 17])
    for seed in range(5):
        classes = sample_classes(labels, 1000, rate=0.05, seed=seed)
        assert len(classes) == 50
        assert classes.tolist() == sorted(set(classes.tolist()))
        assert {5, 17, 900} <= set(classes.tolist())
    assert sample_classes(labels, 1000, rate=0.002, seed=0).tolist() == [5, 17, 900]
    assert len(sample_classes(labels, 1000, rate=1.0, seed=0)) == 1000


def test_every_other_class_is_as_likely_as_the_next() -> None:
    counts = torch.zeros(50)
    for seed in range(200):
        counts[sample_classes(torch.tensor([3]), 50, rate=0.2, seed=seed)] += 1
    expected = 200 * 9 / 49
    others = counts[torch.arange(50) != 3]
    assert counts[3] == 200
    assert ((others - expected).abs() < 5 * expected**0.5).all()


def test_sampled_is_the_dense_loss_on_the_sample() -> None:
    batch = random_batch(257, seed=6)
    margin = qmargin.PriorMargin(qmargin.PerClass(torch.linspace(0.0, 0.3, 257)))
    loss = make_loss(1.5, margin=margin)
    head = make_head(loss, batch, path=qmargin.Sampled(0.3, seed=11), dtype=torch.float64)
    seed = copy.deepcopy(head).next_seed()
    classes = sample_classes(batch.labels, 257, rate=0.3, seed=seed)
    own = qmargin.PriorMargin(qmargin.PerClass(margin.margin.values[classes]))
    truth = truth_of(make_loss(1.5, margin=own), batch, classes)
    outcome = step(head, batch)
    assert_same(outcome, truth, tolerance=1e-9)
    assert outcome.stats.num_candidates == len(classes) == int(0.3 * 257)
    is_sampled = torch.zeros(257, dtype=torch.bool).index_fill_(0, classes, True)
    assert (outcome.prototypes[~is_sampled] == 0).all()


def test_samples_go_on_after_a_restart() -> None:
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
def test_the_paper_widens_what_its_check_refuses(
    percent: float, alpha: float, scale: float
) -> None:
    """M8: whatever the percentage, the result is that of all classes."""
    batch = random_batch(1031, seed=7)
    loss = make_loss(alpha, scale)
    head = make_head(loss, batch, path=qmargin.TopK(percent), dtype=torch.float64)
    outcome = step(head, batch)
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-9)
    stats = outcome.stats
    if percent == 100.0 or ((alpha, scale) == (2.0, 4.0) and percent == 5.0):
        assert stats.num_overflowed == 0
        assert "passed" in stats.reason
    if scale == 2.0 and percent < 100.0:
        assert stats.num_overflowed > 0
        assert "doubled" in stats.reason
        assert stats.num_candidates > percent / 100 * 1031 + 1


def test_classes_that_tie_in_half_precision_are_not_lost() -> None:
    """Hundreds of cosines round to one float16; the sort keeps some of them, by chance."""
    prototypes = torch.zeros(400, 4)
    prototypes[:, 0] = 1.0
    prototypes[:, 1] = torch.linspace(0.0, 0.01, 400)  # cosines from 1 - 5e-5 to 1
    batch = Batch(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0]), prototypes)
    assert len(torch.nn.functional.normalize(prototypes)[:, 0].half().unique()) == 1
    for alpha, scale in ((1.25, 30.0), (2.0, 1e3), (2.0, 1e5)):
        loss = make_loss(alpha, scale, qmargin.CosineMargin(1.0))
        head = make_head(loss, batch, path=qmargin.TopK(1.0), dtype=torch.float64)
        assert_same(step(head, batch), truth_of(loss, batch), tolerance=1e-9, note=scale)


def test_the_bound_of_what_a_half_sort_left_out_holds() -> None:
    values = torch.cat([torch.linspace(-1, 1, 20001), torch.logspace(-9, 0, 5000)]).double()
    rounded = values.half()
    assert (values <= largest_left_out(rounded, torch.float64)).all()
    assert (largest_left_out(rounded, torch.float16) == rounded.double()).all()


# paths against each other


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 2.0])
def test_paths_agree_with_each_other(alpha: float) -> None:
    """What they say about the step agrees too: support, active classes."""
    batch = random_batch(1031, dim=64, rows=12, seed=9)
    loss = make_loss(alpha, 20.0)
    outcomes: dict[str, Outcome] = {}
    for path in ("dense", "chunked", "sparse", "paper"):
        head = make_head(loss, batch, path=path, dtype=torch.float64)
        outcomes[path] = step(head, batch)
    for path, outcome in outcomes.items():
        assert_same(outcome, outcomes["dense"], tolerance=1e-10, note=path)
        for name in ("support_mean", "support_max", "active_share"):
            expected = getattr(outcomes["dense"].stats, name)
            assert getattr(outcome.stats, name) == pytest.approx(expected), (path, name)


def test_a_fused_gradient_can_be_made_twice() -> None:
    batch = random_batch(257)
    head = make_head(make_loss(1.0), batch, path="chunked", gradient="fused")
    head(batch.embeddings, batch.labels).backward()
    left = head.fused_gradient
    first = fused_gradient(head)
    head.fused_gradient = left
    assert torch.equal(first, fused_gradient(head))
    torch.testing.assert_close(left.norm().float(), first.norm())
    assert bool(left.is_finite())
