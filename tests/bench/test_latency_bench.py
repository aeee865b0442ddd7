"""The rows of the latency benchmark come when they are due, and each is counted with the batch that it was in."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time

import numpy as np
import pytest

from bench.latency import __main__ as latency
from bench.latency.rows import Batch, Stream, batches, latencies, percentiles, serve

STREAM = Stream(rate=100, keys=5, warmup=0.1, seconds=0.3)


def progress(batch_id: int, start: str | None, end: str) -> dict[str, object]:
    return {"batchId": batch_id, "sources": [{"startOffset": start, "endOffset": end}]}


def test_batches_have_the_rows_that_spark_counts_and_the_times_of_their_results() -> None:
    told = [progress(0, None, "-1"), progress(1, "-1", "9"), progress(2, "9", "9"), progress(3, "9", "10")]
    assert batches([*told, progress(4, "10", "12")], {1: 5.0, 2: 6.0, 3: 7.0}) == [
        Batch(0, 10, 5.0),
        Batch(10, 11, 7.0),
    ], "batch 4 has no result yet"


def test_each_row_counts_from_its_creation_to_the_result_of_its_batch() -> None:
    given = [Batch(0, 20, 1000.3), Batch(20, 30, 1000.5)]
    found = latencies(STREAM, 1000.0, given, until=1002.0)
    assert len(found) == 30, "the rows of the warm-up do not count"
    # Row 10 is created after 100 ms, and row 30 has no result.
    assert found[[0, 9, 10, 19, 20, 29]] == pytest.approx([200, 110, 300, 210, 1700, 1610])


def test_percentiles_of_rows_are_right() -> None:
    assert percentiles(np.arange(101.0)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_server_sends_every_row_and_none_before_it_is_due() -> None:
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=serve, args=(STREAM, theirs))
    thread.start()
    with socket.create_connection(("127.0.0.1", ours.recv())) as connection, connection.makefile() as lines:
        begin = ours.recv()
        found = [(line, time.time()) for _, line in zip(range(40), lines, strict=False)]
        ours.send(None)
    thread.join()
    assert all(came >= begin + number / 100 for number, (_, came) in enumerate(found))
    assert {int(line.split(",")[0]) for line, _ in found} <= set(range(5))
    assert len(found) == STREAM.num_rows


def test_ours_is_compared_with_sparks_aggregation_at_the_rate_of_the_target() -> None:
    of = {"p50": 280.0, "p99": 500.0}
    report = latency.Report()
    latency.compare(
        report, 1_000, {"published": of, "spark": {"p50": 1000.0, "p99": 1000.0}, "written": None}
    )
    latency.compare(report, 10_000, {"published": of, "spark": None})
    assert [(row["what"], row["ratio"], row["met"]) for row in report.rows] == [
        ("p50, published, 1,000 rows a second", 0.28, True),
        ("p99, published, 1,000 rows a second", 0.5, False),
    ]
