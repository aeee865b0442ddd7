"""Finalisers that use the tables, run by collections wherever an object is made; interrupts; ends that meet."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from map_model import reduce_many
from meddling import Meddler

from statebackend._core.batches import adding_kernels, kernels, map_kernels
from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.snapshots import changes
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import UsageError

pytestmark = pytest.mark.checked

WIDE = 2_000  # bytes: a thousand entries fill an extent


def wide(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True) * (WIDE // 8)


class World:
    """Tables of every kind in one core. The test has the keys from 0 on, finalisers the negative ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = StateCore(seed=seed)
        options: dict[str, Any] = {"max_parallelism": 1, "initial_capacity": 4}
        self.long = StateTable(self.core, value="long", **options)
        self.wide = StateTable(self.core, value=WIDE, **options)
        self.bytes = StateTable(self.core, key="bytes", value="bytes", namespaces=True, **options)
        self.object = StateTable(self.core, value="object", **options)
        self.list = StateTable(self.core, value=("list", "long"), **options)
        self.map = MapTable(self.core, key="int", map_key="int", value="bytes", **options)
        self.tables = [self.long, self.wide, self.bytes, self.object, self.list, self.map]
        self.numbers = itertools.count()
        #: What finalisers have put, by table and key.
        self.put: dict[Any, Any] = {}
        #: Whether that is what there is: a rollback takes back what finalisers have done since the mark.
        self.is_exact = True
        self.meddler = Meddler(self.act)

    def act(self) -> None:
        """Change every table a little."""
        number = next(self.numbers)
        key = -1 - number % 500
        self.wide.put(key, wide(number))
        self.put["wide", key] = wide(number)
        for near in (key, -1 - self.random.randrange(500)):
            self.long.put(near, number)
            self.put["long", near] = number
        space = self.core.namespaces.number(b"finaliser %d" % (number % 7))
        self.bytes.put(b"%d" % key, b"x" * number, space)
        self.put["bytes", key, space] = b"x" * number
        self.object.put(key, [number])
        self.put["object", key] = [number]
        self.list.append(key, number)
        self.put.setdefault(("list", key), []).append(number)
        self.map.put(key, number % 3, b"%d" % number)
        self.put["map", key, number % 3] = b"%d" % number
        gone = -1 - self.random.randrange(500)
        there = self.long.get(gone)
        assert not self.is_exact or there == self.put.get(("long", gone))
        for name, table in (
            ("wide", self.wide),
            ("long", self.long),
            ("object", self.object),
            ("list", self.list),
        ):
            was_there, was_put = table.remove(gone), self.put.pop((name, gone), None) is not None
            assert not self.is_exact or was_there == was_put

    def check(self, mine: dict[Any, Any]) -> None:
        for table in self.tables:
            table._check()
        self.core._check()
        found: dict[Any, Any] = {}
        for name, table in (
            ("long", self.long),
            ("wide", self.wide),
            ("object", self.object),
            ("list", self.list),
        ):
            found.update({(name, entry.key): entry.value for entry in table})
        found.update({("bytes", int(e.key), e.namespace): e.value for e in self.bytes})
        for key in self.map.heads.keys_of(0)[0]:
            found.update({("map", key, at): value for at, value in self.map.items(key)})
        assert {at: value for at, value in found.items() if at[1] >= 0} == mine
        if self.is_exact:
            assert {at: value for at, value in found.items() if at[1] < 0} == self.put


@pytest.fixture(params=range(3))
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def drain(core: StateCore) -> None:
    while core.advance(1 << 20):
        pass


# --- one operation at a time ---------------------------------------------------------------------------------------


def test_inserts_that_need_extents(world: World) -> None:
    mine: dict[Any, Any] = {}
    with world.meddler.at_work():
        for key in range(6_000):
            world.wide.put(key, wide(key))
            mine["wide", key] = wide(key)
    assert world.core.arena.usage()["extent_bytes"] > 5 << 21
    world.check(mine)


def test_every_kind_of_operation(world: World) -> None:
    mine: dict[Any, Any] = {}
    space = world.core.namespaces.number(b"mine")
    with world.meddler.at_work():
        for number in range(3_000):
            key = number % 700
            world.long.put(key, number)
            mine["long", key] = number
            world.bytes.put(b"%d" % key, b"%d" % number * 50, space)
            mine["bytes", key, space] = b"%d" % number * 50
            world.object.put(key, [number])
            mine["object", key] = [number]
            world.list.append(key, number)
            mine.setdefault(("list", key), []).append(number)
            assert world.list.get(key) == mine["list", key]
            world.map.put(key, number % 5, b"v" * number)
            mine["map", key, number % 5] = b"v" * number
            if number % 3 == 0:
                gone = number * 7 % 700
                assert world.object.remove(gone) == (mine.pop(("object", gone), None) is not None)
                assert world.list.remove(gone) == (mine.pop(("list", gone), None) is not None)
                assert world.map.clear(gone) == any(
                    mine.pop(("map", gone, at), None) is not None for at in list(range(5))
                )
                for at in range(5):
                    mine.pop(("map", gone, at), None)
    world.check(mine)


def test_under_snapshots_and_marks(world: World) -> None:
    mine: dict[Any, Any] = {}
    views: list[tuple[Any, dict[Any, Any]]] = []
    marks: list[Any] = []
    with world.meddler.at_work():
        for number in range(2_000):
            key = number % 300
            world.wide.put(key, wide(number))
            mine["wide", key] = wide(number)
            world.object.put(key, [number])
            mine["object", key] = [number]
            world.map.put(key, number % 3, b"m%d" % number)
            mine["map", key, number % 3] = b"m%d" % number
            if number % 50 == 0:
                views.append((world.core.snapshot(), {at: mine[at] for at in mine if at[0] == "wide"}))
            if number % 70 == 0:
                marks.append(world.core.mark())
            if number % 90 == 0:
                view, then = views.pop(0)
                read = world.wide.rows_in(view)
                assert {("wide", key): value for (key, _), value in read.items() if key >= 0} == then
                view.release()
            if number % 110 == 0:
                world.core.release(marks.pop(0))
            world.core.metrics()
    for view, _ in views:
        view.release()
    for mark in marks:
        world.core.release(mark)
    drain(world.core)
    world.check(mine)


def test_rollbacks(world: World) -> None:
    mine: dict[Any, Any] = {}
    world.is_exact = False
    with world.meddler.at_work():
        for turn in range(30):
            for number in range(turn * 40, turn * 40 + 60):
                key = number % 500
                world.wide.put(key, wide(number))
                mine["wide", key] = wide(number)
                world.object.put(key, [number])
                mine["object", key] = [number]
            before = dict(mine)
            mark = world.core.mark()
            view = world.core.snapshot() if turn % 2 else None
            for key in range(0, 500, 3):
                world.wide.put(key, wide(-key))
                world.object.remove(key)
                world.map.put(key, 1, b"gone")
                world.list.append(key, key)
            assert {key for key, _ in world.object.dirty(mark) if key >= 0} <= set(range(0, 500, 3))
            world.core.rollback(mark)
            world.core.release(mark)
            if view is not None:
                view.release()
            mine = before
    drain(world.core)
    world.check(mine)


def test_iteration_and_inspection(world: World) -> None:
    mine: dict[Any, Any] = {}
    for key in range(300):
        world.wide.put(key, wide(key))
        mine["wide", key] = wide(key)
        world.object.put(key, [key])
        mine["object", key] = [key]
    with world.meddler.at_work():
        for _ in range(20):
            assert set(range(300)) <= {entry.key for entry in world.wide}
            for entry in world.object:
                assert entry.key < 0 or entry.value == [entry.key]
            for key in range(0, 300, 7):
                assert world.object.entry(key).value == [key]
                assert key in {entry.key for entry in world.wide.chain(key)}
    world.check(mine)


def test_a_list_that_a_finaliser_replaces_is_read_whole() -> None:
    core = StateCore()
    table = StateTable(core, value=("list", "long"), max_parallelism=1)
    other = StateTable(core, value="long", max_parallelism=1)
    numbers = itertools.count()
    kept: list[Any] = []  # so that the interpreter has no old list to give out for a new one

    def replace() -> None:
        number = next(numbers)
        table.remove(2)
        table.remove(1)
        for _ in range(number % 300 + 1):
            table.append(2, -1)  # where the other list has been
            table.append(1, number)
        kept.append([])
        kept.append([])

    table.append(3, 3)  # so that the map keeps its memory
    for _ in range(100):
        replace()
    meddler = Meddler(replace)
    with meddler.at_work():
        for turn in range(300):
            for _ in range(turn % 3):
                kept.append([])  # so that now one, now another object starts a collection
            found = table.get(1)
            kept.append(found)
            assert found is None or len(set(found)) == 1
            assert found is None or len(found) == found[0] % 300 + 1
            other.put(turn, turn)
    table._check()
    core._check()


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_batches(world: World, threads: int) -> None:
    mine: dict[Any, Any] = {}
    keys = np.arange(6_000)
    values = np.zeros((len(keys), WIDE), np.uint8)
    values[:] = np.repeat(keys, 1).view(np.uint8).reshape(-1, 8)[:, np.arange(WIDE) % 8]
    texts = (np.arange(len(keys) + 1) * 3, np.zeros(3 * len(keys), np.uint8))
    mean = StateTable(world.core, value=17, max_parallelism=1)
    with world.meddler.at_work():
        for turn in range(3):
            kernels.update_many(world.wide, keys, values, threads=threads)
            kernels.update_many(world.long, keys, keys + turn, threads=threads)
            first, sums = reduce_many(
                world.long, keys, np.ones_like(keys), "sum", threads=threads, return_touched=True
            )
            assert (sums == keys[first] + turn + 1).all()
            read, found = kernels.get_many(world.long, keys, threads=threads)
            assert found.all()
            assert (read == keys + turn + 1).all()
            first, accumulated = adding_kernels.add_many(
                mean, keys, keys.astype(float), AddPlan("average"), threads=threads, return_touched=True
            )
            assert len(first) == len(accumulated) == len(keys)
            kernels.append_many(world.list, keys[:500], keys[:500], threads=threads)
            offsets, elements = kernels.lists_of(world.list, keys[:500], threads=threads)
            assert (np.diff(offsets) == turn + 1).all()
            assert (elements == np.repeat(keys[:500], turn + 1)).all()
            map_kernels.put_many(world.map, keys, keys % 3, texts, threads=threads)
            (offsets, _), found = map_kernels.get_many(world.map, keys, keys % 3, threads=threads)
            assert found.all()
            assert (np.diff(offsets) == 3).all()
            with pytest.raises(OverflowError, match="position 3"):
                reduce_many(
                    world.long, keys, np.where(keys == 3, np.iinfo(np.int64).max, 1), "sum", threads=threads
                )
    for key in range(len(keys)):
        mine["wide", key] = values[key].tobytes()
        mine["long", key] = key + 3
        mine["map", key, key % 3] = b"\0\0\0"
    for key in range(500):
        mine["list", key] = [key] * 3
    world.check(mine)


@pytest.mark.parametrize("threads", [1, 4])
def test_byte_batches_and_changes(world: World, threads: int) -> None:
    n = 5_000
    offsets, data = np.arange(n + 1) * 4, np.arange(n, dtype=np.int32).view(np.uint8)
    table = StateTable(world.core, key="bytes", value="bytes", max_parallelism=4, initial_capacity=4)
    other = StateTable(world.core, value="bytes", max_parallelism=1)

    def act() -> None:
        number = next(world.numbers)
        other.put(number % 50, b"y" * (number % 3_000))
        other.remove(number * 7 % 50)
        table.put(b"finaliser %d" % (number % 90), b"z" * (number % 5_000))
        table.remove(b"finaliser %d" % (number * 3 % 90))

    meddler = Meddler(act)
    with meddler.at_work():
        for _ in range(5):
            mark = world.core.mark()
            kernels.update_many(table, (offsets, data), (offsets, data), threads=threads)
            (ends, read), found = kernels.get_many(table, (offsets, data), threads=threads)
            assert found.all()
            assert (ends == offsets).all()
            assert (read == data).all()
            assert changes.count_changes(table, mark)[0] >= n
            with contextlib.suppress(UsageError):  # a finaliser has called the backend in between
                rows = changes.changed_entries(table, mark)
                rows.take(rows.is_live).columns()
            kernels.remove_many(table, (offsets, data), threads=threads)
            world.core.release(mark)
    drain(world.core)
    table._check()
    other._check()
    assert {key for key in (entry.key for entry in table) if not key.startswith(b"finaliser")} == set()


def test_memory_that_is_given_back(world: World) -> None:
    keys = np.arange(20_000)
    values = np.zeros((len(keys), WIDE), np.uint8)
    with world.meddler.at_work():
        for _ in range(2):
            kernels.update_many(world.wide, keys, values)
            kernels.remove_many(world.wide, keys)
            drain(world.core)
            world.core.arena.trim()
            for array in world.core.arena.memory():
                assert array.nbytes == 1 << 21
    world.check({})


# --- interrupts -------------------------------------------------------------------------------------------------


def in_a_process_of_its_own(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_growing_table_runs_no_python() -> None:
    """So that no signal handler runs halfway: what it raises would be lost, or taken for a lack of memory."""
    in_a_process_of_its_own("""
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
    """)


def test_an_interrupt_is_neither_lost_nor_a_lack_of_memory() -> None:
    in_a_process_of_its_own("""
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
    """)


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_while_threads_are_called_refuses_the_batch_whole(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = StateTable(StateCore(), value="long")
    keys = np.arange(20_000)
    kernels.update_many(table, keys, keys)
    pool = kernels._thread_pool()
    numbers = itertools.count()

    class Interrupted:
        @staticmethod
        def submit(work: Any) -> None:
            if next(numbers) == at:
                raise KeyboardInterrupt
            pool.submit(work)

    monkeypatch.setattr(kernels, "_thread_pool", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.update_many(table, keys, -keys, threads=4)
    values, _ = kernels.get_many(table, keys)
    assert (values == keys).all()
    table._check()


# --- the end ----------------------------------------------------------------------------------------------------


ENDS = """
    import gc
    import sys
    import threading
    from statebackend._core.memory.arena import live_counters
    from statebackend._core.tables.state_core import StateCore
    from statebackend._core.core_probe import StateTable

    class Ends:
        def __init__(self, act):
            self.act = act
        def __del__(self):
            acts.append(self.act)
            self.act()

    acts = []
    for _ in range(20):
        core = StateCore()
        tables = [StateTable(core, value=value, max_parallelism=1) for value in ("object", "long", ("list", "object"))]
        for table in tables[:2]:
            for key in range(3_000):
                table.put(key, key)
        views = [core.snapshot() for _ in range(3)]

        def in_a_thread(function):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()

        def release():
            for view in views:
                view.release()

        def act():
            {act}

        for key in range(3_000, 3_050):
            tables[0].put(key, Ends(act))
            tables[2].append(key, Ends(act))
        mark = core.mark()
        for key in range(3_000, 3_050):
            tables[0].remove(key)
            tables[2].remove(key)
        core.release(mark)
        core.close()
        release()
        del table, tables
        usage = core.arena.usage()
        assert (usage["run_bytes"], usage["blob_bytes"]) == (0, 0), usage
        core = views = mark = None
    assert len(acts) == 2_000
    gc.collect()
    assert not any(live_counters().values()), live_counters()
"""


@pytest.mark.parametrize(
    "act",
    [
        "release()",
        "in_a_thread(release)",
        "core.close()",
        "in_a_thread(core.close)",
        "in_a_thread(views.pop().release) if views else None",
        "core.close(); release()",
    ],
)
def test_a_backend_that_is_closed_ends_once(act: str) -> None:
    """Dropping its objects runs finalisers, which release the last view or close it again, on this thread or others."""
    in_a_process_of_its_own(ENDS.replace("{act}", act))


def test_threads_that_close_and_release_at_once_end_it_once() -> None:
    in_a_process_of_its_own("""
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
    """)
