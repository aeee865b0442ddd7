"""Where timers are stored: the first of a key in the key's entry, the others in a map state; and the rows of both."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from statebackend.backends.heap import HeapBackend
from statebackend.backends.heap.snapshot_source import HeapChanges, HeapView
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import Source
from statebackend.keys import VOID, TimeWindow
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

#: Key, namespace, time.
Row = tuple[Any, bytes, int]


@pytest.fixture(params=[int, str])
def key_type(request: pytest.FixtureRequest) -> type:
    found: type = request.param
    return found


@pytest.fixture
def keyed(key_type: type) -> Iterator[Any]:
    backend = HeapBackend(threads=1)
    with backend.create_keyed_backend(key_type, max_parallelism=4, clock=ManualClock()) as keyed:
        yield keyed


def check(keyed: Any) -> None:
    """The invariants of the tables and the queue."""
    for handle in keyed.timers._handles().values():
        handle._check()
        for maps in filter(None, (handle.plain_map, handle.spaced_map)):
            maps._check()
        for table in handle._tables():
            table._check()


def rows_of(source: Source) -> Iterator[tuple[Any, Row]]:
    """All rows, with their operations, in order."""
    for section in source.sections():
        for rows in section.batches:
            columns = rows.batch.to_pydict()
            names = columns.get("namespace", [b""] * rows.batch.num_rows)
            ops = columns.get("op", [None] * rows.batch.num_rows)
            puts = [op in (None, Op.PUT) for op in ops]
            assert columns["value"] == [False if is_put else None for is_put in puts]
            yield from zip(ops, zip(columns["key"], names, columns["map_key"], strict=True), strict=True)


def in_a_full_snapshot(keyed: Any) -> list[Row]:
    view = HeapView(keyed, None)
    found = sorted(row for _, row in rows_of(view))
    view.release()
    return found


def after_changes(keyed: Any, mark: Any, before: Iterable[Row]) -> list[Row]:
    """The timers that were there at a mark, and what the changes since make of them."""
    left = set(before)
    for op, row in rows_of(HeapChanges(keyed, keyed._marks.point_of(mark))):
        if op == Op.PUT:
            left.add(row)
        else:
            assert op == Op.REMOVE
            left.discard(row)
    return sorted(left)


@pytest.mark.parametrize("seed", range(2))
def test_rows_and_changes_tell_of_every_timer_wherever_it_is(keyed: Any, key_type: type, seed: int) -> None:
    rng = random.Random(seed)
    keys = [key_type(each) for each in range(12)]
    namespaces = [VOID, VOID, TimeWindow(0, 1), TimeWindow(0, 2)][: 4 if seed % 2 else 1]
    wanted: set[Row] = set()
    marks: list[tuple[Any, set[Row]]] = []
    for number in range(1_200):
        key, namespace, action = rng.choice(keys), rng.choice(namespaces), rng.random()
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        name = keyed._namespace
        pending = sorted(time for at, of, time in wanted if (at, of) == (key, name))
        assert keyed.timers.pending_event_time_timers() == pending
        if action < 0.5:
            time = rng.randrange(6)
            keyed.timers.register_event_time_timer(time)
            wanted.add((key, name, time))
        elif action < 0.8 and pending:
            time = rng.choice(pending)
            keyed.timers.delete_event_time_timer(time)
            wanted.remove((key, name, time))
        elif action < 0.82:
            fired = [(keyed.current_key, keyed._namespace, time) for time in keyed.timers.due(0)]
            assert sorted(fired) == sorted(row for row in wanted if row[2] == 0)
            wanted -= set(fired)
        elif action < 0.86 and len(marks) < 3:
            marks.append((keyed.mark(), set(wanted)))
        elif action < 0.88 and marks:
            del marks[rng.randrange(len(marks)) + 1 :]
            keyed.rollback(marks[-1][0])
            wanted = set(marks[-1][1])
        elif action < 0.89 and marks:
            keyed.release(marks.pop(rng.randrange(len(marks)))[0])
        elif action < 0.91:
            snapshot = keyed.core.snapshot()
            assert in_a_full_snapshot(keyed) == sorted(wanted)
            snapshot.release()
        if number % 20 == 0:
            check(keyed)
            for mark, before in marks:
                assert after_changes(keyed, mark, before) == sorted(wanted)
    assert in_a_full_snapshot(keyed) == sorted(wanted)


def test_the_only_timer_of_a_key_takes_no_entry_of_the_map_state(keyed: Any, key_type: type) -> None:
    for step in range(3):
        for key in map(key_type, range(100)):
            keyed.set_current_key(key)
            keyed.timers.delete_event_time_timer(step)
            keyed.timers.register_event_time_timer(step + 1)
            keyed.timers.register_event_time_timer(step + 1)
    (handle,) = keyed.timers._handles().values()
    assert handle.more is None
    assert [len(table) for table in handle._tables()] == [100]
    keyed.timers.register_event_time_timer(9)
    assert [len(table) for table in handle._tables()] == [100, 1, 1]
    assert keyed.timers.pending_event_time_timers() == [3, 9]
    check(keyed)


def test_a_timer_of_the_map_state_is_not_registered_again_in_the_entry_of_its_key(
    keyed: Any, key_type: type
) -> None:
    keyed.set_current_key(key_type(1))
    for time in (10, 20, 30):
        keyed.timers.register_event_time_timer(time)
    keyed.timers.delete_event_time_timer(10)
    keyed.timers.register_event_time_timer(20)
    assert keyed.timers.count() == 2
    keyed.timers.register_event_time_timer(40)
    (handle,) = keyed.timers._handles().values()
    assert [len(table) for table in handle._tables()] == [1, 1, 2]
    check(keyed)
    keyed.timers.delete_event_time_timer(20)
    keyed.timers.delete_event_time_timer(20)
    assert list(keyed.timers.due(100)) == [30, 40]
    assert [len(table) for table in handle._tables()] == [0, 0, 0]
