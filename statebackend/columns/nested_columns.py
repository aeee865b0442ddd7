"""Columns of nested types as trees of buffers, which the compiled module of this name converts without Python objects.

A column becomes a tree only if every value of it is sure to become what Python would make of it. For others the
functions return None, and the caller looks at each value; so do values that are found to be out of range on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend._core.codecs.nested_reader import SinkPart, read_values
from statebackend._core.codecs.nested_writer import SourcePart, write_keys, write_values
from statebackend.columns.codec_factory import type_codec
from statebackend.keys import KeyEncoder, as_columnar, without_dictionary
from statebackend.types import DecimalType, ListType, MapType, RowType, TupleType, Type

Array = np.ndarray[Any, Any]
ByteRuns = tuple[Array, Array]

_DAY = 86_400_000_000
_UTC = ("UTC", "Etc/UTC", "+00:00", "Z")


def stored_runs(
    column: pa.Array, declared: Type, as_python: bool = False, has_offsets: bool = True
) -> ByteRuns | None:
    """Offsets, if wanted, and data of the values of a column in stored form; None if each must be looked at. O(bytes).

    With ``as_python``, dates and times that Python does not have are not taken in types of a fixed width either.
    """
    return _runs(column, declared, _rules(declared, as_python), False, has_offsets)


def arrow_of_stored(
    offsets: Array | None, data: Array, valid: Array | None, declared: Type, as_python: bool = False
) -> pa.Array | None:
    """The Arrow array, of the type's `arrow`, of values in stored form; None if each must be looked at. O(bytes).

    A type of a fixed width needs no offsets. Bytes of rows that ``valid`` excludes are not looked at. ``as_python`` is
    that of `stored_runs`.
    """
    part = _sink(declared, _rules(declared, as_python))
    mask = None if valid is None else np.ascontiguousarray(valid, dtype=bool).view(np.uint8)
    ends = None if offsets is None else np.ascontiguousarray(offsets, dtype=np.int64)
    if part is None or not read_values(part, ends, data, mask):
        return None
    return _arrow_of(part, declared)


def encoded_keys(encoder: KeyEncoder, keys: Any) -> Any:
    """As ``encoder.encode_many(keys)``, compiled for TUPLE and ROW keys, and without the GIL in Arrow. O(bytes)."""
    declared = encoder.declared_type
    if isinstance(declared, (TupleType, RowType)):
        keys = as_columnar(keys)
        runs = None
        if isinstance(keys, pa.Array):
            runs = _runs(keys, declared, _KEYS, True)
        elif isinstance(keys, list):
            ends = np.empty(len(keys) + 1, dtype=np.int64)
            data = type_codec(declared).encode_keys(keys, ends)
            runs = None if data is None else (ends, np.frombuffer(data, dtype=np.uint8))
        if runs is not None:
            return runs
    return encoder.encode_many(keys)


def decoded_keys(encoder: KeyEncoder, canonical: Any) -> pa.Array:
    """As ``encoder.decode_many(canonical)``, and without the GIL for TUPLE and ROW keys. O(bytes)."""
    declared = encoder.declared_type
    part = _sink(declared, _KEYS) if isinstance(declared, (TupleType, RowType)) else None
    if part is not None:
        offsets, data = canonical
        if read_values(part, np.ascontiguousarray(offsets, dtype=np.int64), data, None, True):
            return _arrow_of(part, declared)
    return encoder.decode_many(canonical)


class _Rules(NamedTuple):
    """What holds for a part and the parts within."""

    is_canonical: bool  # there is one zero and one NaN: the part belongs to a key
    as_python: bool  # a value that Python's types cannot express is not taken


_KEYS = _Rules(True, False)


def _rules(declared: Type, as_python: bool) -> _Rules:
    # Values of a fixed width have never gone through Python: their dates may lie beyond its years.
    return _Rules(False, as_python or declared.fixed_width is None)


def _form(declared: Type, rules: _Rules, limit: int) -> dict[str, Any] | None:
    """How `SourcePart` and `SinkPart` name a type without parts; None for types that are not stored as numbers or
    bytes.

    The magnitudes of decimals are below ``limit``.
    """
    layout = declared.layout
    if layout.family == "decimal":
        if layout.width == 16:
            return {"form": "WIDE_DECIMAL", "high": limit}
        return {"form": "DECIMAL", "low": 1 - limit, "high": limit - 1}
    if layout.bounds is not None and rules.as_python:
        return {"form": "RANGED", "low": layout.bounds[0], "high": layout.bounds[1]}
    if layout.family == "float" and (rules.is_canonical or (layout.width == 4 and rules.as_python)):
        return {"form": declared.name}
    if layout.family in ("float", "integer", "time"):
        return {"form": "NUMBER"}
    return {"form": declared.name} if layout.family in ("boolean", "bytes") else None


def _power(declared: Type) -> int:
    return 10**declared.precision if isinstance(declared, DecimalType) else 0


# --- from Arrow ---


def _runs(
    column: pa.Array, declared: Type, rules: _Rules, is_key: bool, has_offsets: bool = True
) -> ByteRuns | None:
    try:
        column.validate()  # buffers are as long as the lengths say; the values are checked on the way
    except pa.ArrowInvalid:
        return None
    part = _source(column, declared, rules)
    if part is None:
        return None
    return write_keys(part) if is_key else write_values(part, has_offsets)


def _source(array: pa.Array, declared: Type, rules: _Rules) -> SourcePart | None:
    types = pa.types
    if types.is_dictionary(array.type):
        try:
            array = without_dictionary(array)
        except pa.ArrowException:
            return None
    where: dict[str, Any] = {"width": declared.fixed_width or 0, "rows": len(array)}
    if types.is_null(array.type):
        return SourcePart("NOTHING", **where)
    if isinstance(declared, (TupleType, RowType)):
        return _source_of_record(array, declared, rules, where)
    if isinstance(declared, ListType):
        if types.is_fixed_size_list(array.type):
            where["step"] = array.type.list_size
        elif types.is_list_view(array.type) or types.is_large_list_view(array.type):
            where["sizes"] = array.buffers()[2]
        elif not (types.is_list(array.type) or types.is_large_list(array.type)):
            return None
        element = _source(array.values, declared.element, rules)
        if element is None:
            return None
        return SourcePart("LIST", **where, **_places(array, "LIST"), parts=(element,))
    if isinstance(declared, MapType):
        return _source_of_map(array, declared, rules, where)
    form = _form(declared, rules, _power(declared))
    exact = None if form is None else _exactly(array, declared, rules)
    if form is None or exact is None:
        return None
    if types.is_fixed_size_binary(exact.type):
        where["step"] = exact.type.byte_width
    if declared.name == "TIMESTAMP" and rules.as_python and exact.type.tz not in _UTC:
        if rules.is_canonical or not _is_time_zone(exact.type.tz):
            return (
                None  # Python takes two times of one zone for equal that differ by the hour that comes twice
            )
        form["low"] += _DAY
        form["high"] -= _DAY
    return SourcePart(**form, **where, **_places(exact, form["form"]), is_canonical=rules.is_canonical)


def _places(array: pa.Array, form: str) -> dict[str, Any]:
    """Where the values of an array lie, except for its children."""
    buffers = array.buffers()
    places: dict[str, Any] = {"origin": array.offset, "first": array.offset}
    if array.null_count:
        places["valid"] = buffers[0]
    types = pa.types
    steps = types.is_fixed_size_list(array.type) or types.is_fixed_size_binary(array.type)
    if form in ("STRING", "BYTES", "LIST", "MAP") and not steps:
        places["offsets"] = buffers[1]
        places["is_wide"] = str(array.type).startswith("large_")
    if form not in ("LIST", "MAP"):
        places["data"] = buffers[-1]
    return places


def _source_of_record(
    array: pa.Array, declared: TupleType | RowType, rules: _Rules, where: dict[str, Any]
) -> SourcePart | None:
    if not pa.types.is_struct(array.type) or array.type.num_fields != len(declared.types):
        return None
    names = [field.name for field in array.type]
    order = list(range(len(names)))
    if isinstance(declared, RowType):
        if sorted(names) != sorted(declared.names):
            return None
        order = [names.index(name) for name in declared.names]
    elif rules.as_python and len(set(names)) < len(names):
        return None
    parts = []
    for part, at in zip(declared.types, order, strict=True):
        source = _source(array.field(at), part, rules)
        if source is None:
            return None
        parts.append(source)
    valid = array.buffers()[0] if array.null_count else None
    return SourcePart("RECORD", **where, valid=valid, first=array.offset, parts=tuple(parts))


def _source_of_map(
    array: pa.Array, declared: MapType, rules: _Rules, where: dict[str, Any]
) -> SourcePart | None:
    if not pa.types.is_map(array.type):
        return None
    entries = array.values
    if entries.null_count:
        return None
    key = _source(entries.field(0), declared.key, rules._replace(is_canonical=True))
    value = None if key is None else _source(entries.field(1), declared.value, rules)
    if key is None or value is None:
        return None
    return SourcePart("MAP", **where, **_places(array, "MAP"), parts=(key, value))


def _exactly(array: pa.Array, declared: Type, rules: _Rules) -> pa.Array | None:
    """The same values in the declared type's own layout; None if they may not be the same, or are of another kind."""
    types, arrow, wanted = pa.types, array.type, declared.arrow
    if arrow == wanted:
        return array
    name = declared.name
    try:
        if declared.layout.family == "bytes":
            return _exact_runs(array, name)
        if name == "DATE":
            days = array.cast(wanted) if types.is_date64(arrow) else None
            return None if days is None or not days.cast(arrow).equals(array) else days
        if types.is_timestamp(wanted):
            if not types.is_timestamp(arrow) or (arrow.tz is None) != (wanted.tz is None):
                return None
            return array.cast(pa.timestamp("us", arrow.tz))
        if isinstance(declared, DecimalType):
            if not types.is_decimal(arrow):
                return None
            array.validate(full=True)  # Arrow does not guarantee that values respect their precision
            return array.cast(wanted)
        if declared.layout.family == "float":
            if not (types.is_integer(arrow) or types.is_float32(arrow) or types.is_float64(arrow)):
                return None
            floats = array.cast(wanted)
            # A number that rounds to infinity is out of range.
            narrows = types.is_float32(wanted) and types.is_float64(arrow)
            return None if narrows and not pc.is_inf(floats).equals(pc.is_inf(array)) else floats
        if declared.layout.family == "integer" and types.is_integer(arrow):
            return array.cast(wanted)
    except pa.ArrowException:
        pass
    return None


def _exact_runs(array: pa.Array, name: str) -> pa.Array | None:
    types, arrow = pa.types, array.type
    if str(arrow) == ("string_view" if name == "STRING" else "binary_view"):
        array.validate(full=True)
        return array.cast(pa.large_string() if name == "STRING" else pa.large_binary())
    if name == "STRING":
        return array if types.is_large_string(arrow) else None
    return array if types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow) else None


def _is_time_zone(name: str) -> bool:
    try:
        pa.lib.string_to_tzinfo(name)
    except (KeyError, ValueError, OSError):  # from whichever library knows time zones
        return False
    return True


# --- to Arrow ---


def _sink(declared: Type, rules: _Rules) -> SinkPart | None:
    width = declared.fixed_width or 0
    form: dict[str, Any] | None
    if declared.parts:
        is_record = isinstance(declared, (TupleType, RowType))
        if rules.is_canonical and rules.as_python and getattr(declared, "record_class", None) is not None:
            return None  # as keys of a map, the user's class decides which of them are equal
        form = {"form": "RECORD" if is_record else declared.name}
    else:
        unlimited = 2**63 if declared.fixed_width == 8 else 2**128 - 1
        form = _form(declared, rules, _power(declared) if rules.as_python else unlimited)
        if form is not None and form["form"] not in ("BOOL", "STRING", "BYTES"):
            form["stride"] = declared.arrow.byte_width
    if form is None:
        return None
    is_map = isinstance(declared, MapType)
    parts = [
        _sink(part, rules._replace(is_canonical=True) if is_map and at == 0 else rules)
        for at, part in enumerate(declared.parts)
    ]
    if any(part is None for part in parts):
        return None
    return SinkPart(**form, width=width, is_canonical=rules.is_canonical, parts=tuple(parts))


def _arrow_of(part: SinkPart, declared: Type) -> pa.Array:
    arrow = declared.arrow
    count, nulls, blocks = part.take_buffers()
    buffers = [None if block is None else pa.py_buffer(block) for block in blocks]
    children = [_arrow_of(child, each) for child, each in zip(part.parts, declared.parts, strict=True)]
    if isinstance(declared, MapType):
        entries = arrow.field(0).type
        children = [pa.Array.from_buffers(entries, len(children[0]), [None], 0, children=children)]
    return pa.Array.from_buffers(arrow, count, buffers, nulls, children=children or None)
