"""Passes with kernels against plain ones on the same rounded operands; interpreted on a CPU."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.heads import make_head, make_loss, random_batch, screened
from qmargin.heads import chunked as fused_chunks
from qmargin.heads.chunked import Chunks, FusedChunks, solve
from qmargin.kernels.head_reference import ClassGradient, Target

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pair(alpha, num_classes, scale=16.0):
    batch = random_batch(num_classes, rows=5)
    head = make_head(make_loss(alpha, scale), batch, path=screened("chunked", torch.float16))
    head = head.to(DEVICE)
    head.refresh()
    unit = torch.nn.functional.normalize(batch.embeddings).to(DEVICE)
    return [make(head, unit, batch.labels.to(DEVICE)) for make in (Chunks, FusedChunks)]


def assert_solutions_agree(plain, fused):
    for name in ("others_mass", "excess", "support_size", "num_active", "pulled"):
        found, expected = getattr(fused, name).double(), getattr(plain, name).double()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-3)
    assert float(fused.mass_error.max()) < 1e-4


@pytest.mark.parametrize(
    ("num_classes", "alpha"), [(1, 1.25), (33, 1.0), (33, 2.0), (330, 1.0), (330, 1.25), (330, 2.0)]
)
def test_solution_and_gradient(alpha, num_classes, monkeypatch):
    monkeypatch.setitem(fused_chunks.FUSED_LOGITS, "cuda", 5 * 288)  # several blocks
    monkeypatch.setattr(fused_chunks, "NUM_COARSE", 4)
    plain, fused = make_pair(alpha, num_classes)
    target = Target(
        *torch.tensor([[3.0, -1.0, 9.0, 0.0, 15.0], [-0.8] * 5], device=DEVICE).double()
    )
    expected, found = (solve(chunks, target, pulls=True) for chunks in (plain, fused))
    assert_solutions_agree(expected, found)
    if alpha > 1.0:  # a sparse step may leave its maxima
        fused.group_maxima = fused.head.kernels.group_maxima(*fused.batch)
        assert_solutions_agree(expected, solve(fused, target, pulls=True))
        assert fused.group_maxima is None
    weighted = torch.randn_like(plain.embeddings).half()
    columns, rows = plain.labels.int().sort(stable=True)
    targets = ClassGradient(columns, rows, torch.randn(5, device=DEVICE))
    pushed = []
    for chunks in (plain, fused):
        level = (expected.anchor, expected.level)
        parts = list(chunks.pushes(*level, weighted, targets))
        assert [part[0].start for part in parts] == [where.start for where in chunks.ranges()]
        pushed.append(torch.cat([part[1] for part in parts]))
    scale = float(pushed[0].abs().max())
    torch.testing.assert_close(pushed[1] / scale, pushed[0] / scale, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("alpha", "scale"), [(1.25, 1.0), (2.0, 0.02)])
def test_a_sample_starts_the_search(alpha, scale):
    plain, fused = make_pair(alpha, 1100, scale)
    plain.labels[0] = fused.labels[0] = 16 * 17  # in the sample
    target = Target(*torch.tensor([[0.5 * scale] * 5, [-0.8] * 5], device=DEVICE).double())
    few = [chunks.sample(16) for chunks in (plain, fused)]
    level = (target.logits, torch.full_like(target.logits, 0.15 if alpha < 2.0 else 0.01))
    expected, found = (chunks.row_sums(*level) for chunks in few)
    torch.testing.assert_close(found.mass, expected.mass, atol=0.0, rtol=1e-4)
    torch.testing.assert_close(found.slope, expected.slope, atol=0.0, rtol=1e-4)
    expected, found = (chunks.maxima().amax(1) for chunks in few)
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=0.0)
    expected, found = (solve(chunks, target, pulls=True) for chunks in (plain, fused))
    assert_solutions_agree(expected, found)


@pytest.mark.parametrize("scale", [16.0, 200.0])
def test_a_softmax_whose_largest_cosine_comes_late(scale, monkeypatch):
    """The guess from the first block can be so low that weights are cut off; that is found out."""
    monkeypatch.setitem(fused_chunks.FUSED_LOGITS, "cuda", 5 * 64)
    monkeypatch.setattr(fused_chunks, "GUESS_CLASSES", 64)
    plain, fused = make_pair(1.0, 700, scale)
    for chunks in (plain, fused):
        chunks.head.prototypes.data[650] = 2.0 * chunks.embeddings[1]
        chunks.labels[1] = 0
    plain.head.refresh(force=True)
    expected, found = plain.softmax_sums(pulls=True), fused.softmax_sums(pulls=True)
    assert found.verify() == (scale == 16.0)
    if not found.verify():
        found = fused.softmax_sums(pulls=True, is_certain=True)
        assert found.verify()
    # each relative to a cosine of its own
    factor = ((found.top - expected.top).double() * scale).exp()
    torch.testing.assert_close(factor * found.mass, expected.mass, atol=0, rtol=1e-4)
    pulled = factor[:, None].float() * found.pulled
    torch.testing.assert_close(pulled, expected.pulled, atol=1e-3, rtol=2e-3)
