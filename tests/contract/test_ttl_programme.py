"""Time to live as a programme of steps, for every kind of state, update type, visibility and cleanup.

The idea is that of the tests of Flink's TTL states: a few writes and reads at chosen milliseconds, with what each has
to give, run in every combination of the options. A small model says what that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import MakeKeyed
from contract.ttl_samples import (
    CLEANUPS,
    KINDS,
    TTL,
    Never,
    OnRead,
    OnWrite,
    Show,
    combinations,
    incremental,
    make_state,
)

from statebackend.checkpoint import CheckpointStore
from statebackend.keys import VOID
from statebackend.state import KeyedStateBackend, ListStateDescriptor, MapStateDescriptor, StateBackend
from statebackend.state.ttl import MAX_TIMESTAMP, StateTtlConfig
from statebackend.testing import ManualClock
from statebackend.types import LONG

pytestmark = [pytest.mark.checked, pytest.mark.usefixtures("no_fsync")]


def run_steps(
    keyed: KeyedStateBackend,
    clock: ManualClock,
    kind: str,
    options: dict[str, Any],
    restart: Callable[[KeyedStateBackend], KeyedStateBackend] | None = None,
) -> None:
    """The programme; between every two steps ``restart``."""
    update, visibility = options["update_type"], options["state_visibility"]
    cleans_up = not {"cleanup_in_background"} & set(options)
    state = make_state(keyed, kind, **options)
    write, read = KINDS[kind].write, KINDS[kind].read
    value: dict[tuple[int, Any], tuple[str, int]] = {}
    steps = [
        # key, namespace, time, what is written or None to read
        (1, VOID, 0, "a"),
        (2, VOID, 0, "b"),
        (1, "n", 10, "c"),
        (1, VOID, 50, None),
        (1, VOID, 99, None),
        (2, VOID, 100, None),
        (1, VOID, 100, None),
        (1, VOID, 100, None),
        (1, "n", 109, None),
        (1, "n", 110, None),
        (1, VOID, 120, "d"),
        (1, VOID, 130, "e"),
        (2, VOID, 198, None),
        (1, VOID, 229, None),
        (1, VOID, 230, None),
        (1, "n", 300, "f"),
        (1, "n", 399, None),
        (1, "n", 500, None),
    ]
    for key, namespace, now, written in steps:
        if restart is not None:
            keyed = restart(keyed)
            state = make_state(keyed, kind, **options)
        clock.set(now)
        keyed.set_current_key(key)
        keyed.set_current_namespace(namespace)
        at = key, namespace
        if written is not None:
            write(state, written)
            value[at] = written, now
            continue
        stored, stamp = value.get(at, (None, 0))
        alive = stored is not None and now < stamp + TTL
        assert state.exists() in ({alive} if visibility is Never else {alive, stored is not None})
        found = read(state)
        if alive:
            assert found == stored
            if update is OnRead:
                value[at] = stored, now
            assert state.exists()
            continue
        # What has expired may be seen, until it is cleaned up: by the read itself at the latest.
        allowed = {None} if visibility is Never else {None, stored} if cleans_up or restart else {stored}
        assert found in allowed
        value.pop(at, None)
        assert read(state) is None
        assert not state.exists()


@combinations
def test_steps(
    make_keyed: MakeKeyed, clock: ManualClock, kind: str, update: Any, visibility: Any, cleanup: str
) -> None:
    options = {"update_type": update, "state_visibility": visibility, **CLEANUPS[cleanup]}
    run_steps(make_keyed(max_parallelism=4), clock, kind, options)


@pytest.mark.parametrize("visibility", [Never, Show], ids=lambda each: each.name)
@pytest.mark.parametrize("update", [OnWrite, OnRead], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", list(KINDS))
def test_steps_with_a_restart_between_every_two(
    make_keyed: MakeKeyed,
    clock: ManualClock,
    tmp_path: Path,
    kind: str,
    update: Any,
    visibility: Any,
) -> None:
    options = {"update_type": update, "state_visibility": visibility, "cleanup_idle": True}
    ids = itertools.count()
    with CheckpointStore(tmp_path) as store:
        store.open_for_writing(key_type=LONG, max_parallelism=4)

        def restart(keyed: KeyedStateBackend) -> KeyedStateBackend:
            number = next(ids)
            snapshot = keyed.snapshot(number, store, incremental=number % 3 != 0).result()
            checkpoint = store.commit(number, [snapshot], now=clock.now())
            keyed.close()
            return make_keyed(max_parallelism=4, restore=checkpoint)

        run_steps(make_keyed(max_parallelism=4), clock, kind, options, restart)


@combinations
def test_what_is_left_after_cleanup(
    make_keyed: MakeKeyed,
    clock: ManualClock,
    backend: StateBackend,
    kind: str,
    update: Any,
    visibility: Any,
    cleanup: str,
) -> None:
    is_incremental = incremental(cleanup) and backend.cleans_up_incrementally
    keyed = make_keyed(max_parallelism=4)
    state = make_state(keyed, kind, update_type=update, state_visibility=visibility, **CLEANUPS[cleanup])
    for key in range(60):
        clock.set(key)
        keyed.set_current_key(key)
        keyed.set_current_namespace("n" if key % 3 else VOID)
        KINDS[kind].write(state, str(key))
    keyed.set_current_namespace(VOID)
    clock.set(TTL + 29)
    keyed.set_current_key(1_000)
    at_once = 30 if cleanup == "often" and is_incremental else 60
    assert keyed.num_entries("s") == at_once, "a record does, or only an access"
    removed = keyed.advance(budget=10_000)
    for _ in range(200):
        assert KINDS[kind].read(state) is None
    left = set(range(30, 60))
    if cleanup == "idle":
        assert removed == 30
    else:
        assert removed == 0
    assert keyed.num_entries("s") == (30 if is_incremental or cleanup == "idle" else 60)
    figures = keyed.metrics()["states"]["s"]
    assert figures["expired_by_cleanup"] == 60 - keyed.num_entries("s")
    assert figures["expired_on_read"] == 0
    if is_incremental:
        assert figures["oldest_timestamp"] == 30
    clock.set(TTL + 29)
    keyed.set_current_namespace("n")
    for key in range(60):
        keyed.set_current_key(key)
        if key % 3:
            found = KINDS[kind].read(state)
            wanted = str(key) if key in left else None
            assert found == wanted or (visibility is Show and found == str(key))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("now", [-5, 0, 2**40])
def test_the_boundary_is_exact_to_the_millisecond(
    make_keyed: MakeKeyed, clock: ManualClock, kind: str, now: int
) -> None:
    keyed = make_keyed()
    state = make_state(keyed, kind)
    for offset, alive in ((TTL - 1, True), (TTL, False), (TTL + 1, False)):
        clock.set(now)
        keyed.set_current_key(offset)
        KINDS[kind].write(state, "x")
        clock.set(now + offset)
        keyed.set_current_key(offset)
        assert KINDS[kind].read(state) == ("x" if alive else None)


@pytest.mark.parametrize("kind", list(KINDS))
def test_times_do_not_overflow(make_keyed: MakeKeyed, clock: ManualClock, kind: str) -> None:
    keyed = make_keyed()
    descriptor = KINDS[kind].make().enable_time_to_live(StateTtlConfig(MAX_TIMESTAMP, cleanup_idle=True))
    state = keyed.get_state(descriptor)
    clock.set(1_000)
    keyed.set_current_key(1)
    KINDS[kind].write(state, "x")
    clock.set(MAX_TIMESTAMP - 1)
    keyed.set_current_key(1)
    assert keyed.advance() == 0
    assert KINDS[kind].read(state) == "x"
    clock.set(MAX_TIMESTAMP)
    keyed.set_current_key(2)
    assert keyed.advance() == 1
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("cleanup", ["often", "idle"])
def test_rollback_returns_what_cleanup_has_removed(
    make_keyed: MakeKeyed, clock: ManualClock, backend: StateBackend, kind: str, cleanup: str
) -> None:
    if incremental(cleanup) and not backend.cleans_up_incrementally:
        pytest.skip("the backend defines incremental cleanup as without effect")
    keyed = make_keyed(max_parallelism=4)
    state = make_state(keyed, kind, **CLEANUPS[cleanup])
    for key in range(50):
        clock.set(key)
        keyed.set_current_key(key)
        KINDS[kind].write(state, str(key))
    for _ in range(3):
        mark = keyed.mark()
        clock.set(TTL + 24)
        keyed.set_current_key(99)
        keyed.advance()
        KINDS[kind].read(state)
        assert keyed.num_entries() == 25
        keyed.rollback(mark)
        keyed.release(mark)
        assert keyed.num_entries() == 50
        clock.set(40)
        for key in range(50):
            keyed.set_current_key(key)
            assert KINDS[kind].read(state) == str(key)
    clock.set(TTL + 10)
    keyed.set_current_key(99)
    keyed.advance()
    KINDS[kind].read(state)
    assert keyed.num_entries() == 39


@pytest.mark.parametrize("kind", list(KINDS))
def test_idle_cleanup_finds_again_what_a_rollback_has_brought_back(
    make_keyed: MakeKeyed, clock: ManualClock, kind: str
) -> None:
    keyed = make_keyed(max_parallelism=4)
    state = make_state(keyed, kind, **CLEANUPS["idle"])
    for key in range(50):
        clock.set(key)
        keyed.set_current_key(key)
        KINDS[kind].write(state, str(key))
    clock.set(TTL + 24)
    for _ in range(2):
        mark = keyed.mark()
        keyed.set_current_key(99)
        assert keyed.advance() == 25
        keyed.rollback(mark)
        keyed.release(mark)
    assert keyed.advance() == 25
    assert keyed.advance() == 0
    assert keyed.num_entries() == 25


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_clock_that_is_set_back_hides_nothing_from_idle_cleanup(
    make_keyed: MakeKeyed, clock: ManualClock, kind: str
) -> None:
    keyed = make_keyed(max_parallelism=4)
    state = make_state(keyed, kind, **CLEANUPS["idle"])
    clock.set(10_000)
    keyed.set_current_key(1)
    KINDS[kind].write(state, "x")
    assert keyed.advance() == 0
    clock.set(0)
    keyed.set_current_key(2)
    KINDS[kind].write(state, "y")
    clock.set(10_001)
    keyed.set_current_key(3)
    assert keyed.advance() == 1
    assert list(keyed.keys("s")) == [1]


def test_lists_and_maps_expire_in_parts_in_the_background(
    make_keyed: MakeKeyed, clock: ManualClock, backend: StateBackend
) -> None:
    for cleanup in ("often", "idle") if backend.cleans_up_incrementally else ("idle",):
        keyed = make_keyed(max_parallelism=4)
        config = StateTtlConfig(TTL, **CLEANUPS[cleanup])
        names = keyed.get_list_state(ListStateDescriptor("list", str).enable_time_to_live(config))
        counts = keyed.get_map_state(MapStateDescriptor("map", str, int).enable_time_to_live(config))
        for now in (0, 50):
            for key in range(20):
                clock.set(now)
                keyed.set_current_key(key)
                names.add_all([f"a{now}", f"b{now}"])
                counts.put_all({f"a{now}": 1, f"b{now}": 2})
        clock.set(TTL)
        keyed.set_current_key(99)
        removed = keyed.advance()
        names.get(), counts.get("x")
        assert removed == (20 + 40 if cleanup == "idle" else 0)
        assert keyed.metrics()["states"]["list"]["expired_by_cleanup"] == 20
        assert keyed.metrics()["states"]["map"]["expired_by_cleanup"] == 40
        assert keyed.num_entries() == 40
        for key in range(20):
            keyed.set_current_key(key)
            assert names.get() == ["a50", "b50"]
            assert dict(counts.items()) == {"a50": 1, "b50": 2}


def test_cleanup_does_not_disturb_iterators(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    keyed = make_keyed(max_parallelism=2)
    config = StateTtlConfig(TTL, **CLEANUPS["often"])
    names = keyed.get_list_state(ListStateDescriptor("list", int).enable_time_to_live(config))
    counts = keyed.get_map_state(MapStateDescriptor("map", int, int).enable_time_to_live(config))
    for now in (0, 50):
        clock.set(now)
        keyed.set_current_key(1)
        names.add_all([now, now + 1])
        counts.put_all({now: 1, now + 1: 2})
    clock.set(TTL)
    keyed.set_current_key(1)
    elements, entries = iter(names), iter(counts.items())
    seen = [next(elements)], [next(entries)]
    for key in (2, 1):
        keyed.set_current_key(key)
        names.get()
        counts.get(7)
    assert [*seen[0], *elements] == [50, 51]
    assert [*seen[1], *entries] == [(50, 1), (51, 2)]


@pytest.mark.usefixtures("incremental_cleanup")
def test_cleanup_for_every_record_needs_no_access(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    for for_every_record, left in ((True, 0), (False, 40)):
        keyed = make_keyed(max_parallelism=4)
        state = make_state(keyed, "value", cleanup_incrementally=(5, for_every_record))
        for key in range(40):
            clock.set(0)
            keyed.set_current_key(key)
            state.update("x")
        clock.set(TTL)
        for key in range(40):
            keyed.set_current_key(key)
        assert keyed.num_entries() == left


@pytest.mark.usefixtures("incremental_cleanup")
def test_a_step_of_cleanup_is_bounded(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    keyed = make_keyed(max_parallelism=1)
    state = make_state(keyed, "value", cleanup_incrementally=(5, False))
    for key in range(1_000):
        clock.set(0)
        keyed.set_current_key(key)
        state.update("x")
    clock.set(TTL)
    keyed.set_current_key(10_000)
    for _ in range(40):
        before = keyed.num_entries()
        state.value()
        assert 0 <= before - keyed.num_entries() <= 5
    assert keyed.num_entries() <= 1_000 - 100
    mark = keyed.mark()
    keyed.release(mark)


@pytest.mark.usefixtures("incremental_cleanup")
def test_vectorised_calls_clean_up_for_each_of_their_rows(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    keyed = make_keyed(max_parallelism=1)
    state = make_state(keyed, "value")
    clock.set(0)
    state.update_many(list(range(1_000)), ["x"] * 1_000)
    clock.set(TTL)
    state.update_many([5_000, 5_001, 5_002, 5_003], ["y"] * 4)
    assert 1_000 - 20 + 4 <= keyed.num_entries() < 1_004
    for _ in range(4):
        state.get_many(list(range(10_000, 10_100)))
    assert keyed.num_entries() == 4
