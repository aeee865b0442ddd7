"""Metrics of each batch, for Prometheus and for OpenTelemetry: functions for ``on_batch=``."""

from __future__ import annotations

import importlib
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from statebackend.errors import usage

Progress = Mapping[str, Any]


class Metric(NamedTuple):
    """A metric, and the label that it has in addition to the name of the query."""

    text: str
    label: str | None = None
    is_counter: bool = False


#: All metrics by name. Prometheus adds ``_total`` to the names of counters.
METRICS = {
    "statebackend_batch_id": Metric("The newest batch"),
    "statebackend_state_rows": Metric("Rows of state"),
    "statebackend_state_entries": Metric("Entries of each state", "state"),
    "statebackend_state_bytes": Metric("Memory that the entries of state take"),
    "statebackend_rows_updated": Metric("Rows of state that were written", is_counter=True),
    "statebackend_rows_removed": Metric("Rows of state that were removed", is_counter=True),
    "statebackend_timers_pending": Metric("Timers that wait"),
    "statebackend_commit_seconds": Metric("Writing state and output of the newest batch"),
    "statebackend_watermark_seconds": Metric("The watermark after the newest batch"),
    "statebackend_watermark_lag_seconds": Metric("The clock less the watermark after the newest batch"),
    "statebackend_input_rows": Metric("Rows in", is_counter=True),
    "statebackend_output_rows": Metric("Rows out", is_counter=True),
    "statebackend_late_rows": Metric("Rows that were late", is_counter=True),
    "statebackend_failed_rows": Metric("Rows whose function raised", is_counter=True),
    "statebackend_rows_without_key": Metric("Rows that were dropped for a null key", is_counter=True),
    "statebackend_timers_fired": Metric("Timers that have fired", is_counter=True),
    "statebackend_heartbeats": Metric("Ticks of the heartbeat", is_counter=True),
    "statebackend_batches": Metric("Batches that have run", is_counter=True),
    "statebackend_replays": Metric("Batches that were delivered again", is_counter=True),
    "statebackend_duration_seconds": Metric("Time of the newest batch, by its parts", "part"),
    "statebackend_sink_seconds": Metric("Time of the sink of an output", "output"),
}

#: Figures of progress that are set, with the metric of each and its unit.
_GAUGES = {
    "batchId": ("statebackend_batch_id", 1.0),
    "numRowsTotal": ("statebackend_state_rows", 1.0),
    "memoryUsedBytes": ("statebackend_state_bytes", 1.0),
    "numTimersPending": ("statebackend_timers_pending", 1.0),
    "commitTimeMs": ("statebackend_commit_seconds", 0.001),
    "watermark": ("statebackend_watermark_seconds", 0.001),
}
#: Figures that add up from batch to batch.
_COUNTERS = {
    "numInputRows": "statebackend_input_rows",
    "numOutputRows": "statebackend_output_rows",
    "numRowsUpdated": "statebackend_rows_updated",
    "numRowsRemoved": "statebackend_rows_removed",
    "numRowsLate": "statebackend_late_rows",
    "numRowsFailed": "statebackend_failed_rows",
    "numRowsDroppedByNullKey": "statebackend_rows_without_key",
    "numTimersFired": "statebackend_timers_fired",
    "numHeartbeats": "statebackend_heartbeats",
}


def prometheus(query: str, registry: Any = None) -> Callable[[Progress], None]:
    """What sets metrics for Prometheus after each batch: pass it as ``on_batch=``. Needs the extra ``metrics``.

    ``query`` is the label of the metrics, and ``registry`` one of prometheus_client; by default its own, which
    ``prometheus_client.start_http_server`` serves. A batch that is delivered again counts once.

    >>> import prometheus_client
    >>> registry = prometheus_client.CollectorRegistry()
    >>> prometheus("orders", registry)({"batchId": 3, "numInputRows": 10, "durationMs": {"batch": 40.0}})
    >>> registry.get_sample_value("statebackend_input_rows_total", {"query": "orders"})
    10.0
    """
    return _Prometheus(query, registry)


def opentelemetry(meter: Any, query: str | None = None) -> Callable[[Progress], None]:
    """What sets metrics of OpenTelemetry after each batch: pass it as ``on_batch=``.

    ``meter`` is one of OpenTelemetry's API 1.23 or newer: ``opentelemetry.metrics.get_meter("orders")``. ``query`` is
    the attribute ``query`` of each value; default: the name of the streaming query. A batch that comes again counts
    once. The names are those for Prometheus, without ``_total``.
    """
    return _OpenTelemetry(query, meter)


class _Metrics(ABC):
    """Sets the metrics of a query after each batch."""

    def __init__(self, query: str | None) -> None:
        self._query = query
        #: The newest batch that was counted. One whose sink failed is first told of when it is delivered again.
        self._counted: int | None = None

    def __call__(self, progress: Progress) -> None:
        query = str(progress.get("name") or "") if self._query is None else self._query
        for name, label, value in _gauges(progress):
            self._set(name, value, query, label)
        if progress.get("isReplay"):
            self._add("statebackend_replays", 1, query)
            if progress["batchId"] == self._counted:
                return
        self._counted = progress["batchId"]
        self._add("statebackend_batches", 1, query)
        for figure, name in _COUNTERS.items():
            self._add(name, progress.get(figure) or 0, query)

    @abstractmethod
    def _set(self, name: str, value: float, query: str, label: str | None) -> None:
        """Set a metric."""

    @abstractmethod
    def _add(self, name: str, value: float, query: str) -> None:
        """Add to a counter."""


def _gauges(progress: Progress) -> Iterator[tuple[str, str | None, float]]:
    """What is set: the metric, the value of its label if it has one, and the value."""
    for figure, (name, unit) in _GAUGES.items():
        value = progress.get(figure)
        if value is not None:
            yield name, None, value * unit
    if progress.get("watermark") is not None:
        yield "statebackend_watermark_lag_seconds", None, time.time() - progress["watermark"] / 1000
    for state, entries in (progress.get("states") or {}).items():
        yield "statebackend_state_entries", state, entries
    for part, took in progress.get("durationMs", {}).items():
        yield "statebackend_duration_seconds", part, took / 1000
    for sink in progress.get("sinks", ()):
        yield "statebackend_sink_seconds", sink["output"], sink["durationMs"] / 1000


class _OpenTelemetry(_Metrics):
    def __init__(self, query: str | None, meter: Any) -> None:
        super().__init__(query)
        if not callable(getattr(meter, "create_gauge", None)):
            raise usage.argument(
                f"cannot make metrics with a {type(meter).__name__}; expected a meter of OpenTelemetry 1.23 or newer",
                hint='pass opentelemetry.metrics.get_meter("orders")',
            )
        self._made = {
            name: (meter.create_counter if each.is_counter else meter.create_gauge)(
                name, unit="s" if name.endswith("_seconds") else "1", description=each.text
            )
            for name, each in METRICS.items()
        }

    def _attributes(self, name: str, query: str, label: str | None) -> dict[str, str]:
        more = METRICS[name].label
        return {"query": query} if more is None or label is None else {"query": query, more: label}

    def _set(self, name: str, value: float, query: str, label: str | None) -> None:
        self._made[name].set(value, self._attributes(name, query, label))

    def _add(self, name: str, value: float, query: str) -> None:
        self._made[name].add(value, self._attributes(name, query, None))


#: The metrics in each registry: a name can be registered only once.
_registered: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Prometheus(_Metrics):
    """Picklable, unless a registry is given: the metrics are made where the first batch runs."""

    def __init__(self, query: str, registry: Any) -> None:
        super().__init__(query)
        _client()
        self._registry = registry

    def _set(self, name: str, value: float, query: str, label: str | None) -> None:
        labels = [query] if label is None else [query, label]
        _made(self._registry)[name].labels(*labels).set(value)

    def _add(self, name: str, value: float, query: str) -> None:
        _made(self._registry)[name].labels(query).inc(value)


def _made(registry: Any) -> dict[str, Any]:
    client = _client()
    given = client.REGISTRY if registry is None else registry
    with _lock:
        if given not in _registered:
            _registered[given] = {
                name: (client.Counter if each.is_counter else client.Gauge)(
                    name, each.text, ["query", *([each.label] if each.label else [])], registry=given
                )
                for name, each in METRICS.items()
            }
        return _registered[given]


def _client() -> Any:
    try:
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise usage.package(
            "metrics for Prometheus need the package prometheus_client", hint="pip install prometheus-client"
        ) from None
