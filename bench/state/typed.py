"""Our side by type: values, keys or map keys of one `Kind`, one by one and in batches.

Each operation is that of the same name in ``TypesBench.java``; those in batches have no counterpart there.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

import statebackend as sb
from bench.flink.keys import Int64Array
from bench.state.kinds import KINDS, Kind
from bench.state.lockstep import Rounds, WrongResult
from bench.state.loops import LOOPS
from bench.state.operations import MAP_ENTRIES, MapGet, MapUpdate, contents, parts_of

_BIGINT = KINDS["bigint"]


def keyed_backend(backend: str, key_kind: Kind, max_parallelism: int) -> Any:
    """An empty backend that runs batches on one thread."""
    options = {"threads": 1} if backend == "heap" else {}
    return sb.create_backend(backend, **options).create_keyed_backend(
        key_kind.type, max_parallelism=max_parallelism
    )


class Typed(ABC):
    """A contender: one operation on one state, filled before the first round."""

    #: Whether it is the keys of the backend that are of the kind; else they are LONG.
    of_keys: ClassVar[bool] = False

    def __init__(
        self, kind: Kind, backend: str, rounds: Rounds, max_parallelism: int, loops: str = "each"
    ) -> None:
        self.kind, self.rounds, self.loops = kind, rounds, LOOPS[loops]
        self.key_kind = kind if self.of_keys else _BIGINT
        self.keyed = keyed_backend(backend, self.key_kind, max_parallelism)
        self.state = self.keyed.get_state(self.descriptor())
        for part in parts_of(rounds.keys):
            for key, number in zip(self.key_kind.objects(part), part.tolist(), strict=True):
                self.keyed.set_current_key(key)
                self.put(number)

    @classmethod
    @abstractmethod
    def expected(cls, kind: Kind, keys: Int64Array, rounds: int) -> Int64Array:
        """What the state has to hold after so many rounds: numbers for each key."""

    @abstractmethod
    def descriptor(self) -> Any:
        """The state."""

    @abstractmethod
    def put(self, number: int) -> None:
        """Put what is there before the first round under the current key."""

    @abstractmethod
    def read(self) -> list[int]:
        """The numbers that the state holds under the current key."""

    @abstractmethod
    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        """Make the input of a round, all fresh objects; what is timed."""

    def run_round(self, number: int) -> int:
        order = self.rounds.order(number)
        run = self.prepare(order, number)
        # What the input left behind is not to be collected within the timed part.
        gc.collect()
        begin = time.perf_counter_ns()
        returned = run()
        took = time.perf_counter_ns() - begin
        if not self.is_right(order, number, returned):
            raise WrongResult(
                f"{type(self).__name__} of {self.kind.name} read other values than were written"
            )
        if self.keyed.num_entries() != len(order):
            raise WrongResult(f"{type(self).__name__} of {self.kind.name} left another number of keys")
        return took

    def is_right(self, order: Int64Array, number: int, returned: Any) -> bool:
        """Whether a round returned what it had to."""
        return returned is None

    def contents(self) -> int:
        checksum = contents(self.held(part) for part in parts_of(self.rounds.keys))
        self.keyed.close()
        return checksum

    def held(self, keys: Int64Array) -> Int64Array:
        """What the state holds: numbers for each key, read through the handle."""
        rows = []
        for key in self.key_kind.objects(keys):
            self.keyed.set_current_key(key)
            rows.append(self.read())
        return np.array(rows, dtype=np.int64)

    def details(self) -> dict[str, Any]:
        return {}


class _OnValues(Typed):
    """A value of the kind under LONG keys, or LONG values under keys of the kind."""

    @property
    def value_kind(self) -> Kind:
        """What the values are."""
        return _BIGINT if self.of_keys else self.kind

    def descriptor(self) -> Any:
        return sb.ValueStateDescriptor("value", self.value_kind.type)

    def put(self, number: int) -> None:
        self.state.update(self.value_kind.make(number))

    def read(self) -> list[int]:
        return self.value_kind.numbers(self.state.value())


class ValueUpdate(_OnValues):
    """Overwrite the value of every key."""

    @classmethod
    def expected(cls, kind: Kind, keys: Int64Array, rounds: int) -> Int64Array:
        return (_BIGINT if cls.of_keys else kind).held(keys + rounds)

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        columns = self.key_kind.objects(order), self.value_kind.objects(order + (number + 1))
        return partial(self.loops.value_update, self.keyed, self.state, *columns)


class KeyUpdate(ValueUpdate):
    """Overwrite the LONG value of every key; the keys are of the kind."""

    of_keys = True


class ValueGet(_OnValues):
    """Read the value of every key."""

    @classmethod
    def expected(cls, kind: Kind, keys: Int64Array, rounds: int) -> Int64Array:
        return kind.held(keys)

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        return partial(self.loops.value_there, self.keyed, self.state, self.key_kind.objects(order))

    def is_right(self, order: Int64Array, number: int, returned: Any) -> bool:
        return bool(returned == len(order))


class UpdateMany(ValueUpdate):
    """Overwrite the values of all keys in one call, from Arrow."""

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        columns = self.key_kind.arrow(order), self.value_kind.arrow(order + (number + 1))
        return partial(self.state.update_many, *columns)


class GetMany(ValueGet):
    """Read the values of all keys in one call, to Arrow."""

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        return partial(self.state.get_many, self.key_kind.arrow(order))

    def is_right(self, order: Int64Array, number: int, returned: Any) -> bool:
        return bool(returned.equals(self.value_kind.arrow(order)))


class KeyAddMany(Typed):
    """Add one to the sums of all keys in one call, from Arrow; the keys are of the kind."""

    of_keys = True

    @classmethod
    def expected(cls, kind: Kind, keys: Int64Array, rounds: int) -> Int64Array:
        return _BIGINT.held(keys + rounds)

    def descriptor(self) -> Any:
        return sb.ReducingStateDescriptor("sum", "sum", sb.types.LONG)

    def put(self, number: int) -> None:
        self.state.add(number)

    def read(self) -> list[int]:
        return [self.state.get()]

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        return partial(self.state.add_many, self.key_kind.arrow(order), _BIGINT.arrow(np.ones_like(order)))


class _OnMaps(Typed):
    """Map keys of the kind, for the numbers 0 to 3 under each LONG key."""

    def descriptor(self) -> Any:
        return sb.MapStateDescriptor("map", self.kind.type, sb.types.LONG)

    def put(self, number: int) -> None:
        for map_number in range(MAP_ENTRIES):
            self.state.put(self.kind.make(map_number), number + map_number)

    def read(self) -> list[int]:
        numbers = range(MAP_ENTRIES)
        return [each for number in numbers for each in (number, self.state.get(self.kind.make(number)))]

    def map_keys(self, order: Int64Array, number: int) -> list[Any]:
        """The map key of each row of a round: the same for all, an object of its own for each."""
        return self.kind.objects(np.full(len(order), number % MAP_ENTRIES))


class MapPut(_OnMaps):
    """Overwrite one entry of the map of every key."""

    @classmethod
    def expected(cls, kind: Kind, keys: Int64Array, rounds: int) -> Int64Array:
        return MapUpdate().held(keys, rounds)

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        keys, _, values = MapUpdate().columns(order, number)
        loop = self.loops.map_update
        return partial(loop, self.keyed, self.state, keys, self.map_keys(order, number), values)


class MapRead(_OnMaps):
    """Read one entry of the map of every key."""

    @classmethod
    def expected(cls, kind: Kind, keys: Int64Array, rounds: int) -> Int64Array:
        return MapGet().held(keys, rounds)

    def prepare(self, order: Int64Array, number: int) -> Callable[[], Any]:
        columns = order.tolist(), self.map_keys(order, number)
        return partial(self.loops.map_get, self.keyed, self.state, *columns)

    def is_right(self, order: Int64Array, number: int, returned: Any) -> bool:
        return bool(returned == MapGet().returned(order, number))


#: By name; those that Flink has too are ``bench.flink.TYPE_OPS``.
TYPED: dict[str, type[Typed]] = {
    "value_update": ValueUpdate,
    "value_get": ValueGet,
    "update_many": UpdateMany,
    "get_many": GetMany,
    "key_update": KeyUpdate,
    "key_add_many": KeyAddMany,
    "map_put": MapPut,
    "map_get": MapRead,
}


def make_typed(
    operation: str,
    kind: str,
    backend: str,
    rounds: Rounds,
    max_parallelism: int = 128,
    loops: str = "each",
) -> Typed:
    """The contender of an operation and a type, both by name."""
    return TYPED[operation](KINDS[kind], backend, rounds, max_parallelism, loops)


def expected(operation: str, kind: str, rounds: Rounds) -> int:
    """The checksum of what a contender has to hold after all rounds."""
    return contents(
        TYPED[operation].expected(KINDS[kind], part, rounds.count) for part in parts_of(rounds.keys)
    )
