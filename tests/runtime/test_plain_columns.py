"""Dates, timestamps and decimals between Arrow and rows: the values that Arrow itself gives and takes."""

from __future__ import annotations

import datetime
import decimal
import random
import zoneinfo

import pyarrow as pa
import pytest

from statebackend.errors import SerializationError
from statebackend.runtime.arrow_rows import OutputSchema, column_values

pytestmark = pytest.mark.checked

UTC = datetime.timezone.utc
KINDS = [
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us", "America/New_York"),
    pa.decimal128(18, 2),
    pa.decimal128(38, 0),
    pa.decimal128(38, 38),
]


def random_column(rng: random.Random, kind: pa.DataType, n: int) -> pa.Array:
    if pa.types.is_decimal(kind):
        unscaled = [rng.randint(-(10**kind.precision) + 1, 10**kind.precision - 1) for _ in range(n)]
        some = [decimal.Decimal(f"{number}E-{kind.scale}") for number in unscaled]
        return pa.array([value if rng.random() < 0.8 else None for value in some], kind)
    low, high = (
        (-719_162, 2_932_896) if kind == pa.date32() else (-62_135_596_800_000_000, 253_402_300_799_999_999)
    )
    numbers = [rng.choice((low, high, rng.randint(low, high), rng.randint(-10, 10))) for _ in range(n)]
    plain = pa.array([number if rng.random() < 0.8 else None for number in numbers], pa.int64())
    return plain.cast(pa.int32()).view(kind) if kind == pa.date32() else plain.view(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_columns_become_the_values_that_arrow_gives(rng: random.Random, kind: pa.DataType) -> None:
    for n in (0, 1, 7, 300):
        column = random_column(rng, kind, n)
        for part in (
            column,
            column.slice(n // 3),
            column.slice(n // 3, n // 2),
            pa.chunked_array([column, column]),
        ):
            # Times with a zone are read in UTC: those of another zone may lie beyond Python's years.
            aware = pa.types.is_timestamp(kind) and kind.tz is not None
            expected = part.cast(pa.timestamp("us", "UTC")).to_pylist() if aware else part.to_pylist()
            found = column_values(part)
            assert not aware or all(value is None or value.tzinfo is UTC for value in found)
            assert found == expected
            assert list(map(type, found)) == list(map(type, expected))
            assert list(map(str, found)) == list(map(str, expected))


@pytest.mark.parametrize("number", [-719_163, 2_932_897])
def test_a_date_that_python_does_not_have_names_its_column(number: int) -> None:
    with pytest.raises(SerializationError, match="column 'day'"):
        column_values(pa.array([0, None, number], pa.int32()).view(pa.date32()), "day")


@pytest.mark.parametrize("ddl", ["date", "timestamp", "timestamp_ntz"])
def test_times_are_written_as_arrow_writes_them(rng: random.Random, ddl: str) -> None:
    schema = OutputSchema(f"at {ddl}")
    kind = schema.arrow.field("at").type
    values = random_column(rng, kind, 500).to_pylist()
    if ddl == "timestamp":
        zone = zoneinfo.ZoneInfo("Asia/Kolkata")
        middle = [v for v in values if v is not None and 1000 < v.year < 9000]
        values += [value.astimezone(zone) for value in middle]
    assert (
        schema.table_of_rows([(value,) for value in values])
        .column("at")
        .combine_chunks()
        .equals(pa.array(values, kind))
    )


@pytest.mark.parametrize(
    ("ddl", "wrong"),
    [
        ("date", datetime.datetime(2020, 1, 1)),
        ("date", 7),
        ("timestamp", datetime.datetime(2020, 1, 1)),
        ("timestamp", datetime.date(2020, 1, 1)),
        ("timestamp_ntz", datetime.datetime(2020, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_wrong_time_names_its_column_and_position(ddl: str, wrong: object) -> None:
    with pytest.raises(SerializationError, match="output column 'at', position 2"):
        OutputSchema(f"at {ddl}").table_of_rows([(None,), (None,), (wrong,)])
