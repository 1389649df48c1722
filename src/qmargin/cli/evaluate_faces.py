"""``qmargin evaluate lfw|ijb|pairs``: images and a model, or embeddings, to a result."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qmargin.cli.evaluate_checks import check_protocol, collapse_notes, with_weights
from qmargin.cli.evaluate_options import EMBEDDINGS_HELP, add_measures
from qmargin.cli.progress import BarProgress, PlainProgress, stage_progress
from qmargin.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qmargin.evaluation.embed import ImageSet
    from qmargin.evaluation.embeddings import Embeddings
    from qmargin.evaluation.options import EvaluationOptions
    from qmargin.evaluation.protocols.ijb_release import IjbRelease
    from qmargin.evaluation.protocols.measures import Measured
    from qmargin.evaluation.protocols.templates import Templates

_Kinds: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_Progress = PlainProgress | BarProgress
_IJB_FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_SMALL_FARS = (1e-3, 1e-2, 1e-1)
_FPIRS = (1e-2, 1e-1)
_IJB_REPLICATES = 100  # of millions of pairs: a thousand take minutes


def add_face_protocols(kinds: _Kinds) -> None:
    """Add the protocols of faces to the kinds of ``qmargin evaluate``."""
    _add_lfw(kinds)
    _add_ijb(kinds)
    _add_pairs(kinds)


def _add_lfw(kinds: _Kinds) -> None:
    parser = kinds.add_parser(
        "lfw",
        help="a verification set in folds: LFW, CFP-FP, AgeDB-30, CALFW, CPLFW (.bin)",
        description="Accuracy over ten folds with the flip test, and TAR at FAR 1e-3, 1e-2 and "
        "1e-1 over all pairs.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="SET", help=".bin, or the .npz made from it")
    add("--insightface", action="store_true", help="also measure as InsightFace does")
    add("--pictures", type=Path, metavar="DIR", help=_PICTURES_HELP)
    _add_common(parser, fars=_SMALL_FARS, replicates=1000)
    parser.set_defaults(run=_run_lfw, resumes=True)


def _add_ijb(kinds: _Kinds) -> None:
    parser = kinds.add_parser(
        "ijb",
        help="IJB-B or IJB-C, one-to-one or search",
        description="Pool images into media and templates and compare the templates: 1:1 over the "
        "list of pairs, or 1:N, each probe searched in each gallery (one result per gallery).",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="IJBB or IJBC, with loose_crop/ and meta/")
    add("--task", choices=("1:1", "1:N"), default="1:1", help="pairs or search (1:1)")
    add("--unit-embeddings", action="store_true", help="images weigh the same, whatever their norm")
    add("--no-detector-scores", action="store_true", help="do not weigh images by the detector")
    add("--pictures", type=Path, metavar="DIR", help=_PICTURES_HELP)
    _add_common(parser, fars=None, replicates=_IJB_REPLICATES)
    parser.set_defaults(run=_run_ijb, resumes=True)


def _add_pairs(kinds: _Kinds) -> None:
    parser = kinds.add_parser(
        "pairs",
        help="any list of image pairs",
        description="Embed every image of a list of pairs once and compare them. The list is CSV "
        "with a header (a,b,label and maybe fold), LFW's pairs.txt, or lines of two names and a "
        "label.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="PAIRS", help="list of pairs with labels")
    add("--images", type=Path, metavar="DIR", help="folder that the names are in (the list's)")
    add("--extension", default="jpg", metavar="NAME", help="of the images of pairs.txt (jpg)")
    add("--scores", type=Path, metavar="FILE", help="where the scores go (OUT with .scores.tsv)")
    _add_common(parser, fars=(1e-2, 1e-3, 1e-4, 1e-5), replicates=1000)
    parser.set_defaults(run=_run_pairs, resumes=True)


def _add_common(
    parser: argparse.ArgumentParser, *, fars: tuple[float, ...] | None, replicates: int
) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="model directory, or a run")
    add("--embeddings", type=Path, metavar="FILE", help=EMBEDDINGS_HELP)
    add("--no-flip", action="store_true", help="leave mirror images out")
    add("--device", default="cpu", help="where the model runs, such as cpu or cuda (cpu)")
    add("--batch-size", type=int, default=64, metavar="N", help="images at a time (64)")
    add("--workers", type=int, default=2, metavar="N", help="threads that decode (2)")
    add("--restart", action="store_true", help="begin again where a part of other inputs is found")
    add_measures(parser, fars=fars, replicates=replicates, hardest="pairs")


_PICTURES_HELP = "write images of the hardest pairs there, for `qmargin report --media DIR`"


@dataclass(frozen=True)
class _Wanted:
    """Images whose embeddings are needed, at a model's size, and how mirror images enter them."""

    keys: Sequence[str]
    images: Callable[[int], ImageSet]
    flip: str


def _run_lfw(arguments: argparse.Namespace) -> None:
    from qmargin.evaluation.protocols import verification_sets as sets

    guard = check_protocol(arguments)
    pairs = sets.read_verification_set(arguments.file)
    wanted = _Wanted(pairs.keys, pairs.images, "none" if arguments.no_flip else "both")
    with stage_progress() as progress:
        embeddings, card = _embeddings(arguments, wanted, progress)
        features = sets.flip_features(embeddings.matrix, has_flip=wanted.flip == "both")
        measured = sets.evaluate_verification_set(
            pairs,
            features,
            replace(
                _options(arguments, arguments.file, arguments.fars, card),
                notes=collapse_notes(embeddings),
            ),
            compatible=arguments.insightface,
            sources=(embeddings.source,),
            command=_command(),
            progress=progress,
        )
    if arguments.pictures is not None:
        sets.write_pictures(arguments.pictures, pairs, measured.result.hardest, guard=guard)
    _finish(measured, arguments.out, arguments)


def _run_pairs(arguments: argparse.Namespace) -> None:
    from qmargin.evaluation.protocols.pairs import FolderImages, evaluate_pairs, read_pair_trials

    guard = check_protocol(arguments)
    pairs = read_pair_trials(arguments.file, extension=arguments.extension)
    trials = pairs.trials
    folder = arguments.images or arguments.file.parent
    if arguments.model is not None and not folder.is_dir():
        raise ConfigError(f"--images {folder} is not a folder: give the one that the names are in")
    names = trials.keys.names
    images = partial(FolderImages, folder, names)
    wanted = _Wanted(names, images, "none" if arguments.no_flip else "sum")
    with stage_progress() as progress:
        embeddings, card = _embeddings(arguments, wanted, progress, is_exact=False)
        measured = evaluate_pairs(
            embeddings,
            trials,
            replace(
                _options(arguments, arguments.file, arguments.fars, card),
                notes=collapse_notes(embeddings),
            ),
            scores=arguments.scores,
            guard=guard,
            folds=pairs.folds,
            restart=arguments.restart,
            command=_command(),
            progress=progress,
        )
    _finish(measured, arguments.out, arguments)


def _run_ijb(arguments: argparse.Namespace) -> None:
    from qmargin.evaluation.protocols.ijb_release import read_ijb, write_template_pictures
    from qmargin.evaluation.protocols.templates import Pooling, pool_templates
    from qmargin.evaluation.result import RESULT_MARK

    guard = check_protocol(arguments)
    release = read_ijb(arguments.folder)
    flip = "none" if arguments.no_flip else "sum"
    pooling = Pooling(not arguments.unit_embeddings, not arguments.no_detector_scores)
    with stage_progress() as progress:
        wanted = _Wanted(release.keys, release.images, flip)
        embeddings, card = _embeddings(arguments, wanted, progress)
        card["pooling"] = (
            f"norms {'kept' if pooling.keep_norms else 'set to 1'}, "
            f"detector scores {'used' if pooling.use_detector else 'not used'}"
        )
        templates = pool_templates(
            embeddings.matrix, release.rows, pooling, progress=partial(progress, "pooling")
        )
        sources, notes = (*release.sources, embeddings.source), collapse_notes(embeddings)
        del embeddings  # a gigabyte that nothing needs any more
        default = _IJB_FARS if arguments.task == "1:1" else _FPIRS
        fars = arguments.fars or default
        options = _options(arguments, Path(release.name), fars, card)
        options = replace(options, sources=sources, notes=notes)
        run = _verify_templates if arguments.task == "1:1" else _search_galleries
        found = run(release, templates, options, progress)
    for suffix, measured in found:
        out = arguments.out
        if arguments.pictures is not None:
            hardest = measured.result.hardest
            write_template_pictures(arguments.pictures, release, hardest, guard=guard)
        if suffix:
            out = out.with_name(f"{out.stem}{suffix}{out.suffix}")
            guard.check(out, RESULT_MARK)
        _finish(measured, out, arguments)


def _verify_templates(
    release: IjbRelease, templates: Templates, options: EvaluationOptions, progress: _Progress
) -> list[tuple[str, Measured]]:
    from qmargin.evaluation.protocols.measures import with_measures
    from qmargin.evaluation.protocols.templates import evaluate_templates

    pairs = release.pairs(progress=partial(progress, "reading pairs"))
    result = evaluate_templates(templates, pairs, options, command=_command(), progress=progress)
    return [("", with_measures(result, ()))]


def _search_galleries(
    release: IjbRelease, templates: Templates, options: EvaluationOptions, progress: _Progress
) -> list[tuple[str, Measured]]:
    from qmargin.evaluation.protocols.identification import evaluate_identification

    probes = release.probes()
    return [
        (
            f".{gallery.name}",
            evaluate_identification(
                templates, probes, gallery, options, command=_command(), progress=progress
            ),
        )
        for gallery in release.galleries()
    ]


def _embeddings(
    arguments: argparse.Namespace,
    wanted: _Wanted,
    progress: _Progress,
    *,
    is_exact: bool = True,
) -> tuple[Embeddings, dict[str, str]]:
    """Embeddings of the images, made or read, and the model's card.

    Rows are in the order of the images where ``is_exact``; otherwise names find them.
    """
    from qmargin.evaluation.embed import map_embeddings, stored_flip, write_embeddings

    path, card = arguments.embeddings, {}
    if arguments.model is not None:
        from qmargin.evaluation.model import load_model

        model = load_model(arguments.model, device=arguments.device, fit="exact")
        card = dict(model.card.to_texts())
        write_embeddings(
            model,
            wanted.images(_size(model.card.input_shape)),
            path,
            keys=wanted.keys,
            model_id=model.card.weights_sha256,
            flip=wanted.flip,
            batch_size=arguments.batch_size,
            num_workers=arguments.workers,
            restart=arguments.restart,
            progress=partial(progress, "embedding"),
        )
    flip = stored_flip(path)
    _check_flip(path, flip, wanted.flip)
    found = map_embeddings(path)
    if is_exact and found.keys != tuple(wanted.keys):
        raise DataError(
            f"{path} has embeddings of {len(found):,} other images, or in another order, than the "
            f"{len(wanted.keys):,} of the set: make them with --model"
        )
    words = {"none": "not used", None: "unknown"}.get(flip, "used")
    known = with_weights(card, found.weights_sha256) or {}
    return found, {**known, "mirror images": words}


def _size(input_shape: tuple[int, ...]) -> int:
    """Side of the images that a model takes."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ConfigError(
            f"the model takes inputs of shape {input_shape}, and these protocols need one of "
            "square images: (3, size, size)"
        )
    return input_shape[1]


def _check_flip(path: Path, stored: str | None, wanted: str) -> None:
    """Refuse embeddings that would be taken for something else."""
    if stored is None and wanted == "both":
        raise DataError(
            f"{path} does not say whether it has mirror images: pass --no-flip to take its rows as "
            "they are, or make it with --model"
        )
    if stored is not None and stored != wanted:
        remedy = "leave --no-flip out" if wanted == "none" else "pass --no-flip"
        raise DataError(
            f"{path} was made with flip={stored}, but flip={wanted} is needed here: {remedy}, or "
            "make it again with --model"
        )


def _options(
    arguments: argparse.Namespace,
    protocol: Path,
    fars: Sequence[float],
    card: dict[str, str],
) -> EvaluationOptions:
    from qmargin.evaluation.evaluate import default_name
    from qmargin.evaluation.options import EvaluationOptions

    system: Any = arguments.model or arguments.embeddings
    return EvaluationOptions(
        name=arguments.name or card.get("name") or default_name(system),
        protocol=arguments.protocol or default_name(protocol),
        fars=tuple(fars),
        rule=arguments.rule,
        num_replicates=arguments.replicates,
        seed=arguments.seed,
        level=arguments.level,
        num_hardest=arguments.hardest,
        model_card=card,
    )


def _command() -> str:
    return "qmargin " + shlex.join(sys.argv[1:])


def _finish(measured: Measured, path: Path, arguments: argparse.Namespace) -> None:
    """Write the result and print its tables."""
    from qmargin.cli.evaluate_table import print_result
    from qmargin.cli.tables import output_console, print_table
    from qmargin.evaluation.protocols.measures import write_measured

    write_measured(path, measured, keep_paths=arguments.keep_paths)
    if measured.measures:
        rows = [
            [
                measure.name,
                f"{measure.value:.5f}",
                "" if measure.std is None else f"{measure.std:.5f}",
                measure.note or "",
            ]
            for measure in measured.measures
        ]
        columns = ("measure of the protocol", "value", "deviation", "how")
        print_table(output_console(), measured.result.protocol.name, columns, rows)
    print_result(measured.result, path)
