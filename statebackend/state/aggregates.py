"""The named reductions and aggregates, and the interface for a user's own aggregate.

Reductions are ``"sum" "min" "max" "first" "last" "product" "any" "all"``, aggregates ``"count" "sum" "avg" "min" "max"
"variance" "stddev"``. Each is defined here once, in plain Python, over values as a state returns them; a compiled
version in a backend keeps the same accumulators and does the same operations in the same order.

As in Spark, NaN is greater than any other number, structs compare field by field with nulls first, and strings compare
by their UTF-8 bytes. Results of a reduction have the declared type. Averages and deviations follow Spark's formulas:
each value updates a central moment, and moments merge without cancellation.

>>> add = named_reduction("sum", "bigint")
>>> add(2, 3)
5
>>> largest = named_reduction("max", "double")
>>> largest(float("nan"), 1.0)
nan
>>> spread = named_aggregate("stddev", "bigint")
>>> accumulator = spread.create_accumulator()
>>> for value in (2, 4, 4, 4, 5, 5, 7, 9):
...     accumulator = spread.add(value, accumulator)
>>> round(spread.get_result(accumulator), 6)
2.13809
"""

from __future__ import annotations

import math
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic

from statebackend.errors import SerializationRangeError, UsageError
from statebackend.types import (
    ACC,
    DOUBLE,
    IN,
    LONG,
    OUT,
    ROW,
    DecimalType,
    RowType,
    Subscriptable,
    TupleType,
    Type,
    convert,
    of,
    record_reader,
    row_class,
)

_SINGLE = struct.Struct("<f")


class Reduction:
    """A named reduction for one type: ``reduction(old, new)`` returns the value to keep; picklable."""

    __slots__ = ("_function", "name", "type")

    def __init__(self, name: str, declared_type: Type) -> None:
        if name not in _MAKERS:
            raise UsageError(
                "unknown reduction",
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
    layout = declared.layout
    if layout.family == "integer":

        def packed(old: Any, new: Any) -> Any:
            try:
                return layout.pack(combine(old, new))
            except SerializationRangeError as error:  # neither value was out of range
                raise OverflowError(error.message) from None

        return packed
    if layout.family != "float":
        return None
    return combine if layout.width == 8 else lambda old, new: _to_single(combine(old, new))


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
    return combine if declared.layout.family == "boolean" else None


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


def ordering(declared: Type) -> Callable[[Any], Any] | None:
    """A function from values to keys that compare as in Spark; None if the type is not ordered here."""
    if not isinstance(declared, (TupleType, RowType)):
        return declared.layout.rank
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


# --- aggregates ---


class AggregateFunction(Subscriptable, ABC, Generic[IN, ACC, OUT]):
    """Folds values into an accumulator and makes a result of it; derive from it to write your own aggregate.

    ``add`` and ``merge`` may change and return the accumulator that they get, or return another.

    >>> class Longest(AggregateFunction):
    ...     def create_accumulator(self):
    ...         return ""
    ...     def add(self, value, accumulator):
    ...         return max(accumulator, value, key=len)
    ...     def get_result(self, accumulator):
    ...         return accumulator
    ...     def merge(self, a, b):
    ...         return max(a, b, key=len)
    >>> Longest().add("abc", "ab")
    'abc'
    """

    #: The type of results in Arrow, in any notation; None lets Arrow infer it. Vectorised reads use it.
    result_type: Any = None

    @abstractmethod
    def create_accumulator(self) -> ACC:
        """The accumulator that a new key starts from; never None."""

    @abstractmethod
    def add(self, value: IN, accumulator: ACC) -> ACC:
        """The accumulator after ``value``; never None."""

    @abstractmethod
    def get_result(self, accumulator: ACC) -> OUT:
        """The result so far."""

    @abstractmethod
    def merge(self, a: ACC, b: ACC) -> ACC:
        """The accumulator of the values of both, ``a``'s first; merging namespaces uses it."""


class NamedAggregate(AggregateFunction):
    """An aggregate with a name, for values of one type; picklable, made by `named_aggregate`."""

    name: str
    #: The type of values, of accumulators and of results.
    type: Type
    accumulator_type: Type
    result_type: Type

    def __init__(self, declared_type: Type) -> None:
        self.type = declared_type

    def __repr__(self) -> str:
        return f"named_aggregate({self.name!r}, {self.type!r})"

    def __reduce__(self) -> Any:
        return named_aggregate, (self.name, self.type)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedAggregate) and (self.name, self.type) == (other.name, other.type)

    def __hash__(self) -> int:
        return hash((self.name, self.type))

    def get_result(self, accumulator: Any) -> Any:
        return accumulator


class _Count(NamedAggregate):
    name = "count"
    accumulator_type = result_type = LONG

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + 1

    def merge(self, a: int, b: int) -> int:
        return a + b


class _Reduced(NamedAggregate):
    """Sum, minimum and maximum as reductions. The accumulator is None before the first value."""

    def __init__(self, name: str, declared_type: Type) -> None:
        super().__init__(declared_type)
        self.name = name
        self.accumulator_type = self.result_type = declared_type
        self._reduce = Reduction(name, declared_type)

    def create_accumulator(self) -> Any:
        return None

    def add(self, value: Any, accumulator: Any) -> Any:
        return value if accumulator is None else self._reduce(accumulator, value)

    def merge(self, a: Any, b: Any) -> Any:
        return self._reduce(a, b)


class _Average(NamedAggregate):
    name = "avg"
    accumulator_type = ROW(sum=DOUBLE, count=LONG)
    result_type = DOUBLE

    def create_accumulator(self) -> Any:
        return _AverageState(0.0, 0)

    def add(self, value: Any, accumulator: Any) -> Any:
        total, count = accumulator
        return _AverageState(total + float(value), count + 1)

    def get_result(self, accumulator: Any) -> float:
        total, count = accumulator
        return total / count  # type: ignore[no-any-return]

    def merge(self, a: Any, b: Any) -> Any:
        return _AverageState(a[0] + b[0], a[1] + b[1])


class _Variance(NamedAggregate):
    """Spark's CentralMomentAgg: the count, the mean, and the sum of squared distances from it."""

    name = "variance"
    accumulator_type = ROW(n=DOUBLE, avg=DOUBLE, m2=DOUBLE)
    result_type = DOUBLE

    def create_accumulator(self) -> Any:
        return _MomentState(0.0, 0.0, 0.0)

    def add(self, value: Any, accumulator: Any) -> Any:
        n, avg, m2 = accumulator
        n += 1.0
        delta = float(value) - avg
        delta_n = delta / n
        return _MomentState(n, avg + delta_n, m2 + delta * (delta - delta_n))

    def get_result(self, accumulator: Any) -> float | None:
        n, _, m2 = accumulator
        return None if n < 2.0 else m2 / (n - 1.0)

    def merge(self, a: Any, b: Any) -> Any:
        n1, avg1, m2_1 = a
        n2, avg2, m2_2 = b
        n = n1 + n2
        delta = avg2 - avg1
        delta_n = 0.0 if n == 0.0 else delta / n
        return _MomentState(n, avg1 + delta_n * n2, m2_1 + m2_2 + delta * delta_n * n1 * n2)


class _StandardDeviation(_Variance):
    name = "stddev"

    def get_result(self, accumulator: Any) -> float | None:
        variance = super().get_result(accumulator)
        return None if variance is None else math.sqrt(variance)


_AverageState: Any = row_class(("sum", "count"))
_MomentState: Any = row_class(("n", "avg", "m2"))
_NUMBERS = ("integer", "float", "decimal")
_OVER_NUMBERS: dict[str, type[NamedAggregate]] = {
    "avg": _Average,
    "variance": _Variance,
    "stddev": _StandardDeviation,
}
AGGREGATE_NAMES = ("count", "sum", "avg", "min", "max", "variance", "stddev")


def named_aggregate(name: str, declared_type: Any) -> NamedAggregate:
    """The named aggregate over values of a type, given in any notation.

    Results: ``count`` is LONG; ``sum``, ``min`` and ``max`` have the type of the values; ``avg``, ``variance`` and
    ``stddev`` are DOUBLE. The latter two are of the sample, None below two values. Integer overflow of a sum
    raises.
    """
    declared = of(declared_type)
    if name not in AGGREGATE_NAMES:
        raise UsageError(
            "unknown aggregate",
            code="USAGE.AGGREGATE",
            hint=f"use one of {', '.join(map(repr, AGGREGATE_NAMES))}, or an AggregateFunction",
        )
    if name == "count":
        return _Count(declared)
    is_ordered = name in ("min", "max")
    if ordering(declared) is None if is_ordered else declared.layout.family not in _NUMBERS:
        takes = _TAKES["min" if is_ordered else "sum"]
        raise UsageError(
            f"{name!r} does not work on {declared!r}",
            code="USAGE.AGGREGATE",
            hint=f"it works on {takes}; for other types give an AggregateFunction",
        )
    return _OVER_NUMBERS[name](declared) if name in _OVER_NUMBERS else _Reduced(name, declared)
