"""The types under measurement: how objects and Arrow columns are made from numbers, and read back.

``Kind.java`` of the Flink peer has the same types made from the same numbers, so that both sides hold the same state.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

import statebackend as sb
from bench.flink.keys import Int64Array

#: Microseconds of the first timestamp, and between two.
EPOCH_MICROS, STEP_MICROS = 1_700_000_000_000_000, 1009
DAYS, SCALE, PREFIX, NAMES = 20_000, 2, "user-", ("a", "b", "c")

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_MICROSECOND = datetime.timedelta(microseconds=1)


class Kind(ABC):
    """A type, by the name that Spark gives it.

    >>> kind = KINDS["struct<a:bigint,b:string>"]
    >>> kind.objects(np.array([7]))
    [(7, 'user-7')]
    >>> kind.numbers((7, "user-7")), kind.held(np.array([7])).tolist()
    ([7, 7], [[7, 7]])
    """

    name: str
    #: What Flink's side stores.
    java: str

    @property
    def type(self) -> Any:
        """The type as the backend takes it."""
        return sb.types.of(self.name)

    @abstractmethod
    def make(self, number: int) -> Any:
        """A fresh object."""

    def objects(self, numbers: Int64Array) -> list[Any]:
        """Fresh objects of these numbers."""
        return [self.make(number) for number in numbers.tolist()]

    @abstractmethod
    def numbers(self, made: Any) -> list[int]:
        """The numbers in an object."""

    @abstractmethod
    def held(self, numbers: Int64Array) -> Int64Array:
        """The numbers in the objects of these numbers, a row for each."""

    @abstractmethod
    def arrow(self, numbers: Int64Array) -> pa.Array:
        """The objects of these numbers as a column."""


class Bigint(Kind):
    name, java = "bigint", "Long"

    def make(self, number: int) -> int:
        return number

    def objects(self, numbers: Int64Array) -> list[int]:
        made: list[int] = numbers.tolist()
        return made

    def numbers(self, made: int) -> list[int]:
        return [made]

    def held(self, numbers: Int64Array) -> Int64Array:
        return numbers.reshape(-1, 1)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.array(numbers)


def _number_of(text: str) -> int:
    if not text.startswith(PREFIX):
        raise ValueError("a string that nobody wrote")
    return int(text[len(PREFIX) :])


class String(Kind):
    name, java = "string", "String"

    def make(self, number: int) -> str:
        return f"{PREFIX}{number}"

    def numbers(self, made: str) -> list[int]:
        return [_number_of(made)]

    def held(self, numbers: Int64Array) -> Int64Array:
        return numbers.reshape(-1, 1)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.array(self.objects(numbers), pa.string())


class Timestamp(Kind):
    name, java = "timestamp", "Instant"

    def make(self, number: int) -> datetime.datetime:
        return _EPOCH + datetime.timedelta(microseconds=EPOCH_MICROS + number * STEP_MICROS)

    def numbers(self, made: datetime.datetime) -> list[int]:
        return [(made - _EPOCH) // _MICROSECOND]

    def held(self, numbers: Int64Array) -> Int64Array:
        return (EPOCH_MICROS + numbers * STEP_MICROS).reshape(-1, 1)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.array(self.held(numbers)[:, 0]).cast(pa.timestamp("us", tz="UTC"))


class Date(Kind):
    name, java = "date", "LocalDate"

    def make(self, number: int) -> datetime.date:
        return datetime.date.fromordinal(_EPOCH_DAY + number % DAYS)

    def numbers(self, made: datetime.date) -> list[int]:
        return [made.toordinal() - _EPOCH_DAY]

    def held(self, numbers: Int64Array) -> Int64Array:
        return (numbers % DAYS).reshape(-1, 1)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.array(self.held(numbers)[:, 0].astype(np.int32)).cast(pa.date32())


class DecimalOfTwo(Kind):
    name, java = "decimal(18,2)", "BigDecimal"

    def make(self, number: int) -> Decimal:
        return Decimal(number).scaleb(-SCALE)

    def numbers(self, made: Decimal) -> list[int]:
        return [int(made.scaleb(SCALE))]

    def held(self, numbers: Int64Array) -> Int64Array:
        return numbers.reshape(-1, 1)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        # Sixteen bytes each, the lower half first.
        words = np.stack([numbers, numbers >> 63], axis=1)
        return pa.Array.from_buffers(pa.decimal128(18, SCALE), len(numbers), [None, pa.py_buffer(words)])


class StructOfNumbers(Kind):
    name, java = "struct<a:bigint,b:bigint>", "Tuple2"

    def make(self, number: int) -> tuple[int, int]:
        return number, number + 1

    def numbers(self, made: Any) -> list[int]:
        return list(made)

    def held(self, numbers: Int64Array) -> Int64Array:
        return numbers.reshape(-1, 1) + np.arange(2)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.StructArray.from_arrays([pa.array(numbers), pa.array(numbers + 1)], ["a", "b"])


class StructWithString(Kind):
    name, java = "struct<a:bigint,b:string>", "Row"

    def make(self, number: int) -> tuple[int, str]:
        return number, f"{PREFIX}{number}"

    def numbers(self, made: Any) -> list[int]:
        return [made[0], _number_of(made[1])]

    def held(self, numbers: Int64Array) -> Int64Array:
        return np.stack([numbers, numbers], axis=1)

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.StructArray.from_arrays([pa.array(numbers), KINDS["string"].arrow(numbers)], ["a", "b"])


class OfThree(Kind):
    """A collection of three numbers in a row."""

    def held(self, numbers: Int64Array) -> Int64Array:
        return numbers.reshape(-1, 1) + np.arange(len(NAMES))

    def _columns(self, numbers: Int64Array) -> tuple[pa.Array, pa.Array]:
        """Where each collection begins, and what all of them hold."""
        offsets = np.arange(len(numbers) + 1, dtype=np.int32) * len(NAMES)
        return pa.array(offsets), pa.array(self.held(numbers).ravel())


class Array(OfThree):
    name, java = "array<bigint>", "List"

    def make(self, number: int) -> list[int]:
        return [number, number + 1, number + 2]

    def numbers(self, made: list[int]) -> list[int]:
        return made

    def arrow(self, numbers: Int64Array) -> pa.Array:
        return pa.ListArray.from_arrays(*self._columns(numbers))


class Map(OfThree):
    name, java = "map<string,bigint>", "Map"

    def make(self, number: int) -> dict[str, int]:
        return {name: number + i for i, name in enumerate(NAMES)}

    def numbers(self, made: dict[str, int]) -> list[int]:
        if tuple(made) != NAMES:
            raise ValueError("a map with other keys")
        return list(made.values())

    def arrow(self, numbers: Int64Array) -> pa.Array:
        offsets, values = self._columns(numbers)
        return pa.MapArray.from_arrays(offsets, pa.array(list(NAMES) * len(numbers), pa.string()), values)


#: All types, by name.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Bigint(),
        String(),
        Timestamp(),
        Date(),
        DecimalOfTwo(),
        StructOfNumbers(),
        StructWithString(),
        Array(),
        Map(),
    )
}
