"""Objects of a table with `copy_value`: reading copies, because the reader may change what it gets.

That snapshots and marks keep what they had is for the random histories of `test_twin_agrees`.
"""

from __future__ import annotations

import copy

import pytest
from twin.implementations import MapRules, slots

pytestmark = pytest.mark.checked


class TestObjects(MapRules):
    def objects(self, *keys):
        self.copied = []

        def copy_value(value):
            self.copied.append(value)
            return copy.copy(value)

        core, table = self.make(value="object", hash_mask=0, copy_value=copy_value)
        for key in keys:
            table.put(key, [key])
        return core, table

    @pytest.mark.parametrize("since", ["snapshot", "mark"])
    def test_an_object_is_copied_at_the_first_read_since(self, since):
        core, table = self.objects(1)
        mine = table.get(1)
        assert table.get(1) is mine
        assert self.copied == []
        held = getattr(core, since)()
        assert table.get(1) is not mine
        assert table.get(1) is table.get(1)
        assert len(self.copied) == 1
        del held

    def test_change_by_a_reader_is_undone_by_rollback_and_is_not_a_write(self):
        core, table = self.objects(1)
        mark = core.mark()
        table.get(1).append("changed")
        assert table.dirty(mark) == set()
        core.rollback(mark)
        assert table.get(1) == [1]
        table.get(1).append("changed")
        table.put(1, table.get(1))
        assert table.dirty(mark) == {(1, 0)}
        core.rollback(mark)
        assert table.get(1) == [1]

    def test_put_and_contains_copy_nothing(self):
        core, table = self.objects(1)
        with core.snapshot():
            table.contains(1)
            table.put(1, ["new"])
            table.remove(1)
        assert self.copied == []

    def test_without_copy_value_the_object_itself_is_handed_out(self):
        core, table = self.make(value="object")
        mine = [1]
        table.put(1, mine)
        with core.snapshot():
            core.mark()
            assert table.get(1) is mine

    def test_when_copying_fails_nothing_has_changed(self):
        def copy_value(value):
            raise ValueError("no copy")

        core, table = self.make(value="object", copy_value=copy_value)
        table.put(1, [1])
        with core.snapshot():
            before = slots(table, 1)
            with pytest.raises(ValueError, match="no copy"):
                table.get(1)
            assert slots(table, 1) == before
            table._check()
