"""How often intervals over training runs and test identities hold the truth, by simulation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from benchmarks.common import Tables, add_outputs, benchmark_options, write_record
from qmargin.errors import ConfigError
from qmargin.metrics.bootstrap import interval
from qmargin.metrics.runs import LEAST_PAIRS, Estimate, Runs, difference_over_runs, logits

Floats = NDArray[np.float64]
PACKAGES = ("numpy", "scipy")  # whose versions matter
LEVEL, POWER = 0.95, 0.8
SIZES = ((2, 2), (3, 3), (4, 4), (6, 6), (6, 3))  # runs of the two losses
PER_BLOCK = 50  # studies in memory at once


class Population(NamedTuple):
    """Standard deviations of the logit with which an identity is accepted."""

    name: str
    seeds: float  # between trainings
    identities: float  # between identities, alike in all trainings of both losses
    own_identities: float  # between identities, alike in the trainings of one loss
    apart: float  # between identities, of each training apart
    shares_subjects: bool = True
    common_seeds: float = 0.0  # between seeds, alike in both losses


TOGETHER = Population("seeds vary much, both losses alike", 0.07, 1.0, 0.6, 0.6, True, 0.25)
POPULATIONS = (
    Population("seeds alike", 0.0, 1.0, 0.6, 0.6),
    Population("seeds vary as identities do", 0.07, 1.0, 0.8, 0.5),
    Population("seeds vary much", 0.25, 1.0, 0.6, 0.6),
    Population("seeds alone", 0.25, 1.0, 0.0, 0.1),
    TOGETHER,
    Population("own test identities for each seed", 0.07, 1.0, 0.8, 0.5, False),
)


@dataclass(frozen=True)
class CoverageBenchmark:
    """What to simulate; the fields are the command's options."""

    studies: int = 4000
    subjects: int = 200
    replicates: int = 400
    tar: float = 0.7  # of an average identity
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("studies", 1), ("subjects", 2), ("replicates", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")


class Study(NamedTuple):
    """Two losses that are equally good, on a draw of trainings and identities."""

    first: Runs
    second: Runs
    by_seed: Estimate | None  # None where a loss has more seeds
    apart: Estimate | None  # taken for independent; None for test identities of their own


def studies(
    population: Population, sizes: tuple[int, int], settings: CoverageBenchmark
) -> Iterator[Study]:
    """Studies of two losses of one law, so that the true difference is zero."""
    rng = np.random.default_rng([settings.seed, *sizes])
    count, weights = settings.subjects, None
    centre = float(np.log(settings.tar / (1.0 - settings.tar)))
    for start in range(0, settings.studies, PER_BLOCK):
        block = min(PER_BLOCK, settings.studies - start)
        if weights is None:
            drawn = rng.integers(count, size=(settings.replicates, count))
            weights = np.stack([np.bincount(row, minlength=count) for row in drawn]) / count

        def normal(*shape: int, size: int = block) -> Floats:
            return rng.standard_normal((size, *shape, count))

        each = 1 if population.shares_subjects else max(sizes)  # sets of test identities
        common, sides = population.identities * normal(each), []
        luck = population.common_seeds * rng.standard_normal((block, max(sizes), 1))
        for runs in sizes:
            own = population.own_identities * normal(each)
            known = common + own if each == 1 else (common + own)[:, :runs]
            seeds = population.seeds * rng.standard_normal((block, runs, 1))
            rates = expit(centre + seeds + luck[:, :runs] + known + population.apart * normal(runs))
            observed, draws = rates.mean(axis=-1), rates @ weights.T
            sides.append((logits(observed, 10 * count), logits(draws, 10 * count)))
        for index in range(block):
            first, second = (Runs(values[index], draws[index]) for values, draws in sides)
            shares = population.shares_subjects
            by_seed, apart = (
                difference_over_runs(
                    first, second, num_subjects=count, shares_subjects=shares, are_paired=is_paired
                )
                if is_known
                else None
                for is_paired, is_known in ((True, len(set(sizes)) == 1), (False, shares))
            )
            yield Study(first, second, by_seed, apart)


def drawn_twice(study: Study, rng: np.random.Generator) -> Floats:
    """Differences in replicates that draw runs with replacement, and identities within them."""
    means = []
    for runs in (study.first, study.second):
        picked = rng.integers(len(runs.draws), size=runs.draws.shape[::-1])
        means.append(np.take_along_axis(runs.draws.T, picked, axis=1).mean(axis=1))
    return np.asarray(means[0] - means[1])


def measure(
    population: Population, sizes: tuple[int, int], settings: CoverageBenchmark
) -> dict[str, float]:
    """Shares of studies whose interval holds zero, for each interval; widths and power."""
    rng = np.random.default_rng([settings.seed, 1])
    made = list(studies(population, sizes, settings))
    alone = [study.first.draws.mean(axis=0) - study.second.draws.mean(axis=0) for study in made]
    found = {
        "drawn_twice": holds([interval(drawn_twice(study, rng), LEVEL) for study in made]),
        "identities_alone": holds([interval(one, LEVEL) for one in alone]),
    }
    estimates = {
        "by_seed": [one for study in made if (one := study.by_seed) is not None],
        "apart": [one for study in made if (one := study.apart) is not None],
    }
    has_pairs = bool(estimates["by_seed"]) and (sizes[0] >= LEAST_PAIRS or not estimates["apart"])
    used = "by_seed" if has_pairs else "apart"
    for name, own in estimates.items():
        if not own:
            continue
        ends = np.array([one.interval(LEVEL) for one in own])
        found |= {name: holds(ends), f"width_{name}": float(np.median(np.diff(ends)))}
        if name == used:
            effect = float(np.mean([one.detectable(LEVEL, POWER) for one in own]))
            found |= {"used": found[name], "power": 1.0 - holds(ends + effect)}
    return found


def holds(ends: ArrayLike) -> float:
    """Share of intervals that hold zero."""
    low, high = np.asarray(ends).T
    return float(((low <= 0.0) & (high >= 0.0)).mean())


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``coverage`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "coverage",
        help="how often intervals over seeds and identities hold the truth",
        description="Simulate studies of two equally good losses with a few seeds, and count how "
        "often each kind of interval holds the true difference, zero.",
    )
    defaults = CoverageBenchmark()
    add = parser.add_argument
    add("--studies", type=int, default=defaults.studies, help="of each row")
    add("--subjects", type=int, default=defaults.subjects, help="test identities")
    add("--replicates", type=int, default=defaults.replicates, help="of the bootstrap")
    add("--tar", type=float, default=defaults.tar, help="of an average identity")
    add("--seed", type=int, default=defaults.seed, help="of the simulation")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "coverage")
    run_coverage_benchmark(CoverageBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_coverage_benchmark(
    settings: CoverageBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> None:
    """Simulate, print the table and write the numbers to ``json_path`` if it is given."""
    rows, record = [], {}
    for population in POPULATIONS:
        for sizes in SIZES:
            if len(set(sizes)) > 1 and not population.shares_subjects:
                continue  # each seed is one pair of runs
            found = measure(population, sizes, settings)
            words = " and ".join(map(str, dict.fromkeys(sizes)))
            record[f"{population.name}, {words}"] = found
            names = ("used", "by_seed", "apart", "drawn_twice", "identities_alone", "power")
            shares = [f"{100 * found[name]:.1f}" if name in found else "-" for name in names]
            rows.append([population.name, words, *shares])
    (tables or Tables()).show(
        "coverage",
        f"per cent of {settings.studies:,} studies whose 95 % interval holds the truth",
        [
            *("training runs", "seeds", "the report's", "pairs", "independent", "resampled"),
            *("identities alone", "shown at the MDE"),
        ],
        rows,
    )
    if json_path is not None:
        write_record(json_path, asdict(settings), record, PACKAGES)
