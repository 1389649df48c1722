"""Optuna storage: processes and machines that work on one experiment, and pruning of runs.

Every run of an arm is a trial of an Optuna study. Its attributes name the process that trains it,
so that no other process does, and the measures. A lost process has no heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmargin.errors import ConfigError
from qmargin.experiments.measure import EER
from qmargin.terminal import without_passwords

if TYPE_CHECKING:
    import optuna

    from qmargin.experiments.run import Outcome, Run

JOURNAL = "journal:"  # a file of Optuna's journal storage
BEAT_S = 20.0
STALE_S = 300.0  # without a heartbeat
MAKING_S = 20.0  # until another process has created the tables of a database
NAMING_S = 10.0  # until a trial names its run
PRUNE_AFTER = 3  # complete runs; with fewer, none is pruned
GRACE = 3  # no run is pruned in the first third of its steps: losses start differently


class Pruned(Exception):
    """A run that is behind the median of the others."""


@dataclass(frozen=True)
class TrialRef:
    """A trial of a study, for another process."""

    url: str
    study: str
    number: int
    measure: str
    prune: bool


def check_optuna(why: str) -> None:
    """Raise if Optuna is missing."""
    if find_spec("optuna") is None:
        raise ConfigError(f"{why} needs the package optuna; pip install 'qmargin[optuna]'")


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """Storage at a URL: ``sqlite:///FILE``, ``postgresql://``, ``redis://`` or ``journal:FILE``."""
    check_optuna("--storage")
    import optuna
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if ":" not in url:
        raise ConfigError(f"--storage is {url!r}; give a URL, such as sqlite:///trials.db")
    try:
        if url.startswith(JOURNAL):
            path = Path(url.removeprefix(JOURNAL).removeprefix("//"))
            if not path.parent.is_dir():
                raise OSError(f"there is no folder {path.parent}")
            return journal.JournalStorage(journal.JournalFileBackend(str(path)))
        if url.startswith(("redis://", "rediss://")):
            with _quiet():
                return journal.JournalStorage(journal.JournalRedisBackend(url))
        return _open_tables(url)
    except Exception as error:  # errors of the service behind the URL
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        message = (
            f"the storage {url} cannot be reached ({reason}); check the URL and that its service "
            "runs"
        )
        raise ConfigError(without_passwords(message)) from error


def _open_tables(url: str) -> optuna.storages.BaseStorage:
    """Storage in a database, with retries: several processes may create its tables at once."""
    import optuna
    import sqlalchemy.exc

    seconds = {"connect_timeout": 10} if url.startswith("postgresql") else {}
    give_up = time.monotonic() + MAKING_S
    while True:
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": seconds})
        except sqlalchemy.exc.DBAPIError as error:
            made_elsewhere = isinstance(error, sqlalchemy.exc.IntegrityError) or any(
                word in str(error.orig) for word in ("already exists", "locked")
            )
            if not made_elsewhere or time.monotonic() > give_up:
                raise
            time.sleep(random.uniform(0.01, 0.1))


def load_study(url: str, name: str, measure: str, **options: Any) -> optuna.Study:
    """A study by its name, made where it is missing."""
    import optuna

    with _quiet():
        return optuna.create_study(
            storage=open_storage(url),
            study_name=name,
            direction="minimize" if measure == EER else "maximize",
            load_if_exists=True,
            **options,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts of Optuna warn that they are experimental
        yield


class PruningReport:
    """Reports validation measures of a run to its trial, and stops it where it is behind."""

    def __init__(self, ref: TrialRef, total_steps: int) -> None:
        import optuna

        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=PRUNE_AFTER, n_warmup_steps=max(0, total_steps // GRACE - 1)
        )
        study = load_study(ref.url, ref.study, ref.measure, pruner=pruner)
        found = study.get_trials(deepcopy=False)[ref.number]
        self._trial = optuna.trial.Trial(study, found._trial_id)
        self._measure, self._total = ref.measure, total_steps

    def __call__(self, step: int, measures: dict[str, float]) -> None:
        """Report; raise ``Pruned`` before the last step if the run is behind."""
        with _quiet():
            self._trial.report(measures[self._measure], step)
            if step < self._total and self._trial.should_prune():
                raise Pruned(f"behind the median of the other runs at step {step}")


class RunBook:
    """Record of which process trains which run of an experiment, in an Optuna storage.

    The name is that of the experiment and its settings: others may share the storage.
    """

    def __init__(
        self, url: str, name: str, *, measure: str, prune: bool = False, is_shared: bool = True
    ) -> None:
        self.url, self.name, self.measure, self.prune = url, name, measure, prune
        self.is_shared = is_shared
        self._studies: dict[str, optuna.Study] = {}
        self._taken: dict[Path, optuna.Trial] = {}
        self._held: list[optuna.Trial] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> RunBook:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        """Release unfinished runs, so that others need not wait for a missing heartbeat."""
        self._stop.set()
        self._thread.join()
        self._mark_held(0.0)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._mark_held(time.time())

    def _mark_held(self, seen: float) -> None:
        for trial in self._held:
            with contextlib.suppress(Exception):  # a storage may be unavailable for a moment
                trial.set_user_attr("seen", seen)

    def hold(self, trial: optuna.Trial) -> None:
        """Mark a trial as being worked on by this process, until it is dropped."""
        for name, value in {**_here(), "seen": time.time()}.items():
            trial.set_user_attr(name, value)
        self._held.append(trial)

    def drop(self, trial: optuna.Trial) -> None:
        """Stop working on a trial."""
        self._held = [one for one in self._held if one is not trial]

    def is_alive(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the process of a running trial still works on it."""
        facts = trial.user_attrs
        if facts.get("host") == _here()["host"] and not _is_alive(int(facts.get("pid", 0))):
            return False
        began = 0.0 if trial.datetime_start is None else trial.datetime_start.timestamp()
        return bool(time.time() - float(facts.get("seen", began)) < STALE_S)

    def take(self, run: Run) -> TrialRef | None:
        """Reserve a run for this process; None if another process trains it or has trained it."""
        if self._owner(run) is not None:
            return None
        import optuna

        study = self._study(run.arm)
        with _quiet():
            trial = study.ask()
        trial.set_user_attr("run", _key(run))
        trial.set_user_attr("folder", str(run.folder.resolve()))
        self.hold(trial)
        owner = self._owner(run)
        if owner is None or owner.number != trial.number:
            self.drop(trial)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return None
        self._taken[run.folder] = trial
        prune = self.prune and run.is_search
        return TrialRef(self.url, study.study_name, trial.number, self.measure, prune)

    def finish(self, run: Run, outcome: Outcome) -> None:
        """Store the outcome of a run of this process."""
        import optuna

        trial = self._taken.pop(run.folder)
        self.drop(trial)
        states, study = optuna.trial.TrialState, self._study(run.arm)
        if outcome.state == "failed":
            study.tell(trial, state=states.FAIL)
            return
        trial.set_user_attr("state", outcome.state)
        trial.set_user_attr("measures", dict(outcome.measures))
        if outcome.state == "pruned":
            study.tell(trial, state=states.PRUNED)
        else:  # a test may measure other rates than the search
            study.tell(trial, outcome.measures.get(self.measure, outcome.measures[EER]))

    def outcome(self, run: Run) -> Outcome | None:
        """Outcome from another process; None while it trains or if none does."""
        from qmargin.experiments.run import Outcome

        owner = self._owner(run)
        if owner is None or "measures" not in owner.user_attrs or not owner.state.is_finished():
            return None
        return Outcome(owner.user_attrs["state"], owner.user_attrs["measures"])

    def _owner(self, run: Run) -> optuna.trial.FrozenTrial | None:
        """The first trial that has a run: it is alive, or has ended well."""
        deadline = time.monotonic() + NAMING_S
        while True:
            trials = self._study(run.arm).get_trials(deepcopy=False)
            for trial in trials:
                if trial.user_attrs.get("run") == _key(run) and self._is_valid(trial, run):
                    return trial
            is_naming = any(t.state.name == "RUNNING" and "run" not in t.user_attrs for t in trials)
            if not is_naming or time.monotonic() > deadline:
                return None
            time.sleep(0.05)  # a trial that has just started will soon name its run

    def _is_valid(self, trial: optuna.trial.FrozenTrial, run: Run) -> bool:
        if trial.state.name == "RUNNING":
            return self.is_alive(trial)
        facts, host = trial.user_attrs, _here()["host"]
        is_lost = (facts.get("host"), facts.get("folder")) == (host, str(run.folder.resolve()))
        return "measures" in facts and not is_lost  # or its folder was removed

    def _study(self, arm: str) -> optuna.Study:
        if arm not in self._studies:
            self._studies[arm] = load_study(self.url, f"{self.name} {arm}", self.measure)
        return self._studies[arm]


def _key(run: Run) -> str:
    return f"{run.folder.parent.name}/{run.folder.name}"


def _here() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
