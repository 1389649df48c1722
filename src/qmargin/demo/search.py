"""The search behind the demo's settings: the same effort for every loss, no test identity.

``python -m qmargin.demo.search --out search.jsonl`` trains every entry of ``GRID`` by the demo's
recipe, at the size of the demo on a CPU, and measures it on validation identities of worlds that no
demo uses. It can be interrupted: what the file holds is not done again. With ``--page`` it also
writes what was found as Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from qmargin.demo.losses import GRID, LOSSES, DemoLoss
from qmargin.demo.recipe import SIZES, Size, demo_recipe
from qmargin.errors import DataError
from qmargin.files import write_atomically

WORLD = 1000  # the first seed; no demo uses it
FARS = (1e-2, 1e-3, 1e-4, 1e-5)
Record = dict[str, Any]


class Trial(NamedTuple):
    """One training and its validation."""

    loss: DemoLoss
    seed: int
    size: Size
    device: str

    @property
    def name(self) -> Record:
        """What tells its record from all others."""
        return {**self.loss._asdict(), "seed": self.seed, "size": self.size._asdict()}

    def made(self, record: Record) -> bool:
        """Whether a record is of this training, on whatever device."""
        return all(record.get(key) == value for key, value in self.name.items())


def trials(keys: Sequence[str], *, seeds: int, size: Size, device: str = "cpu") -> list[Trial]:
    """Every setting of some losses in every world; all settings of a world before the next one."""
    return [
        Trial(
            LOSSES[key]._replace(alpha=alpha, scale=scale, margin=margin),
            WORLD + seed,
            size,
            device,
        )
        for seed in range(seeds)
        for key in keys
        for alpha, scale, margin in GRID[key]
    ]


def run_search(out: Path, wanted: Sequence[Trial], *, jobs: int = 1) -> list[Record]:
    """Run what ``out`` does not hold yet; it gets one JSON object per line.

    Args:
        out: File of results, made or continued.
        wanted: What to train.
        jobs: Trainings at a time, each in a process of its own; they may share a GPU.
    """
    done = read_records(out)
    missing = [trial for trial in wanted if not any(trial.made(record) for record in done)]
    with out.open("a", encoding="utf-8") as file:
        for number, record in enumerate(_measured(missing, jobs), start=1):
            file.write(json.dumps(record) + "\n")
            file.flush()
            done.append(record)
            sys.stdout.write(f"[{number}/{len(missing)}] {_line(record)}\n")
            sys.stdout.flush()
    return done


def _measured(missing: Sequence[Trial], jobs: int) -> Iterator[Record]:
    """Records as they come."""
    if jobs == 1:
        yield from map(measure, missing)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(jobs, context, _start_worker, (threads,)) as pool:
        pending: set[Future[Record]] = {pool.submit(measure, trial) for trial in missing}
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(threads: int) -> None:
    """Share the cores, and leave the terminal to the parent."""
    import torch

    torch.set_num_threads(threads)
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def measure(trial: Trial) -> Record:
    """EER and TARs on validation identities; a training that fails accepts nobody."""
    try:
        found = _validated(trial)
    except DataError as error:  # steps that are not finite, or embeddings
        found = {"eer": 1.0, "tar": {f"{far:g}": 0.0 for far in FARS}, "failed": str(error)}
    return {**trial.name, "device": trial.device, **found}


def _validated(trial: Trial) -> Record:
    from qmargin.data.strokes import StrokeIdentities
    from qmargin.demo.embed import embed_pictures
    from qmargin.evaluation.all_pairs import evaluate_all_pairs
    from qmargin.training.loop import train

    size, device = trial.size, trial.device
    recipe = demo_recipe(trial.loss, seed=trial.seed, size=size)
    validation = StrokeIdentities(
        size.num_test, size.samples_test, seed=trial.seed, split="validation"
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(recipe, folder, device=device)
        if outcome.signal or outcome.checkpoint is None:
            raise KeyboardInterrupt
        embeddings = embed_pictures(recipe, outcome.checkpoint, validation, device=device)
    found = evaluate_all_pairs(embeddings, validation.labels, FARS, num_hardest=0, device=device)
    rates = {f"{point.far_target:g}": point.tar for point in found.tar}
    return {"eer": found.eer.eer, "tar": rates}


def read_records(path: Path) -> list[Record]:
    """What a search has found so far; half a line at the end, of a search that was killed, is cut.

    Raises:
        DataError: Another line is not one of a search.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole, _, rest = text.rpartition(b"\n")
    if rest:
        write_atomically(path, whole + b"\n" if whole else b"")
    records = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            records.append({**record, "tar": dict(record["tar"]), "eer": float(record["eer"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {path} is not of a search ({error!r}); give another --out"
            ) from error
    return records


def _line(record: Record) -> str:
    tars = ", ".join(f"{100 * tar:.1f} % at {far}" for far, tar in record["tar"].items())
    return (
        f"{record['title']} alpha {record['alpha']:g} scale {record['scale']:g} margin "
        f"{record['margin']:g}, seed {record['seed']}: EER {100 * record['eer']:.2f} %, TAR {tars}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="results, made or continued")
    add("--losses", nargs="+", choices=tuple(GRID), default=tuple(GRID))
    add("--seeds", type=int, default=2, metavar="N", help="worlds in which a setting is tried (2)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)")
    add("--jobs", type=int, default=1, metavar="N", help="trainings at a time (1)")
    add("--epochs", type=int, default=SIZES["cpu"].epochs, help="of each training")
    add("--page", type=Path, metavar="FILE", help="also write a page of all results so far")
    arguments = parser.parse_args(argv)
    if min(arguments.seeds, arguments.jobs, arguments.epochs) < 1:
        parser.error("--seeds, --jobs and --epochs must be at least 1")
    size = SIZES["cpu"]._replace(epochs=arguments.epochs)
    wanted = trials(arguments.losses, seeds=arguments.seeds, size=size, device=arguments.device)
    records = run_search(arguments.out, wanted, jobs=arguments.jobs)
    if arguments.page is not None:
        from qmargin.demo.search_page import search_page

        command = f"python -m qmargin.demo.search {' '.join(argv or sys.argv[1:])}"
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.page, search_page(records, command).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
