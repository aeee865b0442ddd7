"""Other threads run while changes are collected, and their calls of the backend wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from statebackend._core.batches.kernels import remove_many, update_many
from statebackend._core.memory import arena
from statebackend._core.snapshots.changes import changed_entries, count_changes
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable

N = 100_000


@pytest.fixture
def kept_gil() -> Iterator[None]:
    """A thread that wants the GIL gets it only when it is given up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("removes", [False, True])
def test_another_thread_runs_while_changes_are_counted(kept_gil: None, removes: bool) -> None:
    core = StateCore()
    table = StateTable(core, max_parallelism=8)
    keys = np.arange(N)
    update_many(table, keys, keys)
    mark = core.mark()
    update_many(table, keys, keys + 1)
    if removes:
        remove_many(table, keys[:10])
    for _ in range(200):
        start, ran = threading.Lock(), []
        start.acquire()
        thread = threading.Thread(target=lambda start=start, ran=ran: (start.acquire(), ran.append(True)))
        thread.start()
        start.release()
        assert count_changes(table, mark) == ((N - 10, 10) if removes else (N, 0))
        has_run = bool(ran)
        thread.join()
        if has_run:
            return
    pytest.fail("no other thread ran meanwhile")


@pytest.mark.skipif(arena.is_checked_build(), reason="the checked build refuses the overlapping call")
def test_a_call_of_another_thread_comes_after_what_is_collected(kept_gil: None) -> None:
    core = StateCore()
    table = StateTable(core, max_parallelism=8)
    keys = np.arange(N)
    update_many(table, keys, keys)
    mark = core.mark()
    update_many(table, keys[:-1], keys[:-1] + 1)
    for turn in range(20):
        start = threading.Lock()
        start.acquire()

        def write(start: threading.Lock = start, turn: int = turn) -> None:
            with start:
                table.put(N - 1, -turn)

        thread = threading.Thread(target=write)
        thread.start()
        start.release()
        rows = changed_entries(table, mark)
        count = len(rows)
        thread.join()
        assert count in (N - 1, N)
        assert len(changed_entries(table, mark)) == N
        table._check()
