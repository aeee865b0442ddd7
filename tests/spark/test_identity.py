"""A number is not an identity: whatever Spark plans under a committed number, no row is lost or doubled."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spark_streams import Collecting, Fails, Outage, Stream, len_of, numbers

import statebackend as sb
from statebackend.checkpoint.files.posix_calls import PosixCalls
from statebackend.spark.session import SparkLog, parsed_plan

pytestmark = pytest.mark.spark


def state_of(stream: Stream) -> dict[str, int]:
    table = sb.tools.state(stream.state, "total").to_table()
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def committed_undelivered(stream: Stream, sink: Any, **options: Any) -> None:
    """Batch 0 is done; batch 1, of three files, is committed, and its sink has failed."""
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=sink, **options))
    for n in (10, 20, 100):
        stream.add(numbers(("a", n), ("b", 5)))
    assert "Outage" in stream.fails(stream.batches(sink=sink, **options), files=3)
    assert state_of(stream) == {"a": 131, "b": 15}


def test_batch_planned_again_with_other_rows_is_refused(stream: Stream) -> None:
    sink = Collecting(Fails(1))
    committed_undelivered(stream, sink)
    stream.lose(1, "offsets", "sources/0")
    before = len(sink.calls)
    failure = stream.fails(stream.batches(sink=sink), files=1)
    assert "BATCH_GAP.OTHER_ROWS" in failure
    assert "rewind(store, to=0, checkpoint_location=None)" in failure
    assert "sink may have been called" in failure
    assert len(sink.calls) == before
    assert state_of(stream) == {"a": 131, "b": 15}

    rewound = sb.tools.rewind(stream.state, to=0, checkpoint_location=None)
    assert [(each.batch_id, each.rows) for each in rewound.taken_back] == [(1, 6)]
    assert state_of(stream) == {"a": 1}
    stream.run(stream.batches(sink=sink), files=1)
    assert state_of(stream) == {"a": 131, "b": 15}
    assert [batch_id for batch_id, _ in sink.calls[before:]] == [1, 2, 3]
    assert sink.calls[-1][1] == [("a", 131), ("b", 15)]


def test_a_new_checkpoint_location_under_the_same_uid_is_refused(stream: Stream) -> None:
    sink = Collecting()
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=sink, uid="mine"))
    stream.add(numbers(("a", 30)))
    failure = stream.fails(stream.batches(sink=sink, uid="mine"), checkpoint="new", files=2)
    assert "BATCH_GAP.OTHER_ROWS" in failure
    assert "rewind(store, to=None, checkpoint_location=None)" in failure
    assert state_of(stream) == {"a": 1}
    assert sb.tools.rewind(stream.state, to=None, checkpoint_location=None).to is None
    stream.run(stream.batches(sink=sink, uid="mine"), checkpoint="new", files=2)
    assert state_of(stream) == {"a": 31}


def test_query_keeps_its_state_under_another_name_which_is_recorded(stream: Stream) -> None:
    for name in ("orders", "renamed"):
        stream.add(numbers(("a", 1)))
        batches = stream.batches(sink=len_of)
        stream.run(batches, name=name)
        assert batches.last_progress["name"] == name
        assert sb.CheckpointStore(stream.state).open_latest().manifest.progress["name"] == name
    assert state_of(stream) == {"a": 2}


def test_two_live_queries_cannot_share_an_object(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    failures = []
    given = []
    made: list[Any] = []

    def sink(frame: Any, batch_id: int) -> None:
        given.append([tuple(row) for row in frame.collect()])

    def first(frame: Any, batch_id: int) -> None:
        made[0](frame, batch_id)
        # While this query runs, another one is given the same object.
        second = stream.start(made[0], checkpoint="second")
        with pytest.raises(Exception, match="STORE_IN_USE") as caught:
            second.awaitTermination()
        failures.append(str(caught.value))

    made.append(stream.batches(sink=sink, uid="shared"))
    stream.run_called(first, made[0])
    assert "serves another query" in failures[0]
    assert given == [[("a", 1)]]
    stream.add(numbers(("a", 2)))
    stream.run(made[0])
    assert given[1:] == [[("a", 3)]]


def test_a_sink_may_be_tried_again_within_a_batch(stream: Stream) -> None:
    stream.add(numbers(("a", 1), ("b", 5)))
    sink = Collecting(Fails(0))
    batches = stream.batches(sink=sink)

    def trying(frame: Any, batch_id: int) -> None:
        other = frame.where("user = 'b'")
        with pytest.raises(Outage):
            batches(frame, batch_id)
        with pytest.raises(sb.UsageError, match="twice"):
            batches(other, batch_id)
        batches(frame, batch_id)
        # It would be taken for a replay: its rows would be lost, and the first output delivered again.
        for again in (frame, other):
            with pytest.raises(sb.UsageError, match="twice") as caught:
                batches(again, batch_id)
            assert caught.value.code == "USAGE.CALLED_TWICE"

    stream.run_called(trying, batches)
    assert sink.calls == [(0, [("a", 1), ("b", 5)])] * 2


def test_a_sink_that_sets_the_job_group_changes_nothing(stream: Stream) -> None:
    runners = []
    for _ in range(3):
        stream.add(numbers(("a", 1)))

    def sink(frame: Any, batch_id: int) -> None:
        frame.sparkSession.sparkContext.setJobGroup(f"mine {batch_id}", "of the sink")
        frame.count()
        runners.append(batches._runner)

    batches = stream.batches(sink=sink)
    stream.run(batches)
    assert [each is runners[0] for each in runners] == [True] * 3, "it was opened once"
    assert state_of(stream) == {"a": 3}


def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made durable, and what is linked, in order."""
    seen: list[str] = []
    sync, link = PosixCalls.sync, PosixCalls.link

    def syncs(self: PosixCalls, descriptor: int) -> None:
        seen.append("sync " + os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(self, descriptor)

    def links(self: PosixCalls, source: str, target: str) -> None:
        seen.append("link " + target)
        link(self, source, target)

    monkeypatch.setattr(PosixCalls, "sync", syncs)
    monkeypatch.setattr(PosixCalls, "link", links)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_sparks_notes_on_a_batch_are_durable_before_it_is_committed(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = traced(monkeypatch)
    sync = SparkLog.sync

    def slow(self: SparkLog) -> None:
        time.sleep(0.5)  # the batch itself takes less
        sync(self)

    monkeypatch.setattr(SparkLog, "sync", slow)
    for n in range(3):
        stream.add(numbers(("a", n)))
    stream.run(stream.batches(sink=len_of))
    location = stream.folder / "stream"
    assert f"sync {location}/metadata" in seen
    for batch_id in range(3):
        (committed,) = [
            at
            for at, call in enumerate(seen)
            if call == f"link {stream.state}/checkpoints/{batch_id + 2}.json"  # the first entry is a takeover
        ]
        for log in ("offsets", "sources/0"):
            for name in (f"{log}/{batch_id}", f"{log}/.{batch_id}.crc"):
                calls = [at for at, call in enumerate(seen) if call == f"sync {location}/{name}"]
                assert len(calls) == 1, "once is enough: such a file is never written again"
                assert calls[0] < committed
            folder = [at for at, call in enumerate(seen) if call == f"sync {location}/{log}"]
            assert any(calls[0] < at < committed for at in folder)


def test_batch_fails_uncommitted_when_sparks_notes_cannot_be_made_durable(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.add(numbers(("a", 1)))
    sink = Collecting()
    with monkeypatch.context() as patch:
        patch.setattr(
            PosixCalls, "sync_folder", refusing(PosixCalls.sync_folder, stream.folder / "stream" / "offsets")
        )
        assert "no space" in stream.fails(stream.batches(sink=sink))
    assert sb.CheckpointStore(stream.state).latest() is None
    stream.run(stream.batches(sink=sink))
    assert sink.calls == [(0, [("a", 1)])]


def refusing(sync: Callable[[PosixCalls, str], None], folder: Path) -> Callable[[PosixCalls, str], None]:
    """Syncs folders, but for one on a disk that is full."""

    def syncs(self: PosixCalls, path: str) -> None:
        if path == str(folder):
            raise OSError(errno.ENOSPC, "no space")
        sync(self, path)

    return syncs


def test_plan_in_sparks_file_is_the_plan_that_spark_tells(stream: Stream) -> None:
    """A store may have the identity of its newest batch from either."""
    told = []

    def sink(frame: Any, batch_id: int) -> None:
        told.append([parsed_plan(each.plan(batch_id)) for each in (batches._spark_log, batches._query_run)])

    batches = stream.batches(sink=sink)
    for n in range(2):
        stream.add(numbers(("a", n)))
    stream.run(batches)
    assert [each[0]["kind"] for each in told] == ["plan"] * 2
    assert all(from_file == from_spark for from_file, from_spark in told)
    assert told[0] != told[1]
    assert SparkLog(str(stream.folder / "stream")).plan(2) is None
