"""Classes split over 1 to 4 ranks with gloo: loss and every gradient as with one rank."""

import os
import pickle
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

import qmargin
from helpers.heads import make_loss, random_batch
from qmargin.errors import ConfigError, DataError
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD, SparseSGD, clip_grad_norm_
from qmargin.heads.sharding import BLOCK_CLASSES, ClassShard, draw_prototypes

pytestmark = [pytest.mark.dist]

ROWS, DIM = 10, 16
PRESETS = {
    "q_margin": lambda: qmargin.q_margin(alpha=1.25, scale=16.0, margin=0.1),
    "cosface": lambda: qmargin.cosface(scale=16.0),
    "arcface": lambda: qmargin.arcface(scale=16.0),
    "entmax": lambda: qmargin.entmax_face(scale=8.0),
    "sparsemax": lambda: qmargin.sparsemax_face(scale=4.0),
    "adaface": lambda: qmargin.adaface(scale=16.0),
    "magface": lambda: qmargin.MarginLoss(
        qmargin.Alpha(1.5), qmargin.MagFaceMargin(lower_norm=1.0, upper_norm=20.0), scale=8.0
    ),
    "sphereface": lambda: qmargin.sphereface(scale=16.0),
    "elasticface": lambda: qmargin.MarginLoss(
        qmargin.Alpha(1.0), qmargin.ElasticMargin(seed=5), scale=16.0
    ),
    "alpha 3": lambda: make_loss(3.0, 3.0),
    "wide": lambda: make_loss(1.25, 0.5),
    "references": lambda: qmargin.MarginLoss(
        qmargin.Alpha(1.25),
        qmargin.PriorMargin(0.05),
        scale=16.0,
        reference=qmargin.ClassPrior(range(1, 98), 0.5)
        + qmargin.Quality(0.3)
        + qmargin.LookAlike(0.3, 0.1, damping=1.0, split_threshold=0.4),
    ),
    "pairs": lambda: qmargin.MarginLoss(
        qmargin.Alpha(1.25),
        qmargin.PriorMargin(0.05),
        scale=16.0,
        reference=qmargin.LookAlike(0.3, 0.1, damping=1.0, split_threshold=0.4),
    ),
}
STATEFUL = ("adaface", "magface", "elasticface", "references")
SOFTMAX = ("cosface", "arcface", "adaface", "sphereface", "elasticface")
# Path, preset, classes, dtype: every path, every preset, fewer classes than ranks, and so many
# active ones that a sample starts the search.
CASES = [
    ("chunked", "wide", 3001, torch.float64),
    *((path, "pairs", k, torch.float64) for path in ("sparse", "chunked") for k in (1, 331)),
    *((path, "q_margin", k, dt)
      for path in ("sparse", "chunked", "dense", "top_k", "sampled", "auto")
      for k in (1, 331) for dt in (torch.float64,)),
    *((path, preset, 97, torch.float32)
      for preset in PRESETS for path in ("sparse", "chunked", "dense")
      if not (path == "sparse" and preset in SOFTMAX)
      and not (path == "dense" and preset not in STATEFUL)),
]  # fmt: skip


def make_head(case, group):
    path, preset, num_classes, dtype = case
    path = qmargin.Sampled(0.5) if path == "sampled" else path
    torch.manual_seed(0)
    options = {"path": path, "dtype": dtype, "group": group}
    head = MarginClassifier(DIM, num_classes, PRESETS[preset](), **options)
    prototypes = random_batch(num_classes, DIM, ROWS).prototypes.to(dtype)
    with torch.no_grad():
        head.prototypes.copy_(prototypes[head.shard.start : head.shard.stop])
    return head


def outcome(case, group=None, sizes=None):
    """Loss, gradient of the rank's rows and of its prototypes; rows may be ignored or few."""
    rank = 0 if group is None else dist.get_rank(group)
    sizes = sizes or [ROWS]
    head = make_head(case, group)
    batch = random_batch(case[2], DIM, ROWS)
    batch.labels[3] = -100
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    embeddings = batch.embeddings[mine].to(case[3]).requires_grad_()
    told = () if case[2] == 97 else (sizes,)  # else each rank asks the others
    loss = head(embeddings, batch.labels[mine], *told)
    loss.backward()
    stats = head.last_step
    gradients = {"rows": embeddings.grad, "prototypes": head.prototypes.grad}
    support = (stats.support_mean, stats.support_max)
    shares = (stats.satisfied_share, stats.target_posterior)
    gaps = head.gaps(embeddings, batch.labels[mine], *told)
    found = {"support": support, "shares": shares, "gaps": gaps}
    return {"loss": loss.item(), **gradients, "path": stats.path, **found}


def optimized(case, group=None):
    """Prototypes and momentum after three steps of each fused optimizer, with clipping."""
    found = []
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    for kind in (ExactSGD, SparseSGD):
        head = make_head(case, group)
        head.gradient = "fused"
        optimizer = kind(head, 0.3)
        for step in range(4):
            batch = random_batch(case[2], DIM, 12, seed=step)
            mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
            loss = head(batch.embeddings[mine].to(case[3]), batch.labels[mine])
            factor = torch.nan if step == 2 else 1.0  # one step that all ranks must skip
            (loss * factor).backward()
            clip_grad_norm_([], [optimizer], 0.5)
            optimizer.step()
        assert optimizer.num_skipped == 1
        found += [head.prototypes.detach(), optimizer.state[head.prototypes]["momentum_buffer"]]
    return found


def work(rank, world, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=20)  # a rank that fails must not hang the others
    store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **store, timeout=limit)
    group, found = dist.group.WORLD, {}
    sizes = [ROWS // world + (r < ROWS % world) for r in range(world)]
    if world == 4:
        sizes = [7, 0, 2, 1]  # uneven, and a rank without rows
    try:
        for case in CASES:
            found[case] = outcome(case, group, sizes)
        for path in ("sparse", "chunked", "dense"):
            found["optimized", path] = optimized((path, "q_margin", 97, torch.float64), group)
        for ask in (overflowed, poisoned, predicted, wrapped):
            found[ask.__name__] = ask(group)
    except Exception:
        found = f"after {list(found)[-1:]}: {traceback.format_exc()}"
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    if isinstance(found, dict):
        dist.barrier()
        dist.destroy_process_group()


def overflowed(group):
    """One rank's lists too long: all ranks go on by blocks, and agree."""
    head = make_head(("sparse", "q_margin", 331, torch.float64), group)
    head.path = qmargin.Sparse(list_capacity=1 if head.ranks.rank == 0 else 100)
    batch = random_batch(331, DIM, ROWS)
    loss = head(batch.embeddings.double(), batch.labels)
    return head.last_step.path, loss.item()


def poisoned(group):
    """Losses and gradients when one rank has a prototype without a direction, by path."""
    found = {}
    for path in ("sparse", "chunked", "dense", "top_k", "auto"):
        head = make_head((path, "q_margin", 97, torch.float64), group)
        with torch.no_grad():
            head.prototypes[max(0, 96 - head.shard.start) :] = 0.0
        batch = random_batch(97, DIM, 4)
        embeddings = batch.embeddings.double().requires_grad_()
        loss = head(embeddings, batch.labels.clamp(max=95))
        loss.backward()
        head.loss.debug = True
        with pytest.raises(DataError, match="class 96"):
            head(embeddings, batch.labels.clamp(max=95))
        found[path] = loss.item(), bool(embeddings.grad.isnan().all())
    return found


def predicted(group):
    """Classes of this rank's rows, and cosines with all."""
    head = make_head(("sparse", "q_margin", 331, torch.float64), group)
    rows = random_batch(331, DIM, ROWS).embeddings.double()[: dist.get_rank(group) + 1]
    return head.predict(rows), head.cosines(rows).detach()


class Model(torch.nn.Module):
    def __init__(self, group, gradient):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = torch.nn.Linear(DIM, DIM, bias=False)
        self.head = MarginClassifier(DIM, 96, PRESETS["q_margin"](), group=group, gradient=gradient)

    def forward(self, inputs, labels):
        return self.head(self.backbone(inputs), labels)


def trained(model, rank, world):
    """Losses and weights of three steps on this rank's rows."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        batch = random_batch(96, DIM, 12, seed=step)
        mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
        optimizer.zero_grad()
        loss = model(batch.embeddings[mine], batch.labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, *(value.detach().clone() for value in model.parameters())


def wrapped(group):
    """A model that contains a head inside DistributedDataParallel, by how it was prepared."""
    found = {}
    for name, heads_group, gradient in (
        ("sharded", group, "dense"),
        ("fused", None, "fused"),
        ("excluded", group, "dense"),
        ("replicated", None, "dense"),
    ):
        model = Model(heads_group, gradient)
        model = qmargin.exclude_from_ddp(model) if name == "excluded" else model
        ranks = dist.get_rank(group), dist.get_world_size(group)
        try:
            found[name] = trained(DistributedDataParallel(model), *ranks)
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow), 4])
def found(request, tmp_path_factory):
    """Everything that the ranks of one world found, by rank."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, (world, str(folder)), nprocs=world)
    results = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]
    failed = [result for result in results if not isinstance(result, dict)]
    failed.sort(key=lambda text: "Connection closed" in text)  # the cause before its effects
    assert not failed, failed[0]
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_ranks_agree_with_one(case, found):
    world, truth = len(found), outcome(case)
    parts = [result[case] for result in found]
    assert len({part["loss"] for part in parts}) == 1  # bit by bit
    tolerance = 1e-9 if case[3] == torch.float64 else 3e-5
    assert parts[0]["loss"] == pytest.approx(truth["loss"], rel=tolerance, abs=tolerance)
    # Gradients of rows are made for an average over the ranks.
    rows = torch.cat([part["rows"] for part in parts]) / world
    prototypes = torch.cat([part["prototypes"] for part in parts])
    for name, value in (("rows", rows), ("prototypes", prototypes)):
        size = float(truth[name].abs().max())
        assert float((value - truth[name]).abs().max()) <= tolerance * size + 1e-12, name
    assert {part["path"] for part in parts} == {truth["path"]}
    if case[0] != "sampled":
        for part in parts:
            assert part["support"] == pytest.approx(truth["support"])
            assert part["shares"] == pytest.approx(truth["shares"], rel=1e-4, abs=1e-6)
    gaps = torch.cat([part["gaps"] for part in parts])
    torch.testing.assert_close(gaps, truth["gaps"], rtol=tolerance, atol=tolerance, equal_nan=True)
    assert gaps.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("path", ["sparse", "chunked", "dense"])
def test_updates_agree_with_one(path, found):
    truth = optimized((path, "q_margin", 97, torch.float64))
    for *parts, whole in zip(*(one["optimized", path] for one in found), truth, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-10, rtol=1e-9)


def test_lists_too_long_on_one_rank(found):
    batch = random_batch(331, DIM, ROWS)
    head = make_head(("sparse", "q_margin", 331, torch.float64), None)
    expected = head(batch.embeddings.double(), batch.labels).item()
    for result in found:
        assert result["overflowed"] == ("chunked", pytest.approx(expected, rel=1e-9))


def test_poison_on_one_rank_is_nan_on_all(found):
    for result in found:
        for path, (loss, is_nan) in result["poisoned"].items():
            assert loss != loss and is_nan, path


def test_predictions_of_ranks_agree_with_one(found):
    head = make_head(("sparse", "q_margin", 331, torch.float64), None)
    rows = random_batch(331, DIM, ROWS).embeddings.double()
    for rank, result in enumerate(found):
        classes, cosines = result["predicted"]
        torch.testing.assert_close(cosines, head.cosines(rows[: rank + 1]).detach())
        assert torch.equal(classes, cosines.argmax(1))


def test_a_head_inside_distributed_data_parallel(found):
    results = [result["wrapped"] for result in found]
    assert all("exclude_from_ddp" in result["sharded"] for result in results)
    assert all("group=" in result["fused"] for result in results)
    close = {"rtol": 1e-4, "atol": 1e-5}
    losses, backbone, prototypes = trained(Model(None, "dense"), 0, 1)
    shards = torch.cat([result["excluded"][2] for result in results])
    torch.testing.assert_close(shards, prototypes, **close)
    for result in results:
        for name in ("excluded", "replicated"):
            torch.testing.assert_close(result[name][1], backbone, **close)
        assert result["excluded"][0] == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(result["replicated"][2], prototypes, **close)


@pytest.mark.parametrize("num_classes", [1, 3, 7, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_are_a_partition_in_order_and_nearly_equal(num_classes, world):
    shards = [ClassShard.of(num_classes, rank, world) for rank in range(world)]
    listed = [c for shard in shards for c in range(shard.start, shard.stop)]
    assert listed == list(range(num_classes))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert shards[0].is_whole == (world == 1 or num_classes == 1)
    shard = ClassShard(3, 6, 10)
    assert shard.local(torch.tensor([2, 3, 5, 6, -100])).tolist() == [-1, 0, 2, -1, -1]


def test_prototypes_do_not_depend_on_the_sharding():
    num_classes = BLOCK_CLASSES + 100
    whole = draw_prototypes(ClassShard(0, num_classes, num_classes), torch.empty(num_classes, 3), 5)
    for start, stop in ((0, 50), (BLOCK_CLASSES - 7, BLOCK_CLASSES + 9), (num_classes - 1,) * 2):
        shard = ClassShard(start, stop, num_classes)
        part = draw_prototypes(shard, torch.empty(len(shard), 3), 5)
        assert torch.equal(part, whole[start:stop])
    assert float(whole.std()) == pytest.approx(0.01, rel=0.05)
    assert len(whole.unique(dim=0)) == num_classes
