"""`stateful`: the one name that users need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from statebackend.checkpoint import CheckpointStore
from statebackend.cluster.cluster_execution import Executors
from statebackend.errors import usage
from statebackend.functions import EventTime, ProcessFunction, Rule
from statebackend.runtime import Job
from statebackend.runtime.batch_progress import Json
from statebackend.runtime.start_checks import StartFrom
from statebackend.spark.driver import StatefulBatches
from statebackend.spark.driver_mode import Driver, DriverMode
from statebackend.spark.executors import ExecutorsMode
from statebackend.spark.sinks.committed_sink import Sink
from statebackend.state import StateBackend


def stateful(
    function: ProcessFunction,
    *,
    key: str | Sequence[str],
    state: str | os.PathLike[str] | CheckpointStore,
    schema: object = None,
    sink: Sink | Mapping[str, Sink] | None = None,
    backend: str | StateBackend = "heap",
    max_parallelism: int = 128,
    run_on: Driver | Executors | None = None,
    event_time: str | EventTime | None = None,
    order_by: str | Sequence[str] | None = None,
    broadcast_when: str | None = None,
    null_keys: Rule = "fail",
    errors: Rule = "fail",
    start: StartFrom | None = None,
    uid: str | None = None,
    on_batch: Callable[[dict[str, Json]], object] | None = None,
) -> StatefulBatches:
    """Wrap a stateful function for ``foreachBatch``: run ``function`` over every batch, effectively once.

    It commits state and output of a batch together under ``state``, a path or a `CheckpointStore`. Then it calls
    ``sink(df, batch_id)`` with a frame over the committed output. If the sink fails, Spark's retry gets the same rows
    again, byte for byte. A sink with a parameter named ``context`` gets a `SinkContext` too. For several outputs,
    ``schema`` and ``sink`` are dicts by their names; all are committed together. Without ``schema``, the function's
    own ``output_schema`` counts, if it has one.

    ``run_on`` says where state lives: `Driver` (the default) or `Executors`. ``uid`` names the owner of the state; by
    default, it is Spark's id of the query. Spark Connect needs it. ``start`` fills a new store: see `StartFrom`.

    The call needs no Spark session, and refuses options that do not fit. `StatefulBatches.check` looks at a frame.

    >>> from statebackend.functions import map_with_state
    >>> count = map_with_state(lambda row, n: ((row.user, (n or 0) + 1), (n or 0) + 1), "bigint")
    >>> stateful(count, key="user", schema="user string, n bigint", state="/data/state", sink=print)
    <stateful MapWithState, key 'user', state at /data/state>
    """
    run_on = Driver() if run_on is None else run_on
    if not isinstance(run_on, (Driver, Executors)):
        raise usage.option(
            f"unknown run_on: a {type(run_on).__name__}; expected a Driver or Executors",
            hint="write run_on=sb.spark.Driver() or run_on=sb.spark.Executors(n)",
        )
    job = Job(
        function,
        key=key,
        schema=schema,
        backend=backend,
        max_parallelism=max_parallelism,
        event_time=event_time,
        order_by=order_by,
        broadcast_when=broadcast_when,
        null_keys=null_keys,
        errors=errors,
    )
    job.check_broadcast()
    if isinstance(run_on, Executors):
        if run_on.n > job.max_parallelism:
            raise usage.option(
                "run_on has more hosts than max_parallelism has key groups",
                detail=f"Executors({run_on.n}), max_parallelism={max_parallelism}",
                hint="pass fewer hosts; max_parallelism stays the same for the life of a store",
            )
        from pyspark.cloudpickle import dumps

        job.check_pickled(dumps)
    return StatefulBatches(
        job,
        state=state,
        sink=sink,
        start=start,
        uid=uid,
        on_batch=on_batch,
        way=DriverMode(run_on) if isinstance(run_on, Driver) else ExecutorsMode(run_on),
    )
