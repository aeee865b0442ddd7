"""The functions that users write, and the contexts that they get.

>>> class Visits(KeyedProcessFunction):
...     def open(self, ctx):
...         from statebackend.state import ReducingStateDescriptor
...         self.count = ctx.get_reducing_state(ReducingStateDescriptor("count", "sum", int))
...     def process_element(self, row, ctx):
...         self.count.add(1)
...         yield ctx.current_key, self.count.get()
>>> from statebackend.testing import Harness
>>> with Harness(Visits(), key="user") as harness:
...     harness.process_element({"user": "ann"}), harness.process_element({"user": "ann"})
([('ann', 1)], [('ann', 2)])
"""

from statebackend.functions.context import Counter, FunctionContext, Metrics, PlannedTimes
from statebackend.functions.process import (
    BatchProcessFunction,
    CheckpointedFunction,
    CheckpointListener,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    KeyedProcessFunction,
    KeyRowsFunction,
    ProcessFunction,
    flat_map_with_state,
    map_with_state,
)
from statebackend.functions.row_options import EventTime, Rule, to_output
from statebackend.functions.whole_keys import EngineFrame, WholeKeysFunction

__all__ = [
    "CheckpointedFunction",
    "FunctionInitializationContext",
    "FunctionSnapshotContext",
    "BatchProcessFunction",
    "CheckpointListener",
    "Counter",
    "EngineFrame",
    "EventTime",
    "FunctionContext",
    "PlannedTimes",
    "WholeKeysFunction",
    "KeyRowsFunction",
    "KeyedProcessFunction",
    "Metrics",
    "ProcessFunction",
    "Rule",
    "flat_map_with_state",
    "map_with_state",
    "to_output",
]
