"""The keyed backend itself: what compactions remove, what scans see, who holds the database, and when it goes."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import run

import statebackend as sb
from statebackend.backends.rocksdb import RocksDbBackend
from statebackend.backends.rocksdb.settings import PREDEFINED
from statebackend.checkpoint.keyed import ExpiredAt
from statebackend.errors import ClosedError
from statebackend.state import (
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

TTL = 100
Make = Callable[..., Any]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0)


@pytest.fixture
def make(tmp_path: Path, clock: ManualClock) -> Iterator[Make]:
    """Makes backends whose databases lie in the folder of the test; they are closed when it ends."""
    made: list[Any] = []
    (tmp_path / "local").mkdir()

    def make(key_type: Any = int, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
        backend = RocksDbBackend(local_dir=tmp_path / "local", **(options or {}))
        made.append(backend.create_keyed_backend(key_type, **{"clock": clock, **more}))
        return made[-1]

    yield make
    for each in made:
        each.close()
    made.clear()
    assert list((tmp_path / "local").iterdir()) == []


def expiring(descriptor: Any, **options: Any) -> Any:
    return descriptor.enable_time_to_live(StateTtlConfig(TTL, **options))


def at(keyed: Any, clock: ManualClock, now: int, key: Any) -> None:
    clock.set(now)
    keyed.set_current_key(key)


def compact(keyed: Any, state: Any) -> int:
    """Compact a state without reading it; how many rows its files have then."""
    database = keyed.scratch.database
    if not keyed.store.has_marks:
        keyed.store.flush()
    database.flush()
    database.compact(state.table.family)
    files = database.live_files()
    return sum(each["entries"] for each in files if each["family"] == state.table.family.name)


def test_compactions_remove_expired_values_without_a_read(make: Make, clock: ManualClock) -> None:
    keyed = make()
    state = keyed.get_value_state(expiring(ValueStateDescriptor("s", str)))
    for key in range(100):
        at(keyed, clock, 0 if key % 2 else 50, key)
        state.update("x" * key)
    at(keyed, clock, TTL - 1, 1_000)
    assert compact(keyed, state) == 100
    at(keyed, clock, TTL, 1_000)
    assert compact(keyed, state) == 50
    assert keyed.metrics()["states"]["s"]["expired_in_compactions"] == 50
    assert keyed.metrics()["states"]["s"]["expired_on_read"] == 0
    assert state.get_many(range(100)).to_pylist() == [None if key % 2 else "x" * key for key in range(100)]


def test_compactions_remove_nothing_in_event_time_before_the_first_watermark(
    make: Make, clock: ManualClock, tmp_path: Path
) -> None:
    clock.set(10 * TTL)
    store = sb.CheckpointStore(tmp_path / "store")
    with store.open_for_writing(query="q", key_type=int, max_parallelism=128):
        first = make()
        first.begin(watermarks=(None, None))
        store.commit(0, [first.snapshot(0, store).result()], now=10 * TTL)
    keyed = make(restore=store.open(0))
    keyed.advance()  # before the first batch tells that rows have times
    keyed.begin(watermarks=(None, 0))
    event = StateTtlConfig.TtlTimeCharacteristic.EventTime
    state = keyed.get_value_state(expiring(ValueStateDescriptor("s", int), ttl_time_characteristic=event))
    keyed.set_event_time(0)
    keyed.set_current_key(1)
    state.update(7)
    assert compact(keyed, state) == 1
    assert state.value() == 7


def test_compactions_remove_single_elements_of_lists(make: Make, clock: ManualClock) -> None:
    for element_type, value in ((int, lambda n: n), (str, lambda n: "é" * n)):
        keyed = make()
        state = keyed.get_list_state(expiring(ListStateDescriptor("s", element_type)))
        for key in range(20):
            for now in (0, 50) if key < 10 else (0,):
                at(keyed, clock, now, key)
                state.add_all([value(now + 1), value(now + 2)])
            clock.set(0)
        at(keyed, clock, TTL, 1_000)
        compact(keyed, state)  # merges elements, and has no way to remove lists that have none left
        assert compact(keyed, state) == 10
        for key in range(20):
            keyed.set_current_key(key)
            stored = keyed.store.get_at(state.table, keyed.store.place_here)
            assert (stored is None) == (key >= 10)
            assert state.get() == ([] if key >= 10 else [value(51), value(52)])


def test_compactions_remove_single_entries_of_maps(make: Make, clock: ManualClock) -> None:
    keyed = make()
    state = keyed.get_map_state(expiring(MapStateDescriptor("s", int, str)))
    for key in range(10):
        at(keyed, clock, 0, key)
        state.put_all({1: "a", 2: None})
        at(keyed, clock, 50, key)
        state.put_all({2: None, 3: "c"})
    at(keyed, clock, TTL, 1_000)
    assert compact(keyed, state) == 20
    for key in range(10):
        keyed.set_current_key(key)
        assert list(state.items()) == [(2, None), (3, "c")]


def test_compactions_use_committed_times_only(make: Make, clock: ManualClock) -> None:
    keyed = make()
    state = keyed.get_value_state(expiring(ValueStateDescriptor("s", int)))
    at(keyed, clock, 0, 1)
    state.update(1)
    mark = keyed.mark()
    at(keyed, clock, TTL, 2)
    state.update(2)
    keyed.advance()
    keyed.release(keyed.mark())
    assert compact(keyed, state) == 1
    keyed.rollback(mark)
    assert compact(keyed, state) == 1
    keyed.release(mark)
    at(keyed, clock, 50, 1)  # a job that goes back works at its old time
    assert state.value() == 1


def test_compactions_use_the_time_of_a_commit_after_it(
    make: Make, clock: ManualClock, tmp_path: Path
) -> None:
    keyed = make()
    state = keyed.get_value_state(expiring(ValueStateDescriptor("s", int)))
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:
        for key in range(10):
            at(keyed, clock, 10 * key, key)
            state.update(key)
        clock.set(TTL)
        store.commit(0, [keyed.snapshot(0, store).result()], now=TTL)
        keyed.release(keyed.mark())
        at(keyed, clock, 10 * TTL, 99)
        keyed.release(keyed.mark())
        assert compact(keyed, state) == 9, "the time of the commit, not the clock's"
        store.commit(1, [keyed.snapshot(1, store).result()], now=10 * TTL)
        keyed.release(keyed.mark())
        assert compact(keyed, state) == 0


@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_deleted_state_does_not_come_back_after_compactions(
    make: Make, clock: ManualClock, tmp_path: Path, kind: str
) -> None:
    def descriptor(ttl: int) -> Any:
        made = {
            "value": ValueStateDescriptor("s", int),
            "list": ListStateDescriptor("s", int),
            "map": MapStateDescriptor("s", int, int),
        }
        return made[kind].enable_time_to_live(StateTtlConfig(ttl))

    keyed = make()
    state = keyed.get_state(descriptor(TTL))
    rest = keyed.get_value_state(ValueStateDescriptor("rest", int))
    rest.update_many(list(range(100)), list(range(100)))
    keyed.set_current_key(1)
    {"value": lambda: state.update(1), "list": lambda: state.add(1), "map": lambda: state.put(1, 1)}[kind]()
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:
        for checkpoint_id in range(3):
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            at(keyed, clock, 10 * TTL, 1)
            rest.update(checkpoint_id)
        assert compact(keyed, state) == (kind == "list"), "a list that merging has emptied is no bytes"
        for checkpoint_id, kinds in ((3, ["base"]), (4, ["base", "delta"])):
            rest.update(checkpoint_id)
            keyed._clear_state(descriptor(TTL))
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            assert [each.kind for each in store.open(checkpoint_id).snapshots[0].files] == kinds
        restored = make(restore=store.open(4))
        state = restored.get_state(descriptor(1000 * TTL))
        restored.set_current_key(1)
        assert not state.exists()


def test_event_time_comes_from_the_rows_after_a_restore(
    make: Make, clock: ManualClock, tmp_path: Path
) -> None:
    """Also before the first batch, when no row has told it: by the clock, everything would have expired long ago."""
    descriptor = ValueStateDescriptor("s", int).enable_time_to_live(
        StateTtlConfig(TTL, ttl_time_characteristic=StateTtlConfig.TtlTimeCharacteristic.EventTime)
    )
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:
        keyed = make()
        at(keyed, clock, 1_000_000, 1)
        keyed.begin(watermarks=(50, 50))
        keyed.get_value_state(descriptor).update(1)
        store.commit(0, [keyed.snapshot(0, store).result()], now=1_000_000, watermark=50)
    restored = make(restore=sb.CheckpointStore(tmp_path / "store").open_latest())
    restored.release(restored.mark())
    by_clock, by_event = restored._committed
    assert (by_clock.now, by_event.now) == (1_000_000, 50)
    restored.begin(watermarks=(60, 60))
    state = restored.get_value_state(descriptor)
    restored.release(restored.mark())
    at(restored, clock, 1_000_000, 1)
    assert compact(restored, state) == 1
    assert state.value() == 1


NEIGHBOURS = [
    b"",
    b"\0",
    b"\0\0",
    b"\1",
    b"a",
    b"a\0",
    b"a\0\1",
    b"a\1",
    b"a\xff",
    b"b",
    b"\xff",
    b"\xff\xff",
]


@pytest.mark.parametrize("is_in_batch", [False, True])
def test_a_scan_never_leaves_its_key(make: Make, is_in_batch: bool) -> None:
    keyed = make(bytes, max_parallelism=1)
    state = keyed.get_map_state(MapStateDescriptor("s", bytes, int))
    mark = keyed.mark() if is_in_batch else None
    places = [(key, namespace) for key in NEIGHBOURS for namespace in NEIGHBOURS]
    for number, (key, namespace) in enumerate(places):
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        state.put_all(dict.fromkeys(NEIGHBOURS, number))
    for number, (key, namespace) in enumerate(places):
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        assert dict(state.items()) == dict.fromkeys(NEIGHBOURS, number)
        assert list(state) == sorted(NEIGHBOURS)
    assert sorted(keyed.keys_and_namespaces("s")) == sorted(places)
    for number, (key, namespace) in enumerate(places):
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        assert state.exists()
        state.clear()
        assert not state.exists()
        assert keyed.num_entries("s") == len(places) - number - 1
    if mark is not None:
        keyed.release(mark)


def test_clearing_a_key_clears_no_other(make: Make) -> None:
    keyed = make(bytes, max_parallelism=1)
    state = keyed.get_list_state(ListStateDescriptor("s", int))
    for key in NEIGHBOURS:
        keyed.set_current_key(key)
        for namespace in ("n", 7, sb.VOID):
            keyed.set_current_namespace(namespace)
            state.add(1)
    for number, key in enumerate(NEIGHBOURS):
        keyed.set_current_key(key)
        keyed.clear_key()
        assert set(keyed.keys("s", sb.ALL_NAMESPACES)) == set(NEIGHBOURS[number + 1 :])


def test_maps_longer_than_the_read_ahead_are_whole(make: Make) -> None:
    keyed = make()
    state = keyed.get_map_state(MapStateDescriptor("s", int, int))
    keyed.set_current_key(1)
    for mark in (None, keyed.mark()):
        state.put_all({number: number for number in range(-1_000, 1_000)})
        for key, value in state.items():
            assert value == key
            state[key] = 0
            if key < 999:
                state[key + 1] = key + 1  # of an entry that has been read ahead
        assert list(state) == list(range(-1_000, 1_000))
        state.clear()
        if mark is not None:
            keyed.release(mark)


def test_rows_come_by_key_group_also_where_the_batch_has_some(make: Make) -> None:
    keyed = make(max_parallelism=16)
    state = keyed.get_map_state(MapStateDescriptor("s", int, int))
    state.put_many(range(3_000), [1] * 3_000, range(3_000))
    with keyed._undone_on_error():
        state.put_many(range(1_500, 4_500), [1] * 3_000, [-1] * 3_000)
        taken = keyed._take_rows()
        for section in taken.sections():
            groups = [group for rows in section.batches for group in rows.key_group_of_rows().tolist()]
            assert groups == sorted(groups)
            assert len(groups) == 4_500
        taken.release()


def test_the_folder_is_there_while_the_backend_is_open(make: Make, tmp_path: Path) -> None:
    keyed = make()
    (folder,) = (tmp_path / "local").iterdir()
    assert folder.name.startswith("statebackend-rocksdb-")
    keyed.close()
    assert not folder.exists()
    for refused in ({"max_parallelism": 0}, {"restore": tmp_path / "no savepoint"}):
        with pytest.raises(sb.errors.StateBackendError):
            make(**refused)
        assert list((tmp_path / "local").iterdir()) == []


def test_backends_of_one_limit_share_their_memory(make: Make) -> None:
    first, second = make(options={"memory_limit": 32 << 20}), make(options={"memory_limit": 32 << 20})
    other = make(options={"memory_limit": 64 << 20})
    assert first.scratch.budget is second.scratch.budget
    assert other.scratch.budget is not first.scratch.budget
    first.get_value_state(ValueStateDescriptor("s", str)).update_many(range(1_000), ["x" * 1_000] * 1_000)
    usage = second.metrics()["memory"]
    assert 1_000_000 < usage["write_buffers"] < usage["cache"], "of both; write buffers count as cache"


@pytest.mark.parametrize(
    "options",
    [
        *({"predefined": name} for name in PREDEFINED if name != "DEFAULT"),
        {"compression": "zstd"},
        {"partitioned_index_filters": False},
        {"memory_limit": 8 << 20},
    ],
)
def test_options_that_are_taken(make: Make, options: dict[str, Any]) -> None:
    keyed = make(options=options)
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update_many(range(1_000), range(1_000))
    assert compact(keyed, state) == 1_000
    assert state.get_many([5, 5_000]).to_pylist() == [5, None]


OPEN_AT_THE_END = """
import sys
import statebackend as sb
keyed = sb.create_backend("rocksdb", local_dir=sys.argv[1]).create_keyed_backend(int)
state = keyed.get_map_state(sb.MapStateDescriptor("s", int, int))
keyed.set_current_key(1)
state.put_all({1: 2, 3: 4})
mark = keyed.mark()
state[5] = 6
steps = iter(state)
next(steps)
view = keyed._take_rows()
"""


def test_the_interpreter_ends_with_everything_open(tmp_path: Path) -> None:
    done = run(OPEN_AT_THE_END, tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_keeps_its_moment_while_time_goes_on(
    make: Make, clock: ManualClock, tmp_path: Path
) -> None:
    """Elements of lists are merged when the snapshot reads them, which must not drop what was alive at its moment."""
    keyed = make()
    lists = keyed.get_list_state(sb.ListStateDescriptor("l", int).enable_time_to_live(sb.StateTtlConfig(100)))
    for key in range(3):
        at(keyed, clock, 1_000, key)
        lists.add(1)
        lists.add(2)
    view = keyed._open_view(ExpiredAt())
    at(keyed, clock, 5_000, 9)
    found = [batch.batch.to_pydict() for section in view.sections() for batch in section.batches]
    assert sorted(key for each in found for key in each["key"]) == [0, 1, 2]
    assert all(value == [1, 2] for each in found for value in each["value"])
    view.release()


@pytest.mark.parametrize(("is_marked", "ttl"), [(False, True), (True, False)])
def test_scalar_calls_leave_no_objects(make: Make, clock: ManualClock, ttl: bool, is_marked: bool) -> None:
    keyed = make(str)
    declare = expiring if ttl else lambda descriptor: descriptor
    value = keyed.get_value_state(declare(ValueStateDescriptor("v", "struct<a:bigint,b:string>")))
    total = keyed.get_reducing_state(declare(ReducingStateDescriptor("r", "sum", int)))
    tags = keyed.get_list_state(declare(ListStateDescriptor("l", str)))
    seen = keyed.get_map_state(declare(MapStateDescriptor("m", str, "array<string>")))

    def use() -> None:
        for i in range(20):
            at(keyed, clock, i, f"key {i}")
            keyed.set_current_namespace(f"space {i % 3}")
            value.update((i, "text" * 300))
            assert value.value().b == "text" * 300
            assert value.exists()
            total.add(i)
            assert total.get() >= i
            tags.update(["a", "b"])
            tags.add("c" * 600)
            tags.add_all(["d", "e"])
            assert len(tags.get()) == 5
            seen.put(f"long {i}", ["x", None])
            seen["other"] = None
            assert "other" in seen
            assert seen.get("no", 7) == 7
            assert seen[f"long {i}"] == ["x", None]
            assert dict(seen.items()) == {f"long {i}": ["x", None], "other": None}
            del seen["other"]
            for wrong in (lambda: value.update(object()), lambda: tags.add(None), lambda: seen["no"]):
                with pytest.raises((KeyError, sb.errors.SerializationError)):
                    wrong()
            for state in (value, total, tags, seen):
                state.clear()

    mark = keyed.mark() if is_marked else None
    use()
    gc.collect()
    counts = []
    for _ in range(4):
        use()
        if mark is not None:
            keyed.rollback(mark)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert max(counts[1:]) - counts[1] < 20, counts
    if mark is not None:
        keyed.release(mark)


def test_another_thread_may_close_while_single_writes_go_to_the_database(make: Make) -> None:
    for turn in range(0, 15, 3):
        keyed = make()
        state = keyed.get_value_state(ValueStateDescriptor("s", str))
        keyed.store.unmarked_keys = 3000
        ended: list[Exception] = []

        def write(keyed: Any = keyed, state: Any = state, ended: list[Exception] = ended) -> None:
            try:
                for number in range(60_000):
                    keyed.set_current_key(number)
                    state.update("x" * 50)
            except ClosedError as error:
                ended.append(error)

        writing = threading.Thread(target=write)
        writing.start()
        time.sleep(0.002 * turn)
        keyed.close()
        writing.join()
        assert len(ended) <= 1


def test_a_key_that_is_cleared_while_a_compaction_ends_does_not_come_back(
    make: Make, clock: ManualClock, tmp_path: Path
) -> None:
    """In namespaces, what compactions have dropped is asked of their counters, after the search for what is there."""
    descriptor = ValueStateDescriptor("s", int)
    keyed = make()
    state = keyed.get_value_state(expiring(descriptor))
    rest = keyed.get_value_state(ValueStateDescriptor("rest", int))
    rest.update_many(list(range(100)), list(range(100)))
    keyed.set_current_key(1)
    keyed.set_current_namespace("n")
    state.update(1)

    class Compacting:
        """Rules whose counters are read just before a compaction drops something."""

        def __init__(self, rules: Any) -> None:
            self.rules = rules

        def counters(self) -> dict[str, int]:
            before: dict[str, int] = self.rules.counters()
            compact(keyed, state)
            return before

    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:
        for checkpoint_id in range(3):
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            at(keyed, clock, 10 * TTL, 2)
            keyed.set_current_namespace(sb.VOID)
            rest.update(checkpoint_id)
        rules, state.rules = state.rules, Compacting(state.rules)
        keyed.set_current_key(1)
        keyed.clear_key()
        state.rules = rules
        store.commit(3, [keyed.snapshot(3, store).result()])
        restored = make(restore=store.open(3))
        state = restored.get_value_state(descriptor.enable_time_to_live(StateTtlConfig(1000 * TTL)))
        restored.set_current_key(1)
        restored.set_current_namespace("n")
        assert not state.exists()
