"""Bytes that the ranks exchange in a step, call by call, against the formulas of the guide."""

import json

import pytest

from helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

SCRIPT = """
import json
import torch.distributed as dist
import qmargin

calls = []

def counted(name, call, find):
    def wrapper(*arguments, **options):
        tensor = find(arguments)
        calls.append((name, tensor.numel() * tensor.element_size()))
        return call(*arguments, **options)
    return wrapper

for name in ("all_gather_single", "all_gather_into_tensor"):  # the first from torch 2.13 on
    if hasattr(dist, name):
        setattr(dist, name, counted("gather", getattr(dist, name), lambda given: given[1]))
dist.all_reduce = counted("reduce", dist.all_reduce, lambda given: given[0])
entmax, softmax = qmargin.q_margin(alpha=1.5, scale=16.0), qmargin.arcface()
cases = {"sparse": entmax, "softmax": softmax, "chunked": entmax}
found = {}
with start_process_group(30.0, device="cpu"):
    for name, loss in cases.items():
        torch.manual_seed(0)
        path = "chunked" if name == "softmax" else name
        head = qmargin.MarginClassifier(24, 999, loss, path=path, group=dist.group.WORLD)
        embeddings = torch.randn(6 - RANK, 24, requires_grad=True)
        labels = torch.randint(999, (6 - RANK,))
        calls.clear()
        head(embeddings, labels, [6, 5]).backward()
        found[name] = [list(calls), round(11 * head.last_step.num_candidates)]
    torch.manual_seed(0)
    head = qmargin.MarginClassifier(24, 999, entmax, path="sparse", group=dist.group.WORLD)
    head(torch.randn(32, 24), torch.randint(999, (32,)))
    found["lists"] = [head.last_step.num_candidates, head.last_step.support_mean]
    say(json.dumps(found))
"""
ROWS, LARGEST, DIM = 11, 6, 24  # of all ranks; of the one with most
FLOAT, DOUBLE, INTEGER = 4, 8, 8  # bytes
FIRST = [
    ("gather", LARGEST * DIM * FLOAT),  # embeddings
    ("gather", LARGEST * INTEGER),  # labels
    ("reduce", ROWS * FLOAT),  # target cosines
]
LAST = ("reduce", ROWS * DIM * FLOAT)  # gradient of the embeddings


def test_steps_exchange_what_the_guide_says():
    first, second = (json.loads(text) for text in run_ranks(SCRIPT, 2))
    (num_first, support), (num_second, _) = first.pop("lists"), second.pop("lists")
    assert support - 1 <= num_first + num_second <= 1.2 * support + 1  # of all ranks, per row
    calls = {name: [tuple(call) for call in found] for name, (found, _) in first.items()}
    assert calls == {name: [tuple(call) for call in found] for name, (found, _) in second.items()}
    assert all(found[:3] == FIRST and found[-1] == LAST for found in calls.values())
    num_candidates = max(first["sparse"][1], second["sparse"][1])
    assert num_candidates > 0
    assert calls["sparse"][3:-1] == [
        ("reduce", ROWS * DOUBLE),  # floor of the cosines
        ("gather", 2 * INTEGER),  # lengths of the lists, and their limit
        *[("reduce", 2 * ROWS * DOUBLE)] * 2,  # mass and slope, for a higher floor
        ("gather", INTEGER),  # numbers of candidates
        ("gather", num_candidates * INTEGER),  # their rows
        ("gather", num_candidates * FLOAT),  # their scores
    ]
    # largest cosine; mass
    assert calls["softmax"][3:-1] == [("reduce", ROWS * FLOAT), ("reduce", ROWS * DOUBLE)]
    sizes = [size for _, size in calls["chunked"][3:-1]]
    begin, *passes, sums, number = [sizes[:3], *sizes[3:]]
    assert begin == [ROWS * DOUBLE] * 3  # a common anchor, the largest logit, a level
    assert set(passes) == {2 * ROWS * DOUBLE} and len(passes) < 12  # mass and slope
    assert (sums, number) == (3 * ROWS * DOUBLE, DOUBLE)  # mass, excess, support; active classes
