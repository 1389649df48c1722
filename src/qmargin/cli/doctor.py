"""``qmargin doctor``: what this machine can run, and what it lacks."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_EXTRAS = {
    "triton": "kernels of the head on NVIDIA GPUs",
    "matplotlib": "figures of `qmargin report`",
    "tensorboard": "`qmargin train --track tensorboard`",
    "wandb": "`qmargin train --track wandb`",
    "entmax": "a comparison in `qmargin bench loss`",
}
Row = tuple[str, str]


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, and why not the rest",
        description="Say which devices, packages and backends of the head this machine has, why "
        "others cannot be used, and how much memory and disk is free.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="whose disk to look at (here)"
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> None:
    """Write the table."""
    rows = [*_software(), *_devices(), *_backends(), *_extras(), *_machine(arguments.out)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name:{width}}  {value}\n")


def _software() -> Iterator[Row]:
    import torch

    import qmargin

    yield "qmargin", qmargin.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    yield "cuda of torch", torch.version.cuda or "none: this is a build without it"


def _devices() -> Iterator[Row]:
    import torch
    import torch.distributed as dist

    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use by torch"
    if not torch.cuda.is_available():
        has_cuda = torch.version.cuda is not None
        yield "gpu", "none is visible: check the driver" if has_cuda else "none that torch can use"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"gpu {index}",
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, {_gib(free)} of "
            f"{_gib(total)} free",
        )
    kinds = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    found = [name for name, is_available in kinds.items() if is_available()]
    yield "several ranks", ", ".join(found) or "not possible with this build of torch"


def _backends() -> Iterator[Row]:
    """For each device, the backend of the head that would run, and why not the others."""
    import torch

    from qmargin.kernels.dispatch import BACKENDS, Call, choose_backend

    for device in ("cuda", "cpu"):
        if device == "cuda" and not torch.cuda.is_available():
            yield f"head on {device}", "no such device"
            continue
        screen = torch.float16 if device == "cuda" else torch.float32  # as the head chooses
        call = Call(device, torch.float32, screen)
        chosen = choose_backend(call).name
        others = [
            f"not {backend.name}: {backend.why_not(call) or f'{chosen} comes first'}"
            for backend in BACKENDS
            if backend.name != chosen
        ]
        yield f"head on {device}", "; ".join([f"{chosen} runs", *others])


def _extras() -> Iterator[Row]:
    for name, purpose in _EXTRAS.items():
        yield name, _version(name) or f"not installed; needed for {purpose}"


def _machine(folder: Path) -> Iterator[Row]:
    import torch

    from qmargin.heads.memory import available_memory

    memory = available_memory(torch.device("cpu"))
    yield "free memory", "unknown" if memory is None else _gib(memory)
    while not folder.exists():  # a folder that a run would make
        folder = folder.parent
    yield "free disk", f"{_gib(shutil.disk_usage(folder).free)} at {folder.resolve()}"


def _version(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "installed, of unknown version"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
