"""The public names and their signatures are a promise; ``make api`` rewrites the snapshot.

The snapshot shows names, kinds and defaults of parameters, not annotations: those are checked by
mypy and print differently from one Python to the next.
"""

import inspect
from operator import attrgetter
from pathlib import Path

import qmargin

SNAPSHOT = Path(__file__).with_name("public_api.txt")
HEADER = (
    "# Names and signatures of qmargin.__all__ and qmargin.metrics.__all__.\n"
    "# Rewrite with `make api`, then read the diff.\n"
)
INTERNAL = (  # what the parts of a head call on each other; docs/reference/heads.md omits them too
    "kernels may_have_moved next_seed alpha_minus_one chunk_dtype list_capacity note_current "
    "screen_dtype_for"
)
PROMISES = [
    *sorted(qmargin.__all__),
    *sorted(f"metrics.{name}" for name in qmargin.metrics.__all__),
]


def signature_of(value: object) -> str:
    parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def public_members(cls: type) -> dict[str, object]:
    """Members that our own classes define; what torch or Exception add is not our promise."""
    members = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("qmargin"):
            members.update(
                {name: member for name, member in vars(base).items() if not name.startswith("_")}
            )
    return members


def describe_class(name: str, cls: type) -> list[str]:
    if issubclass(cls, Exception):
        bases = [base.__name__ for base in cls.__bases__]
        return [f"class {name}({', '.join(bases)})"]
    is_protocol = getattr(cls, "_is_protocol", False)
    lines = [f"protocol {name}" if is_protocol else f"class {name}{signature_of(cls)}"]
    hidden = INTERNAL.split() if cls is qmargin.MarginClassifier else ()
    for member, value in sorted(public_members(cls).items()):
        if member in hidden:
            continue
        if isinstance(value, classmethod | staticmethod):
            kind = type(value).__name__
            lines.append(f"    {kind} {member}{signature_of(getattr(cls, member))}")
        elif isinstance(value, property):
            lines.append(f"    property {member}")
        elif inspect.isfunction(value):
            lines.append(f"    {member}{signature_of(value)}")
    return lines


def describe(name: str) -> list[str]:
    value = attrgetter(name)(qmargin)
    if isinstance(value, type):
        return describe_class(name, value)
    if callable(value):
        return [f"{name}{signature_of(value)}"]
    return [f"{name}: {type(value).__name__}"]


def snapshot() -> str:
    blocks = ["\n".join(describe(name)) for name in PROMISES]
    return HEADER + "\n" + "\n".join(blocks) + "\n"


def test_the_public_api_is_the_promised_one():
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8"), "see the diff after `make api`"


def test_public_names_are_unique_and_have_docstrings():
    assert len(set(PROMISES)) == len(PROMISES)
    assert [name for name in PROMISES if not attrgetter(name)(qmargin).__doc__] == []


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
