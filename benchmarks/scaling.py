"""The sharded head beyond one machine: shard times, a model, and its check with real ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import GIB, Tables, add_outputs, command_line, positive, write_record
from benchmarks.scaling_model import (
    SOURCES,
    Calibrated,
    Network,
    Prediction,
    Setting,
    ShardTimes,
    overlap,
    predict,
    read_points,
    simulate_candidates,
)
from qmargin.cli.options import count, named_path
from qmargin.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.scaling_measure import Check

RANKS = (8, 16, 64, 128, 512)
CLASSES = (2_000_000, 10_000_000, 30_000_000, 100_000_000)
OVERLAP_RANKS = (8, 64, 512)
REPEATS = 5
WORTH = 0.05  # share of a step that an overlap must save to be built
NOT_YET = "Not measured yet; predictions need `--times FILE` of `--measure` on a GPU."
PACKAGES = ("torch", "numpy", "scipy")
NETWORK = ("node", "nvlink", "nic", "efficiency", "call")  # that options change


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``scaling`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "scaling",
        help="predict steps of the sharded head on many GPUs, and check the model",
        description="Predict the time of a step of the head with classes split over many GPUs, "
        "from measured times of one shard and a model of the collectives. --measure measures "
        "shards on this machine, --check compares the model with real ranks on it.",
    )
    add = parser.add_argument
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--measure", action="store_true", help="measure shards; write --json")
    modes.add_argument("--check", action="store_true", help="compare with real ranks, by gloo")
    add("--times", type=named_path, metavar="FILE", help="of --measure --json, to predict from")
    add("--device", default="auto", help="of --measure: auto, cpu or cuda")
    add("--rows", type=count, nargs="+", help="of --measure: rows of all ranks together")
    add("--classes", type=count, nargs="+", help="to predict, of all ranks; else of a shard")
    add("--dim", type=count, help="embedding size (that of the times; 64 on a CPU, else 512)")
    add(
        "--processes", type=count, nargs="+", default=[1, 2, 4], help="of --check: processes to run"
    )
    add("--ranks", type=count, nargs="+", default=list(RANKS), help="GPUs to predict for")
    add("--batch", type=count, default=128, help="rows of a rank, to predict")
    known = Network()
    for name in NETWORK:
        value, kind = getattr(known, name), count if name == "node" else positive
        add(f"--{name}", type=kind, default=value, help=SOURCES[name].meaning)
    add("--repeats", type=count, help="timed turns; medians are shown (5; 11 of --check)")
    add("--seconds", type=positive, default=1.0, help="limit for each shard, in seconds")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    if arguments.measure:
        measure(arguments)
    elif arguments.check:
        check_model(arguments)
    else:
        network = Network(**{name: getattr(arguments, name) for name in NETWORK})
        show_predictions(
            read_times(arguments.times),
            network,
            ranks=arguments.ranks,
            classes=arguments.classes or CLASSES,
            rows=arguments.batch,
            dim=arguments.dim,
            tables=Tables("scaling", arguments.page),
            json_path=arguments.json,
        )


def read_times(path: Path | None) -> dict[str, Any] | None:
    """The record of ``--measure``; None without a file.

    Raises:
        ConfigError: The file is missing, or is no such record.
    """
    if path is None:
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; make it with --measure --json {path}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); make it with --measure --json") from None
    if not isinstance(record, dict) or not record.get("points"):
        raise ConfigError(f"{path} has no measured times; make it with --measure --json {path}")
    return record


def measure(options: argparse.Namespace) -> None:
    """Measure shards on this machine, and print the times with their fit."""
    from benchmarks.scaling_measure import SIZES, measure_shards
    from benchmarks.timing import describe_machine
    from qmargin.training.distributed import find_device

    device = find_device(options.device)
    sizes = SIZES.get(device.type, SIZES["cuda"])
    given = {
        "rows": options.rows and tuple(options.rows),
        "classes": options.classes and tuple(options.classes),
        "dim": options.dim,
    }
    sizes = replace(sizes, **{name: value for name, value in given.items() if value})
    setting = Setting()

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    points = measure_shards(
        sizes, device, setting, repeats=options.repeats or REPEATS, seconds=options.seconds, say=say
    )
    record = {
        "command": command_line(),
        "device": describe_machine(device, None),
        "setting": asdict(setting),
        "points": points,
    }
    if options.json is not None:
        write_record(options.json, asdict(sizes), record, PACKAGES)
    tables = Tables("scaling", options.page)
    tables.show("scaling-shards", *shards_table(record))
    tables.show("scaling-fit", *fit_table(ShardTimes.fit(read_points(points))))
    tables.write(PACKAGES)


Cells = tuple[str, list[str], list[list[str]]]


def shards_table(record: dict[str, Any]) -> Cells:
    """Measured times of shards, the stages side by side."""
    sizes = ("path", "world", "rows", "classes")
    stages = list(dict.fromkeys(point["stage"] for point in record["points"]))
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for point in record["points"]:
        found.setdefault(tuple(point[name] for name in sizes), {})[point["stage"]] = point
    rows = []
    for key, own in found.items():
        point = next(iter(own.values()))
        cells = [str(key[0]), str(key[1]), f"{key[2]:,}", f"{key[3]:,}"]
        cells.append(f"{point['merged'] / point['rows']:.0f}" if point["merged"] else "")
        rows.append(cells + [f"{own[stage]['ms']:.2f}" if stage in own else "" for stage in stages])
    device = record["device"]
    title = (
        f"Milliseconds of one rank, {device['device']}, torch {device['torch']}, "
        f"commit `{device['commit']}`, `{record['command']}`"
    )
    columns = ["path", "ranks", "rows of all", "classes of the shard", "candidates of a row"]
    return title, columns + stages, rows


def fit_table(times: ShardTimes) -> Cells:
    """Coefficients and errors of the fitted curves."""
    rows = []
    for (path, stage), curve in times.curves.items():
        work = [f"{name}: {1e9 * rate:.3g}" for name, rate in curve.rates.items() if rate > 0.0]
        errors = sorted(abs(error) for error in curve.errors)
        cells = [path, stage, f"{curve.host:.2f}", f"{curve.overlap:g}", "; ".join(work)]
        rows.append([*cells, f"{errors[len(errors) // 2]:.0%}", f"{errors[-1]:.0%}"])
    title = "Fitted curves, (host^p + device^p)^(1/p)"
    columns = [
        "path",
        "stage",
        "host, ms",
        "p",
        "device, ms for 10^9 of",
        "error, median",
        "largest",
    ]
    return title, columns, rows


def show_predictions(
    record: dict[str, Any] | None,
    network: Network,
    *,
    ranks: Sequence[int],
    classes: Sequence[int],
    rows: int,
    dim: int | None,
    tables: Tables,
    json_path: Path | None = None,
) -> list[Prediction]:
    """Print every table of the page that needs no real ranks; what was predicted."""
    setting = Setting(**(record["setting"] if record else {}))
    setting = replace(setting, cosines=tuple(setting.cosines))  # type: ignore[arg-type]
    tables.show("scaling-assumptions", *assumptions_table(network, setting, rows))
    found: list[Prediction] = []
    dim = dim or (record["points"][0]["dim"] if record else 512)
    tables.show("scaling-candidates", *candidates_table(classes, ranks, dim, setting))
    if record is None:
        for name in ("shards", "fit", "predictions", "calls", "overlap"):
            tables.note(f"scaling-{name}", NOT_YET)
        tables.write(PACKAGES)
        return found
    times = ShardTimes.fit(read_points(record["points"]))
    for path in dict.fromkeys(path for path, stage in times.curves if stage == "step"):
        for num_classes in classes:
            for world in ranks:
                sizes: Any = {"ranks": world, "num_classes": num_classes, "rows": rows, "dim": dim}
                found.append(predict(times, network, path, **sizes, setting=setting))
    tables.show("scaling-shards", *shards_table(record))
    tables.show("scaling-fit", *fit_table(times))
    tables.show("scaling-predictions", *predictions_table(found, rows, dim))
    tables.show("scaling-calls", *calls_table(found))
    tables.show("scaling-overlap", *overlap_table(times, found))
    tables.write(PACKAGES)
    if json_path is not None:
        predicted = [prediction_row(one) for one in found]
        settings = {**asdict(network), **asdict(setting), "rows": rows, "dim": dim}
        write_record(json_path, settings, {"predictions": predicted}, PACKAGES)
    return found


def prediction_row(found: Prediction) -> dict[str, Any]:
    """For JSON."""
    calls = [{**call._asdict(), "ms": ms} for call, ms in found.calls]
    return {
        "path": found.path,
        "ranks": found.ranks,
        "num_classes": found.num_classes,
        **found.shape._asdict(),
        "ms": found.ms,
        "collectives_ms": found.collectives_ms,
        "memory_bytes": found.memory_bytes,
        "is_between_measured": found.is_covered,
        "calls": calls,
    }


def assumptions_table(network: Network, setting: Setting, rows: int) -> Cells:
    """Every number that was not measured here, with its source."""
    cells = [
        [source.meaning, f"{getattr(network, name):g} {source.unit}".strip(), source.origin]
        for name, source in SOURCES.items()
    ]
    low, high = setting.cosines
    cells += [
        ["rows of a GPU", str(rows), "assumption"],
        [
            "loss of the sparse path",
            f"alpha {setting.alpha:g}, scale {setting.scale:g}, margin {setting.margin:g}",
            "assumption",
        ],
        ["loss of the chunked path", "ArcFace", "assumption"],
        ["cosines with a row's own class", f"{low:g} to {high:g}", "assumption: mid-training"],
        ["other classes", "random directions", "assumption: as at the start of training"],
        ["ranks", "as fast as each other, candidates spread evenly", "assumption"],
    ]
    return "Assumptions", ["what", "value", "source"], cells


def candidates_table(
    classes: Sequence[int], ranks: Sequence[int], dim: int, setting: Setting
) -> Cells:
    """Candidates of a row over all ranks, with the bound of the best rank, and as the head does."""
    rows = []
    for num_classes in classes:
        for steps, name in ((0, "bound of the best rank alone"), (None, "as the head does")):
            given = {} if steps is None else {"steps": steps}
            cells = [
                f"{simulate_candidates(num_classes, world, dim, setting, **given):,.0f}"
                for world in ranks
            ]
            rows.append([_millions(num_classes), name, *cells])
    title = f"Candidates of a row over all GPUs, simulated, {dim} dimensions"
    return title, ["classes", "bound", *(f"{world} GPUs" for world in ranks)], rows


def _millions(num_classes: int) -> str:
    is_round = num_classes >= 1_000_000 and num_classes % 100_000 == 0
    return f"{num_classes / 1e6:g} million" if is_round else f"{num_classes:,}"


def predictions_table(found: Sequence[Prediction], rows: int, dim: int) -> Cells:
    """Times, shares of the collectives and memory, a row for each path and number of classes."""
    ranks = list(dict.fromkeys(one.ranks for one in found))
    cells: dict[tuple[str, int], list[str]] = {}
    for one in found:
        share = one.collectives_ms / one.ms
        mark = "" if one.is_covered else " *"
        text = f"{one.ms:.1f} ms, {share:.0%}, {one.memory_bytes / GIB:.1f} GiB{mark}"
        cells.setdefault((one.path, one.num_classes), []).append(text)
    title = (
        f"Predicted step of the head (forward, backward, ExactSGD), {rows} rows a GPU, {dim} "
        "dimensions: time, share of the collectives, memory of a GPU. A star marks shards or "
        "batches outside of the measured sizes"
    )
    columns = ["path", "classes", *(f"{world} GPUs" for world in ranks)]
    return title, columns, [[path, _millions(k), *own] for (path, k), own in cells.items()]


def calls_table(found: Sequence[Prediction]) -> Cells:
    """The collectives of one sparse step on as many nodes as are in the middle."""
    ranks = sorted({one.ranks for one in found})
    sparse = [one for one in found if one.path == "sparse"] or list(found)
    one = next(one for one in sparse if one.ranks == ranks[len(ranks) // 2])
    rows = [
        [call.what, call.kind.replace("_", "-"), f"{call.num_bytes:,}", f"{ms:.3f}"]
        for call, ms in one.calls
    ]
    title = (
        f"Collectives of a {one.path} step on {one.ranks} GPUs, {_millions(one.num_classes)} "
        f"classes: {one.collectives_ms:.2f} ms of {one.ms:.2f} ms"
    )
    return title, ["what", "collective", "bytes a rank hands over", "ms"], rows


def overlap_table(times: ShardTimes, found: Sequence[Prediction]) -> Cells:
    """What hiding the gather behind the screen would save, with the verdict as the title."""
    rows, most, own_first = [], 0.0, 0.0
    for one in found:
        if one.path != "sparse" or one.screen_ms is None:
            continue
        saved = overlap(times, one)
        most, own_first = max(most, saved.most), max(own_first, saved.own_first)
        if one.ranks in OVERLAP_RANKS or len(found) < len(RANKS):
            cells = [str(one.ranks), _millions(one.num_classes), f"{one.gather_ms():.3f}"]
            cells += [f"{one.screen_ms:.2f}", f"{one.ms:.2f}"]
            rows.append([*cells, f"{saved.most:.1%}", f"{saved.own_first:.1%}"])
    columns = ["GPUs", "classes", "gather, ms", "screen, ms", "step, ms", "saves at most"]
    return verdict(most, own_first), [*columns, "own rows first"], rows


def verdict(most: float, own_first: float) -> str:
    """Whether an overlap of gather and screen is worth building."""
    text = f"Hiding the gather behind the screen saves at most {most:.1%} of a step"
    if most < WORTH:
        return f"{text}, less than the {WORTH:.0%} that would make it worth building: not built"
    text += f" if all of it is hidden, and {own_first:.1%} if own rows are screened first"
    is_worth = own_first >= WORTH
    return f"{text}: {'worth building' if is_worth else 'only a gather in parts would pay'}"


def check_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict and measure steps of several processes on this machine, and print both."""
    from benchmarks.scaling_measure import Check

    check = Check(processes=tuple(options.processes))
    check = replace(check, rounds=options.repeats or check.rounds)
    tables = Tables("scaling-check", options.page)
    found = compare_with_ranks(check)
    tables.show("scaling-check", *check_table(check, found))
    tables.write(PACKAGES)
    if options.json is not None:
        write_record(options.json, asdict(check), {"found": found}, PACKAGES)
    return found


def compare_with_ranks(check: Check) -> list[dict[str, Any]]:
    """Predicted and measured steps, by number of processes, path and classes."""
    from benchmarks.scaling_measure import run_check

    found = []
    for world in check.processes:
        measured = run_check(check, world)
        times = ShardTimes.fit(read_points(measured["points"]), overlaps=(1.0,))
        messages: dict[str, list[tuple[int, float]]] = {}
        for kind, size, ms in measured["messages"]:
            messages.setdefault(kind, []).append((size, ms))
        network = Calibrated.fit(world, messages)
        for row in measured["measured"]:
            one = predict(
                times,
                network,
                row["path"],
                ranks=world,
                num_classes=row["num_classes"],
                rows=row["rows"],
                dim=check.dim,
                setting=check.setting,
                backend="gloo",
            )
            found.append(
                {
                    **row,
                    "processes": world,
                    "candidates": row["candidates"] * world,
                    "predicted_candidates": one.shape.merged / one.shape.rows,
                    "predicted_ms": one.ms,
                    "collectives_ms": one.collectives_ms,
                    "lines": network.lines,
                }
            )
    return found


def check_table(check: Check, found: Sequence[dict[str, Any]]) -> Cells:
    """Predicted beside measured."""
    rows = []
    for row in found:
        cells = [str(row["processes"]), row["path"], f"{row['num_classes']:,}"]
        is_sparse = row["path"] == "sparse"
        for name in ("predicted_candidates", "candidates"):
            cells.append(f"{row[name]:.0f}" if is_sparse else "")
        cells += [f"{row[name]:.2f}" for name in ("collectives_ms", "predicted_ms", "ms")]
        rows.append([*cells, f"{row['predicted_ms'] / row['ms']:.2f}"])
    title = (
        f"Steps of several processes on this machine ({os.cpu_count()} cores, one thread each, "
        f"gloo), {check.rows} rows a process, {check.dim} dimensions"
    )
    columns = ["processes", "path", "classes", "candidates of a row, predicted", "measured"]
    columns += ["of it collectives, ms", "predicted, ms", "measured, ms", "predicted / measured"]
    return title, columns, rows
