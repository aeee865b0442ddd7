"""A host: a process that has the state of a range of key groups, and runs the function on the rows that it is sent.

It serves two kinds of peers. The driver asks it over one link, which the host opens; tasks send it rows over links that
they open. It never decides anything about a batch: which rows belong to it, at which times it runs, and whether it is
committed, it is told.

    driver                                     host                                    tasks
      |  <-- register (range, address) ---------  |                                      |
      |  --- registered (generation) ---------->  |                                      |
      |  <-- pulse (generation) ----------------  |  over its own link              |
      |  --- restore (checkpoint) ------------->  |  makes its task                      |
      |  --- expect (batch, attempt) ---------->  |  drops the rows of others            |
      |                                           |  <-- piece, rows ..., end ---------  |
      |                                           |  --- staged (rows, bytes, sum) --->  |
      |  --- run (batch, times, pieces) ------->  |  runs, writes files, makes them durable
      |  <-- snapshots, outputs, figures -------  |                                      |
      |  --- committed, or undo -------------->   |                                      |

Signs of life go over the connection of the pulse, in compiled code, so that a function that holds the GIL is not a
silent host. If the driver is silent for the length of the lease, or one of its connections ends, the host ends; if the
function does not return for as long again, so does the process.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from statebackend._core.pulse import Pulse
from statebackend._version import __version__
from statebackend.checkpoint import Checkpoint, CheckpointStore, DataWriter, StoredFile
from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.cluster import host_files
from statebackend.cluster.failures import described
from statebackend.cluster.host_files import FilesWithCopies, HostFiles, folder_of_copies
from statebackend.cluster.shuffle_pieces import Attempt, PieceId, PieceSum
from statebackend.cluster.shuffle_sender import TASKS_LINK
from statebackend.cluster.shuffle_staging import PieceStaging, StagedRows, pieces_of
from statebackend.cluster.wire import Link, LinkClosed, LinkError, Listener, Message, connect
from statebackend.errors import ClosedError, HostError, StateBackendError, StoreError, UsageError
from statebackend.functions import PlannedTimes
from statebackend.keys import range_for
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.runtime.batch_rows import Batch, ChunkedBatch, Survey
from statebackend.runtime.execution import BatchResult, LocalExecution
from statebackend.runtime.job import Job
from statebackend.types import Type

_log = logging.getLogger(__name__)


def environment() -> dict[str, str]:
    """What has to be the same in all processes, or they would compute and write different things."""
    return {
        "library": __version__,
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "platform": f"{sys.platform} {platform.machine()}, {sys.maxsize.bit_length() + 1} bit, {sys.byteorder} endian",
    }


def address_space() -> int | None:
    """The bytes of memory that this process may map, which ``spark.executor.pyspark.memory`` limits; None: any."""
    try:
        import resource
    except ImportError:  # not on POSIX
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


DRIVERS_LINK, PULSES_LINK = "host", "pulse"


class HostPlan(NamedTuple):
    """All that a host is made of; Spark ships it with the function. Everything else comes as JSON."""

    job: Job
    key_type: Type
    #: Not open: checkpoints are read from it.
    store: CheckpointStore
    #: Makes the writers of files; it has the epoch.
    writer: DataWriter
    #: The source of the job while nothing is committed.
    source: Checkpoint | Savepoint | None
    #: The outputs that have a sink, with the columns by which each is cut into files.
    delivered: dict[str, Sequence[str]]
    #: The number of its range, of ``parallelism``.
    number: int
    parallelism: int
    #: Where the driver listens, and the proof that a peer belongs to this run of the query.
    driver: tuple[str, int]
    secret: bytes
    #: Seconds without a sign of life from the driver after which the host ends.
    lease: float
    #: Bytes of rows that wait in memory, and on disk.
    memory: int
    quota: int
    #: Whether bases are kept on its local disk too.
    has_copies: bool = False
    #: The number of the job that runs it, among the jobs of its range.
    job_number: int = 0


def connect_pulse(plan: HostPlan, generation: int, *, ends_process: bool) -> Pulse:
    """Connect to the driver once more, and hand the connection over to a pulse."""
    with connect(plan.driver, plan.secret, role=PULSES_LINK) as link:
        link.send("pulse", number=plan.number, generation=generation)
        return Pulse(link.detach(), patience=plan.lease, asks=False, ends_process=ends_process)


class _Watch(Stopwatch):
    """Tells the pulse when the function runs."""

    __slots__ = ("_pulse",)

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._pulse.function_runs = name == "function"
        try:
            with super().part(name):
                yield
        finally:
            self._pulse.function_runs = False


class Host:
    """Serves one range of key groups until the driver lets go of it. One thread calls `serve`.

    ``attempt`` and ``executor`` name the attempt of Spark's that it runs in, for messages; ``place`` is the same for
    all hosts on one executor, and for no others. Rows that do not fit into memory wait in ``folder``, or where the
    system has temporary files. With ``ends_process``, the process ends if a function has not returned although the
    driver let go of the host a lease ago, or has gone.
    """

    def __init__(
        self,
        plan: HostPlan,
        *,
        attempt: int,
        executor: str,
        place: str = "",
        folder: str | None = None,
        ends_process: bool = False,
    ) -> None:
        self._plan = plan
        self._attempt, self._executor, self._place = attempt, executor, place
        self._staging = PieceStaging(memory=plan.memory, quota=plan.quota, folder=folder)
        #: The try whose rows may come; None while none may.
        self._expected: Attempt | None = None
        self._copies: FilesWithCopies | None = None
        self._store, self._writer = plan.store, plan.writer
        if plan.has_copies:
            self._keep_copies(folder or tempfile.gettempdir())
        self._files = HostFiles(self._writer)
        self._execution: LocalExecution | None = None
        #: The batch that has run and is neither committed nor undone, and its result.
        self._ran: tuple[int, BatchResult] | None = None
        #: The checkpoint whose state it has; None before the first.
        self._at: int | None = None
        #: The driver's requests, in order; None is the end.
        self._asked: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._link: Link | None = None
        self._ended_by = "the driver let it go"
        self._ends_process = ends_process
        self._pulse: Pulse | None = None

    def _keep_copies(self, folder: str) -> None:
        plan = self._plan
        run = hashlib.sha256(plan.secret).hexdigest()[:16]
        folder = folder_of_copies(folder, run, plan.number)

        def reading(files: StoreFiles) -> StoreFiles:
            self._copies = FilesWithCopies(files, folder)
            return self._copies

        def writing(files: StoreFiles) -> StoreFiles:
            return FilesWithCopies(files, folder, reads_copies=False)

        self._store, self._writer = plan.store.over(reading), plan.writer.over(writing)

    def serve(self) -> str:
        """Register, and do what the driver asks until that ends; return why it has ended."""
        plan = self._plan
        with connect(plan.driver, plan.secret, role=DRIVERS_LINK) as link:
            self._link = link
            listener = Listener(plan.secret, self._serve_task, bind=link.local[0])
            try:
                link.send(
                    "register",
                    number=plan.number,
                    job=plan.job_number,
                    parallelism=plan.parallelism,
                    epoch=plan.writer.epoch,
                    attempt=self._attempt,
                    executor=self._executor,
                    place=self._place,
                    address=list(listener.address),
                    environment=environment(),
                    address_space=address_space(),
                )
                try:
                    said = link.receive(plan.lease).header
                except TimeoutError:
                    return "no word from the driver"
                except LinkClosed:
                    return "the driver has gone"
                if said["op"] == "refuse":
                    return f"refused: {said['why']}"
                self._pulse = connect_pulse(plan, said["generation"], ends_process=self._ends_process)
                reader = threading.Thread(
                    target=self._read, args=(link, self._pulse), name="statebackend: driver", daemon=True
                )
                reader.start()
                while (message := self._asked.get()) is not None:
                    self._answer(link, message)
                return self._ended_by
            finally:
                try:
                    if self._pulse is not None:
                        self._pulse.cut()  # and it ends the process if the function's close() does not return
                    link.close()
                    listener.close()
                    self._close()
                finally:
                    if self._pulse is not None:
                        self._pulse.stop()

    def _read(self, link: Link, pulse: Pulse) -> None:
        """Take what the driver says, while there is a pulse."""
        try:
            while pulse.over is None:
                try:
                    message = link.receive(self._plan.lease / 4)
                except TimeoutError:
                    continue
                if message.header["op"] == "stop":
                    return
                self._asked.put(message)
            self._ended_by = "no word from the driver" if pulse.over == "silent" else "the driver has gone"
        except LinkClosed:
            self._ended_by = "the driver has gone"
        except LinkError as error:
            self._ended_by = str(error)
        finally:
            self._asked.put(None)
            # The function's result is not needed, and it has a slot.
            pulse.cut()

    def _answer(self, link: Link, message: Message) -> None:
        answers: dict[str, Callable[[Message], dict[str, Any]]] = {
            "restore": self._restore,
            "expect": self._expect,
            "run": self._run,
            "committed": self._committed,
            "undo": self._undo,
        }
        question = message.header["question"]
        try:
            answer = answers[message.header["op"]](message)
        except BaseException as error:  # noqa: BLE001 - any of the user's code: the driver raises it
            answer = {"error": described(error)}
        try:
            try:
                link.send("answer", question=question, **answer)
            except UsageError as error:  # too large, or no JSON: nothing has been sent
                link.send("answer", question=question, error=described(error))
        except LinkError:
            pass  # the reader finds out, and ends it

    # --- what the driver asks ---

    def _restore(self, message: Message) -> dict[str, Any]:
        plan, header = self._plan, message.header
        host_files.check_token(plan.writer, header["token"], "the driver")
        newest = None if header["checkpoint"] is None else self._store.open(header["checkpoint"])
        source = newest or plan.source
        began = time.perf_counter()
        self._drop_task()
        if self._copies is not None:
            self._copies.keep_only(() if newest is None else newest.manifest.all_files)
        # A manifest may not name the files of another store that the query began with.
        self._files = HostFiles(self._writer, () if newest is None else newest.manifest.all_files.values())
        self._execution = LocalExecution(
            plan.job,
            plan.key_type,
            self._files,
            source=source,
            delivered=plan.delivered,
            subtask_index=plan.number,
            parallelism=plan.parallelism,
            key_group_range=range_for(plan.job.max_parallelism, plan.parallelism, plan.number),
        )
        self._at = header["checkpoint"]
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "token": host_files.leave_token(plan.writer)}

    def _try_of(self, message: Message) -> Attempt:
        return Attempt(self._plan.writer.epoch, message.header["batch"], message.header["attempt"])

    def _expect(self, message: Message) -> dict[str, Any]:
        self._expected = self._try_of(message)
        self._staging.drop_others(*self._expected)
        return {}

    def _run(self, message: Message) -> dict[str, Any]:
        header, execution = message.header, self._execution
        of_try = self._try_of(message)
        if (
            execution is None
            or self._ran is not None
            or (self._expected, self._at) != (of_try, header["follows"])
        ):
            raise HostError(
                "the host is not ready for this batch", code="HOST.LOST_PIECES", detail=str(of_try)
            )
        self._expected = None  # later rows are not needed
        assert self._pulse is not None
        watch = _Watch(self._pulse)
        with watch.part("staged"):
            staged = self._staged(of_try, header["tasks"])
        try:
            with ExitStack() as of_batch:
                with watch.part("prepare"):
                    batch = self._batch(staged, message, of_batch)
                planned = None if header["planned"] is None else PlannedTimes(*header["planned"])
                ran = execution.run_rows(of_try.batch_id, batch, header["now"], watch, planned)
                self._ran = (of_try.batch_id, ran)
                del batch
            try:
                with watch.part("sync"):
                    self._files.sync(_files_of(ran))
            except BaseException:
                self._take_back()
                raise
        finally:
            staged.release()
        return {
            "snapshots": [snapshot.to_json() for snapshot in ran.snapshots],
            "outputs": {name: [file.to_json() for file in files] for name, files in ran.outputs.items()},
            "figures": ran.figures,
            "rows": staged.num_rows,
            "durations": watch.durations(),
        }

    def _staged(self, of_try: Attempt, tasks: list[dict[str, Any]]) -> StagedRows:
        """The pieces that the driver names, which must be as the tasks have sent them."""
        tags = [PieceId(*of_try, each["task"]) for each in tasks]
        sums = [PieceSum(*each["sums"]) for each in tasks]
        try:
            staged = self._staging.taken(tags, sums=sums)
        except StoreError as error:
            raise HostError(error.message, code="HOST.LOST_PIECES", detail=error.detail) from error
        # Also without pieces: a task may still be sending one that is not named.
        self._staging.drop(*of_try)
        return staged

    def _batch(self, staged: StagedRows, message: Message, of_batch: ExitStack) -> Batch | ChunkedBatch:
        header, plan = message.header, self._plan
        job = plan.job
        schema = pa.ipc.read_schema(pa.py_buffer(message.body))
        survey = Survey(header["after"], header["told"])
        pieces = pieces_of(staged, job, plan.key_type, plan.parallelism, schema, plan.memory // 4)
        if pieces is not None:
            return ChunkedBatch(
                job,
                of_batch.enter_context(pieces),
                watermark=header["before"],
                clock=header["clock"],
                survey=survey,
                num_broadcast=staged.num_broadcast,
            )
        tables = [each for each in (staged.broadcast(), staged.rows()) if each is not None]
        return Batch(
            job,
            pa.concat_tables(tables) if tables else schema.empty_table(),
            watermark=header["before"],
            clock=header["clock"],
            survey=survey,
        )

    def _committed(self, message: Message) -> dict[str, Any]:
        batch_id = message.header["batch"]
        if self._ran is not None and self._ran[0] == batch_id:
            assert self._execution is not None
            (_, ran), self._ran = self._ran, None
            before = self._files.builds_on
            self._files.committed(
                [file for snapshot in ran.snapshots for file in snapshot.files],
                [file for files in ran.outputs.values() for file in files],
            )
            self._at = batch_id
            if self._copies is not None:
                self._copies.forget(before - self._files.builds_on)
            try:
                self._execution.committed(batch_id)
            except BaseException as error:  # noqa: BLE001 - of the function's listener: it is committed
                return {"at": batch_id, "raised": described(error)}
        return {"at": self._at}

    def _undo(self, message: Message) -> dict[str, Any]:
        self._expected = None
        self._staging.drop(*self._try_of(message))
        if self._ran is not None and self._ran[0] == message.header["batch"]:
            self._take_back()
        return {}

    def _take_back(self) -> None:
        assert self._ran is not None
        assert self._execution is not None
        (batch_id, _), self._ran = self._ran, None
        self._execution.undo(batch_id)

    # --- what tasks send ---

    def _serve_task(self, link: Link, role: str) -> None:
        """Stage the rows of one task, and tell it when they are."""
        if role != TASKS_LINK:
            return
        header, schema = link.receive(_TASK_PAUSE)
        tag = PieceId(header["epoch"], header["batch"], header["attempt"], header["task"])
        why_not = self._why_not(tag)
        if why_not is not None:
            link.send("refused", why=why_not)
            return
        piece = None
        try:
            piece = self._staging.begin(tag, pa.ipc.read_schema(pa.py_buffer(schema)))
            while (message := link.receive(_TASK_PAUSE)).header["op"] != "end":
                piece.add(message.header["op"], message.body)
            sums = piece.finish()
        except BaseException as error:
            if piece is not None:
                piece.abandon()
            if isinstance(error, ClosedError):  # the driver has given the try up meanwhile
                link.send("refused", why=str(error))
                return
            if isinstance(error, StateBackendError) and not isinstance(error, LinkError):
                link.send("failed", error=described(error))
                return
            raise
        link.send("staged", sums=list(sums))

    def _why_not(self, tag: PieceId) -> str | None:
        if tag.epoch != self._plan.writer.epoch:
            return f"epoch {tag.epoch} is not this host's, {self._plan.writer.epoch}"
        return None if tag.of_try == self._expected else f"{tag.of_try} is not expected"

    # --- the end ---

    def _drop_task(self) -> None:
        # Whether what has run is committed only the driver knows: its files stay.
        self._ran = None
        if self._execution is not None:
            self._execution.close()
            self._execution = None

    def _close(self) -> None:
        try:
            self._drop_task()
        finally:
            self._staging.close()
            if self._copies is not None:
                self._copies.close()


def _files_of(ran: BatchResult) -> list[StoredFile]:
    of_state = [file for snapshot in ran.snapshots for file in snapshot.files]
    return [*of_state, *(file for files in ran.outputs.values() for file in files)]


#: Seconds that a task may compute between two pieces of its rows.
_TASK_PAUSE = 3600.0
