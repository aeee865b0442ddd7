"""Other threads run while changes are collected, and their calls of the backend wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels.batch_kernels import remove_many, update_many
from statebackend._core.snapshots.changes import changed_entries, count_changes
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

N = 100_000
#: Enough that a call takes longer than the system lets another thread wait for a processor.
MANY = 500_000


@pytest.fixture
def kept_gil() -> Iterator[None]:
    """A thread that wants the GIL gets it only when it is given up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(before)


def other_threads_run(call: Callable[[], Any], expected: Any) -> bool:
    """Return True if another thread gets the GIL during a call, which returns what is expected."""
    for _ in range(200):
        start, ran = threading.Lock(), []
        start.acquire()
        thread = threading.Thread(target=lambda start=start, ran=ran: (start.acquire(), ran.append(True)))
        thread.start()
        start.release()
        found = call()
        has_run = bool(ran)
        thread.join()
        assert found == expected
        if has_run:
            return True
    return False


@pytest.mark.parametrize("removes", [False, True])
def test_another_thread_runs_while_changes_are_counted(kept_gil: None, removes: bool) -> None:
    core = StateCore()
    table = StateTable(core, max_parallelism=8)
    n = N if removes else MANY  # what was removed is looked for, which takes a while
    keys = np.arange(n)
    update_many(table, keys, keys)
    mark = core.mark()
    update_many(table, keys, keys + 1)
    if removes:
        remove_many(table, keys[:10])
    assert other_threads_run(lambda: count_changes(table, mark), (n - 10, 10) if removes else (n, 0))


def test_rows_that_are_among_others_are_found_without_the_gil(kept_gil: None) -> None:
    core = StateCore()
    table = StateTable(core, max_parallelism=8)
    keys = np.arange(MANY)
    mark = core.mark()
    update_many(table, keys, keys)
    rows = changed_entries(table, mark)
    chosen = rows.take(np.random.default_rng(3).random(MANY) < 0.3)
    expected = np.isin(rows.addresses, chosen.addresses)
    assert 0 < expected.sum() == len(chosen)
    assert not rows.are_among(rows.take(slice(0))).any()
    assert not rows.take(slice(0)).are_among(rows).any()
    assert other_threads_run(lambda: rows.are_among(chosen).tolist(), expected.tolist())
