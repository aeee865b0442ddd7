"""Metrics of batches: OpenTelemetry gets what Prometheus gets, and the dashboard asks for what there is."""

from __future__ import annotations

import json
import re
from typing import Any

import prometheus_client
import pytest
from house_tools import ROOT
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

import statebackend as sb
from statebackend.spark.metrics import METRICS

PROGRESS = {
    "batchId": 3,
    "name": "orders",
    "numInputRows": 10,
    "numRowsLate": 2,
    "numRowsTotal": 7,
    "commitTimeMs": 250.0,
    "watermark": 5_000,
    "states": {"total": 7},
    "durationMs": {"batch": 40.0},
    "sinks": [{"output": "main", "durationMs": 20.0}],
}


def test_opentelemetry_has_the_values_of_prometheus() -> None:
    reader, registry = InMemoryMetricReader(), prometheus_client.CollectorRegistry()
    meter = MeterProvider([reader]).get_meter("orders")
    for on_batch in (sb.spark.opentelemetry(meter), sb.spark.prometheus("orders", registry)):
        on_batch(PROGRESS)
        on_batch({**PROGRESS, "isReplay": True})
        on_batch({**PROGRESS, "batchId": 4})
    found = {}
    exported: Any = reader.get_metrics_data()
    for each in exported.resource_metrics[0].scope_metrics[0].metrics:
        name = f"{each.name}_total" if isinstance(each.data, Sum) else each.name
        for point in each.data.data_points:
            found[name, tuple(sorted(point.attributes.items()))] = point.value
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }
    assert found == pytest.approx(expected, abs=60)  # the clock goes on between the two
    orders = (("query", "orders"),)
    assert found["statebackend_input_rows_total", orders] == 20
    assert found["statebackend_replays_total", orders] == 1
    assert found["statebackend_state_entries", (*orders, ("state", "total"))] == 7
    assert found["statebackend_watermark_lag_seconds", orders] > 1e9


def test_opentelemetry_refuses_objects_that_are_not_meters() -> None:
    with pytest.raises(sb.UsageError, match="expected a meter") as caught:
        sb.spark.opentelemetry("orders")
    assert caught.value.code == "USAGE.ARGUMENT"


def names_in(text: str) -> set[str]:
    return set(re.findall(r"statebackend_[a-z_]+", text))


def test_dashboard_and_page_name_the_metrics() -> None:
    names = {f"{name}_total" if each.is_counter else name for name, each in METRICS.items()}
    dashboard: Any = json.loads((ROOT / "docs/operate/grafana.json").read_text(encoding="utf-8"))
    shown = names_in(json.dumps(dashboard))
    assert shown <= names
    assert names - shown == {"statebackend_heartbeats_total", "statebackend_watermark_seconds"}
    assert names_in((ROOT / "docs/operate/monitor.md").read_text(encoding="utf-8")) == names
