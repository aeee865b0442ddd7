"""Two threads that overlap in one backend: calls are refused, and nothing else happens to the process or the state."""

from __future__ import annotations

import collections
import faulthandler
import gc
import itertools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import run

import statebackend as sb
from statebackend.errors import ClosedError, StateBackendError, UsageError

SIZES = (0, 8, 100, 5000)
#: Without a rule that refuses them, overlapping calls of Python code in the library meet each other's half-done work.
FOREIGN = (AssertionError, IndexError, KeyError, RuntimeError, StopIteration, ValueError)


class Misuse:
    """Two threads use one backend at random, as a program of its own. Calls may be refused, and both see what the other
    does. The process must not end, and afterwards one thread alone finds a backend that works.
    """

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed, self.end = seed, time.monotonic() + seconds
        self.rng = random.Random(seed)
        self.has_texts = self.rng.random() < 0.5
        self.expires = self.rng.random() < 0.5
        self.folder = tempfile.TemporaryDirectory()
        self.store = sb.CheckpointStore(f"{self.folder.name}/store").open_for_writing(max_parallelism=16)
        self.ids = itertools.count()
        self.lock = threading.Lock()
        self.calls: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.make()

    def make(self) -> None:
        backend = sb.create_backend("rocksdb", memory_limit=4 << 20, local_dir=self.folder.name)
        self.marks: list[Any] = []
        self.keyed: Any = backend.create_keyed_backend(str if self.has_texts else int, max_parallelism=16)
        self.keyed.store.unmarked_keys = 200
        descriptors: list[Any] = [
            sb.ValueStateDescriptor("value", bytes),
            sb.ListStateDescriptor("list", str),
            sb.MapStateDescriptor("map", str, bytes),
            sb.ReducingStateDescriptor("sum", lambda a, b: a + b, int),
            sb.ValueStateDescriptor("object", sb.types.PICKLE),
        ]
        if self.expires:
            update = sb.StateTtlConfig.UpdateType.OnReadAndWrite
            for each in descriptors:
                each.enable_time_to_live(sb.StateTtlConfig(50, update_type=update))
        self.value, self.list, self.map, self.sum, self.object = map(self.keyed.get_state, descriptors)

    # --- what is drawn ---

    def key(self, rng: random.Random) -> Any:
        number = rng.randrange(60)
        return "k" * rng.choice([1, 5, 40, 300, 3000]) + str(number) if self.has_texts else number

    def keys(self, rng: random.Random) -> list[Any]:
        return [self.key(rng) for _ in range(rng.choice([1, 70, 700, 3000]))]

    def entry(self, rng: random.Random) -> str:
        return f"entry {rng.randrange(30)}" * rng.choice([1, 1, 300])

    # --- the calls ---

    def set_key(self, rng: random.Random) -> None:
        self.keyed.set_current_key(self.key(rng))

    def set_namespace(self, rng: random.Random) -> None:
        self.keyed.set_current_namespace(rng.choice([sb.VOID, 1, "ns" * 200, sb.TimeWindow(0, 10)]))

    def one(self, rng: random.Random) -> None:
        value = rng.randbytes(rng.choice(SIZES))
        call: Callable[[], object] = rng.choice(
            [
                lambda: self.value.update(value),
                self.value.value,
                self.value.clear,
                lambda: self.object.update({"a": value}),
                self.object.value,
                lambda: self.list.add("x" * rng.choice(SIZES)),
                lambda: self.list.add_all(str(i) for i in range(rng.randrange(50))),
                lambda: self.list.update(["a"] * rng.randrange(5)),
                self.list.get,
                self.list.clear,
                lambda: self.map.put(self.entry(rng), value),
                lambda: self.map.put_all({self.entry(rng): value for _ in range(rng.randrange(20))}),
                lambda: self.map.get(self.entry(rng)),
                lambda: self.map.remove(self.entry(rng)),
                lambda: list(itertools.islice(self.map.items(), rng.randrange(30))),
                self.map.clear,
                lambda: self.sum.add(rng.randrange(9)),
                self.sum.get,
            ]
        )
        call()

    def many(self, rng: random.Random) -> None:
        keys = self.keys(rng)
        values = [rng.randbytes(rng.choice(SIZES)) for _ in keys]
        entries = [self.entry(rng) for _ in keys]
        call: Callable[[], object] = rng.choice(
            [
                lambda: self.value.update_many(keys, values),
                lambda: self.value.get_many(keys),
                lambda: self.list.add_many(keys, entries),
                lambda: self.list.get_many(keys),
                lambda: self.sum.add_many(keys, [1] * len(keys)),
                lambda: self.map.put_many(keys, entries, values),
                lambda: self.map.get_many(keys, entries),
                lambda: self.map.exists_many(keys),
            ]
        )
        call()

    def mark(self, rng: random.Random) -> None:
        marks, keyed = self.marks, self.keyed
        if len(marks) < 10 and rng.random() < 0.5:
            marks.append(keyed.mark())
        elif marks:
            call = rng.choice([keyed.rollback, keyed.release, keyed.release, keyed.count_changes])
            mark = rng.choice(marks)
            if call == keyed.release:
                marks.remove(mark)
            call(mark)

    def snapshot(self, rng: random.Random) -> None:
        number, keyed = next(self.ids), self.keyed
        pending = keyed.snapshot(number, self.store, incremental=rng.random() < 0.8)
        if rng.random() < 0.7:
            self.store.commit(number, [pending.result()])
            keyed.notify_checkpoint_complete(number)
        else:
            self.store.abort(number)
            keyed.notify_checkpoint_aborted(number)

    def rest(self, rng: random.Random) -> None:
        keyed, timers = self.keyed, self.keyed.timers
        call: Callable[[], object] = rng.choice(
            [
                lambda: timers.register_event_time_timer(rng.randrange(1000)),
                lambda: timers.register_event_time_timer(rng.randrange(1000)),
                timers.pending_event_time_timers,
                lambda: list(itertools.islice(timers.due(rng.randrange(1000)), 5)),
                lambda: list(itertools.islice(keyed.keys("value"), 50)),
                keyed.num_entries,
                lambda: keyed.advance(rng.randrange(100)),
                keyed.metrics,
                keyed.clear_key,
                lambda: keyed.apply_to_all_keys(self.value.descriptor, lambda key, state: state.clear()),
                keyed.scratch.database.flush,
                lambda: keyed.scratch.database.compact(self.value.table.family),
                lambda: keyed.close() if rng.random() < 0.05 else None,
            ]
        )
        call()

    # --- the threads ---

    def work(self, number: int, calls: list[Callable[[random.Random], None]]) -> None:
        rng = random.Random(1000 * self.seed + number)
        while time.monotonic() < self.end:
            call, keyed = rng.choice(calls), self.keyed
            try:
                call(rng)
                self.calls[call.__name__] += 1
            except ClosedError:
                with self.lock:
                    if self.keyed is keyed and keyed._closed:
                        self.make()
            except StateBackendError as error:
                self.errors[error.code] += 1
            except FOREIGN as error:
                self.errors[type(error).__name__] += 1

    def run(self) -> None:
        key, one, many, mark = self.set_key, self.one, self.many, self.mark
        calls = self.rng.choice(
            [
                [key, one],
                [key, one, self.set_namespace],
                [key, one, many],
                [many, mark],
                [key, one, mark, self.snapshot],
                [key, one, many, mark, self.snapshot],
                [key, key, one, one, many, mark, self.snapshot, self.rest, self.set_namespace],
            ]
        )
        threads = [threading.Thread(target=self.work, args=(number, calls)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gc.isenabled()
        if not self.keyed._closed:
            self.keyed.store.overlay._check()
            self.keyed.set_current_key(self.key(self.rng))
            self.value.value()
            self.keyed.close()
        self.store.close()
        self.folder.cleanup()
        print(dict(self.calls), dict(self.errors))


BESIDE_WRITES = """
import itertools, sys, threading, time
import statebackend as sb
from statebackend.errors import UsageError

sys.setswitchinterval(1e-5)
keyed = sb.create_backend("rocksdb", local_dir=sys.argv[1]).create_keyed_backend(int)
state = keyed.get_value_state(sb.ValueStateDescriptor("v", int))
keyed.mark()
outer = keyed.mark()
written, refused = [], []

def write():
    for key in itertools.count(1):
        if len(written) >= 2000 and len(refused) >= 20:
            return
        try:
            keyed.set_current_key(key)
            state.update(key)
            written.append(key)
        except UsageError as error:
            assert error.code == "USAGE.OVERLAPPING_CALL", error
            refused.append(key)

def release():
    mark = keyed.mark()
    time.sleep(0.002)
    keyed.release(mark)

def count():
    keyed.count_changes(outer)

thread = threading.Thread(target=write)
thread.start()
while thread.is_alive():
    {call}()
thread.join()
assert len(written) >= 2000 and len(refused) >= 20  # the thread has come to its end
assert keyed.count_changes(outer) == (len(written), 0)
assert state.get_many(refused).null_count == len(refused)
assert state.get_many(written).to_pylist() == written
keyed.close()
"""


@pytest.mark.parametrize("call", ["release", "count"])
def test_a_write_is_refused_while_another_thread_goes_over_the_noted_changes(
    tmp_path: Path, call: str
) -> None:
    """Ending a mark, and counting what has changed since, let go of the GIL."""
    run(BESIDE_WRITES.replace("{call}", call), tmp_path)


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
@pytest.mark.parametrize("what", ["key", "namespace", "map key"])
def test_a_read_finds_what_it_asks_for_while_another_thread_makes_another_place_current(what: str) -> None:
    names = [letter * size for letter in "abc" for size in (1, 50, 1000, 20_000)]
    found: Counter[str] = Counter()
    with sb.create_backend("rocksdb").create_keyed_backend(str) as keyed:
        value = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
        entries = keyed.get_map_state(sb.MapStateDescriptor("m", str, str))
        for name in names:
            keyed.set_current_key(name if what == "key" else "k")
            keyed.set_current_namespace(name if what == "namespace" else sb.VOID)
            value.update(name)
            entries.put(name, name)
        keyed.release(keyed.mark())  # all is in the database now, and reads go there
        reads: dict[str, Callable[[str], object]] = {
            "key": lambda name: (keyed.set_current_key(name), value.value())[1],
            "namespace": lambda name: (keyed.set_current_namespace(name), value.value())[1],
            "map key": entries.get,
        }

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(6_000):
                try:
                    found[str(reads[what](rng.choice(names)))] += 1
                except UsageError as error:
                    assert error.code == "USAGE.OVERLAPPING_CALL"  # noqa: PT017

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read, range(2)))
    assert set(found) == set(names)  # and never None


def misuse(seed: int, seconds: float) -> None:
    # glibc overwrites what is freed: use of freed memory shows.
    done = run(sys.modules[__name__], seed, seconds, status=None, variables={"MALLOC_PERTURB_": "165"})
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"


def test_random_calls_of_two_threads_end_no_process(rng: random.Random) -> None:
    misuse(rng.randrange(10**6), 1.5)


@pytest.mark.stress
def test_random_calls_of_two_threads_end_no_process_for_long(rng: random.Random) -> None:
    for _ in range(200):
        misuse(rng.randrange(10**6), 15)


if __name__ == "__main__":
    faulthandler.enable()
    sys.setswitchinterval(1e-5)
    Misuse(int(sys.argv[1]), float(sys.argv[2])).run()
