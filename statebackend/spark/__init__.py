"""Functions with state in PySpark Structured Streaming, through ``foreachBatch``.

>>> from statebackend.functions import map_with_state
>>> count = map_with_state(lambda row, n: ((row.user, (n or 0) + 1), (n or 0) + 1), "bigint")
>>> stateful(count, key="user", schema="user string, n bigint", state="/data/app/state", sink=print)
<stateful MapWithState, key 'user', state at /data/app/state>
"""

from statebackend.cluster.cluster_execution import Executors
from statebackend.functions import EventTime, to_output
from statebackend.runtime.live_view import StateView
from statebackend.runtime.start_checks import StartFrom
from statebackend.spark import sinks
from statebackend.spark.display import progress_bar
from statebackend.spark.driver import StatefulBatches
from statebackend.spark.driver_mode import Driver
from statebackend.spark.heartbeats import heartbeat
from statebackend.spark.metrics import opentelemetry, prometheus
from statebackend.spark.own_functions import (
    apply_in_pandas_with_state,
    transform_with_state,
    transform_with_state_in_pandas,
)
from statebackend.spark.registration import register
from statebackend.spark.sinks.committed_sink import SinkContext
from statebackend.spark.stateful import stateful

__all__ = [
    "Driver",
    "EventTime",
    "Executors",
    "SinkContext",
    "StartFrom",
    "StateView",
    "StatefulBatches",
    "apply_in_pandas_with_state",
    "heartbeat",
    "opentelemetry",
    "progress_bar",
    "prometheus",
    "register",
    "sinks",
    "stateful",
    "to_output",
    "transform_with_state",
    "transform_with_state_in_pandas",
]
