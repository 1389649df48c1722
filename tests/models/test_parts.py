"""Recomputation changes memory and nothing else."""

import copy

import pytest
import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.models.iresnet import IResNet
from qmargin.models.mobilefacenet import MobileFaceNet
from qmargin.models.parts import check_faces, check_rate, recomputed
from qmargin.models.vit import VisionTransformer

NETWORKS = {
    "iresnet": lambda: IResNet((1, 2, 1, 1), 8, dropout=0.3),
    "mobilefacenet": lambda: MobileFaceNet((1, 1, 1, 1), 1, 8),
    "vit": lambda: VisionTransformer(16, 2, 8, drop_path=0.4, mask_ratio=0.3),
}


def one_step(network: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Embeddings and gradients of a step in training mode, from fixed draws."""
    torch.manual_seed(5)
    embeddings = network(images)
    embeddings.square().sum().backward()
    grads = {name: weight.grad for name, weight in network.named_parameters()}
    return embeddings, {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("name", NETWORKS)
def test_recomputed_steps_have_the_same_gradients_and_statistics(name: str) -> None:
    """Batch norms must not move twice, and dropped parts must be dropped again."""
    torch.manual_seed(0)
    plain = NETWORKS[name]()
    lean = copy.deepcopy(plain)
    lean.gradient_checkpointing = True
    images = torch.randn(3, 3, 112, 112)
    embeddings, grads = one_step(plain, images)
    lean_embeddings, lean_grads = one_step(lean, images)
    assert torch.equal(embeddings, lean_embeddings)
    assert grads.keys() == lean_grads.keys()
    for key, grad in grads.items():
        assert torch.equal(grad, lean_grads[key]), key
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(lean.named_buffers())[key]), key
    assert any(key.endswith("running_mean") for key, _ in plain.named_buffers())


@pytest.mark.parametrize("name", NETWORKS)
def test_recomputed_steps_keep_less(name: str) -> None:
    plain, lean = NETWORKS[name](), NETWORKS[name]()
    lean.gradient_checkpointing = True
    images = torch.randn(2, 3, 112, 112)

    def kept_bytes(network: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(images)
        return sum(size for place, size in sizes.items() if place not in weights)

    assert kept_bytes(lean) < 0.6 * kept_bytes(plain)


def test_the_buffers_of_a_block_are_its_own_again_after_the_backward_pass() -> None:
    """An optimizer, a moving average or a checkpoint may hold on to them."""
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = dict(block.named_buffers())
    recomputed([block], torch.randn(4, 2, requires_grad=True)).square().sum().backward()
    after = dict(block.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    assert int(after["1.num_batches_tracked"]) == 1


@pytest.mark.slow
def test_compiled_networks_move_their_statistics_once_too() -> None:
    plain = NETWORKS["iresnet"]()
    plain.dropout.p = 0.0
    lean = copy.deepcopy(plain)
    lean.gradient_checkpointing = True
    lean.compile(backend="aot_eager")
    images = torch.randn(2, 3, 112, 112)
    _, grads = one_step(plain, images)
    _, lean_grads = one_step(lean, images)
    for key, grad in grads.items():
        torch.testing.assert_close(lean_grads[key], grad, rtol=1e-4, atol=1e-5)
    for key, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(lean.named_buffers())[key], buffer)


def test_norms_in_evaluation_mode_keep_reading_their_statistics() -> None:
    block = nn.Sequential(nn.BatchNorm1d(2)).eval()
    block[0].running_mean += 3.0
    inputs = torch.randn(4, 2, requires_grad=True)
    out = recomputed([block], inputs)
    torch.testing.assert_close(out, block(inputs))
    out.sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad, torch.full((4, 2), (1.0 + 1e-5) ** -0.5))


@pytest.mark.parametrize("name", NETWORKS)
def test_without_gradients_nothing_is_recomputed(name: str) -> None:
    network = NETWORKS[name]().eval()
    network.gradient_checkpointing = True
    with torch.no_grad():
        assert network(torch.randn(2, 3, 112, 112)).shape == (2, 8)


@pytest.mark.parametrize("name", NETWORKS)
def test_both_layouts_give_the_same_embeddings(name: str) -> None:
    torch.manual_seed(1)
    network = NETWORKS[name]().eval()
    images = torch.randn(2, 3, 112, 112)
    expected = network(images)
    network = network.to(memory_format=torch.channels_last)
    found = network(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_reaches_every_parameter(name: str) -> None:
    network = NETWORKS[name]()
    network.gradient_checkpointing = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = network(torch.randn(4, 3, 112, 112))
    assert embeddings.dtype == torch.float32  # the last layers keep their precision
    embeddings.square().sum().backward()
    for key, weight in network.named_parameters():
        assert weight.grad is not None or not weight.requires_grad, key


def test_errors_name_the_value_and_the_limit() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 1, 112, 112\); this network takes \[B, 3, 112"):
        check_faces(torch.empty(2, 1, 112, 112))
    with pytest.raises(ConfigError, match=r"drop_path is 1; it must be in \[0, 1\)"):
        check_rate(1.0, "drop_path")
