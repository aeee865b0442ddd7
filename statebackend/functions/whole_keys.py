"""The base of functions that an engine defines: all rows of a key at once, at times that the engine has planned.

`statebackend.spark_functions` has the functions: Spark's ``StatefulProcessor``, and functions with a group state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

from statebackend.functions.context import FunctionContext
from statebackend.functions.process import BatchProcessFunction
from statebackend.functions.row_options import EventTime


class EngineFrame(NamedTuple):
    """What a function may know of the engine's frames before the first batch."""

    #: The column of the engine's own watermark, and the delay in milliseconds; None if it has none.
    watermark: tuple[str, int] | None = None
    #: Settings of the session.
    settings: Mapping[str, str] = {}


class WholeKeysFunction(BatchProcessFunction):
    """A `BatchProcessFunction` whose batches have all rows of their keys, with a step at the end of the batch.

    It fires its own timers in that step. Restored states that it does not request stay as they are.
    """

    #: The name of its callee.
    name: str
    #: The settings of the session that it depends on.
    settings: tuple[str, ...] = ()
    #: Its own settings that a restart must not change, by the engine's name.
    fixed: Mapping[str, str] = {}

    def on_frame(self, frame: EngineFrame) -> EventTime | None:
        """Get ready for batches of such frames; return the event time that the job is to have."""

    @abstractmethod
    def end_batch(
        self, ctx: FunctionContext, after: int | None
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Called once after all rows of a batch. ``after`` is the watermark of the job after the batch."""
