"""Functions with state, run by the harness on the real backends: rows, batches, broadcast rows, failures, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from stateful_functions import Buffering, Total

import statebackend as sb
from statebackend.testing import Harness, InjectedFault

pytestmark = pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])


def rows(*pairs: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [{"user": user, "amount": amount} for user, amount in pairs]


class Recorder(sb.KeyedProcessFunction):
    log: list[str]

    def __init__(self) -> None:
        self.rows = 0

    def open(self, ctx: sb.FunctionContext) -> None:
        Recorder.log.append("open")

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rows += 1
        Recorder.log.append(f"row {self.rows} of batch {ctx.batch_id}")
        if row.fails:
            raise RuntimeError("as told")

    def close(self) -> None:
        Recorder.log.append("close")


def test_a_fresh_copy_follows_a_failure_and_every_copy_is_closed(backend: str) -> None:
    Recorder.log = []
    function = Recorder()
    with Harness(function, key="id", backend=backend) as harness:
        harness.process_element({"id": 1, "fails": False})
        with pytest.raises(RuntimeError, match="as told"):
            harness.process_element({"id": 1, "fails": True})
        harness.process_element({"id": 1, "fails": False})
    first = ["open", "row 1 of batch 0", "row 2 of batch 1", "close"]
    assert Recorder.log == [*first, "open", "row 1 of batch 1", "close"]
    assert function.rows == 0, "the object that was given stays as it is"


class FailsToOpen(Total):
    fails = True

    def open(self, ctx: sb.FunctionContext) -> None:
        super().open(ctx)
        if FailsToOpen.fails:
            raise ConnectionError("not there yet")


def test_a_function_that_could_not_be_opened_is_opened_again(backend: str) -> None:
    FailsToOpen.fails = True
    with Harness(FailsToOpen(), key="user", backend=backend) as harness:
        with pytest.raises(ConnectionError):
            harness.process_element({"user": "a", "amount": 1})
        FailsToOpen.fails = False
        assert harness.process_element({"user": "a", "amount": 1}) == [("a", 1)]


def test_operator_state_outlives_a_failure_and_nothing_doubles(backend: str) -> None:
    with Harness(Buffering(), key="n", backend=backend) as harness:
        assert harness.process_batch([{"n": n} for n in (1, 2, 3, 4)]) == [(1, 2, 3)]
        with pytest.raises(ValueError, match="negative"):
            harness.process_batch([{"n": n} for n in (5, 6, 7, -1)])
        assert harness.process_batch([{"n": n} for n in (5, 6)]) == [(4, 5, 6)]


class Rules(sb.KeyedProcessFunction):
    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        try:
            _ = ctx.current_key
        except sb.UsageError:
            self.rules(ctx).put(row.user, row.amount)
            yield "rule", row.amount

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        if row.amount > self.rules(ctx).get("limit"):
            yield row.user, row.amount

    def rules(self, ctx: sb.FunctionContext) -> sb.BroadcastState:
        return ctx.operator_backend.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))


def test_broadcast_rows_go_first_and_have_no_key(backend: str) -> None:
    table = pa.table(
        {"user": ["a", "limit", "b"], "amount": [9, 5, 4], "is_rule": pa.array([None, True, False])}
    )
    with Harness(Rules(), key="user", broadcast_when="is_rule", backend=backend) as harness:
        assert harness.process_batch(table) == [("rule", 5), ("a", 9)]
        assert harness.process_batch(table.slice(2)) == []
        rule = pa.table({"user": [None, "a"], "amount": [1, 3], "is_rule": [True, False]})
        with pytest.raises(sb.SerializationError):
            harness.process_batch(rule)  # a broadcast row may have a null key, but a rule may not
        assert harness.process_batch(table.slice(0, 2)) == [("rule", 5), ("a", 9)]


def test_rows_are_sorted_as_spark_sorts(backend: str) -> None:
    order = sb.map_with_state(lambda row, n: ((row.id,), None), int)
    nan = float("nan")
    table = pa.table({"id": list(range(6)), "at": [nan, 2.0, None, 1.0, 2.0, float("inf")]})
    with Harness(order, key="id", order_by="at", backend=backend) as harness:
        assert [row[0] for row in harness.process_batch(table)] == [2, 3, 1, 4, 5, 0]


def test_null_keys_fail_before_anything_or_go_where_the_rule_says(backend: str) -> None:
    table = pa.table({"user": ["a", None], "amount": [1, 2]})
    with Harness(Total(), key="user", backend=backend) as harness:
        with pytest.raises(sb.SerializationTypeError, match="1 of 2 rows") as caught:
            harness.process_batch(table)
        assert caught.value.code == "SERIALIZATION.NULL_KEY"
    with Harness(Total(), key="user", backend=backend, null_keys="drop") as harness:
        assert harness.process_batch(table) == [("a", 1)]
    schema = {"totals": None, "nobody": "amount bigint"}
    aside = sb.to_output("nobody")
    with Harness(Total(), key="user", schema=schema, backend=backend, null_keys=aside) as harness:
        assert harness.process_batch(table) == [("a", 1)]
        assert [tuple(row) for row in harness.outputs["nobody"]] == [(2,)]


def test_a_composite_key_may_have_null_fields(backend: str) -> None:
    function = sb.map_with_state(lambda row, n: ((row.a, row.b, (n or 0) + 1), (n or 0) + 1), int)
    table = pa.table({"a": [1, 1, None, 1], "b": ["x", None, "x", "x"]})
    with Harness(function, key=["a", "b"], backend=backend, key_type="struct<a:bigint,b:string>") as harness:
        given = harness.process_batch(table)
        assert given == [(1, "x", 1), (1, None, 1), (None, "x", 1), (1, "x", 2)]


class Namespaced(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.seen = ctx.get_value_state(sb.ValueStateDescriptor("seen", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield self.seen.value(), str(ctx.current_namespace)
        ctx.current_namespace = "elsewhere"
        self.seen.update(row.n)


def test_key_and_namespace_do_not_pass_from_batch_to_batch(backend: str) -> None:
    with Harness(Namespaced(), key="id", backend=backend) as harness:
        assert harness.process_element({"id": 1, "n": 5}) == harness.process_element({"id": 1, "n": 6})


class Sums(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.sum = ctx.get_reducing_state(sb.ReducingStateDescriptor("sum", "sum", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        users, sums, _ = self.sum.add_many(ctx.keys, batch["amount"], return_changed=True)
        if batch.num_rows == 1:
            raise ValueError("one row")
        return pa.record_batch({"user": users, "sum": sums})


def test_a_batch_function_works_on_whole_columns(backend: str) -> None:
    with Harness(Sums(), key="user", schema="user string, sum bigint", backend=backend) as harness:
        assert sorted(harness.process_batch(rows(("a", 1), ("b", 5), ("a", 2)))) == [("a", 3), ("b", 5)]
        with pytest.raises(ValueError, match="one row"):
            harness.process_batch(rows(("a", 1)))
        empty = pa.table({"user": pa.array([], "string"), "amount": pa.array([], "int64")})
        assert harness.process_batch(empty) == []
        assert harness.process_batch(rows(("a", 1), ("a", 1))) == [("a", 5)]


def test_functions_without_the_other_methods_say_so(backend: str) -> None:
    class Registering(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
            ctx.timer_service().register_processing_time_timer(0)

    table = pa.table({"user": ["a", "b"], "rule": [False, True]})
    with Harness(Registering(), key="user", broadcast_when="rule", backend=backend) as harness:
        with pytest.raises(NotImplementedError, match="Registering registers timers but lacks on_timer"):
            harness.process_batch(table.slice(0, 1))
        with pytest.raises(NotImplementedError, match="Registering lacks process_broadcast"):
            harness.process_batch(table)


def test_column_that_a_batch_lacks_is_refused(backend: str) -> None:
    with Harness(Total(), key="nobody", backend=backend) as harness:
        with pytest.raises(sb.UsageError, match="lacks the column 'nobody'"):
            harness.process_batch(rows(("a", 1)))
        assert harness.process_element({"nobody": "a", "amount": 1}) == [("a", 1)]


def test_a_column_that_comes_twice_is_refused(backend: str) -> None:
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array([1]), pa.array([2])], ["user", "amount", "amount"]
    )
    with (
        Harness(Total(), key="user", backend=backend) as harness,
        pytest.raises(sb.UsageError, match="same name"),
    ):
        harness.process_batch(table)


def test_a_function_that_cannot_be_copied_is_refused_with_a_reason(backend: str) -> None:
    class Locked(Total):
        def __init__(self) -> None:
            self.generator = (n for n in range(3))

    with pytest.raises(sb.UsageError, match=r"attribute generator, a generator.*in open"):
        Harness(Locked(), key="user", backend=backend)


def test_the_first_batch_tells_the_type_of_the_key(backend: str) -> None:
    with Harness(Total(), key="user", backend=backend) as harness:
        with pytest.raises(sb.UsageError, match="type of the key is unknown.*key_type="):
            _ = harness.keyed
        assert harness.advance_processing_time(5) == []
        with pytest.raises(sb.SerializationError, match="a key is null"):
            harness.process_element({"user": None, "amount": 1})
        harness.process_element({"user": "a", "amount": 1})
        for step in (harness.process_element, lambda row: harness.process_batch([row])):
            with pytest.raises(sb.UsageError, match="key is of type LONG; expected STRING, as in the first"):
                step({"user": 1, "amount": 1})
        assert list(harness.keyed.keys("total")) == ["a"]
    with Harness(Total(), key="user", key_type="int", backend=backend) as harness:
        assert harness.process_element({"user": 1, "amount": 1}) == [(1, 1)]


def test_a_fault_after_the_commit_is_followed_by_a_replay(backend: str) -> None:
    with Harness(Total(), key="user", backend=backend) as harness:
        for point, wanted in (("function", 1), ("commit", 2)):
            harness.fail_after(point)
            with pytest.raises(InjectedFault, match=point):
                harness.process_element({"user": "a", "amount": 1})
            harness.restart()
            assert harness.process_element({"user": "a", "amount": 1}) == [("a", wanted)]
        assert harness.process_element({"user": "a", "amount": 1}) == [("a", 3)]
        with pytest.raises(sb.UsageError, match="unknown point 'sink'; expected 'function' or 'commit'"):
            harness.fail_after("sink")


def test_a_restart_between_any_two_steps_changes_nothing(backend: str) -> None:
    with Harness(Total(), key="user", backend=backend) as harness:
        given = []
        for user, amount in [("a", 1), ("b", 5), ("a", 2), ("b", 1), ("a", 3)]:
            given += harness.process_element({"user": user, "amount": amount})
            harness.restart()
        assert given == [("a", 1), ("b", 5), ("a", 3), ("b", 6), ("a", 6)]


def test_back_to_an_older_checkpoint_and_on_from_there(backend: str) -> None:
    with Harness(Total(), key="user", backend=backend) as harness:
        harness.process_element({"user": "a", "amount": 1})
        older = harness.snapshot()
        harness.process_element({"user": "a", "amount": 10})
        newer = harness.snapshot()
        harness.restore(older)
        assert harness.process_element({"user": "a", "amount": 100}) == [("a", 101)]
        third = harness.snapshot()
        harness.restore(newer)
        assert harness.process_element({"user": "a", "amount": 100}) == [("a", 111)]
        harness.restore(third)
        assert harness.process_element({"user": "a", "amount": 100}) == [("a", 201)]


class Restored(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    def initialize_state(self, ctx: Any) -> None:
        self.restored = ctx.is_restored, ctx.restored_checkpoint_id

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield self.restored

    def snapshot_state(self, ctx: Any) -> None:
        pass


def test_a_function_is_told_whether_it_was_restored(backend: str) -> None:
    with Harness(Restored(), key="id", backend=backend) as harness:
        assert harness.process_element({"id": 1}) == [(False, None)]
        harness.restart()
        assert harness.process_element({"id": 1}) == [(True, 0)]
