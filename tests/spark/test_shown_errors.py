"""The error of a query that failed, as Spark shows it: short, and what helps is where one looks."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
import pytest
from spark_streams import Stream, Total, len_of, numbers

import statebackend as sb

pytestmark = pytest.mark.spark

#: The lines that py4j and PySpark add above the frames of a sink or a function, and the one above them.
THEIRS = 9


def shown(stream: Stream, batches: Any) -> list[str]:
    """The lines of the error of a query, without the description of the query that Spark adds below."""
    query = stream.start(batches)
    with pytest.raises(Exception, match="Python Proxy"):
        query.awaitTermination()
    batches.close()
    return str(query.exception()).partition("=== Streaming Query ===")[0].strip().splitlines()


def library_frames(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("  File") and "/statebackend/" in line]


class Worded(Total):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield row.user, row.word


#: Mistakes in columns that show at the first batch: the options, and what the last line has in this order.
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "key": ({"key": "usr"}, ["UsageError: the batch lacks the column 'usr'", "[USAGE.NO_COLUMN]"]),
    "order": ({"order_by": "tme"}, ["UsageError: the batch lacks the column 'tme'", "[USAGE.NO_COLUMN]"]),
    "event time": (
        {"event_time": "at"},
        ["UsageError: the batch lacks the column 'at'", "[USAGE.NO_COLUMN]"],
    ),
    "type of event time": (
        {"event_time": "word"},
        [
            "UsageError: the event-time column is neither a timestamp nor",
            "column 'word' is string",
            "[USAGE.COLUMN]",
        ],
    ),
    "null key": (
        {"key": "none"},
        [
            "SerializationTypeError: a key is null (column 'none', position 0, 1 of 1 rows",
            "null_keys='drop'",
            "[SERIALIZATION.NULL_KEY]",
        ],
    ),
    "type of output": (
        {"function": Worded()},
        [
            "SerializationTypeError: LONG does not take a value of type str",
            "output column 'total', position 0",
            "[SERIALIZATION.TYPE]",
        ],
    ),
    "number of output": (
        {"schema": "user string"},
        [
            "SerializationTypeError: an output row does not fit the schema",
            "has 2 fields",
            "the schema has 1: user",
            "[SERIALIZATION.OUTPUT]",
        ],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_last_line_says_which_column_is_mistaken(stream: Stream, mistake: str) -> None:
    options, parts = MISTAKES[mistake]
    rows = numbers(("a", 1)).append_column("word", [["x"]])
    stream.add(rows.append_column("none", pa.array([None], pa.string())))
    lines = shown(stream, stream.batches(sink=len_of, **options))
    assert lines[-1].startswith(f"statebackend.errors.{parts[0]}")
    assert lines[-1].endswith(parts[-1])
    places = [lines[-1].find(part) for part in parts]
    assert places == sorted(places)
    assert min(places) > 0, "each is there"
    assert "batch 0 of " in lines[-1]
    assert len(library_frames(lines)) == 1, "the call by Spark"
    assert len(lines) <= THEIRS + 3


class Failing(Total):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        raise ValueError("of one line\nand of another")


def test_last_line_says_what_the_function_raised(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    lines = shown(stream, stream.batches(Failing(), sink=len_of))
    assert lines[-3:-1] == ["ValueError: of one line", "and of another"]
    assert lines[-1].startswith("In batch 0 of <stateful Failing, key 'user'")
    assert lines[-1].endswith(": ValueError: of one line and of another")
    assert len(library_frames(lines)) == 1
    assert sum(f'File "{__file__}"' in line for line in lines) == 1


class Mistaken(Total):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.total.add(str(row.n))
        yield row.user, self.total.get()


def test_last_line_says_what_a_state_refused_and_the_line_above_where(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    lines = shown(stream, stream.batches(Mistaken(), sink=len_of))
    assert lines[-1].startswith(
        "statebackend.errors.SerializationTypeError: LONG does not take a value of type str"
    )
    assert "state 'total'" in lines[-1]
    assert lines[-1].endswith("[SERIALIZATION.TYPE]")
    assert any("self.total.add(str(row.n))" in line for line in lines[-3:])


def test_frames_of_the_library_stay_if_it_failed_itself(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    from statebackend.runtime.job import Job

    stream.add(numbers(("a", 1)))
    batches = stream.batches(sink=len_of)
    monkeypatch.setattr(Job, "columns", property(lambda job: None))
    lines = shown(stream, batches)
    assert len(library_frames(lines)) > 2
    if sys.version_info >= (3, 11):
        assert "TypeError" in lines[-1]
