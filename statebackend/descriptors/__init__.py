"""Descriptors: the name, kind and types of a state, and how its values are combined.

>>> from statebackend import descriptors
>>> total = descriptors.ReducingStateDescriptor("total", "sum", "bigint")
>>> total
ReducingStateDescriptor('total', 'sum', LONG)
>>> total.reduce(1, 2)
3
"""

from statebackend.descriptors.aggregates import (
    AGGREGATE_NAMES,
    AggregateFunction,
    NamedAggregate,
    named_aggregate,
)
from statebackend.descriptors.kinds import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.descriptors.reductions import REDUCTION_NAMES, Reduction, named_reduction

__all__ = [
    "AGGREGATE_NAMES",
    "REDUCTION_NAMES",
    "AggregateFunction",
    "AggregatingStateDescriptor",
    "FoldingStateDescriptor",
    "ListStateDescriptor",
    "MapStateDescriptor",
    "NamedAggregate",
    "ReducingStateDescriptor",
    "Reduction",
    "StateDescriptor",
    "ValueStateDescriptor",
    "named_aggregate",
    "named_reduction",
]
