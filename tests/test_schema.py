"""Dataclasses from and to plain data: records of programs, settings of people, YAML."""

import json
import math
import time
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.errors import ConfigError, DataError
from qmargin.schema import (
    MAX_ALIASES,
    MAX_BYTES,
    NEW,
    Options,
    check_fields,
    check_options,
    check_range,
    decode,
    decode_settings,
    dump_yaml,
    encode,
    flatten,
    load_yaml,
    read_text,
    set_value,
)


@dataclass(frozen=True)
class Inner:
    rate: float
    kind: Literal["step", "cosine"] = "step"

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "rate", above=0, at_most=1)


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    options: Options = field(default_factory=dict)
    by_name: dict[str, Inner] = field(default_factory=dict)
    is_on: bool = False
    limit: float = 1.0
    mixed: float | str = 0.0
    new: str = field(default="", metadata=NEW)


FULL = Outer("x", Inner(0.5), (1, 2), (0.0, 2.0), {"a": (1, "b")}, {"i": Inner(1.0)}, new="y")


@pytest.mark.parametrize("part", [Outer("x"), FULL])
@pytest.mark.parametrize("read", [decode, decode_settings])
def test_what_is_encoded_comes_back(part, read):
    plain = json.loads(json.dumps(encode(part, "part"), allow_nan=False))
    assert read(Outer, plain, "part") == part
    assert ("new" in plain) == bool(part.new)
    assert decode_settings(Outer, load_yaml(dump_yaml(plain))) == part


def test_records_hold_infinities_and_later_keys_and_settings_do_not():
    plain = {"name": "x", "limit": "-inf", "later": 1}
    assert decode(Outer, plain, "r").limit == -math.inf
    assert encode(Outer("x", limit=-math.inf, mixed=math.nan), "r")["limit"] == "-inf"
    assert encode(Outer("x", mixed=math.nan), "r")["mixed"] is None
    for limit in ("-inf", math.inf):
        with pytest.raises(ConfigError, match="limit"):
            decode_settings(Outer, {"name": "x", "limit": limit})
    with pytest.raises(DataError, match=r"part\.name"):
        encode(Outer(object()), "part")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"name": 3}, "name is 3"),
        ({"inner": []}, "inner is .*"),
        ({"inner": {}}, "inner.rate is missing"),
        ({"inner": {"rate": True}}, "inner.rate is True"),
        ({"inner": {"rate": "fast"}}, "inner.rate is 'fast'"),
        ({"inner": {"rate": 1, "kind": "cosin"}}, "inner.kind .*did you mean 'cosine'"),
        ({"inner": {"rate": 1, "kind": 1}}, "inner.kind is 1"),
        ({"sizes": [1, 2.5]}, r"sizes\[1\] is 2.5, not an integer"),
        ({"sizes": 7}, "sizes is 7, not a list"),
        ({"pair": [1]}, "pair is .*, not a list of 2"),
        ({"options": {"a": {}}}, "options.a is {}"),
        ({"options": {"a b": 1}}, "options has the key 'a b'"),
        ({"by_name": {"i": {"rate": None}}}, "by_name.i.rate is None"),
        ({"is_on": 1}, "is_on is 1, not true or false"),
        ({"mixed": [1]}, "mixed is .*, not a number or a text"),
    ],
)
def test_errors_name_the_path(change, path):
    for read, error, where in ((decode, DataError, "file:"), (decode_settings, ConfigError, "f")):
        with pytest.raises(error, match=path):
            read(Outer, {"name": "x", **change}, where)
        for value, named in ((3, f"{where}.* is 3"), ({}, "name is missing")):
            with pytest.raises(error, match=named):
                read(Outer, value, where)


def test_settings_suggest_and_check_and_bound():
    with pytest.raises(ConfigError, match=r"inner\.rte is unknown, did you mean 'rate'"):
        decode_settings(Outer, {"name": "x", "inner": {"rte": 1}})
    with pytest.raises(ConfigError, match=r"inner\.rate is 2; .* at most 1"):
        decode_settings(Outer, {"name": "x", "inner": {"rate": 2}})
    for huge in (2**63, -(10**400)):
        with pytest.raises(ConfigError, match=r"sizes\[0\] is too large") as refused:
            decode_settings(Outer, {"name": "x", "sizes": [huge]})
        assert len(str(refused.value)) < 300
        with pytest.raises(ConfigError, match=r"options\.a is too large"):
            decode_settings(Outer, {"name": "x", "options": {"a": huge}})
    assert decode_settings(Outer, {"name": "1e3", "limit": "1e3"}).limit == 1000.0
    assert decode_settings(Outer, {"name": "x", "mixed": "1e3"}).mixed == "1e3"


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("limit=1e-2", "limit", 0.01),
        ("name=1e3", "name", "1e3"),
        ("inner.rate=0.25", "inner", Inner(0.25)),
        ("inner=null", "inner", None),
        ("sizes=[7, 8]", "sizes", (7, 8)),
        ("options.a=1e-1", "options", {"a": 0.1}),
        ("options=null", "options", {}),
        ("by_name.i.rate=1", "by_name", {"i": Inner(1.0)}),
    ],
)
def test_settings_have_the_type_of_their_field(setting, key, value):
    plain = encode(Outer("x"), "part")
    set_value(plain, Outer, *setting.split("="))
    assert getattr(decode_settings(Outer, plain), key) == value


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("nam", "nam is unknown, did you mean 'name'"),
        ("inner.rat", r"inner\.rat is unknown, did you mean 'rate'"),
        ("rate", "did you mean inner.rate"),
        ("name.x", "name is a value"),
        ("inner", "inner is a section"),
    ],
)
def test_settings_of_unknown_keys_are_refused(key, message):
    with pytest.raises(ConfigError, match=message):
        set_value(encode(FULL, "part"), Outer, key, "3")


def test_dotted_keys_leave_unused_new_fields_out():
    assert flatten(Outer("x"))["inner"] is None and "new" not in flatten(Outer("x"))
    assert flatten(FULL)["inner.rate"] == 0.5 and flatten(FULL)["options.a"] == (1, "b")


def test_options_are_those_of_a_function():
    def taker(path: str, size: int, *, flip: float = 0.5) -> None: ...

    check_options({"size": 3}, taker, "options", given=("path",))
    check_options({"anything": 1}, lambda **options: None, "options")
    for options, named in (
        ({"size": 3, "flipp": 1}, r"options\.flipp is unknown, did you mean 'flip'"),
        ({}, r"options\.size is missing"),
        ({"size": 3, "path": 1}, r"options\.path is unknown"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_options(options, taker, "options", given=("path",))


texts = st.one_of(st.booleans(), st.floats(allow_nan=False, allow_infinity=False), st.text())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), st.one_of(texts, st.lists(texts)), max_size=4))
def test_yaml_comes_back(values):
    assert load_yaml(dump_yaml(values)) == values


@pytest.mark.parametrize(
    "text",
    [
        "name: [",
        "seed: 1\nseed: 2",
        "a: {b: 1, b: 2}",
        "name: !!python/object/apply:os.getcwd []",
        "a: 1\n---\nb: 2",
        'a: "\x00"',
        "a: &a [x]\nb: [" + ", ".join(["*a"] * (MAX_ALIASES + 1)) + "]",
        "[" * 5000,
        "#" * (MAX_BYTES + 1),
    ],
    ids=lambda text: text[:12],
)
def test_yaml_that_is_costly_or_ambiguous_is_refused(text):
    with pytest.raises(ConfigError):
        load_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{number}: 1\n" for number in range(90_000)),
        "a: {b: [" + "1," * 450_000 + "]}",
        "name: " + "x" * 990_000,
        "seed: " + "1:" * 490_000 + "1",  # YAML 1.1 reads digits to the base of 60
        "seed: 0x" + "f" * 990_000,
        "- " * 490_000,
        "{a: " * 240_000,
    ],
    ids=lambda text: text[:12],
)
def test_huge_yaml_is_refused_within_a_second(text, tmp_path):
    path = tmp_path / "huge.yaml"
    path.write_text(text, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(ConfigError):
        load_yaml(text)
    with pytest.raises(ConfigError, match=r"huge\.yaml"):
        read_text(path)
    with pytest.raises(ConfigError):
        decode_settings(Outer, load_yaml(text[: MAX_BYTES - 1]))  # as large as is allowed
    assert time.process_time() - began < 1.0
