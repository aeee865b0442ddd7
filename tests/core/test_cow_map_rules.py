"""The rules of Flink's CopyOnWriteStateMap, one a test, on the compiled map and on its twin.

What is cloned is told by identity: `slots(table, key)` is the chain of a key, head first, as {key: slot}.
"""

from __future__ import annotations

import pytest
from twin.implementations import (
    MapRules,
    contents,
    copies,
    slots,
    view_contents,
)

pytestmark = pytest.mark.checked


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
