"""Parses Spark DDL strings into types, without pyspark.

>>> parse_ddl("map<string, array<decimal(10,2)>>")
MAP(STRING, LIST(DECIMAL(10, 2)))
>>> parse_ddl("user bigint not null, `full name` string comment 'as typed'")
ROW(**{'user': LONG, 'full name': STRING})
"""

from __future__ import annotations

import re

from statebackend.errors import UsageError
from statebackend.types import model
from statebackend.types.model import DecimalType, ListType, MapType, RowType, Type

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

MAX_DEPTH = 64


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
        parser.at = 0  # in "date bigint", the column's name is that of a type
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
            hint="write Spark DDL, such as 'bigint' or 'struct<sum:bigint,n:bigint>'",
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
