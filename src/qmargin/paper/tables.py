"""The paper's tables of accuracy, with what was measured here beside its own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from qmargin.demo.losses import LOSSES
from qmargin.paper import numbers
from qmargin.paper.layout import MISSING, Group, Table, number
from qmargin.paper.measured import Measured, scale_of, setting_of
from qmargin.paper.numbers import Row
from qmargin.paper.runs import Request, loss_of, measured_for

FARS = (1e-3, 1e-4, 1e-5)
SETTINGS = Group("", ("Loss", "alpha", "scale", "margin"))
NUM_SEEDS = 3


def table_face(request: Request) -> Table:
    """Every configuration for faces."""
    rows = numbers.FACE
    found = measured_for(request, [loss_of(row) for row in rows])
    return setting_table("table-face", rows, numbers.FACE_COLUMNS, found)


def table_speaker(request: Request) -> Table:
    """Every configuration for speakers."""
    rows = numbers.SPEAKER
    found = measured_for(request, [loss_of(row) for row in rows])
    return setting_table("table-speaker", rows, numbers.SPEAKER_COLUMNS, found)


def table_seeds(request: Request) -> Table:
    """One configuration with several seeds."""
    row = numbers.SEEDS
    found = measured_for(request, [loss_of(row)], seeds=NUM_SEEDS)
    known = [one for one in found if one.setting == setting_of(row)]
    table = setting_table("table-seeds", (row,), numbers.FACE_COLUMNS, known)
    spread = [
        f"{number(value)} +- {deviation:.2f}"
        for value, deviation in zip(row.values, numbers.SEEDS_DEVIATION, strict=True)
    ]
    first = table.rows[0]
    assert first is not None
    here = first[: len(first) - len(spread)]
    return Table(table.name, table.caption, table.groups, ((*here, *spread),))


def table_sota(request: Request) -> Table:
    """Methods of other papers, and five losses by one recipe."""
    found = measured_for(request, list(LOSSES.values()))
    protocols = _protocols(found)
    groups = (
        Group("", ("Method", "Train data", "Backbone", "Venue")),
        Group("paper", numbers.IJB, has_best=False),
        *(Group(f"here, {name}", _columns(found, name), has_best=True) for name in protocols),
        Group("here", ("setting",)),
    )
    blank = sum(len(_columns(found, name)) for name in protocols)
    rows: list[tuple[str, ...] | None] = [
        (
            *(method.method, method.data, method.backbone, method.venue),
            *map(number, method.values),
            *[MISSING] * (blank + 1),
        )
        for method in numbers.REPORTED
    ]
    rows.append(None)
    for row in numbers.REIMPLEMENTED:
        own = _same_loss(row, found)
        cells = [cell for name in protocols for cell in _tars(own, found, name)]
        method = f"{row.loss} ({_described(row.alpha, row.scale, row.margin)})"
        start = (method, "WF42M", "R-100", MISSING)
        rows.append((*start, *map(number, row.values), *cells, _setting_of(own)))
    caption = (
        "TAR (%) at each FAR. Paper: IJB-B and IJB-C; the methods of other papers as they report "
        f"them, the last five re-implemented there. Here, at another scale: {scale_of(found)}."
    )
    return Table("table-sota", caption, groups, tuple(rows))


def setting_table(
    name: str, rows: Sequence[Row], columns: tuple[str, ...], found: Sequence[Measured]
) -> Table:
    """Settings of the paper, each with what was measured here and with its own numbers.

    Settings that only were measured here come last.
    """
    protocols = _protocols(found)
    here = [Group(f"here, {title}", _columns(found, title), has_best=True) for title in protocols]
    blank = (MISSING,) * len(columns)
    lines: list[tuple[str, ...] | None] = []
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
        f"TAR (%) at each FAR. Here, at another scale than the paper's: {scale_of(found)}."
        if found
        else "TAR (%) at each FAR. Nothing was measured here for these settings."
    )
    groups = (SETTINGS, *here, Group("paper", columns, has_best=len(rows) > 1))
    return Table(name, caption, groups, tuple(lines))


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
    return tuple(f"{far:.0e}".replace("e-0", "e-") for far in _fars(found, protocol))


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
    return MISSING if setting is None else _described(*setting[1:])


def _described(alpha: float, scale: float, margin: float) -> str:
    order = "" if alpha == 1.0 else f"alpha={alpha:g}, "
    return f"{order}s={scale:g}, m={margin:g}"
