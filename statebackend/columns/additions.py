"""What vectorised additions add: named operations as plans of the compiled core, and values for a user's function."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_table import FIXED_CODES
from statebackend.columns.codec_choice import holds_references, value_bytes
from statebackend.columns.stored_columns import (
    DTYPES,
    Array,
    Column,
    arrow_column,
    double_column,
    in_entry,
    null_column,
    serialised_column,
    value_column,
)
from statebackend.keys import count_of
from statebackend.state import NamedAggregate, Reduction
from statebackend.types import DOUBLE, DecimalType, Type

_NUMBER_OF = {
    **{name: name.lower() for name in ("LONG", "INT", "SHORT", "BYTE", "DOUBLE", "FLOAT", "BOOL")},
    "DATE": "int",
    "TIMESTAMP": "long",
    "TIMESTAMP_NTZ": "long",
    "STRING": "bytes",
    "BYTES": "bytes",
}
_OVER_DOUBLES = {"avg": "average", "variance": "moments", "stddev": "moments"}


def adding_plan(of: Any) -> AddPlan | None:
    """The plan of the operation of a descriptor; None if Python must run it, or for a user's function."""
    if of.kind == "reducing":
        return _reduction_plan(of.reduce) if isinstance(of.reduce, Reduction) else None
    return _aggregate_plan(of.aggregate) if isinstance(of.aggregate, NamedAggregate) else None


def _reduction_plan(reduce: Reduction) -> AddPlan | None:
    declared = reduce.type
    if isinstance(declared, DecimalType):
        return AddPlan(reduce.name, "decimal", declared.precision)
    if declared.name in _NUMBER_OF:
        return AddPlan(reduce.name, _NUMBER_OF[declared.name])
    if reduce.name in ("first", "last"):
        return AddPlan(reduce.name, declared.fixed_width if in_entry(declared) else "bytes")
    return None


def _aggregate_plan(aggregate: NamedAggregate) -> AddPlan | None:
    if aggregate.name == "count":
        return AddPlan("count", "long")
    if aggregate.name in _OVER_DOUBLES:
        return AddPlan(_OVER_DOUBLES[aggregate.name])
    return _reduction_plan(Reduction(aggregate.name, aggregate.type))


def _typed(values: Any, plan: AddPlan) -> Any:
    """Rows of bytes as the numbers of the plan."""
    if plan.number in FIXED_CODES and values.ndim == 2:
        return values.view(DTYPES[plan.number.upper()]).reshape(-1)
    return values


def operands(values: Any, declared: Type, plan: AddPlan) -> tuple[int, Column]:
    """Return the number of values, and what the plan adds for each."""
    if plan.operation == "count":
        count, nulls = null_column(values, declared)
        return count, Column(None, nulls)
    if plan.number is None:
        column = double_column(values, declared)
    else:
        column = value_column(values, declared)
        if not isinstance(column.values, tuple):
            column = Column(_typed(column.values, plan), column.nulls)
    return count_of(column.values), column


def results_of(aggregate: NamedAggregate, accumulators: Any, found: Array | None) -> pa.Array:
    """The results of accumulators in stored form, null where none was found."""
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


def is_decoded(declared: Type | None) -> TypeGuard[Type]:
    """Return True if functions get new objects, decoded from columns; other types come as the caller gave them."""
    return declared is not None and not holds_references(declared)


def decoded_values(column: Any, declared: Type) -> list[Any]:
    """The values of a column as functions get them, checked as a whole; None for a null. O(n)."""
    stored, nulls = value_column(column, declared)
    codec = value_bytes(declared, "values")
    return codec.decode_many(*serialised_column(stored), None if nulls is None else nulls.view(np.uint8))
