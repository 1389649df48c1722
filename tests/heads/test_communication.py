"""Bytes that the ranks exchange in a step, call by call, against the formulas of the guide."""

import json

import pytest

from helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import torch.distributed as dist
import qmargin
from qmargin.heads.classifier import MarginClassifier

calls = []

def counted(name, call, find):
    def wrapper(*arguments, **options):
        tensor = find(arguments)
        calls.append((name, tensor.numel() * tensor.element_size()))
        return call(*arguments, **options)
    return wrapper

dist.all_gather = counted("gather", dist.all_gather, lambda given: given[1])
dist.all_reduce = counted("reduce", dist.all_reduce, lambda given: given[0])
cases = {
    "sparse": ("sparse", qmargin.q_margin(alpha=1.5, scale=16.0)),
    "softmax": ("chunked", qmargin.arcface()),
    "blocks": ("chunked", qmargin.q_margin(alpha=1.5, scale=16.0)),
}
found = {}
with start_process_group(30.0, device="cpu"):
    for name, (path, loss) in cases.items():
        torch.manual_seed(0)
        head = MarginClassifier(24, 999, loss, path=path, group=dist.group.WORLD)
        embeddings = torch.randn(6 - RANK, 24, requires_grad=True)
        labels = torch.randint(999, (6 - RANK,))
        calls.clear()
        head(embeddings, labels, [6, 5]).backward()
        found[name] = [list(calls), round(11 * head.last_step.num_candidates)]
    say(json.dumps(found))
"""
ROWS, LARGEST, DIM = 11, 6, 24  # of all ranks; of the one with most
FLOAT, DOUBLE, INTEGER = 4, 8, 8  # bytes


@pytest.fixture(scope="module")
def exchanged() -> dict[str, tuple[list[tuple[str, int]], int]]:
    """By path: calls of a step, the same on both ranks, and the larger number of candidates."""
    first, second = (json.loads(text) for text in run_ranks(SCRIPT, 2))
    assert {name: calls for name, (calls, _) in first.items()} == {
        name: calls for name, (calls, _) in second.items()
    }
    return {
        name: ([(kind, size) for kind, size in calls], max(count, second[name][1]))
        for name, (calls, count) in first.items()
    }


def test_a_sparse_step_exchanges_what_the_guide_says(exchanged) -> None:
    calls, num_candidates = exchanged["sparse"]
    assert num_candidates > 0
    assert calls == [
        ("gather", LARGEST * DIM * FLOAT),  # embeddings
        ("gather", LARGEST * INTEGER),  # labels
        ("reduce", ROWS * FLOAT),  # target cosines
        ("reduce", ROWS * DOUBLE),  # bound of tau
        ("gather", 2 * INTEGER),  # lengths of the lists, and their limit
        ("gather", INTEGER),  # numbers of candidates
        ("gather", num_candidates * INTEGER),  # their rows
        ("gather", num_candidates * FLOAT),  # their scores
        ("reduce", ROWS * DIM * FLOAT),  # gradient of the embeddings
    ]


def test_a_softmax_step_exchanges_what_the_guide_says(exchanged) -> None:
    calls, _ = exchanged["softmax"]
    assert calls == [
        ("gather", LARGEST * DIM * FLOAT),  # embeddings
        ("gather", LARGEST * INTEGER),  # labels
        ("reduce", ROWS * FLOAT),  # target cosines
        ("reduce", ROWS * FLOAT),  # largest cosine
        ("reduce", ROWS * DOUBLE),  # mass
        ("reduce", ROWS * DIM * FLOAT),  # gradient of the embeddings
    ]


def test_a_step_by_blocks_adds_two_sums_per_pass_and_row(exchanged) -> None:
    calls, _ = exchanged["blocks"]
    sizes = [size for _, size in calls[3:-1]]
    begin, *passes, sums, number = [sizes[:3], *sizes[3:]]
    assert begin == [ROWS * DOUBLE] * 3  # a common anchor, the largest logit, a level
    assert set(passes) == {2 * ROWS * DOUBLE} and len(passes) < 12  # mass and slope
    assert (sums, number) == (3 * ROWS * DOUBLE, DOUBLE)  # mass, excess, support; active classes
