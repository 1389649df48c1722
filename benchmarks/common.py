"""What benchmarks share: measuring in a process of its own, records, laps, pages.

A worker reads a job as JSON from the first argument and writes the result as JSON to standard
output, so that its memory is its own. Nothing here imports torch: a worker's peak would have it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qmargin.cli.doctor import installed_version
from qmargin.cli.options import named_path
from qmargin.cli.tables import markdown_table, output_console, print_table
from qmargin.errors import BackendError, ConfigError
from qmargin.files import write_atomically

if TYPE_CHECKING:
    from qmargin.evaluation.result import Result

ROOT = Path(__file__).parents[1]
GIB = 2.0**30
Job: TypeAlias = dict[str, Any]


class Tables:
    """Tables of a benchmark: each is printed when it is there, and all go to a page at the end.

    The page has a place for each between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; that
    of ``SUBJECT-machine`` gets the command, the commit, the machine and versions. What was not
    measured stays on the page.

    Args:
        subject: Of the benchmark.
        page: An existing file; None for no page.

    Raises:
        ConfigError: The page has no place for the machine.
    """

    def __init__(self, subject: str = "", page: Path | None = None) -> None:
        self._subject, self._page = subject, page
        self._console = output_console()
        self._texts: dict[str, str] = {}
        if page is not None:
            with_block(page, page.read_text(encoding="utf-8"), f"{subject}-machine", "")

    def show(
        self, name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        """Print a table, and keep it for its place on the page."""
        print_table(self._console, title, columns, rows)
        self._texts[name] = f"{title}:\n\n{markdown_table(columns, rows)}"

    def note(self, name: str, text: str) -> None:
        """Print a sentence, and keep it for the place of a table that is not there."""
        sys.stdout.write(text + "\n")
        self._texts[name] = text

    def write(self, packages: Sequence[str] = ()) -> None:
        """Rewrite the page; packages are those whose versions it names."""
        if self._page is None:
            return
        write_blocks(self._page, {**self._texts, f"{self._subject}-machine": _machine(packages)})


def write_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Rewrite a page with other blocks at their places."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        text = with_block(page, text, name, block)
    write_atomically(page, text.encode())


def with_block(page: Path, text: str, name: str, block: str) -> str:
    """Text of a page with another block at the place of that name.

    Raises:
        ConfigError: The page has no such place.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, is_begun, rest = text.partition(begin)
    _, is_ended, after = rest.partition(end)
    if not (is_begun and is_ended):
        raise ConfigError(f"{page} has no place for {name}; write {begin} and {end} into it")
    return f"{before}{begin}\n{block}\n{end}{after}"


def _machine(packages: Sequence[str]) -> str:
    found = {"Python": platform.python_version(), **{n: installed_version(n) for n in packages}}
    versions = [f"{name} {version}" for name, version in found.items() if version]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return (
        f"- Command: `{command_line()}`\n"
        f"- Commit: `{current_commit()}`, {today}\n"
        f"- Machine: {os.cpu_count()} CPU cores ({platform.machine()}), {platform.system()}\n"
        f"- Versions: {', '.join(versions)}"
    )


def command_line() -> str:
    """The command as it was typed."""
    return "python -m benchmarks " + shlex.join(sys.argv[1:])


def current_commit() -> str | None:
    """Of the sources that run, with a plus if they were changed since; None without git."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        result = subprocess.run(
            [git, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        return result.stdout.strip() if result.returncode == 0 else None

    head = ask("rev-parse", "--short", "HEAD")
    is_changed = ask("status", "--porcelain", "src", "benchmarks")
    return head if head is None else head + ("+" if is_changed else "")


def new_file(text: str) -> Path:
    """A file to write at the end of long work, in a folder that is there at its beginning."""
    path = named_path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a file in an existing folder; make the folder first"
        )
    return path


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive finite number")
    return value


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where results are written, besides standard output."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the results here")
    parser.add_argument(
        "--page",
        type=existing_file,
        metavar="FILE",
        help="also put the tables into this page, at their places",
    )


def existing_file(text: str) -> Path:
    """A page that is there, to be rewritten in places."""
    path = named_path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is not a file; name a page with places for tables"
        )
    return path


def benchmark_options(
    arguments: argparse.Namespace, subject: str
) -> tuple[dict[str, Any], Path | None, Tables]:
    """Parsed options as the settings of a benchmark have them, and where its results go."""
    options: dict[str, Any] = vars(arguments).copy()
    del options["run"]
    json_path: Path | None = options.pop("json")
    return options, json_path, Tables(subject, options.pop("page"))


def run_in_process(module: str, job: dict[str, Any], *, what: str, remedy: str) -> dict[str, Any]:
    """What a fresh process found.

    Args:
        module: That takes the job as JSON and writes what it found as JSON.
        job: For the process.
        what: Is done, for a message.
        remedy: For the same.

    Raises:
        BackendError: The process failed; the message has its last line.
    """
    command = [sys.executable, "-m", module, json.dumps(job)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # whatever the folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or ["killed"])[-1]
        raise BackendError(f"{what} failed ({reason}); {remedy}")
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def write_record(
    path: Path, settings: dict[str, Any], found: dict[str, Any], packages: Sequence[str] = ()
) -> None:
    """Write settings, machine, versions of packages and numbers as JSON."""
    machine = {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in packages},
    }
    record = {"settings": settings, "machine": machine, **found}
    write_atomically(path, (json.dumps(record, indent=2) + "\n").encode())


def run_evaluation_benchmark(
    subject: str,
    settings: dict[str, Any],
    title: str,
    *,
    json_path: Path | None = None,
    tables: Tables | None = None,
) -> dict[str, Any]:
    """Make inputs in one process, measure in another, print a line per step; what was found.

    Args:
        subject: Whose module calls ``run_job`` for both steps.
        settings: Of the job.
        title: Of the table.
        json_path: Where the numbers are written, if anywhere.
        tables: What prints the table.
    """
    with tempfile.TemporaryDirectory(prefix="qmargin-bench-") as folder:
        for step in ("make", "measure"):
            job = {**settings, "folder": folder, "step": step}
            what, remedy = f"the step {step!r}", "try smaller sizes"
            found = run_in_process(f"benchmarks.{subject}", job, what=what, remedy=remedy)
    rows = [[name, f"{seconds:.1f}"] for name, seconds in found["seconds"].items()]
    rows.append(["in all", f"{found['total_seconds']:.1f}"])
    rows.append(["in all, of processors", f"{found['cpu_seconds']:.1f}"])
    peak = f"peak of the process {found['peak_bytes'] / GIB:.2f} GiB"
    (tables or Tables()).show(subject, f"{title}; {peak}", ["step", "s"], rows)
    if json_path is not None:
        write_record(json_path, settings, found)
    return found


def peak_bytes() -> int:
    """Largest memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Laps:
    """Seconds of one step after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def __call__(self, name: str) -> None:
        """End a step; the next begins."""
        now = time.perf_counter()
        self.seconds[name], self.began = now - self.began, now


def found(seconds: dict[str, float], result: Result) -> Job:
    """Times, memory, and what was measured on how many trials."""
    return {
        "seconds": seconds,
        "total_seconds": sum(seconds.values()),
        "cpu_seconds": time.process_time(),
        "peak_bytes": peak_bytes(),
        "num_genuine": result.protocol.num_genuine,
        "num_impostors": result.protocol.num_impostors,
        "eer": result.measures.eer.value,
        "tar": {f"{point.far_target:g}": point.tar for point in result.measures.tar},
    }


def run_job(make: Callable[[Job], None], measure: Callable[[Job], Job]) -> None:
    """Take the step that the command line asks for.

    The inputs are made by one process and measured by another: making them leaves no trace in the
    peak of memory.
    """
    job = json.loads(sys.argv[1])
    made: Job = {}
    if job["step"] == "make":
        make(job)
    else:
        made = measure(job)
    sys.stdout.write(json.dumps(made) + "\n")
