"""The rules of Flink's CopyOnWriteStateMap, one a test, on the compiled map and on its twin.

What is cloned is told by identity: `slots(table, key)` is the chain of a key, head first, as {key: slot}.
"""

from __future__ import annotations

import pytest
from twin.cow_map import CowMap
from twin.implementations import (
    TWIN,
    MapRules,
    contents,
    copies,
    reclaim,
    slots,
    versions,
    view_contents,
)

pytestmark = pytest.mark.checked

READS = {
    "get": lambda table, key: table.get(key),
    "contains": lambda table, key: table.contains(key),
    "timestamp": lambda table, key: table.timestamp(key),
}


class TestCopyOnWrite(MapRules):
    @pytest.mark.parametrize("key", [4, 3, 2, 1])
    def test_a_write_in_a_chain_clones_the_entries_before_it_and_shares_those_after_it(self, key):
        core, table = self.chained(1, 2, 3, 4)
        before = slots(table, 1)
        assert list(before) == [4, 3, 2, 1]
        with core.snapshot() as view:
            table.put(key, -1)
            after = slots(table, 1)
            assert list(after) == [4, 3, 2, 1]
            for other in after:
                assert (after[other] in before.values()) == (after[other] == before[other]) == (other < key)
            assert copies(table) == (5 - key, 1)
            assert contents(table) == {1: 1, 2: 2, 3: 3, 4: 4, key: -1}
            assert view_contents(view, table) == {1: 1, 2: 2, 3: 3, 4: 4}

    def test_a_clone_is_cloned_once_a_snapshot(self):
        core, table = self.chained(1, 2, 3)
        with core.snapshot():
            table.put(1, -1)
            after = slots(table, 1)
            for key in (1, 2, 3):
                table.put(key, -2)
            assert slots(table, 1) == after
            assert copies(table) == (3, 1)
            with core.snapshot():
                table.put(3, -3)
                assert slots(table, 1)[3] != after[3]
                assert copies(table) == (4, 2)

    def test_clones_and_written_entries_are_as_new_as_the_state(self):
        core, table = self.chained(1, 2, 3)
        assert versions(table, 1) == {3: 0, 2: 0, 1: 0}
        with core.snapshot() as view:
            table.put(2, -1)
            assert view.version == core.metrics()["highest_required_snapshot_version"]
            assert versions(table, 1)[1] == 0
            assert min(versions(table, 1)[key] for key in (2, 3)) >= view.version

    def test_a_clone_made_unwritten_under_a_mark_is_not_cloned_again(self):
        core, table = self.chained(1, 2)
        core.mark()
        with core.snapshot():
            table.put(1, -1)
            before = slots(table, 1)
            table.put(2, -2)
            assert slots(table, 1) == before
            assert copies(table) == (2, 1)

    def test_an_entry_made_after_the_snapshot_is_not_cloned(self):
        core, table = self.chained(1, 2)
        with core.snapshot():
            table.put(3, 3)
            before = slots(table, 1)
            table.put(3, -1)
            assert slots(table, 1) == before
            table.put(1, -1)
            after = slots(table, 1)
            assert after[3] == before[3]
            assert after[2] != before[2]
            assert copies(table) == (2, 1)

    def test_an_insert_at_the_head_clones_nothing_and_shares_the_chain(self):
        core, table = self.chained(1, 2)
        before = slots(table, 1)
        with core.snapshot() as view:
            table.put(3, 3)
            after = slots(table, 1)
            assert list(after) == [3, 2, 1]
            assert after.items() >= before.items()
            assert copies(table) == (0, 1)
            assert view_contents(view, table) == {1: 1, 2: 2}

    @pytest.mark.parametrize("key", [1, 2, 3, 4])
    def test_removing_an_entry_clones_those_before_it_and_not_itself(self, key):
        core, table = self.chained(1, 2, 3, 4)
        before = slots(table, 1)
        with core.snapshot() as view:
            table.remove(key)
            after = slots(table, 1)
            assert list(after) == [k for k in (4, 3, 2, 1) if k != key]
            for other in after:
                assert (after[other] == before[other]) == (other < key)
            assert copies(table) == (4 - key, 1)
            assert view_contents(view, table) == {1: 1, 2: 2, 3: 3, 4: 4}

    def test_removing_behind_an_entry_made_after_the_snapshot_clones_nothing(self):
        core, table = self.chained(1, 2)
        with core.snapshot() as view:
            table.put(3, 3)
            before = slots(table, 1)
            table.remove(2)
            assert slots(table, 1) == {3: before[3], 1: before[1]}
            assert copies(table) == (0, 1)
            assert view_contents(view, table) == {1: 1, 2: 2}

    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    def test_reads_copy_nothing(self, read):
        core, table = self.chained(1, 2, 3, timestamps=True)
        before = slots(table, 1)
        with core.snapshot():
            for key in (1, 2, 3, 4):
                read(table, key)
                table.entry(key)
            assert table.remove(9) is False
            assert len(list(table)) == len(table) == 3
            assert slots(table, 1) == before
            assert copies(table) == (0, 0)

    def test_without_a_snapshot_everything_happens_in_place(self):
        core, table = self.chained(1, 2, 3)
        before = slots(table, 1)
        core.mark()
        for key in (1, 2, 3):
            table.put(key, -1)
        assert slots(table, 1) == before
        core.snapshot().release()
        for key in (1, 2, 3):
            table.put(key, -2)
        assert slots(table, 1) == before
        assert copies(table) == (0, 0)

    def test_a_page_is_copied_once_a_snapshot(self):
        core, table = self.make()
        for key in range(20):
            table.put(key, key)
        for number in range(1, 4):
            view = core.snapshot()
            for key in range(20):
                table.put(key, number)
            assert copies(table)[1] == number
            view.release()

    def test_a_map_that_is_not_touched_costs_a_snapshot_nothing(self):
        core, table = self.make(max_parallelism=64)
        for key in range(1000):
            table.put(key, key)
        with core.snapshot():
            table.put(0, -1)
            assert sum(table.map_info(group)["directories"] for group in range(64)) == 1

    def test_a_key_in_another_namespace_is_another_entry(self):
        core, table = self.make(namespaces=True, hash_mask=0)
        table.put(1, 10, 1)
        table.put(1, 20, 2)
        with core.snapshot() as view:
            table.put(1, -10, 1)
            assert [table.get(1, ns) for ns in (0, 1, 2)] == [None, -10, 20]
            assert table.rows_in(view) == {(1, 1): 10, (1, 2): 20}


OPERATIONS = {
    "put of a present key": lambda table: table.put(0, 0),
    "put of a new key": lambda table: table.put(-1, -1),
    "get of a present key": lambda table: table.get(0),
    "get of an absent key": lambda table: table.get(-1),
    "contains": lambda table: table.contains(0),
    "timestamp": lambda table: table.timestamp(0),
    "remove": lambda table: table.remove(0),
    "remove of an absent key": lambda table: table.remove(-1),
}


class TestGrowth(MapRules):
    def test_the_insert_past_three_quarters_starts_doubling_and_goes_to_the_old_table(self):
        _, table = self.make(initial_capacity=16)
        for key in range(13):
            table.put(key, key)
            info = table.map_info(0)
            assert (info["threshold"], info["primary_capacity"], info["secondary_capacity"]) == (12, 16, 0)
        for key in range(13):
            table.put(key, -key)
            table.get(key)
        assert table.map_info(0)["secondary_capacity"] == 0
        table.put(13, 13)
        info = table.map_info(0)
        assert (info["primary_capacity"], info["secondary_capacity"], info["threshold"]) == (16, 32, 24)
        assert (info["primary_size"], info["secondary_size"], info["rehash_index"]) == (14, 0, 0)
        assert table.metrics()["rehashed_entries"] == 0

    @pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
    def test_every_operation_moves_at_least_four_entries(self, operation):
        _, table, _ = self.rehashing(64)
        steps = 0
        while table.map_info(0)["secondary_capacity"]:
            before = table.metrics()["rehashed_entries"]
            operation(table)
            moved = table.metrics()["rehashed_entries"] - before
            assert moved >= 4 or table.map_info(0)["secondary_capacity"] == 0
            table._check()
            steps += 1
        assert 2 < steps <= 13
        assert table.metrics()["rehashed_entries"] >= 48

    def test_inspection_moves_nothing(self):
        core, table, state = self.rehashing(64)
        table.get(0)
        before = table.map_info(0)
        assert (len(table), contents(table)) == (50, state)
        for key in state:
            assert table.entry(key).value == key
            assert key in [entry.key for entry in table.chain(key)]
        with core.snapshot() as view:
            assert view_contents(view, table) == state
        assert {**table.map_info(0), "seen_version": 0, "directories": 0} == {**before, "seen_version": 0}

    def test_a_bucket_moves_as_a_whole_and_its_chain_is_reversed(self):
        _, table, _ = self.rehashing(64, hash_mask=0)
        before = [entry.key for entry in table.chain(0)]
        table.contains(0)
        assert table.metrics()["rehashed_entries"] == 50
        assert table.map_info(0)["rehash_index"] == 1
        assert [entry.key for entry in table.chain(0)] == before[::-1]

    def test_an_operation_passes_no_more_than_32_empty_buckets(self):
        _, table, _ = self.rehashing(256, hash_mask=0)
        at = []
        while table.map_info(0)["secondary_capacity"]:
            table.contains(0)
            at.append(table.map_info(0)["rehash_index"])
        assert at == [1, 33, 65, 97, 129, 161, 193, 225, 0]

    def test_an_operation_on_a_large_map_moves_a_stretch_of_32_buckets(self):
        core, table, state = self.rehashing(512)
        at = []
        for _ in range(3):
            table.contains(0)
            table._check()
            at.append(table.map_info(0)["rehash_index"])
        assert at == [32, 64, 96]
        with core.snapshot() as view:  # which entries belong to: they move few at a time
            for _ in range(2):
                before = table.metrics()["rehashed_entries"]
                table.contains(0)
                assert 4 <= table.metrics()["rehashed_entries"] - before < 24
            assert view_contents(view, table) == state
        assert contents(table) == state
        table._check()

    def test_everything_is_found_at_every_point_of_a_rehash(self):
        _, table, state = self.rehashing(64)
        points = set()
        while table.map_info(0)["secondary_capacity"]:
            points.add(table.map_info(0)["rehash_index"])
            for key in state:
                assert table.entry(key).value == state[key]
            assert table.entry(-5) is None
            assert contents(table) == state
            table.contains(0)
        assert len(points) > 5

    def test_capacity_doubles_and_doubling_never_starts_during_a_rehash(self):
        _, table = self.make(initial_capacity=4)
        before = table.map_info(0) or {"primary_capacity": 4, "secondary_capacity": 0}
        for key in range(3000):
            table.put(key, key)
            now = table.map_info(0)
            if before["secondary_capacity"] and now["secondary_capacity"]:
                assert now["secondary_capacity"] == before["secondary_capacity"]
            if now["primary_capacity"] != before["primary_capacity"]:
                assert now["primary_capacity"] == before["secondary_capacity"]
            assert now["secondary_capacity"] in (0, 2 * now["primary_capacity"])
            before = now
        assert before["primary_capacity"] == 4096
        table._check()

    def test_capacity_never_shrinks_until_the_map_is_empty(self):
        _, table = self.make(initial_capacity=4)
        for key in range(90):
            table.put(key, key)
        while table.map_info(0)["secondary_capacity"]:
            table.contains(0)
        for key in range(89):
            table.remove(key)
            assert table.map_info(0)["primary_capacity"] == 128
        table.remove(89)
        info = table.map_info(0)
        assert (info["primary_capacity"], info["run_bytes"], info["threshold"]) == (4, 0, 3)
        table.put(1, 1)
        assert contents(table) == {1: 1}

    def test_rehash_under_a_snapshot_clones_what_is_old_and_moves_what_is_new(self):
        core, table, state = self.rehashing(64)
        with core.snapshot() as view:
            mine = {
                key: entry.slot
                for key in (-1, -2, -3)
                if not table.put(key, 0)
                for entry in [table.entry(key)]
            }
            while table.map_info(0)["secondary_capacity"]:
                table.contains(0)
            assert {key: table.entry(key).slot for key in mine} == mine
            assert copies(table)[0] == 50
            assert view_contents(view, table) == state
        assert contents(table) == {**state, -1: 0, -2: 0, -3: 0}

    def test_without_a_snapshot_rehash_clones_nothing(self):
        core, table, state = self.rehashing(64)
        core.mark()
        before = {key: table.entry(key).slot for key in state}
        while table.map_info(0)["secondary_capacity"]:
            table.contains(0)
        assert {key: table.entry(key).slot for key in state} == before
        assert copies(table) == (0, 0)

    @pytest.mark.parametrize("hash_mask", [0, 3, 0xFFFFFFFF], ids=hex)
    @pytest.mark.parametrize("change", ["write", "insert", "remove", "read"])
    def test_a_snapshot_at_every_point_of_a_rehash_stays_as_it_was(self, change, hash_mask):
        core, table, state = self.rehashing(64, hash_mask=hash_mask)
        views, key = [], 0
        while table.map_info(0)["secondary_capacity"]:
            views.append((core.snapshot(), dict(state)))
            if change == "write":
                table.put(key, -1)
                state[key] = -1
            elif change == "insert":
                table.put(-1 - key, key)
                state[-1 - key] = key
            elif change == "remove":
                table.remove(key)
                del state[key]
            else:
                table.get(key)
            key += 1
            table._check()
        for view, expected in views:
            assert view_contents(view, table) == expected
            assert view.group_sizes(table)[0] == len(expected)
        for view, _ in views:
            view.release()
        reclaim(core)
        assert contents(table) == state
        assert table.map_info(0)["used_slots"] == len(state)

    def test_snapshots_during_a_rehash_of_many_pages(self, monkeypatch):
        if self.implementation is TWIN:
            monkeypatch.setattr(CowMap, "PAGE_BUCKETS", 8)
            core, table, state = self.rehashing(64)
        else:
            core, table, state = self.rehashing(4096)
            while table.map_info(0)["secondary_capacity"]:
                table.contains(0)
            for key in range(len(state), 6146):
                table.put(key, key)
                state[key] = key
            assert table.map_info(0)["primary_capacity"] == 8192
        views, key = [], 0
        while table.map_info(0)["secondary_capacity"]:
            if key % (1 if self.implementation is TWIN else 97) == 0:
                views.append((core.snapshot(), dict(state)))
            table.put(key, -1)
            state[key] = -1
            key += 1
        for view, expected in views:
            assert view_contents(view, table) == expected
        for view, _ in views[::-1]:
            view.release()
        reclaim(core)
        table._check()
        assert table.map_info(0)["used_slots"] == len(state)
