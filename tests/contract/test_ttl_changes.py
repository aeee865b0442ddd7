"""What changes under state with a time to live, in every combination of options: the clock is set back, the time to
live is turned off and on again over a restart, namespaces are merged."""

from __future__ import annotations

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
from statebackend.state import (
    AggregatingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    ReducingStateDescriptor,
    StateBackend,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock
from statebackend.types import LONG

pytestmark = pytest.mark.usefixtures("no_fsync")

#: With these nothing is removed but by reads.
QUIET = ("off", "snapshot", "rocksdb")


def at(keyed: KeyedStateBackend, clock: ManualClock, now: int, key: int) -> None:
    clock.set(now)
    keyed.set_current_key(key)


@combinations
def test_a_clock_that_is_set_back(
    make_keyed: MakeKeyed,
    clock: ManualClock,
    backend: StateBackend,
    kind: str,
    update: Any,
    visibility: Any,
    cleanup: str,
) -> None:
    keyed = make_keyed(max_parallelism=4)
    state = make_state(keyed, kind, update_type=update, state_visibility=visibility, **CLEANUPS[cleanup])
    write, read = KINDS[kind].write, KINDS[kind].read
    at(keyed, clock, 1_000, 1)
    write(state, "later")
    keyed.advance()

    # What was written later is there, and lives from then on; or from the read on, where reads count.
    at(keyed, clock, 0, 1)
    assert read(state) == "later"
    last = TTL - 1 if update is OnRead else 1_000 + TTL - 1
    at(keyed, clock, last, 1)
    assert state.exists()
    at(keyed, clock, last + 1, 1)
    assert read(state) in (
        {None} if visibility is Never else {"later"} if cleanup in QUIET else {None, "later"}
    )
    assert read(state) is None

    # What is written after the clock was set back has the time of then.
    at(keyed, clock, 0, 2)
    write(state, "earlier")
    keyed.advance()
    at(keyed, clock, TTL - 1, 2)
    assert state.exists()
    at(keyed, clock, TTL, 2)
    assert visibility is Show or not state.exists()

    # What has expired and was not removed is seen again, if it is before its end.
    at(keyed, clock, TTL - 1, 2)
    assert state.exists() or cleanup == "often"
    if state.exists():
        assert read(state) == "earlier"
    keyed.clear_key()

    # Cleanup misses nothing of it.
    for key, now in ((1, 1_000), (2, 0), (3, 500)):
        at(keyed, clock, now, key)
        write(state, "x")
        keyed.advance()
    for now, left in ((500 + TTL, 1), (1_000 + TTL, 0)):
        at(keyed, clock, now, 4)
        keyed.advance()
        for _ in range(200):
            assert read(state) is None
        is_quiet = cleanup in QUIET or (incremental(cleanup) and not backend.cleans_up_incrementally)
        assert keyed.num_entries() == (3 if is_quiet else left)


@combinations
def test_it_is_turned_off_and_on_again(
    make_keyed: MakeKeyed,
    clock: ManualClock,
    tmp_path: Path,
    kind: str,
    update: Any,
    visibility: Any,
    cleanup: str,
) -> None:
    options = {"update_type": update, "state_visibility": visibility, **CLEANUPS[cleanup]}
    write, read = KINDS[kind].write, KINDS[kind].read
    with CheckpointStore(tmp_path) as store:
        store.open_for_writing(key_type=LONG, max_parallelism=4)

        def stored(keyed: KeyedStateBackend, number: int) -> Any:
            made = store.commit(number, [keyed.snapshot(number, store).result()], now=clock.now())
            keyed.close()
            return made

        keyed = make_keyed(max_parallelism=4)
        state = make_state(keyed, kind, **options)
        for key, now in ((1, 0), (2, 50)):
            at(keyed, clock, now, key)
            write(state, str(key))
        first = stored(keyed, 0)

        # Off: what is there stays for good, also what had expired.
        clock.set(120)
        keyed = make_keyed(max_parallelism=4, restore=first)
        state = keyed.get_state(KINDS[kind].make())
        for now in (120, 10**9):
            for key in (1, 2):
                at(keyed, clock, now, key)
                assert read(state) == str(key)
        clock.set(600)
        second = stored(keyed, 1)

        # On: it is stamped with the time of the restart, once, and lives as if it had been written then.
        clock.set(1_000)
        keyed = make_keyed(max_parallelism=4, restore=second)
        make_state(keyed, kind, **options)
        clock.set(1_050)
        third = stored(keyed, 2)
        clock.set(1_060)
        keyed = make_keyed(max_parallelism=4, restore=third)
        state = make_state(keyed, kind, **options)
        at(keyed, clock, 1_000 + TTL - 1, 1)
        assert read(state) == "1"
        at(keyed, clock, 1_000 + TTL, 2)
        assert read(state) in ({None} if visibility is Never else {None, "2"})
        assert read(state) is None
        at(keyed, clock, 1_000 + TTL, 1)
        assert state.exists() == (update is OnRead) or visibility is Show


@pytest.mark.parametrize("cleanup", list(CLEANUPS))
@pytest.mark.parametrize("visibility", [Never, Show], ids=lambda each: each.name)
@pytest.mark.parametrize("update", [OnWrite, OnRead], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", ["list", "reducing", "aggregating"])
def test_merging_namespaces(
    make_keyed: MakeKeyed,
    clock: ManualClock,
    backend: StateBackend,
    kind: str,
    update: Any,
    visibility: Any,
    cleanup: str,
) -> None:
    config = StateTtlConfig(TTL, update_type=update, state_visibility=visibility, **CLEANUPS[cleanup])
    descriptor: Any = {
        "list": ListStateDescriptor("s", str),
        "reducing": ReducingStateDescriptor("s", lambda old, new: old + new, str),
        "aggregating": AggregatingStateDescriptor("s", "max", str),
    }[kind].enable_time_to_live(config)
    keyed = make_keyed(max_parallelism=4)
    state: Any = keyed.get_state(descriptor)
    for namespace, now in (("old", 0), ("a", 30), ("b", 40), ("t", 50)):
        at(keyed, clock, now, 1)
        keyed.set_current_namespace(namespace)
        state.add(namespace)
    at(keyed, clock, TTL, 1)
    keyed.merge_namespaces(descriptor, "t", ["b", "old", "a"])
    for namespace in ("a", "b", "old"):
        keyed.set_current_namespace(namespace)
        assert not state.exists()
    keyed.set_current_namespace("t")
    assert keyed.num_entries() == 1
    if kind == "list":
        # One after the other, each with the stamp that it had.
        shows_old = visibility is Show
        may_be_gone = cleanup not in QUIET or (cleanup == "rocksdb" and backend.cleans_up_in_compactions)
        with_old, without = ["t", "b", "old", "a"], ["t", "b", "a"]
        found = state.get()
        assert found == (with_old if shows_old else without) or (may_be_gone and found == without)
        at(keyed, clock, 130, 1)
        if update is OnRead:
            assert state.get() == without
        elif visibility is Never:
            assert state.get() == ["t", "b"]
            at(keyed, clock, 140, 1)
            assert state.get() == ["t"]
        at(keyed, clock, 229 if update is OnRead else 149, 1)
        assert state.exists()
    else:
        # What has not expired, as if it were written now.
        assert state.get() == ("tba" if kind == "reducing" else "t")
        at(keyed, clock, 2 * TTL - 1, 1)
        assert state.exists()
        at(keyed, clock, 2 * TTL, 1)
        assert visibility is Show or not state.exists()
    # Nothing to merge, and everything expired.
    at(keyed, clock, 1_000, 1)
    keyed.merge_namespaces(descriptor, "t", ["none"])
    keyed.merge_namespaces(descriptor, "u", ["t"])
    keyed.set_current_namespace("u")
    assert visibility is Show or not state.exists()
    state.get()
    assert state.get() in (None, [])
    assert keyed.num_entries() == 0
