"""``qmargin evaluate voxceleb``: speaker trials, from recordings or embeddings to a result."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.evaluate_checks import check_protocol, collapse_notes, with_weights
from qmargin.cli.evaluate_options import EMBEDDINGS_HELP, add_costs, add_measures
from qmargin.cli.options import count
from qmargin.cli.progress import BarProgress, PlainProgress, stage_progress
from qmargin.errors import ConfigError

if TYPE_CHECKING:
    from qmargin.evaluation.embeddings import Embeddings
    from qmargin.evaluation.options import EvaluationOptions
    from qmargin.evaluation.protocols.quality import QualityCalibration
    from qmargin.evaluation.protocols.trials import Scoring
    from qmargin.evaluation.trials import TrialList
    from qmargin.files import Guard

_Progress = PlainProgress | BarProgress
_TOP_N = 300


def add_speaker_protocols(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Add the protocols of speakers to the kinds of ``qmargin evaluate``."""
    parser = kinds.add_parser(
        "voxceleb",
        help="speaker trials: VoxCeleb1-O, -E, -H or any list",
        description="Embed whole recordings, or read their embeddings, subtract the mean of the "
        "training set, compare by cosine, and maybe normalise by a cohort and calibrate.",
    )
    add = parser.add_argument
    add("trials", metavar="LIST", help="O, E, H (official lists) or a file of trials with labels")
    add("--model", type=Path, metavar="DIR", help="model directory, or a run")
    add("--audio", type=Path, metavar="DIR", help="folder that the names of the list are in")
    add("--embeddings", type=Path, metavar="FILE", help=EMBEDDINGS_HELP)
    add("--training", type=Path, metavar="FILE", help=_TRAINING_HELP)
    add("--speakers", type=Path, metavar="FILE", help=_SPEAKERS_HELP)
    add("--no-center", action="store_true", help="do not subtract the mean of --training")
    add("--as-norm", type=count, nargs="?", const=_TOP_N, metavar="N", help=_AS_NORM_HELP)
    add("--calibrate", action="store_true", help=_CALIBRATE_HELP)
    add("--durations", type=Path, nargs="+", default=[], metavar="FILE", help=_DURATIONS_HELP)
    add("--scores", type=Path, metavar="FILE", help="where the scores go (OUT with .scores.tsv)")
    add("--device", default="cpu", help="where the model runs, such as cpu or cuda (cpu)")
    add("--workers", type=int, default=2, metavar="N", help="threads that decode (2)")
    add("--restart", action="store_true", help="begin again where a part of other inputs is found")
    add_measures(
        parser,
        fars=(1e-2, 1e-3, 1e-4),
        listed_in="the list",
        seeded="the bootstrap and of drawn trials",
    )
    add_costs(parser)
    parser.set_defaults(run=_run_voxceleb, resumes=True)


_TRAINING_HELP = "embeddings of the training set: its mean, its speakers as a cohort, its trials"
_SPEAKERS_HELP = "lines `utterance speaker` of the training set (folders of the names)"
_AS_NORM_HELP = (
    f"normalise by the N nearest speakers of the training set, {_TOP_N} without a number"
)
_CALIBRATE_HELP = (
    "turn scores into log-likelihood ratios, with what is known of both recordings, by trials "
    "drawn from the training set"
)
_DURATIONS_HELP = (
    "lines `utterance seconds`, embeddings made by --model, or an index of qmargin data index, of "
    "the list and of the training set, for --calibrate"
)


def _run_voxceleb(arguments: argparse.Namespace) -> None:
    from qmargin.cli.evaluate_table import print_result
    from qmargin.evaluation.protocols.trials import evaluate_speakers
    from qmargin.evaluation.result import write_result

    guard = _check(arguments)
    with stage_progress() as progress:
        trials, protocol = _trials(arguments, guard, progress)
        embeddings, card = _embeddings(arguments, trials, progress)
        scoring, calibration = _scoring(arguments)
        result = evaluate_speakers(
            embeddings,
            trials,
            replace(_options(arguments, protocol, card), notes=collapse_notes(embeddings)),
            scoring=scoring,
            calibration=calibration,
            scores=arguments.scores,
            guard=guard,
            command="qmargin " + shlex.join(sys.argv[1:]),
            progress=progress,
        )
    write_result(arguments.out, result, keep_paths=arguments.keep_paths)
    print_result(result, arguments.out)


def _check(arguments: argparse.Namespace) -> Guard:
    """Refuse what cannot work before any work is done."""
    if arguments.model is not None and arguments.audio is None:
        raise ConfigError(f"--model {arguments.model} needs recordings: give --audio DIR")
    needs = [name for name in ("as_norm", "calibrate") if getattr(arguments, name)]
    if needs and arguments.training is None:
        option = needs[0].replace("_", "-")
        raise ConfigError(f"--{option} needs other speakers: give --training FILE")
    return check_protocol(arguments)


def _trials(
    arguments: argparse.Namespace, guard: Guard, progress: _Progress
) -> tuple[TrialList, str]:
    from qmargin.evaluation.evaluate import default_name
    from qmargin.evaluation.protocols.voxceleb import OFFICIAL, unpack_official
    from qmargin.evaluation.trials import read_trials

    name = arguments.trials
    if name in OFFICIAL:
        path = unpack_official(name, arguments.out.parent, guard=guard)
        protocol = OFFICIAL[name].title
    else:
        path, protocol = Path(name), default_name(name)
    trials = read_trials(path, progress=partial(progress, "reading trials"))
    return trials, arguments.protocol or protocol


def _embeddings(
    arguments: argparse.Namespace, trials: TrialList, progress: _Progress
) -> tuple[Embeddings, dict[str, str]]:
    """Embeddings of the recordings, made or read, and the model's card."""
    from qmargin.evaluation.embeddings import read_embeddings

    path, card = arguments.embeddings, {}
    if arguments.model is not None:
        from qmargin.evaluation.model import load_model
        from qmargin.evaluation.protocols.utterances import Recordings, embed_utterances

        model = load_model(arguments.model, device=arguments.device)
        card = dict(model.card.to_texts())
        embed_utterances(
            model,
            Recordings(arguments.audio, trials.keys.names),
            path,
            model_id=model.card.weights_sha256,
            num_workers=arguments.workers,
            restart=arguments.restart,
            progress=partial(progress, "embedding"),
        )
    found = read_embeddings(path)
    return found, with_weights(card, found.weights_sha256) or {}


def _scoring(arguments: argparse.Namespace) -> tuple[Scoring, QualityCalibration | None]:
    """What the training set is used for."""
    from qmargin.evaluation.embeddings import read_embeddings
    from qmargin.evaluation.protocols.cohorts import speaker_means, speakers_of
    from qmargin.evaluation.protocols.trials import Scoring, calibrate_speakers, draw_trials
    from qmargin.evaluation.scoring import CohortNorm
    from qmargin.evaluation.subjects import read_mapping

    if arguments.training is None:
        return Scoring(), None
    training = read_embeddings(arguments.training, role="center")
    speaker_of = None
    if arguments.speakers is not None:
        speaker_of, _ = read_mapping(arguments.speakers, role="subjects")
    norm = None
    if arguments.as_norm is not None:
        norm = CohortNorm(speaker_means(training, speaker_of), arguments.as_norm)
    scoring = Scoring(
        center=None if arguments.no_center else training,
        norm=norm,
        seconds=_seconds(arguments) if arguments.calibrate else None,
    )
    if not arguments.calibrate:
        return scoring, None
    drawn = draw_trials(
        training, speakers=speakers_of(training.keys, speaker_of), seed=arguments.seed
    )
    return scoring, calibrate_speakers(training, drawn, scoring)


def _seconds(arguments: argparse.Namespace) -> dict[str, float] | None:
    """Durations of all files together; None where none is given, and they are left out."""
    from qmargin.evaluation.protocols.utterances import read_seconds

    found: dict[str, float] = {}
    for path in arguments.durations:
        found.update(read_seconds(path))
    return found or None


def _options(
    arguments: argparse.Namespace, protocol: str, card: dict[str, str]
) -> EvaluationOptions:
    from qmargin.evaluation.evaluate import default_name
    from qmargin.evaluation.options import EvaluationOptions

    steps = ["cosine"]
    if arguments.training is not None and not arguments.no_center:
        steps.insert(0, "mean subtracted")
    if arguments.as_norm is not None:
        steps.append(f"AS-norm {arguments.as_norm}")
    if arguments.calibrate:
        steps.append("quality-aware calibration")
    return EvaluationOptions(
        name=arguments.name or card.get("name") or default_name(arguments.embeddings),
        protocol=protocol,
        fars=tuple(arguments.fars),
        p_targets=tuple(arguments.p_target),
        rule=arguments.rule,
        num_replicates=arguments.replicates,
        seed=arguments.seed,
        level=arguments.level,
        num_hardest=arguments.hardest,
        model_card={**card, "scoring": ", ".join(steps)},
    )
