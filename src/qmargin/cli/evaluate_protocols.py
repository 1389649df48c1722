"""``qmargin evaluate lfw|ijb|pairs|voxceleb``: samples and a model, or embeddings, to a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qmargin.cli import evaluate
from qmargin.cli.evaluate import TOP_N, Costs, Known, Resumed, Rules, ScoresFile
from qmargin.cli.options import Command, Count, argument, command_line, option
from qmargin.cli.tables import StageProgress, stage_progress
from qmargin.errors import ConfigError, DataError

if TYPE_CHECKING:
    from qmargin.evaluation.embed import SampleSet
    from qmargin.evaluation.embeddings import Embeddings
    from qmargin.evaluation.evaluate import EvaluationOptions
    from qmargin.evaluation.protocols.speakers import QualityCalibration, Scoring
    from qmargin.evaluation.trials import TrialList
    from qmargin.files import Guard
    from qmargin.models.directory import ModelCard


@dataclass(frozen=True, kw_only=True)
class _Embedded(Resumed, Rules):
    """Base of protocols whose samples are embedded by a model, or read as embeddings."""

    model: Path | None = option("model directory, or a run", metavar="DIR")
    embeddings: Path | None = option(
        "written by --model, or read without --model (OUT with .embeddings.safetensors)"
    )
    device: str = option("where the model runs, such as cpu or cuda", default="cpu", metavar="NAME")
    workers: int = option("number of decoding threads", default=2)

    def check(self) -> Guard:
        """Refuse impossible options before any work."""
        from qmargin.evaluation.embeddings import EMBEDDINGS_MARK

        outputs = self.scores_output if isinstance(self, ScoresFile) else {}
        if self.model is None and self.embeddings is None:
            raise ConfigError("there is neither --model nor --embeddings: give one of them")
        if self.model is not None:
            from qmargin.training.distributed import find_device

            find_device(self.device)
            outputs = {**outputs, "embeddings": (self.embeddings_path, EMBEDDINGS_MARK)}
        return self.check_outputs(outputs)

    def embed(
        self, samples: Callable[[ModelCard], SampleSet], progress: StageProgress, **options: Any
    ) -> Known:
        """Embed samples if a model is given; return facts about it."""
        if self.model is None:
            return Known()
        from qmargin.evaluation.embed import write_embeddings
        from qmargin.evaluation.model import load_model

        model = load_model(self.model, device=self.device, fit="exact")
        write_embeddings(
            model,
            samples(model.card),
            self.embeddings_path,
            model_id=model.card.weights_sha256,
            num_workers=self.workers,
            restart=self.restart,
            progress=partial(progress, "embedding"),
            **options,
        )
        return Known(model.card.to_texts(), model.run)


@dataclass(frozen=True, kw_only=True)
class _Faces(_Embedded):
    """A protocol of images."""

    no_flip: bool = option("do not average with mirror images")
    batch_size: int = option("batch size, in images", default=64)

    def read(
        self,
        keys: Sequence[str],
        images: Callable[[int], SampleSet],
        flip: str,
        progress: StageProgress,
        *,
        is_exact: bool = True,
    ) -> tuple[Embeddings, Known]:
        """Embeddings of the images, computed or read, with facts about them.

        ``images`` takes the model's size, ``flip`` is the use of mirror images. With ``is_exact``,
        rows are in the order of the keys; otherwise they are found by name.
        """
        from qmargin.evaluation.embeddings import map_embeddings, stored_flip

        options = {"keys": keys, "flip": flip, "batch_size": self.batch_size}
        known = self.embed(lambda card: images(_size(card.input_shape)), progress, **options)
        path = self.embeddings_path
        stored = stored_flip(path)
        _check_flip(path, stored, flip)
        found = map_embeddings(path)
        if is_exact and found.keys != tuple(keys):
            other = f"{len(found):,} embeddings, of other images or in another order than the"
            raise DataError(f"{path} has {other} {len(keys):,} of the set: make it with --model")
        return found, known._replace(
            card=evaluate.with_weights(known.card, found.weights_sha256) or {},
            flip="sum" if stored == "both" else stored,
            notes=evaluate.collapse_notes(found),
        )

    def face_options(self, protocol: Path, known: Known, **others: Any) -> EvaluationOptions:
        """Evaluation options, with names of files."""
        from qmargin.evaluation.evaluate import default_name

        name = default_name(self.model or self.embeddings_path)
        return self.options(name=name, protocol=default_name(protocol), known=known, **others)


@dataclass(frozen=True, kw_only=True)
class _Pictures(Command):
    """Images of the hardest pairs."""

    pictures: Path | None = option(
        "folder for the images of the hardest pairs, for a report", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class Lfw(_Faces, _Pictures):
    """Evaluate a verification set in folds: LFW, CFP-FP, AgeDB-30, CALFW, CPLFW (.bin).

    Computes accuracy over ten folds with the flip test, and TAR at FAR 1e-3, 1e-2 and 1e-1.
    """

    file: Path = argument(".bin, or the .npz made from it", metavar="SET")
    insightface: bool = option("also compute the accuracy as InsightFace does")
    fars: tuple[float, ...] = option(default=(1e-3, 1e-2, 1e-1))

    def run(self) -> None:
        from qmargin.evaluation.protocols import face_sets as sets

        guard = self.check()
        pairs = sets.read_verification_set(self.file)
        flip = "none" if self.no_flip else "both"
        with stage_progress() as progress:
            embeddings, known = self.read(pairs.keys, pairs.images, flip, progress)
            result = sets.evaluate_verification_set(
                pairs,
                sets.flip_features(embeddings.matrix, has_flip=flip == "both"),
                self.face_options(self.file, known),
                compatible=self.insightface,
                sources=(embeddings.source,),
                command=command_line(),
                progress=progress,
            )
        if self.pictures is not None:
            sets.write_pictures(self.pictures, pairs, result.hardest, guard=guard)
        self.finish(result)


@dataclass(frozen=True, kw_only=True)
class Pairs(_Faces, ScoresFile):
    """Evaluate any list of image pairs.

    Embeds every image of a list of pairs once and compares the pairs. The list is CSV with a header
    (a,b,label and optionally fold), LFW's pairs.txt, or lines of two names and a label.
    """

    file: Path = argument("list of pairs with labels", metavar="PAIRS")
    images: Path | None = option("folder of the images (the folder of the list)", metavar="DIR")
    extension: str = option("extension of the images of pairs.txt", default="jpg", metavar="NAME")

    def run(self) -> None:
        from qmargin.evaluation.embed import folder_images
        from qmargin.evaluation.protocols.face_sets import evaluate_pairs, read_pair_trials

        guard = self.check()
        pairs = read_pair_trials(self.file, extension=self.extension)
        folder = self.images or self.file.parent
        if self.model is not None and not folder.is_dir():
            raise ConfigError(f"--images {folder} is not a folder: give the one of the names")
        names, flip = pairs.trials.keys.names, "none" if self.no_flip else "sum"
        images = partial(folder_images, folder, names)
        with stage_progress() as progress:
            embeddings, known = self.read(names, images, flip, progress, is_exact=False)
            result = evaluate_pairs(
                embeddings,
                pairs.trials,
                self.face_options(self.file, known),
                scores=self.scores_path,
                guard=guard,
                folds=pairs.folds,
                restart=self.restart,
                command=command_line(),
                progress=progress,
            )
        self.finish(result)


@dataclass(frozen=True, kw_only=True)
class Ijb(_Faces, _Pictures):
    """Evaluate IJB-B or IJB-C, one-to-one or search.

    Pools images into media and templates and compares the templates: 1:1 over the list of pairs,
    or 1:N, each probe searched in each gallery (one result per gallery).
    """

    folder: Path = argument("IJBB or IJBC, with loose_crop/ and meta/", metavar="DIR")
    task: Literal["1:1", "1:N"] = option("pairs or search", default="1:1")
    unit_embeddings: bool = option("weigh all images equally, regardless of their norm")
    no_detector_scores: bool = option("do not weigh images by the detector")
    fars: tuple[float, ...] = option(
        "false accept rates of TAR, or false positive rates of a search (1e-6 to 1e-1; 1e-2 and "
        "1e-1 of a search)",
        default=(),
    )
    replicates: int = option(default=100)  # of millions of pairs: a thousand take minutes

    def run(self) -> None:
        from qmargin.evaluation.protocols import ijb
        from qmargin.evaluation.result import RESULT_MARK

        guard = self.check()
        release = ijb.read_ijb(self.folder)
        pooling = ijb.Pooling(not self.unit_embeddings, not self.no_detector_scores)
        fars = (1e-2, 1e-1) if self.task == "1:N" else (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
        with stage_progress() as progress:
            flip = "none" if self.no_flip else "sum"
            embeddings, known = self.read(release.keys, release.images, flip, progress)
            templates = ijb.pool_templates(
                embeddings.matrix, release.rows, pooling, progress=partial(progress, "pooling")
            )
            options = self.face_options(
                Path(release.name),
                known,
                fars=self.fars or fars,
                sources=(*release.sources, embeddings.source),
                pooling=f"norms {'kept' if pooling.keep_norms else 'set to 1'}, "
                f"detector scores {'used' if pooling.use_detector else 'not used'}",
            )
            del embeddings  # free a gigabyte
            given: dict[str, Any] = {"command": command_line(), "progress": progress}
            if self.task == "1:1":
                pairs = release.pairs(progress=partial(progress, "reading pairs"))
                found = {"": ijb.evaluate_templates(templates, pairs, options, **given)}
            else:
                search = partial(ijb.evaluate_identification, templates, release.probes())
                found = {f".{g.name}": search(g, options, **given) for g in release.galleries()}
        for suffix, result in found.items():
            out = self.out
            if self.pictures is not None:
                ijb.write_template_pictures(self.pictures, release, result.hardest, guard=guard)
            if suffix:
                out = out.with_name(f"{out.stem}{suffix}{out.suffix}")
                guard.check(out, RESULT_MARK)
            self.finish(result, out)


def _size(input_shape: tuple[int, ...]) -> int:
    """Side length of the images of a model."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ConfigError(f"the model takes {input_shape}; give one of images (3, size, size)")
    return input_shape[1]


def _check_flip(path: Path, stored: str | None, wanted: str) -> None:
    """Refuse embeddings with another use of mirror images."""
    if stored is None and wanted == "both":
        remedy = "pass --no-flip to take its rows as they are, or make it with --model"
        raise DataError(f"{path} does not say whether it has mirror images: {remedy}")
    if stored is not None and stored != wanted:
        remedy = "leave --no-flip out" if wanted == "none" else "pass --no-flip"
        needed = f"flip={stored}, but flip={wanted} is needed here"
        raise DataError(f"{path} was made with {needed}: {remedy}, or make it with --model")


@dataclass(frozen=True, kw_only=True)
class VoxCeleb(_Embedded, ScoresFile, Costs):
    """Evaluate speaker trials: VoxCeleb1-O, -E, -H or any list.

    Embeds whole recordings, or reads their embeddings, subtracts the mean of the training set,
    compares by cosine, and may normalise by a cohort and calibrate.
    """

    trials: str = argument("O, E, H (official lists) or a file with labels", metavar="LIST")
    audio: Path | None = option("folder of the recordings in the list", metavar="DIR")
    training: Path | None = option("embeddings of the training set: mean, cohort and trials")
    speakers: Path | None = option("lines `utterance speaker` of --training (folders of names)")
    no_center: bool = option("do not subtract the mean of --training")
    as_norm: Count | None = option(
        f"AS-norm with the N nearest speakers of --training; {TOP_N} without N", const=TOP_N
    )
    calibrate: bool = option(
        "calibrate to quality-aware log-likelihood ratios, with trials of --training"
    )
    durations: tuple[Path, ...] = option(
        "lines `utterance seconds`, embeddings made by --model, or an index, for --calibrate"
    )
    fars: tuple[float, ...] = option(default=(1e-2, 1e-3, 1e-4))
    seed: int = option("seed of the bootstrap and of sampled trials", default=0)

    def run(self) -> None:
        from qmargin.evaluation.evaluate import default_name
        from qmargin.evaluation.protocols.speakers import evaluate_speakers

        if self.model is not None and self.audio is None:
            raise ConfigError(f"--model {self.model} needs recordings: give --audio DIR")
        for name, value in {"--as-norm": self.as_norm, "--calibrate": self.calibrate}.items():
            if value and self.training is None:
                raise ConfigError(f"{name} needs other speakers: give --training FILE")
        guard = self.check()
        with stage_progress() as progress:
            trials, protocol = self._trials(guard, progress)
            embeddings, known = self._embeddings(trials, progress)
            scoring, calibration = self._scoring()
            result = evaluate_speakers(
                embeddings,
                trials,
                self.options(
                    name=default_name(self.embeddings_path),
                    protocol=protocol,
                    known=known,
                    kind="voxceleb",
                    model_card={**known.card, "scoring": self._steps()},
                ),
                scoring=scoring,
                calibration=calibration,
                scores=self.scores_path,
                guard=guard,
                command=command_line(),
                progress=progress,
            )
        self.finish(result)

    def _trials(self, guard: Guard, progress: StageProgress) -> tuple[TrialList, str]:
        from qmargin.evaluation.evaluate import default_name
        from qmargin.evaluation.protocols.speakers import OFFICIAL, unpack_official
        from qmargin.evaluation.trials import read_trials

        path, protocol = Path(self.trials), default_name(self.trials)
        if self.trials in OFFICIAL:
            path = unpack_official(self.trials, self.out.parent, guard=guard)
            protocol = OFFICIAL[self.trials].title
        return read_trials(path, progress=partial(progress, "reading trials")), protocol

    def _embeddings(self, trials: TrialList, progress: StageProgress) -> tuple[Embeddings, Known]:
        """Embeddings of the recordings, computed or read, with facts about them."""
        from qmargin.evaluation.embed import Recordings
        from qmargin.evaluation.embeddings import read_embeddings

        audio = self.audio or Path()
        known = self.embed(lambda _: Recordings(audio, trials.keys.names), progress)
        found = read_embeddings(self.embeddings_path)
        card = evaluate.with_weights(known.card, found.weights_sha256) or {}
        return found, known._replace(card=card, notes=evaluate.collapse_notes(found))

    def _scoring(self) -> tuple[Scoring, QualityCalibration | None]:
        """Uses of the training set."""
        from qmargin.evaluation.columns import read_mapping
        from qmargin.evaluation.embeddings import read_embeddings, read_seconds
        from qmargin.evaluation.protocols import speakers
        from qmargin.evaluation.scoring import CohortNorm

        if self.training is None:
            return speakers.Scoring(), None
        training = read_embeddings(self.training, role="center")
        speaker_of = None
        if self.speakers is not None:
            speaker_of, _ = read_mapping(self.speakers, role="subjects")
        norm, seconds = None, dict[str, float]()
        if self.as_norm is not None:
            norm = CohortNorm(speakers.speaker_means(training, speaker_of), self.as_norm)
        for path in self.durations if self.calibrate else ():
            seconds |= read_seconds(path)
        center = None if self.no_center else training
        scoring = speakers.Scoring(center=center, norm=norm, seconds=seconds or None)
        if not self.calibrate:
            return scoring, None
        names = speakers.speakers_of(training.keys, speaker_of)
        drawn = speakers.draw_trials(training, speakers=names, seed=self.seed)
        return scoring, speakers.calibrate_speakers(training, drawn, scoring)

    def _steps(self) -> str:
        """Description of the scoring, for the model card."""
        steps = {
            "mean subtracted": self.training is not None and not self.no_center,
            "cosine": True,
            f"AS-norm {self.as_norm}": self.as_norm is not None,
            "quality-aware calibration": self.calibrate,
        }
        return ", ".join(step for step, is_used in steps.items() if is_used)
