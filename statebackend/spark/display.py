"""What users see of a job: in a notebook, on a terminal, in Prometheus, and in the traceback of an error.

Spark puts the whole traceback of an error into the text of its own, above a description of the query. The frames of the
user's code are shown, and no others if they do not matter.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from html import escape
from types import TracebackType
from typing import Any, TextIO, TypeVar

from statebackend.errors import StateBackendError, usage

#: How wide the bar of a batch is, and the parts of a batch that it shows, by the letter of each.
_WIDTH = 20
_PARTS = {"read": "r", "function": "f", "state": "s", "output": "o", "sink": "k"}

#: What a notebook shows of progress, with the name of each figure.
_SHOWN = {
    "batchId": "batch",
    "numInputRows": "rows in",
    "numOutputRows": "rows out",
    "numRowsTotal": "rows of state",
    "memoryUsedBytes": "bytes of state",
    "numTimersPending": "timers that wait",
    "watermark": "watermark",
    "numRowsLate": "late rows",
    "processedRowsPerSecond": "rows a second",
}


def table(lines: Iterable[tuple[str, object]], caption: str) -> str:
    """A small table of HTML; names and values are text."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(_text(value))}</td></tr>"
        for name, value in lines
    )
    return f"<table><caption>{escape(caption)}</caption>{rows}</table>"


def shown_progress(progress: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """The lines about the newest batch.

    >>> shown_progress({"batchId": 7, "durationMs": {"read": 3.0, "sink": 1.5, "batch": 9.0}})
    [('batch', 7), ('milliseconds', 'read 3, sink 2, batch 9')]
    """
    if progress is None:
        return [("batch", "none yet")]
    lines: list[tuple[str, object]] = [
        (label, progress[name]) for name, label in _SHOWN.items() if progress.get(name) is not None
    ]
    took = ", ".join(f"{name} {ms:.0f}" for name, ms in progress.get("durationMs", {}).items())
    return [*lines, ("milliseconds", took)] if took else lines


def progress_bar(file: TextIO | None = None) -> Callable[[Mapping[str, Any]], None]:
    """What shows the newest batch in one line, which it writes anew each time: pass it as ``on_batch=``.

    For terminals and notebooks. The line has a bar of where the time of the batch went: reading, the function, state,
    output and the sink. ``file`` is where it is written, by default the standard error.

    >>> import io
    >>> shown = io.StringIO()
    >>> progress_bar(shown)({
    ...     "batchId": 7, "numInputRows": 2000, "numRowsTotal": 10, "processedRowsPerSecond": 1234.5,
    ...     "durationMs": {"read": 20.0, "function": 50.0, "sink": 25.0, "batch": 100.0},
    ... })
    >>> print(shown.getvalue().strip())
    batch 7 [rrrrffffffffffkkkkk.] 2,000 rows in, 1,234 rows/s, state 10 rows
    """
    return _ProgressBar(file)


class _ProgressBar:
    """Picklable, unless a file is given."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._width = 0

    def __call__(self, progress: Mapping[str, Any]) -> None:
        file = self._file or sys.stderr
        line = (
            f"batch {progress['batchId']} [{_bar(progress['durationMs'])}] {progress['numInputRows']:,} rows in, "
            f"{progress['processedRowsPerSecond']:,.0f} rows/s, state {progress['numRowsTotal'] or 0:,} rows"
        )
        # Blanks over what the line before has had more.
        file.write("\r" + line.ljust(self._width))
        file.flush()
        self._width = len(line)


def _bar(durations: Mapping[str, float]) -> str:
    """A letter for each twentieth of a batch; a dot for what no letter stands for.

    >>> _bar({"read": 1.0, "state": 3.0, "batch": 8.0})
    'rrssssssss..........'
    """
    whole = durations["batch"] or 1.0
    bar, passed = "", 0.0
    for part, letter in _PARTS.items():
        passed += durations.get(part, 0.0)
        bar = bar.ljust(round(_WIDTH * min(passed / whole, 1.0)), letter)
    return bar.ljust(_WIDTH, ".")


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}"


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
        raise usage.package(
            "metrics for Prometheus need the package prometheus_client", hint="pip install prometheus-client"
        ) from None


E = TypeVar("E", bound=BaseException)

#: The beginnings of the paths of code that is no user's.
_INSTALLED = ("<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def shortened(error: E) -> E:
    """Take the frames of the library out of the traceback of an error and of those it came from; return the error.

    They stay where the library itself failed: in the traceback of an error of another class without the user's frames.
    """
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        frames = _frames(each.__traceback__)
        if isinstance(each, StateBackendError) or any(map(_is_users, frames)):
            with suppress(Exception):  # the class of a user's error may refuse any attribute
                each.__traceback__ = _joined([frame for frame in frames if not _is_library(frame)])
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return error


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _is_library(traceback: TracebackType) -> bool:
    return str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] == "statebackend"


def _is_users(traceback: TracebackType) -> bool:
    path = traceback.tb_frame.f_code.co_filename
    return not (_is_library(traceback) or path.startswith(_INSTALLED))


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    made = None
    for each in reversed(frames):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
