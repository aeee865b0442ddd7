"""Snapshots are exactly what was there, in whatever order and on whatever thread they end."""

from __future__ import annotations

import pytest
from twin.implementations import (
    ORDERS,
    MapRules,
    contents,
    copies,
    layouts,
    reclaim,
    slots,
    view_contents,
)

from statebackend.errors import ClosedError, UsageError

pytestmark = pytest.mark.checked


class TestSnapshots(MapRules):
    @pytest.mark.parametrize("key", ["int", "bytes"])
    @pytest.mark.parametrize("timestamps", [False, True])
    def test_a_snapshot_is_what_was_there_for_every_layout(self, key, timestamps):
        for value, first, second in layouts(self.implementation):
            core, table = self.make(
                key=key, value=value, timestamps=timestamps, hash_mask=3, initial_capacity=4
            )
            keys = range(20) if key == "int" else [b"%d" % number * number for number in range(1, 21)]
            for one in keys:
                table.put(one, first)
            with core.snapshot() as view:
                for one in keys:
                    table.put(one, second)
                for one in keys[:7]:
                    table.remove(one)
                assert view_contents(view, table) == dict.fromkeys(keys, first)
                assert contents(table) == dict.fromkeys(keys[7:], second)
                table._check()

    @pytest.mark.parametrize("order", ORDERS, ids=str)
    def test_snapshots_are_released_in_any_order(self, order):
        core, table = self.chained(*range(6))
        views, states = [], []
        for number in range(4):
            views.append(core.snapshot())
            states.append(contents(table))
            table.put(number, 100 + number)
            table.remove(5 - number)
            table.put(10 + number, number)
        live = dict(enumerate(views))
        required = {number: view.version for number, view in live.items()}
        for number in order:
            live.pop(number).release()
            table.put(0, number)
            for other, view in live.items():
                assert view_contents(view, table) == states[other]
            metrics = core.metrics()
            assert metrics["highest_required_snapshot_version"] == max((required[n] for n in live), default=0)
            assert metrics["snapshots"] == [required[n] for n in sorted(live)]
            table._check()
        reclaim(core)
        assert table.map_info(0)["used_slots"] == len(table)
        assert table.map_info(0)["directories"] == 0

    def test_when_the_newest_is_released_only_the_older_ones_cost_clones(self):
        core, table = self.chained(1)
        with core.snapshot() as older:
            table.put(2, 2)  # not in `older`
            core.snapshot().release()
            before = slots(table, 1)
            table.put(2, -2)
            assert slots(table, 1) == before
            assert copies(table) == (0, 1)
            table.put(1, -1)
            assert slots(table, 1)[1] != before[1]
            assert view_contents(older, table) == {1: 1}

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

    def test_a_map_that_was_emptied_is_still_in_the_snapshot(self):
        core, table = self.chained(1, 2, 3)
        with core.snapshot() as view:
            for key in (2, 1, 3):
                table.remove(key)
            assert len(table) == 0
            table.put(9, 9)
            assert view_contents(view, table) == {1: 1, 2: 2, 3: 3}
            table.remove(9)
        reclaim(core)
        assert table.map_info(0)["run_bytes"] == table.map_info(0)["used_slots"] == 0

    def test_retired_entries_are_used_again_once_the_snapshot_is_released(self):
        core, table = self.make()
        for key in range(40):
            table.put(key, key)
        for number in range(5):
            with core.snapshot():
                for key in range(40):
                    table.put(key, number)
                assert table.map_info(0)["used_slots"] == 80
            reclaim(core)
            assert table.map_info(0)["used_slots"] == 40
            if number == 0:
                most = table.map_info(0)["run_bytes"]
        assert table.map_info(0)["run_bytes"] == most

    def test_reclaiming_is_spread_over_the_following_operations(self):
        core, table = self.make()
        for key in range(40):
            table.put(key, key)
        with core.snapshot():
            for key in range(40):
                table.put(key, -key)
        before = table.map_info(0)["used_slots"]
        table.get(0)
        assert before - 8 <= table.map_info(0)["used_slots"] < before
        for _ in range(10):
            table.get(0)
        assert table.map_info(0)["used_slots"] == 40
        assert core.advance() is False
