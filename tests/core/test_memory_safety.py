"""What must not crash. A crash would end the whole run, so each case runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.checked


def run_apart(program):
    """Run a program that may crash in an interpreter of its own; how it ended, and what it printed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.split()


class TestMemorySafety:
    """Of the compiled map only. A crash would end the whole run, so these run apart."""

    @pytest.mark.parametrize(
        "use",
        [
            "len(table)",
            "table.metrics()",
            "table.map_info(0)",
            "table.entry(1)",
            "table.chain(1)",
            "table.group_of(1)",
            "table._check()",
        ],
    )
    def test_a_handle_says_that_its_core_is_closed(self, use):
        program = f"""
from statebackend._core.tables.state_core import StateCore
from statebackend._core.core_probe import StateTable
from statebackend.errors import ClosedError
core = StateCore()
table = StateTable(core, value="bytes", max_parallelism=1)
table.put(1, b"x")
core.close()
try:
    {use}
except ClosedError:
    print("refused")
"""
        assert run_apart(program) == (0, ["refused"])

    def test_an_object_that_reads_its_key_while_it_dies_does_not_find_itself(self):
        program = """
from statebackend._core.tables.state_core import StateCore
from statebackend._core.core_probe import StateTable
from statebackend.errors import UsageError
table = StateTable(StateCore(), value="object", max_parallelism=1)
class Last:
    def __del__(self):
        try:
            print(table.get(1) == "new")
        except UsageError:
            print(True)
table.put(1, Last())
table.put(1, "new")
"""
        assert run_apart(program) == (0, ["True"])

    def test_copying_an_object_may_change_the_table(self):
        program = """
from statebackend._core.tables.state_core import StateCore
from statebackend._core.core_probe import StateTable
from statebackend.errors import UsageError
core = StateCore()
def copy_value(value):
    table.remove(1)
    return list(value)
table = StateTable(core, value="object", max_parallelism=1, copy_value=copy_value)
table.put(1, [1])
view = core.snapshot()
try:
    table.get(1)
except (RuntimeError, UsageError):       # the checked build finds the overlapping call
    pass
table._check()
print(table.rows_in(view) == {(1, 0): [1]})
"""
        assert run_apart(program) == (0, ["True"])

    def test_a_table_begins_with_one_page_at_most(self):
        program = """
from statebackend._core.tables.state_core import StateCore
from statebackend._core.core_probe import StateTable
from statebackend.errors import UsageError
try:
    StateTable(StateCore(), initial_capacity=8192)
except UsageError:
    table = StateTable(StateCore(), max_parallelism=1, initial_capacity=4096)
for key in range(5000):
    table.put(key, key)
table._check()
for key in range(5000):
    table.remove(key)
table._check()
print(len(table))
"""
        assert run_apart(program) == (0, ["0"])

    def test_a_log_of_which_some_chunks_were_forgotten_ends_with_its_last_chunk(self):
        """What a batch overwrote twice waits for a snapshot, and owns nothing. A mark's records come to it; they do."""
        program = """
import numpy as np
from statebackend._core.batches import kernels
from statebackend._core.tables.state_core import StateCore
from statebackend._core.core_probe import StateTable
keys = np.arange(5_000)
for budget in range(0, 200, 8):
    core = StateCore()
    table = StateTable(core, max_parallelism=1)
    kernels.update_many(table, keys, keys)
    mark, view = core.mark(), core.snapshot()
    twice = np.repeat(keys, 2)
    kernels.update_many(table, twice, twice)
    view.release()
    core.advance(budget)
    core.release(mark)
    while core.advance(1_000):
        pass
    table._check()
    assert table.metrics()["used_slots"] == len(keys)
print("whole")
"""
        assert run_apart(program) == (0, ["whole"])
