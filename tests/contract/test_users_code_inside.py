"""The user's code within an operation moves, reads and writes: a serializer, a copy, an iterable, a function.

An operation is for the key and namespace that were current when it began. What the user's code has made current stays
so afterwards. Every backend does what `reference` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import statebackend as sb
from statebackend._core.memory.arena import is_checked_build
from statebackend.state import StateTtlConfig

pytestmark = pytest.mark.checked

KEYS, SPACES = (1, 2, 3, 77), (sb.VOID, "w", "z")


class Fuse:
    """Runs something once, where it is lit."""

    def __init__(self) -> None:
        self.then: Callable[[], Any] | None = None

    def __call__(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()


#: One for all: types that are equal share a serializer.
FUSE = Fuse()


class Box:
    """An object that only its serializer knows."""

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


class NumberSerializer(sb.types.Serializer):
    type_name = "number"

    def serialize(self, value: int) -> bytes:
        FUSE()
        return str(value).encode()

    def deserialize(self, data: bytes) -> int:
        FUSE()
        return int(data)

    def copy(self, value: int) -> int:
        FUSE()
        return value


class Case:
    """A state on a backend, filled, with the user's code in it, and what is done to it."""

    def __init__(
        self, backend: sb.StateBackend, kind: str, form: str, *, expires: bool, is_new: bool
    ) -> None:
        self.kind = kind
        self.keyed: Any = backend.create_keyed_backend(int, max_parallelism=16)
        descriptor: Any = self.descriptor(form)
        if expires:
            descriptor = descriptor.enable_time_to_live(StateTtlConfig(ttl=10**9))
        self.state: Any = self.keyed.get_state(descriptor)
        for key in KEYS[:3]:
            for space in SPACES[:2]:
                if key != 1 or not is_new:
                    self.go(key, space)
                    self.fill(10 * key)
        self.go(1, sb.VOID)

    def descriptor(self, form: str) -> Any:
        declared: Any
        if form == "object":
            declared, self.make = sb.types.of(BoxSerializer()), Box
        else:
            declared, self.make = sb.types.LIST(sb.types.of(NumberSerializer())), lambda number: [number]

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

    def look(self) -> Any:
        state = self.state
        return {
            "value": lambda: state.value(),
            "list": lambda: list(state.get()),
            "map": lambda: sorted(
                state.items(), key=lambda item: item[0]
            ),  # each backend has an order of its own
            "reducing": lambda: state.get(),
            "folding": lambda: state.get(),
        }[self.kind]()

    def all(self) -> list[Any]:
        found = []
        for key in KEYS:
            for space in SPACES:
                self.go(key, space)
                found.append(self.look())
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
        "update to nothing": lambda c: c.state.update(FUSE() or ()),
        "get": lambda c: list(c.state.get()),
    },
    "map": {
        "put": lambda c: c.state.put(1, c.make(99)),
        "put a new one": lambda c: c.state.put(7, c.make(99)),
        "put_all": lambda c: c.state.put_all({1: c.make(99), 8: c.make(98)}),
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


def read_elsewhere(case: Case, key: int) -> None:
    case.keyed.set_current_key(key)
    case.look()


def there_and_back(case: Case) -> None:
    write_elsewhere(case)
    case.keyed.set_current_key(1)


def read_in_another_namespace(case: Case) -> None:
    case.keyed.set_current_namespace("w")
    case.look()


def clear_another_namespace(case: Case) -> None:
    case.keyed.set_current_namespace("w")
    case.state.clear()
    case.keyed.set_current_namespace(sb.VOID)


def write_in_a_new_namespace(case: Case) -> None:
    case.keyed.set_current_namespace("z")
    case.fill(50)


DOES: dict[str, Callable[[Case], Any]] = {
    "another key": lambda c: c.keyed.set_current_key(2),
    "reads another key": lambda c: read_elsewhere(c, 2),
    "reads a new key": lambda c: read_elsewhere(c, 77),
    "writes another key": write_elsewhere,
    "there and back": there_and_back,
    "another namespace": lambda c: c.keyed.set_current_namespace("w"),
    "reads another namespace": read_in_another_namespace,
    "clears another namespace": clear_another_namespace,
    "writes a new namespace": write_in_a_new_namespace,
}


def outcome(
    backend: sb.StateBackend, kind: str, form: str, operation: str, does: str, marked: bool, expires: bool
) -> list[Any]:
    """What an operation gives, what is there afterwards, and after a rollback; for a key that has state, or none."""
    found: list[Any] = []
    for is_new in (False, True):
        case = Case(backend, kind, form, expires=expires, is_new=is_new)
        keyed, begun = case.keyed, "no key was set"
        mark = keyed.mark() if marked else None
        FUSE.then = lambda case=case: DOES[does](case)  # type: ignore[misc]
        try:
            begun = OPERATIONS[kind][operation](case)
        except (sb.UsageError, RuntimeError) as error:
            begun = str(error)
        was_run, FUSE.then = FUSE.then is None, None
        found.append((begun, was_run, keyed.current_key, keyed.current_namespace))
        case.fill(71)
        found += [case.look(), case.all()]
        for table in (getattr(case.state, name, None) for name in ("plain", "spaced")):
            if table is not None:
                table._check()
        if mark is not None:
            keyed.rollback(mark)
            keyed.release(mark)
            found.append(case.all())
        keyed.close()
    return found


@pytest.mark.parametrize(
    ("marked", "expires"),
    [(False, False), (True, False), (True, True)],
    ids=["", "marked", "marked, expiring"],
)
@pytest.mark.parametrize("form", ["object", "nested"])
@pytest.mark.parametrize(
    ("kind", "operation"), [(kind, operation) for kind, each in OPERATIONS.items() for operation in each]
)
def test_an_operation_is_for_what_was_current_when_it_began(
    backend: sb.StateBackend, kind: str, operation: str, form: str, marked: bool, expires: bool
) -> None:
    if backend.name == "reference":
        pytest.skip("the others are compared with it")
    if is_checked_build() and form == "object" and marked:
        pytest.skip("the checked build takes a copy that uses the backend for an overlap of calls")
    reference = sb.create_backend("reference")
    for does in DOES:
        options = (kind, form, operation, does, marked, expires)
        # Where a backend runs no code of the user's, nothing has moved; not every backend copies or serialises then.
        here, there = outcome(backend, *options), outcome(reference, *options)
        if [each[1] for each in here if type(each) is tuple] == [
            each[1] for each in there if type(each) is tuple
        ]:
            assert here == there, does
