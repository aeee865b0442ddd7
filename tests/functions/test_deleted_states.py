"""`ctx.delete_state`: a state is cleared for all keys and namespaces, as part of the batch."""

from __future__ import annotations

from typing import Any

import pytest

import statebackend as sb
from statebackend.testing import Harness

DESCRIPTORS: dict[str, Any] = {
    "value": sb.ValueStateDescriptor("value", str),
    "list": sb.ListStateDescriptor("list", int),
    "map": sb.MapStateDescriptor("map", str, int),
    "reducing": sb.ReducingStateDescriptor("reducing", "sum", int),
    "aggregating": sb.AggregatingStateDescriptor("aggregating", "avg", int),
    "folding": sb.FoldingStateDescriptor("folding", "", lambda folded, value: f"{folded}{value}", str),
}


class Deleting(sb.KeyedProcessFunction):
    """Writes all states in two namespaces; a row may delete one of them, and fail."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.states = {name: ctx.get_state(descriptor) for name, descriptor in DESCRIPTORS.items()}

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        if row.delete is not None:
            ctx.current_namespace = "here"
            ctx.delete_state(row.delete)
            assert (ctx.current_key, ctx.current_namespace) == (row.user, "here")
            if row.fails:
                raise ValueError("as told")
            return
        for namespace in (sb.VOID, sb.TimeWindow(0, 10)):
            ctx.current_namespace = namespace
            self.states["value"].update("x")
            self.states["map"].put("a", 1)
            for name in ("list", "reducing", "aggregating", "folding"):
                self.states[name].add(1)


def row(user: str, delete: str | None = None, fails: bool = False) -> dict[str, Any]:
    return {"user": user, "delete": delete, "fails": fails}


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
@pytest.mark.parametrize("name", list(DESCRIPTORS))
def test_a_state_is_cleared_for_all_keys_and_namespaces(backend: str, name: str) -> None:
    with Harness(Deleting(), key="user", backend=backend) as harness:
        harness.process_batch([row(user) for user in ("ann", "bob", "cid")])
        counts = {each: harness.keyed.num_entries(each) for each in DESCRIPTORS}
        assert counts == dict.fromkeys(DESCRIPTORS, 6)
        with pytest.raises(ValueError, match="as told"):
            harness.process_batch([row("ann", name, True)])
        assert {each: harness.keyed.num_entries(each) for each in DESCRIPTORS} == counts
        harness.process_batch([row("ann", name)])
        expected = {**counts, name: 0}
        assert {each: harness.keyed.num_entries(each) for each in DESCRIPTORS} == expected
        harness.restart()
        harness.process_batch([row("dan")])
        assert harness.keyed.num_entries(name) == 2
        assert list(harness.keyed.keys(name)) == ["dan"]


def test_it_may_be_called_when_the_function_is_opened() -> None:
    class Without(Deleting):
        def open(self, ctx: sb.FunctionContext) -> None:
            super().open(ctx)
            if opened:
                ctx.delete_state("list")
            opened.append(1)

    opened: list[int] = []
    with Harness(Without(), key="user") as harness:
        harness.process_batch([row("ann"), row("bob")])
        assert harness.keyed.num_entries("list") == 4
        harness.restart()
        harness.process_batch([row("cid", "map")])
        assert harness.keyed.num_entries("list") == 0
        assert harness.keyed.num_entries("value") == 4


def test_a_state_must_have_been_asked_for() -> None:
    with Harness(Deleting(), key="user") as harness:
        with pytest.raises(sb.UsageError) as caught:
            harness.process_batch([row("ann", "nothing")])
        assert caught.value.code == "USAGE.NO_STATE"
        assert "'value'" in str(caught.value.detail)


@pytest.mark.parametrize("characteristic", ["processing", "event"])
@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_expired_values_are_deleted_too(backend: str, characteristic: str) -> None:
    """A longer time to live, which needs no migration, would bring it back."""
    lifetime = [10]

    class Marks(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            ttl = sb.StateTtlConfig.new_builder(lifetime[0])
            if characteristic == "event":
                ttl.set_ttl_time_characteristic(sb.StateTtlConfig.TtlTimeCharacteristic.EventTime)
            descriptor = sb.ValueStateDescriptor("mark", int).enable_time_to_live(ttl.build())
            self.mark = ctx.get_value_state(descriptor)

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            if row.do == "put":
                self.mark.update(1)
            elif row.do == "delete":
                ctx.delete_state("mark")
            yield (self.mark.value(),)

    def rows(do: str, *users: str, at: int) -> list[dict[str, Any]]:
        return [{"user": user, "do": do, "at": at} for user in users]

    options: dict[str, Any] = {"event_time": "at"} if characteristic == "event" else {}
    with Harness(Marks(), key="user", backend=backend, **options) as harness:
        harness.process_batch(rows("put", "ann", "bob", at=1_000))
        harness.clock.advance(100)
        harness.process_batch(rows("delete", "zoe", at=1_100))
        lifetime[0] = 10**9
        harness.restart()
        assert harness.process_batch(rows("get", "ann", "bob", at=1_200)) == [(None,), (None,)]
        assert harness.keyed.num_entries("mark") == 0
