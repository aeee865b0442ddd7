"""Objects of a table with `copy_value`: reading copies, because the reader may change what it gets."""

from __future__ import annotations

import copy

import pytest
from twin.implementations import MapRules, contents, slots, view_contents

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

    def test_what_a_reader_changes_is_not_in_the_snapshot(self):
        core, table = self.objects(1)
        with core.snapshot() as view:
            table.get(1).append("changed")
            assert view_contents(view, table) == {1: [1]}
            assert table.get(1) == [1, "changed"]

    def test_what_a_reader_changes_is_undone_by_rollback_and_is_not_a_write(self):
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

    def test_an_object_whose_entry_was_cloned_unwritten_is_copied_when_it_is_read(self):
        core, table = self.objects(1, 2)
        with core.snapshot() as view:
            table.put(1, ["new"])  # clones the entry of 2 as well, which is before it in the chain
            table.get(2).append("changed")
            assert view_contents(view, table) == {1: [1], 2: [2]}

    def test_an_object_whose_entry_was_moved_by_rehash_is_copied_when_it_is_read(self):
        core, table, _ = self.rehashing(4, value="object", copy_value=lambda value: [*value])
        for key in contents(table):
            table.put(key, [key])
        while table.map_info(0)["secondary_capacity"]:
            table.contains(0)
        for key in range(5, 9):
            table.put(key, [key])
        assert table.map_info(0)["secondary_capacity"]
        with core.snapshot() as view:
            while table.map_info(0)["secondary_capacity"]:
                table.contains(0)
            for key in range(9):
                table.get(key).append("changed")
            assert view_contents(view, table) == {key: [key] for key in range(9)}

    @pytest.mark.parametrize("undone", ["put", "remove"])
    def test_an_object_that_a_rollback_brought_back_is_copied_when_it_is_read(self, undone):
        core, table = self.objects(1)
        with core.snapshot() as view:
            mark = core.mark()
            if undone == "put":
                table.put(1, ["new"])
            else:
                table.remove(1)
            core.rollback(mark)
            core.release(mark)
            table.get(1).append("changed")
            assert view_contents(view, table) == {1: [1]}

    def test_an_object_is_kept_for_an_older_snapshot_when_the_newest_is_released(self):
        core, table = self.objects(1, 2)
        with core.snapshot() as older:
            newer = core.snapshot()
            table.put(1, ["new"])
            newer.release()
            table.get(2).append("changed")
            assert view_contents(older, table) == {1: [1], 2: [2]}

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
