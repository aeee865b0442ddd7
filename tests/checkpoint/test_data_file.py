"""Data files: what is written is read back, by Arrow too; parts cost what they are; damage is always found."""

from __future__ import annotations

import decimal
import errno
import io
import itertools
import json
import random
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend.checkpoint.format import (
    COLUMNS,
    DataFileReader,
    GroupedBatch,
    Op,
    Section,
    data_file_writer,
    read_data_file,
    write_data_file,
)
from statebackend.checkpoint.format.index import TRAILER, Trailer
from statebackend.checkpoint.store.sealed import crc32c
from statebackend.errors import CorruptCheckpointError, StoreError, UsageError
from statebackend.keys.key_groups import KeyGroupRange

NAME = "data/3/7-0-base-x.arrow"
LONG = pa.schema({"key": pa.int64(), "value": pa.int64()})


def written(sections: Sequence[Section], **options: Any) -> bytes:
    sink = io.BytesIO()
    write_data_file(sink, sections, **options)
    return sink.getvalue()


def opened(data: bytes) -> DataFileReader:
    return read_data_file(pa.BufferReader(data), NAME)


def table_of(found: Iterator[GroupedBatch], schema: pa.Schema) -> tuple[pa.Table, list[int]]:
    batches = list(found)
    groups = [int(g) for each in batches for g in each.key_group_of_rows()]
    return pa.Table.from_batches([each.batch for each in batches], schema), groups


#: Columns of every kind of type, and values for them.
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [1, -(2**63), None]),
    "int": (pa.int32(), [1, 2**31 - 1]),
    "double": (pa.float64(), [1.5, float("inf"), -0.0]),
    "bool": (pa.bool_(), [True, False, None]),
    "string": (pa.string(), ["", "é", "x" * 1000, None]),
    "bytes": (pa.binary(), [b"", b"\x00\xff", None]),
    "date": (pa.date32(), [0, 19_000]),
    "timestamp": (pa.timestamp("us", tz="UTC"), [0, 10**15]),
    "decimal": (pa.decimal128(10, 2), [decimal.Decimal("1.25"), decimal.Decimal("-9.00"), None]),
    "list": (pa.list_(pa.int64()), [[], [1, None], [3] * 50]),
    "row": (
        pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}),
        [{"a": 1, "b": ["x"]}, {"a": None, "b": []}],
    ),
    "map": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], []]),
}


def a_section(name: str, rng: random.Random, n_rows: int, groups: int = 128) -> Section:
    names = ["key", *(c for c in COLUMNS[1:] if rng.random() < 0.6)]
    fields, columns = [], []
    for column in names:
        if column == "op":
            kind, values = pa.uint8(), [op.value for op in Op]
        elif column == "timestamp":
            kind, values = pa.int64(), [0, 10**12]
        elif column == "namespace":
            kind, values = pa.binary(), [b"", b"ns"]
        else:
            kind, values = TYPES[rng.choice(list(TYPES))]
        fields.append(pa.field(column, kind))
        columns.append(pa.array([rng.choice(values) for _ in range(n_rows)], kind))
    schema = pa.schema(fields)
    batch = pa.record_batch(columns, schema=schema)
    of_rows = np.sort([rng.randrange(groups) for _ in range(n_rows)])
    cuts = sorted({0, n_rows, *(rng.randint(0, n_rows) for _ in range(rng.randrange(5)))})
    batches = [GroupedBatch.of(batch.slice(a, b - a), of_rows[a:b]) for a, b in itertools.pairwise(cuts)]
    return Section(name, schema, batches)


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_any_states_come_back(rng: random.Random, compression: str | None) -> None:
    for _ in range(40):
        sections = [
            a_section(f"state {i}", rng, rng.choice([0, 1, 10, 500])) for i in range(rng.randrange(6))
        ]
        data = written(sections, compression=compression, extra={"now": 5})
        reader = opened(data)
        reader.verify()
        assert reader.extra == {"now": 5}
        assert reader.states == [section.name for section in sections]
        for section in sections:
            in_order = [c for c in COLUMNS if c in section.schema.names]
            batches = [each.batch for each in section.batches]
            expected = pa.Table.from_batches(batches, section.schema).select(in_order)
            groups = [int(g) for each in section.batches for g in each.key_group_of_rows()]
            assert reader.schema(section.name) == expected.schema
            table, found = table_of(reader.read(section.name), expected.schema)
            assert (table.to_pylist(), found) == (expected.to_pylist(), groups)
            there, counts = reader.rows_of(section.name)
            assert np.repeat(there, counts).tolist() == groups
            for _ in range(4):
                start = rng.randrange(128)
                wanted = KeyGroupRange(start, rng.randrange(start, 128))
                table, found = table_of(reader.read(section.name, wanted), expected.schema)
                mask = [group in wanted for group in groups]
                assert found == [group for group in groups if group in wanted]
                assert table.to_pylist() == expected.filter(pa.array(mask, pa.bool_())).to_pylist()


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.usefixtures("encoded_behind")
def test_threads_change_no_byte(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = [
        a_section(f"state {i}", rng, rng.choice([0, 30, 900]), rng.choice([1, 128])) for i in range(7)
    ]
    alone = written(sections)
    assert written(sections, threads=2) == alone
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    assert written(sections, threads=2) == alone


@pytest.mark.usefixtures("encoded_behind")
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["batches", "sink", "encoding"])
@pytest.mark.parametrize("number", range(5))
def test_an_error_comes_as_it_is_and_ends_the_thread(
    place: str, number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, failed = threading.Event(), threading.Event()
    calls, encodings = itertools.count(), itertools.count()
    encode = data_file_writer._Writer._encoded

    def fail(own: str) -> None:
        if own == place and next(calls) == number:
            if place == "batches" and number >= 2:
                assert at_work.wait(60)
            failed.set()
            raise error

    def encoded(*arguments: Any) -> Any:
        at_work.set()
        fail("encoding")
        if next(encodings) == number - 2 and place == "batches":  # the last one before the error
            failed.wait(60)
        found = encode(*arguments)
        at_work.clear()
        return found

    def batches() -> Iterator[GroupedBatch]:
        for group in range(8):
            fail("batches")
            rows = pa.record_batch({"key": range(9), "value": range(9)}, LONG)
            yield GroupedBatch.of(rows, [group] * 9)

    class Sink(io.BytesIO):
        def write(self, data: Any) -> int:
            fail("sink")
            return super().write(data)

    monkeypatch.setattr(data_file_writer._Writer, "_encoded", encoded)
    monkeypatch.setattr(data_file_writer, "BATCH_ROWS", 9)
    monkeypatch.setattr(data_file_writer, "COMPRESS_FROM", 1)
    monkeypatch.setattr(data_file_writer, "COMPRESS_BATCHES_FROM", 1)
    before = set(threading.enumerate())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread goes on only where this one waits
    try:
        with pytest.raises(type(error)) as raised:
            write_data_file(Sink(), [Section("a", LONG, batches())], threads=2)
        assert place == "encoding" or not at_work.is_set()
    finally:
        sys.setswitchinterval(interval)
    assert raised.value is error
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_any_arrow_reader_opens_a_file() -> None:
    """One state gives plain columns; several share those that have the same type."""
    rows = pa.record_batch([[1, 2], [10, 20]], schema=LONG)
    texts = pa.record_batch({"key": pa.array([3]), "value": pa.array(["x"])})
    one = pa.ipc.open_file(written([Section("a", LONG, [GroupedBatch.of(rows, [1, 2])])])).read_all()
    assert one.to_pylist() == rows.to_pylist()
    several = pa.ipc.open_file(
        written(
            [
                Section("a", LONG, [GroupedBatch.of(rows, [1, 2])]),
                Section("b", texts.schema, [GroupedBatch.of(texts, [0])]),
                Section("c", LONG, [GroupedBatch.of(rows.slice(1), [7])]),
            ]
        )
    ).read_all()
    assert several.schema.names == ["key", "value 1: int64", "value 2: string"]
    assert [list(row.values()) for row in several.to_pylist()] == [
        [1, 10, None],
        [2, 20, None],
        [3, None, "x"],
        [2, 20, None],
    ]
    nothing = pa.ipc.open_file(written([Section("a", LONG, [])]))
    assert nothing.num_record_batches == 0
    assert nothing.schema.names == ["key", "value"]


def test_types_that_are_written_alike_but_differ() -> None:
    """An element that may be null, and one that may not: two columns."""
    sections = []
    for name, nullable in (("a", True), ("b", False)):
        kind = pa.list_(pa.field("item", pa.int64(), nullable=nullable))
        schema = pa.schema({"key": pa.int64(), "value": kind})
        rows = pa.record_batch([pa.array([1]), pa.array([[int(nullable)]], kind)], schema=schema)
        sections.append(Section(name, schema, [GroupedBatch.of(rows, [0])]))
    reader = opened(written(sections))
    assert [reader.schema(each.name) for each in sections] == [each.schema for each in sections]
    assert [each.batch["value"].to_pylist() for name in "ab" for each in reader.read(name)] == [[[1]], [[0]]]


@pytest.mark.parametrize("size", [1, 100, 70_000, 300_000])
def test_batches_are_full_whatever_they_come_in(size: int) -> None:
    n = 200_000 if size > 1 else 3000
    keys = np.arange(n)
    groups = keys * 128 // n

    def pieces() -> Iterator[GroupedBatch]:
        for start in range(0, n, size):
            part = slice(start, start + size)
            yield GroupedBatch.of(pa.record_batch([pa.array(keys[part])] * 2, schema=LONG), groups[part])

    data = written([Section("a", LONG, pieces())])
    batches = pa.ipc.open_file(data)
    sizes = [batches.get_batch(i).num_rows for i in range(batches.num_record_batches)]
    assert max(sizes) <= 65_536
    assert min(sizes[:-1], default=65_536) > 65_536 // 2
    table, found = table_of(opened(data).read("a"), LONG)
    assert table["key"].to_numpy().tolist() == keys.tolist()
    assert found == groups.tolist()


def test_large_rows_make_small_batches() -> None:
    """A batch ends at 64 MB, so that none has to be held that is much larger."""
    schema = pa.schema({"key": pa.int64(), "value": pa.binary()})
    value = np.random.default_rng(1).bytes(1 << 20)
    batch = pa.record_batch([pa.array(range(100)), pa.array([value] * 100)], schema=schema)
    whole = written([Section("a", schema, [GroupedBatch.of(batch, np.arange(100))])])
    parts = [GroupedBatch.of(batch.slice(i, 10), np.arange(i, i + 10)) for i in range(0, 100, 10)]
    for data in (whole, written([Section("a", schema, parts)])):
        file = pa.ipc.open_file(data)
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] in ([50, 50], [60, 40])
        assert sum(each.batch.num_rows for each in opened(data).read("a", KeyGroupRange(45, 64))) == 20


def test_small_files_and_batches_of_many_small_states_are_not_compressed() -> None:
    def compresses(*sizes: int) -> bool:
        rows = [pa.record_batch([pa.array([7] * n)] * 2, schema=LONG) for n in sizes]
        sections = [
            Section(f"{at:05}", LONG, [GroupedBatch.of(each, [0] * each.num_rows)])
            for at, each in enumerate(rows)
        ]
        return written(sections) != written(sections, compression=None)

    assert [compresses(n) for n in (255, 256, 100_000)] == [False, True, True]
    assert not compresses(*[1] * 1_000)
    assert compresses(*[16] * 1_000)
    assert compresses(*[1] * 1_000, 100_000)


def test_a_part_is_read_without_the_rest() -> None:
    """Of a large file the index, the schema and one batch."""

    class Counting(io.BytesIO):
        total = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.total += len(data)
            return data

    n = 1_000_000
    rng = np.random.default_rng(1)
    schema = pa.schema({"key": pa.int64(), "value": pa.int64()})
    batch = pa.record_batch(
        [pa.array(rng.integers(0, 2**62, n)), pa.array(rng.integers(0, 2**62, n))], schema=schema
    )
    data = written([Section("a", schema, [GroupedBatch.of(batch, np.arange(n) * 128 // n)])])
    source = Counting(data)
    reader = read_data_file(pa.PythonFile(source, "r"), NAME)
    assert source.total < 80_000
    found = list(reader.read("a", KeyGroupRange(64, 64)))
    assert sum(each.batch.num_rows for each in found) == n // 128 + 1 or n // 128
    assert source.total < len(data) / 7


def test_all_key_groups_there_are() -> None:
    groups = np.arange(32_768)
    batch = pa.record_batch([pa.array(groups), pa.array(groups)], schema=LONG)
    data = written([Section(f"s{i}", LONG, [GroupedBatch.of(batch, groups)]) for i in range(4)])
    reader = opened(data)
    for i in range(4):
        (found,) = reader.read(f"s{i}", KeyGroupRange(20_000, 20_002))
        assert found.batch["key"].to_pylist() == [20_000, 20_001, 20_002]
    assert len(data) < 4 * 32_768 * 20


def longs(groups: list[int], rows: int | None = None) -> GroupedBatch:
    """As many rows as there are key groups, or another number."""
    numbers = list(range(len(groups) if rows is None else rows))
    return GroupedBatch.of(pa.record_batch([numbers, numbers], schema=LONG), groups)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Section("a", pa.schema({"map_key": pa.int64()}), []), "always key or value"),
        (Section("a", pa.schema({"key": pa.int64(), "extra": pa.int64()}), []), "some of key, namespace"),
        (Section("a", pa.schema([("key", pa.int64()), ("key", pa.int64())]), []), "once each"),
        (Section("a", pa.schema({"key": pa.int64(), "op": pa.string()}), []), "op is of type uint8"),
        (
            Section("a", LONG, [GroupedBatch.of(pa.record_batch({"key": [1], "value": ["x"]}), [0])]),
            "other columns than its section",
        ),
        (Section("a", LONG, [longs([5, 4])]), "sorted by key group"),
        (Section("a", LONG, [longs([5]), longs([4])]), "sorted by key group"),
        (Section("a", LONG, [longs([32_768])]), "key group does not exist"),
        (Section("a", LONG, [longs([-1])]), "sorted by key group"),
        (Section("a", LONG, [longs([0, 1], rows=1)]), "do not count its rows"),
    ],
)
def test_wrong_sections_are_refused(section: Section, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        written([section])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="has two sections"):
        written([Section("a", LONG, []), Section("a", LONG, [])])
    with pytest.raises(UsageError, match="unknown compression="):
        written([], compression="gzip")
    with pytest.raises(UsageError, match="must be JSON-able"):
        written([], extra={"x": object()})
    reader = opened(written([]))
    for call in (reader.read, reader.schema, reader.rows_of):
        with pytest.raises(UsageError, match="lacks the state 'b'"):
            call("b")


def everything(data: bytes) -> list[Any]:
    reader = opened(data)
    reader.verify()
    return [(state, table_of(reader.read(state), reader.schema(state))) for state in reader.states]


def assert_damage_is_found(changed: bytes, how: str) -> None:
    try:
        everything(changed)
    except CorruptCheckpointError as error:
        named = error.detail
    else:
        raise AssertionError(f"not found: {how}")
    assert NAME in (named or ""), how


def small_files(rng: random.Random) -> list[bytes]:
    plain = written([a_section(f"s{i}", rng, 12) for i in range(3)])
    compressed = written([a_section("s", rng, 300)])
    return [plain, compressed, written([])]


def test_every_flipped_byte_is_found(rng: random.Random) -> None:
    for data in small_files(rng):
        everything(data)
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << rng.randrange(8)
            assert_damage_is_found(bytes(flipped), f"byte {at} of {len(data)}")


def test_every_cut_and_every_tail_is_found(rng: random.Random) -> None:
    for data in small_files(rng):
        for length in range(len(data)):
            assert_damage_is_found(data[:length], f"cut to {length}")
            assert_damage_is_found(data[length + 1 :], f"from {length + 1}")
        for tail in (b"\0", b"ARROW1", data[-10:]):
            assert_damage_is_found(data + tail, "longer")
        assert_damage_is_found(bytes(len(data)), "zeroed")


def test_regions_that_are_exchanged_lost_or_there_twice_are_found() -> None:
    batches = [pa.record_batch([list(range(i, i + 1000))] * 2, schema=LONG) for i in range(4)]
    sections = [Section(f"s{i}", LONG, [GroupedBatch.of(b, [i] * 1000)]) for i, b in enumerate(batches)]
    data = written(sections, compression=None)
    regions = [each.region for each in opened(data)._index.batches]
    assert len({region.length for region in regions}) == 1
    for first in regions:
        for second in regions:
            changed = bytearray(data)
            changed[first.offset : first.end] = data[second.offset : second.end]
            if first != second:
                assert_damage_is_found(
                    bytes(changed), f"the batch at {second.offset} in place of {first.offset}"
                )
    for at in range(0, len(data) - 64, 64):
        assert_damage_is_found(data[:at] + data[at + 64 :], f"64 bytes lost at {at}")
        assert_damage_is_found(data[: at + 64] + data[at:], f"64 bytes twice at {at}")


def resealed(data: bytes, change: Any) -> bytes:
    """The file with its index altered and every checksum of the index right."""
    (length,) = struct.unpack("<i", data[-10:-6])
    at = len(data) - 10 - length - TRAILER.size
    trailer = Trailer.decode(data[at : at + TRAILER.size], NAME, at)
    start = at - trailer.index_length
    described = json.loads(data[start : start + trailer.json_length])
    runs = bytearray(data[start + trailer.json_length : at])
    described = change(described, runs) or described
    text = json.dumps(described).encode()
    index = text + bytes(runs)
    again = Trailer(len(index), len(text), crc32c(index), trailer.footer_length, trailer.footer_checksum)
    return data[:start] + index + again.encode() + data[at + TRAILER.size :]


CHANGES = {
    "no member": lambda d, r: d.pop("end") and None,
    "more members": lambda d, r: {**d, "more": 1},
    "no object": lambda d, r: [d],
    "gap": lambda d, r: d["batches"][1].__setitem__(0, d["batches"][1][0] + 8),
    "overlap": lambda d, r: d["batches"][0].__setitem__(1, d["batches"][0][1] + 8),
    "huge": lambda d, r: d["batches"][0].__setitem__(1, 2**62),
    "negative": lambda d, r: d["batches"][0].__setitem__(0, -1),
    "float": lambda d, r: d["batches"][0].__setitem__(3, 12.0),
    "batch lost": lambda d, r: d["batches"].pop() and None,
    "rows": lambda d, r: d["batches"][0].__setitem__(3, d["batches"][0][3] + 1),
    "no rows": lambda d, r: d["batches"][0].__setitem__(3, 0),
    "checksum": lambda d, r: d["batches"][0].__setitem__(2, 2**32),
    "two states of one name": lambda d, r: d["states"][1].__setitem__("name", d["states"][0]["name"]),
    "state without a name": lambda d, r: d["states"][0].__setitem__("name", None),
    "column": lambda d, r: d["states"][0]["columns"].__setitem__("key", 99),
    "column of no role": lambda d, r: d["states"][0]["columns"].__setitem__("kee", 0),
    "columns": lambda d, r: d["states"][0].__setitem__("columns", []),
    "runs of a state": lambda d, r: d["states"][0]["runs"].__setitem__(1, 1),
    "all runs": lambda d, r: d.__setitem__("runs", d["runs"] + 1),
    "very many runs": lambda d, r: d.__setitem__("runs", 2**60),
    "codec": lambda d, r: d.__setitem__("runs_codec", "gzip"),
    "not compressed": lambda d, r: d.__setitem__("runs_codec", "zstd"),
    "extra": lambda d, r: d.__setitem__("extra", []),
    "run of no batch": lambda d, r: r.__setitem__(slice(4, 8), struct.pack("<I", 77)),
    "run of no key group": lambda d, r: r.__setitem__(slice(0, 4), struct.pack("<I", 32_768)),
    "groups descend": lambda d, r: r.__setitem__(slice(0, 4), struct.pack("<I", 32_767)),
    "run too long": lambda d, r: r.__setitem__(slice(12, 16), struct.pack("<I", 2**32 - 1)),
    "run starts elsewhere": lambda d, r: r.__setitem__(slice(8, 12), struct.pack("<I", 1)),
    "run empty": lambda d, r: r.__setitem__(slice(12, 16), bytes(4)),
    "run lost": lambda d, r: r.__delitem__(slice(0, 16)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_index_that_says_what_cannot_be(change: Any) -> None:
    """Nothing that it says is believed only because its checksum is right."""
    rows = GroupedBatch.of(pa.record_batch([[1, 2, 3], [1, 2, 3]], schema=LONG), [3, 3, 4])
    data = written([Section(name, LONG, [rows]) for name in ("a", "b")])
    everything(resealed(data, lambda described, runs: None))
    assert_damage_is_found(resealed(data, change), "resealed")


def test_a_newer_version_is_named() -> None:
    data = bytearray(written([]))
    (length,) = struct.unpack("<i", data[-10:-6])
    at = len(data) - 10 - length - TRAILER.size
    fields = list(TRAILER.unpack(data[at : at + TRAILER.size]))
    fields[5] = 2
    body = TRAILER.pack(*fields)[:-4]
    data[at : at + TRAILER.size] = body + struct.pack("<I", crc32c(body))
    with pytest.raises(CorruptCheckpointError, match="version 2, read is 1") as caught:
        opened(bytes(data))
    assert caught.value.code == "CORRUPT_CHECKPOINT.VERSION"


def test_plain_arrow_file_is_refused() -> None:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, LONG) as arrow:
        arrow.write_batch(pa.record_batch([[1], [2]], schema=LONG))
    with pytest.raises(CorruptCheckpointError, match="the file lacks an index"):
        opened(sink.getvalue())


def test_failing_source_is_not_called_damaged() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "input/output error")

    with pytest.raises(StoreError, match=f"reading {NAME}"):
        read_data_file(pa.PythonFile(Failing(b"x" * 1000), "r"), NAME)
