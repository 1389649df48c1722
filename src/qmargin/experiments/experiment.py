"""``Experiment``: losses to compare, on which data, by which recipe and measure; read from YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

from qmargin.errors import ConfigError
from qmargin.experiments.space import (
    DECIDES,
    PRESET,
    Axis,
    Point,
    check_axes,
    check_points,
    grid,
    make_axis,
    parse_axis,
    value_text,
    with_point,
)
from qmargin.experiments.worlds import Drawn, Made, Stored, World
from qmargin.recipes import get_recipe, list_recipes
from qmargin.registry import divergences, margins
from qmargin.schema import check_known, load_yaml, read_text, suggest
from qmargin.training.loss_part import PRESETS
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings, read_recipe

SEARCH_SEED = 1000  # the first of a search; runs that are tested have others
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
}
_PARTS = ("margin", "loss.margin", "loss.divergence")
METHODS = ("grid", "random", "optuna")


@dataclass(frozen=True)
class Arm:
    """A loss, or any other variant of the recipe, and the settings that it may choose from.

    Args:
        title: Display name.
        settings: That all its runs have, such as ``("loss.preset=cosface",)``.
        axes: Lists and ranges of values that are searched.
        points: Combinations to try instead of all combinations of ``axes``.
        like: Arm whose chosen settings this one takes.
    """

    title: str
    settings: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    points: tuple[Point, ...] = ()
    like: str | None = None

    @property
    def candidates(self) -> tuple[Point, ...]:
        """Points of a grid."""
        return self.points or tuple(grid(self.axes))

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose from."""
        return not self.axes and len(self.points) <= 1


@dataclass(frozen=True)
class Search:
    """How arms choose their settings on validation identities.

    Args:
        method: ``"grid"`` for every combination, ``"random"``, or ``"optuna"`` (TPE).
        measure: That is optimised: ``"eer"``, or a TAR such as ``"tar@0.001"``. None for the
            strictest TAR that the validation pairs measure well.
        seeds: Of the runs of each combination; their mean counts.
        num_points: Combinations that a random or Optuna search tries for each arm.
        settings: Of the recipe during the search, such as ``("run.epochs=2",)``.
        finalists: Combinations of each arm that are trained by the recipe as it is before one is
            chosen; 0 to choose at once.
        prune: Stop runs that are behind, by Optuna's median rule.
    """

    method: Literal["grid", "random", "optuna"] = "grid"
    measure: str | None = None
    seeds: tuple[int, ...] = (SEARCH_SEED,)
    num_points: int = 40
    settings: tuple[str, ...] = ()
    finalists: int = 0
    prune: bool = False

    def __post_init__(self) -> None:
        check_known(self.method, METHODS, "search.method")
        if self.num_points < 1:
            raise ConfigError(f"search.num_points is {self.num_points}; it must be at least 1")
        if self.finalists < 0:
            raise ConfigError(f"search.finalists is {self.finalists}; it must be at least 0")
        _check_seeds(self.seeds, "search.seeds")
        if not self.seeds:
            raise ConfigError("search.seeds is empty; give at least 1 seed")


@dataclass(frozen=True)
class TestProtocol:
    """How a trained model is measured on test identities.

    Args:
        kind: ``"all-pairs"`` of the test data, or a list of ``"trials"``.
        fars: Rates at which TARs are measured; None for those of 1e-2 to 1e-5 that the pairs allow.
        views: Quarter turns of a picture over which scores are averaged.
        normalise: Also measure scores normalised by the prototypes (AS-norm).
        num_replicates: Of the bootstrap over identities.
    """

    __test__ = False  # not for pytest

    kind: Literal["all-pairs", "trials"] = "all-pairs"
    fars: tuple[float, ...] | None = None
    views: int = 1
    normalise: bool = False
    num_replicates: int = 1000

    def __post_init__(self) -> None:
        check_known(self.kind, ("all-pairs", "trials"), "protocol.kind")
        for far in self.fars or ():
            if not 0.0 < far < 1.0:
                raise ConfigError(f"protocol.far has {far:g}; give rates between 0 and 1")
        if not 1 <= self.views <= 4:
            raise ConfigError(f"protocol.views is {self.views}; there are 1 to 4 quarter turns")


@dataclass(frozen=True)
class Experiment:
    """Arms that are trained by one recipe on the same identities and tested on others.

    Args:
        name: On the command line and in records.
        recipe: Everything but the loss; an arm changes it.
        arms: By their names in folders.
        world: Which identities train, validate and test.
        title: Of the report.
        protocol: How models are measured.
        search: How arms choose their settings; arms without a choice need none.
        seeds: Of the runs that are tested; empty for a search alone.
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
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError("arms is empty; name at least one loss to train")
        _check_seeds(self.seeds, "seeds")
        for name, arm in self.arms.items():
            _check_name(name)
            try:
                self._check_arm(arm)
                _check_part(name, self.arm_recipe(name), arm)
            except ConfigError as error:
                raise ConfigError(f"arms.{name}: {error}") from error

    @property
    def searched(self) -> dict[str, Arm]:
        """Arms that choose their settings; in a search alone, all that have their own."""
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
        """The recipe of a run, as the data adapt it; of a search's first round, see ``Search``."""
        made = with_point(self.arm_recipe(name), point, seed=seed)
        return self.world.adapt(made, is_search=is_search)

    def with_arms(self, names: Sequence[str]) -> Experiment:
        """The experiment with some of its arms.

        Raises:
            ConfigError: An arm is unknown, given twice, or lacks the one whose settings it takes.
        """
        for name in names:
            check_known(name, self.arms, "an arm")
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"arms are {', '.join(names) or 'none'}; name each one once")
        return replace(self, arms={name: self.arms[name] for name in names})

    def _check_arm(self, arm: Arm) -> None:
        recipe = apply_settings(self.recipe, arm.settings)
        if arm.like is not None:
            if arm.like not in self.arms:
                raise ConfigError(f"it takes the settings that {arm.like} chose; add {arm.like}")
            if arm.axes or arm.points or self.arms[arm.like].like is not None:
                raise ConfigError(f"it takes the settings of {arm.like} and can choose none")
            return
        if self.search.method == "grid" or arm.points:
            if arm.axes:
                check_axes(recipe, arm.axes)
            check_points(recipe, arm.candidates)
        else:
            check_axes(recipe, arm.axes)


def sweep_experiment(
    recipe: Recipe,
    axes: Sequence[str],
    *,
    settings: Sequence[str] = (),
    seeds: int = 1,
    method: str = "grid",
    num_points: int | None = None,
    measure: str | None = None,
    prune: bool = False,
    validation: Sequence[str] = (),
) -> Experiment:
    """A search over settings of one recipe, on its own data.

    Args:
        recipe: That every run begins with.
        axes: Such as ``"loss.scale=8,16"``, see ``parse_axis``.
        settings: Of every run.
        seeds: Runs of each combination: the recipe's seed and those after it.
        method: See ``Search``.
        num_points: Combinations of a random or Optuna search; a grid visits all.
        measure: See ``Search``.
        prune: See ``Search``.
        validation: Settings of the data that have validation identities; made data needs none.
    """
    found = tuple(parse_axis(text) for text in axes)
    recipe = apply_settings(recipe, settings)
    check_axes(recipe, found, settings)
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; it must be at least 1")
    if not found and (seeds == 1 or method != "grid"):
        raise ConfigError("there is nothing to sweep; give --grid KEY=VALUE,VALUE or --seeds")
    if method == "grid" and num_points is not None:
        raise ConfigError(
            f"--trials is {num_points} and a grid visits every combination; choose another "
            "--search, or leave --trials out"
        )
    world: World = Made()
    if recipe.data.is_stored:
        if not validation:
            raise ConfigError(
                f"the {recipe.data.kind} at {recipe.data.path} are for training; name those of "
                "other identities with --validation PATH"
            )
        world = Stored(validation=tuple(validation))
    elif validation:
        raise ConfigError(f"{recipe.data.kind} data is made; leave --validation out")
    search = Search(
        method=method,  # type: ignore[arg-type]
        measure=measure,
        seeds=tuple(range(recipe.seed, recipe.seed + seeds)),
        num_points=40 if num_points is None else num_points,
        prune=prune,
    )
    arm = Arm(recipe.name, axes=found)
    name = "".join(sign if sign.isalnum() or sign in "_-.+" else "_" for sign in recipe.name)
    return Experiment(
        f"sweep of {recipe.name}", recipe, {name: arm}, world, recipe.name, search=search, seeds=()
    )


def _check_seeds(seeds: Sequence[int], name: str) -> None:
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise ConfigError(f"{name} are {list(seeds)}; give each seed once, none below 0")


def _check_name(name: str) -> None:
    if not name or not all(sign.isalnum() or sign in "_-.+" for sign in name) or name[0] in "-.":
        raise ConfigError(
            f"an arm is named {name!r}; use letters, digits, '_', '-', '+' and '.', as in a file "
            "name"
        )


def read_experiment(path: str | Path) -> Experiment:
    """Read an experiment from a YAML file; its relative paths start from the file's folder.

    Raises:
        ConfigError: With the key, its value and what is known there.
    """
    text = read_text(path)
    try:
        content = load_yaml(text)
        if not isinstance(content, Mapping):
            raise ConfigError(f"the experiment is {short(content)}; give keys and values")
        return from_mapping(content, Path(path).parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def from_mapping(content: Mapping[str, Any], folder: Path = Path()) -> Experiment:
    """An experiment from keys and values as a YAML file has them.

    Args:
        content: See ``docs/guide/comparing-losses.md``.
        folder: Where relative paths start.

    Examples:
        >>> experiment = from_mapping({"recipe": "debug", "arms": {"cosface": {"scale": [8, 16]}}})
        >>> experiment.arms["cosface"].axes
        (Values(key='loss.scale', texts=('8', '16')),)
    """
    known = ("name", "title", "recipe", "set", "data", "arms", "seeds", "protocol", "search")
    for key in content:
        check_known(str(key), known, "a key of the experiment")
    for key in ("recipe", "arms"):
        if key not in content:
            raise ConfigError(f"{key} is missing; an experiment needs recipe and arms")
    name = str(content.get("name", "experiment"))
    settings = [f"{key}={value_text(value)}" for key, value in _flat(content.get("set", {}), "set")]
    world = _world(content.get("data"), folder)
    return Experiment(
        name=name,
        title=str(content.get("title", name)),
        recipe=apply_settings(find_recipe(str(content["recipe"]), folder), settings),
        arms=_arms(content["arms"]),
        world=world,
        protocol=_protocol(content.get("protocol", {}), world),
        search=_search(content.get("search", {})),
        seeds=_seeds(content.get("seeds", 3), "seeds"),
    )


def find_recipe(name: str, folder: Path = Path()) -> Recipe:
    """A recipe by its name, by the first part of it, or from a YAML file.

    Examples:
        >>> find_recipe("faces_r18").name
        'faces_r18_arcface'
    """
    if name.endswith((".yaml", ".yml")):
        return read_recipe(folder / name)
    known = list_recipes()
    family = [one for one in known if one.startswith(f"{name}_")]
    return get_recipe(family[0] if name not in known and family else name)


def _flat(values: Any, where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {short(values)}; give keys and values")
    for key, value in values.items():
        is_part = f"{prefix}{key}" in _PARTS  # {prior: 0.2} is one value
        if isinstance(value, Mapping) and value and not is_part:
            yield from _flat(value, f"{where}.{key}", f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _arms(content: Any) -> dict[str, Arm]:
    if not isinstance(content, Mapping):
        raise ConfigError(f"arms is {short(content)}; give names, each with its settings")
    return {str(name): make_arm(str(name), values or {}) for name, values in content.items()}


def _check_part(name: str, recipe: Recipe, arm: Arm) -> None:
    """Refuse an arm that is named like a margin or divergence and has another one."""
    searched = {axis.key for axis in arm.axes} | {key for point in arm.points for key in point}
    kinds = [kind for kind, _ in recipe.loss.margins]
    for registry, used, key in (
        (margins, kinds, "loss.margin_kind"),
        (divergences, [recipe.loss.divergence], "loss.divergence"),
    ):
        if name in registry and name not in used and not searched & {key, PRESET}:
            part = registry.kind
            raise ConfigError(
                f"it has the name of a {part}, and its {part} is {', '.join(used)}; add "
                f"loss.{part}: {{{name}: ...}}, or choose another name"
            )


def make_arm(name: str, values: Mapping[str, Any]) -> Arm:
    """An arm from its name and settings: a value is fixed, a list or a range is searched.

    An arm that is named like a loss starts from it; any other one says what it changes, by whole
    keys: a misspelt loss would otherwise be the recipe's loss with another number.

    Examples:
        >>> arm = make_arm("q_margin", {"alpha": 1.25, "scale": "8:64:log"})
        >>> arm.settings, arm.axes
        (('loss.preset=q_margin', 'loss.alpha=1.25'), (Range(key='loss.scale', low=8.0, high=64.0, \
is_log=True),))
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"arms.{name} is {short(values)}; give settings, as in {{scale: 16}}")
    rest = {str(key): value for key, value in values.items()}
    title, like = str(rest.pop("title", TITLES.get(name, name))), rest.pop("like", None)
    known = (*SHORT_KEYS, *DECIDES, "title", "like", *(one.name for one in fields(Recipe)))
    for key in rest:
        if key.partition(".")[0] not in known:
            raise ConfigError(f"arms.{name}: {key} is unknown, {suggest(key, known)}")
    given = [(SHORT_KEYS.get(key, key), value) for key, value in _flat(rest, f"arms.{name}")]
    fixed = [(key, value) for key, value in given if not is_searched(value)]
    axes = tuple(make_axis(key, value) for key, value in given if is_searched(value))
    settings = [f"{key}={value_text(value)}" for key, value in fixed]
    if name in LOSSES and not any(key == "loss.preset" for key, _ in given):
        settings.insert(0, f"loss.preset={LOSSES[name]}")
    elif like is None and not _says_loss(rest):
        raise ConfigError(
            f"arms.{name}: no loss has this name, {suggest(name, LOSSES)}; other arms give whole "
            "keys, as in loss.preset or loss.scale"
        )
    return Arm(title, tuple(settings), axes, like=None if like is None else str(like))


def _says_loss(settings: Mapping[str, Any]) -> bool:
    """Whether settings are clear without the name of a loss."""
    if any(key.partition(".")[0] == "loss" for key in settings):
        return True
    margin = settings.get("margin")
    if isinstance(margin, Mapping) or (isinstance(margin, list) and not is_searched(margin)):
        return True  # it names its kind
    return bool(settings) and not set(settings) & set(SHORT_KEYS)


def is_searched(value: Any) -> bool:
    """Whether a value of an arm is a list of values to try, or a range.

    Examples:
        >>> is_searched([16, 32]), is_searched("8:64"), is_searched(16), is_searched([{"prior": 1}])
        (True, True, False, False)
    """
    if isinstance(value, list):
        return not any(isinstance(entry, Mapping) for entry in value)
    return isinstance(value, str) and value[:1].isdigit() and ":" in value


def _seeds(value: Any, name: str) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return tuple(range(value))
    if isinstance(value, list) and value and all(type(seed) is int for seed in value):
        return tuple(value)
    raise ConfigError(f"{name} is {short(value)}; give how many, at least 1, or a list of seeds")


def _section(kind: type, values: Any, where: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of a record from a section of a file, whose keys may have other names."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {short(values)}; give keys and values")
    known = [names.get(entry.name, entry.name) for entry in fields(kind) if entry.init]
    for key in values:
        check_known(str(key), known, f"a key of {where}")
    back = {shown: name for name, shown in names.items()}
    return {back.get(str(key), str(key)): value for key, value in values.items()}


def _world(values: Any, folder: Path) -> World:
    if values is None:
        return Made()
    if not isinstance(values, Mapping):
        raise ConfigError(f"data is {short(values)}; give keys and values, as in {{train: DIR}}")

    def placed(value: Any) -> Any:
        return str(folder / str(value))

    if "pictures" in values:
        given = _section(Drawn, values, "data", {"path": "pictures"})
        return Drawn(**{**given, "path": placed(given["path"])})
    if "train" not in values and "test" not in values:
        return Made(**_section(Made, values, "data", {}))
    given = _section(Stored, values, "data", {"train_path": "train", "test_path": "test"})
    for key in ("train_path", "test_path", "trials"):
        if key in given:
            given[key] = placed(given[key])
    share = given.get("validation")
    if isinstance(share, str):
        given["validation"] = (f"data.path={placed(share)}",)
    elif share is not None and (isinstance(share, bool) or not isinstance(share, float)):
        raise ConfigError(
            f"data.validation is {short(share)}; give a share, such as 0.1, or a path"
        )
    return Stored(**given)


def _protocol(values: Any, world: World) -> TestProtocol:
    given = _section(
        TestProtocol, values, "protocol", {"fars": "far", "num_replicates": "replicates"}
    )
    trials = getattr(world, "trials", None)
    given.setdefault("kind", "all-pairs" if trials is None else "trials")
    if (given["kind"] == "trials") != (trials is not None):
        raise ConfigError(
            f"protocol.kind is {given['kind']!r} and data.trials is {trials}; a list of trials "
            "needs both"
        )
    if "fars" in given:
        fars = given["fars"] if isinstance(given["fars"], list) else [given["fars"]]
        try:
            given["fars"] = tuple(sorted(map(float, fars), reverse=True))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"protocol.far is {short(fars)}; give rates, as in 1e-3") from error
    return TestProtocol(**given)


def _search(values: Any) -> Search:
    if isinstance(values, str):
        values = {"method": values}
    given = _section(Search, values, "search", {"settings": "set", "num_points": "points"})
    if "settings" in given:
        pairs = _flat(given["settings"], "search.set")
        given["settings"] = tuple(f"{key}={value_text(value)}" for key, value in pairs)
    if "seeds" in given:
        seeds = _seeds(given["seeds"], "search.seeds")
        is_count = isinstance(given["seeds"], int)
        given["seeds"] = tuple(SEARCH_SEED + seed for seed in seeds) if is_count else seeds
    return Search(**given)
