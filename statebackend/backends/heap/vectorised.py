"""The vectorised methods of value, list and map states: whole columns through the batch kernels.

Arrow and numpy columns make no Python object per row; see `stored_columns`. Rows may be in many namespaces, and have
times of their own. Those in `VOID` lie in a table of their own, so a call that has both goes to each table with its
rows. Some states go row by row, as `statebackend.state.vectorised` does it: states of objects (PICKLE and a user's own
serializer), lists with a time to live, and `clear_many` of map states.

Each class stands between a compiled handle and the interface: ``class HeapValueState(ValueHandle, ValueColumns)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend._core.batches import adding_kernels, expiring_kernels, gathering, kernels, map_kernels
from statebackend._core.tables.accumulators import AddPlan
from statebackend.columns.nested_columns import encoded_keys
from statebackend.columns.stored_columns import Array, Column, arrow_column, value_column
from statebackend.errors import MemoryLimitError, SerializationError
from statebackend.keys import NamespaceColumn, count_of, key_encoder, namespace_column, take_rows
from statebackend.state import (
    KeyedListState,
    KeyedState,
    MapState,
    ValueState,
    check_lengths,
    times_of_rows,
    to_values,
)
from statebackend.types import Type


@dataclass(frozen=True)
class Call:
    """The rows of a vectorised call, checked."""

    #: In canonical form.
    keys: Any
    #: None: all rows are in the current namespace.
    namespaces: NamespaceColumn | None
    #: The time that the state goes by: of all rows, or of each.
    times: int | Array

    def __len__(self) -> int:
        return count_of(self.keys)


@dataclass(frozen=True)
class Part:
    """The rows of a call that lie in one table: those in `VOID`, or those in other namespaces."""

    keys: Any
    #: The number of the namespace of all rows, or of each.
    namespace: int | Array
    #: As those of the call.
    times: int | Array
    is_spaced: bool
    #: Their numbers among the rows of the call; None: they are all of it.
    rows: Array | None

    def __len__(self) -> int:
        return count_of(self.keys)

    def of(self, values: Any) -> Any:
        """Their values, of a column of the call; None if there is none."""
        return values if self.rows is None or values is None else take_rows(values, self.rows)

    def chosen(self, rows: Array, times_of: Array) -> Part:
        """Some of the rows, each at the time of another one."""
        space, times = self.namespace, self.times
        return replace(
            self,
            keys=take_rows(self.keys, rows),
            namespace=space[rows] if isinstance(space, np.ndarray) else space,
            times=times[times_of] if isinstance(times, np.ndarray) else times,
        )


class ColumnsState(KeyedState):
    """The shared part: keys, namespaces and values as columns, the tables that they lie in, their times."""

    __slots__ = ()

    # Provided by the compiled handle, which comes first in the class.
    backend: Any
    descriptor: Any
    codec: Any
    plain: Any
    _current_number: Any
    _table_of: Any
    _clean_some: Any
    _count_expired: Any
    _note_times: Any

    @property
    def _holds_objects(self) -> bool:
        return bool(self.codec.layout == "object")

    def _call(self, keys: Any, namespaces: Any, times: Any) -> Call:
        """Check the rows of a call, and read the clock."""
        self.backend._check_open()
        canonical = encoded_keys(self.backend._encoder, keys)
        spaces = None if namespaces is None else namespace_column(namespaces)
        own = times_of_rows(self, times)
        columns = [] if spaces is None else [spaces.numbers]
        check_lengths(range(count_of(canonical)), *columns, *([] if own is None else [own]))
        if not self._ttl() or own is None or not len(own):
            return Call(canonical, spaces, self.backend.begin_call(self))
        self.backend.read_clock_once()
        self._note_times(int(own.max()), int(own.min()))
        return Call(canonical, spaces, own)

    def _value_column(self, column: Any, declared: Type, nullable: bool = True) -> Column:
        with self._naming_state():
            return value_column(column, declared, nullable)

    @contextmanager
    def _naming_state(self) -> Iterator[None]:
        """Add the state's name to errors of values and of the memory limit."""
        try:
            yield
        except (MemoryLimitError, SerializationError) as error:
            raise error.at(f"state {self.descriptor.name!r}") from None

    # --- rows and tables ---

    @contextmanager
    def _parts(self, call: Call, assigns: bool) -> Iterator[list[Part]]:
        """The parts of a call. Numbers of namespaces are held meanwhile; ``assigns`` gives numbers to new ones.

        An error undoes all parts.
        """
        spaces, count = call.namespaces, len(call)
        if spaces is None or not count:
            number = self._current_number() if spaces is None else 0
            yield [Part(call.keys, number, call.times, number != 0, None)]
            return
        names = self.backend.core.namespaces
        held = names.hold_many(spaces.distinct, assigns)
        try:
            if len(held) == 1:
                yield [Part(call.keys, int(held[0]), call.times, held[0] != 0, None)]
                return
            numbers = held[spaces.numbers]
            in_void = numbers == 0
            if not in_void.any():
                yield [Part(call.keys, numbers, call.times, True, None)]
                return
            self.backend.check_groups_of(call.keys)
            whole = Part(call.keys, numbers, call.times, True, None)
            parts = []
            for rows, is_spaced in ((np.flatnonzero(in_void), False), (np.flatnonzero(~in_void), True)):
                part = replace(whole.chosen(rows, rows), rows=rows, is_spaced=is_spaced)
                parts.append(part if is_spaced else replace(part, namespace=0))
            with self.backend._undone_on_error():
                yield parts
        finally:
            names.let_go_many(held)

    def _collect(self, call: Call, read: Callable[[Part], pa.Array]) -> pa.Array:
        """The results of a read of all rows, in their order."""
        with self._naming_state(), self._parts(call, False) as parts:
            found = [read(part) for part in parts]
        if len(found) == 1:
            return found[0]
        rows = np.concatenate([part.rows for part in parts])
        return pa.concat_arrays(found).take(pa.array(np.argsort(rows)))

    def _options(self, part: Part) -> dict[str, Any]:
        """The options that every kernel takes."""
        has_bytes = self.codec.layout == "bytes"  # numbers take so little time that all threads are no worse
        threads = self.backend.free_threads() if has_bytes else self.backend.threads
        return {"namespace": part.namespace, "threads": threads}

    def _table(self, part: Part) -> Any:
        """The table of a part for reading; None if it was never written. Checks the keys' groups."""
        table = self._table_of(part.is_spaced, False)
        if table is None:
            kernels.find_many(self.plain, part.keys)
        return table

    def _table_to_write(self, part: Part) -> Any:
        return self._table_of(part.is_spaced, True)

    # --- time ---

    def _ttl(self) -> int:
        config = self.descriptor.ttl_config
        return 0 if config is None else config.ttl

    def _clean(self, call: Call) -> None:
        """Clean up for as many accesses as a call has rows."""
        if self._ttl():
            self._clean_some(len(call), self.backend.called_at)

    def _expiry(self, part: Part) -> dict[str, Any]:
        """The options of kernels that read state with a time to live."""
        config = self.descriptor.ttl_config
        return {"now": part.times, "ttl": config.ttl, "shows_expired": config.shows_expired}

    def _removal(self, part: Part) -> dict[str, Any]:
        """The options of kernels that remove what is dead, and renew what they read."""
        config, backend = self.descriptor.ttl_config, self.backend
        dead_at = None
        if config.is_in_event_time:
            dead_at = part.times if backend._event_now is None else backend._event_cleaned
        return {"renews": config.renews_on_read, "dead_at": dead_at}

    # --- what several kinds do alike ---

    def _exists_many(self, keys: Any, namespaces: Any, times: Any) -> pa.BooleanArray:
        def look(part: Part) -> pa.BooleanArray:
            table = self._table(part)
            if table is None:
                return pa.array(np.zeros(len(part), dtype=bool))
            if self._ttl():
                return pa.array(
                    expiring_kernels.look_many(table, part.keys, **self._expiry(part), **self._options(part))
                )
            return pa.array(kernels.find_many(table, part.keys, **self._options(part)) != 0)

        return self._collect(self._call(keys, namespaces, times), look)

    def _clear_many(self, keys: Any, namespaces: Any, times: Any) -> None:
        call = self._call(keys, namespaces, times)
        self._clean(call)
        with self._naming_state(), self._parts(call, False) as parts:
            for part in parts:
                table = self._table(part)
                if table is not None:
                    kernels.remove_many(table, part.keys, **self._options(part))


class SingleColumns(ColumnsState):
    """States with one value for a key."""

    __slots__ = ()

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        return self._exists_many(keys, namespaces, times)

    def clear_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._holds_objects:
            super().clear_many(keys, namespaces=namespaces, times=times)
        else:
            self._clear_many(keys, namespaces, times)

    def _read(self, part: Part) -> tuple[Any, Array]:
        """Values in stored form, and a mask of the keys that were found."""
        table = self._table(part)
        if table is None:
            nothing = np.zeros(len(part), dtype=np.uint32)
            return gathering.values_at(self.plain, nothing), nothing != 0
        if self._ttl():
            before = len(table)
            found = expiring_kernels.read_many(
                table, part.keys, **self._removal(part), **self._expiry(part), **self._options(part)
            )
            self._count_expired(before - len(table))
            return found
        return kernels.get_many(table, part.keys, **self._options(part))


class ValueColumns(SingleColumns, ValueState):
    """A value."""

    __slots__ = ()

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._holds_objects:
            return super().get_many(keys, namespaces=namespaces, times=times)
        call = self._call(keys, namespaces, times)
        self._clean(call)
        return self._collect(call, self._values)

    def _values(self, part: Part) -> pa.Array:
        declared = self.descriptor.type
        values, found = self._read(part)
        default = self.descriptor.default_copy()
        if default is None or found.all():
            return arrow_column(values, found, declared)
        # The default is appended to the values; every row without a value points at it.
        default_array = arrow_column(value_column([default], declared).values, None, declared)
        array = pa.concat_arrays([arrow_column(values, found, declared), default_array])
        return array.take(pa.array(np.where(found, np.arange(len(found)), len(found))))

    def update_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._holds_objects:
            super().update_many(keys, values, namespaces=namespaces, times=times)
            return
        call = self._call(keys, namespaces, times)
        stored, nulls = self._value_column(values, self.descriptor.type)
        check_lengths(range(len(call)), range(count_of(stored)))
        self._clean(call)
        with self._naming_state(), self._parts(call, True) as parts:
            for part in parts:
                self._update(part, part.of(stored), part.of(nulls))

    def _update(self, part: Part, stored: Any, nulls: Array | None) -> None:
        table, stamps, options = self._table_to_write(part), part.times, self._options(part)
        if nulls is None:
            kernels.update_many(table, part.keys, stored, timestamp=stamps, **options)
            return
        plan = AddPlan("last", "bytes" if self.codec.layout == "bytes" else self.codec.width)
        adding_kernels.add_many(table, part.keys, stored, plan, nulls=nulls, timestamp=stamps, **options)


class ListColumns(ColumnsState, KeyedListState):
    """A list."""

    __slots__ = ()

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        if self._ttl():
            return super().exists_many(keys, namespaces=namespaces, times=times)
        return self._exists_many(keys, namespaces, times)

    def clear_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._holds_objects:
            super().clear_many(keys, namespaces=namespaces, times=times)
        else:
            self._clear_many(keys, namespaces, times)

    def _elements_of_column(self, column: pa.Array | pa.ChunkedArray) -> list[Any]:
        """The elements of one list, given as Arrow; the compiled handle asks for them."""
        with self._naming_state():
            return to_values(column, self.descriptor.element_type)

    def add_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._holds_objects:
            super().add_many(keys, values, namespaces=namespaces, times=times)
            return
        call = self._call(keys, namespaces, times)
        stored, _ = self._value_column(values, self.descriptor.element_type, nullable=False)
        check_lengths(range(len(call)), range(count_of(stored)))
        self._clean(call)
        with self._naming_state(), self._parts(call, True) as parts:
            for part in parts:
                kernels.append_many(
                    self._table_to_write(part), part.keys, part.of(stored),
                    timestamp=part.times, **self._options(part),
                )  # fmt: skip

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.ListArray:
        if self._holds_objects or self._ttl():
            return super().get_many(keys, namespaces=namespaces, times=times)
        return self._collect(self._call(keys, namespaces, times), self._lists)

    def _lists(self, part: Part) -> pa.ListArray:
        table = self._table(part)
        if table is None:
            offsets, values = gathering.lists_at(self.plain, np.zeros(len(part), dtype=np.uint32))
        else:
            offsets, values = kernels.lists_of(table, part.keys, **self._options(part))
        elements = arrow_column(values, None, self.descriptor.element_type)
        if offsets[-1] < 2**31:
            return pa.ListArray.from_arrays(offsets.astype(np.int32), elements)
        return pa.LargeListArray.from_arrays(offsets, elements)


class MapColumns(ColumnsState, MapState):
    """A map."""

    __slots__ = ()

    # Provided by the compiled handle.
    plain_map: Any
    spaced_map: Any

    def _map_call(self, keys: Any, map_keys: Any, namespaces: Any, times: Any) -> tuple[Call, Any]:
        """Check the rows of a call; with their map keys in canonical form."""
        call = self._call(keys, namespaces, times)
        try:
            inner = encoded_keys(key_encoder(self.descriptor.key_type), map_keys)
        except SerializationError as error:
            raise error.at(f"map keys of state {self.descriptor.name!r}") from None
        check_lengths(range(len(call)), range(count_of(inner)))
        return call, inner

    def _map(self, part: Part) -> Any:
        return self.spaced_map if part.is_spaced else self.plain_map

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        if self._ttl():
            return super().exists_many(keys, namespaces=namespaces, times=times)
        return self._exists_many(keys, namespaces, times)

    def get_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._holds_objects:
            return super().get_many(keys, map_keys, namespaces=namespaces, times=times)
        call, inner = self._map_call(keys, map_keys, namespaces, times)
        self._clean(call)
        return self._collect(call, lambda part: self._values(part, part.of(inner)))

    def _values(self, part: Part, inner: Any) -> pa.Array:
        if self._table(part) is None:
            nothing = np.zeros(len(part), dtype=np.uint32)
            values, found = gathering.values_at(self.plain_map.entries, nothing), nothing != 0
        else:
            expiry = {**self._removal(part), **self._expiry(part)} if self._ttl() else {}
            maps = self._map(part)
            before = len(maps)
            values, found = map_kernels.get_many(maps, part.keys, inner, **expiry, **self._options(part))
            self._count_expired(before - len(maps))
        return arrow_column(values, found, self.descriptor.value_type)

    def put_many(
        self, keys: Any, map_keys: Any, values: Any, *, namespaces: Any = None, times: Any = None
    ) -> None:
        if self._holds_objects:
            super().put_many(keys, map_keys, values, namespaces=namespaces, times=times)
            return
        call, inner = self._map_call(keys, map_keys, namespaces, times)
        stored, nulls = self._value_column(values, self.descriptor.value_type)
        check_lengths(range(len(call)), range(count_of(stored)))
        self._clean(call)
        with self._naming_state(), self._parts(call, True) as parts:
            for part in parts:
                self._table_to_write(part)
                map_kernels.put_many(
                    self._map(part), part.keys, part.of(inner), part.of(stored), nulls=part.of(nulls),
                    timestamp=part.times, ttl=self._ttl(), **self._options(part),
                )  # fmt: skip

    def remove_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._holds_objects:
            super().remove_many(keys, map_keys, namespaces=namespaces, times=times)
            return
        call, inner = self._map_call(keys, map_keys, namespaces, times)
        self._clean(call)
        with self._naming_state(), self._parts(call, False) as parts:
            for part in parts:
                if self._table(part) is not None:
                    map_kernels.remove_many(self._map(part), part.keys, part.of(inner), **self._options(part))
