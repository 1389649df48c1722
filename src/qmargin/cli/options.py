"""What all commands share: defaults in every help text, lists of values, suggestions, paths."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from qmargin.files import Guard

_LAST_WORDS = re.compile(r" ?\((?:default: )?([^()]*)\)$")
_SEVERAL = ("+", "*")
_FEW = 8  # choices that are all named


class Parser(argparse.ArgumentParser):
    """Parser of a command and, by inheritance, of everything below it.

    Every option shows its default. An option with several values takes them with spaces or commas
    between them. What is misspelt gets the nearest name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": HelpFormatter})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument; an option with several values also takes commas."""
        if options.get("nargs") in _SEVERAL and names[0].startswith("-"):
            options |= {"type": _several(options.get("type", str)), "action": _Several}
        return super().add_argument(*names, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; the command that does not know an argument refuses it, and not the one above."""
        words = sys.argv[1:] if args is None else list(args)
        if commands_of(self) and words and words[0].startswith("-"):
            name = words[0].partition("=")[0]
            if not any(known.startswith(name) for known in self._option_string_actions):
                self._refuse(words[:1])
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self._refuse(rest)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Refuse; where a command is missing, name those that there are."""
        known = commands_of(self)
        if known and "arguments are required" in message:
            message += f"; choose from {', '.join(known)}"
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hints = [suggestion(str(value), known)]
            if hints == [None] or len(known) < _FEW:
                hints.append(f"choose from {', '.join(known)}")
            text = " ".join(filter(None, hints))
            raise argparse.ArgumentError(action, f"there is no {value!r}; {text}")

    def _refuse(self, rest: list[str]) -> NoReturn:
        known = list(self._option_string_actions)
        hints = [suggestion(word.partition("=")[0], known) for word in rest]
        hint = next(filter(None, hints), f"see {self.prog} --help")
        self.error(f"unknown arguments: {' '.join(rest)}; {hint}")


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands directly below a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


class HelpFormatter(argparse.HelpFormatter):
    """Help with the default of every option; texts with line ends stay as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return described(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class _Several(argparse.Action):
    """Joins the lists that the words of an option gave."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [value for part in values for value in part])


def described(action: argparse.Action) -> str:
    """Help of an argument, with ``(default: ...)`` at the end of an option that takes a value.

    A help text may say in words what is done without the option, in parentheses at its end.

    Examples:
        >>> add = Parser(prog="qmargin").add_argument
        >>> described(add("--fars", nargs="+", default=(0.1, 1e-5), help="rates"))
        'rates (default: 0.1 1e-05)'
    """
    text = action.help or ""
    takes_value = action.nargs != 0 and (action.option_strings or action.nargs == "?")
    if not takes_value or action.required or action.default == argparse.SUPPRESS:
        return text
    words = _LAST_WORDS.search(text)
    default = _shown(action.default)
    if words is not None:
        text, default = text[: words.start()], default if "%" in words[1] else words[1]
    return f"{text} (default: {default})"


def _shown(default: Any) -> str:
    if default is None or default in ("", [], ()):
        return "none"
    if isinstance(default, list | tuple):
        return " ".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def suggestion(word: str, known: Iterable[str]) -> str | None:
    """A question about the nearest known name.

    Examples:
        >>> suggestion("evalute", ["evaluate", "report"])
        "did you mean 'evaluate'?"
    """
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else None


def _several(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type for one word of a list, in which commas may separate values."""

    def values(text: str) -> list[Any]:
        is_name = convert is Path and Path(text).exists()  # names of files may have commas
        parts = [text] if is_name else [part.strip() for part in text.split(",")]
        return [_value(part) for part in parts if part]

    def _value(part: str) -> Any:
        try:
            return convert(part)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a number; give numbers with spaces or commas between them, and "
                "put other arguments before this option"
            ) from None

    return values


def named_path(text: str) -> Path:
    """A path; an empty one is a shell variable that was not set, not the current folder.

    Examples:
        >>> named_path("runs/first").name
        'first'
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or . for this folder")
    return Path(text)


def new_file(text: str) -> Path:
    """A file to write at the end of long work, in a folder that is there at its beginning."""
    path = named_path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a file in an existing folder; make the folder first"
        )
    return path


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive finite number")
    return value


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command replace files of other programs."""
    note = "replace existing files that this command did not write; inputs are never replaced"
    parser.add_argument("--overwrite", action="store_true", help=note)


def add_keep_paths(parser: argparse.ArgumentParser) -> None:
    """Add the option that keeps absolute paths in what is written."""
    note = "write absolute paths as they are; otherwise names of files stand for them"
    parser.add_argument("--keep-paths", action="store_true", help=note)


def guard_of(
    arguments: argparse.Namespace, outputs: Collection[str], *, own: Iterable[str] = ()
) -> Guard:
    """A guard whose inputs are all paths of the command line, except those of the named options.

    Args:
        arguments: With ``overwrite``, from ``add_overwrite``.
        outputs: Options that name what is written.
        own: As in ``Guard``.
    """
    inputs = [
        path
        for name, value in vars(arguments).items()
        if name not in outputs
        for path in _paths(value)
    ]
    return Guard(inputs, overwrite=arguments.overwrite, own=own)


def _paths(value: Any) -> Iterator[Path]:
    """Paths in the value of an option; a text may name a file too."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _paths(item)
    elif isinstance(value, (str, Path)) and value:
        yield Path(value)
