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
