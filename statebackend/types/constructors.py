"""The constructors under the names that users write, and types from stored configurations.

>>> ROW(user=LONG, tags=LIST(STRING)).ddl()
'struct<user:bigint,tags:array<string>>'
>>> eval(repr(MAP(STRING, DECIMAL(10, 2)))) == MAP(STRING, DECIMAL(10, 2))
True
>>> from_config(TUPLE(LONG, BOOL).config())
TUPLE(LONG, BOOL)
"""

from __future__ import annotations

from typing import Any, overload

from statebackend.errors import SerializationError, UsageError
from statebackend.types.model import (
    BOOL,
    BYTE,
    BYTES,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    PICKLE,
    SHORT,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    DecimalType,
    ListType,
    MapType,
    RowType,
    TupleType,
    Type,
)
from statebackend.types.typed import K, Notation, T, V

__all__ = ["DECIMAL", "LIST", "MAP", "ROW", "TUPLE", "from_config"]

MAX_DEPTH = 64

_PRIMITIVES = {
    primitive.name.lower(): primitive
    for primitive in (
        BOOL,
        BYTE,
        BYTES,
        DATE,
        DOUBLE,
        FLOAT,
        INT,
        LONG,
        PICKLE,
        SHORT,
        STRING,
        TIMESTAMP,
        TIMESTAMP_NTZ,
    )
}


def _of(spec: Any) -> Type:
    if isinstance(spec, Type):
        return spec
    # The constructors take every notation that `of` takes, and `of` is defined after the types.
    from statebackend.types.normalise import of

    return of(spec)


def DECIMAL(precision: int = 10, scale: int = 0) -> DecimalType:
    """Exact decimal numbers; up to 18 digits are stored in 8 bytes, more in 16.

    >>> DECIMAL(10, 2).fixed_width, DECIMAL(38, 2).fixed_width
    (8, 16)
    """
    return DecimalType(precision, scale)


@overload
def LIST(element: Notation[T]) -> ListType[T]: ...
@overload
def LIST(element: object) -> ListType[Any]: ...
def LIST(element: Any) -> ListType[Any]:
    """Lists of ``element``, in any notation.

    >>> LIST("bigint")
    LIST(LONG)
    """
    return ListType(_of(element))


@overload
def MAP(key: Notation[K], value: Notation[V]) -> MapType[K, V]: ...
@overload
def MAP(key: object, value: object) -> MapType[Any, Any]: ...
def MAP(key: Any, value: Any) -> MapType[Any, Any]:
    """Dicts from ``key`` to ``value``, in any notation.

    >>> MAP(str, LIST(int))
    MAP(STRING, LIST(LONG))
    """
    return MapType(_of(key), _of(value))


def TUPLE(*types: Any) -> TupleType:
    """Tuples with these types by position, in any notation.

    >>> TUPLE(int, str)
    TUPLE(LONG, STRING)
    """
    return TupleType(tuple(map(_of, types)))


def ROW(**fields: Any) -> RowType:
    """Rows with these named fields, in any notation.

    >>> ROW(sum=int, n="int")
    ROW(sum=LONG, n=INT)
    """
    return RowType(tuple(fields), tuple(map(_of, fields.values())))


def from_config(config: Any) -> Type:
    """The type that ``config`` describes; loads no class and runs no user code.

    >>> from_config({"type": "row", "fields": [["a", {"type": "long"}]]})
    ROW(a=LONG)
    """
    return _from_config(config, 0)


def _from_config(config: Any, depth: int) -> Type:
    kind = config.get("type") if isinstance(config, dict) else None
    if kind == "custom":
        raise SerializationError(
            "a user's own Serializer cannot be rebuilt from its configuration",
            code="SERIALIZATION.CUSTOM_CONFIG",
            hint="declare the state with the Serializer that wrote it",
        )
    try:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
        if kind == "decimal":
            return DecimalType(config["precision"], config["scale"])
        if kind == "list":
            return ListType(_from_config(config["element"], depth + 1))
        if kind == "map":
            return MapType(_from_config(config["key"], depth + 1), _from_config(config["value"], depth + 1))
        if kind == "tuple":
            return TupleType(tuple(_from_config(field, depth + 1) for field in config["fields"]))
        if kind == "row":
            fields = [(name, _from_config(field, depth + 1)) for name, field in config["fields"]]
            if all(isinstance(name, str) for name, _ in fields):
                return RowType(tuple(name for name, _ in fields), tuple(field for _, field in fields))
    except SerializationError:
        raise
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise _bad_config(kind) from error
    raise _bad_config(kind)


def _bad_config(kind: object) -> SerializationError:
    known = kind if isinstance(kind, str) and len(kind) < 40 else "unknown"
    return SerializationError(
        "a stored type configuration cannot be read",
        code="SERIALIZATION.CONFIG",
        detail=f"type {known}",
        hint="the checkpoint is damaged, or was written by a newer version of the library",
    )
