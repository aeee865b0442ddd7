"""Outputs that Spark cannot read itself reach the sink through the driver: the same rows, types and order."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ciphers import AesGcm
from local_spark import settings
from simulated_objects import Bucket, SimulatedObjectCalls
from spark_streams import DDL, FULL, Collecting, Fails, Stream, len_of, numbers

import statebackend as sb
from statebackend.checkpoint.files.object_store import ObjectFiles

pytestmark = pytest.mark.spark


class Silent(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        return []


def encrypted(stream: Stream) -> sb.CheckpointStore:
    return sb.CheckpointStore(stream.state, encryption=AesGcm())


def unreachable() -> sb.CheckpointStore:
    """At an address of S3; this session has no connector for it, and there is no network."""
    files = ObjectFiles("s3://bucket/state", SimulatedObjectCalls(Bucket()))
    return sb.CheckpointStore("s3://bucket/state", _files=files)


@pytest.mark.parametrize("way", ["encrypted", "no connector"])
def test_the_sink_gets_what_was_committed_on_a_replay_too(
    stream: Stream, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "statebackend.spark")
    store = encrypted(stream) if way == "encrypted" else unreachable()
    for n in range(3):
        stream.add(numbers(("a", n), ("b", 10)))
    sink = Collecting(Fails(1, 2))
    for _ in range(2):
        assert "Outage" in stream.fails(stream.batches(sink=sink, state=store))
    stream.run(stream.batches(sink=sink, state=store))
    expected = [[("a", 0), ("b", 10)], [("a", 1), ("b", 20)], [("a", 3), ("b", 30)]]
    assert sink.calls == [(n, expected[n]) for n in (0, 1, 1, 2, 2)]
    reason = {"encrypted": "the store is encrypted", "no connector": "Spark cannot read s3://"}[way]
    said = [each for each in caplog.messages if "outputs through the driver" in each]
    assert len(said) == 3, "once for each start of the query"
    assert all(reason in each for each in said)
    assert sb.tools.verify(store).ok
    if way == "encrypted":
        written = b"".join(path.read_bytes() for path in stream.state.glob("data/*/*") if path.is_file())
        assert b"PAR1" not in written
        assert b"ARROW1" not in written


def test_spark_reads_what_it_can_read(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "statebackend.spark")
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=len_of))
    sb.tools.drop_state(stream.state, "total")  # the next function does not request it
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(Silent(), sink=None, schema=None))
    assert len([each for each in caplog.messages if "outputs as files that Spark reads" in each]) == 1


def test_every_type_goes_either_way_unchanged(stream: Stream) -> None:
    """Through state, with nulls everywhere, early dates, a struct as the key, and a session far from UTC."""
    keyed = {**dict.fromkeys(FULL), "user": {"id": None, "at": FULL["at"]}}
    rows = [FULL, keyed, {**FULL, "user": {"id": FULL["user"]["id"], "at": None}}, {**FULL, "m": {}}]
    values = [{**row, "m": None if row["m"] is None else list(row["m"].items())} for row in rows]
    given = pa.array(values, sb.types.of(DDL).arrow)
    stream.add(pa.Table.from_batches([pa.RecordBatch.from_struct_array(given)]))
    seen: list[Any] = []

    class Echo(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.last = ctx.get_value_state(sb.ValueStateDescriptor("last", DDL))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            self.last.update(row)
            yield self.last.value()

    def sink(frame: Any, batch_id: int) -> None:
        assert frame.schema == stream.spark.createDataFrame([], DDL).schema
        seen.append((frame.collect(), frame.count(), frame.toArrow()))

    with settings(stream.spark, {"spark.sql.session.timeZone": "Asia/Tokyo"}):
        for number, store in enumerate((encrypted(stream), stream.folder / "plain")):
            options = {"schema": DDL, "state": store}
            stream.run(stream.batches(Echo(), sink, **options), checkpoint=f"stream {number}")
    assert seen[0][:2] == seen[1][:2]
    assert seen[0][1] == len(rows)
    assert seen[0][2].equals(seen[1][2])
    assert seen[0][2].to_pylist() == given.to_pylist()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_large_output_keeps_its_order(stream: Stream, is_encrypted: bool) -> None:
    given = np.random.default_rng(1).integers(0, 2**62, 600_000)

    class Numbers(sb.BatchProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
            return pa.record_batch({"user": ["a user's name"] * len(given), "total": given})

    read = []

    def sink(frame: Any, batch_id: int) -> None:
        assert is_encrypted or frame.rdd.getNumPartitions() > 1, "so large that tasks share it"
        read.append(frame.toArrow()["total"].to_numpy())
        assert frame.where("total < 0").isEmpty()

    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(Numbers(), sink, state=encrypted(stream) if is_encrypted else stream.state))
    assert np.array_equal(read[0], given)


def test_damage_and_another_key_are_found_before_the_sink_is_called(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    sink = Collecting(Fails(0))
    assert "Outage" in stream.fails(stream.batches(sink=sink, state=encrypted(stream)))
    other = sb.CheckpointStore(stream.state, encryption=AesGcm(bytes(32)))
    assert "CORRUPT_CHECKPOINT" in stream.fails(stream.batches(sink=sink, state=other))
    assert "USAGE.ENCRYPTION" in stream.fails(stream.batches(sink=sink))
    (path,) = stream.state.glob("data/*/*.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "does not match its checksum" in stream.fails(stream.batches(sink=sink, state=encrypted(stream)))
    path.write_bytes(whole)
    failure = stream.fails(
        stream.batches(sink=sink, state=encrypted(stream), schema="user string, total int")
    )
    assert "USAGE.OTHER_SCHEMA" in failure
    assert len(sink.calls) == 1
    stream.run(stream.batches(sink=sink, state=encrypted(stream)))
    assert sink.calls == [(0, [("a", 1)])] * 2


def test_a_batch_without_output_gives_an_empty_frame(stream: Stream) -> None:
    seen = []
    stream.add(numbers(("a", 1)))
    stream.run(
        stream.batches(
            Silent(),
            lambda frame, _: seen.append((frame.columns, frame.count())),
            state=encrypted(stream),
        )
    )
    assert seen == [(["user", "total"], 0)]
