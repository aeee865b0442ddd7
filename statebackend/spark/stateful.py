"""`stateful`: the one name that users need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from statebackend.checkpoint import CheckpointStore
from statebackend.cluster.cluster_execution import HostOptions
from statebackend.errors import UsageError
from statebackend.functions import EventTime, ProcessFunction, Rule
from statebackend.runtime import Job
from statebackend.runtime.batch_progress import Figures
from statebackend.runtime.start_checks import Beginning
from statebackend.spark.driver import StatefulBatches
from statebackend.spark.driver_mode import DriverMode, RunMode
from statebackend.spark.executors import ExecutorsMode
from statebackend.state import Duration, Size, StateBackend, clocks


def stateful(
    function: ProcessFunction,
    *,
    key: str | Sequence[str],
    schema: object,
    state: str | os.PathLike[str] | CheckpointStore,
    sink: Callable[..., object] | Mapping[str, Callable[..., object]] | None = None,
    backend: str | StateBackend = "heap",
    mode: str = "driver",
    parallelism: int | None = None,
    max_parallelism: int = 128,
    retain: int | Duration = 2,
    event_time: str | EventTime | None = None,
    order_by: str | Sequence[str] | None = None,
    broadcast_when: str | None = None,
    null_keys: Rule = "fail",
    errors: Rule = "fail",
    restore_from: Beginning | None = None,
    first_batch: int | None = None,
    name: str | None = None,
    on_gap: str = "fail",
    input: str = "memory",
    memory: Size | None = None,
    on_batch: Callable[[Figures], object] | None = None,
    clock: clocks.Clock | None = None,
    single_writer: bool = False,
    hosts: HostOptions | None = None,
) -> StatefulBatches:
    """Wrap a stateful function for ``foreachBatch``: run ``function`` over every batch, effectively once.

    It commits state and output of a batch together under ``state``, then calls ``sink(df, batch_id)`` with a
    frame over the committed output. If the sink fails, Spark's retry gets the same rows again, byte for byte. A sink
    with a parameter named ``context`` gets a `SinkContext` too. For several outputs, ``schema`` and ``sink`` are dicts
    by their names; all are committed together. A batch that is larger than what Spark brings to the driver goes through
    files beside the state, and with ``input="files"`` each does; its rows then take about ``memory`` bytes here.

    >>> from statebackend.functions import map_with_state
    >>> count = map_with_state(lambda row, n: ((row.user, (n or 0) + 1), (n or 0) + 1), "bigint")
    >>> stateful(count, key="user", schema="user string, n bigint", state="/data/state", sink=print)
    <stateful MapWithState, key 'user', state at /data/state>
    """
    way = _run_mode(mode, parallelism, max_parallelism, hosts, input, memory)
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
    if mode == "executors":
        from pyspark.cloudpickle import dumps

        job.check_pickled(dumps)
    return StatefulBatches(
        job,
        state=state,
        sink=sink,
        retain=retain,
        single_writer=single_writer,
        restore_from=restore_from,
        first_batch=first_batch,
        name=name,
        on_gap=on_gap,
        on_batch=on_batch,
        clock=clock,
        way=way,
    )


def _run_mode(
    mode: str,
    parallelism: int | None,
    max_parallelism: int,
    hosts: HostOptions | None,
    input: str,
    memory: Size | None,
) -> RunMode:
    if mode == "driver":
        if parallelism not in (None, 1) or hosts is not None:
            raise UsageError("parallelism and hosts are for mode='executors'")
        return DriverMode(input, memory)
    if mode != "executors":
        raise UsageError("mode is 'driver' or 'executors'")
    if hosts is not None and not isinstance(hosts, HostOptions):
        raise UsageError("hosts is a HostOptions")
    if type(parallelism) is not int or not 1 <= parallelism <= max_parallelism:
        raise UsageError(
            "parallelism is the number of hosts, from 1 to max_parallelism",
            hint="each takes a slot of an executor for as long as the query runs",
        )
    if input != "memory":
        raise UsageError(
            "input is for mode='driver'", hint="executors send rows to hosts, never to the driver"
        )
    return ExecutorsMode(parallelism, HostOptions() if hosts is None else hosts, memory)
