"""Finalisers that use the tables, run by collections wherever an object is made; interrupts; ends that meet."""

from __future__ import annotations

import itertools
import random
import textwrap
from typing import Any

import numpy as np
import pytest
from map_model import reduce_many
from meddling import Meddler
from processes import run

from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.kernels import aggregation_kernels, batch_kernels, map_kernels
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

WIDE = 2_000  # bytes: a thousand entries fill an extent


def wide(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True) * (WIDE // 8)


class World:
    """Tables of every kind in one core. The test has the keys from 0 on, finalisers the negative ones."""

    def __init__(self, *, is_exact: bool) -> None:
        self.random = random.Random(1)
        self.core = StateCore(seed=1)
        options: dict[str, Any] = {"max_parallelism": 1, "initial_capacity": 4}
        self.wide = StateTable(self.core, value=WIDE, **options)
        self.bytes = StateTable(self.core, key="bytes", value="bytes", namespaces=True, **options)
        self.object = StateTable(self.core, value="object", **options)
        self.list = StateTable(self.core, value=("list", "long"), **options)
        self.map = MapTable(self.core, key="int", map_key="int", value="bytes", **options)
        self.removable = {"wide": self.wide, "object": self.object, "list": self.list}
        self.space = self.core.namespaces.number(b"space")
        self.numbers = itertools.count()
        #: What the test and finalisers have put, by table and key.
        self.mine: dict[Any, Any] = {}
        self.put: dict[Any, Any] = {}
        #: Whether `put` is what there is: a rollback takes back what finalisers have done since the mark.
        self.is_exact = is_exact
        self.meddler = Meddler(self.act)

    def change(self, held: dict[Any, Any], key: int, number: int, gone: int) -> None:
        """Change every table at a key, and remove another one."""
        self.wide.put(key, wide(number))
        held["wide", key] = wide(number)
        name = b"%d" % key
        self.bytes.put(name, b"x" * (number % 700), self.space)
        held["bytes", key] = b"x" * (number % 700)
        self.object.put(key, [number])
        held["object", key] = [number]
        self.list.append(key, number)
        held["list", key] = [*held.get(("list", key), ()), number]
        self.map.put(key, number % 3, b"%d" % number)
        held["map", key, number % 3] = b"%d" % number
        is_exact = self.is_exact or key >= 0
        assert self.list.get(key) == held["list", key] or not is_exact
        for table_name, table in self.removable.items():
            was_there, was_put = table.remove(gone), held.pop((table_name, gone), None) is not None
            assert was_there == was_put or not is_exact

    def act(self) -> None:
        number = next(self.numbers)
        self.change(self.put, -1 - number % 500, number, -1 - self.random.randrange(500))

    def check(self) -> None:
        for table in (self.wide, self.bytes, self.object, self.list, self.map):
            table._check()
        self.core._check()
        found = {(name, entry.key): entry.value for name, table in self.removable.items() for entry in table}
        found.update({("bytes", int(entry.key)): entry.value for entry in self.bytes})
        for key in self.map.heads.keys_of(0)[0]:
            found.update({("map", key, at): value for at, value in self.map.items(key)})
        assert {at: value for at, value in found.items() if at[1] >= 0} == self.mine
        if self.is_exact:
            assert {at: value for at, value in found.items() if at[1] < 0} == self.put


def drain(core: StateCore) -> None:
    while core.advance(1 << 20):
        pass


@pytest.mark.parametrize("rolls_back", [False, True])
def test_single_calls_under_marks_and_snapshots(rolls_back: bool) -> None:
    world = World(is_exact=not rolls_back)
    core, views = world.core, []
    with world.meddler.at_work():
        for turn in range(25):
            for number in range(turn * 40, turn * 40 + 50):
                world.change(world.mine, number % 400, number, number * 7 % 400)
            before = dict(world.mine)
            mark = core.mark()
            views.append((core.snapshot(), {at[1]: before[at] for at in before if at[0] == "wide"}))
            for number in range(0, 400, 7):
                world.change(world.mine, number, -number, number * 3 % 400)
            assert {key for key, _ in world.object.dirty(mark) if key >= 0} <= set(range(400))
            if rolls_back:
                core.rollback(mark)
                world.mine = before
            core.release(mark)
            if turn % 3 == 2:
                view, then = views.pop(0)
                rows = world.wide.rows_in(view)
                assert {key: value for (key, _), value in rows.items() if key >= 0} == then
                view.release()
            for entry in world.object:
                assert entry.key < 0 or entry.value == world.mine["object", entry.key]
            assert {key for name, key, *_ in world.mine if name == "wide"} <= {e.key for e in world.wide}
            core.metrics()
            core.arena.trim()
    for view, _ in views:
        view.release()
    drain(core)
    world.check()


@pytest.mark.parametrize("threads", [1, 4])
def test_batches(threads: int) -> None:
    world = World(is_exact=True)
    keys = np.arange(6_000)
    values = keys.view(np.uint8).reshape(-1, 8)[:, np.arange(WIDE) % 8]
    texts = (np.arange(len(keys) + 1) * 3, np.zeros(3 * len(keys), np.uint8))
    mean = StateTable(world.core, value=17, max_parallelism=1)
    sums = StateTable(world.core, value="long", max_parallelism=1)
    with world.meddler.at_work():
        for turn in range(3):
            batch_kernels.update_many(world.wide, keys, values, threads=threads)
            batch_kernels.update_many(sums, keys, keys + turn, threads=threads)
            first, _, touched = reduce_many(
                sums, keys, np.ones_like(keys), "sum", threads=threads, return_touched=True
            )
            assert (touched == keys[first] + turn + 1).all()
            read, found = batch_kernels.get_many(sums, keys, threads=threads)
            assert found.all()
            assert (read == keys + turn + 1).all()
            first, _, accumulated = aggregation_kernels.add_many(
                mean, keys, keys.astype(float), AddPlan("average"), threads=threads, return_touched=True
            )
            assert len(first) == len(accumulated) == len(keys)
            batch_kernels.append_many(world.list, keys[:500], keys[:500], threads=threads)
            offsets, elements = batch_kernels.lists_of(world.list, keys[:500], threads=threads)
            assert (np.diff(offsets) == turn + 1).all()
            assert (elements == np.repeat(keys[:500], turn + 1)).all()
            map_kernels.put_many(world.map, keys, keys % 3, texts, threads=threads)
            (offsets, _), found = map_kernels.get_many(world.map, keys, keys % 3, threads=threads)
            assert found.all()
            assert (np.diff(offsets) == 3).all()
            with pytest.raises(OverflowError, match="position 3"):
                reduce_many(
                    sums, keys, np.where(keys == 3, np.iinfo(np.int64).max, 1), "sum", threads=threads
                )
    for key in range(len(keys)):
        world.mine["wide", key] = values[key].tobytes()
        world.mine["map", key, key % 3] = b"\0\0\0"
    for key in range(500):
        world.mine["list", key] = [key] * 3
    world.check()


# --- interrupts -------------------------------------------------------------------------------------------------


def test_a_growing_table_runs_no_python() -> None:
    """So that no signal handler runs halfway: what it raises would be lost, or taken for a lack of memory."""
    program = """
        import sys
        import threading
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        def interrupt(frame, event, argument):
            if event == "call":
                raise KeyboardInterrupt(frame.f_code.co_name)

        core = StateCore()
        table = StateTable(core, value=60_000)
        threading.setprofile(interrupt)
        sys.setprofile(interrupt)
        for key in range(1_000):
            table.put(key, bytes(60_000))
        for key in range(1_000):
            table.remove(key)
        while core.advance(1 << 20):
            pass
        core.arena.trim()
        sys.setprofile(None)
        assert core.arena.usage()["extent_bytes"] == 0
        table._check()
        core._check()
    """
    assert run(textwrap.dedent(program)).stderr == ""


def test_an_interrupt_is_neither_lost_nor_a_lack_of_memory() -> None:
    program = """
        import signal
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        armed, raised, caught, unknown = [], 0, 0, set()

        def handler(number, frame):
            global raised
            if armed:
                armed.clear()
                raised += 1
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        core = StateCore()
        table = StateTable(core, value=60_000)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        for key in range(3_000):
            try:
                armed.append(key)
                table.put(key, bytes(60_000))
                armed.clear()
            except KeyboardInterrupt:
                caught += 1
                unknown.add(key)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert raised == caught and raised
        table._check()
        core._check()
        for key in range(3_000):
            assert table.get(key) == bytes(60_000) or (key in unknown and table.get(key) is None)
    """
    assert run(textwrap.dedent(program)).stderr == ""


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_while_threads_are_called_refuses_the_batch_whole(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = StateTable(StateCore(), value="long")
    keys = np.arange(20_000)
    batch_kernels.update_many(table, keys, keys)
    pool = batch_kernels._thread_pool()
    numbers = itertools.count()

    class Interrupted:
        @staticmethod
        def submit(work: Any) -> None:
            if next(numbers) == at:
                raise KeyboardInterrupt
            pool.submit(work)

    monkeypatch.setattr(batch_kernels, "_thread_pool", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        batch_kernels.update_many(table, keys, -keys, threads=4)
    values, _ = batch_kernels.get_many(table, keys)
    assert (values == keys).all()
    table._check()


# --- the end ----------------------------------------------------------------------------------------------------


def test_threads_that_close_and_release_at_once_end_it_once() -> None:
    program = """
        import sys
        import threading
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        class Slow:
            def __del__(self):
                for _ in range(20):
                    pass

        sys.setswitchinterval(1e-6)
        for _ in range(30):
            core = StateCore()
            table = StateTable(core, value="object")
            for key in range(500):
                table.put(key, Slow())
            views = [core.snapshot() for _ in range(3)]
            for key in range(500):
                table.put(key, Slow())
            begin = threading.Barrier(4)

            def end(what):
                begin.wait()
                what()

            threads = [threading.Thread(target=end, args=(what,))
                       for what in [core.close, *(view.release for view in views)]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert core.arena.usage()["run_bytes"] == 0
    """
    assert run(textwrap.dedent(program)).stderr == ""
