"""Which time a savepoint carries: that of its batch, never that of the machine which writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.testing import ManualClock

pytestmark = pytest.mark.usefixtures("no_fsync")

each_backend = pytest.mark.parametrize("backend", BACKENDS)

#: In 2023, in milliseconds.
BATCH = 1_700_000_000_000
COUNT = sb.ValueStateDescriptor("count", int)


def create(backend: str, **options: Any) -> Any:
    return sb.create_backend(backend).create_keyed_backend(int, **options)


@pytest.fixture(params=["checkpoint", "savepoint"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What a batch at `BATCH` left: a value and a timer of key 1."""
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128)
    with store, create("reference", clock=ManualClock(BATCH)) as keyed:
        keyed.set_current_key(1)
        keyed.get_value_state(COUNT).update(7)
        keyed.timers.register_event_time_timer(BATCH + 5)
        if request.param == "savepoint":
            return keyed.savepoint(tmp_path / "stored")
        return store.commit(0, [keyed.snapshot(0, store).result()])


@each_backend
def test_a_backend_that_was_restored_writes_the_time_found(tmp_path: Path, backend: str, stored: Any) -> None:
    for number, clock in enumerate((None, ManualClock(0), ManualClock(BATCH * 2))):
        with create(backend, restore=stored, clock=clock) as keyed:
            assert keyed.savepoint(tmp_path / f"{number}").now == BATCH
            keyed.get_value_state(COUNT)
            keyed.metrics()
            assert list(keyed.keys("count")) == [1]
            assert keyed.savepoint(tmp_path / f"{number} declared").now == BATCH


@each_backend
def test_the_machine_s_time_is_in_no_savepoint(tmp_path: Path, backend: str, stored: Any) -> None:
    ttl = sb.ValueStateDescriptor("aging", int).enable_time_to_live(sb.StateTtlConfig(1000))
    for number, (restore, expected) in enumerate(((stored, BATCH), ((), None))):
        with create(backend, restore=restore) as keyed:
            keyed.set_current_key(2)
            keyed.get_value_state(COUNT).update(8)
            keyed.get_value_state(ttl).update(8)
            keyed.get_value_state(ttl).update_many([3, 4], [1, 1])
            keyed.advance()
            assert keyed.savepoint(tmp_path / f"{number}").now == expected


@each_backend
def test_without_a_clock_it_is_the_time_of_the_last_commit(tmp_path: Path, backend: str) -> None:
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128)
    with store, create(backend) as keyed:
        keyed.set_current_key(1)
        keyed.get_value_state(COUNT).update(7)
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        assert keyed.savepoint(tmp_path / "savepoint").now == checkpoint.now


WORK: dict[str, Callable[[Any], Any]] = {
    "a key": lambda keyed: keyed.set_current_key(1),
    "a batch written": lambda keyed: keyed.get_value_state(COUNT).update_many([1], [2]),
    "a batch read": lambda keyed: keyed.get_value_state(COUNT).get_many([1]),
    "a batch looked for": lambda keyed: keyed.get_value_state(COUNT).exists_many([1]),
    "a batch of objects": lambda keyed: keyed.get_list_state(
        sb.ListStateDescriptor("objects", sb.types.PICKLE)
    ).add_many([1], [{}]),
    "a timer": lambda keyed: list(keyed.timers.due(BATCH + 5)),
    "cleanup": lambda keyed: keyed.advance(),
}


@each_backend
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_with_a_clock_it_is_the_time_of_the_last_work(
    tmp_path: Path, backend: str, stored: Any, work: Callable[[Any], Any]
) -> None:
    clock = ManualClock(BATCH + 1000)
    with create(backend, restore=stored, clock=clock) as keyed:
        work(keyed)
        clock.advance(1000)
        assert keyed.savepoint(tmp_path / "later").now == BATCH + 1000
        with create(backend, restore=tmp_path / "later") as again:
            assert again.savepoint(tmp_path / "again").now == BATCH + 1000
        clock.set(BATCH - 1000)  # whoever turns a clock back knows why
        work(keyed)
        again_at = BATCH + 1000 if work is WORK["a timer"] else BATCH - 1000  # it has fired
        assert keyed.savepoint(tmp_path / "back").now == again_at


@each_backend
def test_a_composite_key_counts_as_work(tmp_path: Path, backend: str) -> None:
    clock = ManualClock(BATCH)
    with sb.create_backend(backend).create_keyed_backend("struct<a:int,b:string>", clock=clock) as keyed:
        assert keyed.savepoint(tmp_path / "before").now is None
        keyed.set_current_key((1, "x"))
        assert keyed.savepoint(tmp_path / "after").now == BATCH


def test_operator_state_hands_the_time_on_and_keyed_state_knows_better(tmp_path: Path, stored: Any) -> None:
    operator = sb.create_backend("heap").create_operator_backend(restore=stored)
    operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add(1)
    assert operator.savepoint(tmp_path / "operator").now == BATCH
    again = sb.create_backend("heap").create_operator_backend(restore=tmp_path / "operator")
    assert again.savepoint(tmp_path / "again").now == BATCH
    with create("heap", restore=stored, clock=ManualClock(BATCH - 1)) as keyed:
        keyed.set_current_key(1)
        assert keyed.savepoint(tmp_path / "operator").now == BATCH - 1
    fresh = sb.create_backend("heap").create_operator_backend()
    assert fresh.savepoint(tmp_path / "fresh").now is None
