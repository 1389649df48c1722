"""Optimizers of a recipe: groups, the head's update, clipping as torch does it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD, SparseSGD
from qmargin.recipes import get_recipe
from qmargin.training.build import build_backbone, build_head
from qmargin.training.optim import Optimizers, build_optimizers, clip_gradients_, parameter_groups
from qmargin.training.recipe import OptimizerPart, Recipe
from qmargin.training.recipe_files import apply_settings
from qmargin.training.session import _load_optimizer_

UPDATES = {
    "exact": [],
    "sparse": ["head.update=sparse"],
    "torch": ["head.update=torch"],
    "coo": ["head.update=torch", "head.gradient=sparse", "optimizer.weight_decay=0"],
}


def debug_with(*settings: str) -> Recipe:
    return apply_settings(get_recipe("debug"), settings)


def one_backward(recipe: Recipe) -> tuple[nn.Module, MarginClassifier, Optimizers]:
    backbone, head = build_backbone(recipe), build_head(recipe)
    optimizers = build_optimizers(recipe, backbone, head)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 32, generator=generator)
    labels = torch.randint(0, 200, (16,), generator=generator)
    head(backbone(inputs), labels).backward()
    return backbone, head, optimizers


def built(*settings: str) -> Optimizers:
    recipe = debug_with(*settings)
    return build_optimizers(recipe, build_backbone(recipe), build_head(recipe))


def test_settings_reach_the_optimizers() -> None:
    sgd = "lr=0.2 momentum=0.8 weight_decay=0.01 nesterov=true base_batch=128"
    settings = [f"optimizer.{setting}" for setting in sgd.split()]
    for update, kind in (("exact", ExactSGD), ("sparse", SparseSGD), ("torch", torch.optim.SGD)):
        pair = built(f"head.update={update}", *settings)
        assert (type(pair.backbone), type(pair.head)) == (torch.optim.SGD, kind)
        for optimizer in pair:
            (group,) = optimizer.param_groups
            assert group["lr"] == pytest.approx(0.1)  # 64 / 128 of 0.2
            found = (group["momentum"], group["weight_decay"], group["nesterov"])
            assert found == (0.8, 0.01, True)
    settings = ["optimizer.kind=adamw", "optimizer.beta2=0.98", "optimizer.epsilon=1e-6"]
    for optimizer in built("head.update=torch", *settings):
        assert type(optimizer) is torch.optim.AdamW
        (group,) = optimizer.param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-6, 5e-4)


def test_vectors_decay_unless_told_otherwise() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Linear(4, 2))
    network[3].weight.requires_grad_(False)
    part = OptimizerPart(lr=0.1, weight_decay=0.5)
    (group,) = parameter_groups(network, part)
    assert len(group["params"]) == 6  # all but the frozen one
    assert group["weight_decay"] == 0.5
    matrices, vectors = parameter_groups(network, replace(part, decay_norms=False))
    assert [weight is network[0].weight for weight in matrices["params"]] == [True]
    assert len(vectors["params"]) == 5
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)


def test_a_backbone_without_parameters_and_another_gradient_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradient"):
        parameter_groups(nn.ReLU(), OptimizerPart(lr=0.1))
    head = build_head(debug_with("head.update=torch"))
    with pytest.raises(ConfigError, match=r"'dense' .*'fused'"):
        build_optimizers(get_recipe("debug"), build_backbone(get_recipe("debug")), head)


@pytest.mark.parametrize("settings", UPDATES.values(), ids=UPDATES)
def test_the_learning_rate_of_a_step_reaches_both(settings: list[str]) -> None:
    """With momentum and decay off, a step of length lr is lr times the gradient."""
    plain = ["optimizer.momentum=0", "optimizer.weight_decay=0"]
    recipe = debug_with(*settings, *plain, "head.lr_ratio=3")
    backbone, head, optimizers = one_backward(recipe)
    assert optimizers.head.param_groups[0]["lr"] == pytest.approx(3 * recipe.optimizer.lr)
    before = [weight.detach().clone() for weight in (*backbone.parameters(), head.prototypes)]
    _, dense, _ = one_backward(debug_with("head.update=torch", *plain))
    assert dense.prototypes.grad is not None
    grads = [weight.grad for weight in backbone.parameters()] + [dense.prototypes.grad]
    optimizers.set_learning_rate(0.5)
    for optimizer in optimizers:
        optimizer.step()
    after = (*backbone.parameters(), head.prototypes)
    for old, new, grad in zip(before, after, grads, strict=True):
        assert grad is not None
        lr = 1.5 if new is head.prototypes else 0.5
        torch.testing.assert_close(new.detach(), old - lr * grad, rtol=1e-5, atol=1e-7)
    optimizers.zero_grad()
    assert head.fused_gradient is None
    assert all(weight.grad is None for weight in after)


def reference_norm(with_head: bool) -> Tensor:
    backbone, head, _ = one_backward(debug_with("head.update=torch"))
    parts = [weight.grad for weight in backbone.parameters()]
    parts += [head.prototypes.grad] if with_head else []
    flat = torch.cat([part.flatten() for part in parts if part is not None]).double()
    return flat.norm()


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("settings", UPDATES.values(), ids=UPDATES)
def test_clipping_is_over_everything_at_once(settings: list[str], with_head: bool) -> None:
    recipe = debug_with(*settings)
    expected = reference_norm(with_head)
    _, _, optimizers = one_backward(recipe)
    limit = float(expected) / 4
    total = clip_gradients_(optimizers, limit, with_head=with_head)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
    again = clip_gradients_(optimizers, 1e9, with_head=with_head)
    torch.testing.assert_close(again, torch.tensor(limit).double(), rtol=1e-4, atol=0.0)
    if not with_head:  # the head's gradient was left alone
        whole = clip_gradients_(optimizers, 1e9)
        head_norm = (reference_norm(True).square() - expected.square()).sqrt()
        torch.testing.assert_close(
            whole, (head_norm.square() + limit**2).sqrt(), rtol=1e-4, atol=0.0
        )


def test_a_small_gradient_is_left_alone() -> None:
    backbone, _, optimizers = one_backward(get_recipe("debug"))
    before = [weight.grad.clone() for weight in backbone.parameters()]
    clip_gradients_(optimizers, 1e9)
    for weight, grad in zip(backbone.parameters(), before, strict=True):
        assert torch.equal(weight.grad, grad)
    optimizers.zero_grad()
    assert clip_gradients_(optimizers, 1.0) == 0.0


def test_shards_of_the_head_count_once_each() -> None:
    """Four ranks with the same share of the prototypes' gradient: the backbone counts once."""
    _, _, optimizers = one_backward(get_recipe("debug"))
    backbone = reference_norm(with_head=False).square()
    head = reference_norm(with_head=True).square() - backbone
    total = clip_gradients_(optimizers, 1e9, sum_over_shards=lambda share: 4 * share)
    torch.testing.assert_close(total, (backbone + 4 * head).sqrt(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_reported_and_left(value: float) -> None:
    backbone, _, optimizers = one_backward(debug_with("head.update=torch"))
    first, second, *_ = backbone.parameters()
    first.grad[0, 0] = value
    kept = second.grad.clone()
    assert not clip_gradients_(optimizers, 1e-3).isfinite()
    assert torch.equal(second.grad, kept)


def test_a_loaded_state_has_the_layout_of_its_weight() -> None:
    """Files have rows one after the other; fused kernels take one layout for all."""
    backbone = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizers = [torch.optim.AdamW(backbone.parameters(), foreach=which) for which in (None, True)]
    backbone(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizers[0].step()
    state = optimizers[0].state_dict()
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].contiguous()
    _load_optimizer_(optimizers[1], state)
    loaded = optimizers[1].state[backbone.weight]["exp_avg"]
    assert loaded.stride() == backbone.weight.stride()
    assert torch.equal(loaded, optimizers[0].state[backbone.weight]["exp_avg"])
    assert optimizers[1].param_groups[0]["foreach"]  # its own settings, not the saved ones
