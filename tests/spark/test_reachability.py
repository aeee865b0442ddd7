"""A checkpoint that executors cannot read is refused before anything is committed: on a real cluster, of one worker.

The worker has its own view of the file system, in which one folder is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spark_cluster import Cluster, can_hide, standalone

import statebackend as sb

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("in", "hidden", "shared"):
        (folder / name).mkdir()
    pq.write_table(pa.table({"user": ["a", "b"], "n": [1, 2]}), folder / "in" / "0.parquet")
    return folder


@pytest.fixture(scope="module")
def master(folder: Path) -> Iterator[str]:
    if not can_hide():
        pytest.skip("needs the right to give a process its own view of the file system")
    with standalone(folder, ("127.0.0.1",), "--cores", "1", "--memory", "1g") as address:
        yield address


@pytest.mark.sampled(1, of="long queries")
@pytest.mark.parametrize("mode", ["classic", "connect"])
def test_executors_are_asked_whether_they_can_read_the_checkpoint(
    master: str, folder: Path, mode: str
) -> None:
    hidden, shared = folder / "hidden" / mode, folder / "shared" / mode
    address = master if mode == "classic" else f"connect:{master}"
    with Cluster(folder, address, **{"spark.cores.max": "1"}) as driver:
        unreadable, plain, failure = (
            driver.ask("run_total", folder=folder, checkpoint=checkpoint)
            for checkpoint in (f"file://{hidden}", f"{shared}-plain", f"file://{shared}")
        )
    assert re.search(r"the executors cannot read the checkpoint.*USAGE\.LOCAL_CHECKPOINT", unreadable), (
        unreadable
    )
    assert sb.CheckpointStore(hidden).latest() is None
    assert re.search(r"the checkpoint is a local path.*USAGE\.LOCAL_CHECKPOINT", plain), plain
    assert not Path(f"{shared}-plain").exists()
    assert failure is None
    assert sb.CheckpointStore(shared).latest() == 0
