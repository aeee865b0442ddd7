"""Marks, rollback and the dirty set, on the compiled map and on its twin."""

from __future__ import annotations

import pytest
from twin.implementations import MapRules, contents, reclaim, view_contents

from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


class TestMarks(MapRules):
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
