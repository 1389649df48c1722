"""Choice between Triton kernels and their plain reference."""

from __future__ import annotations

import warnings
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
    if not num_classes:
        return "there are no classes"
    return fault_of_kernels(torch.cuda.current_device()) if device == "cuda" else None


@cache
def fault_of_kernels(index: int) -> str | None:
    """Why a GPU cannot run the product of the screen, the largest kernel; None if it can.

    Triton needs a C compiler and a recent driver, and says so when it builds its first kernel.
    """
    try:
        _try_kernels(torch.device("cuda", index))
    except torch.OutOfMemoryError:  # no such reason
        raise
    except Exception as error:  # of Triton, its compiler or the driver
        instead = "heads take steps of plain PyTorch, which are slower"
        return f"kernels cannot run ({warn_of_fault(error, 'of the head', instead)})"
    return None


def warn_of_fault(error: Exception, which: str, instead: str) -> str:
    """Warn that these kernels cannot run, and return why."""
    fault = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"kernels {which} cannot run here ({fault}); {instead}. Triton needs a C compiler and a "
        "recent driver",
        RuntimeWarning,
        stacklevel=4,
    )
    return fault


def _try_kernels(device: torch.device) -> None:
    kernels = import_module("qmargin.kernels.triton.head")
    rows, copy = (torch.zeros((n, 64), dtype=torch.float16, device=device) for n in (128, 256))
    kernels.group_maxima(rows, copy, torch.zeros(128, dtype=torch.int64, device=device), 256)


def load_backend(
    device: str, dtype: torch.dtype, screen_dtype: torch.dtype, num_classes: int
) -> ModuleType:
    """The kernels where they can run, else the reference."""
    reason = why_not_triton(device, dtype, screen_dtype, num_classes)
    return import_module("qmargin.kernels." + ("head_reference" if reason else "triton.head"))
