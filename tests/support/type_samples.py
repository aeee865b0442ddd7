"""Types and their values: drawn at random, a sample of every sort, or strategies for Hypothesis.

>>> import random
>>> rng = random.Random(1)
>>> value = random_value(rng, random_type(rng, 5))
>>> given = sample("row", rng)
>>> given.shown(given.column("plain")) == texts(given.values)
True
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import math
import random
import struct
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from arrow_layouts import laid_out
from hypothesis import strategies as st

from statebackend import types as t
from statebackend.keys import KeyEncoder, key_encoder
from statebackend.state.value_columns import from_arrow, has_objects, to_arrow, to_values
from statebackend.types import of
from statebackend.types.serializers import serializer_for

# --- at random: extremes, NaN, every form that a type takes ---

UTC = datetime.timezone.utc

#: The types without parts, all of them types of keys, and values at their ends and in between.
LEAVES: dict[str, list[Any]] = {
    "bigint": [0, 1, -1, 2**63 - 1, -(2**63), 2**30, -(2**30), 2**60],
    "int": [0, 2**31 - 1, -(2**31)],
    "smallint": [0, 2**15 - 1, -(2**15)],
    "tinyint": [0, 127, -128],
    "boolean": [True, False],
    "double": [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7e308, 7, -(2**53)],
    "float": [0.0, -0.0, 0.1, math.inf, math.nan, 3.4e38],
    "string": ["", "a", "h\u00e9llo", "\U0001f600", "x" * 700, "\x00"],
    "binary": [b"", b"\x00\xff", b"y" * 700],
    "date": [datetime.date(1970, 1, 1), datetime.date.min, datetime.date.max, datetime.date(2000, 2, 29)],
    "timestamp": [
        datetime.datetime(1970, 1, 1, tzinfo=UTC),
        datetime.datetime(1, 1, 1, tzinfo=UTC),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime.datetime(
            2024, 7, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))
        ),
        datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
    ],
    "timestamp_ntz": [datetime.datetime(1970, 1, 1), datetime.datetime.min, datetime.datetime.max],
    "decimal(18,2)": [decimal.Decimal(t) for t in ("0", "-0.01", "9" * 16 + ".99", "1E+3", "1.500", "-0")],
    "decimal(5,5)": [decimal.Decimal(t) for t in ("0.00001", "-0.99999", "0.1")],
    "decimal(38,10)": [decimal.Decimal(t) for t in ("0", "-" + "9" * 28 + "." + "9" * 10, "1E-10", "1E+27")],
    "decimal(38,0)": [decimal.Decimal(t) for t in ("1" * 38, "-" + "9" * 19, "10000000000000000000")],
}


class Pair(NamedTuple):
    a: int
    b: str | None


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float | None


#: Objects that most types refuse.
WRONG: list[Any] = [
    None, True, 1, 2**63, -(2**63) - 1, 2**53 + 1, 1.5, 1e300, float("nan"), "x", "\ud800", b"x", bytearray(b"x"),
    (), (1,), (1, 2, 3), [], [1, "a"], {}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {1: 2, "b": 3}, {"a": None, None: 1},
    object(), int, range(3),
    datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, tzinfo=UTC),
    decimal.Decimal("NaN"), decimal.Decimal("-Infinity"), decimal.Decimal("0.001"), decimal.Decimal("1E+999999"),
    decimal.Decimal("1E-999999"), decimal.Decimal("1" * 39),
    np.int64(3), np.float32(0.5), np.bool_(True), np.str_("q"), np.arange(2),
    Pair(1, "b"), Point(1, 2.0), Point(1, None), Pair(None, None),  # type: ignore[arg-type]
]  # fmt: skip


def random_leaf(rng: random.Random) -> Any:
    return of(rng.choice(list(LEAVES)))


def random_type(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(("leaf", "row", "tuple", "list", "map")) if depth else "leaf"
    if kind == "leaf":
        return random_leaf(rng)
    if kind == "list":
        return t.LIST(random_type(rng, depth - 1))
    if kind == "map":
        key = rng.choice((random_leaf(rng), t.TUPLE(t.STRING, random_leaf(rng))))
        return t.MAP(key, random_type(rng, depth - 1))
    fields = [random_type(rng, depth - 1) for _ in range(rng.randint(1, 18 if rng.random() < 0.1 else 4))]
    if kind == "tuple":
        return t.TUPLE(*fields)
    return t.ROW(**{f"f{i}": field for i, field in enumerate(fields)})


def random_value(rng: random.Random, declared: Any) -> Any:
    """A value of a type, in one of the forms that it takes."""

    def part(inner: Any) -> Any:
        return None if rng.random() < 0.15 else random_value(rng, inner)

    name = declared.name
    if name == "LIST":
        elements = [part(declared.element) for _ in range(rng.choice((0, 1, 3, 9)))]
        return tuple(elements) if rng.random() < 0.2 else elements
    if name == "MAP":
        pairs = [
            (random_value(rng, declared.key), part(declared.value)) for _ in range(rng.choice((0, 1, 3, 9)))
        ]
        return dict(pairs)
    if name in ("TUPLE", "ROW"):
        fields = tuple(part(inner) for inner in declared.types)
        if name == "ROW" and rng.random() < 0.4:
            pairs = list(zip(declared.names, fields, strict=True))
            rng.shuffle(pairs)
            return rng.choice((dict, collections.OrderedDict, collections.UserDict))(pairs)
        return fields
    values = LEAVES[declared.ddl()]
    if name == "LONG" and rng.random() < 0.5:
        return rng.randint(-(2**63), 2**63 - 1) >> rng.randint(0, 63)
    if name == "DATE" and rng.random() < 0.5:
        return datetime.date.fromordinal(rng.randint(1, datetime.date.max.toordinal()))
    if name == "TIMESTAMP" and rng.random() < 0.5:
        return datetime.datetime(1970, 1, 1, tzinfo=UTC) + datetime.timedelta(
            microseconds=rng.randint(-62_000_000_000_000_000, 253_000_000_000_000_000)
        )
    return rng.choice(values)


# --- a sample of every sort ---

#: How a sort of types is drawn; a leaf stands for itself.
NESTED: dict[str, Callable[[random.Random], Any]] = {
    "list": lambda rng: t.LIST(random_type(rng, 1)),
    "map": lambda rng: t.MAP(random_leaf(rng), random_type(rng, 1)),
    "tuple": lambda rng: t.TUPLE(*[random_type(rng, 1) for _ in range(3)]),
    "row": lambda rng: t.ROW(a=random_type(rng, 1), b=random_type(rng, 1), c=t.STRING),
    "tuple of fixed width": lambda rng: t.TUPLE(t.LONG, of(rng.choice(["date", "double", "decimal(18,2)"]))),
    "key": lambda rng: t.ROW(a=random_leaf(rng), b=t.TUPLE(t.STRING, random_leaf(rng))),
    "five deep": lambda rng: _deep(rng, 5),
}


class Backwards(t.Serializer):
    """Text, stored back to front."""

    def serialize(self, value: Any) -> bytes:
        return bytes(value[::-1].encode())

    def deserialize(self, data: bytes) -> Any:
        return data.decode()[::-1]


#: Types that hold objects, and values of them.
OBJECTS: dict[str, tuple[Any, list[Any]]] = {
    "object": (t.PICKLE, [1j, (None, b"x"), frozenset()]),
    "list of objects": (t.LIST(t.PICKLE), [[1j, None], [], [frozenset([7])]]),
    "row with an object": (t.ROW(a=t.LONG, b=t.PICKLE), [(1, 1j), (None, None)]),
    "map of objects": (t.MAP(t.STRING, t.PICKLE), [{"a": 1j, "b": None}, {}]),
    "custom": (of(Backwards()), ["ab", ""]),
    "tuple with a custom": (t.TUPLE(t.DATE, t.LIST(of(Backwards()))), [(None, ["ab", None]), (None, None)]),
}
#: Each sort of type, and those that keys may have.
SORTS = [*LEAVES, *NESTED]
SORTS_OF_KEYS = [*LEAVES, "tuple of fixed width", "key"]


def _deep(rng: random.Random, depth: int) -> Any:
    if depth == 0:
        return random_leaf(rng)
    inner, beside = _deep(rng, depth - 1), random_leaf(rng)
    return rng.choice([t.LIST(inner), t.MAP(beside, inner), t.TUPLE(beside, inner), t.ROW(f=inner, g=beside)])


class Sample(NamedTuple):
    """Values of a type, each as the serializer gives it back, with a null now and then."""

    declared: t.Type
    values: list[Any]

    @property
    def present(self) -> list[Any]:
        return [value for value in self.values if value is not None]

    def column(self, layout: str, values: list[Any] | None = None) -> Any:
        array = to_arrow(self.values if values is None else values, self.declared)
        return laid_out(array, self.declared, layout)

    def shown(self, array: pa.Array) -> list[str]:
        """What Python makes of a result, which must be of the type."""
        array.validate(full=True)
        assert array.type == self.declared.arrow
        read = from_arrow if has_objects(self.declared) else to_values
        found = read(array, self.declared)
        return texts([None if each is None else stored_and_read(self.declared, each) for each in found])


def stored_and_read(declared: t.Type, value: Any) -> Any:
    serializer = serializer_for(declared)
    return serializer.deserialize(serializer.serialize(value))


def texts(values: Any) -> list[str]:
    """Values in a form that compares: NaN is NaN, and -0.0 is not 0.0."""
    return [repr(value) for value in values]


def sample(sort: str, rng: random.Random) -> Sample:
    """Values of a sort of type, with a null in the second place and in the last."""
    if sort in OBJECTS:
        declared, values = OBJECTS[sort]
    elif sort in NESTED:
        declared = NESTED[sort](rng)
        values = [random_value(rng, declared) for _ in range(12)]
    else:
        declared, values = of(sort), LEAVES[sort]
    values = [stored_and_read(declared, value) for value in values]
    return Sample(declared, [values[0], None, *values[1:], None])


def keys_of(given: Sample) -> tuple[KeyEncoder, list[Any]]:
    """Different keys among the values, in the one form that equal keys share."""
    encoder = key_encoder(given.declared)
    found = {encoder.encode(value): None for value in given.present}
    return encoder, [encoder.decode(key) for key in found]


# --- strategies, and what it means that two values are the same ---

WIDTHS = {t.LONG: 64, t.INT: 32, t.SHORT: 16, t.BYTE: 8}

SCALAR_KEY_TYPES = (
    *WIDTHS,
    t.DOUBLE,
    t.FLOAT,
    t.BOOL,
    t.STRING,
    t.BYTES,
    t.DATE,
    t.TIMESTAMP,
    t.TIMESTAMP_NTZ,
    t.DECIMAL(10, 2),
    t.DECIMAL(18, 0),
    t.DECIMAL(38, 10),
)

_SIMPLE = {
    t.DOUBLE: st.floats(),
    t.FLOAT: st.floats(width=32),
    t.BOOL: st.booleans(),
    t.STRING: st.text(max_size=20),
    t.BYTES: st.binary(max_size=20),
    t.DATE: st.dates(),
    t.TIMESTAMP: st.datetimes(timezones=st.just(datetime.timezone.utc)),
    t.TIMESTAMP_NTZ: st.datetimes(),
}


def values_of(declared: t.Type, nulls: bool = True) -> st.SearchStrategy[Any]:
    """Values of a type; with ``nulls`` their parts may be None."""
    if declared in WIDTHS:
        bits = WIDTHS[declared]
        return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    if isinstance(declared, t.DecimalType):
        limit = 10**declared.precision - 1
        scale = declared.scale
        return st.integers(-limit, limit).map(lambda number: decimal.Decimal(f"{number}E-{scale}"))

    def part(inner: t.Type) -> st.SearchStrategy[Any]:
        values = values_of(inner, nulls)
        return st.none() | values if nulls else values

    if isinstance(declared, (t.TupleType, t.RowType)):
        return st.tuples(*map(part, declared.types))
    if isinstance(declared, t.ListType):
        return st.lists(part(declared.element), max_size=4)
    if isinstance(declared, t.MapType):
        # A key may hold None in its fields, but NaN keys of a dict are not equal to themselves.
        keys = values_of(declared.key, nulls).filter(lambda key: same(key, key) and not has_nan(key))
        return st.dictionaries(keys, part(declared.value), max_size=4)
    raise AssertionError(f"no strategy for {declared!r}")


scalar_key_types = st.sampled_from(SCALAR_KEY_TYPES)


def _composites(inner: st.SearchStrategy[t.Type]) -> st.SearchStrategy[t.Type]:
    several = st.lists(inner, min_size=1, max_size=3)
    return several.map(lambda types: t.TUPLE(*types)) | several.map(
        lambda types: t.ROW(**{f"f{i}": field for i, field in enumerate(types)})
    )


key_types = st.recursive(scalar_key_types, _composites, max_leaves=6)

value_types = st.recursive(
    scalar_key_types,
    lambda inner: _composites(inner) | inner.map(t.LIST) | st.builds(t.MAP, key_types, inner),
    max_leaves=6,
)


def with_values(types: st.SearchStrategy[t.Type]) -> st.SearchStrategy[tuple[t.Type, Any]]:
    return types.flatmap(lambda declared: st.tuples(st.just(declared), values_of(declared)))


def has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, tuple) and any(map(has_nan, value))


def fingerprint(value: Any, keys: bool = False) -> Any:
    """A hashable stand-in: equal exactly for values that are the same, NaN and the sign of zero included.

    With ``keys`` as keys are: one zero and one NaN.
    """
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return struct.pack("<d", value + 0.0 if keys else value)
    if isinstance(value, decimal.Decimal):
        return "decimal", value.normalize(decimal.Context(prec=60)), value.as_tuple().exponent
    if isinstance(value, tuple):
        return tuple(fingerprint(part, keys) for part in value)
    if isinstance(value, list):
        return "list", tuple(fingerprint(part, keys) for part in value)
    if isinstance(value, dict):
        return "map", tuple((fingerprint(k, True), fingerprint(v, keys)) for k, v in value.items())
    return type(value).__name__, value


def same(a: Any, b: Any, keys: bool = False) -> bool:
    return bool(fingerprint(a, keys) == fingerprint(b, keys))


#: Numbers of key groups without a common factor. Their product is larger than 2**32: they tell all hashes apart.
MODULI = (32768, 32749, 32719)


def told_apart(plan: Any, canonical: Any) -> Any:
    """The key groups of keys at each of `MODULI`, as `remainders` gives them for their hashes."""
    return np.stack([plan.key_groups(canonical, modulus) for modulus in MODULI])


def remainders(hashes: Any) -> Any:
    return np.stack([np.mod(np.asarray(hashes, np.int64), modulus) for modulus in MODULI])
