"""Two threads that overlap in one backend: calls are refused, and nothing else happens to the process or the state."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import misused_rocks
import processes
import pytest
from rocks import run

import statebackend as sb
from statebackend.errors import UsageError

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
    run(BESIDE_WRITES.replace("{call}", call), tmp_path, prelude="")


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

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(found) == set(names)  # and never None


def misuse(seed: int, seconds: float) -> None:
    # glibc overwrites what is freed: use of freed memory shows.
    done = processes.run(misused_rocks, seed, seconds, status=None, variables={"MALLOC_PERTURB_": "165"})
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"


def test_random_calls_of_two_threads_end_no_process(rng: random.Random) -> None:
    misuse(rng.randrange(10**6), 1.5)


@pytest.mark.stress
def test_random_calls_of_two_threads_end_no_process_for_long(rng: random.Random) -> None:
    for _ in range(200):
        misuse(rng.randrange(10**6), 15)
