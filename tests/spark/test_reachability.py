"""A checkpoint that executors cannot read is refused before anything is committed: on a real cluster, of one worker.

The worker has its own view of the file system, in which one folder is empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_query
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusing_disks import may_mount

import statebackend as sb

pytestmark = [pytest.mark.spark, pytest.mark.slow]

#: Whatever becomes of the tests, the cluster ends by itself after so many seconds.
LONGEST = "1500"


def waits_for(log: Path, text: str) -> None:
    for _ in range(600):
        if text in log.read_text():
            return
        time.sleep(0.2)
    raise AssertionError(f"no {text!r} in {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("in", "hidden", "shared"):
        (folder / name).mkdir()
    pq.write_table(pa.table({"user": ["a", "b"], "n": [1, 2]}), folder / "in" / "0.parquet")
    return folder


@pytest.fixture(scope="module")
def master(folder: Path) -> Iterator[str]:
    """The address of a master whose worker sees nothing in the folder ``hidden``."""
    import pyspark

    if not may_mount() or shutil.which("unshare") is None:
        pytest.skip("needs the right to give a process its own view of the file system")
    home = Path(pyspark.__file__).parent
    spark_class = ["timeout", LONGEST, str(home / "bin" / "spark-class")]
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: list[str]) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
        return log

    try:
        kind = "org.apache.spark.deploy"
        ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = start("master", [*spark_class, f"{kind}.master.Master", *ports])
        waits_for(log, "New state: ALIVE")
        address = re.findall(r"Starting Spark master at (spark://\S+)", log.read_text())[0]
        worker = [*spark_class, f"{kind}.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0"]
        worker += ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / "work"), address]
        hiding = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount -t tmpfs none "$0" && exec "$@"',
            str(folder / "hidden"),
        ]
        waits_for(start("worker", [*hiding, *worker]), "Successfully registered")
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def run(master: str, mode: str, folder: Path, *checkpoints: str) -> list[str]:
    # The server of Connect starts its workers with this path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, cluster_query.__file__, master, mode, str(folder), *checkpoints]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("exact", "failed: "))]
    assert len(lines) == len(checkpoints), done.stderr[-4000:]
    return lines


@pytest.mark.sampled(2, of="long queries")
@pytest.mark.parametrize("mode", ["classic", "connect"])
def test_executors_are_asked_whether_they_can_read_the_checkpoint(
    master: str, folder: Path, mode: str
) -> None:
    hidden, shared = folder / "hidden" / mode, folder / "shared" / mode
    unreadable, plain, readable = run(
        master, mode, folder, f"file://{hidden}", f"{shared}-plain", f"file://{shared}"
    )
    assert re.search(r"the executors cannot read the checkpoint.*USAGE\.LOCAL_CHECKPOINT", unreadable), (
        unreadable
    )
    assert sb.CheckpointStore(hidden).latest() is None
    assert re.search(r"the checkpoint is a local path.*USAGE\.LOCAL_CHECKPOINT", plain), plain
    assert not Path(f"{shared}-plain").exists()
    assert readable == "exact"
    assert sb.CheckpointStore(shared).latest() == 0
