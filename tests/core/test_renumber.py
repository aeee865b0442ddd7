"""The version counter comes to its end: versions are counted anew and every comparison stays what it was."""

from __future__ import annotations

import random

import pytest
from twin.cow_map import LAST_VERSION
from twin.implementations import contents, implementation, slots, view_contents

from statebackend._core.core_probe import set_state_version

__all__ = ["implementation"]

pytestmark = pytest.mark.checked


def test_only_entries_of_a_snapshot_are_cloned_after_renumbering(implementation):
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


def test_idle_core_renumbers_from_the_start(implementation):
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
