"""The types themselves: immutable, hashable, comparable, picklable descriptions of stored values.

>>> RowType(("user", "tags"), (LONG, ListType(STRING)))
ROW(user=LONG, tags=LIST(STRING))
>>> ListType(STRING).ddl()
'array<string>'
"""

from __future__ import annotations

import datetime
import decimal
import json
import re
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias

import pyarrow as pa

from statebackend.errors import UsageError, usage
from statebackend.types.layout import LAYOUTS, Layout, decimal_layout
from statebackend.types.row_classes import is_frozen_record, record_field_names
from statebackend.types.serializer_interface import Serializer

# For type checkers: a handle is typed by its descriptor, and a descriptor by the types that it is given: a `Type`, or a
# class such as ``int`` or ``list[str]``. Other notations, such as DDL, tell a checker nothing.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    #: A value or an element, and the result where there is none.
    T = TypeVar("T", default=Any)
    A = TypeVar("A", default=None)
    #: The keys and the values of a map.
    K = TypeVar("K", default=Any)
    V = TypeVar("V", default=Any)
    #: The input, the accumulator and the result.
    IN = TypeVar("IN", default=Any)
    ACC = TypeVar("ACC", default=Any)
    OUT = TypeVar("OUT", default=Any)

    Notation: TypeAlias = "Type[T] | type[T]"
else:
    from typing import TypeVar

    T, A, K, V, IN, ACC, OUT = map(TypeVar, ("T", "A", "K", "V", "IN", "ACC", "OUT"))

    Notation = Any


class Subscriptable:
    """A class that takes any number of type arguments when the program runs, and does nothing with them.

    Those of `typing.Generic` would have to be complete: only Python 3.13 knows defaults of type variables.
    """

    __slots__ = ()

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)


MAX_DECIMAL_PRECISION = 38


class Type(Subscriptable, Generic[T]):
    """A description of stored values, made by the constants and constructors of `statebackend.types`, or by `of`.

    >>> LONG.name, LONG.is_key_type, LONG.fixed_width, str(LONG.arrow)
    ('LONG', True, 8, 'int64')
    >>> str(TIMESTAMP.arrow), str(TupleType((LONG, STRING)).arrow)
    ('timestamp[us, tz=UTC]', 'struct<_1: int64, _2: string>')
    """

    __slots__ = (
        "_identity", "arrow", "fixed_width", "is_immutable", "is_key_type", "layout", "name", "parts",
    )  # fmt: skip

    #: The constructor's name, such as ``"LONG"`` or ``"ROW"``.
    name: str
    #: True if it can be a key, a map key or a part of one.
    is_key_type: bool
    #: Bytes of every serialised value, or None where they vary.
    fixed_width: int | None
    #: True if its Python values cannot be changed in place.
    is_immutable: bool
    #: The Arrow type that files and batches use for it.
    arrow: pa.DataType
    #: Its row in `statebackend.types.layout`.
    layout: Layout
    #: The types within: of a LIST its element, of a MAP its key and value, of a TUPLE or ROW its fields.
    parts: tuple[Type, ...]
    _identity: tuple[Any, ...]

    def _set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"types are immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"types are immutable: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Type):
            return NotImplemented
        return self is other or self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def ddl(self) -> str:
        """Its Spark DDL.

        >>> MapType(STRING, DecimalType(10, 2)).ddl()
        'map<string,decimal(10,2)>'
        """
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """A JSON-able description that `from_config` reads back; stored in every checkpoint.

        >>> ListType(LONG).config()
        {'type': 'list', 'element': {'type': 'long'}}
        """
        raise NotImplementedError


class PrimitiveType(Type[T]):
    """A type without parameters."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        layout = LAYOUTS[name]
        is_value = layout.family != "object"
        self._set(name=name, layout=layout, arrow=layout.arrow, fixed_width=layout.width, _identity=(name,))
        self._set(parts=(), is_key_type=is_value, is_immutable=is_value)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # the module's constant: there is only one of each

    def ddl(self) -> str:
        return self.layout.ddl[0]

    def config(self) -> dict[str, Any]:
        return {"type": self.name.lower()}


LONG: PrimitiveType[int] = PrimitiveType("LONG")
INT: PrimitiveType[int] = PrimitiveType("INT")
SHORT: PrimitiveType[int] = PrimitiveType("SHORT")
BYTE: PrimitiveType[int] = PrimitiveType("BYTE")
DOUBLE: PrimitiveType[float] = PrimitiveType("DOUBLE")
FLOAT: PrimitiveType[float] = PrimitiveType("FLOAT")
BOOL: PrimitiveType[bool] = PrimitiveType("BOOL")
STRING: PrimitiveType[str] = PrimitiveType("STRING")
BYTES: PrimitiveType[bytes] = PrimitiveType("BYTES")
DATE: PrimitiveType[datetime.date] = PrimitiveType("DATE")
TIMESTAMP: PrimitiveType[datetime.datetime] = PrimitiveType("TIMESTAMP")
TIMESTAMP_NTZ: PrimitiveType[datetime.datetime] = PrimitiveType("TIMESTAMP_NTZ")
PICKLE: PrimitiveType[Any] = PrimitiveType("PICKLE")
#: All of these that can be keys.
SCALARS = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, PrimitiveType) and kind.is_key_type
)


class DecimalType(Type[decimal.Decimal]):
    """Exact decimal numbers of up to ``precision`` digits, ``scale`` of them after the point."""

    __slots__ = ("precision", "scale")
    precision: int
    scale: int

    def __init__(self, precision: int, scale: int) -> None:
        if type(precision) is not int or type(scale) is not int:
            raise usage.type("the precision and scale of a DECIMAL are integers")
        if not 1 <= precision <= MAX_DECIMAL_PRECISION or not 0 <= scale <= precision:
            raise usage.type(
                "the precision or scale of a DECIMAL is out of range",
                detail=f"DECIMAL({precision}, {scale})",
                hint=f"precision is 1 to {MAX_DECIMAL_PRECISION}, scale 0 to precision",
            )
        layout = decimal_layout(precision, scale)
        self._set(name="DECIMAL", precision=precision, scale=scale, _identity=("DECIMAL", precision, scale))
        self._set(is_key_type=True, is_immutable=True, fixed_width=layout.width)
        self._set(layout=layout, parts=(), arrow=layout.arrow)

    def __repr__(self) -> str:
        return f"DECIMAL({self.precision}, {self.scale})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DecimalType, (self.precision, self.scale)

    def ddl(self) -> str:
        return self.layout.ddl[0]

    def config(self) -> dict[str, Any]:
        return {"type": "decimal", "precision": self.precision, "scale": self.scale}


class ListType(Type[list[T]]):
    """Lists of one element type; elements may be None."""

    __slots__ = ("element",)
    element: Type[T]

    def __init__(self, element: Type[T]) -> None:
        self._set(name="LIST", element=element, _identity=("LIST", element), arrow=pa.list_(element.arrow))
        self._set(is_key_type=False, is_immutable=False, fixed_width=None)
        self._set(layout=LAYOUTS["LIST"], parts=(element,))

    def __repr__(self) -> str:
        return f"LIST({self.element!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ListType, (self.element,)

    def ddl(self) -> str:
        return f"array<{self.element.ddl()}>"

    def config(self) -> dict[str, Any]:
        return {"type": "list", "element": self.element.config()}


class MapType(Type[dict[K, V]], Generic[K, V]):
    """Dicts from one key type to one value type; values may be None, keys not."""

    __slots__ = ("key", "value")
    key: Type[K]
    value: Type[V]

    def __init__(self, key: Type[K], value: Type[V]) -> None:
        if not key.is_key_type:
            raise UsageError(
                f"{key.name} cannot be the key type of a MAP",
                code="USAGE.KEY_TYPE",
                hint="map keys are numbers, strings, bytes, dates, timestamps, and tuples and rows of these",
            )
        if not _is_hashable(key):
            raise UsageError(
                "the record class of a MAP key is not hashable",
                code="USAGE.KEY_TYPE",
                hint="make it a frozen dataclass or a NamedTuple, so that it can be a key of a dict",
            )
        self._set(name="MAP", key=key, value=value, _identity=("MAP", key, value))
        self._set(is_key_type=False, is_immutable=False, fixed_width=None)
        self._set(layout=LAYOUTS["MAP"], parts=(key, value), arrow=pa.map_(key.arrow, value.arrow))

    def __repr__(self) -> str:
        return f"MAP({self.key!r}, {self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MapType, (self.key, self.value)

    def ddl(self) -> str:
        return f"map<{self.key.ddl()},{self.value.ddl()}>"

    def config(self) -> dict[str, Any]:
        return {"type": "map", "key": self.key.config(), "value": self.value.config()}


def _is_hashable(key: Type) -> bool:
    if isinstance(key, RowType) and getattr(key.record_class, "__hash__", True) is None:
        return False
    return all(map(_is_hashable, key.parts))


def _composite_width(types: tuple[Type, ...]) -> int | None:
    widths = [field.fixed_width for field in types]
    if any(width is None for width in widths):
        return None
    return (len(types) + 7) // 8 + sum(width for width in widths if width is not None)


class TupleType(Type):
    """Tuples with one type per position; any of them may be None."""

    __slots__ = ("types",)
    types: tuple[Type, ...]

    def __init__(self, types: tuple[Type, ...]) -> None:
        if not types:
            raise usage.type("a TUPLE needs at least one field type", hint="for example TUPLE(LONG, STRING)")
        self._set(name="TUPLE", types=types, _identity=("TUPLE", types), fixed_width=_composite_width(types))
        self._set(layout=LAYOUTS["TUPLE"], is_key_type=all(field.is_key_type for field in types))
        self._set(parts=types, is_immutable=all(field.is_immutable for field in types))
        self._set(arrow=pa.struct([(f"_{i + 1}", field.arrow) for i, field in enumerate(types)]))

    def __repr__(self) -> str:
        return f"TUPLE({', '.join(map(repr, self.types))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TupleType, (self.types,)

    def ddl(self) -> str:
        return f"struct<{','.join(f'_{i + 1}:{field.ddl()}' for i, field in enumerate(self.types))}>"

    def config(self) -> dict[str, Any]:
        return {"type": "tuple", "fields": [field.config() for field in self.types]}


class RowType(Type):
    """Named fields; any of them may be None. Values come back as `record_class`, or as light named tuples."""

    __slots__ = ("names", "record_class", "types")
    names: tuple[str, ...]
    types: tuple[Type, ...]
    record_class: type | None

    def __init__(
        self, names: tuple[str, ...], types: tuple[Type, ...], record_class: type | None = None
    ) -> None:
        if not names:
            raise usage.type("a ROW needs at least one field", hint="for example ROW(sum=LONG, n=LONG)")
        if len(set(names)) != len(names):
            raise usage.type("a ROW has two fields of the same name", detail=f"fields {', '.join(names)}")
        try:
            "".join(names).encode("utf-8")
        except UnicodeEncodeError:
            raise usage.type("the name of a field has a lone surrogate, which no file can hold") from None
        self._set(name="ROW", names=names, types=types, parts=types, record_class=record_class)
        self._set(_identity=("ROW", names, types, record_class), fixed_width=_composite_width(types))
        self._set(layout=LAYOUTS["ROW"], is_key_type=all(field.is_key_type for field in types))
        self._set(is_immutable=all(field.is_immutable for field in types) and is_frozen_record(record_class))
        self._set(arrow=pa.struct([(name, field.arrow) for name, field in zip(names, types, strict=True)]))

    def returning(self, record_class: type | None) -> RowType:
        """The same ROW, whose values come back as this dataclass or NamedTuple (None: as light named tuples).

        The class must have the same field names in the same order.

        >>> from typing import NamedTuple
        >>> class Point(NamedTuple):
        ...     x: int
        >>> RowType(("x",), (LONG,)).returning(Point)
        ROW(x=LONG).returning(Point)
        """
        if record_class is not None and record_field_names(record_class) != self.names:
            raise usage.type(
                "the record class does not have the fields of the ROW",
                detail=f"class {record_class.__qualname__}, fields {', '.join(self.names)}",
                hint="give a dataclass or NamedTuple with these field names in this order",
            )
        return RowType(self.names, self.types, record_class)

    def __repr__(self) -> str:
        fields = list(zip(self.names, self.types, strict=True))
        if all(name.isidentifier() for name in self.names):
            text = ", ".join(f"{name}={field!r}" for name, field in fields)
        else:
            text = "**{" + ", ".join(f"{name!r}: {field!r}" for name, field in fields) + "}"
        suffix = f".returning({self.record_class.__name__})" if self.record_class is not None else ""
        return f"ROW({text}){suffix}"

    def __reduce__(self) -> tuple[Any, ...]:
        return RowType, (self.names, self.types, self.record_class)

    def ddl(self) -> str:
        fields = zip(self.names, self.types, strict=True)
        return f"struct<{','.join(f'{_quoted(name)}:{field.ddl()}' for name, field in fields)}>"

    def config(self) -> dict[str, Any]:
        fields = zip(self.names, self.types, strict=True)
        return {"type": "row", "fields": [[name, field.config()] for name, field in fields]}


class CustomType(Type):
    """Values that a user's own `Serializer` turns into bytes."""

    __slots__ = ("serializer",)
    serializer: Serializer

    def __init__(self, serializer: Serializer) -> None:
        self._set(name="CUSTOM", serializer=serializer, arrow=pa.binary(), is_key_type=False)
        self._set(layout=LAYOUTS["CUSTOM"], parts=())
        self._set(is_immutable=serializer.is_immutable, fixed_width=serializer.fixed_width)
        try:
            json.dumps(serializer.config(), sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise usage.json(
                "config() of a serializer is not JSON-able, and every checkpoint holds it",
                detail=f"class {type(serializer).__qualname__}",
                hint="give str, int, finite float, bool, None, and lists and dicts of these; int(x) of a numpy number",
            ) from error
        # Serializers need not define equality: two are equal if class and configuration are.
        self._set(_identity=("CUSTOM", type(serializer), repr(serializer.config())))

    def __repr__(self) -> str:
        return f"of({self.serializer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CustomType, (self.serializer,)

    def ddl(self) -> str:
        return "binary"

    def config(self) -> dict[str, Any]:
        return {"type": "custom", "serializer": self.serializer.config()}


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else "`" + name.replace("`", "``") + "`"
