"""`stateful`: the one name that users need."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence

from statebackend.checkpoint import CheckpointStore
from statebackend.errors import UsageError
from statebackend.functions import ProcessFunction
from statebackend.runtime import Job
from statebackend.runtime.start import Beginning
from statebackend.spark.driver import StatefulBatches
from statebackend.state import StateBackend, clocks

__all__ = ["stateful"]


def stateful(
    function: ProcessFunction,
    *,
    key: str | Sequence[str],
    schema: object,
    checkpoint: str | os.PathLike[str] | CheckpointStore,
    sink: Callable[..., object] | None = None,
    backend: str | StateBackend = "heap",
    mode: str = "driver",
    parallelism: int | None = None,
    max_parallelism: int = 128,
    retain: int | datetime.timedelta = 2,
    event_time: str | None = None,
    delay: int | datetime.timedelta = 0,
    order_by: str | Sequence[str] | None = None,
    broadcast: str | None = None,
    null_keys: str = "fail",
    restore_from: Beginning | None = None,
    first_batch: int | None = None,
    name: str | None = None,
    on_gap: str = "fail",
    clock: clocks.Clock | None = None,
    single_writer: bool = False,
) -> StatefulBatches:
    """Wrap a stateful function for ``foreachBatch``: run ``function`` over every batch, effectively once.

    It commits state and output of a batch together under ``checkpoint``, then calls ``sink(df, batch_id)`` with a
    frame over the committed output. If the sink fails, Spark's retry gets the same rows again, byte for byte. A sink
    with a parameter named ``context`` gets a `SinkContext` too.

    >>> from statebackend.functions import map_with_state
    >>> count = map_with_state(lambda row, n: ((row.user, (n or 0) + 1), (n or 0) + 1), "bigint")
    >>> stateful(count, key="user", schema="user string, n bigint", checkpoint="/data/state", sink=print)
    <stateful MapWithState, key 'user', state at /data/state>
    """
    if mode != "driver":
        raise UsageError(
            f"mode {mode!r} is not available",
            code="USAGE.NOT_AVAILABLE",
            hint="mode='driver' holds state in the driver",
        )
    if parallelism not in (None, 1):
        raise UsageError("parallelism is that of mode='executors'")
    job = Job(
        function,
        key=key,
        schema=schema,
        backend=backend,
        max_parallelism=max_parallelism,
        event_time=event_time,
        delay=delay,
        order_by=order_by,
        broadcast=broadcast,
        null_keys=null_keys,
    )
    return StatefulBatches(
        job,
        checkpoint=checkpoint,
        sink=sink,
        retain=retain,
        single_writer=single_writer,
        restore_from=restore_from,
        first_batch=first_batch,
        name=name,
        on_gap=on_gap,
        clock=clock,
    )
