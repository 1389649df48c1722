import pytest
import torch

import qmargin
from qmargin.errors import ConfigError
from qmargin.heads.checks import check_settings
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.shard import BLOCK_CLASSES, ClassShard, draw_prototypes


@pytest.mark.parametrize("num_classes", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_shards_are_a_partition_in_order_and_nearly_equal(num_classes, world):
    shards = [ClassShard.of(num_classes, rank, world) for rank in range(world)]
    assert [c for shard in shards for c in range(shard.start, shard.stop)] == list(
        range(num_classes)
    )
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert shards[0].is_whole == (world == 1 or num_classes == 1)


def test_local_labels():
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


def test_a_seed_decides_the_prototypes():
    heads = []
    for _ in range(2):
        torch.manual_seed(3)
        heads.append(qmargin.MarginClassifier(4, 9, qmargin.q_margin()))
    assert torch.equal(heads[0].prototypes, heads[1].prototypes)
    assert not torch.equal(
        heads[0].prototypes, qmargin.MarginClassifier(4, 9, qmargin.q_margin()).prototypes
    )


def test_a_margin_that_draws_needs_a_seed_on_several_ranks():
    head = MarginClassifier(4, 6, qmargin.elasticface(), path="dense")
    head.ranks.world = 2
    with pytest.raises(ConfigError, match="give ElasticMargin a seed"):
        check_settings(head, torch.float32, ("dense",))
    head.loss = qmargin.MarginLoss(qmargin.Alpha(1.0), qmargin.ElasticMargin(seed=1), scale=64.0)
    check_settings(head, torch.float32, ("dense",))
