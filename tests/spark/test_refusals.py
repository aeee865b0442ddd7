"""What a real query is refused, and what it is told: each time nothing has changed, and the right query goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_spark import settings
from refusing_disks import SealOff, fill
from spark_streams import Collecting, Stream, Total, len_of, numbers

import statebackend as sb

pytestmark = pytest.mark.spark


def content(folder: Path) -> dict[str, bytes]:
    """All that counts: who opens the store takes an epoch, which does not."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "epochs"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def begun(stream: Stream, batches: int) -> Collecting:
    """A query that has run so many batches, and another file that is to come."""
    table = numbers(("a", 1)).append_column("item", [["x"]])
    for _ in range(batches):
        stream.add(table)
    sink = Collecting()
    stream.run(stream.batches(sink=sink))
    stream.add(table)
    return sink


class OfAnotherType(Total):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "max", "string"))


class OfAnotherKind(Total):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_list_state(sb.ListStateDescriptor("total", int))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": "name"}, "the batch lacks the column 'name' (columns user, n)"),
        ({"event_time": "user"}, "'user'"),
        ({"broadcast_when": "n"}, "the broadcast column is not boolean"),
    ],
)
def test_check_finds_a_mistake_before_the_query_starts(
    stream: Stream, options: dict[str, Any], said: str
) -> None:
    class Speaking(Total):
        def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
            return []

    stream.add(numbers(("a", 1)))
    stream.batches(Speaking(), len_of).check(stream.rows())
    with pytest.raises(sb.UsageError) as caught:
        stream.batches(Speaking(), len_of, **options).check(stream.rows())
    assert said in str(caught.value)
    assert not stream.state.exists()


def test_another_job_on_the_same_state(stream: Stream) -> None:
    sink = begun(stream, 2)
    before = content(stream.state)
    jobs: list[tuple[Any, dict[str, Any], str]] = [
        (Total(), {"key": "n"}, "STATE_MIGRATION"),
        (Total(), {"key": "item"}, "STATE_MIGRATION.KEY_COLUMNS"),
        (Total(), {"max_parallelism": 64}, "STATE_MIGRATION"),
        (OfAnotherType(), {}, "STATE_MIGRATION"),
        (OfAnotherKind(), {}, "STATE_MIGRATION"),
        (Total(), {"uid": "another"}, "USAGE.OTHER_QUERY"),
    ]
    for function, options, code in jobs:
        there = content(stream.state)
        with pytest.raises(sb.StateBackendError) as caught:
            stream.batches(function, sink, **options).check(stream.rows())
        assert caught.value.code.startswith(code), options
        assert content(stream.state) == there, "a check changes nothing"
        assert code in stream.fails(stream.batches(function, sink, **options)), options
        after = content(stream.state)
        added = [name for name in after.keys() - before.keys() if name.startswith(("data/", "checkpoints/"))]
        assert all(json.loads(after[name])["kind"] == "takeover" for name in added), added
        assert {name: data for name, data in after.items() if name in before} == before, options
    stream.run(stream.batches(sink=sink))
    assert sink.calls[2:] == [(2, [("a", 3)])]


@pytest.mark.parametrize(
    ("schema", "told", "row"),
    [
        ("user string, USER bigint", "columns user, USER", ("a", 1)),
        ("n bigint, s array<struct<t:struct<x:int,X:int>>>", "columns s.t.x, s.t.X", (1, [((1, 2),)])),
    ],
    ids=["columns", "fields"],
)
def test_an_output_that_spark_would_not_read(stream: Stream, schema: str, told: str, row: Any) -> None:
    """It is not committed first: then the sink could never have it."""

    class Same(sb.KeyedProcessFunction):
        def process_element(self, _: Any, ctx: sb.FunctionContext) -> Any:
            yield row

    stream.add(numbers(("a", 1)))
    sink = Collecting()
    job = stream.batches(Same(), sink=sink, schema=schema)
    assert told in stream.fails(job)
    assert not stream.state.exists()
    with settings(stream.spark, {"spark.sql.caseSensitive": "true"}):
        stream.run(job)
    assert sink.calls == [(0, [row])]


class Long(Total):
    """Gives out rows that take as much room as they are told."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        for user, total in super().process_element(row, ctx):
            yield user * row.n, total


def test_a_full_disk_costs_a_retry(stream: Stream, small_disk: Path) -> None:
    for _ in range(2):
        stream.add(numbers(("a", 1)))
    sink = Collecting()
    options = {"function": Long(), "sink": sink, "state": small_disk / "state"}
    stream.run(stream.batches(**options))
    before = content(small_disk / "state")
    stream.add(numbers(("a", 1)))
    fill(small_disk / "ballast")
    assert "No space left on device" in stream.fails(stream.batches(**options))
    assert content(small_disk / "state") == before
    (small_disk / "ballast").unlink()
    stream.run(stream.batches(**options))
    assert sink.calls == [(0, [("a", 1)]), (1, [("a", 2)]), (2, [("a", 3)])]


def test_a_read_only_folder_is_told_at_the_start(stream: Stream, read_only: SealOff) -> None:
    sink = begun(stream, 1)
    before = content(stream.state)
    read_only(stream.state)
    assert "must be writable" in stream.fails(stream.batches(sink=sink))
    assert content(stream.state) == before
    assert len(sink.calls) == 1
