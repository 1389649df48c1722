"""Options, declared once: a command is a dataclass whose fields are its options.

The first line of its docstring is shown in the list of commands, all of it by ``--help``. The
annotation of a field decides how a value is read: ``bool`` is a switch, ``Literal`` a choice,
``tuple[T, ...]`` takes several values with spaces or commas between them, ``T | None`` need not be
given. Groups of options are base classes.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias, TypeVar

from qmargin.errors import nearest
from qmargin.files import Guard

_LAST_WORDS = re.compile(r" ?\((?:default: )?([^()]*)\)$")
_FEW = 8  # choices that are all named
_METAVARS = {int: "N", Path: "FILE"}

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Command:
    """Base of all commands: a dataclass of options with a method ``run``."""

    resumes: ClassVar[bool] = False  # whether a second call after an interruption continues
    epilog: ClassVar[str] = ""  # shown below the options

    def run(self) -> None:
        """Run the command."""
        raise NotImplementedError


def option(help: str = "", **settings: Any) -> Any:
    """Declare an option; its name is that of the field.

    Args:
        help: Help text; a default may be described in words, in parentheses at the end. Without it,
            the field keeps the help and settings of the base class.
        settings: ``default`` (without one, the option is required, unless its annotation allows
            None), ``name`` where it is not that of the field, ``repeated`` where it is given once
            for each value of the tuple; ``metavar``, ``choices``, ``const`` and ``nargs`` as in
            argparse.
    """
    return field(metadata={**({"help": help} if help else {}), **settings})


def argument(help: str, **settings: Any) -> Any:
    """Declare a positional argument; it need not be given where its annotation allows None."""
    return option(help, positional=True, **settings)


def add_command(commands: Commands, name: str, command: type[Command]) -> None:
    """Add a command to a parser."""
    parser = commands.add_parser(name, **texts_of(command), epilog=command.epilog or None)
    add_fields(parser, command)
    parser.set_defaults(run=lambda arguments: instance_of(command, arguments).run())
    if command.resumes:
        parser.set_defaults(resumes=True)


def texts_of(described: object) -> dict[str, Any]:
    """Help in the list of commands and description, from a docstring."""
    text = (described.__doc__ or "").strip()
    first = text.partition("\n")[0].rstrip(".")
    return {"help": first[:1].lower() + first[1:], "description": " ".join(text.split())}


def add_fields(parser: argparse.ArgumentParser, record: type) -> None:
    """Add the fields of a dataclass as options: its own first, then those of its bases.

    A field that ``option`` did not declare is an option with the field's default; its metadata may
    have ``help`` and the settings of ``option``, and ``positional``.
    """
    hints = typing.get_type_hints(record, include_extras=True)
    own = {one.name: one for one in fields(record)}
    found = dict[str, dict[str, Any]]()
    for base in record.__mro__:
        for name in inspect.get_annotations(base):
            if name in own:  # no class variable
                declared = vars(base).get("__dataclass_fields__", own)[name].metadata
                found[name] = {**declared, **found.pop(name, {})}
    for name, declared in found.items():
        one = own[name]
        default = one.default if one.default_factory is MISSING else one.default_factory()
        names, settings = _settings(name, {"default": default, **declared}, hints[name])
        parser.add_argument(*names, **settings)


def instance_of(record: Callable[..., T], arguments: argparse.Namespace) -> T:
    """An instance of a dataclass, with the values of the options that ``add_fields`` added."""
    given = {one.name: getattr(arguments, one.name) for one in fields(record)}  # type: ignore[arg-type]
    return record(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def _settings(
    name: str, declared: Mapping[str, Any], hint: Any
) -> tuple[list[str], dict[str, Any]]:
    """Names and settings of ``add_argument``."""
    is_optional = NoneType in typing.get_args(hint)
    if is_optional:
        hint = next(part for part in typing.get_args(hint) if part is not NoneType)
    is_several = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if is_several else hint
    convert, default = kind, declared["default"]
    settings = {"help": declared.get("help") or name.replace("_", " ")}
    names = [declared.get("name") or f"--{name.replace('_', '-')}"]
    if kind is bool:
        has_no = is_optional or default is True
        settings["action"] = argparse.BooleanOptionalAction if has_no else "store_true"
        return names, {**settings, "dest": name, **({"default": True} if default is True else {})}
    if typing.get_origin(kind) is Literal:
        settings["choices"], convert = typing.get_args(kind), str
    elif typing.get_origin(kind) is Annotated:
        kind, convert = typing.get_args(kind)[:2]
    settings["type"] = named_path if convert is Path else convert
    if kind in _METAVARS:
        settings["metavar"] = _METAVARS[kind]
    if default is MISSING and (is_optional or is_several):
        default = None if is_optional else ()
    if declared.get("repeated"):
        settings["help"] += "; may be repeated"
        settings["action"], default = "append", list(default or ())
    elif is_several:
        settings["nargs"] = "+"
    if default is not MISSING:
        settings["default"] = default
    if declared.get("const") is not None:
        settings["nargs"] = "?"
    given = {key: declared.get(key) for key in ("metavar", "choices", "const", "nargs")}
    settings |= {key: value for key, value in given.items() if value}
    if declared.get("positional"):
        return [name], {**settings, **({"nargs": "?"} if is_optional else {})}
    return names, {**settings, "dest": name, "required": default is MISSING}


class Parser(argparse.ArgumentParser):
    """Parser of a command and, by inheritance, of everything below it.

    Every option shows its default. An option with several values takes them with spaces or commas
    between them. Errors suggest the nearest name for a misspelt one.
    """

    add_extensions: Callable[[], None] | None = None  # adds commands of other packages below it

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "formatter_class": _HelpFormatter})

    def load_extensions(self) -> None:
        """Add the commands of other packages, only if one of them may be requested."""
        if self.add_extensions is not None:
            add, self.add_extensions = self.add_extensions, None
            add()

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument; an option with several values also takes commas."""
        if options.get("nargs") in ("+", "*") and names[0].startswith("-"):
            options |= {"type": _several(options.get("type", str)), "action": _Several}
        return super().add_argument(*names, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; an unknown argument is refused by the command itself, not by its parent."""
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
        """Exit with an error; if a command is missing, list the commands."""
        known = commands_of(self)
        if known and "arguments are required" in message:
            message += f"; choose from {', '.join(known)}"
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hints = list(filter(None, [nearest(str(value), known)]))
            if not hints or len(known) < _FEW:
                hints.append(f"choose from {', '.join(known)}")
            raise argparse.ArgumentError(action, f"there is no {value!r}; {' '.join(hints)}")

    def _refuse(self, rest: list[str]) -> NoReturn:
        known = list(self._option_string_actions)
        hints = [nearest(word.partition("=")[0], known) for word in rest]
        hint = next(filter(None, hints), f"see {self.prog} --help")
        self.error(f"unknown arguments: {' '.join(rest)}; {hint}")


def commands_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The parsers directly below a parser, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


class _HelpFormatter(argparse.HelpFormatter):
    """Help with the default of every option; texts with line ends stay as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return described(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Several(argparse.Action):
    """Joins the lists that the words of an option gave."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [value for part in values for value in part])


def described(action: argparse.Action) -> str:
    """Help of an argument, with ``(default: ...)`` at the end of an option that takes a value.

    A help text may say in words what is done without the option, in parentheses at its end.
    """
    text = action.help or ""
    takes_value = action.nargs != 0 and (action.option_strings or action.nargs == "?")
    if not takes_value or action.required or action.default == argparse.SUPPRESS:
        return text
    words = _LAST_WORDS.search(text)
    default = _shown(action.default)
    if words is not None:
        text, default = text[: words.start()], words[1]
    return f"{text} (default: {default})"


def _shown(default: Any) -> str:
    if default is None or default in ("", [], ()):
        return "none"
    if isinstance(default, list | tuple):
        return " ".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _several(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type for one word of a list, in which commas may separate values."""

    def values(text: str) -> list[Any]:
        is_name = convert in (Path, named_path) and Path(text).exists()  # names may have commas
        parts = [text] if is_name else [part.strip() for part in text.split(",")]
        return [value(part) for part in parts if part]

    def value(part: str) -> Any:
        try:
            return convert(part)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a number; give numbers with spaces or commas between them, and "
                "put other arguments before this option"
            ) from None

    return values


def named_path(text: str) -> Path:
    """A path; an empty one is an error, usually from a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or . for this folder")
    return Path(text)


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
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
    """Option to replace files of other programs."""

    overwrite: bool = option("replace files that this command did not write, except its inputs")


@dataclass(frozen=True, kw_only=True)
class KeepingPaths(Command):
    """Option to keep absolute paths in outputs."""

    keep_paths: bool = option("write absolute paths instead of file names")


@dataclass(frozen=True, kw_only=True)
class IndexPlace(Command):
    """Option for the folder of indexes."""

    index_dir: Path | None = option("folder for indexes (next to the data)", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(Command):
    """Option to change a recipe."""

    settings: tuple[str, ...] = option(
        "change the recipe, as in loss.margin=0.3", name="--set", metavar="KEY=VALUE", repeated=True
    )


@dataclass(frozen=True, kw_only=True)
class ModelUse(Command):
    """Options of every command that embeds samples with a model."""

    model: Path | None = option("model directory, or a run", metavar="DIR")
    fit: Literal["auto", "exact", "resize", "align"] = option(
        "images that do not have the model's size: exact refuses them, resize scales them, align "
        "finds the face in every image, auto only in those of a different size",
        default="auto",
    )
    device: str = option("where to run, such as cpu or cuda", default="cpu", metavar="NAME")


def command_line(*, url: str | None = None) -> str:
    """The command line of this process, for its outputs; ``URL`` replaces urls with secrets."""
    words = [word if url is None else word.replace(url, "URL") for word in sys.argv[1:]]
    return "qmargin " + shlex.join(words)


def guard_of(arguments: Any, outputs: Collection[str], *, own: Iterable[str] = ()) -> Guard:
    """A guard whose inputs are all paths of the command line, except those of the named options."""
    given = [value for name, value in vars(arguments).items() if name not in outputs]
    return Guard(_paths(given), overwrite=arguments.overwrite, own=own)


def _paths(value: Any) -> Iterator[Path]:
    """Paths in the value of an option; a text may name a file too."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item)
    elif isinstance(value, str | Path) and value:
        yield Path(value)
