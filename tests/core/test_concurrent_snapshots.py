"""A snapshot read on another thread while the table changes at full speed shows its own moment, exactly.

What overlaps: a reader lets go of the GIL while it walks the pages of a key group (`collect_entries`) and
while it copies fixed-width and byte columns; in between it holds it, as it does for objects and lists
throughout. The mutating thread lets go of it inside batch kernels. So for inline and byte values kernels and
readers truly run side by side; for objects and lists, and for scalar calls, the two take turns, and a tiny
switch interval makes those turns as many as can be. Taking page directories (`see_snapshots`) happens on
whichever thread comes first.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from map_model import packed, unpacked

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.snapshots.snapshot_view import SnapshotView
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

KINDS = ["long", "bytes", "object", "list", "byte list"]
GROUPS = 8
ABSENT = -1


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Mutator:
    """A table whose contents follow from one number per key: the oracle is an array, and a copy of it a
    moment.

    The number is the version of a value, or the length of a list.
    """

    def __init__(self, kind: str, seed: int, n_keys: int, initial_capacity: int) -> None:
        self.kind, self.random, self.rng = kind, random.Random(seed), np.random.default_rng(seed)
        value = {"list": ("list", "long"), "byte list": ("list", "bytes")}.get(kind, kind)
        self.core = StateCore()
        self.table = StateTable(
            self.core, value=value, max_parallelism=GROUPS, initial_capacity=initial_capacity
        )
        self.is_list = isinstance(value, tuple)
        self.state = np.full(n_keys, ABSENT, dtype=np.int64)
        self.version = 0
        for _ in range(4):
            self.write(n_keys // 3)

    def value(self, key: int, number: int) -> Any:
        if self.kind == "long":
            return key << 32 | number
        if self.kind == "bytes":
            return b"%d.%d;" % (key, number) * (key % 30)
        if self.kind == "object":
            return key, number
        elements = [key << 20 | at for at in range(number)]
        return elements if self.kind == "list" else [b"%d" % e for e in elements]

    def expected(self, state: Any) -> dict[int, Any]:
        return {key: self.value(key, number) for key, number in enumerate(state.tolist()) if number != ABSENT}

    # --- changes ---

    def write(self, rows: int) -> None:
        """Half of the time a narrow range of keys, so that others stay untouched for long."""
        self.version += 1
        top = len(self.state) // 8 if self.random.random() < 0.5 else len(self.state)
        keys = self.rng.integers(0, top, rows)
        threads = self.random.choice((1, 2))
        if self.is_list:
            keys = np.unique(keys)
            lengths = np.maximum(self.state[keys], 0)
            elements = keys << 20 | lengths
            values = elements if self.kind == "list" else packed([b"%d" % e for e in elements])
            batch_kernels.append_many(self.table, keys, values, threads=threads)
            self.state[keys] = lengths + 1
        elif self.kind == "object":
            for key in keys[:300].tolist():
                self.table.put(key, (key, self.version))
                self.state[key] = self.version
        else:
            values = (
                keys << 32 | self.version
                if self.kind == "long"
                else packed([self.value(key, self.version) for key in keys.tolist()])
            )
            batch_kernels.update_many(self.table, keys, values, threads=threads)
            self.state[keys] = self.version

    def remove(self, rows: int) -> None:
        keys = self.rng.integers(0, len(self.state), rows)
        if self.kind == "object":
            keys = keys[:300]
            for key in keys.tolist():
                self.table.remove(key)
        else:
            batch_kernels.remove_many(self.table, keys, threads=self.random.choice((1, 2)))
        self.state[keys] = ABSENT

    def scalar_calls(self, n: int) -> None:
        self.version += 1
        for key in self.rng.integers(0, len(self.state), n).tolist():
            if self.random.random() < 0.3:
                self.table.remove(key)
                self.state[key] = ABSENT
            elif self.is_list:
                length = max(int(self.state[key]), 0)
                self.table.append(key, self.value(key, length + 1)[length])
                self.state[key] = length + 1
            else:
                self.table.put(key, self.value(key, self.version))
                self.state[key] = self.version

    def step(self) -> None:
        action = self.random.random()
        if action < 0.5:
            self.write(self.random.choice((100, 5_000)))
        elif action < 0.7:
            self.remove(self.random.choice((100, 5_000, len(self.state))))
        elif action < 0.95:
            self.scalar_calls(100)
        else:
            self.core.advance(1_000)


class Reader(threading.Thread):
    """Reads a whole snapshot and releases it, on a thread of its own."""

    def __init__(self, mutator: Mutator) -> None:
        super().__init__()
        self.table, self.kind, self.is_list = mutator.table, mutator.kind, mutator.is_list
        self.view: SnapshotView = mutator.core.snapshot()
        self.state = mutator.state.copy()
        self.found: dict[int, Any] = {}
        self.items: dict[Any, Any] = {}
        self.sizes = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.sizes = self.view.group_sizes(self.table).sum()
            # Group by group at the start, all at once at the end: the latter holds the GIL throughout.
            for group in range(GROUPS):
                self.found.update(self.rows(self.view.rows(self.table, group, group).columns()))
            self.items = self.table.rows_in(self.view)
            self.view.release()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.error = error

    def rows(self, columns: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        values = columns["value"]
        if "value_offsets" in columns:
            values = unpacked(columns["value_offsets"], values)
        elif self.kind != "object":
            values = values.tolist()
        if self.is_list:
            ends = columns["list_offsets"].tolist()
            values = [values[a:b] for a, b in itertools.pairwise(ends)]
        return zip(columns["key"].tolist(), values, strict=True)


def run_rounds(kind: str, rounds: int, seed: int) -> None:
    """So many rounds; more if the system let readers end before the other thread went on."""
    overlapped = round_ = 0
    mutator = None
    sizes = (5_000, 50_000) if kind == "long" else (1_000, 5_000)
    while round_ < rounds or (overlapped <= rounds // 2 and round_ < 20 * rounds):
        if round_ % 10 == 0:
            mutator = Mutator(kind, seed + round_, sizes[round_ % 20 // 10], (4, 64)[round_ % 3 == 0])
        assert mutator is not None
        mark = mutator.core.mark() if mutator.random.random() < 0.3 else None
        readers = []
        for _ in range(mutator.random.choice((1, 1, 2, 3))):
            readers.append(Reader(mutator))
            for _ in range(mutator.random.randrange(3)):
                mutator.step()
        mutator.random.shuffle(readers)
        for reader in readers:
            reader.start()
        while any(reader.is_alive() for reader in readers):
            mutator.step()
            overlapped += 1
        for reader in readers:
            reader.join()
            if reader.error is not None:
                raise reader.error
            expected = mutator.expected(reader.state)
            assert reader.sizes == len(expected), f"seed {seed}, round {round_}"
            assert reader.found == expected, f"seed {seed}, round {round_}"
            assert reader.items == {(key, 0): value for key, value in expected.items()}
        if mark is not None:
            mutator.core.release(mark)
        if round_ % 5 == 4:
            mutator.table._check()
            found = {entry.key: entry.value for entry in mutator.table}
            assert found == mutator.expected(mutator.state)
        round_ += 1
    assert overlapped > rounds // 2, "nothing ran at the same time"
    assert mutator is not None
    readers = []
    while mutator.core.advance(1 << 20):
        pass
    mutator.table._check()
    assert mutator.table.metrics()["used_slots"] == len(mutator.table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_read_during_changes_shows_its_moment(
    kind: str, rng: random.Random, is_stress: bool
) -> None:
    run_rounds(kind, 1_000 if is_stress else 20, rng.getrandbits(32))


def test_a_snapshot_of_a_growing_table_in_the_middle_of_a_rehash(rng: random.Random) -> None:
    """Readers that begin at every stage of doubling, while the kernels move on."""
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=2, initial_capacity=4)
    readers: list[tuple[threading.Thread, list[Any], int]] = []
    mid_rehash = n = 0
    for _ in range(60):
        view = core.snapshot()
        is_rehashing = table.metrics()["rehashing_maps"] > 0
        mid_rehash += is_rehashing
        found: list[Any] = []

        def read(view: SnapshotView = view, found: list[Any] = found) -> None:
            for group in range(2):
                columns = view.rows(table, group, group).columns()
                found.extend(zip(columns["key"].tolist(), columns["value"].tolist(), strict=True))
            view.release()

        thread = threading.Thread(target=read)
        thread.start()
        readers.append((thread, found, n))
        # Small steps through a rehash, long ones to the next.
        rows = rng.randrange(1, 20 if is_rehashing else 500)
        batch_kernels.update_many(
            table, np.arange(n, n + rows), np.arange(n, n + rows), threads=rng.choice((1, 2))
        )
        n += rows
        if len(readers) == 4:
            for thread, found, size in readers:
                thread.join()
                assert sorted(found) == [(key, key) for key in range(size)]
            readers.clear()
    assert mid_rehash > 10
    table._check()


def test_released_on_the_reading_thread_in_any_order(rng: random.Random) -> None:
    core = StateCore()
    table = StateTable(core, value="bytes")
    for key in range(500):
        table.put(key, b"x" * key)
    for _ in range(30):
        views = []
        for _ in range(4):
            views.append(core.snapshot())
            for key in rng.sample(range(500), 50):
                table.put(key, rng.randbytes(key))
        rng.shuffle(views)
        threads = [threading.Thread(target=view.release) for view in views]
        for thread in threads:
            thread.start()
            table.put(rng.randrange(500), b"")
        for thread in threads:
            thread.join()
        views.clear()
    while core.advance(1 << 20):
        pass
    assert core.metrics()["snapshots"] == []
    assert table.metrics()["used_slots"] == len(table) == 500
    table._check()


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["long", "bytes", "list"])
def test_a_snapshot_held_over_ten_million_updates_costs_one_copy(kind: str, rng: random.Random) -> None:
    """Three times: the next snapshot uses the memory of the one before."""
    mutator = Mutator(kind, rng.getrandbits(32), 100_000, 64)
    core, used = mutator.core, []
    for _ in range(3):
        reader = Reader(mutator)
        copied = core.metrics()["copied_entries"]
        for _ in range(200):
            mutator.write(50_000)
        held = core.metrics()
        assert held["copied_entries"] - copied <= len(mutator.state), "each entry at most once"
        reader.start()
        reader.join()
        assert reader.error is None
        assert reader.found == mutator.expected(reader.state)
        while core.advance(1 << 20):
            pass
        assert core.metrics()["snapshots"] == []
        used.append((held["run_bytes"], core.metrics()["run_bytes"]))
    print(kind, used)
    mutator.table._check()
    if kind != "list":  # which grows by itself
        assert used[2][0] <= 3 * used[2][1]
        assert used[2][1] <= 1.1 * used[1][1]
