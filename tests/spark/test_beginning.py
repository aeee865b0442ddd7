"""How a job begins, with state and without: in a running stream, from another store, anew after a gap, by mistake."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
from spark_streams import Collecting, Outage, Stream, Total, len_of, numbers, shipped_total

import statebackend as sb

pytestmark = pytest.mark.spark

WAYS = {"driver": sb.spark.Driver(), "executors": sb.spark.Executors(1)}


def begun(stream: Stream, batches: int = 3) -> None:
    """A stream that has run for some batches, with a total of 1 for each."""
    for _ in range(batches):
        stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=len_of))


def test_a_running_stream_goes_on_with_the_state_of_a_savepoint(stream: Stream) -> None:
    begun(stream)
    other = stream.folder / "other"
    stream.add(numbers(("a", 100)))
    sink = Collecting()
    start = sb.spark.StartFrom(stream.state, first_batch=3)
    for wrong in (None, 57):
        begins = sb.spark.StartFrom(stream.state, wrong)
        failure = stream.fails(stream.batches(sink=sink, state=other, start=begins))
        assert "BATCH_GAP.NO_STATE" in failure
        assert "StartFrom(source, first_batch=3)" in failure

    class Failing(Total):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            raise Outage

    # A crash before the first commit begins again.
    assert "Outage" in stream.fails(stream.batches(Failing(), sink, state=other, start=start))
    stream.run(stream.batches(sink=sink, state=other, start=start))
    assert sink.calls == [(3, [("a", 103)])]
    # What is committed decides: the start is ignored from here on.
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=sink, state=other, start=start))
    assert sink.calls[1:] == [(4, [("a", 104)])]


def test_reset_lets_a_stream_go_on_from_empty_after_each_gap(stream: Stream) -> None:
    begun(stream)
    sink = Collecting()
    shutil.rmtree(stream.state)
    stream.add(numbers(("a", 5)))
    assert "sb.tools.reset(store, first_batch=3)" in stream.fails(stream.batches(sink=sink))
    assert sb.tools.reset(stream.state, first_batch=3).dropped == []
    stream.run(stream.batches(sink=sink))
    stream.add(numbers(("a", 5)))
    stream.run(stream.batches(sink=sink))
    assert sink.calls == [(3, [("a", 5)]), (4, [("a", 10)])]
    # Spark's place is brought back from an older copy.
    stream.lose(4, "offsets", "commits", "sources/0")
    stream.lose(3, "commits", "offsets", "sources/0")
    failure = stream.fails(stream.batches(sink=sink))
    assert "BATCH_GAP.STREAM_BEHIND" in failure
    assert "sb.tools.reset(store, first_batch=3)" in failure
    assert sb.tools.state(stream.state, "total").to_table()["value"].to_pylist() == [10]
    assert sb.tools.reset(stream.state, first_batch=3).dropped == [3, 4]
    stream.run(stream.batches(sink=sink))
    assert sink.calls[2:] == [(3, [("a", 5)]), (4, [("a", 10)])]


def test_the_checkpoint_is_not_sparks_own_location(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    for checkpoint in ("stream", "stream/../stream", "stream/offsets"):
        batches = stream.batches(sink=len_of, state=stream.folder / checkpoint)
        assert "USAGE.SPARKS_LOCATION" in stream.fails(batches)


def test_a_lost_checkpoint_location_is_told_as_that(stream: Stream) -> None:
    begun(stream)
    shutil.rmtree(stream.folder / "stream")
    failure = stream.fails(stream.batches(sink=len_of))
    assert "USAGE.LOST_LOCATION" in failure
    assert "another id" in failure
    failure = stream.fails(stream.batches(sink=len_of), checkpoint="another")
    assert "USAGE.OTHER_QUERY" in failure
    assert "its checkpointLocation is file:" in failure


def test_a_store_can_be_given_with_its_own_options(stream: Stream) -> None:
    for _ in range(2):
        stream.add(numbers(("a", 1)))
    store = sb.CheckpointStore(stream.state, retain=1, compression=None)
    stream.run(stream.batches(sink=len_of, state=store))
    assert store.checkpoints() == [1]


@pytest.mark.stress
@pytest.mark.parametrize("way", WAYS)
def test_backups_of_two_moments_are_refused_and_of_one_moment_go_on(stream: Stream, way: str) -> None:
    """Spark's place and the store, each as it was after one to four batches."""
    moments = range(1, 5)
    for moment in moments:
        stream.add(numbers(("a", 10**moment)))
        stream.run(stream.batches(shipped_total(), len_of, run_on=WAYS[way]))
        for name in ("state", "stream"):
            shutil.copytree(stream.folder / name, stream.folder / f"{name}-{moment}")
    stream.add(numbers(("a", 10**5)))
    for of_stream, of_state in itertools.product(moments, moments):
        for name, moment in (("state", of_state), ("stream", of_stream)):
            shutil.rmtree(stream.folder / name)
            shutil.copytree(stream.folder / f"{name}-{moment}", stream.folder / name)
        sink = Collecting()
        if of_stream != of_state:
            failure = stream.fails(stream.batches(shipped_total(), sink, run_on=WAYS[way]))
            code = "STATE_BEHIND" if of_stream > of_state else "STREAM_BEHIND"
            code = "OTHER_ROWS" if of_state == of_stream + 1 else code
            assert f"[BATCH_GAP.{code}]" in failure
            assert "Hint: " in failure
            assert sink.calls == []
            assert sb.CheckpointStore(stream.state).latest() == of_state - 1, "a refusal changes nothing"
        if of_state == of_stream + 1:
            sb.tools.rewind(stream.state, to=of_stream - 1, checkpoint_location=None)  # as the hint says
        if of_state in (of_stream, of_stream + 1):
            stream.run(stream.batches(shipped_total(), sink, run_on=WAYS[way]))
            totals = [sum(10**each for each in range(1, at + 2)) for at in range(of_stream, 5)]
            assert sink.calls == [(at, [("a", total)]) for at, total in enumerate(totals, of_stream)]
