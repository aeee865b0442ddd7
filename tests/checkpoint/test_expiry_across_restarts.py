"""What becomes of a time to live when state goes through a checkpoint or a savepoint.

Every kind of state goes through both forms, from and into every backend, and comes back with another duration, with a
time to live that it did not have, or without the one it had. And full snapshots leave out what has expired.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.state.ttl import MAX_TIMESTAMP
from statebackend.testing import ManualClock

pytestmark = pytest.mark.usefixtures("no_fsync")

TTL = 100

#: How a state is made; each holds one number for a key, written by `write`, read by `read`.
KINDS: dict[str, Callable[[], Any]] = {
    "value": lambda: sb.ValueStateDescriptor("s", int),
    "list": lambda: sb.ListStateDescriptor("s", int),
    "map": lambda: sb.MapStateDescriptor("s", str, int),
    "reducing": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    "aggregating": lambda: sb.AggregatingStateDescriptor("s", "max", int),
    "folding": lambda: sb.FoldingStateDescriptor("s", 0, lambda old, new: old + new, int),
}
FORMS = ["checkpoint", "deltas", "savepoint"]

everywhere = pytest.mark.parametrize("kind", list(KINDS))
each_way = pytest.mark.parametrize(("backend", "other"), list(itertools.pairwise([*BACKENDS, BACKENDS[0]])))
each_form = pytest.mark.parametrize("form", FORMS)


def write(state: Any, value: int) -> None:
    kind = state.descriptor.kind
    if kind == "map":
        state.put("k", value)
    elif kind == "value":
        state.update(value)
    else:
        state.add(value)


def read(state: Any) -> int | None:
    kind = state.descriptor.kind
    if kind == "map":
        return state.get("k")
    if kind == "list":
        found = state.get()
        return found[0] if found else None
    return state.value() if kind == "value" else state.get()


def declared(kind: str, ttl: Any = None, **options: Any) -> Any:
    descriptor = KINDS[kind]()
    return descriptor if ttl is None else descriptor.enable_time_to_live(sb.StateTtlConfig(ttl, **options))


class Story:
    """A state that is written at 0 and 50 and stored at 60, to be restored at other times."""

    def __init__(self, folder: Path, backend: str, kind: str, form: str, ttl: int | None) -> None:
        self.clock = ManualClock(0)
        self.kind = kind
        self.store = sb.CheckpointStore(folder / "store").open_for_writing(key_type=int, max_parallelism=8)
        self.stored: Any
        with self.create(backend) as keyed:
            state = keyed.get_state(declared(kind, ttl))
            for key, namespace in ((1, "a"), (2, "b"), (3, sb.VOID), (4, sb.VOID)):
                # Most is written first: what comes later is a delta then.
                self.write(keyed, state, 0, key, namespace)
            for key in range(100, 120):
                self.write(keyed, state, 0, key, sb.VOID)
            if form == "deltas":
                self.store.commit(0, [keyed.snapshot(0, self.store).result()], now=0)
            for key, namespace in ((5, "a"), (6, sb.VOID)):
                self.write(keyed, state, 50, key, namespace)
            self.clock.set(60)
            if form == "savepoint":
                self.stored = keyed.savepoint(str(folder / "savepoint"))
            else:
                taken = keyed.snapshot(1, self.store).result()
                kinds = [file.kind for file in taken.files]
                assert kinds == (["base", "delta"] if form == "deltas" else ["base"])
                self.stored = self.store.commit(1, [taken], now=60)

    def create(self, backend: str, **options: Any) -> Any:
        factory = sb.create_backend(backend)
        return factory.create_keyed_backend(int, max_parallelism=8, clock=self.clock, **options)

    def write(self, keyed: Any, state: Any, now: int, key: int, namespace: Any) -> None:
        self.clock.set(now)
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        write(state, key)

    def seen(self, keyed: Any, state: Any, now: int) -> set[int]:
        self.clock.set(now)
        keys = set()
        for key, namespace in ((1, "a"), (2, "b"), (3, sb.VOID), (4, sb.VOID), (5, "a"), (6, sb.VOID)):
            keyed.set_current_key(key)
            keyed.set_current_namespace(namespace)
            found = read(state)
            assert found in (None, key)
            if found is not None:
                keys.add(key)
        return keys

    def again(self, keyed: Any, number: int) -> Any:
        taken = keyed.snapshot(number, self.store).result()
        return self.store.commit(number, [taken], now=self.clock.now())


OLD, NEW = {1, 2, 3, 4}, {5, 6}


@pytest.mark.sampled(9)
@everywhere
@each_way
@each_form
@pytest.mark.parametrize("legacy", [None, 20, -5])
def test_turning_it_on_stamps_what_was_there(
    tmp_path: Path, backend: str, other: str, kind: str, form: str, legacy: int | None
) -> None:
    story = Story(tmp_path, backend, kind, form, None)
    stamp = 70 if legacy is None else legacy
    for number, restored in enumerate((backend, other), start=2):
        for now in (stamp + TTL - 1, stamp + TTL):
            story.clock.set(70)
            with story.create(restored, restore=story.stored) as keyed:
                state = keyed.get_state(declared(kind, TTL, legacy_timestamp=legacy))
                assert story.seen(keyed, state, now) == (OLD | NEW if now < stamp + TTL else set())
        # A later restart neither renews the stamps nor reads the old files.
        story.clock.set(70)
        with story.create(restored, restore=story.stored) as keyed:
            keyed.get_state(declared(kind, TTL, legacy_timestamp=legacy))
            story.clock.set(75)
            stamped = story.again(keyed, number)
            assert [file.kind for file in stamped.snapshots[0].files] == ["base"]
        for now in (stamp + TTL - 1, stamp + TTL):
            story.clock.set(80)
            with story.create(restored, restore=stamped) as keyed:
                state = keyed.get_state(declared(kind, TTL))
                assert story.seen(keyed, state, now) == (OLD | NEW if now < stamp + TTL else set())


@pytest.mark.sampled(6)
@everywhere
@each_way
@each_form
def test_turning_it_off_keeps_all(tmp_path: Path, backend: str, other: str, kind: str, form: str) -> None:
    story = Story(tmp_path, backend, kind, form, TTL)
    for number, restored in enumerate((backend, other), start=2):
        story.clock.set(120)
        with story.create(restored, restore=story.stored) as keyed:
            state = keyed.get_state(declared(kind))
            assert story.seen(keyed, state, 120) == OLD | NEW, "what had expired too"
            assert story.seen(keyed, state, 10**9) == OLD | NEW
            later = story.again(keyed, number)
        with story.create(restored, restore=later) as keyed:
            assert story.seen(keyed, keyed.get_state(declared(kind)), 10**9) == OLD | NEW


def filled(keyed: Any, clock: ManualClock, kind: str, rng: random.Random, **options: Any) -> dict[Any, Any]:
    """A state with parts of many ages, out of order where the clock allows it; gives their stamps, by place."""
    state = keyed.get_state(declared(kind, TTL, cleanup_in_background=False, **options))
    stamps: dict[Any, Any] = {}
    for _ in range(150):
        key, namespace, now = rng.randrange(40), rng.choice([sb.VOID, "n"]), rng.randrange(100)
        clock.set(now)
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        if kind == "list":
            state.add(now)
            stamps.setdefault((key, namespace), []).append(now)
        elif kind == "map":
            state.put(str(now), now)
            stamps[key, namespace, now] = now
        else:
            write(state, 0)
            stamps[key, namespace] = now
    return stamps


def stored_stamps(uri: Path) -> list[Any]:
    """The timestamps that are stored, those of a list together, in an order of their own."""
    return sorted(sb.tools.state(uri, "s", expired=True).to_table()["timestamp"].to_pylist())


def left_of(stamps: dict[Any, Any], kind: str, now: int) -> tuple[list[Any], int]:
    """What `stored_stamps` has to give, and how many are left out."""
    if kind == "list":
        parts = [[each for each in part if each + TTL > now] for part in stamps.values()]
        return sorted(filter(None, parts)), sum(map(len, stamps.values())) - sum(map(len, parts))
    left = sorted(each for each in stamps.values() if each + TTL > now)
    return left, len(stamps) - len(left)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("backend", BACKENDS)
@everywhere
def test_full_snapshots_omit_the_expired(tmp_path: Path, backend: str, kind: str, rng: random.Random) -> None:
    clock = ManualClock(0)
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=8)
    factory = sb.create_backend(backend)
    with factory.create_keyed_backend(int, max_parallelism=8, clock=clock) as keyed, store:
        stamps = filled(keyed, clock, kind, rng, cleanup_full_snapshot=True)
        # A state whose options say nothing of full snapshots keeps what has expired.
        ttl = sb.StateTtlConfig(TTL, cleanup_in_background=False)
        other = keyed.get_state(sb.ValueStateDescriptor("other", int).enable_time_to_live(ttl))
        other.update_many(range(10), range(10))
        everything, _ = left_of(stamps, kind, 0)
        counted = 0

        def full(number: int) -> None:
            nonlocal counted
            pending = keyed.snapshot(number, store, incremental=False)
            store.commit(number, [pending.result()], now=clock.now())

        # Nothing is known to be committed yet.
        clock.set(150)
        full(0)
        assert stored_stamps(tmp_path / "store") == everything
        assert keyed.metrics()["states"]["s"]["expired_in_snapshots"] == 0

        # By the time of the last commit, not by that of now.
        for number, (now, before) in enumerate([(170, 150), (1_000, 170)], start=1):
            clock.set(now)
            full(number)
            expected, left_out = left_of(stamps, kind, before)
            assert left_out
            assert stored_stamps(tmp_path / "store") == expected
            assert sb.tools.state(tmp_path / "store", "other", expired=True).to_table().num_rows == 10
            counted += left_out
            assert keyed.metrics()["states"]["s"]["expired_in_snapshots"] == counted

            # A savepoint too.
            clock.set(2_000)
            savepoint = tmp_path / f"savepoint {number}"
            keyed.savepoint(str(savepoint))
            expected, left_out = left_of(stamps, kind, now)
            folder = savepoint / "keyed" / "s"
            found = pq.read_table(folder)["timestamp"].to_pylist() if folder.exists() else []
            assert sorted(found) == expected
            counted += left_out
            assert keyed.metrics()["states"]["s"]["expired_in_snapshots"] == counted

        # What is in memory is as it was.
        clock.set(0)
        keyed.set_current_key(1_000)
        assert keyed.num_entries("s") == len({place[:2] for place in stamps})
        assert keyed.metrics()["states"]["s"]["expired_on_read"] == 0
        assert keyed.metrics()["states"]["s"]["expired_by_cleanup"] == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@everywhere
def test_deltas_leave_nothing_out(tmp_path: Path, backend: str, kind: str) -> None:
    clock = ManualClock(0)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=8)
    with sb.create_backend(backend).create_keyed_backend(int, max_parallelism=8, clock=clock) as keyed, store:
        state = keyed.get_state(declared(kind, TTL, cleanup_full_snapshot=True, cleanup_in_background=False))
        clock.set(2_000)
        for key in range(20):
            keyed.set_current_key(key)
            write(state, key)
        store.commit(0, [keyed.snapshot(0, store).result()], now=2_000)
        clock.set(500)
        keyed.set_current_key(99)
        write(state, 99)
        taken = keyed.snapshot(1, store).result()
        assert [file.kind for file in taken.files] == ["base", "delta"]
        store.commit(1, [taken], now=2_000)
        rows = sb.tools.state(tmp_path, "s", expired=True).to_table()
        assert 99 in rows["key"].to_pylist()
        assert keyed.metrics()["states"]["s"]["expired_in_snapshots"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("form", ["checkpoint", "savepoint"])
def test_a_restart_knows_the_last_commit(tmp_path: Path, backend: str, parallelism: int, form: str) -> None:
    """Also with another parallelism, and after types had to be migrated, where the next file is a base."""
    story = Story(tmp_path, backend, "value", form, TTL)
    story.clock.set(130)
    with story.create(backend, restore=story.stored) as keyed:
        keyed.get_state(declared("value", TTL))
        if form == "checkpoint":
            stored: Any = story.again(keyed, 2)
        else:
            keyed.advance()
            stored = keyed.savepoint(str(tmp_path / "later"))
    story.clock.set(1_000)
    taken, left_out = [], 0
    for index in range(parallelism):
        own = sb.key_groups.range_for(8, parallelism, index)
        with story.create(backend, key_group_range=own, restore=stored) as keyed:
            keyed.get_state(declared("value", TTL, cleanup_full_snapshot=True))
            taken.append(keyed.snapshot(3, story.store, incremental=False).result())
            left_out += keyed.metrics()["states"]["s"]["expired_in_snapshots"]
    story.store.commit(3, taken, now=1_000)
    assert sorted(
        sb.tools.state(tmp_path / "store", "s", expired=True).to_table()["key"].to_pylist()
    ) == sorted(NEW)
    assert left_out == 24


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_counted_that_was_not_written(tmp_path: Path, backend: str) -> None:
    story = Story(tmp_path, backend, "value", "checkpoint", TTL)
    story.clock.set(1_000)
    with story.create(backend, restore=story.store.open(1)) as keyed:
        keyed.get_state(declared("value", 10, cleanup_full_snapshot=True))
        keyed.snapshot(2, story.store, incremental=False).abort()
        pending = keyed.snapshot(3, story.store, incremental=False)
        pending.result()
        once = keyed.metrics()["states"]["s"]["expired_in_snapshots"]
        assert 26 <= once <= 52, "an abort may come after the writing"
        assert once % 26 == 0


@pytest.mark.parametrize(
    ("backend", "ttl", "now", "left"),
    [
        ("reference", MAX_TIMESTAMP, -5, [-10, 5]),
        ("rocksdb", MAX_TIMESTAMP, 10**18 - 1, [-10, 5]),
        ("heap", 10**18 - 6, 10**18 - 2, [5]),
        ("rocksdb", 10**18 - 6, 10**18 - 2, [5]),
        ("heap", 10**18 - 6, 10**18 - 1, []),
    ],
)
def test_snapshots_at_ends_of_time(tmp_path: Path, backend: str, ttl: int, now: int, left: list[int]) -> None:
    clock = ManualClock(-10)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=8)
    with sb.create_backend(backend).create_keyed_backend(int, max_parallelism=8, clock=clock) as keyed, store:
        for made in (sb.ValueStateDescriptor("value", int), sb.ListStateDescriptor("list", int)):
            config = sb.StateTtlConfig(ttl, cleanup_full_snapshot=True)
            state = keyed.get_state(made.enable_time_to_live(config))
            for stamp in (-10, 5):
                clock.set(stamp)
                keyed.set_current_key(stamp)
                write(state, stamp)
        clock.set(now)
        for number in range(2):
            store.commit(number, [keyed.snapshot(number, store, incremental=False).result()], now=now)
        for name in ("value", "list"):
            assert sorted(sb.tools.state(tmp_path, name, expired=True).to_table()["key"].to_pylist()) == left
