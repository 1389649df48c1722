"""``Experiment``: losses to compare, on which data, by which recipe and measure; read from YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from qmargin.errors import ConfigError
from qmargin.experiments import space
from qmargin.experiments.space import PRESET, REACH, Axis, Point, value_text
from qmargin.experiments.worlds import Drawn, Made, Stored, World
from qmargin.recipes import get_recipe, list_recipes
from qmargin.registry import divergences, margins
from qmargin.report.systems import Primary
from qmargin.schema import (
    check_fields,
    check_known,
    decode_settings,
    load_yaml,
    read_text,
    set_value,
    short,
    split_setting,
    suggest,
)
from qmargin.training.loss_part import PRESETS
from qmargin.training.recipe import DataPart, Recipe
from qmargin.training.recipe_files import apply_settings, read_recipe

Kind = TypeVar("Kind")
Method = Literal["grid", "random", "optuna"]
SEARCH_SEED = 1000  # the first seed of a search; tested runs have others
SHORT_KEYS = {"alpha": "loss.alpha", "scale": "loss.scale", "margin": "loss.margin"}
LOSSES = {  # arms by these names start from a loss
    "entmax": "entmax_face",
    "sparsemax": "sparsemax_face",
    **{name: name for name in PRESETS},
}
TITLES = {
    "arcface": "ArcFace",
    "cosface": "CosFace",
    "entmax": "EntMax",
    "sparsemax": "SparseMax",
    "q_margin": "Q-Margin",
    "sampled": "ArcFace, 10 % of classes",
    "adaface": "AdaFace",
    "magface": "MagFace",
}
_PARTS = ("margin", "loss.margin", "loss.divergence")
FOCUS, RIVALS = "q_margin", ("cosface", "arcface")  # the default comparison
HEADLINE = 1e-4  # FAR of that comparison
_SECTIONS = (
    *("name", "title", "question", "expected", "recipe", "set", "data", "arms", "seeds"),
    *("protocol", "search", "primary"),
)


@dataclass(frozen=True)
class Arm:
    """A loss, or any other variant of the recipe, and the settings that it may choose from.

    Args:
        title: Display name.
        settings: Settings of all its runs, such as ``("loss.preset=cosface",)``.
        axes: Lists and ranges of values to search.
        points: Combinations to try instead of all combinations of ``axes``.
        like: Arm whose chosen settings this one uses.
        seeds: Seeds of its tested runs; None for those of the experiment.
        left_out: Combinations of ``axes`` whose reach no margin can give; set by the experiment.
    """

    title: str
    settings: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    points: tuple[Point, ...] = ()
    like: str | None = None
    seeds: tuple[int, ...] | None = None
    left_out: tuple[Point, ...] = ()

    @property
    def candidates(self) -> tuple[Point, ...]:
        """Points of a grid."""
        return self.points or tuple(space.grid(self.axes))

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose from."""
        return not self.axes and len(self.points) <= 1


@dataclass(frozen=True)
class Search:
    """How arms choose their settings on validation identities.

    Args:
        method: ``"grid"`` for every combination, ``"random"``, or ``"optuna"`` (TPE).
        measure: What is optimised: ``"eer"``, or a TAR such as ``"tar@0.001"``. None for the
            strictest TAR that the validation pairs measure well.
        seeds: Seeds of the runs of each combination; their mean counts.
        num_points: Combinations that a random or Optuna search tries for each arm.
        settings: Settings of the recipe during the search, such as ``("run.epochs=2",)``.
        finalists: Combinations of each arm that are trained by the full recipe before one is
            chosen; 0 to choose at once.
        finalist_seeds: Seeds of the runs of finalists; empty for ``seeds``.
        prune: Stop runs that are behind, by Optuna's median rule.
    """

    method: Method = "grid"
    measure: str | None = None
    seeds: tuple[int, ...] = (SEARCH_SEED,)
    num_points: int = 40
    settings: tuple[str, ...] = ()
    finalists: int = 0
    finalist_seeds: tuple[int, ...] = ()
    prune: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in (("num_points", 1), ("finalists", 0)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        for seeds in (self.seeds, self.finalist_seeds):
            _check_seeds(seeds)
        if not self.seeds:
            raise ConfigError("seeds is empty; give at least 1 seed")


@dataclass(frozen=True)
class TestProtocol:
    """How a trained model is measured on test identities.

    Args:
        kind: ``"all-pairs"`` of the test data, or a list of ``"trials"``.
        fars: Rates at which TARs are measured; None for those of 1e-2 to 1e-5 that the pairs allow.
        views: Quarter turns of a picture over which scores are averaged.
        normalise: Also measure scores normalised by the prototypes (AS-norm).
        num_replicates: Replicates of the bootstrap over identities.
        every_epochs: Also measure TAR over training time, every N epochs.
    """

    __test__ = False  # not for pytest

    kind: Literal["all-pairs", "trials"] = "all-pairs"
    fars: tuple[float, ...] | None = None
    views: int = 1
    normalise: bool = False
    num_replicates: int = 1000
    every_epochs: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every_epochs is not None and self.every_epochs < 1:
            raise ConfigError(f"every_epochs is {self.every_epochs}; it must be at least 1")
        if self.every_epochs is not None and self.kind != "all-pairs":
            raise ConfigError(f"every_epochs measures all pairs, and kind is {self.kind!r}")
        for far in self.fars or ():
            if not 0.0 < far < 1.0:
                raise ConfigError(f"far has {far:g}; give rates between 0 and 1")
        if not 1 <= self.views <= 4:
            raise ConfigError(f"views is {self.views}; there are 1 to 4 quarter turns")


@dataclass(frozen=True)
class Experiment:
    """Comparison of several losses: one recipe, the same training and test identities.

    Args:
        name: Name on the command line and in records.
        recipe: Everything except the loss; an arm changes it.
        arms: Arms by their names, which name folders.
        world: Which identities train, validate and test.
        title: Title of the report.
        protocol: How models are measured.
        search: How arms choose their settings; arms without a choice need none.
        seeds: Seeds of the tested runs, unless an arm has its own; empty for a search only.
        primary: The comparison that is fixed before the test; None for Q-Margin minus CosFace, and
            minus ArcFace, at FAR 1e-4, or for the first arm minus the others.
        question: The research question, for its page.
        expected: The result expected before any run, for its page.
        details: More facts for the record of the experiment.
    """

    name: str
    recipe: Recipe
    arms: Mapping[str, Arm] = field(hash=False)
    world: World = field(default_factory=Made)
    title: str = ""
    protocol: TestProtocol = field(default_factory=TestProtocol)
    search: Search = field(default_factory=Search)
    seeds: tuple[int, ...] = (0, 1, 2)
    primary: Primary | None = None
    question: str = ""
    expected: str = ""
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError("arms is empty; name at least one loss to train")
        _check_seeds(self.seeds)
        for name in self.arms:
            if not name or name[0] in "-." or name != _file_name(name):
                raise ConfigError(f"an arm is named {name!r}; use letters, digits and _-+.")
            try:
                self._leave_out_unreachable(name)
                self._check_arm(name)
            except ConfigError as error:
                raise ConfigError(f"arms.{name}: {error}") from error
        self._check_primary()

    @property
    def comparison(self) -> Primary | None:
        """The primary comparison, named or usual; None with a single arm."""
        if self.primary is not None or len(self.arms) < 2:
            return self.primary
        focus = FOCUS if FOCUS in self.arms else next(iter(self.arms))
        others = tuple(name for name in self.arms if name != focus)
        usual = tuple(name for name in RIVALS if name in others) if focus == FOCUS else ()
        return Primary(focus, usual or others, HEADLINE)

    @property
    def searched(self) -> dict[str, Arm]:
        """Arms that search settings; without a test, all arms with their own settings."""
        return {
            name: arm
            for name, arm in self.arms.items()
            if arm.like is None and (not self.seeds or not arm.is_fixed)
        }

    def arm_recipe(self, name: str) -> Recipe:
        """The recipe with the fixed settings of an arm."""
        made = apply_settings(self.recipe, self.arms[name].settings)
        return replace(made, name=f"{self.name}-{name}")

    def run_recipe(self, name: str, point: Point, *, seed: int, is_search: bool) -> Recipe:
        """The recipe of a run, as the data adapt it."""
        made = space.with_point(self.arm_recipe(name), point, seed=seed)
        return self.world.adapt(made, is_search=is_search)

    def with_arms(self, names: Sequence[str]) -> Experiment:
        """The experiment with some of its arms."""
        for name in names:
            check_known(name, self.arms, "an arm")
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"arms are {', '.join(names) or 'none'}; name each one once")
        primary = self.primary
        if primary is not None:  # the part of it that is left
            rivals = tuple(name for name in primary.rivals if name in names)
            has_focus = primary.focus in names and bool(rivals)
            primary = replace(primary, rivals=rivals) if has_focus else None
        return replace(self, arms={name: self.arms[name] for name in names}, primary=primary)

    def _check_primary(self) -> None:
        primary = self.primary
        if primary is None:
            return
        compared = (primary.focus, *primary.rivals)
        for name in compared:
            check_known(name, self.arms, "an arm")
        if not primary.rivals or len(set(compared)) < len(compared):
            raise ConfigError(
                f"primary compares {primary.focus} with {', '.join(primary.rivals) or 'nothing'}; "
                "give a focus and other arms as rivals, each once"
            )
        if not 0.0 < primary.far < 1.0:
            raise ConfigError(f"primary.far is {primary.far:g}; give a rate between 0 and 1")
        fars = self.protocol.fars
        if fars is not None and primary.far not in fars:
            raise ConfigError(
                f"primary.far is {primary.far:g} and protocol.far has "
                f"{', '.join(f'{far:g}' for far in fars)}; add it there"
            )

    def with_seeds(self, seeds: Sequence[int]) -> Experiment:
        """Return the experiment with the same seeds for all arms."""
        arms = {name: replace(arm, seeds=None) for name, arm in self.arms.items()}
        return replace(self, arms=arms, seeds=tuple(seeds))

    def with_settings(self, settings: Sequence[str]) -> Experiment:
        """Return it with settings of recipe, data or protocol, such as ``data.test=DIR``."""
        records: dict[str, Any] = {"data": self.world, "protocol": self.protocol}
        keys = {section: _keys_of(type(record)) for section, record in records.items()}
        given: dict[str, dict[str, Any]] = {section: {} for section in records}
        of_recipe = []
        for setting in settings:
            key, text = split_setting(setting)
            section, _, name = key.partition(".")
            if name in keys.get(section, {}):
                set_value(given[section], type(records[section]), keys[section][name], text)
                continue
            if section in keys and name:
                others = [one.name for one in fields(DataPart)] if section == "data" else []
                known = [*keys[section], *others]
                check_known(name.partition(".")[0], known, f"a key of {section}")
            of_recipe.append(setting)
        if isinstance(path := given["data"].get("validation"), str):
            given["data"]["validation"] = [f"data.path={path}"]
        if not isinstance(fars := given["protocol"].get("fars", []), list):
            given["protocol"]["fars"] = [fars]
        for section, changed in given.items():
            kind, record = type(records[section]), records[section]
            whole = {name: getattr(record, name) for name in keys[section].values()} | changed
            made = decode_settings(kind, whole, section)
            changes = {name: getattr(made, name) for name in changed}
            records[section] = replace(record, **changes)
        return replace(
            self,
            recipe=apply_settings(self.recipe, of_recipe),
            world=records["data"],
            protocol=_sorted(records["protocol"]),
        )

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Seeds of the runs of an arm that are tested."""
        own = self.arms[name].seeds
        return self.seeds if own is None or not self.seeds else own

    def _leave_out_unreachable(self, name: str) -> None:
        """List the points of a grid if no margin gives the reach of some of them."""
        arm = self.arms[name]
        if self.search.method != "grid" or arm.points or REACH not in {a.key for a in arm.axes}:
            return
        recipe = self.arm_recipe(name)
        space.check_axes(recipe, arm.axes)
        kept, left_out = space.reachable(recipe, space.grid(arm.axes))
        if left_out:
            found = replace(arm, points=tuple(kept), left_out=tuple(left_out))
            object.__setattr__(self, "arms", {**self.arms, name: found})

    def _check_arm(self, name: str) -> None:
        arm, recipe = self.arms[name], self.arm_recipe(name)
        _check_seeds(arm.seeds or ())
        if arm.seeds == ():
            raise ConfigError("seeds is empty; give at least 1 seed, or leave the loss out")
        if arm.like is not None:
            if arm.like not in self.arms:
                raise ConfigError(f"it uses the settings that {arm.like} chose; add {arm.like}")
            if arm.axes or arm.points or self.arms[arm.like].like is not None:
                raise ConfigError(f"it uses the settings of {arm.like} and cannot have axes")
        else:
            space.check_axes(recipe, arm.axes)
            if self.search.method == "grid" or arm.points:
                space.check_points(recipe, arm.candidates)
        # an arm named like a margin or divergence must have it
        searched = {axis.key for axis in arm.axes} | {key for point in arm.points for key in point}
        kinds = [kind for kind, _ in recipe.loss.margins]
        for registry, used, key in (
            (margins, kinds, "loss.margin_kind"),
            (divergences, [recipe.loss.divergence], "loss.divergence"),
        ):
            if name in registry and name not in used and not searched & {key, PRESET}:
                part = registry.kind
                raise ConfigError(
                    f"it has no {part} of this name; add loss.{part}: {{{name}: ...}}"
                )


def _check_seeds(seeds: Sequence[int]) -> None:
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise ConfigError(f"seeds are {list(seeds)}; give each seed once, none below 0")


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "_-.+" else "_" for sign in name)


def sweep_experiment(
    recipe: Recipe,
    axes: Sequence[str],
    *,
    settings: Sequence[str] = (),
    seeds: int = 1,
    method: Method = "grid",
    num_points: int | None = None,
    measure: str | None = None,
    prune: bool = False,
    validation: Sequence[str] = (),
) -> Experiment:
    """A search over settings of one recipe, on its own data.

    ``axes`` are such as ``"loss.scale=8,16"``, ``settings`` those of every run, and ``validation``
    settings of the data that have validation identities; for the others see ``Search``.
    """
    found = tuple(space.parse_axis(text) for text in axes)
    recipe = apply_settings(recipe, settings)
    space.check_axes(recipe, found, settings)
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; it must be at least 1")
    if not found and (seeds == 1 or method != "grid"):
        raise ConfigError("there is nothing to sweep; give --grid KEY=VALUE,VALUE or --seeds")
    if method == "grid" and num_points is not None:
        raise ConfigError(f"--trials is {num_points}; a grid has none, choose a different --search")
    is_stored = recipe.data.is_stored
    if is_stored and not validation:
        raise ConfigError(f"{recipe.data.path} is for training; give --validation PATH of others")
    if validation and not is_stored:
        raise ConfigError(f"{recipe.data.kind} data is generated; leave --validation out")
    return Experiment(
        f"sweep of {recipe.name}",
        recipe,
        {_file_name(recipe.name): Arm(recipe.name, axes=found)},
        Stored(validation=tuple(validation)) if is_stored else Made(),
        recipe.name,
        search=Search(
            method,
            measure,
            tuple(range(recipe.seed, recipe.seed + seeds)),
            40 if num_points is None else num_points,
            prune=prune,
        ),
        seeds=(),
    )


_SHOWN: dict[type, dict[str, str]] = {  # keys that are not the names of fields
    Drawn: {"path": "pictures"},
    Stored: {"train_path": "train", "test_path": "test"},
    TestProtocol: {"fars": "far", "num_replicates": "replicates"},
}

# -- YAML -----------------------------------------------------------------------------------------


def read_experiment(path: str | Path) -> Experiment:
    """Read an experiment from a YAML file; its relative paths start from the file's folder."""
    text = read_text(path)
    try:
        return from_mapping(_mapping(load_yaml(text), "the experiment"), Path(path).parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def from_mapping(content: Mapping[str, Any], folder: Path = Path()) -> Experiment:
    """Build an experiment from the keys and values of a YAML file.

    Args:
        content: See ``docs/guide/comparing-losses.md``.
        folder: Where relative paths start.

    Examples:
        >>> experiment = from_mapping({"recipe": "debug", "arms": {"cosface": {"scale": [8, 16]}}})
        >>> experiment.arms["cosface"].axes
        (Values(key='loss.scale', texts=('8', '16')),)
    """
    for key in content:
        check_known(str(key), _SECTIONS, "a key of the experiment")
    for key in ("recipe", "arms"):
        if key not in content:
            raise ConfigError(f"{key} is missing; an experiment needs recipe and arms")
    name = str(content.get("name", "experiment"))
    world = _world(content.get("data"), folder)
    arms = _mapping(content["arms"], "arms")
    return Experiment(
        name=name,
        title=str(content.get("title", name)),
        question=str(content.get("question", "")),
        expected=str(content.get("expected", "")),
        recipe=apply_settings(
            find_recipe(str(content["recipe"]), folder), _settings(content.get("set", {}), "set")
        ),
        arms={str(arm): make_arm(str(arm), values or {}) for arm, values in arms.items()},
        world=world,
        protocol=_protocol(content.get("protocol", {}), world),
        search=_search(content.get("search", {})),
        seeds=_seeds(content.get("seeds", 3), "seeds"),
        primary=_primary(content.get("primary")),
    )


def find_recipe(name: str, folder: Path = Path()) -> Recipe:
    """A recipe by its name, by the first part of it, such as ``faces_r18``, or from a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return read_recipe(folder / name)
    known = list_recipes()
    family = [one for one in known if one.startswith(f"{name}_")]
    return get_recipe(family[0] if name not in known and family else name)


def _mapping(values: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {short(values)}; give keys and values")
    return values


def _flat(values: Any, where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for key, value in _mapping(values, where).items():
        is_part = f"{prefix}{key}" in _PARTS  # {prior: 0.2} is one value
        if isinstance(value, Mapping) and value and not is_part:
            yield from _flat(value, f"{where}.{key}", f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _settings(values: Any, where: str) -> list[str]:
    return [f"{key}={value_text(value)}" for key, value in _flat(values, where)]


def make_arm(name: str, values: Mapping[str, Any]) -> Arm:
    """An arm from its name and settings: a value is fixed, a list or a range is searched.

    An arm named like a loss starts from it; any other arm names whole keys to change, because a
    misspelt loss would otherwise be the recipe's loss with a different number.

    Examples:
        >>> arm = make_arm("q_margin", {"alpha": 1.25, "scale": "8:64:log"})
        >>> arm.settings, arm.axes
        (('loss.preset=q_margin', 'loss.alpha=1.25'), (Range(key='loss.scale', low=8.0, high=64.0, \
is_log=True),))
    """
    where = f"arms.{name}"
    rest = {str(key): value for key, value in _mapping(values, where).items()}
    title, like = str(rest.pop("title", TITLES.get(name, name))), rest.pop("like", None)
    seeds = _seeds(rest.pop("seeds"), f"{where}.seeds") if "seeds" in rest else None
    known = (
        *(*SHORT_KEYS, *space.DECIDES, "title", "like", "seeds"),
        *(one.name for one in fields(Recipe)),
    )
    for key in rest:
        if key.partition(".")[0] not in known:
            raise ConfigError(f"{where}: {key} is unknown, {suggest(key, known)}")
    given = [(SHORT_KEYS.get(key, key), value) for key, value in _flat(rest, where)]
    axes = tuple(
        space.make_axis(key, value if is_searched(value) else [value])
        for key, value in given
        if is_searched(value) or key in space.DECIDES
    )
    points: tuple[Point, ...] = ()
    if not any(is_searched(value) for _, value in given):  # a single reach is not searched
        points, axes = tuple(point for point in space.grid(axes) if point), ()
    settings = [
        f"{key}={value_text(value)}"
        for key, value in given
        if not is_searched(value) and key not in space.DECIDES
    ]
    if name in LOSSES and not any(key == PRESET for key, _ in given):
        settings.insert(0, f"{PRESET}={LOSSES[name]}")
    elif like is None and not _says_loss(rest):
        raise ConfigError(
            f"{where}: no loss has this name, {suggest(name, LOSSES)}; other arms give whole keys, "
            "as in loss.preset or loss.scale"
        )
    like = None if like is None else str(like)
    return Arm(title, tuple(settings), axes, points, like, seeds)


def _says_loss(settings: Mapping[str, Any]) -> bool:
    """Whether settings are clear without the name of a loss."""
    if any(key.partition(".")[0] == "loss" for key in settings):
        return True
    margin = settings.get("margin")
    if isinstance(margin, Mapping) or (isinstance(margin, list) and not is_searched(margin)):
        return True  # it includes the name of its kind
    return bool(settings) and not set(settings) & set(SHORT_KEYS)


def is_searched(value: Any) -> bool:
    """Whether a value of an arm is a list of values to try, or a range."""
    if isinstance(value, list):
        return not any(isinstance(entry, Mapping) for entry in value)
    return isinstance(value, str) and value[:1].isdigit() and ":" in value


def _seeds(value: Any, name: str, *, first: int = 0) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return tuple(range(first, first + value))
    if isinstance(value, list) and value and all(type(seed) is int for seed in value):
        return tuple(value)
    raise ConfigError(f"{name} is {short(value)}; give how many, at least 1, or a list of seeds")


def _keys_of(kind: type, shown: Mapping[str, str] | None = None) -> dict[str, str]:
    """Fields of a record by the names that users see."""
    if shown is None:
        shown = next((_SHOWN[one] for one in kind.__mro__ if one in _SHOWN), {})
    return {
        shown.get(one.name, one.name): one.name for one in fields(cast(Any, kind)) if one.compare
    }


def _section(
    kind: type[Kind], values: Mapping[str, Any], where: str, shown: Mapping[str, str]
) -> Kind:
    """A record from a section, in which some fields have other names."""
    names = _keys_of(kind, shown)
    for key in values:
        check_known(key, names, f"a key of {where}")
    made: Kind = decode_settings(kind, {names[key]: value for key, value in values.items()}, where)
    return made


def _world(content: Any, folder: Path) -> World:
    given = {} if content is None else _mapping(content, "data")
    values = {str(key): value for key, value in given.items()}
    for key in ("pictures", "train", "test", "trials"):
        if key in values:
            values[key] = str(folder / str(values[key]))
    if isinstance(values.get("validation"), str):
        values["validation"] = [f"data.path={folder / values['validation']}"]
    if "pictures" in values:
        return _section(Drawn, values, "data", _SHOWN[Drawn])
    if "train" in values or "test" in values:
        return _section(Stored, values, "data", _SHOWN[Stored])
    return _section(Made, values, "data", {})


def _protocol(content: Any, world: World) -> TestProtocol:
    trials = getattr(world, "trials", None)
    values = {
        "kind": "all-pairs" if trials is None else "trials",
        **{str(key): value for key, value in _mapping(content, "protocol").items()},
    }
    if "far" in values and not isinstance(values["far"], list):
        values["far"] = [values["far"]]
    made = _section(TestProtocol, values, "protocol", _SHOWN[TestProtocol])
    if (made.kind == "trials") != (trials is not None):
        raise ConfigError(f"protocol.kind is {made.kind!r} and data.trials is {trials}; give both")
    return _sorted(made)


def _sorted(protocol: TestProtocol) -> TestProtocol:
    fars = protocol.fars
    return protocol if fars is None else replace(protocol, fars=tuple(sorted(fars)[::-1]))


def _primary(content: Any) -> Primary | None:
    if content is None:
        return None
    values = {"far": HEADLINE, **_mapping(content, "primary")}
    if isinstance(values.get("rivals"), str):
        values["rivals"] = [values["rivals"]]
    return _section(Primary, values, "primary", {})


def _search(content: Any) -> Search:
    given = {"method": content} if isinstance(content, str) else _mapping(content, "search")
    values = {str(key): value for key, value in given.items()}
    if "set" in values:
        values["set"] = _settings(values["set"], "search.set")
    for key in ("seeds", "finalist_seeds"):
        if key in values:
            values[key] = _seeds(values[key], f"search.{key}", first=SEARCH_SEED)
    return _section(Search, values, "search", {"settings": "set", "num_points": "points"})
