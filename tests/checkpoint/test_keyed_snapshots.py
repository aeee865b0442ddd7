"""Snapshots of keyed state: what is restored is what was in memory when they were taken."""

from __future__ import annotations

import itertools
import os
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
from statebackend.checkpoint.keyed import chain, compaction, compiled_backend, row_source as writing
from statebackend.keys import VOID

pytestmark = [pytest.mark.checked, pytest.mark.usefixtures("no_fsync")]


def restored(
    backend: str, key_type: Any, checkpoint: sb.Checkpoint, *, names: Any = None, **options: Any
) -> list[Any]:
    with create(backend, key_type, restore=checkpoint, **options) as keyed:
        return contents(keyed, names)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key_type", KEY_TYPES.values(), ids=KEY_TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_go_anywhere(tmp_path: Path, backend: str, key_type: Any, rng: random.Random) -> None:
    with create(backend, key_type) as keyed, open_store(tmp_path, key_type) as store:
        story = Story(keyed, rng, key_type)
        story.change(1500)
        for checkpoint_id in range(5):
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            held = contents(keyed)
            assert len(held) > 100
            for other in BACKENDS:
                assert restored(other, key_type, committed) == held
            story.change(rng.randrange(10, 60))  # few are changes of nothing, which give no file
        kinds = [file.kind for file in committed.files.values()]
        assert kinds[0] == "base"
        assert kinds[1:] == ["delta"] * 4


def test_with_and_without_compression(tmp_path: Path) -> None:
    for compression in ("zstd", "lz4", None):
        folder = tmp_path / str(compression)
        with create("heap", str) as keyed, open_store(folder, str, compression=compression) as store:
            text = keyed.get_state(sb.ValueStateDescriptor("text", str))
            text.update_many([f"key {n}" for n in range(500)], ["the same " * 20] * 500)
            committed = store.commit(0, [keyed.snapshot(0, store).result()])
            assert (sum(file.size for file in committed.files.values()) < 75_000) == (compression is not None)
    with pytest.raises(sb.UsageError, match='expected "zstd", "lz4" or None'):
        sb.CheckpointStore(tmp_path, compression="gzip")


@pytest.mark.sampled(2)
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
    """Several in flight, some given up, rolled back to before the last commit, files merged in pieces in between."""
    monkeypatch.setattr(chain, "FAN", fan)
    monkeypatch.setattr(chain, "SMALLEST_BASE", smallest_base)
    limit, size = ("PIECE_ROWS", 4) if fan == 2 else ("PIECE_BYTES", 100)
    monkeypatch.setattr(compaction, limit, size)
    other = "reference" if backend == "heap" else "heap"
    rewritten = 0
    with create(backend, int) as keyed, open_store(tmp_path, int, retain=3) as store:
        story = Story(keyed, rng, int)
        story.change(800)
        marks, flights = [], []
        for checkpoint_id in range(120 if is_stress else 26):
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
    assert rewritten > 2, rewritten
    left = {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()}
    named = {Path(name).name for each in store.checkpoints() for name in store.open(each).files}
    assert left == named


def test_key_groups_are_cut_where_a_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_backend, "BATCH_ROWS", 6)
    ranges = {
        (3, 3): [(10, 11)],
        (3, 0, 3, 3, 2): [(10, 12), (13, 14)],
        (0, 13, 6): [(11, 11), (12, 12)],
        (0, 0): [],
    }
    for sizes, expected in ranges.items():
        assert list(compiled_backend.group_ranges(np.array(sizes), 10)) == expected


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_snapshots_under_writes_are_exact(tmp_path: Path, backend: str, np_rng: np.random.Generator) -> None:
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
def test_states_are_of_the_moment(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            keyed.timers.register_event_time_timer(5)
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
            table = sb.tools.state(tmp_path, "count").to_table()
            assert (table.schema.names, table.num_rows) == (["key", "value"], 50)
            carried = sb.tools.state(tmp_path, "carried").to_table()["value"].to_pylist()
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
        keyed.timers.register_event_time_timer(5)
        assert taken() == {"count": [(1, 7), (1, sb.VOID)], "timers": [5]}
        asked["seen"] = sb.MapStateDescriptor("seen", int, int)
        keyed.set_current_namespace(sb.VOID)
        seen = keyed.get_state(asked["seen"])
        seen.put(1, 1)
        assert taken()["seen"] == [(1, sb.VOID)]
        keyed.set_current_namespace(7)
        seen.put(1, 1)
        assert taken()["seen"] == [(1, 7), (1, sb.VOID)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_parallelism(tmp_path: Path, backend: str, rng: random.Random) -> None:
    """1 → 3 → 12 → 2 instances, each with its own key groups, on either backend, incrementally in between."""
    held: list[Any] = []
    checkpoint: Any = ()
    groups = 12  # one for each instance, once
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
            for step in range(2):
                checkpoint_id = 10 * round_number + step
                for each, own in zip(instances, ranges, strict=True):
                    story = Story(each, rng, str)
                    story.keys = [key for key in story.keys if story_group(each, key) in own]
                    if story.keys:
                        story.change(600 // parallelism)
                taken = [each.snapshot(checkpoint_id, store) for each in instances]
                checkpoint = store.commit(checkpoint_id, [pending.result() for pending in taken])
            held = [row for each in instances for row in contents(each)]
            for each in instances:
                each.close()


def story_group(keyed: Any, key: Any) -> int:
    return keyed._encoder.key_group(key, keyed.max_parallelism)


def test_undeclared_state_is_kept_and_written_again(tmp_path: Path, rng: random.Random) -> None:
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


def test_a_state_asked_for_after_a_mark_outlives_a_rollback(tmp_path: Path, rng: random.Random) -> None:
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


def test_nothing_changed_writes_nothing(tmp_path: Path, rng: random.Random) -> None:
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        empty = store.commit(0, [keyed.snapshot(0, store).result()])
        assert empty.files == {}
        Story(keyed, rng, int).change(100)
        first = store.commit(1, [keyed.snapshot(1, store).result()])
        second = store.commit(2, [keyed.snapshot(2, store).result()])
        assert second.files == first.files


def test_entries_merely_moved_or_read_are_not_written_again(tmp_path: Path) -> None:
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
        table = sb.tools.state(tmp_path, "count").to_table()
        assert dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))[5] == 6
        delta = list(last.files.values())[-1]
        assert delta.size < 4000


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_widen(tmp_path: Path, backend: str) -> None:
    with create(backend, int) as keyed, open_store(tmp_path / "store", int) as store:
        keyed.get_state(sb.ValueStateDescriptor("v", "struct<a:int,b:string>")).update_many([1], [(5, "x")])
        keyed.get_state(sb.ListStateDescriptor("l", "int")).add_many([1, 1], [2, 3])
        keyed.get_state(sb.MapStateDescriptor("m", str, "float")).put_many([1], ["k"], [0.5])
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        for source in (checkpoint, keyed.savepoint(tmp_path / "savepoint")):
            with create(backend, int, restore=source) as again:
                again.set_current_key(1)
                value = again.get_state(sb.ValueStateDescriptor("v", "struct<c:bigint,a:bigint>"))
                assert value.value() == (None, 5)
                assert again.get_state(sb.ListStateDescriptor("l", "bigint")).get() == [2, 3]
                assert again.get_state(sb.MapStateDescriptor("m", str, "double")).get("k") == 0.5
                if source is checkpoint:
                    taken = again.snapshot(1, store).result()
                    assert [file.kind for file in taken.files] == ["base"], "of the new types"


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_does_not_fit_is_refused_by_name_before_loading(tmp_path: Path, backend: str) -> None:
    with create(backend, int) as keyed, open_store(tmp_path / "store", int) as store:
        keyed.get_state(sb.ValueStateDescriptor("v", int)).update_many([1], [5])
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        savepoint = keyed.savepoint(tmp_path / "savepoint")
    for source in (checkpoint, savepoint):
        with create(backend, int, restore=source) as again:
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
        with pytest.raises(sb.StateMigrationError, match=r"are bigint.*\[STATE_MIGRATION\.KEY_TYPE\]"):
            create(backend, str, restore=source)
    with pytest.raises(sb.StateMigrationError, match="has 32 key groups"):
        create(backend, int, max_parallelism=16, restore=checkpoint)
    with pytest.raises(sb.UsageError, match="a int is nothing to restore from"):
        create(backend, int, restore=7)


def test_32768_key_groups(tmp_path: Path, rng: random.Random) -> None:
    groups = 32_768
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=groups)
    with create("heap", int, max_parallelism=groups) as keyed, store:
        many = sb.ValueStateDescriptor("many", int)
        keyed.get_state(many).update_many(range(5_000), range(5_000))
        story = Story(keyed, rng, int, keys=300)
        for checkpoint_id in range(3):
            story.change(400)
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base", "delta", "delta"]
        held = contents(keyed)
    for parallelism, backend in [(1, "heap"), (3, "reference"), (2, "rocksdb")]:
        found, numbers = [], []
        for index in range(parallelism):
            own = sb.key_groups.range_for(groups, parallelism, index)
            with create(
                backend, int, max_parallelism=groups, restore=committed, key_group_range=own
            ) as again:
                found += contents(again)
                state, keys = again.get_state(many), list(again.keys("many", VOID))
                again.set_current_namespace(VOID)
                assert state.get_many(keys).to_pylist() == keys
                numbers += keys
        assert sorted(found, key=repr) == sorted(held, key=repr)
        assert sorted(numbers) == list(range(5_000))


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_one_element_of_a_large_collection_is_written_alone(tmp_path: Path, backend: str) -> None:
    with create(backend, int) as keyed, open_store(tmp_path, int) as store:
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
        for other in BACKENDS:
            with create(other, int, restore=committed) as again:
                again.set_current_key(0)
                found = again.get_state(sb.ListStateDescriptor("numbers", int)).get()
                assert (len(found), found[-1]) == (100_001, -1)
                assert again.get_state(sb.MapStateDescriptor("entries", int, int)).get(5) == -1


def test_files_that_changed_places_are_found(tmp_path: Path) -> None:
    """Files of one length, each whole in itself."""
    with create("heap", int) as keyed, open_store(tmp_path, int) as store:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        count.update_many(range(1000), range(1000))
        for checkpoint_id in range(9):
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            count.update_many([7], [checkpoint_id])
        pairs = itertools.combinations([tmp_path / name for name in committed.files], 2)
        first, second = next(pair for pair in pairs if len({path.stat().st_size for path in pair}) == 1)
        mine, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(mine)
        with pytest.raises(sb.CorruptCheckpointError, match="the file has the content of another one"):
            create("heap", int, restore=store.open(8))


def test_changes_that_no_delta_has_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_backend, "MOST_CHANGES", 1000)
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


def test_batches_are_bounded_whatever_is_long_and_restore_to_memory(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 16
    monkeypatch.setattr(compiled_backend, "BATCH_BYTES", limit)
    monkeypatch.setattr(compiled_backend, "BATCH_ROWS", 64)
    long_text = "x" * 5000

    def check(source: Any) -> None:
        batches = [rows.batch for section in source.sections() for rows in section.batches]
        assert len(batches) > 20
        assert max(batch.nbytes for batch in batches) < 2.5 * limit

    with create("heap", str) as keyed, open_store(tmp_path, str) as store:
        story = Story(keyed, rng, str)
        story.change(6000)
        store.commit(0, [keyed.snapshot(0, store).result()])
        point = keyed._log._points.open()
        story.change(500)
        keyed.set_current_namespace(VOID)
        for number in range(40):
            keyed.set_current_key(f"{number}" + long_text)
            story.states["tags"].update([long_text] * 3)
            if number < 4:
                story.states["name"].update(long_text)
                story.states["seen"].put_all(dict.fromkeys("abcdefghij", 1.0))
        check(keyed._read_changes(point))
        held, texts = contents(keyed), sorted(keyed.keys("tags", VOID))
        committed = store.commit(1, [keyed.snapshot(1, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base", "delta"]
        assert restored("heap", str, committed) == held
        view = keyed._open_view(None)
        check(view)
        view.release()
        with create("reference", str, restore=committed) as again:
            tags = again.get_state(sb.ListStateDescriptor("tags", str))
            assert sorted(again.keys("tags", VOID)) == texts
            again.set_current_key("5" + long_text)
            assert tags.get() == [long_text] * 3


def test_objects_count_in_bytes(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few large ones among many small ones; whether they lie in one namespace or in several."""
    limit = 1 << 18
    monkeypatch.setattr(compiled_backend, "BATCH_BYTES", limit)
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
