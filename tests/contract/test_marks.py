"""Marks: rolling back and releasing, over all kinds of state, and from finalisers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KINDS, Kind, dump
from meddling import Meddler

import statebackend as sb
from statebackend import CheckpointStore, OperatorStateBackend
from statebackend import types as t

pytestmark = pytest.mark.checked

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
def test_marks_nest(keyed: Keyed, kind: Kind) -> None:
    descriptor = kind.descriptor("s", t.LONG)
    state = keyed.get_state(descriptor)
    marks, dumps = [], []
    for number in range(4):
        dumps.append(dump(keyed, descriptor))
        marks.append(keyed.mark())
        kind.write(state, number)
        keyed.set_current_key(number + 10)
        kind.write(state, number)
    keyed.rollback(marks[2])
    assert dump(keyed, descriptor) == dumps[2]
    with pytest.raises(sb.UsageError):
        keyed.rollback(marks[3])
    kind.write(state, 7)
    keyed.release(marks[1])
    kind.write(state, 8)
    keyed.rollback(marks[2])
    assert dump(keyed, descriptor) == dumps[2]
    keyed.rollback(marks[0])
    assert dump(keyed, descriptor) == dumps[0]
    with pytest.raises(sb.UsageError):
        keyed.rollback(marks[2])


def test_a_released_mark_is_gone(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int))
    older, newer = keyed.mark(), keyed.mark()
    state.update(1)
    keyed.release(newer)
    keyed.release(newer)
    with pytest.raises(sb.UsageError):
        keyed.rollback(newer)
    assert state.value() == 1
    keyed.rollback(older)
    assert state.value() is None
    keyed.release(older)
    with pytest.raises(sb.UsageError):
        keyed.rollback(older)


def test_a_mark_of_another_backend_is_refused(make_keyed: MakeKeyed) -> None:
    one, two = make_keyed(), make_keyed()
    mark = one.mark()
    two.mark()
    for wrong in (mark, None, 1):
        with pytest.raises((sb.UsageError, TypeError)):
            two.rollback(wrong)


def test_rollback_leaves_key_namespace_and_handles(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int))
    mark = keyed.mark()
    keyed.set_current_key(2)
    keyed.set_current_namespace("n")
    state.update(1)
    keyed.rollback(mark)
    assert keyed.current_key == 2
    assert keyed.current_namespace == "n"
    assert state.value() is None
    state.update(3)
    assert state.value() == 3
    assert keyed.get_value_state(sb.ValueStateDescriptor("s", int)) is state


@every_kind
def test_a_state_registered_since_is_empty(keyed: Keyed, kind: Kind) -> None:
    mark = keyed.mark()
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    kind.write(state, 1)
    keyed.rollback(mark)
    assert not state.exists()
    assert keyed.num_entries("s") == 0
    kind.write(state, 2)
    assert kind.read(state) == 2


def test_open_iterators_are_invalid_after_a_rollback(keyed: Keyed) -> None:
    words = keyed.get_list_state(sb.ListStateDescriptor("l", int))
    counts = keyed.get_map_state(sb.MapStateDescriptor("m", int, int))
    words.update([1, 2])
    counts.put_all({1: 1, 2: 2})
    mark = keyed.mark()
    words.add(3)
    counts[3] = 3
    for begin in (words.__iter__, counts.keys, counts.values, counts.items):
        steps = begin()
        next(steps)
        keyed.rollback(mark)
        with pytest.raises(RuntimeError):
            next(steps)
        words.add(3)
        counts[3] = 3


@pytest.mark.parametrize(
    "change", [lambda k, d: k.clear_key(), lambda k, d: k.merge_namespaces(d, "x", [sb.VOID])]
)
def test_whole_key_operations_are_undone(keyed: Keyed, change: Any) -> None:
    descriptor = sb.ListStateDescriptor("s", int)
    state = keyed.get_list_state(descriptor)
    for namespace in ("n", sb.VOID):
        keyed.set_current_namespace(namespace)
        state.update([1, 2])
    before = dump(keyed, descriptor)
    mark = keyed.mark()
    change(keyed, descriptor)
    assert dump(keyed, descriptor) != before
    keyed.rollback(mark)
    assert dump(keyed, descriptor) == before


def test_a_failed_vectorised_call_keeps_older_marks(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", "tinyint"))
    mark = keyed.mark()
    state.update(1)
    with pytest.raises(OverflowError):
        state.update_many([1, 2], [2, 1000])
    assert state.value() == 1
    keyed.rollback(mark)
    assert state.value() is None


def test_marks_end_with_the_backend(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    mark = keyed.mark()
    keyed.close()
    for call in (keyed.mark, lambda: keyed.rollback(mark)):
        with pytest.raises(sb.ClosedError):
            call()


def test_many_changes_in_random_order(keyed: Keyed, rng: random.Random) -> None:
    descriptors = [kind.descriptor(kind.name, t.LONG) for kind in KINDS]
    states = [keyed.get_state(descriptor) for descriptor in descriptors]

    def everything() -> list[Any]:
        return [dump(keyed, descriptor) for descriptor in descriptors]

    def change() -> None:
        keyed.set_current_key(rng.randrange(8))
        keyed.set_current_namespace(rng.choice([sb.VOID, 1]))
        which = rng.randrange(len(KINDS))
        if rng.random() < 0.3:
            states[which].clear()
        else:
            KINDS[which].write(states[which], rng.randrange(100))

    open_marks: list[tuple[Any, Any]] = []
    for _ in range(60):
        for _ in range(rng.randrange(15)):
            change()
        action = rng.random()
        if action < 0.4 or not open_marks:
            open_marks.append((keyed.mark(), everything()))
        elif action < 0.8:
            at = rng.randrange(len(open_marks))
            mark, expected = open_marks[at]
            keyed.rollback(mark)
            del open_marks[at + 1 :]
            assert everything() == expected
        else:
            mark, _ = open_marks.pop(rng.randrange(len(open_marks)))
            keyed.release(mark)


#: So many collections in one of the calls are tried as the one that runs the finaliser.
PLACES = 40


#: Marks that the finaliser uses, oldest first.
Older = list[Any]


class Once:
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


#: What a finaliser does, with marks that are older than the call.
DOES: dict[str, Callable[[Any, Older], Any]] = {
    "rolls back": lambda backend, older: backend.rollback(older[0]),
    "rolls back each": lambda backend, older: [backend.rollback(mark) for mark in reversed(older)],
    "releases": lambda backend, older: backend.release(older[0]),
    "releases each": lambda backend, older: [backend.release(mark) for mark in older],
    "marks and releases": lambda backend, older: backend.release(backend.mark()),
}
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


def go_through(backend: Any, call: str, does: str, write: Callable[[int], None], read: Any) -> None:
    """Have the finaliser run at one place after the other, and look at what came of it."""
    older: Older = []
    once = Once(lambda: DOES[does](backend, older))
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
            went_back = once.has_acted and does.startswith("rolls")
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


@pytest.mark.parametrize("does", DOES)
@pytest.mark.parametrize("call", CALLS)
def test_finalisers_see_no_half_of_a_mark(keyed: Keyed, call: str, does: str) -> None:
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


@pytest.mark.parametrize("does", DOES)
@pytest.mark.parametrize("call", CALLS)
def test_finalisers_see_no_half_of_a_mark_of_operator_state(call: str, does: str) -> None:
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

    def read(backend: Keyed) -> int:
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
