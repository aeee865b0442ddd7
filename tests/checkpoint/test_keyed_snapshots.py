"""Snapshots of keyed state: what is restored is what was in memory when they were taken."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from all_backends import BACKENDS
from keyed_stores import KEY_TYPES, create, open_store
from keyed_story import DESCRIPTORS, Story, contents

import statebackend as sb
from statebackend.backends.heap import snapshots as heap_snapshots
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import chain
from statebackend.checkpoint.keyed import snapshot_log as writing
from statebackend.keys import VOID

pytestmark = pytest.mark.checked


def restored(
    backend: str, key_type: Any, checkpoint: sb.Checkpoint, *, names: Any = None, **options: Any
) -> list[Any]:
    with create(backend, key_type, restore=checkpoint, **options) as keyed:
        return contents(keyed, names)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key_type", KEY_TYPES.values(), ids=KEY_TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_of_checkpoints_restores_into_every_backend(
    tmp_path: Path, backend: str, key_type: Any, rng: random.Random
) -> None:
    with create(backend, key_type) as keyed, open_store(tmp_path, key_type) as store:
        story = Story(keyed, rng, key_type)
        story.change(1500)
        for checkpoint_id in range(8):
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            held = contents(keyed)
            assert len(held) > 100
            for other in BACKENDS:
                assert restored(other, key_type, committed) == held
            story.change(rng.randrange(60))
        kinds = [file.kind for file in committed.files.values()]
        assert kinds[0] == "base"
        assert kinds[1:] == ["delta"] * 7


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_with_and_without_compression(tmp_path: Path, compression: str | None, rng: random.Random) -> None:
    with create("heap", str) as keyed, open_store(tmp_path, str, compression=compression) as store:
        story = Story(keyed, rng, str)
        story.change(3000)
        for checkpoint_id in range(3):
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            held = contents(keyed)
            story.change(50)
        assert restored("heap", str, committed) == restored("reference", str, committed) == held
        text = keyed.get_state(sb.ValueStateDescriptor("text", str))
        text.update_many([f"key {n}" for n in range(1000)], ["the same " * 20] * 1000)
        committed = store.commit(3, [keyed.snapshot(3, store, incremental=False).result()])
        assert (sum(file.size for file in committed.files.values()) < 150_000) == (compression is not None)
    with pytest.raises(sb.UsageError, match='compression is "zstd", "lz4" or None'):
        sb.CheckpointStore(tmp_path, compression="gzip")


@pytest.mark.parametrize(("fan", "smallest_base"), [(2, 1 << 30), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_history_of_commits_aborts_and_rollbacks_restores_to_memory(
    tmp_path: Path,
    backend: str,
    fan: int,
    smallest_base: int,
    rng: random.Random,
    is_stress: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several in flight, some given up, rolled back to before the last commit, files merged in between."""
    monkeypatch.setattr(chain, "FAN", fan)
    monkeypatch.setattr(chain, "SMALLEST_BASE", smallest_base)
    other = BACKENDS[1 - BACKENDS.index(backend)]
    rewritten = 0
    with create(backend, int) as keyed, open_store(tmp_path, int, retain=3) as store:
        story = Story(keyed, rng, int)
        story.change(800)
        marks, flights = [], []
        for checkpoint_id in range(120 if is_stress else 50):
            story.change(rng.randrange(40))
            if rng.random() < 0.2:
                marks.append(keyed.mark())
            if marks and rng.random() < 0.2:
                keyed.rollback(marks[rng.randrange(len(marks))])
                story.change(rng.randrange(5))
                marks = [mark for mark in marks if mark.is_open]
            if marks and rng.random() < 0.2:
                keyed.release(marks.pop(0))
            pending = keyed.snapshot(checkpoint_id, store, incremental=rng.random() < 0.95)
            flights.append((checkpoint_id, pending, contents(keyed)))
            while flights and rng.random() < 0.7:
                flight = flights.pop(0)
                if rng.random() < 0.2:
                    rng.choice([flight[1].abort, lambda: store.abort(flight[0])])()  # noqa: B023
                    continue
                committed = store.commit(flight[0], [flight[1].result()])
                if keyed._log.rewriting is not None and rng.random() < 0.7:
                    keyed._log.rewriting.wait()
                rewritten += len(committed.files) > 1 and not keyed._log._unnamed
                assert restored(rng.choice([backend, other]), int, committed) == flight[2]
        for _, pending, _ in flights:
            pending.result()  # or its file could be written after the store has been closed
            pending.abort()
    assert rewritten > 5, rewritten
    left = {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()}
    named = {Path(name).name for each in store.checkpoints() for name in store.open(each).files}
    assert left == named


def test_a_snapshot_describes_its_own_moment_while_state_changes_on(
    tmp_path: Path, rng: random.Random
) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        story = Story(keyed, rng, int, keys=400)
        story.change(4000)
        for checkpoint_id in range(10):
            held = contents(keyed)
            pending = keyed.snapshot(checkpoint_id, store, incremental=checkpoint_id % 3 != 0)
            story.change(500)
            committed = store.commit(checkpoint_id, [pending.result()])
            assert restored("reference", int, committed) == held


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_snapshots_under_heavy_writes_restore_their_moments(
    tmp_path: Path, backend: str, np_rng: np.random.Generator
) -> None:
    """For ``STATEBACKEND_SNAPSHOT_SECONDS``, with up to three snapshots in flight."""
    until = time.monotonic() + float(os.environ.get("STATEBACKEND_SNAPSHOT_SECONDS", "180"))
    keys, zeros = np.arange(50_000), np.zeros(50_000, np.int64)

    def states(keyed: Any) -> tuple[Any, Any, Any]:
        entries = sb.MapStateDescriptor("entries", int, int)
        descriptors = DESCRIPTORS["count"](), sb.ListStateDescriptor("numbers", int), entries
        return tuple(map(keyed.get_state, descriptors))  # type: ignore[return-value]

    def read(count: Any, numbers: Any, entries: Any) -> list[pa.Array]:
        return [count.get_many(keys), numbers.get_many(keys), entries.get_many(keys, zeros)]

    with create(backend) as keyed, open_store(tmp_path) as store:
        count, numbers, entries = states(keyed)
        flights: list[tuple[int, Any, list[pa.Array]]] = []
        commits, batches = 0, 0

        def write(rows: int) -> None:
            nonlocal batches
            batches += any(not pending.done() for _, pending, _ in flights)
            # Half of the batches take an eighth of the keys, so that others stay untouched for long.
            some = np_rng.choice(keys[: np_rng.choice([len(keys), len(keys) // 8])], rows, replace=False)
            count.update_many(some, some + batches)
            numbers.add_many(some[::2], some[::2] + batches)
            entries.put_many(some[1::2], zeros[: len(some) // 2], some[1::2] + batches)
            np_rng.choice([count, numbers, entries]).clear_many(some[: rows // 3])

        for number in itertools.count():
            rows = int(np_rng.choice([100, 5_000]))  # a delta and a base
            write(rows)
            held = read(count, numbers, entries)
            flights.append((number, keyed.snapshot(number, store, incremental=np_rng.random() < 0.7), held))
            while not flights[-1][1].done() and np_rng.random() < 0.95:
                write(rows)
            while len(flights) > np_rng.integers(3):
                checkpoint_id, pending, held = flights.pop(0)
                committed = store.commit(checkpoint_id, [pending.result()])
                with create(backend, restore=committed) as again:
                    assert read(*states(again)) == held, f"checkpoint {checkpoint_id}"
                commits += 1
            if time.monotonic() > until and not flights:
                break
    print(backend, commits, "snapshots,", batches, "batches while they were written")
    assert batches > commits // 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_said_of_states_is_of_the_moment_too(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that are declared, restored or get their first namespace while a snapshot is written are not in it."""
    go = threading.Event()
    write_data_file = writing.write_data_file

    def write_late(*arguments: Any, **options: Any) -> Any:
        assert go.wait(60)
        return write_data_file(*arguments, **options)

    with create(backend, int) as keyed, open_store(tmp_path, int) as store:
        for name, declared in [("carried", "int"), ("count", "bigint")]:
            keyed.get_state(sb.ValueStateDescriptor(name, declared)).update_many(range(50), range(50))
        checkpoint: Any = store.commit(0, [keyed.snapshot(0, store).result()])
    for checkpoint_id, incremental in enumerate([False, True, False, True], start=1):
        with create(backend, int, restore=checkpoint) as keyed, open_store(tmp_path, int) as store:
            count = keyed.get_state(sb.ValueStateDescriptor("count", int))
            count.update_many([1, 2], [checkpoint_id, 7])
            held = list(count.get_many(range(50)).to_pylist())
            monkeypatch.setattr(writing, "write_data_file", write_late)
            pending = keyed.snapshot(checkpoint_id, store, incremental=incremental)
            keyed.get_state(sb.ListStateDescriptor("late", str)).add_many([1], ["late"])
            keyed.get_state(sb.ValueStateDescriptor("count", int, default=99)).update_many([3], [-1])
            keyed.get_state(sb.ValueStateDescriptor("carried", "bigint")).update_many([1], [1 << 40])
            keyed.set_current_key(1)
            keyed.timers.register(5)
            keyed.set_current_namespace("later")
            count.update(-5)
            go.set()
            snapshot = pending.result()
            monkeypatch.undo()
            described = {each["name"]: each for each in snapshot.states}
            assert [name for name in described if "timers" not in name] == ["carried", "count"]
            assert described["carried"]["types"] == {"value": {"type": "int"}}
            checkpoint = store.commit(checkpoint_id, [snapshot])
            kinds = [file.kind for file in checkpoint.files.values()]
            assert kinds == (["base", "delta"] if incremental else ["base"])
            go.clear()
            table = sb.tools.read_state(tmp_path, "count")
            assert (table.schema.names, table.num_rows) == (["key", "value"], 50)
            carried = sb.tools.read_state(tmp_path, "carried")["value"].to_pylist()
            assert sorted(carried) == list(range(50))
            with create(backend, int, restore=checkpoint) as again:
                found = again.get_state(sb.ValueStateDescriptor("count", int)).get_many(range(50))
                assert found.to_pylist() == held
                assert again.timers.count() == 0


def test_the_next_snapshot_knows_what_became_of_states(tmp_path: Path) -> None:
    """What a backend remembers of its states from one snapshot to the next is found anew when one has changed."""
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        filler = keyed.get_state(sb.ValueStateDescriptor("filler", int))
        filler.update_many(range(100), range(100))
        clock = iter(range(100))

        def taken() -> dict[str, Any]:
            for incremental in (True, False):
                checkpoint_id = next(clock)
                pending = keyed.snapshot(checkpoint_id, store, incremental=incremental)
                committed = store.commit(checkpoint_id, [pending.result()])
                with create("reference", int, restore=committed) as again:
                    states = {name: again.get_state(each) for name, each in asked.items()}
                    held = {name: sorted(again.keys_and_namespaces(name), key=repr) for name in states}
                    held["timers"] = [row.timestamp for row in again.timers.rows()]
            return held

        asked: dict[str, Any] = {"count": sb.ValueStateDescriptor("count", int)}
        keyed.set_current_key(1)
        count.update(1)
        assert taken() == {"count": [(1, sb.VOID)], "timers": []}
        keyed.set_current_namespace(7)
        count.update(2)
        assert taken() == {"count": [(1, 7), (1, sb.VOID)], "timers": []}
        keyed.timers.register(5)
        assert taken() == {"count": [(1, 7), (1, sb.VOID)], "timers": [5]}
        asked["seen"] = sb.MapStateDescriptor("seen", int, int)
        keyed.set_current_namespace(sb.VOID)
        seen = keyed.get_state(asked["seen"])
        seen.put(1, 1)
        assert taken()["seen"] == [(1, sb.VOID)]
        keyed.set_current_namespace(7)
        seen.put(1, 1)
        assert taken()["seen"] == [(1, 7), (1, sb.VOID)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_parallelism(tmp_path: Path, backend: str, rng: random.Random) -> None:
    """1 → 3 → 24 → 2 instances, each with its own key groups, on either backend, incrementally in between."""
    held: list[Any] = []
    checkpoint: Any = ()
    groups = 24  # one for each instance, once
    store = sb.CheckpointStore(tmp_path, retain=1).open_for_writing(key_type=str, max_parallelism=groups)
    with store:
        for round_number, parallelism in enumerate([1, 3, groups, 2]):
            ranges = [sb.key_groups.range_for(groups, parallelism, index) for index in range(parallelism)]
            instances = [
                create(
                    rng.choice(BACKENDS) if round_number else backend,
                    str,
                    restore=checkpoint,
                    key_group_range=own,
                    max_parallelism=groups,
                )
                for own in ranges
            ]
            found = sorted([row for each in instances for row in contents(each)], key=repr)
            assert found == sorted(held, key=repr)
            for step in range(3):
                checkpoint_id = 10 * round_number + step
                for each, own in zip(instances, ranges, strict=True):
                    story = Story(each, rng, str)
                    story.keys = [key for key in story.keys if story_group(each, key) in own]
                    if story.keys:
                        story.change(600 // min(parallelism, 20))
                taken = [each.snapshot(checkpoint_id, store) for each in instances]
                checkpoint = store.commit(checkpoint_id, [pending.result() for pending in taken])
            held = [row for each in instances for row in contents(each)]
            for each in instances:
                each.close()


def story_group(keyed: Any, key: Any) -> int:
    return keyed._encoder.key_group(key, keyed.max_parallelism)


def test_a_state_that_nobody_asks_for_is_kept_and_written_again(tmp_path: Path, rng: random.Random) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int, retain=1) as store:
        Story(keyed, rng, int).change(1000)
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        held = contents(keyed)
        for checkpoint_id in range(1, 5):
            with create(rng.choice(BACKENDS), int, restore=checkpoint) as again:
                assert again.undeclared_states() == sorted(DESCRIPTORS)
                pending = again.snapshot(checkpoint_id, store, incremental=checkpoint_id % 2 == 0)
                checkpoint = store.commit(checkpoint_id, [pending.result()])
        assert restored("heap", int, checkpoint) == held


def test_a_state_asked_for_after_a_mark_has_what_was_restored_also_after_a_rollback(
    tmp_path: Path, rng: random.Random
) -> None:
    for backend in BACKENDS:
        with create(backend, int) as keyed, open_store(tmp_path / backend, int) as store:
            Story(keyed, rng, int).change(500)
            checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
            held = contents(keyed)
            with create(backend, int, restore=checkpoint) as again:
                mark = again.mark()
                story = Story(again, rng, int)
                story.change(200)
                again.rollback(mark)
                assert contents(again) == held
                story.change(20)
                committed = store.commit(1, [again.snapshot(1, store).result()])
                assert [file.kind for file in committed.files.values()] == ["base", "delta"]
                assert restored("heap", int, committed) == contents(again)


def test_going_on_after_a_restart_is_incremental(tmp_path: Path, rng: random.Random) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        story = Story(keyed, rng, int)
        story.change(2000)
        committed = store.commit(0, [keyed.snapshot(0, store).result()])
    with create("heap", int, restore=committed) as keyed, open_store(tmp_path, int) as store:
        story = Story(keyed, rng, int)
        story.change(10)
        committed = store.commit(1, [keyed.snapshot(1, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base", "delta"]
        # Another store has nothing to build on.
        with open_store(tmp_path / "other", int) as other:
            elsewhere = other.commit(2, [keyed.snapshot(2, other).result()])
            assert [file.kind for file in elsewhere.files.values()] == ["base"]
            assert restored("heap", int, elsewhere) == contents(keyed)


def test_nothing_changed_writes_nothing(tmp_path: Path, rng: random.Random) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        empty = store.commit(0, [keyed.snapshot(0, store).result()])
        assert empty.files == {}
        Story(keyed, rng, int).change(100)
        first = store.commit(1, [keyed.snapshot(1, store).result()])
        second = store.commit(2, [keyed.snapshot(2, store).result()])
        assert second.files == first.files


def test_what_was_merely_moved_or_read_is_not_written_again(tmp_path: Path) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        count = keyed.get_value_state(sb.ValueStateDescriptor("count", int))
        count.update_many(range(10_000), range(10_000))
        store.commit(0, [keyed.snapshot(0, store).result()])
        count.update_many(range(10_000, 14_000), range(4000))  # grows: entries move
        pending = keyed.snapshot(1, store)
        count.get_many(range(14_000))
        count.update_many([5], [6])
        rows = [file.size for file in store.commit(1, [pending.result()]).files.values()]
        last = store.commit(2, [keyed.snapshot(2, store).result()])
        assert len(last.files) == len(rows) + 1
        table = sb.tools.read_state(tmp_path, "count")
        assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))[5] == 6
        delta = list(last.files.values())[-1]
        assert delta.size < 4000


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_widen_and_time_to_live_comes_and_goes(tmp_path: Path, backend: str) -> None:
    clock = sb.testing.ManualClock(1000)
    with create(backend, int, clock=clock) as keyed, open_store(tmp_path, int) as store:
        keyed.get_state(sb.ValueStateDescriptor("v", "struct<a:int,b:string>")).update_many([1], [(5, "x")])
        keyed.get_state(sb.ListStateDescriptor("l", "int")).add_many([1, 1], [2, 3])
        keyed.get_state(sb.MapStateDescriptor("m", str, "float")).put_many([1], ["k"], [0.5])
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        clock.set(5000)
        ttl = sb.StateTtlConfig(100)
        with create(backend, int, clock=clock, restore=checkpoint) as again:
            value = again.get_state(
                sb.ValueStateDescriptor("v", "struct<c:bigint,a:bigint>").enable_time_to_live(ttl)
            )
            numbers = again.get_state(sb.ListStateDescriptor("l", "bigint").enable_time_to_live(ttl))
            seen = again.get_state(sb.MapStateDescriptor("m", str, "double").enable_time_to_live(ttl))
            clock.set(5099)
            again.set_current_key(1)
            assert (value.value(), numbers.get(), list(seen.items())) == ((None, 5), [2, 3], [("k", 0.5)])
            checkpoint = store.commit(1, [again.snapshot(1, store).result()])
            assert [file.kind for file in checkpoint.files.values()] == ["base"]
        with create(backend, int, clock=clock, restore=checkpoint) as again:
            value = again.get_state(
                sb.ValueStateDescriptor("v", "struct<c:bigint,a:bigint>").enable_time_to_live(ttl)
            )
            clock.set(5100)
            again.set_current_key(1)
            assert value.value() is None
            # Turned off, even what has expired is permanent.
            assert again.get_state(sb.ListStateDescriptor("l", "bigint")).get() == [2, 3]
            assert again.get_state(sb.MapStateDescriptor("m", str, "double")).get("k") == 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_loaded(tmp_path: Path, backend: str) -> None:
    with create(backend, int) as keyed, open_store(tmp_path, int) as store:
        keyed.get_state(sb.ValueStateDescriptor("v", int)).update_many([1], [5])
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
    with create(backend, int, restore=checkpoint) as again:
        for descriptor in (
            sb.ValueStateDescriptor("v", "int"),
            sb.ValueStateDescriptor("v", str),
            sb.ListStateDescriptor("v", int),
            sb.ValueStateDescriptor("v", sb.types.PICKLE),
        ):
            with pytest.raises(
                sb.StateMigrationError, match="state 'v' is VALUE of bigint in the checkpoint"
            ):
                again.get_state(descriptor)
        assert again.get_state(sb.ValueStateDescriptor("v", int)).get_many([1]).to_pylist() == [5]
    with pytest.raises(sb.StateMigrationError, match="keys of the checkpoint are bigint"):
        create(backend, str, restore=checkpoint)
    with pytest.raises(sb.StateMigrationError, match="has 32 key groups"):
        create(backend, int, max_parallelism=16, restore=checkpoint)
    with pytest.raises(sb.UsageError, match="a int is nothing to restore from"):
        create(backend, int, restore=7)
    with pytest.raises(sb.UsageError, match="there is no savepoint"):
        create(backend, int, restore=str(tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_expired_is_left_out_of_full_snapshots_that_clean_up(tmp_path: Path, backend: str) -> None:
    clock = sb.testing.ManualClock(0)
    cleaning = sb.StateTtlConfig(100, cleanup_full_snapshot=True)
    keeping = sb.StateTtlConfig(100)
    with create(backend, int, clock=clock) as keyed, open_store(tmp_path, int) as store:
        for name, ttl in [("cleaned", cleaning), ("kept", keeping)]:
            keyed.get_state(sb.ValueStateDescriptor(f"{name} v", int).enable_time_to_live(ttl)).update_many(
                [1], [5]
            )
            keyed.get_state(sb.ListStateDescriptor(f"{name} l", int).enable_time_to_live(ttl)).add_many(
                [1], [5]
            )
            keyed.get_state(sb.MapStateDescriptor(f"{name} m", int, int).enable_time_to_live(ttl)).put_many(
                [1], [5], [5]
            )
        clock.set(50)
        keyed.get_state(sb.ListStateDescriptor("cleaned l", int).enable_time_to_live(cleaning)).add_many(
            [1], [6]
        )
        clock.set(120)
        store.commit(0, [keyed.snapshot(0, store, incremental=False).result()])
        store.commit(1, [keyed.snapshot(1, store, incremental=False).result()])
        # By the last committed time: the first full snapshot knows none.
        for name, lists in [("cleaned", [[6]]), ("kept", [[5]])]:
            found = sb.tools.read_state(tmp_path, f"{name} l")["value"].to_pylist()
            # RocksDB may drop what has expired whenever it merges the elements of a list.
            assert found == lists or (backend == "rocksdb" and name == "kept" and found == [])
            for kind in "vm":
                assert sb.tools.read_state(tmp_path, f"{name} {kind}").num_rows == (name == "kept")
        assert sb.tools.read_state(tmp_path, "cleaned v", id=0).num_rows == 1


def test_map_entries_keep_their_order_through_removals_and_restarts(tmp_path: Path) -> None:
    ordered = [name for name in BACKENDS if sb.create_backend(name).keeps_insertion_order]
    for backend in ordered:
        with create(backend, int) as keyed, open_store(tmp_path / backend, int) as store:
            seen = keyed.get_state(sb.MapStateDescriptor("m", str, int))
            keyed.set_current_key(1)
            seen.put_all({"a": 1, "b": 2, "c": 3})
            filler = keyed.get_state(sb.ValueStateDescriptor("filler", int))
            filler.update_many(range(100), range(100))
            store.commit(0, [keyed.snapshot(0, store).result()])
            seen.remove("a")
            seen.put("a", 4)
            seen.put("b", 5)
            seen.put("d", 6)
            committed = store.commit(1, [keyed.snapshot(1, store).result()])
            assert [file.kind for file in committed.files.values()] == ["base", "delta"]
            expected = list(seen.items())
            assert expected == [("b", 5), ("c", 3), ("a", 4), ("d", 6)]
            for other in ordered:
                with create(other, int, restore=committed) as again:
                    again.set_current_key(1)
                    assert list(again.get_state(sb.MapStateDescriptor("m", str, int)).items()) == expected


def test_32768_key_groups(tmp_path: Path, rng: random.Random) -> None:
    groups = 32_768
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=groups)
    with create("heap", int, max_parallelism=groups) as keyed, store:
        count = keyed.get_state(sb.ValueStateDescriptor("many", int))
        count.update_many(range(100_000), range(100_000))
        story = Story(keyed, rng, int, keys=300)
        for checkpoint_id in range(4):
            story.change(800)
            keyed.set_current_namespace(sb.VOID)
            count.update_many([checkpoint_id], [-1])
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base", "delta", "delta", "delta"]
        numbers = count.get_many(range(100_000)).to_pylist()
        held = contents(keyed)
    for parallelism, backend in [(1, "heap"), (5, "heap"), (3, "reference"), (4, "rocksdb")]:
        found, seen = [], [None] * 100_000
        for index in range(parallelism):
            own = sb.key_groups.range_for(groups, parallelism, index)
            with create(
                backend, int, max_parallelism=groups, restore=committed, key_group_range=own
            ) as again:
                found += contents(again)
                again.set_current_namespace(sb.VOID)
                many = again.get_state(sb.ValueStateDescriptor("many", int))
                keys = list(again.keys("many"))
                for key, value in zip(keys, many.get_many(keys).to_pylist(), strict=True):
                    seen[key] = value
        assert sorted(found, key=repr) == sorted(held, key=repr)
        assert seen == numbers


def test_a_chain_of_230_checkpoints_with_merges_in_between(tmp_path: Path, rng: random.Random) -> None:
    """With the sizes and numbers of the library: a base and few files of each size, whose content is the state."""
    names = ["count", "tags", "seen", "total"]
    merged = longest = 0
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        story = Story(keyed, rng, int, names=names)
        story.change(2000)
        known: set[str] = set()
        for checkpoint_id in range(230):
            story.change(rng.randrange(4))
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            files = list(committed.files.values())
            assert [file.kind for file in files] == ["base"] + ["delta"] * (len(files) - 1)
            merged += any(file.name not in known for file in files[1:-1])
            known |= set(committed.files)
            longest = max(longest, len(files))
            if keyed._log.rewriting is not None:
                keyed._log.rewriting.wait()
            if checkpoint_id % 23 == 22:
                held = contents(keyed, names)
                for backend in BACKENDS:
                    assert restored(backend, int, committed, names=names) == held
    assert merged >= 10
    assert longest <= 1 + 3 * chain.FAN


def test_one_element_of_a_large_collection_is_written_alone(tmp_path: Path) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        numbers = keyed.get_state(sb.ListStateDescriptor("numbers", int))
        entries = keyed.get_state(sb.MapStateDescriptor("entries", int, int))
        filler = keyed.get_state(sb.ValueStateDescriptor("filler", int))
        zeros = [0] * 100_000
        numbers.add_many(zeros, range(100_000))
        entries.put_many(zeros, range(100_000), range(100_000))
        filler.update_many(range(100), range(100))
        store.commit(0, [keyed.snapshot(0, store).result()])
        keyed.set_current_key(0)
        numbers.add(-1)
        entries.put(5, -1)
        committed = store.commit(1, [keyed.snapshot(1, store).result()])
        base, delta = committed.files.values()
        assert base.size > 100_000
        assert delta.size < 3000
        for backend in BACKENDS:
            with create(backend, int, restore=committed) as again:
                again.set_current_key(0)
                found = again.get_state(sb.ListStateDescriptor("numbers", int)).get()
                assert (len(found), found[-1]) == (100_001, -1)
                assert again.get_state(sb.MapStateDescriptor("entries", int, int)).get(5) == -1


def test_changes_that_no_delta_will_be_written_of_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap_snapshots, "MOST_CHANGES", 1000)
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        count.update_many(range(100), range(100))
        store.commit(0, [keyed.snapshot(0, store).result()])
        for _ in range(100):
            count.update_many(range(100, 200), range(100))
            count.clear_many(range(100, 200))
            keyed.advance()
        assert keyed.metrics()["marks"] == 0
        committed = store.commit(2, [keyed.snapshot(2, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base"]
        assert restored("reference", int, committed, names=["count"]) == contents(keyed, ["count"])


def test_batches_of_a_base_are_bounded_whatever_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that stand in the row of each entry, and elements of lists, count like values."""
    limit = 1 << 20
    monkeypatch.setattr(heap_snapshots, "BATCH_BYTES", limit)
    long_text = "x" * 40_000
    with create("heap", str) as keyed:
        seen = keyed.get_state(sb.MapStateDescriptor("seen", int, int))
        tags = keyed.get_state(sb.ListStateDescriptor("tags", str))
        names = keyed.get_state(sb.ValueStateDescriptor("names", str))
        for number in range(100):
            keyed.set_current_key(f"{number}" + long_text)
            seen.put_all(dict.fromkeys(range(10), 1))
            keyed.set_current_key(str(number))
            tags.update([long_text] * 10)
            names.update(long_text)
        view = keyed._open_view(None)
        try:
            for section in view.sections():
                sizes = [rows.batch.nbytes for rows in section.batches if rows.batch.num_rows]
                if section.name in ("seen", "tags", "names"):
                    assert 0 < max(sizes) < 2 * limit
        finally:
            view.release()


def test_batches_of_changes_are_bounded_and_restore_to_memory(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 16
    monkeypatch.setattr(heap_snapshots, "BATCH_BYTES", limit)
    monkeypatch.setattr(heap_snapshots, "BATCH_ROWS", 64)
    long_text = "x" * 5000
    with create("heap", str) as keyed, open_store(tmp_path, str) as store:
        story = Story(keyed, rng, str)
        story.change(6000)
        tags = keyed.get_state(sb.ListStateDescriptor("tags", str))
        store.commit(0, [keyed.snapshot(0, store).result()])
        point = keyed._log._points.open()
        story.change(500)
        keyed.set_current_namespace(VOID)
        for number in range(40):
            keyed.set_current_key(f"{number}" + long_text)
            tags.update([long_text] * 3)
        source = keyed._read_changes(point)
        batches = [rows.batch for section in source.sections() for rows in section.batches]
        assert len(batches) > 20
        assert max(batch.nbytes for batch in batches) < 2.5 * limit
        held, texts = contents(keyed), sorted(keyed.keys("tags", VOID))
        committed = store.commit(1, [keyed.snapshot(1, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base", "delta"]
        assert restored("heap", str, committed) == held
        with create("reference", str, restore=committed) as again:
            tags = again.get_state(sb.ListStateDescriptor("tags", str))
            assert sorted(again.keys("tags", VOID)) == texts
            again.set_current_key("5" + long_text)
            assert tags.get() == [long_text] * 3


def test_objects_count_by_what_they_are_when_serialised(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few large ones among many small ones; whether they lie in one namespace or in several."""
    limit = 1 << 18
    monkeypatch.setattr(heap_snapshots, "BATCH_BYTES", limit)
    asked: dict[str, Any] = {
        "value": lambda: sb.ValueStateDescriptor("value", sb.types.PICKLE),
        "list": lambda: sb.ListStateDescriptor("list", sb.types.PICKLE),
        "map": lambda: sb.MapStateDescriptor("map", int, sb.types.PICKLE),
    }

    def thing() -> list[Any]:
        return ["x" * 40_000 if rng.random() < 0.1 else "y"]

    def fill(keyed: Any, numbers: range) -> None:
        for number in numbers:
            keyed.set_current_key(number)
            keyed.set_current_namespace(sb.VOID if number % 3 else "other")
            keyed.get_state(asked["value"]()).update(thing())
            keyed.get_state(asked["list"]()).update([thing() for _ in range(number % 4)])
            keyed.get_state(asked["map"]()).put_all({n: thing() if n else None for n in range(number % 4)})

    with create("heap", int, max_parallelism=4) as keyed:
        fill(keyed, range(400))
        point = keyed._log._points.open()
        fill(keyed, range(200, 500))
        for source in (keyed._open_view(None), keyed._read_changes(point)):
            for section in source.sections():
                batches = [rows.batch for rows in section.batches]
                assert len(batches) > 3
                assert max(each.nbytes for each in batches) < 2.5 * limit
            source.release()
        expected = contents(keyed, descriptors=asked)
        savepoint = keyed.savepoint(tmp_path / "savepoint")
    for backend in BACKENDS:
        with create(backend, int, max_parallelism=4, restore=savepoint) as again:
            assert contents(again, descriptors=asked) == expected


@pytest.mark.parametrize("element", ["bigint", "string", sb.types.PICKLE], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_list_that_is_put_twice_the_last_one_counts(backend: str, element: Any) -> None:
    """Other writers may leave such files, and the tools that read them do the same."""
    with create(backend, int) as keyed:
        tags = keyed.get_state(sb.ListStateDescriptor("tags", element))
        lists = {number: [to_stored(element, each) for each in number] for number in [(5,), (6, 7), (9,)]}
        stored = sb.types.of(element).arrow
        for puts in ([(1, (5,)), (1, (6, 7)), (2, (9,))], [(1, (9,)), (2, (5,)), (2, (6, 7))]):
            values = pa.array([lists[each] for _, each in puts], pa.list_(stored))
            with keyed._loading():
                rows = pa.record_batch({"key": [key for key, _ in puts], "value": values})
                keyed._load(tags, iter([(Op.PUT, rows)]))
            for key, last in dict(puts).items():
                keyed.set_current_key(key)
                assert [str(each) for each in tags.get()] == [str(each) for each in last]


def to_stored(element: Any, number: int) -> Any:
    return {"bigint": number, "string": str(number)}.get(element, pickle.dumps(number))
