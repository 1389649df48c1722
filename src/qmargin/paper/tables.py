"""The paper's tables of accuracy, with what was measured here beside its own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qmargin.demo.losses import LOSSES
from qmargin.paper import numbers
from qmargin.paper.captions import described
from qmargin.paper.layout import MISSING, Group, Heading, Table, TableRow, number
from qmargin.paper.measured import Measured, setting_of
from qmargin.paper.numbers import Columns, Row
from qmargin.paper.runs import Request, loss_of, measured_for
from qmargin.paper.scale import scale_of, shown_far, unmeasured, unreachable

FARS = (1e-3, 1e-4, 1e-5)
SETTINGS = (Group("", ("Loss",)), Group("Parameters", ("alpha", "scale", "margin")))
NUM_SEEDS = 3


def table_face(request: Request) -> Table:
    """Every configuration for faces."""
    rows = numbers.FACE
    found = measured_for(request, [loss_of(row) for row in rows], far=FARS[0])
    return setting_table("table-face", rows, numbers.FACE_COLUMNS, found)


def table_speaker(request: Request) -> Table:
    """Every configuration for speakers."""
    rows = numbers.SPEAKER
    found = measured_for(request, [loss_of(row) for row in rows], far=FARS[0])
    return setting_table("table-speaker", rows, numbers.SPEAKER_COLUMNS, found)


def table_seeds(request: Request) -> Table:
    """One configuration with several seeds."""
    row = numbers.SEEDS
    found = measured_for(request, [loss_of(row)], far=FARS[0], seeds=NUM_SEEDS)
    known = [one for one in found if one.setting == setting_of(row)]
    table = setting_table("table-seeds", (row,), numbers.FACE_COLUMNS, known)
    spread = [
        f"{number(value)} +- {deviation:.2f}"
        for value, deviation in zip(row.values, numbers.SEEDS_DEVIATION, strict=True)
    ]
    first = table.rows[0]
    assert isinstance(first, tuple)
    here = first[: len(first) - len(spread)]
    return replace(table, rows=((*here, *spread),))


def table_sota(request: Request) -> Table:
    """Methods of other papers, and five losses by one recipe."""
    found = measured_for(request, list(LOSSES.values()), far=FARS[0])
    protocols = _protocols(found)
    groups = (
        Group("", ("Method",)),
        *(Group("", (column,)) for column in ("Train data", "Backbone", "Venue")),
        *_of_paper(numbers.IJB),
        *_of_us(found),
        Group("", ("setting",), source="here"),
    )
    blank = (MISSING,) * (1 + sum(len(_fars(found, name)) for name in protocols))
    rows: list[TableRow] = [Heading("Reported")]
    for method in numbers.REPORTED:
        start = (method.method, method.data, method.backbone, method.venue)
        rows.append((*start, *map(number, method.values), *blank))
    rows += [None, Heading("Re-implemented")]
    first = len(rows)
    for row in numbers.REIMPLEMENTED:
        own = _same_loss(row, found)
        cells = [cell for name in protocols for cell in _tars(own, found, name)]
        name = f"{row.loss} ({described(row.alpha, row.scale, row.margin)})"
        start = (name, "WF42M", "R-100", MISSING)
        rows.append((*start, *map(number, row.values), *cells, _setting_of(own)))
    caption = (
        "TAR (%) at each FAR. Paper: IJB-B and IJB-C; reported numbers are those of the original "
        "papers, with other data and networks; re-implemented methods share one recipe; the best "
        "of these is in bold. †The depth is not in the original paper. Here, at another scale: "
        f"{_about(found)}"
    )
    return Table("table-sota", caption, groups, tuple(rows), best_from=first)


def setting_table(
    name: str, rows: Sequence[Row], columns: Columns, found: Sequence[Measured]
) -> Table:
    """Settings of the paper, each with what was measured here and with its own numbers.

    Settings that only were measured here come last.
    """
    protocols = _protocols(found)
    blank = (MISSING,) * sum(len(below) for _, below in columns)
    lines: list[TableRow] = []
    for row in rows:
        own = [one for one in found if one.setting == setting_of(row)]
        cells = [cell for title in protocols for cell in _tars(own, found, title)]
        lines.append((*_start(row.loss, row.setting[1:]), *cells, *map(number, row.values)))
    known = {setting_of(row) for row in rows}
    others = [one for one in found if one.setting not in known]
    if others:
        lines.append(None)
    for key in dict.fromkeys((one.name, one.setting) for one in others):
        own = [one for one in others if (one.name, one.setting) == key]
        cells = [cell for title in protocols for cell in _tars(own, found, title)]
        lines.append((*_start(key[0], key[1][1:] if key[1] else None), *cells, *blank))
    caption = (
        f"TAR (%) at each FAR. Here, at another scale than the paper's: {_about(found)}"
        if found
        else "TAR (%) at each FAR. Nothing was measured here for these settings."
    )
    groups = (*SETTINGS, *_of_us(found), *_of_paper(columns))
    return Table(name, caption, groups, tuple(lines))


def _about(found: Sequence[Measured]) -> str:
    """What was measured, what was not, and what no training can reach, in sentences."""
    return " ".join(
        filter(None, (f"{scale_of(found)}.", unmeasured(found, FARS), unreachable(found)))
    )


def _of_paper(columns: Columns) -> list[Group]:
    return [Group(title, below, has_best=True, source="paper") for title, below in columns]


def _of_us(found: Sequence[Measured]) -> list[Group]:
    return [
        Group(title, _columns(found, title), has_best=True, source="here")
        for title in _protocols(found)
        if _columns(found, title)
    ]


def _start(loss: str, setting: tuple[float, float, float] | None) -> tuple[str, ...]:
    if setting is None:
        return (loss, MISSING, MISSING, MISSING)
    alpha, scale, margin = setting
    return (loss, MISSING if alpha == 1.0 else f"{alpha:g}", f"{scale:g}", f"{margin:g}")


def _protocols(found: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(one.protocol for one in found))


def _fars(found: Sequence[Measured], protocol: str) -> list[float]:
    fars = {far for one in found if one.protocol == protocol for far in one.fars}
    return [far for far in FARS if far in fars]


def _columns(found: Sequence[Measured], protocol: str) -> tuple[str, ...]:
    return tuple(map(shown_far, _fars(found, protocol)))


def _tars(own: Sequence[Measured], found: Sequence[Measured], protocol: str) -> list[str]:
    """Cells of a row for one protocol."""
    here = next((one for one in own if one.protocol == protocol), None)
    return [MISSING if here is None else here.tar(far) for far in _fars(found, protocol)]


def _same_loss(row: Row, found: Sequence[Measured]) -> list[Measured]:
    """The same setting, or else the same loss by its name."""
    exact = [one for one in found if one.setting == setting_of(row)]
    return exact or [one for one in found if one.name == row.loss]


def _setting_of(own: Sequence[Measured]) -> str:
    setting = next((one.setting for one in own if one.setting is not None), None)
    return MISSING if setting is None else described(*setting[1:])
