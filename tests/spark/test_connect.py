"""Through Spark Connect, where the function runs in a process of the server's."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_spark import needs_java
from spark_cluster import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_java]

UTC = datetime.timezone.utc


@pytest.mark.sampled(1, of="connect")
def test_state_lives_from_batch_to_batch_and_from_run_to_run(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for n in range(2):
        path = tmp_path / "in" / f"{n}.parquet"
        pq.write_table(pa.table({"user": ["a", "b"], "n": [n + 1, 10]}), path)
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))  # Spark takes the oldest first
    conf = {
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # says if there is a zone
        "spark.sql.ansi.enforceReservedKeywords": "true",
    }
    with Cluster(tmp_path, "connect:local[2]", **conf) as server:
        assert "[USAGE.NO_UID]" in server.ask("run_timed", folder=tmp_path, uid="")
        assert server.ask("run_timed", folder=tmp_path, uid="mine") is None
        pq.write_table(pa.table({"user": ["a"], "n": [100]}), tmp_path / "in" / "2.parquet")
        for uid in ("mine", "encrypted"):  # each run has a worker of its own
            assert server.ask("run_timed", folder=tmp_path, uid=uid) is None
        failure = server.ask("run_timed", folder=tmp_path, uid="interrupted")
        assert server.ask("run_processor", folder=tmp_path) is None
    assert "KeyboardInterrupt: as told (batch 0 of Timed)" in failure
    assert "[USAGE.EXIT]" in failure
    # The output of an encrypted store goes to the sink through the driver.
    for place in (tmp_path, tmp_path / "encrypted"):
        totals = [
            tuple(row.values())
            for batch in range(3)
            for row in pq.read_table(place / "out" / f"batch={batch}", partitioning=None).to_pylist()
        ]
        expected = [("a", 1), ("a", 3), ("a", 103), ("b", 10), ("b", 20)]
        assert sorted(totals, key=lambda row: row[:2]) == [
            (*each, at, {"user": at, "all": [at, None], "local": [(at, at.replace(tzinfo=None))]})
            for each in expected
            for at in [datetime.datetime.fromtimestamp(each[1], UTC)]
        ]
    processed = pq.read_table(tmp_path / "processor" / "out", partitioning=None).to_pylist()
    # The sum over 10 starts a timer, which fires in the same batch and clears the total.
    assert sorted((row["k"], row["text"]) for row in processed) == [
        ("a", "('a', 'a', 'Row', (103, 3))"),
        ("a", "(1, 1)"),
        ("a", "(103, 3)"),
        ("a", "(3, 2)"),
        ("b", "('b', 'b', 'Row', (20, 2))"),
        ("b", "(10, 1)"),
        ("b", "(20, 2)"),
    ]
    written = [path.read_bytes() for path in tmp_path.glob("encrypted/state/data/*/*") if path.is_file()]
    assert written
    assert not any(b"PAR1" in each or b"ARROW1" in each for each in written)
