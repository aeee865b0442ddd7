"""Executors mode on real clusters: it gives what driver mode gives, whoever is killed, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import executors_query
import pytest
from executors_query import STORY, check_running, marked, sink_of, waits_for, write_input
from local_spark import needs_java
from pyarrow.dataset import dataset, partitioning
from refusing_disks import fill
from spark_cluster import Cluster, can_hide, standalone
from spark_streams import Stream, len_of, numbers

import statebackend as sb
from statebackend.checkpoint.files import open_target_folder
from statebackend.spark.sinks.parquet_sink import SinkLog

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_java]

KINDS = ("host", "task", "executor", "stop")
#: What `Query` makes ``run_on=`` of.
HOSTS: dict[str, dict[str, int] | None] = {"driver": None, "executors": {}}
LOSSES = {"max_attempts": 10, "local_copies": True}
#: Each takes a cluster's minute: a run without ``--stress`` has some of them.
ONE_OF_MANY = pytest.mark.sampled(2, of="clusters")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes folders with so many files of input."""

    def make(name: str, files: int) -> Path:
        for number in range(files):
            write_input(tmp_path / name, number)
        return tmp_path / name

    return make


#: What the progress of a batch says of the batch, however it was run.
TOTALS = (
    "batchId",
    "numInputRows",
    "numOutputRows",
    "outputs",
    "numRowsDroppedByNullKey",
    "numRowsLate",
    "numRowsDroppedByWatermark",
    "numRowsTotal",
    "numRowsUpdated",
    "numRowsRemoved",
    "numTimersFired",
    "numTimersPending",
    "states",
    "watermark",
)


def test_a_job_gives_what_it_gives_in_the_driver_batch_by_batch(
    cluster: Cluster, folder: Callable[..., Path]
) -> None:
    made = {mode: folder(mode, 6) for mode in HOSTS}
    ran = {mode: cluster.ask("run", folder=made[mode], hosts=HOSTS[mode], story=True) for mode in made}
    for each in ran.values():
        assert each["error"] is None
    outputs = {
        mode: [{batch: sorted(rows) for batch, rows in sink_of(made[mode], name).items()} for name in STORY]
        for mode in made
    }
    assert outputs["executors"] == outputs["driver"]
    assert all(any(of_name.values()) for of_name in outputs["driver"]), "each output has rows"
    for of_driver, of_executors in zip(*(each["progress"] for each in ran.values()), strict=True):
        assert {name: of_executors.get(name) for name in TOTALS} == {
            name: of_driver.get(name) for name in TOTALS
        }
        rows = executors_query.rows_of(of_executors["batchId"])
        of_hosts = sum(host["numRows"] for host in of_executors["hosts"])
        assert of_hosts == rows["is_rate"].to_pylist().count(False), "each row at one host"
    assert any(each["numRowsRemoved"] for each in ran["driver"]["progress"]), "state has expired"


@ONE_OF_MANY
@pytest.mark.parametrize("by", [(), ("user",)], ids=["whole", "in partitions"])
def test_files_of_all_hosts_are_published_at_once(
    cluster: Cluster, folder: Callable[..., Path], by: tuple[str, ...]
) -> None:
    """A file of each host, or of each host and partition; readers that know the log see those of a batch at once."""
    place = folder("published", 3)
    ran = cluster.ask("run", folder=place, publishes={"path": f"{place}/out", "partition_by": by})
    assert ran["error"] is None
    log = SinkLog(open_target_folder(place / "out"))
    names = [name.rpartition("/")[2] for name in log.names()]
    assert {name.split("-")[1] for name in names} == {"00000000", "00000001", "00000002"}
    assert len(names) > 3, "both hosts gave rows"
    with (place / "sink").open("w") as sink:
        for batch in range(3):
            files = [place / "out" / name for name in log.names() if f"batch-{batch:08}" in name]
            parts = partitioning(flavor="hive") if by else None
            read = [
                dataset(file, partitioning=parts, partition_base_dir=str(place / "out")) for file in files
            ]
            rows = [row for each in read for row in each.to_table().to_pylist()]
            given = [[row[column] for column in ("user", "total", "number", "token")] for row in rows]
            sink.write(json.dumps({"batch": batch, "rows": given}) + "\n")
    check_running(place)


@ONE_OF_MANY
def test_nothing_is_left_of_a_query_that_has_ended(cluster: Cluster, folder: Callable[..., Path]) -> None:
    """And it goes on in the same application."""
    place, ports = folder("again", 1), []
    for number in (1, 2):
        write_input(place, number)
        # One byte of memory: all rows go to the disk of the hosts.
        assert cluster.ask("run", folder=place, hosts={"batch_memory": 1})["error"] is None
        left = cluster.ask("left")
        ports.append(left.pop("ports"))
        assert left == {"threads": [], "listening": [], "folders": []}
    assert ports[0] == ports[1], "what Spark itself listens on"
    assert check_running(place) == 3


def test_an_error_of_the_function_is_raised_once_and_seen(
    cluster: Cluster, folder: Callable[..., Path], tmp_path: Path
) -> None:
    place, notes = folder("raising", 3), tmp_path / "notes"
    notes.mkdir()
    rows = executors_query.rows_of(1)
    n = next(n for n in rows["n"].to_pylist() if n not in executors_query.rows_of(0)["n"].to_pylist())
    raises = {"n": n, "notes": str(notes)}
    ran = cluster.ask("run", folder=place, raises=raises)
    assert f"ValueError: nobody wants {n}" in ran["error"]
    assert "HOST.FUNCTION" in ran["error"]
    assert "in process_element" in ran["error"], "the traceback is that of the function"
    # Both hosts may have such a row; each calls the function once.
    assert 1 <= len(list(notes.glob("raised-*"))) <= 2
    assert sb.CheckpointStore(place / "state").latest() == 0
    (notes / "mended").touch()
    assert cluster.ask("run", folder=place, raises=raises)["error"] is None
    check_running(place)


@ONE_OF_MANY
def test_a_stage_is_tried_again_because_its_shuffle_files_are_lost(
    cluster: Cluster, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The reports of tasks before and after make up the batch, each row once."""
    place, notes = folder("lost shuffle", 2), tmp_path / "notes"
    notes.mkdir()
    ran = cluster.ask("run_losing_shuffle", folder=place, notes=notes)
    assert ran["error"] is None
    assert ran["tries"] > 1
    check_running(place)


def test_processes_killed_at_random(
    cluster: Cluster,
    folder: Callable[..., Path],
    rng: random.Random,
    day_rng: random.Random,
    request: pytest.FixtureRequest,
    is_stress: bool,
) -> None:
    """Two kinds of them, or ``--kills`` with ``--stress``."""
    place = folder("killed", 2)
    count = request.config.getoption("kills")
    kinds = rng.choices(KINDS, k=count) if is_stress else day_rng.sample(KINDS, 2)
    options = {"hosts": {**LOSSES, "heartbeat_timeout": "8 s", "batch_memory": 1}}
    did = cluster.ask("kill", folder=place, kinds=kinds, seed=rng.randrange(2**31), **options)
    assert sum(did["killed"].values()) >= (0.7 * len(kinds) if is_stress else 1)
    check_running(place)


@pytest.mark.stress
def test_hosts_stopped_for_longer_than_the_timeout(
    cluster: Cluster, folder: Callable[..., Path], rng: random.Random
) -> None:
    """Each is replaced, and goes on only when another has its place."""
    place = folder("stopped", 2)
    options = {"hosts": {**LOSSES, "heartbeat_timeout": "4 s"}}
    did = cluster.ask("kill", folder=place, kinds=["stop"] * 12, seed=rng.randrange(2**31), **options)
    assert did["killed"] == {"stop": 12}
    check_running(place)


def num_calls(place: Path) -> int:
    sink = place / "sink"
    return sink.read_bytes().count(b"\n") if sink.exists() else 0


@ONE_OF_MANY
def test_a_driver_killed_at_random(
    folder: Callable[..., Path],
    tmp_path: Path,
    rng: random.Random,
    request: pytest.FixtureRequest,
    is_stress: bool,
) -> None:
    """All others end by themselves, and the query goes on in the next; a tenth of ``--kills`` with ``--stress``."""
    place = folder("driver", 2)
    for _ in range(request.config.getoption("kills") // 10 if is_stress else 1):
        with Cluster(tmp_path) as driver:
            before = num_calls(place)
            driver.tell("run", folder=place, endless=True, hosts={"batch_memory": 1})
            waits_for("two batches", lambda before=before: num_calls(place) > before + 1)
            time.sleep(rng.random())  # anywhere in a batch
            driver.kill()
    with Cluster(tmp_path, "local[3]") as driver:
        assert driver.ask("run", folder=place)["error"] is None
    check_running(place)


def has_answered(cluster: Cluster) -> bool:
    return bool(select.select([cluster.process.stdout], [], [], 0)[0])


@pytest.mark.stress
def test_query_goes_on_when_driver_was_stopped_for_30_seconds(
    folder: Callable[..., Path], tmp_path: Path, rng: random.Random
) -> None:
    """Its hosts have given it up by then."""
    place = folder("stopped driver", 2)
    with Cluster(tmp_path) as driver:
        driver.tell(
            "run", folder=place, endless=True, hosts={"heartbeat_timeout": "10 s", "max_attempts": 10}
        )
        for stop in range(4):
            before = num_calls(place)
            waits_for("two batches", lambda n=before: has_answered(driver) or num_calls(place) > n + 1)
            assert not has_answered(driver), driver.answer()
            if stop < 3:
                time.sleep(rng.random())  # anywhere in a batch
                driver.signal_driver(signal.SIGSTOP)
                time.sleep(30)
                driver.signal_driver(signal.SIGCONT)
        driver.kill()
    with Cluster(tmp_path, "local[3]") as driver:
        assert driver.ask("run", folder=place)["error"] is None
    check_running(place)


@pytest.mark.stress
def test_a_second_driver_is_refused_while_the_first_has_the_lock(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = folder("locked", 2)
    with Cluster(tmp_path, "local[3]") as first, Cluster(tmp_path, "local[3]") as second:
        first.tell("run", folder=place, endless=True, uid="mine")
        for _ in range(5):
            before = num_calls(place)
            waits_for("two batches", lambda before=before: num_calls(place) > before + 1)
            refused = second.ask("run", folder=place, stream="second", uid="mine")["error"]
            assert "USAGE.STORE_IN_USE" in refused
        first.kill()
    with Cluster(tmp_path, "local[3]") as driver:
        assert driver.ask("run", folder=place, uid="mine")["error"] is None
    check_running(place)


@pytest.mark.stress
def test_an_older_driver_is_fenced_by_a_newer_one_without_locks(
    folder: Callable[..., Path], tmp_path: Path, rng: random.Random
) -> None:
    """Where Spark has not kept one of them out before, by its own log."""
    place = folder("fenced", 2)
    conflict = r"COMMIT_CONFLICT|BATCH_GAP.STREAM_BEHIND|CONCURRENT_STREAM_LOG_UPDATE"
    ends: Counter[tuple[str, ...]] = Counter()
    with Cluster(tmp_path, "local[3]") as first, Cluster(tmp_path, "local[3]") as second:
        for each in (first, second):
            each.ask("lose_locks")
        for older, newer in [(first, second), (second, first)] * 2:
            before = num_calls(place)
            write_input(place, len(list((place / "in").iterdir())))
            older.tell("run", folder=place, endless=True)
            waits_for("two batches", lambda before=before: num_calls(place) > before + 1)
            while not has_answered(older):
                time.sleep(rng.random())
                error = newer.ask("run", folder=place)["error"]
                assert error is None or re.search(conflict, error), error
                ends["newer", "goes on" if error is None else re.findall(conflict, error)[-1]] += 1
            error = older.answer()["error"]
            assert re.search(conflict, error), error
            ends["older", re.findall(conflict, error)[-1]] += 1
        print(ends)
        assert first.ask("run", folder=place)["error"] is None
    check_running(place)


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_batches_fail_while_disk_of_store_is_full_and_succeed_later(
    cluster: Cluster, folder: Callable[..., Path], small_disk: Path, rng: random.Random, backend: str
) -> None:
    place = folder("full", 2)
    options = {"folder": place, "state": f"file://{small_disk}/state", "backend": backend}
    (place / "state").symlink_to(small_disk / "state")

    def has_ended_on_full_disk() -> bool:
        fill(small_disk / f"ballast-{time.time_ns()}")  # again: old checkpoints are removed
        return has_answered(cluster)

    for _ in range(4):
        before = num_calls(place)
        cluster.tell("run", endless=True, **options)
        waits_for("two batches", lambda before=before: num_calls(place) > before + 1)
        time.sleep(rng.random())  # anywhere in a batch
        waits_for("the end of the query", has_ended_on_full_disk)
        assert "No space left on device" in cluster.answer()["error"]
        print(backend, "full at batch", num_calls(place))
        assert "No space left on device" in cluster.ask("run", **options)["error"]
        for ballast in small_disk.glob("ballast-*"):
            ballast.unlink()
    assert cluster.ask("run", **options)["error"] is None
    check_running(place)


@ONE_OF_MANY
def test_through_connect_where_a_worker_is_killed(folder: Callable[..., Path], tmp_path: Path) -> None:
    place = folder("connect", 2)
    with Cluster(tmp_path, "connect:local[4]") as server:
        server.ask("run_connect", folder=place, is_endless=True)
        write_input(place, 2)
        server.ask("run_connect", folder=place)
    assert check_running(place) == 3


def test_hosts_that_leave_no_slot_to_batches_are_refused(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    refused = stream.fails(stream.batches(sink=len_of, run_on=sb.spark.Executors(2)))
    assert "Executors(2), 2 slots" in refused
    assert "USAGE.SLOTS" in refused


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[str]:
    with standalone(tmp_path, ("127.0.0.1", "127.0.0.2"), "--cores", "3", "--memory", "1g") as address:
        yield address


@ONE_OF_MANY
def test_workers_of_a_cluster_with_speculation(
    two_workers: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    conf = {
        "spark.cores.max": "6",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.speculation.quantile": "0.5",
        # Of the one task of a host, too.
        "spark.speculation.task.duration.threshold": "2s",
    }
    place, notes = folder("speculating", 2), tmp_path / "notes"
    notes.mkdir()
    with Cluster(tmp_path, two_workers, **conf) as cluster:
        assert cluster.ask("run_speculating", folder=place, notes=notes)["error"] is None
        plain = folder("plain", 1)
        refused = cluster.ask("run", folder=plain, state=f"{plain}/state")["error"]
        assert "USAGE.LOCAL_CHECKPOINT" in refused, "a plain path is one of this machine"
        if can_hide():
            hidden = f"file://{tmp_path}/hidden/state"
            refused = cluster.ask("run", folder=folder("unreachable", 1), state=hidden)["error"]
            assert "the executors cannot read the checkpoint" in refused
    assert check_running(place) == 2
    assert any(len(os.listdir(each)) > 1 for each in notes.iterdir()), "there were several attempts"


@ONE_OF_MANY
def test_library_comes_in_an_archive_and_hosts_have_separate_resources(
    two_workers: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Executors find no other copy of it, as on machines where it is not installed."""
    package = Path(sb.__file__).parent
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(package, "statebackend", filter=lambda each: None if each.name.endswith(".c") else each)
    others = [each for each in sys.path if each and Path(each) != package.parent]
    conf = {
        "spark.cores.max": "6",
        "spark.archives": f"{archive}#environment",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(["environment", *others]),
    }
    place = folder("archive", 2)
    with Cluster(tmp_path, two_workers, **conf) as cluster:
        assert cluster.ask("run", folder=place, tells=True, hosts={"cpus": 2})["error"] is None
    assert check_running(place) == 2
    found = {row[3] for rows in sink_of(place).values() for row in rows}
    assert found
    assert all(each.endswith("environment/statebackend") for each in found), found


def used_by(mark: str) -> dict[str, dict[str, int]]:
    """What all processes of a cluster use, by kind: how many there are, threads, open files, and MB of memory."""
    used: dict[str, Counter[str]] = {}
    for pid, command in marked(mark).items():
        is_worker = "pyspark.daemon" in command
        kind = "jvm" if "java" in command.partition(" ")[0] else "workers" if is_worker else "driver"
        with suppress(OSError):  # it has ended
            status = Path(f"/proc/{pid}/status").read_text()
            here = Counter(
                processes=1,
                threads=int(re.findall(r"Threads:\s+(\d+)", status)[0]),
                files=len(os.listdir(f"/proc/{pid}/fd")),
                megabytes=int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) >> 10,
            )
            used[kind] = used.get(kind, Counter()) + here
    return {kind: dict(found) for kind, found in used.items()}


def files_in(place: Path) -> dict[str, int]:
    """How many files there are; folders may go while it looks.

    Without the log of Spark's file source, from which Spark removes entries after ten minutes at the earliest.
    """
    return {
        name: sum(len(files) for _, _, files in os.walk(place / name))
        for name in ("state", "stream/offsets", "stream/commits")
    }


@pytest.mark.stress
def test_two_thousand_batches_leave_no_growth(folder: Callable[..., Path], tmp_path: Path) -> None:
    """What there is after a quarter of ``STATEBACKEND_BATCHES`` is all that there is after the last, by the least of
    several looks.
    """
    last = int(os.environ.get("STATEBACKEND_BATCHES", "2000"))
    early = max(last // 4, 120)  # Spark keeps the log of 100 batches
    place = folder("long", 2)
    cluster = Cluster(tmp_path)
    looks: dict[int, list[dict[str, dict[str, int]]]] = {}
    files: dict[int, list[dict[str, int]]] = {}
    try:
        cluster.tell("run", folder=place, endless=True)
        for at in (early, last):
            waits_for(f"batch {at}", lambda at=at: num_calls(place) >= at, 3600)
            for _ in range(20):
                looks.setdefault(at, []).append(used_by(cluster.mark))
                files.setdefault(at, []).append(files_in(place))
                time.sleep(0.5)
    finally:
        cluster.kill()
        cluster.close()

    def least(at: int, kind: str, what: str) -> int:
        return min(look[kind][what] for look in looks[at])

    for kind in ("driver", "workers", "jvm"):
        told = {what: (least(early, kind, what), least(last, kind, what)) for what in looks[early][0][kind]}
        print(kind, told)
        for what in ("processes", "threads", "files"):
            assert told[what][1] <= told[what][0] + 2, (kind, told)
        # The JVM's heap goes up to its limit; Spark keeps figures of a number of batches and stages there.
        assert told["megabytes"][1] <= told["megabytes"][0] + (1500 if kind == "jvm" else 20), (kind, told)
    for name in files[early][0]:
        before, after = (min(each[name] for each in files[at]) for at in (early, last))
        print(name, before, after)
        assert after <= before + 5
