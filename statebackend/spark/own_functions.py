"""Spark's own stateful functions as callables for ``foreachBatch``: the function stays, the call changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statebackend.checkpoint import CheckpointStore
from statebackend.cluster.cluster_execution import Executors
from statebackend.errors import UsageError
from statebackend.functions import EventTime
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.runtime.batch_progress import Json
from statebackend.runtime.start_checks import StartFrom
from statebackend.spark.driver import StatefulBatches
from statebackend.spark.driver_mode import Driver
from statebackend.spark.stateful import stateful
from statebackend.state import StateBackend

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

OUTPUT_MODES = ("Append", "Update", "Complete")


def transform_with_state(
    processor: StatefulProcessor,
    *,
    key: str | Sequence[str],
    output_schema: object,
    state: str | os.PathLike[str] | CheckpointStore,
    sink: Callable[..., object] | Mapping[str, Callable[..., object]] | None = None,
    time_mode: str = "None",
    output_mode: str = "Append",
    event_time: str | EventTime | None = None,
    backend: str | StateBackend = "heap",
    max_parallelism: int = 128,
    run_on: Driver | Executors | None = None,
    start: StartFrom | None = None,
    uid: str | None = None,
    on_batch: Callable[[dict[str, Json]], object] | None = None,
) -> StatefulBatches:
    """Run a Spark ``StatefulProcessor`` unchanged: ``GroupedData.transformWithState`` through ``foreachBatch``.

    ``key`` names the grouping columns, ``output_schema`` is Spark's ``outputStructType``. ``time_mode`` and
    ``output_mode`` are Spark's. With ``time_mode="EventTime"``, the watermark is that of ``withWatermark``; a frame
    without one needs ``event_time``. The other options are those of `stateful`.
    """
    from statebackend.spark_functions.processor_calls import ProcessorFunction, time_mode_of

    check_output_mode(output_mode)
    names = (key,) if isinstance(key, str) else tuple(key)
    schema = OutputSchema(output_schema)
    function = ProcessorFunction(
        processor,
        key=names,
        output_schema=schema,
        time_mode=time_mode_of(time_mode),
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
    """Raise unless Spark has such an output mode; it changes nothing in what is given out."""
    if not isinstance(given, str) or given.lower() not in map(str.lower, OUTPUT_MODES):
        raise UsageError(
            f"[STREAMING_OUTPUT_MODE.INVALID] Invalid streaming output mode: {given}. Accepted output modes are "
            "'Append', 'Complete', 'Update'.",
            code="USAGE.OUTPUT_MODE",
        )
