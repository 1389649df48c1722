"""Which implementation serves a call, and why not the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch

from qmargin.errors import BackendError


class Call(NamedTuple):
    """What dispatch looks at: nothing that needs the device to answer."""

    device: str
    dtype: torch.dtype
    screen_dtype: torch.dtype
    may_interpret: bool = False  # run kernels in Triton's interpreter: right, and very slow


class Backend(NamedTuple):
    """A module with the operations of the sparse head."""

    name: str
    module: str
    why_not: Callable[[Call], str | None]  # a reason, or None when it can run


def _why_not_triton(call: Call) -> str | None:
    is_interpreted = call.may_interpret and os.environ.get("TRITON_INTERPRET") == "1"
    if call.device != "cuda" and not is_interpreted:
        return f"tensors are on {call.device}, not cuda"
    if find_spec("triton") is None:
        return "triton is not installed"
    if call.dtype != torch.float32:
        return f"prototypes are {call.dtype}, kernels take torch.float32"
    if call.screen_dtype not in (torch.float16, torch.bfloat16):
        return f"the screened copy is {call.screen_dtype}, kernels take float16 or bfloat16"
    return None


BACKENDS = (  # the first that can run wins
    Backend("triton", "qmargin.kernels.triton.head", _why_not_triton),
    Backend("reference", "qmargin.kernels.head_reference", lambda call: None),
)


def choose_backend(call: Call, name: str = "auto") -> Backend:
    """Return the named backend, or the first that can run; raise with every reason."""
    reasons = []
    for backend in BACKENDS:
        if name in ("auto", backend.name):
            reason = backend.why_not(call)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
    known = ", ".join(backend.name for backend in BACKENDS)
    detail = "; ".join(reasons) or f"known: {known}"
    raise BackendError(f"no backend {name!r} for this call ({detail})")


@lru_cache  # asked several times a step, and looking for triton on disk is slow
def load_backend(call: Call, name: str = "auto") -> ModuleType:
    """The module of the chosen backend."""
    return import_module(choose_backend(call, name).module)
