"""Makes a savepoint from the rows of a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from statebackend.backends import create_backend
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError, usage
from statebackend.state import MapStateDescriptor, StateBackend, StateDescriptor
from statebackend.tools.progress_line import Progress
from statebackend.tools.tables import map_entries
from statebackend.types import ROW, Type, of

_PIECE_ROWS = 1 << 20

#: A descriptor, or one with the columns that its rows come from.
Source = StateDescriptor | tuple[StateDescriptor, str | Sequence[str]]


def bootstrap(
    store: str | os.PathLike[str],
    table: Any,
    *,
    key: str | Sequence[str],
    descriptors: Iterable[Source],
    backend: str | StateBackend = "heap",
    max_parallelism: int = 128,
    clock: Any = None,
) -> Savepoint:
    """Make state from the rows of a table, as if a handle had written each, in order. O(rows).

    ``table`` is anything that Arrow accepts as one; ``key`` names the column or columns of the key. The column of a
    state has the state's name, unless the descriptor comes in a pair with another column name. A value state gets the
    last value of a key, a reducing or aggregating state all of them. A list state gets all elements, or all elements
    of a column of lists. A map state takes a column of maps, or two columns, one of map keys and one of values. Rows
    with null leave a state as it is. The result is a savepoint at the path ``store``, complete when the call returns.
    It carries no time: ``clock`` stamps values with a time to live, and the job that begins with the savepoint uses
    its own clock.
    """
    rows = table if isinstance(table, pa.Table) else pa.table(table)
    sources = [_Source(rows.schema, each) for each in descriptors]
    columns = [key] if isinstance(key, str) else list(key)
    key_type = _key_type(rows.schema, key, columns)
    factory = create_backend(backend) if isinstance(backend, str) else backend
    made = factory.create_keyed_backend(key_type, max_parallelism=max_parallelism, clock=clock)
    with made as keyed, Progress("bootstrapping", rows.num_rows) as progress:
        states = [keyed.get_state(source.descriptor) for source in sources]
        for batch in rows.to_batches(max_chunksize=_PIECE_ROWS):
            keys = _keys(batch, key, columns, key_type)
            for source, state in zip(sources, states, strict=True):
                source.fill(state, keys, batch)
            progress.advance(batch.num_rows)
        savepoint: Savepoint = keyed.savepoint(Savepoint(store, timeless=True))
    return savepoint


def _key_type(schema: pa.Schema, key: str | Sequence[str], columns: list[str]) -> Type:
    types = {name: of(_field(schema, name, "the key").type) for name in columns}
    return types[key] if isinstance(key, str) else ROW(**types)


def _keys(batch: pa.RecordBatch, key: str | Sequence[str], columns: list[str], key_type: Type) -> pa.Array:
    if isinstance(key, str):
        return batch[key]
    fields = list(key_type.arrow)
    arrays = [batch[name].cast(field.type) for name, field in zip(columns, fields, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _field(schema: pa.Schema, name: str, whose: str) -> pa.Field:
    if schema.names.count(name) != 1:
        raise UsageError(
            f"the table has no column {name!r} of its own",
            code="USAGE.NO_COLUMN",
            detail=whose,
            hint=f"its columns: {', '.join(map(repr, schema.names))}",
        )
    return schema.field(name)


class _Source:
    """A state and the columns that fill it."""

    def __init__(self, schema: pa.Schema, given: Source) -> None:
        self.descriptor, columns = given if isinstance(given, tuple) else (given, None)
        if not isinstance(self.descriptor, StateDescriptor):
            raise usage.descriptor(f"a {type(self.descriptor).__name__} is not a descriptor of a state")
        where = f"state {self.descriptor.name!r}"
        if columns is None:
            columns = self.descriptor.name
        self._names = [columns] if isinstance(columns, str) else list(columns)
        types = [_field(schema, name, where).type for name in self._names]
        is_map = isinstance(self.descriptor, MapStateDescriptor)
        if len(types) == 2 and is_map:
            self._filled: Callable[..., None] = _put_pairs
        elif len(types) != 1 or (is_map and not pa.types.is_map(types[0])):
            raise usage.descriptor(
                "a map state takes a column of maps, or two columns; every other state takes one",
                detail=f"{where}, columns {', '.join(map(repr, self._names))}",
                hint="write (descriptor, ('its map keys', 'its values'))",
            )
        elif is_map:
            self._filled = _put_maps
        elif self.descriptor.kind == "list":
            of_lists = self.descriptor.stored_types()["element"].arrow
            checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
            holds_lists = any(check(types[0]) for check in checks) and not pa.types.is_list(of_lists)
            self._filled = _add_lists if holds_lists else _add
        elif self.descriptor.kind == "value":
            self._filled = _update
        elif self.descriptor.kind == "folding":
            raise usage.state_kind("folding state cannot be made of columns", detail=where)
        else:
            self._filled = _add

    def fill(self, state: Any, keys: pa.Array, batch: pa.RecordBatch) -> None:
        columns = [batch[name] for name in self._names]
        there = columns[0].is_valid()  # values, lists, maps, or map keys
        if columns[0].null_count:
            keys, columns = keys.filter(there), [column.filter(there) for column in columns]
        if len(keys):
            self._filled(state, keys, *columns)


def _update(state: Any, keys: pa.Array, values: pa.Array) -> None:
    state.update_many(keys, values)


def _add(state: Any, keys: pa.Array, values: pa.Array) -> None:
    state.add_many(keys, values)


def _add_lists(state: Any, keys: pa.Array, lists: pa.Array) -> None:
    state.add_many(keys.take(lists.value_parent_indices()), lists.flatten())


def _put_pairs(state: Any, keys: pa.Array, map_keys: pa.Array, values: pa.Array) -> None:
    state.put_many(keys, map_keys, values)


def _put_maps(state: Any, keys: pa.Array, maps: pa.Array) -> None:
    owners, map_keys, values = map_entries(maps)
    state.put_many(keys.take(pa.array(owners)), map_keys, values)
