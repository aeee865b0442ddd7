"""Calls that begin while another is inside the backend: by users' functions, signal handlers, threads, finalisers.

A call that runs the user's code refuses other calls meanwhile, and goes on as if they had not been tried. The user's
code that runs while arguments are taken (an iterable, a mapping) is before the call. SPEC 6, "Threads and re-entry".
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meddling import Meddler

import statebackend as sb

pytestmark = pytest.mark.checked

KEYS, SPACES = (1, 2, 3, 77), (sb.VOID, "w", "z")


class Fuse:
    """Does something once, at the call that is due."""

    def __init__(self) -> None:
        self.then: Callable[[], Any] | None = None
        self.left = 1

    def __call__(self) -> None:
        if self.then is not None:
            self.left -= 1
            if self.left <= 0:
                then, self.then = self.then, None
                then()


#: One for all: types that are equal share a serializer.
FUSE = Fuse()
#: The one that collections call.
COLLECTED = Fuse()


class Box:
    def __init__(self, content: int) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"Box({self.content})"


class BoxSerializer(sb.types.Serializer):
    type_name = "box"

    def serialize(self, value: Box) -> bytes:
        FUSE()
        return str(value.content).encode()

    def deserialize(self, data: bytes) -> Box:
        FUSE()
        return Box(int(data))

    def copy(self, value: Box) -> Box:
        FUSE()
        return Box(value.content)


class Steps(Mapping[int, Any]):
    def __init__(self, held: dict[int, Any]) -> None:
        self.held = held

    def __getitem__(self, key: int) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[int]:
        FUSE()
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Case:
    """A state on a backend, filled, with the user's code in it, and what is done to it."""

    mark: Any = None
    newest: Any = None
    #: A mark that the call has made.
    made: Any = None
    #: Snapshots that it and later ones have taken.
    taken: list[Any]

    def __init__(
        self,
        backend: sb.StateBackend,
        kind: str,
        form: str,
        *,
        expires: bool,
        is_new: bool,
        restore: Any = None,
    ) -> None:
        self.kind, self.taken = kind, []
        self.keyed: Any = backend.create_keyed_backend(int, max_parallelism=16, restore=restore)
        self.other: Any = self.keyed.get_state(sb.ValueStateDescriptor("other", int))
        descriptor: Any = self.descriptor(form)
        if expires:
            descriptor = descriptor.enable_time_to_live(sb.StateTtlConfig(ttl=10**9))
        self.state: Any = self.keyed.get_state(descriptor)
        for key in () if restore else KEYS[:3]:
            for space in SPACES[:2]:
                if key != 1 or not is_new:
                    self.go(key, space)
                    self.fill(10 * key)
                    self.keyed.timers.register_event_time_timer(key)
        self.go(1, sb.VOID)

    def descriptor(self, form: str) -> Any:
        declared: Any
        if form == "text":
            declared, self.make = sb.types.STRING, str
        elif form == "object":
            declared, self.make = sb.types.of(BoxSerializer()), Box
        else:
            declared, self.make = sb.types.LIST(sb.types.of(BoxSerializer())), lambda number: [Box(number)]

        def newer(old: Any, new: Any) -> Any:
            FUSE()
            return new

        return {
            "value": lambda: sb.ValueStateDescriptor("s", declared),
            "list": lambda: sb.ListStateDescriptor("s", declared),
            "map": lambda: sb.MapStateDescriptor("s", int, declared),
            "reducing": lambda: sb.ReducingStateDescriptor("s", newer, declared),
            "folding": lambda: sb.FoldingStateDescriptor(
                "s", self.make(0), lambda a, b: newer(b, a), declared
            ),
        }[self.kind]()

    def given(self, *numbers: int) -> list[Any]:
        return [self.make(number) for number in numbers]

    def step_by_step(self, *numbers: int) -> Iterator[Any]:
        for number in numbers:
            FUSE()
            yield self.make(number)

    def go(self, key: int, space: Any) -> None:
        self.keyed.set_current_namespace(space)
        self.keyed.set_current_key(key)

    def fill(self, number: int) -> None:
        state, made = self.state, self.make(number)
        {
            "value": lambda: state.update(made),
            "list": lambda: state.update([made, self.make(number + 1)]),
            "map": lambda: state.put_all({1: made, 2: self.make(number + 1)}),
            "reducing": lambda: state.add(made),
            "folding": lambda: state.add(number),
        }[self.kind]()
        self.other.update(number)

    def look(self) -> Any:
        state = self.state
        found = {
            "value": lambda: state.value(),
            "list": lambda: list(state.get()),
            "map": lambda: sorted(state.items(), key=lambda item: item[0]),  # backends differ in the order
            "reducing": lambda: state.get(),
            "folding": lambda: state.get(),
        }[self.kind]()
        return found, self.other.value()

    def all(self) -> list[Any]:
        found = []
        for key in KEYS:
            for space in SPACES:
                self.go(key, space)
                found.append(self.look())
        found.append(sorted((each.timestamp, each.key) for each in self.keyed.timers.rows()))
        return found


OPERATIONS: dict[str, dict[str, Callable[[Case], Any]]] = {
    "value": {
        "update": lambda c: c.state.update(c.make(99)),
        "value": lambda c: c.state.value(),
        "clear": lambda c: c.state.clear(),
    },
    "list": {
        "add": lambda c: c.state.add(c.make(99)),
        "add_all": lambda c: c.state.add_all(c.given(99, 98)),
        "add_all, step by step": lambda c: c.state.add_all(c.step_by_step(99, 98)),
        "update": lambda c: c.state.update(c.given(99)),
        "update, step by step": lambda c: c.state.update(c.step_by_step(99)),
        "get": lambda c: list(c.state.get()),
    },
    "map": {
        "put": lambda c: c.state.put(1, c.make(99)),
        "put a new one": lambda c: c.state.put(7, c.make(99)),
        "put_all": lambda c: c.state.put_all({1: c.make(99), 8: c.make(98)}),
        "put_all, step by step": lambda c: c.state.put_all(Steps({1: c.make(99), 8: c.make(98)})),
        "get": lambda c: c.state.get(1),
        "remove": lambda c: c.state.remove(1),
        "items": lambda c: sorted(c.state.items(), key=lambda item: item[0]),
    },
    "reducing": {
        "add": lambda c: c.state.add(c.make(99)),
        "get": lambda c: c.state.get(),
        "add_many": lambda c: c.state.add_many([1, 2, 1], c.given(5, 6, 7)),
    },
    "folding": {"add": lambda c: c.state.add(3), "get": lambda c: c.state.get()},
}


def write_elsewhere(case: Case) -> None:
    case.keyed.set_current_key(2)
    case.fill(50)


def clear_another_namespace(case: Case) -> None:
    case.keyed.set_current_namespace("w")
    case.state.clear()
    case.keyed.set_current_namespace(sb.VOID)


DOES: dict[str, Callable[[Case], Any]] = {
    "another key": lambda c: c.keyed.set_current_key(2),
    "reads another key": lambda c: (c.keyed.set_current_key(2), c.look()),
    "reads a new key": lambda c: (c.keyed.set_current_key(77), c.look()),
    "writes another key": write_elsewhere,
    "there and back": lambda c: (write_elsewhere(c), c.keyed.set_current_key(1)),
    "another namespace": lambda c: c.keyed.set_current_namespace("w"),
    "reads another namespace": lambda c: (c.keyed.set_current_namespace("w"), c.look()),
    "clears another namespace": clear_another_namespace,
    "writes a new namespace": lambda c: (c.keyed.set_current_namespace("z"), c.fill(50)),
    "reads its own key": lambda c: c.look(),
    "writes its own key": lambda c: c.fill(50),
    "opens a mark": lambda c: c.keyed.mark(),
    "clears the key": lambda c: c.keyed.clear_key(),
}


def take_snapshot(case: Case) -> None:
    case.taken.append(case.keyed.snapshot(len(case.taken), case.store))


def make_mark(case: Case) -> None:
    case.made = case.keyed.mark()


#: Calls that take what they are given as columns, and calls of the whole backend, which is under two marks.
COLUMNS: dict[str, dict[str, Callable[[Case], Any]]] = {
    "value": {
        "update_many": lambda c: c.state.update_many([1, 2, 1], c.given(5, 6, 7)),
        "get_many": lambda c: c.state.get_many([1, 2, 77]).to_pylist(),
    },
    "list": {
        "add_many": lambda c: c.state.add_many([1, 2, 1], c.given(5, 6, 7)),
        "get_many": lambda c: c.state.get_many([1, 2, 77]).to_pylist(),
    },
    "map": {
        "put_many": lambda c: c.state.put_many([1, 2, 1], [1, 2, 9], c.given(5, 6, 7)),
        "get_many": lambda c: c.state.get_many([1, 2, 77], [1, 2, 3]).to_pylist(),
    },
    "reducing": {"get_many": lambda c: c.state.get_many([1, 2, 77]).to_pylist()},
    "folding": {},
}
WHOLE: dict[str, Callable[[Case], Any]] = {
    "mark": make_mark,
    "rollback": lambda c: c.keyed.rollback(c.newest),
    "release": lambda c: c.keyed.release(c.newest),
    "clear_key": lambda c: c.keyed.clear_key(),
    "register": lambda c: c.keyed.timers.register_event_time_timer(9),
    "take_due": lambda c: c.keyed.timers.take_due(2).keys.to_pylist(),
    "snapshot": take_snapshot,
}
BEHIND_THE_CALL: dict[str, Callable[[Case], Any]] = {
    "rolls back": lambda c: c.keyed.rollback(c.mark),
    "rolls back each": lambda c: (c.keyed.rollback(c.newest), c.keyed.rollback(c.mark)),
    "releases": lambda c: c.keyed.release(c.mark),
    "releases each": lambda c: (c.keyed.release(c.mark), c.keyed.release(c.newest)),
}


def outcome(
    backend: sb.StateBackend,
    kind: str,
    form: str,
    operation: str,
    marked: bool,
    expires: bool,
    is_new: bool,
    *,
    before: Callable[[Case], Any] = lambda case: None,
    inside: Callable[[Case], Any] | None = None,
    after: Callable[[Case], Any] = lambda case: None,
    place: int = 0,
    folder: Path | None = None,
) -> tuple[list[Any], str | None]:
    """What an operation gives, what is there afterwards, and after a rollback.

    And what became of the call ``inside`` of it: "complete", the code of the error, or None if nothing ran it. With a
    ``place``, the collection of that number runs it.
    """
    became: list[str | None] = [None]
    case = Case(backend, kind, form, expires=expires, is_new=is_new)
    keyed = case.keyed

    def call() -> None:
        assert inside is not None
        try:
            inside(case)
            became.append("complete")
        except sb.UsageError as error:
            became.append(error.code)

    if marked:
        case.mark = keyed.mark()
        case.go(3, "w")
        case.fill(60)
        case.go(1, sb.VOID)
        case.newest = keyed.mark()
    with sb.CheckpointStore(folder) if folder else contextlib.nullcontext() as store:
        case.store = store and store.open_for_writing(key_type=int, max_parallelism=16)
        with contextlib.suppress(sb.UsageError):
            before(case)
        fuse = COLLECTED if place else FUSE
        fuse.then, fuse.left = None if inside is None else call, place
        threshold = gc.get_threshold()
        if place:
            gc.set_threshold(1, 100_000, 100_000)
        try:
            found = [{**OPERATIONS[kind], **COLUMNS[kind], **WHOLE}[operation](case)]
        except sb.UsageError as error:
            found = [error.code]
        finally:
            gc.set_threshold(*threshold)
            fuse.then = None
        with contextlib.suppress(sb.UsageError):
            after(case)
        found += [keyed.current_key, keyed.current_namespace]
        case.fill(71)
        found += [case.look(), case.all()]
        if case.taken:
            take_snapshot(case)
        for table in (getattr(case.state, name, None) for name in ("plain", "spaced")):
            if table is not None:
                table._check()
        for mark in filter(None, (case.made, case.newest, case.mark)):
            found.append(mark.is_open)
            if mark.is_open:
                keyed.rollback(mark)
                keyed.release(mark)
                found.append(case.all())
        keyed.close()
        for number, taken in enumerate(case.taken):
            checkpoint = store.commit(number, [taken.result()])
            again = Case(backend, kind, form, expires=expires, is_new=is_new, restore=checkpoint)
            found.append(again.all())
            again.keyed.close()
    return found, became[-1]


@pytest.mark.parametrize(
    ("marked", "expires"),
    [(False, False), (True, False), (True, True)],
    ids=["", "marked", "marked, expiring"],
)
@pytest.mark.parametrize("form", ["object", "nested"])
@pytest.mark.parametrize(
    ("kind", "operation"), [(kind, operation) for kind, each in OPERATIONS.items() for operation in each]
)
def test_a_call_inside_is_refused_or_complete(
    backend: sb.StateBackend,
    kind: str,
    operation: str,
    form: str,
    marked: bool,
    expires: bool,
    day_rng: random.Random,
    is_stress: bool,
) -> None:
    tried = DOES if is_stress else day_rng.sample(list(DOES), 2 if backend.name == "rocksdb" else 4)
    takes_first = "step by step" in operation or operation == "add_many"  # a column is converted before
    for is_new in (False, True):
        options = (kind, form, operation, marked, expires, is_new)
        alone, _ = outcome(backend, *options)
        for does in tried:
            found, became = outcome(backend, *options, inside=DOES[does])
            if became == "complete":
                assert takes_first, does
                assert found == outcome(backend, *options, before=DOES[does])[0], does
            else:
                assert became in (None, "USAGE.OVERLAPPING_CALL"), does
                assert found == alone, does


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_finaliser_finds_no_half_of_a_call(
    backend: sb.StateBackend,
    kind: str,
    tmp_path: Path,
    no_fsync: None,
    day_rng: random.Random,
    is_stress: bool,
) -> None:
    """A collection may run one wherever an object is made, on CPython 3.10 and 3.11. Later versions show less."""
    if backend.name == "reference":
        pytest.skip("plain Python, in which a finaliser runs anywhere")
    calls = {**OPERATIONS[kind], **COLUMNS[kind], **WHOLE}
    whole = [call for call in calls if "step" not in call and call != "items"]  # these are several calls
    does = {**DOES, **BEHIND_THE_CALL}
    cases = list(itertools.product(whole, does, ("text", "object", "nested")))
    if not is_stress and backend.name == "heap":
        each = len(cases) // len(whole)
        cases = [case for i in range(0, len(cases), each) for case in day_rng.sample(cases[i : i + each], 1)]
    elif not is_stress:
        cases = day_rng.sample(cases, 1)  # opening a database takes long
    folders = (tmp_path / str(number) for number in itertools.count())
    main = threading.get_ident()

    def act() -> None:
        if threading.get_ident() == main:  # what a writer's thread collects waits, or comes later
            COLLECTED()

    with Meddler(act).at_work():
        gc.set_threshold(700)  # but for the call that is looked at
        for call, what, form in cases:
            marked = call in WHOLE or what in BEHIND_THE_CALL
            expires = day_rng.random() < 0.3
            options = (kind, form, call, marked, expires, day_rng.random() < 0.3)

            def found(options: Any = options, **how: Any) -> tuple[list[Any], str | None]:
                folder = next(folders) if options[2] == "snapshot" else None
                return outcome(backend, *options, folder=folder, **how)

            alone, before, after = (
                found(**how)[0] for how in ({}, {"before": does[what]}, {"after": does[what]})
            )
            # What comes between the rows of a call is in the middle of it, and may be.
            in_columns = backend.name == "heap" and form == "text" and kind != "reducing" and not expires
            by_rows = call == "take_due" or (call.endswith("_many") and not in_columns)
            for place in (
                range(1, 200) if is_stress else (*range(1, 8), *range(day_rng.randrange(8, 24), 200, 16))
            ):
                result, became = found(inside=does[what], place=place)
                if became == "complete":
                    assert by_rows or result in (before, after), (call, what, form, place)
                    assert result[0] != "USAGE.STALE_MARK" or result[0] == before[0], (
                        call,
                        what,
                        form,
                        place,
                    )
                else:
                    assert result == alone, (call, what, form, place)
                if became is None:
                    break


class Summing:
    def __init__(self, backend: sb.StateBackend) -> None:
        self.keyed: Any = backend.create_keyed_backend(int, max_parallelism=16)
        self.fuse = Fuse()
        self.other: Any = self.keyed.get_state(sb.ValueStateDescriptor("other", int))
        self.state: Any = self.keyed.get_state(sb.ReducingStateDescriptor("s", self.add, int))
        self.keyed.set_current_key(1)
        self.state.add(1)
        self.other.update(10)

    def add(self, old: int, new: int) -> int:
        self.fuse()
        return old + new


@pytest.mark.parametrize("call", ["add", "add_many"])
@pytest.mark.parametrize("by", ["function", "signal handler", "thread"])
def test_another_state_is_refused_while_a_function_runs(backend: sb.StateBackend, by: str, call: str) -> None:
    made = Summing(backend)
    codes: list[Any] = []

    def use() -> None:
        for each in (
            made.other.value,
            lambda: made.other.update(11),
            lambda: made.keyed.set_current_key(2),
            made.keyed.clear_current_key,
            made.keyed.mark,
            made.keyed.metrics,
        ):
            with pytest.raises(sb.UsageError) as caught:
                each()
            codes.append(caught.value.code)

    def in_a_thread() -> None:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    before = signal.signal(signal.SIGUSR1, lambda *_: use())
    try:
        made.fuse.then = {
            "function": use,
            "signal handler": lambda: signal.raise_signal(signal.SIGUSR1),
            "thread": in_a_thread,
        }[by]
        made.state.add(2) if call == "add" else made.state.add_many([1, 1], [1, 1])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert codes == ["USAGE.OVERLAPPING_CALL"] * 6
    assert made.keyed.current_key == 1
    assert (made.state.get(), made.other.value()) == (3, 10)
    made.keyed.close()


CALLS: dict[str, Callable[[Summing], Any]] = {
    "add": lambda made: made.state.add(2),
    "add_many": lambda made: made.state.add_many([1] * 40, [1] * 40),
    "add_many, changed": lambda made: made.state.add_many([1, 1], [1, 1], return_changed=True),
    "merge": lambda made: made.keyed.merge_namespaces(made.state.descriptor, "a", [sb.VOID, "b"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("by", ["function", "thread"])
def test_closing_waits_for_the_end_of_the_call(backend: sb.StateBackend, by: str, call: str) -> None:
    made = Summing(backend)
    thread = threading.Thread(target=made.keyed.close)
    made.fuse.then = made.keyed.close if by == "function" else thread.start
    made.keyed.set_current_namespace("b")
    made.state.add(5)
    made.keyed.set_current_namespace(sb.VOID)
    CALLS[call](made)  # complete: it would raise in a backend that is closed
    if by == "thread":
        thread.join()
    with pytest.raises(sb.ClosedError):
        made.state.get()
    made.keyed.close()


def test_a_mark_is_released_by_a_function_and_no_rollback_begins(backend: sb.StateBackend) -> None:
    made = Summing(backend)
    older, newer = made.keyed.mark(), made.keyed.mark()

    def release_and_try() -> None:
        made.keyed.release(newer)
        with pytest.raises(sb.UsageError, match="inside this backend"):
            made.keyed.rollback(older)

    made.fuse.then = release_and_try
    made.state.add(2)
    assert made.state.get() == 3
    assert made.keyed.mark() is not None
    assert (older.is_open, newer.is_open) == (True, False)
    made.keyed.rollback(older)
    made.keyed.set_current_key(1)
    assert made.state.get() == 1
    made.keyed.close()


def test_an_iteration_does_not_go_on_while_a_function_runs(backend: sb.StateBackend) -> None:
    made = Summing(backend)
    rows: Any = made.keyed.get_state(sb.ListStateDescriptor("rows", int))
    rows.update([1, 2, 3])
    steps = iter(rows)
    assert next(steps) == 1

    def go_on() -> None:
        with pytest.raises(sb.UsageError, match="inside this backend"):
            next(steps)

    made.fuse.then = go_on
    made.state.add(2)
    assert list(steps) == [2, 3]
    for _ in rows:  # the body of a loop is not inside a call
        made.state.add(1)
    assert made.state.get() == 6
    made.keyed.close()


@pytest.mark.parametrize("call", ["add", "add_many"])
def test_an_iteration_of_timers_that_ends_in_a_call_moves_no_key(backend: sb.StateBackend, call: str) -> None:
    made = Summing(backend)
    for key in (7, 8):
        made.keyed.set_current_key(key)
        made.state.add(key)
        made.keyed.timers.register_event_time_timer(key)
    made.keyed.set_current_key(1)
    steps = made.keyed.timers.due(10)
    assert next(steps) == 7
    made.fuse.then = steps.close
    made.state.add(100) if call == "add" else made.state.add_many([7, 8], [60, 40])
    assert made.keyed.current_key == 1
    held = []
    for key in (1, 7, 8):
        made.keyed.set_current_key(key)
        held.append(made.state.get())
    assert held == ([1, 107, 8] if call == "add" else [1, 67, 48])
    made.keyed.close()


@pytest.mark.parametrize("read", ["get", "values"])
def test_an_iteration_of_timers_that_ends_in_a_read_moves_no_key(backend: sb.StateBackend, read: str) -> None:
    clock = SimpleNamespace(time=1000, now=lambda: clock.time)
    keyed: Any = backend.create_keyed_backend(int, max_parallelism=4, clock=clock)
    shown = sb.StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp
    ttl = sb.StateTtlConfig(ttl=10, state_visibility=shown, cleanup_in_background=False)
    declared = sb.types.LIST(sb.types.of(BoxSerializer()))
    state = keyed.get_state(sb.MapStateDescriptor("m", int, declared).enable_time_to_live(ttl))
    for key in (1, 2):
        keyed.set_current_key(key)
        state.put_all({1: [Box(key)], 2: [Box(key)]})
    keyed.set_current_key(1)
    keyed.timers.register_event_time_timer(5)
    clock.time = 5000
    keyed.set_current_key(2)
    steps = keyed.timers.due(7)
    assert next(steps) == 5
    FUSE.then = steps.close
    assert (state.get(1) if read == "get" else next(iter(state.values()))) == [Box(1)]
    assert keyed.current_key == 2
    assert state.get(1) == [Box(2)]  # the read removed the entry of key 1, and only that
    keyed.set_current_key(1)
    assert state.get(1) is None
    assert state.get(2) == [Box(1)]
    keyed.close()


def test_a_refused_step_leaves_an_iteration_of_timers_open(backend: sb.StateBackend) -> None:
    made = Summing(backend)
    for key in (1, 2, 3):
        made.keyed.set_current_key(key)
        made.keyed.timers.register_event_time_timer(key)
    steps = made.keyed.timers.due(10)

    def go_on() -> None:
        with pytest.raises(sb.UsageError, match="inside this backend"):
            next(steps)

    fired = []
    for timestamp in steps:
        fired.append((timestamp, made.keyed.current_key))
        made.fuse.then = go_on
        made.state.add_many([1, 1], [1, 1])
    assert fired == [(1, 1), (2, 2), (3, 3)]
    assert made.keyed.current_key == 3
    made.keyed.close()


@pytest.mark.parametrize("call", ["add_many", "update_many of objects", "clear_key"])
def test_a_signal_handler_in_a_call_does_not_move_its_key(backend: sb.StateBackend, call: str) -> None:
    if backend.name == "reference":
        pytest.skip("plain Python, in which a handler runs anywhere")
    made = Summing(backend)
    boxes: Any = made.keyed.get_state(sb.ValueStateDescriptor("boxes", sb.types.of(BoxSerializer())))
    calls = {
        "add_many": lambda: made.state.add_many([1, 2, 3], [1, 1, 1]),
        "update_many of objects": lambda: boxes.update_many([1, 2, 3], [Box(1), Box(2), Box(3)]),
        "clear_key": made.keyed.clear_key,
    }
    tried, halves = 0, set()

    def move(*_: Any) -> None:
        nonlocal tried
        tried += 1
        with contextlib.suppress(sb.UsageError):
            made.keyed.set_current_key(77)

    before = signal.signal(signal.SIGALRM, move)
    delays = random.Random(5)
    try:
        for _ in range(1000):
            if call == "clear_key":
                made.keyed.set_current_key(77)
                made.state.add(1)
                boxes.update(Box(1))
                made.keyed.set_current_key(3)
            signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-6, 1e-4))
            calls[call]()
            signal.setitimer(signal.ITIMER_REAL, 0)
            made.keyed.set_current_key(77)
            halves.add((made.state.get() is None, boxes.value() is None))
            made.keyed.clear_key()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tried > 30
    # Key 77 is left alone. A handler that ran before clear_key() began had it clear all of key 77.
    assert halves <= ({(False, False), (True, True)} if call == "clear_key" else {(True, True)})
    made.keyed.set_current_key(3)
    expected = {"add_many": (1000, None), "update_many of objects": (None, Box(3)), "clear_key": (None, None)}
    assert (made.state.get(), boxes.value()) == expected[call]
    made.keyed.close()


def test_a_child_closes_the_backend_of_a_parent_whose_thread_is_inside(backend: sb.StateBackend) -> None:
    made = Summing(backend)
    is_inside, may_end = threading.Event(), threading.Event()
    made.fuse.then = lambda: (is_inside.set(), may_end.wait())
    thread = threading.Thread(target=made.state.add, args=[2])
    thread.start()
    is_inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        made.keyed.close()
        try:
            made.keyed.set_current_key(1)
        except sb.ClosedError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    may_end.set()
    thread.join()
    assert status == 0
    made.keyed.set_current_key(1)
    assert made.state.get() == 3
    made.keyed.close()


def test_a_refused_clear_key_leaves_the_namespace_of_the_call(backend: sb.StateBackend) -> None:
    made = Summing(backend)
    made.state.add(1)
    made.keyed.set_current_namespace("w")
    made.state.add(10)

    def clear() -> None:
        with pytest.raises(sb.UsageError, match="inside this backend"):
            made.keyed.clear_key()

    made.fuse.then = clear
    made.state.add(100)
    assert made.state.get() == 110
    made.keyed.set_current_namespace(sb.VOID)
    assert made.state.get() == 2
    made.keyed.close()


def test_apply_to_all_keys_is_not_a_call(backend: sb.StateBackend) -> None:
    made = Summing(backend)
    made.keyed.apply_to_all_keys(made.state.descriptor, lambda key, state: made.other.update(key + 5))
    assert made.other.value() == 6
    made.keyed.close()
