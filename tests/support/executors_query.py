"""A program: queries on the executors of a cluster, which does what it is told: ``python executors_query.py MASTER``.

Each line of its input is a JSON object whose "do" names one of its commands; it answers each with a line of JSON. So a
test has one cluster for all that it tries, in processes that can be killed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable

import pyarrow as pa
import pyarrow.parquet as pq
from ciphers import AesGcm
from connect_session import connect_session, started
from crash_table import SCHEMA, Sink, Total, cell

import statebackend as sb
from statebackend.checkpoint.files import PosixCalls

#: Seconds that anything is waited for on a busy machine.
PATIENCE = 240.0
#: The variable that marks the program and all that come from it.
MARK = "STATEBACKEND_TEST_RUN"
#: The columns of the input.
INPUT = "user string, n bigint, at bigint, id bigint, is_rate boolean"
RUNNING = "user string, total bigint, number bigint, token string"
STORY = {
    "totals": "user string, total bigint, recent bigint, rate bigint",
    "closed": "user string, at bigint",
    "late": "user string, n bigint, at bigint, id bigint, is_rate boolean",
}
TTL, DUE, DELAY = 400, 150, 60


def waits_for(what: str, is_there: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait until something is there; return it."""
    until = time.monotonic() + seconds
    while not (found := is_there()):
        if time.monotonic() > until:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)
    return found


# --- processes ---


def command_of(pid: int) -> str:
    """The command line of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def marked(mark: str) -> dict[int, str]:
    """The processes that come from a program with this mark, by id, with their commands. Those that have ended, and
    nobody has asked how, are left out.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: command for pid in pids if is_marked(pid, mark) and (command := command_of(pid))}


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ports_of(pid: int) -> set[int]:
    """The ports that a process listens on."""
    sockets = set()
    ports = set()
    with contextlib.suppress(OSError):  # it has ended
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(each))
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


# --- functions ---


class Running(sb.KeyedProcessFunction):
    """The total and the number of each row of a user, and something that is never twice the same."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.number = ctx.get_reducing_state(sb.ReducingStateDescriptor("number", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.total.add(row.n)
        self.number.add(1)
        yield row.user, self.total.get(), self.number.get(), os.urandom(4).hex()


class Timed(Total):
    """Running totals, each also as a time, and in a column with times inside."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        for user, total in super().process_element(row, ctx):
            at = datetime.datetime.fromtimestamp(total, datetime.timezone.utc)
            yield user, total, at, (at, [at, None], {at: at.replace(tzinfo=None)})


class Telling(Running):
    """Tells where the library is on its host, as the token."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        for user, total, number, _ in super().process_element(row, ctx):
            yield user, total, number, str(Path(sb.__file__).parent)


class Raising(Running):
    """Raises at a number until it is mended, and notes that it has."""

    def __init__(self, n: int, notes: str) -> None:
        self.n, self.notes = n, notes

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        if row.n == self.n and not Path(self.notes, "mended").exists():
            Path(self.notes, f"raised-{time.time_ns()}").touch()
            raise ValueError(f"nobody wants {self.n}")
        yield from super().process_element(row, ctx)


class Story(sb.KeyedProcessFunction):
    """Totals by rates that are broadcast, of late with a time to live; closes a user some time after each row."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        event_time = sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
        ttl = sb.StateTtlConfig(TTL, ttl_time_characteristic=event_time, cleanup_idle=True)
        recent = sb.MapStateDescriptor("recent", int, int).enable_time_to_live(ttl)
        self.recent = ctx.get_map_state(recent)
        rates = sb.MapStateDescriptor("rates", str, int)
        self.rates = ctx.operator_backend.get_broadcast_state(rates)

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rates.put("rate", row.n)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        rate = self.rates.get("rate") or 1
        self.total.add(row.n * rate)
        self.recent.put(row.id, row.n)
        ctx.timer_service().register_event_time_timer(row.at + DUE)
        yield row.user, self.total.get(), sum(self.recent.values()), rate

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> None:
        ctx.output("closed", (ctx.current_key, timestamp))


# --- input ---


def rows_of(number: int, size: int = 120) -> pa.Table:
    """The rows of a file."""
    rng = random.Random(number)
    ids = range(number * size, (number + 1) * size)
    return pa.table(
        {
            "user": [f"user {rng.randrange(30)}" for _ in ids],
            "n": pa.array([rng.randrange(1, 100) for _ in ids], pa.int64()),
            "at": pa.array([max(0, each - rng.choice((0, 5, 20, 200))) for each in ids], pa.int64()),
            "id": pa.array(ids, pa.int64()),
            "is_rate": [rng.randrange(60) == 0 for _ in ids],
        }
    )


def write_input(folder: Path, number: int) -> None:
    """Write a file of the stream as a whole."""
    path = folder / "in" / f"{number:05}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    pq.write_table(rows_of(number), hidden)
    os.utime(hidden, (1_700_000_000 + number,) * 2)  # Spark takes the oldest first
    hidden.rename(path)


# --- what came out ---


def sink_of(folder: Path, name: str = "sink") -> dict[int, list[list[Any]]]:
    """The rows of each batch, those that came twice once: a replay must give the same, byte for byte."""
    given: dict[int, list[list[Any]]] = {}
    for line in (folder / name).read_text().splitlines():
        call = json.loads(line)
        assert given.setdefault(call["batch"], call["rows"]) == call["rows"], "a replay differs"
    assert sorted(given) == list(range(len(given))), "a batch is missing"
    return given


def check_running(folder: Path) -> int:
    """What `Running` gave for all files, whichever batch they came in, is what one run without a fault gives."""
    given = sink_of(folder)
    rows = [
        row for path in sorted((folder / "in").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    of_user: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: row["id"]):
        of_user.setdefault(row["user"], []).append(row["n"])
    found: dict[str, list[tuple[int, int]]] = {}
    for batch_id in sorted(given):
        for user, total, number, _ in given[batch_id]:
            found.setdefault(user, []).append((number, total))
    for user, amounts in of_user.items():
        wanted = [(number, sum(amounts[:number])) for number in range(1, len(amounts) + 1)]
        assert found.pop(user) == wanted, f"{user} differs"
    assert found == {}
    state = sb.tools.state(folder / "state", "total").to_table()
    totals = dict(zip(state["key"].to_pylist(), state["value"].to_pylist(), strict=True))
    assert totals == {user: sum(amounts) for user, amounts in of_user.items()}
    return len(given)


# --- the program ---


class Writing:
    """A sink that notes the rows that it got in a file."""

    def __init__(self, folder: Path, name: str = "sink") -> None:
        self.path = folder / name

    def __call__(self, frame: Any, batch_id: int) -> None:
        rows = [list(row.values()) for row in frame.toArrow().to_pylist()]
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps({"batch": batch_id, "rows": rows}).encode() + b"\n")


class Query:
    """A query over the files of a folder."""

    def __init__(
        self,
        spark: Any,
        folder: Path,
        *,
        function: Any = None,
        story: bool = False,
        endless: bool = False,
        stream: str = "stream",
        transform: Callable[[Any], Any] = lambda frame: frame,
        **options: Any,
    ) -> None:
        self.folder = folder
        #: Of the newest batches.
        self.progress: deque[Any] = deque(maxlen=100)
        #: Files are written while it runs.
        self.is_fed = endless
        self.begun = self.done = 0
        given: dict[str, Any] = {
            "key": "user",
            "schema": RUNNING,
            "sink": Writing(folder),
            "state": f"file://{folder}/state",
            "order_by": "id",
            "run_on": sb.spark.Executors(2),
            "on_batch": self.progress.append,
        }
        if story:
            given |= {
                "schema": STORY,
                "sink": {name: Writing(folder, name) for name in STORY},
                "event_time": sb.EventTime("at", watermark_delay=DELAY, late=sb.to_output("late")),
                "broadcast_when": "is_rate",
            }
        given |= options
        self.batches = sb.spark.stateful(function or (Story() if story else Running()), **given)
        rows = spark.readStream.schema(spark.read.parquet(f"{folder}/in").schema)
        frame = transform(rows.option("maxFilesPerTrigger", 1).parquet(f"{folder}/in"))
        writer = frame.writeStream.foreachBatch(self.called)
        if not endless:
            writer = writer.trigger(availableNow=True)
        self.query = writer.option("checkpointLocation", f"{folder}/{stream}").start()

    def called(self, frame: Any, batch_id: int) -> None:
        self.begun += 1
        self.batches(frame, batch_id)
        self.done += 1
        if self.is_fed:
            write_input(self.folder, len(list((self.folder / "in").glob("*.parquet"))))

    def wait(self) -> str | None:
        """Wait for its end; what it failed with."""
        try:
            if self.is_fed:  # until the test ends it
                self.query.awaitTermination()
            else:
                assert self.query.awaitTermination(PATIENCE)
        except Exception as error:  # noqa: BLE001 - Spark's, of several classes
            return str(error)
        finally:
            self.batches.close()
        return None

    def check_runs(self) -> bool:
        error = self.query.exception()
        if error is not None:
            raise error
        return True

    def finish(self) -> None:
        """Run what there is of input, and end."""
        self.is_fed = False
        self.query.processAllAvailable()
        self.query.stop()
        self.batches.close()

    @property
    def hosts(self) -> list[int]:
        """The processes of its hosts; none while one is missing."""
        runner = self.batches._runner
        if runner is None or runner._execution is None:
            return []
        hosts = runner._execution._hosts
        if not hosts.are_ready:
            return []
        return [int(re.findall(r"process (\d+)", host.executor)[0]) for host in hosts._living()]


class Program:
    """The commands."""

    def __init__(self, master: str, conf: dict[str, str]) -> None:
        from pyspark.sql import SparkSession

        self.mark = os.environ[MARK]
        conf = dict.fromkeys(("spark.driver.host", "spark.driver.bindAddress"), "127.0.0.1") | conf
        conf |= dict.fromkeys(("spark.ui.enabled", "spark.ui.showConsoleProgress"), "false")
        if master.startswith("connect:"):
            self.spark: Any = connect_session(master.removeprefix("connect:"), conf)
            return
        builder = SparkSession.builder.master(master)
        for name, value in conf.items():
            builder = builder.config(name, value)
        self.spark = builder.getOrCreate()
        self.spark.sparkContext.setLogLevel("OFF")

    def run(self, folder: str, **options: Any) -> dict[str, Any]:
        """Run a query to its end."""
        query = Query(self.spark, Path(folder), **self._made(options))
        return {"error": query.wait(), "progress": list(query.progress)}

    def _made(self, options: dict[str, Any]) -> dict[str, Any]:
        given = options.pop("hosts", {})
        if given is None:
            options["run_on"] = sb.spark.Driver()
        elif given:
            if "cpus" in given:
                given = {"profile": self._profile(given["cpus"])}
            options["run_on"] = sb.spark.Executors(2, **given)
        if options.pop("tells", False):
            options["function"] = Telling()
        if "publishes" in options:
            options["sink"] = sb.spark.sinks.parquet(**options.pop("publishes"))
        if "raises" in options:
            options["function"] = Raising(**options.pop("raises"))
        return options

    def _profile(self, cpus: int) -> Any:
        """The resources of a task that takes so many cores."""
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        return ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus)).build

    def lose_locks(self) -> None:
        """Let this driver open stores as if they were on a file system without locks."""

        def refuses(*_: object) -> None:
            raise OSError(errno.ENOLCK, "as told")

        PosixCalls.lock_folder = refuses  # type: ignore[assignment, method-assign]

    def run_speculating(self, folder: str, notes: str) -> dict[str, Any]:
        """Run a query some of whose tasks wait, rows half sent, until Spark has begun another attempt of them."""

        def waits(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            context = TaskContext.get()
            of_partition = Path(notes, f"{context.stageId()}-{context.partitionId()}")
            of_partition.mkdir(exist_ok=True)
            (of_partition / str(context.taskAttemptId())).touch()
            for number, batch in enumerate(batches):
                yield batch
                if number == 0 and context.partitionId() == 0:
                    waits_for("another attempt", lambda: len(os.listdir(of_partition)) > 1)

        return self.run(folder, transform=lambda frame: frame.repartition(4, "id").mapInArrow(waits, INPUT))

    def run_losing_shuffle(self, folder: str, notes: str) -> dict[str, Any]:
        """Run a query behind a shuffle whose files are lost while its tasks read them, once.

        It answers how often Spark has tried the stage that has lost them.
        """
        slots = 4  # beside those of hosts

        def loses(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            context = TaskContext.get()
            for number, batch in enumerate(batches):
                yield batch
                if number == 0 and not Path(notes, "lost").exists():
                    # All tasks that have a slot have read what they need; those after them find nothing.
                    Path(notes, f"task-{context.stageId()}-{context.taskAttemptId()}").touch()
                    waits_for("all slots", lambda: len(list(Path(notes).glob("task-*"))) >= slots)
                    time.sleep(0.5)
                    for folder in os.environ["SPARK_LOCAL_DIRS"].split(","):
                        for each in Path(folder).rglob("shuffle_*"):
                            each.unlink(missing_ok=True)
                    time.sleep(0.5)
                    Path(notes, "lost").touch()

        ran = self.run(
            folder,
            transform=lambda frame: frame.repartition(3 * slots, "id").mapInArrow(loses, INPUT),
        )
        tracker = self.spark.sparkContext.statusTracker()
        # The cluster may have run other queries before.
        stages = {int(path.name.split("-")[1]) for path in Path(notes).glob("task-*")}
        infos = [tracker.getStageInfo(number) for number in stages]
        return {**ran, "tries": 1 + max(info.currentAttemptId for info in infos if info is not None)}

    def run_connect(self, folder: str, *, is_endless: bool = False) -> None:
        """Run a query through Spark Connect to its end, or until somebody kills its worker."""
        batches = sb.spark.stateful(
            Running(),
            key="user",
            schema=RUNNING,
            sink=Writing(Path(folder)),
            state=f"{folder}/state",
            order_by="id",
            run_on=sb.spark.Executors(2),
            uid="mine",
        )
        rows = self.spark.readStream.schema(self.spark.read.parquet(f"{folder}/in").schema)
        frame = rows.option("maxFilesPerTrigger", 1).parquet(f"{folder}/in")
        writer = frame.writeStream.foreachBatch(batches).option("checkpointLocation", f"{folder}/stream")
        query = started(writer if is_endless else writer.trigger(availableNow=True))
        if not is_endless:
            query.awaitTermination()
            waits_for("the end of hosts", lambda: not self.listening())
            return
        waits_for("two batches", lambda: (Path(folder) / "sink").exists() and len(sink_of(Path(folder))) == 2)
        workers = [pid for pid, command in marked(self.mark).items() if "foreach_batch_worker" in command]
        assert len(self.listening()) == 2, "hosts listen"
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        assert workers
        waits_for("the end of hosts", lambda: not self.listening())
        query.stop()

    def run_total(self, folder: str, checkpoint: str) -> str | None:
        """Run the query of `crash_table` to its end; return the text of its error, or None."""
        options = {"sink": Sink(Path(folder) / "sink"), "schema": SCHEMA, "uid": "mine"}
        batches = sb.spark.stateful(Total(), key="user", state=checkpoint, **options)
        return self._failure(batches, folder, f"stream-{time.time_ns()}")

    def run_timed(self, folder: str, uid: str) -> str | None:
        """The same of `Timed`. "encrypted" has an encrypted store, and the sink of "interrupted" raises an exit."""
        own = f"{uid}/" if uid in ("encrypted", "interrupted") else ""
        state = f"{folder}/{own}state"
        checkpoint: Any = sb.CheckpointStore(state, encryption=AesGcm()) if uid == "encrypted" else state

        def sink(frame: Any, batch_id: int) -> None:
            if uid == "interrupted":
                raise KeyboardInterrupt("as told")
            frame.write.mode("overwrite").parquet(f"{folder}/{own}out/batch={batch_id}")

        nested = "struct<user:timestamp,all:array<timestamp>,local:map<timestamp,timestamp_ntz>>"
        schema = f"user string, total bigint, at timestamp, nested {nested}"
        options = {"sink": sink, "schema": schema, "uid": uid or None}
        batches = sb.spark.stateful(Timed(), key="user", state=checkpoint, **options)
        return self._failure(batches, folder, f"{own}stream")

    def run_processor(self, folder: str) -> str | None:
        """A processor of Spark's over the same rows."""
        from processors import CASES, Written

        def sink(frame: Any, batch_id: int) -> None:
            frame.write.mode("overwrite").parquet(f"{folder}/processor/out/batch={batch_id}")

        batches = sb.spark.transform_with_state(
            Written(*CASES["ProcessingTime"]["totals_until_a_timer"]),
            key="k",
            output_schema="k string, text string",
            time_mode="ProcessingTime",
            state=f"{folder}/processor/state",
            uid="processor",
            sink=sink,
        )
        return self._failure(batches, folder, "processor/stream", key="k")

    def _failure(self, batches: Any, folder: str, stream: str, key: str = "user") -> str | None:
        reader = self.spark.readStream.schema("`user` string, n bigint").option("maxFilesPerTrigger", 1)
        rows = reader.parquet(f"{folder}/in").withColumnRenamed("user", key)
        writer = rows.writeStream.foreachBatch(batches)
        writer = writer.option("checkpointLocation", f"{folder}/{stream}").trigger(availableNow=True)
        try:
            started(writer).awaitTermination()
        except Exception as error:  # noqa: BLE001 - Spark's, of several classes
            return str(error)
        return None

    def cell(self, folder: str, before: str, then: str) -> str:
        """Run a cell of `crash_table`."""
        return cell(self.spark, Path(folder), before, then)

    def kill(self, folder: str, kinds: list[str], seed: int, **options: Any) -> dict[str, Any]:
        """Run a query whose processes are killed at random moments, one after the other."""
        rng = random.Random(seed)
        query = Query(self.spark, Path(folder), endless=True, **self._made(options))
        killed: Counter[str] = Counter()
        try:
            for kind in kinds:
                waits_for("hosts", lambda: query.check_runs() and query.hosts)
                before = query.done
                waits_for("a batch", lambda before=before: query.check_runs() and query.done > before)
                if rng.randrange(3):  # else between two batches, most likely
                    begun = query.begun
                    waits_for("the next", lambda begun=begun: query.check_runs() and query.begun > begun)
                time.sleep(rng.random() * 1.2 * self._usual(query))
                killed[kind] += self._killed(kind, query, rng)
                before = query.done
                waits_for("two batches", lambda before=before: query.check_runs() and query.done > before + 1)
            query.finish()
        except BaseException:
            query.query.stop()
            query.batches.close()
            raise
        return {"killed": killed, "batches": query.done}

    def _usual(self, query: Query) -> float:
        """Seconds for a batch."""
        taken = sorted(each["durationMs"]["batch"] / 1000 for each in query.progress)
        return float(taken[len(taken) // 2])

    def _killed(self, kind: str, query: Query, rng: random.Random) -> bool:
        mine = marked(self.mark)
        hosts = query.hosts
        if kind == "executor":
            candidates = [pid for pid, command in mine.items() if "CoarseGrainedExecutorBackend" in command]
        elif kind == "task":
            daemons = [pid for pid, command in mine.items() if "pyspark.daemon" in command]
            candidates = [pid for pid in daemons if parent_of(pid) in daemons and pid not in hosts]
        else:
            candidates = hosts
        if not candidates:
            return False
        pid = rng.choice(sorted(candidates))
        with contextlib.suppress(ProcessLookupError):
            if kind != "stop":
                os.kill(pid, signal.SIGKILL)
                return True
            os.kill(pid, signal.SIGSTOP)
            try:
                waits_for(
                    "another host", lambda: query.check_runs() and query.hosts and pid not in query.hosts
                )
            finally:
                os.kill(pid, signal.SIGCONT)
        return True

    def left(self) -> dict[str, Any]:
        """What is left of queries that have ended, in this process and on the disk."""

        def found() -> dict[str, Any]:
            names = [each.name for each in threading.enumerate()]
            # Folders may go while it looks.
            folders = [name for _, inner, _ in os.walk(tempfile.gettempdir()) for name in inner]
            return {
                "threads": [name for name in names if name.startswith("statebackend")],
                "listening": self.listening(),
                "folders": [name for name in folders if re.match("statebackend-[sc].*-", name)],
            }

        # A thread looks now and then whether its query has ended, and hosts end by themselves when they are told to.
        with contextlib.suppress(TimeoutError):
            waits_for("the end of a query", lambda: not any(found().values()), 60.0)
        return {**found(), "ports": sorted(ports_of(os.getpid()))}

    def listening(self) -> list[int]:
        """The workers of Spark that listen, as only hosts do."""
        daemons = {pid for pid, command in marked(self.mark).items() if "pyspark.daemon" in command}
        return [pid for pid in daemons if parent_of(pid) in daemons and ports_of(pid)]


def main() -> None:
    master, conf = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    program = Program(master, conf)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"answer": getattr(program, told.pop("do"))(**told)}
        except Exception:  # noqa: BLE001 - the test raises it
            answer = {"failed": traceback.format_exc()}
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
