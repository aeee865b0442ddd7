"""The timed loops, as a user would write them.

Each takes the backend, the handle and the columns of a round. Bound methods are looked up once, before the
loop. For the dict, an index and an assignment are the fastest there is: faster than ``get`` looked up once,
which would be its counterpart of a bound method.
"""

from __future__ import annotations

from typing import Any


class BackendLoops:
    """Through the state API: `each` over the keys, and the handle."""

    @staticmethod
    def value_update(backend: Any, state: Any, keys: list[Any], values: list[Any]) -> None:
        update = state.update
        for _, value in zip(backend.each(keys), values, strict=True):
            update(value)

    value_add = value_update

    @staticmethod
    def value_get(backend: Any, state: Any, keys: list[int]) -> int:
        value = state.value
        total = 0
        for _ in backend.each(keys):
            total += value()
        return total

    @staticmethod
    def value_there(backend: Any, state: Any, keys: list[Any]) -> int:
        """Reads values that cannot be added up; how many there were."""
        value = state.value
        total = 0
        for _ in backend.each(keys):
            if value() is not None:
                total += 1
        return total

    @staticmethod
    def value_rmw(backend: Any, state: Any, keys: list[int]) -> None:
        value, update = state.value, state.update
        for _ in backend.each(keys):
            update(value() + 1)

    @staticmethod
    def reducing_add(backend: Any, state: Any, keys: list[int]) -> None:
        add = state.add
        for _ in backend.each(keys):
            add(1)

    @staticmethod
    def map_get(backend: Any, state: Any, keys: list[int], map_keys: list[Any]) -> int:
        get = state.get
        total = 0
        for _, map_key in zip(backend.each(keys), map_keys, strict=True):
            total += get(map_key)
        return total

    @staticmethod
    def map_update(backend: Any, state: Any, keys: list[int], map_keys: list[Any], values: list[int]) -> None:
        put = state.put
        for _, map_key, value in zip(backend.each(keys), map_keys, values, strict=True):
            put(map_key, value)

    @staticmethod
    def map_iterate(backend: Any, state: Any, keys: list[int]) -> int:
        items = state.items
        total = 0
        for _ in backend.each(keys):
            for map_key, value in items():
                total += map_key + value
        return total

    @staticmethod
    def list_append(backend: Any, state: Any, keys: list[int], values: list[int]) -> None:
        add = state.add
        for _, value in zip(backend.each(keys), values, strict=True):
            add(value)

    @staticmethod
    def list_get(backend: Any, state: Any, keys: list[int]) -> int:
        get = state.get
        total = 0
        for _ in backend.each(keys):
            for element in get():
                total += element
        return total


class PlainLoops:
    """The same with `set_current_key` for each key."""

    @staticmethod
    def value_update(backend: Any, state: Any, keys: list[Any], values: list[Any]) -> None:
        set_current_key, update = backend.set_current_key, state.update
        for key, value in zip(keys, values, strict=True):
            set_current_key(key)
            update(value)

    value_add = value_update

    @staticmethod
    def value_get(backend: Any, state: Any, keys: list[int]) -> int:
        set_current_key, value = backend.set_current_key, state.value
        total = 0
        for key in keys:
            set_current_key(key)
            total += value()
        return total

    @staticmethod
    def value_there(backend: Any, state: Any, keys: list[Any]) -> int:
        """Reads values that cannot be added up; how many there were."""
        set_current_key, value = backend.set_current_key, state.value
        total = 0
        for key in keys:
            set_current_key(key)
            if value() is not None:
                total += 1
        return total

    @staticmethod
    def value_rmw(backend: Any, state: Any, keys: list[int]) -> None:
        set_current_key, value, update = backend.set_current_key, state.value, state.update
        for key in keys:
            set_current_key(key)
            update(value() + 1)

    @staticmethod
    def reducing_add(backend: Any, state: Any, keys: list[int]) -> None:
        set_current_key, add = backend.set_current_key, state.add
        for key in keys:
            set_current_key(key)
            add(1)

    @staticmethod
    def map_get(backend: Any, state: Any, keys: list[int], map_keys: list[Any]) -> int:
        set_current_key, get = backend.set_current_key, state.get
        total = 0
        for key, map_key in zip(keys, map_keys, strict=True):
            set_current_key(key)
            total += get(map_key)
        return total

    @staticmethod
    def map_update(backend: Any, state: Any, keys: list[int], map_keys: list[Any], values: list[int]) -> None:
        set_current_key, put = backend.set_current_key, state.put
        for key, map_key, value in zip(keys, map_keys, values, strict=True):
            set_current_key(key)
            put(map_key, value)

    @staticmethod
    def map_iterate(backend: Any, state: Any, keys: list[int]) -> int:
        set_current_key, items = backend.set_current_key, state.items
        total = 0
        for key in keys:
            set_current_key(key)
            for map_key, value in items():
                total += map_key + value
        return total

    @staticmethod
    def list_append(backend: Any, state: Any, keys: list[int], values: list[int]) -> None:
        set_current_key, add = backend.set_current_key, state.add
        for key, value in zip(keys, values, strict=True):
            set_current_key(key)
            add(value)

    @staticmethod
    def list_get(backend: Any, state: Any, keys: list[int]) -> int:
        set_current_key, get = backend.set_current_key, state.get
        total = 0
        for key in keys:
            set_current_key(key)
            for element in get():
                total += element
        return total


class DictLoops:
    """The same on a plain dict: of values, of dicts, of lists."""

    @staticmethod
    def value_update(plain: dict[int, int], keys: list[int], values: list[int]) -> None:
        for key, value in zip(keys, values, strict=True):
            plain[key] = value

    value_add = value_update

    @staticmethod
    def value_get(plain: dict[int, int], keys: list[int]) -> int:
        total = 0
        for key in keys:
            total += plain[key]
        return total

    @staticmethod
    def value_rmw(plain: dict[int, int], keys: list[int]) -> None:
        for key in keys:
            plain[key] = plain[key] + 1

    reducing_add = value_rmw

    @staticmethod
    def map_get(plain: dict[int, dict[int, int]], keys: list[int], map_keys: list[int]) -> int:
        total = 0
        for key, map_key in zip(keys, map_keys, strict=True):
            total += plain[key][map_key]
        return total

    @staticmethod
    def map_update(
        plain: dict[int, dict[int, int]], keys: list[int], map_keys: list[int], values: list[int]
    ) -> None:
        for key, map_key, value in zip(keys, map_keys, values, strict=True):
            plain[key][map_key] = value

    @staticmethod
    def map_iterate(plain: dict[int, dict[int, int]], keys: list[int]) -> int:
        total = 0
        for key in keys:
            for map_key, value in plain[key].items():
                total += map_key + value
        return total

    @staticmethod
    def list_append(plain: dict[int, list[int]], keys: list[int], values: list[int]) -> None:
        for key, value in zip(keys, values, strict=True):
            plain[key].append(value)

    @staticmethod
    def list_get(plain: dict[int, list[int]], keys: list[int]) -> int:
        total = 0
        for key in keys:
            for element in plain[key]:
                total += element
        return total


#: Ways to go over keys.
LOOPS = {"each": BackendLoops, "plain loop": PlainLoops}
