"""What a task does with the rows of a batch: it cuts them by the ranges of the hosts and sends each its own.

A task reports to the driver when every host has acknowledged its piece, and not before. So the reports that the engine
brings to the driver name pieces that are there as a whole, whichever attempts of tasks it has kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyarrow as pa

from statebackend.cluster.failures import raised
from statebackend.cluster.shuffle_partitioner import BatchSurvey, RowPartitioner
from statebackend.cluster.shuffle_pieces import Attempt, Kind, PieceSum, PieceSums
from statebackend.cluster.wire import BytesLike, Link, LinkError, connect
from statebackend.runtime.job import Job
from statebackend.types import Type

TASKS_LINK = "task"
#: Rows wait until they have so many bytes, or the task ends: an engine's batches, cut up, would be many small ones.
_MESSAGE = 1 << 20
#: A batch of the engine that is larger goes in parts, far below what a frame may be; a single row does not.
_LARGEST = 64 << 20
#: Seconds for a host to acknowledge what it has got, which it may have to write to its disk.
_PATIENCE = 300.0
#: Seconds for a host's last words before it closed its link.
_LAST_WORDS = 1.0


class ShufflePlan(NamedTuple):
    """The report of the tasks of a batch need to know. The engine ships it with them."""

    job: Job
    key_type: Type
    of_try: Attempt
    #: Where the hosts take rows, by range.
    addresses: list[tuple[str, int]]
    secret: bytes
    #: The clock's reading, for times that are too far ahead of it.
    clock: int
    #: True if nothing else tells the rows of the batch from others.
    digests: bool
    #: The column that marks ticks of a heartbeat.
    heartbeat_column: str | None = None


class TaskReport(NamedTuple):
    """What a task tells the driver."""

    #: The engine's id of the attempt, and of its partition: reports are in order of the latter.
    task: int
    partition: int
    survey: BatchSurvey
    #: Of the pieces that hosts have, by range.
    sums: dict[int, PieceSum]

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "partition": self.partition,
            "survey": self.survey.to_json(),
            "sums": {str(index): list(each) for index, each in self.sums.items()},
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> TaskReport:
        sums = {int(index): PieceSum(*each) for index, each in found["sums"].items()}
        return cls(found["task"], found["partition"], BatchSurvey.from_json(found["survey"]), sums)


def send_rows(
    plan: ShufflePlan, batches: Iterable[pa.RecordBatch], *, task: int, partition: int
) -> TaskReport:
    """Send the rows of a task to the hosts; return when they have acknowledged all. O(bytes)."""
    cutter = RowPartitioner(
        plan.job,
        plan.key_type,
        len(plan.addresses),
        clock=plan.clock,
        digests=plan.digests,
        heartbeat_column=plan.heartbeat_column,
    )
    with ExitStack() as links:
        ways = [_HostStream(plan, index, task, links) for index in range(len(plan.addresses))]
        for rows in batches:
            cut = cutter.cut(rows)
            for way, of_host in zip(ways, cut.by_host, strict=True):
                if of_host is not None:
                    way.add("rows", of_host)
                if cut.broadcast is not None:
                    way.add("broadcast", cut.broadcast)
        for way in ways:
            way.end()
        sums = {way.index: way.acknowledged() for way in ways if way.has_any}
    return TaskReport(task, partition, cutter.survey, sums)


def _parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The same rows, in parts that are small enough for a message, as far as rows are."""
    if rows.nbytes <= _LARGEST or rows.num_rows < 2:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _parts(rows.slice(0, half))
    yield from _parts(rows.slice(half))


class _HostStream:
    """The way of rows from a task to one host. It is opened by the first of them."""

    def __init__(self, plan: ShufflePlan, index: int, task: int, links: ExitStack) -> None:
        self.index = index
        self._plan, self._task, self._links = plan, task, links
        self._link: Link | None = None
        self._held: dict[Kind, list[pa.RecordBatch]] = {"rows": [], "broadcast": []}
        self._num_bytes = {"rows": 0, "broadcast": 0}
        self._sums = PieceSums()

    @property
    def has_any(self) -> bool:
        return self._link is not None

    def add(self, kind: Kind, rows: pa.RecordBatch) -> None:
        self._held[kind].append(rows)
        self._num_bytes[kind] += rows.nbytes
        if self._num_bytes[kind] >= _MESSAGE:
            self._send(kind)

    def _send(self, kind: Kind) -> None:
        held, self._held[kind], self._num_bytes[kind] = self._held[kind], [], 0
        if not held:
            return
        link = self._link or self._opened(held[0].schema)
        for rows in pa.Table.from_batches(held).combine_chunks().to_batches():
            for part in _parts(rows):
                message = part.serialize()
                self._sums.add(kind, message, part.num_rows)
                self._say(link, kind, message)

    def _say(self, link: Link, op: str, body: BytesLike = b"") -> None:
        try:
            link.send(op, body)
        except LinkError:
            # Perhaps the host has said why it closed.
            try:
                said = link.receive(_LAST_WORDS).header
            except (LinkError, TimeoutError):
                said = None
            if said is not None:
                self._check(said)
            raise

    def _opened(self, schema: pa.Schema) -> Link:
        plan = self._plan
        self._link = link = connect(plan.addresses[self.index], plan.secret, role=TASKS_LINK)
        self._links.enter_context(link)
        epoch, batch_id, attempt = plan.of_try
        link.send("piece", schema.serialize(), epoch=epoch, batch=batch_id, attempt=attempt, task=self._task)
        return link

    def end(self) -> None:
        self._send("broadcast")
        self._send("rows")
        if self._link is not None:
            self._say(self._link, "end")

    def acknowledged(self) -> PieceSum:
        """The sums of the piece, which the host has found to be the same."""
        assert self._link is not None
        try:
            said = self._link.receive(_PATIENCE).header
        except TimeoutError as error:
            raise LinkError(
                "a host has not acknowledged the rows that it was sent", detail=self._where
            ) from error
        self._check(said)
        total = self._sums.total
        if PieceSum(*said["sums"]) != total:
            raise LinkError("a host has got other rows than it was sent", detail=self._where)
        return total

    @property
    def _where(self) -> str:
        return f"host {self.index}, {self._plan.of_try}, task {self._task}"

    def _check(self, said: Mapping[str, Any]) -> None:
        """Raise if the host says that it has not taken the rows."""
        if said["op"] == "failed":
            raise raised(said["error"], self._where)
        if said["op"] != "staged":
            raise LinkError("a host does not take the rows", detail=f"{said.get('why')}, {self._where}")
