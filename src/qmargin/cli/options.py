"""Options, declared once: a command is a dataclass whose fields are its options.

::

    @dataclass(frozen=True, kw_only=True)
    class Index(Command):
        '''Build the index of a dataset.

        The first line is shown in the list of commands, all of it by ``--help``.
        '''

        path: Path = argument("data to index", metavar="PATH")
        threads: Count = option("threads that decode", default=2)

        def run(self) -> None: ...

    add_command(commands, "index", Index)

The annotation decides how a value is read: ``bool`` is a switch, ``Literal`` a choice,
``tuple[T, ...]`` takes several values with spaces or commas between them, ``T | None`` need not be
given. Groups of options are base classes. The parser is argparse's; commands that add themselves to
it by hand work beside these.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from qmargin.files import Guard

_LAST_WORDS = re.compile(r" ?\((?:default: )?([^()]*)\)$")
_SEVERAL = ("+", "*")
_FEW = 8  # choices that are all named
_UNSET: Any = object()
_METAVARS = {int: "N", Path: "FILE"}

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Command:
    """Base of all commands: a dataclass of options, and what is done with them."""

    resumes: ClassVar[bool] = False  # run again after an interruption, it goes on
    epilog: ClassVar[str] = ""  # shown below the options

    def run(self) -> None:
        """Do what the command is for."""
        raise NotImplementedError


def option(
    help: str = "",
    *,
    default: Any = _UNSET,
    metavar: str = "",
    name: str = "",
    const: Any = None,
    repeated: bool = False,
) -> Any:
    """Declare an option; its name is that of the field.

    Args:
        help: What it is; a default may be described in words, in parentheses at the end. Without
            it, the field replaces the default of a base class and keeps the rest.
        default: Without one, the option is required, unless its annotation allows None.
        metavar: Stands for the value in help.
        name: ``--name``, where it is not that of the field.
        const: Value of the option where it is given without one.
        repeated: The option is given once for each value of the tuple.
    """
    metadata = {"metavar": metavar, "name": name, "const": const, "repeated": repeated}
    return field(metadata={"help": help, "default": default, **metadata})


def argument(help: str, *, metavar: str = "", choices: tuple[str, ...] = ()) -> Any:
    """Declare a positional argument; it need not be given where its annotation allows None.

    Args:
        help: What it is.
        metavar: Stands for the value in help.
        choices: Known values, where ``Literal`` cannot list them.
    """
    metadata = {"help": help, "metavar": metavar, "choices": choices, "positional": True}
    return field(metadata=metadata)


def add_command(commands: Commands, name: str, command: type[Command]) -> argparse.ArgumentParser:
    """Add a command to a parser."""
    parser = commands.add_parser(name, **texts_of(command), epilog=command.epilog or None)
    add_fields(parser, command)

    def run(arguments: argparse.Namespace) -> None:
        instance_of(command, arguments).run()

    parser.set_defaults(run=run, **({"resumes": True} if command.resumes else {}))
    return parser


def texts_of(described: object) -> dict[str, Any]:
    """Help in the list of commands and description, from a docstring."""
    text = (described.__doc__ or "").strip()
    first = text.partition("\n")[0]
    return {
        "help": first[:1].lower() + first[1:].rstrip("."),
        "description": " ".join(text.split()),
    }


def add_group(commands: Commands, name: str, help: str, *, title: str, metavar: str) -> Commands:
    """Add a command that consists of others; returns what they are added to."""
    parser = commands.add_parser(name, help=help)
    return parser.add_subparsers(title=title, metavar=metavar, required=True)


def add_fields(parser: argparse.ArgumentParser, record: type) -> None:
    """Add the fields of a dataclass to a parser, as options.

    A field that ``option`` or ``argument`` did not declare is an option with the field's default;
    its metadata may have the entries ``help``, ``metavar``, ``name``, ``const``, ``repeated``,
    ``positional`` and ``choices``.
    """
    hints = get_type_hints(record, include_extras=True)
    for key, declared in _declared(record).items():
        names, settings = _settings(key, declared, hints[key])
        parser.add_argument(*names, **settings)


def instance_of(record: Callable[..., T], arguments: argparse.Namespace) -> T:
    """An instance of a dataclass, with the values of the options that ``add_fields`` added."""
    given = {one.name: getattr(arguments, one.name) for one in fields(record)}  # type: ignore[arg-type]
    return record(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def _declared(record: type) -> dict[str, dict[str, Any]]:
    """Metadata by field: the fields of the class itself first, then those of its bases."""
    known, found = {one.name for one in fields(record)}, dict[str, dict[str, Any]]()
    for base in record.__mro__:
        for name, one in _own_fields(base).items():
            if name not in known:  # a class variable
                continue
            default = one.default if one.default_factory is MISSING else one.default_factory()
            declared = {"default": _UNSET if default is MISSING else default, **one.metadata}
            nearer = found.pop(name, declared)  # and is shown where the base declares it
            kept = nearer if nearer.get("help") else {**declared, "default": nearer["default"]}
            found[name] = kept
    return found


def _own_fields(record: type) -> dict[str, Field[Any]]:
    own: Mapping[str, Field[Any]] = vars(record).get("__dataclass_fields__", {})
    above = [vars(base).get("__dataclass_fields__", {}) for base in record.__mro__[1:]]
    return {
        name: one for name, one in own.items() if not any(other.get(name) is one for other in above)
    }


def _settings(
    name: str, declared: Mapping[str, Any], hint: Any
) -> tuple[list[str], dict[str, Any]]:
    """Names and settings of ``add_argument``."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    is_optional = len(parts) < len(get_args(hint)) and get_origin(hint) is not Literal
    if is_optional:
        hint = parts[0] if len(parts) == 1 else hint
    is_several = get_origin(hint) is tuple
    kind, convert, choices = _value(get_args(hint)[0] if is_several else hint)
    choices = declared.get("choices") or choices
    settings: dict[str, Any] = {"help": declared.get("help") or name.replace("_", " ")}
    names = [declared.get("name") or f"--{name.replace('_', '-')}"]
    default = declared["default"]
    if kind is bool:
        action = argparse.BooleanOptionalAction if is_optional or default is True else "store_true"
        if default is True:
            settings["default"] = True
        return names, {**settings, "dest": name, "action": action}
    settings["type"] = convert
    metavar = declared.get("metavar") or _METAVARS.get(kind)
    if choices:
        settings["choices"] = choices
    elif metavar:
        settings["metavar"] = metavar
    is_repeated = declared.get("repeated", False)
    if default is _UNSET and (is_optional or is_several):
        default = None if is_optional else ()
    if default is not _UNSET:
        settings["default"] = list(default) if is_repeated else default
    if is_repeated:
        settings["action"] = "append"
    elif is_several:
        settings["nargs"] = "+"
    if declared.get("const") is not None:
        settings |= {"nargs": "?", "const": declared["const"]}
    if declared.get("positional", False):
        return [name], {**settings, **({"nargs": "?"} if is_optional else {})}
    return names, {**settings, "dest": name, "required": "default" not in settings}


def _value(hint: Any) -> tuple[Any, Callable[[str], Any], tuple[str, ...]]:
    """Kind of a value, what reads it, and its choices."""
    if get_origin(hint) is Literal:
        return str, str, get_args(hint)
    if get_origin(hint) is Annotated:
        kind, convert = get_args(hint)[:2]
        return kind, convert, ()
    return hint, named_path if hint is Path else hint, ()


class Parser(argparse.ArgumentParser):
    """Parser of a command and, by inheritance, of everything below it.

    Every option shows its default. An option with several values takes them with spaces or commas
    between them. What is misspelt gets the nearest name.
    """

    add_extensions: Callable[[], None] | None = None  # adds commands of other packages below it

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": HelpFormatter})

    def load_extensions(self) -> None:
        """Add the commands that other packages bring; only where one of them may be meant."""
        if self.add_extensions is not None:
            add, self.add_extensions = self.add_extensions, None
            add()

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
        if not words or words[0] not in commands_of(self):
            self.load_extensions()
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
        is_name = convert in (Path, named_path) and Path(text).exists()  # names may have commas
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


def share(text: str) -> float:
    """A number between 0 and 1."""
    value = float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


Count: TypeAlias = Annotated[int, count]
Share: TypeAlias = Annotated[float, share]


@dataclass(frozen=True, kw_only=True)
class Overwriting(Command):
    """Whether a command may replace files of other programs."""

    overwrite: bool = option(
        "replace existing files that this command did not write; inputs are never replaced"
    )


@dataclass(frozen=True, kw_only=True)
class KeepingPaths(Command):
    """Whether absolute paths are kept in what is written."""

    keep_paths: bool = option(
        "write absolute paths as they are; otherwise names of files stand for them"
    )


@dataclass(frozen=True, kw_only=True)
class IndexPlace(Command):
    """Where indexes of data go."""

    index_dir: Path | None = option(
        "folder for the index of the data, instead of beside it", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class ModelUse(Command):
    """What every command that embeds samples with a model takes."""

    model: Path | None = option("model directory, or a run", metavar="DIR")
    fit: Literal["auto", "exact", "resize", "align"] = option(
        "images of another size than the model's: exact refuses them, resize scales them, align "
        "finds the face in every image and auto in those of another size",
        default="auto",
    )
    device: str = option("where to run, such as cpu or cuda", default="cpu", metavar="NAME")


def command_line(*, url: str | None = None) -> str:
    """The command of this process, for what it writes.

    Args:
        url: Shown as ``URL``, because it may hold a password, a host or a folder.
    """
    words = [word if url is None else word.replace(url, "URL") for word in sys.argv[1:]]
    return "qmargin " + shlex.join(words)


def guard_of(arguments: Any, outputs: Collection[str], *, own: Iterable[str] = ()) -> Guard:
    """A guard whose inputs are all paths of the command line, except those of the named options.

    Args:
        arguments: A command with ``overwrite``, or its arguments.
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
