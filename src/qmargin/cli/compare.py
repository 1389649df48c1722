"""``qmargin compare``, ``qmargin sweep`` and ``qmargin demo``: run experiments."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qmargin.cli.options import (
    Command,
    Count,
    Overwriting,
    RecipeSettings,
    argument,
    command_line,
    guard_of,
    option,
)
from qmargin.cli.recipes import load_recipe
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError
from qmargin.files import MADE_BY

if TYPE_CHECKING:
    from qmargin.experiments.experiment import Experiment
    from qmargin.experiments.runner import Finished

EXIT_CODES = """exit status:
  0    all runs are complete
  2    refused, or some runs failed; the last line says why
  130  stopped by Ctrl-C after saving; the same command continues
  143  stopped by SIGTERM after saving; the same command continues
"""


@dataclass(frozen=True, kw_only=True)
class Running(Overwriting, RecipeSettings):
    """Options of every command that runs an experiment."""

    resumes: ClassVar[bool] = True
    epilog: ClassVar[str] = EXIT_CODES

    jobs: Count | None = option("number of parallel runs (one per device)")
    devices: tuple[str, ...] = option(
        "devices to train on: cpu, or cuda:0 cuda:1", default=("auto",), metavar="NAME"
    )
    storage: str | None = option(
        "shared Optuna storage: sqlite:///FILE, journal:FILE, redis:// or postgresql://",
        metavar="URL",
    )

    def complete(self, experiment: Experiment, out: Path, **options: Any) -> Finished:
        """Run or continue the experiment."""
        from qmargin.experiments.runner import RunOptions, complete

        for name in ("devices", "jobs", "storage", "overwrite"):
            options[name] = getattr(self, name)
        command = command_line(url=self.storage)
        return complete(experiment, out, RunOptions(command=command, **options))


@dataclass(frozen=True, kw_only=True)
class Compare(Running):
    """Compare losses: search settings, train with several seeds, test, report.

    Every loss chooses its settings on validation identities, is trained with several seeds and is
    evaluated on test identities. If it is stopped, run it again to continue.
    """

    experiment: str | None = argument("name from --list, or a .yaml file", metavar="NAME|FILE")
    list: bool = option("list the named experiments")
    out: Path | None = option("folder of the experiment", metavar="DIR")
    data: Path | None = option(
        "pictures or recordings, for named experiments that read data", metavar="PATH"
    )
    arms: tuple[str, ...] = option("losses to compare (all)", metavar="NAME")
    seeds: Count | None = option("number of seeds per loss (as in the experiment)")
    search_only: bool = option("stop after the search for settings")
    page: Path | None = option("also write the results as Markdown to FILE")
    commit: str = option("commit of the code, shown on the page", default="", metavar="HASH")

    def run(self) -> None:
        if self.list:
            from qmargin.experiments.named import list_experiments

            described = list_experiments().items()
            sys.stdout.write("".join(f"{name:12}  {words}\n" for name, words in described))
            return
        if self.experiment is None or self.out is None:
            raise ConfigError("an experiment and --out are needed: qmargin compare NAME --out DIR")
        from qmargin.experiments.tables import FIGURES, STEMS, results_page
        from qmargin.training.checkpoint import check_writable

        experiment = self._find(self.experiment)
        if self.page is not None:
            check_writable(self.page.parent)  # hours before it is written
            guard_of(self, ("page", "out")).check(self.page, MADE_BY)
        finished = self.complete(experiment, self.out, search_only=self.search_only, show=True)
        if finished.paths:
            tell(finished)
        if self.page is not None:
            drawn = self.out / FIGURES / f"{STEMS[0]}.svg"
            figure = self.page.with_suffix(".svg")
            found = {figure: drawn.read_bytes()} if drawn.exists() else {}
            text = results_page(
                finished,
                command=command_line(url=self.storage),
                commit=self.commit,
                figure=figure.name if found else None,
            )
            guard_of(self, ("page", "out")).write_all({self.page: text.encode(), **found})
            sys.stdout.write(f"{self.page}\n")

    def _find(self, name: str) -> Experiment:
        from qmargin.experiments.experiment import read_experiment
        from qmargin.experiments.named import get_experiment
        from qmargin.training.distributed import choose_device

        if name.endswith((".yaml", ".yml")):
            if self.data is not None:
                raise ConfigError("--data is for named experiments; write data: into the file")
            made = read_experiment(name)
        else:
            device = choose_device(0, self.devices[0]).type
            made = get_experiment(name, device=device, data=self.data)
        made = made.with_settings(self.settings)
        if self.seeds is not None:
            made = made.with_seeds(range(self.seeds))
        return made.with_arms(self.arms) if self.arms else made


@dataclass(frozen=True, kw_only=True)
class Sweep(Running):
    """Train a recipe with many settings and compare them.

    Trains every combination of the given values, or those that a search proposes, evaluates them on
    validation identities, and writes a table and figures. If it is stopped, run it again to
    continue.
    """

    recipe: str = argument("name of a recipe, or a .yaml file", metavar="NAME|FILE")
    out: Path = option("folder of the sweep", metavar="DIR")
    axes: tuple[str, ...] = option(
        "values of a setting (loss.scale=10,16), of hardness (sets the scale), or of m_eff or "
        "reach (set the margin); a search also takes LOW:HIGH and LOW:HIGH:log",
        name="--grid",
        metavar="KEY=V1,V2",
        repeated=True,
    )
    seeds: Count = option("number of seeds per combination", default=1)
    search: Literal["grid", "random", "optuna"] = option("search method", default="grid")
    trials: Count | None = option("number of combinations of a random or optuna search (40)")
    validation: tuple[str, ...] = option(
        "validation data, or settings such as data.options.split=dev; not for synthetic data",
        metavar="PATH",
        repeated=True,
    )
    measure: str | None = option(
        "selection measure: eer, or a TAR such as tar@1e-3 (the strictest measurable TAR)"
    )
    prune: bool = option("stop runs below the median early, with Optuna")

    def run(self) -> None:
        from qmargin.experiments.experiment import sweep_experiment

        experiment = sweep_experiment(
            load_recipe(self.recipe),
            self.axes,
            settings=self.settings,
            seeds=self.seeds,
            method=self.search,
            num_points=self.trials,
            measure=self.measure,
            prune=self.prune,
            validation=[text if "=" in text else f"data.path={text}" for text in self.validation],
        )
        self.complete(experiment, self.out)


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train five losses on synthetic identities and compare them.

    Trains ArcFace, CosFace, EntMax, SparseMax and Q-Margin by one recipe on drawn portraits of
    synthetic people, or on synthetic speech, tests them on all pairs of other identities, and
    writes a report. It takes at most six minutes on two idle CPU cores. If it is stopped, run
    it again to continue.
    """

    resumes: ClassVar[bool] = True

    out: Path = option("folder of the demo", default=Path("qmargin-demo"), metavar="DIR")
    seeds: Count = option("number of seeds per loss", default=1)
    losses: tuple[str, ...] = option(
        "losses to train: arcface cosface entmax sparsemax q_margin (all)", metavar="NAME"
    )
    minutes: float | None = option(
        "training time of five losses with one seed (the standard length)", metavar="M"
    )
    voices: bool = option("use synthetic voices instead of people")
    data: Path | None = option(
        "your pictures: a folder as for `qmargin train`, or an NPZ file", metavar="PATH"
    )
    device: Literal["auto", "cpu", "cuda"] = option("where to train", default="auto")

    def run(self) -> None:
        from qmargin.experiments.named.demo import DATA_NOTE, run_demo

        finished = run_demo(**vars(self), command=command_line())
        tell(finished, "" if self.data is None else f"{DATA_NOTE}\n")
        if self.data is None:  # pictures of a path are small drawings in memory
            run = shlex.quote(str(best_run(finished)))
            fit = "" if self.voices else " --fit resize"
            sys.stdout.write(f"try the model: qmargin serve {run}{fit}\n")
            sys.stdout.flush()


def best_run(finished: Finished) -> Path:
    """Folder of the tested run with the lowest equal error rate."""
    from qmargin.experiments.run import RESULT

    rates = [result.measures.eer.value for result in finished.results]
    path = min(zip(rates, finished.paths[RESULT], strict=True))[1]
    return path.parent


def tell(finished: Finished, note: str = "") -> None:
    """Print the results of an experiment and the address of its report."""
    from qmargin.experiments.tables import summary

    heads, rows, words = summary(finished)
    sys.stdout.write("\n")
    print_table(output_console(), finished.experiment.title, heads, rows)
    sys.stdout.write("\n".join([*words, note]))
    sys.stdout.write(f"\nreport: {finished.page}\n{finished.page.resolve().as_uri()}\n")
    sys.stdout.flush()
