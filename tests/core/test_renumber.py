"""The version counter comes to its end: versions are counted anew and every comparison stays what it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
from map_model import reduce_many
from twin.cow_map import LAST_VERSION
from twin.implementations import contents, implementation, reclaim, slots, view_contents

from statebackend._core.core_probe import StateTable, set_state_version
from statebackend._core.tables.state_core import StateCore

__all__ = ["implementation"]

pytestmark = pytest.mark.checked


def open_everything(implementation, **options):
    """A table with snapshots and marks in between, each with the state that it must show."""
    made = implementation.make(hash_mask=3, initial_capacity=4, **options)
    core, table, views, marks = made.core, made.table, [], []
    for number in range(6):
        for key in range(8):
            table.put(key * (number + 1) % 11, number * 100 + key)
        table.remove(number)
        if number % 2:
            views.append((core.snapshot(), contents(table)))
        else:
            marks.append((core.mark(), contents(table)))
    return core, table, views, marks


@pytest.mark.parametrize("last_step", ["mark", "snapshot", "rollback"])
@pytest.mark.parametrize("below", range(4))
def test_marks_and_snapshots_survive_renumbering(implementation, last_step, below):
    core, table, views, marks = open_everything(implementation)
    set_state_version(core, LAST_VERSION - below)
    table.put(0, -1)
    for _ in range(5):
        if last_step == "mark":
            marks.append((core.mark(), contents(table)))
        elif last_step == "snapshot":
            views.append((core.snapshot(), contents(table)))
        else:
            core.rollback(marks[-1][0])
            assert contents(table) == marks[-1][1]
        table.put(1, -2)
        table.remove(2)
        table._check()
        core._check()
    assert core.metrics()["state_version"] < 50
    for view, expected in views:
        assert view_contents(view, table) == expected
    for mark, expected in reversed(marks):
        core.rollback(mark)
        assert contents(table) == expected
        table.put(3, -3)
        table._check()
    for view, expected in views:
        assert view_contents(view, table) == expected
        view.release()
    for mark, _ in marks:
        core.release(mark)
    reclaim(core)
    assert table.map_info(0)["used_slots"] == len(table)


def test_what_belongs_to_a_snapshot_is_cloned_after_renumbering_and_nothing_else(implementation):
    made = implementation.chained(1, 2)
    core, table = made.core, made.table
    with core.snapshot() as view:
        table.put(3, 3)
        before = slots(table, 1)
        set_state_version(core, LAST_VERSION)
        core.mark()
        assert core.metrics()["state_version"] < 10
        table.put(3, -3)
        assert slots(table, 1) == before
        table.put(1, -1)
        after = slots(table, 1)
        assert after[3] == before[3]
        assert not {after[1], after[2]} & set(before.values())
        assert table.metrics()["copied_pages"] == 1
        assert view_contents(view, table) == {1: 1, 2: 2}


def test_what_was_written_since_a_mark_is_journalled_once_after_renumbering(implementation):
    made = implementation.chained(1, 2)
    core, table = made.core, made.table
    mark = core.mark()
    table.put(1, -1)
    set_state_version(core, LAST_VERSION)
    with core.snapshot() as view:
        table.put(1, -2)
        table.put(2, -2)
        assert table.dirty(mark) == {(1, 0), (2, 0)}
        core.rollback(mark)
        assert contents(table) == {1: 1, 2: 2}
        assert view_contents(view, table) == {1: -1, 2: 2}


def test_a_map_that_no_snapshot_has_seen_yet_is_seen_after_renumbering(implementation):
    made = implementation.chained(1, 2)
    core, table = made.core, made.table
    old = core.snapshot()
    table.put(1, -1)
    new = core.snapshot()
    set_state_version(core, LAST_VERSION)
    core.mark()
    assert view_contents(new, table) == {1: -1, 2: 2}
    table.put(2, -2)
    assert view_contents(old, table) == {1: 1, 2: 2}
    assert view_contents(new, table) == {1: -1, 2: 2}


def test_an_idle_core_begins_anew(implementation):
    made = implementation.chained(1, 2)
    core, table = made.core, made.table
    set_state_version(core, LAST_VERSION)
    with core.snapshot() as view:
        table.put(1, -1)
        assert core.metrics()["state_version"] == view.version == 1
        assert view_contents(view, table) == {1: 1, 2: 2}


@pytest.mark.parametrize("seed", range(10))
def test_random_histories_with_many_renumberings(implementation, seed):
    r = random.Random(seed)
    made = implementation.make(hash_mask=r.choice((0, 3, 0xFFFFFFFF)), initial_capacity=4)
    core, table, state, views, marks = made.core, made.table, {}, [], []
    for number in range(600):
        key, action = r.randrange(30), r.choice("ppppprrgsSmMb")
        if number % 7 == 0:
            set_state_version(core, max(core.metrics()["state_version"], LAST_VERSION - r.randrange(4)))
        if action == "p":
            table.put(key, number)
            state[key] = number
        elif action == "r":
            assert table.remove(key) == (key in state)
            state.pop(key, None)
        elif action == "g":
            assert table.get(key) == state.get(key)
        elif action == "s" and len(views) < 4:
            views.append((core.snapshot(), dict(state)))
        elif action == "S" and views:
            views.pop(r.randrange(len(views)))[0].release()
        elif action == "m" and len(marks) < 4:
            marks.append((core.mark(), dict(state)))
        elif action == "M" and marks:
            core.release(marks.pop(r.randrange(len(marks)))[0])
        elif action == "b" and marks:
            del marks[r.randrange(len(marks)) + 1 :]
            core.rollback(marks[-1][0])
            state = dict(marks[-1][1])
        assert contents(table) == state
        for view, expected in views:
            assert view_contents(view, table) == expected
        table._check()


def test_calls_that_tell_the_touched_keys_survive_renumbering():
    """A key is told once, also when the counter begins again within the call; a snapshot keeps what it shows."""
    keys = np.array([3, 5, 3, 9, 5])
    core = StateCore()
    table = StateTable(core, value="long")
    reduce_many(table, keys, keys, "sum")
    view = core.snapshot()
    shown = table.rows_in(view)
    for below in range(3, -1, -1):
        set_state_version(core, LAST_VERSION - below)
        _, told, _ = reduce_many(table, keys, keys, "sum", return_touched=True)
        assert sorted(told.tolist()) == [3, 5, 9]
        table._check()
    assert core.metrics()["state_version"] < 50
    assert table.rows_in(view) == shown
