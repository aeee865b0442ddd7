"""Finalisers that a collection runs in the middle of `mark`, `rollback` or `release`, and that use older marks; or of
`snapshot`, and that write.

Their calls are complete or refused: a mark is one of a stack, and a snapshot is of one moment. On CPython 3.12 and
later collections wait for the next bytecode, and the test sees less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import MakeKeyed
from meddling import Meddler

import statebackend as sb
from statebackend import CheckpointStore, OperatorStateBackend

pytestmark = pytest.mark.checked

#: So many collections in one of the calls are tried as the one that runs the finaliser.
PLACES = 40
#: Marks that the finaliser uses, oldest first.
Older = list[Any]


class Once:
    """Does something at one of the collections that follow."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.left, self.has_acted = act, 0, False

    def wait_for(self, place: int) -> None:
        self.left, self.has_acted = place, False

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                self.act()
                self.has_acted = True


def roll_back(backend: Any, older: Older) -> None:
    backend.rollback(older[0])


def roll_back_each(backend: Any, older: Older) -> None:
    for mark in reversed(older):
        backend.rollback(mark)


def release(backend: Any, older: Older) -> None:
    backend.release(older[0])


def release_each(backend: Any, older: Older) -> None:
    for mark in older:
        backend.release(mark)


def mark_and_release(backend: Any, older: Older) -> None:
    backend.release(backend.mark())


DOES = [roll_back, roll_back_each, release, release_each, mark_and_release]
CALLS = ["mark", "rollback", "release"]


def is_open(backend: Any, mark: Any) -> bool:
    """Roll back to a mark, if that is possible; the mark itself knows as much."""
    if mark.is_open:
        backend.rollback(mark)
        return True
    with pytest.raises(sb.UsageError, match=r"no longer valid"):
        backend.rollback(mark)
    return False


def called(backend: Any, call: str, newest: Any) -> Any:
    """What a call gives; None if the finaliser came first, and went back behind the mark."""
    if call == "mark":
        return backend.mark()
    if call == "release":
        return backend.release(newest)
    with suppress(sb.UsageError):
        backend.rollback(newest)
    return None


def go_through(
    backend: Any, call: str, does: Callable[[Any, Older], None], write: Callable[[int], None], read: Any
) -> None:
    """Have the finaliser run at one place after the other, and look at what came of it."""
    older: Older = []
    once = Once(lambda: does(backend, older))
    with Meddler(once).at_work():
        for place in range(1, PLACES):
            write(0)
            older[:] = [backend.mark(), backend.mark()]
            write(1)
            newest = None if call == "mark" else backend.mark()
            write(2)
            once.wait_for(place)
            made = called(backend, call, newest)
            once.left = 0
            went_back = once.has_acted and does in (roll_back, roll_back_each)
            assert read() == (0 if went_back else 1 if call == "rollback" else 2)
            for mark in [each for each in (newest, made) if each is not None]:
                before = read() if mark is made else 1
                write(3)
                expected = before if is_open(backend, mark) else 3
                assert read() == expected
                backend.release(mark)
            write(4)
            expected = 0 if is_open(backend, older[0]) else 4
            assert read() == expected
            for mark in older:
                backend.release(mark)


@pytest.mark.parametrize("does", DOES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_finalisers_see_no_half_of_a_mark(
    keyed: sb.KeyedStateBackend, call: str, does: Callable[[Any, Older], None]
) -> None:
    states = [keyed.get_value_state(sb.ValueStateDescriptor(name, int)) for name in "abc"]

    def write(value: int) -> None:
        for state in states:
            state.update(value)

    def read() -> int | None:
        (value,) = {state.value() for state in states}
        return value

    go_through(keyed, call, does, write, read)
    mark = keyed.mark()
    write(5)
    assert keyed.count_changes(mark) == (3, 0)
    keyed.release(mark)


@pytest.mark.parametrize("does", DOES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_finalisers_see_no_half_of_a_mark_of_operator_state(
    call: str, does: Callable[[Any, Older], None]
) -> None:
    with OperatorStateBackend() as backend:
        states = [backend.get_list_state(sb.ListStateDescriptor(name, int)) for name in "abc"]

        def write(value: int) -> None:
            for state in states:
                state.update([value])

        def read() -> int:
            (value,) = {element for state in states for element in state.get()}
            return value

        go_through(backend, call, does, write, read)


@pytest.mark.parametrize("does", ["writes", "marks"])
@pytest.mark.parametrize("is_batched", [True, False], ids=["below a mark", "no mark"])
def test_finalisers_see_no_half_of_a_snapshot(
    make_keyed: MakeKeyed, tmp_path: Path, no_fsync: None, is_batched: bool, does: str, is_stress: bool
) -> None:
    """Whether a finaliser writes before or after it: a snapshot has all of that or none, and the next has it."""
    keyed = make_keyed()
    states = [keyed.get_value_state(sb.ValueStateDescriptor(name, int)) for name in "abc"]
    parts = keyed.get_list_state(sb.ListStateDescriptor("parts", int))
    keyed.set_current_key(1)
    written = 0

    def write() -> None:
        nonlocal written
        value = written + 1
        for state in states:
            state.update(value)
        parts.add(value)
        written = value

    def read(backend: sb.KeyedStateBackend) -> int:
        backend.set_current_key(1)
        (value,) = {backend.get_value_state(sb.ValueStateDescriptor(name, int)).value() for name in "abc"}
        assert backend.get_list_state(sb.ListStateDescriptor("parts", int)).get() == list(range(1, value + 1))
        return value

    once = Once(write if does == "writes" else lambda: keyed.release(keyed.mark()))
    number = 0
    with CheckpointStore(tmp_path / "state") as store, Meddler(once).at_work():
        for place in range(1, 240, 4 if is_stress else 12):
            for meddles in (True, False):
                mark = keyed.mark() if is_batched else None
                write()
                before = written
                once.left = place if meddles else 0
                pending = keyed.snapshot(number, store.open_for_writing())
                once.left = 0
                after = written
                checkpoint = store.commit(number, [pending.result()])
                if mark is not None:
                    keyed.release(mark)
                number += 1
                with make_keyed(restore=checkpoint) as again:
                    assert read(again) in ({before, after} if meddles else {written})
    assert read(keyed) == written
    assert written > number or does == "marks"
