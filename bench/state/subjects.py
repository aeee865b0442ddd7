"""What the operations are carried out on: a backend of ours, or a dict of values, dicts or lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import statebackend as sb
from bench.flink.keys import Int64Array
from bench.state.loops import LOOPS, DictLoops
from bench.state.operations import MAP_ENTRIES

#: Nothing expires during a run, as in ``bench.flink``: what is measured is the cost of having it.
LONGER_THAN_ANY_RUN = 86_400_000
TTL_CONFIGS: dict[str, Callable[[], sb.StateTtlConfig]] = {
    "default": lambda: sb.StateTtlConfig.new_builder(LONGER_THAN_ANY_RUN).build(),
    "no_cleanup": lambda: (
        sb.StateTtlConfig.new_builder(LONGER_THAN_ANY_RUN).disable_cleanup_in_background().build()
    ),
}


class BackendSubject:
    """A state of a keyed backend with LONG keys, all key groups in one instance, and its handle."""

    def __init__(
        self, backend_name: str, kind: str, max_parallelism: int, ttl: str = "off", loops: str = "each"
    ) -> None:
        self.kind, self.loops = kind, LOOPS[loops]
        self.factory = sb.create_backend(backend_name)
        self.max_parallelism = max_parallelism
        self.ttl = ttl
        self.keyed: Any = None
        self.clear()

    def clear(self) -> None:
        """An empty backend instead of the one before."""
        self.close()
        self.keyed = self.factory.create_keyed_backend(sb.types.LONG, max_parallelism=self.max_parallelism)
        self.state = self.keyed.get_state(self._descriptor())

    def _descriptor(self) -> Any:
        long = sb.types.LONG
        descriptor: Any
        if self.kind == "value":
            descriptor = sb.ValueStateDescriptor("value", long)
        elif self.kind == "reducing":
            descriptor = sb.ReducingStateDescriptor("sum", "sum", long)
        elif self.kind == "map":
            descriptor = sb.MapStateDescriptor("map", long, long)
        else:
            descriptor = sb.ListStateDescriptor("list", long)
        if self.ttl != "off":
            descriptor.enable_time_to_live(TTL_CONFIGS[self.ttl]())
        return descriptor

    def fill(self, columns: tuple[list[Any], ...]) -> None:
        """Put what is there before the first round."""
        put = {"value": "update", "reducing": "add", "map": "put", "list": "add"}[self.kind]
        call = getattr(self.state, put)
        for key, *arguments in zip(*columns, strict=True):
            self.keyed.set_current_key(key)
            call(*arguments)

    def loop(self, name: str) -> Callable[..., int | None]:
        """The timed loop of an operation, bound to the backend and the handle."""
        run, keyed, state = getattr(self.loops, name), self.keyed, self.state
        return lambda *columns: run(keyed, state, *columns)

    def entries(self) -> int:
        """How many keys have the state."""
        return int(self.keyed.num_entries())

    def held(self, keys: Int64Array) -> Int64Array:
        """What the state holds: a row of numbers for each key, read through the handle."""
        state, rows = self.state, []
        read: Callable[[], list[int]] = {
            "value": lambda: [state.value()],
            "reducing": lambda: [state.get()],
            "map": lambda: [number for k in range(MAP_ENTRIES) for number in (k, state.get(k))],
            "list": lambda: state.get(),
        }[self.kind]
        for key in keys.tolist():
            self.keyed.set_current_key(key)
            rows.append(read())
        return np.array(rows, dtype=np.int64)

    def close(self) -> None:
        """Drop the backend."""
        if self.keyed is not None:
            self.keyed.close()
            self.keyed = None


class DictSubject:
    """A plain dict, with the methods of `BackendSubject`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.plain: dict[int, Any] = {}

    def clear(self) -> None:
        """An empty dict instead of the one before."""
        self.plain = {}

    def fill(self, columns: tuple[list[Any], ...]) -> None:
        """Put what is there before the first round."""
        for key, *arguments in zip(*columns, strict=True):
            if self.kind == "map":
                map_key, value = arguments
                self.plain.setdefault(key, {})[map_key] = value
            elif self.kind == "list":
                self.plain.setdefault(key, []).extend(arguments)
            else:
                (self.plain[key],) = arguments

    def loop(self, name: str) -> Callable[..., int | None]:
        """The timed loop of an operation, bound to the dict."""
        run, plain = getattr(DictLoops, name), self.plain
        return lambda *columns: run(plain, *columns)

    def entries(self) -> int:
        """How many keys there are."""
        return len(self.plain)

    def held(self, keys: Int64Array) -> Int64Array:
        """What the dict holds: a row of numbers for each key."""
        read: Callable[[Any], list[int]] = {
            "value": lambda value: [value],
            "reducing": lambda value: [value],
            "map": lambda value: [number for k in range(MAP_ENTRIES) for number in (k, value[k])],
            "list": lambda value: value,
        }[self.kind]
        return np.array([read(self.plain[key]) for key in keys.tolist()], dtype=np.int64)

    def close(self) -> None:
        """Drop the dict."""
        self.plain = {}
