"""`stateful` refuses each mistake that it can see by itself: before there is a query, and without Spark."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ciphers import AesGcm

import statebackend as sb
from statebackend.runtime.runner import check_start
from statebackend.spark import sinks


class Same(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield row


class Whole(sb.BatchProcessFunction):
    def process_batch(self, batch: Any, ctx: sb.FunctionContext) -> Any:
        return batch


class Client:
    def __init__(self) -> None:
        self.pool = {"secret": [1, threading.Lock()]}


class Connected(Same):
    def __init__(self) -> None:
        self.size, self.client = 3, Client()


class Waiting(Same):
    async def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:  # type: ignore[override]
        return []


class AsyncSink:
    async def __call__(self, frame: Any, batch_id: int) -> None:
        pass


async def async_sink(frame: Any, batch_id: int) -> None:
    pass


def positional(frame: Any, batch_id: int, context: Any, /) -> None: ...


def yielding_sink(frame: Any, batch_id: int) -> Any:
    yield frame


def made(folder: Path, function: Any = None, **options: Any) -> Any:
    settings = {
        "key": "user",
        "schema": "user string, n bigint",
        "state": folder / "state",
        "sink": print,
    }
    return sb.spark.stateful(function or Same(), **{**settings, **options})


TWO = {"a": "n int", "b": "n int"}
ODD = "day date, pages int, pair struct<a:int>, tags array<string>, counts map<string,int>, bytes binary"
DAYS = "day date, pages int"


def by(sink: Any, columns: Any, folder: Path = Path("/nowhere")) -> Any:
    return sink(folder / "out", partition_by=columns)


#: Options, and parts of the error: words, and the code where it matters.
WRONG: dict[str, tuple[Any, ...]] = {
    "no function": ({"function": Same}, "is not a function with state"),
    "a function that cannot be copied": ({"function": Connected()}, "attribute client.pool[...][1], a lock"),
    "a method that is async": ({"function": Waiting()}, "the method on_timer"),
    "no key": ({"key": None}, "expected the name of a column"),
    "a key that is a number": ({"key": 5}, "expected the name of a column"),
    "a key without a name": ({"key": ["a", ""]}, "expected the name of a column"),
    "a key twice": ({"key": ["a", "a"]}, "key names a column twice"),
    "a schema that cannot be read": ({"schema": "user strin"}, "cannot read a type"),
    "a schema of no type": ({"schema": 5}, "is not a type"),
    "a schema of no columns": ({"schema": "bigint"}, "[USAGE"),
    "no outputs": ({"schema": {}}, "schema is"),
    "an output without a name": ({"schema": {"": "n int"}}, "schema is"),
    "an output called by a number": ({"schema": {7: "n int"}}, "schema is"),
    "an output without a sink": ({"schema": TWO, "sink": {"a": print}}, "output 'b'", "[USAGE.NO_SINK]"),
    "outputs without sinks": ({"schema": TWO, "sink": {}}, "[USAGE.NO_SINK]"),
    "outputs without any sink": ({"schema": TWO, "sink": None}, "[USAGE.NO_SINK]"),
    "an output without a schema": ({"schema": {"a": None}, "sink": {"a": print}}, "[USAGE.SINK]"),
    "no sink": ({"sink": None}, "output 'main'", "[USAGE.NO_SINK]"),
    "a sink for no output": ({"sink": {"mian": print}}, "'mian'; outputs main", "[USAGE.NO_OUTPUT]"),
    "one sink for two outputs": ({"schema": TWO}, "several outputs", "[USAGE.SINK]"),
    "a sink without a schema": ({"schema": None}, "a sink needs to know the schema", "[USAGE.SINK]"),
    "a sink that is a name": ({"sink": "parquet"}, "sink is a function"),
    "a sink of two that is a name": ({"schema": TWO, "sink": {"a": "print", "b": print}}, "[USAGE.SINK]"),
    "a sink that is not called so": (
        {"sink": lambda frame: None},
        "called with (df, batch_id)",
        "[USAGE.SINK]",
    ),
    "a sink whose context has no name": ({"sink": positional}, "called with (df, batch_id)"),
    "a sink that is async": ({"sink": async_sink}, "async"),
    "a sink object that is async": ({"sink": AsyncSink()}, "async"),
    "a sink that yields": ({"sink": yielding_sink}, "yields"),
    "partitions by no column": ({"sink": by(sinks.parquet, "day")}, "no column 'day'", "[USAGE.NO_COLUMN]"),
    "partitions by a column twice": (
        {"schema": DAYS, "sink": by(sinks.parquet, ["day", "day"])},
        "names a column twice",
        "[USAGE.OPTION]",
    ),
    "partitions by all columns": (
        {"schema": DAYS, "sink": by(sinks.parquet, ["pages", "day"])},
        "or all columns",
        "[USAGE.OPTION]",
    ),
    **{
        f"partitions by a column of type {kind}": (
            {"schema": f"user string, at {kind}", "sink": by(sinks.parquet, "at")},
            "cannot be partitioned by column 'at'",
            "[USAGE.NOT_AVAILABLE]",
        )
        for kind in ("double", "timestamp", "decimal(9,2)", "binary", "array<int>")
    },
    "a table partitioned by a column twice": (
        {"schema": DAYS, "sink": by(sinks.delta, ["day", "day"])},
        "names a column twice",
    ),
    "a table partitioned by all columns": (
        {"schema": DAYS, "sink": by(sinks.delta, ["pages", "day"])},
        "all columns of the output",
    ),
    **{
        f"a table partitioned by {name}": (
            {"schema": ODD, "sink": by(sinks.delta, name)},
            f"cannot be partitioned by column '{name}'",
        )
        for name in ("pair", "tags", "counts", "bytes")
    },
    "no such backend": ({"backend": "heep"}, "unknown backend 'heep'"),
    "a backend of no kind": ({"backend": 5}, "backend is"),
    "no place for state": ({"run_on": "executors"}, "unknown run_on: a str"),
    "more hosts than key groups": (
        {"run_on": sb.spark.Executors(9), "max_parallelism": 8},
        "Executors(9), max_parallelism=8",
    ),
    "no key groups": ({"max_parallelism": 0}, "max_parallelism is"),
    "an event time of no kind": ({"event_time": 5}, "event_time is"),
    "an order of no kind": ({"order_by": 5}, "unknown order_by="),
    "an order by no name": ({"order_by": [1]}, "unknown order_by="),
    "a broadcast column of no kind": ({"broadcast_when": 5}, "broadcast_when is"),
    "broadcast rows for nobody": ({"broadcast_when": "b"}, "process_broadcast"),
    "broadcast rows for no batches": ({"function": Whole(), "broadcast_when": "b"}, "process_broadcast"),
    "a rule for null keys of two columns": ({"key": ["a", "b"], "null_keys": "drop"}, "a key of one column"),
    "no rule for null keys": ({"null_keys": "x"}, "null_keys is not a rule for rows: 'x'"),
    "no output for errors": ({"errors": sb.to_output("errors")}, "needs an output of that name"),
    "errors of batches": (
        {"function": Whole(), "errors": sb.to_output("errors")},
        "is for a KeyedProcessFunction",
    ),
    "late rows to no output": (
        {"event_time": sb.EventTime("at", late=sb.to_output("late"))},
        "needs an output of that name",
        "[USAGE.NO_OUTPUT]",
    ),
    "a start of no kind": ({"start": "/x"}, "unknown start: a str"),
    "a start from its own state": ({"start": sb.spark.StartFrom("/x"), "state": "/x"}, "the same store"),
    "a uid of no kind": ({"uid": 5}, "unknown uid="),
    "no uid": ({"uid": ""}, "unknown uid="),
    "an observer of no kind": ({"on_batch": 5}, "on_batch is a function"),
    "a checkpoint of no kind": ({"state": 5}, "a store is given by its path or uri"),
    "a checkpoint at no such address": ({"state": "http://host/x"}, "cannot lie at"),
    "files of an encrypted store": (
        {
            "run_on": sb.spark.Driver(input="files"),
            "state": sb.CheckpointStore("/nowhere", encryption=AesGcm()),
        },
        "the store is encrypted",
    ),
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input": "memory"}, "unknown input 'memory'; expected 'auto' or 'files'"),
        ({"batch_memory": "1 gib"}, "not a size (batch_memory)"),
        ({"batch_memory": 0}, "the size is less than 1 bytes (batch_memory)"),
        ({"n": 0}, "is out of range; expected a whole number from 1"),
        ({"n": "2"}, "is out of range; expected a whole number from 1"),
        ({"n": 2, "batch_memory": 0}, "the size is less than 1 bytes (batch_memory)"),
        ({"n": 2, "spill_disk": -1}, "the size is less than 0 bytes (spill_disk)"),
        ({"n": 2, "start_timeout": None}, "a NoneType is not a duration (start_timeout)"),
        ({"n": 2, "heartbeat_timeout": 0.5}, "a float is not a duration (heartbeat_timeout)"),
        ({"n": 2, "batch_timeout": 0}, "the duration is less than 1 ms (batch_timeout)"),
        ({"n": 2, "max_attempts": True}, "max_attempts=True is out of range; expected a whole number"),
        ({"n": 2, "bind": ""}, "unknown bind=''; expected an address"),
        ({"n": 2, "advertised_address": 5}, "unknown advertised_address=5; expected an address"),
        ({"n": 2, "ports": 7000}, "expected a list of ports"),
        ({"n": 2, "ports": [70_000]}, "expected a list of ports"),
        ({"n": 2, "profile": {}}, "a dict is not a profile; expected a pyspark.resource.ResourceProfile"),
        ({"n": 2, "local_copies": "yes"}, "expected True, False or None"),
    ],
)
def test_place_for_state_refuses_a_wrong_option(options: dict[str, Any], said: str) -> None:
    place: Any = sb.spark.Executors if "n" in options else sb.spark.Driver
    with pytest.raises(sb.UsageError) as caught:
        place(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((5,), "cannot start from a int"),
        *(((empty,), "the source of StartFrom is empty") for empty in ([], (), "")),
        *((("/x", wrong), "first_batch is the id of a batch") for wrong in (-1, "3", True, 2.0)),
    ],
)
def test_start_from_refuses_a_mistake(arguments: Any, said: str) -> None:
    with pytest.raises(sb.UsageError, match=said):
        sb.spark.StartFrom(*arguments)


@pytest.mark.parametrize("what", WRONG)
def test_stateful_refuses_a_mistake_at_once(tmp_path: Path, what: str) -> None:
    options, *parts = WRONG[what]
    with pytest.raises(sb.StateBackendError) as caught:
        made(tmp_path, **options)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert "secret" not in str(caught.value)


def test_stateful_has_sixteen_parameters() -> None:
    parameters = inspect.signature(sb.spark.stateful).parameters.values()
    assert [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY] == ["function"]
    named = [f"{each.name}={each.default!r}" for each in parameters if each.default is not each.empty]
    assert ", ".join(named) == (
        "schema=None, sink=None, backend='heap', max_parallelism=128, run_on=None, event_time=None, order_by=None, "
        "broadcast_when=None, null_keys='fail', errors='fail', start=None, uid=None, on_batch=None"
    )
    assert [each.name for each in parameters if each.default is each.empty] == ["function", "key", "state"]
    assert "Any" not in str(inspect.signature(sb.spark.stateful))


class Quiet(sb.KeyedProcessFunction):
    """Takes rows of every kind, and gives one only to an output."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        return []

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
        return []


class QuietRows(sb.KeyRowsFunction):
    def process_rows(self, key: Any, rows: Any, ctx: sb.FunctionContext) -> Any:
        return []


BOTH = {"main": "n bigint", "late": "n bigint"}
PRINTS = {"main": print, "late": print}
#: Values that are good by themselves; each with the others that it needs.
GOOD: dict[str, Callable[[Path], dict[str, Any]]] = {
    "function of batches": lambda _: {"function": Whole()},
    "function of keys": lambda _: {"function": QuietRows()},
    "key": lambda _: {"key": ["user", "item"]},
    "state": lambda folder: {"state": sb.CheckpointStore(folder / "state", encryption=AesGcm())},
    "sink": lambda _: {"schema": "n bigint", "sink": print},
    "sink of files": lambda folder: {
        "schema": "n bigint, day date",
        "sink": by(sinks.parquet, "day", folder),
    },
    "sinks": lambda _: {"schema": BOTH, "sink": PRINTS},
    "backend": lambda _: {"backend": "rocksdb"},
    "max_parallelism": lambda _: {"max_parallelism": 8},
    "run_on files": lambda _: {"run_on": sb.spark.Driver(input="files")},
    "run_on executors": lambda _: {"run_on": sb.spark.Executors(9)},
    "event_time": lambda _: {"event_time": sb.EventTime("at", timers="between_rows")},
    "event_time to output": lambda _: {
        "event_time": sb.EventTime("at", late=sb.to_output("late")),
        "schema": BOTH,
        "sink": PRINTS,
    },
    "order_by": lambda _: {"order_by": ["n", "at"]},
    "broadcast_when": lambda _: {"broadcast_when": "all"},
    "null_keys": lambda _: {"null_keys": "drop"},
    "null_keys to output": lambda _: {"null_keys": sb.to_output("late"), "schema": BOTH, "sink": PRINTS},
    "errors": lambda _: {"errors": "drop"},
    "errors to output": lambda _: {"errors": sb.to_output("late"), "schema": BOTH, "sink": PRINTS},
    "start": lambda folder: {"start": sb.spark.StartFrom(folder / "savepoint", first_batch=57)},
    "uid": lambda _: {"uid": "mine"},
    "on_batch": lambda _: {"on_batch": print},
}
COLUMNS = pa.schema(
    {"user": pa.string(), "item": pa.string(), "n": pa.int64(), "at": pa.timestamp("us"), "all": pa.bool_()}
)


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(GOOD, 2)])
def test_two_good_values_work_together_or_are_both_named(tmp_path: Path, one: str, other: str) -> None:
    """Their checks against a frame then find nothing; they need no session."""
    both = [GOOD[name](tmp_path) for name in (one, other)]
    names = [name.split()[0] for name in (one, other)]
    options = {"function": Quiet(), "key": "user", "state": tmp_path / "state", **both[0], **both[1]}
    try:
        batches = sb.spark.stateful(**options)
    except sb.UsageError as error:
        said = str(error).lower()
        assert [name for name in names if name not in said] == []
        return
    job = batches._job
    key_type = job.key_type({field.name: field.type for field in COLUMNS})
    with sb.create_backend("heap").create_keyed_backend(key_type) as keyed:
        keyed.savepoint(tmp_path / "savepoint")
    check_start(job, COLUMNS, key_type, batches._unopened, options.get("start"), options.get("uid"))


def test_broadcast_rows_may_go_to_a_method_of_one_object(tmp_path: Path) -> None:
    function: Any = Same()
    function.process_broadcast = lambda row, ctx: ()
    made(tmp_path, function, broadcast_when="b")


def test_a_function_without_output_needs_no_sink(tmp_path: Path) -> None:
    made(tmp_path, schema=None, sink=None)


def test_use_clock_refuses_other_objects(tmp_path: Path) -> None:
    clock: Any = sb.testing.ManualClock()
    with pytest.raises(sb.UsageError, match="cannot set the clock of a Same"):
        sb.testing.use_clock(Same(), clock)
    with pytest.raises(sb.UsageError, match="a int is not a clock"):
        sb.testing.use_clock(made(tmp_path), 5)  # type: ignore[arg-type]


@pytest.mark.spark
def test_a_function_that_hosts_cannot_have_is_refused_at_once(tmp_path: Path) -> None:
    lock = threading.Lock()
    counting = sb.map_with_state(lambda row, n: (None, lock and 1), int)
    made(tmp_path, counting)  # copies share the lock
    with pytest.raises(sb.UsageError, match=r"attribute _function \(variable lock\), a lock") as caught:
        made(tmp_path, counting, run_on=sb.spark.Executors(1))
    assert caught.value.code == "USAGE.NOT_COPIED"
