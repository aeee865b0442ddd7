"""Marks, rollback and the dirty set, on the compiled map and on its twin."""

from __future__ import annotations

import itertools

import pytest
from twin.implementations import ORDERS, MapRules, contents, copies, reclaim, view_contents

from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


class TestMarks(MapRules):
    def test_rollback_undoes_inserts_writes_removals_and_timestamps(self):
        core, table = self.chained(1, 2, 3, timestamps=True)
        for key in (1, 2, 3):
            table.put(key, key, timestamp=10 * key)
        mark = core.mark()
        table.put(1, -1, timestamp=99)
        table.put(1, -2, timestamp=98)
        table.remove(2)
        table.put(4, 4)
        table.remove(3)
        table.put(3, -3, timestamp=97)
        core.rollback(mark)
        assert contents(table) == {1: 1, 2: 2, 3: 3}
        assert [table.timestamp(key) for key in (1, 2, 3, 4)] == [10, 20, 30, None]
        assert len(table) == 3
        table._check()

    def test_rollback_keeps_the_mark_and_older_ones_and_ends_newer_ones(self):
        core, table = self.chained(1)
        marks, states = [], []
        for number in range(4):
            marks.append(core.mark())
            states.append(contents(table))
            table.put(1, 10 + number)
            table.put(100 + number, number)
        for _ in range(2):
            core.rollback(marks[2])
            assert contents(table) == states[2]
            table.put(1, -1)
        for use in (core.rollback, table.dirty):
            with pytest.raises(UsageError, match="no longer valid") as error:
                use(marks[3])
            assert error.value.code == "USAGE.STALE_MARK"
        core.rollback(marks[0])
        assert contents(table) == states[0]
        with pytest.raises(UsageError, match="no longer valid"):
            core.rollback(marks[1])

    def test_marks_that_are_released_or_of_another_core_are_refused(self):
        core, table = self.chained(1)
        other, _ = self.chained(1)
        mark, foreign = core.mark(), other.mark()
        for use in (core.rollback, table.dirty):
            with pytest.raises(UsageError, match="another backend"):
                use(foreign)
        core.release(mark)
        core.release(mark)
        core.release(foreign)
        assert foreign.is_open
        for use in (core.rollback, table.dirty):
            with pytest.raises(UsageError, match="no longer valid"):
                use(mark)

    @pytest.mark.parametrize("snapshot", [False, True], ids=["alone", "under a snapshot"])
    @pytest.mark.parametrize("order", ORDERS, ids=str)
    def test_marks_are_released_in_any_order_and_the_others_roll_back(self, order, snapshot):
        for released in range(4):
            core, table = self.chained(*range(6))
            view = core.snapshot() if snapshot else None
            marks, states = [], []
            for number in range(4):
                marks.append(core.mark())
                states.append(contents(table))
                table.put(number, 100 + number)
                table.remove(5 - number)
                table.put(10 + number, number)
            at_the_end = contents(table)
            for number in order[:released]:
                core.release(marks[number])
            reclaim(core)
            assert contents(table) == at_the_end
            for number in sorted(order[released:], reverse=True):
                core.rollback(marks[number])
                assert contents(table) == states[number]
                table.put(number, -1)
                table._check()
            if view is not None:
                assert view_contents(view, table) == {key: key for key in range(6)}
                view.release()
            for number in order[released:]:
                core.release(marks[number])
            reclaim(core)
            assert table.map_info(0)["used_slots"] == len(table)

    @pytest.mark.parametrize("taken", ["before the mark", "after the mark", "after the changes", "around"])
    @pytest.mark.parametrize("order", list(itertools.permutations("pri")), ids="".join)
    def test_rollback_while_a_snapshot_is_live(self, taken, order):
        core, table = self.chained(*range(5))
        views = []

        def take(when):
            if taken in (when, "around"):
                views.append((core.snapshot(), contents(table)))

        take("before the mark")
        mark = core.mark()
        take("after the mark")
        for change in order:
            if change == "p":
                table.put(1, -1)
            elif change == "r":
                table.remove(2)
            else:
                table.put(9, 9)
            take("around")
        take("after the changes")
        for _ in range(2):
            core.rollback(mark)
            assert contents(table) == {key: key for key in range(5)}
            for view, expected in views:
                assert view_contents(view, table) == expected
            table._check()
            table.put(1, -5)
            table.remove(3)
        core.release(mark)
        for view, expected in views:
            assert view_contents(view, table) == expected
            view.release()
        reclaim(core)
        table._check()
        assert table.map_info(0)["used_slots"] == len(table) == 4

    @pytest.mark.parametrize("hash_mask", [0, 3, 0xFFFFFFFF], ids=hex)
    @pytest.mark.parametrize("snapshot", ["none", "before the mark", "after the mark"])
    def test_rollback_at_every_point_of_a_rehash(self, snapshot, hash_mask):
        for steps in range(14):
            core, table, state = self.rehashing(64, hash_mask=hash_mask)
            view = core.snapshot() if snapshot == "before the mark" else None
            mark = core.mark()
            view = core.snapshot() if snapshot == "after the mark" else view
            for key in range(steps):
                table.put(key, -1)
                table.remove(20 + key)
                table.put(-1 - key, 0)
            core.rollback(mark)
            assert contents(table) == state
            table._check()
            while table.map_info(0)["secondary_capacity"]:
                table.contains(0)
            core.rollback(mark)
            assert contents(table) == state
            if view is not None:
                assert view_contents(view, table) == state
                view.release()
            core.release(mark)
            reclaim(core)
            assert table.map_info(0)["used_slots"] == len(state)

    def test_what_a_mark_holds_comes_back_when_it_is_released(self):
        core, table = self.make(value="bytes")
        for key in range(20):
            table.put(key, b"before")
        mark = core.mark()
        for key in range(20):
            table.put(key, b"after")
        for key in range(10):
            table.remove(key)
        assert table.map_info(0)["used_slots"] == 20
        core.release(mark)
        reclaim(core)
        assert table.map_info(0)["used_slots"] == len(table) == 10

    def test_a_table_made_since_the_mark_becomes_empty(self):
        core, _ = self.make()
        mark = core.mark()
        table = self.implementation.add(core)
        table.put(1, 1)
        core.rollback(mark)
        assert len(table) == 0


class TestDirtySet(MapRules):
    def test_it_is_what_was_inserted_written_or_removed(self):
        core, table = self.chained(1, 2, 3, 4)
        mark = core.mark()
        assert table.dirty(mark) == set()
        table.put(1, -1)
        table.put(1, 1)
        table.remove(2)
        table.put(5, 5)
        table.put(6, 6)
        table.remove(6)
        table.remove(7)
        table.get(3)
        table.contains(4)
        assert table.dirty(mark) == {(1, 0), (2, 0), (5, 0), (6, 0)}

    def test_it_is_per_mark_and_forgets_what_was_rolled_back(self):
        core, table = self.chained(1, 2, 3)
        first = core.mark()
        table.put(1, -1)
        second = core.mark()
        table.put(2, -2)
        assert (table.dirty(first), table.dirty(second)) == ({(1, 0), (2, 0)}, {(2, 0)})
        core.rollback(second)
        assert (table.dirty(first), table.dirty(second)) == ({(1, 0)}, set())
        core.release(first)
        table.put(3, -3)
        assert table.dirty(second) == {(3, 0)}

    def test_what_rehash_moves_is_not_dirty(self):
        core, table, _ = self.rehashing(64)
        mark = core.mark()
        while table.map_info(0)["secondary_capacity"]:
            table.contains(0)
            table.put(7, -7)
        assert table.dirty(mark) == {(7, 0)}

    def test_what_is_copied_for_a_snapshot_is_dirty_only_once_it_is_written(self):
        core, table = self.chained(1, 2, 3)
        mark = core.mark()
        with core.snapshot() as view:
            table.put(1, -1)
            assert copies(table)[0] == 3
            assert table.dirty(mark) == {(1, 0)}
            table.put(2, -2)
            assert table.dirty(mark) == {(1, 0), (2, 0)}
            core.rollback(mark)
            assert contents(table) == view_contents(view, table) == {1: 1, 2: 2, 3: 3}

    def test_what_rehash_clones_under_a_snapshot_is_not_dirty(self):
        core, table, _ = self.rehashing(64)
        with core.snapshot():
            mark = core.mark()
            with core.snapshot():
                table.put(0, 0)
                while table.map_info(0)["secondary_capacity"]:
                    table.contains(0)
                table.put(1, 1)
                table.remove(2)
                assert copies(table)[0] > 40
                assert table.dirty(mark) == {(0, 0), (1, 0), (2, 0)}

    def test_moves_that_a_rollback_carries_on_are_not_dirty(self):
        core, table = self.chained(1, 2, 3)
        older = core.mark()
        mark = core.mark()
        with core.snapshot():
            table.put(1, -1)
            table.remove(2)
            core.rollback(mark)
        assert table.dirty(mark) == table.dirty(older) == set()
        table.put(3, -3)
        assert table.dirty(mark) == table.dirty(older) == {(3, 0)}

    def test_it_tells_namespaces_apart(self):
        core, table = self.make(namespaces=True, key="bytes")
        table.put(b"a", 1, 1)
        mark = core.mark()
        table.put(b"a", 2, 2)
        table.remove(b"a", 1)
        assert table.dirty(mark) == {(b"a", 1), (b"a", 2)}
