"""Typical mistakes of users: each message alone leads to the right fix.

``python tests/house/test_mistakes.py`` prints the messages alone, for readers who judge them.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.checkpoint.store.sealed import seal, unseal
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_identity import plan_identity
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.spark import Driver, EventTime, Executors, StartFrom
from statebackend.testing import Harness

ROW = {"user": "ann", "n": 3, "at": 5_000}
SCHEMA = "user string, n bigint"
TOTAL = sb.ValueStateDescriptor("total", "bigint")
TEXT = sb.ValueStateDescriptor("total", "string")
LIST = sb.ListStateDescriptor("total", "int")
PAIR = sb.ValueStateDescriptor("stats", "struct<count:int,sum:double>")
PRICES = sb.MapStateDescriptor("prices", "string", "decimal(9,2)")
SEEN = sb.ValueStateDescriptor("seen", "timestamp")
LOCK = threading.Lock()


class Function(sb.KeyedProcessFunction):
    """Asks for states, and handles a row by a call."""

    def __init__(self, step: Callable[..., Any], *states: sb.StateDescriptor) -> None:
        self.step, self.declared = step, states

    def open(self, ctx: sb.FunctionContext) -> None:
        self.states = [state_of(ctx, each) for each in self.declared]

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield from self.step(row, ctx, *self.states) or ()


class Whole(sb.BatchProcessFunction):
    def process_batch(self, batch: Any, ctx: sb.FunctionContext) -> Any:
        return pa.table({"user": batch["user"], "total": batch["n"]})


def state_of(owner: Any, descriptor: sb.StateDescriptor) -> Any:
    return getattr(owner, f"get_{descriptor.kind}_state".replace("_value", ""))(descriptor)


def count(row: Any, ctx: Any, total: Any) -> Any:
    total.update((total.value() or 0) + 1)
    return [(row.user, total.value())]


def nothing(*_: Any) -> None:
    return None


def timer(row: Any, ctx: Any) -> None:
    ctx.timer_service().register_event_time_timer(row.at + 1000)


def a_batch(
    step: Any, *states: sb.StateDescriptor, rows: Any = (ROW,), key: str = "user", **options: Any
) -> Callable[[Path], Any]:
    def call(_: Path) -> None:
        function = step if isinstance(step, Whole) else Function(step, *states)
        with Harness(function, key=key, **options) as harness:
            harness.process_batch(rows if isinstance(rows, pa.Table) else list(rows))

    return call


def a_job(**options: Any) -> Callable[[Path], Any]:
    options = {"key": "user", "schema": SCHEMA, "sink": print, "function": Function(nothing), **options}
    return lambda folder: sb.spark.stateful(**{"state": folder / "state", **options})


def a_backend(step: Callable[[Any], Any], key_type: str = "string", **options: Any) -> Callable[[Path], Any]:
    def call(_: Path) -> None:
        with sb.create_backend("heap", **options).create_keyed_backend(key_type) as keyed:
            step(keyed)

    return call


def a_state(descriptor: sb.StateDescriptor, step: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def call(keyed: Any) -> None:
        state = state_of(keyed, descriptor)
        keyed.set_current_key("ann")
        step(state)

    return a_backend(call)


def fill(keyed: Any) -> None:
    state = keyed.get_state(TEXT)
    for each in range(100_000):
        keyed.set_current_key(str(each))
        state.update("x" * 100)


def use_after_close(keyed: Any) -> None:
    state = keyed.get_state(TOTAL)
    keyed.close()
    state.value()


@contextlib.contextmanager
def running(
    folder: Path,
    *states: sb.StateDescriptor,
    step: Any = count,
    key: str = "user",
    key_type: str = "string",
    groups: int = 128,
    query: str = "orders",
) -> Iterator[Callable[..., None]]:
    """A job whose batches run as Spark would run them; the offset of a batch is its number plus ``shift``."""
    job = Job(Function(step, *(states or (TOTAL,))), key=key, schema=SCHEMA, max_parallelism=groups)
    runner = Runner(job, sb.CheckpointStore(folder / "state"), sb.types.of(key_type), query=query)

    def run(batch_id: int, shift: int = 0) -> None:
        plan = plan_identity(0, [{"offset": batch_id + shift}])
        runner.run(batch_id, BatchSource(lambda: pa.table({"user": ["ann"], "n": [1]}), plan), Stopwatch())

    with contextlib.closing(runner):
        yield run


def restart(
    *states: sb.StateDescriptor, batch: int = 3, shift: int = 0, between: Any = nothing, **options: Any
) -> Callable[[Path], Any]:
    """Three batches, and then another start of the job."""

    def call(folder: Path) -> None:
        with running(folder) as run:
            for each in range(3):
                run(each)
        between(folder)
        with running(folder, *states, **options) as run:
            run(batch, shift)

    return call


def damage(folder: Path) -> None:
    for file in (folder / "state" / "data").rglob("*.arrow"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        file.write_bytes(bytes(data))


def upgrade(folder: Path) -> None:
    file = folder / "state" / "metadata.json"
    file.write_bytes(seal({**unseal(file.read_bytes(), file.name), "format": 3}))


def two_at_once(folder: Path) -> None:
    with running(folder) as run, running(folder) as other:
        run(0)
        other(1)


def rewind(folder: Path) -> None:
    sb.tools.rewind(folder / "state", to=17, checkpoint_location=None)


late = sb.to_output("late")
twice = pa.table([["ann"], [1], [2]], names=["user", "n", "n"])
between = EventTime("at", timers="between_rows")

#: What a user did, and parts of the message that lead to the fix.
MISTAKES: dict[str, tuple[Any, ...]] = {
    # types
    "a type that does not exist": (lambda _: sb.ValueStateDescriptor("n", "integre"), "'integre'", "bigint"),
    "a struct as a dict": (lambda _: sb.ValueStateDescriptor("n", {"a": int}), "dict", "Spark DDL"),
    "a text into a number": (a_state(TOTAL, lambda it: it.update("3")), "state 'total'", "LONG", "str"),
    "a number too large": (a_state(LIST, lambda it: it.add(2**40)), "state 'total'", "INT (32 bits)"),
    "a float into a decimal": (
        a_state(PRICES, lambda it: it.put("a", 1.5)),
        "'prices'",
        "use decimal.Decimal",
    ),
    "too few fields": (a_state(PAIR, lambda it: it.update((1,))), "'stats'", "with 1 field", "count, sum"),
    "a wrong field": (a_state(PAIR, lambda it: it.update({"count": 1, "summ": 2.0})), "without sum"),
    "a naive datetime": (
        a_state(SEEN, lambda it: it.update(datetime.datetime(2024, 1, 1))),
        "value.replace(tzinfo=",
        "TIMESTAMP_NTZ",
    ),
    "a key of another type": (a_backend(lambda keyed: keyed.set_current_key(5)), "STRING", "int"),
    "a key of no type for keys": (a_backend(nothing, "map<string,int>"), "MAP cannot be a key type"),
    "no key is set": (a_backend(lambda keyed: keyed.get_state(TOTAL).value()), "set_current_key(key) first"),
    # names
    "a typo in a state's name": (restart(sb.ValueStateDescriptor("totl", "bigint")), "'totl'", "'total'"),
    "a typo in a field": (a_batch(lambda row, ctx: [(row.amuont,)]), "'amuont'", "user, n, at"),
    "two states of one name": (a_batch(nothing, TOTAL, LIST), "VALUE(LONG)", "LIST(INT)", "another name"),
    "a typo in a backend": (a_job(backend="rocks"), "'rocks'", "'rocksdb'"),
    "a typo in an output": (a_job(sink={"mian": print}), "'mian'", "main"),
    "a typo in a column": (a_batch(nothing, key="usr"), "'usr'", "user, n, at"),
    "a duplicate column": (a_batch(nothing, rows=twice), "columns n", "rename"),
    # outputs
    "a field too many": (a_batch(lambda row, ctx: [(1, 2, 3)], schema=SCHEMA), "3 fields", "2: user, n"),
    "a row of a wrong type": (a_batch(lambda row, ctx: [("a", "3")], schema=SCHEMA), "'n'", "LONG", "str"),
    "a row that is no tuple": (a_batch(lambda row, ctx: [5], schema=SCHEMA), "is a int", "yield tuples"),
    "a row returned": (a_batch(lambda row, ctx: ("a", 1), schema=SCHEMA), "yielded, not returned"),
    "a schema without a comma": (a_job(schema="user string n bigint"), "'n'", "user string, n bigint"),
    "no sink": (a_job(sink=None), "output 'main'", "give each output a sink"),
    "a sink of one parameter": (a_job(sink=lambda frame: None), "def sink(df, batch_id)"),
    "an output without a schema": (
        a_batch(lambda row, ctx: ctx.output("late", (1,)), schema=SCHEMA),
        "'late'",
        "name it in schema=",
    ),
    "a column of another name": (a_batch(Whole(), schema=SCHEMA), "user, total", "user, n"),
    # time
    "an event timer without event time": (a_batch(timer), "event_time="),
    "a wrong unit of a duration": (lambda _: sb.StateTtlConfig("10 minuts"), "'10 minuts'", "minutes"),
    "a duration without a unit": (
        lambda _: EventTime("at", watermark_delay="10"),
        "watermark_delay",
        "units",
    ),
    "a wrong unit of a size": (lambda _: Driver(batch_memory="512 megs"), "batch_memory", "512m"),
    "a TTL of zero": (lambda _: sb.StateTtlConfig(0), "less than 1 ms", "ttl"),
    "an event time of text": (
        a_batch(nothing, rows=[{**ROW, "at": "12:00"}], event_time="at"),
        "'at' is string",
        "timestamps",
    ),
    "timers between batches": (a_job(function=Whole(), event_time=between), "for a KeyedProcessFunction"),
    "late rows to no output": (
        a_job(event_time=EventTime("at", late=late)),
        "output 'late'",
        "name it in schema=",
    ),
    # functions and options
    "a class, no object": (a_job(function=Function), "the class itself", "Function()"),
    "a lock in a function": (
        a_job(function=Function(lambda *_: LOCK), run_on=Executors(2)),
        "a lock",
        "open()",
    ),
    "a null key": (a_batch(nothing, rows=[ROW, {**ROW, "user": None}]), "'user'", "null_keys='drop'"),
    "an object after close": (a_backend(use_after_close), "closed", "create a new backend"),
    "too many hosts": (a_job(run_on=Executors(200)), "Executors(200)", "pass fewer hosts"),
    "memory at its limit": (a_backend(fill, max_bytes="1m"), "state 'total'", "raise max_bytes"),
    # a start with stored state
    "another query's state": (restart(query="invoices"), "another query", "its own store"),
    "two live queries": (two_at_once, "another", "state"),
    "another type of a state": (restart(TEXT, step=nothing), "VALUE of bigint", "VALUE(STRING)"),
    "another kind of state": (restart(LIST, step=nothing), "LIST(INT)", "another name"),
    "another type of key": (restart(key_type="bigint"), "string there, bigint here"),
    "another key column": (restart(key="n"), "user there, n here", "key="),
    "another max_parallelism": (restart(groups=64), "max_parallelism", "128 there, 64 here"),
    "a moved store": (
        restart(between=lambda folder: (folder / "state").rename(folder / "old")),
        "state was removed, or its path changed",
    ),
    "an old checkpointLocation": (restart(batch=1), "the stream is behind state", "sb.tools.rewind"),
    "an old copy of the store": (restart(batch=9), "state is behind the stream", "checkpointLocation"),
    "other rows in a batch": (restart(batch=2, shift=5), "planned the batch again", "sb.tools.rewind"),
    "StartFrom the own store": (
        lambda it: a_job(start=StartFrom(it / "state"))(it),
        "give state= a new path",
    ),
    # stores
    "a folder that is no store": (lambda folder: sb.tools.verify(folder / "empty"), "no checkpoint"),
    "a checkpoint that is gone": (restart(between=rewind), "no checkpoint 17", "there are: 0, 1, 2"),
    "a damaged file": (restart(between=damage), "checksum", "sb.tools.verify"),
    "a newer format": (restart(between=upgrade), "format 3; expected format 2", "version of the library"),
}


def message(name: str, folder: Path) -> str:
    try:
        MISTAKES[name][0](folder)
    except (sb.StateBackendError, AttributeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", MISTAKES)
def test_message_names_the_fix_of_a_typical_mistake(name: str, tmp_path: Path) -> None:
    said = message(name, tmp_path)
    assert [part for part in MISTAKES[name][1:] if part not in said] == [], said


if __name__ == "__main__":
    for number, name in enumerate(MISTAKES, 1):
        with tempfile.TemporaryDirectory() as made:
            print(f"{number}. {message(name, Path(made)).replace(made, '/data')}\n")
