"""Snapshots are exactly what was there, in whatever order and on whatever thread they end."""

from __future__ import annotations

import pytest
from twin.implementations import (
    MapRules,
    copies,
    view_contents,
)

from statebackend.errors import ClosedError, UsageError

pytestmark = pytest.mark.checked


class TestSnapshots(MapRules):
    def test_a_released_snapshot_cannot_be_read_and_releasing_twice_does_nothing(self):
        core, table = self.chained(1)
        view, other = core.snapshot(), core.snapshot()
        view.release()
        view.release()
        table.put(1, -1)
        view.release()
        assert core.metrics()["snapshots"] == [other.version]
        assert view.version == 0
        for read in (lambda: table.rows_in(view), lambda: view.group_sizes(table)):
            with pytest.raises(ClosedError):
                read()
        assert view_contents(other, table) == {1: 1}

    def test_a_snapshot_does_not_know_tables_of_another_core(self):
        core, _ = self.chained(1)
        _, other = self.chained(1)
        with core.snapshot() as view, pytest.raises(UsageError, match="another backend"):
            other.rows_in(view)

    def test_a_snapshot_that_is_forgotten_is_released(self):
        core, table = self.chained(1)
        view = core.snapshot()
        del view
        table.put(1, -1)
        assert core.metrics()["snapshots"] == []
        assert copies(table) == (0, 0)

    def test_what_comes_later_is_not_in_a_snapshot(self):
        core, table = self.make()
        with core.snapshot() as view:
            table.put(1, 1)
            later = self.implementation.add(core)
            later.put(1, 1)
            assert table.rows_in(view) == later.rows_in(view) == {}
            assert view.group_sizes(table)[0] == 0
