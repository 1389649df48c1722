"""``qmargin evaluate``: scores, trials or all pairs to a table and ``result.json``."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmargin.cli.embed import add_folder_options, embed_folder
from qmargin.cli.evaluate_checks import check_outputs, collapse_notes, with_weights
from qmargin.cli.evaluate_faces import add_face_protocols
from qmargin.cli.evaluate_options import add_costs, add_measures
from qmargin.cli.evaluate_speakers import add_speaker_protocols
from qmargin.cli.options import count
from qmargin.cli.progress import BarProgress, PlainProgress, stage_progress
from qmargin.cli.verify import add_model_options
from qmargin.errors import ConfigError, DataError
from qmargin.files import check_regular

if TYPE_CHECKING:
    from qmargin.evaluation.embeddings import Embeddings
    from qmargin.evaluation.options import EvaluationOptions
    from qmargin.evaluation.result import Result, Source
    from qmargin.evaluation.score_files import ScoreSet
    from qmargin.evaluation.scoring import CohortNorm

_Progress = PlainProgress | BarProgress

_FORMAT_HELP = (
    "auto, csv, tsv, npz, or the order of columns without a header: enrol-test-score-label, "
    "enrol-test-label-score, enrol-test-score, score-label, label-score (auto)"
)
_TRIALS_FORMAT_HELP = (
    "auto, csv, tsv, enrol-test-label (Kaldi), label-enrol-test (VoxCeleb), enrol-test (auto)"
)


def add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("evaluate", help="measure a verification system, with intervals")
    kinds = parser.add_subparsers(title="what to evaluate", metavar="WHAT", required=True)
    _add_scores(kinds)
    _add_trials(kinds)
    _add_all_pairs(kinds)
    add_face_protocols(kinds)
    add_speaker_protocols(kinds)


def _add_scores(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "scores",
        help="a file of scores that any tool made",
        description="Read scores and labels (text in the usual column orders, CSV, TSV, NPZ), "
        "measure, print a table and write result.json.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="scores")
    add("--format", default="auto", metavar="NAME", help=_FORMAT_HELP)
    add("--trials", type=Path, metavar="FILE", help="trial list that has the labels")
    add("--trials-format", default="auto", metavar="NAME", help=_TRIALS_FORMAT_HELP)
    add("--ignore-extra", action="store_true", help="skip scores that are not in the trial list")
    _add_common(parser)
    parser.set_defaults(run=_run_scores)


def _add_trials(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "trials",
        help="a trial list with embeddings",
        description="Score the trials by the cosine of their embeddings, in float64, and evaluate. "
        "A run that was stopped goes on where it was.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="TRIALS", help="trial list with labels")
    add(
        "--embeddings", type=Path, required=True, metavar="FILE", help=".npz .safetensors .ark .scp"
    )
    add("--trials-format", default="auto", metavar="NAME", help=_TRIALS_FORMAT_HELP)
    _add_cohort(parser)
    add("--center", type=Path, metavar="FILE", help="subtract the mean of these embeddings first")
    add("--scores", type=Path, metavar="FILE", help="where the scores go (OUT with .scores.tsv)")
    add("--restart", action="store_true", help="begin again where a part of other inputs is found")
    _add_common(parser)
    parser.set_defaults(run=_run_trials, resumes=True)


def _add_all_pairs(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "all-pairs",
        help="every sample against every other, of a folder or a file of embeddings",
        description="Compare every sample with every other by the cosine of their embeddings. "
        "Operating points are exact at any number of samples; intervals draw identities. A folder "
        "has one sub-folder per identity, with images or recordings, and needs --model.",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="DIR|EMBEDDINGS", help=_SOURCE_HELP)
    add_model_options(parser, is_required=False)
    add("--identities", type=Path, metavar="FILE", help=_IDENTITIES_HELP)
    add("--embeddings", type=Path, metavar="FILE", help=_WRITTEN_HELP)
    _add_cohort(parser)
    add_folder_options(parser, max_corrupt=0)
    add_measures(
        parser,
        fars=(1e-2, 1e-3, 1e-4, 1e-5),
        named_by="model or file",
        listed_in="the folder",
        hardest="pairs",
        has_rules=False,
    )
    add_costs(parser)
    _add_model_card(parser)
    parser.set_defaults(run=_run_all_pairs)


_SOURCE_HELP = "folder with a sub-folder per identity, or embeddings: .safetensors .npz .ark .scp"
_IDENTITIES_HELP = "lines `key identity` (the first folder of every key)"
_WRITTEN_HELP = "where the embeddings of DIR go (OUT with .embeddings.safetensors)"


def _add_cohort(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cohort", type=Path, metavar="FILE", help="embeddings of other subjects, for --as-norm")
    add(
        "--as-norm",
        type=count,
        metavar="N",
        help="normalise by the N nearest of the cohort (300 with --cohort, else none)",
    )


def _add_model_card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-card", type=Path, metavar="FILE", help="JSON object of texts, kept in the result"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_measures(parser, fars=(1e-2, 1e-3, 1e-4, 1e-5), named_by="file")
    add_costs(parser)
    add = parser.add_argument
    add("--subjects", default="auto", metavar="HOW", help=_SUBJECTS_HELP)
    add("--groups", type=Path, metavar="FILE", help="lines of subject,group: adds rates per group")
    add("--group-far", type=float, metavar="FAR", help="FAR of the groups' common threshold")
    _add_model_card(parser)


_SUBJECTS_HELP = (
    "file of lines `name subject`, or path (folders in the names), or none; auto looks for "
    "columns in the file, then for paths that agree with the labels (auto)"
)


def _run_scores(arguments: argparse.Namespace) -> None:
    from qmargin.cli.evaluate_table import print_result
    from qmargin.evaluation.score_files import read_scores
    from qmargin.evaluation.trials import read_trials

    if arguments.trials is None and (arguments.ignore_extra or arguments.trials_format != "auto"):
        raise ConfigError(
            "--ignore-extra and --trials-format are about a trial list: give --trials FILE, or "
            "leave them out"
        )
    check_outputs(arguments)
    with stage_progress() as progress:
        trials = None
        if arguments.trials is not None:
            trials = read_trials(
                arguments.trials,
                format=arguments.trials_format,
                progress=partial(progress, "reading trials"),
            )
        score_set = read_scores(
            arguments.file,
            trials=trials,
            format=arguments.format,
            ignore_extra=arguments.ignore_extra,
            progress=partial(progress, "reading scores"),
        )
        protocol = arguments.trials or arguments.file
        result = _measure(arguments, score_set, progress, (arguments.file, protocol))
    print_result(result, arguments.out)


def _run_trials(arguments: argparse.Namespace) -> None:
    from qmargin.cli.evaluate_table import print_result
    from qmargin.evaluation.embeddings import read_embeddings
    from qmargin.evaluation.score_files import read_scores
    from qmargin.evaluation.scoring import score_trials
    from qmargin.evaluation.trials import read_trials

    guard = check_outputs(arguments)
    _check_cohort(arguments)
    with stage_progress() as progress:
        trials = read_trials(arguments.file, format=arguments.trials_format)
        if trials.is_genuine is None:
            raise DataError(f"{arguments.file} has no labels: give a trial list that has them")
        embeddings = read_embeddings(arguments.embeddings)
        norm, center = _cohort_norm(arguments), None
        if arguments.center is not None:
            center = read_embeddings(arguments.center, role="center")
        path = score_trials(
            embeddings,
            trials,
            out=arguments.scores,
            norm=norm,
            center=center,
            restart=arguments.restart,
            guard=guard,
            progress=partial(progress, "scoring"),
        )
        score_set = read_scores(path, trials=trials)
        others = [embeddings, *([norm.cohort] if norm else []), *([center] if center else [])]
        sources = (*score_set.sources, *(other.source for other in others))
        score_set = replace(score_set, sources=sources)
        files = (arguments.embeddings, arguments.file)
        result = _measure(arguments, score_set, progress, files, embeddings)
    print_result(result, arguments.out)


def _check_cohort(arguments: argparse.Namespace) -> None:
    if arguments.as_norm is not None and arguments.cohort is None:
        raise ConfigError(f"--as-norm {arguments.as_norm} needs a cohort: give --cohort FILE")


def _cohort_norm(arguments: argparse.Namespace) -> CohortNorm | None:
    from qmargin.evaluation.embeddings import read_embeddings
    from qmargin.evaluation.scoring import CohortNorm

    if arguments.cohort is None:
        return None
    return CohortNorm(read_embeddings(arguments.cohort, role="cohort"), arguments.as_norm or 300)


def _run_all_pairs(arguments: argparse.Namespace) -> None:
    from qmargin.cli.evaluate_table import print_result
    from qmargin.evaluation.evaluate import default_name
    from qmargin.evaluation.options import EvaluationOptions
    from qmargin.evaluation.protocols.all_pairs import evaluate_identities, identities_of
    from qmargin.evaluation.result import Source, write_result
    from qmargin.evaluation.subjects import read_mapping

    _check_all_pairs(arguments)
    mapping, sources = None, tuple[Source, ...]()
    if arguments.identities is not None:
        mapping, source = read_mapping(arguments.identities, role="subjects")
        sources = (source,)
    given = _model_card(arguments.model_card)
    with stage_progress() as progress:
        embeddings, card, notes = _all_embeddings(arguments, mapping, progress)
        norm = _cohort_norm(arguments)
        if norm is not None:
            card["scoring"] = f"AS-norm {norm.top_n}"
        place = arguments.source if arguments.model is not None else arguments.identities
        options = EvaluationOptions(
            name=arguments.name or card.get("name") or default_name(arguments.source),
            protocol=arguments.protocol
            or ("all pairs" if place is None else f"all pairs of {default_name(place)}"),
            fars=tuple(arguments.fars),
            p_targets=tuple(arguments.p_target),
            num_replicates=arguments.replicates,
            seed=arguments.seed,
            level=arguments.level,
            num_hardest=arguments.hardest,
            model_card=with_weights({**card, **(given or {})} or None, embeddings.weights_sha256),
            sources=sources,
            notes=notes,
        )
        result = evaluate_identities(
            embeddings,
            identities_of(embeddings.keys, mapping),
            options,
            norm=norm,
            device=arguments.device,
            command="qmargin " + shlex.join(sys.argv[1:]),
            progress=progress,
        )
    write_result(arguments.out, result, keep_paths=arguments.keep_paths)
    print_result(result, arguments.out)


def _check_all_pairs(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before any work is done."""
    from qmargin.evaluation.embed_folder import check_suffix
    from qmargin.training.process import find_device

    source = arguments.source
    if source.is_dir() and arguments.model is None:
        raise ConfigError(f"{source} is a folder, whose files need a model: give --model DIR")
    if arguments.model is None and arguments.embeddings is not None:
        raise ConfigError(
            f"--embeddings {arguments.embeddings} is where the embeddings of a folder go: give "
            "embeddings to compare in its place, without the option"
        )
    if arguments.model is not None and not source.is_dir():
        raise ConfigError(
            f"{source} is not a folder, and --model embeds the files of one: give a folder, or "
            "embeddings without --model"
        )
    _check_cohort(arguments)
    find_device(arguments.device)
    check_outputs(arguments)
    if arguments.model is not None:
        check_suffix(arguments.embeddings)


def _all_embeddings(
    arguments: argparse.Namespace, mapping: dict[str, str] | None, progress: _Progress
) -> tuple[Embeddings, dict[str, str], tuple[str, ...]]:
    """Embeddings of all samples, made or read, the model's card, and notes."""
    from qmargin.evaluation.embed import stored_flip
    from qmargin.evaluation.embeddings import read_embeddings
    from qmargin.evaluation.protocols.all_pairs import check_identities, identities_of

    if arguments.model is None:
        return read_embeddings(arguments.source), _mirrored(stored_flip(arguments.source)), ()
    from qmargin.evaluation.embed_folder import find_files
    from qmargin.evaluation.model import load_model

    model = load_model(arguments.model, device=arguments.device, fit=arguments.fit)
    names = find_files(arguments.source, model.card.modality)
    check_identities(identities_of(names, mapping))  # before minutes of embedding
    path = arguments.embeddings
    found, flip = embed_folder(arguments, model, arguments.source, names, path, progress)
    bad = [file for file in found.files if file.row is None]
    notes = [
        f"{len(bad):,} of {len(found.files):,} files could not be read and are left out, the "
        f"first is {file.key!r} ({file.problem})"
        for file in bad[:1]
    ]
    card = dict(model.card.to_texts())
    if model.card.modality == "images":
        card.update(_mirrored(flip))
    return read_embeddings(path), card, tuple(notes)


def _mirrored(flip: str | None) -> dict[str, str]:
    """A line of the model card, where it is known how embeddings were made."""
    words = {"sum": "used", "none": "not used"}
    return {"mirror images": words[flip]} if flip in words else {}


def _measure(
    arguments: argparse.Namespace,
    score_set: ScoreSet,
    progress: _Progress,
    files: tuple[Path, Path],
    embeddings: Embeddings | None = None,
) -> Result:
    """Evaluate and write the result; system and protocol have names after their files."""
    from qmargin.evaluation.evaluate import evaluate_scores
    from qmargin.evaluation.result import write_result

    result = evaluate_scores(
        score_set,
        _options(arguments, *files, embeddings),
        command="qmargin " + shlex.join(sys.argv[1:]),
        progress=progress,
    )
    write_result(arguments.out, result, keep_paths=arguments.keep_paths)
    return result


def _options(
    arguments: argparse.Namespace, system: Path, protocol: Path, embeddings: Embeddings | None
) -> EvaluationOptions:
    from qmargin.evaluation.evaluate import default_name
    from qmargin.evaluation.options import EvaluationOptions

    files, sources = _mappings(arguments)
    return EvaluationOptions(
        name=arguments.name or default_name(system),
        protocol=arguments.protocol or default_name(protocol),
        fars=tuple(arguments.fars),
        p_targets=tuple(arguments.p_target),
        rule=arguments.rule,
        subjects="auto" if "subjects" in files else arguments.subjects,
        subject_of=files.get("subjects"),
        group_of=files.get("groups"),
        group_far=arguments.group_far,
        num_replicates=arguments.replicates,
        seed=arguments.seed,
        level=arguments.level,
        num_hardest=arguments.hardest,
        model_card=with_weights(
            _model_card(arguments.model_card),
            None if embeddings is None else embeddings.weights_sha256,
        ),
        sources=sources,
        notes=() if embeddings is None else collapse_notes(embeddings),
    )


def _mappings(
    arguments: argparse.Namespace,
) -> tuple[dict[str, dict[str, str]], tuple[Source, ...]]:
    """Files of subjects and of groups, where they are given."""
    from qmargin.evaluation.subjects import read_mapping

    paths: dict[str, Any] = {"groups": arguments.groups}
    if arguments.subjects not in ("auto", "path", "none"):
        paths["subjects"] = arguments.subjects
    read = {role: read_mapping(path, role=role) for role, path in paths.items() if path is not None}
    return {role: mapping for role, (mapping, _) in read.items()}, tuple(
        source for _, source in read.values()
    )


def _model_card(path: Path | None) -> dict[str, str] | None:
    import json

    if path is None:
        return None
    check_regular(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise DataError(f"{path} is not a JSON object whose values are all texts")
    return content
