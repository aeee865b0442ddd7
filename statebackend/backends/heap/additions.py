"""The vectorised methods of reducing and aggregating states.

Operations with a name run compiled, except those that compare records field by field. A user's functions are called
row by row, with the row's key current, as `statebackend.state.vectorised` does it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend._core.batches import adding_kernels
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_table import FIXED_CODES
from statebackend.backends.heap.nested_columns import decoded_keys
from statebackend.backends.heap.stored_columns import (
    Array,
    Column,
    arrow_column,
    double_column,
    in_entry,
    null_column,
    value_column,
)
from statebackend.backends.heap.vectorised import SingleColumns, count_of, take_rows
from statebackend.state import AggregatingState, NamedAggregate, ReducingState, Reduction, check_lengths
from statebackend.types import DOUBLE, DecimalType, Type

__all__ = ["AggregatingColumns", "ReducingColumns", "aggregate_plan", "reduction_plan"]

_NUMBER_OF = {
    **{name: name.lower() for name in ("LONG", "INT", "SHORT", "BYTE", "DOUBLE", "FLOAT", "BOOL")},
    "DATE": "int",
    "TIMESTAMP": "long",
    "TIMESTAMP_NTZ": "long",
    "STRING": "bytes",
    "BYTES": "bytes",
}
_DTYPES = {
    "long": "<i8",
    "int": "<i4",
    "short": "<i2",
    "byte": "i1",
    "double": "<f8",
    "float": "<f4",
    "bool": "?",
}
_OVER_DOUBLES = {"avg": "average", "variance": "moments", "stddev": "moments"}


def reduction_plan(reduce: Any) -> AddPlan | None:
    """The plan of a named reduction; None if Python must run it, or for a user's function.

    >>> from statebackend.state import named_reduction
    >>> reduction_plan(named_reduction("max", "timestamp")).number
    'long'
    >>> reduction_plan(named_reduction("max", "struct<a:int>")) is None
    True
    """
    if not isinstance(reduce, Reduction):
        return None
    declared = reduce.type
    if isinstance(declared, DecimalType):
        return AddPlan(reduce.name, "decimal", declared.precision)
    if declared.name in _NUMBER_OF:
        return AddPlan(reduce.name, _NUMBER_OF[declared.name])
    if reduce.name in ("first", "last"):
        return AddPlan(reduce.name, declared.fixed_width if in_entry(declared) else "bytes")
    return None


def aggregate_plan(aggregate: Any) -> AddPlan | None:
    """The plan of a named aggregate; None if Python must run it, or for a user's function.

    >>> from statebackend.state import named_aggregate
    >>> aggregate_plan(named_aggregate("stddev", "int")).operation
    'moments'
    """
    if not isinstance(aggregate, NamedAggregate):
        return None
    if aggregate.name == "count":
        return AddPlan("count", "long")
    if aggregate.name in _OVER_DOUBLES:
        return AddPlan(_OVER_DOUBLES[aggregate.name])
    return reduction_plan(Reduction(aggregate.name, aggregate.type))


def typed(values: Any, plan: AddPlan) -> Any:
    """Rows of bytes as the numbers of the plan.

    >>> typed(np.zeros((2, 4), dtype=np.uint8), AddPlan("max", "int"))
    array([0, 0], dtype=int32)
    """
    if plan.number in FIXED_CODES and values.ndim == 2:
        return values.view(_DTYPES[plan.number]).reshape(-1)
    return values


class Changed(NamedTuple):
    """The distinct keys of a call, in canonical form, and their values after it, in stored form."""

    keys: Any
    values: Any
    #: The keys that have a value; None: all.
    found: Array | None


class AddingColumns(SingleColumns):
    """The shared part of reducing and aggregating states."""

    __slots__ = ()

    def _add(self, canonical: Any, column: Column, plan: AddPlan, wants_changed: bool) -> Changed | None:
        values, nulls = column
        with self._naming_state():
            table, stamp = self._table_to_write(), self._begun(count_of(canonical))
            touched = adding_kernels.add_many(
                table, canonical, values, plan, nulls=nulls, timestamp=stamp, ttl=self._ttl(),
                return_touched=wants_changed and nulls is None, **self._options(),
            )  # fmt: skip
            if not wants_changed:
                return None
            if nulls is None:
                rows, held = touched
                return Changed(take_rows(canonical, rows), held, None)
            keys = take_rows(canonical, _first_rows(canonical))
            return Changed(keys, *self._read(keys))

    def _keys_of(self, changed: Changed) -> pa.Array:
        return decoded_keys(self.backend._encoder, changed.keys)


def _first_rows(canonical: Any) -> Array:
    """The first row of each distinct key, in order."""
    column: pa.Array
    if isinstance(canonical, tuple):
        buffers = [None, pa.py_buffer(canonical[0]), pa.py_buffer(canonical[1])]
        column = pa.Array.from_buffers(pa.large_binary(), count_of(canonical), buffers)
    else:
        column = pa.array(canonical)
    indices = column.dictionary_encode().indices.to_numpy()
    # Dictionary codes follow the order of first appearance: a first row is one whose code was not seen before.
    highest = np.maximum.accumulate(indices) if len(indices) else indices
    return np.flatnonzero(np.diff(highest, prepend=-1) > 0)


class ReducingColumns(AddingColumns, ReducingState):
    """A reduced value."""

    __slots__ = ()

    def get_many(self, keys: Any) -> pa.Array:
        if self._holds_objects:
            return super().get_many(keys)
        return arrow_column(*self._read(self._key_column(keys)), self.descriptor.type)

    def add_many(
        self, keys: Any, values: Any, return_changed: bool = False
    ) -> tuple[pa.Array, pa.Array] | None:
        plan = None if self._holds_objects else reduction_plan(self.descriptor.reduce)
        if plan is None:
            return super().add_many(keys, values, return_changed)
        declared = self.descriptor.type
        canonical = self._key_column(keys)
        stored, nulls = self._value_column(values, declared)
        check_lengths(range(count_of(canonical)), range(count_of(stored)))
        stored = stored if isinstance(stored, tuple) else typed(stored, plan)
        changed = self._add(canonical, Column(stored, nulls), plan, return_changed)
        if changed is None:
            return None
        return self._keys_of(changed), arrow_column(changed.values, changed.found, declared)


class AggregatingColumns(AddingColumns, AggregatingState):
    """An accumulator."""

    __slots__ = ()

    def get_many(self, keys: Any) -> pa.Array:
        aggregate = self.descriptor.aggregate
        if self._holds_objects or not isinstance(aggregate, NamedAggregate):
            return super().get_many(keys)
        return results_of(aggregate, *self._read(self._key_column(keys)))

    def add_many(
        self, keys: Any, values: Any, return_changed: bool = False
    ) -> tuple[pa.Array, pa.Array] | None:
        aggregate = self.descriptor.aggregate
        plan = None if self._holds_objects else aggregate_plan(aggregate)
        if plan is None:
            return super().add_many(keys, values, return_changed)
        canonical = self._key_column(keys)
        with self._naming_state():
            count, column = _inputs(values, self.descriptor.type, plan)
        check_lengths(range(count_of(canonical)), range(count))
        changed = self._add(canonical, column, plan, return_changed)
        if changed is None:
            return None
        return self._keys_of(changed), results_of(aggregate, changed.values, changed.found)


def _inputs(values: Any, declared: Type, plan: AddPlan) -> tuple[int, Column]:
    """Return the number of values, and the operand that the plan adds for each."""
    if plan.operation == "count":
        count, nulls = null_column(values, declared)
        return count, Column(None, nulls)
    if plan.number is None:
        column = double_column(values, declared)
    else:
        column = value_column(values, declared)
        if not isinstance(column.values, tuple):
            column = Column(typed(column.values, plan), column.nulls)
    return count_of(column.values), column


def results_of(aggregate: NamedAggregate, accumulators: Any, found: Array | None) -> pa.Array:
    """The results of accumulators in stored form, null where none was found.

    >>> from statebackend.state import named_aggregate
    >>> from statebackend.types.serializers import serializer_for
    >>> mean = named_aggregate("avg", "int")
    >>> stored = np.frombuffer(serializer_for(mean.accumulator_type).serialize((6.0, 4)), dtype=np.uint8)
    >>> results_of(mean, stored.reshape(1, -1), None).to_pylist()
    [1.5]
    """
    if aggregate.name not in _OVER_DOUBLES:
        return arrow_column(accumulators, found, aggregate.result_type)
    present = np.ones(len(accumulators), dtype=bool) if found is None else found
    with np.errstate(all="ignore"):
        if aggregate.name == "avg":
            fields = accumulators.view([("nulls", "u1"), ("sum", "<f8"), ("count", "<i8")]).reshape(-1)
            return arrow_column(fields["sum"] / fields["count"], present, DOUBLE)
        fields = accumulators.view([("nulls", "u1"), ("n", "<f8"), ("avg", "<f8"), ("m2", "<f8")]).reshape(-1)
        variance = fields["m2"] / (fields["n"] - 1.0)
        present = present & (fields["n"] >= 2.0)
        return arrow_column(np.sqrt(variance) if aggregate.name == "stddev" else variance, present, DOUBLE)
