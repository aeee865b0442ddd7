"""The compiled loop over rows: the rows that it makes, the keys that it sets, and the columns that it fills."""

from __future__ import annotations

import collections
import datetime
import decimal
import random
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from type_samples import same, value_types, values_of

import statebackend as sb
from statebackend import types as t
from statebackend._core.codecs.row_maker import RowMaker
from statebackend._core.core_probe import bytes_of_row_key
from statebackend.columns.codec_factory import key_codec, type_codec
from statebackend.errors import UsageError
from statebackend.keys import key_encoder
from statebackend.runtime import Batch, Job, Task
from statebackend.runtime.arrow_rows import OutputSchema, column_values, row_maker
from statebackend.state import check_values, to_arrow
from statebackend.types import RowType, of

pytestmark = pytest.mark.checked

UTC = datetime.timezone.utc
Process = Callable[[Any, sb.FunctionContext], Any]


class Calls(sb.KeyedProcessFunction):
    """Whatever a test wants to be called for each row."""

    def __init__(self, process: Process) -> None:
        self.process_element = process  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> Calls:
        return Calls(self.process_element)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        raise AssertionError("replaced in __init__")


def run(
    process: Process,
    table: pa.Table,
    key: str | list[str] = "k",
    schema: Any = None,
    key_type: Any = "bigint",
    backend: str = "heap",
) -> Any:
    job = Job(Calls(process), key=key, schema=schema, backend=backend)
    task = Task(job, of(key_type))
    try:
        return task.run(0, Batch(job, table), now=0)["main"]
    finally:
        task.close()


@given(st.data())
def test_rows_equal_the_columns(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(value_types, min_size=1, max_size=4))
    count = data.draw(st.integers(0, 12))
    columns = [
        to_arrow(data.draw(st.lists(st.none() | values_of(kind), min_size=count, max_size=count)), kind)
        for kind in kinds
    ]
    batch = pa.record_batch(columns, names=[f"c{at}" for at in range(len(kinds))])
    start = data.draw(st.integers(0, count))
    for part in (batch, batch.slice(start)):
        expected = list(zip(*map(column_values, part.columns), strict=True))
        found = list(row_maker(part))
        assert len(found) == len(expected)
        assert all(same(tuple(row), values) for row, values in zip(found, expected, strict=True))


def test_a_row_that_is_kept_stays_as_it_was() -> None:
    table = pa.table({"k": range(1000), "s": [f"text {at}" for at in range(1000)]})
    kept: list[Any] = []
    ids = set()

    def process(row: Any, ctx: sb.FunctionContext) -> None:
        ids.add(id(row))
        if row.k % 3 == 0:
            kept.append(row)

    run(process, table)
    assert kept == [(at, f"text {at}") for at in range(0, 1000, 3)]
    assert all(row.s == f"text {row.k}" for row in kept)
    assert len(ids) < 1000, "nobody kept the others"


def test_a_row_may_be_hashed_and_come_again_as_another() -> None:
    hashes = [hash(row) for row in row_maker(pa.record_batch({"n": [1, 2, 1]}))]
    assert hashes == [hash((1,)), hash((2,)), hash((1,))]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([0, 2_932_897], pa.int32()).view(pa.date32()), "date32"),
        (pa.array([0, 2**62]).view(pa.timestamp("us")), "timestamp"),
        (
            pa.Array.from_buffers(
                pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
            ),
            "string",
        ),
    ],
    ids=["date", "timestamp", "string"],
)
def test_a_value_that_python_does_not_have_names_its_column(column: pa.Array, kind: str) -> None:
    table = pa.table({"k": [1, 2], "wrong": column})
    with pytest.raises(sb.SerializationError, match=f"column 'wrong' of type {kind}"):
        run(lambda row, ctx: None, table)


def test_buffers_that_are_too_short_are_refused() -> None:
    number, truth, text = (type_codec(kind) for kind in (t.LONG, t.BOOL, t.STRING))
    for column in (
        [1],
        (number, 1, None, None, bytes(16)),
        (number, 0, b"", None, bytes(16)),
        (truth, 7, None, None, bytes(1)),
        (text, 0, None, bytes(8), b""),
        (text, 0, None, None, b""),
        (type_codec(t.LIST(t.LONG)), 0, None, None, bytes(16)),
        (None, 0, None, None, bytes(16)),
    ):
        with pytest.raises(UsageError):
            RowMaker(2, tuple, [column], None)


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


KEYS: dict[str, list[Any]] = {
    "bigint": [5, -(2**63), 2**63 - 1, 5, 0],
    "int": [5, -(2**31), 5],
    "tinyint": [127, -128, 127],
    "string": ["é", "", "é", "a" * 300],
    "binary": [b"\xff", b"", b"\xff"],
    "date": [datetime.date(1, 1, 1), datetime.date(2024, 2, 29)],
    "timestamp": [datetime.datetime(2024, 2, 29, 1, tzinfo=UTC), datetime.datetime(1, 1, 1, tzinfo=UTC)],
    "decimal(10,2)": [decimal.Decimal("1.50"), decimal.Decimal("-0.01"), decimal.Decimal("1.50")],
    "double": [0.5, -0.0, 0.0, float("inf")],
    "boolean": [True, False, True],
}


@pytest.mark.parametrize(
    ("ddl", "backend"),
    [*((ddl, "heap") for ddl in KEYS), ("string", "reference"), ("string", "rocksdb"), ("double", "rocksdb")],
)
def test_keys_equal_the_column(ddl: str, backend: str) -> None:
    keys = KEYS[ddl] * 7
    table = pa.table({"k": pa.array(keys, of(ddl).arrow)})
    seen: list[tuple[Any, Any]] = []

    class Counts(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.n = ctx.get_value_state(sb.ValueStateDescriptor("n", int))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            self.n.update((self.n.value() or 0) + 1)
            seen.append((ctx.current_key, ctx.current_key))
            yield self.n.value()

    with sb.testing.Harness(Counts(), key="k", backend=backend, key_type=ddl) as harness:
        given = harness.process_batch(table)
        assert given == [keys[: at + 1].count(key) for at, key in enumerate(keys)]
        assert all(same(once, key) or once == key for (once, _), key in zip(seen, keys, strict=True))
        assert backend != "heap" or all(once is again for once, again in seen), "made once"


BYTE_KEYS = [
    t.STRING,
    t.BYTES,
    t.TUPLE(t.LONG, t.LONG),
    t.TUPLE(t.SHORT, t.STRING, t.BYTES),
    t.TUPLE(t.STRING),
    t.TUPLE(t.LONG, t.DATE),
    t.TUPLE(t.LONG, t.BOOL),
]


@given(st.data())
def test_facts_about_later_keys_are_right(data: st.DataObject) -> None:
    """The bytes of a later row's key are those of the encoder, wherever all of its fields lie in Arrow as they are."""
    declared = data.draw(st.sampled_from(BYTE_KEYS))
    fields = declared.types if isinstance(declared, t.TupleType) else (declared,)
    drawn = st.tuples(*(st.none() | values_of(field) for field in fields))
    keys = data.draw(st.lists(drawn, min_size=1, max_size=8))
    columns = [
        to_arrow(list(values), field) for values, field in zip(zip(*keys, strict=True), fields, strict=True)
    ]
    places = tuple(data.draw(st.permutations(range(len(fields)))))
    batch = pa.record_batch(
        [columns[places.index(at)] for at in range(len(fields))],
        names=[f"c{at}" for at in range(len(fields))],
    )
    start = data.draw(st.integers(0, len(keys)))
    codec, encode = key_codec(declared), key_encoder(declared).encode
    rows = row_maker(batch.slice(start))
    if t.DATE in fields:
        with pytest.raises(UsageError):
            bytes_of_row_key(rows, places, codec, 0)
        return
    for at, key in enumerate(keys[start:]):
        if len(fields) == 1 and declared in (t.STRING, t.BYTES):
            wanted = encode(key[0]) if key[0] else None
        else:
            wanted = None if key[-1] is not None and fields[-1] == t.BOOL else encode(key)
        if wanted is not None and len(wanted) > 64:
            wanted = None
        assert bytes_of_row_key(rows, places, codec, at) == wanted


@pytest.mark.parametrize(
    "ddl", ["string", "binary", "struct<a:bigint,b:string>", "struct<a:bigint,b:int,c:binary>"]
)
def test_many_keys_that_become_bytes_are_counted(ddl: str, rng: random.Random) -> None:
    declared = of(ddl)
    fields = declared.types if isinstance(declared, RowType) else (declared,)
    makes: dict[str, Callable[[int], Any]] = {
        "LONG": lambda i: i << 33,
        "INT": int,
        "STRING": lambda i: f"n{i}",
        "BYTES": lambda i: b"n%d" % i,
    }
    all_keys = [
        tuple(None if i % 7 == at + 1 and at else makes[field.name](i) for at, field in enumerate(fields))
        for i in range(400)
    ]
    keys = rng.choices(all_keys, k=3000)
    names = ["a", "b", "c"][: len(fields)]
    columns = zip(names, zip(*keys, strict=True), fields, strict=True)
    table = pa.table({name: pa.array(values, field.arrow) for name, values, field in columns})

    class Counts(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.n = ctx.get_value_state(sb.ValueStateDescriptor("n", int))
            self.seen = ctx.get_list_state(sb.ListStateDescriptor("seen", int))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            self.n.update((self.n.value() or 0) + 1)
            self.seen.add(1)
            yield self.n.value(), len(list(self.seen.get()))

    counts: collections.Counter[Any] = collections.Counter()
    expected = []
    for key in keys:
        counts[key] += 1
        expected.append((counts[key], counts[key]))
    with sb.testing.Harness(Counts(), key=names if len(names) > 1 else names[0], key_type=ddl) as harness:
        assert harness.process_batch(table) == expected


def test_a_key_of_more_columns_is_current_as_a_row() -> None:
    table = pa.table({"a": [1, 2, 1], "n": [7, 8, 9], "b": ["x", "y", None]})
    found: list[Any] = []
    run(
        lambda row, ctx: found.append((ctx.current_key, row.n)),
        table,
        key=["b", "a"],
        key_type="struct<b:string,a:int>",
    )
    assert found == [(("x", 1), 7), (("y", 2), 8), ((None, 1), 9)]
    assert found[0][0].b == "x"


def test_a_key_outside_the_declared_range_is_refused() -> None:
    with pytest.raises(OverflowError, match="INT"):
        run(lambda row, ctx: None, pa.table({"k": [1, 2**40]}), key_type="int")
    with pytest.raises(sb.SerializationError, match="STRING"):
        run(lambda row, ctx: None, pa.table({"k": [1]}), key_type="string")


def test_the_current_key_follows_whoever_sets_it() -> None:
    found: list[Any] = []

    def process(row: Any, ctx: sb.FunctionContext) -> None:
        found.append(ctx.current_key)
        ctx.keyed_backend.set_current_key(row.k + 100)
        found.append(ctx.current_key)
        ctx.current_namespace = "other"
        found.append(ctx.current_key)

    run(process, pa.table({"k": [1, 1000, 2]}))
    assert found == [1, 101, 101, 1000, 1100, 1100, 2, 102, 102]


def test_the_backend_may_be_closed_by_the_function() -> None:
    def process(row: Any, ctx: sb.FunctionContext) -> None:
        if row.n == 1:
            ctx.keyed_backend.close()

    for keys, key_type in (([1, 2, 3], "bigint"), (["a", "b", "c"], "string")):
        with pytest.raises(sb.ClosedError):
            run(process, pa.table({"k": keys, "n": [0, 1, 2]}), key_type=key_type)


def by_value(kind: Any, values: list[Any]) -> pa.Array:
    check_values(values, kind, nullable=True)
    return to_arrow(values, kind)


@given(st.data())
def test_columns_are_what_the_values_are_one_by_one(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(value_types, min_size=1, max_size=4))
    schema = OutputSchema(RowType(tuple(f"c{at}" for at in range(len(kinds))), tuple(kinds)))
    rows = data.draw(st.lists(st.tuples(*(st.none() | values_of(kind) for kind in kinds)), max_size=12))
    table = schema.table_of_rows(rows)
    assert table.schema == schema.arrow
    table.validate(full=True)
    for at, kind in enumerate(kinds):
        expected = by_value(kind, [row[at] for row in rows])
        found = table.column(at)
        assert len(found) == len(expected)
        assert all(map(same, column_values(found), column_values(expected)))
        assert found.null_count == expected.null_count


class Text(str):
    """What only the serializer takes."""


@pytest.mark.parametrize(
    ("ddl", "plain", "odd"),
    [
        ("string", "a", Text("b")),
        ("bigint", 1, pa.array([2]).to_numpy()[0]),
        ("double", 0.5, 3),
        ("timestamp", datetime.datetime(2024, 1, 1, tzinfo=UTC), None),
        (
            "timestamp",
            datetime.datetime(2024, 1, 1, tzinfo=UTC),
            datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=3))),
        ),
        ("decimal(10,2)", decimal.Decimal("1.5"), 2),
        ("array<string>", ["a", None], [Text("b")]),
        ("map<double,int>", {0.5: 1}, {-0.0: 1}),
        ("struct<a:bigint,b:string>", (1, "x"), {"b": "y", "a": 2}),
    ],
)
def test_a_column_goes_on_with_values_that_no_codec_takes(ddl: str, plain: Any, odd: Any) -> None:
    values = [plain] * 300 + [None, odd, plain, None] * 2
    schema = OutputSchema(f"n int, c {ddl}")
    writer = schema.writer()
    for _ in range(2):  # the second table begins anew
        writer.extend([(at, value) for at, value in enumerate(values)])
        table = schema.table_of_written(writer)
        assert table.column("n").to_pylist() == list(range(len(values)))
        assert table.column("c").combine_chunks().equals(by_value(of(ddl), values))
        assert writer.count == 0


@pytest.mark.parametrize("at", [0, 1, 299])
@pytest.mark.parametrize(
    ("ddl", "plain", "wrong", "message"),
    [
        ("bigint", 1, "x", "LONG does not take a value of type str (output column 'c', position {at})"),
        (
            "string",
            "a",
            "\ud800",
            "lone surrogate, without a UTF-8 form (output column 'c', position {at}",
        ),
        ("date", datetime.date(2024, 1, 1), 7, "(output column 'c', position {at})"),
        ("array<int>", [1], [1, "x"], "output column 'c', position {at}, element 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_row(ddl: str, plain: Any, wrong: Any, message: str, at: int) -> None:
    values = [plain] * 300
    values[at] = wrong
    table = pa.table({"k": range(300)})
    with pytest.raises(sb.SerializationError) as caught:
        run(lambda row, ctx: [(row.k, values[row.k])], table, schema=f"k bigint, c {ddl}")
    assert message.format(at=at) in str(caught.value)


def test_the_first_row_that_is_none_is_named_before_any_value() -> None:
    rows = [(1, "x"), ("wrong", "y"), (1, "x", 3), 7]
    with pytest.raises(sb.SerializationError, match="output row 2 has 3 fields"):
        OutputSchema("n int, s string").table_of_rows(rows)


def test_error_of_a_function_is_raised_before_an_earlier_wrong_row() -> None:
    def process(row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ("wrong",)
        if row.k == 2:
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        run(process, pa.table({"k": [1, 2]}), schema="n int")


def test_rows_are_taken_when_they_are_given() -> None:
    def process(row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        given = {"n": row.k, "l": [row.k]}
        yield given
        given["n"] = -1
        given["l"].append(-1)

    table = run(process, pa.table({"k": [1, 2]}), schema="n int, l array<bigint>")
    assert table.to_pylist() == [{"n": 1, "l": [1]}, {"n": 2, "l": [2]}]


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_many_rows_come_in_and_out_in_order(backend: str) -> None:
    count = 70_000 if backend == "heap" else 5_000
    table = pa.concat_tables(
        [pa.table({"k": range(3_000), "s": ["a"] * 3_000})] * (count // 3_000)
    ).combine_chunks()
    halves = pa.concat_tables([table.slice(0, 1_234), table.slice(1_234)])

    def process(row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield row.k, row.s
        yield ctx.current_key, None

    given = run(process, halves, schema="k bigint, s string", backend=backend)
    assert given.num_rows == 2 * table.num_rows
    keys = given.column("k").to_numpy()
    assert (keys[::2] == table.column("k").to_numpy()).all()
    assert (keys[1::2] == keys[::2]).all()
    assert given.column("s").null_count == table.num_rows


@pytest.mark.parametrize(("given", "what"), [(7, "int"), (object(), "object")])
def test_values_that_are_not_rows_are_refused(given: Any, what: str) -> None:
    for schema in (None, "n int"):
        with pytest.raises(sb.SerializationError, match=f"the function gave a {what}"):
            run(lambda row, ctx: given, pa.table({"k": [1]}), schema=schema)
