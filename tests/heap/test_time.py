"""What time costs in the heap backend: a queue of timers that stays small, and cleanup that follows what expires."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from twin.cow_map import LAST_VERSION

from statebackend import types as t
from statebackend._core.core_probe import fail_allocation, set_state_version
from statebackend.backends.heap import HeapBackend
from statebackend.errors import MemoryLimitError
from statebackend.keys import VOID, TimeWindow
from statebackend.state import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

HOUR = 3_600_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keyed(clock: ManualClock) -> Iterator[Any]:
    with HeapBackend(threads=1).create_keyed_backend(int, max_parallelism=16, clock=clock) as keyed:
        yield keyed


def check(keyed: Any) -> None:
    """The invariants of all tables and queues."""
    for state in keyed._states.values():
        for table in state._tables():
            table._check()
    for handle in keyed.timers._handles().values():
        handle._check()
        for table in handle._tables():
            table._check()


def queued(keyed: Any) -> int:
    return sum(handle._queued()[0] for handle in keyed.timers._handles().values())


def outside_extents(keyed: Any) -> int:
    metrics = keyed.core.metrics()
    return int(metrics["used_bytes"] - metrics["extent_bytes"])


# --- timers ---


def test_a_rollback_looks_only_at_what_has_happened_since_its_mark(keyed: Any) -> None:
    oldest = keyed.mark()
    for key in range(1_000):
        keyed.set_current_key(key)
        keyed.timers.register_event_time_timer(key)
    assert len(list(keyed.timers.due(499))) == 500
    (handle,) = keyed.timers._handles().values()
    before = handle._queued()
    newest = keyed.mark()
    assert len(list(keyed.timers.due(599))) == 100
    assert handle._queued() == (400, before[1] + 100)
    keyed.rollback(newest)
    assert handle._queued() == before == (500, 1_500)
    keyed.rollback(oldest)
    assert handle._queued() == (0, 0)
    check(keyed)


@pytest.mark.parametrize("below", [None, 0, 1, 2])
def test_timers_fired_before_the_oldest_mark_are_forgotten(keyed: Any, below: int | None) -> None:
    """A job has a mark open at any time: that of its newest checkpoint. Versions may be counted anew meanwhile."""
    oldest = keyed.mark()
    most = 0
    for batch in range(60):
        if below is not None and batch % 5 == 2:
            set_state_version(keyed.core, LAST_VERSION - below)
        mark = keyed.mark()
        for key in range(100):
            keyed.set_current_key(key)
            keyed.timers.register_event_time_timer(batch)
            keyed.timers.register_event_time_timer(HOUR + batch)
        assert len(list(keyed.timers.due(batch))) == 100
        if batch % 7 == 3:
            keyed.rollback(mark)
            check(keyed)
            assert len(list(keyed.timers.due(batch))) == 0
        (handle,) = keyed.timers._handles().values()
        most = max(most, handle._queued()[1])
        keyed.release(oldest)
        oldest = mark
    assert below is None or keyed.core.metrics()["state_version"] < 100
    assert most <= 1_000
    keyed.rollback(oldest)
    check(keyed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keys", [1, 30])
def test_random_use_under_marks_keeps_the_queue_exact(keyed: Any, keys: int, seed: int) -> None:
    """The core renumbers its versions meanwhile, and the queue is rebuilt from the set of timers."""
    r = random.Random(seed)
    wanted: set[tuple[int, int, Any]] = set()
    marks: list[tuple[Any, set[tuple[int, int, Any]]]] = []
    snapshots: list[Any] = []

    def go_to(key: int, namespace: Any) -> None:
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)

    def due(until: int) -> list[tuple[int, int, Any]]:
        return [(at, keyed.current_key, keyed.current_namespace) for at in keyed.timers.due(until)]

    for number in range(2_500):
        key, time, action = r.randrange(keys), r.randrange(200), r.random()
        namespace = r.choice([VOID, VOID, TimeWindow(0, 5)])
        go_to(key, namespace)
        if action < 0.45:
            for _ in range(r.choice([1, 1, 2])):
                keyed.timers.register_event_time_timer(time)
            wanted.add((time, key, namespace))
        elif action < 0.75 and wanted:
            time, *place = r.choice(sorted(wanted, key=repr))
            go_to(*place)
            keyed.timers.delete_event_time_timer(time)
            wanted.discard((time, *place))
        elif action < 0.8:
            fired = due(time // 8)
            assert [each[:2] for each in fired] == sorted(each[:2] for each in fired)
            assert set(fired) == {each for each in wanted if each[0] <= time // 8}
            wanted -= set(fired)
        elif action < 0.87 and len(marks) < 6:
            marks.append((keyed.mark(), set(wanted)))
        elif action < 0.91 and marks:
            keyed.release(marks.pop(r.randrange(len(marks)))[0])
        elif action < 0.96 and marks:
            del marks[r.randrange(len(marks)) + 1 :]
            mark, was = marks[-1]
            keyed.rollback(mark)
            wanted = set(was)
            assert queued(keyed) == len(wanted)
        elif action < 0.97:
            for handle in keyed.timers._handles().values():
                handle._requeue()
        elif len(snapshots) < 2:
            snapshots.append(keyed.core.snapshot())
        elif snapshots:
            snapshots.pop(0).release()
        if number % 500 == 0:
            set_state_version(keyed.core, max(keyed.core.metrics()["state_version"], LAST_VERSION - 3))
        assert keyed.timers.count() == queued(keyed) == len(wanted)
        assert keyed.timers.next_due() == min(wanted, key=lambda each: each[0], default=(None,))[0]
        if number % 10 == 0:
            check(keyed)
    for snapshot in snapshots:
        snapshot.release()
    check(keyed)
    fired = due(10**6)
    assert [each[:2] for each in fired] == sorted(each[:2] for each in wanted)
    assert set(fired) == wanted


def test_memory_follows_the_timers_that_are_left(keyed: Any, rng: random.Random) -> None:
    n = 20_000
    for key in range(n):
        keyed.set_current_key(key % 50)
        keyed.timers.register_event_time_timer(key)
    full = outside_extents(keyed)
    for key in rng.sample(range(n), n - 20):
        keyed.set_current_key(key % 50)
        keyed.timers.delete_event_time_timer(key)
    assert queued(keyed) == 20
    assert full > 28 * n
    # The pages of the queue that are kept, and at most one page of tickets for each timer.
    assert outside_extents(keyed) < full - 28 * n + 3 * 24 * 1024 + 20 * 600
    check(keyed)


def test_timers_respect_the_memory_limit() -> None:
    with HeapBackend(max_bytes=3 << 20).create_keyed_backend(int, max_parallelism=4) as keyed:

        def fill() -> None:
            while True:
                keyed.set_current_key(keyed.timers.count())
                keyed.timers.register_event_time_timer(keyed.timers.count())

        with pytest.raises(MemoryLimitError, match=r"statebackend\.timers\.event"):
            fill()
        registered = keyed.timers.count()
        assert registered > 1_000
        check(keyed)
        assert list(keyed.timers.due(10**6)) == list(range(registered))


def succeeds(nth: int, call: Callable[[], Any]) -> bool:
    """Call while the n-th allocation fails; whether it did without."""
    fail_allocation(nth)
    try:
        call()
    except MemoryError:
        return False
    finally:
        fail_allocation(0)
    return True


def test_without_memory_a_timer_is_registered_or_not(keyed: Any) -> None:
    for domain in ("event", "processing"):
        register = getattr(keyed.timers, f"register_{domain}_time_timer")
        for key in range(3_000):
            keyed.set_current_key(key)
            before = keyed.timers.count(domain)
            if not succeeds(1 + key % 3, partial(register, key)):
                assert keyed.timers.count(domain) == before
                register(key)
            assert keyed.timers.count(domain) == before + 1
    check(keyed)
    assert len(list(keyed.timers.due(10_000))) == 3_000


@pytest.mark.parametrize("action", ["delete", "fire"])
def test_without_memory_a_timer_is_removed_or_not(keyed: Any, action: str) -> None:
    n = 3_000
    for key in range(n):
        keyed.set_current_key(key)
        keyed.timers.register_event_time_timer(key)
    mark = keyed.mark()

    def fire() -> None:
        next(keyed.timers.due(n))

    for key in range(n):
        before = keyed.timers.count()
        for nth in range(1, 4):
            keyed.set_current_key(key)
            remove = (
                (lambda key=key: keyed.timers.delete_event_time_timer(key)) if action == "delete" else fire
            )
            if succeeds(nth, remove):
                break
            assert keyed.timers.count() == before
        else:
            keyed.set_current_key(key)
            keyed.timers.delete_event_time_timer(key)
        assert keyed.timers.count() == before - 1
        if key % 500 == 0:
            check(keyed)
    keyed.rollback(mark)
    check(keyed)
    assert list(keyed.timers.due(n)) == list(range(n))


def test_a_rollback_that_lacks_memory_midway_can_be_repeated(keyed: Any) -> None:
    for key in range(400):
        keyed.set_current_key(key)
        keyed.timers.register_event_time_timer(key)
    mark = keyed.core.mark()
    for key in range(0, 400, 2):
        keyed.set_current_key(key)
        keyed.timers.delete_event_time_timer(key)
        keyed.timers.register_event_time_timer(1_000 + key)
    view = keyed.core.snapshot()
    failed = 0
    for nth in range(1, 40):
        failed += not succeeds(nth, lambda: keyed.core.rollback(mark))
        keyed.timers.next_due()
        keyed.set_current_key(1)
        keyed.timers.register_event_time_timer(7)
        keyed.timers.delete_event_time_timer(7)
    keyed.core.rollback(mark)
    check(keyed)
    view.release()
    assert list(keyed.timers.due(10_000)) == list(range(400))
    assert failed


# --- cleanup ---


def expiring(descriptor: Any, **options: Any) -> Any:
    return descriptor.enable_time_to_live(StateTtlConfig(HOUR, **options))


def descriptors(**options: Any) -> list[Any]:
    return [
        expiring(ValueStateDescriptor("value", int), **options),
        expiring(ValueStateDescriptor("text", str), **options),
        expiring(ValueStateDescriptor("object", t.PICKLE), **options),
        expiring(ListStateDescriptor("list", int), **options),
        expiring(MapStateDescriptor("map", str, str), **options),
    ]


def write(state: Any, now: int) -> None:
    kind = state.descriptor.kind
    if kind == "map":
        state.put("a", "x" * 50)
        state.put("b", "y")
    elif kind == "list":
        state.add(now)
    else:
        state.update({"value": now, "text": "x" * 100, "object": (now,)}[state.descriptor.name])


def looks(state: Any) -> int:
    return sum(index.looks for index in (state.plain_index, state.spaced_index) if index is not None)


@pytest.mark.parametrize("descriptor", descriptors(cleanup_idle=True), ids=lambda d: d.name)
def test_idle_cleanup_looks_where_something_expires(keyed: Any, clock: ManualClock, descriptor: Any) -> None:
    state = keyed.get_state(descriptor)
    n = 20_000
    for key in range(n):
        clock.set(key)
        keyed.set_current_key(key)
        write(state, key)
    assert keyed.advance() == 0
    begun = looks(state)
    assert begun > n // 64, "the first time everything is looked at"
    clock.set(HOUR - 1)
    assert keyed.advance() == 0
    assert looks(state) == begun, "nothing can have expired yet"
    removed = 0
    for now in range(300):
        clock.set(HOUR + now)
        keyed.set_current_key(n)
        removed += keyed.advance()
    # A stretch is looked at when something in it expires, and once more for what it holds then.
    assert looks(state) - begun <= 2 * removed
    check(keyed)
    assert keyed.num_entries() == n - 300


@pytest.mark.parametrize(
    "descriptor", descriptors(cleanup_idle=True, cleanup_in_background=False), ids=lambda d: d.name
)
def test_idle_cleanup_misses_nothing_while_maps_grow_and_snapshots_live(
    keyed: Any, clock: ManualClock, descriptor: Any, rng: random.Random
) -> None:
    state = keyed.get_state(descriptor)
    written: dict[tuple[int, Any], int] = {}
    snapshots: list[Any] = []
    for step in range(400):
        clock.advance(rng.randrange(HOUR // 20))
        now = clock.now()
        for _ in range(rng.randrange(60)):
            key, namespace = rng.randrange(3_000), rng.choice([VOID, VOID, "n"])
            keyed.set_current_key(key)
            keyed.set_current_namespace(namespace)
            state.clear()
            write(state, now)
            written[key, namespace] = now
        keyed.set_current_namespace(VOID)
        if rng.random() < 0.2:
            snapshots.append(keyed.core.snapshot())
        if snapshots and rng.random() < 0.2:
            snapshots.pop(rng.randrange(len(snapshots))).release()
        if rng.random() < 0.1:
            mark = keyed.mark()
            clock.advance(HOUR // 2)
            keyed.advance(10**9)
            keyed.rollback(mark)
            keyed.release(mark)
            clock.set(now)
        while keyed.advance(rng.choice([3, 1_000])):
            pass
        written = {at: then for at, then in written.items() if then + HOUR > now}
        assert keyed.num_entries() == len(written), f"step {step}"
    for snapshot in snapshots:
        snapshot.release()
    check(keyed)


@pytest.mark.parametrize("descriptor", descriptors(cleanup_idle=True), ids=lambda d: d.name)
def test_accesses_find_all_that_has_expired_whatever_happened_before(
    keyed: Any, clock: ManualClock, descriptor: Any, day_rng: random.Random
) -> None:
    """The walk rests while nothing can have expired, and is not deceived by what brings old timestamps back."""
    rng = day_rng
    state = keyed.get_state(descriptor)
    snapshots: list[Any] = []
    mark = None

    def visit(keys: Any) -> None:
        for key in keys:
            keyed.set_current_key(key)
            if rng.random() < 0.2:
                state.clear()
            else:
                write(state, clock.now())

    for step in range(60):
        keyed.set_current_namespace(rng.choice([VOID, VOID, "n"]))
        for _ in range(rng.randrange(12)):
            what = rng.randrange(8)
            if what < 3:
                visit(rng.randrange(200) for _ in range(rng.randrange(200)))
            elif what == 3:
                clock.set(max(0, clock.now() + rng.randrange(-HOUR // 2, HOUR)))
            elif what == 4:
                snapshots.append(keyed.core.snapshot())
            elif what == 5 and snapshots:
                snapshots.pop(rng.randrange(len(snapshots))).release()
            elif what == 6:
                if mark is not None and rng.random() < 0.5:
                    keyed.rollback(mark)
                if mark is not None:
                    keyed.release(mark)
                mark = keyed.mark()
            elif what == 7 and descriptor.kind == "list":
                keyed.set_current_key(rng.randrange(200))
                keyed.merge_namespaces(descriptor, VOID, ["n"])
        clock.advance(rng.randrange(HOUR))
        # Rounds enough: entries may lie where one has been, and snapshots leave many slots to go over.
        keyed.set_current_key(1_000)
        for _ in range(20_000):
            state.clear()
        kept = keyed.num_entries()
        keyed.advance(10**9)
        assert keyed.num_entries() == kept, f"step {step}: the index finds more than the walk"
    for snapshot in snapshots:
        snapshot.release()
    check(keyed)


class Walked:
    """A list state of one map, for keys from 0 to 49: calls for some of them at a time."""

    def __init__(self, keyed: Any, clock: ManualClock) -> None:
        self.keyed, self.clock = keyed, clock
        self.descriptor = expiring(ListStateDescriptor("list", int))
        self.state = keyed.get_list_state(self.descriptor)

    def at(self, now: int, call: Any, *arguments: Any, keys: Any = range(50)) -> None:
        self.clock.set(now)
        for key in keys:
            self.keyed.set_current_key(key)
            call(*arguments)

    def rest(self, now: int) -> int:
        """Accesses for two rounds over everything; the number of entries that they leave."""
        self.at(now, self.state.clear, keys=[1_000] * 50)
        return self.keyed.num_entries()


@pytest.fixture
def walked(clock: ManualClock) -> Iterator[Walked]:
    with HeapBackend(threads=1).create_keyed_backend(int, max_parallelism=1, clock=clock) as keyed:
        yield Walked(keyed, clock)


def test_accesses_find_what_a_merge_moves_to_where_they_have_been(walked: Walked) -> None:
    state, keyed = walked.state, walked.keyed
    walked.at(0, state.add, 1)
    walked.at(0, state.clear, keys=[0])
    keyed.set_current_namespace("n")
    walked.at(0, state.add, 1, keys=[0])
    keyed.set_current_namespace(VOID)
    walked.at(10, state.update, [2], keys=range(1, 50))
    # A clock that goes back restarts the walk, which has passed a few entries since.
    walked.at(9, state.clear, keys=[1_000])
    walked.rest(10)
    walked.at(9, state.clear, keys=[1_000])
    walked.at(10, state.clear, keys=[1_000] * 2)
    walked.at(10, keyed.merge_namespaces, walked.descriptor, VOID, ["n"], keys=[0])
    assert walked.rest(10) == 50
    assert walked.rest(HOUR) == 49


def test_cleanup_passes_a_long_list_as_fast_as_a_short_one(clock: ManualClock) -> None:
    with HeapBackend().create_keyed_backend(int, max_parallelism=1, clock=clock) as keyed:
        state = keyed.get_list_state(expiring(ListStateDescriptor("list", int)))
        for key, length in ((1, 10_000), (2, 1)):
            clock.set(HOUR if key == 1 else 0)
            keyed.set_current_key(key)
            state.add_all([0] * length)
        clock.set(HOUR)
        keyed.set_current_key(3)
        accesses = 0
        while keyed.num_entries() == 2:
            state.clear()
            accesses += 1
        assert accesses <= 3


class Calls:
    """Counts the objects of it that live."""

    alive = 0

    def __init__(self) -> None:
        Calls.alive += 1

    def __reduce__(self) -> Any:
        return Calls, ()

    def __del__(self) -> None:
        Calls.alive -= 1


@pytest.mark.parametrize("cleanup_idle", [False, True])
@pytest.mark.parametrize("kind", ["value", "list", "map"])
@pytest.mark.parametrize("check_mutations", [False, True])
def test_objects_that_expire_are_let_go(cleanup_idle: bool, kind: str, check_mutations: bool) -> None:
    clock = ManualClock()
    Calls.alive = 0
    backend = HeapBackend(check_mutations=check_mutations)
    with backend.create_keyed_backend(int, max_parallelism=2, clock=clock) as keyed:
        made, store = {
            "value": (ValueStateDescriptor("s", t.PICKLE), lambda: state.update(Calls())),
            "list": (ListStateDescriptor("s", t.PICKLE), lambda: state.add(Calls())),
            "map": (MapStateDescriptor("s", int, t.PICKLE), lambda: state.put(1, Calls())),
        }[kind]
        state = keyed.get_state(expiring(made, cleanup_idle=cleanup_idle))
        for key in range(50):
            keyed.set_current_key(key)
            store()
        assert Calls.alive >= 50
        clock.set(HOUR)
        keyed.set_current_key(99)
        if cleanup_idle:
            assert keyed.advance() == 50
        else:
            for _ in range(40):
                state.clear()
        assert keyed.num_entries() == 0
        keyed.mark()
        check(keyed)
    assert Calls.alive == 0
