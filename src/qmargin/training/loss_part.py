"""The loss of a recipe: a registered divergence, margins, reference measures, and a scale.

It can be written in any of these forms::

    loss: {preset: arcface, margin: 0.3}
    loss: {divergence: {alpha: 1.25}, margin: [{prior: 0.1}, {angular: 0.05}], scale: 16}
    loss: {divergence: jensen_shannon, margin: {angular: {margin: 0.5, gradient: exact}}, scale: 30}
    loss: {alpha: 1.25, margin: {prior: {per_class: margins.npy}}, scale: 32}
    loss: {preset: q_margin, reference: [{class_prior: {strength: 0.5}}, {quality: 0.33}]}
    loss: {alpha: 1.25, margin_kind: prior, margin: 0.2, scale: 32, options: {}}

All are converted to the last one, with ``divergence``, ``divergence_options``, ``plus`` and
``reference`` where needed: the first margin's main number is ``margin``, the divergence's is
``alpha``, and these are what schedules, sweeps and ``--set loss.margin=0.3`` change. References are
settings by name, as in ``--set loss.reference.quality.strength=0.2``.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, DataError, MarginWarning
from qmargin.files import open_regular, sha256_of
from qmargin.losses import presets
from qmargin.losses.divergences import Divergence
from qmargin.losses.margin_loss import MarginLoss
from qmargin.losses.margins import Margin, ModuleSumMargin, PerClass, main_number
from qmargin.losses.reach import reach
from qmargin.losses.references import Reference, parts_of
from qmargin.registry import Registry, divergences, margins, references
from qmargin.schema import NEW, NUMBER, Options, check_fields, check_known, check_options, short

PRESETS = tuple(
    name
    for name, value in vars(presets).items()
    if inspect.isfunction(value) and value.__module__ == presets.__name__ and name[0] != "_"
)
PER_CLASS = "per_class"
"""Option of any margin: factors of its main number, one per class, in a list or a file."""
MAX_CLASS_BYTES = 1 << 30
COUNTS = "counts"
"""Parameter of a reference that gets the training samples of each class, from the data."""


class LossSettings(NamedTuple):
    """The numbers of a loss that schedules may change."""

    alpha: float | None  # None where the divergence has no number
    margin: float
    scale: float
    strength: float | None = None  # of the first reference; None without one

    def as_record(self) -> dict[str, float | None]:
        """Values for the journal, without a missing strength."""
        values = self._asdict()
        if self.strength is None:
            del values["strength"]
        return values


@dataclass(frozen=True)
class LossPart:
    """A divergence, a margin, a scale and optional references, all written out.

    A published loss is ``LossPart.from_preset(name)``; files and ``--set`` take ``loss.preset``
    for it. It stores the numbers, so that a record stays valid when a preset changes.
    """

    SHORTHANDS: ClassVar[tuple[str, ...]] = ("preset",)

    alpha: float | None  # main number of the divergence; None where it has none
    margin_kind: str  # a registered name, such as "prior" (Q-Margin), "cosine" or "angular"
    margin: float  # the margin's main number, in its own unit: of MagFace the lower margin
    scale: float
    options: Options = field(default_factory=dict, hash=False)  # further settings of the margin
    divergence: str = field(default="alpha", metadata=NEW)
    divergence_options: Options = field(default_factory=dict, hash=False, metadata=NEW)
    # margins that are added to the first, as settings by name
    plus: dict[str, Options] = field(default_factory=dict, hash=False, metadata=NEW)
    # reference measures that are added up, as settings by name
    reference: dict[str, Options] = field(default_factory=dict, hash=False, metadata=NEW)

    def __post_init__(self) -> None:
        check_fields(self)
        check_registered(self.divergence, divergences, "divergence")
        check_registered(self.margin_kind, margins, "margin_kind")
        maker = divergences.get(self.divergence)
        main = main_number(maker)
        if main is None and self.alpha is not None:
            raise ConfigError(f"alpha is {self.alpha:g} and {self.divergence} takes no number")
        if main is not None and self.alpha is None and _default_of(maker, main) is None:
            raise ConfigError(f"alpha is missing; give the {main} of {self.divergence}")
        given = () if main is None else (main,)
        check_options(self.divergence_options, maker, "divergence_options", given=given)
        main = _number_of(self.margin_kind)
        if main in self.options:
            raise ConfigError(f"options.{main} is the margin's main number; set margin instead")
        if self.margin_kind in self.plus:
            raise ConfigError(f"plus.{self.margin_kind} is the first margin; use options")
        for kind, options in {self.margin_kind: self.options, **self.plus}.items():
            is_first = kind == self.margin_kind
            check_registered(kind, margins, "plus")
            named = {name: value for name, value in options.items() if name != PER_CLASS}
            where = "options" if is_first else f"plus.{kind}"
            check_options(named, margins.get(kind), where, given=(main,) if is_first else ())
        for kind, options in self.reference.items():
            check_registered(kind, references, "reference")
            check_options(options, references.get(kind), f"reference.{kind}", given=(COUNTS,))
            if _strength_of(kind) not in options:  # a reference that is not written is in no hash
                self.reference[kind] = {**_default_strength(kind), **options}
        stand_ins = {  # for files, which are read when a run is built
            kind: torch.ones(1) if isinstance(source, str) else read_class_values(source)
            for kind, source in self.class_sources.items()
        }
        with warnings.catch_warnings():  # a run warns when it builds the loss
            warnings.simplefilter("ignore", MarginWarning)
            self.build(values=stand_ins, counts=torch.ones(1))

    @classmethod
    def from_preset(cls, preset: str, **changes: Any) -> LossPart:
        """Build from a published loss, with some of its numbers changed."""
        for name in changes:
            check_known(name, [entry.name for entry in fields(cls)], "a setting of the loss")
        return cls(**cls.expand({"preset": preset, **changes}))

    @classmethod
    def expand(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fields from any form of a loss."""
        found = dict(values)
        if "reference" in found:
            found["reference"] = _read_references(found["reference"] or ())
        divergence, margin = found.get("divergence"), found.get("margin")
        if "divergence" in found and ("alpha" not in found or isinstance(divergence, Mapping)):
            found |= _read_divergence(found)
        # a name, and not the text of a number as YAML 1.1 has 1e-1
        is_name = isinstance(margin, str) and NUMBER.fullmatch(margin) is None
        has_kind = "margin_kind" in found or "preset" in found
        if isinstance(margin, Mapping | list | tuple) or (is_name and not has_kind):
            found |= _read_margins(found)
        preset = found.pop("preset", None)
        return found if preset is None else {**_preset_values(preset, found), **found}

    @property
    def settings(self) -> LossSettings:
        """The numbers, where no schedule changes them."""
        return LossSettings(self.alpha, self.margin, self.scale, self.strength)

    @property
    def strength(self) -> float | None:
        """Main number of the first reference; None without one."""
        for kind, options in self.reference.items():
            number = options[_strength_of(kind)]
            return float(number) if isinstance(number, int | float) else None
        return None

    def with_strength(self, strength: float) -> LossPart:
        """Return a copy with a different main number of the first reference."""
        kind = next(iter(self.reference))
        first = {kind: {**self.reference[kind], _strength_of(kind): strength}}
        return replace(self, reference={**self.reference, **first})

    @property
    def order(self) -> float:
        """Alpha of an alpha-divergence; any other divergence is a ``ConfigError``."""
        if self.divergence != "alpha" or self.alpha is None:
            raise ConfigError(f"loss.divergence is {self.divergence!r}, which has no alpha")
        return self.alpha

    @property
    def effective_margin(self) -> float | None:
        """Cosine gap that the margin adds; None where that is not one number."""
        if self.divergence != "alpha" or self.class_sources:
            return None
        return self.build_margin().effective(self.order, self.scale)

    @property
    def reach(self) -> float | None:
        """Cosine gap of zero loss; None where that is not one number."""
        if self.divergence != "alpha" or self.class_sources:
            return None
        return reach(self.order, self.scale, self.build_margin())

    @property
    def margins(self) -> tuple[tuple[str, float | None], ...]:
        """Name and main number of every margin, the first one first."""
        others = [(kind, options.get(_number_of(kind))) for kind, options in self.plus.items()]
        numbers = [(kind, value if isinstance(value, float) else None) for kind, value in others]
        return ((self.margin_kind, self.margin), *numbers)

    @property
    def class_sources(self) -> dict[str, str | tuple[Any, ...]]:
        """Per-class numbers by margin: the path of a file, or the numbers themselves."""
        options = {self.margin_kind: self.options, **self.plus}
        return {
            kind: settings[PER_CLASS]  # type: ignore[misc]
            for kind, settings in options.items()
            if PER_CLASS in settings
        }

    def build(
        self,
        *,
        seed: int | None = None,
        values: Mapping[str, Tensor] | None = None,
        counts: Tensor | None = None,
    ) -> MarginLoss:
        """The loss; see ``build_margin`` and ``build_reference``."""
        parts = self.build_divergence(self.alpha), self.build_margin(seed=seed, values=values)
        return MarginLoss(*parts, scale=self.scale, reference=self.build_reference(counts))

    @property
    def needs_counts(self) -> bool:
        """Whether a reference needs the training samples of each class."""
        makers = map(references.get, self.reference)
        return any(COUNTS in inspect.signature(maker).parameters for maker in makers)

    def build_reference(self, counts: Tensor | None = None) -> Reference | None:
        """The reference, or the sum of references; None without one.

        ``counts`` ``[k]`` are the training samples of each class.
        """
        built: Reference | None = None
        for kind, options in self.reference.items():
            maker, chosen = references.get(kind), dict[str, Any](options)
            if COUNTS in inspect.signature(maker).parameters:
                if counts is None:
                    raise ConfigError(
                        f"loss.reference.{kind} needs the training samples of each class; give the "
                        "data, or pass counts"
                    )
                chosen[COUNTS] = counts
            made = maker(**chosen)
            built = made if built is None else built + made
        return built

    def build_divergence(self, number: float | None) -> Divergence:
        """The divergence with this main number, or its own default."""
        maker = divergences.get(self.divergence)
        main = main_number(maker)
        numbers = {} if main is None or number is None else {main: number}
        made: Divergence = maker(**numbers, **self.divergence_options)
        return made

    def build_margin(
        self,
        number: float | None = None,  # instead of the part's own
        *,
        seed: int | None = None,  # of a margin that draws, unless its options have one
        values: Mapping[str, Tensor] | None = None,  # per class, by margin; None to read them
        keep: Margin | None = None,  # margin whose stateful parts are reused
    ) -> Margin:
        """The margin, or the sum of margins."""
        if values is None:
            values = {kind: read_class_values(one) for kind, one in self.class_sources.items()}
        number = self.margin if number is None else number
        first = {_number_of(self.margin_kind): number, **self.options}
        built: Any = None
        for kind, options in {self.margin_kind: first, **self.plus}.items():
            if keep is not None and is_stateful(kind):
                made = keep.geometric if isinstance(keep, ModuleSumMargin) else keep
            else:
                maker, main, chosen = margins.get(kind), _number_of(kind), dict[str, Any](options)
                if chosen.pop(PER_CLASS, None) is not None:
                    chosen[main] = PerClass(values[kind] * chosen.get(main, 1.0))
                if seed is not None and "seed" in inspect.signature(maker).parameters:
                    chosen.setdefault("seed", seed)
                made = maker(**chosen)
            built = made if built is None else built + made
        result: Margin = built
        return result


class ScheduledLoss:
    """The loss of a run on its device: per-class numbers are read once, state is kept."""

    def __init__(
        self,
        part: LossPart,
        *,
        seed: int | None = None,  # of the draws of margins
        num_classes: int | None = None,  # of the data, to compare per-class numbers with
        device: torch.device | str = "cpu",
        counts: Tensor | None = None,  # training samples of each class, for references
    ) -> None:
        self.part, self._settings = part, part.settings
        self._values: dict[str, Tensor] = {}
        self.sha256s: dict[str, str] = {}  # of the files that were read
        for kind, source in part.class_sources.items():
            values = read_class_values(source)
            if num_classes is not None and len(values) != num_classes:
                found = f"{len(values):,} numbers for {num_classes:,} classes"
                raise ConfigError(f"loss.options.{PER_CLASS} of {kind} has {found}")
            if isinstance(source, str):
                self.sha256s[kind] = sha256_of(Path(source).expanduser())
            self._values[kind] = values.to(device)
        self.loss = part.build(seed=seed, values=self._values, counts=counts)
        if self.loss.reference is not None:
            self.loss.reference.to(device)

    def at(self, settings: LossSettings) -> MarginLoss:
        """The loss with the numbers of a step; the same object while they do not change."""
        if settings == self._settings:
            return self.loss
        old = self.loss
        margin = self.part.build_margin(settings.margin, values=self._values, keep=old.margin)
        with warnings.catch_warnings():  # the final numbers were checked when it was built
            warnings.simplefilter("ignore", MarginWarning)
            divergence = self.part.build_divergence(settings.alpha)
            reference = old.reference
            if reference is not None and settings.strength is not None:
                name = _strength_of(next(iter(self.part.reference)))
                setattr(parts_of(reference)[0], name, settings.strength)
            made = MarginLoss(divergence, margin, scale=settings.scale, reference=reference)
            self.loss = made.train(old.training)
        self._settings = settings
        return self.loss


def read_class_values(source: str | tuple[Any, ...]) -> Tensor:
    """Finite numbers, one per class, from a list, a ``.npy`` file or a text file of lines."""
    where = f"loss.options.{PER_CLASS}"
    try:
        numbers = _read_file(Path(source).expanduser()) if isinstance(source, str) else source
        values = torch.as_tensor(numbers, dtype=torch.float32)
    except (OSError, ValueError, TypeError, DataError) as error:
        raise ConfigError(f"{where} is {short(source)}, which cannot be read ({error})") from error
    if values.ndim != 1 or not len(values) or not bool(values.isfinite().all()):
        raise ConfigError(f"{where} is {short(source)}, not a list of finite numbers")
    return values


def _read_file(path: Path) -> Any:
    with open_regular(path) as file:
        if path.stat().st_size > MAX_CLASS_BYTES:
            raise DataError(f"the file has more than {MAX_CLASS_BYTES:,} bytes")
        if path.suffix == ".npy":  # mapped: a header cannot claim more than the file has
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False), dtype=np.float32)
        return [float(line) for line in file.read().decode("ascii").split()]


def _read_divergence(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a divergence: ``"name"``, ``{"name": number}`` or ``{"name": {settings}}``."""
    name, options = _one_entry(values["divergence"], divergences, "divergence")
    main, number = main_number(divergences.get(name)), values.get("alpha")
    given = options.pop(main, None) if main is not None else None
    if given is not None and number is not None:
        raise ConfigError(f"alpha is {number} and divergence.{name} {given}; keep one")
    alpha = number if given is None else given
    return {"divergence": name, "alpha": alpha, "divergence_options": options}


def _read_margins(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of one margin or a list of them, each as ``_read_divergence`` has a divergence."""
    given = values["margin"]
    for name in ("margin_kind", "options", "plus"):
        if values.get(name):
            raise ConfigError(f"{name} is given and margin has its own settings; keep one of them")
    found: dict[str, dict[str, Any]] = {}
    for entry in given if isinstance(given, list | tuple) else [given]:
        kind, options = _one_entry(entry, margins, "margin")
        if kind in found:
            raise ConfigError(f"margin has {kind} twice; keep one of them")
        main = _number_of(kind)
        default = 1.0 if PER_CLASS in options else _default_of(margins.get(kind), main)
        found[kind] = {} if default is None else {main: default}
        found[kind] |= options
    if not found:
        raise ConfigError("margin is an empty list; give at least one margin")
    (first, options), *others = found.items()
    main = _number_of(first)
    if main not in options:
        raise ConfigError(f"margin.{first} has no {main}; give a number")
    result: dict[str, Any] = {"margin_kind": first, "margin": options.pop(main)}
    result |= {"options": options} if options else {}
    return result | ({"plus": dict(others)} if others else {})


def _read_references(given: Any) -> dict[str, dict[str, Any]]:
    """Settings by name from one reference, a list of them, or the output of this function."""
    if isinstance(given, Mapping):
        given = [{name: options} for name, options in given.items()]
    found: dict[str, dict[str, Any]] = {}
    for entry in given if isinstance(given, list | tuple) else [given]:
        kind, options = _one_entry(entry, references, "reference")
        if kind in found:
            raise ConfigError(f"reference has {kind} twice; keep one of them")
        found[kind] = options
    return found


def _one_entry(entry: Any, registry: Registry[Any], where: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of ``"name"``, ``{"name": number}`` or ``{"name": {settings}}``."""
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(f"{where} is {short(entry)}, not a name and settings as {{prior: 0.2}}")
    ((name, options),) = entry.items()
    check_registered(str(name), registry, where)
    if options is None or isinstance(options, Mapping):
        return name, dict(options or {})
    main = main_number(registry.get(name))
    if main is None:
        raise ConfigError(f"{where}.{name} is {short(options)} and takes no number")
    return name, {main: options}


def _preset_values(preset: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    check_known(str(preset), PRESETS, "preset")
    if "margin_kind" in changes:
        raise ConfigError(f"preset {preset!r} already has a margin; leave margin_kind out")
    loss: MarginLoss = getattr(presets, preset)()
    kind = next(name for name in margins.names() if margins.get(name) is type(loss.margin))
    number = getattr(loss.margin, _number_of(kind))
    # presets are written with alpha in decimals, and alpha_value went through alpha - 1
    alpha = getattr(loss.divergence, "alpha", loss.alpha_value)
    return {"alpha": alpha, "margin_kind": kind, "margin": number, "scale": loss.scale}


def check_registered(name: str, registry: Registry[Any], what: str) -> None:
    """Refuse an unknown name, suggesting the nearest one, or a name that cannot be used."""
    if name not in registry:
        check_known(name, registry.names(), what)
    try:
        registry.get(name)
    except ConfigError as error:
        raise ConfigError(f"{what} is {name!r}; {error}") from error


def _number_of(kind: str) -> str:
    """Name of a margin's main parameter."""
    name = main_number(margins.get(kind))
    if name is None:
        raise ConfigError(f"margin_kind is {kind!r}, which takes no number; give it a parameter")
    return name


def _strength_of(kind: str) -> str:
    """Name of a reference's main parameter."""
    maker = references.get(kind)
    name = main_number(maker)
    if name is None or name == COUNTS or name not in inspect.signature(maker).parameters:
        raise ConfigError(f"reference is {kind!r}, which takes no number; give it a parameter")
    return name


def _default_strength(kind: str) -> Options:
    """The default of a reference's main parameter, by its name."""
    name = _strength_of(kind)
    number = _default_of(references.get(kind), name)
    if number is None:
        raise ConfigError(f"reference.{kind} has no {name}; give a number")
    return {name: number}


def is_stateful(kind: str) -> bool:
    """Whether a margin keeps statistics or draws, which a new object would lose."""
    maker = margins.get(kind)
    return isinstance(maker, type) and issubclass(maker, nn.Module)


def _default_of(maker: Callable[..., Any], name: str) -> float | None:
    """Default of a parameter; None where there is none that is finite."""
    found = inspect.signature(maker).parameters.get(name)
    default = None if found is None or found.default is found.empty else found.default
    return default if default is None or math.isfinite(default) else None
