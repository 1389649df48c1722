"""``qmargin evaluate``: options, checks and output that all kinds of evaluation share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from qmargin.cli import options
from qmargin.cli.options import Command, Commands, Count, KeepingPaths, Overwriting, option
from qmargin.cli.tables import output_console, print_table, stage_progress
from qmargin.errors import ConfigError, DataError
from qmargin.files import Guard, check_regular
from qmargin.registry import protocols
from qmargin.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

    from qmargin.evaluation.embeddings import Embeddings
    from qmargin.evaluation.evaluate import EvaluationOptions
    from qmargin.evaluation.result import GroupAudit, Result, RunInfo
    from qmargin.evaluation.scoring import CohortNorm

TOP_N = 300  # nearest members of a cohort
_COLUMNS = ("measure", "value", "interval", "FAR", "false accepts", "threshold", "enough data")


class Known(NamedTuple):
    """Facts about embeddings and their model."""

    card: Mapping[str, str] = MappingProxyType({})
    run: RunInfo | None = None
    flip: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluation(Overwriting, KeepingPaths):
    """Options of every evaluation: output, names and measures."""

    out: Path = option("result.json to write")
    name: str | None = option("name of the system (that of the model or file)", metavar="SYSTEM")
    protocol: str | None = option("name of the trials (that of their file)", metavar="NAME")
    fars: tuple[float, ...] = option(
        "false accept rates of TAR", default=(1e-2, 1e-3, 1e-4, 1e-5), metavar="FAR"
    )
    replicates: int = option("number of bootstrap replicates; 0 for no intervals", default=1000)
    level: float = option("confidence level of the intervals", default=0.95)
    seed: int = option("seed of the bootstrap", default=0)
    hardest: int = option("number of hardest trials to keep", default=20)
    metrics: tuple[str, ...] | None = option(
        "registered metrics to compute, see `qmargin list metrics` (all)", metavar="NAME"
    )

    @property
    def embeddings_path(self) -> Path:
        """Where embeddings are, or go, in commands that have ``--embeddings``."""
        given: Path | None = getattr(self, "embeddings", None)
        return given or self.out.with_suffix(".embeddings.safetensors")

    def options(
        self, *, name: str, protocol: str, known: Known | None = None, **others: Any
    ) -> EvaluationOptions:
        """Evaluation options, with default names of system and protocol."""
        from qmargin.evaluation.evaluate import EvaluationOptions

        known = known or Known()
        given = {
            "name": self.name or known.card.get("name") or name,
            "protocol": self.protocol or protocol,
            "fars": self.fars,
            "num_replicates": self.replicates,
            "seed": self.seed,
            "level": self.level,
            "num_hardest": self.hardest,
            "metrics": self.metrics,
            "model_card": dict(known.card) or None,
            "run": known.run,
            "flip": known.flip,
            "notes": known.notes,
        }
        if isinstance(self, Rules):
            given["rule"] = self.rule
        if isinstance(self, Costs):
            given["p_targets"] = self.p_target
        return EvaluationOptions(**{**given, **others})

    def check_outputs(
        self, outputs: Mapping[str, tuple[Path, str]], arguments: Any = None
    ) -> Guard:
        """Refuse outputs that cannot be written, are inputs, or belong to another program.

        ``outputs`` has path and mark by option. Inputs are in ``arguments``, or in this command.
        """
        from qmargin.evaluation.result import RESULT_MARK
        from qmargin.evaluation.resumable import PROGRESS_MARK, names_beside

        if self.out.is_dir() or not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out} is not a file in a folder: make the folder first")
        names = ("out", "pictures", *outputs)
        guard = options.guard_of(arguments or self, names, own=_own_scores(self.out))
        guard.check(self.out, RESULT_MARK)
        for path, mark in outputs.values():
            partial, record = names_beside(path)  # an interrupted run leaves these
            for place, text in ((path, mark), (partial, mark), (record, PROGRESS_MARK)):
                guard.check(place, text)
        return guard

    def finish(self, result: Result, out: Path | None = None) -> None:
        """Write the result and print its tables."""
        from qmargin.evaluation.result import write_result

        out = out or self.out
        write_result(out, result, keep_paths=self.keep_paths)
        _print_result(result, out)


@dataclass(frozen=True, kw_only=True)
class Rules(Command):
    """Options that need a list of scores."""

    rule: Literal["conservative", "nearest", "interpolated"] = option(
        "rule of thresholds", default="conservative"
    )


@dataclass(frozen=True, kw_only=True)
class Costs(Command):
    """Priors of minDCF."""

    p_target: tuple[float, ...] = option("priors of minDCF", default=(0.01, 0.05), metavar="P")


@dataclass(frozen=True, kw_only=True)
class Card(Command):
    """Facts about the system."""

    model_card: Path | None = option("JSON file with facts about the system, stored in the result")

    def read_card(self) -> dict[str, str] | None:
        """The facts."""
        path = self.model_card
        if path is None:
            return None
        check_regular(path)
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON ({error})") from error
        if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
            raise DataError(f"{path} is not a JSON object of strings")
        return content


@dataclass(frozen=True, kw_only=True)
class Cohort(Command):
    """Embeddings that scores are normalised by."""

    cohort: Path | None = option("embeddings of other subjects, for --as-norm")
    as_norm: Count | None = option(
        f"AS-norm with the N nearest cohort members ({TOP_N} with --cohort)"
    )

    def check_cohort(self) -> None:
        """Refuse a normalisation without a cohort."""
        if self.as_norm is not None and self.cohort is None:
            raise ConfigError(f"--as-norm {self.as_norm} needs a cohort: give --cohort FILE")

    def read_cohort(self) -> CohortNorm | None:
        """The cohort, if given."""
        from qmargin.evaluation.embeddings import read_embeddings
        from qmargin.evaluation.scoring import CohortNorm

        if self.cohort is None:
            return None
        return CohortNorm(read_embeddings(self.cohort, role="cohort"), self.as_norm or TOP_N)


@dataclass(frozen=True, kw_only=True)
class Resumed(Evaluation):
    """An evaluation that can be stopped and continued."""

    resumes: ClassVar[bool] = True

    restart: bool = option("start again if a partial file was made from other inputs")


@dataclass(frozen=True, kw_only=True)
class ScoresFile(Resumed):
    """Where the scores of trials go."""

    scores: Path | None = option("output file of the scores (OUT with .scores.tsv)")

    @property
    def scores_path(self) -> Path:
        """Path of the scores."""
        return self.scores or self.out.with_suffix(".scores.tsv")

    @property
    def scores_output(self) -> dict[str, tuple[Path, str]]:
        """For ``check_outputs``."""
        from qmargin.evaluation.scoring import SCORES_MARK

        return {"scores": (self.scores_path, SCORES_MARK)}


@dataclass(frozen=True, kw_only=True)
class _Registered(Evaluation, Rules, Costs):
    """Options of every protocol that other packages have registered."""


def add_protocols(kinds: Commands, known: Collection[str]) -> None:
    """Add the protocols of other packages; an unusable one reports its error when used."""
    for name, about in protocols.describe().items():
        if name in known:
            continue
        try:
            _add_protocol(kinds, name, protocols.get(name))
        except ConfigError:
            broken = kinds.add_parser(name, help=about.replace("%", "%%"))
            broken.set_defaults(run=lambda _, name=name: protocols.get(name))


def _add_protocol(kinds: Commands, name: str, protocol: Any) -> None:
    parser = kinds.add_parser(name, **options.texts_of(protocol))
    try:
        options.add_fields(parser, protocol)
        options.add_fields(parser, _Registered)
    except argparse.ArgumentError as error:
        what = f"the protocol {name!r} has an option that every evaluation has"
        raise ConfigError(f"{what} ({error}); rename it") from error

    def run(arguments: argparse.Namespace) -> None:
        command = options.instance_of(_Registered, arguments)
        measured = options.instance_of(protocol, arguments)
        command.check_outputs({}, arguments)
        with stage_progress() as progress:
            given = command.options(name=name, protocol=name, kind=name)
            result = measured.run(given, command=options.command_line(), progress=progress)
        command.finish(result)

    parser.set_defaults(run=run)


def _own_scores(out: Path) -> tuple[str, ...]:
    """Hashes of the score tables that the evaluation behind an earlier result wrote."""
    from qmargin.evaluation.result import read_result

    try:
        sources = read_result(out).sources
    except (OSError, DataError):
        return ()
    if all(source.role != "embeddings" for source in sources):
        return ()  # it read the scores of another program
    return tuple(source.sha256 for source in sources if source.role == "scores")


def with_weights(card: Mapping[str, str] | None, weights: str | None) -> dict[str, str] | None:
    """A model card with the hash of the weights that made the embeddings, where it is known."""
    if weights is None:
        return None if card is None else dict(card)
    said = (card or {}).get("weights_sha256", weights)
    if said != weights:
        named = f"the model card names the weights {said:.12}..., the embeddings {weights:.12}..."
        raise DataError(f"{named}; give the card of the model that made them")
    return {**(card or {}), "weights_sha256": weights}


def collapse_notes(embeddings: Embeddings) -> tuple[str, ...]:
    """Note on embeddings that nearly coincide."""
    from qmargin.evaluation.embeddings import collapse_note

    note = collapse_note(embeddings.matrix)
    return () if note is None else (note,)


def _print_result(result: Result, path: Path) -> None:
    """Print the measures, their intervals, and the path of the result."""
    console = output_console()
    protocol, method = result.protocol, result.protocol.interval
    if result.measures.extra:
        columns = ("further measure", "value", "deviation", "how")
        rows = [
            [name, _text(each.value, ".5f", "not defined"), _text(each.std, ".5f"), each.note or ""]
            for name, each in result.measures.extra.items()
        ]
        print_table(console, protocol.name, columns, rows)
    title = (
        f"{result.system.name} on {protocol.name}: {protocol.num_genuine:,} genuine and "
        f"{protocol.num_impostors:,} impostor trials, rule {protocol.rule}"
    )
    print_table(console, title, _COLUMNS, _rows(result))
    if result.groups is not None:
        _print_groups(console, result.groups)
    intervals = f"intervals: {method.method}"
    if method.num_replicates:
        intervals += f", {method.level:.0%}, {method.num_replicates:,} replicates"
    if method.note:
        intervals += f" ({method.note})"
    notes = "".join(f"note: {printable(note)}\n" for note in result.notes)
    sys.stdout.write(f"{printable(intervals)}\n{notes}{path}\n")


def _rows(result: Result) -> list[list[str]]:
    from qmargin.report.numbers import digits_to_differ, rate_text

    measures, eer = result.measures, result.measures.eer
    limits = [point.threshold for point in measures.tar]
    limits += [eer.threshold, *(cost.threshold for cost in measures.min_dcf)]
    digits = f".{digits_to_differ(limits, 5)}g"
    rows = []
    for point in measures.tar:
        name = f"TAR at FAR {rate_text(point.far_target)}"
        if point.tar is None or point.far is None:
            rows.append([name, "not measurable", "", "", "", "", "0 allowed"])
            continue
        cells = [_percent(point.tar), _range(point.interval, 100, ".2f"), rate_text(point.far)]
        cells += [f"{point.false_accepts:,}", _text(point.threshold, digits, "none")]
        rows.append([name, *cells, f"{point.status}: {point.allowed:,} allowed"])
    cells = [_percent(eer.value), _range(eer.interval, 100, ".2f"), "", ""]
    rows.append(["EER", *cells, _text(eer.threshold, digits, "none"), ""])
    for cost in measures.min_dcf:
        cells = [f"{cost.value:.4f}", _range(cost.interval, 1, ".3f"), "", ""]
        cells += [_text(cost.threshold, digits, "none"), ""]
        rows.append([f"minDCF, p = {cost.p_target:g}", *cells])
    if measures.min_cllr.value is not None:  # it is finite wherever it is measured
        for name, value in {"Cllr": measures.cllr, "min Cllr": measures.min_cllr}.items():
            rows.append([name, _text(value.value, ".4f", "infinite"), "", "", "", "", ""])
    return rows


def _print_groups(console: Console | None, groups: GroupAudit) -> None:
    from qmargin.report.numbers import rate_text

    rows = []
    for row in groups.rows:
        rates = ["-" if rate is None else rate_text(rate) for rate in (row.fmr, row.fnmr)]
        rows.append(
            [row.group, *rates, f"{row.num_impostors:,}", f"{row.num_genuine:,}", row.status]
        )
    title = f"groups at the threshold of FAR {rate_text(groups.far_target)}"
    columns = ("group", "FMR", "FNMR", "impostor trials", "genuine trials", "enough data")
    print_table(console, title, columns, rows)
    spreads = {"INEQ": groups.ineq, "GARBE": groups.garbe}
    spreads["FMR largest over geometric mean"] = groups.fmr.max_over_geomean
    text = ", ".join(f"{name} {_text(value, '.5g', 'none')}" for name, value in spreads.items())
    note = f"; {groups.note}" if groups.note else ""
    sys.stdout.write(printable(text + note) + "\n\n")


def _text(value: float | None, form: str, none: str = "") -> str:
    return none if value is None else format(value, form)


def _percent(rate: float) -> str:
    return f"{100 * rate:.3f} %"


def _range(ends: tuple[float, float] | None, factor: float, form: str) -> str:
    return "" if ends is None else f"{factor * ends[0]:{form}} to {factor * ends[1]:{form}}"
