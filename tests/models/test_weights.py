"""Checkpoints of other packages: their names, their containers, and nothing that runs code."""

import os
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qmargin.errors import DataError
from qmargin.models import create_backbone
from qmargin.models.face import IResNet, MobileFaceNet
from qmargin.models.weights import load_weights_, read_weights

SMALL = (1, 2, 1, 1)


class IRBlock(nn.Module):
    """A block of AdaFace's IR networks, with its names."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.shortcut_layer: nn.Module = nn.MaxPool2d(1, stride)
        if inputs != channels:
            conv = nn.Conv2d(inputs, channels, 1, stride, bias=False)
            self.shortcut_layer = nn.Sequential(conv, nn.BatchNorm2d(channels))
        self.res_layer = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.PReLU(channels),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.res_layer(inputs) + self.shortcut_layer(inputs)


def ir_network(blocks: tuple[int, ...], embedding_dim: int) -> nn.Sequential:
    """An IR network: BGR images to embeddings."""
    conv = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    body, inputs = nn.Sequential(), 64
    for channels, number in zip((64, 128, 256, 512), blocks, strict=True):
        for place in range(number):
            body.append(IRBlock(inputs, channels, 2 if place == 0 else 1))
            inputs = channels
    output_layer = nn.Sequential(
        nn.BatchNorm2d(512),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(512 * 49, embedding_dim),
        nn.BatchNorm1d(embedding_dim, affine=False),
    )
    input_layer = nn.Sequential(conv, nn.BatchNorm2d(64), nn.PReLU(64))
    parts = OrderedDict(input_layer=input_layer, body=body, output_layer=output_layer)
    return nn.Sequential(parts)


def shaken(network: nn.Module) -> nn.Module:
    """The network in evaluation mode, with statistics and slopes that are not the first ones."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.dim() == 1 and name != "features.weight":
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return network.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(1))


def without_counters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "num_batches_tracked" not in name}


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda state: state, ""),
        (without_counters, "module."),
        (lambda state: {"state_dict": state, "epoch": 3}, "module."),
        (lambda state: {"state_dict_backbone": state, "global_step": 9}, ""),
        (lambda state: {"state_dict": {**state, "head.kernel": torch.ones(2)}}, "model."),
    ],
)
def test_weights_are_found_in_usual_containers(wrap, prefix, tmp_path, images):
    theirs, ours = shaken(IResNet(SMALL, 8)), IResNet(SMALL, 8).eval()
    state = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    is_old = wrap is without_counters  # files from before torch 1.6
    torch.save(wrap(state), tmp_path / "model.pt", _use_new_zipfile_serialization=not is_old)
    load_weights_(ours, tmp_path / "model.pt")
    assert torch.equal(ours(images), theirs(images))


def test_safetensors_are_read_whatever_they_are_called(tmp_path, images):
    theirs, ours = (MobileFaceNet(SMALL, 1, 8) for _ in range(2))
    save_file(shaken(theirs).state_dict(), tmp_path / "model.ckpt")
    load_weights_(ours.eval(), tmp_path / "model.ckpt")
    assert torch.equal(ours(images), theirs(images))


def test_adaface_networks_load_and_take_rgb(tmp_path, images):
    theirs = shaken(ir_network(SMALL, 8))
    state = {f"model.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"state_dict": {**state, "head.t": torch.zeros(1)}}, tmp_path / "ada.ckpt")
    ours = IResNet(SMALL, 8, shortcut="subsample").eval()
    load_weights_(ours, tmp_path / "ada.ckpt")
    torch.testing.assert_close(ours(images), theirs(images.flip(1)), rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match=r"missing: layer1\.0\.downsample"):
        load_weights_(IResNet(SMALL, 8), tmp_path / "ada.ckpt")


def test_the_published_depth_has_the_shapes_of_adaface():
    """IR-101 has 65,150,912 parameters: those of R-100 less a projection and the last norm's."""
    with torch.device("meta"):
        theirs = ir_network((3, 13, 30, 3), 512)
        ours = create_backbone("iresnet100", shortcut="subsample")
    counts = [sum(weight.numel() for weight in one.parameters()) for one in (theirs, ours)]
    assert counts == [65_150_912, 65_150_912 + 1024]


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (lambda: IResNet((1, 1, 1, 1), 8), r"unknown: layer2\.1\.bn1"),
        (lambda: IResNet((1, 2, 2, 1), 8), r"missing: layer3\.1\.bn1.*\.\.\."),
        (lambda: IResNet(SMALL, 4), r"different shape: fc\.weight \[8, 25088\] instead of \[4, "),
        (lambda: IResNet(SMALL, 8, shortcut="subsample"), r"unknown: layer1\.0\.downsample"),
    ],
)
def test_weights_of_another_structure_are_refused_and_nothing_is_loaded(ours, message, tmp_path):
    torch.save(IResNet(SMALL, 8).state_dict(), tmp_path / "model.pt")
    network = ours()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(DataError, match=message):
        load_weights_(network, tmp_path / "model.pt")
    assert all(torch.equal(before[name], now) for name, now in network.state_dict().items())


class Hostile:
    """Runs a command when it is unpickled by the ordinary loader."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_file_that_runs_code_is_not_opened(tmp_path):
    mark = tmp_path / "mark"
    torch.save({"state_dict": Hostile(f"touch {mark}")}, tmp_path / "evil.pt")
    with pytest.raises(DataError, match=r"evil\.pt"):
        read_weights(tmp_path / "evil.pt")
    assert not mark.exists()


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(20, 20).state_dict(), path)
    whole = path.read_bytes()
    save_file({"weight": torch.ones(1000)}, path)
    tensors = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("note.txt", "hello")
    strange = (b"", b"<html>404</html>", b"\x80\x02garbage", path.read_bytes())
    for content in (*strange, whole[: len(whole) // 2], tensors[: len(tensors) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"model\.pt"):
            read_weights(path)
    with pytest.raises(DataError, match=r"absent\.pt"):
        read_weights(tmp_path / "absent.pt")


def test_other_contents_are_named(tmp_path):
    path = tmp_path / "model.pt"
    for content, message in (
        ({"optimizer": {"lr": 0.1}}, r"\['optimizer'\]"),
        ([torch.ones(1)], "list"),
        ({}, "no weights"),
        ({"a": torch.tensor([1.0, float("nan")])}, "a has values that are not finite"),
    ):
        torch.save(content, path)
        with pytest.raises(DataError, match=message):
            read_weights(path)
