"""``qmargin paper``: what the paper says, where it is here, and its tables made anew."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import add_overwrite, guard_of
from qmargin.errors import ConfigError
from qmargin.files import Guard, write_atomically

if TYPE_CHECKING:
    from qmargin.paper.items import Item
    from qmargin.paper.layout import Table
    from qmargin.paper.runs import Request

    Maker = Callable[[Request], Table | list[Path]]


def add_paper(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "paper",
        help="the paper's equations, tables and figures, mapped and made anew",
        description="Show where something that the paper says is in the code, or make one of its "
        "tables or figures at the scale that this machine allows, beside the paper's own numbers. "
        "Without --results, losses are trained by the demo's recipe on synthetic identities; "
        "interrupted and run again, that goes on.",
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of an equation, claim, table or figure")
    add("--list", action="store_true", help="list all of them")
    add(
        "--results",
        type=Path,
        metavar="PATH",
        help="a folder with result.json files of `qmargin demo` or `qmargin evaluate`, or the "
        "JSON file of `python -m benchmarks head`; it is only read",
    )
    add(
        "--out", type=Path, default=Path("qmargin-paper"), metavar="DIR", help="folder of artefacts"
    )
    add("--seeds", type=int, metavar="N", help="repetitions (what the artefact needs)")
    add("--minutes", type=float, metavar="M", help="for five losses and one seed, as in the demo")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (auto)")
    add("--data", type=Path, metavar="PATH", help="pictures, as in the demo")
    add("--page", type=Path, metavar="FILE", help="write everything as a page of Markdown")
    add_overwrite(parser)
    parser.set_defaults(run=run, resumes=True)


def makers() -> dict[str, Maker]:
    """Artefacts by name."""
    from qmargin.paper import figures, pairs, tables
    from qmargin.paper.throughput import table_throughput

    return {
        "table-sota": tables.table_sota,
        "table-face": tables.table_face,
        "table-seeds": tables.table_seeds,
        "table-throughput": table_throughput,
        "table-speaker": tables.table_speaker,
        "figure-pairs": pairs.figure_pairs,
        "figure-det-face": figures.figure_det_face,
        "figure-det-speaker": figures.figure_det_speaker,
    }


def run(arguments: argparse.Namespace) -> None:
    """List, show or make."""
    from qmargin.paper.page import ITEMS, PAGE_MARK, paper_page

    if arguments.page is not None:
        guard_of(arguments, ("page", "out")).check(arguments.page, PAGE_MARK)
        with _writing(arguments.page):
            write_atomically(arguments.page, paper_page().encode())
    elif arguments.list:
        lines = [f"{item.name:26} {item.where}: {item.says}" for item in ITEMS.values()]
        sys.stdout.write("\n".join(lines) + "\n")
    elif arguments.name is None:
        raise ConfigError("name an equation, claim, table or figure; --list shows all of them")
    else:
        from qmargin.training.fields import check_known

        check_known(arguments.name, ITEMS, "an item of the paper")
        make(ITEMS[arguments.name], arguments)


def make(item: Item, arguments: argparse.Namespace) -> None:
    """An artefact, or what is known of everything else."""
    from qmargin.paper.page import item_text
    from qmargin.paper.runs import Request

    request = Request(
        out=arguments.out,
        results=arguments.results,
        seeds=arguments.seeds,
        minutes=arguments.minutes,
        device=arguments.device,
        data=arguments.data,
        command="qmargin " + shlex.join(sys.argv[1:]),
        overwrite=arguments.overwrite,
    )
    maker = makers().get(item.name)
    if maker is None:
        why = f"{item.name} is described, and nothing is made for it"
        request.refuse("results", "seeds", "minutes", "data", why=why)
        sys.stdout.write(item_text(item) + "\n")
        return
    made = maker(request)
    if not isinstance(made, list):
        made = write_table(made, arguments.out, request.guard())
    sys.stdout.write("".join(f"{path}\n" for path in made))


def write_table(table: Table, folder: Path, guard: Guard) -> list[Path]:
    """Print a table, and write it as Markdown and LaTeX."""
    from qmargin.paper.layout import latex, markdown

    texts = {"md": markdown(table), "tex": latex(table)}
    sys.stdout.write(texts["md"] + "\n")
    files = {folder / f"{table.name}.{kind}": text.encode() for kind, text in texts.items()}
    with _writing(folder):
        return guard.write_all(files)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Inside, what cannot be written is an error that says that another place is needed."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be written ({error.strerror or error}); choose "
            "another place"
        ) from error
