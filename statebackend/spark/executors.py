"""Executors mode on Spark: hosts are jobs of one task that go on as long as the query, and tasks send them the rows.

A host's job is ``mapInArrow`` over one row, so that Spark Connect can run it too. Spark may run its task again; a
thread here begins another job whenever one has ended, until the query does.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.checkpoint import CheckpointReader
from statebackend.cluster.cluster_execution import ClusterExecution, Engine, Executors, needed_bytes
from statebackend.cluster.failures import described, raised, reported
from statebackend.cluster.host import Host, HostPlan
from statebackend.cluster.shuffle_partitioner import BatchSurvey, RowPartitioner
from statebackend.cluster.shuffle_sender import ShufflePlan, TaskReport, send_rows
from statebackend.cluster.shuffle_staging import remove_orphans
from statebackend.cluster.wire import LinkError, connect
from statebackend.errors import HostError, StateBackendError, UsageError, usage
from statebackend.runtime import BatchSource, Job
from statebackend.runtime.batch_identity import Identity
from statebackend.runtime.batch_progress import Figures
from statebackend.runtime.execution import Execution
from statebackend.spark.cluster_checks import check_memory, check_not_encrypted, check_slots, options_at
from statebackend.spark.driver_mode import BatchRows, RunMode
from statebackend.spark.heartbeats import COLUMN as HEARTBEAT
from statebackend.spark.session import Query, QueryRun, column_types, is_connect, is_set
from statebackend.types import Type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("statebackend.spark")

#: The column of the one row that a task gives.
_REPORT = pa.schema([("report", pa.string())])
#: So many jobs of a host that fail one after the other, each within so many seconds, are not an accident.
_FAILURES, _SOON = 4, 30.0
#: Seconds for hosts to end by themselves, and once more for Spark to end them.
_JOIN = 5.0
#: Codes of errors that another try of the batch mends: a connection was lost, or a host did not take rows.
#: Also by a host that ended in the middle of a handshake, or whose port now belongs to another query.
_OF_LINKS = re.compile(r"\[CLUSTER(\.(CLOSED|WIRE|STALLED|CONNECT|TOO_MANY|SECRET))?\]")
#: In the name of a column: PySpark's mapInArrow takes it for an expression.
_EXPRESSIONS = re.compile(r"[.`*]")


#: The engines of this process that are open: their hosts have slots that no other query gets.
_engines: weakref.WeakSet[SparkEngine] = weakref.WeakSet()
_engines_lock = threading.Lock()


def slots_of_hosts() -> int:
    """The slots of the hosts of all queries of this process."""
    with _engines_lock:
        return sum(engine.parallelism for engine in _engines)


class SparkEngine(Engine):
    """Runs ``parallelism`` hosts, and tasks, on the cluster of a frame's session."""

    def __init__(self, frame: DataFrame, parallelism: int, profile: Any = None) -> None:
        self._session, self._is_connect = frame.sparkSession, is_connect(frame)
        self._query_run = None if self._is_connect else QueryRun.of(self._session, Query.of(frame, "any").id)
        self.parallelism = parallelism
        #: The resources of a host, a ``ResourceProfile``; None: as for any task.
        self._profile = profile
        self._tag = f"statebackend-{secrets.token_hex(8)}"
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        # Spark may take a host for a slow task, and end it when another attempt is refused here; not in a barrier
        # stage, which it has only without dynamic allocation.
        get = self._session.conf.get
        self._is_elastic = is_set(get, "spark.dynamicAllocation.enabled")
        self._may_be_doubled = is_set(get, "spark.speculation") and not self._is_elastic
        self._is_scattering = self._is_cancelled = False
        #: The columns of the newest batch, and their inputs.
        self._schema: tuple[object, pa.Schema] | None = None
        #: The number of the job that runs the host of a range.
        self._jobs: dict[int, int] = {}
        #: The hosts whose job is to fail, because it was ended here.
        self._ended: set[int] = set()
        #: No host begins before.
        self._resumes_at = 0.0
        with _engines_lock:
            _engines.add(self)

    # --- hosts ---

    def keep_host(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        thread = threading.Thread(
            target=self._keep,
            args=(plan, failed, died),
            name=f"statebackend: host {plan.number}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _keep(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        from pyspark import cloudpickle

        dumps: Callable[[object], bytes] = cloudpickle.dumps
        failures = 0
        for job in itertools.count(1):
            if self._is_closed.is_set():
                return
            began = time.monotonic()
            self._jobs[plan.number] = job
            try:
                with self._tagged(self._tag_of(plan.number)):
                    one = self._session.range(0, 1, 1, 1)
                    # As bytes: the worker forks, and is not to load the user's modules before, with their threads.
                    serve = partial(_serve, dumps(plan._replace(job_number=job)))
                    rows = one.mapInArrow(
                        serve, "report string", barrier=self._may_be_doubled, profile=self._profile
                    ).collect()
                said = json.loads(rows[0][0])
                if "failed" in said:
                    raise raised(said["failed"], f"host {plan.number}")
                if "died" in said:
                    if "trace" in said:
                        _log.warning("the process of host %d was there:\n%s", plan.number, said["trace"])
                    if died(plan.number, said["died"]):
                        failures = 0
                    raise HostError(
                        "the process of a host has ended", code="HOST.LOST", detail=f"it {said['died']}"
                    )
                self._ended.discard(plan.number)
                _log.info("host %d has ended: %s", plan.number, said["ended"])
                failures = 0
            except Exception as error:  # noqa: BLE001 - Spark's, of many classes
                if self._is_closed.is_set() or self.has_ended():
                    return
                if plan.number in self._ended:
                    self._ended.discard(plan.number)
                else:
                    failures = failures + 1 if time.monotonic() - began < _SOON else 1
                    _log.warning("the job of host %d has failed: %s", plan.number, error)
                    if failures == _FAILURES:
                        failed(_no_host(plan.number, error))
                        return
            self._jobs.pop(plan.number, None)
            self._is_closed.wait(max(0.2, self._resumes_at - time.monotonic()))

    def is_job(self, number: int, job: int) -> bool:
        return self._jobs.get(number) == job

    def pause(self, seconds: float) -> None:
        self._resumes_at = time.monotonic() + seconds
        for number in range(self.parallelism):
            self.end_host(number)

    def num_executors(self) -> int | None:
        if self._is_connect or self._is_elastic:
            return None
        scala = self._session.sparkContext._jsc.sc()
        there: int = scala.getExecutorMemoryStatus().size()  # the driver is among them
        return max(1, there - 1)

    def _tag_of(self, number: int) -> str:
        return f"{self._tag}-host-{number}"

    def end_host(self, number: int) -> None:
        # Spark ends a process that does not end by itself.
        self._ended.add(number)
        self._jobs.pop(number, None)
        self._interrupt(self._tag_of(number))

    def has_ended(self) -> bool:
        if self._is_connect:
            return False
        try:
            has_stopped = self._session.sparkContext._jsc.sc().isStopped()
        except Exception:  # noqa: BLE001 - Spark is gone
            return True
        return has_stopped or (self._query_run is not None and not self._query_run.is_active())

    # --- batches ---

    def probe(self, addresses: Sequence[tuple[str, int]], secret: bytes, limit: float) -> None:
        tag, is_late = f"{self._tag}-probe", threading.Event()

        def give_up() -> None:
            is_late.set()
            self._interrupt(tag)

        timer = threading.Timer(limit, give_up)
        timer.daemon = True
        tasks = self.num_executors() or 1
        timer.start()
        try:
            with self._tagged(tag):
                frame = self._session.range(0, tasks, 1, tasks)
                rows = frame.mapInArrow(partial(_reach, addresses, secret), "report string").collect()
        except Exception as error:
            if not is_late.is_set():
                raise
            raise UsageError(
                "no task of a batch finds a slot next to the hosts",
                code="USAGE.SLOTS",
                detail=f"Executors({self.parallelism}), within {limit:g} s",
                hint="give the application more cores, or pass a smaller n to Executors(n)",
            ) from error
        finally:
            timer.cancel()
        unreached = [each["unreachable"] for each in _reports(rows) if "unreachable" in each]
        if unreached:
            raise HostError(
                "tasks do not reach the hosts",
                code="HOST.UNREACHABLE",
                detail=unreached[0],
                hint="executors must reach each other at any port, at the addresses by which they reach the driver",
            )

    def schema(self, incoming: BatchSource) -> pa.Schema:
        frame = incoming.source
        of = frame.schema, frame.sparkSession.conf.get("spark.sql.execution.arrow.useLargeVarTypes", None)
        if self._schema is None or self._schema[0] != of:
            # No job of Spark's: it knows that this is empty.
            schema = frame.limit(0).toArrow().schema
            self._schema = of, pa.schema([field for field in schema if field.name != HEARTBEAT])
        return self._schema[1]

    def scatter(self, incoming: BatchSource, plan: ShufflePlan) -> list[TaskReport]:
        frame = incoming.source
        plan = plan._replace(heartbeat_column=HEARTBEAT if HEARTBEAT in frame.columns else None)
        try:
            with self._tagged(f"{self._tag}-rows"):
                self._is_scattering, self._is_cancelled = True, False
                try:
                    rows = _mapped(frame, partial(_send, plan))
                finally:
                    self._is_scattering = False
        except Exception as error:
            if self._is_cancelled or _OF_LINKS.search(str(error)):
                raise LinkError("tasks could not send rows to hosts", detail=str(plan.of_try)) from error
            raise
        return [TaskReport.from_json(each) for each in _reports(rows)]

    def identify(self, frame: DataFrame, job: Job, key_type: Type) -> Identity:
        """The identity of a batch by its rows, which tasks look through."""
        heartbeats = HEARTBEAT if HEARTBEAT in frame.columns else None
        rows = _mapped(frame, partial(_look_through, job, key_type, heartbeats))
        return BatchSurvey.of(TaskReport.from_json(each).survey for each in _reports(rows)).identity()

    def cancel(self) -> None:
        if self._is_scattering:
            self._is_cancelled = True
            self._interrupt(f"{self._tag}-rows")

    def _interrupt(self, tag: str) -> None:
        with suppress(Exception):  # it has ended meanwhile, or Spark is gone
            if self._is_connect:
                self._session.interruptTag(tag)
            else:
                self._session.sparkContext.cancelJobsWithTag(tag)

    @contextmanager
    def _tagged(self, tag: str) -> Iterator[None]:
        """Mark the jobs of this thread, so that others can cancel them."""
        # A tag of a classic session is one of its thread: no other thread can interrupt by it.
        if self._is_connect:
            add, remove = self._session.addTag, self._session.removeTag
        else:
            add, remove = self._session.sparkContext.addJobTag, self._session.sparkContext.removeJobTag
        add(tag)
        try:
            yield
        finally:
            with suppress(Exception):  # Spark is gone
                remove(tag)

    def close(self) -> None:
        self._is_closed.set()
        # Hosts end when they are told, or find the driver gone; Spark ends tasks that have not begun or hang.
        self._join()
        for number, thread in enumerate(self._threads):
            if thread.is_alive():
                self._interrupt(self._tag_of(number))
        self._join()
        with _engines_lock:
            _engines.discard(self)

    def _join(self) -> None:
        until = time.monotonic() + _JOIN
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _no_host(number: int, error: Exception) -> HostError:
    made = HostError(
        "a host cannot be started",
        code="HOST.START",
        detail=f"host {number}, {_FAILURES} jobs have failed",
        hint="the error below says why; executors need the same library as the driver",
    )
    made.__cause__ = error
    return made


def _reports(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """What tasks report; the first error among it is raised."""
    found = [json.loads(row[0]) for row in rows]
    for each in found:
        if "error" in each:
            raise raised(each["error"], f"partition {each['partition']}")
    return found


def _row(report: object) -> pa.RecordBatch:
    return pa.record_batch([pa.array([json.dumps(report)], pa.string())], schema=_REPORT)


# --- on executors ---


def _serve(shipped: bytes, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield _row(reported(partial(_serve_here, shipped, os.getppid())))


def _serve_here(shipped: bytes, daemon: int) -> dict[str, Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    where = f"{socket.gethostname()}, process {os.getpid()}"
    # On the disks that Spark has for such; removed with the executor.
    found = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    folder = found if os.path.isdir(found) else None
    if folder is not None:
        remove_orphans(folder)
    # The folders of an executor are its own, and it has its own name in them.
    place = f"{socket.gethostname()} {os.environ.get('SPARK_LOCAL_DIRS', daemon)}"
    host = Host(
        pickle.loads(shipped),
        attempt=context.taskAttemptId(),
        executor=where,
        place=place,
        folder=folder,
        ends_process=True,
    )
    return {"ended": host.serve()}


def _reach(
    addresses: Sequence[tuple[str, int]], secret: bytes, rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for _ in rows:
        pass
    for number, address in enumerate(addresses):
        try:
            connect(address, secret, role="probe").close()
        except LinkError as error:
            yield _row({"unreachable": f"host {number} from {socket.gethostname()}: {error}"})
            return
    yield _row({})


def _send(plan: ShufflePlan, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    partition = context.partitionId()
    _acknowledge_at_once()
    try:
        report = send_rows(plan, rows, task=context.taskAttemptId(), partition=partition)
    except LinkError:
        raise
    except StateBackendError as error:
        # Another attempt would find the same: the driver raises it.
        yield _row({"error": described(error), "partition": partition})
    else:
        yield _row(report.to_json())


def _acknowledge_at_once() -> None:
    """Acknowledge what has come over this process's sockets: Spark sends the first rows of a task only then.

    It has sent the task in a separate write, and without TCP_NODELAY; the system would wait 40 ms with the answer.
    """
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # most are not sockets
            each = socket.socket(fileno=int(name))
            try:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            finally:
                each.detach()


def _look_through(
    job: Job, key_type: Type, heartbeats: str | None, rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    cutter = RowPartitioner(job, key_type, 1, digests=True, heartbeat_column=heartbeats)
    for each in rows:
        cutter.cut(each)
    yield _row(TaskReport(0, 0, cutter.survey, {}).to_json())


def _mapped(
    frame: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
) -> Any:
    """The reports that a function in tasks makes of the rows of a frame."""
    from pyspark.sql.types import StringType, StructField, StructType

    names = frame.columns
    if _EXPRESSIONS.search("".join(names)):
        frame = frame.toDF(*(f"_{number}" for number in range(len(names))))
        function = partial(_renamed, names, function)
    # A text would be parsed by Spark, once a batch.
    return frame.mapInArrow(function, StructType([StructField("report", StringType())])).collect()


def _renamed(
    names: Sequence[str],
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    rows: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    def named(batch: pa.RecordBatch) -> pa.RecordBatch:
        fields = [field.with_name(name) for field, name in zip(batch.schema, names, strict=True)]
        return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))

    return function(map(named, rows))


# --- the way of rows ---


class ExecutorsMode(RunMode):
    """Rows go to hosts, from the tasks that compute them."""

    def __init__(self, options: Executors) -> None:
        self._options = options
        self.most_files = options.n  # one of each host
        self._engine: SparkEngine | None = None

    def __repr__(self) -> str:
        return f"<rows to {self._options.n} hosts>"

    def unopened(self) -> ExecutorsMode:
        return ExecutorsMode(self._options)

    def execution(self, frame: DataFrame, job: Job) -> Callable[..., Execution]:
        check_not_encrypted(frame)
        options = options_at(frame, self._options)
        if options.profile is None:  # else hosts have their own slots and memory
            check_memory(frame, options.n, needed_bytes(job, options.bytes_in_memory))
            check_slots(frame, options.n, options.seconds("start_timeout"), slots_of_hosts)

        def make(*arguments: Any, **named: Any) -> ClusterExecution:
            self._engine = SparkEngine(frame, options.n, options.profile)
            return ClusterExecution(*arguments, **named, engine=self._engine, options=options)

        return make

    def open(self, store: CheckpointReader, frame: DataFrame) -> None:
        pass

    def rows_of(self, frame: DataFrame, job: Job) -> ExecutorsRows:
        assert self._engine is not None
        return ExecutorsRows(self._engine, frame, job)

    def close(self) -> None:
        self._engine = None  # the execution closes it


class ExecutorsRows(BatchRows):
    """The rows of one batch, which never come here."""

    def __init__(self, engine: SparkEngine, frame: DataFrame, job: Job) -> None:
        self._engine, self._frame, self._job = engine, frame, job

    def incoming(self, planned: Identity | None, execute: Callable[[], None]) -> BatchSource:
        return BatchSource(self._read, planned, execute, self._frame, self._identify)

    def _identify(self) -> Identity:
        return self._engine.identify(self._frame, self._job, self._job.key_type(column_types(self._frame)))

    def _read(self) -> pa.Table:
        raise usage.no_batch("the rows of a batch do not come to the driver in executors mode")

    def figures(self) -> Figures:
        return {"input": "executors"}

    def discard(self) -> None:
        pass  # hosts drop what no batch has taken
