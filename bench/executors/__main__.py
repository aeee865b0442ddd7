"""What the driver of executors mode does for many hosts, which are simulated: python -m bench.executors.

The driver's side is the real one: registration, questions to all hosts, the manifest, its parts. The hosts are threads
of another process, which say what hosts say and write files of a kilobyte. With --latency, each request of the driver
to the store takes so much longer, as in an object store. For each number of hosts:

  start        until all hosts have registered and answered
  batch        until a batch is committed, without its rows
  of it run    until all hosts have answered that they have run
  of it commit until the manifest is there
  committed    until all hosts know
  replaced     until another host has taken the place of one
  processor    what the driver's process computes for a batch
  messages     of a batch between driver and hosts
  pieces       of a batch between tasks and hosts, of --tasks tasks
  requests     of the driver to the store for a batch
  manifest     its bytes, and those of its parts

And once: what a connection of a task to a host costs both ends of it, proofs and all.

It takes about two minutes. Writes build/bench/executors.json; nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import statebackend as sb
from bench.common.report import Report
from bench.executors.hosts import Hosts, count_rows
from statebackend.checkpoint.files import PosixFiles
from statebackend.cluster.cluster_execution import ClusterExecution, Engine, Executors
from statebackend.cluster.host import HostPlan
from statebackend.cluster.shuffle_partitioner import BatchSurvey
from statebackend.cluster.shuffle_pieces import PieceSum
from statebackend.cluster.shuffle_sender import ShufflePlan, TaskReport
from statebackend.cluster.wire import Listener, connect
from statebackend.functions import map_with_state
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_identity import Identity
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.types import of

#: What the driver does at the store.
REQUESTS = ("read", "size", "names", "open_input", "create", "write", "remove", "publish", "holds", "retire")


class SlowFiles(PosixFiles):
    """Files whose requests take longer, and are counted."""

    latency = 0.0
    count = 0
    counting = threading.Lock()


def _slow(name: str) -> Callable[..., Any]:
    def call(files: SlowFiles, *arguments: Any, **named: Any) -> Any:
        with SlowFiles.counting:
            SlowFiles.count += 1
        time.sleep(files.latency)
        return getattr(PosixFiles, name)(files, *arguments, **named)

    return call


for _name in REQUESTS:
    setattr(SlowFiles, _name, _slow(_name))


class Simulated(Engine):
    """Hosts of another process, and tasks that report at once what they would have sent."""

    def __init__(self, tasks: int) -> None:
        self._hosts = Hosts()
        self._tasks = tasks
        self.plans: dict[int, HostPlan] = {}
        self.parallelism = 0

    def keep_host(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        self.plans[plan.number] = plan._replace(store=plan.store.unopened())
        self.parallelism = plan.parallelism
        self._hosts.start(_as_shipped(plan))

    def replace(self, number: int) -> None:
        """Run another host for a range."""
        self._hosts.start(_as_shipped(self.plans[number]))

    def num_executors(self) -> int | None:
        return None

    def pause(self, seconds: float) -> None:
        pass

    def probe(self, addresses: Sequence[tuple[str, int]], secret: bytes, limit: float) -> None:
        pass

    def schema(self, incoming: BatchSource) -> pa.Schema:
        return pa.schema([("user", pa.string())])

    def scatter(self, incoming: BatchSource, plan: ShufflePlan) -> list[TaskReport]:
        for _ in plan.addresses:
            self._hosts.written.get(timeout=120)
        sums = {number: PieceSum(100, 10_000, number) for number in range(len(plan.addresses))}
        survey = BatchSurvey(100 * len(plan.addresses))
        return [
            TaskReport.from_json(TaskReport(task, task, survey, sums).to_json())
            for task in range(self._tasks)
        ]

    def cancel(self) -> None:
        pass

    def has_ended(self) -> bool:
        return False

    def is_job(self, number: int, job: int) -> bool:
        return True

    def end_host(self, number: int) -> None:
        pass

    def close(self) -> None:
        self._hosts.close()


def _as_shipped(plan: HostPlan) -> HostPlan:
    """The plan over plain files: hosts have stores of their own to be slow at."""

    def plain(files: Any) -> PosixFiles:
        return PosixFiles(files.uri)

    return plan._replace(store=plan.store.over(plain), writer=plan.writer.over(plain))


@contextmanager
def timed(took: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    took.append(time.perf_counter() - began)


def simulate(hosts: int, args: argparse.Namespace, folder: str) -> dict[str, float]:
    """The figures for a number of hosts."""
    job = Job(
        map_with_state(count_rows, "bigint"),
        key="user",
        schema="user string, n bigint",
        max_parallelism=max(128, 4 * hosts),
    )
    files = SlowFiles(folder)
    files.latency = 0.0
    store = sb.CheckpointStore(folder, _files=files)
    engine = Simulated(args.tasks)
    committed: list[float] = []

    class Watched(ClusterExecution):
        def committed(self, batch_id: int) -> None:
            with timed(committed):
                super().committed(batch_id)

    def execution(*arguments: Any, **named: Any) -> ClusterExecution:
        options = Executors(
            hosts, batch_memory="1m", start_timeout="5 minutes", heartbeat_timeout="5 minutes"
        )
        return Watched(*arguments, **named, engine=engine, options=options)

    figures: dict[str, list[float]] = {name: [] for name in ("start", "batch", "run", "commit", "processor")}
    requests = []
    with timed(figures["start"]):
        runner = Runner(job, store, of("string"), execution=execution)
        runner._execution._hosts.wait_ready(300)  # type: ignore[attr-defined]
    try:
        files.latency = args.latency / 1000
        for batch in range(args.warmup + args.batches):
            watch, before, computed = Stopwatch(), SlowFiles.count, time.process_time()
            incoming = BatchSource(lambda: None, Identity({"batch": batch}), source=None)  # type: ignore[arg-type, return-value]
            with timed(figures["batch"]):
                runner.run(batch, incoming, watch)
            took = watch.durations()
            figures["batch"][-1] -= took["scatter"] / 1000
            figures["run"].append(took["run"] / 1000)
            figures["commit"].append(took["commit"] / 1000)
            figures["processor"].append(time.process_time() - computed)
            requests.append(SlowFiles.count - before)
        replaced: list[float] = []
        for number in range(min(hosts, 5)):
            registered = runner._execution._hosts  # type: ignore[attr-defined]
            registered._hosts[number].lose()
            with timed(replaced):
                engine.replace(number)
                registered.wait_ready(60)
        newest = store.open_latest().manifest
        parts = [part for part in newest.parts if part is not None]
        manifest = (Path(folder) / newest.name).stat().st_size
    finally:
        runner.close()
    told = {name: statistics.median(values[-args.batches :]) for name, values in figures.items()}
    return {
        **{name: 1000 * value for name, value in told.items()},
        "committed": 1000 * statistics.median(committed[-args.batches :]),
        "replaced": 1000 * statistics.median(replaced),
        "messages": 6.0 * hosts,
        "pieces": float(args.tasks * hosts),
        "requests": float(statistics.median(requests[-args.batches :])),
        "manifest": float(manifest),
        "parts": float(sum(part.size for part in parts)),
    }


def connection(count: int = 500) -> float:
    """Milliseconds of both ends of a connection, which are in this process."""
    secret = b"of the query"
    with Listener(secret, lambda link, role: None) as listener:
        before = time.process_time()
        for _ in range(count):
            connect(listener.address, secret, role="task").close()
        return 1000 * (time.process_time() - before) / count


UNITS = {"messages": "", "pieces": "", "requests": "", "manifest": "bytes", "parts": "bytes"}


def main(argv: Iterable[str] | None = None) -> int:
    """Simulate, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.executors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[10, 100, 1000], help="how many (%(default)s)"
    )
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds of a request (%(default)s)")
    parser.add_argument("--tasks", type=int, default=100, help="of a batch (%(default)s)")
    parser.add_argument("--batches", type=int, default=5, help="measured ones (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="batches before them (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/bench/executors.json"))
    args = parser.parse_args(None if argv is None else list(argv))
    needed = 4 * max(args.hosts) + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            parser.error(f"so many hosts need {needed} open files, and the system allows {hard}: ulimit -n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    report = Report()
    report.row("hosts", "a connection of a task to a host", connection(), "ms", name="connection")
    for hosts in args.hosts:
        with tempfile.TemporaryDirectory(prefix="statebackend-bench-") as folder:
            figures = simulate(hosts, args, folder)
        for name, value in figures.items():
            report.row(
                "hosts", f"{hosts} hosts: {name}", value, UNITS.get(name, "ms"), hosts=hosts, name=name
            )
    args.out = str(args.out)
    report.write(Path(args.out), args, statebackend=sb.__version__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
