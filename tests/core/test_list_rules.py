"""Lists under marks and snapshots. Only the compiled map has them."""

from __future__ import annotations

import pytest
from twin.implementations import COMPILED, reclaim, view_contents

pytestmark = pytest.mark.checked


class TestLists:
    """Only the compiled map has lists."""

    @staticmethod
    def lists(element="long", **options):
        made = COMPILED.make(value=("list", element), hash_mask=0, **options)
        return made.core, made.table

    @pytest.mark.parametrize("length", [1, 3, 7, 8, 500])
    def test_an_append_under_a_snapshot_leaves_the_snapshot_its_elements(self, length):
        core, table = self.lists()
        for number in range(length):
            table.append(1, number)
        with core.snapshot() as view:
            for number in range(length, 2 * length):
                table.append(1, number)
            assert view_contents(view, table) == {1: list(range(length))}
            assert table.get(1) == list(range(2 * length))
            assert table.metrics()["copied_entries"] == 1

    @pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 500])
    @pytest.mark.parametrize("element", ["long", "bytes", "object", 3])
    def test_a_rollback_takes_back_what_was_appended(self, element, length):
        core, table = self.lists(element)
        make = {
            "long": int,
            "bytes": lambda n: b"%d" % n,
            "object": lambda n: [n],
            3: lambda n: n.to_bytes(3, "big"),
        }
        values = [make[element](number) for number in range(2 * length + 2)]
        for value in values[:length]:
            table.append(1, value)
        mark = core.mark()
        for _ in range(2):
            for value in values[length:]:
                table.append(1, value)
            assert table.dirty(mark) == {(1, 0)}
            core.rollback(mark)
            assert table.get(1) == (values[:length] or None)
        table.append(1, values[0])
        assert table.get(1) == [*values[:length], values[0]]
        table._check()

    def test_an_append_after_a_rollback_forks_and_leaves_a_snapshot_of_what_came_after_the_mark(self):
        core, table = self.lists("bytes")
        table.append(1, b"common")
        mark = core.mark()
        table.append(1, b"first future")
        with core.snapshot() as view:
            core.rollback(mark)
            table.append(1, b"second future")
            table.append(1, b"and on")
            assert view_contents(view, table) == {1: [b"common", b"first future"]}
            assert table.get(1) == [b"common", b"second future", b"and on"]
            core.rollback(mark)
            assert table.get(1) == [b"common"]
            assert view_contents(view, table) == {1: [b"common", b"first future"]}
        core.release(mark)
        table.remove(1)
        reclaim(core)
        assert core.arena.usage()["blob_bytes"] == core.arena.usage()["run_bytes"] == 0

    def test_long_lists_give_their_memory_back(self):
        core, table = self.lists("bytes")
        mark = core.mark()
        for number in range(5000):
            table.append(number % 3, b"%d" % number)
        with core.snapshot():
            for key in range(3):
                table.remove(key)
        core.release(mark)
        reclaim(core)
        usage = core.arena.usage()
        assert (usage["blob_bytes"], usage["run_bytes"], table.map_info(0)["used_slots"]) == (0, 0, 0)
