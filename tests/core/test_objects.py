"""References to objects: counted, and dropped between calls, whatever lets go of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from twin.implementations import reclaim

from statebackend._core.core_probe import MapTable, StateTable, objects_held
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked


class Ends:
    """An object that notes its end, and does something then."""

    alive = 0

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        self.act = act
        Ends.alive += 1

    def __del__(self) -> None:
        Ends.alive -= 1
        self.act()


class Tables:
    """A value, a list of many chunks and a map for each of some keys, all of objects."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        Ends.alive = 0
        self.act = act
        self.core = StateCore()
        options: dict[str, Any] = {"max_parallelism": 2, "initial_capacity": 4}
        self.value = StateTable(self.core, value="object", **options)
        self.list = StateTable(self.core, value=("list", "object"), **options)
        self.map = MapTable(self.core, value="object", **options)
        self.number = StateTable(self.core, **options)

    def fill(self, keys: range) -> None:
        for key in keys:
            self.value.put(key, Ends(self.act))
            self.map.put(key, 1, Ends(self.act))
            self.map.put(key, 2, Ends(self.act))
            for _ in range(40):
                self.list.append(key, Ends(self.act))

    def clear(self, keys: range) -> None:
        for key in keys:
            self.value.remove(key)
            self.list.remove(key)
            self.map.clear(key)

    def check(self) -> None:
        self.core._check()
        for table in (self.value, self.list, self.map):
            table._check()


def roll_back(tables: Tables) -> None:
    mark = tables.core.mark()
    tables.fill(range(20, 40))
    tables.core.rollback(mark)
    tables.core.release(mark)
    tables.clear(range(20))
    reclaim(tables.core)


def release_on_another_thread(tables: Tables) -> None:
    mark, view = tables.core.mark(), tables.core.snapshot()
    tables.fill(range(10))
    tables.clear(range(20))
    tables.core.release(mark)
    thread = threading.Thread(target=view.release)
    thread.start()
    thread.join()
    keys = np.arange(400)
    while left := objects_held(tables.core):  # only by vectorised calls
        batch_kernels.update_many(tables.number, keys, keys)
        assert objects_held(tables.core) < left


def clear_all(tables: Tables) -> None:
    tables.clear(range(20))
    reclaim(tables.core)


def close_under_a_view(tables: Tables) -> None:
    view = tables.core.snapshot()
    tables.clear(range(20))
    tables.core.close()
    assert Ends.alive
    view.release()


@pytest.mark.parametrize(
    "end",
    [clear_all, roll_back, release_on_another_thread, close_under_a_view, lambda tables: tables.core.close()],
)
def test_no_reference_is_left_at_the_end(end: Callable[[Tables], None]) -> None:
    tables = Tables()
    tables.fill(range(20))
    tables.fill(range(10))
    reclaim(tables.core)
    tables.check()
    assert Ends.alive == objects_held(tables.core) == 20 * 43 + 10 * 40
    end(tables)
    assert Ends.alive == objects_held(tables.core) == 0
    if not tables.core.closed:
        tables.check()


def test_references_end_with_a_core_that_is_not_closed() -> None:
    tables = Tables()
    tables.fill(range(20))
    tables.core.mark()
    tables.clear(range(10))
    assert Ends.alive
    del tables
    gc.collect()  # a mark and its core hold each other
    assert Ends.alive == 0


@pytest.mark.parametrize("how", ["clear", "rollback", "release", "close"])
def test_a_finaliser_finds_whole_tables_and_may_change_them(how: str) -> None:
    """However many end at once: each finaliser calls the core, which drops objects again."""
    seen = []

    def act() -> None:
        seen.append(how)
        if not tables.core.closed:
            if len(seen) % 50 == 0:
                tables.check()
            tables.value.put(1000, Ends())
            tables.list.append(1000 + len(seen) % 7, Ends())
            tables.map.clear(1000)
            tables.map.put(1000, 1, Ends())

    tables = Tables(act)
    mark = tables.core.mark()
    tables.fill(range(20))
    if how == "rollback":
        tables.core.rollback(mark)
    elif how != "close":
        tables.clear(range(20))
        assert not seen
    if how == "close":
        tables.core.close()
    else:
        tables.core.release(mark)
        reclaim(tables.core)
        tables.check()
    assert len(seen) == 20 * 43
    tables.core.close()
    assert Ends.alive == 0
