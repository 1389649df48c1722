"""Safetensors files, streamed: tensors of any size are written without a second copy in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qmargin.errors import CheckpointError, DataError
from qmargin.files import FileEntry, check_regular, write_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new safetensors file, synced to the disk, and describe it.

    Args:
        path: A name that does not exist yet.
        tensors: On any device; each is brought to the host when its turn comes.
        metadata: Texts for the file's header.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{name!r} is a tensor of {tensor.dtype} in the layout {tensor.layout}; "
                "a checkpoint holds strided tensors of floats, integers or booleans"
            )
    return write_file(path, _chunks(tensors, dict(metadata or {})))


def _chunks(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Iterator[memoryview]:
    # Wide numbers first, which keeps every tensor aligned for readers that map the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        if tensors[name].numel():
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file; what is wrong with it is a ``CheckpointError``."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, DataError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); restore it, or resume from an older checkpoint"
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in memory of its own.

    The copies matter: a tensor that maps the file would keep a deleted checkpoint on the disk.
    """
    with open_tensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
