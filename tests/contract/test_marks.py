"""Marks: rolling back and releasing, over all kinds of state, and with finalisers."""

from __future__ import annotations

from contextlib import suppress

import pytest
from contract.conftest import Keyed
from contract.samples import KINDS, Kind, dump
from meddling import Meddler

import statebackend as sb
from statebackend import OperatorStateBackend, types as t
from statebackend.state.marks import BackendMark, MarkStack

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


@pytest.mark.parametrize("does", ["rolls back", "opens a mark", "releases"])
def test_a_release_is_whole_before_a_finaliser_acts(
    keyed: Keyed, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two halves a finaliser took what the release still needed: it raised USAGE.STALE_MARK."""
    value = keyed.get_value_state(sb.ValueStateDescriptor("v", int))
    value.update(1)
    older = keyed.mark() if does != "opens a mark" else None
    value.update(2)
    newer = keyed.mark()
    release, became = MarkStack.release, []

    def act() -> None:
        try:
            if older is None:
                keyed.mark()
            else:
                keyed.rollback(older) if does == "rolls back" else keyed.release(older)
            became.append("complete")
        except sb.UsageError as error:
            became.append(error.code)

    def release_and_act(stack: MarkStack, mark: BackendMark) -> bool:
        was_open = release(stack, mark)
        monkeypatch.undo()
        act()
        return was_open

    monkeypatch.setattr(MarkStack, "release", release_and_act)
    keyed.release(newer)
    assert became == ["complete" if does == "releases" else "USAGE.OVERLAPPING_CALL"]
    assert (newer.is_open, value.value()) == (False, 2)
    if older is not None:
        assert older.is_open == (does == "rolls back")
        keyed.release(older)
    keyed.release(keyed.mark())


@pytest.mark.parametrize("does", ["rolls back", "writes"])
@pytest.mark.parametrize("call", ["mark", "rollback"])
def test_a_finaliser_finds_no_half_of_a_mark_of_operator_state(call: str, does: str) -> None:
    """A collection may run it wherever an object is made. Of keyed state see `test_overlapped_calls`."""
    with OperatorStateBackend() as backend:
        states = [backend.get_list_state(sb.ListStateDescriptor(name, int)) for name in "abc"]

        def write(value: int) -> None:
            for state in states:
                state.update([value])

        def read() -> int:
            (value,) = {element for state in states for element in state.get()}
            return value

        def act() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                backend.rollback(older) if does == "rolls back" else write(9)

        left = 0
        with Meddler(act).at_work():
            for place in range(1, 40):
                write(0)
                older = backend.mark()
                write(1)
                newest = backend.mark()
                write(2)
                left = place
                if call == "mark":
                    newest = backend.mark()
                else:
                    with suppress(sb.UsageError):
                        backend.rollback(newest)
                left = 0
                assert read() in (0, 9, 2 if call == "mark" else 1)
                write(3)
                if newest.is_open:
                    backend.rollback(newest)
                    assert read() in (0, 9, 2 if call == "mark" else 1)
                backend.rollback(older)
                assert read() == 0
                backend.release(older)
