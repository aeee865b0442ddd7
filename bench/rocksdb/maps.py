"""One entry of a map that a `ValueState` holds, and one of a `MapState`: reading it, and writing it.

>>> held = Held("heap", "map", 3, 2)
>>> rows = held.prepared(5)
>>> held.check_write(rows, held.time_write(rows))
>>> held.check()
>>> held.close()
"""

from __future__ import annotations

import random
from typing import Any

import statebackend as sb

__all__ = ["KINDS", "OPERATIONS", "Held"]

#: A value of MAP, a value of PICKLE that is a dict, a map state.
KINDS = ("value", "pickle", "map")
OPERATIONS = ("read", "write")


class Held:
    """Maps of one size, one for each of some keys, as one kind of state on one backend."""

    def __init__(self, backend: str, kind: str, entries: int, keys: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._kind = kind
        self._names = [f"the name of entry {number}" for number in range(entries)]
        self._keyed = sb.create_backend(backend).create_keyed_backend(int)
        self._keys = [number * 1_000_003 for number in range(keys)]
        self._wanted = {key: dict.fromkeys(self._names, key % 1000) for key in self._keys}
        if kind == "map":
            self._state: Any = self._keyed.get_map_state(sb.MapStateDescriptor("held", str, int))
        else:
            declared = dict[str, int] if kind == "value" else sb.types.PICKLE
            self._state = self._keyed.get_value_state(sb.ValueStateDescriptor("held", declared))
        write = self._state.put_all if kind == "map" else self._state.update
        for key, held in self._wanted.items():
            self._keyed.set_current_key(key)
            write(dict(held))
        if backend == "rocksdb":  # what is read lies in files, as most of a large state does
            database = self._keyed.scratch.database
            database.flush()
            database.wait_for_compactions()

    def prepared(self, times: int) -> list[tuple[int, str]]:
        """Keys and names in random order, all of them fresh objects, as the rows of a batch have."""
        pick = self._random.choice
        return [(int(str(pick(self._keys))), "".join(list(pick(self._names)))) for _ in range(times)]

    def time_read(self, rows: list[tuple[int, str]]) -> int:
        """The timed loop: read one entry for each row; their sum."""
        set_current_key, total = self._keyed.set_current_key, 0
        if self._kind != "map":
            value = self._state.value
            for key, name in rows:
                set_current_key(key)
                total += value()[name]
        else:
            get = self._state.get
            for key, name in rows:
                set_current_key(key)
                total += get(name)
        return total

    def time_write(self, rows: list[tuple[int, str]]) -> int:
        """The timed loop: write one entry for each row, whatever it was; how many there were."""
        set_current_key, number = self._keyed.set_current_key, 0
        if self._kind != "map":
            value, update = self._state.value, self._state.update
            for key, name in rows:
                set_current_key(key)
                held = value()
                held[name] = number
                update(held)
                number += 1
        else:
            put = self._state.put
            for key, name in rows:
                set_current_key(key)
                put(name, number)
                number += 1
        return number

    def check_read(self, rows: list[tuple[int, str]], total: int) -> None:
        """Compare a sum with what was written."""
        if total != sum(self._wanted[key][name] for key, name in rows):
            raise AssertionError("other entries were read than were written")

    def check_write(self, rows: list[tuple[int, str]], count: int) -> None:
        """Note what was written, for `check`."""
        for number, (key, name) in enumerate(rows):
            self._wanted[key][name] = number
        if count != len(rows):
            raise AssertionError("not all rows were written")

    def check(self) -> None:
        """Every map is what was written."""
        for key, wanted in self._wanted.items():
            self._keyed.set_current_key(key)
            found = dict(self._state.items()) if self._kind == "map" else self._state.value()
            if found != wanted:
                raise AssertionError("the state is not what was written")

    def close(self) -> None:
        """Let go of the state."""
        self._keyed.close()
