"""Averages of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qmargin.errors import CheckpointError, ShapeError
from qmargin.training.checkpoint import (
    CheckpointState,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from qmargin.training.optim import MovingAverage, average_checkpoints, write_weights


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(4, 3, generator=generator).to(dtype),
        "running_var": torch.rand(4, generator=generator),
        "num_batches_tracked": torch.tensor(seed),
    }


def test_a_moving_average_is_the_weighted_sum_of_what_it_saw() -> None:
    average, decay = MovingAverage(0.9), 0.9
    for seed in range(6):
        average.update(values(seed))
    weights = [decay**5] + [(1 - decay) * decay ** (5 - i) for i in range(1, 6)]
    assert abs(sum(weights) - 1) < 1e-12
    for name in ("weight", "running_var"):
        expected = sum(w * values(i)[name].double() for i, w in enumerate(weights))
        torch.testing.assert_close(average.tensors[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert average.tensors["num_batches_tracked"] == 5


def test_the_average_is_a_copy() -> None:
    average, first = MovingAverage(0.5), values(0)
    average.update(first)
    first["weight"].zero_()
    assert torch.equal(average.tensors["weight"], values(0)["weight"])


def test_half_precision_weights_are_averaged_in_float32() -> None:
    """In bfloat16 a step of 1e-4 of the difference would be lost every time."""
    average = MovingAverage(0.9999)
    average.update({"weight": torch.ones(1, dtype=torch.bfloat16)})
    for _ in range(100):
        average.update({"weight": torch.zeros(1, dtype=torch.bfloat16)})
    torch.testing.assert_close(average.tensors["weight"], torch.tensor([0.9999**100]))


def test_a_moving_average_goes_on_exactly_after_a_checkpoint(tmp_path: Path) -> None:
    whole, before, after = MovingAverage(0.9), MovingAverage(0.9), MovingAverage(0.9)
    for seed in range(3):
        before.update(values(seed))
    path = save_checkpoint(tmp_path, CheckpointState(3, parts={"ema": before.state_dict()}))
    after.load_state_dict(load_checkpoint(open_checkpoint(path)).parts["ema"])
    for seed in range(6):
        whole.update(values(seed))
        if seed >= 3:
            after.update(values(seed))
    assert after.num_updates == whole.num_updates == 6
    for name, tensor in whole.tensors.items():
        assert torch.equal(after.tensors[name], tensor)


def test_another_model_is_refused() -> None:
    average = MovingAverage(0.9)
    average.update(values(0))
    with pytest.raises(ShapeError, match="weight differs"):
        average.update({**values(1), "weight": torch.zeros(3, 4)})
    with pytest.raises(ShapeError, match="bias differs"):
        average.update({**values(1), "bias": torch.zeros(3)})


def test_the_mean_of_checkpoints(tmp_path: Path) -> None:
    paths = [
        save_checkpoint(tmp_path, CheckpointState(seed, values(seed, torch.bfloat16)))
        for seed in (3, 1, 2)
    ]
    mean = average_checkpoints([open_checkpoint(path) for path in paths])
    exact = sum(values(seed, torch.bfloat16)["weight"].double() for seed in (1, 2, 3)) / 3
    assert torch.equal(mean["weight"], exact.bfloat16())
    assert mean["num_batches_tracked"] == 3  # the last one's, whatever the order


def test_weights_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "average.safetensors"
    write_weights(path, values(1))
    write_weights(path, values(2))
    assert torch.equal(load_file(path)["weight"], values(2)["weight"])
    with pytest.raises(CheckpointError, match="strided"):
        write_weights(path, {"weight": torch.eye(2).to_sparse()})
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_weights(tmp_path / "missing" / "average.safetensors", values(1))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
