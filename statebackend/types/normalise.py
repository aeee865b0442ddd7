"""`of` converts every notation of a type to the type, Spark DDL without pyspark; constructors as users write them."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import re
import types
import typing
from typing import Any, overload

import pyarrow as pa

from statebackend.errors import SerializationError, UsageError, usage
from statebackend.types import model
from statebackend.types.model import (
    CustomType,
    DecimalType,
    K,
    ListType,
    MapType,
    Notation,
    RowType,
    T,
    TupleType,
    Type,
    V,
)
from statebackend.types.row_classes import is_named_tuple_class
from statebackend.types.serializer_interface import Serializer

_PYTHON: dict[Any, Type] = {
    int: model.LONG,
    float: model.DOUBLE,
    bool: model.BOOL,
    str: model.STRING,
    bytes: model.BYTES,
    datetime.datetime: model.TIMESTAMP,
    datetime.date: model.DATE,
    decimal.Decimal: DecimalType(38, 18),
}

#: By the name of the class. Texts of other collations than the usual one are refused first.
_SPARK: dict[str, Type] = {kind.layout.spark: kind for kind in model.SCALARS}
_SPARK |= {"CharType": model.STRING, "VarcharType": model.STRING}

MAX_DEPTH = 64


def of(spec: Any) -> Type:
    """The type that ``spec`` means, in any notation for types.

    >>> of(int), of("bigint"), of(pa.int64())
    (LONG, LONG, LONG)
    >>> @dataclasses.dataclass
    ... class Total:
    ...     sum: int
    ...     label: str | None = None
    >>> of(Total)
    ROW(sum=LONG, label=STRING).returning(Total)
    """
    return _of(spec, ())


def _of(spec: Any, inside: tuple[Any, ...]) -> Type:
    if isinstance(spec, Type):
        return spec
    if isinstance(spec, str):
        return parse_ddl(spec)
    if isinstance(spec, pa.DataType):
        return _of_arrow(spec)
    if len(inside) > MAX_DEPTH:
        raise usage.type("a type is nested too deeply", detail=f"at most {MAX_DEPTH} levels")
    module = getattr(spec if isinstance(spec, type) else type(spec), "__module__", "")
    if module.startswith("pyspark.sql"):
        return _of_spark(spec)
    try:
        found = _PYTHON.get(spec)
    except TypeError:
        found = None
    if found is not None:
        return found
    if isinstance(spec, Serializer):
        declared = getattr(spec, "declared_type", None)
        return declared if isinstance(declared, Type) else CustomType(spec)
    return _of_annotation(spec, inside)


def _of_annotation(spec: Any, inside: tuple[Any, ...]) -> Type:
    if isinstance(spec, typing.NewType):
        return _of(spec.__supertype__, inside)
    origin = typing.get_origin(spec)
    arguments = typing.get_args(spec)
    inner = (*inside, spec)
    if origin is typing.Annotated:
        declared = [extra for extra in arguments[1:] if isinstance(extra, (Type, pa.DataType, str))]
        return _of(declared[0] if declared else arguments[0], inner)
    if origin in (typing.Union, types.UnionType):
        members = [argument for argument in arguments if argument is not type(None)]
        if len(members) == 1:
            return _of(members[0], inner)  # every field may be None, so Optional adds nothing
        raise _unknown(spec, "a union of several types lacks a single stored form; declare PICKLE for it")
    if origin is list:
        return ListType(_of(arguments[0], inner))
    if origin is dict:
        return MapType(_of(arguments[0], inner), _of(arguments[1], inner))
    if origin is tuple:
        if Ellipsis in arguments:
            raise _unknown(spec, "tuples of any length are lists: use list[...]")
        return TupleType(tuple(_of(argument, inner) for argument in arguments))
    if isinstance(spec, type) and origin is None:
        if spec in inside:
            raise _unknown(spec, "a class that contains itself lacks a fixed form; declare PICKLE for it")
        if is_named_tuple_class(spec):
            return _of_record(spec, spec._fields, inner)  # type: ignore[attr-defined]
        if dataclasses.is_dataclass(spec):
            return _of_record(spec, tuple(field.name for field in dataclasses.fields(spec)), inner)
        if spec in (list, dict, tuple):
            raise _unknown(spec, f"name the element types, for example {_EXAMPLES[spec]}")
    raise _unknown(
        spec, "use a constant of statebackend.types, a Python type, Spark DDL, or PICKLE for any object"
    )


_EXAMPLES = {list: "list[int]", dict: "dict[str, int]", tuple: "tuple[int, str]"}


def _of_record(cls: type, names: tuple[str, ...], inside: tuple[Any, ...]) -> RowType:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"cannot resolve the field types of class {cls.__qualname__}",
            code="USAGE.TYPE",
            detail=f"name {error.name!r}",
            hint="define the types of its fields at module level, or give a ROW(...)",
        ) from error
    missing = [name for name in names if name not in hints]
    if missing:
        raise UsageError(
            f"class {cls.__qualname__} has fields without a type",
            code="USAGE.TYPE",
            detail=f"fields {', '.join(missing)}",
            hint="use typing.NamedTuple or a dataclass, with a type on every field",
        )
    return RowType(names, tuple(_of(hints[name], inside) for name in names), cls)


def _unknown(spec: Any, hint: str) -> UsageError:
    if isinstance(spec, type):
        what = f"class {spec.__qualname__}"
    elif typing.get_origin(spec) is not None or getattr(spec, "__module__", None) == "typing":
        what = str(spec)
    else:
        what = f"an object of class {type(spec).__qualname__}"
    return UsageError(f"{what} is not a type that state can have", code="USAGE.TYPE", hint=hint)


def _of_arrow(arrow: pa.DataType) -> Type:
    """Exact or lossless equivalents only: the user has to widen unsigned integers and half floats."""
    checks = pa.types
    if checks.is_timestamp(arrow):
        return model.TIMESTAMP_NTZ if arrow.tz is None else model.TIMESTAMP
    exact = _ARROW.get(arrow.id)
    if exact is not None:
        return exact
    if checks.is_decimal(arrow):
        return DecimalType(arrow.precision, arrow.scale)
    if checks.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return RowType(
            tuple(field.name for field in fields), tuple(_of_arrow(field.type) for field in fields)
        )
    if checks.is_map(arrow):
        return MapType(_of_arrow(arrow.key_type), _of_arrow(arrow.item_type))
    if checks.is_dictionary(arrow):
        return _of_arrow(arrow.value_type)
    if getattr(arrow, "value_type", None) is not None and "list" in str(arrow):
        return ListType(_of_arrow(arrow.value_type))
    hint = "use a type of statebackend.types"
    if checks.is_unsigned_integer(arrow):
        hint = "use the next wider signed type; for uint64, pa.decimal128(20, 0)"
    raise UsageError(f"Arrow type {arrow} is not a type that state can have", code="USAGE.TYPE", hint=hint)


_ARROW: dict[int, Type] = {
    **{kind.arrow.id: kind for kind in model.SCALARS},
    pa.large_string().id: model.STRING,
    pa.large_binary().id: model.BYTES,
    pa.binary(1).id: model.BYTES,
    pa.date64().id: model.DATE,
}
for _view, _view_type in (("string_view", model.STRING), ("binary_view", model.BYTES)):
    if hasattr(pa, _view):
        _ARROW[getattr(pa, _view)().id] = _view_type


def _of_spark(spec: Any) -> Type:
    """Spark's `DataType` objects (or their classes), recognised by class name: pyspark is not imported."""
    name = (spec if isinstance(spec, type) else type(spec)).__name__
    collation = getattr(spec, "collation", "UTF8_BINARY") if name == "StringType" else "UTF8_BINARY"
    if collation != "UTF8_BINARY" and not isinstance(spec, type):
        raise UsageError(
            f"collation {collation} is not supported",
            code="USAGE.TYPE",
            hint="only UTF8_BINARY strings have one canonical form",
        )
    if name in _SPARK:
        return _SPARK[name]
    if name == "DecimalType":
        return DecimalType(10, 0) if isinstance(spec, type) else DecimalType(spec.precision, spec.scale)
    if not isinstance(spec, type):
        if name == "ArrayType":
            return ListType(_of_spark(spec.elementType))
        if name == "MapType":
            return MapType(_of_spark(spec.keyType), _of_spark(spec.valueType))
        if name == "StructType":
            fields = spec.fields
            return RowType(
                tuple(field.name for field in fields), tuple(_of_spark(field.dataType) for field in fields)
            )
    raise UsageError(f"Spark type {name} is not a type that state can have", code="USAGE.TYPE")


_PRIMITIVES = {kind.name.lower(): kind for kind in (*model.SCALARS, model.PICKLE)}


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
    return ListType(of(element))


@overload
def MAP(key: Notation[K], value: Notation[V]) -> MapType[K, V]: ...
@overload
def MAP(key: object, value: object) -> MapType[Any, Any]: ...
def MAP(key: Any, value: Any) -> MapType[Any, Any]:
    """Dicts from ``key`` to ``value``, in any notation.

    >>> MAP(str, LIST(int))
    MAP(STRING, LIST(LONG))
    """
    return MapType(of(key), of(value))


def TUPLE(*types: Any) -> TupleType:
    """Tuples with these types by position, in any notation.

    >>> TUPLE(int, str)
    TUPLE(LONG, STRING)
    """
    return TupleType(tuple(map(of, types)))


def ROW(**fields: Any) -> RowType:
    """Rows with these named fields, in any notation.

    >>> ROW(sum=int, n="int")
    ROW(sum=LONG, n=INT)
    """
    return RowType(tuple(fields), tuple(map(of, fields.values())))


def from_config(config: Any) -> Type:
    """The type that ``config`` describes; loads no class and runs no user code."""
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


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<quoted>`(?:[^`]|``)+`)
      | (?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<word>\w+(?:\.\w+)*)
      | (?P<sign>[<>(),:])
    )""",
    re.VERBOSE,
)

_NAMES: dict[str, Type] = {name: kind for kind in model.SCALARS for name in kind.layout.ddl}
_DECIMALS = ("decimal", "dec", "numeric")
_CHARS = ("char", "character", "varchar")
_PARAMETRIC = (*_DECIMALS, *_CHARS, "array", "map", "struct")
_UNSUPPORTED = ("void", "interval", "variant", "time", "object", "geometry", "geography", "calendarinterval")


def parse_ddl(text: str) -> Type:
    """The type that a Spark DDL string describes: a data type, or a list of columns, which is a ROW."""
    parser = _Parser(text)
    first = parser.peek().lower()
    type_error: UsageError | None = None
    if first in _NAMES or first in _PARAMETRIC or first in _UNSUPPORTED:
        try:
            result = parser.type(0)
            if not parser.peek():
                return result
            raise parser.fail(f"unexpected {parser.peek()!r} after the type")
        except UsageError as error:
            type_error = error
        parser.at = 0  # in "date bigint", the column has the name of a type
    elif not parser.peek(1):
        raise parser.fail("unknown type name")
    try:
        return parser.fields("", 0)
    except UsageError as error:
        raise type_error or error from None


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        self.at = 0
        position = 0
        end = len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.fail(f"unexpected character at position {position + 1}")
            self.tokens.append(match.group().strip())
            position = match.end()
        if not self.tokens:
            raise self.fail("it is empty")

    def fail(self, what: str) -> UsageError:
        return UsageError(
            f"cannot read a type from this DDL string: {what}",
            code="USAGE.DDL",
            detail=f"{self.text[:200]!r}",
            hint="write Spark DDL, such as 'bigint', 'user string, n bigint' or 'struct<sum:bigint,n:bigint>'",
        )

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        if not token:
            raise self.fail("it ends too early")
        self.at += 1
        return token

    def expect(self, sign: str) -> None:
        token = self.peek()
        if token != sign:
            raise self.fail(
                f"expected {sign!r}, found {token!r}" if token else f"expected {sign!r} at the end"
            )
        self.at += 1

    def accept(self, *words: str) -> bool:
        if tuple(self.peek(i).lower() for i in range(len(words))) == words:
            self.at += len(words)
            return True
        return False

    def type(self, depth: int) -> Type:
        if depth > MAX_DEPTH:
            raise self.fail("it is nested too deeply")
        name = self.next().lower()
        if name == "timestamp":
            return self._timestamp()
        if name == "string":
            self._collation()
            return model.STRING
        if name in _NAMES:
            return _NAMES[name]
        if name in _DECIMALS:
            return self._decimal()
        if name in _CHARS:
            self.expect("(")
            self._integer()
            self.expect(")")
            self._collation()
            return model.STRING
        if name == "array":
            self.expect("<")
            element = self.type(depth + 1)
            self.expect(">")
            return ListType(element)
        if name == "map":
            self.expect("<")
            key = self.type(depth + 1)
            self.expect(",")
            value = self.type(depth + 1)
            self.expect(">")
            return MapType(key, value)
        if name == "struct":
            self.expect("<")
            return self.fields(">", depth + 1)
        if name in _UNSUPPORTED:
            raise self.fail(f"{name} cannot be stored in state")
        raise self.fail(f"unknown type name {name!r}")

    def _timestamp(self) -> Type:
        if self.accept("without", "time", "zone"):
            return model.TIMESTAMP_NTZ
        self.accept("with", "local", "time", "zone")
        return model.TIMESTAMP

    def _collation(self) -> None:
        if self.accept("collate"):
            collation = self.next().strip("`")
            if collation.upper().split(".")[-1] != "UTF8_BINARY":
                raise self.fail(f"collation {collation} is not supported, only UTF8_BINARY")

    def _integer(self) -> int:
        token = self.next()
        if not (token.isascii() and token.isdigit()):
            raise self.fail(f"expected a number, found {token!r}")
        return int(token)

    def _decimal(self) -> Type:
        precision, scale = 10, 0
        if self.peek() == "(":
            self.expect("(")
            precision = self._integer()
            if self.accept(","):
                scale = self._integer()
            self.expect(")")
        return DecimalType(precision, scale)

    def fields(self, closing: str, depth: int) -> RowType:
        names: list[str] = []
        types: list[Type] = []
        while True:
            names.append(self._name())
            self.accept(":")
            types.append(self.type(depth))
            self._field_options()
            if self.accept(","):
                continue
            if closing:
                self.expect(closing)
            elif self.peek():
                raise self.fail(f"unexpected {self.peek()!r}")
            return RowType(tuple(names), tuple(types))

    def _name(self) -> str:
        token = self.next()
        if token.startswith("`"):
            return token[1:-1].replace("``", "`")
        if not re.fullmatch(r"\w+", token):
            raise self.fail(f"expected a field name, found {token!r}")
        return token

    def _field_options(self) -> None:
        while True:
            if self.accept("not", "null") or self.accept("null"):
                continue
            if self.accept("comment"):
                if self.next()[0] not in "'\"":
                    raise self.fail("a comment is a quoted string")
                continue
            return
