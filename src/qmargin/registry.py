"""Extension points: registries of named objects.

Divergences, margins, references, backbones, readers, datasets, protocols, metrics, recipes and
experiments are found by name. A name is added by a call of a ``register_*`` function, or its use as
a decorator: in a module of the registry's ``home``, in a script or a notebook. A package of yours
has an entry point of the group ``qmargin.margins``, ``qmargin.backbones`` and so on instead, which
names the object::

    [project.entry-points."qmargin.margins"]
    mine = "my_package.margins:MyMargin"

Importing this module imports neither torch nor numpy: homes and entry points are imported when a
name is looked up or listed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

from qmargin.errors import ConfigError, nearest

T = TypeVar("T")
V = TypeVar("V")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_LISTED = 40  # names in a message
_AND = " and "


@dataclass(frozen=True)
class _Entry:
    """Entry of a registry: an object, or a reference to import, such as an entry point."""

    value: Any  # None where ``reference`` is still to be imported
    reference: str = ""  # "module:attribute"
    package: str = ""  # distribution of an entry point

    @property
    def module(self) -> str:
        """Name of the module that defines the object."""
        named = self.reference.partition(":")[0]
        return named or str(getattr(_unwrapped(self.value), "__module__", ""))

    @property
    def origin(self) -> str:
        return self.package or self.module or "an unknown module"


class Registry(Generic[T]):
    """Objects of one kind by name.

    Args:
        kind: Singular, for messages, such as ``"margin"``.
        home: Package whose modules register the built-in objects; imported on first use.

    Examples:
        >>> shapes = Registry("shape")
        >>> @shapes.register("square")
        ... def square(side: float) -> float:
        ...     '''Area of a square.'''
        ...     return side * side
        >>> shapes.get("square")(3)
        9
        >>> shapes.get("squar")
        Traceback (most recent call last):
            ...
        qmargin.errors.ConfigError: no shape 'squar'; did you mean 'square'? known are square
    """

    def __init__(self, kind: str, *, home: str | None = None) -> None:
        self.kind = kind
        self.group = f"qmargin.{kind}s"  # of entry points
        self._home = home
        self._is_home_imported = home is None
        self._importing: set[int] = set()  # threads that import the home
        self._entries: dict[str, _Entry] = {}

    @overload
    def register(self, name: str) -> Callable[[V], V]: ...
    @overload
    def register(self, name: str, value: T | str) -> None: ...
    def register(self, name: str, value: T | str | None = None) -> Callable[[V], V] | None:
        """Register an object under a name; without an object, return a decorator.

        Args:
            name: Letters, digits, ``-`` and ``_``; not yet taken.
            value: The object, or ``"module:attribute"`` to import it when it is used. The first
                line of its docstring describes it in lists.

        Raises:
            ConfigError: The name is taken, or is not one for a recipe or the command line.
        """
        if value is None:

            def decorate(decorated: V) -> V:
                self._register(name, _Entry(decorated))
                return decorated

            return decorate
        self._register(name, _Entry(None, value) if isinstance(value, str) else _Entry(value))
        return None

    def get(self, name: str) -> T:
        """The object of a name.

        Raises:
            ConfigError: The name is unknown, or its object cannot be imported.
        """
        self._import_home()
        if name not in self._entries:
            self._find_entry_points()
        if name not in self._entries:
            known = list(self._entries)
            hints = [nearest(name, known)]
            if len(known) <= _LISTED or not hints[0]:
                hints.append(f"known are {', '.join(known) or 'none'}")
            raise ConfigError(f"no {self.kind} {name!r}; {' '.join(filter(None, hints))}")
        return self._loaded(name)

    def names(self) -> list[str]:
        """All names: built-in, registered later, and from entry points."""
        self._import_home()
        self._find_entry_points()
        return list(self._entries)

    def describe(self) -> dict[str, str]:
        """All names, each with the first line of its docstring, or the import error."""
        described = {}
        for name in self.names():
            try:
                text = getattr(_unwrapped(self._loaded(name)), "__doc__", None) or ""
            except ConfigError as error:
                text = str(error)
            described[name] = text.strip().partition("\n")[0]
        return described

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.names()

    def _register(self, name: str, entry: _Entry) -> None:
        if not _NAME.fullmatch(name):
            found = f"{name!r} is not a valid name for a {self.kind}"
            raise ConfigError(f"{found}; use letters, digits, - and _")
        if not f"{entry.module}.".startswith(f"{self._home}."):
            self._import_home()  # so that a built-in name is refused here and now
        held = self._entries.get(name)
        if held is not None and not _may_replace(held, entry):
            by = f"registered already, by {held.origin}"
            raise ConfigError(f"a {self.kind} {name!r} is {by}; choose another name")
        self._entries[name] = entry

    def _import_home(self) -> None:
        """Import every module of the home; they register the built-in objects."""
        thread = threading.get_ident()
        if self._is_home_imported or thread in self._importing or self._home is None:
            return
        import pkgutil

        # No lock is held: a module that another thread imports may be waiting to register.
        self._importing.add(thread)  # modules of the home may look names up meanwhile
        try:
            package = import_module(self._home)
            for found in pkgutil.iter_modules(getattr(package, "__path__", ())):
                if not found.name.startswith("_"):
                    import_module(f"{self._home}.{found.name}")
        finally:
            self._importing.discard(thread)
        self._is_home_imported = True

    def _find_entry_points(self) -> None:
        """Add the names of entry points; their objects are imported when used."""
        import warnings
        from importlib.metadata import entry_points

        for point in entry_points(group=self.group):
            package = point.dist.name if point.dist is not None else point.value
            held = self._entries.get(point.name)
            if held is None:
                self._entries[point.name] = _Entry(None, point.value, package)
            elif held.module == point.module or package in held.package.split(_AND):
                continue
            elif held.package:  # two packages, neither preferred: using the name is an error
                self._entries[point.name] = _Entry(None, "", f"{held.package}{_AND}{package}")
            else:
                warnings.warn(
                    f"the {self.kind} {point.name!r} of the package {package} is ignored: "
                    f"{held.origin} has registered that name already",
                    stacklevel=3,
                )

    def _loaded(self, name: str) -> T:
        entry = self._entries[name]
        if entry.value is None and not entry.reference:
            what = f"the packages {entry.package} both have a {self.kind} {name!r}"
            raise ConfigError(f"{what}; remove one of them")
        if entry.value is None:
            module, _, attribute = entry.reference.partition(":")
            try:
                value: Any = import_module(module)
                for part in filter(None, attribute.split(".")):
                    value = getattr(value, part)
            except Exception as error:
                origin = f" of the package {entry.package}" if entry.package else ""
                what = f"{self.kind} {name!r}{origin} cannot be imported from {entry.reference}"
                why = f"({type(error).__name__}: {error}); repair, update or remove the package"
                raise ConfigError(f"the {what} {why}") from error
            entry = self._entries[name]  # the module may have registered the name itself
            if entry.value is None:
                entry = self._entries[name] = _Entry(value, entry.reference, entry.package)
        return entry.value  # type: ignore[no-any-return]  # its kind is not checked


def _unwrapped(value: Any) -> Any:
    """The function or class behind ``functools.partial``."""
    while isinstance(value, partial):
        value = value.func
    return value


def _may_replace(held: _Entry, entry: _Entry) -> bool:
    """True of an entry point whose module registers it too, and of a notebook cell run again."""
    if held.reference and held.value is None:
        return held.module == entry.module
    names = [getattr(each.value, "__qualname__", None) for each in (held, entry)]
    return entry.module == held.module == "__main__" and names[0] == names[1] is not None


divergences: Registry[Callable[..., Any]] = Registry("divergence", home="qmargin.losses")
"""Functions that return a ``qmargin.Divergence``, by the name that recipes give it."""

margins: Registry[Callable[..., Any]] = Registry("margin", home="qmargin.losses")
"""Functions that return a ``qmargin.Margin``, by the name that recipes give it."""

references: Registry[Callable[..., Any]] = Registry("reference", home="qmargin.losses")
"""Functions that return a ``qmargin.Reference``, by the name that recipes give it.

One with a parameter ``counts`` gets the training samples of each class.
"""

backbones: Registry[Callable[..., Any]] = Registry("backbone", home="qmargin.models")
"""Functions of ``embedding_dim`` and options that return a module: inputs to ``[B, D]``."""

readers: Registry[Callable[..., Any]] = Registry("reader", home="qmargin.data.readers")
"""Classes derived from ``qmargin.data.reader.Reader``: formats of training data."""

datasets: Registry[Callable[..., Any]] = Registry("dataset")
"""Kinds of training data: functions that return a ``qmargin.data.samples.Dataset``.

Of ``path``, ``num_classes``, ``seed``, ``index_dir`` and ``data.options`` they get those that are
their parameters.
"""

protocols: Registry[Callable[..., Any]] = Registry("protocol", home="qmargin.evaluation.protocols")
"""Kinds of ``qmargin evaluate``: dataclasses whose fields are options, with a method ``run``.

``run(options, *, command, progress)`` gets ``EvaluationOptions`` and returns a ``Result``.
"""

metrics: Registry[Callable[..., Any]] = Registry("metric", home="qmargin.metrics")
"""Functions of genuine and impostor scores that return a number, or several by name."""

recipes: Registry[Callable[[], Any]] = Registry("recipe", home="qmargin.recipes")
"""Functions without arguments that return a ``Recipe``."""

experiments: Registry[Callable[..., Any]] = Registry("experiment", home="qmargin.experiments.named")
"""Functions of a kind of device and a path of data that return an ``Experiment``."""

datasets.register("synthetic", "qmargin.data.synthetic:SyntheticIdentities")
datasets.register("strokes", "qmargin.data.strokes:StrokeIdentities")
datasets.register("people", "qmargin.data.people:People")
datasets.register("voices", "qmargin.data.voices:open_voices")
datasets.register("images", "qmargin.training.build:open_images")
datasets.register("audio", "qmargin.data.speech:open_speech")

register_divergence = divergences.register
register_margin = margins.register
register_reference = references.register
register_backbone = backbones.register
register_reader = readers.register
register_dataset = datasets.register
register_protocol = protocols.register
register_metric = metrics.register
register_recipe = recipes.register
register_experiment = experiments.register

KINDS: dict[str, Registry[Any]] = {
    name: found for name, found in list(globals().items()) if isinstance(found, Registry)
}
"""All registries by the names that entry points and ``qmargin list`` give them."""
