"""``qmargin evaluate scores|trials|all-pairs``: from scores or embeddings to a result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmargin.cli.embed import FolderUse
from qmargin.cli.evaluate import (
    Card,
    Cohort,
    Costs,
    Evaluation,
    Known,
    Rules,
    ScoresFile,
    collapse_notes,
    with_weights,
)
from qmargin.cli.options import argument, command_line, option
from qmargin.cli.tables import StageProgress, stage_progress
from qmargin.errors import ConfigError, DataError

if TYPE_CHECKING:
    from qmargin.evaluation.embeddings import Embeddings
    from qmargin.evaluation.result import Result
    from qmargin.evaluation.scores import ScoreSet


@dataclass(frozen=True, kw_only=True)
class _Trials(Evaluation, Rules, Costs, Card):
    """Options of trials of named samples, with subjects and groups."""

    trials_format: str = option(
        "auto, csv, tsv, enrol-test-label (Kaldi), label-enrol-test (VoxCeleb), enrol-test",
        default="auto",
        metavar="NAME",
    )
    subjects: str = option(
        "file of lines `name subject`, path (folders in the names), or none; auto finds columns, "
        "or paths that agree with the labels",
        default="auto",
        metavar="HOW",
    )
    groups: Path | None = option("file of lines subject,group; adds error rates per group")
    group_far: float | None = option(
        "FAR that sets the common threshold of the groups", metavar="FAR"
    )

    def measure(
        self,
        score_set: ScoreSet,
        progress: StageProgress,
        *,
        system: Path,
        protocol: Path,
        embeddings: Embeddings | None = None,
    ) -> Result:
        """Evaluate, with names of system and protocol from their files."""
        from qmargin.evaluation.columns import read_mapping
        from qmargin.evaluation.evaluate import default_name, evaluate_scores

        paths: dict[str, Any] = {"groups": self.groups}
        if self.subjects not in ("auto", "path", "none"):
            paths["subjects"] = self.subjects
        read = {role: read_mapping(path, role=role) for role, path in paths.items() if path}
        mappings = {role: mapping for role, (mapping, _) in read.items()}
        weights = None if embeddings is None else embeddings.weights_sha256
        cohort = getattr(self, "cohort", None)
        options = self.options(
            name=default_name(system),
            protocol=default_name(protocol),
            kind="scores" if embeddings is None else "trials",
            scoring="given" if embeddings is None else "as-norm" if cohort else "cosine",
            subjects="auto" if "subjects" in read else self.subjects,
            subject_of=mappings.get("subjects"),
            group_of=mappings.get("groups"),
            group_far=self.group_far,
            model_card=with_weights(self.read_card(), weights),
            sources=tuple(source for _, source in read.values()),
            notes=() if embeddings is None else collapse_notes(embeddings),
        )
        return evaluate_scores(score_set, options, command=command_line(), progress=progress)


@dataclass(frozen=True, kw_only=True)
class Scores(_Trials):
    """Evaluate a score file of any tool.

    Reads scores and labels (text in the usual column orders, CSV, TSV, NPZ), measures, prints a
    table and writes result.json.
    """

    file: Path = argument("scores", metavar="FILE")
    format: str = option(
        "auto, csv, tsv, npz, or the order of columns without a header: enrol-test-score-label, "
        "enrol-test-label-score, enrol-test-score, score-label, label-score",
        default="auto",
        metavar="NAME",
    )
    trials: Path | None = option("trial list with the labels")
    ignore_extra: bool = option("skip scores that are not in the trial list")

    def run(self) -> None:
        from qmargin.evaluation.scores import read_scores
        from qmargin.evaluation.trials import read_trials

        if self.trials is None and (self.ignore_extra or self.trials_format != "auto"):
            raise ConfigError("--ignore-extra and --trials-format need --trials FILE")
        self.check_outputs({})
        with stage_progress() as progress:
            trials = None
            if self.trials is not None:
                reading = partial(progress, "reading trials")
                trials = read_trials(self.trials, format=self.trials_format, progress=reading)
            score_set = read_scores(
                self.file,
                trials=trials,
                format=self.format,
                ignore_extra=self.ignore_extra,
                progress=partial(progress, "reading scores"),
            )
            protocol = self.trials or self.file
            result = self.measure(score_set, progress, system=self.file, protocol=protocol)
        self.finish(result)


@dataclass(frozen=True, kw_only=True)
class Trials(_Trials, ScoresFile, Cohort):
    """Evaluate a trial list with embeddings.

    Scores the trials by the cosine of their embeddings, in float64, and evaluates them. If it
    is stopped, run it again to continue.
    """

    file: Path = argument("trial list with labels", metavar="TRIALS")
    embeddings: Path = option("embeddings: .npz, .safetensors, .ark or .scp")
    center: Path | None = option("subtract the mean of these embeddings first")

    def run(self) -> None:
        from qmargin.evaluation.embeddings import read_embeddings
        from qmargin.evaluation.scores import read_scores
        from qmargin.evaluation.scoring import score_trials
        from qmargin.evaluation.trials import read_trials

        guard = self.check_outputs(self.scores_output)
        self.check_cohort()
        with stage_progress() as progress:
            trials = read_trials(self.file, format=self.trials_format)
            if trials.is_genuine is None:
                raise DataError(f"{self.file} has no labels: give a trial list that has them")
            embeddings = read_embeddings(self.embeddings)
            norm = self.read_cohort()
            center = read_embeddings(self.center, role="center") if self.center else None
            path = score_trials(
                embeddings,
                trials,
                out=self.scores_path,
                norm=norm,
                center=center,
                restart=self.restart,
                guard=guard,
                progress=partial(progress, "scoring"),
            )
            score_set = read_scores(path, trials=trials)
            others = [embeddings, norm and norm.cohort, center]
            sources = (*score_set.sources, *(other.source for other in others if other))
            score_set = replace(score_set, sources=sources)
            names = {"system": self.embeddings, "protocol": self.file}
            result = self.measure(score_set, progress, **names, embeddings=embeddings)
        self.finish(result)


@dataclass(frozen=True, kw_only=True)
class AllPairs(FolderUse, Cohort, Evaluation, Costs, Card):
    """Compare all pairs of samples of a folder or a file of embeddings.

    Samples are compared by the cosine of their embeddings. Operating points are exact at any number
    of samples; intervals draw identities. A folder has one sub-folder per identity, with images or
    recordings, and needs --model.
    """

    source: Path = argument("identities in folders, or embeddings", metavar="DIR|EMBEDDINGS")
    identities: Path | None = option("lines `key identity` (the first folder of every key)")
    embeddings: Path | None = option(
        "output file of the embeddings of DIR (OUT with .embeddings.safetensors)"
    )
    max_corrupt: int = option(default=0)

    def run(self) -> None:
        from qmargin.evaluation.columns import read_mapping
        from qmargin.evaluation.evaluate import default_name
        from qmargin.evaluation.protocols.all_pairs import evaluate_identities, identities_of

        self._check()
        mapping, source = None, None
        if self.identities is not None:
            mapping, source = read_mapping(self.identities, role="subjects")
        given = self.read_card() or {}
        with stage_progress() as progress:
            embeddings, known = self._embeddings(mapping, progress)
            card, norm = dict(known.card), self.read_cohort()
            if norm is not None:
                card["scoring"] = f"AS-norm {norm.top_n}"
            place = self.source if self.model is not None else self.identities
            options = self.options(
                name=default_name(self.source),
                known=known,
                protocol="all pairs" if place is None else f"all pairs of {default_name(place)}",
                model_card=with_weights({**card, **given} or None, embeddings.weights_sha256),
                sources=() if source is None else (source,),
            )
            result = evaluate_identities(
                embeddings,
                identities_of(embeddings.keys, mapping),
                options,
                norm=norm,
                device=self.device,
                command=command_line(),
                progress=progress,
            )
        self.finish(result)

    def _check(self) -> None:
        """Refuse impossible options before any work."""
        from qmargin.evaluation.embed import check_suffix
        from qmargin.evaluation.embeddings import EMBEDDINGS_MARK
        from qmargin.training.distributed import find_device

        if self.model is None and self.source.is_dir():
            raise ConfigError(f"{self.source} is a folder and needs a model: give --model DIR")
        if self.model is None and self.embeddings is not None:
            remedy = "give embeddings to compare without the option"
            raise ConfigError(f"--embeddings {self.embeddings} is for those of a folder: {remedy}")
        if self.model is not None and not self.source.is_dir():
            remedy = "give a folder for --model to embed, or embeddings without --model"
            raise ConfigError(f"{self.source} is not a folder: {remedy}")
        self.check_cohort()
        find_device(self.device)
        if self.model is None:
            self.check_outputs({})
        else:
            self.check_outputs({"embeddings": (self.embeddings_path, EMBEDDINGS_MARK)})
            check_suffix(self.embeddings_path)

    def _embeddings(
        self, mapping: dict[str, str] | None, progress: StageProgress
    ) -> tuple[Embeddings, Known]:
        """Embeddings of all samples, computed or read, with facts about them."""
        from qmargin.evaluation.embeddings import read_embeddings, stored_flip
        from qmargin.evaluation.export import FLIPS
        from qmargin.evaluation.protocols.all_pairs import check_identities, identities_of

        if self.model is None:
            stored = stored_flip(self.source)
            return read_embeddings(self.source), Known(flip=stored if stored in FLIPS else None)
        from qmargin.evaluation.embed import find_files
        from qmargin.evaluation.model import load_model

        model = load_model(self.model, device=self.device, fit=self.fit)
        names = find_files(self.source, model.card.modality)
        check_identities(identities_of(names, mapping))  # before embedding, which takes minutes
        path = self.embeddings_path
        found, flip = self.embed_folder(model, self.source, names, path, progress)
        bad = [file for file in found.files if file.row is None]
        notes = [
            f"{len(bad):,} of {len(found.files):,} files could not be read and are left out, the "
            f"first is {file.key!r} ({file.problem})"
            for file in bad[:1]
        ]
        is_mirrored = flip if model.card.modality == "images" else None
        known = Known(model.card.to_texts(), model.run, is_mirrored, tuple(notes))
        return read_embeddings(path), known
