"""One row for each type of value: how it is stored, and under which names the rest of the world knows it.

Everything that tells types apart reads this table: conversions, encoders, columns, the compiled core. To add a type of
value, add its row; docs/internals/entry.md has the other steps.

>>> LAYOUTS["SHORT"].family, LAYOUTS["SHORT"].width, str(LAYOUTS["SHORT"].arrow)
('integer', 2, 'int16')
>>> LAYOUTS["DATE"].pack(datetime.date(1970, 1, 2)), LAYOUTS["DATE"].unpack(1)
(1, datetime.date(1970, 1, 2))
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from statebackend.types import convert

Family = Literal["float", "integer", "boolean", "time", "decimal", "bytes", "nested", "object"]


def _same(value: Any) -> Any:
    return value


class Layout(NamedTuple):
    """How the values of a type are stored."""

    #: Types of one family are stored, compared and converted alike. A time is stored as an integer.
    family: Family
    #: The number of the type in compiled code, as `TypeCode` in `_core/tables/values.pxd` has it.
    code: int
    #: Bytes of every serialised value, or None where they vary.
    width: int | None = None
    #: numpy's name of the stored number; empty where the stored form is bytes.
    dtype: str = ""
    arrow: Any = None
    #: The class of its values as state returns them.
    python: type = object
    #: Checks a value, and returns the number or bytes that represent it.
    pack: Callable[[Any], Any] = _same
    #: Undoes `pack`.
    unpack: Callable[[Any], Any] = _same
    #: The key of comparisons; None: the type is not ordered.
    rank: Callable[[Any], Any] | None = _same
    #: Its name in `pyspark.sql.types`.
    spark: str = "BinaryType"
    #: Its names in DDL, the preferred one first.
    ddl: tuple[str, ...] = ("binary",)
    #: For a time: the first and the last stored number that Python has a value for.
    bounds: tuple[int, int] | None = None

    @property
    def is_number(self) -> bool:
        """True if entries hold the number itself."""
        return self.family in ("float", "integer", "boolean")


def _float_rank(value: float) -> tuple[bool, float]:
    return (True, 0.0) if value != value else (False, value)  # as in Spark, NaN is greater than other numbers


def _integer(name: str, code: int, width: int, spark: str, *ddl: str) -> Layout:
    arrow = getattr(pa, f"int{8 * width}")()
    pack = convert.integer_converter(name, 8 * width)
    return Layout("integer", code, width, f"<i{width}", arrow, int, pack, int, spark=spark, ddl=ddl)


def _float(code: int, width: int, arrow: Any, pack: Any, spark: str, *ddl: str) -> Layout:
    return Layout(
        "float", code, width, f"<f{width}", arrow, float, pack, rank=_float_rank, spark=spark, ddl=ddl
    )


_DAYS = (-719_162, 2_932_896)
_MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)

LAYOUTS: dict[str, Layout] = {
    "DOUBLE": _float(1, 8, pa.float64(), convert.double, "DoubleType", "double"),
    "FLOAT": _float(2, 4, pa.float32(), convert.single, "FloatType", "float", "real"),
    "LONG": _integer("LONG", 3, 8, "LongType", "bigint", "long"),
    "INT": _integer("INT", 4, 4, "IntegerType", "int", "integer"),
    "SHORT": _integer("SHORT", 5, 2, "ShortType", "smallint", "short"),
    "BYTE": _integer("BYTE", 6, 1, "ByteType", "tinyint", "byte"),
    "BOOL": Layout(
        "boolean", 7, 1, "?", pa.bool_(), bool, convert.truth, convert.from_truth,
        spark="BooleanType", ddl=("boolean", "bool"),
    ),
    "DATE": Layout(
        "time", 8, 4, "<i4", pa.date32(), datetime.date, convert.days, convert.from_days,
        spark="DateType", ddl=("date",), bounds=_DAYS,
    ),
    "TIMESTAMP": Layout(
        "time", 9, 8, "<i8", pa.timestamp("us", tz="UTC"), datetime.datetime,
        convert.microseconds, convert.from_microseconds,
        spark="TimestampType", ddl=("timestamp", "timestamp_ltz"), bounds=_MICROSECONDS,
    ),
    "TIMESTAMP_NTZ": Layout(
        "time", 10, 8, "<i8", pa.timestamp("us"), datetime.datetime,
        convert.naive_microseconds, convert.from_naive_microseconds,
        spark="TimestampNTZType", ddl=("timestamp_ntz",), bounds=_MICROSECONDS,
    ),
    "STRING": Layout(
        "bytes", 13, None, "", pa.string(), str, convert.utf8, convert.text_from_utf8,
        spark="StringType", ddl=("string",),
    ),
    "BYTES": Layout("bytes", 14, None, "", pa.binary(), bytes, convert.raw_bytes, bytes),
    "TUPLE": Layout("nested", 15, rank=None),
    "ROW": Layout("nested", 15, rank=None),
    "LIST": Layout("nested", 16, rank=None),
    "MAP": Layout("nested", 17, rank=None),
    "PICKLE": Layout("object", 18, arrow=pa.binary(), rank=None),
    "CUSTOM": Layout("object", 18, rank=None),
}  # fmt: skip


@lru_cache(maxsize=1024)
def decimal_layout(precision: int, scale: int) -> Layout:
    """The layout of a DECIMAL: its unscaled value in 8 bytes, or in 16 for more than 18 digits."""
    code, width, dtype = (11, 8, "<i8") if precision <= 18 else (12, 16, "")
    return Layout(
        "decimal", code, width, dtype, pa.decimal128(precision, scale), decimal.Decimal,
        convert.unscaled_converter(precision, scale),
        lambda number: convert.decimal_from_unscaled(number, scale),
        spark="DecimalType", ddl=(f"decimal({precision},{scale})",),
    )  # fmt: skip
