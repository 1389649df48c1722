"""ONNX files: any batch size, one file, and the same embeddings as PyTorch."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qmargin.errors import BackendError, ConfigError
from qmargin.models import create_backbone, onnx_file
from qmargin.models.onnx_file import TOLERANCE, write_onnx

SHAPE = (3, 16, 16)


@pytest.fixture(autouse=True)
def _packages() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name)


def small() -> nn.Module:
    return create_backbone("small_conv", embedding_dim=8, width=4).eval()


def test_one_file_of_any_batch_size_gives_what_pytorch_gives(tmp_path):
    import onnxruntime

    backbone, path = small(), tmp_path / "model.onnx"
    difference, facts = write_onnx(backbone, path, input_shape=SHAPE, metadata={"name": "small"})
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["inputs"]
    assert session.get_inputs()[0].shape == ["batch", *SHAPE]
    assert session.get_modelmeta().custom_metadata_map["name"] == "small"
    for rows in (1, 3, 17):
        images = torch.randn(rows, *SHAPE)
        (found,) = session.run(None, {"inputs": images.numpy()})
        np.testing.assert_allclose(found, backbone(images).detach().numpy(), atol=1e-5)
    assert 0.0 <= difference <= TOLERANCE
    assert facts["onnx_file"] == "model.onnx" and len(facts["onnx_sha256"]) == 64


@pytest.mark.slow
def test_a_face_network_is_exported(tmp_path):
    backbone = create_backbone("iresnet18", embedding_dim=32)
    with torch.no_grad():
        for _ in range(8):  # running statistics, without which outputs are astronomic
            backbone.train()(torch.rand(4, 3, 112, 112) * 2.0 - 1.0)
    difference, _ = write_onnx(backbone.eval(), tmp_path / "a.onnx", input_shape=(3, 112, 112))
    assert difference <= TOLERANCE


class Pooled(nn.Module):
    """Recordings of any length to their first four moments."""

    def forward(self, samples: Tensor) -> Tensor:
        return torch.stack([samples.pow(power).mean(1) for power in (1, 2, 3, 4)], 1)


def test_recordings_may_have_any_length(tmp_path):
    import onnxruntime

    path = tmp_path / "model.onnx"
    write_onnx(Pooled().eval(), path, input_shape=(), lengths=(100, 50))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", "length"]
    samples = torch.rand(4, 333)
    (found,) = session.run(None, {"inputs": samples.numpy()})
    np.testing.assert_allclose(found, Pooled()(samples).numpy(), atol=1e-5)


class Forgetful(nn.Module):
    """Adds something in PyTorch that an exported graph does not see."""

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(1)[:, :8]
        return values if torch.compiler.is_compiling() else values + torch.arange(8.0)


def test_a_file_that_differs_is_not_kept(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the one from before")
    with pytest.raises(BackendError, match="differs from PyTorch by 1"):
        write_onnx(Forgetful().eval(), path, input_shape=SHAPE)
    assert path.read_bytes() == b"the one from before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


class Undecided(nn.Module):
    """Takes another way by the values of its inputs."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) if images.sum() > 0 else -images.flatten(1)


def test_what_cannot_be_exported_says_so(tmp_path):
    with pytest.raises(BackendError, match="cannot be exported to ONNX"):
        write_onnx(Undecided().eval(), tmp_path / "a.onnx", input_shape=SHAPE)
    assert list(tmp_path.iterdir()) == []


def test_training_mode_and_size_are_checked(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"call eval\(\)"):
        write_onnx(small().train(), tmp_path / "a.onnx", input_shape=SHAPE)
    monkeypatch.setattr(onnx_file, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="holds 100"):
        write_onnx(small(), tmp_path / "a.onnx", input_shape=SHAPE)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        onnx_file, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    with pytest.raises(BackendError, match=r"onnxscript is not installed.*qmargin\[onnx\]"):
        write_onnx(small(), tmp_path / "a.onnx", input_shape=SHAPE)
