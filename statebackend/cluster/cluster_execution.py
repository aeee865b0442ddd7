"""The execution of batches by hosts: tasks send them rows, the driver tells them to run, and commits what they wrote.

A batch goes in tries. In each, all hosts expect it, tasks send their rows, the driver makes of the tasks' reports what
is to be known of the batch as a whole, and all hosts run. If a host or a connection is lost, all go back to the batch
before, and the next try begins when there is a host for each range again. Any other error is raised at once.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointStore, StateSnapshot, StoredFile
from statebackend.checkpoint.files import scheme_of
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.cluster import host_files
from statebackend.cluster.host import HostPlan
from statebackend.cluster.hosts import Answer, HostLostError, Hosts, Question, TooFewHostsError
from statebackend.cluster.shuffle_partitioner import BatchSurvey
from statebackend.cluster.shuffle_pieces import Attempt
from statebackend.cluster.shuffle_sender import ShufflePlan, TaskReport
from statebackend.cluster.wire import LinkError
from statebackend.errors import HostError, usage
from statebackend.runtime.batch_identity import BatchSource
from statebackend.runtime.batch_progress import Figures, Stopwatch
from statebackend.runtime.batch_rows import Survey
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.execution import BatchResult, BatchTimes, CommitRequest, Execution
from statebackend.runtime.job import Job
from statebackend.state import Duration, Size, milliseconds, number_of_bytes
from statebackend.types import Type


@dataclass(frozen=True)
class Executors:
    """Executors mode: state is in ``n`` Python processes (hosts) on Spark's executors. Pass it as ``run_on=``.

    At each host, waiting rows take ``batch_memory`` in memory and ``spill_disk`` on disk at most. Hosts must be there
    after ``start_timeout``. The driver gives up a host without a sign of life for ``heartbeat_timeout``; so does a host
    without one of the driver. A long call of the function does not count as silence: only ``batch_timeout`` limits the
    time of a batch on a host. A batch has ``max_attempts`` while hosts are lost.

    The driver listens at ``bind``, by default where Spark's driver does, at one of ``ports``; hosts reach it at
    ``advertised_address``. ``profile`` gives a host the resources of a ``pyspark.resource.ResourceProfile``. With
    ``local_copies``, a host keeps the newest base of its range on its local disk for its successor; by default if the
    store is an object store.

    >>> Executors(8, max_attempts=0)
    Traceback (most recent call last):
    statebackend.errors.UsageError: max_attempts=0 is out of range; expected a whole number from 1 [USAGE.OPTION]
    """

    n: int
    _: KW_ONLY
    batch_memory: Size = "256m"
    spill_disk: Size = "64g"
    start_timeout: Duration = "2 minutes"
    heartbeat_timeout: Duration = "30 seconds"
    batch_timeout: Duration | None = None
    max_attempts: int = 3
    bind: str | None = None
    ports: Sequence[int] = (0,)
    advertised_address: str | None = None
    profile: object = None
    local_copies: bool | None = None

    def __post_init__(self) -> None:
        given: dict[str, Any] = vars(self)
        for name in ("n", "max_attempts"):
            if type(given[name]) is not int or given[name] < 1:
                raise usage.option(f"{name}={given[name]!r} is out of range; expected a whole number from 1")
        number_of_bytes("batch_memory", self.batch_memory, least=1)
        number_of_bytes("spill_disk", self.spill_disk)
        for name in ("start_timeout", "heartbeat_timeout", "batch_timeout"):
            if given[name] is not None or name != "batch_timeout":
                milliseconds(name, given[name])
        if self.local_copies not in (None, True, False):
            raise usage.option(f"unknown local_copies={self.local_copies!r}; expected True, False or None")
        for name in ("bind", "advertised_address"):
            if given[name] is not None and not (isinstance(given[name], str) and given[name]):
                raise usage.option(f"unknown {name}={given[name]!r}; expected an address, such as '10.0.0.1'")
        ports = given["ports"]
        is_list = isinstance(ports, Sequence) and not isinstance(ports, str)
        if not is_list or not ports or not all(type(port) is int and 0 <= port < 65536 for port in ports):
            raise usage.option(f"unknown ports={ports!r}; expected a list of ports, 0 for any")
        if given["profile"] is not None and not hasattr(given["profile"], "taskResources"):
            raise usage.option(
                f"a {type(given['profile']).__name__} is not a profile; expected a pyspark.resource.ResourceProfile"
            )

    def seconds(self, timeout: str) -> float:
        """One of the timeouts, in seconds."""
        return milliseconds(timeout, getattr(self, timeout)) / 1000

    @property
    def bytes_in_memory(self) -> int:
        """The memory for rows that wait at each host."""
        return number_of_bytes("batch_memory", self.batch_memory)


_log = logging.getLogger(__name__)


class Engine(ABC):
    """Runs the hosts of one query, and the tasks of its batches."""

    @abstractmethod
    def keep_host(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        """Run a host, and another one whenever it ends, until `close`; ``failed`` is told if that cannot go on.

        ``died`` is told the number of a host whose process has ended by itself, and how. It returns True if the host
        had started.
        """

    @abstractmethod
    def is_job(self, number: int, job: int) -> bool:
        """True while this job runs the host of a range. The process of a job may go on after it, and come late."""

    @abstractmethod
    def num_executors(self) -> int | None:
        """How many processes there are for hosts to be in; None if that cannot be told, or changes."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Begin no host for so long; those that wait for a slot wait no longer."""

    @abstractmethod
    def probe(self, addresses: Sequence[tuple[str, int]], secret: bytes, limit: float) -> None:
        """Let a task reach every host within so many seconds: `UsageError` without a slot for one, `HostError` if
        it does not reach them.
        """

    @abstractmethod
    def schema(self, incoming: BatchSource) -> pa.Schema:
        """The columns of a batch, without the heartbeat column."""

    @abstractmethod
    def scatter(self, incoming: BatchSource, plan: ShufflePlan) -> list[TaskReport]:
        """Let tasks compute a batch and send its rows; the reports of the attempts that count.

        `LinkError` if tasks have failed because they could not reach a host, or hosts did not take their rows.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Let the tasks of a batch fail, if there are any: a host was lost, and they keep its successor from a slot."""

    @abstractmethod
    def end_host(self, number: int) -> None:
        """End the process of a host that hangs, as far as possible, so that another can take its place."""

    @abstractmethod
    def has_ended(self) -> bool:
        """True if the query or its cluster is known to have ended: hosts end then, and are not lost."""

    @abstractmethod
    def close(self) -> None:
        """Run no hosts any more. Idempotent."""


#: Seconds that the end of a host's process may take to be known here, once its connection has ended.
_REPORT = 5.0


class ClusterExecution(Execution):
    """Runs the batches of a job by hosts, which ``engine`` keeps running.

    They begin with the newest checkpoint of the store, or with ``source`` if there is none.
    ``delivered`` names the outputs that have a sink, with the columns that cut each into files.
    """

    def __init__(
        self,
        job: Job,
        key_type: Type,
        store: CheckpointStore,
        *,
        source: Checkpoint | Savepoint | None = None,
        delivered: Mapping[str, Sequence[str]],
        engine: Engine,
        options: Executors,
    ) -> None:
        self._job, self._key_type, self._store = job, key_type, store
        self._engine, self._options = engine, options
        self._epoch = store.epoch
        self._secret = secrets.token_bytes(32)
        self._writer = store.data_writer()
        #: The file that shows hosts that they see this store.
        self._token: host_files.Token | None = None
        #: True once a task has reached all hosts.
        self._has_probed = False
        #: The newest checkpoint, which hosts restore; None if there is none.
        self._committed_id = store.latest()
        #: Counts all tries of all batches: later ones have greater numbers.
        self._attempt = 0
        try:
            self._hosts = Hosts(
                options.n,
                self._secret,
                self._epoch,
                self._restore,
                bind=options.bind or "127.0.0.1",
                ports=options.ports,
                silence=options.seconds("heartbeat_timeout"),
                needs_bytes=needed_bytes(job, options.bytes_in_memory),
                num_executors=engine.num_executors,
            )
        except BaseException:
            engine.close()
            raise
        self._hosts.on_restored = self._check_token
        self._hosts.on_loss = engine.cancel
        self._hosts.on_hang = engine.end_host
        self._hosts.has_ended = engine.has_ended
        self._hosts.is_job = engine.is_job
        try:
            self._token = host_files.leave_token(self._writer)
            host, port = self._hosts.address
            is_far = scheme_of(store.uri) not in (None, "file")
            for number in range(options.n):
                plan = HostPlan(
                    job=job,
                    key_type=key_type,
                    store=store.unopened(),
                    writer=self._writer,
                    source=source,
                    delivered=dict(delivered),
                    number=number,
                    parallelism=options.n,
                    driver=(options.advertised_address or host, port),
                    secret=self._secret,
                    lease=options.seconds("heartbeat_timeout"),
                    memory=options.bytes_in_memory,
                    quota=number_of_bytes("spill_disk", options.spill_disk),
                    has_copies=is_far if options.local_copies is None else options.local_copies,
                )
                engine.keep_host(plan, self._hosts.fail, self._hosts.died)
        except BaseException:
            self.close()
            raise

    def _restore(self) -> Question:
        assert self._token is not None
        return Question("restore", {"checkpoint": self._committed_id, "token": self._token})

    def _check_token(self, answer: Answer) -> None:
        host_files.check_token(self._writer, answer["token"], "a host")
        host_files.remove_token(self._writer, answer["token"])

    def _ready(self) -> list[tuple[str, int]]:
        """The addresses of hosts, once there is one for each range.

        While some are missing for want of slots, none keeps its own: another query may wait for it as we do for theirs.
        """
        limit, tries = self._options.seconds("start_timeout"), self._options.max_attempts
        for nth in range(1, tries + 1):
            try:
                return self._hosts.wait_ready(limit)
            except TooFewHostsError as error:
                if nth == tries or self._engine.has_ended():
                    raise
                pause = random.uniform(0.0, limit)
                _log.warning(
                    "hosts end, and others begin in %.1f s, try %d of %d: %s", pause, nth, tries, error
                )
                self._engine.pause(pause)
                self._hosts.release()
                until = time.monotonic() + pause
                while (left := until - time.monotonic()) > 0 and not self._engine.has_ended():
                    time.sleep(min(left, 1.0))
        raise AssertionError("max_attempts is at least 1")

    def _probe(self, addresses: list[tuple[str, int]]) -> None:
        """See that batches have a slot, and their tasks reach hosts."""
        if self._has_probed:
            return
        try:
            self._engine.probe(addresses, self._secret, self._options.seconds("start_timeout"))
        except HostError as error:
            if self._hosts.are_ready:
                raise
            raise HostLostError("a host was lost while a task looked for it") from error
        self._has_probed = True

    def run(self, batch_id: int, incoming: BatchSource, begun: BatchTimes, watch: Stopwatch) -> CommitRequest:
        tries = self._options.max_attempts
        for nth in range(1, tries + 1):
            with watch.part("hosts"):
                addresses = self._ready()
            self._hosts.forget_ends()
            self._attempt += 1
            of_try = Attempt(self._epoch, batch_id, self._attempt)
            try:
                self._probe(addresses)
                return self._tried(of_try, incoming, begun, watch, addresses)
            except HostLostError as error:
                _log.warning("batch %d is taken back, try %d of %d: %s", batch_id, nth, tries, error)
                self._take_back(of_try)
                if nth == tries:
                    raise self._lost(f"batch {batch_id}, {tries} tries") from error
            except BaseException:
                self._take_back(of_try)
                raise
        raise AssertionError("max_attempts is at least 1")

    def _lost(self, detail: str) -> HostError:
        """The error for a batch that cost hosts in each try, with all that is known of their ends."""
        ends = self._hosts.ends(_REPORT)
        hint = "the logs of the executors say what became of them"
        if any("SIGKILL" in how for how in ends.values()):
            hint = "the system ends processes by SIGKILL where memory is short: " + hint
        return HostError(
            "hosts were lost in every try of a batch",
            code="HOST.LOST",
            detail="; ".join(
                [detail, *(f"the process of host {number} {how}" for number, how in sorted(ends.items()))]
            ),
            hint=hint,
        )

    def _take_back(self, of_try: Attempt) -> None:
        self._hosts.tell_living(Question("undo", {"batch": of_try.batch_id, "attempt": of_try.attempt}))
        self._store.abort(of_try.batch_id)

    def _tried(
        self,
        of_try: Attempt,
        incoming: BatchSource,
        begun: BatchTimes,
        watch: Stopwatch,
        addresses: list[tuple[str, int]],
    ) -> CommitRequest:
        job, named = self._job, {"batch": of_try.batch_id, "attempt": of_try.attempt}
        self._store.data_writer(of_try.batch_id)  # so that files that snapshots may build on stay
        self._hosts.ask_all([Question("expect", named)] * len(addresses))
        with watch.part("scatter"):
            plan = ShufflePlan(
                job,
                self._key_type,
                of_try,
                addresses,
                self._secret,
                clock=begun.clock,
                digests=incoming.planned is None,
            )
            reports = self._scattered(incoming, plan)
        survey = BatchSurvey.of(report.survey for report in reports)
        survey.check(job)
        told = (
            Survey() if job.event_time is None else survey.times(job.event_time, begun.watermark, begun.idle)
        )
        times = {
            "now": begun.now,
            "clock": begun.clock,
            "before": begun.watermark,
            "after": told.after,
            "told": told.told,
            "follows": self._committed_id,
            "planned": begun.planned,
        }
        schema = self._engine.schema(incoming).serialize().to_pybytes()
        with watch.part("run"):
            answers = self._hosts.ask_all(
                [
                    Question("run", {**named, **times, "tasks": _pieces_of(index, reports)}, schema)
                    for index in range(len(addresses))
                ],
                None if self._options.batch_timeout is None else self._options.seconds("batch_timeout"),
            )
        ran = _merged(answers)
        ran.figures.update(
            numInputRows=survey.num_rows,
            numRowsDroppedByNullKey=survey.num_nulls,
            numHeartbeats=survey.heartbeats,
        )
        of_rows = None
        if job.event_time is not None:
            of_rows = replace(RowTimes.of_none(begun.watermark, told.after), told=told.told)
        return CommitRequest(ran, incoming.planned or survey.identity(), of_rows)

    def _scattered(self, incoming: BatchSource, plan: ShufflePlan) -> list[TaskReport]:
        try:
            return self._engine.scatter(incoming, plan)
        except Exception as error:
            # Tasks fail in many ways when a host goes, and are cancelled then.
            if isinstance(error, LinkError) or not self._hosts.are_ready:
                raise HostLostError(
                    "hosts did not get all rows of the batch", detail=str(plan.of_try)
                ) from error
            raise

    def committed(self, batch_id: int) -> None:
        self._committed_id = batch_id
        self._hosts.tell_committed(batch_id)

    def close(self) -> None:
        try:
            self._hosts.close()
        finally:
            self._engine.close()
            if self._token is not None:
                host_files.remove_token(self._writer, self._token)


def needed_bytes(job: Job, memory: int) -> int:
    """The most memory that a host may take; 0 without a limit."""
    of_state: int = getattr(job.backend, "max_bytes", 0)
    return of_state + memory if of_state else 0


def _pieces_of(index: int, reports: Sequence[TaskReport]) -> list[dict[str, Any]]:
    """The pieces of one host, in the one order that all hosts have rows in."""
    in_order = sorted(reports, key=lambda report: (report.partition, report.task))
    return [
        {"task": report.task, "sums": list(report.sums[index])} for report in in_order if index in report.sums
    ]


def _merged(answers: Sequence[Answer]) -> BatchResult:
    """What all hosts have written, as one."""
    snapshots = [StateSnapshot.from_json(each) for answer in answers for each in answer["snapshots"]]
    outputs: dict[str, list[StoredFile]] = {}
    for answer in answers:
        for name, files in answer["outputs"].items():
            outputs.setdefault(name, []).extend(StoredFile.from_json(file) for file in files)
    figures = merged_figures([answer["figures"] for answer in answers])
    figures["hosts"] = [{"numRows": answer["rows"], "durationMs": answer["durations"]} for answer in answers]
    return BatchResult(snapshots, outputs, figures)


#: Figures of a batch as a whole, which are the same at all hosts.
_ALIKE = ("batchId", "watermark")


def merged_figures(figures: Sequence[Figures]) -> Figures:
    """The figures of all hosts as one: numbers add up, names are put together.

    >>> merged_figures([{"batchId": 7, "numOutputRows": 2, "outputs": {"main": 2}}, {"batchId": 7, "numOutputRows": 1}])
    {'batchId': 7, 'numOutputRows': 3, 'outputs': {'main': 2}}
    """
    names = dict.fromkeys(name for each in figures for name in each)
    made: Figures = {}
    for name in names:
        found = [each[name] for each in figures if each.get(name) is not None]
        if not found or name in _ALIKE:
            made[name] = found[0] if found else None
        elif isinstance(found[0], Mapping):
            total: Counter[str] = Counter()
            for each in found:
                total.update({member: number or 0 for member, number in each.items()})
            made[name] = dict(total)
        elif isinstance(found[0], list):
            made[name] = sorted({member for each in found for member in each})
        else:
            made[name] = sum(found)
    return made
