"""The result table of a sweep: Markdown, CSV, and LaTeX in the layout of the paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from qmargin.report.numbers import MISSING, latex_power, percent
from qmargin.report.tables import csv_text, latex_text, markdown_text
from qmargin.sweep.axes import EFFECTIVE
from qmargin.sweep.summary import PointSummary, Spread, Summary
from qmargin.sweep.validation import far_of
from qmargin.training.loss_part import LossPart

PARAMETERS = ("loss.alpha", "loss.scale", "loss.margin", EFFECTIVE, "loss.preset")


def loss_name(loss: LossPart) -> str:
    """What the paper calls a loss of this form.

    Examples:
        >>> loss_name(LossPart(1.25, "prior", 0.2, 32.0)), loss_name(LossPart(1, "cosine", 0.4, 64))
        ('Q-Margin', 'CosFace')
    """
    is_softmax = loss.alpha == 1.0
    if loss.margin_kind in ("prior", "cosine") and is_softmax:
        return "CosFace"
    if loss.margin_kind == "prior":
        return "Q-Margin"
    if loss.margin_kind == "angular":
        return "ArcFace" if is_softmax else "SparseMax" if loss.alpha == 2.0 else "EntMax"
    return f"{loss.margin_kind} margin"


def markdown_table(summary: Summary) -> str:
    """The table, and what its columns are."""
    others, measures = _other_axes(summary), summary.measures
    head = ["Loss", "alpha", "s", "m", "m_eff", *others, *map(_heading, measures), "seeds", ""]
    rule = ["---", *["---:"] * (len(head) - 2), "---"]
    rows = [_markdown_row(summary, row, others) for row in summary.rows]
    lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *rows)]
    words = (
        "Rates in per cent over all pairs of validation samples: mean \u00b1 sample deviation over "
        "seeds, the best mean of complete rows in bold. m_eff is what the margin adds to the "
        "cosine gap of a zero loss."
    )
    return "\n".join([*lines, "", words, ""])


def latex_table(summary: Summary) -> str:
    r"""A booktabs table: loss, parameters, and a column for every rate."""
    others, measures = _other_axes(summary), summary.measures
    widths = [4 + len(others), len(measures)]
    tars = [name for name in measures if far_of(name)]
    title = "TAR@FAR" if len(tars) == len(measures) else "TAR@FAR and EER"
    spec = "l" + "".join(f" @{{\\hskip 1em}} {'c' * width}" for width in widths)
    spans = [f"\\multicolumn{{{widths[0]}}}{{c}}{{Parameters}}"]
    spans.append(f"\\multicolumn{{{widths[1]}}}{{c}}{{{title}}}")
    names = ["Loss", r"$\alpha$", "$s$", "$m$", r"$m_{\mathrm{eff}}$", *map(latex_text, others)]
    names += [_latex_heading(name) for name in measures]
    body = "\n".join(f"        {_latex_row(summary, row, others)} \\\\" for row in summary.rows)
    return (
        "% Needs \\usepackage{booktabs}\n"
        "\\begin{table}[t]\n"
        "    \\centering\n"
        f"    \\caption{{{_caption(summary)}}}\n"
        "    \\label{tab:qmargin-sweep}\n"
        f"    \\begin{{tabular}}{{{spec}}}\n"
        "        \\toprule\n"
        f"         & {' & '.join(spans)} \\\\\n"
        f"        \\cmidrule(lr){{2-{1 + widths[0]}}} "
        f"\\cmidrule(lr){{{2 + widths[0]}-{1 + sum(widths)}}}\n"
        f"        {' & '.join(names)} \\\\\n"
        "        \\midrule\n"
        f"{body}\n"
        "        \\bottomrule\n"
        "    \\end{tabular}\n"
        "\\end{table}\n"
    )


def csv_table(summary: Summary) -> str:
    """Every number unrounded, a line for each row and measure."""
    others = _other_axes(summary)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    head = ["loss", "alpha", "scale", "margin", "effective_margin", *map(csv_text, others)]
    writer.writerow([*head, "measure", "mean", "deviation", "seeds", "note"])
    for row in summary.rows:
        loss = row.recipe.loss
        numbers = [repr(loss.alpha), repr(loss.scale), repr(loss.margin), _shown(row.gap)]
        start = [loss_name(loss), *numbers, *(csv_text(row.point[key]) for key in others)]
        for name in summary.measures:
            spread = row.spread(name)
            if spread is not None:
                values = [repr(spread.mean), _shown(spread.deviation), str(spread.number)]
                writer.writerow([*start, name, *values, csv_text(row.note)])
    return buffer.getvalue()


def _markdown_row(summary: Summary, row: PointSummary, others: Sequence[str]) -> list[str]:
    cells = _cells(summary, row, _markdown_value, "**{}**")
    seeds = str(len([result for result in row.results if result.metrics]))
    values = [markdown_text(row.point[key]) for key in others]
    return [*_settings(row), *values, *cells, seeds, row.note]


def _latex_row(summary: Summary, row: PointSummary, others: Sequence[str]) -> str:
    cells = _cells(summary, row, _latex_value, "\\textbf{{{}}}")
    values = [latex_text(row.point[key]) for key in others]
    mark = "$^{\\ast}$" if row.note else ""
    name, *numbers = _settings(row)
    return " & ".join([name + mark, *numbers, *values, *cells])


def _settings(row: PointSummary) -> list[str]:
    """Loss, alpha, scale, margin and effective margin; the paper writes no alpha for softmax."""
    loss = row.recipe.loss
    alpha = MISSING if loss.alpha == 1.0 else f"{loss.alpha:g}"
    gap = MISSING if row.gap is None else f"{row.gap:.3g}"
    return [loss_name(loss), alpha, f"{loss.scale:g}", f"{loss.margin:.3g}", gap]


def _cells(
    summary: Summary, row: PointSummary, value: Callable[[Spread], str], bold: str
) -> list[str]:
    cells = []
    for name in summary.measures:
        spread, best = row.spread(name), summary.best(name)
        if spread is None:
            cells.append(MISSING)
            continue
        is_best = len(summary.rows) > 1 and best is not None and best.point == row.point
        cells.append(bold.format(value(spread)) if is_best else value(spread))
    return cells


def _markdown_value(spread: Spread) -> str:
    if spread.deviation is None:
        return percent(spread.mean)
    return f"{percent(spread.mean)} \u00b1 {percent(spread.deviation)}"


def _latex_value(spread: Spread) -> str:
    if spread.deviation is None:
        return percent(spread.mean)
    return f"{percent(spread.mean)}$\\pm${percent(spread.deviation)}"


def _other_axes(summary: Summary) -> list[str]:
    """Axes that the columns of the loss do not show."""
    keys = list(summary.rows[0].point) if summary.rows else []
    return [key for key in keys if key not in PARAMETERS]


def _heading(measure: str) -> str:
    far = far_of(measure)
    return "EER" if far is None else f"TAR at {far:g}"


def _latex_heading(measure: str) -> str:
    far = far_of(measure)
    return "EER" if far is None else latex_power(far)


def _caption(summary: Summary) -> str:
    number = max((row.num_wanted for row in summary.rows), default=1)
    words = "Validation results (\\%)"
    words += f", mean$\\pm$standard deviation over {number} seeds" if number > 1 else ""
    words += "; best in bold."
    if any(row.note for row in summary.rows):
        words += " $^{\\ast}$Not all trainings were complete."
    return words


def _shown(value: float | None) -> str:
    return "" if value is None else repr(value)
