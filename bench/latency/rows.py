"""Rows that a server on loopback sends when they are due, and what came of them.

Row ``i`` is created at ``begin + i / rate``, whether the job keeps up or not: a row that waits is late. Spark's socket
source numbers rows as they come, and the progress of a query tells the numbers of each batch. So no row has to carry
its time through a job.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Seconds between two writes to the socket.
STEP = 0.002
PERCENTILES = (50, 90, 99)


class Stream(NamedTuple):
    """What is sent: ``rate`` rows a second of ``keys`` keys, of which those of the first seconds warm the job up."""

    rate: int
    keys: int
    warmup: float
    seconds: float

    @property
    def first(self) -> int:
        """The first row that is measured."""
        return round(self.rate * self.warmup)

    @property
    def num_rows(self) -> int:
        return round(self.rate * (self.warmup + self.seconds))


class Batch(NamedTuple):
    """The rows of a batch, from the number ``start`` to before ``end``, and when their results were visible."""

    start: int
    end: int
    visible: float


def serve(stream: Stream, pipe: Any) -> None:
    """Tell the port, wait for one connection, tell when row 0 is created, and send all rows as they are due."""
    rng = np.random.default_rng(1)
    keys, values = rng.integers(0, stream.keys, stream.num_rows), rng.integers(-100, 100, stream.num_rows)
    lines = [f"{key},{value}\n".encode() for key, value in zip(keys.tolist(), values.tolist(), strict=True)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin, sent = time.time(), 0
        pipe.send(begin)
        while sent < len(lines):
            due = min(len(lines), int((time.time() - begin) * stream.rate))
            if due > sent:
                connection.sendall(b"".join(lines[sent:due]))
                sent = due
            time.sleep(STEP)
        pipe.recv()  # the source ends with the connection


def batches(progress: Iterable[Mapping[str, Any]], visible: Mapping[int, float]) -> list[Batch]:
    """The batches with rows, from Spark's progress and the times at which their results were visible, by number."""
    found = []
    for each in progress:
        source = each["sources"][0]
        # Spark names the number of the last row, and -1 before the first.
        start, end = (int(source[name] or -1) + 1 for name in ("startOffset", "endOffset"))
        if end > start and each["batchId"] in visible:
            found.append(Batch(start, end, visible[each["batchId"]]))
    return found


def latencies(stream: Stream, begin: float, given: Iterable[Batch], until: float) -> NDArray[np.float64]:
    """Milliseconds from creation to visible result of each row that is measured; for one without, ``until`` counts."""
    visible = np.full(stream.num_rows, until)
    for batch in given:
        visible[batch.start : batch.end] = batch.visible
    created = begin + np.arange(stream.num_rows) / stream.rate
    return ((visible - created) * 1000)[stream.first :]


def percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    """The percentiles by their names, as ``p50``."""
    return {f"p{each}": round(float(np.percentile(values, each)), 1) for each in PERCENTILES}
