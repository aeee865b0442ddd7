"""Hypothesis strategies for types and their values, and what it means that two values are the same.

Used by the tests of types, serializers and keys.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from typing import Any

from hypothesis import strategies as st

from statebackend import types as t

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
