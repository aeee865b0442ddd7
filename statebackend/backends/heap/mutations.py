"""The debug mode ``check_mutations``: finds objects that were changed in place, without an `update`.

The backend keeps objects of PICKLE and of a user's serializer by reference. Whoever changes one in place also changes
what a mark or a snapshot still needs. So this mode notes every object that goes in or out with its serialised form,
and compares the two at the next mark or snapshot. Every access costs a serialisation and keeps the object alive, so
use it in tests only.

>>> from statebackend import types
>>> from statebackend.backends.heap import HeapBackend
>>> from statebackend.state import ValueStateDescriptor
>>> keyed = HeapBackend(check_mutations=True).create_keyed_backend(str, max_parallelism=1)
>>> tags = keyed.get_value_state(ValueStateDescriptor("tags", types.PICKLE))
>>> keyed.set_current_key("a")
>>> tags.update(["x"])
>>> tags.value().append("y")
>>> keyed.mark()
Traceback (most recent call last):
statebackend.errors.MutationError: an object of type list was changed in place (state 'tags', key group 0)...
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from statebackend.errors import MutationError


class _WatchedObject(NamedTuple):
    value: Any
    data: bytes
    group: int
    #: The number of checks made before the object was noted.
    checks: int


class MutationWatcher:
    """Remembers the objects that a backend has taken or given, by where they are stored."""

    def __init__(self) -> None:
        self._noted: dict[Any, list[_WatchedObject]] = {}
        self._serialize: dict[str, Any] = {}
        self._checks = 0
        self._found: MutationError | None = None

    def note(self, state: Any, value: Any, map_key: Any = None, written: bool = True) -> None:
        """Note an object that was stored at, or read from, the current key.

        A read does not excuse a change: the object stays noted as it was, until it is written.
        """
        place = self._place(state, map_key)
        noted = self._noted.setdefault(place, [])
        serialize = partial(state.backend._run, state.codec.serializer.serialize)
        data = b"" if value is None else serialize(value)
        for at, each in enumerate(noted):
            if each.value is value:
                if each.data != data and each.checks < self._checks and self._found is None:
                    # The same object, but changed: it has also changed what the last mark or snapshot relies on.
                    self._found = self._error(place, each)
                if written or each.data == data:
                    noted[at] = each._replace(data=data, checks=self._checks)
                return
        self._serialize[place[0]] = serialize
        noted.append(_WatchedObject(value, data, state.backend._key_group, self._checks))

    def note_all(self, state: Any, values: list[Any]) -> None:
        """Note objects that were appended to the current key's list."""
        for value in values:
            self.note(state, value)

    def forget(self, state: Any, map_key: Any = None) -> None:
        """Forget the objects of the current key, or of one of its map keys: the user removes them."""
        place = self._place(state, map_key)
        if map_key is not None or state.descriptor.kind != "map":
            self._noted.pop(place, None)
            return
        for other in [each for each in self._noted if each[:3] == place[:3]]:
            del self._noted[other]

    def check(self) -> None:
        """Raise `MutationError` for the first object that has changed. O(all of them)."""
        found, self._found = self._found, None
        if found is not None:
            raise found
        for place, noted in self._noted.items():
            for each in noted:
                if each.value is not None and self._serialize[place[0]](each.value) != each.data:
                    raise self._error(place, each)
            if place[4]:
                del noted[:-1]
        self._checks += 1

    def start_over(self) -> None:
        """Forget everything: the state has been replaced."""
        self._noted.clear()
        self._found = None

    def _place(self, state: Any, map_key: Any) -> Any:
        backend = state.backend
        is_single = state.descriptor.kind != "list"
        return state.descriptor.name, backend._key, backend._namespace, map_key, is_single

    def _error(self, place: Any, noted: _WatchedObject) -> MutationError:
        return MutationError(
            f"an object of type {type(noted.value).__name__} was changed in place",
            detail=f"state {place[0]!r}, key group {noted.group}",
            hint="change it and update(...) in the batch in which it was read",
        )
