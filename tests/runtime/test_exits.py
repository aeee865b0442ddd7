"""Code of a job that raises an exit, such as `SystemExit`, instead of an error: the batch fails and nothing changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery, LocalQuery, rows_out

import statebackend as sb
from statebackend.runtime import Job, execution
from statebackend.testing import Harness


class Leave(BaseException):
    """An exit of the user's own."""


EXITS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError, Leave)
#: The calls of a function, each with an exit.
CALLS = [
    ("open", KeyboardInterrupt),
    ("initialize_state", asyncio.CancelledError),
    ("process_element", Leave),
    ("generator", asyncio.CancelledError),
    ("process_broadcast", KeyboardInterrupt),
    ("on_timer", SystemExit),
    ("snapshot_state", Leave),
    ("process_batch", KeyboardInterrupt),
]
ROWS = pa.table({"user": ["ann", "bob"], "n": [1, 2], "rule": [False, False]})
RULE = pa.table({"user": ["ann", "bob"], "n": [1, 2], "rule": [False, True]})

#: The calls that raise, once each, and those that have.
armed: dict[str, BaseException] = {}
raised: list[str] = []


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    armed.clear()
    raised.clear()
    yield
    armed.clear()


def called(name: str) -> None:
    if name in armed:
        raised.append(name)
        raise armed.pop(name)


class Total(sb.KeyedProcessFunction, sb.CheckpointedFunction, sb.CheckpointListener):
    def open(self, ctx: sb.FunctionContext) -> None:
        called("open")
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def initialize_state(self, ctx: Any) -> None:
        called("initialize_state")
        self.rules = ctx.operator_state_store.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rules.put(row.user, row.n)
        called("process_broadcast")

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.total.add(row.n)
        ctx.timer_service().register_processing_time_timer(ctx.now)
        called("process_element")
        yield row.user, self.total.get()
        called("generator")

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> None:
        called("on_timer")

    def snapshot_state(self, ctx: Any) -> None:
        called("snapshot_state")

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        called("notify_checkpoint_complete")

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        called("notify_checkpoint_aborted")

    def close(self) -> None:
        called("close")


class Totals(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        keys = batch.column("user")
        self.total.add_many(keys, batch.column("n"))
        called("process_batch")
        return pa.record_batch({"user": keys, "total": self.total.get_many(keys)})


def job(call: str) -> Job:
    if call == "process_batch":
        return Job(Totals(), key="user", schema="user string, total bigint")
    return Job(Total(), key="user", schema="user string, total bigint", broadcast_when="rule")


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Callable[[Job], HostQuery]]:
    """Makes a query over a host."""
    queries: list[HostQuery] = []

    def make(of: Job) -> HostQuery:
        queries.append(HostQuery(tmp_path, of, 1))
        return queries[-1]

    yield make
    armed.clear()
    for each in queries:
        each.close()


@pytest.mark.parametrize(("call", "kind"), CALLS)
def test_batch_of_hosts_changes_nothing_when_a_call_raises_an_exit(
    query: Callable[[Job], HostQuery], call: str, kind: type[BaseException]
) -> None:
    over = query(job(call))
    is_first = call in ("open", "initialize_state")
    if not is_first:
        over.run(0, ROWS)
    next_id = 0 if is_first else 1
    armed[call] = kind("as told")
    with pytest.raises(sb.HostError) as caught:
        over.run(next_id, RULE if call == "process_broadcast" else ROWS)
    assert raised == [call], "it is called once"
    assert caught.value.code == "HOST.FUNCTION"
    assert caught.value.message == f"{kind.__name__}: as told"
    assert not over.cluster.ended, "no host is lost"
    assert over.store.latest() == (None if is_first else 0)
    totals = {"ann": 1, "bob": 2} if is_first else {"ann": 2, "bob": 4}
    assert dict(rows_out(over.run(next_id, ROWS))) == totals


@pytest.mark.parametrize(
    ("kind", "is_host"), [(KeyboardInterrupt, True), (ValueError, True), (ValueError, False)]
)
def test_commit_stands_when_a_listener_fails(
    tmp_path: Path, query: Callable[[Job], HostQuery], kind: type[BaseException], is_host: bool
) -> None:
    """On a host, or in the driver."""
    used: Any = query(job("")) if is_host else LocalQuery(tmp_path, job(""))
    armed["notify_checkpoint_complete"] = kind("as told")
    match = f"{kind.__name__}: as told" if is_host else "as told"
    with pytest.raises(sb.HostError if is_host else kind, match=match):
        used.run(0, ROWS)
    assert used.store.latest() == 0
    assert dict(rows_out(used.run(1, ROWS))) == {"ann": 2, "bob": 4}
    assert not is_host or not used.cluster.ended, "no host is lost"
    used.close()


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, Leave])
@pytest.mark.parametrize("call", ["close", "notify_checkpoint_aborted"])
def test_error_of_a_batch_is_raised_when_its_clean_up_raises_an_exit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    kind: type[BaseException],
) -> None:
    query = LocalQuery(tmp_path, job(call))
    query.run(0, ROWS)

    def full(*arguments: Any) -> Any:
        raise sb.StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(execution, "sizes", full)  # once the snapshot is taken
        armed[call] = kind("as told")
        with pytest.raises(sb.StoreError, match="the disk is full"), caplog.at_level(logging.WARNING):
            query.run(1, ROWS)
    assert raised == [call]
    assert f"{call} failed" in caplog.text
    assert dict(rows_out(query.run(1, ROWS))) == {"ann": 2, "bob": 4}
    query.close()


def harness_of_total() -> Harness:
    return Harness(Total(), key="user", schema="user string, total bigint", broadcast_when="rule")


@pytest.mark.parametrize("kind", EXITS)
def test_backend_is_closed_when_close_raises_an_exit(kind: type[BaseException]) -> None:
    harness = harness_of_total()
    harness.process_batch(ROWS)
    armed["close"] = kind("as told")
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            harness.close()
    else:
        harness.close()
    with pytest.raises(sb.ClosedError):
        harness.keyed.set_current_key("ann")


@pytest.mark.parametrize("kind", EXITS)
def test_harness_raises_an_exit_as_it_is(kind: type[BaseException]) -> None:
    """Test frameworks raise such to fail, skip or time out, and the user to interrupt."""
    with harness_of_total() as harness:
        harness.process_batch(ROWS)
        armed["generator"] = kind("as told")
        with pytest.raises(kind) as caught:
            harness.process_batch(ROWS)
        assert type(caught.value) is kind
        assert dict(harness.process_batch(ROWS)) == {"ann": 2, "bob": 4}
