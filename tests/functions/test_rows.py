"""Rows from Arrow and back: every type, nulls, nesting, slices, and what does not fit the output schema."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from type_samples import same

import statebackend as sb
from statebackend.runtime.arrow_rows import OutputSchema, column_values, rows_of
from statebackend.runtime.output import Given

UTC = datetime.timezone.utc
AT = datetime.datetime(2024, 2, 29, 12, 0, 0, 123456)
SAMPLES: dict[str, list[Any]] = {
    "bigint": [0, -(2**63), 2**63 - 1, None],
    "int": [7, None, -1],
    "smallint": [7, -8],
    "tinyint": [None, 127],
    "double": [0.5, float("nan"), None, float("-inf")],
    "float": [0.5, None],
    "boolean": [True, None, False],
    "string": ["é", "", None, "日本"],
    "binary": [b"\xff\x00", None, b""],
    "date": [datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31)],
    "timestamp": [AT.replace(tzinfo=UTC), None],
    "timestamp_ntz": [
        AT,
        None,
        datetime.datetime(1, 1, 1),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999),
    ],
    "decimal(10,2)": [decimal.Decimal("1.50"), None],
    "decimal(38,18)": [decimal.Decimal("12345678901234567890.123456789012345678"), None],
    "array<string>": [["a", None], [], None, ["b"]],
    "map<string,bigint>": [{"a": 1, "b": None}, {}, None, {"c": 3}],
    "struct<x:bigint,at:timestamp>": [(1, AT.replace(tzinfo=UTC)), (None, None), None],
    "array<struct<x:int,tags:array<string>>>": [[(1, ["a"]), None, (2, None)], None, []],
    "map<string,struct<x:int,m:map<int,string>>>": [{"a": (1, {1: "x"})}, None, {"b": None}],
}


@pytest.mark.parametrize("ddl", SAMPLES)
def test_a_column_comes_back_as_it_was_given(ddl: str) -> None:
    values = SAMPLES[ddl]
    table = OutputSchema(f"c {ddl}").table_of_rows([(value,) for value in values])
    column = table.column("c")
    assert all(map(same, column_values(column), values))
    for start in range(len(values)):  # slices keep the offsets of the whole
        assert all(map(same, column_values(column.slice(start)), values[start:]))
    chunked = pa.chunked_array([column.chunk(0).slice(0, 1), column.chunk(0).slice(1)])
    assert all(map(same, column_values(chunked), values))


def test_nested_rows_are_named_tuples() -> None:
    table = pa.table({"user": ["ann"], "cart": [[{"item": "pen", "n": 2}]], "class": [1]})
    (row,) = rows_of(table)
    assert row.user == "ann"
    assert row.cart[0].item == "pen"
    assert row[2] == row._asdict()["class"] == 1


def test_times_are_utc_whatever_the_zone_of_the_column() -> None:
    array = pa.array([0], pa.timestamp("us", tz="Asia/Tokyo"))
    assert column_values(array) == [datetime.datetime(1970, 1, 1, tzinfo=UTC)]


def test_a_time_beyond_pythons_years_is_refused_by_column() -> None:
    array = pa.array([2**62], pa.timestamp("us"))
    with pytest.raises(sb.SerializationError, match="column 'at'"):
        column_values(array, "at")


class Pair(NamedTuple):
    n: int
    user: str


@dataclasses.dataclass
class Record:
    user: str
    n: int


def test_rows_may_be_given_in_any_form() -> None:
    schema = OutputSchema("user string, n bigint")
    rows = [("a", 1), {"n": 2, "user": "b"}, Pair(3, "c"), Record("d", 4)]
    assert [tuple(row.values()) for row in schema.table_of_rows(rows).to_pylist()] == [
        ("a", 1),
        ("b", 2),
        ("c", 3),
        ("d", 4),
    ]


@pytest.mark.parametrize(
    ("ddl", "row", "where"),
    [
        ("a int, b int", (1,), "output row 0 has 1 fields"),
        ("a int, b int", {"a": 1}, "dict with other fields"),
        ("a int", 7, "output row 0 is a int"),
        ("a int", "x", "output row 0 is a str"),
        ("a int", ("x",), "output column 'a', position 0"),
        ("a int", (True,), "output column 'a', position 0"),
        ("a bigint", (1.0,), "output column 'a', position 0"),
        ("a string", (b"x",), "output column 'a', position 0"),
        ("a string", ("\ud800",), "output column 'a', position 0"),
        ("a binary", ("x",), "output column 'a', position 0"),
        ("a date", (AT,), "output column 'a', position 0"),
        ("a timestamp", (AT,), "output column 'a', position 0"),
        ("a timestamp_ntz", (AT.replace(tzinfo=UTC),), "output column 'a', position 0"),
        ("a decimal(4,2)", (decimal.Decimal("123.45"),), "output column 'a', position 0"),
        ("a array<int>", ([1, "x"],), "output column 'a', position 0"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_named(ddl: str, row: Any, where: str) -> None:
    with pytest.raises(sb.SerializationError, match=where):
        OutputSchema(ddl).table_of_rows([row])


def test_an_integer_out_of_range_is_an_overflow() -> None:
    with pytest.raises(OverflowError, match="position 1, output column 'a'"):
        OutputSchema("a int").table_of_rows([(1,), (2**31,)])


def test_batches_are_brought_to_the_schema_where_nothing_is_lost() -> None:
    schema = OutputSchema("user string, n bigint, d decimal(10,2)")
    batch = pa.record_batch(
        {
            "n": pa.array([1, None], pa.int32()),
            "user": pa.array(["a", "b"], pa.large_string()),
            "d": [None, None],
        }
    )
    collected = Given({"main": schema})
    collected.add_batches([batch, None, pa.Table.from_batches([batch])])
    table = collected.result()["main"]
    assert table.schema == schema.arrow
    assert table.column("n").to_pylist() == [1, None, 1, None]


@pytest.mark.parametrize(
    "columns",
    [
        {"n": [1]},
        {"n": [1], "user": ["a"], "more": [1]},
        {"n": ["1"], "user": ["a"]},
        {"n": [1.0], "user": ["a"]},
        {"n": pa.array([2**40]), "user": ["a"]},
        {"n": [1], "user": [b"a"]},
    ],
)
def test_batches_that_do_not_fit_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(sb.SerializationError) as caught:
        OutputSchema("user string, n int").conformed(pa.table(columns))
    assert caught.value.code == "SERIALIZATION.OUTPUT"


def test_what_is_no_batch_is_refused() -> None:
    for batches in ({"main": {"n": [1]}}, {"main": "n"}, 7, ["n"]):
        with pytest.raises(sb.SerializationTypeError, match="gave a"):
            Given({"main": OutputSchema("n int")}).add_batches(batches)
    with pytest.raises(sb.UsageError) as caught:
        Given({"main": OutputSchema("n int")}).add_batches({"n": [1]})
    assert caught.value.code == "USAGE.NO_OUTPUT"


@pytest.mark.parametrize(
    "given",
    [
        "user bigint, n int",
        pa.schema([("user", pa.int64()), ("n", pa.int32())]),
        sb.types.of("user bigint, n int"),
    ],
)
def test_a_schema_may_be_given_in_any_notation(given: Any) -> None:
    assert OutputSchema(given).row_type == sb.types.ROW(user=sb.types.LONG, n=sb.types.INT)
