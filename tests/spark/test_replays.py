"""A replay delivers what was committed, or fails: with state above the frame, other schemas, output that goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from local_spark import settings
from spark_streams import Collecting, Fails, Outage, Stream, Total, len_of, numbers, shipped_total

import statebackend as sb
from statebackend.runtime import CommittedBatch

pytestmark = pytest.mark.spark


PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@pytest.mark.parametrize(
    "given",
    [{}, {PROVIDER: ROCKSDB, "spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}],
    ids=["hdfs provider", "rocksdb provider, format 2"],
)
def test_state_above_the_frame_is_committed_by_a_replay_too(stream: Stream, given: dict[str, str]) -> None:
    with settings(stream.spark, {**given, "spark.sql.shuffle.partitions": "2"}):

        def once(rows: Any) -> Any:
            return rows.dropDuplicates(["user", "n"])

        sink = Collecting(Fails(1))
        for n in range(3):
            stream.add(numbers(("a", n), ("a", 0)))
        assert "Outage" in stream.fails(stream.batches(sink=sink), transform=once)
        stream.run(stream.batches(sink=sink), transform=once)
    calls = dict(sink.calls)
    assert [batch_id for batch_id, _ in sink.calls] == [0, 1, 1, 2]
    assert [calls[n] for n in range(3)] == [[("a", 0)], [("a", 1)], [("a", 3)]]


def output_of(stream: Stream) -> Path:
    (path,) = stream.state.glob("data/*/*.parquet")
    return path


@pytest.mark.parametrize("loses", [True, False], ids=["lost", "damaged"])
def test_output_that_goes_while_spark_reads_it_is_an_error(
    stream: Stream, loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was verified, in a session that is told to ignore missing and corrupt files."""
    stream.add(numbers(*((f"u{n}", n) for n in range(2000))))
    verify = CommittedBatch.verify_output

    def verified_and_gone(self: CommittedBatch) -> None:
        verify(self)
        path = output_of(stream)
        if loses:
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)

    monkeypatch.setattr(CommittedBatch, "verify_output", verified_and_gone)
    sink = Collecting()
    names = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")
    with settings(stream.spark, dict.fromkeys(names, "true")):
        stream.fails(stream.batches(sink=sink))
    assert sink.calls == []


def test_a_path_is_never_a_pattern(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    for state in (stream.folder / "a[b]/{x,y}/s*?", stream.folder / "sp ace%20#/k=v"):
        sink = Collecting()
        stream.run(stream.batches(sink=sink, state=state), checkpoint=f"stream {state.name}")
        assert sink.calls == [(0, [("a", 1)])]
        assert sb.CheckpointStore(state).latest() == 0


def test_a_driver_that_was_overtaken_does_not_call_its_sink(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still between its commit and its sink, while another one goes on."""
    stream.add(numbers(("a", 1)))
    verify = CommittedBatch.verify_output

    def overtaken(self: CommittedBatch) -> None:
        verify(self)
        sb.CheckpointStore(stream.state).open_for_writing().close()

    monkeypatch.setattr(CommittedBatch, "verify_output", overtaken)
    sink = Collecting()
    assert "COMMIT_CONFLICT" in stream.fails(stream.batches(sink=sink))
    assert sink.calls == []


def test_a_sink_that_asks_for_the_context_can_fence(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    stream.add(numbers(("a", 1)))
    seen: list[Any] = []

    def sink(frame: Any, batch_id: int, context: sb.spark.SinkContext) -> None:
        seen.append(context)
        if len(seen) == 2:
            raise Outage

    assert "Outage" in stream.fails(stream.batches(sink=sink))
    stream.run(stream.batches(sink=sink))
    assert [(each.batch_id, each.is_replay) for each in seen] == [(0, False), (1, False), (1, True)]
    assert len({each.incarnation for each in seen}) == 1
    assert seen[1].epoch < seen[2].epoch
    stream.lose(1, "commits")
    stream.lose(1, "offsets", "sources/0")
    assert "OTHER_ROWS" in stream.fails(stream.batches(sink=sink))
    sb.tools.rewind(stream.state, to=0, checkpoint_location=None)
    stream.run(stream.batches(sink=sink))
    assert seen[3].batch_id == 1
    assert not seen[3].is_replay
    assert seen[3].incarnation != seen[2].incarnation


class Sorted(Total):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        if row.n >= 100:
            ctx.output("large", row)
        yield from super().process_element(row, ctx)


def test_each_output_goes_to_its_sink_and_a_replay_goes_to_all(stream: Stream) -> None:
    stream.add(numbers(("a", 1), ("b", 100)))
    stream.add(numbers(("a", 200)))
    stream.add(numbers(("a", 1)))
    schemas = {"totals": "user string, total bigint", "large": "user string, n bigint"}
    totals, large = Collecting(), Collecting(Fails(1))
    batches = stream.batches(Sorted(), {"large": large, "totals": totals}, schema=schemas)
    assert "Outage" in stream.fails(batches)
    batches = stream.batches(Sorted(), {"large": large, "totals": totals}, schema=schemas)
    stream.run(batches)
    second = (1, [("a", 201)])
    assert totals.calls == [(0, [("a", 1), ("b", 100)]), second, second, (2, [("a", 202)])]
    assert large.calls == [(0, [("b", 100)]), (1, [("a", 200)]), (1, [("a", 200)]), (2, [])]
    assert batches.last_progress["outputs"] == {"totals": 1, "large": 0}


WAYS = {"driver": sb.spark.Driver(), "executors": sb.spark.Executors(1)}


@pytest.mark.stress
@pytest.mark.parametrize("way", WAYS)
def test_source_files_of_finished_batches_are_not_read_again(stream: Stream, way: str) -> None:
    for n in range(4):
        stream.add(numbers(("a", 10**n)))
    sink = Collecting()
    stream.run(stream.batches(shipped_total(), sink, run_on=WAYS[way]))
    (stream.folder / "in/0000.parquet").unlink()
    pq.write_table(numbers(("a", 7), ("b", 7)), stream.folder / "in/0001.parquet")
    stream.add(numbers(("a", 10**4)))
    stream.run(stream.batches(shipped_total(), sink, run_on=WAYS[way]))
    assert [rows for _, rows in sink.calls] == [[("a", total)] for total in (1, 11, 111, 1111, 11111)]


@pytest.mark.stress
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_committed", [False, True], ids=["not committed", "committed"])
@pytest.mark.parametrize("then", ["gone", "changed"])
def test_source_files_of_the_newest_batch_are_gone_or_changed(
    stream: Stream, way: str, is_committed: bool, then: str
) -> None:
    """A committed batch is delivered as it was; another one has the rows that Spark finds now, each once."""
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(shipped_total(), len_of, run_on=WAYS[way]))
    stream.add(numbers(("a", 10)))
    stream.add(numbers(("a", 100)))
    failing = None if is_committed else "as told"
    stream.fails(stream.batches(shipped_total(failing), Collecting(Fails(1)), run_on=WAYS[way]), files=2)
    path = stream.folder / "in/0001.parquet"
    if then == "gone":
        path.unlink()
    else:
        pq.write_table(numbers(("a", 20)), path)
    stream.add(numbers(("a", 1000)))
    sink = Collecting()
    stream.run(stream.batches(shipped_total(), sink, run_on=WAYS[way]))
    found = 10 if is_committed else {"gone": 0, "changed": 20}[then]
    assert [(batch_id, rows[-1]) for batch_id, rows in sink.calls] == [
        (1, ("a", 101 + found)),
        (2, ("a", 1101 + found)),
    ]
