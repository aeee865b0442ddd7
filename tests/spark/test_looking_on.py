"""Those who look on: a listener of Spark, a function of each batch, Prometheus, notebooks, and the text of errors."""

from __future__ import annotations

import logging
import pickle
import threading
from typing import Any

import prometheus_client
import pytest
from spark_streams import Collecting, Fails, Stream, len_of, numbers

import statebackend as sb

pytestmark = pytest.mark.spark


def test_on_batch_is_given_each_progress(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(3):
        stream.add(numbers(("a", n)))
    seen: list[dict[str, Any]] = []

    def look(progress: dict[str, Any]) -> None:
        seen.append(progress)
        if progress["batchId"] == 1:
            raise ValueError("who looks on")

    with caplog.at_level(logging.WARNING, "statebackend.spark"):
        stream.run(stream.batches(sink=len_of, on_batch=look))
    assert [each["batchId"] for each in seen] == [0, 1, 2], "what it raises stops nothing"
    assert [each["sinks"][0]["description"] for each in seen] == ["len_of"] * 3
    assert "on_batch failed for batch 1" in caplog.text


def test_metrics_for_prometheus(stream: Stream) -> None:
    registry = prometheus_client.CollectorRegistry()
    sink = Collecting(Fails(1))
    for n in range(3):
        stream.add(numbers(("a", n), ("b", n)))
    on_batch = sb.spark.prometheus("orders", registry)
    assert "Outage" in stream.fails(stream.batches(sink=sink, on_batch=on_batch))
    stream.run(stream.batches(sink=sink, on_batch=sb.spark.prometheus("orders", registry)))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"statebackend_{name}", {"query": "orders", **labels})

    # Batch 1 ran once, and was told of when it came again, because its sink had failed.
    assert (value("batches_total"), value("replays_total")) == (3, 1)
    assert (value("input_rows_total"), value("output_rows_total")) == (6, 6)
    assert (value("batch_id"), value("state_rows")) == (2, 2)
    assert (value("duration_seconds", part="sink") or -1) >= 0
    assert value("sink_seconds", output="main") is not None
    assert (value("state_entries", state="total"), value("rows_updated_total")) == (2, 6)
    pickle.loads(pickle.dumps(sb.spark.prometheus("orders")))


def test_a_listener_of_spark_reads_progress(stream: Stream) -> None:
    from pyspark.sql.streaming import StreamingQueryListener

    stream.add(numbers(("a", 1)))
    batches = stream.batches(sink=len_of)
    runs: set[Any] = set()
    found: list[Any] = []
    heard = threading.Event()

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            runs.add(event.runId)

        def onQueryProgress(self, event: Any) -> None:
            # Of queries that the session ran before, events may come late.
            if event.progress.runId in runs and event.progress.numInputRows:
                found.append((event.progress.batchId, batches.last_progress))
                heard.set()

        def onQueryTerminated(self, event: Any) -> None:
            pass

    listener = Listener()
    stream.spark.streams.addListener(listener)
    try:
        stream.run(batches)
        assert heard.wait(60)
    finally:
        stream.spark.streams.removeListener(listener)
    ((batch_id, progress),) = found
    assert batch_id == progress["batchId"] == 0


def test_a_notebook_shows_the_job_and_its_newest_batch(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    batches = stream.batches(sink=sb.spark.sinks.parquet(stream.folder / "<out>"))
    html = batches._repr_html_()
    assert "<caption>stateful Total</caption>" in html
    assert "none yet" in html
    assert "parquet[" in html
    assert "<out>" not in html, "names are text"
    stream.run(batches)
    assert "<th style='text-align:left'>rows of state</th><td>1</td>" in batches._repr_html_()
