"""The growth of state: of each batch, by key, and what comes of it."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery
from keyed_stores import create, open_store

import statebackend as sb
from statebackend.runtime import Job
from statebackend.runtime.batch_progress import GROWING_BATCHES, GrowthWatch

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_growth_counts_entries_by_batch_and_key(tmp_path: Path) -> None:
    clock = sb.testing.ManualClock()
    with open_store(tmp_path, str) as store, create("heap", str, clock=clock) as keyed:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        ttl = sb.StateTtlConfig(3, cleanup_in_background=False)
        seen = keyed.get_state(sb.MapStateDescriptor("seen", str, str).enable_time_to_live(ttl))
        count.update_many([f"old {n}" for n in range(90)], [0] * 90)
        for batch in range(5):
            clock.set(batch)
            count.update_many([f"{batch}", "0"], [batch, batch])
            if batch == 3:
                count.clear_many(["1"])
            seen.put_many(["ann"] * 3, [f"{batch}-{n}" for n in range(3)], ["x" * 9] * 3)
            progress = {"states": keyed.counts()["states"], "memoryUsedBytes": 1000 + 10 * batch}
            store.commit(batch, [keyed.snapshot(batch, store).result()], now=batch, progress=progress)
    found = sb.tools.growth(tmp_path, max_bytes=1240, expired=True)
    rows = [row for row in found.batches.to_table().to_pylist() if row["state"] == "count"]
    assert [row["entries"] for row in rows] == [91, 92, 93, 93, 94]
    assert [(row["inserted"], row["removed"]) for row in rows[1:]] == [(1, 0), (1, 0), (1, 1), (1, 0)]
    assert all(row["bytes"] > 0 for row in rows)
    expired = [row["expired"] for row in found.batches.to_table().to_pylist() if row["state"] == "seen"]
    assert expired == [None, 0, 0, 3, 3]
    assert found.largest.to_table().to_pylist()[0]["key"] == "ann"
    assert found.longest.to_table().to_pylist() == [
        {"state": "seen", "key": "ann", "entries": 15, "bytes": 15 * 9}
    ]
    assert found.untouched["count"] == pytest.approx(90 / 94)
    assert found.untouched["seen"] == 0
    assert found.expired_at == {"seen": 7}
    assert (found.memory_bytes, found.memory_per_batch, found.batches_left) == (1040, 10, 20)
    assert sb.tools.growth(tmp_path).batches_left is None
    assert "count: 91 to 94 entries in batches 0 to 4" in repr(found)
    assert {row["expired"] for row in sb.tools.growth(tmp_path).batches.to_table().to_pylist()} == {None}


def total(row: Any, before: int | None) -> Any:
    after = (before or 0) + row.n
    return (after,), after


def test_growth_adds_up_the_hosts_of_executors_mode(tmp_path: Path) -> None:
    job = Job(sb.map_with_state(total, int), key="user", schema="n bigint")
    with closing(HostQuery(tmp_path, job, 2)) as query:
        for batch in range(3):
            query.run(batch, pa.table({"user": [f"{n}" for n in range(10 + batch)], "n": [1] * (10 + batch)}))
    rows = sb.tools.growth(tmp_path, max_bytes=1 << 40).batches.to_table().to_pylist()
    assert [row["entries"] for row in rows] == [10, 11, 12]
    assert [(row["inserted"], row["removed"]) for row in rows[1:]] == [(1, 0), (1, 0)]
    assert all(row["bytes"] > 0 for row in rows)


def test_a_state_that_grows_without_ttl_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = GrowthWatch()
    with caplog.at_level(logging.WARNING):
        for batch in range(GROWING_BATCHES):
            watch.committed({"a": batch, "timed": batch, "even": batch // 2}, lambda name: name == "timed")
        assert not caplog.records
        for batch in range(GROWING_BATCHES, 3 * GROWING_BATCHES):
            watch.committed({"a": batch, "timed": batch, "even": batch // 2}, lambda name: name == "timed")
    (record,) = caplog.records
    assert "state 'a' has no TTL and has grown in each of the last 100 batches" in record.getMessage()
