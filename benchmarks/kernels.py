"""Device time of every kernel of a step of the head: where the milliseconds of ``sizes`` go."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import command_line, new_file
from benchmarks.sizes import WARM_CALLS, Size, Stage, all_contenders, failure, find_sizes
from benchmarks.sizes_page import ARCFACE_AUTO, AUTO, GRADIENTS
from benchmarks.timing import clean_up, describe_machine, once_ms
from qmargin.cli.tables import output_console, print_table
from qmargin.files import write_atomically
from qmargin.training.distributed import find_device

PROFILED = (AUTO, ARCFACE_AUTO, *GRADIENTS)
STEPS = 5  # under the profiler
SHOWN = 14  # kernels of a contender that take longest
NAME_LENGTH = 60  # templates of PyTorch have names of several hundred letters


@dataclass(frozen=True)
class KernelTime:
    """One kernel in a step of a contender, milliseconds and calls of a step."""

    size: str
    contender: str
    kernel: str
    calls: float
    ms: float


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``kernels`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "kernels",
        help="device time of every kernel of a step of the head",
        description="Profile steps of the head, with and without an update, kernel by kernel.",
    )
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="SIZE", help="as of `sizes` (5994 and 2059906)")
    add("--device", default="auto", help="auto, cpu or cuda (auto)")
    add("--commit", help="recorded in the file (default: ask git)")
    add("--json", type=new_file, metavar="FILE", help="write everything here, after every size")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    device = find_device(arguments.device)
    wanted = arguments.sizes or (["5994", "2059906"] if device.type == "cuda" else None)
    record: dict[str, Any] = {
        "command": command_line(),
        "machine": describe_machine(device, arguments.commit),
        "rows": [],
    }
    console = output_console()
    for size in find_sizes(wanted, device):
        found = profile_size(size, device)
        record["rows"] += [asdict(row) for row in found]
        columns = ["step", "kernel", "calls", "ms"]
        cells = [
            [row.contender, row.kernel[:NAME_LENGTH], f"{row.calls:g}", f"{row.ms:.3f}"]
            for row in shown(found)
        ]
        print_table(console, f"Kernels of a step, {size}", columns, cells)
        if arguments.json is not None:
            save(arguments.json, record)


def save(path: Path, record: dict[str, Any]) -> None:
    """Write the file."""
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def shown(rows: list[KernelTime]) -> list[KernelTime]:
    """The kernels that take longest of every contender, which comes with its whole step."""
    names = dict.fromkeys(row.contender for row in rows)
    own = {name: [row for row in rows if row.contender == name] for name in names}
    return [row for found in own.values() for row in found[: 2 + SHOWN]]


def profile_size(size: Size, device: torch.device) -> list[KernelTime]:
    """Rows of all contenders: the whole step, the sum of its kernels, kernels by time."""
    stage, rows = Stage(size, device, 0), []
    for contender in all_contenders():
        if contender.name not in PROFILED or size.classes < contender.fewest_classes:
            continue
        try:
            step = contender.build(stage).step
            for _ in range(WARM_CALLS):
                step()
            whole = once_ms(step, device, STEPS)
            kernels = profile_step(step, device)
        except Exception as error:  # said in its row
            rows.append(KernelTime(str(size), contender.name, failure(error), 0.0, 0.0))
            continue
        total = sum(ms for _, _, ms in kernels)
        named = [("whole step", 1.0, whole), ("all kernels", 0.0, total), *kernels]
        rows += [KernelTime(str(size), contender.name, *one) for one in named]
    clean_up()
    return rows


def profile_step(step: Any, device: torch.device) -> list[tuple[str, float, float]]:
    """Name, calls and milliseconds of each kernel of a step, longest first."""
    is_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        for _ in range(STEPS):
            step()
        if is_cuda:
            torch.cuda.synchronize(device)
    clock = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    rows = [
        (event.key, event.count / STEPS, getattr(event, clock) / 1e3 / STEPS)
        for event in found.key_averages()
    ]
    return sorted((row for row in rows if row[2] > 0.0), key=lambda row: -row[2])
