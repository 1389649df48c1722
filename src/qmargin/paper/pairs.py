"""The paper's figure of pairs that Q-Margin gets right and ArcFace wrong."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qmargin.demo.evaluate import Pictures
from qmargin.demo.run import DemoOptions, Part, part_embeddings
from qmargin.errors import DataError
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.result import Result, read_result
from qmargin.files import MADE_BY
from qmargin.paper.captions import described, write_captions
from qmargin.paper.runs import Request, demo_parts
from qmargin.report.model_card import loss_settings

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

    from qmargin.demo.worlds import World

PAIRS_FAR = 1e-3
NUM_PAIRS = 8
SIDE = 32
ENLARGED = 3
GAP = 6  # pixels between the pictures of a grid, before they are enlarged
TEXT = 20  # pixels of a letter
LINE = 30  # pixels of a line of text
GROUND = 160
Picture: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class Judged:
    """All pairs ``[n, n]`` by one system at its own threshold.

    Attributes:
        name: With its setting.
        is_right: Genuine and accepted, or impostors and rejected.
        lead: How far the score is on the right side of the threshold.
        is_same: Which pairs are genuine.
    """

    name: str
    is_right: NDArray[np.bool_]
    lead: NDArray[np.float32]
    is_same: NDArray[np.bool_]


@dataclass(frozen=True)
class Row:
    """Pairs of one kind, with a line of text above them."""

    title: str
    pairs: NDArray[np.int64]  # [n, 2]


def figure_pairs(request: Request) -> list[Path]:
    """Pairs that Q-Margin gets right and ArcFace wrong: genuine above, impostors below."""
    request.refuse("seeds", why="figure-pairs shows the models of one seed")
    with demo_parts(request, far=PAIRS_FAR) as (options, parts):
        world, ours = judge(options, parts["q_margin"])
        _, theirs = judge(options, parts["arcface"])
    rows = [
        _row("Genuine pairs, accepted by Q-Margin, rejected by ArcFace", ours, theirs, True),
        _row("Impostor pairs, rejected by Q-Margin, accepted by ArcFace", ours, theirs, False),
    ]
    about = f"{world.name}; {ours.name} and {theirs.name}, each at its threshold of FAR 1e-3"
    flip = np.uint8(255 if world.is_ink else 0)
    path = request.out / "figure-pairs.png"
    grid = [(row.title, _pictures(world.test, row.pairs, flip)) for row in rows]
    request.guard().write_all({path: _drawn_grid(about, grid)})
    caption = (
        f"Pairs that Q-Margin gets right and ArcFace wrong: {about}. "
        + " ".join(f"{row.title}." for row in rows)
        + " The clearest are shown. The paper shows faces of AgeDB-30, CALFW and CPLFW, Q-Margin "
        "with alpha=1.25, s=32, m=0.2."
    )
    stem = request.out / "figure-pairs"
    return [path, *write_captions(stem, [path.name], caption, guard=request.guard())]


def judge(options: DemoOptions, part: Part) -> tuple[World, Judged]:
    """All pairs of test pictures by the model of a part."""
    result = read_result(part.result)
    threshold = next(
        (point.threshold for point in result.metrics.tar if point.far_target == PAIRS_FAR), None
    )
    if threshold is None:
        raise DataError(f"{part.result} has no threshold at FAR {PAIRS_FAR:g}; test more pairs")
    world, embeddings = part_embeddings(options, part)
    unit = unit_rows(embeddings).astype(np.float32)
    above = (unit @ unit.T) - np.float32(threshold)  # [n, n], from 0 on accepted
    labels = world.test.labels
    is_same = labels[:, None] == labels
    lead = np.where(is_same, above, -above)
    return world, Judged(_name(result), (above >= 0) == is_same, lead, is_same)


def _name(result: Result) -> str:
    found = loss_settings(result.system.model_card)
    if found.alpha is None or found.scale is None or found.margin is None:
        return result.system.name
    return f"{result.system.name} ({described(found.alpha, found.scale, found.margin)})"


def _row(title: str, ours: Judged, theirs: Judged, is_genuine: bool) -> Row:
    """Pairs of a kind on which the two differ most in our favour, and how many there are."""
    is_kind = np.triu(ours.is_same == is_genuine, k=1)  # every pair once
    wanted = is_kind & ours.is_right & ~theirs.is_right
    num_opposite = int((is_kind & theirs.is_right & ~ours.is_right).sum())
    first, second = np.nonzero(wanted)
    best = np.argsort(-(ours.lead - theirs.lead)[first, second], kind="stable")[:NUM_PAIRS]
    counts = f"{len(best)} of {len(first):,}; the other way round there are {num_opposite:,}"
    return Row(f"{title}: {counts}", np.stack([first[best], second[best]], axis=1))


def _pictures(dataset: Pictures, pairs: NDArray[np.int64], flip: np.uint8) -> list[Picture]:
    return [np.hstack([picture ^ flip for picture in dataset.images(pair)]) for pair in pairs]


def _drawn_grid(title: str, rows: list[tuple[str, list[Picture]]]) -> bytes:
    """Pairs in rows on a grey ground, with a title, and one for each row, as PNG."""
    from PIL import Image, ImageDraw
    from PIL.PngImagePlugin import PngInfo

    width = ENLARGED * (NUM_PAIRS * (2 * SIDE + GAP) + GAP)
    height = LINE + ENLARGED * (SIDE + GAP)
    canvas = Image.new("L", (width, LINE + len(rows) * height + ENLARGED * GAP), GROUND)
    draw, font, left = ImageDraw.Draw(canvas), _font(), ENLARGED * GAP
    draw.text((left, ENLARGED), title[0].upper() + title[1:], fill=0, font=font)
    for number, (text, pairs) in enumerate(rows):
        top = LINE + number * height
        draw.text((left, top + ENLARGED), text, fill=0, font=font)
        for place, pair in enumerate(pairs):
            shown = Image.fromarray(pair.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1))
            canvas.paste(shown, (left + place * ENLARGED * (2 * SIDE + GAP), top + LINE))
    buffer, info = io.BytesIO(), PngInfo()
    info.add_text("Software", MADE_BY)
    canvas.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def _font() -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(TEXT)
    except TypeError:  # Pillow 10.0 has one size
        return ImageFont.load_default()
