"""Iterators fail after a structural change, visitors tolerate it."""

from __future__ import annotations

import pytest
from twin.implementations import MapRules

pytestmark = pytest.mark.checked

CHANGES = {
    "insert": lambda core, table: table.put(100, 100),
    "remove": lambda core, table: table.remove(5),
}


class TestIteration(MapRules):
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_an_iterator_fails_after_a_structural_change(self, change):
        core, table = self.chained(*range(8))
        entries = iter(table)
        next(entries)
        change(core, table)
        with pytest.raises(RuntimeError, match="changed during iteration"):
            next(entries)

    def test_an_iterator_fails_after_a_rollback_of_a_structural_change(self):
        core, table = self.chained(*range(8))
        mark = core.mark()
        table.put(100, 100)
        entries = iter(table)
        next(entries)
        core.rollback(mark)
        with pytest.raises(RuntimeError, match="changed during iteration"):
            next(entries)

    def test_an_iterator_tolerates_writes_and_reads(self):
        core, table = self.chained(*range(8))
        for view in (None, core.snapshot()):
            seen = []
            for entry in table:
                table.put(entry.key, -1)
                table.get(0)
                seen.append(entry.key)
            assert sorted(seen) == list(range(8))
            del view

    @pytest.mark.parametrize("capacity", [64, 1024])
    def test_an_iterator_gives_each_entry_once_or_fails_when_reads_move_entries(self, capacity):
        _, table, state = self.rehashing(capacity)
        seen = []
        try:
            for entry in table:
                seen.append(entry.key)
                table.get(entry.key)
        except RuntimeError:
            return
        assert len(seen) == len(set(seen)), "an entry came twice"
        assert set(seen) == set(state), "an entry was left out"

    def test_a_visitor_tolerates_changes_and_gives_once_what_was_left_alone(self):
        core, table = self.make(initial_capacity=4)
        for key in range(100):
            table.put(key, key)
        view, seen = core.snapshot(), []
        visitor = table.visitor(5)
        for number, found in enumerate(visitor):
            assert len(found) <= 5
            seen += [entry.key for entry in found]
            table.remove(number)
            table.put(1000 + number, 0)
            table.put(99 - number % 10, -1)
        table._check()
        assert number >= 20
        counted = {key: seen.count(key) for key in range(40, 80)}
        # Entries before a written one in its chain move to new slots, behind the visitor or ahead of it.
        assert set(counted) <= set(seen)
        view.release()

    def test_a_visitor_gives_each_entry_once_when_nothing_changes(self):
        core, table = self.make(max_parallelism=4)
        for key in range(200):
            table.put(key, key)
        view = core.snapshot()
        for key in range(0, 200, 3):
            table.put(key, -1)
        for step in (1, 7, 1000):
            seen = [(e.key, e.value) for found in table.visitor(step) for e in found]
            assert sorted(seen) == sorted((key, key if key % 3 else -1) for key in range(200))
        view.release()
