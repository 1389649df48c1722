"""Reference measures on the Triton kernels: in the interpreter, where there is no GPU."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import qmargin
from helpers.heads import assert_same, make_head, random_batch, screened, step, truth_of
from qmargin.kernels import dispatch
from qmargin.kernels.triton import head as support

if torch.cuda.is_available():
    pytest.skip("test_paths_gpu.py runs them for real", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's masked lanes
    pytest.mark.filterwarnings("ignore::qmargin.errors.MarginWarning"),
]
CLASSES, DIM = 200, 16
COUNTS = torch.randint(1, 400, (CLASSES,), generator=torch.Generator().manual_seed(1))
REFERENCES = {
    "prior": lambda: qmargin.ClassPrior(COUNTS, 0.5),
    "pairs": lambda: qmargin.LookAlike(0.5, 0.2),
    "quality": lambda: qmargin.Quality(0.4),
    "all": lambda: (
        qmargin.ClassPrior(COUNTS, 0.7, margin_power=0.25)
        + qmargin.LookAlike(0.3, 0.2, damping=0.9, split_threshold=0.5)
        + qmargin.Quality(0.4)
    ),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(dispatch, "may_interpret", True)
    monkeypatch.setattr(support, "ROOM", 32)


def make_batch():
    batch = random_batch(CLASSES, DIM, 4)
    batch.prototypes[40:60] = batch.prototypes[:20] + 0.3 * batch.prototypes[100:120]
    batch.prototypes[batch.labels - 1] = batch.prototypes[batch.labels] * 1.5 + 0.1
    return batch


@pytest.fixture
def batch():
    return make_batch()


def make_loss(alpha, name, margin=None):
    margin = qmargin.PriorMargin(0.03) if margin is None else margin
    scale, reference = 3.0 if alpha == 3.0 else 16.0, REFERENCES[name]()
    return qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=scale, reference=reference)


def half_head(loss, batch, path, limit=0, **options):
    taken = replace(screened(path, torch.float16), matrix_logits=limit)
    head = make_head(copy.deepcopy(loss), batch, path=taken, **options)
    assert head.kernels.__name__.endswith("triton.head")
    return head


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("alpha", [1.25, 1.3, 2.0, 3.0])
def test_sparse_steps(alpha, name, batch):
    """Whole steps by kernels, with lengths of lists that are unknown, and too short."""
    loss = make_loss(alpha, name)
    head = half_head(loss, batch, "sparse")
    head.loss.eval()
    quality = [part for part in head.loss.modules() if isinstance(part, qmargin.Quality)]
    for part in quality:
        part.train()
    assert_same(step(head, batch), truth_of(copy.deepcopy(loss), batch), tolerance=3e-5)
    assert head.last_step.path == "sparse"
    for part in quality:
        part.eval()
    truth = truth_of(copy.deepcopy(head.loss), batch)
    head.list_lengths = head.list_lengths._replace(candidates=1)
    assert_same(step(head, batch), truth, tolerance=3e-5)


def test_a_step_that_is_redone_counts_its_rows_once(batch):
    head = half_head(make_loss(1.25, "quality"), batch, "sparse", gradient="fused")
    step(head, batch)
    head.list_lengths = head.list_lengths._replace(candidates=1)
    step(head, batch)
    assert int(head.loss.reference.num_batches) == 2
    head.path = replace(head.path, list_capacity=0)
    step(head, batch)
    assert int(head.loss.reference.num_batches) == 3
    head.path = replace(head.path, list_capacity=100)
    step(head, batch)
    head(batch.embeddings, batch.labels, speculative=True)
    head.discard()
    assert int(head.loss.reference.num_batches) == 4


@pytest.mark.parametrize("name", ["prior", "all"])
def test_margins_without_a_closed_form_and_the_matrix(name, batch):
    """Steps that apply the margin outside the kernels, and steps that may go by one matrix."""
    margin = qmargin.PriorMargin(qmargin.PerClass(torch.full((CLASSES,), 0.03)))
    for loss in (make_loss(1.5, name, margin), make_loss(1.5, name), make_loss(1.5, "quality")):
        truth = truth_of(copy.deepcopy(loss), batch)
        for limit in (0, 1 << 29):
            head = half_head(loss, batch, "sparse", limit)
            assert_same(step(head, batch), truth, tolerance=3e-5)
            by_matrix = limit and isinstance(loss.reference, qmargin.Quality)
            assert ("matrix" in head.last_step.reason) == bool(by_matrix)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.3, 2.0])
def test_blocks(alpha, name, batch):
    loss = make_loss(alpha, name)
    truth = truth_of(copy.deepcopy(loss), batch)
    head = half_head(loss, batch, "chunked")
    found = step(head, batch)
    assert_same(found, truth, tolerance=1e-2)
    exact = make_head(copy.deepcopy(loss), batch, path="chunked", dtype=torch.float64)
    exact = step(exact, batch)
    assert found.stats.support_mean == pytest.approx(exact.stats.support_mean, abs=1.0)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
def test_rows_of_all_cosines(alpha, name, batch):
    """Losses on ``[B, k]`` cosines by the kernels of rows, which take every class's measure."""
    unit = torch.nn.functional.normalize
    cosines = unit(batch.embeddings) @ unit(batch.prototypes).t()
    given = (batch.labels, batch.embeddings.norm(dim=1), batch.prototypes)
    loss, found = make_loss(alpha, name), []
    for one, dtype in ((loss, torch.float32), (copy.deepcopy(loss), torch.float64)):
        rows = cosines.to(dtype, copy=True).requires_grad_()
        value = one(rows, given[0], given[1].to(dtype), given[2].to(dtype))
        value.backward()
        found.append((value.detach().double(), rows.grad.double()))
    torch.testing.assert_close(found[0], found[1], atol=3e-5, rtol=3e-5)
