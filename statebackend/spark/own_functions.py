"""Spark's own stateful functions as callables for ``foreachBatch``: the function stays, the call changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.checkpoint import CheckpointStore
from statebackend.cluster.cluster_execution import Executors
from statebackend.errors import UsageError, usage
from statebackend.functions import EventTime
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.runtime.batch_progress import Json
from statebackend.runtime.start_checks import StartFrom
from statebackend.spark.driver import StatefulBatches
from statebackend.spark.driver_mode import Driver
from statebackend.spark.sinks.committed_sink import Sink
from statebackend.spark.stateful import stateful
from statebackend.state import StateBackend

if TYPE_CHECKING:
    from pyspark.sql import GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

OUTPUT_MODES = ("Append", "Update", "Complete")


def transform_with_state(
    processor: StatefulProcessor,
    *,
    key: str | Sequence[str],
    output_schema: object,
    state: str | os.PathLike[str] | CheckpointStore,
    sink: Sink | Mapping[str, Sink] | None = None,
    time_mode: str = "None",
    output_mode: str = "Append",
    event_time: str | EventTime | None = None,
    initial_state: GroupedData | None = None,
    backend: str | StateBackend = "heap",
    max_parallelism: int = 128,
    run_on: Driver | Executors | None = None,
    start: StartFrom | None = None,
    uid: str | None = None,
    on_batch: Callable[[dict[str, Json]], object] | None = None,
) -> StatefulBatches:
    """Run a Spark ``StatefulProcessor`` unchanged: ``GroupedData.transformWithState`` through ``foreachBatch``.

    ``key`` names the grouping columns, ``output_schema`` is Spark's ``outputStructType``. ``time_mode``,
    ``output_mode`` and ``initial_state`` are Spark's; the rows of the initial state come to the driver in this call.
    With ``time_mode="EventTime"``, the watermark is ``withWatermark``'s; a frame without one needs
    ``event_time``. The other options are as for `stateful`.

    >>> from pyspark.sql import Row
    >>> from pyspark.sql.streaming import StatefulProcessor
    >>> class Count(StatefulProcessor):
    ...     def init(self, handle):
    ...         self.count = handle.getValueState("count", "n bigint")
    ...     def handleInputRows(self, key, rows, timerValues):
    ...         n = sum(1 for row in rows) + (self.count.get() or (0,))[0]
    ...         self.count.update((n,))
    ...         yield Row(user=key[0], n=n)
    >>> transform_with_state(
    ...     Count(), key="user", output_schema="user string, n bigint", state="/data/state", sink=print
    ... )
    <stateful Count, key ('user',), state at /data/state>
    """
    given = locals()
    from statebackend.spark_functions.processor_calls import ProcessorFunction

    return _batches(ProcessorFunction, **given)


def transform_with_state_in_pandas(
    processor: StatefulProcessor,
    *,
    key: str | Sequence[str],
    output_schema: object,
    state: str | os.PathLike[str] | CheckpointStore,
    sink: Sink | Mapping[str, Sink] | None = None,
    time_mode: str = "None",
    output_mode: str = "Append",
    event_time: str | EventTime | None = None,
    initial_state: GroupedData | None = None,
    backend: str | StateBackend = "heap",
    max_parallelism: int = 128,
    run_on: Driver | Executors | None = None,
    start: StartFrom | None = None,
    uid: str | None = None,
    on_batch: Callable[[dict[str, Json]], object] | None = None,
) -> StatefulBatches:
    """The same as `transform_with_state` for a processor that takes and gives pandas data frames.

    It does what ``GroupedData.transformWithStateInPandas`` does.
    """
    given = locals()
    from statebackend.spark_functions.pandas_calls import PandasProcessorFunction

    return _batches(PandasProcessorFunction, **given)


def _batches(
    made: Any,
    *,
    processor: Any,
    key: str | Sequence[str],
    output_schema: object,
    time_mode: str,
    output_mode: str,
    event_time: str | EventTime | None,
    initial_state: GroupedData | None,
    **options: Any,
) -> StatefulBatches:
    """The callable for a function of one of the classes."""
    from statebackend.spark_functions.processor_calls import time_mode_of

    check_output_mode(output_mode)
    if initial_state is not None and options["start"] is not None:
        raise usage.option(
            "initial_state= and start= were given; expected one of them",
            hint="start= brings the whole state of a savepoint",
        )
    names = (key,) if isinstance(key, str) else tuple(key)
    schema = OutputSchema(output_schema)
    function = made(
        processor,
        key=names,
        output_schema=schema,
        time_mode=time_mode_of(time_mode),
        output_mode=output_mode,
        event_time=event_time,
        initial_state=None if initial_state is None else grouped_rows(initial_state, names),
    )
    return stateful(function, key=names, schema=schema.row_type, **options)


def grouped_rows(grouped: Any, names: Sequence[str]) -> pa.Table:
    """The rows of a grouped frame, whose grouping columns must be the query's."""
    frame = getattr(grouped, "_df", None)
    if frame is None or not hasattr(grouped, "transformWithState"):
        raise usage.option(
            f"initial_state is a {type(grouped).__name__}; expected a GroupedData",
            hint="write initial_state=frame.groupBy(...), with the columns of key=",
        )
    by = grouped.count().columns[:-1]
    if tuple(by) != tuple(names):
        raise usage.option(
            "initial_state is grouped by other columns than the query",
            detail=f"columns {', '.join(by)}; key {', '.join(names)}",
        )
    table: pa.Table = frame.toArrow()
    return table


def apply_in_pandas_with_state(
    func: Callable[..., Any],
    *,
    key: str | Sequence[str],
    output_schema: object,
    state_schema: object,
    output_mode: str,
    timeout_conf: str,
    state: str | os.PathLike[str] | CheckpointStore,
    sink: Sink | Mapping[str, Sink] | None = None,
    event_time: str | EventTime | None = None,
    backend: str | StateBackend = "heap",
    max_parallelism: int = 128,
    run_on: Driver | Executors | None = None,
    start: StartFrom | None = None,
    uid: str | None = None,
    on_batch: Callable[[dict[str, Json]], object] | None = None,
) -> StatefulBatches:
    """Run a function for ``GroupedData.applyInPandasWithState`` unchanged, through ``foreachBatch``.

    ``func(key, frames, state)`` gets Spark's ``GroupState``. ``key`` names the grouping columns; ``output_schema``,
    ``state_schema``, ``output_mode`` and ``timeout_conf`` are Spark's ``outputStructType``, ``stateStructType``,
    ``outputMode`` and ``timeoutConf``. With ``EventTimeTimeout``, the watermark is ``withWatermark``'s; a frame
    without one needs ``event_time``. The other options are as for `stateful`.

    >>> def count(key, frames, state):
    ...     n = sum(len(frame) for frame in frames) + (state.get[0] if state.exists else 0)
    ...     state.update((n,))
    ...     yield pd.DataFrame({"user": [key[0]], "n": [n]})
    >>> apply_in_pandas_with_state(
    ...     count, key="user", output_schema="user string, n bigint", state_schema="n bigint",
    ...     output_mode="Update", timeout_conf="NoTimeout", state="/data/state", sink=print,
    ... )
    <stateful count, key ('user',), state at /data/state>
    """
    from statebackend.spark_functions.group_states import GroupStateFunction

    check_output_mode(output_mode)
    names = (key,) if isinstance(key, str) else tuple(key)
    schema = OutputSchema(output_schema)
    function = GroupStateFunction(
        func,
        key=names,
        output_schema=schema,
        state_type=OutputSchema(state_schema).row_type,
        timeout_conf=timeout_conf,
        event_time=event_time,
    )
    return stateful(
        function,
        key=names,
        schema=schema.row_type,
        state=state,
        sink=sink,
        backend=backend,
        max_parallelism=max_parallelism,
        run_on=run_on,
        start=start,
        uid=uid,
        on_batch=on_batch,
    )


def check_output_mode(given: Any) -> None:
    """Raise unless Spark has such an output mode. The mode does not change the output."""
    if not isinstance(given, str) or given.lower() not in map(str.lower, OUTPUT_MODES):
        raise UsageError(
            f"[STREAMING_OUTPUT_MODE.INVALID] Invalid streaming output mode: {given}. Accepted output modes are "
            "'Append', 'Complete', 'Update'.",
            code="USAGE.OUTPUT_MODE",
        )
