"""Choice between Triton kernels and their plain reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

may_interpret = False  # tests run the kernels in Triton's interpreter: correct, but very slow


@cache
def has_triton() -> bool:
    """Whether Triton can be imported: looking for it on disk is slow."""
    return find_spec("triton") is not None


def why_not_triton(
    device: str, dtype: torch.dtype, screen_dtype: torch.dtype, num_classes: int = 1
) -> str | None:
    """Reason why kernels cannot compute the steps of a head; None if they can."""
    if device != "cuda" and not may_interpret:
        return f"tensors are on {device}, not cuda"
    if not has_triton():
        return "triton is not installed"
    if dtype != torch.float32:
        return f"prototypes are {dtype}, kernels take torch.float32"
    if screen_dtype not in (torch.float16, torch.bfloat16):
        return f"the screened copy is {screen_dtype}, kernels take float16 or bfloat16"
    return None if num_classes else "there are no classes"


def load_backend(
    device: str, dtype: torch.dtype, screen_dtype: torch.dtype, num_classes: int
) -> ModuleType:
    """The kernels where they can run, else the reference."""
    reason = why_not_triton(device, dtype, screen_dtype, num_classes)
    return import_module("qmargin.kernels." + ("head_reference" if reason else "triton.head"))
