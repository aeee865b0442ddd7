"""Processors on the engine without Spark: their life, times, variables that come and go, hosts, refused calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from host_queries import HostQuery, LocalQuery, executors, rows_out
from processor_pairs import table
from processors import (
    CASES,
    TOTAL,
    Initial,
    Written,
    WrittenInPandas,
    golden_rows,
    golden_timer,
    programme,
    programmed,
    several,
)
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from thread_cluster import batch_of

import statebackend as sb
from statebackend.functions import EngineFrame, PlannedTimes
from statebackend.runtime import BatchSource, Job
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.spark_functions.pandas_calls import PandasProcessorFunction
from statebackend.spark_functions.pandas_frames import FramesOut
from statebackend.spark_functions.processor_calls import ProcessorFunction
from statebackend.testing import Harness

SCHEMA = OutputSchema("k string, text string")
KEY = "struct<k:string>"


def function(processor: Any, mode: str = "None", **options: Any) -> ProcessorFunction:
    in_pandas = isinstance(getattr(processor, "processors", {}).get("times", processor), WrittenInPandas)
    made = PandasProcessorFunction if in_pandas else ProcessorFunction
    return made(processor, key=("k",), output_schema=SCHEMA, time_mode=mode, **options)


def harness(processor: Any, mode: str = "None", **options: Any) -> Harness:
    named = {name: options.pop(name) for name in ("initial_state",) if name in options}
    return Harness(
        function(processor, mode, **named),
        key=["k"],
        schema=SCHEMA.row_type,
        key_type="struct<k:string>",
        **options,
    )


def texts(rows: Any) -> list[str]:
    return sorted(row[1] for row in rows)


# ------------------------------------------------------------------------------------------------ times


def job_of(processor: Any, mode: str, **options: Any) -> Job:
    made = Job(function(processor, mode, **options), key=["k"], schema=SCHEMA.row_type)
    return made.on_frame(EngineFrame(("at", 10_000) if mode == "EventTime" else None))


def timed(*seconds: int) -> pa.Table:
    at = pa.array([1_000 * each for each in seconds], pa.timestamp("ms", "UTC"))
    return pa.table({"k": ["a"] * len(seconds), "n": list(seconds), "at": at})


def planned(query: Any, batch_id: int, rows: pa.Table, times: PlannedTimes, **source: Any) -> list[str]:
    is_local = isinstance(query, LocalQuery)
    incoming = BatchSource(lambda: rows) if is_local else batch_of(rows)
    return texts(rows_out(query.runner.run(batch_id, incoming._replace(times=times), Stopwatch())))


def test_a_round_without_rows_follows_each_batch_that_advances_the_watermark(tmp_path: Path) -> None:
    """As in Spark's batches without rows; the golden sequence without them is a test with Spark."""
    with closing(
        LocalQuery(
            tmp_path,
            job_of(Written({}, golden_rows, golden_timer), "EventTime"),
            "struct<k:string>",
        )
    ) as query:
        times = [PlannedTimes(1, 0, 0, True), PlannedTimes(2, 10_000, 10_000, True)]
        # The row registers a timer at 0, which the batch fires; a round at 10,000 has none.
        assert planned(query, 0, timed(20), times[0]) == ["0", "20"]
        assert planned(query, 1, timed(4, 10, 11, 30), times[1]) == ["10000", "11", "30"]


def test_timers_fire_in_the_round_without_rows(tmp_path: Path) -> None:
    processor = Written(*CASES["EventTime"]["timers_at_event_time"])
    for runs_without_rows, wanted in ((True, ["('fired', 3000, 20000)"]), (False, [])):
        folder = tmp_path / str(runs_without_rows)
        with closing(LocalQuery(folder, job_of(processor, "EventTime"), "struct<k:string>")) as query:
            given = planned(query, 0, timed(3, 30), PlannedTimes(1, 0, 0, runs_without_rows))
            assert [text for text in given if "fired" in text] == wanted


def test_times_are_the_jobs_own_where_no_plan_is_known() -> None:
    with harness(Written(*CASES["ProcessingTime"]["times_of_a_batch"]), "ProcessingTime") as query:
        query.clock.set(5_000)
        assert texts(query.process_batch([{"k": "a", "n": 1}])) == ["(5000, 0)", "0"]


def test_another_watermark_than_the_rows_lead_to_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a filter between ``withWatermark`` and ``foreachBatch``."""
    with closing(
        LocalQuery(tmp_path, job_of(Written(*CASES["EventTime"]["windows"]), "EventTime"), KEY)
    ) as query:
        planned(query, 0, timed(20), PlannedTimes(1, 0, 0, True))
        planned(query, 1, timed(21), PlannedTimes(2, 10_000, 10_000, True))
        assert not caplog.messages
        planned(query, 2, timed(22), PlannedTimes(3, 30_000, 30_000, True))
    assert caplog.messages[0].startswith(
        "the watermark of batch 2 is 30000, and its rows before lead to 11000"
    )


# ------------------------------------------------------------------------------------------------ hosts


@pytest.mark.parametrize("memory", ["256m", 1])
def test_hosts_give_what_one_process_gives(tmp_path: Path, rng: random.Random, memory: str | int) -> None:
    """Programmes with timers and time to live, and an initial state, on two hosts, at once and in pieces."""
    initial = pa.table({"k": [str(key) for key in range(20)], "start": list(range(20))})
    for name, made in (("programmes", programmed("ProcessingTime")), ("initial", Initial())):
        with_initial = {"initial_state": initial} if name == "initial" else {}
        job = job_of(made, "ProcessingTime", **with_initial)
        local = LocalQuery(tmp_path / name / "local", job, "struct<k:string>")
        hosts = HostQuery(
            tmp_path / name / "hosts", job, executors(2, batch_memory=memory), "struct<k:string>"
        )
        with closing(local), closing(hosts):
            for batch_id in range(3):
                keys = [str(rng.randrange(30)) for _ in range(40)]
                rows = pa.table(
                    {"k": keys, "n": [1] * 40, "s": [programme(rng, "ProcessingTime", 4) for _ in keys]}
                )
                # The rows of a key come to a host in no certain order, so each batch has a key once.
                rows = pa.Table.from_pylist(list({row["k"]: row for row in rows.to_pylist()}.values()))
                times = PlannedTimes(5_000 + batch_id, 0, 0)
                assert planned(hosts, batch_id, rows, times) == planned(local, batch_id, rows, times)


# ------------------------------------------------------------------------------------------------ life


class Lived(Written):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__(TOTAL, None, None)
        self.calls: list[str] = []

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.calls.append("init")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.calls.append(key[0])
        yield Row(k=key[0], text=str(self.calls))

    def close(self) -> None:
        self.calls.append("close")


def test_a_processor_is_fresh_in_each_batch() -> None:
    with harness(Lived()) as query:
        for _ in range(2):
            given = query.process_batch([{"k": "b"}, {"k": "a"}])
            assert texts(given) == ["['init', 'a', 'b']", "['init', 'a']"]


def test_a_failed_batch_changes_nothing() -> None:
    def fails(p: Any, key: Any, rows: Any, tv: Any) -> Any:
        total, _ = p.v.get() or (0, 0)
        p.v.update((total + 1, 0))
        yield total
        if any(row.n for row in rows):
            raise SystemExit(3)

    with harness(Written(TOTAL, fails, None)) as query:
        assert texts(query.process_batch([{"k": "a", "n": 0}])) == ["0"]
        with pytest.raises(SystemExit):
            query.process_batch([{"k": "a", "n": 1}])
        assert texts(query.process_batch([{"k": "a", "n": 0}])) == ["1"]


def one_of(variables: dict[str, tuple[Any, ...]], deleted: str | None = None) -> Any:
    class Shown(Written):
        def init(self, handle: Any) -> None:
            if deleted is not None:
                handle.deleteIfExists(deleted)
            super().init(handle)

    def rows_shown(p: Any, key: Any, rows: Any, tv: Any) -> Any:
        for name in variables:
            variable = getattr(p, name)
            yield name, variable.get()
            variable.update((sum(row.n for row in rows),))

    return Shown(variables, rows_shown, None)


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_variables_come_and_go_between_runs(tmp_path: Path, backend: str) -> None:
    """A variable that a run does not ask for stays, until it is deleted."""
    a, b = {"a": ("Value", "n bigint")}, {"b": ("Value", "n bigint")}
    told = []
    for batch_id, processor in enumerate(
        (one_of(a), one_of(b), one_of(a), one_of({}, "a"), one_of(a), one_of({**b}, "not there"))
    ):
        job = Job(function(processor), key=["k"], schema=SCHEMA.row_type, backend=backend)
        with closing(LocalQuery(tmp_path, job, "struct<k:string>")) as query:
            rows = pa.table({"k": ["x"], "n": [batch_id + 1]})
            told.append(texts(rows_out(query.run(batch_id, rows))))
    assert told == [["('a', None)"], ["('b', None)"], ["('a', (1,))"], [], ["('a', None)"], ["('b', (2,))"]]


@pytest.mark.parametrize("made", [Written, WrittenInPandas])
def test_the_backends_give_the_same(rng: random.Random, made: Any) -> None:
    """All written processors on each backend, with restarts."""
    names = sorted(CASES["None"])
    batches = [
        table(
            [{"k": f"{name}:a", "n": rng.randrange(1, 7), "x": 0.5, "s": rng.choice("ab")} for name in names]
        )
        for _ in range(3)
    ]
    told = {}
    for backend in ("heap", "rocksdb", "reference"):
        with harness(several("None", made is WrittenInPandas), backend=backend) as query:
            told[backend] = []
            for rows in batches:
                told[backend].append(texts(query.process_batch(rows)))
                query.restart()
    assert told["heap"] == told["rocksdb"] == told["reference"]


# ------------------------------------------------------------------------------------------------ restarts


def restarted(folder: Path, *jobs: tuple[Any, str, str]) -> list[str]:
    """The rows of a key in one batch of each job, on one store; a processor, its time mode and its output mode."""
    told = []
    for batch_id, (processor, time_mode, output_mode) in enumerate(jobs):
        made = function(processor, time_mode, output_mode=output_mode)
        with closing(LocalQuery(folder, Job(made, key=["k"], schema=SCHEMA.row_type), KEY)) as query:
            rows = pa.table({"k": ["x"], "n": [batch_id + 1]})
            told += planned(query, batch_id, rows, PlannedTimes(1_000 * batch_id, 0, 0))
    return told


VALUE = {"a": ("Value", "n bigint")}


@pytest.mark.parametrize(
    ("first", "then", "code", "text"),
    [
        (
            (VALUE, "None", "Append"),
            (VALUE, "ProcessingTime", "Append"),
            "CONFIG",
            "timeMode from None to Proc",
        ),
        ((VALUE, "None", "Append"), (VALUE, "None", "update"), "CONFIG", "outputMode from Append to Update"),
        (
            (VALUE, "None", "Append"),
            ({"a": ("List", "n bigint")}, "None", "Append"),
            "INCOMPATIBLE",
            "is VALUE of",
        ),
        (
            (VALUE, "None", "Append"),
            ({"a": ("Value", "n string")}, "None", "Append"),
            "INCOMPATIBLE",
            "is VALUE of",
        ),
    ],
    ids=["time mode", "output mode", "kind", "schema"],
)
def test_a_restart_with_something_else_is_refused(
    tmp_path: Path, first: Any, then: Any, code: str, text: str
) -> None:
    jobs = [(one_of(variables), *modes) for variables, *modes in (first, then)]
    with pytest.raises(sb.errors.StateMigrationError, match=text) as caught:
        restarted(tmp_path, *jobs)
    assert caught.value.code == f"STATE_MIGRATION.{code}"
    assert restarted(tmp_path, jobs[0])[1:] == []  # the store is as it was: the batch is a replay


def test_schemas_change_by_the_rules_of_the_library(tmp_path: Path) -> None:
    """A field is added, two are exchanged, and one is widened, as Spark does with Avro."""
    schemas = ("n int", "n int, s string", "s string, n bigint")

    def given(p: Any, key: Any, rows: Any, tv: Any) -> Any:
        yield p.a.get()
        if p.a.get() is None:
            p.a.update((sum(row.n for row in rows),))

    jobs = [(Written({"a": ("Value", each)}, given, None), "None", "Append") for each in schemas]
    assert restarted(tmp_path, *jobs) == ["None", "(1, None)", "(None, 1)"]


def test_a_changed_ttl_holds_for_all_values(tmp_path: Path) -> None:
    """In Spark, for values that are written later."""

    def given(p: Any, key: Any, rows: Any, tv: Any) -> Any:
        yield p.a.get()
        p.a.update((sum(row.n for row in rows),))

    ttls = (600_000, 600_000, 500, None, 500)
    variables = [{"a": ("Value", "n bigint", *([] if ttl is None else [ttl]))} for ttl in ttls]
    jobs = [(Written(each, given, None), "ProcessingTime", "Append") for each in variables]
    assert restarted(tmp_path, *jobs) == ["None", "(1,)", "None", "(3,)", "(4,)"]


# ------------------------------------------------------------------------------------------------ metrics


def test_progress_counts_variables_timers_and_expired_values() -> None:
    variables = {"v": ("Value", "n bigint", 1), "ls": ("List", "n bigint"), "m": ("Map", "n int", "n int")}

    def updates(p: Any, key: Any, rows: Any, tv: Any) -> Any:
        p.v.update((1,))
        p.h.registerTimer(0)
        yield p.h.deleteTimer(5)

    initial = pa.table({"k": ["a"], "start": [1]})
    with harness(
        Written(variables, updates, lambda *given: iter(())), "ProcessingTime", initial_state=initial
    ) as query:
        for key in "abc":
            query.process_batch([{"k": key, "n": 1}])
            query.clock.advance(10)
        found = query.metrics.values()
    assert {name: count for name, count in found.items() if not name.endswith("Ms")} == {
        "numValueStateWithTTLVars": 1,
        "numListStateVars": 1,
        "numMapStateVars": 1,
        "numRegisteredTimers": 3,
        "numDeletedTimers": 3,
        "numExpiredTimers": 3,
        "numValuesRemovedDueToTTLExpiry": 1,
    }
    assert {name for name in found if name.endswith("Ms")} == {
        "initialStateProcessingTimeMs",
        "timerProcessingTimeMs",
    }


# ------------------------------------------------------------------------------------------------ refusals


class Tried(Written):
    """Gives the error of a call in ``init``, or else in the rows."""

    def __init__(self, in_init: Any, in_rows: Any) -> None:
        super().__init__({}, None, None)
        self.in_init, self.in_rows, self.error = in_init, in_rows, None

    def _try(self, call: Any, argument: Any) -> None:
        try:
            call(argument)
        except PySparkRuntimeError as error:
            self.error = f"{error} {isinstance(error, sb.errors.UsageError)}"

    def init(self, handle: Any) -> None:
        super().init(handle)
        if self.in_init is not None:
            self._try(self.in_init, self)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        if self.in_rows is not None:
            self._try(self.in_rows, self)
        yield Row(k=key[0], text=self.error)


def gets(p: Any, *arguments: Any) -> None:
    p.v = p.h.getListState(*arguments)


def deletes(p: Any) -> None:
    gets(p, "v", "n int")
    p.h.deleteIfExists("v")


#: Calls in ``init`` and with rows, the time mode, and a part of the error.
REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "twice": (
        lambda p: [gets(p, "v", "n int") for _ in range(2)],
        None,
        "None",
        "List state v already exists",
    ),
    "spaces": (lambda p: gets(p, " v", "n int"), None, "None", "COLUMN_FAMILY_WITH_INVALID_NAME"),
    "empty": (lambda p: gets(p, "", "n int"), None, "None", "COLUMN_FAMILY_WITH_INVALID_NAME"),
    "default": (lambda p: gets(p, "default", "n int"), None, "None", "COLUMN_FAMILY_WITH_INVALID_NAME"),
    "reserved": (lambda p: gets(p, "$v", "n int"), None, "None", "COLUMN_FAMILY_WITH_RESERVED_CHARS"),
    "ttl": (lambda p: gets(p, "v", "n int", 5), None, "None", "INCORRECT_TIME_MODE_TO_ASSIGN_TTL"),
    "negative": (
        lambda p: gets(p, "v", "n int", -5),
        None,
        "ProcessingTime",
        "TTL_DURATION_MUST_BE_POSITIVE",
    ),
    "late": (None, lambda p: gets(p, "v", "n int"), "None", "INVALID_HANDLE_STATE"),
    "late deletion": (None, lambda p: p.h.deleteIfExists("v"), "None", "INVALID_HANDLE_STATE"),
    "timer": (None, lambda p: p.h.registerTimer(1), "None", "INVALID_TIME_MODE"),
    "listed": (None, lambda p: p.h.listTimers(), "None", "INVALID_TIME_MODE"),
    "early timer": (lambda p: p.h.registerTimer(1), None, "ProcessingTime", "INVALID_HANDLE_STATE"),
    "empty list": (lambda p: gets(p, "v", "n int"), lambda p: p.v.put([]), "None", "EMPTY_LIST_VALUE"),
    "deleted": (deletes, lambda p: p.v.exists(), "None", "List state v is not initialized"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_calls_have_sparks_class_and_our_code(what: str) -> None:
    in_init, in_rows, mode, wanted = REFUSED[what]
    with harness(Tried(in_init, in_rows), mode) as query:
        [row] = query.process_batch([{"k": "a"}])
    assert wanted in row.text
    assert row.text.endswith("[USAGE.PROCESSOR] True")


def test_state_cannot_be_used_before_the_first_batch() -> None:
    def used(p: Any) -> None:
        gets(p, "v", "n int")
        p.v.exists()  # refused when the function is opened; in a batch, there is no key

    with harness(Tried(used, None)) as query, pytest.raises(sb.errors.UsageError, match="current key"):
        query.process_batch([{"k": "a"}])


OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "time mode": (lambda: made_by(time_mode="Other"), "STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE"),
    "output mode": (lambda: made_by(output_mode="Other"), "STREAMING_OUTPUT_MODE.INVALID"),
    "processor": (lambda: made_by(processor=print), "is no StatefulProcessor"),
    "initial state": (lambda: made_by(initial_state=3), "expected a GroupedData"),
    "late": (lambda: made_by(event_time=sb.EventTime("at", late="drop")), r"EventTime\(late=\)"),
    "event time": (lambda: made_by(event_time=3), "event_time is the name of a column"),
}


def made_by(processor: Any = None, **options: Any) -> Any:
    processor = Written({}, None, None) if processor is None else processor
    options = {"key": "k", "output_schema": "k string", "state": "/tmp/state", **options}
    return sb.spark.transform_with_state(processor, **options)


@pytest.mark.parametrize("what", OPTIONS)
def test_wrong_options_are_refused_at_once(what: str) -> None:
    make, text = OPTIONS[what]
    with pytest.raises(sb.errors.UsageError, match=text):
        make()


def test_event_time_needs_a_watermark_of_one_kind() -> None:
    made = function(Written({}, None, None), "EventTime")
    with pytest.raises(sb.errors.UsageError, match="needs a watermark"):
        made.on_frame(EngineFrame())
    own = function(Written({}, None, None), "EventTime", event_time=sb.EventTime("at", watermark_delay=5))
    assert own.on_frame(EngineFrame()).watermark_delay == 5
    with pytest.raises(sb.errors.UsageError, match="the frame has a watermark"):
        own.on_frame(EngineFrame(("at", 5)))
    with pytest.raises(sb.errors.UsageError, match="another column"):
        own.on_frame(EngineFrame(("time", 5)))


# ------------------------------------------------------------------------------------------------ output


def given_by(rows: list[Any], schema: str) -> Any:
    class Gives(Written):
        def handleInputRows(self, key: Any, each: Any, timerValues: Any) -> Any:
            return rows

    made = ProcessorFunction(
        Gives({}, None, None), key=("k",), output_schema=OutputSchema(schema), time_mode="None"
    )
    with Harness(made, key=["k"], schema=schema, key_type="struct<k:string>") as query:
        return query.process_batch([{"k": "a"}])


def test_rows_out_are_taken_by_name() -> None:
    schema = "a int, b string"
    assert given_by([Row(b="x", a=1), Row(a=2), Row(c=3, b="y")], schema) == [
        (1, "x"),
        (2, None),
        (None, "y"),
    ]
    assert given_by([Row("b", "a")("x", 1)], schema) == [(1, "x")]
    assert given_by([Row(b="x", a=1), Row(b="y", a=2)], schema) == [(1, "x"), (2, "y")]
    nested = "a struct<x:int,y:string>, b array<int>"
    assert given_by([Row(a=Row(y="q", x=1), b=[1]), Row(a={"x": 2}, b=None)], nested) == [
        ((1, "q"), [1]),
        ((2, None), None),
    ]


def test_rows_out_that_do_not_fit_fail_the_batch() -> None:
    with pytest.raises(AttributeError):
        given_by([("x", 1)], "a int")
    with pytest.raises(TypeError):
        given_by(None, "a int")  # type: ignore[arg-type]
    with pytest.raises(sb.errors.SerializationError, match="output column 'a'"):
        given_by([Row(a="text")], "a int")
    with pytest.raises(sb.errors.SerializationError, match="output column 'a'"):
        given_by([Row(a=2**40)], "a int")


def test_frames_out_pend_in_one_list_that_callers_hold() -> None:
    """A second list would make each later key a batch of Arrow."""
    out = FramesOut(SCHEMA, "UTC", {})
    pending = out.pending
    for _ in range(2):
        out.take([pd.DataFrame({"k": ["a"], "text": ["x"]})])
        assert len(pending) == 1
        assert [batch.num_rows for batch in out.settled()] == [1]
        assert pending == []
