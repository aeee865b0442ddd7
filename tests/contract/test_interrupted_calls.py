"""Calls that are broken off by an interrupt: all or nothing of them, wherever it strikes, and the backend goes on."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import statebackend as sb

MAP = sb.MapStateDescriptor("map", int, int)
LIST = sb.ListStateDescriptor("list", int)
VALUE = sb.ValueStateDescriptor("value", int)
ROWS = range(5)


class Interrupted(BaseException):
    pass


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """Raise after the n-th call of the library's Python code, where signals strike. Gives how many there were."""
    count = [0]
    previous: dict[int, str] = {}  # by the id of a frame, which must not live longer for it

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if "statebackend" not in frame.f_code.co_filename and "contextlib" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count[0] += previous.get(id(frame), "").startswith("CALL")
            previous[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if count[0] == at:
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def contents(keyed: Any) -> list[Any]:
    keyed.set_current_key(1)
    return [
        dict(keyed.get_state(MAP).items()),
        list(keyed.get_state(LIST).get() or ()),
        keyed.get_state(VALUE).get_many(list(ROWS)).to_pylist(),
        keyed.timers.pending_event_time_timers(),
        keyed.timers.count(),
    ]


def fill(keyed: Any) -> None:
    keyed.get_state(MAP).put_all({7: 7, 8: 8})
    keyed.get_state(LIST).add_all([1, 2])
    keyed.timers.register_event_time_timer(5)


CALLS: dict[str, Callable[[Any], object]] = {
    "put_all": lambda keyed: keyed.get_state(MAP).put_all({key: key for key in ROWS}),
    "add_all": lambda keyed: keyed.get_state(LIST).add_all(ROWS),
    "update_many": lambda keyed: keyed.get_state(VALUE).update_many(list(ROWS), list(ROWS)),
    "put_many": lambda keyed: keyed.get_state(MAP).put_many([1] * 5, list(ROWS), list(ROWS)),
    "clear": lambda keyed: keyed.get_state(MAP).clear(),
    "register": lambda keyed: keyed.timers.register_event_time_timer(9),
    "delete": lambda keyed: keyed.timers.delete_event_time_timer(5),
    "merge": lambda keyed: keyed.merge_namespaces(LIST, sb.VOID, [1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupted_call_is_complete_or_undone(call: str) -> None:
    with sb.create_backend("rocksdb").create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        keyed.set_current_namespace(1)
        keyed.get_state(LIST).add(3)
        keyed.set_current_namespace(sb.VOID)
        fill(keyed)
        outer = keyed.mark()
        before = contents(keyed)
        CALLS[call](keyed)
        after = contents(keyed)
        keyed.rollback(outer)
        keyed.release(outer)
        outcomes = set()
        at = 0
        is_whole = False
        while not is_whole:
            at += 1
            keyed.set_current_key(1)
            with contextlib.suppress(Interrupted), interrupted(at) as count:
                CALLS[call](keyed)
            is_whole = count[0] < at
            keyed.set_current_namespace(sb.VOID)
            found = contents(keyed)
            assert found in (before, after), at
            outcomes.add("before" if found == before else "after")
            assert not keyed.store.has_marks, at
            assert (len(keyed._marks), len(keyed.changes)) == (0, 0), at
            restore(keyed, before)
        assert outcomes == {"before", "after"}


def restore(keyed: Any, before: list[Any]) -> None:
    keyed.set_current_key(1)
    entries, elements, values, _, _ = before
    keyed.get_state(MAP).clear()
    for key, value in entries.items():
        keyed.get_state(MAP).put(key, value)
    keyed.get_state(LIST).update(elements)
    keyed.set_current_namespace(1)
    keyed.get_state(LIST).update([3])
    keyed.set_current_namespace(sb.VOID)
    for key, value in zip(ROWS, values, strict=True):
        keyed.set_current_key(key)
        keyed.get_state(VALUE).update(value)
    keyed.set_current_key(1)
    keyed.timers.delete_event_time_timer(9)
    keyed.timers.register_event_time_timer(5)
    assert contents(keyed) == before
