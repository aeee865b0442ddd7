"""Decides if values stored as one type can be read as another, and makes the conversions.

The rules: a type is read as itself. Integers widen to longer ones, FLOAT to DOUBLE, DECIMAL to more digits at the same
scale. The fields of a ROW match by name: they may be added (old values get None), removed,
reordered and changed by these rules, as long as one of the old fields remains. Lists, values of maps and fields of
tuples follow their parts; keys of maps do not change. Everything else is incompatible; PICKLE is compatible only with
PICKLE.

>>> from statebackend.types import ROW, LONG, INT, STRING
>>> compatibility(ROW(a=INT, b=STRING).config(), ROW(c=LONG, a=LONG)).name
'AFTER_MIGRATION'
>>> compatibility({"type": "string"}, LONG).name
'INCOMPATIBLE'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from statebackend import types
from statebackend.errors import SerializationError
from statebackend.types import (
    Compatibility,
    DecimalType,
    ListType,
    MapType,
    RowType,
    TupleType,
    Type,
    from_config,
)

_AS_IS = Compatibility.AS_IS
_AFTER_MIGRATION = Compatibility.AFTER_MIGRATION
_INCOMPATIBLE = Compatibility.INCOMPATIBLE


def compatibility(old_config: dict[str, Any], new: Type) -> Compatibility:
    """Tell if a reader of ``new`` can read values written under ``old_config``, and how; O(fields)."""
    if isinstance(new, types.CustomType) or old_config.get("type") == "custom":
        return _AS_IS if old_config == new.config() else _INCOMPATIBLE
    try:
        old = from_config(old_config)
    except SerializationError as error:
        if error.code == "SERIALIZATION.CUSTOM_CONFIG":  # a user's serializer inside a row or list
            return _AS_IS if old_config == new.config() else _INCOMPATIBLE
        raise
    return _compare(old, new)


def describe(config: Any) -> str:
    """A stored configuration in a few words, for messages."""
    try:
        return from_config(config).ddl()
    except SerializationError:
        return "a user's own serializer"


def _worst(answers: Iterable[Compatibility]) -> Compatibility:
    found = set(answers)
    return next((each for each in (_INCOMPATIBLE, _AFTER_MIGRATION) if each in found), _AS_IS)


def _compare(old: Type, new: Type) -> Compatibility:
    if isinstance(old, RowType) and isinstance(new, RowType):
        new_fields = dict(zip(new.names, new.types, strict=True))
        common = [(field, new_fields[name]) for name, field in _fields(old) if name in new_fields]
        if not common:
            return _INCOMPATIBLE  # every old value would become a row of nulls
        answer = _worst(_compare(*pair) for pair in common)
        return answer if answer is _INCOMPATIBLE or old.names == new.names else _AFTER_MIGRATION
    if isinstance(old, TupleType) and isinstance(new, TupleType):
        if len(old.types) != len(new.types):
            return _INCOMPATIBLE
        return _worst(map(_compare, old.types, new.types))
    if isinstance(old, ListType) and isinstance(new, ListType):
        return _compare(old.element, new.element)
    if isinstance(old, MapType) and isinstance(new, MapType):
        return _compare(old.value, new.value) if _compare(old.key, new.key) is _AS_IS else _INCOMPATIBLE
    if old == new:
        return _AS_IS
    return _AFTER_MIGRATION if _widens(old, new) else _INCOMPATIBLE


def _widens(old: Type, new: Type) -> bool:
    if isinstance(old, DecimalType) and isinstance(new, DecimalType):
        return old.scale == new.scale and old.precision < new.precision
    if old.layout.family != new.layout.family or old.layout.family not in ("integer", "float"):
        return False
    return (old.layout.width or 0) < (new.layout.width or 0)


def _fields(row: RowType) -> Iterable[tuple[str, Type]]:
    return zip(row.names, row.types, strict=True)


def _row_plan(old: RowType, new: RowType) -> list[int | None]:
    """For each new field, the position of the old one of the same name."""
    return [old.names.index(name) if name in old.names else None for name in new.names]


def value_migration(old: Type, new: Type) -> Callable[[Any], Any]:
    """The function from values of ``old`` to values that ``new`` takes; the two are compatible."""
    if isinstance(old, RowType) and isinstance(new, RowType):
        plan = _row_plan(old, new)
        steps = [
            None if at is None else (at, value_migration(old.types[at], new_type))
            for at, new_type in zip(plan, new.types, strict=True)
        ]
        return lambda row: tuple(None if s is None or row[s[0]] is None else s[1](row[s[0]]) for s in steps)
    if isinstance(old, TupleType) and isinstance(new, TupleType):
        parts = list(map(value_migration, old.types, new.types))
        return lambda row: tuple(None if v is None else part(v) for part, v in zip(parts, row, strict=True))
    if isinstance(old, ListType) and isinstance(new, ListType):
        element = value_migration(old.element, new.element)
        return lambda values: [None if v is None else element(v) for v in values]
    if isinstance(old, MapType) and isinstance(new, MapType):
        item = value_migration(old.value, new.value)
        return lambda values: {k: None if v is None else item(v) for k, v in values.items()}
    return lambda value: value  # widening changes the bytes, not the Python value


def arrow_migration(old: Type, new: Type) -> Callable[[pa.Array], pa.Array]:
    """The function from Arrow arrays of ``old`` to arrays of ``new.arrow``; whole columns, no Python objects.

    >>> from statebackend.types import ROW, LONG, INT
    >>> migrate = arrow_migration(ROW(a=INT), ROW(b=INT, a=LONG))
    >>> migrate(pa.array([{"a": 1}, None], ROW(a=INT).arrow)).to_pylist()
    [{'b': None, 'a': 1}, None]
    """
    if isinstance(old, (RowType, TupleType)) and isinstance(new, (RowType, TupleType)):
        return _struct_migration(old, new)
    if isinstance(old, ListType) and isinstance(new, ListType):
        element = arrow_migration(old.element, new.element)
        return lambda array: _with_child(_plain(array, old), new, element(_plain(array, old).values))
    if isinstance(old, MapType) and isinstance(new, MapType):
        item = arrow_migration(old.value, new.value)
        entry_fields = [new.arrow.key_field, new.arrow.item_field]

        def migrate_map(array: pa.Array) -> pa.Array:
            array = _plain(array, old)
            keys = array.keys.cast(new.key.arrow)
            entries = pa.StructArray.from_arrays([keys, item(array.items)], fields=entry_fields)
            return _with_child(array, new, entries)

        return migrate_map
    return lambda array: array.cast(new.arrow)


def _plain(array: pa.Array, declared: Type) -> pa.Array:
    return array if array.type == declared.arrow else array.cast(declared.arrow)


def _with_child(array: pa.Array, new: Type, child: pa.Array) -> pa.Array:
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        new.arrow, len(array), [validity, offsets], offset=array.offset, children=[child]
    )


def _struct_migration(old: RowType | TupleType, new: RowType | TupleType) -> Callable[[pa.Array], pa.Array]:
    plan: list[int | None]
    if isinstance(old, RowType) and isinstance(new, RowType):
        plan = _row_plan(old, new)
    else:
        plan = list(range(len(old.types)))
    steps = [
        None if at is None else arrow_migration(old.types[at], new_type)
        for at, new_type in zip(plan, new.types, strict=True)
    ]
    fields = [new.arrow.field(i) for i in range(new.arrow.num_fields)]

    def migrate_struct(array: pa.Array) -> pa.Array:
        children = [
            pa.nulls(len(array), field.type) if step is None or at is None else step(array.field(at))
            for at, step, field in zip(plan, steps, fields, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())

    return migrate_struct
