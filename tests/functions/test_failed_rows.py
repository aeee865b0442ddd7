"""``errors=``: a row whose call fails goes to an output or is dropped, and leaves no trace anywhere else."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from contract.samples import dump
from functions.conftest import each_way

import statebackend as sb
from statebackend.testing import Harness

pytestmark = pytest.mark.usefixtures("either_way")

SCHEMAS = {
    "main": "user string, total bigint, text string, tags array<string>",
    "more": "user string, n bigint",
    "errors": "n bigint, user string, error_class string, error_code string",
}


class Trouble(Exception):
    pass


class Everything(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    """Writes state of all kinds, timers and two outputs, and then fails if the row says so."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.numbers = ctx.get_list_state(sb.ListStateDescriptor("numbers", int))
        self.seen = ctx.get_map_state(sb.MapStateDescriptor("seen", int, str))
        self.last = ctx.get_value_state(sb.ValueStateDescriptor("last", "string"))

    def initialize_state(self, ctx: Any) -> None:
        self.all = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor("all", int))

    def snapshot_state(self, ctx: Any) -> None:
        pass

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.total.add(row.n)
        self.numbers.add(row.n)
        self.seen.put(row.n % 5, "x" * (row.n % 50))
        self.last.update(str(row.n))
        self.all.add(row.n)
        ctx.timer_service().register_processing_time_timer(ctx.now + row.n)
        ctx.output("more", (row.user, row.n))
        yield row.user, self.total.get(), "é" * (row.n % 7), [str(row.n)] * (row.n % 4)
        ctx.current_namespace = row.n
        self.total.add(1_000_000)
        ctx.output("main", (row.user, "a list" if row.odd else 1, None, None))
        if row.fails:
            raise row_error(row.n)
        ctx.current_namespace = sb.VOID

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        if timestamp == 13_000:
            raise Trouble
        yield ctx.current_key, -timestamp, None, None


def row_error(n: int) -> Exception:
    return sb.UsageError("as told") if n % 2 else Trouble("as told")


def batch(rng: random.Random, rows: int) -> pa.Table:
    fails = [rng.random() < 0.3 for _ in range(rows)]
    return pa.table(
        {
            "user": [f"user {rng.randrange(10)}" for _ in range(rows)],
            "n": [rng.randrange(1000) for _ in range(rows)],
            "fails": fails,
            # Where a row does not fail, what it gives must fit.
            "odd": [each and rng.random() < 0.5 for each in fails],
        }
    )


def contents(harness: Harness) -> Any:
    states: Any = harness.keyed._states  # type: ignore[attr-defined]
    held = [dump(harness.keyed, state.descriptor, sorts_maps=True) for _, state in sorted(states.items())]
    everything = harness.operator.get_list_state(sb.ListStateDescriptor("all", int))
    return held, list(harness.keyed.timers.rows()), everything.get()


@each_way
@pytest.mark.parametrize("schema", [SCHEMAS, dict.fromkeys(SCHEMAS)], ids=["in Arrow", "as they are"])
def test_rows_that_fail_leave_nothing_but_their_error(backend: str, schema: Any, rng: random.Random) -> None:
    def harness(**options: Any) -> Harness:
        return Harness(Everything(), key="user", schema=schema, backend=backend, **options)

    with (
        harness(errors=sb.to_output("errors")) as routing,
        harness(errors="drop") as dropping,
        harness() as clean,
    ):
        for number in range(6):
            table = batch(rng, rng.choice([1, 40, 400]))
            good = table.filter(pa.compute.invert(table["fails"]))
            bad = table.filter(table["fails"]).to_pylist()
            given = clean.process_batch(good)
            for surviving in (routing, dropping):
                assert surviving.process_batch(table) == given
                assert surviving.outputs["more"] == clean.outputs["more"]
                assert contents(surviving) == contents(clean)
            assert dropping.outputs["errors"] == []
            errors = [tuple(row) for row in routing.outputs["errors"]]
            described = [
                ("statebackend.errors.UsageError", "USAGE") if row["n"] % 2 else (f"{__name__}.Trouble", None)
                for row in bad
            ]
            rows = [(row["n"], row["user"]) for row in bad]
            if schema is not SCHEMAS:  # all columns of the row, as they are
                rows = [tuple(row.values()) for row in bad]
            assert errors == [(*row, *error) for row, error in zip(rows, described, strict=True)]
            for each in (routing, dropping, clean):
                each.clock.advance(100)
            assert routing._task.rows_failed == dropping._task.rows_failed == len(bad), number


class Fails(sb.KeyedProcessFunction):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.total.add(1)
        if row.n == 1:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        sb.MemoryLimitError("full"),
        sb.StoreError("full"),
        sb.CorruptCheckpointError("damaged"),
        sb.ClosedError("closed"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_that_is_not_the_fault_of_a_row_fails_the_batch(error: BaseException) -> None:
    with Harness(Fails(error), key="user", schema=SCHEMAS, errors=sb.to_output("errors")) as harness:
        with pytest.raises(type(error)):
            harness.process_batch([{"user": "a", "n": 0}, {"user": "a", "n": 1}])
        assert harness.keyed.num_entries() == 0
        assert harness.process_batch([{"user": "a", "n": 0}]) == []


def test_a_timer_that_fails_fails_the_batch() -> None:
    row = {"user": "ann", "n": 13_000, "fails": False, "odd": False}
    with Harness(Everything(), key="user", schema=SCHEMAS, errors=sb.to_output("errors")) as harness:
        harness.process_batch([row])
        with pytest.raises(Trouble):
            harness.advance_processing_time(20_000)
        assert harness.keyed.timers.count("processing") == 1


def test_output_of_errors_needs_columns_of_the_batch() -> None:
    schema = {**SCHEMAS, "errors": "n bigint, missing string, error_class string"}
    with Harness(Everything(), key="user", schema=schema, errors=sb.to_output("errors")) as harness:
        with pytest.raises(sb.UsageError) as caught:
            harness.process_batch([{"user": "ann", "n": 1, "fails": False}])
        assert caught.value.code == "USAGE.NO_COLUMN"


def test_rows_that_have_a_column_of_the_output_are_refused_at_once() -> None:
    class Echo(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            yield (row.user,)

    schemas = {"main": "user string", "errors": "user string, error_class string, error_code string"}
    with (
        Harness(Echo(), key="user", schema=schemas, errors=sb.to_output("errors")) as harness,
        pytest.raises(sb.UsageError, match="the output of errors adds"),
    ):
        harness.process_batch(pa.table({"user": ["ann"], "error_class": ["ValueError"]}))
