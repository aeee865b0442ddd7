"""The jobs of hosts and of batches, one after the other, on a session that does what Spark does to them."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.cluster.shuffle_pieces import Attempt
from statebackend.cluster.shuffle_sender import ShufflePlan
from statebackend.cluster.wire import LinkError, Listener, connect
from statebackend.functions import map_with_state
from statebackend.runtime import BatchSource, Job
from statebackend.spark import executors
from statebackend.spark.executors import SparkEngine
from statebackend.types import LONG


class Jobs:
    """A session whose jobs do what they are told, in turn."""

    def __init__(self, *jobs: Callable[[], Any]) -> None:
        self._jobs = iter(jobs)
        self.conf: dict[str, str] = {}
        #: Whether somebody has stopped Spark.
        self.is_stopped = False
        self.sparkContext = SimpleNamespace(
            addJobTag=lambda tag: None,
            removeJobTag=lambda tag: None,
            cancelJobsWithTag=lambda tag: None,
            getLocalProperty=lambda name: None,
            _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: self.is_stopped)),
        )

    def range(self, *numbers: int) -> Jobs:
        return self

    def mapInArrow(self, *arguments: Any, **options: Any) -> Jobs:
        return self

    def collect(self) -> Any:
        return next(self._jobs)()


class Waits(threading.Event):
    """The end of an engine, for which nobody waits here: only how long they would have is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.noted.append(timeout)
        return self.is_set()


class Plan(NamedTuple):
    """As much of a host's plan as its engine looks at."""

    number: int = 0
    job_number: int = 0


def cancelled() -> Any:
    raise RuntimeError("the job was cancelled")


def kept(
    *jobs: Callable[[SparkEngine], Any], died: Callable[[int, str], bool] = lambda number, how: False
) -> tuple[list[float], list[Exception]]:
    """Run the jobs of one host until the last; how long it has waited after each, and the errors that end it."""
    made: list[SparkEngine] = []
    session = Jobs(*(lambda job=job: job(made[0]) for job in jobs))
    made.append(SparkEngine(SimpleNamespace(sparkSession=session), 1))  # type: ignore[arg-type]
    waits = made[0]._is_closed = Waits()
    failures: list[Exception] = []
    made[0]._keep(Plan(), failures.append, died)  # type: ignore[arg-type]
    return waits.noted, failures


def last(engine: SparkEngine) -> Any:
    engine._is_closed.set()
    return [[json.dumps({"ended": "the driver let it go"})]]


def test_a_host_that_gave_its_slot_back_begins_no_job_before_the_pause_is_over() -> None:
    """Else the query that waits for the slot would never get it."""

    def paused(engine: SparkEngine) -> Any:
        engine.pause(1000.0)
        return cancelled()

    waits, failures = kept(paused, last)
    assert len(waits) == 2, "it has waited before the last"
    assert waits[0] > 900
    assert failures == []


def test_the_job_of_a_host_that_was_ended_here_is_not_counted_among_those_that_fail() -> None:
    def ended(engine: SparkEngine) -> Any:
        engine.end_host(0)
        return cancelled()

    waits, failures = kept(*[ended] * 9, last)
    assert len(waits) == 10
    assert failures == []


def test_a_host_whose_jobs_all_fail_at_once_is_given_up() -> None:
    waits, failures = kept(*[lambda engine: cancelled()] * 4)
    assert [str(each.__cause__) for each in failures] == ["the job was cancelled"]
    assert len(waits) == 3


@pytest.mark.parametrize("had_started", [True, False])
def test_host_is_given_up_when_its_process_dies_each_time_before_it_has_started(had_started: bool) -> None:
    def dies(engine: SparkEngine) -> Any:
        return [[json.dumps({"died": "was ended by signal 9 (SIGKILL)"})]]

    ends: list[tuple[int, str]] = []

    def died(number: int, how: str) -> bool:
        ends.append((number, how))
        return had_started

    jobs = [dies] * (9 if had_started else 4)
    _, failures = kept(*jobs, *([last] if had_started else []), died=died)
    assert ends == [(0, "was ended by signal 9 (SIGKILL)")] * len(jobs)
    assert [type(each) for each in failures] == ([] if had_started else [sb.HostError])
    if failures:
        assert "it was ended by signal 9 (SIGKILL)" in str(failures[0].__cause__)


def test_host_has_a_job_from_its_beginning_until_its_end() -> None:
    def ended(engine: SparkEngine) -> Any:
        assert engine.is_job(0, 1)
        engine.pause(0.0)
        assert not engine.is_job(0, 1)
        return cancelled()

    def failed(engine: SparkEngine) -> Any:
        assert [engine.is_job(0, job) for job in (1, 2, 3)] == [False, True, False]
        return cancelled()

    _, failures = kept(ended, failed, last)
    assert failures == []


def test_job_of_a_host_that_ends_with_spark_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    def stopped(engine: SparkEngine) -> Any:
        engine._session.is_stopped = True
        return cancelled()

    waits, failures = kept(stopped)
    assert (waits, failures) == ([], [])
    assert "has failed" not in caplog.text


def told(secret: bytes) -> str:
    """What a task says that finds the host of another query at the port of one that has ended."""
    with Listener(b"of another query", lambda link, role: None) as other:
        try:
            connect(other.address, secret, role="task").close()
        except LinkError as error:
            return str(error)
    raise AssertionError("it has the same secret")


def test_a_host_of_another_query_at_the_port_of_a_host_costs_a_try() -> None:
    def failed() -> Any:
        raise RuntimeError(f"Job aborted due to stage failure: Task 0 failed: {told(plan.secret)}")

    session = Jobs(failed)
    frame = SimpleNamespace(sparkSession=session, columns=["user"], mapInArrow=session.mapInArrow)
    job = Job(map_with_state(lambda row, n: (None, 1), int), key="user")
    plan = ShufflePlan(job, LONG, Attempt(1, 7, 1), [("127.0.0.1", 1)], b"of the query", 0, False)
    incoming = BatchSource(lambda: None, None, source=frame)
    engine = SparkEngine(frame, 1)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="tasks could not send rows"):
        engine.scatter(incoming, plan)


class Columns:
    """A frame of one column, whose session has one setting."""

    def __init__(self, kind: str, large: str, asked: list[str]) -> None:
        self.schema, self._large, self._asked = kind, large, asked
        self.sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: large))

    def limit(self, rows: int) -> Columns:
        return self

    def toArrow(self) -> pa.Table:
        self._asked.append(self.schema)
        kind = pa.large_string() if self._large == "true" else pa.string()
        return pa.table({"a": pa.array([], kind), "statebackend_heartbeat": pa.array([], pa.int64())})


def test_spark_is_asked_for_the_columns_again_only_when_they_may_have_changed() -> None:
    engine = SparkEngine(SimpleNamespace(sparkSession=Jobs()), 1)  # type: ignore[arg-type]
    asked: list[str] = []
    given = [
        ("string", "false"),
        ("string", "false"),
        ("string", "true"),
        ("other", "true"),
        ("other", "true"),
    ]
    kinds = [
        engine.schema(BatchSource(cancelled, source=Columns(kind, large, asked))) for kind, large in given
    ]
    assert asked == ["string", "string", "other"]
    assert kinds == [
        pa.schema({"a": pa.large_string() if large == "true" else pa.string()}) for _, large in given
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_QUICKACK is Linux's")
def test_task_gets_its_first_rows_without_waiting_for_a_delayed_acknowledgement() -> None:
    assert min(second_write(executors._acknowledge_at_once) for _ in range(5)) < 0.03
    assert second_write(lambda: None) > 0.03, (
        "otherwise the system does not delay, and this test shows nothing"
    )


def second_write(acknowledge: Callable[[], None]) -> float:
    """Seconds until a second small write comes over a connection on which requests were answered, as a worker's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as worker,
        listener.accept()[0] as spark,
    ):
        for _ in range(20):
            spark.sendall(b"task")
            worker.recv(16)
            worker.sendall(b"done")
            spark.recv(16)
        spark.sendall(b"task")
        worker.recv(16)
        spark.sendall(b"rows")
        began = time.perf_counter()
        acknowledge()
        assert worker.recv(16) == b"rows"
        return time.perf_counter() - began
