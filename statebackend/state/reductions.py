"""The named reductions: ``"sum" "min" "max" "first" "last" "product" "any" "all"``.

Each is defined here once, in plain Python, over values as a state returns them; a compiled version in a backend does
the same. Results have the declared type. As in Spark, NaN is greater than any other number, structs compare field by
field with nulls first, and strings compare by their UTF-8 bytes.

>>> add = named_reduction("sum", "bigint")
>>> add(2, 3)
5
>>> largest = named_reduction("max", "double")
>>> largest(float("nan"), 1.0)
nan
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any

from statebackend.errors import UsageError
from statebackend.types import DecimalType, RowType, TupleType, Type, convert, of, record_reader

INTEGER_BITS = {"LONG": 64, "INT": 32, "SHORT": 16, "BYTE": 8}
_FLOATS = ("DOUBLE", "FLOAT")
_ORDERED = (*INTEGER_BITS, "BOOL", "STRING", "BYTES", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "DECIMAL")
_SINGLE = struct.Struct("<f")


class Reduction:
    """A named reduction for one type: ``reduction(old, new)`` returns the value to keep; picklable."""

    __slots__ = ("_function", "name", "type")

    def __init__(self, name: str, declared_type: Type) -> None:
        if name not in _MAKERS:
            raise UsageError(
                "there is no reduction of this name",
                code="USAGE.REDUCTION",
                hint=f"use one of {', '.join(map(repr, _MAKERS))}, or a function (old, new) -> merged",
            )
        function = _MAKERS[name](declared_type)
        if function is None:
            raise UsageError(
                f"{name!r} does not work on {declared_type!r}",
                code="USAGE.REDUCTION",
                hint=f"it works on {_TAKES[name]}; for other types give a function (old, new) -> merged",
            )
        self.name = name
        self.type = declared_type
        self._function = function

    def __call__(self, old: Any, new: Any) -> Any:
        return self._function(old, new)

    def __repr__(self) -> str:
        return f"named_reduction({self.name!r}, {self.type!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduction, (self.name, self.type)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduction) and (self.name, self.type) == (other.name, other.type)

    def __hash__(self) -> int:
        return hash((self.name, self.type))


def named_reduction(name: str, declared_type: Any) -> Reduction:
    """The named reduction for a type, given in any notation.

    >>> named_reduction("any", bool)(False, True)
    True
    >>> named_reduction("sum", "tinyint")(100, 100)
    Traceback (most recent call last):
    OverflowError: integer out of range for BYTE (8 bits)
    """
    return Reduction(name, of(declared_type))


def _checked(declared: Type, combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any] | None:
    """``combine`` on numbers, with the result checked or rounded to the type; None for other types."""
    if declared.name in INTEGER_BITS:
        fit = convert.integer_converter(declared.name, INTEGER_BITS[declared.name])
        return lambda old, new: fit(combine(old, new))
    if declared.name == "DOUBLE":
        return combine
    if declared.name == "FLOAT":
        return lambda old, new: _to_single(combine(old, new))
    return None


def _to_single(number: float) -> float:
    """Round ``number`` to single precision as the processor does: a number that is too large becomes infinite."""
    try:
        rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
    return rounded


def _sum(declared: Type) -> Callable[[Any, Any], Any] | None:
    if not isinstance(declared, DecimalType):
        return _checked(declared, operator.add)
    # Add unscaled integers: decimal's own addition rounds to the precision of its context.
    unscaled = convert.unscaled_converter(declared.precision, declared.scale)
    limit, scale = 10**declared.precision, declared.scale

    def add(old: Any, new: Any) -> Any:
        total = unscaled(old) + unscaled(new)
        if not -limit < total < limit:
            raise OverflowError(f"the sum has too many digits for {declared!r}")
        return convert.decimal_from_unscaled(total, scale)

    return add


def _smaller(declared: Type) -> Callable[[Any, Any], Any] | None:
    rank = ordering(declared)
    return None if rank is None else lambda old, new: new if rank(new) < rank(old) else old


def _larger(declared: Type) -> Callable[[Any, Any], Any] | None:
    rank = ordering(declared)
    return None if rank is None else lambda old, new: new if rank(new) > rank(old) else old


def _truth(declared: Type, combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any] | None:
    return combine if declared.name == "BOOL" else None


_MAKERS: dict[str, Callable[[Type], Callable[[Any, Any], Any] | None]] = {
    "sum": _sum,
    "min": _smaller,
    "max": _larger,
    "first": lambda declared: lambda old, new: old,
    "last": lambda declared: lambda old, new: new,
    "product": lambda declared: _checked(declared, operator.mul),
    "any": lambda declared: _truth(declared, operator.or_),
    "all": lambda declared: _truth(declared, operator.and_),
}
_TAKES = {
    "sum": "integers, DOUBLE, FLOAT and DECIMAL",
    "product": "integers, DOUBLE and FLOAT",
    "min": "numbers, BOOL, STRING, BYTES, dates, timestamps, and tuples and rows of these",
    "max": "numbers, BOOL, STRING, BYTES, dates, timestamps, and tuples and rows of these",
    "any": "BOOL",
    "all": "BOOL",
}
REDUCTION_NAMES = tuple(_MAKERS)


def _identity(value: Any) -> Any:
    return value


def _float_rank(value: float) -> tuple[bool, float]:
    return (True, 0.0) if value != value else (False, value)


def ordering(declared: Type) -> Callable[[Any], Any] | None:
    """A function from values to keys that compare as in Spark; None if the type has no order here."""
    if declared.name in _FLOATS:
        return _float_rank
    if declared.name in _ORDERED:
        return _identity
    if not isinstance(declared, (TupleType, RowType)):
        return None
    ranks: list[Callable[[Any], Any]] = []
    for part in declared.types:
        rank = ordering(part)
        if rank is None:
            return None
        ranks.append(rank)
    read: Callable[[Any], Any] = record_reader(declared.names) if isinstance(declared, RowType) else _identity

    def rank_record(value: Any) -> tuple[Any, ...]:
        fields = zip(ranks, read(value), strict=True)
        return tuple((0,) if field is None else (1, rank(field)) for rank, field in fields)

    return rank_record
