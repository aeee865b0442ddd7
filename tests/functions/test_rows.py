"""Rows from Arrow and back, of every type; and `KeyRowsFunction`, which gets all rows of a key at once."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from functions.conftest import each_way
from type_samples import same

import statebackend as sb
from statebackend.runtime.arrow_rows import OutputSchema, column_values, rows_of
from statebackend.runtime.output import BatchOutput
from statebackend.testing import Harness

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
        ("a string", ("\ud800",), "output column 'a', position 0"),
        ("a decimal(4,2)", (decimal.Decimal("123.45"),), "output column 'a', position 0"),
        ("a array<int>", ([1, "x"],), "output column 'a', position 0"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_named(ddl: str, row: Any, where: str) -> None:
    with pytest.raises(sb.SerializationError, match=where):
        OutputSchema(ddl).table_of_rows([row])


def test_an_integer_out_of_range_is_an_overflow() -> None:
    with pytest.raises(OverflowError, match="output column 'a', position 1"):
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
    collected = BatchOutput({"main": schema})
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
    with pytest.raises(sb.SerializationError, match=r"\[SERIALIZATION\.OUTPUT\]"):
        OutputSchema("user string, n int").conformed(pa.table(columns))


def test_objects_that_are_not_batches_are_refused() -> None:
    for batches in ({"main": {"n": [1]}}, {"main": "n"}, 7, ["n"]):
        with pytest.raises(sb.SerializationTypeError, match="gave a"):
            BatchOutput({"main": OutputSchema("n int")}).add_batches(batches)
    with pytest.raises(sb.UsageError, match=r"\[USAGE\.NO_OUTPUT\]"):
        BatchOutput({"main": OutputSchema("n int")}).add_batches({"n": [1]})


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


class Gathered(sb.KeyRowsFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(sb.ReducingStateDescriptor("n", "sum", int))

    def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
        assert ctx.current_key == key or key != key  # NaN
        self.n.add(len(rows))
        ctx.timer_service().register_processing_time_timer(ctx.now + 10)
        yield key, [row.n for row in rows], self.n.get()

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        yield ctx.current_key, [timestamp], self.n.get()

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield None, [row.n], -1


KEYS: dict[str, tuple[Any, list[Any]]] = {
    "bigint": (pa.int64(), [0, -1, 2**40]),
    "string": (pa.string(), ["", "ann", "é" * 40]),
    "double": (pa.float64(), [0.0, -0.0, float("nan"), 1.5]),
    "struct<a:int,b:string>": (
        pa.struct({"a": pa.int32(), "b": pa.string()}),
        [{"a": 1, "b": None}, {"a": 1, "b": "x"}],
    ),
    "boolean": (pa.bool_(), [True, False]),
    "decimal(30,2)": (pa.decimal128(30, 2), [1, 2]),
}


@each_way
@pytest.mark.parametrize("name", list(KEYS))
def test_each_key_comes_once_with_its_rows_in_order(
    backend: str, name: str, rng: random.Random, either_way: int | None
) -> None:
    arrow, samples = KEYS[name]
    with Harness(Gathered(), key="k", backend=backend, key_type=name) as harness:
        counts: dict[str, int] = {}
        for _ in range(3):
            keys = rng.choices(samples, k=30)
            table = pa.table({"k": pa.array(keys, arrow), "n": list(range(30))})
            expected: dict[str, list[int]] = {}
            for n, key in enumerate(table["k"].to_pylist()):
                expected.setdefault(repr(0.0 if key == 0 and arrow == pa.float64() else key), []).append(n)
            given = harness.process_batch(table)
            if either_way is not None:  # then keys come by their values
                given.sort(key=lambda each: each[1])
            assert [rows for _, rows, _ in given] == list(expected.values())
            for (text, rows), (_, _, total) in zip(expected.items(), given, strict=True):
                counts[text] = counts.get(text, 0) + len(rows)
                assert total == counts[text]


def test_composite_keys_order_broadcast_rows_and_timers(either_way: int | None) -> None:
    rows = [
        {"a": a, "b": b, "n": n, "all": to_all}
        for a, b, n, to_all in ((1, "x", 9, False), (2, "x", 5, False), (1, "x", 3, False), (1, "y", 7, True))
    ]
    with Harness(Gathered(), key=["a", "b"], order_by="n", broadcast_when="all") as harness:
        given = harness.process_batch(rows)
        assert [(key and tuple(key), numbers, n) for key, numbers, n in given] == [
            (None, [7], -1),
            ((1, "x"), [3, 9], 2),
            ((2, "x"), [5], 1),
        ]
        assert sorted(tuple(key) for key, _, _ in harness.advance_processing_time(10)) == [(1, "x"), (2, "x")]
        given = harness.process_element({"a": 1, "b": "x", "n": 1, "all": False})
        assert [(tuple(key), *rest) for key, *rest in given] == [((1, "x"), [1], 3)]


def test_no_rows_no_call_and_many_rows_in_pieces() -> None:
    schema = "k bigint, n array<bigint>, total bigint"
    with Harness(Gathered(), key="k", schema=schema) as harness:
        assert (
            harness.process_batch(pa.table({"k": pa.array([], pa.int64()), "n": pa.array([], pa.int64())}))
            == []
        )
        many = pa.table({"k": pa.array(range(70_000)), "n": pa.array(range(70_000))})
        assert [row.k for row in harness.process_batch(many)] == list(range(70_000))


def test_a_key_that_fails_fails_the_batch() -> None:
    class Fails(Gathered):
        def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
            yield from super().process_rows(key, rows, ctx)
            if key == 2:
                raise ValueError("as told")

    with Harness(Fails(), key="k") as harness:
        with pytest.raises(ValueError, match="as told"):
            harness.process_batch([{"k": 1, "n": 1}, {"k": 2, "n": 1}])
        assert harness.keyed.num_entries() == 0
        assert harness.process_batch([{"k": 1, "n": 1}]) == [(1, [1], 1)]


def test_options_for_single_rows_are_refused() -> None:
    for options in (
        {"errors": sb.to_output("errors"), "schema": {"main": "n int", "errors": "k bigint"}},
        {"event_time": sb.EventTime("at", timers="between_rows")},
    ):
        with pytest.raises(sb.UsageError, match="KeyedProcessFunction"):
            Harness(Gathered(), key="k", **options)


def test_state_in_event_time_uses_the_watermark_after_the_batch() -> None:
    class Expiring(sb.KeyRowsFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            ttl = sb.StateTtlConfig(
                10, ttl_time_characteristic=sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
            )
            self.n = ctx.get_reducing_state(
                sb.ReducingStateDescriptor("n", "sum", int).enable_time_to_live(ttl)
            )

        def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
            self.n.add(len(rows))
            yield key, self.n.get(), ctx.watermark

    with Harness(Expiring(), key="k", event_time="at") as harness:
        assert harness.process_batch([{"k": 1, "at": 5}, {"k": 1, "at": 2}]) == [(1, 2, None)]
        assert harness.process_batch([{"k": 1, "at": 14}]) == [(1, 3, 5)]
        assert harness.process_batch([{"k": 1, "at": 24}]) == [(1, 1, 14)]
