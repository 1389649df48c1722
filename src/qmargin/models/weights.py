"""Weights of other packages' checkpoints, read without running code, in this package's names.

It reads safetensors files and PyTorch checkpoints of tensors and plain containers, and knows

- the names of this package, which are those of InsightFace's IResNet, MobileFaceNet and ViT;
- those of the IR networks of AdaFace (``input_layer``, ``body``, ``output_layer``), for an IResNet
  with ``shortcut="subsample"``; they were trained on BGR images, and the first convolution is
  turned round so that the loaded network takes RGB.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.errors import DataError

CONTAINERS = ("state_dict_backbone", "state_dict", "model_state_dict", "backbone", "model")
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
_IR_UNITS = dict(enumerate(("bn1", "conv1", "bn2", "prelu", "conv2", "bn3")))
_IR_ENDS = {
    "input_layer.0": "conv1",
    "input_layer.1": "bn1",
    "input_layer.2": "prelu",
    "output_layer.0": "bn2",
    "output_layer.3": "fc",
    "output_layer.4": "features",
}
_IR_BLOCK = re.compile(r"body\.(\d+)\.(res_layer|shortcut_layer)\.(\d)\.(\w+)")
_IR_STAGES = {64: 1, 128: 2, 256: 3, 512: 4}  # by the channels of a block
_SHOWN = 3


def load_weights_(backbone: nn.Module, path: str | Path) -> None:
    """Load the weights of a file into a backbone of its structure; all of them must fit.

    After a ``DataError`` the backbone is unchanged.
    """
    found = read_weights(path)
    if any(name.startswith("body.") for name in found):
        found = _from_adaface(found)
    _check_fit(backbone, found, path)
    backbone.load_state_dict(found, strict=False)  # only counters of batches may be missing


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a file by name, without containers and prefixes such as ``module.``."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}; name a checkpoint")
    with path.open("rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"  # after the length of the header
    content = read_safetensors(path) if is_safetensors else _read_torch(path)
    weights = _without_prefixes(_unpacked(content, path))
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DataError(f"{path}: {name} has values that are not finite; use another file")
    return weights


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or ``DataError``."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a safetensors file ({error}); download it again") from error


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
        # torch takes the length that an old file promises; bytes in memory give what is there
        file.seek(0)
        content = path if is_zip else io.BytesIO(file.read())
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise any error
        reason = str(error).split("\n")[0]
        raise DataError(
            f"{path} is damaged, or holds more than tensors, and is not opened ({reason}); save "
            "its state_dict alone, where you trust the file, and load that"
        ) from error


def _unpacked(content: Any, path: Path) -> dict[str, Tensor]:
    """The first mapping of names to tensors, at the top or in a usual container."""
    outer: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    for inner in (outer, *(outer[name] for name in CONTAINERS if name in outer)):
        if isinstance(inner, Mapping) and inner and _is_tensors(inner):
            return dict(inner)
    names = list(content) if isinstance(content, Mapping) else type(content).__name__
    raise DataError(
        f"{path} has no weights at its top or in one of {', '.join(CONTAINERS)}, but {names}; save "
        "a state_dict"
    )


def _is_tensors(mapping: Mapping[Any, Any]) -> bool:
    return all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in mapping.items()
    )


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without prefixes; where some have one, the others belong to a head and are left out."""
    for prefix in PREFIXES:
        inner = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        if inner:
            return _without_prefixes(inner)
    return weights


def _from_adaface(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """IR networks in the names of ``IResNet``, from BGR to RGB."""
    starts = {1: 0}  # the first block of every stage; what is in no stage belongs to the first
    for name, tensor in weights.items():
        block = _IR_BLOCK.fullmatch(name)
        if block is not None and (block[2], block[3], tensor.dim()) == ("res_layer", "1", 4):
            stage, place = _IR_STAGES.get(len(tensor), 1), int(block[1])
            starts[stage] = min(place, starts.get(stage, place))
    found = {}
    for name, tensor in weights.items():
        unit, _, kind = name.rpartition(".")
        block = _IR_BLOCK.fullmatch(name)
        if unit in _IR_ENDS:
            name = f"{_IR_ENDS[unit]}.{kind}"
        elif block is not None:
            place, part, number = int(block[1]), block[2], int(block[3])
            stage = max(stage for stage, start in starts.items() if start <= place)
            inner = _IR_UNITS.get(number, str(number))
            if part == "shortcut_layer":
                inner = f"downsample.{number}"
            name = f"layer{stage}.{place - starts[stage]}.{inner}.{kind}"
        found[name] = tensor  # any other name is reported as one that does not fit
    if "features.running_mean" in found:  # the last norm has no weights of its own there
        mean = found["features.running_mean"]
        found.setdefault("features.weight", torch.ones_like(mean))
        found.setdefault("features.bias", torch.zeros_like(mean))
    if "conv1.weight" in found:
        found["conv1.weight"] = found["conv1.weight"].flip(1)
    return found


def _check_fit(backbone: nn.Module, found: Mapping[str, Tensor], path: str | Path) -> None:
    """Refuse missing, unknown and misshapen weights, naming some of each."""
    own = backbone.state_dict()
    faults = {
        "missing": [
            name for name in own if name not in found and not name.endswith("num_batches_tracked")
        ],
        "unknown": [name for name in found if name not in own],
        "of a different shape": [
            f"{name} {list(found[name].shape)} instead of {list(own[name].shape)}"
            for name in own
            if name in found and found[name].shape != own[name].shape
        ],
    }
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in faults.items()
        if names
    ]
    if problems:
        raise DataError(
            f"{path} does not fit {type(backbone).__name__} ({'; '.join(problems)}); build the "
            "backbone with the depth, embedding_dim and shortcut of the file"
        )
