"""Progress for Prometheus: what batches did, as metrics of the client library ``prometheus_client``."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from statebackend.errors import UsageError

__all__ = ["prometheus"]

#: The metrics in each registry: a name can be registered only once.
_registered: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()

#: Figures of progress that say how it is now, with the metric of each, its text, and what a unit of it is.
_GAUGES = {
    "batchId": ("statebackend_batch_id", "The newest batch", 1.0),
    "numRowsTotal": ("statebackend_state_rows", "Rows of state", 1.0),
    "memoryUsedBytes": ("statebackend_state_bytes", "Memory that the entries of state take", 1.0),
    "numTimersPending": ("statebackend_timers_pending", "Timers that wait", 1.0),
    "commitTimeMs": ("statebackend_commit_seconds", "Writing state and output of the newest batch", 0.001),
    "watermark": ("statebackend_watermark_seconds", "The watermark after the newest batch", 0.001),
}
#: Figures that add up from batch to batch.
_COUNTERS = {
    "numInputRows": ("statebackend_input_rows", "Rows in"),
    "numOutputRows": ("statebackend_output_rows", "Rows out"),
    "numRowsLate": ("statebackend_late_rows", "Rows that were late"),
    "numRowsDroppedByNullKey": ("statebackend_rows_without_key", "Rows that were dropped for a null key"),
    "numTimersFired": ("statebackend_timers_fired", "Timers that have fired"),
    "numHeartbeats": ("statebackend_heartbeats", "Ticks of the heartbeat"),
}


def prometheus(query: str, registry: Any = None) -> Callable[[Mapping[str, Any]], None]:
    """What sets metrics for Prometheus after each batch: pass it as ``on_batch=``. Needs the extra ``metrics``.

    ``query`` is the label of the metrics, and ``registry`` one of prometheus_client; by default its own, which
    ``prometheus_client.start_http_server`` serves. A batch that is delivered again counts once.

    >>> import prometheus_client
    >>> registry = prometheus_client.CollectorRegistry()
    >>> prometheus("orders", registry)({"batchId": 3, "numInputRows": 10, "durationMs": {"batch": 40.0}})
    >>> registry.get_sample_value("statebackend_input_rows_total", {"query": "orders"})
    10.0
    """
    return _Metrics(query, registry)


class _Metrics:
    """Picklable, unless a registry is given: the metrics are made where the first batch runs."""

    def __init__(self, query: str, registry: Any) -> None:
        _client()
        self._query = query
        self._registry = registry
        #: The newest batch that was counted. One whose sink failed is first told of when it is delivered again.
        self._counted: int | None = None

    def __call__(self, progress: Mapping[str, Any]) -> None:
        metrics = _metrics(self._registry)
        for figure, (name, _, unit) in _GAUGES.items():
            value = progress.get(figure)
            if value is not None:
                metrics[name].labels(self._query).set(value * unit)
        for part, took in progress.get("durationMs", {}).items():
            metrics["statebackend_duration_seconds"].labels(self._query, part).set(took / 1000)
        for sink in progress.get("sinks", ()):
            took = sink["durationMs"] / 1000
            metrics["statebackend_sink_seconds"].labels(self._query, sink["output"]).set(took)
        if progress.get("isReplay"):
            metrics["statebackend_replays"].labels(self._query).inc()
            if progress["batchId"] == self._counted:
                return
        self._counted = progress["batchId"]
        metrics["statebackend_batches"].labels(self._query).inc()
        for figure, (name, _) in _COUNTERS.items():
            metrics[name].labels(self._query).inc(progress.get(figure) or 0)


def _metrics(registry: Any) -> dict[str, Any]:
    client = _client()
    given = client.REGISTRY if registry is None else registry
    with _lock:
        if given not in _registered:
            _registered[given] = _made(client, given)
        return _registered[given]


def _made(client: Any, registry: Any) -> dict[str, Any]:
    made = {}
    for name, text, _ in _GAUGES.values():
        made[name] = client.Gauge(name, text, ["query"], registry=registry)
    for name, text in _COUNTERS.values():
        made[name] = client.Counter(name, text, ["query"], registry=registry)
    for name, text in (
        ("statebackend_batches", "Batches that have run"),
        ("statebackend_replays", "Batches that were delivered again"),
    ):
        made[name] = client.Counter(name, text, ["query"], registry=registry)
    for name, text, label in (
        ("statebackend_duration_seconds", "What the newest batch took, by its parts", "part"),
        ("statebackend_sink_seconds", "What the sink of an output took", "output"),
    ):
        made[name] = client.Gauge(name, text, ["query", label], registry=registry)
    return made


def _client() -> Any:
    try:
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise UsageError(
            "metrics for Prometheus need the package prometheus_client",
            hint="pip install prometheus-client",
        ) from None
