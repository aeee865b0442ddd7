"""Random types, five deep if need be, and random values of them: extremes, NaN, every form that a type takes.

>>> import random
>>> rng = random.Random(1)
>>> declared = random_type(rng, 5)
>>> value = random_value(rng, declared)
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import math
import random
import zoneinfo
from typing import Any, NamedTuple

import numpy as np

from statebackend import types as t
from statebackend.types import of

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


def random_type(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(("leaf", "row", "tuple", "list", "map")) if depth else "leaf"
    if kind == "leaf":
        return of(rng.choice(list(LEAVES)))
    if kind == "list":
        return t.LIST(random_type(rng, depth - 1))
    if kind == "map":
        key = rng.choice((of(rng.choice(list(LEAVES))), t.TUPLE(t.STRING, of(rng.choice(list(LEAVES))))))
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
