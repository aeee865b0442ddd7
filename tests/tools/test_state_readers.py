"""The object of `sb.tools.state`: all readers see the same rows, keys select them, and the store may go on."""

from __future__ import annotations

import datetime
import random
import sys
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from all_backends import BACKENDS
from keyed_stores import create, open_store
from keyed_story import DESCRIPTORS, Story
from processes import run
from type_samples import LEAVES

import statebackend as sb
from statebackend import types

pytestmark = pytest.mark.usefixtures("no_fsync")

TYPES = [*LEAVES, "array<string>", "map<string,int>", "struct<a:int,b:array<double>>", "pickle"]
KINDS = ["value", "list", "map", "reducing", "folding"]


def descriptor(kind: str, declared: Any) -> Any:
    if kind == "map":
        return sb.MapStateDescriptor("s", str, declared)
    if kind == "reducing":
        return sb.ReducingStateDescriptor("s", lambda old, new: new, declared)
    if kind == "folding":
        initial = "" if declared is str else samples(declared)[0]
        return sb.FoldingStateDescriptor("s", initial, lambda old, new: new, declared)
    made = {"value": sb.ValueStateDescriptor, "list": sb.ListStateDescriptor}[kind]
    return made("s", declared)


def samples(declared: Any) -> list[Any]:
    known = {
        "array<string>": [["a", None], []],
        "map<string,int>": [{"a": 1, "b": None}, {}],
        "struct<a:int,b:array<double>>": [(1, [0.5]), (None, None)],
    }
    return known.get(declared) or LEAVES.get(declared) or [{"x"}, 1, "a"]


def plain(value: Any) -> Any:
    """A value in a form in which the results of all readers are equal."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.timezone.utc).replace(tzinfo=None).isoformat() + "Z"
    if isinstance(value, dict):
        pair = list(value) == ["key", "value"]
        return tuple(map(plain, value.values())) if pair else {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return repr(value)


def rows_of(table: pa.Table) -> list[Any]:
    return sorted((tuple(map(plain, row.values())) for row in table.to_pylist()), key=repr)


def commit(keyed: Any, store: sb.CheckpointStore, number: int, **times: int) -> None:
    store.commit(number, [keyed.snapshot(number, store).result()], **times)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("declared", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_readers_agree(tmp_path: Path, kind: str, declared: str) -> None:
    values, store = samples(declared), sb.CheckpointStore(tmp_path)
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        state = keyed.get_state(descriptor(kind, types.PICKLE if declared == "pickle" else declared))
        with store.open_for_writing(key_type=int, max_parallelism=128):
            for number in range(2):
                for key, value in enumerate(values, 5 * number):
                    keyed.set_current_key(key)
                    if kind == "map":
                        state.put_all({f"{key}": value, "other": value})
                    elif kind == "value":
                        state.update(value)
                    else:
                        state.add(value)
                commit(keyed, store, number)
    rows = sb.tools.state(tmp_path, "s")
    expected = rows_of(rows.to_table())
    assert len(rows) == len(expected) >= len(values)
    assert rows_of(pa.table(rows)) == expected
    with duckdb.connect() as connection:
        connection.execute("set TimeZone = 'UTC'")
        assert rows_of(connection.sql("from rows").to_arrow_table()) == expected
    assert rows_of(pl.DataFrame(rows).to_arrow()) == expected
    assert rows_of(datafusion.SessionContext().from_arrow(rows).to_arrow_table()) == expected
    frame = rows.to_pandas()
    read = pa.Table.from_pandas(frame, rows.schema, preserve_index=False)  # takes NaN for null
    assert repr(rows_of(read)) == repr(expected).replace("nan", "None")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
@pytest.mark.parametrize("key_type", [int, str, "struct<a:bigint,b:string>"])
def test_keys_select_the_rows_that_a_filter_would(
    tmp_path: Path, rng: random.Random, backend: str, key_type: Any, is_stress: bool
) -> None:
    names = [*DESCRIPTORS, "statebackend.timers.event"]
    looks = range(5) if is_stress else (rng.randrange(4), 4)
    if backend == "native":
        made = sb.create_backend("rocksdb", checkpoints="native")
    else:
        made = sb.create_backend(backend)
    is_row = key_type not in (int, str)
    with (
        sb.CheckpointStore(tmp_path).open_for_writing(key_type=key_type, max_parallelism=128) as store,
        made.create_keyed_backend(key_type) as keyed,
    ):
        story = Story(keyed, rng, tuple if is_row else key_type, keys=60)
        for number in range(5):
            story.change(400)
            commit(keyed, store, number)
            chosen = [*rng.sample(story.keys, 3), story.keys[0]]
            for name in rng.sample(names, len(names) if is_stress else 4) if number in looks else ():
                whole = sb.tools.state(tmp_path, name, expired=True).to_table()
                found = sb.tools.state(tmp_path, name, keys=chosen)
                parts = [pc.field(each) for each in (("a", "b") if is_row else ("key",))]
                wanted = set(chosen)
                expected = [
                    row
                    for row in whole.to_pylist()
                    if (tuple(row[str(each)] for each in parts) if is_row else row["key"]) in wanted
                ]
                assert rows_of(found.to_table()) == sorted(
                    (tuple(map(plain, row.values())) for row in expected), key=repr
                )
                assert len(found) == len(expected)
        savepoint = keyed.savepoint(tmp_path / "savepoint")
        for name in rng.sample(list(DESCRIPTORS), len(DESCRIPTORS) if is_stress else 3):
            for keys in (None, story.keys[:4]):
                stored, saved = (sb.tools.state(each, name, keys=keys) for each in (tmp_path, savepoint))
                assert rows_of(saved.to_table()) == rows_of(stored.to_table())
                assert saved.schema == stored.schema


def numbers(root: Path, count: int = 1000, **descriptor_options: Any) -> None:
    """A store whose state n has the keys 0, 7, 14 and so on, the value of each a seventh of it."""
    with (
        sb.CheckpointStore(root).open_for_writing(key_type=int, max_parallelism=128) as store,
        sb.create_backend("heap").create_keyed_backend(int) as keyed,
    ):
        state = keyed.get_state(sb.ValueStateDescriptor("n", int))
        state.update_many(np.arange(count) * 7, np.arange(count))
        commit(keyed, store, 0, now=0)


def test_keys_are_a_range_or_a_column(tmp_path: Path) -> None:
    numbers(tmp_path)

    def found(keys: Any) -> list[int]:
        return sorted(sb.tools.state(tmp_path, "n", keys=keys).to_table()["value"].to_pylist())

    assert found(range(10, 30)) == [2, 3, 4]
    assert found(range(0, 10**12, 14)) == list(range(0, 1000, 2))
    assert found(range(6993, -1, -7 * 900)) == [99, 999]
    assert found(range(0)) == found([]) == []
    assert found(pa.chunked_array([[7], [8]])) == found(np.array([7])) == [1]
    with pytest.raises(sb.SerializationError):
        found(["a"])
    with pytest.raises(sb.SerializationError, match="a single str"):
        found("a")


def test_keys_read_only_their_part_of_the_files(tmp_path: Path) -> None:
    numbers(tmp_path, 200_000)
    (path,) = tmp_path.rglob("*.arrow")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(sb.CorruptCheckpointError, match=path.name):
        sb.tools.state(tmp_path, "n").to_table()
    whole = [key for key in range(0, 700, 7) if _reads(tmp_path, key)]
    assert 20 < len(whole) < 100


def _reads(root: Path, key: int) -> bool:
    try:
        assert sb.tools.state(root, "n", keys=[key]).to_table()["value"].to_pylist() == [key // 7]
    except sb.CorruptCheckpointError:
        return False
    return True


def test_columns_limit_the_columns(tmp_path: Path) -> None:
    numbers(tmp_path, 3)
    rows = sb.tools.state(tmp_path, "n", columns=["value"])
    assert rows.schema == pa.schema({"value": pa.int64()})
    assert sorted(rows.to_table()["value"].to_pylist()) == [0, 1, 2]
    with pytest.raises(sb.UsageError, match="no column 'n'") as caught:
        sb.tools.state(tmp_path, "n", columns=["n"]).to_table()
    assert caught.value.code == "USAGE.COLUMN"
    assert "key, value" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("struct<user:string,day:int>", "struct<n:int>", ["user", "day", "n"]),
        ("struct<user:string,n:int>", "struct<n:int>", ["user", "n", "value"]),
        ("struct<value:string>", "int", ["key", "value"]),
        ("string", "struct<namespace:int>", ["key", "value"]),
    ],
)
def test_fields_become_columns_unless_a_name_is_taken(
    tmp_path: Path, key: str, value: str, names: list[str]
) -> None:
    with sb.create_backend("heap").create_keyed_backend(key) as keyed:
        keyed.get_state(sb.ValueStateDescriptor("s", value))
        keyed.savepoint(tmp_path)
    assert sb.tools.state(tmp_path, "s").schema.names == names


@pytest.mark.parametrize("time", ["processing", "event"])
@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_expired_entries_are_left_out_by_the_time_of_the_checkpoint(
    tmp_path: Path, kind: str, time: Any
) -> None:
    clock = sb.testing.ManualClock()
    timed = descriptor(kind, int).enable_time_to_live(
        sb.StateTtlConfig(100, time=time, cleanup_in_background=False)
    )
    with open_store(tmp_path) as store, create("heap", clock=clock) as keyed:
        state = keyed.get_state(timed)
        for at in (0, 60, 120):
            clock.set(at)
            keyed.begin(watermarks=(None, at))
            keyed.set_current_key(at)
            if kind == "map":
                state.put("a", at)
            else:
                (state.update if kind == "value" else state.add)(at)
        commit(keyed, store, 0, now=120, watermark=120)
    assert sorted(sb.tools.state(tmp_path, "s").to_table()["key"].to_pylist()) == [60, 120]
    assert len(sb.tools.state(tmp_path, "s")) == 2
    assert len(sb.tools.state(tmp_path, "s", expired=True)) == 3
    (info,) = sb.tools.states(tmp_path).to_table().to_pylist()
    assert (info["entries"], info["ttl"], info["declared"]) == (3, 100, True)


def test_a_harness_shows_its_state() -> None:
    def total(row: Any, before: int | None) -> Any:
        after = (before or 0) + row.n
        return after, after

    with sb.testing.Harness(sb.map_with_state(total, int), key="user") as harness:
        for n in range(3):
            harness.process_element({"user": "ann", "n": n})
            rows = sb.tools.state(harness, "state")
        assert rows.to_table().to_pylist() == [{"key": "ann", "value": 3}]
        assert "ann  3" in repr(rows)


def test_repr_shows_ten_rows(tmp_path: Path) -> None:
    numbers(tmp_path, 11)
    lines = repr(sb.tools.state(tmp_path, "n")).splitlines()
    assert lines[0].startswith("state 'n', checkpoint 0")
    assert lines[1] == "key  value"
    assert len(lines) == 13
    assert lines[-1] == "..."
    assert sb.tools.state(tmp_path, "n").head(3).num_rows == 3
    assert not sb.tools.state(tmp_path, "n", keys=[1])


def test_states_timers_operator_state_and_sql(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, create("heap") as keyed:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        count.update_many([1, 2, 3], [5, 6, 7])
        keyed.set_current_key(2)
        keyed.timers.register_event_time_timer(50)
        keyed.set_current_namespace(sb.TimeWindow(0, 60))
        keyed.timers.register_processing_time_timer(60)
        operator = sb.OperatorStateBackend()
        operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add_all([4, 5])
        store.commit(0, [keyed.snapshot(0, store).result(), operator.snapshot(0, store).result()])
    infos = {row["name"]: row for row in sb.tools.states(tmp_path).to_table().to_pylist()}
    assert (infos["count"]["kind"], infos["count"]["entries"], infos["offsets"]["entries"]) == ("value", 3, 2)
    assert infos["count"]["bytes"] > 0
    assert infos["count"]["types"] == "bigint"
    assert sorted(sb.tools.timers(tmp_path).to_table().to_pylist(), key=repr) == [
        {"domain": "event", "key": 2, "namespace": None, "time": 50},
        {"domain": "processing", "key": 2, "namespace": {"start": 0, "end": 60}, "time": 60},
    ]
    (offsets,) = sb.tools.operator_state(tmp_path).values()
    assert offsets.to_table().to_pydict() == {"subtask": [0, 0], "value": [4, 5]}
    query = "select c.key, o.value from count c join offsets o on c.value = o.value join count d using (key)"
    assert sb.tools.sql(tmp_path, query).to_pylist() == [{"key": 1, "value": 5}]
    assert sb.tools.sql(tmp_path, "select count(*) n from timers").to_pylist() == [{"n": 2}]
    with pytest.raises(sb.UsageError, match="infos") as caught:
        sb.tools.sql(tmp_path, "from infos")
    assert caught.value.code == "USAGE.SQL"


def test_a_checkpoint_stays_while_it_is_read(tmp_path: Path) -> None:
    numbers(tmp_path, 300_000)
    rows = sb.tools.state(tmp_path, "n")
    batches = rows.to_batches()
    first = next(batches)
    with (
        sb.CheckpointStore(tmp_path, retain=1).open_for_writing() as store,
        sb.create_backend("heap").create_keyed_backend(int, restore=store.open(0)) as keyed,
    ):
        keyed.get_state(sb.ValueStateDescriptor("n", int)).clear_many(np.arange(300_000) * 7)
        commit(keyed, store, 1)
        commit(keyed, store, 2)
        assert store.checkpoints() == [2]
        assert first.num_rows + sum(batch.num_rows for batch in batches) == 300_000
        assert not list((tmp_path / "pins").iterdir())
        with pytest.raises(sb.UsageError) as caught:
            rows.to_table()
        assert caught.value.code == "USAGE.NO_CHECKPOINT"
        assert "NO_CHECKPOINT" in repr(rows)
    assert len(sb.tools.state(tmp_path, "n")) == 0


SCAN = """
import sys
import numpy as np, pyarrow as pa
import statebackend as sb

def memory(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

text = sb.ValueStateDescriptor("text", str)
if sys.argv[2] == "make":
    with (
        sb.CheckpointStore(sys.argv[1]).open_for_writing(key_type=int, max_parallelism=128) as store,
        sb.create_backend("heap").create_keyed_backend(int) as keyed,
    ):
        state = keyed.get_state(text)
        for batch, count in enumerate((4_000_000, 300_000)):
            for start in range(0, count, 100_000):
                state.update_many(np.arange(start, start + 100_000), pa.array([f"{batch}" * 100] * 100_000))
            store.commit(batch, [keyed.snapshot(batch, store).result()])
else:
    rows = sb.tools.state(sys.argv[1], "text", keys=[1])
    rows.to_table()
    before = memory("VmRSS")
    print(sum(batch.num_rows for batch in sb.tools.state(sys.argv[1], "text").to_batches()), before, memory("VmHWM"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_scan_is_bounded(tmp_path: Path) -> None:
    """At most 200 MB, and twice the largest key group; all rows take more than 400 MB."""
    run(SCAN, tmp_path, "make")
    rows, before, peak = map(int, run(SCAN, tmp_path, "scan").stdout.split())
    assert rows == 4_000_000
    assert peak - before < 200e6 + 2 * 1.2 * rows / 128 * 120


def test_an_abandoned_scan_lets_go_of_the_checkpoint(tmp_path: Path) -> None:
    numbers(tmp_path, 300_000)
    batches = sb.tools.state(tmp_path, "n").to_batches()
    next(batches)
    assert len(list((tmp_path / "pins").iterdir())) == 1
    del batches
    assert not list((tmp_path / "pins").iterdir())


def test_other_objects_are_refused() -> None:
    with pytest.raises(sb.UsageError, match="cannot read state from a int") as caught:
        sb.tools.state(5, "n")
    assert caught.value.code == "USAGE.NOT_A_STORE"
